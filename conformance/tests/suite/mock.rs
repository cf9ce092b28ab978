//! The whole suite on the mock: with all abilities, with two devices, and without any ability.

use std::collections::BTreeSet;
use std::sync::Arc;

use highwater_conformance::{CaseReport, Launcher, Options, Progress, Status, run, run_observed, serve_peer};
use highwater_hal::{Backend, Capabilities};
use highwater_mock::{MockGpu, MockOptions};

fn open(options: MockOptions) -> Arc<MockGpu> {
    MockGpu::open(options).unwrap()
}

/// The variable by which a second process learns the number of its mock's devices.
const DEVICES: &str = "HIGHWATER_TEST_DEVICES";

/// Returns options with a launcher that starts this test binary for [`peer`].
fn options(devices: u32) -> Options {
    let launcher = Launcher::current_executable().unwrap();
    let launcher = launcher.with_arguments(["mock::peer", "--exact", "--ignored", "--nocapture"]);
    Options::new().with_launcher(launcher.with_environment(DEVICES, devices.to_string()))
}

#[test]
#[ignore = "the second process of cases about sharing, which start it themselves"]
fn peer() {
    let opened = || -> highwater_hal::Result<Arc<dyn Backend>> {
        let devices = std::env::var(DEVICES).unwrap().parse().unwrap();
        Ok(MockGpu::open(MockOptions::new().with_devices(devices))?)
    };
    if let Some(served) = serve_peer(opened) {
        served.unwrap();
    }
}

/// The case that needs more memory than a device of the mock has.
const NEEDS_MORE_MEMORY: &str = "copies.above_four_gibibytes_are_exact";

/// Cases that need a fact to be false which is true on the mock.
const NEED_THE_ABSENCE_OF_A_FACT: [&str; 2] = [
    "products.of_plans_follow_the_handle_to_another_stream",
    "products.of_plans_follow_the_stream_that_any_thread_bound",
];

#[test]
fn plans_follow_their_handle_on_a_mock_without_the_fact() {
    let options = MockOptions::new().with_devices(2).with_capabilities(|c| c.lt_handle_per_stream = false);
    let backend = open(options);
    for case in NEED_THE_ABSENCE_OF_A_FACT {
        let report = run(&*backend, &Options::new().with_filter(case));
        assert!(report.is_success() && report.passed() == 1, "{report}");
    }
}

/// The program's tests run all cases on one device.
#[test]
fn every_case_passes_on_a_mock_with_two_devices() {
    // Rows of a block of more than 4 GiB need that much memory.
    let report = run(&*open(MockOptions::new().with_devices(2).with_memory_bytes(6 << 30)), &options(2));
    assert!(report.is_success(), "{report}");
    let expected = |case: &CaseReport, reason: &str| {
        // These cases need the absence of an ability or of a fact.
        let needs_absence = case.case.group == "lacking" || NEED_THE_ABSENCE_OF_A_FACT.contains(&case.case.name);
        needs_absence && reason.ends_with("is true")
            || case.case.name == NEEDS_MORE_MEMORY && reason.contains("of free memory")
    };
    let unexpected: Vec<String> = report
        .cases()
        .iter()
        .filter_map(|case| match &case.status {
            Status::Skipped(reason) if !expected(case, reason) => Some(format!("{}: {reason}", case.case.name)),
            _ => None,
        })
        .collect();
    assert_eq!(unexpected, Vec::<String>::new(), "cases skipped that should have run");
}

/// Removes every ability.
fn denied(capabilities: &mut Capabilities) {
    let facts = *capabilities;
    *capabilities = Capabilities::none();
    capabilities.set_stream_resets_workspace = facts.set_stream_resets_workspace;
    capabilities.workspace_alignment = facts.workspace_alignment;
}

#[test]
fn every_ability_can_be_lacking() {
    let report = run(&*open(MockOptions::new().with_devices(2).with_capabilities(denied)), &Options::new());
    assert!(report.is_success(), "{report}");
    let skipped: BTreeSet<&str> = report
        .cases()
        .iter()
        .filter(|case| case.case.group == "lacking" && matches!(case.status, Status::Skipped(_)))
        .map(|case| case.case.name)
        .collect();
    // These calls need one ability on a device that has another.
    assert_eq!(skipped, BTreeSet::from(["lacking.strided_batch", "lacking.what_the_other_kind_of_handle_does"]));
}

#[test]
fn without_a_launcher_only_the_cases_about_two_processes_are_skipped() {
    let options = Options::new().with_filter("devices.uuid");
    let report = run(&*open(MockOptions::new().with_devices(2)), &options);
    assert!(report.is_success(), "{report}");
    for case in report.cases() {
        let skipped = case.status == Status::Skipped("no launcher for a second process was given".into());
        assert_eq!(skipped, case.case.needs_launcher(), "{}", case.case.name);
    }
    assert_eq!((report.passed(), report.skipped()), (8, 2), "{report}");
}

#[test]
fn a_launcher_that_starts_something_else_is_told_so() {
    let options = Options::new().with_filter("sharing.devices_have_one_uuid_in_every_process");
    let case = |launcher| run(&*open(MockOptions::new()), &options.clone().with_launcher(launcher)).to_string();
    let missing = case(Launcher::new("/nowhere/at/all"));
    assert!(missing.contains("`/nowhere/at/all`") && missing.contains("cannot be started"), "{missing}");
    let other = case(Launcher::new("/bin/false"));
    assert!(other.contains("the second process ended"), "{other}");
    // The serving test exists, but its mock has another number of devices than it reports.
    let failing = Launcher::current_executable().unwrap().with_arguments(["mock::peer", "--exact", "--ignored"]);
    let failing = case(failing.with_environment(DEVICES, "0"));
    assert!(failing.contains("0 devices were asked for"), "{failing}");
}

#[test]
fn an_ability_lacking_beside_another_is_refused() {
    let options = MockOptions::new().with_capabilities(|capabilities| capabilities.strided_batch = false);
    let report = run(&*open(options), &Options::new().with_filter("lacking.strided_batch"));
    assert!(report.is_success() && report.passed() == 1, "{report}");
}

/// Devices that have everything but one ability.
#[test]
fn what_an_ability_does_not_concern_works_without_it() {
    let passes = |lacking: fn(&mut Capabilities), filters: &[&str]| {
        let backend = open(MockOptions::new().with_devices(2).with_capabilities(lacking));
        for filter in filters {
            let report = run(&*backend, &Options::new().with_filter(*filter));
            assert!(report.is_success() && report.passed() > 0, "{filter}: {report}");
        }
    };
    passes(|capabilities| capabilities.peer_copy = false, &["mapped.", "lacking.peer_copy"]);
    passes(|capabilities| capabilities.create_during_capture = false, &["capture.", "blas."]);
}

#[test]
fn a_mock_that_keeps_its_workspace_passes() {
    let options = MockOptions::new().with_capabilities(|c| c.set_stream_resets_workspace = false);
    let report = run(&*open(options), &Options::new().with_filter("blas."));
    assert!(report.is_success(), "{report}");
}

#[test]
fn creation_that_takes_long_delays_nobody() {
    let options = MockOptions::new().with_create_handle_latency(0, std::time::Duration::from_millis(40));
    let report = run(&*open(options), &Options::new().with_filter("blas.creation_delays_nobody"));
    assert!(report.is_success() && report.passed() == 1, "{report}");
}

#[test]
fn the_observer_sees_every_case_begin_and_end() {
    let mut seen = Vec::new();
    let options = Options::new().with_filter("identity.");
    let report = run_observed(&*open(MockOptions::new()), &options, &mut |progress| match progress {
        Progress::Started { case, index, .. } => seen.push((index, case.name, false)),
        Progress::Finished { report, index, .. } => seen.push((index, report.case.name, true)),
        _ => {}
    });
    let expected: Vec<(usize, &str, bool)> = report
        .cases()
        .iter()
        .enumerate()
        .flat_map(|(index, case)| [(index, case.case.name, false), (index, case.case.name, true)])
        .collect();
    assert_eq!(seen, expected);
}

#[test]
fn expectations_are_held_against_what_happens() {
    let backend = open(MockOptions::new());
    let filter = Options::new().with_filter("identity.is_stable");
    let passes = run(&*backend, &filter.clone().with_expected_failure("identity.is_stable", "said to be broken"));
    assert!(!passes.is_success() && passes.failed() == 1, "{passes}");
    let misspelled = run(&*backend, &filter.clone().with_expected_failure("identity.is_stabel", "a misspelled name"));
    assert!(!misspelled.is_success() && misspelled.failed() == 0, "{misspelled}");
    assert_eq!(misspelled.unknown_expectations().len(), 1);
    let nothing = run(&*backend, &Options::new().with_filter("no such case"));
    assert!(!nothing.is_success(), "a run of no case proves nothing");
}

#[test]
fn a_failure_of_the_backend_is_reported_and_leaves_nothing_behind() {
    let options = MockOptions::new().with_fault("allocate", 2, highwater_hal::ErrorKind::Vendor);
    let backend = open(options);
    let before = backend.live_objects();
    let filter = Options::new().with_filter("copies.run_in_order");
    let report = run(&*backend, &filter.clone().with_expected_failure("copies.run_in_order", "an injected fault"));
    assert!(report.is_success() && report.expected_failures() == 1, "{report}");
    assert_eq!(backend.live_objects(), before);
    // The fault is used up, so the expectation is now outdated.
    let again = run(&*backend, &filter);
    assert!(again.is_success(), "{again}");
}
