//! 26 mistakes that programs make with streams, events, memory, the CPU, threads, workspaces and graphs, each with its
//! correction.
//!
//! Every function takes a [`Bench`] and makes the calls of one short program. [`measure`](super::measure) runs them.
//! They show each mistake next to the correct program.

mod graphs;
mod host;
mod memory;
mod products;
mod streams;
mod threads;

use std::sync::Arc;

use highwater_hal::{
    AllocateOptions, Backend, BlasHandle, BlasKind, BlasOptions, DataType, DeviceMemoryKind, DevicePtr, EventId,
    EventOptions, FillPattern, Gemm, GemmShape, HostAllocator, HostOptions, HostPtr, Location, MemoryCopy, MemoryFill,
    Result, StreamId, StreamOptions, Workspace,
};

pub use graphs::*;
pub use host::*;
pub use memory::*;
pub use products::*;
pub use streams::*;
pub use threads::*;

use crate::{MockGpu, MockOptions, Operation};

/// A mistake and its correction.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Example {
    /// Name of the function with the mistake.
    pub name: &'static str,
    /// The two operations that nothing orders, in the order of their calls.
    pub operations: [Operation; 2],
    /// The program with the mistake.
    pub mistake: fn(&Bench) -> Result<()>,
    /// The correct program.
    pub corrected: fn(&Bench) -> Result<()>,
}

macro_rules! examples {
    ($($mistake:ident $corrected:ident $first:ident $second:ident,)*) => {
        /// All examples.
        pub const ALL: &[Example] = &[$(Example {
            name: stringify!($mistake),
            operations: [Operation::$first, Operation::$second],
            mistake: $mistake,
            corrected: $corrected,
        },)*];
    };
}

examples! {
    missing_wait missing_wait_corrected Fill Copy,
    recorded_too_early recorded_too_early_corrected Fill Copy,
    recorded_again recorded_again_corrected Fill Copy,
    never_recorded never_recorded_corrected Fill Copy,
    wrong_stream_waits wrong_stream_waits_corrected Fill Copy,
    wrong_stream_synchronized wrong_stream_synchronized_corrected Fill Copy,
    pending_taken_as_done pending_taken_as_done_corrected Fill Copy,
    cross_device_copy cross_device_copy_corrected Fill Copy,
    copied_before_the_product copied_before_the_product_corrected Gemm Copy,
    shared_workspace shared_workspace_corrected Gemm Gemm,
    handle_moved handle_moved_corrected Gemm Gemm,
    fill_against_copy fill_against_copy_corrected Copy Fill,
    freed_in_use freed_in_use_corrected Copy Free,
    host_block_freed host_block_freed_corrected Copy HostFree,
    host_block_reused host_block_reused_corrected Copy Copy,
    freed_on_another_stream freed_on_another_stream_corrected Fill Free,
    allocated_on_another_stream allocated_on_another_stream_corrected Allocate Fill,
    read_too_early read_too_early_corrected Copy CpuAccess,
    overwritten_during_the_copy overwritten_during_the_copy_corrected Copy CpuAccess,
    copied_during_the_access copied_during_the_access_corrected Copy CpuAccess,
    waited_in_another_thread waited_in_another_thread_corrected Copy HostFree,
    block_of_two_threads block_of_two_threads_corrected Fill Copy,
    read_in_another_thread read_in_another_thread_corrected Copy CpuAccess,
    launch_against_use launch_against_use_corrected LaunchGraph Copy,
    launched_twice_at_once launched_twice_at_once_corrected LaunchGraph LaunchGraph,
    branches_of_a_graph branches_of_a_graph_corrected Fill Copy,
}

/// A block of device memory of [`BLOCK_BYTES`].
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// The device.
    pub device: u32,
    /// The first byte.
    pub ptr: DevicePtr,
}

/// Bytes of each block: a matrix of 4 x 4 numbers of 32 bits.
pub const BLOCK_BYTES: usize = 64;

/// The mock that an example runs on: two devices with the finder on, which tells threads apart, under a schedule and in test
/// mode. Operations happen within calls, on the caller's thread, and freed page-locked memory stays mapped while work uses it. So a
/// mistake spoils contents and nothing else.
#[derive(Debug)]
pub struct Bench {
    /// The devices.
    pub gpu: Arc<MockGpu>,
    host: Arc<dyn HostAllocator>,
}

impl Bench {
    /// Creates a bench whose schedule has this seed.
    ///
    /// # Errors
    /// As for [`MockGpu::open`].
    pub fn new(seed: u64) -> Result<Self> {
        let options = MockOptions::new().with_devices(2).with_memory_bytes(1 << 20).with_checks();
        let gpu = MockGpu::open(options.with_schedule(seed).with_thread_races())?;
        Ok(Self { host: gpu.host_allocator(), gpu })
    }

    fn stream(&self, device: u32) -> Result<StreamId> {
        self.gpu.create_stream(device, &StreamOptions::new())
    }

    fn two_streams(&self) -> Result<(StreamId, StreamId)> {
        Ok((self.stream(0)?, self.stream(0)?))
    }

    fn event(&self) -> Result<EventId> {
        self.gpu.create_event(0, &EventOptions::new())
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.gpu.record_event(event, stream)
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.gpu.stream_wait_event(stream, event)
    }

    fn block(&self, device: u32) -> Result<Block> {
        Ok(Block { device, ptr: self.gpu.allocate(device, &AllocateOptions::new(BLOCK_BYTES))? })
    }

    fn block_in_order_of(&self, stream: StreamId) -> Result<Block> {
        let options = AllocateOptions::new(BLOCK_BYTES).with_kind(DeviceMemoryKind::StreamOrdered(stream));
        Ok(Block { device: stream.device(), ptr: self.gpu.allocate(stream.device(), &options)? })
    }

    fn free(&self, block: Block, stream: Option<StreamId>) -> Result<()> {
        // SAFETY: late work finds other contents in the block, which nobody reads.
        unsafe { self.gpu.free(block.device, block.ptr, stream) }
    }

    fn host_block(&self) -> Result<HostPtr> {
        self.host.allocate(BLOCK_BYTES, &HostOptions::new())
    }

    fn free_host_block(&self, block: HostPtr) -> Result<()> {
        // SAFETY: in test mode, a freed block stays mapped while work uses it.
        unsafe { self.host.free(block) }
    }

    /// Notes an access of the CPU, as the owning types of Highwater do.
    fn access(&self, block: HostPtr, writes: bool) {
        if let Some(observer) = self.gpu.host_observer() {
            observer.accessed(block, BLOCK_BYTES, writes);
        }
    }

    fn fill(&self, block: Block, stream: StreamId) -> Result<()> {
        let fill = MemoryFill::new(block.device, block.ptr, FillPattern::U32(1.0_f32.to_bits()), BLOCK_BYTES / 4);
        // SAFETY: nobody looks at the contents.
        unsafe { self.gpu.fill(&fill, stream) }
    }

    fn copy(&self, dst: impl Into<Location>, src: impl Into<Location>, stream: StreamId) -> Result<()> {
        // SAFETY: operations happen one at a time, on this thread, host memory stays mapped, and nobody looks at the
        // contents.
        unsafe { self.gpu.copy(&MemoryCopy::new(dst.into(), src.into(), BLOCK_BYTES), stream) }
    }

    fn handle(&self, stream: StreamId, workspace: Option<DevicePtr>) -> Result<Box<dyn BlasHandle>> {
        let mut handle = self.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas))?;
        handle.set_stream(stream)?;
        let workspace = workspace.map(|ptr| Workspace { ptr, bytes: BLOCK_BYTES });
        // SAFETY: nobody looks at the contents.
        unsafe { handle.set_workspace(workspace)? };
        Ok(handle)
    }

    /// Multiplies two matrices of 4 x 4, and returns the block of the result.
    fn multiply(&self, handle: &mut dyn BlasHandle) -> Result<Block> {
        let (a, b, c) = (self.block(0)?, self.block(0)?, self.block(0)?);
        let shape = GemmShape::new(DataType::F32, 4, 4, 4);
        // SAFETY: the blocks are as large as the matrices and stay allocated as long as the mock.
        unsafe { handle.gemm(&Gemm::new(shape, a.ptr, b.ptr, c.ptr))? };
        Ok(c)
    }
}

impl From<Block> for Location {
    fn from(block: Block) -> Self {
        Self::Device { device: block.device, ptr: block.ptr }
    }
}
