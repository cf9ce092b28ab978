//! What a device can do and how it behaves, as data: policy is a table, not an `if` on the vendor's name.

/// What one device can do (*abilities*) and how it behaves (*facts*).
///
/// Grammar: an ability is a `bool` named for what is asked; where it is false, asking gives
/// [`Unsupported`](crate::ErrorKind::Unsupported) before the vendor is called. A fact is a statement about the vendor's
/// behaviour that core adapts to. The struct is flat and `Copy`, is read once when a runtime is made, and is never asked
/// for on a hot path.
///
/// [`Capabilities::none`] is the base to build on: it promises nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    // ---- abilities
    /// GEMM on 32-bit floats.
    pub gemm_f32: bool,
    /// GEMM on 64-bit floats.
    pub gemm_f64: bool,
    /// GEMM on IEEE half precision, accumulated in 32 bits.
    pub gemm_f16: bool,
    /// GEMM on bfloat16, accumulated in 32 bits.
    pub gemm_bf16: bool,
    /// [`MathMode::Tf32`](crate::MathMode) on 32-bit GEMM.
    pub tf32: bool,
    /// [`AtomicsMode`](crate::AtomicsMode) can be chosen.
    pub atomics_mode: bool,
    /// Handles can be given a workspace (hipBLAS 2 cannot).
    pub blas_workspace: bool,
    /// Strided-batched GEMM.
    pub strided_batch: bool,
    /// Handles of kind [`Lt`](crate::BlasKind::Lt): plans with epilogues.
    pub lt_plans: bool,
    /// Stream capture and graph replay.
    pub capture: bool,
    /// Device memory allocated and freed in stream order.
    pub stream_ordered_memory: bool,
    /// Device memory that other processes can open.
    pub shareable_memory: bool,
    /// Events that other processes can open.
    pub interprocess_events: bool,
    /// Elapsed time between two events.
    pub event_timing: bool,
    /// Streams with another priority than normal.
    pub stream_priority: bool,
    /// Copies from one device straight to another.
    pub peer_copy: bool,
    /// Page-locking memory that somebody else allocated.
    pub host_register: bool,
    /// Write-combined page-locked memory.
    pub write_combined: bool,
    /// The legacy default stream can be used.
    pub legacy_default_stream: bool,
    /// The per-thread default stream can be used.
    pub per_thread_default_stream: bool,
    /// Streams and events made by other code can be wrapped.
    pub foreign_objects: bool,

    // ---- facts
    /// Binding a stream puts a BLAS handle back on its default workspace (cuBLAS: always; hipBLAS: never).
    pub set_stream_resets_workspace: bool,
    /// A handle must stay with one stream (hipBLASLt) instead of being bound to many in turn.
    pub handle_per_stream: bool,
    /// Handles, events and memory may be made while a capture is open.
    pub create_during_capture: bool,
    /// Page-locked memory has the same address on the device as on the host.
    pub host_address_is_device_address: bool,
    /// The default kind of page-locked memory is cached by the device.
    pub pinned_cached_by_device: bool,
    /// A stream's wait for an event of another process ends when that process does, also where the event was not reached.
    /// Where it is false, such a wait can be for ever.
    pub event_waits_end_with_peer: bool,
    /// Bytes that core registers at a time when it makes large blocks of page-locked memory itself, which needs
    /// `host_register`; 0: the backend's own allocation serves every size. A copy must not cross from one registration into
    /// another; core cuts its copies. Core makes whole huge pages of 2 MiB of it.
    pub register_piece_bytes: usize,
    /// Ways in which this device's memory can be shared with another process.
    pub ipc_transports: Transports,
    /// Alignment in bytes that a BLAS workspace must have.
    pub workspace_alignment: usize,
    /// Bytes of workspace that a BLAS handle works best with here.
    pub blas_workspace_bytes: usize,
    /// Bytes of workspace that an Lt plan may use by default.
    pub lt_workspace_bytes: usize,
}

impl Capabilities {
    /// No ability, and the facts that demand the most care of core.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            gemm_f32: false,
            gemm_f64: false,
            gemm_f16: false,
            gemm_bf16: false,
            tf32: false,
            atomics_mode: false,
            blas_workspace: false,
            strided_batch: false,
            lt_plans: false,
            capture: false,
            stream_ordered_memory: false,
            shareable_memory: false,
            interprocess_events: false,
            event_timing: false,
            stream_priority: false,
            peer_copy: false,
            host_register: false,
            write_combined: false,
            legacy_default_stream: false,
            per_thread_default_stream: false,
            foreign_objects: false,
            set_stream_resets_workspace: true,
            handle_per_stream: false,
            create_during_capture: false,
            host_address_is_device_address: false,
            pinned_cached_by_device: false,
            event_waits_end_with_peer: false,
            register_piece_bytes: 0,
            ipc_transports: Transports::NONE,
            workspace_alignment: 256,
            blas_workspace_bytes: 0,
            lt_workspace_bytes: 0,
        }
    }
}

/// A set of [`Transport`](crate::Transport)s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Transports(u32);

impl Transports {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// The set with `transport` added.
    #[must_use]
    pub const fn with(self, transport: crate::Transport) -> Self {
        Self(self.0 | 1 << transport as u32)
    }

    /// Whether `transport` is in the set.
    #[must_use]
    pub const fn contains(self, transport: crate::Transport) -> bool {
        self.0 & (1 << transport as u32) != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}
