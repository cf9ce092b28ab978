use std::time::Instant;

use highwater_hal::{
    Backend, BackendTag, Completion, ErrorKind, EventOptions, FillPattern, Location, StreamId, StreamOptions,
    StreamPriority,
};
use highwater_mock::Operation;

use crate::rig::{Rig, at, kind, millis, small};

#[test]
fn enqueueing_returns_long_before_the_work_is_done() {
    let rig = Rig::new(small().with_latency(millis(200)));
    let block = rig.allocate(0, 64);
    let event = rig.event(0);
    let start = Instant::now();
    rig.fill(block, FillPattern::U8(7), 64, rig.stream).unwrap();
    rig.gpu.record_event(event, rig.stream).unwrap();
    assert!(start.elapsed() < millis(100), "enqueueing took {:?}", start.elapsed());
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Pending);
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Pending);
    rig.gpu.synchronize_event(event).unwrap();
    assert!(start.elapsed() >= millis(400), "two operations took {:?}", start.elapsed());
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Complete);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Complete);
}

#[test]
fn a_short_queue_overtakes_a_long_one() {
    let rig = Rig::new(small().with_latency(millis(20)));
    let (quick, block) = (rig.stream(0), rig.allocate(0, 64));
    let (slow_done, quick_done) = (rig.event(0), rig.event(0));
    for _ in 0..20 {
        rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
    }
    rig.gpu.record_event(slow_done, rig.stream).unwrap();
    rig.gpu.record_event(quick_done, quick).unwrap();
    rig.gpu.synchronize_event(quick_done).unwrap();
    assert_eq!(rig.gpu.query_event(slow_done).unwrap(), Completion::Pending);
}

#[test]
fn a_stream_keeps_the_order_of_calls() {
    let rig = Rig::new(small());
    let block = rig.allocate(0, 4096);
    for round in 0..200u32 {
        rig.fill(block, FillPattern::U32(round), 1024, rig.stream).unwrap();
        if round % 50 == 49 {
            assert_eq!(rig.download::<u32>(block, 1024, rig.stream), vec![round; 1024]);
        }
    }
}

#[test]
fn a_wait_orders_streams_also_across_devices() {
    let rig = Rig::new(small().with_devices(2).with_latency(millis(10)));
    let block = rig.allocate(0, 64);
    let (event, other) = (rig.event(0), rig.stream(1));
    for value in 0..8 {
        rig.fill(block, FillPattern::U8(value), 64, rig.stream).unwrap();
    }
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.stream_wait_event(other, event).unwrap();
    let copy = rig.allocate(1, 64);
    rig.copy(at(1, copy), at(0, block), 64, other).unwrap();
    assert_eq!(rig.download::<u8>(copy, 64, other), [7; 64]);
}

#[test]
fn a_wait_takes_the_record_of_its_time() {
    let rig = Rig::new(small().with_latency(millis(20)));
    let (slow, waiter, block) = (rig.stream(0), rig.stream(0), rig.allocate(0, 64));
    let event = rig.event(0);
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.stream_wait_event(waiter, event).unwrap();
    for _ in 0..30 {
        rig.fill(block, FillPattern::U8(1), 64, slow).unwrap();
    }
    rig.gpu.record_event(event, slow).unwrap();
    rig.gpu.synchronize_stream(waiter).unwrap();
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Pending);
}

/// A later record of the same event on a quicker stream must not let an earlier wait through.
#[test]
fn a_wait_is_not_ended_by_a_later_record_that_is_reached_first() {
    let rig = Rig::new(small().with_latency(millis(20)));
    let (quick, waiter, block) = (rig.stream(0), rig.stream(0), rig.allocate(0, 64));
    let event = rig.event(0);
    for _ in 0..20 {
        rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
    }
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.stream_wait_event(waiter, event).unwrap();
    rig.gpu.record_event(event, quick).unwrap();
    rig.gpu.synchronize_event(event).unwrap();
    assert_eq!(rig.gpu.query_stream(waiter).unwrap(), Completion::Pending);
    rig.gpu.synchronize_stream(waiter).unwrap();
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Complete);
}

/// A thread that sees the last record reached sees the stream complete, and the reverse.
#[test]
fn event_and_stream_agree_on_how_far_the_stream_is() {
    let rig = Rig::new(small());
    let (block, event) = (rig.allocate(0, 64), rig.event(0));
    for round in 0..500 {
        rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
        rig.gpu.record_event(event, rig.stream).unwrap();
        if round % 2 == 0 {
            rig.gpu.synchronize_event(event).unwrap();
        } else {
            rig.gpu.synchronize_stream(rig.stream).unwrap();
        }
        assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Complete);
        assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Complete);
    }
}

#[test]
fn an_event_that_was_never_recorded_is_complete_and_no_wait() {
    let rig = Rig::new(small());
    let event = rig.event(0);
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Complete);
    rig.gpu.synchronize_event(event).unwrap();
    rig.gpu.stream_wait_event(rig.stream, event).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
}

#[test]
fn what_was_enqueued_survives_the_end_of_stream_and_event() {
    let rig = Rig::new(small().with_latency(millis(5)));
    let (first, second, block) = (rig.stream(0), rig.stream(0), rig.allocate(0, 64));
    let event = rig.event(0);
    for value in 0..10 {
        rig.fill(block, FillPattern::U8(value), 64, first).unwrap();
    }
    rig.gpu.record_event(event, first).unwrap();
    rig.gpu.stream_wait_event(second, event).unwrap();
    rig.fill(block, FillPattern::U8(99), 32, second).unwrap();
    rig.gpu.destroy_event(event).unwrap();
    rig.gpu.destroy_stream(first).unwrap();
    rig.gpu.destroy_stream(second).unwrap();
    rig.gpu.synchronize_device(0).unwrap();
    let values = rig.download::<u8>(block, 64, rig.stream);
    assert_eq!((&values[..32], &values[32..]), (&[99; 32][..], &[9; 32][..]));
    for result in [
        rig.gpu.destroy_stream(first),
        rig.gpu.synchronize_stream(first),
        rig.gpu.record_event(rig.event(0), first),
        rig.gpu.stream_wait_event(rig.stream, event),
        rig.gpu.destroy_event(event),
    ] {
        assert_eq!(kind(result), ErrorKind::InvalidHandle);
    }
    assert_eq!(kind(rig.gpu.query_event(event)), ErrorKind::InvalidHandle);
    assert_eq!(kind(rig.fill(block, FillPattern::U8(0), 64, first)), ErrorKind::InvalidHandle);
}

#[test]
fn events_and_streams_of_two_devices_are_not_mixed() {
    let rig = Rig::new(small().with_devices(2));
    assert_eq!(kind(rig.gpu.record_event(rig.event(1), rig.stream)), ErrorKind::WrongDevice);
    assert_eq!(kind(rig.gpu.create_stream(2, &StreamOptions::new())), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.gpu.synchronize_device(9)), ErrorKind::InvalidArgument);
    let other = Rig::new(small());
    assert_eq!(kind(rig.gpu.synchronize_stream(other.stream)), ErrorKind::InvalidHandle);
}

#[test]
fn elapsed_time_covers_the_work_between_two_records() {
    let rig = Rig::new(small().with_latency(millis(20)));
    let timing = EventOptions::new().with_timing();
    let [start, end] = [(); 2].map(|()| rig.gpu.create_event(0, &timing).unwrap());
    assert_eq!(kind(rig.gpu.event_elapsed_ns(start, end)), ErrorKind::InvalidArgument);
    let block = rig.allocate(0, 64);
    rig.gpu.record_event(start, rig.stream).unwrap();
    for _ in 0..4 {
        rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
    }
    rig.gpu.record_event(end, rig.stream).unwrap();
    rig.gpu.synchronize_event(start).unwrap();
    assert_eq!(kind(rig.gpu.event_elapsed_ns(start, end)), ErrorKind::InvalidState);
    rig.gpu.synchronize_event(end).unwrap();
    assert!(rig.gpu.event_elapsed_ns(start, end).unwrap() >= 100_000_000);
    assert_eq!(kind(rig.gpu.event_elapsed_ns(start, rig.event(0))), ErrorKind::InvalidArgument);
    let both = timing.with_interprocess();
    assert_eq!(kind(rig.gpu.create_event(0, &both)), ErrorKind::InvalidArgument);
}

#[test]
fn the_legacy_default_stream_is_there_and_no_object() {
    let rig = Rig::new(small().with_devices(2));
    let tag = rig.gpu.identity().tag;
    let legacy = StreamId::legacy_default(tag, 1);
    let block = rig.allocate(1, 64);
    rig.fill(block, FillPattern::U8(3), 64, legacy).unwrap();
    assert_eq!(rig.download::<u8>(block, 64, legacy), [3; 64]);
    rig.gpu.synchronize_device(1).unwrap();
    assert_eq!(rig.gpu.live_objects().streams, 1);
    assert_eq!(kind(rig.gpu.destroy_stream(legacy)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.gpu.query_stream(StreamId::legacy_default(tag, 2))), ErrorKind::InvalidHandle);
    let foreign = StreamId::legacy_default(BackendTag::next(), 0);
    assert_eq!(kind(rig.gpu.query_stream(foreign)), ErrorKind::InvalidHandle);
    let without = Rig::new(small().with_capabilities(|c| c.legacy_default_stream = false));
    let legacy = StreamId::legacy_default(without.gpu.identity().tag, 0);
    assert_eq!(kind(without.gpu.query_stream(legacy)), ErrorKind::Unsupported);
}

#[test]
fn priorities_are_taken_where_the_device_has_them() {
    let high = StreamOptions::new().with_priority(StreamPriority::High);
    assert!(Rig::new(small()).gpu.create_stream(0, &high).is_ok());
    let without = Rig::new(small().with_capabilities(|c| c.stream_priority = false));
    assert_eq!(kind(without.gpu.create_stream(0, &high)), ErrorKind::Unsupported);
}

#[test]
fn threads_with_streams_of_their_own_do_not_disturb_each_other() {
    let rig = Rig::new(small());
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let rig = &rig;
            scope.spawn(move || {
                for round in 0..20u8 {
                    let (stream, block, event) = (rig.stream(0), rig.allocate(0, 1000), rig.event(0));
                    rig.fill(block, FillPattern::U8(thread), 1000, stream).unwrap();
                    rig.fill(block.offset(10), FillPattern::U8(round), 500, stream).unwrap();
                    rig.gpu.record_event(event, stream).unwrap();
                    let mut expected = vec![thread; 1000];
                    expected[10..510].fill(round);
                    assert_eq!(rig.download::<u8>(block, 1000, stream), expected);
                    rig.free(0, block, None).unwrap();
                    rig.gpu.destroy_event(event).unwrap();
                    rig.gpu.destroy_stream(stream).unwrap();
                }
            });
        }
    });
    rig.gpu.destroy_stream(rig.stream).unwrap();
    assert_eq!(rig.gpu.live_objects().total(), 0);
    assert_eq!(rig.gpu.calls(Operation::CreateStream), 81);
}

#[test]
fn a_lost_device_leaves_nobody_waiting_and_takes_nothing_more() {
    let rig = Rig::new(small().with_devices(2).with_latency(millis(20)));
    let (block, event, pinned) = (rig.allocate(0, 64), rig.event(0), rig.pinned(64));
    for _ in 0..10 {
        rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
    }
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.lose_device(0).unwrap();
    assert_eq!(kind(rig.gpu.synchronize_event(event)), ErrorKind::DeviceLost);
    assert_eq!(kind(rig.gpu.query_event(event)), ErrorKind::DeviceLost);
    assert_eq!(kind(rig.gpu.synchronize_stream(rig.stream)), ErrorKind::DeviceLost);
    assert_eq!(kind(rig.gpu.synchronize_device(0)), ErrorKind::DeviceLost);
    assert_eq!(kind(rig.copy(Location::Host(pinned), at(0, block), 64, rig.stream)), ErrorKind::DeviceLost);
    assert_eq!(kind(rig.gpu.create_stream(0, &StreamOptions::new())), ErrorKind::DeviceLost);
    rig.free(0, block, None).unwrap();
    rig.gpu.destroy_event(event).unwrap();
    rig.gpu.destroy_stream(rig.stream).unwrap();
    assert!(rig.gpu.create_stream(1, &StreamOptions::new()).is_ok());
    assert_eq!(kind(rig.gpu.lose_device(2)), ErrorKind::InvalidArgument);
}
