//! What is opened, and where it is looked for.

use std::path::PathBuf;
use std::time::Duration;

use super::report::{LoadReport, OpenError, Opened};
use super::search::Search;

/// How long a plugin may take.
pub(super) const LOAD_LIMIT: Duration = Duration::from_secs(10);

/// What is opened, and where it is looked for: [`open`](crate::open), [`open_auto`](crate::open_auto) and
/// [`survey`](crate::survey) with everything that can be chosen.
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
    pub(super) allow_mock: bool,
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
            allow_mock: false,
            plugins: true,
            search_folders: Vec::new(),
            allow_insecure: false,
            prober: None,
            load_limit: LOAD_LIMIT,
        }
    }
}

impl OpenOptions {
    /// The best real device; plugins from the usual places; no mock.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with this backend and no other.
    ///
    /// Without a name and a path, the environment variable `HIGHWATER_BACKEND` may give either. Without that, the best is taken.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The same where the mock, or a plugin without hardware behind it, may be taken if no real device works.
    #[must_use]
    pub fn with_mock_allowed(mut self, allowed: bool) -> Self {
        self.allow_mock = allowed;
        self
    }

    /// Opens a backend.
    ///
    /// # Errors
    /// As [`open`](crate::open) and [`open_auto`](crate::open_auto) do.
    pub fn open(&self) -> Result<Opened, OpenError> {
        Search::of_process(self).open()
    }

    /// Tries every backend and keeps none; that of a path that was given, too.
    #[must_use]
    pub fn survey(&self) -> LoadReport {
        Search::of_process(self).survey()
    }
}

/// What concerns plugins.
#[cfg(feature = "plugins")]
impl OpenOptions {
    /// The same with the plugin of this file, a library or a manifest (`*.toml`), and no other. With a name too, the plugin has to
    /// have that name. No built-in backend comes before it.
    #[must_use]
    pub fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// The same with one more folder where plugins are looked for, before those of the environment. It has to be absolute.
    #[must_use]
    pub fn with_search_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.search_folders.push(folder.into());
        self
    }

    /// The same with or without looking for plugins; a path that was given counts all the same.
    #[must_use]
    pub fn with_plugins(mut self, looked_for: bool) -> Self {
        self.plugins = looked_for;
        self
    }

    /// The same with plugins allowed that other users could change: see `docs/plugins.md`. The environment variable
    /// `HIGHWATER_ALLOW_INSECURE_PLUGINS=1` does the same.
    #[must_use]
    pub fn with_insecure_plugins_allowed(mut self, allowed: bool) -> Self {
        self.allow_insecure = allowed;
        self
    }

    /// The same with every plugin tried by this program in a process of its own, before it is loaded in this one: the `highwater`
    /// program, or one that calls [`serve_probe`](crate::serve_probe) when its first argument is `probe`.
    ///
    /// Without it, a survey and the choice of the best use a program `highwater` beside the executable, and a plugin that was asked
    /// for by name or path is loaded without a probe.
    #[must_use]
    pub fn with_prober(mut self, program: impl Into<PathBuf>) -> Self {
        self.prober = Some(program.into());
        self
    }

    /// The same with another limit than 10 s for how long a plugin may take: to be opened in a probe, which is killed then, and to be
    /// loaded in this process.
    #[must_use]
    pub fn with_load_limit(mut self, limit: Duration) -> Self {
        self.load_limit = limit;
        self
    }
}
