//! Repeats an observation with more work until it is conclusive.
//!
//! A call that does not wait leaves work outstanding when it returns. If the work is already complete, the observation proves
//! nothing: the call may have waited, or the scheduler may have delayed the observing thread. So the observation is
//! repeated with more work. A backend that waits does so for any amount of work, while the delays of a loaded machine do not
//! grow. The number of attempts depends on the machine: on a quiet one, a few attempts prove that the backend waits.

use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

use crate::case::{CaseResult, Failure};
use crate::stream_load::StreamLoad;

/// The result of an attempt that found no violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The work was outstanding at the observation, so the attempt is conclusive.
    InTime,
    /// The work was complete too early, so the attempt proves nothing.
    TooLate,
}

impl Attempt {
    /// Returns `InTime` if the work was seen outstanding.
    pub(crate) fn seen(outstanding: bool) -> Self {
        if outstanding { Self::InTime } else { Self::TooLate }
    }
}

/// The amount of work of each attempt, in multiples of [`StreamLoad::TIME`]. The longest exceed any delay of a usable machine.
/// The last are equal, because another chance helps more than twice the work.
const AMOUNTS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256];

/// The number of attempts on a quiet machine that prove that the backend waits.
const ENOUGH_WHEN_QUIET: usize = 7;

/// No attempt begins after this time, so that a backend that is wrong everywhere fails in bounded time.
const LIMIT: Duration = Duration::from_secs(3);

/// The same limit if the machine was loaded in every attempt, so that no attempt proves anything about the backend.
const LIMIT_WHEN_BUSY: Duration = Duration::from_secs(10);

/// Repeats the attempt with more work until one is in time.
///
/// `waits` is the failure if none is in time: work that is complete each time means that a call waited for it.
#[track_caller]
pub(crate) fn until_conclusive(waits: &str, attempt: impl FnMut(usize) -> Result<Attempt, Failure>) -> CaseResult {
    let location = Location::caller();
    let Err(inconclusive) = until_in_time(attempt, machine_is_busy)? else { return Ok(()) };
    Err(Failure::inconclusive(location, waits, inconclusive))
}

/// Attempts of which none was in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inconclusive {
    attempts: usize,
    on_a_busy_machine: usize,
}

impl fmt::Display for Inconclusive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attempts, on_a_busy_machine } = *self;
        let longest = StreamLoad::TIME * AMOUNTS[attempts - 1] as u32;
        write!(
            f,
            "the work that was enqueued before (up to {} ms of it) was over in each of {attempts} attempts",
            longest.as_millis()
        )?;
        if on_a_busy_machine > 0 {
            write!(f, "; the machine was busy in {on_a_busy_machine} of them, so run the case again on a quiet one")?;
        }
        Ok(())
    }
}

fn until_in_time(
    mut attempt: impl FnMut(usize) -> Result<Attempt, Failure>,
    mut machine_is_busy: impl FnMut() -> bool,
) -> Result<Result<(), Inconclusive>, Failure> {
    let begun = Instant::now();
    let mut inconclusive = Inconclusive { attempts: 0, on_a_busy_machine: 0 };
    for amount in AMOUNTS {
        if attempt(amount)? == Attempt::InTime {
            return Ok(Ok(()));
        }
        inconclusive.attempts += 1;
        inconclusive.on_a_busy_machine += usize::from(machine_is_busy());
        let quiet = inconclusive.attempts - inconclusive.on_a_busy_machine;
        let limit = if quiet == 0 { LIMIT_WHEN_BUSY } else { LIMIT };
        if quiet >= ENOUGH_WHEN_QUIET || begun.elapsed() >= limit {
            break;
        }
    }
    Ok(Err(inconclusive))
}

/// Returns whether other threads preempt this one. It reads the clock in a loop and looks for gaps.
///
/// A scheduler switches threads every few milliseconds. On a machine with more threads than processors it soon preempts a thread
/// that never sleeps. Interrupts are far shorter.
fn machine_is_busy() -> bool {
    const LOOK: Duration = Duration::from_millis(20);
    const GAP: Duration = Duration::from_millis(1);
    let begun = Instant::now();
    let mut last = begun;
    while last - begun < LOOK {
        let now = Instant::now();
        if now - last >= GAP {
            return true;
        }
        last = now;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the amounts of work of the attempts until `in_time` is true, and their result.
    fn made(in_time: impl Fn(usize) -> bool, busy: impl Fn(usize) -> bool) -> (Vec<usize>, Result<(), Inconclusive>) {
        let (mut amount, mut looks) = (Vec::new(), 0);
        let outcome = until_in_time(
            |now| {
                amount.push(now);
                Ok(Attempt::seen(in_time(now)))
            },
            || {
                looks += 1;
                busy(looks)
            },
        );
        (amount, outcome.unwrap())
    }

    #[test]
    fn the_first_attempt_in_time_is_the_last() {
        assert_eq!(made(|_| true, |_| true), (vec![1], Ok(())));
        assert_eq!(made(|amount| amount >= 64, |_| true), (vec![1, 2, 4, 8, 16, 32, 64], Ok(())));
    }

    #[test]
    fn a_quiet_machine_settles_it_sooner_than_a_busy_one() {
        let (amount, outcome) = made(|_| false, |_| false);
        assert_eq!(amount, AMOUNTS[..ENOUGH_WHEN_QUIET]);
        assert_eq!(outcome, Err(Inconclusive { attempts: ENOUGH_WHEN_QUIET, on_a_busy_machine: 0 }));
        let (amount, outcome) = made(|_| false, |_| true);
        assert_eq!(amount, AMOUNTS);
        assert_eq!(outcome, Err(Inconclusive { attempts: AMOUNTS.len(), on_a_busy_machine: AMOUNTS.len() }));
        // Attempts on a loaded machine do not count against the backend.
        let (amount, _) = made(|_| false, |look| look <= 3);
        assert_eq!(amount.len(), 3 + ENOUGH_WHEN_QUIET);
    }

    #[test]
    fn a_failure_is_final() {
        let mut count = 0;
        let attempt = |_| {
            count += 1;
            Err(Failure::new("wrong"))
        };
        assert!(until_in_time(attempt, || true).is_err());
        assert_eq!(count, 1);
    }
}
