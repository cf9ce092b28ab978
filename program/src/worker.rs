//! A worker of the main job. It opens the weights of its owner and classifies the batches that it receives.
//!
//! The owner starts it and sends messages over its standard input (`control`). One thread only listens, so that the end of
//! the owner ends the process at once, whatever the other threads wait for.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use anyhow::Result;
use highwater::{ErrorKind, Runtime, Ticket};

use super::args::ChildArguments;
use super::classifier::{self, Batch, Next, Work};
use super::control::{DieAt, Notice, Order, WorkerReport};
use super::digits::with_advice;
use super::failure::{Explanation, Failure};
use super::frame::{Inbox, Message as _};
use super::model::PIXELS;
use super::weights::Weights;
use super::{Verdict, backends, child};

/// Runs until the owner sends `Finish`. Sends errors to the owner, which prints them.
pub(super) fn command(arguments: &ChildArguments) -> Result<Verdict> {
    let (socket, inbox) = child::serve(arguments.parent, c"hw-worker", "highwater")?;
    let outcome = work(&socket, inbox);
    let notice = match &outcome {
        Ok(report) => Notice::Report(report.clone()),
        Err(error) => Notice::Failed(Explanation::of(error)),
    };
    if notice.send(&socket).is_err() {
        child::die();
    }
    Ok(if outcome.is_ok() { Verdict::Good } else { Verdict::Bad })
}

/// The contents of the first order.
struct Setup {
    /// The owner's backend, by its `backends::address`.
    backend: String,
    threads: usize,
    die_at: Option<DieAt>,
    ticket: Vec<u8>,
}

fn work(socket: &UnixStream, inbox: Inbox) -> Result<WorkerReport> {
    let queue = Arc::new(Queue::default());
    let (send_setup, setup) = mpsc::channel();
    let listener = Listener { socket: socket.try_clone()?, inbox, queue: Arc::clone(&queue), send_setup };
    thread::Builder::new().name("listener".into()).spawn(move || listener.listen())?;
    let Setup { backend, threads, die_at, ticket } = setup.recv()?;

    let runtime = Runtime::new(backends::reopen(&backend)?)?;
    let classify = || -> Result<_> {
        if die_at == Some(DieAt::Ticket) {
            child::die();
        }
        let weights = Weights::open(&runtime, &Ticket::from_bytes(&ticket)?)?;
        let orders = Orders { socket: Mutex::new(socket), queue, die_at };
        classifier::run(&runtime, &weights, threads, &orders)
    };
    let statistics = classify().map_err(with_advice);
    let backend = Arc::clone(runtime.backend());
    let refused = runtime.close().err();
    let holdings = statistics?.into();
    let refused = refused.map_or_else(String::new, |error| error.to_string());
    Ok(WorkerReport { holdings, leaks: backend.live_objects().total(), refused })
}

/// A batch of the owner.
struct Ordered {
    number: u64,
    first_image: u64,
    pixels: Vec<u8>,
}

/// Batches that no thread has taken yet. The owner bounds their number.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    batches: VecDeque<Ordered>,
    /// No more batches follow.
    finished: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // The state is consistent wherever a thread can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut QueueState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// Receives the owner's orders until it ends.
struct Listener {
    socket: UnixStream,
    inbox: Inbox,
    queue: Arc<Queue>,
    send_setup: mpsc::Sender<Setup>,
}

impl Listener {
    fn listen(mut self) -> ! {
        // An order that cannot be read ends the process, as the end of the owner does.
        while let Ok(Some(order)) = self.inbox.wait(&self.socket) {
            match order {
                Order::Setup { backend, threads, die_at, ticket } => {
                    let setup = Setup { backend, threads: threads as usize, die_at, ticket };
                    // Not received if the worker has failed already.
                    let _ = self.send_setup.send(setup);
                }
                Order::Batch { number, first_image, pixels } => {
                    self.queue.change(|state| state.batches.push_back(Ordered { number, first_image, pixels }));
                }
                Order::Finish => self.queue.change(|state| state.finished = true),
            }
        }
        child::die()
    }
}

/// The owner's batches, for the threads.
struct Orders<'s> {
    socket: Mutex<&'s UnixStream>,
    queue: Arc<Queue>,
    die_at: Option<DieAt>,
}

impl Orders<'_> {
    fn send(&self, notice: &Notice) -> Result<()> {
        // Under a lock, so that messages do not mix.
        notice.send(&self.socket.lock().unwrap_or_else(PoisonError::into_inner)).map_err(|error| {
            let hint = "the worker ends with its owner";
            Failure::new(ErrorKind::PeerLost, "the owner cannot be told", hint).because_of(error).into()
        })
    }
}

impl Work for Orders<'_> {
    fn ready(&self) -> Result<()> {
        self.send(&Notice::Ready)
    }

    fn next(&self, idle: bool) -> Next<'_> {
        let mut state = self.queue.lock();
        loop {
            if let Some(Ordered { number, first_image, pixels }) = state.batches.pop_front() {
                return Next::Batch(Batch { number, first_image, pixels: Cow::Owned(pixels) });
            }
            if state.finished {
                return Next::End;
            }
            if !idle {
                return Next::Later;
            }
            state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn answer(&self, batch: Batch<'_>, digits: &[u8]) -> Result<()> {
        let images = batch.first_image..batch.first_image + (batch.pixels.len() / PIXELS) as u64;
        if let Some(DieAt::Image(image)) = self.die_at
            && images.contains(&image)
        {
            child::die();
        }
        self.send(&Notice::Answer { number: batch.number, digits: digits.to_vec() })
    }

    fn stop(&self) {
        self.queue.change(|state| {
            state.batches.clear();
            state.finished = true;
        });
    }
}
