//! The vendor's handles, one type for each kind, so that a stream cannot be passed for an event.
//!
//! Both vendors' handles are pointers to structs that only the vendor knows. A handle here is the number of that pointer,
//! and is passed to the vendor exactly as a `u64` would be. Device addresses are [`DevicePtr`]s.

use highwater_hal::{DevicePtr, EventId, GraphExecId, GraphId, ObjectId, StreamId};

/// A number that the vendor issued, of which 0 stands for none.
pub trait Raw: Copy {
    /// The handle with this number.
    fn from_number(number: u64) -> Self;

    /// The number.
    fn number(self) -> u64;
}

impl Raw for DevicePtr {
    fn from_number(number: u64) -> Self {
        Self::new(number)
    }

    fn number(self) -> u64 {
        self.get()
    }
}

/// Declares types of vendor handles.
#[macro_export]
macro_rules! raw_handles {
    ($($(#[$doc:meta])* $visibility:vis $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        #[repr(transparent)]
        $visibility struct $name(pub u64);

        impl $name {
            /// The absence of a handle.
            #[allow(dead_code, reason = "not every kind of handle has an absent value")]
            $visibility const NULL: Self = Self(0);
        }

        impl $crate::Raw for $name {
            #[inline(always)]
            fn from_number(number: u64) -> Self {
                Self(number)
            }

            #[inline(always)]
            fn number(self) -> u64 {
                self.0
            }
        }
    )*};
}

raw_handles! {
    /// A stream: `CUstream` or `hipStream_t`.
    pub RawStream;
    /// An event: `CUevent` or `hipEvent_t`.
    pub RawEvent;
    /// A graph: `CUgraph` or `hipGraph_t`.
    pub RawGraph;
    /// An executable graph: `CUgraphExec` or `hipGraphExec_t`.
    pub RawGraphExec;
    /// A pool of stream-ordered memory: `CUmemoryPool` or `hipMemPool_t`.
    pub RawMemPool;
    /// A BLAS handle: `cublasHandle_t` or `hipblasHandle_t`.
    pub RawBlas;
}

/// The kind of handle behind a kind of id.
pub(super) trait IdOf: ObjectId {
    /// The vendor's handle.
    type Raw: Raw + std::fmt::Debug + PartialEq;
    /// Whether links refer to objects of this kind. The table then numbers the handles of each slot.
    const IS_FOLLOWED: bool = false;
}

impl IdOf for StreamId {
    type Raw = RawStream;
    const IS_FOLLOWED: bool = true;
}

impl IdOf for EventId {
    type Raw = RawEvent;
}

impl IdOf for GraphId {
    type Raw = RawGraph;
}

impl IdOf for GraphExecId {
    type Raw = RawGraphExec;
}
