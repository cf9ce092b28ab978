//! Interleaved rounds of loops in threads of their own.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use highwater::Result;

/// A part of a loop that is timed, and one after it that is not.
pub(super) struct Worker<'a> {
    /// Repeats the operation this many times.
    pub(super) run: Box<dyn FnMut(u32) -> Result<()> + 'a>,
    pub(super) settle: Box<dyn FnMut() -> Result<()> + 'a>,
}

impl<'a> Worker<'a> {
    /// Returns a worker that repeats `operation`.
    pub(super) fn of(mut operation: impl FnMut() -> Result<()> + 'a) -> Self {
        Self { run: Box::new(move |count| (0..count).try_for_each(|_| operation())), settle: Box::new(|| Ok(())) }
    }
}

type Start<'a> = dyn Fn(usize) -> Result<Worker<'a>> + Sync + 'a;

/// An operation to time, in one thread or several at once.
pub(super) struct Loop<'a> {
    pub(super) name: String,
    threads: usize,
    /// Operations between two readings of the clock.
    batch: u32,
    /// Creates the worker of a thread, in that thread.
    start: Box<Start<'a>>,
}

impl<'a> Loop<'a> {
    pub(super) fn new(
        name: impl Into<String>,
        threads: usize,
        start: impl Fn(usize) -> Result<Worker<'a>> + Sync + 'a,
    ) -> Self {
        Self { name: name.into(), threads, batch: 256, start: Box::new(start) }
    }

    /// Returns the loop with another number of operations between two readings of the clock. It settles after each reading.
    pub(super) fn with_batch(self, batch: u32) -> Self {
        Self { batch, ..self }
    }

    /// Runs all threads at once for `duration`. Returns the nanoseconds of an operation, the mean over the threads.
    fn round(&self, duration: Duration) -> Result<f64> {
        let together = Barrier::new(self.threads);
        let times = thread::scope(|scope| {
            let together = &together;
            let spawn = |thread| scope.spawn(move || self.thread(thread, duration, together));
            let threads: Vec<_> = (0..self.threads).map(spawn).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect::<Result<Vec<f64>>>()
        })?;
        Ok(times.iter().sum::<f64>() / times.len() as f64)
    }

    fn thread(&self, thread: usize, duration: Duration, together: &Barrier) -> Result<f64> {
        // Twice, so that every cache has seen the request, and has what a batch needs.
        let ready = (self.start)(thread).and_then(|mut worker| {
            for _ in 0..2 {
                (worker.run)(self.batch)?;
                (worker.settle)()?;
            }
            Ok(worker)
        });
        together.wait();
        let mut worker = ready?;
        let (mut timed, mut operations) = (Duration::ZERO, 0_u64);
        while timed < duration {
            let started = Instant::now();
            (worker.run)(self.batch)?;
            timed += started.elapsed();
            operations += u64::from(self.batch);
            (worker.settle)()?;
        }
        Ok(timed.as_nanos() as f64 / operations as f64)
    }
}

/// Runs the loops in turn, `rounds` times. Returns the median time of each in nanoseconds.
pub(super) fn measure(loops: &[Loop<'_>], rounds: u32, duration: Duration) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); loops.len()];
    for _ in 0..rounds {
        for (each, times) in loops.iter().zip(&mut times) {
            times.push(each.round(duration)?);
        }
    }
    Ok(times.into_iter().map(|times| quantile(times, 0.5)).collect())
}

/// Returns a quantile of values, of which there must be one at least. The median of an even number is the mean of the middle
/// two; other quantiles are values.
pub(super) fn quantile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let length = values.len();
    if part == 0.5 {
        return (values[(length - 1) / 2] + values[length / 2]) / 2.0;
    }
    values[((part * length as f64) as usize).min(length - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_peers_programs() {
        let values: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.9, 0.1, 1.0].map(|part| quantile(values.clone(), part)), [5.5, 10.0, 2.0, 10.0]);
        assert_eq!((quantile(vec![3.0], 0.5), quantile(vec![3.0, 1.0, 2.0], 0.5)), (3.0, 2.0));
    }

    #[test]
    fn every_loop_runs_and_a_failed_start_ends_all_threads() {
        let quick = Duration::from_micros(50);
        let good = Loop::new("good", 3, |_| Ok(Worker::of(|| Ok(()))));
        let times = measure(&[good], 3, quick).unwrap();
        assert!(times[0] > 0.0, "{times:?}");
        let refused = || highwater::Error::new(highwater::ErrorKind::OutOfMemory, "start", "refused");
        let bad = Loop::new("bad", 3, |thread| if thread == 1 { Err(refused()) } else { Ok(Worker::of(|| Ok(()))) });
        assert_eq!(measure(&[bad], 1, quick).unwrap_err().message(), "refused");
    }
}
