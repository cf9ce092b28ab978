//! Clauses that hold for every kind of stream and of event. Each case runs the kinds that its clause concerns, on the first two
//! devices.

use std::time::{Duration, Instant};

use highwater_hal::{
    Backend, CaptureMode, CopyShape, EventOptions, FillPattern, Result, StreamId, StreamOptions, StreamPriority,
};

use crate::case::{CaseResult, Failure, cases, check, check_error, on_devices};
use crate::device::{Block, Capture, DEVICE, Event, Memory, Object, Pinned, Stream};
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};
use crate::validation::made_here;

cases! {
    group "kinds";
    streams_do_not_wait_for_each_other: ["stream.independent", "stream.query", "stream.synchronize"];
    many_streams_do_not_wait_for_each_other: ["stream.independent"];
    eight_streams_do_not_wait_for_each_other: ["stream.independent"];
    waits_are_pending_work: ["stream.query"];
    streams_of_other_code_are_one_with_their_owner: ["stream.order", "stream.synchronize", "stream.query"]
        needs [has::foreign_objects];
    long_work_is_waited_for: ["stream.synchronize", "event.synchronize", "devices.synchronize"];
    a_thread_that_waits_disturbs_no_other: ["backend.concurrent"];
    events_that_were_never_recorded: ["event.never-recorded", "event.query-never-recorded", "event.synchronize"];
    events_are_waited_for_as_they_are: ["event.wait-snapshot", "event.wait-orders", "stream.independent"];
    records_move_events: ["event.record-moves", "event.query"];
    answers_follow_the_calls_of_other_threads:
        ["event.query", "stream.query", "event.synchronize", "event.wait-orders", "event.record-moves"];
    records_behind_a_wait: ["event.query", "event.wait-orders"];
    records_on_another_device: ["event.record-device"] needs [TWO_DEVICES];
    destroyed_events_are_stale: ["event.destroy-stale", "backend.ids-checked"];
    destroyed_streams_are_stale: ["stream.destroy-stale", "backend.ids-checked"];
    elapsed_time_between_streams: ["event.elapsed"] needs [has::event_timing];
    elapsed_time_follows_the_device_and_not_the_calls: ["event.elapsed", "event.elapsed-order"] needs [has::event_timing];
    elapsed_time_of_unreached_records: ["event.elapsed-invalid"] needs [has::event_timing];
    elapsed_time_of_one_event: ["event.elapsed-invalid"] needs [has::event_timing];
    events_order_devices_after_their_stream: ["event.outlives-stream", "event.wait-orders"] needs [TWO_DEVICES];
    events_of_a_thread_are_seen_by_others: ["event.query", "event.synchronize"] needs [has::per_thread_default_stream];
    new_events_know_no_earlier_record: ["event.query-never-recorded", "event.destroy-pending"];
    elapsed_time_follows_the_latest_record: ["event.elapsed-invalid", "event.record-moves"] needs [has::event_timing];
    launches_are_pending_work: ["stream.query", "capture.replay"] needs [has::capture];
    streams_that_joined_through_others_are_joined_too: ["capture.unjoined", "capture.lost"] needs [has::capture];
    captures_of_one_thread_are_seen_by_others: ["capture.any-thread", "capture.not-executed"] needs [has::capture];
    graphs_run_on_each_kind_of_stream: ["capture.replay", "stream.order"] needs [has::capture];
    graphs_keep_what_they_recorded: ["capture.by-value"] needs [has::capture];
    joined_streams_execute_nothing: ["capture.not-executed", "capture.joins"] needs [has::capture];
    events_recorded_before_a_stream_joined: ["capture.undisturbed"] needs [has::capture];
    ending_no_capture_disturbs_no_other: ["capture.end-without", "capture.undisturbed"] needs [has::capture];
}

const BYTES: usize = 1 << 12;

// ------------------------------------------------------------------------------------------------------------ the kinds

/// The kinds of streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamKind {
    Normal,
    Low,
    High,
    Legacy,
    PerThread,
    Foreign,
}

impl StreamKind {
    /// Returns the kinds that a device has.
    pub(super) fn of(backend: &dyn Backend, device: u32) -> Result<Vec<Self>> {
        let can = backend.capabilities(device)?;
        let kinds = [
            (true, Self::Normal),
            (can.stream_priority, Self::Low),
            (can.stream_priority, Self::High),
            (can.legacy_default_stream, Self::Legacy),
            (can.per_thread_default_stream, Self::PerThread),
            (can.foreign_objects, Self::Foreign),
        ];
        Ok(kinds.into_iter().filter_map(|(has, kind)| has.then_some(kind)).collect())
    }

    pub(super) fn is_default(self) -> bool {
        matches!(self, Self::Legacy | Self::PerThread)
    }

    pub(super) fn make<'b>(self, backend: &'b dyn Backend, device: u32) -> Result<AnyStream<'b>> {
        let tag = backend.identity().tag;
        let with = |priority| Stream::with_options(backend, device, &StreamOptions::new().with_priority(priority));
        let (stream, owner) = match self {
            Self::Normal => (Stream::on(backend, device)?, None),
            Self::Low => (with(StreamPriority::Low)?, None),
            Self::High => (with(StreamPriority::High)?, None),
            Self::Legacy => (Stream::borrowed(backend, StreamId::legacy_default(tag, device)), None),
            Self::PerThread => (Stream::borrowed(backend, StreamId::per_thread_default(tag, device)), None),
            Self::Foreign => {
                let owner = Stream::on(backend, device)?;
                let raw = backend.raw_stream(owner.id())?;
                made_here();
                // SAFETY: the owner is a stream of the same device, and is dropped after the new id.
                let stream = Object::adopted(backend, unsafe { backend.stream_from_raw(device, raw) }?);
                (stream, Some(owner))
            }
        };
        Ok(AnyStream { stream, owner })
    }
}

/// A stream of any kind.
pub(super) struct AnyStream<'b> {
    pub(super) stream: Stream<'b>,
    /// The original of a stream of other code. Dropped last.
    pub(super) owner: Option<Stream<'b>>,
}

/// The kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventKind {
    Plain,
    Timing,
    Interprocess,
    Foreign,
}

impl EventKind {
    /// Returns the kinds that a device has.
    pub(super) fn of(backend: &dyn Backend, device: u32) -> Result<Vec<Self>> {
        let can = backend.capabilities(device)?;
        let kinds = [
            (true, Self::Plain),
            (can.event_timing, Self::Timing),
            (can.interprocess_events, Self::Interprocess),
            (can.foreign_objects, Self::Foreign),
        ];
        Ok(kinds.into_iter().filter_map(|(has, kind)| has.then_some(kind)).collect())
    }

    pub(super) fn make<'b>(self, backend: &'b dyn Backend, device: u32) -> Result<AnyEvent<'b>> {
        let with = |options: EventOptions| Event::with_options(backend, device, &options);
        let (event, owner) = match self {
            Self::Plain => (with(EventOptions::new())?, None),
            Self::Timing => (with(EventOptions::new().with_timing())?, None),
            Self::Interprocess => (with(EventOptions::new().with_interprocess())?, None),
            Self::Foreign => {
                let owner = with(EventOptions::new())?;
                let raw = backend.raw_event(owner.id())?;
                made_here();
                // SAFETY: the owner is an event of the same device, and is dropped after the new id.
                let event = Object::adopted(backend, unsafe { backend.event_from_raw(device, raw) }?);
                (event, Some(owner))
            }
        };
        Ok(AnyEvent { event, owner })
    }
}

/// An event of any kind.
pub(super) struct AnyEvent<'b> {
    pub(super) event: Event<'b>,
    /// The original of an event of other code. Dropped last.
    pub(super) owner: Option<Event<'b>>,
}

fn on_each_event(backend: &dyn Backend, prove: impl Fn(u32, EventKind, &Event<'_>) -> CaseResult) -> CaseResult {
    on_devices(backend, |device| {
        EventKind::of(backend, device)?.into_iter().try_for_each(|kind| {
            let made = kind.make(backend, device)?;
            prove(device, kind, &made.event).map_err(|failure| failure.with_details(&format!("an event: {kind:?}")))
        })
    })
}

/// Work whose effect the CPU sees.
///
/// An event is reached after the work before it. Its stream may be pending for a moment longer. An H200 reported so for a stream
/// whose last command recorded an event for other processes. So this work, and not the stream, shows whether the event came too
/// early.
struct Mark<'b> {
    block: Block<'b>,
    pinned: Pinned<'b>,
    byte: u8,
}

impl<'b> Mark<'b> {
    fn on(backend: &'b dyn Backend, device: u32) -> Result<Self> {
        let (block, pinned) = (Block::on(backend, device, BYTES)?, Pinned::holding(backend, &[0; BYTES])?);
        Ok(Self { block, pinned, byte: 0 })
    }

    /// Enqueues a copy of a byte that the destination does not have.
    fn enqueue(&mut self, stream: &Stream<'_>) -> Result<()> {
        self.byte = self.byte % 250 + 1;
        stream.set(self.block.all(), self.byte)?;
        stream.copy(self.pinned.all(), self.block.all())
    }

    /// Returns whether the last copy is complete. The caller must have synchronized an event behind the copy.
    fn has_arrived(&self) -> bool {
        // SAFETY: each caller has synchronized an event that was recorded behind the copy, which the clause promises to be enough.
        (unsafe { self.pinned.read_now() }) == [self.byte; BYTES]
    }
}

// ---------------------------------------------------------------------------------------------------------- the streams

fn streams_do_not_wait_for_each_other(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let kinds = StreamKind::of(backend, device)?;
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (block, pinned) = (Block::on(backend, device, BYTES)?, Pinned::new(backend, BYTES)?);
        for &occupied_kind in &kinds {
            let occupied = occupied_kind.make(backend, device)?;
            // The two default streams may wait for each other.
            let free_kinds = kinds.iter().copied().filter(|kind| !(kind.is_default() && occupied_kind.is_default()));
            let free: Vec<(StreamKind, AnyStream<'_>)> =
                free_kinds.map(|kind| Ok((kind, kind.make(backend, device)?))).collect::<Result<_>>()?;
            until_conclusive("a stream waits for another that it has nothing to do with", |load| {
                busy.enqueue(&occupied.stream, load)?;
                for (kind, AnyStream { stream, .. }) in &free {
                    let byte = *kind as u8 + 1;
                    stream.set(block.all(), byte)?;
                    stream.copy(pinned.all(), block.all())?;
                    stream.synchronize()?;
                    check!(stream.query()?.is_complete(), "{kind:?} is pending after it was synchronized");
                    // SAFETY: the stream was synchronized, which the clause promises to be enough.
                    let seen = unsafe { pinned.read_now() };
                    check!(seen == vec![byte; BYTES], "work on {kind:?} did not arrive");
                }
                let outstanding = occupied.stream.is_pending()?;
                occupied.stream.synchronize()?;
                Ok(Attempt::seen(outstanding))
            })
            .map_err(|failure| {
                failure.with_details(&format!("work on {occupied_kind:?}, and after it on each of {kinds:?}"))
            })?;
        }
        Ok(())
    })
}

/// More streams than vendors have queues.
const MANY: usize = 130;

/// Only two streams have work at a time. The case queries the streams that would share a queue with the busy one if a backend assigned
/// its streams to 8, 16, 32, 64 or 128 queues in rotation, and their neighbors.
fn many_streams_do_not_wait_for_each_other(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let block = Block::on(backend, device, BYTES)?;
        let streams =
            crate::sweep::as_one(|| (0..MANY).map(|_| Stream::on(backend, device)).collect::<Result<Vec<_>>>())?;
        for occupied in [0, MANY - 1] {
            let is_asked = |index: &usize| {
                let distance = index.abs_diff(occupied);
                distance > 0 && distance < 13 || [16, 32, 64, 128].iter().any(|queues| distance.abs_diff(*queues) < 2)
            };
            let asked: Vec<usize> = (0..MANY).filter(is_asked).collect();
            until_conclusive("one of many streams waits for another that it has nothing to do with", |load| {
                busy.enqueue(&streams[occupied], load)?;
                for &index in &asked {
                    streams[index].set(block.all(), 1)?;
                    streams[index].synchronize()?;
                }
                let outstanding = streams[occupied].is_pending()?;
                streams[occupied].synchronize()?;
                Ok(Attempt::seen(outstanding))
            })?;
        }
        Ok(())
    })
}

/// Seven streams have outstanding work: the first a load, the others a wait for it and work behind the wait. The eighth waits for none.
fn eight_streams_do_not_wait_for_each_other(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (block, event) = (Block::on(backend, device, 8)?, Event::on(backend, device)?);
        let streams = (0..8).map(|_| Stream::on(backend, device)).collect::<Result<Vec<_>>>()?;
        // A backend may count the streams in the order of their calls or of their creation.
        for free in [streams.len() - 1, 0] {
            let order: Vec<usize> = (0..streams.len()).filter(|index| *index != free).chain([free]).collect();
            until_conclusive("the eighth stream with work waits for another that it has nothing to do with", |load| {
                busy.enqueue(&streams[order[0]], load)?;
                streams[order[0]].record(&event)?;
                for &index in &order[1..7] {
                    streams[index].wait(&event)?;
                    streams[index].set(block.span(index..index + 1), 1)?;
                }
                streams[free].set(block.span(free..free + 1), 1)?;
                streams[free].synchronize()?;
                let outstanding = event.is_pending()?;
                streams.iter().try_for_each(|stream| stream.synchronize())?;
                Ok(Attempt::seen(outstanding))
            })
            .map_err(|failure| failure.with_details(&format!("stream {free} of the eight comes last")))?;
        }
        Ok(())
    })
}

/// A wait is the last command of its stream, and the work before it is done.
fn waits_are_pending_work(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (occupied, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
        let block = Block::on(backend, device, BYTES)?;
        for kind in StreamKind::of(backend, device)? {
            let made = kind.make(backend, device)?;
            let stream = &made.stream;
            until_conclusive("the work was over before the stream that waits for it was asked", |load| {
                stream.set(block.all(), 1)?;
                stream.synchronize()?;
                busy.enqueue(&occupied, load)?;
                occupied.record(&event)?;
                stream.wait(&event)?;
                // A stream may take a moment until what came before the wait is done.
                let (mut overtaken, mut seen) = (false, false);
                while event.is_pending()? && !overtaken {
                    let complete = stream.query()?.is_complete();
                    let outstanding = event.is_pending()?;
                    (overtaken, seen) = (complete && outstanding, seen || outstanding);
                    std::thread::sleep(Duration::from_micros(100));
                }
                stream.synchronize()?;
                let reached = event.query()?.is_complete();
                occupied.synchronize()?;
                check!(
                    !overtaken,
                    "a stream is complete although its last command waits for an event that is not reached"
                );
                check!(reached, "a synchronized stream did not wait for the event that its last command waits for");
                Ok(Attempt::seen(seen))
            })
            .map_err(|failure| failure.with_details(&format!("{kind:?} on device {device}")))?;
        }
        Ok(())
    })
}

fn streams_of_other_code_are_one_with_their_owner(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let made = StreamKind::Foreign.make(backend, device)?;
        let owner = made.owner.as_ref().ok_or_else(|| Failure::new("a wrapped stream has no owner"))?;
        for (first, second) in [(owner, &made.stream), (&made.stream, owner)] {
            until_conclusive("the work of one id was over before the other id was asked", |load| {
                let (block, pinned) = (Block::on(backend, device, BYTES)?, Pinned::holding(backend, &[0; BYTES])?);
                busy.enqueue(first, load)?;
                first.set(block.all(), 1)?;
                second.set(block.all(), 2)?;
                first.copy(pinned.all(), block.all())?;
                let pending = second.is_pending()?;
                second.synchronize()?;
                // SAFETY: the other id of the stream was synchronized.
                let seen = unsafe { pinned.read_now() };
                check!(
                    seen == [2; BYTES],
                    "work by two ids of one stream is not in order, or a wait for one id misses work by the other"
                );
                Ok(Attempt::seen(pending))
            })?;
        }
        Ok(())
    })
}

/// The duration of work that outlasts a wait with a limit of its own. Waits that poll have such limits: 100 ms, or a second. All waits
/// wait for the same work, so that the case takes this time once.
const LONG: Duration = Duration::from_millis(1200);
const LONG_BYTES: usize = 32 << 20;

fn long_work_is_waited_for(backend: &dyn Backend) -> CaseResult {
    type Wait = (&'static str, fn(&dyn Backend, &Stream<'_>, &Event<'_>) -> Result<()>);
    const WAITS: [Wait; 3] = [
        ("synchronize_stream", |_, stream, _| stream.synchronize()),
        ("synchronize_event", |_, _, event| event.synchronize()),
        ("synchronize_device", |backend, stream, _| backend.synchronize_device(stream.id().device())),
    ];
    let (block, pinned) = (Block::new(backend, LONG_BYTES)?, Pinned::new(backend, LONG_BYTES)?);
    let stream = Stream::new(backend)?;
    stream.copy(block.all(), pinned.all())?;
    stream.synchronize()?;
    let begun = Instant::now();
    stream.copy(block.all(), pinned.all())?;
    stream.synchronize()?;
    let one = begun.elapsed().max(Duration::from_micros(100));
    let (result, event) = (Pinned::holding(backend, &[0; BYTES])?, Event::new(backend)?);
    // A vendor's queue holds about a thousand operations.
    let copies = ((LONG.as_nanos() / one.as_nanos()) as usize + 1).min(900);
    crate::sweep::as_one(|| (0..copies).try_for_each(|_| stream.copy(block.all(), pinned.all())))?;
    stream.set(block.span(0..BYTES), 1)?;
    stream.copy(result.all(), block.span(0..BYTES))?;
    stream.record(&event)?;
    let answers = std::thread::scope(|scope| {
        let waiters = WAITS.map(|(_, wait)| {
            let (stream, event, result) = (&stream, &event, &result);
            scope.spawn(move || -> Result<(bool, bool)> {
                wait(backend, stream, event)?;
                // SAFETY: the copy was waited for.
                let seen = unsafe { result.read_now() };
                Ok((!event.is_pending()?, seen == [1; BYTES]))
            })
        });
        waiters.map(|waiter| waiter.join().map_err(|_| Failure::new("a thread panicked")))
    });
    for ((name, _), answer) in WAITS.into_iter().zip(answers) {
        let (is_reached, has_arrived) = answer??;
        check!(is_reached, "`{name}` returned while work of {LONG:?} was outstanding");
        check!(has_arrived, "`{name}` returned before work of {LONG:?} was done");
    }
    Ok(())
}

fn a_thread_that_waits_disturbs_no_other(backend: &dyn Backend) -> CaseResult {
    type Wait = (&'static str, fn(&dyn Backend, &Stream<'_>, &Event<'_>) -> Result<()>);
    const WAITS: [Wait; 3] = [
        ("synchronize_stream", |_, stream, _| stream.synchronize()),
        ("synchronize_event", |_, _, event| event.synchronize()),
        ("synchronize_device", |backend, _, _| backend.synchronize_device(DEVICE)),
    ];
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (occupied, event) = (Stream::new(backend)?, Event::new(backend)?);
    let (free, block) = (Stream::new(backend)?, Block::new(backend, BYTES)?);
    for (name, wait) in WAITS {
        until_conclusive("a call of one thread waits for a wait of another", |load| {
            busy.enqueue(&occupied, load * 2)?;
            occupied.record(&event)?;
            std::thread::scope(|scope| -> Result<Attempt, Failure> {
                let (begun, waits) = std::sync::mpsc::channel();
                let (occupied, event) = (&occupied, &event);
                let waiter = scope.spawn(move || {
                    // The receiver outlives the thread.
                    let _ = begun.send(());
                    wait(backend, occupied, event)
                });
                let _ = waits.recv();
                // The other thread is in its call by now, or the next attempt has more time.
                std::thread::sleep(Duration::from_millis(2));
                let calls = || -> Result<bool> {
                    let other = Event::new(backend)?;
                    free.set(block.all(), 1)?;
                    free.record(&other)?;
                    free.wait(&other)?;
                    let _ = (free.query()?, other.query()?);
                    drop(Stream::new(backend)?);
                    drop(other);
                    event.is_pending()
                };
                let outstanding = calls();
                let waited = waiter.join().map_err(|_| Failure::new("a thread panicked"))?;
                waited?;
                Ok(Attempt::seen(outstanding?))
            })
        })
        .map_err(|failure| failure.with_details(&format!("the wait: `{name}`")))?;
    }
    Ok(())
}

// ----------------------------------------------------------------------------------------------------------- the events

fn events_that_were_never_recorded(backend: &dyn Backend) -> CaseResult {
    on_each_event(backend, |device, _, event| {
        let block = Block::filled_on(backend, device, BYTES, 0)?;
        check!(event.query()?.is_complete(), "an event that was never recorded is pending");
        event.synchronize()?;
        for kind in StreamKind::of(backend, device)? {
            let made = kind.make(backend, device)?;
            made.stream.wait(event)?;
            made.stream.set(block.all(), 1)?;
            made.stream.synchronize()?;
        }
        check!(block.read()? == [1; BYTES], "work behind a wait for an event that was never recorded is lost");
        Ok(())
    })
}

/// Streams of each kind, on both devices, wait for a record that the device has not reached. The stream of the record gets more work before
/// the waits, and the event is recorded again after them, each behind work that lasts longer than the waits.
fn events_are_waited_for_as_they_are(backend: &dyn Backend) -> CaseResult {
    on_each_event(backend, |device, _, event| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (first, second, later) =
            (Stream::on(backend, device)?, Stream::on(backend, device)?, Event::on(backend, device)?);
        let mut kinds = Vec::new();
        for home in 0..backend.device_count().min(2) {
            kinds.extend(StreamKind::of(backend, home)?.into_iter().map(|kind| (kind, home)));
        }
        let waiting = kinds.iter().map(|(kind, home)| kind.make(backend, *home)).collect::<Result<Vec<_>>>()?;
        let mut mark = Mark::on(backend, device)?;
        until_conclusive("a stream waits for work or a record that came after the record that it waits for", |load| {
            busy.enqueue(&first, load)?;
            mark.enqueue(&first)?;
            first.record(event)?;
            busy.enqueue(&first, load * 2)?;
            first.record(&later)?;
            waiting.iter().try_for_each(|made| made.stream.wait(event))?;
            busy.enqueue(&second, load * 2)?;
            second.record(event)?;
            waiting.iter().try_for_each(|made| made.stream.synchronize())?;
            let outstanding = event.is_pending()? && later.is_pending()?;
            let has_arrived = mark.has_arrived();
            second.synchronize()?;
            first.synchronize()?;
            check!(
                has_arrived,
                "one of {kinds:?} (with their devices) did not wait for a record, because the event was recorded again"
            );
            Ok(Attempt::seen(outstanding))
        })
    })
}

fn records_move_events(backend: &dyn Backend) -> CaseResult {
    on_each_event(backend, |device, kind, event| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (occupied, idle) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        until_conclusive("a record on an idle stream waits for an earlier one on a busy stream", |load| {
            busy.enqueue(&occupied, load)?;
            occupied.record(event)?;
            idle.record(event)?;
            event.synchronize()?;
            let complete = event.query()?.is_complete();
            let outstanding = occupied.is_pending()?;
            occupied.synchronize()?;
            check!(complete, "an event is pending after it was synchronized");
            // An event for other processes may wait for its earlier record.
            Ok(Attempt::seen(outstanding || kind == EventKind::Interprocess))
        })?;
        // The other way round: seen complete, then recorded behind work, on the same stream and on another one.
        let mut mark = Mark::on(backend, device)?;
        for (seen, next) in [(&idle, &occupied), (&occupied, &occupied)] {
            until_conclusive("an event that was complete stays complete when it is recorded again", |load| {
                seen.record(event)?;
                event.synchronize()?;
                check!(event.query()?.is_complete(), "an event is pending after it was synchronized");
                // With the last record, as many as a byte can count.
                crate::sweep::as_one(|| (1..=u8::MAX).try_for_each(|_| seen.record(event)))?;
                busy.enqueue(next, load)?;
                mark.enqueue(next)?;
                next.record(event)?;
                let pending = event.is_pending()?;
                event.synchronize()?;
                check!(mark.has_arrived(), "an event is complete, and the work before its last record is not");
                Ok(Attempt::seen(pending))
            })?;
        }
        Ok(())
    })
}

/// One thread queries every state. Another one enqueues work, and the first queries again.
fn answers_follow_the_calls_of_other_threads(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (stream, other) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (event, mut mark) = (Event::on(backend, device)?, Mark::on(backend, device)?);
        for waits_by_stream in [false, true] {
            until_conclusive("a thread does not see what another thread has enqueued", |load| {
                stream.record(&event)?;
                other.wait(&event)?;
                stream.synchronize()?;
                event.synchronize()?;
                other.synchronize()?;
                let before = [stream.query()?, other.query()?, event.query()?];
                check!(
                    before.iter().all(|answer| answer.is_complete()),
                    "pending after it was synchronized: {before:?}"
                );
                std::thread::scope(|scope| {
                    let enqueue = || {
                        busy.enqueue(&stream, load)?;
                        mark.enqueue(&stream)?;
                        stream.record(&event)
                    };
                    scope.spawn(enqueue).join().map_err(|_| Failure::new("a thread panicked"))
                })??;
                let pending = stream.is_pending()? && event.is_pending()?;
                if waits_by_stream {
                    other.wait(&event)?;
                    other.synchronize()?;
                } else {
                    event.synchronize()?;
                }
                let has_arrived = mark.has_arrived();
                stream.synchronize()?;
                check!(
                    has_arrived,
                    "a thread does not wait for a record of another thread, because it has seen an earlier one"
                );
                Ok(Attempt::seen(pending))
            })?;
        }
        Ok(())
    })
}

/// A record directly behind a wait, with no work between, is reached after the work that was waited for.
fn records_behind_a_wait(backend: &dyn Backend) -> CaseResult {
    on_each_event(backend, |device, _, event| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (worker, relay, last) =
            (Stream::on(backend, device)?, Stream::on(backend, device)?, Stream::on(backend, device)?);
        let first = Event::on(backend, device)?;
        let (block, copy) = (Block::on(backend, device, BYTES)?, Block::on(backend, device, BYTES)?);
        until_conclusive("the work was over before the waits for it were enqueued", |load| {
            worker.set(block.all(), 0)?;
            busy.enqueue(&worker, load * 2)?;
            worker.set(block.all(), 1)?;
            worker.record(&first)?;
            relay.wait(&first)?;
            relay.record(event)?;
            last.wait(event)?;
            last.copy(copy.all(), block.all())?;
            let (relayed, outstanding) = (event.query()?.is_complete(), first.is_pending()?);
            check!(!(relayed && outstanding), "a record behind a wait is complete before the work that is waited for");
            last.synchronize()?;
            check!(copy.read()? == [1; BYTES], "a stream overtakes work that it waits for through another stream");
            Ok(Attempt::seen(outstanding))
        })
    })
}

fn records_on_another_device(backend: &dyn Backend) -> CaseResult {
    on_each_event(backend, |device, _, event| {
        let other = 1 - device;
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let own = Stream::on(backend, device)?;
        let kinds = StreamKind::of(backend, other)?;
        let made = kinds.into_iter().map(|kind| Ok((kind, kind.make(backend, other)?))).collect::<Result<Vec<_>>>()?;
        until_conclusive("the work was over before the refused records", |load| {
            busy.enqueue(&own, load)?;
            own.record(event)?;
            let mut all_in_time = true;
            for (kind, made) in &made {
                let refused = backend.record_event(event.id(), made.stream.id());
                check_error!(refused, WrongDevice, "a record on {kind:?} of another device");
                let pending = event.is_pending()?;
                let outstanding = own.is_pending()?;
                check!(pending || !outstanding, "a refused record on {kind:?} has made an event complete");
                all_in_time &= pending;
            }
            own.synchronize()?;
            check!(event.query()?.is_complete(), "a refused record has moved an event");
            Ok(Attempt::seen(all_in_time))
        })
    })
}

fn destroyed_events_are_stale(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        for kind in EventKind::of(backend, device)? {
            for is_recorded in [false, true] {
                let made = kind.make(backend, device)?;
                if is_recorded {
                    stream.record(&made.event)?;
                }
                let stale = made.event.destroy()?;
                check_error!(backend.destroy_event(stale), InvalidHandle, "a second destroy_event of {kind:?}");
                check_error!(backend.query_event(stale), InvalidHandle, "query_event of a destroyed {kind:?}");
                check_error!(backend.synchronize_event(stale), InvalidHandle, "synchronize_event, {kind:?}");
                let waits = backend.stream_wait_event(stream.id(), stale);
                check_error!(waits, InvalidHandle, "a wait for a destroyed event, {kind:?}");
                let records = backend.record_event(stale, stream.id());
                check_error!(records, InvalidHandle, "a record of a destroyed event, {kind:?}");
            }
        }
        Ok(())
    })
}

fn destroyed_streams_are_stale(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let event = Event::on(backend, device)?;
        let kinds = StreamKind::of(backend, device)?;
        for kind in kinds.into_iter().filter(|kind| !kind.is_default()) {
            let made = kind.make(backend, device)?;
            made.stream.record(&event)?;
            event.synchronize()?;
            let stale = made.stream.destroy()?;
            check_error!(backend.destroy_stream(stale), InvalidHandle, "a second destroy_stream of {kind:?}");
            check_error!(backend.query_stream(stale), InvalidHandle, "query_stream of a destroyed {kind:?}");
            check_error!(backend.synchronize_stream(stale), InvalidHandle, "synchronize_stream, {kind:?}");
            check_error!(backend.record_event(event.id(), stale), InvalidHandle, "a record on a destroyed {kind:?}");
            check_error!(backend.stream_wait_event(stale, event.id()), InvalidHandle, "a wait on a destroyed {kind:?}");
            check!(event.query()?.is_complete(), "a refused record has made an event pending");
        }
        Ok(())
    })
}

fn timed(backend: &dyn Backend, device: u32) -> Result<Event<'_>> {
    Event::with_options(backend, device, &EventOptions::new().with_timing())
}

fn elapsed_time_between_streams(backend: &dyn Backend) -> CaseResult {
    time_between_streams(backend, false)
}

/// The event whose record the device reaches last is recorded by an earlier call than the other one.
fn elapsed_time_follows_the_device_and_not_the_calls(backend: &dyn Backend) -> CaseResult {
    time_between_streams(backend, true)
}

fn time_between_streams(backend: &dyn Backend, end_is_called_first: bool) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (first, second) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (start, end) = (timed(backend, device)?, timed(backend, device)?);
        let mut short = None;
        let outcome = until_conclusive("the work between two records was over before it could be timed", |load| {
            let enqueue_end = || {
                busy.enqueue(&second, load * 2)?;
                second.record(&end)
            };
            if end_is_called_first {
                enqueue_end()?;
            }
            first.record(&start)?;
            start.synchronize()?;
            let begun = Instant::now();
            if !end_is_called_first {
                enqueue_end()?;
            }
            let mut least = Duration::ZERO;
            // The time is taken before the query: this thread may be preempted after it.
            loop {
                let now = begun.elapsed();
                if !end.is_pending()? {
                    break;
                }
                least = now;
            }
            let elapsed = Duration::from_nanos(backend.event_elapsed_ns(start.id(), end.id())?);
            let reverse = backend.event_elapsed_ns(end.id(), start.id())?;
            check!(
                reverse == 0 || least.is_zero(),
                "{reverse} ns passed from a record to one that was reached before it"
            );
            // A record may be timed earlier than it is reported, and clocks drift.
            let is_enough = elapsed + elapsed / 50 + Duration::from_micros(50) >= least;
            if !is_enough {
                short =
                    Some(Failure::new(format!("{elapsed:?} between records on two streams, of at least {least:?}")));
            }
            Ok(Attempt::seen(is_enough && !least.is_zero()))
        });
        match (outcome, short) {
            (Err(_), Some(short)) => Err(short),
            (outcome, _) => outcome,
        }
    })
}

fn elapsed_time_of_unreached_records(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (idle, occupied) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (reached, pending) = (timed(backend, device)?, timed(backend, device)?);
        for (start, end) in [(&pending, &reached), (&reached, &pending), (&pending, &pending)] {
            until_conclusive("a record was reached before its time was asked for", |load| {
                // Both had a record that was reached.
                idle.record(&reached)?;
                idle.record(&pending)?;
                idle.synchronize()?;
                busy.enqueue(&occupied, load)?;
                occupied.record(&pending)?;
                let asked = backend.event_elapsed_ns(start.id(), end.id());
                let outstanding = pending.is_pending()?;
                occupied.synchronize()?;
                if outstanding {
                    check_error!(asked, InvalidState, "elapsed time of a record that was not reached");
                }
                Ok(Attempt::seen(outstanding))
            })?;
        }
        Ok(())
    })
}

fn elapsed_time_of_one_event(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let (never, without, recorded) =
            (timed(backend, device)?, Event::on(backend, device)?, timed(backend, device)?);
        stream.record(&without)?;
        stream.record(&recorded)?;
        stream.synchronize()?;
        let elapsed = |event: &Event<'_>| backend.event_elapsed_ns(event.id(), event.id());
        check_error!(elapsed(&never), InvalidArgument, "elapsed time of an event that was never recorded, to itself");
        check_error!(elapsed(&without), InvalidArgument, "elapsed time of an event without timing, to itself");
        check!(elapsed(&recorded)? == 0, "the time from a record to itself is not 0");
        Ok(())
    })
}

// ------------------------------------------------------------------------------------------------------------ the graphs

fn captures_of_one_thread_are_seen_by_others(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let (stream, block) = (Stream::on(backend, device)?, Block::filled_on(backend, device, BYTES, 1)?);
        let is_capturing = || backend.is_capturing(stream.id());
        for _ in 0..2 {
            check!(!is_capturing()?, "a stream takes part in a capture that nobody began");
            let begun =
                std::thread::scope(|scope| scope.spawn(|| Capture::begin(&stream, CaptureMode::Relaxed)).join());
            let capture = begun.map_err(|_| Failure::new("a thread panicked"))??;
            check!(is_capturing()?, "a thread does not see that another one began a capture");
            stream.set(block.all(), 2)?;
            let ended = std::thread::scope(|scope| scope.spawn(|| capture.end(&[&block]).map(drop)).join());
            ended.map_err(|_| Failure::new("a thread panicked"))??;
            check!(!is_capturing()?, "a thread does not see that another one ended a capture");
            check!(block.read()? == [1; BYTES], "a fill during a capture of another thread was executed");
        }
        Ok(())
    })
}

fn graphs_run_on_each_kind_of_stream(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let captured = Stream::on(backend, device)?;
        let (source, target, seen) = (
            Block::on(backend, device, BYTES)?,
            Block::on(backend, device, BYTES)?,
            Block::on(backend, device, BYTES)?,
        );
        let capture = Capture::begin(&captured, CaptureMode::ThreadLocal)?;
        captured.copy(target.all(), source.all())?;
        let graph = capture.end(&[&source, &target])?;
        let executable = graph.instantiate()?;
        for kind in StreamKind::of(backend, device)? {
            let made = kind.make(backend, device)?;
            let stream = &made.stream;
            let mut byte = 0;
            until_conclusive("a launch waits for the work before it, or does not run on its stream", |load| {
                byte += 1;
                busy.enqueue(stream, load)?;
                stream.set(target.all(), 0xff)?;
                stream.set(source.all(), byte)?;
                executable.launch(stream)?;
                let outstanding = stream.is_pending()?;
                stream.set(source.all(), 0xee)?;
                stream.copy(seen.all(), target.all())?;
                stream.set(target.all(), 0xdd)?;
                stream.synchronize()?;
                check!(seen.read()? == [byte; BYTES], "a launch on {kind:?} is not in the order of that stream");
                Ok(Attempt::seen(outstanding))
            })
            .map_err(|failure| failure.with_details(&format!("{kind:?}")))?;
        }
        Ok(())
    })
}

fn graphs_keep_what_they_recorded(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let patterns = [FillPattern::U8(7), FillPattern::U16(0x0708), FillPattern::U32(0x0708_090a)];
        let later = [FillPattern::U8(9), FillPattern::U16(0x0b0c), FillPattern::U32(0x0b0c_0d0e)];
        let recorded = Block::on(backend, device, 4 * BYTES)?;
        let other = Block::filled_on(backend, device, 4 * BYTES, 3)?;
        let part = |index: usize| index * BYTES..(index + 1) * BYTES;
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        stream.copy(recorded.span(part(3)), other.span(part(3)))?;
        for (index, pattern) in patterns.into_iter().enumerate() {
            stream.fill(recorded.span(part(index)), pattern)?;
        }
        let graph = capture.end(&[&recorded, &other])?;
        // The same calls with other values, before the graph is instantiated, before it is launched, and after it.
        let others = || -> Result<()> {
            for (index, pattern) in later.into_iter().enumerate() {
                stream.fill(other.span(part(index)), pattern)?;
            }
            stream.copy(other.span(part(1)), other.span(part(0)))
        };
        others()?;
        let executable = graph.instantiate()?;
        for round in 0..3 {
            stream.set(recorded.all(), 0)?;
            others()?;
            executable.launch(&stream)?;
            others()?;
            stream.synchronize()?;
            let seen = recorded.read()?;
            let mut expected = vec![7; BYTES];
            expected.extend(0x0708_u16.to_ne_bytes().repeat(BYTES / 2));
            expected.extend(0x0708_090a_u32.to_ne_bytes().repeat(BYTES / 4));
            expected.extend(vec![3; BYTES]);
            check!(seen == expected, "launch {round} did not use the values of the recording");
        }
        Ok(())
    })
}

fn joined_streams_execute_nothing(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let (origin, joined) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (fork, join) = (Event::on(backend, device)?, Event::on(backend, device)?);
        let block = || Block::filled_on(backend, device, BYTES, 1);
        let blocks = [block()?, block()?, block()?, block()?];
        let (from, to) = (Pinned::holding(backend, &[2; BYTES])?, Pinned::holding(backend, &[1; BYTES])?);
        let (source, outside) = (Block::filled_on(backend, device, BYTES, 2)?, Stream::on(backend, device)?);
        let pinned = Pinned::new(backend, 4 * BYTES)?;
        // Nothing is forbidden, so the bytes can be read while the capture is open.
        let capture = Capture::begin(&origin, CaptureMode::Relaxed)?;
        origin.record(&fork)?;
        joined.wait(&fork)?;
        check!(backend.is_capturing(joined.id())?, "a stream that joined a capture takes no part in it");
        joined.set(blocks[0].all(), 2)?;
        joined.copy(blocks[1].all(), source.all())?;
        joined.copy(blocks[2].all(), from.all())?;
        joined.copy_rows(blocks[3].all(), from.all(), CopyShape::new(BYTES / 16, 16))?;
        joined.copy(to.all(), source.all())?;
        for (index, block) in blocks.iter().enumerate() {
            outside.copy(pinned.span(index * BYTES..(index + 1) * BYTES), block.all())?;
        }
        outside.synchronize()?;
        // SAFETY: the stream that writes it was synchronized.
        let seen = unsafe { pinned.read_now() };
        check!(seen == [1; 4 * BYTES], "work on a stream that joined a capture was executed before the capture ended");
        joined.record(&join)?;
        origin.wait(&join)?;
        let mut memory: Vec<&dyn Memory> = blocks.iter().map(|block| block as _).collect();
        memory.extend([&source as &dyn Memory, &from, &to]);
        let graph = capture.end(&memory)?;
        backend.synchronize_device(device)?;
        for (index, block) in blocks.iter().enumerate() {
            check!(block.read()? == [1; BYTES], "recorded work {index} of a stream that joined a capture was executed");
        }
        check!(to.read()? == [1; BYTES], "a recorded copy to the host on a stream that joined a capture was executed");
        let executable = graph.instantiate()?;
        executable.launch(&origin)?;
        origin.synchronize()?;
        for block in &blocks {
            check!(block.read()? == [2; BYTES], "work on a stream that joined was not recorded");
        }
        check!(to.read()? == [2; BYTES], "a copy to the host on a stream that joined was not recorded");
        check!(!backend.is_capturing(joined.id())?, "a stream takes part in a capture that has ended");
        Ok(())
    })
}

fn events_recorded_before_a_stream_joined(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let (origin, joined, outside) =
            (Stream::on(backend, device)?, Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (before, fork, join) =
            (Event::on(backend, device)?, Event::on(backend, device)?, Event::on(backend, device)?);
        let block = Block::filled_on(backend, device, BYTES, 0)?;
        for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
            joined.record(&before)?;
            joined.synchronize()?;
            let capture = Capture::begin(&origin, mode)?;
            origin.record(&fork)?;
            joined.wait(&fork)?;
            // Some vendors answer through another stream, which is a moment later.
            before.synchronize()?;
            check!(
                before.query()?.is_complete(),
                "an event that was reached before its stream joined is pending, {mode:?}"
            );
            outside.wait(&before)?;
            joined.set(block.all(), 1)?;
            joined.record(&join)?;
            origin.wait(&join)?;
            let graph = capture.end(&[&block])?;
            let executable = graph.instantiate()?;
            executable.launch(&origin)?;
            origin.synchronize()?;
        }
        check!(block.read()? == [1; BYTES], "queries of an earlier event disturbed a capture");
        Ok(())
    })
}

fn ending_no_capture_disturbs_no_other(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let (captured, plain) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let block = Block::filled_on(backend, device, BYTES, 0)?;
        let capture = Capture::begin(&captured, CaptureMode::ThreadLocal)?;
        // SAFETY: the stream has no capture, so none of core's is ended.
        let ended = unsafe { backend.end_capture(plain.id()) };
        check_error!(ended, Capture, "end_capture of a stream without a capture, beside a capture");
        check!(backend.is_capturing(captured.id())?, "a refused end_capture has ended the capture of another stream");
        check!(!backend.is_capturing(plain.id())?, "a stream takes part in a capture that it did not begin");
        captured.set(block.all(), 1)?;
        let graph = capture.end(&[&block])?;
        let executable = graph.instantiate()?;
        executable.launch(&captured)?;
        captured.synchronize()?;
        check!(block.read()? == [1; BYTES], "a refused end_capture disturbed another capture");
        Ok(())
    })
}

fn events_order_devices_after_their_stream(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let other = 1 - device;
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let waiting = Stream::on(backend, other)?;
        let block = Block::on(backend, other, BYTES)?;
        until_conclusive("the work was over before another device waited for it", |load| {
            let (stream, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
            busy.enqueue(&stream, load * 2)?;
            stream.record(&event)?;
            let begun = Instant::now();
            let stale = stream.destroy()?;
            // On some vendors, the destruction waits for the work.
            let waited = StreamLoad::was_waited_for(load, begun.elapsed());
            waiting.wait(&event)?;
            waiting.set(block.all(), 1)?;
            let is_ahead = waiting.query()?.is_complete();
            let outstanding = event.is_pending()?;
            check!(
                !(is_ahead && outstanding),
                "a device does not wait for an event whose stream {stale:?} was destroyed"
            );
            waiting.synchronize()?;
            check!(
                event.query()?.is_complete(),
                "a device overtook the work before an event whose stream was destroyed"
            );
            Ok(Attempt::seen(outstanding || waited))
        })
    })
}

/// The per-thread default stream is another one in each thread, and an event knows on which it was recorded.
fn events_of_a_thread_are_seen_by_others(backend: &dyn Backend) -> CaseResult {
    on_each_event(backend, |device, _, event| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let stream = Stream::borrowed(backend, StreamId::per_thread_default(backend.identity().tag, device));
        let mut mark = Mark::on(backend, device)?;
        until_conclusive("the work of a thread was over before another thread asked for it", |load| {
            busy.enqueue(&stream, load)?;
            mark.enqueue(&stream)?;
            stream.record(event)?;
            let asked = std::thread::scope(|scope| {
                let asked = scope.spawn(|| -> Result<(bool, bool)> {
                    let pending = event.is_pending()?;
                    event.synchronize()?;
                    Ok((pending, event.query()?.is_complete()))
                });
                asked.join().map_err(|_| Failure::new("a thread panicked"))
            });
            let (pending, complete) = asked??;
            let is_over = mark.has_arrived();
            stream.synchronize()?;
            check!(complete && is_over, "a thread does not wait for the record of another thread's default stream");
            Ok(Attempt::seen(pending))
        })
    })
}

fn new_events_know_no_earlier_record(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let stream = Stream::on(backend, device)?;
        for kind in EventKind::of(backend, device)? {
            until_conclusive("the work was over before a new event was asked for", |load| {
                let old = kind.make(backend, device)?;
                busy.enqueue(&stream, load)?;
                stream.record(&old.event)?;
                drop(old);
                let new = kind.make(backend, device)?;
                let complete = new.event.query()?.is_complete();
                new.event.synchronize()?;
                let outstanding = stream.is_pending()?;
                stream.synchronize()?;
                check!(complete, "an event that was never recorded is pending, as a destroyed one was: {kind:?}");
                Ok(Attempt::seen(outstanding))
            })?;
        }
        Ok(())
    })
}

fn elapsed_time_follows_the_latest_record(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let stream = Stream::on(backend, device)?;
        let (start, end) = (timed(backend, device)?, timed(backend, device)?);
        for again in [&start, &end] {
            until_conclusive("a record was reached before its time was asked for", |load| {
                stream.record(&start)?;
                stream.record(&end)?;
                stream.synchronize()?;
                // The time is asked for once, and may be kept.
                backend.event_elapsed_ns(start.id(), end.id())?;
                busy.enqueue(&stream, load)?;
                stream.record(again)?;
                let asked = backend.event_elapsed_ns(start.id(), end.id());
                let outstanding = again.is_pending()?;
                stream.synchronize()?;
                if outstanding {
                    check_error!(asked, InvalidState, "elapsed time of an event that was recorded again");
                }
                Ok(Attempt::seen(outstanding))
            })?;
        }
        Ok(())
    })
}

/// A launch is the last work of its stream. Nothing else of the stream is outstanding while it runs.
fn launches_are_pending_work(backend: &dyn Backend) -> CaseResult {
    const COPIES: usize = 8;
    const LARGE: usize = 8 << 20;
    on_devices(backend, |device| {
        let (block, pinned) = (Block::on(backend, device, LARGE)?, Pinned::new(backend, LARGE)?);
        let (mark, last) = (Block::filled_on(backend, device, BYTES, 1)?, Pinned::new(backend, BYTES)?);
        for kind in StreamKind::of(backend, device)? {
            let made = kind.make(backend, device)?;
            let captured = Stream::on(backend, device)?;
            until_conclusive("a stream is never pending behind a launch", |load| {
                let capture = Capture::begin(&captured, CaptureMode::ThreadLocal)?;
                (0..COPIES * load.min(8)).try_for_each(|_| captured.copy(block.all(), pinned.all()))?;
                captured.copy(last.all(), mark.all())?;
                let graph = capture.end(&[&block, &pinned, &mark, &last])?;
                let executable = graph.instantiate()?;
                last.write(&[0; BYTES])?;
                executable.launch(&made.stream)?;
                let pending = made.stream.is_pending()?;
                // The device has begun with the launch long before its end.
                crate::sweep::as_one(|| {
                    while made.stream.is_pending()? {
                        std::thread::yield_now();
                    }
                    Ok::<(), highwater_hal::Error>(())
                })?;
                // SAFETY: the query says that the launch is executed.
                let is_done = unsafe { last.read_now() } == [1; BYTES];
                made.stream.synchronize()?;
                check!(is_done, "{kind:?} is complete before the last operation of a launch was executed");
                check!(made.stream.query()?.is_complete(), "{kind:?} is pending after it was synchronized");
                Ok(Attempt::seen(pending))
            })
            .map_err(|failure| failure.with_details(&format!("{kind:?} on device {device}")))?;
        }
        Ok(())
    })
}

/// The first stream waits for the second, but not for the third, which joined through the second and recorded work.
fn streams_that_joined_through_others_are_joined_too(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let block = Block::filled_on(backend, device, 2 * BYTES, 0)?;
        let streams = [Stream::on(backend, device)?, Stream::on(backend, device)?, Stream::on(backend, device)?];
        let [first, second, third] = &streams;
        let events = (0..3).map(|_| Event::on(backend, device)).collect::<Result<Vec<_>>>()?;
        let capture = Capture::begin(first, CaptureMode::ThreadLocal)?;
        first.record(&events[0])?;
        second.wait(&events[0])?;
        second.record(&events[1])?;
        third.wait(&events[1])?;
        third.set(block.span(0..BYTES), 1)?;
        second.set(block.span(BYTES..2 * BYTES), 1)?;
        second.record(&events[2])?;
        first.wait(&events[2])?;
        let ended = capture.end(&[&block]).map(drop);
        check_error!(ended, Capture, "a capture whose third stream was not waited for");
        for stream in &streams {
            check!(!backend.is_capturing(stream.id())?, "a stream takes part in a capture that was lost");
            stream.set(block.all(), 2)?;
            stream.synchronize()?;
        }
        check!(block.read()? == [2; 2 * BYTES], "a stream does not work after its capture was lost");
        Ok(())
    })
}
