//! Ids: stale, foreign and forged ids are refused, and objects are counted.

use std::num::NonZeroU32;

use highwater_hal::numbers::Coded;
use highwater_hal::{
    Backend, BackendTag, BlasKind, CaptureMode, DeviceMemoryKind, EventId, EventOptions, GraphExecId, GraphId,
    HostMemoryKind, HostOptions, IdParts, LiveObjects, ObjectId, PhysicalMemoryOptions, StreamId, StreamOptions,
    StreamPriority, Transport,
};

use super::blas::kinds;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{
    Addresses, Block, Capture, DEVICE, Event, Handle, PhysicalMemory, Pinned, Registered, RegisteredFile, Stream,
};

cases! {
    group "ids";
    stale_streams_are_refused: ["backend.ids-checked", "stream.destroy-stale"];
    stale_events_are_refused: ["backend.ids-checked", "event.destroy-stale"];
    foreign_ids_are_refused: ["backend.ids-checked"];
    forged_ids_are_refused: ["backend.ids-checked"];
    ids_that_name_another_device_are_refused: ["backend.ids-checked"] needs [TWO_DEVICES];
    forged_graphs_are_refused: ["backend.ids-checked"] needs [has::capture];
    stale_ids_stay_stale_when_slots_are_used_again: ["backend.ids-checked", "stream.destroy-stale", "event.destroy-stale"];
    refused_work_is_not_done: ["backend.ids-checked"];
    handles_refuse_bad_streams: ["backend.ids-checked"];
    streams_and_events_count: ["backend.live-objects"];
    memory_counts: ["backend.live-objects"];
    handles_count: ["backend.live-objects", "blas.destroyed"];
    every_kind_of_object_counts: ["backend.live-objects"];
    executable_graphs_count_without_their_graph: ["backend.live-objects", "capture.destroy-graph"] needs [has::capture];
    foreign_objects_have_an_id_for_each_call: ["stream.foreign-kept", "event.foreign-kept", "backend.ids-checked"]
        needs [has::foreign_objects];
}

/// Checks that every call that takes a stream refuses this one without effect.
fn stream_is_refused(backend: &dyn Backend, id: StreamId, what: &str) -> CaseResult {
    let event = Event::new(backend)?;
    let block = Block::filled(backend, 256, 1)?;
    let stream = Stream::borrowed(backend, id);
    let before = backend.live_objects();
    check_error!(backend.query_stream(id), InvalidHandle, "query_stream of a {what} id");
    check_error!(backend.synchronize_stream(id), InvalidHandle, "synchronize_stream of a {what} id");
    check_error!(backend.stream_wait_event(id, event.id()), InvalidHandle, "stream_wait_event of a {what} id");
    check_error!(backend.record_event(event.id(), id), InvalidHandle, "record_event on a {what} id");
    check_error!(stream.set(block.all(), 2), InvalidHandle, "fill on a {what} id");
    check_error!(stream.copy(block.span(0..128), block.span(128..256)), InvalidHandle, "copy on a {what} id");
    let capabilities = backend.capabilities(DEVICE)?;
    if capabilities.stream_ordered_memory {
        let kind = DeviceMemoryKind::StreamOrdered(id);
        check_error!(Block::with_kind(backend, DEVICE, 256, kind), InvalidHandle, "allocate on a {what} id");
    }
    if capabilities.foreign_objects {
        check_error!(backend.raw_stream(id), InvalidHandle, "raw_stream of a {what} id");
    }
    if capabilities.capture {
        let mode = highwater_hal::CaptureMode::Relaxed;
        check_error!(backend.begin_capture(id, mode), InvalidHandle, "begin_capture of a {what} id");
        check_error!(crate::device::end_capture(backend, id), InvalidHandle, "end_capture of a {what} id");
        check_error!(backend.is_capturing(id), InvalidHandle, "is_capturing of a {what} id");
    }
    check_error!(backend.destroy_stream(id), InvalidHandle, "destroy_stream of a {what} id");
    check_eq!(backend.live_objects(), before, "live objects after calls with a {what} id");
    check!(event.query()?.is_complete(), "a record on a {what} id left its mark on the event");
    check!(block.read()? == [1; 256], "work on a {what} id was executed");
    Ok(())
}

/// Checks that every call that takes an event refuses this one.
fn event_is_refused(backend: &dyn Backend, id: EventId, what: &str) -> CaseResult {
    let stream = Stream::new(backend)?;
    let before = backend.live_objects();
    check_error!(backend.query_event(id), InvalidHandle, "query_event of a {what} id");
    check_error!(backend.synchronize_event(id), InvalidHandle, "synchronize_event of a {what} id");
    check_error!(backend.record_event(id, stream.id()), InvalidHandle, "record_event of a {what} id");
    check_error!(backend.stream_wait_event(stream.id(), id), InvalidHandle, "stream_wait_event of a {what} id");
    let capabilities = backend.capabilities(DEVICE)?;
    if capabilities.event_timing {
        check_error!(backend.event_elapsed_ns(id, id), InvalidHandle, "event_elapsed_ns of a {what} id");
    }
    if capabilities.foreign_objects {
        check_error!(backend.raw_event(id), InvalidHandle, "raw_event of a {what} id");
    }
    check_error!(backend.destroy_event(id), InvalidHandle, "destroy_event of a {what} id");
    check_eq!(backend.live_objects(), before, "live objects after calls with a {what} id");
    stream.synchronize()?;
    Ok(())
}

fn stale_streams_are_refused(backend: &dyn Backend) -> CaseResult {
    let stale = Stream::new(backend)?.destroy()?;
    stream_is_refused(backend, stale, "stale")
}

fn stale_events_are_refused(backend: &dyn Backend) -> CaseResult {
    let stale = Event::new(backend)?.destroy()?;
    event_is_refused(backend, stale, "stale")
}

fn foreign_ids_are_refused(backend: &dyn Backend) -> CaseResult {
    let tag = BackendTag::next();
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    stream_is_refused(backend, forge::<StreamId>(IdParts { tag, ..stream.id().parts() }), "foreign")?;
    event_is_refused(backend, forge::<EventId>(IdParts { tag, ..event.id().parts() }), "foreign")?;
    stream_is_refused(backend, StreamId::legacy_default(tag, DEVICE), "foreign default stream's")
}

/// Creates an id that the backend did not issue.
pub(crate) fn forge<I: ObjectId>(parts: IdParts) -> I {
    // SAFETY: the suite has the backend to itself; no runtime is made for it, so no id is kept from the cases.
    unsafe { I::from_parts(parts) }
}

/// Returns the parts of an id, changed in each way that no issued id has.
fn forged<I: ObjectId>(id: I) -> [I; 3] {
    let parts = id.parts();
    let next = parts.generation.checked_add(1).unwrap_or(NonZeroU32::MIN);
    [
        forge::<I>(IdParts { generation: next, ..parts }),
        forge::<I>(IdParts { slot: 1 << 30, ..parts }),
        forge::<I>(IdParts { device: u32::MAX, ..parts }),
    ]
}

fn forged_ids_are_refused(backend: &dyn Backend) -> CaseResult {
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    for id in forged(stream.id()) {
        stream_is_refused(backend, id, "forged")?;
    }
    for id in forged(event.id()) {
        event_is_refused(backend, id, "forged")?;
    }
    Ok(())
}

fn ids_that_name_another_device_are_refused(backend: &dyn Backend) -> CaseResult {
    let (stream, event) = (Stream::on(backend, 0)?, Event::on(backend, 0)?);
    stream_is_refused(backend, forge::<StreamId>(IdParts { device: 1, ..stream.id().parts() }), "forged")?;
    event_is_refused(backend, forge::<EventId>(IdParts { device: 1, ..event.id().parts() }), "forged")
}

fn forged_graphs_are_refused(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let parts = IdParts { slot: 1 << 30, ..stream.id().parts() };
    let (graph, exec) = (forge::<GraphId>(parts), forge::<GraphExecId>(parts));
    check_error!(backend.instantiate_graph(graph), InvalidHandle, "instantiate_graph of a forged id");
    check_error!(backend.destroy_graph(graph), InvalidHandle, "destroy_graph of a forged id");
    check_error!(backend.destroy_graph_exec(exec), InvalidHandle, "destroy_graph_exec of a forged id");
    // SAFETY: a graph that does not exist has recorded no memory.
    let launched = unsafe { backend.launch_graph(exec, stream.id()) };
    check_error!(launched, InvalidHandle, "launch_graph of a forged id");
    Ok(())
}

fn stale_ids_stay_stale_when_slots_are_used_again(backend: &dyn Backend) -> CaseResult {
    let (mut streams, mut events) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        streams.push(Stream::new(backend)?.destroy()?);
        events.push(Event::new(backend)?.destroy()?);
    }
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    for stale in streams {
        check!(stale != stream.id(), "the id {stale:?} was issued again");
        check_error!(backend.query_stream(stale), InvalidHandle, "query_stream of an id whose slot is used again");
        check_error!(backend.destroy_stream(stale), InvalidHandle, "destroy_stream of an id whose slot is used again");
    }
    for stale in events {
        check!(stale != event.id(), "the id {stale:?} was issued again");
        check_error!(backend.query_event(stale), InvalidHandle, "query_event of an id whose slot is used again");
        check_error!(backend.destroy_event(stale), InvalidHandle, "destroy_event of an id whose slot is used again");
    }
    check!(stream.query()?.is_complete() && event.query()?.is_complete(), "the objects that live were disturbed");
    Ok(())
}

fn refused_work_is_not_done(backend: &dyn Backend) -> CaseResult {
    let living = Stream::new(backend)?;
    let stale = Stream::borrowed(backend, Stream::new(backend)?.destroy()?);
    let block = Block::filled(backend, 4096, 7)?;
    let pinned = Pinned::holding(backend, &[9; 4096])?;
    check_error!(stale.copy(block.all(), pinned.all()), InvalidHandle, "copy to the device on a stale stream");
    check_error!(stale.copy(pinned.all(), block.all()), InvalidHandle, "copy to the host on a stale stream");
    living.synchronize()?;
    check!(block.read()? == [7; 4096] && pinned.read()? == [9; 4096], "work on a stale stream was executed");
    Ok(())
}

fn handles_refuse_bad_streams(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let stale = Stream::new(backend)?.destroy()?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    check_error!(handle.raw_mut().set_stream(stale), InvalidHandle, "set_stream to a stale id");
    for id in forged(stream.id()) {
        check_error!(handle.raw_mut().set_stream(id), InvalidHandle, "set_stream to a forged id");
    }
    let foreign = forge::<StreamId>(IdParts { tag: BackendTag::next(), ..stream.id().parts() });
    check_error!(handle.raw_mut().set_stream(foreign), InvalidHandle, "set_stream to a foreign id");
    Ok(())
}

fn streams_and_events_count(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    let streams: Vec<Stream<'_>> = (0..3).map(|_| Stream::new(backend)).collect::<Result<_, _>>()?;
    let events: Vec<Event<'_>> = (0..5).map(|_| Event::new(backend)).collect::<Result<_, _>>()?;
    let with = backend.live_objects();
    check_eq!((with.streams, with.events), (before.streams + 3, before.events + 5), "live streams and events");
    drop((streams, events));
    check_eq!(backend.live_objects(), before, "live objects when all is destroyed");
    Ok(())
}

fn memory_counts(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    let blocks: Vec<Block<'_>> = (0..4).map(|_| Block::new(backend, 1000)).collect::<Result<_, _>>()?;
    let pinned: Vec<Pinned<'_>> = (0..2).map(|_| Pinned::new(backend, 1000)).collect::<Result<_, _>>()?;
    let with = backend.live_objects();
    check_eq!(with.allocations, before.allocations + 4, "live blocks of device memory");
    check_eq!(with.host_allocations, before.host_allocations + 2, "live blocks of page-locked memory");
    drop((blocks, pinned));
    check_eq!(backend.live_objects(), before, "live objects when all is freed");
    Ok(())
}

fn handles_count(backend: &dyn Backend) -> CaseResult {
    let counted = || backend.live_objects().handles;
    let none = counted();
    let stream = Stream::new(backend)?;
    for &kind in kinds(backend)? {
        let dropped = Handle::new(backend, kind, &stream)?;
        let mut destroyed = Handle::new(backend, kind, &stream)?;
        check_eq!((destroyed.raw_mut().kind(), destroyed.raw_mut().device()), (kind, DEVICE), "kind and device");
        check_eq!(counted(), none + 2, "live handles with two {kind:?} handles");
        destroyed.raw_mut().destroy().map_err(Failure::from)?;
        check_eq!(counted(), none + 1, "live handles after destroy of a {kind:?} handle");
        check_error!(destroyed.raw_mut().destroy(), InvalidHandle, "a second destroy");
        check_error!(destroyed.raw_mut().set_stream(stream.id()), InvalidHandle, "set_stream after destroy");
        drop(destroyed);
        check_eq!(counted(), none + 1, "live handles after the destroyed one was dropped");
        drop(dropped);
        check_eq!(counted(), none, "live handles after drop");
    }
    // A handle that is only dropped, as owning types do, is destroyed too.
    let boxed = backend.create_blas_handle(DEVICE, &highwater_hal::BlasOptions::new(BlasKind::Blas))?;
    check_eq!(counted(), none + 1, "live handles with one that was not bound");
    drop(boxed);
    check_eq!(counted(), none, "live handles after a drop without destroy");
    Ok(())
}

/// An object that is given back when it is dropped.
trait Made {}

impl<T> Made for T {}

/// A kind of object: its name, a function that makes one, and the counts that one adds.
struct Kind<'b> {
    what: &'static str,
    make: Box<dyn Fn() -> highwater_hal::Result<Box<dyn Made + 'b>> + 'b>,
    adds: LiveObjects,
}

impl<'b> Kind<'b> {
    fn new<T: 'b>(
        what: &'static str,
        add: fn(&mut LiveObjects),
        make: impl Fn() -> highwater_hal::Result<T> + 'b,
    ) -> Self {
        let mut adds = LiveObjects::default();
        add(&mut adds);
        Self { what, make: Box::new(move || Ok(Box::new(make()?) as Box<dyn Made + 'b>)), adds }
    }
}

/// Returns every kind of object that the device has.
fn every_kind<'b>(backend: &'b dyn Backend, stream: &'b Stream<'b>) -> Result<Vec<Kind<'b>>, Failure> {
    let can = backend.capabilities(DEVICE)?;
    let block = |kind| move || Block::with_kind(backend, DEVICE, 4096, kind);
    let pinned = |options: HostOptions| move || Pinned::with_options(backend, 64, &options);
    let event = |options: EventOptions| move || Event::with_options(backend, DEVICE, &options);
    let mut all = vec![
        Kind::new("a stream", |live| live.streams = 1, || Stream::new(backend)),
        Kind::new("an event", |live| live.events = 1, event(EventOptions::new())),
        Kind::new("a block", |live| live.allocations = 1, block(DeviceMemoryKind::Plain)),
        Kind::new("page-locked memory", |live| live.host_allocations = 1, pinned(HostOptions::new())),
    ];
    for &kind in kinds(backend)? {
        all.push(Kind::new("a handle", |live| live.handles = 1, move || Handle::new(backend, kind, stream)));
    }
    if can.stream_priority {
        for priority in [StreamPriority::Low, StreamPriority::High] {
            let options = StreamOptions::new().with_priority(priority);
            let make = move || Stream::with_options(backend, DEVICE, &options);
            all.push(Kind::new("a stream with a priority", |live| live.streams = 1, make));
        }
    }
    if can.event_timing {
        all.push(Kind::new("an event with timing", |live| live.events = 1, event(EventOptions::new().with_timing())));
    }
    if can.interprocess_events {
        let options = EventOptions::new().with_interprocess();
        all.push(Kind::new("an event for other processes", |live| live.events = 1, event(options)));
    }
    if can.foreign_objects {
        let (raw_stream, own) = (backend.raw_stream(stream.id())?, Event::new(backend)?);
        let raw_event = backend.raw_event(own.id())?;
        // SAFETY: the case keeps the stream alive until the ids are gone.
        let wrap = move || Ok(Stream::adopted(backend, unsafe { backend.stream_from_raw(DEVICE, raw_stream)? }));
        all.push(Kind::new("an id of a foreign stream", |_| {}, wrap));
        let wrap = move || {
            let _ = &own;
            // SAFETY: the closure keeps the event alive, and it lives longer than the ids.
            Ok(Event::adopted(backend, unsafe { backend.event_from_raw(DEVICE, raw_event)? }))
        };
        all.push(Kind::new("an id of a foreign event", |_| {}, wrap));
    }
    if can.stream_ordered_memory {
        let kind = DeviceMemoryKind::StreamOrdered(stream.id());
        all.push(Kind::new("a stream-ordered block", |live| live.allocations = 1, block(kind)));
    }
    for &transport in Transport::ALL.iter().filter(|&&transport| can.ipc_transports.contains(transport)) {
        if can.shareable_memory {
            let kind = DeviceMemoryKind::Shareable(transport);
            all.push(Kind::new("a shareable block", |live| live.allocations = 1, block(kind)));
        }
    }
    if can.write_combined {
        let options = HostOptions::new().with_kind(HostMemoryKind::WriteCombined);
        all.push(Kind::new("write-combined memory", |live| live.host_allocations = 1, pinned(options)));
    }
    if can.host_register {
        let make = || Registered::new(backend, &[1; 64]);
        all.push(Kind::new("a registration", |live| live.host_allocations = 1, make));
    }
    if can.host_register && can.host_register_read_only {
        let make = || RegisteredFile::new(backend, &[1; 1 << 16]);
        all.push(Kind::new("a read-only registration", |live| live.host_allocations = 1, make));
    }
    if can.capture {
        let record = || Capture::begin(stream, CaptureMode::ThreadLocal)?.end(&[]);
        all.push(Kind::new("a graph", |live| live.graphs = 1, record));
        let graph = record()?;
        all.push(Kind::new("an executable graph", |live| live.graphs = 1, move || graph.instantiate()));
    }
    if can.mapped_memory {
        let piece = can.mapped_memory_granularity;
        let make = move || Addresses::new(backend, DEVICE, piece);
        all.push(Kind::new("reserved addresses", |live| live.reservations = 1, make));
        let make = move || PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(piece));
        all.push(Kind::new("physical memory", |live| live.physical_memory = 1, make));
        let make = move || Block::mapped(backend, DEVICE, &[piece]);
        all.push(Kind::new("mapped memory whose id was destroyed", |live| live.reservations = 1, make));
    }
    Ok(all)
}

/// Makes two of each kind, gives back one, makes a third, and gives back both.
fn every_kind_of_object_counts(backend: &dyn Backend) -> CaseResult {
    let at_first = backend.live_objects();
    {
        let stream = Stream::new(backend)?;
        for Kind { what, make, adds } in every_kind(backend, &stream)? {
            let before = backend.live_objects();
            let counts = |number: u64, when: &str| -> CaseResult {
                let sum = |before: u64, adds: u64| before + number * adds;
                let mut expected = before;
                expected.streams = sum(before.streams, adds.streams);
                expected.events = sum(before.events, adds.events);
                expected.handles = sum(before.handles, adds.handles);
                expected.allocations = sum(before.allocations, adds.allocations);
                expected.host_allocations = sum(before.host_allocations, adds.host_allocations);
                expected.graphs = sum(before.graphs, adds.graphs);
                expected.reservations = sum(before.reservations, adds.reservations);
                expected.physical_memory = sum(before.physical_memory, adds.physical_memory);
                let live = backend.live_objects();
                if number > 0 {
                    // The counts of descriptors and files differ between backends.
                    (expected.descriptors, expected.shared_files) = (live.descriptors, live.shared_files);
                }
                check_eq!(live, expected, "live objects {when} {what}");
                Ok(())
            };
            let first = make()?;
            counts(1, "with")?;
            let second = make()?;
            counts(2, "with two, each")?;
            drop(first);
            counts(1, "with one of two left, each")?;
            let third = make()?;
            counts(2, "with two again, each")?;
            drop((second, third));
            counts(0, "without")?;
        }
    }
    check_eq!(backend.live_objects(), at_first, "live objects when all is given back");
    Ok(())
}

/// A graph ends when it is destroyed, and not with its executable graphs.
fn executable_graphs_count_without_their_graph(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let before = backend.live_objects();
    let counts = |graphs: u64, when: &str| -> CaseResult {
        let mut expected = before;
        expected.graphs += graphs;
        check_eq!(backend.live_objects(), expected, "live objects {when}");
        Ok(())
    };
    let graph = Capture::begin(&stream, CaptureMode::ThreadLocal)?.end(&[])?;
    let (first, second) = (graph.instantiate()?, graph.instantiate()?);
    counts(3, "with a graph and two executable graphs")?;
    graph.destroy()?;
    counts(2, "with two executable graphs whose graph was destroyed")?;
    first.destroy()?;
    counts(1, "with one executable graph whose graph was destroyed")?;
    second.launch(&stream)?;
    stream.synchronize()?;
    counts(1, "after a launch of an executable graph whose graph was destroyed")?;
    second.destroy()?;
    counts(0, "after the last executable graph was destroyed")
}

/// Wraps one stream and one event twice. The end of one id leaves the other.
fn foreign_objects_have_an_id_for_each_call(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    let (raw_stream, raw_event) = (backend.raw_stream(stream.id())?, backend.raw_event(event.id())?);
    let live = backend.live_objects();
    // SAFETY: the stream lives longer than its ids, which the guards destroy.
    let wrap = || unsafe { backend.stream_from_raw(DEVICE, raw_stream) }.map(|id| Stream::adopted(backend, id));
    let streams = [wrap()?, wrap()?];
    // SAFETY: as above, for the event.
    let wrap = || unsafe { backend.event_from_raw(DEVICE, raw_event) }.map(|id| Event::adopted(backend, id));
    let events = [wrap()?, wrap()?];
    check_eq!(backend.live_objects(), live, "live objects with ids of foreign objects");
    check!(streams[0].id() != streams[1].id(), "two calls of `stream_from_raw` gave one id");
    check!(events[0].id() != events[1].id(), "two calls of `event_from_raw` gave one id");
    let block = Block::filled(backend, 256, 1)?;
    let works = |stream: &Stream<'_>, event: &Event<'_>, byte: u8| -> CaseResult {
        stream.set(block.all(), byte)?;
        stream.record(event)?;
        event.synchronize()?;
        check!(event.query()?.is_complete() && stream.query()?.is_complete(), "a foreign object is pending");
        check!(block.read()? == [byte; 256], "work on the id of a foreign stream was not executed");
        Ok(())
    };
    let ([first_stream, second_stream], [first_event, second_event]) = (streams, events);
    works(&first_stream, &second_event, 2)?;
    works(&second_stream, &first_event, 3)?;
    let (stale_stream, stale_event) = (first_stream.destroy()?, first_event.destroy()?);
    works(&second_stream, &second_event, 4)?;
    check_error!(
        backend.query_stream(stale_stream),
        InvalidHandle,
        "query_stream of a destroyed id of a foreign stream"
    );
    check_error!(backend.query_event(stale_event), InvalidHandle, "query_event of a destroyed id of a foreign event");
    drop((second_stream, second_event));
    works(&stream, &event, 5)?;
    drop((stream, event, block));
    check_eq!(backend.live_objects(), before, "live objects when all is destroyed");
    Ok(())
}
