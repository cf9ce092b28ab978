//! Effects of a call on later ones: calls of each kind after refused calls, and equal operations with other work between.

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use highwater_hal::{
    AllocateOptions, Backend, BlasKind, CaptureMode, CopyShape, DataType, DevicePtr, FillPattern, Gemm, GemmShape,
    GraphExecId, HostOptions, IdParts, Location, MemoryCopy, MemoryCopy2d, MemoryFill, ObjectId, Result, StreamOptions,
};

use super::ids::forge;
use crate::case::{CaseResult, Failure, cases, check, on_devices};
use crate::device::{Block, Capture, Event, Executable, Handle, Memory, Pinned, Span, Stream, end_capture};

cases! {
    group "aftermath";
    calls_of_each_kind_after_refused_ones: ["backend.ids-checked", "backend.device-checked", "memory.exhausted"];
    streams_are_complete_after_refused_calls: ["stream.query", "backend.ids-checked"];
    nothing_in_a_capture: ["copy.zero", "fill.zero", "gemm.empty"] needs [has::capture];
    equal_operations_with_others_between: ["fill.exact", "copy.exact", "stream.order"];
}

/// Elements of a square matrix of `f32` in a block.
const SIZE: usize = 16;
const BYTES: usize = SIZE * SIZE * 4;

/// A call that must fail, with its name.
type Refused<'c> = (&'static str, Box<dyn Fn() -> Result<()> + 'c>);
/// A call that must work, with its name. It takes a byte that no call had before.
type Working<'c> = (&'static str, Box<dyn Fn(u8) -> CaseResult + 'c>);

fn calls_of_each_kind_after_refused_ones(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let (stream, other) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (event, block) = (Event::on(backend, device)?, Block::filled_on(backend, device, BYTES, 0)?);
        let factors = Block::filled_on(backend, device, BYTES, 0)?;
        let (from, to) = (Pinned::new(backend, BYTES)?, Pinned::new(backend, BYTES)?);
        let graph = if can.capture { Some(recorded_fill(&stream, &block, 0x77)?) } else { None };
        let handle = match can.gemm_f32 {
            true => Some(RefCell::new(Handle::new(backend, BlasKind::Blas, &stream)?)),
            false => None,
        };
        let refused = refused_calls(backend, &stream, &block, handle.as_ref());
        let holds = |byte: u8, what: &str| {
            stream.copy(to.all(), block.all())?;
            stream.synchronize()?;
            let got = to.read()?;
            let place = got.iter().position(|&got| got != byte);
            check!(
                place.is_none(),
                "{what}: byte {} is {:#04x}, expected {byte:#04x}",
                place.unwrap_or(0),
                got[place.unwrap_or(0)]
            );
            Ok(())
        };
        let mut working: Vec<Working<'_>> = vec![
            (
                "a copy to the device",
                Box::new(|byte| {
                    from.write(&[byte; BYTES])?;
                    stream.copy(block.all(), from.all())?;
                    holds(byte, "a copy to the device")
                }),
            ),
            (
                "a fill",
                Box::new(|byte| {
                    stream.set(block.all(), byte)?;
                    holds(byte, "a fill")
                }),
            ),
            (
                "a record, and a wait for it",
                Box::new(|byte| {
                    stream.set(block.all(), byte)?;
                    stream.record(&event)?;
                    other.wait(&event)?;
                    other.copy(to.all(), block.all())?;
                    other.synchronize()?;
                    check!(to.read()? == [byte; BYTES], "a stream did not wait for an event");
                    event.synchronize()?;
                    check!(event.query()?.is_complete(), "an event is pending after a wait for it");
                    Ok(())
                }),
            ),
            (
                "a query",
                Box::new(|_| {
                    stream.synchronize()?;
                    check!(stream.query()?.is_complete(), "a stream is pending after a wait for it");
                    Ok(())
                }),
            ),
            (
                "a wait for the device",
                Box::new(|byte| {
                    stream.set(block.all(), byte)?;
                    backend.synchronize_device(device)?;
                    check!(stream.query()?.is_complete(), "a stream is pending after a wait for its device");
                    Ok(())
                }),
            ),
            (
                "an allocation",
                Box::new(|byte| {
                    let block = Block::filled_on(backend, device, 256, byte)?;
                    check!(block.read()? == [byte; 256], "a new block has other bytes");
                    Ok(())
                }),
            ),
            (
                "new objects",
                Box::new(|_| {
                    let (stream, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
                    stream.record(&event)?;
                    Ok(event.synchronize()?)
                }),
            ),
        ];
        if let Some((_, executable)) = &graph {
            working.push((
                "a launch",
                Box::new(|byte| {
                    stream.set(block.all(), byte)?;
                    executable.launch(&stream)?;
                    holds(0x77, "a launch")
                }),
            ));
        }
        if let Some(handle) = &handle {
            working.push((
                "a product",
                Box::new(|byte| {
                    stream.set(block.all(), byte)?;
                    clear(&mut handle.borrow_mut(), &factors, &block)?;
                    holds(0, "a product with alpha 0 and beta 0")
                }),
            ));
        }
        let mut byte = 0;
        for (refusal, call) in &refused {
            check!(call().is_err(), "{refusal} succeeded");
            for (what, call) in &working {
                byte = byte % 250 + 1;
                call(byte).map_err(|failure| failure.with_details(&format!("{what} after {refusal} was refused")))?;
            }
        }
        Ok(())
    })
}

/// A refused call enqueues nothing. So a stream that was idle is complete at once, and one with work is complete after it, without a wait.
fn streams_are_complete_after_refused_calls(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let (stream, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
        let block = Block::filled_on(backend, device, BYTES, 0)?;
        let handle = match backend.capabilities(device)?.gemm_f32 {
            true => Some(RefCell::new(Handle::new(backend, BlasKind::Blas, &stream)?)),
            false => None,
        };
        for (refusal, call) in &refused_calls(backend, &stream, &block, handle.as_ref()) {
            stream.synchronize()?;
            check!(call().is_err(), "{refusal} succeeded");
            check!(stream.query()?.is_complete(), "an idle stream is pending after {refusal} was refused");
            stream.set(block.all(), 1)?;
            stream.record(&event)?;
            check!(call().is_err(), "{refusal} succeeded on a stream with work");
            event.synchronize()?;
            // The event is the last work, and a stream may need a moment to end it.
            let begun = Instant::now();
            while stream.is_pending()? && begun.elapsed() < A_WHILE {
                std::thread::yield_now();
            }
            check!(
                stream.query()?.is_complete(),
                "a stream is pending {A_WHILE:?} after its last work was done, because {refusal} was refused"
            );
        }
        Ok(())
    })
}

/// The time in which a stream notices that its work is done.
const A_WHILE: Duration = Duration::from_secs(2);

/// Returns calls on living objects, each with one bad argument.
fn refused_calls<'c>(
    backend: &'c dyn Backend,
    stream: &'c Stream<'_>,
    block: &'c Block<'_>,
    handle: Option<&'c RefCell<Handle<'_>>>,
) -> Vec<Refused<'c>> {
    let (id, device, nowhere) = (stream.id(), stream.id().device(), backend.device_count());
    let no_parts = IdParts { slot: 7, generation: NonZeroU32::MAX, tag: id.parts().tag, device };
    let (no_stream, no_event) = (forge(no_parts), forge(no_parts));
    let no_graph: GraphExecId = forge(no_parts);
    let here = Location::Device { device, ptr: block.ptr() };
    let there = Location::Device { device: nowhere, ptr: block.ptr() };
    let fill = |device| MemoryFill::new(device, block.ptr(), FillPattern::U8(0xbd), BYTES);
    let mut calls: Vec<Refused<'c>> = vec![
        (
            "a copy to an unknown device",
            // SAFETY: the ordinal is refused; if it is not, the copy stays inside the block.
            Box::new(move || unsafe { backend.copy(&MemoryCopy::new(there, here, 1), id) }),
        ),
        // SAFETY: as above.
        ("a fill on an unknown device", Box::new(move || unsafe { backend.fill(&fill(nowhere), id) })),
        // SAFETY: the id is refused; if it is not, the fill stays inside the block.
        ("a fill on an unknown stream", Box::new(move || unsafe { backend.fill(&fill(device), no_stream) })),
        ("a record of an unknown event", Box::new(move || backend.record_event(no_event, id))),
        ("a wait for an unknown event", Box::new(move || backend.stream_wait_event(id, no_event))),
        ("a query of an unknown stream", Box::new(move || backend.query_stream(no_stream).map(drop))),
        ("a query of an unknown event", Box::new(move || backend.query_event(no_event).map(drop))),
        ("a wait for an unknown stream", Box::new(move || backend.synchronize_stream(no_stream))),
        ("a wait for an unknown device", Box::new(move || backend.synchronize_device(nowhere))),
        ("the destruction of an unknown stream", Box::new(move || backend.destroy_stream(no_stream))),
        ("the destruction of an unknown event", Box::new(move || backend.destroy_event(no_event))),
        (
            "a stream of an unknown device",
            Box::new(move || backend.create_stream(nowhere, &StreamOptions::new()).map(drop)),
        ),
        ("a block of nothing", Box::new(move || backend.allocate(device, &AllocateOptions::new(0)).map(drop))),
        ("a block of 2^60 bytes", Box::new(move || backend.allocate(device, &AllocateOptions::new(1 << 60)).map(drop))),
        (
            "page-locked memory of nothing",
            Box::new(move || backend.host_allocator().allocate(0, &HostOptions::new()).map(drop)),
        ),
        // SAFETY: the id is refused, or the capability is false.
        ("a launch of an unknown graph", Box::new(move || unsafe { backend.launch_graph(no_graph, id) })),
        (
            "a copy of rows that overlap",
            // SAFETY: the pitch is refused; if it is not, the rows stay inside the block, on both sides apart.
            Box::new(move || unsafe {
                let below = Location::Device { device, ptr: block.ptr().offset(BYTES / 2) };
                backend.copy_2d(&MemoryCopy2d::new(below, here, CopyShape::new(8, 2).with_src_pitch(4)), id)
            }),
        ),
        ("the end of no capture", Box::new(move || end_capture(backend, id).map(drop))),
    ];
    if let Some(handle) = handle {
        let (a, c) = (block.ptr(), block.ptr().offset(BYTES / 2));
        let pair = GemmShape::new(DataType::F32, 2, 2, 2).with_output(DataType::F16);
        calls.push((
            "an unknown stream for a handle",
            Box::new(move || handle.borrow_mut().raw_mut().set_stream(no_stream)),
        ));
        calls.push((
            "a product of an unknown pair of types",
            // SAFETY: the types are refused; if they are not, the product stays inside the block.
            Box::new(move || unsafe { handle.borrow_mut().raw_mut().gemm(&Gemm::new(pair, a, a, c)) }),
        ));
    }
    calls
}

/// Records a fill of the block.
fn recorded_fill<'m>(
    stream: &Stream<'m>,
    block: &'m Block<'m>,
    byte: u8,
) -> Result<(crate::device::Graph<'m>, Executable<'m>)> {
    let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
    stream.set(block.all(), byte)?;
    let graph = capture.end(&[block as &dyn Memory])?;
    let executable = graph.instantiate()?;
    Ok((graph, executable))
}

/// Fills the block with zeros by a product.
fn clear(handle: &mut Handle<'_>, factors: &Block<'_>, block: &Block<'_>) -> Result<()> {
    let zero = DevicePtr::new(0);
    let gemm = Gemm::new(GemmShape::new(DataType::F32, SIZE, SIZE, 0), zero, zero, zero).with_scale(0.0, 0.0);
    handle.gemm(&gemm, [(factors, 0), (factors, 0), (block, 0)])
}

/// Copies, fills and products of nothing succeed in a capture too, and the graph has the rest.
fn nothing_in_a_capture(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let (block, pinned) = (Block::filled_on(backend, device, BYTES, 1)?, Pinned::new(backend, BYTES)?);
        let factors = Block::filled_on(backend, device, BYTES, 0)?;
        let mut handle = match backend.capabilities(device)?.gemm_f32 {
            true => Some(Handle::new(backend, BlasKind::Blas, &stream)?),
            false => None,
        };
        let (here, host) = (block.span(0..0), pinned.span(0..0));
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
        stream.copy(here, host)?;
        stream.copy(host, here)?;
        stream.copy(here, block.span(BYTES..BYTES))?;
        for pattern in [FillPattern::U8(9), FillPattern::U16(9), FillPattern::U32(9)] {
            stream.fill(here, pattern)?;
        }
        if let Some(handle) = &mut handle {
            let zero = DevicePtr::new(0);
            let gemm = Gemm::new(GemmShape::new(DataType::F32, 0, SIZE, SIZE), zero, zero, zero);
            handle.gemm(&gemm, [(&factors, 0), (&factors, 0), (&block, 0)])?;
        }
        stream.set(block.span(0..BYTES / 2), 2)?;
        let graph = capture.end(&[&block, &pinned])?;
        let executable = graph.instantiate()?;
        check!(block.read()? == [1; BYTES], "a capture with work of nothing was executed");
        executable.launch(&stream)?;
        stream.synchronize()?;
        let expected = [[2; BYTES / 2], [1; BYTES / 2]].concat();
        check!(block.read()? == expected, "a graph that was recorded beside work of nothing has another effect");
        Ok(())
    })
}

/// An operation that is made twice must have its effect twice, whatever changed its bytes between.
fn equal_operations_with_others_between(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let (stream, other) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let (source, target) = (Block::on(backend, device, BYTES)?, Block::on(backend, device, BYTES)?);
        let (host, seen) = (Pinned::new(backend, BYTES)?, Pinned::new(backend, BYTES)?);
        let fresh = Block::filled_on(backend, device, BYTES, 0xf0)?;
        let mut handle = match can.gemm_f32 {
            true => Some(Handle::new(backend, BlasKind::Blas, &stream)?),
            false => None,
        };
        let graphs = match can.capture {
            true => Some((recorded_fill(&stream, &source, 0xa1)?, recorded_fill(&stream, &target, 0xa2)?)),
            false => None,
        };
        // Each changes all bytes of a block, and returns when it is done. It returns the new byte, or nothing if it cannot be made.
        let mut changed = |way: usize, block: &Block<'_>| -> std::result::Result<Option<u8>, Failure> {
            let span: Span<'_> = block.all();
            let byte = match (way, &mut handle, &graphs) {
                (0, ..) => stream.set(span, 0xb0).map(|()| 0xb0)?,
                (1, ..) => {
                    other.set(span, 0xb1)?;
                    other.synchronize()?;
                    0xb1
                }
                (2, ..) => {
                    host.write(&[0xb2; BYTES])?;
                    stream.copy(span, host.all()).map(|()| 0xb2)?
                }
                (3, ..) => stream.copy(span, fresh.all()).map(|()| 0xf0)?,
                (4, Some(handle), _) => clear(handle, &fresh, block).map(|()| 0)?,
                (5, _, Some(((_, of_source), (_, of_target)))) => {
                    let is_source = block.ptr() == source.ptr();
                    (if is_source { of_source } else { of_target }).launch(&stream)?;
                    if is_source { 0xa1 } else { 0xa2 }
                }
                _ => return Ok(None),
            };
            stream.synchronize()?;
            Ok(Some(byte))
        };
        for (way, named) in WAYS.iter().enumerate() {
            for operation in [Operation::Fill, Operation::OnDevice, Operation::ToDevice, Operation::ToHost] {
                // The bytes of the target change between, and then those of the source.
                for of_source in [false, true] {
                    host.write(&[0x11; BYTES])?;
                    stream.set(source.all(), 0x12)?;
                    let enqueue = || match operation {
                        Operation::Fill => stream.set(target.all(), 0x13),
                        Operation::OnDevice => stream.copy(target.all(), source.all()),
                        Operation::ToDevice => stream.copy(target.all(), host.all()),
                        Operation::ToHost => stream.copy(seen.all(), source.all()),
                    };
                    enqueue()?;
                    stream.synchronize()?;
                    let Some(byte) = changed(way, if of_source { &source } else { &target })? else { continue };
                    // Two of the ways write to the memory that the copy to the device reads.
                    host.write(&[0x11; BYTES])?;
                    enqueue()?;
                    if operation != Operation::ToHost {
                        stream.copy(seen.all(), target.all())?;
                    }
                    stream.synchronize()?;
                    let expected = match operation {
                        Operation::Fill => 0x13,
                        Operation::ToDevice => 0x11,
                        Operation::OnDevice | Operation::ToHost if of_source => byte,
                        Operation::OnDevice | Operation::ToHost => 0x12,
                    };
                    let got = seen.read()?;
                    let place = got.iter().position(|&got| got != expected).unwrap_or(0);
                    check!(
                        got[place] == expected,
                        "{operation:?}, made again after {} changed its {}: byte {place} is {:#04x}, expected {expected:#04x}",
                        named,
                        if of_source { "source" } else { "target" },
                        got[place]
                    );
                }
            }
        }
        Ok(())
    })
}

/// The work that changes bytes between two equal operations.
const WAYS: [&str; 6] =
    ["a fill", "a fill of another stream", "a copy to the device", "a copy on the device", "a product", "a launch"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Fill,
    OnDevice,
    ToDevice,
    ToHost,
}
