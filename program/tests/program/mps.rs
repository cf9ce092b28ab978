//! The main job with NVIDIA's multi-process service, over simulated libraries and a stand-in for NVIDIA's control program.
//!
//! The stand-in is a shell script first on PATH. Its daemon is this test program once more, which listens on the sockets of
//! the pipe directory.

use std::env;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::started::{Process, Run};

const PATIENCE: Duration = Duration::from_secs(60);

/// The stand-in. `$STAND_IN` says how it behaves, and `$STAND_IN_HOME` is the test's folder.
///
/// - `fails`, `hangs`: `-d` does.
/// - `deaf`: `quit` never returns, and the daemon stays.
/// - `slow`: `-d` takes half a second.
/// - `unusable`: the simulated driver is not there while the service runs.
const SCRIPT: &str = r#"#!/bin/sh
pipe=${CUDA_MPS_PIPE_DIRECTORY:-/nowhere}
id=$pipe/nvidia-cuda-mps-control.pid
case "$1" in
-d)
  echo "start $pipe ${CUDA_VISIBLE_DEVICES:-all}" >>"$STAND_IN_HOME/starts"
  case "$STAND_IN" in
  fails) echo "no MPS on this machine" >&2; exit 1 ;;
  hangs) exec sleep 100 ;;
  slow) sleep 0.5 ;;
  unusable) rm "$STAND_IN_HOME/libcuda.so.1" ;;
  esac
  STAND_IN_DAEMON=1 setsid "$STAND_IN_PROGRAM" --exact mps::the_daemon_of_the_stand_in --nocapture >/dev/null 2>&1 </dev/null &
  while [ ! -s "$id" ]; do sleep 0.01; done
  ;;
'')
  read -r order
  [ -s "$id" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
  case "$order" in
  get_server_list) echo 1 ;;
  quit)
    echo quit >>"$STAND_IN_HOME/quits"
    case "$STAND_IN" in
    deaf) exec sleep 100 ;;
    unusable) ln -s "$(cat "$STAND_IN_HOME/driver")" "$STAND_IN_HOME/libcuda.so.1" ;;
    esac
    kill "$(cat "$id")"
    rm "$id"
    ;;
  esac
  ;;
esac
"#;

/// Not a test: the stand-in starts it, and kills it in the end.
#[test]
fn the_daemon_of_the_stand_in() {
    if env::var_os("STAND_IN_DAEMON").is_none() {
        return;
    }
    let pipe = PathBuf::from(env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap());
    let listener = UnixListener::bind(pipe.join("control")).unwrap();
    let _privileged = UnixListener::bind(pipe.join("control_privileged")).unwrap();
    fs::write(pipe.join("nvidia-cuda-mps-control.pid"), std::process::id().to_string()).unwrap();
    let until = Instant::now() + PATIENCE;
    thread::spawn(move || listener.incoming().for_each(drop));
    // It does not outlive a failed test for long.
    while Instant::now() < until {
        thread::sleep(Duration::from_millis(100));
    }
}

/// The folder with the simulated libraries.
fn libraries() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/simulated.sh");
        let output = Command::new(script).args(["cuda", "printenv", "LD_LIBRARY_PATH"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.trim().split(':').next().unwrap().into()
    })
}

/// A machine: a folder with the stand-in, the driver, and an empty folder for private directories.
struct Machine {
    home: PathBuf,
}

impl Machine {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // A short path, for the sockets.
        let home = Path::new("/tmp").join(format!("hw-mps-{}-{number}", std::process::id()));
        for folder in ["bin", "empty", "run", "service"] {
            fs::create_dir_all(home.join(folder)).unwrap();
        }
        let driver = libraries().join("libcuda.so.1");
        fs::write(home.join("driver"), driver.to_str().unwrap()).unwrap();
        symlink(driver, home.join("libcuda.so.1")).unwrap();
        let control = home.join("bin/nvidia-cuda-mps-control");
        fs::write(&control, SCRIPT).unwrap();
        fs::set_permissions(&control, fs::Permissions::from_mode(0o755)).unwrap();
        Self { home }
    }

    fn in_environment<'c>(&self, command: &'c mut Command, behavior: &str) -> &'c mut Command {
        command.env("PATH", format!("{}:/usr/bin:/bin", self.home.join("bin").display()));
        command.env("STAND_IN", behavior).env("STAND_IN_HOME", &self.home);
        command.env("STAND_IN_PROGRAM", env::current_exe().unwrap())
    }

    fn command(&self, behavior: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
        for variable in ["HIGHWATER_MOCK", "HIGHWATER_SIMULATED_CUDA", "HIGHWATER_BACKEND", "CUDA_VISIBLE_DEVICES"] {
            command.env_remove(variable);
        }
        self.in_environment(&mut command, behavior).args(arguments);
        command.env("LD_LIBRARY_PATH", libraries()).env("HIGHWATER_CUDA_LIBRARY", self.home.join("libcuda.so.1"));
        // No service of this machine.
        command.env("CUDA_MPS_PIPE_DIRECTORY", self.home.join("none")).env("XDG_RUNTIME_DIR", self.home.join("run"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the main job on CUDA to its good end.
    #[track_caller]
    fn run(&self, mut command: Command, code: i32) -> Run {
        let run = Run::of(command.output().unwrap(), &["--json"]).ended(code);
        self.is_clean();
        run
    }

    #[track_caller]
    fn job(&self, behavior: &str, arguments: &[&str]) -> Run {
        self.run(self.command(behavior, &[&["--backend", "cuda", "--json"], arguments].concat()), 0)
    }

    /// The services that were started: lines of `starts`.
    fn starts(&self) -> Vec<String> {
        let text = fs::read_to_string(self.home.join("starts")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Processes of this machine's services.
    fn daemons(&self) -> Vec<Process> {
        // With the slash: the folder of the tenth machine begins like that of the first.
        let of_service = format!("CUDA_MPS_PIPE_DIRECTORY={}/", self.home.display());
        let processes =
            fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_daemon = |process: &Process| {
            process.file("environ").split('\0').any(|variable| variable.starts_with(&of_service))
                && process.file("cmdline").contains("the_daemon_of_the_stand_in")
                && process.runs()
        };
        processes.map(Process).filter(is_daemon).collect()
    }

    fn private_directories(&self) -> Vec<PathBuf> {
        fs::read_dir(self.home.join("run")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// No service and no directory of one is left.
    #[track_caller]
    fn is_clean(&self) {
        assert_eq!((self.daemons(), self.private_directories()), (vec![], vec![]));
    }

    /// The same, within a time.
    #[track_caller]
    fn becomes_clean(&self) {
        wait_until("the service ends", || self.daemons().is_empty() && self.private_directories().is_empty());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.daemons().into_iter().for_each(|daemon| daemon.send(Signal::KILL));
        let _ = fs::remove_dir_all(&self.home);
    }
}

#[track_caller]
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The state of the service in a result, its directory and the reason.
#[track_caller]
fn service(run: &Run) -> (String, String, String) {
    let object = run.object();
    assert_eq!((&object["leaks"], &object["correct"]), (&0.into(), &530.into()), "{object}");
    let text = |key: &str| object["mps"][key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("pipe_directory"), text("reason"))
}

#[test]
fn workers_that_share_a_device_get_a_service_that_ends_with_the_job() {
    let machine = Machine::new();
    let mut command = machine.command("", &["--backend", "cuda", "--json"]);
    command.env("CUDA_VISIBLE_DEVICES", "0");
    let run = machine.run(command, 0);
    let (state, directory, reason) = service(&run);
    assert_eq!((state.as_str(), reason.as_str()), ("own", "2 workers share 1 device"), "{}", run.stderr);
    assert!(directory.starts_with(machine.home.join("run").to_str().unwrap()), "{directory}");
    // The variable would count twice.
    assert_eq!(machine.starts(), [format!("start {directory} all")]);
    assert!(run.stderr.contains("started for this run in "), "{}", run.stderr);
    assert_eq!(run.stderr.matches("backend cuda").count(), 1, "{}", run.stderr);
    assert_eq!(fs::read_to_string(machine.home.join("quits")).unwrap(), "quit\n");

    let arguments = ["--backend", "cuda", "--scale", "--repeat", "1", "--json"];
    assert_eq!(machine.run(machine.command("", &arguments), 0).object()["mps"]["state"], "own");
    let run = machine.run(machine.command("", &["--backend", "cuda", "--workers", "4"]), 0);
    run.assert_printed(&["multi-process service", "NVIDIA's, started for this run in "]);
}

#[test]
fn no_service_is_started_where_none_helps_or_none_is_wanted() {
    let machine = Machine::new();
    for (arguments, expected) in [
        (&["--workers", "1"][..], "no two workers share a device"),
        (&["--workers", "0"], "no two workers share a device"),
        (&["--mps", "off", "--workers", "3"], "`--mps off`"),
        (&["--mps", "use-only"], "`--mps use-only`, and none runs in "),
        (&["--backend", "mock"], "the backend is not CUDA"),
    ] {
        let arguments = [&["--json", "--backend", "cuda"], arguments].concat();
        let arguments = if arguments.contains(&"mock") { vec!["--json", "--backend", "mock"] } else { arguments };
        let run = machine.run(machine.command("", &arguments), 0);
        let (state, directory, reason) = service(&run);
        assert_eq!((state.as_str(), directory.as_str()), ("none", ""), "{arguments:?}");
        assert!(reason.starts_with(expected), "{arguments:?}: {reason}");
        // The loss is stated where there is one.
        assert_eq!(run.stderr.contains("by time slices"), expected.contains("--mps"), "{arguments:?}: {}", run.stderr);
    }
    let mut command = machine.command("", &["--backend", "cuda", "--json"]);
    command.env("HIGHWATER_MOCK", "devices=2");
    assert_eq!(service(&machine.run(command, 0)).2, "no two workers share a device");
    assert!(machine.starts().is_empty());
}

#[test]
fn a_service_that_runs_is_used_and_stays() {
    let machine = Machine::new();
    let directory = machine.home.join("service");
    let mut control = Command::new(machine.home.join("bin/nvidia-cuda-mps-control"));
    machine.in_environment(&mut control, "").arg("-d").env("CUDA_MPS_PIPE_DIRECTORY", &directory);
    assert!(control.status().unwrap().success());
    let daemons = machine.daemons();
    assert_eq!(daemons.len(), 1);
    for (mode, expected) in [("auto", "used"), ("use-only", "used"), ("off", "none")] {
        let mut command = machine.command("", &["--backend", "cuda", "--json", "--mps", mode]);
        let run = Run::of(command.env("CUDA_MPS_PIPE_DIRECTORY", &directory).output().unwrap(), &["--json"]).ended(0);
        let (state, at, _) = service(&run);
        assert_eq!(state, expected, "{mode}: {}", run.stderr);
        assert_eq!(at, if expected == "used" { directory.to_str().unwrap() } else { "" });
        assert_eq!((machine.daemons(), machine.starts().len()), (daemons.clone(), 1), "{mode}");
    }
    let mut doctor = machine.command("", &["doctor", "--json"]);
    let run = Run::of(doctor.env("CUDA_MPS_PIPE_DIRECTORY", &directory).output().unwrap(), &["--json"]).ended(0);
    assert_eq!(run.object()["mps"]["running"], true);
}

#[test]
fn a_service_that_does_not_start_is_a_reason_and_no_failure() {
    let machine = Machine::new();
    for (behavior, expected) in [("fails", "no MPS on this machine"), ("hangs", "did not end within 1s")] {
        let run = machine.job(behavior, &["--load-limit", "1"]);
        let (state, _, reason) = service(&run);
        assert!(state == "none" && reason.contains(expected), "{behavior}: {reason}");
        assert!(run.stderr.contains("by time slices") && run.stderr.contains("0.39 and 0.39"), "{}", run.stderr);
    }
    let mut command = machine.command("", &["--backend", "cuda", "--json"]);
    command.env("PATH", machine.home.join("empty"));
    let (state, _, reason) = service(&machine.run(command, 0));
    assert_eq!((state.as_str(), reason.as_str()), ("none", "`nvidia-cuda-mps-control` is not in PATH"));
}

#[test]
fn a_device_that_cannot_be_used_through_the_service_is_used_without() {
    let machine = Machine::new();
    let run = machine.job("unusable", &[]);
    let (state, _, reason) = service(&run);
    assert_eq!((state.as_str(), reason.as_str()), ("none", "CUDA does not open through a service"), "{}", run.stderr);
    assert!(run.stderr.contains("not through the multi-process service: "), "{}", run.stderr);
    assert_eq!(machine.starts().len(), 1);
}

#[test]
fn a_long_runtime_folder_is_passed_over() {
    let machine = Machine::new();
    let long = machine.home.join("run").join("x".repeat(80));
    fs::create_dir(&long).unwrap();
    let mut command = machine.command("", &["--backend", "cuda", "--json"]);
    let output = command.env("XDG_RUNTIME_DIR", &long).output().unwrap();
    let (state, directory, _) = service(&Run::of(output, &["--json"]).ended(0));
    assert_eq!(state, "own");
    assert!(directory.starts_with("/tmp/highwater-mps-") && !Path::new(&directory).exists(), "{directory}");
    assert_eq!(fs::read_dir(&long).unwrap().count(), 0);
}

#[test]
fn a_daemon_that_does_not_quit_is_killed() {
    let machine = Machine::new();
    let begun = Instant::now();
    assert_eq!(service(&machine.job("deaf", &[])).0, "own");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

#[test]
fn a_worker_that_dies_ends_the_service_too() {
    let machine = Machine::new();
    let run = machine.run(machine.command("", &["--backend", "cuda", "--json", "--die-at", "33"]), 3);
    run.assert_told(&["worker ", "ended early (signal: 9 (SIGKILL))"]);
    assert_eq!(machine.starts().len(), 1);
}

/// An endless job with its own service: the launcher, the owner of the weights, and the workers.
struct Endless {
    launcher: Child,
    owner: Process,
    workers: Vec<Process>,
}

impl Endless {
    fn start(machine: &Machine) -> Self {
        let mut command = machine.command("", &["--backend", "cuda", "--repeat", "1000000"]);
        let launcher = command.env("HIGHWATER_MOCK", "latency=1ms").stderr(Stdio::null()).spawn().unwrap();
        let of = |process: Process| {
            process
                .children()
                .into_iter()
                .filter(|child| child.file("comm").starts_with("hw-") || child.file("comm") == "highwater\n")
        };
        let mut found = (Process(0), Vec::new());
        wait_until("the workers are there", || {
            let owner = of(Process(launcher.id())).find(|child| child.file("cmdline").contains("--launcher"));
            found = owner.map_or((Process(0), Vec::new()), |owner| (owner, of(owner).collect()));
            found.1.len() == 2
        });
        Self { launcher, owner: found.0, workers: found.1 }
    }

    /// All processes have ended, and the service with them.
    #[track_caller]
    fn ends(&mut self, machine: &Machine) {
        wait_until("the launcher ends", || self.launcher.try_wait().unwrap().is_some());
        let status = self.launcher.wait().unwrap();
        assert!(!status.success(), "{status}");
        wait_until("the job ends", || !self.owner.runs() && self.workers.iter().all(|worker| !worker.runs()));
        machine.becomes_clean();
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

#[test]
fn the_owner_and_its_workers_are_clients_of_the_service() {
    let machine = Machine::new();
    let job = Endless::start(&machine);
    let [directory] = &machine.private_directories()[..] else { panic!("one directory") };
    assert_eq!(fs::metadata(directory).unwrap().permissions().mode() & 0o777, 0o700);
    let variable = format!("CUDA_MPS_PIPE_DIRECTORY={}", directory.join("pipe").display());
    for process in job.workers.iter().chain([&job.owner]) {
        assert!(process.file("environ").split('\0').any(|found| found == variable), "{process:?}");
    }
    drop(job);
    machine.becomes_clean();
}

#[test]
fn a_signal_to_the_program_ends_the_service_too() {
    for signal in [Signal::TERM, Signal::KILL] {
        let machine = Machine::new();
        let mut job = Endless::start(&machine);
        Process(job.launcher.id()).send(signal);
        job.ends(&machine);
    }
    // To the owner of the weights.
    for signal in [Signal::TERM, Signal::KILL] {
        use std::os::unix::process::ExitStatusExt as _;
        let machine = Machine::new();
        let mut job = Endless::start(&machine);
        job.owner.send(signal);
        job.ends(&machine);
        assert_eq!(job.launcher.wait().unwrap().signal(), Some(signal.as_raw()));
    }
}

#[test]
fn a_kill_during_the_start_leaves_no_service() {
    let machine = Machine::new();
    let mut launcher = machine.command("slow", &["--backend", "cuda"]).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the start has begun", || !machine.starts().is_empty());
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert_eq!((machine.daemons(), machine.private_directories().len()), (vec![], 1), "it was not during the start");
    machine.becomes_clean();
    // The daemon was started and ended, and none comes later.
    assert_eq!(fs::read_to_string(machine.home.join("quits")).unwrap(), "quit\n");
    machine.is_clean();
}

#[test]
fn doctor_reports_the_service_where_there_is_a_device_or_the_control_program() {
    let machine = Machine::new();
    let object = machine.run(machine.command("", &["doctor", "--json"]), 0).object();
    let control = machine.home.join("bin/nvidia-cuda-mps-control");
    assert_eq!(object["mps"]["running"], false);
    assert_eq!(object["mps"]["control_program"], control.to_str().unwrap());
    assert_eq!(object["mps"]["pipe_directory"], machine.home.join("none").to_str().unwrap());
    let table = machine.run(machine.command("", &["doctor"]), 0);
    table.assert_printed(&["NVIDIA's multi-process service does not run in ", "0.39 and 0.39"]);
    let mut command = machine.command("", &["doctor", "--json"]);
    command.env("PATH", machine.home.join("empty")).env("HIGHWATER_CUDA_LIBRARY", "/nowhere/libcuda.so.1");
    assert_eq!(machine.run(command, 0).object()["mps"], Value::Null);
}
