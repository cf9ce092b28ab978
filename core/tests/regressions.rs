//! One test for each defect that was found in the pools, named for what went wrong.

mod support;

use std::thread;
use std::time::{Duration, Instant};

use highwater_core::{Backend, Epilogue, ErrorKind, GemmShape, Runtime, RuntimeOptions};
use highwater_mock::{MockGpu, MockOptions, Operation};
use support::{end, open, open_with_stream};

const SHAPE: GemmShape = GemmShape::of::<f32>(4, 4, 4);

#[test]
fn a_long_lived_buffer_kept_every_stream_alive_that_it_was_used_on() {
    let (gpu, runtime, device) = open(MockOptions::new());
    let weights = device.allocate::<f32>(16).unwrap();
    for _ in 0..20 {
        let stream = device.create_stream().unwrap();
        let input = stream.upload(&[1.0_f32; 16]).unwrap();
        let output = device.allocate::<f32>(16).unwrap();
        stream.blas().unwrap().gemm(&SHAPE, 1.0, &weights, &input, 0.0, &output).unwrap();
        stream.download(&output).unwrap();
    }
    assert_eq!(gpu.live_objects().streams, 0);
    assert_eq!(runtime.statistics().workspaces, 1, "handed from stream to stream");
    end(runtime, (weights, device));
}

#[test]
fn threads_that_write_and_wait_grew_the_host_cache_without_bound() {
    const THREADS: usize = 4;
    let (_, runtime, device) = open(MockOptions::new());
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let stream = device.create_stream().unwrap();
                let buffer = device.allocate::<u8>(4096).unwrap();
                for _ in 0..3000 {
                    stream.write(&[1_u8; 4096], &buffer).unwrap();
                    stream.synchronize().unwrap();
                }
            });
        }
    });
    let host = runtime.statistics().host;
    // A piece has room for 512 such blocks. A thread that meets others at the waiting blocks may make one more.
    assert!(host.pieces <= THREADS as u64, "{host:?}");
}

#[test]
fn a_handle_per_stream_was_lost_with_each_stream() {
    let (gpu, runtime, device) = open(MockOptions::new().with_capabilities(|c| c.handle_per_stream = true));
    for _ in 0..50 {
        let stream = device.create_stream().unwrap();
        drop((stream.lt().unwrap(), stream.blas().unwrap()));
        // The next stream may have the handles once this one is done.
        stream.synchronize().unwrap();
        drop(stream);
        device.synchronize().unwrap();
    }
    assert!(gpu.live_objects().handles <= 4, "{:?}", gpu.live_objects());
    runtime.trim().unwrap();
    assert_eq!(gpu.live_objects().handles, 0);
}

#[test]
fn a_lease_whose_rebinding_failed_used_a_workspace_that_was_given_back() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let a = stream.upload(&[1.0_f32; 16]).unwrap();
    let c = device.allocate::<f32>(16).unwrap();
    let mut lease = stream.blas().unwrap();
    gpu.fail_call(Operation::SetStream, 2, ErrorKind::Vendor).unwrap();
    let mut lent = None;
    lease.with_raw(|raw| lent = raw.workspace).unwrap_err();
    let lent = lent.unwrap();
    stream.synchronize().unwrap();
    runtime.trim().unwrap();
    assert!(runtime.block_of(lent.ptr).is_none(), "trimmed");
    // Another buffer takes the very memory.
    let victim = device.allocate::<u8>(lent.bytes).unwrap();
    assert_eq!(victim.ptr(), lent.ptr);
    stream.fill(&victim, 7_u8).unwrap();
    lease.gemm(&SHAPE, 1.0, &a, &a, 0.0, &c).unwrap();
    assert!(stream.download(&victim).unwrap().iter().all(|&byte| byte == 7));
    assert_eq!(stream.download(&c).unwrap(), [4.0; 16]);
}

#[test]
fn handles_without_a_workspace_moved_between_streams_and_into_graphs() {
    const N: usize = 48;
    let gpu = MockGpu::open(MockOptions::new().with_gemm_gap(Duration::from_micros(20))).unwrap();
    let options = RuntimeOptions::new().with_blas_workspace_bytes(0).with_lt_workspace_bytes(0);
    let runtime = Runtime::with_options(gpu.clone(), &options).unwrap();
    let device = runtime.device(0).unwrap();
    let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
    // Products keep intermediate results in the handle's memory, which one stream uses at a time.
    let handles = [&streams[0], &streams[1], &streams[0]].map(|stream| {
        let handle = stream.blas().unwrap().with_raw(|raw| (raw.handle, raw.workspace)).unwrap();
        assert_eq!(handle.1, None);
        handle.0
    });
    assert_eq!(handles[0], handles[2]);
    assert_ne!(handles[0], handles[1]);
    let shape = GemmShape::of::<f32>(N, N, N);
    let factors = [1.0_f32, 2.0].map(|value| streams[0].upload(&[value; N * N]).unwrap());
    streams[0].synchronize().unwrap();
    for multiplies_plans in [false, true] {
        let products: Vec<_> = (0..40).map(|_| device.allocate::<f32>(N * N).unwrap()).collect();
        for (i, c) in products.iter().enumerate() {
            let (stream, a, b) = (&streams[i % 2], &factors[i % 2], &factors[0]);
            if multiplies_plans {
                stream.lt().unwrap().matmul(&shape, Epilogue::None, 1.0, a, b, 0.0, c, None).unwrap();
            } else {
                stream.blas().unwrap().gemm(&shape, 1.0, a, b, 0.0, c).unwrap();
            }
        }
        for (i, c) in products.iter().enumerate() {
            assert_eq!(streams[i % 2].download(c).unwrap(), [(i % 2 + 1) as f32 * N as f32; N * N], "product {i}");
        }
    }
    // A graph could run beside the next product of the handle; a plan for no workspace shares none.
    let c = streams[0].upload(&[0.0_f32; N * N]).unwrap();
    let [a, b] = &factors;
    let mut graph = streams[0]
        .capture(|stream| {
            let error = stream.blas()?.gemm(&shape, 1.0, a, b, 0.0, &c).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("workspace has 0 bytes"), "{error}");
            assert_eq!(stream.blas()?.with_raw(|_| ()).unwrap_err().kind(), ErrorKind::Unsupported);
            stream.lt()?.matmul(&shape, Epilogue::None, 1.0, a, b, 0.0, &c, None)
        })
        .unwrap();
    graph.launch(&streams[0]).unwrap();
    assert_eq!(streams[0].download(&c).unwrap(), [2.0 * N as f32; N * N]);
    // The next stream gets the handle of an ended stream whose work is done.
    drop((streams, graph));
    device.synchronize().unwrap();
    let next = device.create_stream().unwrap();
    assert!(handles.contains(&next.blas().unwrap().with_raw(|raw| raw.handle).unwrap()));
}

#[test]
fn settings_of_foreign_code_stayed_on_the_handle() {
    let (gpu, runtime, _, stream) = open_with_stream(MockOptions::new());
    let a = stream.upload(&[1.0_f32; 16]).unwrap();
    let c = stream.upload(&[0.0_f32; 16]).unwrap();
    let mut lease = stream.blas().unwrap();
    lease.with_raw(|raw| gpu.set_pointer_mode(raw.handle, true).unwrap()).unwrap();
    lease.gemm(&SHAPE, 1.0, &a, &a, 0.0, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [4.0; 16]);
    drop(lease);
    // Nor does it stay if foreign code panics, or if the handle cannot be bound again right away.
    for fails in [false, true] {
        let mut lease = stream.blas().unwrap();
        let foreign = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lease.with_raw(|raw| {
                gpu.set_pointer_mode(raw.handle, true).unwrap();
                assert!(fails, "foreign code panics");
                gpu.fail_call(Operation::SetStream, 1, ErrorKind::Vendor).unwrap();
            })
        }));
        assert_eq!(foreign.map(|lent| lent.unwrap_err().kind()).ok(), fails.then_some(ErrorKind::Vendor));
        // A handle lent again is like a fresh one, too.
        lease.with_raw(|_| ()).unwrap();
        drop(lease);
        stream.blas().unwrap().gemm(&SHAPE, 2.0, &a, &a, 0.0, &c).unwrap();
        assert_eq!(stream.download(&c).unwrap(), [8.0; 16]);
    }
    assert_eq!(runtime.statistics().blas_handles.created, 1);
}

#[test]
fn a_handle_that_cannot_be_restored_goes_to_nobody() {
    let (gpu, runtime, _, stream) = open_with_stream(MockOptions::new());
    let other = runtime.device(0).unwrap().create_stream().unwrap();
    let a = stream.upload(&[1.0_f32; 16]).unwrap();
    let c = stream.upload(&[0.0_f32; 16]).unwrap();
    let mut lease = stream.blas().unwrap();
    gpu.fail_call(Operation::Reset, 1, ErrorKind::Unsupported).unwrap();
    let lent = lease.with_raw(|raw| gpu.set_pointer_mode(raw.handle, true).map(|()| raw.handle).unwrap()).unwrap();
    lease.gemm(&SHAPE, 1.0, &a, &a, 0.0, &c).unwrap();
    assert_ne!(lease.with_raw(|raw| raw.handle).unwrap(), lent);
    assert_eq!(gpu.set_pointer_mode(lent, true).unwrap_err().kind(), ErrorKind::InvalidHandle, "destroyed");
    assert_eq!(gpu.live_objects().handles, 1);
    // Destroying it while another stream is captured would lose the capture.
    let graph = other.capture(|_| {
        gpu.fail_call(Operation::Reset, 1, ErrorKind::Vendor).unwrap();
        lease.with_raw(|raw| gpu.set_pointer_mode(raw.handle, true).unwrap()).unwrap();
        assert_eq!(gpu.live_objects().handles, 2);
        Ok(())
    });
    drop((lease, graph.unwrap()));
    stream.blas().unwrap().gemm(&SHAPE, 2.0, &a, &a, 0.0, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [8.0; 16]);
    runtime.trim().unwrap();
    assert_eq!(gpu.live_objects().handles, 1);
}

#[test]
fn a_panic_in_foreign_code_lost_the_lent_workspace() {
    let (_, runtime, _, stream) = open_with_stream(MockOptions::new());
    for _ in 0..3 {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stream.blas().unwrap().with_raw(|_| panic!("foreign code panics")).unwrap();
        }));
        assert!(panic.is_err());
    }
    assert_eq!(runtime.statistics().workspaces, 2, "the stream's, and one that is lent again and again");
}

#[test]
fn a_block_that_a_stream_may_still_write_was_copied_from() {
    let (gpu, runtime, device) = open(MockOptions::new());
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let mut pinned = runtime.pinned::<u8>(64).unwrap();
    let buffer = device.allocate::<u8>(64).unwrap();
    gpu.fail_call(Operation::RecordEvent, 1, ErrorKind::Vendor).unwrap();
    gpu.fail_call(Operation::SynchronizeStream, 1, ErrorKind::Vendor).unwrap();
    stream.copy_to_host(&buffer, &mut pinned).unwrap_err();
    assert_eq!(pinned.read().unwrap_err().kind(), ErrorKind::InvalidState);
    assert_eq!(other.copy_to_device(&pinned, &buffer).unwrap_err().kind(), ErrorKind::InvalidState);
    end(runtime, (pinned, buffer, stream, other, device));
}

#[test]
fn a_handle_kept_the_freed_workspace_of_an_earlier_legacy_default_stream() {
    let (_, runtime, device) = open(MockOptions::new());
    let first = device.legacy_default_stream().unwrap();
    drop(first.blas().unwrap());
    drop(first);
    let other = device.create_stream().unwrap();
    let a = other.upload(&[1.0_f32; 16]).unwrap();
    let c = device.allocate::<f32>(16).unwrap();
    other.synchronize().unwrap();
    device.synchronize().unwrap();
    runtime.trim().unwrap();
    assert_eq!(runtime.statistics().workspaces, 0);
    // The next allocation gets the memory of the freed workspace.
    let victim = device.allocate::<u8>(32 << 20).unwrap();
    other.fill(&victim, 7_u8).unwrap();
    other.synchronize().unwrap();
    let second = device.legacy_default_stream().unwrap();
    second.blas().unwrap().gemm(&SHAPE, 1.0, &a, &a, 0.0, &c).unwrap();
    second.synchronize().unwrap();
    assert!(other.download(&victim).unwrap().iter().all(|&byte| byte == 7));
}

#[test]
fn two_objects_of_the_legacy_default_stream_had_a_workspace_and_a_turn_each() {
    let (_, runtime, device) = open(MockOptions::new());
    let (one, two) = (device.legacy_default_stream().unwrap(), device.legacy_default_stream().unwrap());
    drop((one.blas().unwrap(), two.blas().unwrap()));
    assert_eq!(runtime.statistics().workspaces, 1);
}

#[test]
fn a_use_on_another_device_was_taken_for_one_on_the_first() {
    let (gpu, runtime, _) = open(MockOptions::new().with_devices(2));
    let devices = [runtime.device(0).unwrap(), runtime.device(1).unwrap()];
    let streams = [devices[0].legacy_default_stream().unwrap(), devices[1].legacy_default_stream().unwrap()];
    let source = devices[0].allocate::<u8>(1 << 16).unwrap();
    let target = devices[1].allocate::<u8>(1 << 16).unwrap();
    streams[0].fill(&source, 1_u8).unwrap();
    streams[0].synchronize().unwrap();
    gpu.set_latency(Duration::from_millis(10));
    for _ in 0..10 {
        streams[1].fill(&target, 3_u8).unwrap();
    }
    streams[1].copy(&source, &target).unwrap();
    let at = source.ptr();
    drop(source);
    let start = Instant::now();
    while runtime.block_of(at).is_some() {
        assert!(start.elapsed() < Duration::from_secs(5));
        runtime.trim_device_memory().unwrap();
        thread::yield_now();
    }
    assert!(streams[1].is_complete().unwrap(), "the source was freed while a copy of it was outstanding");
}

#[test]
fn memory_that_ended_streams_held_was_not_given_back_before_out_of_memory() {
    let (_, _, device) = open(MockOptions::new().with_memory_bytes(80 << 20));
    {
        let (a, c) = (device.allocate::<f32>(16).unwrap(), device.allocate::<f32>(16).unwrap());
        let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
        for stream in &streams {
            stream.write(&[1.0_f32; 16], &a).unwrap();
            stream.blas().unwrap().gemm(&SHAPE, 1.0, &a, &a, 0.0, &c).unwrap();
        }
    }
    device.allocate::<u8>(60 << 20).unwrap();
}

#[test]
fn threads_that_run_out_of_memory_together_were_refused_what_the_other_had_in_hand() {
    let (gpu, _, device) = open(MockOptions::new().with_memory_bytes(64 << 20));
    for _ in 0..10 {
        {
            let stream = device.create_stream().unwrap();
            let blocks: Vec<_> = (0..6).map(|_| device.allocate::<u8>(10 << 20).unwrap()).collect();
            stream.synchronize().unwrap();
            gpu.set_latency(Duration::from_millis(2));
            blocks.iter().for_each(|block| stream.fill_zero(block.slice(0..8).unwrap()).unwrap());
        }
        // All memory waits for a busy stream; three threads need it back at once.
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| drop(device.allocate::<u8>(15 << 20).unwrap()));
            }
        });
        gpu.set_latency(Duration::ZERO);
        device.synchronize().unwrap();
    }
}

#[test]
fn the_later_of_two_marks_of_one_buffer_was_forgotten() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let buffers: Vec<_> = (0..4).map(|_| device.allocate::<u8>(64).unwrap()).collect();
    for _ in 0..300 {
        let mut pinned = runtime.pinned::<u8>(64).unwrap();
        pinned.write().unwrap().fill(0);
        gpu.set_latency(Duration::from_micros(300));
        thread::scope(|scope| {
            for buffer in &buffers {
                let (pinned, stream) = (&pinned, &stream);
                scope.spawn(move || stream.copy_to_device(pinned, buffer).unwrap());
            }
        });
        pinned.write().unwrap().fill(1);
        assert!(stream.is_complete().unwrap(), "the memory was given out while copies of it were outstanding");
        gpu.set_latency(Duration::ZERO);
        stream.synchronize().unwrap();
    }
}

#[test]
fn idle_handles_were_kept_while_the_device_was_out_of_memory() {
    let gpu = MockGpu::open(MockOptions::new().with_memory_bytes(4 << 20)).unwrap();
    let options = RuntimeOptions::new().with_blas_workspace_bytes(0).with_lt_workspace_bytes(0);
    let runtime = Runtime::with_options(gpu.clone(), &options).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    // Handles of threads that have ended: each takes device memory of its own.
    let start = std::sync::Barrier::new(30);
    thread::scope(|scope| {
        let lease = || {
            let lease = stream.blas().unwrap();
            start.wait();
            drop(lease);
        };
        let threads: Vec<_> = (0..30).map(|_| scope.spawn(lease)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    assert_eq!(runtime.statistics().blas_handles.idle, 30);
    assert!(gpu.memory_info(0).unwrap().free < 3 << 20, "the handles were to be in the way");
    device.allocate::<u8>(3 << 20).unwrap();
    assert_eq!(gpu.live_objects().handles, 0);
}

#[test]
fn a_refused_release_kept_others_from_the_memory_that_was_given_back() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_memory_bytes(64 << 20));
    let blocks = [8, 40].map(|mib| device.allocate::<u8>(mib << 20).unwrap());
    gpu.set_latency(Duration::from_millis(20));
    // A busy stream keeps both blocks past the first look. The one that waits is refused the first and frees the second.
    blocks.iter().for_each(|block| stream.fill_zero(block.slice(0..8).unwrap()).unwrap());
    drop(blocks);
    gpu.fail_call(Operation::Free, 1, ErrorKind::Vendor).unwrap();
    device.allocate::<u8>(50 << 20).unwrap();
    assert_eq!(runtime.statistics().failed_releases, 1);
}

#[test]
fn a_plan_that_could_not_be_destroyed_lost_all_others() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let a = device.allocate::<f32>(300).unwrap();
    let d = device.allocate::<f32>(300).unwrap();
    let mut lt = stream.lt().unwrap();
    gpu.fail_call(Operation::DestroyPlan, 1, ErrorKind::Vendor).unwrap();
    // One shape more than the cache holds.
    for k in 1..=257 {
        lt.matmul(&GemmShape::of::<f32>(1, 1, k), Epilogue::None, 1.0, &a, &a, 0.0, &d, None).unwrap();
    }
    assert_eq!(gpu.calls(Operation::DestroyPlan), 256);
    assert_eq!(runtime.statistics().failed_releases, 1);
}

#[test]
fn a_runtime_that_cannot_be_closed_names_what_is_alive() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let buffers = [device.allocate::<f32>(4).unwrap(), device.allocate::<f32>(4).unwrap()];
    // Idle host memory no longer belongs to the caller.
    stream.download(&buffers[0]).unwrap();
    let error = runtime.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState);
    assert!(error.message().contains("4 other objects of the runtime are alive"), "{error}");
    assert!(
        error.message().contains("counts 1 stream, ") && error.message().contains("2 blocks of device memory"),
        "{error}"
    );
    assert!(!error.message().contains("host memory"), "{error}");
}
