use std::time::Instant;

use highwater_hal::numbers::Coded;
use highwater_hal::{
    AllocateOptions, Backend, BackendTag, BlasHandle, BlasKind, BlasOptions, CaptureMode, Completion, DataType,
    DeviceMemoryKind, DevicePtr, ErrorKind, EventOptions, FillPattern, Gemm, GemmShape, GraphExecId, GraphId, IdParts,
    ObjectId, Result, StreamId,
};
use highwater_mock::Operation;

use crate::rig::{Rig, at, end, kind, millis, small};

impl Rig {
    fn begin(&self, stream: StreamId) {
        self.gpu.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
    }

    fn end(&self, stream: StreamId) -> GraphId {
        end(&self.gpu, stream).unwrap()
    }

    /// Returns the executable graph of the commands that `record` enqueues.
    pub(crate) fn captured(&self, stream: StreamId, record: impl FnOnce()) -> GraphExecId {
        self.begin(stream);
        record();
        let graph = self.end(stream);
        let exec = self.gpu.instantiate_graph(graph).unwrap();
        self.gpu.destroy_graph(graph).unwrap();
        exec
    }

    pub(crate) fn launch(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        // SAFETY: tests keep what they recorded until the launch has completed, and launch on one stream at a time.
        unsafe { self.gpu.launch_graph(exec, stream) }
    }

    fn bytes(&self, block: DevicePtr, count: usize) -> Vec<u8> {
        self.download(block, count, self.stream)
    }

    fn set(&self, block: DevicePtr, value: u8, count: usize, stream: StreamId) -> Result<()> {
        self.fill(block, FillPattern::U8(value), count, stream)
    }

    /// Whatever happened before, the stream executes, and is in no capture.
    fn assert_works(&self, stream: StreamId) {
        let block = self.allocate(stream.device(), 64);
        assert!(!self.gpu.is_capturing(stream).unwrap());
        self.set(block, 9, 64, stream).unwrap();
        assert_eq!(self.download::<u8>(block, 64, stream), [9; 64]);
        self.free(stream.device(), block, None).unwrap();
    }
}

fn gemm(handle: &mut dyn BlasHandle, gemm: &Gemm) {
    // SAFETY: tests keep the blocks until the last launch has completed.
    unsafe { handle.gemm(gemm).unwrap() };
}

#[test]
fn the_workspace_of_a_handle_lives_as_long_as_the_graph() {
    let rig = Rig::new(small());
    let (ones, c) = (rig.upload(&[1f32; 16]), rig.upload(&[10f32; 16]));
    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    let product = Gemm::new(GemmShape::new(DataType::F32, 4, 4, 4), ones, ones, c).with_scale(1.0, 1.0);
    let exec = rig.captured(rig.stream, || gemm(&mut *handle, &product));
    let free = rig.gpu.memory_info(0).unwrap().free;
    drop(handle);
    assert_eq!(rig.gpu.memory_info(0).unwrap().free, free);
    rig.launch(exec, rig.stream).unwrap();
    assert_eq!(rig.download::<f32>(c, 16, rig.stream), [14.0; 16]);
    rig.gpu.destroy_graph_exec(exec).unwrap();
    rig.gpu.synchronize_device(0).unwrap();
    // The worker drops a command right after it has been counted as completed.
    let start = Instant::now();
    while rig.gpu.memory_info(0).unwrap().free == free {
        assert!(start.elapsed() < millis(10_000), "the workspace did not come back");
        std::thread::yield_now();
    }
}

#[test]
fn a_stream_of_another_device_may_join() {
    let rig = Rig::new(small().with_devices(2));
    let other = rig.stream(1);
    let (fork, join) = (rig.event(0), rig.event(1));
    let (block, there) = (rig.upload(&[0u8; 64]), rig.allocate(1, 64));
    let exec = rig.captured(rig.stream, || {
        rig.gpu.record_event(fork, rig.stream).unwrap();
        rig.gpu.stream_wait_event(other, fork).unwrap();
        rig.set(there, 5, 64, other).unwrap();
        rig.gpu.record_event(join, other).unwrap();
        rig.gpu.stream_wait_event(rig.stream, join).unwrap();
        rig.copy(at(0, block), at(1, there), 64, rig.stream).unwrap();
    });
    rig.launch(exec, rig.stream).unwrap();
    assert_eq!(rig.bytes(block, 64), [5; 64]);
    assert_eq!(kind(rig.launch(exec, other)), ErrorKind::WrongDevice);
}

#[test]
fn streams_may_be_joined_by_way_of_others_and_all_of_them_must() {
    let rig = Rig::new(small());
    let streams = [(); 3].map(|()| rig.stream(0));
    let (block, event) = (rig.allocate(0, 64), rig.event(0));
    let hand_over = |from: usize, to: usize| {
        rig.gpu.record_event(event, streams[from]).unwrap();
        rig.gpu.stream_wait_event(streams[to], event).unwrap();
    };
    // The second is waited for by the third, which the first waits for.
    rig.begin(streams[0]);
    hand_over(0, 1);
    rig.set(block, 1, 64, streams[1]).unwrap();
    hand_over(1, 2);
    rig.set(block, 2, 64, streams[2]).unwrap();
    hand_over(2, 0);
    rig.gpu.destroy_graph(rig.end(streams[0])).unwrap();
    // The same, and one more command that no stream waits for.
    rig.begin(streams[0]);
    hand_over(0, 1);
    hand_over(1, 2);
    hand_over(2, 0);
    rig.set(block, 3, 64, streams[1]).unwrap();
    assert_eq!(kind(end(&rig.gpu, streams[0])), ErrorKind::Capture);
    // One that joined and did nothing is to be waited for as well.
    rig.begin(streams[0]);
    hand_over(0, 1);
    assert_eq!(kind(end(&rig.gpu, streams[0])), ErrorKind::Capture);
    for stream in streams {
        rig.assert_works(stream);
    }
    assert_eq!(rig.gpu.live_objects().graphs, 0);
}

#[test]
fn a_capture_begins_once_and_ends_where_it_began() {
    let rig = Rig::new(small());
    let (second, event) = (rig.stream(0), rig.event(0));
    assert_eq!(kind(end(&rig.gpu, rig.stream)), ErrorKind::Capture);
    rig.begin(rig.stream);
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.stream_wait_event(second, event).unwrap();
    for stream in [rig.stream, second] {
        assert_eq!(kind(rig.gpu.begin_capture(stream, CaptureMode::Relaxed)), ErrorKind::Capture);
    }
    assert_eq!(kind(end(&rig.gpu, second)), ErrorKind::Capture);
    rig.gpu.record_event(event, second).unwrap();
    rig.gpu.stream_wait_event(rig.stream, event).unwrap();
    // None of that has lost it.
    rig.end(rig.stream);
    assert_eq!(kind(end(&rig.gpu, rig.stream)), ErrorKind::Capture);
    let legacy = StreamId::legacy_default(rig.gpu.identity().tag, 0);
    assert_eq!(kind(rig.gpu.begin_capture(legacy, CaptureMode::Relaxed)), ErrorKind::Capture);
    assert!(!rig.gpu.is_capturing(legacy).unwrap());
    rig.assert_works(rig.stream);
}

#[test]
fn handles_cannot_be_made_during_a_capture_where_the_device_says_so() {
    let rig = Rig::new(small().with_capabilities(|c| c.create_during_capture = false));
    let make = || rig.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).map(|_| ());
    let elsewhere = || std::thread::scope(|scope| scope.spawn(make).join().unwrap());
    for (mode, here, there) in [
        (CaptureMode::Global, false, false),
        (CaptureMode::ThreadLocal, false, true),
        (CaptureMode::Relaxed, true, true),
    ] {
        for (made, allowed) in [(&make as &dyn Fn() -> Result<()>, here), (&elsewhere, there)] {
            rig.gpu.begin_capture(rig.stream, mode).unwrap();
            let (made, graph) = (made(), end(&rig.gpu, rig.stream));
            for error in [made.err(), graph.err()] {
                assert_eq!(error.map(|error| error.kind()), (!allowed).then_some(ErrorKind::Capture), "{mode:?}");
            }
            rig.assert_works(rig.stream);
        }
    }
    make().unwrap();
    assert_eq!(rig.gpu.live_objects().handles, 0);
}

/// Each of these is refused and loses the capture, also for streams that joined; afterwards all of them work.
#[test]
fn what_loses_a_capture_is_refused_and_leaves_the_streams_working() {
    type Offence = fn(&Rig, StreamId, StreamId) -> Result<()>;
    let offences: [(&str, Offence); 9] = [
        ("asking for the stream", |rig, first, _| rig.gpu.query_stream(first).map(|_| ())),
        ("waiting for the stream", |rig, first, _| rig.gpu.synchronize_stream(first)),
        ("asking for a stream that joined", |rig, _, second| rig.gpu.query_stream(second).map(|_| ())),
        ("waiting for a stream that joined", |rig, _, second| rig.gpu.synchronize_stream(second)),
        ("waiting for the device", |rig, _, _| rig.gpu.synchronize_device(0)),
        ("asking for an event of the capture", |rig, first, _| {
            let event = rig.event(0);
            rig.gpu.record_event(event, first)?;
            rig.gpu.query_event(event).map(|_| ())
        }),
        ("waiting for an event of the capture", |rig, _, second| {
            let event = rig.event(0);
            rig.gpu.record_event(event, second)?;
            rig.gpu.synchronize_event(event)
        }),
        ("the time of an event of the capture", |rig, first, _| {
            let event = rig.gpu.create_event(0, &EventOptions::new().with_timing())?;
            rig.gpu.record_event(event, first)?;
            rig.gpu.event_elapsed_ns(event, event).map(|_| ())
        }),
        ("waiting for an event recorded outside", |rig, first, _| {
            let event = rig.event(0);
            rig.gpu.record_event(event, rig.stream)?;
            rig.gpu.synchronize_event(event)?;
            rig.gpu.stream_wait_event(first, event)
        }),
    ];
    for &mode in CaptureMode::ALL {
        for (what, offence) in offences {
            let rig = Rig::new(small());
            let (first, second, fork) = (rig.stream(0), rig.stream(0), rig.event(0));
            let block = rig.upload(&[7u8; 64]);
            rig.gpu.begin_capture(first, mode).unwrap();
            rig.set(block, 1, 64, first).unwrap();
            rig.gpu.record_event(fork, first).unwrap();
            rig.gpu.stream_wait_event(second, fork).unwrap();
            assert_eq!(kind(offence(&rig, first, second)), ErrorKind::Capture, "{what}");
            assert!(rig.gpu.is_capturing(first).unwrap() && rig.gpu.is_capturing(second).unwrap(), "{what}");
            for refused in [
                rig.set(block, 2, 64, first),
                rig.set(block, 2, 64, second),
                rig.gpu.record_event(fork, first),
                rig.gpu.stream_wait_event(second, fork),
            ] {
                assert_eq!(kind(refused), ErrorKind::Capture, "{what}");
            }
            let error = end(&rig.gpu, first).unwrap_err();
            assert_eq!((error.kind(), error.operation()), (ErrorKind::Capture, "end_capture"), "{what}");
            rig.assert_works(first);
            rig.assert_works(second);
            assert_eq!(rig.bytes(block, 64), [7; 64], "{what}: something recorded was executed");
            assert_eq!(rig.gpu.live_objects().graphs, 0);
        }
    }
}

#[test]
fn waiting_for_an_event_that_was_never_recorded_changes_nothing() {
    let rig = Rig::new(small());
    rig.begin(rig.stream);
    rig.gpu.stream_wait_event(rig.stream, rig.event(0)).unwrap();
    rig.end(rig.stream);
}

#[test]
fn two_captures_are_both_lost_when_they_meet() {
    let rig = Rig::new(small());
    let (first, second) = (rig.stream(0), rig.stream(0));
    let event = rig.event(0);
    rig.begin(first);
    rig.begin(second);
    rig.gpu.record_event(event, first).unwrap();
    assert_eq!(kind(rig.gpu.stream_wait_event(second, event)), ErrorKind::Capture);
    assert_eq!(kind(end(&rig.gpu, first)), ErrorKind::Capture);
    assert_eq!(kind(end(&rig.gpu, second)), ErrorKind::Capture);
    rig.assert_works(first);
    rig.assert_works(second);
}

#[test]
fn an_event_of_a_capture_is_never_reached_until_it_is_recorded_outside() {
    let rig = Rig::new(small());
    let (event, other) = (rig.event(0), rig.stream(0));
    let exec = rig.captured(rig.stream, || rig.gpu.record_event(event, rig.stream).unwrap());
    rig.launch(exec, rig.stream).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert_eq!(kind(rig.gpu.query_event(event)), ErrorKind::Capture);
    assert_eq!(kind(rig.gpu.synchronize_event(event)), ErrorKind::Capture);
    assert_eq!(kind(rig.gpu.stream_wait_event(other, event)), ErrorKind::Capture);
    rig.assert_works(other);
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.stream_wait_event(other, event).unwrap();
    rig.gpu.synchronize_stream(other).unwrap();
    rig.gpu.synchronize_event(event).unwrap();
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Complete);
    // A record in a capture that takes place after one outside moves the event too.
    rig.captured(rig.stream, || rig.gpu.record_event(event, rig.stream).unwrap());
    assert_eq!(kind(rig.gpu.query_event(event)), ErrorKind::Capture);
    rig.gpu.destroy_event(event).unwrap();
}

#[test]
fn memory_in_stream_order_is_refused_on_a_capturing_stream_and_loses_nothing() {
    let rig = Rig::new(small());
    let ordered = |stream| AllocateOptions::new(4096).with_kind(DeviceMemoryKind::StreamOrdered(stream));
    let block = rig.gpu.allocate(0, &ordered(rig.stream)).unwrap();
    let before = (rig.gpu.live_objects(), rig.gpu.memory_info(0).unwrap().free);
    rig.begin(rig.stream);
    rig.set(block, 4, 64, rig.stream).unwrap();
    assert_eq!(kind(rig.gpu.allocate(0, &ordered(rig.stream))), ErrorKind::Capture);
    assert_eq!(kind(rig.free(0, block, Some(rig.stream))), ErrorKind::Capture);
    assert_eq!((rig.gpu.live_objects(), rig.gpu.memory_info(0).unwrap().free), before);
    let other = rig.stream(0);
    let elsewhere = rig.gpu.allocate(0, &ordered(other)).unwrap();
    rig.free(0, elsewhere, Some(other)).unwrap();
    let exec = rig.gpu.instantiate_graph(rig.end(rig.stream)).unwrap();
    rig.launch(exec, rig.stream).unwrap();
    assert_eq!(rig.bytes(block, 64), [4; 64]);
    rig.free(0, block, Some(rig.stream)).unwrap();
}

#[test]
fn a_graph_of_another_backend_is_refused() {
    let rig = Rig::new(small());
    let exec = rig.captured(rig.stream, || {});
    // SAFETY: the ids are given to a backend that no runtime uses.
    let foreign = unsafe { GraphExecId::from_parts(IdParts { tag: BackendTag::next(), ..exec.parts() }) };
    assert_eq!(kind(rig.launch(foreign, rig.stream)), ErrorKind::InvalidHandle);
}

#[test]
fn a_launch_on_a_capturing_stream_is_refused_and_loses_nothing() {
    let rig = Rig::new(small());
    let (block, other) = (rig.upload(&[0u8; 64]), rig.stream(0));
    let inner = rig.captured(other, || rig.set(block, 1, 32, other).unwrap());
    let outer = rig.captured(rig.stream, || {
        assert_eq!(kind(rig.launch(inner, rig.stream)), ErrorKind::Capture);
        rig.set(block.offset(32), 2, 32, rig.stream).unwrap();
        rig.launch(inner, other).unwrap();
        rig.gpu.synchronize_stream(other).unwrap();
    });
    assert_eq!(rig.bytes(block, 64), [[1; 32], [0; 32]].concat());
    rig.launch(outer, rig.stream).unwrap();
    assert_eq!(rig.bytes(block, 64), [[1; 32], [2; 32]].concat());
}

#[test]
fn only_a_relaxed_capture_ends_on_another_thread() {
    let rig = Rig::new(small());
    for &mode in CaptureMode::ALL {
        rig.gpu.begin_capture(rig.stream, mode).unwrap();
        let end = || end(&rig.gpu, rig.stream);
        let graph = std::thread::scope(|scope| scope.spawn(end).join().unwrap());
        if mode == CaptureMode::Relaxed {
            graph.unwrap();
        } else {
            assert_eq!(kind(graph), ErrorKind::Capture);
            assert!(rig.gpu.is_capturing(rig.stream).unwrap());
            end().unwrap();
        }
        rig.assert_works(rig.stream);
    }
}

#[test]
fn destroying_a_stream_ends_or_loses_its_capture() {
    let rig = Rig::new(small());
    let (event, block) = (rig.event(0), rig.upload(&[7u8; 64]));
    let fork = |first, second| {
        rig.begin(first);
        rig.set(block, 1, 64, first).unwrap();
        rig.gpu.record_event(event, first).unwrap();
        rig.gpu.stream_wait_event(second, event).unwrap();
    };
    // The first one: the others are free again.
    let (first, second) = (rig.stream(0), rig.stream(0));
    fork(first, second);
    rig.gpu.destroy_stream(first).unwrap();
    rig.assert_works(second);
    assert_eq!(kind(rig.gpu.query_event(event)), ErrorKind::Capture);
    assert_eq!(kind(end(&rig.gpu, first)), ErrorKind::InvalidHandle);
    // Another one: the first still has to end it.
    fork(rig.stream, second);
    rig.gpu.destroy_stream(second).unwrap();
    assert!(rig.gpu.is_capturing(rig.stream).unwrap());
    assert_eq!(kind(end(&rig.gpu, rig.stream)), ErrorKind::Capture);
    rig.assert_works(rig.stream);
    rig.gpu.synchronize_device(0).unwrap();
    assert_eq!(rig.bytes(block, 64), [7; 64]);
    // And the backend, with captures open.
    rig.begin(rig.stream);
    let product = Gemm::new(GemmShape::new(DataType::F32, 2, 2, 2), block, block, block.offset(32));
    gemm(&mut *rig.blas(BlasKind::Blas, rig.stream), &product);
    drop(rig);
}

#[test]
fn a_refused_call_leaves_the_capture_as_it_was() {
    let rig = Rig::new(small());
    let block = rig.upload(&[0u8; 64]);
    rig.begin(rig.stream);
    rig.set(block, 1, 64, rig.stream).unwrap();
    rig.gpu.fail_call(Operation::Fill, 1, ErrorKind::Vendor).unwrap();
    assert_eq!(kind(rig.set(block, 2, 64, rig.stream)), ErrorKind::Vendor);
    assert_eq!(kind(rig.set(block, 2, 65, rig.stream)), ErrorKind::InvalidPointer);
    rig.gpu.fail_call(Operation::EndCapture, 1, ErrorKind::Vendor).unwrap();
    assert_eq!(kind(end(&rig.gpu, rig.stream)), ErrorKind::Vendor);
    let exec = rig.gpu.instantiate_graph(rig.end(rig.stream)).unwrap();
    rig.launch(exec, rig.stream).unwrap();
    assert_eq!(rig.bytes(block, 64), [1; 64]);
}
