//! The mock from outside, through the traits, one file per subject.

mod life;
mod limits;
mod memory;
mod products;
mod rig;
mod streams;
