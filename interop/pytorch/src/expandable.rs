//! Expandable segments: memory of PyTorch that is mapped page after page.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..4 | the sender's process |
//! | 4..8 | unused, of any value |
//! | 8..16 | bytes of a page |
//! | 16..24 | the number of pages |
//! | 24.. | a descriptor of the sender's process for each page, 4 bytes each |
//!
//! PyTorch sends no descriptor. The receiver copies each descriptor from the sender's process, and needs the permission to trace
//! that process. The offset of a storage counts from the first of these pages. Storages in the same pages have the same handle,
//! and share a mapping here.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use highwater_core::{Backend, Descriptor, Device, DevicePtr, Error, ErrorKind, IpcSharing, MemoryHandle, Result};

const OPERATION: &str = "open";
const HEADER_BYTES: usize = 24;
/// Maximum number of pages of one handle, far more than a device has.
const MOST_PAGES: usize = 1 << 20;

/// The pages of a segment that a handle names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Pages {
    process: i32,
    page_bytes: usize,
    descriptors: Vec<i32>,
}

impl Pages {
    /// Reads the payload of a handle.
    pub(crate) fn read(operation: &'static str, payload: &[u8]) -> Result<Self> {
        let refused = |message: String| {
            Err(Error::new(ErrorKind::InvalidArgument, operation, message)
                .with_hint("pass the second field of `_share_cuda_` as it is"))
        };
        let (Some(header), Some(rest)) = (payload.first_chunk::<HEADER_BYTES>(), payload.get(HEADER_BYTES..)) else {
            let found = payload.len();
            return refused(format!("the handle of pages has {found} bytes, expected {HEADER_BYTES} or more"));
        };
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
        let process = number(0) as u32 as i32;
        let (page_bytes, count) = (number(8), number(16));
        let count_fits = (1..=MOST_PAGES as u64).contains(&count);
        let total = page_bytes.checked_mul(count).filter(|total| *total > 0 && *total <= isize::MAX as u64);
        if process <= 0 || !count_fits || total.is_none() {
            return refused(format!("the handle names {count} pages of {page_bytes} bytes of process {process}"));
        }
        if rest.len() as u64 == count * 64 {
            let message = "the pages of the storage travel by handles of the fabric";
            return Err(Error::new(ErrorKind::Unsupported, operation, message)
                .with_hint("in the sender, set `expandable_segments:False` for this allocation"));
        }
        if rest.len() as u64 != count * 4 {
            return refused(format!("{} bytes of descriptors for {count} pages, expected {}", rest.len(), count * 4));
        }
        let descriptors = rest.chunks_exact(4).map(|it| i32::from_le_bytes([it[0], it[1], it[2], it[3]])).collect();
        Ok(Self { process, page_bytes: page_bytes as usize, descriptors })
    }

    fn total(&self) -> usize {
        self.page_bytes * self.descriptors.len()
    }
}

/// Pages that are mapped without a gap. The drop unmaps them.
pub(crate) struct Segment {
    backend: Arc<dyn Backend>,
    device: u32,
    base: DevicePtr,
    /// Bytes that are reserved.
    total: usize,
    /// Bytes that are mapped, from the start on.
    mapped: usize,
}

type Key = (usize, u32, Pages);

/// The segments that are mapped, by the address of the backend, the device and the pages.
static SEGMENTS: Mutex<Option<HashMap<Key, Weak<Segment>>>> = Mutex::new(None);

impl Segment {
    /// Returns the mapping of the pages.
    pub(crate) fn of(device: &Device, ipc: &dyn IpcSharing, pages: Pages) -> Result<Arc<Self>> {
        let backend = device.runtime().backend();
        let key = (Arc::as_ptr(backend).addr(), device.ordinal(), pages);
        let known = SEGMENTS.lock().as_ref().and_then(|segments| segments.get(&key)?.upgrade());
        if let Some(segment) = known {
            return Ok(segment);
        }
        let segment = Arc::new(Self::map(device, ipc, &key.2)?);
        let mut segments = SEGMENTS.lock();
        let segments = segments.get_or_insert_default();
        segments.retain(|_, segment| segment.strong_count() > 0);
        // Another thread may have mapped the same pages meanwhile. Both mappings are good.
        segments.insert(key, Arc::downgrade(&segment));
        Ok(segment)
    }

    fn map(device: &Device, ipc: &dyn IpcSharing, pages: &Pages) -> Result<Self> {
        let (backend, ordinal, uuid) = (Arc::clone(device.runtime().backend()), device.ordinal(), device.info().uuid);
        let process = open_process(pages.process)?;
        let base = backend.reserve_addresses(ordinal, pages.total())?;
        let mut segment = Self { backend, device: ordinal, base, total: pages.total(), mapped: 0 };
        for descriptor in &pages.descriptors {
            let copy = pidfd_getfd(&process, *descriptor, PidfdGetfdFlags::empty());
            let copy = copy.map_err(|errno| not_copied(pages.process, *descriptor, errno))?;
            let handle = MemoryHandle::of_other_code(uuid, pages.page_bytes as u64, Descriptor::new(copy));
            let memory = ipc.import_memory(ordinal, &handle)?;
            let at = base.offset(segment.mapped);
            // SAFETY: The addresses belong to this segment, and no other code knows the memory.
            let mapped = unsafe { segment.backend.map_memory(ordinal, at, memory) };
            // Mapped memory stays accessible.
            segment.backend.destroy_memory(memory).and(mapped)?;
            segment.mapped += pages.page_bytes;
        }
        // SAFETY: The addresses belong to this segment.
        unsafe { segment.backend.set_memory_access(ordinal, base, segment.total, ordinal)? };
        Ok(segment)
    }

    pub(crate) fn base(&self) -> DevicePtr {
        self.base
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: Each buffer keeps the segment until its last use has ended, and no other code knows the addresses.
        let freed = unsafe {
            let unmapped = match self.mapped {
                0 => Ok(()),
                mapped => self.backend.unmap_memory(self.device, self.base, mapped),
            };
            unmapped.and_then(|()| self.backend.free_addresses(self.device, self.base, self.total))
        };
        if let Err(error) = freed {
            tracing::warn!("pages of PyTorch stay mapped: {error}");
        }
    }
}

fn open_process(process: i32) -> Result<std::os::fd::OwnedFd> {
    let pid = Pid::from_raw(process).ok_or(rustix::io::Errno::SRCH);
    pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty())).map_err(|errno| {
        if errno == rustix::io::Errno::SRCH {
            return Error::new(ErrorKind::Expired, OPERATION, format!("the sender, process {process}, has ended"))
                .with_hint("the sender must live until the storage is opened, in the same PID namespace");
        }
        let message = format!("the operating system cannot open process {process}: {errno}");
        Error::new(ErrorKind::OperatingSystem, OPERATION, message)
            .with_code(i64::from(errno.raw_os_error()))
            .with_hint("raise the limit on descriptors (ulimit -n)")
    })
}

#[cold]
fn not_copied(process: i32, descriptor: i32, errno: rustix::io::Errno) -> Error {
    use rustix::io::Errno;
    let of = |kind, what: &str, hint: &str| {
        Error::new(kind, OPERATION, format!("descriptor {descriptor} of process {process} {what}: {errno}"))
            .with_code(i64::from(errno.raw_os_error()))
            .with_hint(hint)
    };
    match errno {
        Errno::PERM => of(
            ErrorKind::PermissionDenied,
            "cannot be copied without the permission to trace it",
            "let the sender call prctl(PR_SET_PTRACER), or set `expandable_segments:False` in the sender for this allocation",
        ),
        Errno::BADF => of(ErrorKind::Expired, "is closed", "keep the tensor in the sender until it is opened"),
        Errno::SRCH => of(ErrorKind::Expired, "is gone", "the sender must live until the storage is opened"),
        Errno::NOSYS => of(
            ErrorKind::Unsupported,
            "cannot be copied by this kernel, expected Linux 5.6 or later",
            "set `expandable_segments:False` in the sender for this allocation",
        ),
        _ => of(ErrorKind::OperatingSystem, "cannot be copied", "raise the limit on descriptors (ulimit -n)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(process: i32, page: u64, count: u64, rest: &[u8]) -> Vec<u8> {
        [&process.to_le_bytes()[..], &[0xAA; 4], &page.to_le_bytes(), &count.to_le_bytes(), rest].concat()
    }

    #[test]
    fn pages_are_read_as_pytorch_writes_them_and_nothing_else_is() {
        let rest = [7_i32.to_le_bytes(), 300_i32.to_le_bytes()].concat();
        let pages = Pages::read("open", &payload(12, 2 << 20, 2, &rest)).unwrap();
        assert_eq!(pages, Pages { process: 12, page_bytes: 2 << 20, descriptors: vec![7, 300] });
        let kind = |payload: &[u8]| Pages::read("open", payload).unwrap_err().kind();
        for wrong in [
            payload(0, 2 << 20, 2, &rest),
            payload(-1, 2 << 20, 2, &rest),
            payload(12, 0, 2, &rest),
            payload(12, 2 << 20, 0, &[]),
            payload(12, 2 << 20, 3, &rest),
            payload(12, 2 << 20, 1, &rest),
            payload(12, u64::MAX, 2, &rest),
            payload(12, 1 << 62, 2, &rest),
            payload(12, 2 << 20, u64::MAX, &rest),
            payload(12, 2 << 20, 2, &rest)[..23].to_vec(),
            Vec::new(),
        ] {
            assert_eq!(kind(&wrong), ErrorKind::InvalidArgument, "{wrong:?}");
        }
        assert_eq!(kind(&payload(12, 2 << 20, 2, &[0; 128])), ErrorKind::Unsupported);
    }
}
