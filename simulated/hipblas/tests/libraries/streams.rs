//! Streams.

use std::ptr::{null_mut, without_provenance_mut};

use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Hip, Ptr, gate_on, pinned, stream};

isolated! {
    fn priorities_are_moved_into_their_range(_) over ["rocm", "rocm6"] {
        let (mut least, mut greatest) = (9, 9);
        ok!(Hip.hipDeviceGetStreamPriorityRange(&mut least, &mut greatest));
        assert_eq!((least, greatest), (1, -1));
        for (wanted, given) in [(0, 0), (1, 1), (-1, -1), (5, 1), (-5, -1)] {
            let (mut stream, mut priority) = (null_mut(), 9);
            ok!(Hip.hipStreamCreateWithPriority(&mut stream, 1, wanted));
            ok!(Hip.hipStreamGetPriority(stream, &mut priority));
            assert_eq!(priority, given);
        }
    }

    fn flags_are_checked_and_told(_) over ["rocm", "rocm6"] {
        for flags in [0, 1] {
            let (mut stream, mut told) = (null_mut(), 9);
            ok!(Hip.hipStreamCreateWithFlags(&mut stream, flags));
            ok!(Hip.hipStreamGetFlags(stream, &mut told));
            assert_eq!(told, flags);
        }
        assert_eq!(code!(Hip.hipStreamCreateWithFlags(&mut null_mut(), 2)), 1);
        assert_eq!(code!(Hip.hipStreamCreateWithFlags(null_mut(), 0)), 1);
    }

    fn default_streams_are_0_and_2_and_cannot_be_destroyed(_) over ["rocm", "rocm6"] {
        for raw in [0, 2] {
            let (stream, mut device) = (without_provenance_mut(raw), -1);
            ok!(Hip.hipStreamSynchronize(stream));
            ok!(Hip.hipStreamQuery(stream));
            ok!(Hip.hipStreamGetDevice(stream, &mut device));
            assert_eq!((device, code!(Hip.hipStreamDestroy(stream))), (0, 400));
        }
    }

    fn the_legacy_stream_waits_for_blocking_ones_and_for_no_others(_) over ["rocm", "rocm6"] {
        let mut blocking = null_mut();
        ok!(Hip.hipStreamCreateWithFlags(&mut blocking, 0));
        let (free, word) = (stream(), pinned(4, 0));
        let gate = gate_on(free);
        ok!(Hip.hipMemsetAsync(word, 1, 4, null_mut()));
        ok!(Hip.hipStreamSynchronize(null_mut()));
        gate.open();
        let gate = gate_on(blocking);
        ok!(Hip.hipMemsetAsync(word, 2, 4, null_mut()));
        assert_eq!(code!(Hip.hipStreamQuery(null_mut())), 600);
        gate.open();
        ok!(Hip.hipStreamSynchronize(null_mut()));
        // SAFETY: the work on the memory is done.
        assert_eq!(unsafe { word.cast::<u32>().read() }, 0x0202_0202);
    }

    fn what_is_queued_is_executed_before_the_stream_is_gone(_) over ["rocm", "rocm6"] {
        let (stream, word) = (stream(), pinned(4, 0));
        let gate = gate_on(stream);
        ok!(Hip.hipMemsetAsync(word, 3, 4, stream));
        // The call waits for the work.
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(50));
                gate.open();
            });
            ok!(Hip.hipStreamDestroy(stream));
        });
        // SAFETY: the work on the memory is done.
        assert_eq!(unsafe { word.cast::<u32>().read() }, 0x0303_0303);
    }

    fn a_destroyed_stream_answers_709_in_6(6) over ["rocm6"] {
        let (stream, memory) = (stream(), pinned(4, 0));
        ok!(Hip.hipStreamDestroy(stream));
        let calls: [fn(Ptr, Ptr) -> i32; 4] = [
            |stream, _| code!(Hip.hipStreamSynchronize(stream)),
            |stream, _| code!(Hip.hipStreamQuery(stream)),
            |stream, _| code!(Hip.hipStreamDestroy(stream)),
            |stream, memory| code!(Hip.hipMemsetAsync(memory, 0, 4, stream)),
        ];
        assert_eq!(calls.map(|call| call(stream, memory)), [709; 4]);
    }

    fn a_destroyed_stream_ends_the_process_in_7(7) over ["rocm"] aborts "a stream was used after its end" {
        let stream = stream();
        ok!(Hip.hipStreamDestroy(stream));
        code!(Hip.hipStreamQuery(stream));
    }
}
