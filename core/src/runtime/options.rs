//! [`RuntimeOptions`]: the options of a runtime.

use crate::numerics::Numerics;
use crate::pool::HostMemoryOptions;

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
        }
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

    /// Returns the options with a cap on idle page-locked memory: see [`HostMemoryOptions::with_idle_cap_bytes`].
    #[must_use]
    pub const fn with_host_cache_bytes(mut self, cap: u64) -> Self {
        self.host_memory = self.host_memory.with_idle_cap_bytes(cap);
        self
    }
}
