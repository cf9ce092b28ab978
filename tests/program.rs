//! The program from outside: what it prints, where, and with which exit code.

#![cfg(feature = "program")]
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

/// A run that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);

struct Run {
    /// Whether it was called with `--json`.
    json: bool,
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    /// The one object on standard output.
    fn object(&self) -> Value {
        let value: Value = serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error} in {:?}\n{}", self.stdout, self.stderr));
        assert!(value.is_object(), "{}", self.stdout);
        value
    }

    /// The program failed with exactly one error, which has all of `parts`, and a hint; with `--json` standard output
    /// holds the same as an object, else nothing.
    #[track_caller]
    fn assert_error(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(2), "{}", self.stderr);
        if self.json {
            let object = self.object();
            assert_eq!(object.as_object().unwrap().len(), 1, "{object}");
            let text = |key: &str| object["error"][key].as_str().unwrap();
            assert!(self.stderr.contains(&format!("error: {}\nhint: {}\n", text("message"), text("hint"))), "{object}");
            assert!(!text("kind").is_empty(), "{object}");
        } else {
            assert_eq!(self.stdout, "");
        }
        assert_eq!(self.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{}", self.stderr);
        assert!(self.stderr.contains("\nhint: "), "{}", self.stderr);
        assert!(!self.stderr.contains("panicked") && !self.stderr.contains("left"), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "`{part}` is missing in:\n{}", self.stderr);
        }
    }
}

/// Runs the program with the mock as `mock` describes it, in a folder for temporary files that must stay empty.
fn highwater_on(mock: &str, arguments: &[&str]) -> Run {
    let folder = scratch_folder("temporary");
    let shared_files_before = shared_files();
    let mut child = Command::new(env!("CARGO_BIN_EXE_highwater"))
        .args(arguments)
        .env("HIGHWATER_MOCK", mock)
        .env("TMPDIR", &folder)
        .env_remove("CUBLAS_WORKSPACE_CONFIG")
        .env_remove("CUBLASLT_WORKSPACE_SIZE")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let collect = |mut pipe: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).unwrap();
            text
        })
    };
    let stdout = collect(Box::new(child.stdout.take().unwrap()));
    let stderr = collect(Box::new(child.stderr.take().unwrap()));
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{arguments:?} with HIGHWATER_MOCK={mock} hangs:\n{}", stderr.join().unwrap());
        }
        thread::sleep(Duration::from_millis(2));
    };
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "temporary files were left in {}", folder.display());
    assert_eq!(shared_files().difference(&shared_files_before).count(), 0, "shared files were left");
    fs::remove_dir(&folder).unwrap();
    Run {
        json: arguments.contains(&"--json"),
        code: status.code(),
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
}

fn highwater(arguments: &[&str]) -> Run {
    highwater_on("", arguments)
}

/// An empty folder of this process.
fn scratch_folder(purpose: &str) -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{purpose}-{}-{number}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Shared files with the project's name, by name.
fn shared_files() -> BTreeSet<OsString> {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return BTreeSet::new() };
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
    names.filter(|name| name.to_string_lossy().contains("highwater")).collect()
}

// ---------------------------------------------------------------- the main job

#[test]
fn the_main_job_classifies_and_leaves_nothing() {
    let run = highwater(&["--backend", "mock", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let object = run.object();
    assert_eq!(object["backend"], "mock");
    assert!(object["accuracy"].as_f64().unwrap() >= 0.96, "{object}");
    assert_eq!(object["predictions_equal_cpu"], true);
    assert!(object["images_per_second"].as_f64().unwrap() > 0.0);
    let integers = [
        ("images", 540),
        ("processes", 1),
        ("threads", 4),
        ("handles_created", 4),
        ("threads_served", 4),
        ("workspaces", 4),
        ("workspace_bytes", 4 << 20),
        ("weights_shared_bytes", 0),
        ("leaks", 0),
    ];
    for (key, value) in integers {
        assert_eq!(object[key].as_u64(), Some(value), "{key} in {object}");
    }
    let pinned = |key: &str| object[key].as_u64().unwrap();
    assert!(pinned("pinned_requested_bytes") > 0 && pinned("pinned_held_bytes") >= pinned("pinned_requested_bytes"));
}

#[test]
fn any_number_of_threads_and_passes_gives_the_same_predictions() {
    for (threads, repeat) in [(1, 2), (7, 2), (40, 1)] {
        let run = highwater(&["--threads", &threads.to_string(), "--repeat", &repeat.to_string(), "--json"]);
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let object = run.object();
        let integer = |key: &str| object[key].as_u64().unwrap();
        assert_eq!((integer("images"), integer("correct")), (540 * repeat, 530 * repeat), "{object}");
        assert_eq!((integer("threads"), integer("handles_created"), integer("leaks")), (threads, threads, 0));
        assert_eq!(object["predictions_equal_cpu"], true);
    }
}

#[test]
fn without_arguments_a_table_says_which_backend_was_taken_and_why() {
    let run = highwater(&[]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for part in ["backend", "accuracy", "images per second", "created", "threads served", "requested", "leaks"] {
        assert!(run.stdout.contains(part), "`{part}` is missing in:\n{}", run.stdout);
    }
    assert!(run.stderr.starts_with("backend "), "{}", run.stderr);
    assert!(run.stderr.contains("540 of 540 images"), "{}", run.stderr);
    assert!(run.stderr.lines().count() < 20, "{}", run.stderr);
}

#[test]
fn a_slow_device_gives_the_same_answer() {
    let run = highwater_on("latency=200us,gemm-gap=50us", &["--backend", "mock", "--json"]);
    assert_eq!((run.code, run.object()["correct"].as_u64()), (Some(0), Some(530)), "{}", run.stderr);
}

// ---------------------------------------------------------------- bad input

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    for arguments in [["--threads", "0"], ["--threads", "100000"], ["--repeat", "0"]] {
        let run = highwater(&arguments);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
        assert!(run.stderr.starts_with("error: ") && run.stderr.contains("expected a number of"), "{}", run.stderr);
    }
}

#[test]
fn an_unknown_backend_is_answered_with_the_known_ones() {
    highwater(&["--backend", "metal"]).assert_error(&["`metal`", "cuda, rocm, mock"]);
    highwater(&["conformance", "--backend", "metal", "--json"]).assert_error(&["`metal`", "cuda, rocm, mock"]);
}

#[test]
fn a_backend_asked_for_by_name_is_never_replaced() {
    for (name, library) in [("cuda", "libcuda"), ("rocm", "libamdhip64")] {
        let run = highwater(&["--backend", name, "--json"]);
        if run.code == Some(0) {
            assert_eq!(run.object()["backend"], name);
        } else if run.stderr.contains("library missing") {
            run.assert_error(&[library]);
        } else {
            run.assert_error(&[]);
        }
    }
}

#[test]
fn a_missing_folder_or_file_is_named() {
    highwater(&["--data", "/nowhere/at/all"]).assert_error(&["/nowhere/at/all/weights.safetensors", "No such file"]);
    let data = Data::copy();
    fs::remove_file(data.0.join("test.safetensors")).unwrap();
    data.run().assert_error(&["test.safetensors` cannot be read", "No such file"]);
}

#[test]
fn what_is_no_regular_file_or_too_large_is_not_read() {
    let data = Data::copy();
    let weights = data.0.join("weights.safetensors");
    fs::remove_file(&weights).unwrap();
    for endless in ["/dev/zero", "/dev"] {
        std::os::unix::fs::symlink(endless, &weights).unwrap();
        data.run().assert_error(&["weights.safetensors` cannot be read: it is no regular file"]);
        fs::remove_file(&weights).unwrap();
    }
    assert!(Command::new("mkfifo").arg(&weights).status().unwrap().success());
    data.run().assert_error(&["weights.safetensors` cannot be read: it is no regular file"]);
    fs::remove_file(&weights).unwrap();
    // Sparse: it takes no space.
    let large = fs::File::create(&weights).unwrap();
    large.set_len(1 << 40).unwrap();
    data.run().assert_error(&["weights.safetensors` cannot be read: it is larger than 16777216 bytes"]);
    large.set_len(16 << 20).unwrap();
    data.run().assert_error(&["weights.safetensors` (16777216 bytes) is not a safetensors file"]);
}

/// A copy of the job's files, to be spoilt.
struct Data(PathBuf);

impl Data {
    fn copy() -> Self {
        let folder = scratch_folder("data");
        for name in ["weights.safetensors", "test.safetensors"] {
            fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/digits").join(name), folder.join(name))
                .unwrap();
        }
        Self(folder)
    }

    /// Replaces one tensor of a file.
    fn set(&self, file: &str, tensor: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) {
        let path = self.0.join(file);
        let old = fs::read(&path).unwrap();
        let mut tensors = SafeTensors::deserialize(&old).unwrap().tensors();
        let place = tensors.iter_mut().find(|(name, _)| name == tensor).unwrap();
        place.1 = TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
        fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    }

    fn run(&self) -> Run {
        highwater(&["--data", self.0.to_str().unwrap(), "--json"])
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn files_in_a_folder_stand_in_for_the_built_in_ones() {
    let run = Data::copy().run();
    assert_eq!((run.code, run.object()["correct"].as_u64()), (Some(0), Some(530)), "{}", run.stderr);
}

#[test]
fn corrupt_files_are_refused_with_what_is_wrong() {
    let data = Data::copy();
    let weights = fs::read(data.0.join("weights.safetensors")).unwrap();
    fs::write(data.0.join("weights.safetensors"), &weights[..weights.len() - 1]).unwrap();
    data.run().assert_error(&["weights.safetensors`", "is not a safetensors file", "examples/digits/train.py"]);
    fs::write(data.0.join("weights.safetensors"), "").unwrap();
    data.run().assert_error(&["weights.safetensors` (0 bytes) is not a safetensors file"]);

    let data = Data::copy();
    data.set("weights.safetensors", "layer1.weight", Dtype::F32, &[64, 128], &[0; 64 * 128 * 4]);
    data.run().assert_error(&["`layer1.weight`", "F32 [64, 128], expected F32 [128, 64]"]);

    let data = Data::copy();
    data.set("weights.safetensors", "layer2.bias", Dtype::F32, &[10], &[0xff; 40]);
    data.run().assert_error(&["value 0 of `layer2.bias`", "NaN", "finite"]);

    let data = Data::copy();
    data.set("test.safetensors", "labels", Dtype::U8, &[540], &[10; 540]);
    data.run().assert_error(&["value 0 of `labels`", "is 10, expected 0 to 9"]);
}

#[test]
fn weights_that_classify_badly_are_a_bad_answer_and_no_error() {
    let data = Data::copy();
    data.set("weights.safetensors", "layer2.weight", Dtype::F32, &[64, 10], &[0; 64 * 10 * 4]);
    let run = data.run();
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.object()["accuracy"].as_f64().unwrap() < 0.96);
    assert!(run.stderr.contains("error: the accuracy is"), "{}", run.stderr);
}

#[test]
fn a_device_without_enough_memory_says_so() {
    for memory in ["1MiB", "4KiB", "4MiB"] {
        let run = highwater_on(&format!("memory={memory}"), &["--backend", "mock", "--json"]);
        run.assert_error(&["out of memory", "--threads", "HIGHWATER_MOCK=memory="]);
        assert_eq!(run.object()["error"]["kind"], "out of memory");
    }
    assert_eq!(highwater_on("memory=4MiB", &["--threads", "3"]).code, Some(0));
}

#[test]
fn page_locked_memory_that_runs_out_says_so() {
    let run = highwater_on("host-memory=8KiB", &["--backend", "mock", "--json"]);
    run.assert_error(&["out of memory", "--threads", "HIGHWATER_MOCK=host-memory="]);
    assert!(!run.stderr.contains("HIGHWATER_MOCK=memory="), "{}", run.stderr);
}

#[test]
fn what_runs_out_besides_memory_keeps_the_hint_of_the_library() {
    // The library tries once more, so the next call fails too.
    let run = highwater_on("fail=create_stream:1,fail=create_stream:2", &["--backend", "mock", "--json"]);
    run.assert_error(&["create_stream: out of memory", "hint: the fault was set by"]);
    assert!(!run.stderr.contains("HIGHWATER_MOCK="), "{}", run.stderr);
}

#[test]
fn a_fault_in_the_middle_ends_with_one_error() {
    let faults = [
        ("run_plan:5", "run_plan"),
        ("run_plan:40", "run_plan"),
        ("host_allocate:2", ""),
        ("create_stream:3", "create_stream"),
        ("create_blas_handle:2", "create_blas_handle"),
        ("create_plan:4", "create_plan"),
        ("copy:30", "copy"),
        ("allocate:9:device-lost", "device lost"),
        ("run_plan:30:device-lost", "device lost"),
    ];
    // Where memory runs out once, the library gives back what it can and tries again; then nothing is wrong.
    let made_again = ["host_allocate", "create_blas_handle", "create_stream"];
    for (fault, named) in faults {
        let run = highwater_on(&format!("fail={fault}"), &["--backend", "mock", "--json"]);
        if run.code == Some(0) {
            assert!(made_again.iter().any(|made| fault.starts_with(made)), "{fault} went unnoticed");
            assert_eq!(run.object()["leaks"], 0);
            continue;
        }
        run.assert_error(&[named]);
    }
}

#[test]
fn memory_that_the_device_does_not_take_back_is_a_leak_and_a_bad_answer() {
    let run = highwater_on("fail=free:1", &["--backend", "mock", "--json"]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert_eq!(run.object()["leaks"], 1);
    assert!(run.stderr.contains("error: not everything could be given back: free: "), "{}", run.stderr);
    assert!(run.stderr.contains("error: objects still alive at the end: 1"), "{}", run.stderr);
}

#[test]
fn a_mock_that_is_described_wrongly_is_an_error_with_the_key() {
    highwater_on("memory=lots", &["--backend", "mock"]).assert_error(&["`memory`", "`lots`", "64MiB"]);
}

/// On the default path as with `--backend mock`, the error names the variable and the hint says what to do.
#[test]
fn what_is_wrong_with_the_mock_is_told_whether_or_not_it_was_asked_for() {
    for (mock, reason, hint) in [
        ("memory=lots", "the value of `memory` is `lots`", "expected bytes, such as 4096, 64KiB"),
        ("colour=red", "`colour` (with the value `red`) is no option", "expected one of devices, memory"),
        ("fail=alocate:1", "no operation is named `alocate`", "the operations are"),
        ("devices=0", "0 devices were asked for", "expected 1 to 64"),
        (
            "memory=8TiB",
            "8796093022208 bytes of memory per device were asked for",
            "expected a multiple of 4096, up to 4 TiB",
        ),
    ] {
        let reason = format!("in HIGHWATER_MOCK, {reason}");
        let hint = format!("\nhint: {hint}");
        let asked = highwater_on(mock, &["--backend", "mock", "--json"]);
        asked.assert_error(&[&reason, &hint]);
        let auto = highwater_on(mock, &["--json"]);
        if auto.code == Some(0) {
            assert_ne!(auto.object()["backend"], "mock", "a real device works here");
            continue;
        }
        auto.assert_error(&["no backend could be taken", "cuda: ", "rocm: ", &reason, &hint]);
        for key in ["kind", "hint"] {
            assert_eq!(auto.object()["error"][key], asked.object()["error"][key], "{mock}");
        }
    }
}

#[test]
fn a_result_that_cannot_be_written_is_an_error() {
    let run = |stdout: fs::File, arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_highwater")).args(arguments).stdout(stdout).output().unwrap()
    };
    for arguments in [&["doctor"][..], &["doctor", "--json"]] {
        let full = run(fs::File::create("/dev/full").unwrap(), arguments);
        let not_for_writing = run(fs::File::open("/dev/null").unwrap(), arguments);
        for output in [full, not_for_writing] {
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{stderr}");
            assert!(stderr.contains("error: the result cannot be written: "), "{stderr}");
            assert!(stderr.contains("\nhint: "), "{stderr}");
        }
    }
}

#[test]
fn options_in_front_of_a_command_are_refused() {
    let run = highwater(&["--threads", "2", "doctor"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    assert!(run.stderr.contains("`--threads` in front of `doctor`"), "{}", run.stderr);
}

// ---------------------------------------------------------------- doctor

#[test]
fn doctor_names_every_backend_and_what_was_tried() {
    let run = highwater(&["doctor", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let object = run.object();
    assert!(object["usable"].as_array().unwrap().contains(&"mock".into()), "{object}");
    let backends = object["backends"].as_array().unwrap();
    let names: Vec<_> = backends.iter().map(|backend| backend["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cuda", "rocm", "mock"]);
    for backend in backends {
        assert!(!backend["reason"].as_str().unwrap().is_empty(), "{backend}");
        let usable = backend["usable"].as_bool().unwrap();
        assert_eq!(usable, !backend["devices"].as_array().unwrap().is_empty(), "{backend}");
        if backend["outcome"] == "library missing" {
            let tried = backend["tried"].as_array().unwrap();
            assert!(!tried.is_empty() && tried.iter().all(|t| t["name"].is_string() && t["reason"].is_string()));
        }
    }
    let table = highwater(&["doctor"]);
    assert_eq!(table.code, Some(0));
    assert!(names.iter().all(|name| table.stdout.contains(name)), "{}", table.stdout);
}

#[test]
fn doctor_counts_a_broken_mock_as_unusable() {
    let run = highwater_on("devices=none", &["doctor", "--json"]);
    let object = run.object();
    let mock = &object["backends"][2];
    assert_eq!((&mock["usable"], &mock["outcome"]), (&false.into(), &"failed".into()), "{mock}");
    assert!(mock["reason"].as_str().unwrap().contains("`devices` is `none`"), "{mock}");
    let nothing_usable = object["usable"].as_array().unwrap().is_empty();
    assert_eq!(run.code, Some(i32::from(nothing_usable)), "{}", run.stderr);
}

// ---------------------------------------------------------------- conformance

#[test]
fn conformance_counts_its_cases() {
    let run = highwater(&["conformance", "--backend", "mock", "--filter", "copies.", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let object = run.object();
    assert_eq!(object["backend"], "mock");
    let integer = |key: &str| object[key].as_u64().unwrap();
    assert!(integer("passed") > 0 && integer("failed") == 0, "{object}");
    assert_eq!(
        integer("cases"),
        integer("passed") + integer("failed") + integer("skipped") + integer("expected_failures")
    );
    assert_eq!(object["skips"].as_array().unwrap().len() as u64, integer("skipped"));
}

#[test]
fn conformance_fails_where_a_promise_is_broken() {
    let arguments = ["conformance", "--backend", "mock", "--filter", "fills."];
    let run = highwater_on("fail=fill:1", &[&arguments[..], &["--json"]].concat());
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let object = run.object();
    assert_eq!(object["failed"], 1, "{object}");
    let failure = &object["failures"][0];
    assert!(failure["case"].as_str().unwrap().starts_with("fills."), "{failure}");
    assert!(failure["message"].as_str().unwrap().contains("fill"), "{failure}");
    let table = highwater_on("fail=fill:1", &arguments);
    assert_eq!(table.code, Some(1));
    assert!(table.stdout.contains("1 failed"), "{}", table.stdout);
}

#[test]
fn conformance_without_a_matching_case_is_an_error() {
    highwater(&["conformance", "--filter", "no such case"]).assert_error(&["`no such case`", "name a part of a case"]);
    let run = highwater(&["conformance", "--filter", "no such case", "--json"]);
    run.assert_error(&["`no such case`"]);
    assert_eq!(run.object()["error"]["kind"], "invalid argument");
}
