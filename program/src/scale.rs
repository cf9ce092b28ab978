//! `highwater --scale`: the speed of the main job with 1, 2 and 4 workers.

use serde_json::{Value, json};

use super::report::{Outcome, Place};
use super::service::Service;
use super::table::Table;

/// The measured numbers of workers. The others are compared with the first.
pub(super) const WORKERS: [usize; 3] = [1, 2, 4];

/// Passes over the test set. One pass is too short to measure.
pub(super) const PASSES: usize = 100;

/// The result of each number of workers.
#[derive(Debug)]
pub(super) struct Scale<'a> {
    pub(super) place: &'a Place,
    pub(super) service: &'a Service,
    pub(super) threads: usize,
    pub(super) repeat: usize,
    pub(super) runs: Vec<(usize, Outcome)>,
}

impl Scale<'_> {
    /// Returns the speed of a run as a ratio to the first.
    fn ratio(&self, run: &Outcome) -> f64 {
        run.images_per_second() / self.runs[0].1.images_per_second()
    }

    pub(super) fn faults(&self) -> Vec<String> {
        let faults = |(workers, run): &(usize, Outcome)| {
            let workers = highwater::hal::counted(*workers, "worker");
            run.faults().into_iter().map(move |fault| format!("with {workers}, {fault}")).collect::<Vec<_>>()
        };
        self.runs.iter().flat_map(faults).collect()
    }

    pub(super) fn to_json(&self) -> Value {
        let run = |(workers, run): &(usize, Outcome)| {
            json!({
                "workers": workers,
                "processes": 1 + workers,
                "threads": workers * self.threads,
                "images": run.tally.images,
                "correct": run.tally.correct,
                "seconds": run.elapsed.as_secs_f64(),
                "images_per_second": run.images_per_second(),
                "ratio": self.ratio(run),
                "devices": run.devices_as_json(),
                "weights_shared_bytes": run.holdings.mapped_bytes,
                "leaks": run.leaks,
            })
        };
        json!({
            "backend": self.place.backend,
            "backend_reason": self.place.reason,
            "device": self.place.device,
            "mps": self.service.to_json(),
            "repeat": self.repeat,
            "scale": self.runs.iter().map(run).collect::<Value>(),
        })
    }

    pub(super) fn to_table(&self) -> Table {
        let mut table = Table::of_numbers(["workers", "devices", "threads", "images per second", "ratio to 1 worker"]);
        for (workers, run) in &self.runs {
            table.add_row([
                workers.to_string(),
                run.devices.len().to_string(),
                (workers * self.threads).to_string(),
                format!("{:.0}", run.images_per_second()),
                format!("{:.2}", self.ratio(run)),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::task::Tally;
    use super::*;

    #[test]
    fn ratios_are_to_the_first_run() {
        let place = Place { backend: "mock".into(), reason: "asked for".into(), device: "mock device".into() };
        let run = |images| Outcome {
            tally: Tally { images, correct: images, differing: 0 },
            elapsed: Duration::from_secs(1),
            ..Outcome::default()
        };
        let scale = Scale {
            place: &place,
            service: &Service::for_tests(),
            threads: 2,
            repeat: 3,
            runs: vec![(1, run(1000)), (4, run(3500))],
        };
        let object = scale.to_json();
        assert_eq!((&object["scale"][0]["ratio"], &object["scale"][1]["ratio"]), (&json!(1.0), &json!(3.5)));
        assert_eq!(object["scale"][1]["threads"], 8);
        let table = scale.to_table().to_text(None);
        assert!(table.contains("3500") && table.contains("3.50"), "{table}");
        assert_eq!(scale.faults(), Vec::<String>::new());
    }
}
