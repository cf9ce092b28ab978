//! Page-locked memory whose pages belong to a file, so that several processes can have the same pages.
//!
//! The file is anonymous (`memfd`). The process that makes it maps it for writing, and touches and registers its pages as those of
//! other page-locked memory. Another process maps the file that it received, and registers the same pages there. The system frees
//! the pages once no process has the file open, maps it, or has its pages registered.
//!
//! *Seals.* A file can never change its size, so no access to a mapping of it raises SIGBUS. [`seal`] also forbids every later
//! mapping for writing, if the devices can register memory that the CPU may only read.
//!
//! *Pages.* The kernel uses transparent huge pages if `/sys/kernel/mm/transparent_hugepage/shmem_enabled` permits it. Reserved huge
//! pages come from a file of such pages. The NUMA policy of the mapping becomes that of the file.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::super::host_options::HugePages;
use super::super::nodes::prefer_node;
use super::super::pages::PageSource;
use super::super::ranges::PAGE;
use super::{HUGE_PAGE, HostMemory, Mapped, NotMade, Reservation, Touching, advise, system_error};
use highwater_hal::{Error, ErrorKind, HostAllocator, HostOptions, HostPtr, Result};

/// A file that is mapped and registered here. Dropping it has no effect.
#[derive(Debug)]
pub(crate) struct FileMemory {
    pub(crate) ptr: HostPtr,
    /// Size of the file: whole pages.
    pub(crate) bytes: usize,
    piece_bytes: NonZeroUsize,
    /// Number of registered pieces, from the first.
    registered: usize,
    /// The addresses to unmap. Empty once they are unmapped.
    mapping: Range<usize>,
}

/// A file that could not be mapped or registered.
#[derive(Debug)]
pub(crate) struct NotMapped {
    pub(crate) error: Error,
    /// The part that the backend refused to release.
    pub(crate) left: Option<FileMemory>,
}

impl From<Error> for NotMapped {
    fn from(error: Error) -> Self {
        Self { error, left: None }
    }
}

/// Makes the pages of a file present.
#[derive(Debug)]
struct Populate {
    /// True if the file is new: its pages are zeros, and no other process has it.
    is_new: bool,
}

impl PageSource for Populate {
    unsafe fn map_reserved(&self, _: HostPtr, _: usize) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    unsafe fn touch(&self, start: HostPtr, bytes: usize, _: bool) -> Result<Duration, Errno> {
        let begun = Instant::now();
        let advice = if self.is_new { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        // SAFETY: The range is mapped, as the caller promises; the contents stay.
        match unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) } {
            // A kernel before 5.14 does not know it.
            Err(Errno::INVAL) => {}
            result => return result.map(|()| begun.elapsed()),
        }
        for offset in (0..bytes).step_by(PAGE) {
            let byte = start.offset(offset).as_ptr();
            // SAFETY: Inside the mapping. A new file has no other user, and its bytes are zero.
            unsafe {
                if self.is_new {
                    byte.write_volatile(0);
                } else {
                    let _ = byte.read_volatile();
                }
            }
        }
        Ok(begun.elapsed())
    }
}

/// How a file is mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mode {
    /// True if the process that maps the file made it just now.
    pub(crate) is_new: bool,
    /// True if the CPU may only read.
    pub(crate) read_only: bool,
}

impl HostMemory {
    /// Makes a file of `bytes` zeros or more, maps it for writing, and registers it.
    pub(crate) fn make_file(&self, bytes: usize) -> Result<(FileMemory, OwnedFd), NotMapped> {
        if self.huge_pages == HugePages::Reserved {
            match self.try_file(bytes, true) {
                Err(NotMadeFile::LacksPages(error)) => self.note_lack(error),
                Err(NotMadeFile::Refused(refused)) => return Err(refused),
                Ok(made) => return Ok(made),
            }
        }
        self.try_file(bytes, false).map_err(|error| match error {
            NotMadeFile::LacksPages(errno) => system_error(bytes, "touched", errno).into(),
            NotMadeFile::Refused(refused) => refused,
        })
    }

    fn try_file(&self, bytes: usize, is_huge: bool) -> Result<(FileMemory, OwnedFd), NotMadeFile> {
        let page = if is_huge { HUGE_PAGE } else { PAGE };
        let failed = |errno| NotMadeFile::Refused(system_error(bytes, "put into a file in memory", errno).into());
        let size = bytes.max(1).checked_next_multiple_of(page).ok_or_else(|| failed(Errno::NOMEM))?;
        if !highwater_hal::file_limit::allows(size as u64) {
            let error =
                Error::new(ErrorKind::OutOfMemory, "pinned_shared", format!("a file of {size} bytes is too large"))
                    .with_hint(highwater_hal::file_limit::HINT);
            return Err(NotMadeFile::Refused(error.into()));
        }
        let huge = if is_huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
        let lacks = |errno| if is_huge { NotMadeFile::LacksPages(errno) } else { failed(errno) };
        let file = rustix::fs::memfd_create("highwater-pinned", flags).map_err(lacks)?;
        rustix::fs::ftruncate(&file, size as u64).map_err(lacks)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(lacks)?;
        self.map(file.as_fd(), size, Mode { is_new: true, read_only: false }).map(|memory| (memory, file))
    }

    /// Maps and registers a file of `bytes` that another process made, after a check of its seals and its size.
    pub(crate) fn map_file(
        &self,
        file: BorrowedFd<'_>,
        bytes: usize,
        read_only: bool,
    ) -> Result<FileMemory, NotMapped> {
        let size = check_file(file, bytes, read_only)?;
        self.map(file, size, Mode { is_new: false, read_only }).map_err(|error| match error {
            NotMadeFile::LacksPages(errno) => system_error(bytes, "read", errno).into(),
            NotMadeFile::Refused(refused) => refused,
        })
    }

    fn map(&self, file: BorrowedFd<'_>, size: usize, mode: Mode) -> Result<FileMemory, NotMadeFile> {
        let refused = |error: Error| NotMadeFile::Refused(error.into());
        let piece_bytes = self.piece_bytes.ok_or_else(|| refused(Error::lacks("pinned_shared", "host_register")))?;
        let reservation = Reservation::of_size(size).map_err(|errno| refused(system_error(size, "reserved", errno)))?;
        let (ptr, mapping) = (reservation.start, reservation.mapping);
        let mut memory = FileMemory { ptr, bytes: size, piece_bytes, registered: 0, mapping };
        let Err(error) = self.map_and_register(&mut memory, file, mode) else { return Ok(memory) };
        // SAFETY: No code has the memory yet.
        let left = unsafe { memory.release(&*self.allocator) }.is_err().then_some(memory);
        Err(match (error, left) {
            (NotMade::LacksPages(errno), None) => NotMadeFile::LacksPages(errno),
            (NotMade::LacksPages(errno), left) => {
                NotMadeFile::Refused(NotMapped { error: system_error(size, "touched", errno), left })
            }
            (NotMade::Refused(error), left) => NotMadeFile::Refused(NotMapped { error, left }),
        })
    }

    fn map_and_register(&self, memory: &mut FileMemory, file: BorrowedFd<'_>, mode: Mode) -> Result<(), NotMade> {
        let FileMemory { ptr, bytes, piece_bytes, .. } = *memory;
        let start = ptr.as_ptr().cast();
        let failed = |errno| NotMade::Refused(system_error(bytes, "mapped", errno));
        let writes = if mode.read_only { ProtFlags::empty() } else { ProtFlags::WRITE };
        // Of reserved huge pages, the mapping already takes as many as it needs.
        let lacks = |errno| if errno == Errno::NOMEM { NotMade::LacksPages(errno) } else { failed(errno) };
        // SAFETY: Replaces a part of a reservation that no other code knows.
        unsafe {
            rustix::mm::mmap(start, bytes, ProtFlags::READ | writes, MapFlags::SHARED | MapFlags::FIXED, file, 0)
        }
        .map_err(lacks)?;
        // SAFETY: The new mapping; the advice changes no contents.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontFork) }.map_err(failed)?;
        if mode.is_new {
            // SAFETY: As above.
            if let Err(errno) = unsafe { advise(ptr, bytes, self.huge_pages) } {
                tracing::debug!("the kernel keeps its choice of pages for shared page-locked memory: {errno}");
            }
            if let Some(node) = self.node
                // SAFETY: As above, and no page is touched yet.
                && let Err(error) = unsafe { prefer_node(ptr, bytes, node) }
            {
                tracing::debug!("shared page-locked memory is not bound to node {node}: {error}");
            }
        }
        let options = HostOptions::new().with_read_only(mode.read_only);
        let reserved_bytes = bytes;
        let mut mapped = Mapped { ptr, bytes, piece_bytes, reserved_bytes, registered: 0, options };
        let source = Populate { is_new: mode.is_new };
        let touching = Touching::new(&mapped, &source, None);
        let result = mapped.touch_and_register(&*self.allocator, &touching);
        memory.registered = mapped.registered;
        result
    }
}

/// Why a file was not made or mapped.
#[derive(Debug)]
enum NotMadeFile {
    Refused(NotMapped),
    /// Its pages could not be touched.
    LacksPages(Errno),
}

impl FileMemory {
    /// Returns the offsets at which registrations begin, except the first.
    pub(crate) fn borders(&self) -> Vec<usize> {
        (0..self.bytes).step_by(self.piece_bytes.get()).skip(1).collect()
    }

    /// Unregisters and unmaps the memory. After an error, a later call continues.
    ///
    /// # Safety
    /// No code and no outstanding device work may use the memory.
    pub(crate) unsafe fn release(&mut self, allocator: &dyn HostAllocator) -> Result<()> {
        while let Some(last) = self.registered.checked_sub(1) {
            // SAFETY: Registered with this address. No device work uses it, as the caller promises.
            unsafe { allocator.unregister(self.ptr.offset(last * self.piece_bytes.get()))? };
            self.registered = last;
        }
        if !self.mapping.is_empty() {
            let start = std::ptr::without_provenance_mut(self.mapping.start);
            // SAFETY: This value's own mapping, which neither the backend nor other code uses.
            unsafe { rustix::mm::munmap(start, self.mapping.len()) }
                .map_err(|errno| system_error(self.mapping.len(), "unmapped", errno))?;
            self.mapping = 0..0;
        }
        Ok(())
    }
}

/// Forbids changes of a file's seals, and later mappings for writing if `read_only`.
pub(crate) fn seal(file: BorrowedFd<'_>, read_only: bool) -> Result<(), Errno> {
    let writes = if read_only { SealFlags::FUTURE_WRITE } else { SealFlags::empty() };
    rustix::fs::fcntl_add_seals(file, writes | SealFlags::SEAL)
}

/// Checks that a file of another process has the size and the seals that make it safe to map. Returns its size.
fn check_file(file: BorrowedFd<'_>, bytes: usize, read_only: bool) -> Result<usize> {
    let invalid = |what: String| {
        Error::new(ErrorKind::InvalidArgument, "open_pinned", format!("the other process sent {what}"))
            .with_hint("use compatible versions of this library in both processes")
    };
    let seals = rustix::fs::fcntl_get_seals(file)
        .map_err(|errno| invalid(format!("a descriptor that is no file in memory ({errno})")))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) {
        return Err(invalid("a file whose size is not sealed: it could shrink under its mapping".to_owned()));
    }
    if read_only && !seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(invalid("a file that is not sealed against writes, as read-only memory".to_owned()));
    }
    let size = rustix::fs::fstat(file).ok().and_then(|stat| usize::try_from(stat.st_size).ok()).unwrap_or(0);
    // The maker rounds up to pages, of either size.
    if !size.is_multiple_of(PAGE) || size < bytes || size - bytes > HUGE_PAGE || size == 0 {
        return Err(invalid(format!("a file of {size} bytes, expected {bytes} bytes and less than a huge page more")));
    }
    Ok(size)
}
