//! cudarc and Highwater on the same streams and memory, over the simulated CUDA, whose work takes some time.
//!
//! Each test runs again under `scripts/simulated.sh`. With `HIGHWATER_TEST_INSIDE=0`, the tests run over the libraries that the loader
//! finds, real ones included.

use std::sync::Arc;

use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, StridedBatchedConfig, sys};
use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError, HostSlice, ValidAsZeroBits,
};
use highwater_core::{CaptureMode, DeviceBuffer, ErrorKind, Matrix, Runtime, Stream};
use highwater_cudarc::{CudarcPinned, JoinedStream, PooledBlas, StreamExt};
use highwater_simulated_harness::isolated;

#[allow(dead_code, reason = "the tests call `run`, not `main`")]
#[path = "../examples/cudarc_program.rs"]
mod cudarc_program;
#[allow(dead_code, reason = "the tests call `run`, not `main`")]
#[path = "../examples/own_kernel.rs"]
mod own_kernel;

/// Runs a test again over the simulation. Returns a runtime in that run, and `None` after it.
fn open(test: &str) -> Option<Runtime> {
    if isolated::version().is_some() {
        return Some(Runtime::new(highwater_cuda::open().unwrap()).unwrap());
    }
    isolated::outside(test, &["cuda"], &[("HIGHWATER_MOCK", "devices=2,latency=300us")], None);
    None
}

/// Values of several copies and fills, so that work enqueued behind them is late.
const LEN: usize = 1 << 12;

fn delay(stream: &Stream, scratch: &DeviceBuffer<f32>) {
    for _ in 0..5 {
        stream.fill(scratch, 9.0_f32).unwrap();
    }
}

#[test]
fn streams_of_cudarc_work_and_are_kept_while_they_are_used() {
    let Some(runtime) = open("streams_of_cudarc_work_and_are_kept_while_they_are_used") else { return };
    let context = CudaContext::new(0).unwrap();
    for theirs in [context.new_stream().unwrap(), context.default_stream(), context.per_thread_stream()] {
        let stream = Stream::of(&runtime, &theirs).unwrap();
        assert!(Arc::ptr_eq(stream.cuda_stream(), &theirs));
        let values = stream.upload(&[1.0_f32, 2.0]).unwrap();
        assert_eq!(stream.download(&values).unwrap(), [1.0, 2.0]);
    }

    let theirs = context.new_stream().unwrap();
    let alive = Arc::downgrade(&theirs);
    let joined = Stream::of(&runtime, &theirs).unwrap();
    let stream = Stream::clone(&joined);
    drop((theirs, joined));
    assert!(alive.upgrade().is_some(), "the plain stream keeps it");
    let values = stream.upload(&[3.0_f32; LEN]).unwrap();
    drop(stream);
    assert!(alive.upgrade().is_none(), "nothing keeps it any longer");
    drop(values);
    context.check_err().unwrap();
    drop(context);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_stream_of_another_thread_device_or_context_is_refused() {
    let Some(runtime) = open("a_stream_of_another_thread_device_or_context_is_refused") else { return };
    let context = CudaContext::new(0).unwrap();
    let per_thread = Stream::of(&runtime, &context.per_thread_stream()).unwrap();
    let slice = context.per_thread_stream().clone_htod(&[1.0_f32; 4]).unwrap();
    std::thread::scope(|scope| {
        let elsewhere = || {
            // SAFETY: Nothing uses the result.
            let refused = unsafe { per_thread.read(&slice) }.map(|_| ()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidState);
            let pinned = CudarcPinned::new(runtime.pinned::<f32>(4).unwrap(), &per_thread);
            assert_eq!(pinned.map(|_| ()).unwrap_err().kind(), ErrorKind::InvalidState);
        };
        scope.spawn(elsewhere).join().unwrap();
    });
    let empty = context.default_stream().null::<f32>().unwrap();
    // SAFETY: Nothing uses the result.
    let refused = unsafe { per_thread.read(&empty) }.map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);

    let mock = Runtime::new(highwater_mock::MockGpu::open(highwater_mock::MockOptions::new()).unwrap()).unwrap();
    let refused = Stream::of(&mock, &context.default_stream()).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.message().contains("`mock`"), "{refused}");

    if runtime.device_count() > 1 {
        let other = CudaContext::new(1).unwrap();
        let on_other = Stream::of(&runtime, &other.new_stream().unwrap()).unwrap();
        assert_eq!(on_other.device(), 1);
        // SAFETY: Nothing uses the result.
        let refused = unsafe { on_other.read(&slice) }.map(|_| ()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WrongDevice);
        let here = runtime.device(0).unwrap().allocate::<f32>(4).unwrap();
        assert_eq!(on_other.lend(&here).map(|_| ()).unwrap_err().kind(), ErrorKind::WrongDevice);
    }
}

#[test]
fn a_slice_of_cudarc_is_ordered_with_its_other_uses_both_ways() {
    let Some(runtime) = open("a_slice_of_cudarc_is_ordered_with_its_other_uses_both_ways") else { return };
    for tracks in [true, false] {
        let context = CudaContext::new(0).unwrap();
        if !tracks {
            // SAFETY: The crate orders the streams itself, and the test waits.
            unsafe { context.disable_event_tracking() };
        }
        let home = context.new_stream().unwrap();
        let stream = Stream::of(&runtime, &context.new_stream().unwrap()).unwrap();
        let device = runtime.device(0).unwrap();
        let scratch = device.allocate::<f32>(LEN).unwrap();
        let (copy, ours) = (device.allocate::<f32>(LEN).unwrap(), Stream::of(&runtime, &home).unwrap());
        let mut slice = home.alloc_zeros::<f32>(LEN).unwrap();

        // Our read waits for cudarc's late write.
        delay(&ours, &scratch);
        home.memcpy_htod(&vec![5.0_f32; LEN], &mut slice).unwrap();
        {
            // SAFETY: The block uses and drops it on the stream, in no capture.
            let values = unsafe { stream.read(&slice) }.unwrap();
            delay(&stream, &scratch);
            stream.copy(&*values, &copy).unwrap();
        }
        // cudarc's write waits for our late read.
        home.memset_zeros(&mut slice).unwrap();
        assert_eq!(stream.download(&copy).unwrap(), vec![5.0; LEN], "tracks: {tracks}");

        // cudarc's read waits for our late write, also of a view.
        {
            let mut view = slice.slice_mut(1..);
            // SAFETY: As above.
            let values = unsafe { stream.write(&mut view) }.unwrap();
            assert_eq!(values.len(), LEN - 1);
            delay(&stream, &scratch);
            stream.fill(&*values, 7.0_f32).unwrap();
        }
        let values = home.clone_dtoh(&slice).unwrap();
        home.synchronize().unwrap();
        assert_eq!(values[0], 0.0);
        assert_eq!(values[1..], vec![7.0; LEN - 1], "tracks: {tracks}");

        // The memory of a dropped slice is free after our late read.
        home.memcpy_htod(&vec![6.0_f32; LEN], &mut slice).unwrap();
        {
            // SAFETY: As above.
            let values = unsafe { stream.read(&slice) }.unwrap();
            delay(&stream, &scratch);
            stream.copy(&*values, &copy).unwrap();
        }
        drop(slice);
        let next = home.clone_htod(&vec![8.0_f32; LEN]).unwrap();
        assert_eq!(stream.download(&copy).unwrap(), vec![6.0; LEN], "tracks: {tracks}");
        home.synchronize().unwrap();
        drop(next);
        context.check_err().unwrap();
    }
}

#[test]
fn cudarc_uses_our_memory_and_we_free_it_after_that() {
    let Some(runtime) = open("cudarc_uses_our_memory_and_we_free_it_after_that") else { return };
    let context = CudaContext::new(0).unwrap();
    for theirs in [context.new_stream().unwrap(), context.default_stream(), context.per_thread_stream()] {
        let stream = Stream::of(&runtime, &theirs).unwrap();
        let device = runtime.device(0).unwrap();
        let scratch = device.allocate::<f32>(LEN).unwrap();
        let buffer = device.allocate::<f32>(LEN).unwrap();
        let source = theirs.clone_htod(&vec![2.0_f32; LEN]).unwrap();
        let mut target = theirs.alloc_zeros::<f32>(LEN).unwrap();
        {
            let mut lent = stream.lend(&buffer).unwrap();
            delay(&stream, &scratch);
            theirs.memcpy_dtod(&source, &mut lent).unwrap();
            // Another stream waits for the first.
            let other = context.new_stream().unwrap();
            assert_eq!(other.clone_dtoh(&lent).unwrap(), vec![2.0; LEN]);
            delay(&stream, &scratch);
            theirs.memcpy_dtod(&lent, &mut target).unwrap();
        }
        let place = buffer.ptr();
        drop(buffer);
        // Whoever gets the memory next finds no work on it.
        let next = device.allocate::<f32>(LEN).unwrap();
        let elsewhere = device.create_stream().unwrap();
        elsewhere.fill(&next, 3.0_f32).unwrap();
        elsewhere.synchronize().unwrap();
        let values = theirs.clone_dtoh(&target).unwrap();
        theirs.synchronize().unwrap();
        assert_eq!(values, vec![2.0; LEN], "the memory at {place:?} was reused at {:?}", next.ptr());
        assert_eq!(elsewhere.download(&next).unwrap(), vec![3.0; LEN]);
    }
    context.check_err().unwrap();
}

#[test]
fn a_graph_keeps_lent_and_pinned_memory() {
    let Some(runtime) = open("a_graph_keeps_lent_and_pinned_memory") else { return };
    let context = CudaContext::new(0).unwrap();
    let theirs = context.new_stream().unwrap();
    let stream = Stream::of(&runtime, &theirs).unwrap();
    let device = runtime.device(0).unwrap();
    let buffer = device.allocate::<f32>(LEN).unwrap();
    let target = device.allocate::<f32>(LEN).unwrap();
    let mut pinned = CudarcPinned::new(runtime.pinned::<f32>(LEN).unwrap(), &stream).unwrap();
    pinned.write().unwrap().fill(4.0);
    let (mut lent, mut lent_target) = (stream.lend(&buffer).unwrap(), stream.lend(&target).unwrap());
    let mut graph = stream
        .capture_with(CaptureMode::ThreadLocal, |_| {
            theirs.memcpy_htod(&pinned, &mut lent).unwrap();
            theirs.memcpy_dtod(&lent, &mut lent_target).unwrap();
            Ok(())
        })
        .unwrap();
    drop((lent, lent_target));
    drop((buffer, pinned));
    stream.synchronize().unwrap();
    // Of the same sizes, so that freed memory would be reused.
    let next = device.allocate::<f32>(LEN).unwrap();
    stream.fill(&next, 1.0_f32).unwrap();
    let mut others: Vec<_> = (0..4).map(|_| runtime.pinned::<f32>(LEN).unwrap()).collect();
    others.iter_mut().for_each(|other| other.write().unwrap().fill(1.0));
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&target).unwrap(), vec![4.0; LEN]);
    assert_eq!(stream.download(&next).unwrap(), vec![1.0; LEN]);
}

#[test]
fn pinned_memory_is_reused_after_the_copies_of_cudarc() {
    let Some(runtime) = open("pinned_memory_is_reused_after_the_copies_of_cudarc") else { return };
    let context = CudaContext::new(0).unwrap();
    for theirs in [context.new_stream().unwrap(), context.default_stream(), context.per_thread_stream()] {
        let stream = Stream::of(&runtime, &theirs).unwrap();
        let scratch = runtime.device(0).unwrap().allocate::<f32>(LEN).unwrap();
        let make = |value| {
            let mut pinned = CudarcPinned::new(runtime.pinned::<f32>(LEN).unwrap(), &stream).unwrap();
            pinned.write().unwrap().fill(value);
            pinned
        };
        let pinned = make(1.5);
        delay(&stream, &scratch);
        let mut slice = theirs.clone_htod(&pinned).unwrap();
        // Under load, this thread may be late now and then.
        let returns_at_once = (0..100).any(|_| {
            delay(&stream, &scratch);
            theirs.memcpy_htod(&pinned, &mut slice).unwrap();
            !stream.is_complete().unwrap()
        });
        assert!(returns_at_once, "the copies wait");
        drop(pinned);
        // Would be the same memory.
        let mut other = make(2.5);
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), vec![1.5; LEN]);

        // The CPU waits for a late copy, before it reads and before it writes.
        delay(&stream, &scratch);
        theirs.memcpy_dtoh(&slice, &mut other).unwrap();
        assert_eq!(other.read().unwrap(), vec![1.5; LEN]);
        delay(&stream, &scratch);
        theirs.memcpy_htod(&other, &mut slice).unwrap();
        other.write().unwrap().fill(3.5);
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), vec![1.5; LEN]);

        // A copy on another stream is ordered, and has ended.
        let apart = context.new_stream().unwrap();
        let mut target = apart.alloc_zeros::<f32>(LEN).unwrap();
        delay(&stream, &scratch);
        theirs.memcpy_dtoh(&slice, &mut other).unwrap();
        apart.memcpy_htod(&other, &mut target).unwrap();
        other.write().unwrap().fill(4.5);
        assert_eq!(apart.clone_dtoh(&target).unwrap(), vec![1.5; LEN]);

        // Another thread drops it after a late copy.
        delay(&stream, &scratch);
        theirs.memcpy_htod(&other, &mut slice).unwrap();
        std::thread::scope(|scope| scope.spawn(|| drop(other)).join().unwrap());
        drop(make(5.5));
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), vec![4.5; LEN]);

        // The buffer goes back to copies of Highwater.
        let mut last = make(6.5);
        delay(&stream, &scratch);
        theirs.memcpy_dtoh(&slice, &mut last).unwrap();
        let buffer = last.into_buffer().unwrap();
        assert_eq!(buffer.read().unwrap(), vec![4.5; LEN]);
    }
    context.check_err().unwrap();
}

#[test]
fn pinned_memory_that_cudarc_cannot_copy_is_refused() {
    let Some(runtime) = open("pinned_memory_that_cudarc_cannot_copy_is_refused") else { return };
    let context = CudaContext::new(0).unwrap();
    let stream = Stream::of(&runtime, &context.new_stream().unwrap()).unwrap();
    let piece = runtime.device(0).unwrap().capabilities().register_piece_bytes;
    let large = runtime.pinned::<u8>(piece + (4 << 20)).unwrap();
    if large.registrations().count() > 1 {
        let refused = CudarcPinned::new(large, &stream).map(|_| ()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        assert!(refused.hint().contains("pinned_undivided"), "{refused}");
    }
    let other = Runtime::new(highwater_cuda::open().unwrap()).unwrap();
    let refused = CudarcPinned::new(other.pinned::<u8>(64).unwrap(), &stream).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidPointer);
}

/// 2 x 2, column by column: c = a b.
fn config<T>(alpha: T, beta: T) -> GemmConfig<T> {
    let keep = sys::cublasOperation_t::CUBLAS_OP_N;
    GemmConfig { transa: keep, transb: keep, m: 2, n: 2, k: 2, alpha, lda: 2, ldb: 2, beta, ldc: 2 }
}

/// What a program of cudarc does with its handle.
fn products<G: Gemm<f32> + Gemm<f64>>(blas: &G, stream: &Arc<CudaStream>) -> (Vec<f32>, Vec<f32>, Vec<f64>) {
    let a = stream.clone_htod(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unwrap();
    let mut c = stream.clone_htod(&[1.0_f32; 8]).unwrap();
    let wide = stream.clone_htod(&[1.0_f64, 2.0, 3.0, 4.0]).unwrap();
    let mut wide_c = stream.alloc_zeros::<f64>(4).unwrap();
    let batch = StridedBatchedConfig { gemm: config(1.0, 0.0), batch_size: 2, stride_a: 4, stride_b: 4, stride_c: 4 };
    // SAFETY: The matrices have the stated sizes.
    unsafe {
        blas.gemm(config(2.0, 1.0), &a, &a, &mut c).unwrap();
        blas.gemm(config(1.0, 0.0), &wide, &wide, &mut wide_c).unwrap();
        let one = stream.clone_dtoh(&c).unwrap();
        blas.gemm_strided_batched(batch, &a, &a, &mut c).unwrap();
        (one, stream.clone_dtoh(&c).unwrap(), stream.clone_dtoh(&wide_c).unwrap())
    }
}

#[test]
fn pooled_handles_give_the_numbers_of_cudarcs_own() {
    let Some(runtime) = open("pooled_handles_give_the_numbers_of_cudarcs_own") else { return };
    let context = CudaContext::new(0).unwrap();
    for theirs in [context.new_stream().unwrap(), context.default_stream(), context.per_thread_stream()] {
        let stream = Stream::of(&runtime, &theirs).unwrap();
        let pooled = Arc::new(PooledBlas::new(&stream));
        let numbers = products(&*pooled, &theirs);
        assert_eq!(numbers, products(&CudaBlas::new(theirs.clone()).unwrap(), &theirs));
        assert_eq!(numbers.0[..4], [15.0, 21.0, 31.0, 45.0]);
        assert_eq!(numbers.1, [7.0, 10.0, 15.0, 22.0, 67.0, 78.0, 91.0, 106.0]);
        assert_eq!(numbers.2, [7.0, 10.0, 15.0, 22.0]);

        let mut bound = std::ptr::null_mut();
        // SAFETY: The handle is alive during the call.
        let code = pooled.with_handle(|handle| unsafe { sys::cublasGetStream_v2(handle, &mut bound) }).unwrap();
        assert_eq!(code, sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        let named = if theirs.cu_stream().is_null() { 1 } else { theirs.cu_stream().addr() };
        assert_eq!(bound.addr(), named);
    }
    // Four threads share one object. Each has a handle of its own.
    let theirs = context.new_stream().unwrap();
    let pooled = Arc::new(PooledBlas::new(&Stream::of(&runtime, &theirs).unwrap()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(products(&*pooled, &context.new_stream().unwrap()).2, [7.0, 10.0, 15.0, 22.0]);
            });
        }
    });
}

#[test]
fn the_example_of_a_cudarc_program_passes_its_checks() {
    if open("the_example_of_a_cudarc_program_passes_its_checks").is_some() {
        cudarc_program::run().unwrap();
    }
}

#[test]
fn the_example_of_an_own_kernel_passes_its_checks() {
    if open("the_example_of_an_own_kernel_passes_its_checks").is_some() {
        own_kernel::run(false).unwrap();
    }
}

/// The parts of candle-core 0.11.1 that take or return a stream, a slice or a handle of cudarc, with its signatures and its calls.
/// The versions 0.9.2 to 0.11.1 are built on cudarc 0.19, as this crate is.
///
/// | surface | test |
/// | --- | --- |
/// | `Device::new_cuda`, `new_cuda_with_stream`, `CudaDevice::cuda_stream` | `candles_streams_are_joined` |
/// | `CudaDevice::memcpy_htod`, `clone_htod`, `memcpy_dtoh`: `HostSlice` | `candles_copies_take_pinned_memory` |
/// | `CudaDevice::memcpy_dtod`, `clone_dtoh`, `memcpy_htod`: `DevicePtr`, `DevicePtrMut` | `candles_copies_take_our_memory` |
/// | `CudaDevice::alloc_zeros`, `CudaStorage::wrap_cuda_slice`, `as_cuda_slice`, `as_cuda_slice_mut` | `the_slices_of_candles_storages_go_through_our_products` |
/// | `CudaDevice::cublas_handle` | `a_pooled_handle_takes_the_calls_of_candles_handle` |
/// | `CudaFunc::builder`: `LaunchArgs` | `launch` of the example `own_kernel`; the simulation runs no kernels |
/// | `CudaDevice::disable_event_tracking` | all |
mod candle {
    use super::*;

    pub(super) struct CudaDevice {
        context: Arc<CudaContext>,
        stream: Arc<CudaStream>,
        blas: Arc<CudaBlas>,
    }

    impl CudaDevice {
        /// `Device::new_cuda`.
        pub(super) fn new(ordinal: usize) -> Self {
            let context = CudaContext::new(ordinal).unwrap();
            let stream = context.per_thread_stream();
            Self::from_context_and_stream(context, stream)
        }

        /// `Device::new_cuda_with_stream`.
        pub(super) fn new_with_stream(ordinal: usize) -> Self {
            let context = CudaContext::new(ordinal).unwrap();
            let stream = context.new_stream().unwrap();
            Self::from_context_and_stream(context, stream)
        }

        fn from_context_and_stream(context: Arc<CudaContext>, stream: Arc<CudaStream>) -> Self {
            let blas = Arc::new(CudaBlas::new(stream.clone()).unwrap());
            Self { context, stream, blas }
        }

        pub(super) fn cuda_stream(&self) -> Arc<CudaStream> {
            self.stream.clone()
        }

        pub(super) fn cublas_handle(&self) -> Arc<CudaBlas> {
            self.blas.clone()
        }

        pub(super) unsafe fn disable_event_tracking(&self) {
            // SAFETY: As the caller promises.
            unsafe { self.context.disable_event_tracking() }
        }

        pub(super) fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
            &self,
            len: usize,
        ) -> Result<CudaSlice<T>, DriverError> {
            self.stream.alloc_zeros::<T>(len)
        }

        pub(super) fn memcpy_htod<T: DeviceRepr + 'static, Src: HostSlice<T> + ?Sized, Dst: DevicePtrMut<T>>(
            &self,
            src: &Src,
            dst: &mut Dst,
        ) -> Result<(), DriverError> {
            self.stream.memcpy_htod(src, dst)
        }

        pub(super) fn memcpy_dtoh<T: DeviceRepr, Src: DevicePtr<T>, Dst: HostSlice<T>>(
            &self,
            src: &Src,
            dst: &mut Dst,
        ) -> Result<(), DriverError> {
            self.stream.memcpy_dtoh(src, dst)
        }

        pub(super) fn memcpy_dtod<T, Src: DevicePtr<T>, Dst: DevicePtrMut<T>>(
            &self,
            src: &Src,
            dst: &mut Dst,
        ) -> Result<(), DriverError> {
            self.stream.memcpy_dtod(src, dst)
        }

        pub(super) fn clone_htod<T: DeviceRepr + 'static, Src: HostSlice<T> + ?Sized>(
            &self,
            src: &Src,
        ) -> Result<CudaSlice<T>, DriverError> {
            self.stream.clone_htod(src)
        }

        pub(super) fn clone_dtoh<T: DeviceRepr, Src: DevicePtr<T>>(&self, src: &Src) -> Result<Vec<T>, DriverError> {
            self.stream.clone_dtoh(src)
        }
    }

    /// `CudaStorage`, of one type.
    pub(super) struct CudaStorage(CudaSlice<f32>);

    impl CudaStorage {
        pub(super) fn wrap_cuda_slice(slice: CudaSlice<f32>) -> Self {
            Self(slice)
        }

        pub(super) fn as_cuda_slice(&self) -> &CudaSlice<f32> {
            &self.0
        }

        pub(super) fn as_cuda_slice_mut(&mut self) -> &mut CudaSlice<f32> {
            &mut self.0
        }
    }
}

/// Runs a test on each stream that candle makes, with and without event tracking.
fn with_devices(test: impl Fn(&Runtime, &candle::CudaDevice, &JoinedStream), runtime: &Runtime) {
    for make in [candle::CudaDevice::new, candle::CudaDevice::new_with_stream] {
        for tracks in [true, false] {
            let device = make(0);
            if !tracks {
                // SAFETY: Each device has one stream.
                unsafe { device.disable_event_tracking() };
            }
            test(runtime, &device, &Stream::of(runtime, &device.cuda_stream()).unwrap());
            device.cuda_stream().context().check_err().unwrap();
        }
    }
}

#[test]
fn candles_streams_are_joined() {
    let Some(runtime) = open("candles_streams_are_joined") else { return };
    with_devices(
        |_, device, stream| {
            assert_eq!(stream.raw().unwrap(), device.cuda_stream().cu_stream().addr() as u64);
            let values = stream.upload(&[2.0_f32; 8]).unwrap();
            assert_eq!(stream.download(&values).unwrap(), [2.0; 8]);
        },
        &runtime,
    );
}

#[test]
fn candles_copies_take_pinned_memory() {
    let Some(runtime) = open("candles_copies_take_pinned_memory") else { return };
    with_devices(
        |runtime, device, stream| {
            let mut pinned = CudarcPinned::new(runtime.pinned::<f32>(LEN).unwrap(), stream).unwrap();
            pinned.write().unwrap().fill(1.0);
            let mut slice = device.clone_htod(&pinned).unwrap();
            assert_eq!(device.clone_dtoh(&slice).unwrap(), vec![1.0; LEN]);
            pinned.write().unwrap().fill(2.0);
            device.memcpy_htod(&pinned, &mut slice).unwrap();
            pinned.write().unwrap().fill(0.0);
            device.memcpy_dtoh(&slice, &mut pinned).unwrap();
            assert_eq!(pinned.read().unwrap(), vec![2.0; LEN]);
        },
        &runtime,
    );
}

#[test]
fn candles_copies_take_our_memory() {
    let Some(runtime) = open("candles_copies_take_our_memory") else { return };
    with_devices(
        |_, device, stream| {
            let ours = stream.upload(&vec![3.0_f32; LEN]).unwrap();
            let mut slice = device.clone_htod(&vec![0.0_f32; LEN]).unwrap();
            let mut lent = stream.lend(&ours).unwrap();
            device.memcpy_dtod(&lent, &mut slice).unwrap();
            assert_eq!(device.clone_dtoh(&slice).unwrap(), vec![3.0; LEN]);
            device.memcpy_htod(&vec![4.0_f32; LEN], &mut lent).unwrap();
            assert_eq!(device.clone_dtoh(&lent).unwrap(), vec![4.0; LEN]);
        },
        &runtime,
    );
}

#[test]
fn the_slices_of_candles_storages_go_through_our_products() {
    let Some(runtime) = open("the_slices_of_candles_storages_go_through_our_products") else { return };
    with_devices(
        |_, device, stream| {
            let storage = |values: &[f32]| candle::CudaStorage::wrap_cuda_slice(device.clone_htod(values).unwrap());
            let a = storage(&[1.0, 2.0, 3.0, 4.0]);
            let mut c = candle::CudaStorage::wrap_cuda_slice(device.alloc_zeros(4).unwrap());
            {
                // SAFETY: The block uses both on the stream only, in no capture, and drops them.
                let (a, c) =
                    unsafe { (stream.read(a.as_cuda_slice()).unwrap(), stream.write(c.as_cuda_slice_mut()).unwrap()) };
                let [left, right, product] = [&*a, &*a, &*c].map(|buffer| Matrix::row_major(buffer, 2, 2));
                stream.matmul(left, right, product).run().unwrap();
            }
            assert_eq!(device.clone_dtoh(c.as_cuda_slice()).unwrap(), [7.0, 10.0, 15.0, 22.0]);
        },
        &runtime,
    );
}

#[test]
fn a_pooled_handle_takes_the_calls_of_candles_handle() {
    let Some(runtime) = open("a_pooled_handle_takes_the_calls_of_candles_handle") else { return };
    with_devices(
        |_, device, stream| {
            let a = device.clone_htod(&[1.0_f32, 2.0, 3.0, 4.0]).unwrap();
            // As in candle's `gemm_strided_batched_f32`, which passes `*cublas.handle()`.
            let product = |handle: sys::cublasHandle_t| {
                let mut c = device.clone_htod(&[0.0_f32; 4]).unwrap();
                let (alpha, beta) = (1.0_f32, 0.0_f32);
                {
                    let theirs = device.cuda_stream();
                    let (a, _read) = a.device_ptr(&theirs);
                    let (c, _written) = c.device_ptr_mut(&theirs);
                    let (keep, real) = (sys::cublasOperation_t::CUBLAS_OP_N, sys::cudaDataType_t::CUDA_R_32F);
                    // SAFETY: The matrices have four values each.
                    unsafe {
                        cudarc::cublas::result::gemm_strided_batched_ex(
                            handle,
                            keep,
                            keep,
                            2,
                            2,
                            2,
                            (&raw const alpha).cast(),
                            a as *const _,
                            real,
                            2,
                            4,
                            a as *const _,
                            real,
                            2,
                            4,
                            (&raw const beta).cast(),
                            c as *mut _,
                            real,
                            2,
                            4,
                            1,
                            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
                        )
                        .unwrap();
                    }
                }
                device.clone_dtoh(&c).unwrap()
            };
            let pooled = PooledBlas::new(stream).with_handle(product).unwrap();
            assert_eq!(pooled, product(*device.cublas_handle().handle()));
            assert_eq!(pooled, [7.0, 10.0, 15.0, 22.0]);
        },
        &runtime,
    );
}

/// candle-core 0.9.1 is built on cudarc 0.16, whose types are other types. Only numbers pass, and the caller orders the work.
#[test]
fn another_version_of_cudarc_is_bridged_by_numbers() {
    let Some(runtime) = open("another_version_of_cudarc_is_bridged_by_numbers") else { return };
    let candle = candle::CudaDevice::new_with_stream(0);
    let theirs = candle.cuda_stream();
    let slice = candle.clone_htod(&[1.0_f32, 2.0, 3.0, 4.0]).unwrap();
    let apart = theirs.context().new_stream().unwrap();
    let numbers = || {
        let (address, _uses) = slice.device_ptr(&theirs);
        (theirs.cu_stream().addr() as u64, address)
    };
    let (stream, address) = numbers();
    let device = runtime.device(0).unwrap();
    // SAFETY: The stream and the slice live until the end of the test, which waits for all work.
    let (stream, values) = unsafe {
        let address = highwater_core::DevicePtr::new(address);
        (device.stream_from_raw(stream).unwrap(), DeviceBuffer::<f32>::from_raw(&device, address, 4).unwrap())
    };
    let product = device.allocate::<f32>(4).unwrap();
    let [left, right, result] = [&values, &values, &product].map(|buffer| Matrix::row_major(buffer, 2, 2));
    stream.matmul(left, right, result).run().unwrap();
    assert_eq!(stream.download(&product).unwrap(), [7.0, 10.0, 15.0, 22.0]);

    // A write of theirs on another stream, and an event behind it.
    let scratch = device.allocate::<f32>(LEN).unwrap();
    delay(&Stream::of(&runtime, &apart).unwrap(), &scratch);
    let zeros = [0.0_f32; 4];
    // SAFETY: The slice has four values, and the source lives until the wait below.
    unsafe {
        cudarc::driver::result::memcpy_htod_async(values.ptr().get(), &zeros, apart.cu_stream()).unwrap();
    }
    let event = apart.record_event(None).unwrap();
    // SAFETY: The event lives until the call has returned.
    unsafe { stream.wait_raw(event.cu_event().addr() as u64).unwrap() };
    assert_eq!(stream.download(&values).unwrap(), zeros);

    let mut bound = std::ptr::null_mut();
    let bind = |raw: highwater_core::RawBlas| {
        let handle = std::ptr::with_exposed_provenance_mut(raw.handle as usize);
        // SAFETY: The handle is alive during the call.
        unsafe { sys::cublasGetStream_v2(handle, &mut bound) }
    };
    assert_eq!(stream.blas().unwrap().with_raw(bind).unwrap(), sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
    assert_eq!(bound.addr(), theirs.cu_stream().addr());
}
