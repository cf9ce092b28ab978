//! Waiting without blocking: futures, calls and descriptors for the end of device work.
//!
//! Every wait ends at completion events (`pool/completion_events.rs`). [`done`] has the types that a program holds. [`notifier`] has
//! the thread of a runtime that asks the backend about the events, because no event of a vendor wakes a waker. All states are under
//! mutexes, so no code here is lock-free.

mod done;
pub(crate) mod notifier;
mod on;

pub use done::{Done, DoneDescriptor};
