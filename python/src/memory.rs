//! [`Buffer`] and [`Pinned`]: memory of a device and page-locked memory, with a shape and a type.
//!
//! Other code learns the address of memory through DLPack, the array interfaces and `ptr`. Highwater does not see its work. So the
//! end of such memory waits for the devices first: nothing is reused under running work. If that wait fails, the memory is leaked.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use highwater::hal::fork::Generation;
use highwater::half::{bf16, f16};
use highwater::{DeviceBuffer, DeviceSlice, Error, PinnedBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arrays::as_array;
use crate::detached::{Detached, detached};
use crate::dlpack::{self, Export};
use crate::dtype::DType;
use crate::error::{raised, unsupported};
use crate::graph::{after_captures, is_any_capture_open};
use crate::stream::{Queue, StreamOf};
use crate::ticket::{Owner, Ticket};

/// Values on a device, as a type that products know or one of the same size.
pub(crate) enum Values {
    Half(DeviceBuffer<f16>),
    Brain(DeviceBuffer<bf16>),
    Single(DeviceBuffer<f32>),
    Double(DeviceBuffer<f64>),
    One(DeviceBuffer<u8>),
    Two(DeviceBuffer<u16>),
    Four(DeviceBuffer<u32>),
    Eight(DeviceBuffer<u64>),
    Sixteen(DeviceBuffer<u128>),
}

/// Evaluates an expression with the buffer of any type.
macro_rules! with_values {
    ($values:expr, $buffer:ident => $do:expr) => {
        match $values {
            $crate::memory::Values::Half($buffer) => $do,
            $crate::memory::Values::Brain($buffer) => $do,
            $crate::memory::Values::Single($buffer) => $do,
            $crate::memory::Values::Double($buffer) => $do,
            $crate::memory::Values::One($buffer) => $do,
            $crate::memory::Values::Two($buffer) => $do,
            $crate::memory::Values::Four($buffer) => $do,
            $crate::memory::Values::Eight($buffer) => $do,
            $crate::memory::Values::Sixteen($buffer) => $do,
        }
    };
}
pub(crate) use with_values;

/// Makes values of the type that a `DType` names, by an expression that yields a `Result` of a buffer of any type.
macro_rules! make_values {
    ($dtype:expr, $make:expr) => {{
        use $crate::dtype::DType as D;
        use $crate::memory::Values as V;
        match $dtype {
            D::Float16 => $make.map(V::Half),
            D::BFloat16 => $make.map(V::Brain),
            D::Float32 => $make.map(V::Single),
            D::Float64 => $make.map(V::Double),
            D::Bool | D::Int8 | D::UInt8 => $make.map(V::One),
            D::Int16 | D::UInt16 => $make.map(V::Two),
            D::Int32 | D::UInt32 => $make.map(V::Four),
            D::Int64 | D::UInt64 | D::Complex64 => $make.map(V::Eight),
            D::Complex128 => $make.map(V::Sixteen),
        }
    }};
}
pub(crate) use make_values;

/// The streams that used a buffer.
#[derive(Default)]
struct Uses {
    streams: Vec<Weak<Queue>>,
    /// Whether one of them is gone or a graph may use the buffer, so that only the device knows when its work ends.
    forgot: bool,
}

/// Memory of a device.
pub(crate) struct Memory {
    pub(crate) values: ManuallyDrop<Values>,
    pub(crate) device: highwater::Device,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    uses: Mutex<Uses>,
    is_exported: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    pub(crate) fn new(values: Values, device: highwater::Device, dtype: DType, shape: Vec<usize>) -> Self {
        let (uses, is_exported) = (Mutex::default(), AtomicBool::new(false));
        Self { values: ManuallyDrop::new(values), device, dtype, shape, uses, is_exported }
    }

    pub(crate) fn len(&self) -> usize {
        with_values!(&*self.values, buffer => buffer.len())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len() * self.dtype.bytes()
    }

    /// Returns all values as bytes.
    pub(crate) fn as_bytes(&self) -> Result<DeviceSlice<'_, u8>, Error> {
        with_values!(&*self.values, buffer => Ok(buffer.slice(0..buffer.len())?.as_bytes()))
    }

    /// Returns a range of values as bytes.
    pub(crate) fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, u8>, Error> {
        with_values!(&*self.values, buffer => Ok(buffer.slice(range)?.as_bytes()))
    }

    pub(crate) fn address(&self) -> u64 {
        with_values!(&*self.values, buffer => buffer.ptr().get())
    }

    pub(crate) fn is_imported(&self) -> bool {
        with_values!(&*self.values, buffer => buffer.owner().is_some())
    }

    /// Notes that a stream is about to use the memory. The caller holds the interpreter's lock, as at a fork.
    pub(crate) fn note(&self, _: Python<'_>, stream: &Arc<Queue>) {
        let mut uses = lock(&self.uses);
        // Launches of the graph use it on any stream.
        uses.forgot |= is_any_capture_open();
        let stream = Arc::downgrade(stream);
        if uses.streams.iter().any(|known| known.ptr_eq(&stream)) {
            return;
        }
        let before = uses.streams.len();
        uses.streams.retain(|known| known.strong_count() > 0);
        uses.forgot |= uses.streams.len() < before;
        uses.streams.push(stream);
    }

    /// Returns the streams that used the memory, and whether other work did.
    fn used_by(&self, _: Python<'_>) -> (Vec<Arc<Queue>>, bool) {
        let uses = lock(&self.uses);
        let streams: Vec<_> = uses.streams.iter().filter_map(Weak::upgrade).collect();
        let forgot = uses.forgot || streams.len() < uses.streams.len();
        drop(uses);
        (streams, forgot)
    }

    /// Waits until the work that this package enqueued on the memory is done.
    pub(crate) fn settle(&self, py: Python<'_>) -> PyResult<()> {
        let (streams, forgot) = self.used_by(py);
        let wait = || {
            if forgot {
                return self.device.synchronize();
            }
            streams.iter().try_for_each(|stream| stream.synchronize())
        };
        py.detach(wait).map_err(raised)
    }

    /// Makes a stream wait for the work that this package enqueued on the memory.
    pub(crate) fn order(&self, py: Python<'_>, before: &StreamOf) -> PyResult<()> {
        let (streams, forgot) = self.used_by(py);
        let order = || {
            if forgot {
                self.device.synchronize()?;
            }
            streams
                .iter()
                .filter(|stream| stream.id() != before.id())
                .try_for_each(|stream| before.wait(&stream.record()?))
        };
        py.detach(order).map_err(raised)
    }

    /// From here on, other code may use the memory.
    pub(crate) fn export(&self) {
        self.is_exported.store(true, Ordering::Relaxed);
    }

    /// Returns the memory as a tensor of DLPack. The caller must pass a type and a shape of at most its bytes.
    pub(crate) fn exported(self: &Arc<Self>, device: (i32, u32), dtype: DType, shape: Vec<usize>) -> Export {
        self.export();
        Export { address: self.address(), device, dtype, shape, keeps: Box::new(Arc::clone(self)) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: The values are not used afterward.
        let values = unsafe { ManuallyDrop::take(&mut self.values) };
        if !*self.is_exported.get_mut() {
            return detached(move || drop(values));
        }
        let device = self.device.clone();
        let end = move || match device.synchronize() {
            // Work of other code may still use it.
            Err(_) => std::mem::forget(values),
            Ok(()) => drop(values),
        };
        after_captures(|| detached(end));
    }
}

/// Values in the memory of a device, with a shape and a type, in row-major order.
///
/// Dropping a buffer frees its memory after the work that uses it. If other code got its address (`ptr`, `__dlpack__`,
/// `__cuda_array_interface__`), the drop first waits for the device. Such code must use the memory on that device only.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Buffer(pub(crate) Arc<Memory>);

impl Buffer {
    pub(crate) fn new(memory: Memory) -> Self {
        Self(Arc::new(memory))
    }
}

#[pymethods]
impl Buffer {
    /// The lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.shape)
    }

    /// The name of the type, such as `"float32"`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    /// Bytes of the values.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }

    /// The ordinal of the device.
    #[getter]
    fn device(&self) -> u32 {
        self.0.device.ordinal()
    }

    /// The device address of the first value, for kernels and copies of other code.
    ///
    /// The caller must keep the buffer until it has enqueued that work, and order the work after that of other streams.
    #[getter]
    fn ptr(&self) -> u64 {
        self.0.export();
        self.0.address()
    }

    /// The process that owns the memory. `None` for memory of this runtime.
    #[getter]
    fn owner(&self) -> Option<Owner> {
        with_values!(&*self.0.values, buffer => buffer.owner()).map(Owner)
    }

    fn __len__(&self) -> PyResult<usize> {
        self.0.shape.first().copied().ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("len() of a single value"))
    }

    fn __repr__(&self) -> String {
        let shape = &self.0.shape;
        format!("<highwater.Buffer {shape:?} {} on device {}>", self.0.dtype.name(), self.0.device.ordinal())
    }

    /// Returns a ticket by which other processes open the memory. When they have, all work enqueued on it before is done.
    ///
    /// Works for memory of `Device.allocate_shared`, for memory that another process shares, and for adopted memory that the device
    /// can share. Raises `InvalidArgument` for other memory.
    fn share(&self, py: Python<'_>) -> PyResult<Ticket> {
        let memory = &self.0;
        let ticket = py.detach(|| with_values!(&*memory.values, buffer => buffer.share())).map_err(raised)?;
        Ok(Ticket::with(ticket, memory.dtype, memory.shape.clone()))
    }

    /// Waits for the work of this package's streams on the buffer. Ctrl-C is seen when the wait ends.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.0.settle(py)
    }

    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(i32, u32)> {
        Ok((dlpack::kind_of(py, &self.0)?, dlpack::ordinal_of(&self.0)?))
    }

    /// Refuses NumPy, which would make an array of one object.
    #[pyo3(signature = (*_arguments, **_named))]
    fn __array__(&self, _arguments: &Bound<'_, PyTuple>, _named: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
        Err(PyTypeError::new_err("a Buffer is device memory: copy its values with `Stream.download(buffer)`"))
    }

    /// Refuses to be pickled or copied.
    fn __reduce__(&self) -> PyResult<()> {
        let message = "a Buffer cannot be pickled or copied: send `buffer.share()`, and open the ticket with `Runtime.open_shared`";
        Err(PyTypeError::new_err(message))
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    pub(crate) fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let memory = &self.0;
        let device = self.__dlpack_device__(py)?;
        dlpack::check_request(device, dl_device, copy)?;
        dlpack::hand_over(py, memory, device.0, stream)?;
        memory.exported(device, memory.dtype, memory.shape.clone()).into_capsule(py, max_version)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let memory = &self.0;
        if dlpack::kind_of(py, memory)? != dlpack::CUDA {
            return Err(pyo3::exceptions::PyAttributeError::new_err("the buffer is not on a CUDA device"));
        }
        if memory.dtype == DType::BFloat16 {
            return Err(unsupported("__cuda_array_interface__", "it has no bfloat16", "use DLPack, which has it"));
        }
        // Version 3 without a stream: the values are there.
        memory.settle(py)?;
        memory.export();
        let interface = PyDict::new(py);
        interface.set_item("shape", PyTuple::new(py, &memory.shape)?)?;
        interface.set_item("typestr", memory.dtype.typestr())?;
        interface.set_item("data", (if memory.len() == 0 { 0 } else { memory.address() }, false))?;
        interface.set_item("strides", py.None())?;
        interface.set_item("stream", py.None())?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}

/// Page-locked memory.
pub(crate) struct HostMemory {
    buffer: ManuallyDrop<Mutex<PinnedBuffer<u8>>>,
    pub(crate) runtime: Detached<highwater::Runtime>,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    address: usize,
    bytes: usize,
    is_exported: AtomicBool,
    generation: Generation,
}

impl HostMemory {
    pub(crate) fn new(buffer: PinnedBuffer<u8>, runtime: highwater::Runtime, dtype: DType, shape: Vec<usize>) -> Self {
        let (address, bytes) = (buffer.ptr().as_ptr() as usize, buffer.len());
        let (buffer, runtime) = (ManuallyDrop::new(Mutex::new(buffer)), Detached::new(runtime));
        let (is_exported, generation) = (AtomicBool::new(false), Generation::current());
        Self { buffer, runtime, dtype, shape, address, bytes, is_exported, generation }
    }

    /// Runs `work` with the buffer, without the interpreter's lock.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        work: impl FnOnce(&mut PinnedBuffer<u8>) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        if !self.generation.is_current() {
            // Another thread of the parent may hold the lock forever.
            return Err(raised(Generation::error(operation)));
        }
        py.detach(|| work(&mut lock(&self.buffer))).map_err(raised)
    }

    fn export(&self) {
        self.is_exported.store(true, Ordering::Relaxed);
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: The buffer is not used afterward.
        let buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        if !*self.is_exported.get_mut() {
            return detached(move || drop(buffer));
        }
        let runtime = (*self.runtime).clone();
        let end = move || {
            // Work of any device may use the memory.
            match (0..runtime.device_count()).try_for_each(|device| runtime.device(device)?.synchronize()) {
                Err(_) => std::mem::forget(buffer),
                Ok(()) => drop(buffer),
            }
        };
        after_captures(|| detached(end));
    }
}

/// Values in page-locked memory of the host, which devices copy from and to at full speed.
///
/// `array` is the memory as a NumPy array. The CPU must not access the array while a copy writes it, nor write it while a copy
/// reads it: call `wait` first. After a `fork`, the child must not access it. Dropping the memory does not wait, unless other code
/// got its address (`ptr`, `array`, `__dlpack__`). Then the drop waits for all devices of the runtime, because such code may have
/// enqueued a copy.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Pinned(pub(crate) Arc<HostMemory>);

#[pymethods]
impl Pinned {
    /// The lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.shape)
    }

    /// The name of the type, such as `"float32"`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    /// Bytes of the values.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes
    }

    /// The address of the first value.
    #[getter]
    fn ptr(&self) -> usize {
        self.0.export();
        self.0.address
    }

    /// The memory as a NumPy array, without a copy. Waits for the copies that use it. The array keeps the memory.
    ///
    /// bfloat16 values are seen as their bits, in `uint16`.
    #[getter]
    fn array<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        as_array(slf.py())?.call1((slf,))
    }

    fn __len__(&self) -> PyResult<usize> {
        self.0.shape.first().copied().ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("len() of a single value"))
    }

    fn __repr__(&self) -> String {
        format!("<highwater.Pinned {:?} {}>", self.0.shape, self.0.dtype.name())
    }

    /// Waits for the copies that use the memory. Raises the error of a failed copy. Ctrl-C is seen when the wait ends.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.0.with(py, "wait", |buffer| buffer.write_with(|_| ()))
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.wait(py)?;
        self.0.export();
        let interface = PyDict::new(py);
        interface.set_item("shape", PyTuple::new(py, &self.0.shape)?)?;
        interface.set_item("typestr", self.0.dtype.typestr())?;
        interface.set_item("data", (self.0.address, false))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    fn __dlpack_device__(&self) -> (i32, u32) {
        (dlpack::CPU, 0)
    }

    /// Refuses to be pickled or copied.
    fn __reduce__(&self) -> PyResult<()> {
        let message = "a Pinned cannot be pickled or copied: send `pinned.array`, which copies the values";
        Err(PyTypeError::new_err(message))
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        dlpack::check_request(self.__dlpack_device__(), dl_device, copy)?;
        dlpack::check_no_stream(stream)?;
        self.wait(py)?;
        self.0.export();
        let export = Export {
            address: self.0.address as u64,
            device: self.__dlpack_device__(),
            dtype: self.0.dtype,
            shape: self.0.shape.clone(),
            keeps: Box::new(Arc::clone(&self.0)),
        };
        export.into_capsule(py, max_version)
    }
}
