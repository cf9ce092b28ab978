//! Captures and graphs.

use super::*;
use std::sync::atomic::{AtomicU32, Ordering};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

fn status(stream: Handle) -> u32 {
    let mut status = 9;
    ok!(cuStreamIsCapturing(stream, &mut status));
    status
}

fn end(stream: Handle) -> (u32, Handle) {
    let mut graph = 8 as Handle;
    (cu!(cuStreamEndCapture(stream, &mut graph)), graph)
}

fn kinds(graph: Handle) -> Vec<u32> {
    let mut count = 0;
    ok!(cuGraphGetNodes(graph, null_mut(), &mut count));
    let mut nodes = vec![null_mut(); count];
    ok!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    let kind = |&node: &Handle| {
        let mut kind = 99;
        ok!(cuGraphNodeGetType(node, &mut kind));
        kind
    };
    nodes.iter().map(kind).collect()
}

#[test]
fn a_graph_is_recorded_once_and_launched_often() {
    process::alone("capture::a_graph_is_recorded_once_and_launched_often", &[], || {
        start();
        let (first, second, ptr) = (stream(), stream(), memory(64));
        let (fork, join) = (event(2), event(2));
        let counter = AtomicU32::new(0);
        ok!(cuMemsetD8Async(ptr, 0, 64, first));
        ok!(cuStreamSynchronize(first));
        ok!(cuStreamBeginCapture_v2(first, THREAD_LOCAL));
        assert_eq!(cu!(cuStreamBeginCapture_v2(first, THREAD_LOCAL)), 401);
        ok!(cuMemsetD8Async(ptr, 5, 32, first));
        ok!(cuEventRecord(fork, first));
        ok!(cuStreamWaitEvent(second, fork, 0));
        assert_eq!((status(first), status(second)), (1, 1));
        ok!(cuMemcpyDtoDAsync_v2(ptr + 32, ptr, 32, second));
        ok!(cuLaunchHostFunc(second, Some(set_flag), (&raw const counter).cast_mut().cast()));
        ok!(cuEventRecord(join, second));
        ok!(cuStreamWaitEvent(first, join, 0));
        let (code, graph) = end(first);
        assert_eq!((code, status(first), status(second)), (0, 0, 0));
        assert_eq!(kinds(graph), [2, 1, 3]);
        assert_eq!(byte_at(ptr), 0);
        let mut executable = null_mut();
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok!(cuGraphDestroy(graph));
        if is_simulated() {
            assert_eq!(cu!(cuGraphDestroy(graph)), 400);
        }
        for _ in 0..3 {
            ok!(cuGraphLaunch(executable, second));
        }
        ok!(cuGraphExecDestroy(executable));
        ok!(cuStreamSynchronize(second));
        assert_eq!((counter.load(Ordering::SeqCst), byte_at(ptr), byte_at(ptr + 63)), (3, 5, 5));
        if is_simulated() {
            assert_eq!(cu!(cuGraphLaunch(executable, second)), 400);
        }
        assert_eq!(end(first).0, 401);
        assert_eq!((cu!(cuEventQuery(join)), cu!(cuEventSynchronize(fork))), (1, 1));
        ok!(cuEventRecord(join, first));
        ok!(cuEventSynchronize(join));
    });
}

#[test]
fn an_allocation_loses_the_capture_and_the_stream_lives_on() {
    process::alone("capture::an_allocation_loses_the_capture_and_the_stream_lives_on", &[], || {
        start();
        let (stream, ptr) = (stream(), memory(64));
        for mode in [GLOBAL, THREAD_LOCAL] {
            ok!(cuStreamBeginCapture_v2(stream, mode));
            ok!(cuMemsetD8Async(ptr, 1, 64, stream));
            assert_eq!(status(stream), 1);
            let mut other = 0;
            assert_eq!(cu!(cuMemAlloc_v2(&mut other, 64)), 900);
            assert_eq!(status(stream), 2);
            assert_eq!(cu!(cuMemsetD8Async(ptr, 1, 64, stream)), 901);
            assert_eq!(end(stream), (901, null_mut()));
            assert_eq!(status(stream), 0);
            ok!(cuMemsetD8Async(ptr, 2, 64, stream));
            ok!(cuStreamSynchronize(stream));
        }
        ok!(cuStreamBeginCapture_v2(stream, RELAXED));
        let other = memory(64);
        ok!(cuMemFree_v2(other));
        assert_eq!(end(stream).0, 0);
        assert_eq!(cu!(cuStreamBeginCapture_v2(stream, 3)), 1);
    });
}

type NamedCall = (&'static str, Box<dyn Fn() -> u32 + Send + Sync>);

/// Every call that a capture in mode GLOBAL anywhere refuses, by name.
fn unsafe_calls() -> Vec<NamedCall> {
    let (other, held, done) = (stream() as usize, memory(64), event(2) as usize);
    let (host, page) = (pinned(64) as usize, Box::leak(vec![0u8; 8192].into_boxed_slice()).as_mut_ptr() as usize);
    ok!(cuEventRecord(done as Handle, other as Handle));
    ok!(cuStreamSynchronize(other as Handle));
    vec![
        ("stream query", Box::new(move || cu!(cuStreamQuery(other as Handle)))),
        ("stream synchronize", Box::new(move || cu!(cuStreamSynchronize(other as Handle)))),
        ("event query", Box::new(move || cu!(cuEventQuery(done as Handle)))),
        ("event synchronize", Box::new(move || cu!(cuEventSynchronize(done as Handle)))),
        ("free", Box::new(move || cu!(cuMemFree_v2(held)))),
        ("host free", Box::new(move || cu!(cuMemFreeHost(host as *mut c_void)))),
        ("host register", Box::new(move || cu!(cuMemHostRegister_v2(page as *mut c_void, 64, 0)))),
        ("host unregister", Box::new(move || cu!(cuMemHostUnregister(page as *mut c_void)))),
    ]
}

#[test]
fn a_global_capture_refuses_unsafe_calls_of_every_thread() {
    process::alone("capture::a_global_capture_refuses_unsafe_calls_of_every_thread", &[], || {
        let context = start().addr();
        let stream = stream();
        for (what, call) in unsafe_calls() {
            ok!(cuStreamBeginCapture_v2(stream, GLOBAL));
            let here_and_there = std::thread::scope(|scope| {
                scope
                    .spawn(|| {
                        ok!(cuCtxSetCurrent(context as Handle));
                        call()
                    })
                    .join()
                    .unwrap()
            });
            assert_eq!((here_and_there, end(stream).0), (900, 901), "{what} on another thread");
            ok!(cuStreamBeginCapture_v2(stream, GLOBAL));
            let mut mode = RELAXED;
            ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
            assert_eq!(mode, GLOBAL);
            assert_eq!(call(), 0, "{what} on a relaxed thread");
            ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
            assert_eq!((mode, end(stream).0), (RELAXED, 0), "{what}");
        }
        let mut mode = 3;
        ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, GLOBAL);
    });
}

#[test]
fn a_thread_local_capture_leaves_other_threads_alone() {
    process::alone("capture::a_thread_local_capture_leaves_other_threads_alone", &[], || {
        let context = start().addr();
        let stream = stream();
        for (what, call) in unsafe_calls() {
            ok!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
            let there = std::thread::scope(|scope| {
                scope
                    .spawn(|| {
                        ok!(cuCtxSetCurrent(context as Handle));
                        call()
                    })
                    .join()
                    .unwrap()
            });
            assert_eq!((there, end(stream).0), (0, 0), "{what}");
        }
    });
}

#[test]
fn a_capture_ends_on_its_thread_and_with_every_stream_waited_for() {
    process::alone("capture::a_capture_ends_on_its_thread_and_with_every_stream_waited_for", &[], || {
        start();
        let (first, second, fork) = (stream(), stream(), event(2));
        for (mode, code) in [(GLOBAL, 908), (THREAD_LOCAL, 908), (RELAXED, 0)] {
            ok!(cuStreamBeginCapture_v2(first, mode));
            let raw = first.addr();
            let there = std::thread::scope(|scope| scope.spawn(move || end(raw as Handle).0).join().unwrap());
            assert_eq!(there, code, "mode {mode}");
            // It is over in any case.
            assert_eq!((end(first), status(first)), ((401, null_mut()), 0), "mode {mode}");
        }
        ok!(cuStreamBeginCapture_v2(first, GLOBAL));
        ok!(cuEventRecord(fork, first));
        ok!(cuStreamWaitEvent(second, fork, 0));
        assert_eq!(end(first).0, 904);
        assert_eq!((status(first), status(second)), (0, 0));
        ok!(cuStreamSynchronize(second));
        ok!(cuStreamBeginCapture_v2(first, GLOBAL));
        ok!(cuEventRecord(fork, first));
        ok!(cuStreamWaitEvent(second, fork, 0));
        ok!(cuEventRecord(fork, second));
        ok!(cuStreamWaitEvent(first, fork, 0));
        assert_eq!((end(second).0, end(first)), (903, (901, null_mut())));
        assert_eq!((status(first), status(second)), (0, 0));
    });
}

#[test]
fn dependencies_do_not_cross_the_border_of_a_capture() {
    process::alone("capture::dependencies_do_not_cross_the_border_of_a_capture", &[], || {
        start();
        let (first, second, outside) = (stream(), stream(), event(2));
        let inside = event(2);
        ok!(cuEventRecord(outside, second));
        ok!(cuStreamBeginCapture_v2(first, GLOBAL));
        // One that was never recorded is nothing to wait for.
        ok!(cuStreamWaitEvent(first, event(2), 0));
        assert_eq!(cu!(cuStreamWaitEvent(first, outside, 0)), 905);
        assert_eq!(end(first).0, 901);
        ok!(cuStreamBeginCapture_v2(first, GLOBAL));
        ok!(cuStreamBeginCapture_v2(second, GLOBAL));
        ok!(cuEventRecord(inside, first));
        assert_eq!(cu!(cuStreamWaitEvent(second, inside, 0)), 902);
        assert_eq!((end(first).0, end(second).0), (901, 901));
        ok!(cuStreamBeginCapture_v2(first, GLOBAL));
        ok!(cuEventRecord(inside, first));
        assert_eq!(cu!(cuEventQuery(inside)), 907);
        assert_eq!(end(first).0, 901);
        assert_eq!(cu!(cuEventQuery(inside)), 1);
        ok!(cuStreamBeginCapture_v2(first, RELAXED));
        assert_eq!(cu!(cuStreamQuery(first)), 900);
        assert_eq!(end(first).0, 901);
        ok!(cuStreamBeginCapture_v2(first, RELAXED));
        assert_eq!(cu!(cuCtxSynchronize()), 900);
        assert_eq!(end(first).0, 901);
    });
}

#[test]
fn the_legacy_default_stream_takes_no_part() {
    process::alone("capture::the_legacy_default_stream_takes_no_part", &[], || {
        start();
        assert_eq!(
            (cu!(cuStreamBeginCapture_v2(null_mut(), GLOBAL)), cu!(cuStreamBeginCapture_v2(1 as Handle, 2))),
            (900, 900)
        );
        let (mut blocking, ptr, fork) = (null_mut(), memory(64), event(2));
        ok!(cuStreamCreate(&mut blocking, 0));
        ok!(cuStreamBeginCapture_v2(blocking, RELAXED));
        let mut state = 9;
        assert_eq!(cu!(cuStreamIsCapturing(null_mut(), &mut state)), 906);
        assert_eq!(status(blocking), 1);
        assert_eq!(cu!(cuMemsetD8Async(ptr, 1, 64, null_mut())), 906);
        assert_eq!(end(blocking).0, 901);
        let free = stream();
        ok!(cuStreamBeginCapture_v2(free, RELAXED));
        ok!(cuMemsetD8Async(ptr, 1, 64, null_mut()));
        ok!(cuEventRecord(fork, free));
        assert_eq!(cu!(cuStreamWaitEvent(null_mut(), fork, 0)), 906);
        assert_eq!(end(free).0, 901);
        let per_thread = 2 as Handle;
        ok!(cuStreamBeginCapture_v2(per_thread, RELAXED));
        ok!(cuMemsetD8Async(ptr, 1, 64, per_thread));
        // Another thread has one of its own.
        let context = start().addr();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(context as Handle));
                assert_eq!((status(2 as Handle), end(2 as Handle).0), (0, 401));
            });
        });
        assert_eq!(end(per_thread).0, 0);
    });
}

#[test]
fn memory_of_a_graph_lives_as_long_as_the_graph() {
    process::alone("capture::memory_of_a_graph_lives_as_long_as_the_graph", &[], || {
        start();
        let (stream, target) = (stream(), memory(64));
        let free = || {
            let (mut free, mut total) = (0, 0);
            ok!(cuMemGetInfo_v2(&mut free, &mut total));
            free
        };
        let before = free();
        ok!(cuStreamBeginCapture_v2(stream, GLOBAL));
        let mut ptr = 0;
        ok!(cuMemAllocAsync(&mut ptr, 4096, stream));
        ok!(cuMemsetD8Async(ptr, 6, 64, stream));
        ok!(cuMemcpyDtoDAsync_v2(target, ptr, 64, stream));
        ok!(cuMemFreeAsync(ptr, stream));
        let (code, graph) = end(stream);
        assert_eq!((code, kinds(graph)), (0, vec![10, 2, 1, 11]));
        let mut executable = null_mut();
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok!(cuGraphDestroy(graph));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(byte_at(target), 6);
        if is_simulated() {
            assert_eq!(before - free(), 4096);
        }
        ok!(cuGraphExecDestroy(executable));
        if is_simulated() {
            assert_eq!(free(), before);
        }
    });
}

#[test]
fn a_peer_copy_loses_the_capture() {
    process::alone("capture::a_peer_copy_loses_the_capture", &[], || {
        let context = start();
        let (stream, ptr) = (stream(), memory(64));
        ok!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
        assert_eq!(cu!(cuMemcpyPeerAsync(ptr, context, ptr + 32, context, 32, stream)), 900);
        assert_eq!(end(stream).0, 901);
    });
}
