//! The program, command by command.
//!
//! - `digits`: the main job, over `model` (weights and images) and `report` (what it prints)
//! - `doctor`: which backends can be used here; `conformance`: the suite against one of them
//! - `args`: the command line; `output`: the two output streams; `progress`: a bar or plain lines; `failure`: errors with
//!   a hint; `warnings`: what the library warns about
//!
//! Results go to standard output, everything else to standard error. Exit code 0: all went well; 1: the command did its
//! work and the answer is bad (wrong predictions, leaks, failed cases, no usable backend); 2: it could not do its work.

mod args;
mod conformance;
mod digits;
mod doctor;
mod failure;
mod model;
mod output;
mod progress;
mod report;
mod warnings;

use std::process::ExitCode;

use self::args::Command;

/// How a command that did its work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Good,
    Bad,
}

pub(crate) fn main() -> ExitCode {
    let arguments = match args::parse() {
        Ok(arguments) => arguments,
        // Help, the version, or a usage error: clap knows where it goes and with which code.
        Err(refusal) => refusal.exit(),
    };
    warnings::show();
    let json = arguments.json;
    let verdict = match &arguments.command {
        None => digits::command(&arguments.digits, json),
        Some(Command::Doctor) => doctor::command(json),
        Some(Command::Conformance(arguments)) => conformance::command(arguments, json),
    };
    match verdict {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Err(error) => {
            failure::print(&error, json);
            ExitCode::from(2)
        }
    }
}
