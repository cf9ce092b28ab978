//! The main job: threads classify handwritten digits and share one copy of the weights on each device that is used.
//!
//! With workers, this process is the owner of the weights (`owner`) and its children do the work (`worker`). Without workers,
//! or if no device can share memory, it does all work itself, on device 0. The work is the same (`classifier`).

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::hal::{counted, display_foreign};
use highwater::{ErrorKind, Opened, Runtime};

use super::args::DigitsArguments;
use super::backends::{self, Prober};
use super::classifier::{self, Batch, Next, Work};
use super::failure::Failure;
use super::mps::{self, Plan};
use super::owner::{self, Spread};
use super::progress::Progress;
use super::report::{DeviceUse, Outcome, Place, Report};
use super::scale::{self, Scale};
use super::task::{Tally, Task};
use super::weights::{self, Weights};
use super::{Verdict, output};

/// Runs the job and prints the result.
pub(super) fn command(arguments: &DigitsArguments, json: bool) -> Result<Verdict> {
    mps::follow(arguments)?;
    let passes = arguments.repeat.unwrap_or(if arguments.scale { scale::PASSES } else { 1 });
    let task = Task::load(arguments.data.as_deref(), passes)?;
    check_die_at(arguments, &task)?;
    let opened = open(arguments.backend.as_deref());
    let trial = opened.as_ref().map(|opened| &*opened.backend);
    if let Some(verdict) = mps::give_up(arguments, trial) {
        return Ok(verdict);
    }
    let opened = opened?;
    let service = match mps::plan(arguments, &*opened.backend)? {
        Plan::This(service) => service,
        Plan::Child(verdict) => return Ok(verdict),
    };
    let reason = tell_of_choice(&opened, arguments.backend.is_none());
    service.tell();
    let address = backends::address(&opened);
    let backend = opened.backend;
    let runtime = Runtime::new(Arc::clone(&backend))?;
    let mut shareable = false;
    for ordinal in 0..runtime.device_count() {
        shareable |= weights::can_be_shared(&runtime.device(ordinal)?);
    }
    let alone = arguments.workers == 0 && !arguments.scale;
    let first = if alone { None } else { weights::devices_for_workers(&runtime)?.first().copied() };
    let device = runtime.device(first.unwrap_or(0))?.info().name.clone();
    let place = Place { backend: runtime.identity().name.clone(), reason, device };
    let threads = arguments.threads;
    let (isolated, die_at) = (arguments.isolate_workers, arguments.die_at);
    let spread = |workers| Spread { backend: &address, workers, threads, isolated, die_at };
    if arguments.scale {
        drop(runtime);
        if !shareable {
            return Err(cannot_share(&place).into());
        }
        let progress = Progress::new("images", task.images() * scale::WORKERS.len() as u64, json);
        let run = |workers| Ok((workers, run(Runtime::new(Arc::clone(&backend))?, &task, spread(workers), &progress)?));
        let runs = scale::WORKERS.into_iter().map(run).collect::<Result<_>>()?;
        drop(progress);
        let scale = Scale { place: &place, service: &service, threads, repeat: task.repeat, runs };
        let printed = if json { output::object(&scale.to_json()) } else { output::result(scale.to_table()) };
        return finish(printed, scale.faults());
    }
    let mut workers = arguments.workers;
    if workers > 0 && !shareable {
        let what = cannot_share(&place);
        output::line(format_args!(
            "note: {what}; everything runs in this process, with {}",
            counted(threads, "thread")
        ));
        workers = 0;
    }
    let progress = Progress::new("images", task.images(), json);
    let outcome = run(runtime, &task, spread(workers), &progress);
    drop(progress);
    let report = Report { place: &place, service: &service, workers, threads, repeat: task.repeat, outcome: outcome? };
    let faults = report.outcome.faults();
    let printed = if json { output::object(&report.to_json()) } else { output::result(report.to_table()) };
    finish(printed, faults)
}

/// Prints a fault of a result, after the result.
fn finish(printed: Result<(), Failure>, faults: Vec<String>) -> Result<Verdict> {
    printed?;
    faults.iter().for_each(|fault| output::line(format_args!("error: {fault}")));
    Ok(if faults.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// Opens the backend of that name, or the best one.
fn open(name: Option<&str>) -> Result<Opened> {
    let by_name = |name| backends::open_by(name, Prober::ThisProgram);
    Ok(name.map_or_else(backends::open_best, by_name).map_err(highwater::Error::from)?)
}

/// Prints the choice of the backend and returns its reason.
fn tell_of_choice(opened: &Opened, is_best: bool) -> String {
    let taken = opened.report.taken();
    let reason = taken.map_or_else(String::new, |taken| taken.reason.clone());
    output::line(format_args!("backend {}: {reason}", display_foreign(&opened.backend.identity().name)));
    for note in taken.iter().flat_map(|taken| &taken.notes) {
        output::line(format_args!("note: {note}"));
    }
    if is_best {
        for other in opened.report.candidates.iter().filter(|other| other.outcome != highwater::opening::Outcome::Taken)
        {
            output::line(format_args!("not {}: {}: {}", display_foreign(&other.name), other.outcome, other.reason));
        }
    }
    reason
}

fn cannot_share(place: &Place) -> Failure {
    let what = format!(
        "the memory of `{}` ({}) cannot be shared with other processes: no IPC transport",
        display_foreign(&place.device),
        display_foreign(&place.backend)
    );
    Failure::new(ErrorKind::Unsupported, what, "use another `--backend`, or one process (`--workers 0`)")
}

/// Rejects an image that does not exist, at which no worker would die.
fn check_die_at(arguments: &DigitsArguments, task: &Task) -> Result<()> {
    match arguments.die_at {
        Some(super::control::DieAt::Image(image)) if image >= task.images() => {
            let what = format!("`--die-at {image}`: there are {} images", task.images());
            Err(Failure::new(ErrorKind::InvalidArgument, what, "images count from 0, over all passes").into())
        }
        _ => Ok(()),
    }
}

/// Classifies, then closes the runtime in every case.
fn run(runtime: Runtime, task: &Task, spread: Spread<'_>, progress: &Progress) -> Result<Outcome> {
    let classified = match spread.workers {
        0 => classify_here(&runtime, task, spread.threads, progress),
        _ => owner::classify(&runtime, task, spread, progress),
    }
    .map_err(with_advice);
    let backend = Arc::clone(runtime.backend());
    let refused = runtime.close().err();
    // The backend's own count, which is also right if a release failed.
    let leaks = backend.live_objects().total();
    let mut outcome = classified.inspect_err(|_| {
        if leaks > 0 {
            progress.say(&format!("note: objects left on the device after the error: {leaks}"));
        }
    })?;
    outcome.leaks += leaks;
    outcome.refused.extend(refused.map(|error| error.to_string()));
    Ok(outcome)
}

/// Adds a hint for the user of this program to an error of the library.
pub(super) fn with_advice(error: anyhow::Error) -> anyhow::Error {
    let error = match error.downcast::<highwater::Error>() {
        Ok(error) => error,
        Err(other) => return other,
    };
    let (what, hint) = match (error.kind(), error.operation()) {
        (ErrorKind::OutOfMemory, "allocate" | "create_blas_handle") => (
            "the job ran out of device memory",
            "use fewer `--threads`, or a device with more memory (the mock's size is `HIGHWATER_MOCK=memory=4GiB`)",
        ),
        (ErrorKind::OutOfMemory, "host_allocate" | "host_register" | "pinned") => (
            "the job ran out of page-locked memory",
            "use fewer `--threads`, or allow more (the mock's limit is `HIGHWATER_MOCK=host-memory=1GiB`)",
        ),
        (ErrorKind::Unsupported, _) => ("the device cannot run this job", "use another device or `--backend`"),
        // Other resources, such as threads, run out too. The library's message names the resource.
        _ => ("the job was not finished", ""),
    };
    Failure::new(error.kind(), what, hint).because_of(error).into()
}

/// Classifies on device 0. Everything that this makes there is dropped when it returns.
fn classify_here(runtime: &Runtime, task: &Task, threads: usize, progress: &Progress) -> Result<Outcome> {
    let device = runtime.device(0)?;
    let stream = device.create_stream()?;
    let weights = Weights::upload(&stream, &task.network, false)?;
    let here = Here {
        task,
        progress,
        started: OnceLock::new(),
        next_batch: AtomicU64::new(0),
        stopped: AtomicBool::new(false),
        tally: Mutex::default(),
    };
    let statistics = classifier::run(runtime, &weights, threads, &here)?;
    let elapsed = here.started.get().map_or(Duration::ZERO, Instant::elapsed);
    let tally = here.tally.into_inner().unwrap_or_else(PoisonError::into_inner);
    let used = DeviceUse { ordinal: 0, name: device.info().name.clone(), workers: 0, images: tally.images };
    Ok(Outcome { tally, elapsed, holdings: statistics.into(), devices: vec![used], ..Outcome::default() })
}

/// The task, for the threads of this process.
struct Here<'a> {
    task: &'a Task,
    progress: &'a Progress,
    /// The time at which the threads were ready.
    started: OnceLock<Instant>,
    next_batch: AtomicU64,
    stopped: AtomicBool,
    tally: Mutex<Tally>,
}

impl Work for Here<'_> {
    fn ready(&self) -> Result<()> {
        self.started.get_or_init(Instant::now);
        Ok(())
    }

    fn next(&self, _: bool) -> Next<'_> {
        // Relaxed: a thread that sees it late classifies a few more batches.
        if self.stopped.load(Ordering::Relaxed) {
            return Next::End;
        }
        let number = self.next_batch.fetch_add(1, Ordering::Relaxed);
        if number >= self.task.batches() {
            return Next::End;
        }
        let first_image = self.task.images_of(number).start;
        Next::Batch(Batch { number, first_image, pixels: Cow::Borrowed(self.task.pixels(number)) })
    }

    fn answer(&self, batch: Batch<'_>, digits: &[u8]) -> Result<()> {
        *self.tally.lock().unwrap_or_else(PoisonError::into_inner) += self.task.count(batch.number, digits);
        self.progress.advance(digits.len() as u64);
        Ok(())
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use highwater::hal::Backend as _;
    use highwater::mock::{MockGpu, MockOptions, Operation};

    use super::super::control::DieAt;
    use super::super::model::{self, CLASSES, PIXELS};
    use super::super::task::BATCH;
    use super::*;

    fn quiet(task: &Task) -> Progress {
        // This total is never reached, so no line is printed.
        Progress::new("images", task.images() * 100, true)
    }

    fn run_here(gpu: Arc<MockGpu>, task: &Task, threads: usize) -> Result<Outcome> {
        run(
            Runtime::new(gpu)?,
            task,
            Spread { backend: "mock", workers: 0, threads, isolated: false, die_at: None },
            &quiet(task),
        )
    }

    #[test]
    fn the_pools_grow_to_the_threads_and_not_with_the_work() {
        let run = |repeat| {
            let task = Task::load(None, repeat).unwrap();
            run_here(MockGpu::open(MockOptions::new()).unwrap(), &task, 3).unwrap()
        };
        let (once, often) = (run(1), run(4));
        for outcome in [&once, &often] {
            assert_eq!((outcome.leaks, outcome.tally.differing), (0, 0));
            let holdings = outcome.holdings;
            assert_eq!((holdings.handles_created, holdings.threads_served, holdings.workspaces), (3, 3, 3));
            assert_eq!(holdings.mapped_bytes, 0);
        }
        assert_eq!(often.tally.correct, 4 * once.tally.correct);
        assert_eq!(often.tally.images, 4 * 540);
        let buffers_of_a_thread = 2 * (PIXELS + CLASSES) * BATCH * size_of::<f32>();
        assert_eq!(once.holdings.pinned_requested_bytes, 3 * buffers_of_a_thread as u64);
        assert_eq!(often.holdings.pinned_requested_bytes, once.holdings.pinned_requested_bytes);
    }

    /// For a failure of any call: one error names it, or the run is unharmed. No thread hangs, and nothing leaks except objects
    /// that the backend refuses to release, which are reported.
    #[test]
    fn a_fault_anywhere_ends_the_job_cleanly() {
        let (network, test) = model::load(None).unwrap();
        let task = Task::new(network, test.first(40), 2);
        let releases = ["destroy", "free", "synchronize_device"];
        let mut failed = 0;
        for &operation in Operation::ALL {
            for nth in [1, 2, 5, 20] {
                let fault = format!("{operation}:{nth}");
                let options = MockOptions::new().with_fault(operation, nth, operation.usual_failure());
                let gpu = MockGpu::open(options).unwrap();
                if Runtime::new(gpu.clone()).is_err() {
                    continue;
                }
                let outcome = run_here(gpu.clone(), &task, 3);
                let left = gpu.live_objects().total();
                if !releases.iter().any(|release| operation.name().contains(release)) {
                    assert_eq!(left, 0, "{fault}");
                }
                match outcome {
                    Ok(outcome) => assert_eq!((outcome.tally.differing, outcome.leaks), (0, left), "{fault}"),
                    Err(error) => {
                        failed += 1;
                        let error = format!("{error:#}");
                        assert!(error.contains(&format!("{operation}: ")), "{fault}: {error}");
                    }
                }
            }
        }
        assert!(failed > 20, "only {failed} faults were seen");
    }

    #[test]
    fn advice_on_memory_is_given_for_the_memory_that_ran_out_and_for_nothing_else() {
        let advised = |kind, operation| {
            let error = highwater::Error::new(kind, operation, "none left").with_hint("of the library");
            with_advice(error.into()).downcast::<Failure>().unwrap()
        };
        for operation in ["allocate", "create_blas_handle"] {
            assert!(advised(ErrorKind::OutOfMemory, operation).hint().contains("HIGHWATER_MOCK=memory="));
        }
        assert!(advised(ErrorKind::OutOfMemory, "host_allocate").hint().contains("HIGHWATER_MOCK=host-memory="));
        for (kind, operation) in [(ErrorKind::OutOfMemory, "create_stream"), (ErrorKind::DeviceLost, "allocate")] {
            assert_eq!(advised(kind, operation).hint(), "", "the library's hint is hidden");
        }
    }

    #[test]
    fn a_device_without_lt_plans_classifies_as_well() {
        let gpu = MockGpu::open(MockOptions::parse("lt=off").unwrap()).unwrap();
        let task = Task::load(None, 1).unwrap();
        let outcome = run_here(gpu, &task, 2).unwrap();
        assert_eq!((outcome.leaks, outcome.tally.correct), (0, 530), "{outcome:?}");
    }

    #[test]
    fn a_worker_cannot_be_told_to_die_at_an_image_that_does_not_exist() {
        let task = Task::load(None, 2).unwrap();
        let check = |image| {
            let arguments = DigitsArguments { die_at: Some(DieAt::Image(image)), ..DigitsArguments::default() };
            check_die_at(&arguments, &task)
        };
        assert!(check(1079).is_ok());
        assert!(check(1080).unwrap_err().to_string().contains("there are 1080 images"));
    }
}
