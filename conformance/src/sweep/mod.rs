//! The fault sweep: runs every case again for each fallible call that it makes, with that call refused.
//!
//! Error paths are the least tested part of a program. The sweep runs a case once to count its calls, and then once for each
//! call. That call does not reach the backend and returns an error. The case may then fail or pass. It must not hang or crash
//! its process. Afterwards no object may be left, and the backend's counts must agree with the ledger of the validation
//! layer. If the fault refused a release, the guard of the object repeats it, or the layer does so at the end of the case.
//! Finally, the case must pass without a fault.
//!
//! In a loop, the first calls are each refused, and later calls more and more rarely. Calls that only keep a stream busy
//! count as one, because their number depends on the machine.
//!
//! Calls are counted by thread and operation, so that the schedule of threads does not decide which call is refused. A case
//! that repeats an observation (`retry`) may make fewer calls the next time. Faults that were never reached are counted
//! separately.
//!
//! - `gate`: counts calls and refuses one; `report`: the result of a sweep

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

/// Sweeps the cases that `options` selects on a backend. Refuses every `sample`-th of the calls that [`Calls::faults`] names;
/// 0 and 1 refuse each.
///
/// Nothing else may use the backend meanwhile. A backend that hangs also hangs the sweep; see [`sweep_on`].
#[must_use]
pub fn sweep(backend: &dyn Backend, options: &Options, sample: u32) -> SweepReport {
    let executor = || Ok::<_, Infallible>(InProcess::new(backend, options.launcher.clone()));
    match sweep_on(1, &executor, options, sample, &|_| {}) {
        Ok(report) => report,
        Err(never) => match never {},
    }
}

/// Sweeps as [`sweep`] does, in `jobs` threads (0 means 1). Each thread makes its own executor, and drops it at the end.
/// `observer` sees each case after its sweep.
///
/// # Errors
///
/// The error of `executor`.
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
            // Relaxed: only the uniqueness of the number matters.
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
    // The first refused call differs from case to case, so that a sample covers different places.
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
