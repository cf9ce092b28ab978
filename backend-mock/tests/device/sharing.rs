//! Memory that several processes use.

use std::os::fd::OwnedFd;

use highwater_hal::{
    AllocateOptions, Backend, BlasKind, DataType, Descriptor, DeviceMemoryKind, DevicePtr, ErrorKind, FillPattern,
    Gemm, GemmShape, MemoryHandle, PhysicalMemoryOptions, Transport, Transports,
};
use highwater_mock::MockOptions;

use crate::peer::{self, Channel, Peer};
use crate::rig::{Rig, at, kind, small};

const BYTES: usize = 10_000;

fn close(rig: &Rig, opened: DevicePtr) -> highwater_hal::Result<()> {
    // SAFETY: tests synchronize before they close; an address that is not open is what the mock refuses.
    unsafe { rig.ipc().close_memory(0, opened) }
}

/// How many mappings of this process are of the file with this inode.
fn mappings_of(inode: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode.to_string())).count()
}

/// Returns the names that this process has open or mapped in `/dev/shm`. Memory files have no name there or anywhere.
fn in_dev_shm() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("/dev/shm/")).map(str::to_owned);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let target = std::fs::read_link(entry.ok()?.path()).ok()?;
        target.starts_with("/dev/shm").then(|| target.display().to_string())
    });
    mapped.chain(open).collect()
}

#[test]
fn what_one_process_writes_the_other_reads() {
    const TEST: &str = "sharing::what_one_process_writes_the_other_reads";
    if let Some(parent) = peer::parent() {
        return worker(&parent);
    }
    let rig = Rig::new(small());
    // Not at the start of the file, and not a whole number of pages.
    let before = rig.allocate(0, 300);
    let block = rig.shareable(BYTES);
    assert!(block.is_aligned_to(4096), "{block:?}");
    let content: Vec<u8> = (0..BYTES).map(|index| (index % 251) as u8).collect();
    rig.write(block, &content);
    let mut worker = Peer::start(TEST);
    worker.channel.send(&rig.gpu.memory_inode(0, block).unwrap().to_le_bytes(), None);
    worker.channel.send_memory(&rig.export(block));
    worker.channel.expect("read and written");
    let expected = [&content[..5000], &[9; 4000][..], &content[9000..]].concat();
    assert_eq!(rig.download::<u8>(block, BYTES, rig.stream), expected);
    // Later writes of the owner are seen as well.
    rig.fill(block, FillPattern::U8(77), BYTES, rig.stream).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    worker.channel.say("look again");
    assert!(worker.wait().success());
    assert_eq!(rig.gpu.live_objects().descriptors, 0);
    rig.free(0, block, None).unwrap();
    rig.free(0, before, None).unwrap();
    assert_eq!(rig.gpu.memory_info(0).unwrap().free, 64 << 20);
    assert_eq!(in_dev_shm(), [""; 0]);
}

fn worker(parent: &Channel) {
    let rig = Rig::new(small());
    let inode = u64::from_le_bytes(parent.receive().0.try_into().unwrap());
    let handle = parent.receive_memory();
    assert_eq!(mappings_of(inode), 0);
    let opened = rig.ipc().open_memory(0, &handle).unwrap();
    assert_eq!((mappings_of(inode), handle.bytes), (1, BYTES as u64));
    assert_eq!(rig.gpu.live_objects().mappings, 1);
    // The descriptor is not needed once the memory is mapped.
    drop(handle);
    let content: Vec<u8> = (0..BYTES).map(|index| (index % 251) as u8).collect();
    assert_eq!(rig.download::<u8>(opened, BYTES, rig.stream), content);
    rig.fill(opened.offset(5000), FillPattern::U8(9), 4000, rig.stream).unwrap();
    assert_eq!(kind(rig.fill(opened, FillPattern::U8(9), BYTES + 1, rig.stream)), ErrorKind::InvalidPointer);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    parent.say("read and written");
    parent.expect("look again");
    assert_eq!(rig.download::<u8>(opened, BYTES, rig.stream), [77; BYTES]);
    close(&rig, opened).unwrap();
    assert_eq!((mappings_of(inode), rig.gpu.live_objects().mappings), (0, 0));
    assert_eq!(kind(rig.fill(opened, FillPattern::U8(9), 1, rig.stream)), ErrorKind::InvalidPointer);
    assert_eq!(in_dev_shm(), [""; 0]);
}

#[test]
fn opened_memory_outlives_its_exporter() {
    const TEST: &str = "sharing::opened_memory_outlives_its_exporter";
    if let Some(parent) = peer::parent() {
        let rig = Rig::new(small());
        let block = rig.shareable(BYTES);
        rig.fill(block, FillPattern::U8(5), BYTES, rig.stream).unwrap();
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        parent.send_memory(&rig.export(block));
        // Killed while it waits.
        parent.receive();
        return;
    }
    let rig = Rig::new(small());
    let mut exporter = Peer::start(TEST);
    let handle = exporter.channel.receive_memory();
    let opened = rig.ipc().open_memory(0, &handle).unwrap();
    exporter.kill();
    assert_eq!(rig.download::<u8>(opened, BYTES, rig.stream), [5; BYTES]);
    rig.fill(opened, FillPattern::U8(6), BYTES, rig.stream).unwrap();
    // The handle in hand is still good.
    let again = rig.ipc().open_memory(0, &handle).unwrap();
    assert_eq!(rig.download::<u8>(again, BYTES, rig.stream), [6; BYTES]);
    assert_eq!(again, opened);
    close(&rig, opened).unwrap();
    close(&rig, opened).unwrap();
    assert_eq!(rig.gpu.live_objects().mappings, 0);
}

#[test]
fn memory_that_is_opened_again_has_the_same_address_and_is_counted() {
    let rig = Rig::new(small().with_devices(2));
    let (first, second) = (rig.shareable(BYTES), rig.shareable(BYTES));
    let (handle, other) = (rig.export(first), rig.export(second));
    assert_eq!(rig.gpu.live_objects().descriptors, 2);
    let opened = rig.ipc().open_memory(0, &handle).unwrap();
    assert_ne!(opened, first, "an address of its own");
    assert_eq!(rig.ipc().open_memory(0, &handle.clone()).unwrap(), opened);
    assert_eq!(rig.ipc().open_memory(0, &rig.export(first)).unwrap(), opened);
    let neighbour = rig.ipc().open_memory(0, &other).unwrap();
    assert_ne!(neighbour, opened);
    drop((handle, other));
    let live = rig.gpu.live_objects();
    assert_eq!((live.mappings, live.descriptors, live.allocations), (2, 0, 2));
    // It is the same memory, under another address, and may be used as memory of the device's own.
    rig.fill(first, FillPattern::U8(3), BYTES, rig.stream).unwrap();
    rig.copy(at(0, neighbour), at(0, opened), BYTES, rig.stream).unwrap();
    rig.copy(at(1, rig.allocate(1, BYTES)), at(0, opened), BYTES, rig.stream).unwrap();
    assert_eq!(rig.download::<u8>(second, BYTES, rig.stream), [3; BYTES]);
    for _ in 0..3 {
        assert_eq!(rig.gpu.live_objects().mappings, 2);
        close(&rig, opened).unwrap();
    }
    assert_eq!(kind(close(&rig, opened)), ErrorKind::InvalidPointer);
    assert_eq!(kind(close(&rig, neighbour.offset(4096))), ErrorKind::InvalidPointer);
    assert_eq!(kind(close(&rig, first)), ErrorKind::InvalidPointer);
    assert_eq!(kind(close(&rig, DevicePtr::new(0))), ErrorKind::InvalidPointer);
    assert_eq!(kind(rig.free(0, neighbour, None)), ErrorKind::InvalidPointer);
    close(&rig, neighbour).unwrap();
    assert_eq!(rig.gpu.live_objects().mappings, 0);
}

#[test]
fn memory_that_its_exporter_freed_stays_with_those_that_have_it_open_or_its_handle() {
    for options in [small(), small().with_checks(), small().with_race_detector()] {
        let rig = Rig::new(options);
        let old = rig.shareable(BYTES);
        let inode = rig.gpu.memory_inode(0, old).unwrap();
        rig.write(old, &[1u8; BYTES]);
        let handle = rig.export(old);
        let opened = rig.ipc().open_memory(0, &handle).unwrap();
        rig.free(0, old, None).unwrap();
        assert_eq!(rig.gpu.memory_info(0).unwrap().free, 64 << 20);
        let new = rig.shareable(BYTES);
        assert_eq!(new, old, "the test wants the place back");
        rig.write(new, &[2u8; BYTES]);
        assert_eq!(rig.download::<u8>(opened, BYTES, rig.stream), [1; BYTES]);
        rig.fill(opened, FillPattern::U8(3), BYTES, rig.stream).unwrap();
        assert_eq!(rig.download::<u8>(new, BYTES, rig.stream), [2; BYTES]);
        close(&rig, opened).unwrap();
        assert_eq!(mappings_of(inode), 0);
        // The handle alone keeps the memory, too.
        let again = rig.ipc().open_memory(0, &handle).unwrap();
        assert_eq!(rig.download::<u8>(again, BYTES, rig.stream), [3; BYTES]);
        close(&rig, again).unwrap();
        rig.free(0, new, None).unwrap();
        let plain = rig.allocate(0, BYTES);
        assert_eq!(plain, old, "plain memory gets the place, too");
        rig.write(plain, &[4u8; BYTES]);
        assert_eq!(rig.download::<u8>(plain, BYTES, rig.stream), [4; BYTES]);
        assert_eq!(rig.gpu.races().len(), 0);
    }
}

#[test]
fn a_new_block_at_an_old_place_is_other_memory() {
    let rig = Rig::new(small());
    let old = rig.shareable(4096);
    let old_handle = rig.export(old);
    let opened = rig.ipc().open_memory(0, &old_handle).unwrap();
    rig.free(0, old, None).unwrap();
    let new = rig.shareable(3 * 4096);
    assert_eq!(new, old, "the test wants the place back");
    let larger = rig.ipc().open_memory(0, &rig.export(new)).unwrap();
    assert_ne!(larger, opened);
    rig.fill(larger, FillPattern::U8(1), 3 * 4096, rig.stream).unwrap();
    assert_eq!(rig.download::<u8>(new, 3 * 4096, rig.stream), [1; 3 * 4096]);
}

#[test]
fn products_are_computed_on_opened_memory() {
    let rig = Rig::new(small());
    let block = rig.shareable(3 * 16 * 4);
    let opened = rig.ipc().open_memory(0, &rig.export(block)).unwrap();
    rig.write(block, &[2f32; 48]);
    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 4, 4, 4), opened, opened.offset(64), opened.offset(128));
    // SAFETY: the memory is open until the stream was synchronized.
    unsafe { handle.gemm(&gemm).unwrap() };
    assert_eq!(rig.download::<f32>(block.offset(128), 16, rig.stream), [16.0; 16]);
}

#[test]
fn handles_that_nobody_exported_are_refused_and_map_nothing() {
    let rig = Rig::new(small().with_devices(2));
    let handle = rig.export(rig.shareable(BYTES));
    let mut wrong: Vec<MemoryHandle> = (0..64)
        .map(|index| {
            let mut altered = handle.clone();
            altered.payload[index] ^= 0x10;
            altered
        })
        .collect();
    let with = |change: &dyn Fn(&mut MemoryHandle)| {
        let mut altered = handle.clone();
        change(&mut altered);
        altered
    };
    let other = Rig::new(small());
    let elsewhere = other.export(other.shareable(BYTES));
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, 64 << 20).unwrap();
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    wrong.extend([
        with(&|handle| handle.payload = [0; 64]),
        with(&|handle| handle.descriptor = None),
        with(&|handle| handle.bytes += 1),
        with(&|handle| handle.bytes = u64::MAX),
        with(&|handle| handle.device_uuid[15] = 1),
        with(&|handle| handle.descriptor = elsewhere.descriptor.clone()),
        handle.clone().with_descriptor(Descriptor::new(unsealed)),
        handle.clone().with_descriptor(Descriptor::new(null)),
        handle.clone().with_descriptor(Descriptor::new(std::io::pipe().unwrap().0.into())),
    ]);
    for handle in &wrong {
        let error = rig.ipc().open_memory(0, handle).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(!error.hint().is_empty(), "{error}");
    }
    assert_eq!(kind(rig.ipc().open_memory(1, &handle)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.ipc().open_memory(2, &handle)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.ipc().open_memory(0, &with(&|h| h.transport = Transport::Fabric))), ErrorKind::Unsupported);
    assert_eq!(rig.gpu.live_objects().mappings, 0);
    rig.ipc().open_memory(0, &handle).unwrap();
}

#[test]
fn a_descriptor_that_cannot_be_written_is_refused() {
    let rig = Rig::new(small());
    let handle = rig.export(rig.shareable(BYTES));
    let number = std::os::fd::AsRawFd::as_raw_fd(handle.descriptor.as_ref().unwrap().as_ref());
    let read_only = std::fs::File::open(format!("/proc/self/fd/{number}")).unwrap();
    let handle = handle.with_descriptor(Descriptor::new(read_only.into()));
    assert_eq!(kind(rig.ipc().open_memory(0, &handle)), ErrorKind::InvalidArgument);
}

#[test]
fn the_memory_file_can_be_neither_shortened_nor_unsealed() {
    use rustix::fs::SealFlags;
    let rig = Rig::new(small());
    let block = rig.shareable(BYTES);
    let descriptor = rig.export(block).descriptor.unwrap();
    for bytes in [0, 4096, 128 << 20] {
        assert_eq!(rustix::fs::ftruncate(descriptor.as_ref(), bytes), Err(rustix::io::Errno::PERM));
    }
    let seals = rustix::fs::fcntl_get_seals(descriptor.as_ref()).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL), "{seals:?}");
    assert!(rustix::fs::fcntl_add_seals(descriptor.as_ref(), SealFlags::WRITE).is_err());
    let flags = rustix::io::fcntl_getfd(descriptor.as_ref()).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{flags:?}");
}

#[test]
fn only_whole_shareable_blocks_are_exported() {
    let rig = Rig::new(small());
    let (plain, block) = (rig.allocate(0, 100), rig.shareable(BYTES));
    // SAFETY: refused, whatever it is.
    let refused = |device, ptr, transport| kind(unsafe { rig.ipc().export_memory(device, ptr, transport) });
    assert_eq!(refused(0, plain, Transport::Descriptor), ErrorKind::InvalidArgument);
    assert_eq!(refused(0, block.offset(4096), Transport::Descriptor), ErrorKind::InvalidPointer);
    assert_eq!(refused(0, DevicePtr::new(0), Transport::Descriptor), ErrorKind::InvalidPointer);
    assert_eq!(refused(1, block, Transport::Descriptor), ErrorKind::InvalidArgument);
    assert_eq!(refused(0, block, Transport::Legacy), ErrorKind::Unsupported);
    let opened = rig.ipc().open_memory(0, &rig.export(block)).unwrap();
    assert_eq!(refused(0, opened, Transport::Descriptor), ErrorKind::InvalidPointer);
    rig.free(0, block, None).unwrap();
    assert_eq!(refused(0, block, Transport::Descriptor), ErrorKind::InvalidPointer);
    assert_eq!(rig.gpu.live_objects().descriptors, 0);
}

#[test]
fn sharing_can_be_taken_away() {
    let by = |transport| AllocateOptions::new(64).with_kind(DeviceMemoryKind::Shareable(transport));
    let rig = Rig::new(small());
    assert_eq!(kind(rig.gpu.allocate(0, &by(Transport::Legacy))), ErrorKind::Unsupported);
    let without = |change: fn(&mut highwater_hal::Capabilities)| Rig::new(small().with_capabilities(change));
    let none = without(|c| c.ipc_transports = Transports::NONE);
    assert!(none.gpu.ipc_sharing().is_none());
    assert_eq!(kind(none.gpu.allocate(0, &by(Transport::Descriptor))), ErrorKind::Unsupported);
    let receiving = without(|c| c.shareable_memory = false);
    assert_eq!(kind(receiving.gpu.allocate(0, &by(Transport::Descriptor))), ErrorKind::Unsupported);
    let handle = rig.export(rig.shareable(BYTES));
    assert!(receiving.ipc().open_memory(0, &handle).is_ok());
    let options = MockOptions::parse("shareable-memory=off,ipc-transports=none,memory=64MiB").unwrap();
    assert!(Rig::new(options).gpu.ipc_sharing().is_none());
}

#[test]
fn too_few_descriptors_are_an_error_and_cost_nothing() {
    const TEST: &str = "sharing::too_few_descriptors_are_an_error_and_cost_nothing";
    if peer::parent().is_some() {
        let rig = Rig::new(small());
        let block = rig.shareable(BYTES);
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let limit = rustix::process::Rlimit { current: Some(open + 2), maximum: Some(open + 2) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        let mut handles = Vec::new();
        let error = loop {
            // SAFETY: the block is alive.
            match unsafe { rig.ipc().export_memory(0, block, Transport::Descriptor) } {
                Ok(handle) => handles.push(handle),
                Err(error) => break error,
            }
            assert!(handles.len() < 10, "the limit has no effect");
        };
        assert_eq!(error.kind(), ErrorKind::OperatingSystem, "{error}");
        assert!(error.hint().contains("ulimit -n"), "{error}");
        assert_eq!(rig.gpu.live_objects().descriptors, handles.len() as u64);
        // A block that others may map needs one, and so does physical memory.
        let free = rig.gpu.memory_info(0).unwrap().free;
        let shareable = AllocateOptions::new(BYTES).with_kind(DeviceMemoryKind::Shareable(Transport::Descriptor));
        let error = rig.gpu.allocate(0, &shareable).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OperatingSystem, "{error}");
        let pages = PhysicalMemoryOptions::new(2 << 20).with_shareable(Transport::Descriptor);
        assert_eq!(kind(rig.gpu.create_memory(0, &pages)), ErrorKind::OperatingSystem);
        assert_eq!(rig.gpu.memory_info(0).unwrap().free, free);
        // Opening needs none.
        let opened = rig.ipc().open_memory(0, &handles[0]).unwrap();
        drop(handles);
        assert_eq!(rig.gpu.live_objects().descriptors, 0);
        close(&rig, opened).unwrap();
        return;
    }
    assert!(Peer::start(TEST).wait().success());
}
