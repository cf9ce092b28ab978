//! Faults by chance, freed memory kept back and poisoned, and broken rules of use that are found.
//!
//! A stream is held up for as long as a test wants by an event of a backend with endless latency.

use std::ptr::NonNull;
use std::time::Duration;

use highwater_hal::{
    AllocateOptions, Backend, BlasKind, BlasOptions, DataType, DeviceMemoryKind, DevicePtr, Epilogue, ErrorKind,
    FillPattern, Gemm, GemmShape, HostOptions, HostPtr, Location, PlanArguments, PlanOptions, StreamId, Transport,
    Workspace,
};
use highwater_mock::{MockOptions, Operation, POISON};

use crate::rig::{Rig, at, kind, small};

/// Holds a stream up until the result is dropped.
fn hold_up(rig: &Rig, stream: StreamId) -> Rig {
    let holder = Rig::new(small().with_latency(Duration::from_secs(1 << 30)));
    let event = rig.interprocess_event();
    let opened = holder.open_event_of(rig, event);
    holder.gpu.record_event(opened, holder.stream).unwrap();
    rig.gpu.stream_wait_event(stream, event).unwrap();
    rig.gpu.destroy_event(event).unwrap();
    holder
}

/// A second address of a block that was made to be shared.
fn alias(rig: &Rig, block: DevicePtr) -> DevicePtr {
    rig.ipc().open_memory(0, &rig.export(block)).unwrap()
}

/// Returns the violations so far as text, and checks their number.
fn violations(rig: &Rig, count: usize) -> Vec<String> {
    let violations: Vec<_> = rig.gpu.violations().iter().map(ToString::to_string).collect();
    assert_eq!((violations.len(), rig.gpu.violation_count()), (count, count as u64), "{violations:#?}");
    violations
}

fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is missing in `{text}`");
    }
}

#[test]
fn a_block_that_is_freed_while_a_copy_is_queued_is_found() {
    let rig = Rig::new(small().with_checks());
    let (block, pinned) = (rig.allocate(0, 1000), rig.pinned(1000));
    let holder = hold_up(&rig, rig.stream);
    rig.copy(at(0, block.offset(8)), Location::Host(pinned), 100, rig.stream).unwrap();
    violations(&rig, 0);
    rig.free(0, block, None).unwrap();
    let found = violations(&rig, 1);
    let stream = format!("on {:?}", rig.stream);
    let touched = format!("writes 100 bytes at {:?} of device 0", block.offset(8));
    assert_says(&found[0], &["free: ", &format!("at {block:?} of device 0 were freed"), "`copy`", &stream, &touched]);
    assert_eq!(rig.gpu.violations()[0].operation, Operation::Free);
    // The next allocation of the block is reported as well.
    assert_eq!(rig.allocate(0, 1000), block);
    assert_says(&violations(&rig, 2)[1], &["allocate: 1000 bytes at", "were handed out", "`copy`"]);
    drop(holder);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    rig.free(0, block, None).unwrap();
    violations(&rig, 2);
}

#[test]
fn a_violation_names_the_default_stream_of_a_thread() {
    let rig = Rig::new(small().with_checks());
    let (block, stream) = (rig.allocate(0, 1000), StreamId::per_thread_default(rig.gpu.identity().tag, 0));
    let holder = hold_up(&rig, stream);
    rig.fill(block, FillPattern::U8(1), 1, stream).unwrap();
    rig.free(0, block, None).unwrap();
    let name = "on the default stream of a thread on device 0, which writes 1 byte at";
    assert_says(&violations(&rig, 1)[0], &["`fill`", name]);
    drop(holder);
    rig.gpu.synchronize_stream(stream).unwrap();
}

#[test]
fn page_locked_memory_that_is_freed_while_a_copy_is_queued_is_found_and_stays_mapped() {
    let rig = Rig::new(small().with_checks());
    let (block, pinned, other) = (rig.allocate(0, 4096), rig.pinned(4096), rig.pinned(4096));
    rig.fill(block, FillPattern::U8(1), 4096, rig.stream).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    let holder = hold_up(&rig, rig.stream);
    rig.copy(Location::Host(pinned), at(0, block), 4096, rig.stream).unwrap();
    rig.copy(at(0, block), Location::Host(other), 4096, rig.stream).unwrap();
    // SAFETY: both are used by copies, which is what the test is about; in test mode they stay mapped.
    unsafe {
        rig.host.free(pinned).unwrap();
        rig.host.free(other).unwrap();
    }
    // Far more blocks come and go than are kept.
    for _ in 0..200 {
        let block = rig.pinned(4096);
        assert!(block != pinned && block != other);
        // SAFETY: nobody uses the block.
        unsafe { rig.host.free(block).unwrap() };
    }
    let found = violations(&rig, 2);
    let start = format!("host_free: 4096 bytes of page-locked memory at {:#x} were freed", pinned.address());
    assert_says(&found[0], &[&start, "which writes 4096 bytes"]);
    assert_says(&found[1], &["host_free", "which reads 4096 bytes"]);
    drop(holder);
    // The second copy carried the poison.
    assert_eq!(rig.download::<u32>(block, 1024, rig.stream), [POISON; 1024]);
}

#[test]
fn registered_memory_must_not_be_unregistered_too_early() {
    let rig = Rig::new(small().with_checks());
    let mut memory = vec![0u8; 4096];
    let ptr = HostPtr::new(NonNull::from(&mut memory[0]));
    let block = rig.allocate(0, 4096);
    // SAFETY: the vector outlives the copy, and is not touched before that.
    unsafe { rig.host.register(ptr, 4096, &HostOptions::new()).unwrap() };
    let holder = hold_up(&rig, rig.stream);
    rig.copy(Location::Host(ptr), at(0, block), 64, rig.stream).unwrap();
    // SAFETY: as above: the memory stays where it is.
    unsafe { rig.host.unregister(ptr).unwrap() };
    assert_says(&violations(&rig, 1)[0], &["host_unregister", "`copy`", "writes 64 bytes"]);
    drop(holder);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
}

#[test]
fn every_operand_of_products_is_watched() {
    let rig = Rig::new(small().with_checks());
    let other = rig.stream(0);
    let [a, b, c, d, bias, workspace] = [(); 6].map(|()| rig.allocate(0, 1024));
    let shape = GemmShape::new(DataType::F32, 4, 4, 4);
    let mut handle = rig.blas(BlasKind::Lt, other);
    // SAFETY: the workspace is freed too early, which is what the test is about; its bytes stay device memory.
    unsafe { handle.set_workspace(Some(Workspace { ptr: workspace, bytes: 1024 })).unwrap() };
    let plan = handle.create_plan(&PlanOptions::new(shape, Epilogue::Bias, 1024)).unwrap();
    let mut arguments = PlanArguments::new(a, b, d, Some(bias));
    arguments.c = c;
    arguments.beta = 1.0;
    let holder = hold_up(&rig, other);
    // SAFETY: as above.
    unsafe { handle.run_plan(plan, &arguments).unwrap() };
    let mut count = 0;
    for (block, verb, commands) in [
        (a, "reads", 1),
        (b, "reads", 1),
        (c, "reads", 1),
        (d, "writes", 1),
        (bias, "reads", 1),
        (workspace, "writes", 2),
    ] {
        rig.free(0, block, None).unwrap();
        count += commands;
        let found = violations(&rig, count);
        let start = format!("at {block:?} of device 0 were freed while `run_plan` was queued or running on {other:?}");
        assert_says(&found[count - commands], &[&start, verb]);
    }
    drop(holder);
    rig.gpu.synchronize_stream(other).unwrap();
}

#[test]
fn memory_that_is_closed_while_work_uses_it_is_found_and_loses_the_device() {
    let rig = Rig::new(small().with_checks());
    let opened = alias(&rig, rig.shareable(5000));
    let again = rig.gpu.live_objects().mappings;
    let holder = hold_up(&rig, rig.stream);
    rig.fill(opened, FillPattern::U8(1), 5000, rig.stream).unwrap();
    // SAFETY: the memory is used, which is what the test is about; the mock refuses the access.
    unsafe { rig.ipc().close_memory(0, opened).unwrap() };
    assert_says(&violations(&rig, 1)[0], &["close_memory", "were closed", "`fill`", "writes 5000 bytes"]);
    assert_eq!((again, rig.gpu.live_objects().mappings), (1, 0));
    drop(holder);
    assert_eq!(kind(rig.gpu.synchronize_stream(rig.stream)), ErrorKind::DeviceLost);
}

#[test]
fn a_free_in_the_order_of_one_stream_does_not_wait_for_another() {
    let rig = Rig::new(small().with_checks());
    let other = rig.stream(0);
    let options = AllocateOptions::new(512).with_kind(DeviceMemoryKind::StreamOrdered(rig.stream));
    let [early, late] = [(); 2].map(|()| rig.gpu.allocate(0, &options).unwrap());
    let holder = hold_up(&rig, other);
    rig.fill(early, FillPattern::U8(1), 512, other).unwrap();
    rig.free(0, early, Some(rig.stream)).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert_says(&violations(&rig, 1)[0], &["were freed", "`fill`", &format!("{other:?}")]);
    // This one waits for the other stream.
    let event = rig.event(0);
    rig.fill(late, FillPattern::U8(1), 512, other).unwrap();
    rig.gpu.record_event(event, other).unwrap();
    rig.gpu.stream_wait_event(rig.stream, event).unwrap();
    rig.fill(late, FillPattern::U8(2), 512, rig.stream).unwrap();
    rig.free(0, late, Some(rig.stream)).unwrap();
    drop(holder);
    rig.gpu.synchronize_device(0).unwrap();
    violations(&rig, 1);
}

#[test]
fn stream_ordered_memory_is_reused_before_its_free_is_reached() {
    let ordered = |rig: &Rig, bytes| {
        let options = AllocateOptions::new(bytes).with_kind(DeviceMemoryKind::StreamOrdered(rig.stream));
        rig.gpu.allocate(0, &options).unwrap()
    };
    let fill = |rig: &Rig, block, value, stream| rig.fill(block, FillPattern::U8(value), 512, stream).unwrap();
    for waits in [false, true] {
        let rig = Rig::new(small().with_checks());
        let (other, event) = (rig.stream(0), rig.event(0));
        let earlier = ordered(&rig, 1024);
        let holder = hold_up(&rig, rig.stream);
        rig.fill(earlier, FillPattern::U8(1), 1024, rig.stream).unwrap();
        rig.free(0, earlier, Some(rig.stream)).unwrap();
        // Plain memory does not reuse it, nor does memory in the order of another stream.
        let elsewhere = AllocateOptions::new(512).with_kind(DeviceMemoryKind::StreamOrdered(other));
        assert!(rig.allocate(0, 512) != earlier && rig.gpu.allocate(0, &elsewhere).unwrap() != earlier);
        let (block, behind) = (ordered(&rig, 512), ordered(&rig, 512));
        assert_eq!((block, behind), (earlier, earlier.offset(512)));
        if waits {
            rig.gpu.record_event(event, rig.stream).unwrap();
            rig.gpu.stream_wait_event(other, event).unwrap();
        }
        fill(&rig, behind, 3, rig.stream);
        fill(&rig, block, 2, other);
        if !waits {
            rig.gpu.synchronize_stream(other).unwrap();
        }
        drop(holder);
        rig.gpu.synchronize_device(0).unwrap();
        // A stream that does not wait meets the work of the earlier block.
        let expected = if waits { 2 } else { 1 };
        assert_eq!(rig.download::<u8>(block, 512, rig.stream), [expected; 512]);
        assert_eq!(rig.download::<u8>(behind, 512, rig.stream), [3; 512]);
        violations(&rig, 0);
        for block in [block, behind] {
            rig.free(0, block, Some(rig.stream)).unwrap();
        }
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        assert_eq!(rig.gpu.memory_info(0).unwrap().free, (64 << 20) - 2 * 512);
    }
}

#[test]
fn work_of_a_block_that_was_reused_is_still_blamed() {
    let rig = Rig::new(small().with_checks());
    let other = rig.stream(0);
    let options = AllocateOptions::new(512).with_kind(DeviceMemoryKind::StreamOrdered(rig.stream));
    let block = rig.gpu.allocate(0, &options).unwrap();
    let (late, in_order) = (hold_up(&rig, other), hold_up(&rig, rig.stream));
    rig.fill(block, FillPattern::U8(1), 512, other).unwrap();
    rig.free(0, block, Some(rig.stream)).unwrap();
    assert_eq!(rig.gpu.allocate(0, &options).unwrap(), block);
    rig.fill(block, FillPattern::U8(2), 512, rig.stream).unwrap();
    violations(&rig, 0);
    drop(in_order);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert_says(&violations(&rig, 1)[0], &["were freed", "`fill`", &format!("{other:?}")]);
    drop(late);
}

#[test]
fn who_waits_is_never_blamed() {
    let rig = Rig::new(small().with_checks().with_devices(2).with_quarantine_frees(0));
    let (other, far) = (rig.stream(0), rig.stream(1));
    let mut handle = rig.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    let event = rig.event(0);
    for round in 0..200usize {
        let stream = if round % 2 == 0 { rig.stream } else { other };
        let [a, b, c] = [(); 3].map(|()| rig.allocate(0, 64 * 64 * 4));
        let (pinned, there) = (rig.pinned(64 * 64 * 4), rig.allocate(1, 64 * 64 * 4));
        rig.fill(a, FillPattern::U32(1f32.to_bits()), 64 * 64, stream).unwrap();
        rig.copy(at(0, b), at(0, a), 64 * 64 * 4, stream).unwrap();
        handle.set_stream(stream).unwrap();
        // SAFETY: the blocks are freed after the work on them was waited for.
        unsafe { handle.gemm(&Gemm::new(GemmShape::new(DataType::F32, 64, 64, 64), a, b, c)).unwrap() };
        rig.copy(Location::Host(pinned), at(0, c), 64 * 64 * 4, stream).unwrap();
        rig.gpu.record_event(event, stream).unwrap();
        rig.gpu.stream_wait_event(far, event).unwrap();
        rig.copy(at(1, there), at(0, c), 64 * 64 * 4, far).unwrap();
        match round % 3 {
            0 => rig.gpu.synchronize_event(event).unwrap(),
            1 => rig.gpu.synchronize_stream(stream).unwrap(),
            _ => rig.gpu.synchronize_device(0).unwrap(),
        }
        rig.free(0, a, None).unwrap();
        rig.free(0, b, None).unwrap();
        // SAFETY: the copy has completed.
        unsafe {
            assert_eq!(*pinned.as_ptr().cast::<f32>(), 64.0);
            rig.host.free(pinned).unwrap();
        }
        rig.gpu.synchronize_stream(far).unwrap();
        rig.free(0, c, None).unwrap();
        rig.free(1, there, None).unwrap();
    }
    violations(&rig, 0);
}

#[test]
fn without_test_mode_nothing_is_found() {
    let rig = Rig::new(small());
    let block = rig.allocate(0, 1000);
    let holder = hold_up(&rig, rig.stream);
    rig.fill(block, FillPattern::U8(1), 1000, rig.stream).unwrap();
    rig.free(0, block, None).unwrap();
    violations(&rig, 0);
    drop(holder);
}

#[test]
fn freed_device_memory_is_poisoned() {
    let rig = Rig::new(MockOptions::parse("checks=on,memory=64MiB").unwrap());
    let block = rig.shareable(100_000);
    let opened = alias(&rig, block);
    rig.fill(block, FillPattern::U32(7), 25_000, rig.stream).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    rig.free(0, block, None).unwrap();
    assert!(rig.download::<u32>(opened, 25_000, rig.stream) == [7; 25_000], "an importer keeps the bytes");
    let next = rig.allocate(0, 25 * 4096);
    assert_eq!(next, block, "the test wants the place back");
    assert!(rig.download::<u32>(next, 25 * 1024, rig.stream) == [POISON; 25 * 1024], "the poison is missing");
    assert!(f32::from_bits(POISON).is_nan() && f64::from_bits(u64::from(POISON) << 32 | u64::from(POISON)).is_nan());
    // In stream order, and at a size that is no multiple of the pattern's.
    let options = AllocateOptions::new(333).with_kind(DeviceMemoryKind::StreamOrdered(rig.stream));
    let ordered = rig.gpu.allocate(0, &options).unwrap();
    rig.fill(ordered, FillPattern::U8(7), 333, rig.stream).unwrap();
    rig.free(0, ordered, Some(rig.stream)).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    let next = rig.allocate(0, 333);
    assert_eq!(next, ordered, "the test wants the place back");
    let bytes: Vec<u8> = POISON.to_ne_bytes().into_iter().cycle().take(333).collect();
    assert_eq!(rig.download::<u8>(next, 333, rig.stream), bytes);
    violations(&rig, 0);
}

#[test]
fn freed_page_locked_memory_is_poisoned() {
    let rig = Rig::new(small().with_checks());
    let pinned = rig.pinned(1001);
    // SAFETY: the block holds as many bytes; after the free it stays mapped, which is what the test is about.
    let bytes = unsafe {
        pinned.as_ptr().write_bytes(1, 1001);
        rig.host.free(pinned).unwrap();
        std::slice::from_raw_parts(pinned.as_ptr(), 1001).to_vec()
    };
    let poison: Vec<u8> = POISON.to_ne_bytes().into_iter().cycle().take(1001).collect();
    assert_eq!(bytes, poison);
    assert_eq!(rig.gpu.live_objects().host_allocations, 0);
    assert_eq!(
        kind(rig.copy(at(0, rig.allocate(0, 8)), Location::Host(pinned), 8, rig.stream)),
        ErrorKind::InvalidPointer
    );
}

#[test]
fn work_that_comes_too_late_does_not_meet_the_next_block() {
    let late_fill = |options: MockOptions| {
        let rig = Rig::new(options);
        let (block, other) = (rig.allocate(0, 4096), rig.stream(0));
        let holder = hold_up(&rig, rig.stream);
        rig.fill(block, FillPattern::U8(9), 4096, rig.stream).unwrap();
        rig.free(0, block, None).unwrap();
        let next = rig.allocate(0, 4096);
        rig.fill(next, FillPattern::U8(1), 4096, other).unwrap();
        rig.gpu.synchronize_stream(other).unwrap();
        drop(holder);
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        rig.download::<u8>(next, 1, other)[0]
    };
    assert_eq!(late_fill(small()), 9, "the test has to show the harm");
    assert_eq!(late_fill(small().with_quarantine_frees(1)), 1);
    assert_eq!(late_fill(small().with_quarantine_bytes(4096)), 1);
    assert_eq!(late_fill(MockOptions::parse("memory=1MiB,quarantine-bytes=64KiB").unwrap()), 1);
}

#[test]
fn memory_that_is_kept_back_counts_as_free_and_can_be_had() {
    let rig = Rig::new(small().with_quarantine_frees(100));
    let block = rig.allocate(0, 64 << 20);
    rig.free(0, block, None).unwrap();
    assert_eq!(rig.gpu.memory_info(0).unwrap().free, 64 << 20);
    assert_eq!(rig.allocate(0, 64 << 20), block);
}

#[test]
fn faults_by_chance_are_the_same_for_the_same_seed() {
    let failing = |options: MockOptions| {
        let rig = Rig::new(options);
        let pattern: Vec<_> = (0..300).map(|_| rig.gpu.memory_info(0).is_err()).collect();
        let failed = pattern.iter().filter(|&&failed| failed).count() as u64;
        assert_eq!((rig.gpu.faults(Operation::MemoryInfo), rig.gpu.calls(Operation::MemoryInfo)), (failed, 300));
        pattern
    };
    let one_in_five = small().with_chance("memory_info", 200_000, ErrorKind::Vendor);
    let pattern = failing(one_in_five.clone().with_seed(3));
    assert!((20..120).contains(&pattern.iter().filter(|&&failed| failed).count()), "{pattern:?}");
    assert_eq!(failing(one_in_five.clone().with_seed(3)), pattern);
    assert_ne!(failing(one_in_five.with_seed(4)), pattern);
    let text = "memory=1MiB,seed=3,chance=memory_info:200000:device-lost";
    assert_eq!(failing(MockOptions::parse(text).unwrap()), pattern);
    let rig = Rig::new(small());
    rig.gpu.fail_by_chance(Operation::ExportMemory, 1_000_000, ErrorKind::PermissionDenied).unwrap();
    // SAFETY: the block is alive.
    let refused = unsafe { rig.ipc().export_memory(0, rig.shareable(1), Transport::Descriptor) };
    assert_eq!(kind(refused), ErrorKind::PermissionDenied);
    assert_eq!(kind(rig.gpu.fail_by_chance("export", 1, ErrorKind::Vendor)), ErrorKind::InvalidArgument);
}
