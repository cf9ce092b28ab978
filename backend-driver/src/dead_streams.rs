//! Replacement of streams that die with a lost capture.
//!
//! The contract says that a stream works as before after its capture was lost, and keeps its id. On some vendors, a
//! stream that took part in a lost capture stays unusable. While a capture is open on such a vendor, this module keeps
//! a completion event for each stream that takes part. The event is recorded before the stream takes part, because a
//! dead stream accepts neither a wait nor a record.
//!
//! When the capture is lost, a new stream replaces each dead one under its id. The new stream waits for the event, so
//! earlier work still comes first. BLAS handles notice the new vendor handle and bind again. On a vendor whose streams
//! survive, none of this runs.

use super::calls::capture_status;
use super::objects::Removed;
use super::platform::Platform;
use super::raw::{RawEvent, RawStream};
use super::state::{self, CAPTURES, DriverState, FOREIGN, HIGH, HeldStream, LOW};
use highwater_hal::{Error, ErrorKind, Result, StreamId, StreamPriority};

/// A capture that this backend began.
#[derive(Debug)]
pub(super) struct OpenCapture {
    /// The vendor's handle of the stream on which the capture began.
    origin: RawStream,
    /// The thread that began the capture.
    thread: u64,
    members: Vec<Member>,
}

/// A stream that takes part in a capture.
#[derive(Debug)]
struct Member {
    stream: StreamId,
    /// The completion event of the work before the capture.
    before: RawEvent,
    /// Whether the stream certainly takes part in this capture, if several are open.
    certain: bool,
}

impl<P: Platform> DriverState<P> {
    /// Returns whether streams die with a lost capture.
    #[inline(always)]
    pub(super) fn streams_die(&self) -> bool {
        self.platform.quirks().capture_loss_kills_streams.is_some()
    }

    /// Creates a stream of the vendor.
    pub(super) fn make_stream(
        &self,
        operation: &'static str,
        device: u32,
        priority: StreamPriority,
    ) -> Result<RawStream> {
        let (calls, flags) = (self.platform.calls(), self.platform.quirks().stream_flags);
        let _relaxed = self.relaxed();
        let _current = self.make_current(operation, device)?;
        let (mut least, mut greatest, mut raw) = (0, 0, RawStream::NULL);
        // SAFETY: The call writes two numbers, which outlive it.
        self.check(operation, unsafe { (calls.get_stream_priority_range)(&mut least, &mut greatest) })?;
        let priority = match priority {
            StreamPriority::Low => least,
            StreamPriority::Normal => 0,
            StreamPriority::High => greatest,
        };
        // SAFETY: As above.
        self.check(operation, unsafe { (calls.stream_create_with_priority)(&mut raw, flags, priority) })?;
        self.made(operation, raw)
    }

    /// Records a completion event on a stream, which the caller holds.
    fn record_completion_event(
        &self,
        operation: &'static str,
        stream: &HeldStream<'_>,
        device: u32,
    ) -> Result<RawEvent> {
        let calls = self.platform.calls();
        let _relaxed = self.relaxed();
        let _current = self.make_current(operation, device)?;
        let mut event = RawEvent::NULL;
        let plain = self.platform.quirks().event_flags.plain;
        // SAFETY: The call writes one number, which outlives it.
        self.check(operation, unsafe { (calls.event_create)(&mut event, plain) })?;
        self.made(operation, event)?;
        // SAFETY: The event was just created, and the stream is held.
        let recorded = self.check(operation, unsafe { (calls.event_record)(event, stream.raw()) });
        if recorded.is_err() {
            self.destroy_completion_event(event);
        }
        recorded.map(|()| event)
    }

    fn destroy_completion_event(&self, event: RawEvent) {
        let _relaxed = self.relaxed();
        // SAFETY: Only this backend knows the event, and forgets it here.
        let code = unsafe { (self.platform.calls().event_destroy)(event) };
        if code != 0 {
            tracing::warn!("a completion event was leaked: {}", self.platform.codes().error("end_capture", code));
        }
    }

    /// Begins a capture by `begin`, and keeps the state that its loss requires.
    #[cold]
    pub(super) fn begin_mortal_capture(
        &self,
        operation: &'static str,
        stream: StreamId,
        held: &HeldStream<'_>,
        begin: impl FnOnce() -> i32,
    ) -> Result<()> {
        let before = self.record_completion_event(operation, held, stream.device())?;
        if let Err(error) = self.check(operation, begin()) {
            self.destroy_completion_event(before);
            return Err(error);
        }
        // A capture that foreign code ended may still be stored.
        self.forget_capture(held.raw());
        let members = vec![Member { stream, before, certain: true }];
        let capture = OpenCapture { origin: held.raw(), thread: state::this_thread(), members };
        self.open_captures.lock().push(capture);
        Ok(())
    }

    /// Makes a stream wait by `wait`, which may add the stream to a capture.
    #[cold]
    pub(super) fn wait_and_perhaps_join(
        &self,
        operation: &'static str,
        stream: StreamId,
        held: &HeldStream<'_>,
        wait: impl FnOnce() -> i32,
    ) -> Result<()> {
        if self.is_capturing(operation, held.raw())? {
            return self.check(operation, wait());
        }
        let before = self.record_completion_event(operation, held, stream.device())?;
        let waits = self.check(operation, wait());
        let joined = waits.is_ok() && self.is_capturing(operation, held.raw()).unwrap_or(false);
        if !(joined && self.note_member(stream, before)) {
            self.destroy_completion_event(before);
        }
        waits
    }

    /// Stores that the stream takes part in a capture. Vendors do not report which one. A capture of this thread is
    /// preferred.
    fn note_member(&self, stream: StreamId, before: RawEvent) -> bool {
        let mut open = self.open_captures.lock();
        let (one, here) = (open.len() == 1, state::this_thread());
        let own = open.iter().rposition(|capture| capture.thread == here);
        let found = own.or_else(|| open.len().checked_sub(1)).and_then(|last| open.get_mut(last));
        let Some(capture) = found else { return false };
        capture.members.push(Member { stream, before, certain: one || own.is_some() });
        true
    }

    /// Returns whether the stream joined a capture that began on another stream.
    fn has_joined(&self, stream: StreamId) -> bool {
        let open = self.open_captures.lock();
        open.iter().any(|capture| capture.members.iter().skip(1).any(|member| member.stream == stream))
    }

    pub(super) fn take_capture(&self, origin: RawStream) -> Option<OpenCapture> {
        let mut open = self.open_captures.lock();
        let index = open.iter().position(|capture| capture.origin == origin)?;
        Some(open.swap_remove(index))
    }

    /// Removes a capture that ended with success.
    pub(super) fn forget_capture(&self, origin: RawStream) {
        for member in self.take_capture(origin).into_iter().flat_map(|capture| capture.members) {
            self.destroy_completion_event(member.before);
        }
    }

    /// Returns whether a capture that ended with `code` killed its stream. `status` is the stream's state afterwards,
    /// and `began_here` tells whether this backend began the capture.
    pub(super) fn has_died(&self, stream: StreamId, code: i32, status: u32, began_here: bool) -> bool {
        let Some(lost) = self.platform.quirks().capture_loss_kills_streams else { return false };
        // A stream that was not joined leaves the capture open, and no call can end it any more.
        let dead = code == lost || (code != 0 && status != capture_status::NONE && began_here);
        dead && !self.has_joined(stream)
    }

    /// Replaces the streams that died with the capture of `stream`, whose handle was `origin`.
    #[cold]
    pub(super) fn replace_dead(&self, operation: &'static str, stream: StreamId, origin: RawStream) -> Result<()> {
        match self.take_capture(origin) {
            Some(capture) => self.replace_members(operation, stream, capture),
            // Foreign code began the capture, so the only order is to wait for the device.
            None => self.replace_stream(operation, stream, None),
        }
    }

    /// Replaces the streams of a removed capture. Returns the result for `stream`.
    pub(super) fn replace_members(
        &self,
        operation: &'static str,
        stream: StreamId,
        capture: OpenCapture,
    ) -> Result<()> {
        let mut answer = Ok(());
        // The first stream is the last to be replaced. Without it, the vendor may not report the state of the others.
        for member in capture.members.into_iter().rev() {
            let outcome = if member.stream == stream {
                self.replace_stream(operation, stream, Some(member.before))
            } else {
                self.replace_member(operation, &member)
            };
            self.destroy_completion_event(member.before);
            match outcome {
                Ok(()) => {}
                Err(error) if member.stream == stream => answer = Err(error),
                Err(error) => tracing::warn!("a stream that had joined a lost capture was not replaced: {error}"),
            }
        }
        answer
    }

    fn replace_member(&self, operation: &'static str, member: &Member) -> Result<()> {
        let status = {
            let held = self.stream(operation, member.stream)?;
            self.capture_status(operation, held.raw())?
        };
        if status == capture_status::INVALIDATED || (status != capture_status::NONE && member.certain) {
            self.replace_stream(operation, member.stream, Some(member.before))
        } else {
            Ok(())
        }
    }

    /// Puts a new stream under the id of a dead one.
    fn replace_stream(&self, operation: &'static str, stream: StreamId, before: Option<RawEvent>) -> Result<()> {
        let flags = self.stream(operation, stream)?.flags();
        if flags & FOREIGN != 0 {
            let message = format!("{stream:?} died with its capture, and foreign code owns it");
            return Err(Error::new(ErrorKind::InvalidState, operation, message)
                .with_hint("destroy the id, then replace the stream in the code that created it"));
        }
        let priority = match (flags & LOW != 0, flags & HIGH != 0) {
            (true, _) => StreamPriority::Low,
            (_, true) => StreamPriority::High,
            _ => StreamPriority::Normal,
        };
        let calls = self.platform.calls();
        let outcome = self.make_stream(operation, stream.device(), priority).and_then(|raw| {
            let ordered = match before {
                // SAFETY: Both were created here, and only this backend destroys them.
                Some(before) => self.check(operation, unsafe { (calls.stream_wait_event)(raw, before, 0) }),
                None => {
                    let _relaxed = self.relaxed();
                    let _current = self.make_current(operation, stream.device())?;
                    // SAFETY: The call takes no argument.
                    self.check(operation, unsafe { (calls.device_synchronize)() })
                }
            };
            let replaced = ordered.and_then(|()| {
                self.streams.replace(operation, stream, raw, |dead| self.destroy_raw_stream(operation, dead))
            });
            if replaced.is_err() {
                // SAFETY: No other code knows the stream.
                unsafe { (calls.stream_destroy)(raw) };
            }
            replaced
        });
        outcome.map_err(|error| {
            let message = format!("{stream:?} died with its capture and could not be replaced: {}", error.message());
            Error::new(ErrorKind::InvalidState, operation, message)
                .with_code(error.code().unwrap_or(0))
                .with_hint("destroy the stream and create another")
        })
    }

    /// Destroys a stream on which this backend began a capture: ends the capture and replaces the streams that had
    /// joined. `destroy` makes the vendor's call.
    pub(super) fn destroy_with_capture(
        &self,
        operation: &'static str,
        stream: &Removed<RawStream>,
        destroy: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // Before another stream can get the same handle.
        let capture = self.take_capture(stream.raw).filter(|_| stream.flags & CAPTURES != 0);
        for (place, member) in capture.into_iter().flat_map(|capture| capture.members).enumerate() {
            if place > 0
                && let Err(error) = self.replace_member(operation, &member)
            {
                tracing::warn!("a stream that had joined a lost capture was not replaced: {error}");
            }
            self.destroy_completion_event(member.before);
        }
        destroy()
    }

    /// Removes all captures.
    pub(super) fn forget_captures(&self) {
        let open = std::mem::take(&mut *self.open_captures.lock());
        for member in open.into_iter().flat_map(|capture| capture.members) {
            self.destroy_completion_event(member.before);
        }
    }
}
