//! The promises of Highwater's traits as named cases that run against any backend.
//!
//! The documentation of `highwater_hal`'s traits lists, method by method, what a backend promises: *clauses* with ids,
//! such as `stream.order` or `event.wait-snapshot`. A [`Case`] is a function that asks a backend, through
//! `&dyn Backend` and nothing else, to keep one of these promises or a few; it names their ids. The same cases run
//! on the mock, on real devices, and on a backend of your own.
//!
//! # Running the suite against your backend
//! Open the backend, hand it to [`run`], look at the [`Report`]. In a test of your crate that is:
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
//! Cases about what two processes share start a second one that opens the same backend, by the [`Launcher`] of the
//! options. Its process calls [`serve_peer`]; mostly it is the same executable once more, see [`Launcher`] for how that
//! reads in a test. Without a launcher these cases are skipped.
//!
//! Every case runs through a layer that keeps books of what it makes and gives back, and judges the backend's answers: what is
//! left over, freed twice, used after its end or counted wrongly fails the case. [`sweep`] runs each case again for each
//! fallible call that it makes, with that one call refused.
//!
//! [`run_observed`] tells how far the run is; [`Options::with_filter`] runs a part, by name or by clause. A case that
//! fails for a reason that you know goes into [`Options::with_expected_failure`] with that reason: it is reported
//! apart, and as a failure once it passes.
//!
//! # What a case may assume
//! - It has the backend to itself: `live_objects()` after it must be what it was before.
//! - Device 0 is meant unless the case is about several; with one device those are skipped, as are cases about
//!   capabilities that the device lacks. What a device lacks is a promise too (`backend.lacking`): the cases of the
//!   group `lacking` ask for it nevertheless, and run where the capability is false.
//! - Nothing about speed. A promise that something does not wait is shown while a stream is busy with copies whose time
//!   was measured first, and is tried again with up to 128 times as many before the case fails. On a machine that is
//!   busy with other things it is tried more often than on a quiet one, and a failure says so. If the calls of the
//!   backend execute the work themselves, nothing is ever outstanding, and the failure says so.
//! - A second process has one stream and does what the case tells it, over a socket. One that does not answer within half
//!   a minute is killed and the case fails; none is left behind, whatever happens.
//! - The backend is trusted with the memory that it is handed. One that writes elsewhere, or says that work is done
//!   when it is not, can harm the process that tests it: run unknown backends in a process of their own. The same holds
//!   for one that hangs. [`run_on`] takes an [`Executor`] for that; the program `highwater` has one.
//!
//! # Whether the suite notices
//! [`mutants`] lists backends that are wrong on purpose: wrappers that break one clause each. [`run_mutants`] gives
//! them to the suite and says which were caught, by which case. Every clause has one at least.
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
//! # Adding a case
//! Write a function in the file of its group under `cases/`, and a line in that file's list. It proves a clause that
//! stands in the traits: a test of this crate refuses ids that the documentation does not have, and demands a case for
//! each that it has. What a new case is good for shows where a mutant gets away without it. Objects are made through
//! guards, so that a case that fails leaves nothing behind, and that release again what a fault of the sweep refused to
//! release.

mod attempts;
mod busy;
mod bystander;
mod case;
mod cases;
mod clauses;
mod device;
mod matrix;
mod mutants;
mod options;
mod peer;
mod random;
mod report;
mod run;
mod sweep;
mod validation;

pub use case::{Case, Need};
pub use cases::cases;
pub use clauses::clauses_without_case;
pub use highwater_hal::{Clause, clauses};
pub use mutants::{Mutant, MutantOptions, MutantProgress, Outcome, Score, Survivor, Verdict, mutants, run_mutants};
pub use options::{Expectation, Options};
pub use peer::{Launcher, serve_peer};
pub use report::{CaseReport, Progress, Report, Status};
pub use run::{Executor, InProcess, run, run_observed, run_on};
pub use sweep::{Calls, Fault, Faulted, Points, SweepFailure, SweepProgress, SweepReport, sweep, sweep_on};

/// The example of the README, compiled with the other doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
