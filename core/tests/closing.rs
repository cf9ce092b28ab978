//! The end of a runtime within a limit.

mod support;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use highwater_core::{Backend, ErrorKind};
use highwater_mock::MockOptions;
use support::open_with_stream;

/// More than any test waits.
const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_runtime_that_nothing_uses_ends_at_once_and_one_in_use_when_the_last_object_is_dropped() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let buffer = stream.upload(&[1_u8; 64]).unwrap();
    let pinned = runtime.pinned::<u8>(64).unwrap();
    let (release, released) = mpsc::channel::<()>();
    let task = thread::spawn(move || {
        released.recv().unwrap();
        drop((device, stream, buffer, pinned));
    });
    let closing = thread::spawn(move || runtime.close_within(LONG));
    assert!(gpu.live_objects().total() > 0, "the runtime ended while objects of it were alive");
    release.send(()).unwrap();
    assert_eq!(closing.join().unwrap().unwrap().total(), 0);
    task.join().unwrap();
    assert_eq!(gpu.live_objects().total(), 0);

    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    drop((device, stream));
    assert_eq!(runtime.close_within(LONG).unwrap().total(), 0);
    assert_eq!(gpu.live_objects().total(), 0);
}

#[test]
fn objects_that_are_alive_at_the_limit_are_named_and_keep_working() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let pinned = runtime.pinned::<u8>(64).unwrap();
    for limit in [Duration::ZERO, Duration::from_millis(10)] {
        let begun = Instant::now();
        let error = device.runtime().clone().close_within(limit).unwrap_err();
        assert!(begun.elapsed() >= limit);
        assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidState, "close_within"));
        // The device, the stream, the runtime and the pinned buffer.
        assert!(
            error
                .message()
                .starts_with("4 other objects of the runtime are alive; with the pools, the backend counts "),
            "{error}"
        );
        assert!(error.message().contains("1 stream") && error.hint().contains("drop its devices"), "{error}");
    }
    assert_eq!(stream.download(&stream.upload(&[3_u8; 8]).unwrap()).unwrap(), [3; 8]);
    drop((device, stream, pinned));
    assert_eq!(runtime.close_within(LONG).unwrap().total(), 0);
    assert_eq!(gpu.live_objects().total(), 0);
}

#[test]
fn a_device_that_does_not_end_its_work_delays_no_caller_for_longer_than_the_limit() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let buffer = device.allocate::<u8>(64).unwrap();
    gpu.set_latency(Duration::from_secs(1));
    stream.fill(&buffer, 1_u8).unwrap();
    drop((device, stream, buffer));
    let error = runtime.close_within(Duration::from_millis(20)).unwrap_err();
    gpu.set_latency(Duration::ZERO);
    assert_eq!(error.kind(), ErrorKind::InvalidState);
    assert!(error.message().contains("devices have not done their work within"), "{error}");
    assert!(error.message().contains("the rest of 20ms"), "{error}");
    assert!(error.hint().contains("end the process"), "{error}");
    assert!(gpu.live_objects().total() > 0, "the close waited");
    // The thread goes on.
    let begun = Instant::now();
    while gpu.live_objects().total() > 0 || Arc::strong_count(&gpu) > 1 {
        assert!(begun.elapsed() < LONG, "{:?}", gpu.live_objects());
        thread::yield_now();
    }
}

#[test]
fn a_closure_of_the_notifier_may_end_the_runtime_within_a_limit() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let (sender, ended) = mpsc::channel();
    stream.fill(&device.allocate::<u8>(64).unwrap(), 1_u8).unwrap();
    stream.record().unwrap().on_done(move |done| sender.send((done, runtime.close_within(LONG))).unwrap());
    drop((device, stream));
    let (done, closed) = ended.recv_timeout(LONG).unwrap();
    done.unwrap();
    assert_eq!(closed.unwrap().total(), 0);
    assert_eq!(gpu.live_objects().total(), 0);
}
