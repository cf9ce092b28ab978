//! Test mode: freed memory is poisoned, and memory that is freed or handed out while device work still uses it is found.
//!
//! Every command that is put into a queue is noted with the ranges that it reads and writes, until it has been executed.
//! What gives memory back, or hands it out, looks whether such a command touches it; if one does, that is a
//! [`Violation`]. Nothing is refused and nothing panics: a violation is there to be asked for.
//!
//! Work is noted when it is enqueued and gone before anybody can see it completed, so who waits as he must is never
//! blamed. Commands of other processes are not seen. Without test mode none of this exists but a null check per command.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use highwater_hal::StreamId;
use parking_lot::Mutex;

use crate::engine::Engine;
use crate::operation::Operation;
use crate::stream::Command;
use crate::uses::{Range, Use, uses};

/// What freed memory is filled with in test mode, in the machine's byte order: a NaN of 32 bits, and two of them one of
/// 64 bits.
pub const POISON: u32 = 0x7ffc_dead;

/// The pattern of a fill with [`POISON`].
pub(crate) const POISON_PATTERN: u64 = (POISON as u64) << 32 | POISON as u64;

/// Violations that are kept with their words; all are counted.
const KEPT: usize = 1000;

/// A rule of use that was broken, as [`MockGpu::violations`](crate::MockGpu::violations) tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The call that broke it.
    pub operation: Operation,
    /// Which memory, and which work on which stream still used it.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.text)
    }
}

#[derive(Debug)]
struct InFlight {
    operation: Operation,
    stream: Option<StreamId>,
    device: u32,
    uses: Vec<Use>,
}

#[derive(Debug, Default)]
struct Book {
    /// By the order in which they were noted.
    in_flight: BTreeMap<u64, InFlight>,
    noted: u64,
    violations: Vec<Violation>,
    count: u64,
}

/// The book of one backend in test mode.
#[derive(Debug, Default)]
pub(crate) struct Checks(Mutex<Book>);

/// A command that has not been executed yet; dropped when it has.
#[derive(Debug)]
pub(crate) struct Noted {
    checks: Arc<Checks>,
    number: u64,
}

impl Drop for Noted {
    fn drop(&mut self) {
        let done = self.checks.0.lock().in_flight.remove(&self.number);
        drop(done);
    }
}

impl Checks {
    /// Notes a command that is about to be put into the queue of a stream.
    pub(crate) fn note(
        self: &Arc<Self>,
        operation: Operation,
        command: &Command,
        engine: &Engine,
        device: u32,
        stream: Option<StreamId>,
    ) -> Option<Noted> {
        let mut uses = uses(command, engine);
        // A handle's own workspace is no caller's memory, and is given back by the last command itself.
        uses.retain(|used| !used.is_of_handle());
        if uses.is_empty() {
            return None;
        }
        let mut book = self.0.lock();
        book.noted += 1;
        let number = book.noted;
        book.in_flight.insert(number, InFlight { operation, stream, device, uses });
        Some(Noted { checks: Arc::clone(self), number })
    }

    /// The number of commands noted so far.
    pub(crate) fn noted(&self) -> u64 {
        self.0.lock().noted
    }

    /// Checks the first commands noted, up to a given number, for unexecuted work that uses a range. `what` says what
    /// this operation did to the range.
    pub(crate) fn look(&self, noted: u64, operation: Operation, what: &str, range: Range) {
        let mut book = self.0.lock();
        let broken: Vec<_> = book
            .in_flight
            .range(..=noted)
            .filter_map(|(_, work)| {
                let touched = work.uses.iter().find(|used| used.range.meets(&range))?;
                let verb = if touched.writes { "writes" } else { "reads" };
                let stream = work.stream.map_or_else(
                    || format!("the legacy default stream of device {}", work.device),
                    |stream| format!("{stream:?}"),
                );
                let text = format!(
                    "{range} {what} while `{}` was queued or running on {stream}, which {verb} {}",
                    work.operation, touched.range
                );
                Some(Violation { operation, text })
            })
            .collect();
        for violation in broken {
            tracing::error!(%violation, "a rule of use was broken");
            book.count += 1;
            if book.violations.len() < KEPT {
                book.violations.push(violation);
            }
        }
    }

    /// Whether work that has not been executed uses a range.
    pub(crate) fn is_in_use(&self, range: Range) -> bool {
        let book = self.0.lock();
        book.in_flight.values().any(|work| work.uses.iter().any(|used| used.range.meets(&range)))
    }

    pub(crate) fn violations(&self) -> Vec<Violation> {
        self.0.lock().violations.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.lock().count
    }
}
