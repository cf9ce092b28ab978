//! Events: what a record marks, what a wait orders, and what is told about them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread::JoinHandle;

use highwater_hal::{Completion, ErrorKind, EventId, MemoryCopy, Result, StreamId};

use super::super::Saboteur;
use super::super::honest::{Honest, Way, is, wrong};
use super::super::hooks::Hooks;
use super::super::note::{Held, Note};

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("waits-forgotten", "event.wait-orders", "Takes a wait for an event and forgets it.", |h| {
        h.backend.stream_wait_event(|honest, stream, event| match honest.records(stream) {
            true => honest.stream_wait_event(stream, event),
            false => looked_at(honest, stream, event),
        });
    }),
    Saboteur::new(
        "waits-across-devices-forgotten",
        "event.wait-orders",
        "Forgets waits for events of another device.",
        |h| {
            h.backend.stream_wait_event(|honest, stream, event| match stream.device() == event.device() {
                true => honest.stream_wait_event(stream, event),
                false => looked_at(honest, stream, event),
            });
        },
    ),
    Saboteur::new(
        "last-wait-counts",
        "event.wait-orders",
        "Makes the last of several waits in a row, and none of the others.",
        |h| {
            let held = Held::default();
            let waits = held.clone();
            h.backend.stream_wait_event(move |honest, stream, event| {
                if honest.records(stream) {
                    return honest.stream_wait_event(stream, event);
                }
                looked_at(honest, stream, event)?;
                waits.forget(stream);
                waits.hold(stream, move |honest| honest.stream_wait_event(stream, event));
                Ok(())
            });
            h.before(move |honest, method, stream| match method {
                "stream_wait_event" => Ok(()),
                _ => held.let_go(honest, stream),
            });
        },
    ),
    Saboteur::new(
        "waits-of-default-streams-forgotten",
        "event.wait-orders",
        "Forgets the waits of a thread's default stream.",
        |h| {
            h.backend.stream_wait_event(|honest, stream, event| match stream.is_per_thread_default() {
                true => looked_at(honest, stream, event),
                false => honest.stream_wait_event(stream, event),
            });
        },
    ),
    Saboteur::new(
        "waits-look-when-there",
        "event.wait-snapshot",
        "Looks at an event when the stream gets to its wait, and not when the wait is called.",
        look_when_there,
    ),
    Saboteur::new(
        "later-records-waited-for",
        "event.wait-snapshot",
        "Lets streams that wait for an event wait for its later records too.",
        |h| {
            let waiting = Note::<HashMap<EventId, HashSet<StreamId>>>::default();
            let waits = waiting.clone();
            h.backend.stream_wait_event(move |honest, stream, event| {
                honest.stream_wait_event(stream, event)?;
                if !honest.records(stream) {
                    waits.with(|waits| waits.entry(event).or_default().insert(stream));
                }
                Ok(())
            });
            h.backend.record_event(move |honest, event, stream| {
                honest.record_event(event, stream)?;
                let again = waiting.with(|waiting| waiting.get(&event).cloned()).unwrap_or_default();
                for other in again {
                    // A stream that has gone waits for nothing.
                    let _ = honest.stream_wait_event(other, event);
                }
                Ok(())
            });
        },
    ),
    Saboteur::new(
        "waits-for-nothing-refused",
        "event.never-recorded",
        "Refuses to wait for an event that was never recorded.",
        |h| {
            let recorded = recorded_events(h);
            h.backend.stream_wait_event(move |honest, stream, event| {
                looked_at(honest, stream, event)?;
                match recorded.with(|recorded| recorded.contains_key(&event)) {
                    true => honest.stream_wait_event(stream, event),
                    false => Err(wrong(ErrorKind::InvalidState, "stream_wait_event")),
                }
            });
        },
    ),
    Saboteur::new(
        "fresh-events-pending",
        "event.query-never-recorded",
        "Says that an event is pending before it is recorded.",
        |h| {
            let recorded = recorded_events(h);
            h.backend.query_event(move |honest, event| {
                let completion = honest.query_event(event)?;
                let known = recorded.with(|recorded| recorded.contains_key(&event));
                Ok(if known { completion } else { Completion::Pending })
            });
        },
    ),
    Saboteur::new("events-always-complete", "event.query", "Says that an event is complete without looking.", |h| {
        h.backend.query_event(|honest, event| honest.query_event(event).map(|_| Completion::Complete));
    }),
    Saboteur::new(
        "events-pending-anew",
        "event.query",
        "Says that an event is pending every second time, once it is reached.",
        |h| {
            let recorded = recorded_events(h);
            let asked = Note::<HashSet<EventId>>::default();
            h.backend.query_event(move |honest, event| {
                let completion = honest.query_event(event)?;
                if completion == Completion::Pending || !recorded.with(|recorded| recorded.contains_key(&event)) {
                    return Ok(completion);
                }
                let again = asked.with(|asked| !asked.remove(&event) && asked.insert(event));
                Ok(if again { Completion::Complete } else { Completion::Pending })
            });
        },
    ),
    Saboteur::new(
        "events-of-whole-streams",
        "event.query",
        "Says that an event is pending while its stream is.",
        |h| {
            let recorded = recorded_events(h);
            h.backend.query_event(move |honest, event| {
                let completion = honest.query_event(event)?;
                let on = recorded.with(|recorded| recorded.get(&event).copied());
                Ok(if on.is_some_and(|stream| honest.is_busy(stream)) { Completion::Pending } else { completion })
            });
        },
    ),
    Saboteur::new("first-record-counts", "event.record-moves", "Records an event once, and not again.", |h| {
        let recorded = Note::<HashSet<EventId>>::default();
        h.backend.record_event(move |honest, event, stream| {
            let first = recorded.with(|recorded| recorded.insert(event));
            if first || honest.records(stream) {
                honest.record_event(event, stream)
            } else {
                looked_at(honest, stream, event)
            }
        });
    }),
    Saboteur::new(
        "records-add-up",
        "event.record-moves",
        "Counts an event as reached when all of its records are.",
        |h| {
            h.backend.record_event(|honest, event, stream| {
                // The point that is recorded comes after the one that was recorded before.
                if !honest.records(stream) && event.device() == stream.device() {
                    honest.stream_wait_event(stream, event)?;
                }
                honest.record_event(event, stream)
            });
        },
    ),
    Saboteur::new(
        "records-on-other-devices",
        "event.record-device",
        "Takes the record of an event on a stream of another device, and makes none.",
        |h| {
            h.backend.record_event(|honest, event, stream| match honest.record_event(event, stream) {
                Err(error) if error.kind() == ErrorKind::WrongDevice => Ok(()),
                recorded => recorded,
            });
        },
    ),
    Saboteur::new(
        "events-take-waits-along",
        "event.destroy-pending",
        "Destroys an event together with the waits for it.",
        |h| {
            let held = Held::default();
            let waits = held.clone();
            let by_event = Note::<HashMap<EventId, StreamId>>::default();
            let waiting = by_event.clone();
            let gone = held.clone();
            h.backend.stream_wait_event(move |honest, stream, event| {
                if honest.records(stream) {
                    return honest.stream_wait_event(stream, event);
                }
                looked_at(honest, stream, event)?;
                waiting.with(|waiting| waiting.insert(event, stream));
                waits.hold(stream, move |honest| honest.stream_wait_event(stream, event));
                Ok(())
            });
            h.backend.destroy_event(move |honest, event| {
                if let Some(stream) = by_event.with(|by_event| by_event.remove(&event)) {
                    gone.forget(stream);
                }
                honest.destroy_event(event)
            });
            h.before(move |honest, method, stream| match method {
                "stream_wait_event" | "destroy_event" => Ok(()),
                _ => held.let_go(honest, stream),
            });
        },
    ),
    Saboteur::new(
        "events-not-waited-for",
        "event.synchronize",
        "Returns at once where an event is to be waited for.",
        |h| {
            h.settles = true;
            h.backend.synchronize_event(|honest, event| honest.query_event(event).map(drop));
        },
    ),
    Saboteur::new("records-early", "event.synchronize", "Records an event before the last copy to the host.", |h| {
        let held = Held::default();
        let copies = held.clone();
        h.backend.copy(move |honest, copy, stream| {
            if Way::of(copy) != Way::ToHost || honest.records(stream) {
                return honest.copy(copy, stream);
            }
            // Refused here if at all.
            honest.query_stream(stream)?;
            let copy = *copy;
            copies.hold(stream, move |honest| honest.copy(&copy, stream));
            Ok(())
        });
        h.before(move |honest, method, stream| match method {
            "record_event" | "query_event" | "synchronize_event" => Ok(()),
            _ => held.let_go(honest, stream),
        });
    }),
    Saboteur::new(
        "whole-streams-waited-for",
        "event.synchronize",
        "Waits for the whole stream where an event on it is to be waited for.",
        |h| {
            let recorded = recorded_events(h);
            h.backend.synchronize_event(move |honest, event| {
                honest.synchronize_event(event)?;
                match recorded.with(|recorded| recorded.get(&event).copied()) {
                    Some(stream) if honest.is_busy(stream) => honest.wait_for(stream),
                    _ => Ok(()),
                }
            });
        },
    ),
    Saboteur::new("times-halved", "event.elapsed", "Tells half the time between two events.", |h| {
        h.backend.event_elapsed_ns(|honest, start, end| Ok(honest.event_elapsed_ns(start, end)? / 2));
    }),
    Saboteur::new("times-in-microseconds", "event.elapsed", "Tells times in microseconds.", |h| {
        h.backend.event_elapsed_ns(|honest, start, end| Ok(honest.event_elapsed_ns(start, end)? / 1000));
    }),
    Saboteur::new("times-with-the-call", "event.elapsed", "Adds the time that a call may take to every time.", |h| {
        h.backend.event_elapsed_ns(|honest, start, end| Ok(honest.event_elapsed_ns(start, end)? + 30_000_000));
    }),
    Saboteur::new(
        "untimed-events-timed",
        "event.elapsed-invalid",
        "Tells no time between events without timing, as 0.",
        |h| {
            let untimed = Note::<HashSet<EventId>>::default();
            let made = untimed.clone();
            h.backend.create_event(move |honest, device, options| {
                let event = honest.create_event(device, options)?;
                if !options.timing {
                    made.with(|untimed| untimed.insert(event));
                }
                Ok(event)
            });
            h.backend.event_elapsed_ns(move |honest, start, end| {
                let elapsed = honest.event_elapsed_ns(start, end);
                let without = untimed.with(|untimed| untimed.contains(&start) || untimed.contains(&end));
                if without && is(&elapsed, ErrorKind::InvalidArgument) { Ok(0) } else { elapsed }
            });
        },
    ),
    Saboteur::new(
        "unrecorded-events-timed",
        "event.elapsed-invalid",
        "Says of events that were never recorded that they are not reached yet.",
        |h| {
            let recorded = recorded_events(h);
            h.backend.event_elapsed_ns(move |honest, start, end| {
                let elapsed = honest.event_elapsed_ns(start, end);
                let unknown = [start, end].iter().any(|event| !recorded.with(|known| known.contains_key(event)));
                match elapsed {
                    Err(error) if unknown && error.kind() == ErrorKind::InvalidArgument => {
                        Err(wrong(ErrorKind::InvalidState, "event_elapsed_ns"))
                    }
                    elapsed => elapsed,
                }
            });
        },
    ),
    Saboteur::new(
        "times-before-the-end",
        "event.elapsed-invalid",
        "Tells no time, as 0, where the second event is not reached yet.",
        |h| {
            h.backend.event_elapsed_ns(|honest, start, end| {
                let elapsed = honest.event_elapsed_ns(start, end);
                if is(&elapsed, ErrorKind::InvalidState) { Ok(0) } else { elapsed }
            });
        },
    ),
];

/// Looks at the ids only.
fn looked_at(honest: &Honest, stream: StreamId, event: EventId) -> Result<()> {
    honest.query_stream(stream)?;
    honest.query_event(event).map(drop)
}

/// Where each event was recorded last.
fn recorded_events(h: &mut Hooks) -> Note<HashMap<EventId, StreamId>> {
    let recorded = Note::<HashMap<EventId, StreamId>>::default();
    let noted = recorded.clone();
    h.backend.record_event(move |honest, event, stream| {
        honest.record_event(event, stream)?;
        noted.with(|noted| noted.insert(event, stream));
        Ok(())
    });
    recorded
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
    type Lates = Note<HashMap<StreamId, Late>>;
    let lates = Lates::default();
    let (waited, copied, joined) = (lates.clone(), lates.clone(), lates);
    h.backend.stream_wait_event(move |honest, stream, event| {
        looked_at(honest, stream, event)?;
        waited.with(|lates| lates.entry(stream).or_default().waits.push(event));
        Ok(())
    });
    let late_copy = move |honest: &Honest, copy: MemoryCopy, stream: StreamId| {
        let waits = copied.with(|lates| lates.get_mut(&stream).map(|late| std::mem::take(&mut late.waits)));
        let waits = waits.unwrap_or_default();
        if waits.is_empty() {
            return honest.copy(&copy, stream);
        }
        let honest = honest.clone();
        // Who waits for the stream or the device waits for this thread.
        let thread = std::thread::spawn(move || {
            honest.synchronize_stream(stream)?;
            waits.into_iter().try_for_each(|event| honest.synchronize_event(event))?;
            honest.copy(&copy, stream)
        });
        copied.with(|lates| lates.entry(stream).or_default().copies.push(thread));
        Ok(())
    };
    let late_copy = Arc::new(late_copy);
    h.backend.copy(move |honest, copy, stream| late_copy(honest, *copy, stream));
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
