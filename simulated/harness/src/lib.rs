//! Runs rules over whichever vendor libraries the loader finds, real or simulated.
//!
//! A rule states what a vendor's library does, as the outcome of calls. Rules about a process, such as a lost context or an
//! abort, need a process of their own, so every rule can run in a child of the test program.
//!
//! - [`isolated!`] makes rules that the standard test program lists, filters and runs in parallel. Each runs in a child under
//!   `scripts/simulated.sh`, once for each of its vendors, or over the libraries at hand.
//! - [`rules!`] makes rules with a statement and needs for [`run::Suite`], which runs them over one installation, records
//!   every observation, and reports each rule as kept, broken, or left out. Two records compare a simulation with a device.
//! - [`library!`] declares the functions of a library by their symbols.
//! - [`script`] reads what `scripts/simulated.sh` lays out. [`values`] has matrices of every type and products of them in
//!   64 bits. [`gate`] has work that blocks a stream until it is let through.

pub mod gate;
pub mod isolated;
pub mod library;
pub mod log;
pub mod run;
pub mod script;
pub mod values;

/// The outcome of a part of a rule: an error says why the rule could not go on.
pub type Answer<T = ()> = Result<T, String>;

/// A pointer that a rule uses in several threads.
#[derive(Debug, Clone, Copy)]
pub struct Shared(pub *mut std::ffi::c_void);

// SAFETY: the vendors' libraries take their handles in any thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Returns the pointer.
    #[must_use]
    pub fn get(self) -> *mut std::ffi::c_void {
        self.0
    }
}
