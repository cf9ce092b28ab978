//! A GPU simulated on the CPU: the `mock` backend of Highwater.
//!
//! [`MockGpu`] is a device, not a stub. Its memory is real and limited, its streams run on threads of their own and
//! really lag behind, its products are really computed, in two stream operations each that meet in the workspace, so
//! that code which misuses streams, events or workspaces gets wrong numbers, as on hardware. It can be made slow, be
//! made to lack an ability, and be told to fail the n-th call of any operation, or some by chance ([`MockOptions`], or the
//! environment variable `HIGHWATER_MOCK`); it counts every call; and in test mode ([`MockOptions::with_checks`]) it finds
//! memory that is freed while device work still uses it. It finds work that nothing orders ([`races`]), and executes in an order
//! that a seed gives ([`MockOptions::with_schedule`]).
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
//! # Where what is
//! - `options`: what a mock is like; `operation`: names, counts and faults of its calls
//! - `gpu`: the `Backend`; `blas`: the handles; `host`: page-locked memory
//! - `device`, `arena`, `device_memory`, `mapping`: a device, which parts of its memory are taken, and the bytes
//! - `ipc`, `imports`, `shared_event`, `sealed_file`, `peers`: memory and events of other processes, and whether those live
//! - `stream`, `event`, `engine`: queues, points in streams, and the workers
//! - `product`, `kernel`: the commands of a product, and what they compute
//! - `capture`, `foreign`: recorded work and its replay; streams and events of other code, and of each thread
//! - `checks`: test mode; [`races`]: the race finder; `uses`: what commands read and write, for both
//! - `schedule`: execution in an order that follows from a seed
//! - `simulated`: what the simulated vendor libraries (`backend-mock/simulated`) need of the inside
//!
//! # How it differs from hardware
//! It is stricter: a copy from or to memory that is not page-locked, a range that is not inside one live block, and a
//! stream-ordered block freed without a stream are refused. Whoever asks or waits for a stream or an event of a capture
//! loses the capture for certain, and a capture takes neither stream-ordered memory nor the launch of a graph. Stream
//! priorities change nothing, and a graph is executed one operation after the other.
//!
//! It is repeatable bit for bit, except where [`AtomicsMode::Allowed`](highwater_hal::AtomicsMode) was chosen: then sums
//! over a long k are added in another order each time, on purpose.
//!
//! # Sharing between processes
//! Every process has devices of its own, with the same UUIDs: they stand for the same hardware, and each process sees its
//! own allocations and what it opened of others. Memory and events travel by descriptor
//! ([`Transport::Descriptor`](highwater_hal::Transport)). What is shared lives in sealed memory files without a name, so
//! it needs no room in `/dev/shm`, and ends with the last process that uses it, however that ends. Work that a process
//! has queued ends with the process; on hardware it may go on for a while.

mod arena;
mod blas;
mod calls;
mod capture;
mod checks;
mod clock;
mod command;
mod device;
mod device_memory;
mod engine;
mod event;
mod foreign;
mod gpu;
mod hash;
mod host;
mod imports;
mod ipc;
mod kernel;
mod mapping;
mod observer;
mod operation;
mod options;
mod payload;
mod peers;
mod product;
pub mod races;
mod recording;
mod schedule;
mod sealed_file;
mod shared_event;
#[cfg(feature = "simulated")]
#[doc(hidden)]
pub mod simulated;
mod state;
mod stream;
mod uses;

pub use checks::Violation;
pub use device_memory::POISON;
pub use gpu::MockGpu;
pub use operation::Operation;
pub use options::{ENVIRONMENT_VARIABLE, MockOptions};
#[doc(hidden)]
pub use product::{RawProduct, Scale};
