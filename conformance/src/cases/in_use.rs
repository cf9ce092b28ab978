//! Objects that are destroyed while they are in use: by outstanding work, by a capture, and by calls of other threads.
//!
//! A table pairs each object with the work that uses it. The thread that made the object destroys it, and then another thread does,
//! except in rows about calls of other threads.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use highwater_hal::{
    Backend, BlasKind, CaptureMode, DataType, Epilogue, ErrorKind, FillPattern, GemmShape, PlanId, PlanOptions,
};

use crate::case::{CaseResult, Failure, cases, check, check_error};
use crate::device::{Addresses, Block, Capture, DEVICE, Event, Executable, Handle, Pinned, Stream};
use crate::matrix::{Placed, Product};
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "in_use";
    streams_with_work: ["stream.destroy-pending"] => by_work(Object::Stream);
    streams_that_wait_for_events: ["stream.destroy-pending", "event.wait-orders"] => by_work(Object::WaitingStream);
    events_that_are_waited_for: ["event.destroy-pending"] => by_work(Object::Event);
    graphs_with_launches: ["capture.destroy-graph"] needs [has::capture] => by_work(Object::Graph);
    executables_with_launches: ["capture.destroy-executable"] needs [has::capture] => by_work(Object::Executable);
    physical_memory_with_work: ["mapped.destroy"] needs [has::mapped_memory] => by_work(Object::PhysicalMemory);
    ids_of_foreign_streams: ["stream.foreign-kept"] needs [has::foreign_objects] => by_work(Object::ForeignStream);
    ids_of_foreign_events: ["event.foreign-kept"] needs [has::foreign_objects] => by_work(Object::ForeignEvent);
    handles_with_products: ["blas.destroy-pending"] needs [has::gemm_f32] => by_product(BlasKind::Blas, Bound::Handle);
    handles_with_plans: ["blas.destroy-pending"]
        needs [has::gemm_f32, has::lt_plans] => by_product(BlasKind::Lt, Bound::Handle);
    dropped_handles_with_products: ["blas.destroy-pending"]
        needs [has::gemm_f32] => by_product(BlasKind::Blas, Bound::DroppedHandle);
    dropped_handles_with_plans: ["blas.destroy-pending"]
        needs [has::gemm_f32, has::lt_plans] => by_product(BlasKind::Lt, Bound::DroppedHandle);
    plans_that_run: ["plan.destroy-pending"] needs [has::gemm_f32, has::lt_plans] => by_product(BlasKind::Lt, Bound::Plan);
    streams_of_handles: ["blas.stream-destroyed", "stream.destroy-pending"]
        needs [has::gemm_f32] => by_product(BlasKind::Blas, Bound::Stream);
    streams_of_handles_for_plans: ["blas.stream-destroyed", "stream.destroy-pending"]
        needs [has::gemm_f32, has::lt_plans] => by_product(BlasKind::Lt, Bound::Stream);
    events_of_captures: ["event.destroy-pending", "capture.joins"] needs [has::capture];
    foreign_streams_of_handles: ["blas.stream-destroyed", "stream.foreign-kept"]
        needs [has::gemm_f32, has::foreign_objects] => by_product(BlasKind::Blas, Bound::ForeignStream);
    foreign_streams_of_handles_for_plans: ["blas.stream-destroyed", "stream.foreign-kept"]
        needs [has::gemm_f32, has::lt_plans, has::foreign_objects] => by_product(BlasKind::Lt, Bound::ForeignStream);
    streams_that_a_thread_waits_for: ["backend.destroy-concurrent", "stream.synchronize"]
        => while_a_thread_waits(Waited::Stream);
    ids_of_foreign_streams_that_a_thread_waits_for: ["backend.destroy-concurrent", "stream.foreign-kept"]
        needs [has::foreign_objects] => while_a_thread_waits(Waited::ForeignStream);
    events_that_a_thread_waits_for: ["backend.destroy-concurrent", "event.synchronize"]
        => while_a_thread_waits(Waited::Event);
    ids_of_foreign_events_that_a_thread_waits_for: ["backend.destroy-concurrent", "event.foreign-kept"]
        needs [has::foreign_objects] => while_a_thread_waits(Waited::ForeignEvent);
    streams_that_threads_use: ["backend.destroy-concurrent", "stream.destroy-pending"];
    events_that_threads_use: ["backend.destroy-concurrent"];
    graphs_that_threads_use: ["backend.destroy-concurrent", "capture.destroy-graph"] needs [has::capture];
}

const BYTES: usize = 1 << 16;
const OLD: u8 = 0x10;
const NEW: u8 = 0x20;

/// The objects that are destroyed under a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Object {
    Stream,
    WaitingStream,
    Event,
    Graph,
    Executable,
    PhysicalMemory,
    ForeignStream,
    ForeignEvent,
}

/// The objects that are destroyed under a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    Handle,
    DroppedHandle,
    Plan,
    Stream,
    ForeignStream,
}

/// Runs `destroy` in this thread or in another one.
fn in_thread<T: Send>(is_other: bool, destroy: impl FnOnce() -> Result<T, Failure> + Send) -> Result<T, Failure> {
    if !is_other {
        return destroy();
    }
    std::thread::scope(|scope| scope.spawn(destroy).join()).map_err(|_| Failure::new("a thread panicked"))?
}

/// Creates objects, which may take the place of those that were destroyed, and uses them.
fn replace(backend: &dyn Backend) -> CaseResult {
    let streams = (0..2).map(|_| Stream::new(backend)).collect::<Result<Vec<_>, _>>()?;
    for stream in &streams {
        let event = Event::new(backend)?;
        stream.record(&event)?;
        if backend.capabilities(DEVICE)?.capture {
            let graph = Capture::begin(stream, CaptureMode::ThreadLocal)?.end(&[])?;
            graph.instantiate()?.destroy()?;
        }
        stream.synchronize()?;
    }
    Ok(())
}

/// Returns another id of the stream, as of other code. The caller drops it before the stream.
fn wrapped<'b>(backend: &'b dyn Backend, stream: &Stream<'b>) -> Result<Stream<'b>, Failure> {
    let raw = backend.raw_stream(stream.id())?;
    // SAFETY: each caller destroys the stream after its wrapper.
    let id = unsafe { backend.stream_from_raw(DEVICE, raw) }.map_err(Failure::from)?;
    Ok(Stream::adopted(backend, id))
}

fn by_work(backend: &dyn Backend, object: Object) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    for is_other in [false, true] {
        until_conclusive("the work was over when the object was destroyed", |load| {
            under_a_copy(backend, object, is_other, |stream| busy.enqueue(stream, load))
        })
        .map_err(|failure| {
            let thread = if is_other { "another thread" } else { "its own thread" };
            failure.with_details(&format!("{object:?}, destroyed by {thread}"))
        })?;
    }
    Ok(())
}

/// Destroys an object after the calls that use it and before their work.
fn under_a_copy(
    backend: &dyn Backend,
    object: Object,
    is_other: bool,
    load: impl Fn(&Stream<'_>) -> highwater_hal::Result<()>,
) -> Result<Attempt, Failure> {
    let fresh = Block::filled(backend, BYTES, NEW)?;
    let shared = Block::filled(backend, BYTES, OLD)?;
    let target = Block::filled(backend, BYTES, OLD)?;
    let (stream, before) = (Stream::new(backend)?, Event::new(backend)?);
    let begin = |stream: &Stream<'_>| {
        load(stream)?;
        stream.record(&before)
    };
    let outstanding = match object {
        Object::Stream => {
            begin(&stream)?;
            stream.copy(target.all(), fresh.all())?;
            let outstanding = before.is_pending()?;
            in_thread(is_other, || Ok(stream.destroy()?))?;
            outstanding
        }
        Object::WaitingStream => {
            let (producer, written) = (Stream::new(backend)?, Event::new(backend)?);
            begin(&producer)?;
            producer.copy(shared.all(), fresh.all())?;
            producer.record(&written)?;
            stream.wait(&written)?;
            stream.copy(target.all(), shared.all())?;
            let outstanding = before.is_pending()?;
            in_thread(is_other, || Ok(stream.destroy()?))?;
            outstanding
        }
        Object::Event | Object::ForeignEvent => {
            let (producer, written) = (Stream::new(backend)?, Event::new(backend)?);
            let wrapper = match object {
                Object::ForeignEvent => {
                    let raw = backend.raw_event(written.id())?;
                    // SAFETY: the event is destroyed after its wrapper, in this function.
                    let id = unsafe { backend.event_from_raw(DEVICE, raw) }.map_err(Failure::from)?;
                    Some(Event::adopted(backend, id))
                }
                _ => None,
            };
            begin(&producer)?;
            producer.copy(shared.all(), fresh.all())?;
            producer.record(wrapper.as_ref().unwrap_or(&written))?;
            stream.wait(wrapper.as_ref().unwrap_or(&written))?;
            stream.copy(target.all(), shared.all())?;
            match wrapper {
                Some(wrapper) => {
                    in_thread(is_other, || Ok(wrapper.destroy()?))?;
                    replace(backend)?;
                    let (answer, outstanding) = (written.is_pending()?, before.is_pending()?);
                    check!(
                        answer || !outstanding,
                        "an event is complete before its record, because its wrapper was destroyed"
                    );
                    written.synchronize()?;
                    check!(
                        before.query()?.is_complete(),
                        "a wait for an event ended early, because its wrapper was destroyed"
                    );
                    outstanding
                }
                None => {
                    in_thread(is_other, || Ok(written.destroy()?))?;
                    before.is_pending()?
                }
            }
        }
        Object::Graph | Object::Executable => {
            let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
            stream.copy(shared.all(), fresh.all())?;
            stream.copy(target.all(), shared.all())?;
            let graph = capture.end(&[&fresh, &shared, &target])?;
            let executable = graph.instantiate()?;
            begin(&stream)?;
            executable.launch(&stream)?;
            let outstanding = before.is_pending()?;
            match object {
                Object::Graph => {
                    in_thread(is_other, || Ok(graph.destroy()?))?;
                    replace(backend)?;
                    // The graph is gone, and its executable is as good as before.
                    executable.launch(&stream)?;
                    stream.synchronize()?;
                }
                _ => {
                    in_thread(is_other, || Ok(executable.destroy()?))?;
                }
            }
            outstanding
        }
        Object::PhysicalMemory => {
            let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity.max(BYTES);
            let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
            let memory = addresses.fill_in(0..piece)?;
            begin(&stream)?;
            stream.copy(addresses.span(0..BYTES), fresh.all())?;
            stream.copy(target.all(), addresses.span(0..BYTES))?;
            in_thread(is_other, || Ok(memory.destroy()?))?;
            let outstanding = before.is_pending()?;
            // Other memory must not be the destroyed one.
            let other = addresses.fill_in(piece..2 * piece)?;
            addresses.write(piece, &[OLD; BYTES])?;
            stream.synchronize()?;
            check!(addresses.read(0..BYTES)? == [NEW; BYTES], "mapped memory lost its bytes when its id was destroyed");
            drop(other);
            outstanding
        }
        Object::ForeignStream => {
            let wrapper = wrapped(backend, &stream)?;
            begin(&wrapper)?;
            wrapper.copy(shared.all(), fresh.all())?;
            let outstanding = before.is_pending()?;
            in_thread(is_other, || Ok(wrapper.destroy()?))?;
            stream.copy(target.all(), shared.all())?;
            stream.synchronize()?;
            outstanding
        }
    };
    replace(backend)?;
    // Reading waits for all work of the device, also of streams that were destroyed.
    let got = target.read()?;
    let wrong = got.iter().filter(|&&byte| byte != NEW).count();
    check!(wrong == 0, "{wrong} of {BYTES} bytes are not those of the work that used the object");
    Ok(Attempt::seen(outstanding))
}

/// Enqueues a product, or a run of a plan of it.
fn multiply(
    handle: &mut Handle<'_>,
    plan: Option<PlanId>,
    product: &Product,
    placed: &Placed<'_>,
) -> highwater_hal::Result<()> {
    match plan {
        Some(plan) => handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None),
        None => placed.gemm(product, handle),
    }
}

fn by_product(backend: &dyn Backend, kind: BlasKind, bound: Bound) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let product = Product::new(GemmShape::new(DataType::F32, 48, 48, 48), 23);
    let can = backend.capabilities(DEVICE)?;
    let stays = if kind == BlasKind::Lt { can.lt_handle_per_stream } else { can.handle_per_stream };
    for is_other in [false, true] {
        until_conclusive("the product was over when the object was destroyed", |load| {
            let workspace = Block::new(backend, 1 << 20)?;
            let (placed, later) = (product.place(backend)?, product.place(backend)?);
            let (owner, before) = (Stream::new(backend)?, Event::new(backend)?);
            let stream = match bound {
                Bound::ForeignStream => wrapped(backend, &owner)?,
                _ => Stream::new(backend)?,
            };
            let mut handle = Handle::new(backend, kind, &stream)?;
            handle.offer_workspace(&workspace, 0..1 << 20)?;
            let plan = match kind {
                BlasKind::Lt => {
                    Some(handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?)
                }
                _ => None,
            };
            // The first product may load kernels, which takes longer than the work before the next one.
            multiply(&mut handle, plan, &product, &later)?;
            stream.synchronize()?;
            busy.enqueue(&stream, load)?;
            stream.record(&before)?;
            multiply(&mut handle, plan, &product, &placed)?;
            let outstanding = before.is_pending()?;
            match bound {
                Bound::Handle => in_thread(is_other, || Ok(handle.raw_mut().destroy()?))?,
                Bound::DroppedHandle => in_thread(is_other, move || {
                    handle.drop_in_use();
                    Ok(())
                })?,
                Bound::Plan => {
                    if let Some(plan) = plan {
                        in_thread(is_other, || Ok(handle.raw_mut().destroy_plan(plan)?))?;
                    }
                }
                Bound::Stream | Bound::ForeignStream => {
                    in_thread(is_other, || Ok(stream.destroy()?))?;
                    let unchanged = product.place(backend)?;
                    let bytes = unchanged.bytes_of_c()?;
                    for _ in 0..2 {
                        let refused = multiply(&mut handle, plan, &product, &unchanged);
                        check_error!(refused, InvalidHandle, "a product on a stream that was destroyed");
                    }
                    backend.synchronize_device(DEVICE)?;
                    check!(unchanged.bytes_of_c()? == bytes, "a product that was refused changed C");
                    if !stays {
                        let next = Stream::new(backend)?;
                        handle.set_stream(&next)?;
                        handle.offer_workspace(&workspace, 0..1 << 20)?;
                        multiply(&mut handle, plan, &product, &unchanged)?;
                        next.synchronize()?;
                        unchanged.check(&product)?;
                    }
                }
            }
            if !matches!(bound, Bound::Stream | Bound::ForeignStream) {
                replace(backend)?;
                let other = Handle::unbound(backend, kind, DEVICE)?;
                drop(other);
            }
            backend.synchronize_device(DEVICE)?;
            placed.check(&product)?;
            Ok(Attempt::seen(outstanding))
        })
        .map_err(|failure| failure.with_details(&format!("{bound:?} of {kind:?}, in another thread: {is_other}")))?;
    }
    Ok(())
}

/// Events that order a capture are destroyed at once, before the capture ends.
fn events_of_captures(backend: &dyn Backend) -> CaseResult {
    for is_other in [false, true] {
        let blocks = (0..3).map(|_| Block::filled(backend, BYTES, OLD)).collect::<Result<Vec<_>, _>>()?;
        let [x, y, z] = &blocks[..] else { return Err(Failure::new("a case has another number of blocks")) };
        let (origin, member, aside) = (Stream::new(backend)?, Stream::new(backend)?, Stream::new(backend)?);
        let capture = Capture::begin(&origin, CaptureMode::ThreadLocal)?;
        let order = |first: &Stream<'_>, second: &Stream<'_>| -> CaseResult {
            let event = Event::new(backend)?;
            first.record(&event)?;
            second.wait(&event)?;
            in_thread(is_other, || Ok(event.destroy()?))?;
            // Another event may take its place.
            let next = Event::new(backend)?;
            aside.record(&next)?;
            Ok(())
        };
        origin.set(x.all(), NEW)?;
        order(&origin, &member)?;
        member.copy(y.all(), x.all())?;
        order(&member, &origin)?;
        origin.copy(z.all(), y.all())?;
        let executable = capture.end(&[x, y, z])?.instantiate()?;
        for launch in 1..=20 {
            for block in &blocks {
                origin.set(block.all(), OLD)?;
            }
            executable.launch(&origin)?;
            origin.synchronize()?;
            let wrong = z.read()?.iter().filter(|&&byte| byte != NEW).count();
            check!(wrong == 0, "launch {launch} copied {wrong} of {BYTES} bytes before the work of the other stream");
        }
    }
    Ok(())
}

/// The objects that another thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waited {
    Stream,
    ForeignStream,
    Event,
    ForeignEvent,
}

/// Gives a thread that was started the time to get into its call.
fn let_it_wait() {
    std::thread::sleep(Duration::from_millis(2));
}

fn while_a_thread_waits(backend: &dyn Backend, waited: Waited) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("no wait was in progress when the object was destroyed, or it ended with the object", |load| {
        let fresh = Block::filled(backend, BYTES, NEW)?;
        let pinned = Pinned::holding(backend, &[OLD; BYTES])?;
        let (owner, event) = (Stream::new(backend)?, Event::new(backend)?);
        let stream = match waited {
            Waited::ForeignStream => wrapped(backend, &owner)?,
            _ => Stream::new(backend)?,
        };
        let end = Event::new(backend)?;
        let wrapper = match waited {
            Waited::ForeignEvent => {
                let raw = backend.raw_event(event.id())?;
                // SAFETY: the event is destroyed after its wrapper, at the end of this attempt.
                let id = unsafe { backend.event_from_raw(DEVICE, raw) }.map_err(Failure::from)?;
                Some(Event::adopted(backend, id))
            }
            _ => None,
        };
        busy.enqueue(&stream, 2 * load)?;
        stream.copy(pinned.all(), fresh.all())?;
        stream.record(wrapper.as_ref().unwrap_or(&event))?;
        stream.record(&end)?;
        let (stream_id, event_id) = (stream.id(), wrapper.as_ref().map_or(event.id(), Event::id));
        let is_about_to_wait = AtomicBool::new(false);
        // Returns whether the call began before the object was destroyed. On a loaded machine it may begin too late.
        let wait = || -> Result<bool, Failure> {
            // Release suffices: the other thread reads only the flag itself.
            is_about_to_wait.store(true, Ordering::Release);
            let waited = match waited {
                Waited::Stream | Waited::ForeignStream => backend.synchronize_stream(stream_id),
                Waited::Event | Waited::ForeignEvent => backend.synchronize_event(event_id),
            };
            if !is_alive("the wait", waited)? {
                return Ok(false);
            }
            // SAFETY: the wait has returned, which the clause promises to be enough.
            let seen = unsafe { pinned.read_now() };
            check!(seen == [NEW; BYTES], "a wait ended before the work, because the object was destroyed");
            Ok(true)
        };
        let outstanding = std::thread::scope(|scope| -> Result<bool, Failure> {
            let waiting = scope.spawn(wait);
            while !is_about_to_wait.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let_it_wait();
            let outstanding = end.is_pending()?;
            match (waited, wrapper) {
                (Waited::Stream | Waited::ForeignStream, _) => {
                    stream.destroy()?;
                    check_error!(backend.query_stream(stream_id), InvalidHandle, "a stream that a thread waits for");
                }
                (_, Some(wrapper)) => {
                    wrapper.destroy()?;
                    check_error!(backend.query_event(event_id), InvalidHandle, "an event that a thread waits for");
                    event.synchronize()?;
                }
                _ => {
                    event.destroy()?;
                    check_error!(backend.query_event(event_id), InvalidHandle, "an event that a thread waits for");
                }
            }
            replace(backend)?;
            let was_in_time = waiting.join().map_err(|_| Failure::new("a thread panicked"))??;
            Ok(outstanding && was_in_time)
        })?;
        end.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
    .map_err(|failure| failure.with_details(&format!("{waited:?}")))
}

/// Returns whether the call succeeded. A call with an id that was destroyed must return `InvalidHandle`.
fn is_alive(what: &str, answer: highwater_hal::Result<()>) -> Result<bool, Failure> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::InvalidHandle => Ok(false),
        Err(error) => Err(Failure::new(format!("{what} while another thread destroys the object: {error}"))),
    }
}

/// Runs `call` in a few threads until it returns false or this thread has called `destroy`, and a little longer.
fn while_threads_call(
    call: impl Fn(u32) -> Result<bool, Failure> + Sync,
    destroy: impl FnOnce() -> CaseResult,
) -> CaseResult {
    const THREADS: u32 = 3;
    /// The least number of calls before the object is destroyed.
    const CALLS: u32 = 20;
    let (calls, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (call, calls, is_over) = (&call, &calls, &is_over);
                scope.spawn(move || -> CaseResult {
                    let outcome = loop {
                        match call(thread) {
                            Ok(true) if !is_over.load(Ordering::Acquire) => calls.fetch_add(1, Ordering::Relaxed),
                            Ok(_) => break Ok(()),
                            Err(failure) => break Err(failure),
                        };
                    };
                    // A thread that has failed must not be waited for.
                    calls.fetch_add(CALLS, Ordering::Relaxed);
                    outcome
                })
            })
            .collect();
        while calls.load(Ordering::Relaxed) < CALLS {
            std::thread::yield_now();
        }
        let destroyed = destroy();
        is_over.store(true, Ordering::Release);
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        results.into_iter().try_for_each(|result| result.map_err(|_| Failure::new("a thread panicked"))?)?;
        destroyed
    })
}

/// Threads fill one element after the other on a stream until it is destroyed. Exactly the accepted fills are executed.
fn streams_that_threads_use(backend: &dyn Backend) -> CaseResult {
    const ELEMENTS: usize = 1 << 12;
    const ROUNDS: usize = 3;
    for _ in 0..ROUNDS {
        let stream = Stream::new(backend)?;
        let event = Event::new(backend)?;
        let blocks = (0..3).map(|_| Block::filled(backend, ELEMENTS, OLD)).collect::<Result<Vec<_>, _>>()?;
        let accepted = [const { AtomicU32::new(0) }; 3];
        let used = Stream::borrowed(backend, stream.id());
        while_threads_call(
            |thread| {
                let (block, accepted) = (&blocks[thread as usize], &accepted[thread as usize]);
                let next = accepted.load(Ordering::Relaxed) as usize;
                if next == ELEMENTS {
                    return is_alive("query_stream", used.query().map(drop));
                }
                let fill = used.fill(block.span(next..next + 1), FillPattern::U8(NEW));
                if !is_alive("fill", fill)? {
                    return Ok(false);
                }
                accepted.fetch_add(1, Ordering::Relaxed);
                let record = || if thread == 0 { used.record(&event) } else { used.query().map(drop) };
                is_alive("record_event or query_stream", record())
            },
            || Ok(stream.destroy().map(drop)?),
        )?;
        check_error!(used.query(), InvalidHandle, "a stream that was destroyed");
        for (block, accepted) in blocks.iter().zip(&accepted) {
            let (got, accepted) = (block.read()?, accepted.load(Ordering::Relaxed) as usize);
            let done = got.iter().take_while(|&&byte| byte == NEW).count();
            let rest = got[done..].iter().all(|&byte| byte == OLD);
            check!(done == accepted && rest, "{accepted} fills were accepted, and {done} were executed");
        }
    }
    Ok(())
}

/// Threads record, wait for and ask one event until it is destroyed.
fn events_that_threads_use(backend: &dyn Backend) -> CaseResult {
    const ROUNDS: usize = 5;
    for _ in 0..ROUNDS {
        let streams = (0..3).map(|_| Stream::new(backend)).collect::<Result<Vec<_>, _>>()?;
        let event = Event::new(backend)?;
        let id = event.id();
        while_threads_call(
            |thread| {
                let stream = streams[thread as usize].id();
                match thread {
                    0 => is_alive("record_event", backend.record_event(id, stream)),
                    1 => is_alive("stream_wait_event", backend.stream_wait_event(stream, id)),
                    _ => {
                        let queried = is_alive("query_event", backend.query_event(id).map(drop))?;
                        Ok(queried && is_alive("synchronize_event", backend.synchronize_event(id))?)
                    }
                }
            },
            || Ok(event.destroy().map(drop)?),
        )?;
        check_error!(backend.query_event(id), InvalidHandle, "an event that was destroyed");
        for stream in &streams {
            stream.synchronize()?;
        }
    }
    Ok(())
}

/// Threads make executables of one graph until it is destroyed.
fn graphs_that_threads_use(backend: &dyn Backend) -> CaseResult {
    const ROUNDS: usize = 3;
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    for _ in 0..ROUNDS {
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        stream.set(block.all(), NEW)?;
        let graph = capture.end(&[&block])?;
        let kept = graph.instantiate()?;
        let id = graph.id();
        while_threads_call(
            |_| match backend.instantiate_graph(id) {
                Ok(executable) => {
                    Executable::adopted(backend, executable).destroy()?;
                    Ok(true)
                }
                Err(error) => is_alive("instantiate_graph", Err(error)),
            },
            || Ok(graph.destroy().map(drop)?),
        )?;
        check_error!(backend.instantiate_graph(id), InvalidHandle, "a graph that was destroyed");
        kept.launch(&stream)?;
        stream.synchronize()?;
        check!(block.read()? == [NEW; BYTES], "an executable whose graph was destroyed does not work");
        block.write(0, &[OLD; BYTES])?;
    }
    Ok(())
}
