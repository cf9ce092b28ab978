//! Batches of PyTorch tensors over few storages: reads their layouts, and makes views.
//!
//! PyTorch's Python functions take about 2 us per tensor, so this module calls its stable C interface
//! (`torch/csrc/inductor/aoti_torch/c/shim.h`).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};
use std::ptr::{NonNull, null, null_mut};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

/// `at::Tensor*`.
type Handle = *mut c_void;
type Get<T> = unsafe extern "C" fn(Handle, *mut T) -> i32;
type View = unsafe extern "C" fn(Handle, i64, *const i64, *const i64, i64, *mut Handle) -> i32;

/// The functions of PyTorch. Each returns 0, or another number after an error.
#[pyclass(frozen)]
pub(crate) struct TensorFunctions {
    get_dim: Get<i64>,
    get_dtype: Get<i32>,
    get_sizes: Get<*mut i64>,
    get_strides: Get<*mut i64>,
    get_storage_offset: Get<i64>,
    /// Makes a tensor over the storage of another one, from the sizes, the strides and the offset.
    view: View,
    delete: unsafe extern "C" fn(Handle) -> i32,
}

/// A tensor that [`TensorFunctions::delete`] deletes.
struct Tensor<'f> {
    handle: Handle,
    functions: &'f TensorFunctions,
}

impl Drop for Tensor<'_> {
    fn drop(&mut self) {
        // SAFETY: The handle is of a tensor that nothing else has. An error leaves it allocated.
        let _ = unsafe { (self.functions.delete)(self.handle) };
    }
}

/// The most dimensions of a tensor.
const MOST_DIMENSIONS: usize = 64;

/// Sizes, strides, the bytes of an element, and the number of the type.
type Described<'py> = (Bound<'py, PyTuple>, Bound<'py, PyTuple>, i64, usize);

/// The type and the shape of the tensors of a layout.
struct Layout {
    size: Vec<i64>,
    stride: Vec<i64>,
    itemsize: i64,
    dtype: usize,
    /// The number of elements from the first to the last one.
    extent: i64,
}

impl Layout {
    /// Returns `None` if the layout is invalid, or a number overflows.
    fn of((size, stride, itemsize, dtype): &Described<'_>) -> Option<Self> {
        if size.len() != stride.len() || size.len() > MOST_DIMENSIONS || *itemsize <= 0 {
            return None;
        }
        let (size, stride): (Vec<i64>, Vec<i64>) = (size.extract().ok()?, stride.extract().ok()?);
        let elements = size.iter().try_fold(1_i64, |elements, length| elements.checked_mul(*length))?;
        if size.iter().chain(&stride).any(|number| *number < 0) {
            return None;
        }
        let last = size
            .iter()
            .zip(&stride)
            .try_fold(0_i64, |last, (length, step)| last.checked_add(length.saturating_sub(1).checked_mul(*step)?));
        let extent = if elements == 0 { 0 } else { last?.checked_add(1)? };
        Some(Self { size, stride, itemsize: *itemsize, dtype: *dtype, extent })
    }
}

/// Returns the pointer in a capsule of PyTorch, which has no name.
fn pointer(capsule: &Bound<'_, PyAny>) -> PyResult<Handle> {
    // SAFETY: This thread holds the interpreter's lock. The function checks the object.
    let handle = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), null()) };
    if handle.is_null() { Err(PyErr::fetch(capsule.py())) } else { Ok(handle) }
}

impl TensorFunctions {
    fn tensor(&self, handle: Handle) -> Tensor<'_> {
        Tensor { handle, functions: self }
    }

    /// Takes ownership of the tensors in the capsules, which have no destructor.
    fn take(&self, capsules: &Bound<'_, PyList>) -> PyResult<Vec<Tensor<'_>>> {
        capsules.iter().map(|capsule| Ok(self.tensor(pointer(&capsule)?))).collect()
    }

    /// Calls a function that returns a property of a tensor.
    fn get<T: Copy>(&self, get: Get<T>, tensor: &Tensor<'_>, mut value: T) -> Option<T> {
        // SAFETY: The tensor is alive, and the call writes one value.
        (unsafe { get(tensor.handle, &raw mut value) } == 0).then_some(value)
    }

    /// Appends the type, the sizes and the strides of a tensor.
    fn shape(&self, tensor: &Tensor<'_>, shape: &mut Vec<i64>) -> Option<()> {
        let dimensions = usize::try_from(self.get(self.get_dim, tensor, 0)?).ok()?;
        shape.push(i64::from(self.get(self.get_dtype, tensor, 0)?));
        for get in [self.get_sizes, self.get_strides] {
            let first = self.get(get, tensor, null_mut())?;
            if dimensions > 0 {
                // SAFETY: A tensor has as many sizes and strides as dimensions, and nothing changes it meanwhile.
                shape.extend(unsafe { std::slice::from_raw_parts(NonNull::new(first)?.as_ptr(), dimensions) });
            }
        }
        Some(())
    }

    /// Makes a tensor over the storage of `base`. The caller has checked the range.
    fn view_of(&self, base: &Tensor<'_>, layout: &Layout, offset: i64) -> Option<Tensor<'_>> {
        let Layout { size, stride, .. } = layout;
        let mut made = null_mut();
        // SAFETY: The tensor is alive, and the call reads as many sizes and strides.
        let code = unsafe {
            (self.view)(base.handle, size.len() as i64, size.as_ptr(), stride.as_ptr(), offset, &raw mut made)
        };
        (code == 0 && !made.is_null()).then(|| self.tensor(made))
    }
}

/// The `TensorBatch.places` of tensors (storage, layout, offset), and the first tensor of each storage and layout.
type Places<'py> = (Bound<'py, PyBytes>, Vec<usize>, Vec<usize>);

#[pymethods]
impl TensorFunctions {
    /// Finds the functions in the library of PyTorch at `path`, which is loaded. Returns `None` if one is missing.
    #[staticmethod]
    fn load(path: &str) -> Option<Self> {
        let path = CString::new(path).ok()?;
        // SAFETY: `RTLD_NOLOAD` loads nothing, so no initializer runs.
        let library = NonNull::new(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) })?;
        let find = |name: &str| {
            let name = CString::new(format!("aoti_torch_{name}")).ok()?;
            // SAFETY: The library stays loaded: this handle is not closed.
            NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) }).map(NonNull::as_ptr)
        };
        // SAFETY: PyTorch declares the functions with these types.
        unsafe {
            Some(Self {
                get_dim: std::mem::transmute::<*mut c_void, Get<i64>>(find("get_dim")?),
                get_dtype: std::mem::transmute::<*mut c_void, Get<i32>>(find("get_dtype")?),
                get_sizes: std::mem::transmute::<*mut c_void, Get<*mut i64>>(find("get_sizes")?),
                get_strides: std::mem::transmute::<*mut c_void, Get<*mut i64>>(find("get_strides")?),
                get_storage_offset: std::mem::transmute::<*mut c_void, Get<i64>>(find("get_storage_offset")?),
                view: std::mem::transmute::<*mut c_void, View>(find("_reinterpret_tensor")?),
                delete: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Handle) -> i32>(find(
                    "delete_tensor_object",
                )?),
            })
        }
    }

    /// Numbers the storages and the layouts of tensors in the order of their first tensors. `to_capsules` is PyTorch's function that
    /// makes capsules of tensors. It is called here, because a signal handler that ran after it would lose them. Objects of
    /// `storages` that are the same object are one storage. Returns `None` if PyTorch refuses.
    fn places<'py>(
        &self,
        to_capsules: &Bound<'py, PyAny>,
        tensors: &Bound<'py, PyList>,
        storages: &Bound<'py, PyList>,
    ) -> PyResult<Option<Places<'py>>> {
        let tensors = self.take(to_capsules.call1((tensors,))?.cast()?)?;
        let (mut places, mut shape) = (Vec::with_capacity(24 * tensors.len()), Vec::new());
        let (mut numbers, mut layouts) = (HashMap::new(), HashMap::<Vec<i64>, usize>::new());
        let (mut first_of_storages, mut first_of_layouts) = (Vec::new(), Vec::new());
        for (place, (tensor, storage)) in tensors.iter().zip(storages.iter()).enumerate() {
            shape.clear();
            let offset = self.shape(tensor, &mut shape).and_then(|()| self.get(self.get_storage_offset, tensor, 0));
            let Some(offset) = offset else { return Ok(None) };
            let number = *numbers.entry(storage.as_ptr() as usize).or_insert_with(|| {
                first_of_storages.push(place);
                first_of_storages.len() - 1
            });
            let layout = layouts.get(&shape).copied().unwrap_or_else(|| {
                first_of_layouts.push(place);
                layouts.insert(shape.clone(), first_of_layouts.len() - 1);
                first_of_layouts.len() - 1
            });
            for number in [number as i64, layout as i64, offset] {
                places.extend(number.to_ne_bytes());
            }
        }
        Ok(Some((PyBytes::new(to_capsules.py(), &places), first_of_storages, first_of_layouts)))
    }

    /// Makes tensors over storages, from the `places` of a `TensorBatch`. A layout has the sizes, the strides, the bytes of an
    /// element, and the number of its type. `base` gets the numbers of a storage and of a layout, and returns an empty tensor of
    /// that type over the storage. `calls` are PyTorch's functions that make capsules of tensors and tensors of capsules. Returns a
    /// list; `None` if a place, a layout or a range is invalid, or if PyTorch refuses.
    fn views<'py>(
        &self,
        calls: (Bound<'py, PyAny>, Bound<'py, PyAny>),
        places: &[u8],
        layouts: Vec<Described<'py>>,
        nbytes: Vec<i64>,
        base: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (py, (to_capsules, from_capsules)) = (base.py(), calls);
        let Some(layouts) = layouts.iter().map(Layout::of).collect::<Option<Vec<_>>>() else { return Ok(None) };
        if !places.len().is_multiple_of(24) {
            return Ok(None);
        }
        let (mut bases, mut made) = (HashMap::new(), Vec::with_capacity(places.len() / 24));
        for row in places.chunks_exact(24) {
            let number = |place: usize| row[8 * place..][..8].try_into().map_or(-1, i64::from_ne_bytes);
            let (storage, of, offset) = (number(0) as usize, number(1) as usize, number(2));
            let (Some(bytes), Some(layout)) = (nbytes.get(storage), layouts.get(of)) else { return Ok(None) };
            let end = offset.checked_add(layout.extent).and_then(|end| end.checked_mul(layout.itemsize));
            // A tensor without elements may have any offset that is not negative.
            if offset < 0 || (layout.extent > 0 && end.is_none_or(|end| end > *bytes)) {
                return Ok(None);
            }
            let base = match bases.entry((storage, layout.dtype)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => {
                    let tensor = PyList::new(py, [base.call1((storage, of))?])?;
                    let mut taken = self.take(to_capsules.call1((tensor,))?.cast()?)?;
                    let Some(taken) = taken.pop() else { return Ok(None) };
                    place.insert(taken)
                }
            };
            let Some(view) = self.view_of(base, layout, offset) else { return Ok(None) };
            made.push(view);
        }
        let capsules = PyList::empty(py);
        for view in &made {
            // SAFETY: This thread holds the interpreter's lock. The result is a new object or null. It has no destructor.
            let capsule = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(view.handle, null(), None)) }?;
            capsules.append(capsule)?;
        }
        // PyTorch owns them from here on.
        made.into_iter().for_each(std::mem::forget);
        from_capsules.call1((capsules,)).map(Some)
    }
}
