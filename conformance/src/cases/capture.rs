//! Capture and replay: what a capture records without executing it, what disturbs it, and what a replay does.

use std::sync::{PoisonError, RwLock};

use highwater_hal::numbers::Coded;
use highwater_hal::{
    Backend, BlasKind, BlasOptions, CaptureMode, CopyShape, DataType, DeviceMemoryKind, Epilogue, FillPattern, Gemm,
    GemmShape, PlanOptions, Transport,
};

use super::blas::kinds;
use super::concurrency::in_thread;
use super::kinds::StreamKind;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{
    Addresses, Block, Capture, DEVICE, Event, Executable, Graph, Handle, Memory, Pinned, Registered, Stream,
    holding_all, read_all,
};
use crate::idle_stream::IdleStream;
use crate::matrix::Product;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "capture";
    records_instead_of_executing: ["capture.not-executed"] needs [has::capture];
    records_products_instead_of_executing: ["capture.not-executed"] needs [has::capture, has::gemm_f32];
    executes_what_came_before: ["capture.not-executed", "stream.order"] needs [has::capture];
    leaves_other_streams_alone: ["capture.not-executed", "stream.independent"] needs [has::capture];
    refuses_to_begin_again: ["capture.begin-again"] needs [has::capture];
    refuses_to_begin_on_a_stream_that_joined: ["capture.begin-again", "capture.joins"] needs [has::capture];
    one_thread_captures_several_streams: ["capture.several", "capture.replay"] needs [has::capture];
    one_thread_captures_on_two_devices: ["capture.several", "capture.replay"] needs [TWO_DEVICES, has::capture];
    captures_with_streams_that_joined_are_apart: ["capture.several", "capture.joins", "capture.replay"] needs [has::capture];
    streams_join_by_events: ["capture.joins", "capture.not-executed", "capture.replay"] needs [has::capture];
    records_the_work_of_every_thread: ["capture.any-thread", "capture.not-executed", "capture.replay"] needs [has::capture];
    records_each_kind_of_work_of_another_thread: ["capture.any-thread", "capture.not-executed", "capture.replay"]
        needs [has::capture];
    relaxed_ends_on_another_thread: ["capture.any-thread"] needs [has::capture];
    is_not_disturbed_by_memory_and_events: ["capture.undisturbed"] needs [has::capture, has::create_during_capture];
    is_not_disturbed_by_another_thread: ["capture.undisturbed"] needs [has::capture, has::create_during_capture];
    is_not_disturbed_by_mapped_memory: ["mapped.capture"]
        needs [has::capture, has::create_during_capture, has::mapped_memory];
    is_not_disturbed_on_another_device: ["capture.undisturbed"]
        needs [TWO_DEVICES, has::capture, has::create_during_capture];
    of_two_devices_at_once: ["capture.begin-again", "capture.replay", "backend.concurrent"] needs [TWO_DEVICES, has::capture];
    is_not_disturbed_by_new_handles: ["capture.undisturbed"] needs [has::capture, has::create_during_capture];
    gives_no_answer_about_its_streams: ["capture.no-answer", "capture.lost"] needs [has::capture];
    gives_no_answer_about_its_events: ["capture.no-answer", "capture.lost"] needs [has::capture];
    gives_no_answer_about_events_that_had_one: ["capture.no-answer", "capture.lost"] needs [has::capture];
    is_lost_where_a_stream_is_not_joined: ["capture.unjoined", "capture.lost"] needs [has::capture];
    is_lost_where_a_stream_goes_on_after_its_join: ["capture.unjoined", "capture.lost"] needs [has::capture];
    events_that_it_recorded_work_outside: ["event.wait-orders", "event.query", "event.synchronize", "capture.lost"]
        needs [has::capture];
    begins_anew_after_it_was_lost: ["capture.lost", "capture.replay"] needs [has::capture];
    cannot_end_without_a_beginning: ["capture.end-without"] needs [has::capture];
    cannot_end_twice: ["capture.end-without"] needs [has::capture];
    replays_execute_everything_each_time: ["capture.replay"] needs [has::capture];
    two_replays_add_a_product_twice: ["capture.replay", "gemm.beta"]
        needs [has::capture, has::gemm_f32] => add_products(DataType::F32);
    two_replays_add_a_product_of_doubles_twice: ["capture.replay", "gemm.beta"]
        needs [has::capture, has::gemm_f64] => add_products(DataType::F64);
    replays_of_products_are_right: ["capture.replay", "gemm.value"] needs [has::capture, has::gemm_f32];
    replays_of_plans_are_right: ["capture.replay", "plan.value"] needs [has::capture, has::gemm_f32, has::lt_plans];
    replays_return_at_once: ["capture.replay", "stream.asynchronous"] needs [has::capture];
    another_thread_uses_graphs: ["backend.concurrent", "capture.replay"] needs [has::capture];
    several_graphs_are_apart: ["capture.replay", "capture.destroy-graph"] needs [has::capture];
    replays_run_in_the_order_of_the_stream: ["capture.replay", "stream.order"] needs [has::capture];
    replays_keep_the_order_of_streams_that_joined: ["capture.replay", "capture.joins"] needs [has::capture];
    replays_run_on_another_stream: ["capture.replay"] needs [has::capture];
    each_launch_runs_on_its_own_stream: ["capture.replay", "stream.independent"] needs [has::capture];
    many_replays_run_one_after_the_other: ["capture.replay"] needs [has::capture];
    replays_of_nothing_do_nothing: ["capture.replay"] needs [has::capture];
    replays_fill_with_every_width: ["capture.replay", "fill.exact"] needs [has::capture];
    replays_use_the_scalars_of_the_recording: ["capture.by-value"] needs [has::capture, has::gemm_f32];
    replays_use_the_addresses_of_the_recording: ["capture.by-value"] needs [has::capture];
    executables_outlive_their_graph: ["capture.destroy-graph", "capture.replay"] needs [has::capture];
    one_graph_makes_several_executables: ["capture.replay", "capture.destroy-executable"] needs [has::capture];
    pending_launches_finish_when_all_is_destroyed: ["capture.replay", "capture.destroy-graph", "capture.destroy-executable"]
        needs [has::capture];
    pending_products_finish_when_all_is_destroyed: ["capture.replay", "capture.destroy-executable"]
        needs [has::capture, has::gemm_f32];
    destroyed_graphs_are_stale: ["backend.ids-checked"] needs [has::capture];
    graphs_count: ["backend.live-objects"] needs [has::capture];
    threads_capture_at_once: ["backend.concurrent", "capture.not-executed", "capture.replay"] needs [has::capture];
}

const BYTES: usize = 1 << 16;
const OLD: u8 = 0x10;
const NEW: u8 = 0x20;

/// Records the work of `enqueue` on the stream, and instantiates the graph.
fn recorded<'m, 'b: 'm>(
    stream: &Stream<'b>,
    memory: &[&'m dyn Memory],
    enqueue: impl FnOnce() -> highwater_hal::Result<()>,
) -> Result<Executable<'m>, Failure> {
    let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
    enqueue()?;
    Ok(capture.end(memory)?.instantiate()?)
}

fn holds(block: &Block<'_>, byte: u8, what: &str) -> CaseResult {
    let got = block.read()?;
    let other = got.iter().find(|&&other| other != byte);
    check!(other.is_none(), "{what}: a byte is {:#x}, expected {byte:#x}", other.copied().unwrap_or_default());
    Ok(())
}

/// Checks that a stream accepts and executes work.
fn works(backend: &dyn Backend, stream: &Stream<'_>, when: &str) -> CaseResult {
    check!(!backend.is_capturing(stream.id())?, "a stream takes part in a capture {when}");
    let block = Block::filled(backend, BYTES, OLD)?;
    stream.set(block.all(), NEW)?;
    stream.synchronize()?;
    check!(stream.query()?.is_complete(), "a stream is pending after it was synchronized {when}");
    holds(&block, NEW, &format!("a fill {when}"))
}

// ------------------------------------------------------------------------------------------------------- not executed

fn records_instead_of_executing(backend: &dyn Backend) -> CaseResult {
    for &mode in CaptureMode::ALL {
        let (x, y) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (source, target) = (Pinned::holding(backend, &[NEW; BYTES])?, Pinned::holding(backend, &[OLD; BYTES])?);
        let idle = IdleStream::on(backend, DEVICE)?;
        let stream = Stream::new(backend)?;
        check!(!backend.is_capturing(stream.id())?, "a new stream takes part in a capture");
        let capture = Capture::begin(&stream, mode)?;
        check!(backend.is_capturing(stream.id())?, "a stream does not take part in the capture that began on it");
        stream.set(x.all(), NEW)?;
        stream.copy(y.span(0..BYTES / 2), x.span(0..BYTES / 2))?;
        stream.copy(y.span(BYTES / 2..BYTES), source.span(BYTES / 2..BYTES))?;
        stream.copy(target.all(), x.all())?;
        let graph = capture.end(&[&x, &y, &source, &target])?;
        check!(!backend.is_capturing(stream.id())?, "a stream takes part in a capture that has ended");
        stream.synchronize()?;
        idle.let_others_begin()?;
        for (what, block) in [("a fill", &x), ("copies", &y)] {
            holds(block, OLD, &format!("{what} during a capture ({mode:?}) was executed"))?;
        }
        check!(target.read()? == [OLD; BYTES], "a copy to the host during a capture ({mode:?}) was executed");
        // Instantiating must not execute it either.
        let executable = graph.instantiate()?;
        stream.synchronize()?;
        idle.let_others_begin()?;
        holds(&x, OLD, "a graph was executed when it was made executable")?;
        executable.launch(&stream)?;
        stream.synchronize()?;
        holds(&x, NEW, "a recorded fill, launched")?;
        holds(&y, NEW, "recorded copies, launched")?;
        check!(target.read()? == [NEW; BYTES], "a recorded copy to the host was not executed when it was launched");
    }
    Ok(())
}

fn records_products_instead_of_executing(backend: &dyn Backend) -> CaseResult {
    let workspace = Block::new(backend, 1 << 20)?;
    let product = Product::new(GemmShape::new(DataType::F32, 24, 20, 30), 1).with_scale(1.0, 1.0);
    let placed = product.place(backend)?;
    let before = placed.c.read()?;
    let idle = IdleStream::on(backend, DEVICE)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.offer_workspace(&workspace, 0..1 << 20)?;
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    placed.gemm(&product, &mut handle)?;
    let graph = capture.end(&[&placed.a, &placed.b, &placed.c, &workspace])?;
    stream.synchronize()?;
    idle.let_others_begin()?;
    check!(placed.c.read()? == before, "a product during a capture was executed");
    graph.instantiate()?.launch(&stream)?;
    stream.synchronize()?;
    placed.check(&product)
}

fn executes_what_came_before(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the stream was idle when the capture began: beginning waits", |load| {
        let (before, during) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
        busy.enqueue(&stream, load)?;
        stream.set(before.all(), NEW)?;
        stream.record(&event)?;
        let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
        let pending = event.is_pending()?;
        stream.set(during.all(), NEW)?;
        let executable = capture.end(&[&during])?.instantiate()?;
        stream.synchronize()?;
        holds(&before, NEW, "work that was enqueued before the capture")?;
        holds(&during, OLD, "work during the capture was executed")?;
        before.write(0, &[OLD; BYTES])?;
        executable.launch(&stream)?;
        stream.synchronize()?;
        holds(&before, OLD, "work before the capture was recorded")?;
        holds(&during, NEW, "a recorded fill, launched")?;
        Ok(Attempt::seen(pending))
    })
}

fn leaves_other_streams_alone(backend: &dyn Backend) -> CaseResult {
    let (recorded, executed) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
    let (stream, other) = (Stream::new(backend)?, Stream::new(backend)?);
    let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
    stream.set(recorded.all(), NEW)?;
    check!(!backend.is_capturing(other.id())?, "a stream that has nothing to do with a capture takes part in it");
    other.set(executed.all(), NEW)?;
    other.synchronize()?;
    check!(other.query()?.is_complete(), "a stream is pending after it was synchronized beside a capture");
    let executable = capture.end(&[&recorded, &executed])?.instantiate()?;
    holds(&executed, NEW, "a fill of another stream beside a capture")?;
    executed.write(0, &[OLD; BYTES])?;
    executable.launch(&stream)?;
    stream.synchronize()?;
    holds(&executed, OLD, "work of another stream was recorded")?;
    holds(&recorded, NEW, "a recorded fill, launched")
}

fn records_the_work_of_every_thread(backend: &dyn Backend) -> CaseResult {
    let (here, there) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
    let stream = Stream::new(backend)?;
    for &mode in CaptureMode::ALL {
        let capture = Capture::begin(&stream, mode)?;
        stream.set(here.all(), NEW)?;
        on_another_thread(|| Ok(stream.set(there.all(), NEW)?))?;
        let executable = capture.end(&[&here, &there])?.instantiate()?;
        stream.synchronize()?;
        holds(&there, OLD, "work of another thread on a stream that is captured was executed")?;
        executable.launch(&stream)?;
        stream.synchronize()?;
        holds(&here, NEW, "a recorded fill, launched")?;
        holds(&there, NEW, "a fill that another thread recorded, launched")?;
        [&here, &there].into_iter().try_for_each(|block| block.write(0, &[OLD; BYTES]))?;
    }
    Ok(())
}

fn relaxed_ends_on_another_thread(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
    stream.set(block.all(), NEW)?;
    let mut graph = None;
    on_another_thread(|| {
        graph = Some(capture.end(&[&block])?);
        Ok(())
    })?;
    check!(!backend.is_capturing(stream.id())?, "a stream takes part in a capture that another thread ended");
    let Some(graph) = graph else { return Err(Failure::new("a thread ended no capture")) };
    graph.instantiate()?.launch(&stream)?;
    stream.synchronize()?;
    holds(&block, NEW, "a fill of a capture that another thread ended, launched")
}

/// Work that a stream records, with its name.
type Work<'a> = (&'static str, Box<dyn FnMut() -> highwater_hal::Result<()> + Send + 'a>);

/// The kinds of work of the traits, each enqueued by another thread than the one that began and ends the capture.
fn records_each_kind_of_work_of_another_thread(backend: &dyn Backend) -> CaseResult {
    const WORKSPACE_BYTES: usize = 1 << 20;
    let can = backend.capabilities(DEVICE)?;
    let stream = Stream::new(backend)?;
    let old = || Block::filled(backend, BYTES, OLD);
    let (filled, copied, there, rows, new) = (old()?, old()?, old()?, old()?, Block::filled(backend, BYTES, NEW)?);
    let (source, target) = (Pinned::holding(backend, &[NEW; BYTES])?, Pinned::holding(backend, &[OLD; BYTES])?);
    let shape = CopyShape::new(BYTES / 4, 4);
    let product = Product::new(GemmShape::new(DataType::F32, 16, 16, 16), 3);
    // The second is for the plan.
    let placed = [product.place(backend)?, product.place(backend)?];
    let before = placed[0].c.read()?;
    let workspaces = [Block::new(backend, WORKSPACE_BYTES)?, Block::new(backend, WORKSPACE_BYTES)?];
    let mut handles = Vec::new();
    for &kind in kinds(backend)?.iter().filter(|_| can.gemm_f32) {
        let workspace = &workspaces[usize::from(kind == BlasKind::Lt)];
        let mut handle = Handle::new(backend, kind, &stream)?;
        handle.offer_workspace(workspace, 0..WORKSPACE_BYTES)?;
        let plan = match kind {
            BlasKind::Lt => {
                let options = PlanOptions::new(product.shape, Epilogue::None, WORKSPACE_BYTES);
                Some(handle.raw_mut().create_plan(&options)?)
            }
            _ => None,
        };
        handles.push((handle, plan));
    }
    let mut work: Vec<Work<'_>> = vec![
        ("a fill", Box::new(|| stream.set(filled.all(), NEW))),
        ("a copy on the device", Box::new(|| stream.copy(copied.all(), new.all()))),
        ("a copy to the device", Box::new(|| stream.copy(there.all(), source.all()))),
        ("a copy to the host", Box::new(|| stream.copy(target.all(), new.all()))),
        ("a copy of rows", Box::new(|| stream.copy_rows(rows.all(), new.all(), shape))),
    ];
    let multiplied = handles.len();
    for (handle, plan) in &mut handles {
        let (plan, [ours, plans], product) = (*plan, &placed, &product);
        match plan {
            Some(plan) => work.push((
                "a run of a plan",
                Box::new(move || handle.run_plan(plan, &product.shape, (1.0, 0.0), plans.operands(), None, None)),
            )),
            None => work.push(("a product", Box::new(move || ours.gemm(product, handle)))),
        }
    }
    let check = |executed: bool, when: &str| -> CaseResult {
        let byte = if executed { NEW } else { OLD };
        for (what, block) in [
            ("a fill", &filled),
            ("a copy on the device", &copied),
            ("a copy to the device", &there),
            ("a copy of rows", &rows),
        ] {
            holds(block, byte, &format!("{what} of another thread {when}"))?;
        }
        check!(target.read()? == [byte; BYTES], "a copy to the host of another thread {when}");
        for placed in &placed[..multiplied] {
            if executed {
                placed.check(&product)?;
            } else {
                check!(placed.c.read()? == before, "a product or a run of a plan of another thread {when}");
            }
        }
        Ok(())
    };
    let idle = IdleStream::on(backend, DEVICE)?;
    let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
    for (what, enqueue) in &mut work {
        let done = on_another_thread(|| Ok(enqueue()?));
        done.map_err(|failure| failure.with_details(&format!("{what} of another thread during a capture")))?;
    }
    let [ours, plans] = &placed;
    let memory: [&dyn Memory; 15] = [
        &filled,
        &copied,
        &there,
        &rows,
        &new,
        &source,
        &target,
        &ours.a,
        &ours.b,
        &ours.c,
        &plans.a,
        &plans.b,
        &plans.c,
        &workspaces[0],
        &workspaces[1],
    ];
    let graph = capture.end(&memory)?;
    stream.synchronize()?;
    idle.let_others_begin()?;
    check(false, "was executed during a capture")?;
    graph.instantiate()?.launch(&stream)?;
    stream.synchronize()?;
    check(true, "was not recorded")
}

fn on_another_thread(act: impl FnOnce() -> CaseResult + Send) -> CaseResult {
    std::thread::scope(|scope| scope.spawn(act).join().map_err(|_| Failure::new("a thread panicked"))?)
}

// -------------------------------------------------------------------------------------------------- beginning, joining

fn refuses_to_begin_again(backend: &dyn Backend) -> CaseResult {
    for &first in CaptureMode::ALL {
        let stream = Stream::new(backend)?;
        let capture = Capture::begin(&stream, first)?;
        for &again in CaptureMode::ALL {
            check_error!(backend.begin_capture(stream.id(), again), Capture, "{again:?} begun on a {first:?} capture");
        }
        drop(capture);
        works(backend, &stream, "after a capture was begun twice")?;
    }
    Ok(())
}

fn refuses_to_begin_on_a_stream_that_joined(backend: &dyn Backend) -> CaseResult {
    let (stream, joined) = (Stream::new(backend)?, Stream::new(backend)?);
    let (fork, join) = (Event::new(backend)?, Event::new(backend)?);
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    stream.record(&fork)?;
    joined.wait(&fork)?;
    let begun = backend.begin_capture(joined.id(), CaptureMode::ThreadLocal);
    check_error!(begun, Capture, "a capture begun on a stream that has joined another");
    joined.record(&join)?;
    stream.wait(&join)?;
    drop(capture);
    works(backend, &stream, "after a capture that was joined")?;
    works(backend, &joined, "after a capture that it had joined")
}

/// One of several captures: its stream, and a block for each fill that it records.
struct Separate<'b> {
    stream: Stream<'b>,
    blocks: [Block<'b>; 3],
    byte: u8,
}

impl<'b> Separate<'b> {
    fn on(backend: &'b dyn Backend, device: u32, byte: u8) -> Result<Self, Failure> {
        let stream = Stream::on(backend, device)?;
        Ok(Self { stream, blocks: holding_all(backend, device, [&[OLD; 4096]; 3])?, byte })
    }

    fn fill(&self, which: usize) -> CaseResult {
        Ok(self.stream.set(self.blocks[which].all(), self.byte)?)
    }

    fn memory(&self) -> [&dyn Memory; 3] {
        self.blocks.each_ref().map(|block| block as &dyn Memory)
    }

    /// Fills the blocks with the old bytes.
    fn reset(&self) -> CaseResult {
        self.blocks.iter().try_for_each(|block| self.stream.set(block.all(), OLD))?;
        Ok(self.stream.synchronize()?)
    }

    fn hold(&self, backend: &dyn Backend, byte: u8, what: &str) -> CaseResult {
        let bytes = read_all(backend, &self.blocks.each_ref())?.concat();
        let other = bytes.into_iter().find(|&other| other != byte);
        check!(other.is_none(), "{what}: a byte is {:#x}, expected {byte:#x}", other.unwrap_or_default());
        Ok(())
    }
}

/// Captures two streams at once in this thread, in every pair of modes, and ends the captures in both orders.
fn two_captures_at_once(backend: &dyn Backend, devices: [u32; 2]) -> CaseResult {
    let both = [Separate::on(backend, devices[0], NEW)?, Separate::on(backend, devices[1], NEW + 1)?];
    let pairs = CaptureMode::ALL.iter().flat_map(|&one| CaptureMode::ALL.iter().map(move |&other| [one, other]));
    for (modes, first_to_end) in pairs.flat_map(|modes| [(modes, 0), (modes, 1)]) {
        let when = format!("two captures of one thread ({modes:?}), of which capture {first_to_end} ends first");
        both.iter().try_for_each(Separate::reset)?;
        let mut captures = [None, None];
        for (part, (one, mode)) in both.iter().zip(modes).enumerate() {
            let begun = Capture::begin(&one.stream, mode);
            captures[part] = Some(begun.map_err(|error| Failure::new(format!("{when}: capture {part}: {error}")))?);
        }
        for which in 0..2 {
            both.iter().try_for_each(|one| one.fill(which))?;
        }
        let mut executables = Vec::new();
        for part in [first_to_end, 1 - first_to_end] {
            let one = &both[part];
            check!(backend.is_capturing(one.stream.id())?, "{when}: stream {part} takes part in no capture");
            // For the second one, the other capture has ended.
            one.fill(2)?;
            let Some(capture) = captures[part].take() else { continue };
            let ended = capture.end(&both.each_ref().map(Separate::memory).concat());
            let graph = ended.map_err(|error| Failure::new(format!("{when}: end of capture {part}: {error}")))?;
            executables.push((part, graph.instantiate()?));
            check!(!backend.is_capturing(one.stream.id())?, "{when}: stream {part} takes part after the end");
        }
        for (part, executable) in &executables {
            let (own, other) = (&both[*part], &both[1 - *part]);
            own.hold(backend, OLD, &format!("{when}: bytes of capture {part} before a launch"))?;
            executable.launch(&own.stream)?;
            own.stream.synchronize()?;
            own.hold(backend, own.byte, &format!("{when}: bytes of graph {part}, launched"))?;
            own.reset()?;
            other.hold(backend, OLD, &format!("{when}: bytes of the other capture, after a launch of graph {part}"))?;
        }
    }
    Ok(())
}

fn one_thread_captures_several_streams(backend: &dyn Backend) -> CaseResult {
    two_captures_at_once(backend, [DEVICE; 2])
}

fn one_thread_captures_on_two_devices(backend: &dyn Backend) -> CaseResult {
    if !backend.capabilities(1)?.capture {
        return Err(Failure::skip("the second device has no captures"));
    }
    two_captures_at_once(backend, [0, 1])
}

/// Lets a stream join each of two captures, and alternately records work of both there. Each graph has the work of its two streams.
fn captures_with_streams_that_joined_are_apart(backend: &dyn Backend) -> CaseResult {
    let both = [Separate::on(backend, DEVICE, NEW)?, Separate::on(backend, DEVICE, NEW + 1)?];
    let joined = [Stream::new(backend)?, Stream::new(backend)?];
    let events = [[Event::new(backend)?, Event::new(backend)?], [Event::new(backend)?, Event::new(backend)?]];
    let mut captures = Vec::new();
    for one in &both {
        captures.push(Capture::begin(&one.stream, CaptureMode::ThreadLocal)?);
    }
    for (one, [begun, _]) in both.iter().zip(&events) {
        one.fill(0)?;
        one.stream.record(begun)?;
    }
    for (stream, [begun, _]) in joined.iter().zip(&events) {
        stream.wait(begun)?;
    }
    // The joined stream copies the bytes of the first one.
    for ((one, stream), [_, done]) in both.iter().zip(&joined).zip(&events) {
        stream.copy(one.blocks[1].all(), one.blocks[0].all())?;
        stream.record(done)?;
    }
    for (one, [_, done]) in both.iter().zip(&events) {
        one.stream.wait(done)?;
        one.stream.copy(one.blocks[2].all(), one.blocks[1].all())?;
    }
    let memory = both.each_ref().map(|one| one.memory()).concat();
    let graphs: Vec<_> = captures.into_iter().map(|capture| capture.end(&memory)).collect::<Result<_, _>>()?;
    for (part, graph) in graphs.iter().enumerate() {
        both.iter().try_for_each(Separate::reset)?;
        graph.instantiate()?.launch(&joined[1 - part])?;
        joined[1 - part].synchronize()?;
        both[part].hold(backend, both[part].byte, "bytes of a graph with a stream that joined, launched")?;
        both[1 - part].hold(backend, OLD, "bytes of another graph, whose capture was open at the same time")?;
    }
    Ok(())
}

fn streams_join_by_events(backend: &dyn Backend) -> CaseResult {
    let (x, y, z) =
        (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
    let (stream, joined) = (Stream::new(backend)?, Stream::new(backend)?);
    let (fork, join, outside) = (Event::new(backend)?, Event::new(backend)?, Event::new(backend)?);
    // An event that was recorded outside makes no stream join.
    joined.record(&outside)?;
    joined.synchronize()?;
    let (apart, beside) = (Stream::new(backend)?, Stream::new(backend)?);
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    stream.set(x.all(), NEW)?;
    check!(!backend.is_capturing(joined.id())?, "a stream has joined a capture before it waited");
    // An event of a stream outside, recorded during the capture, makes no stream join either.
    apart.record(&outside)?;
    beside.wait(&outside)?;
    check!(
        !backend.is_capturing(beside.id())?,
        "a stream joined a capture by an event that was recorded outside of it"
    );
    stream.record(&fork)?;
    joined.wait(&fork)?;
    check!(backend.is_capturing(joined.id())?, "a stream that waits for an event of a capture does not take part");
    joined.copy(y.all(), x.all())?;
    joined.record(&join)?;
    stream.wait(&join)?;
    stream.copy(z.all(), y.all())?;
    let executable = capture.end(&[&x, &y, &z])?.instantiate()?;
    for (what, of) in [("the first stream", &stream), ("a stream that joined", &joined)] {
        check!(!backend.is_capturing(of.id())?, "{what} takes part in a capture that has ended");
        of.synchronize()?;
    }
    for block in [&x, &y, &z] {
        holds(block, OLD, "work during a capture of two streams was executed")?;
    }
    executable.launch(&stream)?;
    stream.synchronize()?;
    for (what, block) in [("first", &x), ("joined", &y), ("last", &z)] {
        holds(block, NEW, &format!("the {what} operation of a capture of two streams, launched"))?;
    }
    works(backend, &joined, "after a capture that it had joined")
}

// -------------------------------------------------------------------------------------------------------- undisturbed

/// Makes every call that must not disturb a capture, except those of handles, on the device of the objects outside.
fn disturb(backend: &dyn Backend, outside: &Outside<'_>) -> CaseResult {
    let device = outside.stream.id().device();
    let can = backend.capabilities(device)?;
    let block = Block::on(backend, device, 5000)?;
    let pinned = Pinned::new(backend, 5000)?;
    drop((block, pinned));
    if can.host_register {
        Registered::new(backend, &[1; 5000])?.unregister()?;
    }
    let event = Event::on(backend, device)?;
    check!(event.query()?.is_complete(), "an event that was never recorded is pending during a capture");
    drop(event);
    let Outside { stream, reached, graph } = outside;
    check!(reached.query()?.is_complete(), "an event that was reached before a capture is pending during it");
    reached.synchronize()?;
    stream.wait(reached)?;
    let event = Event::on(backend, device)?;
    stream.record(&event)?;
    check!(stream.query().is_ok(), "a query of a stream that takes no part, before it was synchronized");
    stream.synchronize()?;
    check!(stream.query()?.is_complete(), "a stream that takes no part is pending after it was synchronized");
    event.synchronize()?;
    check!(
        event.query()?.is_complete(),
        "an event of a stream that takes no part is pending after it was synchronized"
    );
    if can.shareable_memory {
        for &transport in Transport::ALL.iter().filter(|&&transport| can.ipc_transports.contains(transport)) {
            let block = Block::with_kind(backend, device, 5000, DeviceMemoryKind::Shareable(transport))?;
            block.export(transport)?;
        }
    }
    if can.stream_ordered_memory {
        let block = Block::with_kind(backend, device, 5000, DeviceMemoryKind::StreamOrdered(stream.id()))?;
        block.free_in_order()?;
    }
    let executable = graph.instantiate()?;
    executable.launch(stream)?;
    stream.synchronize()?;
    executable.destroy()?;
    Ok(())
}

/// Objects from before a capture that take no part.
struct Outside<'b> {
    stream: Stream<'b>,
    reached: Event<'b>,
    graph: Graph<'b>,
}

/// Captures in each mode on the first device, makes the calls in the middle, and checks that nothing was lost.
fn undisturbed(
    backend: &dyn Backend,
    disturb: impl Fn(&Outside<'_>) -> Result<Option<Box<dyn highwater_hal::BlasHandle>>, Failure>,
) -> CaseResult {
    undisturbed_on(backend, DEVICE, disturb)
}

/// The same, with objects outside on this device.
fn undisturbed_on(
    backend: &dyn Backend,
    device: u32,
    disturb: impl Fn(&Outside<'_>) -> Result<Option<Box<dyn highwater_hal::BlasHandle>>, Failure>,
) -> CaseResult {
    for &mode in CaptureMode::ALL {
        let (x, y) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let stream = Stream::new(backend)?;
        let other = Stream::on(backend, device)?;
        let graph = Capture::begin(&other, mode)?.end(&[])?;
        let outside = Outside { stream: other, reached: Event::on(backend, device)?, graph };
        // On the device of the capture, the stream takes part later.
        let recorder = if device == DEVICE { &stream } else { &outside.stream };
        recorder.record(&outside.reached)?;
        recorder.synchronize()?;
        let capture = Capture::begin(&stream, mode)?;
        stream.set(x.all(), NEW)?;
        let kept = disturb(&outside)?;
        check!(backend.is_capturing(stream.id())?, "a capture ({mode:?}) was ended by something that is no part of it");
        stream.copy(y.all(), x.all())?;
        let graph = capture.end(&[&x, &y]);
        check!(graph.is_ok(), "calls that must not disturb a capture ({mode:?}) lost it: {:?}", graph.err());
        // Destroying a handle may wait for the device, so it happens after the capture.
        drop(kept);
        holds(&y, OLD, "a disturbed capture was executed")?;
        graph?.instantiate()?.launch(&stream)?;
        stream.synchronize()?;
        holds(&y, NEW, "the bytes of a launch recorded after such calls")?;
    }
    Ok(())
}

fn is_not_disturbed_by_memory_and_events(backend: &dyn Backend) -> CaseResult {
    undisturbed(backend, |outside| disturb(backend, outside).map(|()| None))
}

fn is_not_disturbed_by_another_thread(backend: &dyn Backend) -> CaseResult {
    undisturbed(backend, |outside| {
        on_another_thread(|| disturb(backend, outside))?;
        Ok(None)
    })
}

fn is_not_disturbed_on_another_device(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(1)?;
    if !can.capture || !can.create_during_capture {
        return Ok(());
    }
    undisturbed_on(backend, 1, |outside| disturb(backend, outside).map(|()| None))?;
    undisturbed_on(backend, 1, |outside| {
        on_another_thread(|| disturb(backend, outside))?;
        Ok(None)
    })
}

/// Captures of two devices that are open at the same time, one inside the other and overlapping.
fn of_two_devices_at_once(backend: &dyn Backend) -> CaseResult {
    if !backend.capabilities(1)?.capture {
        return Ok(());
    }
    for &mode in CaptureMode::ALL {
        for overlap in [false, true] {
            let streams = [Stream::on(backend, 0)?, Stream::on(backend, 1)?];
            let blocks = [Block::filled_on(backend, 0, BYTES, OLD)?, Block::filled_on(backend, 1, BYTES, OLD)?];
            let first = Capture::begin(&streams[0], mode)?;
            let second = Capture::begin(&streams[1], mode)?;
            for (stream, block) in streams.iter().zip(&blocks) {
                check!(backend.is_capturing(stream.id())?, "one of two captures at once is not open ({mode:?})");
                stream.set(block.all(), NEW)?;
            }
            let (first, second) = if overlap {
                let first = first.end(&[&blocks[0]])?;
                streams[1].set(blocks[1].span(0..1), NEW)?;
                (first, second.end(&[&blocks[1]])?)
            } else {
                let second = second.end(&[&blocks[1]])?;
                streams[0].set(blocks[0].span(0..1), NEW)?;
                (first.end(&[&blocks[0]])?, second)
            };
            for (graph, (stream, block)) in [first, second].iter().zip(streams.iter().zip(&blocks)) {
                holds(block, OLD, "a fill of one of two captures at once was executed")?;
                graph.instantiate()?.launch(stream)?;
                stream.synchronize()?;
                holds(block, NEW, "a fill of one of two captures at once, launched")?;
            }
        }
    }
    Ok(())
}

fn is_not_disturbed_by_mapped_memory(backend: &dyn Backend) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    let map = || -> CaseResult {
        let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
        let memory = addresses.fill_in(0..piece)?;
        addresses.unmap(0..piece)?;
        addresses.map(piece, &memory, piece)?;
        addresses.give_access(piece..2 * piece, DEVICE)?;
        addresses.unmap(piece..2 * piece)?;
        Ok(())
    };
    undisturbed(backend, |_| map().map(|()| None))?;
    undisturbed(backend, |_| {
        on_another_thread(map)?;
        Ok(None)
    })
}

fn is_not_disturbed_by_new_handles(backend: &dyn Backend) -> CaseResult {
    for &kind in kinds(backend)? {
        undisturbed(backend, |_| Ok(Some(backend.create_blas_handle(DEVICE, &BlasOptions::new(kind))?)))?;
    }
    Ok(())
}

// ---------------------------------------------------------------------------------------------------- no answer, lost

/// A query during a capture: of the first stream, one that joined, and an event between them.
type Question = fn(&dyn Backend, &Stream<'_>, &Stream<'_>, &Event<'_>) -> highwater_hal::Result<()>;

/// Makes each query in its own capture.
fn no_answer(backend: &dyn Backend, questions: &[(&str, Question)]) -> CaseResult {
    for &mode in CaptureMode::ALL {
        for (what, question) in questions {
            let block = Block::filled(backend, BYTES, OLD)?;
            let (stream, joined) = (Stream::new(backend)?, Stream::new(backend)?);
            let (fork, join) = (Event::new(backend)?, Event::new(backend)?);
            let capture = Capture::begin(&stream, mode)?;
            stream.set(block.all(), NEW)?;
            stream.record(&fork)?;
            joined.wait(&fork)?;
            check_error!(question(backend, &stream, &joined, &fork), Capture, "{what} during a {mode:?} capture");
            // The query may lose the capture. These calls may then fail too, and its end reports the loss.
            let rejoined = joined.record(&join).and_then(|()| stream.wait(&join));
            match capture.end(&[&block]) {
                Ok(graph) => {
                    rejoined?;
                    graph.instantiate()?.launch(&stream)?;
                    stream.synchronize()?;
                    holds(&block, NEW, "a capture that survived a question, launched")?;
                }
                Err(error) => {
                    check_error!(Err::<(), _>(error), Capture, "the end of a capture that was lost by {what}");
                    stream.synchronize()?;
                    holds(&block, OLD, "a capture that was lost was executed")?;
                }
            }
            works(backend, &stream, "after a capture in which something was asked")?;
            works(backend, &joined, "after a capture, which it had joined, in which something was asked")?;
        }
    }
    Ok(())
}

fn gives_no_answer_about_its_streams(backend: &dyn Backend) -> CaseResult {
    no_answer(
        backend,
        &[
            ("query_stream of the first stream", |_, stream, _, _| stream.query().map(drop)),
            ("synchronize_stream of the first stream", |_, stream, _, _| stream.synchronize()),
            ("query_stream of a stream that joined", |_, _, joined, _| joined.query().map(drop)),
            ("synchronize_stream of a stream that joined", |_, _, joined, _| joined.synchronize()),
        ],
    )
}

fn gives_no_answer_about_its_events(backend: &dyn Backend) -> CaseResult {
    no_answer(
        backend,
        &[
            ("query_event of an event recorded in it", |_, _, _, event| event.query().map(drop)),
            ("synchronize_event of an event recorded in it", |_, _, _, event| event.synchronize()),
        ],
    )
}

/// An event that was recorded and reached outside has an answer. Once a capture records it, it has none.
fn gives_no_answer_about_events_that_had_one(backend: &dyn Backend) -> CaseResult {
    for &mode in CaptureMode::ALL {
        for is_wait in [false, true] {
            let what = if is_wait { "synchronize_event" } else { "query_event" };
            let block = Block::filled(backend, BYTES, OLD)?;
            let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
            stream.record(&event)?;
            event.synchronize()?;
            check!(event.query()?.is_complete(), "an event is pending after a wait for it");
            let capture = Capture::begin(&stream, mode)?;
            stream.set(block.all(), NEW)?;
            stream.record(&event)?;
            check_error!(
                if is_wait { event.synchronize() } else { event.query().map(drop) },
                Capture,
                "{what} of an event that was recorded before and in a {mode:?} capture"
            );
            if let Err(error) = capture.end(&[&block]) {
                check_error!(Err::<(), _>(error), Capture, "the end of a capture that was lost by {what}");
            }
            works(backend, &stream, "after a capture in which something was asked")?;
        }
    }
    Ok(())
}

/// Loses a capture: a stream joins it and is never waited for.
fn lose(backend: &dyn Backend, stream: &Stream<'_>, joined: &Stream<'_>, block: &Block<'_>) -> CaseResult {
    let fork = Event::new(backend)?;
    let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
    stream.set(block.all(), NEW)?;
    stream.record(&fork)?;
    joined.wait(&fork)?;
    joined.set(block.all(), NEW)?;
    check_error!(capture.end(&[block]).map(drop), Capture, "the end of a capture with a stream that is not joined");
    Ok(())
}

fn is_lost_where_a_stream_is_not_joined(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    {
        let block = Block::filled(backend, BYTES, OLD)?;
        let (stream, joined) = (Stream::new(backend)?, Stream::new(backend)?);
        lose(backend, &stream, &joined, &block)?;
        stream.synchronize()?;
        joined.synchronize()?;
        holds(&block, OLD, "a capture that was lost was executed")?;
        works(backend, &stream, "after its capture was lost")?;
        works(backend, &joined, "after a capture that it had joined was lost")?;
    }
    check_eq!(backend.live_objects(), before, "live objects after a capture was lost");
    Ok(())
}

/// A stream that joined is waited for, and then records more.
fn is_lost_where_a_stream_goes_on_after_its_join(backend: &dyn Backend) -> CaseResult {
    let (x, y) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
    let (stream, joined) = (Stream::new(backend)?, Stream::new(backend)?);
    let (fork, join) = (Event::new(backend)?, Event::new(backend)?);
    // Whether the first stream waits for the rest too.
    for is_whole in [false, true, false] {
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        stream.record(&fork)?;
        joined.wait(&fork)?;
        joined.set(x.all(), NEW)?;
        joined.record(&join)?;
        stream.wait(&join)?;
        joined.set(y.all(), NEW)?;
        if is_whole {
            joined.record(&join)?;
            stream.wait(&join)?;
            capture.end(&[&x, &y])?.instantiate()?.launch(&stream)?;
            stream.synchronize()?;
            holds(&x, NEW, "work of a stream that joined, launched")?;
            holds(&y, NEW, "work of a stream after it was joined once, launched")?;
            [&x, &y].into_iter().try_for_each(|block| block.write(0, &[OLD; BYTES]))?;
        } else {
            let ended = capture.end(&[&x, &y]).map(drop);
            check_error!(ended, Capture, "the end of a capture with work of a stream after it was joined");
            stream.synchronize()?;
            joined.synchronize()?;
            holds(&x, OLD, "a capture that was lost was executed")?;
            holds(&y, OLD, "a capture that was lost was executed")?;
        }
    }
    works(backend, &stream, "after its capture was lost")?;
    works(backend, &joined, "after a capture that it had joined was lost")
}

/// An event that a capture has recorded is recorded again outside, after captures that ended and after lost ones.
fn events_that_it_recorded_work_outside(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let block = Block::filled(backend, BYTES, OLD)?;
    let (stream, other, joined) = (Stream::new(backend)?, Stream::new(backend)?, Stream::new(backend)?);
    for (mode, is_lost) in [(CaptureMode::ThreadLocal, false), (CaptureMode::Global, true)] {
        let (event, join) = (Event::new(backend)?, Event::new(backend)?);
        let capture = Capture::begin(&stream, mode)?;
        stream.record(&event)?;
        joined.wait(&event)?;
        joined.set(block.all(), NEW)?;
        if !is_lost {
            joined.record(&join)?;
            stream.wait(&join)?;
        }
        let ended = capture.end(&[&block]).map(drop);
        check_eq!(ended.is_err(), is_lost, "whether a capture was lost");
        until_conclusive("the work was over before another stream waited for it", |load| {
            busy.enqueue(&stream, load)?;
            stream.set(block.all(), NEW)?;
            stream.record(&event)?;
            other.wait(&event)?;
            other.set(block.all(), OLD)?;
            let pending = event.is_pending()?;
            other.synchronize()?;
            check!(event.query()?.is_complete(), "a stream did not wait for an event that a capture had recorded");
            event.synchronize()?;
            holds(&block, OLD, "work after a wait for an event that a capture had recorded")?;
            Ok(Attempt::seen(pending))
        })?;
    }
    Ok(())
}

fn begins_anew_after_it_was_lost(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, BYTES, OLD)?;
    let (stream, joined) = (Stream::new(backend)?, Stream::new(backend)?);
    for round in 0..3 {
        lose(backend, &stream, &joined, &block)?;
        for of in [&stream, &joined] {
            let executable = recorded(of, &[&block], || of.set(block.all(), 0x40 + round))?;
            executable.launch(of)?;
            of.synchronize()?;
            holds(&block, 0x40 + round, "a capture on a stream whose last one was lost, launched")?;
            stream.set(block.all(), OLD)?;
            stream.synchronize()?;
        }
    }
    Ok(())
}

fn cannot_end_without_a_beginning(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    check_error!(crate::device::end_capture(backend, stream.id()), Capture, "end_capture of a new stream");
    let before = backend.live_objects();
    until_conclusive("the stream was idle when the capture was to end", |load| {
        block.write(0, &[OLD; BYTES])?;
        busy.enqueue(&stream, load)?;
        stream.set(block.all(), NEW)?;
        check_error!(crate::device::end_capture(backend, stream.id()), Capture, "end_capture of a stream with work");
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        holds(&block, NEW, "work of a stream whose capture could not be ended")?;
        Ok(Attempt::seen(pending))
    })?;
    check_eq!(backend.live_objects(), before, "live objects after captures that were not there were ended");
    works(backend, &stream, "after a capture was ended that was not there")
}

fn cannot_end_twice(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    let executable = recorded(&stream, &[&block], || stream.set(block.all(), NEW))?;
    check_error!(crate::device::end_capture(backend, stream.id()), Capture, "a second end_capture");
    executable.launch(&stream)?;
    stream.synchronize()?;
    holds(&block, NEW, "a graph whose capture was ended twice, launched")
}

// ------------------------------------------------------------------------------------------------------------ replays

fn replays_execute_everything_each_time(backend: &dyn Backend) -> CaseResult {
    let (x, y) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
    let (source, target) = (Pinned::holding(backend, &[OLD; BYTES])?, Pinned::holding(backend, &[OLD; BYTES])?);
    let stream = Stream::new(backend)?;
    let executable = recorded(&stream, &[&x, &y, &source, &target], || {
        stream.copy(x.all(), source.all())?;
        stream.copy(y.all(), x.all())?;
        stream.copy(target.all(), y.all())?;
        stream.set(x.all(), NEW)
    })?;
    for round in 1..6 {
        // The graph reads the bytes when it runs. Only the addresses come from the recording.
        source.write(&[round; BYTES])?;
        executable.launch(&stream)?;
        stream.synchronize()?;
        check!(target.read()? == [round; BYTES], "launch {round} did not execute the copies that were recorded");
        holds(&x, NEW, &format!("the recorded fill in launch {round}"))?;
        x.write(0, &[OLD; BYTES])?;
    }
    Ok(())
}

/// Returns the bytes of small numbers that every type represents exactly.
fn small(data_type: DataType, value: u8, count: usize) -> Vec<u8> {
    match data_type {
        DataType::F64 => f64::from(value).to_le_bytes().repeat(count),
        _ => f32::from(value).to_le_bytes().repeat(count),
    }
}

/// Captures `C += A * B` with matrices of ones and replays it.
fn add_products(backend: &dyn Backend, data_type: DataType) -> CaseResult {
    const SIZE: usize = 8;
    const ELEMENTS: usize = SIZE * SIZE;
    let ones = small(data_type, 1, ELEMENTS);
    let (a, b, c) = (Block::holding(backend, &ones)?, Block::holding(backend, &ones)?, Block::holding(backend, &ones)?);
    let workspace = Block::new(backend, 1 << 20)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.offer_workspace(&workspace, 0..1 << 20)?;
    let nowhere = highwater_hal::DevicePtr::new(0);
    let gemm = Gemm::new(GemmShape::new(data_type, SIZE, SIZE, SIZE), nowhere, nowhere, nowhere).with_scale(1.0, 1.0);
    let executable = recorded(&stream, &[&a, &b, &c, &workspace], || handle.gemm(&gemm, [(&a, 0), (&b, 0), (&c, 0)]))?;
    check!(c.read()? == ones, "C += A * B was executed while it was captured");
    executable.launch(&stream)?;
    executable.launch(&stream)?;
    stream.synchronize()?;
    let twice = small(data_type, 1 + 2 * SIZE as u8, ELEMENTS);
    check!(c.read()? == twice, "two replays of C += A * B did not add the product twice");
    executable.launch(&stream)?;
    stream.synchronize()?;
    let thrice = small(data_type, 1 + 3 * SIZE as u8, ELEMENTS);
    check!(c.read()? == thrice, "a third replay of C += A * B did not add the product once more");
    Ok(())
}

fn replays_of_products_are_right(backend: &dyn Backend) -> CaseResult {
    let workspace = Block::new(backend, 4 << 20)?;
    for (seed, (m, n, k)) in [(1, 1, 1), (17, 33, 9), (64, 48, 32), (8, 8, 2000)].into_iter().enumerate() {
        let product = Product::new(GemmShape::new(DataType::F32, m, n, k), seed as u64).with_scale(0.75, 0.0);
        let placed = product.place(backend)?;
        let stream = Stream::new(backend)?;
        let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
        handle.offer_workspace(&workspace, 0..4 << 20)?;
        let memory: [&dyn Memory; 4] = [&placed.a, &placed.b, &placed.c, &workspace];
        let executable = recorded(&stream, &memory, || placed.gemm(&product, &mut handle))?;
        for _ in 0..2 {
            executable.launch(&stream)?;
            stream.synchronize()?;
            placed.check(&product)?;
        }
    }
    Ok(())
}

fn replays_of_plans_are_right(backend: &dyn Backend) -> CaseResult {
    const WORKSPACE_BYTES: usize = 1 << 20;
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let product = Product::new(GemmShape::new(DataType::F32, 32, 48, 24), 7).with_epilogue(Epilogue::BiasRelu);
    let placed = product.place(backend)?;
    let bias = placed.bias.as_ref().ok_or_else(|| Failure::new("a product with a bias has none"))?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    let plan = handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::BiasRelu, WORKSPACE_BYTES))?;
    let before = placed.c.read()?;
    let memory: [&dyn Memory; 5] = [&placed.a, &placed.b, &placed.c, bias, &workspace];
    let executable = recorded(&stream, &memory, || {
        handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, Some(bias))
    })?;
    check!(placed.c.read()? == before, "a plan was executed while it was captured");
    executable.launch(&stream)?;
    stream.synchronize()?;
    placed.check(&product)
}

fn replays_return_at_once(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let block = Block::filled(backend, BYTES, OLD)?;
    let (stream, before) = (Stream::new(backend)?, Event::new(backend)?);
    let executable = recorded(&stream, &[&block], || stream.set(block.all(), NEW))?;
    // The first launch may load what later ones find loaded.
    executable.launch(&stream)?;
    stream.synchronize()?;
    until_conclusive("a launch waits for the work before it", |load| {
        busy.enqueue(&stream, load)?;
        stream.record(&before)?;
        executable.launch(&stream)?;
        let outstanding = before.is_pending()?;
        stream.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })?;
    // The last launch was on another stream, of another kind.
    for kind in StreamKind::of(backend, DEVICE)? {
        let made = kind.make(backend, DEVICE)?;
        until_conclusive("a launch waits for the work before it, because the last one was on another stream", |load| {
            executable.launch(&stream)?;
            stream.synchronize()?;
            busy.enqueue(&made.stream, load)?;
            made.stream.record(&before)?;
            executable.launch(&made.stream)?;
            let outstanding = before.is_pending()?;
            made.stream.synchronize()?;
            Ok(Attempt::seen(outstanding))
        })
        .map_err(|failure| failure.with_details(&format!("on a stream of kind {kind:?}")))?;
    }
    Ok(())
}

/// One thread records, a second makes the graph executable, a third launches it, and a fourth destroys it.
fn another_thread_uses_graphs(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let block = Block::filled(backend, BYTES, OLD)?;
    let graph = in_thread(|| {
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        stream.set(block.all(), NEW)?;
        capture.end(&[&block])
    })?;
    let executable = in_thread(|| graph.instantiate())?;
    in_thread(|| executable.launch(&stream).and_then(|()| stream.synchronize()))?;
    check!(block.read()? == vec![NEW; BYTES], "a launch of another thread than the one that made the graph executable");
    in_thread(|| executable.destroy().and(graph.destroy()))?;
    Ok(())
}

/// Graphs that live at once are made executable in another order than they were recorded in, also after one was destroyed.
fn several_graphs_are_apart(backend: &dyn Backend) -> CaseResult {
    const GRAPHS: usize = 4;
    let stream = Stream::new(backend)?;
    let block = Block::filled(backend, GRAPHS, OLD)?;
    let mut graphs = Vec::new();
    for part in 0..GRAPHS {
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        stream.set(block.span(part..part + 1), NEW + part as u8)?;
        graphs.push((part, capture.end(&[&block])?));
    }
    while !graphs.is_empty() {
        for which in (0..graphs.len()).rev() {
            let (part, graph) = &graphs[which];
            stream.set(block.all(), OLD)?;
            stream.synchronize()?;
            graph.instantiate()?.launch(&stream)?;
            stream.synchronize()?;
            let mut expected = [OLD; GRAPHS];
            expected[*part] = NEW + *part as u8;
            check_eq!(
                block.read()?,
                expected,
                "bytes after a launch of graph {part}, with {} graphs alive",
                graphs.len()
            );
        }
        graphs.remove(graphs.len() / 2);
    }
    Ok(())
}

fn replays_run_in_the_order_of_the_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (x, y, z) = (Block::new(backend, BYTES)?, Block::new(backend, BYTES)?, Block::new(backend, BYTES)?);
    let stream = Stream::new(backend)?;
    let executable = recorded(&stream, &[&x, &y], || stream.copy(y.all(), x.all()))?;
    until_conclusive("the stream was idle when all was enqueued: some call waits", |load| {
        for block in [&x, &y, &z] {
            block.write(0, &[OLD; BYTES])?;
        }
        busy.enqueue(&stream, load)?;
        stream.set(x.all(), 1)?;
        executable.launch(&stream)?;
        stream.copy(z.all(), y.all())?;
        stream.set(x.all(), 2)?;
        executable.launch(&stream)?;
        stream.set(x.all(), 3)?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        holds(&z, 1, "the bytes of the first of two launches, copied before the second")?;
        holds(&y, 2, "the bytes of the second of two launches")?;
        Ok(Attempt::seen(pending))
    })
}

fn replays_keep_the_order_of_streams_that_joined(backend: &dyn Backend) -> CaseResult {
    // Each branch has enough work to reveal a branch that does not wait for the other.
    const ROUNDS: usize = 12;
    let bytes = 1 << 18;
    let (left, right, sum) =
        (Block::new(backend, bytes)?, Block::new(backend, bytes)?, Block::new(backend, 2 * bytes)?);
    let (first, second) = (Stream::new(backend)?, Stream::new(backend)?);
    let (fork, join) = (Event::new(backend)?, Event::new(backend)?);
    let executable = recorded(&first, &[&left, &right, &sum], || {
        first.set(sum.all(), OLD)?;
        first.record(&fork)?;
        second.wait(&fork)?;
        for round in 0..ROUNDS {
            first.set(left.all(), round as u8)?;
            second.copy(sum.span(0..bytes), right.all())?;
            second.set(right.all(), round as u8)?;
        }
        first.set(left.all(), NEW)?;
        second.set(right.all(), NEW + 1)?;
        second.record(&join)?;
        first.wait(&join)?;
        first.copy(sum.span(0..bytes), left.all())?;
        first.copy(sum.span(bytes..2 * bytes), right.all())
    })?;
    for launch in 0..4 {
        for block in [&left, &right, &sum] {
            first.set(block.all(), OLD)?;
        }
        executable.launch(&first)?;
        first.synchronize()?;
        let got = sum.read()?;
        let whole = got[..bytes].iter().all(|&byte| byte == NEW) && got[bytes..].iter().all(|&byte| byte == NEW + 1);
        check!(whole, "in launch {launch}, work after a join ran before the work of a stream that had joined");
    }
    Ok(())
}

fn replays_run_on_another_stream(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, BYTES, OLD)?;
    let other = Stream::new(backend)?;
    let executable = {
        let stream = Stream::new(backend)?;
        recorded(&stream, &[&block], || stream.set(block.all(), NEW))?
    };
    // The recording stream no longer exists.
    executable.launch(&other)?;
    other.synchronize()?;
    holds(&block, NEW, "a graph launched on another stream than it was recorded on")
}

/// One executable is launched on several streams, one of which is busy.
fn each_launch_runs_on_its_own_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let block = Block::filled(backend, BYTES, OLD)?;
    let streams = [Stream::new(backend)?, Stream::new(backend)?, Stream::new(backend)?];
    let executable = recorded(&streams[0], &[&block], || streams[0].set(block.all(), NEW))?;
    for (index, stream) in streams.iter().enumerate() {
        executable.launch(stream)?;
        stream.synchronize()?;
        holds(&block, NEW, "a fill, launched on another stream than before")?;
        block.write(0, &[OLD; BYTES])?;
        // The stream that launched it last, or recorded it.
        let earlier = &streams[(index + 2) % 3];
        until_conclusive("the other stream was idle when the launch was over", |load| {
            busy.enqueue(earlier, load)?;
            executable.launch(stream)?;
            stream.set(block.span(0..BYTES / 2), OLD)?;
            stream.synchronize()?;
            let outstanding = earlier.is_pending()?;
            earlier.synchronize()?;
            let mut expected = [NEW; BYTES];
            expected[..BYTES / 2].fill(OLD);
            check!(block.read()? == expected, "a launch did not run on the stream that it names");
            block.write(0, &[OLD; BYTES])?;
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

fn many_replays_run_one_after_the_other(backend: &dyn Backend) -> CaseResult {
    const LAUNCHES: usize = 64;
    let bytes = 4096;
    // Each launch moves every value by one place, which reveals the number of launches.
    let track = Block::filled(backend, bytes * (LAUNCHES + 2), OLD)?;
    let carried = Block::new(backend, bytes * (LAUNCHES + 1))?;
    track.write(0, &vec![NEW; bytes])?;
    let stream = Stream::new(backend)?;
    let executable = recorded(&stream, &[&track, &carried], || {
        stream.copy(carried.all(), track.span(0..bytes * (LAUNCHES + 1)))?;
        stream.copy(track.span(bytes..bytes * (LAUNCHES + 2)), carried.all())
    })?;
    for _ in 0..LAUNCHES {
        executable.launch(&stream)?;
    }
    stream.synchronize()?;
    let got = track.read()?;
    let reached = got.chunks(bytes).filter(|place| place.iter().all(|&byte| byte == NEW)).count();
    check_eq!(reached, LAUNCHES + 1, "places that the bytes reached in {LAUNCHES} launches, the first included");
    Ok(())
}

fn replays_of_nothing_do_nothing(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    let executable = recorded(&stream, &[], || Ok(()))?;
    executable.launch(&stream)?;
    executable.launch(&stream)?;
    stream.set(block.all(), NEW)?;
    stream.synchronize()?;
    holds(&block, NEW, "a fill after launches of an empty graph")
}

fn replays_fill_with_every_width(backend: &dyn Backend) -> CaseResult {
    const GAP: usize = 64;
    let patterns = [FillPattern::U8(0x5a), FillPattern::U16(0x1234), FillPattern::U32(0xdead_beef)];
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    let part = |index: usize| GAP + index * 4096..(index + 1) * 4096;
    let executable = recorded(&stream, &[&block], || {
        patterns.iter().enumerate().try_for_each(|(index, &pattern)| stream.fill(block.span(part(index)), pattern))
    })?;
    executable.launch(&stream)?;
    stream.synchronize()?;
    let mut expected = vec![OLD; BYTES];
    for (index, pattern) in patterns.iter().enumerate() {
        let element = match pattern {
            FillPattern::U8(value) => value.to_le_bytes().to_vec(),
            FillPattern::U16(value) => value.to_le_bytes().to_vec(),
            FillPattern::U32(value) => value.to_le_bytes().to_vec(),
        };
        let part = &mut expected[part(index)];
        part.iter_mut().zip(element.iter().cycle()).for_each(|(byte, &of)| *byte = of);
    }
    check!(block.read()? == expected, "recorded fills of 1, 2 and 4 bytes did not write exactly their elements");
    Ok(())
}

// ----------------------------------------------------------------------------------------------------------- by value

fn replays_use_the_scalars_of_the_recording(backend: &dyn Backend) -> CaseResult {
    let workspace = Block::new(backend, 1 << 20)?;
    let product = Product::new(GemmShape::new(DataType::F32, 20, 12, 16), 11).with_scale(2.0, 0.0);
    let placed = product.place(backend)?;
    let (stream, other) = (Stream::new(backend)?, Stream::new(backend)?);
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.offer_workspace(&workspace, 0..1 << 20)?;
    let memory: [&dyn Memory; 4] = [&placed.a, &placed.b, &placed.c, &workspace];
    let executable = recorded(&stream, &memory, || placed.gemm(&product, &mut handle))?;
    // The handle continues with other factors, and perhaps on another stream.
    let later = Product::new(product.shape, 12).with_scale(-3.0, 0.5);
    let elsewhere = later.place(backend)?;
    if !backend.capabilities(DEVICE)?.handle_per_stream {
        handle.set_stream(&other)?;
    }
    elsewhere.gemm(&later, &mut handle)?;
    backend.synchronize_device(DEVICE)?;
    executable.launch(&stream)?;
    stream.synchronize()?;
    placed.check(&product)?;
    elsewhere.check(&later)
}

fn replays_use_the_addresses_of_the_recording(backend: &dyn Backend) -> CaseResult {
    let (x, y, z) =
        (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
    let stream = Stream::new(backend)?;
    let mut destination = x.span(0..BYTES / 2);
    let mut value = NEW;
    let executable = recorded(&stream, &[&x, &y], || {
        stream.set(destination, value)?;
        stream.copy(y.all(), x.all())
    })?;
    // The call took its arguments by value, so later changes of the caller's must not matter.
    (destination, value) = (z.all(), value + 1);
    stream.set(destination, value)?;
    executable.launch(&stream)?;
    stream.synchronize()?;
    let mut expected = vec![OLD; BYTES];
    expected[..BYTES / 2].fill(NEW);
    check!(x.read()? == expected, "a recorded fill did not write its own span with its own value");
    check!(y.read()? == expected, "a recorded copy did not run behind the recorded fill");
    holds(&z, NEW + 1, "a fill that was enqueued after the capture")
}

// ------------------------------------------------------------------------------------------------------ lives and ends

fn executables_outlive_their_graph(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    stream.set(block.all(), NEW)?;
    let graph = capture.end(&[&block])?;
    let executable = graph.instantiate()?;
    graph.destroy()?;
    for launch in 1..3 {
        executable.launch(&stream)?;
        stream.synchronize()?;
        holds(&block, NEW, &format!("launch {launch} of an executable whose graph was destroyed"))?;
        block.write(0, &[OLD; BYTES])?;
    }
    Ok(())
}

fn one_graph_makes_several_executables(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, BYTES, OLD)?;
    let stream = Stream::new(backend)?;
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    stream.set(block.all(), NEW)?;
    let graph = capture.end(&[&block])?;
    let (first, second) = (graph.instantiate()?, graph.instantiate()?);
    first.destroy()?;
    second.launch(&stream)?;
    stream.synchronize()?;
    holds(&block, NEW, "an executable whose twin was destroyed")?;
    block.write(0, &[OLD; BYTES])?;
    graph.instantiate()?.launch(&stream)?;
    stream.synchronize()?;
    holds(&block, NEW, "an executable made after another was destroyed")
}

fn pending_launches_finish_when_all_is_destroyed(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the stream was idle when the graph was destroyed", |load| {
        let (x, y) = (Block::filled(backend, BYTES, OLD)?, Block::filled(backend, BYTES, OLD)?);
        let stream = Stream::new(backend)?;
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        stream.set(x.all(), NEW)?;
        stream.copy(y.all(), x.all())?;
        let graph = capture.end(&[&x, &y])?;
        let executable = graph.instantiate()?;
        busy.enqueue(&stream, load)?;
        executable.launch(&stream)?;
        graph.destroy()?;
        executable.destroy()?;
        // Another graph may take the slot of the destroyed one.
        let other = recorded(&stream, &[], || Ok(()));
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        other?;
        holds(&x, NEW, "a launch that was pending when its graph was destroyed")?;
        holds(&y, NEW, "the end of a launch that was pending when its graph was destroyed")?;
        Ok(Attempt::seen(pending))
    })
}

fn pending_products_finish_when_all_is_destroyed(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let workspace = Block::new(backend, 1 << 20)?;
    let product = Product::new(GemmShape::new(DataType::F32, 40, 30, 50), 21).with_scale(1.0, 0.0);
    until_conclusive("the stream was idle when the graph was destroyed", |load| {
        let placed = product.place(backend)?;
        let stream = Stream::new(backend)?;
        let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
        handle.offer_workspace(&workspace, 0..1 << 20)?;
        let memory: [&dyn Memory; 4] = [&placed.a, &placed.b, &placed.c, &workspace];
        let executable = recorded(&stream, &memory, || placed.gemm(&product, &mut handle))?;
        busy.enqueue(&stream, load)?;
        executable.launch(&stream)?;
        executable.destroy()?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        placed.check(&product)?;
        Ok(Attempt::seen(pending))
    })
}

fn destroyed_graphs_are_stale(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    let graph = capture.end(&[])?;
    let executable = graph.instantiate()?.destroy()?;
    let graph = graph.destroy()?;
    check_error!(backend.instantiate_graph(graph), InvalidHandle, "instantiate_graph of a destroyed graph");
    check_error!(backend.destroy_graph(graph), InvalidHandle, "a second destroy_graph");
    check_error!(backend.destroy_graph_exec(executable), InvalidHandle, "a second destroy_graph_exec");
    // SAFETY: nothing was recorded, so no memory is used.
    let launched = unsafe { backend.launch_graph(executable, stream.id()) };
    check_error!(launched, InvalidHandle, "launch_graph of a destroyed executable graph");
    Ok(())
}

fn graphs_count(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let before = backend.live_objects();
    let mut kept = Vec::new();
    for made in 1..4 {
        let graph = Capture::begin(&stream, CaptureMode::ThreadLocal)?.end(&[])?;
        let executable = graph.instantiate()?;
        kept.push((graph, executable));
        check_eq!(backend.live_objects().graphs, before.graphs + 2 * made, "live graphs and executables");
    }
    drop(kept);
    check_eq!(backend.live_objects(), before, "live objects after every graph was destroyed");
    drop(Capture::begin(&stream, CaptureMode::ThreadLocal)?);
    check_eq!(backend.live_objects(), before, "live objects after a capture that was thrown away");
    Ok(())
}

fn threads_capture_at_once(backend: &dyn Backend) -> CaseResult {
    const THREADS: u8 = 4;
    // First deterministically: a capture begins and ends in another thread while one is open here.
    let (outer, inner) = (Stream::new(backend)?, Stream::new(backend)?);
    let (x, y) = (Block::filled(backend, 5000, OLD)?, Block::filled(backend, 5000, OLD)?);
    let capture = Capture::begin(&outer, CaptureMode::ThreadLocal)?;
    outer.set(x.all(), NEW)?;
    let meanwhile = std::thread::scope(|scope| {
        let within = || recorded(&inner, &[&y], || inner.set(y.all(), NEW)).map(drop);
        scope.spawn(within).join().map_err(|_| Failure::new("a thread panicked"))?
    });
    let executable = capture.end(&[&x])?.instantiate()?;
    meanwhile?;
    executable.launch(&outer)?;
    outer.synchronize()?;
    holds(&x, NEW, "the bytes of a capture during another thread's capture")?;
    drop(executable);
    holds(&y, OLD, "bytes that only a capture without a launch would change")?;
    // Captures overlap with captures. A call that waits for the device runs alone.
    let waiting = RwLock::new(());
    let alone = || waiting.write().unwrap_or_else(PoisonError::into_inner);
    let capture_and_replay = |thread: u8| -> CaseResult {
        let beginning = alone();
        let (x, y) = (Block::filled(backend, 5000, OLD)?, Block::filled(backend, 5000, OLD)?);
        let stream = Stream::new(backend)?;
        drop(beginning);
        for round in 0..10 {
            let byte = 16 * (thread + 1) + round;
            let capturing = waiting.read().unwrap_or_else(PoisonError::into_inner);
            let executable = recorded(&stream, &[&x, &y], || {
                stream.set(x.all(), byte)?;
                stream.copy(y.all(), x.all())
            });
            drop(capturing);
            let _checking = alone();
            let executable = executable?;
            stream.set(y.all(), OLD)?;
            executable.launch(&stream)?;
            stream.synchronize()?;
            holds(&y, byte, &format!("the bytes of thread {thread}'s launch in round {round}"))?;
        }
        let _end = alone();
        drop((x, y));
        Ok(())
    };
    std::thread::scope(|scope| {
        let capture_and_replay = &capture_and_replay;
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || capture_and_replay(thread))).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        results.into_iter().try_for_each(|result| result.map_err(|_| Failure::new("a thread panicked"))?)
    })
}
