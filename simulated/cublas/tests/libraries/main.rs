//! The simulated libraries as a program meets them: opened by their names, called through their symbols.
//!
//! Each test runs in a process of its own under `scripts/simulated.sh`, because contexts that a test loses are lost for its
//! whole process. The first test that runs builds the libraries.
//!
//! With `HIGHWATER_TEST_INSIDE` set a test runs right away, over whatever the loader finds: one at a time
//! (`--exact NAME`), on a machine with a GPU, that tells where the simulation and the vendor differ.

mod client;
mod lt;
mod rig;
mod rules;
mod script;
mod values;
