//! The handle of page-locked memory, from its exporter to an importer: a file, and who may write it.

use std::os::fd::{AsFd, OwnedFd};

use super::system::{invalid_message, os_error};
use super::ticket::not_given_out;
use crate::pool::file_access::FileAccess;
use crate::pool::host_files::HostFiles;
use crate::services::Services;
use highwater_hal::{Descriptor, DevicePtr, Error, MemoryHandle, Result, Transport};

/// In place of a device's ordinal: an import of page-locked memory.
pub(super) const PINNED: u32 = u32::MAX;

/// The first bytes of a handle of page-locked memory. The next byte is the access.
const MAGIC: [u8; 4] = *b"HWPL";

fn code_of(access: FileAccess) -> u8 {
    match access {
        FileAccess::Private => 0,
        FileAccess::ReadOnly => 1,
        FileAccess::ReadOnlyByAgreement => 2,
        FileAccess::Writable => 3,
    }
}

fn access_of(code: u8) -> Option<FileAccess> {
    let shared = [FileAccess::ReadOnly, FileAccess::ReadOnlyByAgreement, FileAccess::Writable];
    shared.into_iter().find(|access| code_of(*access) == code)
}

/// Returns whether every device can register memory that the CPU may only read.
pub(super) fn registers_read_only(services: &Services) -> bool {
    services.devices.iter().all(|device| device.capabilities.host_register_read_only)
}

/// Returns the handle of a file for an importer.
pub(super) fn of_file(file: &OwnedFd, bytes: u64, access: FileAccess) -> Result<MemoryHandle> {
    let file = rustix::io::fcntl_dupfd_cloexec(file, 0)
        .map_err(|errno| os_error("share", "descriptor for page-locked memory", errno))?;
    let mut payload = [0; 64];
    payload[..4].copy_from_slice(&MAGIC);
    payload[4] = code_of(access);
    Ok(MemoryHandle::new(Transport::Descriptor, [0; 16], bytes, payload).with_descriptor(Descriptor::new(file)))
}

/// Maps and registers the file of another process.
pub(super) fn map(services: &Services, files: &HostFiles, handle: &MemoryHandle) -> Result<DevicePtr> {
    const OPERATION: &str = "open_pinned";
    let known = handle.payload.starts_with(&MAGIC).then_some(handle.payload[4]).and_then(access_of);
    let (Some(access), Some(file)) = (known, &handle.descriptor) else {
        return Err(invalid_message(OPERATION, "memory that is not page-locked memory, as the ticket names"));
    };
    let read_only = access == FileAccess::ReadOnly;
    if read_only && !registers_read_only(services) {
        return Err(Error::lacks(OPERATION, "host_register_read_only"));
    }
    let bytes = usize::try_from(handle.bytes).map_err(|_| not_given_out("its memory exceeds the address space"))?;
    let memory = files.map(OPERATION, file.as_ref().as_fd(), bytes, read_only)?;
    let ptr = files.add_opened(memory, access);
    Ok(DevicePtr::new(ptr.address() as u64))
}
