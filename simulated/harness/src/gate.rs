//! Work that blocks a stream until it is let through.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

/// A host function as the vendors' libraries take it.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

unsafe extern "C" fn wait(flag: *mut c_void) {
    // SAFETY: flags of gates are never freed.
    let flag = unsafe { &*flag.cast::<AtomicBool>() };
    while !flag.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
}

/// Blocks a stream until it is opened or dropped.
#[derive(Debug)]
pub struct Gate(&'static AtomicBool);

impl Gate {
    /// Makes a gate. `launch` enqueues the function with its argument on the stream.
    pub fn launched_by(launch: impl FnOnce(HostFunction, *mut c_void)) -> Self {
        let flag: &'static AtomicBool = Box::leak(Box::default());
        launch(wait, std::ptr::from_ref(flag).cast_mut().cast());
        Self(flag)
    }

    /// Lets the stream go on.
    pub fn open(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}
