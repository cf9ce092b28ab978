//! Device memory that Highwater and PyTorch share between two processes, in PyTorch's own format and with no change to
//! PyTorch. Nothing is copied.
//!
//! - [`open`] opens what PyTorch's `storage._share_cuda_()` returned.
//! - [`Sender::share`] returns what PyTorch's `torch.UntypedStorage._new_shared_cuda(...)` takes.
//! - Memory of expandable segments of PyTorch opens as well, up to PyTorch 2.12. Blocks of `cudaMalloc` open in every version.
//! - [`TorchStorage`] holds the eight fields of both, and has a text form that Python reads and writes in one line.
//!
//! # The format
//! A sender names a range of a segment of device memory, one slot in a file of counters, and an event. The slot is 1 until the
//! receiver has released the range. The receiver waits for the event first. One share is for one open: PyTorch has the same rule.
//!
//! # Deaths
//! The format does not tell who the receiver is. The count of a receiver that was killed stays at 1, and so does the count of a
//! message that nobody received. A PyTorch sender then keeps the memory until its process ends, unless its program calls
//! `torch.UntypedStorage._release_ipc_counter_cuda`. [`Sender::share_with`] does better: it takes the receiver's process, and
//! ends the share when that process ends. [`TorchStorage::release`] ends a share that nobody opened.
//!
//! If the sender is killed, its receivers keep their mappings. NVIDIA leaves undefined what they read then.

mod counters;
mod expandable;
mod handle;
mod receive;
mod send;
mod storage;

pub use receive::open;
pub use send::{Receiver, Sender};
pub use storage::TorchStorage;

/// The example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
