//! A consumer of `highwater soak ipc`: opens the offered buffers, uses them, and dies.
//!
//! Every consumer is killed. It kills itself a random time after the start of a random step, so that the kill hits the
//! middle of the step. Or its exporter kills it at any time, even before it has opened anything.

use std::collections::VecDeque;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use highwater::mock::MockGpu;
use highwater::{DeviceBuffer, ErrorKind, Runtime, Stream, Ticket};

use super::super::args::ConsumerArguments;
use super::super::child::{self, wait_readable};
use super::super::frame::{Inbox, Message as _};
use super::super::{Verdict, child::die};
use super::descriptors::cut_sockets;
use super::heir;
use super::message::{Deed, Order};
use super::pattern::Pattern;
use super::random::Random;

/// The number of offers that a consumer remembers, large enough that some have expired.
const MOST_OFFERS: usize = 12;
/// Buffers that it holds at once.
const MOST_HELD: usize = 6;

/// The step before which a consumer kills itself, at the latest.
const STEPS: u64 = 150;

/// Runs until it is killed.
pub(in super::super) fn command(arguments: &ConsumerArguments) -> Result<Verdict> {
    let (socket, inbox) = child::serve(arguments.child.parent, c"hw-consumer", "highwater soak ipc")?;
    let mut random = Random::new(arguments.seed);
    let error = match Consumer::new(&socket, inbox, &mut random).and_then(|mut consumer| consumer.live(&mut random)) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    // A failure means that the exporter is gone.
    let _ = Deed::Failed(format!("{error:#}")).send(&socket);
    Ok(Verdict::Bad)
}

/// An open buffer of the exporter.
struct Held {
    pattern: Pattern,
    ticket: Ticket,
    words: DeviceBuffer<u32>,
    /// The same memory, opened once more.
    floats: Option<DeviceBuffer<f32>>,
}

struct Consumer<'s> {
    socket: &'s UnixStream,
    inbox: Inbox,
    gpu: Arc<MockGpu>,
    /// The violations that were reported.
    violations: u64,
    runtime: Runtime,
    stream: Stream,
    /// The identity, of the largest side; each smaller one in a buffer of its own, in the order of `Pattern::SIDES`.
    identities: Vec<DeviceBuffer<f32>>,
    /// The tickets of buffers and their patterns.
    offers: VecDeque<(Vec<u8>, Pattern)>,
    held: Vec<Held>,
    /// Work may be outstanding.
    queued: bool,
    bequeathed: bool,
    /// Its sockets are cut, so it looks dead to its exporter.
    cut_off: bool,
}

enum Never {}

impl<'s> Consumer<'s> {
    fn new(socket: &'s UnixStream, inbox: Inbox, random: &mut Random) -> Result<Self> {
        let latency = Duration::from_micros(random.within(0..400));
        let gpu = super::open_mock(latency)?;
        let runtime = Runtime::new(Arc::<MockGpu>::clone(&gpu))?;
        let stream = runtime.device(0)?.create_stream()?;
        let identity = |side| {
            let value = |index| if index % (side + 1) == 0 { 1.0 } else { 0.0 };
            stream.upload(&(0..side * side).map(value).collect::<Vec<f32>>())
        };
        let identities = Pattern::SIDES.into_iter().map(identity).collect::<highwater::Result<_>>()?;
        Ok(Self {
            socket,
            inbox,
            gpu,
            violations: 0,
            runtime,
            stream,
            identities,
            offers: VecDeque::new(),
            held: Vec::new(),
            queued: false,
            bequeathed: false,
            cut_off: false,
        })
    }

    fn live(&mut self, random: &mut Random) -> Result<Never> {
        let mut steps_left = random.percent(60).then(|| random.within(0..STEPS));
        loop {
            self.hear()?;
            if steps_left == Some(0) {
                die_soon(Duration::from_micros(random.within(0..1500)));
                steps_left = None;
            }
            steps_left = steps_left.map(|steps| steps - 1);
            self.step(random)?;
            if self.queued && self.stream.is_complete()? {
                self.queued = false;
                self.tell(Deed::Idle)?;
            }
            self.tell_violations()?;
        }
    }

    fn tell(&self, deed: Deed) -> Result<()> {
        Ok(deed.send(self.socket)?)
    }

    /// Reports the new violations that the mock has found.
    fn tell_violations(&mut self) -> Result<()> {
        let count = self.gpu.violation_count();
        if std::mem::replace(&mut self.violations, count) < count
            && let Some(violation) = self.gpu.violations().last()
        {
            self.tell(Deed::Stolen(violation.to_string()))?;
        }
        Ok(())
    }

    /// Receives the offers. Dies if the exporter is gone.
    fn hear(&mut self) -> Result<()> {
        if self.offers.is_empty() {
            wait_readable(self.socket.as_fd(), Duration::from_millis(5))?;
        }
        self.inbox.receive_all(self.socket)?;
        while let Some(Order::Offer { ticket, pattern }) = self.inbox.next()? {
            self.offers.push_back((ticket, pattern));
            if self.offers.len() > MOST_OFFERS {
                self.offers.pop_front();
            }
        }
        if self.inbox.has_ended() {
            die();
        }
        Ok(())
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        if self.cut_off {
            // It keeps its buffers, and would see foreign contents if the exporter had freed one.
            return if random.percent(50) { self.use_queued(random) } else { self.check(random) };
        }
        match random.within(0..1000) {
            0..350 => self.open(random),
            350..450 => self.open_again(random),
            450..650 => self.use_queued(random),
            650..800 => self.check(random),
            800..988 => self.release(random),
            988..994 => self.cut(),
            _ => self.bequeath(random),
        }
    }

    fn open(&mut self, random: &mut Random) -> Result<()> {
        if self.offers.is_empty() || self.held.len() >= MOST_HELD {
            return self.release(random);
        }
        let (ticket, pattern) = self.offers[random.index(self.offers.len())].clone();
        let ticket = Ticket::from_bytes(&ticket)?;
        match self.runtime.open_shared(&ticket) {
            Ok(words) => {
                self.held.push(Held { pattern, ticket, words, floats: None });
                self.tell(Deed::Opened)
            }
            Err(error) if error.kind() == ErrorKind::Expired => {
                self.offers.retain(|(_, offered)| *offered != pattern);
                self.tell(Deed::Expired)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a held buffer again. Its memory is alive, even if the exporter has dropped the buffer.
    fn open_again(&mut self, random: &mut Random) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let index = random.index(self.held.len());
        let held = &mut self.held[index];
        match self.runtime.open_shared(&held.ticket) {
            Ok(floats) => {
                let before = held.floats.replace(floats);
                self.tell(Deed::Opened)?;
                if before.is_some() { self.tell(Deed::Released) } else { Ok(()) }
            }
            // The exporter may refuse a ticket of a dropped buffer, though it keeps the memory.
            Err(error) if error.kind() == ErrorKind::Expired => self.tell(Deed::Expired),
            Err(error) => Err(error.into()),
        }
    }

    /// Enqueues work on some buffers, and sometimes waits for it.
    fn use_queued(&mut self, random: &mut Random) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        self.queued = true;
        self.tell(Deed::Queued)?;
        for _ in 0..random.within(1..20) {
            let Held { pattern, words, floats, .. } = &self.held[random.index(self.held.len())];
            match (random.within(0..3), floats) {
                (0, _) => pattern.copy(&self.stream, words)?,
                (1, Some(floats)) => {
                    let side = Pattern::SIDES.iter().position(|&side| side == pattern.side());
                    let identity = &self.identities[side.unwrap_or_default()];
                    pattern.multiply(&self.stream, floats, identity.into())?;
                }
                _ => {
                    let scratch = pattern.scratch();
                    let start = random.within(scratch.start as u64..scratch.end as u64) as usize;
                    let end = random.within(start as u64..scratch.end as u64) as usize + 1;
                    pattern.fill(&self.stream, words, start..end, random.next() as u8)?;
                }
            }
        }
        if random.percent(30) {
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Checks that a buffer still has its own contents.
    fn check(&self, random: &mut Random) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let Held { pattern, words, .. } = &self.held[random.index(self.held.len())];
        let words = self.stream.download(words)?;
        self.tell(pattern.check(&words).map_or_else(Deed::Stolen, |_| Deed::Checked))
    }

    /// Drops a buffer, possibly one that queued work uses.
    fn release(&mut self, random: &mut Random) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let held = self.held.swap_remove(random.index(self.held.len()));
        let opens = 1 + usize::from(held.floats.is_some());
        drop(held);
        (0..opens).try_for_each(|_| self.tell(Deed::Released))
    }

    /// Cuts its connections to the exporter's library, and continues.
    fn cut(&mut self) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        self.cut_off = true;
        self.tell(Deed::Cut(cut_sockets(self.socket)?))
    }

    /// Starts a child that outlives it, and dies soon after.
    fn bequeath(&mut self, random: &mut Random) -> Result<()> {
        if self.bequeathed || self.held.is_empty() {
            return Ok(());
        }
        self.bequeathed = true;
        let descriptors = heir::leave()?;
        self.tell(Deed::Bequeathed(descriptors))?;
        die_soon(Duration::from_micros(random.within(0..20_000)));
        Ok(())
    }
}

/// Kills this process after a delay.
fn die_soon(delay: Duration) {
    thread::spawn(move || {
        thread::sleep(delay);
        die()
    });
}
