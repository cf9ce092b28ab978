//! Device memory from the backend: allocation with a retry, and the free of blocks that the ledger knows.

use std::sync::Arc;

use super::active_trims::ActiveTrims;
use super::device_options::DeviceMemoryOptions;
use super::device_pool::{DeviceMemoryStatistics, DevicePool};
use crate::capture::thread::in_capture;
use crate::ledger::{DeviceBlockInfo, Held};
use crate::services::{DeviceState, Services};
use highwater_hal::{DevicePtr, Error, ErrorKind, Result, counted};

pub(crate) struct DeviceMemory {
    pub(crate) services: Arc<Services>,
    /// Threads that free device memory. They may wait for streams.
    pub(crate) active_trims: ActiveTrims,
    /// The memories of the streams of each device.
    pub(crate) pools: Box<[Arc<DevicePool>]>,
}

impl DeviceMemory {
    pub(crate) fn new(services: Arc<Services>, options: &DeviceMemoryOptions) -> Arc<Self> {
        let pool = |device: &DeviceState| DevicePool::new(&services, device.info.ordinal, options);
        let pools = services.devices.iter().map(pool).collect();
        let memory = Arc::new(Self { services, active_trims: ActiveTrims::default(), pools });
        memory.pools.iter().for_each(|pool| pool.beside(&memory));
        memory
    }

    /// Returns the memories of a device's streams.
    pub(crate) fn pool(&self, device: u32) -> &Arc<DevicePool> {
        &self.pools[device as usize]
    }

    /// Returns the counts of the streams' memories, over all devices.
    pub(crate) fn statistics(&self) -> DeviceMemoryStatistics {
        let mut sum = DeviceMemoryStatistics::default();
        self.pools.iter().for_each(|pool| sum.add(&pool.statistics()));
        sum
    }

    /// Returns whether the device has so many bytes beyond live buffers. If not, waiting for every stream and freeing the rest could
    /// not satisfy a request.
    fn is_within_reach(&self, device: u32, bytes: usize) -> bool {
        let total = self.services.device(device).info.memory_bytes;
        let owned = self.services.ledger.held_bytes(device).buffers + self.pool(device).live_bytes();
        bytes as u64 <= total.saturating_sub(owned)
    }

    /// Returns the error of a request that the memory of the device cannot satisfy, with what the runtime holds.
    fn exhausted(&self, device: u32, bytes: usize, refused: &Error) -> Error {
        let hint = if self.is_within_reach(device, bytes) {
            "drop buffers, end other programs that use the device, or set smaller workspaces \
             (`RuntimeOptions::with_lt_workspace_bytes`, `with_blas_workspace_bytes`)"
        } else {
            "request less, or drop buffers first: waiting for streams cannot free enough memory"
        };
        let total = self.services.device(device).info.memory_bytes;
        let Held { buffers, others } = self.services.ledger.held_bytes(device);
        let pool = self.pool(device);
        let (held, live) = (pool.held_bytes(), pool.live_bytes());
        let message = format!(
            "the request is for {} of device {device}, which has {total}. This runtime holds {buffers} in buffers of \
             `Device::allocate`, {held} in the memories of streams ({live} of them in buffers), {others} in workspaces and dropped \
             buffers. The backend's reason: {}",
            counted(bytes, "byte"),
            refused.message()
        );
        let error = Error::new(ErrorKind::OutOfMemory, refused.operation(), message).with_hint(hint);
        match refused.code() {
            Some(code) => error.with_code(code),
            None => error,
        }
    }

    /// As [`DeviceMemory::with_retry`], for a request of so many bytes. The error names what the runtime holds.
    pub(crate) fn with_retry_for<T>(&self, device: u32, bytes: usize, make: impl Fn() -> Result<T>) -> Result<T> {
        self.with_retry(make, || self.is_within_reach(device, bytes)).map_err(|refused| match refused.kind() {
            ErrorKind::OutOfMemory => self.exhausted(device, bytes, &refused),
            _ => refused,
        })
    }

    /// Runs `make`. If the device has no memory left, frees unused memory and retries once, unless `can_help` says that this
    /// cannot help.
    pub(crate) fn with_retry<T>(&self, make: impl Fn() -> Result<T>, can_help: impl Fn() -> bool) -> Result<T> {
        let owner = self.services.owner();
        if let Some(owner) = &owner {
            owner.trim_in_passing();
        }
        match make() {
            // In a capture, nothing is freed.
            Err(error) if error.kind() == ErrorKind::OutOfMemory && !in_capture() && can_help() => {
                let round = self.active_trims.begin();
                if let Some(owner) = &owner {
                    owner.trim_device_memory();
                }
                drop(round);
                // Memory that other threads were freeing in the meantime is free now.
                self.active_trims.wait();
                make()
            }
            result => result,
        }
    }

    /// Allocates with `make`. If no memory is left, frees unused memory and retries once. The caller must add the block to the
    /// ledger.
    pub(crate) fn allocate(
        &self,
        device: u32,
        bytes: usize,
        make: impl Fn() -> Result<DevicePtr>,
    ) -> Result<DeviceBlockInfo> {
        let base = self.with_retry_for(device, bytes, make)?;
        Ok(DeviceBlockInfo { device, base, bytes })
    }

    /// Frees device memory.
    ///
    /// # Safety
    /// As [`Backend::free`](highwater_hal::Backend::free), except that `ptr` may be any address. An address that is not the
    /// start of a live block is refused.
    pub(crate) unsafe fn free(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        let block = self.services.ledger.remove_device(device, ptr)?;
        // SAFETY: The ledger shows that `ptr` came from `allocate` for this device and was not freed. The caller promises that
        // no work that uses it is outstanding.
        unsafe { self.services.backend.free(device, ptr, None) }.inspect_err(|_| {
            // The block counts as still allocated. The range is free in the ledger, so this cannot fail.
            let _ = self.services.ledger.insert_device(block);
        })
    }
}

#[cfg(test)]
impl DeviceMemory {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        let pools: Vec<_> = self.pools.iter().map(|pool| pool.hold_locks()).collect();
        crate::testing::Held((self.active_trims.hold_lock(), pools))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.active_trims.is_locked() || self.pools.iter().any(|pool| pool.is_locked())
    }
}
