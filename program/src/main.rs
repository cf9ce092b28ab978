//! The `highwater` program, command by command.
//!
//! - `digits`: the main job. `model` and `task` are its weights, images and batches. `weights` has the weights in device
//!   memory. `classifier` has the threads that do the work. `report` and `scale` print the results.
//! - `owner`, `worker`: the two sides of the main job in several processes, with the messages of `control`
//! - `mps`: NVIDIA's multi-process service for the main job; `service`: its state, for the reports
//! - `child`, `frame`: the supervisor of child processes and the framing of messages, for all commands
//! - `doctor`: the report on all backends
//! - `conformance`: the suite against one backend, in a process of its own
//! - `ipc`: the processes of this user that share memory
//! - `soak`: sharing under random kills
//! - `bench`: measurements of the library against their bars
//! - `probe`: the trial of a plugin in a process of its own
//! - `date`: times as dates; `args`: the command line; `modes`: the options that have an effect; `backends`: opening a backend;
//!   `output`: the two output streams; `table`: tables that fit the terminal; `progress`: a bar or plain lines; `failure`: errors with
//!   a hint; `warnings`: the library's warnings
//!
//! `docs/program.md` describes the commands, the output and the exit codes.

#![deny(unsafe_code)]

mod args;
mod backends;
mod bench;
mod child;
mod classifier;
mod conformance;
mod control;
mod date;
mod digits;
mod doctor;
mod failure;
mod frame;
mod hold;
mod ipc;
mod model;
mod modes;
mod mps;
mod output;
mod owner;
mod probe;
mod progress;
mod report;
mod scale;
mod service;
mod soak;
mod table;
mod task;
mod warnings;
mod weights;
mod worker;

use std::process::ExitCode;

use self::args::{Command, Ipc, Soak};

/// The result of a command that did its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Good,
    Bad,
    /// The exit code of the process that did the work.
    Code(u8),
}

fn main() -> ExitCode {
    let arguments = match args::parse() {
        Ok(arguments) => arguments,
        // Help, the version, or a usage error. clap knows its stream and its exit code.
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
        Some(Command::Ipc(arguments)) => match &arguments.what {
            Ipc::Ls => ipc::list(json),
            Ipc::Hold(arguments) => hold::command(arguments, json),
        },
        Some(Command::Bench(arguments)) => bench::command(&arguments.what, json),
        Some(Command::ConformanceWorker(arguments)) => conformance::worker::command(arguments),
        Some(Command::Probe(arguments)) => probe::command(arguments),
        Some(Command::Worker(arguments)) => worker::command(arguments),
        Some(Command::SoakWorker(arguments)) => soak::worker::command(arguments),
        Some(Command::SoakHeir) => soak::heir::command(),
        Some(Command::SoakOwner(arguments)) => soak::owners::command(arguments),
        Some(Command::SoakSuccessor(arguments)) => soak::succession::command(arguments),
        Some(Command::BenchFirstHandle(arguments)) => bench::first_handle::command(arguments),
        Some(Command::BenchImporter(arguments)) => bench::share::command(arguments),
    };
    match verdict {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Ok(Verdict::Code(code)) => ExitCode::from(code),
        Err(error) => {
            failure::print(&error, json);
            ExitCode::from(failure::exit_code(&error))
        }
    }
}
