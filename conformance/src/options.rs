//! The options of a run: the cases, the number and order of rounds, and the known failures.

use crate::case::Case;
use crate::cases::cases;
use crate::peer::Launcher;
use crate::random::Random;
use crate::report::Status;

/// Selects the cases of a run, and names those that are known to fail.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// Runs the cases whose name contains this text, or that prove the clause with this id. `None` runs all.
    pub filter: Option<String>,
    /// Cases that are known to fail on this backend. A listed case that passes counts as failed, so that the list stays
    /// current.
    pub expected_failures: Vec<Expectation>,
    /// Starts a second process with the same backend. Without a launcher, the cases that need one are skipped.
    pub launcher: Option<Launcher>,
    /// Runs the cases this many times, one round after the other; 0 means 1.
    pub rounds: u32,
    /// Shuffles the cases of each round with this seed. `None` keeps the order of [`cases`].
    pub shuffle: Option<u64>,
    /// The seed from which cases draw in the first round; each further round adds 1. `None` takes [`seed`](crate::seed()).
    pub seed: Option<u64>,
}

impl Options {
    /// Creates options that run every case once, without known failures and without a second process.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the filter: a part of a case's name, or the id of a clause.
    #[must_use]
    pub fn with_filter(mut self, filter: impl Into<String>) -> Self {
        self.filter = Some(filter.into());
        self
    }

    /// Adds a case that is known to fail.
    #[must_use]
    pub fn with_expected_failure(mut self, case: impl Into<String>, reason: impl Into<String>) -> Self {
        self.expected_failures.push(Expectation { case: case.into(), reason: reason.into() });
        self
    }

    /// Sets the launcher of second processes.
    #[must_use]
    pub fn with_launcher(mut self, launcher: Launcher) -> Self {
        self.launcher = Some(launcher);
        self
    }

    /// Sets the number of rounds.
    #[must_use]
    pub fn with_rounds(mut self, rounds: u32) -> Self {
        self.rounds = rounds;
        self
    }

    /// Sets the seed of the order. Each round has another order.
    #[must_use]
    pub fn with_shuffle(mut self, seed: u64) -> Self {
        self.shuffle = Some(seed);
        self
    }

    /// Sets the seed from which cases draw shapes, values and cells.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Returns whether the filter selects this case.
    #[must_use]
    pub fn selects(&self, case: &Case) -> bool {
        self.filter.as_deref().is_none_or(|text| case.name.contains(text) || case.clauses.contains(&text))
    }

    /// Returns the cases of a round, counted from 0, in their order.
    #[must_use]
    pub fn round(&self, round: u32) -> Vec<&'static Case> {
        let mut selected: Vec<&'static Case> = cases().filter(|case| self.selects(case)).collect();
        if let Some(seed) = self.shuffle {
            // The shuffle of Fisher and Yates, from the end.
            let mut random = Random::new(seed ^ u64::from(round) << 32);
            for end in (1..selected.len()).rev() {
                selected.swap(end, random.below(end + 1));
            }
        }
        selected
    }

    fn expectation(&self, case: &Case) -> Option<&Expectation> {
        self.expected_failures.iter().find(|expectation| expectation.case == case.name)
    }

    /// Returns the status of a case after the known failures are considered.
    #[must_use]
    pub fn judge(&self, case: &Case, status: Status) -> Status {
        match (status, self.expectation(case)) {
            (Status::Failed(failure), Some(Expectation { reason, .. })) => {
                Status::ExpectedFailure { reason: reason.clone(), failure }
            }
            (Status::Passed, Some(Expectation { reason, .. })) => Status::Failed(format!(
                "passes, although the list says that it fails ({reason}); remove it from the list"
            )),
            (status, _) => status,
        }
    }
}

/// A case that is known to fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectation {
    /// The full name of the case.
    pub case: String,
    /// The reason of the failure.
    pub reason: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expected_failure_that_passes_is_a_failure() {
        let case = cases().next().unwrap();
        let (unknown, known) = (Options::new(), Options::new().with_expected_failure(case.name, "known"));
        let failed = Status::Failed("seen".to_owned());
        assert!(matches!(known.judge(case, Status::Passed), Status::Failed(_)));
        assert!(matches!(known.judge(case, failed.clone()), Status::ExpectedFailure { .. }));
        assert_eq!(unknown.judge(case, failed.clone()), failed);
        let skipped = Status::Skipped("why".to_owned());
        assert_eq!(known.judge(case, skipped.clone()), skipped);
    }

    #[test]
    fn a_filter_is_a_part_of_the_name_or_a_whole_clause() {
        let case = cases().find(|case| case.name == "streams.runs_in_order").unwrap();
        assert!(Options::new().selects(case));
        assert!(Options::new().with_filter("in_order").selects(case));
        assert!(Options::new().with_filter("stream.order").selects(case));
        assert!(!Options::new().with_filter("stream.ord").selects(case));
    }

    #[test]
    fn a_seed_decides_the_order_of_each_round() {
        let names = |options: &Options, round| options.round(round).iter().map(|case| case.name).collect::<Vec<_>>();
        let (plain, shuffled) = (Options::new(), Options::new().with_shuffle(7));
        assert_eq!(names(&plain, 0), names(&plain, 1));
        assert_eq!(names(&shuffled, 1), names(&shuffled.clone(), 1));
        assert_ne!(names(&shuffled, 0), names(&shuffled, 1));
        assert_ne!(names(&shuffled, 0), names(&Options::new().with_shuffle(8), 0));
        let mut sorted = [names(&plain, 0), names(&shuffled, 0)];
        sorted.iter_mut().for_each(|names| names.sort_unstable());
        assert_eq!(sorted[0], sorted[1], "a shuffle loses no case");
    }
}
