//! Test mode: freed memory is poisoned, and memory that is freed or handed out while device work still uses it is found.
//!
//! Every command that is put into a queue is noted with the ranges that it reads and writes, until it has been executed.
//! What gives memory back, or hands it out, looks whether such a command touches it; if one does, that is a
//! [`Violation`]. Nothing is refused and nothing panics: a violation is there to be asked for.
//!
//! Work is noted when it is enqueued and gone before anybody can see it completed, so who waits as he must is never
//! blamed. Commands of other processes are not seen. Without test mode none of this exists but a null check per command.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use highwater_core::{DevicePtr, StreamId};
use parking_lot::Mutex;

use crate::kernel::{Factor, Panel, Product, intermediate_bytes};
use crate::operation::Operation;
use crate::stream::{Command, Engine};

/// What freed memory is filled with in test mode, in the machine's byte order: a NaN of 32 bits, and two of them one of
/// 64 bits.
pub const POISON: u32 = 0x7ffc_dead;

/// The pattern of a fill with [`POISON`].
pub(crate) const POISON_PATTERN: u64 = (POISON as u64) << 32 | POISON as u64;

/// Violations that are kept with their words; all are counted.
const KEPT: usize = 1000;

/// A rule of use that was broken, as [`MockGpu::violations`](crate::MockGpu::violations) tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The call that broke it.
    pub operation: Operation,
    /// Which memory, and which work on which stream still used it.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.text)
    }
}

/// Whose addresses a range is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Host,
    Device(u32),
}

/// A range of memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) space: Space,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Range {
    fn meets(&self, other: &Self) -> bool {
        self.space == other.space
            && self.address < other.address.saturating_add(other.bytes)
            && other.address < self.address.saturating_add(self.bytes)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, address, bytes } = *self;
        match space {
            Space::Host => write!(f, "{bytes} bytes of page-locked memory at {address:#x}"),
            Space::Device(device) => write!(f, "{bytes} bytes at {:?} of device {device}", DevicePtr::new(address)),
        }
    }
}

/// What one command does to one range.
#[derive(Debug, Clone, Copy)]
struct Use {
    range: Range,
    writes: bool,
}

#[derive(Debug)]
struct InFlight {
    operation: Operation,
    stream: Option<StreamId>,
    device: u32,
    uses: Vec<Use>,
}

#[derive(Debug, Default)]
struct Book {
    /// By the order in which they were noted.
    in_flight: BTreeMap<u64, InFlight>,
    noted: u64,
    violations: Vec<Violation>,
    count: u64,
}

/// The book of one backend in test mode.
#[derive(Debug, Default)]
pub(crate) struct Checks(Mutex<Book>);

/// A command that has not been executed yet; dropped when it has.
#[derive(Debug)]
pub(crate) struct Noted {
    checks: Arc<Checks>,
    number: u64,
}

impl Drop for Noted {
    fn drop(&mut self) {
        let done = self.checks.0.lock().in_flight.remove(&self.number);
        drop(done);
    }
}

impl Checks {
    /// Notes a command that is about to be put into the queue of a stream.
    pub(crate) fn note(
        self: &Arc<Self>,
        operation: Operation,
        command: &Command,
        engine: &Engine,
        device: u32,
        stream: Option<StreamId>,
    ) -> Option<Noted> {
        let uses = uses(command, engine, device);
        if uses.is_empty() {
            return None;
        }
        let mut book = self.0.lock();
        book.noted += 1;
        let number = book.noted;
        book.in_flight.insert(number, InFlight { operation, stream, device, uses });
        Some(Noted { checks: Arc::clone(self), number })
    }

    /// Looks whether work that has not been executed uses a range; `what` became of it by this operation.
    pub(crate) fn look(&self, operation: Operation, what: &str, range: Range) {
        let mut book = self.0.lock();
        let broken: Vec<_> = book
            .in_flight
            .values()
            .filter_map(|work| {
                let touched = work.uses.iter().find(|used| used.range.meets(&range))?;
                let verb = if touched.writes { "writes" } else { "reads" };
                let stream = work.stream.map_or_else(
                    || format!("the legacy default stream of device {}", work.device),
                    |stream| format!("{stream:?}"),
                );
                let text = format!(
                    "{range} {what} while `{}` was queued or running on {stream}, which {verb} {}",
                    work.operation, touched.range
                );
                Some(Violation { operation, text })
            })
            .collect();
        for violation in broken {
            tracing::error!(%violation, "a rule of use was broken");
            book.count += 1;
            if book.violations.len() < KEPT {
                book.violations.push(violation);
            }
        }
    }

    /// Whether work that has not been executed uses a range.
    pub(crate) fn is_in_use(&self, range: Range) -> bool {
        let book = self.0.lock();
        book.in_flight.values().any(|work| work.uses.iter().any(|used| used.range.meets(&range)))
    }

    pub(crate) fn violations(&self) -> Vec<Violation> {
        self.0.lock().violations.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.lock().count
    }
}

/// What a command of a stream of this device reads and writes.
fn uses(command: &Command, engine: &Engine, device: u32) -> Vec<Use> {
    let on = |device: u32, offset: usize, bytes: usize, writes: bool| {
        let address = engine.devices[device as usize].memory.base() + offset as u64;
        Use { range: Range { space: Space::Device(device), address, bytes: bytes as u64 }, writes }
    };
    let host = |address: usize, bytes: usize, writes: bool| {
        let range = Range { space: Space::Host, address: address as u64, bytes: bytes as u64 };
        Use { range, writes }
    };
    match *command {
        Command::CopyToDevice { src, dst, bytes, device } => {
            vec![host(src.address(), bytes, false), on(device, dst, bytes, true)]
        }
        Command::CopyToHost { src, dst, bytes, device } => {
            vec![on(device, src, bytes, false), host(dst.address(), bytes, true)]
        }
        Command::CopyOnDevices { src, src_device, dst, dst_device, bytes } => {
            vec![on(src_device, src, bytes, false), on(dst_device, dst, bytes, true)]
        }
        Command::Fill { dst, bytes, .. } => vec![on(device, dst, bytes, true)],
        Command::Multiply(ref product, panel) => {
            let mut uses = factors(product, &on, device);
            uses.extend(workspace(product, panel).map(|(at, bytes)| on(device, at, bytes, true)));
            uses
        }
        Command::Finish(ref product, panel) => {
            let mut uses = results(product, &on, device);
            uses.extend(workspace(product, panel).map(|(at, bytes)| on(device, at, bytes, false)));
            uses
        }
        Command::MultiplyAndFinish(ref product) => {
            let mut uses = factors(product, &on, device);
            uses.extend(results(product, &on, device));
            uses
        }
        Command::Record(_) | Command::Wait(_) | Command::Release { .. } => Vec::new(),
        // What it touches is not known here.
        #[cfg(feature = "simulated")]
        Command::Call(_) => Vec::new(),
        #[cfg(test)]
        Command::Panic => Vec::new(),
    }
}

type On<'a> = &'a dyn Fn(u32, usize, usize, bool) -> Use;

fn factors(product: &Product, on: On<'_>, device: u32) -> Vec<Use> {
    let (size, extents) = (product.shape.data_type.bytes(), product.shape.extents("checks"));
    match extents {
        Ok(extents) if !product.ignores_factors() => {
            vec![on(device, product.a, extents.a * size, false), on(device, product.b, extents.b * size, false)]
        }
        _ => Vec::new(),
    }
}

fn results(product: &Product, on: On<'_>, device: u32) -> Vec<Use> {
    let (size, extents) = (product.shape.output.bytes(), product.shape.extents("checks"));
    let Ok(extents) = extents else { return Vec::new() };
    let mut uses = vec![on(device, product.d, product.extent_d() * size, true)];
    if !product.beta.is_zero() {
        uses.push(on(device, product.c, extents.c * size, false));
    }
    if let Some((bias, data_type)) = product.bias {
        uses.push(on(device, bias, product.shape.m * data_type.bytes(), false));
    }
    for factor in [product.alpha, product.beta] {
        if let Factor::At { offset, data_type } = factor {
            uses.push(on(device, offset, data_type.bytes(), false));
        }
    }
    uses
}

/// The part of the workspace that a panel takes. A handle's own is no caller's memory, and is given back by the last
/// command itself.
fn workspace(product: &Product, panel: Panel) -> Option<(usize, usize)> {
    let elements = panel.rows * panel.columns * panel.batches;
    product.own.is_none().then(|| (product.workspace, elements * intermediate_bytes(product.shape.data_type)))
}
