//! The result of `highwater soak ipc`.

use std::collections::BTreeSet;
use std::time::Duration;

use highwater::hal::counted;
use serde_json::{Map, Value, json};

use super::super::table::Table;
use super::operation::Operation;

/// The bar: within this time, the memory of 99 killed processes in 100 is free again.
pub(super) const BAR: Duration = Duration::from_millis(100);
/// The number of kills from which the bar applies.
const FEWEST_FOR_BAR: usize = 100;
/// The most reasons of one kind that are listed. More are only counted.
const MOST_REASONS: usize = 20;

/// The longest calls of an operation.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Longest {
    /// Of calls during which the process that they concern was not stopped.
    pub(super) prompt: Duration,
    /// Of the others.
    pub(super) stopped: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) seed: u64,
    pub(super) backend: String,
    pub(super) is_real: bool,
    pub(super) processes: usize,
    pub(super) kills: u64,
    /// Kills of workers that were stopped, that had left a child, and that had cut their sockets.
    pub(super) killed_while_stopped: u64,
    pub(super) killed_after_fork: u64,
    pub(super) killed_after_cut: u64,
    /// The descriptors of all children of workers, also of those that were not killed.
    pub(super) inherited_descriptors: u64,
    pub(super) stops: u64,
    /// The longest stop that was ended.
    pub(super) longest_stop: Duration,
    /// Numbers of operations, in the order of `Operation::ALL`.
    pub(super) counts: Vec<u64>,
    /// The longest calls, in the same order. Calls of less than 20 ms are not reported.
    pub(super) longest: Vec<Longest>,
    /// Opens that were refused because the memory was dropped or its owner dead, and because the owner was stopped.
    pub(super) expired: u64,
    pub(super) refused_while_stopped: u64,
    /// Words that other processes changed.
    pub(super) words_changed: u64,
    /// Memory that was revoked because its owner died.
    pub(super) revoked: u64,
    /// Deaths that the worker that is never killed has seen.
    pub(super) deaths_seen: u64,
    /// The times from the kills until no process had anything of the dead one, and the part of them until the process was dead.
    pub(super) reclaims: Vec<Duration>,
    pub(super) deaths: Vec<Duration>,
    /// Kills of workers of which no observed worker had anything.
    pub(super) unmeasured: u64,
    pub(super) leaked_bytes: u64,
    pub(super) leaked_objects: u64,
    /// Memory of dead processes, or for them, that others did not give up.
    pub(super) leaks: Reasons,
    /// Contents that were not the memory's own.
    pub(super) early_frees: Reasons,
    /// Calls that took longer than their limit.
    pub(super) late: Reasons,
    /// Failures of calls that must not fail.
    pub(super) unexpected: Reasons,
    pub(super) processes_left: u64,
    pub(super) descriptors_left: u64,
    pub(super) files_left: u64,
    pub(super) elapsed: Duration,
}

/// A count of faults, and the texts of the first ones.
#[derive(Debug, Default)]
pub(super) struct Reasons {
    count: u64,
    texts: BTreeSet<String>,
}

impl Reasons {
    pub(super) fn add(&mut self, reason: String) {
        self.count += 1;
        if self.texts.len() < MOST_REASONS {
            self.texts.insert(reason);
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn texts(&self) -> impl Iterator<Item = &String> {
        self.texts.iter()
    }
}

/// Returns a quantile of times, in milliseconds.
pub(super) fn quantile(times: &[Duration], part: f64) -> Option<f64> {
    let mut times = times.to_vec();
    times.sort_unstable();
    let at = ((part * times.len() as f64) as usize).min(times.len().checked_sub(1)?);
    Some(times[at].as_secs_f64() * 1e3)
}

pub(super) fn times_to_json(times: &[Duration]) -> Value {
    json!({"p50": quantile(times, 0.5), "p99": quantile(times, 0.99), "max": quantile(times, 1.0)})
}

pub(super) fn times_to_text(times: &[Duration]) -> String {
    let of = |part| quantile(times, part).map_or_else(|| "-".to_owned(), |time| format!("{time:.2} ms"));
    format!("p50 {}, p99 {}, at most {}", of(0.5), of(0.99), of(1.0))
}

/// Returns whether 99 of 100 times are within a bar. `None` for too few times.
pub(super) fn is_bar_met(times: &[Duration], bar: Duration) -> Option<bool> {
    let p99 = quantile(times, 0.99).filter(|_| times.len() >= FEWEST_FOR_BAR);
    p99.map(|p99| p99 <= bar.as_secs_f64() * 1e3)
}

impl Report {
    pub(super) fn new(seed: u64, processes: usize) -> Self {
        let (counts, longest) = (vec![0; Operation::ALL.len()], vec![Longest::default(); Operation::ALL.len()]);
        Self { seed, processes, counts, longest, ..Self::default() }
    }

    fn count(&self, operation: Operation) -> u64 {
        self.counts.get(operation.index()).copied().unwrap_or_default()
    }

    /// Returns the longest calls of all operations.
    fn longest(&self) -> Longest {
        let most = |of: fn(&Longest) -> Duration| self.longest.iter().map(of).max().unwrap_or_default();
        Longest { prompt: most(|longest| longest.prompt), stopped: most(|longest| longest.stopped) }
    }

    /// Returns the faults of the run.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let counts = [
            ("bytes leaked", self.leaked_bytes),
            ("objects still alive at the end", self.leaked_objects),
            ("leaks", self.leaks.count),
            ("early frees", self.early_frees.count),
            ("calls over their limit", self.late.count),
            ("unexpected failures", self.unexpected.count),
            ("processes left", self.processes_left),
            ("descriptors left", self.descriptors_left),
            ("files left", self.files_left),
        ];
        let found = counts.iter().filter(|(_, count)| *count > 0);
        faults.extend(found.map(|(what, count)| format!("{what}: {count}, expected 0 (seed {})", self.seed)));
        let kinds = [
            ("leak", &self.leaks),
            ("early free", &self.early_frees),
            ("late", &self.late),
            ("unexpected", &self.unexpected),
        ];
        for (kind, reasons) in kinds {
            faults.extend(reasons.texts.iter().map(|reason| format!("{kind}: {reason}")));
        }
        if is_bar_met(&self.reclaims, BAR) == Some(false) {
            faults.push(format!(
                "late reclaim: {}; expected p99 up to {} ms (seed {})",
                times_to_text(&self.reclaims),
                BAR.as_millis(),
                self.seed
            ));
        }
        faults
    }

    pub(super) fn to_json(&self) -> Value {
        let of = |value: fn(&Self, usize) -> Value| -> Map<String, Value> {
            let names = Operation::ALL.iter().enumerate();
            names.map(|(index, (_, name, _))| ((*name).to_owned(), value(self, index))).collect()
        };
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let longest = self.longest();
        json!({
            "seed": self.seed,
            "backend": self.backend,
            "real_device": self.is_real,
            "processes": self.processes,
            "kills": self.kills,
            "killed_while_stopped": self.killed_while_stopped,
            "killed_after_fork": self.killed_after_fork,
            "killed_after_cut": self.killed_after_cut,
            "inherited_descriptors": self.inherited_descriptors,
            "stops": self.stops,
            "longest_stop_ms": milliseconds(self.longest_stop),
            "operations": of(|report, index| json!(report.counts[index])),
            "expired": self.expired,
            "refused_while_stopped": self.refused_while_stopped,
            "words_changed": self.words_changed,
            "revoked": self.revoked,
            "deaths_seen": self.deaths_seen,
            "longest_ms": milliseconds(longest.prompt),
            "longest_with_stopped_ms": milliseconds(longest.stopped),
            "longest_by_operation_ms": of(|report, index| json!(report.longest[index].prompt.as_secs_f64() * 1e3)),
            "reclaims": self.reclaims.len(),
            "unmeasured": self.unmeasured,
            "death_ms": times_to_json(&self.deaths),
            "reclaim_ms": times_to_json(&self.reclaims),
            "bar_met": is_bar_met(&self.reclaims, BAR),
            "leaked_bytes": self.leaked_bytes,
            "leaked_objects": self.leaked_objects,
            "leaks": self.leaks.count,
            "early_frees": self.early_frees.count,
            "late_calls": self.late.count,
            "unexpected": self.unexpected.count,
            "processes_left": self.processes_left,
            "descriptors_left": self.descriptors_left,
            "files_left": self.files_left,
            "seconds": self.elapsed.as_secs_f64(),
        })
    }

    pub(super) fn to_table(&self) -> Table {
        let Self { kills, killed_while_stopped, killed_after_fork, killed_after_cut, inherited_descriptors, .. } = self;
        let Self { processes_left, descriptors_left, files_left, processes, .. } = self;
        let mut table = Table::default();
        table.add_row([
            "kills",
            &format!(
                "{kills} of {} in {:.1} s; {killed_while_stopped} while stopped, {killed_after_fork} after a \
                 fork, {killed_after_cut} after they had cut their sockets; children of workers held {}",
                counted(*processes, "process"),
                self.elapsed.as_secs_f64(),
                counted(*inherited_descriptors, "descriptor")
            ),
        ]);
        table.add_row(["stops", &format!("{}, at most {:.2} s", self.stops, self.longest_stop.as_secs_f64())]);
        let count = |operation| self.count(operation);
        table.add_row([
            "shared",
            &format!(
                "{}, {} adopted, {}, {} page-locked; {} dropped; {}",
                counted(count(Operation::Share), "buffer"),
                count(Operation::Adopt),
                counted(count(Operation::ShareAll), "batch"),
                count(Operation::SharePinned),
                count(Operation::Drop),
                counted(count(Operation::HandOver), "hand-over")
            ),
        ]);
        table.add_row([
            "opened",
            &format!(
                "{}; {} released, {} revoked by a death; refused: {} expired, {} of a stopped process",
                count(Operation::Open),
                count(Operation::Release),
                self.revoked,
                self.expired,
                self.refused_while_stopped
            ),
        ]);
        table.add_row([
            "contents",
            &format!(
                "{}, {} changed by others",
                counted(count(Operation::Check), "check"),
                counted(self.words_changed, "word")
            ),
        ]);
        let longest = self.longest();
        let longest_of = |time: Duration| match time {
            Duration::ZERO => "under 20 ms".to_owned(),
            time => format!("{} ms", time.as_millis()),
        };
        table.add_row([
            "longest call",
            &format!(
                "{}; of a process that was stopped meanwhile {}; {} over their limit",
                longest_of(longest.prompt),
                longest_of(longest.stopped),
                self.late.count
            ),
        ]);
        table.add_row(["kill to death", &times_to_text(&self.deaths)]);
        table.add_row([
            "kill to reclaim",
            &format!("{} ({} measured, {} not)", times_to_text(&self.reclaims), self.reclaims.len(), self.unmeasured),
        ]);
        table.add_row(["early frees", &self.early_frees.count.to_string()]);
        table.add_row([
            "leaked",
            &format!(
                "{}, {}; the process that was never killed has seen {}",
                counted(self.leaked_bytes, "byte"),
                counted(self.leaked_objects, "object"),
                counted(self.deaths_seen, "death")
            ),
        ]);
        table.add_row([
            "left",
            &format!(
                "{}, {}, {}",
                counted(*processes_left, "process"),
                counted(*descriptors_left, "descriptor"),
                counted(*files_left, "file")
            ),
        ]);
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(change: impl FnOnce(&mut Report)) -> Vec<String> {
        let mut report = Report { kills: 3, ..Report::new(7, 8) };
        change(&mut report);
        report.faults()
    }

    #[test]
    fn anything_leaked_late_early_or_left_is_a_fault_with_the_seed() {
        assert_eq!(one(|_| ()), Vec::<String>::new());
        assert_eq!(one(|report| report.leaked_bytes = 4096), ["bytes leaked: 4096, expected 0 (seed 7)"]);
        assert_eq!(one(|report| report.processes_left = 1), ["processes left: 1, expected 0 (seed 7)"]);
        assert_eq!(one(|report| report.files_left = 2), ["files left: 2, expected 0 (seed 7)"]);
        let early = one(|report| (0..3).for_each(|word| report.early_frees.add(format!("word {}", word / 2))));
        assert_eq!(early, ["early frees: 3, expected 0 (seed 7)", "early free: word 0", "early free: word 1"]);
        let late = one(|report| report.late.add("worker 3".into()));
        assert_eq!(late, ["calls over their limit: 1, expected 0 (seed 7)", "late: worker 3"]);
        assert_eq!(one(|report| report.leaks.add("worker 2".into())).last().unwrap(), "leak: worker 2");
    }

    #[test]
    fn one_late_reclaim_in_a_hundred_is_permitted_and_two_are_a_fault() {
        let late = |count: usize, late: usize| {
            one(|report| {
                report.reclaims = vec![Duration::from_millis(3); count];
                report.reclaims[..late].fill(Duration::from_millis(101));
            })
        };
        assert_eq!((late(1000, 9).len(), late(99, 99).len()), (0, 0));
        let fault = late(1000, 11);
        assert!(
            fault[0].starts_with("late reclaim: p50 3.00 ms, p99 101.00 ms") && fault[0].contains("seed 7"),
            "{fault:?}"
        );
    }
}
