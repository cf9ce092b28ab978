//! Tries a plugin in a process of its own first.
//!
//! A library's constructors run when it is opened. One that hangs holds the loader's lock, and blocks every other opening of a
//! library in the process. One that crashes ends the process. So a child opens a plugin that is new to this process, reports the
//! result in one JSON object, and ends. Only a plugin that opened there is opened here.
//!
//! The child writes the beginning of the object, [`BEGINNING`], before it touches the plugin. So the reader can tell a plugin that
//! ends the process from a program that cannot probe.
//!
//! *Ends.* The parent waits for the child's pidfd, never for its output, which a grandchild may keep open. The child leads a
//! process group, which the parent kills as a whole when the child has ended or its time is over. The parent also kills
//! processes that left the group, by a tag in their environment.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use highwater_hal::display_foreign;
use highwater_plugin::{LoadOptions, Refusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};

use super::super::OpenOptions;
use super::super::choice::Failure;
use super::super::environment::{Environment, PROBING};
use super::super::report::Outcome;
use super::permission::{Trust, text_of};
use super::plugin::{failure, outcome_of, reason_of};

/// The text that a prober writes before it touches the plugin.
const BEGINNING: &str = "{\"probe\":1,";
/// The bytes of a child's output that are kept.
const MOST_OUTPUT: usize = 64 * 1024;
/// The time limit within a probe: in effect none, because the parent has a limit and kills the probe.
const NO_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// The time that a killed child may take to end.
const END: Duration = Duration::from_secs(10);
/// The most searches for processes that a child has left. A killed process may have started another, so one search is
/// not enough.
const MOST_ROUNDS: usize = 100;

/// The way that plugins are probed before they are loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Probing {
    /// They were requested, and are loaded at once.
    Off,
    By {
        prober: PathBuf,
    },
    /// They should be probed, and cannot for this reason.
    Impossible(String),
}

impl Probing {
    /// With `every`, plugins are opened without a request.
    pub(in super::super) fn new(options: &OpenOptions, environment: &Environment, every: bool) -> Self {
        if environment.get(PROBING).is_some() {
            return Self::Impossible("this process is a probe itself".into());
        }
        let by = |prober| Self::By { prober };
        if let Some(prober) = &options.prober {
            return by(prober.clone());
        }
        if !every {
            return Self::Off;
        }
        Self::beside(environment, options).map_or_else(Self::Impossible, by)
    }

    /// Returns the program `highwater` beside the executable.
    fn beside(environment: &Environment, options: &OpenOptions) -> Result<PathBuf, String> {
        let missing = || "there is no program `highwater` beside the executable".to_owned();
        let executable = environment.executable.as_deref().ok_or_else(missing)?;
        let prober = environment.executable_folder().ok_or_else(missing)?.join("highwater");
        let prober = prober.canonicalize().map_err(|_| missing())?;
        // This program itself may have that name without being able to probe. It would start itself forever.
        if same_file(&prober, executable) || !prober.is_file() {
            return Err(missing());
        }
        let trust = Trust::new(options.allow_insecure, environment);
        match trust.check(&prober) {
            Err(complaint) if !trust.insecure => Err(format!("the program that would do it is not safe: {complaint}")),
            _ => Ok(prober),
        }
    }
}

fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|metadata| (metadata.dev(), metadata.ino())).ok();
    id(one).is_some_and(|one| id(other) == Some(one))
}

/// The result of a probe.
#[derive(Debug, Clone)]
pub(in super::super) enum Probed {
    /// The plugin opens.
    Opens,
    /// The plugin does not open, or it ended the process.
    Refused(Failure),
    /// The probe says nothing about the plugin, for this reason.
    Impossible(String),
}

/// Probes a file with a program; once for each file, as long as it does not change.
pub(super) fn probe(prober: &Path, file: &Path, limit: Duration) -> Probed {
    type Key = (u64, u64, i64, i64);
    static PROBED: OnceLock<Mutex<HashMap<Key, Probed>>> = OnceLock::new();
    let known = || PROBED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = file.metadata().map(|it| (it.dev(), it.ino(), it.mtime(), it.mtime_nsec())).ok();
    if let Some(probed) = key.and_then(|key| known().get(&key).cloned()) {
        return probed;
    }
    let probed = start(prober, file).map_or_else(
        |error| Probed::Impossible(format!("`{}` cannot be started: {}", display_foreign(prober), text_of(&error))),
        |running| match running.watch(limit) {
            Ok(seen) => seen.judge(prober, limit),
            Err(error) => Probed::Impossible(format!("its process cannot be watched: {}", text_of(&error))),
        },
    );
    if let (Some(key), false) = (key, matches!(probed, Probed::Impossible(_))) {
        known().insert(key, probed.clone());
    }
    probed
}

/// A child that probes. The drop kills it and waits for it.
struct Running {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    reaped: bool,
    /// The tag in the environment of the child and its descendants.
    mark: String,
}

fn start(prober: &Path, file: &Path) -> io::Result<Running> {
    let mut arguments: Vec<OsString> = ["probe", "--open", "--parent"].map(OsString::from).into();
    arguments.extend([std::process::id().to_string().into(), file.into()]);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let mut command = Command::new(prober);
    command.arg0("highwater").args(arguments).env(PROBING, &mark).process_group(0);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = Pid::from_child(&child);
    // The number names this child until it has been waited for.
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Running { child, pid, pidfd, reaped: false, mark }),
        Err(error) => {
            let _ = child.kill().and_then(|()| child.wait());
            Err(error.into())
        }
    }
}

/// How a child ended.
#[derive(Debug, Clone, Copy)]
enum End {
    Itself(ExitStatus),
    /// It ended by itself, with an unknown status: the process ignores the ends of its children, or waits for them elsewhere.
    Unknown,
    /// It was killed.
    Killed,
}

/// The observations of a child.
struct Seen {
    end: End,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Running {
    fn watch(mut self, limit: Duration) -> io::Result<Seen> {
        let mut seen = Seen { end: End::Killed, stdout: Vec::new(), stderr: Vec::new() };
        let mut stdout = self.child.stdout.take();
        let mut stderr = self.child.stderr.take();
        for pipe in [stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)].into_iter().flatten() {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        let deadline = Instant::now().checked_add(limit);
        let has_ended = loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let mut watched = vec![self.pidfd.as_fd()];
            watched.extend(stdout.as_ref().map(AsFd::as_fd));
            watched.extend(stderr.as_ref().map(AsFd::as_fd));
            let ready = wait(&watched, left)?;
            let has_ended = ready[0];
            let is_late = left.is_some_and(|left| left.is_zero());
            // All its output is in the pipes by now.
            drain(&mut stdout, &mut seen.stdout)?;
            drain(&mut stderr, &mut seen.stderr)?;
            if has_ended || is_late {
                break has_ended;
            }
        };
        let end = self.stop();
        if has_ended {
            seen.end = end.map_or(End::Unknown, End::Itself);
        }
        Ok(seen)
    }

    /// Kills the rest of the group, and returns how the child ended.
    fn stop(&mut self) -> Option<ExitStatus> {
        if !self.reaped {
            // Ends the plugin's children, too. The number still names this group, because its leader has not been waited for.
            let _ = kill_process_group(self.pid, Signal::KILL);
            kill_marked(&self.mark);
            // Not forever: a process inside the kernel does not end, and is left to the system.
            self.reaped = matches!(wait(&[self.pidfd.as_fd()], Some(END)).as_deref(), Ok([true]));
        }
        if self.reaped { self.child.wait().ok() } else { None }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Kills every process with this tag, even if it left the child's group or lost its parent.
///
/// Misses processes with another environment, and those that this user may not inspect.
fn kill_marked(mark: &str) {
    let mark = format!("{PROBING}={mark}");
    let is_marked = |pid: Pid| {
        let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_pid())).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes())
    };
    // A killed process may have started another meanwhile.
    for _ in 0..MOST_ROUNDS {
        let mut found = false;
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        for pid in entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)) {
            // Opened before the check, so that its id cannot pass to another process.
            let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            found |= is_marked(pid) && pidfd_send_signal(&pidfd, Signal::KILL).is_ok();
        }
        if !found {
            return;
        }
    }
}

/// Waits until a descriptor is readable or closed, and returns which are.
fn wait(descriptors: &[BorrowedFd<'_>], left: Option<Duration>) -> io::Result<Vec<bool>> {
    let timeout = left.map(|left| Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 }));
    let mut polled: Vec<PollFd<'_>> =
        descriptors.iter().map(|&descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN)).collect();
    match poll(&mut polled, timeout.as_ref()) {
        // The caller checks the time and waits again.
        Err(Errno::INTR) => return Ok(vec![false; descriptors.len()]),
        polled => polled?,
    };
    Ok(polled.iter().map(|descriptor| !descriptor.revents().is_empty()).collect())
}

/// Reads the available output. Drops the pipe at its end, and output above the limit.
fn drain(pipe: &mut Option<impl Read>, into: &mut Vec<u8>) -> io::Result<()> {
    let mut buffer = [0; 4096];
    while let Some(reader) = pipe {
        match reader.read(&mut buffer) {
            Ok(0) => *pipe = None,
            Ok(bytes) => {
                let room = MOST_OUTPUT.saturating_sub(into.len());
                into.extend_from_slice(&buffer[..bytes.min(room)]);
                if bytes > room {
                    // An endless writer must not keep the caller from checking the time.
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Seen {
    fn judge(&self, prober: &Path, limit: Duration) -> Probed {
        let stdout = String::from_utf8_lossy(&self.stdout);
        let said = self.last_words();
        let Some(answer) = stdout.strip_prefix(BEGINNING) else {
            let end = match self.end {
                End::Itself(status) => status.to_string(),
                End::Unknown => "it ended".to_owned(),
                End::Killed => format!("nothing within {limit:?}"),
            };
            return Probed::Impossible(format!("`{}` does not probe ({end}){said}", display_foreign(prober)));
        };
        let answer: Option<Value> = serde_json::from_str(&format!("{{{answer}")).ok();
        let refuse = |outcome, reason: String| Probed::Refused(failure(outcome, reason, ""));
        let while_ =
            if answer.is_some() { "when its process ended, after it had answered" } else { "while it was opened" };
        let crashed = |how: &dyn std::fmt::Display| {
            refuse(Outcome::CrashedInProbe, format!("its process ended with {how}, {while_}{said}"))
        };
        match (self.end, answer) {
            (End::Killed, _) => {
                refuse(Outcome::HungInProbe, format!("it did not come to an end within {limit:?}, {while_}{said}"))
            }
            (End::Itself(status), Some(_)) if !status.success() => crashed(&status),
            (_, Some(answer)) => read_answer(&answer).unwrap_or_else(|| {
                Probed::Impossible(format!("`{}` answers in the format of another version", display_foreign(prober)))
            }),
            (End::Itself(status), None) => crashed(&status),
            (End::Unknown, None) => crashed(&"no answer"),
        }
    }

    /// Returns the end of the child's standard error, to append to a message.
    fn last_words(&self) -> String {
        let text = String::from_utf8_lossy(&self.stderr);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let last = lines[lines.len().saturating_sub(3)..].join(" | ");
        if last.is_empty() { last } else { format!("; it said: {}", display_foreign(&last)) }
    }
}

fn read_answer(answer: &Value) -> Option<Probed> {
    let refusal = answer.get("refusal")?;
    if refusal.is_null() {
        return answer.get("opened")?.as_bool()?.then_some(Probed::Opens);
    }
    let text = |key: &str| refusal.get(key)?.as_str();
    Some(Probed::Refused(failure(Outcome::of_words(text("outcome")?)?, text("message")?, text("hint")?)))
}

/// Loads the plugin `file` into this process and writes one JSON object about it to `out`. With `open`, opens its backend, too.
///
/// The program then has to end in the ordinary way, because the way it ends is part of the answer. This function has no time
/// limit; the process that waits for the answer has one.
///
/// The command `highwater probe [--open] FILE` calls it. Another program can be its own prober
/// ([`OpenOptions::with_prober`](crate::OpenOptions::with_prober)). Its arguments are `probe`, `--open`, `--parent`, the number of the
/// process that started it, and the path of the file. It must write nothing else to its standard output.
///
/// The object has `probe` (1), `file`, `opened` (true or false), and `refusal`: null, or `outcome`, `stage`, `slot`, `kind`, `message` and
/// `hint`. If the plugin was loaded, it also has `name`, `description`, `vendor`, `version`, `table_version` and `warnings`; if it was
/// opened, `real_device` and the count `devices`.
///
/// # Errors
/// The error of writing to `out`. A refused plugin is not an error.
pub fn serve_probe(file: &Path, open: bool, mut out: impl Write) -> io::Result<()> {
    out.write_all(BEGINNING.as_bytes())?;
    out.flush()?;
    let mut answer = json!({ "file": file.display().to_string(), "opened": false, "refusal": null });
    let refuse = |answer: &mut Value, refusal: &Refusal| {
        answer["refusal"] = json!({
            "outcome": outcome_of(refusal).as_str(),
            "stage": refusal.stage.as_str(),
            "slot": refusal.slot,
            "kind": refusal.error.kind().as_str(),
            "message": reason_of(refusal),
            "hint": refusal.error.hint(),
        });
    };
    // Kept until the answer is written, because the release may crash, too.
    let mut kept = None;
    match highwater_plugin::load(file, &LoadOptions::new().with_limit(NO_LIMIT)) {
        Err(refusal) => refuse(&mut answer, &refusal),
        Ok(plugin) => {
            answer["name"] = plugin.name().into();
            answer["description"] = plugin.description().into();
            answer["vendor"] = plugin.vendor().into();
            answer["version"] = plugin.version().into();
            answer["table_version"] = plugin.table_version().into();
            answer["warnings"] = plugin.warnings().into();
            match open.then(|| plugin.open()) {
                Some(Err(refusal)) => refuse(&mut answer, &refusal),
                Some(Ok(backend)) => {
                    answer["opened"] = true.into();
                    answer["real_device"] = backend.identity().real_device.into();
                    answer["devices"] = backend.device_count().into();
                    kept = Some(backend);
                }
                None => {}
            }
        }
    }
    let object = answer.to_string();
    // Without the bracket, which is part of the beginning.
    writeln!(out, "{}", object.strip_prefix('{').unwrap_or(&object))?;
    out.flush()?;
    drop(kept);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::permission::tests::chmod;
    use super::super::testing::Folder;
    use super::*;

    /// A prober that is this shell script; `$5` is the file.
    fn script(folder: &Folder, text: &str) -> PathBuf {
        let text = folder.file("text", format!("#!/bin/sh\n{text}\n"));
        let path = folder.path().join("prober");
        // Another process writes it: a descriptor for writing in this one could be inherited by what another test starts, and
        // what is open for writing is not executed.
        assert!(Command::new("cp").args([&text, &path]).status().unwrap().success());
        chmod(&path, 0o755);
        path
    }

    fn probed(text: &str, limit: Duration) -> Probed {
        let folder = Folder::new();
        let file = folder.file("plugin.so", "");
        probe(&script(&folder, text), &file, limit)
    }

    #[track_caller]
    fn refused(probed: Probed) -> (Outcome, String, String) {
        let Probed::Refused(failure) = probed else { panic!("{probed:?}") };
        (failure.outcome, failure.error.message().to_owned(), failure.error.hint().to_owned())
    }

    #[track_caller]
    fn impossible(probed: Probed) -> String {
        let Probed::Impossible(why) = probed else { panic!("{probed:?}") };
        why
    }

    /// Long enough for a shell to start on a busy machine.
    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_plugin_that_opens_there_may_be_opened_here() {
        let text = r#"[ "$1 $2 $3" = "probe --open --parent" ] && [ -n "$HIGHWATER_PROBING" ] && [ -f "$5" ] || exit 9
            printf '{"probe":1,"opened":true,"refusal":null}\n'"#;
        assert!(matches!(probed(text, LONG), Probed::Opens));
    }

    #[test]
    fn a_refusal_is_passed_on_with_its_words() {
        let text = r#"printf '{"probe":1,"opened":false,"refusal":{"outcome":"version out of range","message":"9 to 9","hint":"update"}}'"#;
        assert_eq!(refused(probed(text, LONG)), (Outcome::VersionOutOfRange, "9 to 9".into(), "update".into()));
    }

    #[test]
    fn a_crash_is_told_from_a_program_that_does_not_probe() {
        let text = "printf '{\"probe\":1,'; echo 'it is broken' >&2; kill -SEGV $$";
        let (outcome, message, hint) = refused(probed(text, LONG));
        assert_eq!(outcome, Outcome::CrashedInProbe);
        assert!(message.contains("signal: 11") && message.contains("while it was opened"), "{message}");
        assert!(message.contains("it said: it is broken") && !hint.is_empty(), "{message}");
        // An orderly exit in the middle is a crash, too.
        let (outcome, message, _) = refused(probed("printf '{\"probe\":1,'; exit 0", LONG));
        assert_eq!(outcome, Outcome::CrashedInProbe, "{message}");
        let (outcome, message, _) =
            refused(probed("printf '{\"probe\":1,\"opened\":true,\"refusal\":null}'; kill -ABRT $$", LONG));
        assert_eq!(outcome, Outcome::CrashedInProbe);
        assert!(message.contains("when its process ended"), "{message}");
        for other in ["echo 'unrecognized subcommand' >&2; exit 2", "exit 0", "echo '{\"probe\":2}'", "kill -SEGV $$"] {
            let why = impossible(probed(other, LONG));
            assert!(why.contains("does not probe"), "{why}");
        }
        let why = impossible(probed("printf '{\"probe\":1,\"answer\":42}'", LONG));
        assert!(why.contains("another version"), "{why}");
    }

    #[test]
    fn a_hang_ends_with_the_limit_and_so_does_what_the_plugin_started() {
        let folder = Folder::new();
        let file = folder.file("plugin.so", "");
        let started = Instant::now();
        // A child of the child, which keeps the pipes open.
        let text = format!("printf '{{\"probe\":1,'; sleep 600 & echo $! >{}/pid; wait", folder.path().display());
        let (outcome, message, _) = refused(probe(&script(&folder, &text), &file, Duration::from_secs(1)));
        assert_eq!(outcome, Outcome::HungInProbe);
        assert!(message.contains("within 1s"), "{message}");
        assert!(started.elapsed() < Duration::from_secs(20));
        assert_gone(&folder.path().join("pid"));
    }

    /// The process whose number is in this file ends.
    #[track_caller]
    fn assert_gone(file: &Path) {
        let started = Instant::now();
        let pid = fs::read_to_string(file).unwrap();
        let gone =
            || fs::read_to_string(format!("/proc/{}/stat", pid.trim())).map_or(true, |stat| stat.contains(") Z"));
        while !gone() && started.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(gone(), "the sleeper {pid} is still there");
    }

    #[test]
    fn what_the_plugin_started_in_a_session_of_its_own_ends_too() {
        let folder = Folder::new();
        let file = folder.file("plugin.so", "");
        let pid = folder.path().join("pid");
        // Its parents have ended twice, as with a daemon.
        let text = format!(
            "setsid sh -c '(echo $$ >{0}.new; mv {0}.new {0}; exec sleep 600) &' </dev/null >/dev/null 2>&1 &
             while [ ! -e {0} ]; do sleep 0.01; done
             printf '{{\"probe\":1,\"opened\":true,\"refusal\":null}}'",
            pid.display()
        )
        .replace("echo $$", "sh -c \"echo \\$PPID\"");
        assert!(matches!(probe(&script(&folder, &text), &file, LONG), Probed::Opens));
        assert_gone(&pid);
    }

    #[test]
    fn an_answer_counts_when_the_child_has_ended_although_a_grandchild_keeps_the_pipe() {
        let started = Instant::now();
        let text = "sleep 600 & printf '{\"probe\":1,\"opened\":true,\"refusal\":null}'";
        assert!(matches!(probed(text, LONG), Probed::Opens));
        assert!(started.elapsed() < LONG);
    }

    #[test]
    fn output_without_end_is_cut_off() {
        let (outcome, message, _) = refused(probed("printf '{\"probe\":1,'; yes >&2", Duration::from_millis(1500)));
        assert_eq!(outcome, Outcome::HungInProbe);
        assert!(message.len() < 1000, "{message}");
    }

    #[test]
    fn a_file_is_probed_once_until_it_changes() {
        let folder = Folder::new();
        let file = folder.file("plugin.so", "");
        let count = folder.path().join("count");
        let text = format!("echo x >>{}; printf '{{\"probe\":1,\"opened\":true,\"refusal\":null}}'", count.display());
        let prober = script(&folder, &text);
        let probes = || std::fs::read_to_string(&count).unwrap().lines().count();
        for _ in 0..3 {
            assert!(matches!(probe(&prober, &file, LONG), Probed::Opens));
        }
        assert_eq!(probes(), 1);
        let later = std::time::SystemTime::now() + Duration::from_secs(5);
        std::fs::File::options().write(true).open(&file).unwrap().set_modified(later).unwrap();
        probe(&prober, &file, LONG);
        assert_eq!(probes(), 2);
    }

    #[test]
    fn a_prober_that_cannot_be_started_says_nothing_of_the_plugin() {
        let folder = Folder::new();
        let file = folder.file("plugin.so", "");
        let why = impossible(probe(&folder.path().join("none"), &file, LONG));
        assert!(why.contains("cannot be started: No such file"), "{why}");
    }

    #[test]
    fn who_is_asked_to_probe() {
        let folder = Folder::new();
        let executable = folder.file("tool", "");
        let mut environment = Environment::of_process();
        environment.executable = Some(executable);
        let options = OpenOptions::new();
        let new = |options: &OpenOptions, environment: &Environment, every| Probing::new(options, environment, every);
        assert_eq!(new(&options, &environment, false), Probing::Off);
        let Probing::Impossible(why) = new(&options, &environment, true) else { panic!() };
        assert!(why.contains("no program `highwater` beside"), "{why}");
        // If other users could change the program, it would be their code.
        let prober = folder.file("highwater", "");
        assert_eq!(new(&options, &environment, true), Probing::By { prober: prober.clone() });
        chmod(&prober, 0o777);
        let Probing::Impossible(why) = new(&options, &environment, true) else { panic!() };
        assert!(why.contains("not safe") && why.contains("every user"), "{why}");
        let insecure = OpenOptions::new().allow_insecure_plugins();
        assert!(matches!(new(&insecure, &environment, true), Probing::By { .. }));
        chmod(&prober, 0o755);
        // A program named `highwater` does not start itself.
        environment.executable = Some(prober);
        assert!(matches!(new(&options, &environment, true), Probing::Impossible(_)));
        let given = OpenOptions::new().with_prober("/p");
        assert_eq!(new(&given, &environment, false), Probing::By { prober: "/p".into() });
        assert!(matches!(new(&given, &environment.with(PROBING, "1"), true), Probing::Impossible(_)));
    }

    #[test]
    fn what_is_served_can_be_read() {
        let folder = Folder::new();
        let file = folder.file("plugin.so", "no library");
        let mut out = Vec::new();
        serve_probe(&file, true, &mut out).unwrap();
        let whole: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!((&whole["probe"], &whole["opened"]), (&1.into(), &false.into()), "{whole}");
        assert_eq!(whole["file"], file.display().to_string());
        let end = std::os::unix::process::ExitStatusExt::from_raw(0);
        let mut seen = Seen { end: End::Itself(end), stdout: out, stderr: Vec::new() };
        let (outcome, message, hint) = refused(seen.judge(Path::new("/p"), LONG));
        assert_eq!(outcome, Outcome::WrongPlatform);
        assert!(!message.is_empty() && !hint.is_empty());
        // The same if the end of the child is unknown. Without a whole answer, it counts as a crash.
        seen.end = End::Unknown;
        assert_eq!(refused(seen.judge(Path::new("/p"), LONG)).0, Outcome::WrongPlatform);
        seen.stdout.truncate(BEGINNING.len());
        assert_eq!(refused(seen.judge(Path::new("/p"), LONG)).0, Outcome::CrashedInProbe);
    }
}
