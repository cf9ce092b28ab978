//! The end of a runtime: the order in which its pools end.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::inner::RuntimeInner;
use crate::capture::thread::{in_capture, nothing_is_executed};
use crate::capture_gate::CaptureGate;
use crate::pool::blas_handles::PooledHandle;
use crate::services::{DeviceState, twice};
use highwater_hal::{Error, ErrorKind, Result, counted};

/// Leaves handles to the end of the process.
fn leave(handles: Vec<PooledHandle>) {
    handles.into_iter().for_each(std::mem::forget);
}

impl RuntimeInner {
    /// Returns the error of a close while `others` objects of the runtime are alive.
    pub(super) fn in_use(&self, operation: &'static str, others: u64) -> Error {
        let others = match others {
            1 => "1 other object of the runtime is alive".to_owned(),
            others => format!("{others} other objects of the runtime are alive"),
        };
        let live = self.backend.live_objects();
        Error::new(ErrorKind::InvalidState, operation, format!("{others}; with the pools, the backend counts {live}"))
            .with_hint("drop its devices, streams, events, buffers and clones first")
    }

    /// Returns the error of a close while other processes have buffers of the runtime open.
    pub(super) fn open_elsewhere(&self, operation: &'static str) -> Option<Error> {
        let sharing = self.sharing.get()?;
        let (blocks, bytes) = sharing.limbo();
        let message = || {
            let holders = sharing.holders_of_limbo();
            let (buffers, bytes) = (counted(blocks, "buffer"), counted(bytes, "byte"));
            format!("other processes ({holders}) have {buffers} of this runtime open, {bytes}")
        };
        (blocks > 0).then(|| {
            Error::new(ErrorKind::InvalidState, operation, message())
                .with_hint("first let those processes drop the buffers, or end")
        })
    }

    /// Waits for the devices and frees everything that the runtime holds. The caller must hold the last reference to it.
    pub(super) fn give_everything_back(&mut self) -> Result<()> {
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        // Its waits hold events.
        self.notifier.end(true);
        // The next steps would invalidate captures of other runtimes on the same devices.
        let gates = self.devices.iter().map(|device| &device.capture_gate);
        let quiet = if in_capture() { self.quiet() } else { Some(CaptureGate::wait_until_quiet(gates)) };
        let Some(_quiet) = quiet else {
            // The thread of the capture is ending, so no later call can end the runtime.
            crate::warnings::warning!("a runtime ended inside a capture; its memory and objects stay allocated");
            leave(self.handles.take_all());
            return Err(nothing_is_executed("close"));
        };
        // The last user of the runtime has ended the service. If the service itself was the last user, it does nothing more.
        if let Some(sharing) = self.sharing.get() {
            sharing.hang_up();
        }
        // A refusal here is retried below.
        let _ = self.destroy_dropped();
        let mut result = Ok(());
        for mut pooled in self.handles.take_all() {
            result = result.and(self.note(pooled.handle.destroy()));
        }
        let wait = |device: &DeviceState| {
            // Twice: all memory depends on it, and the second attempt costs nothing.
            let first = self.backend.synchronize_device(device.info.ordinal);
            first.or_else(|_| self.note(self.backend.synchronize_device(device.info.ordinal)))
        };
        if let Err(error) = self.devices.iter().try_for_each(wait) {
            // Work may be outstanding on a device that cannot be waited for. Its memory is not freed.
            crate::warnings::warning!("a device could not be waited for; memory is left allocated");
            return Err(error);
        }
        // From here on no work is outstanding: every block can be freed, and every event is passed.
        if let Some(sharing) = self.sharing.get().map(Arc::clone) {
            sharing.end_imports();
            sharing.trim();
            let (blocks, bytes) = sharing.limbo();
            if blocks > 0 {
                let holders = sharing.holders_of_limbo();
                crate::warnings::warning!(
                    "processes {holders} have {} ({}) open: this memory stays allocated",
                    counted(blocks, "buffer"),
                    counted(bytes, "byte")
                );
            }
        }
        result = result.and(twice(self.frees.take_all(), |free| {
            // SAFETY: The devices have executed everything, and the owner of the block is gone.
            self.note(unsafe { self.frees.free(free) })
        }));
        for pool in &self.frees.memory.pools {
            // SAFETY: The devices have executed everything, and no buffer is left.
            result = result.and(unsafe { pool.free_all() });
        }
        // SAFETY: The devices have executed everything. Every buffer keeps the runtime alive, so no buffer is left.
        result = result.and(unsafe { self.pinned.free_all() });
        result = result.and(twice(self.workspaces.take_all(), |(device, workspace)| {
            // SAFETY: The devices have executed everything, and the handles bound to it are destroyed.
            self.note(unsafe { self.frees.memory.free(*device, workspace.ptr) })
        }));
        // A refusal here is retried like the rest.
        let _ = self.destroy_idle_events();
        result.and(self.insist_on_refused())
    }
}

impl Drop for RuntimeInner {
    fn drop(&mut self) {
        if self.may_release() {
            // Refusals have been counted and logged; a destructor cannot report them.
            let _ = self.give_everything_back();
        } else if self.generation.is_current() {
            if let Some(sharing) = self.sharing.get() {
                sharing.abandon();
            }
            self.notifier.end(false);
            // The process is exiting. The driver may be gone before the handles, so they are left on purpose.
            leave(self.handles.take_all());
        }
    }
}
