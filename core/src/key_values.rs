//! Options in an environment variable: `key=value` pairs, separated by commas.

use std::ffi::OsStr;

use highwater_hal::{Error, ErrorKind, Result, display_foreign};

/// A key, the form of its values, and a function that returns the options with it set, or `None` for a value of another form.
pub(crate) type Key<T> = (&'static str, &'static str, fn(T, &str) -> Option<T>);

/// Returns the options with the pairs of a variable set.
///
/// # Errors
/// `InvalidArgument` for an unknown or repeated key, or a value that is not of its form.
pub(crate) fn parse<T>(
    operation: &'static str,
    variable: &str,
    text: &OsStr,
    keys: &[Key<T>],
    mut options: T,
) -> Result<T> {
    let invalid = |message: String, hint: String| {
        let message = format!("{variable}={}: {message}", display_foreign(text));
        Error::new(ErrorKind::InvalidArgument, operation, message).with_hint(hint)
    };
    let form = || {
        let keys: Vec<_> = keys.iter().map(|(key, expected, _)| format!("`{key}` ({expected})")).collect();
        format!("write `key=value` pairs, separated by commas; the keys are {}", keys.join("; "))
    };
    let text = text.to_str().ok_or_else(|| invalid("not UTF-8".to_owned(), form()))?;
    let mut seen = Vec::new();
    for pair in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
        let (key, value) = pair
            .split_once('=')
            .map(|(key, value)| (key.trim(), value.trim()))
            .ok_or_else(|| invalid(format!("`{}` is not of the form `key=value`", display_foreign(pair)), form()))?;
        let Some((key, expected, set)) = keys.iter().find(|(known, ..)| *known == key) else {
            return Err(invalid(format!("`{}` is not a key", display_foreign(key)), form()));
        };
        if seen.contains(key) {
            return Err(invalid(format!("`{key}` is set twice"), format!("keep one `{key}=` of the two")));
        }
        seen.push(*key);
        options = set(options, value).ok_or_else(|| {
            let message = format!("`{}` is not a value of `{key}`", display_foreign(value));
            invalid(message, format!("`{key}` expects {expected}"))
        })?;
    }
    Ok(options)
}
