//! The random operations of a worker, and the time limit of each call.

use std::io;
use std::time::Duration;

use super::super::frame::{Field, Frame, Payload, malformed};

/// An operation of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// Allocates shareable memory, writes it and shares it.
    Share,
    /// Adopts memory that was allocated past the pools, writes it and shares it.
    Adopt,
    /// Shares several allocations as one batch.
    ShareAll,
    /// Makes, fills and shares page-locked memory.
    SharePinned,
    /// Opens an offer, of any form.
    Open,
    /// Enqueues work on memory, and sometimes waits for it.
    Use,
    /// Checks the contents of memory.
    Check,
    /// Drops memory of another process.
    Release,
    /// Drops memory of its own, which others may have open.
    Drop,
    Trim,
    /// Hands its shared memory over to another runtime of the worker, which answers for it until the worker ends.
    HandOver,
    /// Cuts its sockets, and continues to use the memory that it has.
    Cut,
    /// Starts a child that holds its descriptors.
    Bequeath,
}

impl Operation {
    /// All operations, each with its name and its weight among the random choices.
    pub(super) const ALL: [(Self, &str, u64); 13] = [
        (Self::Share, "share", 70),
        (Self::Adopt, "adopt", 50),
        (Self::ShareAll, "share_all", 40),
        (Self::SharePinned, "share_pinned", 30),
        (Self::Open, "open", 300),
        (Self::Use, "use", 150),
        (Self::Check, "check", 130),
        (Self::Release, "release", 120),
        (Self::Drop, "drop", 90),
        (Self::Trim, "trim", 14),
        (Self::HandOver, "hand_over", 10),
        (Self::Cut, "cut", 3),
        (Self::Bequeath, "bequeath", 3),
    ];

    /// The time in which a call returns that waits for no other process. Calls take less than a millisecond, so the rest is for
    /// a busy machine.
    pub(super) const PROMPT: Duration = Duration::from_secs(1);

    /// The documented limit of a call that waits for a stopped process.
    const STOPPED: Duration = Duration::from_secs(1);

    pub(super) fn index(self) -> usize {
        self as usize
    }

    pub(super) fn name(self) -> &'static str {
        Self::ALL[self.index()].1
    }

    /// Returns the operation for a random number below [`Operation::weights`].
    pub(super) fn of(mut number: u64) -> Self {
        for (operation, _, weight) in Self::ALL {
            match number.checked_sub(weight) {
                None => return operation,
                Some(rest) => number = rest,
            }
        }
        Self::Check
    }

    /// Returns the sum of all weights.
    pub(super) fn weights() -> u64 {
        Self::ALL.iter().map(|(.., weight)| weight).sum()
    }

    /// Returns the time limit of a call, during which the process that it concerns was stopped `stops` times.
    pub(super) fn limit(self, stops: u32) -> Duration {
        match self {
            Self::Open => Self::PROMPT + Self::STOPPED * stops,
            // No other call waits for a process.
            _ => Self::PROMPT,
        }
    }
}

impl Field for Operation {
    fn put(&self, frame: &mut Frame) {
        (self.index() as u64).put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        let index = u64::take(payload)?;
        let found = Self::ALL.get(usize::try_from(index).unwrap_or(usize::MAX));
        found.map(|(operation, ..)| *operation).ok_or_else(|| malformed(format!("{index} is no operation")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_operations_and_every_choice_is_in_it() {
        let in_order = Operation::ALL.iter().enumerate().all(|(index, (operation, ..))| operation.index() == index);
        assert!(in_order);
        assert_eq!(
            (Operation::of(0), Operation::of(69), Operation::of(70)),
            (Operation::Share, Operation::Share, Operation::Adopt)
        );
        assert_eq!(Operation::of(Operation::weights() - 1), Operation::Bequeath);
    }

    #[test]
    fn only_an_open_may_wait_for_a_stopped_process() {
        let seconds = |operation: Operation, stops| operation.limit(stops).as_secs();
        assert_eq!((seconds(Operation::Open, 0), seconds(Operation::Open, 2), seconds(Operation::Drop, 2)), (1, 3, 1));
    }
}
