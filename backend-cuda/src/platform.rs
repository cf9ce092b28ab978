//! CUDA as the driver room sees it.

use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use highwater_driver::{
    Blas, BlasSettings, Calls, Codes, DriverState, Platform, Quirks, RawBlas, RawStream, SharedBlock,
};
use highwater_hal::{BlasHandle, DevicePtr, Error, MemoryHandle, Result, Transport};

use crate::calls::{CublasCalls, RawContext, VirtualMemoryCalls};
use crate::codes;
use crate::driver::Driver;
use crate::lt::{LtBlas, LtCalls};
use crate::quirks::QUIRKS;

/// The driver, cuBLAS and cuBLASLt.
#[derive(Debug)]
pub(crate) struct Cuda {
    pub(crate) driver: &'static Driver,
    pub(crate) blas: Blas,
    pub(crate) cublas: CublasCalls,
    pub(crate) lt: LtCalls,
}

impl Cuda {
    fn virtual_memory(&self, operation: &'static str) -> Result<&VirtualMemoryCalls> {
        self.driver.virtual_memory.as_ref().ok_or_else(|| Error::lacks(operation, "ipc_transports"))
    }

    fn number(&self, device: u32) -> i32 {
        self.driver.devices.get(device as usize).map_or(-1, |device| device.number)
    }
}

// SAFETY: the calls are those of NVIDIA's driver and of cuBLAS, looked up under their own symbols and declared with their own
// arguments (`abi_check.rs` holds them against another declaration); NVIDIA's manuals promise the order of streams, what
// queries answer and what copies move.
unsafe impl Platform for Cuda {
    /// The context is pushed and popped.
    type Previous = ();

    fn calls(&self) -> &Calls {
        &self.driver.calls
    }

    fn codes(&self) -> &'static Codes {
        &codes::CUDA
    }

    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn blas(&self) -> &Blas {
        &self.blas
    }

    fn device_in_use(&self) -> u32 {
        self.driver.first_with_context()
    }

    #[inline(always)]
    fn make_current(&self, device: u32) -> Result<Option<()>, i32> {
        let context = self.driver.context(device)?;
        let mut current = RawContext::NULL;
        // SAFETY: the call writes one number that lives until it returns. What is current is asked each time, because other
        // code of the thread may change it.
        let code = unsafe { (self.driver.own.ctx_get_current)(&mut current) };
        if code == 0 && current == context { Ok(None) } else { self.driver.enter(code, context) }
    }

    #[inline(always)]
    fn restore(&self, (): ()) {
        let mut popped = RawContext::NULL;
        // SAFETY: the call writes one number that lives until it returns. It pops what `make_current` pushed.
        unsafe { (self.driver.own.ctx_pop_current)(&mut popped) };
    }

    fn enable_peer_access(&self, device: u32, peer: u32) -> Result<(), i32> {
        let own = &self.driver.own;
        let mut reaches = 0;
        // SAFETY: the call writes one number that lives until it returns.
        match unsafe { (own.device_can_access_peer)(&mut reaches, self.number(device), self.number(peer)) } {
            0 if reaches != 0 => {}
            0 => return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED as i32),
            code => return Err(code),
        }
        // SAFETY: the context is the peer's primary one, retained for good.
        match unsafe { (own.ctx_enable_peer_access)(self.driver.context(peer)?, 0) } {
            0 => Ok(()),
            code if code == CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as i32 => Ok(()),
            code => Err(code),
        }
    }

    unsafe fn memcpy_peer_async(
        &self,
        dst: (u32, DevicePtr),
        src: (u32, DevicePtr),
        bytes: usize,
        stream: RawStream,
    ) -> i32 {
        match (self.driver.context(dst.0), self.driver.context(src.0)) {
            // SAFETY: the caller vouches for both ranges and the stream.
            (Ok(to), Ok(from)) => unsafe { (self.driver.own.memcpy_peer_async)(dst.1, to, src.1, from, bytes, stream) },
            (Err(code), _) | (_, Err(code)) => code,
        }
    }

    unsafe fn stream_is_of(&self, stream: RawStream, device: u32) -> Result<bool, i32> {
        let mut context = RawContext::NULL;
        // SAFETY: the caller vouches for the stream; the call writes one number that lives until it returns.
        match unsafe { (self.driver.own.stream_get_ctx)(stream, &mut context) } {
            0 => Ok(context == self.driver.context(device)?),
            code => Err(code),
        }
    }

    fn allocate_shared(&self, device: u32, transport: Transport, bytes: usize) -> Result<SharedBlock> {
        self.virtual_memory("allocate")?.allocate(self.number(device), transport, bytes)
    }

    unsafe fn free_shared(&self, operation: &'static str, block: &SharedBlock) -> Result<()> {
        // SAFETY: passed on from the caller.
        unsafe { self.virtual_memory(operation)?.free(operation, block) }
    }

    fn export_shared(&self, block: &SharedBlock, transport: Transport, handle: MemoryHandle) -> Result<MemoryHandle> {
        self.virtual_memory("export_memory")?.export(block, transport, handle)
    }

    fn open_shared(&self, device: u32, handle: &MemoryHandle) -> Result<SharedBlock> {
        self.virtual_memory("open_memory")?.open(self.number(device), handle)
    }

    fn blas_settings(&self, handle: RawBlas) -> BlasSettings {
        // SAFETY: the handle was just made.
        unsafe { self.cublas.settings_of(handle) }
    }

    fn restore_blas(&self, handle: RawBlas, fresh: &BlasSettings) -> Result<(), i32> {
        // SAFETY: the handle is alive.
        unsafe { self.cublas.restore(handle, fresh) }
    }

    fn create_lt(state: &Arc<DriverState<Self>>, device: u32) -> Result<Box<dyn BlasHandle>> {
        Ok(Box::new(LtBlas::create(state, device)?))
    }
}
