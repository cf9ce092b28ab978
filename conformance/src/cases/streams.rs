//! Streams: order, asynchrony, independence, and waits.

use highwater_hal::{
    Backend, BlasKind, CaptureMode, CopyShape, DataType, Epilogue, FillPattern, GemmShape, PlanOptions, StreamId,
    StreamOptions, StreamPriority,
};

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::kinds::StreamKind;
use crate::case::{CaseResult, Failure, cases, check, check_error};
use crate::device::{Block, Capture, DEVICE, Event, Handle, Memory, Pinned, Registered, Stream, end_capture};
use crate::matrix::Product;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};
use crate::sweep::as_one;

cases! {
    group "streams";
    runs_in_order: ["stream.order"];
    runs_a_long_queue_in_order: ["stream.order"];
    copies_return_at_once: ["stream.asynchronous"];
    fills_return_at_once: ["stream.asynchronous"];
    records_and_waits_return_at_once: ["stream.asynchronous"];
    copies_to_the_device_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize"] => leaves_to_the_device(Way::ToDevice);
    copies_to_the_host_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize"] => leaves_to_the_device(Way::ToHost);
    copies_on_the_device_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize"] => leaves_to_the_device(Way::OnDevice);
    copies_between_devices_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize"]
        needs [TWO_DEVICES, has::peer_copy] => leaves_to_the_device(Way::BetweenDevices);
    fills_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize"] => leaves_to_the_device(Way::Fill);
    launches_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize", "capture.replay"]
        needs [has::capture] => leaves_to_the_device(Way::Launch);
    products_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize", "gemm.asynchronous"]
        needs [has::gemm_f32] => leaves_products_to_the_device(BlasKind::Blas);
    plans_are_not_executed_in_the_call: ["stream.enqueues", "stream.synchronize"]
        needs [has::gemm_f32, has::lt_plans] => leaves_products_to_the_device(BlasKind::Lt);
    sources_are_read_after_earlier_work: ["stream.order", "copy.ordered"] => sources_are_read_late(false);
    sources_are_read_after_awaited_work: ["event.wait-orders", "copy.ordered"] => sources_are_read_late(true);
    do_not_wait_for_each_other: ["stream.independent"];
    equal_work_of_two_streams_is_independent: ["stream.independent"];
    query_follows_the_work: ["stream.query"];
    query_ignores_other_streams: ["stream.query", "stream.independent"];
    query_covers_a_wait_for_another_device: ["stream.query", "stream.synchronize"] needs [TWO_DEVICES];
    fresh_streams_are_complete: ["stream.query"];
    synchronize_shows_the_effects: ["stream.synchronize"];
    synchronize_waits_for_its_own_stream: ["stream.synchronize", "stream.independent"];
    synchronize_ends_while_others_enqueue: ["stream.synchronize-ends"] => ends_while_others_enqueue(Wait::Stream, StreamKind::Normal);
    synchronizing_the_device_ends_while_others_enqueue: ["devices.synchronize-ends"] => ends_while_others_enqueue(Wait::Device, StreamKind::Normal);
    synchronize_ends_on_each_kind_of_stream: ["stream.synchronize-ends"];
    synchronizing_a_device_does_not_wait_for_another: ["devices.synchronize-ends"] needs [TWO_DEVICES];
    synchronizing_the_device_waits_for_streams_of_other_threads: ["devices.synchronize"];
    synchronizing_the_device_waits_for_every_stream: ["devices.synchronize"];
    destroyed_streams_finish_their_work: ["stream.destroy-pending"];
    destroyed_streams_finish_their_last_call: ["stream.destroy-pending"];
    destroyed_streams_are_stale: ["stream.destroy-stale"];
    destroyed_streams_that_recorded_are_stale: ["stream.destroy-stale"] needs [has::capture];
    fresh_streams_have_no_work_of_destroyed_ones: ["stream.independent", "stream.query"];
    priorities_keep_the_order: ["stream.order"] needs [has::stream_priority];
    the_legacy_default_stream_runs_in_order: ["stream.order", "stream.synchronize"] needs [has::legacy_default_stream];
    the_per_thread_default_stream_runs_in_order: ["stream.order", "stream.synchronize"] needs [has::per_thread_default_stream];
    the_per_thread_default_stream_is_another_in_each_thread: ["stream.independent", "stream.query"]
        needs [has::per_thread_default_stream];
    the_per_thread_default_stream_waits_and_is_waited_for: ["event.wait-orders"] needs [has::per_thread_default_stream];
    wrapped_streams_are_forgotten_not_destroyed: ["stream.order", "stream.destroy-stale", "backend.live-objects"]
        needs [has::foreign_objects];
}

const BYTES: usize = 1 << 16;

/// Checks that operations of several kinds run in the order of the calls, after pending work.
fn in_order(backend: &dyn Backend, stream: &Stream<'_>) -> CaseResult {
    let busy = StreamLoad::new(backend, stream.id().device(), Direction::ToDevice)?;
    until_conclusive("the stream was idle when all was enqueued: some call waits", |load| {
        let (x, y, z) = (Block::filled(backend, BYTES, 0)?, Block::new(backend, BYTES)?, Block::new(backend, BYTES)?);
        let (first, second) = (Pinned::new(backend, BYTES)?, Pinned::new(backend, BYTES)?);
        busy.enqueue(stream, load)?;
        stream.set(x.all(), 1)?;
        stream.copy(y.all(), x.all())?;
        stream.set(x.all(), 2)?;
        stream.copy(first.all(), x.all())?;
        stream.set(x.all(), 3)?;
        stream.copy(z.all(), x.all())?;
        stream.copy(second.all(), y.all())?;
        stream.copy(x.all(), y.all())?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        for (what, got, expected) in [
            ("the first copy on the device", y.read()?, 1),
            ("the copy to the host after the second fill", first.read()?, 2),
            ("the copy on the device after the third fill", z.read()?, 3),
            ("the copy to the host of the first copy", second.read()?, 1),
            ("the last copy over filled bytes", x.read()?, 1),
        ] {
            check!(got == vec![expected; BYTES], "{what} holds {}, expected {expected}", got[0]);
        }
        Ok(Attempt::seen(pending))
    })
}

fn runs_in_order(backend: &dyn Backend) -> CaseResult {
    in_order(backend, &Stream::new(backend)?)
}

fn runs_a_long_queue_in_order(backend: &dyn Backend) -> CaseResult {
    /// More than queues of 8,192 places hold.
    const STEPS: u32 = 9000;
    /// The elements of one fill, at most.
    const AHEAD: usize = 500;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    let block = Block::filled(backend, STEPS as usize * 4, 0)?;
    busy.enqueue(&stream, 1)?;
    // Operation `step` fills the elements from `step` on, so each element keeps the value of its own step.
    as_one(|| {
        (0..STEPS).try_for_each(|step| {
            let start = step as usize * 4;
            let end = block.bytes().min(start + AHEAD * 4);
            stream.fill(block.span(start..end), FillPattern::U32(step))
        })
    })?;
    stream.synchronize()?;
    let got = block.read()?;
    for (step, word) in (0..STEPS).zip(got.as_chunks::<4>().0) {
        let value = u32::from_ne_bytes(*word);
        check!(value == step, "element {step} of {STEPS} fills holds {value}");
    }
    Ok(())
}

/// Checks that a call enqueues without waiting for earlier work of the stream.
fn returns_at_once(
    backend: &dyn Backend,
    what: &str,
    enqueue: impl Fn(&Stream<'_>) -> highwater_hal::Result<()>,
) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, before) = (Stream::new(backend)?, Event::new(backend)?);
    // A first call may load what later ones find loaded.
    enqueue(&stream)?;
    stream.synchronize()?;
    until_conclusive(&format!("{what} waits for the work before it"), |load| {
        busy.enqueue(&stream, load)?;
        stream.record(&before)?;
        enqueue(&stream)?;
        let outstanding = before.is_pending()?;
        stream.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

fn copies_return_at_once(backend: &dyn Backend) -> CaseResult {
    let (x, y) = (Block::new(backend, BYTES)?, Block::new(backend, BYTES)?);
    let pinned = Pinned::new(backend, BYTES)?;
    returns_at_once(backend, "a copy to the device", |stream| stream.copy(x.all(), pinned.all()))?;
    returns_at_once(backend, "a copy to the host", |stream| stream.copy(pinned.all(), x.all()))?;
    returns_at_once(backend, "a copy on the device", |stream| stream.copy(y.all(), x.all()))
}

fn fills_return_at_once(backend: &dyn Backend) -> CaseResult {
    let block = Block::new(backend, BYTES)?;
    returns_at_once(backend, "a fill", |stream| stream.set(block.all(), 1))
}

fn records_and_waits_return_at_once(backend: &dyn Backend) -> CaseResult {
    let (event, other) = (Event::new(backend)?, Event::new(backend)?);
    let idle = Stream::new(backend)?;
    idle.record(&other)?;
    returns_at_once(backend, "a record", |stream| stream.record(&event))?;
    returns_at_once(backend, "a wait", |stream| stream.wait(&other))?;
    // The waiting stream has no other work, so only the call itself could wait.
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    until_conclusive("a wait for the event of a busy stream waits in the call", |load| {
        busy.enqueue(&stream, load)?;
        stream.record(&event)?;
        idle.wait(&event)?;
        let outstanding = event.is_pending()?;
        idle.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

/// The kinds of work of which one call can enqueue a lot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToDevice,
    ToHost,
    OnDevice,
    BetweenDevices,
    Fill,
    /// One launch of a recorded copy.
    Launch,
}

/// Checks that a call on an idle stream leaves its work to the device.
fn leaves_to_the_device(backend: &dyn Backend, way: Way) -> CaseResult {
    let devices = backend.device_count().min(2);
    // MiB of a block, of which each device has space for two.
    let mut most = 64;
    for device in 0..devices {
        most = most.min((backend.memory_info(device)?.free >> 21).saturating_sub(1));
    }
    let most = most.max(1) as usize;
    for device in 0..devices {
        until_conclusive(&format!("{way:?}: a call on an idle stream of device {device} executes its work"), |load| {
            let bytes = load.min(most) << 20;
            let stream = Stream::on(backend, device)?;
            let (block, small) = (Block::on(backend, device, bytes)?, Block::on(backend, device, 256)?);
            let (other, pinned) = match way {
                Way::OnDevice | Way::Launch => (Some(Block::on(backend, device, bytes)?), None),
                Way::BetweenDevices => (Some(Block::on(backend, 1 - device, bytes)?), None),
                _ => (None, Some(Pinned::new(backend, bytes)?)),
            };
            let there = match (&other, &pinned) {
                (Some(other), _) => other.all(),
                (_, Some(pinned)) => pinned.all(),
                _ => block.all(),
            };
            let enqueue = || match way {
                Way::ToDevice | Way::OnDevice | Way::Launch => stream.copy(block.all(), there),
                Way::ToHost | Way::BetweenDevices => stream.copy(there, block.all()),
                Way::Fill => stream.set(block.all(), 1),
            };
            let executable = match way {
                Way::Launch => {
                    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
                    (0..REPEATED).try_for_each(|_| enqueue())?;
                    let memory: Vec<&dyn Memory> = other.iter().chain([&block]).map(|block| block as _).collect();
                    Some(capture.end(&memory)?.instantiate()?)
                }
                _ => None,
            };
            let work = || executable.as_ref().map_or_else(enqueue, |executable| executable.launch(&stream));
            // The first call of a kind may load code, and a thread of the device may have to be woken.
            work()?;
            stream.set(small.all(), 1)?;
            stream.synchronize()?;
            let mut outstanding = false;
            for _ in 0..LOOKS {
                work()?;
                outstanding = stream.is_pending()?;
                if outstanding {
                    break;
                }
                stream.synchronize()?;
            }
            if way != Way::Launch {
                (1..REPEATED).try_for_each(|_| work())?;
            }
            is_synchronized(&stream, &format!("{way:?} on device {device}"))?;
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

/// The times that the work of an idle stream is looked for. On a machine with few processors, the thread of the device that a call wakes
/// may run before the caller goes on.
const LOOKS: usize = 8;

/// The times that work of one kind comes last on its stream, so that a wait that skips this kind returns before its end.
const REPEATED: usize = 4;

/// Synchronizes a stream and checks that its work was waited for.
fn is_synchronized(stream: &Stream<'_>, what: &str) -> CaseResult {
    stream.synchronize()?;
    let complete = stream.query()?.is_complete();
    // The memory of the case must outlive the work in any case.
    while stream.is_pending()? {
        std::thread::yield_now();
    }
    check!(complete, "a stream is pending after it was synchronized, and its last work is {what}");
    Ok(())
}

/// Checks the same of products and of runs of plans.
fn leaves_products_to_the_device(backend: &dyn Backend, kind: BlasKind) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, kind, &stream)?;
    until_conclusive(&format!("{kind:?}: a product on an idle stream is computed in the call"), |load| {
        let size = 64 * load.min(16);
        let product = Product::new(GemmShape::new(DataType::F32, size, size, size), 17);
        let placed = product.place(backend)?;
        let plan = match kind {
            BlasKind::Lt => Some(handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?),
            _ => None,
        };
        let mut work = || match plan {
            Some(plan) => handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None),
            None => placed.gemm(&product, &mut handle),
        };
        // The first product may load kernels.
        work()?;
        stream.synchronize()?;
        work()?;
        let outstanding = stream.is_pending()?;
        (1..REPEATED).try_for_each(|_| work())?;
        is_synchronized(&stream, &format!("a product of a handle of {kind:?}"))?;
        if let Some(plan) = plan {
            handle.raw_mut().destroy_plan(plan)?;
        }
        Ok(Attempt::seen(outstanding))
    })
}

/// Checks that a copy reads its source when the stream gets there. Earlier work of the stream, or work that the stream waits
/// for, writes the source.
fn sources_are_read_late(backend: &dyn Backend, is_awaited: bool) -> CaseResult {
    for device in 0..backend.device_count().min(2) {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        until_conclusive("the source was written before the copy of it was enqueued", |load| {
            let fresh = Block::filled_on(backend, device, BYTES, 2)?;
            let (source, target) =
                (Block::filled_on(backend, device, BYTES, 1)?, Block::filled_on(backend, device, BYTES, 0)?);
            let (pinned, arrived) = (Pinned::holding(backend, &[1; BYTES])?, Pinned::holding(backend, &[0; BYTES])?);
            let copied = Block::filled_on(backend, device, BYTES, 0)?;
            let (writer, reader) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
            let (before, written) = (Event::on(backend, device)?, Event::on(backend, device)?);
            busy.enqueue(&writer, load)?;
            writer.record(&before)?;
            writer.copy(pinned.all(), fresh.all())?;
            writer.copy(source.all(), fresh.all())?;
            let reader = if is_awaited {
                writer.record(&written)?;
                reader.wait(&written)?;
                &reader
            } else {
                &writer
            };
            reader.copy(target.all(), pinned.all())?;
            reader.copy(copied.all(), source.all())?;
            reader.copy(arrived.all(), source.all())?;
            let outstanding = before.is_pending()?;
            reader.synchronize()?;
            for (what, got) in
                [("to the device", target.read()?), ("on the device", copied.read()?), ("to the host", arrived.read()?)]
            {
                check!(got == [2; BYTES], "a copy {what} read its source before the work that writes the source");
            }
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

fn do_not_wait_for_each_other(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (occupied, free) = (Stream::new(backend)?, Stream::new(backend)?);
    let (block, pinned) = (Block::new(backend, BYTES)?, Pinned::new(backend, BYTES)?);
    until_conclusive("a stream waits for another that it has nothing to do with", |load| {
        busy.enqueue(&occupied, load)?;
        free.set(block.all(), 4)?;
        free.copy(pinned.all(), block.all())?;
        free.synchronize()?;
        let outstanding = occupied.is_pending()?;
        check!(pinned.read()? == [4; BYTES], "work on a free stream did not arrive");
        occupied.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

/// Both streams do the same work, of each kind. One of them is busy before, so its work waits. A queue or a staging buffer that all
/// copies pass would make the other wait too.
fn equal_work_of_two_streams_is_independent(backend: &dyn Backend) -> CaseResult {
    // The load copies in the other direction than the work. Devices copy in one direction by one engine, which might not interrupt a copy.
    let to_host = StreamLoad::new(backend, DEVICE, Direction::ToHost)?;
    let to_device = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let can = backend.capabilities(DEVICE)?;
    let (occupied, free) = (Stream::new(backend)?, Stream::new(backend)?);
    // Each stream has memory of its own.
    let blocks = [Block::new(backend, 2 * BYTES)?, Block::new(backend, 2 * BYTES)?];
    let pinned = [Pinned::new(backend, BYTES)?, Pinned::new(backend, BYTES)?];
    let registered = match can.host_register {
        true => Some([Registered::new(backend, &[3; BYTES])?, Registered::new(backend, &[3; BYTES])?]),
        false => None,
    };
    let lower = |of: usize| blocks[of].span(0..BYTES);
    let upper = |of: usize| blocks[of].span(BYTES..2 * BYTES);
    let rows = CopyShape::new(BYTES / 16, 16);
    type Work<'w> = Box<dyn Fn(&Stream<'_>, usize) -> highwater_hal::Result<()> + 'w>;
    let mut works: Vec<(&str, &StreamLoad<'_>, Work<'_>)> = vec![
        ("a fill", &to_device, Box::new(|stream, of| stream.set(lower(of), 1))),
        ("a copy to the device", &to_host, Box::new(|stream, of| stream.copy(lower(of), pinned[of].all()))),
        ("a copy to the host", &to_device, Box::new(|stream, of| stream.copy(pinned[of].all(), lower(of)))),
        ("a copy on the device", &to_device, Box::new(|stream, of| stream.copy(upper(of), lower(of)))),
        (
            "a copy of rows to the device",
            &to_host,
            Box::new(|stream, of| stream.copy_rows(lower(of), pinned[of].all(), rows)),
        ),
        (
            "a copy of rows to the host",
            &to_device,
            Box::new(|stream, of| stream.copy_rows(pinned[of].all(), lower(of), rows)),
        ),
    ];
    if let Some(registered) = &registered {
        let part = |of: usize| registered[of].span(0..BYTES);
        let (from, to) = ("a copy from registered memory", "a copy to registered memory");
        works.push((from, &to_host, Box::new(move |stream, of| stream.copy(lower(of), part(of)))));
        works.push((to, &to_device, Box::new(move |stream, of| stream.copy(part(of), lower(of)))));
    }
    for (what, busy, work) in &works {
        until_conclusive(&format!("{what} waits for {what} of another stream"), |load| {
            busy.enqueue(&occupied, load)?;
            work(&occupied, 0)?;
            work(&free, 1)?;
            free.synchronize()?;
            let outstanding = occupied.is_pending()?;
            occupied.synchronize()?;
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

fn query_follows_the_work(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    until_conclusive("a stream is never seen pending", |load| {
        busy.enqueue(&stream, load)?;
        let pending = stream.is_pending()?;
        // A complete stream stays complete until more is enqueued.
        while stream.is_pending()? {
            std::thread::yield_now();
        }
        check!(stream.query()?.is_complete(), "a stream went from complete to pending with nothing enqueued");
        stream.synchronize()?;
        check!(stream.query()?.is_complete(), "a stream is pending after it was synchronized");
        Ok(Attempt::seen(pending))
    })
}

fn query_ignores_other_streams(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (occupied, idle) = (Stream::new(backend)?, Stream::new(backend)?);
    until_conclusive("a stream without work is pending while another has some", |load| {
        busy.enqueue(&occupied, load)?;
        let complete = idle.query()?.is_complete();
        let outstanding = occupied.is_pending()?;
        occupied.synchronize()?;
        check!(complete || !outstanding, "a stream that was given no work is pending, as another one of the device is");
        Ok(Attempt::seen(outstanding))
    })
}

/// A stream whose only work is the wait. It is asked until the event is reached, because it gets to the wait some time after the call.
fn query_covers_a_wait_for_another_device(backend: &dyn Backend) -> CaseResult {
    const OTHER: u32 = DEVICE + 1;
    let busy = StreamLoad::new(backend, OTHER, Direction::ToDevice)?;
    until_conclusive("the work was over before the stream that waits for it was asked", |load| {
        let (producer, waiting, event) =
            (Stream::on(backend, OTHER)?, Stream::new(backend)?, Event::on(backend, OTHER)?);
        busy.enqueue(&producer, load)?;
        producer.record(&event)?;
        waiting.wait(&event)?;
        let (mut outstanding, mut early) = (false, false);
        loop {
            let complete = waiting.query()?.is_complete();
            if !event.is_pending()? {
                break;
            }
            outstanding = true;
            early |= complete;
        }
        waiting.synchronize()?;
        let reached = !event.is_pending()?;
        producer.synchronize()?;
        check!(!early, "a stream is complete while its only work, a wait for device {OTHER}, is outstanding");
        check!(
            reached,
            "`synchronize_stream` of a stream returned before the event of device {OTHER} that it waits for"
        );
        Ok(Attempt::seen(outstanding))
    })
}

fn fresh_streams_are_complete(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let stream = Stream::on(backend, device)?;
        check!(stream.query()?.is_complete(), "a stream that was never used is pending");
        stream.synchronize()?;
    }
    Ok(())
}

fn synchronize_shows_the_effects(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    until_conclusive("the copy was done before it was waited for", |load| {
        let (block, pinned) = (Block::new(backend, BYTES)?, Pinned::holding(backend, &[0; BYTES])?);
        busy.enqueue(&stream, load)?;
        stream.set(block.all(), 5)?;
        stream.copy(pinned.all(), block.all())?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        // SAFETY: the stream was synchronized; that this means what it says is what the case shows.
        let got = unsafe { pinned.read_now() };
        check!(got == [5; BYTES], "the CPU does not see a stream's work after it waited for the stream");
        Ok(Attempt::seen(pending))
    })
}

fn synchronize_waits_for_its_own_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (occupied, idle) = (Stream::new(backend)?, Stream::new(backend)?);
    until_conclusive("synchronising an idle stream waits for another", |load| {
        busy.enqueue(&occupied, load)?;
        idle.synchronize()?;
        let outstanding = occupied.is_pending()?;
        occupied.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

/// Another thread makes a stream, uses it, and ends. Or it uses its default stream, and goes on.
fn synchronizing_the_device_waits_for_streams_of_other_threads(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let (event, default) =
            (Event::on(backend, device)?, StreamId::per_thread_default(backend.identity().tag, device));
        for is_default in [false, true] {
            if is_default && !backend.capabilities(device)?.per_thread_default_stream {
                continue;
            }
            until_conclusive("no stream was pending before the device was synchronized", |load| {
                let (enqueued, has_enqueued) = mpsc::channel::<()>();
                let (over, is_over) = mpsc::channel::<()>();
                let enqueue = || -> highwater_hal::Result<Stream<'_>> {
                    // The end of the thread drops both channels, even if it fails, so no other thread waits forever.
                    let (enqueued, is_over) = (enqueued, is_over);
                    let stream =
                        if is_default { Stream::borrowed(backend, default) } else { Stream::on(backend, device)? };
                    busy.enqueue(&stream, load)?;
                    stream.record(&event)?;
                    drop(enqueued);
                    if is_default {
                        let _ = is_over.recv();
                    }
                    Ok(stream)
                };
                let (answers, made) = std::thread::scope(|scope| {
                    let thread = scope.spawn(enqueue);
                    let _ = has_enqueued.recv();
                    // Waits until a thread that makes a stream has ended, so that only its stream remains.
                    while !is_default && !thread.is_finished() {
                        std::thread::yield_now();
                    }
                    let synchronize = || -> highwater_hal::Result<(bool, bool)> {
                        let pending = event.is_pending()?;
                        backend.synchronize_device(device)?;
                        Ok((pending, event.query()?.is_complete()))
                    };
                    let answers = synchronize();
                    // The memory of the load outlives its work in any case.
                    let answers = event.synchronize().and(answers);
                    drop(over);
                    (answers, thread.join())
                });
                let stream = made.map_err(|_| Failure::new("a thread panicked"))??;
                let (pending, complete) = answers?;
                if !is_default {
                    check!(stream.query()?.is_complete(), "a stream is pending after its last event was synchronized");
                }
                check!(
                    complete,
                    "work of another thread on {} is outstanding after its device {device} was synchronized",
                    if is_default { "its default stream" } else { "a stream" }
                );
                Ok(Attempt::seen(pending))
            })?;
        }
    }
    Ok(())
}

fn synchronizing_the_device_waits_for_every_stream(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let (up, down) = (
            StreamLoad::new(backend, device, Direction::ToDevice)?,
            StreamLoad::new(backend, device, Direction::ToHost)?,
        );
        let (first, second) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let block = Block::on(backend, device, BYTES)?;
        // Each stream has more work than the other once, so waiting for one of them is not enough.
        for (of_first, of_second) in [(2, 1), (1, 2)] {
            until_conclusive("no stream was pending before the device was synchronized", |load| {
                let pinned = Pinned::holding(backend, &[0; BYTES])?;
                up.enqueue(&first, load * of_first)?;
                down.enqueue(&second, load * of_second)?;
                first.set(block.all(), 6)?;
                first.copy(pinned.all(), block.all())?;
                let pending = first.is_pending()? && second.is_pending()?;
                backend.synchronize_device(device)?;
                // SAFETY: the device was synchronized; that this means what it says is what the case shows.
                let got = unsafe { pinned.read_now() };
                let complete = [first.query()?.is_complete(), second.query()?.is_complete()];
                // The memory of the case outlives the work in any case.
                first.synchronize()?;
                second.synchronize()?;
                check!(got == [6; BYTES], "the CPU does not see a device's work after it waited for the device");
                check!(
                    complete == [true; 2],
                    "of two streams of device {device}, one is pending after the device was synchronized: complete are {complete:?}"
                );
                Ok(Attempt::seen(pending))
            })?;
        }
    }
    Ok(())
}

fn destroyed_streams_finish_their_work(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the stream was idle when it was destroyed", |load| {
        let (block, event) = (Block::filled(backend, BYTES, 0)?, Event::new(backend)?);
        let stream = Stream::new(backend)?;
        busy.enqueue(&stream, load)?;
        stream.set(block.all(), 7)?;
        stream.record(&event)?;
        let pending = stream.is_pending()?;
        stream.destroy()?;
        event.synchronize()?;
        check!(event.query()?.is_complete(), "an event is pending after it was synchronized");
        check!(block.read()? == [7; BYTES], "work of a stream was lost when it was destroyed");
        Ok(Attempt::seen(pending))
    })
}

/// The last call before the end of a stream is work of each kind, alone or after other work. A backend that submits work with the next
/// call loses it.
fn destroyed_streams_finish_their_last_call(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let source = Block::filled(backend, BYTES, 7)?;
    let pinned = Pinned::holding(backend, &[7; BYTES])?;
    let rows = CopyShape::new(BYTES / 16, 16);
    let block = Block::new(backend, BYTES)?;
    let executable = match backend.capabilities(DEVICE)?.capture {
        true => {
            let stream = Stream::new(backend)?;
            let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
            stream.set(block.all(), 7)?;
            Some(capture.end(&[&block])?.instantiate()?)
        }
        false => None,
    };
    type Work<'w> = (&'static str, Box<dyn Fn(&Stream<'_>) -> highwater_hal::Result<()> + 'w>);
    let mut works: Vec<Work<'_>> = vec![
        ("a fill", Box::new(|stream| stream.set(block.all(), 7))),
        ("a copy to the device", Box::new(|stream| stream.copy(block.all(), pinned.all()))),
        ("a copy on the device", Box::new(|stream| stream.copy(block.all(), source.all()))),
        ("a copy of rows", Box::new(|stream| stream.copy_rows(block.all(), pinned.all(), rows))),
    ];
    if let Some(executable) = &executable {
        works.push(("a launch", Box::new(|stream| executable.launch(stream))));
    }
    for (what, work) in &works {
        for load in [0, 1] {
            let fresh = Stream::new(backend)?;
            fresh.set(block.all(), 0)?;
            fresh.synchronize()?;
            let stream = Stream::new(backend)?;
            busy.enqueue(&stream, load)?;
            work(&stream)?;
            stream.destroy()?;
            backend.synchronize_device(DEVICE)?;
            check!(
                block.read()? == [7; BYTES],
                "{what} was the last call on a stream, after {load} loads, and was lost when the stream was destroyed"
            );
        }
    }
    Ok(())
}

/// Streams that are made while a destroyed stream has work, and may have its place.
fn fresh_streams_have_no_work_of_destroyed_ones(backend: &dyn Backend) -> CaseResult {
    const STREAMS: usize = 4;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the work of a destroyed stream ended before new streams were asked: a call waits", |load| {
        let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
        busy.enqueue(&stream, load)?;
        stream.record(&event)?;
        let was_pending = event.is_pending()?;
        stream.destroy()?;
        if !event.is_pending()? {
            // Some vendors wait for the work when they destroy a stream.
            return Ok(Attempt::seen(was_pending));
        }
        let fresh = (0..STREAMS).map(|_| Stream::new(backend)).collect::<Result<Vec<_>, _>>()?;
        let mut complete = true;
        for stream in &fresh {
            complete &= stream.query()?.is_complete();
            stream.synchronize()?;
        }
        let pending = event.is_pending()?;
        check!(complete || !pending, "a fresh stream is pending while a destroyed one has work");
        event.synchronize()?;
        Ok(Attempt::seen(pending))
    })
}

fn destroyed_streams_are_stale(backend: &dyn Backend) -> CaseResult {
    let stale = Stream::new(backend)?.destroy()?;
    check_error!(backend.destroy_stream(stale), InvalidHandle, "a second destroy_stream");
    check_error!(backend.query_stream(stale), InvalidHandle, "query_stream after destroy_stream");
    check_error!(backend.synchronize_stream(stale), InvalidHandle, "synchronize_stream after destroy_stream");
    Ok(())
}

/// A backend that remembers the captures of a stream must forget them with the stream.
fn destroyed_streams_that_recorded_are_stale(backend: &dyn Backend) -> CaseResult {
    for is_asked in [true, false] {
        let (stream, block) = (Stream::new(backend)?, Block::new(backend, BYTES)?);
        let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
        stream.set(block.all(), 1)?;
        drop(capture.end(&[&block])?);
        if is_asked {
            check!(!backend.is_capturing(stream.id())?, "a stream takes part in a capture that has ended");
        }
        let stale = stream.destroy()?;
        check_error!(backend.is_capturing(stale), InvalidHandle, "is_capturing after destroy_stream");
        check_error!(backend.query_stream(stale), InvalidHandle, "query_stream after destroy_stream");
        check_error!(
            backend.begin_capture(stale, CaptureMode::Relaxed),
            InvalidHandle,
            "begin_capture after destroy_stream"
        );
        check_error!(end_capture(backend, stale), InvalidHandle, "end_capture after destroy_stream");
    }
    Ok(())
}

fn priorities_keep_the_order(backend: &dyn Backend) -> CaseResult {
    for priority in [StreamPriority::Low, StreamPriority::High] {
        let options = StreamOptions::new().with_priority(priority);
        in_order(backend, &Stream::with_options(backend, DEVICE, &options)?)?;
    }
    Ok(())
}

fn the_legacy_default_stream_runs_in_order(backend: &dyn Backend) -> CaseResult {
    let id = StreamId::legacy_default(backend.identity().tag, DEVICE);
    in_order(backend, &Stream::borrowed(backend, id))
}

fn the_per_thread_default_stream_runs_in_order(backend: &dyn Backend) -> CaseResult {
    let id = StreamId::per_thread_default(backend.identity().tag, DEVICE);
    in_order(backend, &Stream::borrowed(backend, id))
}

fn the_per_thread_default_stream_is_another_in_each_thread(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let here = Stream::borrowed(backend, StreamId::per_thread_default(backend.identity().tag, DEVICE));
    until_conclusive("one thread's default stream waits for another thread's", |load| {
        // Freed after both threads are done, because freeing memory waits for the device.
        let block = Block::new(backend, BYTES)?;
        busy.enqueue(&here, load)?;
        let there = std::thread::scope(|scope| {
            let other = scope.spawn(|| -> CaseResult {
                let there = Stream::borrowed(backend, here.id());
                there.set(block.all(), 11)?;
                there.synchronize()?;
                check!(there.query()?.is_complete(), "a thread's default stream is pending for another thread's work");
                Ok(())
            });
            other.join().map_err(|_| Failure::new("a thread panicked"))
        });
        let outstanding = here.is_pending()?;
        here.synchronize()?;
        there??;
        check!(block.read()? == [11; BYTES], "a fill on another thread's default stream did not arrive");
        Ok(Attempt::seen(outstanding))
    })
}

fn the_per_thread_default_stream_waits_and_is_waited_for(backend: &dyn Backend) -> CaseResult {
    let default = Stream::borrowed(backend, StreamId::per_thread_default(backend.identity().tag, DEVICE));
    let (other, to, back) = (Stream::new(backend)?, Event::new(backend)?, Event::new(backend)?);
    let (x, y) = (Block::filled(backend, BYTES, 0)?, Block::filled(backend, BYTES, 0)?);
    for round in 1..20 {
        default.set(x.all(), round)?;
        default.record(&to)?;
        other.wait(&to)?;
        other.copy(y.all(), x.all())?;
        other.record(&back)?;
        default.wait(&back)?;
        default.set(x.all(), 0)?;
        default.synchronize()?;
        check!(
            y.read()? == [round; BYTES],
            "a default stream and another did not wait for each other in round {round}"
        );
    }
    Ok(())
}

fn wrapped_streams_are_forgotten_not_destroyed(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects().streams;
    let owner = Stream::new(backend)?;
    let raw = backend.raw_stream(owner.id())?;
    // SAFETY: the stream lives until the end of this function, where its wrapper is gone.
    let id = unsafe { backend.stream_from_raw(DEVICE, raw) }.map_err(Failure::from)?;
    let wrapper = Stream::adopted(backend, id);
    check!(wrapper.id() != owner.id(), "a wrapped stream has the id of its owner");
    let block = Block::filled(backend, BYTES, 0)?;
    owner.set(block.all(), 8)?;
    wrapper.set(block.span(0..100), 9)?;
    owner.synchronize()?;
    let got = block.read()?;
    check!(got[..100] == [9; 100] && got[100..].iter().all(|&byte| byte == 8), "wrapper and owner are not one stream");
    let stale = wrapper.destroy()?;
    check_error!(backend.query_stream(stale), InvalidHandle, "query_stream of a wrapper that was destroyed");
    owner.set(block.all(), 10)?;
    owner.synchronize()?;
    check!(block.read()? == [10; BYTES], "the stream does not work after its wrapper was destroyed");
    drop((block, owner));
    check!(backend.live_objects().streams == before, "live streams differ after a stream was wrapped");
    Ok(())
}

/// Each thread has a per-thread default stream of its own, so no other thread adds work to it.
fn synchronize_ends_on_each_kind_of_stream(backend: &dyn Backend) -> CaseResult {
    let others = |kind: &StreamKind| !matches!(kind, StreamKind::Normal | StreamKind::PerThread);
    let kinds = StreamKind::of(backend, DEVICE)?;
    kinds.into_iter().filter(others).try_for_each(|kind| ends_while_others_enqueue(backend, Wait::Stream, kind))
}

fn synchronizing_a_device_does_not_wait_for_another(backend: &dyn Backend) -> CaseResult {
    const OTHER: u32 = DEVICE + 1;
    let busy = StreamLoad::new(backend, OTHER, Direction::ToDevice)?;
    let occupied = Stream::on(backend, OTHER)?;
    until_conclusive("a wait for a device waits for the work of another device", |load| {
        busy.enqueue(&occupied, load)?;
        backend.synchronize_device(DEVICE)?;
        let outstanding = occupied.is_pending()?;
        occupied.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

/// A wait that must end although work is added all the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Stream,
    Device,
}

/// One thread keeps a stream busy, with a few loads ahead of the device. Another waits, and must return before the first one stops.
fn ends_while_others_enqueue(backend: &dyn Backend, wait: Wait, kind: StreamKind) -> CaseResult {
    /// A wrong wait lasts as long as work is added. A right one lasts until the loads before it are done.
    const LIMIT: Duration = Duration::from_secs(3);
    const AHEAD: usize = 6;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let made = kind.make(backend, DEVICE)?;
    let stream = &made.stream;
    let events: Vec<Event<'_>> = (0..AHEAD).map(|_| Event::new(backend)).collect::<Result<_, _>>()?;
    // With this much enqueued, the stream is never idle.
    let add = |event: &Event<'_>| busy.enqueue(stream, 1).and_then(|()| stream.record(event));
    events.iter().try_for_each(add)?;
    let (is_over, began) = (AtomicBool::new(false), Instant::now());
    let (waited, added) = std::thread::scope(|scope| {
        let adding = scope.spawn(|| {
            for event in events.iter().cycle() {
                if is_over.load(Ordering::Relaxed) || began.elapsed() > LIMIT {
                    break;
                }
                event.synchronize()?;
                add(event)?;
            }
            Ok(())
        });
        let waited = match wait {
            Wait::Stream => stream.synchronize(),
            Wait::Device => backend.synchronize_device(DEVICE),
        };
        is_over.store(true, Ordering::Relaxed);
        let lasted = began.elapsed();
        (waited.map(|()| lasted), adding.join().unwrap_or_else(|_| panic!("the thread that enqueues panicked")))
    });
    let lasted = waited?;
    added.map_err(|error: highwater_hal::Error| Failure::from(error))?;
    check!(
        lasted < LIMIT,
        "a wait ({wait:?}, stream {kind:?}) lasted for {lasted:?}, as long as another thread enqueued work; expected is that it ends once the work \
         before it is done"
    );
    Ok(())
}
