//! The two ends of shared page-locked memory: the file that a runtime made, and a file that another process made.
//!
//! The exporter's answer to an open holds the file and how it may be mapped. The system counts the users of the pages itself, so
//! no process frees anything of another. The counts of `counts.rs` still decide when a ticket expires and which memory is in limbo,
//! as for device memory.
//!
//! | access | seals | mapped by importers |
//! | --- | --- | --- |
//! | private: not shared yet | size | not at all |
//! | read-only | size, writes | for reading |
//! | read-only by agreement: a device of the exporter cannot register what the CPU may only read | size | for writing |
//! | writable | size | for writing |
//!
//! *Trust.* No importer can change the contents or the size of sealed memory. The exporter keeps the mapping through which it filled
//! the memory, so only its library keeps it from writing. An importer checks the seals and the size before it maps a file.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::exporter::{Memory, SharedFile, WeakMemory};
use super::open::{check_heir, hold};
use super::pinned_handle::{PINNED, of_file, registers_read_only};
use super::system::os_error;
use super::ticket::not_given_out;
use super::{ExportKey, Import, ImportOptions, Owner, Ticket, Wanted};
use crate::capture::thread::refuse_in_capture;
use crate::pool::block::{Block, MOST_PAGES, OwnedBlock, SharedPages};
use crate::pool::file_access::FileAccess;
use crate::pool::host_memory::{FileMemory, seal};
use crate::pool::pinned::PinnedPool;
use crate::runtime::Runtime;
use highwater_hal::{Error, ErrorKind, HostPtr, MemoryHandle, Result, Transport};

/// Page-locked memory of this runtime that other processes can open.
pub(crate) struct MadeHere {
    runtime: Runtime,
    file: OwnedFd,
    ptr: HostPtr,
    bytes: usize,
    /// Taken when the memory is released.
    memory: Mutex<Option<FileMemory>>,
    access: Mutex<FileAccess>,
    /// The key of the allocation in the exporter, set by the first share.
    key: OnceLock<ExportKey>,
}

/// Page-locked memory of another process.
pub(crate) struct OpenedHere {
    runtime: Runtime,
    import: Arc<Import>,
    access: FileAccess,
}

/// The source of shared page-locked memory.
#[derive(Debug, Clone)]
pub(crate) enum PinnedOrigin {
    Made(Arc<MadeHere>),
    Opened(Arc<OpenedHere>),
}

impl fmt::Debug for MadeHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MadeHere").field("ptr", &self.ptr).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl fmt::Debug for OpenedHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedHere").field("import", &self.import).finish_non_exhaustive()
    }
}

impl MadeHere {
    /// Makes memory of the kind of a pool. Returns its block.
    pub(crate) fn make(runtime: &Runtime, pool: &PinnedPool, bytes: usize) -> Result<(OwnedBlock, PinnedOrigin)> {
        const OPERATION: &str = "pinned_shared";
        let inner = &runtime.inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        if !pool.registers() {
            return Err(Error::lacks(OPERATION, "host_register"));
        }
        if bytes.div_ceil(crate::pool::PAGE) > MOST_PAGES as usize {
            let message = format!("no machine has {bytes} bytes of memory");
            return Err(Error::new(ErrorKind::OutOfMemory, OPERATION, message));
        }
        let (memory, file) = pool.make_file(bytes)?;
        inner.pinned.files.count_made(&memory);
        let (ptr, borders) = (memory.ptr, memory.borders());
        let made = Arc::new(Self {
            runtime: runtime.clone(),
            file,
            ptr,
            bytes,
            memory: Mutex::new(Some(memory)),
            access: Mutex::new(FileAccess::Private),
            key: OnceLock::new(),
        });
        let origin = PinnedOrigin::Made(made);
        let block = Block::shared(ptr, bytes, borders, Box::new(origin.clone()));
        // The address is new, so it has no other block.
        inner.pinned.files.add_block(&block);
        Ok((block, origin))
    }

    /// Decides who may write from now on, unless an earlier share did. The first share seals the file.
    fn decide(&self, is_writable: bool) -> Result<()> {
        let mut access = self.access.lock();
        match (*access, is_writable) {
            (FileAccess::Private, _) => {
                let read_only = !is_writable && registers_read_only(&self.runtime.inner);
                seal(self.file.as_fd(), read_only)
                    .map_err(|errno| os_error("share", "seals of page-locked memory", errno))?;
                *access = match (is_writable, read_only) {
                    (true, _) => FileAccess::Writable,
                    (false, true) => FileAccess::ReadOnly,
                    (false, false) => FileAccess::ReadOnlyByAgreement,
                };
                Ok(())
            }
            (FileAccess::ReadOnly | FileAccess::ReadOnlyByAgreement, true) => {
                Err(Error::new(ErrorKind::InvalidState, "share", "the buffer was shared as read-only memory")
                    .with_hint("make every share of the buffer writable, from the first on"))
            }
            _ => Ok(()),
        }
    }

    fn share(self: &Arc<Self>, block: &Block, is_writable: bool) -> Result<Ticket> {
        let inner = &self.runtime.inner;
        if !is_writable && block.uses.is_recorded(false) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "share",
                "a graph writes the buffer, and shared memory is read-only",
            )
            .with_hint("drop the graph first, or copy what it writes into another buffer"));
        }
        let sharing = inner.sharing("share")?;
        self.decide(is_writable)?;
        let (after, unmarked) = inner.pinned.files.outstanding(block, !is_writable);
        check_known(unmarked)?;
        let file: Weak<dyn SharedFile> = Arc::<Self>::downgrade(self);
        let memory = WeakMemory::Pinned(file);
        sharing.share(memory, &self.key, Transport::Descriptor, self.bytes as u64, [0; 16], after)
    }
}

fn check_known(is_unmarked: bool) -> Result<()> {
    if is_unmarked {
        let message = "a wait for the device work on the buffer failed";
        return Err(Error::new(ErrorKind::InvalidState, "share", message)
            .with_hint("an earlier error of the device gives the reason"));
    }
    Ok(())
}

impl SharedFile for MadeHere {
    fn handle(&self, bytes: u64) -> Result<MemoryHandle> {
        of_file(&self.file, bytes, *self.access.lock())
    }
}

impl PinnedOrigin {
    pub(crate) fn runtime(&self) -> &Runtime {
        match self {
            Self::Made(made) => &made.runtime,
            Self::Opened(opened) => &opened.runtime,
        }
    }

    pub(crate) fn access(&self) -> FileAccess {
        match self {
            Self::Made(made) => *made.access.lock(),
            Self::Opened(opened) => opened.access,
        }
    }

    /// Returns the process that made the memory, unless it is this one.
    pub(crate) fn owner(&self) -> Option<Owner> {
        match self {
            Self::Made(_) => None,
            Self::Opened(opened) => {
                let sharing = opened.runtime.inner.sharing.get()?;
                sharing.owner_of(&opened.import.owner()?)
            }
        }
    }

    /// Returns the ticket of the whole memory.
    pub(crate) fn share(&self, block: &Block, is_writable: bool) -> Result<Ticket> {
        const OPERATION: &str = "share";
        let inner = &self.runtime().inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        if block.uses.is_recording() {
            return Err(Error::new(
                ErrorKind::Capture,
                OPERATION,
                "an open capture uses the buffer: its recorded work is not executed, so no call can wait for it",
            )
            .with_hint("share it before the capture, or after it and a launch of its graph; the capture goes on"));
        }
        match self {
            Self::Made(made) => made.share(block, is_writable),
            Self::Opened(opened) if is_writable && opened.access != FileAccess::Writable => Err(Error::new(
                ErrorKind::InvalidState,
                OPERATION,
                "the exporter shared the buffer as read-only memory",
            )
            .with_hint("use `SharedPinnedBuffer::share`")),
            Self::Opened(opened) => {
                // The exporter cannot tell its other importers about the work.
                let (after, unmarked) = inner.pinned.files.outstanding(block, false);
                check_known(unmarked)?;
                after.iter().try_for_each(|completion| inner.is_passed(completion, true).map(drop))?;
                Ok(opened.import.ticket.clone())
            }
        }
    }
}

impl SharedPages for PinnedOrigin {
    fn release(&self, block: &Block) {
        let inner = &self.runtime().inner;
        if !inner.may_release() {
            return;
        }
        let files = &inner.pinned.files;
        files.remove_block(block);
        let (after, unmarked) = files.outstanding(block, false);
        match self {
            Self::Made(made) => {
                if let (Some(key), Some(sharing)) = (made.key.get(), inner.sharing.get()) {
                    sharing.close_pinned(*key);
                }
                // Not locked below: the backend is called there.
                let memory = made.memory.lock().take();
                if let Some(memory) = memory {
                    // SAFETY: The block has no owner any more, and no code but an owner has the memory. `after` has the completion
                    // events of all work on it, unless `unmarked`.
                    unsafe { files.release_after(memory, after, unmarked) };
                }
                if let Some(sharing) = inner.sharing.get().filter(|_| files.is_releasing()) {
                    sharing.ring();
                }
            }
            Self::Opened(opened) => {
                if let Some(sharing) = inner.sharing.get() {
                    sharing.release_after(Arc::clone(&opened.import), after, unmarked);
                }
            }
        }
    }
}

/// Opens a ticket of page-locked memory. Returns the block of the whole memory.
pub(crate) fn open(runtime: &Runtime, ticket: &Ticket, options: &ImportOptions) -> Result<(OwnedBlock, PinnedOrigin)> {
    const OPERATION: &str = "open_pinned";
    let inner = &runtime.inner;
    let files = &inner.pinned.files;
    let sharing = inner.sharing(OPERATION)?;
    check_heir(sharing, ticket, options)?;
    if sharing.is_own(ticket) {
        let Memory::Pinned(file) = sharing.original(ticket)? else {
            return Err(not_given_out("its allocation is device memory"));
        };
        let file: Arc<dyn Any + Send + Sync> = file;
        let made = file.downcast::<MadeHere>().map_err(|_| not_given_out("its file is not of this library"))?;
        let block = files.block_at(made.ptr).ok_or_else(|| {
            Error::new(ErrorKind::Expired, OPERATION, "this runtime has freed the buffer of this ticket")
                .with_hint("keep the buffer until its tickets have been opened")
        })?;
        return Ok((block, PinnedOrigin::Made(made)));
    }
    if ticket.device_uuid != [0; 16] {
        return Err(not_given_out("it names both page-locked memory and a device"));
    }
    // Of both steps together.
    let mut patience = None;
    let import = sharing.open(Wanted { ticket, device: PINNED }, &mut patience)?;
    hold(sharing, &import, options, &mut patience)
        .inspect_err(|_| sharing.release_after(Arc::clone(&import), Vec::new(), false))?;
    // Mapped while the import is open.
    let Some((ptr, borders, access)) = files.opened_at(import.ptr.get() as usize) else {
        sharing.release_after(import, Vec::new(), false);
        return Err(not_given_out("its memory is not mapped"));
    };
    let bytes = usize::try_from(ticket.allocation_bytes).unwrap_or(usize::MAX);
    let origin = PinnedOrigin::Opened(Arc::new(OpenedHere { runtime: runtime.clone(), import, access }));
    // Counts the open until the block has no owner. Another block counts one of its own, so a surplus one ends here.
    let block = Block::shared(ptr, bytes, borders, Box::new(origin.clone()));
    let block = files.add_block(&block).unwrap_or(block);
    Ok((block, origin))
}
