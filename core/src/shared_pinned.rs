//! [`SharedPinnedBuffer`]: page-locked memory of which several processes have one copy.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::buffer::{check_range, size_in_bytes};
use crate::device::Device;
use crate::pinned::{PinnedSlice, PinnedSliceMut, device_address_of};
use crate::pool::block::OwnedBlock;
use crate::pool::file_access::FileAccess;
use crate::pool::pinned::PinnedPool;
use crate::runtime::Runtime;
use crate::sharing::pinned::{MadeHere, PinnedOrigin, open};
use crate::sharing::{ImportOptions, Owner, OwnerDeath, Ticket};
use highwater_hal::{DevicePtr, Element, Error, ErrorKind, HostPtr, Result};

impl Runtime {
    /// Makes page-locked host memory for `len` values of `T` that other processes can open. The bytes are zeros.
    ///
    /// The memory is not from the pool: each call makes a file in memory, and registers it. It counts toward the cap of the pool.
    ///
    /// # Errors
    /// - `Unsupported`: a device cannot register memory (`host_register`, `register_piece_bytes`).
    /// - `OutOfMemory`: the machine has no memory left, or the cap is reached, even after idle memory was released.
    /// - `InvalidArgument`: the size exceeds the cap or does not fit the address space, or `T` is zero-sized.
    /// - `Capture`: this thread is inside a capture.
    /// - `Forked` or `ShuttingDown`. Otherwise the backend's error.
    pub fn pinned_shared<T: Element>(&self, len: usize) -> Result<SharedPinnedBuffer<T>> {
        SharedPinnedBuffer::make(self, self.inner.pinned.of_runtime(), len)
    }

    /// Opens page-locked memory that another process shares. For a ticket of this runtime, returns the original memory. Waits until
    /// the device work that was enqueued before the share is done.
    ///
    /// The first open maps the pages of the exporter and registers them here, which takes as long as for memory of this
    /// process that is already touched. Later opens reuse the mapping, until it is trimmed or the exporter drops the buffer.
    ///
    /// # Errors
    /// - `Expired`: the exporter has ended or has freed the buffer, or the ticket is from another boot or machine.
    /// - `InvalidArgument`: the ticket names device memory, the length or the offset of the range is not a multiple of the size of
    ///   `T`, or the exporter sent a file that is not safe to map.
    /// - `Unsupported`: a device here cannot register memory (`host_register`), or cannot register memory that the CPU may only read
    ///   (`host_register_read_only`), while the exporter's devices can.
    /// - `PermissionDenied`, `InvalidState`, `OperatingSystem` and `Capture`, as [`Runtime::open_shared`]. `OutOfMemory` and otherwise
    ///   the backend's error, from the registration.
    pub fn open_pinned<T: Element>(&self, ticket: &Ticket) -> Result<SharedPinnedBuffer<T>> {
        self.open_pinned_with(ticket, &ImportOptions::new())
    }

    /// Opens page-locked memory as [`Runtime::open_pinned`] does, and chooses what happens when its owner dies. The options apply to
    /// the memory of other runtimes. With [`OwnerDeath::Inherit`], this process keeps the file of the memory, and answers the tickets of a
    /// dead owner.
    ///
    /// ```
    /// use highwater_core::{ImportOptions, OwnerDeath, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let gpu = MockGpu::open(MockOptions::new())?;
    /// let loader = Runtime::new(gpu.clone())?;
    /// let mut weights = loader.pinned_shared::<f32>(1000)?;
    /// weights.write()?.fill(0.5);
    /// let ticket = weights.share()?;
    ///
    /// // Another process, which answers the ticket once the loader has ended.
    /// let worker = Runtime::new(gpu)?;
    /// let options = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
    /// let kept = worker.open_pinned_with::<f32>(&ticket, &options)?;
    /// assert_eq!(kept.read()?[0], 0.5);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Runtime::open_pinned`]. `Unsupported` with [`OwnerDeath::Release`], because the CPU may read the pages at any time; and with
    /// `Inherit` if the rendezvous is an inherited descriptor.
    pub fn open_pinned_with<T: Element>(
        &self,
        ticket: &Ticket,
        options: &ImportOptions,
    ) -> Result<SharedPinnedBuffer<T>> {
        const OPERATION: &str = "open_pinned";
        self.inner.check(OPERATION)?;
        crate::capture::thread::refuse_in_capture(OPERATION)?;
        if !ticket.is_pinned() {
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, "the ticket names device memory")
                .with_hint("open it with `Runtime::open_shared`"));
        }
        if options.owner_death() == OwnerDeath::Release {
            let what = "page-locked memory cannot be released at the death of its owner, because the CPU may read it at any time";
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, what)
                .with_hint("open it with `OwnerDeath::Keep` or `OwnerDeath::Inherit`"));
        }
        let range = ticket.values::<T>(OPERATION)?;
        let (block, origin) = open(self, ticket, options)?;
        Ok(SharedPinnedBuffer::of(block, origin, range))
    }
}

impl Device {
    /// As [`Runtime::pinned_shared`], on the NUMA node of the device where [`Device::pinned`] would use it.
    ///
    /// # Errors
    /// As [`Runtime::pinned_shared`].
    pub fn pinned_shared<T: Element>(&self, len: usize) -> Result<SharedPinnedBuffer<T>> {
        let runtime = self.runtime();
        SharedPinnedBuffer::make(runtime, runtime.inner.pinned.of_device(self.ordinal()), len)
    }
}

/// `len` values of `T` in page-locked host memory that several processes have in common, as one copy.
///
/// One process makes the buffer, fills it, and calls [`share`](Self::share). From then on it is read-only, there and in every process
/// that opens the ticket with [`Runtime::open_pinned`]. The pages exist once, and each process registers them with its devices. Copies
/// from the buffer run as from a [`PinnedBuffer`](crate::PinnedBuffer).
///
/// ```
/// use highwater_core::{Runtime, Ticket};
/// use highwater_mock::{MockGpu, MockOptions};
///
/// // The process that loads the weights.
/// let loader = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// let mut weights = loader.pinned_shared::<f32>(1000)?;
/// weights.write()?.fill(0.5);
/// let ticket = weights.share()?.to_string();
/// assert!(weights.write().is_err(), "read-only once it is shared");
///
/// // Each process that uses them. Here it is another runtime of the same process.
/// let worker = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// let weights = worker.open_pinned::<f32>(&ticket.parse::<Ticket>()?)?;
/// let stream = worker.device(0)?.create_stream()?;
/// let on_device = worker.device(0)?.allocate::<f32>(1000)?;
/// stream.copy_to_device(&weights, &on_device)?;
/// assert_eq!(stream.download(&on_device)?, vec![0.5; 1000]);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// # Who may write
/// - Until the first share, only the buffer itself: by [`write`](Self::write), and by copies to [`slice_mut`](Self::slice_mut).
/// - After it, nobody. An importer cannot map the memory for writing, if the devices have
///   [`host_register_read_only`](highwater_hal::Capabilities::host_register_read_only). Without it, vendors register only what is
///   mapped for writing. Then the methods of this type keep importers from writing.
/// - After [`share_writable`](Self::share_writable), every process. The caller of that function makes a promise for all of them.
///
/// No process can change the size of the memory, so that an access never raises SIGBUS.
///
/// # Lifetime
/// A ticket expires as one of device memory does: when its exporter ends, or drops the buffer before a process has opened it. An
/// importer keeps the memory, whatever becomes of the exporter. The system frees the pages when the last process has released
/// them or has died. Dropping a buffer does not wait: the memory is unregistered once every stream has passed its last use.
///
/// The CPU cannot write a buffer that a copy is made from, as with a [`PinnedBuffer`](crate::PinnedBuffer):
///
/// ```compile_fail,E0502
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let mut pinned = runtime.pinned_shared::<f32>(4).unwrap();
/// let values = pinned.write().unwrap();
/// pinned.share().unwrap();
/// values[0] = 1.0;
/// ```
pub struct SharedPinnedBuffer<T: Element> {
    // Dropped before the origin, which keeps the runtime.
    block: OwnedBlock,
    origin: PinnedOrigin,
    /// The values, counted from the start of the block.
    range: Range<usize>,
    elements: PhantomData<T>,
}

impl<T: Element> fmt::Debug for SharedPinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("SharedPinnedBuffer");
        shown.field("ptr", &self.ptr()).field("len", &self.len()).field("is_writable", &self.is_writable());
        shown.finish_non_exhaustive()
    }
}

impl<T: Element> SharedPinnedBuffer<T> {
    const ALIGNED: () = assert!(align_of::<T>() <= 64, "page-locked memory is aligned to 64 bytes");

    fn make(runtime: &Runtime, pool: &PinnedPool, len: usize) -> Result<Self> {
        let bytes = size_in_bytes::<T>("pinned_shared", len)?;
        let (block, origin) = MadeHere::make(runtime, pool, bytes)?;
        Ok(Self::of(block, origin, 0..len))
    }

    fn of(block: OwnedBlock, origin: PinnedOrigin, range: Range<usize>) -> Self {
        let () = Self::ALIGNED;
        Self { block, origin, range, elements: PhantomData }
    }

    pub(crate) fn pool(&self) -> &PinnedPool {
        self.origin.runtime().inner.pinned.of_runtime()
    }

    pub(crate) fn block(&self) -> &OwnedBlock {
        &self.block
    }

    fn bytes(&self) -> Range<usize> {
        // Inside the block, whose size is a `usize`.
        self.range.start * size_of::<T>()..self.range.end * size_of::<T>()
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

    /// Returns the address of the first value in this process.
    #[must_use]
    pub fn ptr(&self) -> HostPtr {
        self.block.ptr.offset(self.bytes().start)
    }

    /// Returns the address of the first value, to write through. Only the promise of
    /// [`share_writable`](Self::share_writable) keeps such writes apart from other accesses.
    ///
    /// # Errors
    /// `InvalidState` if the memory is read-only.
    pub fn as_mut_ptr(&self) -> Result<*mut T> {
        self.check_writable()?;
        Ok(self.ptr().as_ptr().cast())
    }

    /// Returns the process that made the memory. `None` if it is this one. The memory stays when that process dies.
    #[must_use]
    pub fn owner(&self) -> Option<Owner> {
        self.origin.owner()
    }

    /// Returns whether values may still be written: the buffer was not shared, or was shared as writable.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        matches!(self.origin.access(), FileAccess::Private | FileAccess::Writable)
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_writable() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidState, "pinned_shared", "the buffer was shared, and is read-only since then")
            .with_hint("fill the buffer before its first `share`"))
    }

    fn check_private(&self) -> Result<()> {
        self.check_writable()?;
        if self.origin.access() == FileAccess::Private {
            return Ok(());
        }
        let message = "the buffer was shared as writable, and other processes may access the values";
        Err(Error::new(ErrorKind::InvalidState, "pinned_shared", message).with_hint("write through `as_mut_ptr`"))
    }

    /// Returns the registrations of the memory, as [`PinnedBuffer::registrations`](crate::PinnedBuffer::registrations).
    pub fn registrations(&self) -> impl Iterator<Item = Range<usize>> + use<T> {
        let bytes = self.bytes();
        let parts = self.block.cut(bytes.clone()).filter(|part| !part.is_empty());
        parts.map(move |part| part.start - bytes.start..part.end - bytes.start)
    }

    /// Returns the address at which kernels of a device access the values, as
    /// [`PinnedBuffer::device_address`](crate::PinnedBuffer::device_address). Kernels must not write read-only memory.
    ///
    /// # Errors
    /// As [`PinnedBuffer::device_address`](crate::PinnedBuffer::device_address).
    pub fn device_address(&self, device: &Device) -> Result<DevicePtr> {
        device_address_of(PinnedSlice::from(self).pool(), &self.block, self.bytes(), device)
    }

    /// Returns a view of some of the values, to copy from.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not inside the buffer.
    pub fn slice(&self, range: Range<usize>) -> Result<PinnedSlice<'_, T>> {
        check_range(&range, self.len())?;
        let range = self.range.start + range.start..self.range.start + range.end;
        Ok(PinnedSlice::new(self.pool().reference(), &self.block, range))
    }

    /// Returns a view of some of the values, to copy to.
    ///
    /// # Errors
    /// `InvalidState` if the memory is read-only; `InvalidArgument` if the range is not inside the buffer.
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<PinnedSliceMut<'_, T>> {
        self.check_writable()?;
        self.slice(range).map(PinnedSliceMut)
    }

    /// As [`SharedPinnedBuffer::slice_mut`], without an exclusive borrow. It is for bindings to other languages.
    ///
    /// # Errors
    /// As [`SharedPinnedBuffer::slice_mut`].
    ///
    /// # Safety
    /// The caller must ensure that no slice of the values exists from the copy's call until the copy has ended. Slices are those of
    /// [`SharedPinnedBuffer::read`] and [`SharedPinnedBuffer::write`], and the arguments of the closures of
    /// [`SharedPinnedBuffer::read_with`] and [`SharedPinnedBuffer::write_with`]. The caller must not share the buffer for the first time
    /// between this call and that of the copy.
    pub unsafe fn slice_mut_shared(&self, range: Range<usize>) -> Result<PinnedSliceMut<'_, T>> {
        self.check_writable()?;
        self.slice(range).map(PinnedSliceMut)
    }

    /// Returns the values, once every stream of this process that writes them is done.
    ///
    /// # Errors
    /// As [`PinnedBuffer::read`](crate::PinnedBuffer::read).
    pub fn read(&self) -> Result<&[T]> {
        self.pool().wait_for_uses(&self.block, true)?;
        // SAFETY: The block holds the range, whose values are aligned. Every bit pattern is a `T`. No device of this process writes
        // it: earlier writes are done, no graph writes it, and enqueuing or recording another write needs `&mut self`. No process
        // writes it once it is shared, unless by the promise of `share_writable`.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr().as_ptr().cast::<T>(), self.len()) })
    }

    /// Returns the values for writing, once every stream that uses them is done.
    ///
    /// # Errors
    /// `InvalidState` if the buffer was shared. Otherwise as [`PinnedBuffer::write`](crate::PinnedBuffer::write).
    pub fn write(&mut self) -> Result<&mut [T]> {
        self.check_private()?;
        self.pool().wait_for_uses(&self.block, false)?;
        // SAFETY: As in `read`. No ticket exists, so this is the only buffer of the memory, and no device and no graph uses it.
        // Enqueuing, recording and sharing need a borrow of `self`, which is borrowed exclusively while the slice lives.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr().cast::<T>(), self.len()) })
    }

    /// As [`PinnedBuffer::read_with`](crate::PinnedBuffer::read_with), for a buffer that a graph uses.
    ///
    /// # Errors
    /// As [`PinnedBuffer::read_with`](crate::PinnedBuffer::read_with).
    pub fn read_with<R>(&self, access: impl FnOnce(&[T]) -> R) -> Result<R> {
        let _access = self.pool().access(&self.block, false)?;
        // SAFETY: As in `read`. Launches of graphs that write the block are refused until `_access` is dropped.
        Ok(access(unsafe { std::slice::from_raw_parts(self.ptr().as_ptr().cast::<T>(), self.len()) }))
    }

    /// As [`PinnedBuffer::write_with`](crate::PinnedBuffer::write_with), for a buffer that a graph uses.
    ///
    /// # Errors
    /// `InvalidState` if the buffer was shared. Otherwise as [`PinnedBuffer::write_with`](crate::PinnedBuffer::write_with).
    pub fn write_with<R>(&mut self, access: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        self.check_private()?;
        let _access = self.pool().access(&self.block, true)?;
        // SAFETY: As in `write`. Launches of graphs that use the block are refused until `_access` is dropped.
        Ok(access(unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr().cast::<T>(), self.len()) }))
    }

    /// Returns a ticket for this buffer, which other processes open with [`Runtime::open_pinned`]. From the first call on the memory is
    /// read-only, even if the call fails after that decision. When such an open returns, the device work that was enqueued
    /// before this call is done.
    ///
    /// # Errors
    /// - `InvalidState`: a graph writes the buffer, or a wait for device work failed.
    /// - `Capture`: this thread is inside a capture, or an open capture uses the buffer.
    /// - `OperatingSystem`: the process has no descriptors or threads left, or a sandbox refuses the calls.
    /// - `Forked` or `ShuttingDown`.
    pub fn share(&self) -> Result<Ticket> {
        self.ticket(false)
    }

    /// As [`SharedPinnedBuffer::share`], for memory that every process may write, by [`as_mut_ptr`](Self::as_mut_ptr) and by copies to
    /// [`slice_mut`](Self::slice_mut).
    ///
    /// # Errors
    /// `InvalidState` if the memory was shared as read-only. Otherwise as [`SharedPinnedBuffer::share`].
    ///
    /// # Safety
    /// The caller must ensure, for all processes that open the ticket, that no value is written while another thread, process or
    /// device accesses it. A slice of [`read`](Self::read) counts as an access for as long as it lives.
    pub unsafe fn share_writable(&self) -> Result<Ticket> {
        self.ticket(true)
    }

    fn ticket(&self, is_writable: bool) -> Result<Ticket> {
        let ticket = self.origin.share(&self.block, is_writable)?;
        let bytes = self.bytes();
        Ok(ticket.part(bytes.start as u64, bytes.len() as u64))
    }
}

impl<'b, T: Element> From<&'b SharedPinnedBuffer<T>> for PinnedSlice<'b, T> {
    fn from(buffer: &'b SharedPinnedBuffer<T>) -> Self {
        Self::new(buffer.pool().reference(), &buffer.block, buffer.range.clone())
    }
}
