//! Device memory: blocks, copies, fills, and memory in the order of a stream.

use crate::calls::ok;
use crate::calls::{Handle, Rows, RowsAt, cu};
use crate::rig::{Gate, NOT_READY, bytes_at, event, kinds_of, load, memory, pinned, start, store, stream, warm};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::Log;
use highwater_simulated_harness::rules;

rules! {
    "memory.zero-bytes" Driver Shared zero: "cuMemAlloc of no bytes answers 1; other allocations, copies and fills of none succeed";
    "memory.freed-once" Driver Shared once: "a block is freed by its start, once; anything else answers 1";
    "memory.exhausted" Driver Shared exhausted: "more than the device has answers 2, and smaller blocks are given after that";
    "memory.address-range" Driver Shared range: "each block has a range of its own, which interior pointers find";
    "memory.copies" Driver Shared copies: "copies are exact to the byte";
    "memory.rows" Driver Shared rows: "copies of rows are exact to the byte and one node of a graph; a pitch below the width, or above the maximum, answers 1 (manual; not yet seen on a device)";
    "memory.fills" Driver Shared fills: "fills of 1, 2 and 4 bytes count elements";
    "memory.pageable-copies" Driver Shared pageable: "the source of a copy from pageable memory may change when the call has returned";
    "memory.free-waits" Driver Own free_waits: "cuMemFree waits for the work of other streams";
    "memory.alloc-does-not-wait" Driver Own alloc_passes: "cuMemAlloc does not wait for the work of other streams";
    "memory.stream-ordered" Driver Shared ordered: "memory in the order of a stream is there for it at once, and for others behind an event; plain memory is freed in it too";
    "memory.stream-ordered-frees" Driver Shared ordered_frees: "memory in the order of a stream is freed behind the work before it, without waiting";
    "memory.pool-attributes" Driver Own pool: "the default pool keeps nothing until its threshold says so, and trimming empties it";
    "memory.pointer-attributes" Driver Shared pointers: "pointers say whether they are of the device or the host, and others answer 1";
}

fn zero(log: &mut Log) -> Answer {
    let (stream, block) = (stream()?, memory(64)?);
    let mut address = 0;
    log.is("cuMemAlloc", cu!(cuMemAlloc_v2(&mut address, 0)), 1);
    log.is("cuMemAllocAsync", cu!(cuMemAllocAsync(&mut address, 0, stream)), 0);
    log.is("cuMemHostAlloc", cu!(cuMemHostAlloc(&mut std::ptr::null_mut(), 0, 0)), 0);
    log.is("cuMemcpyDtoDAsync", cu!(cuMemcpyDtoDAsync_v2(block, block + 32, 0, stream)), 0);
    log.is("cuMemsetD8Async", cu!(cuMemsetD8Async(block, 1, 0, stream)), 0);
    log.is("cuMemFree of null", cu!(cuMemFree_v2(0)), 0);
    log.is("cuMemFreeHost of null", cu!(cuMemFreeHost(std::ptr::null_mut())), 0);
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn once(log: &mut Log) -> Answer {
    let (stream, block) = (stream()?, memory(4096)?);
    log.is("its interior", cu!(cuMemFree_v2(block + 256)), 1);
    log.is("it is still there", store(block, &[7u8; 4096], stream), Ok(()));
    log.is("an address of nothing", cu!(cuMemFree_v2(64)), 1);
    let host = pinned(64)?;
    log.is("page-locked memory", cu!(cuMemFree_v2(host.addr() as u64)), 1);
    log.is("its start", cu!(cuMemFree_v2(block)), 0);
    log.is("again", cu!(cuMemFree_v2(block)), 1);
    Ok(())
}

fn exhausted(log: &mut Log) -> Answer {
    let mut address = 0;
    log.is("1 PiB", cu!(cuMemAlloc_v2(&mut address, 1 << 50)), 2);
    let (mut free, mut total, mut whole) = (0, 0, 0);
    ok!(cu cuMemGetInfo_v2(&mut free, &mut total));
    ok!(cu cuDeviceTotalMem_v2(&mut whole, 0));
    log.is("free is at most total", free <= total, true);
    log.is("cuMemGetInfo and cuDeviceTotalMem agree on the total", total == whole, true);
    log.is("one byte more than the device has", cu!(cuMemAlloc_v2(&mut address, total + 1)), 2);
    log.is("4 KiB after that", memory(4096).is_ok(), true);
    Ok(())
}

fn range(log: &mut Log) -> Answer {
    let (first, second) = (memory(4096)?, memory(4096)?);
    let (mut base, mut bytes) = (0, 0);
    for block in [first, second] {
        let code = cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, block + 100));
        log.is(
            "4 KiB, from an interior pointer: base is the start, and its bytes",
            (code, base == block, bytes),
            (0, true, 4096),
        );
    }
    log.is("the two do not overlap", first.abs_diff(second) >= 4096, true);
    let local = 0u8;
    log.is(
        "memory of this process",
        cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, (&raw const local).addr() as u64)),
        500,
    );
    ok!(cu cuMemFree_v2(first));
    ok!(cu cuMemFree_v2(second));
    Ok(())
}

fn copies(log: &mut Log) -> Answer {
    let (stream, size) = (stream()?, 70_001);
    let (block, other, host) = (memory(size)?, memory(size)?, pinned(size)?);
    let pattern: Vec<u8> = (0..size).map(|index| (index * 7 + index / 251) as u8).collect();
    store(block, &pattern, stream)?;
    log.is("there and back, pageable", load::<u8>(block, size, stream)? == pattern, true);
    ok!(cu cuMemcpyDtoHAsync_v2(host, block, size, stream));
    ok!(cu cuStreamSynchronize(stream));
    log.is("back, page-locked", bytes_at(host, size) == pattern, true);
    ok!(cu cuMemsetD8Async(other, 0xee, size, stream));
    ok!(cu cuMemcpyDtoDAsync_v2(other + 1003, block + 17, 501, stream));
    ok!(cu cuMemcpyHtoDAsync_v2(other + 5001, host.cast_const(), 3, stream));
    let mut expected = vec![0xee; size];
    expected[1003..1504].copy_from_slice(&pattern[17..518]);
    expected[5001..5004].copy_from_slice(&pattern[..3]);
    log.is("parts at odd places", load::<u8>(other, size, stream)? == expected, true);
    let past = cu!(cuMemcpyDtoDAsync_v2(other, block + 4096, size, stream));
    log.is("past the end of a block of 70001 bytes", past, 1);
    for (what, address) in [("nothing", 64), ("null", 0), ("memory of this process", pattern.as_ptr().addr() as u64)] {
        log.is(&format!("from an address of {what}"), cu!(cuMemcpyDtoDAsync_v2(other, address, 64, stream)), 1);
    }
    log.is("to null", cu!(cuMemcpyDtoDAsync_v2(0, other, 64, stream)), 1);
    log.is("between memory of any kind", cu!(cuMemcpyAsync(host.addr() as u64, other, size, stream)), 0);
    ok!(cu cuStreamSynchronize(stream));
    log.is("its bytes", bytes_at(host, size) == expected, true);
    ok!(cu cuMemFree_v2(block));
    ok!(cu cuMemFree_v2(other));
    ok!(cu cuMemFreeHost(host));
    Ok(())
}

fn rows(log: &mut Log) -> Answer {
    use RowsAt::{Device, Host};
    const SIZE: usize = 4096;
    let (stream, block, other, host) = (stream()?, memory(SIZE)?, memory(SIZE)?, pinned(SIZE)?);
    let pattern: Vec<u8> = (0..SIZE).map(|index| (index * 7 + index / 251) as u8).collect();
    let copied = |width: usize, height: usize, (to, to_pitch): (usize, usize), (from, from_pitch): (usize, usize)| {
        let mut bytes = vec![0xee; SIZE];
        for row in 0..height {
            let (to, from) = (to + row * to_pitch, from + row * from_pitch);
            bytes[to..to + width].copy_from_slice(&pattern[from..from + width]);
        }
        bytes
    };
    store(block, &pattern, stream)?;
    let row = |to, from, width, height| {
        let rows = Rows::new(to, from, width, height);
        cu!(cuMemcpy2DAsync_v2(&rows, stream))
    };
    ok!(cu cuMemsetD8Async(other, 0xee, SIZE, stream));
    log.is("on the device", row(Device(other + 5, 37), Device(block + 3, 100), 31, 40), 0);
    log.is("its bytes", load::<u8>(other, SIZE, stream)? == copied(31, 40, (5, 37), (3, 100)), true);
    ok!(cu cuMemsetD8Async(other, 0xee, SIZE, stream));
    log.is("to the host", row(Host(host, 64), Device(block, 100), 17, 40), 0);
    log.is("from the host", row(Device(other, 100), Host(host, 64), 17, 40), 0);
    log.is("there and back", load::<u8>(other, SIZE, stream)? == copied(17, 40, (0, 100), (0, 100)), true);
    ok!(cu cuMemsetD8Async(other, 0xee, SIZE, stream));
    let shifted = Rows::new(Device(other, 16), Device(block, 100), 16, 9).from(2, 3);
    log.is("from another row and byte", cu!(cuMemcpy2DAsync_v2(&shifted, stream)), 0);
    log.is("its bytes", load::<u8>(other, SIZE, stream)? == copied(16, 9, (0, 16), (302, 100)), true);
    log.is("no rows", row(Device(other, 16), Device(block, 16), 16, 0), 0);
    log.is("rows of no bytes", row(Device(other, 16), Device(block, 16), 0, 16), 0);
    log.is("a narrow pitch of the source", row(Device(other, 16), Device(block, 15), 16, 4), 1);
    log.is("a narrow pitch of the destination", row(Device(other, 15), Device(block, 16), 16, 4), 1);
    log.is("a pitch of 2 GiB, and one row", row(Device(other, 1 << 31), Device(block, 16), 16, 1), 0);
    log.is("past the end", row(Device(other, 100), Device(block, 16), 16, 42), 1);
    ok!(cu cuStreamBeginCapture_v2(stream, 2));
    log.is("in a capture", row(Device(other, 16), Device(block, 16), 16, 4), 0);
    let (mut graph, mut nodes) = (0, 0);
    ok!(cu cuStreamEndCapture(stream, &mut graph));
    ok!(cu cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes));
    log.is("nodes", nodes, 1);
    ok!(cu cuGraphDestroy(graph));
    ok!(cu cuMemFree_v2(block));
    ok!(cu cuMemFree_v2(other));
    ok!(cu cuMemFreeHost(host));
    Ok(())
}

fn fills(log: &mut Log) -> Answer {
    let (stream, block) = (stream()?, memory(64)?);
    ok!(cu cuMemsetD8Async(block, 1, 64, stream));
    ok!(cu cuMemsetD8Async(block + 3, 2, 5, stream));
    ok!(cu cuMemsetD16Async(block + 10, 0x0403, 3, stream));
    ok!(cu cuMemsetD32Async(block + 20, 0x0807_0605, 2, stream));
    let expected = vec![1, 1, 1, 2, 2, 2, 2, 2, 1, 1, 3, 4, 3, 4, 3, 4, 1, 1, 1, 1, 5, 6, 7, 8, 5, 6, 7, 8, 1, 1];
    log.is("bytes", load::<u8>(block, 30, stream)?, expected);
    log.is("16 bits at an odd address", cu!(cuMemsetD16Async(block + 1, 0, 1, stream)), 1);
    log.is("32 bits at half of a word", cu!(cuMemsetD32Async(block + 2, 0, 1, stream)), 1);
    log.is("past the end", cu!(cuMemsetD8Async(block, 0, 65, stream)), 1);
    let host = pinned(64)?;
    log.is("page-locked memory", cu!(cuMemsetD8Async(host.addr() as u64 + 8, 9, 8, stream)), 0);
    ok!(cu cuStreamSynchronize(stream));
    log.is("its bytes", bytes_at(host, 24), [[0; 8], [9; 8], [0; 8]].concat());
    ok!(cu cuMemFree_v2(block));
    ok!(cu cuMemFreeHost(host));
    Ok(())
}

fn pageable(log: &mut Log) -> Answer {
    let (stream, size) = (stream()?, 1 << 20);
    let block = memory(size)?;
    for bytes in [100, 4096, 65_536, size] {
        let mut source = vec![5u8; bytes];
        ok!(cu cuMemcpyHtoDAsync_v2(block, source.as_ptr().cast(), bytes, stream));
        source.fill(6);
        std::hint::black_box(&source);
        log.is(&format!("{bytes} bytes"), kinds_of(load::<u8>(block, bytes, stream)?), vec![5]);
    }
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn free_waits(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    warm(stream)?;
    let block = memory(2 << 20)?;
    let gate = Gate::on(stream)?;
    let (passed, code) = gate.is_passed_by(context, false, || cu!(cuMemFree_v2(block)))?;
    log.is("it returned while the other stream worked", passed, false);
    log.is("code", code, 0);
    ok!(cu cuStreamSynchronize(stream));
    Ok(())
}

fn alloc_passes(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    warm(stream)?;
    let gate = Gate::on(stream)?;
    let (passed, code) = gate.is_passed_by(context, true, || cu!(cuMemAlloc_v2(&mut 0, 2 << 20)))?;
    log.is("it returned while the other stream worked", passed, true);
    log.is("code", code, 0);
    ok!(cu cuStreamSynchronize(stream));
    Ok(())
}

fn ordered(log: &mut Log) -> Answer {
    let (first, second, done) = (stream()?, stream()?, event(2)?);
    let mut block = 0;
    log.is("cuMemAllocAsync", cu!(cuMemAllocAsync(&mut block, 8192, first)), 0);
    log.is("a fill behind it", cu!(cuMemsetD8Async(block, 4, 8192, first)), 0);
    ok!(cu cuEventRecord(done, first));
    ok!(cu cuStreamWaitEvent(second, done, 0));
    log.is("read in another stream", kinds_of(load::<u8>(block, 8192, second)?), vec![4]);
    log.is("cuMemFreeAsync in the other stream", cu!(cuMemFreeAsync(block, second)), 0);
    ok!(cu cuStreamSynchronize(second));
    ok!(cu cuMemAllocAsync(&mut block, 8192, first));
    ok!(cu cuStreamSynchronize(first));
    log.is("cuMemFree of such memory", cu!(cuMemFree_v2(block)), 0);
    let plain = memory(4096)?;
    log.is("cuMemFreeAsync of plain memory", cu!(cuMemFreeAsync(plain, first)), 0);
    log.is("cuMemFreeAsync of an address of nothing", cu!(cuMemFreeAsync(64, first)), 1);
    ok!(cu cuStreamSynchronize(first));
    Ok(())
}

fn ordered_frees(log: &mut Log) -> Answer {
    let stream = stream()?;
    warm(stream)?;
    let (mut block, target, plain) = (0, memory(4096)?, memory(4096)?);
    ok!(cu cuMemAllocAsync(&mut block, 4096, stream));
    ok!(cu cuMemsetD8Async(block, 3, 4096, stream));
    log.is("freed inside of it", cu!(cuMemFreeAsync(block + 256, stream)), 1);
    let gate = Gate::on(stream)?;
    ok!(cu cuMemcpyDtoDAsync_v2(target, block, 4096, stream));
    log.is("freed while the stream is blocked", (cu!(cuMemFreeAsync(block, stream)), gate.is_open()), (0, false));
    log.is("freed again", cu!(cuMemFreeAsync(block, stream)), 1);
    log.is("plain memory", (cu!(cuMemFreeAsync(plain, stream)), gate.is_open()), (0, false));
    log.is("the stream", (cu!(cuStreamQuery(stream)), gate.is_open()), (NOT_READY, false));
    gate.open();
    log.is("what the work before it read", kinds_of(load::<u8>(target, 4096, stream)?), vec![3]);
    ok!(cu cuMemFree_v2(target));
    Ok(())
}

fn pool(log: &mut Log) -> Answer {
    start(0)?;
    let stream = stream()?;
    let mut pool: Handle = 0;
    ok!(cu cuDeviceGetDefaultMemPool(&mut pool, 0));
    let get = |attribute: u32| {
        let mut value = 0u64;
        let code = cu!(cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()));
        if code == 0 { Ok(value) } else { Err(code) }
    };
    log.is("the threshold at first", get(4), Ok(0));
    let (mut address, bytes) = (0, 8 << 20);
    ok!(cu cuMemAllocAsync(&mut address, bytes, stream));
    log.is("reserved for 8 MiB is as much at least", get(5).map(|value| value >= bytes as u64), Ok(true));
    log.is("used, and at most", (get(7), get(8)), (Ok(bytes as u64), Ok(bytes as u64)));
    ok!(cu cuMemFreeAsync(address, stream));
    ok!(cu cuStreamSynchronize(stream));
    log.is("with threshold 0, reserved after the stream was waited for", get(5), Ok(0));
    let mut most = u64::MAX;
    log.is("the threshold is set", cu!(cuMemPoolSetAttribute(pool, 4, (&raw mut most).cast())), 0);
    log.is("the threshold", get(4), Ok(u64::MAX));
    ok!(cu cuMemAllocAsync(&mut address, bytes, stream));
    ok!(cu cuMemFreeAsync(address, stream));
    ok!(cu cuStreamSynchronize(stream));
    log.is("reserved is kept", get(5).map(|value| value >= bytes as u64), Ok(true));
    log.is("used after the free", get(7), Ok(0));
    log.is("cuMemPoolTrimTo", cu!(cuMemPoolTrimTo(pool, 0)), 0);
    log.is("reserved after that", get(5), Ok(0));
    log.is("setting the reserved bytes", cu!(cuMemPoolSetAttribute(pool, 5, (&raw mut most).cast())), 1);
    Ok(())
}

fn pointers(log: &mut Log) -> Answer {
    let (context, stream, block, host) = (start(0)?, stream()?, memory(4096)?, pinned(4096)?);
    let mut ordered = 0;
    ok!(cu cuMemAllocAsync(&mut ordered, 4096, stream));
    let attribute = |which: u32, pointer: u64| {
        let mut value = 0u64;
        let code = cu!(cuPointerGetAttribute((&raw mut value).cast(), which, pointer));
        if code == 0 { Ok(value) } else { Err(code) }
    };
    let kind = |pointer: u64| attribute(2, pointer);
    log.is("device memory", kind(block + 100), Ok(2));
    log.is("memory in the order of a stream", kind(ordered), Ok(2));
    log.is("page-locked memory", kind(host.addr() as u64), Ok(1));
    log.is("the context", attribute(1, block + 100) == Ok(context as u64), true);
    let range = (attribute(11, block + 100) == Ok(block), attribute(12, block + 100));
    log.is("the range: from the start, and its bytes", range, (true, Ok(4096)));
    log.is("whether it has a handle for other processes", [block, ordered].map(|of| attribute(10, of)), [Ok(1), Ok(0)]);
    log.is("ids differ", attribute(7, block) == attribute(7, ordered), false);
    let on_host = attribute(4, host.addr() as u64) == Ok(host.addr() as u64);
    log.is("the host address", (attribute(4, block), on_host), (Err(1), true));
    log.is("an unknown attribute, and null", (attribute(99, block), kind(0)), (Err(1), Err(1)));
    let local = Box::new(0u64);
    log.is("memory of this process", kind((&raw const *local).addr() as u64), Err(1));
    ok!(cu cuMemFree_v2(block));
    log.is("freed memory", kind(block), Err(1));
    ok!(cu cuMemFreeAsync(ordered, stream));
    ok!(cu cuMemFreeHost(host));
    Ok(())
}
