//! Log lines from a plugin to the program. A plugin has its own logger, which nothing reads.

use std::ffi::c_char;
use std::fmt::{self, Write as _};
use std::panic::catch_unwind;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::raw::LogCall;

/// The numbers of the levels.
pub(super) const LEVELS: [(&str, u32); 5] =
    [("LOG_ERROR", 1), ("LOG_WARN", 2), ("LOG_INFO", 3), ("LOG_DEBUG", 4), ("LOG_TRACE", 5)];

/// In the plugin: sends log lines to the program from now on. Only the first call has an effect.
pub(super) fn forward_to(log: LogCall) {
    // Fails if the plugin has set a logger of its own, which then receives the lines.
    let _ = tracing::subscriber::set_global_default(Forward(log));
}

struct Forward(LogCall);

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        let level = match *event.metadata().level() {
            Level::ERROR => 1,
            Level::WARN => 2,
            Level::INFO => 3,
            Level::DEBUG => 4,
            Level::TRACE => 5,
        };
        // SAFETY: the program's function takes a text of that many bytes, from any thread.
        unsafe { (self.0)(level, line.0.as_ptr().cast(), line.0.len() as u64) };
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its fields.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let blank = if self.0.is_empty() { "" } else { " " };
        // Writing to a text does not fail.
        let _ = if field.name() == "message" {
            write!(self.0, "{blank}{value:?}")
        } else {
            write!(self.0, "{blank}{}={value:?}", field.name())
        };
    }
}

/// In the program: receives a log line of a plugin.
///
/// # Safety
/// `text` must be null, or have `bytes` readable bytes.
pub(super) unsafe extern "C" fn take(level: u32, text: *const c_char, bytes: u64) {
    const MOST_BYTES: u64 = 1 << 16;
    if text.is_null() {
        return;
    }
    // SAFETY: the caller ensures it, and a long line is cut.
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), bytes.min(MOST_BYTES) as usize) };
    // The program's own logger could panic, which must not reach the plugin.
    let _ = catch_unwind(|| {
        let text = String::from_utf8_lossy(text);
        match level {
            1 => tracing::error!(target: "highwater::plugin", "{text}"),
            2 => tracing::warn!(target: "highwater::plugin", "{text}"),
            3 => tracing::info!(target: "highwater::plugin", "{text}"),
            4 => tracing::debug!(target: "highwater::plugin", "{text}"),
            _ => tracing::trace!(target: "highwater::plugin", "{text}"),
        }
    });
}
