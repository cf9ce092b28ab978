//! The examples and the main job under the mock's race finder: no program of this repository has a race.

#![cfg(all(feature = "program", feature = "mock"))]
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Builds the examples as this test was built, and gives their folder.
fn examples() -> PathBuf {
    // The test lies in `deps` of the folder that the examples' one is in.
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().and_then(Path::parent).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--examples", "--package", env!("CARGO_PKG_NAME"), "--target-dir"]);
    cargo.arg(folder.parent().unwrap());
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder.join("examples")
}

/// Runs a program on the mock, and gives the races and the operations that each of its processes told of.
fn told(program: &Path, arguments: &[&str], mock: &str) -> Vec<(u64, u64)> {
    let mut command = Command::new(program);
    command.args(arguments).env("HIGHWATER_MOCK", mock).stdin(Stdio::null());
    // The examples take a real device where there is one.
    command.env("CUDA_VISIBLE_DEVICES", "").env("HIP_VISIBLE_DEVICES", "-1").env("ROCR_VISIBLE_DEVICES", "-1");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program:?} {mock}: {}\n{text}", output.status);
    let told = text.lines().filter_map(|line| line.strip_prefix("highwater-mock: race detector: "));
    let numbers = told.map(|line| {
        let (races, rest) = line.split_once(" races in ").unwrap();
        (races.parse().unwrap(), rest.strip_suffix(" operations").unwrap().parse().unwrap())
    });
    let numbers: Vec<_> = numbers.collect();
    assert!(numbers.iter().all(|&(races, _)| races == 0), "{program:?} {mock}:\n{text}");
    numbers
}

#[test]
fn no_example_has_a_race() {
    let folder = examples();
    for (example, processes) in [("gemm", 1), ("threads", 1), ("share", 2)] {
        for mock in ["race_detector=on", "race_detector=on,latency=1ms", "race_detector=on,schedule=4"] {
            let told = told(&folder.join(example), &[], mock);
            assert_eq!(told.len(), processes, "{example} {mock}: {told:?}");
            assert!(told.iter().all(|&(_, operations)| operations >= 2), "{example} {mock}: {told:?}");
        }
    }
}

#[test]
fn the_main_job_has_no_race() {
    let program = Path::new(env!("CARGO_BIN_EXE_highwater"));
    for mock in ["race_detector=on", "race_detector=on,devices=2", "race_detector=on,schedule=9"] {
        let told = told(program, &["--backend", "mock", "--json", "--workers", "2"], mock);
        // The owner and its workers.
        assert!(told.len() >= 3, "{mock}: {told:?}");
        assert!(told.iter().map(|&(_, operations)| operations).sum::<u64>() > 100, "{mock}: {told:?}");
    }
}
