//! The end of a process: whatever is alive in statics, thread-locals and running threads, it ends quickly and quietly.

use std::cell::RefCell;
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use highwater_core::{GemmShape, PinnedBuffer, Runtime, Stream};
use highwater_mock::{MockGpu, MockOptions};

const SCENARIO: &str = "HIGHWATER_TEST_EXIT_SCENARIO";

/// More than one piece of the mock's.
const LARGE: usize = 9 << 20;

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

thread_local! {
    static KEPT: RefCell<Vec<(Stream, PinnedBuffer<u8>)>> = const { RefCell::new(Vec::new()) };
}

fn multiply(stream: &Stream) {
    let a = stream.upload(&[1.0_f32; 16]).unwrap();
    let c = stream.upload(&[0.0_f32; 16]).unwrap();
    stream.blas().unwrap().gemm(&GemmShape::of::<f32>(4, 4, 4), 1.0, &a, &a, 0.0, &c).unwrap();
}

static LATE: OnceLock<(Stream, PinnedBuffer<u8>)> = OnceLock::new();

/// Runs after the backend's own handler, which was registered later.
extern "C" fn call_late() {
    if let Some((stream, pinned)) = LATE.get() {
        println!("late: {:?}", stream.synchronize().map_err(|error| error.kind()));
        println!("late: {:?}", stream.upload(&[1_u8]).map(|_| ()).map_err(|error| error.kind()));
        println!("late: {:?}", pinned.read().map(|_| ()).map_err(|error| error.kind()));
    }
}

/// Runs in a process of its own: not a test by itself, and does nothing when run as one.
#[test]
fn late_scenario() {
    if std::env::var_os(SCENARIO).is_none_or(|scenario| scenario != "late") {
        return;
    }
    // SAFETY: a handler that may run at any time of the exit: it only calls the library.
    assert_eq!(unsafe { libc::atexit(call_late) }, 0);
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let pinned = runtime.pinned(64).unwrap();
    assert!(LATE.set((stream, pinned)).is_ok());
    std::process::exit(0);
}

#[test]
fn calls_during_the_exit_are_refused() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "late_scenario", "--test-threads=1", "--nocapture"])
        .env(SCENARIO, "late")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text.matches("late: Err(ShuttingDown)").count(), 3, "{text}");
}

/// Runs in a process of its own: not a test by itself, and does nothing when run as one.
#[test]
fn scenario() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let gpu = MockGpu::open(MockOptions::new().with_latency(Duration::from_millis(20))).unwrap();
    let runtime = RUNTIME.get_or_init(|| Runtime::new(gpu).unwrap());
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    multiply(&stream);
    // Threads that are at it while the process ends.
    for _ in 0..4 {
        thread::spawn(|| {
            let stream = RUNTIME.get().unwrap().device(0).unwrap().create_stream().unwrap();
            loop {
                multiply(&stream);
            }
        });
    }
    // One that makes large page-locked blocks, in pieces, and gives them back.
    thread::spawn(|| {
        let runtime = RUNTIME.get().unwrap();
        loop {
            drop(runtime.pinned::<u8>(LARGE).map(drop).and_then(|()| runtime.trim()));
        }
    });
    for bytes in [4096, LARGE] {
        KEPT.with(|kept| kept.borrow_mut().push((stream.clone(), runtime.pinned(bytes).unwrap())));
    }
    let lease = stream.blas().unwrap();
    thread::sleep(Duration::from_millis(50));
    match scenario.as_str() {
        "exit" => std::process::exit(0),
        "return" => drop(lease),
        other => panic!("unknown scenario {other}"),
    }
}

#[test]
fn a_process_ends_quickly_with_everything_alive() {
    for scenario in ["exit", "return"] {
        let start = Instant::now();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "scenario", "--test-threads=1"])
            .env(SCENARIO, scenario)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{scenario}: {:?}\n{text}", output.status);
        assert!(!text.contains("panicked"), "{scenario}: {text}");
        assert!(start.elapsed() < Duration::from_secs(5), "{scenario}: {:?}", start.elapsed());
    }
}

#[test]
fn threads_that_keep_everything_in_their_locals_end_quietly() {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    // The locals are dropped in the order in which they were first used, or the other way round: both are tried.
    for kept_first in [true, false] {
        let inside = runtime.clone();
        thread::spawn(move || {
            let stream = inside.device(0).unwrap().create_stream().unwrap();
            let keep = |stream: &Stream| {
                let pinned = inside.pinned(4096).unwrap();
                let buffer = stream.upload(&[1_u8; 4096]).unwrap();
                stream.copy_to_device(&pinned, &buffer).unwrap();
                KEPT.with(|kept| kept.borrow_mut().push((stream.clone(), pinned)));
            };
            if kept_first {
                keep(&stream);
            }
            multiply(&stream);
            if !kept_first {
                keep(&stream);
            }
        })
        .join()
        .unwrap();
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}
