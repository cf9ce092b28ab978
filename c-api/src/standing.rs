//! Functions that other programs expect of an allocator: PyTorch's pluggable allocator, and a pair like `malloc` and `free` for
//! page-locked memory. They have no runtime among their arguments, so they use one that the first call opens.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use front::hal::fork::Generation;
use front::{Access, DeviceBuffer, Error, ErrorKind, Fallback, PinnedBuffer, Result, Runtime, Stream};

use crate::failure::{self, ARGUMENT, contained, invalid};

/// The runtime of these functions. It lives as long as the process.
struct Standing {
    generation: Generation,
    runtime: Runtime,
    /// Wrapped streams by device and raw handle. Those of PyTorch live as long as the process.
    streams: Mutex<HashMap<(u32, u64), Arc<Stream>>>,
    /// What is allocated, by address.
    on_devices: Mutex<HashMap<u64, Arc<DeviceBuffer<u8>>>>,
    pinned: Mutex<HashMap<usize, PinnedBuffer<u8>>>,
}

static STANDING: OnceLock<Standing> = OnceLock::new();

/// No code panics under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Standing {
    fn get() -> Result<&'static Self> {
        let standing = match STANDING.get() {
            Some(standing) => standing,
            None => {
                // Two threads may open one each. The second is dropped, and no thread waits for another one.
                let made = Self {
                    generation: Generation::current(),
                    runtime: Runtime::open_best(Fallback::None).map_err(|error| without_arguments(error.into()))?,
                    streams: Mutex::default(),
                    on_devices: Mutex::default(),
                    pinned: Mutex::default(),
                };
                STANDING.get_or_init(|| made)
            }
        };
        // A child must not reach a lock that a thread of the parent may hold.
        if standing.generation.is_current() { Ok(standing) } else { Err(Generation::error(ARGUMENT)) }
    }

    /// Wraps a stream of other code. Null is the legacy default stream.
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

/// Returns the error of an open with the remedy of these functions, which take neither options nor the name of a backend.
fn without_arguments(error: Error) -> Error {
    let hint = error.hint().replace(failure::ALLOW_MOCK, "set HIGHWATER_BACKEND=mock");
    error.with_hint(hint)
}

fn unknown(address: *const c_void) -> Error {
    let message = format!("{address:p} is not the start of live memory of this allocator");
    Error::new(ErrorKind::InvalidPointer, ARGUMENT, message)
        .with_hint("pass an address that the matching function returned, once")
}

/// For torch.cuda.memory.CUDAPluggableAllocator: allocates device memory from the pool of a stream. Null is the legacy default stream. A
/// per-thread default stream is refused. Every other stream must live as long as the process, as PyTorch's do. Returns null for 0 bytes and
/// after an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_torch_alloc(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let mut address = std::ptr::null_mut();
    contained("highwater_torch_alloc", || {
        let expected = |name, value: &dyn std::fmt::Display| {
            invalid(format!("the {name} is {value}, expected 0 or more"), "pass what PyTorch passed")
        };
        let device = u32::try_from(device).map_err(|_| expected("device", &device))?;
        let bytes = usize::try_from(bytes).map_err(|_| expected("number of bytes", &bytes))?;
        if bytes == 0 {
            return Ok(());
        }
        let standing = Standing::get()?;
        // SAFETY: PyTorch's streams live as long as the process.
        let stream = unsafe { standing.stream(device, stream as u64) }?;
        let buffer = stream.allocate::<u8>(bytes)?;
        // Covers all kernels of this stream until the free.
        stream.note_device_use(&buffer, Access::Write)?;
        let number = buffer.ptr().get();
        lock(&standing.on_devices).insert(number, Arc::new(buffer));
        address = number as *mut c_void;
        Ok(())
    });
    address
}

/// Frees memory of highwater_torch_alloc. Does not wait: it is reused after the work of its streams. Does nothing with null.
#[unsafe(no_mangle)]
#[expect(unused_variables, reason = "PyTorch passes them")]
pub unsafe extern "C" fn highwater_torch_free(address: *mut c_void, bytes: isize, device: c_int, stream: *mut c_void) {
    if address.is_null() {
        return;
    }
    contained("highwater_torch_free", || {
        let freed = lock(&Standing::get()?.on_devices).remove(&(address as u64));
        freed.map(drop).ok_or_else(|| unknown(address))
    });
}

/// Notes that a stream other than the first uses the memory, before the work is enqueued. PyTorch's set_record_stream_fn takes it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_torch_record_stream(address: *mut c_void, stream: *mut c_void) {
    contained("highwater_torch_record_stream", || {
        let standing = Standing::get()?;
        let buffer = lock(&standing.on_devices).get(&(address as u64)).cloned().ok_or_else(|| unknown(address))?;
        // SAFETY: PyTorch's streams live as long as the process.
        let stream = unsafe { standing.stream(buffer.device(), stream as u64) };
        stream?.note_device_use(&*buffer, Access::Write)
    });
}

/// Allocates page-locked memory in one registration, aligned to 256 bytes. Returns null for 0 bytes and after an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_malloc(bytes: usize) -> *mut c_void {
    let mut address = std::ptr::null_mut();
    contained("highwater_pinned_malloc", || {
        if bytes == 0 {
            return Ok(());
        }
        let standing = Standing::get()?;
        let buffer = standing.runtime.pinned_undivided::<u8>(bytes)?;
        let start = buffer.ptr();
        lock(&standing.pinned).insert(start.address(), buffer);
        address = start.as_ptr().cast();
        Ok(())
    });
    address
}

/// Frees memory of highwater_pinned_malloc. No work may use it, because Highwater does not see copies that other code enqueues. Does
/// nothing with null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_free(address: *mut c_void) {
    if address.is_null() {
        return;
    }
    contained("highwater_pinned_free", || {
        let freed = lock(&Standing::get()?.pinned).remove(&(address as usize));
        freed.map(drop).ok_or_else(|| unknown(address))
    });
}
