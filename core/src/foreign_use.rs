//! Uses of memory by code that Highwater does not see, and the lookup of page-locked blocks by address.

use std::sync::atomic::Ordering;

use crate::buffer::DeviceSlice;
use crate::ledger::HostBlockInfo;
use crate::pinned::{PinnedBuffer, PinnedSlice};
use crate::pool::block::OwnedBlock;
use crate::runtime::Runtime;
use crate::shared_pinned::SharedPinnedBuffer;
use crate::stream::Stream;
use highwater_hal::{Element, Error, ErrorKind, HostPtr, Result};

/// The access of work on a device to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The work only reads the memory.
    Read,
    /// The work writes the memory, and may read it.
    Write,
}

impl Runtime {
    /// Returns the block of page-locked memory that contains an address, if a [`PinnedBuffer`](crate::PinnedBuffer) of this
    /// runtime owns it.
    #[must_use]
    pub fn pinned_block_of(&self, ptr: HostPtr) -> Option<HostBlockInfo> {
        if !self.inner.generation.is_current() {
            return None;
        }
        self.inner.pinned.live_block(ptr)
    }
}

impl<T: Element> PinnedBuffer<T> {
    /// Waits until the CPU can access the values by [`PinnedBuffer::ptr`] without a race with a device: for [`Access::Read`] until
    /// every stream that writes them is done, else until every stream that uses them is done. That includes launches of graphs. The
    /// caller must enqueue no work that would race before its access has ended.
    ///
    /// ```
    /// use highwater_core::{Access, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let on_device = stream.upload(&[1_u8, 2, 3])?;
    /// let mut pinned = runtime.pinned::<u8>(3)?;
    /// stream.copy_to_host(&on_device, &mut pinned)?;
    /// pinned.wait_for(Access::Read)?;
    /// // SAFETY: the copy has ended, and the block has 3 bytes.
    /// assert_eq!(unsafe { *pinned.ptr().as_ptr().cast::<[u8; 3]>() }, [1, 2, 3]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`PinnedBuffer::read_with`].
    pub fn wait_for(&self, access: Access) -> Result<()> {
        let writes = access == Access::Write;
        let _access = self.pool().access(self.block(), writes)?;
        self.pool().note_access(self.ptr(), self.len() * size_of::<T>(), writes);
        Ok(())
    }
}

impl<T: Element> SharedPinnedBuffer<T> {
    /// As [`PinnedBuffer::wait_for`], for the devices of this process. For [`Access::Write`], the CPU writes by
    /// [`SharedPinnedBuffer::ptr`] before the first share, and by [`SharedPinnedBuffer::as_mut_ptr`] after it.
    ///
    /// ```
    /// use highwater_core::{Access, ErrorKind, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let weights = runtime.pinned_shared::<u8>(4)?;
    /// weights.wait_for(Access::Write)?;
    /// // SAFETY: no stream uses the memory, and no ticket exists.
    /// unsafe { weights.ptr().as_ptr().cast::<u8>().write(1) };
    /// let ticket = weights.share()?;
    /// assert_eq!(weights.wait_for(Access::Write).unwrap_err().kind(), ErrorKind::InvalidState);
    /// weights.wait_for(Access::Read)?;
    /// # let _ = ticket;
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidState` for [`Access::Write`] if the memory is read-only. Otherwise as [`PinnedBuffer::wait_for`].
    pub fn wait_for(&self, access: Access) -> Result<()> {
        let writes = access == Access::Write;
        if writes {
            self.check_writable()?;
        }
        self.pool().access(self.block(), writes).map(drop)
    }
}

impl Stream {
    /// Notes that work enqueued on this stream so far uses the [`PinnedBuffer`](crate::PinnedBuffer) that contains `ptr`. It is
    /// for copies and kernels that other code enqueues itself. `access` states whether they write the memory.
    ///
    /// From here on the buffer behaves as after a copy by this crate. Access by the CPU waits for that work; a read waits only
    /// if the work writes. Copies of other streams that would race with it wait on the device. The memory is not reused before
    /// it is done. The caller must make this call after enqueuing the work, and before it accesses, copies or drops the buffer.
    /// The note covers only work that is already enqueued.
    ///
    /// If the stream takes part in a capture, the use is recorded. The capture keeps the memory. Each launch of the graph waits
    /// for uses that it would race with, and counts as a use. Plain slices of the values made earlier must not exist at a
    /// launch.
    ///
    /// ```
    /// use highwater_core::{Access, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let pinned = runtime.pinned::<f32>(1000)?;
    /// // Code that knows only an address and a stream has enqueued a copy from the middle of the buffer.
    /// let inside = pinned.ptr().offset(2000);
    /// stream.note_host_use(inside, Access::Read)?;
    /// assert_eq!(runtime.pinned_block_of(inside).unwrap().base, pinned.ptr());
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidPointer` if no buffer of the stream's runtime owns the memory: it is not page-locked, was dropped, or belongs to
    /// another runtime. Then nothing is noted, and the caller must wait for the work itself. `Capture` if other code captures
    /// the stream. Otherwise the error from recording the event; then the memory is not reused before the runtime ends.
    pub fn note_host_use(&self, ptr: HostPtr, access: Access) -> Result<()> {
        const OPERATION: &str = "note_host_use";
        let runtime = self.runtime();
        let inner = &runtime.inner;
        inner.check(OPERATION)?;
        let unknown = || {
            Error::new(ErrorKind::InvalidPointer, OPERATION, format!("{ptr} is in no live page-locked buffer"))
                .with_hint("note the use while the buffer is alive, on a stream of the runtime that it came from")
        };
        let kept = inner.pinned.keep_live_block(ptr).ok_or_else(unknown)?;
        let noted = self.note_block(OPERATION, &kept, access == Access::Write);
        if noted.is_err() {
            // The end of the work is unknown.
            kept.uses.unmarked.store(true, Ordering::Relaxed);
        }
        inner.pinned.let_go(kept);
        noted
    }

    /// As [`Stream::note_host_use`], for a buffer instead of an address in it. This is faster, because the pool does not search
    /// for the buffer. Also takes a [`SharedPinnedBuffer`].
    ///
    /// ```
    /// # use highwater_core::{Access, Runtime};
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// # let stream = runtime.device(0)?.create_stream()?;
    /// let pinned = runtime.pinned::<f32>(1000)?;
    /// // Code that knows the address and the raw stream has enqueued a copy to the device.
    /// stream.note_pinned_use(&pinned, Access::Read)?;
    /// drop(pinned); // reused after the copy
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Stream::note_host_use`]. `InvalidPointer` means that the buffer belongs to another runtime.
    pub fn note_pinned_use<'h, T: Element>(&self, buffer: impl Into<PinnedSlice<'h, T>>, access: Access) -> Result<()> {
        const OPERATION: &str = "note_pinned_use";
        let buffer = buffer.into();
        let inner = &self.runtime().inner;
        inner.check(OPERATION)?;
        if !buffer.is_of(&inner.pinned) {
            return Err(Error::new(ErrorKind::InvalidPointer, OPERATION, "the buffer belongs to another runtime")
                .with_hint("note the use on a stream of the runtime that the buffer came from"));
        }
        let noted = self.note_block(OPERATION, buffer.block(), access == Access::Write);
        if noted.is_err() {
            // The end of the work is unknown.
            buffer.block().uses.unmarked.store(true, Ordering::Relaxed);
        }
        noted
    }

    /// Notes that work of other code on this stream uses the values of `slice`: kernels and copies that the program
    /// enqueues itself, with [`Stream::raw`] and [`DeviceBuffer::ptr`](crate::DeviceBuffer::ptr). `access` states
    /// whether they write the values. At present reads and writes have the same effect.
    ///
    /// Call it before you enqueue the work. One note covers all work on this stream until the buffer is dropped.
    /// Afterward Highwater frees and reuses the memory only when this stream has executed that work. The first note
    /// also orders this stream after the allocation of [stream-ordered](Stream::allocate) memory. The note does not
    /// order the work after work of other streams; see [`Stream::wait`].
    ///
    /// The buffer may be of another device of the runtime: a kernel or copy of the program may reach it from this stream through
    /// peer access. The note neither enables that access nor checks it.
    ///
    /// On the [per-thread default stream](crate::Device::per_thread_default_stream), call it once more after the work
    /// is enqueued. Other threads cannot record events on that stream. If they drop a buffer, Highwater frees it after
    /// the last call noted there.
    ///
    /// If the stream takes part in a capture, the graph keeps the memory until its last launch is done. Each capture needs
    /// a note of its own.
    ///
    /// After a note, memory that was opened with [`OwnerDeath::Release`](crate::OwnerDeath::Release) is released with its buffer
    /// and not when its owner dies. Highwater cannot take an address back.
    ///
    /// ```
    /// # use highwater_core::{Backend, DevicePtr, FillPattern, MemoryFill};
    /// use highwater_core::{Access, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// # let gpu = MockGpu::open(MockOptions::new())?;
    /// # let launch_my_kernel = |raw_stream: u64, values: DevicePtr, count: usize| {
    /// #     // SAFETY: the stream is alive for the time of the call, and the values until the work is done.
    /// #     unsafe {
    /// #         let stream = gpu.stream_from_raw(0, raw_stream)?;
    /// #         gpu.fill(&MemoryFill::new(0, values, FillPattern::U32(1.5_f32.to_bits()), count), stream)?;
    /// #         gpu.destroy_stream(stream)
    /// #     }
    /// # };
    /// # let runtime = Runtime::new(gpu.clone())?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let values = runtime.device(0)?.allocate::<f32>(1000)?;
    /// stream.note_device_use(&values, Access::Write)?;
    /// // On CUDA the raw stream is a `cudaStream_t`, and the address a `float *`.
    /// launch_my_kernel(stream.raw()?, values.ptr(), values.len())?;
    /// assert_eq!(stream.download(&values)?, vec![1.5; 1000]);
    /// drop(values); // freed after the kernel, however long it takes
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidPointer` if the buffer belongs to another runtime; `Capture` if other code captures the stream; `Expired` if
    /// the memory was released because its owner has died; else the error of ordering the stream after the allocation. After an
    /// error, the caller must not enqueue the work.
    pub fn note_device_use<'d, T: Element>(&self, slice: impl Into<DeviceSlice<'d, T>>, access: Access) -> Result<()> {
        const OPERATION: &str = "note_device_use";
        // Reads and writes both keep the memory.
        let _ = access;
        let slice = slice.into();
        self.runtime().inner.check(OPERATION)?;
        self.check_slice(OPERATION, &slice.untyped())?;
        let noted = slice.block.note_use(self.core())?;
        slice.block.note_lent();
        self.core().enter(OPERATION)?.keep_device(OPERATION, noted, &[slice.block])
    }

    /// Notes a use of a block that the caller keeps.
    fn note_block(&self, operation: &'static str, block: &OwnedBlock, writes: bool) -> Result<()> {
        let (inner, core) = (&self.runtime().inner, self.core());
        let mut event = core.event_for_use();
        let mut submission = core.enter(operation)?;
        if let Some(recording) = &mut submission.recording {
            let surplus = recording.keep_pinned(block.keep(), writes);
            drop(submission);
            surplus.into_iter().for_each(|kept| inner.pinned.let_go(kept));
            return Ok(());
        }
        let prepared =
            event.as_mut().map_err(|error| error.clone()).and_then(|event| core.prepare_use(&mut submission, event));
        match prepared.and_then(|()| core.note_use(&mut submission, block, writes)) {
            Ok(completion) => {
                drop(submission);
                inner.pinned.watch_use(block, &completion);
                if block.uses.note(completion, writes) {
                    inner.pinned.forget_passed(&block.uses);
                }
                Ok(())
            }
            // Without a completion event, the only remaining option is to wait.
            Err(error) => core.wait_for_all(submission).map_err(|_| error),
        }
    }
}
