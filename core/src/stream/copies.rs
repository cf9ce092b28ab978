//! Copies and fills, and the memory that they use.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Stream;
use super::submission::SubmissionState;
use crate::buffer::{DeviceBuffer, DeviceSlice, Untyped, size_in_bytes};
use crate::capture::memory::GraphMemory;
use crate::capture::thread::in_capture;
use crate::device_block::{DeviceBlock, Ordered, Origin};
use crate::pinned::{PinnedSlice, PinnedSliceMut};
use crate::pool::block::OwnedBlock;
use crate::pool::device_pool::DevicePool;
use crate::pool::pinned::{Liveness, PinnedPool};
use crate::pool::poison::{LIVE, PATTERN};
use highwater_hal::{
    CopyShape, Element, Error, ErrorKind, FillPattern, HostPtr, Location, MemoryCopy, MemoryCopy2d, MemoryFill, Result,
    counted,
};

/// Bytes that the test mode of device memory reads at once.
const STAGED: usize = 4 << 20;

/// A copy of page-locked memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyKind {
    ToDevice,
    ToHost,
    /// To the host, for values that the caller waits for. It must not be recorded in a capture.
    Awaited,
}

/// A part of a copy of page-locked memory that lies in one registration. Offsets are bytes from the start of the block, and of the
/// device's slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) host: usize,
    pub(super) device: usize,
    /// One row for a flat copy.
    pub(super) shape: CopyShape,
}

/// An operation that was not enqueued completely.
struct NotEnqueued {
    error: Error,
    /// True if a part of it was enqueued.
    in_part: bool,
}

fn foreign(operation: &'static str, address: &dyn std::fmt::Display) -> Error {
    let message = format!("the memory at {address} belongs to another runtime than the stream");
    Error::new(ErrorKind::InvalidPointer, operation, message).with_hint("allocate from the stream's own runtime")
}

/// The error of an address that no page-locked buffer has.
fn not_pinned(operation: &'static str, ptr: HostPtr) -> Error {
    Error::new(ErrorKind::InvalidPointer, operation, format!("{ptr} is in no live page-locked buffer"))
        .with_hint("pass an address in a live buffer of the runtime that the stream belongs to")
}

/// Splits a flat copy of a range of a block. No vendor allows a copy across the border of two registrations.
fn flat(block: &OwnedBlock, range: Range<usize>) -> impl Iterator<Item = Part> + use<> {
    let start = range.start;
    block.cut(range).map(move |part| Part {
        host: part.start,
        device: part.start - start,
        shape: CopyShape::new(part.len(), 1),
    })
}

impl Stream {
    /// Allocates device memory in the order of this stream, which is faster for scratch memory. The contents are
    /// unspecified.
    ///
    /// The memory may have belonged to a buffer whose work on this stream is outstanding. So the first use on each
    /// other stream waits, on the device, for all earlier work of this stream. A graph that another stream records
    /// waits at each launch, not during recording. In a capture that this stream takes part in, the memory belongs to the capture and
    /// then to its graph, and the first use on another stream of the capture records a wait. This orders only the allocation; order later work on the buffer with
    /// [`Stream::wait`].
    ///
    /// # Errors
    /// As [`Device::allocate`](crate::Device::allocate), except in a capture. `Unsupported` for the per-thread default stream.
    /// `Capture` if other code captures the stream, or if the memory must grow in a capture and the capability
    /// `create_during_capture` is false.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        const OPERATION: &str = "allocate";
        let inner = &self.runtime.inner;
        // A block of the stream's list takes no call of the backend, so the exit of the process does not matter.
        if !inner.generation.is_current() {
            inner.check(OPERATION)?;
        }
        let request = DevicePool::request(size_in_bytes::<T>(OPERATION, len)?)?;
        let in_capture;
        let mut memory = self.core.memory();
        if self.core.asks || self.core.bound_as() != self.core.key {
            in_capture = self.memory_now(OPERATION)?;
            memory = in_capture.as_ref().map_or(memory, |of_graph| &of_graph.memory);
        }
        let block = match memory.take_cached(request.size()) {
            Some(block) => DeviceBlock::kept(block),
            None => {
                inner.check(OPERATION)?;
                let lot = memory.pool.take_slow(memory, request)?;
                DeviceBlock::new(&inner.frees, self.device(), lot.ptr, Origin::Ordered(Ordered::new(memory, lot)))
            }
        };
        let is_poisoned = memory.is_poisoned;
        let buffer = DeviceBuffer::ordered(Liveness::new(inner.pinned.of_runtime()), block, len);
        if is_poisoned {
            self.check_pattern(&buffer)?;
        }
        Ok(buffer)
    }

    /// Checks that memory which was free has the pattern of the test mode. Memory that is refused is free again when this returns.
    #[cold]
    fn check_pattern<T: Element>(&self, buffer: &DeviceBuffer<T>) -> Result<()> {
        // In a capture, nothing can be read.
        if in_capture() || self.core.bound_as() != self.core.key {
            return Ok(());
        }
        // In parts, because the values are staged in page-locked memory.
        let step = (STAGED / size_of::<T>()).max(1);
        let bytes = buffer.len() * size_of::<T>();
        for start in (0..buffer.len()).step_by(step) {
            let values = self.download(buffer.slice(start..buffer.len().min(start + step))?)?;
            let values = bytemuck::cast_slice::<T, u8>(&values);
            let Some(offset) = values.iter().position(|value| *value != PATTERN) else { continue };
            let message = format!(
                "the block of {} at {} was written at offset {} after it was freed, or was not free yet: {:#04x}",
                counted(bytes, "byte"),
                buffer.ptr(),
                start * size_of::<T>() + offset,
                values[offset]
            );
            return Err(Error::new(ErrorKind::InvalidState, "allocate", message).with_hint(
                "note each use that Highwater does not see (`Stream::note_device_use`), before the buffer is dropped",
            ));
        }
        // Other values than those of free memory, before the program has them: a stream that gets the memory early finds them.
        self.enqueue_fill(buffer.into(), FillPattern::U8(LIVE), bytes)?;
        self.synchronize()
    }

    /// Returns the memory of the capture that the stream takes part in, if any. Refuses a stream on which only one thread can
    /// enqueue.
    #[cold]
    fn memory_now(&self, operation: &'static str) -> Result<Option<Arc<GraphMemory>>> {
        if self.core.owner.is_some() {
            // Any thread may drop the buffer, and must then free it in the order of the stream.
            let message = "other threads cannot free memory that is ordered by a per-thread default stream";
            return Err(Error::new(ErrorKind::Unsupported, operation, message).with_hint("use `Device::allocate`"));
        }
        let core = &self.core;
        let submission = core.enter(operation)?;
        let Some(recording) = &submission.recording else { return Ok(None) };
        if let Some(memory) = &recording.memory {
            return Ok(Some(Arc::clone(memory)));
        }
        let (capture, before) = (Arc::clone(&recording.capture), Arc::clone(&recording.before));
        let key = recording.key;
        drop(submission);
        let pool = core.workspaces.pool(self.device());
        let made = Arc::new(GraphMemory::new(pool, core, (Arc::as_ptr(&capture).addr(), key), &before));
        // Else another thread made one meanwhile, or ended the capture. A surplus one ends after the lock.
        let mut submission = core.enter(operation)?;
        let recording = submission.recording.as_mut().filter(|recording| recording.key == key);
        let memory = recording.map(|recording| Arc::clone(recording.memory.get_or_insert_with(|| Arc::clone(&made))));
        drop(submission);
        Ok(memory)
    }

    pub(crate) fn check_slice(&self, operation: &'static str, slice: &Untyped<'_>) -> Result<()> {
        if !slice.block.is_of(&self.core) {
            return Err(foreign(operation, &slice.ptr));
        }
        Ok(())
    }

    pub(crate) fn check_here(&self, operation: &'static str, slice: &Untyped<'_>) -> Result<()> {
        self.check_slice(operation, slice)?;
        if slice.block.device != self.device() {
            return Err(Error::new(
                ErrorKind::WrongDevice,
                operation,
                format!(
                    "the memory at {} is on device {}, the stream on device {}",
                    slice.ptr,
                    slice.block.device,
                    self.device()
                ),
            )
            .with_hint("use a stream of the buffer's device"));
        }
        Ok(())
    }

    pub(super) fn check_len(operation: &'static str, src: usize, dst: usize) -> Result<()> {
        if src != dst {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                operation,
                format!("the source has {}, the destination {dst}", counted(src, "value")),
            )
            .with_hint("copy between equal lengths; `slice` gives a part of a buffer"));
        }
        Ok(())
    }

    /// Enqueues a copy of page-locked memory to the device. Returns at once; the buffer tracks its use.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ, `WrongDevice` if `dst` is not on this stream's device; otherwise the backend's
    /// error.
    pub fn copy_to_device<'h, 'd, T: Element>(
        &self,
        src: impl Into<PinnedSlice<'h, T>>,
        dst: impl Into<DeviceSlice<'d, T>>,
    ) -> Result<()> {
        self.copy_pinned("copy_to_device", &src.into(), dst.into(), CopyKind::ToDevice)
    }

    /// Enqueues a copy of device memory to page-locked memory. Returns at once; the buffer tracks its use, and
    /// [`PinnedBuffer::read`](crate::PinnedBuffer::read) waits for the values.
    ///
    /// # Errors
    /// As [`Stream::copy_to_device`].
    pub fn copy_to_host<'d, 'h, T: Element>(
        &self,
        src: impl Into<DeviceSlice<'d, T>>,
        dst: impl Into<PinnedSliceMut<'h, T>>,
    ) -> Result<()> {
        self.copy_pinned("copy_to_host", &dst.into().0, src.into(), CopyKind::ToHost)
    }

    /// As [`Stream::copy_to_device`], from an address in page-locked memory of this runtime instead of a buffer. It serves code that
    /// keeps only addresses, such as other languages and libraries. The number of values is that of `dst`. The copy is split at the
    /// borders of [registrations](crate::PinnedBuffer::registrations), and the buffer that has the address tracks the use.
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// # let device = runtime.device(0)?;
    /// # let stream = device.create_stream()?;
    /// let mut pinned = runtime.pinned::<f32>(1000)?;
    /// pinned.write()?.fill(2.0);
    /// let on_device = device.allocate::<f32>(10)?;
    /// // SAFETY: these 10 values are in the buffer, and nothing writes them meanwhile.
    /// unsafe { stream.copy_from_raw(pinned.ptr().offset(400), &on_device)? };
    /// drop(pinned); // reused after the copy
    /// assert_eq!(stream.download(&on_device)?, [2.0; 10]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidPointer` if no live buffer of this runtime has the address, or if the values leave its memory; `WrongDevice` if `dst` is
    /// not on this stream's device; otherwise the backend's error.
    ///
    /// # Safety
    /// The caller must ensure that no code of the CPU writes these values until the stream has executed the copy. Slices of
    /// [`PinnedBuffer::write`](crate::PinnedBuffer::write) that exist already do not wait for it.
    pub unsafe fn copy_from_raw<'d, T: Element>(&self, src: HostPtr, dst: impl Into<DeviceSlice<'d, T>>) -> Result<()> {
        self.copy_at("copy_from_raw", src, dst.into(), CopyKind::ToDevice)
    }

    /// As [`Stream::copy_to_host`], to an address in page-locked memory of this runtime instead of a buffer. See
    /// [`Stream::copy_from_raw`].
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// # let stream = runtime.device(0)?.create_stream()?;
    /// let on_device = stream.upload(&[1.0_f32, 2.0])?;
    /// let pinned = runtime.pinned::<f32>(1000)?;
    /// // SAFETY: these 2 values are in the buffer, and nothing accesses them meanwhile.
    /// unsafe { stream.copy_to_raw(&on_device, pinned.ptr())? };
    /// assert_eq!(pinned.read()?[..2], [1.0, 2.0]); // `read` waits for the copy
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Stream::copy_from_raw`].
    ///
    /// # Safety
    /// The caller must ensure that no code of the CPU accesses these values until the stream has executed the copy, and that this
    /// process may write them. Slices that exist already do not wait for it.
    pub unsafe fn copy_to_raw<'d, T: Element>(&self, src: impl Into<DeviceSlice<'d, T>>, dst: HostPtr) -> Result<()> {
        self.copy_at("copy_to_raw", dst, src.into(), CopyKind::ToHost)
    }

    /// Enqueues a copy of page-locked memory that is known by its address.
    fn copy_at<T: Element>(
        &self,
        operation: &'static str,
        host: HostPtr,
        device: DeviceSlice<'_, T>,
        kind: CopyKind,
    ) -> Result<()> {
        self.in_block_at(operation, host, device.bytes(), &device.untyped(), |block, range| {
            self.copy_block(operation, block, flat(block, range), device, kind)
        })
    }

    /// Calls `copy` with the page-locked block of an address and the range of `bytes` from there in it.
    pub(super) fn in_block_at(
        &self,
        operation: &'static str,
        host: HostPtr,
        bytes: usize,
        device: &Untyped<'_>,
        copy: impl FnOnce(&OwnedBlock, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let pinned = &self.runtime.inner.pinned;
        self.backend(operation)?;
        self.check_here(operation, device)?;
        let kept = pinned.keep_live_block(host).ok_or_else(|| not_pinned(operation, host))?;
        let start = host.address() - kept.ptr.address();
        // The block may be longer than its buffer.
        let requested = kept.requested();
        let copied = match start.checked_add(bytes) {
            Some(end) if end <= requested => copy(&kept, start..end),
            _ => {
                let [bytes, rest] = [bytes, requested.saturating_sub(start)].map(|bytes| counted(bytes, "byte"));
                let message = format!("the copy of {bytes} at {host} leaves the buffer, which has {rest} from there");
                Err(Error::new(ErrorKind::InvalidPointer, operation, message)
                    .with_hint("pass an address and a length inside one page-locked buffer"))
            }
        };
        pinned.let_go(kept);
        copied
    }

    pub(super) fn copy_pinned<T: Element>(
        &self,
        operation: &'static str,
        host: &PinnedSlice<'_, T>,
        device: DeviceSlice<'_, T>,
        kind: CopyKind,
    ) -> Result<()> {
        self.check_pinned(operation, host, &device.untyped())?;
        let (src_len, dst_len) =
            if kind == CopyKind::ToDevice { (host.len(), device.len()) } else { (device.len(), host.len()) };
        Self::check_len(operation, src_len, dst_len)?;
        self.copy_block(operation, host.block(), flat(host.block(), host.bytes()), device, kind)
    }

    /// Checks that both sides of a copy are usable on this stream.
    pub(super) fn check_pinned<T: Element>(
        &self,
        operation: &'static str,
        host: &PinnedSlice<'_, T>,
        device: &Untyped<'_>,
    ) -> Result<()> {
        self.backend(operation)?;
        if !host.is_of(&self.runtime.inner.pinned) {
            return Err(foreign(operation, &host.block().ptr.offset(host.bytes().start)));
        }
        self.check_here(operation, device)
    }

    /// Enqueues a copy of parts of a page-locked block. All lie inside the block, and inside `device`.
    pub(super) fn copy_block<T: Element>(
        &self,
        operation: &'static str,
        block: &OwnedBlock,
        mut parts: impl Iterator<Item = Part>,
        device: DeviceSlice<'_, T>,
        kind: CopyKind,
    ) -> Result<()> {
        let backend = &self.runtime.inner.backend;
        let to_host = kind != CopyKind::ToDevice;
        let sides = |part: Part| {
            let on_device = Location::Device { device: device.device(), ptr: device.ptr().offset(part.device) };
            let on_host = Location::Host(block.ptr.offset(part.host));
            if to_host { (on_host, on_device) } else { (on_device, on_host) }
        };
        let noted = device.block.note_use(&self.core)?;
        let recordable = kind != CopyKind::Awaited;
        self.use_pinned(operation, block, to_host, recordable, |submission| {
            let kept = submission.keep_device(operation, noted, &[device.block]);
            kept.map_err(|error| NotEnqueued { error, in_part: false })?;
            let mut in_part = false;
            parts.try_for_each(|part| {
                let ((dst, src), shape) = (sides(part), part.shape);
                // A backend may make a copy of rows one by one, so that some are enqueued if it fails.
                let may_begin = in_part || shape.height > 1;
                in_part = true;
                // SAFETY: Each range lies in one live block, and the host range in one registration. `note_use` and
                // `use_pinned` ensure that the device block is freed, and the host block reused or accessed by the CPU, only
                // after this stream has passed the copy. `use_pinned` has also made this stream wait for every other stream
                // whose use would race with the copy. If the copy is recorded, the graph keeps both blocks, and each launch
                // does the same.
                let enqueued = unsafe {
                    match shape.height {
                        1 => backend.copy(&MemoryCopy::new(dst, src, shape.width), self.core.id),
                        _ => backend.copy_2d(&MemoryCopy2d::new(dst, src, shape), self.core.id),
                    }
                };
                enqueued.map_err(|error| NotEnqueued { error, in_part: may_begin })
            })
        })
    }

    /// Enqueues a copy between device buffers. At least one of them must be on this stream's device.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ or the ranges overlap. `WrongDevice` if neither buffer is on this stream's
    /// device. `Unsupported` between devices if `peer_copy` is false. Otherwise the backend's error.
    pub fn copy<'s, 'd, T: Element>(
        &self,
        src: impl Into<DeviceSlice<'s, T>>,
        dst: impl Into<DeviceSlice<'d, T>>,
    ) -> Result<()> {
        let (src, dst) = (src.into(), dst.into());
        self.copy_on_devices("copy", src, dst, |_| {
            Self::check_len("copy", src.len(), dst.len()).map(|()| CopyShape::new(src.bytes(), 1))
        })
    }

    /// Enqueues a copy between device buffers. `shape` returns what is copied, after the check that both belong to the runtime.
    pub(super) fn copy_on_devices<T: Element>(
        &self,
        operation: &'static str,
        src: DeviceSlice<'_, T>,
        dst: DeviceSlice<'_, T>,
        shape: impl FnOnce(&Self) -> Result<CopyShape>,
    ) -> Result<()> {
        let backend = self.backend(operation)?;
        self.check_slice(operation, &src.untyped())?;
        self.check_slice(operation, &dst.untyped())?;
        let shape = shape(self)?;
        if src.device() != dst.device() && !self.runtime.inner.device(self.device()).capabilities.peer_copy {
            return Err(Error::lacks(operation, "peer_copy"));
        }
        if src.device() != self.device() {
            self.check_here(operation, &dst.untyped())?;
        }
        if src.device() == dst.device() && shape.overlaps(dst.ptr().get(), src.ptr().get()) {
            // The address of released memory may belong to another buffer by now.
            src.block.check_usable(operation).and_then(|()| dst.block.check_usable(operation))?;
            let [(from, read), (to, written)] = [&src, &dst].map(|side| (side.ptr(), counted(side.bytes(), "byte")));
            let message = format!("the source of {read} at {from} and the destination of {written} at {to} overlap");
            return Err(
                Error::new(ErrorKind::InvalidArgument, operation, message).with_hint("copy through a third buffer")
            );
        }
        let location = |slice: &DeviceSlice<'_, T>| Location::Device { device: slice.device(), ptr: slice.ptr() };
        let noted = src.block.note_use(&self.core)?.and(dst.block.note_use(&self.core)?);
        let mut submission = self.core.enter(operation)?;
        submission.keep_device(operation, noted, &[src.block, dst.block])?;
        // SAFETY: Each range lies in one live block, and they do not overlap. The blocks are freed only after this stream has
        // passed the copy (`note_use`), or after the graph that keeps them. The CPU cannot access either.
        unsafe {
            match shape.height {
                1 => backend.copy(&MemoryCopy::new(location(&dst), location(&src), shape.width), self.core.id),
                _ => backend.copy_2d(&MemoryCopy2d::new(location(&dst), location(&src), shape), self.core.id),
            }
        }
    }

    /// Enqueues a fill with one value of 1, 2 or 4 bytes.
    ///
    /// # Errors
    /// `InvalidArgument` for another size, `WrongDevice` for a buffer of another device; otherwise the backend's error.
    pub fn fill<'d, T: Element>(&self, dst: impl Into<DeviceSlice<'d, T>>, value: T) -> Result<()> {
        let dst = dst.into();
        let bytes = bytemuck::bytes_of(&value);
        let pattern = match *bytes {
            [a] => FillPattern::U8(a),
            [a, b] => FillPattern::U16(u16::from_ne_bytes([a, b])),
            [a, b, c, d] => FillPattern::U32(u32::from_ne_bytes([a, b, c, d])),
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "fill",
                    format!("a value of {} bytes; devices fill with 1, 2 or 4", bytes.len()),
                )
                .with_hint("use `fill_zero`, or upload the values"));
            }
        };
        self.enqueue_fill(dst, pattern, dst.len())
    }

    /// Enqueues a fill with zero bytes, for values of any size.
    ///
    /// # Errors
    /// As [`Stream::fill`].
    pub fn fill_zero<'d, T: Element>(&self, dst: impl Into<DeviceSlice<'d, T>>) -> Result<()> {
        let dst = dst.into();
        self.enqueue_fill(dst, FillPattern::U8(0), dst.bytes())
    }

    fn enqueue_fill<T: Element>(&self, dst: DeviceSlice<'_, T>, pattern: FillPattern, count: usize) -> Result<()> {
        let backend = self.backend("fill")?;
        self.check_here("fill", &dst.untyped())?;
        let noted = dst.block.note_use(&self.core)?;
        let fill = MemoryFill::new(dst.device(), dst.ptr(), pattern, count);
        let mut submission = self.core.enter("fill")?;
        submission.keep_device("fill", noted, &[dst.block])?;
        // SAFETY: The range lies in one live block, which is freed only after this stream has passed the fill, or after the
        // graph that keeps it. Its start is a multiple of the pattern's size: blocks are aligned to 256, and slices start at a
        // multiple of that size.
        unsafe { backend.fill(&fill, self.core.id) }
    }

    /// Records that the stream uses a block, in an operation that `enqueue` enqueues.
    ///
    /// The device first waits for uses of other streams that would race with it on the host memory. If the operation is
    /// recorded in a capture, each launch waits instead. A capture refuses it unless `recordable`.
    fn use_pinned(
        &self,
        operation: &'static str,
        block: &OwnedBlock,
        writes: bool,
        recordable: bool,
        enqueue: impl FnOnce(&mut SubmissionState) -> Result<(), NotEnqueued>,
    ) -> Result<()> {
        let (inner, stream) = (&self.runtime.inner, &self.core);
        let begun = block.uses.begin(stream.key, writes).map_err(|_| {
            // The borrow of the buffer keeps such access and copies apart.
            Error::new(ErrorKind::InvalidState, operation, "the CPU is accessing this page-locked memory")
        })?;
        // Checked after the wait: an operation that this one has waited for may have failed.
        PinnedPool::check_known(&block.uses)?;
        let racing = PinnedPool::record_racing(block, &begun)?;
        let mut event = stream.event_for_use()?;
        let mut submission = if recordable { stream.enter(operation)? } else { stream.enter_outside(operation)? };
        if let Some(recording) = &mut submission.recording {
            let surplus = recording.keep_pinned(block.keep(), writes);
            let enqueued = enqueue(&mut submission);
            drop(submission);
            surplus.into_iter().for_each(|kept| inner.pinned.let_go(kept));
            return enqueued.map_err(|refused| refused.error);
        }
        stream.prepare_use(&mut submission, &mut event)?;
        for completion in racing {
            inner.backend.stream_wait_event(stream.id, completion.event())?;
        }
        let enqueued = match enqueue(&mut submission) {
            Ok(()) => Ok(()),
            // The stream counts as a user of the block, as if the whole operation had been enqueued.
            Err(NotEnqueued { error, in_part: true }) => Err(error),
            Err(NotEnqueued { error, in_part: false }) => return Err(error),
        };
        let completion = match stream.note_use(&mut submission, block, writes) {
            Ok(completion) => completion,
            Err(error) => {
                // Without a completion event, the only remaining option is to wait. If the wait fails too, the end of the
                // device's use is unknown. Then the block is never accessed or reused, and is freed when the runtime ends.
                let waited = stream.wait_for_all(submission).map_err(|_| {
                    block.uses.unmarked.store(true, Ordering::Relaxed);
                    error
                });
                return waited.and(enqueued);
            }
        };
        drop(submission);
        inner.pinned.watch_use(block, &completion);
        if begun.settle(completion) {
            inner.pinned.forget_passed(&block.uses);
        }
        enqueued
    }
}
