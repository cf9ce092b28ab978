//! What one vendor has of its own: the trait [`Platform`], and its behaviour as data.

use std::fmt;
use std::sync::Arc;

use super::calls::{BlasCalls, Calls};
use super::captures::Captures;
use super::codes::Codes;
use super::raw::{RawBlas, RawStream};
use super::state::DriverState;
use highwater_hal::{
    BlasHandle, Capabilities, DataType, DeviceInfo, DevicePtr, Error, Identity, MathMode, MemoryHandle, Result,
    Transport, Transpose,
};

/// Flags of events.
#[derive(Debug, Clone, Copy)]
pub struct EventFlags {
    /// Of an event without timing.
    pub plain: u32,
    /// Of an event with timing.
    pub timing: u32,
    /// Of an event that other processes can open.
    pub interprocess: u32,
}

/// Flags of page-locked memory.
#[derive(Debug, Clone, Copy)]
pub struct HostFlags {
    /// Of memory that the CPU caches.
    pub default: u32,
    /// Of write-combined memory.
    pub write_combined: u32,
}

/// Numbers of the operations on a factor, which both vendors name `OP_N` and `OP_T`.
#[derive(Debug, Clone, Copy)]
pub struct TransposeCodes {
    /// The factor as it is stored.
    pub no: i32,
    /// The transposed factor.
    pub yes: i32,
}

/// Numbers of the element types, which both vendors name `R_16F`, `R_16BF`, `R_32F` and `R_64F`.
#[derive(Debug, Clone, Copy)]
pub struct TypeCodes {
    /// IEEE half precision.
    pub f16: i32,
    /// Brain floating point.
    pub bf16: i32,
    /// Single precision.
    pub f32: i32,
    /// Double precision.
    pub f64: i32,
}

/// Numbers of the compute types, which both vendors name `COMPUTE_32F`, `COMPUTE_32F_FAST_TF32` and `COMPUTE_64F`.
#[derive(Debug, Clone, Copy)]
pub struct ComputeCodes {
    /// Single precision.
    pub f32: i32,
    /// Single precision with factors rounded to TF32.
    pub tf32: i32,
    /// Double precision.
    pub f64: i32,
}

/// Numbers of the math modes of a BLAS handle.
#[derive(Debug, Clone, Copy)]
pub struct MathModes {
    /// Full precision. A new handle gets this mode unless it is 0.
    pub full: u32,
    /// TF32.
    pub tf32: u32,
}

/// Numbers of the atomics modes of a BLAS handle.
#[derive(Debug, Clone, Copy)]
pub struct AtomicsModes {
    /// Kernels give the same result in each run.
    pub not_allowed: u32,
    /// Kernels may add with atomics.
    pub allowed: u32,
}

/// How a vendor behaves, as data. Each field is named for the behaviour.
#[derive(Debug, Clone, Copy)]
pub struct Quirks {
    /// The handle of the legacy default stream.
    pub legacy_stream: RawStream,
    /// The handle of the per-thread default stream.
    pub per_thread_stream: RawStream,
    /// The code of "not done yet".
    pub not_ready: i32,
    /// The code of exhausted memory.
    pub out_of_memory: i32,
    /// The code of elapsed times that cannot be had, because an event has no timing or was never recorded.
    pub no_elapsed_time: i32,
    /// Flags of every stream.
    pub stream_flags: u32,
    /// Flags of events.
    pub event_flags: EventFlags,
    /// Flags of page-locked memory.
    pub host_flags: HostFlags,
    /// Flags of memory that is page-locked where it is.
    pub register_flags: u32,
    /// Flag with which memory of other processes is opened.
    pub ipc_open_flag: u32,
    /// Attribute of a pool: bytes that it keeps when it is idle.
    pub pool_release_threshold: u32,
    /// Numbers of the operations on a factor.
    pub transpose_codes: TransposeCodes,
    /// Numbers of the element types.
    pub type_codes: TypeCodes,
    /// Numbers of the compute types.
    pub compute_codes: ComputeCodes,
    /// Number of the default algorithm.
    pub default_algorithm: i32,
    /// The handle's math modes; `None` if the compute type of each product selects the precision instead.
    pub math_modes: Option<MathModes>,
    /// Numbers of the atomics modes.
    pub atomics_modes: AtomicsModes,
    /// Whether a fresh handle may add with atomics.
    pub atomics_allowed_at_first: bool,
    /// Whether binding a stream puts a handle back on its own workspace.
    pub set_stream_resets_workspace: bool,
    /// The code with which a capture ends that has taken its streams with it, where streams die with a lost capture.
    pub capture_loss_kills_streams: Option<i32>,
}

impl Quirks {
    /// Returns the number of an element type.
    #[must_use]
    pub const fn type_code(&self, data_type: DataType) -> i32 {
        match data_type {
            DataType::F16 => self.type_codes.f16,
            DataType::Bf16 => self.type_codes.bf16,
            DataType::F32 => self.type_codes.f32,
            DataType::F64 => self.type_codes.f64,
            // The device's capabilities allow no type that this crate does not know.
            _ => -1,
        }
    }

    /// How sums of products of `factor` are computed: the result's type does not matter, since halves accumulate in 32
    /// bits whatever they are stored as.
    pub(super) const fn compute_code(&self, factor: DataType, mode: MathMode) -> i32 {
        match (factor, mode) {
            (DataType::F64, _) => self.compute_codes.f64,
            (DataType::F32, MathMode::Tf32) if self.math_modes.is_none() => self.compute_codes.tf32,
            _ => self.compute_codes.f32,
        }
    }

    /// Returns the number of the operation on a factor.
    #[must_use]
    pub const fn transpose_code(&self, transpose: Transpose) -> i32 {
        match transpose {
            Transpose::No => self.transpose_codes.no,
            Transpose::Yes => self.transpose_codes.yes,
        }
    }
}

/// A vendor's BLAS.
#[derive(Debug, Clone, Copy)]
pub struct Blas {
    /// What both vendors have alike.
    pub calls: BlasCalls,
    /// What its codes mean.
    pub codes: &'static Codes,
}

/// Settings that a platform reads from a fresh BLAS handle; `None` for a setting that the library lacks.
pub type BlasSettings = [Option<i32>; 6];

/// Memory that other processes can open by a descriptor or over a fabric: what was made for it.
#[derive(Debug)]
pub struct SharedBlock {
    /// Where it is mapped.
    pub address: DevicePtr,
    /// The vendor's own number for the allocation.
    pub allocation: u64,
    /// Bytes that were mapped: what was asked for, rounded up.
    pub bytes: usize,
}

/// A vendor, as the driver room sees it: its table of calls, the meaning of its codes, its behaviour as data, and what
/// only it has.
///
/// # Safety
/// The room frees memory by the answers of these calls. So the calls are the vendor's own, with the arguments that the
/// table declares, and keep what the vendor's manual promises of streams, events and copies.
pub unsafe trait Platform: Send + Sync + fmt::Debug + Sized + 'static {
    /// What makes current again what was before.
    type Previous: Copy + fmt::Debug;

    /// The calls of the driver.
    fn calls(&self) -> &Calls;

    /// What the driver's codes mean.
    fn codes(&self) -> &'static Codes;

    /// How the vendor behaves.
    fn quirks(&self) -> &'static Quirks;

    /// The BLAS.
    fn blas(&self) -> &Blas;

    /// A device that is in use already, for calls that want some device and do not care which: a context takes memory of its
    /// device. The first where none is in use.
    fn device_in_use(&self) -> u32 {
        0
    }

    /// Makes `device` current in this thread; the answer goes to [`Platform::restore`] where something was changed.
    ///
    /// # Errors
    /// The vendor's code.
    fn make_current(&self, device: u32) -> Result<Option<Self::Previous>, i32>;

    /// Makes current again what was before.
    fn restore(&self, previous: Self::Previous);

    /// Lets `device` use memory of `peer` directly. Called once for a pair; the device is current.
    ///
    /// # Errors
    /// The vendor's code. That it was so already is no error.
    fn enable_peer_access(&self, device: u32, peer: u32) -> Result<(), i32>;

    /// Enqueues a copy from one device to another and answers with the vendor's code.
    ///
    /// # Safety
    /// As [`Backend::copy`](highwater_hal::Backend::copy).
    unsafe fn memcpy_peer_async(
        &self,
        dst: (u32, DevicePtr),
        src: (u32, DevicePtr),
        bytes: usize,
        stream: RawStream,
    ) -> i32;

    /// Whether `stream`, which other code made, is one of `device`.
    ///
    /// # Safety
    /// The stream is alive.
    ///
    /// # Errors
    /// The vendor's code.
    unsafe fn stream_is_of(&self, stream: RawStream, device: u32) -> Result<bool, i32>;

    /// Allocates memory that can be shared by a descriptor or over a fabric; the device is current.
    ///
    /// # Errors
    /// `Unsupported` where there is no such memory; else what the vendor gives.
    fn allocate_shared(&self, device: u32, transport: Transport, bytes: usize) -> Result<SharedBlock> {
        let _ = (device, transport, bytes);
        Err(Error::lacks("allocate", "ipc_transports"))
    }

    /// Frees what [`Platform::allocate_shared`] or [`Platform::open_shared`] gave.
    ///
    /// # Errors
    /// What the vendor gives.
    ///
    /// # Safety
    /// Nothing uses the block any more.
    unsafe fn free_shared(&self, operation: &'static str, block: &SharedBlock) -> Result<()> {
        let _ = block;
        Err(Error::lacks(operation, "ipc_transports"))
    }

    /// Makes a handle of memory that [`Platform::allocate_shared`] gave.
    ///
    /// # Errors
    /// What the vendor gives.
    fn export_shared(&self, block: &SharedBlock, transport: Transport, handle: MemoryHandle) -> Result<MemoryHandle> {
        let _ = (block, transport, handle);
        Err(Error::lacks("export_memory", "ipc_transports"))
    }

    /// Opens what [`Platform::export_shared`] made, for `device`, which is current.
    ///
    /// # Errors
    /// `InvalidArgument` for a handle that cannot be one; else what the vendor gives.
    fn open_shared(&self, device: u32, handle: &MemoryHandle) -> Result<SharedBlock> {
        let _ = (device, handle);
        Err(Error::lacks("open_memory", "ipc_transports"))
    }

    /// What stands in the way of BLAS handles of `device`, where the vendor would not say it by a code.
    ///
    /// # Errors
    /// `Unsupported`, with what is missing and where it was looked for.
    fn may_create_blas(&self, device: u32) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// Reads the settings of a fresh BLAS handle that only this vendor has, for [`Platform::restore_blas`].
    fn blas_settings(&self, handle: RawBlas) -> BlasSettings {
        let _ = handle;
        BlasSettings::default()
    }

    /// Restores these settings after changes by other code.
    ///
    /// # Errors
    /// The vendor's code.
    fn restore_blas(&self, handle: RawBlas, fresh: &BlasSettings) -> Result<(), i32> {
        let _ = (handle, fresh);
        Ok(())
    }

    /// Makes a handle for Lt plans.
    ///
    /// # Errors
    /// `Unsupported` where the vendor has none; else what the vendor gives.
    fn create_lt(state: &Arc<DriverState<Self>>, device: u32) -> Result<Box<dyn BlasHandle>> {
        let _ = (state, device);
        Err(Error::lacks("create_blas_handle", "lt_plans"))
    }
}

/// What a vendor crate found out when it opened: who it is, and its devices.
#[derive(Debug)]
pub struct Opened<P> {
    /// The vendor.
    pub platform: P,
    /// Who the backend is; its tag is that of every id.
    pub identity: Identity,
    /// The devices, by ordinal.
    pub devices: Vec<(DeviceInfo, Capabilities)>,
    /// The captures in the vendor's library: the same for every backend over it.
    pub captures: Arc<Captures>,
}
