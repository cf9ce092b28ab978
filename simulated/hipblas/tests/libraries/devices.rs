//! Devices, versions, and what the runtime remembers of errors.

use std::ffi::CStr;
use std::ptr::null_mut;

use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Blas, Hip, Ptr, allocate, download, free_bytes, gate_on, optional, stream, text, upload};

fn attribute(attribute: i32, device: i32) -> i32 {
    let mut value = -1;
    ok!(Hip.hipDeviceGetAttribute(&mut value, attribute, device));
    value
}

fn u32_at(bytes: &[u8], at: usize) -> i32 {
    i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn text_at(bytes: &[u8], at: usize) -> &str {
    CStr::from_bytes_until_nul(&bytes[at..]).unwrap().to_str().unwrap()
}

isolated! {
    fn without_a_device_everything_else_answers_100_and_writes_nothing(version) over ["rocm:no-device", "rocm6:no-device"] {
        let (mut runtime, mut driver, mut number) = (0, 0, 7);
        ok!(Hip.hipRuntimeGetVersion(&mut runtime));
        ok!(Hip.hipDriverGetVersion(&mut driver));
        let expected = if version == 6 { 60_443_484 } else { 70_253_211 };
        assert_eq!((runtime, driver), (expected, expected));
        assert_eq!(code!(Hip.hipInit(0)), 100);
        assert_eq!(code!(Hip.hipGetDeviceCount(&mut number)), 100);
        assert_eq!(number, 0);
        let mut place = std::ptr::without_provenance_mut(7);
        assert_eq!(code!(Hip.hipGetDevice(&mut number)), 100);
        assert_eq!(code!(Hip.hipSetDevice(0)), 100);
        assert_eq!(code!(Hip.hipFree(null_mut())), 100);
        assert_eq!(code!(Hip.hipMalloc(&mut place, 16)), 100);
        assert_eq!(code!(Hip.hipHostMalloc(&mut place, 16, 0)), 100);
        assert_eq!(code!(Hip.hipStreamCreateWithFlags(&mut place, 1)), 100);
        assert_eq!(code!(Hip.hipEventCreateWithFlags(&mut place, 2)), 100);
        assert_eq!((place.addr(), number), (7, 0));
        for _ in 0..2 {
            assert_eq!((code!(Hip.hipPeekAtLastError()), code!(Hip.hipGetLastError())), (100, 100));
        }
        assert_eq!(code!(Blas.hipblasCreate(&mut place)), 6);
        assert_eq!(place.addr(), 7);
        assert_eq!(text("hip", "hipGetErrorName", 100), "hipErrorNoDevice");
        assert_eq!(text("hip", "hipGetErrorName", 921), "hipErrorUnknown");
        assert!(!text("hip", "hipGetErrorString", 921).is_empty());
    }

    fn the_last_error_is_that_of_the_call_before_in_6_and_of_the_last_failure_in_7(version) over ["rocm", "rocm6"] {
        let mut device = 0;
        ok!(Hip.hipGetDevice(&mut device));
        assert_eq!(code!(Hip.hipGetLastError()), 0);
        assert_eq!(code!(Hip.hipSetDevice(9)), 101);
        assert_eq!([code!(Hip.hipPeekAtLastError()), code!(Hip.hipGetLastError()), code!(Hip.hipGetLastError())], [101, 101, 0]);
        assert_eq!(code!(Hip.hipSetDevice(9)), 101);
        ok!(Hip.hipGetDevice(&mut device));
        assert_eq!(code!(Hip.hipGetLastError()), if version == 6 { 0 } else { 101 });
        // That work is not done yet is remembered by 6 only.
        let stream = stream();
        let gate = gate_on(stream);
        assert_eq!(code!(Hip.hipStreamQuery(stream)), 600);
        assert_eq!(code!(Hip.hipGetLastError()), if version == 6 { 600 } else { 0 });
        gate.open();
        // Each thread has its own.
        assert_eq!(code!(Hip.hipSetDevice(9)), 101);
        assert_eq!(std::thread::spawn(|| code!(Hip.hipGetLastError())).join().unwrap(), 0);
        assert_eq!(code!(Hip.hipGetLastError()), 101);
    }

    fn each_thread_begins_on_the_first_device(_) over ["rocm", "rocm6"] with HIGHWATER_MOCK = "devices=2" {
        let device = || {
            let mut device = -1;
            ok!(Hip.hipGetDevice(&mut device));
            device
        };
        ok!(Hip.hipSetDevice(1));
        assert_eq!((device(), std::thread::spawn(device).join().unwrap(), device()), (1, 0, 1));
        // What is made belongs to the device that is current, and is used whichever is.
        let (mut of, stream, before) = (-1, stream(), free_bytes());
        let block = upload(&[5u32], stream);
        assert!(free_bytes() < before);
        ok!(Hip.hipSetDevice(0));
        ok!(Hip.hipStreamGetDevice(stream, &mut of));
        assert_eq!((of, download::<u32>(block, 1, stream)), (1, vec![5]));
        ok!(Hip.hipFree(block));
        for bad in [-1, 2] {
            assert_eq!(code!(Hip.hipSetDevice(bad)), 101);
        }
        assert_eq!(device(), 0);
    }

    fn devices_can_be_hidden_and_turned_around(_)
        over ["rocm", "rocm6"] with HIGHWATER_MOCK = "devices=3" with HIP_VISIBLE_DEVICES = "2,0"
    {
        let (mut count, mut of) = (0, 0);
        ok!(Hip.hipGetDeviceCount(&mut count));
        assert_eq!((count, attribute(67, 0), attribute(67, 1)), (2, 3, 1));
        ok!(Hip.hipStreamGetDevice(stream(), &mut of));
        assert_eq!(of, 0);
    }

    fn attributes_and_both_layouts_of_the_properties_agree(_) over ["rocm", "rocm6"] with HIGHWATER_MOCK = "devices=2,memory=256MiB" {
        let (mut old, mut new) = (vec![0xffu8; 4096], vec![0xffu8; 4096]);
        ok!(Hip.hipGetDeviceProperties(old.as_mut_ptr(), 1));
        ok!(Hip.hipGetDevicePropertiesR0600(new.as_mut_ptr(), 1));
        assert_eq!((text_at(&old, 396), text_at(&new, 1160)), ("gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack-"));
        assert_eq!((text_at(&old, 0), u64_at(&old, 256)), (text_at(&new, 0), u64_at(&new, 288)));
        assert_eq!(u64_at(&new, 288), 256 << 20);
        for (in_old, in_new, which, value) in
            [(276, 308, 87, 64), (336, 388, 63, 304), (364, 592, 69, 0), (368, 584, 67, 2), (372, 588, 68, 0), (328, 360, 23, 9), (332, 364, 61, 4)]
        {
            assert_eq!((u32_at(&old, in_old), u32_at(&new, in_new), attribute(which, 1)), (value, value, value), "{which}");
        }
        assert_eq!((u32_at(&new, 396), attribute(16, 1)), (0, 0));
        // Nothing is written behind the structures.
        assert!(old[792..].iter().chain(&new[1472..]).all(|&byte| byte == 0xff));
        let mut uuid = [0; 16];
        ok!(Hip.hipDeviceGetUuid(&mut uuid, 1));
        assert_eq!(new[256..272], uuid);
        let (mut name, mut bytes) = ([0i8; 64].map(|byte| byte as std::ffi::c_char), 0);
        ok!(Hip.hipDeviceGetPCIBusId(name.as_mut_ptr(), 64, 1));
        // SAFETY: the call ended the text.
        assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"0000:02:00.0");
        ok!(Hip.hipDeviceGetName(name.as_mut_ptr(), 64, 1));
        ok!(Hip.hipDeviceTotalMem(&mut bytes, 1));
        assert_eq!(bytes, 256 << 20);
        assert_eq!([78, 85, 88, 18, 10011].map(|which| attribute(which, 0)), [1, 1, 1, 0, 1]);
        assert_eq!(code!(Hip.hipDeviceGetAttribute(&mut 0, 5000, 0)), 1);
        assert_eq!(code!(Hip.hipDeviceGetAttribute(&mut 0, 63, 2)), 101);
    }

    fn devices_reach_each_other_once_it_was_enabled(_) over ["rocm", "rocm6"] with HIGHWATER_MOCK = "devices=2" {
        let mut can = 0;
        ok!(Hip.hipDeviceCanAccessPeer(&mut can, 0, 1));
        assert_eq!(can, 1);
        assert_eq!(code!(Hip.hipDeviceDisablePeerAccess(1)), 705);
        ok!(Hip.hipDeviceEnablePeerAccess(1, 0));
        assert_eq!(code!(Hip.hipDeviceEnablePeerAccess(1, 0)), 704);
        assert_eq!((code!(Hip.hipDeviceEnablePeerAccess(0, 0)), code!(Hip.hipDeviceEnablePeerAccess(2, 0))), (101, 101));
        ok!(Hip.hipDeviceDisablePeerAccess(1));
        let source = upload(&[7u32, 8], null_mut());
        ok!(Hip.hipSetDevice(1));
        let (target, stream) = (allocate(8), stream());
        ok!(Hip.hipMemcpyPeerAsync(target, 1, source, 0, 8, stream));
        assert_eq!(download::<u32>(target, 2, stream), [7, 8]);
    }

    fn what_came_with_7_is_not_in_6(version) over ["rocm", "rocm6"] {
        type Get = unsafe extern "C" fn(Ptr, *mut u64) -> i32;
        let id = optional::<Get>("hip", "hipStreamGetId");
        let entry = optional::<Ptr>("hip", "hipGetDriverEntryPoint");
        assert_eq!((id.is_some(), entry.is_some()), (version == 7, version == 7));
        let (mut found, mut status) = (null_mut(), 9);
        let code = code!(Hip.hipGetProcAddress(c"hipStreamGetId".as_ptr(), &mut found, 0, 0, &mut status));
        assert_eq!((code, status, found.is_null()), if version == 7 { (0, 0, false) } else { (500, 1, true) });
        if let Some(id) = id {
            let (mut first, mut second) = (0, 0);
            // SAFETY: the streams are alive.
            assert_eq!(unsafe { (id(stream(), &mut first), id(stream(), &mut second)) }, (0, 0));
            assert_ne!(first, second);
        }
    }

    fn a_code_of_another_version_comes_once(_) over ["rocm:unknown-code", "rocm6:unknown-code"] {
        let mut stream = null_mut();
        assert_eq!((code!(Hip.hipStreamCreateWithPriority(&mut stream, 1, 0)), stream.is_null()), (921, true));
        ok!(Hip.hipStreamCreateWithPriority(&mut stream, 1, 0));
    }

    fn in_a_forked_child_nothing_works_and_the_parent_goes_on(_) over ["rocm", "rocm6"] {
        ok!(Hip.hipInit(0));
        // SAFETY: the child calls nothing but the library, whose locks nobody holds, and leaves.
        match unsafe { libc::fork() } {
            0 => {
                let code = code!(Hip.hipMalloc(&mut null_mut(), 16));
                // SAFETY: nothing of the child's is left to be done.
                unsafe { libc::_exit(code) }
            }
            child => {
                let mut status = 0;
                // SAFETY: the child is this process's, and the status is written to its own place.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(libc::WEXITSTATUS(status), 3);
            }
        }
        ok!(Hip.hipFree(allocate(16)));
    }
}
