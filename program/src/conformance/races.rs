//! `highwater conformance --races`: the mock's race finder on known mistakes and on their corrections.

use anyhow::Result;
use highwater::mock::races::{Detail, Measured, measure};
use serde_json::{Value, json};
use tracing::subscriber::{NoSubscriber, with_default};

use super::super::{Verdict, output, soak};

pub(super) fn command(json: bool) -> Result<Verdict> {
    let seed = soak::any_seed();
    // The reports of the mocks are expected, and no warnings.
    let measured = with_default(NoSubscriber::new(), || measure(seed))?;
    if json {
        output::object(&to_json(&measured, seed))?;
    } else {
        print(&measured, seed)?;
    }
    let all = measured.found == measured.seeded && measured.false_reports == 0;
    Ok(if all { Verdict::Good } else { Verdict::Bad })
}

fn to_json(measured: &Measured, seed: u64) -> Value {
    let mistake = |detail: &Detail| {
        let reports: Vec<String> =
            detail.races.iter().map(|race| format!("{:?}", race.kind()).to_lowercase()).collect();
        json!({
            "name": detail.example.name,
            "found": detail.is_found(),
            "false_reports": detail.false_reports(),
            "reports": reports,
        })
    };
    json!({
        "seeded": measured.seeded,
        "found": measured.found,
        "false_reports": measured.false_reports,
        "seed": seed,
        "mistakes": measured.details.iter().map(mistake).collect::<Vec<_>>(),
    })
}

fn print(measured: &Measured, seed: u64) -> Result<()> {
    for detail in measured.details.iter().filter(|detail| !detail.is_found() || detail.false_reports() > 0) {
        let found = if detail.is_found() { "found" } else { "not found" };
        output::result(format_args!("{}: {found}, {} false reports", detail.example.name, detail.false_reports()))?;
        for race in detail.races.iter().chain(&detail.races_when_corrected) {
            output::result(format_args!("  {race}"))?;
        }
    }
    let Measured { seeded, found, false_reports, .. } = measured;
    output::result(format_args!("{found} of {seeded} mistakes found, {false_reports} false reports (seed {seed})"))?;
    Ok(())
}
