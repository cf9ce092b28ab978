//! The names of the calls that can be counted and made to fail, and the bookkeeping of both.
//!
//! Every trait method of the mock begins by *entering* its [`Operation`]: fork check, count, fault. A call that is told
//! to fail has no effect. The counters of a BLAS handle are its own (a handle is used by one thread at a time), so that
//! threads that bind streams side by side do not share a cache line; they are summed up when somebody asks.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use highwater_core::fork::Generation;
use highwater_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

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
    HostAllocate "host_allocate",
    HostFree "host_free",
    HostRegister "host_register",
    HostUnregister "host_unregister",
    HostDeviceAddress "host_device_address",
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
            Self::Allocate | Self::HostAllocate | Self::CreateBlasHandle | Self::CreateStream | Self::CreateEvent => {
                ErrorKind::OutOfMemory
            }
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

    const fn bit(self) -> u64 {
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
            Error::new(ErrorKind::InvalidArgument, "mock_operation", format!("no operation is named `{name}`"))
                .with_hint(format!("the operations are {}", known.join(", ")))
        })
    }
}

/// One set of counters, an entry per operation.
#[derive(Debug)]
pub(crate) struct Tally([AtomicU64; COUNT]);

impl Tally {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; COUNT])
    }

    fn get(&self, operation: Operation) -> u64 {
        self.0[operation as usize].load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Fault {
    operation: Operation,
    /// The fault fires when this has been counted down to 0.
    calls_left: u64,
    kind: ErrorKind,
}

/// Counts and faults of one backend.
#[derive(Debug)]
pub(crate) struct Calls {
    generation: Generation,
    tally: Tally,
    /// Counters of the handles that are alive; folded into `tally` when a handle ends.
    handles: Mutex<Vec<Arc<Tally>>>,
    /// The operations that have a fault waiting, one bit each.
    armed: AtomicU64,
    faults: Mutex<Vec<Fault>>,
}

impl Calls {
    pub(crate) fn new() -> Self {
        Self {
            generation: Generation::current(),
            tally: Tally::new(),
            handles: Mutex::new(Vec::new()),
            armed: AtomicU64::new(0),
            faults: Mutex::new(Vec::new()),
        }
    }

    /// Whether this is still the process that opened the backend.
    #[inline]
    pub(crate) fn is_own_process(&self) -> bool {
        self.generation.is_current()
    }

    /// Fork check, count and fault of one call; to be called before any lock is taken.
    #[inline]
    pub(crate) fn enter(&self, operation: Operation) -> Result<()> {
        if !self.generation.is_current() {
            return Err(Generation::error(operation.name()));
        }
        // Relaxed, here and below: counts order nothing.
        self.tally.0[operation as usize].fetch_add(1, Ordering::Relaxed);
        self.fail_if_told(operation)
    }

    /// As [`Calls::enter`], with the counters of a handle, which no other thread writes at the same time.
    #[inline]
    pub(crate) fn enter_handle(&self, tally: &Tally, operation: Operation) -> Result<()> {
        if !self.generation.is_current() {
            return Err(Generation::error(operation.name()));
        }
        let count = &tally.0[operation as usize];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.fail_if_told(operation)
    }

    #[inline]
    fn fail_if_told(&self, operation: Operation) -> Result<()> {
        // Relaxed: whoever armed the fault before this call, as far as the program can tell, is seen; the list itself
        // lies under its lock.
        if self.armed.load(Ordering::Relaxed) & operation.bit() == 0 { Ok(()) } else { self.count_down(operation) }
    }

    #[cold]
    fn count_down(&self, operation: Operation) -> Result<()> {
        let mut faults = self.faults.lock();
        for fault in faults.iter_mut().filter(|fault| fault.operation == operation) {
            fault.calls_left -= 1;
        }
        let due = faults.iter().find(|fault| fault.calls_left == 0).map(|fault| fault.kind);
        faults.retain(|fault| fault.calls_left > 0);
        self.armed.store(faults.iter().fold(0, |bits, fault| bits | fault.operation.bit()), Ordering::Relaxed);
        match due {
            None => Ok(()),
            Some(kind) => Err(Error::new(kind, operation.name(), "the mock was told to fail this call")
                .with_hint("the fault was set by `with_fault`, `fail_call` or HIGHWATER_MOCK")),
        }
    }

    /// Makes the `nth` call from now (1 is the next one) fail.
    pub(crate) fn fail(&self, operation: Operation, nth: u64, kind: ErrorKind) -> Result<()> {
        if nth == 0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "fail_call",
                format!("call 0 of `{operation}` was to fail; calls count from 1"),
            ));
        }
        if !self.is_own_process() {
            return Err(Generation::error("fail_call"));
        }
        let mut faults = self.faults.lock();
        faults.push(Fault { operation, calls_left: nth, kind });
        self.armed.fetch_or(operation.bit(), Ordering::Relaxed);
        Ok(())
    }

    /// Counters for one handle.
    pub(crate) fn open_tally(&self) -> Arc<Tally> {
        let tally = Arc::new(Tally::new());
        self.handles.lock().push(Arc::clone(&tally));
        tally
    }

    /// Takes a handle's counts over.
    pub(crate) fn close_tally(&self, tally: &Arc<Tally>) {
        let mut handles = self.handles.lock();
        handles.retain(|other| !Arc::ptr_eq(other, tally));
        for (total, count) in self.tally.0.iter().zip(&tally.0) {
            total.fetch_add(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// How often an operation was called, failed calls included. A forked child has called nothing.
    pub(crate) fn count(&self, operation: Operation) -> u64 {
        if !self.is_own_process() {
            return 0;
        }
        let handles = self.handles.lock();
        self.tally.get(operation) + handles.iter().map(|tally| tally.get(operation)).sum::<u64>()
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

    #[test]
    fn the_nth_call_fails_and_only_that_one() {
        let calls = Calls::new();
        calls.fail(Operation::Copy, 2, ErrorKind::Vendor).unwrap();
        calls.fail(Operation::Copy, 4, ErrorKind::DeviceLost).unwrap();
        let kinds: Vec<_> = (0..6).map(|_| calls.enter(Operation::Copy).err().map(|error| error.kind())).collect();
        assert_eq!(kinds, [None, Some(ErrorKind::Vendor), None, Some(ErrorKind::DeviceLost), None, None]);
        assert!(calls.enter(Operation::Fill).is_ok());
        assert_eq!(calls.count(Operation::Copy), 6);
        assert!(calls.fail(Operation::Copy, 0, ErrorKind::Vendor).is_err());
    }

    #[test]
    fn counts_of_a_handle_outlive_it() {
        let calls = Calls::new();
        let tally = calls.open_tally();
        calls.enter_handle(&tally, Operation::Gemm).unwrap();
        assert_eq!(calls.count(Operation::Gemm), 1);
        calls.close_tally(&tally);
        assert_eq!(calls.count(Operation::Gemm), 1);
    }
}
