//! The operations of the mock: the calls that are counted, and can be made to fail.

use std::fmt;
use std::str::FromStr;

use highwater_hal::{Error, ErrorKind, Result, display_foreign};

macro_rules! operations {
    ($($variant:ident $name:literal,)*) => {
        /// A trait method of the mock, by name. The methods of `HostAllocator` carry the prefix `host_`; all others are
        /// named as in their trait.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Operation {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name, as faults and errors have it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

operations! {
    DeviceInfo "device_info",
    Capabilities "capabilities",
    MemoryInfo "memory_info",
    CreateStream "create_stream",
    DestroyStream "destroy_stream",
    QueryStream "query_stream",
    SynchronizeStream "synchronize_stream",
    SynchronizeDevice "synchronize_device",
    StreamWaitEvent "stream_wait_event",
    CreateEvent "create_event",
    DestroyEvent "destroy_event",
    RecordEvent "record_event",
    QueryEvent "query_event",
    SynchronizeEvent "synchronize_event",
    EventElapsedNs "event_elapsed_ns",
    Allocate "allocate",
    Free "free",
    Copy "copy",
    Fill "fill",
    BeginCapture "begin_capture",
    EndCapture "end_capture",
    IsCapturing "is_capturing",
    InstantiateGraph "instantiate_graph",
    LaunchGraph "launch_graph",
    DestroyGraph "destroy_graph",
    DestroyGraphExec "destroy_graph_exec",
    RawStream "raw_stream",
    StreamFromRaw "stream_from_raw",
    RawEvent "raw_event",
    EventFromRaw "event_from_raw",
    CreateBlasHandle "create_blas_handle",
    SetStream "set_stream",
    SetWorkspace "set_workspace",
    SetMathMode "set_math_mode",
    SetAtomicsMode "set_atomics_mode",
    Gemm "gemm",
    CreatePlan "create_plan",
    RunPlan "run_plan",
    DestroyPlan "destroy_plan",
    Destroy "destroy",
    Reset "reset",
    HostAllocate "host_allocate",
    HostFree "host_free",
    HostRegister "host_register",
    HostUnregister "host_unregister",
    HostDeviceAddress "host_device_address",
    ExportMemory "export_memory",
    OpenMemory "open_memory",
    CloseMemory "close_memory",
    ExportEvent "export_event",
    OpenEvent "open_event",
}

const COUNT: usize = Operation::ALL.len();
// The armed operations are a set of bits in one word.
const _: () = assert!(COUNT <= 64);

impl Operation {
    /// How the operation fails when a fault does not say: makers of things run out of memory, the others have the
    /// vendor fail.
    #[must_use]
    pub const fn usual_failure(self) -> ErrorKind {
        match self {
            Self::Allocate
            | Self::HostAllocate
            | Self::CreateBlasHandle
            | Self::CreateStream
            | Self::CreateEvent
            | Self::ExportMemory
            | Self::OpenMemory
            | Self::ExportEvent
            | Self::OpenEvent => ErrorKind::OutOfMemory,
            _ => ErrorKind::Vendor,
        }
    }

    /// An error of this operation.
    #[cold]
    pub(crate) fn error(self, kind: ErrorKind, message: impl Into<String>) -> Error {
        Error::new(kind, self.name(), message)
    }

    /// `Unsupported`, because the ability is false.
    #[cold]
    pub(crate) fn lacks(self, ability: &str) -> Error {
        Error::lacks(self.name(), ability)
    }

    pub(crate) const fn bit(self) -> u64 {
        1 << self as u32
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl AsRef<str> for Operation {
    fn as_ref(&self) -> &str {
        self.name()
    }
}

impl FromStr for Operation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|operation| operation.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|operation| operation.name()).collect();
            Error::new(
                ErrorKind::InvalidArgument,
                "mock_operation",
                format!("no operation is named `{}`", display_foreign(name)),
            )
            .with_hint(format!("the operations are {}", known.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_operation_and_a_typo_names_the_known_ones() {
        for &operation in Operation::ALL {
            assert_eq!(operation.name().parse::<Operation>().unwrap(), operation);
        }
        let error = "alocate".parse::<Operation>().unwrap_err();
        assert!(error.message().contains("`alocate`") && error.hint().contains("allocate, free"), "{error}");
    }
}
