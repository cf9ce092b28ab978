//! Highwater hands the threads of a GPU program what they share: BLAS handles, workspaces, page-locked host memory and
//! device memory of other processes, over CUDA, ROCm or a mock device.
//!
//! This crate is the front door. It re-exports everything of `highwater-core` and opens a backend: [`open`] takes one by
//! name and never another in its place, [`open_auto`] takes the best that works here, and [`survey`] only looks;
//! [`OpenOptions`] does the same with everything that can be chosen. Each answers with a [`LoadReport`] that says of every backend
//! why it was or was not taken.
//!
//! # Three ways of use
//! **In a program.** Choose backends by feature (`mock`, `cuda`, `rocm`; all add up, and all build where there is no GPU
//! software), open one, and give it to a [`Runtime`], which owns the pools. A vendor's libraries are looked for at run
//! time, so one binary runs on machines with any of them or none.
//!
//! ```
//! match highwater::open_auto(true) {
//!     Ok(opened) => {
//!         let runtime = highwater::Runtime::new(opened.backend)?;
//!         let device = runtime.device(0)?;
//!         println!("{}: {} bytes of memory", device.info().name, device.info().memory_bytes);
//!     }
//!     Err(error) => eprintln!("{error}\n{}", error.report),
//! }
//! # Ok::<(), highwater::Error>(())
//! ```
//!
//! **In a unit test.** Open the backend `mock`: the same traits and the same results, computed on the CPU, and faults
//! where the test asks for them. Code that takes `&dyn Backend` or `Arc<dyn Backend>` does not know the difference.
//!
//! **Below it all.** A vendor or a laboratory implements the four traits [`Backend`], [`BlasHandle`], [`HostAllocator`]
//! and [`IpcSharing`] over a device of its own; each method lists the promises that it makes.
//!
//! # Backends that are found at run time
//! With the feature `plugins`, a backend may also be a plugin: a library that is found by its manifest `NAME.toml` in one of a few
//! folders, and opened by its name or by its path. A built-in backend comes before a plugin of the same name. Plugins are code, so files
//! that other users could change are refused. `docs/plugins.md` has the folders, the format and the rules.
//!
//! # What this version drives
//! The mock, NVIDIA's GPUs, and AMD's; the last only over AMD's libraries without a device and over simulated ones so far, for
//! lack of an AMD GPU.

#![forbid(unsafe_code)]

mod open;

pub use highwater_core::*;
#[cfg(feature = "cuda")]
pub use highwater_cuda as cuda;
#[cfg(feature = "mock")]
pub use highwater_mock as mock;
#[cfg(feature = "plugins")]
pub use highwater_plugin as plugin;
#[cfg(feature = "rocm")]
pub use highwater_rocm as rocm;

#[cfg(feature = "plugins")]
pub use open::serve_probe;
pub use open::{
    Candidate, LoadReport, OpenError, OpenOptions, Opened, Origin, Outcome, Place, PlaceKind, backends, open,
    open_auto, survey,
};

/// The examples of the README, compiled and run with the other doc tests.
#[cfg(all(doctest, feature = "mock"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// The example of the mock's README, likewise: the mock itself does not depend on `Runtime`.
#[cfg(all(doctest, feature = "mock"))]
#[doc = include_str!("../backend-mock/README.md")]
struct MockReadme;

/// The examples of the page on the race finder, likewise.
#[cfg(all(doctest, feature = "mock"))]
#[doc = include_str!("../docs/race-finder.md")]
struct RaceFinder;

/// The example of the README that the registry shows, likewise.
#[cfg(all(doctest, feature = "mock"))]
#[doc = include_str!("README.md")]
struct RegistryReadme;
