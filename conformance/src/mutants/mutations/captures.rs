//! Captures: what is recorded, what takes part, and what must not disturb.

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use highwater_hal::{BlasKind, CaptureMode, Completion, ErrorKind, EventId, StreamId};

use super::super::hooks::Hooks;
use super::super::reference::{Reference, Way, forgiven, is, renamed, wrong};
use super::super::state::Shared;

mutants! {
    in "capture.not-executed":
    "recorded-fills-executed": "Records fills, and executes them as well." => |h| h.backend.fill(|reference, fill, stream| {
        reference.fill(fill, stream)?;
        if reference.is_recording(stream) {
            reference.on_own_stream(fill.device, |own| reference.fill(fill, own))
        } else {
            Ok(())
        }
    });
    "joined-copies-to-the-device-executed": "Executes copies to the device on streams that joined a capture, and records them as well." => |h| {
        let open = captures(h);
        h.backend.copy(move |reference, copy, stream| {
            reference.copy(copy, stream)?;
            let has_joined = reference.is_recording(stream) && !open.with(|open| open.contains(&stream));
            match has_joined && Way::of(copy) == Way::ToDevice {
                true => reference.on_own_stream(stream.device(), |own| reference.copy(copy, own)),
                false => Ok(()),
            }
        });
    };
    "recorded-copies-executed": "Executes copies during a capture, and records them as well." =>
        |h| h.backend.copy(|reference, copy, stream| {
            reference.copy(copy, stream)?;
            if reference.is_recording(stream) {
                reference.on_own_stream(stream.device(), |own| reference.copy(copy, own))
            } else {
                Ok(())
            }
        });
    "recorded-products-executed": "Records products, and executes them as well." => |h| h.handle.gemm(|handle, gemm| {
        handle.gemm(gemm)?;
        let records = handle.stream.is_some_and(|stream| handle.backend.is_recording(stream));
        if records && handle.kind() == BlasKind::Blas { handle.gemm_on_own_stream(gemm) } else { Ok(()) }
    });
    "executed-when-instantiated": "Executes a graph when it is made executable." =>
        |h| h.backend.instantiate_graph(|reference, graph| {
            let executable = reference.instantiate_graph(graph)?;
            reference.on_own_stream(graph.device(), |own| reference.launch_graph(executable, own))?;
            Ok(executable)
        });
    "every-stream-captures": "Reports during a capture that every stream takes part." => |h| {
        let open = captures(h);
        h.backend.is_capturing(move |reference, stream| {
            Ok(reference.is_capturing(stream)? || open.with(|open| !open.is_empty()))
        });
    };

    in "capture.begin-again":
    "begun-twice": "Lets a capture begin again, and goes on with it." => |h| {
        let open = captures(h);
        let begun = open.clone();
        h.backend.begin_capture(move |reference, stream, mode| {
            let again = begun.with(|begun| begun.contains(&stream));
            let result = reference.begin_capture(stream, mode);
            if result.is_ok() {
                begun.with(|begun| begun.insert(stream));
            }
            if again && is(&result, ErrorKind::Capture) { Ok(()) } else { result }
        });
    };
    "begun-on-a-joined-stream": "Lets a capture begin on a stream that has joined one." => |h| {
        let open = captures(h);
        let begun = open.clone();
        h.backend.begin_capture(move |reference, stream, mode| {
            let first = begun.with(|begun| begun.contains(&stream));
            let result = reference.begin_capture(stream, mode);
            if result.is_ok() {
                begun.with(|begun| begun.insert(stream));
            }
            if !first && is(&result, ErrorKind::Capture) { Ok(()) } else { result }
        });
    };
    "begun-again-as-state": "Reports a second begin of a capture as an invalid state." => |h| {
        h.backend.begin_capture(|reference, stream, mode| {
            renamed(ErrorKind::Capture, ErrorKind::InvalidState, "begin_capture", reference.begin_capture(stream, mode))
        });
    };

    in "capture.several":
    "one-capture-of-each-thread": "Refuses a capture to a thread whose earlier one is open." => |h| {
        let begun = Shared::<HashMap<StreamId, ThreadId>>::default();
        h.backend.begin_capture(move |reference, stream, mode| {
            let here = std::thread::current().id();
            let of_here = begun.with(|begun| begun.iter().filter(|(_, of)| **of == here).map(|one| *one.0).collect::<Vec<_>>());
            if of_here.into_iter().any(|other| other != stream && reference.is_recording(other)) {
                return Err(wrong(ErrorKind::Capture, "begin_capture"));
            }
            reference.begin_capture(stream, mode)?;
            begun.with(|begun| begun.insert(stream, here));
            Ok(())
        });
    };
    "one-capture-of-all-devices" needs [TWO_DEVICES]: "Refuses a capture while one of another device is open." => |h| {
        let open = captures(h);
        let begun = open.clone();
        h.backend.begin_capture(move |reference, stream, mode| {
            if begun.with(|open| open.iter().any(|other| other.device() != stream.device())) {
                return Err(wrong(ErrorKind::Capture, "begin_capture"));
            }
            reference.begin_capture(stream, mode)?;
            begun.with(|open| open.insert(stream));
            Ok(())
        });
    };
    "captures-mixed": "Records fills in the capture of the device that has been open the longest." => |h| {
        let open = in_order(h);
        h.backend.fill(move |reference, fill, stream| {
            let first = open.with(|open| open.iter().copied().find(|other| other.device() == stream.device()));
            match first.filter(|_| reference.is_recording(stream)) {
                Some(first) => reference.fill(fill, first),
                None => reference.fill(fill, stream),
            }
        });
    };
    "captures-nested": "Refuses the end of a capture while a later one is open." => |h| {
        let open = in_order(h);
        h.backend.end_capture(move |reference, stream| {
            if open.with(|open| open.contains(&stream) && open.last() != Some(&stream)) {
                return Err(wrong(ErrorKind::Capture, "end_capture"));
            }
            open.with(|open| open.retain(|other| *other != stream));
            reference.end_capture(stream)
        });
    };
    "captures-end-together": "Loses the other captures when one ends." => |h| {
        let open = captures(h);
        h.backend.end_capture(move |reference, stream| {
            open.with(|open| open.remove(&stream));
            let ended = reference.end_capture(stream);
            lose(reference, &open);
            ended
        });
    };

    in "capture.joins":
    "nobody-joins": "Lets a stream that waits for an event of a capture stay outside." => |h| {
        let recorded = marks(h);
        h.backend.stream_wait_event(move |reference, stream, event| {
            let mark = recorded.with(|recorded| recorded.contains(&event));
            if mark && !reference.is_recording(stream) {
                Ok(())
            } else {
                reference.stream_wait_event(stream, event)
            }
        });
    };
    "joined-in-secret": "Reports that a stream which joined a capture takes part in none." => |h| {
        let open = captures(h);
        h.backend.is_capturing(move |reference, stream| {
            Ok(reference.is_capturing(stream)? && open.with(|open| open.contains(&stream)))
        });
    };
    "all-join": "Lets every stream join that waits for anything during a capture." => |h| {
        let open = captures(h);
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            // A later wait for this event reports the capture too.
            let first = open.with(|open| open.iter().copied().next());
            match first {
                Some(first) if first.device() == stream.device() && !reference.is_recording(stream) => {
                    reference.record_event(event, first)
                }
                _ => Ok(()),
            }
        });
    };

    in "mapped.capture":
    "disturbed-by-physical-memory": "Loses captures when physical memory is created." =>
        |h| disturbed_by(h, "create_memory");
    "disturbed-by-mapping": "Loses captures when memory is mapped." => |h| disturbed_by(h, "map_memory");
    "disturbed-by-unmapping": "Loses captures when memory is unmapped." => |h| disturbed_by(h, "unmap_memory");

    in "capture.undisturbed":
    "disturbed-by-allocation": "Loses captures when device memory is allocated." => |h| disturbed_by(h, "allocate");
    "disturbed-by-frees": "Loses captures when device memory is freed." => |h| disturbed_by(h, "free");
    "disturbed-by-host-memory": "Refuses page-locked memory while a capture is open." => |h| {
        let open = captures(h);
        h.host.allocate(move |host, bytes, options| match open.with(|open| open.is_empty()) {
            true => host.allocate(bytes, options),
            false => Err(wrong(ErrorKind::Capture, "allocate")),
        });
    };
    "disturbed-by-opening-elsewhere" [by_two_processes]: "Loses captures of mode Global when another thread opens memory." => |h| {
        let open = Shared::<HashMap<StreamId, ThreadId>>::default();
        let (begun, ended) = (open.clone(), open.clone());
        h.backend.begin_capture(move |reference, stream, mode| {
            reference.begin_capture(stream, mode)?;
            if mode == CaptureMode::Global {
                begun.with(|begun| begun.insert(stream, std::thread::current().id()));
            }
            Ok(())
        });
        h.backend.end_capture(move |reference, stream| {
            ended.with(|ended| ended.remove(&stream));
            reference.end_capture(stream)
        });
        h.sharing.open_memory(move |sharing, device, handle| {
            let here = std::thread::current().id();
            let others: HashSet<StreamId> =
                open.with(|open| open.iter().filter(|(_, thread)| **thread != here).map(|(stream, _)| *stream).collect());
            lose(&sharing.backend, &Shared::new(others));
            sharing.open_memory(device, handle)
        });
    };
    "disturbed-by-registration": "Loses captures when memory is registered." => |h| disturbed_by(h, "host_register");
    "disturbed-by-new-events": "Loses captures of other threads when an event is made." => |h| {
        let open = captures(h);
        let threads = Shared::<HashSet<std::thread::ThreadId>>::default();
        let capturing = threads.clone();
        h.backend.is_capturing(move |reference, stream| {
            capturing.with(|threads| threads.insert(std::thread::current().id()));
            reference.is_capturing(stream)
        });
        h.backend.create_event(move |reference, device, options| {
            // A thread that has asked for a stream is the one that captures.
            if !threads.with(|threads| threads.contains(&std::thread::current().id())) {
                lose(reference, &open);
            }
            reference.create_event(device, options)
        });
    };
    "disturbed-by-questions": "Loses captures when an event that was recorded outside is queried." =>
        |h| disturbed_by(h, "query_event");
    "disturbed-by-waits": "Loses captures when a thread waits for an event that was recorded outside." =>
        |h| disturbed_by(h, "synchronize_event");
    "disturbed-by-older-events": "Loses captures when an event from before the capture of its stream is queried." => |h| {
        let open = captures(h);
        let homes = Shared::<HashMap<EventId, StreamId>>::default();
        let (recorded, asked) = (homes.clone(), open.clone());
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            recorded.with(|recorded| recorded.insert(event, stream));
            Ok(())
        });
        h.backend.query_event(move |reference, event| {
            let home = homes.with(|homes| homes.get(&event).copied());
            if home.is_some_and(|home| asked.with(|open| open.contains(&home))) {
                lose(reference, &open);
            }
            reference.query_event(event)
        });
    };
    "older-events-refused": "Refuses to let a stream wait for an event from before the capture of its stream." => |h| {
        let open = captures(h);
        let homes = Shared::<HashMap<EventId, (StreamId, bool)>>::default();
        let recorded = homes.clone();
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            recorded.with(|recorded| recorded.insert(event, (stream, reference.is_recording(stream))));
            Ok(())
        });
        h.backend.stream_wait_event(move |reference, stream, event| {
            let home = homes.with(|homes| homes.get(&event).copied());
            match home.is_some_and(|(home, inside)| !inside && open.with(|open| open.contains(&home))) {
                true => Err(wrong(ErrorKind::Capture, "stream_wait_event")),
                false => reference.stream_wait_event(stream, event),
            }
        });
    };
    "disturbed-by-other-streams": "Refuses to wait for streams that take no part while a capture is open." => |h| {
        let open = captures(h);
        h.backend.synchronize_stream(move |reference, stream| match open.with(|open| open.is_empty()) {
            true => reference.synchronize_stream(stream),
            false => Err(wrong(ErrorKind::Capture, "synchronize_stream")),
        });
    };
    "disturbed-by-handles": "Loses captures when a handle is made." => |h| disturbed_by(h, "create_blas_handle");
    "disturbed-by-exports": "Loses captures when memory is exported." => |h| disturbed_by(h, "export_memory");
    "disturbed-by-openings" [by_two_processes]: "Loses captures when memory of another process is opened." =>
        |h| disturbed_by(h, "open_memory");

    in "capture.no-answer":
    "capturing-streams-complete": "Reports streams that take part in a capture as complete." =>
        |h| h.backend.query_stream(|reference, stream| match reference.is_recording(stream) {
            true => Ok(Completion::Complete),
            false => reference.query_stream(stream),
        });
    "capturing-streams-waited-for": "Returns success from a wait for a stream that takes part in a capture." =>
        |h| h.backend.synchronize_stream(|reference, stream| match reference.is_recording(stream) {
            true => Ok(()),
            false => reference.synchronize_stream(stream),
        });
    "captured-events-complete": "Reports events that were recorded in a capture as reached." =>
        |h| h.backend.query_event(|reference, event| {
            forgiven(ErrorKind::Capture, reference.query_event(event), Completion::Complete)
        });
    "captured-events-waited-for": "Returns success from a wait for an event that was recorded in a capture." =>
        |h| h.backend.synchronize_event(|reference, event| {
            forgiven(ErrorKind::Capture, reference.synchronize_event(event), ())
        });

    "answers-from-outside": "Answers for an event's earlier record outside once a capture has recorded it." => |h| {
        let reached = Shared::<HashSet<EventId>>::default();
        let asked = reached.clone();
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event);
            if completion.as_ref().is_ok_and(|completion| completion.is_complete()) {
                asked.with(|reached| reached.insert(event));
            }
            match reached.with(|reached| reached.contains(&event)) {
                true => forgiven(ErrorKind::Capture, completion, Completion::Complete),
                false => completion,
            }
        });
    };

    in "capture.lost":
    "broken-by-a-loss": "Refuses fills on a stream whose capture was lost." => |h| {
        let broken = Shared::<HashSet<StreamId>>::default();
        let lost = broken.clone();
        h.backend.end_capture(move |reference, stream| {
            let ended = reference.end_capture(stream);
            if is(&ended, ErrorKind::Capture) {
                lost.with(|lost| lost.insert(stream));
            }
            ended
        });
        h.backend.fill(move |reference, fill, stream| match broken.with(|broken| broken.contains(&stream)) {
            true => Err(wrong(ErrorKind::Capture, "fill")),
            false => reference.fill(fill, stream),
        });
    };
    "loss-as-state": "Reports the loss of a capture as an invalid state." =>
        |h| h.backend.end_capture(|reference, stream| match reference.is_recording(stream) {
            true => renamed(ErrorKind::Capture, ErrorKind::InvalidState, "end_capture", reference.end_capture(stream)),
            false => reference.end_capture(stream),
        });
    "lost-captures-leak": "Counts a graph that a lost capture did not become." => |h| {
        let leaked = Shared::new(0_u64);
        let lost = leaked.clone();
        h.backend.end_capture(move |reference, stream| {
            let ended = reference.end_capture(stream);
            lost.set(lost.get() + u64::from(is(&ended, ErrorKind::Capture)));
            ended
        });
        h.count(move |live| live.graphs += leaked.get());
    };

    in "capture.unjoined":
    "unjoined-forgotten": "Returns an empty graph although the capture did not wait for a joined stream." =>
        |h| h.backend.end_capture(|reference, stream| {
            let recorded = reference.is_recording(stream);
            let ended = reference.end_capture(stream);
            if recorded && is(&ended, ErrorKind::Capture) { reference.empty_graph(stream.device()) } else { ended }
        });

    in "capture.any-thread":
    "other-threads-executed": "Executes fills on a captured stream that another thread enqueues." => |h| {
        let begun = beginners(h);
        h.backend.fill(move |reference, fill, stream| {
            if reference.is_recording(stream) && is_of_another_thread(&begun, stream) {
                reference.on_own_stream(fill.device, |own| reference.fill(fill, own))
            } else {
                reference.fill(fill, stream)
            }
        });
    };
    "products-of-other-threads-executed": "Executes products on a captured stream that another thread enqueues." => |h| {
        let begun = beginners(h);
        h.handle.gemm(move |handle, gemm| match handle.stream {
            Some(stream) if handle.backend.is_recording(stream) && is_of_another_thread(&begun, stream) => {
                handle.gemm_on_own_stream(gemm)
            }
            _ => handle.gemm(gemm),
        });
    };
    "ended-on-its-thread": "Refuses the end of a relaxed capture on another thread." => |h| {
        let begun = beginners(h);
        h.backend.end_capture(move |reference, stream| match is_of_another_thread(&begun, stream) {
            true => Err(wrong(ErrorKind::Capture, "end_capture")),
            false => reference.end_capture(stream),
        });
    };

    in "capture.end-without":
    "ended-without": "Returns an empty graph for a stream without a capture." =>
        |h| h.backend.end_capture(|reference, stream| {
            let recorded = reference.is_capturing(stream)?;
            let ended = reference.end_capture(stream);
            if !recorded && is(&ended, ErrorKind::Capture) { reference.empty_graph(stream.device()) } else { ended }
        });
    "ended-without-waits": "Waits for a stream whose capture cannot be ended." =>
        |h| h.backend.end_capture(|reference, stream| {
            reference.wait_for(stream)?;
            reference.end_capture(stream)
        });
    "ended-without-as-state": "Reports the end of no capture as an invalid state." =>
        |h| h.backend.end_capture(|reference, stream| match reference.is_recording(stream) {
            true => reference.end_capture(stream),
            false => renamed(ErrorKind::Capture, ErrorKind::InvalidState, "end_capture", reference.end_capture(stream)),
        });
}

/// The thread that began the latest capture of each stream.
fn beginners(h: &mut Hooks) -> Shared<HashMap<StreamId, ThreadId>> {
    let begun = Shared::<HashMap<StreamId, ThreadId>>::default();
    let noted = begun.clone();
    h.backend.begin_capture(move |reference, stream, mode| {
        reference.begin_capture(stream, mode)?;
        noted.with(|noted| noted.insert(stream, std::thread::current().id()));
        Ok(())
    });
    begun
}

fn is_of_another_thread(begun: &Shared<HashMap<StreamId, ThreadId>>, stream: StreamId) -> bool {
    begun.with(|begun| begun.get(&stream).is_some_and(|&thread| thread != std::thread::current().id()))
}

/// The streams on which captures began that are open still.
fn captures(h: &mut Hooks) -> Shared<HashSet<StreamId>> {
    let open = Shared::<HashSet<StreamId>>::default();
    let (begun, ended) = (open.clone(), open.clone());
    h.backend.begin_capture(move |reference, stream, mode| {
        reference.begin_capture(stream, mode)?;
        begun.with(|begun| begun.insert(stream));
        Ok(())
    });
    h.backend.end_capture(move |reference, stream| {
        ended.with(|ended| ended.remove(&stream));
        reference.end_capture(stream)
    });
    open
}

/// The same, in the order in which they began.
fn in_order(h: &mut Hooks) -> Shared<Vec<StreamId>> {
    let open = Shared::<Vec<StreamId>>::default();
    let (begun, ended) = (open.clone(), open.clone());
    h.backend.begin_capture(move |reference, stream, mode| {
        reference.begin_capture(stream, mode)?;
        begun.with(|begun| begun.push(stream));
        Ok(())
    });
    h.backend.end_capture(move |reference, stream| {
        ended.with(|ended| ended.retain(|other| *other != stream));
        reference.end_capture(stream)
    });
    open
}

/// The events whose latest record is in a capture.
fn marks(h: &mut Hooks) -> Shared<HashSet<EventId>> {
    let recorded = Shared::<HashSet<EventId>>::default();
    let noted = recorded.clone();
    h.backend.record_event(move |reference, event, stream| {
        let records = reference.is_recording(stream);
        reference.record_event(event, stream)?;
        noted.with(|noted| if records { noted.insert(event) } else { noted.remove(&event) });
        Ok(())
    });
    recorded
}

/// Loses the captures that are open when this operation is called.
fn disturbed_by(h: &mut Hooks, disturbing: &'static str) {
    let open = captures(h);
    h.before(move |reference, operation, _| {
        if operation == disturbing {
            lose(reference, &open);
        }
        Ok(())
    });
}

/// Loses the captures that are open, by a question that has no answer.
fn lose(reference: &Reference, open: &Shared<HashSet<StreamId>>) {
    for stream in open.with(|open| open.clone()) {
        let _ = reference.query_stream(stream);
    }
}
