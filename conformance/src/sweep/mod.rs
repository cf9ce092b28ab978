//! The fault sweep: every case again for each fallible call that it makes, with that one call refused.
//!
//! What a program does when a call fails is what is tested least. So each case is run once to count its calls, and then once
//! for each of them: the call does not reach the backend and gives an error. The case may fail then, or pass; it must not hang
//! or bring its process down, and when it has ended nothing may be left over and the backend's counts must agree with the
//! books of the validation layer. A release that the fault itself refused is made again, by the guard that made it or,
//! where the case made it by a call of its own, by the layer. In the end the case passes without a fault, as before.
//!
//! Of what a thread calls in a loop, each of the first calls is refused and then fewer and fewer, and work that only keeps a stream busy
//! counts as one call: how much of it there is depends on the machine.
//!
//! Calls are counted by thread and operation, so that which call is refused does not depend on how threads are scheduled. A
//! case that is tried again until it proves something (`retry`) may make fewer calls the next time; a fault that was not
//! reached for that reason is counted apart.
//!
//! - `gate`: counts calls and refuses one; `report`: what a sweep came to

mod gate;
mod report;

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

pub use self::gate::{Calls, Fault};
pub(crate) use self::gate::{Gate, as_one, insist, is_injected};
pub use self::report::{Faulted, Points, SweepFailure, SweepProgress, SweepReport};

use highwater_hal::Backend;

use crate::case::Case;
use crate::options::Options;
use crate::report::Status;
use crate::run::{Executor, InProcess};

/// Sweeps the cases that `options` selects on a backend, refusing every `sample`-th of the calls that [`Calls::faults`] names;
/// 1 refuses each, 0 is 1.
///
/// Nobody else may use the backend meanwhile. A backend that hangs makes the sweep hang; see [`sweep_on`].
#[must_use]
pub fn sweep(backend: &dyn Backend, options: &Options, sample: u32) -> SweepReport {
    let executor = || Ok::<_, Infallible>(InProcess::new(backend, options.launcher.clone()));
    match sweep_on(1, &executor, options, sample, &|_| {}) {
        Ok(report) => report,
        Err(never) => match never {},
    }
}

/// As [`sweep`], in so many threads at once (0 is 1), each of which makes an executor for itself and drops it in the end.
/// `observer` is told of each case that has been swept.
///
/// # Errors
/// What `executor` gave.
pub fn sweep_on<E: Executor, F: Send>(
    jobs: usize,
    executor: &(dyn Fn() -> Result<E, F> + Sync),
    options: &Options,
    sample: u32,
    observer: &(dyn Fn(SweepProgress<'_>) + Sync),
) -> Result<SweepReport, F> {
    let started = Instant::now();
    let (selected, next) = (options.round(0), AtomicUsize::new(0));
    let sample = sample.max(1);
    let job = || -> Result<Vec<(usize, SweepReport)>, F> {
        let (mut executor, mut parts) = (executor()?, Vec::new());
        loop {
            // Relaxed: only that each number is given out once matters.
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&case) = selected.get(index) else { break };
            let mut part = SweepReport::new(executor.identity().clone(), sample);
            sweep_case(&mut executor, case, index, &mut part);
            let (total, calls_swept) = (selected.len(), part.calls_swept);
            observer(SweepProgress { case, total, calls_swept, failures: &part.failures });
            parts.push((index, part));
        }
        if parts.is_empty() {
            parts.push((usize::MAX, SweepReport::new(executor.identity().clone(), sample)));
        }
        Ok(parts)
    };
    let parts: Result<Vec<_>, F> = thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(job)).collect();
        let joined =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect()
    });
    let mut parts: Vec<_> = parts?.into_iter().flatten().collect();
    parts.sort_by_key(|(index, _)| *index);
    let mut parts = parts.into_iter().map(|(_, part)| part);
    let mut report = parts.next().expect("each job has a part");
    parts.for_each(|part| report.add(part));
    report.duration = started.elapsed();
    Ok(report)
}

fn sweep_case(executor: &mut dyn Executor, case: &'static Case, index: usize, report: &mut SweepReport) {
    let calls = match executor.points(case) {
        Points::Calls(calls) => calls,
        Points::Not(Status::Skipped(_)) => {
            report.skipped += 1;
            return;
        }
        Points::Not(Status::Failed(message)) => return report.fails(case, None, format!("without a fault: {message}")),
        Points::Not(_) => return,
    };
    report.cases += 1;
    report.calls += calls.iter().map(|calls| u64::from(calls.count)).sum::<u64>();
    let stride = report.sample as usize;
    // Where in its calls a case begins differs from case to case, so that a sample is not the same place of each.
    let first = index.wrapping_mul(7919) % stride;
    for fault in calls.iter().flat_map(Calls::faults).skip(first).step_by(stride) {
        let Faulted { reached, retried, findings, .. } = executor.run_with_fault(case, &fault);
        report.retried += retried;
        if reached {
            report.calls_swept += 1;
        } else {
            report.not_reached += 1;
        }
        if !findings.is_empty() {
            report.fails(case, Some(fault), findings.join("; "));
        }
    }
    if report.calls_swept > 0
        && let Status::Failed(message) = executor.run(case)
    {
        report.fails(case, None, format!("after its faults: {message}"));
    }
}
