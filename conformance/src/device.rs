//! Guards that own what a case makes on a device, with safe methods.
//!
//! A case that fails must leave no object behind, and must not free memory that a device still uses. So each guard gives its
//! object back when it is dropped, and a block first waits for every device whose streams used it. A guard repeats a release
//! that the fault sweep refused. Spans are cut from blocks with bounds checks, so that copies and fills between them are safe
//! calls.
//!
//! The guards trust the backend in one point: a backend that writes outside of its ranges, or reports completion too early,
//! can harm the process that tests it.

mod mapped;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use highwater_hal::{
    AllocateOptions, Backend, BlasHandle, BlasKind, BlasOptions, CaptureMode, Completion, CopyShape, DeviceMemoryKind,
    DevicePtr, Error, EventHandle, EventId, EventOptions, FillPattern, Gemm, GemmShape, GraphExecId, GraphId,
    HostAllocator, HostOptions, HostPtr, IpcSharing, Location, MemoryCopy, MemoryCopy2d, MemoryFill, MemoryHandle,
    PlanArguments, PlanId, Result, StreamId, StreamOptions, Transport, Workspace,
};

use crate::matrix::GUARD_BYTES;
use crate::sweep::{insist, is_injected};
use crate::validation::made_here;

pub(crate) use mapped::{Addresses, PhysicalMemory};

/// The device of cases that are about one device.
pub(crate) const DEVICE: u32 = 0;

/// The devices whose streams used a block, as bits. The last bit stands for every device from 63 on.
#[derive(Debug, Default)]
struct Users(AtomicU64);

impl Users {
    fn add(&self, device: u32) {
        // Relaxed: only the owner of the block reads it, in `drop` or through `&self` after the call returned.
        self.0.fetch_or(1 << device.min(63), Ordering::Relaxed);
    }

    /// Waits for every device that used the block.
    fn settle(&self, backend: &dyn Backend) -> Result<()> {
        let bits = self.0.load(Ordering::Relaxed);
        (0..backend.device_count())
            .filter(|&device| bits & 1 << device.min(63) != 0)
            .try_for_each(|device| backend.synchronize_device(device))
    }

    /// Waits for every device, for a dropped guard that has no later chance.
    fn settle_at_last(&self, backend: &dyn Backend) {
        // An error here shows in the count of living objects, or the device is lost.
        let _ = insist(|| self.settle(backend));
    }
}

/// A range of bytes of a living block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span<'a> {
    location: Location,
    bytes: usize,
    users: &'a Users,
}

impl<'a> Span<'a> {
    /// Cuts a range from a block.
    fn cut(block: Location, bytes: usize, users: &'a Users, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= bytes, "a case cuts {range:?} from {bytes} bytes");
        let location = match block {
            Location::Host(ptr) => Location::Host(ptr.offset(range.start)),
            Location::Device { device, ptr } => Location::Device { device, ptr: ptr.offset(range.start) },
        };
        Self { location, bytes: range.len(), users }
    }

    /// Returns the empty range at the start.
    pub(crate) fn cut_to_nothing(self) -> Self {
        Self { bytes: 0, ..self }
    }

    fn address(&self) -> u64 {
        match self.location {
            Location::Host(ptr) => ptr.address() as u64,
            Location::Device { ptr, .. } => ptr.get(),
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        let same_memory = match (self.location, other.location) {
            (Location::Host(_), Location::Host(_)) => true,
            (Location::Device { device: a, .. }, Location::Device { device: b, .. }) => a == b,
            _ => false,
        };
        same_memory
            && self.address() < other.address() + other.bytes as u64
            && other.address() < self.address() + self.bytes as u64
    }
}

// ------------------------------------------------------------------------------------------------- objects with an id

/// The id of an object that a guard destroys.
pub(crate) trait Destroy: Copy {
    /// Waits for the work that the object must outlive.
    fn settle(self, _: &dyn Backend) -> Result<()> {
        Ok(())
    }

    fn destroy(self, backend: &dyn Backend) -> Result<()>;
}

impl Destroy for StreamId {
    fn settle(self, backend: &dyn Backend) -> Result<()> {
        backend.synchronize_stream(self)
    }

    fn destroy(self, backend: &dyn Backend) -> Result<()> {
        backend.destroy_stream(self)
    }
}

impl Destroy for EventId {
    fn destroy(self, backend: &dyn Backend) -> Result<()> {
        backend.destroy_event(self)
    }
}

impl Destroy for GraphId {
    fn destroy(self, backend: &dyn Backend) -> Result<()> {
        backend.destroy_graph(self)
    }
}

impl Destroy for GraphExecId {
    fn destroy(self, backend: &dyn Backend) -> Result<()> {
        backend.destroy_graph_exec(self)
    }
}

/// An object of the backend, destroyed when dropped.
#[derive(Debug)]
pub(crate) struct Object<'b, I: Destroy> {
    backend: &'b dyn Backend,
    id: I,
    owned: bool,
}

impl<'b, I: Destroy> Object<'b, I> {
    /// Takes ownership of an id that the backend issued.
    pub(crate) fn adopted(backend: &'b dyn Backend, id: I) -> Self {
        Self { backend, id, owned: true }
    }

    pub(crate) fn id(&self) -> I {
        self.id
    }

    /// Destroys the object now, without waiting, and returns the stale id.
    pub(crate) fn destroy(mut self) -> Result<I> {
        self.id.destroy(self.backend)?;
        self.owned = false;
        Ok(self.id)
    }
}

impl<I: Destroy> Drop for Object<'_, I> {
    fn drop(&mut self) {
        if self.owned {
            // An error here shows in the count of living objects.
            let _ = insist(|| self.id.settle(self.backend));
            let _ = insist(|| self.id.destroy(self.backend));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- streams

/// A stream, synchronized and destroyed when dropped.
pub(crate) type Stream<'b> = Object<'b, StreamId>;

impl<'b> Stream<'b> {
    #[track_caller]
    pub(crate) fn new(backend: &'b dyn Backend) -> Result<Self> {
        Self::on(backend, DEVICE)
    }

    #[track_caller]
    pub(crate) fn on(backend: &'b dyn Backend, device: u32) -> Result<Self> {
        Self::with_options(backend, device, &StreamOptions::new())
    }

    #[track_caller]
    pub(crate) fn with_options(backend: &'b dyn Backend, device: u32, options: &StreamOptions) -> Result<Self> {
        made_here();
        Ok(Self::adopted(backend, backend.create_stream(device, options)?))
    }

    /// Wraps a stream that the guard must not destroy: a default stream.
    pub(crate) fn borrowed(backend: &'b dyn Backend, id: StreamId) -> Self {
        Self { backend, id, owned: false }
    }

    pub(crate) fn query(&self) -> Result<Completion> {
        self.backend.query_stream(self.id)
    }

    pub(crate) fn is_pending(&self) -> Result<bool> {
        Ok(self.query()? == Completion::Pending)
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.backend.synchronize_stream(self.id)
    }

    pub(crate) fn wait(&self, event: &Event<'_>) -> Result<()> {
        self.backend.stream_wait_event(self.id, event.id)
    }

    pub(crate) fn record(&self, event: &Event<'_>) -> Result<()> {
        self.backend.record_event(event.id, self.id)
    }

    /// Enqueues a copy of `src` to the beginning of `dst`.
    pub(crate) fn copy(&self, dst: Span<'_>, src: Span<'_>) -> Result<()> {
        assert!(src.bytes <= dst.bytes, "a case copies {} bytes to a span of {}", src.bytes, dst.bytes);
        let dst = Span { bytes: src.bytes, ..dst };
        assert!(!dst.overlaps(&src), "a case copies between overlapping spans");
        dst.users.add(self.id.device());
        src.users.add(self.id.device());
        let copy = MemoryCopy::new(dst.location, src.location, src.bytes);
        // SAFETY: spans lie inside one living block each and do not overlap, as just checked; blocks settle the devices
        // noted as users before they are freed and before the CPU touches them.
        unsafe { self.backend.copy(&copy, self.id) }
    }

    /// Enqueues a copy of rows. Both spans end with the last row or behind it.
    pub(crate) fn copy_rows(&self, dst: Span<'_>, src: Span<'_>, shape: CopyShape) -> Result<()> {
        let fits = |bytes: Option<usize>, span: Span<'_>| bytes.is_some_and(|bytes| bytes <= span.bytes);
        let is_inside = fits(shape.dst_bytes(), dst) && fits(shape.src_bytes(), src);
        assert!(is_inside, "a case copies {shape:?} from a span of {} to one of {} bytes", src.bytes, dst.bytes);
        let meets =
            dst.overlaps(&src) && shape.check("copy_2d").is_ok() && shape.overlaps(dst.address(), src.address());
        assert!(!meets, "a case copies between overlapping rows");
        dst.users.add(self.id.device());
        src.users.add(self.id.device());
        let copy = MemoryCopy2d::new(dst.location, src.location, shape);
        // SAFETY: as for `copy`. A shape whose rows overlap is refused.
        unsafe { self.backend.copy_2d(&copy, self.id) }
    }

    /// Enqueues a fill of all elements of `dst`.
    pub(crate) fn fill(&self, dst: Span<'_>, pattern: FillPattern) -> Result<()> {
        let Location::Device { device, ptr } = dst.location else { panic!("a case fills host memory") };
        dst.users.add(self.id.device());
        let fill = MemoryFill::new(device, ptr, pattern, dst.bytes / pattern.bytes());
        // SAFETY: the span lies inside a living block, which settles the device before it is freed.
        unsafe { self.backend.fill(&fill, self.id) }
    }

    /// Enqueues a fill of all bytes.
    pub(crate) fn set(&self, dst: Span<'_>, byte: u8) -> Result<()> {
        self.fill(dst, FillPattern::U8(byte))
    }
}

// ----------------------------------------------------------------------------------------------------------- events

/// An event, destroyed when dropped.
pub(crate) type Event<'b> = Object<'b, EventId>;

impl<'b> Event<'b> {
    #[track_caller]
    pub(crate) fn new(backend: &'b dyn Backend) -> Result<Self> {
        Self::with_options(backend, DEVICE, &EventOptions::new())
    }

    #[track_caller]
    pub(crate) fn on(backend: &'b dyn Backend, device: u32) -> Result<Self> {
        Self::with_options(backend, device, &EventOptions::new())
    }

    #[track_caller]
    pub(crate) fn with_options(backend: &'b dyn Backend, device: u32, options: &EventOptions) -> Result<Self> {
        made_here();
        Ok(Self::adopted(backend, backend.create_event(device, options)?))
    }

    /// Creates an event that other processes can open.
    #[track_caller]
    pub(crate) fn interprocess(backend: &'b dyn Backend) -> Result<Self> {
        Self::with_options(backend, DEVICE, &EventOptions::new().with_interprocess())
    }

    /// Opens an event of another process.
    #[track_caller]
    pub(crate) fn open(backend: &'b dyn Backend, device: u32, handle: &EventHandle) -> Result<Self> {
        let sharing = sharing(backend, "open_event")?;
        made_here();
        Ok(Self::adopted(backend, sharing.open_event(device, handle)?))
    }

    pub(crate) fn export(&self) -> Result<EventHandle> {
        sharing(self.backend, "export_event")?.export_event(self.id)
    }

    pub(crate) fn query(&self) -> Result<Completion> {
        self.backend.query_event(self.id)
    }

    pub(crate) fn is_pending(&self) -> Result<bool> {
        Ok(self.query()? == Completion::Pending)
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.backend.synchronize_event(self.id)
    }
}

// ---------------------------------------------------------------------------------------------------- device memory

/// A block of device memory, given back when dropped.
#[derive(Debug)]
pub(crate) struct Block<'b> {
    backend: &'b dyn Backend,
    device: u32,
    ptr: DevicePtr,
    bytes: usize,
    origin: Origin<'b>,
    users: Users,
    /// Whether the block has not been given back.
    alive: bool,
}

/// Where a block came from, which says how it is given back.
#[derive(Debug)]
enum Origin<'b> {
    Allocated {
        /// The stream on which the block was allocated and is freed.
        ordered_on: Option<StreamId>,
    },
    /// Another process allocated it.
    Opened(Arc<dyn IpcSharing>),
    /// It is mapped at these addresses.
    Mapped(Addresses<'b>),
}

impl<'b> Block<'b> {
    #[track_caller]
    pub(crate) fn new(backend: &'b dyn Backend, bytes: usize) -> Result<Self> {
        Self::on(backend, DEVICE, bytes)
    }

    #[track_caller]
    pub(crate) fn on(backend: &'b dyn Backend, device: u32, bytes: usize) -> Result<Self> {
        Self::with_kind(backend, device, bytes, DeviceMemoryKind::Plain)
    }

    #[track_caller]
    pub(crate) fn with_kind(
        backend: &'b dyn Backend,
        device: u32,
        bytes: usize,
        kind: DeviceMemoryKind,
    ) -> Result<Self> {
        made_here();
        let ptr = backend.allocate(device, &AllocateOptions::new(bytes).with_kind(kind))?;
        let ordered_on = match kind {
            DeviceMemoryKind::StreamOrdered(stream) => Some(stream),
            _ => None,
        };
        let origin = Origin::Allocated { ordered_on };
        Ok(Self { backend, device, ptr, bytes, origin, users: Users::default(), alive: true })
    }

    /// Opens memory of another process.
    #[track_caller]
    pub(crate) fn open(backend: &'b dyn Backend, device: u32, handle: &MemoryHandle) -> Result<Self> {
        let sharing = sharing(backend, "open_memory")?;
        made_here();
        let (ptr, bytes) = (sharing.open_memory(device, handle)?, handle.bytes as usize);
        let origin = Origin::Opened(sharing);
        Ok(Self { backend, device, ptr, bytes, origin, users: Users::default(), alive: true })
    }

    /// Returns whether another process allocated the block.
    pub(crate) fn is_opened(&self) -> bool {
        matches!(self.origin, Origin::Opened(_))
    }

    /// Allocates a block that holds `bytes`.
    #[track_caller]
    pub(crate) fn holding(backend: &'b dyn Backend, bytes: &[u8]) -> Result<Self> {
        let [block] = holding_all(backend, DEVICE, [bytes])?;
        Ok(block)
    }

    /// Allocates a block whose bytes are all `byte`.
    #[track_caller]
    pub(crate) fn filled(backend: &'b dyn Backend, bytes: usize, byte: u8) -> Result<Self> {
        Self::filled_on(backend, DEVICE, bytes, byte)
    }

    #[track_caller]
    pub(crate) fn filled_on(backend: &'b dyn Backend, device: u32, bytes: usize, byte: u8) -> Result<Self> {
        let block = Self::on(backend, device, bytes)?;
        let stream = Stream::on(backend, device)?;
        stream.set(block.all(), byte)?;
        stream.synchronize()?;
        drop(stream);
        Ok(block)
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn all(&self) -> Span<'_> {
        self.span(0..self.bytes)
    }

    pub(crate) fn span(&self, range: Range<usize>) -> Span<'_> {
        Span::cut(Location::Device { device: self.device, ptr: self.ptr }, self.bytes, &self.users, range)
    }

    /// Writes bytes from the CPU, after all work that is enqueued on the block, and waits.
    #[track_caller]
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.users.settle(self.backend)?;
        write_span(self.backend, self.device, self.span(offset..offset + bytes.len()), bytes)
    }

    /// Exports a handle of the block for other processes.
    pub(crate) fn export(&self, transport: Transport) -> Result<MemoryHandle> {
        let sharing = sharing(self.backend, "export_memory")?;
        // SAFETY: the block came from `allocate` for this device and is freed when this value is dropped only.
        unsafe { sharing.export_memory(self.device, self.ptr, transport) }
    }

    /// Reads the whole block, after all work that is enqueued on it.
    #[track_caller]
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        Ok(read_all(self.backend, &[self])?.swap_remove(0))
    }

    /// Frees stream-ordered memory now, in the order of its stream, without waiting.
    pub(crate) fn free_in_order(mut self) -> Result<()> {
        assert!(
            matches!(self.origin, Origin::Allocated { ordered_on: Some(_) }),
            "a case frees other memory in stream order"
        );
        // Cases that call this use the block on the stream that it is freed on only.
        self.release()
    }

    /// Frees stream-ordered memory now, in the order of another stream than the one of its allocation, without waiting.
    pub(crate) fn free_in_order_of(mut self, stream: &Stream<'_>) -> Result<()> {
        let Origin::Allocated { ordered_on: Some(_) } = self.origin else {
            return self.give_back();
        };
        self.origin = Origin::Allocated { ordered_on: Some(stream.id()) };
        // Cases that call this let the stream wait for all other work that uses the block.
        self.release()
    }

    /// Gives the block back now, after all work that is enqueued on it, and returns the answer.
    pub(crate) fn give_back(mut self) -> Result<()> {
        let settled = insist(|| self.users.settle(self.backend));
        settled.and(self.release())
    }

    /// Frees or closes the memory. Called once, when the devices that were handed the block have done all that was enqueued,
    /// or do it before the free in stream order.
    fn release(&mut self) -> Result<()> {
        self.alive = false;
        match &mut self.origin {
            Origin::Allocated { ordered_on } => {
                // SAFETY: the pointer came from `allocate` and is freed here only, once (a call that a fault kept from the
                // backend freed nothing), when no device uses it any more.
                insist(|| unsafe { self.backend.free(self.device, self.ptr, *ordered_on) })
            }
            // SAFETY: as above; the address came from `open_memory`.
            Origin::Opened(sharing) => insist(|| unsafe { sharing.close_memory(self.device, self.ptr) }),
            Origin::Mapped(addresses) => addresses.release(),
        }
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        if self.alive {
            self.users.settle_at_last(self.backend);
            let _ = self.release();
        }
    }
}

/// Closes an address that is not open, which the backend must refuse.
pub(crate) fn close_unknown(backend: &dyn Backend, device: u32, ptr: DevicePtr) -> Result<()> {
    let sharing = sharing(backend, "close_memory")?;
    // SAFETY: no open memory begins at that address, so no work can use it.
    unsafe { sharing.close_memory(device, ptr) }
}

/// Returns the sharing of the backend, or `Unsupported`.
pub(crate) fn sharing(backend: &dyn Backend, operation: &'static str) -> Result<Arc<dyn IpcSharing>> {
    backend.ipc_sharing().ok_or_else(|| Error::lacks(operation, "shareable_memory"))
}

/// Writes bytes from the CPU to a span of device memory, and waits.
#[track_caller]
pub(crate) fn write_span(backend: &dyn Backend, device: u32, span: Span<'_>, bytes: &[u8]) -> Result<()> {
    let pinned = Pinned::holding(backend, bytes)?;
    let stream = Stream::on(backend, device)?;
    stream.copy(span, pinned.all())?;
    stream.synchronize()
}

/// Reads a span of device memory, and waits.
#[track_caller]
pub(crate) fn read_span(backend: &dyn Backend, device: u32, span: Span<'_>) -> Result<Vec<u8>> {
    let pinned = Pinned::new(backend, span.bytes)?;
    let stream = Stream::on(backend, device)?;
    stream.copy(pinned.all(), span)?;
    stream.synchronize()?;
    pinned.read()
}

/// Reads several blocks of one device, after all work that is enqueued on them, through one pinned block. A pinned block and
/// a stream for each block would take most of the time of a case.
#[track_caller]
pub(crate) fn read_all(backend: &dyn Backend, blocks: &[&Block<'_>]) -> Result<Vec<Vec<u8>>> {
    let device = blocks.first().map_or(DEVICE, |block| block.device);
    let pinned = Pinned::new(backend, blocks.iter().map(|block| block.bytes).sum())?;
    let stream = Stream::on(backend, device)?;
    let mut end = 0;
    for block in blocks {
        block.users.settle(backend)?;
        let start = end;
        end += block.bytes;
        stream.copy(pinned.span(start..end), block.all())?;
    }
    stream.synchronize()?;
    let bytes = pinned.read()?;
    let mut rest = bytes.as_slice();
    Ok(blocks.iter().map(|block| rest.split_off(..block.bytes).unwrap_or_default().to_vec()).collect())
}

/// Allocates blocks on a device that hold these bytes, through one pinned block.
#[track_caller]
pub(crate) fn holding_all<'b, const N: usize>(
    backend: &'b dyn Backend,
    device: u32,
    contents: [&[u8]; N],
) -> Result<[Block<'b>; N]> {
    let pinned = Pinned::holding(backend, &contents.concat())?;
    let stream = Stream::on(backend, device)?;
    let mut blocks = Vec::with_capacity(N);
    let mut end = 0;
    for content in contents {
        let start = end;
        end += content.len();
        let block = Block::on(backend, device, content.len())?;
        stream.copy(block.all(), pinned.span(start..end))?;
        blocks.push(block);
    }
    stream.synchronize()?;
    Ok(blocks.try_into().expect("one block for each content"))
}

// ----------------------------------------------------------------------------------------------- captures and graphs

/// Memory that a graph may have recorded.
pub(crate) trait Memory {}

impl Memory for Block<'_> {}
impl Memory for Pinned<'_> {}
impl Memory for Registered<'_> {}

/// An open capture of a stream. If dropped, the capture ends, and its graph is destroyed.
#[derive(Debug)]
pub(crate) struct Capture<'s, 'b> {
    stream: &'s Stream<'b>,
    open: bool,
}

impl<'s, 'b> Capture<'s, 'b> {
    pub(crate) fn begin(stream: &'s Stream<'b>, mode: CaptureMode) -> Result<Self> {
        stream.backend.begin_capture(stream.id, mode)?;
        Ok(Self { stream, open: true })
    }

    /// Ends the capture. `memory` is all recorded memory, which must outlive the graph.
    #[track_caller]
    pub(crate) fn end<'m>(mut self, memory: &[&'m dyn Memory]) -> Result<Graph<'m>>
    where
        'b: 'm,
    {
        let _ = memory;
        let backend = self.stream.backend;
        let id = end_capture(backend, self.stream.id);
        // A call that a fault refused leaves the capture open.
        self.open = id.as_ref().is_err_and(is_injected);
        Ok(Graph::adopted(backend, id?))
    }
}

impl Drop for Capture<'_, '_> {
    fn drop(&mut self) {
        if self.open {
            let backend = self.stream.backend;
            let _ = insist(|| {
                let graph = end_capture(backend, self.stream.id)?;
                insist(|| backend.destroy_graph(graph))
            });
        }
    }
}

/// A graph, destroyed when dropped. It does not outlive the memory that it has recorded.
pub(crate) type Graph<'m> = Object<'m, GraphId>;

impl<'m> Graph<'m> {
    #[track_caller]
    pub(crate) fn instantiate(&self) -> Result<Executable<'m>> {
        made_here();
        Ok(Executable::adopted(self.backend, self.backend.instantiate_graph(self.id)?))
    }
}

/// An executable graph, destroyed when dropped, without waiting.
pub(crate) type Executable<'m> = Object<'m, GraphExecId>;

impl Executable<'_> {
    /// Enqueues one execution. A case launches a graph on another stream only after the earlier launches are complete.
    pub(crate) fn launch(&self, stream: &Stream<'_>) -> Result<()> {
        // SAFETY: what was recorded lives longer than this value, as `Capture::end` was handed all of it, and settles
        // the device, which it was handed when it was recorded, before it is freed. Launches on one stream run one after
        // the other.
        unsafe { self.backend.launch_graph(self.id, stream.id) }
    }
}

// ---------------------------------------------------------------------------------------------------- pinned memory

/// A block of page-locked host memory, freed when dropped.
#[derive(Debug)]
pub(crate) struct Pinned<'b> {
    backend: &'b dyn Backend,
    allocator: Arc<dyn HostAllocator>,
    ptr: HostPtr,
    bytes: usize,
    users: Users,
}

impl<'b> Pinned<'b> {
    #[track_caller]
    pub(crate) fn new(backend: &'b dyn Backend, bytes: usize) -> Result<Self> {
        Self::with_options(backend, bytes, &HostOptions::new())
    }

    #[track_caller]
    pub(crate) fn with_options(backend: &'b dyn Backend, bytes: usize, options: &HostOptions) -> Result<Self> {
        let allocator = backend.host_allocator();
        made_here();
        let ptr = allocator.allocate(bytes, options)?;
        Ok(Self { backend, allocator, ptr, bytes, users: Users::default() })
    }

    /// Allocates a block that holds `bytes`.
    #[track_caller]
    pub(crate) fn holding(backend: &'b dyn Backend, bytes: &[u8]) -> Result<Self> {
        let pinned = Self::new(backend, bytes.len())?;
        pinned.write(bytes)?;
        Ok(pinned)
    }

    pub(crate) fn ptr(&self) -> HostPtr {
        self.ptr
    }

    pub(crate) fn all(&self) -> Span<'_> {
        self.span(0..self.bytes)
    }

    pub(crate) fn span(&self, range: Range<usize>) -> Span<'_> {
        Span::cut(Location::Host(self.ptr), self.bytes, &self.users, range)
    }

    /// Writes bytes at the beginning, after all devices have stopped using the block.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<()> {
        self.write_at(0, bytes)
    }

    /// Writes bytes at an offset, after all devices have stopped using the block.
    pub(crate) fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let end = offset + bytes.len();
        assert!(end <= self.bytes, "a case writes up to byte {end} of {}", self.bytes);
        self.users.settle(self.backend)?;
        // SAFETY: the block is that long, and no device uses it any more.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr.offset(offset).as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Reads the whole block, after all devices have stopped using it.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        self.users.settle(self.backend)?;
        // SAFETY: as just said.
        Ok(unsafe { self.read_now() })
    }

    /// Reads the whole block without waiting, for cases that show the effect of an earlier wait.
    ///
    /// # Safety
    ///
    /// The backend must have promised that the work that writes the block is complete.
    pub(crate) unsafe fn read_now(&self) -> Vec<u8> {
        // SAFETY: the caller promised that no work writes the block, and the slice ends here.
        unsafe { self.bytes_now(0..self.bytes) }.to_vec()
    }

    /// Returns bytes of the block without waiting and without copying them.
    ///
    /// # Safety
    ///
    /// The backend must have promised that the work that wrote the range is complete. No work may write it while the slice lives.
    pub(crate) unsafe fn bytes_now(&self, range: Range<usize>) -> &[u8] {
        assert!(range.end <= self.bytes, "a case reads {range:?} of {} bytes", self.bytes);
        // SAFETY: the range is inside the block, and the caller promised that it was written and that no work writes it.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.users.settle_at_last(self.backend);
        // SAFETY: the pointer came from this allocator and is freed here only (a call that a fault kept from the backend freed
        // nothing); no device uses the block any more.
        let _ = insist(|| unsafe { self.allocator.free(self.ptr) });
    }
}

/// A file in memory for [`RegisteredFile`]s. Its size cannot change.
pub(crate) fn file_in_memory(content: &[u8]) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let file = memfd_create("highwater-case", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .expect("the system has files in memory");
    write_all(&file, content);
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).expect("a new file can be sealed");
    file
}

/// Prevents every later mapping of a file from writing it. Such a mapping cannot be made writable.
pub(crate) fn seal_writes(file: &OwnedFd) {
    rustix::fs::fcntl_add_seals(file, rustix::fs::SealFlags::FUTURE_WRITE).expect("the file can be sealed");
}

/// Reads a whole file in memory.
pub(crate) fn read_file(file: &OwnedFd, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    let mut read = 0;
    while read < bytes {
        let count = rustix::io::pread(file, &mut content[read..], read as u64).expect("a file in memory has bytes");
        assert!(count > 0, "a file in memory has {read} bytes instead of {bytes}");
        read += count;
    }
    content
}

/// A mapping of a file in memory, page-locked while the guard lives.
#[derive(Debug)]
pub(crate) struct RegisteredFile<'b> {
    backend: &'b dyn Backend,
    allocator: Arc<dyn HostAllocator>,
    file: OwnedFd,
    mapping: std::ptr::NonNull<u8>,
    bytes: usize,
    registered: bool,
    users: Users,
}

impl<'b> RegisteredFile<'b> {
    /// Registers a file that holds these bytes, a multiple of the page size.
    #[track_caller]
    pub(crate) fn new(backend: &'b dyn Backend, content: &[u8]) -> Result<Self> {
        Self::of(backend, &file_in_memory(content), content.len(), true)
    }

    /// Maps and registers the first `bytes` of a file, a multiple of the page size. With `read_only`, the mapping is read-only.
    #[track_caller]
    pub(crate) fn of(backend: &'b dyn Backend, file: &OwnedFd, bytes: usize, read_only: bool) -> Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let file = file.try_clone().expect("the process has a descriptor for a case");
        let protection = if read_only { ProtFlags::READ } else { ProtFlags::READ | ProtFlags::WRITE };
        // SAFETY: a new mapping of a file of this length, which nobody shortens, at an address of the kernel's choice.
        let mapping = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) };
        let mapping = mapping.ok().and_then(|start| std::ptr::NonNull::new(start.cast::<u8>()));
        let mapping = mapping.expect("the system has addresses for a case");
        let (allocator, users) = (backend.host_allocator(), Users::default());
        let mut new = Self { backend, allocator, file, mapping, bytes, registered: false, users };
        made_here();
        let options = HostOptions::new().with_read_only(read_only);
        // SAFETY: the mapping is readable, and writable unless `read_only`. It lives until after `unregister`, in `drop`. Cases
        // only copy from a mapping that they make for reading.
        unsafe { new.allocator.register(HostPtr::new(mapping), bytes, &options)? };
        new.registered = true;
        Ok(new)
    }

    /// Writes the file, once no device uses the memory.
    pub(crate) fn write(&self, content: &[u8]) {
        let _ = self.users.settle(self.backend);
        write_all(&self.file, content);
    }

    pub(crate) fn all(&self) -> Span<'_> {
        self.span(0..self.bytes)
    }

    pub(crate) fn span(&self, range: Range<usize>) -> Span<'_> {
        Span::cut(Location::Host(HostPtr::new(self.mapping)), self.bytes, &self.users, range)
    }
}

/// Writes a file from its beginning.
fn write_all(file: &OwnedFd, content: &[u8]) {
    let mut written = 0;
    while written < content.len() {
        written += rustix::io::pwrite(file, &content[written..], written as u64).expect("a file in memory takes bytes");
    }
}

impl Drop for RegisteredFile<'_> {
    fn drop(&mut self) {
        self.users.settle_at_last(self.backend);
        if self.registered {
            // SAFETY: registered with this address, and no device uses it.
            let gone = insist(|| unsafe { self.allocator.unregister(HostPtr::new(self.mapping)) });
            if gone.is_err() {
                // The device may still use the pages.
                return;
            }
        }
        // SAFETY: the mapping has this length, and neither a device nor other code uses it.
        let _ = unsafe { rustix::mm::munmap(self.mapping.as_ptr().cast(), self.bytes) };
    }
}

/// Memory of this process, parts of which are page-locked while the guard lives, by one registration each.
#[derive(Debug)]
pub(crate) struct Registered<'b> {
    backend: &'b dyn Backend,
    allocator: Arc<dyn HostAllocator>,
    memory: Pages,
    /// The registered parts.
    parts: Vec<Range<usize>>,
    users: Users,
}

impl<'b> Registered<'b> {
    /// Registers the memory as one part.
    #[track_caller]
    pub(crate) fn new(backend: &'b dyn Backend, bytes: &[u8]) -> Result<Self> {
        Self::in_pieces(backend, bytes, usize::MAX)
    }

    /// Registers the memory in pieces of this many bytes, a multiple of the page size. The last piece may be shorter.
    #[track_caller]
    pub(crate) fn in_pieces(backend: &'b dyn Backend, bytes: &[u8], piece_bytes: usize) -> Result<Self> {
        let mut new = Self::unregistered(backend, bytes);
        let all = new.memory.len();
        let piece_bytes = piece_bytes.min(all);
        for start in (0..all).step_by(piece_bytes) {
            new.register(start..(start + piece_bytes).min(all))?;
        }
        Ok(new)
    }

    /// Allocates memory and registers nothing.
    pub(crate) fn unregistered(backend: &'b dyn Backend, bytes: &[u8]) -> Self {
        let mut memory = Pages::new(bytes.len());
        memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        Self { backend, allocator: backend.host_allocator(), memory, parts: Vec::new(), users: Users::default() }
    }

    /// Registers a part. A case may pass a part that the backend must refuse.
    #[track_caller]
    pub(crate) fn register(&mut self, part: Range<usize>) -> Result<()> {
        assert!(part.end <= self.memory.len(), "a case registers {part:?} of {} bytes", self.memory.len());
        made_here();
        let start = self.memory.ptr().offset(part.start);
        // SAFETY: the pages are readable and writable and live until after `unregister`, in `drop`.
        unsafe { self.allocator.register(start, part.len(), &HostOptions::new())? };
        self.parts.push(part);
        Ok(())
    }

    pub(crate) fn memory(&self) -> &Pages {
        &self.memory
    }

    pub(crate) fn all(&self) -> Span<'_> {
        self.span(0..self.memory.len())
    }

    pub(crate) fn span(&self, range: Range<usize>) -> Span<'_> {
        Span::cut(Location::Host(self.memory.ptr()), self.memory.len(), &self.users, range)
    }

    /// Returns the bytes, after all devices have stopped using them.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        self.users.settle(self.backend)?;
        Ok(self.memory.bytes().to_vec())
    }

    /// Unregisters a part now, and returns the answer.
    pub(crate) fn unregister_part(&mut self, part: &Range<usize>) -> Result<()> {
        insist(|| self.users.settle(self.backend))?;
        self.parts.retain(|other| other != part);
        let start = self.memory.ptr().offset(part.start);
        // SAFETY: no device uses the pages any more.
        insist(|| unsafe { self.allocator.unregister(start) })
    }

    /// Unregisters all parts now, and returns the answer.
    pub(crate) fn unregister(&mut self) -> Result<()> {
        insist(|| self.users.settle(self.backend))?;
        let mut result = Ok(());
        for part in self.parts.clone() {
            result = result.and(self.unregister_part(&part));
        }
        result
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        if !self.parts.is_empty() {
            let _ = self.unregister();
        }
    }
}

/// Whole pages of pageable memory.
#[derive(Debug)]
pub(crate) struct Pages {
    start: std::ptr::NonNull<u8>,
    layout: std::alloc::Layout,
}

impl Pages {
    /// The largest page size of the supported processors, without huge pages.
    const ALIGNMENT: usize = 65536;

    /// Allocates zeroed pages for at least `bytes` bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let bytes = bytes.max(1).next_multiple_of(Self::ALIGNMENT);
        let layout = std::alloc::Layout::from_size_align(bytes, Self::ALIGNMENT).expect("a case asks for few bytes");
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(start) = std::ptr::NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        Self { start, layout }
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    pub(crate) fn ptr(&self) -> HostPtr {
        HostPtr::new(self.start)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the pages are initialized and this long; devices write them only between calls that settle.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

// ---------------------------------------------------------------------------------------------------------- handles

/// A BLAS or Lt handle with its stream. If dropped, it waits for its device and is destroyed.
#[derive(Debug)]
pub(crate) struct Handle<'a> {
    backend: &'a dyn Backend,
    handle: Box<dyn BlasHandle>,
    device: u32,
    /// Keeps the workspace alive while the handle may use it.
    workspace: Option<&'a Block<'a>>,
    /// Whether the handle is dropped without a wait for its products.
    drops_in_use: bool,
}

impl<'a> Handle<'a> {
    #[track_caller]
    pub(crate) fn new(backend: &'a dyn Backend, kind: BlasKind, stream: &Stream<'_>) -> Result<Self> {
        let mut handle = Self::unbound(backend, kind, stream.id().device())?;
        handle.set_stream(stream)?;
        Ok(handle)
    }

    /// Creates a handle that is bound to no stream.
    #[track_caller]
    pub(crate) fn unbound(backend: &'a dyn Backend, kind: BlasKind, device: u32) -> Result<Self> {
        made_here();
        let handle = backend.create_blas_handle(device, &BlasOptions::new(kind))?;
        Ok(Self { backend, handle, device, workspace: None, drops_in_use: false })
    }

    /// Returns the handle for its safe methods.
    pub(crate) fn raw_mut(&mut self) -> &mut dyn BlasHandle {
        &mut *self.handle
    }

    /// Drops the handle while its products are outstanding. Their blocks and the workspace outlive it and settle the device.
    pub(crate) fn drop_in_use(mut self) {
        self.drops_in_use = true;
    }

    pub(crate) fn set_stream(&mut self, stream: &Stream<'_>) -> Result<()> {
        self.handle.set_stream(stream.id())
    }

    /// Binds the bytes `range` of a block as the workspace, after all earlier work is complete.
    pub(crate) fn set_workspace(&mut self, block: &'a Block<'a>, range: Range<usize>) -> Result<()> {
        self.backend.synchronize_device(self.device)?;
        let _ = block.span(range.clone());
        block.users.add(self.device);
        let workspace = Workspace { ptr: block.ptr.offset(range.start), bytes: range.len() };
        self.workspace = Some(block);
        // SAFETY: the block outlives the handle, by its lifetime, and belongs to the device; nothing is outstanding on
        // the device, and cases give a workspace to one handle at a time.
        unsafe { self.handle.set_workspace(Some(workspace)) }
    }

    /// Binds a workspace if the backend supports it. Otherwise the handle keeps its own.
    pub(crate) fn offer_workspace(&mut self, block: &'a Block<'a>, range: Range<usize>) -> Result<()> {
        if self.backend.capabilities(self.device)?.blas_workspace { self.set_workspace(block, range) } else { Ok(()) }
    }

    /// Enqueues a product of matrices at these offsets of the blocks.
    pub(crate) fn gemm(&mut self, gemm: &Gemm, operands: [(&Block<'_>, usize); 3]) -> Result<()> {
        let [a, b, c] = reach(&gemm.shape, self.device, operands);
        let mut gemm = *gemm;
        (gemm.a, gemm.b, gemm.c) = (a, b, c);
        // SAFETY: the three ranges lie inside living blocks of the device that do not overlap, as `reach` checked, and
        // blocks settle the device before they are freed.
        unsafe { self.handle.gemm(&gemm) }
    }

    /// Enqueues one run of a plan of `shape`. D is C, or lies in `destination` at the offset of C. The bias lies between
    /// guards.
    pub(crate) fn run_plan(
        &mut self,
        plan: PlanId,
        shape: &GemmShape,
        scale: (f64, f64),
        operands: [(&Block<'_>, usize); 3],
        destination: Option<&Block<'_>>,
        bias: Option<&Block<'_>>,
    ) -> Result<()> {
        let [a, b, c] = reach(shape, self.device, operands);
        let [factor_a, factor_b, (block_c, offset)] = operands;
        let block_d = destination.unwrap_or(block_c);
        let [_, _, d] = reach(shape, self.device, [factor_a, factor_b, (block_d, offset)]);
        if let Some(bias) = bias {
            let bytes = shape.m * shape.output.bytes() + 2 * GUARD_BYTES;
            assert!(bias.bytes >= bytes, "a case has a bias that is too short");
            bias.users.add(self.device);
        }
        let bias = bias.map(|bias| bias.ptr().offset(GUARD_BYTES));
        let mut arguments = PlanArguments::new(a, b, d, bias);
        (arguments.alpha, arguments.beta) = scale;
        arguments.c = c;
        // SAFETY: as in `gemm`; the bias is a block of its own, and D is C or another block.
        unsafe { self.handle.run_plan(plan, &arguments) }
    }
}

/// Checks that a product stays inside its blocks, notes the use, and returns the addresses.
fn reach(shape: &GemmShape, device: u32, operands: [(&Block<'_>, usize); 3]) -> [DevicePtr; 3] {
    let extents = shape.extents("conformance").expect("a case has a valid shape");
    let (factor, result) = (shape.data_type.bytes(), shape.output.bytes());
    let bytes = [extents.a * factor, extents.b * factor, extents.c * result];
    let mut addresses = [DevicePtr::new(0); 3];
    for (((block, offset), bytes), address) in operands.into_iter().zip(bytes).zip(&mut addresses) {
        assert_eq!(block.device, device, "a case multiplies a matrix of another device");
        let _ = block.span(offset..offset + bytes);
        block.users.add(device);
        *address = block.ptr.offset(offset);
    }
    let [(a, _), (b, _), (c, _)] = operands;
    assert!(c.ptr != a.ptr && c.ptr != b.ptr, "a case multiplies in place");
    addresses
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if self.drops_in_use {
            return;
        }
        let _ = insist(|| self.backend.synchronize_device(self.device));
        // Some cases have destroyed it already. The error then means nothing.
        let _ = insist(|| self.handle.destroy());
    }
}

/// Ends a capture of a case.
#[track_caller]
pub(crate) fn end_capture(backend: &dyn Backend, stream: StreamId) -> Result<GraphId> {
    made_here();
    // SAFETY: cases make their own streams, and no runtime uses the backend meanwhile: every capture is the case's own.
    unsafe { backend.end_capture(stream) }
}
