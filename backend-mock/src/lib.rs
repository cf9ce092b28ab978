//! A GPU simulated on the CPU: the `mock` backend of Highwater.
//!
//! [`MockGpu`] implements the contract of `highwater-hal` on any Linux machine. Tests run on it without hardware, and fail
//! on it if they would fail on hardware. It is a device, not a stub:
//!
//! - Memory is real and limited. Streams run on threads of their own, and lag behind the calls.
//! - Products are computed. Each is two commands that meet in the workspace, so code that misuses streams, events or
//!   workspaces gets wrong numbers, as on hardware.
//! - [`MockOptions`], or the environment variable `HIGHWATER_MOCK`, make the mock slow, take abilities away, and make the
//!   n-th call of an operation fail, or calls by chance. The mock counts every call.
//! - Test mode ([`MockOptions::with_checks`]) finds memory that is freed while device work still uses it. The race finder
//!   ([`races`]) finds work that nothing orders.
//! - A schedule ([`MockOptions::with_schedule`]) executes the work in an order that a seed gives.
//!
//! ```
//! use std::sync::Arc;
//! use highwater_hal::{
//!     AllocateOptions, Backend, BlasKind, BlasOptions, DataType, FillPattern, Gemm, GemmShape, HostOptions, Location,
//!     MemoryCopy, MemoryFill, StreamOptions,
//! };
//! use highwater_mock::{MockGpu, MockOptions, Operation};
//!
//! let gpu = MockGpu::open(MockOptions::new())?;
//! let stream = gpu.create_stream(0, &StreamOptions::new())?;
//! let ones = gpu.allocate(0, &AllocateOptions::new(16 * 4))?;
//! let product = gpu.allocate(0, &AllocateOptions::new(16 * 4))?;
//! let host = gpu.host_allocator();
//! let pinned = host.allocate(16 * 4, &HostOptions::new())?;
//! let mut handle = gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas))?;
//! handle.set_stream(stream)?;
//!
//! // SAFETY: all blocks are as large as they are said to be and stay allocated until the stream was synchronized.
//! unsafe {
//!     gpu.fill(&MemoryFill::new(0, ones, FillPattern::U32(1f32.to_bits()), 16), stream)?;
//!     handle.gemm(&Gemm::new(GemmShape::new(DataType::F32, 4, 4, 4), ones, ones, product))?;
//!     let to_host = MemoryCopy::new(Location::Host(pinned), Location::Device { device: 0, ptr: product }, 16 * 4);
//!     gpu.copy(&to_host, stream)?;
//! }
//! gpu.synchronize_stream(stream)?;
//! // SAFETY: the copy has completed, and the block holds sixteen floats.
//! assert_eq!(unsafe { *pinned.as_ptr().cast::<[f32; 16]>() }, [4.0; 16]);
//! assert_eq!(gpu.calls(Operation::Gemm), 1);
//! # // SAFETY: nothing is outstanding.
//! # unsafe { host.free(pinned)?; gpu.free(0, ones, None)?; gpu.free(0, product, None)?; }
//! # Ok::<(), highwater_hal::Error>(())
//! ```
//!
//! # What the mock promises
//!
//! **It checks what the contract asks of the caller.** A copy from or to memory that is not page-locked, a range that is not
//! inside one live block, and a stream-ordered block freed without a stream are errors. Hardware may accept some of them.
//! A query of a stream or an event of a capture always loses the capture. A capture takes neither stream-ordered memory nor
//! the launch of a graph.
//!
//! **It repeats bit for bit.** Equal calls give equal results, except with
//! [`AtomicsMode::Allowed`](highwater_hal::AtomicsMode). Then sums over a long k are added in another order each time, on
//! purpose.
//!
//! **It reuses early.** The next block, range of addresses or raw handle takes the place of the one that ended last, as soon
//! as the contract allows it: a block of equal size at the same address, and stream-ordered memory with the earlier work
//! still outstanding. So a program that uses something too late meets its successor. Test mode and a quarantine keep freed
//! memory back instead. Ids are never reused, only their slots.
//!
//! **It leaves out what no correct program can see.** Stream priorities change nothing, and a graph executes one operation
//! after the other.
//!
//! # How it simulates a device
//!
//! *Asynchrony.* Each stream is a queue of commands and a worker thread. A call checks its arguments, enqueues, and returns.
//! The worker executes in order, after the latency of the options. An event names the latest point that was recorded for
//! it; a wait takes the point that the event names at the time of the call. A command that panics loses its device, and no
//! caller is left waiting.
//!
//! *Memory.* A device's memory is one sealed memory file, mapped once. An arena says which bytes are taken. A shareable block
//! has a file of its own, mapped over its part until the free, and takes a descriptor of the process. All accesses are
//! relaxed atomics, so accesses that nothing orders give unspecified values and never undefined behavior. Page-locked
//! memory is anonymous memory and a table. Nothing is locked, and copies are as strict as on hardware.
//!
//! *Time.* Events record the host's clock. A latency is time that really passes. Under a schedule there are no workers and
//! no latencies: calls of the host execute the commands.
//!
//! *Other processes.* Every process has devices of its own, with the same UUIDs. They stand for the same hardware, and each
//! process sees its own allocations and what it opened of others. Memory and events travel by descriptor
//! ([`Transport::Descriptor`](highwater_hal::Transport)). Shared state lives in sealed memory files without a name, so it
//! needs no space in `/dev/shm`, and ends with the last process that uses it: importers keep memory that its owner frees.
//! Work that a process has queued ends with the process. On hardware it may go on for a while.
//!
//! # What the observers see
//!
//! The engine executes, and knows nothing of the checks and the race finder. It tells them which memory each command uses
//! and what orders the commands (`observer`). Without them, each hook costs one check of a null pointer.
//!
//! Test mode sees memory that changes hands while a command that has been enqueued still uses it, and fills freed memory
//! with [`POISON`]. It does not see commands of other processes.
//!
//! The race finder sees everything that orders two operations: streams, events, waits of the host, and graphs. It sees
//! accesses of the CPU to page-locked memory if the owner of the memory reports them. It does not see a program's own locks
//! and channels, or paths that are never run. It misses a race rather than report one that is none; see [`races`].
//!
//! # The files, from the bottom up
//! - `operation`, `calls`: the names of the calls; their counts and faults
//! - `mapping`, `sealed_file`, `payload`, `imports`, `device_memory`, `arena`, `device`: a device, its bytes, and which of
//!   them are taken
//! - `observer`, `clock`: what the engine tells its observers
//! - `event`, `shared_event`, `peers`: points in streams, also of other processes, and whether those processes live
//! - `command`, `kernel`, `memory_use`, `recording`: what streams execute, what it computes, and what captures record
//! - `stream`, `engine`, `capture`, `product`: queues, workers, and the calls that enqueue
//! - `checks`, [`races`], `schedule`: the observers, and execution in the order of a seed
//! - `mapped_memory`: physical memory, reserved addresses, and which devices have access; `describe`: what lies at an address
//! - `host`, `host_observer`, `foreign`, `raw_handles`, `state`, `blas`, `ipc`, `gpu`: the traits of the contract;
//!   `options`: how a mock is opened
//! - `simulated`: the inside of the mock, for the simulated vendor libraries

mod arena;
mod blas;
mod calls;
mod capture;
mod checks;
mod clock;
mod command;
mod describe;
mod device;
mod device_memory;
mod engine;
mod event;
mod foreign;
mod gpu;
mod hash;
mod held;
mod host;
mod host_observer;
mod imports;
mod ipc;
mod kernel;
mod mapped_memory;
mod mapping;
mod memory_use;
mod observer;
mod operation;
mod options;
mod payload;
mod peers;
mod product;
pub mod races;
mod raw_handles;
mod recording;
mod schedule;
mod sealed_file;
mod shared_event;
#[cfg(feature = "simulated")]
#[doc(hidden)]
pub mod simulated;
mod state;
mod stream;

pub use checks::Violation;
pub use device_memory::POISON;
pub use gpu::MockGpu;
pub use operation::Operation;
pub use options::{ENVIRONMENT_VARIABLE, MockOptions};
#[doc(hidden)]
pub use product::{RawProduct, Scale};
