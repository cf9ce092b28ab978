//! [`DeviceBuffer`]: typed device memory, freed after every stream that used it has passed its use.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::capture::thread::refuse_in_capture;
use crate::device_block::{DeviceBlock, Origin};
use crate::pool::pinned::Liveness;
use crate::runtime::Runtime;
use crate::sharing::{Exported, Owner, Ticket};
use highwater_hal::{AllocateOptions, DeviceMemoryKind, DevicePtr, Element, Error, ErrorKind, Result, counted};

/// `len` values of `T` in the memory of one device.
///
/// Dropping a buffer never waits: its memory is freed once every stream that used it has passed that use. Device work of
/// different streams on one buffer is not ordered automatically. Unordered access yields unspecified values, but is
/// memory-safe. A stream that uses data of another stream must wait for it; see [`Stream::wait`](crate::Stream::wait). An
/// automatic wait for the last writer of a whole buffer would serialize streams that write disjoint parts of it. It would also
/// wait for later work of the writer's stream.
///
/// ```
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let device = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?;
/// # let (uploads, products) = (device.create_stream()?, device.create_stream()?);
/// let weights = uploads.upload(&[0.5_f32; 100])?;
/// products.wait(&uploads.record()?)?; // else `products` may read the weights before they are there
/// assert_eq!(products.download(&weights)?, [0.5; 100]);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// The CPU cannot access a buffer:
///
/// ```compile_fail,E0608
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<f32>(4).unwrap();
/// println!("{}", buffer[0]);
/// ```
///
/// A buffer holds only types for which every bit pattern is valid:
///
/// ```compile_fail,E0277
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<String>(4).unwrap();
/// ```
pub struct DeviceBuffer<T: Element> {
    block: ManuallyDrop<Arc<DeviceBlock>>,
    /// First value, counted from the start of the block.
    offset: usize,
    len: usize,
    elements: PhantomData<T>,
    /// Dropped after the block.
    _keeps: Keeps,
}

/// What keeps the runtime of a buffer alive.
enum Keeps {
    Runtime {
        _runtime: Runtime,
    },
    /// No shared count: see *Liveness* in `pool/thread_cache.rs`.
    Live {
        _live: Liveness,
    },
}

impl<T: Element> Drop for DeviceBuffer<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: The buffer is not used afterward.
        DeviceBlock::end(unsafe { ManuallyDrop::take(&mut self.block) });
    }
}

impl<T: Element> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("device", &self.block.device)
            .field("ptr", &self.ptr())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[inline]
pub(crate) fn size_in_bytes<T>(operation: &'static str, len: usize) -> Result<usize> {
    // An empty buffer allocates one element, because vendors have no empty blocks.
    match len.max(1).checked_mul(size_of::<T>()) {
        Some(bytes) if bytes > 0 && isize::try_from(bytes).is_ok() => Ok(bytes),
        _ => Err(impossible_size::<T>(operation, len)),
    }
}

#[cold]
fn impossible_size<T>(operation: &'static str, len: usize) -> Error {
    let name = std::any::type_name::<T>();
    let message = match size_of::<T>() {
        0 => format!("{name} has no size"),
        _ => format!("{len} values of {name} do not fit the address space"),
    };
    Error::new(ErrorKind::InvalidArgument, operation, message).with_hint("check the length and the element type")
}

/// Checks a range of values against the length of a buffer.
pub(crate) fn check_range(range: &Range<usize>, len: usize) -> Result<()> {
    if range.start > range.end || range.end > len {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "slice",
            format!(
                "the range from {} to {} is not inside a buffer of {}",
                range.start,
                range.end,
                counted(len, "value")
            ),
        )
        .with_hint("ranges count values, not bytes"));
    }
    Ok(())
}

/// Converts an offset and a length in bytes to values of `U`.
fn in_values_of<U: Element>(offset: usize, bytes: usize) -> Result<(usize, usize)> {
    let size = size_of::<U>();
    if size == 0 || !offset.is_multiple_of(size) || !bytes.is_multiple_of(size) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "reinterpret",
            format!(
                "the range of {} at offset {offset} is not a whole number of {size}-byte values",
                counted(bytes, "byte")
            ),
        )
        .with_hint("use the type that the memory was written as"));
    }
    Ok((offset / size, bytes / size))
}

impl<T: Element> DeviceBuffer<T> {
    pub(crate) fn new(runtime: Runtime, device: u32, len: usize, kind: DeviceMemoryKind) -> Result<Self> {
        const OPERATION: &str = "allocate";
        let inner = &runtime.inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        let bytes = size_in_bytes::<T>(OPERATION, len)?;
        let options = AllocateOptions::new(bytes).with_kind(kind);
        let allocated = inner.frees.memory.allocate(device, bytes, || inner.backend.allocate(device, &options))?;
        inner.ledger.insert_owned(allocated)?;
        let origin = match kind {
            DeviceMemoryKind::Shareable(transport) => {
                Origin::Shared(Box::new(Exported::new(runtime.clone(), transport, bytes)))
            }
            _ => Origin::Own,
        };
        let block = DeviceBlock::new(&inner.frees, device, allocated.base, origin);
        Ok(Self::part(runtime, block, 0..len))
    }

    /// Returns a range of an existing block.
    pub(crate) fn part(runtime: Runtime, block: Arc<DeviceBlock>, range: Range<usize>) -> Self {
        let block = ManuallyDrop::new(block);
        let _keeps = Keeps::Runtime { _runtime: runtime };
        Self { block, offset: range.start, len: range.len(), elements: PhantomData, _keeps }
    }

    /// Returns a whole block of a stream's memory.
    #[inline]
    pub(crate) fn ordered(live: Liveness, block: Arc<DeviceBlock>, len: usize) -> Self {
        let (block, _keeps) = (ManuallyDrop::new(block), Keeps::Live { _live: live });
        Self { block, offset: 0, len, elements: PhantomData, _keeps }
    }

    pub(crate) fn block(&self) -> &DeviceBlock {
        &self.block
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

    /// Returns the ordinal of the device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.block.device
    }

    /// Returns the address of the first value, for kernels and copies that the program enqueues itself. Highwater does
    /// not see such work. The caller must:
    /// - call [`Stream::note_device_use`](crate::Stream::note_device_use) on the stream that executes the work, before enqueuing it. Without the
    ///   note, Highwater frees and reuses the memory while the work is queued;
    /// - keep the buffer until the work is enqueued;
    /// - touch no bytes beside the values of the buffer, and order the work after that of other streams on the same values
    ///   (see [`Stream::wait`](crate::Stream::wait));
    /// - never free the address.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr.offset(self.offset * size_of::<T>())
    }

    /// Returns a ticket that lets other processes open the buffer; see [`Ticket`]. When they have opened it, all work that was
    /// enqueued on the buffer before this call is done. Another share of the buffer is cheap. All tickets of one allocation
    /// open the same memory.
    ///
    /// ```
    /// use highwater_core::{Runtime, Ticket};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let device = runtime.device(0)?;
    /// let stream = device.create_stream()?;
    /// let weights = device.allocate_shared::<f32>(1000)?;
    /// stream.fill(&weights, 0.5_f32)?;
    /// let ticket = weights.share()?.to_bytes(); // send these bytes to another process
    ///
    /// // In that process. In this one, it returns the original buffer:
    /// let opened = runtime.open_shared::<f32>(&Ticket::from_bytes(&ticket)?)?;
    /// assert_eq!(stream.download(&opened)?, vec![0.5; 1000]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// - `InvalidArgument`: the buffer was not allocated by [`Device::allocate_shared`](crate::Device::allocate_shared), or no
    ///   transport exports the memory that [`Device::adopt`](crate::Device::adopt) took.
    /// - `Capture`: this thread is inside a capture, or an open capture uses the buffer.
    /// - `OperatingSystem`: no descriptors, threads or shared memory are left.
    /// - Otherwise the backend's error.
    pub fn share(&self) -> Result<Ticket> {
        DeviceSlice::from(self).share()
    }

    /// Drops a buffer whose memory other code frees next, and waits until no other process holds its allocation. Returns whether none does.
    ///
    /// A process holds an allocation while it has a buffer of it open. It also holds a block of `cudaMalloc` or `hipMalloc` while it has it
    /// mapped, which may last until the owner drops the buffer. CUDA leaves a free of such a block under a mapping undefined. A process
    /// unmaps in a thread of its own, and the driver may wait for that process's device work.
    ///
    /// The call waits at most `limit`, and not for a stopped process. It does not wait for the work of this runtime's streams. In a child of
    /// `fork`, it waits for nothing and returns `false`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use highwater_core::{Runtime, Ticket, Transport};
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let gpu = MockGpu::open(MockOptions::new())?;
    /// # let (runtime, other) = (Runtime::new(gpu.clone())?, Runtime::new(gpu)?);
    /// let buffer = runtime.device(0)?.adopt_allocated::<f32>(1000, Transport::Descriptor)?;
    /// let ticket = buffer.share()?;
    ///
    /// let opened = other.open_shared::<f32>(&ticket)?; // as in another process
    /// drop(opened);
    /// assert!(buffer.unshare_within(Duration::from_secs(5)));
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    #[must_use]
    pub fn unshare_within(self, limit: Duration) -> bool {
        let export = self.block.export();
        drop(self);
        let Some((runtime, key)) = export else { return true };
        let sharing = runtime.inner.check("unshare_within").ok().and(runtime.inner.sharing.get());
        sharing.is_some_and(|sharing| sharing.wait_unheld(key, limit))
    }

    /// Returns the process that owns the memory of a buffer which [`Runtime::open_shared`](crate::Runtime::open_shared) opened.
    /// `None` for memory of this runtime and for memory that [`Device::adopt`](crate::Device::adopt) took. If this runtime inherited the
    /// memory by a death, it is the dead owner.
    #[must_use]
    pub fn owner(&self) -> Option<Owner> {
        self.block.owner()
    }

    /// Returns the same buffer as values of another type. The bytes stay as they are.
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let device = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?;
    /// # let stream = device.create_stream()?;
    /// let bits = stream.upload(&[0x3f00_0000_u32; 8])?;
    /// assert_eq!(stream.download(&bits.reinterpret::<f32>()?)?, [0.5; 8]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if the buffer does not begin at a multiple of the size of `U` in its allocation, or is not a whole number
    /// of values. The call drops the buffer then.
    pub fn reinterpret<U: Element>(self) -> Result<DeviceBuffer<U>> {
        let (offset, bytes) = (self.offset * size_of::<T>(), self.len * size_of::<T>());
        let (offset, len) = in_values_of::<U>(offset, bytes)?;
        let this = ManuallyDrop::new(self);
        // SAFETY: Both fields are read once, and `this` is not dropped.
        let (block, keeps) = unsafe { (std::ptr::read(&this.block), std::ptr::read(&this._keeps)) };
        Ok(DeviceBuffer { block, offset, len, elements: PhantomData, _keeps: keeps })
    }

    /// Returns a view of some of the values.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not inside the buffer.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        check_range(&range, self.len)?;
        let offset = self.offset + range.start;
        Ok(DeviceSlice { block: &self.block, offset, len: range.len(), elements: PhantomData })
    }
}

/// A view of values in a [`DeviceBuffer`]. The operations of a stream take slices. A slice cannot outlive its buffer:
///
/// ```compile_fail,E0505
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<f32>(4).unwrap();
/// let slice = buffer.slice(0..2).unwrap();
/// drop(buffer);
/// println!("{slice:?}");
/// ```
pub struct DeviceSlice<'b, T: Element> {
    pub(crate) block: &'b Arc<DeviceBlock>,
    offset: usize,
    len: usize,
    elements: PhantomData<T>,
}

/// A [`DeviceSlice`] without the type of its values.
#[derive(Clone, Copy)]
pub(crate) struct Untyped<'b> {
    pub(crate) block: &'b Arc<DeviceBlock>,
    /// Address of the first value.
    pub(crate) ptr: DevicePtr,
    /// Values, not bytes.
    pub(crate) len: usize,
}

impl fmt::Debug for Untyped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlice")
            .field("device", &self.block.device)
            .field("ptr", &self.ptr)
            .field("len", &self.len)
            .finish()
    }
}

impl Untyped<'_> {
    /// Returns whether the first `bytes` of this view and the first `other_bytes` of `other` overlap. Compares addresses:
    /// memory of another process that was opened twice is two blocks.
    pub(crate) fn overlaps(&self, bytes: usize, other: &Self, other_bytes: usize) -> bool {
        self.block.device == other.block.device
            && bytes > 0
            && other_bytes > 0
            && self.ptr < other.ptr.offset(other_bytes)
            && other.ptr < self.ptr.offset(bytes)
    }
}

impl<T: Element> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for DeviceSlice<'_, T> {}

impl<T: Element> fmt::Debug for DeviceSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlice")
            .field("device", &self.block.device)
            .field("ptr", &self.ptr())
            .field("len", &self.len)
            .finish()
    }
}

impl Runtime {
    /// Returns another buffer over a slice of memory that other processes can open. The memory stays while either buffer exists,
    /// as it does for another process. Makes no call of the backend.
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let device = runtime.device(0)?;
    /// let stream = device.create_stream()?;
    /// let layer = device.allocate_shared::<f32>(1000)?;
    /// stream.fill(&layer, 0.5_f32)?;
    /// let tensor = runtime.keep(layer.slice(600..900)?)?;
    /// drop(layer);
    /// assert_eq!(stream.download(&tensor)?, vec![0.5; 300]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if the slice belongs to another runtime, or if no other process can open its memory; `Forked` in a
    /// forked child.
    pub fn keep<'b, T: Element>(&self, slice: impl Into<DeviceSlice<'b, T>>) -> Result<DeviceBuffer<T>> {
        const OPERATION: &str = "keep";
        let slice = slice.into();
        self.inner.check(OPERATION)?;
        slice.block.check_runtime(OPERATION, &self.inner.services)?;
        if slice.block.shared_range().is_none() {
            let message = "the memory was not allocated for several processes";
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint("allocate it with `Device::allocate_shared`, or adopt it"));
        }
        Ok(DeviceBuffer::part(self.clone(), Arc::clone(slice.block), slice.offset..slice.offset + slice.len))
    }
}

impl<'b, T: Element> From<&'b DeviceBuffer<T>> for DeviceSlice<'b, T> {
    fn from(buffer: &'b DeviceBuffer<T>) -> Self {
        Self { block: &buffer.block, offset: buffer.offset, len: buffer.len, elements: PhantomData }
    }
}

impl<'b, T: Element> DeviceSlice<'b, T> {
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

    /// Returns the ordinal of the device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.block.device
    }

    /// Returns the address of the first value. The caller must meet the obligations of [`DeviceBuffer::ptr`].
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr.offset(self.offset * size_of::<T>())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the view without its type.
    #[inline]
    pub(crate) fn untyped(&self) -> Untyped<'b> {
        Untyped { block: self.block, ptr: self.ptr(), len: self.len }
    }

    /// Returns a ticket of these values, as [`DeviceBuffer::share`].
    ///
    /// # Errors
    /// As [`DeviceBuffer::share`].
    pub fn share(&self) -> Result<Ticket> {
        let mut ticket = self.block.share()?;
        let (offset, length) = self.byte_range();
        ticket.offset += offset;
        ticket.length = length;
        Ok(ticket)
    }

    /// Returns the offset in the block and the length, in bytes.
    pub(crate) fn byte_range(&self) -> (u64, u64) {
        ((self.offset * size_of::<T>()) as u64, self.bytes() as u64)
    }

    pub(crate) fn block(&self) -> &'b Arc<DeviceBlock> {
        self.block
    }

    /// Returns the same memory as a view of values of another type. The bytes stay as they are.
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let device = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?;
    /// # let stream = device.create_stream()?;
    /// let bytes = stream.upload(&[0_u8; 8])?;
    /// let values = bytes.slice(4..8)?.reinterpret::<f32>()?;
    /// stream.fill(values, 0.5_f32)?;
    /// assert_eq!(stream.download(&bytes)?, [0, 0, 0, 0, 0, 0, 0, 0x3f]);
    /// assert!(bytes.slice(2..6)?.reinterpret::<f32>().is_err(), "between two values");
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if the view does not begin at a multiple of the size of `U` in its allocation, or is not a whole number of
    /// values.
    pub fn reinterpret<U: Element>(self) -> Result<DeviceSlice<'b, U>> {
        let (offset, bytes) = (self.offset * size_of::<T>(), self.bytes());
        let (offset, len) = in_values_of::<U>(offset, bytes)?;
        Ok(DeviceSlice { block: self.block, offset, len, elements: PhantomData })
    }

    /// Returns the same memory as a view of bytes, for example to share slices of different types in one batch.
    #[must_use]
    pub fn as_bytes(&self) -> DeviceSlice<'b, u8> {
        let (offset, len) = (self.offset * size_of::<T>(), self.bytes());
        DeviceSlice { block: self.block, offset, len, elements: PhantomData }
    }
}
