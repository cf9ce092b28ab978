//! Page-locked memory: allocated and registered.

use crate::calls::ok;
use crate::calls::{Pointer, cu};
use crate::rig::{READ_WRITE, bytes_at, kinds_of, load, memory, pages, pinned, store, stream};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::Log;
use highwater_simulated_harness::rules;

rules! {
    "host.allocated" Driver Shared allocated: "allocated memory has its host address on the device, and is freed by its start, once";
    "host.kinds" Driver Shared kinds: "portable, mapped and write-combined memory can be had, and unknown flags answer 1";
    "host.registered" Driver Shared registered: "memory of the process is registered at any address, with its host address on the device";
    "host.overlaps" Driver Shared overlaps: "a registration over another answers 712, be it larger or smaller, and one over allocated memory 1";
    "host.unregistered-by-start" Driver Shared by_start: "a registration ends by its start; inside of it the answer is 1";
    "host.protection" Driver Shared protection: "memory that may not be read is refused, and such that may not be written unless it is registered as read-only";
    "host.copies-in-one" Driver Shared copies: "a copy lies in one registration: across two, or past the end, it answers 1";
}

fn at(pointer: Pointer, offset: usize) -> Pointer {
    pointer.wrapping_byte_add(offset)
}

fn device_address(pointer: Pointer) -> Result<u64, u32> {
    let mut address = 0;
    match cu!(cuMemHostGetDevicePointer_v2(&mut address, pointer, 0)) {
        0 => Ok(address),
        code => Err(code),
    }
}

fn allocated(log: &mut Log) -> Answer {
    let (stream, size) = (stream()?, 8192);
    let (host, block) = (pinned(size)?, memory(size)?);
    log.is("the device address is the host address", device_address(host) == Ok(host.addr() as u64), true);
    let inside = device_address(at(host, 100));
    log.is("inside of it, too", inside == Ok(host.addr() as u64 + 100), true);
    store(block, &[0x42u8; 8192], stream)?;
    ok!(cu cuMemcpyDtoHAsync_v2(at(host, 4096), block, 4096, stream));
    ok!(cu cuStreamSynchronize(stream));
    log.is("first half", kinds_of(bytes_at(host, 4096)), vec![0]);
    log.is("second half", kinds_of(bytes_at(at(host, 4096), 4096)), vec![0x42]);
    log.is("freed inside of it", cu!(cuMemFreeHost(at(host, 64))), 1);
    log.is("freed", cu!(cuMemFreeHost(host)), 0);
    log.is("freed again", cu!(cuMemFreeHost(host)), 1);
    log.is(
        "device memory freed as host memory",
        cu!(cuMemFreeHost(std::ptr::without_provenance_mut(block as usize))),
        1,
    );
    log.is("the device address of what was freed", device_address(host), Err(1));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn kinds(log: &mut Log) -> Answer {
    for flags in [0u32, 1, 2, 3, 4, 7] {
        let mut host = std::ptr::null_mut();
        let code = cu!(cuMemHostAlloc(&mut host, 4096, flags));
        log.is(&format!("flags {flags}"), code, 0);
        if code == 0 {
            log.is(&format!("flags {flags}: freed"), cu!(cuMemFreeHost(host)), 0);
        }
    }
    log.is("unknown flags", cu!(cuMemHostAlloc(&mut std::ptr::null_mut(), 4096, 0x1000)), 1);
    Ok(())
}

fn registered(log: &mut Log) -> Answer {
    let (stream, block) = (stream()?, memory(8192)?);
    let memory = pages(4, READ_WRITE)?;
    let start = at(memory, 100);
    log.is("at no border of a page", cu!(cuMemHostRegister_v2(start, 5000, 1)), 0);
    log.is("the device address is the host address", device_address(start) == Ok(start.addr() as u64), true);
    log.is("freed as if it was allocated", cu!(cuMemFreeHost(start)), 1);
    store(block, &[9u8; 8192], stream)?;
    ok!(cu cuMemcpyDtoHAsync_v2(start, block, 5000, stream));
    ok!(cu cuStreamSynchronize(stream));
    let before = bytes_at(memory, 100);
    log.is("its bytes", (kinds_of(before), kinds_of(bytes_at(start, 5000))), (vec![0], vec![9]));
    log.is("unregistered", cu!(cuMemHostUnregister(start)), 0);
    log.is("registered again", cu!(cuMemHostRegister_v2(start, 5000, 3)), 0);
    log.is("unregistered again", cu!(cuMemHostUnregister(start)), 0);
    log.is("bytes it keeps", kinds_of(bytes_at(start, 5000)), vec![9]);
    log.is("no bytes", cu!(cuMemHostRegister_v2(memory, 0, 0)), 1);
    log.is("unknown flags", cu!(cuMemHostRegister_v2(memory, 4096, 0x1000)), 1);
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn overlaps(log: &mut Log) -> Answer {
    let memory = pages(4, READ_WRITE)?;
    let middle = at(memory, 4096);
    ok!(cu cuMemHostRegister_v2(middle, 8192, 1));
    log.is("the same", cu!(cuMemHostRegister_v2(middle, 8192, 1)), 712);
    log.is("a part", cu!(cuMemHostRegister_v2(at(memory, 8192), 4096, 1)), 712);
    log.is("a larger one", cu!(cuMemHostRegister_v2(memory, 4 * 4096, 1)), 712);
    log.is("one that begins before", cu!(cuMemHostRegister_v2(memory, 8192, 1)), 712);
    log.is("one before it", cu!(cuMemHostRegister_v2(memory, 4096, 1)), 0);
    log.is("one behind it", cu!(cuMemHostRegister_v2(at(memory, 3 * 4096), 4096, 1)), 0);
    for offset in [0, 4096, 3 * 4096] {
        log.is(&format!("unregistered at {offset}"), cu!(cuMemHostUnregister(at(memory, offset))), 0);
    }
    let own = pinned(4096)?;
    log.is("memory that the driver allocated", cu!(cuMemHostRegister_v2(own, 4096, 1)), 1);
    ok!(cu cuMemFreeHost(own));
    Ok(())
}

fn by_start(log: &mut Log) -> Answer {
    let memory = pages(4, READ_WRITE)?;
    ok!(cu cuMemHostRegister_v2(memory, 4 * 4096, 1));
    log.is("in its midst", cu!(cuMemHostUnregister(at(memory, 8192))), 1);
    log.is("at its start", cu!(cuMemHostUnregister(memory)), 0);
    log.is("at its start, again", cu!(cuMemHostUnregister(memory)), 713);
    let never = pages(1, READ_WRITE)?;
    log.is("of memory that never was registered", cu!(cuMemHostUnregister(never)), 713);
    Ok(())
}

fn protection(log: &mut Log) -> Answer {
    let memory = pages(1, libc::PROT_NONE)?;
    log.is("memory that may not be read", cu!(cuMemHostRegister_v2(memory, 4096, 1)), 1);
    // SAFETY: the page is this rule's own.
    if unsafe { libc::mprotect(memory, 4096, libc::PROT_READ) } != 0 {
        return Err(std::io::Error::last_os_error().to_string());
    }
    log.is("memory that may be read only", cu!(cuMemHostRegister_v2(memory, 4096, 1)), 1);
    let again = cu!(cuMemHostUnregister(memory)) == 0;
    log.is("it was registered", again, false);
    log.is("the same as read-only", cu!(cuMemHostRegister_v2(memory, 4096, 8)), 0);
    log.is("unregistered", cu!(cuMemHostUnregister(memory)), 0);
    Ok(())
}

fn copies(log: &mut Log) -> Answer {
    let (stream, block) = (stream()?, memory(4 * 4096)?);
    let memory = pages(3, READ_WRITE)?;
    let (first, second) = (memory, at(memory, 4096));
    ok!(cu cuMemHostRegister_v2(first, 4096, 1));
    ok!(cu cuMemHostRegister_v2(second, 4096, 1));
    // SAFETY: the pages are this rule's own.
    unsafe { memory.cast::<u8>().write_bytes(8, 3 * 4096) };
    let edge = at(memory, 4096 - 64);
    log.is("each alone", cu!(cuMemcpyHtoDAsync_v2(block, first.cast_const(), 4096, stream)), 0);
    log.is("the second alone", cu!(cuMemcpyHtoDAsync_v2(block + 4096, second.cast_const(), 4096, stream)), 0);
    log.is("128 bytes across, in", cu!(cuMemcpyHtoDAsync_v2(block, edge.cast_const(), 128, stream)), 1);
    log.is("128 bytes across, out", cu!(cuMemcpyDtoHAsync_v2(edge, block, 128, stream)), 1);
    log.is("both whole", cu!(cuMemcpyHtoDAsync_v2(block, first.cast_const(), 8192, stream)), 1);
    log.is("into the tail behind them", cu!(cuMemcpyHtoDAsync_v2(block, second.cast_const(), 8192, stream)), 1);
    log.is("the stream goes on", cu!(cuStreamSynchronize(stream)), 0);
    log.is("what arrived", kinds_of(load::<u8>(block, 8192, stream)?), vec![8]);
    ok!(cu cuMemHostUnregister(first));
    ok!(cu cuMemHostUnregister(second));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}
