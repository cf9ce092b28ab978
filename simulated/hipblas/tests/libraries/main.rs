//! The simulated libraries of AMD as a program meets them: opened by their names, called through their symbols.
//!
//! Each test runs in processes of its own under `scripts/simulated.sh`, one for each version of HIP, because what a test does
//! to its devices holds for its whole process, and because some rules end the process. The first test that runs builds the
//! libraries.
//!
//! With `HIGHWATER_TEST_INSIDE` set to 6 or 7 a test runs right away, over whatever the loader finds of that version: one at
//! a time (`--exact NAME`), on a machine with a GPU, that tells where the simulation and the vendor differ.

mod captures;
mod devices;
mod events;
mod memory;
mod products;
mod rig;
mod script;
mod sharing;
mod streams;
