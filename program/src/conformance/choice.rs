//! The choice of the tested backend. The program starts itself again for the cases, and for their second processes. Each
//! process opens the backend by the same choice.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use highwater::ErrorKind;
use highwater::hal::Backend;
use highwater_conformance::Launcher;

use super::super::args::BackendArguments;
use super::super::backends::{self, Prober};
use super::super::failure::Failure;

/// A backend as the command line names it.
#[derive(Debug, Clone)]
pub(super) enum Choice {
    Named(String),
    /// The file of a plugin.
    Plugin(PathBuf),
}

impl Choice {
    pub(super) fn of(arguments: &BackendArguments) -> Self {
        match &arguments.plugin {
            Some(file) => Self::Plugin(file.clone()),
            None => Self::Named(arguments.backend.clone()),
        }
    }

    /// Returns the name in the list of known failures; `None` for a file.
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Self::Named(name) => Some(name),
            Self::Plugin(_) => None,
        }
    }

    pub(super) fn open(&self, prober: Prober) -> highwater::Result<Arc<dyn Backend>> {
        let opened = match self {
            Self::Named(name) => backends::open_by(name, prober),
            Self::Plugin(file) => {
                highwater::plugin::check_rules();
                backends::open_file(file, prober)
            }
        };
        Ok(opened?.backend)
    }

    /// Returns the arguments that make the same choice.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let choice = match self {
            Self::Named(name) => ["--backend".into(), name.into()],
            Self::Plugin(file) => ["--plugin".into(), file.into()],
        };
        choice.into_iter().chain(backends::arguments_of_children().into_iter().map(OsString::from)).collect()
    }

    /// Returns the launcher that starts this program again as the second process of a case.
    pub(super) fn launcher(&self) -> Result<Launcher> {
        let executable = Launcher::current_executable().map_err(|error| {
            let hint = "check that `/proc` is mounted";
            let kind = ErrorKind::OperatingSystem;
            Failure::new(kind, "the system does not say where this program is", hint).because_of(error)
        })?;
        Ok(executable.with_arguments(["conformance"]).with_arguments(self.arguments()))
    }
}
