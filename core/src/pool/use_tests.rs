//! One record covers many uses of a stream, and no use is forgotten.

use std::sync::Arc;

use highwater_mock::Operation;

use crate::testing::ManualBackend;
use crate::{Access, Backend, CaptureMode, PinnedBuffer, Runtime, Stream};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

fn open() -> (Arc<ManualBackend>, Runtime, Stream) {
    let backend = ManualBackend::new();
    let runtime = Runtime::new(backend.clone()).unwrap();
    backend.watch_locks_of(&runtime);
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    (backend, runtime, stream)
}

fn used(runtime: &Runtime, stream: &Stream, bytes: usize) -> PinnedBuffer<u8> {
    let pinned = runtime.pinned::<u8>(bytes).unwrap();
    stream.note_host_use(pinned.ptr(), Access::Read).unwrap();
    pinned
}

/// As `used`, with work that the device executes only when it is told.
fn worked(backend: &ManualBackend, runtime: &Runtime, stream: &Stream, bytes: usize) -> PinnedBuffer<u8> {
    let pinned = runtime.pinned::<u8>(bytes).unwrap();
    backend.enqueue_use(stream.id(), pinned.ptr().address() as u64);
    stream.note_host_use(pinned.ptr(), Access::Read).unwrap();
    pinned
}

fn records(backend: &ManualBackend) -> u64 {
    backend.gpu.calls(Operation::RecordEvent)
}

fn waiting(runtime: &Runtime) -> u64 {
    runtime.statistics().host.waiting_blocks
}

#[test]
fn a_thousand_small_uses_make_a_record_for_each_32() {
    let (backend, runtime, stream) = open();
    for _ in 0..1000 {
        drop(worked(&backend, &runtime, &stream, 4 * KIB));
    }
    let queries = backend.gpu.calls(Operation::QueryEvent) + backend.gpu.calls(Operation::QueryStream);
    assert!(records(&backend) <= 1000 / 32 + 4, "{} records", records(&backend));
    assert!(queries <= 1000 / 32 + 4, "{queries} queries");
    backend.advance(stream.id());
    runtime.trim().unwrap();
    let after = backend.gpu.calls(Operation::QueryEvent) + backend.gpu.calls(Operation::QueryStream);
    assert!(after - queries <= 1000 / 32 + 4, "{} queries for 1000 blocks", after - queries);
    assert_eq!((waiting(&runtime), runtime.statistics().host.held_bytes), (0, 0));
}

#[test]
fn uses_of_4_mib_together_are_recorded() {
    let (backend, runtime, stream) = open();
    let uses: Vec<_> = (0..7).map(|_| used(&runtime, &stream, MIB)).collect();
    assert_eq!(records(&backend), 1);
    drop(used(&runtime, &stream, 4 * MIB));
    // The open batch of three uses gets the record of the large use.
    assert_eq!(records(&backend), 2);
    drop(uses);
}

#[test]
fn a_copy_to_the_host_has_its_own_record() {
    let (backend, runtime, stream) = open();
    let device = runtime.device(0).unwrap().allocate::<u8>(64).unwrap();
    let (mut back, up) = (runtime.pinned::<u8>(64).unwrap(), runtime.pinned::<u8>(64).unwrap());
    stream.copy_to_device(&up, &device).unwrap();
    assert_eq!(records(&backend), 0);
    stream.copy_to_host(&device, &mut back).unwrap();
    assert_eq!(records(&backend), 1);
    // Later work of the stream does not delay it.
    stream.copy_to_device(&up, &device).unwrap();
    let [completion] = &*back.block().uses.completions(true) else { panic!() };
    assert!(completion.progress().is_closed());
    backend.advance(stream.id());
    back.read().unwrap();
    assert_eq!(records(&backend), 1);
}

#[test]
fn a_write_of_another_stream_records_what_it_waits_for_and_the_next_uses_at_once() {
    let (backend, runtime, stream) = open();
    let device = runtime.device(0).unwrap();
    let other = device.create_stream().unwrap();
    let (mut pinned, copy) = (runtime.pinned::<u8>(64).unwrap(), device.allocate::<u8>(64).unwrap());
    stream.copy_to_device(&pinned, &copy).unwrap();
    assert_eq!(records(&backend), 0);
    other.copy_to_host(&copy, &mut pinned).unwrap();
    assert_eq!(records(&backend), 2, "of the batch that it waits for, and its own");
    assert_eq!(backend.gpu.calls(Operation::StreamWaitEvent), 1);
    stream.copy_to_device(&pinned, &copy).unwrap();
    assert_eq!(records(&backend), 3, "a block for which others wait");
    for stream in [&stream, &other] {
        backend.advance(stream.id());
    }
}

#[test]
fn a_stream_that_other_code_captures_is_never_recorded_into() {
    let (backend, runtime, stream) = open();
    drop(worked(&backend, &runtime, &stream, 4 * KIB));
    backend.begin_capture(stream.id(), CaptureMode::Relaxed).unwrap();
    let before = (records(&backend), backend.gpu.calls(Operation::QueryStream));
    runtime.trim().unwrap();
    assert_eq!((records(&backend), backend.gpu.calls(Operation::QueryStream)), before);
    assert_eq!(waiting(&runtime), 1);
    // SAFETY: The stream is alive and captured, and the graph is destroyed at once.
    let graph = unsafe { backend.end_capture(stream.id()) }.unwrap();
    backend.destroy_graph(graph).unwrap();
    runtime.trim().unwrap();
    assert_eq!(waiting(&runtime), 1, "the stream is behind");
    backend.advance(stream.id());
    runtime.trim().unwrap();
    assert_eq!(waiting(&runtime), 0);
}

#[test]
fn a_capture_begins_with_no_open_batch() {
    let (backend, runtime, stream) = open();
    let pinned = used(&runtime, &stream, 4 * KIB);
    assert_eq!(records(&backend), 0);
    drop(stream.capture(|_| Ok(())).unwrap());
    assert!(pinned.block().uses.completions(false).iter().all(|completion| completion.progress().is_closed()));
    backend.advance(stream.id());
}

#[test]
fn the_end_of_a_stream_completes_its_uses() {
    let (backend, runtime, stream) = open();
    drop(worked(&backend, &runtime, &stream, 4 * KIB));
    drop(stream);
    assert_eq!((records(&backend), waiting(&runtime)), (1, 1));
    runtime.trim().unwrap();
    assert_eq!(waiting(&runtime), 0);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn uses_that_a_stream_cannot_record_at_its_end_are_waited_for() {
    let (backend, runtime, stream) = open();
    let pinned = used(&runtime, &stream, 4 * KIB);
    backend.fail_record(true);
    drop(stream);
    backend.fail_record(false);
    assert!(pinned.block().uses.completions(false)[0].progress().is_passed());
    drop(pinned);
    runtime.trim().unwrap();
    assert_eq!(waiting(&runtime), 0);
}

#[test]
fn a_wait_whose_record_fails_waits_for_the_stream() {
    let (backend, runtime, stream) = open();
    let mut pinned = used(&runtime, &stream, 4 * KIB);
    backend.fail_record(true);
    pinned.write().unwrap()[0] = 1;
    backend.fail_record(false);
    assert!(pinned.block().uses.is_empty());
}

#[test]
fn a_request_queries_the_stream_of_its_thread_first() {
    let (backend, runtime, busy) = open();
    let own = runtime.device(0).unwrap().create_stream().unwrap();
    // Together they fill the pool.
    let blocks = [worked(&backend, &runtime, &busy, MIB), worked(&backend, &runtime, &own, MIB)];
    drop(blocks);
    backend.advance(own.id());
    let queries = || (backend.gpu.calls(Operation::QueryStream), backend.gpu.calls(Operation::QueryEvent));
    let before = queries();
    let again = runtime.pinned::<u8>(MIB).unwrap();
    assert_eq!((queries(), records(&backend)), ((before.0 + 1, before.1), 0));
    assert_eq!(waiting(&runtime), 1);
    drop(again);
    backend.advance(busy.id());
}
