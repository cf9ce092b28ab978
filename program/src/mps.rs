//! NVIDIA's multi-process service for the main job: whether a run uses one, and the start of its own.
//!
//! *The launcher.* The owner of the weights uses the GPU too, so it has to be a client of the service. A driver reads the
//! variable that names the service once, in its first call, and safe code cannot set a variable of its own process. So a
//! process that needs a service starts it, starts the program once more as a child with the same arguments and the
//! variable, and waits. It has opened CUDA before, to count the devices, but it makes no context and does no work.
//!
//! *The end.* The child ends with the launcher, and the workers with the child. The library ends the service when the
//! launcher is done, or is killed (`highwater::cuda::mps`).
//!
//! *Failures.* A service must not break a run that works without it. If the service does not start, or the child cannot
//! use the device through it, the launcher does the job itself and states the reason.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};

use anyhow::Result;
use highwater::cuda::mps::{self, MOST_CLIENTS, PIPE_DIRECTORY};
use highwater::hal::{Backend, counted, display_foreign};
use rustix::process::{Signal, getpid, kill_process};

use super::args::DigitsArguments;
use super::service::{Mode, Service, State};
use super::{Verdict, backends, child, output, scale};

/// The exit code of a child that cannot use the device through the service.
const UNUSABLE: u8 = 75;

/// A pipe directory that cannot exist, so that a driver finds no service.
const NOWHERE: &str = "/dev/null/mps";

/// The process that does the job.
pub(super) enum Plan {
    This(Service),
    /// A child did it, with this result.
    Child(Verdict),
}

/// Decides whether the job needs a service of its own or a way around a running one. If so, a child does the job.
pub(super) fn plan(arguments: &DigitsArguments, backend: &dyn Backend) -> Result<Plan> {
    if backend.identity().name != "cuda" {
        return Ok(Plan::This(Service::none("the backend is not CUDA", false)));
    }
    let workers = if arguments.scale { scale::WORKERS.into_iter().max().unwrap_or(0) } else { arguments.workers };
    let mut devices = 0;
    for ordinal in 0..backend.device_count() {
        let capabilities = backend.capabilities(ordinal)?;
        devices += usize::from(capabilities.shareable_memory && !capabilities.ipc_transports.is_empty());
    }
    let matters = devices > 0 && workers > devices;
    let none = |reason: String| Ok(Plan::This(Service::none(reason, matters)));
    let shared = format!("{} share {}", counted(workers, "worker"), counted(devices, "device"));
    let status = mps::status();
    let service =
        |state, reason| Service { state, pipe_directory: Some(status.pipe_directory.clone()), reason, matters };
    if arguments.launcher.is_some() {
        return match arguments.mps {
            Mode::Off => none("`--mps off`".to_owned()),
            _ => Ok(Plan::This(service(State::Own, shared))),
        };
    }
    match arguments.mps {
        Mode::Off if status.running => {
            let around = [(PIPE_DIRECTORY, OsString::from(NOWHERE))];
            return Ok(Plan::Child(verdict(run_child(&around)?)));
        }
        Mode::Off => return none("`--mps off`".to_owned()),
        _ if status.running => return Ok(Plan::This(service(State::Used, "it runs already".to_owned()))),
        Mode::UseOnly => {
            return none(format!("`--mps use-only`, and none runs in {}", status.pipe_directory.display()));
        }
        Mode::Auto => {}
    }
    if !matters {
        return none("no two workers share a device".to_owned());
    }
    if workers + 1 > MOST_CLIENTS {
        return none(format!("a service has at most {MOST_CLIENTS} processes"));
    }
    let Some(control) = status.control_program else {
        return none(format!("`{}` is not in PATH", mps::CONTROL_PROGRAM));
    };
    let mut options = mps::Options::new().with_control_program(control);
    if let Some(limit) = backends::load_limit() {
        options = options.with_limit(limit);
    }
    let guard = match mps::start(options) {
        Ok(guard) => guard,
        Err(error) => return none(error.message().to_owned()),
    };
    let ended = run_child(&guard.environment());
    // Before this process says anything about the run, or ends itself.
    drop(guard);
    match ended {
        Ok(status) if status.code() == Some(UNUSABLE.into()) => none("CUDA does not open through a service".to_owned()),
        Ok(status) => Ok(Plan::Child(verdict(status))),
        Err(error) => none(format!("the owner of the weights does not start: {error}")),
    }
}

/// Runs the program once more with these variables and waits for its end.
fn run_child(variables: &[(&'static str, OsString)]) -> std::io::Result<ExitStatus> {
    // Unlike `current_exe`, this is the same program even if the file was replaced.
    let mut command = Command::new("/proc/self/exe");
    command.args(["--launcher".to_owned(), getpid().to_string()]).args(std::env::args_os().skip(1));
    command.envs(variables.iter().map(|(name, value)| (name, value))).status()
}

/// Returns the result of the child that did the job. Ends this process in the same way if a signal ended the child.
fn verdict(status: ExitStatus) -> Verdict {
    if let Some(signal) = status.signal().and_then(Signal::from_named_raw) {
        let _ = kill_process(getpid(), signal);
    }
    Verdict::Code(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(super::failure::CANNOT))
}

/// In the child of a launcher: makes this process end with it.
pub(super) fn follow(arguments: &DigitsArguments) -> std::io::Result<()> {
    arguments.launcher.map_or(Ok(()), |launcher| child::end_with(launcher, c"highwater"))
}

/// In the child of a launcher: returns the result with which the launcher does the job itself, if this process cannot use
/// a device through the service.
pub(super) fn give_up(arguments: &DigitsArguments, opened: Result<&dyn Backend, &anyhow::Error>) -> Option<Verdict> {
    if arguments.launcher.is_none() || arguments.mps == Mode::Off {
        return None;
    }
    let why = match opened {
        Ok(backend) => try_devices(backend).err()?.to_string(),
        Err(error) => format!("{error:#}"),
    };
    output::line(format_args!("note: not through the multi-process service: {}", display_foreign(&why)));
    Some(Verdict::Code(UNUSABLE))
}

/// Makes a context on each device, with which a driver connects to the service at the latest.
fn try_devices(backend: &dyn Backend) -> highwater::Result<()> {
    (0..backend.device_count()).try_for_each(|device| backend.memory_info(device).map(|_| ()))
}
