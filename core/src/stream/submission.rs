//! The submission lock of a stream: a call holds it while the vendor enqueues the call.
//!
//! A vendor's BLAS call is several kernels that pass intermediate results through the workspace. Suppose that two threads
//! have handles of their own, bound to one stream and its one workspace. Without the lock, their kernels would interleave
//! and read each other's intermediate results.
//!
//! The submission lock is the one lock that is held over a vendor call. No other lock of this crate is taken inside it, except
//! that of the list of idle events. No vendor call is made under that one. BLAS and Lt calls share the submission lock, as they
//! share the workspace. Every other call that enqueues takes it too, because it also decides whether a call comes before, in or
//! after a capture of the stream.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::core::{StreamCore, not_the_owner};
use crate::capture::recording::Recording;
use crate::capture::thread::nothing_is_executed;
use crate::device_block::{DeviceBlock, Noted};
use crate::pool::completion_events::CompletionEvent;
use crate::pool::use_batches::OpenBatch;
use highwater_hal::{Error, ErrorKind, Result};

/// The state that the submission lock guards.
#[derive(Default)]
pub(crate) struct SubmissionState {
    /// Threads that wait for the stream. No capture begins while there are any.
    pub(crate) waiting: u32,
    /// Captures that are about to begin and wait for those threads. New waiters queue behind them.
    pub(super) beginning: u32,
    /// Raw handles of the stream that are lent to foreign code. No capture begins while there are any.
    pub(crate) lent: u32,
    /// The stream's part in a capture.
    pub(crate) recording: Option<Box<Recording>>,
    /// For the per-thread default stream: the completion event after all enqueued work. `None` if it could not be recorded.
    pub(super) latest: Option<Arc<CompletionEvent>>,
    /// The number of completion events recorded so far, and of the open batch.
    pub(super) completions: u64,
    /// The small uses of page-locked memory that no record follows yet. Empty while the stream takes part in a capture.
    pub(super) batch: OpenBatch<CompletionEvent>,
    /// The event of the next batch, taken before the work of its first use is enqueued.
    pub(super) spare: Option<CompletionEvent>,
}

/// The submission lock of a stream, held by the caller.
pub(crate) struct SubmissionGuard<'s> {
    state: MutexGuard<'s, SubmissionState>,
    /// For the per-thread default stream. After the state, so that an event goes back to its pool without the submission lock.
    leaves: Option<Box<LastCompletion<'s>>>,
}

/// A completion event that the end of a submission lock records.
struct LastCompletion<'s> {
    stream: &'s StreamCore,
    completion: Option<CompletionEvent>,
    before: Option<Arc<CompletionEvent>>,
}

impl<'s> From<MutexGuard<'s, SubmissionState>> for SubmissionGuard<'s> {
    #[inline(always)]
    fn from(state: MutexGuard<'s, SubmissionState>) -> Self {
        Self { state, leaves: None }
    }
}

impl Deref for SubmissionGuard<'_> {
    type Target = SubmissionState;

    #[inline(always)]
    fn deref(&self) -> &SubmissionState {
        &self.state
    }
}

impl DerefMut for SubmissionGuard<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut SubmissionState {
        &mut self.state
    }
}

impl Drop for SubmissionGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(leaves) = &mut self.leaves {
            leaves.record(&mut self.state);
        }
    }
}

impl LastCompletion<'_> {
    #[cold]
    fn record(&mut self, state: &mut SubmissionState) {
        let Some(mut completion) = self.completion.take() else { return };
        self.before = match self.stream.record(state, &mut completion) {
            Ok(()) => state.latest.replace(Arc::new(completion)),
            Err(error) => {
                crate::warnings::warning!("cannot record the completion event of the {}: {error}", self.stream.id);
                self.completion = Some(completion);
                // An earlier completion event would not cover all enqueued work.
                state.latest.take()
            }
        };
    }
}

impl SubmissionState {
    /// Keeps the blocks of a recorded call, which were noted earlier.
    #[inline]
    pub(crate) fn keep_device(
        &mut self,
        operation: &'static str,
        noted: Noted,
        blocks: &[&Arc<DeviceBlock>],
    ) -> Result<()> {
        if noted != Noted::Ordered {
            blocks.iter().try_for_each(|block| block.check_usable(operation))?;
        }
        let Some(recording) = &mut self.recording else { return noted.check_executed(operation) };
        for &block in blocks {
            recording.keep_device(block);
        }
        Ok(())
    }
}

impl StreamCore {
    /// Takes the submission lock for a call that enqueues, if it is free and the backend need not be queried about captures.
    #[inline(always)]
    pub(crate) fn try_lock_submission(&self) -> Option<SubmissionGuard<'_>> {
        if self.asks { None } else { self.submission.try_lock().map(SubmissionGuard::from) }
    }

    /// Waits for the stream's submission lock and holds it until the guard is dropped.
    #[inline]
    pub(crate) fn lock_submission(&self) -> SubmissionGuard<'_> {
        match self.submission.try_lock() {
            Some(submission) => submission.into(),
            None => self.lock_contended(),
        }
    }

    /// Takes the submission lock while another thread holds it. That thread holds it while the vendor enqueues one call, for
    /// some microseconds, which is less than the cost of a sleep and a wake. So this thread first spins, then yields between
    /// checks, and finally sleeps.
    #[cold]
    fn lock_contended(&self) -> SubmissionGuard<'_> {
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
                return self.submission.lock().into();
            }
            // Load first: an exchange that fails would take the cache line from the holder of the lock.
            if !self.submission.is_locked()
                && let Some(submission) = self.submission.try_lock()
            {
                return submission.into();
            }
        }
    }

    /// Takes the submission lock for a call that enqueues. Fails if other code captures the stream, because then nothing would
    /// keep the memory that the call uses.
    #[inline]
    pub(crate) fn enter(&self, operation: &'static str) -> Result<SubmissionGuard<'_>> {
        if self.asks { self.enter_asking(operation) } else { Ok(self.lock_submission()) }
    }

    #[cold]
    fn enter_asking(&self, operation: &'static str) -> Result<SubmissionGuard<'_>> {
        let leaves = match &self.owner {
            Some(owner) if !owner.is_here() => return Err(not_the_owner(operation)),
            // Taken before the submission lock, so that no other lock is taken inside it.
            Some(owner) => {
                let completion = Some(owner.events.take(&*self.services.backend)?);
                Some(Box::new(LastCompletion { stream: self, completion, before: None }))
            }
            None => None,
        };
        let mut submission = self.lock_submission();
        if self.ask_capture && submission.recording.is_none() {
            self.refuse_if_captured(operation)?;
        }
        submission.leaves = leaves;
        Ok(submission)
    }

    /// Refuses work that must not become part of a capture by other code. The caller must have the submission lock, and
    /// the stream must take part in no capture of core.
    pub(crate) fn refuse_if_captured(&self, operation: &'static str) -> Result<()> {
        if self.can_capture && self.services.backend.is_capturing(self.id)? {
            return Err(Error::new(ErrorKind::Capture, operation, "other code is capturing the stream")
                .with_hint("capture it with `Stream::capture`, so that the graph keeps the memory that it uses"));
        }
        Ok(())
    }

    /// Takes the submission lock for a call that is meaningless in a capture or would invalidate it.
    pub(crate) fn enter_outside(&self, operation: &'static str) -> Result<SubmissionGuard<'_>> {
        let submission = self.enter(operation)?;
        if submission.recording.is_some() { Err(nothing_is_executed(operation)) } else { Ok(submission) }
    }

    /// Waits until no thread waits for the stream, for a capture that is about to begin. Threads that arrive in the meantime
    /// find the capture, or continue if it did not begin.
    pub(crate) fn wait_settled(&self, submission: &mut SubmissionGuard<'_>) {
        submission.beginning += 1;
        while submission.waiting > 0 && submission.recording.is_none() {
            self.settled.wait(&mut submission.state);
        }
        submission.beginning -= 1;
        self.settled.notify_all();
    }

    /// Takes the submission lock for a call that waits for the stream, after the captures that are about to begin.
    pub(crate) fn enter_to_wait(&self, operation: &'static str) -> Result<SubmissionGuard<'_>> {
        let mut submission = self.enter_outside(operation)?;
        while submission.beginning > 0 {
            self.settled.wait(&mut submission.state);
            if submission.recording.is_some() {
                return Err(nothing_is_executed(operation));
            }
        }
        Ok(submission)
    }

    /// Waits for everything enqueued on the stream. No capture begins during the wait.
    pub(crate) fn wait_for_all(&self, mut submission: SubmissionGuard<'_>) -> Result<()> {
        struct Waiting<'s>(&'s StreamCore);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.lock_submission().waiting -= 1;
                self.0.settled.notify_all();
            }
        }
        submission.waiting += 1;
        drop(submission);
        let _waiting = Waiting(self);
        self.services.backend.synchronize_stream(self.id)
    }
}
