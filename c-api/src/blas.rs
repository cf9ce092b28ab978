//! Products, and raw BLAS handles.

use std::ffi::c_void;

use front::hal::Workspace;
use front::hal::numbers::Coded as _;
use front::half::{bf16, f16};
use front::{DataType, DeviceBuffer, DeviceSlice, Error, GemmShape, Result, Scalar, StridedBatch};

use crate::failure::{call, invalid};
use crate::handle::{self, get, get_field, get_for_checked_call, read};
use crate::memory::highwater_buffer;
use crate::numbers::highwater_status;
use crate::stream::highwater_stream;

/// A product C = alpha * op(A) * op(B) + beta * C of column-major matrices. For row-major matrices, exchange A and B, and m and n.
/// Counts are in elements; offsets are in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct highwater_gemm {
    /// sizeof(highwater_gemm).
    pub size: usize,
    /// The type of the elements of A and B: HIGHWATER_DATA_TYPE_...
    pub data_type: u32,
    /// The type of the elements of C: that of A and B, or 32 bits for A and B of 16 bits.
    pub output_type: u32,
    /// If not 0, op(A) is A transposed.
    pub transpose_a: u32,
    /// If not 0, op(B) is B transposed.
    pub transpose_b: u32,
    /// Rows of op(A) and C.
    pub m: usize,
    /// Columns of op(B) and C.
    pub n: usize,
    /// Columns of op(A) and rows of op(B).
    pub k: usize,
    /// Elements from one column of A to the next; 0 if they are adjacent.
    pub lda: usize,
    /// The same of B.
    pub ldb: usize,
    /// The same of C.
    pub ldc: usize,
    /// Number of products of a batch; 0 is one product.
    pub batch: usize,
    /// Elements from one A of the batch to the next; 0 uses the same A.
    pub stride_a: usize,
    /// The same of B.
    pub stride_b: usize,
    /// Elements from one C of the batch to the next.
    pub stride_c: usize,
    /// The factor of the product. With 0, the default, the product is not computed: set it, for example to 1.
    pub alpha: f64,
    /// The factor of the earlier C. With 0, the earlier C is not read.
    pub beta: f64,
    /// The memory of A.
    pub a: *mut highwater_buffer,
    /// The memory of B.
    pub b: *mut highwater_buffer,
    /// The memory of C.
    pub c: *mut highwater_buffer,
    /// The first byte of A in its memory: a multiple of the size of an element.
    pub offset_a: usize,
    /// The same of B.
    pub offset_b: usize,
    /// The same of C.
    pub offset_c: usize,
}

handle::options! {
    highwater_gemm up to offset_c: usize;
}

fn data_type(code: u32, name: &str) -> Result<DataType> {
    DataType::of(code).ok_or_else(|| {
        invalid(format!("{name} is {code}, expected one of HIGHWATER_DATA_TYPE_..."), "use a constant of the header")
    })
}

fn shape(given: &highwater_gemm) -> Result<GemmShape> {
    let mut shape = GemmShape::new(data_type(given.data_type, "data_type")?, given.m, given.n, given.k);
    shape.output = data_type(given.output_type, "output_type")?;
    if given.transpose_a != 0 {
        shape = shape.with_transposed_a();
    }
    if given.transpose_b != 0 {
        shape = shape.with_transposed_b();
    }
    let or = |given: usize, packed: usize| if given == 0 { packed } else { given };
    shape = shape.with_leading_dimensions(or(given.lda, shape.lda), or(given.ldb, shape.ldb), or(given.ldc, shape.ldc));
    if given.batch != 0 {
        let highwater_gemm { batch: count, stride_a, stride_b, stride_c, .. } = *given;
        shape = shape.with_batch(StridedBatch { count, stride_a, stride_b, stride_c });
    }
    Ok(shape)
}

/// Returns the values of a matrix: those of its memory from its offset on. `fields` names both fields. Bytes behind the last whole value
/// stay out.
///
/// # Safety
/// As for [`get`].
unsafe fn values<'a, T: Scalar>(
    fields: [&str; 2],
    memory: *mut highwater_buffer,
    offset: usize,
) -> Result<DeviceSlice<'a, T>> {
    let [name, offset_name] = fields;
    // SAFETY: As the caller promises.
    let buffer: &'a DeviceBuffer<u8> = unsafe { get_field(memory, name) }?;
    let (bytes, value) = (buffer.len(), size_of::<T>());
    if offset > bytes {
        let message = format!("{offset_name} is {offset}, expected at most {bytes}, the bytes of {name}");
        return Err(invalid(message, "pass an offset inside the memory, in bytes"));
    }
    if !offset.is_multiple_of(value) {
        let message = format!("{offset_name} is {offset}, expected a multiple of {value}");
        return Err(invalid(message, "pass the offset of an element, in bytes"));
    }
    buffer.slice(offset..bytes - (bytes - offset) % value)?.reinterpret()
}

/// Enqueues a product of one pair of types. `R` has the factors, converted from 64 bits.
unsafe fn product<T: Scalar, R: Scalar>(
    stream: *mut highwater_stream,
    given: &highwater_gemm,
    scale: impl Fn(f64) -> R,
) -> Result<()> {
    // SAFETY: The caller of the header's function passes handles.
    let (stream, a, b, c) = unsafe {
        (
            get(stream)?,
            values::<T>(["highwater_gemm.a", "highwater_gemm.offset_a"], given.a, given.offset_a)?,
            values::<T>(["highwater_gemm.b", "highwater_gemm.offset_b"], given.b, given.offset_b)?,
            values::<R>(["highwater_gemm.c", "highwater_gemm.offset_c"], given.c, given.offset_c)?,
        )
    };
    stream.blas()?.gemm_mixed(&shape(given)?, scale(given.alpha), a, b, scale(given.beta), c)
}

/// Returns a closure that lends a vendor's handle to a callback of C. It is compiled into the caller: a call by a `dyn` closure costs
/// another indirect call.
#[inline]
fn lends(callback: highwater_blas_callback, user: *mut c_void) -> Result<impl FnOnce(u64, Option<Workspace>)> {
    let Some(callback) = callback else { return Err(no_callback()) };
    Ok(move |handle, workspace: Option<Workspace>| {
        let (workspace, bytes) = workspace.map_or((0, 0), |workspace| (workspace.ptr.get(), workspace.bytes));
        // SAFETY: The caller promised that the function accepts these, and neither throws nor jumps.
        unsafe { callback(user, handle, workspace, bytes) }
    })
}

#[cold]
fn no_callback() -> Error {
    invalid("the callback is null, expected a function that uses the handle", "pass a function")
}

/// Enqueues a product with a BLAS handle of the pool and the workspace of the stream. Returns without waiting for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_gemm_run(
    stream: *mut highwater_stream,
    gemm: *const highwater_gemm,
) -> highwater_status {
    call!(highwater_gemm_run, {
        let given = read(gemm)?;
        let types = (data_type(given.data_type, "data_type")?, data_type(given.output_type, "output_type")?);
        let narrow = |value: f64| value as f32;
        match types {
            (DataType::F32, DataType::F32) => product::<f32, f32>(stream, &given, narrow),
            (DataType::F64, DataType::F64) => product::<f64, f64>(stream, &given, |value| value),
            (DataType::F16, DataType::F16) => product::<f16, f16>(stream, &given, f16::from_f64),
            (DataType::Bf16, DataType::Bf16) => product::<bf16, bf16>(stream, &given, bf16::from_f64),
            (DataType::F16, DataType::F32) => product::<f16, f32>(stream, &given, narrow),
            (DataType::Bf16, DataType::F32) => product::<bf16, f32>(stream, &given, narrow),
            (factors, output) => Err(invalid(
                format!("factors of {factors:?} give no result of {output:?}"),
                "use one type for all, or 32 bits for the result of 16-bit factors",
            )),
        }
    })
}

/// Leases a BLAS handle of the pool and lends the vendor's handle to the callback: cublasHandle_t or hipblasHandle_t as a number.
/// It is bound to the stream and to a workspace of its own. The callback enqueues its work. It must not destroy the handle, throw or
/// jump. The call then restores every setting of the handle. The handle of the mock is only a number: no library accepts it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_blas_lend(
    stream: *mut highwater_stream,
    callback: highwater_blas_callback,
    user: *mut c_void,
) -> highwater_status {
    call!(highwater_blas_lend, {
        let stream = get(stream)?;
        let foreign = lends(callback, user)?;
        stream.blas()?.with_raw(|raw| foreign(raw.handle, raw.workspace))
    })
}

/// As highwater_blas_lend, for code that only enqueues, such as cublasSgemm. Restores nothing afterward, so a repetition makes no call of
/// the vendor. The handle is bound to the stream's own workspace, and the workspace of the callback is 0.
///
/// The callback must not change a setting of the handle, and must not destroy or keep it. It must enqueue its work on this stream only. It
/// must call no function of this library, because the call holds the submission lock of the stream. A function that uses the stream, or
/// memory that the stream has used, would block forever. So would two threads that use each other's streams. It must not throw or jump.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_blas_enqueue(
    stream: *mut highwater_stream,
    callback: highwater_blas_callback,
    user: *mut c_void,
) -> highwater_status {
    call!(highwater_blas_enqueue, {
        let stream = get_for_checked_call(stream)?;
        let foreign = lends(callback, user)?;
        stream.blas()?.enqueue_raw(|handle| foreign(handle, None))
    })
}

/// As highwater_blas_lend, for an Lt handle: cublasLtHandle_t or hipblasLtHandle_t as a number. The callback passes the workspace to each call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_blas_lt_lend(
    stream: *mut highwater_stream,
    callback: highwater_blas_callback,
    user: *mut c_void,
) -> highwater_status {
    call!(highwater_blas_lt_lend, {
        let stream = get(stream)?;
        let foreign = lends(callback, user)?;
        stream.lt()?.with_raw(|raw| foreign(raw.handle, raw.workspace))
    })
}

/// Uses the vendor's handle. The workspace is a device address; it is 0 if the handle uses memory of its own.
pub type highwater_blas_callback =
    Option<unsafe extern "C" fn(user: *mut c_void, handle: u64, workspace: u64, workspace_bytes: usize)>;
