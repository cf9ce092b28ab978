//! Tries again where an attempt proved nothing, until it is clear whether the backend or the machine is to blame.
//!
//! That a call does not wait shows in work that is still outstanding when the call has returned. Work that is over by
//! then shows nothing: perhaps the call waited for it, perhaps the thread that looks was kept from running meanwhile. So
//! the attempt is made again with more work: a backend that waits does so however much work there is, while the delays
//! of a busy machine stay as long as they are. How soon to give up depends on the machine: a quiet one leaves the
//! backend no excuse.

use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

use crate::busy::Busy;
use crate::case::{CaseResult, Failure};

/// What an attempt came to, where it found nothing wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The work was still outstanding when it mattered: the attempt proves something.
    InTime,
    /// The work was over too early: the attempt proves nothing.
    TooLate,
}

impl Attempt {
    /// In time if the work was seen outstanding.
    pub(crate) fn seen(outstanding: bool) -> Self {
        if outstanding { Self::InTime } else { Self::TooLate }
    }
}

/// How much work each attempt has, in helpings. The longest are far longer than any delay that leaves a machine usable,
/// and the last have the same length, since twice the work helps less than another chance.
const HELPINGS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 128, 128];

/// So many attempts on a quiet machine settle the matter.
const ENOUGH_WHEN_QUIET: usize = 6;

/// No attempt begins when so much time has passed, so that a backend that is wrong everywhere is told so in bounded time.
const LIMIT: Duration = Duration::from_secs(3);

/// The same where the machine was busy in every attempt, so that none of them says anything about the backend.
const LIMIT_WHEN_BUSY: Duration = Duration::from_secs(10);

/// Makes the attempt with growing helpings of work until one is in time.
///
/// `waits` says what the backend seems to do if none is: work that is over each time means that a call waited for it.
#[track_caller]
pub(crate) fn attempts(waits: &str, attempt: impl FnMut(usize) -> Result<Attempt, Failure>) -> CaseResult {
    let location = Location::caller();
    let Err(futile) = until_in_time(attempt, machine_is_busy)? else { return Ok(()) };
    Err(Failure::futile(location, waits, futile))
}

/// Attempts that were all too late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Futile {
    attempts: usize,
    on_a_busy_machine: usize,
}

impl fmt::Display for Futile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attempts, on_a_busy_machine } = *self;
        let longest = Busy::TIME * HELPINGS[attempts - 1] as u32;
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
) -> Result<Result<(), Futile>, Failure> {
    let begun = Instant::now();
    let mut futile = Futile { attempts: 0, on_a_busy_machine: 0 };
    for helpings in HELPINGS {
        if attempt(helpings)? == Attempt::InTime {
            return Ok(Ok(()));
        }
        futile.attempts += 1;
        futile.on_a_busy_machine += usize::from(machine_is_busy());
        let quiet = futile.attempts - futile.on_a_busy_machine;
        let limit = if quiet == 0 { LIMIT_WHEN_BUSY } else { LIMIT };
        if quiet >= ENOUGH_WHEN_QUIET || begun.elapsed() >= limit {
            break;
        }
    }
    Ok(Err(futile))
}

/// Whether this thread is kept from running: reads the clock without a pause and looks for gaps.
///
/// The scheduler takes turns every few milliseconds, so that on a machine with more to do than it has processors a
/// thread that never sleeps is soon made to wait. What interrupts cost is far shorter.
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

    /// The helpings of the attempts that are made until `in_time` says so, and what they came to.
    fn made(in_time: impl Fn(usize) -> bool, busy: impl Fn(usize) -> bool) -> (Vec<usize>, Result<(), Futile>) {
        let (mut helpings, mut looks) = (Vec::new(), 0);
        let outcome = until_in_time(
            |now| {
                helpings.push(now);
                Ok(Attempt::seen(in_time(now)))
            },
            || {
                looks += 1;
                busy(looks)
            },
        );
        (helpings, outcome.unwrap())
    }

    #[test]
    fn the_first_attempt_in_time_is_the_last() {
        assert_eq!(made(|_| true, |_| true), (vec![1], Ok(())));
        assert_eq!(made(|helpings| helpings >= 64, |_| true), (vec![1, 2, 4, 8, 16, 32, 64], Ok(())));
    }

    #[test]
    fn a_quiet_machine_settles_it_sooner_than_a_busy_one() {
        let (helpings, outcome) = made(|_| false, |_| false);
        assert_eq!(helpings, HELPINGS[..ENOUGH_WHEN_QUIET]);
        assert_eq!(outcome, Err(Futile { attempts: ENOUGH_WHEN_QUIET, on_a_busy_machine: 0 }));
        let (helpings, outcome) = made(|_| false, |_| true);
        assert_eq!(helpings, HELPINGS);
        assert_eq!(outcome, Err(Futile { attempts: 10, on_a_busy_machine: 10 }));
        // What happened while the machine was busy does not count against the backend.
        let (helpings, _) = made(|_| false, |look| look <= 3);
        assert_eq!(helpings.len(), 3 + ENOUGH_WHEN_QUIET);
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
