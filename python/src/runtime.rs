//! [`Runtime`] and [`Device`], and the functions that open a backend.

use std::sync::{Arc, Mutex, PoisonError};

use highwater::hal::DevicePtr;
use highwater::hal::fork::Generation;
use highwater::{DeviceBuffer, Error, ErrorKind, Fallback, ImportOptions, OwnerDeath};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{self, count, shape_of, whole};
use crate::detached::Detached;
use crate::dtype::DType;
use crate::error::{invalid, not_opened, raised};
use crate::memory::{Buffer, HostMemory, Memory, Pinned, Values, make_values, with_values};
use crate::statistics;
use crate::stream::Stream;
use crate::ticket::{Ticket, TicketBatch, hexadecimal};

/// Opens a backend: `"cuda"`, `"rocm"`, `"mock"`, or the name of a plugin.
///
/// `"auto"` opens the backend that the variable `HIGHWATER_BACKEND` names, and else the best real device of this machine. If no
/// device works, it opens the mock with `fallback="mock"`, and raises an error without. A name opens that backend and no other.
/// The variable `HIGHWATER_MOCK` sets the properties of the mock.
///
/// Raises `UnknownBackend`, `LibraryMissing`, `SymbolMissing`, `DeviceMissing`, or another `Error` of the backend.
#[pyfunction]
#[pyo3(signature = (name="auto", *, fallback=None))]
pub(crate) fn open(py: Python<'_>, name: &str, fallback: Option<&str>) -> PyResult<Runtime> {
    let fallback = match fallback {
        None => Fallback::None,
        Some("mock") => Fallback::Mock,
        Some(other) => {
            return Err(invalid("open", format!("the fallback is `{other}`"), "pass fallback=\"mock\" or None"));
        }
    };
    // Calls fail by themselves without NumPy.
    let _ = arrays::prepare(py);
    let open = || match name {
        "auto" => highwater::Runtime::open_best(fallback),
        name => highwater::Runtime::open(name),
    };
    Ok(Runtime::new(py.detach(open).map_err(not_opened)?))
}

/// Tries every backend and every plugin that is found, keeps none, and returns a report for people.
#[pyfunction]
pub(crate) fn survey(py: Python<'_>) -> String {
    py.detach(|| highwater::opening::survey().to_string())
}

/// A backend, its devices, and the pools of both. `open` returns it.
///
/// It is a context manager. The end of the block gives up this object: its calls raise `InvalidState` from then on. The runtime
/// itself ends with its last device, stream, event, buffer or array, and waits for the devices then.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Runtime {
    /// `None` once it is closed. Locked only with the interpreter's lock, and never for longer than a copy takes.
    inner: Mutex<Option<Arc<Detached<highwater::Runtime>>>>,
    generation: Generation,
}

impl Runtime {
    pub(crate) fn new(runtime: highwater::Runtime) -> Self {
        Self { inner: Mutex::new(Some(Arc::new(Detached::new(runtime)))), generation: Generation::current() }
    }

    fn take(&self) -> Option<Arc<Detached<highwater::Runtime>>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn get(&self) -> PyResult<Arc<Detached<highwater::Runtime>>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        inner.ok_or_else(|| {
            let error = Error::new(ErrorKind::InvalidState, "runtime", "the runtime is closed");
            raised(error.with_hint("open another one with `highwater.open`"))
        })
    }
}

/// The number of a device, as an argument.
struct Ordinal(u32);

impl<'py> FromPyObject<'_, 'py> for Ordinal {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        whole("device", "ordinal", &object).map(Self)
    }
}

/// Returns the options of an open.
fn import_options(operation: &'static str, owner_death: &str) -> PyResult<ImportOptions> {
    let death = match owner_death {
        "keep" => OwnerDeath::Keep,
        "release" => OwnerDeath::Release,
        "inherit" => OwnerDeath::Inherit,
        other => {
            let message = format!("owner_death is `{other}`");
            return Err(invalid(operation, message, "pass \"keep\", \"release\" or \"inherit\""));
        }
    };
    Ok(ImportOptions::new().with_owner_death(death))
}

/// Makes a buffer over opened values.
fn opened(runtime: &highwater::Runtime, values: Values, shape: &[usize], dtype: DType) -> Result<Buffer, Error> {
    let ordinal = with_values!(&values, buffer => buffer.device());
    Ok(Buffer::new(Memory::new(values, runtime.device(ordinal)?, dtype, shape.to_vec())))
}

/// Returns page-locked memory.
fn pinned(
    py: Python<'_>,
    runtime: &highwater::Runtime,
    device: Option<&highwater::Device>,
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
) -> PyResult<Pinned> {
    let (dtype, shape) = (DType::of(dtype)?, shape_of(shape)?);
    let bytes = count(&shape, dtype)? * dtype.bytes();
    let make = || device.map_or_else(|| runtime.pinned::<u8>(bytes), |device| device.pinned::<u8>(bytes));
    let buffer = py.detach(make).map_err(raised)?;
    Ok(Pinned(Arc::new(HostMemory::new(buffer, runtime.clone(), dtype, shape))))
}

#[pymethods]
impl Runtime {
    /// The name that opens the backend, such as `"cuda"`.
    #[getter]
    fn backend(&self) -> PyResult<String> {
        Ok(self.get()?.identity().name.clone())
    }

    /// The product that the backend drives, for people.
    #[getter]
    fn description(&self) -> PyResult<String> {
        Ok(self.get()?.identity().description.clone())
    }

    /// Whether the backend drives real hardware.
    #[getter]
    fn is_real(&self) -> PyResult<bool> {
        Ok(self.get()?.identity().real_device)
    }

    /// The number of devices. Ordinals count from 0.
    #[getter]
    fn device_count(&self) -> PyResult<u32> {
        Ok(self.get()?.device_count())
    }

    /// Whether `close` or the end of the `with` block has given up this object.
    #[getter]
    fn is_closed(&self) -> bool {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn __repr__(&self) -> String {
        match self.get() {
            Ok(runtime) => format!("<highwater.Runtime {}>", runtime.identity().name),
            Err(_) => "<highwater.Runtime, closed>".to_owned(),
        }
    }

    /// Returns the device with an ordinal. Raises `InvalidArgument` if there is none.
    #[pyo3(signature = (ordinal=Ordinal(0)), text_signature = "($self, ordinal=0)")]
    fn device(&self, py: Python<'_>, ordinal: Ordinal) -> PyResult<Device> {
        let runtime = self.get()?;
        let device = py.detach(|| runtime.device(ordinal.0)).map_err(raised)?;
        Ok(Device(Detached::new(device)))
    }

    /// Returns page-locked host memory of a shape and a type, from the pool. The contents are unspecified.
    ///
    /// Raises `OutOfMemory`, or `InvalidArgument` for a shape that exceeds the address space or the cap of the pool. The variable
    /// `HIGHWATER_HOST_MEMORY` sets the cap, as `cap=8GiB`.
    fn pinned(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Pinned> {
        pinned(py, &**self.get()?, None, shape, dtype)
    }

    /// Opens the memory of a ticket, which another process shares. Waits until the work that was enqueued before the share is done.
    ///
    /// The buffer keeps the memory in the process that shares it. For a ticket of this runtime, it is the original memory.
    /// `owner_death` says what happens when that process dies. With `"keep"`, the memory stays while the buffer does. With
    /// `"release"`, it is released, and each operation on the buffer raises `Expired`. With `"inherit"`, this process becomes the
    /// owner, and tickets stay valid.
    ///
    /// Raises `Expired` or `PeerLost` if the memory is gone, `DeviceMissing` if its device is not visible here, and
    /// `PermissionDenied`, `Unsupported`, `InvalidState` or `OperatingSystem` otherwise.
    #[pyo3(signature = (ticket, *, owner_death="keep"))]
    pub(crate) fn open_shared(&self, py: Python<'_>, ticket: &Ticket, owner_death: &str) -> PyResult<Buffer> {
        let runtime = self.get()?;
        let options = import_options("open_shared", owner_death)?;
        let (dtype, named) = (ticket.dtype, &ticket.ticket);
        let open = || {
            let values = make_values!(dtype, runtime.open_shared_with(named, &options))?;
            opened(&runtime, values, &ticket.shape, dtype)
        };
        py.detach(open).map_err(raised)
    }

    /// Returns one message by which other processes open many buffers, with one request for each allocation among them.
    ///
    /// The buffers may be of any shapes, types and devices. Raises the errors of `Buffer.share`, with the place of the buffer.
    fn share_all(&self, py: Python<'_>, buffers: Vec<Bound<'_, Buffer>>) -> PyResult<TicketBatch> {
        let runtime = self.get()?;
        let memories: Vec<_> = buffers.iter().map(|buffer| Arc::clone(&buffer.get().0)).collect();
        let share = || {
            let slices = memories.iter().map(|memory| memory.as_bytes()).collect::<Result<Vec<_>, Error>>()?;
            runtime.share_all(&slices)
        };
        let batch = py.detach(share).map_err(raised)?;
        Ok(TicketBatch { batch, kinds: memories.iter().map(|memory| (memory.shape.clone(), memory.dtype)).collect() })
    }

    /// Opens the buffers of a batch, in order. If one allocation cannot be opened, opens none. Otherwise as `open_shared`.
    #[pyo3(signature = (batch, *, owner_death="keep"))]
    fn open_shared_all(&self, py: Python<'_>, batch: &TicketBatch, owner_death: &str) -> PyResult<Vec<Buffer>> {
        const OPERATION: &str = "open_shared_all";
        let runtime = self.get()?;
        let options = import_options(OPERATION, owner_death)?;
        let open = || {
            // This opens each allocation once. Opens of values of more than a byte then find it mapped.
            let bytes = runtime.open_shared_all_with::<u8>(&batch.batch, &options)?;
            let missing = || Error::new(ErrorKind::InvalidArgument, OPERATION, "the batch has no such buffer");
            let typed = |(place, bytes): (usize, DeviceBuffer<u8>)| {
                let (shape, dtype) = batch.kinds.get(place).ok_or_else(missing)?;
                if dtype.bytes() == 1 {
                    return opened(&runtime, Values::One(bytes), shape, *dtype);
                }
                let named = batch.batch.ticket(place).ok_or_else(missing)?;
                let values = make_values!(*dtype, runtime.open_shared_with(&named, &options))?;
                opened(&runtime, values, shape, *dtype)
            };
            bytes.into_iter().enumerate().map(typed).collect::<Result<Vec<_>, Error>>()
        };
        py.detach(open).map_err(raised)
    }

    /// Returns the state and the history of the pools.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let runtime = self.get()?;
        statistics::of(py, &py.detach(|| runtime.statistics()))
    }

    /// Releases idle memory, handles and workspaces of all pools. Waits for the devices.
    fn trim(&self, py: Python<'_>) -> PyResult<()> {
        let runtime = self.get()?;
        py.detach(|| runtime.trim()).map_err(raised)
    }

    /// Releases idle device memory.
    fn trim_device_memory(&self, py: Python<'_>) -> PyResult<()> {
        let runtime = self.get()?;
        py.detach(|| runtime.trim_device_memory()).map_err(raised)
    }

    /// Ends the runtime: waits for the devices and frees everything. A second call does nothing.
    ///
    /// Raises `InvalidState` while a device, stream, event, buffer or array is alive. The runtime then ends with the last of them.
    /// Raises `Forked` in a child of `os.fork`, and `Capture` in a function that `Stream.capture` records. Both change nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.generation.is_current() && !self.is_closed() {
            return Err(raised(Generation::error("close")));
        }
        if let Ok(runtime) = self.get()
            && let Err(error) = runtime.check_outside_capture("close")
            && error.kind() == highwater::ErrorKind::Capture
        {
            return Err(raised(error));
        }
        let Some(runtime) = self.take() else { return Ok(()) };
        let close = || {
            let last: highwater::Runtime = (**runtime).clone();
            drop(runtime);
            last.close()
        };
        py.detach(close).map(drop).map_err(raised)
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().get()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_arguments))]
    fn __exit__(&self, _arguments: &Bound<'_, PyTuple>) -> bool {
        drop(self.take());
        false
    }
}

/// A device of a runtime. `Runtime.device` returns it.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Device(Detached<highwater::Device>);

impl Device {
    fn made(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        is_shared: bool,
    ) -> PyResult<Buffer> {
        let (dtype, shape) = (DType::of(dtype)?, shape_of(shape)?);
        let (len, device) = (count(&shape, dtype)?, &*self.0);
        let make = || match is_shared {
            true => make_values!(dtype, device.allocate_shared(len)),
            false => make_values!(dtype, device.allocate(len)),
        };
        let values = py.detach(make).map_err(raised)?;
        Ok(Buffer::new(Memory::new(values, device.clone(), dtype, shape)))
    }

    fn stream(&self, made: Result<highwater::Stream, Error>) -> PyResult<Stream> {
        Ok(Stream::new(made.map_err(raised)?, self.0.clone()))
    }
}

#[pymethods]
impl Device {
    /// The number of the device in this process, from 0.
    #[getter]
    fn ordinal(&self) -> u32 {
        self.0.ordinal()
    }

    /// The vendor's name of the device.
    #[getter]
    fn name(&self) -> String {
        self.0.info().name.clone()
    }

    /// The id that names the device in every process: 32 hexadecimal digits.
    #[getter]
    fn uuid(&self) -> String {
        hexadecimal(&self.0.info().uuid)
    }

    /// The vendor's architecture, such as `"sm_90"`.
    #[getter]
    fn architecture(&self) -> String {
        self.0.info().architecture.clone()
    }

    /// Bytes of memory of the device.
    #[getter]
    fn memory_bytes(&self) -> u64 {
        self.0.info().memory_bytes
    }

    /// The NUMA node that the device is attached to. `None` if unknown.
    #[getter]
    fn numa_node(&self) -> Option<u32> {
        self.0.info().numa_node
    }

    fn __repr__(&self) -> String {
        format!("<highwater.Device {} {:?}>", self.0.ordinal(), self.0.info().name)
    }

    /// Returns the free and the total bytes of the device.
    fn memory_info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let info = py.detach(|| self.0.memory_info()).map_err(raised)?;
        py.import("highwater._statistics")?.call_method1("MemoryInfo", (info.free, info.total))
    }

    /// Creates a stream. Raises the backend's `Error`.
    fn create_stream(&self, py: Python<'_>) -> PyResult<Stream> {
        self.stream(py.detach(|| self.0.create_stream()))
    }

    /// Returns the vendor's legacy default stream. Raises `Unsupported` if the device has none.
    fn default_stream(&self, py: Python<'_>) -> PyResult<Stream> {
        self.stream(py.detach(|| self.0.legacy_default_stream()))
    }

    /// Wraps a stream of other code: a stream of PyTorch, or a handle (`cudaStream_t`, `hipStream_t`) as a number.
    ///
    /// For a stream of PyTorch, such as `torch.cuda.current_stream()`, 0 is the legacy default stream. As a number, 0 is refused on
    /// CUDA, because it names one of two streams. The caller must keep the stream until this object, and every buffer that was used
    /// on it, are gone. A handle that names no stream may crash the process.
    ///
    /// Raises `WrongDevice` for a stream of another device, and `InvalidArgument` or the vendor's error for other handles.
    fn stream_from_raw(&self, stream: &Bound<'_, PyAny>) -> PyResult<Stream> {
        let (py, torchs) = (stream.py(), stream.getattr_opt("cuda_stream")?);
        let raw: u64 = whole("stream_from_raw", "stream", torchs.as_ref().unwrap_or(stream))?;
        if torchs.is_some() && raw == 0 {
            // PyTorch means the legacy default stream by it.
            return self.default_stream(py);
        }
        // SAFETY: The caller passes a live stream of the device, and keeps it, as the documentation requires.
        self.stream(py.detach(|| unsafe { self.0.stream_from_raw(raw) }))
    }

    /// Allocates device memory of a shape and a type, for every stream. The contents are unspecified.
    ///
    /// Raises `OutOfMemory`, or `InvalidArgument` for a shape that exceeds the address space.
    fn allocate(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        self.made(py, shape, dtype, false)
    }

    /// Allocates device memory that other processes can open by a ticket; see `Buffer.share`. The contents are unspecified.
    ///
    /// Raises `Unsupported` if the device cannot share memory; else as `allocate`.
    fn allocate_shared(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        self.made(py, shape, dtype, true)
    }

    /// Makes a buffer over device memory that other code allocated and `keep` keeps, from the address `ptr` on.
    ///
    /// The buffer never frees the memory. `keep` is dropped after the buffer, after its last use here, and after the last use by
    /// each process that opened a ticket. The memory must stay allocated until then. The caller must order its own work with that of
    /// this package: see `Stream.note_device_use`. Processes that open a ticket reach the whole allocation around the buffer.
    ///
    /// Raises `InvalidPointer` if the range is in no allocation, `WrongDevice` for memory of another device, and `InvalidArgument`
    /// for no bytes or an address that is not aligned.
    fn adopt(
        &self,
        ptr: &Bound<'_, PyAny>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        keep: Py<PyAny>,
    ) -> PyResult<Buffer> {
        let ptr: u64 = whole("adopt", "ptr", ptr)?;
        let (py, dtype, shape) = (shape.py(), DType::of(dtype)?, shape_of(shape)?);
        let (bytes, device) = (count(&shape, dtype)? * dtype.bytes(), &*self.0);
        // SAFETY: The caller keeps the memory by `keep`, as the documentation requires. A reference to a Python object may be
        // dropped in any thread.
        let make = || unsafe { make_values!(dtype, device.adopt(DevicePtr::new(ptr), bytes, keep)) };
        let values = py.detach(make).map_err(raised)?;
        Ok(Buffer::new(Memory::new(values, device.clone(), dtype, shape)))
    }

    /// Returns page-locked host memory on the NUMA node of the device; else as `Runtime.pinned`.
    fn pinned(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Pinned> {
        pinned(py, &highwater::Runtime::from(self.0.runtime().clone()), Some(&self.0), shape, dtype)
    }

    /// Waits for all work of the device, also that of other code. Raises the error of failed work. Ctrl-C is seen when the wait ends.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.synchronize()).map_err(raised)
    }
}
