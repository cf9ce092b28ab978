//! Events: what a record marks, what a wait orders, and what a query reports.

use std::time::{Duration, Instant};

use highwater_hal::{Backend, EventOptions};

use super::kinds::StreamKind;
use crate::case::{CaseResult, Failure, cases, check, check_error};
use crate::device::{Block, DEVICE, Event, Pinned, Stream};
use crate::idle_stream::IdleStream;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "events";
    waits_order_streams: ["event.wait-orders"];
    waits_order_a_chain_of_streams: ["event.wait-orders"];
    waits_gather_several_streams: ["event.wait-orders"];
    waits_order_rounds_of_two_streams: ["event.wait-orders", "event.record-moves"];
    waits_order_devices: ["event.wait-orders"] needs [TWO_DEVICES];
    waits_follow_an_event_to_another_stream: ["event.wait-orders", "event.record-moves"];
    waits_ignore_work_after_the_record: ["event.wait-orders", "stream.independent"];
    waits_ignore_later_records: ["event.wait-snapshot"];
    waits_ignore_later_records_of_pending_streams: ["event.wait-snapshot"];
    waits_keep_the_record_they_met: ["event.wait-snapshot", "event.wait-orders"];
    waits_for_nothing_are_none: ["event.never-recorded"];
    query_follows_the_record: ["event.query"];
    query_ignores_work_after_the_record: ["event.query"];
    query_of_a_fresh_event_is_complete: ["event.query-never-recorded"];
    records_move_to_a_later_point: ["event.record-moves"];
    records_move_to_another_stream: ["event.record-moves"];
    records_on_another_device_are_refused: ["event.record-device"] needs [TWO_DEVICES];
    synchronize_shows_the_effects: ["event.synchronize"];
    synchronize_waits_each_time: ["event.synchronize", "event.record-moves"];
    synchronize_ignores_work_after_the_record: ["event.synchronize"];
    destroyed_events_keep_their_waits: ["event.destroy-pending"];
    destroyed_events_keep_the_waits_of_other_devices: ["event.destroy-pending", "event.wait-orders"] needs [TWO_DEVICES];
    destroyed_events_are_stale: ["event.destroy-stale"];
    events_order_after_their_stream: ["event.outlives-stream", "event.wait-orders"];
    events_answer_after_their_stream: ["event.outlives-stream", "event.query", "event.synchronize"];
    elapsed_time_covers_the_work: ["event.elapsed"] needs [has::event_timing];
    elapsed_time_of_records_in_the_other_order_is_zero: ["event.elapsed-order"] needs [has::event_timing];
    elapsed_time_needs_timing: ["event.elapsed-invalid"] needs [has::event_timing];
    elapsed_time_needs_records: ["event.elapsed-invalid"] needs [has::event_timing];
    elapsed_time_needs_reached_records: ["event.elapsed-invalid"] needs [has::event_timing];
    wrapped_events_are_one_with_their_owner: ["event.wait-orders", "event.query"] needs [has::foreign_objects];
    wrapped_events_keep_their_other_ids: ["event.foreign-kept"] needs [has::foreign_objects];
    wrapped_events_are_forgotten_not_destroyed: ["event.destroy-stale", "backend.live-objects"] needs [has::foreign_objects];
}

const BYTES: usize = 1 << 16;
const OLD: u8 = 0x10;
const NEW: u8 = 0x20;

/// The bytes that a consumer reads if it waited.
fn read_new(copied: &Block<'_>, what: &str) -> CaseResult {
    let got = copied.read()?;
    let old = got.iter().filter(|&&byte| byte != NEW).count();
    check!(old == 0, "{what}: {old} of {BYTES} bytes were read before the work that the stream was to wait for");
    Ok(())
}

/// The load of a producer, relative to the load of an attempt. A consumer that does not wait needs the time to run ahead;
/// otherwise its mistake does not show.
const PRODUCED: usize = 5;

fn waits_order_streams(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the producer was done before the consumer had its work", |load| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (producer, consumer, event) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
        let idle = IdleStream::on(backend, DEVICE)?;
        busy.enqueue(&producer, load * PRODUCED)?;
        producer.set(shared.all(), NEW)?;
        producer.record(&event)?;
        consumer.wait(&event)?;
        consumer.copy(copied.all(), shared.all())?;
        idle.let_others_begin()?;
        let outstanding = event.is_pending()?;
        consumer.synchronize()?;
        read_new(&copied, "a stream that waits for an event")?;
        Ok(Attempt::seen(outstanding))
    })
}

fn waits_order_a_chain_of_streams(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the first stream was done before the last had its work", |load| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let streams: Vec<Stream<'_>> = (0..4).map(|_| Stream::new(backend)).collect::<Result<_, _>>()?;
        let events: Vec<Event<'_>> = (0..3).map(|_| Event::new(backend)).collect::<Result<_, _>>()?;
        let idle = IdleStream::on(backend, DEVICE)?;
        busy.enqueue(&streams[0], load * PRODUCED)?;
        streams[0].set(shared.all(), NEW)?;
        for (pair, event) in streams.windows(2).zip(&events) {
            pair[0].record(event)?;
            pair[1].wait(event)?;
        }
        streams[3].copy(copied.all(), shared.all())?;
        idle.let_others_begin()?;
        let outstanding = events[0].is_pending()?;
        streams[3].synchronize()?;
        read_new(&copied, "the last of four streams that wait for one another")?;
        Ok(Attempt::seen(outstanding))
    })
}

fn waits_gather_several_streams(backend: &dyn Backend) -> CaseResult {
    let (up, down) =
        (StreamLoad::new(backend, DEVICE, Direction::ToDevice)?, StreamLoad::new(backend, DEVICE, Direction::ToHost)?);
    // If a queue is full, the call waits while the other stream continues. Only the stream that got its work last is sure to
    // have work left. Each stream is last once and then has more work, so waiting for the other is not enough.
    for right_is_last in [true, false] {
        until_conclusive("the producer that got its work last was done before the consumer had its own", |load| {
            let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
            let (left, right, consumer) = (Stream::new(backend)?, Stream::new(backend)?, Stream::new(backend)?);
            let (left_done, right_done) = (Event::new(backend)?, Event::new(backend)?);
            let idle = IdleStream::on(backend, DEVICE)?;
            let work = load * PRODUCED;
            if right_is_last {
                up.enqueue(&left, work)?;
                down.enqueue(&right, 2 * work)?;
            } else {
                down.enqueue(&right, work)?;
                up.enqueue(&left, 2 * work)?;
            }
            left.set(shared.span(0..BYTES / 2), NEW)?;
            right.set(shared.span(BYTES / 2..BYTES), NEW)?;
            left.record(&left_done)?;
            right.record(&right_done)?;
            consumer.wait(&left_done)?;
            consumer.wait(&right_done)?;
            consumer.copy(copied.all(), shared.all())?;
            idle.let_others_begin()?;
            let outstanding = if right_is_last { right_done.is_pending()? } else { left_done.is_pending()? };
            consumer.synchronize()?;
            read_new(&copied, "a stream that waits for two events")?;
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

fn waits_order_rounds_of_two_streams(backend: &dyn Backend) -> CaseResult {
    const ROUNDS: u8 = 100;
    let (ping, pong) = (Stream::new(backend)?, Stream::new(backend)?);
    let (ready, taken) = (Event::new(backend)?, Event::new(backend)?);
    let shared = Block::filled(backend, BYTES, 0)?;
    let copied = Block::filled(backend, BYTES * usize::from(ROUNDS), 0)?;
    // One event per direction, recorded again in every round: each wait must mean the record before it.
    for round in 0..ROUNDS {
        ping.wait(&taken)?;
        ping.set(shared.all(), round + 1)?;
        ping.record(&ready)?;
        pong.wait(&ready)?;
        let start = BYTES * usize::from(round);
        pong.copy(copied.span(start..start + BYTES), shared.all())?;
        pong.record(&taken)?;
    }
    pong.synchronize()?;
    for (round, got) in (0..ROUNDS).zip(copied.read()?.chunks_exact(BYTES)) {
        check!(got.iter().all(|&byte| byte == round + 1), "round {round} of {ROUNDS} read the bytes of another round");
    }
    Ok(())
}

fn waits_order_devices(backend: &dyn Backend) -> CaseResult {
    for (from, to) in [(0, 1), (1, 0)] {
        let busy = StreamLoad::new(backend, from, Direction::ToDevice)?;
        until_conclusive("the producer was done before the consumer had its work", |load| {
            let source = Block::filled_on(backend, from, BYTES, NEW)?;
            // The bytes travel through the host, so that the case needs no copy between devices.
            let between = Pinned::holding(backend, &[OLD; BYTES])?;
            let (producer, consumer) = (Stream::on(backend, from)?, Stream::on(backend, to)?);
            let (copied, event) = (Block::filled_on(backend, to, BYTES, OLD)?, Event::on(backend, from)?);
            let idle = IdleStream::on(backend, to)?;
            busy.enqueue(&producer, load * PRODUCED)?;
            producer.copy(between.all(), source.all())?;
            producer.record(&event)?;
            consumer.wait(&event)?;
            consumer.copy(copied.all(), between.all())?;
            idle.let_others_begin()?;
            let outstanding = event.is_pending()?;
            consumer.synchronize()?;
            read_new(&copied, &format!("a stream of device {to} that waits for an event of device {from}"))?;
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

/// The stream that waits recorded the event before, so it may be known as the event's stream.
fn waits_follow_an_event_to_another_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the producer was done before the consumer had its work", |load| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (producer, consumer, event) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
        consumer.record(&event)?;
        busy.enqueue(&producer, load)?;
        producer.set(shared.all(), NEW)?;
        producer.record(&event)?;
        consumer.wait(&event)?;
        consumer.copy(copied.all(), shared.all())?;
        let outstanding = event.is_pending()?;
        consumer.synchronize()?;
        read_new(&copied, "a stream that waits for an event that it recorded before another stream did")?;
        Ok(Attempt::seen(outstanding))
    })
}

fn waits_ignore_work_after_the_record(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("a wait is for more than the work before the record", |load| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (producer, consumer, event) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
        producer.set(shared.all(), NEW)?;
        producer.record(&event)?;
        busy.enqueue(&producer, load)?;
        consumer.wait(&event)?;
        consumer.copy(copied.all(), shared.all())?;
        consumer.synchronize()?;
        let outstanding = producer.is_pending()?;
        read_new(&copied, "a stream that waits for an event")?;
        Ok(Attempt::seen(outstanding))
    })
}

fn waits_ignore_later_records(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("a wait is for a record that was made after it", |load| {
        let (occupied, waiting, event) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
        occupied.record(&event)?;
        occupied.synchronize()?;
        waiting.wait(&event)?;
        busy.enqueue(&occupied, load)?;
        occupied.record(&event)?;
        waiting.synchronize()?;
        Ok(Attempt::seen(occupied.is_pending()?))
    })
}

fn waits_ignore_later_records_of_pending_streams(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let mut told = Vec::new();
    // The load after the middle gives the stream time to continue. If it does not fit into the device's queue, the calls last
    // until the middle is complete. So the load is as small as possible.
    let mut rest = 1;
    let attempt = |load: usize| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (occupied, waiting) = (Stream::new(backend)?, Stream::new(backend)?);
        let (event, middle) = (Event::new(backend)?, Event::new(backend)?);
        occupied.record(&event)?;
        occupied.synchronize()?;
        // The waiting stream reaches its wait in the middle of the other stream's work: after the event was recorded again,
        // and before that record is reached. The work of one stream alone decides this, whatever the speed of copies in
        // either direction.
        let begun = Instant::now();
        busy.enqueue(&occupied, load * 2)?;
        occupied.record(&middle)?;
        waiting.wait(&middle)?;
        waiting.wait(&event)?;
        waiting.copy(copied.all(), shared.all())?;
        busy.enqueue(&occupied, rest)?;
        occupied.set(shared.all(), NEW)?;
        occupied.record(&event)?;
        let not_there_yet = middle.is_pending()?;
        let recorded = begun.elapsed();
        waiting.synchronize()?;
        let went_on = begun.elapsed();
        occupied.synchronize()?;
        let over = begun.elapsed();
        let ahead = copied.read()?.iter().all(|&byte| byte == OLD);
        let before = load * 2;
        if not_there_yet {
            told.push(format!(
                "with {before} and {rest} load the stream was not at its wait when the later record was made, after \
                 {recorded:?}, and went on when that was reached, after {went_on:?} of {over:?}"
            ));
            rest *= 2;
        } else {
            told.push(format!(
                "with {before} and {rest} load the stream was at its wait before the later record was made, which \
                 took until {recorded:?} of {over:?}"
            ));
            rest = (rest / 2).max(1);
        }
        Ok(Attempt::seen(not_there_yet && ahead))
    };
    until_conclusive("a wait looks at the event when the stream gets there, not when it was called", attempt)
        .map_err(|failure| failure.with_details(&told.join("; ")))
}

fn waits_keep_the_record_they_met(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the producer was done before the consumer had its work", |load| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (producer, consumer, other) = (Stream::new(backend)?, Stream::new(backend)?, Stream::new(backend)?);
        let event = Event::new(backend)?;
        let idle = IdleStream::on(backend, DEVICE)?;
        busy.enqueue(&producer, load * PRODUCED)?;
        producer.set(shared.all(), NEW)?;
        producer.record(&event)?;
        consumer.wait(&event)?;
        consumer.copy(copied.all(), shared.all())?;
        // Moves the event to a point that is reached at once. It must not release the wait above.
        other.record(&event)?;
        idle.let_others_begin()?;
        let outstanding = producer.is_pending()?;
        consumer.synchronize()?;
        read_new(&copied, "a stream that waits for an event that was recorded elsewhere since")?;
        Ok(Attempt::seen(outstanding))
    })
}

fn waits_for_nothing_are_none(backend: &dyn Backend) -> CaseResult {
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    let block = Block::filled(backend, BYTES, OLD)?;
    stream.wait(&event)?;
    stream.set(block.all(), NEW)?;
    stream.synchronize()?;
    read_new(&block, "a stream that waits for an event that was never recorded")
}

fn query_follows_the_record(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    let (block, pinned) = (Block::new(backend, BYTES)?, Pinned::holding(backend, &[0; BYTES])?);
    let mut byte = 0;
    until_conclusive("an event is never seen pending", |load| {
        byte += 1;
        busy.enqueue(&stream, load)?;
        stream.set(block.all(), byte)?;
        stream.copy(pinned.all(), block.all())?;
        stream.record(&event)?;
        let pending = event.is_pending()?;
        while event.is_pending()? {
            std::thread::yield_now();
        }
        // SAFETY: the event is complete, so the copy has ended on a right backend. The case finds the others.
        let arrived = unsafe { pinned.bytes_now(0..BYTES) }.iter().all(|&got| got == byte);
        check!(arrived, "an event is complete, and a copy to the host before its record has not arrived");
        check!(stream.query()?.is_complete() || stream.synchronize().is_ok(), "the stream failed");
        check!(event.query()?.is_complete(), "an event went from complete to pending with nothing recorded");
        Ok(Attempt::seen(pending))
    })
}

fn query_ignores_work_after_the_record(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    until_conclusive("an event is pending for work after its record", |load| {
        stream.record(&event)?;
        busy.enqueue(&stream, load)?;
        while event.is_pending()? {
            std::thread::yield_now();
        }
        let outstanding = stream.is_pending()?;
        stream.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

fn query_of_a_fresh_event_is_complete(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        check!(Event::on(backend, device)?.query()?.is_complete(), "an event that was never recorded is pending");
    }
    Ok(())
}

fn records_move_to_a_later_point(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    until_conclusive("an event that was recorded again is not pending", |load| {
        stream.record(&event)?;
        stream.synchronize()?;
        check!(event.query()?.is_complete(), "an event is pending after its stream was synchronized");
        busy.enqueue(&stream, load)?;
        stream.record(&event)?;
        let pending = event.is_pending()?;
        event.synchronize()?;
        check!(event.query()?.is_complete(), "an event is pending after it was synchronized");
        Ok(Attempt::seen(pending))
    })
}

fn records_move_to_another_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (occupied, idle, event) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
    until_conclusive("an event is pending for an earlier record on another stream", |load| {
        busy.enqueue(&occupied, load)?;
        occupied.record(&event)?;
        idle.record(&event)?;
        idle.synchronize()?;
        event.synchronize()?;
        let complete = event.query()?.is_complete();
        let outstanding = occupied.is_pending()?;
        check!(complete || !outstanding, "an event is pending though the stream of its latest record is idle");
        occupied.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

fn records_on_another_device_are_refused(backend: &dyn Backend) -> CaseResult {
    for (of, on) in [(0, 1), (1, 0)] {
        let (event, stream) = (Event::on(backend, of)?, Stream::on(backend, on)?);
        check_error!(stream.record(&event), WrongDevice, "a record of an event of device {of} on device {on}");
        check!(event.query()?.is_complete(), "a refused record left its mark on the event");
    }
    Ok(())
}

fn synchronize_shows_the_effects(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the copy was done before it was waited for", |load| {
        let (block, pinned) = (Block::new(backend, BYTES)?, Pinned::holding(backend, &[OLD; BYTES])?);
        let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
        busy.enqueue(&stream, load)?;
        stream.set(block.all(), NEW)?;
        stream.copy(pinned.all(), block.all())?;
        stream.record(&event)?;
        let pending = event.is_pending()?;
        event.synchronize()?;
        // SAFETY: the event was synchronized; that this means what it says is what the case shows.
        let got = unsafe { pinned.read_now() };
        check!(got == [NEW; BYTES], "the CPU does not see work before an event after it waited for the event");
        Ok(Attempt::seen(pending))
    })
}

/// One event, recorded and waited for many times behind outstanding work.
fn synchronize_waits_each_time(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 1 << 20;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    // The other event is complete.
    let (stream, event, _other) = (Stream::new(backend)?, Event::new(backend)?, Event::new(backend)?);
    let (source, target) = (Block::new(backend, BYTES)?, Pinned::new(backend, BYTES)?);
    for round in 1..=7 {
        busy.enqueue(&stream, 1)?;
        stream.set(source.all(), round)?;
        stream.copy(target.all(), source.all())?;
        stream.record(&event)?;
        event.synchronize()?;
        // SAFETY: The work before the record is complete.
        let seen = unsafe { target.read_now() };
        check!(
            seen.iter().all(|&byte| byte == round),
            "wait {round} for an event returned before the work of its record"
        );
    }
    Ok(())
}

fn synchronize_ignores_work_after_the_record(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    until_conclusive("synchronising an event waits for work after its record", |load| {
        stream.record(&event)?;
        busy.enqueue(&stream, load)?;
        event.synchronize()?;
        let outstanding = stream.is_pending()?;
        stream.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

fn destroyed_events_keep_their_waits(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the producer was done before the consumer had its work", |load| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (producer, consumer) = (Stream::new(backend)?, Stream::new(backend)?);
        let event = Event::new(backend)?;
        let idle = IdleStream::on(backend, DEVICE)?;
        busy.enqueue(&producer, load * PRODUCED)?;
        producer.set(shared.all(), NEW)?;
        producer.record(&event)?;
        consumer.wait(&event)?;
        event.destroy()?;
        // Another event may take the slot of the destroyed one.
        let successor = Event::new(backend)?;
        consumer.record(&successor)?;
        consumer.copy(copied.all(), shared.all())?;
        idle.let_others_begin()?;
        let outstanding = producer.is_pending()?;
        consumer.synchronize()?;
        read_new(&copied, "a stream that waits for an event that was destroyed since")?;
        Ok(Attempt::seen(outstanding))
    })
}

/// The wait is the last call of the stream before the event is destroyed.
fn destroyed_events_keep_the_waits_of_other_devices(backend: &dyn Backend) -> CaseResult {
    const OTHER: u32 = DEVICE + 1;
    let busy = StreamLoad::new(backend, OTHER, Direction::ToDevice)?;
    until_conclusive("the producer was done before the consumer had its work", |load| {
        let (producer, consumer) = (Stream::on(backend, OTHER)?, Stream::new(backend)?);
        let (before, event) = (Event::on(backend, OTHER)?, Event::on(backend, OTHER)?);
        let block = Block::filled(backend, BYTES, OLD)?;
        busy.enqueue(&producer, load * PRODUCED)?;
        producer.record(&before)?;
        producer.record(&event)?;
        consumer.wait(&event)?;
        event.destroy()?;
        // Another event may take the slot of the destroyed one.
        let _successor = Event::on(backend, OTHER)?;
        consumer.set(block.all(), NEW)?;
        let outstanding = before.is_pending()?;
        consumer.synchronize()?;
        let is_early = before.is_pending()?;
        producer.synchronize()?;
        check!(!is_early, "a stream did not wait for an event of another device that was destroyed since");
        Ok(Attempt::seen(outstanding))
    })
}

fn destroyed_events_are_stale(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let event = Event::new(backend)?;
    stream.record(&event)?;
    let stale = event.destroy()?;
    check_error!(backend.destroy_event(stale), InvalidHandle, "a second destroy_event");
    check_error!(backend.query_event(stale), InvalidHandle, "query_event after destroy_event");
    check_error!(backend.stream_wait_event(stream.id(), stale), InvalidHandle, "a wait for a destroyed event");
    Ok(())
}

/// Creates and destroys objects, which may reuse the memory of a stream that was destroyed.
fn replace_objects(backend: &dyn Backend) -> CaseResult {
    let streams = (0..3).map(|_| Stream::new(backend)).collect::<Result<Vec<_>, _>>()?;
    for stream in &streams {
        let event = Event::new(backend)?;
        stream.record(&event)?;
        stream.synchronize()?;
    }
    Ok(())
}

fn events_order_after_their_stream(backend: &dyn Backend) -> CaseResult {
    const FRESH: usize = 4;
    const PART: usize = 256;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the producer was done before it was destroyed", |load| {
        let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (producer, consumer, event) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
        let idle = IdleStream::on(backend, DEVICE)?;
        busy.enqueue(&producer, load * PRODUCED)?;
        producer.set(shared.all(), NEW)?;
        producer.record(&event)?;
        let outstanding = event.is_pending()?;
        producer.destroy()?;
        // One of these may have the place of the destroyed stream.
        let fresh = (0..FRESH).map(|_| Stream::new(backend)).collect::<Result<Vec<_>, _>>()?;
        let copies = Block::filled(backend, FRESH * PART, OLD)?;
        for (index, stream) in fresh.iter().enumerate() {
            stream.wait(&event)?;
            stream.copy(copies.span(index * PART..(index + 1) * PART), shared.span(0..PART))?;
        }
        replace_objects(backend)?;
        consumer.wait(&event)?;
        consumer.copy(copied.all(), shared.all())?;
        idle.let_others_begin()?;
        consumer.synchronize()?;
        fresh.iter().try_for_each(|stream| stream.synchronize())?;
        read_new(&copied, "a stream that waits for an event whose stream was destroyed")?;
        let seen = copies.read()?;
        check!(seen == [NEW; FRESH * PART], "a new stream overtook the work of a destroyed one that it waits for");
        Ok(Attempt::seen(outstanding))
    })
}

fn events_answer_after_their_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let can_be_wrapped = backend.capabilities(DEVICE)?.foreign_objects;
    let kinds = [StreamKind::Normal].into_iter().chain(can_be_wrapped.then_some(StreamKind::Foreign));
    for (kind, waits) in kinds.flat_map(|kind| [(kind, true), (kind, false)]) {
        until_conclusive("the producer was done before it was destroyed", |load| {
            let target = Pinned::holding(backend, &[OLD; BYTES])?;
            let source = Block::filled(backend, BYTES, NEW)?;
            let (made, event) = (kind.make(backend, DEVICE)?, Event::new(backend)?);
            // The producer is dropped first if the case fails.
            let (owner, producer) = (made.owner, made.stream);
            busy.enqueue(&producer, load * PRODUCED)?;
            producer.copy(target.all(), source.all())?;
            producer.record(&event)?;
            let start = Instant::now();
            producer.destroy()?;
            // On some vendors, the destruction waits for the work.
            let waited = StreamLoad::was_waited_for(load, start.elapsed());
            // SAFETY: this is called once the backend has said that the copy is complete.
            let shows = || unsafe { target.read_now() } == [NEW; BYTES];
            let outstanding = event.is_pending()?;
            check!(outstanding || shows(), "an event whose stream was destroyed was complete before the work");
            replace_objects(backend)?;
            if waits {
                event.synchronize()?;
                check!(shows(), "a wait for an event whose stream was destroyed returned before the work was done");
            }
            let start = Instant::now();
            while event.is_pending()? {
                check!(start.elapsed() < Duration::from_secs(20), "an event whose stream was destroyed stays pending");
            }
            check!(shows(), "an event whose stream was destroyed was complete before the work");
            // The event works again after a new record.
            let successor = Stream::new(backend)?;
            successor.record(&event)?;
            event.synchronize()?;
            check!(event.query()?.is_complete(), "an event is pending after it was synchronized");
            // The owner of a foreign stream lives until here.
            drop(owner);
            Ok(Attempt::seen(outstanding || waited))
        })
        .map_err(|failure| failure.with_details(&format!("the producer: {kind:?}")))?;
    }
    Ok(())
}

fn timed(backend: &dyn Backend) -> Result<Event<'_>, Failure> {
    Ok(Event::with_options(backend, DEVICE, &EventOptions::new().with_timing())?)
}

fn elapsed_time_covers_the_work(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    let (start, end) = (timed(backend)?, timed(backend)?);
    // A device may take the time of a record earlier than it reports the record, and more so on a loaded machine. One time
    // that seems too short proves nothing, but one in each attempt does.
    let mut short = None;
    let outcome = until_conclusive("the work between two records was over before it could be timed", |load| {
        let called = Instant::now();
        stream.record(&start)?;
        start.synchronize()?;
        // The device was past the first record at `begun` and not yet past the second at `running`. It spent at least the
        // time between them.
        let begun = Instant::now();
        busy.enqueue(&stream, load * 2)?;
        stream.record(&end)?;
        let mut running = begun;
        loop {
            let now = Instant::now();
            if !end.is_pending()? {
                break;
            }
            running = now;
        }
        let over = called.elapsed();
        let elapsed = Duration::from_nanos(backend.event_elapsed_ns(start.id(), end.id())?);
        let least = running - begun;
        // The clocks of device and CPU drift, and a device's clock has steps of up to a microsecond.
        let enough = elapsed + elapsed / 100 + Duration::from_micros(2) >= least;
        if !enough {
            short = Some(Failure::new(format!(
                "{elapsed:?} between two records, but the work between them took at least {least:?}"
            )));
        }
        check!(
            elapsed <= over + over / 100 + Duration::from_millis(1),
            "{elapsed:?} between two records, but all was over after {over:?}"
        );
        check!(backend.event_elapsed_ns(start.id(), start.id())? == 0, "time passed between a record and itself");
        // A time that is too short by half shows only if less than half of the work went unobserved.
        Ok(Attempt::seen(enough && least >= StreamLoad::TIME / 2 && least >= over * 3 / 4))
    });
    outcome.map_err(|failure| short.unwrap_or(failure))
}

fn elapsed_time_of_records_in_the_other_order_is_zero(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let (start, end) = (timed(backend)?, timed(backend)?);
    for _ in 0..3 {
        stream.record(&end)?;
        end.synchronize()?;
        std::thread::sleep(Duration::from_millis(2));
        stream.record(&start)?;
        stream.synchronize()?;
        let elapsed = backend.event_elapsed_ns(start.id(), end.id())?;
        check!(elapsed == 0, "{elapsed} ns passed from a record to an earlier one");
        check!(backend.event_elapsed_ns(end.id(), start.id())? > 0, "no time passed between two records");
    }
    Ok(())
}

fn elapsed_time_needs_timing(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let (with, without) = (timed(backend)?, Event::new(backend)?);
    stream.record(&with)?;
    stream.record(&without)?;
    stream.synchronize()?;
    let elapsed = |a: &Event<'_>, b: &Event<'_>| backend.event_elapsed_ns(a.id(), b.id());
    check_error!(elapsed(&with, &without), InvalidArgument, "elapsed time to an event without timing");
    check_error!(elapsed(&without, &with), InvalidArgument, "elapsed time from an event without timing");
    Ok(())
}

fn elapsed_time_needs_records(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let (recorded, never) = (timed(backend)?, timed(backend)?);
    stream.record(&recorded)?;
    stream.synchronize()?;
    let elapsed = |a: &Event<'_>, b: &Event<'_>| backend.event_elapsed_ns(a.id(), b.id());
    check_error!(elapsed(&recorded, &never), InvalidArgument, "elapsed time to an event that was never recorded");
    check_error!(elapsed(&never, &recorded), InvalidArgument, "elapsed time from an event that was never recorded");
    Ok(())
}

fn elapsed_time_needs_reached_records(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    let (start, end) = (timed(backend)?, timed(backend)?);
    until_conclusive("the second record was reached before its query", |load| {
        stream.record(&start)?;
        busy.enqueue(&stream, load)?;
        stream.record(&end)?;
        let asked = backend.event_elapsed_ns(start.id(), end.id());
        let outstanding = end.is_pending()?;
        stream.synchronize()?;
        if outstanding {
            check_error!(asked, InvalidState, "elapsed time to a record that was not reached");
        }
        Ok(Attempt::seen(outstanding))
    })
}

/// Returns a second id of the event's vendor object.
fn wrapped<'b>(backend: &'b dyn Backend, owner: &Event<'b>) -> Result<Event<'b>, Failure> {
    let raw = backend.raw_event(owner.id())?;
    // SAFETY: the owner lives until its wrapper is gone: cases declare it first.
    let id = unsafe { backend.event_from_raw(DEVICE, raw) }?;
    let wrapper = Event::adopted(backend, id);
    check!(wrapper.id() != owner.id(), "a wrapped event has the id of its owner");
    Ok(wrapper)
}

fn wrapped_events_are_one_with_their_owner(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let owner = Event::new(backend)?;
    let wrapper = wrapped(backend, &owner)?;
    for (recorded, waited) in [(&owner, &wrapper), (&wrapper, &owner)] {
        until_conclusive("the producer was done before the consumer had its work", |load| {
            let (shared, copied) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
            let (producer, consumer) = (Stream::new(backend)?, Stream::new(backend)?);
            let idle = IdleStream::on(backend, DEVICE)?;
            busy.enqueue(&producer, load * PRODUCED)?;
            producer.set(shared.all(), NEW)?;
            producer.record(recorded)?;
            consumer.wait(waited)?;
            consumer.copy(copied.all(), shared.all())?;
            idle.let_others_begin()?;
            let outstanding = waited.is_pending()?;
            consumer.synchronize()?;
            read_new(&copied, "a stream that waits for the other id of an event")?;
            check!(recorded.query()?.is_complete() && waited.query()?.is_complete(), "one of two ids is pending");
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

/// One of several wrappers is destroyed while the record is outstanding. The others and the owner answer as before.
fn wrapped_events_keep_their_other_ids(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    for is_recorded_by_owner in [true, false] {
        until_conclusive("the record was reached before an id of its event was destroyed", |load| {
            let (owner, stream, before) = (Event::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
            let (first, second, third) =
                (wrapped(backend, &owner)?, wrapped(backend, &owner)?, wrapped(backend, &owner)?);
            busy.enqueue(&stream, load)?;
            stream.record(&before)?;
            stream.record(if is_recorded_by_owner { &owner } else { &first })?;
            first.destroy()?;
            third.destroy()?;
            let complete = [owner.query()?.is_complete(), second.query()?.is_complete()];
            let outstanding = before.is_pending()?;
            second.synchronize()?;
            let is_early = before.is_pending()?;
            stream.synchronize()?;
            check!(
                complete == [false; 2] || !outstanding,
                "an event is pending, and two other ids of it were destroyed: its owner and a wrapper answer complete: \
                 {complete:?}"
            );
            check!(!is_early, "a wait for an event ended before its record, because other ids of it were destroyed");
            check!(
                owner.query()?.is_complete() && second.query()?.is_complete(),
                "an event is pending after its record, because other ids of it were destroyed"
            );
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

fn wrapped_events_are_forgotten_not_destroyed(backend: &dyn Backend) -> CaseResult {
    let (owner, stream) = (Event::new(backend)?, Stream::new(backend)?);
    let before = backend.live_objects().events;
    let stale = wrapped(backend, &owner)?.destroy()?;
    check_error!(backend.query_event(stale), InvalidHandle, "query_event of a wrapper that was destroyed");
    check!(backend.live_objects().events == before, "live events differ after an event was wrapped");
    stream.record(&owner)?;
    owner.synchronize()?;
    check!(owner.query()?.is_complete(), "an event does not work after its wrapper was destroyed");
    Ok(())
}
