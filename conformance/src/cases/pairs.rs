//! Clauses about two things at once, for each pair of their kinds: streams and waits, streams and events. Also clauses about many
//! objects that are alive at the same time.

use highwater_hal::{
    Backend, BlasKind, CaptureMode, Completion, CopyShape, DataType, DevicePtr, Epilogue, FillPattern, Gemm, GemmShape,
    PlanOptions, Result, StreamId, StridedBatch,
};

use super::blas::kinds as kinds_of_handles;
use super::kinds::{EventKind, StreamKind};
use crate::case::{CaseResult, Failure, cases, check, check_eq, on_devices};
use crate::device::{Block, Capture, Event, Handle, Pinned, Span, Stream};
use crate::idle_stream::IdleStream;
use crate::matrix::Product;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};
use crate::sweep::as_one;

cases! {
    group "pairs";
    each_wait_covers_each_kind_of_stream:
        ["stream.synchronize", "event.synchronize", "devices.synchronize", "stream.query", "event.query", "event.wait-orders"];
    each_wait_covers_each_kind_of_work_alone: ["stream.query", "stream.synchronize", "event.query", "event.synchronize",
        "devices.synchronize", "event.wait-orders", "stream.enqueues"];
    each_kind_of_event_orders_each_kind_of_stream: ["event.wait-orders", "event.query", "event.synchronize"];
    default_streams_of_threads_wait_for_each_other: ["event.wait-orders", "event.query"] needs [has::per_thread_default_stream];
    many_streams_wait_for_one_event: ["event.wait-orders"];
    one_stream_waits_for_many_events: ["event.wait-orders"];
    many_operations_are_outstanding: ["stream.asynchronous", "stream.order"];
    many_objects_live_at_once: ["backend.live-objects", "memory.disjoint", "event.query", "backend.exiting"];
    many_handles_live_at_once: ["backend.live-objects", "gemm.value", "blas.stream-bound", "backend.exiting"] needs [has::gemm_f32];
    many_operations_are_recorded: ["capture.replay", "stream.order"] needs [has::capture];
}

const BYTES: usize = 1 << 12;

/// The ways to learn that the work of a stream is done.
#[derive(Debug, Clone, Copy)]
enum Observed {
    Stream,
    Event,
    Device,
    StreamQuery,
    EventQuery,
    OtherStream,
}

impl Observed {
    const ALL: [Self; 6] =
        [Self::Stream, Self::Event, Self::Device, Self::StreamQuery, Self::EventQuery, Self::OtherStream];

    fn wait(self, stream: &Stream<'_>, event: &Event<'_>, other: &Stream<'_>, backend: &dyn Backend) -> Result<()> {
        // A query may come before the work begins, or when only a part of it is done. So it is repeated, without a pause that hides an
        // early answer.
        let until_complete = |query: &dyn Fn() -> Result<Completion>| -> Result<()> {
            while query()? == Completion::Pending {
                std::thread::yield_now();
            }
            Ok(())
        };
        match self {
            Self::Stream => stream.synchronize(),
            Self::Event => event.synchronize(),
            Self::Device => backend.synchronize_device(stream.id().device()),
            Self::StreamQuery => until_complete(&|| stream.query()),
            Self::EventQuery => until_complete(&|| event.query()),
            Self::OtherStream => {
                other.wait(event)?;
                other.synchronize()
            }
        }
    }
}

fn each_wait_covers_each_kind_of_stream(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (block, pinned) = (Block::on(backend, device, BYTES)?, Pinned::new(backend, BYTES)?);
        let (other, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
        let mut byte = 0;
        for kind in StreamKind::of(backend, device)? {
            let made = kind.make(backend, device)?;
            let stream = &made.stream;
            for observed in Observed::ALL {
                until_conclusive("the work was over before it was waited for", |load| {
                    byte = byte % 250 + 1;
                    busy.enqueue(stream, load)?;
                    stream.set(block.all(), byte)?;
                    stream.copy(pinned.all(), block.all())?;
                    stream.record(&event)?;
                    let pending = event.is_pending()?;
                    observed.wait(stream, &event, &other, backend)?;
                    // SAFETY: the work was waited for, by one of the ways that the contract has.
                    let seen = unsafe { pinned.read_now() };
                    let arrived = seen == [byte; BYTES];
                    stream.synchronize()?;
                    check!(arrived, "work on {kind:?} was not done after a wait of the kind {observed:?}");
                    Ok(Attempt::seen(pending))
                })
                .map_err(|failure| failure.with_details(&format!("{kind:?}, {observed:?}")))?;
            }
        }
        Ok(())
    })
}

// ------------------------------------------------------------------------------------------------------- work that is alone

/// The kinds of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Fill,
    ToDevice,
    ToHost,
    OnDevice,
    ToOther,
    FromOther,
    RowsToDevice,
    RowsToHost,
    RowsOnDevice,
    RowsToOther,
    RowsFromOther,
    Product,
    Batch,
    Plan,
    Launch,
}

impl Work {
    /// Returns the kinds that a device has.
    fn of(backend: &dyn Backend, device: u32) -> Result<Vec<Self>> {
        let can = backend.capabilities(device)?;
        let crosses = backend.device_count() > 1 && can.peer_copy;
        let kinds = [
            (true, Self::Fill),
            (true, Self::ToDevice),
            (true, Self::ToHost),
            (true, Self::OnDevice),
            (crosses, Self::ToOther),
            (crosses, Self::FromOther),
            (true, Self::RowsToDevice),
            (true, Self::RowsToHost),
            (true, Self::RowsOnDevice),
            (crosses, Self::RowsToOther),
            (crosses, Self::RowsFromOther),
            (can.gemm_f32, Self::Product),
            (can.gemm_f32 && can.strided_batch, Self::Batch),
            (can.gemm_f32 && can.lt_plans, Self::Plan),
            (can.capture, Self::Launch),
        ];
        Ok(kinds.into_iter().filter_map(|(has, kind)| has.then_some(kind)).collect())
    }

    fn is_rows(self) -> bool {
        matches!(
            self,
            Self::RowsToDevice | Self::RowsToHost | Self::RowsOnDevice | Self::RowsToOther | Self::RowsFromOther
        )
    }

    /// Returns the shape of a product of square matrices.
    fn shape(self, load: usize) -> Option<GemmShape> {
        let size = 64 * load.min(16);
        let shape = GemmShape::new(DataType::F32, size, size, size);
        let stride = size * size;
        match self {
            Self::Product | Self::Plan => Some(shape),
            Self::Batch => {
                Some(shape.with_batch(StridedBatch { count: 3, stride_a: 0, stride_b: 0, stride_c: stride }))
            }
            _ => None,
        }
    }
}

/// The operands of work that is alone on its stream. Every element of each source is 1.
struct Operands<'b> {
    backend: &'b dyn Backend,
    load: usize,
    bytes: usize,
    ones: Block<'b>,
    target: Block<'b>,
    pinned_ones: Pinned<'b>,
    pinned_target: Pinned<'b>,
    other_ones: Option<Block<'b>>,
    other_target: Option<Block<'b>>,
    /// Receives the end of a target.
    seen: Pinned<'b>,
    /// Streams of this device and of the other one.
    near: Stream<'b>,
    far: Option<Stream<'b>>,
}

impl<'b> Operands<'b> {
    /// The largest size, in units of 2 MiB.
    const MOST: usize = 32;
    const ONE: FillPattern = FillPattern::U32(1.0_f32.to_bits());
    /// More work has longer rows: a backend may copy each row by a call of its own, and the last of more calls would be as short.
    const ROWS: usize = 512;
    /// The bytes between the end of a row and the next row.
    const GAP: usize = 64;
    /// The bytes that show whether the work is done: the end of the last row, or the last elements of a product.
    const SEEN: usize = 256;

    fn on(backend: &'b dyn Backend, device: u32, load: usize) -> Result<Self> {
        let bytes = load << 21;
        let other = (device + 1) % backend.device_count();
        let crosses = other != device && backend.capabilities(device)?.peer_copy;
        let there = || crosses.then(|| Block::on(backend, other, bytes)).transpose();
        let new = Self {
            backend,
            load,
            bytes,
            ones: Block::on(backend, device, bytes)?,
            target: Block::on(backend, device, bytes)?,
            pinned_ones: Pinned::holding(backend, &1.0_f32.to_ne_bytes().repeat(bytes / 4))?,
            pinned_target: Pinned::new(backend, bytes)?,
            other_ones: there()?,
            other_target: there()?,
            seen: Pinned::new(backend, Self::SEEN)?,
            near: Stream::on(backend, device)?,
            far: crosses.then(|| Stream::on(backend, other)).transpose()?,
        };
        new.near.fill(new.ones.all(), Self::ONE)?;
        new.near.synchronize()?;
        if let (Some(far), Some(ones)) = (&new.far, &new.other_ones) {
            far.fill(ones.all(), Self::ONE)?;
            far.synchronize()?;
        }
        Ok(new)
    }

    fn far(&self) -> Result<(&Stream<'b>, &Block<'b>, &Block<'b>), Failure> {
        match (&self.far, &self.other_ones, &self.other_target) {
            (Some(stream), Some(ones), Some(target)) => Ok((stream, ones, target)),
            _ => Err(Failure::new("a case copies to another device, and there is none")),
        }
    }

    /// Returns the destination and the source.
    fn sides(&self, work: Work) -> Result<(Span<'_>, Span<'_>), Failure> {
        Ok(match work {
            Work::ToDevice | Work::RowsToDevice => (self.target.all(), self.pinned_ones.all()),
            Work::ToHost | Work::RowsToHost => (self.pinned_target.all(), self.ones.all()),
            Work::ToOther | Work::RowsToOther => (self.far()?.2.all(), self.ones.all()),
            Work::FromOther | Work::RowsFromOther => (self.target.all(), self.far()?.1.all()),
            _ => (self.target.all(), self.ones.all()),
        })
    }

    fn enqueue(
        &self,
        work: Work,
        stream: &Stream<'_>,
        handles: &mut [Option<Handle<'_>>; 2],
        made: Made<'_, '_>,
    ) -> CaseResult {
        let operands = [(&self.ones, 0), (&self.ones, 0), (&self.target, 0)];
        match (work, work.shape(self.load), handles) {
            (Work::Fill, ..) => stream.fill(self.target.all(), Self::ONE)?,
            (Work::Plan, Some(shape), [_, Some(handle)]) => {
                if let Made::Plan(plan) = made {
                    handle.run_plan(plan, &shape, (1.0, 0.0), operands, None, None)?;
                }
            }
            (Work::Product | Work::Batch, Some(shape), [Some(handle), _]) => {
                let nowhere = DevicePtr::new(0);
                handle.gemm(&Gemm::new(shape, nowhere, nowhere, nowhere).with_scale(1.0, 0.0), operands)?;
            }
            (Work::Launch, ..) => {
                if let Made::Executable(executable) = made {
                    executable.launch(stream)?;
                }
            }
            (work, ..) => {
                let (dst, src) = self.sides(work)?;
                if work.is_rows() {
                    let pitch = self.bytes / Self::ROWS;
                    let rows = CopyShape::new(pitch - Self::GAP, Self::ROWS);
                    stream.copy_rows(dst, src, rows.with_src_pitch(pitch).with_dst_pitch(pitch))?;
                } else {
                    stream.copy(dst, src)?;
                }
            }
        }
        Ok(())
    }

    /// Returns where the end of the result is, and its elements.
    fn end(&self, work: Work) -> (usize, f32) {
        match work.shape(self.load) {
            Some(shape) => (shape.m * shape.n * shape.batch_count() * 4 - Self::SEEN, shape.k as f32),
            None => (self.bytes - Self::GAP - Self::SEEN, 1.0),
        }
    }

    /// Returns the end of the result in device memory, and a stream of its device.
    fn place(&self, work: Work) -> Result<Option<(&Stream<'b>, Span<'_>)>, Failure> {
        let start = self.end(work).0;
        let range = start..start + Self::SEEN;
        Ok(match work {
            Work::ToHost | Work::RowsToHost => None,
            Work::ToOther | Work::RowsToOther => {
                let (far, _, target) = self.far()?;
                Some((far, target.span(range)))
            }
            _ => Some((&self.near, self.target.span(range))),
        })
    }

    fn clear(&self, work: Work) -> CaseResult {
        match self.place(work)? {
            Some((stream, span)) => {
                stream.set(span, 0)?;
                stream.synchronize()?;
            }
            None => self.pinned_target.write_at(self.end(work).0, &[0; Self::SEEN])?,
        }
        Ok(())
    }

    /// Returns whether the end of the result is there. The caller has waited for the work.
    fn has_arrived(&self, work: Work) -> Result<bool, Failure> {
        let (start, element) = self.end(work);
        let expected = element.to_ne_bytes().repeat(Self::SEEN / 4);
        Ok(match self.place(work)? {
            Some((stream, span)) => {
                stream.copy(self.seen.all(), span)?;
                stream.synchronize()?;
                // SAFETY: the stream of the copy was synchronized.
                (unsafe { self.seen.read_now() }) == expected
            }
            // SAFETY: the caller has waited for the work, by one of the ways that the contract has.
            None => (unsafe { self.pinned_target.bytes_now(start..start + Self::SEEN) }) == expected,
        })
    }
}

/// The object that work needs in addition to its operands.
#[derive(Clone, Copy)]
enum Made<'e, 'm> {
    Nothing,
    Plan(highwater_hal::PlanId),
    Executable(&'e crate::device::Executable<'m>),
}

/// A stream is synchronized, and then has one operation and nothing else. Each wait waits for it, and each query sees it.
fn each_wait_covers_each_kind_of_work_alone(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let (stream, captured) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (other, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
        let can = backend.capabilities(device)?;
        let mut handles = [None, None];
        if can.gemm_f32 {
            handles[0] = Some(Handle::new(backend, BlasKind::Blas, &stream)?);
            if can.lt_plans {
                handles[1] = Some(Handle::new(backend, BlasKind::Lt, &stream)?);
            }
        }
        let usual = Operands::on(backend, device, 1)?;
        let mut larger: Option<Operands<'_>> = None;
        // Half of the free memory, at 4 MiB for each unit.
        let fitting = usize::try_from(backend.memory_info(device)?.free >> 23).unwrap_or(usize::MAX);
        let largest = 1 << fitting.clamp(1, Operands::MOST).ilog2();
        for work in Work::of(backend, device)? {
            // A fast device needs more work than usual each time.
            let (mut least, most) = (1, if work.shape(1).is_some() { 4 } else { 16 });
            for observed in Observed::ALL {
                let mut attempt = |load: usize| {
                    let size = (load * least).min(largest);
                    if size > 1 && larger.as_ref().is_none_or(|made| made.load != size) {
                        // The device may have no space for both.
                        larger = None;
                        larger = Some(Operands::on(backend, device, size)?);
                    }
                    let all = larger.as_ref().filter(|_| size > 1).unwrap_or(&usual);
                    let plan = match (work, work.shape(all.load), &mut handles[1]) {
                        (Work::Plan, Some(shape), Some(handle)) => {
                            Some(handle.raw_mut().create_plan(&PlanOptions::new(shape, Epilogue::None, 0))?)
                        }
                        _ => None,
                    };
                    let executable = match work {
                        Work::Launch => {
                            let capture = Capture::begin(&captured, CaptureMode::ThreadLocal)?;
                            captured.copy(all.target.all(), all.ones.all())?;
                            Some(capture.end(&[&all.ones, &all.target])?.instantiate()?)
                        }
                        _ => None,
                    };
                    let made = match (plan, &executable) {
                        (Some(plan), _) => Made::Plan(plan),
                        (_, Some(executable)) => Made::Executable(executable),
                        _ => Made::Nothing,
                    };
                    if observed as usize == 0 || size > 1 {
                        // The first call of a kind may load what later ones find loaded.
                        all.enqueue(work, &stream, &mut handles, made)?;
                    }
                    stream.synchronize()?;
                    all.clear(work)?;
                    all.enqueue(work, &stream, &mut handles, made)?;
                    let pending = match observed {
                        Observed::Stream | Observed::Device | Observed::StreamQuery => stream.is_pending()?,
                        Observed::Event | Observed::EventQuery | Observed::OtherStream => {
                            stream.record(&event)?;
                            event.is_pending()?
                        }
                    };
                    observed.wait(&stream, &event, &other, backend)?;
                    let arrived = all.has_arrived(work);
                    // The memory of the case outlives the work in any case.
                    all.backend.synchronize_device(device)?;
                    stream.synchronize()?;
                    if let (Some(plan), Some(handle)) = (plan, &mut handles[1]) {
                        handle.raw_mut().destroy_plan(plan)?;
                    }
                    check!(
                        arrived?,
                        "{work:?}, alone on its stream, was not done after a wait of the kind {observed:?}"
                    );
                    if pending {
                        least = size.min(most);
                    }
                    Ok(Attempt::seen(pending))
                };
                // The calls are those of the first way to wait, with one more.
                let mut prove =
                    || until_conclusive("work that is alone on its stream is never seen pending", &mut attempt);
                let proved = if observed as usize == 0 { prove() } else { as_one(prove) };
                proved.map_err(|failure| failure.with_details(&format!("{work:?}, {observed:?}")))?;
            }
        }
        Ok(())
    })
}

// ------------------------------------------------------------------------------------------------------------- the pairs

fn each_kind_of_event_orders_each_kind_of_stream(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (event_kinds, stream_kinds) = (EventKind::of(backend, device)?, StreamKind::of(backend, device)?);
        // Each kind of stream records. Each event has a stream of its own that waits for it.
        for &kind in &stream_kinds {
            let made = kind.make(backend, device)?;
            let events = event_kinds.iter().map(|kind| kind.make(backend, device)).collect::<Result<Vec<_>>>()?;
            let plain = events.iter().map(|_| Stream::on(backend, device)).collect::<Result<Vec<_>>>()?;
            let waits = event_kinds.iter().zip(&events).zip(&plain);
            let waits: Vec<_> = waits.map(|((kind, made), stream)| (*kind, &made.event, stream)).collect();
            order_streams(backend, &busy, &made.stream, &waits, None)
                .map_err(|failure| failure.with_details(&format!("{kind:?} records")))?;
        }
        // Each kind of stream waits. The default streams may wait for each other, so each of them has a load of its own.
        let (recorder, idle) = (Stream::on(backend, device)?, IdleStream::on(backend, device)?);
        // With the first kind of event, the load lasts long enough for a stream that does not wait to run ahead.
        let mut idle = Some(&idle);
        for kind in event_kinds {
            let made = kind.make(backend, device)?;
            let is_apart = |stream: &StreamKind| *stream == StreamKind::PerThread;
            for apart in [false, true] {
                let kinds: Vec<_> = stream_kinds.iter().copied().filter(|stream| is_apart(stream) == apart).collect();
                let streams = kinds.iter().map(|kind| kind.make(backend, device)).collect::<Result<Vec<_>>>()?;
                let waits: Vec<_> =
                    kinds.iter().zip(&streams).map(|(kind, waiting)| (*kind, &made.event, &waiting.stream)).collect();
                if !waits.is_empty() {
                    order_streams(backend, &busy, &recorder, &waits, idle)
                        .map_err(|failure| failure.with_details(&format!("an event: {kind:?}")))?;
                }
            }
            idle = None;
        }
        Ok(())
    })
}

/// The default stream of one thread waits for that of another, and the default streams of a device for each other.
fn default_streams_of_threads_wait_for_each_other(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let tag = backend.identity().tag;
        let (of_thread, legacy) = (StreamId::per_thread_default(tag, device), StreamId::legacy_default(tag, device));
        let mut ways = vec![(of_thread, of_thread)];
        if backend.capabilities(device)?.legacy_default_stream {
            ways.extend([(legacy, of_thread), (of_thread, legacy)]);
        }
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (block, copy) = (Block::on(backend, device, BYTES)?, Block::on(backend, device, BYTES)?);
        let event = Event::on(backend, device)?;
        let mut byte = 0;
        for (first, second) in ways {
            let (recorder, waiting) = (Stream::borrowed(backend, first), Stream::borrowed(backend, second));
            until_conclusive("the work of one thread was over before another thread waited for it", |load| {
                byte = byte % 250 + 1;
                busy.enqueue(&recorder, load)?;
                recorder.set(block.all(), byte)?;
                recorder.record(&event)?;
                let waits = || -> Result<(bool, bool)> {
                    waiting.wait(&event)?;
                    waiting.copy(copy.all(), block.all())?;
                    let pending = event.is_pending()?;
                    waiting.synchronize()?;
                    Ok((pending, event.query()?.is_complete()))
                };
                let waited = std::thread::scope(|scope| scope.spawn(waits).join());
                recorder.synchronize()?;
                let (pending, reached) = waited.map_err(|_| Failure::new("a thread panicked"))??;
                check!(reached, "{second:?} of another thread did not wait for an event of {first:?}");
                check!(copy.read()? == [byte; BYTES], "{second:?} of another thread overtook the work of {first:?}");
                Ok(Attempt::seen(pending))
            })?;
        }
        Ok(())
    })
}

/// Records the events behind a load of `first`. Each of the other streams waits for its event, and then makes a copy that must come
/// after the load. With `idle`, the load lasts until a copy that does not wait has begun.
fn order_streams(
    backend: &dyn Backend,
    busy: &StreamLoad<'_>,
    first: &Stream<'_>,
    waits: &[(impl std::fmt::Debug, &Event<'_>, &Stream<'_>)],
    idle: Option<&IdleStream<'_>>,
) -> CaseResult {
    let device = first.id().device();
    let block = Block::on(backend, device, BYTES)?;
    let copies = waits.iter().map(|_| Block::on(backend, device, BYTES)).collect::<Result<Vec<_>>>()?;
    let mut byte = 0;
    until_conclusive("the work was over before the waits for it were enqueued", |load| {
        byte = byte % 250 + 1;
        busy.enqueue(first, if idle.is_some() { load * 5 } else { load })?;
        first.set(block.all(), byte)?;
        for (_, event, _) in waits {
            first.record(event)?;
        }
        for ((_, event, second), copy) in waits.iter().zip(&copies) {
            second.wait(event)?;
            second.copy(copy.all(), block.all())?;
        }
        if let Some(idle) = idle {
            idle.let_others_begin()?;
        }
        let (mut all_pending, mut overtaken) = (true, None);
        for (kind, event, second) in waits {
            let pending = event.is_pending()?;
            if pending && second.query()?.is_complete() && event.is_pending()? {
                overtaken = Some(kind);
            }
            all_pending &= pending;
        }
        let mut early = None;
        for (kind, event, second) in waits {
            second.synchronize()?;
            if !event.query()?.is_complete() {
                early = Some(kind);
            }
        }
        first.synchronize()?;
        for ((kind, ..), copy) in waits.iter().zip(&copies) {
            if copy.read()? != [byte; BYTES] {
                overtaken = Some(kind);
            }
        }
        check!(overtaken.is_none(), "a stream overtook the work that it waits for: {overtaken:?}");
        check!(early.is_none(), "an event is pending after a stream that waits for it has gone on: {early:?}");
        Ok(Attempt::seen(all_pending))
    })
}

/// Number of streams, more than vendors have queues.
const MANY: usize = 20;

fn streams(backend: &dyn Backend, device: u32) -> Result<Vec<Stream<'_>>> {
    (0..MANY).map(|_| Stream::on(backend, device)).collect()
}

fn many_streams_wait_for_one_event(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (source, streams) = (Stream::on(backend, device)?, streams(backend, device)?);
        let (block, copies) = (Block::on(backend, device, 256)?, Block::on(backend, device, 256 * MANY)?);
        let event = Event::on(backend, device)?;
        until_conclusive("the work was over before every stream waited for it", |load| {
            source.set(block.all(), 0)?;
            source.set(copies.all(), 0)?;
            busy.enqueue(&source, load)?;
            source.set(block.all(), 7)?;
            source.record(&event)?;
            for (index, stream) in streams.iter().enumerate() {
                stream.wait(&event)?;
                stream.copy(copies.span(index * 256..(index + 1) * 256), block.all())?;
            }
            let pending = event.is_pending()?;
            streams.iter().try_for_each(|stream| stream.synchronize())?;
            check!(copies.read()? == [7; 256 * MANY], "one of {MANY} streams did not wait for an event of all");
            Ok(Attempt::seen(pending))
        })
    })
}

fn one_stream_waits_for_many_events(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (last, streams) = (Stream::on(backend, device)?, streams(backend, device)?);
        let block = Block::on(backend, device, 256 * MANY)?;
        let copy = Block::on(backend, device, 256 * MANY)?;
        let events = streams.iter().map(|_| Event::on(backend, device)).collect::<Result<Vec<_>>>()?;
        let reached = Event::on(backend, device)?;
        last.record(&reached)?;
        // The stream that is late is the first, the last, and one between.
        for late in [0, MANY / 2, MANY - 1] {
            until_conclusive("the work was over before it was waited for", |load| {
                last.set(block.all(), 0)?;
                last.synchronize()?;
                for (index, (stream, event)) in streams.iter().zip(&events).enumerate() {
                    if index == late {
                        busy.enqueue(stream, load)?;
                    }
                    stream.set(block.span(index * 256..(index + 1) * 256), 9)?;
                    stream.record(event)?;
                }
                // Many waits in a row, of which the ones that count are the last.
                as_one(|| (0..EVENTS).try_for_each(|_| last.wait(&reached)))?;
                events.iter().try_for_each(|event| last.wait(event))?;
                last.copy(copy.all(), block.all())?;
                let pending = events[late].is_pending()?;
                last.synchronize()?;
                check!(copy.read()? == [9; 256 * MANY], "a stream did not wait for one of {MANY} events");
                Ok(Attempt::seen(pending))
            })?;
        }
        Ok(())
    })
}

/// Operations that are outstanding on one stream, a little fewer than a call may wait for.
const OUTSTANDING: usize = 900;

/// Work of five kinds behind a load. The calls return while the load is outstanding, and each operation keeps its place.
fn many_operations_are_outstanding(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (stream, before) = (Stream::on(backend, device)?, Event::on(backend, device)?);
        let (event, reached) = (Event::on(backend, device)?, Event::on(backend, device)?);
        let (block, copies) =
            (Block::on(backend, device, 4 * OUTSTANDING)?, Block::on(backend, device, 4 * OUTSTANDING)?);
        stream.record(&reached)?;
        let mut round = 0;
        until_conclusive("a call waits, and fewer than 1,000 operations of its stream are outstanding", |load| {
            round += 1;
            stream.set(copies.all(), 0)?;
            stream.synchronize()?;
            let loaded = busy.enqueue_at_most(&stream, load, OUTSTANDING / 2)?;
            stream.record(&before)?;
            let element = |index: usize| FillPattern::U32((round << 16 | index) as u32);
            // Each fill changes the word that the copies behind it take, so that each copy has the value of its place.
            as_one(|| {
                (loaded + 1..OUTSTANDING).try_for_each(|index| {
                    let (from, to) = (block.span(0..4), copies.span(4 * index..4 * index + 4));
                    match index % 5 {
                        0 => stream.fill(from, element(index)),
                        1 => stream.copy(to, from),
                        2 => stream.copy_rows(to, from, CopyShape::new(2, 2)),
                        3 => stream.record(&event),
                        _ => stream.wait(&reached),
                    }
                })
            })?;
            let outstanding = before.is_pending()?;
            stream.synchronize()?;
            let seen = copies.read()?;
            for index in (loaded + 1..OUTSTANDING).filter(|index| index % 5 == 1 || index % 5 == 2) {
                let filled = index / 5 * 5;
                if filled <= loaded {
                    continue;
                }
                let got = u32::from_ne_bytes([0, 1, 2, 3].map(|byte| seen[4 * index + byte]));
                let expected = (round << 16 | filled) as u32;
                check!(got == expected, "operation {index} of {OUTSTANDING} copied {got:#x}, expected {expected:#x}");
            }
            Ok(Attempt::seen(outstanding))
        })
    })
}

/// Number of objects, more than a counter of one byte can hold.
const CROWD: usize = 300;

/// Number of events, more than pools of 1,024 have.
const EVENTS: usize = 1100;

fn many_objects_live_at_once(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let first = Event::on(backend, device)?;
        let before = backend.live_objects();
        let stream = Stream::on(backend, device)?;
        let events = (0..EVENTS).map(|_| Event::on(backend, device)).collect::<Result<Vec<_>>>()?;
        let blocks = (0..CROWD).map(|_| Block::on(backend, device, 64)).collect::<Result<Vec<_>>>()?;
        let pinned = Pinned::new(backend, 64 * CROWD)?;
        let mut expected = before;
        expected.streams += 1;
        expected.events += EVENTS as u64;
        expected.allocations += CROWD as u64;
        expected.host_allocations += 1;
        check_eq!(backend.live_objects(), expected, "live objects with {EVENTS} events and {CROWD} blocks");
        check!(!backend.is_exiting(), "a process with many objects that does not exit is reported as exiting");
        // Behind the load, an event that is complete before the first one has the state of another event.
        busy.enqueue(&stream, 2)?;
        stream.record(&first)?;
        events.iter().try_for_each(|event| stream.record(event))?;
        let early = events.iter().position(|event| event.query().is_ok_and(|completion| completion.is_complete()));
        check!(
            early.is_none() || !first.is_pending()?,
            "event {} of {EVENTS} is complete before an event that was recorded earlier on its stream",
            early.unwrap_or(0)
        );
        for (index, block) in blocks.iter().enumerate() {
            stream.set(block.all(), (index % 251) as u8)?;
        }
        for (index, block) in blocks.iter().enumerate() {
            stream.copy(pinned.span(index * 64..(index + 1) * 64), block.all())?;
        }
        stream.synchronize()?;
        for event in &events {
            check!(event.query()?.is_complete(), "one of {EVENTS} events is pending after its stream was synchronized");
        }
        let seen = pinned.read()?;
        for (index, bytes) in seen.chunks(64).enumerate() {
            check!(bytes.iter().all(|&byte| byte == (index % 251) as u8), "block {index} of {CROWD} has other bytes");
        }
        drop((events, blocks, pinned, stream));
        check_eq!(backend.live_objects(), before, "live objects after {EVENTS} events and {CROWD} blocks");
        Ok(())
    })
}

fn many_handles_live_at_once(backend: &dyn Backend) -> CaseResult {
    const HANDLES: usize = 6;
    on_devices(backend, |device| {
        let before = backend.live_objects().handles;
        let stream = Stream::on(backend, device)?;
        for &kind in kinds_of_handles(backend)? {
            let mut handles = (0..HANDLES)
                .map(|_| Handle::new(backend, kind, &stream))
                .collect::<std::result::Result<Vec<_>, _>>()?;
            check_eq!(backend.live_objects().handles, before + HANDLES as u64, "live handles of kind {kind:?}");
            check!(!backend.is_exiting(), "a process with {HANDLES} handles that does not exit is reported as exiting");
            if kind == BlasKind::Blas {
                // In the order of their creation, and against it.
                for index in (0..HANDLES).chain((0..HANDLES).rev()) {
                    let product = Product::new(GemmShape::new(DataType::F32, 5 + index, 7, 9), index as u64);
                    product.prove(backend, &mut handles[index], &stream)?;
                }
            }
            // From the middle, so that a slot is free between others.
            handles.remove(HANDLES / 2);
            check_eq!(backend.live_objects().handles, before + HANDLES as u64 - 1, "live handles after one ended");
        }
        Ok(())
    })
}

/// Number of recorded operations, more than the queues and pools of 1,024 have.
const RECORDED: usize = 1100;

/// A chain of operations, each of which reads the result of the one before.
fn many_operations_are_recorded(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let block = Block::on(backend, device, 16 * (RECORDED + 1))?;
        let part = |index: usize| block.span(index * 16..(index + 1) * 16);
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        for index in 0..RECORDED {
            stream.copy(part(index + 1), part(index))?;
        }
        let graph = capture.end(&[&block])?;
        let executable = graph.instantiate()?;
        for byte in 1..=3 {
            stream.set(block.all(), 0)?;
            stream.set(part(0), byte)?;
            executable.launch(&stream)?;
            stream.synchronize()?;
            check!(
                block.read()? == [byte; 16 * (RECORDED + 1)],
                "one of {RECORDED} recorded copies was not executed, or not in order"
            );
        }
        Ok(())
    })
}
