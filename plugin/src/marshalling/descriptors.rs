//! File descriptors, and their release.

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::Arc;

use super::super::link::Link;
use super::Wrong;
use highwater_hal::{Descriptor, ErrorKind};

pub(super) fn raw_descriptor(descriptor: Option<&Descriptor>) -> i32 {
    descriptor.map_or(-1, |descriptor| descriptor.as_ref().as_raw_fd())
}

/// Returns the plugin's own copy of a descriptor that the program keeps.
pub(super) fn lift_descriptor(raw: i32) -> Result<Option<Descriptor>, Wrong> {
    if raw < 0 {
        return Ok(None);
    }
    // SAFETY: the program keeps the descriptor open until the call returns.
    let theirs = unsafe { BorrowedFd::borrow_raw(raw) };
    match theirs.try_clone_to_owned() {
        Ok(copy) => Ok(Some(Descriptor::new(copy))),
        Err(error) => {
            Err(Wrong { kind: ErrorKind::OperatingSystem, what: format!("descriptor {raw} cannot be copied: {error}") })
        }
    }
}

/// Returns a descriptor for the program to keep, and the token with which the program reports that it has closed it. The
/// plugin's copy lives until then, because the backend counts it.
pub(super) fn give_descriptor(descriptor: Option<Descriptor>) -> Result<(i32, u64), String> {
    let Some(descriptor) = descriptor else { return Ok((-1, 0)) };
    let copy = descriptor.as_ref().try_clone().map_err(|error| format!("a descriptor cannot be copied: {error}"))?;
    let token = Box::into_raw(Box::new(descriptor)).expose_provenance() as u64;
    Ok((std::os::fd::IntoRawFd::into_raw_fd(copy), token))
}

/// Drops the plugin's copy of a descriptor.
///
/// # Safety
/// The token must come from [`give_descriptor`], and must be passed once.
pub(in super::super) unsafe fn drop_descriptor(token: u64) {
    let descriptor = std::ptr::with_exposed_provenance_mut::<Descriptor>(token as usize);
    // SAFETY: the token is the address of a box, and the caller passes it once.
    drop(unsafe { Box::from_raw(descriptor) });
}

/// Returns the program's descriptor from an answer.
pub(super) fn take_descriptor(descriptor: i32, token: u64, link: &Arc<Link>) -> Result<Option<Descriptor>, String> {
    match descriptor {
        -1 => Ok(None),
        0.. => {
            // SAFETY: the call only checks whether the descriptor is open.
            if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0 {
                return Err(format!("{descriptor} for a descriptor, which is not open"));
            }
            // SAFETY: it is open, and the program owns a descriptor in an answer.
            let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
            Ok(Some(match link.release_of(token) {
                Some(release) => Descriptor::with_companion(descriptor, release),
                None => Descriptor::new(descriptor),
            }))
        }
        _ => Err(format!("{descriptor} for a descriptor; expected is one, or -1")),
    }
}
