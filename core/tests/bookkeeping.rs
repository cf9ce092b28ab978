//! The memory that the pool of page-locked memory needs for its own records.

#![allow(missing_docs, reason = "tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};

use highwater_core::{PinnedBuffer, Runtime};
use highwater_mock::{MockGpu, MockOptions};

/// Counts the bytes that are allocated.
struct Counting;

static ALLOCATED: AtomicIsize = AtomicIsize::new(0);

fn count(bytes: usize, sign: isize) {
    ALLOCATED.fetch_add(sign * bytes.cast_signed(), Ordering::Relaxed);
}

// SAFETY: As the system's allocator, which gets every call.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: As the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: As the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocated() -> isize {
    ALLOCATED.load(Ordering::Relaxed)
}

/// The bar: 64 bytes for each block, and 0.3 % of the bytes held.
#[test]
fn a_block_costs_at_most_64_bytes_and_a_page_0_3_percent() {
    const BLOCKS: usize = 100_000;
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let mut buffers: Vec<PinnedBuffer<u8>> = Vec::with_capacity(BLOCKS);
    buffers.push(runtime.pinned(4096).unwrap());
    let before = allocated();
    buffers.extend((1..BLOCKS).map(|_| runtime.pinned(4096).unwrap()));
    let used = (allocated() - before) as f64;
    let host = runtime.statistics().host;
    println!("{} bytes for each of {} blocks", used / BLOCKS as f64, host.live_blocks);
    assert!(used <= 64.0 * BLOCKS as f64 + 0.003 * host.held_bytes as f64, "{used} bytes for {host:?}");
    drop(buffers);
    assert_eq!(runtime.close().unwrap().total(), 0);
}
