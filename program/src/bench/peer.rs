//! The values of the peer: PyTorch's, from its program or from a file that the program wrote.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

use anyhow::Result;
use highwater::ErrorKind;
use serde_json::{Map, Value};

use super::super::args::PeerSource;
use super::super::failure::Failure;
use super::super::output;
use super::{Bench, Part};

/// `scripts/bench-pytorch.py` is a link to it.
const PROGRAM: &str = include_str!("pytorch.py");

/// Returns the peer's values by the names of the rows. Without a real device, PyTorch is not measured.
pub(super) fn values(bench: &Bench<'_>, source: &PeerSource) -> Result<BTreeMap<String, f64>> {
    match source {
        PeerSource::None => Ok(BTreeMap::new()),
        // PyTorch has no such calls: a tensor is opened by its own process, and no future waits for a stream.
        PeerSource::Auto if matches!(bench.part, Part::Share | Part::Waits) => Ok(BTreeMap::new()),
        PeerSource::Auto if bench.backend.identity().real_device => Ok(measured(bench).unwrap_or_default()),
        PeerSource::Auto => Ok(BTreeMap::new()),
        PeerSource::File(path) => {
            let fail = |message| Failure::new(ErrorKind::InvalidArgument, message, HINT);
            let name = path.display();
            let text = fs::read_to_string(path)
                .map_err(|error| fail(format!("the peer's values in {name} cannot be read")).because_of(error))?;
            Ok(parse(&text).map_err(|why| fail(format!("the peer's values in {name}: {why}")))?)
        }
    }
}

const HINT: &str = "write the file with scripts/bench-pytorch.py: one object of the rows' names and numbers";

fn parse(text: &str) -> Result<BTreeMap<String, f64>, String> {
    let object: Map<String, Value> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let number = |(name, value): (String, Value)| match value.as_f64() {
        Some(number) => Ok((name, number)),
        None => Err(format!("`{name}` is no number")),
    };
    object.into_iter().map(number).collect()
}

/// Runs the program. Returns `None` if there is no Python, no PyTorch, or no device for it.
fn measured(bench: &Bench<'_>) -> Option<BTreeMap<String, f64>> {
    let mut command = Command::new("python3");
    command.args([
        "-c",
        PROGRAM,
        bench.part.name(),
        "--seeds",
        &bench.seeds.to_string(),
        "--rounds",
        &bench.rounds.to_string(),
    ]);
    command.args(["--rows", bench.rows.unwrap_or_default()]);
    let threads = bench.threads.map(|threads| threads.to_string());
    command.args(threads.iter().flat_map(|threads| ["--threads", threads]));
    output::line("PyTorch, if it is installed, measures its side first");
    let run = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok().filter(|run| run.status.success())?;
    parse(&String::from_utf8(run.stdout).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_numbers_by_name() {
        assert_eq!(parse(r#"{"hit_4KiB_t1": 101}"#), Ok(BTreeMap::from([("hit_4KiB_t1".into(), 101.0)])));
        assert!(parse(r#"{"hit": "fast"}"#).unwrap_err().contains("`hit` is no number"));
        assert!(parse("[1]").is_err() && parse("").is_err());
    }
}
