//! Memory that two processes may have mapped, touched only through relaxed atomics.
//!
//! The backend promises safe code that device accesses which nothing orders give unspecified *values*, as on hardware,
//! and never undefined behavior. So a mapping is an array of `AtomicU64` and nothing else. Every access is a whole,
//! aligned word, and the memory model knows no race between atomics of one size. The parts of words at the edges of a
//! range are exchanged by compare-and-swap. That leaves the bytes beside the range alone, even if another thread or
//! process writes them at the same time. Ordering comes from streams and events.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

const WORD: usize = size_of::<u64>();

/// A part of a memory file that cannot shrink below it. Unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping belongs to this value and is only reached as atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes of `file` from `offset` on; both are multiples of the page size, and `bytes` is not 0.
    ///
    /// # Safety
    /// The file must be at least `offset + bytes` long and sealed against shrinking.
    pub(crate) unsafe fn new(file: &OwnedFd, offset: u64, bytes: u64) -> Result<Self, Errno> {
        let length = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that cannot shrink below it, as the
        // caller promises.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags, file, offset)
        }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, words: length / WORD })
    }

    /// Maps `bytes` bytes of another file, from `from` on, in place of those at `offset`. All three are multiples of the page
    /// size. A concurrent access meets the old bytes or the new ones. After an error, the old bytes stay.
    ///
    /// # Panics
    /// If the range is not in the memory.
    ///
    /// # Safety
    /// As for [`Mapping::new`].
    pub(crate) unsafe fn replace(&self, offset: u64, file: &OwnedFd, from: u64, bytes: u64) -> Result<(), Errno> {
        let place = self.words()[offset as usize / WORD..][..bytes as usize / WORD].as_ptr();
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the pages belong to this mapping, and only atomics reach them, before and after. The kernel exchanges a
        // mapping under the lock that page faults take, so no access finds a hole. It checks its limits first. The file cannot
        // shrink below its part, as the caller promises.
        unsafe {
            rustix::mm::mmap(
                place.cast_mut().cast(),
                bytes as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
                file,
                from,
            )
        }
        .map(drop)
    }

    /// Returns the address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.words * WORD) as u64
    }

    /// Returns the memory as atomics.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, `words` words long, and lives as long as `self`. Every process that maps
        // it accesses it as these atomics only.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }

    /// Reads `bytes` at `offset` into host memory.
    ///
    /// # Panics
    /// If the range is not in the memory. Calls check ranges before they enqueue work.
    ///
    /// # Safety
    /// `dst` must be writable for `bytes` bytes, which no other code accesses meanwhile.
    pub(crate) unsafe fn read(&self, offset: usize, dst: *mut u8, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let words = self.words();
        let range = Range::of(offset, bytes);
        // Relaxed, here and below: see the module's documentation.
        let load_part = |index: usize, from: usize, count: usize, to: *mut u8| {
            let word = words[index].load(Ordering::Relaxed).to_ne_bytes();
            // SAFETY: `to` is inside the destination with at least `count` bytes to go; the source is a local array.
            unsafe { std::ptr::copy_nonoverlapping(word[from..from + count].as_ptr(), to, count) };
        };
        if range.head > 0 {
            load_part(offset / WORD, offset % WORD, range.head, dst);
        }
        // SAFETY: head and body are parts of the destination.
        let body = unsafe { dst.add(range.head) };
        // SAFETY: the body is `range.body` words long and inside the destination, which no other code accesses meanwhile.
        let slots = unsafe { std::slice::from_raw_parts_mut(body.cast::<MaybeUninit<[u8; WORD]>>(), range.body) };
        for (word, slot) in words[range.first..range.first + range.body].iter().zip(slots) {
            slot.write(word.load(Ordering::Relaxed).to_ne_bytes());
        }
        if range.tail > 0 {
            // SAFETY: the tail follows the body inside the destination.
            load_part(range.first + range.body, 0, range.tail, unsafe { body.add(range.body * WORD) });
        }
    }

    /// Writes `bytes` from host memory at `offset`.
    ///
    /// # Panics
    /// As for [`Mapping::read`].
    ///
    /// # Safety
    /// `src` must be readable and initialized for `bytes` bytes, which no other code writes meanwhile.
    pub(crate) unsafe fn write(&self, offset: usize, src: *const u8, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let words = self.words();
        let range = Range::of(offset, bytes);
        let store_part = |index: usize, at: usize, count: usize, from: *const u8| {
            let mut value = [0; WORD];
            // SAFETY: `from` is inside the source with at least `count` bytes to go; the destination is a local array.
            unsafe { std::ptr::copy_nonoverlapping(from, value[at..at + count].as_mut_ptr(), count) };
            exchange_part(&words[index], at, count, u64::from_ne_bytes(value));
        };
        if range.head > 0 {
            store_part(offset / WORD, offset % WORD, range.head, src);
        }
        // SAFETY: head and body are parts of the source.
        let body = unsafe { src.add(range.head) };
        // SAFETY: the body is `range.body` words long and inside the source, which no other code writes meanwhile.
        let values = unsafe { std::slice::from_raw_parts(body.cast::<[u8; WORD]>(), range.body) };
        for (word, value) in words[range.first..range.first + range.body].iter().zip(values) {
            word.store(u64::from_ne_bytes(*value), Ordering::Relaxed);
        }
        if range.tail > 0 {
            // SAFETY: the tail follows the body inside the source.
            store_part(range.first + range.body, 0, range.tail, unsafe { body.add(range.body * WORD) });
        }
    }

    /// Fills a range with `pattern`, eight bytes whose period divides `offset`.
    pub(crate) fn fill(&self, offset: usize, bytes: usize, pattern: u64) {
        let words = self.words();
        let range = Range::of(offset, bytes);
        if range.head > 0 {
            exchange_part(&words[offset / WORD], offset % WORD, range.head, pattern);
        }
        for word in &words[range.first..range.first + range.body] {
            word.store(pattern, Ordering::Relaxed);
        }
        if range.tail > 0 {
            exchange_part(&words[range.first + range.body], 0, range.tail, pattern);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping with this length, and no reference into it outlives `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * WORD) } {
            tracing::warn!(%error, "cannot unmap the memory of a simulated device");
        }
    }
}

/// A range of bytes: the end of one word, whole words, and the beginning of another.
struct Range {
    head: usize,
    /// Index of the first whole word.
    first: usize,
    body: usize,
    tail: usize,
}

impl Range {
    fn of(offset: usize, bytes: usize) -> Self {
        let head = (offset.next_multiple_of(WORD) - offset).min(bytes);
        Self { head, first: offset.div_ceil(WORD), body: (bytes - head) / WORD, tail: (bytes - head) % WORD }
    }
}

/// Replaces `count` bytes of a word, from byte `at` on, by those of `value`.
fn exchange_part(word: &AtomicU64, at: usize, count: usize, value: u64) {
    let mut mask = [0; WORD];
    mask[at..at + count].fill(0xff);
    let mask = u64::from_ne_bytes(mask);
    let mut old = word.load(Ordering::Relaxed);
    while let Err(now) =
        word.compare_exchange_weak(old, old & !mask | value & mask, Ordering::Relaxed, Ordering::Relaxed)
    {
        old = now;
    }
}
