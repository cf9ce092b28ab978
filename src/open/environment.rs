//! The facts of the process that decide where to search: variables, the executable, and its user.

use std::ffi::{OsStr, OsString};
#[cfg(feature = "plugins")]
use std::path::Path;
use std::path::PathBuf;

/// The variables that count, in the order of the documentation.
const VARIABLES: [&str; 6] = [BACKEND, PLUGIN_PATH, DATA_HOME, HOME, ALLOW_INSECURE, PROBING];

/// The system's library folders, each of which has a folder for plugins.
pub(super) const SYSTEM: [&str; 2] = ["/usr/local/lib", "/usr/lib"];

pub(super) const BACKEND: &str = "HIGHWATER_BACKEND";
pub(super) const PLUGIN_PATH: &str = "HIGHWATER_PLUGIN_PATH";
pub(super) const DATA_HOME: &str = "XDG_DATA_HOME";
pub(super) const HOME: &str = "HOME";
pub(super) const ALLOW_INSECURE: &str = "HIGHWATER_ALLOW_INSECURE_PLUGINS";
/// Set in a process that probes, which must not probe itself.
pub(super) const PROBING: &str = "HIGHWATER_PROBING";

#[derive(Debug, Clone, Default)]
#[cfg_attr(not(feature = "plugins"), allow(dead_code, reason = "most of it concerns plugins"))]
pub(super) struct Environment {
    variables: Vec<(&'static str, OsString)>,
    /// Whether the program has more rights than its caller, whose variables are then ignored.
    pub(super) secure: bool,
    pub(super) executable: Option<PathBuf>,
    /// The folders in which the system keeps libraries.
    pub(super) system: &'static [&'static str],
    /// The effective user.
    pub(super) user: u32,
}

impl Environment {
    /// Reads the environment of this process.
    pub(super) fn of_process() -> Self {
        let secure = highwater_hal::secure_execution();
        let mut environment = Self { secure, user: rustix::process::geteuid().as_raw(), ..Self::default() };
        environment.executable = std::env::current_exe().ok();
        environment.system = &SYSTEM;
        if !secure {
            for name in VARIABLES {
                environment.variables.extend(std::env::var_os(name).map(|value| (name, value)));
            }
        }
        environment
    }

    /// Returns the value of a variable. An empty one counts as not set.
    pub(super) fn get(&self, name: &str) -> Option<&OsStr> {
        let set = self.variables.iter().find(|(known, _)| *known == name);
        set.map(|(_, value)| value.as_os_str()).filter(|value| !value.is_empty())
    }

    /// Returns the folder of the executable.
    #[cfg(feature = "plugins")]
    pub(super) fn executable_folder(&self) -> Option<&Path> {
        self.executable.as_deref()?.parent()
    }

    #[cfg(test)]
    pub(super) fn with(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.variables.push((name, value.into()));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_variables_are_not_set() {
        let environment = Environment::default().with(HOME, "").with(BACKEND, "mock");
        assert_eq!(environment.get(HOME), None);
        assert_eq!(environment.get(BACKEND), Some(OsStr::new("mock")));
        assert_eq!(environment.get(DATA_HOME), None);
    }
}
