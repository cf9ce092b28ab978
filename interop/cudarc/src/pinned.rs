//! [`CudarcPinned`]: pinned memory of Highwater's pool that cudarc copies from and to.

use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::{self, ThreadId};

use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop, sys};
use highwater_core::{Access, Element, Error, ErrorKind, PinnedBuffer, Result};

use crate::stream::{JoinedStream, driver_error};

/// A copy of cudarc has read the memory.
const READ: u8 = 1;
/// A copy of cudarc has written the memory.
const WRITTEN: u8 = 2;

/// Pinned memory of Highwater's pool as a `HostSlice` of cudarc, for copies on one stream. It takes the place of cudarc's
/// `PinnedHostSlice`.
///
/// `memcpy_htod`, `clone_htod` and `memcpy_dtoh` of its stream enqueue and return at once. The CPU's accesses wait for them. The drop
/// waits for nothing, and the pool reuses the memory after the copies. On another stream than its own, a copy waits for its end.
///
/// The memory of a per-thread stream belongs to the stream's thread. If another thread accesses or drops it after copies, it waits for
/// all work of the device.
#[derive(Debug)]
pub struct CudarcPinned<T: Element> {
    /// `None` in the drop and after `into_buffer` only.
    buffer: Option<PinnedBuffer<T>>,
    stream: JoinedStream,
    thread: ThreadId,
    /// Copies that the pool has not been told of.
    uses: AtomicU8,
}

impl<T: Element> CudarcPinned<T> {
    /// Takes a buffer for copies on `stream`. Waits for the work that uses it.
    ///
    /// # Errors
    /// - `InvalidPointer`: the buffer is of another runtime than the stream.
    /// - `InvalidArgument`: the buffer consists of several registrations. cudarc does not split copies.
    /// - `InvalidState`: the stream is the per-thread stream of another thread.
    /// - Otherwise the error of `PinnedBuffer::write`.
    pub fn new(mut buffer: PinnedBuffer<T>, stream: &JoinedStream) -> Result<Self> {
        const OPERATION: &str = "CudarcPinned::new";
        stream.raw()?;
        if !buffer.is_empty() && stream.runtime().pinned_block_of(buffer.ptr()).is_none() {
            return Err(Error::new(ErrorKind::InvalidPointer, OPERATION, "the buffer belongs to another runtime")
                .with_hint("request it from the stream's runtime"));
        }
        let registrations = buffer.registrations().count();
        if registrations > 1 {
            let message = format!("the buffer has {registrations} registrations, expected one");
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint("request it with `Runtime::pinned_undivided`"));
        }
        buffer.write()?;
        Ok(Self {
            buffer: Some(buffer),
            stream: stream.clone(),
            thread: thread::current().id(),
            uses: AtomicU8::new(0),
        })
    }

    fn buffer(&self) -> &PinnedBuffer<T> {
        self.buffer.as_ref().expect("only the drop and `into_buffer` take it")
    }

    /// Returns the values. Waits for copies that write them.
    ///
    /// # Errors
    /// As `Stream::note_pinned_use` and `PinnedBuffer::read`; `Vendor` if a wait of cudarc failed.
    pub fn read(&self) -> Result<&[T]> {
        // Copies that read may be enqueued meanwhile, so only an exclusive borrow settles them.
        self.settle(WRITTEN)?;
        self.buffer().read()
    }

    /// Returns the values. Waits for all copies.
    ///
    /// # Errors
    /// As [`CudarcPinned::read`].
    pub fn write(&mut self) -> Result<&mut [T]> {
        self.settle(READ | WRITTEN)?;
        self.buffer.as_mut().expect("only the drop and `into_buffer` take it").write()
    }

    /// Returns the buffer. It waits for the copies like for those of Highwater.
    ///
    /// # Errors
    /// As `Stream::note_pinned_use`; `Vendor` if a wait of cudarc failed. The buffer is then dropped.
    pub fn into_buffer(mut self) -> Result<PinnedBuffer<T>> {
        self.settle(READ | WRITTEN)?;
        Ok(self.buffer.take().expect("only the drop and `into_buffer` take it"))
    }

    /// Returns whether the handle of the stream names it in this thread.
    fn is_here(&self) -> bool {
        !self.stream.is_per_thread() || self.thread == thread::current().id()
    }

    /// Tells the pool of copies of these kinds.
    fn settle(&self, kinds: u8) -> Result<()> {
        let uses = self.uses.load(Ordering::Acquire) & kinds;
        if uses == 0 {
            return Ok(());
        }
        if self.is_here() {
            let access = if uses & WRITTEN == 0 { Access::Read } else { Access::Write };
            self.stream.note_pinned_use(self.buffer(), access)?;
        } else {
            let waited = self.stream.cuda_stream().context().synchronize();
            waited.map_err(|error| driver_error("CudarcPinned", error))?;
        }
        self.uses.fetch_and(!uses, Ordering::Release);
        Ok(())
    }

    /// Notes a copy that cudarc enqueues on a stream next.
    fn use_on<'a>(&self, stream: &'a CudaStream, kind: u8) -> SyncOnDrop<'a> {
        let own = self.stream.cuda_stream();
        if *stream == **own && self.is_here() {
            if matches!(stream.capture_status(), Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)) {
                self.uses.fetch_or(kind, Ordering::Release);
                return SyncOnDrop::Record(None);
            }
            // The graph keeps the memory.
            let access = if kind == READ { Access::Read } else { Access::Write };
            if self.stream.note_pinned_use(self.buffer(), access).is_ok() {
                return SyncOnDrop::Record(None);
            }
        } else if self.is_here() {
            stream.context().record_err(stream.join(own));
        } else if self.uses.load(Ordering::Acquire) != 0 {
            stream.context().record_err(own.context().synchronize());
        }
        SyncOnDrop::sync_stream(stream)
    }
}

impl<T: Element> Drop for CudarcPinned<T> {
    fn drop(&mut self) {
        if self.buffer.is_some() && self.settle(READ | WRITTEN).is_err() {
            // The end of the copies is unknown, so the memory must not be reused.
            std::mem::forget(self.buffer.take());
        }
    }
}

impl<T: Element> HostSlice<T> for CudarcPinned<T> {
    fn len(&self) -> usize {
        self.buffer().len()
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        let sync = self.use_on(stream, READ);
        let buffer = self.buffer();
        // SAFETY: The buffer has `len` values, and its borrow lasts as long. The caller uses the slice only on the stream.
        (unsafe { std::slice::from_raw_parts(buffer.ptr().as_ptr().cast(), buffer.len()) }, sync)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        let sync = self.use_on(stream, WRITTEN);
        let buffer = self.buffer();
        // SAFETY: As above, and the borrow is exclusive.
        (unsafe { std::slice::from_raw_parts_mut(buffer.ptr().as_ptr().cast(), buffer.len()) }, sync)
    }
}
