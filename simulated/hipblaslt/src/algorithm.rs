//! Algorithms: the plans that a heuristic query returns and a product uses.

use highwater_simulated_blas::hip_status::SUCCESS;
use highwater_simulated_blas::lt::problem::Problem;
use highwater_simulated_blas::lt::workspace_of;

/// Marks the structure as filled by this library.
const MARK: u64 = u64::from_ne_bytes(*b"LtHipPl\0");

/// `hipblasLtMatmulAlgo_t`: 16 bytes that are opaque to the caller, and the largest workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Algorithm {
    mark: u64,
    /// The fingerprint of its problem.
    fingerprint: u64,
    max_workspace_bytes: usize,
}

const _: () = assert!(size_of::<Algorithm>() == 24);

/// `hipblasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<HeuristicResult>() == 56);

impl Algorithm {
    /// Returns the algorithm for a problem, within the preferred workspace.
    pub(crate) fn of(problem: &Problem, workspace_bytes: u64) -> Self {
        let max_workspace_bytes = workspace_of(problem, workspace_bytes) as usize;
        Self { mark: MARK, fingerprint: problem.fingerprint(), max_workspace_bytes }
    }

    pub(crate) fn result(self) -> HeuristicResult {
        let workspace_bytes = self.max_workspace_bytes;
        HeuristicResult { algorithm: self, workspace_bytes, state: SUCCESS, waves: 1.0, reserved: [0; 4] }
    }

    /// Returns the workspace that the algorithm needs; `None` if it belongs to another problem.
    pub(crate) fn workspace_for(&self, problem: &Problem) -> Option<u64> {
        let fits = self.mark == MARK && self.fingerprint == problem.fingerprint();
        fits.then_some(self.max_workspace_bytes as u64)
    }
}
