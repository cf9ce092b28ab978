//! Device memory, page-locked memory, copies.

use std::ptr::{null_mut, without_provenance_mut};

use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Attributes, Hip, Ptr, allocate, behind, download, free_bytes, gate_on, pinned, stream, upload};

const PAGE: usize = 4096;
const COHERENT: u32 = 0x4000_0000;
const NON_COHERENT: u32 = 0x8000_0000;

fn attributes(address: Ptr) -> Attributes {
    let mut found =
        Attributes { kind: 9, device: 9, on_device: null_mut(), on_host: null_mut(), is_managed: 9, flags: 9 };
    ok!(Hip.hipPointerGetAttributes(&mut found, address));
    found
}

/// Memory of the host that stays.
fn host(bytes: usize) -> Ptr {
    Box::leak(vec![0u8; bytes].into_boxed_slice()).as_mut_ptr().cast()
}

fn device_address(address: Ptr) -> Ptr {
    let mut found = null_mut();
    ok!(Hip.hipHostGetDevicePointer(&mut found, address, 0));
    found
}

isolated! {
    fn nothing_is_allocated_as_null(_) over ["rocm", "rocm6"] {
        let stream = stream();
        for allocate in [
            |place: &mut Ptr, _| code!(Hip.hipMalloc(place, 0)),
            |place: &mut Ptr, _| code!(Hip.hipHostMalloc(place, 0, 0)),
            |place: &mut Ptr, stream| code!(Hip.hipMallocAsync(place, 0, stream)),
        ] {
            let mut address = without_provenance_mut(7);
            assert_eq!((allocate(&mut address, stream), address), (0, null_mut()));
        }
    }

    fn null_is_freed_by_all_but_one_of_6(version) over ["rocm", "rocm6"] {
        ok!(Hip.hipFree(null_mut()));
        ok!(Hip.hipHostFree(null_mut()));
        assert_eq!(code!(Hip.hipFreeAsync(null_mut(), stream())), if version == 6 { 1 } else { 0 });
    }

    fn any_address_inside_frees_the_whole_and_either_call_frees_either_kind(_) over ["rocm", "rocm6"] {
        let before = free_bytes();
        let block = allocate(1 << 20);
        assert!(free_bytes() < before);
        ok!(Hip.hipFree(behind(block, 5000)));
        assert_eq!(free_bytes(), before);
        assert_eq!(code!(Hip.hipFree(block)), 1);
        ok!(Hip.hipHostFree(allocate(1 << 20)));
        assert_eq!(free_bytes(), before);
        let block = pinned(PAGE, 0);
        assert_eq!(attributes(block).kind, 1);
        ok!(Hip.hipFree(block));
        assert_eq!(attributes(block).kind, 0);
        // Memory of the program is nobody's, and registered memory is not freed.
        let own = host(PAGE);
        assert_eq!((code!(Hip.hipFree(own)), code!(Hip.hipHostFree(own))), (1, 1));
        ok!(Hip.hipHostRegister(own, PAGE, 0));
        assert_eq!((code!(Hip.hipFree(own)), code!(Hip.hipHostFree(own))), (1, 1));
    }

    fn freeing_waits_for_work(_) over ["rocm", "rocm6"] {
        let (stream, block) = (stream(), allocate(PAGE));
        let gate = gate_on(stream);
        ok!(Hip.hipMemsetAsync(block, 1, PAGE, stream));
        std::thread::scope(|scope| {
            let block = block.addr();
            let thread = scope.spawn(move || ok!(Hip.hipFree(without_provenance_mut(block))));
            std::thread::sleep(std::time::Duration::from_millis(60));
            assert!(!thread.is_finished());
            gate.open();
            thread.join().unwrap();
        });
    }

    fn more_than_there_is_is_out_of_memory(_) over ["rocm", "rocm6"] {
        assert_eq!(code!(Hip.hipMalloc(&mut null_mut(), 1 << 50)), 2);
        assert_eq!(code!(Hip.hipHostMalloc(&mut null_mut(), 1 << 50, 0)), 2);
        assert_eq!(code!(Hip.hipMallocAsync(&mut null_mut(), 1 << 50, stream())), 2);
    }

    fn memory_is_allocated_and_freed_in_stream_order(_) over ["rocm", "rocm6"] {
        let (stream, mut block, mut pool) = (stream(), null_mut(), null_mut());
        ok!(Hip.hipMallocAsync(&mut block, 16, stream));
        ok!(Hip.hipMemsetD32Async(block, 5, 4, stream));
        assert_eq!(download::<u32>(block, 4, stream), [5; 4]);
        ok!(Hip.hipFreeAsync(block, stream));
        ok!(Hip.hipDeviceGetDefaultMemPool(&mut pool, 0));
        let (mut threshold, mut used) = (u64::MAX, 1u64);
        ok!(Hip.hipMemPoolSetAttribute(pool, 4, std::ptr::from_mut(&mut threshold).cast()));
        threshold = 0;
        ok!(Hip.hipMemPoolGetAttribute(pool, 4, std::ptr::from_mut(&mut threshold).cast()));
        ok!(Hip.hipMemPoolGetAttribute(pool, 7, std::ptr::from_mut(&mut used).cast()));
        assert_eq!((threshold, used), (u64::MAX, 0));
        ok!(Hip.hipMemPoolTrimTo(pool, 0));
    }

    fn copies_stay_inside_and_have_a_direction(_) over ["rocm", "rocm6"] {
        let (stream, block, own) = (stream(), allocate(PAGE), host(2 * PAGE));
        let copy = |dst, src, bytes, kind| code!(Hip.hipMemcpyAsync(dst, src, bytes, kind, stream));
        assert_eq!(copy(block, own, PAGE + 1, 1), 1);
        assert_eq!(copy(behind(block, 1), own, PAGE, 1), 1);
        assert_eq!(copy(own, block, PAGE + 1, 2), 1);
        assert_eq!(code!(Hip.hipMemcpy(block, own, PAGE + 1, 1)), 1);
        assert_eq!((copy(block, own, PAGE, 9), copy(block, own, PAGE, -1)), (21, 21));
        assert_eq!(code!(Hip.hipMemcpy(block, own, PAGE, 9)), 21);
        assert_eq!(copy(null_mut(), own, 1, 1), 1);
        assert_eq!(code!(Hip.hipMemsetD8Async(block, 0, PAGE + 1, stream)), 1);
        assert_eq!(code!(Hip.hipMemsetD16Async(behind(block, 1), 0, 1, stream)), 1);
        // Any direction that there is will do, and the addresses tell.
        for kind in 0..=4 {
            assert_eq!(copy(block, own, PAGE, kind), 0);
        }
        assert_eq!((copy(null_mut(), null_mut(), 0, 4), copy(own, behind(own, PAGE), PAGE, 0)), (0, 0));
        ok!(Hip.hipMemsetD16Async(block, 0x0102, 2, stream));
        ok!(Hip.hipStreamSynchronize(stream));
        ok!(Hip.hipMemcpy(own, block, 4, 2));
        // SAFETY: nothing else uses the memory, which stays.
        assert_eq!(unsafe { own.cast::<[u16; 2]>().read_unaligned() }, [0x0102; 2]);
    }

    fn addresses_tell_what_they_are_of(version) over ["rocm", "rocm6"] {
        let (block, own, locked) = (allocate(PAGE), host(PAGE), pinned(PAGE, 3));
        let found = attributes(behind(block, 8));
        assert_eq!((found.kind, found.device, found.on_device, found.on_host), (2, 0, behind(block, 8), null_mut()));
        let found = attributes(behind(locked, 8));
        assert_eq!((found.kind, found.on_device, found.on_host), (1, behind(locked, 8), behind(locked, 8)));
        let found = attributes(own);
        assert_eq!((found.kind, found.device, found.on_device, found.on_host), (0, -2, null_mut(), null_mut()));
        let mut found = found;
        assert_eq!(code!(Hip.hipPointerGetAttributes(&mut found, null_mut())), if version == 6 { 1 } else { 0 });
        let (mut base, mut bytes) = (null_mut(), 0);
        ok!(Hip.hipMemGetAddressRange(&mut base, &mut bytes, behind(block, 77)));
        assert_eq!((base, bytes), (block, PAGE));
        assert_eq!(code!(Hip.hipMemGetAddressRange(&mut base, &mut bytes, own)), 500);
    }

    fn flags_of_host_memory_are_told_as_they_were_passed(_) over ["rocm", "rocm6"] {
        let told = |memory| {
            let mut flags = 9;
            ok!(Hip.hipHostGetFlags(&mut flags, memory));
            flags
        };
        // What it does not know it takes.
        for flags in [0, 3, 7, COHERENT, NON_COHERENT, NON_COHERENT | 3, 0x0800_0000] {
            assert_eq!(told(pinned(PAGE, flags)), flags);
        }
        let own = host(1);
        ok!(Hip.hipHostRegister(own, PAGE, 3));
        assert_eq!(code!(Hip.hipHostGetFlags(&mut 0, own)), 1);
        ok!(Hip.hipHostUnregister(own));
        assert_eq!(code!(Hip.hipHostMalloc(&mut null_mut(), PAGE, COHERENT | NON_COHERENT)), 1);
        assert_eq!(code!(Hip.hipHostGetFlags(&mut 0, host(1))), 1);
    }

    fn uncached_memory_is_registered_in_7(7) over ["rocm"] {
        let own = host(1);
        ok!(Hip.hipHostRegister(own, PAGE, NON_COHERENT));
        ok!(Hip.hipHostUnregister(own));
    }

    fn uncached_memory_is_not_registered_in_6(6) over ["rocm6"] {
        assert_eq!(code!(Hip.hipHostRegister(host(1), PAGE, NON_COHERENT)), 1);
    }

    fn what_is_registered_twice_is_unregistered_once(_) over ["rocm", "rocm6"] {
        let own = host(4 * PAGE);
        let odd = behind(own, 3);
        ok!(Hip.hipHostRegister(odd, PAGE, 3));
        ok!(Hip.hipHostRegister(odd, PAGE, 3));
        ok!(Hip.hipHostUnregister(odd));
        assert_eq!(code!(Hip.hipHostUnregister(odd)), 713);
        // One that overlaps succeeds as well, and has an end of its own.
        ok!(Hip.hipHostRegister(own, 2 * PAGE, 0));
        ok!(Hip.hipHostRegister(behind(own, PAGE), 2 * PAGE, 0));
        ok!(Hip.hipHostUnregister(behind(own, PAGE)));
        ok!(Hip.hipHostUnregister(own));
        assert_eq!(code!(Hip.hipHostUnregister(own)), 713);
        assert_eq!(code!(Hip.hipHostUnregister(pinned(PAGE, 0))), 713);
        for (address, bytes, flags) in [(null_mut(), PAGE, 0), (own, 0, 0), (own, PAGE, 0x100)] {
            assert_eq!(code!(Hip.hipHostRegister(address, bytes, flags)), 1);
        }
    }

    fn an_address_inside_of_a_registration_ends_the_process(_)
        over ["rocm", "rocm6"] aborts "Memobj map does not have ptr"
    {
        let own = host(2 * PAGE);
        ok!(Hip.hipHostRegister(own, 2 * PAGE, 0));
        code!(Hip.hipHostUnregister(behind(own, PAGE)));
    }

    fn registered_memory_has_another_address_on_the_device(_) over ["rocm", "rocm6"] {
        let (own, stream, block) = (host(2 * PAGE), stream(), upload(&[1u32, 2], null_mut()));
        assert_eq!(code!(Hip.hipHostGetDevicePointer(&mut null_mut(), own, 0)), 1);
        ok!(Hip.hipHostRegister(own, 2 * PAGE, 3));
        let there = device_address(own);
        assert_ne!(there, own);
        assert_eq!(device_address(behind(own, 100)), behind(there, 100));
        assert_eq!(code!(Hip.hipHostGetDevicePointer(&mut null_mut(), own, 1)), 1);
        for address in [own, there] {
            let found = attributes(behind(address, 8));
            assert_eq!((found.kind, found.on_device, found.on_host), (1, behind(there, 8), behind(own, 8)));
            ok!(Hip.hipMemcpyAsync(address, block, 8, 2, stream));
            ok!(Hip.hipMemsetD32Async(behind(address, 4), 9, 1, stream));
            assert_eq!(download::<u32>(address, 2, stream), [1, 9]);
        }
        let locked = pinned(PAGE, 0);
        assert_eq!(device_address(locked), locked);
        ok!(Hip.hipHostUnregister(own));
        assert_eq!(code!(Hip.hipMemsetD32Async(there, 9, 1, stream)), 1);
    }

    fn registered_memory_can_have_the_hosts_address(_)
        over ["rocm", "rocm6"] with HIGHWATER_SIMULATED_HIP = "registered-address=same"
    {
        let own = host(PAGE);
        ok!(Hip.hipHostRegister(own, PAGE, 3));
        assert_eq!(device_address(own), own);
    }

    fn copies_of_page_locked_memory_are_not_waited_for(_) over ["rocm", "rocm6"] {
        let (stream, block, locked) = (stream(), allocate(PAGE), pinned(PAGE, NON_COHERENT | 3));
        let gate = gate_on(stream);
        ok!(Hip.hipMemcpyAsync(block, locked, PAGE, 1, stream));
        ok!(Hip.hipMemcpyAsync(locked, block, PAGE, 2, stream));
        assert_eq!(code!(Hip.hipStreamQuery(stream)), 600);
        gate.open();
        ok!(Hip.hipStreamSynchronize(stream));
    }
}
