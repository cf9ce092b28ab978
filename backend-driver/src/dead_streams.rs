//! Streams that die with a capture, for a vendor whose streams do.
//!
//! A stream promises to work as before after its capture was lost, and its id goes on. So while a capture is open, the room
//! keeps an event for each stream that takes part, recorded before it did: a dead stream takes neither a wait nor a record, and
//! what was enqueued before the capture still comes before what the new stream is given. When the capture is lost, a new stream
//! takes the place of each of them, under its id and behind its event. Handles notice that the vendor's handle is another and bind
//! again. Nothing here runs for a vendor whose streams survive, and nothing but the waits while a capture is open for others.

use super::calls::capture_status;
use super::objects::Removed;
use super::platform::Platform;
use super::raw::{RawEvent, RawStream};
use super::state::{self, CAPTURES, DriverState, FOREIGN, HIGH, HeldStream, LOW};
use highwater_hal::{Error, ErrorKind, Result, StreamId, StreamPriority};

/// A capture that this backend began.
#[derive(Debug)]
pub(super) struct OpenCapture {
    /// The vendor's handle of the stream that it began on.
    origin: RawStream,
    /// The thread that began it.
    thread: u64,
    members: Vec<Member>,
}

/// A stream that takes part.
#[derive(Debug)]
struct Member {
    stream: StreamId,
    /// The vendor's event behind what was enqueued before.
    before: RawEvent,
    /// Whether it is certain that it takes part in this capture, of several that are open.
    certain: bool,
}

impl<P: Platform> DriverState<P> {
    /// Whether streams die with their capture.
    #[inline(always)]
    pub(super) fn streams_die(&self) -> bool {
        self.platform.quirks().capture_loss_kills_streams.is_some()
    }

    /// Makes a stream of the vendor.
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
        // SAFETY: the call writes two numbers that live until it returns.
        self.check(operation, unsafe { (calls.get_stream_priority_range)(&mut least, &mut greatest) })?;
        let priority = match priority {
            StreamPriority::Low => least,
            StreamPriority::Normal => 0,
            StreamPriority::High => greatest,
        };
        // SAFETY: as above.
        self.check(operation, unsafe { (calls.stream_create_with_priority)(&mut raw, flags, priority) })?;
        self.made(operation, raw)
    }

    /// An event behind what was enqueued on a stream, which is held by the caller.
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
        // SAFETY: the call writes one number that lives until it returns.
        self.check(operation, unsafe { (calls.event_create)(&mut event, plain) })?;
        self.made(operation, event)?;
        // SAFETY: the event was just made, and the stream is held.
        let recorded = self.check(operation, unsafe { (calls.event_record)(event, stream.raw()) });
        if recorded.is_err() {
            self.destroy_completion_event(event);
        }
        recorded.map(|()| event)
    }

    fn destroy_completion_event(&self, event: RawEvent) {
        let _relaxed = self.relaxed();
        // SAFETY: only the room knows the event, and forgets it here.
        let code = unsafe { (self.platform.calls().event_destroy)(event) };
        if code != 0 {
            tracing::warn!("an event is left: {}", self.platform.codes().error("end_capture", code));
        }
    }

    /// Begins a capture by `begin`, and remembers what it takes to outlive its loss.
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
        // One that other code has ended may still be known.
        self.forget_capture(held.raw());
        let members = vec![Member { stream, before, certain: true }];
        let capture = OpenCapture { origin: held.raw(), thread: state::this_thread(), members };
        self.open_captures.lock().push(capture);
        Ok(())
    }

    /// Makes a stream wait by `wait`, by which it may come to take part in a capture.
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

    /// Notes that the stream takes part. A vendor does not say in which capture: this thread's own is the one, if it has one.
    fn note_member(&self, stream: StreamId, before: RawEvent) -> bool {
        let mut open = self.open_captures.lock();
        let (one, here) = (open.len() == 1, state::this_thread());
        let own = open.iter().rposition(|capture| capture.thread == here);
        let found = own.or_else(|| open.len().checked_sub(1)).and_then(|last| open.get_mut(last));
        let Some(capture) = found else { return false };
        capture.members.push(Member { stream, before, certain: one || own.is_some() });
        true
    }

    /// Whether the stream has joined a capture that began on another.
    fn has_joined(&self, stream: StreamId) -> bool {
        let open = self.open_captures.lock();
        open.iter().any(|capture| capture.members.iter().skip(1).any(|member| member.stream == stream))
    }

    pub(super) fn take_capture(&self, origin: RawStream) -> Option<OpenCapture> {
        let mut open = self.open_captures.lock();
        let index = open.iter().position(|capture| capture.origin == origin)?;
        Some(open.swap_remove(index))
    }

    /// Forgets a capture that has ended well.
    pub(super) fn forget_capture(&self, origin: RawStream) {
        for member in self.take_capture(origin).into_iter().flat_map(|capture| capture.members) {
            self.destroy_completion_event(member.before);
        }
    }

    /// Whether a capture whose end was answered with `code` has taken its stream with it. `status` is the stream's state after
    /// it, and `began_here` says that this backend began it.
    pub(super) fn has_died(&self, stream: StreamId, code: i32, status: u32, began_here: bool) -> bool {
        let Some(lost) = self.platform.quirks().capture_loss_kills_streams else { return false };
        // One that was not joined is open still, and nobody can end it any more.
        let dead = code == lost || (code != 0 && status != capture_status::NONE && began_here);
        dead && !self.has_joined(stream)
    }

    /// Puts new streams in the place of those that died with the capture of `stream`, whose handle was `origin`.
    #[cold]
    pub(super) fn replace_dead(&self, operation: &'static str, stream: StreamId, origin: RawStream) -> Result<()> {
        match self.take_capture(origin) {
            Some(capture) => self.replace_members(operation, stream, capture),
            // Other code began it: what came before can only be waited for.
            None => self.replace_stream(operation, stream, None),
        }
    }

    /// The same for a capture that was taken out of the book. The answer is that of `stream`.
    pub(super) fn replace_members(
        &self,
        operation: &'static str,
        stream: StreamId,
        capture: OpenCapture,
    ) -> Result<()> {
        let mut answer = Ok(());
        // The one that it began on is the last: without it, the others may be asked in vain.
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
                Err(error) => tracing::warn!("a stream that had joined a lost capture is lost: {error}"),
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
            let message =
                format!("{stream:?} died with its capture, and other code made it, which alone can replace it");
            return Err(Error::new(ErrorKind::InvalidState, operation, message)
                .with_hint("destroy the id, and have whoever made the stream destroy it and make another"));
        }
        let priority = match (flags & LOW != 0, flags & HIGH != 0) {
            (true, _) => StreamPriority::Low,
            (_, true) => StreamPriority::High,
            _ => StreamPriority::Normal,
        };
        let calls = self.platform.calls();
        let outcome = self.make_stream(operation, stream.device(), priority).and_then(|raw| {
            let ordered = match before {
                // SAFETY: both were made here, and nobody else destroys them.
                Some(before) => self.check(operation, unsafe { (calls.stream_wait_event)(raw, before, 0) }),
                None => {
                    let _relaxed = self.relaxed();
                    let _current = self.make_current(operation, stream.device())?;
                    // SAFETY: the call takes nothing.
                    self.check(operation, unsafe { (calls.device_synchronize)() })
                }
            };
            let replaced = ordered.and_then(|()| {
                self.streams.replace(operation, stream, raw, |dead| self.destroy_raw_stream(operation, dead))
            });
            if replaced.is_err() {
                // SAFETY: nobody else knows the stream.
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

    /// What becomes of a stream's own capture when the stream is destroyed: it ends, and the streams that had joined are freed
    /// of it. `destroy` makes the vendor's call.
    pub(super) fn destroy_with_capture(
        &self,
        operation: &'static str,
        stream: &Removed<RawStream>,
        destroy: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // Before another stream can have the same handle.
        let capture = self.take_capture(stream.raw).filter(|_| stream.flags & CAPTURES != 0);
        for (place, member) in capture.into_iter().flat_map(|capture| capture.members).enumerate() {
            if place > 0
                && let Err(error) = self.replace_member(operation, &member)
            {
                tracing::warn!("a stream that had joined a lost capture is lost: {error}");
            }
            self.destroy_completion_event(member.before);
        }
        destroy()
    }

    /// Forgets every capture.
    pub(super) fn forget_captures(&self) {
        let open = std::mem::take(&mut *self.open_captures.lock());
        for member in open.into_iter().flat_map(|capture| capture.members) {
            self.destroy_completion_event(member.before);
        }
    }
}
