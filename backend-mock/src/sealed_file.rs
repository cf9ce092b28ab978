//! Memory files that processes share: created without a name, sealed in their size, passed as descriptors.
//!
//! If a file shrinks, a process that maps it dies of `SIGBUS`. So every file is sealed when it is created. A file from
//! another process is used only with that seal, which no process can remove.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use highwater_hal::{Descriptor, Error, ErrorKind, Result, file_limit};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::operation::Operation;

/// `TMPFS_MAGIC` of `linux/magic.h`: the file system of memory files, huge pages apart.
const MEMORY_FILE_SYSTEM: u64 = 0x0102_1994;

/// The identity of a file in every process of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileId {
    device: u64,
    pub(crate) inode: u64,
}

/// Returns the size of a page, the unit of mappings.
pub(crate) fn page_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        // SAFETY: `sysconf` reads a setting and has no requirements.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        u64::try_from(bytes).unwrap_or(0).max(4096)
    })
}

/// Creates a file of `bytes` zeros that can neither shrink nor grow.
pub(crate) fn create(name: &str, bytes: u64) -> Result<OwnedFd, Errno> {
    // Otherwise the next call kills the process.
    if !file_limit::allows(bytes) {
        return Err(Errno::FBIG);
    }
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Returns the identity of a file.
pub(crate) fn identify(file: &OwnedFd) -> Result<FileId, Errno> {
    let state = rustix::fs::fstat(file)?;
    Ok(FileId { device: state.st_dev, inode: state.st_ino })
}

/// Checks that a descriptor from another process is a memory file that cannot shrink. Returns the file and its size.
pub(crate) fn check(operation: Operation, file: &OwnedFd) -> Result<(FileId, u64)> {
    let refused = |message: String| {
        operation.error(ErrorKind::InvalidArgument, message).with_hint("pass the exporter's descriptor unchanged")
    };
    let asked = |error: Errno| refused(format!("cannot inspect the descriptor: {error}"));
    let seals = rustix::fs::fcntl_get_seals(file);
    let file_system = rustix::fs::fstatfs(file).map_err(asked)?.f_type as u64;
    match seals {
        Ok(seals) if seals.contains(SealFlags::SHRINK) && file_system == MEMORY_FILE_SYSTEM => {}
        Ok(seals) if file_system == MEMORY_FILE_SYSTEM => {
            return Err(refused(format!("the memory file is not sealed against shrinking, its seals are {seals:?}")));
        }
        _ => return Err(refused("the descriptor is not a memory file".to_owned())),
    }
    let bytes = rustix::fs::fstat(file).map_err(asked)?.st_size;
    Ok((identify(file).map_err(asked)?, u64::try_from(bytes).unwrap_or(0)))
}

/// Returns the error of an operation whose system call on a given file failed.
#[cold]
pub(crate) fn failed(operation: Operation, what: &str, error: Errno) -> Error {
    let (kind, hint) = match error {
        Errno::ACCESS | Errno::PERM => {
            (ErrorKind::InvalidArgument, "pass the exporter's descriptor, which can be read and written")
        }
        Errno::INVAL | Errno::OVERFLOW => (ErrorKind::InvalidArgument, "pass the exporter's handle unchanged"),
        _ => meaning(error),
    };
    operation.error(kind, format!("{what}: {error}")).with_code(i64::from(error.raw_os_error())).with_hint(hint)
}

/// Returns the error of a system call on a file that the operation creates itself. The caller passed no wrong file.
#[cold]
pub(crate) fn not_made(operation: &'static str, what: &str, error: Errno) -> Error {
    let (kind, hint) = meaning(error);
    Error::new(kind, operation, format!("{what}: {error}")).with_code(i64::from(error.raw_os_error())).with_hint(hint)
}

/// Returns the kind and the hint of a system error on a memory file.
fn meaning(error: Errno) -> (ErrorKind, &'static str) {
    match error {
        Errno::NOMEM => (ErrorKind::OutOfMemory, "ask for less at once, or raise the limit of addresses (ulimit -v)"),
        Errno::FBIG => (ErrorKind::OutOfMemory, file_limit::HINT),
        Errno::MFILE => {
            (ErrorKind::OperatingSystem, "the process has no descriptor left: raise `ulimit -n`, or close files")
        }
        Errno::NFILE => (ErrorKind::OperatingSystem, "the system has no descriptor left: raise fs.file-max"),
        Errno::ACCESS | Errno::PERM => (
            ErrorKind::PermissionDenied,
            "allow the process to create memory files (memfd_create); a sandbox refuses it",
        ),
        _ => (ErrorKind::OperatingSystem, "fix the cause that the message of the system names"),
    }
}

/// The exported descriptors, to be counted. The end of the last copy of one is not seen, so a descriptor counts as long
/// as its number stands for the same file.
#[derive(Debug, Default)]
pub(crate) struct Exported(Mutex<BTreeMap<RawFd, FileId>>);

impl Exported {
    /// Returns another descriptor of the file.
    pub(crate) fn duplicate(&self, operation: Operation, file: &OwnedFd) -> Result<Descriptor> {
        let failed = |error| failed(operation, "cannot duplicate the descriptor of the memory file", error);
        let copy = rustix::io::fcntl_dupfd_cloexec(file, 0).map_err(failed)?;
        let id = identify(&copy).map_err(failed)?;
        self.0.lock().insert(copy.as_raw_fd(), id);
        Ok(Descriptor::new(copy))
    }

    /// Returns how many are open.
    pub(crate) fn count(&self) -> u64 {
        let mut numbers = self.0.lock();
        numbers.retain(|&number, id| is_open(number, *id));
        numbers.len() as u64
    }
}

/// Returns whether the number stands for this file.
fn is_open(number: RawFd, id: FileId) -> bool {
    let mut state = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `fstat` takes any number, and `state` is as large as what it writes. A number that was closed meanwhile
    // gives an error, one that was opened again another file.
    if unsafe { libc::fstat(number, state.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the call succeeded, so `state` is written.
    let state = unsafe { state.assume_init() };
    id == FileId { device: state.st_dev, inode: state.st_ino }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sealed_memory_files_pass() {
        let sealed = create("test", 8192).unwrap();
        assert_eq!(check(Operation::OpenMemory, &sealed).unwrap().1, 8192);
        let open = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let pipe = OwnedFd::from(std::io::pipe().unwrap().0);
        for (file, part) in [(open, "not sealed"), (null, "not a memory file"), (pipe, "not a memory file")] {
            let error = check(Operation::OpenMemory, &file).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(part), "{error}");
        }
    }

    #[test]
    fn descriptors_are_counted_until_the_last_copy_is_dropped() {
        let (exported, file) = (Exported::default(), create("test", 4096).unwrap());
        let first = exported.duplicate(Operation::ExportMemory, &file).unwrap();
        let copy = first.clone();
        let second = exported.duplicate(Operation::ExportMemory, &file).unwrap();
        assert_eq!(exported.count(), 2);
        drop(first);
        assert_eq!(exported.count(), 2);
        drop((copy, second));
        assert_eq!(exported.count(), 0);
    }
}
