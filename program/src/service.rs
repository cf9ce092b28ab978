//! The multi-process service of a run, for the result and for people.

use std::path::PathBuf;

use clap::ValueEnum;
use highwater::hal::display_foreign;
use serde_json::{Value, json};

use super::output;

/// The loss without a service and the gain with it, as measured (`docs/cuda.md`).
pub(super) const MEASURED: &str = "on one H200, 2 and 4 workers of the main job reached 0.39 and 0.39 of the speed of one \
                                   without it, and 1.88 and 3.25 with it";

/// The option `--mps`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Mode {
    /// Use a running service; start one if workers share a device
    #[default]
    Auto,
    /// Use none, even if one runs
    Off,
    /// Use a running service; start none
    UseOnly,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Own,
    Used,
    None,
}

/// The service of a run.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) state: State,
    pub(super) pipe_directory: Option<PathBuf>,
    pub(super) reason: String,
    /// True if several workers use one device of CUDA, by time slices without a service.
    pub(super) matters: bool,
}

impl Service {
    pub(super) fn none(reason: impl Into<String>, matters: bool) -> Self {
        Self { state: State::None, pipe_directory: None, reason: reason.into(), matters }
    }

    #[cfg(test)]
    pub(super) fn for_tests() -> Self {
        Self::none("a test", false)
    }

    pub(super) fn to_json(&self) -> Value {
        let state = match self.state {
            State::Own => "own",
            State::Used => "used",
            State::None => "none",
        };
        let directory = self.pipe_directory.as_ref().map(|path| path.display().to_string());
        json!({ "state": state, "pipe_directory": directory, "reason": self.reason })
    }

    /// Returns the line for people; `None` if the service makes no difference.
    pub(super) fn to_line(&self) -> Option<String> {
        let directory = self.pipe_directory.as_deref().unwrap_or("".as_ref()).display();
        let directory = display_foreign(&directory.to_string()).to_string();
        match self.state {
            State::Own => Some(format!("NVIDIA's, started for this run in {directory}")),
            State::Used => Some(format!("NVIDIA's, which runs in {directory}")),
            State::None => self.matters.then(|| format!("none: {}", self.reason)),
        }
    }

    /// Prints a line on standard error, if the service or its absence makes a difference.
    pub(super) fn tell(&self) {
        match (self.to_line(), self.state) {
            (Some(line), State::None) => {
                let told = "note: workers share a device by time slices; multi-process service:";
                output::line(format_args!("{told} {line}; {MEASURED}"));
            }
            (Some(line), _) => output::line(format_args!("note: multi-process service: {line}")),
            (None, _) => {}
        }
    }
}
