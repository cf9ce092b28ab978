//! Memory and events between two processes.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::calls::ok;
use crate::calls::{Access, IpcHandle, Properties, Rows, RowsAt, cu};
use crate::rig::{
    Gate, Line, NOT_READY, Peer, bytes_at, event, kinds_of, load, memory, pinned, start, stream, wait_until, warm,
};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::Log;
use highwater_simulated_harness::rules;

rules! {
    "ipc.handles" Driver Own handles: "a handle names a whole allocation, and only plain memory has one";
    "ipc.memory" Driver Own shared_memory: "another process opens memory once or more often, at one address, and both see what is written";
    "ipc.own-handle" Driver Own own_handle: "a process may not open its own handle (201)";
    "ipc.exporter-ended" Driver Own exporter_ended: "a handle of a process that ended answers 400";
    "ipc.events" Driver Own shared_event: "another process sees when an event is done, and may wait for it";
    "vmm.mapped" Driver Own mapped: "memory is created, reserved, mapped and released in parts";
    "vmm.by-descriptor" Driver Own by_descriptor: "memory travels to another process by a descriptor, and both see what is written";
    "devices.shared" Devices Own on_both: "another process opens memory on a second device at another address, and mapped memory has one address for both";
    "vmm.fabric" Driver Own fabric: "fabric memory is found out by trying";
}

const BYTES: usize = 4 << 20;
const MAPPED: usize = 2 << 20;

/// The part of the other process.
pub(crate) fn peer(name: &str, line: Line) -> Answer {
    crate::calls::Driver::open()?;
    match name {
        "ipc.memory" => memory_peer(line),
        "ipc.exporter-ended" => exporter_peer(line),
        "devices.shared" => second_device_peer(line),
        "ipc.events" => event_peer(line),
        "vmm.by-descriptor" => descriptor_peer(line),
        other => Err(format!("`{other}` has no part for another process")),
    }
}

fn export(address: u64) -> Result<IpcHandle, u32> {
    let mut handle = IpcHandle([0; 8]);
    match cu!(cuIpcGetMemHandle(&mut handle, address)) {
        0 => Ok(handle),
        code => Err(code),
    }
}

fn handles(log: &mut Log) -> Answer {
    start(0)?;
    let (stream, block, other) = (stream()?, memory(BYTES)?, memory(BYTES)?);
    let of_block = export(block);
    log.is("plain memory has one", of_block.is_ok(), true);
    log.is("the same each time", export(block) == of_block, true);
    log.is("the same inside of it", export(block + (1 << 20)) == of_block, true);
    log.is("another block has another", export(other) == of_block, false);
    let (small, second) = (memory(4096)?, memory(4096)?);
    log.is("small blocks, too", export(small) == export(second), false);
    let mut ordered = 0;
    ok!(cu cuMemAllocAsync(&mut ordered, 4096, stream));
    log.is("memory in the order of a stream", export(ordered), Err(1));
    log.is("page-locked memory", export(pinned(4096)?.addr() as u64), Err(1));
    log.is("an address of nothing", export(64), Err(1));
    let (mapped, handle) = map_new(1)?;
    log.is("mapped memory", export(mapped), Err(1));
    ok!(cu cuMemUnmap(mapped, MAPPED));
    ok!(cu cuMemRelease(handle));
    ok!(cu cuMemFree_v2(small));
    log.is("freed memory", export(small), Err(1));
    Ok(())
}

fn own_handle(log: &mut Log) -> Answer {
    start(0)?;
    let block = memory(BYTES)?;
    let handle = export(block).map_err(|code| format!("cuIpcGetMemHandle answered {code}"))?;
    log.is("cuIpcOpenMemHandle", cu!(cuIpcOpenMemHandle_v2(&mut 0, handle, 1)), 201);
    log.is("the memory is still there", cu!(cuMemFree_v2(block)), 0);
    Ok(())
}

fn shared_memory(log: &mut Log) -> Answer {
    start(0)?;
    let (stream, block) = (stream()?, memory(BYTES)?);
    ok!(cu cuMemsetD8Async(block, 0x5a, BYTES, stream));
    ok!(cu cuStreamSynchronize(stream));
    let handle = export(block).map_err(|code| format!("cuIpcGetMemHandle answered {code}"))?;
    let mut peer = Peer::start("ipc.memory")?;
    peer.line.send(&handle.0)?;
    let seen: [u64; 13] = peer.line.receive()?;
    let what = [
        ("opened", 0),
        ("opened again", 0),
        ("both are one address", 1),
        ("only this process's bytes are there", 0x5a),
        ("exported by who opened it", 1),
        ("freed by who opened it", 1),
        ("closed once", 0),
        ("bytes after one close of two", 0x5a),
        ("filled there", 0),
        ("closed inside of it", 1),
        ("closed twice", 0),
        ("an address that is not open closed", 1),
        ("its bytes", 1),
    ];
    for ((what, expected), seen) in what.into_iter().zip(seen) {
        log.is(what, seen, expected);
    }
    let [without_flag] = peer.line.receive()?;
    log.is("opened without the flag for peers", without_flag, 1);
    log.is("the other's bytes are here", kinds_of(load::<u8>(block, BYTES, stream)?), vec![0xc1]);
    peer.end()?;
    log.is("freed", cu!(cuMemFree_v2(block)), 0);
    Ok(())
}

fn only(values: &[u8]) -> u64 {
    match values {
        [one] => u64::from(*one),
        _ => u64::MAX,
    }
}

fn memory_peer(mut line: Line) -> Answer {
    start(0)?;
    let (stream, handle) = (stream()?, line.receive_handle()?);
    let (mut address, mut again) = (0, 0);
    let opened = cu!(cuIpcOpenMemHandle_v2(&mut address, handle, 1));
    let reopened = cu!(cuIpcOpenMemHandle_v2(&mut again, handle, 1));
    let same = u64::from(address == again);
    let first = only(&kinds_of(load::<u8>(address, BYTES, stream)?));
    let exported = export(address).err().unwrap_or(0);
    let freed = cu!(cuMemFree_v2(address));
    let closed = cu!(cuIpcCloseMemHandle(address));
    let second = only(&kinds_of(load::<u8>(address, BYTES, stream)?));
    let filled = cu!(cuMemsetD8Async(address, 0xc1, BYTES, stream));
    ok!(cu cuStreamSynchronize(stream));
    let closed_inside = cu!(cuIpcCloseMemHandle(address + 8));
    let closed_twice = cu!(cuIpcCloseMemHandle(address));
    let closed_too_often = cu!(cuIpcCloseMemHandle(address));
    let read = cu!(cuMemcpyDtoHAsync_v2([0u8; 8].as_mut_ptr().cast(), address, 8, stream));
    line.send(&[opened, reopened].map(u64::from))?;
    line.send(&[same, first])?;
    line.send(&[exported, freed, closed].map(u64::from))?;
    line.send(&[second])?;
    line.send(&[filled, closed_inside, closed_twice, closed_too_often, read].map(u64::from))?;
    let without_flag = cu!(cuIpcOpenMemHandle_v2(&mut address, handle, 0));
    if without_flag == 0 {
        ok!(cu cuIpcCloseMemHandle(address));
    }
    line.send(&[u64::from(without_flag)])
}

fn exporter_ended(log: &mut Log) -> Answer {
    start(0)?;
    let mut peer = Peer::start("ipc.exporter-ended")?;
    let handle = peer.line.receive_handle()?;
    peer.end()?;
    log.is("opened", cu!(cuIpcOpenMemHandle_v2(&mut 0, handle, 1)), 400);
    Ok(())
}

fn exporter_peer(mut line: Line) -> Answer {
    start(0)?;
    let handle = export(memory(BYTES)?).map_err(|code| format!("cuIpcGetMemHandle answered {code}"))?;
    line.send(&handle.0)
}

fn on_both(log: &mut Log) -> Answer {
    start(0)?;
    let (stream, block) = (stream()?, memory(BYTES)?);
    ok!(cu cuMemsetD8Async(block, 0x5a, BYTES, stream));
    ok!(cu cuStreamSynchronize(stream));
    let handle = export(block).map_err(|code| format!("cuIpcGetMemHandle answered {code}"))?;
    let mut peer = Peer::start("devices.shared")?;
    peer.line.send(&handle.0)?;
    let [opened, same, seen, device, closed] = peer.line.receive()?;
    log.is("opened on the second device, at the address of the first", (opened, same), (0, 0));
    log.is("its bytes, and its device", (seen, device), (0x5a, 1));
    log.is("closed there", closed, 0);
    peer.end()?;
    let (mapped, _) = map_new(1)?;
    ok!(cu cuMemsetD8Async(mapped, 3, MAPPED, stream));
    ok!(cu cuStreamSynchronize(stream));
    start(1)?;
    log.is("access for the second device", cu!(cuMemSetAccess(mapped, MAPPED, &Access::read_write(1), 1)), 0);
    let there = self::stream()?;
    log.is("its bytes there", kinds_of(load::<u8>(mapped, MAPPED, there)?), vec![3]);
    Ok(())
}

fn second_device_peer(mut line: Line) -> Answer {
    start(0)?;
    let (handle, mut near, mut far, mut device) = (line.receive_handle()?, 0, 0, 9u32);
    ok!(cu cuIpcOpenMemHandle_v2(&mut near, handle, 1));
    start(1)?;
    let opened = cu!(cuIpcOpenMemHandle_v2(&mut far, handle, 1));
    let seen = only(&kinds_of(load::<u8>(far, BYTES, stream()?)?));
    ok!(cu cuPointerGetAttribute((&raw mut device).cast(), 9, far));
    let closed = cu!(cuIpcCloseMemHandle(far));
    line.send(&[u64::from(opened), u64::from(near == far), seen, u64::from(device), u64::from(closed)])
}

fn shared_event(log: &mut Log) -> Answer {
    start(0)?;
    let (stream, done, local) = (stream()?, event(6)?, event(2)?);
    warm(stream)?;
    let mut handle = IpcHandle([0; 8]);
    log.is("an event that was not made for it", cu!(cuIpcGetEventHandle(&mut handle, local)), 400);
    log.is("one that was", cu!(cuIpcGetEventHandle(&mut handle, done)), 0);
    let gate = Gate::on(stream)?;
    ok!(cu cuEventRecord(done, stream));
    let mut peer = Peer::start("ipc.events")?;
    peer.line.send(&handle.0)?;
    let [opened, exported, before, waits, waiting] = peer.line.receive()?;
    log.is("opened there, and exported by who opened it", (opened, exported != 0), (0, true));
    log.is("asked there, before", before, u64::from(NOT_READY));
    log.is("a stream waits there", waits, 0);
    log.is("that stream, before", waiting, u64::from(NOT_READY));
    log.is("all that while this stream was blocked", gate.is_open(), false);
    gate.open();
    let [came, after, synchronized, destroyed] = peer.line.receive()?;
    log.is("it is done there", (came, after, synchronized, destroyed), (1, 0, 0, 0));
    peer.end()?;
    log.is("it is done here", cu!(cuEventSynchronize(done)), 0);
    log.is("destroyed here", cu!(cuEventDestroy_v2(done)), 0);
    Ok(())
}

fn event_peer(mut line: Line) -> Answer {
    start(0)?;
    let (stream, handle) = (stream()?, line.receive_handle()?);
    let mut done = 0;
    let opened = cu!(cuIpcOpenEventHandle(&mut done, handle));
    let exported = cu!(cuIpcGetEventHandle(&mut IpcHandle([0; 8]), done));
    let before = cu!(cuEventQuery(done));
    let waits = cu!(cuStreamWaitEvent(stream, done, 0));
    let waiting = cu!(cuStreamQuery(stream));
    line.send(&[opened, exported, before, waits, waiting].map(u64::from))?;
    let came = wait_until(|| cu!(cuEventQuery(done)) == 0);
    let after = cu!(cuEventQuery(done));
    let synchronized = cu!(cuStreamSynchronize(stream));
    let destroyed = cu!(cuEventDestroy_v2(done));
    line.send(&[u32::from(came), after, synchronized, destroyed].map(u64::from))
}

/// Maps an allocation at addresses of its own.
fn map(handle: u64) -> Answer<u64> {
    let (mut base, access) = (0, Access::read_write(0));
    ok!(cu cuMemAddressReserve(&mut base, MAPPED, 0, 0, 0));
    ok!(cu cuMemMap(base, MAPPED, 0, handle, 0));
    ok!(cu cuMemSetAccess(base, MAPPED, &access, 1));
    Ok(base)
}

fn map_new(handle_types: u32) -> Answer<(u64, u64)> {
    let (mut handle, properties) = (0, Properties::with_handles(handle_types));
    ok!(cu cuMemCreate(&mut handle, MAPPED, &properties, 0));
    Ok((map(handle)?, handle))
}

fn mapped(log: &mut Log) -> Answer {
    let context = start(0)?;
    let (stream, properties) = (stream()?, Properties::with_handles(1));
    for option in [0, 1] {
        let mut bytes = 0;
        let code = cu!(cuMemGetAllocationGranularity(&mut bytes, &properties, option));
        log.is(&format!("granularity {option}"), (code, bytes), (0, MAPPED));
    }
    let mut handle = 0;
    log.is("a part of it", cu!(cuMemCreate(&mut handle, 4096, &properties, 0)), 1);
    log.is("no bytes", cu!(cuMemCreate(&mut handle, 0, &properties, 0)), 1);
    log.is("1 PiB", cu!(cuMemCreate(&mut handle, 1 << 50, &properties, 0)), 2);
    let (base, handle) = map_new(1)?;
    ok!(cu cuMemsetD8Async(base, 3, MAPPED, stream));
    log.is("its bytes", kinds_of(load::<u8>(base, MAPPED, stream)?), vec![3]);
    let mut same = 0;
    let code = cu!(cuMemRetainAllocationHandle(&mut same, base + 4096));
    log.is("its handle by an address", (code, same == handle), (0, true));
    log.is("released, the second handle", cu!(cuMemRelease(same)), 0);
    let plain = memory(4096)?;
    log.is("the handle of plain memory", cu!(cuMemRetainAllocationHandle(&mut same, plain)), 1);
    log.is("freed as plain memory", cu!(cuMemFree_v2(base)), 1);
    let mut base_seen = 0;
    let seen = cu!(cuMemGetAddressRange_v2(&mut base_seen, &mut 0, base + 4096));
    log.is("its address range: code, and base is the start", (seen, base_seen == base), (0, true));
    // Without a handle type, and over a border.
    let access = Access::read_write(0);
    let (mut both, mut second) = (0, 0);
    ok!(cu cuMemCreate(&mut second, MAPPED, &Properties::with_handles(0), 0));
    log.is("100 bytes of addresses", cu!(cuMemAddressReserve(&mut both, 100, 0, 0, 0)), 1);
    ok!(cu cuMemAddressReserve(&mut both, 2 * MAPPED, 0, 0, 0));
    log.is("mapped at no border of a page", cu!(cuMemMap(both + 4096, MAPPED, 0, handle, 0)), 1);
    log.is("mapped, first half", cu!(cuMemMap(both, MAPPED, 0, handle, 0)), 0);
    log.is("mapped where something is", cu!(cuMemMap(both, MAPPED, 0, second, 0)), 1);
    log.is("mapped, second half", cu!(cuMemMap(both + MAPPED as u64, MAPPED, 0, second, 0)), 0);
    log.is("a fill without access", cu!(cuMemsetD8Async(both, 1, 64, stream)), 1);
    log.is("access to a part", cu!(cuMemSetAccess(both, 4096, &access, 1)), 1);
    log.is("access to both", cu!(cuMemSetAccess(both, 2 * MAPPED, &access, 1)), 0);
    log.is("the first is the same memory", kinds_of(load::<u8>(both, MAPPED, stream)?), vec![3]);
    ok!(cu cuMemsetD8Async(both, 4, 2 * MAPPED, stream));
    log.is("one fill over the border", kinds_of(load::<u8>(both, 2 * MAPPED, stream)?), vec![4]);
    log.is("seen where it was first mapped", kinds_of(load::<u8>(base, MAPPED, stream)?), vec![4]);
    let (host, border) = (pinned(2 * MAPPED)?, both + MAPPED as u64 - 32);
    ok!(cu cuCtxSetCurrent(0));
    log.is("without a context: a copy inside one mapping", cu!(cuMemcpyHtoDAsync_v2(both, host, MAPPED, stream)), 0);
    log.is("a copy over the border", cu!(cuMemcpyHtoDAsync_v2(both, host, 2 * MAPPED, stream)), 1);
    log.is("64 bytes", cu!(cuMemcpyDtoHAsync_v2(host, border, 64, stream)), 1);
    log.is("from plain memory", cu!(cuMemcpyDtoDAsync_v2(border, plain, 64, stream)), 1);
    log.is("a fill", cu!(cuMemsetD8Async(border, 5, 64, stream)), 0);
    ok!(cu cuCtxSetCurrent(context));
    log.is("with a context: a copy over the border", cu!(cuMemcpyDtoHAsync_v2(host, border, 64, stream)), 0);
    let start = border - 16;
    ok!(cu cuMemsetD8Async(both, 4, 2 * MAPPED, stream));
    ok!(cu cuMemsetD8Async(plain, 6, 4096, stream));
    let rows = Rows::new(RowsAt::Device(start, 24), RowsAt::Device(plain, 32), 20, 4);
    log.is("rows over the border, from plain memory", cu!(cuMemcpy2DAsync_v2(&rows, stream)), 0);
    let expected: Vec<u8> = (0..4).flat_map(|_| [[6; 20].as_slice(), &[4; 4]].concat()).collect();
    log.is("their bytes", load::<u8>(start, 96, stream)? == expected, true);
    let rows = Rows::new(RowsAt::Host(host, 20), RowsAt::Device(start, 24), 20, 4);
    log.is("rows over the border, to the host", cu!(cuMemcpy2DAsync_v2(&rows, stream)), 0);
    ok!(cu cuStreamSynchronize(stream));
    log.is("their bytes", bytes_at(host, 80) == [6; 80], true);
    ok!(cu cuMemsetD8Async(both, 4, 2 * MAPPED, stream));
    ok!(cu cuStreamSynchronize(stream));
    let mut descriptor = -1;
    let code = cu!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), second, 1, 0));
    log.is("an export of what was not made for it", code, 1);
    log.is("its addresses given back while mapped", cu!(cuMemAddressFree(both, 2 * MAPPED)), 1);
    log.is("a part unmapped", cu!(cuMemUnmap(both, 4096)), 1);
    log.is("unmapped", cu!(cuMemUnmap(both, 2 * MAPPED)), 0);
    log.is("its addresses given back", cu!(cuMemAddressFree(both, 2 * MAPPED)), 0);
    log.is("released while mapped", cu!(cuMemRelease(handle)), 0);
    log.is("mapped memory stays", kinds_of(load::<u8>(base, MAPPED, stream)?), vec![4]);
    log.is("unmapped, the first", cu!(cuMemUnmap(base, MAPPED)), 0);
    log.is("released, the second", cu!(cuMemRelease(second)), 0);
    Ok(())
}

fn by_descriptor(log: &mut Log) -> Answer {
    start(0)?;
    let stream = stream()?;
    let (base, handle) = map_new(1)?;
    ok!(cu cuMemsetD8Async(base, 0x3c, MAPPED, stream));
    ok!(cu cuStreamSynchronize(stream));
    let mut number = -1i32;
    log.is("export", cu!(cuMemExportToShareableHandle((&raw mut number).cast(), handle, 1, 0)), 0);
    if number < 0 {
        return Err("there is no descriptor".to_owned());
    }
    // SAFETY: the driver has just given this descriptor to this process.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    // SAFETY: the descriptor is open.
    let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFD) };
    log.is("it closes on exec", flags, libc::FD_CLOEXEC);
    let mut peer = Peer::start("vmm.by-descriptor")?;
    peer.line.send_descriptor(descriptor.as_raw_fd())?;
    let [imported, seen, filled, unmapped, released] = peer.line.receive()?;
    log.is("imported there", imported, 0);
    log.is("only this process's bytes are there", seen, 0x3c);
    log.is("filled, unmapped and released there", (filled, unmapped, released), (0, 0, 0));
    peer.end()?;
    log.is("the other's bytes are here", kinds_of(load::<u8>(base, MAPPED, stream)?), vec![0xc2]);
    let mut imported = 0;
    log.is("import of something else", cu!(cuMemImportFromShareableHandle(&mut imported, 0, 1)), 1);
    ok!(cu cuMemImportFromShareableHandle(&mut imported, descriptor.as_raw_fd() as usize, 1));
    drop(descriptor);
    log.is("imported here, it has another handle", imported == handle, false);
    log.is("and is the same memory", kinds_of(load::<u8>(map(imported)?, MAPPED, stream)?), vec![0xc2]);
    log.is("unmapped and released", (cu!(cuMemUnmap(base, MAPPED)), cu!(cuMemRelease(handle))), (0, 0));
    Ok(())
}

fn descriptor_peer(mut line: Line) -> Answer {
    start(0)?;
    let (stream, descriptor) = (stream()?, line.receive_descriptor()?);
    let mut handle = 0;
    let imported = cu!(cuMemImportFromShareableHandle(&mut handle, descriptor.as_raw_fd() as usize, 1));
    // The memory outlives its descriptor.
    drop(descriptor);
    let base = map(handle)?;
    let seen = only(&kinds_of(load::<u8>(base, MAPPED, stream)?));
    let filled = cu!(cuMemsetD8Async(base, 0xc2, MAPPED, stream));
    ok!(cu cuStreamSynchronize(stream));
    let unmapped = cu!(cuMemUnmap(base, MAPPED));
    let released = cu!(cuMemRelease(handle));
    let [imported, filled, unmapped, released] = [imported, filled, unmapped, released].map(u64::from);
    line.send(&[imported, seen, filled, unmapped, released])
}

fn fabric(log: &mut Log) -> Answer {
    start(0)?;
    let (mut handle, mut value) = (0, 0);
    for (attribute, name) in [(103, "descriptors"), (102, "virtual memory"), (41, "unified addressing"), (115, "pools")]
    {
        let code = cu!(cuDeviceGetAttribute(&mut value, attribute, 0));
        log.is(&format!("{name}: the attribute"), (code, value), (0, 1));
    }
    let code = cu!(cuMemCreate(&mut handle, MAPPED, &Properties::with_handles(8), 0));
    log.is("fabric: given, or not permitted, or not supported", matches!(code, 0 | 800 | 801), true);
    // As the machine was set up.
    log.observed("fabric", code);
    if code == 0 {
        ok!(cu cuMemRelease(handle));
    }
    Ok(())
}
