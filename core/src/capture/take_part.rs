//! The start of a stream's part in a capture: it begins one, or waits for an event of one.

use std::sync::Arc;

use super::recording::{Capture, Parts, Recording};
use super::thread::in_capture;
use crate::event::Event;
use crate::pool::workspaces::{IdleWorkspace, Workspaces};
use crate::services::Services;
use crate::stream::Stream;
use crate::stream::core::StreamCore;
use highwater_hal::{Backend, BlasKind, Error, ErrorKind, Result};

/// Makes a stream take part in a capture. `start` makes the backend's call.
pub(super) fn take_part(
    operation: &'static str,
    stream: &Stream,
    capture: &Arc<Capture>,
    start: impl FnOnce(&dyn Backend) -> Result<()>,
) -> Result<()> {
    let inner = &stream.runtime().inner;
    let core = stream.core();
    let device = inner.device(stream.device());
    let refused = |message: &str, hint: &str| Err(Error::new(ErrorKind::Capture, operation, message).with_hint(hint));
    if core.id.is_legacy_default() || core.id.is_per_thread_default() {
        return refused("a default stream cannot take part in a capture", "capture a stream made for it");
    }
    let capturing = device.capture_gate.capturing();
    let mut reserved = Reserved {
        services: &inner.services,
        pool: &inner.workspaces,
        device: stream.device(),
        workspaces: Vec::new(),
    };
    if !device.capabilities.create_during_capture && !in_capture() {
        reserved.add(BlasKind::Blas)?;
        if device.capabilities.lt_plans {
            reserved.add(BlasKind::Lt)?;
        }
    }
    let mut completion = device.events.take(&*inner.backend)?;
    let mut submission = core.enter(operation)?;
    core.wait_settled(&mut submission);
    if submission.recording.is_some() {
        drop(submission);
        return refused("the stream already takes part in a capture", "end that capture first");
    }
    if submission.lent > 0 {
        drop(submission);
        return refused("a raw handle of the stream is lent to foreign code", "capture after `with_raw` has returned");
    }
    if capture.is_closed() {
        drop(submission);
        return Err(capture.no_answer(operation));
    }
    // The completion event returns to its pool after the submission lock, even if a call fails.
    let started = core.record(&mut submission, &mut completion).and_then(|()| start(&*inner.backend));
    if let Err(error) = started {
        drop(submission);
        return Err(error);
    }
    let key = StreamCore::next_key();
    core.bind_to(key);
    submission.recording = Some(Box::new(Recording {
        capture: Arc::clone(capture),
        key,
        before: Arc::new(completion),
        device: stream.device(),
        parts: Parts::default(),
        memory: None,
        reserved: std::mem::take(&mut reserved.workspaces),
        returned: Vec::new(),
        blas_workspace: None,
        lt_workspace: None,
    }));
    drop(submission);
    // The end of the capture decrements the count.
    std::mem::forget(capturing);
    Ok(())
}

/// Workspaces allocated before a capture. They return to the pool unless the capture takes them.
struct Reserved<'r> {
    services: &'r Services,
    pool: &'r Workspaces,
    device: u32,
    workspaces: Vec<IdleWorkspace>,
}

impl Reserved<'_> {
    fn add(&mut self, kind: BlasKind) -> Result<()> {
        let bytes = self.services.device(self.device).workspace_bytes(kind);
        if bytes > 0 && self.workspaces.iter().all(|idle| idle.workspace.bytes < bytes) {
            self.workspaces.push(self.pool.take_or_allocate(self.device, bytes)?);
        }
        Ok(())
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        for idle in self.workspaces.drain(..) {
            self.pool.give_back(self.device, idle);
        }
    }
}

/// Makes `stream` wait for an event that was recorded in a capture. The stream joins the capture, or takes part already.
pub(crate) fn join(stream: &Stream, event: &Event, capture: &Arc<Capture>) -> Result<()> {
    const OPERATION: &str = "stream_wait_event";
    let inner = &stream.runtime().inner;
    {
        let submission = stream.core().enter(OPERATION)?;
        if let Some(recording) = &submission.recording {
            if Arc::ptr_eq(&recording.capture, capture) {
                return inner.backend.stream_wait_event(stream.id(), event.id);
            }
            return Err(Error::new(
                ErrorKind::Capture,
                OPERATION,
                "the event was recorded in another capture than that of the stream",
            )
            .with_hint("captures do not wait for each other; launch their graphs in order"));
        }
    }
    if !Arc::ptr_eq(&event.runtime().inner, inner) {
        return Err(Error::new(
            ErrorKind::InvalidHandle,
            OPERATION,
            "the event belongs to another runtime than the stream",
        )
        .with_hint("capture on streams of one runtime"));
    }
    if !capture.add(stream.core()) {
        return Err(capture.no_answer(OPERATION));
    }
    take_part(OPERATION, stream, capture, |backend| backend.stream_wait_event(stream.id(), event.id))
}
