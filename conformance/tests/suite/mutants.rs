//! The suite catches mutants: backends that break one promise each.

use std::sync::Arc;

use highwater_conformance::{
    Launcher, MutantOptions, MutantProgress, Outcome, Score, mutants, run_mutants, serve_peer,
};
use highwater_hal::{Backend, Result};
use highwater_mock::{MockGpu, MockOptions};

fn open() -> Result<Arc<dyn Backend>> {
    Ok(MockGpu::open(MockOptions::new().with_devices(2))?)
}

#[test]
#[ignore = "the second process of cases about sharing, which start it themselves"]
fn peer() {
    if let Some(served) = serve_peer(open) {
        served.unwrap();
    }
}

fn options() -> MutantOptions {
    let launcher = Launcher::current_executable().unwrap();
    MutantOptions::new().with_launcher(launcher.with_arguments([
        "mutants::peer",
        "--exact",
        "--ignored",
        "--nocapture",
    ]))
}

/// Runs mutants, with a line for each.
fn score(options: &MutantOptions) -> Score {
    run_mutants(open, options, &mut |progress| {
        if let MutantProgress::Finished { verdict, index, total, .. } = progress {
            let told = match &verdict.outcome {
                Outcome::Caught { case, by_its_clause, failure, .. } => {
                    let by = if *by_its_clause { "" } else { "another clause's " };
                    format!("caught by {by}{}: {failure}", case.name)
                }
                Outcome::Skipped(why) => format!("skipped: {why}"),
                _ => "survived".to_owned(),
            };
            println!(
                "{}/{total} {} [{}] {:.2?} {told}",
                index + 1,
                verdict.mutant.name,
                verdict.mutant.clause,
                verdict.duration
            );
        }
    })
}

#[test]
fn a_sample_of_mutants_is_caught() {
    let score = score(&options().with_every(8));
    assert!(score.is_success(), "{score}");
}

#[test]
#[ignore = "minutes: every mutant"]
fn every_mutant_is_caught() {
    let score = score(&options());
    println!("{score}");
    assert!(score.is_success(), "{score}");
    assert_eq!(score.mutants(), mutants().count(), "{score}");
}
