//! Mistakes of layers over a vendor: caches that other work should clear, and state that is kept for the wrong object or thread.

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use highwater_hal::{
    AtomicsMode, BlasKind, ErrorKind, EventId, GraphExecId, GraphId, MemoryCopy, MemoryFill, StreamId,
};

use super::super::reference::{Way, wrong};
use super::super::state::Shared;

mutants! {
    in "event.query":
    "events-past-600-share": "Records the 601st living event, and each later one, as the first." => |h| {
        let living = Shared::<Vec<EventId>>::default();
        let (made, gone) = (living.clone(), living.clone());
        h.backend.create_event(move |reference, device, options| {
            let event = reference.create_event(device, options)?;
            made.with(|made| made.push(event));
            Ok(event)
        });
        h.backend.destroy_event(move |reference, event| {
            reference.destroy_event(event)?;
            gone.with(|gone| gone.retain(|other| *other != event));
            Ok(())
        });
        h.backend.record_event(move |reference, event, stream| {
            let place = living.with(|living| living.iter().position(|other| *other == event));
            let first = living.with(|living| living.first().copied());
            match (place, first) {
                (Some(600..), Some(first)) if first.device() == stream.device() => reference.record_event(first, stream),
                _ => reference.record_event(event, stream),
            }
        });
    };

    in "backend.ids-checked":
    "fills-lost-after-refused-launches": "Drops the fill that follows a refused launch on its stream." => |h| {
        let refused = Shared::<HashSet<StreamId>>::default();
        let spoiled = refused.clone();
        h.backend.launch_graph(move |reference, graph, stream| {
            let answer = reference.launch_graph(graph, stream);
            if answer.is_err() {
                refused.with(|refused| refused.insert(stream));
            }
            answer
        });
        h.backend.fill(move |reference, fill, stream| match spoiled.with(|spoiled| spoiled.remove(&stream)) {
            true => reference.query_stream(stream).map(drop),
            false => reference.fill(fill, stream),
        });
    };

    in "backend.live-objects":
    "events-of-the-calling-thread-counted": "Counts the events that the calling thread created." => |h| {
        let makers = Shared::<HashMap<EventId, ThreadId>>::default();
        let (made, gone) = (makers.clone(), makers.clone());
        h.backend.create_event(move |reference, device, options| {
            let event = reference.create_event(device, options)?;
            made.with(|made| made.insert(event, std::thread::current().id()));
            Ok(event)
        });
        h.backend.destroy_event(move |reference, event| {
            reference.destroy_event(event)?;
            gone.with(|gone| gone.remove(&event));
            Ok(())
        });
        h.count(move |live| {
            let own = std::thread::current().id();
            live.events -= makers.with(|makers| makers.values().filter(|maker| **maker != own).count() as u64);
        });
    };

    in "copy.exact":
    "equal-copies-skipped": "Skips a copy on a device that equals the last one of its stream, unless a fill or another copy came since." =>
    |h| {
        let last = Shared::<HashMap<StreamId, MemoryCopy>>::default();
        let cleared = last.clone();
        h.backend.fill(move |reference, fill, stream| {
            cleared.with(|cleared| cleared.clear());
            reference.fill(fill, stream)
        });
        h.backend.copy(move |reference, copy, stream| {
            if Way::of(copy) != Way::OnDevice {
                last.with(|last| last.clear());
            } else if !reference.is_recording(stream)
                && reference.query_stream(stream).is_ok()
                && last.with(|last| last.insert(stream, *copy)) == Some(*copy)
            {
                return Ok(());
            }
            reference.copy(copy, stream)
        });
    };

    in "fill.exact":
    "equal-fills-skipped": "Skips a fill that equals the last one of its stream, unless a copy came since." => |h| {
        let last = Shared::<HashMap<StreamId, MemoryFill>>::default();
        let cleared = last.clone();
        h.backend.copy(move |reference, copy, stream| {
            cleared.with(|cleared| cleared.clear());
            reference.copy(copy, stream)
        });
        h.backend.fill(move |reference, fill, stream| {
            let is_cached = !reference.is_recording(stream) && reference.query_stream(stream).is_ok();
            match is_cached && last.with(|last| last.insert(stream, *fill)) == Some(*fill) {
                true => Ok(()),
                false => reference.fill(fill, stream),
            }
        });
    };

    in "copy.zero":
    "copies-of-nothing-refused-in-captures" needs [has::capture]: "Refuses to copy 0 bytes in a capture." =>
        |h| h.backend.copy(|reference, copy, stream| match copy.bytes {
            0 if reference.is_recording(stream) => Err(wrong(ErrorKind::Capture, "copy")),
            _ => reference.copy(copy, stream),
        });

    in "fill.zero":
    "fills-of-nothing-refused-in-captures" needs [has::capture]: "Refuses to fill 0 elements in a capture." =>
        |h| h.backend.fill(|reference, fill, stream| match fill.count {
            0 if reference.is_recording(stream) => Err(wrong(ErrorKind::Capture, "fill")),
            _ => reference.fill(fill, stream),
        });

    in "gemm.empty":
    "empty-products-refused-in-captures" needs [has::capture]: "Refuses an empty product in a capture." =>
        |h| h.handle.gemm(|handle, gemm| {
            let is_recording = handle.stream.is_some_and(|stream| handle.backend.is_recording(stream));
            match gemm.shape.is_empty() && is_recording {
                true => Err(wrong(ErrorKind::Capture, "gemm")),
                false => handle.gemm(gemm),
            }
        });

    in "blas.unbound":
    "fresh-handles-inherit-a-stream": "Binds a fresh handle to the stream of the last handle of its kind that was destroyed." => |h| {
        let last = Shared::<HashMap<(u32, BlasKind), StreamId>>::default();
        let kept = last.clone();
        h.handle.destroy(move |handle| {
            if let Some(stream) = handle.stream {
                let kind = (handle.device(), handle.kind());
                kept.with(|kept| kept.insert(kind, stream));
            }
            handle.destroy()
        });
        h.backend.create_blas_handle(move |reference, device, options| {
            let mut handle = reference.create_blas_handle(device, options)?;
            if let Some(stream) = last.with(|last| last.get(&(device, options.kind)).copied()) {
                // The stream may be destroyed.
                let _ = handle.set_stream(stream);
            }
            Ok(handle)
        });
    };

    in "blas.deterministic":
    "atomics-of-another-handle" needs [has::atomics_mode]: "Multiplies with the mode that any handle was given last." => |h| {
        let last = Shared::<Option<AtomicsMode>>::default();
        let given = last.clone();
        h.handle.set_atomics_mode(move |handle, mode| {
            handle.set_atomics_mode(mode)?;
            given.set(Some(mode));
            Ok(())
        });
        h.handle.gemm(move |handle, gemm| {
            last.get().map_or(Ok(()), |mode| handle.set_atomics_mode(mode))?;
            handle.gemm(gemm)
        });
    };

    in "capture.replay":
    "newest-graph-instantiated" needs [has::capture]: "Makes the newest graph executable instead of the named one." => |h| {
        let living = Shared::<Vec<GraphId>>::default();
        let (made, gone) = (living.clone(), living.clone());
        h.backend.end_capture(move |reference, stream| {
            let graph = reference.end_capture(stream)?;
            made.with(|made| made.push(graph));
            Ok(graph)
        });
        h.backend.destroy_graph(move |reference, graph| {
            reference.destroy_graph(graph)?;
            gone.with(|gone| gone.retain(|other| *other != graph));
            Ok(())
        });
        h.backend.instantiate_graph(move |reference, graph| {
            let newest = living.with(|living| if living.contains(&graph) { living.last().copied() } else { None });
            reference.instantiate_graph(newest.unwrap_or(graph))
        });
    };

    in "backend.concurrent":
    "launched-by-one-thread" needs [has::capture]: "Launches a graph only in the thread that made it executable." => |h| {
        let makers = Shared::<HashMap<GraphExecId, ThreadId>>::default();
        let made = makers.clone();
        h.backend.instantiate_graph(move |reference, graph| {
            let executable = reference.instantiate_graph(graph)?;
            made.with(|made| made.insert(executable, std::thread::current().id()));
            Ok(executable)
        });
        h.backend.launch_graph(move |reference, executable, stream| {
            let maker = makers.with(|makers| makers.get(&executable).copied());
            match maker.is_none_or(|maker| maker == std::thread::current().id()) {
                true => reference.launch_graph(executable, stream),
                false => Err(wrong(ErrorKind::InvalidState, "launch_graph")),
            }
        });
    };
}
