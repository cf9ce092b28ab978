//! The common part of the simulated cuBLASLt and hipBLASLt: descriptors, and the products that they describe.

pub mod attributes;
pub mod problem;

/// The smallest workspace that is used. A smaller one would need many small kernels.
const LEAST_WORKSPACE: u64 = 16 << 10;

/// A fault of a call. Its code depends on the vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Invalid arguments.
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
