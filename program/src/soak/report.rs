//! The result of `highwater soak ipc`.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::table::Table;

/// The most reasons of one kind that are listed. More are only counted.
const MOST_REASONS: usize = 20;

#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) seed: u64,
    pub(super) kills: u64,
    pub(super) opens: u64,
    pub(super) releases: u64,
    /// Tickets that were refused because their buffer was freed.
    pub(super) expired_tickets: u64,
    /// Buffers that the exporter allocated and shared.
    pub(super) shared: u64,
    /// Checks of the contents of a buffer, by all processes.
    pub(super) checks: u64,
    /// Words that other processes changed, as the exporter saw.
    pub(super) words_changed: u64,
    /// Killed consumers that left a child, and the descriptors of those children.
    pub(super) killed_after_fork: u64,
    pub(super) inherited_descriptors: u64,
    /// Those of the children that still lived when all memory was freed.
    pub(super) heirs_at_the_end: u64,
    /// Killed consumers that had cut their sockets and continued to write, and the number of those sockets.
    pub(super) killed_after_cut: u64,
    pub(super) cut_sockets: u64,
    /// Killed consumers with queued work.
    pub(super) killed_with_work: u64,
    pub(super) limbo_peak_bytes: u64,
    pub(super) leaked_bytes: u64,
    /// Objects that the backend counts as alive at the end.
    pub(super) leaked_objects: u64,
    /// Contents that were not the buffer's own.
    pub(super) early_frees: Reasons,
    /// Failures of calls that must not fail.
    pub(super) unexpected: Reasons,
    pub(super) processes_left: u64,
    pub(super) descriptors_left: u64,
    pub(super) shared_files_left: u64,
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

impl Report {
    /// Returns the faults of the run.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let counts = [
            ("bytes leaked", self.leaked_bytes),
            ("objects still alive at the end", self.leaked_objects),
            ("early frees", self.early_frees.count),
            ("unexpected failures", self.unexpected.count),
            ("processes left", self.processes_left),
            ("descriptors left", self.descriptors_left),
            ("shared files left", self.shared_files_left),
        ];
        faults.extend(counts.iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{what}: {count}")));
        faults.extend(self.early_frees.texts.iter().map(|reason| format!("early free: {reason}")));
        faults.extend(self.unexpected.texts.iter().map(|reason| format!("unexpected: {reason}")));
        faults
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "seed": self.seed,
            "kills": self.kills,
            "killed_after_fork": self.killed_after_fork,
            "killed_with_work": self.killed_with_work,
            "killed_after_cut": self.killed_after_cut,
            "cut_sockets": self.cut_sockets,
            "inherited_descriptors": self.inherited_descriptors,
            "heirs_at_the_end": self.heirs_at_the_end,
            "shared": self.shared,
            "opens": self.opens,
            "releases": self.releases,
            "expired_tickets": self.expired_tickets,
            "checks": self.checks,
            "words_changed": self.words_changed,
            "limbo_peak_bytes": self.limbo_peak_bytes,
            "leaked_bytes": self.leaked_bytes,
            "leaked_objects": self.leaked_objects,
            "early_frees": self.early_frees.count,
            "unexpected": self.unexpected.count,
            "processes_left": self.processes_left,
            "descriptors_left": self.descriptors_left,
            "shared_files_left": self.shared_files_left,
            "seconds": self.elapsed.as_secs_f64(),
        })
    }

    pub(super) fn to_table(&self) -> Table {
        let Self { kills, killed_after_fork, killed_after_cut, killed_with_work, inherited_descriptors, .. } = self;
        let Self { shared, opens, releases, expired_tickets, checks, words_changed, .. } = self;
        let Self { processes_left, descriptors_left, shared_files_left, .. } = self;
        let mut table = Table::default();
        let killed = format!(
            "{kills} in {:.1} s; {killed_with_work} with work queued, {killed_after_fork} after a fork (the children held \
             {inherited_descriptors} descriptors), {killed_after_cut} after they had cut their sockets",
            self.elapsed.as_secs_f64()
        );
        table.add_row(["kills", &killed]);
        table.add_row([
            "buffers",
            &format!("{shared} shared, {opens} opens, {releases} releases, {expired_tickets} expired tickets"),
        ]);
        table.add_row(["contents", &format!("{checks} checks, {words_changed} words changed by others")]);
        table.add_row(["limbo", &format!("{} bytes at most", self.limbo_peak_bytes)]);
        table.add_row(["early frees", &self.early_frees.count.to_string()]);
        table.add_row(["leaked", &format!("{} bytes, {} objects", self.leaked_bytes, self.leaked_objects)]);
        table.add_row([
            "left",
            &format!("{processes_left} processes, {descriptors_left} descriptors, {shared_files_left} shared files"),
        ]);
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anything_left_or_early_is_a_fault() {
        assert_eq!(Report::default().faults(), Vec::<String>::new());
        let one = |change: fn(&mut Report)| {
            let mut report = Report { kills: 3, limbo_peak_bytes: 1024, ..Report::default() };
            change(&mut report);
            report.faults()
        };
        assert_eq!(one(|report| report.leaked_bytes = 4096), ["bytes leaked: 4096"]);
        assert_eq!(one(|report| report.processes_left = 1), ["processes left: 1"]);
        let early = one(|report| (0..3).for_each(|word| report.early_frees.add(format!("word {}", word / 2))));
        assert_eq!(early, ["early frees: 3", "early free: word 0", "early free: word 1"]);
    }
}
