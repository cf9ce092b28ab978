//! Captures: what is recorded, what takes part, and what must not disturb.

use std::collections::HashSet;

use highwater_hal::{BlasKind, Completion, ErrorKind, EventId, Result, StreamId};

use super::super::Saboteur;
use super::super::honest::{Honest, is, wrong};
use super::super::hooks::Hooks;
use super::super::note::Note;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new(
        "recorded-fills-executed",
        "capture.not-executed",
        "Records fills, and executes them as well.",
        |h| {
            h.backend.fill(|honest, fill, stream| {
                honest.fill(fill, stream)?;
                if honest.records(stream) {
                    honest.aside(fill.device, |aside| honest.fill(fill, aside))
                } else {
                    Ok(())
                }
            });
        },
    ),
    Saboteur::new(
        "recorded-copies-executed",
        "capture.not-executed",
        "Executes copies during a capture, and records them as well.",
        |h| {
            h.backend.copy(|honest, copy, stream| {
                honest.copy(copy, stream)?;
                if honest.records(stream) {
                    honest.aside(stream.device(), |aside| honest.copy(copy, aside))
                } else {
                    Ok(())
                }
            });
        },
    ),
    Saboteur::new(
        "recorded-products-executed",
        "capture.not-executed",
        "Records products, and executes them as well.",
        |h| {
            h.handle.gemm(|handle, gemm| {
                handle.gemm(gemm)?;
                let records = handle.stream.is_some_and(|stream| handle.backend.records(stream));
                if records && handle.kind() == BlasKind::Blas { handle.gemm_aside(gemm) } else { Ok(()) }
            });
        },
    ),
    Saboteur::new(
        "executed-when-instantiated",
        "capture.not-executed",
        "Executes a graph when it is made executable.",
        |h| {
            h.backend.instantiate_graph(|honest, graph| {
                let executable = honest.instantiate_graph(graph)?;
                honest.aside(graph.device(), |aside| honest.launch_graph(executable, aside))?;
                Ok(executable)
            });
        },
    ),
    Saboteur::new(
        "every-stream-captures",
        "capture.not-executed",
        "Says of every stream that it takes part while a capture is open.",
        |h| {
            let open = captures(h);
            h.backend.is_capturing(move |honest, stream| {
                Ok(honest.is_capturing(stream)? || open.with(|open| !open.is_empty()))
            });
        },
    ),
    Saboteur::new("begun-twice", "capture.begin-again", "Lets a capture begin again, and goes on with it.", |h| {
        let open = captures(h);
        let begun = open.clone();
        h.backend.begin_capture(move |honest, stream, mode| {
            let again = begun.with(|begun| begun.contains(&stream));
            let result = honest.begin_capture(stream, mode);
            if result.is_ok() {
                begun.with(|begun| begun.insert(stream));
            }
            if again && is(&result, ErrorKind::Capture) { Ok(()) } else { result }
        });
    }),
    Saboteur::new(
        "begun-on-a-joined-stream",
        "capture.begin-again",
        "Lets a capture begin on a stream that has joined one.",
        |h| {
            let open = captures(h);
            let begun = open.clone();
            h.backend.begin_capture(move |honest, stream, mode| {
                let first = begun.with(|begun| begun.contains(&stream));
                let result = honest.begin_capture(stream, mode);
                if result.is_ok() {
                    begun.with(|begun| begun.insert(stream));
                }
                if !first && is(&result, ErrorKind::Capture) { Ok(()) } else { result }
            });
        },
    ),
    Saboteur::new("begun-again-as-state", "capture.begin-again", "Calls a second beginning an invalid state.", |h| {
        h.backend.begin_capture(|honest, stream, mode| renamed(honest.begin_capture(stream, mode), "begin_capture"));
    }),
    Saboteur::new(
        "nobody-joins",
        "capture.joins",
        "Lets a stream that waits for an event of a capture go on outside.",
        |h| {
            let recorded = marks(h);
            h.backend.stream_wait_event(move |honest, stream, event| {
                let mark = recorded.with(|recorded| recorded.contains(&event));
                if mark && !honest.records(stream) { Ok(()) } else { honest.stream_wait_event(stream, event) }
            });
        },
    ),
    Saboteur::new(
        "joined-in-secret",
        "capture.joins",
        "Says of a stream that joined a capture that it takes part in none.",
        |h| {
            let open = captures(h);
            h.backend.is_capturing(move |honest, stream| {
                Ok(honest.is_capturing(stream)? && open.with(|open| open.contains(&stream)))
            });
        },
    ),
    Saboteur::new(
        "all-join",
        "capture.joins",
        "Lets every stream join that waits for anything during a capture.",
        |h| {
            let open = captures(h);
            h.backend.record_event(move |honest, event, stream| {
                honest.record_event(event, stream)?;
                // Who waits for this event later is told of the capture too.
                let first = open.with(|open| open.iter().copied().next());
                match first {
                    Some(first) if first.device() == stream.device() && !honest.records(stream) => {
                        honest.record_event(event, first)
                    }
                    _ => Ok(()),
                }
            });
        },
    ),
    Saboteur::new(
        "disturbed-by-allocation",
        "capture.undisturbed",
        "Loses captures when device memory is allocated.",
        |h| {
            let open = captures(h);
            h.backend.allocate(move |honest, device, options| {
                let allocated = honest.allocate(device, options);
                lose(honest, &open);
                allocated
            });
        },
    ),
    Saboteur::new("disturbed-by-frees", "capture.undisturbed", "Loses captures when device memory is freed.", |h| {
        let open = captures(h);
        h.backend.free(move |honest, device, ptr, stream| {
            lose(honest, &open);
            honest.free(device, ptr, stream)
        });
    }),
    Saboteur::new(
        "disturbed-by-host-memory",
        "capture.undisturbed",
        "Refuses page-locked memory while a capture is open.",
        |h| {
            let open = captures(h);
            h.host.allocate(move |host, bytes, options| match open.with(|open| open.is_empty()) {
                true => host.allocate(bytes, options),
                false => Err(wrong(ErrorKind::Capture, "allocate")),
            });
        },
    ),
    Saboteur::new(
        "disturbed-by-registration",
        "capture.undisturbed",
        "Loses captures when memory is registered.",
        |h| {
            let open = captures(h);
            h.host.register(move |host, ptr, bytes, options| {
                lose(&host.backend, &open);
                host.register(ptr, bytes, options)
            });
        },
    ),
    Saboteur::new(
        "disturbed-by-new-events",
        "capture.undisturbed",
        "Loses captures of other threads when an event is made.",
        |h| {
            let open = captures(h);
            let threads = Note::<HashSet<std::thread::ThreadId>>::default();
            let capturing = threads.clone();
            h.backend.is_capturing(move |honest, stream| {
                capturing.with(|threads| threads.insert(std::thread::current().id()));
                honest.is_capturing(stream)
            });
            h.backend.create_event(move |honest, device, options| {
                // A thread that has asked for a stream is the one that captures.
                if !threads.with(|threads| threads.contains(&std::thread::current().id())) {
                    lose(honest, &open);
                }
                honest.create_event(device, options)
            });
        },
    ),
    Saboteur::new(
        "disturbed-by-questions",
        "capture.undisturbed",
        "Loses captures when an event is asked for that was recorded outside.",
        |h| {
            let open = captures(h);
            h.backend.query_event(move |honest, event| {
                lose(honest, &open);
                honest.query_event(event)
            });
        },
    ),
    Saboteur::new(
        "disturbed-by-waits",
        "capture.undisturbed",
        "Loses captures when an event is waited for that was recorded outside.",
        |h| {
            let open = captures(h);
            h.backend.synchronize_event(move |honest, event| {
                lose(honest, &open);
                honest.synchronize_event(event)
            });
        },
    ),
    Saboteur::new(
        "disturbed-by-other-streams",
        "capture.undisturbed",
        "Refuses to wait for streams that take no part while a capture is open.",
        |h| {
            let open = captures(h);
            h.backend.synchronize_stream(move |honest, stream| match open.with(|open| open.is_empty()) {
                true => honest.synchronize_stream(stream),
                false => Err(wrong(ErrorKind::Capture, "synchronize_stream")),
            });
        },
    ),
    Saboteur::new("disturbed-by-handles", "capture.undisturbed", "Loses captures when a handle is made.", |h| {
        let open = captures(h);
        h.backend.create_blas_handle(move |honest, device, options| {
            lose(honest, &open);
            honest.create_blas_handle(device, options)
        });
    }),
    Saboteur::new("disturbed-by-exports", "capture.undisturbed", "Loses captures when memory is exported.", |h| {
        let open = captures(h);
        h.sharing.export_memory(move |sharing, device, ptr, transport| {
            lose(&sharing.backend, &open);
            sharing.export_memory(device, ptr, transport)
        });
    }),
    Saboteur::new(
        "disturbed-by-openings",
        "capture.undisturbed",
        "Loses captures when memory of another process is opened.",
        |h| {
            let open = captures(h);
            h.sharing.open_memory(move |sharing, device, handle| {
                lose(&sharing.backend, &open);
                sharing.open_memory(device, handle)
            });
        },
    )
    .by_two_processes(),
    Saboteur::new(
        "capturing-streams-complete",
        "capture.no-answer",
        "Says of streams that take part in a capture that all is done.",
        |h| {
            h.backend.query_stream(|honest, stream| match honest.records(stream) {
                true => Ok(Completion::Complete),
                false => honest.query_stream(stream),
            });
        },
    ),
    Saboteur::new(
        "capturing-streams-waited-for",
        "capture.no-answer",
        "Has waited for streams that take part in a capture.",
        |h| {
            h.backend.synchronize_stream(|honest, stream| match honest.records(stream) {
                true => Ok(()),
                false => honest.synchronize_stream(stream),
            });
        },
    ),
    Saboteur::new(
        "captured-events-complete",
        "capture.no-answer",
        "Says of events recorded in a capture that they are reached.",
        |h| {
            h.backend.query_event(|honest, event| answered(honest.query_event(event), Completion::Complete));
        },
    ),
    Saboteur::new(
        "captured-events-waited-for",
        "capture.no-answer",
        "Has waited for events recorded in a capture.",
        |h| {
            h.backend.synchronize_event(|honest, event| answered(honest.synchronize_event(event), ()));
        },
    ),
    Saboteur::new("broken-by-a-loss", "capture.lost", "Takes no fills on a stream whose capture was lost.", |h| {
        let broken = Note::<HashSet<StreamId>>::default();
        let lost = broken.clone();
        h.backend.end_capture(move |honest, stream| {
            let ended = honest.end_capture(stream);
            if is(&ended, ErrorKind::Capture) {
                lost.with(|lost| lost.insert(stream));
            }
            ended
        });
        h.backend.fill(move |honest, fill, stream| match broken.with(|broken| broken.contains(&stream)) {
            true => Err(wrong(ErrorKind::Capture, "fill")),
            false => honest.fill(fill, stream),
        });
    }),
    Saboteur::new("loss-as-state", "capture.lost", "Calls the loss of a capture an invalid state.", |h| {
        h.backend.end_capture(|honest, stream| match honest.records(stream) {
            true => renamed(honest.end_capture(stream), "end_capture"),
            false => honest.end_capture(stream),
        });
    }),
    Saboteur::new("lost-captures-leak", "capture.lost", "Counts a graph that a lost capture did not become.", |h| {
        let leaked = Note::new(0_u64);
        let lost = leaked.clone();
        h.backend.end_capture(move |honest, stream| {
            let ended = honest.end_capture(stream);
            lost.set(lost.get() + u64::from(is(&ended, ErrorKind::Capture)));
            ended
        });
        h.count(move |live| live.graphs += leaked.get());
    }),
    Saboteur::new(
        "unjoined-forgotten",
        "capture.unjoined",
        "Gives a graph of nothing where a stream was not waited for.",
        |h| {
            h.backend.end_capture(|honest, stream| {
                let recorded = honest.records(stream);
                let ended = honest.end_capture(stream);
                if recorded && is(&ended, ErrorKind::Capture) { honest.empty_graph(stream.device()) } else { ended }
            });
        },
    ),
    Saboteur::new(
        "ended-without",
        "capture.end-without",
        "Gives a graph of nothing for a stream without a capture.",
        |h| {
            h.backend.end_capture(|honest, stream| {
                let recorded = honest.is_capturing(stream)?;
                let ended = honest.end_capture(stream);
                if !recorded && is(&ended, ErrorKind::Capture) { honest.empty_graph(stream.device()) } else { ended }
            });
        },
    ),
    Saboteur::new(
        "ended-without-waits",
        "capture.end-without",
        "Waits for a stream whose capture cannot be ended.",
        |h| {
            h.backend.end_capture(|honest, stream| {
                honest.wait_for(stream)?;
                honest.end_capture(stream)
            });
        },
    ),
    Saboteur::new(
        "ended-without-as-state",
        "capture.end-without",
        "Calls the end of no capture an invalid state.",
        |h| {
            h.backend.end_capture(|honest, stream| match honest.records(stream) {
                true => honest.end_capture(stream),
                false => renamed(honest.end_capture(stream), "end_capture"),
            });
        },
    ),
];

/// The streams on which captures began that are open still.
fn captures(h: &mut Hooks) -> Note<HashSet<StreamId>> {
    let open = Note::<HashSet<StreamId>>::default();
    let (begun, ended) = (open.clone(), open.clone());
    h.backend.begin_capture(move |honest, stream, mode| {
        honest.begin_capture(stream, mode)?;
        begun.with(|begun| begun.insert(stream));
        Ok(())
    });
    h.backend.end_capture(move |honest, stream| {
        ended.with(|ended| ended.remove(&stream));
        honest.end_capture(stream)
    });
    open
}

/// The events whose latest record is in a capture.
fn marks(h: &mut Hooks) -> Note<HashSet<EventId>> {
    let recorded = Note::<HashSet<EventId>>::default();
    let noted = recorded.clone();
    h.backend.record_event(move |honest, event, stream| {
        let records = honest.records(stream);
        honest.record_event(event, stream)?;
        noted.with(|noted| if records { noted.insert(event) } else { noted.remove(&event) });
        Ok(())
    });
    recorded
}

/// Loses the captures that are open, by a question that has no answer.
fn lose(honest: &Honest, open: &Note<HashSet<StreamId>>) {
    for stream in open.with(|open| open.clone()) {
        let _ = honest.query_stream(stream);
    }
}

/// The same error with a kind of another meaning.
fn renamed<T>(result: Result<T>, operation: &'static str) -> Result<T> {
    if is(&result, ErrorKind::Capture) { Err(wrong(ErrorKind::InvalidState, operation)) } else { result }
}

/// Answers where there is no answer.
fn answered<T>(result: Result<T>, value: T) -> Result<T> {
    if is(&result, ErrorKind::Capture) { Ok(value) } else { result }
}
