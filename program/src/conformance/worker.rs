//! The process that cases run in: opens the backend, and runs case after case as the runner says.
//!
//! A case can bring it down, or hang; the runner replaces it then and goes on with the next case.

use std::os::unix::net::UnixStream;

use anyhow::Result;
use highwater::ErrorKind;
use highwater::hal::Backend;
use highwater_conformance::{Executor as _, InProcess};

use super::super::args::ConformanceWorkerArguments;
use super::super::backends::Prober;
use super::super::failure::{Explanation, Failure};
use super::super::frame::Inbox;
use super::super::{Verdict, child, doctor};
use super::choice::Choice;
use super::protocol::{About, Notice, Order};

/// Runs until the runner closes the socket.
pub(in super::super) fn command(arguments: &ConformanceWorkerArguments) -> Result<Verdict> {
    let socket = child::serve(arguments.child.parent, c"hw-cases").map_err(|error| {
        let hint = "this command is for `highwater conformance`, which starts it with a socket as its standard input";
        Failure::new(ErrorKind::InvalidState, "the worker has no runner", hint).because_of(error)
    })?;
    let outcome = serve(&socket, &Choice::of(&arguments.backend));
    if let Err(error) = &outcome {
        let Explanation { message, hint, kind } = Explanation::of(error);
        let kind = kind.unwrap_or_else(|| ErrorKind::InvalidState.as_str().into());
        // Where nobody hears it, the runner is gone.
        let _ = Notice::Failed { kind, message, hint }.send(&socket);
    }
    Ok(if outcome.is_ok() { Verdict::Good } else { Verdict::Bad })
}

fn serve(socket: &UnixStream, choice: &Choice) -> Result<()> {
    let backend = choice.open(Prober::ThisProgram)?;
    let mut executor = InProcess::new(&*backend, Some(choice.launcher()?));
    Notice::Ready(about(&*backend)?).send(socket)?;
    let mut inbox = Inbox::default();
    while let Some(message) = inbox.wait(socket)? {
        let notice = match Order::read(&message)? {
            Order::Run(case) => Notice::Ended(executor.run(case)),
            Order::Points(case) => Notice::Points(executor.points(case)),
            Order::Fault(case, fault) => Notice::Faulted(executor.run_with_fault(case, &fault)),
        };
        notice.send(socket)?;
    }
    Ok(())
}

fn about(backend: &dyn Backend) -> highwater::Result<About> {
    let identity = backend.identity();
    let devices = (0..backend.device_count()).map(|device| Ok(doctor::device_to_json(&backend.device_info(device)?)));
    Ok(About {
        name: identity.name.clone(),
        description: identity.description.clone(),
        real_device: identity.real_device,
        versions: identity.versions.clone(),
        devices: devices.collect::<highwater::Result<_>>()?,
    })
}
