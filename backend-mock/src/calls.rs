//! Counts and faults of a mock's calls.
//!
//! Every trait method of the mock first *enters* its [`Operation`]: check of the process, count, fault. A call that is told to
//! fail has no effect. One thread at a time uses a BLAS handle, so each handle has counters of its own. Threads that
//! bind streams side by side then share no cache line. The counts are added up on request.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use highwater_hal::exit;
use highwater_hal::fork::Generation;
use highwater_hal::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::hash::{checksum, scramble};
use crate::operation::{COUNT, Operation};

/// One set of counters, one per operation.
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
    when: When,
    kind: ErrorKind,
    /// Calls since the fault was set.
    calls: u64,
}

#[derive(Debug)]
enum When {
    /// The calls with these numbers fail.
    Calls(RangeInclusive<u64>),
    /// So many of a million calls fail on average.
    Chance { per_million: u32 },
}

/// The chance at which every call fails.
pub(crate) const MILLION: u32 = 1_000_000;

impl Fault {
    /// Counts a call, and returns whether it fails.
    fn is_due(&mut self, seed: u64) -> bool {
        self.calls += 1;
        match &self.when {
            When::Calls(numbers) => numbers.contains(&self.calls),
            When::Chance { per_million } => {
                // By name: a new operation in the list must not change the chances of the others.
                let operation = checksum(&[self.operation.name().as_bytes()]);
                let draw = scramble(seed ^ scramble(operation.wrapping_add(self.calls)));
                draw % u64::from(MILLION) < u64::from(*per_million)
            }
        }
    }

    fn is_over(&self) -> bool {
        matches!(&self.when, When::Calls(numbers) if self.calls >= *numbers.end())
    }

    fn is_by_chance(&self) -> bool {
        matches!(self.when, When::Chance { .. })
    }

    /// Returns the error of the call that was counted last.
    fn error(&self) -> Error {
        let setters = if self.is_by_chance() {
            "`with_chance`, `fail_by_chance`"
        } else {
            "`with_fault`, `with_faults`, `fail_call`"
        };
        let message = format!("a fault of the mock fails this call, number {} since the fault was set", self.calls);
        Error::new(self.kind, self.operation.name(), message)
            .with_hint(format!("the fault was set by {setters} or HIGHWATER_MOCK"))
    }
}

/// An observer of calls. The schedule is one: it executes work at the beginning of each call.
pub(crate) trait CallObserver: fmt::Debug + Send + Sync {
    /// Notes that a call begins, before the call takes any lock.
    fn called(&self);
}

/// Counts and faults of one backend.
#[derive(Debug)]
pub(crate) struct Calls {
    generation: Generation,
    tally: Tally,
    /// The counters of live handles. They are added to `tally` when a handle ends.
    handles: Mutex<Vec<Arc<Tally>>>,
    /// The operations with a waiting fault, one bit each.
    armed: AtomicU64,
    faults: Mutex<Vec<Fault>>,
    seed: u64,
    /// The calls that the mock made fail.
    failed: Tally,
    /// The schedule, if one executes work within calls.
    observer: Option<Arc<dyn CallObserver>>,
}

impl Calls {
    /// Creates the counts of a backend. Faults by chance follow from `seed`.
    pub(crate) fn new(seed: u64, observer: Option<Arc<dyn CallObserver>>) -> Self {
        Self {
            seed,
            observer,
            failed: Tally::new(),
            generation: Generation::current(),
            tally: Tally::new(),
            handles: Mutex::new(Vec::new()),
            armed: AtomicU64::new(0),
            faults: Mutex::new(Vec::new()),
        }
    }

    /// Returns whether this process opened the backend.
    #[inline]
    pub(crate) fn is_own_process(&self) -> bool {
        self.generation.is_current()
    }

    /// Enters a call: check of the process, count, schedule, fault. The caller must hold no lock. Returns the operation.
    #[inline]
    pub(crate) fn enter(&self, operation: Operation) -> Result<Operation> {
        self.check_process(operation)?;
        // Relaxed, here and below: counts order nothing.
        self.tally.0[operation as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(observer) = &self.observer {
            observer.called();
        }
        self.fail_if_told(operation)
    }

    /// Refuses calls in a forked child and once the process has begun to exit.
    #[inline]
    fn check_process(&self, operation: Operation) -> Result<()> {
        if !self.generation.is_current() {
            return Err(Generation::error(operation.name()));
        }
        if exit::has_begun() { Err(exit::error(operation.name())) } else { Ok(()) }
    }

    /// Counts an access of the CPU, which is no call.
    pub(crate) fn count_access(&self) {
        self.tally.0[Operation::CpuAccess as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Enters a call with the counters of a handle, which no other thread writes at the same time.
    #[inline]
    pub(crate) fn enter_handle(&self, tally: &Tally, operation: Operation) -> Result<Operation> {
        self.check_process(operation)?;
        let count = &tally.0[operation as usize];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if let Some(observer) = &self.observer {
            observer.called();
        }
        self.fail_if_told(operation)
    }

    #[inline]
    fn fail_if_told(&self, operation: Operation) -> Result<Operation> {
        // Relaxed: a call sees every fault that was set before it in the order of the program. The list lies under its
        // lock.
        if self.armed.load(Ordering::Relaxed) & operation.bit() == 0 {
            Ok(operation)
        } else {
            self.count_down(operation)
        }
    }

    #[cold]
    fn count_down(&self, operation: Operation) -> Result<Operation> {
        let mut faults = self.faults.lock();
        let (mut due, mut by_chance) = (None, None);
        for fault in faults.iter_mut().filter(|fault| fault.operation == operation) {
            if fault.is_due(self.seed) {
                let first = if fault.is_by_chance() { &mut by_chance } else { &mut due };
                first.get_or_insert_with(|| fault.error());
            }
        }
        faults.retain(|fault| !fault.is_over());
        self.armed.store(faults.iter().fold(0, |bits, fault| bits | fault.operation.bit()), Ordering::Relaxed);
        let Some(error) = due.or(by_chance) else { return Ok(operation) };
        self.failed.0[operation as usize].fetch_add(1, Ordering::Relaxed);
        Err(error)
    }

    /// Makes calls fail by chance from the next one on; 0 ends it.
    pub(crate) fn fail_by_chance(&self, operation: Operation, per_million: u32, kind: ErrorKind) -> Result<()> {
        if per_million > MILLION {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "fail_by_chance",
                format!("{per_million} in a million calls of `{operation}` should fail; the largest chance is 1000000"),
            ));
        }
        if !self.is_own_process() {
            return Err(Generation::error("fail_by_chance"));
        }
        let mut faults = self.faults.lock();
        faults.retain(|fault| fault.operation != operation || !fault.is_by_chance());
        if per_million > 0 {
            faults.push(Fault { operation, when: When::Chance { per_million }, kind, calls: 0 });
        }
        self.armed.store(faults.iter().fold(0, |bits, fault| bits | fault.operation.bit()), Ordering::Relaxed);
        Ok(())
    }

    /// Returns how many calls of an operation the mock made fail.
    pub(crate) fn faults(&self, operation: Operation) -> u64 {
        self.failed.get(operation)
    }

    /// Makes the calls with these numbers fail; 1 is the next one.
    pub(crate) fn fail(&self, operation: Operation, numbers: RangeInclusive<u64>, kind: ErrorKind) -> Result<()> {
        if *numbers.start() == 0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "fail_call",
                format!("the fault is for call 0 of `{operation}`; calls count from 1"),
            ));
        }
        if !self.is_own_process() {
            return Err(Generation::error("fail_call"));
        }
        let mut faults = self.faults.lock();
        faults.push(Fault { operation, when: When::Calls(numbers), kind, calls: 0 });
        self.armed.fetch_or(operation.bit(), Ordering::Relaxed);
        Ok(())
    }

    /// Creates the counters of a handle.
    pub(crate) fn open_tally(&self) -> Arc<Tally> {
        let tally = Arc::new(Tally::new());
        self.handles.lock().push(Arc::clone(&tally));
        tally
    }

    /// Adds the counts of a handle that ends to those of the backend.
    pub(crate) fn close_tally(&self, tally: &Arc<Tally>) {
        let mut handles = self.handles.lock();
        handles.retain(|other| !Arc::ptr_eq(other, tally));
        for (total, count) in self.tally.0.iter().zip(&tally.0) {
            total.fetch_add(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Returns how often an operation was called, failed calls included. A forked child has called nothing.
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
    fn the_nth_call_fails_and_only_that_one() {
        let calls = Calls::new(0, None);
        calls.fail(Operation::Copy, 2..=2, ErrorKind::Vendor).unwrap();
        calls.fail(Operation::Copy, 4..=4, ErrorKind::DeviceLost).unwrap();
        let kinds: Vec<_> = (0..6).map(|_| calls.enter(Operation::Copy).err().map(|error| error.kind())).collect();
        assert_eq!(kinds, [None, Some(ErrorKind::Vendor), None, Some(ErrorKind::DeviceLost), None, None]);
        assert!(calls.enter(Operation::Fill).is_ok());
        assert_eq!(calls.count(Operation::Copy), 6);
        assert!(calls.fail(Operation::Copy, 0..=0, ErrorKind::Vendor).is_err());
    }

    #[test]
    fn calls_in_a_range_fail_and_only_those() {
        let calls = Calls::new(0, None);
        calls.fail(Operation::Copy, 2..=3, ErrorKind::Vendor).unwrap();
        calls.fail(Operation::Copy, 3..=u64::MAX, ErrorKind::DeviceLost).unwrap();
        let kinds: Vec<_> = (0..5).map(|_| calls.enter(Operation::Copy).err().map(|error| error.kind())).collect();
        let (first, second) = (Some(ErrorKind::Vendor), Some(ErrorKind::DeviceLost));
        assert_eq!(kinds, [None, first, first, second, second], "the one that was set first counts");
        assert_eq!(calls.faults(Operation::Copy), 4);
        assert_eq!(calls.armed.load(Ordering::Relaxed), Operation::Copy.bit(), "one has no end");
    }

    /// Returns which of 2000 calls fail.
    fn failing(seed: u64, operation: Operation, per_million: u32) -> Vec<usize> {
        let calls = Calls::new(seed, None);
        calls.fail_by_chance(operation, per_million, ErrorKind::Vendor).unwrap();
        let failing: Vec<_> = (0..2000).filter(|_| calls.enter(operation).is_err()).collect();
        assert_eq!(calls.faults(operation), failing.len() as u64);
        failing
    }

    #[test]
    fn chance_follows_from_the_seed_and_from_nothing_else() {
        let some = failing(7, Operation::Copy, 100_000);
        assert!((100..300).contains(&some.len()), "{} of 2000 at one in ten", some.len());
        assert_eq!(some, failing(7, Operation::Copy, 100_000));
        assert_ne!(some, failing(8, Operation::Copy, 100_000));
        assert_ne!(some, failing(7, Operation::Fill, 100_000));
        assert!(failing(7, Operation::Copy, 0).is_empty());
        assert_eq!(failing(7, Operation::Copy, MILLION).len(), 2000);
    }

    #[test]
    fn chance_can_be_changed_ended_and_joined_by_a_single_fault() {
        let calls = Calls::new(0, None);
        assert!(calls.fail_by_chance(Operation::Copy, MILLION + 1, ErrorKind::Vendor).is_err());
        calls.fail_by_chance(Operation::Copy, 10, ErrorKind::Vendor).unwrap();
        calls.fail_by_chance(Operation::Copy, MILLION, ErrorKind::Vendor).unwrap();
        calls.fail(Operation::Copy, 2..=2, ErrorKind::DeviceLost).unwrap();
        let errors = [(); 3].map(|()| calls.enter(Operation::Copy).unwrap_err());
        let kinds = errors.each_ref().map(Error::kind);
        assert_eq!(kinds, [ErrorKind::Vendor, ErrorKind::DeviceLost, ErrorKind::Vendor]);
        assert!(errors[1].message().contains("number 2") && errors[2].message().contains("number 3"), "{errors:?}");
        assert!(errors.each_ref().map(|error| error.hint().contains("chance")) == [true, false, true], "{errors:?}");
        calls.fail_by_chance(Operation::Copy, 0, ErrorKind::Vendor).unwrap();
        assert!(calls.enter(Operation::Copy).is_ok());
        assert_eq!((calls.count(Operation::Copy), calls.faults(Operation::Copy)), (4, 3));
    }

    #[test]
    fn counts_of_a_handle_outlive_it() {
        let calls = Calls::new(0, None);
        let tally = calls.open_tally();
        calls.enter_handle(&tally, Operation::Gemm).unwrap();
        assert_eq!(calls.count(Operation::Gemm), 1);
        calls.close_tally(&tally);
        assert_eq!(calls.count(Operation::Gemm), 1);
    }
}
