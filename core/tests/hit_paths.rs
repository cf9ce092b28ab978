//! The hit paths make no call of the backend; what is made once is made once.

mod support;

use std::sync::Barrier;
use std::thread;

use highwater_core::{Backend, Runtime, RuntimeOptions};
use highwater_mock::{MockGpu, MockOptions, Operation};
use support::{end, open, open_with_stream};

#[test]
fn a_repeat_request_makes_no_call() {
    let (gpu, runtime, _, stream) = open_with_stream(MockOptions::new());
    drop((stream.blas().unwrap(), stream.lt().unwrap(), runtime.pinned::<u8>(5000).unwrap()));
    let before = gpu.total_calls();
    for _ in 0..1000 {
        drop(stream.blas().unwrap());
        drop(stream.lt().unwrap());
        drop(runtime.pinned::<u8>(4700).unwrap());
    }
    assert_eq!(gpu.total_calls(), before);
    let statistics = runtime.statistics();
    assert_eq!((statistics.blas_handles.created, statistics.lt_handles.created), (1, 1));
    assert_eq!((statistics.host.misses, statistics.host.hits), (1, 1000));
}

#[test]
fn another_stream_is_two_calls_and_no_new_handle() {
    let (gpu, runtime, device) = open(MockOptions::new());
    let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
    streams.iter().for_each(|stream| drop(stream.blas().unwrap()));
    let before = gpu.total_calls();
    for _ in 0..100 {
        streams.iter().for_each(|stream| drop(stream.blas().unwrap()));
    }
    assert_eq!(gpu.total_calls() - before, 400, "set_stream and set_workspace each time");
    assert_eq!(gpu.calls(Operation::CreateBlasHandle), 1);
    assert_eq!(runtime.statistics().workspaces, 2);
}

#[test]
fn a_handle_of_one_stream_each_where_the_vendor_wants_it() {
    let (gpu, _, device) = open(MockOptions::new().with_capabilities(|c| c.handle_per_stream = true));
    let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
    for _ in 0..3 {
        streams.iter().for_each(|stream| drop(stream.blas().unwrap()));
    }
    assert_eq!(gpu.calls(Operation::CreateBlasHandle), 2);
    assert_eq!(gpu.calls(Operation::SetStream), 2);
}

#[test]
fn more_threads_than_any_cap_can_meet_with_their_handles() {
    const THREADS: usize = 40;
    let (_, runtime, _, stream) = open_with_stream(MockOptions::new());
    let meeting = Barrier::new(THREADS);
    for _ in 0..2 {
        thread::scope(|scope| {
            // Joined one by one: a scope alone does not wait for the threads' locals, which give the handles back.
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    scope.spawn(|| {
                        let lease = stream.blas().unwrap();
                        meeting.wait();
                        drop(lease);
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
    let handles = runtime.statistics().blas_handles;
    assert_eq!((handles.created, handles.idle), (THREADS as u64, THREADS as u64));
    assert_eq!(handles.threads_served, 2 * THREADS as u64);
    runtime.trim().unwrap();
    assert_eq!(runtime.statistics().blas_handles.live, 0);
}

#[test]
fn workspaces_have_the_size_that_was_asked_for_and_go_to_the_next_stream() {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let options = RuntimeOptions::new().with_blas_workspace_bytes(1000).with_lt_workspace_bytes(3000);
    let runtime = Runtime::with_options(gpu.clone(), &options).unwrap();
    let device = runtime.device(0).unwrap();
    for _ in 0..5 {
        let stream = device.create_stream().unwrap();
        drop((stream.blas().unwrap(), stream.lt().unwrap()));
    }
    // The Lt calls want more than the BLAS workspace, so there is one of each, rounded up to the alignment, and used by one
    // stream after the other.
    let statistics = runtime.statistics();
    assert_eq!((statistics.workspaces, statistics.workspace_bytes), (2, 1024 + 3072));
    end(runtime, device);

    let none = RuntimeOptions::new().with_blas_workspace_bytes(0).with_lt_workspace_bytes(0);
    let runtime = Runtime::with_options(gpu, &none).unwrap();
    drop(runtime.device(0).unwrap().create_stream().unwrap().blas().unwrap());
    assert_eq!(runtime.statistics().workspaces, 0);
}

#[test]
fn a_raw_handle_has_a_workspace_of_its_own() {
    let (_, runtime, _, stream) = open_with_stream(MockOptions::new());
    let mut lease = stream.blas().unwrap();
    let first = lease.with_raw(|raw| raw.workspace.unwrap()).unwrap();
    let second = lease.with_raw(|raw| raw.workspace.unwrap()).unwrap();
    assert_eq!(first, second, "given back and taken again");
    assert_eq!(runtime.statistics().workspaces, 2, "the stream's, and the one that is lent");
}

#[test]
fn lt_calls_use_the_blas_workspace_of_their_stream_and_a_small_one_where_there_is_none() {
    let (_, runtime, device) = open(MockOptions::new());
    let (both, lt_only) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    drop((both.blas().unwrap(), both.lt().unwrap(), lt_only.lt().unwrap()));
    let statistics = runtime.statistics();
    assert_eq!((statistics.workspaces, statistics.workspace_bytes), (2, (32 << 20) + (1 << 20)));
}

#[test]
fn threads_that_meet_on_a_fresh_stream_make_one_workspace() {
    const THREADS: usize = 16;
    for _ in 0..20 {
        let (_, runtime, _, stream) = open_with_stream(MockOptions::new());
        let start = Barrier::new(THREADS);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    start.wait();
                    drop(stream.blas().unwrap());
                });
            }
        });
        assert_eq!(runtime.statistics().workspaces, 1);
    }
}

#[test]
fn an_event_whose_id_was_given_away_is_not_used_for_the_pools() {
    let (gpu, _, _, stream) = open_with_stream(MockOptions::new());
    let kept = stream.record().unwrap();
    let id = kept.id();
    drop(kept);
    assert_eq!(gpu.live_objects().events, 0, "whoever kept the id could move its record");
    drop(stream.record().unwrap());
    assert_eq!(gpu.live_objects().events, 1, "pooled");
    assert!(gpu.query_event(id).is_err());
}
