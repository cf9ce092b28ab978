//! Repeats the releases that a fault of the sweep refused. A guard repeats its own release; a case that calls the backend
//! directly cannot.

use std::ptr::NonNull;

use highwater_hal::{AnyId, Backend as _, DevicePtr, HostPtr};

use super::Validated;
use super::ranges::{Holding, Space};

impl Validated<'_> {
    /// Repeats the releases that an injected fault refused. If one fails, its object shows as a leak.
    pub(crate) fn release_refused(&self) {
        let (ids, memory) = self.books.ledger().refused();
        if ids.is_empty() && memory.is_empty() {
            return;
        }
        for device in 0..self.inner.device_count() {
            if self.inner.synchronize_device(device).is_err() {
                // The device may still use the memory.
                return;
            }
        }
        for (space, start, holding) in memory {
            self.release(space, start, holding);
        }
        for id in ids {
            let _ = match id {
                AnyId::Stream(id) => self.destroy_stream(id),
                AnyId::Event(id) => self.destroy_event(id),
                AnyId::Memory(id) => self.destroy_memory(id),
                AnyId::Graph(id) => self.destroy_graph(id),
                AnyId::Executable(id) => self.destroy_graph_exec(id),
            };
        }
    }

    fn release(&self, space: Space, start: u64, holding: Holding) {
        let (device, ptr) = match space {
            Space::Device(device) | Space::Reserved(device) => (device, DevicePtr::new(start)),
            Space::Host => {
                let Some(ptr) = NonNull::new(start as *mut u8).map(HostPtr::new) else { return };
                let allocator = self.host_allocator();
                // SAFETY: the allocator gave out or registered the range, and the one call that gave it back never reached
                // it; the case has ended, and every device has been waited for.
                let _ = unsafe {
                    if holding == Holding::HostRegistered { allocator.unregister(ptr) } else { allocator.free(ptr) }
                };
                return;
            }
        };
        if let Holding::Addresses { bytes } = holding {
            // SAFETY: as above, for what `reserve_addresses` gave.
            let _ = unsafe { self.free_addresses(device, ptr, bytes as usize) };
            return;
        }
        if let Holding::Mapped { .. } = holding {
            let Some(sharing) = self.ipc_sharing() else { return };
            // SAFETY: as above, for what `open_memory` gave.
            let _ = unsafe { sharing.close_memory(device, ptr) };
            return;
        }
        let stream = match holding {
            Holding::StreamOrdered(stream) => Some(stream),
            _ => None,
        };
        // SAFETY: as above, for what `allocate` gave.
        let _ = unsafe { self.free(device, ptr, stream) };
    }
}
