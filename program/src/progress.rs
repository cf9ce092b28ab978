//! How far a command is: a bar on a terminal, a few plain lines elsewhere; always on standard error.

use std::io::{IsTerminal as _, stderr};
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

use super::output;

/// Plain lines that one command prints at most.
const LINES: u64 = 4;

/// Shared by the threads that do the work.
#[derive(Debug)]
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    /// What is counted: `images`.
    unit: &'static str,
    total: u64,
    done: AtomicU64,
}

impl Progress {
    /// `total` of `unit` are to be done. With `json` there is no bar.
    pub(super) fn new(unit: &'static str, total: u64, json: bool) -> Self {
        let bar = (!json && stderr().is_terminal()).then(|| {
            // The template is fixed; where it did not parse, the default bar would do.
            let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg} {elapsed}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(total).with_style(style).with_message(unit)
        });
        Self { bar, unit, total, done: AtomicU64::new(0) }
    }

    /// What is being done now; a bar shows it, so that one sees what hangs.
    pub(super) fn now(&self, what: &'static str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what);
        }
    }

    /// So many more are done.
    pub(super) fn advance(&self, count: u64) {
        // Relaxed: a counter that orders nothing.
        let before = self.done.fetch_add(count, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(count);
        } else if self.line_of(before + count) > self.line_of(before) {
            output::line(format_args!("{} of {} {}", before + count, self.total, self.unit));
        }
    }

    /// Which of the plain lines is due with so many done.
    fn line_of(&self, done: u64) -> u128 {
        u128::from(done) * u128::from(LINES) / u128::from(self.total.max(1))
    }

    /// A line that is not about how far it is; a bar stays below it.
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
