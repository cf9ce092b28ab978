//! The process of the cases. It opens the backend and runs the cases that the runner names.
//!
//! If a case crashes or hangs, the runner replaces the process and continues with the next case.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use anyhow::Result;
use highwater::hal::Backend;
use highwater_conformance::{CellAxis, CellTable, Executor as _, InProcess, Mutant, Mutated, cases, cell_tables};
use serde_json::{Value, json};

use super::super::args::ConformanceWorkerArguments;
use super::super::backends::Prober;
use super::super::failure::Explanation;
use super::super::frame::{Inbox, Message as _};
use super::super::{Verdict, child};
use super::choice::Choice;
use super::protocol::{About, Notice, Order};

/// Runs until the runner closes the socket.
pub(in super::super) fn command(arguments: &ConformanceWorkerArguments) -> Result<Verdict> {
    let (socket, inbox) = child::serve(arguments.child.parent, c"hw-cases", "highwater conformance")?;
    let outcome = serve(&socket, inbox, &Choice::of(&arguments.backend), arguments.mutant.as_deref());
    if let Err(error) = &outcome {
        // If the runner is gone, the message is lost.
        let _ = Notice::Failed(Explanation::of(error)).send(&socket);
    }
    Ok(if outcome.is_ok() { Verdict::Good } else { Verdict::Bad })
}

fn serve(socket: &UnixStream, mut inbox: Inbox, choice: &Choice, mutant: Option<&str>) -> Result<()> {
    // The runner of mutants has probed a plugin before.
    let backend = choice.open(if mutant.is_some() { Prober::Nobody } else { Prober::ThisProgram })?;
    let (about, launcher) = (about(&*backend)?, Some(choice.launcher()?));
    let mutated = match mutant {
        Some(name) => {
            let mutant = Mutant::named(name);
            let mutant =
                mutant.ok_or_else(|| io::Error::other(format!("the runner names an unknown mutant: {name}")))?;
            Some(Mutated::new(mutant, Arc::clone(&backend), launcher.clone())?)
        }
        None => None,
    };
    let mut executor = mutated.as_ref().map_or_else(|| InProcess::new(&*backend, launcher), Mutated::executor);
    Notice::Ready(about).send(socket)?;
    while let Some(order) = inbox.wait::<Order>(socket)? {
        let name = order.case();
        let case = cases().find(|case| case.name == name);
        let case = case.ok_or_else(|| io::Error::other(format!("the runner names an unknown case: {name}")))?;
        let notice = match order {
            Order::Run(_, seed) => {
                executor.draw_from(seed);
                Notice::Ended(executor.run(case))
            }
            Order::Points(_) => Notice::Points(executor.points(case)),
            Order::Fault(_, fault) => Notice::Faulted(executor.run_with_fault(case, &fault)),
        };
        notice.send(socket)?;
    }
    Ok(())
}

fn about(backend: &dyn Backend) -> highwater::Result<About> {
    let identity = backend.identity();
    let device = |ordinal| backend.device_info(ordinal).map(|info| serde_json::to_value(info).unwrap_or_default());
    let devices = (0..backend.device_count()).map(device);
    Ok(About {
        name: identity.name.clone(),
        description: identity.description.clone(),
        real_device: identity.real_device,
        versions: identity.versions.clone(),
        devices: devices.collect::<highwater::Result<_>>()?,
        cells: cell_tables(backend)?.iter().map(cells_to_json).collect(),
    })
}

fn cells_to_json(table: &CellTable) -> Value {
    let axis = |axis: &CellAxis| json!({ "axis": axis.name, "values": axis.values, "left_out": axis.left_out });
    let axes: Vec<Value> = table.axes.iter().map(axis).collect();
    json!({ "case": table.case, "axes": axes, "always": table.always, "drawn": table.drawn })
}
