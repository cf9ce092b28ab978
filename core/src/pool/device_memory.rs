//! Device memory from the backend: allocation with a retry, and the free of blocks that the ledger knows.

use std::sync::Arc;

use super::active_trims::ActiveTrims;
use super::device_pool::DevicePool;
use crate::capture::thread::in_capture;
use crate::ledger::DeviceBlockInfo;
use crate::services::{DeviceState, Services};
use highwater_hal::{DevicePtr, Error, ErrorKind, Result};

pub(crate) struct DeviceMemory {
    pub(crate) services: Arc<Services>,
    /// Threads that free device memory. They may wait for streams.
    pub(crate) active_trims: ActiveTrims,
    /// The memories of the streams of each device.
    pub(crate) pools: Box<[Arc<DevicePool>]>,
}

impl DeviceMemory {
    pub(crate) fn new(services: Arc<Services>, is_mapped: bool) -> Arc<Self> {
        let pool = |device: &DeviceState| DevicePool::new(&services, device.info.ordinal, is_mapped);
        let pools = services.devices.iter().map(pool).collect();
        let memory = Arc::new(Self { services, active_trims: ActiveTrims::default(), pools });
        memory.pools.iter().for_each(|pool| pool.beside(&memory));
        memory
    }

    /// Returns the memories of a device's streams.
    pub(crate) fn pool(&self, device: u32) -> &Arc<DevicePool> {
        &self.pools[device as usize]
    }

    /// Refuses a request for more memory than the device has beyond live buffers. Waiting for every stream and freeing the rest
    /// could not satisfy it.
    pub(crate) fn check_reach(&self, device: u32, bytes: usize, refused: &Error) -> Result<()> {
        let total = self.services.device(device).info.memory_bytes;
        let owned = self.services.ledger.owned_bytes(device) + self.pool(device).live_bytes();
        if bytes as u64 <= total.saturating_sub(owned) {
            return Ok(());
        }
        let message =
            format!("{bytes} bytes were requested; device {device} has {total}, of which live buffers hold {owned}");
        let error = Error::new(ErrorKind::OutOfMemory, refused.operation(), message)
            .with_hint("request less, or drop buffers first: waiting for streams cannot free enough memory");
        Err(match refused.code() {
            Some(code) => error.with_code(code),
            None => error,
        })
    }

    /// Runs `make`. If the device has no memory left, frees unused memory and retries once. `within` refuses requests for which
    /// that cannot help.
    pub(crate) fn with_retry<T>(
        &self,
        make: impl Fn() -> Result<T>,
        within: impl Fn(&Error) -> Result<()>,
    ) -> Result<T> {
        let owner = self.services.owner();
        if let Some(owner) = &owner {
            owner.trim_in_passing();
        }
        match make() {
            // In a capture, nothing is freed.
            Err(error) if error.kind() == ErrorKind::OutOfMemory && !in_capture() => {
                within(&error)?;
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
        let base = self.with_retry(make, |refused| self.check_reach(device, bytes, refused))?;
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
