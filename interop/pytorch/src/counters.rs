//! The file of counters: shared memory of POSIX with one number for each share.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..4 | the number of processes that are attached; the one that takes it to 0 removes the name |
//! | 4..64 | unused |
//! | 64..80064 | 10,000 slots of 64 bits |
//!
//! A sender sets a slot to 1, and the receiver subtracts 1 when it is done. PyTorch attaches only for the time of the subtraction.
//! A receiver here maps the file without attaching. So its death leaves the number of attached processes unchanged.
//!
//! A killed sender leaves its file. Each sender holds a lock on its file, and the kernel releases the lock at its death. The next
//! sender removes the files of Highwater that no process has locked.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::TorchStorage;
use highwater_core::fork::Generation;
use highwater_core::{Error, ErrorKind, Result};

/// Slots of one file.
pub(crate) const SLOTS: usize = 10_000;
const HEADER_BYTES: usize = 64;
const FILE_BYTES: usize = HEADER_BYTES + SLOTS * size_of::<u64>();
/// The folder of POSIX shared memory.
const FOLDER: &str = "/dev/shm";
/// The beginning of the names of Highwater's files.
const PREFIX: &str = "highwater_torch_";

/// A mapped file of counters.
#[derive(Debug)]
struct Mapping(NonNull<u8>);

// SAFETY: The memory is mapped until the drop, and is accessed by atomic operations only.
unsafe impl Send for Mapping {}
// SAFETY: As above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file. It must have [`FILE_BYTES`] bytes.
    fn of(operation: &'static str, file: &File) -> Result<Self> {
        // SAFETY: The kernel chooses the address, so no other mapping is replaced.
        let mapped = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), FILE_BYTES, access, MapFlags::SHARED, file, 0)
        };
        let mapped = mapped.map_err(|errno| os_error(operation, "map the file of counters", errno.into()))?;
        let start = NonNull::new(mapped.cast()).ok_or_else(|| missing(operation))?;
        Ok(Self(start))
    }

    fn attached(&self) -> &AtomicI32 {
        // SAFETY: The mapping begins with these 4 bytes at the start of a page, and outlives the reference.
        unsafe { AtomicI32::from_ptr(self.0.as_ptr().cast()) }
    }

    fn slot(&self, slot: usize) -> &AtomicI64 {
        assert!(slot < SLOTS, "slots are checked");
        // SAFETY: The slot lies inside the mapping, at a multiple of 8 bytes, and the mapping outlives the reference.
        unsafe { AtomicI64::from_ptr(self.0.as_ptr().add(HEADER_BYTES + slot * size_of::<i64>()).cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: Nothing refers to the mapping any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), FILE_BYTES) };
    }
}

/// Returns an error of the operating system.
#[cold]
fn os_error(operation: &'static str, what: &str, error: std::io::Error) -> Error {
    let message = format!("the operating system cannot {what} in {FOLDER}: {error}");
    Error::new(ErrorKind::OperatingSystem, operation, message)
        .with_code(i64::from(error.raw_os_error().unwrap_or(0)))
        .with_hint("mount a tmpfs at /dev/shm with some free pages, and raise the limit on descriptors (ulimit -n)")
}

#[cold]
fn missing(operation: &'static str) -> Error {
    Error::new(ErrorKind::Expired, operation, "the sender's file of counters is gone")
        .with_hint("the sender has ended, or does not see the same /dev/shm")
}

#[cold]
fn refused(operation: &'static str, message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation, message)
        .with_hint("pass the eight fields of one call of `_share_cuda_` as they are")
}

// ---------------------------------------------------------------- files of others

/// The identity of a file: its device and inode.
type FileKey = (u64, u64);

/// A file of another process, and the slots that this process has open. They keep the mapping.
#[derive(Debug, Default)]
struct Foreign {
    mapping: Weak<Mapping>,
    open: HashSet<usize>,
}

/// The files of other processes.
#[derive(Debug)]
struct Files {
    generation: Generation,
    by_key: Mutex<HashMap<FileKey, Foreign>>,
}

impl Files {
    fn of_this_process(operation: &'static str) -> Result<&'static Self> {
        static FILES: OnceLock<Files> = OnceLock::new();
        let files = FILES.get_or_init(|| Self { generation: Generation::current(), by_key: Mutex::default() });
        // Another thread may have held the lock at the fork.
        if files.generation.is_current() { Ok(files) } else { Err(Generation::error(operation)) }
    }
}

/// The counter of a share that this process received. Only one exists for a slot at a time.
#[derive(Debug)]
pub(crate) struct Counter {
    files: &'static Files,
    key: FileKey,
    mapping: Arc<Mapping>,
    slot: usize,
}

impl Counter {
    /// Takes the counter of a storage.
    pub(crate) fn of(operation: &'static str, storage: &TorchStorage) -> Result<Self> {
        let slot = usize::try_from(storage.ref_counter_offset).ok().filter(|slot| *slot < SLOTS).ok_or_else(|| {
            let message = format!("slot {} of the counters, expected less than {SLOTS}", storage.ref_counter_offset);
            refused(operation, message)
        })?;
        let file = open(operation, &storage.ref_counter_handle)?;
        let metadata = file.metadata().map_err(|error| os_error(operation, "read the size of a file", error))?;
        if !metadata.is_file() || metadata.len() < FILE_BYTES as u64 {
            let message = format!("a file of counters of {} bytes, expected {FILE_BYTES}", metadata.len());
            return Err(refused(operation, message));
        }
        let (files, key) = (Files::of_this_process(operation)?, (metadata.dev(), metadata.ino()));
        let mut by_key = files.by_key.lock();
        let known = by_key.get(&key).and_then(|foreign| foreign.mapping.upgrade());
        let mapping = match known {
            Some(mapping) => mapping,
            None => Arc::new(Mapping::of(operation, &file)?),
        };
        let count = mapping.slot(slot).load(Ordering::Acquire);
        if count <= 0 {
            let message = format!("the share has ended: the counter of slot {slot} is {count}, expected 1");
            let ended = Error::new(ErrorKind::Expired, operation, message);
            return Err(ended.with_hint("share the storage again; each share is for one open"));
        }
        let foreign = by_key.entry(key).or_default();
        foreign.mapping = Arc::downgrade(&mapping);
        if !foreign.open.insert(slot) {
            let message = format!("this process has the share of slot {slot} open already");
            let again = Error::new(ErrorKind::InvalidState, operation, message);
            return Err(again.with_hint("share the storage again for each open"));
        }
        drop(by_key);
        Ok(Self { files, key, mapping, slot })
    }

    /// Tells the sender that the memory is no longer used.
    pub(crate) fn release(self) {
        self.mapping.slot(self.slot).fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        if !self.files.generation.is_current() {
            return;
        }
        let mut by_key = self.files.by_key.lock();
        if let Some(foreign) = by_key.get_mut(&self.key) {
            foreign.open.remove(&self.slot);
            if foreign.open.is_empty() {
                by_key.remove(&self.key);
            }
        }
    }
}

/// Opens a file by the name that a sender gave it.
fn open(operation: &'static str, name: &[u8]) -> Result<File> {
    // A name of `shm_open` has one slash, at the start.
    let is_name = |name: &&[u8]| {
        !name.is_empty()
            && name.len() <= 255
            && *name != b"."
            && *name != b".."
            && !name.iter().any(|at| matches!(at, 0 | b'/'))
    };
    let Some(name) = name.strip_prefix(b"/").filter(is_name) else {
        let shown = String::from_utf8_lossy(name);
        let message =
            format!("{shown:?} is not the name of a file of counters, expected one slash and up to 255 bytes");
        return Err(refused(operation, message));
    };
    let path = PathBuf::from(FOLDER).join(OsStr::from_bytes(name));
    // A pipe must not block the open.
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
    OpenOptions::new().read(true).write(true).custom_flags(flags as i32).open(path).map_err(|error| {
        match error.kind() {
            std::io::ErrorKind::NotFound => missing(operation),
            std::io::ErrorKind::PermissionDenied => Error::new(
                ErrorKind::PermissionDenied,
                operation,
                "the sender's file of counters belongs to another user",
            )
            .with_hint("run both processes as the same user"),
            _ => os_error(operation, "open the sender's file of counters", error),
        }
    })
}

// ---------------------------------------------------------------- own files

/// A file of counters of this process.
#[derive(Debug)]
pub(crate) struct OwnFile {
    /// Begins with a slash, as PyTorch expects.
    name: String,
    path: PathBuf,
    mapping: Mapping,
    generation: Generation,
    /// Holds the lock.
    _locked: File,
}

impl OwnFile {
    /// Makes a file.
    pub(crate) fn create(operation: &'static str) -> Result<Self> {
        loop {
            let random = u128::from_ne_bytes(highwater_core::random(operation)?);
            let name = format!("/{PREFIX}{}_{random:032x}", std::process::id());
            let path = PathBuf::from(FOLDER).join(&name[1..]);
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
            let file = file.map_err(|error| os_error(operation, "make a file of counters", error))?;
            // Another process may take the file for one of a dead process, until it is locked.
            let is_locked = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
            let inode = |found: std::io::Result<std::fs::Metadata>| found.map(|found| found.ino()).ok();
            if !is_locked || inode(path.metadata()) != inode(file.metadata()) {
                let _ = std::fs::remove_file(&path);
                continue;
            }
            // The pages are allocated now, because an access to a page that the system lacks ends the process.
            let mapped = fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES as u64)
                .map_err(|errno| os_error(operation, "allocate the pages of a file of counters", errno.into()))
                .and_then(|()| Mapping::of(operation, &file));
            let mapping = mapped.inspect_err(|_| {
                let _ = std::fs::remove_file(&path);
            })?;
            mapping.attached().store(1, Ordering::Release);
            return Ok(Self { name, path, mapping, generation: Generation::current(), _locked: file });
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the counter of a slot.
    pub(crate) fn slot(&self, slot: usize) -> &AtomicI64 {
        self.mapping.slot(slot)
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        // A child of a fork is not attached. A receiver that is attached now removes the name.
        if self.generation.is_current() && self.mapping.attached().fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes the files of Highwater's senders that were killed.
pub(crate) fn remove_files_of_dead_senders() {
    let Ok(entries) = std::fs::read_dir(FOLDER) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name().as_bytes().starts_with(PREFIX.as_bytes())) {
        let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
        let opened = OpenOptions::new().read(true).write(true).custom_flags(flags as i32).open(entry.path());
        let is_mine = |file: &File| {
            file.metadata().is_ok_and(|found| found.is_file() && found.uid() == rustix::process::geteuid().as_raw())
        };
        let Some(file) = opened.ok().filter(is_mine) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(file: &OwnFile, slot: u64) -> TorchStorage {
        TorchStorage {
            device: 0,
            handle: vec![0; 64],
            size_bytes: 4,
            offset_bytes: 0,
            ref_counter_handle: file.name().as_bytes().to_vec(),
            ref_counter_offset: slot,
            event_handle: vec![0; 64],
            event_sync_required: false,
        }
    }

    #[test]
    fn a_share_is_opened_once_at_a_time_and_ends_once() {
        let file = OwnFile::create("test").unwrap();
        file.slot(3).store(1, Ordering::Relaxed);
        let wanted = storage(&file, 3);
        let counter = Counter::of("test", &wanted).unwrap();
        assert_eq!(Counter::of("test", &wanted).unwrap_err().kind(), ErrorKind::InvalidState);
        // An open that failed leaves the count, and may be repeated.
        drop(counter);
        Counter::of("test", &wanted).unwrap().release();
        assert_eq!(file.slot(3).load(Ordering::Relaxed), 0);
        assert_eq!(Counter::of("test", &wanted).unwrap_err().kind(), ErrorKind::Expired);
        file.slot(SLOTS - 1).store(1, Ordering::Relaxed);
        storage(&file, SLOTS as u64 - 1).release().unwrap();
        assert_eq!(file.slot(SLOTS - 1).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn names_slots_and_sizes_that_no_sender_made_are_refused() {
        let file = OwnFile::create("test").unwrap();
        let refused = |change: &dyn Fn(&mut TorchStorage)| {
            let mut wanted = storage(&file, 0);
            change(&mut wanted);
            Counter::of("test", &wanted).unwrap_err().kind()
        };
        for slot in [SLOTS as u64, u64::MAX] {
            assert_eq!(refused(&|wanted| wanted.ref_counter_offset = slot), ErrorKind::InvalidArgument);
        }
        let long = [b"/".to_vec(), vec![b'a'; 256]].concat();
        for name in [&b""[..], b"/", b"name", b"/a/b", b"/..", b"/a\0b", &long] {
            assert_eq!(refused(&|wanted| wanted.ref_counter_handle = name.to_vec()), ErrorKind::InvalidArgument);
        }
        assert_eq!(refused(&|wanted| wanted.ref_counter_handle.push(b'x')), ErrorKind::Expired);
        // A folder, and a file that is too short to be mapped.
        let short = format!("{FOLDER}/highwater_short_{}", std::process::id());
        std::fs::write(&short, [0; 64]).unwrap();
        let name = short.as_bytes()[FOLDER.len()..].to_vec();
        assert_eq!(refused(&|wanted| wanted.ref_counter_handle = name.clone()), ErrorKind::InvalidArgument);
        std::fs::remove_file(&short).unwrap();
    }

    #[test]
    fn a_receiver_that_is_attached_removes_the_name_later() {
        let file = OwnFile::create("test").unwrap();
        let path = file.path.clone();
        file.mapping.attached().fetch_add(1, Ordering::Relaxed);
        drop(file);
        assert!(path.exists());
        std::fs::remove_file(&path).unwrap();
        let file = OwnFile::create("test").unwrap();
        let path = file.path.clone();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn files_without_a_lock_are_removed_and_others_stay() {
        let file = OwnFile::create("test").unwrap();
        let dead = format!("{FOLDER}/{PREFIX}0_dead_{}", std::process::id());
        std::fs::write(&dead, []).unwrap();
        remove_files_of_dead_senders();
        assert!(file.path.exists() && !std::path::Path::new(&dead).exists());
    }
}
