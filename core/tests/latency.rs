//! Nothing waits that need not: with a slow device and slow handle creation, enqueueing and acquiring stay quick.

mod support;

use std::thread;
use std::time::{Duration, Instant};

use highwater_core::GemmShape;
use highwater_mock::MockOptions;
use support::{end, open, open_with_stream};

/// The quickest of a few tries: what the call needs, and not what else the machine was doing.
fn quickest(mut call: impl FnMut()) -> Duration {
    (0..5)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed()
        })
        .min()
        .unwrap()
}

#[test]
fn enqueueing_on_a_slow_device_returns_at_once_and_streams_overtake_each_other() {
    let latency = Duration::from_millis(50);
    let (_, _, device) = open(MockOptions::new().with_latency(latency));
    let (slow, quick) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (a, b, c) = (device.allocate(16).unwrap(), device.allocate(16).unwrap(), device.allocate::<f32>(16).unwrap());
    let shape = GemmShape::of::<f32>(4, 4, 4);
    drop(slow.blas().unwrap());
    let enqueue = quickest(|| slow.blas().unwrap().gemm(&shape, 1.0, &a, &b, 0.0, &c).unwrap());
    assert!(enqueue < Duration::from_millis(1), "{enqueue:?}");
    let enqueue = quickest(|| slow.fill(&c, 1.0).unwrap());
    assert!(enqueue < Duration::from_millis(1), "{enqueue:?}");

    let last_slow = slow.record().unwrap();
    assert!(!last_slow.is_complete().unwrap());
    let other = device.allocate::<u8>(1).unwrap();
    quick.fill(&other, 1).unwrap();
    let overtaking = quick.record().unwrap();
    assert!(!overtaking.is_complete().unwrap());
    overtaking.synchronize().unwrap();
    assert!(!last_slow.is_complete().unwrap(), "the stream with the longer queue is still at work");
    last_slow.synchronize().unwrap();
    assert_eq!(slow.download(&c).unwrap(), vec![1.0; 16]);
}

#[test]
fn dropping_buffers_and_streams_in_use_does_not_wait() {
    let (_, runtime, device, stream) = open_with_stream(MockOptions::new().with_latency(Duration::from_millis(100)));
    let buffer = device.allocate::<u8>(1 << 20).unwrap();
    let pinned = runtime.pinned::<u8>(1 << 20).unwrap();
    stream.copy_to_device(&pinned, &buffer).unwrap();
    let start = Instant::now();
    drop((buffer, pinned, stream));
    assert!(start.elapsed() < Duration::from_millis(50), "{:?}", start.elapsed());
    end(runtime, device);
}

#[test]
fn a_slow_creation_delays_nobody_else() {
    let slow = Duration::from_millis(200);
    let options = MockOptions::new().with_devices(2);
    let (gpu, runtime, _) = open(options);
    let streams: Vec<_> = (0..2).map(|device| runtime.device(device).unwrap().create_stream().unwrap()).collect();
    // This thread has a handle of each device; the thread below has to make one, which takes its time.
    streams.iter().for_each(|stream| drop(stream.blas().unwrap()));
    gpu.set_create_handle_latency(0, slow).unwrap();
    thread::scope(|scope| {
        let creation = scope.spawn(|| {
            let start = Instant::now();
            drop(streams[0].blas().unwrap());
            start.elapsed()
        });
        thread::sleep(slow / 4);
        let other_device = quickest(|| drop(streams[1].blas().unwrap()));
        let same_device = quickest(|| drop(streams[0].blas().unwrap()));
        // A new thread on the other device: it makes a handle there while the slow creation is under way.
        let new_thread = scope.spawn(|| quickest(|| drop(streams[1].blas().unwrap()))).join().unwrap();
        assert!(!creation.is_finished(), "the slow creation was to be under way all the time");
        for (what, took) in [("device 1", other_device), ("device 0 again", same_device), ("a new thread", new_thread)]
        {
            assert!(took < Duration::from_millis(1), "{what}: {took:?}");
        }
        assert!(creation.join().unwrap() >= slow);
    });
}
