//! A second process with the same backend, for cases about what two processes share.
//!
//! The suite knows no backend, so it cannot start one: whoever runs the suite gives it a [`Launcher`], a command line
//! whose process opens the same backend and calls [`serve_peer`]. Mostly that is the executable that runs the suite,
//! started again. The two are connected by a Unix socket, the second process's standard input; a case tells it what to do
//! and waits for the answer, and descriptors travel beside the messages.
//!
//! - `launcher`: how the second process is started; `process`: the side of the case; `serve`: the side of the second process
//! - `command`, `wire`: what is said, and the messages in which it travels
//!
//! No case waits for ever: a second process that does not answer in time is killed, and the case says what it was asked.
//! It is waited for in any case, so no zombie is left, and it ends by itself when the socket is closed.

mod command;
mod launcher;
mod process;
mod serve;
mod wire;

pub use launcher::Launcher;
pub use serve::serve_peer;

pub(crate) use process::{Peer, PeerEvent};
