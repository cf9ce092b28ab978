//! The environment variables that size workspaces, read by a process of their own.

use std::process::Command;

use highwater_core::Runtime;
use highwater_mock::{MockGpu, MockOptions};

const SCENARIO: &str = "HIGHWATER_TEST_WORKSPACES";

/// Runs in a process of its own, and does nothing when run as a test.
#[test]
fn scenario() {
    if std::env::var_os(SCENARIO).is_none() {
        return;
    }
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let device = runtime.device(0).unwrap();
    let bytes = |runtime: &Runtime| runtime.statistics().workspace_bytes;
    let lt_stream = device.create_stream().unwrap();
    drop(lt_stream.lt().unwrap());
    let lt = bytes(&runtime);
    let blas_stream = device.create_stream().unwrap();
    drop(blas_stream.blas().unwrap());
    println!("workspaces: blas {} lt {lt}", bytes(&runtime) - lt);
}

#[track_caller]
fn workspaces(variables: &[(&str, &str)], blas: u64, lt: u64) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "scenario", "--nocapture"]).env(SCENARIO, "1");
    command.env_remove("CUBLAS_WORKSPACE_CONFIG").env_remove("CUBLASLT_WORKSPACE_SIZE");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(&format!("workspaces: blas {blas} lt {lt}\n")), "{variables:?}: {text}");
}

#[test]
fn workspaces_follow_the_variables_that_cublas_users_know() {
    const MIB: u64 = 1 << 20;
    workspaces(&[], 32 * MIB, MIB);
    workspaces(&[("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")], 8_519_680, MIB);
    workspaces(&[("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("CUBLASLT_WORKSPACE_SIZE", "2048")], 0, 2 * MIB);
    // What cannot be read is warned about and gives the default.
    workspaces(&[("CUBLAS_WORKSPACE_CONFIG", "4096:8"), ("CUBLASLT_WORKSPACE_SIZE", "many")], 32 * MIB, MIB);
    // These belong to another program, and are not read.
    workspaces(&[("TORCH_CUBLAS_WORKSPACE_CACHE", "1"), ("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")], 32 * MIB, MIB);
}
