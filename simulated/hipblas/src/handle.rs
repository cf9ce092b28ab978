//! Handles: what is bound to them, and their modes.

use highwater_simulated_blas::product::Bound;
use highwater_simulated_blas::slots::Slots;

use highwater_simulated_blas::runtime::{Home, Runtime};

/// Every handle of the process.
pub(crate) static HANDLES: Slots<State> = Slots::new(*b"hipblas\0");

/// Device memory of a handle, as rocBLAS takes it by default.
const OWN_BYTES: usize = 32 << 20;

/// On smaller devices a handle takes this part of the memory.
const OWN_PART: usize = 1024;

/// A workspace below this is not used.
const LEAST_WORKSPACE: usize = 16 << 10;

/// What a handle is.
#[derive(Debug)]
pub(crate) struct State {
    home: Home,
    /// Address and bytes of its own device memory.
    own: (u64, u64),
    /// The bound `hipStream_t`.
    pub(crate) stream: usize,
    /// Address and bytes of the bound workspace; `None` is its own.
    workspace: Option<(u64, u64)>,
    /// `hipblasMath_t`.
    pub(crate) math_mode: u32,
    /// `hipblasAtomicsMode_t`.
    pub(crate) atomics_mode: u32,
    /// `hipblasPointerMode_t`.
    pub(crate) pointer_mode: u32,
}

impl State {
    pub(crate) fn new() -> Result<Self, u32> {
        let runtime = Runtime::get()?;
        let home = runtime.home()?;
        let bytes = OWN_BYTES.min(runtime.device_memory(home)? / OWN_PART).max(LEAST_WORKSPACE);
        let own = (runtime.allocate(bytes)?, bytes as u64);
        let atomics_mode = u32::from(runtime.major < 3);
        Ok(Self { home, own, stream: 0, workspace: None, math_mode: 0, atomics_mode, pointer_mode: 0 })
    }

    /// Waits for the device, and gives the handle's memory back.
    pub(crate) fn end(self) {
        if let Ok(runtime) = Runtime::get() {
            runtime.wait_and_free(self.home, self.own.0);
        }
    }

    /// Binds a workspace. A null address selects the handle's own workspace, for any number of bytes.
    pub(crate) fn bind_workspace(&mut self, address: u64, bytes: u64) {
        self.workspace = (address != 0).then_some((address, bytes));
    }

    /// What its products take from it.
    pub(crate) fn bound(&self) -> Bound {
        Bound {
            device: self.home.device,
            stream: self.stream,
            allows_tf32: false,
            atomics_mode: self.atomics_mode,
            pointer_mode: self.pointer_mode,
        }
    }

    /// Address and bytes of what the kernels of a product pass their intermediate results through; 0 bytes are none.
    pub(crate) fn workspace(&self) -> (u64, u64) {
        match self.workspace {
            None => self.own,
            Some((_, bytes)) if bytes < LEAST_WORKSPACE as u64 => (0, 0),
            Some(bound) => bound,
        }
    }
}
