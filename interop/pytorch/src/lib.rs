//! Device memory that Highwater and PyTorch share between two processes, in PyTorch's own format and with no change to
//! PyTorch. Nothing is copied.
//!
//! - [`open`] opens the result of PyTorch's `storage._share_cuda_()`.
//! - [`Sender::share`] returns the arguments of PyTorch's `torch.UntypedStorage._new_shared_cuda(...)`.
//! - Blocks of `cudaMalloc` open with bare handles and those of the versions 1 to 3. Expandable segments open with the versions 1
//!   and 2, which PyTorch writes up to 2.12.
//! - [`TorchStorage`] holds the eight fields of both. It has a text form that Python reads and writes in one line.
//!
//! Only PyTorch 2.11.0 was run. The facts about other versions of PyTorch were not checked by a run.
//!
//! # The format
//! A sender names a range of a segment of device memory, one slot in a file of counters, and an event. The slot is 1 until the
//! receiver has released the range. The receiver waits for the event first. Each share is for one open, as in PyTorch.
//!
//! # Deaths
//! The format does not name the receiver. The count of a killed receiver stays at 1, and so does the count of a message that no
//! process received. A PyTorch sender then keeps the memory until its process ends, unless its program calls
//! `torch.UntypedStorage._release_ipc_counter_cuda`. [`Sender::share_with`] takes the receiver's process, and ends the share
//! when that process ends. [`TorchStorage::release`] ends a share that no process opened.
//!
//! If the sender is killed, its receivers keep their mappings. NVIDIA leaves the contents of the mappings undefined, except those
//! of expandable segments.

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
