//! The thread of a runtime that asks whether completion events have passed, and notifies the waits.
//!
//! *Queues.* The events of one stream pass in the order of their numbers. So each stream has a queue, and the thread asks about the
//! first event only. If it has passed, the thread asks about the event 1, 2, 4, 8, ... numbers behind, until one has not. Every wait up
//! to the last event that has passed is over. So thousands of waits cost few questions. An event without a number has a queue of its
//! own.
//!
//! *Pauses.* The thread asks without a pause for [`SPIN`] after the last progress of a stream. From then on it pauses for [`SHORTEST`], and
//! after [`PROMPT`] for 1/1000 of the time beyond more, up to [`LONGEST`]. So a wait of 50 ms still ends promptly, and a stream that makes
//! no progress for seconds costs little. Many waits lengthen the pause: it is short beside the time to tell them. One pause serves several
//! streams, so the thread asks early about those that have waited half their pause. If nothing waits, it sleeps until something does.
//!
//! *Life.* The first wait of a runtime starts the thread, and the end of the runtime ends it. Every wait that is left then gets an
//! error. A waker that the thread calls may end the runtime, because a task may own its last object. So the thread holds no lock and
//! no event when it notifies. No such thread waits for the end of another one, because that one may wait for its end in turn. It
//! waits only for the questions of the other one. A forked child has no such thread, and takes none of its locks. Once the process
//! exits, the thread makes no call.

use std::collections::hash_map::{Entry as MapEntry, HashMap};
use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::done::{Listener, Outcome, Wait};
use crate::own_thread::{self, OwnThread};
use crate::panics;
use crate::pool::completion_events::CompletionEvent;
use highwater_hal::{DoneAnswer, Error, ErrorKind, Result, fork::Generation};

/// The time after progress of a stream for which the thread asks without a pause.
const SPIN: Duration = Duration::from_micros(20);
const SHORTEST: Duration = Duration::from_micros(4);
const LONGEST: Duration = Duration::from_millis(1);
/// The time after progress of a stream for which the pauses stay the shortest.
const PROMPT: Duration = Duration::from_millis(50);
/// Later, a pause is this part of the time beyond.
const PART: u32 = 1000;
/// A pause is at least this time for each wait. To tell the waits takes several times as long.
const FOR_EACH_WAIT: Duration = Duration::from_nanos(40);

/// The questions of the thread.
pub(crate) trait Answers: Send + Sync {
    /// Returns whether a completion event has passed. Does not wait.
    fn has_passed(&self, event: &CompletionEvent) -> Result<bool>;
    /// Returns the answer for the backend's observer, if it needs one. The event has passed.
    fn answer(&self, event: &CompletionEvent) -> Option<Arc<dyn DoneAnswer>>;
    /// Refuses calls during the exit of the process.
    fn may_ask(&self) -> Result<()>;
}

/// The waits of a runtime.
#[derive(Debug)]
pub(crate) struct Notifier {
    generation: Generation,
    state: Mutex<State>,
    /// Wakes the thread.
    changed: Condvar,
    /// Wakes the threads that wait for the end of a round of questions.
    answered: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<QueueKey, Queue>,
    /// The number of the next wait for an event.
    next: u64,
    thread: Option<OwnThread>,
    thread_id: Option<ThreadId>,
    /// True while the thread asks the backend.
    is_asking: bool,
    /// The error of every later wait, once the runtime has ended.
    ended: Option<Error>,
}

/// A stream, or a wait for an event without a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum QueueKey {
    Stream(u64),
    Alone(u64),
}

/// A wait for an event that has passed or failed.
#[derive(Debug)]
struct Over {
    wait: Arc<Wait>,
    result: Result<()>,
    answer: Option<Arc<dyn DoneAnswer>>,
}

/// Waits for the events of one stream, by number.
#[derive(Debug)]
struct Queue {
    entries: BTreeMap<EntryKey, Entry>,
    /// The time of the last progress, or of the start of the first wait.
    since: Instant,
    /// The time of the last question. The next one is due after the pause.
    asked: Instant,
    pause: Duration,
}

#[derive(Debug)]
struct Entry {
    event: Arc<CompletionEvent>,
    wait: Arc<Wait>,
}

/// The place of an entry in its queue: the number of its event, and its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct EntryKey {
    event: u64,
    own: u64,
}

/// Identifies one wait for one event, for its cancellation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    queue: QueueKey,
    key: EntryKey,
}

impl Queue {
    fn new(now: Instant) -> Self {
        Self { entries: BTreeMap::new(), since: now, asked: now, pause: Duration::ZERO }
    }

    /// Notes progress. The next question is due at once.
    fn progress(&mut self) {
        self.since = Instant::now();
        self.pause = Duration::ZERO;
    }

    /// Notes a question. `least` is the shortest pause.
    fn postpone(&mut self, now: Instant, least: Duration) {
        let waited = now.saturating_duration_since(self.since);
        self.asked = now;
        let longer = SHORTEST + waited.saturating_sub(PROMPT) / PART;
        self.pause = if waited < SPIN { Duration::ZERO } else { longer.clamp(least, LONGEST) };
    }
}

impl Notifier {
    pub(crate) fn new(generation: Generation) -> Arc<Self> {
        Arc::new(Self { generation, state: Mutex::default(), changed: Condvar::new(), answered: Condvar::new() })
    }

    pub(super) fn is_own_process(&self) -> bool {
        self.generation.is_current()
    }

    /// Begins a wait for all these events. Starts the thread if it does not exist.
    pub(super) fn begin(
        self: &Arc<Self>,
        answers: &Arc<dyn Answers>,
        events: Vec<Arc<CompletionEvent>>,
        wait: &Arc<Wait>,
    ) -> Result<Box<[Place]>> {
        let now = Instant::now();
        let mut state = self.state.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        self.start(&mut state, answers)?;
        let mut is_new = false;
        let mut begin = |event: Arc<CompletionEvent>| {
            let own = state.next;
            state.next += 1;
            let point = event.point();
            let is_ordered = point.stream != 0 && !event.is_exposed();
            let queue = if is_ordered { QueueKey::Stream(point.stream) } else { QueueKey::Alone(own) };
            let key = EntryKey { event: point.number, own };
            let waits = match state.queues.entry(queue) {
                MapEntry::Occupied(waits) => waits.into_mut(),
                MapEntry::Vacant(place) => {
                    is_new = true;
                    place.insert(Queue::new(now))
                }
            };
            waits.entries.insert(key, Entry { event, wait: Arc::clone(wait) });
            Place { queue, key }
        };
        let places = events.into_iter().map(&mut begin).collect();
        drop(state);
        if is_new {
            self.changed.notify_one();
        }
        Ok(places)
    }

    fn start(self: &Arc<Self>, state: &mut State, answers: &Arc<dyn Answers>) -> Result<()> {
        if state.thread.is_none() {
            let (own, answers) = (Arc::clone(self), Arc::clone(answers));
            let names = ("highwater-done", "done", ", or wait with `synchronize`");
            state.thread = Some(OwnThread::start(names, self.generation, move || own.run(&*answers))?);
        }
        Ok(())
    }

    /// Removes a wait that has lost its owner.
    pub(super) fn cancel(&self, places: &[Place]) {
        let mut removed = Vec::new();
        let mut state = self.state.lock();
        for place in places {
            let MapEntry::Occupied(mut queue) = state.queues.entry(place.queue) else { continue };
            removed.extend(queue.get_mut().entries.remove(&place.key));
            if queue.get().entries.is_empty() {
                queue.remove();
            }
        }
        drop(state);
        // Without the lock: an event returns to its pool.
        drop(removed);
    }

    // ---------------------------------------------------------------- the thread

    fn run(&self, answers: &dyn Answers) {
        let mut over = VecDeque::new();
        if panics::contain(|| self.serve(answers, &mut over)).is_none() {
            // No wait hangs: those that were taken, those in the queues, and later ones have an error.
            crate::warnings::warning!("the thread that serves the waits of a runtime panicked, so all of them end");
            self.set_asking(false);
            over.drain(..).for_each(|over| settle(Over { result: Err(broken()), ..over }));
            self.end_waits(broken());
        }
    }

    /// Asks and notifies until the end. The waits that are over go through `over`.
    fn serve(&self, answers: &dyn Answers, over: &mut VecDeque<Over>) {
        own_thread::become_caller();
        self.state.lock().thread_id = Some(thread::current().id());
        // The default would add 50 us to each pause. If the kernel refuses, waits end later, and nothing else changes.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
        let (mut due, mut passed) = (Vec::new(), Vec::new());
        while let Some(spins) = self.take_due(&mut due) {
            if let Err(error) = answers.may_ask() {
                self.set_asking(false);
                due.clear();
                self.end_waits(error);
                return;
            }
            for (queue, key, event) in due.drain(..) {
                match ask(answers, &event) {
                    Ok(false) => {}
                    Ok(true) => {
                        drop(event);
                        let through = self.find_last_passed(answers, queue, key);
                        let first = over.len();
                        self.take_passed(queue, through, &mut passed, over);
                        // Without the lock: an event returns to its pool.
                        for (event, over) in passed.drain(..).zip(over.range_mut(first..)) {
                            over.answer = answers.answer(&event);
                        }
                    }
                    Err(error) => {
                        drop(event);
                        self.take_failed(queue, key, &error, over);
                    }
                }
            }
            if over.is_empty() {
                // Other threads may run, because nothing else makes this one pause.
                if spins {
                    thread::yield_now();
                }
                continue;
            }
            self.set_asking(false);
            while let Some(over) = over.pop_front() {
                settle(over);
            }
        }
    }

    /// Waits until a question is due. The first events of all queues that are due are then in `due`, and the thread asks. Its earlier
    /// questions are over. Returns whether the next question is due without a pause, or `None` if the thread must end.
    fn take_due(&self, due: &mut Vec<(QueueKey, EntryKey, Arc<CompletionEvent>)>) -> Option<bool> {
        let mut state = self.state.lock();
        if std::mem::take(&mut state.is_asking) {
            self.answered.notify_all();
        }
        loop {
            if state.ended.is_some() {
                return None;
            }
            let now = Instant::now();
            let Some(next) = state.queues.values().map(|queue| queue.asked + queue.pause).min() else {
                self.changed.wait(&mut state);
                continue;
            };
            if next > now {
                self.changed.wait_until(&mut state, next);
                continue;
            }
            let waits: usize = state.queues.values().map(|queue| queue.entries.len()).sum();
            let least = FOR_EACH_WAIT.saturating_mul(u32::try_from(waits).unwrap_or(u32::MAX)).clamp(SHORTEST, LONGEST);
            let mut spins = false;
            for (&key, queue) in &mut state.queues {
                // The thread asks once for several queues: the first one has waited long enough, and the others at least half as long.
                if now.saturating_duration_since(queue.asked) >= queue.pause / 2
                    && let Some((first, entry)) = queue.entries.first_key_value()
                {
                    due.push((key, *first, Arc::clone(&entry.event)));
                    queue.postpone(now, least);
                    spins |= queue.pause.is_zero();
                }
            }
            state.is_asking = true;
            return Some(spins);
        }
    }

    fn set_asking(&self, is_asking: bool) {
        self.state.lock().is_asking = is_asking;
        self.answered.notify_all();
    }

    /// Returns the last event of a queue that is known to have passed. The event of `first` has passed.
    fn find_last_passed(&self, answers: &dyn Answers, queue: QueueKey, first: EntryKey) -> EntryKey {
        let mut passed = first;
        let mut step = 1;
        loop {
            let further = {
                let state = self.state.lock();
                let Some(queue) = state.queues.get(&queue) else { return passed };
                let beyond = EntryKey { event: passed.event.saturating_add(step), own: 0 };
                let found = queue.entries.range(beyond..).next().or_else(|| queue.entries.last_key_value());
                found.filter(|(key, _)| **key > passed).map(|(key, entry)| (*key, Arc::clone(&entry.event)))
            };
            match further {
                // An error belongs to its own event. The thread asks about that event when it is the first.
                Some((key, event)) if ask(answers, &event).unwrap_or(false) => passed = key,
                _ => return passed,
            }
            step *= 2;
        }
    }

    /// Takes the waits for events that have passed, and these events.
    fn take_passed(
        &self,
        queue: QueueKey,
        through: EntryKey,
        events: &mut Vec<Arc<CompletionEvent>>,
        over: &mut VecDeque<Over>,
    ) {
        let mut state = self.state.lock();
        let MapEntry::Occupied(mut found) = state.queues.entry(queue) else { return };
        let waits = found.get_mut();
        // Waits that began meanwhile may be for the same event.
        while let Some(first) = waits.entries.first_entry().filter(|first| first.key().event <= through.event) {
            let entry = first.remove();
            events.push(entry.event);
            over.push_back(Over { wait: entry.wait, result: Ok(()), answer: None });
        }
        waits.progress();
        if waits.entries.is_empty() {
            found.remove();
        }
    }

    /// Takes the wait for an event about which the backend has an error.
    fn take_failed(&self, queue: QueueKey, key: EntryKey, error: &Error, over: &mut VecDeque<Over>) {
        let mut state = self.state.lock();
        let MapEntry::Occupied(mut found) = state.queues.entry(queue) else { return };
        let waits = found.get_mut();
        let failed = waits.entries.remove(&key);
        waits.pause = Duration::ZERO;
        if waits.entries.is_empty() {
            found.remove();
        }
        drop(state);
        over.extend(failed.map(|entry| Over { wait: entry.wait, result: Err(error.clone()), answer: None }));
    }

    // ---------------------------------------------------------------- the end

    /// Waits until the thread asks the backend nothing. A question may keep a stream alive while it lasts.
    pub(crate) fn wait_for_answers(&self) {
        let mut state = self.state.lock();
        while state.is_asking && state.thread_id != Some(thread::current().id()) {
            self.answered.wait(&mut state);
        }
    }

    /// Ends the thread and all waits, at the end of the runtime. If `waits`, waits for the thread, or in a thread that calls the program's
    /// code for the questions under way.
    pub(crate) fn end(&self, waits: bool) {
        let is_caller = own_thread::is_caller();
        let thread = {
            let mut state = self.state.lock();
            state.ended.get_or_insert_with(ended);
            state.thread.take()
        };
        self.changed.notify_all();
        if let Some(thread) = thread {
            thread.end(waits && !is_caller);
        }
        if waits && is_caller {
            self.wait_for_answers();
        }
        self.end_waits(ended());
    }

    /// Ends all waits with an error.
    fn end_waits(&self, error: Error) {
        let mut state = self.state.lock();
        let error = state.ended.get_or_insert(error).clone();
        let queues = std::mem::take(&mut state.queues);
        drop(state);
        let entries = queues.into_values().flat_map(|queue| queue.entries.into_values());
        let (events, waits): (Vec<_>, Vec<_>) = entries.map(|entry| (entry.event, entry.wait)).unzip();
        // All events are back before the first waker runs.
        drop(events);
        waits.into_iter().for_each(|wait| settle(Over { wait, result: Err(error.clone()), answer: None }));
    }
}

#[cold]
fn ended() -> Error {
    Error::new(ErrorKind::InvalidState, "done", "the runtime ended before the work was known to be done")
        .with_hint("keep an object of the runtime, such as the stream, until its futures are ready")
}

#[cold]
fn broken() -> Error {
    Error::new(ErrorKind::InvalidState, "done", "the thread that serves the waits of the runtime panicked")
        .with_hint("report the panic, and wait with `synchronize`")
}

#[cfg(test)]
impl Notifier {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.state.lock())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.state.is_locked()
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        if !self.generation.is_current() {
            // The wakers belong to an executor of the parent.
            std::mem::forget(std::mem::take(&mut self.state.get_mut().queues));
        }
    }
}

/// Asks the backend. A panic of the backend becomes the error of the wait, so the thread goes on.
fn ask(answers: &dyn Answers, event: &CompletionEvent) -> Result<bool> {
    panics::contain(|| answers.has_passed(event)).unwrap_or_else(|| {
        let message = "the backend panicked when it was asked about an event";
        Err(Error::new(ErrorKind::Vendor, "query_event", message)
            .with_hint("report the panic to the backend's authors"))
    })
}

/// Tells a wait that one of its events has passed or failed. The drop of a wait may drop a waker, which is code of an executor.
fn settle(Over { wait, result, answer }: Over) {
    tell(wait.settle(result, answer));
    if panics::contain(|| drop(wait)).is_none() {
        crate::warnings::warning!("the drop of a waker panicked");
    }
}

/// Notifies the listener of a wait that is over. A panic of its code stops no other wait.
pub(super) fn tell(over: Option<(Listener, Outcome)>) {
    let Some((listener, outcome)) = over else { return };
    if panics::contain(|| listener.tell(outcome)).is_none() {
        crate::warnings::warning!("a waker or a closure for the end of device work panicked");
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, channel};
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::Runtime;
    use crate::testing::ManualBackend;
    use crate::waits::Done;

    /// Knows of no event that has passed. Panics outside every catch, once the test says so.
    struct Breaks(Mutex<Receiver<()>>);

    impl Answers for Breaks {
        fn has_passed(&self, _: &CompletionEvent) -> Result<bool> {
            Ok(false)
        }

        fn answer(&self, _: &CompletionEvent) -> Option<Arc<dyn DoneAnswer>> {
            None
        }

        fn may_ask(&self) -> Result<()> {
            let _ = self.0.lock().recv();
            panic!("the thread breaks on purpose");
        }
    }

    #[test]
    fn a_broken_thread_ends_all_waits_and_refuses_later_ones() {
        let runtime = Runtime::new(ManualBackend::new()).unwrap();
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        let notifier = Notifier::new(Generation::current());
        let (go, wait) = channel();
        let answers: Arc<dyn Answers> = Arc::new(Breaks(Mutex::new(wait)));
        let begin = || Done::begin(&notifier, &answers, Ok(vec![stream.completion_outside("done").unwrap()]));
        let (future, closure, descriptor) = (begin(), begin(), begin().into_descriptor().unwrap());
        let (sender, results) = channel();
        closure.on_done(move |result| sender.send(result).unwrap());
        assert!(descriptor.outcome().is_none());
        go.send(()).unwrap();
        let is_broken = |result: Result<()>| result.is_err_and(|error| error.to_string().contains("panicked"));
        assert!(is_broken(results.recv_timeout(Duration::from_secs(30)).unwrap()));
        // Joins the thread, which has told all of them.
        notifier.end(true);
        for done in [future, begin()] {
            let Poll::Ready(result) = pin!(done).poll(&mut Context::from_waker(Waker::noop())) else {
                panic!("the future would hang")
            };
            assert!(is_broken(result));
        }
        assert!(is_broken(descriptor.outcome().unwrap()));
        drop(stream);
        assert_eq!(runtime.close().unwrap().total(), 0);
    }

    /// Says which streams have passed all of their events.
    #[derive(Default)]
    struct Passed(Mutex<Vec<u64>>);

    impl Answers for Passed {
        fn has_passed(&self, event: &CompletionEvent) -> Result<bool> {
            Ok(self.0.lock().contains(&event.point().stream))
        }

        fn answer(&self, _: &CompletionEvent) -> Option<Arc<dyn DoneAnswer>> {
            None
        }

        fn may_ask(&self) -> Result<()> {
            Ok(())
        }
    }

    /// A waker whose drop panics.
    struct Armed;

    impl std::task::Wake for Armed {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Armed {
        fn drop(&mut self) {
            panic!("this drop panics on purpose");
        }
    }

    #[test]
    fn a_waker_whose_drop_panics_in_the_thread_stops_no_other_wait() {
        let runtime = Runtime::new(ManualBackend::new()).unwrap();
        let device = runtime.device(0).unwrap();
        let streams = [(); 2].map(|()| device.create_stream().unwrap());
        let notifier = Notifier::new(Generation::current());
        let passed = Arc::<Passed>::default();
        let answers: Arc<dyn Answers> = Arc::<Passed>::clone(&passed);
        let event = |stream: usize| streams[stream].completion_outside("done").unwrap();
        let numbers = [0, 1].map(|stream| event(stream).point().stream);
        let begin = |events| Done::begin(&notifier, &answers, Ok(events));
        let slot = Arc::new(Mutex::new(None::<Done>));
        let taken = Arc::clone(&slot);
        begin(vec![event(0)]).on_done(move |_| drop(taken.lock().take()));
        // The thread takes this wait together with the closure, which drops it. So the thread drops the waker.
        let mut done = begin(vec![event(0), event(1)]);
        let waker = Waker::from(Arc::new(Armed));
        assert!(pin!(&mut done).poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        *slot.lock() = Some(done);
        let (sender, results) = channel();
        begin(vec![event(1)]).on_done(move |result| sender.send(result).unwrap());
        for number in numbers {
            passed.0.lock().push(number);
            while number == numbers[0] && slot.lock().is_some() {
                thread::yield_now();
            }
        }
        results.recv_timeout(Duration::from_secs(30)).expect("the thread goes on").unwrap();
        notifier.end(true);
        drop((streams, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
    }

    /// Has an error for the events of one stream after the first question, and knows of no other event that has passed.
    struct Fails {
        stream: u64,
        asked: AtomicBool,
    }

    impl Answers for Fails {
        fn has_passed(&self, event: &CompletionEvent) -> Result<bool> {
            let fails = event.point().stream == self.stream && self.asked.swap(true, Ordering::Relaxed);
            if fails { Err(broken()) } else { Ok(false) }
        }

        fn answer(&self, _: &CompletionEvent) -> Option<Arc<dyn DoneAnswer>> {
            None
        }

        fn may_ask(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_dropped_wait_leaves_no_event_behind() {
        let runtime = Runtime::new(ManualBackend::new()).unwrap();
        let device = runtime.device(0).unwrap();
        let streams = [(); 2].map(|()| device.create_stream().unwrap());
        let notifier = Notifier::new(Generation::current());
        let event = |stream: usize| streams[stream].completion_outside("done").unwrap();
        let unknown: Arc<dyn Answers> = Arc::<Passed>::default();
        let waits = |notifier: &Notifier| {
            let state = notifier.state.lock();
            state.queues.values().map(|queue| queue.entries.len()).sum::<usize>()
        };
        let pending = [0, 0, 1].map(|stream| Done::begin(&notifier, &unknown, Ok(vec![event(stream)])));
        assert_eq!(waits(&notifier), 3);
        drop(pending);
        assert_eq!(waits(&notifier), 0);
        notifier.end(true);

        // One of two events fails, so the wait is over. The other event has not passed.
        let notifier = Notifier::new(Generation::current());
        let events = vec![event(0), event(1)];
        let fails: Arc<dyn Answers> =
            Arc::new(Fails { stream: events[0].point().stream, asked: AtomicBool::new(false) });
        let mut done = Done::begin(&notifier, &fails, Ok(events));
        let mut context = Context::from_waker(Waker::noop());
        while pin!(&mut done).poll(&mut context).is_pending() {
            thread::yield_now();
        }
        assert_eq!(waits(&notifier), 1);
        drop(done);
        assert_eq!(waits(&notifier), 0);
        notifier.end(true);
        drop((streams, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}
