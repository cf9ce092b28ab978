//! A GPU simulated on the CPU: the `mock` backend of Highwater.
//!
//! [`MockGpu`] is a device, not a stub. Its memory is real and limited, its streams run on threads of their own and
//! really lag behind, its products are really computed, in two stream operations each that meet in the workspace, so
//! that code which misuses streams, events or workspaces gets wrong numbers, as on hardware. It can be made slow, be
//! made to lack an ability, and be told to fail the n-th call of any operation ([`MockOptions`], or the environment
//! variable `HIGHWATER_MOCK`); and it counts every call.
//!
//! ```
//! use std::sync::Arc;
//! use highwater_core::{
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
//! # Ok::<(), highwater_core::Error>(())
//! ```
//!
//! # Where what is
//! - `options`: what a mock is like; `operation`: names, counts and faults of its calls
//! - `gpu`: the `Backend`; `blas`: the handles; `host`: page-locked memory
//! - `device`, `arena`, `device_memory`: a device, which parts of its memory are taken, and the bytes
//! - `stream`, `event`, `kernel`: queues and workers, points in streams, and what a product computes
//! - `exit`: the end of the process
//!
//! # How it differs from hardware
//! It is stricter: a copy from or to memory that is not page-locked, a range that is not inside one live block, and a
//! stream-ordered block freed without a stream are refused. It is deterministic in every mode. Stream priorities change
//! nothing. It has no capture, no sharing between processes and no half types; its capabilities say so.

mod arena;
mod blas;
mod device;
mod device_memory;
mod event;
mod exit;
mod gpu;
mod host;
mod kernel;
mod operation;
mod options;
mod stream;

pub use gpu::MockGpu;
pub use operation::Operation;
pub use options::{ENVIRONMENT_VARIABLE, MockOptions};
