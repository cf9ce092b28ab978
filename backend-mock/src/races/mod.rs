//! The race finder: which operations touch the same memory, one of them writing, with nothing that orders the two.
//!
//! Opened with [`MockOptions::with_race_detector`](crate::MockOptions::with_race_detector), the mock follows what orders operations: the
//! order within a stream, records of events and waits for them, on one device and across devices, waits of the host and
//! queries that answered `Complete`, and the order of the host's calls. Each operation is compared with what was done to
//! its bytes before: copies, fills, every operand and the workspace of products, launches of graphs, allocating and freeing.
//! What is not ordered is a [`Race`], which [`MockGpu::races`](crate::MockGpu::races) gives with both places.
//!
//! ```
//! use highwater_hal::{AllocateOptions, Backend, FillPattern, MemoryFill, StreamOptions};
//! use highwater_mock::races::RaceKind;
//! use highwater_mock::{MockGpu, MockOptions, Operation};
//!
//! let gpu = MockGpu::open(MockOptions::new().with_race_detector())?;
//! let one = gpu.create_stream(0, &StreamOptions::new())?;
//! let other = gpu.create_stream(0, &StreamOptions::new())?;
//! let block = gpu.allocate(0, &AllocateOptions::new(4096))?;
//! let fill = |value| MemoryFill::new(0, block, FillPattern::U8(value), 4096);
//! // SAFETY: the block has 4096 bytes, and is freed by nobody.
//! unsafe {
//!     gpu.fill(&fill(1), one)?;
//!     gpu.fill(&fill(2), other)?; // Which of the two is last?
//! }
//! let races = gpu.races();
//! assert_eq!(races.len(), 1);
//! assert_eq!((races[0].kind(), races[0].overlap().bytes), (RaceKind::Unordered, 4096));
//! assert_eq!((races[0].second().operation(), races[0].second().call()), (Operation::Fill, 2));
//! assert_eq!(races[0].second().stream(), Some(other));
//! println!("{}", races[0]); // both calls, with the lines that they come from
//! # Ok::<(), highwater_hal::Error>(())
//! ```
//!
//! What is found follows from the calls alone, not from which stream happened to be faster: an operation is judged when it is
//! called. A query is the exception, whose answer is a matter of time; [`MockOptions::with_schedule`](crate::MockOptions::with_schedule)
//! makes it one of the seed.
//!
//! # What is not seen
//! - *Accesses of the CPU* to page-locked memory. Copies from and to it are seen, and its allocation and release.
//! - *How host threads tell each other* what they waited for. What one of them has learned counts for all from then on, so
//!   that a program whose threads use locks or channels is never blamed; a thread that should have waited for another one may
//!   be missed.
//! - *Other processes.* A wait for an event that another process recorded counts as a wait for all that this process let
//!   others wait for: nobody is blamed for it, and something may be missed. Events that one process has opened twice are one.
//! - The code that simulated vendor libraries run in streams.
//!
//! # Where it looks closer
//! - A matrix whose leading dimension is above its rows leaves bytes out, and tiles of one matrix do not meet.
//! - Branches of one graph are compared with each other while it is captured, though the mock executes them one after the other.
//! - An executable graph is launched once at a time, so two launches of it that nothing orders are a race.
//! - A graph whose memory was freed is found when it is launched ([`RaceKind::AfterFree`]).
//! - Two threads that make products on one stream with one workspace without taking turns are found where their operations
//!   came between each other ([`RaceKind::Interleaved`]).
//!
//! [`examples`] are twenty mistakes and their corrections; [`measure`] runs them.

pub mod examples;
pub(crate) mod finder;
mod measure;
mod report;
mod shadow;
mod site;

pub use measure::{Detail, Measured, measure};
pub use report::{Bytes, Place, Race, RaceKind};
pub use site::Frame;
