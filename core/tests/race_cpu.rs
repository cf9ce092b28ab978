//! The race finder sees what the CPU does with page-locked memory through the owning types, and what core's locks order.

mod support;

use std::sync::mpsc;
use std::thread;

use highwater_core::{
    Access, Backend, DeviceBuffer, GemmShape, HostPtr, Location, MemoryCopy, PinnedBuffer, Result, Runtime, Stream,
};
use highwater_mock::races::RaceKind;
use highwater_mock::{MockGpu, MockOptions, Operation};
use support::{end, open, open_with_stream};

const LEN: usize = 64;

/// Copies the values into page-locked memory, as other code does: Highwater does not see it.
fn copy_unseen(gpu: &MockGpu, stream: &Stream, buffer: &DeviceBuffer<u32>, to: HostPtr) {
    let source = Location::Device { device: 0, ptr: buffer.ptr() };
    // SAFETY: both blocks are large enough and live until the stream is done. The mock's accesses are atomic, and no test
    // looks at the values before that.
    unsafe { gpu.copy(&MemoryCopy::new(Location::Host(to), source, LEN * 4), stream.id()).unwrap() };
}

/// Returns the operations of the only race.
fn only_race(gpu: &MockGpu) -> [Operation; 2] {
    let races = gpu.races();
    assert_eq!(races.len(), 1, "{races:?}");
    assert_eq!((races[0].kind(), races[0].overlap().bytes), (RaceKind::Unordered, LEN as u64 * 4));
    let text = races[0].to_string();
    assert!(text.contains("by the CPU") && text.contains("race_cpu.rs:"), "{text}");
    [races[0].first().operation(), races[0].second().operation()]
}

type CpuAccess = fn(&mut PinnedBuffer<u32>);

#[test]
fn each_access_during_a_copy_that_was_not_noted_is_a_race() {
    let accesses: [CpuAccess; 4] = [
        |pinned| assert_eq!(pinned.read().unwrap().len(), LEN),
        |pinned| assert_eq!(pinned.write().unwrap().len(), LEN),
        |pinned| pinned.read_with(|values| assert_eq!(values.len(), LEN)).unwrap(),
        |pinned| pinned.write_with(|values| assert_eq!(values.len(), LEN)).unwrap(),
    ];
    for access in accesses {
        for is_noted in [false, true] {
            let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_race_detector());
            let buffer = device.allocate::<u32>(LEN).unwrap();
            let mut pinned = runtime.pinned::<u32>(LEN).unwrap();
            access(&mut pinned);
            copy_unseen(&gpu, &stream, &buffer, pinned.ptr());
            if is_noted {
                stream.note_pinned_use(&pinned, Access::Write).unwrap();
            }
            access(&mut pinned);
            if is_noted {
                gpu.check_races().unwrap();
            } else {
                // A closure reports its beginning and its end, and both may race with the copy.
                let first = &gpu.races()[0];
                assert_eq!(first.second().operation(), Operation::CpuAccess);
                assert!(gpu.race_count() <= 2);
            }
            stream.synchronize().unwrap();
            drop(buffer);
            end(runtime, (device, stream, pinned));
        }
    }
}

#[test]
fn a_copy_into_memory_that_a_closure_reads_is_a_race() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_race_detector());
    let buffer = device.allocate::<u32>(LEN).unwrap();
    let pinned = runtime.pinned::<u32>(LEN).unwrap();
    let ptr = pinned.ptr();
    pinned.read_with(|_| copy_unseen(&gpu, &stream, &buffer, ptr)).unwrap();
    assert_eq!(only_race(&gpu), [Operation::Copy, Operation::CpuAccess]);
    stream.synchronize().unwrap();
    end(runtime, (device, stream, buffer, pinned));
}

#[test]
fn a_read_beside_copies_that_read_is_no_race() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_race_detector());
    let buffer = device.allocate::<u32>(LEN).unwrap();
    let mut pinned = runtime.pinned::<u32>(LEN).unwrap();
    pinned.write().unwrap().fill(7);
    stream.copy_to_device(&pinned, &buffer).unwrap();
    assert_eq!(pinned.read().unwrap()[0], 7);
    pinned.write().unwrap().fill(8);
    assert_eq!(stream.download(&buffer).unwrap(), [7; LEN]);
    gpu.check_races().unwrap();
    assert!(gpu.calls(Operation::CpuAccess) >= 4, "{}", gpu.calls(Operation::CpuAccess));
    end(runtime, (device, stream, buffer, pinned));
}

#[test]
fn without_a_finder_no_access_is_noted() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    assert!(gpu.host_observer().is_none());
    runtime.pinned::<u32>(LEN).unwrap().write().unwrap().fill(1);
    assert_eq!(gpu.calls(Operation::CpuAccess), 0);
    end(runtime, (device, stream));
}

/// Works with everything that pools hand from one thread to the next.
fn work(runtime: &Runtime, rounds: usize) -> Result<()> {
    const N: usize = 8;
    let device = runtime.device(0)?;
    let shape = GemmShape::of::<f32>(N, N, N);
    for round in 0..rounds {
        let stream = device.create_stream()?;
        let (ones, product) = (stream.upload(&[1.0_f32; N * N])?, stream.allocate::<f32>(N * N)?);
        stream.blas()?.gemm(&shape, 1.0, &ones, &ones, 0.0, &product)?;
        let mut pinned = runtime.pinned::<f32>(N * N)?;
        stream.copy_to_host(&product, &mut pinned)?;
        match round % 4 {
            // Everything is dropped while it is in use.
            0 => {}
            1 => assert_eq!(pinned.read()?[0], N as f32),
            2 => assert_eq!(stream.download(&product)?, [N as f32; N * N]),
            _ => runtime.trim_device_memory()?,
        }
    }
    Ok(())
}

#[test]
fn what_cores_locks_hand_from_thread_to_thread_is_ordered() {
    for options in [MockOptions::new(), MockOptions::new().with_latency(std::time::Duration::from_micros(50))] {
        let (gpu, runtime, device) = open(options.with_thread_races());
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| work(&runtime, 24).unwrap());
            }
        });
        gpu.check_races().unwrap();
        end(runtime, device);
        gpu.check_races().unwrap();
    }
}

#[test]
fn buffers_that_are_dropped_in_another_thread_are_ordered() {
    let (gpu, runtime, device) = open(MockOptions::new().with_thread_races());
    let (sender, receiver) = mpsc::channel::<(Stream, DeviceBuffer<u32>, PinnedBuffer<u32>)>();
    thread::scope(|scope| {
        scope.spawn(|| receiver.into_iter().for_each(drop));
        for round in 0..40 {
            let stream = device.create_stream().unwrap();
            let buffer = stream.allocate::<u32>(LEN).unwrap();
            let mut pinned = runtime.pinned::<u32>(LEN).unwrap();
            pinned.write().unwrap().fill(round);
            stream.copy_to_device(&pinned, &buffer).unwrap();
            sender.send((stream, buffer, pinned)).unwrap();
        }
        drop(sender);
    });
    gpu.check_races().unwrap();
    end(runtime, device);
}

/// The value is written on one stream, and read on another by a thread that learned of it through a channel.
fn through_a_channel(options: MockOptions, declares: bool) -> Vec<[Operation; 2]> {
    let (gpu, runtime, device) = open(options);
    let (one, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = device.allocate::<u32>(LEN).unwrap();
    let (sender, receiver) = mpsc::channel();
    let ready = std::sync::Barrier::new(2);
    thread::scope(|scope| {
        let (ready, other, buffer) = (&ready, &other, &buffer);
        scope.spawn(move || {
            // The first call comes before the fill.
            other.is_complete().unwrap();
            ready.wait();
            let waited: highwater_mock::races::HandOver = receiver.recv().unwrap();
            if declares {
                waited.take_over();
            }
            assert_eq!(other.download(buffer).unwrap(), [5; LEN]);
        });
        ready.wait();
        one.fill(buffer, 5_u32).unwrap();
        one.synchronize().unwrap();
        sender.send(gpu.hand_over()).unwrap();
    });
    let races = gpu.races();
    one.synchronize().unwrap();
    other.synchronize().unwrap();
    drop(buffer);
    end(runtime, (device, one, other));
    races.iter().map(|race| [race.first().operation(), race.second().operation()]).collect()
}

#[test]
fn a_channel_orders_threads_once_it_is_declared() {
    assert_eq!(through_a_channel(MockOptions::new().with_thread_races(), false), [[Operation::Fill, Operation::Copy]]);
    assert!(through_a_channel(MockOptions::new().with_thread_races(), true).is_empty());
    // Without the option, a wait counts for all threads.
    assert!(through_a_channel(MockOptions::new().with_race_detector(), false).is_empty());
}
