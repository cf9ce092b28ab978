//! Mistakes with products and their workspaces.

use highwater_hal::{Location, Result};

use super::Bench;

/// Copies a result out on another stream than the one that computes it.
pub fn copied_before_the_product(bench: &Bench) -> Result<()> {
    let ((computing, copying), host) = (bench.two_streams()?, bench.host_block()?);
    let workspace = bench.block(0)?;
    let result = bench.multiply(&mut *bench.handle(computing, Some(workspace.ptr))?)?;
    bench.copy(Location::Host(host), result, copying)
}

/// The copying stream waits for the product.
pub fn copied_before_the_product_corrected(bench: &Bench) -> Result<()> {
    let ((computing, copying), host) = (bench.two_streams()?, bench.host_block()?);
    let (workspace, computed) = (bench.block(0)?, bench.event()?);
    let result = bench.multiply(&mut *bench.handle(computing, Some(workspace.ptr))?)?;
    bench.record(computed, computing)?;
    bench.wait(copying, computed)?;
    bench.copy(Location::Host(host), result, copying)
}

/// Binds one workspace to the handles of two streams.
pub fn shared_workspace(bench: &Bench) -> Result<()> {
    let ((one, other), workspace) = (bench.two_streams()?, bench.block(0)?);
    bench.multiply(&mut *bench.handle(one, Some(workspace.ptr))?)?;
    bench.multiply(&mut *bench.handle(other, Some(workspace.ptr))?)?;
    Ok(())
}

/// Each stream has a workspace.
pub fn shared_workspace_corrected(bench: &Bench) -> Result<()> {
    let ((one, other), workspaces) = (bench.two_streams()?, [bench.block(0)?, bench.block(0)?]);
    bench.multiply(&mut *bench.handle(one, Some(workspaces[0].ptr))?)?;
    bench.multiply(&mut *bench.handle(other, Some(workspaces[1].ptr))?)?;
    Ok(())
}

/// Takes a handle to another stream while a product on the first still uses the handle's own workspace.
pub fn handle_moved(bench: &Bench) -> Result<()> {
    let (one, other) = bench.two_streams()?;
    let mut handle = bench.handle(one, None)?;
    bench.multiply(&mut *handle)?;
    handle.set_stream(other)?;
    bench.multiply(&mut *handle)?;
    Ok(())
}

/// The other stream waits for the product first.
pub fn handle_moved_corrected(bench: &Bench) -> Result<()> {
    let ((one, other), computed) = (bench.two_streams()?, bench.event()?);
    let mut handle = bench.handle(one, None)?;
    bench.multiply(&mut *handle)?;
    bench.record(computed, one)?;
    bench.wait(other, computed)?;
    handle.set_stream(other)?;
    bench.multiply(&mut *handle)?;
    Ok(())
}
