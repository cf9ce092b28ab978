//! What only the simulated driver has: variants, faults of the mock, exact books, and codes for what a real driver dies of.
//! The vendor's rules are in `backend-cuda/tests/rules/`, which run over this library and over the vendor's.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

use highwater_simulated_harness::gate::Gate;
use highwater_simulated_harness::isolated;

use crate::library::*;

type Handle = *mut c_void;

/// Calls a function of the driver.
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {
        unsafe { $name($($argument),*) }
    };
}

/// Calls a function that has to succeed.
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(cu!($name($($argument),*)), 0)
    };
}

/// Initialises the driver and makes the first device's context current.
fn start() -> Handle {
    ok!(cuInit(0));
    let mut context = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&mut context, 0));
    ok!(cuCtxSetCurrent(context));
    context
}

fn stream() -> Handle {
    let mut stream = null_mut();
    ok!(cuStreamCreate(&mut stream, 1));
    stream
}

fn event(flags: u32) -> Handle {
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, flags));
    event
}

fn memory(bytes: usize) -> u64 {
    let mut ptr = 0;
    ok!(cuMemAlloc_v2(&mut ptr, bytes));
    ptr
}

fn pinned(bytes: usize) -> *mut u8 {
    let mut ptr = null_mut();
    ok!(cuMemHostAlloc(&mut ptr, bytes, 1));
    ptr.cast()
}

fn gate_on(stream: Handle) -> Gate {
    Gate::launched_by(|wait, flag| ok!(cuLaunchHostFunc(stream, Some(wait), flag)))
}

/// How many devices there are.
fn devices() -> i32 {
    let mut count = 0;
    ok!(cuDeviceGetCount(&mut count));
    count
}

fn uuid(device: i32) -> [u8; 16] {
    let mut uuid = layout::Uuid([0; 16]);
    ok!(cuDeviceGetUuid_v2(&mut uuid, device));
    uuid.0
}

fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    free
}

isolated! {
    fn devices_say_what_they_are(_) over [] with HIGHWATER_MOCK = "devices=2,memory=64MiB" {
        let (mut version, mut device, mut bytes) = (0, -1, 0);
        ok!(cuDriverGetVersion(&mut version));
        assert_eq!(version, 13000);
        start();
        assert_eq!(devices(), 2);
        ok!(cuDeviceGet(&mut device, 1));
        assert_eq!((device, cu!(cuDeviceGet(&mut device, 2))), (1, 101));
        let mut name = [1 as c_char; 64];
        let length = |name: &[c_char; 64]| unsafe { CStr::from_ptr(name.as_ptr()) }.count_bytes();
        ok!(cuDeviceGetName(name.as_mut_ptr(), 64, 1));
        assert!(length(&name) > 4);
        ok!(cuDeviceGetName(name.as_mut_ptr(), 4, 1));
        assert_eq!(length(&name), 3);
        ok!(cuDeviceGetPCIBusId(name.as_mut_ptr(), 13, 1));
        assert_eq!(length(&name), 12);
        assert_eq!(cu!(cuDeviceGetPCIBusId(name.as_mut_ptr(), 4, 1)), 1);
        assert_ne!(uuid(0), uuid(1));
        ok!(cuDeviceTotalMem_v2(&mut bytes, 0));
        assert_eq!(bytes, 64 << 20);
        let attribute = |which| {
            let mut value = -1;
            (cu!(cuDeviceGetAttribute(&mut value, which, 0)), value)
        };
        for (which, value) in [(75, 9), (76, 0), (16, 132), (41, 1), (115, 1), (119, 9), (125, 1), (99, 1), (88, 0)] {
            assert_eq!(attribute(which), (0, value), "attribute {which}");
        }
        assert_eq!((attribute(0).0, attribute(10_000).0), (1, 1));
        let (mut text, mut function, mut status) = (null(), null_mut(), 9);
        ok!(cuGetErrorString(2, &mut text));
        assert_eq!(unsafe { CStr::from_ptr(text) }, c"out of memory");
        ok!(cuGetProcAddress_v2(c"cuMemAlloc".as_ptr(), &mut function, 12000, 0, &mut status));
        assert_eq!((function, status), (cuMemAlloc_v2 as Handle, 0));
        assert_eq!(cu!(cuGetProcAddress_v2(c"cuNothing".as_ptr(), &mut function, 12000, 0, &mut status)), 500);
    }

    fn what_a_real_driver_dies_of_has_a_code(_) over [] {
        let context = start();
        let (stale, done, ptr, nowhere) = (stream(), event(0), memory(64), 8 as Handle);
        let (mut graph, mut executable) = (null_mut(), null_mut());
        ok!(cuStreamBeginCapture_v2(stale, 1));
        ok!(cuStreamEndCapture(stale, &mut graph));
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok!(cuGraphDestroy(graph));
        ok!(cuGraphExecDestroy(executable));
        ok!(cuStreamDestroy_v2(stale));
        ok!(cuEventDestroy_v2(done));
        assert_eq!((cu!(cuStreamQuery(stale)), cu!(cuEventQuery(done)), cu!(cuEventDestroy_v2(done))), (400, 400, 400));
        assert_eq!((cu!(cuGraphDestroy(graph)), cu!(cuGraphLaunch(executable, null_mut()))), (400, 400));
        assert_eq!((cu!(cuCtxSetCurrent(nowhere)), cu!(cuMemPoolTrimTo(nowhere, 0))), (201, 1));
        assert_eq!(cu!(cuMemcpyPeerAsync(ptr, nowhere, ptr, context, 1, null_mut())), 201);
        let gate = gate_on(null_mut());
        ok!(cuMemFreeAsync(ptr, null_mut()));
        assert_eq!((cu!(cuMemFreeAsync(ptr, null_mut())), cu!(cuMemFree_v2(ptr))), (1, 1));
        gate.open();
    }

    fn a_new_object_has_the_handle_of_the_one_that_ended_last(_) over [] {
        start();
        let gate = gate_on(null_mut());
        let (first, block) = (stream(), memory(64));
        // Outstanding work does not keep the handle.
        ok!(cuMemsetD8Async(block, 1, 64, first));
        ok!(cuStreamDestroy_v2(first));
        let next = stream();
        assert_eq!((next, cu!(cuStreamSynchronize(next))), (first, 0));
        assert_ne!(stream(), next);
        let done = event(0);
        ok!(cuEventDestroy_v2(done));
        assert_eq!(event(0), done);
        let record = || {
            let mut graph = null_mut();
            ok!(cuStreamBeginCapture_v2(next, 1));
            ok!(cuStreamEndCapture(next, &mut graph));
            graph
        };
        let instantiate = |graph| {
            let mut executable = null_mut();
            ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            executable
        };
        let graph = record();
        let executable = instantiate(graph);
        ok!(cuGraphExecDestroy(executable));
        assert_eq!(instantiate(graph), executable);
        ok!(cuGraphDestroy(graph));
        assert_eq!(record(), graph);
        gate.open();
    }

    fn memory_is_counted_to_the_byte(_) over [] with HIGHWATER_MOCK = "memory=16MiB" {
        const GRANULARITY: usize = 2 << 20;
        start();
        let (stream, all) = (stream(), free_bytes());
        assert_eq!(all, 16 << 20);
        let (plain, mut ordered) = (memory(4096), 0);
        ok!(cuMemAllocAsync(&mut ordered, 4096, stream));
        assert_eq!(free_bytes(), all - 8192);
        ok!(cuMemFreeAsync(ordered, stream));
        ok!(cuMemFreeAsync(plain, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(free_bytes(), all);
        // Memory of a graph lives as long as the graph.
        let (mut graph, mut executable) = (null_mut(), null_mut());
        ok!(cuStreamBeginCapture_v2(stream, 0));
        ok!(cuMemAllocAsync(&mut ordered, 4096, stream));
        ok!(cuMemFreeAsync(ordered, stream));
        ok!(cuStreamEndCapture(stream, &mut graph));
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok!(cuGraphDestroy(graph));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(free_bytes(), all - 4096);
        ok!(cuGraphExecDestroy(executable));
        assert_eq!(free_bytes(), all);
        // Virtual memory ends with its last handle and mapping.
        let (mut handle, mut base, mut other) = (0, 0, 0);
        let properties = |handle_types| layout::AllocationProperties {
            kind: 1, handle_types, location_kind: 1, location: 0, win32_data: null_mut(), compression: 0, rdma: 0, usage: 0,
            reserved: [0; 4],
        };
        assert_eq!([8, 9].map(|types| cu!(cuMemCreate(&mut handle, GRANULARITY, &properties(types), 0))), [800, 800]);
        ok!(cuMemCreate(&mut handle, GRANULARITY, &properties(1), 0));
        ok!(cuMemAddressReserve(&mut base, 2 * GRANULARITY, 0, 0, 0));
        assert_eq!(cu!(cuMemMap(base, 2 * GRANULARITY, 0, handle, 0)), 801, "longer than the memory");
        ok!(cuMemMap(base, GRANULARITY, 0, handle, 0));
        ok!(cuMemRelease(handle));
        assert_eq!((cu!(cuMemRelease(handle)), free_bytes()), (1, all - GRANULARITY));
        ok!(cuMemUnmap(base, GRANULARITY));
        assert_eq!(free_bytes(), all);
        // Two numbers that are not open, as an H200 answers them, and a file that is no memory.
        for (wrong, code) in [(-1isize, 999), (1_000_000, 999), (0, 1)] {
            assert_eq!(cu!(cuMemImportFromShareableHandle(&mut other, wrong as Handle, 1)), code, "{wrong}");
        }
    }

    fn a_released_context_takes_its_peer_access_with_it(_) over [] with HIGHWATER_MOCK = "devices=2" {
        let (first, mut second) = (start(), null_mut());
        for _ in 0..2 {
            ok!(cuDevicePrimaryCtxRetain(&mut second, 1));
            ok!(cuCtxSetCurrent(second));
            ok!(cuCtxEnablePeerAccess(first, 0));
            assert_eq!(cu!(cuCtxEnablePeerAccess(first, 0)), 704);
            ok!(cuDevicePrimaryCtxRelease_v2(1));
        }
    }

    fn threads_do_not_disturb_each_other(_) over [] {
        let context = start().addr();
        let work = |seed: u8| {
            ok!(cuCtxSetCurrent(context as Handle));
            let (first, second, done) = (stream(), stream(), event(2));
            let host = pinned(4096);
            for round in 0..40u8 {
                let value = seed.wrapping_mul(41).wrapping_add(round);
                let (mut ordered, plain) = (0, memory(4096));
                ok!(cuMemAllocAsync(&mut ordered, 4096, first));
                ok!(cuMemsetD8Async(ordered, value, 4096, first));
                ok!(cuEventRecord(done, first));
                ok!(cuStreamWaitEvent(second, done, 0));
                // Captures of their own threads leave the others' calls alone.
                ok!(cuStreamBeginCapture_v2(first, 1));
                ok!(cuMemcpyDtoHAsync_v2(host.cast(), plain, 4096, first));
                let (mut graph, mut executable) = (null_mut(), null_mut());
                ok!(cuStreamEndCapture(first, &mut graph));
                ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
                ok!(cuMemcpyDtoDAsync_v2(plain, ordered, 4096, second));
                ok!(cuGraphLaunch(executable, second));
                ok!(cuStreamSynchronize(second));
                assert_eq!(unsafe { (host.read(), host.add(4095).read()) }, (value, value));
                ok!(cuMemFreeAsync(ordered, first));
                ok!(cuMemFree_v2(plain));
                ok!(cuGraphExecDestroy(executable));
                ok!(cuGraphDestroy(graph));
            }
            ok!(cuMemFreeHost(host.cast()));
            ok!(cuEventDestroy_v2(done));
            ok!(cuStreamDestroy_v2(first));
            ok!(cuStreamDestroy_v2(second));
        };
        std::thread::scope(|scope| {
            for seed in 0..4 {
                scope.spawn(move || work(seed));
            }
        });
    }

    fn a_machine_without_a_device_says_so(_) over [] with HIGHWATER_SIMULATED_CUDA = "devices=none" {
        assert_eq!((cu!(cuInit(0)), cu!(cuInit(0)), cu!(cuDeviceGetCount(&mut 0))), (100, 100, 3));
    }

    fn a_process_that_sees_no_device_has_none(_) over [] with CUDA_VISIBLE_DEVICES = "" {
        assert_eq!((cu!(cuInit(0)), cu!(cuDeviceGetCount(&mut 0))), (100, 3));
    }

    fn a_stub_library_answers_34(_) over [] with HIGHWATER_SIMULATED_CUDA = "library=stub" {
        assert_eq!(cu!(cuInit(0)), 34);
    }

    fn a_variable_that_cannot_be_read_is_an_error(_) over [] with HIGHWATER_SIMULATED_CUDA = "colour=red" {
        assert_eq!(cu!(cuInit(0)), 1);
    }

    fn a_process_sees_the_devices_that_it_is_told_to(_)
        over [] with HIGHWATER_MOCK = "devices=3" with CUDA_VISIBLE_DEVICES = "2,0"
    {
        start();
        assert_eq!((devices(), cu!(cuDeviceGet(&mut 0, 2))), (2, 101));
        assert_eq!((uuid(0)[15], uuid(1)[15]), (2, 0));
        let (mut device, ptr, mut owner) = (9, memory(64), 9u32);
        ok!(cuCtxGetDevice(&mut device));
        ok!(cuPointerGetAttribute((&raw mut owner).cast(), 9, ptr));
        assert_eq!((device, owner), (0, 0));
    }

    fn faults_of_the_mock_are_the_drivers_codes(_)
        over [] with HIGHWATER_MOCK = "fail=allocate:2,fail=copy:2,fail=fill:1:device-lost"
    {
        start();
        let (stream, ptr, mut other) = (stream(), memory(64), 0);
        assert_eq!(cu!(cuMemAlloc_v2(&mut other, 64)), 2);
        ok!(cuMemAlloc_v2(&mut other, 64));
        ok!(cuMemcpyDtoDAsync_v2(ptr, other, 64, stream));
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(ptr, [0u8; 64].as_ptr().cast(), 64, stream)), 999);
        assert_eq!(cu!(cuMemsetD8Async(ptr, 0, 64, stream)), 700);
        assert_eq!((cu!(cuStreamSynchronize(stream)), cu!(cuMemFree_v2(ptr))), (700, 700));
    }

    fn chosen_calls_answer_an_unknown_code_and_lose_the_context(_)
        over [] with HIGHWATER_SIMULATED_CUDA = "driver-version=12020,unknown-code=cuStreamQuery:2,lose-context=cuEventQuery"
    {
        start();
        let mut version = 0;
        ok!(cuDriverGetVersion(&mut version));
        assert_eq!(version, 12020);
        let (stream, event, held, host) = (stream(), event(2), memory(64), pinned(64));
        let codes = [(); 3].map(|()| cu!(cuStreamQuery(stream)));
        assert_eq!(codes, [0, 921, 0]);
        assert_eq!(cu!(cuEventQuery(event)), 700);
        assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 64)), 700);
        assert_eq!((cu!(cuStreamSynchronize(stream)), cu!(cuCtxSynchronize())), (700, 700));
        assert_eq!((cu!(cuStreamDestroy_v2(stream)), cu!(cuEventDestroy_v2(event))), (700, 700));
        assert_eq!((cu!(cuMemFree_v2(held)), cu!(cuMemFreeHost(host.cast()))), (700, 700));
        // What says nothing about a context goes on.
        ok!(cuDeviceGetCount(&mut 0));
    }
}
