//! DLPack, version 1 and the format before it: tensors of this package for other libraries, and theirs for this package.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use highwater::hal::{DevicePtr, RangeKind};
use highwater::{Access, ErrorKind};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::arrays::count;
use crate::dtype::DType;
use crate::error::{invalid, raised, unsupported};
use crate::memory::{Memory, make_values, with_values};
use crate::stream::{Queue, StreamOf};

/// Kinds of devices.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const ROCM: i32 = 10;

const PLAIN: &CStr = c"dltensor";
const USED_PLAIN: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";
/// The flag that the memory must not be written.
const READ_ONLY: u64 = 1;

#[repr(C)]
struct Type {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    kind: i32,
    ordinal: i32,
    dimensions: i32,
    dtype: Type,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Plain {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A tensor that leaves this package.
pub(crate) struct Export {
    pub(crate) address: u64,
    pub(crate) device: (i32, u32),
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) keeps: Box<dyn Any + Send + Sync>,
}

/// What a tensor points to until its deleter is called.
struct Kept {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _keeps: Box<dyn Any + Send + Sync>,
}

impl Export {
    /// Returns the capsule of the newest format that the consumer knows.
    pub(crate) fn into_capsule(self, py: Python<'_>, newest: Option<(u32, u32)>) -> PyResult<Bound<'_, PyAny>> {
        let shape: Vec<i64> = self.shape.iter().map(|&length| length as i64).collect();
        let mut strides = vec![1_i64; shape.len()];
        for dimension in (1..shape.len()).rev() {
            strides[dimension - 1] = strides[dimension] * shape[dimension].max(1);
        }
        let mut kept = Box::new(Kept { shape, strides, _keeps: self.keeps });
        let tensor = Tensor {
            data: self.address as *mut c_void,
            kind: self.device.0,
            ordinal: self.device.1 as i32,
            dimensions: kept.shape.len() as i32,
            dtype: Type { code: self.dtype.dlpack_code(), bits: (self.dtype.bytes() * 8) as u8, lanes: 1 },
            shape: kept.shape.as_mut_ptr(),
            strides: kept.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let context = Box::into_raw(kept).cast();
        if newest.is_some_and(|(major, _)| major >= 1) {
            let deleter: Option<unsafe extern "C" fn(*mut Versioned)> = Some(delete_versioned);
            let managed = Box::into_raw(Box::new(Versioned { major: 1, minor: 0, context, deleter, flags: 0, tensor }));
            // SAFETY: The deleter frees the tensor once. On a failure nobody else has it.
            unsafe { capsule(py, managed.cast(), VERSIONED, destroy_versioned, || delete_versioned(managed)) }
        } else {
            let managed = Box::into_raw(Box::new(Plain { tensor, context, deleter: Some(delete_plain) }));
            // SAFETY: As above.
            unsafe { capsule(py, managed.cast(), PLAIN, destroy_plain, || delete_plain(managed)) }
        }
    }
}

/// Makes a capsule. If that fails, calls `undo`.
///
/// # Safety
/// The destructor must fit the pointer and the name.
unsafe fn capsule<'py>(
    py: Python<'py>,
    managed: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
    undo: impl FnOnce(),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: The pointer is not null, the name is static, and this thread holds the interpreter's lock.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed, name.as_ptr(), Some(destructor));
        if capsule.is_null() {
            undo();
            return Err(PyErr::fetch(py));
        }
        Ok(Bound::from_owned_ptr(py, capsule))
    }
}

/// Deletes a tensor of this package. Any thread may call it, with or without the interpreter's lock.
///
/// # Safety
/// The pointer must come from [`Export::into_capsule`], and must not be used afterward.
unsafe extern "C" fn delete_plain(managed: *mut Plain) {
    // SAFETY: Both boxes were made for this tensor.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: As above.
    drop(unsafe { Box::from_raw(managed.context.cast::<Kept>()) });
}

/// As [`delete_plain`].
///
/// # Safety
/// As for [`delete_plain`].
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: Both boxes were made for this tensor.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: As above.
    drop(unsafe { Box::from_raw(managed.context.cast::<Kept>()) });
}

/// Ends a capsule. Its tensor goes with it, unless a consumer took it and renamed the capsule.
///
/// # Safety
/// The interpreter calls it with a capsule of [`Export::into_capsule`].
unsafe extern "C" fn destroy_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: The interpreter passes the capsule and holds its lock.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) == 1 {
            delete_plain(ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast());
        }
    }
}

/// As [`destroy_plain`].
///
/// # Safety
/// As for [`destroy_plain`].
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: As in `destroy_plain`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// Returns the kind of device of a backend.
fn kind_of_backend(device: &highwater::Device) -> PyResult<i32> {
    match device.runtime().identity().name.as_str() {
        "cuda" => Ok(CUDA),
        "rocm" => Ok(ROCM),
        // Its devices are memory of this process.
        "mock" => Ok(CPU),
        name => Err(unsupported(
            "dlpack",
            format!("DLPack has no kind of device for the backend `{name}`"),
            "download the values, and pass the array",
        )),
    }
}

/// Returns the kind of device of a buffer.
pub(crate) fn kind_of(py: Python<'_>, memory: &Memory) -> PyResult<i32> {
    let kind = kind_of_backend(&memory.device)?;
    if kind == CPU {
        // Addresses of mapped and of opened memory mean something to the mock alone.
        let backend = memory.device.runtime().backend();
        let range = py.detach(|| backend.describe_memory(memory.device.ordinal(), DevicePtr::new(memory.address())));
        if memory.is_imported() || range.map_err(raised)?.kind == RangeKind::Mapped {
            return Err(unsupported(
                "dlpack",
                "the mock maps this memory at an address that only its devices understand",
                "on the mock, export buffers of `Device.allocate` and `Device.allocate_shared`",
            ));
        }
    }
    Ok(kind)
}

/// Returns the number of the device in DLPack.
pub(crate) fn ordinal_of(memory: &Memory) -> PyResult<u32> {
    Ok(if kind_of_backend(&memory.device)? == CPU { 0 } else { memory.device.ordinal() })
}

/// Refuses a request for a copy, which a consumer makes itself.
pub(crate) fn check_request(device: (i32, u32), requested: Option<(i32, i32)>, copy: Option<bool>) -> PyResult<()> {
    if copy == Some(true) {
        return Err(PyBufferError::new_err("Highwater exports without a copy; copy the tensor afterward"));
    }
    match requested {
        Some(requested) if requested != (device.0, device.1 as i32) => {
            let message = format!("the memory is on the device {device:?} of DLPack, not on {requested:?}");
            Err(PyBufferError::new_err(message))
        }
        _ => Ok(()),
    }
}

pub(crate) fn check_no_stream(stream: Option<i64>) -> PyResult<()> {
    match stream {
        None | Some(-1) => Ok(()),
        Some(stream) => {
            let message = format!("the memory of a CPU has no streams, and {stream} was passed");
            Err(invalid("__dlpack__", message, "pass None"))
        }
    }
}

/// Orders the stream of the consumer after the work on the memory. A consumer on the CPU has no stream, so the call waits.
pub(crate) fn hand_over(py: Python<'_>, memory: &Memory, kind: i32, stream: Option<i64>) -> PyResult<()> {
    if kind == CPU {
        check_no_stream(stream)?;
        return memory.settle(py);
    }
    let raw = match (kind, stream) {
        // The consumer orders itself.
        (_, Some(-1)) => return Ok(()),
        // The legacy default stream.
        (CUDA, None) => 1,
        (_, None) => 0,
        (CUDA, Some(0)) | (ROCM, Some(1..=2)) | (_, Some(i64::MIN..=-2)) => {
            let message = format!("{} names no stream in DLPack", stream.unwrap_or_default());
            return Err(invalid("__dlpack__", message, "pass the handle of a stream, or 1 for CUDA's default stream"));
        }
        (_, Some(stream)) => stream as u64,
    };
    let consumer = py.detach(|| {
        // SAFETY: The consumer passes its own stream, as the protocol requires, and PyTorch's and CuPy's streams stay.
        let consumer = unsafe { memory.device.stream_from_raw(raw) }?;
        with_values!(&*memory.values, buffer => consumer.note_device_use(buffer, Access::Write))?;
        Ok(consumer)
    });
    memory.order(py, &StreamOf::new(consumer.map_err(raised)?))
}

/// A tensor that came from another library. Its deleter is called once, in any thread.
enum Taken {
    Plain(NonNull<Plain>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: DLPack lets any thread use the tensor and call its deleter.
unsafe impl Send for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: The producer's tensor is alive until this call, which is the only one.
        unsafe {
            match self {
                Self::Plain(managed) => managed.as_ref().deleter.map(|deleter| deleter(managed.as_ptr())),
                Self::Versioned(managed) => managed.as_ref().deleter.map(|deleter| deleter(managed.as_ptr())),
            };
        }
    }
}

impl Taken {
    /// Takes the tensor out of a capsule, which is renamed.
    fn out_of(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = capsule.py();
        let capsule =
            capsule.cast::<PyCapsule>().map_err(|_| PyTypeError::new_err("`__dlpack__` returned no capsule"))?;
        let take = |name: &'static CStr, used: &'static CStr| -> PyResult<Option<NonNull<c_void>>> {
            // SAFETY: The object is a capsule, the names are static, and this thread holds the interpreter's lock.
            unsafe {
                if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
                    return Ok(None);
                }
                let pointer = NonNull::new(ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()));
                if ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) != 0 {
                    return Err(PyErr::fetch(py));
                }
                Ok(pointer)
            }
        };
        if let Some(managed) = take(VERSIONED, USED_VERSIONED)? {
            return Ok(Self::Versioned(managed.cast()));
        }
        match take(PLAIN, USED_PLAIN)? {
            Some(managed) => Ok(Self::Plain(managed.cast())),
            None => Err(PyTypeError::new_err("the capsule holds no tensor, or another consumer took it")),
        }
    }

    fn tensor(&self) -> PyResult<&Tensor> {
        // SAFETY: The tensor lives until the deleter is called. All versions 1 have this layout; the version comes first.
        unsafe {
            match self {
                Self::Plain(managed) => Ok(&managed.as_ref().tensor),
                Self::Versioned(managed) => {
                    let managed = managed.as_ref();
                    if managed.major != 1 {
                        let message = format!("the tensor has version {} of DLPack", managed.major);
                        return Err(unsupported("from_dlpack", message, "use a library of DLPack 1"));
                    }
                    if managed.flags & READ_ONLY != 0 {
                        return Err(invalid(
                            "from_dlpack",
                            "the tensor is read-only",
                            "pass a tensor that may be written",
                        ));
                    }
                    Ok(&managed.tensor)
                }
            }
        }
    }
}

/// Makes a buffer over the tensor of another library, which stays alive until the buffer's last use has ended.
pub(crate) fn import(tensor: &Bound<'_, PyAny>, stream: &Arc<Queue>, device: &highwater::Device) -> PyResult<Memory> {
    const OPERATION: &str = "from_dlpack";
    let py = tensor.py();
    let kind = kind_of_backend(device)?;
    let expected = (kind, if kind == CPU { 0 } else { device.ordinal() as i32 });
    let Some(of_tensor) = tensor.getattr_opt("__dlpack_device__")? else {
        let found = tensor.get_type().name()?;
        let message =
            format!("tensor is of the type {found}, expected an object with `__dlpack__` and `__dlpack_device__`");
        return Err(PyTypeError::new_err(message));
    };
    let found: (i32, i32) = of_tensor.call0()?.extract()?;
    if found != expected {
        let message = format!("the tensor is on the device {found:?} of DLPack, the stream on {expected:?}");
        return Err(invalid(
            OPERATION,
            message,
            "use a stream of the tensor's device, or `Stream.upload` for values of the CPU",
        ));
    }
    let arguments = PyDict::new(py);
    if kind != CPU {
        arguments.set_item("stream", py.detach(|| stream.raw()).map_err(raised)?)?;
    }
    let older = arguments.copy()?;
    arguments.set_item("max_version", (1, 0))?;
    let capsule = match tensor.call_method("__dlpack__", (), Some(&arguments)) {
        // A library of the time before version 1.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => tensor.call_method("__dlpack__", (), Some(&older))?,
        capsule => capsule?,
    };
    let taken = Taken::out_of(&capsule)?;
    let found = taken.tensor()?;
    let Type { code, bits, lanes } = found.dtype;
    let dtype = DType::of_dlpack(code, bits).filter(|_| lanes == 1).ok_or_else(|| {
        let message = format!("Highwater has no type for the code {code} with {bits} bits and {lanes} lanes");
        unsupported(OPERATION, message, "convert the tensor to a number type of NumPy")
    })?;
    let dimensions = usize::try_from(found.dimensions).unwrap_or_default();
    // SAFETY: The producer passes this many lengths, and strides or none.
    let (lengths, strides) = unsafe {
        let read = |pointer: *const i64| {
            if pointer.is_null() || dimensions == 0 {
                None
            } else {
                Some(std::slice::from_raw_parts(pointer, dimensions))
            }
        };
        (read(found.shape).unwrap_or_default(), read(found.strides))
    };
    let shape: Option<Vec<usize>> = lengths.iter().map(|&length| usize::try_from(length).ok()).collect();
    let shape = shape.ok_or_else(|| invalid(OPERATION, "a length is negative", "pass a valid tensor"))?;
    let values = count(&shape, dtype)?;
    let mut stride = 1;
    for dimension in (0..dimensions).rev() {
        if values > 1 && lengths[dimension] > 1 && strides.is_some_and(|strides| strides[dimension] != stride) {
            let message = "the values of the tensor do not follow each other";
            return Err(invalid(OPERATION, message, "pass a contiguous tensor, such as `tensor.contiguous()`"));
        }
        stride = stride.saturating_mul(lengths[dimension]);
    }
    if values == 0 {
        // Its address means nothing.
        drop(taken);
        let made = py.detach(|| make_values!(dtype, device.allocate(0)));
        return Ok(Memory::new(made.map_err(raised)?, device.clone(), dtype, shape));
    }
    let address = DevicePtr::new(found.data as u64).offset(usize::try_from(found.byte_offset).unwrap_or(usize::MAX));
    let bytes = values * dtype.bytes();
    // SAFETY: The producer keeps the memory until the deleter is called, which the drop of `taken` does. The producer made the
    // stream wait for its work. Any thread may call the deleter.
    let made = py.detach(|| unsafe { make_values!(dtype, device.adopt(address, bytes, taken)) });
    let made = made.map_err(|error| match error.kind() {
        ErrorKind::InvalidPointer if kind == CPU => error.with_hint("copy values of NumPy with `Stream.upload`"),
        _ => error,
    });
    let memory = Memory::new(made.map_err(raised)?, device.clone(), dtype, shape);
    memory.note(py, stream);
    Ok(memory)
}
