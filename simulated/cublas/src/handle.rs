//! Handles: what is bound to them, and their modes.

use highwater_simulated_blas::driver::{Driver, Home};
use highwater_simulated_blas::product::Bound;
use highwater_simulated_blas::slots::Slots;
use highwater_simulated_blas::status;

/// Every handle of the process.
pub(crate) static HANDLES: Slots<State> = Slots::new(*b"cublas13");

/// Device memory of a handle that `CUBLAS_WORKSPACE_CONFIG` says nothing about: what one takes on an H200.
const OWN_BYTES: usize = 64 << 20;

/// On smaller devices a handle takes this part of the memory.
const OWN_PART: usize = 1024;

/// A workspace below this is not used: the manual's least that is of use.
const LEAST_WORKSPACE: u64 = 16 << 10;

/// What the kernels of a product pass their intermediate results through.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Workspace {
    /// The handle's own memory, which nobody else sees.
    Own,
    Bound {
        address: u64,
        bytes: u64,
    },
    None,
}

/// What a handle is.
#[derive(Debug)]
pub(crate) struct State {
    home: Home,
    /// Device memory of its own; 0 where it has none.
    own: u64,
    /// The bound `CUstream`.
    pub(crate) stream: usize,
    /// Address and bytes of the bound workspace; `None` is its own.
    workspace: Option<(u64, u64)>,
    /// `cublasMath_t`.
    pub(crate) math_mode: u32,
    /// `cublasAtomicsMode_t`.
    pub(crate) atomics_mode: u32,
    /// `cublasPointerMode_t`.
    pub(crate) pointer_mode: u32,
    /// The number of multiprocessors that kernels are chosen for; 0 is all.
    pub(crate) sm_count_target: i32,
    /// `cublasEmulationStrategy_t`.
    pub(crate) emulation_strategy: u32,
}

impl State {
    pub(crate) fn new() -> Result<Self, u32> {
        let driver = Driver::get()?;
        let home = driver.home()?;
        let own = match configured_bytes(std::env::var("CUBLAS_WORKSPACE_CONFIG").ok().as_deref()) {
            Some(0) => 0,
            Some(bytes) => driver.allocate(bytes)?,
            None => driver.allocate(OWN_BYTES.min(driver.device_memory(home)? / OWN_PART).max(1))?,
        };
        let (stream, workspace, sm_count_target, emulation_strategy) = (0, None, 0, 0);
        let (math_mode, atomics_mode, pointer_mode) = (0, 0, 0);
        Ok(Self {
            home,
            own,
            stream,
            workspace,
            math_mode,
            atomics_mode,
            pointer_mode,
            sm_count_target,
            emulation_strategy,
        })
    }

    /// Waits for the device, and gives the handle's memory back.
    pub(crate) fn end(self) {
        if let Ok(driver) = Driver::get() {
            driver.wait_and_free(self.home, self.own);
        }
    }

    pub(crate) fn bind_stream(&mut self, stream: usize) {
        self.stream = stream;
        self.workspace = None;
    }

    /// Takes any address, also one that is not aligned as the manual asks.
    pub(crate) fn bind_workspace(&mut self, address: u64, bytes: u64) -> Result<(), u32> {
        if address == 0 && bytes > 0 {
            return Err(status::INVALID_VALUE);
        }
        self.workspace = Some((address, bytes));
        Ok(())
    }

    /// What its products take from it.
    pub(crate) fn bound(&self) -> Bound {
        Bound {
            device: self.home.device,
            stream: self.stream,
            allows_tf32: self.allows_tf32(),
            atomics_mode: self.atomics_mode,
            pointer_mode: self.pointer_mode,
        }
    }

    /// What the kernels of a product pass their intermediate results through.
    pub(crate) fn workspace(&self) -> Workspace {
        match self.workspace {
            None => Workspace::Own,
            Some((address, bytes)) if bytes >= LEAST_WORKSPACE => Workspace::Bound { address, bytes },
            Some(_) => Workspace::None,
        }
    }

    /// A mode, with the flag that disallows reductions in less precision or without it.
    pub(crate) fn set_math_mode(&mut self, mode: u32) -> Result<(), u32> {
        const DISALLOW_REDUCED_PRECISION_REDUCTION: u32 = 16;
        if !matches!(mode & !DISALLOW_REDUCED_PRECISION_REDUCTION, 0..=4 | 8) {
            return Err(status::INVALID_VALUE);
        }
        self.math_mode = mode;
        Ok(())
    }

    pub(crate) fn set_sm_count_target(&mut self, count: i32) -> Result<(), u32> {
        if count < 0 {
            return Err(status::INVALID_VALUE);
        }
        self.sm_count_target = count;
        Ok(())
    }

    /// The default, if faster, or always.
    pub(crate) fn set_emulation_strategy(&mut self, strategy: u32) -> Result<(), u32> {
        if strategy > 2 {
            return Err(status::INVALID_VALUE);
        }
        self.emulation_strategy = strategy;
        Ok(())
    }

    /// Whether factors of 32 bits may be rounded to TF32.
    fn allows_tf32(&self) -> bool {
        self.math_mode & 15 == 3
    }
}

/// The sum of `:KiB:COUNT` pairs; what cannot be read counts as unset.
fn configured_bytes(setting: Option<&str>) -> Option<usize> {
    let mut numbers = setting?.strip_prefix(':')?.split(':');
    let mut bytes = 0usize;
    while let Some(size) = numbers.next() {
        let (size, count): (usize, usize) = (size.parse().ok()?, numbers.next()?.parse().ok()?);
        bytes = bytes.checked_add(size.checked_mul(1024)?.checked_mul(count)?)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_a_sum_of_pairs_and_nonsense_is_no_setting() {
        assert_eq!(configured_bytes(Some(":4096:2:16:8")), Some(4096 * 1024 * 2 + 16 * 1024 * 8));
        assert_eq!(configured_bytes(Some(":0:0")), Some(0));
        for nonsense in [None, Some(""), Some("4096:2"), Some(":4096"), Some(":a:b"), Some(":99999999999999999:9")] {
            assert_eq!(configured_bytes(nonsense), None, "{nonsense:?}");
        }
    }
}
