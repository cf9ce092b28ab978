//! The parts of `highwater/torch.py` in Rust: one runtime of the process, receipts of tensors that other processes opened, and the
//! functions of PyTorch's allocators of device memory and of page-locked memory.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use highwater::hal::fork::Generation;
use highwater::hal::{HostPtr, counted};
use highwater::{Access, DeviceBuffer, Error, ErrorKind, PinnedBuffer, Result, Stream};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;

use crate::arrays::count;
use crate::dlpack;
use crate::dtype::DType;
use crate::error::{invalid, not_opened, raised};
use crate::memory::Buffer;
use crate::runtime::Runtime;
use crate::ticket::Ticket;

/// No code panics under these locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtime that the tensors of this process use. It lives as long as the process.
pub(crate) struct Standing {
    pub(crate) generation: Generation,
    name: String,
    pub(crate) runtime: highwater::Runtime,
    /// Wrapped streams by device and raw handle. Those of PyTorch live as long as the process.
    streams: Mutex<HashMap<(u32, u64), Arc<Stream>>>,
    /// The allocations of PyTorch's pools, by address.
    pool_allocations: Mutex<HashMap<u64, DeviceBuffer<u8>>>,
}

pub(crate) static STANDING: OnceLock<Standing> = OnceLock::new();
/// The last error of the allocator, which has no other way to report it.
static FAILURE: Mutex<Option<String>> = Mutex::new(None);

impl Standing {
    pub(crate) fn get(operation: &'static str) -> Result<&'static Self> {
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
            pool_allocations: Mutex::default(),
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
pub(crate) fn allocating<R>(work: impl FnOnce() -> Result<R>) -> Option<R> {
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
        lock(&standing.pool_allocations).insert(address, buffer);
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
        let freed = lock(&Standing::get(OPERATION)?.pool_allocations).remove(&(address as u64));
        freed.map(drop).ok_or_else(|| {
            let message = format!("{address:p} is not the start of live memory of this allocator");
            Error::new(ErrorKind::InvalidPointer, OPERATION, message)
                .with_hint("pass an address that `highwater_torch_alloc` returned, once")
        })
    });
}

/// A block of page-locked memory that PyTorch has.
struct HostBlock(PinnedBuffer<u8>);

/// The first bytes of blocks whose last use is unknown. They are never reused.
static RETIRED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
static HAS_RETIRED: AtomicBool = AtomicBool::new(false);

/// Returns the most bytes that [`host_allocate`] takes.
extern "C" fn host_largest() -> usize {
    let largest = allocating(|| {
        let runtime = &Standing::get("torch_host_largest")?.runtime;
        let pieces = (0..runtime.device_count()).map(|device| {
            let device = runtime.device(device)?;
            let can = device.capabilities();
            // Memory that the backend allocates has no border.
            let has_borders = can.host_register && can.register_piece_bytes > 0;
            Ok(if has_borders { can.register_piece_bytes } else { usize::MAX })
        });
        pieces.collect::<Result<Vec<_>>>()
    });
    largest.into_iter().flatten().min().unwrap_or_default()
}

/// Allocates page-locked memory for PyTorch's tensors, and writes its address. Returns the block, or null after an error.
///
/// # Safety
/// The caller must pass a place for an address.
unsafe extern "C" fn host_allocate(bytes: usize, address: *mut *mut c_void) -> *mut c_void {
    const OPERATION: &str = "torch_host_allocate";
    let block = allocating(|| {
        let standing = Standing::get(OPERATION)?;
        let buffer = standing.runtime.pinned_undivided::<u8>(bytes)?;
        // SAFETY: As the caller promises.
        unsafe { *address = buffer.ptr().as_ptr().cast() };
        Ok(Box::into_raw(Box::new(HostBlock(buffer))))
    });
    block.map_or(std::ptr::null_mut(), <*mut HostBlock>::cast)
}

/// Frees a block after the uses that were noted.
///
/// # Safety
/// The caller must pass a block of [`host_allocate`], once, and not use its memory afterwards.
unsafe extern "C" fn host_release(block: *mut c_void) {
    if block.is_null() {
        return;
    }
    allocating(|| {
        // SAFETY: As the caller promises.
        let block = unsafe { Box::from_raw(block.cast::<HostBlock>()) };
        if !STANDING.get().is_some_and(|standing| standing.generation.is_current()) {
            // A child frees nothing, and a thread of the parent may hold the lock below.
            std::mem::forget(block);
            return Ok(());
        }
        if HAS_RETIRED.load(Ordering::Acquire) && lock(&RETIRED).remove(&(block.0.ptr().as_ptr() as usize)) {
            std::mem::forget(block);
        }
        Ok(())
    });
}

/// Notes that the work of a stream so far uses page-locked memory. Returns 1, 0 for memory of other code, or -1 after an error. After an
/// error, the memory is never reused.
///
/// # Safety
/// The caller must pass a stream of the device that lives as long as the process.
unsafe extern "C" fn host_used(address: *mut c_void, device: i32, stream: *mut c_void) -> i32 {
    const OPERATION: &str = "torch_host_used";
    let noted = allocating(|| {
        let Some(standing) = STANDING.get() else { return Ok(0) };
        let Some(address) = NonNull::new(address.cast::<u8>()).map(HostPtr::new) else { return Ok(0) };
        // `None` in a forked child, too.
        let Some(block) = standing.runtime.pinned_block_of(address) else { return Ok(0) };
        let note = || {
            let device = u32::try_from(device).map_err(|_| {
                let message = format!("the device is {device}, expected 0 or more");
                Error::new(ErrorKind::InvalidArgument, OPERATION, message).with_hint("pass what PyTorch passed")
            })?;
            // SAFETY: As the caller promises.
            let stream = unsafe { standing.stream(device, stream as u64) }?;
            stream.note_host_use(address, Access::Write).map_err(|error| match error.kind() {
                ErrorKind::Capture => {
                    let message = "a CUDA graph of PyTorch uses the memory, and may use it again at any time";
                    Error::new(ErrorKind::Capture, OPERATION, message).with_hint(
                        "record graphs over long-lived tensors, because the memory stays until the process ends",
                    )
                }
                _ => error,
            })
        };
        note().map(|()| 1).inspect_err(|_| {
            HAS_RETIRED.store(true, Ordering::Release);
            lock(&RETIRED).insert(block.base.as_ptr() as usize);
        })
    });
    noted.unwrap_or(-1)
}

/// Frees idle page-locked memory. Returns 0, or -1 after an error.
extern "C" fn host_trim() -> i32 {
    allocating(|| Standing::get("torch_host_trim")?.runtime.trim_pinned_memory()).map_or(-1, |()| 0)
}

/// Writes the blocks in use and their bytes, the pieces held and their bytes, and the most bytes held so far.
///
/// # Safety
/// The caller must pass a place for five numbers.
unsafe extern "C" fn host_statistics(five: *mut [u64; 5]) {
    allocating(|| {
        let host = Standing::get("torch_host_statistics")?.runtime.statistics().host;
        let found = [host.live_blocks, host.live_bytes, host.pieces, host.held_bytes, host.peak_held_bytes];
        // SAFETY: As the caller promises.
        unsafe { *five = found };
        Ok(())
    });
}

/// Writes the text of the last error, with a 0 at its end.
///
/// # Safety
/// The caller must pass a place for `length` bytes, at least one.
unsafe extern "C" fn host_failure(text: *mut c_char, length: usize) {
    let failure = last_failure().unwrap_or_default();
    let bytes = failure.len().min(length.saturating_sub(1));
    // SAFETY: As the caller promises. The text has no fewer bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(failure.as_ptr(), text.cast(), bytes);
        *text.add(bytes) = 0;
    }
}

/// Returns the addresses of the functions of `_torch_host.cpp`, in the order of its structure.
#[pyfunction]
pub(crate) fn host_functions() -> [usize; 7] {
    [
        host_largest as *const () as usize,
        host_allocate as *const () as usize,
        host_release as *const () as usize,
        host_used as *const () as usize,
        host_trim as *const () as usize,
        host_statistics as *const () as usize,
        host_failure as *const () as usize,
    ]
}

/// Opens the bytes of a storage. As `Runtime.open_shared` of a `Ticket`, by one call.
#[pyfunction]
pub(crate) fn open_storage(py: Python<'_>, runtime: &Runtime, data: &[u8], nbytes: usize) -> PyResult<Buffer> {
    let ticket = Ticket::of_bytes(data, DType::UInt8, Some(vec![nbytes]))?;
    runtime.open_shared(py, &ticket, "keep")
}

/// Returns the DLPack capsule of a buffer, or of its bytes as values of another type and shape: `whole`. It orders no stream, because
/// `open_storage` has waited for the work before the share.
#[pyfunction]
#[pyo3(signature = (buffer, whole=None))]
pub(crate) fn capsule_of<'py>(
    buffer: &Bound<'py, Buffer>,
    whole: Option<(PyBackedStr, Vec<usize>)>,
) -> PyResult<Bound<'py, PyAny>> {
    const OPERATION: &str = "capsule_of";
    let memory = &buffer.get().0;
    let (dtype, shape) = match whole {
        None => (memory.dtype, memory.shape.clone()),
        Some((name, shape)) => (
            DType::named(&name)
                .ok_or_else(|| invalid(OPERATION, format!("`{name}` is no type"), "pass one of `dtype_names`"))?,
            shape,
        ),
    };
    if count(&shape, dtype)? * dtype.bytes() != memory.bytes() {
        let message =
            format!("the shape {shape:?} of {} does not cover {}", dtype.name(), counted(memory.bytes(), "byte"));
        return Err(invalid(OPERATION, message, "pass a type and a shape of all bytes of the buffer"));
    }
    let device = (dlpack::kind_of(buffer.py(), memory)?, dlpack::ordinal_of(memory)?);
    memory.exported(device, dtype, shape).into_capsule(buffer.py(), Some((1, 0)))
}

/// Returns the names of the types of elements.
#[pyfunction]
pub(crate) fn dtype_names() -> Vec<&'static str> {
    DType::names()
}

/// The most receipts that wait for `take`. Further receipts are lost, like those of a killed process.
const MOST_WAITING: usize = 1 << 16;
/// The time that a receiver waits for a process with many receipts.
const SEND_TIMEOUT: Duration = Duration::from_millis(100);
/// The longest and the shortest pause of the thread that reads receipts.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
/// The time for which the thread keeps receipts for itself, while it pauses.
const KEPT_FOR: Duration = Duration::from_millis(10);
/// The receipts of a pause after which the next one is shorter. Linux queues ten datagrams by default, and a further one waits.
const MANY: usize = 5;

/// The most datagrams that are read at once, so that another process cannot keep a thread here.
const MOST_AT_ONCE: usize = 1024;

/// Reads receipts until none is there. Waits for the first one if `waits`. `None` after an error.
fn read_tokens(socket: &UnixDatagram, waits: bool) -> Option<Vec<u64>> {
    let mut tokens = Vec::new();
    for _ in 0..MOST_AT_ONCE {
        let mut datagram = [0_u8; 8];
        let flags = if waits && tokens.is_empty() { libc::MSG_TRUNC } else { libc::MSG_TRUNC | libc::MSG_DONTWAIT };
        // SAFETY: The kernel writes at most the bytes of the array, and the socket is open.
        let read = unsafe { libc::recv(socket.as_raw_fd(), datagram.as_mut_ptr().cast(), datagram.len(), flags) };
        match read {
            8 => tokens.push(u64::from_le_bytes(datagram)),
            0.. => {}
            _ => match std::io::Error::last_os_error().kind() {
                std::io::ErrorKind::Interrupted => {}
                std::io::ErrorKind::WouldBlock => return Some(tokens),
                _ => return None,
            },
        }
    }
    Some(tokens)
}

/// Returns the pause after one that brought `found` receipts.
fn next_pause(pause: Duration, found: usize) -> Duration {
    let next = if found > MANY { pause / 2 } else { pause + pause / 4 };
    next.clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}

#[derive(Default)]
struct Arrived {
    tokens: VecDeque<u64>,
    is_awake: bool,
}

impl Arrived {
    fn add(&mut self, tokens: Vec<u64>) {
        let space = MOST_WAITING.saturating_sub(self.tokens.len());
        self.tokens.extend(tokens.into_iter().take(space));
    }
}

/// The receipts from other processes. Each token names one message that this process sent.
///
/// A thread reads the socket without the interpreter's lock, so that a receiver never waits for Python code of the sender.
#[pyclass(frozen, module = "highwater._highwater")]
pub(crate) struct Receipts {
    name: [u8; 16],
    socket: Arc<UnixDatagram>,
    shared: Arc<(Mutex<Arrived>, Condvar)>,
    /// Whether the thread pauses between its reads. Relaxed: the flag only delays receipts.
    pauses: Arc<AtomicBool>,
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
        let socket = Arc::new(socket);
        let (shared, pauses): (Arc<(Mutex<Arrived>, Condvar)>, Arc<AtomicBool>) = Default::default();
        let read = {
            let (socket, shared, pauses) = (Arc::clone(&socket), Arc::clone(&shared), Arc::clone(&pauses));
            move || {
                let (mut pause, mut kept_since) = (SHORTEST_PAUSE, None);
                while let Some(tokens) = read_tokens(&socket, kept_since.is_none()) {
                    pause = next_pause(pause, tokens.len());
                    let pauses = pauses.load(Ordering::Relaxed);
                    if !tokens.is_empty() {
                        kept_since.get_or_insert_with(Instant::now);
                        lock(&shared.0).add(tokens);
                    }
                    if kept_since.is_some_and(|since: Instant| !pauses || since.elapsed() >= KEPT_FOR) {
                        kept_since = None;
                        shared.1.notify_all();
                    }
                    if pauses {
                        std::thread::sleep(pause);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("highwater-torch".to_owned()).spawn(read);
        thread.map_err(|error| failed(OPERATION, "the thread of receipts cannot be started", &error))?;
        Ok(Self { name, socket, shared, pauses })
    }

    /// The name of the socket.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.name)
    }

    /// Returns the tokens that arrived. Waits for the first one, for `wake`, and for at most `timeout` seconds, if any. A timeout of 0
    /// also returns the tokens that the thread has not read yet.
    fn take(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<u64>> {
        let limit = timeout.map(Duration::try_from_secs_f64).transpose();
        let limit = limit.map_err(|_| invalid("take", format!("{timeout:?} is no time"), "pass seconds"))?;
        let end = limit.map(|limit| Instant::now() + limit);
        let (mutex, condition) = &*self.shared;
        Ok(py.detach(|| {
            // After an error, the thread has ended, and the time limits decide.
            let unread = limit.is_some_and(|limit| limit.is_zero()).then(|| read_tokens(&self.socket, false)).flatten();
            let mut arrived = lock(mutex);
            arrived.add(unread.unwrap_or_default());
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

    /// Makes the thread pause between its reads, or ends its pauses. A receiver that sends during a pause wakes no thread, which would cost
    /// it several times as much as the send. A `take` that waits gets the receipts of 10 milliseconds together.
    fn pause(&self, pauses: bool) {
        self.pauses.store(pauses, Ordering::Relaxed);
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
