//! Memory, addresses and raw handles go to the next owner as early as the contract allows.

use highwater_hal::{
    AllocateOptions, Backend, BlasKind, Completion, DeviceMemoryKind, DevicePtr, FillPattern, ObjectId, StreamId,
};
use highwater_mock::MockOptions;

use crate::rig::{Rig, end, small};

const BYTES: usize = 1000;

/// A rig with a gap of 4096 bytes in the memory of its device, and the last blocks before the free memory.
fn with_a_gap<const N: usize>(options: MockOptions) -> (Rig, DevicePtr, [DevicePtr; N]) {
    let rig = Rig::new(options);
    let gap = rig.allocate(0, 4096);
    let last = [(); N].map(|()| rig.allocate(0, BYTES));
    rig.free(0, gap, None).unwrap();
    (rig, gap, last)
}

fn in_order_of(stream: StreamId, bytes: usize) -> AllocateOptions {
    AllocateOptions::new(bytes).with_kind(DeviceMemoryKind::StreamOrdered(stream))
}

#[test]
fn a_freed_block_goes_to_the_next_request_of_its_size() {
    let (rig, gap, blocks) = with_a_gap::<4>(small());
    // Freed neighbors merge, and each returns as it was, the last one first.
    [blocks[1], blocks[3], blocks[0]].into_iter().for_each(|block| rig.free(0, block, None).unwrap());
    assert_eq!([(); 3].map(|()| rig.allocate(0, BYTES)), [blocks[0], blocks[3], blocks[1]]);
    assert_eq!(rig.allocate(0, 4096), gap);
}

#[test]
fn a_quarantine_keeps_a_freed_block_back() {
    let (rig, _, [last]) = with_a_gap(small().with_quarantine_frees(1));
    rig.free(0, last, None).unwrap();
    assert_ne!(rig.allocate(0, BYTES), last);
}

#[test]
fn a_late_write_meets_the_next_block() {
    let (rig, _, [block]) = with_a_gap(small().with_held_streams());
    let late = rig.stream(0);
    rig.fill(block, FillPattern::U8(1), BYTES, late).unwrap();
    rig.free(0, block, None).unwrap(); // The mistake: the fill is outstanding.
    let next = rig.allocate(0, BYTES);
    assert_eq!(next, block);
    rig.fill(next, FillPattern::U8(2), BYTES, rig.stream).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    rig.gpu.release_stream(late).unwrap();
    assert_eq!(rig.download::<u8>(next, BYTES, rig.stream), [1; BYTES]);
}

#[test]
fn stream_ordered_memory_is_reused_with_the_earlier_work_outstanding() {
    let rig = Rig::new(small().with_held_streams());
    let block = rig.gpu.allocate(0, &in_order_of(rig.stream, 4096)).unwrap();
    rig.fill(block, FillPattern::U8(1), 4096, rig.stream).unwrap();
    rig.free(0, block, Some(rig.stream)).unwrap();
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Pending);
    // Another stream must not have it.
    let other = rig.stream(0);
    assert_ne!(rig.gpu.allocate(0, &in_order_of(other, 4096)).unwrap(), block);
    assert_ne!(rig.allocate(0, 4096), block);
    let half = rig.gpu.allocate(0, &in_order_of(rig.stream, 2048)).unwrap();
    let rest = rig.gpu.allocate(0, &in_order_of(rig.stream, 2048)).unwrap();
    assert_eq!([half, rest], [block, block.offset(2048)]);
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Pending);
}

#[test]
fn memory_of_a_destroyed_stream_is_not_reused_by_the_stream_with_its_raw_handle() {
    let rig = Rig::new(small().with_held_streams());
    let gone = rig.stream(0);
    let raw = rig.gpu.raw_stream(gone).unwrap();
    let block = rig.gpu.allocate(0, &in_order_of(gone, 4096)).unwrap();
    rig.fill(block, FillPattern::U8(1), 4096, gone).unwrap();
    rig.free(0, block, Some(gone)).unwrap();
    rig.gpu.destroy_stream(gone).unwrap();
    let next = rig.stream(0);
    assert_eq!(rig.gpu.raw_stream(next).unwrap(), raw);
    assert_ne!(rig.gpu.allocate(0, &in_order_of(next, 4096)).unwrap(), block, "the fill is outstanding");
}

#[test]
fn page_locked_memory_comes_again_at_its_address() {
    let bytes = 256 << 10;
    const TRIES: usize = 50;
    // Another test rarely maps something at a freed address meanwhile.
    let comes_again = || {
        let rig = Rig::new(small());
        let blocks = [(); 4].map(|()| rig.pinned(bytes));
        // SAFETY: nothing uses the blocks.
        let free = |block| unsafe { rig.host.free(block).unwrap() };
        [blocks[0], blocks[3], blocks[2]].into_iter().for_each(free);
        let again = [(); 3].map(|()| rig.pinned(bytes));
        free(blocks[1]);
        assert_ne!(rig.pinned(2 * bytes), blocks[1], "another size");
        again == [blocks[2], blocks[3], blocks[0]]
    };
    let times = (0..TRIES).filter(|_| comes_again()).count();
    assert!(times > TRIES / 2, "freed blocks came again in the order of their frees {times} times of {TRIES}");
}

#[test]
fn reserved_addresses_and_opened_memory_come_again_at_once() {
    let rig = Rig::new(small());
    let granularity = rig.gpu.capabilities(0).unwrap().mapped_memory_granularity;
    let reserve = |pieces| rig.gpu.reserve_addresses(0, pieces * granularity).unwrap();
    let ranges = [reserve(2), reserve(1), reserve(2)];
    // SAFETY: no memory is mapped there.
    let free = |range, pieces| unsafe { rig.gpu.free_addresses(0, range, pieces * granularity).unwrap() };
    free(ranges[0], 2);
    free(ranges[2], 2);
    assert_eq!([reserve(2), reserve(2)], [ranges[2], ranges[0]]);
    free(ranges[1], 1);
    assert!(!ranges.contains(&reserve(3)));
    assert_eq!(reserve(1), ranges[1]);

    let (one, other) = (rig.shareable(4096), rig.shareable(4096));
    let open = |block| rig.ipc().open_memory(0, &rig.export(block)).unwrap();
    let opened = open(one);
    // SAFETY: no work uses the memory.
    unsafe { rig.ipc().close_memory(0, opened).unwrap() };
    assert_eq!(open(other), opened);
    assert_ne!(open(one), opened);
}

#[test]
fn raw_handles_of_destroyed_objects_go_to_the_next_ones() {
    let rig = Rig::new(small().with_held_streams());
    let block = rig.allocate(0, BYTES);
    let stream = rig.stream(0);
    // Outstanding work does not keep the raw handle.
    rig.fill(block, FillPattern::U8(1), BYTES, stream).unwrap();
    let raw = rig.gpu.raw_stream(stream).unwrap();
    rig.gpu.destroy_stream(stream).unwrap();
    let next = rig.stream(0);
    assert_eq!(rig.gpu.raw_stream(next).unwrap(), raw);
    // SAFETY: the stream lives until the wrapper is destroyed.
    let wrapper = unsafe { rig.gpu.stream_from_raw(0, raw).unwrap() };
    rig.fill(block, FillPattern::U8(2), BYTES, wrapper).unwrap();
    assert_eq!(rig.gpu.query_stream(next).unwrap(), Completion::Pending);
    rig.gpu.destroy_stream(wrapper).unwrap();
    rig.gpu.synchronize_device(0).unwrap();

    let event = rig.event(0);
    let raw = rig.gpu.raw_event(event).unwrap();
    rig.gpu.record_event(event, rig.stream).unwrap();
    rig.gpu.destroy_event(event).unwrap();
    let next = rig.event(0);
    assert_eq!(rig.gpu.raw_event(next).unwrap(), raw);
    // SAFETY: the event lives until the wrapper is destroyed.
    let wrapper = unsafe { rig.gpu.event_from_raw(0, raw).unwrap() };
    assert_eq!(rig.gpu.query_event(wrapper).unwrap(), Completion::Complete, "the new event was never recorded");

    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    let raw = handle.raw();
    handle.destroy().unwrap();
    let next = rig.blas(BlasKind::Lt, rig.stream);
    assert_eq!(next.raw(), raw);
    drop(handle);
    assert_ne!(rig.blas(BlasKind::Blas, rig.stream).raw(), raw, "the handle lives");
}

#[test]
fn slots_of_ids_are_reused_and_ids_are_not() {
    fn check<I: ObjectId + PartialEq>(create: impl Fn() -> I, destroy: impl Fn(I)) {
        let old = create();
        destroy(old);
        let new = create();
        assert_eq!(new.parts().slot, old.parts().slot);
        assert!(new != old && new.parts().generation > old.parts().generation);
        destroy(new);
    }
    let rig = Rig::new(small());
    let gpu = &rig.gpu;
    check(|| rig.stream(0), |stream| gpu.destroy_stream(stream).unwrap());
    check(|| rig.event(0), |event| gpu.destroy_event(event).unwrap());
    let record = || {
        gpu.begin_capture(rig.stream, highwater_hal::CaptureMode::ThreadLocal).unwrap();
        end(gpu, rig.stream).unwrap()
    };
    check(record, |graph| gpu.destroy_graph(graph).unwrap());
    let graph = record();
    check(|| gpu.instantiate_graph(graph).unwrap(), |exec| gpu.destroy_graph_exec(exec).unwrap());
    let options = highwater_hal::PhysicalMemoryOptions::new(gpu.capabilities(0).unwrap().mapped_memory_granularity);
    check(|| gpu.create_memory(0, &options).unwrap(), |memory| gpu.destroy_memory(memory).unwrap());
}
