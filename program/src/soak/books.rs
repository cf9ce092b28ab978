//! The supervisor's records of its workers, and its judgment of their reports.
//!
//! The supervisor records each signal before it sends it. Each worker announces a drop before it makes it. So the books explain
//! every correct report of a worker.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use super::message::{Refusal, Slow, Span};

/// The record of one worker.
#[derive(Debug, Default)]
struct Life {
    number: u64,
    /// The times at which it was stopped.
    stops: Vec<Span>,
    was_killed: bool,
    /// Its sockets are cut, so it looks dead to others.
    is_cut: bool,
    /// It is releasing everything.
    is_ending: bool,
    dropped: HashSet<u64>,
}

/// The lives of all workers, by process id.
#[derive(Debug, Default)]
pub(super) struct Books {
    lives: HashMap<u32, Life>,
}

/// The name of a worker in a message.
struct Name {
    number: u64,
    pid: u32,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {} (process {})", self.number, self.pid)
    }
}

impl Books {
    pub(super) fn note_start(&mut self, pid: u32, number: u64) {
        self.lives.insert(pid, Life { number, ..Life::default() });
    }

    fn life(&mut self, pid: u32) -> &mut Life {
        self.lives.entry(pid).or_default()
    }

    pub(super) fn note_stop(&mut self, pid: u32, at: u64) {
        self.life(pid).stops.push(Span { start: at, end: u64::MAX });
    }

    pub(super) fn note_continue(&mut self, pid: u32, at: u64) {
        self.life(pid).stops.last_mut().into_iter().for_each(|stop| stop.end = stop.end.min(at));
    }

    pub(super) fn note_kill(&mut self, pid: u32) {
        self.life(pid).was_killed = true;
    }

    pub(super) fn note_cut(&mut self, pid: u32) {
        self.life(pid).is_cut = true;
    }

    pub(super) fn note_end(&mut self, pid: u32) {
        self.life(pid).is_ending = true;
    }

    pub(super) fn note_drop(&mut self, pid: u32, number: u64) {
        self.life(pid).dropped.insert(number);
    }

    /// Forgets the details of a process that ended long ago.
    pub(super) fn prune(&mut self, pid: u32) {
        self.life(pid).dropped = HashSet::new();
    }

    /// Returns whether a process answers requests: it is alive, and its sockets are not cut.
    pub(super) fn answers(&self, pid: u32) -> bool {
        self.lives.get(&pid).is_some_and(|life| !life.was_killed && !life.is_cut)
    }

    fn was_killed(&self, pid: u32) -> bool {
        self.lives.get(&pid).is_some_and(|life| life.was_killed)
    }

    /// Returns the times at which a process was stopped during a span.
    fn stops(&self, pid: u32, span: Span) -> impl Iterator<Item = Span> + '_ {
        let stops = self.lives.get(&pid).map(|life| &life.stops[..]).unwrap_or_default();
        stops.iter().filter_map(move |stop| {
            let (start, end) = (stop.start.max(span.start), stop.end.min(span.end));
            (start <= end).then_some(Span { start, end })
        })
    }

    pub(super) fn was_stopped(&self, pid: u32, span: Span) -> bool {
        self.stops(pid, span).next().is_some()
    }

    pub(super) fn name(&self, pid: u32) -> impl fmt::Display + use<> {
        Name { number: self.lives.get(&pid).map(|life| life.number).unwrap_or_default(), pid }
    }

    /// Returns the time that a call took while its own process ran, and whether the process that it concerns was stopped meanwhile.
    pub(super) fn time(&self, pid: u32, slow: &Slow) -> (Duration, bool) {
        let own: u64 = self.stops(pid, slow.span).map(|stop| stop.end - stop.start).sum();
        let took = (slow.span.end - slow.span.start).saturating_sub(own);
        (Duration::from_nanos(took), slow.peer.is_some_and(|peer| self.was_stopped(peer, slow.span)))
    }

    /// Returns the fault of a call that took longer than its limit.
    pub(super) fn late(&self, pid: u32, slow: &Slow) -> Option<String> {
        let (took, _) = self.time(pid, slow);
        let stops = slow.peer.map_or(0, |peer| self.stops(peer, slow.span).count());
        let limit = slow.operation.limit(u32::try_from(stops).unwrap_or(u32::MAX));
        (took > limit).then(|| {
            let peer = slow.peer.map(|peer| match stops {
                0 if self.was_killed(peer) => {
                    format!(" and {} was not stopped meanwhile, and was killed before or after", self.name(peer))
                }
                0 => format!(" and {} was not stopped meanwhile", self.name(peer)),
                _ => format!(" and {} was stopped meanwhile", self.name(peer)),
            });
            format!(
                "{}: `{}` took {} ms{}; expected at most {} ms",
                self.name(pid),
                slow.operation.name(),
                took.as_millis(),
                peer.unwrap_or_default(),
                limit.as_millis()
            )
        })
    }

    /// Returns the fault of a refusal that nothing explains. The caller must have noted all messages that the owner sent before the
    /// refusal.
    pub(super) fn unjustified(&self, pid: u32, refusal: &Refusal) -> Option<String> {
        let Refusal { owner, number, span, kind, message } = refusal;
        let life = self.lives.get(owner);
        let is_justified = match kind.as_str() {
            "Expired" => life
                .is_none_or(|life| life.was_killed || life.is_cut || life.is_ending || life.dropped.contains(number)),
            "InvalidState" => self.was_stopped(*owner, *span),
            _ => false,
        };
        (!is_justified).then(|| {
            let state = match kind.as_str() {
                "Expired" => "lives and keeps the memory",
                // The driver may end a killed process late.
                "InvalidState" if self.was_killed(*owner) => "was not stopped meanwhile, and was killed before or after",
                "InvalidState" => "was not stopped meanwhile",
                _ => "shares it",
            };
            let (worker, owner) = (self.name(pid), self.name(*owner));
            format!("{worker}: an open of memory {number} was refused ({kind}: {message}); expected it to open: {owner} {state}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::operation::Operation;
    use super::*;

    const MS: u64 = 1_000_000;

    /// Worker 3 is process 30, and worker 4 is process 40, which was stopped from 1,000 ms to 4,000 ms.
    fn books() -> Books {
        let mut books = Books::default();
        books.note_start(30, 3);
        books.note_start(40, 4);
        books.note_stop(40, 1000 * MS);
        books.note_continue(40, 4000 * MS);
        books
    }

    fn call(operation: Operation, peer: Option<u32>, start: u64, end: u64) -> Slow {
        Slow { operation, peer, span: Span { start: start * MS, end: end * MS } }
    }

    #[test]
    fn a_call_that_takes_longer_than_its_limit_is_a_fault_and_names_worker_and_limit() {
        let books = books();
        let late = |operation, peer, start, end| books.late(30, &call(operation, peer, start, end));
        assert_eq!(late(Operation::Share, None, 0, 999), None);
        let text = "worker 3 (process 30): `share` took 1001 ms; expected at most 1000 ms";
        assert_eq!(late(Operation::Share, None, 0, 1001).unwrap(), text);
        // An open of a stopped process has another second for each stop, and no other open has.
        assert_eq!(late(Operation::Open, Some(40), 500, 2400), None);
        let text = "worker 3 (process 30): `open` took 2100 ms and worker 4 (process 40) was stopped meanwhile; expected at most \
                    2000 ms";
        assert_eq!(late(Operation::Open, Some(40), 500, 2600).unwrap(), text);
        let before = late(Operation::Open, Some(40), 4001, 5500).unwrap();
        assert!(before.contains("was not stopped meanwhile; expected at most 1000 ms"), "{before}");
    }

    #[test]
    fn a_stop_that_delays_a_call_of_another_process_is_a_fault() {
        // Worker 3 drops memory while worker 4 is stopped, and the call returns when worker 4 continues.
        let books = books();
        assert!(books.late(30, &call(Operation::Drop, None, 1100, 4001)).unwrap().contains("`drop` took 2901 ms"));
        assert!(books.late(30, &call(Operation::Release, Some(40), 1100, 4001)).is_some());
        // The time for which worker 4 itself stood still does not count.
        assert_eq!(books.late(40, &call(Operation::Drop, None, 900, 4500)), None);
        assert!(books.late(40, &call(Operation::Drop, None, 900, 5100)).is_some());
    }

    #[test]
    fn a_process_that_is_still_stopped_counts_until_now() {
        let mut books = books();
        books.note_stop(40, 9000 * MS);
        let slow = call(Operation::Open, Some(40), 8900, 10_500);
        assert_eq!(books.late(30, &slow), None);
        assert_eq!(books.time(30, &slow), (Duration::from_millis(1600), true));
        assert_eq!(books.time(40, &slow), (Duration::from_millis(100), true));
        assert!(!books.was_stopped(40, Span { start: 4001 * MS, end: 8999 * MS }));
    }

    #[test]
    fn a_refusal_needs_a_reason() {
        let mut books = books();
        let refusal = |kind: &str, start, end| Refusal {
            owner: 40,
            number: 7,
            span: Span { start: start * MS, end: end * MS },
            kind: kind.into(),
            message: "gone".into(),
        };
        let early = books.unjustified(30, &refusal("Expired", 0, 1)).unwrap();
        assert!(
            early.contains("worker 3 (process 30)") && early.contains("worker 4 (process 40) lives and keeps"),
            "{early}"
        );
        assert!(books.unjustified(30, &refusal("InvalidState", 5000, 6000)).unwrap().contains("was not stopped"));
        assert_eq!(books.unjustified(30, &refusal("InvalidState", 500, 1600)), None);
        books.note_drop(40, 8);
        assert!(books.unjustified(30, &refusal("Expired", 0, 1)).is_some());
        books.note_drop(40, 7);
        assert_eq!(books.unjustified(30, &refusal("Expired", 0, 1)), None);
        // Nothing explains another kind, and a kill explains no wait.
        books.note_kill(40);
        let text = books.unjustified(30, &refusal("InvalidState", 5000, 6000)).unwrap();
        assert!(
            text.ends_with("worker 4 (process 40) was not stopped meanwhile, and was killed before or after"),
            "{text}"
        );
        let text = books.late(30, &call(Operation::Open, Some(40), 5000, 8000)).unwrap();
        assert!(
            text.contains("worker 4 (process 40) was not stopped meanwhile, and was killed before or after"),
            "{text}"
        );
        assert!(books.unjustified(30, &refusal("OutOfMemory", 0, 1)).is_some());
    }
}
