//! The CUDA backend over simulated libraries of NVIDIA's: what the program says of installations that are whole, old or
//! broken, the main job in three processes, and the conformance suite.
//!
//! `scripts/simulated.sh` builds the libraries at the first run.

#![cfg(all(feature = "program", feature = "cuda"))]
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The program over a variant of the simulated libraries. The process is the program's own once they are built.
fn command(variant: &str, settings: &[(&str, &str)], arguments: &[&str]) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/simulated.sh");
    let vendor = if variant.is_empty() { "cuda".to_owned() } else { format!("cuda:{variant}") };
    let mut command = Command::new(script);
    command.arg(vendor).arg(env!("CARGO_BIN_EXE_highwater")).args(arguments);
    for variable in ["HIGHWATER_MOCK", "HIGHWATER_SIMULATED_CUDA", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"] {
        command.env_remove(variable);
    }
    command.envs(settings.iter().copied());
    command
}

/// Runs the program over a variant of the simulated libraries.
fn run(variant: &str, settings: &[(&str, &str)], arguments: &[&str]) -> Output {
    command(variant, settings, arguments).output().expect("bash runs the script")
}

#[track_caller]
fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error} in {output:?}"))
}

/// What `doctor` says of CUDA.
#[track_caller]
fn doctor(variant: &str, settings: &[(&str, &str)]) -> (String, String, String) {
    let output = run(variant, settings, &["doctor", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let object = object(&output);
    let cuda = object["backends"].as_array().unwrap().iter().find(|backend| backend["name"] == "cuda").unwrap();
    let text = |key: &str| cuda[key].as_str().unwrap().to_owned();
    (text("outcome"), text("reason"), text("hint"))
}

#[test]
fn installations_are_told_apart() {
    // Variant, what became of it, a part of the reason, a part of the hint.
    let expected = [
        ("", "usable", "NVIDIA CUDA, 1 device", ""),
        ("cuda-12", "usable", "NVIDIA CUDA, 1 device", ""),
        ("no-symbol", "symbol missing", "libcuda.so.1 lacks cuStreamWaitEvent", "CUDA 12.2 or newer"),
        ("two-symbols", "symbol missing", "lacks cuStreamQuery, ", "CUDA 12.2 or newer"),
        ("junk", "library missing", "file too short", "install the NVIDIA driver"),
        ("old-driver", "unsupported", "driver of CUDA 11.8", "CUDA 12.2 or newer"),
        ("no-device", "no device", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("stub", "library missing", "CUDA_ERROR_STUB_LIBRARY", "off the library path"),
        ("no-cublas", "library missing", "libcublasLt.so.13: cannot open", "HIGHWATER_CUBLASLT_LIBRARY"),
        ("wrong-major", "unsupported", "libcublasLt.so.11", "libcublasLt.so.13 or libcublasLt.so.12"),
    ];
    for (variant, outcome, reason, hint) in expected {
        let said = doctor(variant, &[]);
        assert_eq!(said.0, outcome, "{variant}: {said:?}");
        assert!(said.1.contains(reason) && said.2.contains(hint), "{variant}: {said:?}");
    }
}

#[test]
fn no_visible_device_is_no_device() {
    let (outcome, _, hint) = doctor("", &[("CUDA_VISIBLE_DEVICES", "")]);
    assert_eq!(outcome, "no device");
    assert!(hint.contains("CUDA_VISIBLE_DEVICES"), "{hint}");
}

#[test]
fn a_code_that_no_header_knows_is_an_error_with_its_number() {
    let output = run("unknown-code", &[], &["--backend", "cuda", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = object(&output)["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("921"), "{message}");
}

#[test]
fn the_main_job_runs_in_three_processes_on_one_copy_of_the_weights() {
    let output = run("", &[], &["--backend", "cuda", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let object = object(&output);
    assert_eq!(object["backend"], "cuda");
    assert_eq!(object["leaks"], 0, "{object}");
    assert!(object["accuracy"].as_f64().unwrap() > 0.98, "{object}");
    assert!(object["weights_shared_bytes"].as_u64().unwrap() > 0, "{object}");
}

#[test]
fn the_main_job_runs_on_two_devices_with_the_weights_in_the_memory_of_each() {
    for (workers, on_each) in [("2", [1, 1]), ("3", [2, 1])] {
        let arguments = ["--backend", "cuda", "--workers", workers, "--json"];
        let output = run("", &[("HIGHWATER_MOCK", "devices=2")], &arguments);
        assert!(output.status.success(), "{output:?}");
        let object = object(&output);
        assert_eq!((&object["leaks"], &object["predictions_equal_cpu"]), (&0.into(), &true.into()), "{object}");
        assert!(object["accuracy"].as_f64().unwrap() > 0.98, "{object}");
        assert_eq!(object["weights_transport"], "descriptor", "{object}");
        let devices = object["devices"].as_array().unwrap();
        let workers: Vec<_> = devices.iter().map(|device| device["workers"].as_u64().unwrap()).collect();
        assert_eq!(workers, on_each, "{object}");
        assert!(devices.iter().all(|device| device["images"].as_u64().unwrap() > 0), "{object}");
    }
}

/// What stands in a file of a process in /proc; nothing where it has ended.
fn of_process(process: u32, name: &str) -> String {
    fs::read_to_string(format!("/proc/{process}/{name}")).unwrap_or_default()
}

/// The workers of a program, which are its children that are the same program.
fn workers_of(owner: u32) -> Vec<u32> {
    let is_worker = |&process: &u32| {
        let stat = of_process(process, "stat");
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        parent == Some(owner) && of_process(process, "cmdline").contains("\0worker\0")
    };
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_worker).collect()
}

/// Memory for sharing that a process maps: its inode, and the number of its device.
fn shareable_memory(process: u32) -> BTreeSet<(String, String)> {
    let maps = of_process(process, "maps");
    let block = |line: &str| {
        let (_, device) = line.split_once("memfd:highwater-simulated-vmm-")?;
        Some((line.split_whitespace().nth(4)?.to_owned(), device.split(' ').next()?.to_owned()))
    };
    maps.lines().filter_map(block).collect()
}

/// A job that does not end by itself.
struct Endless(Child);

impl Drop for Endless {
    fn drop(&mut self) {
        // Its workers end with it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn each_worker_maps_the_weights_in_the_memory_of_its_device_and_of_no_other() {
    let arguments = ["--backend", "cuda", "--workers", "3", "--repeat", "1000000"];
    let mut command = command("", &[("HIGHWATER_MOCK", "devices=2,latency=1ms")], &arguments);
    let mut job = Endless(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let owner = job.0.id();
    // The libraries may have to be built first.
    let started = Instant::now();
    let mapped = loop {
        let mapped: Vec<_> = workers_of(owner).into_iter().map(shareable_memory).collect();
        if mapped.len() == 3 && mapped.iter().all(|mapped| !mapped.is_empty()) {
            break mapped;
        }
        assert_eq!(job.0.try_wait().unwrap(), None, "the job ended");
        assert!(started.elapsed() < Duration::from_secs(300), "the workers open nothing: {mapped:?}");
        thread::sleep(Duration::from_millis(5));
    };
    let weights = shareable_memory(owner);
    let on = |number: &str| weights.iter().filter(|(_, device)| device == number).count();
    assert_eq!((weights.len(), on("0"), on("1")), (2, 1, 1), "{weights:?}");
    assert!(mapped.iter().all(|mapped| mapped.len() == 1 && mapped.is_subset(&weights)), "{mapped:?} {weights:?}");
    let on_second = mapped.iter().flatten().filter(|(_, device)| device == "1").count();
    assert_eq!(on_second, 1, "{mapped:?}");
}

/// Runs the suite and checks that no case fails, and that no more are skipped than `most_skipped`.
#[track_caller]
fn conforms(variant: &str, settings: &[(&str, &str)], most_skipped: u64) {
    let output = run(variant, settings, &["conformance", "--backend", "cuda", "--json"]);
    let object = object(&output);
    let count = |key: &str| object[key].as_u64().unwrap();
    assert!(output.status.success() && count("failed") == 0, "{}", String::from_utf8_lossy(&output.stderr));
    assert!(count("passed") > 200 && count("skipped") <= most_skipped, "{object}");
}

#[test]
fn every_conformance_case_passes_on_one_device() {
    conforms("", &[], 35);
}

#[test]
fn every_conformance_case_passes_on_two_devices() {
    conforms("", &[("HIGHWATER_MOCK", "devices=2")], 25);
}

#[test]
fn every_conformance_case_passes_with_the_libraries_of_cuda_12() {
    conforms("cuda-12", &[], 35);
}
