//! Captures and graphs.

use crate::calls::ok;
use crate::calls::{Handle, Pointer, cu};
use crate::rig::{
    Counter, Gate, READ_WRITE, event, kinds_of, load, memory, on_another_thread, pages, pinned, start, store, stream,
    warm,
};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::Log;
use highwater_simulated_harness::rules;

rules! {
    "capture.replay" Driver Shared replay: "captured work is done when its graph is launched, each time, in its order";
    "capture.forks-and-joins" Driver Shared forks: "a stream joins a capture by waiting for its event, and is joined again";
    "capture.graph-destroyed" Driver Shared graph_destroyed: "an executable graph outlives its graph, and a launch its executable";
    "capture.begin-and-end" Driver Shared begin_and_end: "captures begin once and end where they began (elsewhere 903 loses them), and the legacy stream has none";
    "capture.allocation" Driver Shared allocation: "cuMemAlloc in a capture answers 900 and loses it (901), and the stream lives on";
    "capture.global" Driver Shared global: "a global capture makes unsafe calls of every thread answer 900 and is lost by them";
    "capture.thread-local" Driver Shared thread_local: "a thread-local capture leaves unsafe calls of other threads alone";
    "capture.relaxed-thread" Driver Shared relaxed_thread: "a thread in relaxed mode may make unsafe calls beside a global capture, and an unknown mode is taken";
    "capture.unjoined" Driver Shared unjoined: "a capture that ends before a stream is joined again answers 904";
    "capture.wrong-thread" Driver Shared wrong_thread: "a capture ends on its thread unless it is relaxed: elsewhere the answer is 908, and it is over";
    "capture.borders" Driver Shared borders: "dependencies do not cross the border of a capture: 902, 905, 907, and 1 when it has ended";
    "capture.own-stream" Driver Shared own_stream: "asking for or waiting for a stream in a capture answers 900 in every mode, and loses it";
    "capture.legacy-stream" Driver Shared legacy: "the legacy stream may not be used beside a capture of a blocking stream (906)";
    "capture.ordered-memory" Driver Shared ordered_memory: "memory in the order of a stream becomes nodes of the graph";
}

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// Types of nodes.
pub(crate) const KERNEL: u32 = 0;
const COPY: u32 = 1;
const FILL: u32 = 2;
const HOST: u32 = 3;
pub(crate) const ALLOCATION: u32 = 10;
pub(crate) const RELEASE: u32 = 11;

fn status(stream: Handle) -> (u32, u32) {
    let mut status = 9;
    (cu!(cuStreamIsCapturing(stream, &mut status)), status)
}

/// Ends a capture: the code, and whether there is a graph.
fn end(stream: Handle) -> (u32, bool) {
    let mut graph = 0;
    let code = cu!(cuStreamEndCapture(stream, &mut graph));
    let found = graph != 0;
    if found {
        cu!(cuGraphDestroy(graph));
    }
    (code, found)
}

pub(crate) fn end_with_graph(stream: Handle) -> Answer<Handle> {
    let mut graph = 0;
    ok!(cu cuStreamEndCapture(stream, &mut graph));
    Ok(graph)
}

pub(crate) fn executable(graph: Handle) -> Answer<Handle> {
    let mut executable = 0;
    ok!(cu cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    Ok(executable)
}

/// The types of a graph's nodes, sorted.
pub(crate) fn nodes(graph: Handle) -> Answer<Vec<u32>> {
    let mut count = 0;
    ok!(cu cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count));
    let mut nodes = vec![0; count];
    // A place for no nodes is refused.
    if count > 0 {
        ok!(cu cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    }
    let mut types = Vec::new();
    for node in nodes {
        let mut of = 0;
        ok!(cu cuGraphNodeGetType(node, &mut of));
        types.push(of);
    }
    types.sort_unstable();
    Ok(types)
}

fn replay(log: &mut Log) -> Answer {
    let (stream, block, counter) = (stream()?, memory(128)?, Counter::new());
    store(block, &[1u8; 128], stream)?;
    log.is("before", status(stream), (0, 0));
    log.is("begin", cu!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL)), 0);
    log.is("in the capture", status(stream), (0, 1));
    log.is("fill", cu!(cuMemsetD8Async(block, 5, 64, stream)), 0);
    log.is("copy", cu!(cuMemcpyDtoDAsync_v2(block + 64, block, 32, stream)), 0);
    log.is("host function", counter.count_on(stream), 0);
    let graph = end_with_graph(stream)?;
    log.is("after", status(stream), (0, 0));
    log.is("nodes", nodes(graph)?, vec![COPY, FILL, HOST]);
    ok!(cu cuStreamSynchronize(stream));
    log.is("nothing was done", (kinds_of(load::<u8>(block, 128, stream)?), counter.value()), (vec![1], 0));
    let executable = executable(graph)?;
    for launches in 1..=2 {
        log.is("launch", cu!(cuGraphLaunch(executable, stream)), 0);
        ok!(cu cuStreamSynchronize(stream));
        log.is("calls", counter.value(), launches);
    }
    let mut expected = vec![5; 96];
    expected.extend([1; 32]);
    log.is("bytes", load::<u8>(block, 128, stream)? == expected, true);
    ok!(cu cuGraphExecDestroy(executable));
    ok!(cu cuGraphDestroy(graph));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn forks(log: &mut Log) -> Answer {
    let (first, second, fork, join) = (stream()?, stream()?, event(2)?, event(2)?);
    let block = memory(128)?;
    store(block, &[0u8; 128], first)?;
    ok!(cu cuStreamBeginCapture_v2(first, GLOBAL));
    ok!(cu cuMemsetD8Async(block, 3, 64, first));
    ok!(cu cuEventRecord(fork, first));
    log.is("wait", cu!(cuStreamWaitEvent(second, fork, 0)), 0);
    log.is("both take part", (status(first), status(second)), ((0, 1), (0, 1)));
    ok!(cu cuMemcpyDtoDAsync_v2(block + 64, block, 64, second));
    ok!(cu cuEventRecord(join, second));
    ok!(cu cuStreamWaitEvent(first, join, 0));
    let graph = end_with_graph(first)?;
    log.is("neither does", (status(first), status(second)), ((0, 0), (0, 0)));
    log.is("nodes", nodes(graph)?, vec![COPY, FILL]);
    let executable = executable(graph)?;
    log.is("launched on the other stream", cu!(cuGraphLaunch(executable, second)), 0);
    log.is("bytes", kinds_of(load::<u8>(block, 128, second)?), vec![3]);
    ok!(cu cuGraphExecDestroy(executable));
    ok!(cu cuGraphDestroy(graph));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn graph_destroyed(log: &mut Log) -> Answer {
    let (stream, block) = (stream()?, memory(64)?);
    warm(stream)?;
    ok!(cu cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
    ok!(cu cuMemsetD8Async(block, 8, 64, stream));
    let graph = end_with_graph(stream)?;
    let executable = executable(graph)?;
    log.is("the graph is destroyed", cu!(cuGraphDestroy(graph)), 0);
    log.is("launch", cu!(cuGraphLaunch(executable, stream)), 0);
    log.is("bytes", kinds_of(load::<u8>(block, 64, stream)?), vec![8]);
    store(block, &[0u8; 64], stream)?;
    let gate = Gate::on(stream)?;
    ok!(cu cuGraphLaunch(executable, stream));
    log.is("the executable is destroyed with a launch before it", cu!(cuGraphExecDestroy(executable)), 0);
    gate.open();
    log.is("that launch", kinds_of(load::<u8>(block, 64, stream)?), vec![8]);
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn begin_and_end(log: &mut Log) -> Answer {
    let (first, second, fork, join) = (stream()?, stream()?, event(2)?, event(2)?);
    log.is("end without a begin", end(first), (401, false));
    log.is("an unknown mode", cu!(cuStreamBeginCapture_v2(first, 3)), 1);
    log.is("begin on 0", cu!(cuStreamBeginCapture_v2(0, RELAXED)), 900);
    log.is("begin on 1", cu!(cuStreamBeginCapture_v2(1, RELAXED)), 900);
    ok!(cu cuStreamBeginCapture_v2(first, RELAXED));
    log.is("begin again", cu!(cuStreamBeginCapture_v2(first, RELAXED)), 401);
    log.is("the capture after that", status(first), (0, 1));
    log.is("its end", end(first), (0, true));
    ok!(cu cuStreamBeginCapture_v2(first, RELAXED));
    ok!(cu cuEventRecord(fork, first));
    ok!(cu cuStreamWaitEvent(second, fork, 0));
    ok!(cu cuEventRecord(join, second));
    ok!(cu cuStreamWaitEvent(first, join, 0));
    log.is("end on a stream that joined", cu!(cuStreamEndCapture(second, &mut 0)), 903);
    log.is("end where it began, after that", end(first), (901, false));
    log.is("the streams", (status(first), status(second)), ((0, 0), (0, 0)));
    ok!(cu cuStreamBeginCapture_v2(first, GLOBAL));
    log.is("an empty capture", end(first), (0, true));
    Ok(())
}

fn allocation(log: &mut Log) -> Answer {
    let (stream, block) = (stream()?, memory(64)?);
    for (mode, name) in [(GLOBAL, "global"), (THREAD_LOCAL, "thread-local")] {
        ok!(cu cuStreamBeginCapture_v2(stream, mode));
        ok!(cu cuMemsetD8Async(block, 1, 64, stream));
        log.is(&format!("{name}: cuMemAlloc"), cu!(cuMemAlloc_v2(&mut 0, 64)), 900);
        log.is(&format!("{name}: status"), status(stream), (0, 2));
        log.is(&format!("{name}: more work"), cu!(cuMemsetD8Async(block, 1, 64, stream)), 901);
        log.is(&format!("{name}: end"), end(stream), (901, false));
        log.is(&format!("{name}: the stream"), status(stream), (0, 0));
        log.is(&format!("{name}: a fill in it"), cu!(cuMemsetD8Async(block, 2, 64, stream)), 0);
        log.is(&format!("{name}: its bytes"), kinds_of(load::<u8>(block, 64, stream)?), vec![2]);
        ok!(cu cuStreamBeginCapture_v2(stream, mode));
        log.is(&format!("{name}: another capture"), end(stream), (0, true));
    }
    ok!(cu cuStreamBeginCapture_v2(stream, RELAXED));
    let mut other = 0;
    log.is("relaxed: cuMemAlloc", cu!(cuMemAlloc_v2(&mut other, 64)), 0);
    log.is("relaxed: end", end(stream), (0, true));
    ok!(cu cuMemFree_v2(other));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

/// Things that unsafe calls are made on. Host pointers as addresses, so that threads may have them.
#[derive(Clone, Copy)]
struct Things {
    stream: Handle,
    done: Handle,
    block: u64,
    page: usize,
}

type Unsafe = (&'static str, fn(Things) -> u32);

fn things() -> Answer<Things> {
    let (stream, done) = (stream()?, event(2)?);
    ok!(cu cuEventRecord(done, stream));
    ok!(cu cuStreamSynchronize(stream));
    Ok(Things { stream, done, block: memory(4096)?, page: pages(1, READ_WRITE)?.expose_provenance() })
}

fn pointer(address: usize) -> Pointer {
    std::ptr::with_exposed_provenance_mut(address)
}

/// Every kind of call that a global capture refuses, in an order in which each finds what it needs.
const UNSAFE: &[Unsafe] = &[
    ("event query", |things| cu!(cuEventQuery(things.done))),
    ("event synchronize", |things| cu!(cuEventSynchronize(things.done))),
    ("stream query", |things| cu!(cuStreamQuery(things.stream))),
    ("stream synchronize", |things| cu!(cuStreamSynchronize(things.stream))),
    ("alloc", |_| cu!(cuMemAlloc_v2(&mut 0, 4096))),
    ("free", |things| cu!(cuMemFree_v2(things.block))),
    ("host alloc", |_| cu!(cuMemHostAlloc(&mut std::ptr::null_mut(), 4096, 1))),
    ("host register", |things| cu!(cuMemHostRegister_v2(pointer(things.page), 4096, 1))),
];

fn global(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    for (what, call) in UNSAFE {
        let things = things()?;
        ok!(cu cuStreamBeginCapture_v2(stream, GLOBAL));
        log.is(what, on_another_thread(context, || call(things))?, 900);
        log.is(&format!("{what}: the capture"), status(stream), (0, 2));
        log.is(&format!("{what}: its end"), end(stream), (901, false));
    }
    let host = pinned(4096)?.expose_provenance();
    ok!(cu cuStreamBeginCapture_v2(stream, GLOBAL));
    log.is("host free", on_another_thread(context, || cu!(cuMemFreeHost(pointer(host))))?, 900);
    log.is("host free: its end", end(stream), (901, false));
    log.is("freed after it", cu!(cuMemFreeHost(pointer(host))), 0);
    let page = pages(1, READ_WRITE)?.expose_provenance();
    ok!(cu cuMemHostRegister_v2(pointer(page), 4096, 1));
    ok!(cu cuStreamBeginCapture_v2(stream, GLOBAL));
    log.is("host unregister", on_another_thread(context, || cu!(cuMemHostUnregister(pointer(page))))?, 900);
    log.is("host unregister: its end", end(stream), (901, false));
    log.is("unregistered after it", cu!(cuMemHostUnregister(pointer(page))), 0);
    Ok(())
}

fn thread_local(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    for (what, call) in UNSAFE {
        let things = things()?;
        ok!(cu cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
        log.is(what, on_another_thread(context, || call(things))?, 0);
        log.is(&format!("{what}: end"), end(stream), (0, true));
    }
    Ok(())
}

fn relaxed_thread(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    for (what, call) in UNSAFE {
        let things = things()?;
        ok!(cu cuStreamBeginCapture_v2(stream, GLOBAL));
        let seen = on_another_thread(context, || {
            let mut mode = RELAXED;
            let relaxed = (cu!(cuThreadExchangeStreamCaptureMode(&mut mode)), mode);
            let code = call(things);
            (relaxed, code, cu!(cuThreadExchangeStreamCaptureMode(&mut mode)), mode)
        })?;
        log.is(what, seen, ((0, GLOBAL), 0, 0, RELAXED));
        log.is(&format!("{what}: end"), end(stream), (0, true));
    }
    // On a thread that ends with it.
    let unknown = on_another_thread(context, || cu!(cuThreadExchangeStreamCaptureMode(&mut 3)))?;
    log.is("an unknown mode", unknown, 0);
    Ok(())
}

fn unjoined(log: &mut Log) -> Answer {
    let (first, second, fork, block) = (stream()?, stream()?, event(2)?, memory(64)?);
    ok!(cu cuStreamBeginCapture_v2(first, GLOBAL));
    ok!(cu cuEventRecord(fork, first));
    ok!(cu cuStreamWaitEvent(second, fork, 0));
    ok!(cu cuMemsetD8Async(block, 1, 64, second));
    log.is("end", end(first), (904, false));
    log.is("the streams", (status(first), status(second)), ((0, 0), (0, 0)));
    log.is("they live on", (cu!(cuStreamSynchronize(first)), cu!(cuStreamSynchronize(second))), (0, 0));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn wrong_thread(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    for (mode, name, code) in [(GLOBAL, "global", 908), (THREAD_LOCAL, "thread-local", 908), (RELAXED, "relaxed", 0)] {
        ok!(cu cuStreamBeginCapture_v2(stream, mode));
        log.is(name, on_another_thread(context, || end(stream).0)?, code);
        if code != 0 {
            log.is(&format!("{name}: ended on its own thread after that"), end(stream), (401, false));
        }
        log.is(&format!("{name}: the stream"), status(stream), (0, 0));
    }
    Ok(())
}

fn borders(log: &mut Log) -> Answer {
    let (first, second, outside, inside) = (stream()?, stream()?, event(2)?, event(2)?);
    let block = memory(64)?;
    ok!(cu cuMemsetD8Async(block, 1, 64, second));
    ok!(cu cuEventRecord(outside, second));
    ok!(cu cuStreamBeginCapture_v2(first, RELAXED));
    log.is("waiting for one that was never recorded", cu!(cuStreamWaitEvent(first, event(2)?, 0)), 0);
    log.is("waiting for an event of outside", cu!(cuStreamWaitEvent(first, outside, 0)), 905);
    log.is("that capture's end", end(first).0, 901);
    ok!(cu cuStreamBeginCapture_v2(first, RELAXED));
    ok!(cu cuStreamBeginCapture_v2(second, RELAXED));
    ok!(cu cuMemsetD8Async(block, 1, 64, first));
    ok!(cu cuEventRecord(inside, first));
    log.is("waiting for another capture's event", cu!(cuStreamWaitEvent(second, inside, 0)), 902);
    log.is("the ends of both", (end(first).0, end(second).0), (901, 901));
    ok!(cu cuStreamBeginCapture_v2(first, RELAXED));
    ok!(cu cuMemsetD8Async(block, 1, 64, first));
    ok!(cu cuEventRecord(inside, first));
    log.is("asking for an event of a capture", cu!(cuEventQuery(inside)), 907);
    log.is("that capture's end", end(first).0, 901);
    ok!(cu cuStreamBeginCapture_v2(first, RELAXED));
    ok!(cu cuMemsetD8Async(block, 1, 64, first));
    ok!(cu cuEventRecord(inside, first));
    log.is("waiting on the host for an event of a capture", cu!(cuEventSynchronize(inside)), 907);
    log.is("that capture's end", end(first).0, 901);
    log.is("asking for that event after the end", cu!(cuEventQuery(inside)), 1);
    ok!(cu cuStreamBeginCapture_v2(first, RELAXED));
    ok!(cu cuMemsetD8Async(block, 1, 64, first));
    ok!(cu cuEventRecord(inside, first));
    log.is("the end of one that is not disturbed", end(first), (0, true));
    log.is("asking for its event after that", (cu!(cuEventQuery(inside)), cu!(cuEventSynchronize(inside))), (1, 1));
    log.is("recorded anew", (cu!(cuEventRecord(inside, first)), cu!(cuEventSynchronize(inside))), (0, 0));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn own_stream(log: &mut Log) -> Answer {
    let stream = stream()?;
    for (mode, name) in [(GLOBAL, "global"), (THREAD_LOCAL, "thread-local"), (RELAXED, "relaxed")] {
        ok!(cu cuStreamBeginCapture_v2(stream, mode));
        log.is(&format!("{name}: query"), cu!(cuStreamQuery(stream)), 900);
        log.is(&format!("{name}: end"), end(stream), (901, false));
        ok!(cu cuStreamBeginCapture_v2(stream, mode));
        log.is(&format!("{name}: synchronize"), cu!(cuStreamSynchronize(stream)), 900);
        log.is(&format!("{name}: end"), end(stream), (901, false));
        ok!(cu cuStreamBeginCapture_v2(stream, mode));
        log.is(&format!("{name}: cuCtxSynchronize"), cu!(cuCtxSynchronize()), 900);
        log.is(&format!("{name}: end after cuCtxSynchronize"), end(stream), (901, false));
    }
    Ok(())
}

fn legacy(log: &mut Log) -> Answer {
    let context = start(0)?;
    let (mut blocking, free, block, fork) = (0, stream()?, memory(64)?, event(2)?);
    ok!(cu cuStreamCreate(&mut blocking, 0));
    ok!(cu cuStreamBeginCapture_v2(blocking, RELAXED));
    log.is("cuStreamIsCapturing of the legacy stream", status(0).0, 906);
    log.is("the capture after that", status(blocking), (0, 1));
    log.is("work in the legacy stream", cu!(cuMemsetD8Async(block, 1, 64, 0)), 906);
    log.is("end", end(blocking), (901, false));
    ok!(cu cuStreamBeginCapture_v2(free, RELAXED));
    log.is("beside a non-blocking stream", cu!(cuMemsetD8Async(block, 1, 64, 0)), 0);
    log.is("its end", end(free), (0, true));
    ok!(cu cuStreamBeginCapture_v2(free, RELAXED));
    ok!(cu cuEventRecord(fork, free));
    log.is("the legacy stream waits for its event", cu!(cuStreamWaitEvent(0, fork, 0)), 906);
    log.is("its end after that", end(free), (901, false));
    ok!(cu cuStreamBeginCapture_v2(2, RELAXED));
    log.is("the thread's own stream", cu!(cuMemsetD8Async(block, 1, 64, 2)), 0);
    log.is("that of another thread", on_another_thread(context, || (status(2), end(2)))?, ((0, 0), (401, false)));
    log.is("its end, too", end(2), (0, true));
    ok!(cu cuStreamDestroy_v2(blocking));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn ordered_memory(log: &mut Log) -> Answer {
    let (stream, target, mut block) = (stream()?, memory(64)?, 0);
    ok!(cu cuStreamBeginCapture_v2(stream, GLOBAL));
    log.is("cuMemAllocAsync", cu!(cuMemAllocAsync(&mut block, 4096, stream)), 0);
    ok!(cu cuMemsetD8Async(block, 6, 64, stream));
    ok!(cu cuMemcpyDtoDAsync_v2(target, block, 64, stream));
    log.is("cuMemFreeAsync", cu!(cuMemFreeAsync(block, stream)), 0);
    let graph = end_with_graph(stream)?;
    log.is("nodes", nodes(graph)?, vec![COPY, FILL, ALLOCATION, RELEASE]);
    let executable = executable(graph)?;
    for _ in 0..2 {
        store(target, &[0u8; 64], stream)?;
        ok!(cu cuGraphLaunch(executable, stream));
        log.is("bytes", kinds_of(load::<u8>(target, 64, stream)?), vec![6]);
    }
    ok!(cu cuGraphExecDestroy(executable));
    ok!(cu cuGraphDestroy(graph));
    ok!(cu cuMemFree_v2(target));
    Ok(())
}
