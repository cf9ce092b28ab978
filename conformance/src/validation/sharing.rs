//! The layer over an `IpcSharing`.

use std::sync::Arc;

use highwater_hal::{
    Answer, Call, DevicePtr, EventHandle, EventId, IpcSharing, MemoryHandle, PhysicalMemoryId, Result, SharingLayer,
    Transport,
};

use super::ranges::{Holding, on};
use super::{Books, origin};

#[derive(Debug)]
pub(super) struct ValidatedSharing {
    pub(super) inner: Arc<dyn IpcSharing>,
    pub(super) books: Arc<Books>,
}

impl ValidatedSharing {
    /// Returns why the backend must refuse to export this memory, if so.
    fn not_exportable(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Option<String> {
        let ledger = self.books.ledger();
        let (space, start) = on(device, ptr);
        match ledger.ranges.get(space, start) {
            Some(range) if range.holding == Holding::Shareable(transport) => None,
            Some(range) if range.holding == (Holding::Piece { shareable: Some(transport) }) => None,
            Some(range) => Some(format!("a {} is not shareable by {transport:?}", range.made.of(range.holding.name()))),
            None => Some(format!("no block that is alive begins at {start:#x} of device {device}")),
        }
    }
}

impl SharingLayer for ValidatedSharing {
    fn below(&self) -> &dyn IpcSharing {
        &*self.inner
    }

    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn IpcSharing) -> Result<T>) -> Result<T> {
        self.books.call(call, || forward(&*self.inner))
    }

    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        const OPERATION: &str = "export_memory";
        self.books.enter(OPERATION)?;
        let misuse = self.not_exportable(device, ptr, transport);
        // SAFETY: handed on as it came.
        let answer = self.books.calling(OPERATION, || unsafe { self.inner.export_memory(device, ptr, transport) });
        self.books.judge_use(OPERATION, misuse, &answer);
        if answer.is_ok() {
            self.books.ledger().exported();
        }
        answer
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        const OPERATION: &str = "open_memory";
        let at = origin::take();
        self.books.enter(OPERATION)?;
        let ptr = self.books.calling(OPERATION, || self.inner.open_memory(device, handle))?;
        self.books.given(OPERATION, on(device, ptr), handle.bytes, Holding::Mapped { opens: 1 }, at);
        Ok(ptr)
    }

    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        let misuse = |holding| {
            let mapped = matches!(holding, Holding::Mapped { .. });
            (!mapped).then(|| "memory was closed that was not opened".into())
        };
        // SAFETY: handed on as it came.
        let call = || unsafe { self.inner.close_memory(device, ptr) };
        self.books.releasing("close_memory", on(device, ptr), misuse, call)
    }

    fn import_memory(&self, device: u32, handle: &MemoryHandle) -> Result<PhysicalMemoryId> {
        let call = Call::new("import_memory", &[&device]);
        let memory = self.books.call(&call, || self.inner.import_memory(device, handle))?;
        self.books.ledger().memory.insert(memory, (handle.bytes, None));
        Ok(memory)
    }

    fn export_event(&self, event: EventId) -> Result<EventHandle> {
        let call = Call::new("export_event", &[&event]);
        let answer = self.books.call(&call, || self.inner.export_event(event))?;
        self.books.ledger().exported();
        Ok(answer)
    }
}
