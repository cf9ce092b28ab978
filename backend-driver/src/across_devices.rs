//! Waits of streams for interprocess events of another device.
//!
//! `cuStreamWaitEvent` ends the process by a segmentation fault for such a wait (seen on two H200s, driver 580.159.04, 2026-11-28, with each
//! kind of stream). So a stream of the event's device waits for the event and records a plain event, for which the stream of the other device
//! waits. Foreign code may have made its events for other processes, so they get the same wait. Each wait uses a stream of its own. On a shared
//! stream, a later wait would also wait for earlier ones.

use super::objects::Held;
use super::platform::Platform;
use super::state::{DriverState, HeldStream};
use highwater_hal::{EventId, Result, StreamPriority};

impl<P: Platform> DriverState<P> {
    /// Makes a stream of one device wait for an event of another one, through a stream of the event's device.
    #[cold]
    pub(super) fn wait_across_devices(
        &self,
        operation: &'static str,
        (stream, device): (&HeldStream<'_>, u32),
        (event, home): (&Held<'_, EventId>, u32),
    ) -> Result<()> {
        let calls = self.platform.calls();
        let between = self.make_stream(operation, home, StreamPriority::Normal)?;
        let waited = (|| {
            let (point, behind) = {
                let _relaxed = self.relaxed();
                let _current = self.make_current(operation, home)?;
                let point = self.make_plain_event(operation)?;
                // SAFETY: The event is held. The stream between and the point were just made.
                let code = unsafe {
                    match (calls.stream_wait_event)(between, event.raw(), 0) {
                        0 => (calls.event_record)(point, between),
                        code => code,
                    }
                };
                (point, code)
            };
            let waited = self.check(operation, behind).and_then(|()| {
                let _current = self.current_for(operation, stream, device)?;
                // SAFETY: The stream is held, and the point is alive.
                self.check(operation, unsafe { (calls.stream_wait_event)(stream.raw(), point, 0) })
            });
            // The driver frees both only after their work.
            self.destroy_plain_event(point);
            waited
        })();
        waited.and(self.destroy_stream_now(operation, between))
    }
}
