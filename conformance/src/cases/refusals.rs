//! Refused calls: each call that takes an id or an ordinal, with each kind of id and ordinal that it must refuse, on the first
//! two devices. After each refusal, the objects that the call named are as before.

use std::cell::RefCell;
use std::num::NonZeroU32;

use highwater_hal::numbers::Coded;
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BackendTag, BlasKind, BlasOptions, CaptureMode, CopyShape, DataType,
    DeviceMemoryKind, DevicePtr, Epilogue, Error, EventId, EventOptions, FillPattern, Gemm, GemmShape, GraphExecId,
    GraphId, IdParts, LiveObjects, Location, MathMode, MemoryCopy, MemoryCopy2d, MemoryFill, ObjectId,
    PhysicalMemoryId, PhysicalMemoryOptions, PlanArguments, PlanOptions, Result, StreamId, StreamOptions,
    StreamPriority, Transport, Workspace,
};

use super::blas::kinds;
use super::ids::forge;
use super::kinds::{EventKind, StreamKind};
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error, on_devices};
use crate::device::{Addresses, Block, Capture, Destroy, Event, Handle, Object, PhysicalMemory, Pinned, Stream};
use crate::matrix::Product;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};
use crate::sweep::as_one;

cases! {
    group "refusals";
    bad_streams: ["backend.ids-checked"];
    bad_streams_and_a_pending_event: ["backend.ids-checked", "event.query"];
    bad_streams_of_frees: ["backend.ids-checked", "memory.free-returns"] needs [has::stream_ordered_memory];
    bad_streams_of_launches: ["backend.ids-checked"] needs [has::capture];
    bad_streams_of_handles: ["backend.ids-checked"];
    bad_events: ["backend.ids-checked"];
    bad_graphs: ["backend.ids-checked"] needs [has::capture];
    bad_physical_memory: ["backend.ids-checked"] needs [has::mapped_memory];
    known_streams: ["backend.ids-checked", "stream.destroy-stale"];
    known_events: ["backend.ids-checked", "event.destroy-stale"];
    known_graphs: ["backend.ids-checked"] needs [has::capture];
    known_physical_memory: ["backend.ids-checked"] needs [has::mapped_memory];
    slots_of_streams: ["backend.ids-checked", "stream.destroy-stale"];
    slots_of_events: ["backend.ids-checked", "event.destroy-stale"];
    slots_of_graphs: ["backend.ids-checked"] needs [has::capture];
    slots_of_physical_memory: ["backend.ids-checked"] needs [has::mapped_memory];
    ordinals: ["backend.device-checked"];
    ordinals_of_memory: ["backend.device-checked"];
    ordinals_of_mapped_memory: ["backend.device-checked"] needs [has::mapped_memory];
    events_with_timing_for_other_processes: ["backend.live-objects"]
        needs [has::event_timing, has::interprocess_events];
    destroyed_handles: ["blas.destroyed"];
}

const BYTES: usize = 256;
/// Rows of less than half of them.
const ROWS: CopyShape = CopyShape::new(16, 4).with_src_pitch(32).with_dst_pitch(24);

/// The state that no refused call changes.
struct Before<'b> {
    backend: &'b dyn Backend,
    live: LiveObjects,
    totals: Vec<u64>,
}

impl<'b> Before<'b> {
    fn of(backend: &'b dyn Backend) -> Result<Self> {
        Ok(Self { backend, live: backend.live_objects(), totals: Self::totals(backend)? })
    }

    fn totals(backend: &dyn Backend) -> Result<Vec<u64>> {
        as_one(|| (0..backend.device_count()).map(|device| Ok(backend.memory_info(device)?.total)).collect())
    }

    fn check(&self, what: &str) -> CaseResult {
        check_eq!(self.backend.live_objects(), self.live, "live objects after {what} was refused");
        check_eq!(Self::totals(self.backend)?, self.totals, "total memory after {what} was refused");
        Ok(())
    }
}

/// Ids that no call accepts, and two objects of the same kind.
struct Bad<'b, I: Destroy> {
    ids: Vec<(&'static str, I)>,
    /// It may have the slot of an object that was destroyed.
    living: Object<'b, I>,
}

impl<'b, I: ObjectId + Destroy> Bad<'b, I> {
    fn new(backend: &dyn Backend, make: impl Fn() -> Result<Object<'b, I>>) -> Result<Self> {
        let reused = make()?.destroy()?;
        let living = make()?;
        let stale = make()?.destroy()?;
        let parts = living.id().parts();
        let generation = |number: u32| NonZeroU32::new(number).unwrap_or(NonZeroU32::MAX);
        let now = parts.generation.get();
        let count = backend.device_count();
        let forged = [
            ("the id of another backend", IdParts { tag: BackendTag::next(), ..parts }),
            ("the id of another device", IdParts { device: (parts.device + 1) % count.max(2), ..parts }),
            ("the id of a device above all", IdParts { device: count, ..parts }),
            ("the id of the last ordinal", IdParts { device: u32::MAX, ..parts }),
            ("an id of the next generation", IdParts { generation: generation(now.wrapping_add(1)), ..parts }),
            ("an id 2^8 generations later", IdParts { generation: generation(now.wrapping_add(1 << 8)), ..parts }),
            ("an id 2^16 generations later", IdParts { generation: generation(now.wrapping_add(1 << 16)), ..parts }),
            ("an id 2^31 generations later", IdParts { generation: generation(now.wrapping_add(1 << 31)), ..parts }),
            ("an id of a slot that was never used", IdParts { slot: 1 << 30, ..parts }),
            ("an id of a slot 2^8 further", IdParts { slot: parts.slot.wrapping_add(1 << 8), ..parts }),
            ("an id of a slot 2^16 further", IdParts { slot: parts.slot.wrapping_add(1 << 16), ..parts }),
        ];
        let mut ids = vec![("a stale id whose slot may be used again", reused), ("a stale id", stale)];
        ids.extend(forged.map(|(what, parts)| (what, forge::<I>(parts))));
        Ok(Self { ids, living })
    }
}

/// A call that takes an argument which it must refuse.
type Call<'a, I> = (&'static str, Box<dyn Fn(I) -> Result<()> + 'a>);

/// Makes each call with each bad id.
fn refuse<I: Copy>(
    backend: &dyn Backend,
    ids: &[(&'static str, I)],
    calls: &[Call<'_, I>],
    intact: impl Fn() -> CaseResult,
) -> CaseResult {
    let before = Before::of(backend)?;
    for &(what, id) in ids {
        for (name, call) in calls {
            check_error!(call(id), InvalidHandle, "{name} with {what}");
            check_eq!(backend.live_objects(), before.live, "live objects after {name} with {what} was refused");
        }
        before.check(&format!("every call with {what}"))?;
        intact().map_err(|failure| failure.with_details(&format!("after calls with {what}")))?;
    }
    Ok(())
}

/// Makes an event whose record can be asked for, if the device measures time.
fn recorded<'b>(backend: &'b dyn Backend, stream: &Stream<'b>) -> Result<Event<'b>> {
    let device = stream.id().device();
    let options = EventOptions::new();
    let is_timed = backend.capabilities(device)?.event_timing;
    let options = if is_timed { options.with_timing() } else { options };
    let event = Event::with_options(backend, device, &options)?;
    stream.record(&event)?;
    stream.synchronize()?;
    Ok(event)
}

/// Checks that the event still has its record.
fn keeps_its_record(backend: &dyn Backend, event: &Event<'_>) -> CaseResult {
    check!(event.query()?.is_complete(), "an event whose record was reached is pending");
    if backend.capabilities(event.id().device())?.event_timing {
        check!(backend.event_elapsed_ns(event.id(), event.id()).is_ok(), "an event lost its record");
    }
    Ok(())
}

/// Returns ids of streams that no call accepts: those of objects, and of default streams of other backends and devices.
fn no_streams<'b>(backend: &'b dyn Backend, device: u32) -> Result<Bad<'b, StreamId>> {
    let mut bad = Bad::new(backend, || Stream::on(backend, device))?;
    let (tag, other) = (backend.identity().tag, BackendTag::next());
    let can = backend.capabilities(device)?;
    if can.legacy_default_stream {
        bad.ids.push(("the legacy default stream of another backend", StreamId::legacy_default(other, device)));
        let above = StreamId::legacy_default(tag, backend.device_count());
        bad.ids.push(("the legacy default stream of a device above all", above));
    }
    if can.per_thread_default_stream {
        bad.ids.push(("the per-thread default stream of another backend", StreamId::per_thread_default(other, device)));
        let above = StreamId::per_thread_default(tag, u32::MAX);
        bad.ids.push(("the per-thread default stream of the last ordinal", above));
    }
    Ok(bad)
}

// ---------------------------------------------------------------------------------------------------------- the streams

/// A refused record or wait leaves a pending event as it is. The event before it in the stream tells when the work has ended.
fn bad_streams_and_a_pending_event(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let bad = no_streams(backend, device)?;
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        until_conclusive("the event was complete before the calls: a record waits", |load| {
            let stream = Stream::on(backend, device)?;
            let (earlier, event) = (Event::on(backend, device)?, Event::on(backend, device)?);
            busy.enqueue(&stream, load)?;
            stream.record(&earlier)?;
            stream.record(&event)?;
            for &(what, id) in &bad.ids {
                check_error!(backend.record_event(event.id(), id), InvalidHandle, "record_event with {what}");
                check_error!(backend.stream_wait_event(id, event.id()), InvalidHandle, "stream_wait_event with {what}");
            }
            let pending = event.is_pending()?;
            let is_early = earlier.is_pending()?;
            check!(pending || !is_early, "an event is complete before its work, after calls with bad streams");
            stream.synchronize()?;
            check!(event.query()?.is_complete(), "an event whose record was reached is pending");
            Ok(Attempt::seen(is_early))
        })
    })
}

fn bad_streams(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let bad = no_streams(backend, device)?;
        let event = recorded(backend, &bad.living)?;
        let (block, pinned) = (Block::filled_on(backend, device, BYTES, 1)?, Pinned::holding(backend, &[1; BYTES])?);
        let on = |id| Stream::borrowed(backend, id);
        let mut calls: Vec<Call<'_, StreamId>> = vec![
            ("query_stream", Box::new(|id| backend.query_stream(id).map(drop))),
            ("synchronize_stream", Box::new(|id| backend.synchronize_stream(id))),
            ("stream_wait_event", Box::new(|id| backend.stream_wait_event(id, event.id()))),
            ("record_event", Box::new(|id| backend.record_event(event.id(), id))),
            ("fill of 1 byte", Box::new(|id| on(id).set(block.span(0..1), 2))),
            ("fill of 4-byte elements", Box::new(|id| on(id).fill(block.all(), FillPattern::U32(2)))),
            ("fill of nothing", Box::new(|id| on(id).set(block.span(0..0), 2))),
            ("copy on the device", Box::new(|id| on(id).copy(block.span(0..128), block.span(128..256)))),
            ("copy to the device", Box::new(|id| on(id).copy(block.all(), pinned.all()))),
            ("copy to the host", Box::new(|id| on(id).copy(pinned.all(), block.all()))),
            ("copy of rows", Box::new(|id| on(id).copy_rows(block.all(), pinned.all(), ROWS))),
            ("copy of no rows", Box::new(|id| on(id).copy_rows(block.all(), pinned.all(), CopyShape::new(8, 0)))),
            ("copy of nothing", Box::new(|id| on(id).copy(pinned.span(0..0), block.span(0..0)))),
            ("destroy_stream", Box::new(|id| backend.destroy_stream(id))),
        ];
        if can.foreign_objects {
            calls.push(("raw_stream", Box::new(|id| backend.raw_stream(id).map(drop))));
        }
        if can.stream_ordered_memory {
            calls.push((
                "allocate in stream order",
                Box::new(|id| Block::with_kind(backend, device, BYTES, DeviceMemoryKind::StreamOrdered(id)).map(drop)),
            ));
        }
        if can.capture {
            for &mode in CaptureMode::ALL {
                calls.push(("begin_capture", Box::new(move |id| backend.begin_capture(id, mode))));
            }
            calls.push(("end_capture", Box::new(|id| crate::device::end_capture(backend, id).map(drop))));
            calls.push(("is_capturing", Box::new(|id| backend.is_capturing(id).map(drop))));
        }
        refuse(backend, &bad.ids, &calls, || {
            keeps_its_record(backend, &event)?;
            check!(block.read()? == [1; BYTES] && pinned.read()? == [1; BYTES], "work on a bad stream was executed");
            check!(bad.living.query()?.is_complete(), "a stream that lives is pending without work");
            Ok(())
        })?;
        bad.living.set(block.all(), 3)?;
        bad.living.synchronize()?;
        check!(block.read()? == [3; BYTES], "a stream that lives does not work after refused calls");
        Ok(())
    })
}

fn bad_streams_of_frees(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let bad = no_streams(backend, device)?;
        let block = Block::with_kind(backend, device, BYTES, DeviceMemoryKind::StreamOrdered(bad.living.id()))?;
        bad.living.set(block.all(), 1)?;
        bad.living.synchronize()?;
        let (seen, ptr) = (Pinned::new(backend, BYTES)?, block.ptr());
        let calls: Vec<Call<'_, StreamId>> = vec![(
            "free in stream order",
            // SAFETY: the work on the block is done. If the call succeeds against the promise, the case fails.
            Box::new(|id| unsafe { backend.free(device, ptr, Some(id)) }),
        )];
        refuse(backend, &bad.ids, &calls, || {
            bad.living.copy(seen.all(), block.all())?;
            bad.living.synchronize()?;
            check!(seen.read()? == [1; BYTES], "a block changed when its free was refused");
            Ok(())
        })?;
        let live = backend.live_objects().allocations;
        block.free_in_order()?;
        bad.living.synchronize()?;
        check_eq!(backend.live_objects().allocations, live - 1, "blocks after the free that follows refused ones");
        Ok(())
    })
}

fn bad_streams_of_launches(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let bad = no_streams(backend, device)?;
        let block = Block::filled_on(backend, device, BYTES, 1)?;
        let capture = Capture::begin(&bad.living, CaptureMode::ThreadLocal)?;
        bad.living.set(block.all(), 2)?;
        let executable = capture.end(&[&block])?.instantiate()?;
        let calls: Vec<Call<'_, StreamId>> =
            vec![("launch_graph", Box::new(|id| executable.launch(&Stream::borrowed(backend, id))))];
        refuse(backend, &bad.ids, &calls, || {
            backend.synchronize_device(device)?;
            check!(block.read()? == [1; BYTES], "a refused launch was executed");
            Ok(())
        })?;
        executable.launch(&bad.living)?;
        bad.living.synchronize()?;
        check!(block.read()? == [2; BYTES], "a launch does nothing after refused ones");
        Ok(())
    })
}

fn bad_streams_of_handles(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        for &kind in kinds(backend)? {
            let bad = no_streams(backend, device)?;
            let handle = RefCell::new(Handle::unbound(backend, kind, device)?);
            let calls: Vec<Call<'_, StreamId>> =
                vec![("set_stream", Box::new(|id| handle.borrow_mut().raw_mut().set_stream(id)))];
            refuse(backend, &bad.ids, &calls, || Ok(()))?;
            handle.borrow_mut().set_stream(&bad.living)?;
            refuse(backend, &bad.ids, &calls, || Ok(()))?;
            if kind == BlasKind::Blas && backend.capabilities(device)?.gemm_f32 && device == crate::device::DEVICE {
                // The handle keeps its stream.
                let product = Product::new(GemmShape::new(DataType::F32, 8, 8, 8), 5);
                product.prove(backend, &mut handle.borrow_mut(), &bad.living)?;
            }
        }
        Ok(())
    })
}

// ----------------------------------------------------------------------------------------------------- the other objects

fn bad_events(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let bad: Bad<'_, EventId> = Bad::new(backend, || Event::on(backend, device))?;
        let stream = Stream::on(backend, device)?;
        let event = recorded(backend, &stream)?;
        let block = Block::filled_on(backend, device, BYTES, 1)?;
        let mut calls: Vec<Call<'_, EventId>> = vec![
            ("query_event", Box::new(|id| backend.query_event(id).map(drop))),
            ("synchronize_event", Box::new(|id| backend.synchronize_event(id))),
            ("record_event", Box::new(|id| backend.record_event(id, stream.id()))),
            ("stream_wait_event", Box::new(|id| backend.stream_wait_event(stream.id(), id))),
            ("destroy_event", Box::new(|id| backend.destroy_event(id))),
        ];
        if can.event_timing {
            let elapsed = |start, end| backend.event_elapsed_ns(start, end).map(drop);
            let reached = event.id();
            calls.push(("event_elapsed_ns from it", Box::new(move |id| elapsed(id, reached))));
            calls.push(("event_elapsed_ns to it", Box::new(move |id| elapsed(reached, id))));
            calls.push(("event_elapsed_ns of it alone", Box::new(move |id| elapsed(id, id))));
        }
        if can.foreign_objects {
            calls.push(("raw_event", Box::new(|id| backend.raw_event(id).map(drop))));
        }
        if let Some(sharing) = backend.ipc_sharing().filter(|_| can.interprocess_events) {
            calls.push(("export_event", Box::new(move |id| sharing.export_event(id).map(drop))));
        }
        refuse(backend, &bad.ids, &calls, || {
            keeps_its_record(backend, &event)?;
            check!(bad.living.query()?.is_complete(), "an event that was never recorded is pending");
            check!(stream.query()?.is_complete(), "a stream waits for an event of a bad id");
            Ok(())
        })?;
        stream.set(block.all(), 2)?;
        stream.record(&bad.living)?;
        bad.living.synchronize()?;
        check!(block.read()? == [2; BYTES], "an event that lives does not work after refused calls");
        Ok(())
    })
}

fn bad_graphs(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let block = Block::filled_on(backend, device, BYTES, 1)?;
        let graph = || -> Result<_> {
            let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
            stream.set(block.all(), 2)?;
            capture.end(&[&block])
        };
        let graphs: Bad<'_, GraphId> = Bad::new(backend, graph)?;
        let executables: Bad<'_, GraphExecId> = Bad::new(backend, || graphs.living.instantiate())?;
        let unchanged = || -> CaseResult {
            check!(block.read()? == [1; BYTES], "a refused call executed a graph");
            Ok(())
        };
        let calls: Vec<Call<'_, GraphId>> = vec![
            ("instantiate_graph", Box::new(|id| backend.instantiate_graph(id).map(drop))),
            ("destroy_graph", Box::new(|id| backend.destroy_graph(id))),
        ];
        refuse(backend, &graphs.ids, &calls, unchanged)?;
        let calls: Vec<Call<'_, GraphExecId>> = vec![
            // SAFETY: the only memory that a graph of this case has recorded outlives all of them.
            ("launch_graph", Box::new(|id| unsafe { backend.launch_graph(id, stream.id()) })),
            ("destroy_graph_exec", Box::new(|id| backend.destroy_graph_exec(id))),
        ];
        refuse(backend, &executables.ids, &calls, || {
            stream.synchronize()?;
            unchanged()
        })?;
        for executable in [executables.living, graphs.living.instantiate()?] {
            stream.set(block.all(), 1)?;
            executable.launch(&stream)?;
            stream.synchronize()?;
            check!(block.read()? == [2; BYTES], "a graph that lives does not work after refused calls");
        }
        Ok(())
    })
}

fn bad_physical_memory(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let piece = backend.capabilities(device)?.mapped_memory_granularity;
        let options = PhysicalMemoryOptions::new(piece);
        let bad: Bad<'_, PhysicalMemoryId> = Bad::new(backend, || PhysicalMemory::create(backend, device, &options))?;
        let addresses = Addresses::new(backend, device, 2 * piece)?;
        addresses.map(0, &bad.living, piece)?;
        addresses.give_access(0..piece, device)?;
        addresses.write(0, &[1; BYTES])?;
        let free = addresses.ptr().offset(piece);
        let calls: Vec<Call<'_, PhysicalMemoryId>> = vec![
            // SAFETY: the addresses belong to this case, and nothing is mapped there.
            ("map_memory", Box::new(|id| unsafe { backend.map_memory(device, free, id) })),
            ("destroy_memory", Box::new(|id| backend.destroy_memory(id))),
        ];
        refuse(backend, &bad.ids, &calls, || {
            check!(addresses.read(0..BYTES)? == [1; BYTES], "mapped memory changed by a refused call");
            Ok(())
        })?;
        // The place is still free.
        drop(addresses.fill_in(piece..2 * piece)?);
        Ok(())
    })
}

// --------------------------------------------------------------------------------------------------- ids that were known

/// Makes each call with a living object. Then this thread or another one destroys it, and this thread makes each call with the stale id, first
/// alone and then beside another object, which may reuse its slot.
fn refuse_once_known<I: Copy + std::fmt::Debug, O: Send, M>(
    make: impl Fn() -> Result<(I, O, M)>,
    destroy: impl Fn(O) -> Result<()> + Sync,
    calls: &[Call<'_, I>],
) -> CaseResult {
    for by_other in [false, true] {
        let (id, object, _rest) = make()?;
        for (name, call) in calls {
            call(id).map_err(|error| Failure::new(format!("{name} with {id:?}, which lives, failed: {error}")))?;
        }
        if by_other {
            let destroyed = std::thread::scope(|scope| scope.spawn(|| destroy(object)).join());
            destroyed.map_err(|_| Failure::new("a thread panicked"))??;
        } else {
            destroy(object)?;
        }
        let by = if by_other { "another thread" } else { "this thread" };
        for _ in 0..2 {
            for (name, call) in calls {
                check_error!(call(id), InvalidHandle, "{name} with {id:?}, known to this thread, which {by} destroyed");
            }
        }
        let (_, successor, _rest) = make()?;
        for (name, call) in calls {
            check_error!(call(id), InvalidHandle, "{name} with {id:?} again, after another object was made");
        }
        destroy(successor)?;
    }
    Ok(())
}

fn known_streams(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let event = recorded(backend, &Stream::on(backend, device)?)?;
        let (block, pinned) = (Block::filled_on(backend, device, BYTES, 1)?, Pinned::holding(backend, &[1; BYTES])?);
        let on = |id| Stream::borrowed(backend, id);
        let mut calls: Vec<Call<'_, StreamId>> = vec![
            ("fill", Box::new(|id| on(id).set(block.all(), 2))),
            ("copy", Box::new(|id| on(id).copy(block.all(), pinned.all()))),
            ("copy of rows", Box::new(|id| on(id).copy_rows(block.all(), pinned.all(), ROWS))),
            ("record_event", Box::new(|id| backend.record_event(event.id(), id))),
            ("stream_wait_event", Box::new(|id| backend.stream_wait_event(id, event.id()))),
            ("synchronize_stream", Box::new(|id| backend.synchronize_stream(id))),
            ("query_stream", Box::new(|id| backend.query_stream(id).map(drop))),
        ];
        if can.foreign_objects {
            calls.push(("raw_stream", Box::new(|id| backend.raw_stream(id).map(drop))));
        }
        if can.capture {
            calls.push(("is_capturing", Box::new(|id| backend.is_capturing(id).map(drop))));
        }
        for kind in StreamKind::of(backend, device)?.into_iter().filter(|kind| !kind.is_default()) {
            let make = || kind.make(backend, device).map(|made| (made.stream.id(), made.stream, made.owner));
            refuse_once_known(make, |stream| stream.destroy().map(drop), &calls)
                .map_err(|failure| failure.with_details(&format!("a stream: {kind:?}")))?;
        }
        Ok(())
    })
}

fn known_events(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let stream = Stream::on(backend, device)?;
        for kind in EventKind::of(backend, device)? {
            let mut calls: Vec<Call<'_, EventId>> = vec![
                ("record_event", Box::new(|id| backend.record_event(id, stream.id()))),
                ("stream_wait_event", Box::new(|id| backend.stream_wait_event(stream.id(), id))),
                ("synchronize_event", Box::new(|id| backend.synchronize_event(id))),
                ("query_event", Box::new(|id| backend.query_event(id).map(drop))),
            ];
            if kind == EventKind::Timing {
                calls.push(("event_elapsed_ns", Box::new(|id| backend.event_elapsed_ns(id, id).map(drop))));
            }
            if can.foreign_objects {
                calls.push(("raw_event", Box::new(|id| backend.raw_event(id).map(drop))));
            }
            if let Some(sharing) = backend.ipc_sharing().filter(|_| kind == EventKind::Interprocess) {
                calls.push(("export_event", Box::new(move |id| sharing.export_event(id).map(drop))));
            }
            let make = || kind.make(backend, device).map(|made| (made.event.id(), made.event, made.owner));
            refuse_once_known(make, |event| event.destroy().map(drop), &calls)
                .map_err(|failure| failure.with_details(&format!("an event: {kind:?}")))?;
        }
        Ok(())
    })
}

fn known_graphs(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let graph = || Capture::begin(&stream, CaptureMode::ThreadLocal)?.end(&[]);
        let calls: Vec<Call<'_, GraphId>> = vec![(
            "instantiate_graph",
            Box::new(|id| as_one(|| backend.instantiate_graph(id).and_then(|made| backend.destroy_graph_exec(made)))),
        )];
        let make = || graph().map(|graph| (graph.id(), graph, ()));
        refuse_once_known(make, |graph| graph.destroy().map(drop), &calls)?;
        let kept = graph()?;
        let calls: Vec<Call<'_, GraphExecId>> = vec![(
            "launch_graph",
            // SAFETY: the graph has recorded nothing.
            Box::new(|id| unsafe { backend.launch_graph(id, stream.id()) }),
        )];
        let make = || kept.instantiate().map(|made| (made.id(), made, ()));
        refuse_once_known(make, |executable| executable.destroy().map(drop), &calls)?;
        stream.synchronize()?;
        Ok(())
    })
}

fn known_physical_memory(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let piece = backend.capabilities(device)?.mapped_memory_granularity;
        let addresses = Addresses::new(backend, device, piece)?;
        let calls: Vec<Call<'_, PhysicalMemoryId>> = vec![(
            "map_memory",
            // The second call undoes the first, so the sweep refuses the first alone.
            Box::new(|id| {
                // SAFETY: the addresses belong to this case, and nothing uses them.
                as_one(|| unsafe {
                    backend.map_memory(device, addresses.ptr(), id)?;
                    backend.unmap_memory(device, addresses.ptr(), piece)
                })
            }),
        )];
        let options = PhysicalMemoryOptions::new(piece);
        let make = || PhysicalMemory::create(backend, device, &options).map(|made| (made.id(), made, ()));
        refuse_once_known(make, |memory| memory.destroy().map(drop), &calls)
    })
}

// ----------------------------------------------------------------------------------------------------- slots used again

/// Returns how many times a slot is used again. A real driver takes its time for each object.
fn rounds(backend: &dyn Backend, many: u32) -> u32 {
    if backend.identity().real_device { 1 << 8 } else { many }
}

/// Keeps an id, and uses its slot again and again. The kept id names none of the later objects.
fn used_again<'b, I: ObjectId + Destroy>(
    backend: &dyn Backend,
    rounds: u32,
    make: impl Fn() -> Result<Object<'b, I>>,
    ask: impl Fn(I) -> Result<()>,
) -> CaseResult {
    let kept = make()?.destroy()?;
    let before = backend.live_objects();
    // The rounds are equal.
    as_one(|| {
        for round in 1..=rounds {
            let living = make()?;
            check!(living.id().parts() != kept.parts(), "the id {kept:?} was issued again after {round} reuses");
            check_error!(ask(kept), InvalidHandle, "a call with {kept:?} after {round} reuses of its slot");
            if round.is_power_of_two() {
                check_error!(kept.destroy(backend), InvalidHandle, "the destruction of {kept:?} after {round} reuses");
                ask(living.id())?;
            }
            living.destroy()?;
        }
        Ok::<(), Failure>(())
    })?;
    check_eq!(backend.live_objects(), before, "live objects after {rounds} objects came and went");
    Ok(())
}

const MANY: u32 = 1 << 16;
const FEW: u32 = 1 << 8;

fn slots_of_streams(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let make = || Stream::on(backend, device);
        used_again(backend, rounds(backend, FEW), make, |id| backend.query_stream(id).map(drop))
    })
}

fn slots_of_events(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let make = || Event::on(backend, device);
        used_again(backend, rounds(backend, MANY), make, |id| backend.query_event(id).map(drop))
    })
}

fn slots_of_graphs(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let graph = || Capture::begin(&stream, CaptureMode::ThreadLocal)?.end(&[]);
        let kept = graph()?;
        let executable = || kept.instantiate();
        let rounds = rounds(backend, FEW);
        used_again(backend, rounds, graph, |id: GraphId| {
            let executable = backend.instantiate_graph(id)?;
            backend.destroy_graph_exec(executable)
        })?;
        used_again(backend, rounds, executable, |id: GraphExecId| {
            // SAFETY: the graph has recorded nothing.
            unsafe { backend.launch_graph(id, stream.id()) }
        })?;
        stream.synchronize()?;
        Ok(())
    })
}

fn slots_of_physical_memory(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let piece = backend.capabilities(device)?.mapped_memory_granularity;
        let addresses = Addresses::new(backend, device, piece)?;
        let make = || PhysicalMemory::create(backend, device, &PhysicalMemoryOptions::new(piece));
        used_again(backend, rounds(backend, FEW), make, |id: PhysicalMemoryId| {
            // SAFETY: the addresses belong to this case, and nothing uses them.
            unsafe {
                backend.map_memory(device, addresses.ptr(), id)?;
                backend.unmap_memory(device, addresses.ptr(), piece)
            }
        })
    })
}

// --------------------------------------------------------------------------------------------------------- the ordinals

/// Makes each call with each ordinal that no device has.
fn refuse_ordinals(backend: &dyn Backend, calls: &[Call<'_, u32>]) -> CaseResult {
    let (before, count) = (Before::of(backend)?, backend.device_count());
    for device in [count, count + 1, 1 << 8, 1 << 16, 1 << 31, u32::MAX - 1, u32::MAX] {
        for (name, call) in calls {
            check_error!(call(device), InvalidArgument, "{name} for device {device}");
            check_eq!(backend.live_objects(), before.live, "live objects after {name} for device {device} was refused");
        }
        before.check(&format!("every call for device {device}"))?;
    }
    Ok(())
}

fn ordinals(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |home| {
        let can = backend.capabilities(home)?;
        let (stream, event) = (Stream::on(backend, home)?, Event::on(backend, home)?);
        let stream_of =
            |device, priority| backend.create_stream(device, &StreamOptions::new().with_priority(priority)).map(drop);
        let event_of = |device, options: EventOptions| backend.create_event(device, &options).map(drop);
        let mut calls: Vec<Call<'_, u32>> = vec![
            ("device_info", Box::new(|device| backend.device_info(device).map(drop))),
            ("capabilities", Box::new(|device| backend.capabilities(device).map(drop))),
            ("memory_info", Box::new(|device| backend.memory_info(device).map(drop))),
            ("synchronize_device", Box::new(|device| backend.synchronize_device(device))),
            ("create_stream", Box::new(move |device| stream_of(device, StreamPriority::Normal))),
            ("create_event", Box::new(move |device| event_of(device, EventOptions::new()))),
        ];
        for &kind in kinds(backend)? {
            let make = move |device| backend.create_blas_handle(device, &BlasOptions::new(kind)).map(drop);
            calls.push(("create_blas_handle", Box::new(make)));
        }
        if can.stream_priority {
            calls.push(("create_stream of low priority", Box::new(move |on| stream_of(on, StreamPriority::Low))));
            calls.push(("create_stream of high priority", Box::new(move |on| stream_of(on, StreamPriority::High))));
        }
        if can.event_timing {
            let options = EventOptions::new().with_timing();
            calls.push(("create_event with timing", Box::new(move |device| event_of(device, options))));
        }
        if can.interprocess_events {
            let options = EventOptions::new().with_interprocess();
            calls.push(("create_event for other processes", Box::new(move |device| event_of(device, options))));
        }
        if can.foreign_objects {
            let (raw_stream, raw_event) = (backend.raw_stream(stream.id())?, backend.raw_event(event.id())?);
            // SAFETY: the owners outlive the calls. If one succeeds against the promise, the case fails.
            let stream = move |device| unsafe { backend.stream_from_raw(device, raw_stream) }.map(drop);
            // SAFETY: as above.
            let event = move |device| unsafe { backend.event_from_raw(device, raw_event) }.map(drop);
            calls.push(("stream_from_raw", Box::new(stream)));
            calls.push(("event_from_raw", Box::new(event)));
        }
        refuse_ordinals(backend, &calls)?;
        stream.record(&event)?;
        event.synchronize()?;
        Ok(())
    })
}

fn ordinals_of_memory(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |home| {
        let can = backend.capabilities(home)?;
        let (stream, allocator) = (Stream::on(backend, home)?, backend.host_allocator());
        let (block, pinned) = (Block::filled_on(backend, home, BYTES, 1)?, Pinned::holding(backend, &[1; BYTES])?);
        let make = |device, kind| backend.allocate(device, &AllocateOptions::new(BYTES).with_kind(kind)).map(drop);
        let (here, host) = (Location::Device { device: home, ptr: block.ptr() }, Location::Host(pinned.ptr()));
        let there = |device| Location::Device { device, ptr: block.ptr() };
        // SAFETY: the blocks outlive the calls. If one succeeds against the promise, the case fails.
        let copy = |dst, src| unsafe { backend.copy(&MemoryCopy::new(dst, src, BYTES / 2), stream.id()) };
        // SAFETY: as above.
        let copy_nothing = |dst, src| unsafe { backend.copy(&MemoryCopy::new(dst, src, 0), stream.id()) };
        // SAFETY: as above.
        let copy_rows = |dst, src| unsafe { backend.copy_2d(&MemoryCopy2d::new(dst, src, ROWS), stream.id()) };
        let no_rows = CopyShape::new(16, 0);
        // SAFETY: as above.
        let copy_no_rows = |dst, src| unsafe { backend.copy_2d(&MemoryCopy2d::new(dst, src, no_rows), stream.id()) };
        let fill = |device, count| {
            let fill = MemoryFill::new(device, block.ptr(), FillPattern::U8(2), count);
            // SAFETY: as above.
            unsafe { backend.fill(&fill, stream.id()) }
        };
        let mut calls: Vec<Call<'_, u32>> = vec![
            ("allocate", Box::new(move |device| make(device, DeviceMemoryKind::Plain))),
            // SAFETY: as above.
            ("free", Box::new(|device| unsafe { backend.free(device, block.ptr(), None) })),
            ("copy from the host", Box::new(|device| copy(there(device), host))),
            ("copy to the host", Box::new(|device| copy(host, there(device)))),
            ("copy of rows from the host", Box::new(|device| copy_rows(there(device), host))),
            ("copy of rows to the host", Box::new(|device| copy_rows(host, there(device)))),
            ("copy of 0 bytes from the host", Box::new(|device| copy_nothing(there(device), host))),
            ("copy of 0 bytes to the host", Box::new(|device| copy_nothing(host, there(device)))),
            ("copy of 0 bytes to a device", Box::new(|device| copy_nothing(there(device), here))),
            ("copy of 0 bytes from a device", Box::new(|device| copy_nothing(here, there(device)))),
            ("copy of no rows from the host", Box::new(|device| copy_no_rows(there(device), host))),
            ("copy of no rows to the host", Box::new(|device| copy_no_rows(host, there(device)))),
            ("copy of no rows to a device", Box::new(|device| copy_no_rows(there(device), here))),
            ("copy of no rows from a device", Box::new(|device| copy_no_rows(here, there(device)))),
            ("fill", Box::new(|device| fill(device, BYTES))),
            ("fill of 0 elements", Box::new(|device| fill(device, 0))),
            ("device_address", Box::new(|device| allocator.device_address(pinned.ptr(), device).map(drop))),
        ];
        if can.peer_copy {
            calls.push(("copy to another device", Box::new(|device| copy(there(device), here))));
            calls.push(("copy of rows to another device", Box::new(|device| copy_rows(there(device), here))));
            calls.push(("copy from another device", Box::new(|device| copy(here, there(device)))));
            calls.push(("copy of rows from another device", Box::new(|device| copy_rows(here, there(device)))));
        }
        if can.stream_ordered_memory {
            let kind = DeviceMemoryKind::StreamOrdered(stream.id());
            calls.push(("allocate in stream order", Box::new(move |device| make(device, kind))));
        }
        for &transport in Transport::ALL.iter().filter(|&&transport| can.ipc_transports.contains(transport)) {
            let kind = DeviceMemoryKind::Shareable(transport);
            calls.push(("allocate of shareable memory", Box::new(move |device| make(device, kind))));
            let Some(sharing) = backend.ipc_sharing() else { continue };
            let ptr = block.ptr();
            // SAFETY: as above.
            let export = move |device| unsafe { sharing.export_memory(device, ptr, transport) }.map(drop);
            calls.push(("export_memory", Box::new(export)));
            let Some(sharing) = backend.ipc_sharing() else { continue };
            // SAFETY: as above.
            calls.push(("close_memory", Box::new(move |device| unsafe { sharing.close_memory(device, ptr) })));
        }
        refuse_ordinals(backend, &calls)?;
        stream.synchronize()?;
        check!(block.read()? == [1; BYTES] && pinned.read()? == [1; BYTES], "refused work was executed");
        stream.set(block.all(), 3)?;
        check!(block.read()? == [3; BYTES], "a block does not work after refused calls");
        Ok(())
    })
}

fn ordinals_of_mapped_memory(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |home| {
        let piece = backend.capabilities(home)?.mapped_memory_granularity;
        let addresses = Addresses::new(backend, home, 2 * piece)?;
        let mapped = addresses.fill_in(0..piece)?;
        addresses.write(0, &[1; BYTES])?;
        let options = PhysicalMemoryOptions::new(piece);
        let other = PhysicalMemory::create(backend, home, &options)?;
        let (start, free) = (addresses.ptr(), addresses.ptr().offset(piece));
        // SAFETY (of each call below): the addresses belong to this case, and no work uses them. If a call succeeds against the
        // promise, the case fails.
        let calls: Vec<Call<'_, u32>> = vec![
            ("reserve_addresses", Box::new(|device| backend.reserve_addresses(device, piece).map(drop))),
            ("create_memory", Box::new(|device| backend.create_memory(device, &options).map(drop))),
            // SAFETY: as above.
            ("free_addresses", Box::new(|device| unsafe { backend.free_addresses(device, start, 2 * piece) })),
            // SAFETY: as above.
            ("map_memory", Box::new(|device| unsafe { backend.map_memory(device, free, other.id()) })),
            // SAFETY: as above.
            ("unmap_memory", Box::new(|device| unsafe { backend.unmap_memory(device, start, piece) })),
            (
                "set_memory_access of it",
                // SAFETY: as above.
                Box::new(|device| unsafe { backend.set_memory_access(device, start, piece, home) }),
            ),
            (
                "set_memory_access by it",
                // SAFETY: as above.
                Box::new(|device| unsafe { backend.set_memory_access(home, start, piece, device) }),
            ),
        ];
        refuse_ordinals(backend, &calls)?;
        check!(addresses.read(0..BYTES)? == [1; BYTES], "mapped memory changed by a refused call");
        drop(mapped);
        drop(addresses.fill_in(piece..2 * piece)?);
        Ok(())
    })
}

// ------------------------------------------------------------------------------------------------------------ the others

fn events_with_timing_for_other_processes(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let before = Before::of(backend)?;
        let options = EventOptions::new().with_timing().with_interprocess();
        for _ in 0..3 {
            check_error!(backend.create_event(device, &options), InvalidArgument, "create_event with both options");
            before.check("an event with both options")?;
        }
        Ok(())
    })
}

fn destroyed_handles(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let (stream, block) = (Stream::on(backend, device)?, Block::filled_on(backend, device, 4096, 1)?);
        for &kind in kinds(backend)? {
            let mut handle = Handle::new(backend, kind, &stream)?;
            let shape = GemmShape::new(DataType::F32, 4, 4, 4);
            let options = PlanOptions::new(shape, Epilogue::None, 0);
            let plan = match kind {
                BlasKind::Lt if can.gemm_f32 => Some(handle.raw_mut().create_plan(&options)?),
                _ => None,
            };
            let raw = handle.raw_mut();
            raw.destroy()?;
            let before = Before::of(backend)?;
            let at = |offset| block.ptr().offset(offset);
            let mut answers: Vec<(&str, std::result::Result<(), Error>)> = vec![
                ("set_stream", raw.set_stream(stream.id())),
                ("set_math_mode", raw.set_math_mode(MathMode::Default)),
                ("set_atomics_mode", raw.set_atomics_mode(AtomicsMode::NotAllowed)),
                // SAFETY: it binds nothing.
                ("set_workspace to its own", unsafe { raw.set_workspace(None) }),
                ("reset", raw.reset()),
                ("destroy", raw.destroy()),
            ];
            if can.tf32 {
                answers.push(("set_math_mode to TF32", raw.set_math_mode(MathMode::Tf32)));
            }
            if can.atomics_mode {
                answers.push(("set_atomics_mode to allowed", raw.set_atomics_mode(AtomicsMode::Allowed)));
            }
            if can.blas_workspace {
                let workspace = Workspace { ptr: DevicePtr::new(block.ptr().get()), bytes: 4096 };
                let workspace = workspace.ptr.is_aligned_to(can.workspace_alignment).then_some(workspace);
                // SAFETY: the block outlives the handle, and no other work uses it.
                answers.push(("set_workspace", unsafe { raw.set_workspace(workspace) }));
            }
            if kind == BlasKind::Blas && can.gemm_f32 {
                let gemm = Gemm::new(shape, at(0), at(1024), at(2048));
                // SAFETY: the matrices lie in the block, apart.
                answers.push(("gemm", unsafe { raw.gemm(&gemm) }));
            }
            if let Some(plan) = plan {
                let arguments = PlanArguments::new(at(0), at(1024), at(2048), None);
                answers.push(("create_plan", raw.create_plan(&options).map(drop)));
                // SAFETY: as above.
                answers.push(("run_plan", unsafe { raw.run_plan(plan, &arguments) }));
                answers.push(("destroy_plan", raw.destroy_plan(plan)));
            }
            for (name, answer) in answers {
                // A backend that cannot reset handles need not look at the handle.
                let is_lacking = matches!(&answer, Err(error) if name == "reset" && error.kind() == highwater_hal::ErrorKind::Unsupported);
                if !is_lacking {
                    check_error!(answer, InvalidHandle, "{name} of a {kind:?} handle that was destroyed");
                }
            }
            before.check("every call of a destroyed handle")?;
            stream.synchronize()?;
            check!(block.read()? == [1; 4096], "a destroyed handle wrote to memory");
        }
        Ok(())
    })
}
