//! Mutants: backends that are wrong on purpose, to prove that the suite notices.
//!
//! A suite that passes a right backend says little before it has failed wrong ones. Each [`Mutant`] wraps a right
//! backend and breaks one promise, one clause of the traits, in one way; everything else it hands on. [`run_mutants`]
//! gives each to the suite: first to the cases that name its clause, where one of them has to fail, and only if none
//! does to all the others. The [`Score`] says which were caught, by which case, and which were not.
//!
//! - `hooks`: where a mutant can step in, one hook for each method; `reference`: the backend behind it
//! - `wrapper`: the backend that hands everything on, except where there is a hook
//! - `mutations`: the mutants, one file for each part of the traits; `note`: what they remember
//! - `run`: gives them to the suite, each case with a limit of time
//!
//! # Adding a mutant
//! Write an entry in the list of its part under `mutations/`: a name, the clause that it breaks, a sentence that says what it
//! does, and a function that sets its hooks. No two break the same method in the same way. What would corrupt the
//! memory of the process is broken in a way that a backend which checks its arguments survives, as simulated devices do.
//! A table of all in `docs/conformance.md` is held against the list by a test.

mod hooks;
mod mutations;
mod reference;
mod run;
mod state;
#[cfg(test)]
mod tests;
mod wrapper;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use highwater_hal::{Backend, Error, ErrorKind, Result, display_foreign};

pub use run::{MutantOptions, MutantProgress, Outcome, Score, Survivor, Verdict, run_mutants};

use hooks::Hooks;
use wrapper::Wrapper;

/// A way to break one clause, as a wrapper around a backend that keeps it.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Mutant {
    /// Its name; unique.
    pub name: &'static str,
    /// The clause that it breaks, as it stands in the documentation of the traits.
    pub clause: &'static str,
    /// What it does wrong, in one sentence.
    pub what: &'static str,
    /// Whether its mistake shows only where two processes share something, for which the suite needs a
    /// [`Launcher`](crate::Launcher).
    pub needs_launcher: bool,
    /// Why no case can notice it, where that is so.
    pub survives: Option<&'static str>,
    act: fn(&mut Hooks),
}

impl Mutant {
    const fn new(name: &'static str, clause: &'static str, what: &'static str, act: fn(&mut Hooks)) -> Self {
        Self { name, clause, what, needs_launcher: false, survives: None, act }
    }

    const fn by_two_processes(mut self) -> Self {
        self.needs_launcher = true;
        self
    }

    const fn survives(mut self, why: &'static str) -> Self {
        self.survives = Some(why);
        self
    }

    /// The backend with this mutant before it.
    ///
    /// # Safety
    /// The result does not keep what [`Backend`] has to keep, so no `Runtime` may be made
    /// of it, and no other code that trusts a backend: it is for the suite. `backend` checks ids and ranges, as the mock
    /// does; a mutant may hand it a range that reaches out of its block.
    #[must_use]
    pub unsafe fn wrap(&self, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
        self.wrap_until(backend, Arc::default())
    }

    /// The same, until it is stopped: then calls fail, except those that give something back.
    fn wrap_until(&self, backend: Arc<dyn Backend>, stopped: Arc<AtomicBool>) -> Arc<dyn Backend> {
        let mut hooks = Hooks::default();
        (self.act)(&mut hooks);
        Arc::new(Wrapper::new(backend, hooks, stopped))
    }
}

impl fmt::Debug for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutant").field("name", &self.name).field("clause", &self.clause).finish_non_exhaustive()
    }
}

/// Every mutant, in the order of a run.
pub fn mutants() -> impl Iterator<Item = &'static Mutant> {
    mutations::LISTS.iter().copied().flatten()
}

/// The environment variable that tells the second process of a case which mutant it has.
const VARIABLE: &str = "HIGHWATER_CONFORMANCE_MUTANT";

/// The backend of a second process, with the mutant that the first one has, if any.
pub(crate) fn as_in_the_first_process(backend: Arc<dyn Backend>) -> Result<Arc<dyn Backend>> {
    let Some(name) = std::env::var_os(VARIABLE) else { return Ok(backend) };
    match mutants().find(|mutant| *mutant.name == *name) {
        Some(mutant) => Ok(mutant.wrap_until(backend, Arc::default())),
        None => Err(Error::new(
            ErrorKind::InvalidArgument,
            "serve_peer",
            format!("{VARIABLE} is `{}`, which is no mutant", display_foreign(&name)),
        )
        .with_hint("unset the variable; a run of mutants sets it for the processes that it starts")),
    }
}
