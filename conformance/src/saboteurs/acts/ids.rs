//! Ids that should be refused, and calls in a forked child.

use std::collections::HashMap;

use highwater_hal::{
    AllocateOptions, Completion, DeviceMemoryKind, ErrorKind, EventId, IdParts, ObjectId, Result, StreamId,
};

use super::super::Saboteur;
use super::super::honest::is;
use super::super::note::Note;
use super::living_streams;
use crate::cases::forge;

const CLAUSE: &str = "backend.ids-checked";

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new(
        "generations-of-streams-ignored",
        CLAUSE,
        "Takes the id of a destroyed stream for the one that has its slot now.",
        |h| {
            let newest = Note::<HashMap<u32, StreamId>>::default();
            let slots = newest.clone();
            h.backend.create_stream(move |honest, device, options| {
                let stream = honest.create_stream(device, options)?;
                slots.with(|slots| slots.insert(stream.parts().slot, stream));
                Ok(stream)
            });
            h.stream_in(move |stream| {
                let known = newest.with(|newest| newest.get(&stream.parts().slot).copied());
                known.filter(|known| known.tag() == stream.tag()).unwrap_or(stream)
            });
        },
    ),
    Saboteur::new("tags-of-streams-ignored", CLAUSE, "Takes ids of streams that another backend issued.", |h| {
        let streams = living_streams(h);
        h.stream_in(move |stream| {
            let own = streams.with(|streams| streams.first().copied());
            own.map_or(stream, |own| forge(IdParts { tag: own.tag(), ..stream.parts() }))
        });
    }),
    Saboteur::new("devices-of-events-ignored", CLAUSE, "Takes ids of events that name no device.", |h| {
        let devices = Note::<HashMap<u32, u32>>::default();
        let made = devices.clone();
        h.backend.create_event(move |honest, device, options| {
            let event = honest.create_event(device, options)?;
            made.with(|devices| devices.insert(event.parts().slot, device));
            Ok(event)
        });
        h.event_in(move |event: EventId| {
            let device = devices.with(|devices| devices.get(&event.parts().slot).copied());
            forge(IdParts { device: device.unwrap_or(event.device()), ..event.parts() })
        });
    }),
    Saboteur::new(
        "is-capturing-of-anything",
        CLAUSE,
        "Says of streams that are not there that they record nothing.",
        |h| {
            h.backend.is_capturing(|honest, stream| forgiven(honest.is_capturing(stream), false));
        },
    ),
    Saboteur::new("raw-of-anything", CLAUSE, "Has a vendor's handle for streams that are not there.", |h| {
        h.backend.raw_stream(|honest, stream| forgiven(honest.raw_stream(stream), 0));
    }),
    Saboteur::new(
        "memory-on-stale-streams",
        CLAUSE,
        "Allocates plain memory where the stream to be ordered on is not there.",
        |h| {
            h.backend.allocate(|honest, device, options| match honest.allocate(device, options) {
                Err(error) if error.kind() == ErrorKind::InvalidHandle => {
                    honest.allocate(device, &AllocateOptions::new(options.bytes).with_kind(DeviceMemoryKind::Plain))
                }
                allocated => allocated,
            });
        },
    ),
    Saboteur::new("refused-fills-done", CLAUSE, "Refuses a fill on a stale stream, and executes it elsewhere.", |h| {
        h.backend.fill(|honest, fill, stream| {
            let done = honest.fill(fill, stream);
            if is(&done, ErrorKind::InvalidHandle) {
                honest.aside(fill.device, |aside| honest.fill(fill, aside))?;
            }
            done
        });
    }),
    Saboteur::new("refused-copies-done", CLAUSE, "Refuses a copy on a stale stream, and executes it elsewhere.", |h| {
        h.backend.copy(|honest, copy, stream| {
            let done = honest.copy(copy, stream);
            if is(&done, ErrorKind::InvalidHandle) {
                honest.aside(0, |aside| honest.copy(copy, aside))?;
            }
            done
        });
    }),
    Saboteur::new(
        "handles-take-any-stream",
        CLAUSE,
        "Lets a handle stay with its stream where the new one is not there.",
        |h| {
            h.handle.set_stream(|handle, stream| forgiven(handle.set_stream(stream), ()));
        },
    ),
    Saboteur::new(
        "launches-of-nothing",
        CLAUSE,
        "Launches executable graphs that are not there as graphs of nothing.",
        |h| {
            h.backend.launch_graph(|honest, graph, stream| forgiven(honest.launch_graph(graph, stream), ()));
        },
    ),
    Saboteur::new("graphs-destroyed-twice", CLAUSE, "Destroys graphs as often as asked.", |h| {
        h.backend.destroy_graph(|honest, graph| forgiven(honest.destroy_graph(graph), ()));
    }),
    Saboteur::new("streams-destroyed-twice", "stream.destroy-stale", "Destroys streams as often as asked.", |h| {
        h.backend.destroy_stream(|honest, stream| forgiven(honest.destroy_stream(stream), ()));
    }),
    Saboteur::new(
        "destroyed-streams-complete",
        "stream.destroy-stale",
        "Says of destroyed streams that all is done.",
        |h| h.backend.query_stream(|honest, stream| forgiven(honest.query_stream(stream), Completion::Complete)),
    ),
    Saboteur::new("events-destroyed-twice", "event.destroy-stale", "Destroys events as often as asked.", |h| {
        h.backend.destroy_event(|honest, event| forgiven(honest.destroy_event(event), ()));
    }),
    Saboteur::new(
        "waits-for-destroyed-events",
        "event.destroy-stale",
        "Takes waits for destroyed events, and makes none.",
        |h| {
            h.backend.stream_wait_event(|honest, stream, event| {
                honest.is_capturing(stream)?;
                forgiven(honest.stream_wait_event(stream, event), ())
            });
        },
    ),
    Saboteur::new("child-is-complete", "backend.forked", "Says in a forked child that a stream is done.", |h| {
        h.backend.query_stream(|honest, stream| in_child(honest.query_stream(stream), Completion::Complete));
    }),
    Saboteur::new("child-has-modes", "backend.forked", "Lets a forked child set the mode of a handle.", |h| {
        h.handle.set_math_mode(|handle, mode| in_child(handle.set_math_mode(mode), ()));
    }),
    Saboteur::new("child-captures", "backend.forked", "Lets a forked child begin a capture.", |h| {
        h.backend.begin_capture(|honest, stream, mode| in_child(honest.begin_capture(stream, mode), ()));
    }),
    Saboteur::new("child-closes", "backend.forked", "Lets a forked child close memory.", |h| {
        h.sharing.close_memory(|sharing, device, ptr| in_child(sharing.close_memory(device, ptr), ()));
    }),
    Saboteur::new(
        "child-waits",
        "backend.forked",
        "Makes a forked child wait for a while before it is refused.",
        |h| {
            h.backend.synchronize_event(|honest, event| {
                let waited = honest.synchronize_event(event);
                if is(&waited, ErrorKind::Forked) {
                    std::thread::sleep(std::time::Duration::from_secs(6));
                }
                waited
            });
        },
    ),
];

/// Forgives an id that is not there.
fn forgiven<T>(result: Result<T>, value: T) -> Result<T> {
    if is(&result, ErrorKind::InvalidHandle) { Ok(value) } else { result }
}

/// Answers in a child too.
fn in_child<T>(result: Result<T>, value: T) -> Result<T> {
    if is(&result, ErrorKind::Forked) { Ok(value) } else { result }
}
