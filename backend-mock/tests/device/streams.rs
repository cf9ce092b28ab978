use std::time::Instant;

use highwater_hal::{Backend, Completion, ErrorKind, FillPattern, Location, StreamId, StreamOptions};

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
fn the_legacy_default_stream_is_there_and_no_object() {
    let rig = Rig::new(small().with_devices(2));
    let tag = rig.gpu.identity().tag;
    let legacy = StreamId::legacy_default(tag, 1);
    rig.gpu.synchronize_stream(legacy).unwrap();
    assert_eq!(rig.gpu.live_objects().streams, 1);
    assert_eq!(kind(rig.gpu.destroy_stream(legacy)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.gpu.query_stream(StreamId::legacy_default(tag, 2))), ErrorKind::InvalidHandle);
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
