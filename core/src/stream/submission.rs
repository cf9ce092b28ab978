//! The turn of a stream: the lock that a call holds while the vendor enqueues it.
//!
//! A vendor's BLAS call is several kernels that pass intermediate results through the workspace. Two threads with handles
//! of their own, bound to one stream and its one workspace, would interleave those kernels and read each other's
//! intermediate results. So a call takes the stream's turn for as long as the vendor takes to enqueue it. The turn is the
//! one lock that is held over a vendor call, and no other lock of this crate is taken inside it. BLAS and Lt calls share
//! it, as they share the workspace. Every other call that enqueues takes it too, because the turn also decides whether a
//! call comes before, in or after a capture of the stream.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::core::{StreamCore, not_the_owner};
use crate::capture::recording::Recording;
use crate::capture::thread::nothing_is_executed;
use crate::device_block::{DeviceBlock, Noted};
use crate::pool::events::Mark;
use highwater_hal::{Error, ErrorKind, Result};

/// What the turn decides on.
#[derive(Default)]
pub(crate) struct TurnState {
    /// Threads that wait for the stream; no capture begins meanwhile.
    pub(crate) waiting: u32,
    /// Captures that are about to begin and wait for those threads. New waiters queue behind them.
    pub(super) beginning: u32,
    /// Raw handles of the stream that are lent to foreign code; no capture begins meanwhile.
    pub(crate) lent: u32,
    /// The stream's part in a capture.
    pub(crate) recording: Option<Box<Recording>>,
    /// For the per-thread default stream: the mark after all enqueued work; `None` if it could not be recorded.
    pub(super) latest: Option<Arc<Mark>>,
    /// The number of marks recorded so far.
    pub(super) marks: u64,
}

/// The turn of a stream, in the caller's hands.
pub(crate) struct Turn<'s> {
    state: MutexGuard<'s, TurnState>,
    /// For the per-thread default stream. After the state, so that an event goes back to its pool without the turn.
    leaves: Option<Box<LeavesMark<'s>>>,
}

/// A mark that the end of a turn records.
struct LeavesMark<'s> {
    stream: &'s StreamCore,
    mark: Option<Mark>,
    before: Option<Arc<Mark>>,
}

impl<'s> From<MutexGuard<'s, TurnState>> for Turn<'s> {
    #[inline(always)]
    fn from(state: MutexGuard<'s, TurnState>) -> Self {
        Self { state, leaves: None }
    }
}

impl Deref for Turn<'_> {
    type Target = TurnState;

    #[inline(always)]
    fn deref(&self) -> &TurnState {
        &self.state
    }
}

impl DerefMut for Turn<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut TurnState {
        &mut self.state
    }
}

impl Drop for Turn<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(leaves) = &mut self.leaves {
            leaves.record(&mut self.state);
        }
    }
}

impl LeavesMark<'_> {
    #[cold]
    fn record(&mut self, state: &mut TurnState) {
        let Some(mut mark) = self.mark.take() else { return };
        self.before = match self.stream.record(state, &mut mark) {
            Ok(()) => state.latest.replace(Arc::new(mark)),
            Err(error) => {
                tracing::warn!("cannot record the completion event of {:?}: {error}", self.stream.id);
                self.mark = Some(mark);
                // An earlier mark would not cover all enqueued work.
                state.latest.take()
            }
        };
    }
}

impl TurnState {
    /// Keeps the blocks of a recorded call, which were noted before.
    #[inline]
    pub(crate) fn keep_device(
        &mut self,
        operation: &'static str,
        noted: Noted,
        blocks: &[&Arc<DeviceBlock>],
    ) -> Result<()> {
        let Some(recording) = &mut self.recording else { return noted.check_executed(operation) };
        for &block in blocks {
            recording.keep_device(block);
        }
        Ok(())
    }
}

impl StreamCore {
    /// The turn, for a call that enqueues, where nobody has it and the backend need not be asked about captures.
    #[inline(always)]
    pub(crate) fn free_turn(&self) -> Option<Turn<'_>> {
        if self.asks { None } else { self.turn.try_lock().map(Turn::from) }
    }

    /// Waits for the stream's turn and holds it until the guard is dropped.
    #[inline]
    pub(crate) fn turn(&self) -> Turn<'_> {
        match self.turn.try_lock() {
            Some(turn) => turn.into(),
            None => self.turn_of_many(),
        }
    }

    /// The turn where another thread has it, for as long as the vendor takes to enqueue one call: some microseconds, which is
    /// less than it takes to put a thread to sleep and to wake it up. So this one looks again and again for a while, and then
    /// lets others run between looks, before it sleeps.
    #[cold]
    fn turn_of_many(&self) -> Turn<'_> {
        const SPIN: Duration = Duration::from_micros(50);
        const YIELD: Duration = Duration::from_micros(500);
        let began = Instant::now();
        loop {
            let waited = began.elapsed();
            if waited < SPIN {
                (0..16).for_each(|_| std::hint::spin_loop());
            } else if waited < YIELD {
                std::thread::yield_now();
            } else {
                return self.turn.lock().into();
            }
            // Looking first: an exchange that fails would take the line from who has the turn.
            if !self.turn.is_locked()
                && let Some(turn) = self.turn.try_lock()
            {
                return turn.into();
            }
        }
    }

    /// The turn, for a call that enqueues. Refused where other code captures the stream: nobody would keep what is used.
    #[inline]
    pub(crate) fn enter(&self, operation: &'static str) -> Result<Turn<'_>> {
        if self.asks { self.enter_asking(operation) } else { Ok(self.turn()) }
    }

    #[cold]
    fn enter_asking(&self, operation: &'static str) -> Result<Turn<'_>> {
        let leaves = match &self.owner {
            Some(owner) if !owner.is_here() => return Err(not_the_owner(operation)),
            // Taken before the turn, so that no other lock is taken inside it.
            Some(owner) => {
                let mark = Some(owner.events.take(&*self.services.backend)?);
                Some(Box::new(LeavesMark { stream: self, mark, before: None }))
            }
            None => None,
        };
        let mut turn = self.turn();
        if self.ask_capture && turn.recording.is_none() {
            self.refuse_if_captured(operation)?;
        }
        turn.leaves = leaves;
        Ok(turn)
    }

    /// Refuses work that must not become part of a capture by other code. The caller must have the turn, and the stream
    /// must take part in no capture of core.
    pub(crate) fn refuse_if_captured(&self, operation: &'static str) -> Result<()> {
        if self.can_capture && self.services.backend.is_capturing(self.id)? {
            return Err(Error::new(ErrorKind::Capture, operation, "the stream is being captured by other code")
                .with_hint("capture it with `Stream::capture`, so that the graph keeps the memory it uses"));
        }
        Ok(())
    }

    /// The turn, for a call that makes no sense in a capture or would lose it.
    pub(crate) fn enter_outside(&self, operation: &'static str) -> Result<Turn<'_>> {
        let turn = self.enter(operation)?;
        if turn.recording.is_some() { Err(nothing_is_executed(operation)) } else { Ok(turn) }
    }

    /// Waits until no thread waits for the stream, for a capture that is about to begin. Threads that come meanwhile
    /// find the capture, or continue if it did not begin.
    pub(crate) fn wait_settled(&self, turn: &mut Turn<'_>) {
        turn.beginning += 1;
        while turn.waiting > 0 && turn.recording.is_none() {
            self.settled.wait(&mut turn.state);
        }
        turn.beginning -= 1;
        self.settled.notify_all();
    }

    /// Takes the turn for a call that waits for the stream, after the captures that are about to begin.
    pub(crate) fn enter_to_wait(&self, operation: &'static str) -> Result<Turn<'_>> {
        let mut turn = self.enter_outside(operation)?;
        while turn.beginning > 0 {
            self.settled.wait(&mut turn.state);
            if turn.recording.is_some() {
                return Err(nothing_is_executed(operation));
            }
        }
        Ok(turn)
    }

    /// Waits for everything enqueued on the stream. No capture begins meanwhile.
    pub(crate) fn wait_for_all(&self, mut turn: Turn<'_>) -> Result<()> {
        struct Waiting<'s>(&'s StreamCore);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.turn().waiting -= 1;
                self.0.settled.notify_all();
            }
        }
        turn.waiting += 1;
        drop(turn);
        let _waiting = Waiting(self);
        self.services.backend.synchronize_stream(self.id)
    }
}
