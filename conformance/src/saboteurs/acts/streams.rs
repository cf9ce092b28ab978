//! Streams: order, asynchrony, independence, and waiting.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use highwater_hal::{Completion, StreamId, StreamPriority};

use super::super::Saboteur;
use super::super::honest::{Honest, Way};
use super::super::hooks::Hooks;
use super::super::note::{Held, Note};
use super::living_streams;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("copies-overtake-fills", "stream.order", "Executes a fill after the copy that follows it.", |h| {
        swap(h, |_| true);
    }),
    Saboteur::new(
        "urgent-streams-reorder",
        "stream.order",
        "Executes a fill after the copy that follows it, on streams that are not of normal priority.",
        |h| {
            let urgent = Note::<HashSet<StreamId>>::default();
            let made = urgent.clone();
            h.backend.create_stream(move |honest, device, options| {
                let stream = honest.create_stream(device, options)?;
                if options.priority != StreamPriority::Normal {
                    made.with(|urgent| urgent.insert(stream));
                }
                Ok(stream)
            });
            swap(h, move |stream| urgent.with(|urgent| urgent.contains(&stream)));
        },
    ),
    Saboteur::new(
        "long-queues-lose",
        "stream.order",
        "Loses the thousandth fill of a stream that is not waited for.",
        |h| {
            let filled = Note::new(0_usize);
            let fresh = filled.clone();
            h.backend.synchronize_stream(move |honest, stream| {
                fresh.set(0);
                honest.synchronize_stream(stream)
            });
            h.backend.fill(move |honest, fill, stream| {
                filled.set(filled.get() + 1);
                if filled.get().is_multiple_of(1000) {
                    honest.is_capturing(stream).map(drop)
                } else {
                    honest.fill(fill, stream)
                }
            });
        },
    ),
    Saboteur::new(
        "copies-to-the-host-wait",
        "stream.asynchronous",
        "Returns from a copy to the host when it is done.",
        |h| {
            h.backend.copy(|honest, copy, stream| {
                honest.copy(copy, stream)?;
                if Way::of(copy) == Way::ToHost { honest.wait_for(stream) } else { Ok(()) }
            });
        },
    ),
    Saboteur::new(
        "copies-on-the-device-wait",
        "stream.asynchronous",
        "Waits for the stream before a copy within a device.",
        |h| {
            h.backend.copy(|honest, copy, stream| {
                if Way::of(copy) == Way::OnDevice {
                    honest.wait_for(stream)?;
                }
                honest.copy(copy, stream)
            });
        },
    ),
    Saboteur::new("fills-wait", "stream.asynchronous", "Returns from a fill when it is done.", |h| {
        h.backend.fill(|honest, fill, stream| {
            honest.fill(fill, stream)?;
            honest.wait_for(stream)
        });
    }),
    Saboteur::new("records-wait", "stream.asynchronous", "Waits for the stream before it records an event.", |h| {
        h.backend.record_event(|honest, event, stream| {
            honest.wait_for(stream)?;
            honest.record_event(event, stream)
        });
    }),
    Saboteur::new(
        "waits-wait",
        "stream.asynchronous",
        "Waits for the event in the call that tells a stream to.",
        |h| {
            h.backend.stream_wait_event(|honest, stream, event| {
                honest.stream_wait_event(stream, event)?;
                // An event of a capture is waited for by nobody.
                if !honest.records(stream) { honest.synchronize_event(event) } else { Ok(()) }
            });
        },
    ),
    Saboteur::new("launches-wait", "stream.asynchronous", "Returns from a launch when the graph was executed.", |h| {
        h.backend.launch_graph(|honest, graph, stream| {
            honest.launch_graph(graph, stream)?;
            honest.wait_for(stream)
        });
    }),
    Saboteur::new("plans-wait", "stream.asynchronous", "Returns from the run of a plan when it is done.", |h| {
        h.handle.run_plan(|handle, plan, arguments| {
            handle.run_plan(plan, arguments)?;
            handle.wait()
        });
    }),
    Saboteur::new(
        "fills-wait-for-other-streams",
        "stream.independent",
        "Lets each fill wait for every other stream.",
        |h| {
            let streams = living_streams(h);
            h.backend.fill(move |honest, fill, stream| {
                let others: Vec<StreamId> = streams.with(|streams| {
                    streams
                        .iter()
                        .copied()
                        .filter(|&other| other != stream && other.device() == stream.device())
                        .collect()
                });
                for other in others {
                    if !honest.records(stream) && honest.is_busy(other) {
                        honest.let_wait(stream, other)?;
                    }
                }
                honest.fill(fill, stream)
            });
        },
    ),
    Saboteur::new(
        "waits-for-the-whole-device",
        "stream.independent",
        "Waits for every stream of the device where one is to be waited for.",
        |h| {
            h.backend.synchronize_stream(|honest, stream| {
                honest.synchronize_stream(stream)?;
                honest.synchronize_device(stream.device())
            });
        },
    ),
    Saboteur::new(
        "one-default-stream",
        "stream.independent",
        "Has one default stream for all threads where each has its own.",
        |h| {
            h.stream_in(|stream| match stream.is_per_thread_default() {
                true => StreamId::legacy_default(stream.tag(), stream.device()),
                false => stream,
            });
        },
    ),
    Saboteur::new(
        "streams-take-their-work-along",
        "stream.destroy-pending",
        "Destroys pending work with its stream.",
        |h| {
            let held = Held::default();
            let (filled, recorded, gone, going) = (held.clone(), held.clone(), held.clone(), held.clone());
            h.backend.fill(move |honest, fill, stream| {
                if !filled.has(stream) && !honest.is_busy(stream) {
                    return honest.fill(fill, stream);
                }
                let fill = *fill;
                filled.hold(stream, move |honest| honest.fill(&fill, stream));
                Ok(())
            });
            h.backend.record_event(move |honest, event, stream| {
                if !recorded.has(stream) {
                    return honest.record_event(event, stream);
                }
                recorded.hold(stream, move |honest| honest.record_event(event, stream));
                Ok(())
            });
            h.backend.destroy_stream(move |honest, stream| {
                gone.forget(stream);
                honest.destroy_stream(stream)
            });
            h.before(move |honest, method, _| match method {
                "fill" | "record_event" | "destroy_stream" => Ok(()),
                "query_stream" => Ok(()),
                _ => going.let_go(honest, None),
            });
            h.backend.query_stream(move |honest, stream| match held.has(stream) {
                true => Ok(Completion::Pending),
                false => honest.query_stream(stream),
            });
        },
    ),
    Saboteur::new("always-complete", "stream.query", "Says that a stream is complete without looking.", |h| {
        h.backend.query_stream(|honest, stream| honest.query_stream(stream).map(|_| Completion::Complete));
    }),
    Saboteur::new(
        "fresh-streams-pending",
        "stream.query",
        "Says that a stream is pending before it was ever used.",
        |h| {
            let used = Note::<HashSet<StreamId>>::default();
            let seen = used.clone();
            h.before(move |_, method, stream| {
                if let Some(stream) = stream.filter(|_| method != "query_stream") {
                    used.with(|used| used.insert(stream));
                }
                Ok(())
            });
            h.backend.query_stream(move |honest, stream| {
                let completion = honest.query_stream(stream)?;
                Ok(if seen.with(|seen| seen.contains(&stream)) { completion } else { Completion::Pending })
            });
        },
    ),
    Saboteur::new("pending-for-others", "stream.query", "Says that a stream is pending while any other is.", |h| {
        let streams = living_streams(h);
        h.backend.query_stream(move |honest, stream| {
            let completion = honest.query_stream(stream)?;
            let others = streams.with(|streams| streams.clone());
            let busy = others.into_iter().any(|other| other != stream && honest.is_busy(other));
            Ok(if busy { Completion::Pending } else { completion })
        });
    }),
    Saboteur::new(
        "short-copies-not-waited-for",
        "stream.synchronize",
        "Returns at once where the last that a stream was given is a copy to the host of less than a mebibyte.",
        |h| {
            h.settles = true;
            let short = Note::<HashSet<StreamId>>::default();
            let (given, last) = (short.clone(), short.clone());
            h.before(move |_, method, stream| {
                if let Some(stream) = stream.filter(|_| !matches!(method, "query_stream" | "synchronize_stream")) {
                    given.with(|given| given.remove(&stream));
                }
                Ok(())
            });
            h.backend.copy(move |honest, copy, stream| {
                honest.copy(copy, stream)?;
                if Way::of(copy) == Way::ToHost && copy.bytes < 1 << 20 {
                    last.with(|last| last.insert(stream));
                }
                Ok(())
            });
            h.backend.synchronize_stream(move |honest, stream| match short.with(|short| short.contains(&stream)) {
                true => honest.query_stream(stream).map(drop),
                false => honest.synchronize_stream(stream),
            });
        },
    ),
    Saboteur::new(
        "streams-waited-for-briefly",
        "stream.synchronize",
        "Waits for a stream for 3 milliseconds at most.",
        |h| {
            h.settles = true;
            h.backend.synchronize_stream(|honest, stream| {
                let begun = Instant::now();
                while honest.query_stream(stream)? == Completion::Pending && begun.elapsed() < Duration::from_millis(3)
                {
                    std::thread::yield_now();
                }
                Ok(())
            });
        },
    ),
    Saboteur::new(
        "devices-not-waited-for",
        "devices.synchronize",
        "Returns at once where a device is to be waited for.",
        |h| {
            h.settles = true;
            h.backend.synchronize_device(|honest, device| honest.device_info(device).map(drop));
        },
    ),
    Saboteur::new("one-stream-of-the-device", "devices.synchronize", "Waits for the oldest stream of a device.", |h| {
        h.settles = true;
        let streams = living_streams(h);
        h.backend.synchronize_device(move |honest, device| {
            honest.device_info(device)?;
            let oldest = streams.with(|streams| streams.iter().copied().find(|stream| stream.device() == device));
            oldest.map_or(Ok(()), |stream| honest.wait_for(stream))
        });
    }),
    Saboteur::new("the-other-device", "devices.synchronize", "Waits for the first device whichever is meant.", |h| {
        h.settles = true;
        h.backend.synchronize_device(|honest, device| {
            honest.device_info(device)?;
            honest.synchronize_device(0)
        });
    }),
];

/// Holds a fill back until the copy after it, on streams that are chosen.
fn swap(h: &mut Hooks, chosen: impl Fn(StreamId) -> bool + Send + Sync + 'static) {
    let held = Held::default();
    let (filled, copied) = (held.clone(), held.clone());
    h.backend.fill(move |honest, fill, stream| {
        if !chosen(stream) || honest.records(stream) {
            return honest.fill(fill, stream);
        }
        // Refused here if at all.
        honest.query_stream(stream)?;
        let fill = *fill;
        filled.hold(stream, move |honest: &Honest| honest.fill(&fill, stream));
        Ok(())
    });
    h.backend.copy(move |honest, copy, stream| {
        honest.copy(copy, stream)?;
        copied.let_go(honest, Some(stream))
    });
    h.before(move |honest, method, stream| if method == "copy" { Ok(()) } else { held.let_go(honest, stream) });
}
