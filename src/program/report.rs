//! What the main job came to: as a table for people, as an object for programs.

use std::time::Duration;

use comfy_table::{Table, presets};
use highwater::Statistics;
use serde_json::{Value, json};

use super::digits::{LEAST_ACCURACY, Tally};

#[derive(Debug)]
pub(super) struct Report {
    pub(super) backend: String,
    /// Why that backend.
    pub(super) reason: String,
    pub(super) device: String,
    pub(super) threads: usize,
    pub(super) repeat: usize,
    pub(super) tally: Tally,
    pub(super) elapsed: Duration,
    pub(super) statistics: Statistics,
    pub(super) leaks: u64,
    /// Why something was not given back.
    pub(super) refused: Option<highwater::Error>,
}

impl Report {
    fn accuracy(&self) -> f64 {
        self.tally.correct as f64 / self.tally.images.max(1) as f64
    }

    fn images_per_second(&self) -> f64 {
        self.tally.images as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// What is wrong with the run, if anything.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.accuracy() < LEAST_ACCURACY {
            faults.push(format!("the accuracy is {:.4}, expected at least {LEAST_ACCURACY}", self.accuracy()));
        }
        if self.tally.differing > 0 {
            let Tally { images, differing, .. } = self.tally;
            faults.push(format!("{differing} of {images} predictions differ from those of the CPU"));
        }
        if let Some(error) = &self.refused {
            faults.push(format!("not everything could be given back: {error}"));
        }
        if self.leaks > 0 {
            faults.push(format!("objects still alive at the end: {}", self.leaks));
        }
        faults
    }

    pub(super) fn to_json(&self) -> Value {
        let Statistics { lt_handles, workspaces, workspace_bytes, host, .. } = self.statistics;
        json!({
            "backend": self.backend,
            "backend_reason": self.reason,
            "device": self.device,
            "processes": 1,
            "threads": self.threads,
            "repeat": self.repeat,
            "images": self.tally.images,
            "correct": self.tally.correct,
            "accuracy": self.accuracy(),
            "predictions_equal_cpu": self.tally.differing == 0,
            "seconds": self.elapsed.as_secs_f64(),
            "images_per_second": self.images_per_second(),
            "handles_created": lt_handles.created,
            "threads_served": lt_handles.threads_served,
            "workspaces": workspaces,
            "workspace_bytes": workspace_bytes,
            "pinned_requested_bytes": host.requested_bytes,
            "pinned_held_bytes": host.held_bytes,
            "weights_shared_bytes": 0,
            "leaks": self.leaks,
        })
    }

    pub(super) fn to_table(&self) -> Table {
        let Tally { images, correct, differing } = self.tally;
        let Statistics { lt_handles, workspaces, workspace_bytes, host, .. } = self.statistics;
        let agreement = match differing {
            0 => "equal to those of a plain CPU forward pass".to_owned(),
            differing => format!("{differing} differ from those of a plain CPU forward pass"),
        };
        let speed = format!("{:.0} images per second ({images} in {:.2?})", self.images_per_second(), self.elapsed);
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.add_row(["backend", &format!("{} ({})", self.backend, self.reason)]);
        table.add_row(["device", &self.device]);
        table.add_row(["accuracy", &format!("{:.4} ({correct} of {images} images)", self.accuracy())]);
        table.add_row(["predictions", &agreement]);
        table.add_row(["speed", &speed]);
        table.add_row([
            "handles",
            &format!("{} created, {} threads served", lt_handles.created, lt_handles.threads_served),
        ]);
        table.add_row(["workspaces", &format!("{workspace_bytes} bytes in {workspaces}, one for each stream")]);
        table.add_row(["pinned", &format!("{} bytes requested, {} held", host.requested_bytes, host.held_bytes)]);
        table.add_row(["leaks", &self.leaks.to_string()]);
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(correct: usize, differing: usize, leaks: u64) -> Report {
        Report {
            backend: "mock".into(),
            reason: "asked for".into(),
            device: "mock device".into(),
            threads: 4,
            repeat: 1,
            tally: Tally { images: 100, correct, differing },
            elapsed: Duration::from_millis(50),
            statistics: Statistics::default(),
            leaks,
            refused: None,
        }
    }

    #[test]
    fn each_fault_is_named() {
        assert_eq!(report(96, 0, 0).faults(), Vec::<String>::new());
        assert_eq!(report(95, 0, 0).faults(), ["the accuracy is 0.9500, expected at least 0.96"]);
        assert_eq!(report(96, 3, 0).faults(), ["3 of 100 predictions differ from those of the CPU"]);
        assert_eq!(report(96, 0, 2).faults(), ["objects still alive at the end: 2"]);
    }

    #[test]
    fn the_object_has_rates_and_counts() {
        let object = report(98, 0, 0).to_json();
        assert_eq!(object["accuracy"], 0.98);
        assert_eq!(object["images_per_second"], 2000.0);
        assert_eq!((&object["processes"], &object["weights_shared_bytes"]), (&json!(1), &json!(0)));
    }
}
