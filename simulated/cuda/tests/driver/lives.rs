//! Processes: forks, exits, and the variants.

use super::*;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicU32, Ordering};

/// Runs `body` in a forked child; true when it ended well.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork"),
        0 => {
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
            unsafe { libc::_exit(i32::from(!good)) }
        }
        child => {
            let mut state = 0;
            assert_eq!(unsafe { libc::waitpid(child, &mut state, 0) }, child);
            std::process::ExitStatus::from_raw(state).success()
        }
    }
}

#[test]
fn a_forked_child_has_no_driver_and_the_parent_keeps_it() {
    process::alone("lives::a_forked_child_has_no_driver_and_the_parent_keeps_it", &[], || {
        let context = start();
        let (held, stream) = (memory(4096), stream());
        assert!(in_child(|| {
            let (mut count, mut current, mut ptr) = (0, null_mut(), 0);
            [
                cu!(cuInit(0)),
                cu!(cuDeviceGetCount(&mut count)),
                cu!(cuCtxGetCurrent(&mut current)),
                cu!(cuCtxSetCurrent(context)),
                cu!(cuMemAlloc_v2(&mut ptr, 4096)),
                cu!(cuMemFree_v2(held)),
                cu!(cuStreamSynchronize(stream)),
            ] == [3; 7]
                && current.is_null()
        }));
        ok!(cuInit(0));
        ok!(cuMemsetD8Async(held, 1, 4096, stream));
        ok!(cuStreamSynchronize(stream));
        ok!(cuMemFree_v2(held));
    });
}

#[test]
fn a_child_of_a_process_that_never_initialised_has_a_driver() {
    process::alone("lives::a_child_of_a_process_that_never_initialised_has_a_driver", &[], || {
        assert!(in_child(|| {
            let mut context = null_mut();
            cu!(cuInit(0)) == 0 && cu!(cuDevicePrimaryCtxRetain(&mut context, 0)) == 0
        }));
    });
}

static EXIT_CODES: [AtomicU32; 4] = [const { AtomicU32::new(999) }; 4];
static HELD: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

extern "C" fn before_the_driver_ends() {
    let (mut current, mut ptr) = (null_mut(), 0);
    EXIT_CODES[0].store(cu!(cuCtxGetCurrent(&mut current)), Ordering::SeqCst);
    EXIT_CODES[1].store(cu!(cuMemAlloc_v2(&mut ptr, 64)), Ordering::SeqCst);
}

extern "C" fn after_the_driver_ended() {
    let mut ptr = 0;
    let codes = [
        EXIT_CODES[0].load(Ordering::SeqCst),
        EXIT_CODES[1].load(Ordering::SeqCst),
        cu!(cuMemAlloc_v2(&mut ptr, 64)),
        cu!(cuMemFree_v2(HELD.load(Ordering::SeqCst))),
    ];
    // The exit status is the only thing left to tell.
    unsafe { libc::_exit(i32::from(codes != [0, 0, 4, 4])) };
}

#[test]
fn the_driver_ends_with_its_exit_handler() {
    process::alone("lives::the_driver_ends_with_its_exit_handler", &[], || {
        let child = unsafe { libc::fork() };
        if child == 0 {
            unsafe { libc::atexit(after_the_driver_ended) };
            start();
            HELD.store(memory(64), Ordering::SeqCst);
            unsafe { libc::atexit(before_the_driver_ends) };
            unsafe { libc::exit(9) };
        }
        let mut state = 0;
        assert_eq!(unsafe { libc::waitpid(child, &mut state, 0) }, child);
        assert!(std::process::ExitStatus::from_raw(state).success(), "{state}");
    });
}

#[test]
fn threads_do_not_disturb_each_other() {
    process::alone("lives::threads_do_not_disturb_each_other", &[], || {
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
    });
}

const VARIANT: &str = "HIGHWATER_SIMULATED_CUDA";

#[test]
fn a_stub_and_a_machine_without_a_device_say_so() {
    process::alone_simulated(
        "lives::a_stub_and_a_machine_without_a_device_say_so",
        &[(VARIANT, "devices=none")],
        || {
            assert_eq!((cu!(cuInit(0)), cu!(cuInit(0))), (100, 100));
            assert_eq!(cu!(cuDeviceGetCount(&mut 0)), 3);
        },
    );
}

#[test]
fn a_stub_library_answers_34() {
    process::alone_simulated("lives::a_stub_library_answers_34", &[(VARIANT, "library=stub")], || {
        assert_eq!(cu!(cuInit(0)), 34);
    });
}

#[test]
fn a_variable_that_cannot_be_read_is_an_error() {
    process::alone_simulated("lives::a_variable_that_cannot_be_read_is_an_error", &[(VARIANT, "colour=red")], || {
        assert_eq!(cu!(cuInit(0)), 1);
    });
}

#[test]
fn a_process_sees_the_devices_that_it_is_told_to() {
    let settings = [("HIGHWATER_MOCK", "devices=3"), ("CUDA_VISIBLE_DEVICES", "2,0")];
    process::alone_simulated("lives::a_process_sees_the_devices_that_it_is_told_to", &settings, || {
        start();
        assert_eq!((devices(), cu!(cuDeviceGet(&mut 0, 2))), (2, 101));
        let uuid = |device| {
            let mut uuid = layout::Uuid([0; 16]);
            ok!(cuDeviceGetUuid_v2(&mut uuid, device));
            uuid.0[15]
        };
        assert_eq!((uuid(0), uuid(1)), (2, 0));
        let (mut device, ptr, mut owner) = (9, memory(64), 9u32);
        ok!(cuCtxGetDevice(&mut device));
        ok!(cuPointerGetAttribute((&raw mut owner).cast(), 9, ptr));
        assert_eq!((device, owner), (0, 0));
    });
}

#[test]
fn a_process_that_sees_no_device_has_none() {
    let name = "lives::a_process_that_sees_no_device_has_none";
    process::alone(name, &[("CUDA_VISIBLE_DEVICES", "")], || {
        assert_eq!((cu!(cuInit(0)), cu!(cuDeviceGetCount(&mut 0))), (100, 3));
    });
}

#[test]
fn faults_of_the_mock_are_the_drivers_codes() {
    let settings = [("HIGHWATER_MOCK", "fail=allocate:2,fail=copy:2,fail=fill:1:device-lost")];
    process::alone_simulated("lives::faults_of_the_mock_are_the_drivers_codes", &settings, || {
        start();
        let (stream, ptr, mut other) = (stream(), memory(64), 0);
        assert_eq!(cu!(cuMemAlloc_v2(&mut other, 64)), 2);
        ok!(cuMemAlloc_v2(&mut other, 64));
        ok!(cuMemcpyDtoDAsync_v2(ptr, other, 64, stream));
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(ptr, [0u8; 64].as_ptr().cast(), 64, stream)), 999);
        assert_eq!(cu!(cuMemsetD8Async(ptr, 0, 64, stream)), 700);
        assert_eq!((cu!(cuStreamSynchronize(stream)), cu!(cuMemFree_v2(ptr))), (700, 700));
    });
}

#[test]
fn chosen_calls_answer_an_unknown_code_and_lose_the_context() {
    let settings = [(VARIANT, "driver-version=12020,unknown-code=cuStreamQuery:2,lose-context=cuEventQuery")];
    process::alone_simulated("lives::chosen_calls_answer_an_unknown_code_and_lose_the_context", &settings, || {
        start();
        let mut version = 0;
        ok!(cuDriverGetVersion(&mut version));
        assert_eq!(version, 12020);
        let (stream, event, held, host) = (stream(), event(2), memory(64), pinned(64));
        let codes = [(); 3].map(|()| cu!(cuStreamQuery(stream)));
        assert_eq!(codes, [0, 921, 0]);
        assert_eq!(cu!(cuEventQuery(event)), 700);
        let mut ptr = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&mut ptr, 64)), 700);
        assert_eq!((cu!(cuStreamSynchronize(stream)), cu!(cuCtxSynchronize())), (700, 700));
        assert_eq!((cu!(cuStreamDestroy_v2(stream)), cu!(cuEventDestroy_v2(event))), (700, 700));
        assert_eq!((cu!(cuMemFree_v2(held)), cu!(cuMemFreeHost(host.cast()))), (700, 700));
        // What says nothing about a context goes on.
        ok!(cuDeviceGetCount(&mut 0));
    });
}
