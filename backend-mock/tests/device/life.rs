//! The end of handles, of the backend and of the process, and the calls that a forked child may make.

use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Instant;

use highwater_hal::{Backend, BlasKind, BlasOptions, DataType, ErrorKind, FillPattern, Gemm, GemmShape, HostOptions};
use highwater_mock::MockGpu;

use crate::rig::{Rig, millis, small};

/// How many threads of this process work for the backend with this tag.
pub(crate) fn workers(tag: u32) -> usize {
    let name = format!("hw-mock-{tag}\n");
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|comm| *comm == name)
        .count()
}

#[test]
fn workers_start_late_and_end_with_the_backend() {
    let rig = Rig::new(small().with_latency(millis(500)));
    let tag = rig.gpu.identity().tag.get();
    assert_eq!(workers(tag), 0);
    let (block, event) = (rig.allocate(0, 64), rig.event(0));
    let streams = [(); 4].map(|()| rig.stream(0));
    for &stream in &streams {
        for _ in 0..10 {
            rig.fill(block, FillPattern::U8(1), 64, stream).unwrap();
        }
        rig.gpu.record_event(event, stream).unwrap();
        rig.gpu.stream_wait_event(rig.stream, event).unwrap();
    }
    rig.gpu.destroy_stream(streams[0]).unwrap();
    // A thread names itself once it runs, and stands in the list for a moment after it was joined.
    let become_workers = |count: usize, start: Instant| {
        while workers(tag) != count && start.elapsed() < millis(2000) {
            std::thread::yield_now();
        }
        assert_eq!(workers(tag), count);
    };
    become_workers(5, Instant::now());
    let start = Instant::now();
    drop(rig);
    become_workers(0, start);
    assert!(start.elapsed() < millis(2000), "the end took {:?}, latency and all", start.elapsed());
}

#[test]
fn a_handle_and_the_host_allocator_outlive_the_backend_value() {
    let rig = Rig::new(small());
    let values = rig.upload(&[2f32; 16]);
    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    let Rig { gpu, host, .. } = rig;
    drop(gpu);
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 2, 2, 2), values, values, values.offset(16));
    // SAFETY: the block lives as long as the devices, which the handle keeps.
    unsafe { handle.gemm(&gemm).unwrap() };
    drop(handle);
    let pinned = host.allocate(64, &HostOptions::new()).unwrap();
    // SAFETY: no other code uses the block.
    unsafe { host.free(pinned).unwrap() };
}

/// Runs `child` in a forked child and returns its result.
fn in_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `child`, which uses nothing that other threads may have locked, and ends with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = child();
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(pid, &mut status, 0) };
    assert!(libc::WIFEXITED(status), "the child was killed, status {status}");
    libc::WEXITSTATUS(status)
}

#[test]
fn a_forked_child_is_refused_and_drops_without_harm() {
    let rig = Rig::new(small().with_latency(millis(5)));
    let block = rig.allocate(0, 64);
    for _ in 0..10 {
        rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
    }
    let mut handle = rig.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    let stream = rig.stream;
    let gpu = Arc::clone(&rig.gpu);
    let calls = gpu.total_calls();
    let mut in_parent = Some((rig, handle.as_mut()));
    let code = in_child(|| {
        let (rig, handle) = in_parent.take().unwrap();
        let forked = |error: Option<highwater_hal::Error>| error.is_some_and(|e| e.kind() == ErrorKind::Forked);
        // SAFETY: refused before anything happens.
        let free = unsafe { rig.host.free(highwater_hal::HostPtr::new(std::ptr::NonNull::dangling())) };
        let refused = forked(rig.gpu.synchronize_stream(stream).err())
            && forked(rig.gpu.memory_info(0).err())
            && forked(handle.set_stream(stream).err())
            && forked(handle.destroy().err())
            && forked(rig.host.allocate(64, &HostOptions::new()).err())
            && forked(free.err())
            && rig.gpu.live_objects().total() == 0;
        drop(rig);
        i32::from(!refused)
    });
    assert_eq!(code, 0);
    let (rig, _) = in_parent.take().unwrap();
    rig.gpu.synchronize_stream(stream).unwrap();
    assert_eq!(gpu.total_calls(), calls + 1);
    drop((rig, gpu));
    // The last owner of the devices, dropped in a child.
    let mut handle = Some(handle);
    assert_eq!(in_child(|| i32::from(handle.take().is_none())), 0);
    assert!(handle.is_some());
}

static AT_EXIT: OnceLock<Arc<MockGpu>> = OnceLock::new();

/// Registered before the backend was opened, so it runs after the backend's own handler.
extern "C" fn tell_whether_exit_was_noticed() {
    let noticed = AT_EXIT.get().is_some_and(|gpu| gpu.is_exiting());
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(if noticed { 42 } else { 1 }) };
}

#[test]
fn the_beginning_of_the_exit_is_noticed() {
    const CHILD: &str = "HIGHWATER_MOCK_TEST_EXIT";
    if std::env::var_os(CHILD).is_some() {
        // SAFETY: the handler takes nothing and stays where it is.
        unsafe { libc::atexit(tell_whether_exit_was_noticed) };
        let rig = Rig::new(small());
        assert!(!rig.gpu.is_exiting());
        AT_EXIT.set(rig.gpu).unwrap();
        std::process::exit(0);
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "life::the_beginning_of_the_exit_is_noticed"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(42));
}
