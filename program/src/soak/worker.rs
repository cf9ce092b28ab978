//! A worker of `highwater soak ipc`. It shares memory, opens that of others, and uses, checks and drops both at random, until it is
//! killed or ordered to end.
//!
//! It measures each call that could wait for another process, and reports the slow ones. It judges contents itself. The supervisor
//! judges all else, because it knows which workers were stopped or killed.

use std::collections::VecDeque;
use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::hal::Backend;
use highwater::mock::MockGpu;
use highwater::sharing::{Rendezvous, SharingOptions};
use highwater::{
    Device, DeviceBuffer, DeviceSlice, ErrorKind, ImportOptions, Owner, OwnerDeath, Runtime, RuntimeOptions,
    SharedPinnedBuffer, Stream, Ticket, TicketBatch, Transport,
};

use super::super::args::ChildArguments;
use super::super::child::{self, wait_readable};
use super::super::failure::Failure;
use super::super::frame::{Inbox, Message as _};
use super::super::{Verdict, child::die};
use super::descriptors::cut_sockets;
use super::message::{Form, Notice, Offer, Order, Refusal, Remains, Slow, Span};
use super::operation::Operation;
use super::pattern::Pattern;
use super::random::Random;
use super::reclaim::Watcher;
use super::{COMMAND, Opened, PATIENCE, heir, keeps, now};

/// The maximum numbers of its own memory, and of memory of others, that a worker has at once.
const MOST_OWN: usize = 8;
const MOST_HELD: usize = 8;
/// The maximum number of offers that a worker remembers. Some have expired by the time they are opened.
const MOST_OFFERS: usize = 8;
/// The maximum number of operations that it enqueues before it waits for its stream. A busy machine takes long for each.
const MOST_QUEUED: u64 = 16;
/// The time in which the heir of a worker takes the memory.
const TAKEN_WITHIN: Duration = Duration::from_secs(20);
/// The percentage of workers that may hand their memory over, of those that may cut their sockets, and of those that may start a child.
const MAY: u64 = 40;
/// How an error names an heir that the former owner could not name.
const UNNAMED: &str = "the heir of process";
/// The longest pause between two steps.
const PAUSE: Duration = Duration::from_micros(400);
/// Calls that take less are not reported.
const SLOW: u64 = 20_000_000;
/// The number of steps between two reports of counts.
const REPORT: u64 = 16;

/// Runs until it is killed or ordered to end.
pub(in super::super) fn command(arguments: &ChildArguments) -> Result<Verdict> {
    let (socket, mut inbox) = child::serve(arguments.parent, c"hw-soak", COMMAND)?;
    let Some(Order::Begin { backend, seed, directory, is_spared }) = inbox.wait(&socket)? else {
        let hint = format!("`{COMMAND}` starts this process, and says what to open");
        return Err(Failure::new(ErrorKind::InvalidState, "this process has nothing to open", hint).into());
    };
    let mut random = Random::new(seed);
    let outcome = super::reopen(&backend, Duration::from_micros(random.within(0..100)))
        .map_err(anyhow::Error::from)
        .and_then(|opened| work(&socket, inbox, &opened, random, directory.as_deref(), is_spared));
    match outcome {
        Ok(remains) => {
            Notice::Ended(remains).send(&socket)?;
            Ok(Verdict::Good)
        }
        Err(error) => {
            // It fails if the supervisor is gone.
            let _ = Notice::Failed(format!("{error:#}")).send(&socket);
            Ok(Verdict::Bad)
        }
    }
}

/// Works over an opened backend. Returns what is left after an orderly end.
fn work(
    socket: &UnixStream,
    inbox: Inbox,
    opened: &Opened,
    random: Random,
    directory: Option<&str>,
    is_spared: bool,
) -> Result<Remains> {
    let before = State::of(opened)?;
    let options = directory.map_or_else(RuntimeOptions::new, |directory| {
        // The options are `Copy`, and the process has one directory.
        let directory: &'static Path = Box::leak(Box::from(Path::new(directory)));
        let rendezvous = Rendezvous::Directory(directory);
        RuntimeOptions::new().with_sharing(SharingOptions::new().with_rendezvous(rendezvous))
    });
    let runtime = Runtime::with_options(Arc::clone(&opened.backend), &options)?;
    let mut worker = Worker::new(socket, inbox, &runtime, opened, random)?;
    worker.options = options;
    worker.may_hand_over = worker.random.percent(MAY);
    worker.may_cut = worker.random.percent(MAY) && !is_spared;
    worker.may_bequeath = worker.random.percent(MAY);
    worker.live()?;
    let (mut remains, heir) = worker.end()?;
    // Both runtimes use one backend, whose objects the last one counts.
    let left = runtime.close()?;
    remains.objects = heir.map_or(Ok(left), Runtime::close)?.total();
    before.compare(opened, &mut remains)?;
    Ok(remains)
}

/// The state of the process before its runtime was made.
struct State {
    descriptors: usize,
    free: Option<u64>,
}

impl State {
    fn of(opened: &Opened) -> Result<Self> {
        // Other processes use a real device too, and the supervisor compares its memory.
        let free = opened.mock.as_ref().map(|gpu| gpu.memory_info(0)).transpose()?.map(|info| info.free);
        Ok(Self { descriptors: fs::read_dir("/proc/self/fd")?.count(), free })
    }

    fn compare(&self, opened: &Opened, remains: &mut Remains) -> Result<()> {
        let now = Self::of(opened)?;
        // The libraries of a real device open files of their own.
        if let (Some(before), Some(after)) = (self.free, now.free) {
            remains.bytes += before.saturating_sub(after);
            remains.descriptors = now.descriptors.saturating_sub(self.descriptors) as u64;
        }
        Ok(())
    }
}

/// Memory with known contents.
enum Memory {
    Device(Vec<(Pattern, DeviceBuffer<u32>)>),
    Pinned(Pattern, SharedPinnedBuffer<u32>),
}

/// Memory of this worker that others may open.
struct Own {
    number: u64,
    memory: Memory,
    is_adopted: bool,
    /// The same memory at the heir, after a hand-over.
    kept: Vec<DeviceBuffer<u32>>,
}

/// Memory of another worker.
struct Held {
    memory: Memory,
    owner: Owner,
    owner_pid: u32,
    /// True if the memory stays when its owner dies. Otherwise its use then fails.
    is_kept: bool,
    /// True if the vendor keeps the contents after the owner's death.
    has_contents: bool,
}

struct Worker<'s> {
    socket: &'s UnixStream,
    inbox: Inbox,
    /// The mock, if it is the backend, and the violations that were reported.
    mock: Option<Arc<MockGpu>>,
    violations: u64,
    watcher: Watcher,
    runtime: Runtime,
    backend: Arc<dyn Backend>,
    options: RuntimeOptions,
    /// The runtime that answers for the memory, after a hand-over.
    heir: Option<Runtime>,
    device: Device,
    stream: Stream,
    random: Random,
    pid: u32,
    next_number: u64,
    offers: VecDeque<Offer>,
    /// An answer to `Want` is on its way.
    has_asked: bool,
    /// The number of operations that may be outstanding.
    queued: u64,
    own: Vec<Own>,
    held: Vec<Held>,
    counts: Vec<u64>,
    changed: u64,
    revoked: u64,
    steps: u64,
    bequeathed: bool,
    cut_off: bool,
    is_ending: bool,
    /// Decided at the start of the worker. Each of the three flags is true for [`MAY`] percent of the workers.
    may_hand_over: bool,
    may_cut: bool,
    may_bequeath: bool,
}

impl<'s> Worker<'s> {
    fn new(socket: &'s UnixStream, inbox: Inbox, runtime: &Runtime, opened: &Opened, random: Random) -> Result<Self> {
        let device = runtime.device(0)?;
        let stream = device.create_stream()?;
        Notice::Ready.send(socket)?;
        Ok(Self {
            socket,
            inbox,
            mock: opened.mock.clone(),
            violations: 0,
            watcher: Watcher::start(runtime),
            runtime: runtime.clone(),
            backend: Arc::clone(&opened.backend),
            options: RuntimeOptions::new(),
            heir: None,
            device,
            stream,
            random,
            pid: std::process::id(),
            next_number: 0,
            offers: VecDeque::new(),
            has_asked: false,
            queued: 0,
            own: Vec::new(),
            held: Vec::new(),
            counts: vec![0; Operation::ALL.len()],
            changed: 0,
            revoked: 0,
            steps: 0,
            bequeathed: false,
            cut_off: false,
            is_ending: false,
            may_hand_over: false,
            may_cut: false,
            may_bequeath: false,
        })
    }

    fn tell(&self, notice: &Notice) -> Result<()> {
        Ok(notice.send(self.socket)?)
    }

    fn live(&mut self) -> Result<()> {
        loop {
            self.hear()?;
            if self.is_ending {
                return Ok(());
            }
            let operation = Operation::of(self.random.within(0..Operation::weights()));
            self.step(operation)?;
            self.tell_traces()?;
            self.tell_violations()?;
            thread::sleep(self.random.time(PAUSE));
            self.steps += 1;
            if self.steps.is_multiple_of(REPORT) {
                self.report()?;
            }
        }
    }

    fn report(&mut self) -> Result<()> {
        let counts = std::mem::replace(&mut self.counts, vec![0; Operation::ALL.len()]);
        self.tell(&Notice::Did(counts))?;
        let (changed, revoked) = (std::mem::take(&mut self.changed), std::mem::take(&mut self.revoked));
        if changed + revoked > 0 { self.tell(&Notice::Found { changed, revoked }) } else { Ok(()) }
    }

    /// Reports which processes have appeared in the list of this one, and which are gone.
    fn tell_traces(&self) -> Result<()> {
        let traces = self.watcher.take();
        if traces.is_empty() { Ok(()) } else { self.tell(&Notice::Saw(traces)) }
    }

    /// Reports the new violations that the mock has found.
    fn tell_violations(&mut self) -> Result<()> {
        let Some(gpu) = &self.mock else { return Ok(()) };
        let count = gpu.violation_count();
        if std::mem::replace(&mut self.violations, count) < count
            && let Some(violation) = gpu.violations().last()
        {
            self.tell(&Notice::Early(format!("found by the mock: {violation}")))?;
        }
        Ok(())
    }

    /// Receives the orders, and asks for more offers. Dies if the supervisor is gone.
    fn hear(&mut self) -> Result<()> {
        if self.offers.len() < MOST_OFFERS / 2 && !self.has_asked {
            self.has_asked = true;
            self.tell(&Notice::Want)?;
        }
        if self.offers.is_empty() && self.own.len() >= MOST_OWN {
            wait_readable(self.socket.as_fd(), Duration::from_millis(2))?;
        }
        self.inbox.receive_all(self.socket)?;
        while let Some(order) = self.inbox.next()? {
            match order {
                Order::Take { offers } => {
                    self.has_asked = false;
                    self.offers.extend(offers);
                }
                Order::End => self.is_ending = true,
                Order::Begin { .. } => {}
            }
        }
        let more = self.offers.len().saturating_sub(MOST_OFFERS);
        self.offers.drain(..more);
        if self.inbox.has_ended() {
            die();
        }
        Ok(())
    }

    /// Makes a call that may wait for a process, and reports it if it took long.
    fn timed<R>(&self, operation: Operation, peer: Option<u32>, call: impl FnOnce() -> R) -> Result<(R, Span)> {
        let start = now();
        let result = call();
        let span = Span { start, end: now() };
        if span.end - span.start > SLOW {
            self.tell(&Notice::Took(Slow { operation, peer, span }))?;
        }
        Ok((result, span))
    }

    /// Takes a step. After a cut, the worker has its memory and looks dead to the others.
    fn step(&mut self, operation: Operation) -> Result<()> {
        // A former owner shares nothing more.
        let has_space = self.own.len() < MOST_OWN && !self.cut_off && self.heir.is_none();
        let is_done = match operation {
            Operation::Share if has_space => self.share()?,
            Operation::Adopt if has_space => self.adopt()?,
            Operation::ShareAll if has_space => self.share_all()?,
            Operation::SharePinned if has_space => self.share_pinned()?,
            Operation::Open if !self.cut_off => self.open()?,
            Operation::Use => self.use_memory()?,
            Operation::Release if !self.cut_off => self.release()?,
            Operation::Drop if !self.cut_off => self.drop_own()?,
            Operation::Trim => {
                self.timed(operation, None, || self.runtime.trim_shared())?.0?;
                true
            }
            Operation::HandOver if self.may_hand_over && !self.cut_off && self.heir.is_none() => self.hand_over()?,
            Operation::Cut if self.may_cut && !self.cut_off && !self.held.is_empty() => self.cut()?,
            Operation::Bequeath if self.may_bequeath && !self.bequeathed && !self.held.is_empty() => self.bequeath()?,
            Operation::Check => self.check()?,
            _ => false,
        };
        self.counts[operation.index()] += u64::from(is_done);
        Ok(())
    }

    fn new_pattern(&mut self) -> Pattern {
        let side = Pattern::SIDES[self.random.index(Pattern::SIDES.len())];
        Pattern::new(self.random.next(), side)
    }

    fn transport(&mut self) -> Transport {
        let transports = self.device.capabilities().ipc_transports;
        let (descriptor, legacy) = (transports.contains(Transport::Descriptor), transports.contains(Transport::Legacy));
        if descriptor && (!legacy || self.random.percent(60)) { Transport::Descriptor } else { Transport::Legacy }
    }

    /// Offers memory of this worker to the others.
    fn offer(&mut self, form: Form, bytes: Vec<u8>, memory: Memory) -> Result<bool> {
        self.next_number += 1;
        let number = self.next_number;
        let patterns = match &memory {
            Memory::Device(buffers) => buffers.iter().map(|(pattern, _)| *pattern).collect(),
            Memory::Pinned(pattern, _) => vec![*pattern],
        };
        self.own.push(Own { number, memory, is_adopted: false, kept: Vec::new() });
        self.tell(&Notice::Shared(Offer { owner: self.pid, number, form, bytes, patterns }))?;
        Ok(true)
    }

    fn share(&mut self) -> Result<bool> {
        let (pattern, transport) = (self.new_pattern(), self.transport());
        let call = || {
            let buffer = self.device.allocate_shared_by(pattern.len(), transport)?;
            pattern.write(&self.stream, &buffer)?;
            Ok((buffer.share()?.to_bytes(), buffer))
        };
        let (ticket, buffer) = self.timed(Operation::Share, None, call)?.0.map_err(failed("share"))?;
        self.offer(Form::Ticket, ticket, Memory::Device(vec![(pattern, buffer)]))
    }

    fn adopt(&mut self) -> Result<bool> {
        if !self.device.capabilities().foreign_memory {
            return Ok(false);
        }
        let (pattern, transport) = (self.new_pattern(), self.transport());
        let call = || {
            let buffer = self.device.adopt_allocated(pattern.len(), transport)?;
            pattern.write(&self.stream, &buffer)?;
            Ok((buffer.share()?.to_bytes(), buffer))
        };
        let (ticket, buffer) = self.timed(Operation::Adopt, None, call)?.0.map_err(failed("adopt"))?;
        let is_done = self.offer(Form::Ticket, ticket, Memory::Device(vec![(pattern, buffer)]))?;
        self.own.last_mut().into_iter().for_each(|own| own.is_adopted = true);
        Ok(is_done)
    }

    fn share_all(&mut self) -> Result<bool> {
        let transport = self.transport();
        let patterns: Vec<_> = (0..self.random.within(2..5)).map(|_| self.new_pattern()).collect();
        let call = || {
            let mut buffers = Vec::with_capacity(patterns.len());
            for pattern in patterns {
                let buffer = self.device.allocate_shared_by(pattern.len(), transport)?;
                pattern.write(&self.stream, &buffer)?;
                buffers.push((pattern, buffer));
            }
            let slices: Vec<_> = buffers.iter().map(|(_, buffer)| DeviceSlice::from(buffer)).collect();
            Ok((self.runtime.share_all(&slices)?.to_bytes(), buffers))
        };
        let (batch, buffers) = self.timed(Operation::ShareAll, None, call)?.0.map_err(failed("share_all"))?;
        self.offer(Form::Batch, batch, Memory::Device(buffers))
    }

    fn share_pinned(&mut self) -> Result<bool> {
        let pattern = self.new_pattern();
        let call = || {
            let mut buffer = self.runtime.pinned_shared(pattern.len())?;
            pattern.write_host(buffer.write()?);
            Ok((buffer.share()?.to_bytes(), buffer))
        };
        let (ticket, buffer) = self.timed(Operation::SharePinned, None, call)?.0.map_err(failed("share_pinned"))?;
        self.offer(Form::Pinned, ticket, Memory::Pinned(pattern, buffer))
    }

    fn open(&mut self) -> Result<bool> {
        if self.offers.is_empty() || self.held.len() >= MOST_HELD {
            return Ok(false);
        }
        let at = self.random.index(self.offers.len());
        let offer = self.offers[at].clone();
        let is_kept = keeps(self.pid, offer.owner);
        let death = if is_kept { OwnerDeath::Keep } else { OwnerDeath::Release };
        let options = ImportOptions::new().with_owner_death(death);
        let call = || -> highwater::Result<(Memory, Transport)> {
            Ok(match offer.form {
                Form::Ticket => {
                    let ticket = Ticket::from_bytes(&offer.bytes)?;
                    let buffer = self.runtime.open_shared_with(&ticket, &options)?;
                    (Memory::Device(vec![(offer.patterns[0], buffer)]), ticket.transport())
                }
                Form::Batch => {
                    let batch = TicketBatch::from_bytes(&offer.bytes)?;
                    let buffers = self.runtime.open_shared_all_with(&batch, &options)?;
                    let transport = batch.ticket(0).map_or(Transport::Legacy, |ticket| ticket.transport());
                    (Memory::Device(offer.patterns.iter().copied().zip(buffers).collect()), transport)
                }
                Form::Pinned => {
                    let ticket = Ticket::from_bytes(&offer.bytes)?;
                    (Memory::Pinned(offer.patterns[0], self.runtime.open_pinned(&ticket)?), Transport::Descriptor)
                }
            })
        };
        match self.timed(Operation::Open, Some(offer.owner), call)? {
            (Ok((memory, transport)), _) => {
                let owner = match &memory {
                    Memory::Device(buffers) => buffers.first().and_then(|(_, buffer)| buffer.owner()),
                    Memory::Pinned(_, buffer) => buffer.owner(),
                };
                let Some(owner) = owner else {
                    self.tell(&Notice::Failed("a buffer of another process has no owner".to_owned()))?;
                    return Ok(false);
                };
                let is_kept = is_kept || matches!(memory, Memory::Pinned(..));
                let has_contents = transport == Transport::Descriptor;
                self.held.push(Held { memory, owner, owner_pid: offer.owner, is_kept, has_contents });
                Ok(true)
            }
            (Err(error), span) => {
                if error.kind() == ErrorKind::Expired {
                    self.offers.remove(at);
                }
                let Offer { owner, number, .. } = offer;
                let (kind, message) = (format!("{:?}", error.kind()), error.to_string());
                self.tell(&Notice::Refused(Refusal { owner, number, span, kind, message }))?;
                Ok(false)
            }
        }
    }

    /// Chooses memory of its own or of another worker: its place among the own memory, then among the held.
    fn choose(&mut self) -> Option<Result<usize, usize>> {
        let all = self.own.len() + self.held.len();
        if all == 0 {
            return None;
        }
        let at = self.random.index(all);
        Some(at.checked_sub(self.own.len()).map_or(Ok(at), Err))
    }

    fn memory(&self, place: Result<usize, usize>) -> &Memory {
        match place {
            Ok(own) => &self.own[own].memory,
            Err(held) => &self.held[held].memory,
        }
    }

    /// Enqueues work on memory, and sometimes waits for it.
    fn use_memory(&mut self) -> Result<bool> {
        let Some(place) = self.choose() else { return Ok(false) };
        let (count, waits) = (self.random.within(1..MOST_QUEUED), self.random.percent(30));
        let waits = waits || self.queued + count > MOST_QUEUED;
        self.queued = if waits { 0 } else { self.queued + count };
        let mut random = Random::new(self.random.next());
        let Memory::Device(buffers) = self.memory(place) else { return Ok(false) };
        let enqueue = || {
            for _ in 0..count {
                let (pattern, buffer) = &buffers[random.index(buffers.len())];
                if random.percent(50) {
                    pattern.copy(&self.stream, buffer)?;
                } else {
                    let scratch = pattern.scratch();
                    let start = random.within(scratch.start as u64..scratch.end as u64) as usize;
                    let end = random.within(start as u64..scratch.end as u64) as usize + 1;
                    pattern.fill(&self.stream, buffer, start..end, random.next() as u8)?;
                }
            }
            if waits { self.stream.synchronize() } else { Ok(()) }
        };
        let (used, _) = self.timed(Operation::Use, None, enqueue)?;
        self.settle(place, used, "a use")
    }

    /// Checks that memory still has its own contents.
    fn check(&mut self) -> Result<bool> {
        let Some(place) = self.choose() else { return Ok(false) };
        if let Err(held) = place
            && let Held { owner, is_kept: true, has_contents: false, .. } = &self.held[held]
            && !owner.is_alive()
        {
            // The vendor defines what remains.
            self.held.swap_remove(held);
            return Ok(false);
        }
        let read = || self.read(self.memory(place));
        let (read, _) = self.timed(Operation::Check, None, read)?;
        let wrong = match &read {
            Ok(Err(wrong)) => Some(wrong.clone()),
            _ => None,
        };
        if let Ok(Ok(changed)) = &read {
            self.changed += changed;
        }
        if let Some(wrong) = wrong {
            // The owner may have died in the middle of the check.
            let is_defined =
                place.map_or_else(|held| self.held[held].has_contents || self.held[held].owner.is_alive(), |_| true);
            if is_defined {
                self.tell(&Notice::Early(wrong))?;
            }
        }
        self.settle(place, read.map(drop), "a check")
    }

    /// Returns the number of words that others have changed, or the fault of a wrong one.
    fn read(&self, memory: &Memory) -> highwater::Result<Result<u64, String>> {
        match memory {
            Memory::Device(buffers) => {
                let mut changed = 0;
                for (pattern, buffer) in buffers {
                    match pattern.check(&self.stream.download(buffer)?) {
                        Ok(seen) => changed += seen.changed,
                        Err(wrong) => return Ok(Err(wrong)),
                    }
                }
                Ok(Ok(changed))
            }
            Memory::Pinned(pattern, buffer) => {
                // The CPU reads it here, and the device below.
                let here = pattern.check(buffer.read()?);
                let device = self.device.allocate(pattern.len())?;
                self.stream.copy_to_device(buffer, &device)?;
                let there = pattern.check(&self.stream.download(&device)?);
                Ok(here.and(there).map(|seen| seen.changed))
            }
        }
    }

    /// Judges a use of memory. Memory that went with its owner is dropped.
    fn settle(&mut self, place: Result<usize, usize>, used: highwater::Result<()>, what: &str) -> Result<bool> {
        let Err(error) = used else { return Ok(true) };
        if let Err(held) = place
            && let Held { is_kept: false, owner, .. } = &self.held[held]
            && error.kind() == ErrorKind::Expired
            // An owner cannot name its heir to a process that it does not reach. Without a name, an heir that has cut its sockets looks dead.
            && (!owner.is_alive() || self.cut_off && error.message().contains(UNNAMED))
        {
            self.held.swap_remove(held);
            self.revoked += 1;
            return Ok(false);
        }
        let whose =
            place.map_or_else(|held| format!("process {}", self.held[held].owner_pid), |_| "its own".to_owned());
        self.tell(&Notice::Failed(format!("{what} of memory ({whose}) failed: {error}")))?;
        Ok(false)
    }

    /// Drops memory of another worker, possibly memory that queued work uses.
    fn release(&mut self) -> Result<bool> {
        if self.held.is_empty() {
            return Ok(false);
        }
        let held = self.held.swap_remove(self.random.index(self.held.len()));
        let owner = held.owner_pid;
        self.timed(Operation::Release, Some(owner), || drop(held))?;
        Ok(true)
    }

    /// Drops memory of its own, possibly memory that others have open.
    fn drop_own(&mut self) -> Result<bool> {
        if self.own.is_empty() {
            return Ok(false);
        }
        let Own { number, memory, kept, .. } = self.own.swap_remove(self.random.index(self.own.len()));
        self.tell(&Notice::Dropping(number))?;
        self.timed(Operation::Drop, None, || drop((kept, memory)))?;
        Ok(true)
    }

    /// Hands its memory over to another runtime of this process, while others open it. Drops what no heir can keep.
    fn hand_over(&mut self) -> Result<bool> {
        let can_go = |own: &Own| match &own.memory {
            Memory::Device(buffers) => {
                let transports = buffers.iter().map(|(_, buffer)| buffer.transport());
                !own.is_adopted && transports.into_iter().all(|transport| transport.is_ok_and(is_descriptor))
            }
            Memory::Pinned(..) => false,
        };
        if !self.own.iter().any(can_go) {
            return Ok(false);
        }
        while let Some(at) = self.own.iter().position(|own| !can_go(own)) {
            let own = self.own.swap_remove(at);
            self.tell(&Notice::Dropping(own.number))?;
            self.timed(Operation::Drop, None, || drop(own))?;
        }
        let heir = Runtime::with_options(Arc::clone(&self.backend), &self.options)?;
        self.watcher.add(&heir);
        let options = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
        for own in &mut self.own {
            let Memory::Device(buffers) = &own.memory else { continue };
            let keep = |(_, buffer): &(Pattern, DeviceBuffer<u32>)| heir.open_shared_with(&buffer.share()?, &options);
            own.kept = buffers.iter().map(keep).collect::<highwater::Result<_>>().map_err(failed("hand_over"))?;
        }
        self.heir = Some(heir);
        let started = Instant::now();
        loop {
            let given = self.timed(Operation::HandOver, None, || self.runtime.hand_over(TAKEN_WITHIN))?.0;
            match given {
                Ok(()) => return Ok(true),
                // The work on dropped memory ends, and then it is dropped.
                Err(error) if error.kind() == ErrorKind::Unsupported && started.elapsed() < TAKEN_WITHIN => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(failed("hand_over")(error)),
            }
        }
    }

    /// Cuts its connections to all other workers.
    fn cut(&mut self) -> Result<bool> {
        self.tell(&Notice::Cutting)?;
        self.cut_off = true;
        cut_sockets(self.socket)?;
        Ok(true)
    }

    /// Starts a child, which outlives this worker. The worker dies soon after.
    fn bequeath(&mut self) -> Result<bool> {
        self.bequeathed = true;
        let descriptors = heir::leave()?;
        self.tell(&Notice::Bequeathed(descriptors))?;
        Ok(true)
    }

    /// Drops everything, and waits until no other process has memory of this one. Returns what is left.
    fn end(mut self) -> Result<(Remains, Option<Runtime>)> {
        self.report()?;
        self.held.clear();
        self.own.clear();
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.tell_traces()?;
            let (mut bytes, mut deaths) = (0, 0);
            for runtime in [&self.runtime].into_iter().chain(&self.heir) {
                runtime.trim()?;
                let sharing = runtime.statistics().sharing;
                bytes += sharing.exported_bytes + sharing.limbo_bytes + sharing.mapped_bytes;
                deaths += sharing.lost_peers + sharing.lost_exporters;
            }
            if bytes == 0 || Instant::now() > deadline {
                return Ok((Remains { bytes, deaths, ..Remains::default() }, self.heir.take()));
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn is_descriptor(transport: Transport) -> bool {
    transport == Transport::Descriptor
}

/// Returns a function that adds the name of a step to its error.
fn failed(step: &'static str) -> impl Fn(highwater::Error) -> anyhow::Error {
    move |error| anyhow::Error::new(error).context(format!("`{step}` failed"))
}
