//! [`Done`]: a future for the end of device work, and its other forms.

use std::fmt;
use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::notifier::{Answers, Notifier, Place, tell};
use crate::pool::completion_events::CompletionEvent;
use highwater_hal::{DoneAnswer, Error, ErrorKind, Result, fork::Generation};

/// The end of device work, as a future for any executor. [`Event::done`](crate::Event::done), [`Stream::done`](crate::Stream::done),
/// [`PinnedBuffer::ready`](crate::PinnedBuffer::ready) and [`DeviceBuffer::ready`](crate::DeviceBuffer::ready) return it.
///
/// The wait begins with the call that returns the future, not with the first poll. The future borrows nothing and is `Send`, `Sync`
/// and `Unpin`. It wakes its task once. A poll after the end returns the result again. A dropped future ends its wait, and the work
/// goes on.
///
/// A thread of the runtime asks the backend. The first wait starts it, it sleeps while nothing waits, and it ends with the runtime. The
/// thread pauses between two questions: for 4 us in the first 50 ms of a wait, and later for up to 1/1000 of the time waited so far, at most
/// 1 ms. It pauses for at least 40 ns for each wait that is pending. A wait ends at most one pause late, and then the task must wake.
///
/// *Timeouts.* To wait again after a timeout, keep the future: `timeout(limit, &mut done)`. A second `done()` of a stream or
/// `ready()` of device memory is a new wait, behind all work enqueued meanwhile.
///
/// # Errors
/// The future returns the first of these errors:
/// - the error of the work, or of the call that asks about it, as [`Event::is_complete`](crate::Event::is_complete) returns it;
/// - `InvalidState` if the runtime has ended first: a future keeps no runtime alive;
/// - `ShuttingDown` if the process exits, and `Forked` in a forked child;
/// - `OperatingSystem` if the thread could not be started.
///
/// ```
/// use std::future::Future;
///
/// use highwater_core::{Result, Runtime};
/// use highwater_mock::{MockGpu, MockOptions};
///
/// async fn double(runtime: Runtime) -> Result<Vec<f32>> {
///     let stream = runtime.device(0)?.create_stream()?;
///     let values = stream.upload(&[1.0_f32, 2.0])?;
///     let mut staging = runtime.pinned(2)?;
///     stream.copy_to_host(&values, &mut staging)?;
///     staging.ready().await?; // No thread is blocked.
///     Ok(staging.read()?.iter().map(|value| value * 2.0).collect())
/// }
///
/// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// assert_eq!(pollster::block_on(double(runtime))?, [2.0, 4.0]);
/// # Ok::<(), highwater_core::Error>(())
/// ```
#[must_use = "a future that is dropped waits for nothing"]
pub struct Done(Form);

enum Form {
    Over(Outcome),
    Waiting {
        notifier: Arc<Notifier>,
        wait: Arc<Wait>,
        places: Box<[Place]>,
    },
    /// The owner is gone, or a closure has the wait.
    Detached,
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done").field("outcome", &self.look().map(|outcome| outcome.result)).finish()
    }
}

impl Done {
    /// Begins a wait for events. Returns the error as a future if there is one.
    pub(super) fn begin(
        notifier: &Arc<Notifier>,
        answers: &Arc<dyn Answers>,
        events: Result<Vec<Arc<CompletionEvent>>>,
    ) -> Self {
        Self(Self::try_begin(notifier, answers, events).unwrap_or_else(|error| Form::Over(Err(error).into())))
    }

    fn try_begin(
        notifier: &Arc<Notifier>,
        answers: &Arc<dyn Answers>,
        events: Result<Vec<Arc<CompletionEvent>>>,
    ) -> Result<Form> {
        let mut events = events?;
        let mut heard = Vec::new();
        let mut kept = Vec::with_capacity(events.len());
        for event in events.drain(..) {
            if answers.has_passed(&event)? {
                heard.extend(answers.answer(&event));
            } else {
                kept.push(event);
            }
        }
        if kept.is_empty() {
            return Ok(Form::Over(Outcome { result: Ok(()), answers: heard }));
        }
        let wait = Arc::new(Wait::new(kept.len(), heard));
        let places = notifier.begin(answers, kept, &wait)?;
        Ok(Form::Waiting { notifier: Arc::clone(notifier), wait, places })
    }

    /// Returns the outcome if the wait is over.
    fn look(&self) -> Option<Outcome> {
        match &self.0 {
            Form::Over(outcome) => Some(outcome.clone()),
            Form::Waiting { notifier, .. } if !notifier.is_own_process() => Some(Err(forked()).into()),
            Form::Waiting { wait, .. } => wait.state.lock().outcome.clone(),
            Form::Detached => None,
        }
    }

    /// Returns the result if the wait is over. The caller relies on it.
    fn outcome(&self) -> Option<Result<()>> {
        self.look().map(Outcome::hear)
    }

    /// Calls `call` with the result, once, and ends the future.
    ///
    /// A thread of the runtime calls it, and all other waits of the runtime wait for its return. So it must not block: it should send
    /// to a channel, or wake other code. If the wait is over already, this method calls it before it returns. If the runtime ends
    /// first, the thread that ends it makes the call, with the error. A panic of the closure is logged, unless this method called
    /// it.
    ///
    /// ```
    /// use std::sync::mpsc;
    ///
    /// use highwater_core::Runtime;
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let stream = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?.create_stream()?;
    /// let values = stream.upload(&[1.0_f32; 1000])?;
    /// let (sender, results) = mpsc::channel();
    /// values.ready().on_done(move |result| sender.send(result).expect("the receiver waits"));
    /// results.recv().expect("one result")?;
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    pub fn on_done(mut self, call: impl FnOnce(Result<()>) + Send + 'static) {
        match std::mem::replace(&mut self.0, Form::Detached) {
            Form::Over(outcome) => call(outcome.hear()),
            Form::Waiting { notifier, wait, .. } if !notifier.is_own_process() => {
                wait.leave();
                call(Err(forked()));
            }
            Form::Waiting { wait, .. } => {
                if let Some((listener, outcome)) = wait.listen(Listener::Call(Box::new(call))) {
                    listener.tell(outcome);
                }
            }
            Form::Detached => {}
        }
    }

    /// Returns a descriptor that becomes readable when the wait is over, for `poll`, `epoll` and programs in C.
    ///
    /// ```
    /// use highwater_core::Runtime;
    /// use highwater_mock::{MockGpu, MockOptions};
    /// use rustix::event::{PollFd, PollFlags, poll};
    ///
    /// let stream = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?.create_stream()?;
    /// let values = stream.upload(&[1.0_f32; 1000])?;
    /// let done = stream.done().into_descriptor()?;
    /// poll(&mut [PollFd::new(&done, PollFlags::IN)], None).expect("the system polls");
    /// done.outcome().expect("the descriptor is readable")?;
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `OperatingSystem` if no descriptor is left. An error of the work is in [`DoneDescriptor::outcome`].
    pub fn into_descriptor(self) -> Result<DoneDescriptor> {
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let descriptor = Arc::new(made.map_err(|error| {
            Error::new(
                ErrorKind::OperatingSystem,
                "into_descriptor",
                format!("the system makes no descriptor: {error}"),
            )
            .with_code(i64::from(error.raw_os_error()))
            .with_hint("raise the limit on open files (ulimit -n)")
        })?);
        let listener = Listener::Descriptor(Arc::clone(&descriptor));
        match &self.0 {
            Form::Waiting { notifier, wait, .. } if notifier.is_own_process() => tell(wait.listen(listener)),
            _ => tell(Some((listener, Ok(()).into()))),
        }
        Ok(DoneDescriptor { descriptor, done: self })
    }
}

impl Future for Done {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        match &self.0 {
            Form::Waiting { notifier, wait, .. } if notifier.is_own_process() => wait.poll(context.waker()),
            _ => self.outcome().map_or(Poll::Pending, Poll::Ready),
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        let Form::Waiting { notifier, wait, places } = std::mem::replace(&mut self.0, Form::Detached) else { return };
        if !notifier.is_own_process() {
            wait.leave();
        } else if !wait.is_settled() {
            notifier.cancel(&places);
        }
    }
}

/// A descriptor that becomes readable when device work is done. [`Done::into_descriptor`] returns it. A drop ends the wait.
///
/// It is an `eventfd`. The caller must not read it, write to it or close it.
///
/// In a forked child, no thread serves the waits of the parent. So a descriptor from before the fork does not become readable by itself.
/// Both processes have the same `eventfd`, so the end of the parent's wait makes it readable in both.
#[derive(Debug)]
pub struct DoneDescriptor {
    descriptor: Arc<OwnedFd>,
    done: Done,
}

impl DoneDescriptor {
    /// Returns the result of the wait. `None` until the wait is over: a readable descriptor has a result. In a forked child, the result
    /// is `Forked`, also before the descriptor is readable.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<()>> {
        self.done.outcome()
    }
}

impl AsFd for DoneDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl AsRawFd for DoneDescriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

/// The code that learns of the end of a wait.
pub(super) enum Listener {
    None,
    Task(Waker),
    Call(Box<dyn FnOnce(Result<()>) + Send>),
    Descriptor(Arc<OwnedFd>),
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Task(_) => "Task",
            Self::Call(_) => "Call",
            Self::Descriptor(_) => "Descriptor",
        })
    }
}

impl Listener {
    pub(super) fn tell(self, outcome: Outcome) {
        match self {
            Self::None => {}
            Self::Task(waker) => waker.wake(),
            Self::Call(call) => call(outcome.hear()),
            Self::Descriptor(descriptor) => {
                if let Err(error) = rustix::io::write(&*descriptor, &1_u64.to_ne_bytes()) {
                    crate::warnings::warning!("a descriptor for the end of device work cannot be written: {error}");
                }
            }
        }
    }
}

/// The result of a wait.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    result: Result<()>,
    /// For the observer of the backend: the order counts for each thread that has the result, and for no other.
    answers: Vec<Arc<dyn DoneAnswer>>,
}

impl From<Result<()>> for Outcome {
    fn from(result: Result<()>) -> Self {
        Self { result, answers: Vec::new() }
    }
}

impl Outcome {
    /// Returns the result to code that relies on it. The caller must hold no lock.
    fn hear(self) -> Result<()> {
        self.answers.iter().for_each(|answer| answer.heard());
        self.result
    }
}

/// The state that a future shares with the thread.
#[derive(Debug)]
pub(super) struct Wait {
    generation: Generation,
    state: Mutex<WaitState>,
}

#[derive(Debug)]
struct WaitState {
    /// Events that have not passed.
    left: usize,
    /// The answers about the events that have passed.
    answers: Vec<Arc<dyn DoneAnswer>>,
    outcome: Option<Outcome>,
    listener: Listener,
}

impl Wait {
    fn new(events: usize, answers: Vec<Arc<dyn DoneAnswer>>) -> Self {
        let state = WaitState { left: events, answers, outcome: None, listener: Listener::None };
        Self { generation: Generation::current(), state: Mutex::new(state) }
    }

    fn poll(&self, waker: &Waker) -> Poll<Result<()>> {
        {
            let state = self.state.lock();
            if let Some(outcome) = &state.outcome {
                let outcome = outcome.clone();
                drop(state);
                return Poll::Ready(outcome.hear());
            }
            // Compares pointers, and runs no code of the executor.
            if matches!(&state.listener, Listener::Task(known) if known.will_wake(waker)) {
                return Poll::Pending;
            }
        }
        // Without the lock: the clone and the drop of a waker are code of the executor. The wait may end meanwhile.
        let outcome = self.listen(Listener::Task(waker.clone()));
        outcome.map_or(Poll::Pending, |(_, outcome)| Poll::Ready(outcome.hear()))
    }

    /// Sets the listener. Returns it if the wait is over.
    fn listen(&self, listener: Listener) -> Option<(Listener, Outcome)> {
        let mut state = self.state.lock();
        if let Some(outcome) = &state.outcome {
            return Some((listener, outcome.clone()));
        }
        let earlier = std::mem::replace(&mut state.listener, listener);
        drop(state);
        drop(earlier);
        None
    }

    /// Records that one event has passed or failed. Returns the listener if the wait is over by this.
    pub(super) fn settle(
        &self,
        result: Result<()>,
        answer: Option<Arc<dyn DoneAnswer>>,
    ) -> Option<(Listener, Outcome)> {
        let mut state = self.state.lock();
        state.left = state.left.saturating_sub(1);
        state.answers.extend(answer);
        if state.outcome.is_some() || (result.is_ok() && state.left > 0) {
            return None;
        }
        let outcome = Outcome { result, answers: std::mem::take(&mut state.answers) };
        state.outcome = Some(outcome.clone());
        Some((std::mem::replace(&mut state.listener, Listener::None), outcome))
    }

    /// Returns whether all events have passed or failed. Then the notifier has no entry of the wait.
    fn is_settled(&self) -> bool {
        self.state.lock().left == 0
    }

    /// Leaves the listener to the parent of a forked child, whose executor it belongs to. No lock of the parent is taken.
    fn leave(self: Arc<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if !self.generation.is_current() {
            std::mem::forget(std::mem::replace(&mut self.state.get_mut().listener, Listener::None));
        }
    }
}

#[cold]
fn forked() -> Error {
    Generation::error("done")
}
