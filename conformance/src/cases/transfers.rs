//! Copies, fills and copies of rows by construction: each kind, in each size and alignment, by a call and in a graph.
//!
//! Every transfer has a slot of its own in the memory of its kind. A round brings fresh bytes into all slots, transfers,
//! overwrites the sources, and takes a snapshot of the destinations, all in the order of one stream and behind a load that is
//! outstanding. So a transfer that waits in the call, runs too early or too late, or writes other bytes than its own is seen.

use std::ops::Range;

use highwater_hal::{Backend, CaptureMode, CopyShape, FillPattern, HostMemoryKind, HostOptions, Result};

use crate::case::{CaseResult, Failure, cases, check};
use crate::device::{Block, Capture, Event, Executable, Memory, Pinned, Registered, Span, Stream, write_span};
use crate::random::Random;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "transfers";
    fills_of_bytes: ["fill.exact", "fill.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_size(Work::Fill(1));
    fills_of_two_bytes: ["fill.exact", "fill.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_size(Work::Fill(2));
    fills_of_four_bytes: ["fill.exact", "fill.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_size(Work::Fill(4));
    copies_to_the_device: ["copy.exact", "copy.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_size(Work::ToDevice(Host::Pinned));
    copies_to_the_host: ["copy.exact", "copy.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_size(Work::ToHost(Host::Pinned));
    copies_from_registered_memory: ["copy.exact", "copy.ordered", "host.register-copies", "stream.asynchronous"]
        needs [has::host_register] => of_each_size(Work::ToDevice(Host::Registered));
    copies_to_registered_memory: ["copy.exact", "copy.ordered", "host.register-copies", "stream.asynchronous"]
        needs [has::host_register] => of_each_size(Work::ToHost(Host::Registered));
    copies_from_write_combined_memory: ["copy.exact", "copy.ordered", "stream.order", "stream.asynchronous"]
        needs [has::write_combined] => of_each_size(Work::ToDevice(Host::WriteCombined));
    copies_on_a_device: ["copy.exact", "copy.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_size(Work::OnDevice);
    copies_to_another_device: ["copy.exact", "copy.ordered", "stream.order", "stream.asynchronous"]
        needs [TWO_DEVICES, has::peer_copy] => of_each_size(Work::ToOther);
    copies_from_another_device: ["copy.exact", "copy.ordered", "stream.order", "stream.asynchronous"]
        needs [TWO_DEVICES, has::peer_copy] => of_each_size(Work::FromOther);
    rows_to_the_device: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_shape(Work::ToDevice(Host::Pinned));
    rows_to_the_host: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_shape(Work::ToHost(Host::Pinned));
    rows_from_registered_memory: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous", "host.register-copies"]
        needs [has::host_register] => of_each_shape(Work::ToDevice(Host::Registered));
    rows_to_registered_memory: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous", "host.register-copies"]
        needs [has::host_register] => of_each_shape(Work::ToHost(Host::Registered));
    rows_from_write_combined_memory: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous"]
        needs [has::write_combined] => of_each_shape(Work::ToDevice(Host::WriteCombined));
    rows_on_a_device: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous", "capture.replay"]
        => of_each_shape(Work::OnDevice);
    rows_to_another_device: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous"]
        needs [TWO_DEVICES, has::peer_copy] => of_each_shape(Work::ToOther);
    rows_from_another_device: ["copy-2d.exact", "copy-2d.ordered", "stream.order", "stream.asynchronous"]
        needs [TWO_DEVICES, has::peer_copy] => of_each_shape(Work::FromOther);
}

/// The kinds of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Host {
    Pinned,
    Registered,
    WriteCombined,
}

/// The kinds of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// A fill with a pattern of this many bytes.
    Fill(usize),
    ToDevice(Host),
    ToHost(Host),
    OnDevice,
    ToOther,
    FromOther,
}

/// The sizes in bytes, of fills in elements: around the widths that kernels copy at a time, and past the limits of one grid,
/// one page and a mebibyte. The large ones come first, so that the others lie behind a mebibyte of their block.
const SIZES: [usize; 20] =
    [(4 << 20) + 5, (1 << 20) + 3, 65_539, 4099, 4096, 1000, 257, 256, 255, 67, 64, 31, 16, 9, 8, 5, 4, 3, 2, 1];
/// The shapes of copies of rows: width, height, and the gaps between the rows of the source and of the destination. The widths and
/// pitches lie around those that engines copy at a time. Gaps that differ, and those of one side only, are among them.
const SHAPES: [(usize, usize, usize, usize); 20] = [
    (70_001, 17, 3, 71),
    (4096, 64, 4096, 0),
    (1000, 40, 24, 1048),
    (257, 33, 0, 255),
    (256, 31, 256, 256),
    (255, 9, 1, 0),
    (128, 128, 0, 0),
    (67, 3, 5, 7),
    (64, 16, 64, 192),
    (32, 1, 100, 0),
    (17, 65, 15, 47),
    (16, 8, 0, 16),
    (12, 1000, 4, 1),
    (9, 2, 0, 500),
    (8, 300, 8, 8),
    (7, 5, 1000, 1),
    (4, 257, 12, 0),
    (3, 4, 2, 2),
    (2, 513, 0, 2),
    (1, 600, 1, 3),
];
/// Distances of an operand from an address that is aligned to 256 bytes.
const OFFSETS: [usize; 11] = [0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 100];
/// The least number of bytes behind each operand that must keep their value.
const GUARD: usize = 64;
const SLOT_ALIGNMENT: usize = 256;
/// The transfers that are enqueued behind one load. All operations of a group fit into a vendor's queue.
const GROUP: usize = 10;
/// Enough for mistakes that every third use makes.
const ROUNDS: usize = 3;

/// One transfer: the ranges of its operands and its slot, in the memory of its kind.
#[derive(Debug, Clone)]
struct Transfer {
    slot: Range<usize>,
    source: Range<usize>,
    destination: Range<usize>,
    /// One row, unless the transfer is a copy of rows.
    shape: CopyShape,
}

/// The shapes of the transfers of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Flat,
    Rows,
}

impl Form {
    fn shapes(self, element: usize) -> Vec<CopyShape> {
        match self {
            // A fill of as many bytes as the largest copy takes long enough.
            Self::Flat => SIZES
                .iter()
                .map(|&size| if size > 1 << 21 { size / element * element } else { size * element })
                .map(|bytes| CopyShape::new(bytes, 1))
                .collect(),
            Self::Rows => SHAPES
                .iter()
                .map(|&(width, height, src_gap, dst_gap)| {
                    CopyShape::new(width, height).with_src_pitch(width + src_gap).with_dst_pitch(width + dst_gap)
                })
                .collect(),
        }
    }
}

/// Lays out the transfers of all sizes, each with other distances from the alignment.
fn transfers(work: Work, form: Form, random: &mut Random) -> Vec<Transfer> {
    let element = if let Work::Fill(width) = work { width } else { 1 };
    let mut end = 0;
    form.shapes(element)
        .into_iter()
        .map(|shape| {
            let mut offset = || OFFSETS[random.below(OFFSETS.len())].next_multiple_of(element);
            let (from, to) = (end + offset(), end + offset());
            let extent = |start: usize, bytes: Option<usize>| start..start + bytes.unwrap_or_default();
            let (source, destination) = (extent(from, shape.src_bytes()), extent(to, shape.dst_bytes()));
            let slot = end..(source.end.max(destination.end) + GUARD).next_multiple_of(SLOT_ALIGNMENT);
            end = slot.end;
            Transfer { slot, source, destination, shape }
        })
        .collect()
}

/// Memory of a device or of the host.
enum Place<'b> {
    Device(Block<'b>),
    Pinned(Pinned<'b>),
    Registered(Registered<'b>),
}

impl<'b> Place<'b> {
    fn on(backend: &'b dyn Backend, device: u32, bytes: usize) -> Result<Self> {
        Block::on(backend, device, bytes).map(Self::Device)
    }

    fn of(backend: &'b dyn Backend, host: Host, bytes: usize) -> Result<Self> {
        Ok(match host {
            Host::Pinned => Self::Pinned(Pinned::new(backend, bytes)?),
            Host::Registered => Self::Registered(Registered::new(backend, &vec![0; bytes])?),
            Host::WriteCombined => {
                let options = HostOptions::new().with_kind(HostMemoryKind::WriteCombined);
                Self::Pinned(Pinned::with_options(backend, bytes, &options)?)
            }
        })
    }

    fn span(&self, range: Range<usize>) -> Span<'_> {
        match self {
            Self::Device(block) => block.span(range),
            Self::Pinned(pinned) => pinned.span(range),
            Self::Registered(registered) => registered.span(range),
        }
    }

    fn memory(&self) -> &dyn Memory {
        match self {
            Self::Device(block) => block,
            Self::Pinned(pinned) => pinned,
            Self::Registered(registered) => registered,
        }
    }
}

/// The memory of all transfers of one kind on one device.
struct Made<'b> {
    backend: &'b dyn Backend,
    device: u32,
    work: Work,
    form: Form,
    transfers: Vec<Transfer>,
    input: Place<'b>,
    output: Place<'b>,
    /// Random bytes, on the device and here. Each [`Content`] begins at another byte of them.
    drawn: Block<'b>,
    drawn_bytes: Vec<u8>,
    /// The snapshots of all rounds.
    seen: Pinned<'b>,
    /// Receives the snapshots first if the output is on another device than the stream. The stream cannot copy from there to the host.
    between: Option<Block<'b>>,
}

/// The contents of the memory of all transfers at one time.
#[derive(Debug, Clone, Copy)]
enum Content {
    /// Of the sources, before the transfers of a round.
    Fresh(usize),
    /// Of the sources, after the transfers of a round.
    Junk,
    /// Of the destinations, before the transfers.
    Old,
}

impl Content {
    /// The distance between the beginnings of two contents. The bytes at one place are equal in both only by chance.
    const STEP: usize = 9 * SLOT_ALIGNMENT;
    /// The bytes that are drawn beyond those of one content.
    const MORE: usize = (ROUNDS + 1) * Self::STEP;

    /// Returns where this content of a range is among the drawn bytes.
    fn of(self, range: &Range<usize>) -> Range<usize> {
        let index = match self {
            Self::Fresh(round) => round,
            Self::Junk => ROUNDS,
            Self::Old => ROUNDS + 1,
        };
        range.start + index * Self::STEP..range.end + index * Self::STEP
    }
}

impl<'b> Made<'b> {
    fn new(
        backend: &'b dyn Backend,
        work: Work,
        form: Form,
        device: u32,
        random: &mut Random,
    ) -> Result<Self, Failure> {
        let transfers = transfers(work, form, random);
        let bytes = transfers.last().map_or(0, |last| last.slot.end);
        let other = (device + 1) % backend.device_count();
        let input = match work {
            Work::ToDevice(host) => Place::of(backend, host, bytes)?,
            Work::FromOther => Place::on(backend, other, bytes)?,
            _ => Place::on(backend, device, bytes)?,
        };
        let output = match work {
            Work::ToHost(host) => Place::of(backend, host, bytes)?,
            Work::ToOther => Place::on(backend, other, bytes)?,
            _ => Place::on(backend, device, bytes)?,
        };
        let drawn_bytes = random.bytes(bytes + Content::MORE);
        let drawn = Block::on(backend, device, drawn_bytes.len())?;
        write_span(backend, device, drawn.all(), &drawn_bytes)?;
        Ok(Self {
            backend,
            device,
            work,
            form,
            input,
            output,
            drawn,
            drawn_bytes,
            seen: Pinned::new(backend, ROUNDS * bytes)?,
            between: match work {
                Work::ToHost(_) | Work::ToOther => Some(Block::on(backend, device, ROUNDS * bytes)?),
                _ => None,
            },
            transfers,
        })
    }

    /// Returns the pattern of a fill. The first consists of equal bytes, which invites a narrower fill.
    fn pattern(width: usize, round: usize) -> FillPattern {
        let pattern = [0x5757_5757_u32, 0x89ab_cdef, 0x0100_0001][round % 3];
        match width {
            1 => FillPattern::U8(pattern as u8),
            2 => FillPattern::U16(pattern as u16),
            _ => FillPattern::U32(pattern),
        }
    }

    fn enqueue(&self, stream: &Stream<'_>, transfer: &Transfer, round: usize) -> Result<()> {
        let destination = self.output.span(transfer.destination.clone());
        match (self.work, self.form) {
            (Work::Fill(width), _) => stream.fill(destination, Self::pattern(width, round)),
            (_, Form::Flat) => stream.copy(destination, self.input.span(transfer.source.clone())),
            (_, Form::Rows) => stream.copy_rows(destination, self.input.span(transfer.source.clone()), transfer.shape),
        }
    }

    /// Enqueues one round over a group. A graph has the transfers of round 0.
    fn round(
        &self,
        stream: &Stream<'_>,
        group: &[Transfer],
        round: usize,
        graph: Option<&Executable<'_>>,
    ) -> Result<()> {
        let slots = group[0].slot.start..group[group.len() - 1].slot.end;
        let has_input = !matches!(self.work, Work::Fill(_));
        if has_input {
            stream.copy(self.input.span(slots.clone()), self.drawn.span(Content::Fresh(round).of(&slots)))?;
        }
        stream.copy(self.output.span(slots.clone()), self.drawn.span(Content::Old.of(&slots)))?;
        match graph {
            Some(graph) => graph.launch(stream)?,
            None => group.iter().try_for_each(|transfer| self.enqueue(stream, transfer, round))?,
        }
        if has_input {
            stream.copy(self.input.span(slots.clone()), self.drawn.span(Content::Junk.of(&slots)))?;
        }
        let place = round * slots.len()..(round + 1) * slots.len();
        let snapshot = self.between.as_ref().map_or(self.seen.span(place.clone()), |block| block.span(place));
        stream.copy(snapshot, self.output.span(slots.clone()))?;
        stream.copy(self.output.span(slots.clone()), self.drawn.span(Content::Junk.of(&slots)))
    }

    /// Checks the snapshots of a group after the stream was synchronized, the bytes beside the destinations included.
    fn check(&self, group: &[Transfer], is_recorded: bool) -> CaseResult {
        let slots = group[0].slot.start..group[group.len() - 1].slot.end;
        let bytes = slots.len();
        if let Some(between) = &self.between {
            let stream = Stream::on(self.backend, self.device)?;
            stream.copy(self.seen.span(0..ROUNDS * bytes), between.span(0..ROUNDS * bytes))?;
            stream.synchronize()?;
        }
        // SAFETY: the stream of the copies was synchronized, and the next ones are enqueued by a later call.
        let seen_in_rounds = unsafe { self.seen.bytes_now(0..ROUNDS * bytes) };
        for (round, seen) in seen_in_rounds.chunks_exact(bytes).enumerate() {
            for transfer in group {
                let Transfer { slot, source, destination, shape } = transfer;
                let mut expected = self.drawn_bytes[Content::Old.of(slot)].to_vec();
                let place = destination.start - slot.start..destination.end - slot.start;
                match self.work {
                    Work::Fill(width) => {
                        let round = if is_recorded { 0 } else { round };
                        let element = match Self::pattern(width, round) {
                            FillPattern::U8(pattern) => vec![pattern],
                            FillPattern::U16(pattern) => pattern.to_ne_bytes().to_vec(),
                            FillPattern::U32(pattern) => pattern.to_ne_bytes().to_vec(),
                        };
                        expected[place].chunks_exact_mut(width).for_each(|chunk| chunk.copy_from_slice(&element));
                    }
                    _ => {
                        let (to, from) = (&mut expected[place], &self.drawn_bytes[Content::Fresh(round).of(source)]);
                        for (begin, other) in shape.rows() {
                            to[begin..begin + shape.width].copy_from_slice(&from[other..other + shape.width]);
                        }
                    }
                }
                let seen = &seen[slot.start - slots.start..slot.end - slots.start];
                let wrong = || seen.iter().zip(&expected).position(|(seen, expected)| seen != expected);
                check!(
                    *seen == expected,
                    "in round {round}, a transfer of {shape:?} from {} to {} bytes behind the alignment gave another byte {} of \
                     its slot than it should",
                    source.start - slot.start,
                    destination.start - slot.start,
                    wrong().unwrap_or_default()
                );
            }
        }
        Ok(())
    }
}

fn of_each_size(backend: &dyn Backend, work: Work) -> CaseResult {
    of_each(backend, work, Form::Flat)
}

fn of_each_shape(backend: &dyn Backend, work: Work) -> CaseResult {
    of_each(backend, work, Form::Rows)
}

fn of_each(backend: &dyn Backend, work: Work, form: Form) -> CaseResult {
    for device in 0..backend.device_count().min(2) {
        crate::seed::with_seed(u64::from(device), |random| on_device(backend, work, form, device, random))
            .map_err(|failure| failure.with_details(&format!("{work:?} {form:?} on device {device}")))?;
    }
    Ok(())
}

fn on_device(backend: &dyn Backend, work: Work, form: Form, device: u32, random: &mut Random) -> CaseResult {
    let can = backend.capabilities(device)?;
    let made = Made::new(backend, work, form, device, random)?;
    let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
    let (stream, before) = (Stream::on(backend, device)?, Event::on(backend, device)?);
    // Vendors refuse to record copies between devices.
    let records = can.capture && !matches!(work, Work::ToOther | Work::FromOther);
    let rounds = |group: &[Transfer], graphs: &[Executable<'_>]| -> CaseResult {
        // The first calls of a kind may load what later ones find loaded.
        made.round(&stream, group, 0, graphs.first())?;
        stream.synchronize()?;
        until_conclusive("a transfer waits for the work before it", |load| {
            busy.enqueue(&stream, load)?;
            stream.record(&before)?;
            (0..ROUNDS).try_for_each(|round| made.round(&stream, group, round, graphs.get(round)))?;
            let outstanding = before.is_pending()?;
            stream.synchronize()?;
            made.check(group, !graphs.is_empty())?;
            Ok(Attempt::seen(outstanding))
        })
    };
    for group in made.transfers.chunks(GROUP) {
        rounds(group, &[])?;
        if records {
            let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
            group.iter().try_for_each(|transfer| made.enqueue(&stream, transfer, 0))?;
            let graph = capture.end(&[made.input.memory(), made.output.memory()])?;
            // One for each round, because a graph must not be launched while it is outstanding.
            let executables = (0..ROUNDS).map(|_| graph.instantiate()).collect::<Result<Vec<_>>>()?;
            rounds(group, &executables)
                .map_err(|failure| failure.with_details("the transfers were recorded and launched"))?;
        }
    }
    Ok(())
}
