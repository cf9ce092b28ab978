//! What the server counts, in the text format of Prometheus.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use highwater::Statistics;
use tokio::time::Instant;

/// The codes of all answers.
const CODES: [u16; 7] = [200, 400, 413, 429, 500, 503, 504];

const BATCH_SIZES: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

const MICROSECONDS: [u64; 13] =
    [100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000];

/// Counts of values, by upper bounds.
pub(crate) struct Histogram {
    bounds: &'static [u64],
    /// Values up to each bound and above the one before, and at last the values above all bounds.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
    /// Values in one unit of the page.
    per_unit: f64,
}

impl Histogram {
    fn new(bounds: &'static [u64], per_unit: f64) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0), per_unit }
    }

    pub(crate) fn observe(&self, value: u64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)].fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
    }

    fn render(&self, name: &str, help: &str, page: &mut String) -> fmt::Result {
        writeln!(page, "# HELP {name} {help}\n# TYPE {name} histogram")?;
        let mut count = 0;
        for (index, values) in self.counts.iter().enumerate() {
            count += values.load(Relaxed);
            match self.bounds.get(index) {
                Some(&bound) => writeln!(page, "{name}_bucket{{le=\"{}\"}} {count}", bound as f64 / self.per_unit)?,
                None => writeln!(page, "{name}_bucket{{le=\"+Inf\"}} {count}")?,
            }
        }
        writeln!(page, "{name}_sum {}\n{name}_count {count}", self.sum.load(Relaxed) as f64 / self.per_unit)
    }
}

/// The counts of a server.
pub(crate) struct Metrics {
    accepted: AtomicU64,
    answered: [AtomicU64; CODES.len()],
    pub(crate) batch_sizes: Histogram,
    latencies: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self {
            accepted: AtomicU64::new(0),
            answered: CODES.map(|_| AtomicU64::new(0)),
            batch_sizes: Histogram::new(&BATCH_SIZES, 1.0),
            latencies: Histogram::new(&MICROSECONDS, 1e6),
        }
    }

    /// Counts a request, and returns the time.
    pub(crate) fn accept(&self) -> Instant {
        self.accepted.fetch_add(1, Relaxed);
        Instant::now()
    }

    /// Counts an answer.
    pub(crate) fn answer(&self, code: u16, accepted: Instant) {
        if let Some(index) = CODES.iter().position(|&known| known == code) {
            self.answered[index].fetch_add(1, Relaxed);
        }
        self.latencies.observe(accepted.elapsed().as_micros() as u64);
    }

    /// Returns the requests accepted and the requests answered.
    pub(crate) fn totals(&self) -> (u64, u64) {
        (self.accepted.load(Relaxed), self.answered.iter().map(|count| count.load(Relaxed)).sum())
    }

    /// Returns the page of these counts and of the pools.
    pub(crate) fn render(&self, pools: &Statistics) -> String {
        let mut page = String::new();
        // A `String` takes any text.
        let _ = self.write(pools, &mut page);
        page
    }

    fn write(&self, pools: &Statistics, page: &mut String) -> fmt::Result {
        writeln!(page, "# HELP server_requests_total Requests accepted.\n# TYPE server_requests_total counter")?;
        writeln!(page, "server_requests_total {}", self.accepted.load(Relaxed))?;
        writeln!(page, "# HELP server_responses_total Answers, by code.\n# TYPE server_responses_total counter")?;
        for (code, count) in CODES.iter().zip(&self.answered) {
            writeln!(page, "server_responses_total{{code=\"{code}\"}} {}", count.load(Relaxed))?;
        }
        self.batch_sizes.render("server_batch_size", "Requests of a batch.", page)?;
        self.latencies.render("server_request_seconds", "Time from a request to its answer.", page)?;
        let gauges = [
            ("highwater_pinned_held_bytes", "Page-locked memory of the pool.", pools.host.held_bytes),
            ("highwater_pinned_live_bytes", "The part of it in buffers.", pools.host.live_bytes),
            ("highwater_device_held_bytes", "Device memory of the pool.", pools.device_memory.held_bytes),
            ("highwater_device_live_bytes", "The part of it in buffers.", pools.device_memory.live_bytes),
            ("highwater_workspace_bytes", "Device memory of BLAS workspaces.", pools.workspace_bytes),
            ("highwater_blas_handles", "BLAS handles.", pools.blas_handles.live),
        ];
        for (name, help, value) in gauges {
            writeln!(page, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}")?;
        }
        Ok(())
    }
}
