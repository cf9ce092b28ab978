//! Graphs by their raw handles.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use highwater_hal::{Backend, GraphExecId, GraphId, StreamId};
use parking_lot::RwLock;

use crate::blocks::GraphMemory;
use crate::code::{Answer, Code};
use crate::current::with_context;
use crate::handles::{Handles, STEP, new_handles};
use crate::process::{Simulation, die, simulation};
use crate::variants::{Vendor, vendor};

/// The nodes and the memory of a graph.
#[derive(Debug)]
struct Recorded {
    device: u32,
    nodes: Vec<u32>,
    /// The handle of the first node. The handles of the others follow it.
    first_node: u64,
    /// Lives as long as a graph or an executable graph uses it.
    #[expect(dead_code, reason = "its destructor frees the memory")]
    memory: Arc<GraphMemory>,
    is_used: AtomicBool,
}

/// A call's use of a graph or of an executable of it. The caller must make one such call at a time. Otherwise CUDA corrupts memory.
struct Use<'g>(&'g Recorded);

impl<'g> Use<'g> {
    fn of(graph: &'g Recorded) -> Self {
        if graph.is_used.swap(true, Ordering::Acquire) {
            die("two threads use a graph or its executables at the same time, expected one after the other");
        }
        // Gives another thread time to make a call.
        std::thread::yield_now();
        Self(graph)
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.0.is_used.store(false, Ordering::Release);
    }
}

#[derive(Debug)]
struct Executable {
    id: GraphExecId,
    recorded: Arc<Recorded>,
}

static GRAPHS: RwLock<BTreeMap<u64, (GraphId, Arc<Recorded>)>> = RwLock::new(BTreeMap::new());
static GRAPH_HANDLES: Handles = Handles::new();
static EXECUTABLE_HANDLES: Handles = Handles::new();
static EXECUTABLES: RwLock<BTreeMap<u64, Arc<Executable>>> = RwLock::new(BTreeMap::new());

/// Registers a recorded graph with the kinds of its nodes, and returns its handle.
pub(crate) fn insert(id: GraphId, device: u32, nodes: Vec<u32>, memory: Arc<GraphMemory>) -> u64 {
    let first_node = new_handles(nodes.len() as u64);
    let graph = GRAPH_HANDLES.take();
    GRAPHS
        .write()
        .insert(graph, (id, Arc::new(Recorded { device, nodes, first_node, memory, is_used: AtomicBool::new(false) })));
    graph
}

/// Returns the code for a handle of no graph.
fn unknown(raw: u64) -> Code {
    if raw == 0 && vendor() == Vendor::Cuda { Code::INVALID_VALUE } else { Code::INVALID_HANDLE }
}

impl Simulation {
    /// Destroys the graphs of a context that ends.
    pub(crate) fn end_graphs(&self, device: u32) {
        let graphs: Vec<_> = GRAPHS.write().extract_if(.., |_, (_, recorded)| recorded.device == device).collect();
        let executables: Vec<_> =
            EXECUTABLES.write().extract_if(.., |_, graph| graph.recorded.device == device).collect();
        for (raw, (id, _)) in graphs {
            // The mock's table holds them as long as this table does.
            let _ = self.gpu.destroy_graph(id);
            GRAPH_HANDLES.give_back(raw);
        }
        for (raw, executable) in executables {
            let _ = self.gpu.destroy_graph_exec(executable.id);
            EXECUTABLE_HANDLES.give_back(raw);
        }
    }
}

/// `cuGraphInstantiateWithFlags`.
///
/// # Errors
/// 1 for unknown flags, 400 for an unknown graph, 801 for graphs that the device launches. CUDA: 201 without a context, 900
/// while a capture is open, 1 for null.
pub fn instantiate(raw: u64, flags: u64) -> Answer<u64> {
    const DEVICE_LAUNCH: u64 = 4;
    const KNOWN: u64 = 15;
    let simulation = simulation()?;
    if vendor() == Vendor::Cuda {
        with_context()?;
        simulation.check_unsafe_call()?;
    }
    if flags & !KNOWN != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if flags & DEVICE_LAUNCH != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let graphs = GRAPHS.read();
    let (graph, recorded) = graphs.get(&raw).ok_or_else(|| unknown(raw))?;
    simulation.check_context(recorded.device)?;
    let only_user = Use::of(recorded);
    let id = simulation.gpu.instantiate_graph(*graph).map_err(|error| simulation.code_of(error))?;
    let executable = Arc::new(Executable { id, recorded: Arc::clone(recorded) });
    drop(only_user);
    drop(graphs);
    let raw = EXECUTABLE_HANDLES.take();
    EXECUTABLES.write().insert(raw, executable);
    Ok(raw)
}

/// `cuGraphLaunch`.
///
/// # Errors
/// 400 for an unknown executable graph, the code of a lost context. CUDA: 1 for null; 900 in a capture, which is then
/// invalidated; a stream of another device only orders the graph. HIP: 801 in a capture, 400 for a stream of another device.
pub fn launch(raw: u64, raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    let executable = EXECUTABLES.read().get(&raw).cloned().ok_or_else(|| unknown(raw))?;
    let stream = simulation.stream(raw_stream)?;
    let device = executable.recorded.device;
    let is_far = stream.device != device;
    match vendor() {
        Vendor::Cuda => simulation.check_not_capturing(&stream)?,
        // The vendor records a child graph; the mock has none.
        Vendor::Hip if simulation.is_recording(&stream)? => return Err(Code::NOT_SUPPORTED),
        Vendor::Hip if is_far => return Err(Code::INVALID_HANDLE),
        Vendor::Hip => {}
    }
    simulation.before_enqueue(&stream)?;
    let launch = |on: StreamId| {
        // SAFETY: what the commands use stays until the launch is done; every user of the vendor's function promises it.
        unsafe { simulation.gpu.launch_graph(executable.id, on) }.map_err(|error| simulation.code_of(error))
    };
    if is_far {
        simulation.check_context(device)?;
        return simulation.on_helper(device, stream.id, launch);
    }
    launch(stream.id)
}

/// `cuGraphDestroy`. Executable graphs that were instantiated from it continue to exist.
///
/// # Errors
/// 400 for an unknown graph (CUDA: 1 for null), the code of a lost context.
pub fn destroy_graph(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let mut graphs = GRAPHS.write();
    simulation.check_context(graphs.get(&raw).ok_or_else(|| unknown(raw))?.1.device)?;
    let (id, recorded) = graphs.remove(&raw).ok_or_else(|| unknown(raw))?;
    drop(graphs);
    let only_user = Use::of(&recorded);
    let destroyed = simulation.gpu.destroy_graph(id).map_err(|error| simulation.code_of(error));
    drop(only_user);
    GRAPH_HANDLES.give_back(raw);
    destroyed
}

/// `cuGraphExecDestroy`. Enqueued launches are still executed.
///
/// # Errors
/// 400 for an unknown executable graph, the code of a lost context. CUDA: 900 while a capture is open, 1 for null.
pub fn destroy_executable(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    if vendor() == Vendor::Cuda {
        simulation.check_unsafe_call()?;
    }
    let mut executables = EXECUTABLES.write();
    simulation.check_context(executables.get(&raw).ok_or_else(|| unknown(raw))?.recorded.device)?;
    let executable = executables.remove(&raw).ok_or_else(|| unknown(raw))?;
    drop(executables);
    let only_user = Use::of(&executable.recorded);
    let destroyed = simulation.gpu.destroy_graph_exec(executable.id).map_err(|error| simulation.code_of(error));
    drop(only_user);
    EXECUTABLE_HANDLES.give_back(raw);
    destroyed
}

/// `cuGraphGetNodes`: the handles of a graph's nodes.
///
/// # Errors
/// 400 for an unknown graph (CUDA: 1 for null).
pub fn nodes(raw: u64) -> Answer<Vec<u64>> {
    simulation()?;
    let graphs = GRAPHS.read();
    let (_, recorded) = graphs.get(&raw).ok_or_else(|| unknown(raw))?;
    Ok((0..recorded.nodes.len() as u64).map(|index| recorded.first_node + index * STEP).collect())
}

/// `cuGraphNodeGetType`: one of [`crate::captures::node`].
///
/// # Errors
/// 400 for an unknown node.
pub fn node_kind(raw: u64) -> Answer<u32> {
    simulation()?;
    let graphs = GRAPHS.read();
    let found = graphs.values().find_map(|(_, recorded)| {
        let offset = raw.checked_sub(recorded.first_node)?;
        recorded.nodes.get(usize::try_from(offset / STEP).ok()?).copied()
    });
    found.ok_or(Code::INVALID_HANDLE)
}
