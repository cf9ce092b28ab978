//! The numbers of the enums and the capabilities in the C table. A number never changes.

use crate::{
    AtomicsMode, BlasKind, Capabilities, CaptureMode, Completion, DataType, DeviceMemoryKind, Epilogue, ErrorKind,
    HostMemoryKind, MathMode, RangeKind, StreamId, StreamPriority, Transport,
};

/// A named number of the header.
#[derive(Debug, Clone, Copy)]
pub struct Constant {
    /// Its name, without `HW_`.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
    /// Its name in the traits.
    pub rust: &'static str,
}

/// An enum that has a number for each value.
pub trait Coded: Copy + 'static {
    /// Every value. Other crates must match these enums with a wildcard, so their tests iterate over this list.
    const ALL: &'static [Self];
    /// The name of the enum in words.
    const WHAT: &'static str;
    /// Returns the number of the value.
    fn code(self) -> u32;
    /// Returns the value with this number, if there is one.
    fn of(code: u32) -> Option<Self>;
}

macro_rules! coded {
    ($($type:ident $what:literal { $($variant:ident $name:literal = $code:literal),+ $(,)? })+) => {
        $(impl Coded for $type {
            const ALL: &'static [Self] = &[$(Self::$variant),+];
            const WHAT: &'static str = $what;

            #[inline]
            fn code(self) -> u32 {
                match self { $(Self::$variant => $code),+ }
            }

            #[inline]
            fn of(code: u32) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)+ _ => None }
            }
        })+

        /// The numbers of the values of each enum.
        pub const CHOICES: &[(&str, &[Constant])] = &[
            $(($what, &[$(Constant { name: $name, value: $code, rust: stringify!($variant) }),+])),+
        ];
    };
}

coded! {
    ErrorKind "an answer's code" {
        InvalidArgument "ERROR_INVALID_ARGUMENT" = 1,
        InvalidHandle "ERROR_INVALID_HANDLE" = 2,
        InvalidPointer "ERROR_INVALID_POINTER" = 3,
        WrongDevice "ERROR_WRONG_DEVICE" = 4,
        Unsupported "ERROR_UNSUPPORTED" = 5,
        OutOfMemory "ERROR_OUT_OF_MEMORY" = 6,
        LibraryMissing "ERROR_LIBRARY_MISSING" = 7,
        SymbolMissing "ERROR_SYMBOL_MISSING" = 8,
        DeviceMissing "ERROR_DEVICE_MISSING" = 9,
        UnknownBackend "ERROR_UNKNOWN_BACKEND" = 10,
        Capture "ERROR_CAPTURE" = 11,
        InvalidState "ERROR_INVALID_STATE" = 12,
        DeviceLost "ERROR_DEVICE_LOST" = 13,
        ShuttingDown "ERROR_SHUTTING_DOWN" = 14,
        Forked "ERROR_FORKED" = 15,
        PeerLost "ERROR_PEER_LOST" = 16,
        Expired "ERROR_EXPIRED" = 17,
        OperatingSystem "ERROR_OPERATING_SYSTEM" = 18,
        PermissionDenied "ERROR_PERMISSION_DENIED" = 19,
        Vendor "ERROR_VENDOR" = 20,
    }
    StreamPriority "a stream's priority" {
        Normal "STREAM_PRIORITY_NORMAL" = 0,
        Low "STREAM_PRIORITY_LOW" = 1,
        High "STREAM_PRIORITY_HIGH" = 2,
    }
    Completion "an answer to \"is it done?\"" {
        Complete "COMPLETE" = 0,
        Pending "PENDING" = 1,
    }
    CaptureMode "a capture's mode" {
        ThreadLocal "CAPTURE_THREAD_LOCAL" = 0,
        Global "CAPTURE_GLOBAL" = 1,
        Relaxed "CAPTURE_RELAXED" = 2,
    }
    HostMemoryKind "a kind of page-locked memory" {
        Default "HOST_MEMORY_DEFAULT" = 0,
        WriteCombined "HOST_MEMORY_WRITE_COMBINED" = 1,
    }
    Transport "a way in which memory is shared" {
        Legacy "TRANSPORT_LEGACY" = 0,
        Descriptor "TRANSPORT_DESCRIPTOR" = 1,
        Fabric "TRANSPORT_FABRIC" = 2,
    }
    RangeKind "a kind of memory that any code allocated" {
        Plain "RANGE_PLAIN" = 0,
        Mapped "RANGE_MAPPED" = 1,
        StreamOrdered "RANGE_STREAM_ORDERED" = 2,
        Managed "RANGE_MANAGED" = 3,
    }
    BlasKind "a kind of handle" {
        Blas "BLAS_KIND_BLAS" = 0,
        Lt "BLAS_KIND_LT" = 1,
    }
    MathMode "a precision of 32-bit products" {
        Default "MATH_MODE_DEFAULT" = 0,
        Tf32 "MATH_MODE_TF32" = 1,
    }
    AtomicsMode "an atomics mode" {
        NotAllowed "ATOMICS_MODE_NOT_ALLOWED" = 0,
        Allowed "ATOMICS_MODE_ALLOWED" = 1,
    }
    DataType "an element type" {
        F32 "DATA_TYPE_F32" = 0,
        F64 "DATA_TYPE_F64" = 1,
        F16 "DATA_TYPE_F16" = 2,
        Bf16 "DATA_TYPE_BF16" = 3,
    }
    Epilogue "what a plan does after the product" {
        None "EPILOGUE_NONE" = 0,
        Bias "EPILOGUE_BIAS" = 1,
        BiasRelu "EPILOGUE_BIAS_RELU" = 2,
        Relu "EPILOGUE_RELU" = 3,
        Gelu "EPILOGUE_GELU" = 4,
        BiasGelu "EPILOGUE_BIAS_GELU" = 5,
    }
}

/// The number of [`DeviceMemoryKind::Plain`].
pub const MEMORY_PLAIN: u32 = 0;
/// The number of [`DeviceMemoryKind::Shareable`].
pub const MEMORY_SHAREABLE: u32 = 1;
/// The number of [`DeviceMemoryKind::StreamOrdered`].
pub const MEMORY_STREAM_ORDERED: u32 = 2;

/// Returns the number of a kind of device memory, and the values that it carries.
#[must_use]
pub const fn split_kind(kind: DeviceMemoryKind) -> (u32, Option<Transport>, Option<StreamId>) {
    match kind {
        DeviceMemoryKind::Plain => (MEMORY_PLAIN, None, None),
        DeviceMemoryKind::Shareable(transport) => (MEMORY_SHAREABLE, Some(transport), None),
        DeviceMemoryKind::StreamOrdered(stream) => (MEMORY_STREAM_ORDERED, None, Some(stream)),
    }
}

macro_rules! bits {
    ($($(#[$doc:meta])* $set:ident $on:ident { $($field:ident $name:literal = $bit:literal),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $set;

        impl $set {
            /// Every bit by its name.
            pub const NAMES: &'static [Constant] = &[$(Constant { name: $name, value: 1 << $bit, rust: stringify!($field) }),+];

            /// Returns the set of the fields that are true.
            pub fn of(capabilities: &Capabilities) -> u64 {
                0 $(| u64::from(capabilities.$field) << $bit)+
            }

            /// Sets the fields in the set to true and the others to false.
            pub fn put(set: u64, capabilities: &mut Capabilities) {
                $(capabilities.$field = set & 1 << $bit != 0;)+
            }
        }
    )+};
}

bits! {
    /// The abilities of a device as bits.
    Abilities abilities {
        gemm_f32 "CAN_GEMM_F32" = 0,
        gemm_f64 "CAN_GEMM_F64" = 1,
        gemm_f16 "CAN_GEMM_F16" = 2,
        gemm_bf16 "CAN_GEMM_BF16" = 3,
        gemm_mixed "CAN_GEMM_MIXED" = 4,
        tf32 "CAN_TF32" = 5,
        atomics_mode "CAN_ATOMICS_MODE" = 6,
        blas_workspace "CAN_BLAS_WORKSPACE" = 7,
        strided_batch "CAN_STRIDED_BATCH" = 8,
        lt_plans "CAN_LT_PLANS" = 9,
        capture "CAN_CAPTURE" = 10,
        stream_ordered_memory "CAN_STREAM_ORDERED_MEMORY" = 11,
        shareable_memory "CAN_SHAREABLE_MEMORY" = 12,
        interprocess_events "CAN_INTERPROCESS_EVENTS" = 13,
        event_timing "CAN_EVENT_TIMING" = 14,
        stream_priority "CAN_STREAM_PRIORITY" = 15,
        peer_copy "CAN_PEER_COPY" = 16,
        host_register "CAN_HOST_REGISTER" = 17,
        write_combined "CAN_WRITE_COMBINED" = 18,
        legacy_default_stream "CAN_LEGACY_DEFAULT_STREAM" = 19,
        per_thread_default_stream "CAN_PER_THREAD_DEFAULT_STREAM" = 20,
        foreign_objects "CAN_FOREIGN_OBJECTS" = 21,
        mapped_memory "CAN_MAPPED_MEMORY" = 22,
        mapped_memory_rdma "CAN_MAPPED_MEMORY_RDMA" = 23,
        host_register_read_only "CAN_HOST_REGISTER_READ_ONLY" = 24,
        foreign_memory "CAN_FOREIGN_MEMORY" = 25,
    }
    /// The facts about a device as bits.
    Facts facts {
        set_stream_resets_workspace "FACT_SET_STREAM_RESETS_WORKSPACE" = 0,
        handle_per_stream "FACT_HANDLE_PER_STREAM" = 1,
        create_during_capture "FACT_CREATE_DURING_CAPTURE" = 2,
        host_address_is_device_address "FACT_HOST_ADDRESS_IS_DEVICE_ADDRESS" = 3,
        pinned_cached_by_device "FACT_PINNED_CACHED_BY_DEVICE" = 4,
        event_waits_end_with_peer "FACT_EVENT_WAITS_END_WITH_PEER" = 5,
        lt_handle_per_stream "FACT_LT_HANDLE_PER_STREAM" = 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn numbers_come_back_and_others_are_refused() {
        for code in 1..=20 {
            assert_eq!(ErrorKind::of(code).unwrap().code(), code);
        }
        assert!(ErrorKind::of(0).is_none() && ErrorKind::of(21).is_none());
        assert!(DataType::of(4).is_none() && Epilogue::of(u32::MAX).is_none());
    }

    #[test]
    fn no_name_and_no_number_stands_twice() {
        let mut names = HashSet::new();
        for (what, constants) in CHOICES {
            let mut values = HashSet::new();
            for Constant { name, value, .. } in *constants {
                assert!(names.insert(*name) && values.insert(*value), "{what}: {name}");
            }
        }
        for set in [Abilities::NAMES, Facts::NAMES] {
            let bits: u64 = set.iter().fold(0, |bits, constant| bits | constant.value);
            assert_eq!(bits.count_ones() as usize, set.len());
        }
    }

    #[test]
    fn every_ability_and_fact_of_a_device_has_its_bit() {
        let text = format!("{:?}", Capabilities::none());
        let fields = text.matches(": true").count() + text.matches(": false").count();
        assert_eq!(fields, Abilities::NAMES.len() + Facts::NAMES.len());
        let mut every = Capabilities::none();
        Abilities::put(u64::MAX, &mut every);
        Facts::put(u64::MAX, &mut every);
        assert!(!format!("{every:?}").contains(": false"));
        assert_eq!(Abilities::of(&every).count_ones() as usize, Abilities::NAMES.len());
        assert_eq!(Facts::of(&every).count_ones() as usize, Facts::NAMES.len());
    }
}
