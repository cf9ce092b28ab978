//! [`Ticket`]: names memory of another process. [`Owner`]: that process.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::fd::{AsFd as _, AsRawFd as _};

use highwater::hal::counted;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::arrays::{count, shape_of, whole};
use crate::dtype::DType;
use crate::error::{invalid, raised};
use crate::waits;

/// Names shared memory for other processes. `Buffer.share` returns it. It can be pickled, and goes through queues.
///
/// The memory stays shared while the process that shared it runs and keeps the buffer, or another process has it open.
/// `Ticket(data, shape, dtype)` makes one of the bytes of `to_bytes`. It raises an `Error` for other bytes, and `InvalidArgument`
/// if the shape does not fit. By default, the values are bytes. The bytes may hold a secret, so keep them from other users.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Ticket {
    pub(crate) ticket: highwater::Ticket,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

impl Ticket {
    pub(crate) fn with(ticket: highwater::Ticket, dtype: DType, shape: Vec<usize>) -> Self {
        Self { ticket, dtype, shape }
    }

    /// Reads the bytes of a ticket whose values are of the type and the shape.
    pub(crate) fn of_bytes(data: &[u8], dtype: DType, shape: Option<Vec<usize>>) -> PyResult<Self> {
        let ticket = highwater::Ticket::from_bytes(data).map_err(raised)?;
        let size = dtype.bytes();
        let shape = shape.unwrap_or_else(|| vec![usize::try_from(ticket.bytes()).unwrap_or(usize::MAX) / size]);
        let bytes = count(&shape, dtype)? * size;
        if bytes as u64 != ticket.bytes() {
            let message = format!(
                "the shape {shape:?} of {} has {}, the ticket names {}",
                dtype.name(),
                counted(bytes, "byte"),
                ticket.bytes()
            );
            return Err(invalid("ticket", message, "pass the shape and the type of the buffer that was shared"));
        }
        Ok(Self { ticket, dtype, shape })
    }

    fn parts(&self) -> (Vec<u8>, &'static str, &[usize]) {
        (self.ticket.to_bytes().to_vec(), self.dtype.name(), &self.shape)
    }
}

#[pymethods]
impl Ticket {
    #[new]
    #[pyo3(signature = (data, shape=None, dtype=None))]
    fn new(data: &[u8], shape: Option<&Bound<'_, PyAny>>, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let dtype = dtype.map_or(Ok(DType::UInt8), DType::of)?;
        Self::of_bytes(data, dtype, shape.map(shape_of).transpose()?)
    }

    /// Returns the ticket as 136 bytes, without the shape and the type. Programs in Rust use the same bytes. The text of the C library is
    /// `to_bytes().hex()`.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.ticket.to_bytes())
    }

    /// The lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The name of the type, such as `"float32"`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Bytes of the values.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.ticket.bytes()
    }

    /// The id of the process that shared the memory, as that process sees it.
    #[getter]
    fn exporter_pid(&self) -> u32 {
        self.ticket.exporter_pid()
    }

    /// The UUID of the device: 32 hexadecimal digits.
    #[getter]
    fn device_uuid(&self) -> String {
        hexadecimal(&self.ticket.device_uuid())
    }

    /// Pickles the ticket, as queues do.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, this) = (slf.py(), slf.get());
        let arguments = (this.to_bytes(py), this.shape(py)?, this.dtype());
        Ok((slf.get_type().into_any(), arguments.into_pyobject(py)?))
    }

    /// Whether both name the same memory, with the same shape and type.
    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| self.parts() == other.get().parts())
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.parts().hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        // Without its secret.
        let pid = self.ticket.exporter_pid();
        format!("<highwater.Ticket {:?} {} of process {pid}>", self.shape, self.dtype.name())
    }
}

/// Names many buffers that share few allocations. `Runtime.share_all` returns it. It can be pickled, and goes through queues.
///
/// `TicketBatch(data, kinds)` makes one of the bytes of `to_bytes` and of `kinds`. It raises an `Error` for other bytes, and
/// `InvalidArgument` if the shapes do not fit. By default, the values are bytes.
///
/// It has 20 bytes for each buffer and 84 for each allocation. A `Ticket` has 136 bytes for both. The bytes may hold secrets, so keep
/// them from other users.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct TicketBatch {
    pub(crate) batch: highwater::TicketBatch,
    pub(crate) kinds: Vec<(Vec<usize>, DType)>,
}

#[pymethods]
impl TicketBatch {
    #[new]
    #[pyo3(signature = (data, kinds=None))]
    fn new(data: &[u8], kinds: Option<Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>>) -> PyResult<Self> {
        let batch = highwater::TicketBatch::from_bytes(data).map_err(raised)?;
        let Some(kinds) = kinds else {
            let bytes =
                |place| batch.ticket(place).map_or(0, |ticket| usize::try_from(ticket.bytes()).unwrap_or(usize::MAX));
            let kinds = (0..batch.len()).map(|place| (vec![bytes(place)], DType::UInt8)).collect();
            return Ok(Self { batch, kinds });
        };
        let read = |(shape, dtype): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((shape_of(&shape)?, DType::of(&dtype)?));
        let kinds = kinds.into_iter().map(read).collect::<PyResult<Vec<_>>>()?;
        const HINT: &str = "pass the shapes and the types of the buffers that were shared";
        if kinds.len() != batch.len() {
            let message = format!("{} for {}", counted(kinds.len(), "shape"), counted(batch.len(), "buffer"));
            return Err(invalid("ticket_batch", message, HINT));
        }
        for (place, (shape, dtype)) in kinds.iter().enumerate() {
            let bytes = (count(shape, *dtype)? * dtype.bytes()) as u64;
            let named = batch.ticket(place).map(|ticket| ticket.bytes());
            if named != Some(bytes) {
                let message =
                    format!("buffer {place}: the shape {shape:?} of {} has {}", dtype.name(), counted(bytes, "byte"));
                return Err(invalid("ticket_batch", message, HINT));
            }
        }
        Ok(Self { batch, kinds })
    }

    /// Returns the ticket of one buffer. Raises `InvalidArgument` if the batch has no such buffer.
    fn ticket(&self, place: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        let place: usize = whole("ticket_batch", "place", place)?;
        let named = self.batch.ticket(place).zip(self.kinds.get(place));
        let (ticket, (shape, dtype)) = named.ok_or_else(|| {
            let message = format!("there is no buffer {place}, because the batch has {}", self.batch.len());
            invalid("ticket_batch", message, "pass the place of a buffer, from 0")
        })?;
        Ok(Ticket::with(ticket, *dtype, shape.clone()))
    }

    /// Returns the batch as bytes, without the shapes and the types. Programs in Rust use the same bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.batch.to_bytes())
    }

    /// The shape and the name of the type of each buffer.
    #[getter]
    fn kinds<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyTuple>, &'static str)>> {
        self.kinds.iter().map(|(shape, dtype)| Ok((PyTuple::new(py, shape)?, dtype.name()))).collect()
    }

    /// The number of allocations. A process opens each of them once.
    #[getter]
    fn allocations(&self) -> usize {
        self.batch.allocations()
    }

    /// The number of buffers.
    fn __len__(&self) -> usize {
        self.batch.len()
    }

    /// Pickles the batch, as queues do.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, this) = (slf.py(), slf.get());
        let arguments = (this.to_bytes(py), this.kinds(py)?);
        Ok((slf.get_type().into_any(), arguments.into_pyobject(py)?))
    }

    fn __repr__(&self) -> String {
        format!(
            "<highwater.TicketBatch of {} in {}>",
            counted(self.batch.len(), "buffer"),
            counted(self.batch.allocations(), "allocation")
        )
    }
}

/// The process that owns memory which this process opened. `Buffer.owner` returns it.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Owner(pub(crate) highwater::Owner);

#[pymethods]
impl Owner {
    /// The id of the process. `None` for a process of another PID namespace.
    #[getter]
    fn pid(&self) -> Option<u32> {
        self.0.pid()
    }

    /// Whether the process is alive.
    #[getter]
    fn is_alive(&self) -> bool {
        self.0.is_alive()
    }

    /// Returns a descriptor that becomes readable when the process dies, for `select` and for `add_reader` of an `asyncio` loop. It is
    /// open while this object lives.
    fn fileno(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }

    /// Waits for the death of the process, for at most `timeout` seconds. Returns whether it is dead.
    ///
    /// `None` and infinity are no limit. Ctrl-C ends the wait. Raises `InvalidArgument` for a negative time or one that is no number.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = waits::limit("wait", timeout)?;
        waits::wait_for(py, limit, |slice| self.0.wait(slice))
    }

    fn __repr__(&self) -> String {
        let state = if self.0.is_alive() { "alive" } else { "dead" };
        match self.0.pid() {
            Some(pid) => format!("<highwater.Owner, process {pid}, {state}>"),
            None => format!("<highwater.Owner, a process of another PID namespace, {state}>"),
        }
    }
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
