//! The progress of a command on standard error: a bar on a terminal, a few plain lines elsewhere.

use std::io::{IsTerminal as _, stderr};
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

use super::output;

/// The number of plain lines of a command.
const LINES: u64 = 4;

/// Shared by the threads that do the work.
#[derive(Debug)]
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    /// The counted items: `images`.
    unit: &'static str,
    total: u64,
    done: AtomicU64,
}

impl Progress {
    /// Starts to count up to `total`. With `json` there is no bar.
    pub(super) fn new(unit: &'static str, total: u64, json: bool) -> Self {
        let bar = (!json && stderr().is_terminal()).then(|| {
            // The template is fixed and parses.
            let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg} {elapsed}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(total).with_style(style).with_message(unit)
        });
        Self { bar, unit, total, done: AtomicU64::new(0) }
    }

    /// Shows the current item in the bar, so that a user sees which one hangs.
    pub(super) fn now(&self, what: &'static str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what);
        }
    }

    /// Adds to the count.
    pub(super) fn advance(&self, count: u64) {
        // Relaxed: a counter that orders nothing.
        let before = self.done.fetch_add(count, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(count);
        } else if self.line_of(before + count) > self.line_of(before) {
            output::line(format_args!("{} of {} {}", before + count, self.total, self.unit));
        }
    }

    /// Returns the number of plain lines that are due at this count.
    fn line_of(&self, done: u64) -> u128 {
        u128::from(done) * u128::from(LINES) / u128::from(self.total.max(1))
    }

    /// Prints another line, above the bar.
    pub(super) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::line(text)),
            None => output::line(text),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
