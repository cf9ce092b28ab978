//! Events.

use std::ptr::null_mut;

use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Hip, event, gate_on, stream};

/// `hipEventDisableTiming`.
const UNTIMED: u32 = 2;

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
}
