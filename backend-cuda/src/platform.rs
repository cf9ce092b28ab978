//! CUDA as a [`Platform`].

use cudarc::driver::sys::{self, CUresult};
use highwater_driver::{
    Blas, BlasSettings, Calls, Codes, Lt, Platform, Quirks, RawBlas, RawStream, SharedBlock, Zeros,
};
use highwater_hal::{
    CopyShape, DevicePtr, Error, Location, MemoryCopy2d, MemoryHandle, MemoryRange, PhysicalMemoryOptions, Result,
    Transport,
};

use crate::calls::{CublasCalls, RawAllocation, RawContext, VirtualMemoryCalls};
use crate::codes;
use crate::driver::Driver;
use crate::foreign;
use crate::quirks::QUIRKS;

/// The driver, cuBLAS and cuBLASLt.
#[derive(Debug)]
pub(crate) struct Cuda {
    pub(crate) driver: &'static Driver,
    pub(crate) blas: Blas,
    pub(crate) cublas: CublasCalls,
    pub(crate) lt: Lt,
}

impl Cuda {
    fn virtual_memory(&self, operation: &'static str) -> Result<&VirtualMemoryCalls> {
        self.driver.virtual_memory.as_ref().ok_or_else(|| Error::lacks(operation, "ipc_transports"))
    }

    fn mapped_memory(&self, operation: &'static str) -> Result<&VirtualMemoryCalls> {
        self.driver.virtual_memory.as_ref().ok_or_else(|| Error::lacks(operation, "mapped_memory"))
    }

    fn number(&self, device: u32) -> i32 {
        self.driver.devices.get(device as usize).map_or(-1, |device| device.number)
    }

    /// Enqueues a copy of rows between devices. A stream's queue takes about 1,000 commands, and an enqueue waits while it is full.
    /// So a copy of each row would wait for the earlier work of the stream.
    ///
    /// # Safety
    /// The same as for [`Platform::memcpy_2d_async`].
    unsafe fn memcpy_rows_to_peer(
        &self,
        dst: (u32, DevicePtr),
        src: (u32, DevicePtr),
        shape: CopyShape,
        stream: RawStream,
    ) -> i32 {
        use sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE;
        let pointer = |context: RawContext| std::ptr::with_exposed_provenance_mut(context.0 as usize);
        let (to, from) = match (self.driver.context(dst.0), self.driver.context(src.0)) {
            (Ok(to), Ok(from)) => (to, from),
            (Err(code), _) | (_, Err(code)) => return code,
        };
        let rows = sys::CUDA_MEMCPY3D_PEER_st {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: src.1.get(),
            srcArray: std::ptr::null_mut(),
            srcContext: pointer(from),
            srcPitch: shape.src_pitch,
            srcHeight: shape.height,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: dst.1.get(),
            dstArray: std::ptr::null_mut(),
            dstContext: pointer(to),
            dstPitch: shape.dst_pitch,
            dstHeight: shape.height,
            WidthInBytes: shape.width,
            Height: shape.height,
            Depth: 1,
        };
        // SAFETY: The caller promises that all rows and the stream are valid. The driver reads the description during the call.
        unsafe { (self.driver.own.memcpy_3d_peer_async)(&rows, stream) }
    }
}

// SAFETY: The calls are those of NVIDIA's driver and of cuBLAS. They were looked up under their own symbols and are
// declared with their own arguments, which `abi_check.rs` checks. NVIDIA's manuals promise the order of streams, the
// results of queries and the effect of copies.
unsafe impl Platform for Cuda {
    /// The previous context is on the driver's stack of contexts.
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
        // SAFETY: The call writes one number, which outlives it. The current context is queried each time, because
        // foreign code may change it.
        let code = unsafe { (self.driver.own.ctx_get_current)(&mut current) };
        if code == 0 && current == context { Ok(None) } else { self.driver.enter(code, context) }
    }

    #[inline(always)]
    fn restore(&self, (): ()) {
        let mut popped = RawContext::NULL;
        // SAFETY: The call writes one number, which outlives it. It pops the context that `make_current` pushed.
        unsafe { (self.driver.own.ctx_pop_current)(&mut popped) };
    }

    fn enable_peer_access(&self, device: u32, peer: u32) -> Result<(), i32> {
        let own = &self.driver.own;
        let mut reaches = 0;
        // SAFETY: The call writes one number, which outlives it.
        match unsafe { (own.device_can_access_peer)(&mut reaches, self.number(device), self.number(peer)) } {
            0 if reaches != 0 => {}
            0 => return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED as i32),
            code => return Err(code),
        }
        // SAFETY: The context is the peer's primary one, which is never released.
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
            // SAFETY: The caller promises that both ranges and the stream are valid.
            (Ok(to), Ok(from)) => unsafe { (self.driver.own.memcpy_peer_async)(dst.1, to, src.1, from, bytes, stream) },
            (Err(code), _) | (_, Err(code)) => code,
        }
    }

    unsafe fn memcpy_2d_async(&self, copy: &MemoryCopy2d, stream: RawStream) -> i32 {
        use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        if let (Location::Device { device: to, ptr: dst }, Location::Device { device: from, ptr: src }) =
            (copy.dst, copy.src)
            && to != from
        {
            // SAFETY: As the caller promises.
            return unsafe { self.memcpy_rows_to_peer((to, dst), (from, src), copy.shape, stream) };
        }
        let side = |side| match side {
            Location::Host(host) => (CU_MEMORYTYPE_HOST, host.as_ptr(), 0),
            Location::Device { ptr, .. } => (CU_MEMORYTYPE_DEVICE, std::ptr::null_mut(), ptr.get()),
        };
        let (src, dst, shape) = (side(copy.src), side(copy.dst), copy.shape);
        let rows = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: src.0,
            srcHost: src.1.cast(),
            srcDevice: src.2,
            srcArray: std::ptr::null_mut(),
            srcPitch: shape.src_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: dst.0,
            dstHost: dst.1.cast(),
            dstDevice: dst.2,
            dstArray: std::ptr::null_mut(),
            dstPitch: shape.dst_pitch,
            WidthInBytes: shape.width,
            Height: shape.height,
        };
        // SAFETY: The caller promises that all rows and the stream are valid. The driver reads the description during the call.
        unsafe { (self.driver.own.memcpy_2d_async)(&rows, stream) }
    }

    unsafe fn stream_is_of(&self, stream: RawStream, device: u32) -> Result<bool, i32> {
        let mut context = RawContext::NULL;
        // SAFETY: The caller promises that the stream is alive. The call writes one number, which outlives it.
        match unsafe { (self.driver.own.stream_get_ctx)(stream, &mut context) } {
            0 => Ok(self.driver.existing_context(device)? == Some(context)),
            code => Err(code),
        }
    }

    fn allocate_shared(&self, device: u32, transport: Transport, bytes: usize) -> Result<SharedBlock> {
        self.virtual_memory("allocate")?.allocate(self.number(device), transport, bytes)
    }

    unsafe fn free_shared(&self, operation: &'static str, block: &SharedBlock) -> Result<()> {
        // SAFETY: As the caller promises.
        unsafe { self.virtual_memory(operation)?.free(operation, block) }
    }

    fn export_shared(&self, block: &SharedBlock, transport: Transport, handle: MemoryHandle) -> Result<MemoryHandle> {
        self.virtual_memory("export_memory")?.export(block, transport, handle)
    }

    fn open_shared(&self, device: u32, handle: &MemoryHandle) -> Result<SharedBlock> {
        self.virtual_memory("open_memory")?.open(self.number(device), handle)
    }

    fn reserve_addresses(&self, _: u32, bytes: usize) -> Result<DevicePtr> {
        self.mapped_memory("reserve_addresses")?.reserve(bytes)
    }

    unsafe fn free_addresses(&self, ptr: DevicePtr, bytes: usize) -> Result<()> {
        const OPERATION: &str = "free_addresses";
        // SAFETY: As the caller promises, here and below.
        codes::CUDA.check(OPERATION, unsafe { (self.mapped_memory(OPERATION)?.mem_address_free)(ptr, bytes) })
    }

    fn create_memory(&self, device: u32, options: &PhysicalMemoryOptions) -> Result<u64> {
        Ok(self.mapped_memory("create_memory")?.create(self.number(device), options)?.0)
    }

    unsafe fn release_memory(&self, allocation: u64) -> Result<()> {
        const OPERATION: &str = "destroy_memory";
        // SAFETY: As above.
        codes::CUDA.check(OPERATION, unsafe { (self.mapped_memory(OPERATION)?.mem_release)(RawAllocation(allocation)) })
    }

    unsafe fn map_memory(&self, ptr: DevicePtr, bytes: usize, allocation: u64) -> Result<()> {
        const OPERATION: &str = "map_memory";
        let map = self.mapped_memory(OPERATION)?.mem_map;
        // SAFETY: As above.
        codes::CUDA.check(OPERATION, unsafe { map(ptr, bytes, 0, RawAllocation(allocation), 0) })
    }

    unsafe fn set_memory_access(&self, ptr: DevicePtr, bytes: usize, accessing: u32) -> Result<()> {
        // SAFETY: As above.
        unsafe { self.mapped_memory("set_memory_access")?.grant(ptr, bytes, self.number(accessing)) }
    }

    unsafe fn unmap_memory(&self, ptr: DevicePtr, bytes: usize) -> Result<()> {
        const OPERATION: &str = "unmap_memory";
        // SAFETY: As above.
        codes::CUDA.check(OPERATION, unsafe { (self.mapped_memory(OPERATION)?.mem_unmap)(ptr, bytes) })
    }

    fn refuse_memory_of_others(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        match self.driver.existing_context(device) {
            Ok(None) => foreign::refuse_memory_of_others(self, self.number(device), ptr),
            // Else the description says it.
            _ => Ok(()),
        }
    }

    fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        foreign::describe(self, self.number(device), ptr)
    }

    unsafe fn export_foreign(
        &self,
        ptr: DevicePtr,
        transport: Transport,
        handle: MemoryHandle,
    ) -> Result<MemoryHandle> {
        foreign::export(self, ptr, transport, handle)
    }

    fn import_memory(&self, _: u32, handle: &MemoryHandle) -> Result<u64> {
        const OPERATION: &str = "import_memory";
        Ok(self.mapped_memory(OPERATION)?.import(OPERATION, handle)?.0)
    }

    fn blas_settings(&self, handle: RawBlas) -> BlasSettings {
        // SAFETY: The handle was just created.
        unsafe { self.cublas.settings_of(handle) }
    }

    fn restore_blas(&self, handle: RawBlas, fresh: &BlasSettings) -> Result<(), i32> {
        // SAFETY: The handle is alive.
        unsafe { self.cublas.restore(handle, fresh) }
    }

    #[inline(always)]
    fn lt(&self) -> Option<&Lt> {
        Some(&self.lt)
    }

    fn zeros(&self, device: u32) -> Option<&Zeros> {
        Some(&self.driver.devices.get(device as usize)?.zeros)
    }
}
