//! `highwater conformance --saboteurs` and `--mutants`: backends that break one promise each. The suite must catch them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::hal::{Backend, Identity};
use highwater::mock::{ENVIRONMENT_VARIABLE as MOCK, MockGpu, MockOptions};
use highwater_conformance::{
    Case, Executor, Fault, Faulted, Mutant, MutantOptions, MutantProgress as Step, Outcome, Points, Score, Status,
    Survivor, Verdict as Judged, run_mutants, run_mutants_on, seed,
};
use serde_json::{Value, json};

use super::super::args::ConformanceArguments;
use super::super::backends::Prober;
use super::super::failure::Failure;
use super::super::progress::Progress;
use super::super::{Verdict, output};
use super::choice::Choice;
use super::nearest;
use super::workers::Workers;

pub(super) fn command(arguments: &ConformanceArguments, choice: &Choice, json: bool) -> Result<Verdict> {
    if arguments.list {
        list(arguments, json)?;
        return Ok(Verdict::Good);
    }
    let limit = MutantOptions::new().case_limit.min(Duration::from_secs(arguments.limit));
    // A first open probes a plugin, and reports a backend that does not open. It has a process of its own, because a process that has
    // used a real device keeps memory of it.
    let tried = Workers::start(choice, limit)?;
    let (identity, devices) = (tried.identity().clone(), tried.about().device_count());
    drop(tried);
    // Some mutants need two devices to do wrong, or a block of more than 4 GiB. Without a description, the mock has both.
    const ENOUGH: &str = "devices=2,memory=6GiB";
    let is_undescribed = matches!(choice, Choice::Named(name) if name == "mock") && std::env::var_os(MOCK).is_none();
    let open = || -> highwater::Result<Arc<dyn Backend>> {
        if is_undescribed { Ok(MockGpu::open(MockOptions::parse(ENOUGH)?)?) } else { choice.open(Prober::Nobody) }
    };
    let launcher = choice.launcher()?;
    let launcher = if is_undescribed { launcher.with_environment(MOCK, ENOUGH) } else { launcher };
    let mut options = MutantOptions::new().with_every(arguments.sample as usize).with_launcher(launcher);
    if arguments.mutants {
        options = options.with_generated();
    }
    if let Some(seconds) = arguments.total_limit {
        options = options.with_total_limit(Duration::from_secs(seconds));
    }
    if let Some(filter) = &arguments.filter {
        options = options.with_filter(filter);
    }
    let begun = Instant::now();
    let mut progress = None;
    let mut observer = |step: Step<'_>| match step {
        Step::Started { mutant, total, .. } => {
            progress.get_or_insert_with(|| Progress::new("mutants", total as u64, json)).now(mutant.name);
        }
        Step::Finished { verdict, .. } => {
            let Some(progress) = &progress else { return };
            if let (Outcome::Survived, None) = (&verdict.outcome, verdict.mutant.survives) {
                progress.say(&format!("survived: {} [{}]", verdict.mutant.name, verdict.mutant.clause));
            }
            progress.advance(1);
        }
        _ => {}
    };
    let score = if identity.real_device {
        let seed = seed()?;
        let start = |mutant| Trial::start(choice, mutant, limit, seed).map_err(|error| format!("{error:#}"));
        run_mutants_on(&identity, devices, start, &options, &mut observer)
    } else {
        run_mutants(open, &options, &mut observer)
    };
    drop(progress);
    if score.verdicts().is_empty() {
        let filter = arguments.filter.as_deref().unwrap_or_default();
        let mut every = options.with_every(1);
        every.filter = None;
        let known = every.mutants();
        let hint = format!(
            "name a part of a mutant's name, such as `{}`, or the whole id of a clause",
            known.first().map_or("", |one| one.name)
        );
        let hint = nearest::hint(filter, known.iter().flat_map(|one| [one.name, one.clause]), hint);
        let message = format!("no mutant matches `{filter}`");
        return Err(Failure::new(highwater::ErrorKind::InvalidArgument, message, hint).into());
    }
    if json && arguments.mutants {
        output::object(&by_construction_to_json(&score))?;
    } else if json {
        output::object(&to_json(&score, arguments.sample, begun.elapsed().as_secs_f64()))?;
    } else {
        output::result(&score)?;
    }
    Ok(if score.is_success() { Verdict::Good } else { Verdict::Bad })
}

/// The process of one mutant.
struct Trial(Workers);

impl Trial {
    fn start(choice: &Choice, mutant: &'static Mutant, limit: Duration, seed: u64) -> Result<Self> {
        let mut workers = Workers::start_mutated(choice, Some(mutant), limit)?;
        workers.draw_from(seed);
        Ok(Self(workers))
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // A wrong backend need not end well.
        self.0.abandon();
    }
}

impl Executor for Trial {
    fn identity(&self) -> &Identity {
        self.0.identity()
    }

    fn draw_from(&mut self, seed: u64) {
        self.0.draw_from(seed);
    }

    fn run(&mut self, case: &'static Case) -> Status {
        self.0.run(case)
    }

    fn points(&mut self, case: &'static Case) -> Points {
        self.0.points(case)
    }

    fn run_with_fault(&mut self, case: &'static Case, fault: &Fault) -> Faulted {
        self.0.run_with_fault(case, fault)
    }
}

/// Prints the mutants that the filter selects, with their clauses.
fn list(arguments: &ConformanceArguments, json: bool) -> Result<()> {
    let mut options = MutantOptions::new();
    options.filter.clone_from(&arguments.filter);
    options.generated = arguments.mutants;
    let listed = options.mutants();
    if json {
        let entry = |one: &&Mutant| json!({ "name": one.name, "clause": one.clause, "what": one.what, "survives": one.survives });
        output::result(json!({ "saboteurs": listed.iter().map(entry).collect::<Vec<_>>() }))?;
        return Ok(());
    }
    for Mutant { name, clause, what, survives, .. } in &listed {
        let survives = survives.map_or(String::new(), |why| format!(" Survives: {why}."));
        output::result(format_args!("{name} [{clause}] {what}{survives}"))?;
    }
    output::result(format_args!("\n{} mutants", listed.len()))?;
    Ok(())
}

fn by_construction_to_json(score: &Score) -> Value {
    let missed = score.survivors().into_iter().filter(|survivor| survivor.reason.is_none());
    let entry = |one: &Mutant| json!({ "name": one.name, "clause": one.clause, "what": one.what });
    let classes = score.classes().into_iter().map(|(name, class)| {
        let counts = json!({
            "caught": class.caught, "missed": class.missed, "equivalent": class.equivalent, "skipped": class.skipped,
        });
        (name.to_owned(), counts)
    });
    json!({
        "generated": score.verdicts().len(),
        "caught": score.caught(),
        "caught_by_their_clause": score.caught_by_their_clause(),
        "equivalent": score.equivalent(),
        "skipped": score.skipped(),
        "missed": missed.map(|survivor| entry(survivor.mutant)).collect::<Vec<_>>(),
        "percent": score.percent(),
        "classes": classes.collect::<serde_json::Map<_, _>>(),
    })
}

fn to_json(score: &Score, sample: u32, seconds: f64) -> Value {
    let entry = |verdict: &Judged| {
        let one = verdict.mutant;
        let (outcome, case, said) = match &verdict.outcome {
            Outcome::Caught { case, failure, .. } => ("caught", Some(case.name), Some(failure.as_str())),
            Outcome::Skipped(why) => ("skipped", None, Some(why.as_str())),
            _ => ("survived", None, None),
        };
        json!({ "name": one.name, "clause": one.clause, "outcome": outcome, "case": case, "text": said })
    };
    let survivor = |survivor: Survivor| {
        let one = survivor.mutant;
        json!({ "name": one.name, "clause": one.clause, "what": one.what, "reason": survivor.reason })
    };
    json!({
        "saboteurs": score.mutants(),
        "caught": score.caught(),
        "caught_by_their_clause": score.caught_by_their_clause(),
        "survivors": score.survivors().into_iter().map(survivor).collect::<Vec<_>>(),
        "skipped": score.skipped(),
        "percent": score.percent(),
        "sample": sample,
        "seconds": seconds,
        "verdicts": score.verdicts().iter().map(entry).collect::<Vec<_>>(),
    })
}
