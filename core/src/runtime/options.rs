//! [`RuntimeOptions`]: the options of a runtime.

use crate::numerics::Numerics;

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
    /// Bytes of page-locked memory that may be cached while no buffer owns them; unlimited by default.
    pub host_cache_bytes: Option<u64>,
}

impl RuntimeOptions {
    /// Returns the defaults.
    #[must_use]
    pub const fn new() -> Self {
        Self { blas_workspace_bytes: None, lt_workspace_bytes: None, numerics: Numerics::new(), host_cache_bytes: None }
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

    /// Returns the options with a cap on the page-locked memory that is cached and that no buffer owns. Memory above the cap is
    /// freed, least recently used first, once no stream uses it. The call that triggers the free pays for it: a drop or a
    /// request of a buffer, or a wait for a stream. 0 caches nothing. The cap never causes a request to fail.
    #[must_use]
    pub const fn with_host_cache_bytes(mut self, cap: u64) -> Self {
        self.host_cache_bytes = Some(cap);
        self
    }
}
