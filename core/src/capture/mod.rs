//! Capture and replay: [`Stream::capture`] records what is enqueued instead of executing it, a [`Graph`] replays it.
//!
//! *Who owns what.* A capture, and then its graph, owns everything that was recorded: blocks of device memory and of
//! page-locked memory by reference, and workspaces of its own. It gives them back when it is dropped and its last launch is
//! done, which the completion event of that launch tells; nobody waits. Handles are bound to the capture's workspace while a
//! stream takes part, under a key of the capture, and are bound anew afterwards.
//!
//! *Before, in, or after.* Every call that enqueues takes the stream's submission lock, and a capture begins and ends
//! under the submission locks of its streams. So each call knows whether it is recorded. The end takes the submission
//! locks of all streams of the capture, in the order of their keys; every other thread holds one submission lock at
//! most.
//!
//! *What would lose a capture is refused* before the backend is called: waiting and asking, and waits for events from
//! outside. What destructors cannot do meanwhile is deferred. A stream that takes part records no completion events:
//! work from before the capture is covered by the completion event that was recorded when it began, and what is used in
//! the capture is kept by it.
//!
//! *Page-locked memory* of a graph may be in use elsewhere. Nothing of that stands in the way of recording; each launch
//! waits, on the device, for the uses that it would race with, and counts as a use itself. See `pool/block_uses.rs` for
//! how the CPU is kept apart.

mod graph;
mod open;
pub(crate) mod recording;
mod statistics;
mod take_part;
pub(crate) mod thread;

pub use graph::Graph;
pub use statistics::GraphStatistics;

pub(crate) use statistics::GraphCounters;
pub(crate) use take_part::join;
