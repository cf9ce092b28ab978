//! The examples and the main job under the mock's race finder: no program of this repository has a race.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use highwater::mock::{MockGpu, MockOptions, Operation};
use highwater::{Epilogue, GemmShape, Result, Runtime, Stream};

/// Builds the examples as this test was built, and gives their folder.
fn examples() -> PathBuf {
    // The test lies in `deps` of the folder that the examples' one is in.
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().and_then(Path::parent).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--examples", "--package", "highwater", "--target-dir"]);
    cargo.arg(folder.parent().unwrap());
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let output =
        output.unwrap_or_else(|error| panic!("this test builds the examples: {cargo:?} does not start: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder.join("examples")
}

/// Runs a program on the mock, and gives the races and the operations that each of its processes told of.
fn told(program: &Path, arguments: &[&str], mock: &str) -> Vec<(u64, u64)> {
    let mut command = Command::new(program);
    command.args(arguments).env("HIGHWATER_MOCK", mock).stdin(Stdio::null());
    // The examples take a real device where there is one.
    command.env("CUDA_VISIBLE_DEVICES", "").env("HIP_VISIBLE_DEVICES", "-1").env("ROCR_VISIBLE_DEVICES", "-1");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program:?} {mock}: {}\n{text}", output.status);
    let told = text.lines().filter_map(|line| line.strip_prefix("highwater-mock: race detector: "));
    let numbers = told.map(|line| {
        let (races, rest) = line.split_once(" races in ").unwrap();
        (races.parse().unwrap(), rest.strip_suffix(" operations").unwrap().parse().unwrap())
    });
    let numbers: Vec<_> = numbers.collect();
    assert!(numbers.iter().all(|&(races, _)| races == 0), "{program:?} {mock}:\n{text}");
    numbers
}

#[test]
fn no_example_has_a_race() {
    let folder = examples();
    for (example, processes) in [("gemm", 1), ("threads", 1), ("share", 2)] {
        for mock in ["race_detector=on", "race_detector=on,latency=1ms", "race_detector=on,schedule=4"] {
            let told = told(&folder.join(example), &[], mock);
            assert_eq!(told.len(), processes, "{example} {mock}: {told:?}");
            assert!(told.iter().all(|&(_, operations)| operations >= 2), "{example} {mock}: {told:?}");
        }
    }
}

#[test]
fn the_main_job_has_no_race() {
    let program = Path::new(env!("CARGO_BIN_EXE_highwater"));
    for mock in ["race_detector=on", "race_detector=on,devices=2", "race_detector=on,schedule=9"] {
        let told = told(program, &["--backend", "mock", "--json", "--workers", "2"], mock);
        // The owner and its workers.
        assert!(told.len() >= 3, "{mock}: {told:?}");
        assert!(told.iter().map(|&(_, operations)| operations).sum::<u64>() > 100, "{mock}: {told:?}");
    }
}

const N: usize = 16;

/// A bit of everything that pools hand from one user to the next: streams that end, buffers that are dropped in use, page-locked
/// memory, workspaces, handles and graphs. Gives what it saw on the way.
fn work(runtime: &Runtime, rounds: usize) -> Result<Vec<bool>> {
    let device = runtime.device(0)?;
    let shape = GemmShape::of::<f32>(N, N, N);
    let mut seen = Vec::new();
    let kept = device.create_stream()?;
    let (ones, sum) = (kept.upload(&[1.0_f32; N * N])?, device.allocate::<f32>(N * N)?);
    kept.fill_zero(&sum)?;
    let mut graph = kept.capture(|stream| stream.blas()?.gemm(&shape, 1.0, &ones, &ones, 1.0, &sum))?;
    let uploaded = kept.record()?;
    for round in 0..rounds {
        let (one, other): (Stream, Stream) = (device.create_stream()?, device.create_stream()?);
        one.wait(&uploaded)?;
        let (product, output) = (device.allocate::<f32>(N * N)?, device.allocate::<f32>(N * N)?);
        one.blas()?.gemm(&shape, 1.0, &ones, &ones, 0.0, &product)?;
        seen.push(one.is_complete()?);
        other.wait(&one.record()?)?;
        other.lt()?.matmul(&shape, Epilogue::Relu, 1.0, &product, &product, 0.0, &output, None)?;
        graph.launch(&kept)?;
        let mut pinned = runtime.pinned::<f32>(N * N)?;
        other.copy_to_host(&output, &mut pinned)?;
        seen.push(other.is_complete()?);
        if round % 3 == 0 {
            // Everything is dropped while it is in use.
            continue;
        }
        assert!(pinned.read()?.iter().all(|&value| value == (N * N * N) as f32));
        runtime.trim_device_memory()?;
    }
    assert_eq!(kept.download(&sum)?, vec![(rounds * N) as f32; N * N]);
    Ok(seen)
}

#[test]
fn what_pools_hand_on_is_ordered() {
    for options in [MockOptions::new(), MockOptions::new().with_latency(std::time::Duration::from_micros(100))] {
        // Threads that share nothing but the runtime have no hand-over to declare.
        let gpu = MockGpu::open(options.with_thread_races()).unwrap();
        let runtime = Runtime::new(Arc::<MockGpu>::clone(&gpu)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| work(&runtime, 20).unwrap());
            }
        });
        assert_eq!(runtime.close().unwrap().total(), 0);
        gpu.check_races().unwrap();
        // Each thread reads in 13 of its 20 rounds.
        assert!(gpu.calls(Operation::CpuAccess) >= 4 * 13);
    }
}

#[test]
fn a_seed_repeats_every_call_and_answer_of_one_thread() {
    let run = |seed: u64| {
        let gpu = MockGpu::open(MockOptions::new().with_schedule(seed).with_race_detector()).unwrap();
        let runtime = Runtime::new(Arc::<MockGpu>::clone(&gpu)).unwrap();
        let seen = work(&runtime, 12).unwrap();
        assert_eq!(runtime.close().unwrap().total(), 0, "seed {seed}");
        gpu.check_races().unwrap();
        assert_eq!(gpu.unscheduled_operations(), 0);
        let calls: Vec<_> = Operation::ALL.iter().map(|&operation| gpu.calls(operation)).collect();
        (seen, calls)
    };
    let runs: Vec<_> = (0..16).map(run).collect();
    for (seed, once) in runs.iter().enumerate() {
        assert_eq!(*once, run(seed as u64), "seed {seed}");
    }
    assert!(runs.iter().any(|other| other.0 != runs[0].0), "16 seeds gave the same answers");
}
