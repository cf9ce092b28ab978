//! `highwater ipc hold`: keeps shared memory beyond the death of its owner, without a device.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, Result};
use highwater::Ticket;
use highwater::ipc::{HeldAllocation, HeldState, Holder};
use serde_json::{Value, json};

use super::args::IpcHoldArguments;
use super::{Verdict, output};

/// The interval between looks for changes to report.
const LOOK: Duration = Duration::from_millis(50);

/// Holds the memory of tickets until a signal ends this process, or nothing is left to hold. Reports each change.
pub(super) fn command(arguments: &IpcHoldArguments, json: bool) -> Result<Verdict> {
    let (sender, ended) = channel();
    ctrlc::set_handler(move || {
        let _ = sender.send(());
    })
    .context("the signals that end this process cannot be received")?;
    let holder = Holder::new()?;
    for ticket in &arguments.tickets {
        holder.hold(&ticket.parse::<Ticket>()?)?;
    }
    let mut before = Vec::new();
    loop {
        let held = holder.held();
        for (number, now) in held.iter().enumerate().filter(|(number, now)| before.get(*number) != Some(*now)) {
            if json { output::object(&to_json(number, now))? } else { output::result(describe(number, now))? }
        }
        let has_any = held.iter().any(|held| held.state != HeldState::Released);
        if !has_any || !matches!(ended.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout)) {
            return Ok(Verdict::Good);
        }
        before = held;
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
    format!("allocation {number}, {} bytes: {state}", held.ticket.bytes())
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
