//! [`OpenOptions`]: which backend to open, and where to search for plugins.

use std::path::PathBuf;
use std::time::Duration;

/// The backend that is opened if no real device works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fallback {
    /// No other: opening fails.
    #[default]
    None,
    /// The mock, or a plugin without hardware behind it.
    Mock,
}

/// The time that a plugin may take to load.
pub(super) const LOAD_LIMIT: Duration = Duration::from_secs(10);

/// Selects a backend, and the places that are searched for plugins.
///
/// [`open`](crate::open), [`open_best`](crate::open_best) and [`survey`](crate::opening::survey) are shorthands for common
/// choices.
///
/// ```
/// # #[cfg(all(feature = "mock", feature = "plugins"))] {
/// let opened = highwater::OpenOptions::new().with_name("mock").with_search_folder("/opt/acme/plugins").open()?;
/// assert_eq!(opened.report.taken().unwrap().name, "mock");
/// # }
/// # Ok::<(), highwater::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
#[cfg_attr(not(feature = "plugins"), allow(dead_code, reason = "most of it concerns plugins"))]
pub struct OpenOptions {
    pub(super) name: Option<String>,
    pub(super) path: Option<PathBuf>,
    pub(super) fallback: Fallback,
    pub(super) plugins: bool,
    pub(super) search_folders: Vec<PathBuf>,
    pub(super) allow_insecure: bool,
    pub(super) prober: Option<PathBuf>,
    pub(super) load_limit: Duration,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            name: None,
            path: None,
            fallback: Fallback::None,
            plugins: true,
            search_folders: Vec::new(),
            allow_insecure: false,
            prober: None,
            load_limit: LOAD_LIMIT,
        }
    }
}

impl OpenOptions {
    /// Returns the defaults: the best real device, plugins from the usual places, no fallback.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens this backend and no other.
    ///
    /// Without a name and a path, the environment variable `HIGHWATER_BACKEND` may give either. If it is not set, the best
    /// backend is opened.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets what is opened if no real device works: by default, nothing. Has no effect with a name or a path, which open that
    /// backend or none.
    #[must_use]
    pub fn with_fallback(mut self, fallback: Fallback) -> Self {
        self.fallback = fallback;
        self
    }

    /// Sets the fallback to the mock, or to none.
    #[must_use]
    #[deprecated(since = "0.2.0", note = "use `with_fallback(Fallback::Mock)`")]
    pub fn with_mock_allowed(self, allowed: bool) -> Self {
        self.with_fallback(if allowed { Fallback::Mock } else { Fallback::None })
    }

    /// Searches no folder for plugins. A path given by `with_path` still counts.
    #[must_use]
    pub fn without_plugins(mut self) -> Self {
        self.plugins = false;
        self
    }
}

/// Options for plugins.
#[cfg(feature = "plugins")]
impl OpenOptions {
    /// Opens the plugin in this file and no other: a library, or a manifest (`*.toml`). If a name is set, too, the plugin must
    /// have that name. No built-in backend takes precedence.
    #[must_use]
    pub fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// Searches one more folder for plugins, before those of the environment. The path must be absolute.
    #[must_use]
    pub fn with_search_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.search_folders.push(folder.into());
        self
    }

    /// Searches folders for plugins, or does not.
    #[must_use]
    #[deprecated(since = "0.2.0", note = "use `without_plugins()`")]
    pub fn with_plugins(mut self, looked_for: bool) -> Self {
        self.plugins = looked_for;
        self
    }

    /// Loads plugins that other users could change, too: see `docs/plugins.md`. The environment variable
    /// `HIGHWATER_ALLOW_INSECURE_PLUGINS=1` does the same.
    #[must_use]
    pub fn allow_insecure_plugins(mut self) -> Self {
        self.allow_insecure = true;
        self
    }

    /// Loads plugins that other users could change, or does not.
    #[must_use]
    #[deprecated(since = "0.2.0", note = "use `allow_insecure_plugins()`")]
    pub fn with_insecure_plugins_allowed(mut self, allowed: bool) -> Self {
        self.allow_insecure = allowed;
        self
    }

    /// Has this program try every plugin in a process of its own before it is loaded in this one. The program is the command
    /// `highwater`, or one that calls [`serve_probe`](crate::opening::serve_probe) if its first argument is `probe`.
    ///
    /// By default, a survey and the choice of the best backend use a program `highwater` beside the executable. A plugin
    /// requested by name or path is then loaded without a probe.
    #[must_use]
    pub fn with_prober(mut self, program: impl Into<PathBuf>) -> Self {
        self.prober = Some(program.into());
        self
    }

    /// Limits the time that a plugin may take to open in a probe, which is then killed, and to load in this process. The
    /// default is 10 seconds.
    ///
    /// In this process nothing can be killed. If a constructor of the library exceeds the limit, opening fails, but the
    /// constructor holds the lock of the system's loader until it returns. Until then the process can start no thread and open
    /// no library, opening any backend returns `InvalidState`, and `std::process::exit` and the return from `main` hang.
    /// `std::process::abort` ends the process. A [prober](Self::with_prober) prevents this. The limit does not cover the
    /// opening of the plugin's backend in this process.
    #[must_use]
    pub fn with_load_limit(mut self, limit: Duration) -> Self {
        self.load_limit = limit;
        self
    }
}
