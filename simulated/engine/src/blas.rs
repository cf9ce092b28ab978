//! The driver's side of the simulated BLAS libraries. They are separate libraries, find the driver by its name, and call
//! [`table()`] through the symbol `highwater_simulated_blas`. The table is plain C, and its codes are those of [`Code`].
//!
//! A launch returns the codes of a real one. An error that the arguments alone reveal fails the call. A fault of the kernel
//! does not: an address of another device loses the contexts of the process (700, or 716 if it is misaligned), and the
//! launch succeeds. An unallocated address is the exception: the real library notices that fault within the call, so the
//! launch returns 700. Operands that a real kernel reaches and the mock's does not return 801: operands in page-locked
//! memory, on another device, or across two mappings.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use highwater_hal::{
    AtomicsMode, DataType, DevicePtr, Epilogue, ErrorKind, GemmShape, MathMode, StridedBatch, Transpose, Workspace,
};
use highwater_mock::{RawProduct, Scale};
use highwater_simulated_blas::table::{self, Product, Table};

use crate::blocks::Place;
use crate::capture_state::node;
use crate::code::{Answer, Code};
use crate::contexts;
use crate::process::{Simulation, simulation};

/// The functions that the driver offers to the BLAS libraries.
pub type BlasTable = Table;

/// An address that a kernel cannot use because of its alignment.
const MISALIGNED_ADDRESS: Code = Code(716);

/// Runs a call of the table. A panic becomes a code.
fn guarded(call: impl FnOnce() -> Answer<()>) -> u32 {
    // Unwind safety: locks and atomics of the engine protect the state that a panicking call leaves half done.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

unsafe extern "C" fn current_device(device: *mut u32) -> u32 {
    guarded(|| {
        let current = contexts::or_runtime_default()?;
        // SAFETY: the caller gives a place for the number, or null.
        *unsafe { device.as_mut() }.ok_or(Code::INVALID_VALUE)? = current;
        Ok(())
    })
}

unsafe extern "C" fn launch(product: *const Product) -> u32 {
    // SAFETY: the caller gives a product, or null.
    guarded(|| enqueue(simulation()?, unsafe { product.as_ref() }.ok_or(Code::INVALID_VALUE)?))
}

fn data_type(number: u32) -> Answer<DataType> {
    match number {
        0 => Ok(DataType::F32),
        1 => Ok(DataType::F64),
        2 => Ok(DataType::F16),
        14 => Ok(DataType::Bf16),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

fn size(value: u64) -> Answer<usize> {
    usize::try_from(value).map_err(|_| Code::INVALID_VALUE)
}

/// Returns the sizes of a product; with `of_d`, those of D in place of C's.
fn shape(product: &Product, of_d: bool) -> Answer<GemmShape> {
    let transpose = |transposed| if transposed == 0 { Transpose::No } else { Transpose::Yes };
    let (ldc, stride_c) = if of_d { (product.ldd, product.stride_d) } else { (product.ldc, product.stride_c) };
    let mut shape = GemmShape::new(data_type(product.input)?, size(product.m)?, size(product.n)?, size(product.k)?)
        .with_output(data_type(product.output)?)
        .with_leading_dimensions(size(product.lda)?, size(product.ldb)?, size(ldc)?);
    (shape.transpose_a, shape.transpose_b) = (transpose(product.transpose_a), transpose(product.transpose_b));
    if product.batched != 0 {
        shape = shape.with_batch(StridedBatch {
            count: size(product.batch)?,
            stride_a: size(product.stride_a)?,
            stride_b: size(product.stride_b)?,
            stride_c: size(stride_c)?,
        });
    }
    shape.extents("launch").map_err(|_| Code::INVALID_VALUE)?;
    Ok(shape)
}

fn epilogue(number: u32) -> Answer<Epilogue> {
    match number {
        1 => Ok(Epilogue::None),
        2 => Ok(Epilogue::Relu),
        4 => Ok(Epilogue::Bias),
        6 => Ok(Epilogue::BiasRelu),
        32 => Ok(Epilogue::Gelu),
        36 => Ok(Epilogue::BiasGelu),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

fn enqueue(simulation: &Simulation, product: &Product) -> Answer<()> {
    let shape_c = shape(product, false)?;
    shape(product, true)?;
    let mut raw =
        RawProduct::new(shape_c, DevicePtr::new(product.a), DevicePtr::new(product.b), DevicePtr::new(product.c));
    raw.bias_type = data_type(product.bias_type)?;
    (raw.d, raw.ldd, raw.stride_d) = (DevicePtr::new(product.d), size(product.ldd)?, size(product.stride_d)?);
    raw.epilogue = epilogue(product.epilogue)?;
    raw.bias = raw.epilogue.has_bias().then(|| DevicePtr::new(product.bias));
    let scale_type = data_type(product.scale_type)?;
    let scale = |bits| match product.device_scales {
        0 => Scale::Value(f64::from_bits(bits)),
        _ => Scale::Device(DevicePtr::new(bits), scale_type),
    };
    (raw.alpha, raw.beta) = (scale(product.alpha), scale(product.beta));
    if product.tf32 != 0 {
        raw.math_mode = MathMode::Tf32;
    }
    if product.atomics != 0 {
        raw.atomics_mode = AtomicsMode::Allowed;
    }
    let stream = simulation.stream(product.stream as u64)?;
    if shape_c.is_empty() {
        return Ok(());
    }
    simulation.before_enqueue(&stream)?;
    if stream.device != product.device {
        // The kernel runs on the stream's device, and finds nothing at the addresses of the handle's device.
        simulation.lose_contexts(Code::ILLEGAL_ADDRESS);
        return Ok(());
    }
    if is_misaligned(product, &raw) {
        simulation.lose_contexts(MISALIGNED_ADDRESS);
        return Ok(());
    }
    let workspace = (product.workspace_bytes > 0)
        .then(|| size(product.workspace_bytes))
        .transpose()?
        .map(|bytes| Workspace { ptr: DevicePtr::new(product.workspace), bytes });
    // SAFETY: the BLAS libraries' callers promise what the mock requires: a broken promise gives unspecified values or loses
    // the contexts.
    let enqueued = unsafe { simulation.gpu.enqueue_product(product.device, stream.id, &raw, workspace) };
    match enqueued {
        Ok(commands) => simulation.note_nodes(&stream, node::KERNEL, commands),
        Err(error) if error.kind() != ErrorKind::InvalidPointer => return Err(simulation.code_of(error)),
        Err(_) if is_reachable(simulation, product, &raw) => return Err(Code::NOT_SUPPORTED),
        Err(_) => {
            let nowhere = is_nowhere(simulation, product, &raw);
            simulation.lose_contexts(Code::ILLEGAL_ADDRESS);
            if nowhere {
                return Err(Code::ILLEGAL_ADDRESS);
            }
        }
    }
    Ok(())
}

/// Returns the ranges that a kernel reads and writes: first address, elements, and bytes of each.
fn operands(raw: &RawProduct) -> Vec<(DevicePtr, usize, usize)> {
    let (input, output) = (raw.shape.data_type.bytes(), raw.shape.output.bytes());
    // The sizes were checked earlier.
    let Ok(extents) = raw.shape.extents("launch") else { return Vec::new() };
    let (last, one) =
        (raw.shape.batch_count().saturating_sub(1), raw.shape.n.saturating_sub(1) * raw.ldd + raw.shape.m);
    let mut operands = vec![(raw.d, last * raw.stride_d + one, output)];
    if raw.alpha != Scale::Value(0.0) && raw.shape.k > 0 {
        operands.extend([(raw.a, extents.a, input), (raw.b, extents.b, input)]);
    }
    if raw.beta != Scale::Value(0.0) {
        operands.push((raw.c, extents.c, output));
    }
    operands.extend(raw.bias.map(|bias| (bias, raw.shape.m, raw.bias_type.bytes())));
    for scale in [raw.alpha, raw.beta] {
        if let Scale::Device(address, data_type) = scale {
            operands.push((address, 1, data_type.bytes()));
        }
    }
    operands
}

/// Returns whether an operand begins outside all device memory and page-locked memory.
fn is_nowhere(simulation: &Simulation, product: &Product, raw: &RawProduct) -> bool {
    let workspace = (product.workspace_bytes > 0).then_some(product.workspace);
    let mut addresses = operands(raw).into_iter().map(|(address, ..)| address.get()).chain(workspace);
    addresses.any(|address| matches!(simulation.piece(address), Ok((Place::Pageable, _)) | Err(_)))
}

/// Returns whether a real kernel of the product's device would reach all of its operands.
fn is_reachable(simulation: &Simulation, product: &Product, raw: &RawProduct) -> bool {
    let peers = simulation.state(product.device).map_or(0, |state| state.peers.load(Ordering::Acquire));
    let reaches = |address: u64, bytes: usize| match simulation.place(address, bytes as u64) {
        Ok(Place::Device(device)) => device == product.device || peers >> device & 1 == 1,
        Ok(Place::Pinned) => simulation.is_of_devices(address),
        Ok(Place::Pageable) | Err(_) => false,
    };
    let workspace = (product.workspace_bytes > 0).then_some((product.workspace, product.workspace_bytes as usize));
    let mut ranges =
        operands(raw).into_iter().map(|(address, count, bytes)| (address.get(), count * bytes)).chain(workspace);
    ranges.all(|(address, bytes)| reaches(address, bytes))
}

/// Returns whether a kernel would access an element whose address is not a multiple of its size.
fn is_misaligned(product: &Product, raw: &RawProduct) -> bool {
    let workspace = product.workspace_bytes > 0 && !product.workspace.is_multiple_of(8);
    workspace || operands(raw).iter().any(|(address, _, bytes)| !address.is_aligned_to(*bytes))
}

static TABLE: BlasTable =
    Table { version: table::VERSION, product_bytes: size_of::<Product>() as u64, current_device, launch };

/// Returns the table.
#[must_use]
pub fn table() -> &'static BlasTable {
    &TABLE
}

const _: () = assert!(size_of::<*mut c_void>() == size_of::<u64>());
