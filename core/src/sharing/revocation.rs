//! Memory that is revoked when its owner dies: the state of one block of it.
//!
//! | state | a use | the death of the owner | the end of the block |
//! | --- | --- | --- | --- |
//! | usable | is allowed | makes it revoked, and releases the memory after the uses so far | releases the memory |
//! | lent: other code has the address | is allowed | makes it revoked and lent | releases the memory |
//! | revoked | `Expired` | nothing | nothing: the memory is released |
//! | revoked and lent | `Expired` | nothing | releases the memory |
//!
//! The state changes under the lock of the block's list of uses. A call first enters its stream in that list. Later, it checks the
//! state under the submission lock of the stream. So a call that finds the memory usable is in the list. The release records its
//! completion event under the same submission lock, so the event comes after the work of the call.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use highwater_hal::{Error, ErrorKind, Result};

const REVOKED: u8 = 1;
const LENT: u8 = 2;

/// The state of a block that is revoked when its owner dies.
#[derive(Debug, Default)]
pub(crate) struct Revocation {
    /// The owner that has died. It may have been handed the memory after the open.
    owner: OnceLock<String>,
    state: AtomicU8,
}

impl Revocation {
    /// Refuses a use of memory that was revoked.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        // Relaxed: the caller's locks order the state.
        if self.state.load(Ordering::Relaxed) & REVOKED == 0 {
            return Ok(());
        }
        let owner = self.owner.get().map_or("a process", String::as_str);
        let message = format!("the owner of the buffer ({owner}) has died, and its memory was released");
        Err(Error::new(ErrorKind::Expired, operation, message).with_hint(
            "drop the buffer and request a new ticket; to keep the memory of a dead owner, open it with `OwnerDeath::Keep`",
        ))
    }

    /// Notes that other code has the address, unless the memory is revoked. The caller must hold the lock of the uses.
    pub(crate) fn lend(&self) {
        // Relaxed, and not one operation: the lock guards the state.
        if self.state.load(Ordering::Relaxed) & REVOKED == 0 {
            self.state.fetch_or(LENT, Ordering::Relaxed);
        }
    }

    /// Revokes the memory. Returns whether the caller releases it. The caller must hold the lock of the uses.
    pub(crate) fn revoke(&self, owner: String) -> bool {
        let _ = self.owner.set(owner);
        self.state.fetch_or(REVOKED, Ordering::Relaxed) == 0
    }

    /// Returns whether the end of the block has nothing to release. The block must have no owner.
    pub(super) fn is_released(&self) -> bool {
        self.state.load(Ordering::Relaxed) == REVOKED
    }
}
