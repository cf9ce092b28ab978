//! Pieces of shared memory: sealed, anonymous, and accessed only as atomics.
//!
//! A [`CountSegment`] belongs to one exporter and one importer. It holds the words of `counts.rs`, and the handles of allocations that the
//! importer may open without a request. A [`ReadySegment`] belongs
//! to an exporter. All its importers map it, read-only. For each allocation it holds the number of the latest share whose
//! device work is done, and the greatest number of any ticket. The protocol's version (`message.rs`) is also the version of the layout,
//! except for the handles: an earlier file of the same version has none. Sealed means that no process can shorten the file under a mapping,
//! so a load never faults.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::counts::{Flags, Slot};
use super::identity::Mark;
use super::system::{invalid_message, os_error};
use highwater_hal::{MemoryHandle, Result, Transport};

/// Slots in a segment. An allocation has the same slot in every segment that contains it.
pub(crate) const SLOTS: usize = 1 << 16;
/// Returns the segment of an allocation and its slot in that segment.
pub(crate) fn place_of(index: u32) -> (usize, usize) {
    (index as usize / SLOTS, index as usize % SLOTS)
}

const BIT_WORDS: usize = SLOTS / 64;
const SUMMARY_WORDS: usize = BIT_WORDS / 64;

const RELEASED_SUMMARY: usize = 0;
const CLOSED_SUMMARY: usize = RELEASED_SUMMARY + SUMMARY_WORDS;
const RELEASED: usize = CLOSED_SUMMARY + SUMMARY_WORDS;
const CLOSED: usize = RELEASED + BIT_WORDS;
const COUNTS: usize = CLOSED + BIT_WORDS;
const PREPARED: usize = COUNTS + SLOTS;
/// The words of a handle in the table of prepared opens: the serial number of the allocation, its bytes, the UUID and the payload.
const PREPARED_WORDS: usize = 1 + 1 + 2 + 8;
const COUNT_WORDS: usize = PREPARED + SLOTS * PREPARED_WORDS;

/// The first words of a ready segment; word 0 is waited on.
const READY_HEADER: usize = 8;
/// The word with the state of a hand-over.
const HAND_OVER: usize = 1;
/// The words with the mark of the heir.
const HEIR: usize = 2;
const READY: usize = READY_HEADER;
const ISSUED: usize = READY + SLOTS;
const READY_WORDS: usize = ISSUED + SLOTS;

/// In the number of the latest share: the exporter is dead, and an heir answers.
const ORPHANED: u64 = 1 << 63;

const PAGE: usize = 4096;

/// A mapping of a sealed file, as words.
struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: The mapping belongs to this value and is only accessed as atomics.
unsafe impl Send for Mapping {}
// SAFETY: As above.
unsafe impl Sync for Mapping {}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("base", &self.base).field("words", &self.words).finish()
    }
}

const fn file_bytes(words: usize) -> usize {
    (words * size_of::<u64>()).next_multiple_of(PAGE)
}

impl Mapping {
    /// Creates a file of zeros and maps it. With `read_only_for_others`, no later mapping of it can write.
    fn create(words: usize, read_only_for_others: bool) -> Result<(Self, OwnedFd)> {
        const WHAT: &str = "memory for shared counts";
        if !highwater_hal::file_limit::allows(file_bytes(words) as u64) {
            return Err(os_error("share", WHAT, rustix::io::Errno::FBIG));
        }
        let file = rustix::fs::memfd_create("highwater-share", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| os_error("share", WHAT, errno))?;
        rustix::fs::ftruncate(&file, file_bytes(words) as u64).map_err(|errno| os_error("share", WHAT, errno))?;
        let sizes = SealFlags::SHRINK | SealFlags::GROW;
        rustix::fs::fcntl_add_seals(&file, sizes).map_err(|errno| os_error("share", WHAT, errno))?;
        let mapping = Self::map("share", &file, words, ProtFlags::READ | ProtFlags::WRITE)?;
        // After this process's own mapping, which stays writable.
        let last = if read_only_for_others { SealFlags::FUTURE_WRITE | SealFlags::SEAL } else { SealFlags::SEAL };
        rustix::fs::fcntl_add_seals(&file, last).map_err(|errno| os_error("share", WHAT, errno))?;
        Ok((mapping, file))
    }

    /// Maps a file that another process made, after a check of its seals and its size.
    fn open(file: &OwnedFd, words: usize, protection: ProtFlags) -> Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
        let size = rustix::fs::fstat(file).map_or(0, |stat| stat.st_size);
        if !seals.contains(SealFlags::SHRINK) || usize::try_from(size).unwrap_or(0) < file_bytes(words) {
            return Err(invalid_message("open_shared", "a file of counts that is unsealed or too short"));
        }
        Self::map("open_shared", file, words, protection)
    }

    fn map(operation: &'static str, file: &OwnedFd, words: usize, protection: ProtFlags) -> Result<Self> {
        // SAFETY: This is a new mapping at an address that the kernel chooses, of a file that can never become shorter than it.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), file_bytes(words), protection, MapFlags::SHARED, file.as_fd(), 0)
        };
        let base = base.map_err(|errno| os_error(operation, "address range for shared counts", errno))?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| os_error(operation, "address range for shared counts", rustix::io::Errno::NOMEM))?;
        Ok(Self { base, words })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: `base` starts a page-aligned mapping of at least this many words. It lives as long as `self`, cannot shrink,
        // and is only ever accessed as atomics, by other processes too.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }

    fn range(&self, start: usize, len: usize) -> &[AtomicU64] {
        &self.words()[start..start + len]
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: The mapping belongs to this value, and no borrow of it is left. An error leaves it mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), file_bytes(self.words)) };
    }
}

fn word_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

/// Counts of one importer, for [`SLOTS`] allocations of one exporter.
#[derive(Debug)]
pub(crate) struct CountSegment(Mapping);

impl CountSegment {
    /// Makes the file of an importer. Without handles if a limit of this process forbids files of that size.
    pub(crate) fn create() -> Result<(Self, OwnedFd)> {
        let has_handles = highwater_hal::file_limit::allows(file_bytes(COUNT_WORDS) as u64);
        Mapping::create(if has_handles { COUNT_WORDS } else { PREPARED }, false)
            .map(|(mapping, file)| (Self(mapping), file))
    }

    /// Opens the file of an exporter. Files of earlier versions have no handles.
    pub(crate) fn open(file: &OwnedFd) -> Result<Self> {
        let has_handles = rustix::fs::fstat(file).is_ok_and(|stat| stat.st_size >= file_bytes(COUNT_WORDS) as i64);
        let words = if has_handles { COUNT_WORDS } else { PREPARED };
        Mapping::open(file, words, ProtFlags::READ | ProtFlags::WRITE).map(Self)
    }

    /// Returns the word of the allocation `serial`, whose index in the segment is `slot`.
    #[inline]
    pub(crate) fn slot(&self, slot: usize, serial: u64) -> Slot<'_> {
        Slot::new(&self.0.words()[COUNTS + slot], serial)
    }

    /// Prepares an open of the allocation `serial`, by a handle without a descriptor. Returns `false` if an open of it was granted or
    /// prepared before, or if the importer changes the word meanwhile. Only the exporter may call it, from one thread at a time.
    pub(crate) fn prepare(&self, slot: usize, serial: u64, handle: &MemoryHandle) -> bool {
        let words = |bytes: &[u8]| -> Vec<u64> { bytes.chunks_exact(8).map(word_of).collect() };
        let values = [&[serial, handle.bytes][..], &words(&handle.device_uuid), &words(&handle.payload)].concat();
        if self.0.words < COUNT_WORDS || self.slot(slot, serial).is_known() {
            return false;
        }
        // Relaxed: the exporter writes the word after them, and the importer reads it before them.
        for (word, value) in self.prepared(slot).iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
        self.slot(slot, serial).prepare()
    }

    /// Counts an open that the exporter has prepared. Returns the handle, which the caller maps. `None` if the importer must ask.
    pub(crate) fn take(&self, slot: usize, serial: u64) -> Option<MemoryHandle> {
        if self.0.words < COUNT_WORDS {
            return None;
        }
        let word = self.slot(slot, serial).prepared()?;
        let mut values = self.prepared(slot).iter().map(|word| word.load(Ordering::Relaxed));
        let mut bytes = |words: usize| values.by_ref().take(words).flat_map(u64::to_ne_bytes).collect::<Vec<u8>>();
        let (known, whole) = (word_of(&bytes(1)), word_of(&bytes(1)));
        let (uuid, payload) = (bytes(2).try_into().ok()?, bytes(8).try_into().ok()?);
        // The exporter overwrites the values only after it has closed the word. The take then fails.
        let is_taken = known == serial && self.slot(slot, serial).take(word);
        is_taken.then(|| MemoryHandle::new(Transport::Legacy, uuid, whole, payload))
    }

    fn prepared(&self, slot: usize) -> &[AtomicU64] {
        self.0.range(PREPARED + slot * PREPARED_WORDS, PREPARED_WORDS)
    }

    /// Flags for the allocations that the importer has released for good: raised by the importer, drained by the exporter.
    pub(crate) fn released(&self) -> Flags<'_> {
        Flags::new(self.0.range(RELEASED, BIT_WORDS), self.0.range(RELEASED_SUMMARY, SUMMARY_WORDS))
    }

    /// Flags for the allocations that the exporter has freed while the importer maps them: raised by the exporter, drained by
    /// the importer.
    pub(crate) fn closed(&self) -> Flags<'_> {
        Flags::new(self.0.range(CLOSED, BIT_WORDS), self.0.range(CLOSED_SUMMARY, SUMMARY_WORDS))
    }
}

/// For [`SLOTS`] allocations of an exporter, the latest share whose device work is done, and the latest share.
#[derive(Debug)]
pub(crate) struct ReadySegment(Mapping);

/// The state of the device work before a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// It is done.
    Ready,
    /// It is not done yet.
    Waiting,
    /// The exporter's device failed.
    Failed,
}

/// The progress of a hand-over by a living exporter (`hand_over.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Progress {
    None,
    /// An heir may take the memory.
    Offered,
    /// An heir has it. The exporter answers no more.
    Done,
}

impl ReadySegment {
    /// Published in place of a number if the exporter's device fails.
    pub(crate) const FAILED: u64 = u64::MAX;

    pub(crate) fn create() -> Result<(Self, OwnedFd)> {
        Mapping::create(READY_WORDS, true).map(|(mapping, file)| (Self(mapping), file))
    }

    pub(crate) fn open(file: &OwnedFd) -> Result<Self> {
        Mapping::open(file, READY_WORDS, ProtFlags::READ).map(Self)
    }

    /// Resets a slot for a new allocation, which has no tickets yet. No process waits for the previous allocation of the slot:
    /// a waiting process has it open, and the slot of an open allocation is not reused.
    pub(crate) fn begin(&self, slot: usize) {
        self.issue(slot, 0);
        // Wakes no thread: none waits for an allocation that had the slot, because it has no user left.
        self.0.words()[READY + slot].store(0, Ordering::Release);
    }

    /// Announces that tickets of an allocation have numbers up to this one. Call it before such a ticket leaves this process.
    ///
    /// Importers compare ticket numbers with this number without a request, so a process that has the ticket must see it. The
    /// ticket may arrive by any channel. The release fence here and the acquire fence in [`ReadySegment::is_issued`] ensure
    /// that: the ticket's bytes are written after the first and read before the second. So everything before the first fence
    /// happens before everything after the second. That holds for a channel in shared memory, and a channel through the kernel
    /// orders no less.
    pub(crate) fn issue(&self, slot: usize, number: u64) {
        self.0.words()[ISSUED + slot].store(number, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// Takes the state of a slot over from the segment of a dead exporter. No share after `done` becomes ready.
    pub(crate) fn inherit(&self, slot: usize, issued: u64, done: u64) {
        self.issue(slot, issued | ORPHANED);
        self.publish(slot, done);
    }

    /// Returns the numbers of the latest share and of the latest share whose device work is done.
    pub(crate) fn latest(&self, slot: usize) -> (u64, u64) {
        fence(Ordering::Acquire);
        let words = self.0.words();
        let issued = words[ISSUED + slot].load(Ordering::Relaxed) & !ORPHANED;
        match words[READY + slot].load(Ordering::Acquire) {
            // The failed work belongs to the latest shares. The tickets before it are not known apart.
            Self::FAILED => (issued, 0),
            done => (issued, done.min(issued)),
        }
    }

    /// Publishes the hand-over of the exporter's memory, in this segment. The caller must ring the importers afterwards.
    pub(crate) fn set_hand_over(&self, progress: Progress) {
        // Release: a process that reads the state sees the numbers and the words that the exporter wrote before.
        self.0.words()[HAND_OVER].store(progress as u64, Ordering::Release);
    }

    /// Writes the mark of the heir. Call it before [`ReadySegment::set_hand_over`], which publishes it.
    pub(super) fn set_heir(&self, heir: Mark) {
        for (word, number) in self.0.range(HEIR, Mark::WORDS).iter().zip(heir.to_words()) {
            word.store(number, Ordering::Relaxed);
        }
    }

    /// Returns the mark of the heir, once the memory was handed over.
    pub(super) fn heir(&self) -> Option<Mark> {
        if self.hand_over() != Progress::Done {
            return None;
        }
        let words = self.0.range(HEIR, Mark::WORDS);
        Mark::of_words(std::array::from_fn(|at| words[at].load(Ordering::Relaxed)))
    }

    /// Returns the state of a hand-over.
    pub(crate) fn hand_over(&self) -> Progress {
        match self.0.words()[HAND_OVER].load(Ordering::Acquire) {
            1 => Progress::Offered,
            2 => Progress::Done,
            _ => Progress::None,
        }
    }

    /// Returns whether the exporter died before the device work of the latest shares was done, so that no wait for it ends.
    pub(crate) fn is_orphaned(&self, slot: usize) -> bool {
        self.0.words()[ISSUED + slot].load(Ordering::Relaxed) & ORPHANED != 0
    }

    /// Returns whether a ticket with this number can have been given out. The caller must have the allocation open, so
    /// that the slot belongs to it.
    pub(crate) fn is_issued(&self, slot: usize, number: u64) -> bool {
        fence(Ordering::Acquire);
        number <= self.0.words()[ISSUED + slot].load(Ordering::Relaxed) & !ORPHANED
    }

    /// Publishes that the device work before share `number` is done.
    pub(crate) fn publish(&self, slot: usize, number: u64) {
        let words = self.0.words();
        // Release: a thread that reads the number sees the effects of the device work.
        words[READY + slot].store(number, Ordering::Release);
        let published = self.published();
        published.fetch_add(1, Ordering::Release);
        // Shared between processes, so no PRIVATE flag. A wake without waiters is not an error.
        let _ = rustix::thread::futex::wake(published, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
    }

    #[inline]
    pub(crate) fn readiness(&self, slot: usize, number: u64) -> Readiness {
        match self.0.words()[READY + slot].load(Ordering::Acquire) {
            Self::FAILED => Readiness::Failed,
            ready if ready >= number => Readiness::Ready,
            _ => Readiness::Waiting,
        }
    }

    /// Waits until the device work before a share is done, for at most `longest`.
    pub(crate) fn wait(&self, slot: usize, number: u64, longest: Duration) -> Readiness {
        let seen = self.published().load(Ordering::Acquire);
        let now = self.readiness(slot, number);
        if now != Readiness::Waiting {
            return now;
        }
        let timeout = rustix::time::Timespec::try_from(longest).ok();
        // Interrupted, timed out or woken: the caller checks again.
        let _ = rustix::thread::futex::wait(
            self.published(),
            rustix::thread::futex::Flags::empty(),
            seen,
            timeout.as_ref(),
        );
        self.readiness(slot, number)
    }

    /// Returns the count of publications, on which waiters sleep.
    fn published(&self) -> &AtomicU32 {
        // SAFETY: Word 0 of the header is mapped, aligned, and used only as this 32-bit atomic. The mapping of an importer is
        // read-only, and the importer only loads and waits.
        unsafe { &*self.0.base.as_ptr().cast::<AtomicU32>() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_importer_sees_the_numbers_of_the_allocation_that_has_the_slot() {
        let (exporter, file) = ReadySegment::create().unwrap();
        let importer = ReadySegment::open(&file).unwrap();
        for slot in [0, 1, SLOTS - 1] {
            exporter.begin(slot);
            exporter.issue(slot, 1);
            exporter.issue(slot, 2);
            exporter.publish(slot, 1);
            assert_eq!([1, 2, 3].map(|number| importer.is_issued(slot, number)), [true, true, false]);
            assert_eq!(importer.readiness(slot, 1), Readiness::Ready);
            assert_eq!(importer.readiness(slot, 2), Readiness::Waiting);
            // The next allocation starts from zero.
            exporter.begin(slot);
            assert_eq!([0, 1].map(|number| importer.is_issued(slot, number)), [true, false]);
            assert_eq!([0, 1].map(|number| importer.readiness(slot, number)), [Readiness::Ready, Readiness::Waiting]);
        }
    }

    #[test]
    fn a_file_of_another_layout_is_too_short() {
        let (_, file) = Mapping::create(READY_WORDS - SLOTS, true).unwrap();
        assert!(ReadySegment::open(&file).is_err());
    }
}
