//! The time from a kill until no other process has anything of the dead one.
//!
//! A thread of each worker looks at the list of its runtime, the same that `highwater ipc ls` shows. It records when another
//! process appears there, as a holder or as an owner of memory, and when it is gone. From these records and the times of the kills,
//! the supervisor derives the times of the reclaims.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use highwater::Runtime;

use super::books::Books;
use super::message::{Span, Trace};
use super::{keeps, now};

/// The interval between two looks at the list.
const LOOK: Duration = Duration::from_millis(1);
/// The time after which memory counts as leaked. It is far above the bar, for a busy machine.
const LEAKED: Duration = Duration::from_secs(20);

/// Returns the processes that hold memory of this one, and those of which this one has memory that goes with them.
fn listed(runtime: &Runtime) -> HashSet<u32> {
    let list = runtime.shared_memory();
    let holders = list.shared.iter().flat_map(|shared| shared.holders.iter().copied());
    // This process keeps the memory of some, and page-locked memory of all: the kind without a device.
    let opened = list.opened.iter().filter(|opened| opened.allocation.device.is_some());
    let owners = opened.map(|opened| opened.owner).filter(|owner| !keeps(list.pid, *owner));
    // The heir of a worker is in the same process.
    holders.chain(owners).filter(|other| *other != list.pid).collect()
}

/// The thread of a worker.
pub(super) struct Watcher {
    runtimes: Arc<Mutex<Vec<Runtime>>>,
    traces: Arc<Mutex<Vec<Trace>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub(super) fn start(runtime: &Runtime) -> Self {
        let (traces, is_over) = (Arc::<Mutex<Vec<Trace>>>::default(), Arc::<AtomicBool>::default());
        let runtimes = Arc::new(Mutex::new(vec![runtime.clone()]));
        let (noted, stops, watched) = (Arc::clone(&traces), Arc::clone(&is_over), Arc::clone(&runtimes));
        let thread = thread::spawn(move || {
            let mut before = HashSet::new();
            while !stops.load(Ordering::Relaxed) {
                let runtimes = watched.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let (list, at): (HashSet<u32>, u64) = (runtimes.iter().flat_map(listed).collect(), now());
                let trace = |is_there| move |pid: &u32| Trace { pid: *pid, is_there, at };
                let new = list.difference(&before).map(trace(true));
                let gone = before.difference(&list).map(trace(false));
                noted.lock().unwrap_or_else(PoisonError::into_inner).extend(new.chain(gone));
                before = list;
                thread::sleep(LOOK);
            }
        });
        Self { runtimes, traces, is_over, thread: Some(thread) }
    }

    /// Also looks at the list of another runtime.
    pub(super) fn add(&self, runtime: &Runtime) {
        self.runtimes.lock().unwrap_or_else(PoisonError::into_inner).push(runtime.clone());
    }

    /// Returns the records since the last call.
    pub(super) fn take(&self) -> Vec<Trace> {
        std::mem::take(&mut *self.traces.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// The time after a death in which the records of all processes arrive. A process that is in a call brings them after it.
const SETTLED: Duration = Duration::from_secs(2);
/// The same when no process is stopped.
const SETTLED_AT_END: Duration = Duration::from_millis(100);

/// A process that was killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) pid: u32,
    /// The time of the kill.
    pub(super) at: u64,
    /// The time at which the process was dead, once it is.
    pub(super) dead: Option<u64>,
    /// The latest time at which a process was seen without anything of it.
    latest: Option<u64>,
}

/// The kills that wait for their reclaim, and the times of the others.
#[derive(Debug, Default)]
pub(super) struct Reclaims {
    /// The pairs of processes of which the first has something of the second.
    has: HashSet<(u32, u32)>,
    victims: Vec<Victim>,
    pub(super) times: Vec<Duration>,
    /// The times from the kills until the processes were dead. They are a part of the times of the reclaims.
    pub(super) deaths: Vec<Duration>,
    /// Kills of processes of which no observed process had anything.
    pub(super) unmeasured: u64,
    pub(super) leaks: Vec<String>,
}

impl Reclaims {
    pub(super) fn note_kill(&mut self, pid: u32, at: u64) {
        self.victims.push(Victim { pid, at, dead: None, latest: None });
    }

    /// Records the death of a process. It has nothing any more, and the others must lose what they have of it.
    pub(super) fn note_death(&mut self, pid: u32, at: u64) {
        self.has.retain(|(process, _)| *process != pid);
        self.victims.iter_mut().filter(|victim| victim.pid == pid).for_each(|victim| victim.dead = Some(at));
    }

    /// Records the report of a process.
    pub(super) fn note(&mut self, process: u32, trace: &Trace, books: &Books) {
        let Trace { pid, is_there, at } = *trace;
        if is_there {
            self.has.insert((process, pid));
            return;
        }
        self.has.remove(&(process, pid));
        if let Some(victim) = self.victims.iter_mut().find(|victim| victim.pid == pid)
            && at >= victim.at
            && !books.was_stopped(process, Span { start: victim.at, end: at })
        {
            victim.latest = victim.latest.max(Some(at));
        }
    }

    /// Judges the victims. At the end, no process is stopped.
    pub(super) fn judge(&mut self, books: &Books, now: u64, is_at_end: bool) {
        let settled = if is_at_end { SETTLED_AT_END } else { SETTLED };
        let Self { has, victims, times, deaths, unmeasured, leaks } = self;
        victims.retain(|victim| {
            // Processes that do not run, or look dead to the others, are not waited for.
            let span = Span { start: victim.at, end: now };
            let mut holders = has.iter().filter(|(process, pid)| {
                *pid == victim.pid && books.answers(*process) && !books.was_stopped(*process, span)
            });
            let Some(dead) = victim.dead else { return true };
            let passed = Duration::from_nanos(now - victim.at);
            match (holders.next(), victim.latest) {
                (Some((process, _)), _) if passed > LEAKED => {
                    let (process, victim) = (books.name(*process), books.name(victim.pid));
                    let seconds = LEAKED.as_secs();
                    leaks
                        .push(format!("{process} still has memory of {victim} or for it, {seconds} s after its death"));
                    false
                }
                (Some(_), _) => true,
                (None, _) if Duration::from_nanos(now - dead) < settled => true,
                (None, Some(latest)) => {
                    times.push(Duration::from_nanos(latest - victim.at));
                    deaths.push(Duration::from_nanos(dead - victim.at));
                    false
                }
                (None, None) => {
                    *unmeasured += 1;
                    false
                }
            }
        });
        let victims: HashSet<u32> = victims.iter().map(|victim| victim.pid).collect();
        has.retain(|(_, pid)| victims.contains(pid) || books.answers(*pid));
    }

    /// Returns whether kills wait for their reclaim.
    pub(super) fn is_waiting(&self) -> bool {
        !self.victims.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Process 10 was killed at 0 ms and dead at 2 ms, and 20 and 30 had something of it.
    fn killed() -> (Reclaims, Books) {
        let mut books = Books::default();
        [10, 20, 30].iter().for_each(|pid| books.note_start(*pid, u64::from(*pid) / 10));
        let mut reclaims = Reclaims::default();
        reclaims.note_kill(10, 0);
        for process in [20, 30] {
            reclaims.note(process, &Trace { pid: 10, is_there: true, at: 0 }, &books);
        }
        books.note_kill(10);
        reclaims.note_death(10, 2 * MS);
        (reclaims, books)
    }

    fn gone(at: u64) -> Trace {
        Trace { pid: 10, is_there: false, at: at * MS }
    }

    #[test]
    fn memory_is_reclaimed_when_the_last_process_has_nothing_of_the_dead_one() {
        let (mut reclaims, books) = killed();
        reclaims.note(20, &gone(5), &books);
        reclaims.judge(&books, 3000 * MS, false);
        assert!(reclaims.is_waiting() && reclaims.times.is_empty());
        reclaims.note(30, &gone(140), &books);
        reclaims.judge(&books, 3001 * MS, false);
        assert_eq!((reclaims.times, reclaims.unmeasured), (vec![Duration::from_millis(140)], 0));
        assert_eq!(reclaims.deaths, [Duration::from_millis(2)]);
    }

    #[test]
    fn memory_that_never_comes_back_is_a_leak_that_names_both() {
        let (mut reclaims, books) = killed();
        reclaims.note(30, &gone(5), &books);
        reclaims.judge(&books, 19_999 * MS, false);
        assert!(reclaims.leaks.is_empty());
        reclaims.judge(&books, 20_001 * MS, false);
        let text = "worker 2 (process 20) still has memory of worker 1 (process 10) or for it, 20 s after its death";
        assert_eq!(reclaims.leaks, [text]);
        assert!(!reclaims.is_waiting() && reclaims.times.is_empty());
    }

    #[test]
    fn stopped_and_dead_processes_are_not_measured() {
        let (mut reclaims, mut books) = killed();
        books.note_stop(20, MS);
        books.note_continue(20, 500 * MS);
        reclaims.note(20, &gone(600), &books);
        books.note_kill(30);
        reclaims.note_death(30, 700 * MS);
        reclaims.judge(&books, 3000 * MS, false);
        assert_eq!((reclaims.times.len(), reclaims.unmeasured, reclaims.is_waiting()), (0, 1, false));
    }

    #[test]
    fn memory_that_was_released_before_the_kill_is_no_reclaim() {
        let (mut reclaims, books) = killed();
        reclaims.note_kill(11, 10 * MS);
        reclaims.note(20, &Trace { pid: 11, is_there: true, at: 5 * MS }, &books);
        reclaims.note(20, &Trace { pid: 11, is_there: false, at: 9 * MS }, &books);
        reclaims.note_death(11, 12 * MS);
        reclaims.judge(&books, 3000 * MS, false);
        assert_eq!((reclaims.times.len(), reclaims.unmeasured), (0, 1));
    }
}
