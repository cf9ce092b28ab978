//! Events: the work that a record covers, the order that a wait makes, and the answers of queries.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread::{self, JoinHandle, ThreadId};

use highwater_hal::{Completion, ErrorKind, EventId, MemoryCopy, ObjectId as _, Result, StreamId};

use super::super::hooks::Hooks;
use super::super::reference::{Reference, Way, forgiven, is, wrong};
use super::super::state::{Deferred, Shared};
use super::foreign_streams;

mutants! {
    in "event.wait-orders":
    "waits-forgotten": "Accepts a wait for an event and forgets it." =>
        |h| h.backend.stream_wait_event(|reference, stream, event| match reference.is_recording(stream) {
            true => reference.stream_wait_event(stream, event),
            false => looked_at(reference, stream, event),
        });
    "waits-across-devices-forgotten" needs [TWO_DEVICES]: "Forgets waits for events of another device." =>
        |h| h.backend.stream_wait_event(|reference, stream, event| match stream.device() == event.device() {
            true => reference.stream_wait_event(stream, event),
            false => looked_at(reference, stream, event),
        });
    "waits-of-the-first-recorder-forgotten": "Forgets a wait by the stream that was the first to record the event." => |h| {
        let first = Shared::<HashMap<EventId, StreamId>>::default();
        let noted = first.clone();
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            noted.with(|first| *first.entry(event).or_insert(stream));
            Ok(())
        });
        h.backend.stream_wait_event(move |reference, stream, event| {
            let is_own = first.with(|first| first.get(&event) == Some(&stream));
            match is_own && !reference.is_recording(stream) {
                true => looked_at(reference, stream, event),
                false => reference.stream_wait_event(stream, event),
            }
        });
    };
    "last-wait-counts": "Makes the last of several waits in a row, and none of the others." => |h| {
        let held = Deferred::default();
        let waits = held.clone();
        h.backend.stream_wait_event(move |reference, stream, event| {
            if reference.is_recording(stream) {
                return reference.stream_wait_event(stream, event);
            }
            looked_at(reference, stream, event)?;
            waits.forget(stream);
            waits.defer(stream, move |reference| reference.stream_wait_event(stream, event));
            Ok(())
        });
        h.before(move |reference, method, stream| match method {
            "stream_wait_event" => Ok(()),
            _ => held.release(reference, stream),
        });
    };
    "waits-of-default-streams-forgotten" needs [has::per_thread_default_stream]: "Forgets the waits of a thread's default stream." =>
        |h| h.backend.stream_wait_event(|reference, stream, event| match stream.is_per_thread_default() {
            true => looked_at(reference, stream, event),
            false => reference.stream_wait_event(stream, event),
        });

    "waits-counted-in-a-byte": "Makes 255 waits of a stream in a row, and forgets those that follow." => |h| {
        let counts = Shared::<HashMap<StreamId, u32>>::default();
        let fresh = counts.clone();
        h.before(move |_, method, stream| {
            if let Some(stream) = stream.filter(|_| !matches!(method, "stream_wait_event" | "query_stream")) {
                fresh.with(|counts| counts.remove(&stream));
            }
            Ok(())
        });
        h.backend.stream_wait_event(move |reference, stream, event| {
            let count = counts.with(|counts| {
                let count = counts.entry(stream).or_default();
                *count += 1;
                *count
            });
            let is_made = count <= u32::from(u8::MAX) || reference.is_recording(stream);
            if is_made { reference.stream_wait_event(stream, event) } else { looked_at(reference, stream, event) }
        });
    };
    "waits-of-the-same-place-forgotten": "Forgets waits of a stream whose id has the slot of the stream that recorded the event." => |h| {
        let recorded = recorded_events(h);
        h.backend.stream_wait_event(move |reference, stream, event| {
            let place = |stream: StreamId| (stream.device(), stream.parts().slot);
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            let is_same = home.is_some_and(|home| home != stream && place(home) == place(stream));
            match is_same && !reference.is_recording(stream) {
                true => looked_at(reference, stream, event),
                false => reference.stream_wait_event(stream, event),
            }
        });
    };
    "waits-of-one-default-stream-for-another-forgotten" needs [has::per_thread_default_stream]:
        "Forgets waits of a default stream for an event of a default stream." => |h| {
        let recorded = recorded_events(h);
        h.backend.stream_wait_event(move |reference, stream, event| {
            let is_default = |stream: StreamId| stream.is_legacy_default() || stream.is_per_thread_default();
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            match is_default(stream) && home.is_some_and(is_default) {
                true => looked_at(reference, stream, event),
                false => reference.stream_wait_event(stream, event),
            }
        });
    };

    in "event.wait-snapshot":
    "waits-made-with-the-next-call": "Enqueues a wait only with the next call for its stream, for the latest record." =>
        |h| made_with_the_next_call(h, |_, _| true);
    "waits-for-other-devices-made-with-the-next-call" needs [TWO_DEVICES]:
        "Enqueues a wait for another device only with the next call for its stream, for the latest record." =>
        |h| made_with_the_next_call(h, |stream, event| stream.device() != event.device());
    "waits-for-whole-streams": "Waits for all work that the stream of the record has at that time." => |h| {
        let recorded = recorded_events(h);
        h.backend.stream_wait_event(move |reference, stream, event| {
            reference.stream_wait_event(stream, event)?;
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            match home.filter(|&home| !reference.is_recording(stream) && reference.is_pending(home)) {
                Some(home) => reference.let_wait(stream, home),
                None => Ok(()),
            }
        });
    };
    "waits-look-when-there": "Looks at an event when the stream gets to its wait, and not when the wait is called." =>
        look_when_there;
    "later-records-waited-for": "Lets streams that wait for an event wait for its later records too." => |h| {
        let waiting = Shared::<HashMap<EventId, HashSet<StreamId>>>::default();
        let waits = waiting.clone();
        h.backend.stream_wait_event(move |reference, stream, event| {
            reference.stream_wait_event(stream, event)?;
            if !reference.is_recording(stream) {
                waits.with(|waits| waits.entry(event).or_default().insert(stream));
            }
            Ok(())
        });
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            let again = waiting.with(|waiting| waiting.get(&event).cloned()).unwrap_or_default();
            for other in again {
                // A stream that has gone waits for nothing.
                let _ = reference.stream_wait_event(other, event);
            }
            Ok(())
        });
    };

    in "event.never-recorded":
    "waits-for-nothing-refused": "Refuses to wait for an event that was never recorded." => |h| {
        let recorded = recorded_events(h);
        h.backend.stream_wait_event(move |reference, stream, event| {
            looked_at(reference, stream, event)?;
            match recorded.with(|recorded| recorded.contains_key(&event)) {
                true => reference.stream_wait_event(stream, event),
                false => Err(wrong(ErrorKind::InvalidState, "stream_wait_event")),
            }
        });
    };

    in "event.outlives-stream":
    "events-complete-with-their-streams": "Reports events as complete once their stream is destroyed." => |h| {
        let (recorded, gone) = (recorded_events(h), destroyed_streams(h));
        h.backend.query_event(move |reference, event| {
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            let is_gone = home.is_some_and(|home| gone.with(|gone| gone.contains(&home)));
            let completion = reference.query_event(event)?;
            Ok(if is_gone { Completion::Complete } else { completion })
        });
    };
    "events-complete-with-foreign-ids" needs [has::foreign_objects]: "Reports events as complete once the id of a foreign stream is destroyed." => |h| {
        let (recorded, gone, foreign) = (recorded_events(h), destroyed_streams(h), foreign_streams(h));
        h.backend.query_event(move |reference, event| {
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            let home = home.filter(|home| foreign.with(|foreign| foreign.contains(home)));
            let is_gone = home.is_some_and(|home| gone.with(|gone| gone.contains(&home)));
            let completion = reference.query_event(event)?;
            Ok(if is_gone { Completion::Complete } else { completion })
        });
    };
    "events-pending-with-their-streams": "Reports events as pending forever once their stream is destroyed." => |h| {
        let (recorded, gone) = (recorded_events(h), destroyed_streams(h));
        h.backend.query_event(move |reference, event| {
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            let is_gone = home.is_some_and(|home| gone.with(|gone| gone.contains(&home)));
            let completion = reference.query_event(event)?;
            Ok(if is_gone { Completion::Pending } else { completion })
        });
    };
    "waits-end-with-their-streams": "Forgets waits for events whose stream is destroyed." => |h| {
        let (recorded, gone) = (recorded_events(h), destroyed_streams(h));
        h.backend.stream_wait_event(move |reference, stream, event| {
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            match home.is_some_and(|home| gone.with(|gone| gone.contains(&home))) {
                true => looked_at(reference, stream, event),
                false => reference.stream_wait_event(stream, event),
            }
        });
    };

    in "event.query-never-recorded":
    "fresh-events-pending": "Reports an event as pending before its first record." => |h| {
        let recorded = recorded_events(h);
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            let known = recorded.with(|recorded| recorded.contains_key(&event));
            Ok(if known { completion } else { Completion::Pending })
        });
    };

    in "event.query":
    "events-always-complete": "Reports an event as complete without a check." =>
        |h| h.backend.query_event(|reference, event| reference.query_event(event).map(|_| Completion::Complete));
    "events-pending-anew": "Reports a reached event as pending every second time." => |h| {
        let recorded = recorded_events(h);
        let asked = Shared::<HashSet<EventId>>::default();
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            if completion == Completion::Pending || !recorded.with(|recorded| recorded.contains_key(&event)) {
                return Ok(completion);
            }
            let again = asked.with(|asked| !asked.remove(&event) && asked.insert(event));
            Ok(if again { Completion::Complete } else { Completion::Pending })
        });
    };
    "events-of-whole-streams": "Reports an event as pending while its stream is." => |h| {
        let recorded = recorded_events(h);
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            let on = recorded.with(|recorded| recorded.get(&event).copied());
            Ok(if on.is_some_and(|stream| reference.is_pending(stream)) { Completion::Pending } else { completion })
        });
    };

    "answers-kept-by-threads": "Keeps the answer that an event is reached until the same thread records it again." => |h| {
        let reached = Shared::<HashSet<(ThreadId, EventId)>>::default();
        let again = reached.clone();
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            again.with(|reached| reached.remove(&(thread::current().id(), event)));
            Ok(())
        });
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            let here = (thread::current().id(), event);
            let is_known = reached.with(|reached| match completion.is_complete() {
                true => !reached.insert(here),
                false => reached.contains(&here),
            });
            Ok(if is_known { Completion::Complete } else { completion })
        });
    };
    "records-counted-in-a-byte": "Keeps the answer that an event is reached for the 256th record after it." => |h| {
        let records = Shared::<HashMap<EventId, (u8, Option<u8>)>>::default();
        let counted = records.clone();
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            counted.with(|records| {
                let (count, _) = records.entry(event).or_default();
                *count = count.wrapping_add(1);
            });
            Ok(())
        });
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            Ok(records.with(|records| match records.get_mut(&event) {
                Some((count, reached)) if completion.is_complete() => {
                    *reached = Some(*count);
                    Completion::Complete
                }
                Some((count, reached)) if *reached == Some(*count) => Completion::Complete,
                _ => completion,
            }))
        });
    };

    in "event.record-moves":
    "first-record-counts": "Records an event once, and not again." => |h| {
        let recorded = Shared::<HashSet<EventId>>::default();
        h.backend.record_event(move |reference, event, stream| {
            let first = recorded.with(|recorded| recorded.insert(event));
            if first || reference.is_recording(stream) {
                reference.record_event(event, stream)
            } else {
                looked_at(reference, stream, event)
            }
        });
    };
    "records-add-up": "Counts an event as reached when all of its records are." =>
        |h| h.backend.record_event(|reference, event, stream| {
            // The point that is recorded comes after the one that was recorded before.
            if !reference.is_recording(stream) && event.device() == stream.device() {
                reference.stream_wait_event(stream, event)?;
            }
            reference.record_event(event, stream)
        });

    in "event.record-device":
    "records-on-other-devices": "Accepts a record on a stream of another device than the event's, and makes none." =>
        |h| h.backend.record_event(|reference, event, stream| {
            forgiven(ErrorKind::WrongDevice, reference.record_event(event, stream), ())
        });

    in "event.destroy-pending":
    "late-waits-for-other-devices" needs [TWO_DEVICES]: "Submits a wait for another device with the next call on its stream, if the event is alive then." => |h| {
        let held = Deferred::default();
        let waits = held.clone();
        h.backend.stream_wait_event(move |reference, stream, event| {
            if reference.is_recording(stream) || stream.device() == event.device() {
                return reference.stream_wait_event(stream, event);
            }
            looked_at(reference, stream, event)?;
            waits.defer(stream, move |reference: &Reference| {
                forgiven(ErrorKind::InvalidHandle, reference.stream_wait_event(stream, event), ())
            });
            Ok(())
        });
        h.before(move |reference, _, stream| stream.map_or(Ok(()), |stream| held.release(reference, Some(stream))));
    };
    "events-take-waits-along": "Destroys an event together with the waits for it." => |h| {
        let held = Deferred::default();
        let waits = held.clone();
        let by_event = Shared::<HashMap<EventId, StreamId>>::default();
        let waiting = by_event.clone();
        let gone = held.clone();
        h.backend.stream_wait_event(move |reference, stream, event| {
            if reference.is_recording(stream) {
                return reference.stream_wait_event(stream, event);
            }
            looked_at(reference, stream, event)?;
            waiting.with(|waiting| waiting.insert(event, stream));
            waits.defer(stream, move |reference| reference.stream_wait_event(stream, event));
            Ok(())
        });
        h.backend.destroy_event(move |reference, event| {
            if let Some(stream) = by_event.with(|by_event| by_event.remove(&event)) {
                gone.forget(stream);
            }
            reference.destroy_event(event)
        });
        h.before(move |reference, method, stream| match method {
            "stream_wait_event" | "destroy_event" => Ok(()),
            _ => held.release(reference, stream),
        });
    };

    "events-of-captures-kept" needs [has::capture]: "Refuses to destroy an event while the capture that recorded it is open." => |h| {
        let recorded = recorded_events(h);
        h.backend.destroy_event(move |reference, event| {
            let home = recorded.with(|recorded| recorded.get(&event).copied());
            match home.is_some_and(|home| reference.is_recording(home)) {
                true => Err(wrong(ErrorKind::Capture, "destroy_event")),
                false => reference.destroy_event(event),
            }
        });
    };

    in "event.foreign-kept":
    "wrappers-complete-together" needs [has::foreign_objects]: "Reports an event as complete to its other wrappers once one of them is destroyed." => |h| {
        let wrapped = Shared::<HashMap<EventId, u64>>::default();
        let over = Shared::<HashSet<EventId>>::default();
        let (made, ends) = (wrapped.clone(), over.clone());
        h.backend.event_from_raw(move |reference, device, raw| {
            let wrapper = reference.event_from_raw(device, raw)?;
            made.with(|wrapped| wrapped.insert(wrapper, raw));
            Ok(wrapper)
        });
        h.backend.destroy_event(move |reference, event| {
            let others: Vec<EventId> = wrapped.with(|wrapped| match wrapped.remove(&event) {
                Some(raw) => wrapped.iter().filter(|(_, other)| **other == raw).map(|(event, _)| *event).collect(),
                None => Vec::new(),
            });
            ends.with(|ends| ends.extend(others));
            reference.destroy_event(event)
        });
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            Ok(if over.with(|over| over.contains(&event)) { Completion::Complete } else { completion })
        });
    };
    "events-complete-with-their-wrapper": "Reports an event as complete once an id that wraps it is destroyed." => |h| {
        let owners = Shared::<HashMap<u64, EventId>>::default();
        let wrapped = Shared::<HashMap<EventId, EventId>>::default();
        let over = Shared::<HashSet<EventId>>::default();
        let (raws, wraps, ends) = (owners.clone(), wrapped.clone(), over.clone());
        h.backend.raw_event(move |reference, event| {
            let raw = reference.raw_event(event)?;
            raws.with(|raws| raws.insert(raw, event));
            Ok(raw)
        });
        h.backend.event_from_raw(move |reference, device, raw| {
            let wrapper = reference.event_from_raw(device, raw)?;
            if let Some(owner) = owners.with(|owners| owners.get(&raw).copied()) {
                wraps.with(|wraps| wraps.insert(wrapper, owner));
            }
            Ok(wrapper)
        });
        h.backend.destroy_event(move |reference, event| {
            if let Some(owner) = wrapped.with(|wrapped| wrapped.remove(&event)) {
                ends.with(|ends| ends.insert(owner));
            }
            reference.destroy_event(event)
        });
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            Ok(if over.with(|over| over.contains(&event)) { Completion::Complete } else { completion })
        });
    };

    in "event.synchronize":
    "events-not-waited-for": "Returns at once from a wait for an event." => |h| {
        h.settles = true;
        h.backend.synchronize_event(|reference, event| reference.query_event(event).map(drop));
    };
    "records-early": "Records an event before the last copy to the host." => |h| {
        let held = Deferred::default();
        let copies = held.clone();
        h.backend.copy(move |reference, copy, stream| {
            if Way::of(copy) != Way::ToHost || reference.is_recording(stream) {
                return reference.copy(copy, stream);
            }
            // Refused here if at all.
            reference.query_stream(stream)?;
            let copy = *copy;
            copies.defer(stream, move |reference| reference.copy(&copy, stream));
            Ok(())
        });
        h.before(move |reference, method, stream| match method {
            "record_event" | "query_event" | "synchronize_event" => Ok(()),
            _ => held.release(reference, stream),
        });
    };
    "whole-streams-waited-for": "Waits for the whole stream instead of an event on it." => |h| {
        let recorded = recorded_events(h);
        h.backend.synchronize_event(move |reference, event| {
            reference.synchronize_event(event)?;
            match recorded.with(|recorded| recorded.get(&event).copied()) {
                Some(stream) if reference.is_pending(stream) => reference.wait_for(stream),
                _ => Ok(()),
            }
        });
    };

    in "event.elapsed":
    "times-halved": "Tells half the time between two events." =>
        |h| h.backend.event_elapsed_ns(|reference, start, end| Ok(reference.event_elapsed_ns(start, end)? / 2));
    "times-in-microseconds": "Tells times in microseconds." =>
        |h| h.backend.event_elapsed_ns(|reference, start, end| Ok(reference.event_elapsed_ns(start, end)? / 1000));
    "times-with-the-call": "Adds the time that a call may take to every time." =>
        |h| h.backend.event_elapsed_ns(|reference, start, end| Ok(reference.event_elapsed_ns(start, end)? + 30_000_000));

    "times-in-the-order-of-the-calls": "Returns 0 ns if the end was recorded by an earlier call than the start." => |h| {
        let calls = Shared::<(u64, HashMap<EventId, u64>)>::default();
        let noted = calls.clone();
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            noted.with(|(count, calls)| {
                *count += 1;
                calls.insert(event, *count);
            });
            Ok(())
        });
        h.backend.event_elapsed_ns(move |reference, start, end| {
            let elapsed = reference.event_elapsed_ns(start, end)?;
            let is_earlier = calls.with(|(_, calls)| calls.get(&end) < calls.get(&start));
            Ok(if is_earlier { 0 } else { elapsed })
        });
    };

    in "event.elapsed-order":
    "elapsed-without-sign": "Returns the time between two records, whichever came first." =>
        |h| h.backend.event_elapsed_ns(|reference, start, end| match reference.event_elapsed_ns(start, end)? {
            0 => reference.event_elapsed_ns(end, start),
            elapsed => Ok(elapsed),
        });

    in "event.elapsed-invalid":
    "untimed-events-timed": "Tells no time between events without timing, as 0." => |h| {
        let untimed = Shared::<HashSet<EventId>>::default();
        let made = untimed.clone();
        h.backend.create_event(move |reference, device, options| {
            let event = reference.create_event(device, options)?;
            if !options.timing {
                made.with(|untimed| untimed.insert(event));
            }
            Ok(event)
        });
        h.backend.event_elapsed_ns(move |reference, start, end| {
            let elapsed = reference.event_elapsed_ns(start, end);
            let without = untimed.with(|untimed| untimed.contains(&start) || untimed.contains(&end));
            if without && is(&elapsed, ErrorKind::InvalidArgument) { Ok(0) } else { elapsed }
        });
    };
    "unrecorded-events-timed": "Reports events that were never recorded as not reached." => |h| {
        let recorded = recorded_events(h);
        h.backend.event_elapsed_ns(move |reference, start, end| {
            let elapsed = reference.event_elapsed_ns(start, end);
            let unknown = [start, end].iter().any(|event| !recorded.with(|known| known.contains_key(event)));
            match elapsed {
                Err(error) if unknown && error.kind() == ErrorKind::InvalidArgument => {
                    Err(wrong(ErrorKind::InvalidState, "event_elapsed_ns"))
                }
                elapsed => elapsed,
            }
        });
    };
    "times-before-the-end": "Returns the time 0 while the second event is pending." =>
        |h| h.backend.event_elapsed_ns(|reference, start, end| {
            forgiven(ErrorKind::InvalidState, reference.event_elapsed_ns(start, end), 0)
        });
}

/// Looks at the ids only.
fn looked_at(reference: &Reference, stream: StreamId, event: EventId) -> Result<()> {
    reference.query_stream(stream)?;
    reference.query_event(event).map(drop)
}

/// Enqueues some waits only with the next call for their stream, for the latest record.
fn made_with_the_next_call(h: &mut Hooks, concerns: fn(StreamId, EventId) -> bool) {
    let held = Deferred::default();
    let waits = held.clone();
    h.backend.stream_wait_event(move |reference, stream, event| {
        let is_plain = !concerns(stream, event) || reference.is_recording(stream);
        if is_plain || reference.query_event(event)?.is_complete() {
            return reference.stream_wait_event(stream, event);
        }
        looked_at(reference, stream, event)?;
        waits.defer(stream, move |reference| reference.stream_wait_event(stream, event));
        Ok(())
    });
    h.before(move |reference, method, stream| match (method, stream) {
        ("stream_wait_event", _) => Ok(()),
        // A call for an event, and one for a block, concerns no stream.
        ("destroy_event" | "synchronize_device", _) | (_, Some(_)) => held.release(reference, stream),
        _ => Ok(()),
    });
}

/// Where each event was recorded last.
fn recorded_events(h: &mut Hooks) -> Shared<HashMap<EventId, StreamId>> {
    let recorded = Shared::<HashMap<EventId, StreamId>>::default();
    let noted = recorded.clone();
    h.backend.record_event(move |reference, event, stream| {
        reference.record_event(event, stream)?;
        noted.with(|noted| noted.insert(event, stream));
        Ok(())
    });
    recorded
}

/// Returns the streams that were destroyed.
fn destroyed_streams(h: &mut Hooks) -> Shared<HashSet<StreamId>> {
    let destroyed = Shared::<HashSet<StreamId>>::default();
    let noted = destroyed.clone();
    h.backend.destroy_stream(move |reference, stream| {
        reference.destroy_stream(stream)?;
        noted.with(|noted| noted.insert(stream));
        Ok(())
    });
    destroyed
}

/// What a stream does later than it was told to.
#[derive(Default)]
struct Late {
    /// Events that the next copy waits for.
    waits: Vec<EventId>,
    /// Copies that wait.
    copies: Vec<JoinHandle<Result<()>>>,
}

/// Waits and copies are made by threads, when the stream gets there.
fn look_when_there(h: &mut Hooks) {
    type Lates = Shared<HashMap<StreamId, Late>>;
    let lates = Lates::default();
    let (waited, copied, joined) = (lates.clone(), lates.clone(), lates);
    h.backend.stream_wait_event(move |reference, stream, event| {
        looked_at(reference, stream, event)?;
        waited.with(|lates| lates.entry(stream).or_default().waits.push(event));
        Ok(())
    });
    let late_copy = move |reference: &Reference, copy: MemoryCopy, stream: StreamId| {
        let waits = copied.with(|lates| lates.get_mut(&stream).map(|late| std::mem::take(&mut late.waits)));
        let waits = waits.unwrap_or_default();
        if waits.is_empty() {
            return reference.copy(&copy, stream);
        }
        let reference = reference.clone();
        // A wait for the stream or the device waits for this thread.
        let thread = std::thread::spawn(move || {
            reference.synchronize_stream(stream)?;
            waits.into_iter().try_for_each(|event| reference.synchronize_event(event))?;
            reference.copy(&copy, stream)
        });
        copied.with(|lates| lates.entry(stream).or_default().copies.push(thread));
        Ok(())
    };
    let late_copy = Arc::new(late_copy);
    h.backend.copy(move |reference, copy, stream| late_copy(reference, *copy, stream));
    h.before(move |_, method, stream| {
        if !matches!(method, "synchronize_stream" | "synchronize_device" | "destroy_stream") {
            return Ok(());
        }
        let taken: Vec<Late> = joined.with(|lates| {
            lates.extract_if(|on, _| stream.is_none_or(|stream| stream == *on)).map(|(_, late)| late).collect()
        });
        taken
            .into_iter()
            .flat_map(|late| late.copies)
            .try_for_each(|copy| copy.join().unwrap_or_else(|_| Err(wrong(ErrorKind::InvalidState, "copy"))))
    });
}
