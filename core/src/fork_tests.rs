//! A fork while another thread holds every lock of the pools: the child can drop everything, gets clear errors, and exits
//! at once.

use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::testing::ManualBackend;
use crate::{ErrorKind, HandlePool, PoolKey, Result, Runtime};

/// Forks. The child runs `child`, and exits with 0 if it returned `true`. Returns the exit status and the duration.
fn fork(child: impl FnOnce() -> bool) -> (i32, Duration) {
    let start = Instant::now();
    // SAFETY: the child touches only memory and atomics of its own until it exits; it takes no lock that another thread of
    // the parent may hold, which is what is tested.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let ok = child();
        // SAFETY: `exit`, not `_exit`: handlers and this thread's locals run, as they do in a program.
        unsafe { libc::exit(i32::from(!ok)) };
    }
    let mut status = -1;
    loop {
        // SAFETY: asks for the child made above without waiting.
        if unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == pid {
            return (status, start.elapsed());
        }
        if start.elapsed() > Duration::from_secs(5) {
            // SAFETY: ends the child, which hangs, so that the test does not.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Polls a future until it is ready.
fn poll(done: &mut Pin<&mut impl Future<Output = Result<()>>>) -> Result<()> {
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(result) = done.as_mut().poll(&mut context) {
            return result;
        }
        thread::yield_now();
    }
}

#[test]
fn a_child_exits_at_once_although_every_lock_was_held() {
    let backend = ManualBackend::new();
    let runtime = Runtime::new(backend).unwrap();
    // Shared memory has locks of its own.
    runtime.inner.sharing_unstarted("share").unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let pool = HandlePool::new();
    drop(pool.lease(PoolKey::device(0), || Ok(1)).unwrap());
    let lease = pool.lease(PoolKey::device(0), || Ok(2)).unwrap();
    let buffer = device.allocate::<u8>(64).unwrap();
    let mut pinned = runtime.pinned::<u8>(64).unwrap();
    stream.copy_to_device(&pinned, &buffer).unwrap();
    let event = stream.record().unwrap();
    let done = event.done();
    let of_closure = stream.done();
    let mut blas = stream.blas().unwrap();
    let owned = stream.blas_owned().unwrap();
    let mut graph = stream.capture(|stream| stream.copy_to_device(&pinned, &buffer)).unwrap();
    graph.launch(&stream).unwrap();

    let (held, is_held) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let (runtime_ref, stream_ref, pool_ref) = (&runtime, &stream, &pool);
        scope.spawn(move || {
            let pool_locks = pool_ref.hold_locks();
            let runtime_locks = runtime_ref.inner.hold_locks();
            let submission = stream_ref.core().lock_submission();
            held.send(()).unwrap();
            let _ = released.recv();
            drop((submission, runtime_locks, pool_locks));
        });
        is_held.recv().unwrap();

        let (status, took) = fork(|| {
            let forked = |result: Result<()>| result.is_err_and(|error| error.kind() == ErrorKind::Forked);
            let refused = forked(runtime.pinned::<u8>(64).map(|_| ()))
                && forked(device.allocate::<u8>(64).map(|_| ()))
                && forked(device.create_stream().map(|_| ()))
                && forked(stream.synchronize())
                && forked(stream.blas().map(|_| ()))
                && forked(blas.with_raw(|_| ()))
                // SAFETY: nothing is done with the handle.
                && forked(unsafe { blas.enqueue_raw(|_| ()) })
                && forked(stream.copy_to_device(&pinned, &buffer))
                && forked(pinned.write().map(|_| ()))
                && forked(pinned.read_with(|_| ()))
                && forked(graph.launch(&stream))
                && forked(stream.capture(|_| Ok(())).map(|_| ()))
                && forked(stream.wait(&event))
                && forked(stream.is_complete().map(|_| ()))
                && forked(poll(&mut std::pin::pin!(stream.done())))
                && forked(stream.blas_owned().map(|_| ()))
                && forked(device.synchronize())
                && forked(pool.lease(PoolKey::device(0), || Ok(3)).map(|_| ()))
                && forked(runtime.trim())
                && runtime.statistics() == crate::Statistics::default()
                && runtime.shared_memory().shared.is_empty()
                && forked(runtime.trim_shared().map(|_| ()))
                && pool.take_idle().is_empty()
                // A child can open and use a backend of its own.
                && Runtime::new(ManualBackend::new()).is_ok_and(|own| own.close().is_ok());
            // Waits of the parent end with an error.
            // SAFETY: as below.
            let (mut done, of_closure) =
                unsafe { (std::ptr::read(&raw const done), std::ptr::read(&raw const of_closure)) };
            let (sender, called) = mpsc::channel();
            of_closure.on_done(move |result| sender.send(result).unwrap_or_default());
            let refused = refused && forked(poll(&mut std::pin::pin!(&mut done))) && called.recv().is_ok_and(forked);
            drop(done);
            // Destructors, as a child that returns from `main` would run them.
            // SAFETY: the child never comes back to the frames that own these, so nothing is dropped twice.
            unsafe {
                drop(std::ptr::read(&raw const lease));
                drop(std::ptr::read(&raw const blas));
                drop(std::ptr::read(&raw const owned));
                drop(std::ptr::read(&raw const graph));
                drop(std::ptr::read(&raw const pinned));
                drop(std::ptr::read(&raw const buffer));
                drop(std::ptr::read(&raw const event));
                drop(std::ptr::read(&raw const stream));
                drop(std::ptr::read(&raw const device));
                drop(std::ptr::read(&raw const pool));
                drop(std::ptr::read(&raw const runtime));
            }
            refused
        });
        drop(release);
        assert_eq!(status, 0, "exit status; a signal means that the child hung");
        assert!(took < Duration::from_secs(1), "{took:?}");
    });
    // The parent was not disturbed.
    stream.synchronize().unwrap();
    graph.launch(&stream).unwrap();
    drop(graph);
    pinned.write().unwrap().fill(1);
    assert_eq!(*lease, 1);
    blas.with_raw(|_| ()).unwrap();
    drop((blas, owned));
    assert!(poll(&mut std::pin::pin!(done)).is_ok() && poll(&mut std::pin::pin!(of_closure)).is_ok());
    drop((event, pinned, buffer, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}
