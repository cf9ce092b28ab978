//! The race finder: finds operations that touch the same memory, of which one writes, and that nothing orders.
//!
//! Opened with [`MockOptions::with_race_detector`](crate::MockOptions::with_race_detector), the mock follows what
//! orders operations: the order within a stream, records of events and waits for them (also across devices), waits of
//! the host, queries that returned `Complete`, and the order of the host's calls. It compares each operation with the
//! earlier uses of its bytes: copies, fills, every operand and the workspace of products, launches of graphs,
//! allocating and freeing. Two operations without an order are a [`Race`]. [`MockGpu::races`](crate::MockGpu::races)
//! returns it with both places.
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
//! // SAFETY: the block has 4096 bytes, and nobody frees it.
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
//! The result follows from the calls, not from which stream was faster: an operation is judged when it is called. Only
//! the answer of a query depends on time. [`MockOptions::with_schedule`](crate::MockOptions::with_schedule) makes it
//! depend on a seed.
//!
//! # Threads
//! Normally a wait of one thread counts for all from then on. So the finder never blames a program whose threads use locks
//! or channels, and it may miss a thread that should have waited for another.
//!
//! [`MockOptions::with_thread_races`](crate::MockOptions::with_thread_races) tells threads apart. A wait counts for its thread
//! then. Calls on one stream, a record and a wait for it, the locks of core, and the first call of a new thread order threads.
//! The program declares every other order between its threads with [`MockGpu::hand_over`](crate::MockGpu::hand_over) and
//! [`HandOver::take_over`].
//!
//! # What the finder does not see
//! - *Accesses of the CPU* to page-locked memory that no code reports. The owning types of Highwater report them, through
//!   [`Backend::host_observer`](highwater_hal::Backend::host_observer). The finder compares an access with the work of
//!   devices, and not with other accesses of the CPU.
//! - *Other processes.* A wait for an event that another process recorded counts as a wait for all that this process
//!   let others wait for. Nobody is blamed for that, and a race may be missed. Events that one process has opened twice
//!   are one.
//! - The code that simulated vendor libraries run in streams.
//!
//! # What the finder sees closely
//! - A matrix whose leading dimension is above its rows leaves bytes out, and tiles of one matrix do not meet.
//! - Branches of one graph are compared while it is captured, although the mock executes them one after the other.
//! - An executable graph is launched once at a time, so two launches of it that nothing orders are a race.
//! - A graph whose memory was freed is found when it is launched ([`RaceKind::AfterFree`]).
//! - Two threads that make products on one stream with one workspace without taking turns are found if their operations
//!   interleave ([`RaceKind::Interleaved`]).
//!
//! [`examples`] holds 26 mistakes and their corrections, and [`measure`] runs them.

pub mod examples;
pub(crate) mod finder;
mod hand_over;
mod measure;
mod report;
mod shadow;
mod site;

pub use hand_over::HandOver;
pub use measure::{Detail, Measured, measure};
pub use report::{Bytes, Place, Race, RaceKind};
pub use site::Frame;
