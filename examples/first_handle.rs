//! Prints where the time of a process's first handles goes: 16 threads lease one each, at once.
//!
//! `cargo run --example first_handle -- cuda 0` measures a cold start on CUDA; the number is that of warm handles.

#![forbid(unsafe_code)]

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use highwater::{Fallback, Result, Runtime, RuntimeOptions};

const THREADS: usize = 16;

/// Runs a part, and prints its time.
fn part<T>(name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let value = run()?;
    println!("{name}: {:?}", start.elapsed());
    Ok(value)
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next();
    let warm = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(0);
    let opened = part("open the libraries, with a runtime", || match &name {
        Some(name) => Ok(Runtime::open(name)?),
        None => Ok(Runtime::open_best(Fallback::Mock)?),
    })?;
    let options = RuntimeOptions::new().with_warm_handles(warm);
    let backend = opened.backend().clone();
    let runtime = part("create a runtime", || Runtime::with_options(backend, &options))?;
    let device = runtime.device(0)?;
    let streams = part("create 16 streams, with the context", || {
        (0..THREADS).map(|_| device.create_stream()).collect::<Result<Vec<_>>>()
    })?;
    for round in ["first", "second"] {
        let barrier = Barrier::new(THREADS + 1);
        thread::scope(|scope| -> Result<()> {
            let lease = |stream| {
                let barrier = &barrier;
                scope.spawn(move || -> Result<Duration> {
                    barrier.wait();
                    let start = Instant::now();
                    let lease = highwater::Stream::blas(stream);
                    let time = start.elapsed();
                    // Every thread keeps its handle until all have one.
                    barrier.wait();
                    lease.map(|_| time)
                })
            };
            let threads: Vec<_> = streams.iter().map(lease).collect();
            let start = Instant::now();
            barrier.wait();
            barrier.wait();
            let wall = start.elapsed();
            let times = threads.into_iter().map(|thread| thread.join().expect("no thread panics"));
            let mut times = times.collect::<Result<Vec<_>>>()?;
            times.sort_unstable();
            let (quickest, slowest) = (times[0], times[THREADS - 1]);
            println!("{round} leases: {wall:?} in all, {quickest:?} to {slowest:?} in a thread");
            Ok(())
        })?;
    }
    println!("{}", runtime.statistics().blas_handles);
    Ok(())
}
