//! [`RuntimeOptions`]: the options of a runtime.

use crate::numerics::Numerics;
use crate::pool::{DeviceMemoryOptions, HostMemoryOptions};
use crate::sharing::SharingOptions;

/// The options of a [`Runtime`](crate::Runtime).
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct RuntimeOptions {
    /// Bytes of BLAS workspace for each stream. The default is set by the backend's environment variables, or by the backend.
    /// With 0 each handle uses memory of its own. Then each stream has handles of its own, and a capture cannot record
    /// products.
    pub blas_workspace_bytes: Option<usize>,
    /// Maximum bytes of workspace for an Lt plan. The default is set by the backend's environment variables, or by the backend.
    pub lt_workspace_bytes: Option<usize>,
    /// The policy for products of threads and leases that set none.
    pub numerics: Numerics,
    /// The options of page-locked memory.
    pub host_memory: HostMemoryOptions,
    /// The options of the device memory that streams allocate.
    pub device_memory: DeviceMemoryOptions,
    /// The options of memory that is shared with other processes.
    pub sharing: SharingOptions,
    /// BLAS handles of device 0 that the runtime makes in the background: see
    /// [`with_warm_handles`](RuntimeOptions::with_warm_handles).
    pub warm_handles: usize,
}

impl RuntimeOptions {
    /// Returns the defaults.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            blas_workspace_bytes: None,
            lt_workspace_bytes: None,
            numerics: Numerics::new(),
            host_memory: HostMemoryOptions::new(),
            device_memory: DeviceMemoryOptions::new(),
            sharing: SharingOptions::new(),
            warm_handles: 0,
        }
    }

    /// Returns the options with `handles` warm handles: the runtime starts a thread that makes this many BLAS handles of device
    /// 0, each with a workspace. The default is 0: no thread. Other devices stay untouched, because a context holds hundreds of
    /// megabytes; [`Device::warm`](crate::Device::warm) warms them.
    ///
    /// A lease that comes before the first handle is finished waits for it, and takes it if it can. An error of the thread is
    /// logged through `tracing`, and ends it. Leases then make handles as usual, and the first that fails states both errors.
    /// The end of the runtime waits for the handle under way, and cancels the rest.
    ///
    /// ```
    /// use highwater_core::{Runtime, RuntimeOptions};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let options = RuntimeOptions::new().with_warm_handles(4);
    /// let runtime = Runtime::with_options(MockGpu::open(MockOptions::new())?, &options)?;
    /// // Here the program reads its weights. Meanwhile the handles are made.
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let blas = stream.blas()?;
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    #[must_use]
    pub const fn with_warm_handles(mut self, handles: usize) -> Self {
        self.warm_handles = handles;
        self
    }

    /// Returns the options with another BLAS workspace.
    #[must_use]
    pub const fn with_blas_workspace_bytes(mut self, bytes: usize) -> Self {
        self.blas_workspace_bytes = Some(bytes);
        self
    }

    /// Returns the options with another Lt workspace.
    #[must_use]
    pub const fn with_lt_workspace_bytes(mut self, bytes: usize) -> Self {
        self.lt_workspace_bytes = Some(bytes);
        self
    }

    /// Returns the options with another policy for products: see [`numerics`](crate::numerics).
    #[must_use]
    pub const fn with_numerics(mut self, policy: Numerics) -> Self {
        self.numerics = policy;
        self
    }

    /// Returns the options with these options of page-locked memory. The variable `HIGHWATER_HOST_MEMORY` sets those that the
    /// program does not set.
    #[must_use]
    pub const fn with_host_memory(mut self, options: HostMemoryOptions) -> Self {
        self.host_memory = options;
        self
    }

    /// Returns the options with these options of the device memory that streams allocate.
    #[must_use]
    pub const fn with_device_memory(mut self, options: DeviceMemoryOptions) -> Self {
        self.device_memory = options;
        self
    }

    /// Returns the options with these options of shared memory. The variable `HIGHWATER_SHARING` sets those that the program does
    /// not set.
    #[must_use]
    pub const fn with_sharing(mut self, options: SharingOptions) -> Self {
        self.sharing = options;
        self
    }

    /// Returns the options with a cap on idle page-locked memory: see [`HostMemoryOptions::with_idle_cap_bytes`].
    #[must_use]
    pub const fn with_host_cache_bytes(mut self, cap: u64) -> Self {
        self.host_memory = self.host_memory.with_idle_cap_bytes(cap);
        self
    }
}
