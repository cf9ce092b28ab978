//! Workspaces: one block of device memory for each stream that ran a BLAS call.
//!
//! So the bytes grow with the streams in use, and not with threads times streams. Lt calls use the same block. A stream that
//! has run only Lt calls has a smaller one.
//!
//! A stream keeps its workspace until it ends. Then the block goes to the next stream that needs one, which first waits, on
//! the device, for the work of the old one. A block serves one call at a time: the lease holds the stream's submission lock
//! for the length of one vendor call (`stream/submission.rs`).

use std::sync::Arc;

use parking_lot::Mutex;

use super::completion_events::CompletionEvent;
use super::device_memory::DeviceMemory;
use super::device_pool::DevicePool;
use crate::capture::thread::{in_capture, warm_up_first};
use highwater_hal::{AllocateOptions, Error, ErrorKind, Result, Workspace};

/// Workspaces of all devices.
pub(crate) struct Workspaces {
    memory: Arc<DeviceMemory>,
    /// By ordinal.
    devices: Box<[Mutex<State>]>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<IdleWorkspace>,
    /// Every allocated workspace, idle or in use by a stream.
    all: Vec<Workspace>,
    /// The most that were allocated at once, and their bytes.
    peak: (u64, u64),
}

impl State {
    /// Returns the number of allocated workspaces, and their bytes.
    fn held(&self) -> (u64, u64) {
        (self.all.len() as u64, self.all.iter().map(|workspace| workspace.bytes as u64).sum())
    }
}

/// A workspace without a stream.
#[derive(Debug, Clone)]
pub(crate) struct IdleWorkspace {
    pub(crate) workspace: Workspace,
    /// The last work that uses it; `None` if there is none.
    pub(crate) after: Option<Arc<CompletionEvent>>,
}

impl Workspaces {
    pub(crate) fn new(memory: Arc<DeviceMemory>) -> Self {
        let devices = memory.services.devices.iter().map(|_| Mutex::default()).collect();
        Self { memory, devices }
    }

    /// Returns the memories of a device's streams.
    pub(crate) fn pool(&self, device: u32) -> &Arc<DevicePool> {
        self.memory.pool(device)
    }

    fn of(&self, device: u32) -> &Mutex<State> {
        &self.devices[device as usize]
    }

    /// Takes the smallest idle workspace of at least `bytes`.
    pub(crate) fn take(&self, device: u32, bytes: usize) -> Option<IdleWorkspace> {
        let mut state = self.of(device).lock();
        let fits = |idle: &(usize, &IdleWorkspace)| idle.1.workspace.bytes >= bytes;
        let smallest = state.idle.iter().enumerate().filter(fits).min_by_key(|(_, idle)| idle.workspace.bytes);
        let index = smallest?.0;
        Some(state.idle.swap_remove(index))
    }

    /// Takes an idle workspace, or allocates one. The first use waits for the work that used it before.
    pub(crate) fn take_or_allocate(&self, device: u32, bytes: usize) -> Result<IdleWorkspace> {
        match self.take(device, bytes) {
            Some(idle) => Ok(idle),
            None => Ok(IdleWorkspace { workspace: self.allocate(device, bytes)?, after: None }),
        }
    }

    /// Allocates workspaces until `count` of at least `bytes` are idle.
    pub(crate) fn warm(&self, device: u32, bytes: usize, count: usize) -> Result<()> {
        let fits = |idle: &&IdleWorkspace| idle.workspace.bytes >= bytes;
        let idle = self.of(device).lock().idle.iter().filter(fits).count();
        (idle..count).try_for_each(|_| self.add_idle(device, bytes))
    }

    /// Allocates a workspace that no stream uses. Without bytes, does nothing.
    pub(crate) fn add_idle(&self, device: u32, bytes: usize) -> Result<()> {
        if bytes > 0 {
            let workspace = self.allocate(device, bytes)?;
            self.give_back(device, IdleWorkspace { workspace, after: None });
        }
        Ok(())
    }

    /// Allocates a workspace.
    pub(crate) fn allocate(&self, device: u32, bytes: usize) -> Result<Workspace> {
        let services = &self.memory.services;
        let capabilities = &services.device(device).capabilities;
        if in_capture() && !capabilities.create_during_capture {
            return Err(warm_up_first("allocate", "a workspace"));
        }
        let options = AllocateOptions::new(bytes);
        let block = self.memory.allocate(device, bytes, || services.backend.allocate(device, &options))?;
        services.ledger.insert_device(block)?;
        let ptr = block.base;
        let workspace = Workspace { ptr, bytes };
        {
            let mut state = self.of(device).lock();
            state.all.push(workspace);
            let (count, bytes) = state.held();
            state.peak = (state.peak.0.max(count), state.peak.1.max(bytes));
        }
        if !ptr.is_aligned_to(capabilities.workspace_alignment) {
            self.give_back(device, IdleWorkspace { workspace, after: None });
            return Err(Error::new(
                ErrorKind::InvalidPointer,
                "allocate",
                format!("the workspace at {ptr} is not aligned to {}", capabilities.workspace_alignment),
            )
            .with_hint("the backend breaks clause memory.aligned"));
        }
        Ok(workspace)
    }

    pub(crate) fn give_back(&self, device: u32, idle: IdleWorkspace) {
        self.of(device).lock().idle.push(idle);
    }

    /// Frees the idle workspaces whose last work is done; with `wait`, waits for that work.
    pub(crate) fn trim(&self, wait: bool) -> Result<()> {
        let mut result = Ok(());
        for (ordinal, state) in (0..).zip(&self.devices) {
            let count = state.lock().idle.len();
            for _ in 0..count {
                let Some(idle) = Self::pop_idle(state) else { break };
                let passed =
                    idle.after.as_ref().map_or(Ok(true), |completion| self.memory.services.is_passed(completion, wait));
                if !matches!(passed, Ok(true)) {
                    result = result.and(passed.map(|_| ()));
                    self.give_back(ordinal, idle);
                    continue;
                }
                // SAFETY: No stream has the workspace, and the last work that used it is done.
                let freed = self.memory.services.note(unsafe { self.memory.free(ordinal, idle.workspace.ptr) });
                match &freed {
                    Ok(()) => state.lock().all.retain(|other| *other != idle.workspace),
                    Err(_) => self.give_back(ordinal, IdleWorkspace { after: None, ..idle }),
                }
                result = result.and(freed);
            }
        }
        result
    }

    /// Takes out the idle workspace that was returned longest ago.
    fn pop_idle(state: &Mutex<State>) -> Option<IdleWorkspace> {
        let mut state = state.lock();
        if state.idle.is_empty() { None } else { Some(state.idle.remove(0)) }
    }

    /// Takes out every workspace, idle or not, with its device, at the end of the runtime.
    pub(crate) fn take_all(&self) -> Vec<(u32, Workspace)> {
        let take = |(device, state): (u32, &Mutex<State>)| {
            let mut state = state.lock();
            state.idle.clear();
            std::mem::take(&mut state.all).into_iter().map(move |workspace| (device, workspace))
        };
        (0..).zip(&self.devices).flat_map(take).collect()
    }

    /// Returns the number of workspaces, and their bytes.
    pub(crate) fn held(&self) -> (u64, u64) {
        self.sum(State::held)
    }

    /// Returns the most workspaces that each device had at once, and their bytes, as sums over the devices.
    pub(crate) fn peak(&self) -> (u64, u64) {
        self.sum(|state| state.peak)
    }

    fn sum(&self, of_device: impl Fn(&State) -> (u64, u64)) -> (u64, u64) {
        self.devices
            .iter()
            .map(|state| of_device(&state.lock()))
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }
}

#[cfg(test)]
impl Workspaces {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held(self.devices.iter().map(Mutex::lock).collect::<Vec<_>>())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.devices.iter().any(Mutex::is_locked)
    }
}
