//! The suite has teeth: wrappers that break one promise each are caught.

use std::sync::Arc;

use highwater_conformance::{
    Launcher, Outcome, SaboteurOptions, SaboteurProgress, Score, run_saboteurs, saboteurs, serve_peer,
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

fn options() -> SaboteurOptions {
    let launcher = Launcher::current_executable().unwrap();
    SaboteurOptions::new().with_launcher(launcher.with_arguments(["peer", "--exact", "--ignored", "--nocapture"]))
}

/// Runs saboteurs, with a line for each.
fn score(options: &SaboteurOptions) -> Score {
    run_saboteurs(open, options, &mut |progress| {
        if let SaboteurProgress::Finished { verdict, index, total, .. } = progress {
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
                verdict.saboteur.name,
                verdict.saboteur.clause,
                verdict.duration
            );
        }
    })
}

#[test]
fn a_sample_of_saboteurs_is_caught() {
    let score = score(&options().with_every(8));
    assert!(score.is_success(), "{score}");
}

#[test]
#[ignore = "minutes: every saboteur"]
fn every_saboteur_is_caught() {
    let score = score(&options());
    println!("{score}");
    assert!(score.is_success(), "{score}");
    assert_eq!(score.saboteurs(), saboteurs().count(), "{score}");
}

/// The table of all saboteurs, as it stands in the documentation.
fn table() -> String {
    let mut table = String::from("| name | clause | what it does wrong |\n| --- | --- | --- |\n");
    for saboteur in saboteurs() {
        let (name, clause, what) = (saboteur.name, saboteur.clause, saboteur.what);
        let known = saboteur.survives.map_or(String::new(), |reason| format!(" *Survives: {reason}.*"));
        table.push_str(&format!("| `{name}` | `{clause}` | {what}{known} |\n"));
    }
    table.push_str(&format!("\n{} saboteurs.\n", saboteurs().count()));
    table
}

#[test]
fn the_table_in_the_documentation_is_the_list() {
    const BEGIN: &str = "<!-- saboteurs: begin -->\n";
    const END: &str = "<!-- saboteurs: end -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/conformance.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page has a mark where the table begins");
    let (old, after) = rest.split_once(END).expect("the page has a mark where the table ends");
    let new = table();
    if std::env::var_os("HIGHWATER_WRITE_DOCS").is_some() {
        std::fs::write(path, [before, BEGIN, &new, END, after].concat()).unwrap();
        return;
    }
    assert!(old == new, "docs/conformance.md has another table; run this test with HIGHWATER_WRITE_DOCS=1");
}
