//! The one simulation of the process. `cuInit` begins it, a forked child has none, and the exit handler that `cuInit`
//! registers ends it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use highwater_hal::{Backend, BackendTag, StreamId};
use highwater_mock::simulated::Hooks;
use highwater_mock::{ENVIRONMENT_VARIABLE, MockGpu, MockOptions};
use parking_lot::Mutex;

use crate::code::{Answer, Code};
use crate::variants::{Vendor, variants, vendor};
use crate::visible;

/// The devices of the process.
#[derive(Debug)]
pub struct Simulation {
    /// The devices.
    pub gpu: Arc<MockGpu>,
    /// Access to the internals of the devices.
    pub hooks: Hooks,
    pub(crate) tag: BackendTag,
    pub(crate) devices: Vec<DeviceState>,
    /// The mock's devices, by their ordinals in this process.
    pub(crate) visible: Vec<u32>,
}

/// One device and its primary context.
#[derive(Debug, Default)]
pub(crate) struct DeviceState {
    /// Outstanding retains of the primary context, which is alive while this is not 0.
    pub(crate) retains: AtomicU64,
    /// Whether the vendor's runtime holds one of the retains.
    pub(crate) runtime_retains: AtomicBool,
    /// The code that every call with the lost context returns; 0 if the context is not lost.
    sticky: AtomicU32,
    /// One bit for each device whose memory it may access.
    pub(crate) peers: AtomicU64,
    /// Serializes the creation and the end of the context.
    pub(crate) changing: Mutex<()>,
}

impl DeviceState {
    fn retain_for_good(&self) {
        self.runtime_retains.store(true, Ordering::Release);
        self.retains.fetch_add(1, Ordering::AcqRel);
    }
}

static SIMULATION: OnceLock<Simulation> = OnceLock::new();
static OVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether the thread runs a host function of `cuLaunchHostFunc`, which must not call the driver.
    pub(crate) static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

extern "C" fn end() {
    OVER.store(true, Ordering::Release);
}

/// Begins the simulation. Later calls do nothing.
///
/// # Errors
/// 34, 100 or 1 as the variants specify; 3 in a forked child of a process that called it; 4 at exit.
pub fn initialize() -> Answer<()> {
    let variants = variants()?;
    if variants.stub {
        return Err(Code::STUB_LIBRARY);
    }
    if OVER.load(Ordering::Acquire) {
        return Err(Code::DEINITIALIZED);
    }
    if variants.no_device {
        return Err(Code::NO_DEVICE);
    }
    static BEGIN: Mutex<()> = Mutex::new(());
    let _one_at_a_time = match SIMULATION.get() {
        Some(simulation) if simulation.hooks.is_own_process() => return Ok(()),
        Some(_) => return Err(Code::NOT_INITIALIZED),
        None => BEGIN.lock(),
    };
    if SIMULATION.get().is_some() {
        return Ok(());
    }
    let options = match std::env::var(ENVIRONMENT_VARIABLE) {
        Ok(text) => MockOptions::parse(&text),
        Err(_) => Ok(MockOptions::new()),
    };
    let gpu = options.and_then(MockGpu::open).map_err(|error| {
        eprintln!("{}: {ENVIRONMENT_VARIABLE} cannot be had: {error}", vendor().library());
        Code::from(error)
    })?;
    let visible = visible::devices(&gpu)?;
    if visible.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    // SAFETY: the handler is an `extern "C"` function without arguments that only stores to a static atomic, and the
    // library is never unloaded.
    if unsafe { libc::atexit(end) } != 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    let devices: Vec<DeviceState> = (0..gpu.device_count()).map(|_| DeviceState::default()).collect();
    if vendor() == Vendor::Hip {
        // HIP has no contexts: a process that starts it can use every device.
        devices.iter().for_each(DeviceState::retain_for_good);
    }
    let (hooks, tag) = (Hooks::new(&gpu), gpu.identity().tag);
    let _ = SIMULATION.set(Simulation { gpu, hooks, tag, devices, visible });
    Ok(())
}

/// Returns the simulation for a call that needs no context.
///
/// # Errors
/// 3 before `cuInit` and in a forked child, 4 at exit.
#[inline]
pub fn simulation() -> Answer<&'static Simulation> {
    let simulation = SIMULATION.get().filter(|simulation| simulation.hooks.is_own_process());
    let simulation = simulation.ok_or(Code::NOT_INITIALIZED)?;
    if OVER.load(Ordering::Acquire) {
        return Err(Code::DEINITIALIZED);
    }
    if IN_HOST_FUNCTION.get() {
        return Err(Code::NOT_PERMITTED);
    }
    Ok(simulation)
}

impl Simulation {
    /// Checks that a device exists.
    ///
    /// # Errors
    /// 101 if it does not.
    pub fn check_device(&self, device: u32) -> Answer<()> {
        if (device as usize) < self.devices.len() { Ok(()) } else { Err(Code::INVALID_DEVICE) }
    }

    pub(crate) fn state(&self, device: u32) -> Answer<&DeviceState> {
        self.devices.get(device as usize).ok_or(Code::INVALID_DEVICE)
    }

    /// Checks that the device's primary context is alive and not lost.
    ///
    /// # Errors
    /// 709 after it was destroyed, and the code by which it was lost.
    pub fn check_context(&self, device: u32) -> Answer<()> {
        let state = self.state(device)?;
        if state.retains.load(Ordering::Acquire) == 0 {
            return Err(Code::CONTEXT_IS_DESTROYED);
        }
        // The next call reports a fault in a stream.
        if state.sticky.load(Ordering::Acquire) == 0 && self.hooks.is_lost(device) {
            self.lose_contexts(Code::ILLEGAL_ADDRESS);
        }
        match state.sticky.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Loses the contexts of the process: every later call with one returns `code`, and no work is executed. A kernel that
    /// faults takes the contexts of all devices of its process with it.
    pub fn lose_contexts(&self, code: Code) {
        for (device, state) in (0u32..).zip(&self.devices) {
            // The first code stays.
            let _ = state.sticky.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
            let _ = self.gpu.lose_device(device);
        }
    }

    /// Returns the code for a failure of the mock. A lost device loses the contexts.
    pub(crate) fn code_of(&self, error: highwater_hal::Error) -> Code {
        let code = Code::from(error);
        if code == Code::ILLEGAL_ADDRESS {
            self.lose_contexts(code);
        }
        code
    }

    pub(crate) fn legacy_stream(&self, device: u32) -> StreamId {
        StreamId::legacy_default(self.tag, device)
    }

    pub(crate) fn thread_stream(&self, device: u32) -> StreamId {
        StreamId::per_thread_default(self.tag, device)
    }
}

/// Returns the code that the variants prescribe for this call of `function`. 700 loses the contexts.
pub fn injected(function: &str) -> Option<Code> {
    let code = Code(variants().ok()?.due(function)?);
    if code == Code::ILLEGAL_ADDRESS
        && let Ok(simulation) = simulation()
    {
        simulation.lose_contexts(code);
    }
    Some(code)
}

/// Ends the process, as AMD's runtime does when one of its assertions fails.
pub(crate) fn die(message: &str) -> ! {
    eprintln!("{message}");
    std::process::abort()
}
