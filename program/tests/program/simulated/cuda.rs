//! CUDA.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Simulated;
use crate::started::Process;

const CUDA: Simulated = Simulated { libraries: "cuda", backend: "cuda" };

#[test]
fn installations_are_told_apart() {
    // Variant, what became of it, a part of the reason, a part of the hint.
    CUDA.are_told_apart(&[
        ("", "usable", "NVIDIA CUDA, 1 device", "", &[]),
        ("cuda-12", "usable", "NVIDIA CUDA, 1 device", "", &[]),
        ("no-symbol", "symbol missing", "libcuda.so.1 lacks cuStreamWaitEvent", "CUDA 12.2 or newer", &[]),
        ("two-symbols", "symbol missing", "lacks cuStreamQuery, ", "CUDA 12.2 or newer", &[]),
        ("junk", "library missing", "file too short", "install the NVIDIA driver", &[]),
        ("old-driver", "unsupported", "driver of CUDA 11.8", "CUDA 12.2 or newer", &[]),
        ("no-device", "no device", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES", &[]),
        ("stub", "library missing", "CUDA_ERROR_STUB_LIBRARY", "remove its folder from the library path", &[]),
        (
            "no-cublas",
            "library missing",
            "libcublasLt.so.13: cannot open",
            "HIGHWATER_CUBLASLT_LIBRARY",
            &["libcublasLt.so.13", "libcublasLt.so.12"],
        ),
        (
            "wrong-major",
            "unsupported",
            "libcublasLt.so.11",
            "libcublasLt.so.13 or libcublasLt.so.12",
            &["libcublasLt.so.13", "libcublasLt.so.12"],
        ),
    ]);
}

#[test]
fn no_visible_device_is_no_device() {
    let (outcome, _, hint) = CUDA.doctor("", &[("CUDA_VISIBLE_DEVICES", "")]);
    assert_eq!(outcome, "no device");
    assert!(hint.contains("CUDA_VISIBLE_DEVICES"), "{hint}");
}

#[test]
fn a_code_that_no_header_knows_is_an_error_with_its_number() {
    CUDA.tells_an_unknown_code();
}

#[test]
fn the_main_job_runs_in_three_processes_on_one_copy_of_the_weights() {
    assert_eq!(CUDA.main_job(&[], "2")["processes"], 3);
}

#[test]
fn the_main_job_runs_on_two_devices_with_the_weights_in_the_memory_of_each() {
    CUDA.main_job_on_two_devices("descriptor");
}

/// The beginning of the names of memory for sharing, which end in the number of the device.
const MEMORY: &str = "highwater-simulated-vmm-";

/// A job that does not end by itself.
struct Endless(Child);

impl Endless {
    fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Calls `answer` until it returns a value. Panics after 300 seconds, or if the job ends. The libraries may have to be built first.
    fn until<T>(&mut self, mut answer: impl FnMut(Process) -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            if let Some(answer) = answer(Process(self.0.id())) {
                return answer;
            }
            assert_eq!(self.0.try_wait().unwrap(), None, "the job ended");
            assert!(started.elapsed() < Duration::from_secs(300), "no answer within 300 seconds");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        // Its workers end with it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_worker_of_the_soak_has_one_connection_unless_the_environment_sets_a_number() {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    let chosen: [&[(&str, &str)]; 2] = [&[], &[(NAME, "4")]];
    for (settings, expected) in chosen.into_iter().zip(["1", "4"]) {
        let arguments = ["soak", "ipc", "--kills", "1000000", "--processes", "3", "--backend", "cuda"];
        let mut soak = Endless::start(CUDA.command("", settings, &arguments));
        let found = soak.until(|owner| {
            let workers = owner.children().into_iter().filter(|child| child.file("cmdline").contains("soak-worker"));
            let variables = |worker: Process| worker.file("environ");
            let connections =
                |text: String| Some(text.split_once(&format!("{NAME}="))?.1.split('\0').next()?.to_owned());
            workers.map(variables).find_map(connections)
        });
        assert_eq!(found, expected);
    }
}

#[test]
fn each_worker_maps_the_weights_in_the_memory_of_its_device_and_of_no_other() {
    let arguments = ["--backend", "cuda", "--workers", "3", "--repeat", "1000000"];
    let mut job = Endless::start(CUDA.command("", &[("HIGHWATER_MOCK", "devices=2,latency=1ms")], &arguments));
    let (mapped, weights) = job.until(|owner| {
        let workers = owner.children().into_iter().filter(|child| child.file("cmdline").contains("\0worker\0"));
        let mapped: Vec<_> = workers.map(|worker| worker.shared_memory(MEMORY)).collect();
        let is_open = mapped.len() == 3 && mapped.iter().all(|mapped| !mapped.is_empty());
        is_open.then(|| (mapped, owner.shared_memory(MEMORY)))
    });
    let on = |number: &str| weights.iter().filter(|(_, device)| device == number).count();
    assert_eq!((weights.len(), on("0"), on("1")), (2, 1, 1), "{weights:?}");
    assert!(mapped.iter().all(|mapped| mapped.len() == 1 && mapped.is_subset(&weights)), "{mapped:?} {weights:?}");
    let on_second = mapped.iter().flatten().filter(|(_, device)| device == "1").count();
    assert_eq!(on_second, 1, "{mapped:?}");
}

#[test]
fn the_plugin_says_what_the_built_in_backend_says() {
    CUDA.says_the_same_as_plugin();
}

#[test]
fn a_sample_of_refused_calls_leaves_nothing_behind() {
    let arguments = ["conformance", "--backend", "cuda", "--fault-sweep", "--sample", "4001", "--jobs", "2", "--json"];
    let object = CUDA.run("", &[], &arguments).ended(0).object();
    assert!(object["calls_swept"].as_u64().unwrap() > 20, "{object}");
}

/// The simulated driver counts as a real device, so each mutant has a process of its own.
#[test]
fn mutants_by_construction_run_in_processes_of_their_own() {
    let run = |filter: &str, code| {
        let arguments =
            ["conformance", "--backend", "cuda", "--mutants", "--filter", filter, "--sample", "3", "--json"];
        CUDA.run("", &[("HIGHWATER_MOCK", "devices=2")], &arguments).ended(code).object()
    };
    let object = run("gemm-drop-", 0);
    assert_eq!(
        (&object["generated"], &object["caught"], &object["skipped"]),
        (&4.into(), &4.into(), &0.into()),
        "{object}"
    );
    assert_eq!((&object["equivalent"], object["missed"].as_array().unwrap().len()), (&0.into(), 0), "{object}");
    // Mutants that need checks are kept from a driver, and a run of no mutant is no success.
    let object = run("destroy-event-neighbor-", 1);
    assert_eq!(
        (&object["generated"], &object["caught"], &object["skipped"]),
        (&2.into(), &0.into(), &2.into()),
        "{object}"
    );
}
