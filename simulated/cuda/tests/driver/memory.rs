//! Device memory, page-locked memory, copies and fills.

use super::*;

#[test]
fn device_memory_is_freed_by_its_address_once() {
    process::alone("memory::device_memory_is_freed_by_its_address_once", &[("HIGHWATER_MOCK", "memory=8MiB")], || {
        start();
        let mut ptr = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&mut ptr, 0)), 1);
        assert_eq!(cu!(cuMemAlloc_v2(&mut ptr, 1 << 50)), 2);
        let (first, second) = (memory(4096), memory(4096));
        assert_eq!(first.abs_diff(second), 4096);
        let (mut base, mut bytes) = (0, 0);
        ok!(cuMemGetAddressRange_v2(&mut base, &mut bytes, second + 100));
        assert_eq!((base, bytes), (second, 4096));
        assert_eq!(cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, 64)), 500);
        assert_eq!((cu!(cuMemFree_v2(first + 8)), cu!(cuMemFree_v2(8))), (1, 1));
        let (mut free, mut total) = (0, 0);
        ok!(cuMemGetInfo_v2(&mut free, &mut total));
        if is_simulated() {
            assert_eq!((free, total), ((8 << 20) - 8192, 8 << 20));
        }
        ok!(cuMemFree_v2(0));
        ok!(cuMemFree_v2(first));
        assert_eq!(cu!(cuMemFree_v2(first)), 1);
    });
}

#[test]
fn free_waits_for_the_work_of_every_stream() {
    process::alone("memory::free_waits_for_the_work_of_every_stream", &[], || {
        start();
        let (stream, ptr) = (stream(), memory(4096));
        let gate = Gate::on(stream);
        let flag = gate.0;
        std::thread::scope(|scope| {
            let freeing = scope.spawn(move || {
                ok!(cuMemFree_v2(ptr));
                assert_eq!(flag.load(std::sync::atomic::Ordering::SeqCst), 1);
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!freeing.is_finished());
            gate.open();
        });
    });
}

fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    free
}

#[test]
fn stream_ordered_memory_comes_from_the_pool() {
    process::alone("memory::stream_ordered_memory_comes_from_the_pool", &[], || {
        start();
        let stream = stream();
        let mut pool = null_mut();
        ok!(cuDeviceGetDefaultMemPool(&mut pool, 0));
        let attribute = |which: u32| {
            let mut value = 0u64;
            ok!(cuMemPoolGetAttribute(pool, which, (&raw mut value).cast()));
            value
        };
        assert_eq!(attribute(4), 0);
        let mut most = u64::MAX;
        ok!(cuMemPoolSetAttribute(pool, 4, (&raw mut most).cast()));
        assert_eq!(attribute(4), u64::MAX);
        assert_eq!(cu!(cuMemPoolSetAttribute(pool, 5, (&raw mut most).cast())), 1);
        let mut ptr = 0;
        ok!(cuMemAllocAsync(&mut ptr, 0, stream));
        assert!(ptr == 0 || !is_simulated());
        ok!(cuMemAllocAsync(&mut ptr, 4096, stream));
        assert_eq!((attribute(7), attribute(8)), (4096, 4096));
        let used = attribute(7);
        ok!(cuMemsetD32Async(ptr, 0x0102_0304, 1024, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(byte_at(ptr), 4);
        assert_eq!(cu!(cuMemFreeAsync(ptr + 256, stream)), 1);
        let (plain, target) = (memory(64), memory(64));
        ok!(cuMemsetD8Async(plain, 3, 64, stream));
        let gate = Gate::on(stream);
        ok!(cuMemFreeAsync(ptr, stream));
        assert_eq!(cu!(cuMemFreeAsync(ptr, stream)), 1);
        // Plain memory is freed behind the work before it, too.
        ok!(cuMemcpyDtoDAsync_v2(target, plain, 64, stream));
        ok!(cuMemFreeAsync(plain, stream));
        assert_eq!((cu!(cuMemFreeAsync(plain, stream)), cu!(cuMemFree_v2(plain))), (1, 1));
        assert!(attribute(7) < used || !is_simulated());
        let before = free_bytes();
        gate.open();
        ok!(cuStreamSynchronize(stream));
        assert_eq!(byte_at(target), 3);
        // Both blocks are given back.
        assert!(free_bytes() > before + 4096 || !is_simulated());
        ok!(cuMemAllocAsync(&mut ptr, 4096, stream));
        ok!(cuMemFree_v2(ptr));
        ok!(cuMemPoolTrimTo(pool, 0));
        if is_simulated() {
            assert_eq!(cu!(cuMemPoolTrimTo(8 as Handle, 0)), 1);
        }
    });
}

#[test]
fn copies_reach_memory_of_every_kind() {
    process::alone("memory::copies_reach_memory_of_every_kind", &[("HIGHWATER_MOCK", "devices=2")], || {
        let first = start();
        let stream = stream();
        let bytes = 200_000;
        let (near, host) = (memory(bytes), pinned(bytes));
        let mut second = null_mut();
        // With one device both are the same.
        ok!(cuDevicePrimaryCtxRetain(&mut second, devices() - 1));
        ok!(cuCtxSetCurrent(second));
        let far = memory(bytes);
        ok!(cuCtxSetCurrent(first));
        let pageable: Vec<u8> = (0..bytes).map(|index| index as u8).collect();
        let mut back = vec![0u8; bytes];
        // A short one from pageable memory is taken along, so the source may change at once.
        for part in [100, bytes] {
            let mut source = pageable.clone();
            ok!(cuMemcpyHtoDAsync_v2(near, source.as_ptr().cast(), part, stream));
            source.fill(0xff);
            ok!(cuMemcpyPeerAsync(far, second, near, first, part, stream));
            ok!(cuMemcpyAsync(host.addr() as u64, far, part, stream));
            ok!(cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), far, part, stream));
            assert_eq!(back[..part], pageable[..part]);
            assert_eq!(unsafe { std::slice::from_raw_parts(host, part) }, &pageable[..part]);
        }
        ok!(cuMemcpyDtoDAsync_v2(near + 3, far, 1000, stream));
        if is_simulated() {
            assert_eq!(cu!(cuMemcpyPeerAsync(far, 8 as Handle, near, first, 1, stream)), 201);
        }
        ok!(cuStreamSynchronize(stream));
        assert_eq!((byte_at(near + 3), byte_at(near + 1002)), (0, 231));
        // Ranges that leave their block, addresses of nothing, and pageable memory where the driver's is needed.
        for (dst, src, part) in [
            (near + 8, far, bytes),
            (near, far + 8, bytes),
            (0, far, 1),
            (near, 0, 1),
            (near.wrapping_sub(1 << 40), far, 1),
            (near, pageable.as_ptr().addr() as u64, 1),
        ] {
            assert_eq!(cu!(cuMemcpyDtoDAsync_v2(dst, src, part, stream)), 1, "{dst:#x} {src:#x} {part}");
        }
        ok!(cuMemcpyDtoDAsync_v2(near, far, 0, stream));
    });
}

#[test]
fn fills_are_exact_and_aligned() {
    process::alone("memory::fills_are_exact_and_aligned", &[], || {
        start();
        let (stream, ptr, host) = (stream(), memory(64), pinned(64));
        ok!(cuMemsetD8Async(ptr, 1, 64, stream));
        ok!(cuMemsetD8Async(ptr + 3, 2, 5, stream));
        ok!(cuMemsetD16Async(ptr + 10, 0x0403, 3, stream));
        ok!(cuMemsetD32Async(ptr + 20, 0x0807_0605, 2, stream));
        ok!(cuMemsetD16Async(host.addr() as u64 + 2, 0x0a09, 2, stream));
        assert_eq!(cu!(cuMemsetD16Async(ptr + 1, 0, 1, stream)), 1);
        assert_eq!(cu!(cuMemsetD32Async(ptr + 2, 0, 1, stream)), 1);
        assert_eq!(cu!(cuMemsetD8Async(ptr, 0, 65, stream)), 1);
        let mut seen = [0u8; 28];
        ok!(cuMemcpyDtoHAsync_v2(seen.as_mut_ptr().cast(), ptr, 28, stream));
        let expected = [1, 1, 1, 2, 2, 2, 2, 2, 1, 1, 3, 4, 3, 4, 3, 4, 1, 1, 1, 1, 5, 6, 7, 8, 5, 6, 7, 8];
        assert_eq!(seen, expected);
        assert_eq!(unsafe { std::slice::from_raw_parts(host, 8) }, [0, 0, 9, 10, 9, 10, 0, 0]);
    });
}

#[test]
fn page_locked_memory_keeps_its_rules() {
    process::alone("memory::page_locked_memory_keeps_its_rules", &[], || {
        start();
        let (stream, ptr) = (stream(), memory(64 << 10));
        let mut host = null_mut();
        assert_eq!((cu!(cuMemHostAlloc(&mut host, 0, 0)), cu!(cuMemHostAlloc(&mut host, 64, 8))), (0, 1));
        assert!(host.is_null() || !is_simulated());
        let block = pinned(4096);
        assert_eq!(cu!(cuMemFreeHost(block.wrapping_add(64).cast())), 1);
        let mut address = 0;
        ok!(cuMemHostGetDevicePointer_v2(&mut address, block.wrapping_add(64).cast(), 0));
        assert_eq!(address, block.addr() as u64 + 64);
        // Three pages, of which two registrations cover the first and the second.
        let mut pages = vec![0u8; 5 * 4096];
        let start = pages.as_mut_ptr().wrapping_add(pages.as_ptr().align_offset(4096));
        let page = |index: usize| start.wrapping_add(index * 4096).cast::<c_void>();
        ok!(cuMemHostRegister_v2(page(0), 4096, 1));
        ok!(cuMemHostRegister_v2(page(1), 4096, 1));
        assert_eq!(cu!(cuMemHostRegister_v2(page(1).wrapping_byte_sub(64), 128, 1)), 712);
        assert_eq!(cu!(cuMemHostRegister_v2(block.cast(), 64, 1)), 1);
        assert_eq!(cu!(cuMemHostRegister_v2(page(2), 0, 1)), 1);
        assert_eq!(cu!(cuMemHostRegister_v2(page(2), 64, 64)), 1);
        assert_eq!(cu!(cuMemFreeHost(page(0))), 1);
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(ptr, page(0), 4097, stream)), 1, "across two registrations");
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(ptr, page(1), 4097, stream)), 1, "into the unregistered tail");
        ok!(cuMemcpyHtoDAsync_v2(ptr, page(1), 4096, stream));
        assert_eq!(cu!(cuMemHostUnregister(page(0).wrapping_byte_add(64))), 1);
        assert_eq!(cu!(cuMemHostUnregister(page(2))), 713);
        ok!(cuMemHostUnregister(page(0)));
        assert_eq!(cu!(cuMemHostUnregister(page(0))), 713);
        // Unaligned.
        ok!(cuMemHostRegister_v2(page(0).wrapping_byte_add(100), 1000, 0));
        ok!(cuMemHostUnregister(page(0).wrapping_byte_add(100)));
        ok!(cuMemHostUnregister(page(1)));
        // Memory that nobody may read.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let guarded = unsafe { libc::mmap(null_mut(), 4096, libc::PROT_NONE, flags, -1, 0) };
        assert_eq!(cu!(cuMemHostRegister_v2(guarded, 4096, 0)), 1);
        // Memory that may only be read.
        assert_eq!(unsafe { libc::mprotect(guarded, 4096, libc::PROT_READ) }, 0);
        assert_eq!(cu!(cuMemHostRegister_v2(guarded, 4096, 0)), 1);
        ok!(cuMemHostRegister_v2(guarded, 4096, 8));
        ok!(cuMemHostUnregister(guarded));
        ok!(cuMemFreeHost(block.cast()));
        assert_eq!(cu!(cuMemFreeHost(block.cast())), 1);
    });
}

#[test]
fn pointers_say_what_they_point_to() {
    process::alone("memory::pointers_say_what_they_point_to", &[], || {
        let context = start();
        let stream = stream();
        let (plain, host) = (memory(4096), pinned(4096));
        let mut ordered = 0;
        ok!(cuMemAllocAsync(&mut ordered, 4096, stream));
        let attribute = |which: u32, ptr: u64| {
            let mut value = 0u64;
            (cu!(cuPointerGetAttribute((&raw mut value).cast(), which, ptr)), value)
        };
        let host = host.addr() as u64;
        assert_eq!((attribute(2, plain), attribute(2, host), attribute(2, ordered)), ((0, 2), (0, 1), (0, 2)));
        assert_eq!(attribute(1, plain + 8), (0, context.addr() as u64));
        assert_eq!((attribute(11, plain + 8), attribute(12, plain + 8)), ((0, plain), (0, 4096)));
        assert_eq!((attribute(10, plain), attribute(10, ordered)), ((0, 1), (0, 0)));
        assert_ne!(attribute(7, plain), attribute(7, ordered));
        assert_eq!((attribute(4, plain).0, attribute(4, host)), (1, (0, host)));
        let local = 0u8;
        assert_eq!(attribute(2, (&raw const local).addr() as u64).0, 1);
        assert_eq!((attribute(2, 0).0, attribute(99, plain).0), (1, 1));
    });
}
