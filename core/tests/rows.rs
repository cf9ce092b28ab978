//! Two-dimensional copies between buffers, slices, page-locked memory and addresses.

mod support;

use std::time::Duration;

use highwater_core::{CopyShape, ErrorKind, Runtime};
use highwater_mock::{MockOptions, Operation};
use support::{end, kind, open_with_stream};

const MIB: usize = 1 << 20;

/// Returns what `dst` holds after a copy of rows from `src`.
fn copied(dst: &[u8], src: &[u8], shape: CopyShape) -> Vec<u8> {
    let mut bytes = dst.to_vec();
    for (to, from) in shape.rows() {
        bytes[to..to + shape.width].copy_from_slice(&src[from..from + shape.width]);
    }
    bytes
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251 + seed) as u8).collect()
}

#[test]
fn rows_arrive_and_the_bytes_between_them_stay() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_checks());
    gpu.set_latency(Duration::from_millis(2));
    const BYTES: usize = 1000;
    let (old, new) = (pattern(BYTES, 1), pattern(BYTES, 2));
    for shape in [
        CopyShape::new(10, 9).with_src_pitch(100).with_dst_pitch(64),
        CopyShape::new(33, 7).with_dst_pitch(40),
        CopyShape::new(8, 100).with_src_pitch(9),
        CopyShape::new(100, 9),
        CopyShape::new(100, 1).with_src_pitch(500),
        CopyShape::new(0, 9).with_src_pitch(100),
    ] {
        let mut pinned = runtime.pinned::<u8>(BYTES).unwrap();
        pinned.write().unwrap().copy_from_slice(&new);
        let (first, second) = (stream.upload(&old).unwrap(), stream.upload(&old).unwrap());
        // From the host, on the device, and back, each 3 bytes behind the beginning.
        stream.copy_2d_to_device(pinned.slice(3..BYTES).unwrap(), first.slice(3..BYTES).unwrap(), shape).unwrap();
        stream.copy_2d(&first, second.slice(1..BYTES).unwrap(), shape).unwrap();
        pinned.write().unwrap().copy_from_slice(&old); // waits for the copy of it
        stream.copy_2d_to_host(&first, pinned.slice_mut(2..BYTES).unwrap(), shape).unwrap();
        let shifted =
            |to: usize, from: usize, src: &[u8]| [&old[..to], &copied(&old[to..], &src[from..], shape)].concat();
        let on_device = shifted(3, 3, &new);
        assert_eq!(pinned.read().unwrap()[..], shifted(2, 0, &on_device), "{shape:?}");
        assert_eq!(stream.download(&first).unwrap(), on_device, "{shape:?}");
        assert_eq!(stream.download(&second).unwrap(), shifted(1, 0, &on_device), "{shape:?}");
        // By addresses.
        pinned.write().unwrap().copy_from_slice(&new);
        // SAFETY: the rows are in the buffer, and `write` and `read` wait for the copies.
        unsafe { stream.copy_2d_from_raw(pinned.ptr().offset(3), first.slice(3..BYTES).unwrap(), shape).unwrap() };
        pinned.write().unwrap().copy_from_slice(&old);
        // SAFETY: as above.
        unsafe { stream.copy_2d_to_raw(&first, pinned.ptr().offset(2), shape).unwrap() };
        assert_eq!(pinned.read().unwrap()[..], shifted(2, 0, &on_device), "{shape:?} by addresses");
    }
    assert_eq!(gpu.violations(), []);
    end(runtime, (device, stream));
}

#[test]
fn rows_are_split_at_the_borders_of_registrations() {
    let options = MockOptions::new().with_checks().with_capabilities(|can| can.register_piece_bytes = 2 * MIB);
    let (gpu, runtime, device, stream) = open_with_stream(options);
    let mut pinned = runtime.pinned::<u8>(5 * MIB).unwrap();
    assert_eq!(pinned.registrations().count(), 3);
    let content = pattern(5 * MIB, 3);
    // The first row of each pair lies in two registrations, unless the rows are short.
    for (width, pitch, two_dimensional, flat) in
        [(1000, 4096, 3, 0), (3 * MIB / 2, 3 * MIB / 2 + 1, 1, 4), (64, 64, 3, 0)]
    {
        pinned.write().unwrap().copy_from_slice(&content);
        let shape = CopyShape::new(width, 5 * MIB / pitch).with_src_pitch(pitch);
        let on_device = device.allocate::<u8>(shape.dst_bytes().unwrap()).unwrap();
        let before = [Operation::Copy2d, Operation::Copy].map(|operation| gpu.calls(operation));
        stream.copy_2d_to_device(&pinned, &on_device, shape).unwrap();
        let after = [Operation::Copy2d, Operation::Copy].map(|operation| gpu.calls(operation));
        let made = [after[0] - before[0], after[1] - before[1]];
        if width < MIB {
            assert_eq!(made, [two_dimensional, flat], "{shape:?}");
        } else {
            assert!(made[1] >= flat, "{made:?}");
        }
        let expected = copied(&vec![0; shape.dst_bytes().unwrap()], &content, shape);
        assert!(stream.download(&on_device).unwrap() == expected, "{shape:?}");
        // Back, with the pitches exchanged.
        let back = CopyShape::new(width, 5 * MIB / pitch).with_dst_pitch(pitch);
        pinned.write().unwrap().fill(9);
        stream.copy_2d_to_host(&on_device, &mut pinned, back).unwrap();
        assert!(pinned.read().unwrap()[..] == copied(&vec![9; 5 * MIB], &expected, back), "{back:?}");
    }
    assert_eq!(gpu.violations(), []);
    end(runtime, (device, stream, pinned));
}

#[test]
fn shapes_that_do_not_fit_are_refused_with_fault_and_remedy() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_devices(2));
    let (buffer, other) = (device.allocate::<f32>(100).unwrap(), device.allocate::<f32>(100).unwrap());
    let far = runtime.device(1).unwrap().allocate::<f32>(100).unwrap();
    let mut pinned = runtime.pinned::<f32>(100).unwrap();
    let narrow = CopyShape::new(16, 4).with_src_pitch(15);
    let error = stream.copy_2d(&buffer, &other, narrow).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(
        error.message().contains("pitch of the source is 15") && error.message().contains("width of 16"),
        "{error}"
    );
    assert!(error.hint().contains("from the beginning of one row"), "{error}");
    // 401 bytes of 400, in the source and in the destination.
    let long = CopyShape::new(1, 5).with_src_pitch(100);
    let error = stream.copy_2d(&buffer, &other, long).unwrap_err();
    assert!(
        error
            .message()
            .contains("the copy of 5 rows of 1 byte with a pitch of 100 bytes leaves the source, which has 400"),
        "{error}"
    );
    assert!(error.hint().contains("bytes"), "{error}");
    let endless = CopyShape::new(1, usize::MAX).with_dst_pitch(usize::MAX);
    for shape in [narrow, CopyShape::new(4, 26).with_dst_pitch(16), endless] {
        assert_eq!(kind(stream.copy_2d_to_device(&pinned, &buffer, shape)), ErrorKind::InvalidArgument);
        assert_eq!(kind(stream.copy_2d_to_host(&buffer, &mut pinned, shape)), ErrorKind::InvalidArgument);
    }
    for shape in [narrow, endless] {
        // SAFETY: nothing is enqueued.
        let raw = unsafe {
            [stream.copy_2d_from_raw(pinned.ptr(), &buffer, shape), stream.copy_2d_to_raw(&buffer, pinned.ptr(), shape)]
        };
        assert_eq!(raw.map(kind), [ErrorKind::InvalidArgument; 2]);
    }
    let rows = CopyShape::new(16, 4).with_dst_pitch(32);
    // SAFETY: nothing is enqueued.
    let outside = unsafe { stream.copy_2d_to_raw(&buffer, pinned.ptr().offset(500), rows) };
    assert_eq!(kind(outside), ErrorKind::InvalidPointer);
    assert_eq!(kind(stream.copy_2d_to_device(&pinned, &far, rows)), ErrorKind::WrongDevice);
    let of_other = Runtime::new(gpu.clone()).unwrap();
    assert_eq!(
        kind(stream.copy_2d_to_device(&of_other.pinned(100).unwrap(), &buffer, rows)),
        ErrorKind::InvalidPointer
    );
    // Columns of one buffer, which do not overlap unless they meet.
    let columns = CopyShape::new(16, 5).with_src_pitch(64).with_dst_pitch(64);
    stream.copy_2d(&buffer, buffer.slice(4..100).unwrap(), columns).unwrap();
    let error = stream.copy_2d(&buffer, buffer.slice(3..100).unwrap(), columns).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("overlap"), "{error}");
    assert_eq!(gpu.calls(Operation::Copy2d), 1);
    stream.copy_2d(&buffer, &far, rows).unwrap();
    stream.synchronize().unwrap();
    drop(of_other);
    end(runtime, (device, stream, buffer, other, far, pinned));
}

#[test]
fn rows_are_recorded_and_a_graph_keeps_their_memory() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_checks());
    let shape = CopyShape::new(4, 8).with_src_pitch(8).with_dst_pitch(12);
    let content = pattern(64, 5);
    let (between, back) = (device.allocate::<u8>(96).unwrap(), device.allocate::<u8>(96).unwrap());
    stream.fill(&back, 0xaa_u8).unwrap();
    let mut pinned = runtime.pinned::<u8>(64).unwrap();
    pinned.write().unwrap().copy_from_slice(&content);
    let packed = CopyShape::new(4, 8).with_src_pitch(12).with_dst_pitch(12);
    let mut graph = stream
        .capture(|stream| {
            stream.copy_2d_to_device(&pinned, &between, shape)?;
            stream.copy_2d(&between, &back, packed)
        })
        .unwrap();
    drop((pinned, between));
    let others: Vec<_> = (0..4).map(|_| runtime.pinned::<u8>(64).unwrap()).collect();
    assert_eq!(stream.download(&back).unwrap(), [0xaa; 96], "nothing was executed");
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&back).unwrap(), copied(&[0xaa; 96], &content, shape));
    assert_eq!(gpu.violations(), []);
    end(runtime, (device, stream, graph, others, back));
}

#[test]
fn rows_of_different_columns_do_not_race() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_race_detector());
    let other = device.create_stream().unwrap();
    let (from, to) = (stream.upload(&pattern(640, 1)).unwrap(), device.allocate::<u8>(640).unwrap());
    other.wait(&stream.record().unwrap()).unwrap();
    let columns = CopyShape::new(32, 10).with_src_pitch(64).with_dst_pitch(64);
    stream.copy_2d(&from, &to, columns).unwrap();
    other.copy_2d(from.slice(32..640).unwrap(), to.slice(32..640).unwrap(), columns).unwrap();
    gpu.check_races().unwrap();
    // One byte of each row, in both.
    other
        .copy_2d(
            from.slice(31..640).unwrap(),
            to.slice(31..640).unwrap(),
            CopyShape::new(1, 10).with_src_pitch(64).with_dst_pitch(64),
        )
        .unwrap();
    let races = gpu.races();
    assert!(!races.is_empty());
    assert_eq!([races[0].first().operation(), races[0].second().operation()], [Operation::Copy2d; 2]);
    stream.synchronize().unwrap();
    other.synchronize().unwrap();
    end(runtime, (device, stream, other, from, to));
}

#[test]
fn a_copy_of_rows_that_is_refused_leaves_its_buffers_usable() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_checks());
    let (mut pinned, buffer) = (runtime.pinned::<u8>(64).unwrap(), device.allocate::<u8>(64).unwrap());
    let shape = CopyShape::new(4, 8).with_src_pitch(8).with_dst_pitch(8);
    for call in 0..2 {
        gpu.fail_call(Operation::Copy2d, 1, ErrorKind::Vendor).unwrap();
        let refused = match call {
            0 => stream.copy_2d_to_device(&pinned, &buffer, shape),
            _ => stream.copy_2d(&buffer, &device.allocate(64).unwrap(), shape),
        };
        assert_eq!(kind(refused), ErrorKind::Vendor);
    }
    pinned.write().unwrap().fill(3);
    stream.fill(&buffer, 1_u8).unwrap();
    stream.copy_2d_to_device(&pinned, &buffer, shape).unwrap();
    assert_eq!(stream.download(&buffer).unwrap(), copied(&[1; 64], &[3; 64], shape));
    assert_eq!(gpu.violations(), []);
    end(runtime, (device, stream, pinned, buffer));
}
