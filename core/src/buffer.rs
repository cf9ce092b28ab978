//! [`DeviceBuffer`]: typed device memory that is given back after every stream that used it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::capture::{in_capture, refuse_in_capture};
use crate::pool::deferred::DeferredFree;
use crate::pool::events::Mark;
use crate::runtime::Runtime;
use crate::sharing::{ExportKey, Import, Ticket};
use crate::stream::{Marked, Stream, StreamCore, StreamUse};
use highwater_hal::{AllocateOptions, DeviceMemoryKind, DevicePtr, Element, Error, ErrorKind, Result, Transport};

/// `len` values of `T` in the memory of one device.
///
/// Dropping a buffer never waits: its memory is freed once every stream that used it has passed that use. Device work of
/// different streams on one buffer is not ordered by itself; unordered access gives unspecified values and nothing worse.
/// A stream that uses data of another stream must wait for it, see [`Stream::wait`]. An automatic wait for the last
/// writer of a whole buffer would serialize streams that write disjoint parts of it. It would also wait for later work
/// of the writer's stream.
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
/// The CPU cannot reach into a buffer:
///
/// ```compile_fail,E0608
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<f32>(4).unwrap();
/// println!("{}", buffer[0]);
/// ```
///
/// and it holds only types whose every bit pattern is a value:
///
/// ```compile_fail,E0277
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<String>(4).unwrap();
/// ```
pub struct DeviceBuffer<T: Element> {
    block: Arc<DeviceBlock>,
    /// First value, counted from the start of the block.
    offset: usize,
    len: usize,
    elements: PhantomData<T>,
}

/// A block of device memory with the streams that used it. Counted: whoever needs the memory to stay holds a reference.
///
/// In the order of declaration, so that what every product looks at lies together: a vendor's call leaves little of it in the
/// cache.
#[repr(C)]
pub(crate) struct DeviceBlock {
    pub(crate) runtime: Runtime,
    pub(crate) ptr: DevicePtr,
    /// Key of the stream noted last as [`Noted::Ordered`], 0 for none. Noting that stream again costs one load.
    last_use: AtomicU64,
    pub(crate) device: u32,
    /// Streams that use the block in a capture that is open.
    recording: AtomicU32,
    uses: Mutex<Vec<(StreamUse, Noted)>>,
    origin: Origin,
}

/// The way in which the use of a block by a stream is ordered after the block's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Noted {
    /// All later work of the stream comes after it.
    Ordered,
    /// Each launch of the graph comes after it. The stream takes part in a capture, where it cannot wait for work
    /// outside.
    InCapture,
}

impl Noted {
    pub(crate) fn and(self, other: Self) -> Self {
        if self == Self::Ordered { other } else { self }
    }

    /// Refuses work that would execute instead of being recorded, because the capture ended between note and call.
    pub(crate) fn check_executed(self, operation: &'static str) -> Result<()> {
        match self {
            Self::Ordered => Ok(()),
            Self::InCapture => Err(Error::new(
                ErrorKind::Capture,
                operation,
                "another thread ended the capture of the stream before it recorded this call",
            )
            .with_hint("end a capture after all recorded calls of all threads have returned")),
        }
    }
}

/// Where a block comes from, and so what is done with it in the end.
enum Origin {
    /// Allocated here.
    Own {
        /// The stream whose order allocation and free follow, for stream-ordered memory.
        home: Option<Arc<StreamCore>>,
        /// How other processes can open it; with where it stands in the exporter's books, once it was shared.
        shareable: Option<(Transport, OnceLock<ExportKey>)>,
        bytes: usize,
    },
    /// Memory of another process, counted there.
    Imported(Arc<Import>),
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBlock").field("device", &self.device).field("ptr", &self.ptr).finish_non_exhaustive()
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

pub(crate) fn size_in_bytes<T>(operation: &'static str, len: usize) -> Result<usize> {
    let invalid = |message: String| {
        Error::new(ErrorKind::InvalidArgument, operation, message).with_hint("check the length and the element type")
    };
    if size_of::<T>() == 0 {
        return Err(invalid(format!("{} has no size", std::any::type_name::<T>())));
    }
    // An empty buffer is one element long underneath: vendors have no empty blocks.
    len.max(1)
        .checked_mul(size_of::<T>())
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| invalid(format!("{len} values of {} do not fit the address space", std::any::type_name::<T>())))
}

/// Checks a range of values against the length of a buffer.
pub(crate) fn check_range(range: &Range<usize>, len: usize) -> Result<()> {
    if range.start > range.end || range.end > len {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "slice",
            format!("{range:?} does not lie in a buffer of {len} values"),
        )
        .with_hint("ranges count values, not bytes"));
    }
    Ok(())
}

impl<T: Element> DeviceBuffer<T> {
    pub(crate) fn new(runtime: Runtime, device: u32, len: usize, kind: DeviceMemoryKind) -> Result<Self> {
        Self::with_home(runtime, device, len, kind, None)
    }

    pub(crate) fn with_home(
        runtime: Runtime,
        device: u32,
        len: usize,
        kind: DeviceMemoryKind,
        home: Option<Arc<StreamCore>>,
    ) -> Result<Self> {
        runtime.inner.check("allocate")?;
        refuse_in_capture("allocate")?;
        let bytes = size_in_bytes::<T>("allocate", len)?;
        let options = AllocateOptions::new(bytes).with_kind(kind);
        let ptr = runtime.inner.allocate_buffer(device, &options, home.as_deref())?;
        let shareable = match kind {
            DeviceMemoryKind::Shareable(transport) => Some((transport, OnceLock::new())),
            _ => None,
        };
        let block = DeviceBlock::new(runtime, device, ptr, Origin::Own { home, shareable, bytes });
        Ok(Self { block: Arc::new(block), offset: 0, len, elements: PhantomData })
    }

    /// The range of a ticket in an import, which is counted for it.
    pub(crate) fn imported(runtime: Runtime, import: Arc<Import>, range: Range<usize>) -> Self {
        let block = DeviceBlock::new(runtime, import.device, import.ptr, Origin::Imported(import));
        Self::part(Arc::new(block), range)
    }

    /// A range of a block that is there already.
    pub(crate) fn part(block: Arc<DeviceBlock>, range: Range<usize>) -> Self {
        Self { block, offset: range.start, len: range.len(), elements: PhantomData }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ordinal of the device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.block.device
    }

    /// Returns the address of the first value, for kernels and copies that the program enqueues itself. Highwater does
    /// not see such work. The caller must:
    /// - call [`Stream::note_device_use`] on the stream that executes the work, before enqueuing it. Without the
    ///   note, Highwater frees and reuses the memory while the work is queued;
    /// - keep the buffer until the work is enqueued;
    /// - touch no bytes beside the values of the buffer, and order the work after that of other streams on the same values
    ///   (see [`Stream::wait`]);
    /// - never free the address.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr.offset(self.offset * size_of::<T>())
    }

    /// A ticket by which other processes can open the buffer, see [`Ticket`]. What was enqueued on the buffer before is
    /// done when they have opened it. Sharing again costs little; all tickets of one allocation open the same memory.
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
    /// // There (and here too, where it is the original):
    /// let opened = runtime.open_shared::<f32>(&Ticket::from_bytes(&ticket)?)?;
    /// assert_eq!(stream.download(&opened)?, vec![0.5; 1000]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// - `InvalidArgument`: the buffer was not allocated by [`Device::allocate_shared`](crate::Device::allocate_shared).
    /// - `Capture`: this thread is inside a capture, or one that is open uses the buffer.
    /// - `OperatingSystem`: no descriptor, thread or shared memory is left.
    /// - Else what the backend gives.
    pub fn share(&self) -> Result<Ticket> {
        DeviceSlice::from(self).share()
    }

    /// A view of some of the values.
    ///
    /// # Errors
    /// `InvalidArgument` where the range does not lie in the buffer.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        check_range(&range, self.len)?;
        let offset = self.offset + range.start;
        Ok(DeviceSlice { block: &self.block, offset, len: range.len(), elements: PhantomData })
    }
}

/// A view of values in a [`DeviceBuffer`]; what the operations of a stream take. It does not outlive the buffer:
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
    /// Whether the first `bytes` of this and the first `other_bytes` of the other share one. By address: memory of another
    /// process that was opened twice is two blocks.
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

impl<'b, T: Element> From<&'b DeviceBuffer<T>> for DeviceSlice<'b, T> {
    fn from(buffer: &'b DeviceBuffer<T>) -> Self {
        Self { block: &buffer.block, offset: buffer.offset, len: buffer.len, elements: PhantomData }
    }
}

impl<'b, T: Element> DeviceSlice<'b, T> {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ordinal of the device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.block.device
    }

    /// Address of the first value. The caller must meet the obligations of [`DeviceBuffer::ptr`].
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr.offset(self.offset * size_of::<T>())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The same without its type.
    #[inline]
    pub(crate) fn untyped(&self) -> Untyped<'b> {
        Untyped { block: self.block, ptr: self.ptr(), len: self.len }
    }

    /// A ticket of these values, as [`DeviceBuffer::share`].
    ///
    /// # Errors
    /// As [`DeviceBuffer::share`].
    pub fn share(&self) -> Result<Ticket> {
        let mut ticket = self.block.share()?;
        ticket.offset = (self.offset * size_of::<T>()) as u64;
        ticket.length = self.bytes() as u64;
        Ok(ticket)
    }
}

impl DeviceBlock {
    fn new(runtime: Runtime, device: u32, ptr: DevicePtr, origin: Origin) -> Self {
        let (last_use, uses, recording) = (AtomicU64::new(0), Mutex::default(), AtomicU32::new(0));
        Self { runtime, device, ptr, origin, last_use, uses, recording }
    }

    /// Counts a stream that uses the block in a capture, until the capture ends.
    pub(crate) fn recording_began(&self) {
        self.recording.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn recording_ended(&self) {
        self.recording.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether the block is of the stream's runtime.
    #[inline(always)]
    pub(crate) fn is_of(&self, stream: &Stream) -> bool {
        Arc::ptr_eq(&self.runtime.inner, &stream.runtime().inner)
    }

    /// Whether the stream was noted last.
    #[inline(always)]
    pub(crate) fn is_noted(&self, stream: &StreamCore) -> bool {
        // Relaxed: the list itself is under the lock; this only tells that the key was noted before, and the key of a
        // stream that is in use does not leave the list.
        self.last_use.load(Ordering::Relaxed) == stream.key
    }

    /// Notes that work on `stream` uses the block, before it is enqueued. The first note of a stream orders it after
    /// the allocation of stream-ordered memory. The caller must hold no turn.
    #[inline]
    pub(crate) fn note_use(&self, stream: &Arc<StreamCore>) -> Result<Noted> {
        if self.is_noted(stream) { Ok(Noted::Ordered) } else { self.note_anew(stream) }
    }

    #[cold]
    fn note_anew(&self, stream: &Arc<StreamCore>) -> Result<Noted> {
        let home = match &self.origin {
            Origin::Own { home: Some(home), .. } if home.key != stream.key => Some(home),
            _ => None,
        };
        let mut noted = Noted::Ordered;
        let mut uses = self.uses.lock();
        let earlier = uses.iter().find(|(use_, _)| use_.key() == stream.key).map(|(_, noted)| *noted);
        if let Some(home) = home
            && earlier != Some(Noted::Ordered)
        {
            drop(uses);
            // A thread that finds the stream in the list as ordered comes after the wait. Two threads may both make it
            // wait.
            noted = self.order_after_allocation(home, stream)?;
            uses = self.uses.lock();
        }
        if earlier != Some(Noted::Ordered) {
            match uses.iter_mut().find(|(use_, _)| use_.key() == stream.key) {
                Some((_, earlier)) if noted == Noted::Ordered => *earlier = noted,
                Some(_) => {}
                None => uses.push((stream.to_use(), noted)),
            }
        }
        let count = uses.len();
        drop(uses);
        if noted == Noted::Ordered {
            self.last_use.store(stream.key, Ordering::Relaxed);
        }
        // Now and then, so that a buffer that outlives many streams does not remember them all.
        if count >= 8 && count.is_power_of_two() {
            self.forget_ended_streams();
        }
        Ok(noted)
    }

    /// Makes a stream wait, on the device, for the allocation of the block in the order of another stream. Until then,
    /// work of the earlier block in this memory may be outstanding. The wait covers all work of the other stream so
    /// far, so that an allocation itself records no mark.
    fn order_after_allocation(&self, home: &StreamCore, stream: &StreamCore) -> Result<Noted> {
        const OPERATION: &str = "stream_wait_event";
        if stream.turn().recording.is_some() {
            return Ok(Noted::InCapture);
        }
        let inner = &self.runtime.inner;
        let wait = || {
            // If the home stream takes part in a capture, the allocation came before that.
            let allocated = home.mark(inner)?;
            let turn = stream.enter(OPERATION)?;
            if turn.recording.is_some() {
                return Ok(Noted::InCapture);
            }
            inner.backend.stream_wait_event(stream.id, allocated.event())?;
            Ok(Noted::Ordered)
        };
        wait().map_err(|error: Error| {
            let message = format!(
                "{:?} cannot wait for the allocation of {:?} in the order of {:?}: {}",
                stream.id,
                self.ptr,
                home.id,
                error.message()
            );
            let unordered = Error::new(error.kind(), OPERATION, message).with_hint(error.hint());
            error.code().into_iter().fold(unordered, Error::with_code)
        })
    }

    /// Forgets the streams that have ended and are done. Keys are never used twice, so they are not noted again.
    #[cold]
    fn forget_ended_streams(&self) {
        let ended: Vec<_> = self.uses.lock().iter().filter_map(|(use_, _)| use_.if_ended()).collect();
        for (key, mark) in ended {
            if self.runtime.inner.is_passed(&mark, false).unwrap_or(false) {
                self.uses.lock().retain(|(use_, _)| use_.key() != key);
            }
        }
    }

    /// Marks of the work on the block that is not known to be done. The second value: whether some could not be marked.
    fn outstanding(&self) -> (Vec<Arc<Mark>>, bool) {
        let inner = &self.runtime.inner;
        let uses: Vec<StreamUse> = self.uses.lock().iter().map(|(use_, _)| use_.clone()).collect();
        let mut unmarked = false;
        let mut outstanding = Vec::new();
        for use_ in uses.iter().filter(|use_| !use_.is_over(inner)) {
            match use_.mark(inner) {
                Marked::By(mark) if inner.is_passed(&mark, false).unwrap_or(false) => {}
                Marked::By(mark) => outstanding.push(mark),
                Marked::Later | Marked::Never => unmarked = true,
            }
        }
        (outstanding, unmarked)
    }

    /// The ticket of the whole block.
    fn share(self: &Arc<Self>) -> Result<Ticket> {
        let inner = &self.runtime.inner;
        inner.check("share")?;
        refuse_in_capture("share")?;
        if self.recording.load(Ordering::Relaxed) > 0 {
            return Err(Error::new(
                ErrorKind::Capture,
                "share",
                "a capture that is open uses the buffer: what it recorded is not executed, and nobody can wait for it",
            )
            .with_hint("share it before the capture, or after it and a launch of its graph; the capture goes on"));
        }
        let refused = |message: &str, hint: &str| {
            Err(Error::new(ErrorKind::InvalidArgument, "share", message.to_owned()).with_hint(hint.to_owned()))
        };
        let (after, unmarked) = self.outstanding();
        if unmarked {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "share",
                "the device work on the buffer cannot be waited for",
            )
            .with_hint("an earlier error of the device says why"));
        }
        match &self.origin {
            // The exporter's other importers cannot know of work here, so it is waited for.
            Origin::Imported(import) => {
                after.iter().try_for_each(|mark| inner.is_passed(mark, true).map(drop))?;
                Ok(import.ticket.clone())
            }
            Origin::Own { shareable: Some((transport, export)), bytes, .. } => {
                let uuid = inner.device(self.device).info.uuid;
                inner.sharing("share")?.share(self, export, *transport, *bytes as u64, uuid, after)
            }
            Origin::Own { home: Some(_), .. } => {
                refused("stream-ordered memory cannot be shared", "allocate it by `Device::allocate_shared`")
            }
            Origin::Own { .. } => {
                refused("the buffer was not allocated to be shared", "allocate it by `Device::allocate_shared`")
            }
        }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        let inner = &self.runtime.inner;
        if !inner.may_release() {
            return;
        }
        let (home, export) = match &mut self.origin {
            Origin::Imported(import) => {
                let import = Arc::clone(import);
                let (after, unmarked) = self.outstanding();
                return inner.release_import(import, after, unmarked);
            }
            Origin::Own { home, shareable, .. } => {
                (home.take(), shareable.as_ref().and_then(|(_, export)| export.get().copied()))
            }
        };
        let later = std::mem::take(self.uses.get_mut()).into_iter().map(|(use_, _)| use_).collect();
        let mut free =
            DeferredFree { device: self.device, ptr: self.ptr, home, after: Vec::new(), later, unmarked: false };
        free.mark_later(inner);
        // Other processes may have it open: then it waits in limbo.
        let Some(free) = inner.close_export(export, free) else { return };
        if free.home.is_none() || free.unmarked || !free.later.is_empty() || in_capture() {
            return inner.defer_free(free);
        }
        // Freed in the order of its own stream, which first waits, on the device, for the others.
        //
        // SAFETY: the block's owner is gone, and the work of every stream that used it precedes the marks.
        match unsafe { inner.free_deferred(&free) } {
            Ok(true) => {}
            Ok(false) => inner.defer_free(free),
            Err(error) => {
                inner.count_failed_release(&error);
                inner.strand(free);
            }
        }
    }
}
