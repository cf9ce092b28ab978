//! The finder: follows what orders operations, and compares each with the earlier uses of its bytes.
//!
//! All of it happens in the caller's thread, when an operation is enqueued and not when it is executed. A wait refers
//! to a point that was enqueued before, so everything that is ordered before an operation is known by then. The result
//! depends on the calls and on the answers of queries, and not on which worker was faster.
//!
//! Each stream has a lane, and the host has one. The clock of a stream grows by its own operations, by the clocks of
//! the points that it waits for, and by all that the host knows at the time of each call. The host knows the clock of
//! everything that it has waited for, or has seen complete. The finder does not see locks and channels between threads, so
//! the host is *one* lane for all threads, and a wait of one thread counts for all from then on.
//!
//! If the finder distinguishes threads, each has a lane and a clock of its own. A thread learns what another knows by calls on the same
//! stream (under its submission lock), by a record and a wait for it, by core's own locks ([`OrderObserver::shared`]), and
//! by a hand-over that the program declares. A new thread begins with what any thread knew at its first call, because its
//! creation comes after what its creator did.
//!
//! A capture has lanes and bytes of its own, so branches of one graph are compared with each other while they are
//! recorded. A launch is one operation of its stream that uses all memory of the recorded ones.
//!
//! A record that another process made may come after anything that this process let others wait for. So a wait for it
//! counts as a wait for all of that.
//!
//! Lock: `book` is taken last, and no lock is taken under it.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use highwater_hal::counted;
use parking_lot::Mutex;

use crate::calls::Calls;
use crate::clock::Clock;
use crate::observer::{Note, Observed, OnStream, OrderObserver, Origin, Range, Role, Space, Store, Touch, Use};
use crate::operation::Operation;
use crate::races::report::{Place, Race, RaceKind};
use crate::races::shadow::{Access, Shadow};
use crate::races::site::Site;
use crate::shared_event;

/// The races that are kept in full. All are counted.
const KEPT: usize = 1000;
/// The lane of the host, if threads are not told apart.
const HOST: usize = 0;

thread_local! {
    /// True while this thread asks for other code.
    static ASKS_FOR_OTHERS: Cell<bool> = const { Cell::new(false) };
}

/// The race finder of one backend.
#[derive(Debug)]
pub(crate) struct Finder {
    calls: Arc<Calls>,
    origins: AtomicU64,
    book: Mutex<Book>,
}

/// The knowledge and the lane of one thread.
#[derive(Debug)]
struct Thread {
    lane: usize,
    known: Clock,
}

#[derive(Debug, Default)]
struct Book {
    /// The operations that every thread of the host knows to have happened.
    host: Clock,
    /// The knowledge of each thread; `None` if threads are not told apart.
    threads: Option<HashMap<ThreadId, Thread>>,
    /// The knowledge of all threads together.
    known_to_any: Clock,
    /// By lane. The entries of the host and its threads are not used.
    lanes: Vec<Clock>,
    /// By lane, the knowledge of the threads that called on the stream, if the finder distinguishes threads.
    callers: Vec<Clock>,
    /// The device of each lane; none for the host and its threads.
    devices: Vec<Option<u32>>,
    /// The lanes of streams that are gone.
    ended: Vec<usize>,
    /// The operations that other processes may have waited for.
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

/// The operation that is noted.
struct Now<'a> {
    lane: usize,
    number: u64,
    /// The operations that come before it.
    clock: &'a Clock,
    site: &'a Arc<Site>,
    frees: bool,
}

impl Now<'_> {
    /// Notes the use of some bytes. Uses in `settled` can conflict with no later use.
    fn touch(&self, touch: &Touch, settled: &Clock, shadow: &mut Shadow, reports: &mut Reports) {
        let Use { range, layout, writes, role } = touch.used;
        let Self { lane, number, frees, .. } = *self;
        let access = Access { lane, number, writes, frees, role, site: Arc::clone(self.site), range };
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
            // Elsewhere, addresses of host memory return without an allocation that is seen here.
            let is_known = access.range.space != Space::Host || self.site.recorded.is_some();
            return is_known.then_some(RaceKind::AfterFree);
        }
        if earlier.lane == self.lane {
            // Between the halves of a product, no other product may write its intermediate results there.
            let finishes = access.product().is_some() && !access.writes;
            return (finishes && earlier.writes && earlier.product() != access.product())
                .then_some(RaceKind::Interleaved);
        }
        // Two accesses of the CPU concern no device. The language orders them.
        if earlier.is_by_cpu() && access.is_by_cpu() {
            return None;
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

impl Finder {
    /// Creates a finder, which tells threads apart or does not.
    pub(crate) fn new(calls: Arc<Calls>, tells_threads_apart: bool) -> Arc<Self> {
        let threads = tells_threads_apart.then(HashMap::new);
        let mut book = Book { threads, ..Book::default() };
        book.new_lane();
        Arc::new(Self { calls, origins: AtomicU64::new(0), book: Mutex::new(book) })
    }

    pub(crate) fn races(&self) -> Vec<Race> {
        self.book.lock().reports.races.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.book.lock().reports.count
    }

    /// Prints the races to standard error.
    pub(crate) fn print(&self) {
        let (races, count, operations) = {
            let book = self.book.lock();
            (book.reports.races.clone(), book.reports.count, book.operations)
        };
        let mut text: String = races.iter().map(|race| format!("highwater-mock: {race}\n")).collect();
        text.push_str(&format!(
            "highwater-mock: race detector: {} in {}\n",
            counted(count, "race"),
            counted(operations, "operation")
        ));
        // If standard error is closed, the report is lost.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }

    /// Returns whether this process opened the mock. In a child, a thread that the child does not have may hold the lock.
    pub(crate) fn is_own_process(&self) -> bool {
        self.calls.is_own_process()
    }

    /// Adds to what the calling thread knows.
    pub(crate) fn learn(&self, known: &Clock) {
        self.book.lock().learn(known);
    }

    /// Returns what the calling thread knows.
    pub(crate) fn known(&self) -> Clock {
        self.book.lock().known()
    }

    fn site_of_host(&self, operation: Operation) -> Arc<Site> {
        Arc::new(Site { origin: self.origin(operation), stream: None, recorded: None, in_capture: false })
    }
}

impl Book {
    fn new_lane(&mut self) -> usize {
        self.lanes.push(Clock::default());
        self.callers.push(Clock::default());
        self.devices.push(None);
        self.lanes.len() - 1
    }

    /// Returns the calling thread; `None` if threads are not told apart.
    fn thread(&mut self) -> Option<&mut Thread> {
        let threads = self.threads.as_ref()?;
        let id = std::thread::current().id();
        if !threads.contains_key(&id) {
            let thread = Thread { lane: self.new_lane(), known: self.known_to_any.clone() };
            self.threads.as_mut()?.insert(id, thread);
        }
        let thread = self.threads.as_mut()?.get_mut(&id)?;
        thread.known.join(&self.host);
        Some(thread)
    }

    /// Returns what the calling thread knows.
    fn known(&mut self) -> Clock {
        match self.thread() {
            Some(thread) => thread.known.clone(),
            None => self.host.clone(),
        }
    }

    /// Adds to what the calling thread knows.
    fn learn(&mut self, clock: &Clock) {
        match self.thread() {
            Some(thread) => {
                thread.known.join(clock);
                self.known_to_any.join(clock);
            }
            None => self.host.join(clock),
        }
    }

    /// Adds to what every thread knows.
    fn tell_all(&mut self, clock: &Clock) {
        self.host.join(clock);
        self.known_to_any.join(clock);
    }

    /// Counts an operation of the calling thread. Returns its lane, its number, and what comes before it.
    fn host_operation(&mut self) -> (usize, u64, Clock) {
        let (lane, known) = match self.thread() {
            Some(thread) => (thread.lane, &mut thread.known),
            None => (HOST, &mut self.host),
        };
        let number = known.tick(lane);
        let known = known.clone();
        if self.threads.is_some() {
            self.known_to_any.join(&known);
        }
        (lane, number, known)
    }

    /// Notes an operation of the calling thread on memory.
    fn host_touches(&mut self, site: &Arc<Site>, touch: &Touch, frees: bool) {
        self.operations += 1;
        let (lane, number, known) = self.host_operation();
        let now = Now { lane, number, clock: &known, site, frees };
        now.touch(touch, &self.host, &mut self.shadow, &mut self.reports);
    }

    /// Returns what comes before a point.
    fn clock_of(&self, point: &Observed) -> Clock {
        if let Some(clock) = point.clock.get() {
            return clock.clone();
        }
        match point.shared {
            Some(key) => self.records.get(&key).unwrap_or(&self.exported).clone(),
            None => Clock::default(),
        }
    }
}

impl OrderObserver for Finder {
    fn origin(&self, operation: Operation) -> Arc<Origin> {
        let thread = std::thread::current();
        Arc::new(Origin {
            // Relaxed: the numbers must differ, and order nothing.
            serial: self.origins.fetch_add(1, Ordering::Relaxed),
            operation,
            call: self.calls.count(operation),
            thread: thread.name().map_or_else(|| format!("{:?}", thread.id()), str::to_owned),
            backtrace: Some(Backtrace::force_capture()),
        })
    }

    // ------------------------------------------------------------------ streams

    /// Gives a stream the lane of one that is gone, if the host knows the work of that one, else a new lane.
    fn stream_opened(&self, device: u32) -> usize {
        let mut book = self.book.lock();
        let known = book.known();
        let Book { host, lanes, ended, .. } = &mut *book;
        let free = ended.iter().position(|&lane| lanes[lane].get(lane) <= host.get(lane));
        let lane = match free {
            Some(index) => ended.swap_remove(index),
            None => book.new_lane(),
        };
        book.lanes[lane].join(&known);
        book.callers[lane] = known;
        book.devices[lane] = Some(device);
        lane
    }

    fn stream_ended(&self, lane: usize) {
        self.book.lock().ended.push(lane);
    }

    fn begins(&self, lane: usize) {
        let mut book = self.book.lock();
        book.operations += 1;
        if book.threads.is_some() {
            // The calls on a stream take turns, so the thread comes after those that called before.
            let callers = std::mem::take(&mut book.callers[lane]);
            book.learn(&callers);
            book.callers[lane] = book.known();
        }
        let known = book.known();
        book.lanes[lane].join(&known);
        book.lanes[lane].tick(lane);
    }

    fn records(&self, lane: usize, point: &Observed) {
        let mut book = self.book.lock();
        let clock = book.lanes[lane].clone();
        if book.threads.is_some() {
            // A point is recorded once.
            let _ = point.known.set(book.known());
        }
        if let Some((file, number)) = point.shared {
            book.exported.join(&clock);
            book.records.remove(&(file, number.wrapping_sub(shared_event::SLOTS as u64)));
            book.records.insert((file, number), clock.clone());
        }
        // A point is recorded once.
        let _ = point.clock.set(clock);
    }

    fn waits(&self, lane: usize, point: &Observed) {
        let mut book = self.book.lock();
        let clock = book.clock_of(point);
        book.lanes[lane].join(&clock);
        if let Some(known) = point.known.get() {
            book.learn(known);
        }
    }

    fn uses(
        &self,
        stream: OnStream,
        origin: &Arc<Origin>,
        launch: Option<&Arc<Origin>>,
        touched: &[Touch],
        frees: bool,
    ) {
        let recorded = launch.map(|_| Arc::clone(origin));
        let origin = Arc::clone(launch.unwrap_or(origin));
        let site = Arc::new(Site { origin, stream: Some(stream), recorded, in_capture: false });
        let mut book = self.book.lock();
        let Book { host, lanes, shadow, reports, .. } = &mut *book;
        let (lane, clock) = (stream.lane, &lanes[stream.lane]);
        let now = Now { lane, number: clock.get(lane), clock, site: &site, frees };
        touched.iter().for_each(|touch| now.touch(touch, host, shadow, reports));
    }

    fn captured(
        &self,
        notes: &mut Option<Note>,
        stream: OnStream,
        origin: &Arc<Origin>,
        touched: &[Touch],
        (index, clock): (usize, &Clock),
    ) {
        let notes = notes.get_or_insert_with(|| Box::<Shadow>::default());
        let Some(shadow) = notes.downcast_mut::<Shadow>() else { return };
        let origin = Arc::clone(origin);
        let site = Arc::new(Site { origin, stream: Some(stream), recorded: None, in_capture: true });
        let now = Now { lane: index, number: clock.get(index), clock, site: &site, frees: false };
        let mut book = self.book.lock();
        book.operations += 1;
        let reports = &mut book.reports;
        touched.iter().for_each(|touch| now.touch(touch, &Clock::default(), shadow, reports));
    }

    // ------------------------------------------------------------------ the host

    fn clock_of_stream(&self, lane: usize) -> Clock {
        self.book.lock().lanes[lane].clone()
    }

    fn clock_of_device(&self, device: u32) -> Clock {
        let book = self.book.lock();
        let mut clock = Clock::default();
        let of_device = book.lanes.iter().zip(&book.devices).filter(|(_, owner)| **owner == Some(device));
        of_device.for_each(|(lane, _)| clock.join(lane));
        clock
    }

    fn host_waited(&self, clock: &Clock) {
        if !ASKS_FOR_OTHERS.get() {
            self.book.lock().learn(clock);
        }
    }

    fn host_saw(&self, point: &Observed) {
        if ASKS_FOR_OTHERS.get() {
            return;
        }
        let mut book = self.book.lock();
        let clock = book.clock_of(point);
        book.learn(&clock);
    }

    fn ask_for_others(&self, ask: &mut dyn FnMut()) {
        /// Ends the questions, also after a panic.
        struct Asking(bool);
        impl Drop for Asking {
            fn drop(&mut self) {
                ASKS_FOR_OTHERS.set(self.0);
            }
        }
        let _asking = Asking(ASKS_FOR_OTHERS.replace(true));
        ask();
    }

    fn clock_of_point(&self, point: &Observed) -> Clock {
        self.book.lock().clock_of(point)
    }

    fn shared(&self, lane: usize) {
        let mut book = self.book.lock();
        if book.threads.is_some() {
            // Another thread may have enqueued more since, which no thread has seen complete.
            let known = book.known();
            let is_all = book.lanes[lane].get(lane) <= known.get(lane);
            let clock = if is_all { book.lanes[lane].clone() } else { known };
            book.tell_all(&clock);
        }
    }

    fn shared_point(&self, point: &Observed) {
        let mut book = self.book.lock();
        if book.threads.is_some() {
            let clock = book.clock_of(point);
            book.tell_all(&clock);
        }
    }

    fn accessed(&self, operation: Operation, touch: Touch) {
        self.calls.count_access();
        let site = self.site_of_host(operation);
        self.book.lock().host_touches(&site, &touch, false);
    }

    fn freed(&self, operation: Operation, touch: Touch) {
        let site = self.site_of_host(operation);
        self.book.lock().host_touches(&site, &touch, true);
    }

    fn closed(&self, operation: Operation, touch: Touch) {
        let site = self.site_of_host(operation);
        let mut book = self.book.lock();
        let (lane, number, known) = book.host_operation();
        let Book { shadow, reports, .. } = &mut *book;
        let range = touch.used.range;
        let access = Access { lane, number, writes: true, frees: true, role: Role::Whole, site, range };
        shadow.look(touch.store, (touch.start, touch.end()), |earlier, from, to| {
            let by_these_addresses = earlier.range.meets(&range);
            if by_these_addresses && !earlier.frees && earlier.number > known.get(earlier.lane) {
                let address = range.address + (from - touch.start);
                let overlap = Range { space: range.space, address, bytes: to - from };
                reports.add(RaceKind::Unordered, (earlier, &access), overlap, false);
            }
        });
    }

    fn forget(&self, store: Store, start: u64, bytes: u64) {
        self.book.lock().shadow.forget(store, (start, start + bytes));
    }
}
