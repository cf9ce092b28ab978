//! Calls of several threads that disturb each other.

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use highwater_hal::{Completion, Error, ErrorKind, FillPattern, GraphId, StreamId};

use super::super::reference::{forgiven, wrong};
use super::super::state::Shared;
use super::foreign_streams;

mutants! {
    in "backend.concurrent":
    "patterns-in-one-place": "Keeps the pattern of a fill in one place for all threads." => |h| {
        let place = Shared::new(FillPattern::U8(0));
        h.backend.fill(move |reference, fill, stream| {
            let mut fill = *fill;
            place.set(fill.pattern);
            std::thread::sleep(std::time::Duration::from_micros(50));
            let kept = place.get();
            if kept.bytes() == fill.pattern.bytes() {
                fill.pattern = kept;
            }
            reference.fill(&fill, stream)
        });
    };
    "device-in-one-place" needs [TWO_DEVICES]: "Keeps the device of an allocation in one place for all threads." => |h| {
        let place = Shared::new(0);
        h.backend.allocate(move |reference, device, options| {
            // The call itself refuses a bad argument.
            if device >= reference.device_count() {
                return reference.allocate(device, options);
            }
            place.set(device);
            std::thread::sleep(std::time::Duration::from_micros(20));
            reference.allocate(place.get(), options)
        });
    };
    "errors-of-other-threads": "Gives the error of one thread to the next call of another." => |h| {
        let last = Shared::<Option<(ThreadId, Error)>>::default();
        let kept = last.clone();
        h.backend.query_stream(move |reference, stream| {
            reference.query_stream(stream).inspect_err(|error| {
                kept.with(|kept| *kept = Some((std::thread::current().id(), error.clone())));
            })
        });
        h.backend.fill(move |reference, fill, stream| {
            let here = std::thread::current().id();
            let foreign = last.with(|last| last.take_if(|(thread, _)| *thread != here));
            foreign.map_or_else(|| reference.fill(fill, stream), |(_, error)| Err(error))
        });
    };
    "streams-of-one-thread": "Accepts copies only from the thread that created the stream." => |h| {
        let owners = Shared::<HashMap<StreamId, ThreadId>>::default();
        let made = owners.clone();
        h.backend.create_stream(move |reference, device, options| {
            let stream = reference.create_stream(device, options)?;
            made.with(|made| made.insert(stream, std::thread::current().id()));
            Ok(stream)
        });
        h.backend.copy(move |reference, copy, stream| {
            let owner = owners.with(|owners| owners.get(&stream).copied());
            match owner.is_some_and(|owner| owner != std::thread::current().id()) {
                true => Err(wrong(ErrorKind::InvalidState, "copy")),
                false => reference.copy(copy, stream),
            }
        });
    };
    "one-capture-at-a-time" needs [has::capture]: "Refuses a capture while another thread has one open." => |h| {
        let open = Shared::<HashSet<StreamId>>::default();
        let ended = open.clone();
        h.backend.begin_capture(move |reference, stream, mode| {
            if open.with(|open| open.iter().any(|other| *other != stream)) {
                return Err(wrong(ErrorKind::Capture, "begin_capture"));
            }
            reference.begin_capture(stream, mode)?;
            open.with(|open| open.insert(stream));
            // Long enough for another thread to come.
            std::thread::sleep(std::time::Duration::from_millis(1));
            Ok(())
        });
        h.backend.end_capture(move |reference, stream| {
            ended.with(|ended| ended.remove(&stream));
            reference.end_capture(stream)
        });
    };
    "one-call-at-a-time-on-the-host": "Refuses page-locked memory while another thread is being given some." => |h| {
        let busy = Shared::new(false);
        h.host.allocate(move |host, bytes, options| {
            if busy.with(|busy| std::mem::replace(busy, true)) {
                return Err(wrong(ErrorKind::InvalidState, "allocate"));
            }
            std::thread::sleep(std::time::Duration::from_micros(100));
            let allocated = host.allocate(bytes, options);
            busy.set(false);
            allocated
        });
    };

    in "backend.destroy-concurrent":
    "streams-waited-for-by-id": "Asks again and again for the id of a stream that it waits for." =>
        |h| h.backend.synchronize_stream(|reference, stream| {
            while reference.query_stream(stream)? == Completion::Pending {
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            reference.synchronize_stream(stream)
        });
    "foreign-streams-waited-for-by-id" needs [has::foreign_objects]: "Asks again and again for the id of a foreign stream that it waits for." => |h| {
        let foreign = foreign_streams(h);
        h.backend.synchronize_stream(move |reference, stream| {
            let is_foreign = foreign.with(|foreign| foreign.contains(&stream));
            while is_foreign && reference.query_stream(stream)? == Completion::Pending {
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            reference.synchronize_stream(stream)
        });
    };
    "events-waited-for-by-id": "Asks again and again for the id of an event that it waits for." =>
        |h| h.backend.synchronize_event(|reference, event| {
            while reference.query_event(event)? == Completion::Pending {
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            reference.synchronize_event(event)
        });
    "waits-end-with-their-event": "Ends a wait for an event when the event is destroyed." => |h| {
        h.settles = true;
        h.backend.synchronize_event(|reference, event| {
            reference.query_event(event)?;
            while reference.query_event(event).is_ok_and(|completion| completion == Completion::Pending) {
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            forgiven(ErrorKind::InvalidHandle, reference.synchronize_event(event), ())
        });
    };
    "fills-lost-with-their-stream": "Loses a fill whose stream is destroyed during the call, and accepts it." =>
        |h| h.backend.fill(|reference, fill, stream| {
            let was_alive = reference.is_recording(stream) || reference.query_stream(stream).is_ok();
            std::thread::sleep(std::time::Duration::from_micros(200));
            let filled = reference.fill(fill, stream);
            if was_alive { forgiven(ErrorKind::InvalidHandle, filled, ()) } else { filled }
        });
    "graphs-lost-while-used" needs [has::capture]: "Fails to make a graph executable if the graph is destroyed during the call." => |h| {
        let gone = Shared::<HashSet<GraphId>>::default();
        let ends = gone.clone();
        h.backend.destroy_graph(move |reference, graph| {
            reference.destroy_graph(graph)?;
            ends.with(|ends| ends.insert(graph));
            Ok(())
        });
        h.backend.instantiate_graph(move |reference, graph| {
            let executable = reference.instantiate_graph(graph)?;
            std::thread::sleep(std::time::Duration::from_millis(1));
            if gone.with(|gone| gone.contains(&graph)) {
                reference.destroy_graph_exec(executable)?;
                return Err(wrong(ErrorKind::InvalidState, "instantiate_graph"));
            }
            Ok(executable)
        });
    };
}
