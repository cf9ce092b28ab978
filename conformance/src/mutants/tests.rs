//! Tests of the list, the wrapper and the run. `tests/suite/mutants.rs` tests whether the suite catches the mutants.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use highwater_hal::{
    AllocateOptions, Answer, BackendLayer, BlasHandle, BlasKind, BlasOptions, Call, Capabilities, DataType, EventId,
    EventOptions, FillPattern, Gemm, GemmShape, HandleLayer, HostAllocator, HostLayer, HostOptions, Identity, Location,
    MemoryCopy, MemoryFill, StreamId, StreamOptions, Workspace,
};
use highwater_mock::{MockGpu, MockOptions};

use super::reference::{Reference, ReferenceHost};
use super::run::Trial;
use super::state::Shared;
use super::*;
use crate::case::Case;
use crate::cases::cases;
use crate::{Executor, Fault, Faulted, Launcher, Options, Points, Status, run, serve_peer};

fn mock(options: MockOptions) -> Arc<dyn Backend> {
    MockGpu::open(options).unwrap()
}

/// The mock below a wrapper with these hooks.
fn wrapped(options: MockOptions, set: impl FnOnce(&mut Hooks)) -> Wrapper {
    let mut hooks = Hooks::default();
    set(&mut hooks);
    Wrapper::new(mock(options), hooks, None, Arc::default())
}

/// The mutant of this name, over the mock.
fn sabotaged(name: &str) -> Arc<dyn Backend> {
    let mutant = mutants().find(|mutant| mutant.name == name).unwrap();
    // SAFETY: these tests give it to the suite; the mock checks ids.
    unsafe { mutant.wrap(mock(MockOptions::new())) }
}

#[test]
#[ignore = "the second process of cases about sharing, which start it themselves"]
fn peer() {
    let opened = || -> Result<Arc<dyn Backend>> { Ok(Arc::new(wrapped(MockOptions::new().with_devices(2), |_| {}))) };
    if let Some(served) = serve_peer(opened) {
        served.unwrap();
    }
}

#[test]
fn names_are_unique_and_sentences_are_whole() {
    let (mut names, mut sentences) = (BTreeSet::new(), BTreeSet::new());
    for Mutant { name, what, clause, .. } in mutants() {
        assert!(names.insert(name), "two mutants are called {name}");
        assert!(sentences.insert((clause, what)), "two mutants do this: {what}");
        assert!(what.ends_with('.') && what.starts_with(char::is_uppercase), "{what}");
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(name.chars().all(plain), "{name}");
    }
    assert!(names.len() >= 110, "{}", names.len());
}

#[test]
fn every_clause_has_a_mutant_and_every_mutant_a_clause() {
    let broken: BTreeSet<&str> = mutants().map(|mutant| mutant.clause).collect();
    let named: BTreeSet<&str> = cases().flat_map(|case: &Case| case.clauses.iter().copied()).collect();
    assert_eq!(named.difference(&broken).collect::<Vec<_>>(), Vec::<&&str>::new(), "clauses that no mutant breaks");
    assert_eq!(broken.difference(&named).collect::<Vec<_>>(), Vec::<&&str>::new(), "clauses that no case names");
}

/// A mutant is then caught by its own mistake.
#[test]
fn a_wrapper_that_breaks_nothing_passes() {
    let launcher = Launcher::current_executable().unwrap();
    let launcher = launcher.with_arguments(["mutants::tests::peer", "--exact", "--ignored", "--nocapture"]);
    let backend = wrapped(MockOptions::new(), |_| {});
    // The tables make the calls of these groups again, and take as long as all of them.
    const TABLES: [&str; 5] = ["cells", "kinds", "pairs", "products", "transfers"];
    let mut groups: Vec<&str> = cases().map(|case| case.group).filter(|group| !TABLES.contains(group)).collect();
    groups.dedup();
    let mut passed = 0;
    for group in groups {
        let options = Options::new().with_launcher(launcher.clone()).with_filter(format!("{group}."));
        let report = run(&backend, &options);
        assert!(report.is_success(), "{report}");
        passed += report.passed();
    }
    assert!(passed > 450, "{passed}");
    // The ids of a second device.
    let backend = wrapped(MockOptions::new().with_devices(2), |_| {});
    let report = run(&backend, &Options::new().with_filter("ids."));
    assert!(report.is_success() && report.passed() > 5, "{report}");
}

/// Failed before: cases that compare the facts came after the first handle of the run, and found no change any more.
#[test]
fn a_fact_that_changes_for_good_fails_the_case_that_changed_it() {
    let backend = wrapped(MockOptions::new(), |h| {
        let loaded = Shared::new(false);
        let seen = loaded.clone();
        h.backend.create_blas_handle(move |reference, device, options| {
            loaded.set(true);
            reference.create_blas_handle(device, options)
        });
        h.backend.capabilities(move |reference, device| {
            let mut capabilities = reference.capabilities(device)?;
            capabilities.lt_workspace_bytes += usize::from(seen.get());
            Ok(capabilities)
        });
    });
    let report = run(&backend, &Options::new().with_filter("plans."));
    assert_eq!(report.failed(), 1, "{report}");
    let failed = report.cases().iter().find_map(|case| match &case.status {
        Status::Failed(failure) => Some(failure),
        _ => None,
    });
    let failed = failed.unwrap();
    assert!(
        failed
            .contains("the table of capabilities of device 0 changed during the case (`devices.capabilities-stable`)"),
        "{failed}"
    );
}

/// Failed before: such mutants counted as missed, because cases of their clause run on these backends.
#[test]
fn a_mutant_of_an_absent_ability_or_device_is_skipped_with_the_reason() {
    for (name, options, expected) in [
        ("one-uuid-for-all", MockOptions::new(), "the backend has one device"),
        ("copies-between-devices-cut", MockOptions::new(), "the backend has one device"),
        (
            "plans-denied",
            MockOptions::new().with_capabilities(|can| can.lt_plans = false),
            "the capability `lt_plans` is false",
        ),
        (
            "plans-ignore-beta",
            MockOptions::new().with_capabilities(|can| can.lt_plans = false),
            "the capability `lt_plans` is false",
        ),
        (
            "launched-twice",
            MockOptions::new().with_capabilities(|can| can.capture = false),
            "the capability `capture` is false",
        ),
    ] {
        let mut run = MutantOptions::new().with_filter(name);
        run.case_limit = Duration::from_secs(60);
        let score = run_mutants(|| Ok(mock(options.clone())), &run, &mut |_| {});
        let verdict = score.verdicts().iter().find(|verdict| verdict.mutant.name == name).unwrap();
        let Outcome::Skipped(reason) = &verdict.outcome else { panic!("{name}: {score}") };
        assert_eq!(reason, expected, "{name}");
    }
    let mutant = Mutant::named("one-uuid-for-all").unwrap();
    assert_eq!(mutant.unmet(&[Capabilities::none(); 2]), None);
    // Mutants by construction, whose condition never holds without the ability.
    for (name, ability) in [
        ("fill-drop-recording", "capture"),
        ("fill-drop-priority", "stream_priority"),
        ("fill-drop-foreign", "foreign_objects"),
        ("launch-graph-drop-always", "capture"),
        ("run-plan-drop-always", "lt_plans"),
    ] {
        let mutant = Mutant::named(name).unwrap();
        let expected = format!("the capability `{ability}` is false");
        assert_eq!(mutant.unmet(&[Capabilities::none()]), Some(expected), "{name}");
        assert_eq!(mutant.unmet(&[mock(MockOptions::new()).capabilities(0).unwrap()]), None, "{name}");
    }
}

/// Attempts are never in time if an event is complete too early. The failure must not blame the machine.
#[test]
fn a_backend_whose_events_are_complete_too_early_is_told_so() {
    let backend =
        wrapped(MockOptions::new(), |h| h.backend.query_event(|_, _| Ok(highwater_hal::Completion::Complete)));
    let report = run(&backend, &Options::new().with_filter("events.waits_order_streams"));
    let Status::Failed(message) = &report.cases()[0].status else { panic!("{report}") };
    assert!(
        message.contains("reports an event as complete, and a copy to the host before it has not arrived"),
        "{message}"
    );
    assert!(!message.contains("busy"), "{message}");
}

/// Such a call leaves no work outstanding, and the failure must not blame the machine.
#[test]
fn a_backend_whose_calls_execute_the_work_is_told_so() {
    let backend = wrapped(MockOptions::new(), |h| {
        h.backend.copy(|reference, copy, stream| {
            reference.copy(copy, stream)?;
            reference.wait_for(stream)
        });
    });
    for case in ["streams.query_follows_the_work", "streams.copies_return_at_once"] {
        let report = run(&backend, &Options::new().with_filter(case));
        let [one] = report.cases() else { panic!("{case} is no case: {report}") };
        let Status::Failed(message) = &one.status else { panic!("{case} passed: {report}") };
        assert!(message.contains("the call executes the work itself"), "{message}");
        assert!(!message.contains("busy"), "{message}");
    }
}

/// The same failures have another cause if the calls return at once.
#[test]
fn a_backend_whose_queries_lie_is_not_told_that_its_calls_execute_the_work() {
    let backend = wrapped(MockOptions::new(), |h| {
        h.backend.query_stream(|reference, stream| {
            reference.wait_for(stream)?;
            reference.query_stream(stream)
        });
    });
    let report = run(&backend, &Options::new().with_filter("streams.query_follows_the_work"));
    let Status::Failed(message) = &report.cases()[0].status else { panic!("{report}") };
    assert!(message.contains("was over in each of") && !message.contains("executes the work itself"), "{message}");
}

/// If a queue is short, the enqueueing calls last nearly as long as the work. That is allowed.
#[test]
fn a_backend_that_queues_few_copies_passes() {
    /// The number of copies that a stream accepts before the next call waits: less than two loads.
    const MOST: usize = 8;
    // Copies are long, so that few of them are much work.
    let options = MockOptions::new().with_latency(Duration::from_millis(1));
    let backend = wrapped(options, |h| {
        let queued = Shared::<HashMap<StreamId, VecDeque<EventId>>>::default();
        let waited = queued.clone();
        h.backend.copy(move |reference, copy, stream| {
            reference.copy(copy, stream)?;
            let after = reference.create_event(stream.device(), &EventOptions::new())?;
            reference.record_event(after, stream)?;
            let first = queued.with(|queued| {
                let queue = queued.entry(stream).or_default();
                queue.push_back(after);
                if queue.len() > MOST { queue.pop_front() } else { None }
            });
            let Some(first) = first else { return Ok(()) };
            reference.synchronize_event(first)?;
            reference.destroy_event(first)
        });
        h.before(move |reference, method, stream| {
            if !matches!(method, "synchronize_stream" | "synchronize_device" | "destroy_stream") {
                return Ok(());
            }
            let over: Vec<EventId> = waited.with(|queued| {
                queued
                    .extract_if(|on, _| stream.is_none_or(|stream| stream == *on))
                    .flat_map(|(_, queue)| queue)
                    .collect()
            });
            over.into_iter().try_for_each(|event| reference.destroy_event(event))
        });
    });
    let report = run(&backend, &Options::new().with_filter("events."));
    assert!(report.is_success() && report.passed() > 00, "{report}");
}

#[test]
fn a_mistake_that_a_promise_allows_is_not_held_against_a_backend() {
    // The mutant behaves as with beta 0, which a case with beta 0 allows.
    let backend = sabotaged("beta-ignored");
    let report = run(&*backend, &Options::new().with_filter("gemm.ignores_the_old_c_with_beta_zero"));
    assert!(report.is_success() && report.passed() == 6, "{report}");
    // The tolerance covers only rounding, so every type shows the wrong numbers.
    let report = run(&*backend, &Options::new().with_filter("gemm.adds_the_old_c"));
    assert_eq!(report.failed(), 6, "{report}");
}

#[test]
fn a_failure_says_what_was_seen_and_what_was_expected() {
    let case = "events.waits_ignore_later_records_of_pending_streams";
    let backend = sabotaged("waits-look-when-there");
    let text = run(&*backend, &Options::new().with_filter(case)).to_string();
    assert!(text.contains("the stream was not at its wait") && text.contains("and went on when"), "{text}");
    let backend = sabotaged("tiles-only");
    let text = run(&*backend, &Options::new().with_filter("arithmetic.random_products_are_right_f64")).to_string();
    assert!(text.contains("expected") && text.contains("HIGHWATER_CONFORMANCE_SEED="), "{text}");
}

/// Never completes: every event stays pending.
static ENDLESS: Mutant = Mutant::new("endless", "event.query", "Is never done.", |h| {
    h.backend.query_event(|_, _| Ok(highwater_hal::Completion::Pending));
});

#[test]
fn a_case_that_does_not_end_is_left_alone_and_its_thread_ends() {
    let options = MutantOptions::new().with_case_limit(Duration::from_millis(300));
    let backend = mock(MockOptions::new());
    let trial = Trial::new(&ENDLESS, Arc::clone(&backend), &options);
    let case = cases().find(|case| case.name == "events.query_follows_the_record").unwrap();
    let Status::Failed(failure) = trial.run_case(case) else { panic!("the case should not end") };
    assert!(failure.contains("exceeded its limit of 300ms"), "{failure}");
    drop(trial);
    // Its next call fails, and it gives its objects back. This function is then the only owner of the mock.
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while Arc::strong_count(&backend) > 1 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((Arc::strong_count(&backend), backend.live_objects().total()), (1, 0));
}

#[test]
fn a_wrapper_that_was_stopped_gives_back_and_does_nothing_else() {
    let stopped = Arc::<AtomicBool>::default();
    let mut hooks = Hooks::default();
    hooks.backend.destroy_stream(|_, _| panic!("a hook of a wrapper that was stopped"));
    let backend = Wrapper::new(mock(MockOptions::new()), hooks, None, Arc::clone(&stopped));
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    stopped.store(true, std::sync::atomic::Ordering::Relaxed);
    let lost = |result: Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::DeviceLost);
    lost(backend.query_stream(stream).map(drop));
    lost(backend.create_stream(0, &StreamOptions::new()).map(drop));
    lost(handle.set_stream(stream));
    backend.synchronize_stream(stream).unwrap();
    backend.destroy_stream(stream).unwrap();
    handle.destroy().unwrap();
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn what_does_not_apply_is_skipped_and_counts_for_nothing() {
    let nothing = |capabilities: &mut Capabilities| *capabilities = Capabilities::none();
    let open = || Ok(mock(MockOptions::new().with_capabilities(nothing)));
    let score = run_mutants(open, &MutantOptions::new().with_filter("plan.stale"), &mut |_| {});
    assert_eq!((score.mutants(), score.caught(), score.skipped() > 1), (0, 0, true), "{score}");
    assert!(!score.is_success() && score.percent() == 0.0, "a run of nothing proves nothing");
    // Without a launcher, mutants of sharing are skipped.
    let open = || Ok(mock(MockOptions::new()));
    let score = run_mutants(open, &MutantOptions::new().with_filter("ipc.close-unknown"), &mut |_| {});
    assert!(score.verdicts().iter().all(|verdict| matches!(verdict.outcome, Outcome::Skipped(_))), "{score}");
    // No mutant in this process is applied to a real device.
    let real = || -> Result<Arc<dyn Backend>> {
        let backend = wrapped(MockOptions::new(), |h| {
            h.identity = Some(|identity| {
                let mut real = identity.clone();
                real.real_device = true;
                real
            });
        });
        // The identity changes while a stream is alive.
        backend.create_stream(0, &StreamOptions::new())?;
        Ok(Arc::new(backend))
    };
    let score = run_mutants(real, &MutantOptions::new().with_filter("fill.exact"), &mut |_| {});
    assert_eq!((score.mutants(), score.skipped()), (0, score.verdicts().len()), "{score}");
    // If the backend does not open, its mutant is skipped.
    let open = || Err(Error::new(ErrorKind::DeviceMissing, "open", "none"));
    let score = run_mutants(open, &MutantOptions::new().with_filter("memory.zero"), &mut |_| {});
    assert_eq!((score.mutants(), score.skipped()), (0, 1), "{score}");
}

/// An executor as a process has it.
struct Alone(Mutated);

impl Executor for Alone {
    fn identity(&self) -> &Identity {
        unreachable!("a run of mutants has an identity")
    }

    fn draw_from(&mut self, _: u64) {}

    fn run(&mut self, case: &'static Case) -> Status {
        self.0.executor().run(case)
    }

    fn points(&mut self, case: &'static Case) -> Points {
        self.0.executor().points(case)
    }

    fn run_with_fault(&mut self, case: &'static Case, fault: &Fault) -> Faulted {
        self.0.executor().run_with_fault(case, fault)
    }
}

#[test]
fn a_real_device_gets_the_mutants_by_construction_that_are_fit_for_it() {
    let mut real = mock(MockOptions::new()).identity().clone();
    real.real_device = true;
    let start =
        |mutant| Mutated::new(mutant, mock(MockOptions::new()), None).map(Alone).map_err(|error| error.to_string());
    let options = MutantOptions::new().with_generated().with_filter("destroy-event-").with_every(5);
    let score = run_mutants_on(&real, 1, start, &options, &mut |_| {});
    let [drop, neighbor] = score.verdicts() else { panic!("{score}") };
    assert_eq!(
        (drop.mutant.name, neighbor.mutant.name),
        ("destroy-event-drop-always", "destroy-event-neighbor-always")
    );
    assert!(matches!(drop.outcome, Outcome::Caught { by_its_clause: true, .. }), "{score}");
    assert!(matches!(&neighbor.outcome, Outcome::Skipped(why) if why.contains("raw handle")), "{score}");
    // The process itself refuses what is unfit, whatever it was told.
    let real = || -> Arc<dyn Backend> {
        let backend = wrapped(MockOptions::new(), |h| {
            h.identity = Some(|identity| {
                let mut real = identity.clone();
                real.real_device = true;
                real
            });
        });
        backend.create_stream(0, &StreamOptions::new()).unwrap();
        Arc::new(backend)
    };
    assert!(Mutated::new(drop.mutant, real(), None).is_ok());
    for unfit in [neighbor.mutant, mutants().next().unwrap()] {
        assert_eq!(Mutated::new(unfit, real(), None).unwrap_err().kind(), ErrorKind::Unsupported);
    }
    // With one device, nothing happens on another.
    let other = Mutant::named("free-drop-other-device").unwrap();
    assert_eq!(
        (other.unfit_for(real().identity(), 1), other.unfit_for(real().identity(), 2)),
        (Some("the backend has one device"), None)
    );
    // Without time, nothing is tried.
    let options = options.with_total_limit(Duration::ZERO);
    let score = run_mutants_on(mock(MockOptions::new()).identity(), 1, start, &options, &mut |_| {});
    assert_eq!((score.mutants(), score.skipped()), (0, 2), "{score}");
}

#[test]
fn a_sample_is_one_of_so_many_and_an_observer_sees_each() {
    let mut seen = Vec::new();
    let options = MutantOptions::new().with_filter("fill.exact").with_every(2);
    let open = || Ok(mock(MockOptions::new()));
    let score = run_mutants(open, &options, &mut |progress| match progress {
        MutantProgress::Started { mutant, index, total } => seen.push((mutant.name, index, total, false)),
        MutantProgress::Finished { verdict, index, total } => seen.push((verdict.mutant.name, index, total, true)),
    });
    let all: Vec<_> = mutants().filter(|mutant| mutant.clause == "fill.exact").collect();
    assert_eq!(score.verdicts().len(), all.len().div_ceil(2));
    let total = score.verdicts().len();
    let expected: Vec<_> =
        (0..total).flat_map(|index| [false, true].map(|over| (all[index * 2].name, index, total, over))).collect();
    assert_eq!(seen, expected);
    assert!(score.is_success() && score.caught() == score.caught_by_their_clause(), "{score}");
}

/// The calls that the mock refused because of an address, of operations for which a backend need not check it.
type Refused = Arc<Mutex<BTreeSet<&'static str>>>;

fn noted<T>(refused: &Refused, call: &Call, answer: Result<T>) -> Result<T> {
    const UNCHECKED: [&str; 8] = ["copy", "copy_2d", "fill", "free", "host_free", "set_workspace", "gemm", "run_plan"];
    let is_refused = answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::InvalidPointer);
    if is_refused && UNCHECKED.contains(&call.operation) {
        refused.lock().unwrap().insert(call.operation);
    }
    answer
}

/// A layer over the mock that notes what the mock refused.
#[derive(Debug)]
struct Noting<B> {
    below: B,
    refused: Refused,
}

// SAFETY: every call goes to the mock unchanged, and so does its answer.
unsafe impl BackendLayer for Noting<Arc<dyn Backend>> {
    fn below(&self) -> &dyn Backend {
        &*self.below
    }

    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        noted(&self.refused, call, forward(&*self.below))
    }

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let below = self.below.create_blas_handle(device, options)?;
        Ok(Box::new(Noting { below, refused: Arc::clone(&self.refused) }))
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::new(Noting { below: self.below.host_allocator(), refused: Arc::clone(&self.refused) })
    }
}

impl HandleLayer for Noting<Box<dyn BlasHandle>> {
    fn below(&self) -> &dyn BlasHandle {
        &*self.below
    }

    fn around<T: Answer>(&mut self, call: &Call, forward: impl FnOnce(&mut dyn BlasHandle) -> Result<T>) -> Result<T> {
        let answer = forward(&mut *self.below);
        noted(&self.refused, call, answer)
    }
}

// SAFETY: as for the backend.
unsafe impl HostLayer for Noting<Arc<dyn HostAllocator>> {
    fn below(&self) -> &dyn HostAllocator {
        &*self.below
    }

    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn HostAllocator) -> Result<T>) -> Result<T> {
        noted(&self.refused, call, forward(&*self.below))
    }
}

/// Failed before: mutants wrote and read a byte behind a block, which corrupted the memory of a backend that checks no range.
#[test]
fn no_mutant_of_a_copy_passes_an_address_that_a_backend_need_not_check() {
    mutants_pass_no_bad_address(&["copy.exact", "copy.zero", "copy-2d.exact"]);
}

#[test]
fn no_mutant_of_other_work_passes_an_address_that_a_backend_need_not_check() {
    mutants_pass_no_bad_address(&["fill.exact", "fill.zero", "gemm.value", "memory.disjoint"]);
}

/// Runs the mutants of the clauses over a mock, which has to be asked for no address that it refuses.
#[track_caller]
fn mutants_pass_no_bad_address(clauses: &[&str]) {
    let refused = Refused::default();
    let open = || -> Result<Arc<dyn Backend>> {
        let below = mock(MockOptions::new().with_devices(2));
        Ok(Arc::new(Noting { below, refused: Arc::clone(&refused) }))
    };
    for &clause in clauses {
        let score = run_mutants(open, &MutantOptions::new().with_filter(clause), &mut |_| {});
        assert!(score.is_success(), "{score}");
    }
    let refused = refused.lock().unwrap();
    assert!(refused.is_empty(), "mutants pass addresses that the mock refuses to {refused:?}");
}

#[test]
fn the_layer_below_a_mutant_refuses_what_leaves_its_memory_and_nothing_else() {
    const BYTES: usize = 256;
    let refused = Refused::default();
    let below: Arc<dyn Backend> = Arc::new(Noting { below: mock(MockOptions::new()), refused: Arc::clone(&refused) });
    let reference = Reference::new(below);
    let host = ReferenceHost::new(&reference);
    // The bytes after the second block belong to no block.
    let [other, ptr, behind] = [(); 3].map(|()| reference.allocate(0, &AllocateOptions::new(BYTES)).unwrap());
    reference.free(0, behind, None).unwrap();
    let stream = reference.create_stream(0, &StreamOptions::new()).unwrap();
    let stale = reference.create_stream(0, &StreamOptions::new()).unwrap();
    reference.destroy_stream(stale).unwrap();
    let kind = |answer: Result<()>| answer.map_err(|error| error.kind());
    let fill = |offset: usize, count: usize, stream| {
        kind(reference.fill(&MemoryFill::new(0, ptr.offset(offset), FillPattern::U8(1), count), stream))
    };
    let copy = |offset: usize, bytes: usize| {
        let location = |ptr| Location::Device { device: 0, ptr };
        kind(reference.copy(&MemoryCopy::new(location(other), location(ptr.offset(offset)), bytes), stream))
    };
    let outside = Err(ErrorKind::InvalidPointer);
    assert_eq!(
        (fill(0, BYTES, stream), fill(BYTES, 0, stream), copy(1, BYTES - 1), copy(BYTES, 0)),
        (Ok(()), Ok(()), Ok(()), Ok(()))
    );
    assert_eq!(
        (fill(0, BYTES + 1, stream), fill(BYTES, 1, stream), copy(1, BYTES), copy(BYTES, 1)),
        (outside, outside, outside, outside)
    );
    // The backend refuses bad streams and bad devices.
    assert_eq!(fill(0, BYTES, stale), Err(ErrorKind::InvalidHandle));
    assert_eq!(kind(reference.free(9, ptr, None)), Err(ErrorKind::InvalidArgument));
    let mut handle = reference.handle(BlasKind::Blas, stream).unwrap();
    let mut gemm = |m: usize| kind(handle.gemm(&Gemm::new(GemmShape::new(DataType::F32, m, 1, 1), ptr, ptr, other)));
    assert_eq!((gemm(64), gemm(65)), (Ok(()), outside));
    assert_eq!(kind(handle.set_workspace(Some(Workspace { ptr: other, bytes: BYTES + 1 }))), outside);
    assert_eq!(kind(reference.free(0, ptr.offset(BYTES), None)), outside);
    reference.synchronize_device(0).unwrap();
    assert_eq!((kind(reference.free(0, ptr, None)), kind(reference.free(0, ptr, None))), (Ok(()), outside));
    assert_eq!((fill(0, 1, stream), copy(0, 1)), (outside, outside));
    let pinned = host.allocate(BYTES, &HostOptions::new()).unwrap();
    assert_eq!((kind(host.free(pinned.offset(1))), kind(host.free(pinned))), (outside, Ok(())));
    assert_eq!(*refused.lock().unwrap(), BTreeSet::new(), "the mock was asked");
}
