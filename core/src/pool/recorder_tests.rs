//! The trace that a program writes of its requests.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::recorder::Recorder;
use crate::testing::ManualBackend;
use crate::{ErrorKind, HostMemoryOptions, Runtime, RuntimeOptions};

fn open(file: PathBuf) -> crate::Result<Runtime> {
    let host_memory = HostMemoryOptions::new().with_record(Box::leak(file.into_boxed_path()));
    Runtime::with_options(ManualBackend::new(), &RuntimeOptions::new().with_host_memory(host_memory))
}

/// The values of a line after its time: thread, operation, block and bytes.
fn values(line: &str) -> Vec<&str> {
    let object = line.strip_prefix("{\"t\": ").and_then(|line| line.strip_suffix('}')).unwrap();
    let mut parts = object.split(", ");
    parts.next().unwrap().parse::<u64>().unwrap();
    let keys = ["thread", "op", "id", "bytes"];
    parts.zip(keys).map(|(part, key)| part.strip_prefix(&format!("\"{key}\": ")).unwrap()).collect()
}

#[test]
fn a_trace_has_every_request_use_and_end_in_order() {
    let file = std::env::temp_dir().join(format!("highwater-record-{}", std::process::id()));
    let runtime = open(file.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let first = runtime.pinned::<u8>(1000).unwrap();
    stream.copy_to_device(&first, &device.allocate(1000).unwrap()).unwrap();
    thread::scope(|scope| scope.spawn(|| drop(first)).join().unwrap());
    let again = [(); 2].map(|()| runtime.pinned::<u32>(5).unwrap());
    // The runtimes of a process share a file.
    let other = open(file.clone()).unwrap();
    drop(other.pinned::<u8>(7).unwrap());
    drop((again, stream, device));
    for runtime in [other, runtime] {
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    let lines: Vec<_> = text.lines().map(values).collect();
    let own = lines[0][0];
    let ends = lines[2][0];
    assert_ne!(own, ends, "the other thread has its own number");
    let expected = [
        &[own, "\"alloc\"", "0", "1000"][..],
        &[own, "\"use\"", "0"],
        &[ends, "\"free\"", "0"],
        &[own, "\"alloc\"", "1", "20"],
        &[own, "\"alloc\"", "2", "20"],
        &[own, "\"alloc\"", "3", "7"],
        &[own, "\"free\"", "3"],
        &[own, "\"free\"", "1"],
        &[own, "\"free\"", "2"],
    ];
    assert_eq!(lines, expected);
}

#[test]
fn a_file_that_cannot_be_created_is_an_error_of_the_runtime() {
    let error = open(Path::new("/nowhere/trace").into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("/nowhere/trace"), "{error}");
}

#[test]
fn a_file_is_known_by_every_path_and_a_removed_file_is_created_anew() {
    let folder = std::env::temp_dir();
    let name = format!("highwater-record-paths-{}", std::process::id());
    let file = folder.join(&name);
    let runtimes =
        [file.clone(), folder.join(".").join("..").join(folder.file_name().unwrap()).join(&name)].map(|path| {
            let runtime = open(path).unwrap();
            drop(runtime.pinned::<u8>(7).unwrap());
            runtime
        });
    drop(runtimes);
    assert_eq!(fs::read_to_string(&file).unwrap().lines().map(values).count(), 4);
    fs::remove_file(&file).unwrap();
    drop(open(file.clone()).unwrap().pinned::<u8>(7).unwrap());
    assert_eq!(fs::read_to_string(&file).unwrap().lines().map(values).count(), 2);
    fs::remove_file(&file).unwrap();
}

/// To open a named pipe waits for a reader.
#[test]
fn a_named_pipe_is_refused_at_once() {
    let file = std::env::temp_dir().join(format!("highwater-record-pipe-{}", std::process::id()));
    let path = CString::new(file.as_os_str().as_bytes()).unwrap();
    // SAFETY: The path is a C string.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    let (answer, answers) = mpsc::channel();
    thread::spawn({
        let file = file.clone();
        move || answer.send(open(file).map(drop))
    });
    let error = answers.recv_timeout(Duration::from_secs(10)).expect("it waits for a reader").unwrap_err();
    // A pipe that has a reader is refused too.
    let reader = fs::File::options().read(true).write(true).open(&file).unwrap();
    let again = open(file.clone()).unwrap_err();
    drop(reader);
    fs::remove_file(&file).unwrap();
    for error in [error, again] {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let names = [file.to_str().unwrap(), "a regular file is expected"].map(|part| error.message().contains(part));
        assert_eq!(names, [true; 2], "{error}");
    }
}

#[test]
fn a_device_is_written_and_a_folder_is_refused() {
    let runtime = open(Path::new("/dev/null").into()).unwrap();
    drop(runtime.pinned::<u8>(7).unwrap());
    assert_eq!(runtime.close().unwrap().total(), 0);
    let error = open(std::env::temp_dir()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("a regular file is expected"), "{error}");
}

/// As after a disk was full for a while.
#[test]
fn after_a_write_error_later_runtimes_record_again() {
    let file = std::env::temp_dir().join(format!("highwater-record-full-{}", std::process::id()));
    let runtime = open(file.clone()).unwrap();
    let recorder = Recorder::open(&file).unwrap();
    recorder.refuse_writes();
    drop(runtime.pinned::<u8>(7).unwrap());
    recorder.flush();
    let later = open(file.clone()).unwrap();
    // The one whose trace has ended writes nothing into the new one.
    drop(runtime.pinned::<u8>(8).unwrap());
    drop(later.pinned::<u8>(9).unwrap());
    for runtime in [runtime, later] {
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    let operations: Vec<_> = text.lines().map(|line| values(line)[1..].join(" ")).collect();
    assert_eq!(operations, ["\"alloc\" 0 9", "\"free\" 0"]);
}

/// A write that fails at the end of a runtime, on a device that is always full.
#[test]
fn a_full_device_ends_one_trace_and_the_next_runtime_tries_again() {
    let full = Path::new("/dev/full");
    let runtime = open(full.into()).unwrap();
    let recorder = Recorder::open(full).unwrap();
    drop(runtime.pinned::<u8>(7).unwrap());
    assert!(Arc::ptr_eq(&recorder, &Recorder::open(full).unwrap()), "shared until a write fails");
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert!(!Arc::ptr_eq(&recorder, &Recorder::open(full).unwrap()), "the broken one is still known");
}
