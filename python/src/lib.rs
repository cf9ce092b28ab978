//! The compiled part of the Python package `highwater`: classes over the types of the crate `highwater`.
//!
//! - `error`: errors become the exceptions of `highwater/_errors.py`; `detached`: objects that end without the interpreter's lock
//! - `dtype`: the element types; `arrays`: shapes, and the arrays of the host that are copied from
//! - `runtime`, `stream`, `graph`, `memory`, `ticket`, `statistics`: the classes
//! - `rows`: parts of matrices, for copies
//! - `dlpack`: tensors of other libraries, both ways
//! - `listing`: the processes that share memory
//! - `waits`: the end of device work, for `asyncio`
//! - `tensors`: many tensors of PyTorch at once
//! - `segments`: the segments of PyTorch's allocator that receivers keep mapped
//! - `torch`: parts of `highwater/torch.py`, and functions that PyTorch finds in this library by their names
//!
//! Four rules hold. Each call into the library releases the interpreter's lock, because any of them may wait for a lock that a
//! waiting thread holds. No Python object is touched without the lock. Memory whose address other code has seen is released after
//! the devices have ended all work. A child of `fork` takes no lock of this crate that another thread may have held.

mod arrays;
mod detached;
mod dlpack;
mod dtype;
mod error;
mod graph;
mod listing;
mod memory;
mod rows;
mod runtime;
mod segments;
mod statistics;
mod stream;
mod tensors;
mod ticket;
mod torch;
mod waits;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Refuses other interpreters of the process. Their objects may end without a way back to them, and the process would hang.
fn require_main_interpreter(py: Python<'_>) -> PyResult<()> {
    // SAFETY: This thread holds the interpreter's lock.
    match unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) } {
        0 => Ok(()),
        -1 => Err(PyErr::fetch(py)),
        id => Err(PyImportError::new_err(format!(
            "highwater was imported in the sub-interpreter {id}, and works in the main interpreter only; import it there, or start a \
             process"
        ))),
    }
}

#[pymodule]
fn _highwater(module: &Bound<'_, PyModule>) -> PyResult<()> {
    require_main_interpreter(module.py())?;
    error::prepare(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<runtime::Runtime>()?;
    module.add_class::<runtime::Device>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<stream::Event>()?;
    module.add_class::<graph::Graph>()?;
    module.add_class::<waits::Done>()?;
    module.add_class::<memory::Buffer>()?;
    module.add_class::<memory::Pinned>()?;
    module.add_class::<ticket::Ticket>()?;
    module.add_class::<ticket::TicketBatch>()?;
    module.add_class::<ticket::Owner>()?;
    module.add_class::<tensors::TensorFunctions>()?;
    module.add_class::<torch::Receipts>()?;
    module.add_function(wrap_pyfunction!(torch::acknowledge, module)?)?;
    module.add_function(wrap_pyfunction!(torch::capsule_of, module)?)?;
    module.add_function(wrap_pyfunction!(torch::dtype_names, module)?)?;
    module.add_function(wrap_pyfunction!(torch::host_functions, module)?)?;
    module.add_function(wrap_pyfunction!(torch::last_failure, module)?)?;
    module.add_function(wrap_pyfunction!(torch::open_storage, module)?)?;
    module.add_function(wrap_pyfunction!(torch::standing_runtime, module)?)?;
    module.add_function(wrap_pyfunction!(segments::segment_freed_function, module)?)?;
    module.add_function(wrap_pyfunction!(segments::segment_ticket, module)?)?;
    module.add_function(wrap_pyfunction!(listing::processes, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::open, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::survey, module)?)
}
