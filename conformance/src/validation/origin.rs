//! Where in its source a case made an object.
//!
//! The traits are called through `dyn`, which hides the caller. So the guards of `device` note the place right before the
//! call that makes the object, in the same thread, and the layer takes it along. An object that a case makes by a call of
//! its own has no place; then its case and the number of the call name it.

use std::cell::Cell;
use std::panic::Location;

thread_local! {
    static PLACE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Notes the caller as the place of the object that this thread makes next.
#[track_caller]
pub(crate) fn made_here() {
    PLACE.set(Some(Location::caller()));
}

/// The place that was noted last, once.
pub(super) fn take() -> Option<&'static Location<'static>> {
    PLACE.take()
}
