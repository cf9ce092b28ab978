//! Samples of threads that work at the same time.

use std::error::Error;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use serde::Serialize;

pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The samples of one thread, oldest first.
pub type Samples = Vec<Duration>;

/// Runs `work` in `threads` new threads. All begin after the last `setup`.
pub fn together<S, R: Send>(
    threads: usize,
    setup: impl Fn() -> Result<S> + Sync,
    work: impl Fn(S) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let start = Barrier::new(threads);
    thread::scope(|scope| {
        let one = || {
            let ready = setup();
            start.wait();
            work(ready?)
        };
        let running = (0..threads).map(|_| scope.spawn(one)).collect::<Vec<_>>();
        running.into_iter().map(|it| it.join().unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    })
}

/// A summary of the samples of all threads, in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Summary {
    /// The median of the threads' first samples.
    #[serde(rename = "first_us")]
    pub first: f64,
    /// The median of the others.
    #[serde(rename = "median_us")]
    pub median: f64,
    #[serde(rename = "p90_us")]
    pub p90: f64,
}

impl Summary {
    pub fn of(threads: &[Samples]) -> Self {
        let sorted = |samples: &mut dyn Iterator<Item = &Duration>| {
            let mut sorted = samples.map(|it| it.as_secs_f64() * 1e6).collect::<Vec<_>>();
            sorted.sort_by(f64::total_cmp);
            sorted
        };
        let at = |sorted: &[f64], part: f64| sorted[((sorted.len() - 1) as f64 * part).round() as usize];
        let first = sorted(&mut threads.iter().filter_map(|it| it.first()));
        let others = sorted(&mut threads.iter().flat_map(|it| &it[1..]));
        Self { first: at(&first, 0.5), median: at(&others, 0.5), p90: at(&others, 0.9) }
    }
}
