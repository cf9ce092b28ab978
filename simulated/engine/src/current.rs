//! The current context of each thread.
//!
//! Only primary contexts exist. A context's handle is a number that looks like a pointer and stands for its device. It stays
//! the same when the context is created again, as with the vendor.

use std::cell::Cell;

use crate::code::{Answer, Code};
use crate::process::{Simulation, simulation};
use crate::variants::{Vendor, vendor};

const HANDLES: u64 = 0x00c0_0000_0000;
const STEP: u64 = 0x1000;

/// The depth of a thread's stack of contexts.
const DEPTH: usize = 64;

/// The contexts of a thread, the current one last. It is plain data, so it outlives the destructors of the thread.
#[derive(Clone, Copy)]
struct Stack {
    depth: usize,
    devices: [u8; DEPTH],
}

thread_local! {
    static STACK: Cell<Stack> = const { Cell::new(Stack { depth: 0, devices: [0; DEPTH] }) };
}

/// Returns the device whose context is current.
#[inline]
#[must_use]
pub fn device() -> Option<u32> {
    let stack = STACK.get();
    stack.depth.checked_sub(1).map(|top| u32::from(stack.devices[top]))
}

/// Returns the handle of a device's primary context.
#[must_use]
pub fn handle_of(device: u32) -> u64 {
    HANDLES + u64::from(device) * STEP
}

/// Returns the device of a context's handle; `None` for an unknown handle.
#[must_use]
pub fn device_of(simulation: &Simulation, handle: u64) -> Option<u32> {
    let device = handle.checked_sub(HANDLES).filter(|offset| offset.is_multiple_of(STEP))? / STEP;
    u32::try_from(device).ok().filter(|&device| simulation.check_device(device).is_ok())
}

/// Returns the device of a handle; `None` for 0.
fn context_of(simulation: &Simulation, handle: u64) -> Answer<Option<u32>> {
    match handle {
        0 => Ok(None),
        _ => device_of(simulation, handle).map(Some).ok_or(Code::INVALID_CONTEXT),
    }
}

/// Returns the handle of the current context, 0 if none is current.
///
/// # Errors
/// 3 before `cuInit`, 4 at exit.
pub fn get() -> Answer<u64> {
    simulation()?;
    Ok(device().map_or(0, handle_of))
}

/// Replaces the current context. A null handle pops the current one, which makes the one below current.
///
/// # Errors
/// 3, 4, and 201 for an unknown context.
pub fn set(handle: u64) -> Answer<()> {
    let context = context_of(simulation()?, handle)?;
    let mut stack = STACK.get();
    match context {
        None => stack.depth = stack.depth.saturating_sub(1),
        Some(device) => {
            stack.depth = stack.depth.max(1);
            stack.devices[stack.depth - 1] = device as u8;
        }
    }
    STACK.set(stack);
    Ok(())
}

/// Pushes a context onto the thread's stack.
///
/// # Errors
/// As [`set`]; 201 for a null handle and for a full stack.
pub fn push(handle: u64) -> Answer<()> {
    let device = context_of(simulation()?, handle)?.ok_or(Code::INVALID_CONTEXT)?;
    let mut stack = STACK.get();
    *stack.devices.get_mut(stack.depth).ok_or(Code::INVALID_CONTEXT)? = device as u8;
    stack.depth += 1;
    STACK.set(stack);
    Ok(())
}

/// Pops the current context and returns its handle.
///
/// # Errors
/// 3, 4, and 201 if none is current.
pub fn pop() -> Answer<u64> {
    simulation()?;
    let device = device().ok_or(Code::INVALID_CONTEXT)?;
    let mut stack = STACK.get();
    stack.depth -= 1;
    STACK.set(stack);
    Ok(handle_of(device))
}

/// Returns the simulation for a call that CUDA refuses without a current context. HIP has none.
///
/// # Errors
/// CUDA: as [`with_context`]. HIP: as [`simulation`].
pub fn where_needed() -> Answer<&'static Simulation> {
    match vendor() {
        Vendor::Cuda => with_context().map(|(simulation, _)| simulation),
        Vendor::Hip => simulation(),
    }
}

/// Returns the simulation and the device of the thread's current context.
///
/// # Errors
/// As [`simulation`], 201 if none is current, and the code of a lost context.
#[inline]
pub fn with_context() -> Answer<(&'static Simulation, u32)> {
    let simulation = simulation()?;
    let device = device().ok_or(Code::INVALID_CONTEXT)?;
    simulation.check_context(device)?;
    Ok((simulation, device))
}
