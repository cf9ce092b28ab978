//! Opens one plugin in this process, and explains its refusal.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use highwater_hal::{Backend, Error, ErrorKind};
use highwater_plugin::{LoadOptions, Refusal, Stage, TABLE_VERSIONS};

use super::super::choice::Failure;
use super::super::report::OPERATION;
use super::super::report::Outcome;
use super::manifest::platform;

/// A loaded plugin with its open backend.
pub(super) struct Loaded {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) warnings: Vec<String>,
    pub(super) backend: Arc<dyn Backend>,
}

/// Loads a plugin into this process and opens its backend. The limit is for its constructors and its entry point.
pub(super) fn load(file: &Path, limit: Duration) -> Result<Loaded, Failure> {
    let opened = highwater_plugin::load(file, &LoadOptions::new().with_limit(limit))
        .and_then(|plugin| Ok((plugin.open()?, plugin)));
    let (backend, plugin) = opened.map_err(|refusal| refused(&refusal))?;
    Ok(Loaded {
        name: plugin.name().to_owned(),
        version: plugin.version().to_owned(),
        warnings: plugin.warnings(),
        backend,
    })
}

/// Returns the outcome that a refusal means.
pub(super) fn outcome_of(refusal: &Refusal) -> Outcome {
    match refusal.stage {
        // The loader is blocked, and the library may be there.
        Stage::Library if refusal.error.kind() == ErrorKind::InvalidState => Outcome::Failed,
        Stage::Library => Outcome::LibraryMissing,
        Stage::Platform => Outcome::WrongPlatform,
        Stage::Symbol => Outcome::SymbolMissing,
        Stage::EntryPoint if refusal.error.kind() == ErrorKind::SymbolMissing => Outcome::NoEntryPoint,
        Stage::Version => Outcome::VersionOutOfRange,
        Stage::Table => Outcome::BadTable,
        Stage::Open => Outcome::of(&refusal.error),
        _ => Outcome::Failed,
    }
}

/// Returns the slot of the table at which a plugin was refused, and the reason.
pub(super) fn reason_of(refusal: &Refusal) -> String {
    let message = refusal.error.message();
    match &refusal.slot {
        Some(slot) if !message.contains(slot) => format!("slot `{slot}`: {message}"),
        _ => message.to_owned(),
    }
}

fn refused(refusal: &Refusal) -> Failure {
    let outcome = outcome_of(refusal);
    let mut error = Error::new(refusal.error.kind(), refusal.error.operation(), reason_of(refusal));
    if let Some(code) = refusal.error.code() {
        error = error.with_code(code);
    }
    with_hint(outcome, error.with_hint(refusal.error.hint()))
}

/// Returns a failure of this outcome, with a remedy.
pub(super) fn failure(outcome: Outcome, reason: impl Into<String>, hint: &str) -> Failure {
    let kind = match outcome {
        Outcome::LibraryMissing => ErrorKind::LibraryMissing,
        Outcome::SymbolMissing | Outcome::NoEntryPoint => ErrorKind::SymbolMissing,
        Outcome::DeviceMissing => ErrorKind::DeviceMissing,
        Outcome::InvalidManifest => ErrorKind::InvalidArgument,
        Outcome::NotPermitted => ErrorKind::PermissionDenied,
        Outcome::Unsupported | Outcome::WrongPlatform | Outcome::VersionOutOfRange | Outcome::BadTable => {
            ErrorKind::Unsupported
        }
        _ => ErrorKind::Vendor,
    };
    with_hint(outcome, Error::new(kind, OPERATION, reason).with_hint(hint))
}

/// Adds the usual hint if there is none.
fn with_hint(outcome: Outcome, error: Error) -> Failure {
    let usual = match outcome {
        Outcome::LibraryMissing => {
            "install the library that is named, or put its folder on the loader's path".to_owned()
        }
        Outcome::SymbolMissing => {
            "the plugin and a library that it needs are of different versions; update both".to_owned()
        }
        Outcome::WrongPlatform => format!("install the plugin for {}", platform()),
        Outcome::NoEntryPoint => {
            "this is not a plugin of Highwater, or it was built without its entry point; remove it".to_owned()
        }
        Outcome::VersionOutOfRange => format!(
            "update the plugin or this program, which understands versions {} to {} of the table",
            TABLE_VERSIONS.start(),
            TABLE_VERSIONS.end()
        ),
        Outcome::BadTable => "ask the plugin's vendor for a version that keeps to the table".to_owned(),
        Outcome::DeviceMissing => "check that the device exists and that this process may use it".to_owned(),
        Outcome::CrashedInProbe | Outcome::HungInProbe => {
            "it would have happened to this process; ask the plugin's vendor, or remove the plugin".to_owned()
        }
        _ => "ask the plugin's vendor, or remove the plugin".to_owned(),
    };
    let error = if error.hint().is_empty() { error.with_hint(usual) } else { error };
    Failure::new(outcome, error)
}
