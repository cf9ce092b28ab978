//! Highwater and [cudarc] in one program, on the same streams and memory.
//!
//! - [`Stream::of`](StreamExt::of) makes a [`JoinedStream`] of cudarc's `Arc<CudaStream>`, per-thread streams included. It is a
//!   Highwater stream, so copies, fills, products, leases, captures and futures work on it.
//! - [`JoinedStream::read`] and [`JoinedStream::write`] make device buffers of a `CudaSlice` or a view, for copies and products.
//!   cudarc's event tracking learns of the use.
//! - [`JoinedStream::lend`] makes a [`LentBuffer`] of a Highwater buffer. All of cudarc's functions and kernels take it, and Highwater
//!   frees the memory after them.
//! - [`CudarcPinned`] is pinned memory of Highwater's pool that cudarc copies from and to.
//! - [`PooledBlas`] stands where code keeps an `Arc<CudaBlas>`: it implements cudarc's `Gemm` with pooled handles.
//!
//! ```
//! use cudarc::driver::CudaContext;
//! use highwater_core::{Matrix, Runtime, Stream};
//! use highwater_cudarc::{CudarcPinned, StreamExt};
//!
//! fn multiply(runtime: &Runtime) -> Result<(), Box<dyn std::error::Error>> {
//!     let theirs = CudaContext::new(0)?.new_stream()?;
//!     let stream = Stream::of(runtime, &theirs)?;
//!
//!     let mut pinned = CudarcPinned::new(runtime.pinned::<f32>(4)?, &stream)?;
//!     pinned.write()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
//!     let a = theirs.clone_htod(&pinned)?; // cudarc's copy and cudarc's memory
//!     let mut c = theirs.alloc_zeros::<f32>(4)?;
//!     {
//!         // SAFETY: this block uses both on `stream` only, in no capture, and drops them.
//!         let (a, c) = unsafe { (stream.read(&a)?, stream.write(&mut c)?) };
//!         let [left, right, product] = [&*a, &*a, &*c].map(|buffer| Matrix::row_major(buffer, 2, 2));
//!         stream.matmul(left, right, product).run()?; // Highwater's product
//!     }
//!     assert_eq!(theirs.clone_dtoh(&c)?, [7.0, 10.0, 15.0, 22.0]);
//!     Ok(())
//! }
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     match highwater_cuda::open() {
//!         Ok(backend) => multiply(&Runtime::new(backend)?),
//!         Err(unavailable) => Ok(println!("no CUDA here: {}", unavailable.error)),
//!     }
//! }
//! ```
//!
//! # Versions
//! The types are those of cudarc 0.19. candle-core 0.9.2 to 0.11 are built on it, so their streams and slices fit. Code that uses
//! another version, such as candle-core 0.9.1 with cudarc 0.16, passes numbers: `Device::stream_from_raw` takes its `cu_stream()`, `DeviceBuffer::from_raw` the address of a
//! slice, and `Stream::wait_raw` its events.
//!
//! cudarc is loaded at run time. Nothing needs CUDA to build.

mod blas;
mod buffer;
mod pinned;
mod stream;

pub use blas::PooledBlas;
pub use buffer::{LentBuffer, LentSlice};
pub use pinned::CudarcPinned;
pub use stream::{JoinedStream, StreamExt};

/// The example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
