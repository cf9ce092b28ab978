//! Device memory that is allocated inside a capture: it serves the capture, then only its graph.

use std::sync::Arc;

use highwater_core::{
    Backend, Device, DeviceBuffer, DeviceMemoryOptions, DeviceMemoryStatistics, Error, ErrorKind, Graph, Result,
    Runtime, RuntimeOptions, Stream,
};
use highwater_mock::{MockGpu, MockOptions};

const MIB: usize = 1 << 20;

fn open(mock: MockOptions, plain: bool) -> (Arc<MockGpu>, Runtime, Device) {
    let gpu = MockGpu::open(mock).unwrap();
    let memory = DeviceMemoryOptions::new().with_plain_allocations(plain);
    let options = RuntimeOptions::new().with_device_memory(memory);
    let runtime = Runtime::with_options(gpu.clone(), &options).unwrap();
    let device = runtime.device(0).unwrap();
    (gpu, runtime, device)
}

fn memory(runtime: &Runtime) -> DeviceMemoryStatistics {
    runtime.statistics().device_memory
}

fn end(gpu: &MockGpu, runtime: Runtime) {
    gpu.check_races().unwrap();
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert_eq!(gpu.live_objects().total(), 0);
}

/// Records `rounds` fills of a buffer each, one after another, and copies them to the results.
fn record(stream: &Stream, results: &[DeviceBuffer<u8>]) -> Result<(Graph, Vec<u64>)> {
    let mut addresses = Vec::new();
    let graph = stream.capture(|stream| {
        for (value, result) in (1..).zip(results) {
            let scratch = stream.allocate::<u8>(result.len())?;
            addresses.push(scratch.ptr().get());
            stream.fill(&scratch, value)?;
            stream.copy(&scratch, result)?;
        }
        Ok(())
    })?;
    Ok((graph, addresses))
}

#[test]
fn a_block_dropped_in_the_capture_serves_its_next_request_and_no_other() {
    for plain in [false, true] {
        let (gpu, runtime, device) = open(MockOptions::new().with_race_detector(), plain);
        let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let results: Vec<_> = (0..5).map(|_| device.allocate::<u8>(MIB).unwrap()).collect();
        let (mut graph, addresses) = record(&stream, &results).unwrap();
        assert!(addresses.iter().all(|address| *address == addresses[0]), "plain: {plain}, {addresses:x?}");
        let held = memory(&runtime);
        for _ in 0..3 {
            graph.launch(&other).unwrap();
            // Takes whatever the pool considers free, and writes it while the graph runs.
            let writers: Vec<_> = [&stream, &other]
                .into_iter()
                .flat_map(|stream| (0..3).map(move |_| (stream, stream.allocate::<u8>(MIB).unwrap())))
                .collect();
            for (stream, buffer) in &writers {
                assert_ne!(buffer.ptr().get(), addresses[0]);
                stream.fill(buffer, 99).unwrap();
            }
            drop(writers);
            runtime.trim().unwrap();
            stream.wait(&other.record().unwrap()).unwrap();
            for (value, result) in (1..).zip(&results) {
                assert!(stream.download(result).unwrap().iter().all(|byte| *byte == value));
            }
            other.wait(&stream.record().unwrap()).unwrap();
        }
        device.synchronize().unwrap();
        runtime.trim().unwrap();
        assert_eq!(memory(&runtime).held_bytes, held.held_bytes, "only the graph's memory is left");
        drop(graph);
        device.synchronize().unwrap();
        runtime.trim().unwrap();
        assert_eq!(memory(&runtime).held_bytes, 0, "{:?}", memory(&runtime));
        drop((results, stream, other, device));
        end(&gpu, runtime);
    }
}

#[test]
fn a_buffer_outlives_the_graph_that_writes_it() {
    for plain in [false, true] {
        let (gpu, runtime, device) = open(MockOptions::new().with_race_detector(), plain);
        let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let mut made = None;
        let mut graph = stream
            .capture(|stream| {
                let buffer = stream.allocate::<u32>(1000)?;
                stream.fill(&buffer, 7)?;
                made = Some(buffer);
                Ok(())
            })
            .unwrap();
        let buffer = made.unwrap();
        graph.launch(&stream).unwrap();
        // The first use waits for the launch.
        assert_eq!(other.download(&buffer).unwrap(), [7; 1000]);
        stream.wait(&other.record().unwrap()).unwrap();
        graph.launch(&stream).unwrap();
        drop(graph);
        runtime.trim().unwrap();
        assert_eq!(stream.download(&buffer).unwrap(), [7; 1000]);
        assert_eq!(memory(&runtime).live_blocks, 1);
        drop(buffer);
        device.synchronize().unwrap();
        runtime.trim().unwrap();
        assert_eq!(memory(&runtime).held_bytes, 0, "plain: {plain}, {:?}", memory(&runtime));
        drop((stream, other, device));
        end(&gpu, runtime);
    }
}

/// The block that another stream of the capture uses may have belonged to work that is recorded just before.
#[test]
fn the_first_use_on_another_stream_of_the_capture_records_a_wait() {
    for seed in 0..20 {
        let (gpu, runtime, device) = open(MockOptions::new().with_race_detector().with_schedule(seed), false);
        let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let results = [device.allocate::<u8>(MIB).unwrap(), device.allocate::<u8>(MIB).unwrap()];
        let mut graph = stream
            .capture(|stream| {
                other.wait(&stream.record()?)?;
                let first = stream.allocate::<u8>(MIB)?;
                stream.fill(&first, 1)?;
                stream.copy(&first, &results[0])?;
                let address = first.ptr();
                drop(first);
                let second = stream.allocate::<u8>(MIB)?;
                assert_eq!(second.ptr(), address);
                other.fill(&second, 2)?;
                other.copy(&second, &results[1])?;
                stream.wait(&other.record()?)
            })
            .unwrap();
        for _ in 0..2 {
            graph.launch(&stream).unwrap();
        }
        assert_eq!(stream.download(&results[0]).unwrap(), vec![1; MIB]);
        assert_eq!(stream.download(&results[1]).unwrap(), vec![2; MIB]);
        drop((graph, results, stream, other, device));
        end(&gpu, runtime);
    }
}

#[test]
fn an_abandoned_capture_gives_its_memory_back() {
    let (gpu, runtime, device) = open(MockOptions::new().with_race_detector(), false);
    let stream = device.create_stream().unwrap();
    let mut kept = None;
    for _ in 0..100 {
        let refused = stream.capture(|stream| {
            let (small, large) = (stream.allocate::<u8>(100)?, stream.allocate::<u8>(10 * MIB)?);
            stream.fill(&large, 1)?;
            kept = Some(small);
            Err(Error::new(ErrorKind::InvalidArgument, "record", "given up"))
        });
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
        // A capture takes only memory whose last work is known to be done.
        stream.synchronize().unwrap();
    }
    assert!(memory(&runtime).peak_held_bytes <= 30 * MIB as u64, "{:?}", memory(&runtime));
    // What is left of the last capture is an ordinary buffer.
    let kept = kept.unwrap();
    stream.fill(&kept, 3).unwrap();
    assert_eq!(stream.download(&kept).unwrap(), [3; 100]);
    drop(kept);
    device.synchronize().unwrap();
    runtime.trim().unwrap();
    assert_eq!(memory(&runtime).held_bytes, 0, "{:?}", memory(&runtime));
    drop((stream, device));
    end(&gpu, runtime);
}

#[test]
fn threads_allocate_in_one_capture_and_beside_it() {
    let (gpu, runtime, device) = open(MockOptions::new().with_race_detector(), false);
    let (stream, beside) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    for _ in 0..20 {
        let graph = stream
            .capture(|stream| {
                // A stream that takes no part has its own memory.
                let own = beside.allocate::<u8>(3 * MIB)?;
                beside.fill(&own, 1)?;
                std::thread::scope(|scope| {
                    let worker = || {
                        for round in 0..20 {
                            let buffer = stream.allocate::<u8>(1 << (10 + round))?;
                            stream.fill(&buffer, 1)?;
                        }
                        Ok(())
                    };
                    let threads: [_; 3] = std::array::from_fn(|_| scope.spawn(worker));
                    threads.into_iter().try_for_each(|thread| thread.join().unwrap())
                })
            })
            .unwrap();
        drop(graph);
    }
    drop((stream, beside, device));
    end(&gpu, runtime);
}

#[test]
fn a_device_that_creates_nothing_in_a_capture_serves_what_is_there() {
    let mock = MockOptions::new().with_race_detector().with_capabilities(|c| c.create_during_capture = false);
    let (gpu, runtime, device) = open(mock, false);
    let (stream, beside) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    drop(beside.allocate::<u8>(MIB).unwrap());
    let graph = stream
        .capture(|stream| {
            let refused = stream.allocate::<u8>(MIB).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Capture);
            assert!(refused.to_string().contains("before the capture"), "{refused}");
            beside.allocate::<u8>(MIB).map(drop)
        })
        .unwrap();
    drop((graph, stream, beside, device));
    end(&gpu, runtime);
}
