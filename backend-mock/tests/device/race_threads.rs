//! The race finder with threads told apart: what orders two threads of the host, and what does not.

use std::thread;

use highwater_hal::{AnyId, Backend, BackendTag, EventId, HostPtr, Location, StreamId};
use highwater_mock::races::HandOver;
use highwater_mock::{MockOptions, Operation};

use crate::rig::{Rig, at, small};

const BYTES: usize = 64;

/// A copy from page-locked memory that is enqueued on a stream, and an event after it. Nobody has waited.
struct Case {
    rig: Rig,
    block: HostPtr,
    copied: EventId,
    /// Another stream, which is idle.
    other: StreamId,
}

impl Case {
    fn new(options: MockOptions) -> Self {
        let rig = Rig::new(options);
        let (block, target, copied) = (rig.pinned(BYTES), rig.allocate(0, BYTES), rig.event(0));
        rig.copy(at(0, target), Location::Host(block), BYTES, rig.stream).unwrap();
        rig.gpu.record_event(copied, rig.stream).unwrap();
        Self { other: rig.stream(0), rig, block, copied }
    }

    /// Runs a function in another thread, which ends before this returns. The finder does not see that.
    fn beside<R: Send>(&self, function: impl FnOnce(&Self) -> R + Send) -> R {
        thread::scope(|scope| scope.spawn(|| function(self)).join().unwrap())
    }

    fn wait(&self) {
        self.rig.gpu.synchronize_event(self.copied).unwrap();
    }

    /// Frees the page-locked memory in this thread. Returns whether that is a race with the copy.
    fn free_races(&self) -> bool {
        // SAFETY: the copy is done, in every test.
        unsafe { self.rig.host.free(self.block).unwrap() };
        let races = self.rig.gpu.races();
        for race in &races {
            assert_eq!([race.first().operation(), race.second().operation()], [Operation::Copy, Operation::HostFree]);
        }
        !races.is_empty()
    }
}

fn apart() -> Case {
    Case::new(small().with_thread_races())
}

#[test]
fn a_wait_counts_for_its_thread() {
    let case = apart();
    case.beside(Case::wait);
    assert!(case.free_races());
    let case = apart();
    case.beside(Case::wait);
    case.wait();
    assert!(!case.free_races());
    // A query is a wait that did not take long.
    let case = apart();
    case.beside(Case::wait);
    assert!(case.rig.gpu.query_stream(case.rig.stream).unwrap().is_complete());
    assert!(!case.free_races());
}

#[test]
fn with_threads_not_told_apart_a_wait_counts_for_all() {
    let case = Case::new(small().with_race_detector());
    case.beside(Case::wait);
    assert!(!case.free_races());
}

#[test]
fn a_hand_over_orders_the_thread_that_takes_it_over_and_no_other() {
    let waited = |case: &Case| {
        case.wait();
        case.rig.gpu.hand_over()
    };
    let case = apart();
    case.beside(waited).take_over();
    assert!(!case.free_races());
    let case = apart();
    let handed: HandOver = case.beside(waited);
    case.beside(|_| handed.take_over());
    assert!(case.free_races());
    // A hand-over says what was known when it was made.
    let case = apart();
    let early = case.beside(|case| {
        let early = case.rig.gpu.hand_over();
        case.wait();
        early
    });
    early.take_over();
    assert!(case.free_races());
}

#[test]
fn a_new_thread_comes_after_what_was_done_before_its_first_call() {
    let case = apart();
    case.wait();
    assert!(!case.beside(Case::free_races));
    let case = apart();
    case.beside(Case::wait);
    assert!(!case.beside(Case::free_races), "the second thread may have been made by the first");
}

#[test]
fn calls_on_one_stream_take_turns() {
    for second_calls in [false, true] {
        let case = apart();
        let target = case.rig.allocate(0, BYTES);
        let fill = |case: &Case| {
            let pattern = highwater_hal::FillPattern::U8(1);
            case.rig.fill(target, pattern, BYTES, case.other).unwrap();
        };
        case.beside(|case| {
            case.wait();
            fill(case);
        });
        if second_calls {
            fill(&case);
        }
        assert_eq!(case.free_races(), !second_calls);
    }
}

#[test]
fn a_wait_of_a_stream_for_an_event_comes_after_the_thread_that_recorded_it() {
    for second_waits in [false, true] {
        let case = apart();
        let (third, told) = (case.rig.stream(0), case.rig.event(0));
        case.beside(|case| {
            case.wait();
            case.rig.gpu.record_event(told, case.other).unwrap();
        });
        if second_waits {
            case.rig.gpu.stream_wait_event(third, told).unwrap();
        }
        assert_eq!(case.free_races(), !second_waits);
    }
}

#[test]
fn what_core_shares_counts_for_all_threads() {
    let observer = |case: &Case| case.rig.gpu.host_observer().unwrap();
    let case = apart();
    case.beside(|case| {
        case.wait();
        observer(case).shared(AnyId::Event(case.copied));
    });
    assert!(!case.free_races());
    let case = apart();
    case.beside(|case| {
        case.rig.gpu.synchronize_stream(case.rig.stream).unwrap();
        observer(case).shared(AnyId::Stream(case.rig.stream));
    });
    assert!(!case.free_races());
    // Another event or stream says nothing of the copy, and unknown ids say nothing at all.
    let case = apart();
    case.beside(|case| {
        case.wait();
        let event = case.rig.event(0);
        let unknown = StreamId::legacy_default(BackendTag::next(), 7);
        [AnyId::Event(event), AnyId::Stream(case.other), AnyId::Stream(unknown)]
            .into_iter()
            .for_each(|id| observer(case).shared(id));
    });
    assert!(case.free_races());
    // Work that came since is not done.
    let case = apart();
    case.beside(|case| {
        case.rig.gpu.synchronize_stream(case.rig.stream).unwrap();
        let target = case.rig.allocate(0, BYTES);
        case.rig.copy(at(0, target), Location::Host(case.block), BYTES, case.rig.stream).unwrap();
        observer(case).shared(AnyId::Stream(case.rig.stream));
        case.rig.gpu.synchronize_stream(case.rig.stream).unwrap();
    });
    assert!(case.free_races());
}

#[test]
fn the_cpu_is_compared_with_devices_and_not_with_itself() {
    let case = apart();
    let access = |case: &Case, writes| case.rig.gpu.host_observer().unwrap().accessed(case.block, BYTES, writes);
    // The copy reads, so a read beside it is no race.
    access(&case, false);
    case.wait();
    let written = case.beside(|case| {
        access(case, true);
        case.rig.gpu.hand_over()
    });
    access(&case, true);
    assert_eq!((case.rig.gpu.race_count(), case.rig.gpu.calls(Operation::CpuAccess)), (0, 3));
    // A copy in one thread comes after a write in another only if that is declared.
    let target = case.rig.allocate(0, BYTES);
    let copy = || case.rig.copy(at(0, target), Location::Host(case.block), BYTES, case.rig.stream).unwrap();
    copy();
    let races = case.rig.gpu.races();
    let operations: Vec<_> = races.iter().map(|race| [race.first().operation(), race.second().operation()]).collect();
    assert_eq!(operations, [[Operation::CpuAccess, Operation::Copy]]);
    assert!(races[0].to_string().contains("`MockGpu::hand_over`"), "{}", races[0]);
    written.take_over();
    copy();
    assert_eq!(case.rig.gpu.race_count(), 1);
    case.rig.gpu.synchronize_device(0).unwrap();
}
