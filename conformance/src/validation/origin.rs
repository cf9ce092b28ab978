//! The line of a case that made an object.
//!
//! The traits are called through `dyn`, which hides the caller. So a guard of `device` notes its caller right before the call
//! that makes the object, in the same thread, and the layer takes the note. An object that a case makes by a direct call has
//! no line; the number of the call names it.

use std::cell::Cell;
use std::panic::Location;

thread_local! {
    static PLACE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Notes the caller as the origin of the object that this thread makes next.
#[track_caller]
pub(crate) fn made_here() {
    PLACE.set(Some(Location::caller()));
}

/// Takes the origin that was noted last.
pub(super) fn take() -> Option<&'static Location<'static>> {
    PLACE.take()
}
