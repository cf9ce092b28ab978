//! Stream captures by the vendor's rules.
//!
//! The mock records and replays; which call is refused, with which code, and what loses a capture is decided here,
//! before the mock is called. A capture is *open* from its begin to its end. It is *lost* in between when a call was made
//! that it does not allow: then everything on its streams answers 901 until it is ended, the end too, and after that the
//! streams are as good as before.
//!
//! With AMD's rules a lost capture takes its streams with it: once it is ended they are *dead*, that on which it began and
//! every one that had joined, and good for nothing but being destroyed.
//!
//! Calls that could wait for the device, or that could free what a capture uses, are *unsafe* while a capture is open,
//! whatever stream they concern: they answer 900 and lose the capture, unless the thread has exchanged its mode.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ThreadId;

use highwater_hal::{Backend, CaptureMode, GraphExecId, GraphId, StreamId};
use highwater_mock::simulated::Call;
use parking_lot::{Mutex, RwLock};

use crate::code::{Answer, Code};
use crate::memory::{GraphMemory, new_number};
use crate::process::{Simulation, simulation, vendor};
use crate::streams::{NON_BLOCKING, Stream, new_handles};
use crate::variants::Vendor;

/// Modes of a capture and of a thread.
pub mod mode {
    /// Unsafe calls of every thread are refused.
    pub const GLOBAL: u32 = 0;
    /// Unsafe calls of the thread that began it are refused.
    pub const THREAD_LOCAL: u32 = 1;
    /// No unsafe call is refused.
    pub const RELAXED: u32 = 2;
}

/// Kinds of a graph's nodes.
pub mod node {
    /// A kernel.
    pub const KERNEL: u32 = 0;
    /// A copy.
    pub const COPY: u32 = 1;
    /// A fill.
    pub const FILL: u32 = 2;
    /// A function of the host.
    pub const HOST: u32 = 3;
    /// Memory that is allocated.
    pub const ALLOCATE: u32 = 10;
    /// Memory that is freed.
    pub const FREE: u32 = 11;
}

/// Where a stream stands, as `cuStreamIsCapturing` tells.
pub mod status {
    /// It takes part in no capture.
    pub const NONE: u32 = 0;
    /// Its work is recorded.
    pub const ACTIVE: u32 = 1;
    /// Its capture was lost.
    pub const INVALIDATED: u32 = 2;
}

/// One capture, open or ended.
#[derive(Debug)]
pub(crate) struct Capture {
    mode: u32,
    thread: ThreadId,
    origin: Stream,
    lost: AtomicBool,
    ended: AtomicBool,
    /// Whether another capture was begun on a dead stream of it.
    begun_again: AtomicBool,
    /// No other capture of the process has it.
    number: u64,
    nodes: Mutex<Vec<u32>>,
    /// What was allocated in it.
    pub(crate) memory: Arc<GraphMemory>,
}

impl Capture {
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether its streams are dead.
    fn is_dead(&self) -> bool {
        self.is_lost() && self.is_ended()
    }

    /// What a call answers that would enqueue something into it after it was lost.
    fn refusal(&self) -> Code {
        if self.begun_again.load(Ordering::Acquire) { Code::INVALID_VALUE } else { Code::STREAM_CAPTURE_INVALIDATED }
    }
}

/// Which stream it is. The per-thread default stream is another one for each thread.
type Key = (StreamId, Option<ThreadId>);

fn key(stream: StreamId) -> Key {
    (stream, stream.is_per_thread_default().then(|| std::thread::current().id()))
}

/// The open captures, and the lost ones whose streams are dead.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// How many streams there are below.
    count: AtomicUsize,
    /// The captures that streams take part in.
    streams: RwLock<HashMap<Key, (Stream, Arc<Capture>)>>,
}

impl Captures {
    /// The capture that a stream takes part in, or died with.
    pub(crate) fn of(&self, stream: StreamId) -> Option<Arc<Capture>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.streams.read().get(&key(stream)).map(|(_, capture)| Arc::clone(capture))
    }

    fn begin(&self, stream: Stream, capture: Arc<Capture>) -> bool {
        let mut streams = self.streams.write();
        if streams.contains_key(&key(stream.id)) {
            return false;
        }
        streams.insert(key(stream.id), (stream, capture));
        self.count.store(streams.len(), Ordering::Release);
        true
    }

    pub(crate) fn join(&self, stream: Stream, capture: Arc<Capture>) {
        let mut streams = self.streams.write();
        streams.insert(key(stream.id), (stream, capture));
        self.count.store(streams.len(), Ordering::Release);
    }

    /// Ends a capture. Its streams stay in the table where they die with it.
    fn end(&self, capture: &Arc<Capture>, streams_die: bool) {
        if !capture.ended.swap(true, Ordering::AcqRel) && !streams_die {
            self.leave(|_, other| Arc::ptr_eq(other, capture));
        }
    }

    /// Takes streams out of their captures.
    fn leave(&self, left: impl Fn(StreamId, &Arc<Capture>) -> bool) {
        let mut streams = self.streams.write();
        streams.retain(|_, (stream, capture)| !left(stream.id, capture));
        self.count.store(streams.len(), Ordering::Release);
    }

    /// The open captures for which `wanted` holds of one of the streams.
    fn find(&self, wanted: impl Fn(&Stream, &Capture) -> bool) -> Vec<Arc<Capture>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let streams = self.streams.read();
        let found = streams.values().filter(|(stream, capture)| !capture.is_ended() && wanted(stream, capture));
        found.map(|(_, capture)| Arc::clone(capture)).collect()
    }
}

/// What a capture recorded.
#[derive(Debug)]
struct Recorded {
    device: u32,
    nodes: Vec<u32>,
    /// The handle of the first node; those of the others follow it.
    first_node: u64,
    /// Alive as long as a graph or an executable one is.
    #[expect(dead_code, reason = "its destructor frees the memory")]
    memory: Arc<GraphMemory>,
}

#[derive(Debug)]
struct Executable {
    id: GraphExecId,
    recorded: Arc<Recorded>,
}

/// Graphs by their raw handles.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: RwLock<BTreeMap<u64, (GraphId, Arc<Recorded>)>>,
    executables: RwLock<BTreeMap<u64, Arc<Executable>>>,
}

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(mode::GLOBAL) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether the thread runs a function that `cuLaunchHostFunc` was given; such a function may not call the driver.
pub(crate) fn is_in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// Whether the legacy default stream of a device waits for a stream.
fn is_blocking_on(stream: &Stream, device: u32) -> bool {
    stream.device == device && stream.flags & NON_BLOCKING == 0
}

impl Simulation {
    pub(crate) fn lose_capture(&self, capture: &Capture) {
        if !capture.lost.swap(true, Ordering::AcqRel) {
            self.hooks.lose_capture(capture.origin.id, "a call was made that it does not allow");
        }
    }

    /// To be called before what is unsafe while something is captured.
    ///
    /// # Errors
    /// 900 when a capture that is open forbids it to this thread; the capture is lost then.
    pub fn check_unsafe_call(&self) -> Answer<()> {
        let (own, thread) = (MODE.get(), std::thread::current().id());
        if own == mode::RELAXED {
            return Ok(());
        }
        let forbidding = self.captures.find(|_, capture| {
            let here = capture.thread == thread && capture.mode != mode::RELAXED;
            here || (own != mode::THREAD_LOCAL && capture.mode == mode::GLOBAL)
        });
        for capture in &forbidding {
            self.lose_capture(capture);
        }
        if forbidding.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_UNSUPPORTED) }
    }

    /// To be called before a stream is asked or waited for.
    ///
    /// # Errors
    /// 900 when the stream takes part in a capture, which is lost then; 901 when that was lost before (HIP: 900).
    pub(crate) fn check_not_capturing(&self, stream: &Stream) -> Answer<()> {
        match self.captures.of(stream.id) {
            None => Ok(()),
            Some(capture) if capture.is_lost() && vendor() == Vendor::Cuda => Err(Code::STREAM_CAPTURE_INVALIDATED),
            Some(capture) => {
                self.lose_capture(&capture);
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Whether the legacy default stream of a device may be used.
    ///
    /// # Errors
    /// 906 when a blocking stream of the device takes part in a capture, which is lost then.
    pub(crate) fn check_legacy_use(&self, device: u32) -> Answer<()> {
        let drawn_in = self.captures.find(|stream, _| is_blocking_on(stream, device));
        for capture in &drawn_in {
            self.lose_capture(capture);
        }
        if drawn_in.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_IMPLICIT) }
    }

    /// Loses every open capture, as a copy does that is done when its call returns (HIP).
    ///
    /// # Errors
    /// 906 when there was one.
    pub(crate) fn check_nothing_captures(&self) -> Answer<()> {
        let open = self.captures.find(|_, _| true);
        for capture in &open {
            self.lose_capture(capture);
        }
        if open.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_IMPLICIT) }
    }

    /// To be called before a whole device is waited for.
    ///
    /// # Errors
    /// 900 when one of its streams takes part in a capture, which is lost then.
    pub(crate) fn check_no_capture_on(&self, device: u32) -> Answer<()> {
        let open = self.captures.find(|stream, _| stream.device == device);
        for capture in &open {
            self.lose_capture(capture);
        }
        if open.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_UNSUPPORTED) }
    }

    /// Whether a stream takes part in a capture, so that what it is given is recorded.
    ///
    /// # Errors
    /// 901 when the capture was lost; 1 when another was begun on a stream that died with it (HIP).
    pub fn is_recording(&self, stream: &Stream) -> Answer<bool> {
        match self.captures.of(stream.id) {
            None => Ok(false),
            Some(capture) if capture.is_lost() => Err(capture.refusal()),
            Some(_) => Ok(true),
        }
    }

    /// Loses the capture that a stream takes part in, if any, as a call does that a capture does not allow.
    pub fn lose_capture_of(&self, stream: &Stream) {
        if let Some(capture) = self.captures.of(stream.id) {
            self.lose_capture(&capture);
        }
    }

    /// Notes what a capture recorded as `count` nodes of a kind; to be called after something was enqueued. Does
    /// nothing where the stream takes part in no capture.
    pub fn note_nodes(&self, stream: &Stream, kind: u32, count: usize) {
        if let Some(capture) = self.captures.of(stream.id) {
            capture.nodes.lock().extend(std::iter::repeat_n(kind, count));
        }
    }

    /// Takes a stream that is destroyed out of its capture. Without the stream that it began on, a capture is over.
    pub(crate) fn leave_capture(&self, stream: &Stream) {
        if let Some(capture) = self.captures.of(stream.id) {
            self.lose_capture(&capture);
            if capture.origin.id == stream.id {
                self.captures.end(&capture, vendor() == Vendor::Hip);
            }
            if vendor() == Vendor::Hip {
                self.captures.leave(|other, _| other == stream.id);
            }
        }
    }

    pub(crate) fn end_graphs(&self, device: u32) {
        let graphs: Vec<_> =
            self.graphs.graphs.write().extract_if(.., |_, (_, recorded)| recorded.device == device).collect();
        let executables: Vec<_> =
            self.graphs.executables.write().extract_if(.., |_, graph| graph.recorded.device == device).collect();
        for (_, (id, _)) in graphs {
            // They are in the mock's table as long as in this one.
            let _ = self.gpu.destroy_graph(id);
        }
        for (_, executable) in executables {
            let _ = self.gpu.destroy_graph_exec(executable.id);
        }
    }
}

/// `cuStreamBeginCapture_v2`.
///
/// # Errors
/// 1 for an unknown mode, 900 for the legacy default stream, 401 when the stream takes part in a capture. On a dead stream
/// it succeeds, and nothing that follows does (HIP).
pub fn begin(raw: u64, capture_mode: u32) -> Answer<()> {
    let simulation = simulation()?;
    if capture_mode > mode::RELAXED {
        return Err(Code::INVALID_VALUE);
    }
    let stream = simulation.stream(raw)?;
    if stream.is_legacy() {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let capture = Arc::new(Capture {
        mode: capture_mode,
        thread: std::thread::current().id(),
        origin: stream,
        lost: AtomicBool::new(false),
        ended: AtomicBool::new(false),
        begun_again: AtomicBool::new(false),
        number: new_number(),
        nodes: Mutex::new(Vec::new()),
        memory: Arc::new(GraphMemory::new(stream.device)),
    });
    if !simulation.captures.begin(stream, Arc::clone(&capture)) {
        let dead = simulation.captures.of(stream.id).filter(|capture| capture.is_dead());
        dead.ok_or(Code::ILLEGAL_STATE)?.begun_again.store(true, Ordering::Release);
        return Ok(());
    }
    // The rules are this module's; the mock only records.
    simulation.gpu.begin_capture(stream.id, CaptureMode::Relaxed).map_err(|error| {
        simulation.captures.end(&capture, false);
        simulation.code_of(error)
    })
}

/// `cuStreamEndCapture`.
///
/// # Errors
/// 401 when nothing is captured, 903 on a stream that joined, 908 on another thread (unless relaxed), 901 when the capture
/// was lost, 904 when a stream that joined was not waited for. After 903 the capture is lost, after 901, 904 and 908 it has
/// ended. On a dead stream (HIP) 901 again, and 904 when a capture was begun on it.
pub fn end(raw: u64) -> Answer<u64> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    let capture = simulation.captures.of(stream.id).ok_or(Code::ILLEGAL_STATE)?;
    if capture.origin.id != stream.id {
        simulation.lose_capture(&capture);
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.is_dead() {
        let begun_again = capture.begun_again.load(Ordering::Acquire);
        return Err(if begun_again { Code::STREAM_CAPTURE_UNJOINED } else { Code::STREAM_CAPTURE_INVALIDATED });
    }
    let elsewhere = capture.mode != mode::RELAXED && capture.thread != std::thread::current().id();
    // SAFETY: the program ends what it began; what the commands use has to stay until the last launch, which is the
    // promise of every user of the vendor's function.
    let recorded = unsafe { simulation.gpu.end_capture(stream.id) };
    let is_lost = capture.is_lost();
    simulation.captures.end(&capture, is_lost && vendor() == Vendor::Hip);
    if elsewhere || is_lost {
        if let Ok(graph) = recorded {
            let _ = simulation.gpu.destroy_graph(graph);
        }
        return Err(if elsewhere { Code::STREAM_CAPTURE_WRONG_THREAD } else { Code::STREAM_CAPTURE_INVALIDATED });
    }
    let id = recorded.map_err(|error| match error.kind() {
        highwater_hal::ErrorKind::Capture => Code::STREAM_CAPTURE_UNJOINED,
        _ => simulation.code_of(error),
    })?;
    let nodes = std::mem::take(&mut *capture.nodes.lock());
    let first_node = new_handles(nodes.len() as u64);
    let memory = Arc::clone(&capture.memory);
    let recorded = Arc::new(Recorded { device: stream.device, nodes, first_node, memory });
    let graph = new_handles(1);
    simulation.graphs.graphs.write().insert(graph, (id, recorded));
    Ok(graph)
}

/// `cuStreamIsCapturing`: one of [`status`].
///
/// # Errors
/// 400 for what is no stream, 906 for the legacy default stream while a blocking one is captured, which goes on.
pub fn is_capturing(raw: u64) -> Answer<u32> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    if stream.is_legacy() {
        let drawn_in = simulation.captures.find(|other, _| is_blocking_on(other, stream.device));
        if !drawn_in.is_empty() {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
    }
    Ok(match simulation.captures.of(stream.id) {
        None => status::NONE,
        Some(capture) if capture.is_lost() => status::INVALIDATED,
        Some(_) => status::ACTIVE,
    })
}

/// `hipStreamGetCaptureInfo`: what [`is_capturing`] gives, and the number of the capture, 0 where there is none.
///
/// # Errors
/// As [`is_capturing`].
pub fn info(raw: u64) -> Answer<(u32, u64)> {
    let status = is_capturing(raw)?;
    let simulation = simulation()?;
    let stream = simulation.stream(raw)?;
    Ok((status, simulation.captures.of(stream.id).map_or(0, |capture| capture.number)))
}

/// `cuThreadExchangeStreamCaptureMode`: sets the thread's mode and gives the one before. Unknown modes are taken; what they
/// mean is not known, and here they are [`mode::GLOBAL`].
///
/// # Errors
/// As [`simulation`].
pub fn exchange_mode(new: u32) -> Answer<u32> {
    simulation()?;
    Ok(MODE.replace(new))
}

/// `cuGraphInstantiateWithFlags`.
///
/// # Errors
/// 1 for unknown flags, 400 for what is no graph, 801 for graphs that the device launches.
pub fn instantiate(raw: u64, flags: u64) -> Answer<u64> {
    const DEVICE_LAUNCH: u64 = 4;
    const KNOWN: u64 = 15;
    let simulation = simulation()?;
    if flags & !KNOWN != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if flags & DEVICE_LAUNCH != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let graphs = simulation.graphs.graphs.read();
    let (graph, recorded) = graphs.get(&raw).ok_or(Code::INVALID_HANDLE)?;
    simulation.check_context(recorded.device)?;
    let id = simulation.gpu.instantiate_graph(*graph).map_err(|error| simulation.code_of(error))?;
    let executable = Arc::new(Executable { id, recorded: Arc::clone(recorded) });
    drop(graphs);
    let raw = new_handles(1);
    simulation.graphs.executables.write().insert(raw, executable);
    Ok(raw)
}

/// `cuGraphLaunch`.
///
/// # Errors
/// 400 for what is no executable graph and for a stream of another device, 801 in a capture, the code of a lost context.
pub fn launch(raw: u64, raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    let executable = simulation.graphs.executables.read().get(&raw).cloned().ok_or(Code::INVALID_HANDLE)?;
    let stream = simulation.stream(raw_stream)?;
    if simulation.is_recording(&stream)? {
        // The vendor records a child graph; the mock has none.
        return Err(Code::NOT_SUPPORTED);
    }
    if stream.device != executable.recorded.device {
        return Err(Code::INVALID_HANDLE);
    }
    simulation.before_enqueue(&stream)?;
    // SAFETY: what the commands use stays until the launch is done; every user of the vendor's function promises it.
    unsafe { simulation.gpu.launch_graph(executable.id, stream.id) }.map_err(|error| simulation.code_of(error))
}

/// `cuGraphDestroy`. Executable graphs that were made of it live on.
///
/// # Errors
/// 400 for what is no graph, the code of a lost context.
pub fn destroy_graph(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let mut graphs = simulation.graphs.graphs.write();
    simulation.check_context(graphs.get(&raw).ok_or(Code::INVALID_HANDLE)?.1.device)?;
    let (id, recorded) = graphs.remove(&raw).ok_or(Code::INVALID_HANDLE)?;
    drop(graphs);
    drop(recorded);
    simulation.gpu.destroy_graph(id).map_err(|error| simulation.code_of(error))
}

/// `cuGraphExecDestroy`. Launches that were made are still executed.
///
/// # Errors
/// 400 for what is no executable graph, the code of a lost context.
pub fn destroy_executable(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let mut executables = simulation.graphs.executables.write();
    simulation.check_context(executables.get(&raw).ok_or(Code::INVALID_HANDLE)?.recorded.device)?;
    let executable = executables.remove(&raw).ok_or(Code::INVALID_HANDLE)?;
    drop(executables);
    simulation.gpu.destroy_graph_exec(executable.id).map_err(|error| simulation.code_of(error))
}

/// `cuGraphGetNodes`: the handles of a graph's nodes.
///
/// # Errors
/// 400 for what is no graph.
pub fn nodes(raw: u64) -> Answer<Vec<u64>> {
    let simulation = simulation()?;
    let graphs = simulation.graphs.graphs.read();
    let (_, recorded) = graphs.get(&raw).ok_or(Code::INVALID_HANDLE)?;
    Ok((0..recorded.nodes.len() as u64).map(|index| recorded.first_node + index * crate::streams::STEP).collect())
}

/// `cuGraphNodeGetType`: one of [`node`].
///
/// # Errors
/// 400 for what is no node of a graph.
pub fn node_kind(raw: u64) -> Answer<u32> {
    let simulation = simulation()?;
    let graphs = simulation.graphs.graphs.read();
    let found = graphs.values().find_map(|(_, recorded)| {
        let offset = raw.checked_sub(recorded.first_node)?;
        recorded.nodes.get(usize::try_from(offset / crate::streams::STEP).ok()?).copied()
    });
    found.ok_or(Code::INVALID_HANDLE)
}

/// A function of the host and its argument.
#[derive(Debug, Clone, Copy)]
struct HostFunction {
    function: unsafe extern "C" fn(*mut std::ffi::c_void),
    argument: *mut std::ffi::c_void,
}

// SAFETY: who enqueues it promises that it can be called on any thread, as the vendor asks.
unsafe impl Send for HostFunction {}
// SAFETY: as above; it is called by one thread at a time.
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
/// 1 for a null function, 901 in a lost capture.
///
/// # Safety
/// Function and argument stay good until the work has been executed, in a graph until its last launch has.
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
