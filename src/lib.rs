//! A GPU resource layer: BLAS handles, workspaces, page-locked ("pinned") host memory and stream-ordered device memory from
//! pools, over CUDA, ROCm or a mock device.
//!
//! Each pool grows to its own high-water mark of use. [`RuntimeOptions::with_host_cache_bytes`] caps the pinned memory that is
//! idle. A repeat request for a handle takes no lock and makes no vendor call. Several processes use one block
//! of device memory by [tickets](Ticket), without copies.
//!
//! ```
//! # #[cfg(feature = "mock")] {
//! use highwater::{Matrix, Runtime};
//!
//! let runtime = Runtime::open("mock")?; // Or "cuda", "rocm", or a plugin's name.
//! let device = runtime.device(0)?;
//! let stream = device.create_stream()?;
//!
//! let a = stream.upload(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?; // Staged through pooled pinned memory.
//! let b = stream.upload(&[1.0_f32, 0.0, 0.0, 1.0, 1.0, 1.0])?;
//! let c = device.allocate::<f32>(4)?;
//! let product = Matrix::row_major(&c, 2, 2);
//! stream.matmul(Matrix::row_major(&a, 2, 3), Matrix::row_major(&b, 3, 2), product).run()?;
//! assert_eq!(stream.download(&c)?, [4.0, 5.0, 10.0, 11.0]);
//! # }
//! # Ok::<(), highwater::Error>(())
//! ```
//!
//! # Where to find it
//! | to do this | use |
//! | --- | --- |
//! | open a backend by name, or the best one | [`Runtime::open`], [`Runtime::open_best`], [`OpenOptions`] |
//! | read why a backend was or was not chosen | [`open`], [`opening::LoadReport`], [`opening::survey`] |
//! | enqueue work in order, wait, and time it | [`Device::create_stream`], [`Stream`], [`Event`] |
//! | wait in a future, with any executor | [`Event::done`], [`Stream::done`], [`PinnedBuffer::ready`], [`Done`] |
//! | keep a handle across an `await` | [`Stream::blas_owned`], [`Stream::lt_owned`] |
//! | copy values to the device and back | [`Stream::upload`], [`Stream::write`], [`Stream::download`] |
//! | stage a copy without waiting | [`Runtime::pinned`](highwater_core::Runtime::pinned), [`Stream::copy_to_device`], [`Stream::copy_to_host`] |
//! | multiply matrices | [`Stream::matmul`], [`BlasLease::gemm`], [`LtLease::matmul`] |
//! | choose precision and repeatability | [`Numerics`], [`numerics`] |
//! | record work once and launch it often | [`Stream::capture`], [`Graph`] |
//! | share a tensor with another process | [`Device::allocate_shared`], [`DeviceBuffer::share`], [`Ticket`] |
//! | share the tensors of a model | [`Runtime::share_all`](highwater_core::Runtime::share_all), [`TicketBatch`] |
//! | learn that the owner of opened memory has died | [`DeviceBuffer::owner`], [`Owner`], [`ImportOptions`] |
//! | pool handles of your own type | [`HandlePool`] |
//! | launch a kernel of your own | [`Stream::raw`], [`Stream::note_device_use`], [`Device::stream_from_raw`] |
//! | see what the pools hold | [`Runtime::statistics`](highwater_core::Runtime::statistics), [`statistics`] |
//! | test without a GPU, and make calls fail | [`mock`] |
//! | implement a backend | [`hal`] |
//!
//! # Backends
//! Each backend is a feature: `mock`, `cuda`, `rocm`. All features add up, and all build where no GPU software is
//! installed. Highwater opens vendor libraries at run time, so one binary runs on machines with any of them or none.
//! The feature `plugins` adds backends that are [found at run time](OpenOptions). The feature `serde` implements
//! serialization for [`Ticket`], [`TicketBatch`], [`DeviceInfo`] and [`opening::LoadReport`].
//!
//! A backend requested by name is opened or refused. No other takes its place: a run meant for a GPU must not pass on the
//! mock.
//!
//! CUDA ran on NVIDIA H200. ROCm ran over simulated libraries and was compared with AMD's own; no AMD GPU has run it
//! yet.
//!
//! # What safe code can rely on
//! - A copy between pinned memory and the device cannot race with the CPU: the buffer remembers its streams.
//! - Dropping a buffer, stream, event, graph or lease never waits (a stream on ROCm does), and never frees memory that enqueued work uses. The end of
//!   the runtime waits for the devices.
//! - A lease stays in its thread and ends before its stream. The compiler checks both. An owned lease may move to another thread, and
//!   keeps its stream.
//! - A killed process frees nothing early and makes no other process leak.
//! - Work of two streams on one buffer is ordered by the program, with [`Stream::wait`]. The mock's race finder reports
//!   where the wait is missing.
//!
//! # Errors
//! Every fallible call returns [`Error`]: a [kind](ErrorKind), the operation, a message and, where known, the vendor's code and
//! a hint. [`Error::is_temporary`] reports whether a retry is worthwhile. A function that opens a backend returns
//! [`OpenError`], which also holds the report and converts to [`Error`].
//!
//! # Pages
//! The package's folder `docs/` has pages for readers who come [from cudarc], [from PyTorch], or with [a kernel of their
//! own], and pages on [asynchronous code], [row-major matrices] and [several devices].
//!
//! [from cudarc]: https://docs.rs/crate/highwater/latest/source/docs/from-cudarc.md
//! [from PyTorch]: https://docs.rs/crate/highwater/latest/source/docs/from-pytorch.md
//! [a kernel of their own]: https://docs.rs/crate/highwater/latest/source/docs/own-kernels.md
//! [asynchronous code]: https://docs.rs/crate/highwater/latest/source/docs/async.md
//! [row-major matrices]: https://docs.rs/crate/highwater/latest/source/docs/row-major.md
//! [several devices]: https://docs.rs/crate/highwater/latest/source/docs/several-devices.md

#![forbid(unsafe_code)]

mod open;
mod runtime;

#[cfg(feature = "cuda")]
pub use highwater_cuda as cuda;
/// The contract of a backend: the four traits, and the types that cross them.
pub use highwater_hal as hal;
#[cfg(feature = "mock")]
pub use highwater_mock as mock;
#[cfg(feature = "plugins")]
pub use highwater_plugin as plugin;
#[cfg(feature = "rocm")]
pub use highwater_rocm as rocm;

pub use highwater_core::{
    Access, BlasLease, DeathWatch, Device, DeviceBuffer, DeviceMemoryOptions, DeviceSlice, Done, DoneDescriptor, Event,
    Graph, HandleLease, HandlePool, HostMemoryOptions, HugePages, ImportOptions, LtLease, Matmul, Matrix, Numerics,
    OwnedBlasLease, OwnedHandleLease, OwnedLtLease, Owner, OwnerDeath, PinnedBuffer, PinnedSlice, PinnedSliceMut,
    PoolKey, RuntimeOptions, Scope, SharedPinnedBuffer, Statistics, Stream, Ticket, TicketBatch, numerics,
};
pub use highwater_hal::{
    Capabilities, CaptureMode, CopyShape, DataType, DeviceInfo, Element, Epilogue, Error, ErrorKind, GemmShape, Result,
    Scalar, StreamOptions, StridedBatch, Transport, Transpose, half,
};
#[allow(deprecated, reason = "the old name stays for one version")]
pub use open::open_auto;
pub use open::{Fallback, OpenError, OpenOptions, Opened, open, open_best};
pub use runtime::Runtime;

/// The memory that the processes of a user share, as `highwater ipc ls` lists it.
pub mod ipc {
    pub use highwater_core::ipc::{
        Allocation, Answer, DescriptorStore, HeldAllocation, HeldState, Holder, HolderState, OpenedAllocation,
        SharedAllocation, SharingProcess, processes,
    };
}

/// The report of what was opened, or was not, and why.
pub mod opening {
    #[cfg(feature = "plugins")]
    pub use crate::open::serve_probe;
    pub use crate::open::{Candidate, LoadReport, Origin, Outcome, Place, PlaceKind, backends, survey};
    pub use highwater_hal::OpenFailure;
}

/// The rendezvous of processes that share memory, and the processes that may open it.
pub mod sharing {
    pub use highwater_core::{Openers, Rendezvous, SharingOptions, SharingReport};
}

/// The counts that [`Runtime::statistics`](highwater_core::Runtime::statistics) returns, and what is known of a block.
pub mod statistics {
    pub use highwater_core::{
        BufferStatistics, DeviceBlockInfo, DeviceMemoryStatistics, GraphStatistics, HandlePoolStatistics,
        HostBlockInfo, HostCacheStatistics, Limits, SharingStatistics, Statistics,
    };
    pub use highwater_hal::{LiveObjects, MemoryInfo};
}

/// Compiles and runs the examples of the pages with the other doc tests, on the mock.
#[cfg(all(doctest, feature = "mock"))]
mod pages {
    macro_rules! pages {
        ($($name:ident $file:literal)*) => { $(#[doc = include_str!($file)] struct $name;)* };
    }
    pages! {
        Readme "../README.md"
        RegistryReadme "README.md"
        MockReadme "../backend-mock/README.md"
        RaceFinder "../docs/race-finder.md"
        Async "../docs/async.md"
        Faq "../docs/faq.md"
        FromCudarc "../docs/from-cudarc.md"
        FromPyTorch "../docs/from-pytorch.md"
        OwnKernels "../docs/own-kernels.md"
        HostMemory "../docs/host-memory.md"
        RowMajor "../docs/row-major.md"
        SeveralDevices "../docs/several-devices.md"
        Sharing "../docs/sharing.md"
    }
}
