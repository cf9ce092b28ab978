//! Cases by construction: each kind of work in the cells of a table.
//!
//! A [`Cell`] says on which device and stream the work runs, in which thread, in what memory, whether it is recorded in a
//! capture, and how its end is observed. In every cell, work runs between two other operations of its stream, behind work that
//! is outstanding, and its result is compared byte for byte. Every value of each axis runs with the plain values of the other
//! axes. Further cells are drawn from the seed of the run, which a failure names.
//!
//! Work that is added to [`Work`] has all cells. An axis gets a value by one line in [`Cell::values`].

use std::fmt;
use std::ops::Range;

use highwater_hal::numbers::Coded as _;
use highwater_hal::{
    Backend, BlasKind, CaptureMode, Completion, CopyShape, DataType, DeviceMemoryKind, DevicePtr, Epilogue,
    FillPattern, Gemm, GemmShape, PlanId, PlanOptions, Result, StreamId, StreamOptions, StreamPriority, StridedBatch,
    Transport,
};

use crate::case::{Case, CaseResult, Failure, all_capabilities, cases, check};
use crate::device::{Block, Capture, Event, Executable, Handle, Memory, Object, Pinned, Span, Stream};
use crate::matrix::bytes_of_each;
use crate::seed::with_seed;
use crate::validation::made_here;

cases! {
    group "cells";
    fills: ["fill.exact", "fill.ordered", "stream.order", "stream.synchronize", "devices.synchronize", "event.wait-orders",
        "event.synchronize", "event.query", "stream.query", "stream.destroy-pending", "event.outlives-stream"]
        => in_cells(Work::Fill);
    copies_to_the_device: ["copy.exact", "copy.ordered", "stream.order", "event.wait-orders"] => in_cells(Work::ToDevice);
    copies_to_the_host: ["copy.exact", "copy.ordered", "stream.order", "event.wait-orders", "stream.synchronize",
        "event.synchronize", "devices.synchronize"] => in_cells(Work::ToHost);
    copies_on_a_device: ["copy.exact", "copy.ordered", "stream.order", "event.wait-orders", "capture.replay", "capture.joins"]
        => in_cells(Work::OnDevice);
    rows_on_a_device: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "event.wait-orders", "capture.replay", "capture.joins"]
        => in_cells(Work::Rows);
    copies_to_another_device: ["copy.exact", "copy.ordered", "event.wait-orders"]
        needs [TWO_DEVICES, has::peer_copy] => in_cells(Work::ToOther);
    copies_from_another_device: ["copy.exact", "copy.ordered", "event.wait-orders"]
        needs [TWO_DEVICES, has::peer_copy] => in_cells(Work::FromOther);
    products: ["gemm.value", "gemm.beta", "blas.stream-bound", "capture.replay"] needs [has::gemm_f32] => in_cells(Work::Gemm);
    batches: ["gemm.strided-batch", "gemm.beta", "blas.stream-bound", "capture.replay"]
        needs [has::gemm_f32, has::strided_batch] => in_cells(Work::Batch);
    plans: ["plan.value", "blas.stream-bound", "capture.replay"] needs [has::gemm_f32, has::lt_plans] => in_cells(Work::Plan);
}

/// The rows of the square matrices of f32 that all work reads and writes.
const SIZE: usize = 16;
const ELEMENTS: usize = SIZE * SIZE;
/// The elements of large operands: more than a mebibyte, and no multiple of a page.
const LARGE_ELEMENTS: usize = (1 << 18) + 100;

/// The kinds of work. Each makes an output from an input and, if it adds, from the old output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Fill,
    ToDevice,
    ToHost,
    OnDevice,
    /// Two copies of every second row.
    Rows,
    ToOther,
    FromOther,
    Gemm,
    Batch,
    Plan,
}

impl Work {
    /// Each kind of work, in the order of the cases.
    const ALL: [Self; CASES.len()] = [
        Self::Fill,
        Self::ToDevice,
        Self::ToHost,
        Self::OnDevice,
        Self::Rows,
        Self::ToOther,
        Self::FromOther,
        Self::Gemm,
        Self::Batch,
        Self::Plan,
    ];

    fn multiplies(self) -> Option<BlasKind> {
        match self {
            Self::Gemm | Self::Batch => Some(BlasKind::Blas),
            Self::Plan => Some(BlasKind::Lt),
            _ => None,
        }
    }

    /// Returns the rows of the identity matrix that a product has as its second factor.
    fn rows(self) -> usize {
        if self == Self::Batch { SIZE / 2 } else { SIZE }
    }

    /// Returns the shape of a product over all elements.
    fn shape(self) -> GemmShape {
        let rows = self.rows();
        let shape = GemmShape::new(DataType::F32, rows, rows, rows);
        let stride = rows * rows;
        match self {
            Self::Batch => {
                let count = ELEMENTS / stride;
                shape.with_batch(StridedBatch { count, stride_a: stride, stride_b: 0, stride_c: stride })
            }
            _ => shape,
        }
    }

    /// Returns the output. Products are `ALPHA * input * identity + old`.
    fn expected(self, input: &[f32], old: &[f32]) -> Vec<f32> {
        match self {
            Self::Fill => vec![FILLED; input.len()],
            work if work.multiplies().is_some() => input.iter().zip(old).map(|(a, c)| ALPHA * a + c).collect(),
            _ => input.to_vec(),
        }
    }
}

const FILLED: f32 = 3.5;
const ALPHA: f32 = 2.0;

/// The kinds of streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamKind {
    Normal,
    Low,
    High,
    Legacy,
    PerThread,
    Foreign,
}

/// How work reaches its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// By a call.
    Direct,
    /// Recorded, and launched in each round.
    Graph,
    /// Recorded on a stream that joined the capture.
    Member,
    /// Recorded on a stream that joined through another member.
    Chain,
}

/// How the end of the work is observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Observer {
    Stream,
    Device,
    Event,
    StreamQuery,
    EventQuery,
    /// Another stream waits for an event.
    OtherStream,
    /// The same, and the stream of the work is destroyed before.
    OtherStreamAfterDestroy,
    /// A stream waits for a stream that waits.
    ThirdStream,
    /// The stream is destroyed, then the device is waited for.
    DeviceAfterDestroy,
}

impl Observer {
    fn destroys(self) -> bool {
        matches!(self, Self::OtherStreamAfterDestroy | Self::DeviceAfterDestroy)
    }
}

/// The kinds of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemoryKind {
    Plain,
    StreamOrdered,
    Shareable(Transport),
    Mapped,
}

/// One place of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    device: u32,
    stream: StreamKind,
    /// Whether the objects are made by another thread than the one that uses them.
    moves: bool,
    route: Route,
    observer: Observer,
    memory: MemoryKind,
    /// Whether the operands are larger than a mebibyte.
    is_large: bool,
}

/// The number of cells that are drawn.
const DRAWN: usize = 12;
/// The number of devices that take part.
const DEVICES: u32 = 2;

/// The values of each axis that a backend has; the first is plain.
#[derive(Debug)]
struct Axes {
    devices: Vec<u32>,
    streams: Vec<StreamKind>,
    moves: Vec<bool>,
    routes: Vec<Route>,
    observers: Vec<Observer>,
    memory: Vec<MemoryKind>,
    sizes: Vec<bool>,
}

impl Axes {
    fn of(backend: &dyn Backend, work: Work) -> Result<Self> {
        let can = backend.capabilities(0)?;
        // Vendors refuse to record copies between devices, and products of a handle without a workspace.
        let records = match work {
            Work::ToOther | Work::FromOther => false,
            Work::Gemm | Work::Batch | Work::Plan => can.capture && can.blas_workspace,
            _ => can.capture,
        };
        let observers = [
            Observer::Stream,
            Observer::Device,
            Observer::Event,
            Observer::StreamQuery,
            Observer::EventQuery,
            Observer::OtherStream,
            Observer::OtherStreamAfterDestroy,
            Observer::ThirdStream,
            Observer::DeviceAfterDestroy,
        ];
        let mut memory = there([
            (true, MemoryKind::Plain),
            (can.stream_ordered_memory, MemoryKind::StreamOrdered),
            (can.mapped_memory, MemoryKind::Mapped),
        ]);
        let offered = Transport::ALL.iter().copied().filter(|&transport| can.ipc_transports.contains(transport));
        memory.extend(offered.filter(|_| can.shareable_memory).map(MemoryKind::Shareable));
        Ok(Self {
            devices: (0..backend.device_count().min(DEVICES)).collect(),
            streams: there([
                (true, StreamKind::Normal),
                (can.stream_priority, StreamKind::Low),
                (can.stream_priority, StreamKind::High),
                (can.legacy_default_stream, StreamKind::Legacy),
                (can.per_thread_default_stream, StreamKind::PerThread),
                (can.foreign_objects, StreamKind::Foreign),
            ]),
            moves: vec![false, true],
            routes: there([
                (true, Route::Direct),
                (records, Route::Graph),
                (records, Route::Member),
                (records, Route::Chain),
            ]),
            observers: observers.to_vec(),
            // The products of `limits` are large.
            sizes: there([(true, false), (work.multiplies().is_none(), true)]),
            memory,
        })
    }

    fn plain(&self) -> Cell {
        self.cell(|_| 0)
    }

    /// Returns each axis by name, with the values that run and those that are left out.
    fn named(&self) -> Vec<CellAxis> {
        use Observer::{
            Device, DeviceAfterDestroy, Event, EventQuery, OtherStream, OtherStreamAfterDestroy, Stream, StreamQuery,
            ThirdStream,
        };
        use StreamKind::{Foreign, High, Legacy, Low, Normal, PerThread};
        let observers = [
            Stream,
            Device,
            Event,
            StreamQuery,
            EventQuery,
            OtherStream,
            OtherStreamAfterDestroy,
            ThirdStream,
            DeviceAfterDestroy,
        ];
        let mut memory = vec![MemoryKind::Plain, MemoryKind::StreamOrdered, MemoryKind::Mapped];
        memory.extend(Transport::ALL.iter().copied().map(MemoryKind::Shareable));
        let devices: Vec<u32> = (0..DEVICES).collect();
        vec![
            CellAxis::new("device", &self.devices, &devices, |device| format!("device {device}")),
            CellAxis::new("stream", &self.streams, &[Normal, Low, High, Legacy, PerThread, Foreign], words),
            CellAxis::new("thread", &self.moves, &[false, true], |moves| {
                if *moves { "another thread" } else { "the thread that made the objects" }.to_owned()
            }),
            CellAxis::new("route", &self.routes, &[Route::Direct, Route::Graph, Route::Member, Route::Chain], words),
            CellAxis::new("observer", &self.observers, &observers, words),
            CellAxis::new("memory", &self.memory, &memory, words),
            CellAxis::new("size", &self.sizes, &[false, true], |is_large| {
                if *is_large { "more than 1 MiB" } else { "1 KiB" }.to_owned()
            }),
        ]
    }

    /// Returns the cell with these indices: those of devices, streams, threads, routes, observers, memory, sizes.
    fn cell(&self, mut index: impl FnMut(usize) -> usize) -> Cell {
        Cell {
            device: self.devices[index(self.devices.len())],
            stream: self.streams[index(self.streams.len())],
            moves: self.moves[index(self.moves.len())],
            route: self.routes[index(self.routes.len())],
            observer: self.observers[index(self.observers.len())],
            memory: self.memory[index(self.memory.len())],
            is_large: self.sizes[index(self.sizes.len())],
        }
    }

    /// Returns each value of each axis, with the plain values of the others.
    fn singles(&self) -> Vec<Cell> {
        let plain = self.plain();
        let mut cells = vec![plain];
        cells.extend(self.devices[1..].iter().map(|&device| Cell { device, ..plain }));
        cells.extend(self.streams[1..].iter().map(|&stream| Cell { stream, ..plain }));
        cells.extend(self.moves[1..].iter().map(|&moves| Cell { moves, ..plain }));
        cells.extend(self.routes[1..].iter().map(|&route| Cell { route, ..plain }));
        cells.extend(self.observers[1..].iter().map(|&observer| Cell { observer, ..plain }));
        cells.extend(self.memory[1..].iter().map(|&memory| Cell { memory, ..plain }));
        cells.extend(self.sizes[1..].iter().map(|&is_large| Cell { is_large, ..plain }));
        cells
    }
}

/// An axis of the cells of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CellAxis {
    /// The name.
    pub name: &'static str,
    /// The values that run. The first is the plain one.
    pub values: Vec<String>,
    /// The values that are left out, because the device lacks them or the work has none.
    pub left_out: Vec<String>,
}

impl CellAxis {
    fn new<T: PartialEq>(name: &'static str, there: &[T], all: &[T], text: impl Fn(&T) -> String) -> Self {
        let left_out = all.iter().filter(|value| !there.contains(value));
        Self { name, values: there.iter().map(&text).collect(), left_out: left_out.map(&text).collect() }
    }
}

/// The cells of one case by construction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CellTable {
    /// The name of the case.
    pub case: &'static str,
    /// The axes.
    pub axes: Vec<CellAxis>,
    /// The number of cells that run in each run: each value of each axis, with the plain values of the others.
    pub always: usize,
    /// The number of cells that are drawn from the seed in addition.
    pub drawn: usize,
}

/// Returns the cells of each case by construction on this backend. A case that needs an absent capability has none.
///
/// # Errors
/// If the capabilities of the first device cannot be read.
pub fn cell_tables(backend: &dyn Backend) -> Result<Vec<CellTable>> {
    let capabilities = all_capabilities(backend)?;
    let runs = |case: &Case| case.unmet(&capabilities).is_none();
    let works = CASES.iter().zip(Work::ALL).filter(|(case, _)| runs(case));
    let table = |(case, work): (&Case, Work)| {
        let axes = Axes::of(backend, work)?;
        Ok(CellTable { case: case.name, axes: axes.named(), always: axes.singles().len(), drawn: DRAWN })
    };
    works.map(table).collect()
}

/// Returns the words of a variant: `other stream after destroy`.
fn words<T: fmt::Debug>(value: &T) -> String {
    let mut words = String::new();
    for letter in format!("{value:?}").chars() {
        match letter {
            '(' => words.push_str(" by "),
            ')' => {}
            letter => {
                if letter.is_uppercase() && !words.is_empty() && !words.ends_with(' ') {
                    words.push(' ');
                }
                words.extend(letter.to_lowercase());
            }
        }
    }
    words
}

/// Returns the values that a backend has.
fn there<T, const N: usize>(values: [(bool, T); N]) -> Vec<T> {
    values.into_iter().filter_map(|(has, value)| has.then_some(value)).collect()
}

impl Cell {
    fn elements(self) -> usize {
        if self.is_large { LARGE_ELEMENTS } else { ELEMENTS }
    }

    fn bytes(self) -> usize {
        4 * self.elements()
    }

    /// Returns the cell with what does not go together replaced by plain values.
    fn possible(mut self) -> Self {
        if matches!(self.stream, StreamKind::Legacy | StreamKind::PerThread) {
            // A default stream is never captured or destroyed.
            self.route = Route::Direct;
            self.observer = match self.observer {
                Observer::OtherStreamAfterDestroy => Observer::OtherStream,
                Observer::DeviceAfterDestroy => Observer::Device,
                observer => observer,
            };
        }
        self
    }
}

/// Runs one kind of work in its cells.
fn in_cells(backend: &dyn Backend, work: Work) -> CaseResult {
    let axes = Axes::of(backend, work)?;
    let loads =
        (0..backend.device_count().min(2)).map(|device| Load::on(backend, device)).collect::<Result<Vec<_>>>()?;
    let prove = |cell: Cell| in_cell(backend, work, cell, &loads[cell.device as usize]);
    axes.singles().into_iter().try_for_each(prove)?;
    with_seed(work as u64, |random| {
        let mut drawn = (0..DRAWN).map(|_| axes.cell(|count| random.below(count)).possible());
        drawn.try_for_each(prove)
    })
}

/// The copy before each round, which keeps the stream busy while the next calls are made.
struct Load<'b> {
    block: Block<'b>,
    pinned: Pinned<'b>,
}

impl<'b> Load<'b> {
    const BYTES: usize = 2 << 20;

    fn on(backend: &'b dyn Backend, device: u32) -> Result<Self> {
        Ok(Self { block: Block::on(backend, device, Self::BYTES)?, pinned: Pinned::new(backend, Self::BYTES)? })
    }
}

fn in_cell(backend: &dyn Backend, work: Work, cell: Cell, load: &Load<'_>) -> CaseResult {
    let prove = || {
        let (made, stream) = Made::new(backend, work, cell, load)?;
        let workspace = Block::on(backend, cell.device, WORKSPACE_BYTES)?;
        let mut handle = None;
        if let Some(kind) = work.multiplies() {
            // Until the cell binds its own.
            handle = Some(Handle::new(backend, kind, &made.apart[0])?);
        }
        if cell.moves {
            let run = || made.run(stream, handle, &workspace);
            let done = std::thread::scope(|scope| scope.spawn(run).join());
            done.unwrap_or_else(|_| Err(Failure::new("a thread panicked")))
        } else {
            made.run(stream, handle, &workspace)
        }
    };
    prove().map_err(|failure: Failure| failure.with_details(&format!("{work:?} in {cell:?}")))
}

/// Memory of the device or of the host.
enum Place<'b> {
    Device(Block<'b>),
    Host(Pinned<'b>),
}

impl<'b> Place<'b> {
    fn first(&self, bytes: usize) -> Span<'_> {
        self.span(0..bytes)
    }

    fn span(&self, range: Range<usize>) -> Span<'_> {
        match self {
            Self::Device(block) => block.span(range),
            Self::Host(pinned) => pinned.span(range),
        }
    }

    fn memory(&self) -> &dyn Memory {
        match self {
            Self::Device(block) => block,
            Self::Host(pinned) => pinned,
        }
    }

    /// Returns the block of an operand of a product.
    fn block(&self) -> Result<&Block<'b>, Failure> {
        match self {
            Self::Device(block) => Ok(block),
            Self::Host(_) => Err(Failure::new("a case multiplies in host memory")),
        }
    }
}

/// Launches of one graph, or calls of one kind: enough for mistakes that every third call makes.
const ROUNDS: usize = 3;
const WORKSPACE_BYTES: usize = 4 << 20;

/// The objects of one cell, apart from the stream of the work and the handle.
struct Made<'b> {
    backend: &'b dyn Backend,
    work: Work,
    cell: Cell,
    /// Streams of the device of the work.
    members: [Stream<'b>; 2],
    /// Streams of the device of the output or the input, if it is another one than that of the work.
    apart: [Stream<'b>; 3],
    events: Vec<Event<'b>>,
    input: Place<'b>,
    output: Place<'b>,
    /// The contents of the input and of the output before the work, in each round.
    fresh: Vec<Block<'b>>,
    old: Vec<Block<'b>>,
    identity: Block<'b>,
    result: Pinned<'b>,
    load: &'b Load<'b>,
    /// Streams that other members of this struct need until they are dropped: the stream of stream-ordered memory, and the
    /// owner of a foreign stream.
    _kept: Vec<Stream<'b>>,
}

/// Returns elements that are small integers, so that products are exact.
fn content(seed: usize, count: usize) -> Vec<f32> {
    const PERIOD: usize = 97;
    let period: [f32; PERIOD] = std::array::from_fn(|index| ((index * 7 + seed * 31) % PERIOD) as f32 - 40.0);
    let mut elements = period.repeat(count.div_ceil(PERIOD));
    elements.truncate(count);
    elements
}

fn fresh(round: usize, count: usize) -> Vec<f32> {
    content(1 + round, count)
}

fn old(round: usize, count: usize) -> Vec<f32> {
    content(11 + round, count)
}

fn bytes_of(elements: &[f32]) -> Vec<u8> {
    bytes_of_each(elements, f32::to_ne_bytes)
}

impl<'b> Made<'b> {
    fn new(backend: &'b dyn Backend, work: Work, cell: Cell, load: &'b Load<'b>) -> Result<(Self, Stream<'b>)> {
        let (device, count, size) = (cell.device, cell.elements(), cell.bytes());
        let other = (device + 1) % backend.device_count();
        let tag = backend.identity().tag;
        let mut kept = Vec::new();
        let with = |priority| Stream::with_options(backend, device, &StreamOptions::new().with_priority(priority));
        let stream = match cell.stream {
            StreamKind::Normal => Stream::on(backend, device)?,
            StreamKind::Low => with(StreamPriority::Low)?,
            StreamKind::High => with(StreamPriority::High)?,
            StreamKind::Legacy => Stream::borrowed(backend, StreamId::legacy_default(tag, device)),
            StreamKind::PerThread => Stream::borrowed(backend, StreamId::per_thread_default(tag, device)),
            StreamKind::Foreign => {
                let owner = Stream::on(backend, device)?;
                let raw = backend.raw_stream(owner.id())?;
                kept.push(owner);
                made_here();
                // SAFETY: the owner outlives the new id, and is a stream of the same device.
                Object::adopted(backend, unsafe { backend.stream_from_raw(device, raw) }?)
            }
        };
        let (input_device, output_device) = match work {
            Work::FromOther => (other, device),
            Work::ToOther => (device, other),
            _ => (device, device),
        };
        let apart = if input_device == output_device { device } else { other };
        let mut block = |device: u32| match cell.memory {
            // The peer of a copy between devices is plain.
            _ if device != cell.device => Block::on(backend, device, size),
            MemoryKind::Plain => Block::on(backend, device, size),
            MemoryKind::Shareable(transport) => {
                Block::with_kind(backend, device, size, DeviceMemoryKind::Shareable(transport))
            }
            MemoryKind::StreamOrdered => {
                let order = Stream::on(backend, device)?;
                let block = Block::with_kind(backend, device, size, DeviceMemoryKind::StreamOrdered(order.id()))?;
                // From here on, every stream may use it.
                order.synchronize()?;
                kept.push(order);
                Ok(block)
            }
            MemoryKind::Mapped => {
                let page = backend.capabilities(device)?.mapped_memory_granularity;
                Block::mapped(backend, device, &[size.next_multiple_of(page)])
            }
        };
        let stale = bytes_of(&content(99, count));
        let mut place = |device: u32, is_host: bool| -> Result<Place<'b>> {
            if is_host {
                return Ok(Place::Host(Pinned::holding(backend, &stale)?));
            }
            let block = block(device)?;
            block.write(0, &stale)?;
            Ok(Place::Device(block))
        };
        let input = place(input_device, work == Work::ToDevice)?;
        let output = place(output_device, work == Work::ToHost)?;
        let holding = |device: u32, elements: &[f32]| -> Result<Block<'b>> {
            let block = Block::on(backend, device, size)?;
            block.write(0, &bytes_of(elements))?;
            Ok(block)
        };
        let rows = work.rows();
        let unit = |index: usize| f32::from(u8::from(index < rows * rows && index.is_multiple_of(rows + 1)));
        let identity: Vec<f32> = (0..count).map(unit).collect();
        let devices = [device, device, device, apart, apart, apart];
        let events = devices.into_iter().cycle().take(6 * devices.len()).map(|device| Event::on(backend, device));
        let made = Self {
            backend,
            work,
            cell,
            members: [Stream::on(backend, device)?, Stream::on(backend, device)?],
            apart: [Stream::on(backend, apart)?, Stream::on(backend, apart)?, Stream::on(backend, apart)?],
            events: events.collect::<Result<_>>()?,
            input,
            output,
            fresh: (0..ROUNDS).map(|round| holding(input_device, &fresh(round, count))).collect::<Result<_>>()?,
            old: (0..ROUNDS).map(|round| holding(output_device, &old(round, count))).collect::<Result<_>>()?,
            identity: holding(device, &identity)?,
            result: Pinned::holding(backend, &stale)?,
            load,
            _kept: kept,
        };
        Ok((made, stream))
    }

    /// Returns the stream that the work is enqueued or recorded on.
    fn target<'s>(&'s self, stream: &'s Stream<'b>) -> &'s Stream<'b> {
        match self.cell.route {
            Route::Direct | Route::Graph => stream,
            Route::Member => &self.members[0],
            Route::Chain => &self.members[1],
        }
    }

    /// Makes `next` wait for what is enqueued on `first`.
    fn order(&self, first: &Stream<'_>, next: &Stream<'_>, events: &mut Vec<&Event<'_>>) -> CaseResult {
        let event = take(events, first)?;
        first.record(event)?;
        Ok(next.wait(event)?)
    }

    /// Enqueues the work on its stream.
    fn enqueue(&self, stream: &Stream<'b>, handle: Option<&mut Handle<'_>>, plan: Option<PlanId>) -> CaseResult {
        let stream = self.target(stream);
        let Some(handle) = handle else {
            match self.work {
                Work::Fill => stream.fill(self.output.first(self.cell.bytes()), FillPattern::U32(FILLED.to_bits()))?,
                Work::Rows => {
                    let bytes = self.cell.bytes();
                    let shape = CopyShape::new(bytes / 4, 2).with_src_pitch(bytes / 2).with_dst_pitch(bytes / 2);
                    for rows in [0..bytes, bytes / 4..bytes] {
                        stream.copy_rows(self.output.span(rows.clone()), self.input.span(rows), shape)?;
                    }
                }
                _ => stream.copy(self.output.first(self.cell.bytes()), self.input.first(self.cell.bytes()))?,
            }
            return Ok(());
        };
        let operands = [(self.input.block()?, 0), (&self.identity, 0), (self.output.block()?, 0)];
        let shape = self.work.shape();
        match plan {
            Some(plan) => handle.run_plan(plan, &shape, (f64::from(ALPHA), 1.0), operands, None, None)?,
            None => {
                let nowhere = DevicePtr::new(0);
                let gemm = Gemm::new(shape, nowhere, nowhere, nowhere).with_scale(f64::from(ALPHA), 1.0);
                handle.gemm(&gemm, operands)?;
            }
        }
        Ok(())
    }

    /// Runs the rounds of the cell.
    fn run<'w>(self, stream: Stream<'b>, mut handle: Option<Handle<'w>>, workspace: &'w Block<'w>) -> CaseResult {
        if let Some(handle) = &mut handle {
            handle.set_stream(self.target(&stream))?;
            handle.offer_workspace(workspace, 0..WORKSPACE_BYTES)?;
        }
        let mut stream = Some(stream);
        let mut events: Vec<&Event<'_>> = self.events.iter().collect();
        let plan = match (&mut handle, self.work) {
            (Some(handle), Work::Plan) => {
                let options = PlanOptions::new(self.work.shape(), Epilogue::None, WORKSPACE_BYTES);
                Some(handle.raw_mut().create_plan(&options)?)
            }
            _ => None,
        };
        let executable = match self.cell.route {
            Route::Direct => None,
            _ => Some(self.record(of(&stream)?, handle.as_mut(), plan, workspace, &mut events)?),
        };
        for round in 0..ROUNDS {
            let main = of(&stream)?;
            main.copy(self.load.block.all(), self.load.pinned.all())?;
            let before = [(&self.input, &self.fresh[round]), (&self.output, &self.old[round])];
            for ((place, block), is_apart) in
                before.into_iter().zip([self.work == Work::FromOther, self.work == Work::ToOther])
            {
                let on = if is_apart { &self.apart[0] } else { main };
                on.copy(place.first(self.cell.bytes()), block.all())?;
                if is_apart {
                    self.order(on, main, &mut events)?;
                }
            }
            match &executable {
                Some(executable) => executable.launch(main)?,
                None => self.enqueue(main, handle.as_mut(), plan)?,
            }
            let count = self.cell.elements();
            let seen = self.observe(&mut stream, round + 1 == ROUNDS, &mut events)?;
            let expected = bytes_of(&self.work.expected(&fresh(round, count), &old(round, count)));
            if seen != expected {
                // A default stream is not waited for when it is dropped, and the memory must outlive its work.
                stream.iter().chain(&self.apart).try_for_each(Stream::synchronize)?;
            }
            check!(seen == expected, "round {round} gave other bytes than the work alone would");
        }
        Ok(())
    }

    /// Records the work in a capture of the stream.
    fn record<'m>(
        &'m self,
        stream: &Stream<'b>,
        handle: Option<&mut Handle<'_>>,
        plan: Option<PlanId>,
        workspace: &'m Block<'_>,
        events: &mut Vec<&Event<'_>>,
    ) -> Result<Executable<'m>, Failure> {
        let [first, second] = &self.members;
        let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
        let path: &[&Stream<'_>] = match self.cell.route {
            Route::Member => &[first],
            Route::Chain => &[first, second],
            _ => &[],
        };
        let mut last = stream;
        for &member in path {
            self.order(last, member, events)?;
            last = member;
        }
        self.enqueue(stream, handle, plan)?;
        for &member in path.iter().rev().skip(1).chain([&stream]).filter(|_| !path.is_empty()) {
            self.order(last, member, events)?;
            last = member;
        }
        let memory: [&dyn Memory; 4] = [self.input.memory(), self.output.memory(), &self.identity, workspace];
        Ok(capture.end(&memory)?.instantiate()?)
    }

    /// Returns the output, as the observer of the cell sees it.
    fn observe(
        &self,
        stream: &mut Option<Stream<'b>>,
        is_last: bool,
        events: &mut Vec<&Event<'_>>,
    ) -> Result<Vec<u8>, Failure> {
        let main = of(stream)?;
        let (on, others) = match self.work {
            Work::ToOther => {
                self.order(main, &self.apart[1], events)?;
                (&self.apart[1], [&self.apart[0], &self.apart[2]])
            }
            _ => (main, [&self.members[0], &self.members[1]]),
        };
        let fetch = |stream: &Stream<'_>| match &self.output {
            Place::Device(block) => stream.copy(self.result.all(), block.span(0..self.cell.bytes())),
            Place::Host(_) => Ok(()),
        };
        let device = on.id().device();
        let destroys = is_last && self.work != Work::ToOther && self.cell.observer.destroys();
        let mut end = None;
        match self.cell.observer {
            Observer::OtherStream | Observer::OtherStreamAfterDestroy => {
                self.order(on, others[0], events)?;
                if destroys {
                    end = destroy(stream, events)?;
                }
                fetch(others[0])?;
                others[0].synchronize()?;
            }
            Observer::ThirdStream => {
                self.order(on, others[0], events)?;
                self.order(others[0], others[1], events)?;
                fetch(others[1])?;
                others[1].synchronize()?;
            }
            observer => {
                fetch(on)?;
                match observer {
                    Observer::Stream => on.synchronize()?,
                    Observer::Event | Observer::EventQuery => {
                        let event = take(events, on)?;
                        on.record(event)?;
                        match observer {
                            Observer::Event => event.synchronize()?,
                            _ => while event.query()? == Completion::Pending {},
                        }
                    }
                    Observer::StreamQuery => while on.query()? == Completion::Pending {},
                    _ => {
                        if destroys {
                            end = destroy(stream, events)?;
                        }
                        self.backend.synchronize_device(device)?;
                    }
                }
            }
        }
        let seen = match &self.output {
            Place::Device(_) => &self.result,
            Place::Host(pinned) => pinned,
        };
        // SAFETY: the observation says that the work that writes it is complete.
        let seen = unsafe { seen.read_now() };
        // If it is wrong, work of a stream that is gone may be outstanding. The memory must outlive it.
        end.map_or(Ok(()), |end: &Event<'_>| end.synchronize())?;
        Ok(seen)
    }
}

/// Returns the stream of the work, which is there until it is destroyed.
fn of<'s, 'b>(stream: &'s Option<Stream<'b>>) -> Result<&'s Stream<'b>, Failure> {
    stream.as_ref().ok_or_else(|| Failure::new("a case uses a stream that it has destroyed"))
}

/// Destroys the stream of the work without waiting, and returns an event behind its work.
fn destroy<'e, 'b>(
    stream: &mut Option<Stream<'_>>,
    events: &mut Vec<&'e Event<'b>>,
) -> Result<Option<&'e Event<'b>>, Failure> {
    let Some(stream) = stream.take() else { return Ok(None) };
    let end = take(events, &stream)?;
    stream.record(end)?;
    stream.destroy()?;
    Ok(Some(end))
}

/// Takes an event of the stream's device.
fn take<'e, 'b>(events: &mut Vec<&'e Event<'b>>, stream: &Stream<'_>) -> Result<&'e Event<'b>, Failure> {
    let place = events.iter().position(|event| event.id().device() == stream.id().device());
    let place = place.ok_or_else(|| Failure::new("a case has too few events"))?;
    Ok(events.remove(place))
}
