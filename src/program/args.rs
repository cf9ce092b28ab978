//! The command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

/// Far more than pays, and few enough that their buffers fit.
const MOST_THREADS: usize = 1024;

const AFTER_HELP: &str = r#"Environment:
  HIGHWATER_MOCK  describes the mock device, as key=value pairs with commas between: memory=64MiB for its size,
                  latency=1ms, devices=2, fail=run_plan:5 to let the fifth such call fail, and more

With --json, standard output holds one JSON object and nothing else; all other lines go to standard error. Where the
command could not do its work, the object is {"error": {"message": ..., "hint": ..., "kind": ...}}; a wrong command
line leaves standard output empty.

Exit codes: 0 all went well; 1 the answer is bad (wrong predictions, leaks, failed cases, no usable backend); 2 the
command line is wrong or the command could not do its work"#;

/// Classifies handwritten digits on a GPU, or on a mock of one, and says what the resource pools did.
///
/// Several threads each take a pooled handle, stage images through pinned memory, run the layers of a small network on
/// the device, and copy the results back.
#[derive(Debug, Parser)]
#[command(name = "highwater", version, after_help = AFTER_HELP)]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Option<Command>,

    #[command(flatten)]
    pub(super) digits: DigitsArguments,

    /// Print one JSON object on standard output and nothing else
    #[arg(long, global = true)]
    pub(super) json: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Say which backends can be used here, and of each other one why not
    Doctor,
    /// Run the conformance suite against a backend
    Conformance(ConformanceArguments),
}

#[derive(Debug, Args)]
pub(super) struct DigitsArguments {
    /// Backend to use, and no other in its place [default: a usable real device, else the mock]
    #[arg(long, value_name = "NAME")]
    pub(super) backend: Option<String>,

    /// Threads that classify, each with a stream, buffers and a pooled handle
    #[arg(long, value_name = "N", default_value = "4", value_parser = threads)]
    pub(super) threads: usize,

    /// Classify the test set so many times, in the same threads
    #[arg(long, value_name = "N", default_value = "1", value_parser = repeat)]
    pub(super) repeat: usize,

    /// Folder with `weights.safetensors` and `test.safetensors`, instead of the built-in ones
    #[arg(long, value_name = "DIR")]
    pub(super) data: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct ConformanceArguments {
    /// Backend to test
    #[arg(long, value_name = "NAME", default_value = "mock")]
    pub(super) backend: String,

    /// Run only the cases whose name contains this text, or that prove the clause of this id
    #[arg(long, value_name = "TEXT")]
    pub(super) filter: Option<String>,
}

fn number(text: &str, what: &str, most: usize) -> Result<usize, String> {
    text.parse().ok().filter(|number| (1..=most).contains(number)).ok_or_else(|| {
        if most == usize::MAX {
            format!("expected a number of {what}, at least 1")
        } else {
            format!("expected a number of {what} from 1 to {most}")
        }
    })
}

fn threads(text: &str) -> Result<usize, String> {
    number(text, "threads", MOST_THREADS)
}

fn repeat(text: &str) -> Result<usize, String> {
    // A total of images that fits a u32 times the size of any test set.
    number(text, "passes", u32::MAX as usize)
}

/// The arguments of this process.
pub(super) fn parse() -> Result<Arguments, clap::Error> {
    parse_from(std::env::args_os())
}

fn parse_from<T: Into<std::ffi::OsString> + Clone>(
    arguments: impl IntoIterator<Item = T>,
) -> Result<Arguments, clap::Error> {
    let mut command = Arguments::command();
    let matches = command.try_get_matches_from_mut(arguments)?;
    if let Some((name, _)) = matches.subcommand() {
        // Options of the main job in front of a command would have no effect.
        for option in ["backend", "threads", "repeat", "data"] {
            if matches.value_source(option) == Some(ValueSource::CommandLine) {
                let message = format!("`--{option}` in front of `{name}` has no effect; see `highwater {name} --help`");
                return Err(command.error(ErrorKind::ArgumentConflict, message));
            }
        }
    }
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Arguments, String> {
        parse_from(line.split_whitespace()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn json_stands_before_or_after_the_command() {
        for line in ["highwater --json", "highwater --json doctor", "highwater doctor --json"] {
            assert!(parsed(line).unwrap().json, "{line}");
        }
        assert!(!parsed("highwater doctor").unwrap().json);
    }

    #[test]
    fn options_of_the_main_job_are_refused_in_front_of_a_command() {
        let error = parsed("highwater --backend cuda conformance").unwrap_err();
        assert!(error.contains("`--backend` in front of `conformance`"), "{error}");
        let Some(Command::Conformance(arguments)) = parsed("highwater conformance --backend cuda").unwrap().command
        else {
            panic!("another command");
        };
        assert_eq!(arguments.backend, "cuda");
    }

    #[test]
    fn numbers_are_checked_and_the_range_is_named() {
        for bad in ["0", "-1", "1025", "many", ""] {
            assert!(threads(bad).unwrap_err().contains("from 1 to 1024"), "{bad:?}");
        }
        assert_eq!(threads("1024"), Ok(1024));
        assert!(parsed("highwater --threads 0").unwrap_err().contains("from 1 to 1024"));
        assert!(parsed("highwater --repeat 0").unwrap_err().contains("number of passes"));
    }
}
