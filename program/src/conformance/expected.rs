//! The cases that are known to fail, with the reason. The list is data: `expected.json` beside this file, by the
//! name of the backend and then of the case. A listed case that passes fails the run, so the list stays up to date.

use anyhow::Result;
use highwater::ErrorKind;
use highwater_conformance::Options;
use serde_json::{Map, Value};

use super::super::failure::Failure;

const KNOWN: &str = include_str!("expected.json");

/// Adds the known failures of a backend to the options.
pub(super) fn with_expected_failures(options: Options, backend: &str) -> Result<Options> {
    let known: Map<String, Value> = serde_json::from_str(KNOWN).map_err(|error| {
        let hint = "this program was built from a list of known failures that is no JSON; build it again";
        Failure::new(ErrorKind::InvalidState, "the list of known failures cannot be read", hint).because_of(error)
    })?;
    let Some(cases) = known.get(backend).and_then(Value::as_object) else { return Ok(options) };
    let add = |options: Options, (case, reason): (&String, &Value)| {
        options.with_expected_failure(case, reason.as_str().unwrap_or_default())
    };
    Ok(cases.iter().fold(options, add))
}

#[cfg(test)]
mod tests {
    use highwater_conformance::cases;

    use super::*;

    #[test]
    fn every_entry_names_a_case_and_has_a_reason() {
        let known: Map<String, Value> = serde_json::from_str(KNOWN).unwrap();
        for (backend, failures) in &known {
            for (case, reason) in failures.as_object().unwrap() {
                assert!(cases().any(|known| known.name == case), "{backend}: there is no case `{case}`");
                assert!(!reason.as_str().unwrap().is_empty(), "{backend}: `{case}` fails without a reason");
            }
        }
        assert!(with_expected_failures(Options::new(), "mock").unwrap().expected_failures.is_empty());
    }
}
