//! The rows of time: requests by one thread and by many, with and without work of a stream.

use std::hint::black_box;
use std::rc::Rc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use highwater::hal::SplitMix64;
use highwater::{Access, PinnedBuffer, Result, Runtime};
use highwater_conformance::RawCalls;

use super::report::{Bar, Row};
use super::rounds::{self, Loop, Worker};
use super::{Bench, Family, available};

pub(super) const SMALL: usize = 4096;
pub(super) const SIZES: [(&str, usize); 3] = [("4KiB", SMALL), ("1MiB", 1 << 20), ("64MiB", 64 << 20)];
/// The threads that have a size of their own each: 4 KiB, 8 KiB, and so on.
const OWN_SIZES: usize = 16;
/// Bytes that a thread may leave in use by its stream, if the blocks are not large.
pub(super) const IN_USE: usize = 32 << 20;
pub(super) const MANY: usize = 100_000;
const PAGE_LOCK: usize = 8 << 30;
/// The time between two calls of the thread beside the page-lock.
const PAUSE: Duration = Duration::from_micros(50);
/// Memory that the page-lock leaves to everything else.
const SPARE: usize = 1 << 30;

pub(super) fn families(bench: &Bench<'_>) -> Vec<Family> {
    let with_threads = |names: &[&str]| {
        let counts = bench.thread_counts();
        names.iter().flat_map(|name| counts.iter().map(move |count| format!("{name}_t{count}"))).collect()
    };
    let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let mut hit_names: Vec<String> = with_threads(&["hit_4KiB", "hit_1MiB", "hit_64MiB"]);
    hit_names.push(own_size());
    vec![
        Family { names: hit_names, run: hits },
        Family { names: with_threads(&["use_4KiB", "use_1MiB", "use_64MiB", "raw_record_query"]), run: uses },
        Family { names: own(&["handoff_1_pair", "handoff_8_pairs"]), run: handoffs },
        Family { names: with_threads(&["copy_4KiB", "raw_copy_4KiB"]), run: copies },
        Family { names: own(&["scaling_t2"]), run: scaling },
        Family { names: own(&["hit_live_1", "hit_live_100000", "replace_live_1", "replace_live_100000"]), run: live },
        Family { names: own(&["page_lock_8GiB", "page_lock_8GiB_stall"]), run: page_lock },
    ]
}

fn own_size() -> String {
    format!("hit_own_size_t{OWN_SIZES}")
}

/// Returns a loop that allocates and frees blocks; the size depends on the thread. At first, all threads have a block at once, so
/// that the pool has one for each.
fn hit<'a>(runtime: &'a Runtime, name: String, threads: usize, bytes: impl Fn(usize) -> usize + Sync + 'a) -> Loop<'a> {
    let all_have_one = Barrier::new(threads);
    Loop::new(name, threads, move |thread| {
        let bytes = bytes(thread);
        let first = runtime.pinned::<u8>(bytes);
        all_have_one.wait();
        drop(first?);
        Ok(Worker::of(move || runtime.pinned::<u8>(bytes).map(|block| drop(black_box(block)))))
    })
}

pub(super) fn nanoseconds(loops: &[Loop<'_>], times: &[f64], bar: impl Fn(&str) -> Bar) -> Vec<Row> {
    loops.iter().zip(times).map(|(each, &time)| Row::new(&each.name, time, "ns", bar(&each.name))).collect()
}

fn hits(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let sizes = SIZES.iter().flat_map(|&size| bench.thread_counts().into_iter().map(move |count| (size, count)));
    let mut loops: Vec<Loop<'_>> = sizes
        .map(|((size, bytes), count)| hit(&runtime, format!("hit_{size}_t{count}"), count, move |_| bytes))
        .collect();
    loops.push(hit(&runtime, own_size(), OWN_SIZES, |thread| SMALL << thread));
    loops.retain(|each| bench.wants(&each.name));
    let times = bench.measure(&loops)?;
    let bar = |name: &str| match name.rsplit_once("_t").map(|(_, threads)| threads) {
        Some("1") => Bar::AtMost(25.0),
        Some("4") => Bar::AtMost(30.0),
        Some("16") => Bar::AtMost(40.0),
        _ => Bar::None,
    };
    Ok(nanoseconds(&loops, &times, bar))
}

fn uses(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = &bench.runtime()?;
    let device = &runtime.device(0)?;
    let mut loops = Vec::new();
    for count in bench.thread_counts() {
        for (size, bytes) in SIZES {
            let start = move |_| {
                let stream = Rc::new(device.create_stream()?);
                let settled = Rc::clone(&stream);
                let operation = move || {
                    let block = runtime.pinned::<u8>(bytes)?;
                    stream.note_pinned_use(&block, Access::Read)
                };
                Ok(Worker { settle: Box::new(move || settled.synchronize()), ..Worker::of(operation) })
            };
            // A device that is slower than this thread keeps few blocks in use.
            let batch = (IN_USE / bytes).clamp(4, 256) as u32;
            loops.push(Loop::new(format!("use_{size}_t{count}"), count, start).with_batch(batch));
        }
        loops.push(Loop::new(format!("raw_record_query_t{count}"), count, |_| {
            let raw = RawCalls::new(&**bench.backend, 0, SMALL)?;
            Ok(Worker::of(move || {
                raw.record()?;
                black_box(raw.query()?);
                Ok(())
            }))
        }));
    }
    // A bar needs the raw row of its threads.
    let threads = |name: &str| name.rsplit_once("_t").map(|(_, count)| count.to_owned());
    let needed: Vec<_> = loops.iter().filter(|each| bench.wants(&each.name)).map(|each| threads(&each.name)).collect();
    loops.retain(|each| {
        bench.wants(&each.name) || each.name.starts_with("raw") && needed.contains(&threads(&each.name))
    });
    let times = bench.measure(&loops)?;
    let raw = |count: &str| {
        let name = format!("raw_record_query_t{count}");
        loops.iter().position(|each| each.name == name).map_or(Bar::None, |at| Bar::AtMost(times[at]))
    };
    let bar = |name: &str| match name.rsplit_once("_t") {
        Some(("use_64MiB", count)) => raw(count),
        Some(("use_4KiB" | "use_1MiB", "1")) => Bar::AtMost(400.0),
        Some(("use_4KiB" | "use_1MiB", "16")) => Bar::AtMost(1200.0),
        _ => Bar::None,
    };
    Ok(nanoseconds(&loops, &times, bar))
}

/// Blocks that one thread allocates and another frees, in crates over a bounded ring. Both threads spin: a thread that sleeps takes
/// far longer to wake than a block takes.
struct Pair {
    /// `Some` until the pair is dropped.
    ring: Option<SyncSender<Vec<PinnedBuffer<u8>>>>,
    crated: Vec<PinnedBuffer<u8>>,
    freeing: Option<thread::JoinHandle<()>>,
}

impl Pair {
    /// Blocks of a crate. The ring's own cost is shared by them.
    const CRATE: usize = 32;
    const CRATES: usize = 8;

    fn new() -> Self {
        let (ring, crates) = sync_channel::<Vec<PinnedBuffer<u8>>>(Self::CRATES);
        let freeing = thread::spawn(move || {
            while let Some(crated) = spin(|| match crates.try_recv() {
                Ok(crated) => Some(Some(crated)),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(None),
            }) {
                drop(crated);
            }
        });
        Self { ring: Some(ring), crated: Vec::with_capacity(Self::CRATE), freeing: Some(freeing) }
    }

    fn hand_over(&mut self, block: PinnedBuffer<u8>) {
        self.crated.push(block);
        if self.crated.len() == Self::CRATE {
            let mut full = std::mem::replace(&mut self.crated, Vec::with_capacity(Self::CRATE));
            let Some(ring) = &self.ring else { return };
            spin(|| match ring.try_send(std::mem::take(&mut full)) {
                Err(TrySendError::Full(crated)) => {
                    full = crated;
                    None
                }
                // The other thread lives until the ring is dropped.
                Ok(()) | Err(TrySendError::Disconnected(_)) => Some(()),
            });
        }
    }
}

/// Repeats `attempt` until it returns a value. Lets other threads run now and then, for machines with fewer processors.
fn spin<R>(mut attempt: impl FnMut() -> Option<R>) -> R {
    loop {
        for _ in 0..1000 {
            if let Some(result) = attempt() {
                return result;
            }
            std::hint::spin_loop();
        }
        thread::yield_now();
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.ring = None;
        if let Some(Err(panic)) = self.freeing.take().map(thread::JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

fn handoffs(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = &bench.runtime()?;
    let pairs = |name: &str, count| {
        Loop::new(name, count, move |_| {
            let mut pair = Pair::new();
            Ok(Worker::of(move || runtime.pinned(SMALL).map(|block| pair.hand_over(block))))
        })
    };
    let mut loops = vec![pairs("handoff_1_pair", 1), pairs("handoff_8_pairs", 8)];
    loops.retain(|each| bench.wants(&each.name));
    let times = bench.measure(&loops)?;
    let bar = |name: &str| Bar::AtMost(if name == "handoff_1_pair" { 200.0 } else { 400.0 });
    Ok(nanoseconds(&loops, &times, bar))
}

fn copies(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = &bench.runtime()?;
    let device = &runtime.device(0)?;
    let mut loops = Vec::new();
    for count in bench.thread_counts() {
        loops.push(Loop::new(format!("copy_4KiB_t{count}"), count, move |_| {
            let stream = Rc::new(device.create_stream()?);
            let settled = Rc::clone(&stream);
            let on_device = device.allocate::<u8>(SMALL)?;
            let operation = move || {
                let block = runtime.pinned(SMALL)?;
                stream.copy_to_device(&block, &on_device)
            };
            Ok(Worker { settle: Box::new(move || settled.synchronize()), ..Worker::of(operation) })
        }));
        loops.push(Loop::new(format!("raw_copy_4KiB_t{count}"), count, |_| {
            let raw = Rc::new(RawCalls::new(&**bench.backend, 0, SMALL)?);
            let settled = Rc::clone(&raw);
            Ok(Worker { settle: Box::new(move || settled.synchronize()), ..Worker::of(move || raw.copy_to_device()) })
        }));
    }
    let of_threads = |name: &str| name.trim_start_matches("raw_").to_owned();
    let needed: Vec<_> =
        loops.iter().filter(|each| bench.wants(&each.name)).map(|each| of_threads(&each.name)).collect();
    loops.retain(|each| needed.contains(&of_threads(&each.name)));
    let times = bench.measure(&loops)?;
    let bar = |name: &str| {
        let raw = loops.iter().position(|each| each.name == format!("raw_{name}")).map(|at| times[at]);
        match (raw, name) {
            (Some(raw), "copy_4KiB_t1") => Bar::AtMost(raw + 400.0),
            (Some(raw), "copy_4KiB_t16") => Bar::AtMost(raw + 1200.0),
            _ => Bar::None,
        }
    };
    Ok(nanoseconds(&loops, &times, bar))
}

/// Measures the speed of two threads over that of one, with the pool and with loops that share nothing, and compares both.
fn scaling(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = &bench.runtime()?;
    let private = |name: &str, count| {
        Loop::new(name, count, |_| {
            let mut random = SplitMix64::new(1);
            Ok(Worker::of(move || {
                for _ in 0..16 {
                    black_box(random.draw());
                }
                Ok(())
            }))
        })
    };
    let pool = |name: &str, count| hit(runtime, name.into(), count, |_| SMALL);
    let loops = [pool("pool", 1), pool("pool", 2), private("private", 1), private("private", 2)];
    let times = bench.measure(&loops)?;
    let ratio = (times[0] / times[1]) / (times[2] / times[3]);
    Ok(vec![Row::new("scaling_t2", ratio, "ratio", Bar::AtLeast(0.9))])
}

/// Measures a hit, and a replacement at random, in a thread that has one live block and in one that has many.
fn live(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = &bench.runtime()?;
    let mut loops = Vec::new();
    for count in [1, MANY] {
        let hold = move || (0..count).map(|_| runtime.pinned::<u8>(SMALL)).collect::<Result<Vec<_>>>();
        loops.push(Loop::new(format!("hit_live_{count}"), 1, move |_| {
            let held = hold()?;
            Ok(Worker::of(move || {
                black_box(&held);
                runtime.pinned::<u8>(SMALL).map(|block| drop(black_box(block)))
            }))
        }));
        loops.push(Loop::new(format!("replace_live_{count}"), 1, move |_| {
            let mut held = hold()?;
            let mut random = SplitMix64::new(1);
            Ok(Worker::of(move || {
                let slot = (random.draw() % held.len() as u64) as usize;
                // The old block is freed first.
                drop(held.swap_remove(slot));
                held.push(runtime.pinned(SMALL)?);
                Ok(())
            }))
        }));
    }
    let times = bench.measure(&loops)?;
    let [hit, replace, ..] = times[..] else { unreachable!("four loops") };
    let bar = |name: &str| match name {
        "hit_live_100000" => Bar::AtMost(1.2 * hit),
        "replace_live_100000" => Bar::AtMost(4.0 * replace),
        _ => Bar::None,
    };
    Ok(nanoseconds(&loops, &times, bar))
}

/// Page-locks a large block while another thread makes calls of the backend.
fn page_lock(bench: &Bench<'_>) -> Result<Vec<Row>> {
    if bench.rows.is_none() && !bench.backend.identity().real_device {
        let message =
            "on the mock it takes a minute and measures only the system's page faults; --rows page_lock runs it";
        return Err(highwater::Error::new(highwater::ErrorKind::Unsupported, "page_lock", message));
    }
    if available::bytes().is_some_and(|available| available < (PAGE_LOCK + SPARE) as u64) {
        let message = "less than 9 GiB of memory are available";
        return Err(highwater::Error::new(highwater::ErrorKind::OutOfMemory, "page_lock", message));
    }
    let runtime = bench.runtime()?;
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    // Relaxed: the flags order nothing. Each thread must see them eventually.
    let (taken, stall) = thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let raw = RawCalls::new(&**bench.backend, 0, SMALL);
            begun.store(true, Ordering::Relaxed);
            let raw = raw?;
            let mut longest = Duration::ZERO;
            while !over.load(Ordering::Relaxed) {
                let started = Instant::now();
                raw.record()?;
                black_box(raw.query()?);
                longest = longest.max(started.elapsed());
                // A full queue of the stream would stall the next call by itself.
                thread::sleep(PAUSE);
            }
            Ok::<_, highwater::Error>(longest)
        });
        while !begun.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        let started = Instant::now();
        let block = runtime.pinned::<u8>(PAGE_LOCK);
        let taken = started.elapsed();
        over.store(true, Ordering::Relaxed);
        let stall = caller.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        block.map(drop)?;
        Ok::<_, highwater::Error>((taken, stall?))
    })?;
    Ok(vec![
        Row::new("page_lock_8GiB", taken.as_secs_f64(), "s", Bar::AtMost(0.24)),
        Row::new("page_lock_8GiB_stall", stall.as_secs_f64() * 1e3, "ms", Bar::AtMost(10.0)),
    ])
}

impl Bench<'_> {
    pub(super) fn measure(&self, loops: &[Loop<'_>]) -> Result<Vec<f64>> {
        rounds::measure(loops, self.rounds, self.duration)
    }

    /// Returns the numbers of threads: those of the table, and that of the command line.
    pub(super) fn thread_counts(&self) -> Vec<usize> {
        let mut counts = vec![1, 4, 16];
        counts.extend(self.threads.filter(|threads| !counts.contains(threads)));
        counts
    }
}
