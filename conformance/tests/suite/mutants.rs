//! The suite catches mutants: backends that break one promise each.

use std::collections::BTreeSet;
use std::sync::Arc;

use highwater_conformance::{
    Launcher, MutantOptions, MutantProgress, Outcome, Score, generated_mutants, mutants, run_mutants, serve_peer,
};
use highwater_hal::{Backend, Result, clauses};
use highwater_mock::{MockGpu, MockOptions};

fn open() -> Result<Arc<dyn Backend>> {
    Ok(MockGpu::open(MockOptions::new().with_devices(2).with_memory_bytes(6 << 30))?)
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
    let score = score(&options().with_every(24));
    assert!(score.is_success(), "{score}");
}

/// Operations that are left out are noticed on a busy machine too.
#[test]
fn a_sample_of_mutants_by_construction_is_caught() {
    let score = score(&options().with_generated().with_filter("-drop-always").with_every(4));
    assert!(score.is_success() && score.mutants() > 5, "{score}");
}

#[test]
fn mutants_by_construction_have_names_and_clauses_of_their_own() {
    let all = generated_mutants();
    let names: BTreeSet<&str> = all.iter().map(|mutant| mutant.name).collect();
    assert!(names.len() == all.len() && all.len() > 400, "{}", all.len());
    let written: BTreeSet<&str> = mutants().map(|mutant| mutant.name).collect();
    assert_eq!(names.intersection(&written).next(), None);
    for mutant in all {
        assert!(clauses().iter().any(|clause| mutant.breaks(clause.id)), "{mutant:?}");
        assert!(mutant.class().is_some(), "{mutant:?}");
    }
}

#[test]
#[ignore = "minutes: every mutant by construction"]
fn every_mutant_by_construction_is_caught() {
    let score = score(&options().with_generated());
    println!("{score}");
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
