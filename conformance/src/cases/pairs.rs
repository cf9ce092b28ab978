//! Clauses about two things at once, for each pair of their kinds: streams and waits, streams and events. Also clauses about many
//! objects that are alive at the same time.

use std::time::Duration;

use highwater_hal::{Backend, BlasKind, CaptureMode, Completion, DataType, GemmShape, Result};

use super::blas::kinds as kinds_of_handles;
use super::kinds::{EventKind, StreamKind};
use crate::case::{CaseResult, cases, check, check_eq, on_devices};
use crate::device::{Block, Capture, Event, Handle, Pinned, Stream};
use crate::idle_stream::IdleStream;
use crate::matrix::Product;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "pairs";
    each_wait_covers_each_kind_of_stream:
        ["stream.synchronize", "event.synchronize", "devices.synchronize", "stream.query", "event.query", "event.wait-orders"];
    each_kind_of_event_orders_each_kind_of_stream: ["event.wait-orders", "event.query", "event.synchronize"];
    many_streams_wait_for_one_event: ["event.wait-orders"];
    one_stream_waits_for_many_events: ["event.wait-orders"];
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
        // A query may come before the work begins, so it is repeated without a pause that hides an early answer.
        let until_complete = |query: &dyn Fn() -> Result<Completion>| -> Result<()> {
            while query()? == Completion::Pending {
                std::thread::sleep(Duration::from_micros(50));
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
        // With the first kind of event, each stream also has the time to run ahead.
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
