//! `highwater ipc hold`: keeps shared memory beyond the death of its owner, without a device. Under a service manager with a store for
//! descriptors, the memory survives the death of the holder, too.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, Result};
use highwater::hal::counted;
use highwater::ipc::{DescriptorStore, HeldAllocation, HeldState, Holder};
use highwater::sharing::SharingOptions;
use highwater::{ErrorKind, Ticket};
use serde_json::{Value, json};

use super::args::IpcHoldArguments;
use super::{Verdict, output};

/// The interval between looks for changes to report.
const LOOK: Duration = Duration::from_millis(50);
/// The number of looks between two stores of a state without a change to report. An owner may have shared again meanwhile.
const STORE: u32 = 20;

/// Holds the memory of tickets until a signal ends this process, or nothing is left to hold. Reports each change.
pub(super) fn command(arguments: &IpcHoldArguments, json: bool) -> Result<Verdict> {
    let (sender, ended) = channel();
    ctrlc::set_handler(move || {
        let _ = sender.send(());
    })
    .context("the signals that end this process cannot be received")?;
    let (mut store, state) = DescriptorStore::from_environment()?.unzip();
    let state = state.flatten();
    let is_restored = state.is_some();
    let holder = match state {
        Some(state) => Holder::restore(state, &SharingOptions::new())?,
        None => Holder::new()?,
    };
    for ticket in &arguments.tickets {
        match holder.hold(&ticket.parse::<Ticket>()?) {
            // The earlier process has released it.
            Err(error) if is_restored && error.kind() == ErrorKind::Expired => output::line(format!("{error}")),
            held => held?,
        }
    }
    let (mut before, mut look) = (Vec::new(), 0_u32);
    loop {
        let held = holder.held();
        if let Some(store) = &mut store
            && (held != before || look.is_multiple_of(STORE))
        {
            store.keep(&holder.save()?)?;
        }
        for (number, now) in held.iter().enumerate().filter(|(number, now)| before.get(*number) != Some(*now)) {
            if json { output::object(&to_json(number, now))? } else { output::result(describe(number, now))? }
        }
        let has_any = held.iter().any(|held| held.state != HeldState::Released);
        if !has_any || !matches!(ended.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout)) {
            return Ok(Verdict::Good);
        }
        (before, look) = (held, look.wrapping_add(1));
    }
}

fn describe(number: usize, held: &HeldAllocation) -> String {
    let state = match held.state {
        HeldState::Owned { pid: Some(pid) } => format!("held; process {pid} answers"),
        HeldState::Owned { pid: None } => "held; a process of another PID namespace answers".to_owned(),
        HeldState::Orphaned => "held; the process that answered has ended".to_owned(),
        HeldState::Inherited => "inherited; this process answers".to_owned(),
        _ => "released".to_owned(),
    };
    format!("allocation {number}, {}: {state}", counted(held.ticket.bytes(), "byte"))
}

fn to_json(number: usize, held: &HeldAllocation) -> Value {
    let (state, owner) = match held.state {
        HeldState::Owned { pid } => ("owned", pid),
        HeldState::Orphaned => ("orphaned", None),
        HeldState::Inherited => ("inherited", None),
        _ => ("released", None),
    };
    json!({ "allocation": number, "bytes": held.ticket.bytes(), "state": state, "owner": owner })
}
