//! `highwater ipc ls`: the processes of this user that share memory, with whom, how much, on which device, and since when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use highwater::Transport;
use highwater::hal::{counted, display_foreign};
use highwater::ipc::{Allocation, Answer, OpenedAllocation, SharedAllocation, SharingProcess, processes};
use serde_json::{Value, json};

use super::date::date_of;
use super::table::Table;
use super::{Verdict, output};

/// The time limit for the answers of 64 runtimes, which are asked at once.
const LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of holders that a row names.
const MOST_HOLDERS: usize = 8;
/// Maximum number of rows of a process.
const MOST_ROWS: usize = 32;

pub(super) fn list(json: bool) -> Result<Verdict> {
    let mut hidden = 0;
    let named = |process: SharingProcess| {
        hidden += usize::from(process.pid == 0);
        Named::new(process, hidden)
    };
    let processes: Vec<Named> = processes(LIMIT)?.into_iter().map(named).collect();
    if json {
        let processes: Vec<Value> = processes.iter().map(Named::to_json).collect();
        output::object(&json!({ "processes": processes }))?;
    } else if processes.is_empty() {
        output::result("no process of this user shares memory")?;
    } else {
        output::result(to_table(&processes))?;
        output::result(summary(&processes))?;
    }
    Ok(Verdict::Good)
}

/// A process and its name.
struct Named {
    process: SharingProcess,
    /// Empty if the system does not report it.
    command: String,
    /// Its place among the processes without an id here.
    hidden: usize,
}

impl Named {
    fn new(process: SharingProcess, hidden: usize) -> Self {
        let command = std::fs::read(format!("/proc/{}/comm", process.pid)).unwrap_or_default();
        Self { process, command: String::from_utf8_lossy(command.trim_ascii_end()).into_owned(), hidden }
    }

    fn to_json(&self) -> Value {
        let SharingProcess { pid, answer, shared, opened, left_off, .. } = &self.process;
        json!({
            "pid": pid,
            "command": self.command,
            "answers": *answer == Answer::Complete,
            "note": note(*answer),
            "shared": shared.iter().map(shared_to_json).collect::<Vec<_>>(),
            "opened": opened.iter().map(opened_to_json).collect::<Vec<_>>(),
            "left_off": left_off,
        })
    }

    fn name(&self) -> String {
        match self.process.pid {
            0 => format!("hidden {} (another PID namespace)", self.hidden),
            pid if self.command.is_empty() => pid.to_string(),
            pid => format!("{pid} ({})", display_foreign(&self.command)),
        }
    }
}

/// Returns the reason why the lists of a process are missing.
fn note(answer: Answer) -> Option<&'static str> {
    match answer {
        Answer::Complete => None,
        Answer::Stopped => Some("does not answer: it is stopped"),
        Answer::Full => Some("does not answer: its queue is full"),
        Answer::Invalid => Some("does not answer in a form that this version knows"),
        _ => Some("does not answer"),
    }
}

fn transport(transport: Transport) -> &'static str {
    match transport {
        Transport::Legacy => "legacy handle",
        Transport::Descriptor => "descriptor",
        Transport::Fabric => "fabric",
        _ => "unknown",
    }
}

fn to_json(allocation: &Allocation, further: Value) -> Value {
    let Allocation { device, device_uuid, bytes, since, .. } = *allocation;
    let uuid = device.map(|_| format!("{:032x}", u128::from_be_bytes(device_uuid)));
    let mut object = json!({
        "kind": if device.is_some() { "device" } else { "page-locked" },
        "device": device,
        "uuid": uuid,
        "transport": transport(allocation.transport),
        "bytes": bytes,
        "since": date_of(since),
    });
    if let (Value::Object(object), Value::Object(further)) = (&mut object, further) {
        object.extend(further);
    }
    object
}

fn shared_to_json(shared: &SharedAllocation) -> Value {
    to_json(&shared.allocation, json!({ "dropped": shared.is_dropped, "holders": shared.holders }))
}

fn opened_to_json(opened: &OpenedAllocation) -> Value {
    let further = json!({
        "owner": opened.owner,
        "owner_has_ended": opened.owner_has_ended,
        "idle": opened.is_idle,
    });
    to_json(&opened.allocation, further)
}

/// The allocations of one row: a process has many that differ in nothing but size and time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    role: &'static str,
    memory: String,
    with: String,
}

/// The sums of a row.
struct Sums {
    count: u64,
    bytes: u64,
    since: SystemTime,
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.since = self.since.min(other.since);
    }
}

fn memory(allocation: &Allocation) -> String {
    match allocation.device {
        Some(device) => format!("device {device}, {}", transport(allocation.transport)),
        None => "page-locked".to_owned(),
    }
}

fn shared_group(shared: &SharedAllocation) -> Group {
    let role = if shared.is_dropped { "shares, has dropped it" } else { "shares" };
    Group { role, memory: memory(&shared.allocation), with: with(&shared.holders) }
}

/// Returns the text of the holders of an allocation. A process may hold it more than once, and a hostile list may repeat one.
fn with(holders: &[u32]) -> String {
    let holders: BTreeSet<u32> = holders.iter().copied().collect();
    let named: Vec<String> = holders.iter().take(MOST_HOLDERS).map(u32::to_string).collect();
    match holders.len().saturating_sub(named.len()) {
        0 if named.is_empty() => "nobody now".to_owned(),
        0 => named.join(", "),
        others => format!("{} and {others} others", named.join(", ")),
    }
}

fn opened_group(opened: &OpenedAllocation) -> Group {
    let OpenedAllocation { owner, owner_has_ended, is_idle, .. } = *opened;
    let role = match (owner_has_ended, is_idle) {
        (false, false) => "has open",
        (false, true) => "keeps mapped",
        (true, _) => "holds memory of a dead owner",
    };
    Group { role, memory: memory(&opened.allocation), with: owner.to_string() }
}

/// Returns the rows of a process. The smallest ones become one row if there are too many.
fn rows(process: &SharingProcess) -> Vec<(Group, Sums)> {
    let mut rows: BTreeMap<Group, Sums> = BTreeMap::new();
    let shared = process.shared.iter().map(|shared| (shared_group(shared), &shared.allocation));
    let opened = process.opened.iter().map(|opened| (opened_group(opened), &opened.allocation));
    for (group, &Allocation { bytes, since, .. }) in shared.chain(opened) {
        rows.entry(group).or_insert(Sums { count: 0, bytes: 0, since }).add(&Sums { count: 1, bytes, since });
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    if rows.len() > MOST_ROWS {
        rows.sort_by_key(|(_, sums)| std::cmp::Reverse(sums.bytes));
        let others = rows.split_off(MOST_ROWS - 1);
        let group = Group { role: "has more", memory: "see --json".into(), with: format!("{} groups", others.len()) };
        let sums = others.into_iter().map(|(_, sums)| sums).reduce(|mut all, sums| {
            all.add(&sums);
            all
        });
        rows.extend(sums.map(|sums| (group, sums)));
    }
    rows
}

fn to_table(processes: &[Named]) -> Table {
    let mut table = Table::with_header(["process", "role", "memory", "allocations", "bytes", "with", "since"]);
    for named in processes {
        let name = named.name();
        for (Group { role, memory, with }, Sums { count, bytes, since }) in rows(&named.process) {
            let count = count.to_string();
            table.add_row([name.clone(), role.into(), memory, count, bytes.to_string(), with, date_of(since)]);
        }
        if let Some(note) = note(named.process.answer) {
            table.add_row([&*name, note, "", "", "", "", ""]);
        }
        if named.process.left_off > 0 {
            table.add_row([&*name, "has more than the list has", "", &named.process.left_off.to_string(), "", "", ""]);
        }
    }
    table
}

/// Returns the sums of all processes.
fn summary(processes: &[Named]) -> String {
    let all = || processes.iter().map(|named| &named.process);
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let shared = sum(&mut all().flat_map(|process| &process.shared).map(|shared| shared.allocation.bytes));
    let dead = all().flat_map(|process| &process.opened).filter(|opened| opened.owner_has_ended);
    let dead = sum(&mut dead.map(|opened| opened.allocation.bytes));
    let silent = all().filter(|process| process.answer != Answer::Complete).count();
    let [shared, dead] = [shared, dead].map(|bytes| counted(bytes, "byte"));
    let mut text = format!("shared: {shared}; mapped from owners that have ended: {dead}");
    if silent > 0 {
        text += &format!("; without answer: {silent} of {}", counted(processes.len(), "process"));
    }
    text
}
