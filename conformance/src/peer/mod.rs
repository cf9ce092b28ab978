//! A second process with the same backend, for cases of sharing.
//!
//! The suite does not know how to open a backend. Its caller provides a [`Launcher`]: a command line whose process opens the
//! same backend and calls [`serve_peer`]. It is usually the same executable. A Unix socket connects the two processes, as the
//! second process's standard input. A case sends a command and waits for the answer; descriptors travel with the messages.
//!
//! - `launcher`: starts the second process; `process`: the side of the case; `serve`: the side of the second process
//!
//! - `command`, `wire`: the commands, and their messages
//!
//! - `exit`: the calls that a process makes while it exits
//!
//! No case waits forever. A second process that does not answer in time is killed, and the failure names the command. The
//! case always waits for the process, so no zombie stays. The process ends by itself when the socket is closed.

mod command;
mod exit;
mod launcher;
mod process;
mod serve;
mod wire;

pub use launcher::Launcher;
pub use serve::serve_peer;

pub(crate) use process::{Peer, PeerEvent};
