//! The behavior of HIP and hipBLAS as data. The numbers are those of AMD's headers; `abi_check.rs` checks them.

use highwater_driver::{
    AtomicsModes, ComputeCodes, EventFlags, HostFlags, Quirks, RawStream, TransposeCodes, TypeCodes,
};

/// The work is not done yet.
pub(crate) const NOT_READY: i32 = 600;
/// The installation has no device.
pub(crate) const NO_DEVICE: i32 = 100;
/// The device does not exist.
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const PEER_ACCESS_UNSUPPORTED: i32 = 217;
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: i32 = 704;
/// The directions of a copy of rows.
pub(crate) const MEMCPY_HOST_TO_DEVICE: u32 = 1;
pub(crate) const MEMCPY_DEVICE_TO_HOST: u32 = 2;
pub(crate) const MEMCPY_DEVICE_TO_DEVICE: u32 = 3;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const CAPTURE_INVALIDATED: i32 = 901;
pub(crate) const CAPTURE_UNJOINED: i32 = 904;

pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const PER_THREAD_STREAM: RawStream = RawStream(2);
pub(crate) const EVENT_NO_TIMING: u32 = 2;
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
/// According to AMD's manual, makes a device's writes visible to the whole system when the event is reached. In clr 6.4.3, the
/// flag has no effect: every record releases to the system unless the flag 0x2000_0000 disables that (`hip_event.cpp`).
pub(crate) const EVENT_RELEASE_TO_SYSTEM: u32 = 0x8000_0000;
pub(crate) const HOST_PORTABLE: u32 = 1;
pub(crate) const HOST_MAPPED: u32 = 2;
pub(crate) const HOST_WRITE_COMBINED: u32 = 4;
/// Lets the device cache the memory. By default, HIP allocates memory that the device does not cache.
pub(crate) const HOST_NON_COHERENT: u32 = 0x8000_0000;
pub(crate) const REGISTER_PORTABLE: u32 = 1;
pub(crate) const REGISTER_MAPPED: u32 = 2;
pub(crate) const REGISTER_READ_ONLY: u32 = 8;
/// The only accepted value since HIP 6.
pub(crate) const IPC_LAZY_PEER_ACCESS: u32 = 1;
/// HIP 7.2.4 puts the owner's ordinal into the handle, and refuses it where no device has that ordinal.
const IPC_OPEN_HINT: &str = "pass the exported handle unchanged; let both processes see the same devices in the same order \
                             (`ROCR_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES`), because HIP 7 opens a handle only where the owner's \
                             ordinal exists";
pub(crate) const POOL_RELEASE_THRESHOLD: u32 = 4;

/// Numbers of hipBLAS.
pub(crate) const OP_N: i32 = 111;
pub(crate) const OP_T: i32 = 112;
pub(crate) const GEMM_DEFAULT: i32 = 160;
pub(crate) const R_32F: i32 = 0;
pub(crate) const R_64F: i32 = 1;
pub(crate) const R_16F: i32 = 2;
pub(crate) const R_16BF: i32 = 14;
pub(crate) const COMPUTE_32F: i32 = 2;
pub(crate) const COMPUTE_32F_FAST_TF32: i32 = 6;
pub(crate) const COMPUTE_64F: i32 = 7;
pub(crate) const ATOMICS_NOT_ALLOWED: u32 = 0;
pub(crate) const ATOMICS_ALLOWED: u32 = 1;

const COMMON: Quirks = Quirks {
    legacy_stream: RawStream::NULL,
    per_thread_stream: PER_THREAD_STREAM,
    not_ready: NOT_READY,
    out_of_memory: OUT_OF_MEMORY,
    no_elapsed_time: INVALID_HANDLE,
    stream_flags: STREAM_NON_BLOCKING,
    event_flags: EventFlags {
        plain: EVENT_NO_TIMING | EVENT_RELEASE_TO_SYSTEM,
        timing: EVENT_RELEASE_TO_SYSTEM,
        interprocess: EVENT_NO_TIMING | EVENT_INTERPROCESS | EVENT_RELEASE_TO_SYSTEM,
    },
    host_flags: HostFlags {
        default: HOST_PORTABLE | HOST_MAPPED | HOST_NON_COHERENT,
        write_combined: HOST_PORTABLE | HOST_MAPPED | HOST_WRITE_COMBINED,
    },
    register_flags: REGISTER_PORTABLE | REGISTER_MAPPED,
    register_read_only_flag: REGISTER_READ_ONLY,
    ipc_open_flag: IPC_LAZY_PEER_ACCESS,
    ipc_open_hint: Some(IPC_OPEN_HINT),
    pool_release_threshold: POOL_RELEASE_THRESHOLD,
    transpose_codes: TransposeCodes { no: OP_N, yes: OP_T },
    type_codes: TypeCodes { f16: R_16F, bf16: R_16BF, f32: R_32F, f64: R_64F },
    compute_codes: ComputeCodes { f32: COMPUTE_32F, tf32: COMPUTE_32F_FAST_TF32, f64: COMPUTE_64F },
    default_algorithm: GEMM_DEFAULT,
    // A handle accepts one further mode, which showed no effect.
    math_modes: None,
    atomics_modes: AtomicsModes { not_allowed: ATOMICS_NOT_ALLOWED, allowed: ATOMICS_ALLOWED },
    atomics_allowed_at_first: false,
    set_stream_resets_workspace: false,
    streams_die_after: &[CAPTURE_INVALIDATED, CAPTURE_UNJOINED],
    events_follow_streams: true,
    rows_anywhere: false,
};

/// hipBLAS 2, whose new handles allow atomics, and hipBLAS 3, whose new handles do not.
pub(crate) static HIPBLAS_2: Quirks = Quirks { atomics_allowed_at_first: true, ..COMMON };
pub(crate) static HIPBLAS_3: Quirks = COMMON;

/// Returns the quirks of the hipBLAS that works with a major version of HIP.
pub(crate) const fn of_hip(major: u32) -> &'static Quirks {
    if major <= 6 { &HIPBLAS_2 } else { &HIPBLAS_3 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::blas_symbol;

    /// HIP has three flags for the scope of a record. In clr 6.4.3, only the flag that disables the release has an effect.
    #[test]
    fn r3_23_a_record_releases_to_the_system() {
        const DISABLE_SYSTEM_FENCE: u32 = 0x2000_0000;
        const RELEASE_TO_DEVICE: u32 = 0x4000_0000;
        for quirks in [&HIPBLAS_2, &HIPBLAS_3] {
            let EventFlags { plain, timing, interprocess } = quirks.event_flags;
            for flags in [plain, timing, interprocess] {
                assert_eq!(flags & (DISABLE_SYSTEM_FENCE | RELEASE_TO_DEVICE), 0, "{flags:#x}");
            }
        }
    }

    #[test]
    fn the_symbols_that_take_the_new_numbers_are_chosen_by_the_version() {
        let chosen = |major| {
            let symbols =
                ["GemmEx", "GemmStridedBatchedEx", "GemmEx_64", "SetStream"].map(|name| blas_symbol(major, name));
            (symbols, of_hip(major).atomics_allowed_at_first)
        };
        let seven = ["hipblasGemmEx", "hipblasGemmStridedBatchedEx", "hipblasGemmEx_64", "hipblasSetStream"];
        let six = ["hipblasGemmEx_v2", "hipblasGemmStridedBatchedEx_v2", "hipblasGemmEx_v2_64", "hipblasSetStream"];
        assert_eq!(chosen(7), (seven.map(str::to_owned), false));
        assert_eq!(chosen(6), (six.map(str::to_owned), true));
    }
}
