//! The fault sweep on the mock: a sample of the calls of every case.

use std::sync::Arc;

use highwater_conformance::{Launcher, Options, serve_peer, sweep};
use highwater_hal::Backend;
use highwater_mock::{MockGpu, MockOptions};

#[test]
#[ignore = "the second process of cases about sharing, which start it themselves"]
fn peer() {
    let opened = || -> highwater_hal::Result<Arc<dyn Backend>> { Ok(MockGpu::open(MockOptions::new())?) };
    if let Some(served) = serve_peer(opened) {
        served.unwrap();
    }
}

#[test]
fn a_sample_of_refused_calls_leaves_nothing_behind() {
    let launcher = Launcher::current_executable().unwrap();
    let launcher = launcher.with_arguments(["sweep::peer", "--exact", "--ignored", "--nocapture"]);
    let backend = MockGpu::open(MockOptions::new()).unwrap();
    let mut retried = 0;
    // The groups whose objects differ. The program sweeps every group and every call.
    for (group, sample) in [
        ("memory.", 127),
        ("mapped.", 61),
        ("host.", 127),
        ("destroy", 61),
        ("blas.stream-bound", 101),
        ("capture.", 607),
        ("sharing.", 401),
    ] {
        let options = Options::new().with_launcher(launcher.clone()).with_filter(group);
        let report = sweep(&*backend, &options, sample);
        assert!(report.is_success(), "{report}");
        retried += report.retried;
    }
    assert!(retried > 5, "only {retried} releases were refused");
}

#[test]
fn every_call_of_a_case_is_refused_once() {
    let backend = MockGpu::open(MockOptions::new()).unwrap();
    let report = sweep(&*backend, &Options::new().with_filter("ids.streams_and_events_count"), 1);
    assert!(report.is_success(), "{report}");
    assert_eq!((report.cases, report.calls_swept, report.not_reached), (1, report.calls, 0), "{report:?}");
    // Eight objects are made and destroyed.
    assert!(report.calls >= 16 && report.retried >= 8, "{report:?}");
    assert_eq!(backend.live_objects().total(), 0);
}
