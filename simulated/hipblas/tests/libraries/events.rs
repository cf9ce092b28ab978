//! Events.

use std::ptr::null_mut;

use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Hip, Ptr, event, gate_on, stream};

/// `hipEventDisableTiming`.
const UNTIMED: u32 = 2;

fn begin(stream: Ptr, mode: i32) {
    ok!(Hip.hipStreamBeginCapture(stream, mode));
}

fn end(stream: Ptr) -> i32 {
    code!(Hip.hipStreamEndCapture(stream, &mut null_mut()))
}

/// Queries an event until the code is not 600, and returns the code.
fn asked(event: Ptr) -> i32 {
    loop {
        match code!(Hip.hipEventQuery(event)) {
            600 => std::thread::yield_now(),
            code => return code,
        }
    }
}

/// Returns an event that was recorded on a stream.
fn recorded_on(stream: Ptr) -> Ptr {
    let event = event(UNTIMED);
    ok!(Hip.hipEventRecord(event, stream));
    event
}

isolated! {
    fn one_that_was_never_recorded_is_nothing_to_wait_for(_) over ["rocm", "rocm6"] {
        let (event, stream) = (event(UNTIMED), stream());
        ok!(Hip.hipEventQuery(event));
        ok!(Hip.hipEventSynchronize(event));
        ok!(Hip.hipStreamWaitEvent(stream, event, 0));
        ok!(Hip.hipStreamSynchronize(stream));
    }

    fn time_is_told_between_two_that_are_over(_) over ["rocm", "rocm6"] {
        let (stream, [start, end], untimed, mut time) = (stream(), [event(0), event(0)], event(UNTIMED), -1.0);
        ok!(Hip.hipEventRecord(start, stream));
        assert_eq!(code!(Hip.hipEventElapsedTime(&mut time, start, end)), 400);
        ok!(Hip.hipEventRecord(untimed, stream));
        assert_eq!(code!(Hip.hipEventElapsedTime(&mut time, start, untimed)), 400);
        let gate = gate_on(stream);
        ok!(Hip.hipEventRecord(end, stream));
        assert_eq!(code!(Hip.hipEventQuery(end)), 600);
        assert_eq!(code!(Hip.hipEventElapsedTime(&mut time, start, end)), 600);
        gate.open();
        ok!(Hip.hipEventSynchronize(end));
        ok!(Hip.hipEventElapsedTime(&mut time, start, end));
        assert!(time >= 0.0);
    }

    fn flags_are_checked(_) over ["rocm", "rocm6"] {
        for flags in [0, 1, 2, 3, 6, 0x2000_0000, 0x4000_0002, 0x8000_0002, 0x8000_0006] {
            ok!(Hip.hipEventDestroy(event(flags)));
        }
        // Unknown ones, one for other processes that takes the time, and two kinds of release.
        for flags in [8, 4, 0x8000_0004, 0xc000_0000] {
            assert_eq!(code!(Hip.hipEventCreateWithFlags(&mut null_mut(), flags)), 1, "{flags:#x}");
        }
    }

    fn null_and_stale_handles_are_invalid(_) over ["rocm", "rocm6"] {
        let (stale, stream) = (event(UNTIMED), stream());
        ok!(Hip.hipEventDestroy(stale));
        for bad in [null_mut(), stale] {
            assert_eq!(code!(Hip.hipEventDestroy(bad)), 400);
            assert_eq!(code!(Hip.hipEventRecord(bad, stream)), 400);
            assert_eq!(code!(Hip.hipEventQuery(bad)), 400);
            assert_eq!(code!(Hip.hipEventSynchronize(bad)), 400);
            assert_eq!(code!(Hip.hipStreamWaitEvent(stream, bad, 0)), 400);
            assert_eq!(code!(Hip.hipEventElapsedTime(&mut 0.0, bad, bad)), 400);
        }
    }

    fn a_stream_goes_on_when_what_it_waits_for_is_reached(_) over ["rocm", "rocm6"] {
        let (first, second, event) = (stream(), stream(), event(UNTIMED));
        let gate = gate_on(first);
        ok!(Hip.hipEventRecord(event, first));
        ok!(Hip.hipStreamWaitEvent(second, event, 0));
        // The wait stays when the event goes.
        ok!(Hip.hipEventDestroy(event));
        assert_eq!(code!(Hip.hipStreamQuery(second)), 600);
        gate.open();
        ok!(Hip.hipStreamSynchronize(second));
    }

    fn an_event_of_an_ended_capture_is_complete_and_has_no_time(_) over ["rocm", "rocm6"] {
        let ([stream, other], inside, mut time) = ([stream(), stream()], event(0), -1.0);
        begin(stream, 1);
        ok!(Hip.hipEventRecord(inside, stream));
        assert_eq!(end(stream), 0);
        ok!(Hip.hipEventQuery(inside));
        ok!(Hip.hipEventSynchronize(inside));
        ok!(Hip.hipStreamWaitEvent(other, inside, 0));
        assert_eq!(code!(Hip.hipEventElapsedTime(&mut time, inside, inside)), 400);
    }

    fn a_query_of_an_event_of_an_open_capture_loses_it(_) over ["rocm", "rocm6"] {
        let stream = stream();
        begin(stream, 2);
        assert_eq!(code!(Hip.hipEventQuery(recorded_on(stream))), 907);
        assert_eq!(end(stream), 901);
    }

    fn an_event_from_before_a_capture_is_asked_in_7(7) over ["rocm"] {
        let [stream, other] = [stream(), stream()];
        let before = recorded_on(stream);
        begin(stream, 2);
        let mut mode = 2;
        ok!(Hip.hipThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(asked(before), 0);
        ok!(Hip.hipEventSynchronize(before));
        assert_eq!(code!(Hip.hipStreamWaitEvent(other, before, 0)), 905);
        assert_eq!(end(stream), 0);
        ok!(Hip.hipStreamWaitEvent(other, before, 0));
    }

    fn an_event_from_before_a_capture_loses_it_in_6(6) over ["rocm6"] {
        for mode in [0, 1, 2] {
            let [stream, other] = [stream(), stream()];
            let before = recorded_on(stream);
            begin(stream, mode);
            assert_eq!(code!(Hip.hipStreamWaitEvent(other, before, 0)), 905);
            let mut relaxed = 2;
            ok!(Hip.hipThreadExchangeStreamCaptureMode(&mut relaxed));
            assert_eq!(code!(Hip.hipEventQuery(before)), 907);
            ok!(Hip.hipThreadExchangeStreamCaptureMode(&mut relaxed));
            assert_eq!(end(stream), 901);
        }
    }

    fn a_capturing_stream_records_nothing_for_an_outside_event(_) over ["rocm", "rocm6"] {
        let [stream, other] = [stream(), stream()];
        let outside = recorded_on(other);
        begin(stream, 0);
        ok!(Hip.hipStreamWaitEvent(stream, outside, 0));
        assert_eq!(end(stream), 0);
    }

    fn a_query_beside_a_global_capture_is_refused_in_7(7) over ["rocm"] {
        let [stream, other] = [stream(), stream()];
        let outside = recorded_on(other);
        begin(stream, 0);
        assert_eq!((code!(Hip.hipEventQuery(outside)), end(stream)), (900, 901));
    }

    fn a_query_beside_a_global_capture_is_answered_in_6(6) over ["rocm6"] {
        let [stream, other] = [stream(), stream()];
        let outside = recorded_on(other);
        begin(stream, 0);
        assert_eq!(asked(outside), 0);
        assert_eq!(end(stream), 0);
    }

    fn an_event_that_outlives_its_stream_is_a_use_after_free_in_7(7) over ["rocm"] aborts "a use after free" {
        let gone = stream();
        let event = recorded_on(gone);
        ok!(Hip.hipStreamDestroy(gone));
        // A wait of a stream checks whether the event's stream is alive.
        ok!(Hip.hipStreamWaitEvent(stream(), event, 0));
        code!(Hip.hipEventQuery(event));
    }

    fn an_event_that_outlives_its_stream_answers_907_in_6(6) over ["rocm6"] {
        let gone = stream();
        let event = recorded_on(gone);
        ok!(Hip.hipStreamDestroy(gone));
        ok!(Hip.hipStreamWaitEvent(stream(), event, 0));
        assert_eq!([code!(Hip.hipEventQuery(event)), code!(Hip.hipEventSynchronize(event))], [907, 907]);
    }

    fn an_event_of_a_threads_own_stream_ends_with_the_thread_in_6(6) over ["rocm6"] {
        let event = event(UNTIMED);
        let raw = event as usize;
        let record = move || {
            let own = std::ptr::without_provenance_mut(2);
            ok!(Hip.hipEventRecord(std::ptr::with_exposed_provenance_mut(raw), own));
            code!(Hip.hipEventQuery(std::ptr::with_exposed_provenance_mut(raw)))
        };
        assert!([0, 600].contains(&std::thread::spawn(record).join().unwrap()));
        assert_eq!(code!(Hip.hipEventQuery(event)), 907);
    }
}
