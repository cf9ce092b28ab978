//! Streams by their raw handles.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use highwater_hal::{Backend, Completion, StreamId, StreamOptions};
use highwater_mock::simulated::Call;
use parking_lot::{Mutex, RwLock};

use crate::capture_state::{CAPTURES, node};
use crate::code::{Answer, Code};
use crate::current::{self, with_context};
use crate::handles::Handles;
pub use crate::handles::{NON_BLOCKING, Stream};
use crate::process::{IN_HOST_FUNCTION, Simulation, die, simulation};
use crate::variants::{Vendor, hip_major, vendor};

/// `CU_STREAM_LEGACY`; 0 means the same.
pub const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`.
pub const PER_THREAD: u64 = 2;
/// CUDA's least and greatest priority. The greatest is the smaller number.
pub const PRIORITIES: (i32, i32) = (0, -5);
/// HIP's least and greatest priority.
pub const HIP_PRIORITIES: (i32, i32) = (1, -1);

/// Every live stream.
static STREAMS: RwLock<BTreeMap<u64, Arc<Stream>>> = RwLock::new(BTreeMap::new());
static HANDLES: Handles = Handles::new();

/// Returns the code for an unknown stream.
fn unknown_stream() -> Code {
    match vendor() {
        Vendor::Cuda => Code::INVALID_HANDLE,
        // HIP 6 reports a destroyed context. HIP 7 dereferences the handle.
        Vendor::Hip if hip_major() < 7 => Code::CONTEXT_IS_DESTROYED,
        Vendor::Hip => {
            die("the simulated HIP runtime: a stream was used after its end, which is a segmentation fault in HIP 7")
        }
    }
}

impl Simulation {
    /// Returns the stream of a raw handle; 0, 1 and 2 are default streams of the current context's device.
    ///
    /// # Errors
    /// 201 for a default stream without a current context, 400 for an unknown stream (HIP 6: 709; HIP 7 ends the
    /// process), the code of a lost context.
    pub fn stream(&self, raw: u64) -> Answer<Stream> {
        if raw > PER_THREAD {
            let found = STREAMS.read().get(&raw).map(|stream| **stream);
            let stream = found.ok_or_else(unknown_stream)?;
            self.check_context(stream.device)?;
            return Ok(stream);
        }
        let device = current::device().ok_or(Code::INVALID_CONTEXT)?;
        self.check_context(device)?;
        Ok(self.default_stream(device, raw == PER_THREAD))
    }

    /// Returns a default stream of a device, whichever context is current.
    #[must_use]
    pub fn default_stream(&self, device: u32, per_thread: bool) -> Stream {
        let id = if per_thread { self.thread_stream(device) } else { self.legacy_stream(device) };
        Stream { id, device, flags: 0, priority: 0, number: u64::from(device) * 2 + u64::from(per_thread) + 1 }
    }

    /// Orders the next work of a stream behind the streams that it implicitly waits for: the legacy default stream and the
    /// blocking streams wait for each other. Every call that enqueues work must call this first, also in a capture.
    ///
    /// 901 if the stream's capture was invalidated, 906 if the legacy default stream would depend on a capture, the code of a
    /// lost context.
    pub fn before_enqueue(&self, stream: &Stream) -> Answer<()> {
        if self.is_recording(stream)? {
            return Ok(());
        }
        if stream.is_legacy() {
            self.check_legacy_use(stream.device)?;
            let mut before = vec![self.thread_stream(stream.device)];
            let blocking = |other: &&Arc<Stream>| other.device == stream.device && other.flags & NON_BLOCKING == 0;
            before.extend(STREAMS.read().values().filter(blocking).map(|other| other.id));
            // With AMD's rules, the legacy stream does not wait for streams that take part in a capture.
            for other in before.into_iter().filter(|other| CAPTURES.of(*other).is_none()) {
                self.hooks.order(stream.id, other).map_err(|error| self.code_of(error))?;
            }
        } else if stream.flags & NON_BLOCKING == 0 {
            let legacy = self.legacy_stream(stream.device);
            self.hooks.order(stream.id, legacy).map_err(|error| self.code_of(error))?;
        }
        Ok(())
    }
}

impl Simulation {
    /// Makes a device's helper stream do work between the past and the future work of a stream of any device: for calls whose
    /// objects belong to another device than their stream.
    pub(crate) fn on_helper(
        &self,
        device: u32,
        stream: StreamId,
        work: impl FnOnce(StreamId) -> Answer<()>,
    ) -> Answer<()> {
        let helper = self.helper(device)?;
        self.hooks.order(helper, stream).map_err(|error| self.code_of(error))?;
        work(helper)?;
        self.hooks.order(stream, helper).map_err(|error| self.code_of(error))
    }

    /// Returns a stream of a device that no program knows.
    pub(crate) fn helper(&self, device: u32) -> Answer<StreamId> {
        static HELPERS: Mutex<BTreeMap<u32, StreamId>> = Mutex::new(BTreeMap::new());
        let mut helpers = HELPERS.lock();
        if let Some(&helper) = helpers.get(&device) {
            return Ok(helper);
        }
        let made = self.gpu.create_stream(device, &StreamOptions::new()).map_err(|error| self.code_of(error))?;
        helpers.insert(device, made);
        Ok(made)
    }

    /// Destroys the streams of a context that ends.
    pub(crate) fn end_streams(&self, device: u32) {
        let ended: Vec<_> = STREAMS.write().extract_if(.., |_, stream| stream.device == device).collect();
        for (raw, stream) in ended {
            // The mock's table holds it as long as this table does.
            let _ = self.gpu.destroy_stream(stream.id);
            HANDLES.give_back(raw);
        }
    }
}

/// `cuStreamCreateWithPriority`. Clamps the priority to the vendor's range.
///
/// # Errors
/// 1 for unknown flags, also without a context; 201 without a context, 2 if memory is exhausted.
pub fn create(flags: u32, priority: i32) -> Answer<u64> {
    simulation()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let (simulation, device) = with_context()?;
    let id = simulation.gpu.create_stream(device, &StreamOptions::new()).map_err(|error| simulation.code_of(error))?;
    static NUMBERS: AtomicU64 = AtomicU64::new(1000);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let (least, greatest) = match vendor() {
        Vendor::Cuda => PRIORITIES,
        Vendor::Hip => HIP_PRIORITIES,
    };
    let priority = priority.clamp(greatest, least);
    let raw = HANDLES.take();
    STREAMS.write().insert(raw, Arc::new(Stream { id, device, flags, priority, number }));
    Ok(raw)
}

/// Returns the stream that HIP follows from an event that was recorded on `raw`; `None` for the legacy default stream. For the
/// per-thread default stream, this is the thread's own stream, which ends with the thread.
pub(crate) fn followed(raw: u64, stream: &Stream) -> Option<Weak<Stream>> {
    thread_local! {
        static OWN: std::cell::RefCell<BTreeMap<u32, Arc<Stream>>> = const { std::cell::RefCell::new(BTreeMap::new()) };
    }
    if stream.is_legacy() {
        None
    } else if raw == PER_THREAD {
        OWN.with_borrow_mut(|own| Some(Arc::downgrade(own.entry(stream.device).or_insert_with(|| Arc::new(*stream)))))
    } else {
        STREAMS.read().get(&raw).map(Arc::downgrade)
    }
}

/// `cuStreamDestroy_v2`. Queued work is still executed. HIP waits for that work (seen with 6.4.3 and 7.2.4), CUDA does not.
///
/// # Errors
/// 400 for a stream that was not created, the code of a lost context. 201 for the per-thread default stream without a context.
pub fn destroy(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    if raw == PER_THREAD {
        simulation.stream(raw)?;
    }
    let mut streams = STREAMS.write();
    simulation.check_context(streams.get(&raw).ok_or_else(unknown_stream)?.device)?;
    let stream = streams.remove(&raw).ok_or_else(unknown_stream)?;
    drop(streams);
    simulation.leave_capture(&stream);
    if vendor() == Vendor::Hip {
        // The wait fails if the stream still takes part in another stream's capture. Then no work is outstanding.
        let _ = simulation.gpu.synchronize_stream(stream.id);
    }
    let destroyed = simulation.gpu.destroy_stream(stream.id).map_err(|error| simulation.code_of(error));
    HANDLES.give_back(raw);
    destroyed
}

/// Returns a stream for `cuStreamGetCtx` and `cuStreamGetPriority`.
///
/// # Errors
/// 901 in an invalidated capture; 906 as [`query`].
pub fn described(raw: u64) -> Answer<Stream> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    if stream.is_legacy() {
        simulation.check_legacy_use(stream.device)?;
    }
    simulation.is_recording(&stream)?;
    Ok(stream)
}

/// Returns a stream for `cuStreamGetFlags` and `cuStreamGetId`, which a capture forbids.
///
/// # Errors
/// 900 in a capture, which is then invalidated; 906 as [`query`].
pub fn described_outside_of_captures(raw: u64) -> Answer<Stream> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    if stream.is_legacy() {
        simulation.check_legacy_use(stream.device)?;
    }
    simulation.check_not_capturing(&stream)?;
    Ok(stream)
}

impl Simulation {
    /// Checks a query of a stream or a wait for it.
    fn check_askable_stream(&self, stream: &Stream) -> Answer<()> {
        self.check_not_capturing(stream)?;
        if stream.is_legacy() {
            self.check_legacy_use(stream.device)?;
        }
        self.check_unsafe_call()
    }
}

/// `cuStreamQuery`.
///
/// # Errors
/// 600 while work is queued, 900 in a capture, 906 for the legacy default stream while a blocking stream is captured (CUDA), the
/// code of a lost context. 900 and 906 invalidate the captures.
pub fn query(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    simulation.check_askable_stream(&stream)?;
    simulation.before_enqueue(&stream)?;
    match simulation.gpu.query_stream(stream.id).map_err(|error| simulation.code_of(error))? {
        Completion::Complete => Ok(()),
        _ => Err(Code::NOT_READY),
    }
}

/// `cuStreamSynchronize`.
///
/// # Errors
/// As [`query`], except 600.
pub fn synchronize(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    simulation.check_askable_stream(&stream)?;
    simulation.wait_for(&stream)
}

impl Simulation {
    /// Waits for a stream that takes part in no capture.
    pub(crate) fn wait_for(&self, stream: &Stream) -> Answer<()> {
        self.before_enqueue(stream)?;
        self.gpu.synchronize_stream(stream.id).map_err(|error| self.code_of(error))?;
        // The call that waited reports a fault of the work.
        self.check_context(stream.device)
    }
}

/// `cuCtxSynchronize`.
///
/// # Errors
/// 900 while a capture is open, the code of a lost context.
pub fn synchronize_context() -> Answer<()> {
    let (simulation, device) = with_context()?;
    simulation.check_unsafe_call()?;
    simulation.check_no_capture_on(device)?;
    simulation.hooks.wait_for_device(device);
    simulation.check_context(device)
}

/// A host function and its argument.
#[derive(Debug, Clone, Copy)]
struct HostFunction {
    function: unsafe extern "C" fn(*mut std::ffi::c_void),
    argument: *mut std::ffi::c_void,
}

// SAFETY: the vendor requires of the caller that the function can run on any thread.
unsafe impl Send for HostFunction {}
// SAFETY: as above; one thread at a time calls it.
unsafe impl Sync for HostFunction {}

impl HostFunction {
    fn call(&self) {
        IN_HOST_FUNCTION.set(true);
        // SAFETY: the caller of `launch_host_function` promised that function and argument stay good until the work has
        // been executed for the last time.
        unsafe { (self.function)(self.argument) };
        IN_HOST_FUNCTION.set(false);
    }
}

/// `cuLaunchHostFunc`.
///
/// # Errors
/// 1 for a null function, 901 in an invalidated capture.
///
/// # Safety
/// The caller must keep the function and its argument valid until the work has been executed. In a graph, they must stay valid
/// until its last launch is done.
pub unsafe fn launch_host_function(
    raw: u64,
    function: Option<unsafe extern "C" fn(*mut std::ffi::c_void)>,
    argument: *mut std::ffi::c_void,
) -> Answer<()> {
    let simulation = simulation()?;
    let function = function.ok_or(Code::INVALID_VALUE)?;
    let stream = simulation.stream(raw)?;
    simulation.before_enqueue(&stream)?;
    let function = HostFunction { function, argument };
    let call = Call::new(move || function.call());
    simulation.hooks.enqueue_call(stream.id, call).map_err(|error| simulation.code_of(error))?;
    simulation.note_nodes(&stream, node::HOST, 1);
    Ok(())
}
