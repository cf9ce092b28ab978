//! Tests of streams that die with a lost capture, over a fake vendor.

use super::testing::{Fake, INVALID, NOT_READY};
use highwater_hal::{
    Backend, BlasKind, BlasOptions, CaptureMode, Completion, DataType, DevicePtr, Error, ErrorKind, EventOptions,
    FillPattern, Gemm, GemmShape, MemoryFill, StreamId, StreamOptions, StreamPriority, Workspace,
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
fn a_stream_that_died_is_replaced_under_its_id() {
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
        // The vendor's call that destroys the old stream waits for its earlier work.
        assert!(after != before && !fake.is_alive(before));
        assert_eq!(fake.priority_of(after), fake.priority_of(before));
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
    fake.is_empty();
}

#[test]
fn the_first_stream_is_destroyed_and_the_streams_that_had_joined_work_again() {
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
    fake.lose(before[0]);
    assert_eq!(end(&fake, origin).kind(), ErrorKind::Capture);
    assert!(raw(&fake, origin) != before[0] && !fake.is_alive(before[0]));
    for (id, before) in [joined, late, apart].into_iter().zip(&before[1..]) {
        assert_eq!(raw(&fake, id), *before);
    }
    for id in [origin, joined, late, apart] {
        use_it(&fake, id);
        backend.destroy_stream(id).unwrap();
    }
    fake.is_empty();
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
    assert!(raw(&fake, origin) != before[0] && !fake.is_alive(before[0]) && raw(&fake, joined) == before[1]);
    for id in [origin, joined] {
        use_it(&fake, id);
        backend.destroy_stream(id).unwrap();
    }
    backend.synchronize_device(0).unwrap();
    fake.is_empty();
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
    fake.is_empty();
}

#[test]
fn a_stream_of_other_code_cannot_be_replaced_and_says_so() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let foreign = fake.foreign();
    // SAFETY: The stream is alive until the test destroys it.
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
    fake.is_empty();
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
    fake.is_empty();
}

#[test]
fn a_dead_stream_is_destroyed_only_after_the_calls_that_use_it() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let id = stream(&fake);
    let before = raw(&fake, id);
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    fake.lose(before);
    let uses = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let held = backend.state().stream("t", id).unwrap();
            uses.wait();
            while raw(&fake, id) == before {
                std::thread::yield_now();
            }
            // The new handle is in the table, and the end of the capture waits for this use of the old one.
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(fake.is_alive(before) && held.raw().0 == before);
        });
        uses.wait();
        end(&fake, id);
        assert!(!fake.is_alive(before));
    });
    use_it(&fake, id);
    backend.destroy_stream(id).unwrap();
    fake.is_empty();
}

#[test]
fn a_stream_that_cannot_be_replaced_is_told_as_that_and_leaves_nothing() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let id = stream(&fake);
    let before = raw(&fake, id);
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    fake.lose(before);
    fake.answer("stream_create_with_priority", 2);
    let error = end(&fake, id);
    assert_eq!((error.kind(), error.code()), (ErrorKind::InvalidState, Some(2)), "{error}");
    assert_eq!(raw(&fake, id), before);
    backend.synchronize_device(0).unwrap();
    backend.destroy_stream(id).unwrap();
    fake.is_empty();
}

#[test]
fn a_capture_that_fails_to_begin_or_whose_stream_is_destroyed_leaves_nothing() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let (origin, joined) = (stream(&fake), stream(&fake));
    for failing in
        ["stream_create_with_priority", "event_create", "event_record", "stream_wait_event", "stream_begin_capture"]
    {
        fake.answer(failing, INVALID);
        assert!(backend.begin_capture(origin, CaptureMode::Global).is_err(), "{failing}");
        backend.synchronize_device(0).unwrap();
        // A helper is kept for the next capture.
        assert!([2, 3].contains(&fake.alive()), "{failing}: {}", fake.alive());
    }
    backend.begin_capture(origin, CaptureMode::Relaxed).unwrap();
    join(&fake, origin, joined);
    fake.lose(raw(&fake, origin));
    backend.destroy_stream(origin).unwrap();
    use_it(&fake, joined);
    backend.synchronize_device(0).unwrap();
    backend.destroy_stream(joined).unwrap();
    fake.is_empty();
}

#[test]
fn an_event_outlives_its_stream() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let [gone, other] = [(); 2].map(|()| stream(&fake));
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, gone).unwrap();
    backend.destroy_stream(gone).unwrap();
    let asked = fake.calls("event_query").len();
    assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
    backend.synchronize_event(event).unwrap();
    backend.stream_wait_event(other, event).unwrap();
    assert_eq!((fake.calls("event_query").len(), fake.calls("stream_wait_event").len()), (asked, 0));
    // After the next record, queries call the vendor again.
    backend.record_event(event, other).unwrap();
    assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
    assert_eq!(fake.calls("event_query").len(), asked + 1);
    backend.destroy_event(event).unwrap();
    backend.destroy_stream(other).unwrap();
    fake.is_empty();
}

#[test]
fn an_event_of_a_stream_that_leaves_is_pending_until_the_stream_has_ended() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let gone = stream(&fake);
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, gone).unwrap();
    fake.hold_up("stream_destroy");
    std::thread::scope(|scope| {
        scope.spawn(|| backend.destroy_stream(gone).unwrap());
        fake.wait_for("stream_destroy");
        assert_eq!(backend.query_event(event).unwrap(), Completion::Pending);
        fake.go_on("stream_destroy");
        backend.synchronize_event(event).unwrap();
    });
    assert_eq!((backend.query_event(event).unwrap(), fake.calls("event_query").len()), (Completion::Complete, 0));
    backend.destroy_event(event).unwrap();
    fake.is_empty();
}

#[test]
fn a_wait_for_an_event_goes_on_when_the_event_is_destroyed() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let home = stream(&fake);
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, home).unwrap();
    let before = fake.alive();
    fake.answer("event_query", NOT_READY);
    fake.hold_up("event_query");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| backend.synchronize_event(event));
        fake.wait_for("event_query");
        backend.destroy_event(event).unwrap();
        assert_eq!(backend.query_event(event).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert_eq!(fake.alive(), before, "the event was destroyed during a call that uses it");
        fake.go_on("event_query");
        waiting.join().unwrap().unwrap();
    });
    // The first query found the work outstanding.
    assert_eq!(fake.calls("event_query").len(), 2);
    // The next call that destroys something also destroys the event.
    backend.destroy_stream(home).unwrap();
    let next = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.destroy_event(next).unwrap();
    fake.is_empty();
}

#[test]
fn the_end_of_a_stream_waits_for_a_query_of_its_event() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let gone = stream(&fake);
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, gone).unwrap();
    fake.hold_up("event_query");
    std::thread::scope(|scope| {
        scope.spawn(|| backend.query_event(event).unwrap());
        fake.wait_for("event_query");
        scope.spawn(|| backend.destroy_stream(gone).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(fake.calls("stream_destroy").is_empty());
        fake.go_on("event_query");
    });
    assert_eq!(fake.calls("stream_destroy").len(), 1);
    backend.destroy_event(event).unwrap();
    fake.is_empty();
}

#[test]
fn the_id_of_a_foreign_stream_ends_after_its_work_and_not_in_a_capture() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let foreign = fake.foreign();
    // SAFETY: The stream is alive until `destroy_foreign`.
    let id = unsafe { backend.stream_from_raw(0, foreign) }.unwrap();
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, id).unwrap();
    backend.begin_capture(id, CaptureMode::Relaxed).unwrap();
    assert_eq!(backend.destroy_stream(id).unwrap_err().kind(), ErrorKind::Capture);
    // SAFETY: This test began it.
    backend.destroy_graph(unsafe { backend.end_capture(id) }.unwrap()).unwrap();
    backend.destroy_stream(id).unwrap();
    assert_eq!(fake.calls("stream_synchronize").len(), 1);
    fake.destroy_foreign(foreign);
    assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
    backend.destroy_event(event).unwrap();
    fake.is_empty();
}

#[test]
fn an_event_from_before_a_capture_is_answered_by_the_point_before_it() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let [captured, joined, other] = [(); 3].map(|()| stream(&fake));
    let [first, second] = [(); 2].map(|()| backend.create_event(0, &EventOptions::new()).unwrap());
    backend.record_event(first, captured).unwrap();
    backend.record_event(second, joined).unwrap();
    backend.begin_capture(captured, CaptureMode::ThreadLocal).unwrap();
    join(&fake, captured, joined);
    for event in [first, second] {
        assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
        backend.synchronize_event(event).unwrap();
        backend.stream_wait_event(other, event).unwrap();
    }
    // The waits are for events that helpers recorded after the streams' work.
    let homes: Vec<_> = fake.waits_of(raw(&fake, other)).into_iter().map(|event| fake.recorded_on(event)).collect();
    assert!(homes.iter().all(|home| *home != Some(raw(&fake, captured)) && *home != Some(raw(&fake, joined))));
    // SAFETY: This test began it.
    backend.destroy_graph(unsafe { backend.end_capture(captured) }.unwrap()).unwrap();
    // After the capture, queries use the events themselves.
    let asked = fake.calls("event_query").len();
    assert_eq!(backend.query_event(first).unwrap(), Completion::Complete);
    assert_eq!(fake.calls("event_query").len(), asked + 1);
    for event in [first, second] {
        backend.destroy_event(event).unwrap();
    }
    for id in [captured, joined, other] {
        backend.destroy_stream(id).unwrap();
    }
    fake.is_empty();
}

#[test]
fn an_event_of_a_threads_own_stream_is_recorded_by_a_relay() {
    let fake = Fake::mortal();
    let backend = &fake.backend;
    let own = StreamId::per_thread_default(backend.identity().tag, 0);
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    for _ in 0..3 {
        backend.record_event(event, own).unwrap();
    }
    let home = fake.last_record().unwrap().1;
    assert!(home > 2 && fake.is_alive(home));
    assert_eq!(fake.calls("stream_create_with_priority").len(), 1);
    assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
    backend.destroy_event(event).unwrap();
    fake.is_empty();
}
