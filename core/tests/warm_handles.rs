//! Handles that are made ahead of use, and the first creation of a device.

mod support;

use std::collections::HashSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use highwater_core::{
    Answer, Backend, BackendLayer, Call, ErrorKind, GemmShape, Result, Runtime, RuntimeOptions, Stream,
};
use highwater_mock::{MockGpu, MockOptions, Operation};
use support::{end, kind, open};

const THREADS: usize = 16;
const SLOW: Duration = Duration::from_millis(400);

/// Leases a handle in each of 16 threads at once. Returns how long all of them took, and how many failed.
fn lease_in_all_threads(streams: &[Stream]) -> (Duration, usize) {
    let barrier = Barrier::new(streams.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .map(|stream| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let leased = stream.blas();
                    // Every thread holds its handle until all have one: no thread waits for the handle of another.
                    barrier.wait();
                    leased.is_err()
                })
            })
            .collect();
        // Before any thread asks, so that no part of a creation is missed.
        let start = Instant::now();
        barrier.wait();
        barrier.wait();
        let took = start.elapsed();
        (took, threads.into_iter().map(|thread| thread.join().unwrap()).filter(|failed| *failed).count())
    })
}

#[test]
fn sixteen_threads_pay_for_one_slow_first_creation() {
    let (_, runtime, device) = open(MockOptions::new().with_first_handle_latency(SLOW));
    let streams: Vec<_> = (0..THREADS).map(|_| device.create_stream().unwrap()).collect();
    let (took, failed) = lease_in_all_threads(&streams);
    assert_eq!(failed, 0);
    assert!(took >= SLOW && took < 2 * SLOW, "{took:?}");
    let handles = runtime.statistics().blas_handles;
    assert_eq!((handles.created, handles.live, handles.peak_live), (16, 16, 16));
    end(runtime, (streams, device));
}

/// A mock that knows the thread of each creation and allocation, and panics in one creation.
struct Watched {
    gpu: Arc<MockGpu>,
    calls: Mutex<Vec<(&'static str, ThreadId)>>,
    panics_at: Option<usize>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

impl Watched {
    /// Returns the number of calls of an operation, and the threads that made them.
    fn calls_of(&self, operation: &str) -> (usize, usize) {
        let calls = self.calls.lock().unwrap();
        let of_operation: Vec<_> = calls.iter().filter(|(other, _)| *other == operation).collect();
        (of_operation.len(), of_operation.iter().map(|(_, thread)| thread).collect::<HashSet<_>>().len())
    }
}

// SAFETY: everything is passed on to the mock.
unsafe impl BackendLayer for Watched {
    fn below(&self) -> &dyn Backend {
        &*self.gpu
    }
    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        let number = {
            let mut calls = self.calls.lock().unwrap();
            calls.push((call.operation, thread::current().id()));
            calls.iter().filter(|(other, _)| *other == call.operation).count()
        };
        let answer = forward(self.below());
        assert!(
            call.operation != "create_blas_handle" || self.panics_at != Some(number),
            "the vendor's library panics"
        );
        answer
    }
}

/// Opens a mock whose first creation is slow, and the streams of 16 threads.
fn open_watched(options: MockOptions, panics_at: Option<usize>) -> (Arc<Watched>, Runtime, Vec<Stream>) {
    let gpu = MockGpu::open(options.with_first_handle_latency(SLOW)).unwrap();
    let watched = Arc::new(Watched { gpu, calls: Mutex::default(), panics_at });
    let runtime = Runtime::new(watched.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let streams = (0..THREADS).map(|_| device.create_stream().unwrap()).collect();
    (watched, runtime, streams)
}

#[test]
fn one_thread_makes_the_handles_and_workspaces_of_all_that_wait() {
    for per_stream in [false, true] {
        let options = MockOptions::new().with_capabilities(|capabilities| capabilities.handle_per_stream = per_stream);
        let (watched, runtime, streams) = open_watched(options, None);
        assert_eq!(lease_in_all_threads(&streams).1, 0);
        assert_eq!(watched.calls_of("create_blas_handle"), (16, 1));
        assert_eq!(watched.calls_of("allocate"), (16, 1));
        let statistics = runtime.statistics();
        let handles = statistics.blas_handles;
        assert_eq!((handles.created, handles.warmed, handles.live, handles.threads_served), (16, 0, 16, 16));
        assert_eq!(statistics.workspaces, 16);
        end(runtime, streams);
    }
}

#[test]
fn threads_that_share_a_stream_cause_one_workspace() {
    let (watched, runtime, mut streams) = open_watched(MockOptions::new(), None);
    streams.truncate(1);
    let barrier = Barrier::new(THREADS);
    let lease = || {
        barrier.wait();
        let leased = streams[0].blas();
        barrier.wait();
        drop(leased.unwrap());
    };
    thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(lease))));
    assert_eq!(watched.calls_of("create_blas_handle"), (16, 1));
    assert_eq!(runtime.statistics().workspaces, 1);
    end(runtime, streams);
}

#[test]
fn warming_makes_handles_for_the_threads_that_wait() {
    let (watched, runtime, streams) = open_watched(MockOptions::new(), None);
    let device = runtime.device(0).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| device.warm(1).unwrap());
        thread::sleep(SLOW / 3);
        assert_eq!(lease_in_all_threads(&streams).1, 0);
    });
    assert_eq!(watched.calls_of("create_blas_handle"), (16, 1));
    assert_eq!(runtime.statistics().blas_handles.warmed, 1);
    end(runtime, (streams, device));
}

#[test]
fn a_handle_that_cannot_be_made_for_another_thread_fails_no_lease() {
    for kind in [ErrorKind::Vendor, ErrorKind::OutOfMemory] {
        for operation in [Operation::CreateBlasHandle, Operation::Allocate] {
            let options = MockOptions::new().with_faults(operation, 3..=3, kind);
            let (watched, runtime, streams) = open_watched(options, None);
            let failed = lease_in_all_threads(&streams).1;
            assert_eq!(failed, 0, "{operation:?}, {kind:?}");
            assert!(watched.calls_of("create_blas_handle").1 > 1 || operation == Operation::Allocate);
            assert_eq!(runtime.statistics().blas_handles.live, 16);
            end(runtime, streams);
        }
    }
}

#[test]
fn a_panic_while_the_first_thread_creates_wakes_the_others() {
    for panics_at in [1, 3] {
        let (_, runtime, streams) = open_watched(MockOptions::new(), Some(panics_at));
        let barrier = Barrier::new(THREADS);
        let start = Instant::now();
        let panics: usize = thread::scope(|scope| {
            let lease = |stream: &Stream| {
                barrier.wait();
                catch_unwind(AssertUnwindSafe(|| drop(stream.blas().unwrap()))).is_err()
            };
            let threads: Vec<_> = streams.iter().map(|stream| scope.spawn(move || lease(stream))).collect();
            threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum()
        });
        assert_eq!(panics, 1);
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        drop(streams);
        drop(runtime);
    }
}

#[test]
fn after_a_failed_first_creation_the_others_do_not_wait_again() {
    let options = MockOptions::new().with_create_handle_latency(0, SLOW).with_faults(
        Operation::CreateBlasHandle,
        1..,
        ErrorKind::Vendor,
    );
    let (_, runtime, device) = open(options);
    let streams: Vec<_> = (0..THREADS).map(|_| device.create_stream().unwrap()).collect();
    let (took, failed) = lease_in_all_threads(&streams);
    assert_eq!(failed, THREADS);
    assert!(took < 3 * SLOW, "{took:?}");
    end(runtime, (streams, device));
}

#[test]
fn a_warm_device_creates_nothing_for_its_threads_and_streams() {
    for per_stream in [false, true] {
        let options = MockOptions::new().with_capabilities(|capabilities| capabilities.handle_per_stream = per_stream);
        let (gpu, runtime, device) = open(options);
        device.warm(THREADS).unwrap();
        device.warm(THREADS).unwrap();
        device.warm(2).unwrap();
        let statistics = runtime.statistics();
        assert_eq!((statistics.workspaces, statistics.peak_workspaces), (16, 16));
        let created = gpu.calls(Operation::CreateBlasHandle);
        let streams: Vec<_> = (0..THREADS).map(|_| device.create_stream().unwrap()).collect();
        assert_eq!(lease_in_all_threads(&streams).1, 0);
        assert_eq!((gpu.calls(Operation::CreateBlasHandle), created), (16, 16));
        assert_eq!(runtime.statistics().workspaces, 16);
        end(runtime, (streams, device));
    }
}

#[test]
fn warm_handles_serve_a_capture() {
    let options = MockOptions::new().with_capabilities(|capabilities| capabilities.create_during_capture = false);
    let (_, runtime, device) = open(options);
    device.warm(2).unwrap();
    let stream = device.create_stream().unwrap();
    let buffers: Vec<_> = (0..3).map(|_| stream.upload(&[1.0_f32]).unwrap()).collect();
    let graph = stream
        .capture(|stream| {
            assert_eq!(kind(device.warm(3)), ErrorKind::Capture);
            let shape = GemmShape::of::<f32>(1, 1, 1);
            stream.blas()?.gemm(&shape, 1.0, &buffers[0], &buffers[1], 0.0, &buffers[2])
        })
        .unwrap();
    end(runtime, (graph, buffers, stream, device));
}

#[test]
fn trims_by_kind_free_their_kind_only() {
    let (_, runtime, device) = open(MockOptions::new());
    device.warm(3).unwrap();
    device.warm_lt(2).unwrap();
    runtime.trim_handles().unwrap();
    let statistics = runtime.statistics();
    assert_eq!((statistics.blas_handles.live, statistics.lt_handles.live, statistics.workspaces), (0, 0, 3));
    assert_eq!((statistics.blas_handles.removed, statistics.blas_handles.peak_live), (3, 3));
    assert_eq!((statistics.lt_handles.removed, statistics.lt_handles.warmed), (2, 2));
    device.warm(1).unwrap();
    runtime.trim_workspaces().unwrap();
    let statistics = runtime.statistics();
    assert_eq!((statistics.blas_handles.live, statistics.workspaces, statistics.peak_workspaces), (1, 0, 3));
    end(runtime, device);
}

#[test]
fn exhaustion_releases_idle_handles_and_tries_once_more() {
    // The fourth creation finds no memory; the second try is the fifth.
    let options = MockOptions::new().with_faults(Operation::CreateBlasHandle, 4..5, ErrorKind::OutOfMemory);
    let (gpu, runtime, device) = open(options);
    device.warm(3).unwrap();
    let stream = device.create_stream().unwrap();
    drop(stream.lt().unwrap());
    let statistics = runtime.statistics();
    assert_eq!((statistics.blas_handles.removed, statistics.lt_handles.live), (3, 1));
    assert_eq!(gpu.calls(Operation::CreateBlasHandle), 5);
    end(runtime, (stream, device));
}

#[test]
fn the_background_makes_handles_and_the_first_lease_takes_one() {
    let gpu = MockGpu::open(MockOptions::new().with_create_handle_latency(0, Duration::from_millis(20))).unwrap();
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_warm_handles(3)).unwrap();
    let device = runtime.device(0).unwrap();
    let start = Instant::now();
    while runtime.statistics().workspaces < 3 {
        assert!(start.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(1));
    }
    let stream = device.create_stream().unwrap();
    drop(stream.blas().unwrap());
    let statistics = runtime.statistics();
    assert_eq!((statistics.blas_handles.created, statistics.blas_handles.warmed, statistics.workspaces), (3, 3, 3));
    end(runtime, (stream, device));
}

#[test]
fn close_cancels_the_handles_that_the_background_has_not_begun() {
    let gpu = MockGpu::open(MockOptions::new().with_create_handle_latency(0, Duration::from_millis(50))).unwrap();
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_warm_handles(1000)).unwrap();
    thread::sleep(Duration::from_millis(75));
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert!(gpu.calls(Operation::CreateBlasHandle) < 100);
}

#[test]
fn an_error_of_the_background_is_stated_by_the_first_lease_that_fails() {
    let options = MockOptions::new().with_faults(Operation::CreateBlasHandle, 1..=2, ErrorKind::Vendor);
    let runtime =
        Runtime::with_options(MockGpu::open(options).unwrap(), &RuntimeOptions::new().with_warm_handles(2)).unwrap();
    thread::sleep(Duration::from_millis(100));
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let error = stream.blas().map(drop).unwrap_err();
    assert!(error.to_string().contains("the warm handles could not be made either"), "{error}");
    drop(stream.blas().unwrap());
    end(runtime, stream);
}

#[test]
fn a_refused_close_frees_idle_handles_and_a_later_clone_closes() {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    device.warm(10).unwrap();
    let early = runtime.clone();
    assert_eq!(runtime.close().unwrap_err().kind(), ErrorKind::InvalidState);
    assert_eq!(early.statistics().blas_handles.live, 0);
    device.warm(3).unwrap();
    assert_eq!(early.statistics().blas_handles.live, 3);
    drop(early);
    let again = device.runtime().clone();
    drop(device);
    assert_eq!(again.close().unwrap().total(), 0);
}
