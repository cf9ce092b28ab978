//! Mistakes with graphs.

use highwater_hal::{Backend, CaptureMode, GraphExecId, Location, Result, StreamId};

use super::{Bench, Block};

/// Returns a graph that fills a block.
fn filling_graph(bench: &Bench, stream: StreamId, block: Block) -> Result<GraphExecId> {
    bench.gpu.begin_capture(stream, CaptureMode::Relaxed)?;
    bench.fill(block, stream)?;
    end_capture(bench, stream)
}

fn end_capture(bench: &Bench, stream: StreamId) -> Result<GraphExecId> {
    // SAFETY: this function began the capture.
    let graph = unsafe { bench.gpu.end_capture(stream)? };
    bench.gpu.instantiate_graph(graph)
}

fn launch(bench: &Bench, graph: GraphExecId, stream: StreamId) -> Result<()> {
    // SAFETY: the memory of the graph stays allocated. If two launches of it run at once, a schedule still executes one
    // operation at a time.
    unsafe { bench.gpu.launch_graph(graph, stream) }
}

/// Copies a block on one stream while a graph that was launched on another still writes it.
pub fn launch_against_use(bench: &Bench) -> Result<()> {
    let ((launching, copying), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let graph = filling_graph(bench, launching, block)?;
    launch(bench, graph, launching)?;
    bench.copy(Location::Host(host), block, copying)
}

/// The copying stream waits for the launch.
pub fn launch_against_use_corrected(bench: &Bench) -> Result<()> {
    let ((launching, copying), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let launched = bench.event()?;
    let graph = filling_graph(bench, launching, block)?;
    launch(bench, graph, launching)?;
    bench.record(launched, launching)?;
    bench.wait(copying, launched)?;
    bench.copy(Location::Host(host), block, copying)
}

/// Launches one executable graph on two streams at once.
pub fn launched_twice_at_once(bench: &Bench) -> Result<()> {
    let ((one, other), block) = (bench.two_streams()?, bench.block(0)?);
    let graph = filling_graph(bench, one, block)?;
    launch(bench, graph, one)?;
    launch(bench, graph, other)
}

/// Both launches on one stream.
pub fn launched_twice_at_once_corrected(bench: &Bench) -> Result<()> {
    let (stream, block) = (bench.stream(0)?, bench.block(0)?);
    let graph = filling_graph(bench, stream, block)?;
    launch(bench, graph, stream)?;
    launch(bench, graph, stream)
}

/// Records two branches of one graph that use one block, without a wait between them.
pub fn branches_of_a_graph(bench: &Bench) -> Result<()> {
    let ((trunk, branch), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let (forked, joined) = (bench.event()?, bench.event()?);
    bench.gpu.begin_capture(trunk, CaptureMode::Relaxed)?;
    bench.record(forked, trunk)?;
    bench.wait(branch, forked)?;
    bench.fill(block, branch)?;
    bench.copy(Location::Host(host), block, trunk)?;
    bench.record(joined, branch)?;
    bench.wait(trunk, joined)?;
    let graph = end_capture(bench, trunk)?;
    launch(bench, graph, trunk)
}

/// The trunk waits for the branch before it uses the block.
pub fn branches_of_a_graph_corrected(bench: &Bench) -> Result<()> {
    let ((trunk, branch), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let (forked, joined) = (bench.event()?, bench.event()?);
    bench.gpu.begin_capture(trunk, CaptureMode::Relaxed)?;
    bench.record(forked, trunk)?;
    bench.wait(branch, forked)?;
    bench.fill(block, branch)?;
    bench.record(joined, branch)?;
    bench.wait(trunk, joined)?;
    bench.copy(Location::Host(host), block, trunk)?;
    let graph = end_capture(bench, trunk)?;
    launch(bench, graph, trunk)
}
