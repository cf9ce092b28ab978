//! What a rule saw.

use std::fmt::Debug;
use std::io::Write;

/// Begins a line that is meant for the process that runs the rules.
pub(crate) const MARK: char = '\u{1e}';

/// The observations of one rule. Each is reported at once, so a rule that ends its process keeps its earlier ones.
#[derive(Debug, Default)]
pub struct Log {
    wrong: Vec<String>,
}

impl Log {
    /// An observation with the value that the vendor's library is known to give.
    pub fn is<T: Debug + PartialEq>(&mut self, what: &str, seen: T, expected: T) {
        let (differs, seen, expected) = (seen != expected, format!("{seen:?}"), format!("{expected:?}"));
        tell(&["expected", what, &seen, &expected]);
        if differs {
            self.wrong.push(format!("{what}: {seen}, not {expected}"));
        }
    }

    /// An observation with the value that the vendor's library was seen to give, and another one that is as right; the rule
    /// says why.
    pub fn either<T: Debug + PartialEq>(&mut self, what: &str, seen: T, expected: T, other: T) {
        let right = seen == expected || seen == other;
        let (seen, expected) = (format!("{seen:?}"), format!("{expected:?} or {other:?}"));
        tell(&["expected", what, &seen, if right { &seen } else { &expected }]);
        if !right {
            self.wrong.push(format!("{what}: {seen}, not {expected}"));
        }
    }

    /// Records an observation without a known value: it depends on the machine or the library's version, or was never made on
    /// a device. Comparing two records compares it.
    pub fn observed(&mut self, what: &str, seen: impl Debug) {
        tell(&["observed", what, &format!("{seen:?}")]);
    }

    pub(crate) fn finish(self, ended: Result<(), String>) -> Result<(), String> {
        let wrong: Vec<_> = self.wrong.into_iter().chain(ended.err()).collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
    }
}

/// Tells the process that runs the rules something, in one line.
pub(crate) fn tell(fields: &[&str]) {
    let clean: Vec<_> = fields.iter().map(|field| field.replace(['\n', '\t', MARK], " ")).collect();
    let mut output = std::io::stdout().lock();
    // A failure is ignored: without a listener there is no report.
    let _ = writeln!(output, "{MARK}{}", clean.join("\t"));
    let _ = output.flush();
}

/// Returns an error for the code of a call that has to succeed for the rule to go on.
///
/// # Errors
/// For a code that is not 0.
pub fn need(what: &str, code: u32) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{what} answered {code}, and the rule could not go on")) }
}
