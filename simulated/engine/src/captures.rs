//! The begin and the end of captures, and their status.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use highwater_hal::{Backend, CaptureMode};

use crate::capture_state::{CAPTURES, Capture, Part, is_blocking_on};
pub use crate::capture_state::{exchange_mode, mode, node, status};
use crate::code::{Answer, Code};
use crate::graphs;
use crate::process::simulation;
use crate::variants::{Vendor, vendor};

/// `cuStreamBeginCapture_v2`.
///
/// # Errors
/// 1 for an unknown mode, 900 for the legacy default stream, 401 if the stream takes part in a capture. CUDA: 906 for the legacy
/// default stream while a blocking stream is captured, and that capture is lost. On a dead stream (HIP) it succeeds, but no later
/// call on the stream does.
pub fn begin(raw: u64, capture_mode: u32) -> Answer<()> {
    let simulation = simulation()?;
    if capture_mode > mode::RELAXED {
        return Err(Code::INVALID_VALUE);
    }
    let stream = simulation.stream(raw)?;
    if stream.is_legacy() {
        simulation.check_legacy_use(stream.device)?;
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let capture = Arc::new(Capture::new(stream, capture_mode));
    if !CAPTURES.begin(Part::new(stream, Arc::clone(&capture), None)) {
        let dead = CAPTURES.of(stream.id).filter(|part| part.is_lost() && part.capture.is_ended());
        dead.ok_or(Code::ILLEGAL_STATE)?.begun_again.store(true, Ordering::Release);
        return Ok(());
    }
    // This module implements the rules; the mock only records.
    simulation.gpu.begin_capture(stream.id, CaptureMode::Relaxed).map_err(|error| {
        CAPTURES.end(&capture, false);
        simulation.code_of(error)
    })
}

/// Returns the part of a stream in a capture, which `cuStreamEndCapture` looks up first.
fn part_to_end(raw: u64) -> Answer<Arc<Part>> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    if stream.is_legacy() {
        simulation.check_legacy_use(stream.device)?;
    }
    CAPTURES.of(stream.id).ok_or(Code::ILLEGAL_STATE)
}

/// Checks that a stream takes part in a capture.
///
/// # Errors
/// 401 if it takes part in none; 906 as [`end`].
pub fn expect_capture(raw: u64) -> Answer<()> {
    part_to_end(raw).map(|_| ())
}

/// `cuStreamEndCapture`.
///
/// # Errors
/// 401 if there is no capture, 903 on a stream that joined, 901 if the capture was invalidated, 908 on another thread (unless
/// relaxed), 904 if a stream that joined was not waited for (CUDA: only if it recorded work). CUDA: 906 as [`begin`]; 903
/// invalidates the capture; 901, 904 and 908 end it. HIP: 908 takes precedence over 901;
/// 903 and 908 change nothing; 901 and 904 delete the graph and leave the streams as they are. After that, an invalidated stream
/// returns 901 again, or 904 if another capture was begun on it. A stream that was not invalidated returns 904.
pub fn end(raw: u64) -> Answer<u64> {
    let simulation = simulation()?;
    let part = part_to_end(raw)?;
    let stream = part.stream;
    let (capture, is_hip) = (&part.capture, vendor() == Vendor::Hip);
    if !part.is_origin() {
        if !is_hip {
            simulation.lose_capture(&part);
        }
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.is_ended() {
        let again = part.begun_again.load(Ordering::Acquire) || !part.is_lost();
        return Err(if again { Code::STREAM_CAPTURE_UNJOINED } else { Code::STREAM_CAPTURE_INVALIDATED });
    }
    let elsewhere = capture.mode != mode::RELAXED && capture.thread != std::thread::current().id();
    if elsewhere && is_hip {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    let is_lost = part.is_lost();
    if elsewhere || is_lost {
        CAPTURES.end(capture, is_hip);
        simulation.abandon(capture);
        return Err(if is_lost { Code::STREAM_CAPTURE_INVALIDATED } else { Code::STREAM_CAPTURE_WRONG_THREAD });
    }
    if !is_hip {
        simulation.hooks.excuse_idle_streams(stream.id);
    }
    // SAFETY: the program ends what it began; what the commands use has to stay until the last launch, which is the
    // promise of every user of the vendor's function.
    let recorded = unsafe { simulation.gpu.end_capture(stream.id) };
    CAPTURES.end(capture, recorded.is_err() && is_hip);
    let id = recorded.map_err(|error| match error.kind() {
        highwater_hal::ErrorKind::Capture => Code::STREAM_CAPTURE_UNJOINED,
        _ => simulation.code_of(error),
    })?;
    let nodes = std::mem::take(&mut *capture.nodes.lock());
    Ok(graphs::insert(id, stream.device, nodes, Arc::clone(&capture.memory)))
}

/// `cuStreamIsCapturing`: one of [`status`].
///
/// # Errors
/// 400 for an unknown stream. 906 for the legacy default stream while a blocking stream is captured; that capture continues.
pub fn is_capturing(raw: u64) -> Answer<u32> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    if stream.is_legacy() {
        let drawn_in = CAPTURES.find(|part| is_blocking_on(&part.stream, stream.device));
        if !drawn_in.is_empty() {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
    }
    Ok(match CAPTURES.of(stream.id) {
        None => status::NONE,
        Some(part) if part.is_lost() => status::INVALIDATED,
        Some(_) => status::ACTIVE,
    })
}

/// `hipStreamGetCaptureInfo`: the result of [`is_capturing`] and the number of the capture, or 0 if there is none.
///
/// # Errors
/// As [`is_capturing`].
pub fn info(raw: u64) -> Answer<(u32, u64)> {
    let status = is_capturing(raw)?;
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    Ok((status, CAPTURES.of(stream.id).map_or(0, |part| part.capture.number)))
}
