//! The result of the main job, as a table for people and as an object for programs.

use std::collections::BTreeSet;
use std::ops::AddAssign;
use std::time::Duration;

use highwater::Statistics;
use highwater::hal::{counted, display_foreign};
use serde_json::{Value, json};

use super::frame::fields;
use super::service::Service;
use super::table::Table;
use super::task::Tally;

/// The lowest accuracy of a good run.
const LEAST_ACCURACY: f64 = 0.96;

/// Statistics of the pools, summed over processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    pub(super) handles_created: u64,
    pub(super) threads_served: u64,
    pub(super) workspaces: u64,
    pub(super) workspace_bytes: u64,
    pub(super) pinned_requested_bytes: u64,
    pub(super) pinned_held_bytes: u64,
    /// Mapped memory of another process.
    pub(super) mapped_bytes: u64,
}

impl Holdings {
    fn numbers(&mut self) -> [&mut u64; 7] {
        [
            &mut self.handles_created,
            &mut self.threads_served,
            &mut self.workspaces,
            &mut self.workspace_bytes,
            &mut self.pinned_requested_bytes,
            &mut self.pinned_held_bytes,
            &mut self.mapped_bytes,
        ]
    }
}

fields!(Holdings {
    handles_created,
    threads_served,
    workspaces,
    workspace_bytes,
    pinned_requested_bytes,
    pinned_held_bytes,
    mapped_bytes,
});

impl From<Statistics> for Holdings {
    fn from(statistics: Statistics) -> Self {
        let Statistics { lt_handles, blas_handles, workspaces, workspace_bytes, host, sharing, .. } = statistics;
        Self {
            handles_created: lt_handles.created + blas_handles.created,
            threads_served: lt_handles.threads_served + blas_handles.threads_served,
            workspaces,
            workspace_bytes,
            pinned_requested_bytes: host.requested_bytes,
            pinned_held_bytes: host.held_bytes,
            mapped_bytes: sharing.mapped_bytes,
        }
    }
}

impl AddAssign for Holdings {
    fn add_assign(&mut self, mut other: Self) {
        for (sum, number) in self.numbers().into_iter().zip(other.numbers()) {
            // The numbers come from other processes, so no size is assumed.
            *sum = sum.saturating_add(*number);
        }
    }
}

/// The use of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceUse {
    /// Ordinal in the process that owns the weights.
    pub(super) ordinal: u32,
    pub(super) name: String,
    /// 0 if the owner of the weights did all work itself.
    pub(super) workers: usize,
    /// Images that were classified on it.
    pub(super) images: u64,
}

impl DeviceUse {
    fn to_json(&self) -> Value {
        let Self { ordinal, name, workers, images } = self;
        json!({ "ordinal": ordinal, "name": name, "workers": workers, "images": images })
    }

    fn to_line(&self) -> String {
        let Self { ordinal, name, workers, images } = self;
        format!("{ordinal}: {}, {}, {}", display_foreign(name), counted(*workers, "worker"), counted(*images, "image"))
    }
}

/// The result of a run, over all of its processes.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) tally: Tally,
    pub(super) devices: Vec<DeviceUse>,
    /// The transports of the weights; empty without workers. Devices of one kind have the same.
    pub(super) transports: BTreeSet<&'static str>,
    /// The time from the moment that all threads are ready to the last answer.
    pub(super) elapsed: Duration,
    /// The statistics of the pools while every thread still had its buffers.
    pub(super) holdings: Holdings,
    /// The objects that the backends count as alive after everything was freed.
    pub(super) leaks: u64,
    /// The errors of releases that failed.
    pub(super) refused: Vec<String>,
}

impl Outcome {
    fn accuracy(&self) -> f64 {
        self.tally.correct as f64 / self.tally.images.max(1) as f64
    }

    pub(super) fn images_per_second(&self) -> f64 {
        self.tally.images as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    pub(super) fn devices_as_json(&self) -> Value {
        self.devices.iter().map(DeviceUse::to_json).collect()
    }

    /// Returns the names of the transports.
    fn transport(&self) -> Option<String> {
        (!self.transports.is_empty()).then(|| self.transports.iter().copied().collect::<Vec<_>>().join(", "))
    }

    /// Returns the faults of the run.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.accuracy() < LEAST_ACCURACY {
            faults.push(format!("the accuracy is {:.4}, expected at least {LEAST_ACCURACY}", self.accuracy()));
        }
        if self.tally.differing > 0 {
            let Tally { images, differing, .. } = self.tally;
            faults.push(format!("{differing} of {images} predictions differ from those of the CPU"));
        }
        faults.extend(self.refused.iter().map(|reason| format!("not everything could be given back: {reason}")));
        if self.leaks > 0 {
            faults.push(format!("objects still alive at the end: {}", self.leaks));
        }
        faults
    }
}

/// The backend and the device of a run.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) backend: String,
    /// The reason for the choice of the backend.
    pub(super) reason: String,
    /// Name of the first device.
    pub(super) device: String,
}

#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) place: &'a Place,
    pub(super) service: &'a Service,
    /// 0 if the owner of the weights did all work itself.
    pub(super) workers: usize,
    /// Threads of each process that classifies.
    pub(super) threads: usize,
    pub(super) repeat: usize,
    pub(super) outcome: Outcome,
}

impl Report<'_> {
    pub(super) fn to_json(&self) -> Value {
        let Outcome { tally, elapsed, holdings, leaks, .. } = &self.outcome;
        json!({
            "backend": self.place.backend,
            "backend_reason": self.place.reason,
            "device": self.place.device,
            "devices": self.outcome.devices_as_json(),
            "processes": 1 + self.workers,
            "mps": self.service.to_json(),
            // The sum over all processes, as for every count.
            "threads": self.threads * self.workers.max(1),
            "repeat": self.repeat,
            "images": tally.images,
            "correct": tally.correct,
            "accuracy": self.outcome.accuracy(),
            "predictions_equal_cpu": tally.differing == 0,
            "seconds": elapsed.as_secs_f64(),
            "images_per_second": self.outcome.images_per_second(),
            "handles_created": holdings.handles_created,
            "threads_served": holdings.threads_served,
            "workspaces": holdings.workspaces,
            "workspace_bytes": holdings.workspace_bytes,
            "pinned_requested_bytes": holdings.pinned_requested_bytes,
            "pinned_held_bytes": holdings.pinned_held_bytes,
            "weights_shared_bytes": holdings.mapped_bytes,
            "weights_transport": self.outcome.transport(),
            "leaks": leaks,
        })
    }

    pub(super) fn to_table(&self) -> Table {
        let Place { backend, reason, device } = self.place;
        let Outcome { tally, devices, elapsed, holdings, leaks, .. } = &self.outcome;
        let Tally { images, correct, differing } = tally;
        let agreement = match differing {
            0 => "equal to those of a plain CPU forward pass".to_owned(),
            differing => format!("{differing} differ from those of a plain CPU forward pass"),
        };
        let processes = match self.workers {
            0 => format!("1, with {}", counted(self.threads, "thread")),
            workers => {
                let (workers, threads) = (counted(workers, "worker"), counted(self.threads, "thread"));
                format!("{}: the owner of the weights, and {workers} with {threads} each", 1 + self.workers)
            }
        };
        let weights = match self.workers {
            0 => "loaded once, shared with no other process".to_owned(),
            workers => format!(
                "loaded once{}; {} of the owner's memory mapped in {}; transport: {}",
                if devices.len() > 1 { format!(" on each of {} devices", devices.len()) } else { String::new() },
                counted(holdings.mapped_bytes, "byte"),
                if workers == 1 { "another process".to_owned() } else { format!("{workers} other processes") },
                self.outcome.transport().unwrap_or_default()
            ),
        };
        let Holdings { handles_created, threads_served, workspaces, workspace_bytes, .. } = holdings;
        let Holdings { pinned_requested_bytes, pinned_held_bytes, .. } = holdings;
        let speed = format!("{:.0} images per second ({images} in {elapsed:.2?})", self.outcome.images_per_second());
        let mut table = Table::default();
        table.add_row(["backend", &format!("{} ({reason})", display_foreign(backend))]);
        if devices.len() > 1 {
            let lines: Vec<_> = devices.iter().map(DeviceUse::to_line).collect();
            table.add_row(["devices", &lines.join("\n")]);
        } else {
            table.add_row(["device", &display_foreign(device).to_string()]);
        }
        table.add_row(["processes", &processes]);
        if let Some(service) = self.service.to_line() {
            table.add_row(["multi-process service", &service]);
        }
        table.add_row(["weights", &weights]);
        table.add_row([
            "accuracy",
            &format!("{:.4} ({correct} of {})", self.outcome.accuracy(), counted(*images, "image")),
        ]);
        table.add_row(["predictions", &agreement]);
        table.add_row(["speed", &speed]);
        table
            .add_row(["handles", &format!("{handles_created} created, {} served", counted(*threads_served, "thread"))]);
        table.add_row([
            "workspaces",
            &format!("{} in {workspaces}, one for each stream", counted(*workspace_bytes, "byte")),
        ]);
        table.add_row([
            "pinned",
            &format!("{} requested, {pinned_held_bytes} held", counted(*pinned_requested_bytes, "byte")),
        ]);
        table.add_row(["leaks", &leaks.to_string()]);
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holdings(numbers: [u64; 7]) -> Holdings {
        let mut holdings = Holdings::default();
        holdings.numbers().into_iter().zip(numbers).for_each(|(held, number)| *held = number);
        holdings
    }

    fn outcome(correct: u64, differing: u64, leaks: u64) -> Outcome {
        Outcome {
            tally: Tally { images: 100, correct, differing },
            elapsed: Duration::from_millis(50),
            holdings: holdings([4, 4, 4, 1024, 100, 200, 300]),
            leaks,
            ..Outcome::default()
        }
    }

    fn report(workers: usize) -> Value {
        let place = Place { backend: "mock".into(), reason: "asked for".into(), device: "mock device".into() };
        Report {
            place: &place,
            service: &Service::for_tests(),
            workers,
            threads: 2,
            repeat: 1,
            outcome: outcome(98, 0, 0),
        }
        .to_json()
    }

    #[test]
    fn each_fault_is_named() {
        assert_eq!(outcome(96, 0, 0).faults(), Vec::<String>::new());
        assert_eq!(outcome(95, 0, 0).faults(), ["the accuracy is 0.9500, expected at least 0.96"]);
        assert_eq!(outcome(96, 3, 0).faults(), ["3 of 100 predictions differ from those of the CPU"]);
        assert_eq!(outcome(96, 0, 2).faults(), ["objects still alive at the end: 2"]);
        let refused = Outcome { refused: vec!["worker 7: free: no".into()], ..outcome(96, 0, 0) };
        assert_eq!(refused.faults(), ["not everything could be given back: worker 7: free: no"]);
    }

    #[test]
    fn the_object_has_rates_and_sums_over_all_processes() {
        let object = report(3);
        assert_eq!(object["accuracy"], 0.98);
        assert_eq!(object["images_per_second"], 2000.0);
        assert_eq!((&object["processes"], &object["threads"]), (&json!(4), &json!(6)));
        assert_eq!(object["weights_shared_bytes"], 300);
        let alone = report(0);
        assert_eq!((&alone["processes"], &alone["threads"]), (&json!(1), &json!(2)));
    }

    #[test]
    fn each_device_stands_in_the_object_and_in_the_table() {
        let place = Place { backend: "mock".into(), reason: "asked for".into(), device: "first".into() };
        let used = |ordinal, name: &str, workers, images| DeviceUse { ordinal, name: name.into(), workers, images };
        let devices = vec![used(0, "first", 2, 99), used(3, "second", 1, 1)];
        let outcome = Outcome { devices, transports: BTreeSet::from(["legacy"]), ..outcome(98, 0, 0) };
        let report =
            Report { place: &place, service: &Service::for_tests(), workers: 3, threads: 2, repeat: 1, outcome };
        let object = report.to_json();
        let second = json!({ "ordinal": 3, "name": "second", "workers": 1, "images": 1 });
        assert_eq!((&object["device"], &object["devices"][1]), (&json!("first"), &second));
        assert_eq!(object["weights_transport"], "legacy");
        let table = report.to_table().to_text(None);
        for part in ["0: first, 2 workers, 99 images", "3: second, 1 worker, 1 image ", "transport: legacy"] {
            assert!(table.contains(part), "`{part}` is missing in:\n{table}");
        }
    }

    #[test]
    fn holdings_add_up() {
        let mut sum = holdings([1, 2, 3, 4, 5, 6, u64::MAX]);
        sum += holdings([1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(sum, holdings([2, 4, 6, 8, 10, 12, u64::MAX]));
    }
}
