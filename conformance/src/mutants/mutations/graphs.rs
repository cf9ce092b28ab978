//! Graphs: what a launch executes, in which order, and with which values.

use std::collections::{HashMap, HashSet};

use highwater_hal::{BlasKind, FillPattern, Gemm, GraphExecId, GraphId, MemoryFill, StreamId};

use super::super::state::{Deferred, Shared};

mutants! {
    in "capture.replay":
    "launched-once": "Executes the first launch of an executable graph and no other." => |h| {
        let launched = Shared::<HashSet<GraphExecId>>::default();
        h.backend.launch_graph(move |reference, graph, stream| {
            match launched.with(|launched| launched.insert(graph)) {
                true => reference.launch_graph(graph, stream),
                false => Ok(()),
            }
        });
    };
    "launched-twice": "Executes each launch twice." => |h| h.backend.launch_graph(|reference, graph, stream| {
        reference.launch_graph(graph, stream)?;
        reference.launch_graph(graph, stream)
    });
    "launches-overtake": "Executes a graph ahead of the stream's earlier work." =>
        |h| h.backend.launch_graph(|reference, graph, stream| match reference.is_pending(stream) {
            true => reference.on_own_stream(stream.device(), |own| reference.launch_graph(graph, own)),
            false => reference.launch_graph(graph, stream),
        });
    "joined-work-left-out": "Records no copies of streams that joined a capture." => |h| {
        let began = Shared::<HashSet<StreamId>>::default();
        let first = began.clone();
        h.backend.begin_capture(move |reference, stream, mode| {
            reference.begin_capture(stream, mode)?;
            first.with(|first| first.insert(stream));
            Ok(())
        });
        h.backend.copy(move |reference, copy, stream| {
            let joined = reference.is_recording(stream) && !began.with(|began| began.contains(&stream));
            if joined { Ok(()) } else { reference.copy(copy, stream) }
        });
    };
    "one-executable-for-all": "Makes a graph executable once, and gives that one again." => |h| {
        let made = Shared::<HashMap<GraphId, GraphExecId>>::default();
        h.backend.instantiate_graph(move |reference, graph| {
            if let Some(executable) = made.with(|made| made.get(&graph).copied()) {
                return Ok(executable);
            }
            let executable = reference.instantiate_graph(graph)?;
            made.with(|made| made.insert(graph, executable));
            Ok(executable)
        });
    };
    "launched-where-recorded": "Launches a graph on its recording stream." => |h| {
        let (graphs, executables) =
            (Shared::<HashMap<GraphId, StreamId>>::default(), Shared::<HashMap<GraphExecId, StreamId>>::default());
        let (ended, made) = (graphs.clone(), executables.clone());
        h.backend.end_capture(move |reference, stream| {
            let graph = reference.end_capture(stream)?;
            ended.with(|ended| ended.insert(graph, stream));
            Ok(graph)
        });
        h.backend.instantiate_graph(move |reference, graph| {
            let executable = reference.instantiate_graph(graph)?;
            if let Some(stream) = graphs.with(|graphs| graphs.get(&graph).copied()) {
                made.with(|made| made.insert(executable, stream));
            }
            Ok(executable)
        });
        h.backend.launch_graph(move |reference, graph, stream| {
            let recorded = executables.with(|executables| executables.get(&graph).copied());
            reference.launch_graph(graph, recorded.unwrap_or(stream))
        });
    };
    "recorded-halves-as-bytes": "Records fills of 2 bytes with the lower one." =>
        |h| h.backend.fill(|reference, fill, stream| {
            let mut fill = *fill;
            if let FillPattern::U16(value) = fill.pattern
                && reference.is_recording(stream)
            {
                fill.pattern = FillPattern::U16((value & 0xff) * 0x0101);
            }
            reference.fill(&fill, stream)
        });

    in "capture.destroy-graph":
    "executables-die-with-their-graph": "Destroys executable graphs with the graph they were made of." => |h| {
        let made = Shared::<HashMap<GraphId, Vec<GraphExecId>>>::default();
        let noted = made.clone();
        h.backend.instantiate_graph(move |reference, graph| {
            let executable = reference.instantiate_graph(graph)?;
            noted.with(|noted| noted.entry(graph).or_default().push(executable));
            Ok(executable)
        });
        h.backend.destroy_graph(move |reference, graph| {
            for executable in made.with(|made| made.remove(&graph)).unwrap_or_default() {
                // Perhaps it was destroyed before.
                let _ = reference.destroy_graph_exec(executable);
            }
            reference.destroy_graph(graph)
        });
    };

    in "capture.destroy-executable":
    "launches-dropped-with-their-graph": "Destroys pending launches with their graph." => |h| {
        let held = Deferred::default();
        let by_graph = Shared::<HashMap<GraphExecId, StreamId>>::default();
        let (launched, pending, gone) = (held.clone(), by_graph.clone(), held.clone());
        h.backend.launch_graph(move |reference, graph, stream| {
            if !reference.is_pending(stream) {
                return reference.launch_graph(graph, stream);
            }
            pending.with(|pending| pending.insert(graph, stream));
            launched.defer(stream, move |reference| reference.launch_graph(graph, stream));
            Ok(())
        });
        h.backend.destroy_graph_exec(move |reference, graph| {
            if let Some(stream) = by_graph.with(|by_graph| by_graph.remove(&graph)) {
                gone.forget(stream);
            }
            reference.destroy_graph_exec(graph)
        });
        h.before(move |reference, method, stream| match (method, stream) {
            ("launch_graph", _) | (_, None) => Ok(()),
            ("query_stream", Some(stream)) if reference.is_pending(stream) => Ok(()),
            (_, stream) => held.release(reference, stream),
        });
    };

    in "capture.by-value":
    "scalars-by-reference": "Multiplies in a launch with the factors of the latest product." => |h| {
        let recorded = Shared::<Option<Gemm>>::default();
        let latest = Shared::<Option<(f64, f64)>>::default();
        let (noted, newest) = (recorded.clone(), latest.clone());
        h.handle.gemm(move |handle, gemm| {
            handle.gemm(gemm)?;
            if handle.stream.is_some_and(|stream| handle.backend.is_recording(stream)) {
                noted.set(Some(*gemm));
            }
            newest.set(Some((gemm.alpha, gemm.beta)));
            Ok(())
        });
        h.backend.launch_graph(move |reference, graph, stream| {
            reference.launch_graph(graph, stream)?;
            let (Some(gemm), Some((alpha, beta))) = (recorded.get(), latest.get()) else { return Ok(()) };
            if (gemm.alpha, gemm.beta) == (alpha, beta) {
                return Ok(());
            }
            // Destroyed when its product is done.
            let mut handle = reference.handle(BlasKind::Blas, stream)?;
            handle.gemm(&gemm.with_scale(alpha, beta))?;
            reference.wait_for(stream)
        });
    };
    "patterns-by-reference": "Fills in a launch with the pattern of the latest fill." => |h| {
        let recorded = Shared::<Option<MemoryFill>>::default();
        let latest = Shared::<Option<FillPattern>>::default();
        let (noted, newest) = (recorded.clone(), latest.clone());
        h.backend.fill(move |reference, fill, stream| {
            reference.fill(fill, stream)?;
            if reference.is_recording(stream) {
                noted.set(Some(*fill));
            }
            newest.set(Some(fill.pattern));
            Ok(())
        });
        h.backend.launch_graph(move |reference, graph, stream| {
            reference.launch_graph(graph, stream)?;
            let (Some(mut fill), Some(pattern)) = (recorded.get(), latest.get()) else { return Ok(()) };
            if fill.pattern == pattern || fill.pattern.bytes() != pattern.bytes() {
                return Ok(());
            }
            fill.pattern = pattern;
            // The memory may be gone, with the graph that recorded it.
            let _ = reference.fill(&fill, stream);
            Ok(())
        });
    };
}
