//! The runner: runs cases on a backend, one after the other, and reports the results.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use highwater_hal::{Backend, Identity};

use crate::case::{Case, CaseResult, Facts, Run, all_capabilities, during};
use crate::exchanged::Exchanged;
use crate::options::Options;
use crate::peer::Launcher;
use crate::report::{CaseReport, Progress, Report, Status};
use crate::seed;
use crate::sweep::{Fault, Faulted, Gate, Points};
use crate::validation::Validated;

/// The place where cases run: this process ([`InProcess`]), or a worker process that can be replaced after a crash.
pub trait Executor {
    /// Returns the identity of the tested backend.
    fn identity(&self) -> &Identity;

    /// Sets the seed from which the cases draw from now on.
    fn draw_from(&mut self, seed: u64);

    /// Runs a case.
    fn run(&mut self, case: &'static Case) -> Status;

    /// Runs a case and counts the calls that it makes.
    fn points(&mut self, case: &'static Case) -> Points;

    /// Runs a case with one of its calls refused.
    fn run_with_fault(&mut self, case: &'static Case, fault: &Fault) -> Faulted;
}

/// Runs cases in this process, on a backend that nothing else uses meanwhile.
#[derive(Debug)]
pub struct InProcess<'b> {
    backend: &'b dyn Backend,
    launcher: Option<Launcher>,
    /// `None` for one of the environment or of the clock.
    seed: Option<u64>,
}

impl<'b> InProcess<'b> {
    /// Creates an executor for this backend. Cases of sharing need a launcher.
    #[must_use]
    pub fn new(backend: &'b dyn Backend, launcher: Option<Launcher>) -> Self {
        Self { backend, launcher, seed: None }
    }

    /// Runs a case through the validation layer. Returns its result and the layer's findings.
    fn validated<'v>(
        &self,
        backend: &'v dyn Backend,
        case: &'static Case,
        gate: Option<Gate>,
    ) -> Result<(Status, Vec<String>, Validated<'v>), Status> {
        let capabilities = match all_capabilities(backend) {
            Ok(capabilities) => capabilities,
            Err(error) => return Err(Status::Failed(format!("the capabilities cannot be read: {error}"))),
        };
        if let Some(reason) = case.unmet(&capabilities) {
            return Err(Status::Skipped(reason));
        }
        let body = match (case.run, &self.launcher) {
            (Run::Alone(body), _) => {
                Box::new(move |backend: &dyn Backend| body(backend)) as Box<dyn Fn(&dyn Backend) -> CaseResult>
            }
            (Run::WithPeer(body), Some(launcher)) => Box::new(move |backend: &dyn Backend| body(backend, launcher)),
            (Run::WithPeer(_), None) => return Err(Status::Skipped(NO_LAUNCHER.to_owned())),
        };
        // A permanent change, such as one by the first object of a kind, shows after only one case of a run.
        let facts = match Facts::of(backend) {
            Ok(facts) => facts,
            Err(error) => return Err(Status::Failed(format!("the devices cannot be described: {error}"))),
        };
        let validated = Validated::new(backend, gate);
        let status = match catch_unwind(AssertUnwindSafe(|| {
            during(case.needs, || seed::during(self.seed, || body(&validated)))
        })) {
            Ok(Ok(())) => Status::Passed,
            Ok(Err(failure)) => match failure.skipped() {
                Some(reason) => Status::Skipped(reason.to_owned()),
                None => Status::Failed(failure.explained(backend).to_string()),
            },
            Err(payload) => Status::Failed(panic_message(&*payload)),
        };
        validated.release_refused();
        let mut findings = validated.findings();
        findings.extend(facts.changes(backend));
        Ok((status, findings, validated))
    }
}

impl InProcess<'_> {
    /// Runs a case on this backend, or on this backend with exchanged devices.
    fn run_on(&self, backend: &dyn Backend, case: &'static Case) -> Status {
        // The backend may also panic outside of the case.
        let run = || match self.validated(backend, case, None) {
            Ok((status, findings, _)) => with_findings(status, &findings),
            Err(status) => status,
        };
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| Status::Failed(panic_message(&*payload)))
    }
}

/// The reason for skipping cases of sharing without a launcher.
const NO_LAUNCHER: &str = "no launcher for a second process was given";

impl Executor for InProcess<'_> {
    fn identity(&self) -> &Identity {
        self.backend.identity()
    }

    fn draw_from(&mut self, seed: u64) {
        self.seed = Some(seed);
    }

    fn run(&mut self, case: &'static Case) -> Status {
        let first = self.run_on(self.backend, case);
        if self.backend.device_count() < 2 || matches!(first, Status::Failed(_)) || !case.repeats_on_the_second_device()
        {
            return first;
        }
        match self.run_on(&Exchanged::new(self.backend), case) {
            Status::Failed(message) => Status::Failed(format!("{message}; device 0 of this case is the second device")),
            // The second device may lack an ability that the first one has, or have one that it lacks.
            Status::Skipped(_) => first,
            second => second,
        }
    }

    fn points(&mut self, case: &'static Case) -> Points {
        let run = || match self.validated(self.backend, case, Some(Gate::new(None))) {
            Ok((status, findings, validated)) => match with_findings(status, &findings) {
                Status::Passed => Points::Calls(validated.gate().map(Gate::calls).unwrap_or_default()),
                status => Points::Not(status),
            },
            Err(status) => Points::Not(status),
        };
        let panicked = |payload: Box<dyn Any + Send>| Points::Not(Status::Failed(panic_message(&*payload)));
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(panicked)
    }

    fn run_with_fault(&mut self, case: &'static Case, fault: &Fault) -> Faulted {
        let run = || match self.validated(self.backend, case, Some(Gate::new(Some(fault.clone())))) {
            Ok((status, findings, validated)) => Faulted {
                status,
                findings,
                reached: validated.gate().is_some_and(Gate::has_injected),
                retried: validated.retried(),
            },
            Err(status) => Faulted::outside(status),
        };
        let panicked = |payload: Box<dyn Any + Send>| {
            let message = panic_message(&*payload);
            Faulted { findings: vec![message.clone()], ..Faulted::outside(Status::Failed(message)) }
        };
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(panicked)
    }
}

/// Fails a case for which the layer has findings.
fn with_findings(status: Status, findings: &[String]) -> Status {
    if findings.is_empty() {
        return status;
    }
    let findings = findings.join("; ");
    match status {
        Status::Failed(message) => Status::Failed(format!("{message}; validation: {findings}")),
        _ => Status::Failed(format!("validation: {findings}")),
    }
}

/// Runs the cases that `options` selects, one after the other.
///
/// Nothing else may use the backend meanwhile: each case must leave `live_objects()` unchanged. A panic inside a case fails
/// that case. A backend that hangs also hangs the run. Run such a backend in its own process; [`run_observed`] names the
/// running case.
#[must_use]
pub fn run(backend: &dyn Backend, options: &Options) -> Report {
    run_observed(backend, options, &mut |_| {})
}

/// Runs cases as [`run`] does. `observer` sees the begin and the end of each case.
#[must_use]
pub fn run_observed(backend: &dyn Backend, options: &Options, observer: &mut dyn FnMut(Progress<'_>)) -> Report {
    run_on(&mut InProcess::new(backend, options.launcher.clone()), options, observer)
}

/// Runs cases as [`run_observed`] does, in an executor, which has its own launcher.
#[must_use]
pub fn run_on(executor: &mut dyn Executor, options: &Options, observer: &mut dyn FnMut(Progress<'_>)) -> Report {
    let rounds = options.rounds.max(1);
    let total = options.round(0).len() * rounds as usize;
    let mut reports = Vec::with_capacity(total);
    // A variable that is no number fails the cases that draw.
    let seed = options.seed.or_else(|| seed::seed().ok());
    for round in 0..rounds {
        if let Some(seed) = seed {
            executor.draw_from(seed.wrapping_add(u64::from(round)));
        }
        for case in options.round(round) {
            let index = reports.len();
            observer(Progress::Started { case, index, total });
            let started = Instant::now();
            let status = options.judge(case, executor.run(case));
            let report = CaseReport { case, status, duration: started.elapsed(), round };
            observer(Progress::Finished { report: &report, index, total });
            reports.push(report);
        }
    }
    Report::new(executor.identity().clone(), reports, options, seed)
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("with a payload that is no text"))
}

#[cfg(test)]
mod tests {
    use crate::cases::cases;

    #[test]
    fn names_are_unique_and_begin_with_their_group() {
        let mut names: Vec<&str> = cases().map(|case| case.name).collect();
        for case in cases() {
            assert!(case.name.starts_with(&format!("{}.", case.group)), "{}", case.name);
            assert!(!case.clauses.is_empty(), "{}", case.name);
        }
        let total = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), total);
    }
}
