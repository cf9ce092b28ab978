//! The hot paths of the pools, over the mock device. Run with `cargo bench -p highwater-core`.
//!
//! Each group stands beside a baseline of the same run: the vendor's own calls without the pool.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use highwater_core::{
    Backend, BlasKind, BlasOptions, GemmShape, HandlePool, HostOptions, PoolKey, Runtime, RuntimeOptions,
    StreamOptions, fork::Generation,
};
use highwater_mock::{MockGpu, MockOptions};

fn handles(criterion: &mut Criterion) {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
    streams.iter().for_each(|stream| drop(stream.blas().unwrap()));

    let mut group = criterion.benchmark_group("handle");
    group.bench_function("acquire_again_same_stream", |b| b.iter(|| drop(black_box(streams[0].blas().unwrap()))));
    let mut turn = 0;
    group.bench_function("acquire_another_stream_each_time", |b| {
        b.iter(|| {
            turn ^= 1;
            drop(black_box(streams[turn].blas().unwrap()));
        });
    });
    let pool = HandlePool::<u64>::new();
    drop(pool.lease(PoolKey::device(0), || Ok(1)).unwrap());
    group.bench_function("own_handle_type", |b| {
        b.iter(|| drop(black_box(pool.lease(PoolKey::device(0), || Ok(1)).unwrap())));
    });
    let held = streams[0].blas().unwrap();
    drop(streams[0].blas().unwrap());
    group.bench_function("second_lease_in_one_thread", |b| b.iter(|| drop(black_box(streams[0].blas().unwrap()))));
    drop(held);
    group.bench_function("baseline_create_and_destroy", |b| {
        b.iter(|| gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap().destroy().unwrap());
    });
    let mut handle = gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    let ids = [0, 1].map(|_| gpu.create_stream(0, &StreamOptions::new()).unwrap());
    group.bench_function("baseline_set_stream_and_workspace", |b| {
        b.iter(|| {
            turn ^= 1;
            handle.set_stream(ids[turn]).unwrap();
            // SAFETY: the handle's own workspace is bound; nothing is enqueued.
            unsafe { handle.set_workspace(None).unwrap() };
        });
    });
    group.bench_function("fork_guard", |b| {
        let generation = Generation::current();
        b.iter(|| black_box(generation).is_current());
    });
    group.finish();
}

fn pinned(criterion: &mut Criterion) {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let mut group = criterion.benchmark_group("pinned");
    for (name, bytes) in [("4KiB", 4 << 10), ("1MiB", 1 << 20), ("64MiB", 64 << 20)] {
        drop(runtime.pinned::<u8>(bytes).unwrap());
        group.bench_function(format!("allocate_and_free_hit_{name}"), |b| {
            b.iter(|| drop(black_box(runtime.pinned::<u8>(bytes).unwrap())));
        });
    }
    let capped = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_host_cache_bytes(1 << 20)).unwrap();
    drop(capped.pinned::<u8>(4096).unwrap());
    group.bench_function("allocate_and_free_hit_4KiB_under_a_cap", |b| {
        b.iter(|| drop(black_box(capped.pinned::<u8>(4096).unwrap())));
    });
    let held = capped.pinned::<u8>(2 << 20).unwrap();
    group.bench_function("allocate_and_free_hit_4KiB_with_more_than_the_cap_held", |b| {
        b.iter(|| drop(black_box(capped.pinned::<u8>(4096).unwrap())));
    });
    drop(held);
    let buffer = device.allocate::<u8>(4096).unwrap();
    group.bench_function("allocate_copy_and_free_4KiB", |b| {
        b.iter_batched(
            || stream.synchronize().unwrap(),
            |()| {
                let staging = runtime.pinned::<u8>(4096).unwrap();
                stream.copy_to_device(&staging, &buffer).unwrap();
            },
            BatchSize::PerIteration,
        );
    });
    // Every request is a miss: the block is mapped, touched, registered, unregistered and unmapped.
    let uncached = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_host_cache_bytes(0)).unwrap();
    group.sample_size(20);
    group.bench_function("allocate_and_free_miss_64MiB", |b| {
        b.iter(|| drop(black_box(uncached.pinned::<u8>(64 << 20).unwrap())));
    });
    group.bench_function("baseline_zeroed_vector_touched_by_one_thread_64MiB", |b| {
        b.iter(|| {
            let mut values = vec![0_u8; 64 << 20];
            values.iter_mut().step_by(4096).for_each(|value| *value = 1);
            black_box(values)
        });
    });
    group.sample_size(100);
    let host = gpu.host_allocator();
    group.bench_function("baseline_backend_allocate_and_free_1MiB", |b| {
        b.iter(|| {
            let ptr = host.allocate(1 << 20, &HostOptions::new()).unwrap();
            // SAFETY: allocated just now and used by nobody.
            unsafe { host.free(ptr).unwrap() };
        });
    });
    group.finish();
}

fn products(criterion: &mut Criterion) {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(gpu).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let (a, c) = (stream.upload(&[1.0_f32; 1024]).unwrap(), device.allocate::<f32>(1024).unwrap());
    let shape = GemmShape::of::<f32>(32, 32, 32);
    let mut group = criterion.benchmark_group("gemm_32x32");
    group.bench_function("lease_enqueue_and_wait", |b| {
        b.iter(|| {
            stream.blas().unwrap().gemm(&shape, 1.0, &a, &a, 0.0, &c).unwrap();
            stream.synchronize().unwrap();
        });
    });
    group.finish();
}

criterion_group!(benches, handles, pinned, products);
criterion_main!(benches);
