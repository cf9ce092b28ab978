//! Streams and events.

use super::*;
use std::sync::atomic::{AtomicU32, Ordering};

#[test]
fn streams_are_asynchronous_and_in_order() {
    process::alone("streams::streams_are_asynchronous_and_in_order", &[], || {
        start();
        let (first, second) = (stream(), stream());
        let (ptr, host) = (memory(64), pinned(64));
        let gate = Gate::on(first);
        ok!(cuMemsetD8Async(ptr, 7, 64, first));
        ok!(cuMemcpyDtoHAsync_v2(host.cast(), ptr, 64, first));
        assert_eq!(cu!(cuStreamQuery(first)), 600);
        assert_eq!(cu!(cuStreamQuery(second)), 0);
        let done = event(2);
        ok!(cuEventQuery(done));
        ok!(cuEventRecord(done, first));
        assert_eq!(cu!(cuEventQuery(done)), 600);
        ok!(cuStreamWaitEvent(second, done, 0));
        let counter = AtomicU32::new(0);
        ok!(cuLaunchHostFunc(second, Some(set_flag), (&raw const counter).cast_mut().cast()));
        assert_eq!((cu!(cuStreamQuery(second)), counter.load(Ordering::SeqCst)), (600, 0));
        gate.open();
        ok!(cuStreamSynchronize(second));
        assert_eq!(counter.load(Ordering::SeqCst), 1);
        ok!(cuEventSynchronize(done));
        ok!(cuStreamSynchronize(first));
        assert_eq!(unsafe { std::slice::from_raw_parts(host, 64) }, [7; 64]);
        ok!(cuCtxSynchronize());
        // What is queued is executed after the stream was destroyed, too.
        let gate = Gate::on(first);
        ok!(cuLaunchHostFunc(first, Some(set_flag), (&raw const counter).cast_mut().cast()));
        ok!(cuStreamDestroy_v2(first));
        if is_simulated() {
            assert_eq!(cu!(cuStreamQuery(first)), 400);
        }
        gate.open();
        ok!(cuCtxSynchronize());
        assert_eq!(counter.load(Ordering::SeqCst), 2);
    });
}

#[test]
fn streams_tell_what_they_were_made_with() {
    process::alone("streams::streams_tell_what_they_were_made_with", &[], || {
        let context = start();
        let mut made = null_mut();
        assert_eq!(cu!(cuStreamCreate(&mut made, 2)), 1);
        ok!(cuStreamCreateWithPriority(&mut made, 1, -9));
        let (mut priority, mut flags, mut of, mut id) = (9, 9, null_mut(), 0);
        ok!(cuStreamGetPriority(made, &mut priority));
        ok!(cuStreamGetFlags(made, &mut flags));
        ok!(cuStreamGetCtx(made, &mut of));
        ok!(cuStreamGetId(made, &mut id));
        assert_eq!((priority, flags, of), (-5, 1, context));
        let mut other_id = id;
        ok!(cuStreamGetId(stream(), &mut other_id));
        assert_ne!(id, other_id);
        for default in [0usize, 1, 2] {
            ok!(cuStreamGetCtx(default as Handle, &mut of));
            assert_eq!(of, context);
            ok!(cuStreamSynchronize(default as Handle));
        }
        assert_eq!(cu!(cuStreamDestroy_v2(null_mut())), 400);
    });
}

#[test]
fn the_legacy_default_stream_and_blocking_ones_wait_for_each_other() {
    process::alone("streams::the_legacy_default_stream_and_blocking_ones_wait_for_each_other", &[], || {
        start();
        let mut blocking = null_mut();
        ok!(cuStreamCreate(&mut blocking, 0));
        let free = stream();
        let counter = AtomicU32::new(0);
        let count = (&raw const counter).cast_mut().cast();
        let gate = Gate::on(blocking);
        ok!(cuLaunchHostFunc(null_mut(), Some(set_flag), count));
        ok!(cuLaunchHostFunc(free, Some(set_flag), count));
        ok!(cuStreamSynchronize(free));
        assert_eq!((counter.load(Ordering::SeqCst), cu!(cuStreamQuery(null_mut()))), (1, 600));
        gate.open();
        ok!(cuStreamSynchronize(null_mut()));
        assert_eq!(counter.load(Ordering::SeqCst), 2);
        let gate = Gate::on(1 as Handle);
        ok!(cuLaunchHostFunc(blocking, Some(set_flag), count));
        assert_eq!(cu!(cuStreamQuery(blocking)), 600);
        gate.open();
        ok!(cuStreamSynchronize(blocking));
        assert_eq!(counter.load(Ordering::SeqCst), 3);
    });
}

#[test]
fn events_keep_their_rules() {
    process::alone("streams::events_keep_their_rules", &[("HIGHWATER_MOCK", "devices=2")], || {
        let first = start();
        let mut made = null_mut();
        for flags in [4, 5, 8, 16] {
            assert_eq!(cu!(cuEventCreate(&mut made, flags)), 1, "flags {flags}");
        }
        ok!(cuEventCreate(&mut made, 6));
        let (start, end, plain) = (event(0), event(0), event(2));
        let mut time = 0f32;
        let stream = stream();
        assert_eq!(cu!(cuEventElapsedTime(&mut time, start, end)), 400);
        ok!(cuEventRecord(start, stream));
        let gate = Gate::on(stream);
        ok!(cuEventRecord(end, stream));
        ok!(cuEventRecord(plain, stream));
        assert_eq!(cu!(cuEventElapsedTime(&mut time, start, end)), 600);
        assert_eq!(cu!(cuEventElapsedTime(&mut time, start, plain)), 400);
        gate.open();
        ok!(cuEventSynchronize(end));
        ok!(cuEventElapsedTime(&mut time, start, end));
        assert!(time > 0.0, "{time}");
        ok!(cuEventElapsedTime(&mut time, end, start));
        assert!(time < 0.0, "{time}");
        if is_simulated() {
            let destroyed = event(0);
            ok!(cuEventDestroy_v2(destroyed));
            assert_eq!((cu!(cuEventDestroy_v2(destroyed)), cu!(cuEventQuery(destroyed))), (400, 400));
        }
        if devices() < 2 {
            return;
        }
        let mut second = null_mut();
        ok!(cuDevicePrimaryCtxRetain(&mut second, 1));
        ok!(cuCtxSetCurrent(second));
        let (far_stream, far_event) = (super::stream(), event(0));
        assert_eq!(cu!(cuEventRecord(start, far_stream)), 400);
        assert_eq!(cu!(cuEventRecord(far_event, stream)), 400);
        ok!(cuEventRecord(far_event, far_stream));
        ok!(cuEventSynchronize(far_event));
        assert_eq!(cu!(cuEventElapsedTime(&mut time, start, far_event)), 400);
        // Waiting for another device's event is allowed.
        ok!(cuStreamWaitEvent(far_stream, end, 0));
        ok!(cuStreamSynchronize(far_stream));
        ok!(cuCtxSetCurrent(first));
    });
}

extern "C" fn call_the_driver(result: *mut c_void) {
    let mut count = 0;
    let code = cu!(cuDeviceGetCount(&mut count));
    unsafe { &*result.cast::<AtomicU32>() }.store(code, Ordering::SeqCst);
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    process::alone("streams::a_host_function_may_not_call_the_driver", &[], || {
        start();
        let (stream, result) = (stream(), AtomicU32::new(0));
        assert_eq!(cu!(cuLaunchHostFunc(stream, None, null_mut())), 1);
        ok!(cuLaunchHostFunc(stream, Some(call_the_driver), (&raw const result).cast_mut().cast()));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(result.load(Ordering::SeqCst), 800);
    });
}
