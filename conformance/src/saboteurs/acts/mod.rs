//! The saboteurs themselves, one file for each part of the traits.

use highwater_hal::StreamId;

use super::Saboteur;
use super::hooks::Hooks;
use super::note::Note;

mod captures;
mod copies;
mod events;
mod graphs;
mod handles;
mod host;
mod identity;
mod ids;
mod lacking;
mod memory;
mod plans;
mod products;
mod sharing;
mod streams;
mod threads;

/// The lists in the order of a run.
pub(super) const LISTS: &[&[Saboteur]] = &[
    identity::SABOTEURS,
    ids::SABOTEURS,
    lacking::SABOTEURS,
    streams::SABOTEURS,
    events::SABOTEURS,
    memory::SABOTEURS,
    copies::SABOTEURS,
    host::SABOTEURS,
    products::SABOTEURS,
    handles::SABOTEURS,
    plans::SABOTEURS,
    captures::SABOTEURS,
    graphs::SABOTEURS,
    threads::SABOTEURS,
    sharing::SABOTEURS,
];

/// The streams that are alive, the oldest first.
fn living_streams(hooks: &mut Hooks) -> Note<Vec<StreamId>> {
    let streams = Note::<Vec<StreamId>>::default();
    let (made, gone) = (streams.clone(), streams.clone());
    hooks.backend.create_stream(move |honest, device, options| {
        let stream = honest.create_stream(device, options)?;
        made.with(|streams| streams.push(stream));
        Ok(stream)
    });
    hooks.backend.destroy_stream(move |honest, stream| {
        gone.with(|streams| streams.retain(|other| *other != stream));
        honest.destroy_stream(stream)
    });
    streams
}
