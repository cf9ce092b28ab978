//! Mutants: backends that are wrong on purpose. They prove that the suite can fail.
//!
//! Each [`Mutant`] wraps a right backend, breaks one clause in one way, and forwards everything else. [`run_mutants`] gives
//! each mutant to the cases that name its clause; one of them must fail. Only if none fails, all other cases run. The
//! [`Score`] lists the mutants that were caught, by which case, and the survivors.
//!
//! - `hooks`: one hook for each operation; `reference`: the right backend below
//!
//! - `wrapper`: the backend that forwards every call without a hook
//!
//! - `mutations`: tables of mutants, one file for each part of the traits; `state`: values that hooks share
//!
//! - `generated`: mutants by construction, for each operation alike
//!
//! - `run`: gives mutants to the suite, with a time limit for each case
//!
//! # Adding a mutant
//!
//! Add a row to a table under `mutations/`: name, description, and a function that sets hooks, in the section of its clause.
//! No two mutants break the same method in the same way. A mutant may pass a range that leaves its memory: the layer below it
//! refuses that range, and the backend never sees it. A mutant must not give memory back that work still uses, so one that
//! breaks the waits of the suite sets `Hooks::settles`. `highwater conformance --saboteurs --list` prints all mutants.

mod generated;
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

use highwater_hal::{Backend, Capabilities, Error, ErrorKind, Identity, Result, display_foreign};

use crate::case::Need;
use crate::case::needs::has;

pub use run::{
    Class, MutantOptions, MutantProgress, Mutated, Outcome, Score, Survivor, Verdict, run_mutants, run_mutants_on,
};

use generated::{Applied, Condition, Mutation};
use hooks::Hooks;
use wrapper::Wrapper;

/// A way to break one clause, applied by a wrapper to a backend that keeps it.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Mutant {
    /// The name; unique.
    pub name: &'static str,
    /// The clause that the mutant breaks.
    pub clause: &'static str,
    /// A sentence that says what the mutant does wrong.
    pub what: &'static str,
    /// Whether only sharing between two processes shows the mistake. The suite then needs a [`Launcher`](crate::Launcher).
    pub needs_launcher: bool,
    /// Whether only a block of more than 4 GiB shows the mistake.
    needs_large_block: bool,
    /// Why no case can notice the mutant, if so.
    pub survives: Option<&'static str>,
    /// Clauses that the mutant breaks too.
    also: &'static [&'static str],
    /// The needs of the mutant. It does no wrong on a device that lacks one.
    needs: &'static [Need],
    act: Act,
}

/// What a mutant changes.
#[derive(Clone, Copy)]
enum Act {
    /// Sets hooks.
    Written(fn(&mut Hooks)),
    /// Changes one operation, as every other.
    Generated(Mutation),
}

impl Mutant {
    const fn new(name: &'static str, clause: &'static str, what: &'static str, act: fn(&mut Hooks)) -> Self {
        Self {
            name,
            clause,
            what,
            needs_launcher: false,
            needs_large_block: false,
            survives: None,
            also: &[],
            needs: &[],
            act: Act::Written(act),
        }
    }

    /// Returns the class of a generated mutant: its mistake and its condition.
    #[must_use]
    pub fn class(&self) -> Option<(&'static str, &'static str)> {
        match self.act {
            Act::Written(_) => None,
            Act::Generated(mutation) => Some((mutation.mistake.name(), mutation.condition.name())),
        }
    }

    /// Returns the mutant of this name, written or by construction.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        mutants().chain(generated_mutants()).find(|mutant| mutant.name == name)
    }

    /// Returns why a backend with this identity and number of devices does not get the mutant, if so.
    #[must_use]
    pub fn unfit_for(&self, identity: &Identity, device_count: u32) -> Option<&'static str> {
        match self.act {
            Act::Written(_) => identity.real_device.then_some(
                "a written mutant may give memory back that a real device still uses; use a simulated device",
            ),
            Act::Generated(mutation) => mutation.unfit_for(identity, device_count),
        }
    }

    /// Returns whether the mutant breaks this clause.
    #[must_use]
    pub fn breaks(&self, clause: &str) -> bool {
        self.clause == clause || self.also.contains(&clause)
    }

    /// Returns the reason if the mutant does no wrong around a right backend whose devices have these capabilities.
    #[must_use]
    pub fn unmet(&self, devices: &[Capabilities]) -> Option<String> {
        // One device that meets the need is enough, because the cases run on the first two.
        let seen_from = |device: usize| {
            let mut devices = devices.to_vec();
            devices.swap(0, device);
            devices
        };
        let unmet = |need: &Need| (0..devices.len()).map(|device| need.unmet(&seen_from(device))).min().flatten();
        self.needs.iter().chain(self.implied_need()).find_map(unmet)
    }

    /// Returns the ability that the clause or the condition of the mutant implies. A case of the clause may run without it.
    fn implied_need(&self) -> Option<&'static Need> {
        let condition = match self.act {
            Act::Generated(mutation) => mutation.condition,
            Act::Written(_) => Condition::Always,
        };
        match (condition, self.clause.split('.').next()) {
            (Condition::Priority, _) => Some(&has::stream_priority),
            (Condition::Foreign, _) => Some(&has::foreign_objects),
            (Condition::Recording, _) | (_, Some("capture")) => Some(&has::capture),
            (_, Some("plan")) => Some(&has::lt_plans),
            _ => None,
        }
    }

    const fn needing(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    const fn by_a_large_block(mut self) -> Self {
        self.needs_large_block = true;
        self
    }

    const fn by_two_processes(mut self) -> Self {
        self.needs_launcher = true;
        self
    }

    const fn survives(mut self, why: &'static str) -> Self {
        self.survives = Some(why);
        self
    }

    /// Returns the mutant of a backend.
    ///
    /// # Safety
    ///
    /// The result breaks the clauses that [`Backend`] must keep. The caller must give it to the suite alone, and never to a
    /// `Runtime` or other code that trusts a backend. `backend` must check ids, as the traits ask. It need not check ranges,
    /// because a layer refuses those that leave their memory.
    #[must_use]
    pub unsafe fn wrap(&self, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
        self.wrap_until(backend, Arc::default())
    }

    /// Returns the mutant of a backend. Once `stopped` is set, calls fail, except those that give something back.
    fn wrap_until(&self, backend: Arc<dyn Backend>, stopped: Arc<AtomicBool>) -> Arc<dyn Backend> {
        let mut hooks = Hooks::default();
        let mut applied = None;
        match self.act {
            Act::Written(act) => act(&mut hooks),
            Act::Generated(mutation) => {
                hooks.settles = mutation.operation.starts_with("synchronize");
                applied = Some(Applied::new(mutation, backend.identity().real_device));
            }
        }
        Arc::new(Wrapper::new(backend, hooks, applied, stopped))
    }
}

impl fmt::Debug for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutant").field("name", &self.name).field("clause", &self.clause).finish_non_exhaustive()
    }
}

/// Returns the mutants by construction, in the order of a run.
#[must_use]
pub fn generated_mutants() -> &'static [Mutant] {
    generated::generated()
}

/// Returns every written mutant, in the order of a run.
pub fn mutants() -> impl Iterator<Item = &'static Mutant> {
    mutations::LISTS.iter().copied().flatten()
}

/// The environment variable that names the mutant for the second process of a case.
const VARIABLE: &str = "HIGHWATER_CONFORMANCE_MUTANT";

/// Applies the mutant of the first process, if any, to the backend of a second process.
pub(crate) fn as_in_the_first_process(backend: Arc<dyn Backend>) -> Result<Arc<dyn Backend>> {
    let Some(name) = std::env::var_os(VARIABLE) else { return Ok(backend) };
    match name.to_str().and_then(Mutant::named) {
        Some(mutant) => Ok(mutant.wrap_until(backend, Arc::default())),
        None => Err(Error::new(
            ErrorKind::InvalidArgument,
            "serve_peer",
            format!("{VARIABLE} is `{}`, which is no mutant", display_foreign(&name)),
        )
        .with_hint("unset the variable; a run of mutants sets it for the processes that it starts")),
    }
}
