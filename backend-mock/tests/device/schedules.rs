//! Schedules that follow from a seed.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use highwater_hal::{Backend, Completion, DevicePtr, ErrorKind, FillPattern, Location, StreamId};

use crate::rig::{Rig, at, kind, small};

const WORDS: usize = 4;

/// Three streams write one word against each other, and one of them keeps what it sees in between. What is left depends on the
/// order of execution and on nothing else.
fn struggle(seed: u64) -> (Vec<u32>, Vec<Completion>) {
    let rig = Rig::new(small().with_schedule(seed));
    let streams: Vec<StreamId> = (0..3).map(|_| rig.stream(0)).collect();
    let (word, seen) = (rig.allocate(0, 4), rig.allocate(0, 4 * 4 * WORDS));
    let mut answers = Vec::new();
    for round in 0..4 * WORDS {
        for (index, &stream) in streams.iter().enumerate() {
            rig.fill(word, FillPattern::U32((10 * round + index) as u32), 1, stream).unwrap();
        }
        let place = DevicePtr::new(seen.get() + 4 * round as u64);
        rig.copy(at(0, place), at(0, word), 4, streams[0]).unwrap();
        answers.push(rig.gpu.query_stream(streams[round % 3]).unwrap());
    }
    rig.gpu.synchronize_device(0).unwrap();
    assert_eq!(rig.gpu.unscheduled_operations(), 0);
    (rig.download(seen, 4 * WORDS, streams[0]), answers)
}

#[test]
fn equal_seeds_give_equal_schedules_and_others_give_others() {
    let outcomes: Vec<_> = (0..24).map(struggle).collect();
    for (seed, outcome) in outcomes.iter().enumerate() {
        assert_eq!(*outcome, struggle(seed as u64), "seed {seed}");
    }
    let distinct: HashSet<_> = outcomes.iter().map(|(words, _)| words).collect();
    assert!(distinct.len() > 12, "{} schedules out of 24 seeds", distinct.len());
    let answers = |answer| outcomes.iter().any(|(_, answers)| answers.contains(&answer));
    assert!(answers(Completion::Pending) && answers(Completion::Complete));
}

#[test]
fn streams_and_events_keep_their_order_under_every_seed() {
    for seed in 0..50 {
        let rig = Rig::new(small().with_devices(2).with_schedule(seed));
        let (other, event) = (rig.stream(1), rig.event(0));
        let (here, there) = (rig.allocate(0, 4), rig.allocate(1, 4));
        for round in 0..8u32 {
            rig.fill(here, FillPattern::U32(round), 1, rig.stream).unwrap();
            rig.gpu.record_event(event, rig.stream).unwrap();
            rig.gpu.stream_wait_event(other, event).unwrap();
            rig.copy(at(1, there), at(0, here), 4, other).unwrap();
            let back = rig.event(1);
            rig.gpu.record_event(back, other).unwrap();
            if round % 2 == 0 {
                rig.gpu.stream_wait_event(rig.stream, back).unwrap();
            } else {
                rig.gpu.synchronize_event(back).unwrap();
                assert_eq!(rig.download::<u32>(there, 1, other), [round], "seed {seed}");
            }
        }
    }
}

#[test]
fn who_asks_again_and_again_is_told_in_the_end_and_latency_is_left_out() {
    let start = Instant::now();
    for seed in 0..20 {
        let rig = Rig::new(small().with_latency(Duration::from_secs(3600)).with_schedule(seed));
        let (block, event) = (rig.allocate(0, 4096), rig.event(0));
        for _ in 0..20 {
            rig.fill(block, FillPattern::U8(1), 4096, rig.stream).unwrap();
        }
        rig.gpu.record_event(event, rig.stream).unwrap();
        while rig.gpu.query_event(event).unwrap() == Completion::Pending {}
        assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Complete);
    }
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn work_of_destroyed_streams_and_of_a_closed_backend_is_executed() {
    for seed in 0..8 {
        let rig = Rig::new(small().with_schedule(seed));
        let (block, host, stream) = (rig.allocate(0, 4), rig.pinned(4), rig.stream(0));
        rig.fill(block, FillPattern::U32(7), 1, stream).unwrap();
        rig.copy(Location::Host(host), at(0, block), 4, stream).unwrap();
        rig.gpu.destroy_stream(stream).unwrap();
        rig.gpu.synchronize_device(0).unwrap();
        // SAFETY: the copy has completed, and the block is as large.
        assert_eq!(unsafe { host.as_ptr().cast::<u32>().read() }, 7, "seed {seed}");
        rig.fill(block, FillPattern::U32(8), 1, rig.stream).unwrap();
    }
}

#[test]
fn threads_share_a_schedule_and_all_get_their_results() {
    let rig = Rig::new(small().with_schedule(3));
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let rig = &rig;
            scope.spawn(move || {
                let (stream, block) = (rig.stream(0), rig.allocate(0, 4));
                for round in 0..50 {
                    rig.fill(block, FillPattern::U32(100 * thread + round), 1, stream).unwrap();
                    assert_eq!(rig.download::<u32>(block, 1, stream), [100 * thread + round]);
                }
            });
        }
    });
}

#[test]
fn a_lost_device_holds_nobody_up() {
    let rig = Rig::new(small().with_schedule(1));
    let (block, event) = (rig.allocate(0, 4096), rig.event(0));
    rig.fill(block, FillPattern::U8(1), 4096, rig.stream).unwrap();
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.lose_device(0).unwrap();
    assert_eq!(kind(rig.gpu.synchronize_stream(rig.stream)), ErrorKind::DeviceLost);
}

#[test]
fn a_record_for_other_processes_is_reached_within_its_call() {
    let (here, there) = (Rig::new(small().with_schedule(5)), Rig::new(small()));
    let event = here.interprocess_event();
    let opened = there.open_event_of(&here, event);
    let block = here.allocate(0, 4096);
    for _ in 0..10 {
        here.fill(block, FillPattern::U8(1), 4096, here.stream).unwrap();
    }
    here.gpu.record_event(event, here.stream).unwrap();
    // Nobody calls `here` any more.
    there.gpu.synchronize_event(opened).unwrap();
}

#[test]
fn what_another_process_holds_up_goes_on_when_that_is_done() {
    let (here, there) = (Rig::new(small().with_schedule(5)), Rig::new(small().with_latency(Duration::from_millis(30))));
    let event = there.interprocess_event();
    let opened = here.open_event_of(&there, event);
    there.gpu.record_event(event, there.stream).unwrap();
    here.gpu.stream_wait_event(here.stream, opened).unwrap();
    here.gpu.synchronize_stream(here.stream).unwrap();
    assert_eq!(there.gpu.query_event(event).unwrap(), Completion::Complete);
}
