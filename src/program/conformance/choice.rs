//! Which backend is tested. The program starts itself again, for the cases and for their second processes; each of its
//! processes opens the backend by the same choice.

use std::sync::Arc;

use anyhow::Result;
use highwater::{Backend, ErrorKind};
use highwater_conformance::Launcher;

use super::super::args::BackendArguments;
use super::super::failure::Failure;

/// A backend as the command line names it.
#[derive(Debug, Clone)]
pub(super) struct Choice {
    name: String,
}

impl Choice {
    pub(super) fn of(arguments: &BackendArguments) -> Self {
        Self { name: arguments.backend.clone() }
    }

    /// The name under which it is listed: that of the known failures.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn open(&self) -> highwater::Result<Arc<dyn Backend>> {
        Ok(highwater::open(&self.name)?.backend)
    }

    /// The arguments that make the same choice.
    pub(super) fn arguments(&self) -> Vec<String> {
        vec!["--backend".into(), self.name.clone()]
    }

    /// Starts this program again as the second process of a case.
    pub(super) fn launcher(&self) -> Result<Launcher> {
        let executable = Launcher::current_executable().map_err(|error| {
            let hint = "check that `/proc` is mounted";
            let kind = ErrorKind::OperatingSystem;
            Failure::new(kind, "the system does not say where this program is", hint).because_of(error)
        })?;
        Ok(executable.with_arguments(["conformance".to_owned()]).with_arguments(self.arguments()))
    }
}
