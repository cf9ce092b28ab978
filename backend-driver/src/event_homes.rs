//! Events on a vendor that follows each event to the stream of its last record.
//!
//! On such a vendor, a query of an event, and a wait for it, read the state of that stream. After the stream is destroyed,
//! they use freed memory. While the stream takes part in a capture, they are refused or lose the capture, even if the
//! event was recorded before. The contract has neither restriction, so this module hides both:
//!
//! - The *end* of a stream is its destruction, or for a foreign stream that of its id.
//! - An event keeps a link to the stream of its last record. The end of a stream waits for the stream's work. From then
//!   on the event is complete, and no call is made.
//! - A call that follows events is a *question* (`hazards.rs`). The end of a stream waits for the questions that began
//!   before. Later questions find that the stream is leaving. Questions are short, so a wait of the host for an event is a
//!   series of queries.
//! - A stream *pauses* before it takes part in a capture. A *helper*, a stream that never takes part in a capture, waits
//!   for the stream's work and records an event. Until the capture ends, that event replaces every event that the stream
//!   recorded before.
//! - A captured stream cannot wait for an event that was recorded outside the capture. The vendor would accept the wait
//!   and leave it out of the graph.
//! - The link of an event that foreign code knows is not used, because foreign code may record the event on any stream.
//!   The vendor's rules apply to such an event.
//! - The default stream of a thread ends with the thread, and no call reports that. A *relay*, a stream that waits for the
//!   default stream, records its events.

use std::sync::atomic::{AtomicU64, Ordering};

use super::calls::capture_status;
use super::hazards::{Asking, Hazard};
use super::objects::{BEHIND_DEFAULT, Held, Home, Link, Removed};
use super::platform::Platform;
use super::raw::{RawEvent, RawStream};
use super::state::{DriverState, EXPOSED, FOREIGN, HeldStream, RECORDING};
use super::thread_records;
use highwater_hal::{Completion, Error, ErrorKind, EventId, Result, StreamId, StreamPriority};

/// A stream that takes part in a capture, or is about to.
#[derive(Debug)]
pub(super) struct Paused {
    /// The number of the pause, unique in the process. Events that are recorded in the capture store it.
    number: u64,
    stream: StreamId,
    raw: RawStream,
    helper: RawStream,
    /// Reached when the work from before the capture is done.
    before: RawEvent,
    /// Whether the stream takes part in the capture. Until then, no event is recorded on the stream.
    is_open: bool,
}

/// The replacement of an event that was recorded before its stream paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// None yet, because the stream is about to take part in a capture.
    Soon,
    Event(RawEvent),
}

/// An open question.
type Question = (Asking, Hazard);

impl<P: Platform> DriverState<P> {
    /// Returns whether the vendor follows events to their streams.
    #[inline(always)]
    pub(super) fn events_follow(&self) -> bool {
        self.platform.quirks().events_follow_streams
    }

    // ------------------------------------------------------------------ records

    /// Records an event.
    pub(super) fn record_followed(&self, operation: &'static str, event: EventId, stream: StreamId) -> Result<()> {
        let calls = self.platform.calls();
        loop {
            let asking = thread_records::ask();
            let (held, mark) = self.stream_and_event(operation, stream, event)?;
            let _current = self.current_for(operation, &held, stream.device())?;
            if held.raw() == self.platform.quirks().per_thread_stream && !self.is_capturing(operation, held.raw())? {
                drop((asking, held, mark));
                return self.record_by_relay(operation, event, stream);
            }
            if self.home_of(&mark) == Home::Leaving {
                drop((asking, held, mark));
                self.let_streams_leave(operation);
                continue;
            }
            // One call at a time records an event, as in the vendor, so the link is that of the last record.
            if mark.set_flag(RECORDING, true) {
                drop((asking, held, mark));
                std::thread::yield_now();
                continue;
            }
            let (raw, link) = held.raw_and_link(stream);
            let paused = self.paused_as(raw);
            if paused == Some(None) {
                mark.set_flag(RECORDING, false);
                drop((asking, held, mark));
                std::thread::yield_now();
                continue;
            }
            // SAFETY: Both are held.
            let code = unsafe { (calls.event_record)(mark.raw(), raw) };
            if code == 0 {
                mark.set_link(link);
                mark.set_number(paused.flatten().unwrap_or(0));
            }
            mark.set_flag(RECORDING, false);
            return self.check(operation, code);
        }
    }

    /// Records an event after the work of this thread's default stream, on the relay.
    fn record_by_relay(&self, operation: &'static str, event: EventId, stream: StreamId) -> Result<()> {
        let calls = self.platform.calls();
        let device = stream.device();
        let relay = self.relay(operation, device)?;
        let point = {
            let _relaxed = self.relaxed();
            let _current = self.make_current(operation, device)?;
            let point = self.make_plain_event(operation)?;
            // SAFETY: The event was just made. The streams are this thread's own and one that lives as long as the state.
            let code = unsafe {
                match (calls.event_record)(point, self.platform.quirks().per_thread_stream) {
                    0 => (calls.stream_wait_event)(relay, point, 0),
                    code => code,
                }
            };
            self.destroy_plain_event(point);
            self.check(operation, code)
        };
        point?;
        loop {
            let asking = thread_records::ask();
            let mark = self.events.hold(operation, event)?;
            let is_leaving = self.home_of(&mark) == Home::Leaving;
            if is_leaving || mark.set_flag(RECORDING, true) {
                drop((asking, mark));
                self.let_streams_leave(operation);
                continue;
            }
            // SAFETY: The event is held, and the relay lives as long as the state.
            let code = unsafe { (calls.event_record)(mark.raw(), relay) };
            if code == 0 {
                mark.set_link(BEHIND_DEFAULT);
                mark.set_number(0);
            }
            mark.set_flag(RECORDING, false);
            return self.check(operation, code);
        }
    }

    /// Returns the relay of a device.
    fn relay(&self, operation: &'static str, device: u32) -> Result<RawStream> {
        let state = self.device(operation, device)?;
        if let Some(relay) = state.relay.get() {
            return Ok(*relay);
        }
        let made = self.make_stream(operation, device, StreamPriority::Normal)?;
        let relay = *state.relay.get_or_init(|| made);
        if relay != made {
            // Another thread made the relay first.
            self.helpers.lock().push((device, made));
        }
        Ok(relay)
    }

    /// Returns the stream of an event's last record. The stream is unknown if foreign code knows the event, because foreign
    /// code may record it.
    fn home_of(&self, mark: &Held<'_, EventId>) -> Home {
        if mark.flags() & (FOREIGN | EXPOSED) == 0 { self.streams.home(mark.link()) } else { Home::None }
    }

    // ------------------------------------------------------------------ questions

    /// Answers a query of an event.
    pub(super) fn query_followed(&self, operation: &'static str, event: EventId) -> Result<Completion> {
        let asking = thread_records::ask();
        // The hazard pointer of the event publishes the question.
        let mark = self.events.hold(operation, event)?;
        self.query_held(operation, &mark, asking)
    }

    /// Answers a query of an event that the caller holds. `asking` is published and belongs to the only open question.
    fn query_held(&self, operation: &'static str, mark: &Held<'_, EventId>, asking: Asking) -> Result<Completion> {
        let raw = match self.home_of(mark) {
            Home::Gone => return Ok(Completion::Complete),
            Home::Leaving => {
                drop(asking);
                self.let_streams_leave(operation);
                return Ok(Completion::Pending);
            }
            Home::Live(home) => match self.before(home, mark) {
                Some(Before::Soon) => return Ok(Completion::Pending),
                Some(Before::Event(before)) => before,
                None => mark.raw(),
            },
            Home::None => mark.raw(),
        };
        let _relaxed = self.relaxed_if_capturing(Some(&asking));
        // SAFETY: The event is held, or outlives this question.
        self.answer(operation, unsafe { (self.platform.calls().event_query)(raw) })
    }

    /// Waits for an event. Repeats a short query, because the vendor's waiting call would delay the end of the stream. The event
    /// is held meanwhile, so a destruction of its id is postponed.
    pub(super) fn wait_for_followed(&self, operation: &'static str, event: EventId) -> Result<()> {
        let mark = self.events.hold(operation, event)?;
        let mut asked = 0_u32;
        loop {
            let completion = {
                let asking = thread_records::ask();
                // This hazard pointer publishes the question, because that of the event was published before it.
                let _hazard = thread_records::announce(std::ptr::from_ref(self).cast_mut().cast());
                self.query_held(operation, &mark, asking)?
            };
            if completion == Completion::Complete {
                return Ok(());
            }
            asked += 1;
            if asked < 100 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(std::time::Duration::from_micros(20));
            }
        }
    }

    /// Makes a stream wait for an event. The wait may make the stream join a capture.
    pub(super) fn stream_waits_for_followed(
        &self,
        operation: &'static str,
        stream: StreamId,
        event: EventId,
    ) -> Result<()> {
        let mut pause = None;
        let outcome = loop {
            match self.try_stream_wait(operation, stream, event, pause.is_some()) {
                Ok(Wait::Done) => break Ok(()),
                Ok(Wait::Leaving) => self.let_streams_leave(operation),
                Ok(Wait::Joins) => match self.pause(operation, stream) {
                    Ok(number) => pause = Some(number),
                    Err(error) => break Err(error),
                },
                Err(error) => break Err(error),
            }
        };
        if let Some(number) = pause {
            let joined = outcome.is_ok()
                && self
                    .stream(operation, stream)
                    .is_ok_and(|held| self.is_capturing(operation, held.raw()).unwrap_or(false));
            if joined { self.open(number) } else { self.resume(number) }
        }
        outcome
    }

    fn try_stream_wait(
        &self,
        operation: &'static str,
        stream: StreamId,
        event: EventId,
        is_paused: bool,
    ) -> Result<Wait> {
        let _asking = thread_records::ask();
        let (held, mark) = self.stream_and_event(operation, stream, event)?;
        let _current = self.current_for(operation, &held, stream.device())?;
        let mut may_join = mark.number() != 0 || mark.flags() & (FOREIGN | EXPOSED) != 0;
        let raw = match self.home_of(&mark) {
            Home::Gone => return Ok(Wait::Done),
            Home::Leaving => return Ok(Wait::Leaving),
            Home::Live(home) => match self.before(home, &mark) {
                Some(Before::Soon) => return Ok(Wait::Leaving),
                Some(Before::Event(before)) => before,
                None => {
                    // The captures of foreign code are unknown here.
                    may_join |= self.has_foreign() && self.is_capturing(operation, home)?;
                    mark.raw()
                }
            },
            Home::None => mark.raw(),
        };
        // A stream joins a capture only by a wait for an event of that capture.
        if may_join
            && !is_paused
            && raw == mark.raw()
            && self.may_capture()
            && !held.is_default()
            && !self.is_capturing(operation, held.raw())?
        {
            return Ok(Wait::Joins);
        }
        if self.waits_for_outside(operation, &held, &mark, raw)? {
            let message =
                "a stream that takes part in a capture would wait for an event that was recorded outside of it";
            return Err(Error::new(ErrorKind::Capture, operation, message)
                .with_hint("wait before the capture begins, or record the event in the capture"));
        }
        // SAFETY: Both are held, or outlive this question.
        self.check(operation, unsafe { (self.platform.calls().stream_wait_event)(held.raw(), raw, 0) })?;
        Ok(Wait::Done)
    }

    /// Returns whether a wait for the event `raw` would make a captured stream wait for work outside the capture. The vendor
    /// would accept the wait and leave it out of the graph.
    fn waits_for_outside(
        &self,
        operation: &'static str,
        stream: &HeldStream<'_>,
        mark: &Held<'_, EventId>,
        raw: RawEvent,
    ) -> Result<bool> {
        let is_outside = mark.number() == 0 && mark.link() != 0 && mark.flags() & (FOREIGN | EXPOSED) == 0;
        if !is_outside && raw == mark.raw() || !self.takes_part(operation, stream)? {
            return Ok(false);
        }
        match self.home_of(mark) {
            // The captures of foreign code are unknown here.
            Home::Live(home) if raw == mark.raw() && self.has_foreign() => Ok(!self.is_capturing(operation, home)?),
            _ => Ok(true),
        }
    }

    /// Returns the replacement of an event that `home` recorded before it paused; `None` if the event needs none.
    fn before(&self, home: RawStream, mark: &Held<'_, EventId>) -> Option<Before> {
        if !self.may_capture() {
            return None;
        }
        let number = mark.number();
        let paused = self.paused.lock();
        let entry = paused.iter().find(|entry| entry.raw == home && entry.number != number)?;
        Some(if entry.is_open { Before::Event(entry.before) } else { Before::Soon })
    }

    /// Returns the number of a stream's pause; `Some(None)` before its capture has begun.
    fn paused_as(&self, raw: RawStream) -> Option<Option<u64>> {
        if !self.may_capture() {
            return None;
        }
        let paused = self.paused.lock();
        paused.iter().find(|entry| entry.raw == raw).map(|entry| entry.is_open.then_some(entry.number))
    }

    /// Destroys streams whose end was postponed, and yields. The caller must hold no question.
    fn let_streams_leave(&self, operation: &'static str) {
        self.streams.sweep(|stream| self.destroy_raw_stream(operation, stream));
        std::thread::yield_now();
    }

    /// Begins a question about an event of this link, whose stream is not leaving.
    pub(super) fn ask_while_home_stays(&self, operation: &'static str, link: Link) -> Question {
        loop {
            let asking = thread_records::ask();
            // The hazard pointer publishes the question.
            let hazard = thread_records::announce(std::ptr::from_ref(self).cast_mut().cast());
            if self.streams.home(link) != Home::Leaving {
                return (asking, hazard);
            }
            drop((asking, hazard));
            self.let_streams_leave(operation);
        }
    }

    // ------------------------------------------------------------------ pauses

    /// Prepares a stream to take part in a capture. The caller must hold no question.
    #[cold]
    pub(super) fn pause(&self, operation: &'static str, stream: StreamId) -> Result<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let held = self.stream(operation, stream)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (raw, helper, before) = (held.raw(), RawStream::NULL, RawEvent::NULL);
        self.paused.lock().push(Paused { number, stream, raw, helper, before, is_open: false });
        // Afterwards, no call that missed the entry queries an event of the stream or records on the stream.
        thread_records::wait_for_questions();
        let point = self.record_point(operation, &held, stream.device(), number);
        if point.is_err() {
            self.resume(number);
        }
        point.map(|()| number)
    }

    /// Makes a helper wait for the stream's work from before the capture and record an event.
    fn record_point(&self, operation: &'static str, held: &HeldStream<'_>, device: u32, number: u64) -> Result<()> {
        let calls = self.platform.calls();
        let helper = self.take_helper(operation, device)?;
        let made = {
            let _relaxed = self.relaxed();
            match self.make_current(operation, device) {
                Ok(_current) => self.make_plain_event(operation),
                Err(error) => Err(error),
            }
        };
        let mut paused = self.paused.lock();
        let Some(entry) = paused.iter_mut().find(|entry| entry.number == number) else { return Ok(()) };
        entry.helper = helper;
        let before = made?;
        entry.before = before;
        drop(paused);
        let _relaxed = self.relaxed();
        // SAFETY: The stream is held, and the helper and the event belong to the pause.
        let code = unsafe {
            match (calls.event_record)(before, held.raw()) {
                0 => match (calls.stream_wait_event)(helper, before, 0) {
                    // From here on, the event follows the helper.
                    0 => (calls.event_record)(before, helper),
                    code => code,
                },
                code => code,
            }
        };
        self.check(operation, code)
    }

    /// Notes that a paused stream takes part in its capture.
    pub(super) fn open(&self, number: u64) {
        for entry in self.paused.lock().iter_mut().filter(|entry| entry.number == number) {
            entry.is_open = true;
        }
    }

    /// Ends a pause.
    pub(super) fn resume(&self, number: u64) {
        let ended: Vec<Paused> = self.paused.lock().extract_if(.., |entry| entry.number == number).collect();
        if ended.is_empty() {
            return;
        }
        // Afterwards, no question uses the event.
        thread_records::wait_for_questions();
        for entry in ended {
            if entry.before != RawEvent::NULL {
                self.destroy_plain_event(entry.before);
            }
            if entry.helper != RawStream::NULL {
                self.helpers.lock().push((entry.stream.device(), entry.helper));
            }
        }
    }

    /// Ends the pauses of streams that take part in no capture any more.
    pub(super) fn resume_ended(&self, operation: &'static str) {
        let open: Vec<_> = {
            let paused = self.paused.lock();
            paused.iter().filter(|entry| entry.is_open).map(|entry| (entry.number, entry.stream, entry.raw)).collect()
        };
        for (number, stream, raw) in open {
            let takes_part = self.stream(operation, stream).is_ok_and(|held| {
                held.raw() == raw
                    && self.capture_status(operation, raw).is_ok_and(|status| status != capture_status::NONE)
            });
            if !takes_part {
                self.resume(number);
            }
        }
    }

    /// Returns a stream without work that never takes part in a capture.
    fn take_helper(&self, operation: &'static str, device: u32) -> Result<RawStream> {
        let mut candidates: Vec<(u32, RawStream)> =
            self.helpers.lock().extract_if(.., |(of, _)| *of == device).collect();
        let idle = {
            let _relaxed = self.relaxed();
            // SAFETY: The helpers live as long as the state, and no other call uses these candidates.
            candidates.iter().position(|(_, helper)| unsafe { (self.platform.calls().stream_query)(*helper) } == 0)
        };
        let idle = idle.map(|index| candidates.swap_remove(index).1);
        self.helpers.lock().append(&mut candidates);
        match idle {
            Some(helper) => Ok(helper),
            None => self.make_stream(operation, device, StreamPriority::Normal),
        }
    }

    /// Creates an event that only this backend knows. A device is current.
    pub(super) fn make_plain_event(&self, operation: &'static str) -> Result<RawEvent> {
        let mut event = RawEvent::NULL;
        let plain = self.platform.quirks().event_flags.plain;
        // SAFETY: The call writes one number, which outlives it.
        self.check(operation, unsafe { (self.platform.calls().event_create)(&mut event, plain) })?;
        self.made(operation, event)
    }

    pub(super) fn destroy_plain_event(&self, event: RawEvent) {
        let _relaxed = self.relaxed();
        // SAFETY: Only this backend knows the event and does not use it after this. The streams that recorded it are alive.
        let code = unsafe { (self.platform.calls().event_destroy)(event) };
        if code != 0 {
            tracing::warn!("an event was leaked: {}", self.platform.codes().error("destroy_event", code));
        }
    }

    // ------------------------------------------------------------------ ends of streams

    /// Ends a stream that no call uses. Waits for the questions that may have found it alive, then for the stream's work. A
    /// foreign stream is not destroyed, but its work is waited for, because the owner may destroy the stream afterwards.
    pub(super) fn destroy_followed_stream(&self, operation: &'static str, stream: &Removed<RawStream>) -> Result<()> {
        thread_records::wait_for_questions();
        let outcome = if stream.flags & FOREIGN == 0 {
            self.destroy_stream_now(operation, stream.raw)
        } else {
            self.wait_for_foreign_stream(operation, stream.raw)
        };
        if !self.paused.lock().is_empty() {
            self.resume_ended(operation);
        }
        outcome
    }

    /// Waits for the work of a foreign stream. If the stream takes part in a capture, waits for the work from before the
    /// capture if the stream was paused, and otherwise not at all.
    fn wait_for_foreign_stream(&self, operation: &'static str, raw: RawStream) -> Result<()> {
        let _relaxed = self.relaxed();
        let calls = self.platform.calls();
        if !self.is_capturing(operation, raw)? {
            // SAFETY: The owner must not destroy a foreign stream before this call returns.
            return self.check(operation, unsafe { (calls.stream_synchronize)(raw) });
        }
        loop {
            let _question = self.ask_while_home_stays(operation, 0);
            let before = self.paused.lock().iter().find(|entry| entry.raw == raw).map(|entry| entry.before);
            let Some(before) = before else { return Ok(()) };
            // SAFETY: The event outlives this question.
            if self.answer(operation, unsafe { (calls.event_query)(before) })? == Completion::Complete {
                return Ok(());
            }
            std::thread::yield_now();
        }
    }

    /// Destroys all helpers and relays. No call uses the state.
    pub(super) fn forget_helpers(&self) {
        let paused = std::mem::take(&mut *self.paused.lock());
        let mut streams: Vec<RawStream> =
            std::mem::take(&mut *self.helpers.lock()).into_iter().map(|(_, raw)| raw).collect();
        for entry in paused {
            self.destroy_plain_event(entry.before);
            streams.push(entry.helper);
        }
        streams.extend(self.devices.iter().filter_map(|device| device.relay.get().copied()));
        for stream in streams.into_iter().filter(|stream| *stream != RawStream::NULL) {
            if let Err(error) = self.destroy_stream_now("close", stream) {
                tracing::warn!("a stream was leaked: {error}");
            }
        }
    }
}

#[cfg(test)]
impl<P: Platform> DriverState<P> {
    /// Returns the number of helpers and relays, which are destroyed with the state.
    pub(super) fn own_streams(&self) -> usize {
        let relays = self.devices.iter().filter(|device| device.relay.get().is_some()).count();
        self.helpers.lock().len() + relays
    }
}

/// The outcome of one attempt to make a stream wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Done,
    /// The stream of the event is leaving or about to take part in a capture. Try again.
    Leaving,
    /// The stream may join a capture and must pause first.
    Joins,
}
