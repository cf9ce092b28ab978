//! The program from outside: what it prints, where, and with which exit code.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

use crate::started::{Process, Run};

/// A run that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program with the mock as `mock` describes it. It takes the mock by default, also on a machine with a GPU.
pub(crate) fn command_on(mock: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
    command.args(arguments).env("HIGHWATER_MOCK", mock).env("HIGHWATER_BACKEND", "mock");
    command.env_remove("CUBLAS_WORKSPACE_CONFIG").env_remove("CUBLASLT_WORKSPACE_SIZE");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the program with the mock as `mock` describes it, in a folder for temporary files that must stay empty.
pub(crate) fn highwater_on(mock: &str, arguments: &[&str]) -> Run {
    run_whole(command_on(mock, arguments), mock, arguments)
}

/// The same, but the program chooses, as on a machine without a GPU.
fn highwater_without_gpu(mock: &str, arguments: &[&str]) -> Run {
    let mut command = command_on(mock, arguments);
    command.env_remove("HIGHWATER_BACKEND").env_remove("HIGHWATER_PLUGIN_PATH");
    command.env("HIGHWATER_CUDA_LIBRARY", "/nowhere/libcuda.so.1").env("HIGHWATER_HIP_LIBRARY", "/nowhere/libhip.so");
    run_whole(command, mock, arguments)
}

fn run_whole(mut command: Command, mock: &str, arguments: &[&str]) -> Run {
    let folder = scratch_folder("temporary");
    let shared_files_before = shared_files();
    let child = command.env("TMPDIR", &folder).spawn().unwrap();
    let run = run_to_its_end(child, arguments, &format!("with HIGHWATER_MOCK={mock}"));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "temporary files were left in {}", folder.display());
    assert_eq!(shared_files().difference(&shared_files_before).count(), 0, "shared files were left");
    fs::remove_dir(&folder).unwrap();
    run
}

pub(crate) fn run_to_its_end(mut child: Child, arguments: &[&str], where_: &str) -> Run {
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
            panic!("{arguments:?} {where_} hangs:\n{}", stderr.join().unwrap());
        }
        thread::sleep(Duration::from_millis(2));
    };
    Run {
        json: arguments.contains(&"--json"),
        code: status.code(),
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
}

pub(crate) fn highwater(arguments: &[&str]) -> Run {
    highwater_on("", arguments)
}

/// An empty folder of this process.
pub(crate) fn scratch_folder(purpose: &str) -> PathBuf {
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

/// Weights and biases of 64 x 128, 128 x 64 and 64 x 10, 4 bytes each.
const WEIGHTS_BYTES: u64 = 68_904;

/// Ordinals of the devices that were used, with the workers of each.
#[track_caller]
fn devices(object: &Value) -> Vec<(u64, u64)> {
    let device = |device: &Value| (device["ordinal"].as_u64().unwrap(), device["workers"].as_u64().unwrap());
    object["devices"].as_array().unwrap().iter().map(device).collect()
}

#[test]
fn the_main_job_classifies_and_leaves_nothing() {
    let object = highwater(&["--backend", "mock", "--json"]).ended(0).object();
    assert_eq!(object["backend"], "mock");
    assert!(object["accuracy"].as_f64().unwrap() >= 0.96, "{object}");
    assert_eq!(object["predictions_equal_cpu"], true);
    assert!(object["images_per_second"].as_f64().unwrap() > 0.0);
    let integers = [
        ("images", 540),
        ("correct", 530),
        ("processes", 3),
        ("threads", 4),
        ("handles_created", 4),
        ("threads_served", 4),
        ("workspaces", 4),
        ("workspace_bytes", 4 << 20),
        ("weights_shared_bytes", 2 * WEIGHTS_BYTES),
        ("leaks", 0),
    ];
    for (key, value) in integers {
        assert_eq!(object[key].as_u64(), Some(value), "{key} in {object}");
    }
    assert_eq!(devices(&object), [(0, 2)]);
    assert_eq!(object["devices"][0]["name"], object["device"]);
    assert_eq!(object["weights_transport"], "descriptor");
    let pinned = |key: &str| object[key].as_u64().unwrap();
    assert!(pinned("pinned_requested_bytes") > 0 && pinned("pinned_held_bytes") >= pinned("pinned_requested_bytes"));
}

#[test]
fn any_number_of_workers_threads_and_passes_gives_the_same_predictions() {
    for (workers, threads, repeat) in [(0, 1, 2), (0, 40, 1), (1, 7, 2), (3, 1, 3), (5, 5, 1)] {
        let (workers_text, threads_text, repeat_text) = (workers.to_string(), threads.to_string(), repeat.to_string());
        let arguments = ["--workers", &workers_text, "--threads", &threads_text, "--repeat", &repeat_text, "--json"];
        let object = highwater(&arguments).ended(0).object();
        let integer = |key: &str| object[key].as_u64().unwrap();
        assert_eq!((integer("images"), integer("correct")), (540 * repeat, 530 * repeat), "{object}");
        let all_threads = threads * workers.max(1);
        assert_eq!((integer("threads"), integer("handles_created"), integer("leaks")), (all_threads, all_threads, 0));
        assert_eq!((integer("processes"), integer("weights_shared_bytes")), (1 + workers, workers * WEIGHTS_BYTES));
        assert_eq!(object["predictions_equal_cpu"], true);
    }
}

#[test]
fn workers_are_spread_over_the_devices_in_turns() {
    // The mock, workers, and the devices that are used with the workers of each.
    let cases = [
        ("devices=2", 2, vec![(0, 1), (1, 1)]),
        ("devices=3", 2, vec![(0, 1), (1, 1)]),
        ("devices=2", 3, vec![(0, 2), (1, 1)]),
        ("devices=2", 1, vec![(0, 1)]),
        ("devices=2", 0, vec![(0, 0)]),
    ];
    for (mock, workers, expected) in cases {
        let object =
            highwater_on(mock, &["--backend", "mock", "--workers", &workers.to_string(), "--json"]).ended(0).object();
        assert_eq!(devices(&object), expected, "{mock}: {object}");
        let integers = ["correct", "leaks", "weights_shared_bytes"].map(|key| object[key].as_u64().unwrap());
        assert_eq!(integers, [530, 0, workers * WEIGHTS_BYTES], "{mock}: {object}");
        assert_eq!(object["predictions_equal_cpu"], true);
        let used = object["devices"].as_array().unwrap();
        let images: Vec<_> = used.iter().map(|device| device["images"].as_u64().unwrap()).collect();
        assert!(images.iter().sum::<u64>() == 540 && images.iter().all(|&images| images > 0), "{mock}: {object}");
        let names: BTreeSet<_> = used.iter().map(|device| device["name"].as_str().unwrap()).collect();
        assert!(!names.contains("") && used[0]["name"] == object["device"], "{mock}: {object}");
        let transport = if workers > 0 { Value::from("descriptor") } else { Value::Null };
        assert_eq!(object["weights_transport"], transport, "{mock}: {object}");
    }
}

#[test]
fn the_table_names_each_device_that_was_used() {
    let run = highwater_on("devices=2", &["--backend", "mock", "--workers", "3"]).ended(0);
    run.assert_printed(&[
        "devices",
        "0: ",
        ", 2 workers, ",
        "1: ",
        ", 1 worker, ",
        "once on each of 2 devices",
        "descriptor",
    ]);
    let one = highwater(&["--backend", "mock"]);
    assert!(one.stdout.contains("descriptor") && !one.stdout.contains("devices"), "{}", one.stdout);
}

#[test]
fn a_worker_that_dies_on_one_of_two_devices_ends_the_job() {
    for when in ["ticket", "33"] {
        let run = highwater_on("devices=2", &["--backend", "mock", "--die-at", when, "--json"]).ended(3);
        run.assert_told(&["worker ", "ended early", "of 540 images"]);
    }
}

#[test]
fn without_arguments_a_table_says_which_backend_was_taken_and_why() {
    let run = highwater_without_gpu("", &[]).ended(0);
    run.assert_printed(&[
        "backend",
        "3: the owner of the weights, and 2 workers with 2 threads each",
        "accuracy",
        "images per second",
        "created",
        " served",
        "requested",
        "leaks",
    ]);
    assert!(run.stderr.starts_with("backend "), "{}", run.stderr);
    assert!(run.stderr.contains("540 of 540 images"), "{}", run.stderr);
    assert!(run.stderr.lines().count() < 20, "{}", run.stderr);
}

#[test]
fn a_slow_device_gives_the_same_answer() {
    let run = highwater_on("latency=200us,gemm-gap=50us", &["--backend", "mock", "--json"]);
    assert_eq!((run.code, run.object()["correct"].as_u64()), (Some(0), Some(530)), "{}", run.stderr);
}

#[test]
fn a_device_that_cannot_share_is_used_by_one_process_which_says_so() {
    for mock in ["shareable-memory=off", "ipc-transports=none"] {
        let run = highwater_on(mock, &["--backend", "mock", "--json"]);
        if mock == "ipc-transports=none" && run.code == Some(2) {
            // Not an option of this mock.
            continue;
        }
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        assert!(run.stderr.contains("cannot be shared with other processes"), "{}", run.stderr);
        let object = run.object();
        let integers = ["processes", "threads", "weights_shared_bytes", "correct"].map(|key| object[key].as_u64());
        assert_eq!(integers, [Some(1), Some(2), Some(0), Some(530)], "{object}");
    }
    let asked_for_none = highwater_on("shareable-memory=off", &["--workers", "0"]);
    assert!(asked_for_none.code == Some(0) && !asked_for_none.stderr.contains("cannot be shared"));
    let scale = highwater_on("shareable-memory=off", &["--backend", "mock", "--scale", "--json"]);
    scale.assert_error(&["cannot be shared with other processes", "--workers 0"]);
    assert_eq!(scale.object()["error"]["kind"], "unsupported");
}

#[test]
fn scale_compares_one_two_and_four_workers() {
    let object = highwater(&["--backend", "mock", "--scale", "--repeat", "3", "--json"]).ended(0).object();
    let rows = object["scale"].as_array().unwrap();
    let workers: Vec<_> = rows.iter().map(|row| row["workers"].as_u64().unwrap()).collect();
    assert_eq!(workers, [1, 2, 4]);
    assert_eq!(rows[0]["ratio"], 1.0);
    for row in rows {
        let workers = row["workers"].as_u64().unwrap();
        assert!(row["images_per_second"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["weights_shared_bytes"].as_u64(), Some(workers * WEIGHTS_BYTES));
        assert_eq!((row["correct"].as_u64(), row["leaks"].as_u64()), (Some(3 * 530), Some(0)));
    }
    let table = highwater(&["--backend", "mock", "--scale", "--repeat", "1"]).ended(0);
    table.assert_printed(&["workers", "images per second", "ratio to 1 worker", "1.00"]);
}

// ---------------------------------------------------------------- several processes

/// The name of the memory that the mock shares.
const MEMORY: &str = "highwater-mock-block";

/// A job that does not end by itself.
const ENDLESS: [&str; 4] = ["--backend", "mock", "--repeat", "1000000"];

/// Waits until a condition holds.
pub(crate) fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < limit, "{what}: not within {limit:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A job that runs, with its workers.
struct Job {
    owner: Child,
    workers: Vec<Process>,
}

impl Job {
    /// An endless job with so many workers, all of which have opened the weights.
    fn start(workers: usize) -> Self {
        Self::start_on("latency=1ms", workers)
    }

    /// The same with the mock as `mock` describes it.
    fn start_on(mock: &str, workers: usize) -> Self {
        let mut arguments = ENDLESS.to_vec();
        let workers_text = workers.to_string();
        arguments.extend(["--workers", &workers_text]);
        let mut job = Self::spawn_on(mock, &arguments);
        job.wait_for_workers(workers);
        let process = Process(job.owner.id());
        wait_until("the weights are opened", PATIENCE, || {
            let own = process.shared_memory(MEMORY);
            job.workers.iter().all(|worker| !worker.shared_memory(MEMORY).is_disjoint(&own))
        });
        job
    }

    fn spawn(arguments: &[&str]) -> Self {
        Self::spawn_on("latency=1ms", arguments)
    }

    fn spawn_on(mock: &str, arguments: &[&str]) -> Self {
        Self { owner: command_on(mock, arguments).spawn().unwrap(), workers: Vec::new() }
    }

    fn wait_for_workers(&mut self, workers: usize) {
        let owner = Process(self.owner.id());
        wait_until("the workers are there", PATIENCE, || {
            self.workers = owner.children();
            self.workers.len() == workers
        });
    }

    /// Waits for its end; no worker may be left then.
    fn finish(mut self, arguments: &[&str]) -> Run {
        let owner = std::mem::replace(&mut self.owner, Command::new("true").spawn().unwrap());
        let run = run_to_its_end(owner, arguments, "after a kill");
        for worker in &self.workers {
            assert!(!worker.runs(), "{worker:?} was left");
        }
        run
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.owner.kill();
        let _ = self.owner.wait();
    }
}

#[test]
fn each_worker_maps_the_memory_of_its_owner() {
    let job = Job::start(2);
    let owner = Process(job.owner.id()).shared_memory(MEMORY);
    assert_eq!(owner.len(), 1, "{owner:?}");
    for worker in &job.workers {
        assert_eq!(worker.shared_memory(MEMORY), owner);
    }
}

#[test]
fn each_worker_maps_the_memory_of_its_device_and_of_no_other() {
    let job = Job::start_on("latency=1ms,devices=2", 3);
    let owner = Process(job.owner.id()).shared_memory(MEMORY);
    assert_eq!(owner.len(), 2, "{owner:?}");
    let mut of_each: BTreeMap<_, usize> = owner.iter().map(|block| (block.clone(), 0)).collect();
    for worker in &job.workers {
        let memory = worker.shared_memory(MEMORY);
        let opened: Vec<_> = memory.intersection(&owner).collect();
        assert!(memory.len() == 1 && opened.len() == 1, "{memory:?} {owner:?}");
        *of_each.get_mut(opened[0]).unwrap() += 1;
    }
    let mut workers: Vec<_> = of_each.into_values().collect();
    workers.sort_unstable();
    assert_eq!(workers, [1, 2]);
}

#[test]
fn a_worker_that_kills_itself_is_named_with_its_signal_and_the_images() {
    // The only worker takes batches in their order, one at a time.
    let run = highwater(&["--workers", "1", "--threads", "1", "--die-at", "70", "--json"]).ended(3);
    run.assert_told(&["worker ", "ended early (signal: 9 (SIGKILL)); unfinished: 476 of 540 images (64-539)"]);
    run.assert_told(&["with this worker: 96 (64-159)"]);
    assert_eq!(run.object()["error"]["kind"], "worker");
    // Before the first answer, and before the weights are opened.
    for at in ["0", "ticket"] {
        let run = highwater(&["--die-at", at]).ended(3);
        run.assert_told(&["signal: 9 (SIGKILL)", "unfinished: "]);
    }
    let run = highwater(&["--repeat", "3", "--die-at", "1619"]).ended(3);
    run.assert_told(&["of 1620 images", "-1619)"]);
}

#[test]
fn a_worker_killed_from_outside_ends_the_job_and_the_other_workers() {
    for signal in [Signal::KILL, Signal::TERM] {
        let job = Job::start(3);
        let victim = job.workers[1];
        victim.send(signal);
        let run = job.finish(&ENDLESS).ended(3);
        let named = format!("worker {} ended early (signal: {}", victim.0, signal.as_raw());
        run.assert_told(&[&named, "unfinished: ", "of 540000000 images"]);
    }
}

#[test]
fn a_worker_that_is_stopped_is_told_and_waited_for() {
    let arguments = ["--backend", "mock", "--workers", "2", "--repeat", "20", "--json"];
    let mut job = Job::spawn_on("latency=5ms", &arguments);
    job.wait_for_workers(2);
    let victim = job.workers[0];
    // Read while the job runs.
    let stderr = job.owner.stderr.take().unwrap();
    let (sender, lines) = std::sync::mpsc::channel();
    let reader = thread::spawn(move || {
        use std::io::BufRead;
        let mut all = String::new();
        for line in std::io::BufReader::new(stderr).lines().map_while(Result::ok) {
            all.push_str(&line);
            all.push('\n');
            let _ = sender.send(line);
        }
        all
    });
    // It is at work by then: an exporter waits less long than this for a peer that opens its memory.
    while !lines.recv_timeout(PATIENCE).expect("a line on progress").contains(" images") {}
    victim.send(Signal::STOP);
    let named = format!("warning: worker {} has said nothing for", victim.0);
    let told = loop {
        let line = lines.recv_timeout(PATIENCE).expect("a warning");
        if line.starts_with(&named) {
            break line;
        }
    };
    assert!(told.contains("T (stopped)") && told.contains(&format!("`kill -CONT {}`", victim.0)), "{told}");
    victim.send(Signal::CONT);
    let status = job.owner.wait().unwrap();
    let stderr = reader.join().unwrap();
    assert_eq!(status.code(), Some(0), "{stderr}");
}

#[test]
fn a_worker_killed_while_it_starts_is_named_too() {
    let mut job = Job::spawn(&["--backend", "mock", "--workers", "1", "--repeat", "1000000", "--json"]);
    job.wait_for_workers(1);
    let victim = job.workers[0];
    victim.send(Signal::KILL);
    let run = job.finish(&["--json"]).ended(3);
    run.assert_told(&[&format!("worker {} ended early (signal: 9 (SIGKILL))", victim.0)]);
}

#[test]
fn workers_end_with_their_owner() {
    let mut job = Job::start(3);
    job.owner.kill().unwrap();
    job.owner.wait().unwrap();
    wait_until("the workers end", Duration::from_secs(5), || job.workers.iter().all(|worker| !worker.runs()));
}

#[test]
fn workers_end_with_an_owner_that_is_killed_while_they_start() {
    for _ in 0..5 {
        let mut job = Job::spawn(&[&ENDLESS[..], &["--workers", "8"]].concat());
        let owner = Process(job.owner.id());
        wait_until("the first worker is there", PATIENCE, || {
            job.workers = owner.children();
            !job.workers.is_empty()
        });
        // Stopped, so that no worker is started unseen.
        owner.send(Signal::STOP);
        wait_until("the owner is stopped", PATIENCE, || owner.file("stat").contains(") T "));
        job.workers = owner.children();
        job.owner.kill().unwrap();
        job.owner.wait().unwrap();
        wait_until("the workers end", Duration::from_secs(5), || job.workers.iter().all(|worker| !worker.runs()));
    }
}

#[test]
fn the_error_of_a_worker_is_told_with_its_reason_and_hint() {
    let run = highwater_on("memory=1MiB", &["--backend", "mock", "--json"]);
    run.assert_error(&["worker ", "out of memory", "--threads", "HIGHWATER_MOCK=memory="]);
    assert_eq!(run.object()["error"]["kind"], "out of memory");
    let one = ["--workers", "1", "--json"];
    highwater_on("fail=run_plan:20:device-lost", &one).assert_error(&["worker ", "run_plan: device lost"]);
    highwater_on("fail=open_memory:1:device-lost", &["--json"]).assert_error(&["worker ", "open_memory: device lost"]);
    highwater_on("fail=export_memory:1", &["--json"]).assert_error(&["worker ", "open_shared: "]);
}

#[test]
fn processes_that_are_started_by_hand_say_what_they_are_for() {
    let own = std::process::id().to_string();
    for arguments in [
        &["worker", "--parent", &own][..],
        &["soak-worker", "--parent", &own],
        &["soak-owner", "--parent", &own],
        &["conformance-worker", "--parent", &own],
        &["bench-first-handle", "--parent", &own],
    ] {
        highwater(arguments).assert_error(&["the standard input is not a socket", "is for"]);
    }
}

// ---------------------------------------------------------------- the soak

#[test]
fn thirty_kills_lose_nothing_and_delay_nobody() {
    let object = highwater(&["soak", "ipc", "--kills", "30", "--seed", "7", "--json"]).ended(0).object();
    let integer = |key: &str| object[key].as_u64().unwrap_or_else(|| panic!("{key} in {object}"));
    assert_eq!((integer("kills"), integer("seed"), integer("processes")), (30, 7, 8));
    let nothing = ["leaked_bytes", "leaked_objects", "leaks", "early_frees", "late_calls", "unexpected"];
    assert!(nothing.iter().all(|key| integer(key) == 0), "{object}");
    let nothing = ["processes_left", "descriptors_left", "files_left"];
    assert!(nothing.iter().all(|key| integer(key) == 0), "{object}");
    // Processes read the words that others write, and learn of deaths.
    let something = ["stops", "expired", "words_changed", "deaths_seen", "reclaims"];
    assert!(something.iter().all(|key| integer(key) > 0), "{object}");
    for operation in ["share", "adopt", "share_all", "share_pinned", "open", "use", "check", "release", "drop", "trim"]
    {
        assert!(object["operations"][operation].as_u64().unwrap() > 0, "{operation} in {object}");
    }
    assert!(object["seconds"].as_f64().unwrap() > 0.0);
    let table = highwater(&["soak", "ipc", "--kills", "3", "--processes", "3"]).ended(0);
    table.assert_printed(&["kills", "stops", "kill to reclaim", "early frees", "leaked", "left"]);
    assert!(table.stderr.contains("seed ") && table.stderr.contains("3 of 3 kills"), "{}", table.stderr);
}

#[test]
fn memory_of_killed_owners_is_free_again() {
    let object = highwater(&["soak", "ipc", "--owner-kills", "24", "--seed", "7", "--json"]).ended(0).object();
    let integer = |key: &str| object[key].as_u64().unwrap_or_else(|| panic!("{key} in {object}"));
    assert_eq!((integer("kills"), integer("seed"), &object["bar_met"]), (24, 7, &serde_json::Value::Null));
    let nothing = ["leaked_bytes", "leaked_objects", "descriptors_left", "unexpected"];
    assert!(nothing.iter().all(|key| integer(key) == 0), "{object}");
    let something =
        ["measured", "killed_in_opens", "killed_with_work", "buffers", "bytes", "refused_opens", "kept_buffers"];
    assert!(something.iter().all(|key| integer(key) > 0), "{object}");
    for times in ["death_ms", "release_ms", "total_ms"] {
        let [p50, p99, max] = ["p50", "p99", "max"].map(|key| object[times][key].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99 && p99 <= max, "{object}");
    }
    let table = highwater(&["soak", "ipc", "--owner-kills", "2"]).ended(0);
    table.assert_printed(&["kill to death", "death to free", "kill to free", "left"]);
}

#[test]
fn tickets_of_killed_owners_open_at_one_heir() {
    let object = highwater(&["soak", "ipc", "--heir-kills", "12", "--seed", "7", "--json"]).ended(0).object();
    let integer = |key: &str| object[key].as_u64().unwrap_or_else(|| panic!("{key} in {object}"));
    assert_eq!((integer("kills"), integer("measured"), integer("seed")), (12, 12, 7));
    let nothing = ["early_frees", "double_owners", "leaked_bytes", "leaked_objects", "descriptors_left", "unexpected"];
    assert!(nothing.iter().all(|key| integer(key) == 0), "{object}");
    assert!(["heir_kills", "buffers", "bytes"].iter().all(|key| integer(key) > 0), "{object}");
    let [p50, p99, max] = ["p50", "p99", "max"].map(|key| object["open_ms"][key].as_f64().unwrap());
    assert!(0.0 < p50 && p50 <= p99 && p99 <= max, "{object}");
    let table = highwater(&["soak", "ipc", "--heir-kills", "1", "--backend", "mock"]).ended(0);
    table.assert_printed(&["kill to open", "faults", "left"]);
}

#[test]
fn a_soak_that_cannot_be_done_says_why() {
    highwater(&["soak", "ipc", "--owner-kills", "2", "--backend", "nonesuch"]).assert_error(&["nonesuch"]);
    highwater(&["soak", "ipc", "--kills", "2", "--backend", "nonesuch"]).assert_error(&["nonesuch"]);
    highwater_on("memory=lots", &["soak", "ipc", "--kills", "3", "--json"]).assert_error(&["`memory`", "`lots`"]);
    highwater_on("shareable-memory=off", &["soak", "ipc", "--kills", "3"]).assert_error(&["shareable_memory"]);
}

/// Starts a soak that does not end by itself, and waits until it has a directory in `folder`.
fn start_soak(folder: &Path) -> Child {
    // A signal that this process ignores would be ignored there too.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_highwater")]);
    command.args(["soak", "ipc", "--kills", "1000000", "--processes", "2"]).env("TMPDIR", folder);
    command.env_remove("HIGHWATER_MOCK").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let name = format!("hw-soak-{}-", child.id());
    let deadline = Instant::now() + PATIENCE;
    while !names_in(folder).iter().any(|found| found.starts_with(&name)) || Process(child.id()).children().is_empty() {
        assert!(Instant::now() < deadline, "the soak does not start its processes");
        thread::sleep(Duration::from_millis(2));
    }
    child
}

fn names_in(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_soak_without_descriptors_for_its_processes_does_not_start_and_is_no_bad_result() {
    let arguments = ["soak", "ipc", "--kills", "5", "--json"];
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 40 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_highwater")]).args(arguments);
    command.env_remove("HIGHWATER_MOCK").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = run_to_its_end(command.spawn().unwrap(), &arguments, "with few descriptors");
    assert_eq!(run.code, Some(2), "{}", run.stderr);
    let told = "a process may have 40 descriptors, and a soak of 8 processes needs 128";
    assert!(run.stderr.contains(told) && run.stderr.contains("ulimit -n 128"), "{}", run.stderr);
}

#[test]
fn a_soak_that_a_signal_ends_leaves_no_directory() {
    let folder = scratch_folder("signalled");
    for signal in [Signal::INT, Signal::TERM] {
        let child = start_soak(&folder);
        Process(child.id()).send(signal);
        run_to_its_end(child, &["soak", "ipc"], "with a signal").assert_error(&["a signal ended the soak"]);
        assert_eq!(names_in(&folder), Vec::<String>::new(), "{signal:?}");
    }
    // Nothing removes it after SIGKILL but the next soak, which leaves that of a living one alone.
    let mut killed = start_soak(&folder);
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(names_in(&folder)[0].starts_with(&format!("hw-soak-{}-", killed.id())), "{:?}", names_in(&folder));
    let (first, second) = (start_soak(&folder), start_soak(&folder));
    let names = names_in(&folder);
    for child in [first, second] {
        let own = format!("hw-soak-{}-", child.id());
        assert!(names.len() == 2 && names.iter().any(|name| name.starts_with(&own)), "{names:?}");
        Process(child.id()).send(Signal::TERM);
        run_to_its_end(child, &["soak", "ipc"], "beside another").assert_error(&["a signal ended the soak"]);
    }
    fs::remove_dir(&folder).unwrap();
}

// ---------------------------------------------------------------- bad input

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    for arguments in [
        ["--threads", "0"],
        ["--threads", "100000"],
        ["--repeat", "0"],
        ["--workers", "65"],
        ["--workers", "-1"],
        ["--workers", "two"],
    ] {
        let run = highwater(&arguments);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
        assert!(run.stderr.starts_with("error: ") && run.stderr.contains("expected a number of"), "{}", run.stderr);
    }
    for (arguments, part) in [
        (&["soak", "ipc", "--kills", "0"][..], "expected a number of kills"),
        (&["soak"], "ipc"),
        (&["soak", "ipc", "--owner-kills", "0"], "expected a number of kills"),
        (&["soak", "ipc", "--owner-kills", "2", "--kills", "2"], "has no effect with"),
        (&["soak", "ipc", "--heir-kills", "2", "--processes", "2"], "has no effect with"),
        (&["soak", "ipc", "--processes", "1"], "expected a number of processes from 2 to 32"),
        (&["--die-at", "noon"], "or `ticket`"),
        (&["--scale", "--workers", "3"], "`--workers` has no effect with `--scale`"),
    ] {
        let run = highwater(arguments);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
        assert!(run.stderr.contains(part), "{}", run.stderr);
    }
    highwater(&["--die-at", "540"]).assert_error(&["there are 540 images", "count from 0"]);
}

#[test]
fn an_unknown_backend_is_answered_with_the_known_ones() {
    highwater(&["--backend", "metal"]).assert_error(&["`metal`", "cuda, rocm, mock"]);
    highwater(&["conformance", "--backend", "metal", "--json"]).assert_error(&["`metal`", "cuda, rocm, mock"]);
    highwater(&["--backend", "MOCK"]).assert_error(&["\nhint: did you mean `mock`?"]);
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
            fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("digits").join(name), folder.join(name)).unwrap();
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
    data.run().assert_error(&["weights.safetensors`", "is not a safetensors file", "program/digits/train.py"]);
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
    let run = data.run().ended(1);
    assert!(run.object()["accuracy"].as_f64().unwrap() < 0.96);
    assert!(run.stderr.contains("error: the accuracy is"), "{}", run.stderr);
}

#[test]
fn a_device_without_enough_memory_says_so() {
    for memory in ["1MiB", "4KiB", "4MiB"] {
        let arguments = ["--backend", "mock", "--workers", "0", "--threads", "4", "--json"];
        let run = highwater_on(&format!("memory={memory}"), &arguments);
        run.assert_error(&["out of memory", "--threads", "HIGHWATER_MOCK=memory="]);
        assert_eq!(run.object()["error"]["kind"], "out of memory");
    }
    assert_eq!(highwater_on("memory=4MiB", &["--workers", "0", "--threads", "3"]).code, Some(0));
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
        let arguments = ["--backend", "mock", "--workers", "0", "--threads", "4", "--json"];
        let run = highwater_on(&format!("fail={fault}"), &arguments);
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
    // A free that fails once is made again.
    let run = highwater_on("fail=free:1", &["--backend", "mock", "--workers", "0", "--json"]);
    assert_eq!((run.code, run.object()["leaks"].as_u64()), (Some(0), Some(0)), "{}", run.stderr);
    let run = highwater_on("fail=free:1..", &["--backend", "mock", "--workers", "0", "--json"]).ended(1);
    let leaks = run.object()["leaks"].as_u64().unwrap();
    assert!(leaks > 0);
    assert!(run.stderr.contains("error: not everything could be given back: free: "), "{}", run.stderr);
    assert!(run.stderr.contains(&format!("error: objects still alive at the end: {leaks}")), "{}", run.stderr);
    // Those of the owner and of two workers count.
    let run = highwater_on("fail=free:1..", &["--backend", "mock", "--json"]).ended(1);
    assert!(run.object()["leaks"].as_u64().unwrap() >= 3, "{}", run.stderr);
    assert!(run.stderr.contains("error: not everything could be given back: worker "), "{}", run.stderr);
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
        (
            "colour=red",
            "`colour` (with the value `red`) is not an option of the mock",
            "expected one of devices, memory",
        ),
        ("fail=alocate:1", "no operation is named `alocate`", "did you mean `allocate`? the operations are"),
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
        let auto = highwater_without_gpu(mock, &["--json"]);
        // The fault that is fixed most easily comes first.
        let first = format!("no backend could be taken (mock: failed: {reason}");
        auto.assert_error(&[&first, "cuda: ", "rocm: ", &hint]);
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
    for arguments in [&["doctor"][..], &["doctor", "--json"], &["--help"], &["--version"], &["soak", "ipc", "--help"]] {
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

/// Runs a line of `sh`, in which `"$0"` is the program.
fn shell(line: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new("sh");
    command.args(["-c", line]).arg(env!("CARGO_BIN_EXE_highwater")).args(arguments);
    let output = command.env("HIGHWATER_MOCK", "").env("HIGHWATER_BACKEND", "mock").output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_closed_standard_output_is_an_error_before_any_work() {
    for arguments in [&["doctor"][..], &["doctor", "--json"], &["--help"], &["--workers", "0"], &["soak", "ipc"]] {
        let (code, stderr) = shell("exec \"$0\" \"$@\" >&-", arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("error: the result cannot be written: "), "{arguments:?}: {stderr}");
        assert!(stderr.contains("\nhint: ") && stderr.lines().count() == 2, "{arguments:?}: {stderr}");
        // Discarded on purpose, however the file is opened.
        for discard in [">/dev/null", "1<>/dev/null"] {
            let (code, stderr) = shell(&format!("exec \"$0\" --help {discard}"), &[]);
            assert_eq!((code, stderr.as_str()), (Some(0), ""), "{discard}");
        }
    }
}

#[test]
fn a_reader_that_closes_its_pipe_early_is_no_error() {
    for arguments in [&["doctor"][..], &["doctor", "--json"], &["--help"]] {
        // The reader is gone before the program starts.
        let line = "{ sleep 0.3; \"$0\" \"$@\"; echo \"code $?\" >&2; } | true";
        let (_, stderr) = shell(line, arguments);
        assert_eq!(stderr, "code 0\n", "{arguments:?}");
    }
}

/// The program, started by a shell that limits files to a number of blocks of 512 or 1024 bytes.
fn command_with_small_files(blocks: u32, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -f {blocks} && exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_highwater")).args(arguments);
    command
}

#[test]
fn files_that_are_limited_end_no_process() {
    let arguments = ["doctor", "--json"];
    let mut command = command_with_small_files(64, &arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = run_to_its_end(command.spawn().unwrap(), &arguments, "with small files");
    assert!(matches!(run.code, Some(0 | 1)), "{:?} {}", run.code, run.stderr);
    let object = run.object();
    let mock = object["backends"].as_array().unwrap().iter().find(|backend| backend["name"] == "mock").unwrap();
    let reason = mock["reason"].as_str().unwrap();
    assert!(reason.contains("File too large"), "{mock}");
    assert!(mock["hint"].as_str().unwrap().contains("`ulimit -f`"), "{mock}");
    // The result is a file, too.
    let folder = scratch_folder("small");
    let file = fs::File::create(folder.join("result")).unwrap();
    let output = command_with_small_files(1, &arguments).stdout(file).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{} {stderr}", output.status);
    assert!(stderr.contains("error: the result cannot be written: File too large"), "{stderr}");
    fs::remove_dir_all(folder).unwrap();
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
    let object = highwater(&["doctor", "--json"]).ended(0).object();
    assert!(object["usable"].as_array().unwrap().contains(&"mock".into()), "{object}");
    let backends = object["backends"].as_array().unwrap();
    // Plugins of this machine may stand between them.
    let built_in: Vec<_> = backends.iter().filter(|backend| backend["origin"] == "built in").collect();
    let names: Vec<_> = built_in.iter().map(|backend| backend["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cuda", "rocm", "mock"]);
    for backend in built_in {
        assert!(!backend["reason"].as_str().unwrap().is_empty(), "{backend}");
        let usable = backend["usable"].as_bool().unwrap();
        assert_eq!(usable, !backend["devices"].as_array().unwrap().is_empty(), "{backend}");
        if backend["outcome"] == "library missing" {
            let tried = backend["tried"].as_array().unwrap();
            assert!(!tried.is_empty() && tried.iter().all(|t| t["name"].is_string() && t["reason"].is_string()));
        }
    }
    let table = highwater(&["doctor"]).ended(0);
    assert!(names.iter().all(|name| table.stdout.contains(name)), "{}", table.stdout);
}

#[test]
fn doctor_reports_the_rendezvous_and_whether_it_works() {
    let sharing = |value: Option<&str>| {
        let mut command = command_on("", &["doctor", "--json"]);
        command.env_remove("HIGHWATER_SHARING").envs(value.map(|value| ("HIGHWATER_SHARING", value)));
        let object: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        object["sharing"].clone()
    };
    let default = sharing(None);
    assert_eq!((&default["rendezvous"], &default["openers"]), (&"abstract".into(), &"user".into()), "{default}");
    assert_eq!((&default["works"], &default["set"]), (&true.into(), &false.into()), "{default}");
    let folder = scratch_folder("rendezvous");
    let there = sharing(Some(&format!("rendezvous=directory:{},openers=group:7", folder.display())));
    assert_eq!((&there["rendezvous"], &there["openers"]), (&"directory".into(), &"group:7".into()), "{there}");
    assert_eq!(there["place"], folder.display().to_string(), "{there}");
    assert_eq!((&there["works"], &there["set"]), (&true.into(), &true.into()), "{there}");
    fs::remove_dir(&folder).expect("doctor leaves nothing in the directory");
    let gone = sharing(Some(&format!("rendezvous=directory:{}", folder.display())));
    assert_eq!(gone["works"], false, "{gone}");
    assert!(gone["reason"].as_str().unwrap().contains("cannot be opened"), "{gone}");
    let wrong = sharing(Some("rendezvous=telepathy"));
    assert_eq!(wrong["works"], false, "{wrong}");
    assert!(wrong["hint"].as_str().unwrap().contains("`abstract`, `directory:PATH`"), "{wrong}");

    let text = highwater(&["doctor"]).ended(0).stdout;
    assert!(text.contains("sharing: rendezvous=abstract, openers=user (default): works"), "{text}");
}

// ---------------------------------------------------------------- containers

/// Returns whether this user may make namespaces. Says so if not; with `HIGHWATER_NAMESPACES=required` it is a failure.
fn has_namespaces() -> bool {
    let tried = Command::new("unshare").args(["-Urnpifm", "true"]).output();
    let why = match tried {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var_os("HIGHWATER_NAMESPACES").is_some_and(|value| value == "required");
    assert!(!required, "`unshare -Urnpifm true`: {why}");
    eprintln!("skipped: this system refuses user namespaces (`unshare -Urnpifm true`: {why})");
    false
}

#[test]
fn workers_in_containers_of_their_own_open_the_weights_through_a_directory() {
    if !has_namespaces() {
        return;
    }
    let folder = scratch_folder("containers");
    let arguments = ["--isolate-workers", "--json"];
    let run = |sharing: &str, arguments: &[&str]| {
        let mut command = command_on("", arguments);
        run_whole(
            {
                command.env("HIGHWATER_SHARING", sharing);
                command
            },
            "",
            arguments,
        )
    };
    for openers in ["user", "secret"] {
        let object =
            run(&format!("rendezvous=directory:{},openers={openers}", folder.display()), &arguments).ended(0).object();
        assert_eq!((&object["processes"], &object["leaks"]), (&3.into(), &0.into()), "{object}");
        assert!(object["weights_shared_bytes"].as_u64().unwrap() > 0, "{object}");
        assert_eq!(object["predictions_equal_cpu"], true, "{object}");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "a file was left in the directory");
    }
    // A worker that dies is named as every other. Failed before: the error named `unshare` and its exit code.
    let died = run(&format!("rendezvous=directory:{}", folder.display()), &["--isolate-workers", "--die-at", "7"]);
    assert_eq!(died.code, Some(3), "{}", died.stderr);
    died.assert_told(&["worker ", "ended early (signal: 9 (SIGKILL)); unfinished: "]);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "a file was left in the directory");
    // The abstract name is in the network namespace of the owner.
    let run = run("rendezvous=abstract", &["--isolate-workers"]);
    run.assert_error(&[
        "the rendezvous `abstract` cannot serve this command",
        "HIGHWATER_SHARING=rendezvous=directory:PATH",
    ]);
    fs::remove_dir(&folder).unwrap();
}

/// Failed before: `doctor` took descriptors of its own for the inherited one, and the jobs waited 10 s for their workers.
#[test]
fn a_descriptor_that_no_process_inherits_is_refused_at_once() {
    let run = |number: i32, arguments: &[&str]| {
        let mut command = command_on("", arguments);
        command.env("HIGHWATER_SHARING", format!("rendezvous=descriptor:{number}"));
        run_whole(command, "", arguments)
    };
    for number in 3..9 {
        let object = run(number, &["doctor", "--json"]).object();
        assert_eq!(object["sharing"]["works"], false, "{number}: {}", object["sharing"]);
        assert!(!object["sharing"]["hint"].as_str().unwrap().is_empty(), "{}", object["sharing"]);
    }
    // An end of a pair, as the standard input.
    let jobs: [&[&str]; 5] = [
        &["--backend", "mock"],
        &["--backend", "mock", "--scale"],
        &["soak", "ipc", "--kills", "1"],
        &["soak", "ipc", "--owner-kills", "1"],
        &["bench", "share", "--backend", "mock"],
    ];
    for arguments in jobs {
        let (_ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let mut command = command_on("", arguments);
        command.env("HIGHWATER_SHARING", "rendezvous=descriptor:0").stdin(theirs);
        let run = run_whole(command, "", arguments);
        run.assert_error(&["the rendezvous `descriptor:0` cannot serve this command", "rendezvous=directory:PATH"]);
    }
}

#[test]
fn a_directory_that_holds_no_sockets_is_refused_with_a_hint() {
    for directory in ["/proc", "/sys", "/dev/fd"] {
        let mut command = command_on("", &["doctor", "--json"]);
        command.env("HIGHWATER_SHARING", format!("rendezvous=directory:{directory}"));
        let sharing = run_whole(command, "", &["doctor", "--json"]).object()["sharing"].clone();
        assert_eq!(sharing["works"], false, "{sharing}");
        assert!(sharing["hint"].as_str().unwrap().contains("sockets"), "{sharing}");
    }
}

#[test]
fn doctor_wraps_every_line_to_the_terminal() {
    for (width, path) in [(60, "/nowhere/1:/nowhere/2:/nowhere/3"), (100, "/tmp:relative/folder:/nowhere")] {
        let mut command = command_on("", &["doctor"]);
        command.env("COLUMNS", width.to_string()).env("HIGHWATER_PLUGIN_PATH", path);
        let table = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let last = table.rfind("plugins looked for in: ").unwrap_or_else(|| panic!("{table}"));
        assert!(table[last..].lines().count() > 1, "{table}");
        for line in table.lines() {
            // A word that is longer than the line stands alone.
            let is_one_word = line.split_whitespace().count() == 1;
            assert!(line.chars().count() <= width || is_one_word, "{width}: {line}\n{table}");
        }
    }
}

#[test]
fn doctor_counts_a_broken_mock_as_unusable() {
    let run = highwater_on("devices=none", &["doctor", "--json"]);
    let object = run.object();
    let is_mock = |backend: &&Value| backend["name"] == "mock" && backend["origin"] == "built in";
    let mock = object["backends"].as_array().unwrap().iter().find(is_mock).unwrap();
    assert_eq!((&mock["usable"], &mock["outcome"]), (&false.into(), &"failed".into()), "{mock}");
    assert!(mock["reason"].as_str().unwrap().contains("`devices` is `none`"), "{mock}");
    let nothing_usable = object["usable"].as_array().unwrap().is_empty();
    assert_eq!(run.code, Some(i32::from(nothing_usable)), "{}", run.stderr);
}
