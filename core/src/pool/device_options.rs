//! [`DeviceMemoryOptions`]: the options of the device memory that streams allocate.

/// The options of the memory that [`Stream::allocate`](crate::Stream::allocate) gives out. They apply to each device by itself.
///
/// ```
/// use highwater_core::{DeviceMemoryOptions, Runtime, RuntimeOptions};
/// use highwater_mock::{MockGpu, MockOptions};
///
/// let options = RuntimeOptions::new().with_device_memory(DeviceMemoryOptions::new().with_cap_bytes(64 << 20));
/// let runtime = Runtime::with_options(MockGpu::open(MockOptions::new())?, &options)?;
/// let stream = runtime.device(0)?.create_stream()?;
/// let scratch = stream.allocate::<f32>(1_000_000)?;
/// assert!(stream.allocate::<f32>(100_000_000).is_err());
/// # Ok::<(), highwater_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DeviceMemoryOptions {
    /// Bytes that the memories of a device's streams may hold, in use or free; unlimited by default.
    pub cap_bytes: Option<u64>,
    /// Whether the memory comes from the backend's plain allocations even if the device has mapped memory; off by default.
    pub plain_allocations: bool,
    /// Whether network adapters may access the memory directly; off by default.
    pub rdma: bool,
    /// Whether free memory has a pattern that requests check; off by default.
    pub poison: bool,
}

impl DeviceMemoryOptions {
    /// Returns the defaults.
    #[must_use]
    pub const fn new() -> Self {
        Self { cap_bytes: None, plain_allocations: false, rdma: false, poison: false }
    }

    /// Returns the options with a cap on the bytes that the memories of a device's streams hold, in use or free. A request that
    /// does not fit below the cap, even after free memory was released, returns `OutOfMemory`. Memory of
    /// [`Device::allocate`](crate::Device::allocate) does not count.
    #[must_use]
    pub const fn with_cap_bytes(mut self, cap: u64) -> Self {
        self.cap_bytes = Some(cap);
        self
    }

    /// Returns the options with plain allocations, or with mapped memory where the device has it
    /// ([`Capabilities::mapped_memory`](highwater_hal::Capabilities::mapped_memory)).
    ///
    /// Free parts of mapped memory move to the stream that needs them. A plain allocation stays where it is: two free ones that
    /// are each too small do not make a large one. Code that is handed [`DeviceBuffer::ptr`](crate::DeviceBuffer::ptr) and
    /// exports it as legacy inter-process memory needs plain allocations.
    #[must_use]
    pub const fn with_plain_allocations(mut self, plain: bool) -> Self {
        self.plain_allocations = plain;
        self
    }

    /// Returns the options with memory that network adapters may access directly (GPUDirect RDMA). A device whose mapped memory
    /// cannot be accessed so
    /// ([`Capabilities::mapped_memory_rdma`](highwater_hal::Capabilities::mapped_memory_rdma)) uses plain allocations.
    #[must_use]
    pub const fn with_rdma(mut self, is_on: bool) -> Self {
        self.rdma = is_on;
        self
    }

    /// Returns the options with the test mode that finds memory in use after its buffer was dropped, or that a stream gets too early.
    ///
    /// Free memory has a pattern. Each request fills and waits for its stream, so a program is many times slower. A request for memory
    /// that has not the pattern returns `InvalidState`. Memory inside captures is not checked.
    ///
    /// ```
    /// use highwater_core::{DeviceMemoryOptions, ErrorKind, Runtime, RuntimeOptions};
    /// use highwater_core::{Backend, FillPattern, MemoryFill};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let gpu = MockGpu::open(MockOptions::new())?;
    /// let options = RuntimeOptions::new().with_device_memory(DeviceMemoryOptions::new().with_poison(true));
    /// let runtime = Runtime::with_options(gpu.clone(), &options)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let ptr = stream.allocate::<u8>(4096)?.ptr(); // dropped here
    /// // SAFETY: The mock checks the addresses.
    /// unsafe { gpu.fill(&MemoryFill::new(0, ptr, FillPattern::U8(1), 4096), stream.id())? };
    /// assert_eq!(stream.allocate::<u8>(4096).unwrap_err().kind(), ErrorKind::InvalidState);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    #[must_use]
    pub const fn with_poison(mut self, is_on: bool) -> Self {
        self.poison = is_on;
        self
    }
}
