//! Calls from several threads at once.

use highwater_hal::{Backend, BlasKind, CaptureMode, DataType, Epilogue, GemmShape, PlanOptions};

use super::memory::{Maker, makers};
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Block, Capture, Event, Handle, Pinned, Stream};
use crate::matrix::Product;
use crate::random::Random;

cases! {
    group "concurrency";
    threads_with_their_own_streams: ["backend.concurrent", "copy.exact"];
    threads_on_one_stream: ["backend.concurrent", "fill.exact"];
    threads_that_make_and_destroy: ["backend.concurrent", "backend.live-objects"];
    threads_that_multiply: ["backend.concurrent", "gemm.value"] needs [has::gemm_f32];
    a_thread_that_gets_errors_disturbs_nobody: ["backend.concurrent", "backend.ids-checked"];
    counts_are_those_of_every_thread: ["backend.live-objects"];
    objects_go_from_thread_to_thread: ["backend.concurrent"];
    objects_are_destroyed_by_another_thread: ["backend.live-objects", "backend.concurrent"];
}

const THREADS: u64 = 4;

/// Runs the function in several threads at once and returns the first failure.
fn in_threads(run: impl Fn(u64) -> CaseResult + Sync) -> CaseResult {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn({
                    let run = &run;
                    move || run(thread)
                })
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        results.into_iter().try_for_each(|result| result.map_err(|_| Failure::new("a thread panicked"))?)
    })
}

/// Returns the device of a thread. With two devices, the threads use both at once.
fn device_of(backend: &dyn Backend, thread: u64) -> u32 {
    thread as u32 % backend.device_count().min(2)
}

fn threads_with_their_own_streams(backend: &dyn Backend) -> CaseResult {
    in_threads(|thread| {
        let device = device_of(backend, thread);
        let stream = Stream::on(backend, device)?;
        let event = Event::on(backend, device)?;
        for round in 0..20 {
            let content = Random::new(thread << 32 | round).bytes(30_000);
            let (source, target) = (Pinned::holding(backend, &content)?, Pinned::new(backend, content.len())?);
            let block = Block::on(backend, device, content.len())?;
            stream.copy(block.all(), source.all())?;
            stream.copy(target.all(), block.all())?;
            stream.record(&event)?;
            event.synchronize()?;
            check!(target.read()? == content, "thread {thread} got other bytes back in round {round}");
        }
        Ok(())
    })
}

fn threads_on_one_stream(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    in_threads(|thread| {
        let byte = thread as u8 + 1;
        let block = Block::filled(backend, 5000, 0)?;
        for round in 0..50 {
            stream.set(block.all(), 100 + byte)?;
            stream.set(block.span(0..2500), byte)?;
            stream.synchronize()?;
            let got = block.read()?;
            let right = got[..2500].iter().all(|&b| b == byte) && got[2500..].iter().all(|&b| b == 100 + byte);
            check!(right, "thread {thread} on a stream of all threads saw other fills in round {round}");
        }
        Ok(())
    })
}

/// Each object is one of the device that its thread named, whatever other threads name at the same time.
fn threads_that_make_and_destroy(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    in_threads(|thread| {
        let device = device_of(backend, thread);
        let granularity = backend.capabilities(device)?.mapped_memory_granularity.max(1);
        for round in 0..50 {
            let (stream, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
            check_eq!(
                (stream.id().device(), event.id().device()),
                (device, device),
                "devices of a stream and an event"
            );
            let makers = makers(backend, &stream)?;
            let Maker { what, make, .. } = &makers[(thread as usize / 2 + round as usize) % makers.len()];
            let block = make((1000 + 100 * thread as usize).next_multiple_of(granularity))
                .map_err(|error| Failure::from(error).with_details(&format!("{what} memory of device {device}")))?;
            stream
                .set(block.span(0..1000), round)
                .map_err(|error| Failure::from(error).with_details(&format!("{what} memory of device {device}")))?;
            stream.record(&event)?;
            event.synchronize()?;
            let stale = event.destroy()?;
            check_error!(backend.query_event(stale), InvalidHandle, "query_event of an id that went stale");
        }
        Ok(())
    })?;
    let after = backend.live_objects();
    check!(before == after, "live objects differ after {THREADS} threads: {before:?} before, {after:?} after");
    Ok(())
}

fn threads_that_multiply(backend: &dyn Backend) -> CaseResult {
    in_threads(|thread| {
        let workspace = Block::new(backend, 1 << 20)?;
        let stream = Stream::new(backend)?;
        let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
        handle.offer_workspace(&workspace, 0..1 << 20)?;
        for round in 0..6 {
            let shape = GemmShape::new(DataType::F32, 30 + round, 40, 25 + 5 * thread as usize);
            Product::new(shape, thread).with_scale(1.0, 0.5).prove(backend, &mut handle, &stream)?;
        }
        Ok(())
    })
}

fn a_thread_that_gets_errors_disturbs_nobody(backend: &dyn Backend) -> CaseResult {
    let stale = Stream::new(backend)?.destroy()?;
    in_threads(|thread| {
        let stream = Stream::new(backend)?;
        let block = Block::filled(backend, 1000, 0)?;
        for round in 0..100 {
            if thread % 2 == 0 {
                check_error!(backend.query_stream(stale), InvalidHandle, "query_stream of a stale id");
                check_error!(backend.device_info(u32::MAX), InvalidArgument, "device_info of no device");
            } else {
                stream.set(block.all(), round)?;
                stream.synchronize()?;
            }
        }
        let expected = if thread % 2 == 0 { 0 } else { 99 };
        check!(block.read()? == [expected; 1000], "thread {thread} lost its fills");
        Ok(())
    })
}

fn objects_go_from_thread_to_thread(backend: &dyn Backend) -> CaseResult {
    // Each step runs in a new thread, which has no current device.
    let step = |run: &(dyn Fn() -> CaseResult + Sync)| {
        std::thread::scope(|scope| scope.spawn(run).join().map_err(|_| Failure::new("a thread panicked"))?)
    };
    let (stream, other, event) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
    let (block, copied) = (Block::filled(backend, 4096, 0)?, Block::filled(backend, 4096, 0)?);
    step(&|| Ok(stream.set(block.all(), 1)?))?;
    step(&|| Ok(stream.record(&event)?))?;
    step(&|| Ok(other.wait(&event)?))?;
    step(&|| Ok(other.copy(copied.all(), block.all())?))?;
    step(&|| Ok(other.synchronize()?))?;
    check!(copied.read()? == [1; 4096], "work enqueued by five threads did not run in order");
    Ok(())
}

/// Objects of every kind on every device, made by this thread and destroyed by another one.
fn objects_are_destroyed_by_another_thread(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let (before, can) = (backend.live_objects(), backend.capabilities(device)?);
        let stream = Stream::on(backend, device)?;
        let (event, block) = (Event::on(backend, device)?, Block::on(backend, device, 4096)?);
        let mut plan = None;
        let mut handles = vec![Handle::unbound(backend, BlasKind::Blas, device)?];
        if can.lt_plans && can.gemm_f32 {
            let mut handle = Handle::unbound(backend, BlasKind::Lt, device)?;
            let shape = GemmShape::new(DataType::F32, 8, 8, 8);
            plan = Some(handle.raw_mut().create_plan(&PlanOptions::new(shape, Epilogue::None, 0))?);
            handles.push(handle);
        }
        let graph = match can.capture {
            true => {
                let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
                stream.set(block.all(), 1)?;
                let graph = capture.end(&[&block])?;
                let executable = graph.instantiate()?;
                Some((graph, executable))
            }
            false => None,
        };
        let destroy = move || -> CaseResult {
            if let (Some(handle), Some(plan)) = (handles.last_mut(), plan) {
                handle.raw_mut().destroy_plan(plan)?;
                check_error!(
                    handle.raw_mut().destroy_plan(plan),
                    InvalidHandle,
                    "a plan that another thread destroyed"
                );
            }
            for mut handle in handles {
                handle.raw_mut().destroy()?;
            }
            if let Some((graph, executable)) = graph {
                executable.destroy()?;
                graph.destroy()?;
            }
            event.destroy()?;
            stream.destroy()?;
            Ok(())
        };
        std::thread::scope(|scope| scope.spawn(destroy).join()).map_err(|_| Failure::new("a thread panicked"))??;
        drop(block);
        let after = backend.live_objects();
        check!(
            before == after,
            "live objects differ after another thread destroyed them: {before:?} before, {after:?} after"
        );
    }
    Ok(())
}

/// Objects that other threads made count in each thread.
fn counts_are_those_of_every_thread(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    let made = in_thread(|| {
        let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
        let (block, pinned) = (Block::new(backend, 256)?, Pinned::new(backend, 256)?);
        Ok((stream, event, block, pinned))
    })?;
    let mut expected = before;
    expected.streams += 1;
    expected.events += 1;
    expected.allocations += 1;
    expected.host_allocations += 1;
    check_eq!(backend.live_objects(), expected, "live objects, of which another thread made some");
    let seen = in_thread(|| Ok(backend.live_objects()))?;
    check_eq!(seen, expected, "live objects, asked for in a third thread");
    in_thread(move || {
        drop(made);
        Ok(())
    })?;
    check_eq!(backend.live_objects(), before, "live objects after another thread destroyed its own");
    Ok(())
}

/// Runs the function in a thread of its own.
pub(super) fn in_thread<T: Send>(run: impl FnOnce() -> highwater_hal::Result<T> + Send) -> Result<T, Failure> {
    std::thread::scope(|scope| scope.spawn(run).join())
        .map_err(|_| Failure::new("a thread panicked"))?
        .map_err(Failure::from)
}
