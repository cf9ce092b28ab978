//! Streams: order, asynchrony, independence, and waiting.

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use highwater_hal::{
    AllocateOptions, Completion, ErrorKind, EventId, EventOptions, GraphExecId, Location, MemoryCopy, StreamId,
    StreamPriority,
};

use super::super::hooks::Hooks;
use super::super::reference::{Reference, Way, is};
use super::super::state::{Deferred, Shared};
use super::living_streams;

mutants! {
    in "stream.order":
    "copies-overtake-fills": "Executes a fill after the copy that follows it." => |h| swap(h, |_| true);
    "urgent-streams-reorder" needs [has::stream_priority]: "Executes a fill after the copy that follows it, on streams that are not of normal priority." =>
    |h| {
        let urgent = Shared::<HashSet<StreamId>>::default();
        let made = urgent.clone();
        h.backend.create_stream(move |reference, device, options| {
            let stream = reference.create_stream(device, options)?;
            if options.priority != StreamPriority::Normal {
                made.with(|urgent| urgent.insert(stream));
            }
            Ok(stream)
        });
        swap(h, move |stream| urgent.with(|urgent| urgent.contains(&stream)));
    };
    "long-queues-lose": "Loses the thousandth fill of a stream that is not waited for." => |h| {
        let filled = Shared::new(0_usize);
        let fresh = filled.clone();
        h.backend.synchronize_stream(move |reference, stream| {
            fresh.set(0);
            reference.synchronize_stream(stream)
        });
        h.backend.fill(move |reference, fill, stream| {
            filled.set(filled.get() + 1);
            if filled.get().is_multiple_of(1000) {
                reference.is_capturing(stream).map(drop)
            } else {
                reference.fill(fill, stream)
            }
        });
    };

    "sources-read-at-the-call": "Reads the source of a short copy to the device in the call that enqueues it." => |h| {
        // The blocks that hold what was read. They are freed with the device.
        let kept = Shared::new(0_u64);
        let counted = kept.clone();
        h.backend.copy(move |reference, copy, stream| {
            let Location::Device { device, .. } = copy.dst else { return reference.copy(copy, stream) };
            let is_short = (1..=1 << 17).contains(&copy.bytes);
            if Way::of(copy) != Way::ToDevice || !is_short || !reference.is_pending(stream) {
                return reference.copy(copy, stream);
            }
            let ptr = reference.allocate(device, &AllocateOptions::new(copy.bytes))?;
            kept.set(kept.get() + 1);
            let read = Location::Device { device, ptr };
            let (mut early, mut late) = (*copy, *copy);
            (early.dst, late.src) = (read, read);
            reference.on_own_stream(device, |own| reference.copy(&early, own))?;
            reference.copy(&late, stream)
        });
        h.count(move |live| live.allocations -= counted.get());
    };

    in "stream.enqueues":
    "idle-copies-executed": "Executes a copy in the call if the stream is idle." =>
        |h| h.backend.copy(|reference, copy, stream| {
            let is_idle = !reference.is_pending(stream);
            reference.copy(copy, stream)?;
            if is_idle { reference.wait_for(stream) } else { Ok(()) }
        });
    "idle-fills-executed": "Executes a fill in the call if the stream is idle." => |h| h.backend.fill(|reference, fill, stream| {
        let is_idle = !reference.is_pending(stream);
        reference.fill(fill, stream)?;
        if is_idle { reference.wait_for(stream) } else { Ok(()) }
    });
    "idle-launches-executed" needs [has::capture]: "Executes a graph in the call if the stream is idle." =>
        |h| h.backend.launch_graph(|reference, graph, stream| {
            let is_idle = !reference.is_pending(stream);
            reference.launch_graph(graph, stream)?;
            if is_idle { reference.wait_for(stream) } else { Ok(()) }
        });
    "idle-products-executed": "Multiplies in the call if the stream is idle." => |h| h.handle.gemm(|handle, gemm| {
        let is_idle = handle.stream.is_some_and(|stream| !handle.backend.is_pending(stream));
        handle.gemm(gemm)?;
        if is_idle { handle.wait() } else { Ok(()) }
    });
    "idle-plans-executed" needs [has::lt_plans]: "Runs a plan in the call if the stream is idle." =>
        |h| h.handle.run_plan(|handle, plan, arguments| {
            let is_idle = handle.stream.is_some_and(|stream| !handle.backend.is_pending(stream));
            handle.run_plan(plan, arguments)?;
            if is_idle { handle.wait() } else { Ok(()) }
        });

    in "stream.foreign-kept":
    "wrappers-destroy-streams": "Destroys a stream with the id that wraps it." => |h| {
        let owners = Shared::<HashMap<u64, StreamId>>::default();
        let wrapped = Shared::<HashMap<StreamId, StreamId>>::default();
        let (raws, wraps) = (owners.clone(), wrapped.clone());
        h.backend.raw_stream(move |reference, stream| {
            let raw = reference.raw_stream(stream)?;
            raws.with(|raws| raws.insert(raw, stream));
            Ok(raw)
        });
        h.backend.stream_from_raw(move |reference, device, raw| {
            let wrapper = reference.stream_from_raw(device, raw)?;
            if let Some(owner) = owners.with(|owners| owners.get(&raw).copied()) {
                wraps.with(|wraps| wraps.insert(wrapper, owner));
            }
            Ok(wrapper)
        });
        h.backend.destroy_stream(move |reference, stream| {
            reference.destroy_stream(stream)?;
            match wrapped.with(|wrapped| wrapped.remove(&stream)) {
                Some(owner) => reference.destroy_stream(owner),
                None => Ok(()),
            }
        });
    };

    in "stream.asynchronous":
    "copies-to-the-host-wait": "Returns from a copy to the host when it is done." =>
        |h| h.backend.copy(|reference, copy, stream| {
            reference.copy(copy, stream)?;
            if Way::of(copy) == Way::ToHost { reference.wait_for(stream) } else { Ok(()) }
        });
    "copies-on-the-device-wait": "Waits for the stream before a copy within a device." =>
        |h| h.backend.copy(|reference, copy, stream| {
            if Way::of(copy) == Way::OnDevice {
                reference.wait_for(stream)?;
            }
            reference.copy(copy, stream)
        });
    "fills-wait": "Returns from a fill when it is done." => |h| h.backend.fill(|reference, fill, stream| {
        reference.fill(fill, stream)?;
        reference.wait_for(stream)
    });
    "records-wait": "Waits for the stream before it records an event." =>
        |h| h.backend.record_event(|reference, event, stream| {
            reference.wait_for(stream)?;
            reference.record_event(event, stream)
        });
    "waits-wait": "Waits for the event in the call that tells a stream to." =>
        |h| h.backend.stream_wait_event(|reference, stream, event| {
            reference.stream_wait_event(stream, event)?;
            // The CPU cannot wait for an event of a capture.
            if !reference.is_recording(stream) { reference.synchronize_event(event) } else { Ok(()) }
        });
    "launches-wait" needs [has::capture]: "Returns from a launch when the graph was executed." =>
        |h| h.backend.launch_graph(|reference, graph, stream| {
            reference.launch_graph(graph, stream)?;
            reference.wait_for(stream)
        });
    "launches-on-another-stream-wait" needs [has::capture]: "Waits for the stream before a launch, if the last one was on another stream." => |h| {
        let last = Shared::<HashMap<GraphExecId, StreamId>>::default();
        h.backend.launch_graph(move |reference, graph, stream| {
            let before = last.with(|last| last.insert(graph, stream));
            if before.is_some_and(|before| before != stream) {
                reference.wait_for(stream)?;
            }
            reference.launch_graph(graph, stream)
        });
    };
    "plans-wait" needs [has::lt_plans]: "Returns from the run of a plan when it is done." => |h| h.handle.run_plan(|handle, plan, arguments| {
        handle.run_plan(plan, arguments)?;
        handle.wait()
    });

    "queues-of-512": "Waits for the stream before each 512th operation since the last wait for it." => |h| {
        let counts = Shared::<HashMap<StreamId, usize>>::default();
        h.before(move |reference, method, stream| {
            if let ("synchronize_stream", Some(stream)) = (method, stream) {
                counts.with(|counts| counts.remove(&stream));
            }
            let Some(stream) = stream.filter(|_| matches!(method, "copy" | "copy_2d" | "fill" | "record_event")) else {
                return Ok(());
            };
            let count = counts.with(|counts| {
                let count = counts.entry(stream).or_default();
                *count += 1;
                *count
            });
            let is_full = count.is_multiple_of(512) && reference.is_pending(stream);
            if is_full { reference.wait_for(stream) } else { Ok(()) }
        });
    };

    in "stream.independent":
    "fills-wait-for-other-streams": "Lets each fill wait for every other stream." => |h| {
        let streams = living_streams(h);
        h.backend.fill(move |reference, fill, stream| {
            let others: Vec<StreamId> = streams.with(|streams| {
                streams
                    .iter()
                    .copied()
                    .filter(|&other| other != stream && other.device() == stream.device())
                    .collect()
            });
            for other in others {
                if !reference.is_recording(stream) && reference.is_pending(other) {
                    reference.let_wait(stream, other)?;
                }
            }
            reference.fill(fill, stream)
        });
    };
    "waits-for-the-whole-device": "Waits for every stream of the device instead of one." =>
        |h| h.backend.synchronize_stream(|reference, stream| {
            reference.synchronize_stream(stream)?;
            reference.synchronize_device(stream.device())
        });
    "one-default-stream" needs [has::per_thread_default_stream]: "Has one default stream for all threads instead of one for each." =>
        |h| h.stream_in(|stream| match stream.is_per_thread_default() {
            true => StreamId::legacy_default(stream.tag(), stream.device()),
            false => stream,
        });

    "streams-share-32-queues": "Lets a fill wait for the stream that was made a multiple of 32 streams earlier." => |h| {
        let streams = living_streams(h);
        h.backend.fill(move |reference, fill, stream| {
            const QUEUES: usize = 32;
            let partner = streams.with(|streams| {
                let own: Vec<StreamId> =
                    streams.iter().copied().filter(|other| other.device() == stream.device()).collect();
                let place = own.iter().position(|other| *other == stream).filter(|place| *place >= QUEUES);
                place.map(|place| own[place % QUEUES])
            });
            let is_free = |partner: &StreamId| reference.is_recording(stream) || !reference.is_pending(*partner);
            if let Some(partner) = partner.filter(|partner| !is_free(partner)) {
                reference.let_wait(stream, partner)?;
            }
            reference.fill(fill, stream)
        });
    };

    "seven-queues": "Lets the eighth stream with outstanding work wait for the first." => |h| {
        let occupied = Shared::<Vec<StreamId>>::default();
        h.before(move |reference, method, stream| {
            let enqueues = matches!(method, "copy" | "copy_2d" | "fill" | "stream_wait_event");
            let Some(stream) = stream.filter(|stream| enqueues && !reference.is_recording(*stream)) else { return Ok(()) };
            let known = occupied.with(|occupied| occupied.clone());
            let mut pending: Vec<StreamId> = known.into_iter().filter(|other| reference.is_pending(*other)).collect();
            if !pending.contains(&stream) {
                let queues: Vec<StreamId> =
                    pending.iter().copied().filter(|other| other.device() == stream.device()).collect();
                if queues.len() >= 7 {
                    reference.let_wait(stream, queues[0])?;
                }
                pending.push(stream);
            }
            occupied.with(|occupied| *occupied = pending);
            Ok(())
        });
    };

    "copies-from-registered-memory-share-a-queue" needs [has::host_register]:
        "Lets each copy from registered memory wait for the one before, of whatever stream." => |h| {
        let registered = Shared::<HashMap<usize, usize>>::default();
        let (added, removed) = (registered.clone(), registered.clone());
        let last = Shared::<Option<StreamId>>::new(None);
        h.host.register(move |host, ptr, bytes, options| {
            host.register(ptr, bytes, options)?;
            added.with(|registered| registered.insert(ptr.address(), bytes));
            Ok(())
        });
        h.host.unregister(move |host, ptr| {
            host.unregister(ptr)?;
            removed.with(|registered| registered.remove(&ptr.address()));
            Ok(())
        });
        h.backend.copy(move |reference, copy, stream| {
            let Location::Host(ptr) = copy.src else { return reference.copy(copy, stream) };
            let contains = |(start, bytes): (&usize, &usize)| (*start..start + bytes).contains(&ptr.address());
            if reference.is_recording(stream) || !registered.with(|registered| registered.iter().any(contains)) {
                return reference.copy(copy, stream);
            }
            let before = last.with(|last| last.replace(stream));
            if let Some(other) = before.filter(|other| *other != stream && reference.is_pending(*other)) {
                reference.let_wait(stream, other)?;
            }
            reference.copy(copy, stream)
        });
    };

    in "stream.destroy-pending":
    "last-launch-lost" needs [has::capture]: "Submits a launch with the next call, and loses it if that call destroys the stream." => |h| {
        let (held, living) = (Deferred::default(), Shared::<HashSet<GraphExecId>>::default());
        let (launched, gone, made, ended) = (held.clone(), held.clone(), living.clone(), living.clone());
        h.backend.instantiate_graph(move |reference, graph| {
            let executable = reference.instantiate_graph(graph)?;
            made.with(|living| living.insert(executable));
            Ok(executable)
        });
        h.backend.destroy_graph_exec(move |reference, executable| {
            ended.with(|living| living.remove(&executable));
            reference.destroy_graph_exec(executable)
        });
        h.backend.launch_graph(move |reference, executable, stream| {
            let is_right = living.with(|living| living.contains(&executable)) && executable.device() == stream.device();
            if !is_right || reference.is_capturing(stream)? {
                return reference.launch_graph(executable, stream);
            }
            launched.defer(stream, move |reference: &Reference| reference.launch_graph(executable, stream));
            Ok(())
        });
        h.backend.destroy_stream(move |reference, stream| {
            gone.forget(stream);
            reference.destroy_stream(stream)
        });
        h.before(move |reference, method, _| if method == "destroy_stream" { Ok(()) } else { held.release(reference, None) });
    };
    "streams-take-their-work-along": "Destroys pending work with its stream." => |h| {
        let held = Deferred::default();
        let (filled, recorded, gone, going) = (held.clone(), held.clone(), held.clone(), held.clone());
        h.backend.fill(move |reference, fill, stream| {
            if !filled.has(stream) && !reference.is_pending(stream) {
                return reference.fill(fill, stream);
            }
            let fill = *fill;
            filled.defer(stream, move |reference| reference.fill(&fill, stream));
            Ok(())
        });
        h.backend.record_event(move |reference, event, stream| {
            if !recorded.has(stream) {
                return reference.record_event(event, stream);
            }
            recorded.defer(stream, move |reference| reference.record_event(event, stream));
            Ok(())
        });
        h.backend.destroy_stream(move |reference, stream| {
            gone.forget(stream);
            reference.destroy_stream(stream)
        });
        h.before(move |reference, method, _| match method {
            "fill" | "record_event" | "destroy_stream" => Ok(()),
            "query_stream" => Ok(()),
            _ => going.release(reference, None),
        });
        h.backend.query_stream(move |reference, stream| match held.has(stream) {
            true => Ok(Completion::Pending),
            false => reference.query_stream(stream),
        });
    };

    in "stream.query":
    "always-complete": "Reports a stream as complete without a check." =>
        |h| h.backend.query_stream(|reference, stream| reference.query_stream(stream).map(|_| Completion::Complete));
    "fresh-streams-pending": "Reports a stream as pending before its first use." => |h| {
        let used = Shared::<HashSet<StreamId>>::default();
        let seen = used.clone();
        h.before(move |_, method, stream| {
            if let Some(stream) = stream.filter(|_| method != "query_stream") {
                used.with(|used| used.insert(stream));
            }
            Ok(())
        });
        h.backend.query_stream(move |reference, stream| {
            let completion = reference.query_stream(stream)?;
            Ok(if seen.with(|seen| seen.contains(&stream)) { completion } else { Completion::Pending })
        });
    };
    "waits-for-other-devices-left-out" needs [TWO_DEVICES]: "Reports a stream as complete while its only work is a wait for another device." =>
        |h| complete_in_lone_waits(h, |stream, event| stream.device() != event.device(), Duration::ZERO);
    "pending-for-others": "Reports a stream as pending while any other one is." => |h| {
        let streams = living_streams(h);
        h.backend.query_stream(move |reference, stream| {
            let completion = reference.query_stream(stream)?;
            let others = streams.with(|streams| streams.clone());
            let busy = others.into_iter().any(|other| other != stream && reference.is_pending(other));
            Ok(if busy { Completion::Pending } else { completion })
        });
    };

    "reached-waits-left-out" needs [TWO_DEVICES]: "Reports a stream as complete once it has got to a wait for another device." =>
        |h| complete_in_lone_waits(h, |stream, event| stream.device() != event.device(), Duration::from_millis(1));
    "pending-after-refused-rows": "Reports a stream as pending after a refused copy of rows, until it is waited for." => |h| {
        let stuck = Shared::<HashSet<StreamId>>::default();
        let (refused, waited) = (stuck.clone(), stuck.clone());
        h.backend.copy_2d(move |reference, copy, stream| {
            let copied = reference.copy_2d(copy, stream);
            if is(&copied, ErrorKind::InvalidArgument) {
                refused.with(|stuck| stuck.insert(stream));
            }
            copied
        });
        h.backend.synchronize_stream(move |reference, stream| {
            waited.with(|stuck| stuck.remove(&stream));
            reference.synchronize_stream(stream)
        });
        h.backend.query_stream(move |reference, stream| {
            let completion = reference.query_stream(stream)?;
            Ok(if stuck.with(|stuck| stuck.contains(&stream)) { Completion::Pending } else { completion })
        });
    };

    "waits-are-no-work": "Reports a stream whose last call is a wait as it was before that call." =>
        |h| complete_in_lone_waits(h, |_, _| true, Duration::ZERO);

    "rows-are-no-work": "Reports a stream that was idle as complete while it copies rows." => |h| {
        let idle = Shared::<HashSet<StreamId>>::default();
        let (given, waited) = (idle.clone(), idle.clone());
        h.before(move |_, method, stream| {
            if let Some(stream) = stream.filter(|_| !matches!(method, "query_stream" | "copy_2d")) {
                given.with(|given| given.remove(&stream));
            }
            Ok(())
        });
        h.backend.synchronize_stream(move |reference, stream| {
            reference.synchronize_stream(stream)?;
            if !reference.is_pending(stream) {
                waited.with(|idle| idle.insert(stream));
            }
            Ok(())
        });
        h.backend.query_stream(move |reference, stream| {
            let completion = reference.query_stream(stream)?;
            Ok(if idle.with(|idle| idle.contains(&stream)) { Completion::Complete } else { completion })
        });
    };

    "launches-complete-once-begun" needs [has::capture]: "Reports a stream as complete once its last work has begun, if that is a launch." => |h| {
        h.settles = true;
        // Events behind the work before each launch that is the last work of its stream.
        let begun = Shared::<HashMap<StreamId, EventId>>::default();
        let (launched, known, counted) = (begun.clone(), begun.clone(), begun.clone());
        h.before(move |reference, method, stream| {
            let ended = match stream {
                Some(stream) if !matches!(method, "query_stream" | "is_capturing") => begun.with(|begun| begun.remove(&stream)),
                _ => None,
            };
            ended.map_or(Ok(()), |event| reference.destroy_event(event))
        });
        h.backend.launch_graph(move |reference, graph, stream| {
            if reference.is_recording(stream) {
                return reference.launch_graph(graph, stream);
            }
            let event = reference.create_event(stream.device(), &EventOptions::new())?;
            let enqueued = reference.record_event(event, stream).and_then(|()| reference.launch_graph(graph, stream));
            if enqueued.is_err() {
                reference.destroy_event(event)?;
            } else {
                launched.with(|begun| begun.insert(stream, event));
            }
            enqueued
        });
        h.backend.query_stream(move |reference, stream| match known.with(|begun| begun.get(&stream).copied()) {
            Some(event) => reference.query_event(event),
            None => reference.query_stream(stream),
        });
        h.count(move |live| live.events -= counted.with(|begun| begun.len() as u64));
    };

    in "stream.synchronize":
    "copies-on-the-device-not-waited-for": "Does not wait if the stream's last work is a copy within the device." =>
        |h| skip_copies(h, |copy| Way::of(copy) == Way::OnDevice);
    "short-copies-not-waited-for": "Does not wait if the stream's last work is a copy to the host of less than 1 MiB." =>
        |h| skip_copies(h, |copy| Way::of(copy) == Way::ToHost && copy.bytes < 1 << 20);
    "streams-waited-for-briefly": "Waits for a stream for 3 milliseconds at most." => |h| {
        h.settles = true;
        h.backend.synchronize_stream(|reference, stream| {
            let begun = Instant::now();
            while reference.query_stream(stream)? == Completion::Pending
                && begun.elapsed() < Duration::from_millis(3)
            {
                std::thread::yield_now();
            }
            Ok(())
        });
    };

    in "stream.synchronize-ends":
    "streams-waited-for-until-idle": "Waits for a stream until it is idle." =>
        |h| h.backend.synchronize_stream(|reference, stream| {
            reference.synchronize_stream(stream)?;
            until_idle(reference, &[stream])
        });

    "urgent-streams-waited-for-until-idle" needs [has::stream_priority]: "Waits for a stream of high priority until it is idle." => |h| {
        let urgent = Shared::<HashSet<StreamId>>::default();
        let made = urgent.clone();
        h.backend.create_stream(move |reference, device, options| {
            let stream = reference.create_stream(device, options)?;
            if options.priority == StreamPriority::High {
                made.with(|urgent| urgent.insert(stream));
            }
            Ok(stream)
        });
        h.backend.synchronize_stream(move |reference, stream| {
            reference.synchronize_stream(stream)?;
            match urgent.with(|urgent| urgent.contains(&stream)) {
                true => until_idle(reference, &[stream]),
                false => Ok(()),
            }
        });
    };

    "default-streams-waited-for-until-idle" needs [has::legacy_default_stream]: "Waits for the legacy default stream until it is idle." =>
        |h| h.backend.synchronize_stream(|reference, stream| {
            reference.synchronize_stream(stream)?;
            if stream.is_legacy_default() { until_idle(reference, &[stream]) } else { Ok(()) }
        });

    in "devices.synchronize-ends":
    "every-device-waited-for" needs [TWO_DEVICES]: "Waits for each device instead of one." =>
        |h| h.backend.synchronize_device(|reference, device| {
            reference.synchronize_device(device)?;
            (0..reference.device_count()).try_for_each(|device| reference.synchronize_device(device))
        });
    "devices-waited-for-until-idle": "Waits for a device until each of its streams is idle." => |h| {
        let streams = living_streams(h);
        h.backend.synchronize_device(move |reference, device| {
            reference.synchronize_device(device)?;
            let living = streams.with(|streams| streams.clone());
            let own: Vec<StreamId> = living.into_iter().filter(|stream| stream.device() == device).collect();
            until_idle(reference, &own)
        });
    };

    in "devices.synchronize":
    "devices-not-waited-for": "Returns at once from a wait for a device." => |h| {
        h.settles = true;
        h.backend.synchronize_device(|reference, device| reference.device_info(device).map(drop));
    };
    "one-stream-of-the-device": "Waits for the oldest stream of a device." => |h| {
        h.settles = true;
        let streams = living_streams(h);
        h.backend.synchronize_device(move |reference, device| {
            reference.device_info(device)?;
            let oldest = streams.with(|streams| streams.iter().copied().find(|stream| stream.device() == device));
            oldest.map_or(Ok(()), |stream| reference.wait_for(stream))
        });
    };
    "default-streams-of-other-threads" needs [has::per_thread_default_stream]:
        "Waits for each living stream of a device, and for no default stream of another thread." => |h| {
        h.settles = true;
        let streams = living_streams(h);
        let threads = Shared::<HashSet<ThreadId>>::default();
        let users = threads.clone();
        h.before(move |_, _, stream| {
            if stream.is_some_and(StreamId::is_per_thread_default) {
                users.with(|users| users.insert(std::thread::current().id()));
            }
            Ok(())
        });
        h.backend.synchronize_device(move |reference, device| {
            let here = std::thread::current().id();
            if !threads.with(|threads| threads.iter().any(|thread| *thread != here)) {
                return reference.synchronize_device(device);
            }
            reference.device_info(device)?;
            let living = streams.with(|streams| streams.clone());
            living.into_iter().filter(|stream| stream.device() == device).try_for_each(|stream| reference.wait_for(stream))
        });
    };
    "streams-of-the-calling-thread": "Waits for the streams that the calling thread made." => |h| {
        h.settles = true;
        let streams = Shared::<HashMap<StreamId, ThreadId>>::default();
        let (made, gone) = (streams.clone(), streams.clone());
        h.backend.create_stream(move |reference, device, options| {
            let stream = reference.create_stream(device, options)?;
            made.with(|made| made.insert(stream, std::thread::current().id()));
            Ok(stream)
        });
        h.backend.destroy_stream(move |reference, stream| {
            gone.with(|gone| gone.remove(&stream));
            reference.destroy_stream(stream)
        });
        h.backend.synchronize_device(move |reference, device| {
            reference.device_info(device)?;
            let here = std::thread::current().id();
            let own: Vec<StreamId> = streams.with(|streams| {
                let own = streams.iter().filter(|(stream, thread)| stream.device() == device && **thread == here);
                own.map(|(stream, _)| *stream).collect()
            });
            own.into_iter().try_for_each(|stream| reference.wait_for(stream))
        });
    };
    "the-other-device" needs [TWO_DEVICES]: "Waits for the first device instead of the requested one." => |h| {
        h.settles = true;
        h.backend.synchronize_device(|reference, device| {
            reference.device_info(device)?;
            reference.synchronize_device(0)
        });
    };
}

/// Does not wait for a stream whose last work is a copy that is chosen.
fn skip_copies(h: &mut Hooks, chosen: fn(&MemoryCopy) -> bool) {
    h.settles = true;
    let skipped = Shared::<HashSet<StreamId>>::default();
    let (given, last) = (skipped.clone(), skipped.clone());
    h.before(move |_, method, stream| {
        if let Some(stream) = stream.filter(|_| !matches!(method, "query_stream" | "synchronize_stream")) {
            given.with(|given| given.remove(&stream));
        }
        Ok(())
    });
    h.backend.copy(move |reference, copy, stream| {
        reference.copy(copy, stream)?;
        if chosen(copy) {
            last.with(|last| last.insert(stream));
        }
        Ok(())
    });
    h.backend.synchronize_stream(move |reference, stream| match skipped.with(|skipped| skipped.contains(&stream)) {
        true => reference.query_stream(stream).map(drop),
        false => reference.synchronize_stream(stream),
    });
}

/// Holds a fill back until the copy after it, on streams that are chosen.
fn swap(h: &mut Hooks, chosen: impl Fn(StreamId) -> bool + Send + Sync + 'static) {
    let held = Deferred::default();
    let (filled, copied) = (held.clone(), held.clone());
    h.backend.fill(move |reference, fill, stream| {
        if !chosen(stream) || reference.is_recording(stream) {
            return reference.fill(fill, stream);
        }
        // Refused here if at all.
        reference.query_stream(stream)?;
        let fill = *fill;
        filled.defer(stream, move |reference: &Reference| reference.fill(&fill, stream));
        Ok(())
    });
    h.backend.copy(move |reference, copy, stream| {
        reference.copy(copy, stream)?;
        copied.release(reference, Some(stream))
    });
    h.before(move |reference, method, stream| if method == "copy" { Ok(()) } else { held.release(reference, stream) });
}

/// Waits until the streams are idle. A stream that is destroyed meanwhile counts as idle.
fn until_idle(reference: &Reference, streams: &[StreamId]) -> highwater_hal::Result<()> {
    while streams.iter().any(|stream| reference.is_pending(*stream)) {
        std::thread::yield_now();
    }
    Ok(())
}

/// Reports a stream that was idle as complete from a time after a wait that `counts`, until it gets other work.
fn complete_in_lone_waits(h: &mut Hooks, counts: fn(StreamId, EventId) -> bool, after: Duration) {
    let waiting = Shared::<HashMap<StreamId, Instant>>::default();
    let (given, made) = (waiting.clone(), waiting.clone());
    h.before(move |_, method, stream| {
        if let Some(stream) = stream.filter(|_| !matches!(method, "query_stream" | "stream_wait_event")) {
            given.with(|waiting| waiting.remove(&stream));
        }
        Ok(())
    });
    h.backend.stream_wait_event(move |reference, stream, event| {
        let was_idle = !reference.is_recording(stream) && !reference.is_pending(stream);
        reference.stream_wait_event(stream, event)?;
        if was_idle && counts(stream, event) {
            made.with(|waiting| waiting.insert(stream, Instant::now()));
        }
        Ok(())
    });
    h.backend.query_stream(move |reference, stream| {
        let completion = reference.query_stream(stream)?;
        let since = waiting.with(|waiting| waiting.get(&stream).copied());
        Ok(if since.is_some_and(|since| since.elapsed() >= after) { Completion::Complete } else { completion })
    });
}
