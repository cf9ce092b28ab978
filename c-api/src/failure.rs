//! Statuses, and the last error of each thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use front::hal::numbers::Coded as _;
use front::{Error, ErrorKind, Result};

use crate::numbers::{HIGHWATER_OK, HIGHWATER_PANICKED, highwater_status};

/// The last error of a thread.
struct Last {
    error: Option<Error>,
    message: CString,
    hint: CString,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Returns a text as a C string. A NUL inside becomes a space.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// Runs the body of a function of the header. Contains its panics, keeps its error for the thread, and names the function in errors
/// of arguments.
#[inline(always)]
pub(crate) fn contained(operation: &'static str, body: impl FnOnce() -> Result<()>) -> highwater_status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => HIGHWATER_OK,
        Ok(Err(error)) => refused(operation, error),
        Err(payload) => panicked(operation, payload),
    }
}

/// As [`contained`], by the function's own name. The body may use the arguments as the header allows.
macro_rules! call {
    ($name:ident, $body:block) => {
        $crate::failure::contained(stringify!($name), || {
            #[allow(unused_unsafe, reason = "some functions only pass numbers")]
            // SAFETY: The caller passes pointers and handles as the header describes them.
            unsafe {
                $body
            }
        })
    };
}
pub(crate) use call;

#[cold]
fn refused(operation: &'static str, error: Error) -> highwater_status {
    let error = match error.operation() {
        ARGUMENT => Error::new(error.kind(), operation, error.message()).with_hint(error.hint()),
        _ => error,
    };
    let status = error.kind().code().cast_signed();
    let (message, hint) = (in_c(&named(operation, &error)), in_c(error.hint()));
    keep(Last { message: c_text(&message), hint: c_text(&hint), error: Some(error) });
    status
}

/// Returns the message of an error, which begins with the name of the function of the header.
fn named(operation: &str, error: &Error) -> String {
    let inner = error.operation();
    if inner == operation {
        error.to_string()
    } else if operation.strip_prefix("highwater_") == Some(inner) {
        format!("highwater_{error}")
    } else {
        format!("{operation}: {error}")
    }
}

/// The remedy of an open without a device, in the Rust crates.
pub(crate) const ALLOW_MOCK: &str = "allow the mock, or ask for it by name";

/// The names and the remedies in the errors of the Rust crates, and those of C. An earlier row is replaced first.
const NAMES: [(&str, &str); 43] = [
    (", or by `Holder::hold`", ""),
    (", or `HostMemoryOptions::with_idle_time`", ""),
    (", or `SharingOptions::with_rendezvous`", ""),
    ("use `read_with` or `write_with`, or drop the graph first", "release the graph first"),
    (ALLOW_MOCK, "set highwater_open_options.fallback_to_mock, or pass \"mock\""),
    ("`capabilities()`", "highwater_device_describe"),
    ("`device_count`", "the number of highwater_device_count"),
    ("`Device::warm` and `warm_lt` make handles and workspaces", "highwater_device_warm makes handles and workspaces"),
    ("another `Runtime`", "another highwater_runtime"),
    (
        "call `legacy_default_stream` or `per_thread_default_stream`",
        "call highwater_stream_legacy_default or highwater_stream_per_thread_default",
    ),
    (
        "drop its devices, streams, events, buffers and clones first",
        "release the handles of its devices, streams, events and buffers first",
    ),
    ("drop buffers", "release buffers"),
    ("drop the buffer", "release the buffer"),
    ("drop the graph", "release the graph"),
    ("drop the memory", "release the memory"),
    ("fill the buffer before its first `share`", "fill the buffer before its first highwater_pinned_share"),
    ("give no name", "pass NULL instead of a name"),
    (
        "open the backend in the child only, or start the child with exec (spawn)",
        "start the child with exec, and open a runtime in the new program",
    ),
    ("mode `Relaxed`", "mode HIGHWATER_CAPTURE_RELAXED"),
    ("share a stream of `create_stream`", "share a stream of highwater_stream_create"),
    ("the bytes of `Ticket::to_bytes`", "the text of highwater_buffer_share or highwater_pinned_share"),
    (
        "the result of `raw_event`, and keep the event until its wrapper is destroyed",
        "the vendor's event, and keep it until its handle is released",
    ),
    (
        "the result of `raw_stream`, and keep the stream until its wrapper is destroyed",
        "the result of highwater_stream_raw, and keep the stream until its handle is released",
    ),
    ("use `StreamId::legacy_default`, or `Device::legacy_default_stream`", "use highwater_stream_legacy_default"),
    (
        "use `StreamId::per_thread_default`, or `Device::per_thread_default_stream`",
        "use highwater_stream_per_thread_default",
    ),
    ("`Device::allocate`", "highwater_device_allocate"),
    ("`Device::allocate_shared`", "highwater_device_allocate_shared"),
    ("`Device::legacy_default_stream`", "highwater_stream_legacy_default"),
    ("`Device::per_thread_default_stream`", "highwater_stream_per_thread_default"),
    ("`Device::warm`", "highwater_device_warm"),
    ("`DeviceMemoryOptions::with_cap_bytes`", "highwater_open_options.device_cap_bytes"),
    ("`EventOptions::with_timing`", "highwater_stream_record_timed"),
    ("`Owner::wait`", "highwater_owner_wait"),
    ("`OwnerDeath::Inherit`", "HIGHWATER_OWNER_DEATH_INHERIT"),
    ("`OwnerDeath::Keep`", "HIGHWATER_OWNER_DEATH_KEEP"),
    ("`Runtime::close`", "highwater_close"),
    ("`Runtime::open_pinned`", "highwater_pinned_open"),
    ("`Runtime::open_shared`", "highwater_ticket_open"),
    ("`Runtime::pinned`", "highwater_pinned_allocate"),
    ("`Runtime::trim`", "highwater_trim"),
    ("`SharedPinnedBuffer::share`", "highwater_pinned_share"),
    ("`Stream::capture`", "highwater_capture"),
    ("`Stream::note_device_use`", "highwater_buffer_used_on"),
];

/// Returns a text of the Rust crates with the names of the header.
fn in_c(text: &str) -> String {
    NAMES.iter().fold(text.to_owned(), |text, (rust, c)| text.replace(rust, c))
}

#[cold]
fn panicked(operation: &str, payload: Box<dyn Any + Send>) -> highwater_status {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a text");
    let hint = "this is an error in Highwater: report it, and end the process";
    keep(Last { error: None, message: c_text(&format!("{operation}: panic: {text}; {hint}")), hint: c_text(hint) });
    // Its destructor could panic too.
    std::mem::forget(payload);
    HIGHWATER_PANICKED
}

/// The cell is gone if the thread ends; then the status alone is returned.
fn keep(last: Last) {
    let _ = LAST.try_with(|cell| cell.replace(Some(last)));
}

/// The operation of errors of arguments, until [`contained`] has put the function's name in its place.
pub(crate) const ARGUMENT: &str = "argument";

/// Returns the error of a callback that returned a status.
pub(crate) fn of_callback(operation: &'static str, status: highwater_status) -> Error {
    let kept = LAST.try_with(|cell| cell.borrow().as_ref().and_then(|last| last.error.clone())).ok().flatten();
    match kept {
        Some(error) if error.kind().code().cast_signed() == status => error,
        _ => Error::new(ErrorKind::InvalidState, operation, format!("the callback returned {status}, expected 0"))
            .with_hint("return 0, or the status of the call that failed"),
    }
}

/// Creates the error of an argument.
pub(crate) fn invalid(message: impl Into<String>, hint: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, ARGUMENT, message).with_hint(hint)
}

fn text_of(choose: impl FnOnce(&Last) -> &CStr) -> *const c_char {
    let text = LAST.try_with(|cell| cell.borrow().as_ref().map(|last| choose(last).as_ptr())).ok().flatten();
    text.unwrap_or(c"".as_ptr())
}

/// Returns the last error's whole message, for the header.
pub(crate) fn message() -> *const c_char {
    text_of(|last| &last.message)
}

/// Returns the last error's hint, for the header.
pub(crate) fn hint() -> *const c_char {
    text_of(|last| &last.hint)
}

/// Returns the last error's code of the vendor, for the header.
pub(crate) fn vendor_code() -> Option<i64> {
    let code = |cell: &RefCell<Option<Last>>| cell.borrow().as_ref()?.error.as_ref()?.code();
    LAST.try_with(code).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use front::hal::fork::Generation;

    fn last() -> String {
        // SAFETY: The text is that of this thread, and no call comes between.
        unsafe { CStr::from_ptr(message()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        assert_eq!(contained("highwater_test", || panic!("a bug in the pools")), HIGHWATER_PANICKED);
        assert!(
            last().starts_with("highwater_test: panic: a bug in the pools; this is an error in Highwater"),
            "{}",
            last()
        );
        assert_eq!(vendor_code(), None);
        // A callback's status of an earlier error does not bring back a panic.
        assert_eq!(of_callback("highwater_test", HIGHWATER_PANICKED).kind(), ErrorKind::InvalidState);
    }

    #[test]
    fn errors_of_the_crates_name_the_function_and_what_c_has() {
        let refusal =
            |operation| Error::new(ErrorKind::InvalidArgument, operation, "the buffer was not allocated to be shared");
        let shared = |operation| Err(refusal(operation).with_hint("allocate it with `Device::allocate_shared`"));
        let expected = "invalid argument: the buffer was not allocated to be shared; allocate it with highwater_device_allocate_shared";
        contained("highwater_test", || shared("highwater_test"));
        assert_eq!(last(), format!("highwater_test: {expected}"));
        contained("highwater_test", || shared("test"));
        assert_eq!(last(), format!("highwater_test: {expected}"));
        contained("highwater_test", || shared("slice"));
        assert_eq!(last(), format!("highwater_test: slice: {expected}"));
        // SAFETY: The text is that of this thread, and no call comes between.
        assert_eq!(unsafe { CStr::from_ptr(hint()) }, c"allocate it with highwater_device_allocate_shared");
        let no_device = || {
            Err(Error::new(ErrorKind::DeviceMissing, "open", "no backend could be taken")
                .with_hint("allow the mock, or ask for it by name, to compute on the CPU"))
        };
        contained("highwater_open", no_device);
        let remedy = "set highwater_open_options.fallback_to_mock, or pass \"mock\", to compute on the CPU";
        assert!(last().ends_with(remedy), "{}", last());
    }

    /// Hints of the crates, and what C gets instead.
    const HINTS: [(&str, &str); 12] = [
        (
            "call `legacy_default_stream` or `per_thread_default_stream`, whichever that code uses",
            "call highwater_stream_legacy_default or highwater_stream_per_thread_default, whichever that code uses",
        ),
        (
            "pass the result of `raw_stream`, and keep the stream until its wrapper is destroyed",
            "pass the result of highwater_stream_raw, and keep the stream until its handle is released",
        ),
        ("use `StreamId::legacy_default`, or `Device::legacy_default_stream`", "use highwater_stream_legacy_default"),
        (
            "use it only in the thread that made it, or share a stream of `create_stream`",
            "use it only in the thread that made it, or share a stream of highwater_stream_create",
        ),
        (
            "open every shared ticket in one process with `OwnerDeath::Inherit`, or by `Holder::hold`, which must not be stopped (`kill -CONT`)",
            "open every shared ticket in one process with HIGHWATER_OWNER_DEATH_INHERIT, which must not be stopped (`kill -CONT`)",
        ),
        ("fill the buffer before its first `share`", "fill the buffer before its first highwater_pinned_share"),
        (
            "drop its devices, streams, events, buffers and clones first",
            "release the handles of its devices, streams, events and buffers first",
        ),
        ("first let those processes drop the buffers, or end", "first let those processes release the buffers, or end"),
        (
            "drop buffers, or raise `DeviceMemoryOptions::with_cap_bytes`",
            "release buffers, or raise highwater_open_options.device_cap_bytes",
        ),
        (
            "warm up before the capture: `Device::warm` and `warm_lt` make handles and workspaces, or run the same work once",
            "warm up before the capture: highwater_device_warm makes handles and workspaces, or run the same work once",
        ),
        ("pass an ordinal below `device_count`", "pass an ordinal below the number of highwater_device_count"),
        (
            "end it on that thread, or capture in mode `Relaxed`",
            "end it on that thread, or capture in mode HIGHWATER_CAPTURE_RELAXED",
        ),
    ];

    #[test]
    fn hints_have_the_names_of_the_header() {
        for (rust, c) in HINTS {
            assert_eq!(in_c(rust), c);
        }
        let forked = in_c(Generation::error("test").hint());
        assert_eq!(forked, "start the child with exec, and open a runtime in the new program");
    }

    /// A row whose text the crates no longer have would translate nothing, and C would get the new text as it is.
    #[test]
    fn each_row_of_the_table_is_a_text_of_the_crates() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        // A package of the registry is alone.
        if !root.join("core/src").is_dir() {
            return;
        }
        let mut sources = String::new();
        for folder in ["core", "core/hal", "backend-driver", "backend-mock", "."] {
            read_all(&root.join(folder).join("src"), &mut sources);
        }
        // The mock puts the kind of object in.
        let sources = sources.replace("{what}", "stream") + &sources.replace("{what}", "event");
        for (rust, _) in NAMES {
            assert!(sources.contains(rust), "no crate has `{rust}`");
        }
    }

    fn read_all(folder: &std::path::Path, sources: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                read_all(&path, sources);
            } else {
                sources.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }

    #[test]
    fn the_last_error_has_its_code_and_stays_after_a_success() {
        let refusal =
            || Error::new(ErrorKind::Vendor, "copy", "no\0t today").with_code(719).with_hint("end the process");
        assert_eq!(contained("highwater_test", || Err(refusal())), ErrorKind::Vendor.code().cast_signed());
        assert_eq!(contained("highwater_test", || Ok(())), HIGHWATER_OK);
        assert!(last().contains("(vendor code 719); end the process"), "{}", last());
        assert_eq!(vendor_code(), Some(719));
        assert_eq!(of_callback("highwater_test", ErrorKind::Vendor.code().cast_signed()).code(), Some(719));
        assert!(std::thread::spawn(last).join().unwrap().is_empty());
    }
}
