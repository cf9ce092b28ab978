//! Replacement of streams that die with a lost capture.
//!
//! The contract says that a stream works as before after its capture was lost, and keeps its id. On some vendors, the
//! stream on which a lost capture began stays unusable, and the streams that joined go on recording into a deleted graph.
//! The destruction of the first stream frees the others. After a lost capture on such a vendor, a new stream takes the id of
//! the first stream, which is destroyed. The vendor's call waits for the earlier work of that stream. `end_capture` returns
//! after the call, so later work still comes after earlier work. BLAS handles notice the new vendor handle and bind again.

use super::platform::Platform;
use super::raw::RawStream;
use super::state::{DriverState, FOREIGN, HIGH, LOW};
use highwater_hal::{Error, ErrorKind, Result, StreamId, StreamPriority};

impl<P: Platform> DriverState<P> {
    /// Creates a stream of the vendor.
    pub(super) fn make_stream(
        &self,
        operation: &'static str,
        device: u32,
        priority: StreamPriority,
    ) -> Result<RawStream> {
        let (calls, flags) = (self.platform.calls(), self.platform.quirks().stream_flags);
        let _relaxed = self.relaxed();
        let _current = self.make_current(operation, device)?;
        let (mut least, mut greatest, mut raw) = (0, 0, RawStream::NULL);
        // SAFETY: The call writes two numbers, which outlive it.
        self.check(operation, unsafe { (calls.get_stream_priority_range)(&mut least, &mut greatest) })?;
        let priority = match priority {
            StreamPriority::Low => least,
            StreamPriority::Normal => 0,
            StreamPriority::High => greatest,
        };
        // SAFETY: As above.
        self.check(operation, unsafe { (calls.stream_create_with_priority)(&mut raw, flags, priority) })?;
        self.made(operation, raw)
    }

    /// Returns whether a capture that ended with `code` killed the stream on which it began.
    #[inline]
    pub(super) fn has_died(&self, code: i32) -> bool {
        self.platform.quirks().streams_die_after.contains(&code)
    }

    /// Puts a new stream under the id of one that died with its capture. The caller must not hold the stream.
    #[cold]
    pub(super) fn replace_dead(&self, operation: &'static str, stream: StreamId) -> Result<()> {
        let flags = self.stream(operation, stream)?.flags();
        if flags & FOREIGN != 0 {
            let message = format!("the {stream} died with its capture, and foreign code owns it");
            return Err(Error::new(ErrorKind::InvalidState, operation, message).with_hint(
                "destroy the id, then replace the stream in the code that created it; destroying it frees the streams that joined",
            ));
        }
        let priority = match (flags & LOW != 0, flags & HIGH != 0) {
            (true, _) => StreamPriority::Low,
            (_, true) => StreamPriority::High,
            _ => StreamPriority::Normal,
        };
        let outcome = self.make_stream(operation, stream.device(), priority).and_then(|raw| {
            let destroy = |dead: &_| self.destroy_raw_stream(operation, dead);
            self.streams.replace(operation, stream, raw, destroy).inspect_err(|_| {
                // SAFETY: No other code knows the stream.
                unsafe { (self.platform.calls().stream_destroy)(raw) };
            })
        });
        outcome.map_err(|error| {
            let message = format!("the {stream} died with its capture and could not be replaced: {}", error.message());
            Error::new(ErrorKind::InvalidState, operation, message)
                .with_code(error.code().unwrap_or(0))
                .with_hint("destroy the stream before you use the streams that joined, then create another")
        })
    }
}
