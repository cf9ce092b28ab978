//! The `highwater` program, command by command.
//!
//! - `digits`: the main job; `model`, `task`: weights and images, and what is to be done with them; `weights`: the weights
//!   in device memory, and in that of other processes; `classifier`: the threads that do the work; `report`, `scale`: what
//!   is printed
//! - `owner`, `worker`: the main job in several processes, over `control` (what they say to each other), `frame` (how) and
//!   `child` (a process that is started, watched and stopped)
//! - `soak`: sharing under random kills
//! - `doctor`: which backends can be used here; `conformance`: the suite against one of them, in a
//!   process of its own; `backends`: how all open one; `probe`: a plugin, tried in a process of its own
//! - `args`: the command line; `output`: the two output streams; `table`: tables that fit; `progress`: a bar or plain lines; `failure`: errors with
//!   a hint; `warnings`: what the library warns about
//!
//! Results go to standard output, everything else to standard error. Exit code 0: all went well; 1: the command did its
//! work and the answer is bad (wrong predictions, leaks, failed cases, no usable backend); 2: it could not do its work; 3:
//! a worker died.

#![deny(unsafe_code)]

mod args;
mod backends;
mod child;
mod classifier;
mod conformance;
mod control;
mod digits;
mod doctor;
mod failure;
mod frame;
mod model;
mod output;
mod owner;
mod probe;
mod progress;
mod report;
mod scale;
mod soak;
mod table;
mod task;
mod warnings;
mod weights;
mod worker;

use std::process::ExitCode;

use self::args::{Command, Soak};

/// How a command that did its work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Good,
    Bad,
}

fn main() -> ExitCode {
    let arguments = match args::parse() {
        Ok(arguments) => arguments,
        // Help, the version, or a usage error: clap knows where it goes and with which code.
        Err(refusal) => {
            return match output::of_parser(&refusal) {
                Ok(()) => ExitCode::from(u8::try_from(refusal.exit_code()).unwrap_or(failure::CANNOT)),
                Err(error) => {
                    failure::print(&error.into(), false);
                    ExitCode::from(failure::CANNOT)
                }
            };
        }
    };
    if let Err(error) = output::require() {
        failure::print(&error.into(), false);
        return ExitCode::from(failure::CANNOT);
    }
    warnings::show();
    highwater::hal::file_limit::refuse_instead_of_killing();
    backends::configure(arguments.allow_insecure_plugins, arguments.load_limit);
    let json = arguments.json;
    let verdict = match &arguments.command {
        None => digits::command(&arguments.digits, json),
        Some(Command::Doctor) => doctor::command(json),
        Some(Command::Conformance(arguments)) => conformance::command(arguments, json),
        Some(Command::Soak(arguments)) => match &arguments.what {
            Soak::Ipc(arguments) => soak::command(arguments, json),
        },
        Some(Command::ConformanceWorker(arguments)) => conformance::worker::command(arguments),
        Some(Command::Probe(arguments)) => probe::command(arguments),
        Some(Command::Worker(arguments)) => worker::command(arguments),
        Some(Command::SoakConsumer(arguments)) => soak::consumer::command(arguments),
        Some(Command::SoakHeir) => soak::heir::command(),
    };
    match verdict {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Err(error) => {
            failure::print(&error, json);
            ExitCode::from(failure::exit_code(&error))
        }
    }
}
