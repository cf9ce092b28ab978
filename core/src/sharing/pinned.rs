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

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::exporter::{Memory, WeakMemory};
use super::system::{invalid_message, os_error};
use super::ticket::not_given_out;
use super::{ExportKey, Import, Ticket};
use crate::capture::thread::refuse_in_capture;
use crate::pool::block::{Block, MOST_PAGES, OwnedBlock, SharedPages};
use crate::pool::host_files::HostFiles;
use crate::pool::host_memory::{FileMemory, seal};
use crate::pool::pinned::PinnedPool;
use crate::runtime::Runtime;
use crate::services::Services;
use highwater_hal::{Descriptor, DevicePtr, Error, ErrorKind, HostPtr, MemoryHandle, Result, Transport};

/// In place of a device's ordinal: an import of page-locked memory.
pub(super) const PINNED: u32 = u32::MAX;

/// The first bytes of a handle of page-locked memory. The next byte is the access.
const MAGIC: [u8; 4] = *b"HWPL";

/// Who may write the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// The buffer that the memory was made for.
    Private,
    /// Nobody. Importers cannot map it for writing.
    ReadOnly,
    /// Nobody. Importers map it for writing, because their devices may need that.
    ReadOnlyByAgreement,
    /// Every process, by the promise of the exporter.
    Writable,
}

impl Access {
    /// The byte of a handle.
    fn code(self) -> u8 {
        match self {
            Self::Private => 0,
            Self::ReadOnly => 1,
            Self::ReadOnlyByAgreement => 2,
            Self::Writable => 3,
        }
    }

    fn of(code: u8) -> Option<Self> {
        [Self::ReadOnly, Self::ReadOnlyByAgreement, Self::Writable].into_iter().find(|access| access.code() == code)
    }
}

/// Page-locked memory of this runtime that other processes can open.
pub(crate) struct MadeHere {
    runtime: Runtime,
    file: OwnedFd,
    ptr: HostPtr,
    bytes: usize,
    /// Taken when the memory is released.
    memory: Mutex<Option<FileMemory>>,
    access: Mutex<Access>,
    /// The key of the allocation in the exporter, set by the first share.
    key: OnceLock<ExportKey>,
}

/// Page-locked memory of another process.
pub(crate) struct OpenedHere {
    runtime: Runtime,
    import: Arc<Import>,
    access: Access,
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

/// Returns whether every device can register memory that the CPU may only read.
fn registers_read_only(services: &Services) -> bool {
    services.devices.iter().all(|device| device.capabilities.host_register_read_only)
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
            access: Mutex::new(Access::Private),
            key: OnceLock::new(),
        });
        let origin = PinnedOrigin::Made(made);
        let block = Block::shared(ptr, bytes, borders, Box::new(origin.clone()));
        // The address is new, so it has no other block.
        inner.pinned.files.add_block(&block);
        Ok((block, origin))
    }

    /// Returns the handle for an importer.
    pub(super) fn handle(&self, bytes: u64) -> Result<MemoryHandle> {
        let file = rustix::io::fcntl_dupfd_cloexec(&self.file, 0)
            .map_err(|errno| os_error("share", "descriptor for page-locked memory", errno))?;
        let mut payload = [0; 64];
        payload[..4].copy_from_slice(&MAGIC);
        payload[4] = self.access.lock().code();
        Ok(MemoryHandle::new(Transport::Descriptor, [0; 16], bytes, payload).with_descriptor(Descriptor::new(file)))
    }

    /// Decides who may write from now on, unless an earlier share did. The first share seals the file.
    fn decide(&self, is_writable: bool) -> Result<()> {
        let mut access = self.access.lock();
        match (*access, is_writable) {
            (Access::Private, _) => {
                let read_only = !is_writable && registers_read_only(&self.runtime.inner);
                seal(self.file.as_fd(), read_only)
                    .map_err(|errno| os_error("share", "seals of page-locked memory", errno))?;
                *access = match (is_writable, read_only) {
                    (true, _) => Access::Writable,
                    (false, true) => Access::ReadOnly,
                    (false, false) => Access::ReadOnlyByAgreement,
                };
                Ok(())
            }
            (Access::ReadOnly | Access::ReadOnlyByAgreement, true) => {
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
        let memory = WeakMemory::Pinned(Arc::downgrade(self));
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

impl PinnedOrigin {
    pub(crate) fn runtime(&self) -> &Runtime {
        match self {
            Self::Made(made) => &made.runtime,
            Self::Opened(opened) => &opened.runtime,
        }
    }

    pub(crate) fn access(&self) -> Access {
        match self {
            Self::Made(made) => *made.access.lock(),
            Self::Opened(opened) => opened.access,
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
            Self::Opened(opened) if is_writable && opened.access != Access::Writable => Err(Error::new(
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
                if let Some(memory) = made.memory.lock().take() {
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

/// Maps and registers the file of another process.
pub(super) fn map(services: &Services, files: &HostFiles, handle: &MemoryHandle) -> Result<DevicePtr> {
    const OPERATION: &str = "open_pinned";
    let known = handle.payload.starts_with(&MAGIC).then_some(handle.payload[4]).and_then(Access::of);
    let (Some(access), Some(file)) = (known, &handle.descriptor) else {
        return Err(invalid_message(OPERATION, "memory that is not page-locked memory, as the ticket names"));
    };
    let read_only = access == Access::ReadOnly;
    if read_only && !registers_read_only(services) {
        return Err(Error::lacks(OPERATION, "host_register_read_only"));
    }
    let bytes = usize::try_from(handle.bytes).map_err(|_| not_given_out("its memory exceeds the address space"))?;
    let pool = files.pool(OPERATION)?;
    if !pool.registers() {
        return Err(Error::lacks(OPERATION, "host_register"));
    }
    let memory = pool.map_file(file.as_ref().as_fd(), bytes, read_only)?;
    let ptr = files.add_opened(memory, access);
    Ok(DevicePtr::new(ptr.address() as u64))
}

/// Opens a ticket of page-locked memory. Returns the block of the whole memory.
pub(crate) fn open(runtime: &Runtime, ticket: &Ticket) -> Result<(OwnedBlock, PinnedOrigin)> {
    const OPERATION: &str = "open_pinned";
    let inner = &runtime.inner;
    let files = &inner.pinned.files;
    let sharing = inner.sharing(OPERATION)?;
    if sharing.is_own(ticket) {
        let Memory::Pinned(made) = sharing.original(ticket)? else {
            return Err(not_given_out("its allocation is device memory"));
        };
        let block = files.block_at(made.ptr).ok_or_else(|| {
            Error::new(ErrorKind::Expired, OPERATION, "this runtime has freed the buffer of this ticket")
                .with_hint("keep the buffer until its tickets have been opened")
        })?;
        return Ok((block, PinnedOrigin::Made(made)));
    }
    if ticket.device_uuid != [0; 16] {
        return Err(not_given_out("it names both page-locked memory and a device"));
    }
    let import = sharing.open(ticket, PINNED)?;
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
