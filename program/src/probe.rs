//! `highwater probe`: loads one plugin in a process of its own and reports the result. The library starts it before it
//! loads a new plugin.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

use anyhow::Result;
use highwater::ErrorKind;

use super::args::ProbeArguments;
use super::failure::Failure;
use super::{Verdict, child};

/// Probes a plugin. A plugin that does not open is a valid result.
pub(super) fn command(arguments: &ProbeArguments) -> Result<Verdict> {
    serve(arguments).map_err(|error| {
        let hint = "this command is for the program itself, which starts it with pipes as its output";
        Failure::new(ErrorKind::OperatingSystem, "the plugin cannot be probed", hint).because_of(error)
    })?;
    Ok(Verdict::Good)
}

fn serve(arguments: &ProbeArguments) -> io::Result<()> {
    if let Some(parent) = arguments.parent {
        child::end_with(parent, c"hw-probe")?;
    }
    // The output of the plugin is not part of the result.
    let answer = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    rustix::stdio::dup2_stdout(io::stderr().as_fd())?;
    highwater::opening::serve_probe(&arguments.file, arguments.open, answer)
}
