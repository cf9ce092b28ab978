//! What only shows over whole libraries: a fork after the driver was initialised, handles whose stream is gone, and products
//! without elements.
//!
//! The tests run again under `scripts/simulated.sh`, which puts simulated libraries in the place of NVIDIA's.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use highwater_core::{
    Backend, BlasKind, BlasOptions, DataType, Epilogue, ErrorKind, GemmShape, PlanArguments, PlanOptions, StreamOptions,
};

/// The backend, in the run over the simulation; `None` where the test has just been made to run there.
fn open(test: &str) -> Option<Arc<dyn Backend>> {
    const INSIDE: &str = "HIGHWATER_TEST_OVER_SIMULATION";
    if std::env::var_os(INSIDE).is_some() {
        return Some(highwater_cuda::open().unwrap());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/simulated.sh");
    let mut command = Command::new(script);
    command.arg("cuda").arg(std::env::current_exe().unwrap()).args(["--exact", test, "--test-threads=1"]);
    for variable in ["HIGHWATER_MOCK", "HIGHWATER_SIMULATED_CUDA", "CUDA_VISIBLE_DEVICES"] {
        command.env_remove(variable);
    }
    let output = command.env(INSIDE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    None
}

#[test]
fn a_child_that_opens_the_backend_again_is_told_of_the_fork() {
    let Some(backend) = open("a_child_that_opens_the_backend_again_is_told_of_the_fork") else { return };
    // SAFETY: the child calls the backend, which takes no lock in a child, and ends with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let opened = highwater_cuda::open().err().map(|unavailable| unavailable.error.kind());
        let used = backend.create_stream(0, &StreamOptions::new()).err().map(|error| error.kind());
        let told = opened == Some(ErrorKind::Forked) && used == Some(ErrorKind::Forked);
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(if told { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(status, 0);
    // The parent goes on, and opens again.
    assert!(highwater_cuda::open().is_ok());
}

#[test]
fn handles_whose_stream_was_destroyed_take_another_or_are_destroyed() {
    let Some(backend) = open("handles_whose_stream_was_destroyed_take_another_or_are_destroyed") else { return };
    for kind in [BlasKind::Blas, BlasKind::Lt] {
        for again in [true, false] {
            let mut handle = backend.create_blas_handle(0, &BlasOptions::new(kind)).unwrap();
            let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
            handle.set_stream(stream).unwrap();
            backend.destroy_stream(stream).unwrap();
            assert_eq!(handle.set_stream(stream).unwrap_err().kind(), ErrorKind::InvalidHandle);
            if again {
                let other = backend.create_stream(0, &StreamOptions::new()).unwrap();
                handle.set_stream(other).unwrap();
                backend.destroy_stream(other).unwrap();
            }
            handle.destroy().unwrap();
        }
    }
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn a_plan_of_no_elements_is_made_and_writes_nothing() {
    let Some(backend) = open("a_plan_of_no_elements_is_made_and_writes_nothing") else { return };
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Lt)).unwrap();
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    handle.set_stream(stream).unwrap();
    for (m, n) in [(0, 4), (4, 0), (0, 0)] {
        let shape = GemmShape::new(DataType::F32, m, n, 3);
        let plan = handle.create_plan(&PlanOptions::new(shape, Epilogue::Bias, 0)).unwrap();
        let nowhere = highwater_core::DevicePtr::new(0x1000);
        // SAFETY: there is no element, so no address is followed.
        unsafe { handle.run_plan(plan, &PlanArguments::new(nowhere, nowhere, nowhere, Some(nowhere))) }.unwrap();
        handle.destroy_plan(plan).unwrap();
    }
    handle.destroy().unwrap();
    backend.destroy_stream(stream).unwrap();
    assert_eq!(backend.live_objects().total(), 0);
}
