//! Algorithms: the plans that a heuristic query returns and a product uses.

use highwater_simulated_blas::status::SUCCESS;

use highwater_simulated_blas::lt::attributes::Preference;
use highwater_simulated_blas::lt::problem::Problem;
use highwater_simulated_blas::lt::workspace_of;

/// Marks the structure as filled by this library.
const MARK: u64 = u64::from_ne_bytes(*b"LtPlan\x01\0");

/// `cublasLtMatmulAlgo_t`: 64 bytes that are opaque to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Algorithm {
    mark: u64,
    /// The fingerprint of its problem.
    fingerprint: u64,
    workspace_bytes: u64,
    /// The alignments of A, B, C and D.
    alignments: [u32; 4],
    reserved: [u64; 3],
}

const _: () = assert!(size_of::<Algorithm>() == 64);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<HeuristicResult>() == 96);

impl Algorithm {
    /// Returns the algorithm for a problem, within the preferred workspace.
    pub(crate) fn of(problem: &Problem, preference: &Preference) -> Self {
        Self {
            mark: MARK,
            fingerprint: problem.fingerprint(),
            workspace_bytes: workspace_of(problem, preference.workspace_bytes),
            // Kernels load no more than 16 bytes at a time.
            alignments: preference.alignments.map(|alignment| alignment.min(16)),
            reserved: [0; 3],
        }
    }

    pub(crate) fn result(self) -> HeuristicResult {
        HeuristicResult {
            algorithm: self,
            workspace_bytes: self.workspace_bytes as usize,
            state: SUCCESS,
            waves: 1.0,
            reserved: [0; 4],
        }
    }

    /// Returns the workspace that it needs, if it belongs to this problem.
    pub(crate) fn workspace_for(&self, problem: &Problem) -> Option<u64> {
        (self.mark == MARK && self.fingerprint == problem.fingerprint()).then_some(self.workspace_bytes)
    }

    /// Returns whether it accepts operands at these addresses: those of A, B, C, D, in this order.
    pub(crate) fn takes(&self, addresses: [u64; 4]) -> bool {
        addresses.iter().zip(self.alignments).all(|(address, alignment)| address.is_multiple_of(u64::from(alignment)))
    }
}
