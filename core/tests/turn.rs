//! A BLAS call is several operations that share the stream's workspace. Threads with handles of their own on one stream
//! get the lone result bit for bit, because calls take the stream's turn; without the turn they do not.

mod support;

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use highwater_core::{
    Backend, BlasKind, BlasOptions, DeviceBuffer, Gemm, GemmShape, Runtime, Stream, StreamId, Workspace,
};
use highwater_mock::MockOptions;
use support::open;

const N: usize = 24;
const ROUNDS: usize = 20;

/// How one thread multiplies: `multiply(a, b, c)` on the stream it was made for.
type Multiply<'m> = Box<dyn FnMut(&DeviceBuffer<f32>, &DeviceBuffer<f32>, &DeviceBuffer<f32>) + 'm>;

fn values(seed: usize) -> Vec<f32> {
    (0..N * N).map(|i| ((i * 31 + seed * 17 + 7) % 101) as f32 / 37.0 - 1.3).collect()
}

/// Many threads multiply their own matrices on shared streams; gives how many products differ from the lone result.
fn wrong_products<'m>(
    runtime: &Runtime,
    streams: &'m [Stream],
    threads: usize,
    new_multiply: &(dyn Fn(&'m Stream) -> Multiply<'m> + Sync),
) -> u32 {
    let device = runtime.device(0).unwrap();
    let wrong = AtomicU32::new(0);
    let start = Barrier::new(threads);
    thread::scope(|scope| {
        for index in 0..threads {
            let (device, wrong, start) = (&device, &wrong, &start);
            scope.spawn(move || {
                let lone_stream = device.create_stream().unwrap();
                let stream = &streams[index % streams.len()];
                let a = stream.upload(&values(index)).unwrap();
                let b = stream.upload(&values(index + 100)).unwrap();
                let c = device.allocate::<f32>(N * N).unwrap();
                stream.synchronize().unwrap();
                lone_stream.blas().unwrap().gemm(&GemmShape::of::<f32>(N, N, N), 1.0, &a, &b, 0.0, &c).unwrap();
                let alone = lone_stream.download(&c).unwrap();
                let mut multiply = new_multiply(stream);
                start.wait();
                for _ in 0..ROUNDS {
                    stream.fill_zero(&c).unwrap();
                    multiply(&a, &b, &c);
                    let got = stream.download(&c).unwrap();
                    let same = got.iter().zip(&alone).all(|(x, y)| x.to_bits() == y.to_bits());
                    wrong.fetch_add(u32::from(!same), Ordering::Relaxed);
                }
            });
        }
    });
    wrong.into_inner()
}

fn with_leases<'m>(stream: &'m Stream) -> Multiply<'m> {
    Box::new(move |a, b, c| {
        stream.blas().unwrap().gemm(&GemmShape::of::<f32>(N, N, N), 1.0, a, b, 0.0, c).unwrap();
    })
}

/// A pause between the two operations of a product: without a turn, other calls get in between.
const GAP: Duration = Duration::from_micros(200);

#[test]
fn threads_on_shared_streams_get_the_lone_result() {
    for (threads, streams) in [(2, 1), (16, 4), (16, 1)] {
        let (_, runtime, device) = open(MockOptions::new().with_gemm_gap(GAP));
        let shared: Vec<Stream> = (0..streams).map(|_| device.create_stream().unwrap()).collect();
        assert_eq!(wrong_products(&runtime, &shared, threads, &with_leases), 0, "{threads} on {streams}");
        // Workspaces grow with streams, not with threads times streams; handles grow with threads.
        let statistics = runtime.statistics();
        // Each thread has a stream of its own beside the shared ones.
        assert!(statistics.workspaces <= (threads + streams) as u64, "{statistics:?}");
        assert!(statistics.blas_handles.created <= threads as u64, "{statistics:?}");
    }
}

/// The test double: handles of their own on one stream and one workspace, as the lease has them, but no turn.
fn without_turn<'m>(gpu: &'m dyn Backend, workspace: Workspace) -> impl Fn(&'m Stream) -> Multiply<'m> + Sync {
    move |stream: &'m Stream| {
        let id: StreamId = stream.id();
        let mut handle = gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
        handle.set_stream(id).unwrap();
        // SAFETY: the workspace is live for the whole test; that calls do not take turns is what the test shows to be
        // wrong, and on the mock gives wrong values, not undefined behaviour.
        unsafe { handle.set_workspace(Some(workspace)).unwrap() };
        Box::new(move |a, b, c| {
            let gemm = Gemm::new(GemmShape::of::<f32>(N, N, N), a.ptr(), b.ptr(), c.ptr());
            // SAFETY: the buffers are live and large enough, and are kept until the product was downloaded.
            unsafe { handle.gemm(&gemm).unwrap() };
        })
    }
}

#[test]
fn without_the_turn_the_same_case_fails() {
    let (gpu, runtime, device) = open(MockOptions::new().with_gemm_gap(GAP));
    let shared = [device.create_stream().unwrap()];
    let workspace = device.allocate::<u8>(1 << 20).unwrap();
    let workspace = Workspace { ptr: workspace.ptr(), bytes: 1 << 20 };
    let wrong = wrong_products(&runtime, &shared, 16, &without_turn(&*gpu, workspace));
    assert!(wrong > 0, "calls that do not take turns must corrupt each other");
}
