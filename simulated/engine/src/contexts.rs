//! Primary contexts. The first retain creates one, and the last release destroys it.

use std::sync::atomic::Ordering;

use crate::code::{Answer, Code};
use crate::current;
use crate::process::{Simulation, simulation};

impl Simulation {
    /// Retains a device's primary context once per process, as the vendor's runtime does at the first call of one of its
    /// libraries.
    ///
    /// # Errors
    /// 101 if no such device exists.
    pub(crate) fn retain_for_runtime(&self, device: u32) -> Answer<()> {
        let state = self.state(device)?;
        let _one_at_a_time = state.changing.lock();
        if !state.runtime_retains.swap(true, Ordering::AcqRel) {
            state.retains.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Destroys the objects of a device's context.
    fn end_context(&self, device: u32) {
        self.hooks.wait_for_device(device);
        self.end_graphs(device);
        self.end_streams(device);
        self.end_events(device);
        self.end_memory(device);
        for (other, state) in (0u32..).zip(&self.devices) {
            let lost = if other == device { 0 } else { !(1 << device) };
            state.peers.fetch_and(lost, Ordering::AcqRel);
        }
        if let Ok(state) = self.state(device) {
            state.runtime_retains.store(false, Ordering::Release);
        }
    }
}

/// `cuDevicePrimaryCtxRetain`.
///
/// # Errors
/// 101 if no such device exists.
pub fn retain(device: u32) -> Answer<u64> {
    let simulation = simulation()?;
    let state = simulation.state(device)?;
    let _one_at_a_time = state.changing.lock();
    state.retains.fetch_add(1, Ordering::AcqRel);
    Ok(current::handle_of(device))
}

/// `cuDevicePrimaryCtxRelease_v2`. The last release destroys the context with everything in it.
///
/// # Errors
/// 101 if no such device exists, 201 if its context is not alive.
pub fn release(device: u32) -> Answer<()> {
    let simulation = simulation()?;
    let state = simulation.state(device)?;
    let _one_at_a_time = state.changing.lock();
    match state.retains.load(Ordering::Acquire) {
        0 => return Err(Code::INVALID_CONTEXT),
        1 => simulation.end_context(device),
        _ => {}
    }
    state.retains.fetch_sub(1, Ordering::AcqRel);
    Ok(())
}

/// `cuDevicePrimaryCtxGetState`: returns the flags, and whether the context is alive.
///
/// # Errors
/// 101 if no such device exists.
pub fn state(device: u32) -> Answer<(u32, bool)> {
    Ok((0, simulation()?.state(device)?.retains.load(Ordering::Acquire) > 0))
}

/// Returns the device of the current context. If none is current, creates the context of device 0 and makes it current, as
/// the vendor's runtime does for a thread that calls one of its libraries.
///
/// # Errors
/// 3, 4, and the code by which the context was lost.
pub fn or_runtime_default() -> Answer<u32> {
    let simulation = simulation()?;
    if let Some(device) = current::device() {
        simulation.check_context(device)?;
        return Ok(device);
    }
    simulation.retain_for_runtime(0)?;
    current::set(current::handle_of(0))?;
    Ok(0)
}
