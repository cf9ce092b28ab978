//! Bare calls of a backend, as baselines of measurements.

use highwater_hal::{Backend, Completion, Location, MemoryCopy, Result};

use crate::device::{Block, Event, Pinned, Stream};

/// A stream with memory of its own, whose methods make one bare call of the backend each.
///
/// Benchmarks measure it beside the pools of `highwater-core`: a pool cannot be faster than the calls that it has to make.
///
/// ```
/// use highwater_conformance::RawCalls;
/// # use highwater_mock::{MockGpu, MockOptions};
///
/// # fn open_my_backend() -> highwater_hal::Result<std::sync::Arc<MockGpu>> { MockGpu::open(MockOptions::new()) }
/// let backend = open_my_backend()?;
/// let raw = RawCalls::new(&*backend, 0, 4096)?;
/// raw.copy_to_device()?;
/// raw.synchronize()?;
/// # Ok::<(), highwater_hal::Error>(())
/// ```
#[derive(Debug)]
pub struct RawCalls<'b> {
    backend: &'b dyn Backend,
    copy: MemoryCopy,
    // Dropped in this order: the stream waits for its work.
    stream: Stream<'b>,
    event: Event<'b>,
    _pinned: Pinned<'b>,
    _block: Block<'b>,
}

impl<'b> RawCalls<'b> {
    /// Creates the stream and the event, and allocates `bytes` of page-locked memory and of device memory.
    ///
    /// # Errors
    /// The backend's error.
    pub fn new(backend: &'b dyn Backend, device: u32, bytes: usize) -> Result<Self> {
        let stream = Stream::on(backend, device)?;
        let event = Event::on(backend, device)?;
        let pinned = Pinned::new(backend, bytes)?;
        let block = Block::on(backend, device, bytes)?;
        // The first copy makes the blocks wait for the device before they are freed.
        stream.copy(block.all(), pinned.all())?;
        let dst = Location::Device { device, ptr: block.ptr() };
        let copy = MemoryCopy::new(dst, Location::Host(pinned.ptr()), bytes);
        Ok(Self { backend, copy, stream, event, _pinned: pinned, _block: block })
    }

    /// Enqueues a copy of the page-locked memory to the device.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn copy_to_device(&self) -> Result<()> {
        // SAFETY: both ranges are whole living blocks, which wait for the device before they are freed. No other code accesses
        // them.
        unsafe { self.backend.copy(&self.copy, self.stream.id()) }
    }

    /// Records the event on the stream.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn record(&self) -> Result<()> {
        self.stream.record(&self.event)
    }

    /// Returns whether the work before the last [`RawCalls::record`] is complete.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn query(&self) -> Result<Completion> {
        self.event.query()
    }

    /// Waits for the stream.
    ///
    /// # Errors
    /// The backend's error.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
}
