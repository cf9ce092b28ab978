//! The load report as structured data. `highwater doctor --json` and the C library write it as JSON.

use std::path::Path;

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

use super::report::{Candidate, LoadReport, Origin, Place};

/// Paths as text. A path that is not UTF-8 is no error.
fn shown(path: Option<&Path>) -> Option<String> {
    path.map(|path| path.display().to_string())
}

/// Writes the fields, with the origin as `built in` or `plugin`, and its files beside it.
impl Serialize for Candidate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { name, origin, outcome, reason, hint, tried, notes } = self;
        let mut fields = serializer.serialize_struct("Candidate", 9)?;
        fields.serialize_field("name", name)?;
        fields.serialize_field("origin", if *origin == Origin::BuiltIn { "built in" } else { "plugin" })?;
        fields.serialize_field("manifest", &shown(origin.manifest()))?;
        fields.serialize_field("library", &shown(origin.library()))?;
        fields.serialize_field("outcome", outcome.as_str())?;
        fields.serialize_field("reason", reason)?;
        fields.serialize_field("hint", hint)?;
        fields.serialize_field("tried", tried)?;
        fields.serialize_field("notes", notes)?;
        fields.end()
    }
}

impl Serialize for Place {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { kind, path, outcome, reason, hint } = self;
        let mut fields = serializer.serialize_struct("Place", 5)?;
        fields.serialize_field("kind", kind.as_str())?;
        fields.serialize_field("path", &shown(path.as_deref()))?;
        fields.serialize_field("outcome", outcome.as_str())?;
        fields.serialize_field("reason", reason)?;
        fields.serialize_field("hint", hint)?;
        fields.end()
    }
}

/// Writes the name of the backend that was taken, the candidates as `backends`, and the places.
impl Serialize for LoadReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { places, candidates } = self;
        let mut fields = serializer.serialize_struct("LoadReport", 3)?;
        fields.serialize_field("taken", &self.taken().map(|candidate| &candidate.name))?;
        fields.serialize_field("backends", candidates)?;
        fields.serialize_field("places", places)?;
        fields.end()
    }
}

#[cfg(all(test, feature = "plugins"))]
mod tests {
    use std::path::PathBuf;

    use highwater_hal::OpenFailure;
    use serde_json::json;

    use super::super::report::{Outcome, PlaceKind};
    use super::*;

    #[test]
    fn a_report_has_every_field_of_its_parts() {
        let candidate = |name: &str, origin, outcome| Candidate {
            name: name.to_owned(),
            origin,
            outcome,
            reason: "a reason".to_owned(),
            hint: "a hint".to_owned(),
            tried: vec![OpenFailure::new("libvendor.so".to_owned(), "no such file".to_owned())],
            notes: vec!["a note".to_owned()],
        };
        let plugin = Origin::Plugin { manifest: Some(PathBuf::from("/p/vendor.toml")), library: None };
        let mut place = Place::new(PlaceKind::UserFolder, Some(PathBuf::from("/home")), Outcome::Absent, "empty");
        place.hint = "fill it".to_owned();
        let report = LoadReport {
            places: vec![place, Place::new(PlaceKind::BackendVariable, None, Outcome::NotSet, "")],
            candidates: vec![
                candidate("mock", Origin::BuiltIn, Outcome::Taken),
                candidate("vendor", plugin, Outcome::LibraryMissing),
            ],
        };
        let backend = |name: &str, origin: &str, manifest: Option<&str>, outcome: &str| {
            json!({
                "name": name, "origin": origin, "manifest": manifest, "library": null, "outcome": outcome,
                "reason": "a reason", "hint": "a hint", "notes": ["a note"],
                "tried": [{ "name": "libvendor.so", "reason": "no such file" }],
            })
        };
        let expected = json!({
            "taken": "mock",
            "backends": [
                backend("mock", "built in", None, "taken"),
                backend("vendor", "plugin", Some("/p/vendor.toml"), "library missing"),
            ],
            "places": [
                { "kind": "user folder", "path": "/home", "outcome": "absent", "reason": "empty", "hint": "fill it" },
                { "kind": "HIGHWATER_BACKEND", "path": null, "outcome": "not set", "reason": "", "hint": "" },
            ],
        });
        assert_eq!(serde_json::to_value(report).expect("the report is plain data"), expected);
    }
}
