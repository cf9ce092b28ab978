//! The trait `IpcSharing`, handed through.

use std::sync::Arc;

use highwater_hal::{DevicePtr, EventHandle, EventId, IpcSharing, MemoryHandle, Result, Transport};

use super::book::{Holding, on};
use super::ledger::AnyId;
use super::{Watch, origin};

#[derive(Debug)]
pub(super) struct WatchedSharing {
    inner: Arc<dyn IpcSharing>,
    watch: Arc<Watch>,
}

impl WatchedSharing {
    pub(super) fn new(inner: Arc<dyn IpcSharing>, watch: &Arc<Watch>) -> Self {
        Self { inner, watch: Arc::clone(watch) }
    }

    /// Why this memory should not be exported, if so.
    fn not_exportable(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Option<String> {
        let ledger = self.watch.ledger();
        let (space, start) = on(device, ptr);
        match ledger.book.get(space, start) {
            Some(range) if range.holding == Holding::Shareable(transport) => None,
            Some(range) => Some(format!("a {} is not shareable by {transport:?}", range.made.of(range.holding.name()))),
            None => Some(format!("no block that is alive begins at {start:#x} of device {device}")),
        }
    }
}

impl IpcSharing for WatchedSharing {
    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        const OPERATION: &str = "export_memory";
        self.watch.enter(OPERATION)?;
        let misuse = self.not_exportable(device, ptr, transport);
        // SAFETY: handed on as it came.
        let answer = unsafe { self.inner.export_memory(device, ptr, transport) };
        self.watch.judge_use(OPERATION, misuse, &answer);
        if answer.is_ok() {
            self.watch.ledger().exported();
        }
        answer
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        const OPERATION: &str = "open_memory";
        let at = origin::take();
        self.watch.enter(OPERATION)?;
        let ptr = self.inner.open_memory(device, handle)?;
        self.watch.given(OPERATION, on(device, ptr), handle.bytes, Holding::Mapped { opens: 1 }, at);
        Ok(ptr)
    }

    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        let misuse = |holding| {
            let mapped = matches!(holding, Holding::Mapped { .. });
            (!mapped).then(|| "memory was closed that was not opened".into())
        };
        // SAFETY: handed on as it came.
        let call = || unsafe { self.inner.close_memory(device, ptr) };
        self.watch.releasing("close_memory", on(device, ptr), misuse, call)
    }

    fn export_event(&self, event: EventId) -> Result<EventHandle> {
        let call = || self.inner.export_event(event);
        let answer = self.watch.with_ids("export_event", &[AnyId::Event(event)], call);
        if answer.is_ok() {
            self.watch.ledger().exported();
        }
        answer
    }

    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId> {
        const OPERATION: &str = "open_event";
        let at = origin::take();
        self.watch.enter(OPERATION)?;
        let id = self.inner.open_event(device, handle)?;
        self.watch.issued(OPERATION, AnyId::Event(id), device, at, false);
        Ok(id)
    }
}
