//! The time that an open waits for its exporter, and the errors of an exporter that is gone or refuses.

use std::time::{Duration, Instant};

use highwater_hal::{Error, ErrorKind};

pub(super) const OPERATION: &str = "open_shared";

/// The time that one open waits for its exporter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    limit: Duration,
    pub(super) until: Instant,
}

impl Patience {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, until: Instant::now() + limit }
    }

    /// Starts the time again, for the next allocation of a batch.
    pub(super) fn renew(&mut self) {
        *self = Self::new(self.limit);
    }

    pub(super) fn left(self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    pub(super) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// Returns the error for a wait that is over. `who` has not answered.
    pub(super) fn lost_with(self, who: &str) -> Error {
        let what = format!("{who} is alive but has not answered for {} s", self.limit.as_secs());
        Error::new(ErrorKind::InvalidState, OPERATION, what)
            .with_hint("check whether it is blocked or short of processor time, then open the ticket again")
    }
}

pub(super) fn expired(message: String) -> Error {
    Error::new(ErrorKind::Expired, OPERATION, message).with_hint("request a new ticket from a running process")
}

/// Returns the exporter's refusal with a remedy for either side.
pub(super) fn refusal(kind: ErrorKind, text: String) -> Error {
    Error::new(kind, OPERATION, format!("the exporter refused: {text}")).with_hint(match kind {
        ErrorKind::Expired => {
            "request a new ticket, and keep the buffer in the exporter until the ticket has been opened"
        }
        ErrorKind::OperatingSystem => {
            "raise the exporter's limits (ulimit -n) or rights, as the message says, then open the ticket again"
        }
        ErrorKind::OutOfMemory => {
            "free memory in the exporter, or open fewer of its buffers, then open the ticket again"
        }
        ErrorKind::PermissionDenied => {
            "run both processes as one user, or set `openers` in the exporter and pass its ticket unchanged"
        }
        ErrorKind::Unsupported => "use the same version of this library, and a transport that both devices support",
        ErrorKind::ShuttingDown => "the exporter is shutting down: request a ticket from another exporter",
        ErrorKind::InvalidArgument => "pass the ticket unchanged",
        _ => "find the cause in the exporter, then open the ticket again",
    })
}
