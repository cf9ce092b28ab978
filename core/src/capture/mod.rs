//! Capture and replay: [`Stream::capture`](crate::Stream::capture) records enqueued work instead of executing it, and a
//! [`Graph`] replays it.
//!
//! *Ownership.* A capture, and then its graph, owns everything that was recorded: blocks of device memory and of page-locked
//! memory by reference, and workspaces of its own. A dropped graph returns them once its last launch is done. The completion
//! event of that launch tells when; no thread waits. Handles are bound to the capture's workspace while a stream takes part,
//! under a key of the capture. Afterward they are bound anew.
//!
//! Device memory that a stream allocates in the capture lies in a memory of the capture (`capture/memory.rs`).
//!
//! *Before, in, or after.* Every call that enqueues takes the stream's submission lock, and a capture begins and ends under
//! the submission locks of its streams. So each call knows whether it is recorded. The end takes the submission locks of all
//! streams of the capture, in the order of their keys. Every other thread holds one submission lock at most.
//!
//! *Refusals.* Waits, queries, and waits for events from outside would invalidate the capture. They are refused before the
//! backend is called, and the work of destructors is deferred. A stream that takes part records no completion events. Work from
//! before the capture is covered by the event recorded when it began, and the capture keeps all memory used in it.
//!
//! *Page-locked memory* of a graph may be in use elsewhere, and is recorded nevertheless. Each launch waits, on the device, for
//! the uses that it would race with, and counts as a use itself. `pool/block_uses.rs` describes how the CPU is kept apart.

mod graph;
pub(crate) mod memory;
mod open;
pub(crate) mod recording;
mod statistics;
mod take_part;
pub(crate) mod thread;

pub use graph::Graph;
pub use statistics::GraphStatistics;

pub(crate) use statistics::GraphCounters;
pub(crate) use take_part::join;
