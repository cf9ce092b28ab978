//! Opening of a backend for a command: a built-in one, or a plugin, which this program probes first.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use highwater::hal::Backend;
use highwater::{Fallback, OpenError, OpenOptions, Opened};

// The options of the command line that all processes of this program share.
const LIMIT: &str = "--load-limit";
const ALLOW_INSECURE: &str = "--allow-insecure-plugins";

static INSECURE: AtomicBool = AtomicBool::new(false);
/// In seconds; 0 for the default.
static LOAD_LIMIT: AtomicU64 = AtomicU64::new(0);

/// Stores the options of the command line. Called once, before anything is opened.
pub(super) fn configure(allow_insecure: bool, load_limit: Option<u64>) {
    INSECURE.store(allow_insecure, Ordering::Relaxed);
    LOAD_LIMIT.store(load_limit.unwrap_or(0), Ordering::Relaxed);
}

/// Returns the options with which a child process finds and loads the same plugins.
pub(super) fn arguments_of_children() -> Vec<String> {
    let mut arguments = Vec::new();
    if INSECURE.load(Ordering::Relaxed) {
        arguments.push(ALLOW_INSECURE.to_owned());
    }
    if let Some(limit) = load_limit() {
        arguments.extend([LIMIT.to_owned(), limit.as_secs().to_string()]);
    }
    arguments
}

/// Returns the time limit for opening a plugin, if the command line sets one.
pub(super) fn load_limit() -> Option<Duration> {
    match LOAD_LIMIT.load(Ordering::Relaxed) {
        0 => None,
        seconds => Some(Duration::from_secs(seconds)),
    }
}

/// The prober of new plugins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prober {
    ThisProgram,
    Nobody,
}

/// Returns the opening options of the command line.
pub(super) fn options(prober: Prober) -> OpenOptions {
    let mut options = OpenOptions::new();
    if INSECURE.load(Ordering::Relaxed) {
        options = options.allow_insecure_plugins();
    }
    if let Some(limit) = load_limit() {
        options = options.with_load_limit(limit);
    }
    match prober {
        // Unlike `current_exe`, this is the same program even if the file was replaced.
        Prober::ThisProgram => options.with_prober("/proc/self/exe"),
        Prober::Nobody => options,
    }
}

/// Opens the backend `name` and no other.
pub(super) fn open_by(name: &str, prober: Prober) -> Result<Opened, OpenError> {
    options(prober).with_name(name).open()
}

/// Opens the plugin in `file`.
pub(super) fn open_file(file: &Path, prober: Prober) -> Result<Opened, OpenError> {
    options(prober).with_path(file).open()
}

/// Opens the best backend, or the mock.
pub(super) fn open_best() -> Result<Opened, OpenError> {
    options(Prober::ThisProgram).with_fallback(Fallback::Mock).open()
}

/// Returns the address for [`reopen`] in another process: the name or, for a plugin, the path.
pub(super) fn address(opened: &Opened) -> String {
    let library = opened.report.taken().and_then(|taken| taken.origin.library());
    library.and_then(|library| library.to_str()).map_or_else(|| opened.backend.identity().name.clone(), str::to_owned)
}

/// Opens a backend that another process has opened, and probed, before.
pub(super) fn reopen(address: &str) -> highwater::Result<Arc<dyn Backend>> {
    let is_path = address.contains('/');
    let opened = if is_path { open_file(address.as_ref(), Prober::Nobody) } else { open_by(address, Prober::Nobody) };
    Ok(opened?.backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_for_children_are_those_of_the_command_line() {
        let line = ["highwater", ALLOW_INSECURE, LIMIT, "7"];
        let arguments = super::super::args::parse_from(line).unwrap();
        assert_eq!((arguments.allow_insecure_plugins, arguments.load_limit), (true, Some(7)));
        configure(arguments.allow_insecure_plugins, arguments.load_limit);
        assert_eq!(arguments_of_children(), line[1..]);
        configure(false, None);
        assert!(arguments_of_children().is_empty());
    }

    #[test]
    fn what_was_opened_can_be_opened_again_by_its_address() {
        let opened = open_by("mock", Prober::ThisProgram).unwrap();
        assert_eq!(address(&opened), "mock");
        assert_eq!(reopen("mock").unwrap().identity().name, "mock");
        let error = reopen("/nowhere/libmock.so").unwrap_err();
        assert!(error.message().contains("/nowhere/libmock.so"), "{error}");
    }
}
