//! What a capture allows, and what is left of streams when one is lost.

use std::ptr::null_mut;

use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Hip, Ptr, allocate, download, event, pinned, stream, upload};

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

fn begin(stream: Ptr, mode: i32) {
    ok!(Hip.hipStreamBeginCapture(stream, mode));
}

fn end(stream: Ptr) -> i32 {
    let mut graph = null_mut();
    let code = code!(Hip.hipStreamEndCapture(stream, &mut graph));
    assert_eq!(code == 0, !graph.is_null());
    code
}

fn status(stream: Ptr) -> i32 {
    let mut status = -1;
    ok!(Hip.hipStreamIsCapturing(stream, &mut status));
    status
}

/// Makes a stream join the capture of another one.
fn join(origin: Ptr, other: Ptr) {
    let fork = event(2);
    ok!(Hip.hipEventRecord(fork, origin));
    ok!(Hip.hipStreamWaitEvent(other, fork, 0));
}

/// Whether a stream answers as one whose capture was lost.
fn is_dead(stream: Ptr, memory: Ptr) -> bool {
    let codes = [
        code!(Hip.hipMemsetAsync(memory, 0, 16, stream)),
        code!(Hip.hipStreamSynchronize(stream)),
        code!(Hip.hipStreamQuery(stream)),
        status(stream),
    ];
    assert!([[901, 900, 900, 2], [0, 0, 0, 0]].contains(&codes), "{codes:?}");
    codes[0] == 901
}

isolated! {
    fn what_was_captured_is_replayed(_) over ["rocm", "rocm6"] {
        let (stream, source, target) = (stream(), upload(&[1u32, 2, 3], null_mut()), allocate(12));
        begin(stream, THREAD_LOCAL);
        assert_eq!(status(stream), 1);
        let (mut active, mut number) = (0, 0);
        ok!(Hip.hipStreamGetCaptureInfo(stream, &mut active, &mut number));
        assert_eq!(active, 1);
        assert_ne!(number, 0);
        ok!(Hip.hipMemcpyAsync(target, source, 12, 3, stream));
        ok!(Hip.hipMemsetD32Async(target, 9, 1, stream));
        let (mut graph, mut executable, mut node, mut log) = (null_mut(), null_mut(), null_mut(), [1; 4]);
        ok!(Hip.hipStreamEndCapture(stream, &mut graph));
        ok!(Hip.hipGraphInstantiate(&mut executable, graph, &mut node, log.as_mut_ptr(), 4));
        assert_eq!((node.is_null(), log[0]), (true, 0));
        ok!(Hip.hipGraphDestroy(graph));
        ok!(Hip.hipGraphLaunch(executable, stream));
        assert_eq!(download::<u32>(target, 3, stream), [9, 2, 3]);
        ok!(Hip.hipGraphExecDestroy(executable));
        assert_eq!(code!(Hip.hipGraphExecDestroy(executable)), 400);
        assert_eq!(status(stream), 0);
    }

    fn a_lost_capture_takes_its_origin_with_it_and_leaves_the_others_active(_) over ["rocm", "rocm6"] {
        let memory = allocate(16);
        type Loses = fn(Ptr, Ptr) -> i32;
        let calls: [(Loses, i32); 4] = [
            (|stream, _| code!(Hip.hipStreamSynchronize(stream)), 900),
            (|stream, _| code!(Hip.hipStreamQuery(stream)), 900),
            (|_, memory| code!(Hip.hipMemcpy(memory, memory, 16, 3)), 906),
            (|_, _| code!(Hip.hipDeviceSynchronize()), 900),
        ];
        for (lose, expected) in calls {
            for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
                let [origin, forked, other] = [stream(), stream(), stream()];
                let before = event(2);
                ok!(Hip.hipEventRecord(before, other));
                begin(origin, mode);
                join(origin, forked);
                assert_eq!([origin, forked, other].map(status), [1, 1, 0]);
                assert_eq!(lose(origin, memory), expected);
                assert_eq!([origin, forked, other].map(status), [2, 1, 0]);
                assert_eq!(end(forked), 903);
                assert_eq!(end(origin), 901);
                assert_eq!([origin, other].map(|stream| is_dead(stream, memory)), [true, false]);
                assert_eq!((end(origin), status(forked)), (901, 1));
                // Other streams and calls work as before.
                ok!(Hip.hipEventSynchronize(before));
                ok!(Hip.hipDeviceSynchronize());
                ok!(Hip.hipMemcpy(memory, memory, 16, 3));
                assert_eq!(code!(Hip.hipEventRecord(before, origin)), 901);
                assert_eq!(code!(Hip.hipStreamWaitEvent(origin, before, 0)), 901);
                // Destroying the origin frees the streams that joined through it.
                ok!(Hip.hipStreamDestroy(origin));
                assert!(!is_dead(forked, memory) && !is_dead(other, memory));
                for stream in [forked, other] {
                    ok!(Hip.hipStreamDestroy(stream));
                }
                let next = stream();
                begin(next, GLOBAL);
                assert_eq!(end(next), 0);
                assert!(!is_dead(next, memory));
            }
        }
    }

    fn a_capture_that_is_begun_on_a_dead_stream_comes_to_nothing(_) over ["rocm", "rocm6"] {
        let (stream, memory) = (stream(), allocate(16));
        begin(stream, THREAD_LOCAL);
        assert_eq!(code!(Hip.hipStreamQuery(stream)), 900);
        assert_eq!(end(stream), 901);
        begin(stream, THREAD_LOCAL);
        assert_eq!(code!(Hip.hipMemsetAsync(memory, 0, 16, stream)), 1);
        assert_eq!(end(stream), 904);
        ok!(Hip.hipStreamDestroy(stream));
    }

    fn memory_is_allocated_beside_a_relaxed_capture_only(_) over ["rocm", "rocm6"] {
        for mode in [GLOBAL, THREAD_LOCAL] {
            let stream = stream();
            begin(stream, mode);
            assert_eq!(code!(Hip.hipMalloc(&mut null_mut(), 16)), 900);
            assert_eq!((status(stream), end(stream)), (2, 901));
        }
        let stream = stream();
        begin(stream, RELAXED);
        ok!(Hip.hipFree(allocate(16)));
        ok!(Hip.hipHostFree(pinned(16, 0)));
        assert_eq!(end(stream), 0);
        // A thread can say that it knows what it does.
        begin(stream, GLOBAL);
        let mut mode = RELAXED;
        ok!(Hip.hipThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, GLOBAL);
        ok!(Hip.hipFree(allocate(16)));
        ok!(Hip.hipThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!((mode, end(stream)), (RELAXED, 0));
        mode = 3;
        assert_eq!(code!(Hip.hipThreadExchangeStreamCaptureMode(&mut mode)), 1);
    }

    fn a_capture_of_another_thread_counts_in_global_mode(_) over ["rocm", "rocm6"] {
        for (mode, expected) in [(GLOBAL, 900), (THREAD_LOCAL, 0), (RELAXED, 0)] {
            let stream = stream();
            begin(stream, mode);
            let elsewhere = std::thread::spawn(|| code!(Hip.hipMalloc(&mut null_mut(), 16))).join().unwrap();
            assert_eq!((elsewhere, end(stream)), (expected, if expected == 0 { 0 } else { 901 }));
        }
    }

    fn what_cannot_be_captured_says_so(_) over ["rocm", "rocm6"] {
        let stream = stream();
        assert_eq!(code!(Hip.hipStreamBeginCapture(null_mut(), GLOBAL)), 900);
        assert_eq!(code!(Hip.hipStreamBeginCapture(stream, 3)), 1);
        assert_eq!(end(stream), 401);
        begin(stream, GLOBAL);
        assert_eq!(code!(Hip.hipStreamBeginCapture(stream, GLOBAL)), 401);
        assert_eq!(code!(Hip.hipStreamEndCapture(stream, null_mut())), 1);
        assert_eq!(end(stream), 0);
    }

    fn the_end_of_an_origin_frees_every_stream_that_joined(_) over ["rocm", "rocm6"] {
        let ([origin, forked, late], memory) = ([stream(), stream(), stream()], allocate(16));
        begin(origin, GLOBAL);
        join(origin, forked);
        join(forked, late);
        assert_eq!([origin, forked, late].map(status), [1, 1, 1]);
        ok!(Hip.hipStreamDestroy(origin));
        assert!(!is_dead(forked, memory) && !is_dead(late, memory));
        ok!(Hip.hipStreamDestroy(forked));
        ok!(Hip.hipDeviceSynchronize());
    }

    fn a_capture_that_was_not_joined_leaves_every_stream_active(_) over ["rocm", "rocm6"] {
        let ([origin, forked], memory) = ([stream(), stream()], allocate(16));
        begin(origin, RELAXED);
        join(origin, forked);
        ok!(Hip.hipMemsetAsync(memory, 0, 16, forked));
        assert_eq!(end(origin), 904);
        assert_eq!([origin, forked].map(status), [1, 1]);
        ok!(Hip.hipStreamDestroy(origin));
        assert!(!is_dead(forked, memory));
    }

    fn work_of_a_stream_that_stayed_active_goes_into_a_deleted_graph(_) over ["rocm", "rocm6"] aborts "a graph that was deleted" {
        let ([origin, forked], memory) = ([stream(), stream()], allocate(16));
        begin(origin, THREAD_LOCAL);
        join(origin, forked);
        assert_eq!(code!(Hip.hipStreamQuery(origin)), 900);
        assert_eq!(end(origin), 901);
        code!(Hip.hipMemsetAsync(memory, 0, 16, forked));
    }

    fn a_stream_that_waits_for_an_event_of_a_lost_capture_becomes_active(_) over ["rocm", "rocm6"] {
        let ([origin, late], inside) = ([stream(), stream()], event(2));
        begin(origin, THREAD_LOCAL);
        ok!(Hip.hipEventRecord(inside, origin));
        assert_eq!(code!(Hip.hipStreamQuery(origin)), 900);
        assert_eq!(end(origin), 901);
        ok!(Hip.hipEventQuery(inside));
        ok!(Hip.hipStreamWaitEvent(late, inside, 0));
        assert_eq!(status(late), 1);
        // Destroying the origin frees the late stream.
        ok!(Hip.hipStreamDestroy(origin));
        assert_eq!(status(late), 0);
        ok!(Hip.hipEventQuery(inside));
        ok!(Hip.hipStreamWaitEvent(late, inside, 0));
        assert_eq!(status(late), 0);
    }

    fn a_capture_ends_on_its_own_thread_after_it_was_refused_on_another(_) over ["rocm", "rocm6"] {
        let (stream, memory) = (stream(), allocate(16));
        begin(stream, THREAD_LOCAL);
        let raw = stream as usize;
        let elsewhere = std::thread::spawn(move || end(std::ptr::with_exposed_provenance_mut(raw))).join().unwrap();
        assert_eq!(elsewhere, 908);
        ok!(Hip.hipMemsetAsync(memory, 0, 16, stream));
        assert_eq!(end(stream), 0);
    }

    fn the_legacy_stream_works_beside_a_capture_and_synchronous_copies_do_not(_) over ["rocm", "rocm6"] {
        let (mut blocking, memory, mark) = (null_mut(), allocate(16), event(2));
        ok!(Hip.hipStreamCreateWithFlags(&mut blocking, 0));
        begin(blocking, RELAXED);
        ok!(Hip.hipMemsetAsync(memory, 0, 16, null_mut()));
        ok!(Hip.hipEventRecord(mark, null_mut()));
        assert!([0, 600].contains(&code!(Hip.hipEventQuery(mark))));
        assert_eq!(status(blocking), 1);
        assert_eq!(code!(Hip.hipMemcpy(memory, memory, 16, 3)), 906);
        assert_eq!((status(blocking), end(blocking)), (2, 901));
    }
}
