//! The pattern of free memory, in the test mode that finds memory in use after its buffer was dropped.
//!
//! With the option `poison`, every free page and every free block of a thread cache has the pattern: it is written when memory
//! is added, and when the last use of a block is complete. A request checks it before the block has an owner again. So a write
//! after the free is found at the next reuse, and only then: memory that is not reused is not checked. A thread cache serves such
//! requests too, but on the slow path.
//!
//! The pattern cannot show a stream that still reads. So the pool also notes the completion event of every use, apart from the
//! record in the block, and a request queries those of its addresses.

use std::ops::Range;

use parking_lot::Mutex;

use super::completion_events::CompletionEvent;
use crate::primitive::{Arc, HostPtr};
use highwater_hal::{Error, ErrorKind};

/// No frequent value of a program: a negative float of large magnitude, and a negative integer.
pub(crate) const PATTERN: u8 = 0xf5;
/// The value of device memory that a request gets.
pub(crate) const LIVE: u8 = 0x5f;
const PATTERNS: [u8; 64] = [PATTERN; 64];

/// Writes the pattern.
///
/// # Safety
/// The memory must be writable, and no code and no device may use it.
pub(crate) unsafe fn fill(ptr: HostPtr, bytes: usize) {
    // SAFETY: As the caller promises.
    unsafe { ptr.as_ptr().write_bytes(PATTERN, bytes) };
}

/// The uses of blocks that may not be complete, whatever the blocks say.
#[derive(Debug, Default)]
pub(crate) struct Poison(Mutex<Vec<(Range<usize>, Arc<CompletionEvent>)>>);

fn addresses(ptr: HostPtr, bytes: usize) -> Range<usize> {
    ptr.address()..ptr.address() + bytes
}

fn misused(ptr: HostPtr, bytes: usize, how: &str) -> Error {
    let message = format!("the block of {bytes} bytes at {ptr} {how}");
    Error::new(ErrorKind::InvalidState, "pinned", message)
}

impl Poison {
    /// Notes a use of a block, up to a completion event.
    pub(crate) fn note(&self, ptr: HostPtr, bytes: usize, completion: &Arc<CompletionEvent>) {
        let (own, point) = (addresses(ptr, bytes), completion.point());
        let mut uses = self.0.lock();
        // Earlier uses by the stream are complete when this one is.
        uses.retain(|(range, earlier)| {
            *range != own || earlier.point().stream != point.stream || earlier.point().number > point.number
        });
        uses.push((own, Arc::clone(completion)));
    }

    /// Forgets every use, at the end of the runtime.
    pub(crate) fn clear(&self) {
        // The events return to their pools, not under the lock.
        let uses = std::mem::take(&mut *self.0.lock());
        drop(uses);
    }

    /// Checks a free block that is about to be reused. `is_passed` is called under no lock; without it, only the pattern is
    /// checked.
    pub(crate) fn check(
        &self,
        ptr: HostPtr,
        bytes: usize,
        is_passed: Option<impl Fn(&CompletionEvent) -> bool>,
    ) -> Result<(), Error> {
        if let Some(is_passed) = is_passed {
            let own = addresses(ptr, bytes);
            let overlap = |uses: &mut (Range<usize>, _)| uses.0.start < own.end && own.start < uses.0.end;
            let mut uses: Vec<_> = self.0.lock().extract_if(.., overlap).collect();
            uses.retain(|(_, completion)| !is_passed(completion));
            if let Some((_, completion)) = uses.first() {
                let how = format!("was to be reused before stream {} completed its use", completion.point().stream);
                self.0.lock().append(&mut uses);
                return Err(misused(ptr, bytes, &how).with_hint("this is a bug of the pool: please report it"));
            }
        }
        // SAFETY: The block is free and page-locked memory is readable. Code that writes it now breaks the rule checked here.
        let values = unsafe { std::slice::from_raw_parts(ptr.as_ptr().cast_const(), bytes) };
        let intact = values.chunks(PATTERNS.len()).position(|part| *part != PATTERNS[..part.len()]);
        let Some(part) = intact else { return Ok(()) };
        let offset = part * PATTERNS.len();
        let offset = offset + values[offset..].iter().position(|value| *value != PATTERN).unwrap_or(0);
        let how = format!("was written at offset {offset} after it was freed: {:#04x}", values[offset]);
        Err(misused(ptr, bytes, &how).with_hint("note each use of a buffer, and use no address of it after its end"))
    }
}
