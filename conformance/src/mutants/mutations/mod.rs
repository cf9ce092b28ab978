//! The mutants: one table for each part of the traits.

use std::collections::HashSet;

use highwater_hal::StreamId;

use super::Mutant;
use super::hooks::Hooks;
use super::state::Shared;

/// Makes the table of a file. Each clause has its mutants, with name, needs, description and hooks.
macro_rules! mutants {
    ($(in $clause:literal: $(
        $name:literal $([$shown:ident])? $(needs [$($($need:ident)::+),+])? $(survives $why:literal)?: $what:literal
            => $hooks:expr;
    )*)*) => {
        pub(super) const MUTANTS: &[crate::mutants::Mutant] = &[$($(
            crate::mutants::Mutant::new($name, $clause, $what, $hooks)
                $(.$shown())?$(.needing(&[$(crate::case::needs::$($need)::+),+]))?$(.survives($why))?
        ),*),*];
    };
}

mod captures;
mod copies;
mod events;
mod foreign;
mod graphs;
mod handles;
mod host;
mod identity;
mod ids;
mod lacking;
mod layers;
mod mapped;
mod memory;
mod plans;
mod products;
mod rows;
mod sharing;
mod streams;
mod threads;

/// The tables in the order of a run.
pub(super) const LISTS: &[&[Mutant]] = &[
    identity::MUTANTS,
    ids::MUTANTS,
    lacking::MUTANTS,
    streams::MUTANTS,
    events::MUTANTS,
    memory::MUTANTS,
    mapped::MUTANTS,
    copies::MUTANTS,
    rows::MUTANTS,
    host::MUTANTS,
    products::MUTANTS,
    handles::MUTANTS,
    plans::MUTANTS,
    captures::MUTANTS,
    graphs::MUTANTS,
    threads::MUTANTS,
    sharing::MUTANTS,
    foreign::MUTANTS,
    layers::MUTANTS,
];

/// Returns the ids that were made of foreign streams.
fn foreign_streams(hooks: &mut Hooks) -> Shared<HashSet<StreamId>> {
    let foreign = Shared::<HashSet<StreamId>>::default();
    let made = foreign.clone();
    hooks.backend.stream_from_raw(move |reference, device, raw| {
        let stream = reference.stream_from_raw(device, raw)?;
        made.with(|made| made.insert(stream));
        Ok(stream)
    });
    foreign
}

/// Returns the living streams, the oldest first.
fn living_streams(hooks: &mut Hooks) -> Shared<Vec<StreamId>> {
    let streams = Shared::<Vec<StreamId>>::default();
    let (made, gone) = (streams.clone(), streams.clone());
    hooks.backend.create_stream(move |reference, device, options| {
        let stream = reference.create_stream(device, options)?;
        made.with(|streams| streams.push(stream));
        Ok(stream)
    });
    hooks.backend.destroy_stream(move |reference, stream| {
        gone.with(|streams| streams.retain(|other| *other != stream));
        reference.destroy_stream(stream)
    });
    streams
}
