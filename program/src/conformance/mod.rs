//! `highwater conformance`: the conformance suite against one backend.
//!
//! - `workers`: the supervision of the process of the cases; `worker`: that process; `protocol`: their messages
//! - `choice`: the tested backend; `expected`: the known failures; `nearest`: hints for misspelled filters
//! - `report`: the printed report of a run; `certificate`: the file about a full run; `destination`: its target
//! - `sweep`: the fault sweep; `saboteurs`: mutants that the suite must catch; `races`: mistakes that the mock must find
//!
//! Cases about two processes start the program once more, with the user's command line and a variable that
//! selects the second role.

mod certificate;
mod choice;
mod destination;
mod expected;
mod nearest;
mod protocol;
mod races;
mod report;
mod saboteurs;
mod sweep;
pub(super) mod worker;
mod workers;

use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::ErrorKind;
use highwater::hal::display_foreign;
use highwater_conformance::{
    Case, Options, Progress as Step, Report, Status, cases, clauses, run_on, seed, serve_peer,
};

use self::certificate::Certificate;
use self::choice::Choice;
use self::report::Run;
use self::workers::Workers;
use super::args::ConformanceArguments;
use super::backends::Prober;
use super::failure::Failure;
use super::progress::Progress;
use super::{Verdict, output, soak};

pub(super) fn command(arguments: &ConformanceArguments, json: bool) -> Result<Verdict> {
    let choice = Choice::of(&arguments.backend);
    // The first of the two processes has probed a plugin.
    if let Some(served) = serve_peer(|| choice.open(Prober::Nobody)) {
        served?;
        return Ok(Verdict::Good);
    }
    if arguments.races {
        return races::command(json);
    }
    if arguments.saboteurs || arguments.mutants {
        return saboteurs::command(arguments, &choice, json);
    }
    let options = options(arguments, choice.name())?;
    if arguments.list {
        report::list(&options, json)?;
        return Ok(Verdict::Good);
    }
    if arguments.fault_sweep {
        return sweep::command(arguments, &choice, &options, json);
    }
    // Checked before the run, which is long.
    let certificate = arguments.certificate.as_deref().map(|path| Certificate::begin(path, &options)).transpose()?;
    let mut workers = Workers::start(&choice, Duration::from_secs(arguments.limit))?;
    let about = workers.about().clone();
    if let Some(seed) = options.shuffle {
        output::line(format_args!("seed {seed}"));
    }
    if let Some(seed) = options.seed {
        output::line(format_args!("drawn from {seed} (HIGHWATER_CONFORMANCE_SEED)"));
    }
    let started = Instant::now();
    let report = run(&mut workers, &options, json);
    let end = workers.finish().err();
    let run = Run { report: &report, options: &options, seconds: started.elapsed().as_secs_f64(), end: end.as_deref() };
    let path = arguments.certificate.as_deref();
    let certified = certificate.map_or(Ok(()), |certificate| certificate.finish(&run, &about));
    // The result of the run is printed in any case, unless the error is the only object.
    if json {
        certified?;
        output::object(&run.to_json())?;
    } else {
        run.print()?;
        certified?;
    }
    // A line beside the results, which may be in the same pipe as the certificate.
    if let Some(path) = path {
        output::line(format_args!("certificate: {}", display_foreign(path)));
    }
    if let Some(end) = &end {
        output::line(format_args!("error: {end}"));
    }
    Ok(if run.is_success() { Verdict::Good } else { Verdict::Bad })
}

/// Converts the arguments to the options of the library.
fn options(arguments: &ConformanceArguments, backend: Option<&str>) -> Result<Options> {
    let mut options = Options::new().with_rounds(arguments.repeat);
    // A list draws nothing.
    if !arguments.list {
        options = options.with_seed(seed()?);
    }
    if let Some(backend) = backend {
        options = expected::with_expected_failures(options, backend)?;
    }
    if let Some(filter) = &arguments.filter {
        options = options.with_filter(filter);
    }
    if let Some(seed) = arguments.shuffle {
        options = options.with_shuffle(seed.unwrap_or_else(soak::any_seed));
    }
    if options.round(0).is_empty() {
        let filter = arguments.filter.as_deref().unwrap_or_default();
        let known = cases().map(|case| case.name).chain(clauses().iter().map(|clause| clause.id));
        let group = cases().next().map_or("", |case| case.group);
        let hint =
            format!("name a part of a case, such as `{group}`, or the whole id of a clause; `--list` lists both");
        let hint = nearest::hint(filter, known, hint);
        return Err(Failure::new(ErrorKind::InvalidArgument, format!("no case matches `{filter}`"), hint).into());
    }
    Ok(options)
}

/// Runs the cases, and shows the progress.
fn run(workers: &mut Workers, options: &Options, json: bool) -> Report {
    let mut progress = None;
    run_on(workers, options, &mut |step| match step {
        Step::Started { case, total, .. } => {
            progress.get_or_insert_with(|| Progress::new("cases", total as u64, json)).now(case.name);
        }
        Step::Finished { report, .. } => {
            let Some(progress) = &progress else { return };
            if let Status::Failed(message) = &report.status {
                let Case { name, clauses, .. } = report.case;
                progress.say(&format!("failed: {name} [{}]: {message}", clauses.join(", ")));
            }
            progress.advance(1);
        }
        _ => {}
    })
}
