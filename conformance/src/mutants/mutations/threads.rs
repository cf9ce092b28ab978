//! Calls of several threads that disturb each other.

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use highwater_hal::{Error, ErrorKind, FillPattern, StreamId};

use super::super::reference::wrong;
use super::super::state::Shared;

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
    "one-capture-at-a-time": "Refuses a capture while another thread has one open." => |h| {
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
}
