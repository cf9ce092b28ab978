//! The finder: follows what orders operations, and compares each with what its bytes have seen.
//!
//! All is done in the caller's thread, when an operation is called, never when it is executed: a wait refers to a point that
//! was enqueued before, so what is ordered before an operation is known when it is enqueued. What is found depends on
//! the calls and on what queries answered, and not on which worker was faster.
//!
//! There is a lane for each stream and one for the host. The clock of a stream grows by its own operations, by the
//! clocks of the points that it waits for, and by all that the host knows at the time of each call. The host knows the
//! clock of what it has waited for, or has seen complete. The host is *one* lane, whichever threads call: what one thread
//! has learned by waiting counts for all from then on, because the locks and channels by which threads tell each other are
//! not seen here.
//!
//! A capture has lanes and bytes of its own, so that branches of one graph are compared with each other while they are
//! recorded. A launch is one operation of its stream that does what all the recorded ones do.
//!
//! Events of several processes: a record that another process made may come after anything that this process has let
//! others wait for, so a wait for it counts as a wait for all of that.
//!
//! Lock: the book is taken last, and nothing else is taken under it.

use std::backtrace::Backtrace;
use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::device::Retired;
use crate::engine::Engine;
use crate::event::Point;
use crate::operation::{Calls, Operation};
use crate::races::clock::Clock;
use crate::races::report::{Place, Race, RaceKind};
use crate::races::shadow::{Access, Shadow, Store};
use crate::races::site::{OnStream, Origin, Site};
use crate::shared_event;
use crate::stream::Command;
use crate::uses::{Range, Role, Space, Use, uses};

/// Races that are kept in full; all are counted.
const KEPT: usize = 1000;
/// The lane of the host.
const HOST: usize = 0;

/// The race finder of one backend.
#[derive(Debug)]
pub(crate) struct Finder {
    calls: Arc<Calls>,
    origins: AtomicU64,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    /// What the host knows to have happened.
    host: Clock,
    /// By lane; that of the host is not used.
    lanes: Vec<Clock>,
    /// The device of each lane; of the host none.
    devices: Vec<Option<u32>>,
    /// Lanes of streams that are gone.
    ended: Vec<usize>,
    /// What other processes may have waited for.
    exported: Clock,
    /// The clocks of this process's records of shared events, by file and number.
    records: BTreeMap<(u64, u64), Clock>,
    shadow: Shadow,
    reports: Reports,
    operations: u64,
}

#[derive(Debug, Default)]
struct Reports {
    races: Vec<Race>,
    seen: HashSet<(u64, u64, RaceKind)>,
    count: u64,
}

/// Bytes that an operation uses, and where they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Touch {
    pub(crate) store: Store,
    pub(crate) start: u64,
    used: Use,
}

impl Touch {
    /// All of a range that begins at `start` of a store.
    pub(crate) fn whole(store: Store, start: u64, range: Range) -> Self {
        let layout = crate::uses::Layout::whole(range.bytes);
        Self { store, start, used: Use { range, layout, writes: true, role: Role::Operand } }
    }

    fn end(&self) -> u64 {
        self.start + self.used.range.bytes
    }
}

/// What a command touches, where the memory is still there.
pub(crate) fn touches(command: &Command, engine: &Engine) -> Vec<Touch> {
    let used = uses(command, engine).into_iter();
    used.filter_map(|used| {
        let (store, start) = match used.range.space {
            Space::Host => (Store::Host, used.range.address),
            Space::Device(device) => engine.devices[device as usize].place(used.range.address)?,
        };
        Some(Touch { store, start, used })
    })
    .collect()
}

/// The operation that is being noted.
struct Now<'a> {
    lane: usize,
    number: u64,
    /// What comes before it.
    clock: &'a Clock,
    site: &'a Arc<Site>,
    frees: bool,
}

impl Now<'_> {
    /// Notes the use of some bytes; what `settled` knows meets nobody any more.
    fn touch(&self, touch: &Touch, settled: &Clock, shadow: &mut Shadow, reports: &mut Reports) {
        let Use { range, layout, writes, role } = touch.used;
        let product = match role {
            Role::Operand => None,
            Role::Workspace { product, .. } => Some(product),
        };
        let Self { lane, number, frees, .. } = *self;
        let access = Access { lane, number, writes, frees, product, site: Arc::clone(self.site), range };
        let is_settled = |earlier: &Access| earlier.number <= settled.get(earlier.lane);
        for (offset, bytes) in layout.runs() {
            let run = (touch.start + offset, touch.start + offset + bytes);
            shadow.touch(touch.store, run, &access, is_settled, |earlier, from, to| {
                if let Some(kind) = self.conflict(earlier, &access) {
                    let address = range.address + (from - touch.start);
                    let overlap = Range { space: range.space, address, bytes: to - from };
                    reports.add(kind, (earlier, &access), overlap, touch.store == Store::Graph);
                }
            });
        }
    }

    fn conflict(&self, earlier: &Access, access: &Access) -> Option<RaceKind> {
        if earlier.frees {
            // Elsewhere, addresses of host memory come back without an allocation that is seen here.
            let is_known = access.range.space != Space::Host || self.site.recorded.is_some();
            return is_known.then_some(RaceKind::AfterFree);
        }
        if earlier.lane == self.lane {
            // Between the halves of a product, nobody else's intermediate results are written where its own are.
            let finishes = access.product.is_some() && !access.writes;
            return (finishes && earlier.writes && earlier.product != access.product).then_some(RaceKind::Interleaved);
        }
        let ordered = earlier.number <= self.clock.get(earlier.lane);
        (!ordered && (earlier.writes || access.writes)).then_some(RaceKind::Unordered)
    }
}

impl Reports {
    fn add(&mut self, kind: RaceKind, (earlier, later): (&Access, &Access), overlap: Range, is_graph: bool) {
        let pair = (earlier.site.origin.serial, later.site.origin.serial, kind);
        if self.races.len() >= KEPT {
            self.count += 1;
        } else if self.seen.insert(pair) {
            self.count += 1;
            let race = Race { kind, first: Place::of(earlier, is_graph), second: Place::of(later, is_graph), overlap };
            tracing::error!(%race, "a race was found");
            self.races.push(race);
        }
    }
}

/// A stream's lane; another stream gets it when this one is gone and the host knows its work.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) finder: Arc<Finder>,
    number: usize,
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.finder.book.lock().ended.push(self.number);
    }
}

impl Finder {
    pub(crate) fn new(calls: Arc<Calls>) -> Arc<Self> {
        let book = Book { lanes: vec![Clock::default()], devices: vec![None], ..Book::default() };
        Arc::new(Self { calls, origins: AtomicU64::new(0), book: Mutex::new(book) })
    }

    /// A lane for a new stream of a device.
    pub(crate) fn lane(self: &Arc<Self>, device: u32) -> Lane {
        let mut book = self.book.lock();
        let Book { host, lanes, devices, ended, .. } = &mut *book;
        let free = ended.iter().position(|&lane| lanes[lane].get(lane) <= host.get(lane));
        let number = match free {
            Some(index) => ended.swap_remove(index),
            None => {
                lanes.push(Clock::default());
                devices.push(None);
                lanes.len() - 1
            }
        };
        lanes[number].join(host);
        devices[number] = Some(device);
        Lane { finder: Arc::clone(self), number }
    }

    /// The call that is being made. To be asked before any lock is taken.
    pub(crate) fn origin(&self, operation: Operation) -> Arc<Origin> {
        let thread = std::thread::current();
        Arc::new(Origin {
            // Relaxed: numbers that differ.
            serial: self.origins.fetch_add(1, Ordering::Relaxed),
            operation,
            call: self.calls.count(operation),
            thread: thread.name().map_or_else(|| format!("{:?}", thread.id()), str::to_owned),
            backtrace: Some(Backtrace::force_capture()),
        })
    }

    // ------------------------------------------------------------------ the host

    /// The host has waited for what comes before a point, or has seen it reached.
    pub(crate) fn host_saw(&self, point: &Point) {
        let mut book = self.book.lock();
        let clock = book.clock_of(point);
        book.host.join(&clock);
    }

    /// The host has waited for everything in a clock.
    pub(crate) fn host_waited(&self, clock: &Clock) {
        self.book.lock().host.join(clock);
    }

    /// What comes before the end of all that was called for a device so far, also on streams that are gone.
    pub(crate) fn clock_of_device(&self, device: u32) -> Clock {
        let book = self.book.lock();
        let mut clock = Clock::default();
        let of_device = book.lanes.iter().zip(&book.devices).filter(|(_, owner)| **owner == Some(device));
        of_device.for_each(|(lane, _)| clock.join(lane));
        clock
    }

    /// Memory is given back at once.
    pub(crate) fn freed(&self, operation: Operation, touch: Touch) {
        let site = Site { origin: self.origin(operation), stream: None, recorded: None, in_capture: false };
        let mut book = self.book.lock();
        let Book { host, shadow, reports, operations, .. } = &mut *book;
        *operations += 1;
        let number = host.tick(HOST);
        let now = Now { lane: HOST, number, clock: host, site: &Arc::new(site), frees: true };
        now.touch(&touch, host, shadow, reports);
    }

    /// Memory that is not reached by its addresses any more; by others it may be.
    pub(crate) fn closed(&self, operation: Operation, touch: Touch) {
        let site = Site { origin: self.origin(operation), stream: None, recorded: None, in_capture: false };
        let mut book = self.book.lock();
        let Book { host, shadow, reports, .. } = &mut *book;
        let number = host.tick(HOST);
        let access = Access {
            lane: HOST,
            number,
            writes: true,
            frees: true,
            product: None,
            site: Arc::new(site),
            range: touch.used.range,
        };
        shadow.look(touch.store, (touch.start, touch.end()), |earlier, from, to| {
            let by_these_addresses = earlier.range.meets(&touch.used.range);
            if by_these_addresses && !earlier.frees && earlier.number > host.get(earlier.lane) {
                let address = touch.used.range.address + (from - touch.start);
                let overlap = Range { space: touch.used.range.space, address, bytes: to - from };
                reports.add(RaceKind::Unordered, (earlier, &access), overlap, false);
            }
        });
    }

    /// Bytes are handed out anew, or are the mock's own again: nobody has to be ordered after what was done to them.
    pub(crate) fn forget(&self, store: Store, start: u64, bytes: u64) {
        self.book.lock().shadow.forget(store, (start, start + bytes));
    }

    // ------------------------------------------------------------------ reports

    pub(crate) fn races(&self) -> Vec<Race> {
        self.book.lock().reports.races.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.book.lock().reports.count
    }

    /// Tells on standard error what was found.
    pub(crate) fn print(&self) {
        let (races, count, operations) = {
            let book = self.book.lock();
            (book.reports.races.clone(), book.reports.count, book.operations)
        };
        let mut text: String = races.iter().map(|race| format!("highwater-mock: {race}\n")).collect();
        text.push_str(&format!("highwater-mock: race detector: {count} races in {operations} operations\n"));
        // Nobody is there to be told where standard error is closed.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}

impl Book {
    /// What comes before a point.
    fn clock_of(&self, point: &Point) -> Clock {
        if let Some(clock) = point.clock.get() {
            return clock.clone();
        }
        match point.shared_number() {
            Some(key) => self.records.get(&key).unwrap_or(&self.exported).clone(),
            None => Clock::default(),
        }
    }
}

impl Lane {
    /// What comes before the next operation of the stream, as far as the stream knows.
    pub(crate) fn clock(&self) -> Clock {
        self.finder.book.lock().lanes[self.number].clone()
    }

    /// Counts the next operation, which the host calls now.
    pub(crate) fn begin(&self) {
        let mut book = self.finder.book.lock();
        let Book { host, lanes, operations, .. } = &mut *book;
        *operations += 1;
        lanes[self.number].join(host);
        lanes[self.number].tick(self.number);
    }

    /// Notes a command of the operation that was begun. `launch` is the launch that executes it, where a graph recorded it.
    pub(crate) fn command(
        &self,
        command: &Command,
        origin: Option<&Arc<Origin>>,
        launch: Option<&Arc<Origin>>,
        (engine, stream): (&Engine, OnStream),
    ) {
        let (mut frees, mut touched) = (false, touches(command, engine));
        if let Command::Release(Retired { ptr, bytes, .. }) = *command
            && let Some((store, start)) = engine.devices[stream.device as usize].place(ptr.get())
        {
            frees = true;
            let space = Space::Device(stream.device);
            touched.push(Touch::whole(store, start, Range { space, address: ptr.get(), bytes }));
        }
        let recorded = launch.and(origin).cloned();
        let site = launch.or(origin).map(|origin| {
            Arc::new(Site { origin: Arc::clone(origin), stream: Some(stream), recorded, in_capture: false })
        });
        let mut book = self.finder.book.lock();
        match command {
            Command::Record(point) => {
                let clock = book.lanes[self.number].clone();
                if let Some((file, number)) = point.shared_number() {
                    book.exported.join(&clock);
                    book.records.remove(&(file, number.wrapping_sub(shared_event::SLOTS as u64)));
                    book.records.insert((file, number), clock.clone());
                }
                // A point is recorded once.
                let _ = point.clock.set(clock);
            }
            Command::Wait(point) => {
                let clock = book.clock_of(point);
                book.lanes[self.number].join(&clock);
            }
            _ => {
                if let Some(site) = site {
                    self.touch(&mut book, &site, &touched, frees);
                }
            }
        }
    }

    /// Notes that memory is there from this operation of the stream on.
    pub(crate) fn allocated(&self, origin: Arc<Origin>, touch: Touch, stream: OnStream) {
        let site = Arc::new(Site { origin, stream: Some(stream), recorded: None, in_capture: false });
        self.begin();
        self.touch(&mut self.finder.book.lock(), &site, &[touch], false);
    }

    /// Notes that the operation which was begun executes a graph, which one launch at a time does.
    pub(crate) fn launched(&self, graph: u64, origin: &Arc<Origin>, stream: OnStream) {
        let site = Site { origin: Arc::clone(origin), stream: Some(stream), recorded: None, in_capture: false };
        let range = Range { space: Space::Host, address: graph, bytes: 1 };
        let touch = Touch::whole(Store::Graph, graph, range);
        self.touch(&mut self.finder.book.lock(), &Arc::new(site), &[touch], false);
    }

    fn touch(&self, book: &mut Book, site: &Arc<Site>, touched: &[Touch], frees: bool) {
        let Book { host, lanes, shadow, reports, .. } = book;
        let clock = &lanes[self.number];
        let now = Now { lane: self.number, number: clock.get(self.number), clock, site, frees };
        touched.iter().for_each(|touch| now.touch(touch, host, shadow, reports));
    }

    /// Notes a command that a capture records, as the latest of one of the capture's streams.
    pub(crate) fn recorded(
        &self,
        command: &Command,
        origin: Arc<Origin>,
        (engine, stream): (&Engine, OnStream),
        (index, clock, shadow): (usize, &Clock, &mut Shadow),
    ) {
        let touched = touches(command, engine);
        let site = Arc::new(Site { origin, stream: Some(stream), recorded: None, in_capture: true });
        let now = Now { lane: index, number: clock.get(index), clock, site: &site, frees: false };
        let mut book = self.finder.book.lock();
        book.operations += 1;
        let reports = &mut book.reports;
        touched.iter().for_each(|touch| now.touch(touch, &Clock::default(), shadow, reports));
    }
}
