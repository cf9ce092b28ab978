//! [`Graph`]: work that a stream recorded. Memory that ends inside a capture: [`after_captures`].

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use highwater::hal::fork::Generation;
use highwater::{CaptureMode, Error, ErrorKind};
use pyo3::prelude::*;

use crate::detached::Detached;
use crate::error::{invalid, raised};
use crate::stream::{Queue, Stream};

/// The captures of all threads that are open.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// Returns whether a thread has a capture open. The interpreter's lock orders the answer.
pub(crate) fn is_any_capture_open() -> bool {
    OPEN.load(Ordering::Relaxed) > 0
}

type Deferred = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The captures that this thread has open.
    static OPEN_HERE: Cell<usize> = const { Cell::new(0) };
    /// Ends of memory, which wait for devices, that this thread's captures have refused.
    static DEFERRED: RefCell<Vec<Deferred>> = const { RefCell::new(Vec::new()) };
}

/// Counts a capture while it is open. The end of the thread's last one runs what was deferred.
struct Opened;

impl Opened {
    fn new() -> Self {
        OPEN.fetch_add(1, Ordering::Relaxed);
        OPEN_HERE.set(OPEN_HERE.get() + 1);
        Self
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        OPEN_HERE.set(OPEN_HERE.get() - 1);
        if OPEN_HERE.get() == 0 {
            // Out of the cell first: the end of memory may run other code.
            DEFERRED.take().into_iter().for_each(|end| end());
        }
    }
}

/// Ends memory by `end`, which waits for devices. A capture of this thread refuses that wait, so the end then comes after the capture.
pub(crate) fn after_captures(end: impl FnOnce() + Send + 'static) {
    // A thread that ends has no capture.
    if OPEN_HERE.try_with(Cell::get).is_ok_and(|open| open > 0) {
        DEFERRED.with_borrow_mut(|deferred| deferred.push(Box::new(end)));
    } else {
        end();
    }
}

fn mode_of(name: &str) -> PyResult<CaptureMode> {
    match name {
        "thread_local" => Ok(CaptureMode::ThreadLocal),
        "global" => Ok(CaptureMode::Global),
        "relaxed" => Ok(CaptureMode::Relaxed),
        _ => {
            let hint = "pass \"thread_local\", \"global\" or \"relaxed\"";
            Err(invalid("capture", format!("the mode is `{name}`"), hint))
        }
    }
}

/// Records what `record` enqueues on a stream.
pub(crate) fn capture(py: Python<'_>, queue: &Arc<Queue>, record: Py<PyAny>, mode: &str) -> PyResult<Graph> {
    let mode = mode_of(mode)?;
    let mut failure = None;
    let recorded = py.detach(|| {
        // Counted before the capture begins, and until it has ended.
        let _opened = Opened::new();
        queue.capture_with(mode, |_| {
            Python::attach(|py| {
                record.call0(py).map(drop).map_err(|error| {
                    failure = Some(error);
                    // Ends the capture. The caller gets the exception itself.
                    Error::new(ErrorKind::Capture, "capture", "the function has raised an exception")
                })
            })
        })
    });
    match (recorded, failure) {
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(raised(error)),
        (Ok(graph), None) => Ok(Graph {
            device: graph.device(),
            graph: Detached::new(Mutex::new(graph)),
            generation: Generation::current(),
        }),
    }
}

/// Work that `Stream.capture` recorded, to be launched any number of times.
///
/// The graph keeps the memory of the buffers that its work uses. Dropping it waits for nothing: enqueued launches are executed.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Graph {
    graph: Detached<Mutex<highwater::Graph>>,
    device: u32,
    generation: Generation,
}

#[pymethods]
impl Graph {
    /// The ordinal of the device.
    #[getter]
    fn device(&self) -> u32 {
        self.device
    }

    /// Enqueues one execution of the recorded work on a stream of the device. Returns at once.
    ///
    /// Launches of one graph are executed one after the other, even on different streams. Values that the work copies from
    /// page-locked memory are those of the launch.
    ///
    /// Raises `WrongDevice` for a stream of another device, `InvalidHandle` for one of another runtime, and `Capture` if the stream
    /// takes part in a capture.
    fn launch(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        if !self.generation.is_current() {
            // Another thread of the parent may hold the lock forever.
            return Err(raised(Generation::error("launch")));
        }
        let launch = || self.graph.lock().unwrap_or_else(PoisonError::into_inner).launch(&stream.queue);
        py.detach(launch).map_err(raised)
    }

    fn __repr__(&self) -> String {
        format!("<highwater.Graph on device {}>", self.device)
    }
}
