//! [`Stream`] and [`Event`].

use std::ops::Deref;
use std::sync::Arc;

use highwater::hal::counted;
use highwater::half::{bf16, f16};
use highwater::{Access, DeviceBuffer, Error, GemmShape, Scalar, StridedBatch, Transpose};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arrays::{HostArray, count, shape_of};
use crate::detached::Detached;
use crate::dlpack;
use crate::dtype::DType;
use crate::error::{invalid, raised, unsupported};
use crate::graph::{self, Graph};
use crate::memory::{Buffer, Memory, Pinned, Values, make_values, with_values};
use crate::rows;
use crate::waits::Done;

/// A stream of the library. Buffers refer to the streams that used them.
pub(crate) type Queue = Detached<highwater::Stream>;

/// A stream that is not a class's own.
pub(crate) struct StreamOf(Queue);

impl StreamOf {
    pub(crate) fn new(stream: highwater::Stream) -> Self {
        Self(Detached::new(stream))
    }
}

impl Deref for StreamOf {
    type Target = highwater::Stream;

    fn deref(&self) -> &highwater::Stream {
        &self.0
    }
}

/// A queue of operations of one device, executed in the order of the calls.
///
/// Work of two streams on one buffer is ordered by the program, with `record` and `wait`. A buffer and page-locked memory may be
/// dropped while work uses them: their memory is reused after that work.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Stream {
    pub(crate) queue: Arc<Queue>,
    pub(crate) device: Detached<highwater::Device>,
}

impl Stream {
    pub(crate) fn new(stream: highwater::Stream, device: highwater::Device) -> Self {
        Self { queue: Arc::new(Detached::new(stream)), device: Detached::new(device) }
    }

    fn made(&self, py: Python<'_>, dtype: DType, shape: Vec<usize>) -> PyResult<Memory> {
        let len = count(&shape, dtype)?;
        let values = py.detach(|| make_values!(dtype, self.queue.allocate(len))).map_err(raised)?;
        let memory = Memory::new(values, self.device.clone(), dtype, shape);
        // The memory may have belonged to earlier work of this stream.
        memory.note(py, &self.queue);
        Ok(memory)
    }

    fn write_all(&self, py: Python<'_>, array: &HostArray<'_>, memory: &Memory) -> PyResult<()> {
        let bytes = array.bytes();
        memory.note(py, &self.queue);
        let write = || with_values!(&*memory.values, buffer => self.queue.write(bytes, buffer.slice(0..buffer.len())?.as_bytes()));
        py.detach(write).map_err(raised)
    }
}

/// Returns an error if two sides of a copy do not have the same values.
fn check_same(operation: &'static str, dst: (&[usize], DType), src: (&[usize], DType)) -> PyResult<()> {
    let len = |shape: &[usize]| shape.iter().product::<usize>();
    if dst.1 == src.1 && len(dst.0) == len(src.0) {
        return Ok(());
    }
    let message = format!(
        "the source has {:?} values of {}, the destination {:?} of {}",
        src.0,
        src.1.name(),
        dst.0,
        dst.1.name()
    );
    let hint = if dst.1 == src.1 { "pass as many values" } else { "pass as many values of the same type" };
    Err(invalid(operation, message, hint))
}

/// A matrix, or matrices of one shape, before a transposition.
#[derive(Clone, Copy)]
struct Stack<'m> {
    /// The lengths of the dimensions before the matrices. Empty for one matrix.
    leading: &'m [usize],
    rows: usize,
    columns: usize,
}

impl<'m> Stack<'m> {
    fn of(name: &str, memory: &'m Memory) -> PyResult<Self> {
        match memory.shape.as_slice() {
            [leading @ .., rows, columns] => Ok(Self { leading, rows: *rows, columns: *columns }),
            shape => {
                let message = format!("{name} has the shape {shape:?}");
                Err(invalid("matmul", message, "pass matrices, whose shapes have two or more lengths"))
            }
        }
    }

    /// Returns the rows and columns of the factor.
    fn transposed_if(self, is_transposed: bool) -> (usize, usize) {
        if is_transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }

    /// Elements from one matrix to the next. One matrix serves all products.
    fn stride(self) -> usize {
        if self.leading.is_empty() { 0 } else { self.rows * self.columns }
    }
}

#[pymethods]
impl Stream {
    /// The ordinal of the device.
    #[getter]
    fn device(&self) -> u32 {
        self.device.ordinal()
    }

    /// The vendor's handle as a number: a `cudaStream_t` on CUDA, a `hipStream_t` on ROCm.
    #[getter]
    fn raw(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.queue.raw()).map_err(raised)
    }

    fn __repr__(&self) -> String {
        format!("<highwater.Stream of device {}>", self.device.ordinal())
    }

    /// Waits for the work of the stream. Raises the error of failed work.
    ///
    /// Ctrl-C is seen when the wait ends. `await stream.done()` reacts at once.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.queue.synchronize()).map_err(raised)
    }

    /// Whether all work of the stream is done. Does not wait.
    #[getter]
    fn is_complete(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.queue.is_complete()).map_err(raised)
    }

    /// Returns a wait for the work that the stream has at the call: `await stream.done()`. The wait blocks no thread.
    fn done(&self, py: Python<'_>) -> PyResult<Done> {
        Done::new(py, || self.queue.done())
    }

    /// Records the point that the stream has reached. With `timed`, `Event.elapsed_ns` can measure from it.
    #[pyo3(signature = (*, timed=false))]
    fn record(&self, py: Python<'_>, timed: bool) -> PyResult<Event> {
        let record = || if timed { self.queue.record_timed() } else { self.queue.record() };
        Ok(Event(Detached::new(py.detach(record).map_err(raised)?)))
    }

    /// Makes all work enqueued from here on wait, on the device, for an event of any stream of the same runtime.
    fn wait(&self, py: Python<'_>, event: &Event) -> PyResult<()> {
        py.detach(|| self.queue.wait(&event.0)).map_err(raised)
    }

    /// Notes that work of other code on this stream uses a buffer, from the work before the call until the drop of the buffer.
    ///
    /// A later share of the buffer covers the work before this call. The memory stays until all of the work is done. The caller must
    /// put the work on this stream. Raises `InvalidPointer` for a buffer of another runtime, and `Capture` while other code captures
    /// the stream.
    fn note_device_use(&self, py: Python<'_>, buffer: &Buffer) -> PyResult<()> {
        let memory = &buffer.0;
        memory.note(py, &self.queue);
        let note = || with_values!(&*memory.values, buffer => self.queue.note_device_use(buffer, Access::Write));
        py.detach(note).map_err(raised)
    }

    /// Allocates device memory in the order of this stream, which is faster for scratch memory. The contents are unspecified.
    ///
    /// The first use on each other stream waits, on the device, for earlier work of this one. Raises the errors of
    /// `Device.allocate`.
    fn allocate(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        Ok(Buffer::new(self.made(py, DType::of(dtype)?, shape_of(shape)?)?))
    }

    /// Copies an array, or what NumPy makes one of, to new memory of the device. The values may change after the call.
    ///
    /// `dtype` converts the values. With `"bfloat16"`, the values must be `uint16` bits or of `ml_dtypes.bfloat16`. Raises the
    /// errors of `allocate`, and `InvalidArgument` for values of another type or byte order.
    #[pyo3(signature = (values, dtype=None))]
    fn upload(&self, values: &Bound<'_, PyAny>, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<Buffer> {
        let array = HostArray::of(values, dtype.map(DType::of).transpose()?)?;
        let memory = self.made(values.py(), array.dtype, array.shape.clone())?;
        self.write_all(values.py(), &array, &memory)?;
        Ok(Buffer::new(memory))
    }

    /// Copies an array to a buffer, which has as many values. The values are converted to its type as NumPy's `astype` does, also with a
    /// loss, and may change after the call.
    ///
    /// Raises `InvalidArgument` for another number of values.
    fn write(&self, values: &Bound<'_, PyAny>, dst: &Buffer) -> PyResult<()> {
        let array = HostArray::of(values, Some(dst.0.dtype))?;
        check_same("write", (&dst.0.shape, dst.0.dtype), (&array.shape, array.dtype))?;
        self.write_all(values.py(), &array, &dst.0)
    }

    /// Waits for the work of the stream on a buffer, and returns its values as a new array of the same shape.
    ///
    /// NumPy has no bfloat16: such values are returned as their bits, in `uint16`. Raises the error of failed work. Ctrl-C is seen
    /// when the wait ends; `await stream.done()` before the call reacts at once.
    fn download<'py>(&self, py: Python<'py>, src: &Buffer) -> PyResult<Bound<'py, PyAny>> {
        let memory = &src.0;
        let array = HostArray::empty(py, &memory.shape, memory.dtype)?;
        // SAFETY: The array is new, and kept here.
        let bytes = unsafe { array.bytes_mut() };
        memory.note(py, &self.queue);
        let copy = |dst| {
            self.queue.scope(|scope| {
                with_values!(&*memory.values, buffer => scope.copy_to_host(buffer.slice(0..buffer.len())?.as_bytes(), dst))
            })
        };
        py.detach(|| copy(bytes)).map_err(raised)?;
        Ok(array.object)
    }

    /// Enqueues a copy between buffers, or between a buffer and page-locked memory. Returns at once.
    ///
    /// The values of `src` must stay until the copy is done; see `Pinned.wait`. Either object may be dropped. Both sides need as many
    /// values of the same type. Raises `InvalidArgument` if they have not, and `InvalidPointer` for memory of another runtime.
    fn copy(&self, src: &Bound<'_, PyAny>, dst: &Bound<'_, PyAny>) -> PyResult<()> {
        const OPERATION: &str = "copy";
        let py = src.py();
        let queue = &self.queue;
        if let (Ok(src), Ok(dst)) = (src.cast::<Buffer>(), dst.cast::<Buffer>()) {
            let (src, dst) = (&src.get().0, &dst.get().0);
            check_same(OPERATION, (&dst.shape, dst.dtype), (&src.shape, src.dtype))?;
            src.note(py, queue);
            dst.note(py, queue);
            let copy = || {
                with_values!(&*src.values, from => with_values!(&*dst.values, to => {
                    queue.copy(from.slice(0..from.len())?.as_bytes(), to.slice(0..to.len())?.as_bytes())
                }))
            };
            return py.detach(copy).map_err(raised);
        }
        if let (Ok(src), Ok(dst)) = (src.cast::<Pinned>(), dst.cast::<Buffer>()) {
            let (src, dst) = (&src.get().0, &dst.get().0);
            check_same(OPERATION, (&dst.shape, dst.dtype), (&src.shape, src.dtype))?;
            dst.note(py, queue);
            return src.with(py, OPERATION, |pinned| {
                with_values!(&*dst.values, to => queue.copy_to_device(&*pinned, to.slice(0..to.len())?.as_bytes()))
            });
        }
        if let (Ok(src), Ok(dst)) = (src.cast::<Buffer>(), dst.cast::<Pinned>()) {
            let (src, dst) = (&src.get().0, &dst.get().0);
            check_same(OPERATION, (&dst.shape, dst.dtype), (&src.shape, src.dtype))?;
            src.note(py, queue);
            return dst.with(py, OPERATION, |pinned| {
                with_values!(&*src.values, from => queue.copy_to_host(from.slice(0..from.len())?.as_bytes(), pinned))
            });
        }
        Err(PyTypeError::new_err("copy takes a Buffer and a Buffer, a Pinned and a Buffer, or a Buffer and a Pinned"))
    }

    /// Enqueues a copy of a part of `src` to a part of `dst`, as `dst[dst_part] = src[src_part]` does in NumPy. Returns at once.
    ///
    /// A part is a slice of the rows, or a tuple of a slice of the rows and a slice of the columns, such as `np.s_[10:20, 0:64]`.
    /// Without a part, all values are copied. Rows may have a step, such as `np.s_[::2]`; columns have none. Lengths are counts of
    /// values. Both sides have two or more dimensions and the same type, and both parts have the same shape. Values of `dst` outside
    /// its part stay. One side may be page-locked memory.
    ///
    /// Both parts may lie in one buffer, if no row of one overlaps a row of the other. As in `copy`, the values of `src` must stay until
    /// the copy is done. Raises `InvalidArgument` for parts of two shapes or types, for a step of columns or a negative step, and for
    /// parts that overlap; `InvalidPointer` for memory of another runtime.
    #[pyo3(signature = (src, dst, src_part=None, dst_part=None))]
    fn copy_2d(
        &self,
        src: &Bound<'_, PyAny>,
        dst: &Bound<'_, PyAny>,
        src_part: Option<&Bound<'_, PyAny>>,
        dst_part: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = src.py();
        let queue = &self.queue;
        if let (Ok(src), Ok(dst)) = (src.cast::<Buffer>(), dst.cast::<Buffer>()) {
            let (src, dst) = (&src.get().0, &dst.get().0);
            let rows = rows::between((&src.shape, src.dtype, src_part), (&dst.shape, dst.dtype, dst_part))?;
            src.note(py, queue);
            dst.note(py, queue);
            let copy = || queue.copy_2d(src.slice(rows.src)?, dst.slice(rows.dst)?, rows.shape);
            return py.detach(copy).map_err(raised);
        }
        if let (Ok(src), Ok(dst)) = (src.cast::<Pinned>(), dst.cast::<Buffer>()) {
            let (src, dst) = (&src.get().0, &dst.get().0);
            let rows = rows::between((&src.shape, src.dtype, src_part), (&dst.shape, dst.dtype, dst_part))?;
            dst.note(py, queue);
            return src.with(py, rows::OPERATION, |pinned| {
                queue.copy_2d_to_device(pinned.slice(rows.src_bytes())?, dst.slice(rows.dst)?, rows.shape)
            });
        }
        if let (Ok(src), Ok(dst)) = (src.cast::<Buffer>(), dst.cast::<Pinned>()) {
            let (src, dst) = (&src.get().0, &dst.get().0);
            let rows = rows::between((&src.shape, src.dtype, src_part), (&dst.shape, dst.dtype, dst_part))?;
            src.note(py, queue);
            return dst.with(py, rows::OPERATION, |pinned| {
                queue.copy_2d_to_host(src.slice(rows.src.clone())?, pinned.slice_mut(rows.dst_bytes())?, rows.shape)
            });
        }
        Err(PyTypeError::new_err(
            "copy_2d takes a Buffer and a Buffer, a Pinned and a Buffer, or a Buffer and a Pinned",
        ))
    }

    /// Enqueues a fill of a buffer with one value. Devices fill values of 1, 2 or 4 bytes, and any type with 0.
    ///
    /// Raises `InvalidArgument` for other values, and for a number that the type does not hold. Floats hold infinity and NaN.
    fn fill(&self, dst: &Buffer, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, memory) = (value.py(), &dst.0);
        let bytes = memory.dtype.bytes_of(value)?;
        memory.note(py, &self.queue);
        let queue = &self.queue;
        let fill = || -> Result<(), Error> {
            macro_rules! value {
                ($type:ty) => {{
                    let mut value = [0; size_of::<$type>()];
                    value.copy_from_slice(&bytes);
                    <$type>::from_ne_bytes(value)
                }};
            }
            if bytes.iter().all(|&byte| byte == 0) {
                return with_values!(&*memory.values, buffer => queue.fill_zero(buffer));
            }
            match &*memory.values {
                Values::Half(buffer) => queue.fill(buffer, value!(f16)),
                Values::Brain(buffer) => queue.fill(buffer, value!(bf16)),
                Values::Single(buffer) => queue.fill(buffer, value!(f32)),
                Values::Double(buffer) => queue.fill(buffer, value!(f64)),
                Values::One(buffer) => queue.fill(buffer, value!(u8)),
                Values::Two(buffer) => queue.fill(buffer, value!(u16)),
                Values::Four(buffer) => queue.fill(buffer, value!(u32)),
                Values::Eight(buffer) => queue.fill(buffer, value!(u64)),
                Values::Sixteen(buffer) => queue.fill(buffer, value!(u128)),
            }
        };
        py.detach(fill).map_err(raised)
    }

    /// Enqueues the product `out = alpha * a @ b + beta * out`, and returns `out`.
    ///
    /// `a` has the shape (m, k), or (k, m) with `transpose_a`. `b` has the shape (k, n), or (n, k) with `transpose_b`. `out` has the
    /// shape (m, n). Without `out`, the call allocates it on this stream, in the type of the factors. The types are float16,
    /// bfloat16, float32 and float64. `out` may be float32 for the first two.
    ///
    /// A batch has the same further lengths before those of its matrices in `out` and in both factors, such as (10, m, k). One
    /// matrix in place of a factor's batch serves all products.
    ///
    /// Raises `InvalidArgument` if the shapes do not fit or `out` overlaps a factor, and `Unsupported` for other types and for a batch
    /// on a device without batches.
    #[pyo3(signature = (a, b, out=None, *, transpose_a=false, transpose_b=false, alpha=1.0, beta=0.0))]
    #[expect(clippy::too_many_arguments, reason = "they are named in Python")]
    fn matmul(
        &self,
        py: Python<'_>,
        a: &Buffer,
        b: &Buffer,
        out: Option<Py<Buffer>>,
        transpose_a: bool,
        transpose_b: bool,
        alpha: f64,
        beta: f64,
    ) -> PyResult<Py<Buffer>> {
        const OPERATION: &str = "matmul";
        let (of_a, of_b) = (Stack::of("a", &a.0)?, Stack::of("b", &b.0)?);
        let leading = if of_a.leading.is_empty() { of_b.leading } else { of_a.leading };
        if !of_b.leading.is_empty() && of_b.leading != leading {
            let message = format!("a has the shape {:?}, and b the shape {:?}", a.0.shape, b.0.shape);
            return Err(invalid(
                OPERATION,
                message,
                "pass batches of the same lengths, or one matrix for all products",
            ));
        }
        let out = match out {
            Some(out) => out,
            None if beta != 0.0 => {
                let message = format!("beta is {beta}, and there is no `out` that it scales");
                return Err(invalid(OPERATION, message, "pass `out`, or a beta of 0"));
            }
            None => {
                let (rows, columns) = (of_a.transposed_if(transpose_a).0, of_b.transposed_if(transpose_b).1);
                let shape = [leading, &[rows, columns]].concat();
                Py::new(py, Buffer::new(self.made(py, a.0.dtype, shape)?))?
            }
        };
        let c = &out.get().0;
        let of_c = Stack::of("out", c)?;
        let factors =
            Factors { a: of_a, b: of_b, c: of_c, transposed: (transpose_a, transpose_b), scale: (alpha, beta) };
        factors.check(leading, [&a.0, &b.0, c])?;
        [&a.0, &b.0, c].into_iter().for_each(|memory| memory.note(py, &self.queue));
        let queue = &self.queue;
        let run = || match (&*a.0.values, &*b.0.values, &*c.values) {
            (Values::Single(a), Values::Single(b), Values::Single(c)) => {
                Some(factors.run(queue, a, b, c, |number| number as f32))
            }
            (Values::Double(a), Values::Double(b), Values::Double(c)) => {
                Some(factors.run(queue, a, b, c, |number| number))
            }
            (Values::Half(a), Values::Half(b), Values::Half(c)) => Some(factors.run(queue, a, b, c, f16::from_f64)),
            (Values::Half(a), Values::Half(b), Values::Single(c)) => {
                Some(factors.run(queue, a, b, c, |number| number as f32))
            }
            (Values::Brain(a), Values::Brain(b), Values::Brain(c)) => Some(factors.run(queue, a, b, c, bf16::from_f64)),
            (Values::Brain(a), Values::Brain(b), Values::Single(c)) => {
                Some(factors.run(queue, a, b, c, |number| number as f32))
            }
            _ => None,
        };
        match py.detach(run) {
            Some(done) => done.map_err(raised)?,
            None => {
                let [a, b, c] = [&a.0, &b.0, c].map(|memory| memory.dtype.name());
                return Err(unsupported(
                    OPERATION,
                    format!("no product of {a} and {b} into {c}"),
                    "pass factors of one of float16, bfloat16, float32 or float64, and a result of that type or float32",
                ));
            }
        }
        Ok(out)
    }

    /// Records the work that `record()` enqueues on this stream, without executing it, and returns it as a graph.
    ///
    /// The graph keeps the addresses of the buffers and owns their memory. Values that are copied from a `Pinned` are those of the
    /// launch. Another stream joins by `wait` for an event that was recorded in the capture, and this stream must wait for it in the
    /// same way before the end. Memory that `record` allocates on the stream belongs to the graph. Everything else must be allocated
    /// before. Waits, queries and downloads of the stream raise `Capture`, and the capture goes on.
    ///
    /// `mode` says which forbidden calls of other code lose the capture: those of this thread (`"thread_local"`), of any thread
    /// (`"global"`), or none (`"relaxed"`).
    ///
    /// Raises what `record` raises. The capture is then over, and nothing is kept. Raises `Capture` if the stream already takes part in
    /// one or is a default stream, and `Unsupported` if the device has no graphs.
    #[pyo3(signature = (record, *, mode="thread_local"))]
    fn capture(&self, py: Python<'_>, record: Py<PyAny>, mode: &str) -> PyResult<Graph> {
        graph::capture(py, &self.queue, record, mode)
    }

    /// Returns a tensor of another library as a buffer, without a copy. This stream waits for the producer's work.
    ///
    /// The tensor stays alive until the last use of the buffer has ended. It must be contiguous, writable, and on the device of this
    /// stream. On the mock, which has no memory of its own, only tensors of the mock's own buffers are. Arrays of NumPy are copied by
    /// `upload`.
    ///
    /// Raises `InvalidArgument`, `InvalidPointer` or `WrongDevice` for other tensors, and `Unsupported` for other types.
    #[pyo3(name = "from_dlpack")]
    fn import_dlpack(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        Ok(Buffer::new(dlpack::import(tensor, &self.queue, &self.device)?))
    }
}

/// The shapes of a product, or of a batch of products.
struct Factors<'m> {
    a: Stack<'m>,
    b: Stack<'m>,
    c: Stack<'m>,
    transposed: (bool, bool),
    scale: (f64, f64),
}

impl Factors<'_> {
    /// Checks the shapes, and that the result overlaps no factor.
    fn check(&self, leading: &[usize], [a, b, out]: [&Memory; 3]) -> PyResult<()> {
        const OPERATION: &str = "matmul";
        let ((rows, inner), (inner_of_b, columns)) =
            (self.a.transposed_if(self.transposed.0), self.b.transposed_if(self.transposed.1));
        if inner != inner_of_b {
            let message = format!(
                "the factors have {} and {}: {:?}, {:?}",
                counted(inner, "column"),
                counted(inner_of_b, "row"),
                a.shape,
                b.shape
            );
            return Err(invalid(
                OPERATION,
                message,
                "pass factors whose shapes fit together, or set `transpose_a` or `transpose_b`",
            ));
        }
        let expected = [leading, &[rows, columns]].concat();
        if out.shape != expected {
            let message = format!("out has the shape {:?}, expected {expected:?}", out.shape);
            return Err(invalid(OPERATION, message, "pass an `out` of that shape, or none"));
        }
        let range = |memory: &Memory| memory.address()..memory.address().saturating_add(memory.bytes() as u64);
        let of_out = range(out);
        for (name, factor) in [("a", range(a)), ("b", range(b))] {
            if of_out.start < factor.end && factor.start < of_out.end {
                return Err(invalid(OPERATION, format!("out overlaps {name}"), "write to a buffer of its own"));
            }
        }
        Ok(())
    }

    /// Enqueues the product, or the products of the batch.
    fn run<T: Scalar, R: Scalar>(
        &self,
        stream: &highwater::Stream,
        a: &DeviceBuffer<T>,
        b: &DeviceBuffer<T>,
        c: &DeviceBuffer<R>,
        number: impl Fn(f64) -> R,
    ) -> Result<(), Error> {
        let count = self.c.leading.iter().product();
        if count == 0 {
            return Ok(());
        }
        let ((rows, inner), (_, columns)) =
            (self.a.transposed_if(self.transposed.0), self.b.transposed_if(self.transposed.1));
        // A row-major result is the transpose of a column-major one: its product is that of the transposed factors, in the other order.
        let mut shape = GemmShape::mixed::<T, R>(columns, rows, inner).with_leading_dimensions(
            self.b.columns.max(1),
            self.a.columns.max(1),
            columns.max(1),
        );
        let transpose = |is_transposed| if is_transposed { Transpose::Yes } else { Transpose::No };
        (shape.transpose_a, shape.transpose_b) = (transpose(self.transposed.1), transpose(self.transposed.0));
        if !self.c.leading.is_empty() {
            let (stride_a, stride_b, stride_c) = (self.b.stride(), self.a.stride(), self.c.stride());
            shape = shape.with_batch(StridedBatch { count, stride_a, stride_b, stride_c });
        }
        stream.blas()?.gemm_mixed(&shape, number(self.scale.0), b, a, number(self.scale.1), c)
    }
}

/// A point in the work of a stream. `Stream.record` returns it.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Event(Detached<highwater::Event>);

#[pymethods]
impl Event {
    /// Whether the stream has passed the event. Does not wait.
    #[getter]
    fn is_complete(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.0.is_complete()).map_err(raised)
    }

    /// Returns a wait until the stream has passed the event. The wait blocks no thread. `await event` is the same.
    fn done(&self, py: Python<'_>) -> PyResult<Done> {
        Done::new(py, || self.0.done())
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Bound::new(py, self.done(py)?)?.call_method0("__await__")
    }

    /// Waits until the stream has passed the event. Ctrl-C is seen when the wait ends. `await event` reacts at once.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.synchronize()).map_err(raised)
    }

    fn __repr__(&self) -> &'static str {
        "<highwater.Event>"
    }

    /// Returns the nanoseconds from this event to a later one, and 0 if `later` is the earlier of the two.
    ///
    /// Raises `InvalidArgument` unless both were recorded with `timed`, and `InvalidState` if the stream has not passed one.
    fn elapsed_ns(&self, py: Python<'_>, later: &Self) -> PyResult<u64> {
        py.detach(|| self.0.elapsed_ns(&later.0)).map_err(raised)
    }
}
