//! The time that an open waits for its exporter, and the errors of an exporter that is gone or refuses.

use std::time::{Duration, Instant};

use highwater_hal::{Error, ErrorKind};

pub(super) const OPERATION: &str = "open_shared";

/// Time without an answer after which an open checks whether the exporter is stopped.
const STOPPED_AFTER: Duration = Duration::from_secs(1);

/// The time that one open waits, over all its requests, connections and processes: the exporter, and the heirs that follow it during the open.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    limit: Duration,
    began: Instant,
    pub(super) until: Instant,
}

impl Patience {
    pub(super) fn new(limit: Duration) -> Self {
        let began = Instant::now();
        Self { limit, began, until: began + limit }
    }

    /// Starts the time again, for the next allocation of a batch.
    pub(super) fn renew(&mut self) {
        *self = Self::new(self.limit);
    }

    /// Returns the same, with at most this time from now on.
    pub(super) fn at_most(self, time: Duration) -> Self {
        Self { until: self.until.min(Instant::now() + time), ..self }
    }

    /// Returns the time of the next check for a stopped process. The checks are one second apart, counted from the beginning of the
    /// open. A stopped process ends the open. So several processes that are stopped one after the other delay it no longer than one.
    pub(super) fn next_look(self) -> Instant {
        let looks = self.began.elapsed().as_nanos() / STOPPED_AFTER.as_nanos() + 1;
        self.began + STOPPED_AFTER.saturating_mul(u32::try_from(looks).unwrap_or(u32::MAX))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_a_second_apart_from_the_begin_of_the_open() {
        let mut patience = Patience::new(Duration::from_secs(10));
        assert_eq!(patience.next_look(), patience.began + Duration::from_secs(1));
        patience.began -= Duration::from_millis(2700);
        assert_eq!(patience.at_most(Duration::from_secs(1)).next_look(), patience.began + Duration::from_secs(3));
        assert!(patience.at_most(Duration::from_secs(1)).left() <= Duration::from_secs(1));
        assert!(patience.at_most(Duration::from_secs(60)).left() <= Duration::from_secs(10));
    }
}
