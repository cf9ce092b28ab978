//! The bytes of a device: one sealed memory file, mapped once, touched only through relaxed atomics.
//!
//! Safe code on top of the backend is promised that device accesses which nobody ordered give unspecified *values*, as
//! on hardware, and never undefined behaviour. So the mapping is an array of `AtomicU64` and nothing else: every access
//! is a whole, aligned word (the memory model knows no race between atomics of one size), and the parts of words at the
//! edges of a range are exchanged by compare-and-swap, which leaves the bytes beside the range alone even when another
//! thread writes those at the same time. Ordering comes from the locks of streams and events.
//!
//! The file has no name in any file system, cannot change its size, and is gone with the last process that maps it.
//! Only pages that were touched take physical memory, and big freed blocks give theirs back.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use highwater_core::{Error, ErrorKind, Result};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

const WORD: usize = size_of::<u64>();
/// Freed blocks from this size on give their pages back.
const GIVE_BACK_FROM: u64 = 64 * 1024;
/// Bytes that a copy from device to device carries at a time.
const CARRY_WORDS: usize = 512;

#[derive(Debug)]
pub(crate) struct DeviceMemory {
    base: NonNull<AtomicU64>,
    words: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to this value and is only reached as atomics.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Maps `bytes` (a multiple of 4096) of zeros.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let failed = |what: &str, error: rustix::io::Errno| {
            let kind = match error {
                rustix::io::Errno::NOMEM | rustix::io::Errno::MFILE | rustix::io::Errno::NFILE => {
                    ErrorKind::OutOfMemory
                }
                rustix::io::Errno::PERM | rustix::io::Errno::ACCESS => ErrorKind::PermissionDenied,
                _ => ErrorKind::Vendor,
            };
            Error::new(kind, "open", format!("{what} the {bytes} bytes of a simulated device: {error}"))
                .with_code(i64::from(error.raw_os_error()))
                .with_hint("give the device less memory, or raise the limits of the process (ulimit -v, -n)")
        };
        let file = rustix::fs::memfd_create("highwater-mock", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|error| failed("cannot make a memory file for", error))?;
        rustix::fs::ftruncate(&file, bytes).map_err(|error| failed("cannot size", error))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| failed("cannot seal", error))?;
        let length = usize::try_from(bytes).map_err(|_| failed("cannot map", rustix::io::Errno::NOMEM))?;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that can never become shorter than it.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                0,
            )
        }
        .map_err(|error| failed("cannot map", error))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed("cannot map", rustix::io::Errno::NOMEM))?;
        Ok(Self { base, words: length / WORD, file })
    }

    /// The device address of the first byte.
    pub(crate) fn base(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// How many bytes there are.
    pub(crate) fn bytes(&self) -> u64 {
        (self.words * WORD) as u64
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, `words` words long, lives as long as `self`, and is only ever accessed as
        // these atomics, in this and in every other process that maps it.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }

    /// Reads `bytes` at `offset` into host memory.
    ///
    /// # Panics
    /// When the range is not in the memory; ranges are checked before work is enqueued.
    ///
    /// # Safety
    /// `dst` is writable for `bytes` bytes, which nobody else accesses meanwhile.
    pub(crate) unsafe fn read(&self, offset: usize, dst: *mut u8, bytes: usize) {
        let words = self.words();
        let range = Range::of(offset, bytes);
        // Relaxed, here and below: see the module's words on ordering.
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
        for (index, word) in words[range.first..range.first + range.body].iter().enumerate() {
            // SAFETY: the body is `range.body` words long and inside the destination.
            unsafe { body.cast::<u64>().add(index).write_unaligned(word.load(Ordering::Relaxed)) };
        }
        if range.tail > 0 {
            // SAFETY: the tail follows the body inside the destination.
            load_part(range.first + range.body, 0, range.tail, unsafe { body.add(range.body * WORD) });
        }
    }

    /// Writes `bytes` from host memory at `offset`.
    ///
    /// # Panics
    /// As [`DeviceMemory::read`].
    ///
    /// # Safety
    /// `src` is readable and initialised for `bytes` bytes, which nobody writes meanwhile.
    pub(crate) unsafe fn write(&self, offset: usize, src: *const u8, bytes: usize) {
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
        for (index, word) in words[range.first..range.first + range.body].iter().enumerate() {
            // SAFETY: the body is `range.body` words long and inside the source.
            word.store(unsafe { body.cast::<u64>().add(index).read_unaligned() }, Ordering::Relaxed);
        }
        if range.tail > 0 {
            // SAFETY: the tail follows the body inside the source.
            store_part(range.first + range.body, 0, range.tail, unsafe { body.add(range.body * WORD) });
        }
    }

    /// Reads elements at `offset`.
    pub(crate) fn read_slice<T: bytemuck::Pod>(&self, offset: usize, dst: &mut [T]) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(dst);
        // SAFETY: the slice is writable and borrowed exclusively.
        unsafe { self.read(offset, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Writes elements at `offset`.
    pub(crate) fn write_slice<T: bytemuck::Pod>(&self, offset: usize, src: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(src);
        // SAFETY: the slice is initialised, and its borrow keeps writers away.
        unsafe { self.write(offset, bytes.as_ptr(), bytes.len()) };
    }

    /// Copies from another device's memory, or from another place of this one.
    pub(crate) fn copy_from(&self, offset: usize, source: &Self, source_offset: usize, bytes: usize) {
        let mut carried = [0u64; CARRY_WORDS];
        let carried: &mut [u8] = bytemuck::cast_slice_mut(&mut carried);
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(carried.len());
            source.read_slice(source_offset + done, &mut carried[..part]);
            self.write_slice(offset + done, &carried[..part]);
            done += part;
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

    /// Gives the pages of a freed block back to the system, where it is big enough to matter.
    pub(crate) fn give_back(&self, offset: u64, bytes: u64) {
        if bytes >= GIVE_BACK_FROM
            && let Err(error) =
                rustix::fs::fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes)
        {
            tracing::debug!(offset, bytes, %error, "freed pages of a simulated device stay in memory");
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this length, and no reference into it outlives `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * WORD) } {
            tracing::warn!(%error, "cannot unmap the memory of a simulated device");
        }
    }
}

/// A range of bytes as the end of one word, whole words, and the beginning of another.
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

/// Replaces `count` bytes of a word, from byte `at` on, by those of `value`, and leaves the others as they are.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_at_any_offset_and_length_are_exact(offset in 0usize..40, to in 100usize..140, bytes in 0usize..60) {
            let memory = DeviceMemory::new(4096).unwrap();
            let mut expected: Vec<u8> = (0..200u8).collect();
            memory.write_slice(0, &expected);
            memory.copy_from(to, &memory, offset, bytes);
            expected.copy_within(offset..offset + bytes, to);
            let mut seen = vec![0u8; 200];
            memory.read_slice(0, &mut seen);
            prop_assert_eq!(&seen, &expected);
            let mut part = vec![0u8; bytes];
            memory.read_slice(to, &mut part);
            prop_assert_eq!(&part[..], &expected[to..to + bytes]);
            memory.fill(offset, bytes, u64::from_ne_bytes([0xab; 8]));
            expected[offset..offset + bytes].fill(0xab);
            memory.read_slice(0, &mut seen);
            prop_assert_eq!(&seen, &expected);
        }
    }

    #[test]
    fn neighbours_in_one_word_do_not_disturb_each_other() {
        let memory = DeviceMemory::new(4096).unwrap();
        std::thread::scope(|scope| {
            for at in 0..8usize {
                let memory = &memory;
                scope.spawn(move || {
                    for round in 0..=200u8 {
                        memory.write_slice(at, &[round]);
                        let mut seen = [0u8];
                        memory.read_slice(at, &mut seen);
                        assert_eq!(seen[0], round);
                    }
                });
            }
        });
    }

    #[test]
    fn only_touched_pages_take_memory_and_big_holes_give_it_back() {
        let memory = DeviceMemory::new(1 << 30).unwrap();
        let blocks = || rustix::fs::fstat(&memory.file).unwrap().st_blocks * 512;
        assert_eq!(blocks(), 0);
        memory.fill(0, 1 << 20, 7);
        assert!(blocks() >= 1 << 20 && blocks() < 8 << 20, "{} bytes for one MiB", blocks());
        memory.give_back(0, 1 << 20);
        assert_eq!(blocks(), 0);
        assert!(rustix::fs::ftruncate(&memory.file, 4096).is_err(), "the file is not sealed against shrinking");
        assert!(rustix::fs::ftruncate(&memory.file, 2 << 30).is_err(), "the file is not sealed against growing");
    }
}
