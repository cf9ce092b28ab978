//! Graphs: what a launch executes, in which order, and with which values.

use std::collections::{HashMap, HashSet};

use highwater_hal::{BlasKind, FillPattern, Gemm, GraphExecId, GraphId, MemoryFill, StreamId};

use super::super::Saboteur;
use super::super::note::{Held, Note};

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new(
        "launched-once",
        "capture.replay",
        "Executes the first launch of an executable graph and no other.",
        |h| {
            let launched = Note::<HashSet<GraphExecId>>::default();
            h.backend.launch_graph(move |honest, graph, stream| {
                match launched.with(|launched| launched.insert(graph)) {
                    true => honest.launch_graph(graph, stream),
                    false => Ok(()),
                }
            });
        },
    ),
    Saboteur::new("launched-twice", "capture.replay", "Executes each launch twice.", |h| {
        h.backend.launch_graph(|honest, graph, stream| {
            honest.launch_graph(graph, stream)?;
            honest.launch_graph(graph, stream)
        });
    }),
    Saboteur::new(
        "launches-overtake",
        "capture.replay",
        "Executes a graph before what the stream has to do already.",
        |h| {
            h.backend.launch_graph(|honest, graph, stream| match honest.is_busy(stream) {
                true => honest.aside(stream.device(), |aside| honest.launch_graph(graph, aside)),
                false => honest.launch_graph(graph, stream),
            });
        },
    ),
    Saboteur::new(
        "joined-work-left-out",
        "capture.replay",
        "Records no copies of streams that joined a capture.",
        |h| {
            let began = Note::<HashSet<StreamId>>::default();
            let first = began.clone();
            h.backend.begin_capture(move |honest, stream, mode| {
                honest.begin_capture(stream, mode)?;
                first.with(|first| first.insert(stream));
                Ok(())
            });
            h.backend.copy(move |honest, copy, stream| {
                let joined = honest.records(stream) && !began.with(|began| began.contains(&stream));
                if joined { Ok(()) } else { honest.copy(copy, stream) }
            });
        },
    ),
    Saboteur::new(
        "launches-dropped-with-their-graph",
        "capture.replay",
        "Destroys pending launches with their graph.",
        |h| {
            let held = Held::default();
            let by_graph = Note::<HashMap<GraphExecId, StreamId>>::default();
            let (launched, pending, gone) = (held.clone(), by_graph.clone(), held.clone());
            h.backend.launch_graph(move |honest, graph, stream| {
                if !honest.is_busy(stream) {
                    return honest.launch_graph(graph, stream);
                }
                pending.with(|pending| pending.insert(graph, stream));
                launched.hold(stream, move |honest| honest.launch_graph(graph, stream));
                Ok(())
            });
            h.backend.destroy_graph_exec(move |honest, graph| {
                if let Some(stream) = by_graph.with(|by_graph| by_graph.remove(&graph)) {
                    gone.forget(stream);
                }
                honest.destroy_graph_exec(graph)
            });
            h.before(move |honest, method, stream| match (method, stream) {
                ("launch_graph", _) | (_, None) => Ok(()),
                ("query_stream", Some(stream)) if honest.is_busy(stream) => Ok(()),
                (_, stream) => held.let_go(honest, stream),
            });
        },
    ),
    Saboteur::new(
        "executables-die-with-their-graph",
        "capture.replay",
        "Destroys executable graphs with the graph they were made of.",
        |h| {
            let made = Note::<HashMap<GraphId, Vec<GraphExecId>>>::default();
            let noted = made.clone();
            h.backend.instantiate_graph(move |honest, graph| {
                let executable = honest.instantiate_graph(graph)?;
                noted.with(|noted| noted.entry(graph).or_default().push(executable));
                Ok(executable)
            });
            h.backend.destroy_graph(move |honest, graph| {
                for executable in made.with(|made| made.remove(&graph)).unwrap_or_default() {
                    // Perhaps it was destroyed before.
                    let _ = honest.destroy_graph_exec(executable);
                }
                honest.destroy_graph(graph)
            });
        },
    ),
    Saboteur::new(
        "one-executable-for-all",
        "capture.replay",
        "Makes a graph executable once, and gives that one again.",
        |h| {
            let made = Note::<HashMap<GraphId, GraphExecId>>::default();
            h.backend.instantiate_graph(move |honest, graph| {
                if let Some(executable) = made.with(|made| made.get(&graph).copied()) {
                    return Ok(executable);
                }
                let executable = honest.instantiate_graph(graph)?;
                made.with(|made| made.insert(graph, executable));
                Ok(executable)
            });
        },
    ),
    Saboteur::new(
        "launched-where-recorded",
        "capture.replay",
        "Launches a graph on the stream that recorded it.",
        |h| {
            let (graphs, executables) =
                (Note::<HashMap<GraphId, StreamId>>::default(), Note::<HashMap<GraphExecId, StreamId>>::default());
            let (ended, made) = (graphs.clone(), executables.clone());
            h.backend.end_capture(move |honest, stream| {
                let graph = honest.end_capture(stream)?;
                ended.with(|ended| ended.insert(graph, stream));
                Ok(graph)
            });
            h.backend.instantiate_graph(move |honest, graph| {
                let executable = honest.instantiate_graph(graph)?;
                if let Some(stream) = graphs.with(|graphs| graphs.get(&graph).copied()) {
                    made.with(|made| made.insert(executable, stream));
                }
                Ok(executable)
            });
            h.backend.launch_graph(move |honest, graph, stream| {
                let recorded = executables.with(|executables| executables.get(&graph).copied());
                honest.launch_graph(graph, recorded.unwrap_or(stream))
            });
        },
    ),
    Saboteur::new("recorded-halves-as-bytes", "capture.replay", "Records fills of 2 bytes with the lower one.", |h| {
        h.backend.fill(|honest, fill, stream| {
            let mut fill = *fill;
            if let FillPattern::U16(value) = fill.pattern
                && honest.records(stream)
            {
                fill.pattern = FillPattern::U16((value & 0xff) * 0x0101);
            }
            honest.fill(&fill, stream)
        });
    }),
    Saboteur::new(
        "scalars-by-reference",
        "capture.by-value",
        "Multiplies in a launch with the factors of the latest product.",
        |h| {
            let recorded = Note::<Option<Gemm>>::default();
            let latest = Note::<Option<(f64, f64)>>::default();
            let (noted, newest) = (recorded.clone(), latest.clone());
            h.handle.gemm(move |handle, gemm| {
                handle.gemm(gemm)?;
                if handle.stream.is_some_and(|stream| handle.backend.records(stream)) {
                    noted.set(Some(*gemm));
                }
                newest.set(Some((gemm.alpha, gemm.beta)));
                Ok(())
            });
            h.backend.launch_graph(move |honest, graph, stream| {
                honest.launch_graph(graph, stream)?;
                let (Some(gemm), Some((alpha, beta))) = (recorded.get(), latest.get()) else { return Ok(()) };
                if (gemm.alpha, gemm.beta) == (alpha, beta) {
                    return Ok(());
                }
                // Destroyed when its product is done.
                let mut handle = honest.handle(BlasKind::Blas, stream)?;
                handle.gemm(&gemm.with_scale(alpha, beta))?;
                honest.wait_for(stream)
            });
        },
    ),
    Saboteur::new(
        "patterns-by-reference",
        "capture.by-value",
        "Fills in a launch with the pattern of the latest fill.",
        |h| {
            let recorded = Note::<Option<MemoryFill>>::default();
            let latest = Note::<Option<FillPattern>>::default();
            let (noted, newest) = (recorded.clone(), latest.clone());
            h.backend.fill(move |honest, fill, stream| {
                honest.fill(fill, stream)?;
                if honest.records(stream) {
                    noted.set(Some(*fill));
                }
                newest.set(Some(fill.pattern));
                Ok(())
            });
            h.backend.launch_graph(move |honest, graph, stream| {
                honest.launch_graph(graph, stream)?;
                let (Some(mut fill), Some(pattern)) = (recorded.get(), latest.get()) else { return Ok(()) };
                if fill.pattern == pattern || fill.pattern.bytes() != pattern.bytes() {
                    return Ok(());
                }
                fill.pattern = pattern;
                // The memory may be gone, with the graph that recorded it.
                let _ = honest.fill(&fill, stream);
                Ok(())
            });
        },
    ),
];
