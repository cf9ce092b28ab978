//! BLAS handles: the stream and the workspace that they are bound to, and repeatable results.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use highwater_hal::{
    AtomicsMode, Backend, BlasKind, BlasOptions, DataType, DevicePtr, Epilogue, ErrorKind, GemmShape, MathMode, PlanId,
    PlanOptions, Workspace,
};

use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Block, DEVICE, Event, Handle, Pinned, Stream};
use crate::matrix::{GUARD_BYTES, Placed, Product, Types};
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "blas";
    products_run_in_the_order_of_the_stream: ["blas.stream-bound"] needs [has::gemm_f32];
    products_follow_the_handle_to_another_stream: ["blas.stream-bound"] needs [has::gemm_f32, lacks::handle_per_stream];
    products_need_a_bound_stream: ["blas.unbound"] needs [has::gemm_f32];
    streams_of_another_device_are_refused: ["blas.stream-device"] needs [TWO_DEVICES];
    products_stay_inside_the_workspace: ["blas.workspace-used", "gemm.value"] needs [has::gemm_f32, has::blas_workspace];
    products_larger_than_the_workspace_are_right: ["blas.workspace-used", "gemm.value"]
        needs [has::gemm_f32, has::blas_workspace];
    handles_on_two_streams_keep_to_their_workspaces: ["blas.workspace-used", "backend.concurrent"]
        needs [has::gemm_f32, has::blas_workspace];
    a_replaced_workspace_is_left_alone: ["blas.workspace-used"] needs [has::gemm_f32, has::blas_workspace];
    an_unbound_workspace_is_left_alone: ["blas.workspace-used"] needs [has::gemm_f32, has::blas_workspace];
    modes_survive_another_stream: ["blas.stream-resets-workspace", "blas.deterministic"]
        needs [has::gemm_f32, lacks::handle_per_stream];
    handles_are_of_the_kind_asked_for: ["blas.kind"];
    binding_a_stream_unbinds_the_workspace: ["blas.stream-resets-workspace"]
        needs [has::gemm_f32, has::blas_workspace, has::set_stream_resets_workspace];
    misaligned_workspaces_are_refused: ["blas.workspace-alignment"] needs [has::blas_workspace];
    refused_workspaces_leave_the_bound_one: ["blas.workspace-alignment"] needs [has::gemm_f32, has::blas_workspace];
    equal_calls_give_equal_bits: ["blas.deterministic"] needs [has::gemm_f32] => equal_bits(Types::F32);
    equal_calls_give_equal_bits_f64: ["blas.deterministic"] needs [has::gemm_f64] => equal_bits(Types::F64);
    equal_calls_give_equal_bits_f16: ["blas.deterministic"] needs [has::gemm_f16] => equal_bits(Types::F16);
    equal_calls_give_equal_bits_bf16: ["blas.deterministic"] needs [has::gemm_bf16] => equal_bits(Types::BF16);
    equal_calls_give_equal_bits_bf16_to_f32: ["blas.deterministic", "gemm.mixed"]
        needs [has::gemm_bf16, has::gemm_mixed] => equal_bits(Types::BF16_TO_F32);
    equal_calls_give_equal_bits_after_atomics: ["blas.deterministic"] needs [has::gemm_f32, has::atomics_mode];
    settings_are_those_of_a_fresh_handle_after_a_reset: ["blas.reset"] needs [has::gemm_f32];
    tf32_products_are_close: ["gemm.value"] needs [has::gemm_f32, has::tf32];
    creation_delays_nobody: ["blas.create-concurrent"];
}

/// Returns the kinds of handle that the device has.
pub(super) fn kinds(backend: &dyn Backend) -> highwater_hal::Result<&'static [BlasKind]> {
    Ok(if backend.capabilities(DEVICE)?.lt_plans { &[BlasKind::Blas, BlasKind::Lt] } else { &[BlasKind::Blas] })
}

/// Returns a workspace size: the size that the device prefers, limited to what a case should use.
fn workspace_bytes(backend: &dyn Backend) -> Result<usize, Failure> {
    Ok(backend.capabilities(DEVICE)?.blas_workspace_bytes.clamp(1 << 20, 4 << 20))
}

fn products_run_in_the_order_of_the_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    let product = Product::new(GemmShape::new(DataType::F32, 40, 50, 60), 1);
    let (right, wrong) = (product.place(backend)?, product.place(backend)?);
    let copied = Block::filled(backend, right.c.bytes(), 0)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    right.gemm(&product, &mut handle)?;
    stream.synchronize()?;
    right.check(&product)?;
    until_conclusive("a product waits for the work before it", |load| {
        // A is wrong until the stream has worked for a while, and wrong again right after the product.
        stream.set(wrong.a.all(), 0)?;
        stream.set(wrong.c.all(), 0)?;
        busy.enqueue(&stream, load)?;
        stream.copy(wrong.a.all(), right.a.all())?;
        wrong.gemm(&product, &mut handle)?;
        stream.set(wrong.a.all(), 0)?;
        stream.copy(copied.all(), wrong.c.all())?;
        stream.set(wrong.c.all(), 0)?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        let (got, expected) = (copied.read()?, right.c.read()?);
        // Zeros overwrote the guards around the copied C above; the elements lie between them.
        let elements = GUARD_BYTES..got.len() - GUARD_BYTES;
        check!(
            got[elements.clone()] == expected[elements],
            "a product did not run between the copy that makes its input and the fill that spoils it"
        );
        Ok(Attempt::seen(pending))
    })
}

fn products_follow_the_handle_to_another_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (occupied, free) = (Stream::new(backend)?, Stream::new(backend)?);
    let product = Product::new(GemmShape::new(DataType::F32, 40, 50, 60), 2);
    let mut handle = Handle::new(backend, BlasKind::Blas, &occupied)?;
    product.prove(backend, &mut handle, &occupied)?;
    until_conclusive("a product waits for a stream that its handle was bound to before", |load| {
        let placed = product.place(backend)?;
        let copied = Block::filled(backend, placed.c.bytes(), 0)?;
        handle.set_stream(&occupied)?;
        busy.enqueue(&occupied, load)?;
        handle.set_stream(&free)?;
        placed.gemm(&product, &mut handle)?;
        // Follows the product if that runs on the bound stream.
        free.copy(copied.all(), placed.c.all())?;
        free.synchronize()?;
        let outstanding = occupied.is_pending()?;
        occupied.synchronize()?;
        placed.check(&product)?;
        let same = copied.read()? == placed.c.read()?;
        check!(same, "a product did not run on the stream that its handle was bound to last");
        Ok(Attempt::seen(outstanding))
    })
}

fn streams_of_another_device_are_refused(backend: &dyn Backend) -> CaseResult {
    let (own, other) = (Stream::on(backend, 0)?, Stream::on(backend, 1)?);
    let mut handle = Handle::new(backend, BlasKind::Blas, &own)?;
    check_error!(handle.raw_mut().set_stream(other.id()), WrongDevice, "set_stream to a stream of another device");
    let mut handle = Handle::new(backend, BlasKind::Blas, &other)?;
    check_error!(handle.raw_mut().set_stream(own.id()), WrongDevice, "set_stream to a stream of another device");
    Ok(())
}

/// Shapes whose products may take several paths through a library.
fn shapes() -> impl Iterator<Item = GemmShape> {
    let sizes = [(1, 1, 1), (16, 16, 16), (33, 65, 17), (8, 8, 3000), (150, 140, 90)];
    sizes.into_iter().map(|(m, n, k)| GemmShape::new(DataType::F32, m, n, k))
}

fn products_stay_inside_the_workspace(backend: &dyn Backend) -> CaseResult {
    const MARGIN: usize = 1 << 16;
    let bytes = workspace_bytes(backend)?;
    let memory = Block::filled(backend, MARGIN + bytes + MARGIN, 0xa5)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.set_workspace(&memory, MARGIN..MARGIN + bytes)?;
    for (seed, shape) in shapes().enumerate() {
        // Checks C, and that A, B and the bytes around all three are unchanged.
        Product::new(shape, seed as u64).with_scale(1.5, 0.5).prove(backend, &mut handle, &stream)?;
    }
    let got = memory.read()?;
    let margins = got[..MARGIN].iter().chain(&got[MARGIN + bytes..]);
    check!(margins.into_iter().all(|&byte| byte == 0xa5), "products wrote beside the workspace that is bound");
    Ok(())
}

fn products_larger_than_the_workspace_are_right(backend: &dyn Backend) -> CaseResult {
    // The smallest workspace with which cuBLAS promises not to fail (its manual, `cublasSetWorkspace`).
    const SMALLEST: usize = 16 << 10;
    let alignment = backend.capabilities(DEVICE)?.workspace_alignment;
    let bytes = SMALLEST.next_multiple_of(alignment);
    let memory = Block::filled(backend, alignment + bytes + 4096, 0xa5)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let start = (memory.ptr().get().next_multiple_of(alignment as u64) - memory.ptr().get()) as usize;
    handle.set_workspace(&memory, start..start + bytes)?;
    for shape in [GemmShape::new(DataType::F32, 150, 140, 90), GemmShape::new(DataType::F32, 20, 1, 5000)] {
        Product::new(shape, 3).with_scale(1.0, 1.0).prove(backend, &mut handle, &stream)?;
    }
    let got = memory.read()?;
    let beside = got[..start].iter().chain(&got[start + bytes..]);
    check!(
        beside.into_iter().all(|&byte| byte == 0xa5),
        "products wrote beside a workspace that is too small for them"
    );
    Ok(())
}

fn handles_on_two_streams_keep_to_their_workspaces(backend: &dyn Backend) -> CaseResult {
    let bytes = workspace_bytes(backend)?;
    let (left_memory, right_memory) = (Block::filled(backend, bytes, 0)?, Block::filled(backend, bytes, 0)?);
    let (left_stream, right_stream) = (Stream::new(backend)?, Stream::new(backend)?);
    let mut left = Handle::new(backend, BlasKind::Blas, &left_stream)?;
    let mut right = Handle::new(backend, BlasKind::Blas, &right_stream)?;
    left.set_workspace(&left_memory, 0..bytes)?;
    right.set_workspace(&right_memory, 0..bytes)?;
    let product = |seed| Product::new(GemmShape::new(DataType::F32, 61, 53, 70), seed);
    // One after the other: neither product touches the other's workspace.
    for (handle, stream, other) in [(&mut left, &left_stream, &right_memory), (&mut right, &right_stream, &left_memory)]
    {
        stream.set(other.all(), 0x4e)?;
        for (seed, shape) in shapes().enumerate() {
            Product::new(shape, seed as u64).prove(backend, handle, stream)?;
        }
        let untouched = other.read()?.iter().all(|&byte| byte == 0x4e);
        check!(untouched, "products wrote to the workspace of another handle than theirs");
    }
    let products: Vec<_> = (0..8).map(product).collect();
    let placed = products.iter().map(|product| product.place(backend)).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..5 {
        for (product, pair) in products.chunks_exact(2).zip(placed.chunks_exact(2)) {
            pair[0].gemm(&product[0], &mut left)?;
            pair[1].gemm(&product[1], &mut right)?;
        }
    }
    left_stream.synchronize()?;
    right_stream.synchronize()?;
    products.iter().zip(&placed).try_for_each(|(product, placed)| placed.check(product))
}

fn a_replaced_workspace_is_left_alone(backend: &dyn Backend) -> CaseResult {
    let bytes = workspace_bytes(backend)?;
    let (old, new) = (Block::filled(backend, bytes, 0)?, Block::new(backend, bytes)?);
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.set_workspace(&old, 0..bytes)?;
    Product::new(GemmShape::new(DataType::F32, 64, 64, 64), 4).prove(backend, &mut handle, &stream)?;
    handle.set_workspace(&new, 0..bytes)?;
    stream.set(old.all(), 0x5a)?;
    for (seed, shape) in shapes().enumerate() {
        Product::new(shape, seed as u64).prove(backend, &mut handle, &stream)?;
    }
    check!(old.read()?.iter().all(|&byte| byte == 0x5a), "products wrote to a workspace that was replaced");
    Ok(())
}

fn an_unbound_workspace_is_left_alone(backend: &dyn Backend) -> CaseResult {
    let bytes = workspace_bytes(backend)?;
    let memory = Block::filled(backend, bytes, 0)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.set_workspace(&memory, 0..bytes)?;
    Product::new(GemmShape::new(DataType::F32, 64, 64, 64), 4).prove(backend, &mut handle, &stream)?;
    // SAFETY: binds no memory of the caller's.
    unsafe { handle.raw_mut().set_workspace(None)? };
    stream.set(memory.all(), 0x69)?;
    for (seed, shape) in shapes().enumerate() {
        Product::new(shape, seed as u64).prove(backend, &mut handle, &stream)?;
    }
    let untouched = memory.read()?.iter().all(|&byte| byte == 0x69);
    check!(untouched, "products wrote to a workspace after the handle was put back on its own");
    Ok(())
}

/// Sets every mode to another value and back to its default. A handle that loses a mode when a stream is bound shows it in
/// the bits of products.
fn modes_survive_another_stream(backend: &dyn Backend) -> CaseResult {
    let capabilities = backend.capabilities(DEVICE)?;
    let streams = [Stream::new(backend)?, Stream::new(backend)?];
    let mut handle = Handle::new(backend, BlasKind::Blas, &streams[0])?;
    if capabilities.tf32 {
        handle.raw_mut().set_math_mode(MathMode::Tf32)?;
    }
    handle.raw_mut().set_math_mode(MathMode::Default)?;
    if capabilities.atomics_mode {
        handle.raw_mut().set_atomics_mode(AtomicsMode::Allowed)?;
    }
    handle.raw_mut().set_atomics_mode(AtomicsMode::NotAllowed)?;
    let product = Product::new(GemmShape::new(DataType::F32, 8, 8, 3000), 8);
    let mut first: Option<Vec<u8>> = None;
    for round in 0..8 {
        let stream = &streams[round % 2];
        handle.set_stream(stream)?;
        let placed = product.place(backend)?;
        placed.gemm(&product, &mut handle)?;
        stream.synchronize()?;
        placed.check(&product)?;
        let got = placed.bytes_of_c()?;
        let same = first.get_or_insert_with(|| got.clone()) == &got;
        check!(same, "without atomics, the product after {round} changes of the stream has other bits than the first");
    }
    Ok(())
}

fn settings_are_those_of_a_fresh_handle_after_a_reset(backend: &dyn Backend) -> CaseResult {
    (0..backend.device_count().min(2)).try_for_each(|device| reset_on(backend, device))
}

/// A backend may return `Unsupported`. The handle is then unchanged.
fn reset_on(backend: &dyn Backend, device: u32) -> CaseResult {
    let capabilities = backend.capabilities(device)?;
    let bytes = workspace_bytes(backend)?;
    let memory = Block::filled_on(backend, device, bytes, 0)?;
    let streams = [Stream::on(backend, device)?, Stream::on(backend, device)?];
    let per_stream = capabilities.handle_per_stream;
    let mut handle = Handle::new(backend, BlasKind::Blas, &streams[0])?;
    let mut round = |index: usize| -> Result<bool, Failure> {
        let stream = &streams[if per_stream { 0 } else { index % 2 }];
        handle.set_stream(stream)?;
        if capabilities.tf32 {
            handle.raw_mut().set_math_mode(MathMode::Tf32)?;
        }
        if capabilities.atomics_mode {
            handle.raw_mut().set_atomics_mode(AtomicsMode::Allowed)?;
        }
        handle.offer_workspace(&memory, 0..bytes)?;
        match handle.raw_mut().reset() {
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(false),
            reset => reset?,
        }
        handle.set_stream(stream)?;
        stream.set(memory.all(), 0x5b)?;
        for (seed, shape) in shapes().enumerate() {
            Product::new(shape, seed as u64).with_scale(1.5, 0.5).prove(backend, &mut handle, stream)?;
        }
        let untouched = memory.read()?.iter().all(|&byte| byte == 0x5b);
        check!(untouched, "products wrote to a workspace that was bound before the handle was reset");
        Ok(true)
    };
    for index in 0..3 {
        if !round(index)? {
            return Ok(());
        }
    }
    // The same in another thread than the one that made the handle.
    let done = std::thread::scope(|scope| scope.spawn(|| round(3)).join());
    done.map_err(|_| Failure::new("a thread panicked"))?.map(drop)
}

fn products_need_a_bound_stream(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let product = Product::new(GemmShape::new(DataType::F32, 12, 14, 16), 1);
    let placed = product.place(backend)?;
    let before = placed.bytes_of_c()?;
    // A fresh handle has nothing of one that was destroyed.
    Handle::new(backend, BlasKind::Blas, &stream)?.raw_mut().destroy()?;
    let mut handle = Handle::unbound(backend, BlasKind::Blas, DEVICE)?;
    check_error!(placed.gemm(&product, &mut handle), InvalidState, "a product on a handle that is bound to no stream");
    backend.synchronize_device(DEVICE)?;
    check!(placed.bytes_of_c()? == before, "a product that was refused changed C");
    handle.set_stream(&stream)?;
    placed.gemm(&product, &mut handle)?;
    stream.synchronize()?;
    placed.check(&product)
}

fn handles_are_of_the_kind_asked_for(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        for &kind in kinds(backend)? {
            let handle = backend.create_blas_handle(device, &BlasOptions::new(kind))?;
            check_eq!((handle.kind(), handle.device()), (kind, device), "kind and device of a new handle");
        }
    }
    Ok(())
}

fn binding_a_stream_unbinds_the_workspace(backend: &dyn Backend) -> CaseResult {
    let bytes = workspace_bytes(backend)?;
    let memory = Block::filled(backend, bytes, 0)?;
    let (stream, other) = (Stream::new(backend)?, Stream::new(backend)?);
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for next in [&stream, &other] {
        handle.set_workspace(&memory, 0..bytes)?;
        handle.set_stream(next)?;
        next.set(memory.all(), 0x77)?;
        for (seed, shape) in shapes().enumerate() {
            Product::new(shape, seed as u64).prove(backend, &mut handle, next)?;
        }
        let untouched = memory.read()?.iter().all(|&byte| byte == 0x77);
        check!(untouched, "a workspace is still used after a stream was bound, which should have unbound it");
    }
    Ok(())
}

fn misaligned_workspaces_are_refused(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let alignment = backend.capabilities(device)?.workspace_alignment;
        let memory = Block::on(backend, device, 1 << 20)?;
        let stream = Stream::on(backend, device)?;
        let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
        let aligned = memory.ptr().get().next_multiple_of(alignment as u64);
        let mut refuses = || -> CaseResult {
            let last = alignment as u64 - 1;
            for off in [1, 8, alignment as u64 / 2, last].into_iter().filter(|off| off % alignment as u64 != 0) {
                for bytes in [4096, 1, 0] {
                    let workspace = Workspace { ptr: DevicePtr::new(aligned + off), bytes };
                    // SAFETY: inside `memory`, which lives longer than the handle; no product is enqueued.
                    let bound = unsafe { handle.raw_mut().set_workspace(Some(workspace)) };
                    check_error!(
                        bound,
                        InvalidArgument,
                        "a workspace of {bytes} bytes, {off} past an address aligned to {alignment}"
                    );
                }
            }
            Ok(())
        };
        refuses()?;
        // Also in another thread than the one that made the handle.
        std::thread::scope(|scope| scope.spawn(refuses).join()).map_err(|_| Failure::new("a thread panicked"))??;
    }
    Ok(())
}

/// A product need not use a workspace. If an equal one has used it, so does this one after a refused binding.
fn refused_workspaces_leave_the_bound_one(backend: &dyn Backend) -> CaseResult {
    const BOUND_BYTES: usize = 1 << 20;
    let (stream, bound) = (Stream::new(backend)?, Block::new(backend, BOUND_BYTES)?);
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.set_workspace(&bound, 0..BOUND_BYTES)?;
    for (m, n, k) in [(4, 4, 5000), (128, 128, 128)] {
        let product = Product::new(Types::F32.shape(m, n, k), 1);
        let uses = |handle: &mut Handle<'_>| -> Result<bool, Failure> {
            stream.set(bound.all(), 0x5d)?;
            product.prove(backend, handle, &stream)?;
            Ok(bound.read()? != [0x5d; BOUND_BYTES])
        };
        let has_used = uses(&mut handle)?;
        let misaligned = Workspace { ptr: bound.ptr().offset(1), bytes: 4096 };
        // SAFETY: inside `bound`, which lives longer than the handle. A backend that binds it all the same uses bytes of `bound` only.
        let refused = unsafe { handle.raw_mut().set_workspace(Some(misaligned)) };
        check_error!(refused, InvalidArgument, "a workspace 1 byte past an aligned address");
        check_eq!(uses(&mut handle)?, has_used, "whether a product uses its workspace after another one was refused");
    }
    Ok(())
}

fn equal_bits(backend: &dyn Backend, types: Types) -> CaseResult {
    let bytes = workspace_bytes(backend)?;
    let memory = Block::new(backend, bytes)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.raw_mut().set_atomics_mode(AtomicsMode::NotAllowed)?;
    handle.offer_workspace(&memory, 0..bytes)?;
    for (m, n, k) in [(16, 16, 16), (8, 8, 3000), (100, 90, 80)] {
        let product = Product::new(types.shape(m, n, k), 5).with_scale(0.9, 0.1);
        let mut first: Option<Vec<u8>> = None;
        for round in 0..4 {
            let placed = product.place(backend)?;
            placed.gemm(&product, &mut handle)?;
            stream.synchronize()?;
            let got = placed.bytes_of_c()?;
            let same = first.get_or_insert_with(|| got.clone()) == &got;
            check!(same, "call {round} of {m}x{n}x{k} gave other bits than the first");
        }
    }
    Ok(())
}

fn equal_calls_give_equal_bits_after_atomics(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let product = Product::new(GemmShape::new(DataType::F32, 8, 8, 3000), 7);
    let mut repeatable: Vec<Vec<u8>> = Vec::new();
    for mode in [AtomicsMode::NotAllowed, AtomicsMode::Allowed, AtomicsMode::NotAllowed] {
        handle.raw_mut().set_atomics_mode(mode)?;
        for _ in 0..3 {
            let placed = product.place(backend)?;
            placed.gemm(&product, &mut handle)?;
            stream.synchronize()?;
            // The result is right in every mode, and bitwise equal in one.
            placed.check(&product)?;
            if mode == AtomicsMode::NotAllowed {
                repeatable.push(placed.bytes_of_c()?);
            }
        }
    }
    // The mode of another handle concerns that one alone.
    let mut other = Handle::new(backend, BlasKind::Blas, &stream)?;
    other.raw_mut().set_atomics_mode(AtomicsMode::Allowed)?;
    for _ in 0..3 {
        let placed = product.place(backend)?;
        placed.gemm(&product, &mut handle)?;
        stream.synchronize()?;
        repeatable.push(placed.bytes_of_c()?);
    }
    let same = repeatable.windows(2).all(|pair| pair[0] == pair[1]);
    check!(
        same,
        "equal calls without atomics gave other bits before and after the handle, or another, was allowed atomics"
    );
    Ok(())
}

fn tf32_products_are_close(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.raw_mut().set_math_mode(MathMode::Tf32)?;
    let shape = GemmShape::new(DataType::F32, 64, 64, 64);
    Product::new(shape, 6).with_tf32().prove(backend, &mut handle, &stream)?;
    // In the default mode, every bit counts again.
    handle.raw_mut().set_math_mode(MathMode::Default)?;
    Product::new(shape, 6).prove(backend, &mut handle, &stream)
}

/// The begin and the end of an action.
type Span = (Instant, Instant);

/// The times of one kind of call.
type Calls = (&'static str, Vec<Span>);

/// A call that no creation of a handle may delay.
type Act<'c> = (&'static str, Box<dyn Fn() -> highwater_hal::Result<()> + 'c>);

/// The objects that calls beside creations use.
struct Beside<'b> {
    backend: &'b dyn Backend,
    stream: Stream<'b>,
    event: Event<'b>,
    blocks: [Block<'b>; 2],
    /// On another device, if the device copies to others.
    far: Option<Block<'b>>,
    pinned: Pinned<'b>,
    multiplications: Vec<Multiplication<'b>>,
}

/// A product of a handle that was made before.
struct Multiplication<'b> {
    what: &'static str,
    handle: RefCell<Handle<'b>>,
    plan: Option<PlanId>,
    placed: Placed<'b>,
}

impl<'b> Multiplication<'b> {
    fn new(backend: &'b dyn Backend, kind: BlasKind, stream: &Stream<'_>) -> Result<Self, Failure> {
        let product = Self::product();
        let mut handle = Handle::new(backend, kind, stream)?;
        let plan = match kind {
            BlasKind::Lt => Some(handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?),
            _ => None,
        };
        let what = if plan.is_some() { "a run of a plan" } else { "a product" };
        let new = Self { what, handle: RefCell::new(handle), plan, placed: product.place(backend)? };
        // The first one loads code.
        new.enqueue()?;
        stream.synchronize()?;
        new.placed.check(&product)?;
        Ok(new)
    }

    fn product() -> Product {
        Product::new(GemmShape::new(DataType::F32, 8, 8, 8), 9)
    }

    fn enqueue(&self) -> highwater_hal::Result<()> {
        let (product, mut handle) = (Self::product(), self.handle.borrow_mut());
        match self.plan {
            Some(plan) => handle.run_plan(plan, &product.shape, (1.0, 0.0), self.placed.operands(), None, None),
            None => self.placed.gemm(&product, &mut handle),
        }
    }
}

impl<'b> Beside<'b> {
    const BYTES: usize = 4096;

    fn new(backend: &'b dyn Backend) -> Result<Self, Failure> {
        let can = backend.capabilities(DEVICE)?;
        let has_far = backend.device_count() > 1 && can.peer_copy;
        let stream = Stream::new(backend)?;
        let kinds = kinds(backend)?.iter().filter(|_| can.gemm_f32);
        let multiplications =
            kinds.map(|&kind| Multiplication::new(backend, kind, &stream)).collect::<Result<_, _>>()?;
        Ok(Self {
            backend,
            multiplications,
            stream,
            event: Event::new(backend)?,
            blocks: [Block::new(backend, Self::BYTES)?, Block::new(backend, Self::BYTES)?],
            far: if has_far { Some(Block::on(backend, 1, Self::BYTES)?) } else { None },
            pinned: Pinned::new(backend, Self::BYTES)?,
        })
    }

    fn acts(&self) -> Vec<Act<'_>> {
        let Self { backend, stream, event, blocks: [block, other], far, pinned, multiplications } = self;
        let mut acts: Vec<Act<'_>> = vec![
            ("a fill", Box::new(|| stream.set(block.all(), 1))),
            ("a copy to the device", Box::new(|| stream.copy(block.all(), pinned.all()))),
            ("a copy to the host", Box::new(|| stream.copy(pinned.all(), block.all()))),
            ("a copy on the device", Box::new(|| stream.copy(other.all(), block.all()))),
            ("a record", Box::new(|| stream.record(event))),
            ("a wait of the stream", Box::new(|| stream.wait(event))),
            ("a query of the stream", Box::new(|| stream.query().map(drop))),
            ("a query of the event", Box::new(|| event.query().map(drop))),
            ("a wait for the event", Box::new(|| event.synchronize())),
            ("a wait for the stream", Box::new(|| stream.synchronize())),
            ("memory of the device", Box::new(|| Block::new(*backend, Self::BYTES).map(drop))),
            ("memory of the host", Box::new(|| Pinned::new(*backend, Self::BYTES).map(drop))),
            ("another stream", Box::new(|| Stream::new(*backend).map(drop))),
            ("another event", Box::new(|| Event::new(*backend).map(drop))),
        ];
        for multiplication in multiplications {
            acts.push((multiplication.what, Box::new(|| multiplication.enqueue())));
        }
        if let Some(far) = far {
            acts.push(("a copy to another device", Box::new(|| stream.copy(far.all(), block.all()))));
            acts.push(("a copy from another device", Box::new(|| stream.copy(block.all(), far.all()))));
        }
        acts
    }
}

/// Creates handles in one thread while another makes calls. Returns the times of the creations, and those of each kind of call.
fn create_beside_calls(backend: &dyn Backend, creations: usize) -> Result<(Vec<Span>, Vec<Calls>), Failure> {
    let beside = Beside::new(backend)?;
    let acts = beside.acts();
    std::thread::scope(|scope| {
        let creator = scope.spawn(|| -> highwater_hal::Result<Vec<Span>> {
            (0..creations)
                .map(|_| {
                    let started = Instant::now();
                    let handle = backend.create_blas_handle(DEVICE, &BlasOptions::new(BlasKind::Blas))?;
                    let created = Instant::now();
                    drop(handle);
                    Ok((started, created))
                })
                .collect()
        });
        let mut calls: Vec<Calls> = acts.iter().map(|(what, _)| (*what, Vec::new())).collect();
        while !creator.is_finished() {
            for ((_, act), (_, spans)) in acts.iter().zip(&mut calls) {
                let started = Instant::now();
                act()?;
                spans.push((started, Instant::now()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let creations = creator.join().map_err(|_| Failure::new("creating a handle panicked"))??;
        Ok((creations, calls))
    })
}

/// The evidence of the calls about creations that took long.
#[derive(Debug, Default, PartialEq, Eq)]
struct Delays {
    /// A call began and ended during the creation.
    none: usize,
    /// A call was in progress at the end of the creation, and no call had completed.
    some: Vec<Duration>,
    /// No call was made, because the calling thread did not run.
    unknown: usize,
}

impl Delays {
    /// A shorter creation cannot delay a call by more than this.
    const LONG: Duration = Duration::from_millis(20);

    fn of(creations: &[Span], calls: &[Span]) -> Self {
        let mut delays = Self::default();
        for &(begin, end) in creations.iter().filter(|(begin, end)| *end - *begin >= Self::LONG) {
            if calls.iter().any(|&(started, ended)| started > begin && ended < end) {
                delays.none += 1;
            } else if calls.iter().any(|&(started, ended)| started < end && ended >= end) {
                delays.some.push(end - begin);
            } else {
                delays.unknown += 1;
            }
        }
        delays
    }

    /// Returns whether the calls prove that no creation delayed them. A few creations without evidence are acceptable.
    fn acquit(&self) -> bool {
        self.some.is_empty() && self.none >= self.unknown
    }
}

fn creation_delays_nobody(backend: &dyn Backend) -> CaseResult {
    const CREATIONS: usize = 12;
    let mut delayed = None;
    // The machine may have preempted a call that was in progress, so one such call proves nothing. One in each attempt does.
    let outcome = until_conclusive("making a handle delays calls of another thread", |_| {
        let (creations, calls) = create_beside_calls(backend, CREATIONS)?;
        check_eq!(creations.len(), CREATIONS, "handles made");
        let seen = calls.iter().map(|(what, spans)| (*what, Delays::of(&creations, spans)));
        let guilty: Vec<_> = seen.filter(|(_, delays)| !delays.acquit()).collect();
        // A call that was held names the cause. Others may only have had no processor meanwhile.
        delayed = guilty.iter().find_map(|(what, delays)| delays.some.iter().max().map(|longest| (*what, *longest)));
        Ok(Attempt::seen(guilty.is_empty()))
    });
    outcome.map_err(|failure| match delayed {
        Some((what, longest)) => {
            Failure::new(format!("{what} did not get through while a handle was made for {longest:?}"))
        }
        None => failure,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_get_through_acquit_and_calls_that_are_held_do_not() {
        let origin = Instant::now();
        let span = |from, to| (origin + Duration::from_millis(from), origin + Duration::from_millis(to));
        let creations = [span(0, 10), span(10, 50), span(50, 90)];
        let through = Delays::of(&creations, &[span(12, 13), span(60, 61)]);
        assert_eq!(through, Delays { none: 2, some: vec![], unknown: 0 });
        assert!(through.acquit());
        // Held until the end of the first long creation, and during the second.
        let held = Delays::of(&creations, &[span(12, 51), span(52, 95)]);
        assert_eq!(held.some, [Duration::from_millis(40); 2]);
        assert!(!held.acquit());
        // The thread slept during the second.
        let slept = Delays::of(&creations, &[span(12, 13), span(91, 92)]);
        assert_eq!(slept, Delays { none: 1, some: vec![], unknown: 1 });
        assert!(slept.acquit());
        assert!(!Delays::of(&creations, &[]).acquit());
    }
}
