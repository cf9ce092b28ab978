//! The captures that a thread has open, and the calls that it must not make during them.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

use highwater_hal::{Error, ErrorKind, Result};

thread_local! {
    /// Captures that this thread has begun and not ended.
    static OPEN_CAPTURES: Cell<u32> = const { Cell::new(0) };
    /// Runtimes whose last user was dropped inside a capture on this thread.
    static ENDING: RefCell<Vec<Arc<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Returns whether this thread is inside a capture.
#[inline(always)]
pub(crate) fn in_capture() -> bool {
    OPEN_CAPTURES.try_with(|open| open.get() > 0).unwrap_or(false)
}

pub(super) fn count_open(change: i32) {
    // If the thread is ending, there is nothing to refuse or defer.
    let _ = OPEN_CAPTURES.try_with(|open| open.set(open.get().saturating_add_signed(change)));
}

/// Drops a reference to a runtime, whose end waits for captures. Inside a capture of this thread it would wait for ever. So the
/// end of that capture drops the reference.
pub(crate) fn let_go(runtime: Arc<dyn Any>) {
    if in_capture() {
        // If the thread is ending, the runtime ends here, without waiting.
        let _ = ENDING.try_with(|ending| ending.borrow_mut().push(runtime));
    }
}

/// Ends the runtimes that were dropped inside a capture, once this thread is inside none.
pub(super) fn end_runtimes() {
    if !in_capture() {
        // Taken out of the cell first: the end of a runtime runs code of the backend.
        drop(ENDING.try_with(RefCell::take));
    }
}

/// Refuses a call that a thread inside a capture must not make.
#[inline(always)]
pub(crate) fn refuse_in_capture(operation: &'static str) -> Result<()> {
    if in_capture() { Err(not_in_capture(operation)) } else { Ok(()) }
}

#[cold]
fn not_in_capture(operation: &'static str) -> Error {
    Error::new(ErrorKind::Capture, operation, "this thread is inside a capture, where this is not possible")
        .with_hint("allocate and create before the capture, and free after it")
}

/// Returns the error of a wait that begins inside a capture.
#[cold]
pub(crate) fn no_wait_in_capture(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::Capture,
        operation,
        "this thread is inside a capture, where no wait for device work can begin",
    )
    .with_hint("begin the wait before the capture or after it; the capture goes on")
}

/// Returns the error of a query of a stream that takes part in a capture.
#[cold]
pub(crate) fn nothing_is_executed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Capture, operation, "the stream takes part in a capture: its work is recorded, not executed")
        .with_hint("do this before the capture, or after it and a launch of its graph; the capture goes on")
}

#[cold]
pub(crate) fn warm_up_first(operation: &'static str, what: &str) -> Error {
    Error::new(
        ErrorKind::Capture,
        operation,
        format!("the call needs {what}, which this device cannot make during a capture"),
    )
    .with_hint("warm up before the capture: `Device::warm` and `warm_lt` make handles and workspaces, or run the same work once")
}
