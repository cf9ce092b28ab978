//! A conformance suite for Highwater backends: the promises of the traits as named cases that run against any backend.
//!
//! The documentation of `highwater_hal`'s traits lists the promises of each method as *clauses* with ids, such as
//! `stream.order` or `event.wait-snapshot`. A [`Case`] tests one clause, or a few, through `&dyn Backend` alone, and names their
//! ids. The same cases run on the mock, on real devices, and on your own backend.
//!
//! # Running the suite against your backend
//! Open the backend, pass it to [`run`], and check the [`Report`]. In a test of your crate:
//!
//! ```
//! use highwater_conformance::{Options, run};
//! # use highwater_mock::{MockGpu, MockOptions};
//!
//! # fn open_my_backend() -> highwater_hal::Result<std::sync::Arc<MockGpu>> { MockGpu::open(MockOptions::new()) }
//! let backend = open_my_backend()?;
//! # let all = Options::new();
//! # let options = all.with_filter("identity.");
//! # stringify! {
//! let options = Options::new();
//! # };
//! let report = run(&*backend, &options);
//! assert!(report.is_success(), "{report}");
//! # Ok::<(), highwater_hal::Error>(())
//! ```
//!
//! Cases of sharing start a second process that opens the same backend, by the [`Launcher`] of the options. That process
//! calls [`serve_peer`]. It is usually the same executable; see [`Launcher`] for an example in a test. Without a launcher,
//! these cases are skipped.
//!
//! [`run_observed`] reports progress. [`Options::with_filter`] selects cases by name or by clause. A case with a known failure
//! belongs into [`Options::with_expected_failure`] with its reason. It is reported separately, and fails the run once it passes.
//!
//! # What a case proves
//! A case that passes has observed the behavior that its clauses promise, in the situations that it creates. The design of the
//! suite makes this observation as strong as possible:
//!
//! - **Cases are black boxes.** They use no knowledge of an implementation, so a backend over a driver and one over the CPU run
//!   the same cases. A capability that the device lacks skips the cases that need it. The group `lacking` tests the opposite: a
//!   call that needs an absent capability must give `Unsupported` (`backend.lacking`).
//! - **Validation.** Every call of a case passes a layer that records the objects that the case makes and gives back. The layer
//!   judges the backend's answers: an object that is left over, freed twice, used after its end, or counted wrongly fails the case,
//!   whatever the case itself observes.
//! - **Fault sweep.** [`sweep`] runs each case again for each fallible call that it makes, with that call refused. Nothing may
//!   leak, hang or crash, because a caller's error path deserves the same promises.
//! - **Mutants.** [`mutants`] lists backends that are wrong on purpose: wrappers that break one clause each. [`run_mutants`]
//!   reports which of them the suite catches, and by which case. Every clause has at least one mutant. A mutant that survives
//!   shows what the cases do not observe.
//! - **No timing.** A case never measures speed. It shows that a call does not wait while a stream is busy with copies whose time
//!   was measured first. If the work is complete too early, the case repeats the observation with up to 256 times as much work. A
//!   loaded machine gets more attempts than a quiet one, and a failure says so. A backend that executes work inside its calls
//!   never leaves work outstanding, and the failure says so too.
//!
//! ```
//! use highwater_conformance::{MutantOptions, run_mutants};
//! # use highwater_mock::{MockGpu, MockOptions};
//!
//! # fn open_my_backend() -> highwater_hal::Result<std::sync::Arc<dyn highwater_hal::Backend>> {
//! #     Ok(MockGpu::open(MockOptions::new())?)
//! # }
//! let options = MutantOptions::new().with_filter("memory.zero");
//! let score = run_mutants(open_my_backend, &options, &mut |_| {});
//! assert!(score.is_success(), "{score}");
//! ```
//!
//! # What the suite cannot prove
//! - A race that did not happen. Cases make races likely; they cannot enumerate schedules.
//! - Effects outside the memory that a case can read. A product may ignore the workspace that was bound, for example: no byte
//!   that the suite can see reveals it.
//! - Anything about a backend that corrupts memory. A backend that writes elsewhere, or reports work complete too early, can
//!   harm the process that tests it, and one that hangs blocks it. Test an unknown backend in its own process: [`run_on`] takes an
//!   [`Executor`], and the program `highwater` has one.
//!
//! # What a case may assume
//! - The case has the backend to itself. After the case, `live_objects()` must be what it was before.
//! - The case uses device 0, unless it is about several devices. With one device, those cases are skipped. With two, most cases
//!   run again with the ordinals of the devices exchanged.
//! - The second process has one stream and follows the commands of the case over a socket. If it does not answer within 30 seconds,
//!   it is killed and the case fails. No second process outlives its case.
//!
//! # Adding a case
//! Write a function in the file of its group under `cases/`, and a line in the list of that file. A test of this crate refuses a
//! clause that the traits do not document, and requires a case for each clause. Add a mutant that only the new case catches.
//! Make objects through the guards of `device`: a case that fails then leaves nothing behind, and a release that the sweep refused
//! is repeated.

mod case;
mod cases;
mod device;
mod exchanged;
mod idle_stream;
mod matrix;
mod mutants;
mod options;
mod peer;
mod random;
mod raw_calls;
mod report;
mod retry;
mod run;
mod seed;
mod stream_load;
mod sweep;
mod validation;

pub use case::{Case, Need};
pub use cases::{CellAxis, CellTable, cases, cell_tables, clauses_without_case};
pub use highwater_hal::{Clause, clauses};
pub use mutants::{
    Class, Mutant, MutantOptions, MutantProgress, Mutated, Outcome, Score, Survivor, Verdict, generated_mutants,
    mutants, run_mutants, run_mutants_on,
};
pub use options::{Expectation, Options};
pub use peer::{Launcher, serve_peer};
pub use raw_calls::{RawCalls, RawHandle};
pub use report::{CaseReport, Progress, Report, Status};
pub use run::{Executor, InProcess, run, run_observed, run_on};
pub use seed::seed;
pub use sweep::{Calls, Fault, Faulted, Points, SweepFailure, SweepProgress, SweepReport, sweep, sweep_on};

/// The example of the README, compiled with the other doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
