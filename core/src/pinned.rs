//! [`PinnedBuffer`]: typed page-locked host memory from the pool.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Range;

use crate::buffer::{check_range, size_in_bytes};
use crate::device::Device;
use crate::pool::block::OwnedBlock;
use crate::pool::pinned::{PinnedPool, PoolRef};
use crate::pool::pinned_pools::PinnedPools;
use crate::runtime::Runtime;
use highwater_hal::{DevicePtr, Element, Error, ErrorKind, HostMemoryKind, HostPtr, Result};

impl Runtime {
    /// Returns page-locked host memory for `len` values of `T`, from the pool. The contents are unspecified.
    ///
    /// A size of up to 2 KiB is rounded up to a multiple of 256 bytes, and the memory is aligned to 256 bytes. A larger size is
    /// rounded up to whole pages of 4 KiB, and the memory is aligned to a page. The pool grows only if none of its free memory
    /// fits, in steps of 2 MiB. The request does not wait for a stream.
    ///
    /// # Errors
    /// - `OutOfMemory`: the backend or the machine has no memory left, or the cap is reached, even after idle memory was released.
    /// - `InvalidArgument`: the size exceeds the cap or does not fit the address space, or `T` is zero-sized.
    /// - `Forked`: the process is a child that was forked after the backend was opened.
    /// - `ShuttingDown`: the process is exiting, and the thread keeps no free block of that size.
    /// - `InvalidState`, only in the test mode [`poison`](crate::HostMemoryOptions::with_poison): the memory was written after its
    ///   buffer was dropped, or a stream still uses it.
    /// - Otherwise the backend's error.
    #[inline(always)]
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::new(self.inner.pinned.of_runtime(), len)
    }

    /// Returns page-locked host memory of a kind. [`Runtime::pinned`] returns memory of the default kind. The contents are
    /// unspecified.
    ///
    /// The CPU does not cache write-combined memory. Use it for values that the CPU only writes, in order, and that the device
    /// reads. NVIDIA calls reads by the CPU prohibitively slow. [`PinnedBuffer::read`] works nevertheless. The backend allocates
    /// the memory. It counts toward the limits of the runtime, and is reused only for the same kind.
    ///
    /// ```
    /// use highwater_core::{HostMemoryKind, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let mut pinned = runtime.pinned_of::<f32>(1000, HostMemoryKind::WriteCombined)?;
    /// pinned.write()?.fill(1.0);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Unsupported` if a device lacks `write_combined`; else as [`Runtime::pinned`].
    pub fn pinned_of<T: Element>(&self, len: usize, kind: HostMemoryKind) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::new(self.inner.pinned.of_kind(kind)?, len)
    }

    /// As [`Runtime::pinned`], for memory in one registration. Code that cannot split its copies at the borders of
    /// [`PinnedBuffer::registrations`] needs such memory. An example is a library that receives only the address.
    ///
    /// A registration has at most [`Capabilities::register_piece_bytes`](crate::Capabilities::register_piece_bytes) bytes,
    /// rounded up to 2 MiB. It has no limit if the backend allocates the memory. Other requests may use the memory later.
    ///
    /// ```
    /// use highwater_core::{ErrorKind, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// const MIB: usize = 1 << 20;
    /// let options = MockOptions::new().with_capabilities(|can| can.register_piece_bytes = 16 * MIB);
    /// let runtime = Runtime::new(MockGpu::open(options)?)?;
    /// assert_eq!(runtime.pinned_undivided::<u8>(16 * MIB)?.registrations().count(), 1);
    /// let error = runtime.pinned_undivided::<u8>(17 * MIB).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Runtime::pinned`]; `InvalidArgument` also if the size exceeds the limit of a registration.
    pub fn pinned_undivided<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::with(self.inner.pinned.of_runtime(), len, PinnedPool::take_undivided)
    }
}

impl Device {
    /// Returns page-locked host memory for `len` values of `T` on the NUMA node of the device. The contents are unspecified.
    ///
    /// In each of these cases, the call is the same as [`Runtime::pinned`]:
    ///
    /// - the machine has one node;
    /// - the node is unknown ([`DeviceInfo::numa_node`](highwater_hal::DeviceInfo::numa_node)) or has no memory;
    /// - the backend cannot register memory.
    ///
    /// Each node has memory of its own, under the limits of the runtime. The buffer can be copied from and to any device. A full
    /// node is not an error: the system takes pages of another node.
    ///
    /// # Errors
    /// As [`Runtime::pinned`], among them `InvalidArgument` and `Forked`.
    #[inline(always)]
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::new(self.runtime().inner.pinned.of_device(self.ordinal()), len)
    }
}

/// `len` values of `T` in page-locked host memory, which devices copy from and to at full speed.
///
/// Copies are enqueued by reference, and the borrow ends with the call. The buffer itself tracks which streams use it. The CPU
/// accesses the values through [`PinnedBuffer::read`] and [`PinnedBuffer::write`], which first wait for those streams. So safe
/// code cannot race with the device. Dropping a buffer does not wait: its memory is reused once the streams are done.
///
/// A [`Graph`](crate::Graph) that recorded a copy from or to a buffer can be launched while a slice of the values is alive. So
/// while the graph exists, use [`PinnedBuffer::read_with`] and [`PinnedBuffer::write_with`] instead of slices.
///
/// Buffers of more than 4 MiB may consist of several registrations ([`PinnedBuffer::registrations`]). In a forked child, memory
/// that core registered is not mapped. With most vendors, neither is memory that the backend allocated.
///
/// A buffer may outlive every clone of its [`Runtime`]. The last such buffer ends the runtime.
///
/// A buffer that the CPU is writing cannot be copied from or to:
///
/// ```compile_fail,E0502
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// # let device = runtime.device(0).unwrap();
/// # let stream = device.create_stream().unwrap();
/// # let on_device = device.allocate::<f32>(4).unwrap();
/// let mut pinned = runtime.pinned::<f32>(4).unwrap();
/// let values = pinned.write().unwrap();
/// stream.copy_to_device(&pinned, &on_device).unwrap();
/// values[0] = 1.0;
/// ```
///
/// A buffer that the CPU is reading cannot be copied into:
///
/// ```compile_fail,E0502
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// # let device = runtime.device(0).unwrap();
/// # let stream = device.create_stream().unwrap();
/// # let on_device = device.allocate::<f32>(4).unwrap();
/// let mut pinned = runtime.pinned::<f32>(4).unwrap();
/// let values = pinned.read().unwrap();
/// stream.copy_to_host(&on_device, &mut pinned).unwrap();
/// println!("{}", values[0]);
/// ```
///
/// Nor can it be dropped:
///
/// ```compile_fail,E0505
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let pinned = runtime.pinned::<f32>(4).unwrap();
/// let values = pinned.read().unwrap();
/// drop(pinned);
/// println!("{}", values[0]);
/// ```
pub struct PinnedBuffer<T: Element> {
    pool: PoolRef,
    /// The drop of the buffer takes it.
    block: ManuallyDrop<OwnedBlock>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("ptr", &self.ptr()).field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: Element> PinnedBuffer<T> {
    const ALIGNED: () = assert!(align_of::<T>() <= 64, "page-locked memory is aligned to 64 bytes");

    #[inline(always)]
    pub(crate) fn new(pool: &PinnedPool, len: usize) -> Result<Self> {
        Self::with(pool, len, PinnedPool::take)
    }

    // Compiled into the caller, which then gets the block in registers. A buffer that is returned through memory is copied, which
    // takes longer than the rest of a hit.
    #[inline(always)]
    fn with(
        pool: &PinnedPool,
        len: usize,
        take: impl FnOnce(&PinnedPool, usize) -> Result<OwnedBlock>,
    ) -> Result<Self> {
        let () = Self::ALIGNED;
        let bytes = size_in_bytes::<T>("pinned", len)?;
        // The block of an empty buffer has bytes that are not the buffer's.
        let block = take(pool, if len == 0 { 0 } else { bytes })?;
        Ok(Self { pool: pool.reference(), block: ManuallyDrop::new(block), len, elements: PhantomData })
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first value.
    #[must_use]
    pub fn ptr(&self) -> HostPtr {
        self.block().ptr
    }

    /// Returns 6 words that stay with the block of memory while the pool has it, zero at first. A binding to another language keeps the
    /// handle of the buffer there instead of allocating it. The library does not use the words.
    ///
    /// They are valid until the buffer is dropped. Afterward they may be those of a later buffer, or freed.
    #[doc(hidden)]
    #[must_use]
    #[inline]
    pub fn binding_memory(&self) -> *mut [u64; 6] {
        self.block().binding_memory()
    }

    /// Returns the registrations of the memory, as ranges of bytes counted from [`PinnedBuffer::ptr`], in order and without
    /// gaps. A buffer of up to 4 MiB has one, unless the backend's pieces are smaller.
    ///
    /// Vendors refuse a copy that crosses from one registration into the next (CUDA: error 1). The methods of
    /// [`Stream`](crate::Stream) split their copies at these borders. Other code that copies must do the same, or use
    /// [`Runtime::pinned_undivided`]. A border may lie inside a value.
    ///
    /// ```
    /// use highwater_core::Runtime;
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// const MIB: usize = 1 << 20;
    /// let options = MockOptions::new().with_capabilities(|can| can.register_piece_bytes = 4 * MIB);
    /// let runtime = Runtime::new(MockGpu::open(options)?)?;
    /// let pinned = runtime.pinned::<f32>(10 * MIB / 4)?;
    /// let registrations: Vec<_> = pinned.registrations().collect();
    /// assert_eq!(registrations, [0..4 * MIB, 4 * MIB..8 * MIB, 8 * MIB..10 * MIB]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    pub fn registrations(&self) -> impl Iterator<Item = Range<usize>> + use<T> {
        self.block().cut(0..self.len * size_of::<T>()).filter(|part| !part.is_empty())
    }

    /// Returns the address at which kernels of a device access the values, which may differ from the CPU's.
    ///
    /// Devices can access page-locked memory of every kind directly, over the bus. Highwater does not see such accesses. Note
    /// them with [`Stream::note_pinned_use`](crate::Stream::note_pinned_use), after the work is enqueued.
    ///
    /// One address covers the whole buffer only if its registrations are adjacent on the device.
    /// [`Runtime::pinned_undivided`] returns a buffer in one registration, of which this is always true.
    ///
    /// # Errors
    /// - `InvalidPointer`: the buffer belongs to another runtime.
    /// - `InvalidState`: the buffer consists of several registrations that are not adjacent on the device.
    /// - `Forked`: the process is a child that was forked after the backend was opened. `ShuttingDown`: the process is exiting.
    /// - Otherwise the backend's error.
    pub fn device_address(&self, device: &Device) -> Result<DevicePtr> {
        device_address_of(self.pool, self.block(), 0..self.len * size_of::<T>(), device)
    }

    pub(crate) fn pool(&self) -> &PinnedPool {
        self.pool.get()
    }

    pub(crate) fn block(&self) -> &OwnedBlock {
        &self.block
    }

    /// Returns a view of some of the values, to copy from.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not inside the buffer.
    pub fn slice(&self, range: Range<usize>) -> Result<PinnedSlice<'_, T>> {
        check_range(&range, self.len)?;
        Ok(PinnedSlice::new(self.pool, self.block(), range))
    }

    /// Returns a view of some of the values, to copy to.
    ///
    /// # Errors
    /// As [`PinnedBuffer::slice`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<PinnedSliceMut<'_, T>> {
        check_range(&range, self.len)?;
        Ok(PinnedSliceMut(PinnedSlice::new(self.pool, self.block(), range)))
    }

    /// Returns a view of some of the values to copy to, without an exclusive borrow. It is for bindings to other languages, in which
    /// several threads use one buffer by its address.
    ///
    /// ```
    /// use highwater_core::Runtime;
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let (on_device, pinned) = (stream.upload(&[7_u8; 4])?, runtime.pinned::<u8>(8)?);
    /// // SAFETY: no slice of the values exists.
    /// stream.copy_to_host(&on_device, unsafe { pinned.slice_mut_shared(4..8)? })?;
    /// assert_eq!(pinned.read()?[4..], [7; 4]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`PinnedBuffer::slice`].
    ///
    /// # Safety
    /// The caller must ensure that no slice of the values exists from the copy's call until the copy has ended:
    /// [`PinnedBuffer::read`], [`PinnedBuffer::write`], and the arguments of the closures of [`PinnedBuffer::read_with`] and
    /// [`PinnedBuffer::write_with`].
    pub unsafe fn slice_mut_shared(&self, range: Range<usize>) -> Result<PinnedSliceMut<'_, T>> {
        self.slice(range).map(PinnedSliceMut)
    }

    /// Returns the values, once every stream that writes them is done.
    ///
    /// # Errors
    /// `Capture` if an open capture uses the buffer. `InvalidState` if a live graph writes it; use [`PinnedBuffer::read_with`].
    /// Otherwise the backend's error from the wait: the error of a failed copy appears here.
    pub fn read(&self) -> Result<&[T]> {
        self.pool.get().wait_for_uses(self.block(), true)?;
        self.note_access(false);
        // SAFETY: The block holds `len` values of `T` (its size came from `size_in_bytes`), aligned to 64 bytes. Every bit
        // pattern is a `T`. No device writes it: earlier writes are done, no graph writes it, and enqueuing or recording
        // another write needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr().as_ptr().cast::<T>(), self.len) })
    }

    /// Returns the values for writing, once every stream that uses them is done.
    ///
    /// # Errors
    /// As [`PinnedBuffer::read`]; `InvalidState` also if a live graph reads it. Then use [`PinnedBuffer::write_with`].
    pub fn write(&mut self) -> Result<&mut [T]> {
        self.pool.get().wait_for_uses(self.block(), false)?;
        self.note_access(true);
        // SAFETY: As in `read`. No device and no graph reads or writes the block. Enqueuing or recording either needs a borrow
        // of `self`, which is borrowed exclusively while the slice lives.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr().cast::<T>(), self.len) })
    }

    /// Passes the values to `access` once every stream that writes them is done, including launches of graphs. Until `access`
    /// returns, a launch that would write them is refused.
    ///
    /// # Errors
    /// `Capture` if an open capture uses the buffer; otherwise the backend's error from the wait.
    pub fn read_with<R>(&self, access: impl FnOnce(&[T]) -> R) -> Result<R> {
        let _access = self.pool.get().access(self.block(), false)?;
        let _noted = NotedAccess::begin(self, false);
        // SAFETY: As in `read`. Launches of graphs that write the block are refused until `_access` is dropped.
        Ok(access(unsafe { std::slice::from_raw_parts(self.ptr().as_ptr().cast::<T>(), self.len) }))
    }

    /// Passes the values for writing to `access` once every stream that uses them is done, including launches of graphs. Until
    /// `access` returns, a launch that would use them is refused. The next launch of a graph that copies from the buffer sees
    /// the new values.
    ///
    /// # Errors
    /// As [`PinnedBuffer::read_with`].
    pub fn write_with<R>(&mut self, access: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let _access = self.pool.get().access(self.block(), true)?;
        let _noted = NotedAccess::begin(self, true);
        // SAFETY: As in `write`. Launches of graphs that use the block are refused until `_access` is dropped.
        Ok(access(unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr().cast::<T>(), self.len) }))
    }

    /// Reports to the backend's observer, if any, that the CPU accesses the values now.
    fn note_access(&self, writes: bool) {
        self.pool.get().note_access(self.ptr(), self.len * size_of::<T>(), writes);
    }
}

/// An access by the CPU that lasts as long as a closure. It reports its beginning and its end to the observer of the backend.
struct NotedAccess<'b, T: Element> {
    buffer: &'b PinnedBuffer<T>,
    writes: bool,
}

impl<'b, T: Element> NotedAccess<'b, T> {
    fn begin(buffer: &'b PinnedBuffer<T>, writes: bool) -> Self {
        buffer.note_access(writes);
        Self { buffer, writes }
    }
}

impl<T: Element> Drop for NotedAccess<'_, T> {
    fn drop(&mut self) {
        self.buffer.note_access(self.writes);
    }
}

/// Returns the address of a range of a block on a device.
pub(crate) fn device_address_of(
    pool: PoolRef,
    block: &OwnedBlock,
    range: Range<usize>,
    device: &Device,
) -> Result<DevicePtr> {
    const OPERATION: &str = "device_address";
    if !device.runtime().inner.pinned.contain(pool) {
        return Err(Error::new(ErrorKind::InvalidPointer, OPERATION, "the buffer belongs to another runtime")
            .with_hint("pass a device of the runtime that the buffer came from"));
    }
    let address_of = |offset| pool.get().device_address(block.ptr.offset(offset), device.ordinal());
    let start = address_of(range.start)?;
    for registration in block.cut(range.clone()).filter(|part| !part.is_empty()).skip(1) {
        if address_of(registration.start)? != start.offset(registration.start - range.start) {
            let message = "the registrations of the buffer do not follow one another on the device";
            return Err(Error::new(ErrorKind::InvalidState, OPERATION, message)
                .with_hint("request the buffer with `Runtime::pinned_undivided`"));
        }
    }
    Ok(start)
}

/// A view of values in a [`PinnedBuffer`] or a [`SharedPinnedBuffer`](crate::SharedPinnedBuffer), to copy from.
pub struct PinnedSlice<'b, T: Element> {
    pool: PoolRef,
    block: &'b OwnedBlock,
    /// The values, counted from the start of the block.
    range: Range<usize>,
    elements: PhantomData<T>,
}

/// A view of values in a [`PinnedBuffer`] or a [`SharedPinnedBuffer`](crate::SharedPinnedBuffer), to copy to. It borrows the buffer exclusively, so that no code reads it in the
/// meantime.
#[derive(Debug)]
pub struct PinnedSliceMut<'b, T: Element>(pub(crate) PinnedSlice<'b, T>);

impl<T: Element> fmt::Debug for PinnedSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedSlice")
            .field("block", &self.block.ptr)
            .field("range", &self.range)
            .finish_non_exhaustive()
    }
}

impl<'b, T: Element> From<&'b PinnedBuffer<T>> for PinnedSlice<'b, T> {
    fn from(buffer: &'b PinnedBuffer<T>) -> Self {
        Self::new(buffer.pool, buffer.block(), 0..buffer.len)
    }
}

impl<'b, T: Element> From<&'b mut PinnedBuffer<T>> for PinnedSliceMut<'b, T> {
    fn from(buffer: &'b mut PinnedBuffer<T>) -> Self {
        Self(PinnedSlice::new(buffer.pool, buffer.block(), 0..buffer.len))
    }
}

impl<'b, T: Element> PinnedSlice<'b, T> {
    pub(crate) fn new(pool: PoolRef, block: &'b OwnedBlock, range: Range<usize>) -> Self {
        Self { pool, block, range, elements: PhantomData }
    }

    pub(crate) fn pool(&self) -> PoolRef {
        self.pool
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    pub(crate) fn block(&self) -> &'b OwnedBlock {
        self.block
    }

    /// Returns whether the memory belongs to one of the pools of a runtime.
    pub(crate) fn is_of(&self, pools: &PinnedPools) -> bool {
        pools.contain(self.pool)
    }

    /// Returns the range of bytes that the values occupy in the block.
    pub(crate) fn bytes(&self) -> Range<usize> {
        // Inside the block, whose size is a `usize`.
        self.range.start * size_of::<T>()..self.range.end * size_of::<T>()
    }
}

impl<T: Element> Drop for PinnedBuffer<T> {
    #[inline]
    fn drop(&mut self) {
        // In a child, a thread that does not exist may hold the lock of the cache, so the block is left.
        if self.pool.get().generation.is_current() {
            // SAFETY: The end of the buffer, which uses neither the block nor the pool after this call.
            unsafe { PinnedPool::give_back(self.pool, ManuallyDrop::take(&mut self.block)) };
        }
    }
}
