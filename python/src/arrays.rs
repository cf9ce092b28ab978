//! Shapes, and the arrays of the host that values are copied from and to.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::dtype::DType;
use crate::error::invalid;

/// Functions of NumPy. At the end of the interpreter, an import fails, and destructors still copy.
static AS_ARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Returns `numpy.asarray`.
pub(crate) fn as_array<'py>(py: Python<'py>) -> PyResult<&'py Bound<'py, PyAny>> {
    AS_ARRAY.import(py, "numpy", "asarray")
}

/// Returns `numpy.empty`.
fn empty<'py>(py: Python<'py>) -> PyResult<&'py Bound<'py, PyAny>> {
    EMPTY.import(py, "numpy", "empty")
}

/// Loads NumPy.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    as_array(py).and(empty(py)).map(drop)
}

/// Returns the begin of the text of an object that a caller passed.
pub(crate) fn short(object: &Bound<'_, PyAny>) -> String {
    const LETTERS: usize = 60;
    // Python writes no number of more than some thousand digits.
    let text = match object.str() {
        Ok(text) => text.to_string(),
        Err(_) => return format!("a value of {}", object.get_type()),
    };
    match text.char_indices().nth(LETTERS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Returns a whole number without a sign. Raises `InvalidArgument` for one that its type does not hold, and `TypeError` for other objects.
pub(crate) fn whole<'py, T>(operation: &'static str, name: &str, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    value.extract::<T>().map_err(|error| {
        let text = short(value);
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            let message = format!("{name} is {text}, expected at least 0 and at most 2**{} - 1", 8 * size_of::<T>());
            return invalid(operation, message, "pass a number in this range");
        }
        PyTypeError::new_err(format!("{operation}: {name} is `{text}`, expected a whole number"))
    })
}

/// Returns the lengths of the dimensions, from one number or a sequence.
pub(crate) fn shape_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let sequence = || {
        object.extract::<Vec<isize>>().map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(object.py()) {
                return too_long(object);
            }
            let found = short(object);
            PyTypeError::new_err(format!("shape is `{found}`, expected a whole number or a sequence of whole numbers"))
        })
    };
    // A tuple is no number. The error of the attempt would take longer than the rest.
    let lengths = if object.is_instance_of::<PyTuple>() {
        sequence()?
    } else {
        match object.extract::<isize>() {
            Ok(length) => vec![length],
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => return Err(too_long(object)),
            Err(_) => sequence()?,
        }
    };
    let checked = lengths.iter().map(|&length| usize::try_from(length));
    checked.collect::<Result<_, _>>().map_err(|_| {
        let message = format!("the shape {lengths:?} has a negative length");
        invalid("shape", message, "pass lengths of at least 0")
    })
}

fn too_long(shape: &Bound<'_, PyAny>) -> PyErr {
    invalid("shape", format!("the shape {} exceeds the address space", short(shape)), "pass a smaller shape")
}

/// Returns the number of values, if their bytes fit the address space.
pub(crate) fn count(shape: &[usize], dtype: DType) -> PyResult<usize> {
    let values = shape.iter().try_fold(1_usize, |product, &length| product.checked_mul(length));
    let fits = |values: &usize| values.checked_mul(dtype.bytes()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    values.filter(fits).ok_or_else(|| {
        let message = format!("{shape:?} values of {} exceed the address space", dtype.name());
        invalid("shape", message, "pass a smaller shape")
    })
}

/// A contiguous array of NumPy, kept alive.
pub(crate) struct HostArray<'py> {
    pub(crate) object: Bound<'py, PyAny>,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    address: usize,
    bytes: usize,
}

impl<'py> HostArray<'py> {
    /// Returns the values of an object as a contiguous array. Copies them if they are not one.
    pub(crate) fn of(values: &Bound<'py, PyAny>, dtype: Option<DType>) -> PyResult<Self> {
        let named = PyDict::new(values.py());
        named.set_item("order", "C")?;
        let has_bits_of = match dtype {
            // Bits of bfloat16 stay as they are: NumPy cannot convert to it.
            Some(DType::BFloat16) => dtype,
            Some(dtype) => {
                named.set_item("dtype", dtype.name())?;
                None
            }
            None => None,
        };
        let object = as_array(values.py())?.call((values,), Some(&named))?;
        let array = Self::contiguous(object, None)?;
        match has_bits_of {
            Some(_) if matches!(array.dtype, DType::UInt16 | DType::BFloat16) => {
                Ok(Self { dtype: DType::BFloat16, ..array })
            }
            Some(_) => {
                let message = format!("{} values cannot become bfloat16", array.dtype.name());
                Err(invalid("upload", message, "pass the bits as uint16, or an array of `ml_dtypes.bfloat16`"))
            }
            None => Ok(array),
        }
    }

    /// Returns a new array.
    pub(crate) fn empty(py: Python<'py>, shape: &[usize], dtype: DType) -> PyResult<Self> {
        let arguments = (PyTuple::new(py, shape)?, dtype.numpy_name());
        Self::contiguous(empty(py)?.call1(arguments)?, Some(dtype))
    }

    /// Makes one of an array, whose type is looked up if it is not known. NumPy imports a module to tell the name of a type.
    fn contiguous(object: Bound<'py, PyAny>, known: Option<DType>) -> PyResult<Self> {
        let numpys = object.getattr("dtype")?;
        if !numpys.getattr("isnative")?.is_truthy()? {
            let message = format!("the array has {numpys} values of the other byte order");
            return Err(invalid("upload", message, "convert it with `array.astype(array.dtype.newbyteorder(\"=\"))`"));
        }
        let dtype = known.map_or_else(|| DType::of(&numpys), Ok)?;
        let (address, _): (usize, bool) = object.getattr("__array_interface__")?.get_item("data")?.extract()?;
        let (bytes, shape) = (object.getattr("nbytes")?.extract()?, object.getattr("shape")?.extract()?);
        Ok(Self { object, dtype, shape, address, bytes })
    }

    /// Returns the bytes of the values. The caller must keep the array while it uses them.
    pub(crate) fn bytes<'a>(&self) -> &'a [u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: NumPy reports the address and the size of a contiguous array. The caller keeps it. Another thread that writes the
        // array meanwhile changes the values that are copied, as it does for NumPy's own copies.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    /// Returns the bytes of a new array for writing. The caller must keep the array while it uses them.
    ///
    /// # Safety
    /// The caller must have made the array with [`HostArray::empty`], show it to no other code before, and call this once.
    pub(crate) unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: As in `bytes`. No other code has the array.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}
