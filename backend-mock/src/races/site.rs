//! The origin of an operation: the call of the backend, the thread, and the line of the program.

use std::backtrace::BacktraceStatus;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::observer::{OnStream, Origin};

/// The origin of an operation.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) origin: Arc<Origin>,
    /// `None` for an operation of the host.
    pub(crate) stream: Option<OnStream>,
    /// For an operation of a graph, the call that recorded it; `origin` is the launch.
    pub(crate) recorded: Option<Arc<Origin>>,
    /// Whether it is recorded and not executed.
    pub(crate) in_capture: bool,
}

impl Site {
    #[cfg(test)]
    pub(crate) fn nowhere() -> Arc<Self> {
        let thread = String::new();
        let operation = crate::operation::Operation::Copy;
        let origin = Origin { serial: 0, operation, call: 0, thread, backtrace: None };
        Arc::new(Self { origin: Arc::new(origin), stream: None, recorded: None, in_capture: false })
    }
}

/// A function that was active during a call; see [`Place::frames`](super::Place::frames).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Frame {
    /// Its path.
    pub function: String,
    /// `FILE:LINE:COLUMN`, if the program was built with debug information.
    pub location: Option<String>,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Some(location) => write!(f, "{} at {location}", self.function),
            None => f.write_str(&self.function),
        }
    }
}

impl Origin {
    /// Returns the callers, the innermost first, without this crate, the standard library, and the code that starts
    /// threads and programs.
    pub(crate) fn frames(&self) -> Vec<Frame> {
        let here = std::env::current_dir().unwrap_or_default();
        let mut frames = self.all_frames();
        frames.retain(|frame| frame.is_callers(&here));
        frames
    }

    /// Returns the frames that a report shows: the callers in the program, and the number of other frames. If no caller
    /// is in the program, all callers.
    pub(crate) fn shown_frames(&self) -> (Vec<Frame>, usize) {
        shown(self.all_frames(), &std::env::current_dir().unwrap_or_default())
    }

    fn all_frames(&self) -> Vec<Frame> {
        let captured = self.backtrace.as_ref().filter(|backtrace| backtrace.status() == BacktraceStatus::Captured);
        captured.map_or_else(Vec::new, |backtrace| parse(&backtrace.to_string()))
    }
}

fn shown(mut frames: Vec<Frame>, here: &Path) -> (Vec<Frame>, usize) {
    let all = frames.len();
    frames.retain(|frame| frame.is_callers(here));
    if frames.iter().any(|frame| !frame.is_of_libraries(here)) {
        frames.retain(|frame| !frame.is_of_libraries(here));
    }
    let others = all - frames.len();
    (frames, others)
}

/// Returns the frames of a printed backtrace: a line `NUMBER: FUNCTION`, without the number for a function that was
/// inlined into the next, and perhaps a line `at FILE:LINE:COLUMN`.
fn parse(printed: &str) -> Vec<Frame> {
    let mut frames: Vec<Frame> = Vec::new();
    for line in printed.lines().map(str::trim) {
        if let Some(location) = line.strip_prefix("at ") {
            if let Some(frame) = frames.last_mut() {
                frame.location.get_or_insert_with(|| location.trim_start_matches("./").to_owned());
            }
            continue;
        }
        let function = match line.split_once(": ") {
            Some((number, function)) if number.bytes().all(|digit| digit.is_ascii_digit()) => function,
            _ => line,
        };
        frames.push(Frame { function: function.to_owned(), location: None });
    }
    frames
}

/// The folder of this crate's sources.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");

impl Frame {
    /// Returns the path of the function. That of a trait's method begins with its type, and an inlined function has a
    /// bare name.
    fn path(&self) -> &str {
        let path = self.function.trim_start_matches(['<', '&']);
        let path = path.strip_prefix("mut ").unwrap_or(path);
        path.strip_prefix("dyn ").unwrap_or(path)
    }

    /// Returns the source file. A relative path is printed for files below the current directory.
    fn file(&self, here: &Path) -> Option<PathBuf> {
        self.location.as_ref().and_then(|location| location.split(':').next()).map(|file| here.join(file))
    }

    fn is_callers(&self, here: &Path) -> bool {
        const OTHERS: [&str; 7] = ["std::", "core::", "alloc::", "test::", "highwater_mock::", "__rust", "<unknown>"];
        const STARTERS: [&str; 9] = [
            "main",
            "_start",
            "__libc_start_main",
            "__libc_start_main_impl",
            "__libc_start_call_main",
            "start_thread",
            "clone",
            "clone3",
            "__clone3",
        ];
        let file = self.file(here);
        let is_in = |folder: &Path| file.as_ref().is_some_and(|file| file.starts_with(folder));
        // The seeded mistakes of this crate are callers like any other.
        let examples = Path::new(SOURCES).join("races/examples");
        if is_in(&examples) && !is_in(&examples.join("mod.rs")) {
            return true;
        }
        let path = self.path();
        let starts = STARTERS.contains(&path) && (path != "main" || file.is_none());
        let is_others = OTHERS.iter().any(|prefix| path.starts_with(prefix)) || is_in(Path::new(SOURCES));
        !(path.is_empty() || starts || is_others || is_in(Path::new("/rustc")))
    }

    /// Returns whether the function belongs to a library of this project: in the same workspace, or in a registry.
    fn is_of_libraries(&self, here: &Path) -> bool {
        /// Each library's name in paths of code, its sources in the workspace, and its folder in a registry.
        const LIBRARIES: [(&str, &str, &str); 3] = [
            ("highwater_core::", "core/src", "highwater-core-"),
            ("highwater_hal::", "core/hal/src", "highwater-hal-"),
            ("highwater_plugin::", "plugin/src", "highwater-plugin-"),
        ];
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
        let file = self.file(here);
        LIBRARIES.iter().any(|(path, sources, package)| {
            self.path().starts_with(path)
                || file.as_ref().is_some_and(|file| {
                    workspace.is_some_and(|folder| file.starts_with(folder.join(sources)))
                        || file.iter().any(|part| part.to_string_lossy().starts_with(package))
                })
        })
    }
}

/// Returns the frame that a user looks for first: the innermost one of the program, outside of this project's
/// libraries.
pub(crate) fn first_of_program(frames: &[Frame]) -> Option<&Frame> {
    let here = std::env::current_dir().unwrap_or_default();
    frames.iter().find(|frame| !frame.is_of_libraries(&here)).or_else(|| frames.first())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "   0: std::backtrace::Backtrace::create
   1: highwater_mock::races::finder::Finder::origin
             at ./backend-mock/src/races/finder.rs:50:9
   2: enqueue
             at WORKSPACE/backend-mock/src/stream.rs:700:13
      <highwater_mock::gpu::MockGpu as highwater_hal::backend::Backend>::copy
             at ./backend-mock/src/gpu.rs:700:13
   3: copy_part
             at ./core/src/stream.rs:300:5
      <highwater_core::stream::Stream>::copy
             at /registry/highwater-core-0.1.0/src/stream.rs:310:5
   4: my_program::upload::{{closure}}
             at ./src/upload.rs:12:20
      call_once<(), my_program::upload>
             at /rustc/5980/library/core/src/ops/function.rs:250:5
      main
             at ./src/main.rs:5:1
   5: <core::ops::function::FnOnce<()>>::call_once
   6: main
   7: __libc_start_main_impl
   8: _start
";

    #[test]
    fn only_the_frames_of_callers_are_kept_with_their_places() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut frames = parse(&PRINTED.replace("WORKSPACE", workspace.to_str().unwrap()));
        frames.retain(|frame| frame.is_callers(workspace));
        let shown: Vec<_> = frames.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "copy_part at core/src/stream.rs:300:5",
                "<highwater_core::stream::Stream>::copy at /registry/highwater-core-0.1.0/src/stream.rs:310:5",
                "my_program::upload::{{closure}} at src/upload.rs:12:20",
                "main at src/main.rs:5:1",
            ]
        );
        let of_libraries: Vec<_> = frames.iter().map(|frame| frame.is_of_libraries(workspace)).collect();
        assert_eq!(of_libraries, [true, true, false, false]);
    }

    #[test]
    fn a_report_shows_the_program_and_counts_the_rest() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let printed = PRINTED.replace("WORKSPACE", workspace.to_str().unwrap());
        let texts = |printed: &str| {
            let (frames, others) = shown(parse(printed), workspace);
            (frames.iter().map(ToString::to_string).collect::<Vec<_>>(), others)
        };
        let (frames, others) = texts(&printed);
        assert_eq!(frames, ["my_program::upload::{{closure}} at src/upload.rs:12:20", "main at src/main.rs:5:1"]);
        assert_eq!(others, 11);
        // If no frame of the program is known, all frames.
        let (before, _) = printed.split_once("   4: ").unwrap();
        let (frames, others) = texts(before);
        assert_eq!((frames.len(), others), (2, 4));
    }
}
