//! The common part of the simulated cuBLASLt and hipBLASLt: descriptors, and the products that they describe.

pub mod attributes;
pub mod problem;

/// A smaller workspace is not used: it would need many small kernels.
const LEAST_WORKSPACE: u64 = 16 << 10;

/// A fault of a call, whatever its code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Arguments that no call has.
    Invalid,
    /// A product that the kernels cannot compute.
    Unsupported,
}

/// Returns the workspace that the algorithm of a problem uses, within the preferred one.
#[must_use]
pub fn workspace_of(problem: &problem::Problem, preferred: u64) -> u64 {
    let intermediate = problem.intermediate_bytes();
    let workspace = preferred.min(intermediate);
    if workspace < LEAST_WORKSPACE.min(intermediate) { 0 } else { workspace }
}
