//! Test mode: finds memory that is freed or handed out while device work still uses it.
//!
//! The checks note every enqueued command, with the ranges that it reads and writes, until the command has been
//! executed. A call that frees memory, or hands it out, meets such a command: that is a [`Violation`]. The call is not
//! refused and nothing panics. A test asks for the violations.
//!
//! The note of a command ends before anybody can see the command completed, so a caller that waits as it must is never
//! blamed. Commands of other processes are not seen.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::observer::{Note, OnStream, Range, Use, UseObserver};
use crate::operation::Operation;

/// The violations that are kept with their text. All are counted.
const KEPT: usize = 1000;

/// A rule of use that was broken; see [`MockGpu::violations`](crate::MockGpu::violations).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The call that broke it.
    pub operation: Operation,
    /// The memory, and the work on a stream that still used it.
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
    stream: OnStream,
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

/// The checks of one backend in test mode.
#[derive(Debug, Default)]
pub(crate) struct Checks(Arc<Mutex<Book>>);

/// The note of a command that has not been executed. Drop it once the command has been executed.
#[derive(Debug)]
struct Noted {
    book: Arc<Mutex<Book>>,
    number: u64,
}

impl Drop for Noted {
    fn drop(&mut self) {
        let done = self.book.lock().in_flight.remove(&self.number);
        drop(done);
    }
}

impl Checks {
    pub(crate) fn violations(&self) -> Vec<Violation> {
        self.0.lock().violations.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.lock().count
    }
}

impl UseObserver for Checks {
    fn enqueued(&self, operation: Operation, stream: OnStream, mut uses: Vec<Use>) -> Option<Note> {
        // A handle's own workspace is no caller's memory. The last command that uses it gives it back.
        uses.retain(|used| !used.is_of_handle());
        if uses.is_empty() {
            return None;
        }
        let mut book = self.0.lock();
        book.noted += 1;
        let number = book.noted;
        book.in_flight.insert(number, InFlight { operation, stream, uses });
        Some(Box::new(Noted { book: Arc::clone(&self.0), number }))
    }

    fn noted(&self) -> u64 {
        self.0.lock().noted
    }

    fn changed_hands(&self, noted: u64, operation: Operation, how: &str, range: Range) {
        let mut book = self.0.lock();
        let broken: Vec<_> = book
            .in_flight
            .range(..=noted)
            .filter_map(|(_, work)| {
                let touched = work.uses.iter().find(|used| used.range.meets(&range))?;
                let verb = if touched.writes { "writes" } else { "reads" };
                let text = format!(
                    "{range} {how} while `{}` was queued or running on {}, which {verb} {}",
                    work.operation, work.stream, touched.range
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

    fn is_in_use(&self, range: Range) -> bool {
        let book = self.0.lock();
        book.in_flight.values().any(|work| work.uses.iter().any(|used| used.range.meets(&range)))
    }
}
