//! The background thread that releases idle page-locked memory: what it releases, and when it ends.

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use highwater_core::{Backend, ErrorKind, HostMemoryOptions, Runtime, RuntimeOptions};
use highwater_mock::{MockGpu, MockOptions, Operation};

const MIB: usize = 1 << 20;
const IDLE: Duration = Duration::from_millis(40);
/// Much more than the thread needs.
const LONG: Duration = Duration::from_secs(20);
const SCENARIO: &str = "HIGHWATER_TEST_BACKGROUND_SCENARIO";

/// The tests count the threads of the process, so one runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_with(host_memory: HostMemoryOptions) -> (Arc<MockGpu>, Runtime) {
    let gpu = MockGpu::open(MockOptions::new().with_checks()).unwrap();
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_host_memory(host_memory)).unwrap();
    (gpu, runtime)
}

fn open() -> (Arc<MockGpu>, Runtime) {
    open_with(HostMemoryOptions::new().with_idle_time(IDLE).with_background(true))
}

fn registered(gpu: &MockGpu) -> u64 {
    gpu.live_objects().host_allocations
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The number of background threads of this process.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path().join("comm"));
    tasks.filter(|comm| std::fs::read_to_string(comm).is_ok_and(|name| name.trim() == "highwater-idle")).count()
}

/// A new thread has its name, and an ended one is gone from the list, a moment later.
fn wait_for_threads(count: usize) {
    wait_until("another number of threads", || threads() == count);
}

#[test]
fn memory_that_is_idle_is_released_without_a_call() {
    let _alone = alone();
    let (gpu, runtime) = open();
    wait_for_threads(1);
    // In the thread's cache, and free.
    drop([MIB, 40 * MIB].map(|bytes| runtime.pinned::<u8>(bytes).unwrap()));
    assert!(registered(&gpu) > 0);
    wait_until("it stays", || registered(&gpu) == 0);
    // The pool goes on.
    let pinned = runtime.pinned::<u8>(MIB).unwrap();
    thread::sleep(4 * IDLE);
    assert_eq!(registered(&gpu), 1, "a live buffer stays");
    drop(pinned);
    wait_until("it stays", || registered(&gpu) == 0);
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert_eq!(gpu.violations(), []);
}

#[test]
fn memory_that_streams_used_is_released_once_they_are_done() {
    let _alone = alone();
    let (gpu, runtime) = open();
    let device = runtime.device(0).unwrap();
    let (stream, buffer) = (device.create_stream().unwrap(), device.allocate::<u8>(MIB).unwrap());
    let pinned = runtime.pinned::<u8>(MIB).unwrap();
    gpu.set_latency(2 * IDLE);
    stream.copy_to_device(&pinned, &buffer).unwrap();
    gpu.set_latency(Duration::ZERO);
    drop(pinned);
    wait_until("it stays", || registered(&gpu) == 0);
    assert_eq!(gpu.violations(), [], "released after the copy");
    drop((buffer, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn there_is_no_thread_unless_a_program_asks_for_it() {
    let _alone = alone();
    let off = HostMemoryOptions::new().with_idle_time(IDLE);
    for host_memory in [off, off.with_background(false)] {
        let (gpu, runtime) = open_with(host_memory);
        drop(runtime.pinned::<u8>(MIB).unwrap());
        wait_for_threads(0);
        thread::sleep(4 * IDLE);
        assert_eq!(registered(&gpu), 1, "no call, no release");
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let options = RuntimeOptions::new().with_host_memory(HostMemoryOptions::new().with_background(true));
    let error = Runtime::with_options(gpu, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("idle time") && error.hint().contains("idle-seconds"), "{error}");
    wait_for_threads(0);
}

#[test]
fn the_thread_ends_with_the_last_user_although_buffers_are_alive() {
    let _alone = alone();
    let (gpu, runtime) = open();
    let (other, mut pinned) = (runtime.clone(), runtime.pinned::<u8>(MIB).unwrap());
    drop(runtime);
    wait_for_threads(1);
    drop(other);
    wait_for_threads(0);
    pinned.write().unwrap().fill(1);
    drop(pinned);
    assert_eq!(gpu.live_objects().total(), 0, "the last buffer has ended the runtime");
    // At once, whatever the idle time.
    let start = Instant::now();
    let long = HostMemoryOptions::new().with_idle_time(Duration::MAX).with_background(true);
    assert_eq!(open_with(long).1.close().unwrap().total(), 0);
    assert!(start.elapsed() < LONG);
}

#[test]
fn the_end_of_a_runtime_waits_for_a_release_in_progress() {
    let _alone = alone();
    for round in 0..40_u64 {
        let (gpu, runtime) =
            open_with(HostMemoryOptions::new().with_idle_time(Duration::from_millis(1)).with_background(true));
        for bytes in [MIB, 70 * MIB, 3 * MIB] {
            drop(runtime.pinned::<u8>(bytes).unwrap());
        }
        thread::sleep(Duration::from_micros(500 * round));
        if round % 2 == 0 {
            assert_eq!(runtime.close().unwrap().total(), 0);
        } else {
            drop(runtime);
            assert_eq!(gpu.live_objects().total(), 0);
        }
        assert_eq!(gpu.violations(), []);
        wait_for_threads(0);
    }
}

#[test]
fn a_release_that_the_backend_refuses_is_tried_again() {
    let _alone = alone();
    let (gpu, runtime) = open();
    gpu.fail_call(Operation::HostUnregister, 1, ErrorKind::Vendor).unwrap();
    drop(runtime.pinned::<u8>(MIB).unwrap());
    wait_until("it stays", || registered(&gpu) == 0);
    assert_eq!((gpu.calls(Operation::HostUnregister), runtime.statistics().failed_releases), (2, 1));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn threads_that_allocate_meanwhile_lose_nothing() {
    let _alone = alone();
    let (gpu, runtime) =
        open_with(HostMemoryOptions::new().with_idle_time(Duration::from_millis(1)).with_background(true));
    thread::scope(|scope| {
        for own in 0..3_u8 {
            let runtime = &runtime;
            scope.spawn(move || {
                for round in 0..60_usize {
                    let mut pinned = runtime.pinned::<u8>((round * 7919 % 900 + 1) * 4096).unwrap();
                    pinned.write().unwrap().fill(own);
                    thread::sleep(Duration::from_micros(50));
                    assert!(pinned.read().unwrap().iter().all(|byte| *byte == own));
                }
            });
        }
    });
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert_eq!(gpu.violations(), []);
}

// ------------------------------------------------------------------------------------------------ fork and exit

#[test]
fn a_child_has_no_thread_and_can_drop_the_runtime() {
    let _alone = alone();
    let (gpu, runtime) = open();
    let pinned = runtime.pinned::<u8>(MIB).unwrap();
    for _ in 0..20 {
        // SAFETY: The child drops objects of the parent, which take no lock there, reads a directory, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: The child never returns to the frames that own these, so nothing is dropped twice.
            unsafe {
                drop(std::ptr::read(&raw const pinned));
                drop(std::ptr::read(&raw const runtime));
            }
            let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
            // SAFETY: Ends the child without running anything else.
            unsafe { libc::_exit(i32::from(threads != 1)) };
        }
        let mut status = -1;
        // SAFETY: Waits for the child made above.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
    wait_for_threads(1);
    drop(pinned);
    wait_until("it stays", || registered(&gpu) == 0);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

static RUNTIME: OnceLock<(Arc<MockGpu>, Runtime)> = OnceLock::new();

/// Runs after the backend's own handler, which was registered later. By then, the memory is older than the idle time.
extern "C" fn look_late() {
    if let Some((gpu, _)) = RUNTIME.get() {
        let before = gpu.calls(Operation::HostUnregister);
        thread::sleep(5 * IDLE);
        println!("late: {} releases of {}", gpu.calls(Operation::HostUnregister) - before, registered(gpu));
    }
}

/// Runs in a process of its own: not a test by itself, and does nothing when run as one.
#[test]
fn exit_scenario() {
    if std::env::var_os(SCENARIO).is_none() {
        return;
    }
    // SAFETY: A handler that may run at any time of the exit: it only calls the library.
    assert_eq!(unsafe { libc::atexit(look_late) }, 0);
    let (gpu, runtime) = open();
    drop(runtime.pinned::<u8>(MIB).unwrap());
    assert!(RUNTIME.set((gpu, runtime)).is_ok());
    std::process::exit(0);
}

#[test]
fn the_thread_makes_no_call_during_the_exit() {
    let _alone = alone();
    let start = Instant::now();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "exit_scenario", "--test-threads=1", "--nocapture"])
        .env(SCENARIO, "exit")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("late: 0 releases of 1"), "{text}");
    assert!(start.elapsed() < LONG);
}
