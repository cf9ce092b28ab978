//! Tests of streams that die with a lost capture, over a fake vendor.

use super::testing::{Fake, INVALID};
use highwater_hal::{
    Backend, BlasKind, BlasOptions, CaptureMode, DataType, DevicePtr, Error, ErrorKind, EventOptions, FillPattern,
    Gemm, GemmShape, MemoryFill, StreamId, StreamOptions, StreamPriority, Workspace,
};

fn stream(fake: &Fake) -> StreamId {
    fake.backend.create_stream(0, &StreamOptions::new()).unwrap()
}

fn raw(fake: &Fake, stream: StreamId) -> u64 {
    fake.backend.raw_stream(stream).unwrap()
}

/// Ends the capture and returns its error.
fn end(fake: &Fake, stream: StreamId) -> Error {
    // SAFETY: The tests began it.
    unsafe { fake.backend.end_capture(stream) }.unwrap_err()
}

fn use_it(fake: &Fake, stream: StreamId) {
    let fill = MemoryFill::new(0, DevicePtr::new(0x1000), FillPattern::U8(1), 16);
    // SAFETY: Nothing dereferences the address.
    unsafe { fake.backend.fill(&fill, stream) }.unwrap();
    fake.backend.synchronize_stream(stream).unwrap();
}

/// Makes `other` join the capture of `origin`.
fn join(fake: &Fake, origin: StreamId, other: StreamId) {
    let event = fake.backend.create_event(0, &EventOptions::new()).unwrap();
    fake.backend.record_event(event, origin).unwrap();
    fake.backend.stream_wait_event(other, event).unwrap();
    fake.backend.destroy_event(event).unwrap();
}

#[test]
fn a_stream_that_died_is_replaced_under_its_id_behind_its_earlier_work() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    for priority in [StreamPriority::Normal, StreamPriority::High] {
        let id = backend.create_stream(0, &StreamOptions::new().with_priority(priority)).unwrap();
        let before = raw(&fake, id);
        backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
        fake.lose(before);
        let error = end(&fake, id);
        assert_eq!((error.kind(), error.code()), (ErrorKind::Capture, Some(901)), "{error}");
        let after = raw(&fake, id);
        assert!(after != before && !fake.is_alive(before));
        assert_eq!(fake.priority_of(after), fake.priority_of(before));
        // The new stream waits for an event of the old one from before the capture.
        let waits = fake.waits_of(after);
        assert_eq!(waits.iter().map(|event| fake.recorded_on(*event)).collect::<Vec<_>>(), [Some(before)]);
        use_it(&fake, id);
        backend.synchronize_device(0).unwrap();
        // The new stream can be captured.
        backend.begin_capture(id, CaptureMode::Global).unwrap();
        // SAFETY: This test began it.
        backend.destroy_graph(unsafe { backend.end_capture(id) }.unwrap()).unwrap();
        assert_eq!(raw(&fake, id), after);
        backend.destroy_stream(id).unwrap();
    }
    assert!(!backend.state().may_capture());
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn every_stream_that_had_joined_is_replaced_and_others_are_not() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let [origin, joined, late, apart] = [(); 4].map(|()| stream(&fake));
    let before = [origin, joined, late, apart].map(|id| raw(&fake, id));
    backend.begin_capture(origin, CaptureMode::ThreadLocal).unwrap();
    join(&fake, origin, joined);
    join(&fake, joined, late);
    // A wait that joins no capture.
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, apart).unwrap();
    backend.stream_wait_event(apart, event).unwrap();
    backend.destroy_event(event).unwrap();
    // A stream that joined cannot end the capture.
    fake.answer("stream_end_capture", INVALID);
    assert_eq!(end(&fake, joined).code(), Some(i64::from(INVALID)));
    assert_eq!(raw(&fake, joined), before[1]);
    fake.lose(before[0]);
    assert_eq!(end(&fake, origin).kind(), ErrorKind::Capture);
    for (id, before) in [origin, joined, late].into_iter().zip(before) {
        assert_ne!(raw(&fake, id), before);
        let waits = fake.waits_of(raw(&fake, id));
        assert_eq!(waits.iter().map(|event| fake.recorded_on(*event)).collect::<Vec<_>>(), [Some(before)]);
        use_it(&fake, id);
    }
    assert_eq!(raw(&fake, apart), before[3]);
    for id in [origin, joined, late, apart] {
        backend.destroy_stream(id).unwrap();
    }
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_capture_that_was_not_joined_is_lost_with_its_streams() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let (origin, joined) = (stream(&fake), stream(&fake));
    let before = [raw(&fake, origin), raw(&fake, joined)];
    backend.begin_capture(origin, CaptureMode::ThreadLocal).unwrap();
    join(&fake, origin, joined);
    fake.leave_unjoined(true);
    assert_eq!(end(&fake, origin).code(), Some(904));
    fake.leave_unjoined(false);
    for (id, before) in [origin, joined].into_iter().zip(before) {
        assert!(raw(&fake, id) != before && !fake.is_alive(before));
        use_it(&fake, id);
        backend.destroy_stream(id).unwrap();
    }
    backend.synchronize_device(0).unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_lost_capture_leaves_that_of_another_thread_alone() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let [mine, my_other, theirs, their_other] = [(); 4].map(|()| stream(&fake));
    backend.begin_capture(mine, CaptureMode::ThreadLocal).unwrap();
    join(&fake, mine, my_other);
    let theirs_before = [raw(&fake, theirs), raw(&fake, their_other)];
    let ends = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            backend.begin_capture(theirs, CaptureMode::ThreadLocal).unwrap();
            join(&fake, theirs, their_other);
            // Meanwhile, the other capture is lost, and ended on its own thread.
            ends.wait();
            ends.wait();
            assert_eq!([raw(&fake, theirs), raw(&fake, their_other)], theirs_before);
            // SAFETY: This thread began it.
            backend.destroy_graph(unsafe { backend.end_capture(theirs) }.unwrap()).unwrap();
        });
        ends.wait();
        fake.lose(raw(&fake, mine));
        assert_eq!(end(&fake, mine).kind(), ErrorKind::Capture);
        ends.wait();
    });
    for id in [mine, my_other] {
        use_it(&fake, id);
    }
    for id in [mine, my_other, theirs, their_other] {
        backend.destroy_stream(id).unwrap();
    }
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_stream_of_other_code_cannot_be_replaced_and_says_so() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let foreign = fake.foreign();
    // SAFETY: The stream is alive until it is given back.
    let id = unsafe { backend.stream_from_raw(0, foreign) }.unwrap();
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    fake.lose(foreign);
    let error = end(&fake, id);
    assert_eq!(error.kind(), ErrorKind::InvalidState);
    assert!(error.hint().contains("the code that created it"), "{error}");
    assert_eq!(raw(&fake, id), foreign);
    backend.synchronize_device(0).unwrap();
    backend.destroy_stream(id).unwrap();
    fake.destroy_foreign(foreign);
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_handle_that_was_bound_to_the_dead_stream_is_bound_again_and_keeps_its_workspace() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let id = stream(&fake);
    let before = raw(&fake, id);
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    handle.set_stream(id).unwrap();
    let ptr = DevicePtr::new(0x1000);
    // SAFETY: Nothing dereferences the address.
    unsafe { handle.set_workspace(Some(Workspace { ptr, bytes: 64 })) }.unwrap();
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 2, 2, 2), ptr, ptr, ptr);
    // SAFETY: As above.
    unsafe { handle.gemm(&gemm) }.unwrap();
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    fake.lose(before);
    end(&fake, id);
    for _ in 0..2 {
        // SAFETY: As above.
        unsafe { handle.gemm(&gemm) }.unwrap();
    }
    assert_eq!(fake.bindings_of(handle.raw()), [before, raw(&fake, id)]);
    assert_eq!(fake.calls("blas_set_workspace").len(), 1);
    // A call restores the handle's own workspace. Binding the stream does not.
    // SAFETY: As above.
    unsafe { handle.set_workspace(None) }.unwrap();
    assert_eq!((fake.calls("blas_set_workspace").len(), fake.bindings_of(handle.raw()).len()), (2, 2));
    handle.destroy().unwrap();
    backend.destroy_stream(id).unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_dead_stream_is_destroyed_only_after_the_calls_that_use_it() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let id = stream(&fake);
    let before = raw(&fake, id);
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    let held = backend.state().stream("t", id).unwrap();
    fake.lose(before);
    end(&fake, id);
    // This thread's own use postpones the destruction.
    assert!(fake.is_alive(before) && held.raw().0 == before && raw(&fake, id) != before);
    drop(held);
    use_it(&fake, id);
    backend.live_objects();
    assert!(!fake.is_alive(before));
    backend.destroy_stream(id).unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_stream_that_cannot_be_replaced_is_told_as_that_and_leaves_nothing() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    for failing in ["stream_create_with_priority", "stream_wait_event"] {
        let id = stream(&fake);
        let before = raw(&fake, id);
        backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
        fake.lose(before);
        fake.answer(failing, 2);
        let error = end(&fake, id);
        assert_eq!((error.kind(), error.code()), (ErrorKind::InvalidState, Some(2)), "{failing}: {error}");
        assert_eq!(raw(&fake, id), before);
        backend.synchronize_device(0).unwrap();
        backend.destroy_stream(id).unwrap();
        assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
    }
}

#[test]
fn a_capture_that_fails_to_begin_or_whose_stream_is_destroyed_leaves_nothing() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let (origin, joined) = (stream(&fake), stream(&fake));
    for failing in ["event_create", "event_record", "stream_begin_capture"] {
        fake.answer(failing, INVALID);
        assert!(backend.begin_capture(origin, CaptureMode::Global).is_err());
        backend.synchronize_device(0).unwrap();
        assert_eq!(fake.alive(), 2, "{failing}");
    }
    let before = raw(&fake, joined);
    backend.begin_capture(origin, CaptureMode::Relaxed).unwrap();
    join(&fake, origin, joined);
    fake.lose(raw(&fake, origin));
    backend.destroy_stream(origin).unwrap();
    // The stream that had joined is replaced.
    assert_ne!(raw(&fake, joined), before);
    use_it(&fake, joined);
    backend.synchronize_device(0).unwrap();
    backend.destroy_stream(joined).unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}
