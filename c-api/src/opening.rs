//! Opening and closing a runtime, its report and its statistics.

use std::ffi::c_char;
use std::path::Path;

use front::{Fallback, OpenOptions, Runtime, RuntimeOptions};

use crate::failure::{call, invalid};
use crate::handle::{self, get, place, put, release, take};
use crate::numbers::highwater_status;
use crate::{json, texts};

/// A backend, its devices, and the pools of both.
#[derive(Debug)]
pub enum highwater_runtime {}

handle::kinds! {
    highwater_runtime: Runtime = b"hw-runtm";
}

/// Options of highwater_open. Zero is the default of each.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct highwater_open_options {
    /// sizeof(highwater_open_options).
    pub size: usize,
    /// If not 0, the mock is opened if no real device works. Has no effect with a backend's name.
    pub fallback_to_mock: u32,
    /// If not 0, no folder is searched for plugins.
    pub no_plugins: u32,
    /// A plugin's library or manifest, which is opened and no other.
    pub plugin_path: *const c_char,
    /// One more folder that is searched for plugins: an absolute path. A relative one is refused.
    pub plugin_folder: *const c_char,
    /// Most bytes of pinned memory that the runtime holds; 0 is unlimited.
    pub pinned_cap_bytes: u64,
    /// Most bytes of pinned memory that no buffer owns; 0 is unlimited.
    pub pinned_idle_cap_bytes: u64,
    /// Most bytes of memory of each device that streams hold; 0 is unlimited.
    pub device_cap_bytes: u64,
    /// Bytes of BLAS workspace of each stream; 0 is the backend's choice.
    pub blas_workspace_bytes: u64,
    /// BLAS handles of device 0 that are made in the background.
    pub warm_handles: u32,
    /// If not 0, 32-bit products may use TF32.
    pub allow_tf32: u32,
    /// If not 0, products may differ from run to run.
    pub allow_nondeterminism: u32,
}

handle::options! {
    highwater_open_options up to allow_nondeterminism: u32;
}

unsafe fn options(
    backend: *const c_char,
    given: *const highwater_open_options,
) -> front::Result<(OpenOptions, RuntimeOptions)> {
    let (mut open, mut runtime) = (OpenOptions::new(), RuntimeOptions::new());
    // SAFETY: The caller of the header's function passes a text.
    if let Some(name) = unsafe { handle::text(backend, "backend") }? {
        open = open.with_name(name);
    }
    if given.is_null() {
        return Ok((open, runtime));
    }
    // SAFETY: The caller of the header's function passes such a struct.
    let given = unsafe { handle::read(given) }?;
    if given.fallback_to_mock != 0 {
        open = open.with_fallback(Fallback::Mock);
    }
    if given.no_plugins != 0 {
        open = open.without_plugins();
    }
    // SAFETY: As above, for both texts.
    if let Some(path) = unsafe { handle::text(given.plugin_path, "plugin_path") }? {
        open = open.with_path(path);
    }
    // SAFETY: As above.
    if let Some(folder) = unsafe { handle::text(given.plugin_folder, "plugin_folder") }? {
        if !Path::new(folder).is_absolute() {
            return Err(invalid(
                format!("highwater_open_options.plugin_folder is `{folder}`, expected an absolute path"),
                "pass a path that begins with a slash: a relative one would depend on the working directory",
            ));
        }
        open = open.with_search_folder(folder);
    }
    let limit = |bytes: u64| (bytes != 0).then_some(bytes);
    if let Some(bytes) = limit(given.pinned_cap_bytes) {
        runtime.host_memory = runtime.host_memory.with_cap_bytes(bytes);
    }
    if let Some(bytes) = limit(given.pinned_idle_cap_bytes) {
        runtime.host_memory = runtime.host_memory.with_idle_cap_bytes(bytes);
    }
    if let Some(bytes) = limit(given.device_cap_bytes) {
        runtime.device_memory = runtime.device_memory.with_cap_bytes(bytes);
    }
    if let Some(bytes) = limit(given.blas_workspace_bytes) {
        runtime = runtime.with_blas_workspace_bytes(usize::try_from(bytes).unwrap_or(usize::MAX));
    }
    if given.allow_tf32 != 0 {
        runtime.numerics = runtime.numerics.allow_tf32();
    }
    if given.allow_nondeterminism != 0 {
        runtime.numerics = runtime.numerics.allow_nondeterminism();
    }
    Ok((open, runtime.with_warm_handles(given.warm_handles as usize)))
}

/// Opens a backend and makes a runtime over it. `backend` is a name, such as "cuda", "rocm", "mock" or a plugin's; that backend is
/// opened or none. If `backend` is null, the variable HIGHWATER_BACKEND names it; without one, the best real device is opened.
/// `options` may be null.
///
/// If `report` is not null, it receives a JSON text, also after an error of the search. The text states why each backend was or was
/// not taken. Release it with highwater_text_release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_open(
    backend: *const c_char,
    options: *const highwater_open_options,
    runtime: *mut *mut highwater_runtime,
    report: *mut *mut c_char,
) -> highwater_status {
    call!(highwater_open, {
        if !report.is_null() {
            place(report, "report")?;
            put(report, std::ptr::null_mut());
        }
        handle::make(runtime, || {
            let (open, options) = self::options(backend, options)?;
            let (opened, found) = match open.open() {
                Ok(opened) => (Ok(opened.backend), opened.report),
                Err(error) => (Err(error.error), error.report),
            };
            if !report.is_null() {
                texts::give(report, &json::report(&found));
            }
            Runtime::with_options(opened?, &options)
        })
    })
}

/// Tries every backend and plugin, and opens none. Writes the report of highwater_open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_survey(report: *mut *mut c_char) -> highwater_status {
    call!(highwater_survey, {
        place(report, "report")?;
        texts::give(report, &json::report(&front::opening::survey()));
        Ok(())
    })
}

/// Writes the number of devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_count(runtime: *mut highwater_runtime, count: *mut u32) -> highwater_status {
    call!(highwater_device_count, {
        let runtime = get(runtime)?;
        place(count, "count")?;
        put(count, runtime.device_count());
        Ok(())
    })
}

/// Writes the state and the history of the pools as a JSON text. Release it with highwater_text_release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_statistics(
    runtime: *mut highwater_runtime,
    statistics: *mut *mut c_char,
) -> highwater_status {
    call!(highwater_statistics, {
        let runtime = get(runtime)?;
        place(statistics, "statistics")?;
        texts::give(statistics, &json::statistics(&runtime.statistics()).to_string());
        Ok(())
    })
}

/// Frees what the pools keep and nothing uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_trim(runtime: *mut highwater_runtime) -> highwater_status {
    call!(highwater_trim, { get(runtime)?.trim() })
}

/// Ends the runtime: waits for its devices and frees everything. Writes the number of objects that the backend still counts to
/// `live`, which may be null. The handle is released, and null afterward, also if the call returns an error.
/// HIGHWATER_ERROR_INVALID_STATE: objects of the runtime are live, or another process has its memory open. The message counts them, and
/// `live` keeps its value. The runtime then ends with the last of its objects. highwater_runtime_release ends it without this check.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_close(runtime: *mut *mut highwater_runtime, live: *mut u64) -> highwater_status {
    call!(highwater_close, {
        if !live.is_null() {
            place(live, "number of live objects")?;
        }
        if let Some(runtime) = take(runtime)? {
            let left = runtime.close()?.total();
            if !live.is_null() {
                put(live, left);
            }
        }
        Ok(())
    })
}

/// Releases the handle. The runtime ends with the last object that uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_runtime_release(runtime: *mut *mut highwater_runtime) -> highwater_status {
    call!(highwater_runtime_release, { release(runtime) })
}
