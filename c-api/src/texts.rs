//! Functions of texts and of the last error. They return no status.

use std::ffi::{CString, c_char};

use front::ErrorKind;
use front::hal::numbers::Coded as _;

use crate::failure;
use crate::numbers::{HIGHWATER_OK, HIGHWATER_PANICKED, highwater_status};

/// Hands a text to the caller.
///
/// # Safety
/// The caller must pass a place that `place` has checked.
pub(crate) unsafe fn give(place: *mut *mut c_char, text: &str) {
    // SAFETY: As the caller promises.
    unsafe { place.write(failure::c_text(text).into_raw()) }
}

/// Returns the version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn highwater_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the words of a status, such as "out of memory".
#[unsafe(no_mangle)]
pub extern "C" fn highwater_status_text(status: highwater_status) -> *const c_char {
    let words = match (status, u32::try_from(status).ok().and_then(ErrorKind::of)) {
        (HIGHWATER_OK, _) => c"success",
        (HIGHWATER_PANICKED, _) => c"panic",
        (_, Some(kind)) => words_of(kind),
        _ => c"unknown status",
    };
    words.as_ptr()
}

fn words_of(kind: ErrorKind) -> &'static std::ffi::CStr {
    static WORDS: std::sync::OnceLock<Vec<(ErrorKind, CString)>> = std::sync::OnceLock::new();
    let words =
        WORDS.get_or_init(|| ErrorKind::ALL.iter().map(|&kind| (kind, failure::c_text(kind.as_str()))).collect());
    words.iter().find(|(known, _)| *known == kind).map_or(c"unknown status", |(_, text)| text)
}

/// Returns the whole message of the last error of this thread: the function, the fault, the expected value and the remedy. It is valid
/// until the next error of this thread, and empty before the first.
#[unsafe(no_mangle)]
pub extern "C" fn highwater_last_error() -> *const c_char {
    failure::message()
}

/// Returns the remedy of the last error of this thread. It may be empty.
#[unsafe(no_mangle)]
pub extern "C" fn highwater_last_hint() -> *const c_char {
    failure::hint()
}

/// Writes the vendor's code of the last error of this thread, and returns true. Returns false if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_last_vendor_code(code: *mut i64) -> bool {
    let known = failure::vendor_code();
    if let Some(known) = known
        && !code.is_null()
    {
        // SAFETY: The caller passes null, or the address of a number.
        unsafe { code.write(known) };
    }
    known.is_some()
}

/// Frees a text of this library, and sets it to null. Does nothing with null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_text_release(text: *mut *mut c_char) {
    if text.is_null() {
        return;
    }
    // SAFETY: The caller passes the address of null, or of a text that this library gave.
    let given = unsafe { text.replace(std::ptr::null_mut()) };
    if !given.is_null() {
        // SAFETY: As above, and the caller has no other copy in use.
        drop(unsafe { CString::from_raw(given) });
    }
}
