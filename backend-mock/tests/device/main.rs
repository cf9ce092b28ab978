//! The mock from outside, through the traits, one file per subject.

mod capture;
mod epilogues;
mod foreign;
mod life;
mod limits;
mod mapped;
mod memory;
mod peer;
mod precision;
mod products;
mod race_model;
mod race_operands;
mod race_threads;
mod races;
mod reference;
mod reuse;
mod rig;
mod schedules;
mod shared_events;
mod sharing;
mod streams;
mod test_mode;
