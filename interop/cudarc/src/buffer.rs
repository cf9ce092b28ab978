//! [`LentSlice`], memory of cudarc in a call of Highwater, and [`LentBuffer`], the reverse.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceSlice as CudarcSlice, DriverError, LaunchArgs, PushKernelArg,
    SyncOnDrop, sys,
};
use highwater_core::{Access, DeviceBuffer, DevicePtr as Address, DeviceSlice, Element, Error, ErrorKind, Result};

use crate::stream::{JoinedStream, driver_error};

/// Memory of cudarc as a [`DeviceBuffer`]: [`JoinedStream::read`] and [`JoinedStream::write`]. Its drop tells cudarc of the use.
#[derive(Debug)]
pub struct LentSlice<'a, T: Element> {
    buffer: DeviceBuffer<T>,
    /// Dropped before cudarc's event is recorded.
    _home: Home<'a>,
    _sync: SyncOnDrop<'a>,
    /// The drop enqueues on the stream of this thread.
    in_this_thread: PhantomData<*const ()>,
}

impl<T: Element> Deref for LentSlice<'_, T> {
    type Target = DeviceBuffer<T>;

    fn deref(&self) -> &DeviceBuffer<T> {
        &self.buffer
    }
}

/// The stream that a slice is freed on. Its drop orders that stream after the use, unless cudarc's events do.
#[derive(Debug)]
struct Home<'a> {
    home: Arc<CudaStream>,
    used_on: &'a CudaStream,
    is_tracked: bool,
}

impl Home<'_> {
    /// Returns whether the contexts record events. Several contexts may stand for one primary context.
    fn record_events(&self) -> bool {
        [self.home.context(), self.used_on.context()].iter().all(|it| it.is_managing_stream_synchronization())
    }

    fn is_ordered(&self) -> bool {
        *self.home == *self.used_on || (self.is_tracked && self.record_events())
    }
}

impl Drop for Home<'_> {
    fn drop(&mut self) {
        if !self.is_ordered() {
            self.home.context().record_err(self.home.join(self.used_on));
        }
    }
}

impl JoinedStream {
    /// Makes a buffer over a `CudaSlice` or a view of one, for work that only reads it.
    ///
    /// This stream first waits for cudarc's writes of the slice. When the result is dropped, cudarc records a read, so later writes and
    /// the drop of the slice wait for the work that was enqueued until then. If cudarc tracks no events, the result orders this stream
    /// and the slice's own one in both directions instead.
    ///
    /// # Errors
    /// `WrongDevice` for a slice of another context; `InvalidArgument` for an empty slice; `InvalidState` in another thread than a
    /// per-thread stream's; `Vendor` if cudarc returned an error; else the error of `DeviceBuffer::from_raw`.
    ///
    /// # Safety
    /// The caller must use the result only on this stream and outside captures, must not write it, and must drop it.
    pub unsafe fn read<'a, T: Element, S: DevicePtr<T>>(&'a self, slice: &'a S) -> Result<LentSlice<'a, T>> {
        const OPERATION: &str = "JoinedStream::read";
        let home = self.home_of(OPERATION, slice)?;
        let (address, sync) = slice.device_ptr(self.cuda_stream());
        // SAFETY: As the caller promises.
        unsafe { self.lent(OPERATION, (address, slice.len()), home, sync) }
    }

    /// As [`JoinedStream::read`], for work that writes the slice. This stream first waits for all of cudarc's uses, and cudarc records
    /// a write.
    ///
    /// # Errors
    /// As [`JoinedStream::read`].
    ///
    /// # Safety
    /// The caller must use the result only on this stream and outside captures, and must drop it.
    pub unsafe fn write<'a, T: Element, S: DevicePtrMut<T>>(&'a self, slice: &'a mut S) -> Result<LentSlice<'a, T>> {
        const OPERATION: &str = "JoinedStream::write";
        let home = self.home_of(OPERATION, slice)?;
        let len = slice.len();
        let (address, sync) = slice.device_ptr_mut(self.cuda_stream());
        // SAFETY: As the caller promises.
        unsafe { self.lent(OPERATION, (address, len), home, sync) }
    }

    /// Returns the stream that a slice is freed on.
    fn home_of<T, S: CudarcSlice<T>>(&self, operation: &'static str, slice: &S) -> Result<Arc<CudaStream>> {
        // Refuses other threads than that of a per-thread stream.
        self.raw()?;
        let (home, own) = (slice.stream(), self.cuda_stream());
        if home.context() != own.context() {
            let [theirs, ours] = [home, own].map(|stream| stream.context().ordinal());
            let message = format!("the slice is of cudarc's device {theirs}, the stream of cudarc's device {ours}");
            return Err(
                Error::new(ErrorKind::WrongDevice, operation, message).with_hint("use a stream of the slice's context")
            );
        }
        Ok(Arc::clone(home))
    }

    /// # Safety
    /// As for [`JoinedStream::write`]. The address must be that of the slice from which `sync` came.
    unsafe fn lent<'a, T: Element>(
        &'a self,
        operation: &'static str,
        (address, len): (u64, usize),
        home: Arc<CudaStream>,
        sync: SyncOnDrop<'a>,
    ) -> Result<LentSlice<'a, T>> {
        if len == 0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                operation,
                "the slice is empty, expected at least one value",
            )
            .with_hint("skip the work of empty slices"));
        }
        let is_tracked = matches!(sync, SyncOnDrop::Record(Some(_)));
        let home = Home { home, used_on: self.cuda_stream(), is_tracked };
        if !home.is_ordered() {
            home.used_on.join(&home.home).map_err(|error| driver_error(operation, error))?;
        }
        let device = self.runtime().device(self.device())?;
        // SAFETY: The borrow of the slice keeps the memory. After it, cudarc frees the memory in the order of `home`, which comes
        // after the uses by the drop of the result. The caller uses it only on this stream.
        let buffer = unsafe { DeviceBuffer::from_raw(&device, Address::new(address), len)? };
        Ok(LentSlice { buffer, _home: home, _sync: sync, in_this_thread: PhantomData })
    }

    /// Makes memory of cudarc's traits of a Highwater buffer or a slice of it. `memcpy_dtod` and the other functions of cudarc then take
    /// it, `CudaBlas` too, and so does `LaunchArgs::arg` for a kernel on this stream. Each call notes the use, so Highwater frees the
    /// memory after the work.
    ///
    /// A call of cudarc on another stream orders the two streams. Such a call, and one on a per-thread stream, waits for its work before
    /// it returns. Kernels never wait. On a per-thread stream, drop the result after their launch.
    ///
    /// # Errors
    /// `WrongDevice` for memory of another device; else the errors of `Stream::note_device_use`.
    pub fn lend<'a, T: Element>(&'a self, slice: impl Into<DeviceSlice<'a, T>>) -> Result<LentBuffer<'a, T>> {
        const OPERATION: &str = "JoinedStream::lend";
        let slice = slice.into();
        if slice.device() != self.device() {
            let message = format!("the memory is on device {}, the stream on device {}", slice.device(), self.device());
            return Err(
                Error::new(ErrorKind::WrongDevice, OPERATION, message).with_hint("use a stream of the buffer's device")
            );
        }
        self.note_device_use(slice, Access::Write)?;
        Ok(LentBuffer { stream: self, slice, address: slice.ptr().get(), in_this_thread: PhantomData })
    }
}

/// Memory of Highwater as cudarc's functions take it: [`JoinedStream::lend`].
#[derive(Debug)]
pub struct LentBuffer<'a, T: Element> {
    stream: &'a JoinedStream,
    slice: DeviceSlice<'a, T>,
    address: sys::CUdeviceptr,
    in_this_thread: PhantomData<*const ()>,
}

impl<T: Element> LentBuffer<'_, T> {
    /// Notes work that cudarc enqueues on a stream next.
    fn use_on<'u>(&'u self, stream: &'u CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'u>) {
        let own = self.stream.cuda_stream();
        // Other threads free memory after the last note on a per-thread stream, and cudarc has no call after the work.
        let is_noted = *stream == **own && self.stream.note_device_use(self.slice, Access::Write).is_ok();
        if is_noted && !self.stream.is_per_thread() {
            return (self.address, SyncOnDrop::Record(None));
        }
        if *stream != **own {
            stream.context().record_err(stream.join(own));
        }
        (self.address, SyncOnDrop::sync_stream(stream))
    }
}

impl<T: Element> Drop for LentBuffer<'_, T> {
    fn drop(&mut self) {
        // For kernels on a per-thread stream: their end.
        if self.stream.is_per_thread() && self.stream.note_device_use(self.slice, Access::Write).is_err() {
            self.stream.cuda_stream().context().record_err(self.stream.cuda_stream().synchronize());
        }
    }
}

impl<T: Element> CudarcSlice<T> for LentBuffer<'_, T> {
    fn len(&self) -> usize {
        self.slice.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.stream.cuda_stream()
    }
}

impl<T: Element> DevicePtr<T> for LentBuffer<'_, T> {
    fn device_ptr<'u>(&'u self, stream: &'u CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'u>) {
        self.use_on(stream)
    }
}

impl<T: Element> DevicePtrMut<T> for LentBuffer<'_, T> {
    fn device_ptr_mut<'u>(&'u mut self, stream: &'u CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'u>) {
        self.use_on(stream)
    }
}

// SAFETY: The argument is the address of the memory, which lives in the buffer as long as the arguments borrow it.
unsafe impl<'a, 'b: 'a, T: Element> PushKernelArg<&'b LentBuffer<'_, T>> for LaunchArgs<'a> {
    fn arg(&mut self, buffer: &'b LentBuffer<'_, T>) -> &mut Self {
        // A capture needs a note of its own. In the others, that of `lend` stands.
        let noted = buffer.stream.note_device_use(buffer.slice, Access::Write);
        if noted.is_err() {
            // The launch then fails, before it enqueues.
            let error = DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE);
            buffer.stream.cuda_stream().context().record_err(Err::<(), _>(error));
        }
        self.arg(&buffer.address)
    }
}
