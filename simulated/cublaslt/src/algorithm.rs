//! Algorithms: the plan that a heuristic query gives and a product takes.

use highwater_simulated_blas::status::SUCCESS;

use crate::attributes::Preference;
use crate::problem::Problem;

/// Marks the structure as one that this library filled.
const MARK: u64 = u64::from_ne_bytes(*b"LtPlan\x01\0");

/// A workspace below this is not used: the kernels would be many and small.
const LEAST_WORKSPACE: u64 = 16 << 10;

/// `cublasLtMatmulAlgo_t`: 64 bytes that the caller does not look into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Algorithm {
    mark: u64,
    /// Of the problem that it is for.
    fingerprint: u64,
    workspace_bytes: u64,
    /// Of A, B, C, D.
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
    /// The algorithm for a problem, within the preferred workspace.
    pub(crate) fn of(problem: &Problem, preference: &Preference) -> Self {
        let workspace = preference.workspace_bytes.min(problem.intermediate_bytes());
        Self {
            mark: MARK,
            fingerprint: problem.fingerprint(),
            workspace_bytes: if workspace < LEAST_WORKSPACE.min(problem.intermediate_bytes()) { 0 } else { workspace },
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

    /// The workspace that it needs, if it is one for this problem.
    pub(crate) fn workspace_for(&self, problem: &Problem) -> Option<u64> {
        (self.mark == MARK && self.fingerprint == problem.fingerprint()).then_some(self.workspace_bytes)
    }

    /// Whether it takes operands at these addresses: those of A, B, C, D, in this order.
    pub(crate) fn takes(&self, addresses: [u64; 4]) -> bool {
        addresses.iter().zip(self.alignments).all(|(address, alignment)| address.is_multiple_of(u64::from(alignment)))
    }
}
