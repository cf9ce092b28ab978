//! Page-locking a large block, and the stalls that it causes for GPU calls of another thread.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Bench;
use crate::measure::Pairs;
use crate::raw::{Raw, done};
use crate::table::{Bar, Row, Table, Unit};

const HUGE_PAGE: usize = 2 << 20;
/// The bytes of one registration.
const PIECE: usize = 64 << 20;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`, as the backend registers.
const FLAGS: u32 = 3;
const MOST_THREADS: usize = 16;
const MEMSET_BYTES: usize = 1 << 20;

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let (bytes, runtime) = (bench.options.pin_bytes, bench.runtime);
    let pairs = if bench.options.quick { 1 } else { 5 };
    let bystander = Bystander::default();
    let (mut first, mut times, mut release) = ([0.0; 2], Pairs::default(), Pairs::default());
    let (mut stalls, mut quiet) = ([0_u64; 2], 0);
    runtime.trim()?;
    thread::scope(|scope| -> Result<()> {
        let calls = scope.spawn(|| bystander.call(bench.raw));
        let mut measured = || -> Result<()> {
            bystander
                .longest_of(|| {
                    thread::sleep(Duration::from_millis(if bench.options.quick { 20 } else { 500 }));
                    Ok(())
                })
                .map(|(_, _, longest)| quiet = longest)?;
            for pair in 0..=pairs {
                // The first registration of the process does not count, because the driver initializes itself in it.
                for side in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
                    let (made, gone, longest) = if side == 0 {
                        let (buffer, made, longest) = bystander.longest_of(|| Ok(runtime.pinned::<u8>(bytes)?))?;
                        let start = Instant::now();
                        drop(buffer);
                        runtime.trim_device_memory()?;
                        runtime.trim()?;
                        (made, ns(start), longest)
                    } else {
                        let (block, made, longest) = bystander.longest_of(|| Overlapped::make(bench.raw, bytes))?;
                        let start = Instant::now();
                        block.release()?;
                        (made, ns(start), longest)
                    };
                    if pair == 0 {
                        first[side] = made;
                        continue;
                    }
                    stalls[side] = stalls[side].max(longest);
                    [&mut times.ours, &mut times.raw][side].push(made);
                    [&mut release.ours, &mut release.raw][side].push(gone);
                }
            }
            Ok(())
        };
        let outcome = measured();
        bystander.stop.store(true, Ordering::Relaxed);
        let called = calls.join().map_err(|_| anyhow!("the thread beside panicked"))?;
        // If both failed, the other thread is the cause, because the measurement waits for it.
        called.and(outcome)
    })?;
    let (size, unit) = (bytes >> 20, Unit::Bytes(bytes as u64));
    table.push(Row::once(format!("page-lock {size} MiB, first time of the process"), first[0], Some(first[1])));
    let what = format!("page-lock {size} MiB again, cache emptied; raw: overlapped registration");
    table.push(Row::pairs(what, &times).bar(Bar::Times(1.15)));
    table.push(Row::pairs("the same as a rate", &times).unit(unit));
    table.push(Row::pairs(format!("give {size} MiB back to the system"), &release));
    let [ours, raw] = stalls.map(|longest| longest as f64);
    let what = "longest memset, record and synchronize of another thread meanwhile";
    table.push(Row::once(what, ours, Some(raw)).bar(Bar::Longest(10e6)));
    table.push(Row::once("the same while nothing is page-locked", quiet as f64, None));
    Ok(())
}

fn ns(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

/// A thread that keeps calling the GPU, and the durations of its calls.
#[derive(Default)]
struct Bystander {
    stop: AtomicBool,
    ended: AtomicBool,
    rounds: AtomicU64,
    longest: AtomicU64,
    /// The start of the current round, in nanoseconds of `clock`; 0 between rounds.
    began: AtomicU64,
    clock: Clock,
}

/// Returns the nanoseconds since creation.
struct Clock(Instant);

impl Default for Clock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock {
    fn now(&self) -> u64 {
        // The range suffices for five hundred years.
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Bystander {
    fn call(&self, raw: &Raw) -> Result<()> {
        let outcome = self.rounds(raw);
        self.ended.store(true, Ordering::Release);
        outcome
    }

    fn rounds(&self, raw: &Raw) -> Result<()> {
        let _current = raw.enter()?;
        let (stream, event, memory) = (raw.stream()?, raw.event()?, raw.memory(MEMSET_BYTES)?);
        while !self.stop.load(Ordering::Relaxed) {
            let start = self.clock.now().max(1);
            self.began.store(start, Ordering::Release);
            // SAFETY: the memory has this size and lives until the stream was waited for.
            done("cuMemsetD8Async", unsafe { (raw.cuda.fill)(memory.get(), 0x5A, MEMSET_BYTES, stream.get()) })?;
            // SAFETY: both are alive.
            done("cuEventRecord", unsafe { (raw.cuda.event_record)(event.get(), stream.get()) })?;
            // SAFETY: the event is alive.
            done("cuEventSynchronize", unsafe { (raw.cuda.event_synchronize)(event.get()) })?;
            self.longest.fetch_max(self.clock.now() - start, Ordering::Relaxed);
            self.began.store(0, Ordering::Release);
            self.rounds.fetch_add(1, Ordering::Release);
        }
        raw.synchronize(&stream)
    }

    /// Waits until a round has begun and ended, so that earlier stalls are over.
    fn wait_for_a_round(&self) -> Result<()> {
        let rounds = self.rounds.load(Ordering::Acquire);
        while self.rounds.load(Ordering::Acquire) < rounds + 2 {
            ensure!(!self.ended.load(Ordering::Acquire), "the thread beside ended early");
            thread::yield_now();
        }
        Ok(())
    }

    /// Runs `work`. Returns its value, its nanoseconds and the longest round meanwhile, including one in progress at
    /// the end.
    fn longest_of<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, f64, u64)> {
        self.wait_for_a_round()?;
        self.longest.store(0, Ordering::Relaxed);
        let start = Instant::now();
        let value = work()?;
        let took = ns(start);
        let began = self.began.load(Ordering::Acquire);
        let under_way = if began == 0 { 0 } else { self.clock.now().saturating_sub(began) };
        Ok((value, took, self.longest.load(Ordering::Relaxed).max(under_way)))
    }
}

/// Page-locked memory as a program would create it by hand: mapped with huge pages, touched by several threads, and
/// registered piece by piece while later pieces are touched.
struct Overlapped<'r> {
    raw: &'r Raw,
    mapped: *mut c_void,
    mapped_bytes: usize,
    start: *mut u8,
    registered: usize,
}

/// An address that threads share.
#[derive(Clone, Copy)]
struct Start(*mut u8);
// SAFETY: An address is a number. Each use of it is justified in its place.
unsafe impl Sync for Start {}

impl<'r> Overlapped<'r> {
    fn make(raw: &'r Raw, bytes: usize) -> Result<Self> {
        let mapped_bytes = bytes + HUGE_PAGE;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: A new mapping at an address of the system's choice touches no existing memory.
        let mapped = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), mapped_bytes, protection, flags) }?;
        let offset = mapped.addr().next_multiple_of(HUGE_PAGE) - mapped.addr();
        let start = mapped.cast::<u8>().wrapping_add(offset);
        // Unmaps itself from here on.
        let mut block = Self { raw, mapped, mapped_bytes, start, registered: 0 };
        // SAFETY: The range is in the mapping above. A kernel without huge pages refuses the call, which only costs
        // time.
        let _ = unsafe { rustix::mm::madvise(start.cast(), bytes, Advice::LinuxHugepage) };
        let pieces = bytes.div_ceil(PIECE);
        let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MOST_THREADS);
        let touched: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
        let (at, caller) = (Start(start), thread::current());
        thread::scope(|scope| {
            for number in 0..threads {
                let (touched, at, caller) = (&touched, &at, &caller);
                scope.spawn(move || touch(at, bytes, (number, threads), touched, caller));
            }
            for (piece, touched) in touched.iter().enumerate() {
                while touched.load(Ordering::Acquire) < threads {
                    thread::park();
                }
                let from = start.wrapping_add(piece * PIECE);
                let length = PIECE.min(bytes - piece * PIECE);
                // SAFETY: the range is mapped, and stays so until it is unregistered.
                done("cuMemHostRegister", unsafe { (raw.cuda.register)(from, length, FLAGS) })?;
                block.registered += 1;
            }
            Ok(block)
        })
    }

    fn release(mut self) -> Result<()> {
        self.unregister()
    }

    fn unregister(&mut self) -> Result<()> {
        while self.registered > 0 {
            let piece = self.start.wrapping_add((self.registered - 1) * PIECE);
            // SAFETY: registered at this address, and no copy uses it.
            done("cuMemHostUnregister", unsafe { (self.raw.cuda.unregister)(piece) })?;
            self.registered -= 1;
        }
        Ok(())
    }
}

impl Drop for Overlapped<'_> {
    fn drop(&mut self) {
        // Memory that is still registered stays mapped, because the driver holds its pages.
        if self.unregister().is_ok() {
            // SAFETY: The mapping belongs to this block, none of it is registered, and no pointer into it remains.
            let _ = unsafe { rustix::mm::munmap(self.mapped, self.mapped_bytes) };
        }
    }
}

/// Touches a thread's contiguous part of each piece, in whole huge pages. The last thread of a piece wakes the caller.
fn touch(at: &Start, bytes: usize, (number, threads): (usize, usize), touched: &[AtomicUsize], caller: &Thread) {
    const PAGES: usize = PIECE / HUGE_PAGE;
    for (piece, touched) in touched.iter().enumerate() {
        let (from, to) = (number * PAGES / threads, (number + 1) * PAGES / threads);
        let ends = [from, to].map(|page| (piece * PIECE + page * HUGE_PAGE).min(bytes));
        // One byte in each page of 4 KiB, for a kernel without huge pages.
        for offset in (ends[0]..ends[1]).step_by(4096) {
            // SAFETY: The byte is in the mapping, which outlives this thread, and no other thread touches this part.
            unsafe { at.0.wrapping_add(offset).write_volatile(1) };
        }
        if touched.fetch_add(1, Ordering::Release) + 1 == threads {
            caller.unpark();
        }
    }
}
