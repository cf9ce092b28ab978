//! The parts of `highwater/torch.py` in Rust: one runtime of the process, receipts of tensors that other processes opened, and the
//! functions of PyTorch's pluggable allocator.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use highwater::hal::fork::Generation;
use highwater::{Access, DeviceBuffer, Error, ErrorKind, Result, Stream};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{invalid, not_opened, raised};
use crate::runtime::Runtime;

/// No code panics under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtime that the tensors of this process use. It lives as long as the process.
struct Standing {
    generation: Generation,
    name: String,
    runtime: highwater::Runtime,
    /// Wrapped streams by device and raw handle. Those of PyTorch live as long as the process.
    streams: Mutex<HashMap<(u32, u64), Arc<Stream>>>,
    /// The allocations of PyTorch's pools, by address.
    segments: Mutex<HashMap<u64, DeviceBuffer<u8>>>,
}

static STANDING: OnceLock<Standing> = OnceLock::new();
/// The last error of the allocator, which has no other way to report it.
static FAILURE: Mutex<Option<String>> = Mutex::new(None);

impl Standing {
    fn get(operation: &'static str) -> Result<&'static Self> {
        let standing = STANDING.get().ok_or_else(|| {
            Error::new(ErrorKind::InvalidState, operation, "no runtime is open for PyTorch")
                .with_hint("make the pool with `highwater.torch.MemPool`")
        })?;
        // A child must not reach a lock that a thread of the parent may hold.
        if standing.generation.is_current() {
            Ok(standing)
        } else {
            Err(Generation::error(operation).with_hint("start processes with `spawn` or `forkserver`"))
        }
    }

    /// Wraps a stream of PyTorch. Null is the legacy default stream.
    ///
    /// # Safety
    /// The caller must pass a stream of the device that lives as long as the process.
    unsafe fn stream(&self, device: u32, raw: u64) -> Result<Arc<Stream>> {
        let known = lock(&self.streams).get(&(device, raw)).cloned();
        if let Some(stream) = known {
            return Ok(stream);
        }
        let owner = self.runtime.device(device)?;
        // SAFETY: As the caller promises.
        let stream = if raw == 0 { owner.legacy_default_stream() } else { unsafe { owner.stream_from_raw(raw) } }?;
        // A second wrapper of the stream is dropped after the lock.
        let stream = Arc::new(stream);
        Ok(Arc::clone(lock(&self.streams).entry((device, raw)).or_insert_with(|| Arc::clone(&stream))))
    }
}

/// Returns the runtime of this process that tensors use. The first call opens it.
#[pyfunction]
pub(crate) fn standing_runtime(py: Python<'_>, name: &str) -> PyResult<Runtime> {
    const OPERATION: &str = "runtime";
    if STANDING.get().is_none() {
        let runtime = py.detach(|| highwater::Runtime::open(name)).map_err(not_opened)?;
        let made = Standing {
            generation: Generation::current(),
            name: name.to_owned(),
            runtime,
            streams: Mutex::default(),
            segments: Mutex::default(),
        };
        // If another thread was faster, this runtime is dropped.
        py.detach(|| drop(STANDING.set(made)));
    }
    let standing = Standing::get(OPERATION).map_err(raised)?;
    if standing.name != name {
        let message = format!("the runtime of PyTorch is of the backend `{}`, not `{name}`", standing.name);
        return Err(invalid(OPERATION, message, "use one backend in a process"));
    }
    Ok(Runtime::new(standing.runtime.clone()))
}

/// Calls a function for PyTorch's allocator. An error becomes `None` and is kept for `last_failure`.
fn allocating<R>(work: impl FnOnce() -> Result<R>) -> Option<R> {
    let failure = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(Ok(done)) => return Some(done),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the allocator panicked".to_owned(),
    };
    // This does not wait: in a forked child, a thread that does not exist may hold the lock.
    if let Ok(mut last) = FAILURE.try_lock() {
        *last = Some(failure);
    }
    None
}

/// Returns the text of the last error of the pluggable allocator.
#[pyfunction]
pub(crate) fn last_failure() -> Option<String> {
    FAILURE.try_lock().ok()?.clone()
}

/// Allocates device memory that other processes can open, for PyTorch's pluggable allocator. Returns null after an error.
///
/// # Safety
/// The caller must pass a stream of the device that lives as long as the process.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn highwater_torch_alloc(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    const OPERATION: &str = "highwater_torch_alloc";
    let address = allocating(|| {
        let expected = |name, value: &dyn std::fmt::Display| {
            let message = format!("the {name} is {value}, expected 0 or more");
            Error::new(ErrorKind::InvalidArgument, OPERATION, message).with_hint("pass what PyTorch passed")
        };
        let device = u32::try_from(device).map_err(|_| expected("device", &device))?;
        let bytes = usize::try_from(bytes).map_err(|_| expected("number of bytes", &bytes))?;
        if bytes == 0 {
            return Ok(0);
        }
        let standing = Standing::get(OPERATION)?;
        // SAFETY: As the caller promises.
        let stream = unsafe { standing.stream(device, stream as u64) }?;
        let buffer = standing.runtime.device(device)?.allocate_shared::<u8>(bytes)?;
        // Covers all kernels of this stream until the free.
        stream.note_device_use(&buffer, Access::Write)?;
        let address = buffer.ptr().get();
        lock(&standing.segments).insert(address, buffer);
        Ok(address)
    });
    address.unwrap_or_default() as *mut c_void
}

/// Frees device memory after the work of its stream, for PyTorch's pluggable allocator.
///
/// # Safety
/// The caller must not use the memory after the call. Other addresses are refused.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn highwater_torch_free(
    address: *mut c_void,
    _bytes: isize,
    _device: c_int,
    _stream: *mut c_void,
) {
    const OPERATION: &str = "highwater_torch_free";
    if address.is_null() {
        return;
    }
    allocating(|| {
        let freed = lock(&Standing::get(OPERATION)?.segments).remove(&(address as u64));
        freed.map(drop).ok_or_else(|| {
            let message = format!("{address:p} is not the start of live memory of this allocator");
            Error::new(ErrorKind::InvalidPointer, OPERATION, message)
                .with_hint("pass an address that `highwater_torch_alloc` returned, once")
        })
    });
}

/// The most receipts that wait for `take`. Further receipts are lost, like those of a killed process.
const MOST_WAITING: usize = 1 << 16;
/// The time that a receiver waits for a process with many receipts.
const SEND_TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Default)]
struct Arrived {
    tokens: VecDeque<u64>,
    is_awake: bool,
}

/// The receipts from other processes. Each token names one message that this process sent.
///
/// A thread reads the socket without the interpreter's lock, so that a receiver never waits for Python code of the sender.
#[pyclass(frozen, module = "highwater._highwater")]
pub(crate) struct Receipts {
    name: [u8; 16],
    shared: Arc<(Mutex<Arrived>, Condvar)>,
}

fn failed(operation: &'static str, what: &str, error: &std::io::Error) -> PyErr {
    let message = format!("{what}: {error}");
    let code = i64::from(error.raw_os_error().unwrap_or_default());
    let hint = "raise the limits on descriptors and threads (ulimit -n, ulimit -u)";
    raised(Error::new(ErrorKind::OperatingSystem, operation, message).with_code(code).with_hint(hint))
}

fn address_of(name: &[u8]) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name([b"highwater-torch-".as_slice(), name].concat())
}

#[pymethods]
impl Receipts {
    #[new]
    fn new(name: [u8; 16]) -> PyResult<Self> {
        const OPERATION: &str = "receipts";
        let socket = address_of(&name).and_then(|address| UnixDatagram::bind_addr(&address));
        let socket = socket.map_err(|error| failed(OPERATION, "the socket of receipts cannot be made", &error))?;
        let shared: Arc<(Mutex<Arrived>, Condvar)> = Arc::default();
        let read = {
            let shared = Arc::clone(&shared);
            move || {
                let mut datagram = [0_u8; 8];
                loop {
                    match socket.recv(&mut datagram) {
                        Ok(8) => {
                            let mut arrived = lock(&shared.0);
                            if arrived.tokens.len() < MOST_WAITING {
                                arrived.tokens.push_back(u64::from_le_bytes(datagram));
                            }
                            shared.1.notify_all();
                        }
                        Ok(_) => {}
                        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                        Err(_) => return,
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("highwater-torch".to_owned()).spawn(read);
        thread.map_err(|error| failed(OPERATION, "the thread of receipts cannot be started", &error))?;
        Ok(Self { name, shared })
    }

    /// The name of the socket.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.name)
    }

    /// Returns the tokens that arrived. Waits for the first one, for `wake`, and for at most `timeout` seconds, if any.
    fn take(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<u64>> {
        let limit = timeout.map(Duration::try_from_secs_f64).transpose();
        let limit = limit.map_err(|_| invalid("take", format!("{timeout:?} is no time"), "pass seconds"))?;
        let end = limit.map(|limit| Instant::now() + limit);
        let (mutex, condition) = &*self.shared;
        Ok(py.detach(|| {
            let mut arrived = lock(mutex);
            while arrived.tokens.is_empty() && !arrived.is_awake {
                arrived = match end.map(|end| end.saturating_duration_since(Instant::now())) {
                    Some(left) if left.is_zero() => break,
                    Some(left) => condition.wait_timeout(arrived, left).unwrap_or_else(PoisonError::into_inner).0,
                    None => condition.wait(arrived).unwrap_or_else(PoisonError::into_inner),
                };
            }
            arrived.is_awake = false;
            arrived.tokens.drain(..).collect()
        }))
    }

    /// Ends a `take` that waits, or the next one.
    fn wake(&self) {
        lock(&self.shared.0).is_awake = true;
        self.shared.1.notify_all();
    }
}

/// Sends a receipt to the process that shared a tensor. Returns whether it was sent.
#[pyfunction]
pub(crate) fn acknowledge(py: Python<'_>, name: &[u8], token: u64) -> bool {
    static SOCKET: OnceLock<Option<UnixDatagram>> = OnceLock::new();
    py.detach(|| {
        let made = || {
            let socket = UnixDatagram::unbound().ok()?;
            socket.set_write_timeout(Some(SEND_TIMEOUT)).ok()?;
            Some(socket)
        };
        let Some(socket) = SOCKET.get_or_init(made) else { return false };
        address_of(name).and_then(|to| socket.send_to_addr(&token.to_le_bytes(), &to)).is_ok()
    })
}
