//! Ids that should be refused, and calls in a forked child.

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use highwater_hal::{AllocateOptions, Completion, DeviceMemoryKind, ErrorKind, EventId, IdParts, ObjectId, StreamId};

use super::super::reference::{forgiven, is};
use super::super::state::Shared;
use super::living_streams;
use crate::cases::forge;

mutants! {
    in "backend.ids-checked":
    "generations-of-streams-ignored": "Accepts the id of a destroyed stream as that of the stream in its slot." => |h| {
        let newest = Shared::<HashMap<u32, StreamId>>::default();
        let slots = newest.clone();
        h.backend.create_stream(move |reference, device, options| {
            let stream = reference.create_stream(device, options)?;
            slots.with(|slots| slots.insert(stream.parts().slot, stream));
            Ok(stream)
        });
        h.stream_in(move |stream| {
            let known = newest.with(|newest| newest.get(&stream.parts().slot).copied());
            known.filter(|known| known.tag() == stream.tag()).unwrap_or(stream)
        });
    };
    "records-lost-by-refusals": "Reports an event as complete once a record of it on a bad stream was refused." => |h| {
        let lost = Shared::<HashSet<EventId>>::default();
        let noted = lost.clone();
        h.backend.record_event(move |reference, event, stream| {
            let recorded = reference.record_event(event, stream);
            let is_refused = is(&recorded, ErrorKind::InvalidHandle);
            noted.with(|lost| if is_refused { lost.insert(event) } else { lost.remove(&event) });
            recorded
        });
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            Ok(if lost.with(|lost| lost.contains(&event)) { Completion::Complete } else { completion })
        });
    };
    "tags-of-streams-ignored": "Accepts ids of streams that another backend issued." => |h| {
        let streams = living_streams(h);
        h.stream_in(move |stream| {
            let own = streams.with(|streams| streams.first().copied());
            own.map_or(stream, |own| forge(IdParts { tag: own.tag(), ..stream.parts() }))
        });
    };
    "devices-of-events-ignored": "Accepts ids of events that name no device." => |h| {
        let devices = Shared::<HashMap<u32, u32>>::default();
        let made = devices.clone();
        h.backend.create_event(move |reference, device, options| {
            let event = reference.create_event(device, options)?;
            made.with(|devices| devices.insert(event.parts().slot, device));
            Ok(event)
        });
        h.event_in(move |event: EventId| {
            let device = devices.with(|devices| devices.get(&event.parts().slot).copied());
            forge(IdParts { device: device.unwrap_or(event.device()), ..event.parts() })
        });
    };
    "is-capturing-of-anything" needs [has::capture]: "Reports that unknown streams take part in no capture." =>
        |h| h.backend.is_capturing(|reference, stream| {
            forgiven(ErrorKind::InvalidHandle, reference.is_capturing(stream), false)
        });
    "last-streams-of-threads-known": "Answers for the stream that a thread asked for last, although another thread destroyed it." => |h| {
        let last = Shared::<HashMap<ThreadId, StreamId>>::default();
        let forgotten = last.clone();
        h.backend.destroy_stream(move |reference, stream| {
            reference.destroy_stream(stream)?;
            let own = std::thread::current().id();
            forgotten.with(|last| last.retain(|thread, kept| *thread != own || *kept != stream));
            Ok(())
        });
        h.backend.query_stream(move |reference, stream| {
            let own = std::thread::current().id();
            let answer = reference.query_stream(stream);
            if answer.is_ok() {
                last.with(|last| last.insert(own, stream));
            }
            match last.with(|last| last.get(&own) == Some(&stream)) {
                true => forgiven(ErrorKind::InvalidHandle, answer, Completion::Complete),
                false => answer,
            }
        });
    };
    "raw-of-anything" needs [has::foreign_objects]: "Returns a vendor's handle for unknown streams." =>
        |h| h.backend.raw_stream(|reference, stream| forgiven(ErrorKind::InvalidHandle, reference.raw_stream(stream), 0));
    "memory-on-stale-streams" needs [has::stream_ordered_memory]: "Allocates plain memory when the stream of stream-ordered memory is stale." =>
        |h| h.backend.allocate(|reference, device, options| match reference.allocate(device, options) {
            Err(error) if error.kind() == ErrorKind::InvalidHandle => {
                reference.allocate(device, &AllocateOptions::new(options.bytes).with_kind(DeviceMemoryKind::Plain))
            }
            allocated => allocated,
        });
    "refused-fills-done": "Refuses a fill on a stale stream, and executes it elsewhere." =>
        |h| h.backend.fill(|reference, fill, stream| {
            let done = reference.fill(fill, stream);
            if is(&done, ErrorKind::InvalidHandle) {
                reference.on_own_stream(fill.device, |own| reference.fill(fill, own))?;
            }
            done
        });
    "refused-copies-done": "Refuses a copy on a stale stream, and executes it elsewhere." =>
        |h| h.backend.copy(|reference, copy, stream| {
            let done = reference.copy(copy, stream);
            if is(&done, ErrorKind::InvalidHandle) {
                reference.on_own_stream(0, |own| reference.copy(copy, own))?;
            }
            done
        });
    "handles-take-any-stream": "Accepts an unknown stream for a handle, and keeps the old one." =>
        |h| h.handle.set_stream(|handle, stream| forgiven(ErrorKind::InvalidHandle, handle.set_stream(stream), ()));
    "launches-of-nothing" needs [has::capture]: "Launches unknown executable graphs as empty graphs." =>
        |h| h.backend.launch_graph(|reference, graph, stream| {
            forgiven(ErrorKind::InvalidHandle, reference.launch_graph(graph, stream), ())
        });
    "graphs-destroyed-twice" needs [has::capture]: "Destroys graphs as often as asked." =>
        |h| h.backend.destroy_graph(|reference, graph| forgiven(ErrorKind::InvalidHandle, reference.destroy_graph(graph), ()));

    in "stream.destroy-stale":
    "streams-destroyed-twice": "Destroys streams as often as asked." =>
        |h| h.backend.destroy_stream(|reference, stream| {
            forgiven(ErrorKind::InvalidHandle, reference.destroy_stream(stream), ())
        });
    "destroyed-streams-complete": "Reports destroyed streams as complete." =>
        |h| h.backend.query_stream(|reference, stream| {
            forgiven(ErrorKind::InvalidHandle, reference.query_stream(stream), Completion::Complete)
        });

    "captures-remembered" needs [has::capture]: "Reports that a destroyed stream which has recorded takes part in no capture." => |h| {
        let recorded = Shared::<HashSet<StreamId>>::default();
        let began = recorded.clone();
        h.backend.begin_capture(move |reference, stream, mode| {
            reference.begin_capture(stream, mode)?;
            began.with(|recorded| recorded.insert(stream));
            Ok(())
        });
        h.backend.is_capturing(move |reference, stream| {
            let answer = reference.is_capturing(stream);
            match recorded.with(|recorded| recorded.contains(&stream)) {
                true => forgiven(ErrorKind::InvalidHandle, answer, false),
                false => answer,
            }
        });
    };

    in "event.destroy-stale":
    "events-destroyed-twice": "Destroys events as often as asked." =>
        |h| h.backend.destroy_event(|reference, event| forgiven(ErrorKind::InvalidHandle, reference.destroy_event(event), ()));
    "waits-for-destroyed-events": "Accepts waits for destroyed events, and makes none." =>
        |h| h.backend.stream_wait_event(|reference, stream, event| {
            reference.is_capturing(stream)?;
            forgiven(ErrorKind::InvalidHandle, reference.stream_wait_event(stream, event), ())
        });
    "raw-events-remembered" needs [has::foreign_objects]: "Remembers the vendor's handle of an event that was asked for before its destruction." => |h| {
        let known = Shared::<HashMap<EventId, u64>>::default();
        h.backend.raw_event(move |reference, event| {
            let answer = reference.raw_event(event);
            if let Ok(raw) = answer {
                known.with(|known| known.insert(event, raw));
            }
            match known.with(|known| known.get(&event).copied()) {
                Some(raw) => forgiven(ErrorKind::InvalidHandle, answer, raw),
                None => answer,
            }
        });
    };

    in "backend.exiting":
    "exits-unnoticed" [by_two_processes]: "Does not notice that the process exits." =>
        |h| h.is_exiting = Some(Box::new(|_| false));
    "waits-at-exit" [by_two_processes]: "Reports a wait for the device as done while the process exits." =>
        |h| h.backend.synchronize_device(|reference, device| {
            forgiven(ErrorKind::ShuttingDown, reference.synchronize_device(device), ())
        });
    "is-capturing-at-exit" [by_two_processes] needs [has::capture]: "Answers whether a stream takes part in a capture while the process exits." =>
        |h| h.backend.is_capturing(|reference, stream| {
            forgiven(ErrorKind::ShuttingDown, reference.is_capturing(stream), false)
        });
    "modes-at-exit" [by_two_processes]: "Sets the mode of a handle while the process exits." =>
        |h| h.handle.set_math_mode(|handle, mode| forgiven(ErrorKind::ShuttingDown, handle.set_math_mode(mode), ()));
    "always-exiting" [by_two_processes]: "Reports an exit from the start." =>
        |h| h.is_exiting = Some(Box::new(|_| true));

    in "backend.forked":
    "child-is-complete": "Reports a stream as complete in a forked child." =>
        |h| h.backend.query_stream(|reference, stream| {
            forgiven(ErrorKind::Forked, reference.query_stream(stream), Completion::Complete)
        });
    "child-copies-nothing": "Lets a forked child copy 0 bytes." => |h| h.backend.copy(|reference, copy, stream| {
        let copied = reference.copy(copy, stream);
        if copy.bytes == 0 { forgiven(ErrorKind::Forked, copied, ()) } else { copied }
    });
    "child-has-modes": "Lets a forked child set the mode of a handle." =>
        |h| h.handle.set_math_mode(|handle, mode| forgiven(ErrorKind::Forked, handle.set_math_mode(mode), ()));
    "child-captures" needs [has::capture]: "Lets a forked child begin a capture." =>
        |h| h.backend.begin_capture(|reference, stream, mode| {
            forgiven(ErrorKind::Forked, reference.begin_capture(stream, mode), ())
        });
    "child-closes" needs [has::shareable_memory]: "Lets a forked child close memory." =>
        |h| h.sharing.close_memory(|sharing, device, ptr| forgiven(ErrorKind::Forked, sharing.close_memory(device, ptr), ()));
    "child-waits": "Makes a forked child wait for a while before it is refused." =>
        |h| h.backend.synchronize_event(|reference, event| {
            let waited = reference.synchronize_event(event);
            if is(&waited, ErrorKind::Forked) {
                std::thread::sleep(std::time::Duration::from_secs(6));
            }
            waited
        });
}
