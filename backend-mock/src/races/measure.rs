//! A measurement: how many of the seeded mistakes the finder finds.

use highwater_hal::Result;

use super::examples::{ALL, Bench, Example};
use super::report::Race;

/// The result of [`measure`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Measured {
    /// The number of mistakes.
    pub seeded: usize,
    /// The number of mistakes that were found: a report names the two operations that the mistake leaves unordered.
    pub found: usize,
    /// The number of other reports, for the mistakes and for their corrections.
    pub false_reports: usize,
    /// The result of each mistake.
    pub details: Vec<Detail>,
}

/// The result of one mistake.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Detail {
    /// The mistake.
    pub example: Example,
    /// The reports of the mistake.
    pub races: Vec<Race>,
    /// The reports of the correction: none, if the finder is right.
    pub races_when_corrected: Vec<Race>,
}

impl Detail {
    fn is_seeded(&self, race: &Race) -> bool {
        [race.first().operation(), race.second().operation()] == self.example.operations
    }

    /// Returns whether the mistake was found.
    #[must_use]
    pub fn is_found(&self) -> bool {
        self.races.iter().any(|race| self.is_seeded(race))
    }

    /// Returns the number of other reports.
    #[must_use]
    pub fn false_reports(&self) -> usize {
        let others = self.races.iter().filter(|race| !self.is_seeded(race)).count();
        others + self.races_when_corrected.len()
    }
}

/// Runs every mistake of [`examples`](super::examples) and its correction, each on a mock of its own with the schedule
/// of `seed`. The result depends on no schedule. Takes some milliseconds.
///
/// ```
/// let measured = highwater_mock::races::measure(1)?;
/// assert_eq!((measured.seeded, measured.found, measured.false_reports), (26, 26, 0));
/// # Ok::<(), highwater_hal::Error>(())
/// ```
///
/// # Errors
/// An error of a mock that cannot be opened, or that refuses a call of a mistake.
pub fn measure(seed: u64) -> Result<Measured> {
    let run = |program: fn(&Bench) -> Result<()>| -> Result<Vec<Race>> {
        let bench = Bench::new(seed)?;
        program(&bench)?;
        Ok(bench.gpu.races())
    };
    let detail = |&example: &Example| -> Result<Detail> {
        Ok(Detail { example, races: run(example.mistake)?, races_when_corrected: run(example.corrected)? })
    };
    let details: Vec<Detail> = ALL.iter().map(detail).collect::<Result<_>>()?;
    Ok(Measured {
        seeded: details.len(),
        found: details.iter().filter(|detail| detail.is_found()).count(),
        false_reports: details.iter().map(Detail::false_reports).sum(),
        details,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mistake_is_found_and_no_correction_is_blamed_under_any_schedule() {
        for seed in 0..32 {
            let measured = measure(seed).unwrap();
            let missed: Vec<_> = measured.details.iter().filter(|detail| !detail.is_found()).collect();
            assert!(missed.is_empty(), "seed {seed}: {missed:?}");
            let blamed: Vec<_> = measured.details.iter().flat_map(|detail| &detail.races_when_corrected).collect();
            assert!(blamed.is_empty(), "seed {seed}: {blamed:?}");
            assert_eq!((measured.seeded, measured.found, measured.false_reports), (26, 26, 0), "seed {seed}");
        }
    }

    #[test]
    fn a_report_names_both_calls_in_the_program() {
        let measured = measure(0).unwrap();
        for Detail { example, races, .. } in &measured.details {
            let text = races[0].to_string();
            for place in [races[0].first(), races[0].second()] {
                assert!(text.contains(&format!("`{}` (call {})", place.operation(), place.call())), "{text}");
                // The test programs are built with line tables.
                let location = place.location().unwrap_or_default();
                assert!(location.contains("races/examples/"), "{}: `{location}` in {text}", example.name);
                assert!(text.contains(&location), "{text}");
            }
        }
    }
}
