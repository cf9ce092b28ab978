//! Capture of a stream's work, and graphs.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use front::hal::numbers::Coded as _;
use front::{CaptureMode, Graph};

use crate::failure::{self, call, invalid};
use crate::handle::{self, get, make, release};
use crate::numbers::{HIGHWATER_OK, highwater_status};
use crate::stream::highwater_stream;

/// Work that was recorded, to launch.
#[derive(Debug)]
pub enum highwater_graph {}

handle::kinds! {
    highwater_graph: Mutex<Graph> = b"hw-graph";
}

/// Enqueues the work that is recorded.
pub type highwater_capture_callback = Option<unsafe extern "C" fn(user: *mut c_void) -> highwater_status>;

/// Records the work that the callback enqueues on the stream, without executing it. `mode` is HIGHWATER_CAPTURE_... The callback
/// returns 0, or a status that ends the capture and that this function returns. It must not throw or jump. Memory must be allocated
/// before, or by highwater_stream_allocate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_capture(
    stream: *mut highwater_stream,
    mode: u32,
    callback: highwater_capture_callback,
    user: *mut c_void,
    graph: *mut *mut highwater_graph,
) -> highwater_status {
    call!(highwater_capture, {
        let stream = get(stream)?;
        let Some(callback) = callback else {
            return Err(invalid("the callback is null, expected a function that enqueues work", "pass a function"));
        };
        let mode = CaptureMode::of(mode).ok_or_else(|| {
            invalid(
                format!("the mode is {mode}, expected one of HIGHWATER_CAPTURE_..."),
                "use a constant of the header",
            )
        })?;
        make(graph, || {
            let recorded = stream.capture_with(mode, |_| match callback(user) {
                HIGHWATER_OK => Ok(()),
                status => Err(failure::of_callback("highwater_capture", status)),
            });
            recorded.map(Mutex::new)
        })
    })
}

/// Enqueues the recorded work on a stream. Several threads that launch one graph take turns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_graph_launch(
    graph: *mut highwater_graph,
    stream: *mut highwater_stream,
) -> highwater_status {
    call!(highwater_graph_launch, {
        let (graph, stream) = (get(graph)?, get(stream)?);
        graph.lock().unwrap_or_else(PoisonError::into_inner).launch(stream)
    })
}

/// Releases the handle. The graph is destroyed after its last launch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_graph_release(graph: *mut *mut highwater_graph) -> highwater_status {
    call!(highwater_graph_release, { release(graph) })
}
