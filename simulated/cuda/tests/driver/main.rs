//! The rules of the driver, by its functions, each scenario in a process of its own.
//!
//! With `HIGHWATER_TEST_DRIVER=libcuda.so.1` in the environment the same scenarios run over that library, and tell where a
//! real driver answers otherwise.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every call is one of the driver under test, with live arguments"
)]
#![allow(missing_docs, reason = "tests are documented by their names")]

/// Compares as std's does, and goes on after a difference over a real driver.
macro_rules! assert_eq {
    ($seen:expr, $expected:expr $(,)?) => {
        assert_eq!($seen, $expected, "")
    };
    ($seen:expr, $expected:expr, $($what:tt)+) => {
        $crate::process::compare(&$seen, &$expected, stringify!($seen), format!($($what)+))
    };
}

/// Calls a function of the driver.
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let function = cu!(@$($argument,)*)(crate::library::$name, stringify!($name));
        unsafe { function($($argument),*) }
    }};
    (@) => { crate::process::choose::none };
    (@$a:expr,) => { crate::process::choose::one };
    (@$a:expr, $b:expr,) => { crate::process::choose::two };
    (@$a:expr, $b:expr, $c:expr,) => { crate::process::choose::three };
    (@$a:expr, $b:expr, $c:expr, $d:expr,) => { crate::process::choose::four };
    (@$a:expr, $b:expr, $c:expr, $d:expr, $e:expr,) => { crate::process::choose::five };
    (@$a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr,) => { crate::process::choose::six };
}

/// Calls a function that has to succeed.
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(cu!($name($($argument),*)), 0)
    };
}

#[path = "../../src/lib.rs"]
mod library;

mod abi;
mod built;
mod capture;
mod lives;
mod memory;
mod process;
mod sharing;
mod streams;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use library::*;
use process::is_simulated;

type Handle = *mut c_void;

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

/// How many devices there are.
fn devices() -> i32 {
    let mut count = 0;
    ok!(cuDeviceGetCount(&mut count));
    count
}

/// What a byte of device memory holds when everything is done.
fn byte_at(ptr: u64) -> u8 {
    let mut byte = 0xeeu8;
    ok!(cuMemcpyDtoH_v2((&raw mut byte).cast(), ptr, 1));
    byte
}

extern "C" fn set_flag(flag: *mut c_void) {
    unsafe { &*flag.cast::<std::sync::atomic::AtomicU32>() }.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
}

extern "C" fn wait_for_flag(flag: *mut c_void) {
    let flag = unsafe { &*flag.cast::<std::sync::atomic::AtomicU32>() };
    while flag.load(std::sync::atomic::Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
}

/// A stream's work that lasts until it is opened.
struct Gate(&'static std::sync::atomic::AtomicU32);

impl Gate {
    fn on(stream: Handle) -> Self {
        let flag: &'static std::sync::atomic::AtomicU32 = Box::leak(Box::default());
        ok!(cuLaunchHostFunc(stream, Some(wait_for_flag), std::ptr::from_ref(flag).cast_mut().cast()));
        Self(flag)
    }

    fn open(&self) {
        self.0.store(1, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn devices_say_what_they_are() {
    process::alone("devices_say_what_they_are", &[("HIGHWATER_MOCK", "devices=2,memory=64MiB")], || {
        let mut count = 0;
        assert_eq!(cu!(cuDeviceGetCount(&mut count)), 3);
        let mut version = 0;
        ok!(cuDriverGetVersion(&mut version));
        if is_simulated() {
            assert_eq!(version, 13000);
        }
        let context = start();
        let last = devices() - 1;
        if is_simulated() {
            assert_eq!(last, 1);
        }
        let mut device = -1;
        ok!(cuDeviceGet(&mut device, last));
        assert_eq!(device, last);
        assert_eq!((cu!(cuDeviceGet(&mut device, last + 1)), cu!(cuDeviceGet(&mut device, -1))), (101, 101));
        let mut name = [1 as std::ffi::c_char; 64];
        ok!(cuDeviceGetName(name.as_mut_ptr(), 64, last));
        assert!(unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) }.count_bytes() > 4);
        ok!(cuDeviceGetName(name.as_mut_ptr(), 4, last));
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) }.count_bytes(), 3);
        ok!(cuDeviceGetPCIBusId(name.as_mut_ptr(), 13, last));
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) }.count_bytes(), 12);
        assert_eq!(cu!(cuDeviceGetPCIBusId(name.as_mut_ptr(), 4, last)), 1);
        let (mut first, mut second) = (layout::Uuid([0; 16]), layout::Uuid([0; 16]));
        ok!(cuDeviceGetUuid_v2(&mut first, 0));
        ok!(cuDeviceGetUuid_v2(&mut second, last));
        assert_eq!(first.0 == second.0, last == 0);
        let mut bytes = 0;
        ok!(cuDeviceTotalMem_v2(&mut bytes, 0));
        if is_simulated() {
            assert_eq!(bytes, 64 << 20);
        }
        let attribute = |which| {
            let mut value = -1;
            (cu!(cuDeviceGetAttribute(&mut value, which, 0)), value)
        };
        for (which, value) in [(75, 9), (76, 0), (16, 132), (41, 1), (115, 1), (119, 9), (125, 1), (99, 1), (88, 0)] {
            assert_eq!(attribute(which), (0, value), "attribute {which}");
        }
        assert_eq!((attribute(0).0, attribute(10_000).0), (1, 1));
        let mut can = -1;
        ok!(cuDeviceCanAccessPeer(&mut can, 0, 0));
        assert_eq!(can, 0);
        let mut other = null_mut();
        assert_eq!(cu!(cuCtxEnablePeerAccess(context, 0)), 101);
        if last > 0 {
            ok!(cuDeviceCanAccessPeer(&mut can, 0, 1));
            assert_eq!(can, 1);
            ok!(cuDevicePrimaryCtxRetain(&mut other, 1));
            assert_eq!(cu!(cuCtxEnablePeerAccess(other, 1)), 1);
            ok!(cuCtxEnablePeerAccess(other, 0));
            assert_eq!(cu!(cuCtxEnablePeerAccess(other, 0)), 704);
        }
        let (mut least, mut greatest) = (9, 9);
        ok!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest));
        assert_eq!((least, greatest), (0, -5));
        let mut text = null();
        ok!(cuGetErrorName(700, &mut text));
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");
        ok!(cuGetErrorString(2, &mut text));
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, c"out of memory");
        assert_eq!(cu!(cuGetErrorName(921, &mut text)), 1);
        let (mut function, mut status) = (null_mut(), 9);
        ok!(cuGetProcAddress_v2(c"cuMemAlloc".as_ptr(), &mut function, 12000, 0, &mut status));
        assert_eq!((function.is_null(), status), (false, 0));
        if is_simulated() {
            assert_eq!(function, cuMemAlloc_v2 as *mut c_void);
        }
        assert_eq!(cu!(cuGetProcAddress_v2(c"cuNothing".as_ptr(), &mut function, 12000, 0, &mut status)), 500);
    });
}

#[test]
fn contexts_are_counted_stacked_and_per_thread() {
    process::alone("contexts_are_counted_stacked_and_per_thread", &[("HIGHWATER_MOCK", "devices=2")], || {
        ok!(cuInit(0));
        assert_eq!(cu!(cuInit(1)), 1);
        let (mut flags, mut active) = (7, 7);
        ok!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
        assert_eq!((flags, active), (0, 0));
        // The last device, which with one device is the first.
        let last = devices() - 1;
        let (mut first, mut second, mut current) = (null_mut(), null_mut(), null_mut());
        ok!(cuDevicePrimaryCtxRetain(&mut first, 0));
        ok!(cuDevicePrimaryCtxRetain(&mut second, last));
        ok!(cuDevicePrimaryCtxRetain(&mut current, 0));
        assert_eq!(current, first);
        ok!(cuCtxGetCurrent(&mut current));
        assert_eq!(current, null_mut());
        let mut device = 9;
        assert_eq!(cu!(cuCtxGetDevice(&mut device)), 201);
        assert_eq!(cu!(cuCtxPopCurrent_v2(&mut current)), 201);
        if is_simulated() {
            assert_eq!(cu!(cuCtxSetCurrent(8 as Handle)), 201);
        }
        ok!(cuCtxSetCurrent(first));
        ok!(cuCtxPushCurrent_v2(second));
        ok!(cuCtxGetDevice(&mut device));
        assert_eq!(device, last);
        ok!(cuCtxPopCurrent_v2(&mut current));
        assert_eq!(current, second);
        ok!(cuCtxGetCurrent(&mut current));
        assert_eq!(current, first);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut current = null_mut();
                ok!(cuCtxGetCurrent(&mut current));
                assert_eq!(current, null_mut());
            });
        });
        ok!(cuCtxSetCurrent(null_mut()));
        assert_eq!(cu!(cuCtxGetDevice(&mut device)), 201);
        ok!(cuCtxSetCurrent(second));
        let held = memory(4096);
        if last > 0 {
            ok!(cuCtxEnablePeerAccess(first, 0));
            assert_eq!(cu!(cuCtxEnablePeerAccess(first, 0)), 704);
        }
        if last == 0 {
            ok!(cuDevicePrimaryCtxRelease_v2(0));
            ok!(cuDevicePrimaryCtxRelease_v2(0));
        }
        ok!(cuDevicePrimaryCtxRelease_v2(last));
        ok!(cuDevicePrimaryCtxGetState(last, &mut flags, &mut active));
        assert_eq!(active, 0);
        assert_eq!(cu!(cuDevicePrimaryCtxRelease_v2(last)), 201);
        let mut ptr = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&mut ptr, 1)), 709);
        // The context took its memory with it.
        ok!(cuDevicePrimaryCtxRetain(&mut current, last));
        assert_eq!(cu!(cuMemFree_v2(held)), 1);
        if last > 0 {
            // And its peer access.
            ok!(cuCtxEnablePeerAccess(first, 0));
        }
    });
}

#[test]
fn a_thread_without_a_context_frees_but_does_not_allocate() {
    process::alone("a_thread_without_a_context_frees_but_does_not_allocate", &[], || {
        start();
        let held = memory(4096);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut ptr, mut host, mut event, mut stream) = (0, null_mut(), null_mut(), null_mut());
                assert_eq!(cu!(cuMemAlloc_v2(&mut ptr, 4096)), 201);
                assert_eq!(cu!(cuMemHostAlloc(&mut host, 4096, 0)), 201);
                assert_eq!(cu!(cuEventCreate(&mut event, 0)), 201);
                assert_eq!(cu!(cuStreamCreate(&mut stream, 0)), 201);
                assert_eq!(cu!(cuStreamSynchronize(null_mut())), 201);
                assert_eq!(cu!(cuMemGetInfo_v2(&mut 0, &mut 0)), 201);
                assert_eq!(cu!(cuMemGetAddressRange_v2(&mut 0, &mut 0, held)), 201);
                ok!(cuMemFree_v2(held));
            });
        });
    });
}
