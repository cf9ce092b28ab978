//! The trait [`Platform`], which a vendor crate implements, and the vendor's behavior as data.

use std::fmt;
use std::sync::Arc;

use super::calls::{BlasCalls, Calls};
use super::captures::Captures;
use super::codes::Codes;
use super::lt_calls::Lt;
use super::raw::{RawBlas, RawStream};
use super::zeros::Zeros;
use highwater_hal::{
    Capabilities, DataType, DeviceInfo, DevicePtr, Error, Identity, MathMode, MemoryCopy2d, MemoryHandle, MemoryRange,
    PhysicalMemoryOptions, Result, Transport, Transpose,
};

/// The largest pitch of a row that both vendors take on each device: `CU_DEVICE_ATTRIBUTE_MAX_PITCH`,
/// `hipDeviceAttributeMaxPitch`.
pub const MAX_PITCH: usize = i32::MAX as usize;

/// Flags of events.
#[derive(Debug, Clone, Copy)]
pub struct EventFlags {
    /// Of an event without timing.
    pub plain: u32,
    /// Of an event with timing.
    pub timing: u32,
    /// Of an event that other processes can open.
    pub interprocess: u32,
}

/// Flags of page-locked memory.
#[derive(Debug, Clone, Copy)]
pub struct HostFlags {
    /// Of memory that the CPU caches.
    pub default: u32,
    /// Of write-combined memory.
    pub write_combined: u32,
}

/// Numbers of the operations on a factor, which both vendors name `OP_N` and `OP_T`.
#[derive(Debug, Clone, Copy)]
pub struct TransposeCodes {
    /// The factor as it is stored.
    pub no: i32,
    /// The transposed factor.
    pub yes: i32,
}

/// Numbers of the element types, which both vendors name `R_16F`, `R_16BF`, `R_32F` and `R_64F`.
#[derive(Debug, Clone, Copy)]
pub struct TypeCodes {
    /// IEEE half precision.
    pub f16: i32,
    /// Brain floating point.
    pub bf16: i32,
    /// Single precision.
    pub f32: i32,
    /// Double precision.
    pub f64: i32,
}

/// Numbers of the compute types, which both vendors name `COMPUTE_32F`, `COMPUTE_32F_FAST_TF32` and `COMPUTE_64F`.
#[derive(Debug, Clone, Copy)]
pub struct ComputeCodes {
    /// Single precision.
    pub f32: i32,
    /// Single precision with factors rounded to TF32.
    pub tf32: i32,
    /// Double precision.
    pub f64: i32,
}

/// Numbers of the math modes of a BLAS handle.
#[derive(Debug, Clone, Copy)]
pub struct MathModes {
    /// Full precision. A new handle gets this mode unless it is 0.
    pub full: u32,
    /// TF32.
    pub tf32: u32,
}

/// Numbers of the atomics modes of a BLAS handle.
#[derive(Debug, Clone, Copy)]
pub struct AtomicsModes {
    /// Kernels give the same result in each run.
    pub not_allowed: u32,
    /// Kernels may add with atomics.
    pub allowed: u32,
}

/// A vendor's behavior as data. Each field is named for the behavior.
#[derive(Debug, Clone, Copy)]
pub struct Quirks {
    /// The handle of the legacy default stream.
    pub legacy_stream: RawStream,
    /// The handle of the per-thread default stream.
    pub per_thread_stream: RawStream,
    /// The code of a query that found unfinished work.
    pub not_ready: i32,
    /// The code of exhausted memory.
    pub out_of_memory: i32,
    /// The code of an elapsed time that does not exist, because an event has no timing or was never recorded.
    pub no_elapsed_time: i32,
    /// Flags of each stream.
    pub stream_flags: u32,
    /// Flags of events.
    pub event_flags: EventFlags,
    /// Flags of page-locked memory.
    pub host_flags: HostFlags,
    /// Flags of registered memory.
    pub register_flags: u32,
    /// The further flag of registered memory that the CPU may only read.
    pub register_read_only_flag: u32,
    /// The flag for opening memory of another process.
    pub ipc_open_flag: u32,
    /// The remedy, if the vendor may refuse a right handle of another process as an invalid argument.
    pub ipc_open_hint: Option<&'static str>,
    /// The pool attribute for the bytes that an idle pool keeps.
    pub pool_release_threshold: u32,
    /// Numbers of the operations on a factor.
    pub transpose_codes: TransposeCodes,
    /// Numbers of the element types.
    pub type_codes: TypeCodes,
    /// Numbers of the compute types.
    pub compute_codes: ComputeCodes,
    /// The number of the default algorithm.
    pub default_algorithm: i32,
    /// The handle's math modes; `None` if the compute type of each product selects the precision instead.
    pub math_modes: Option<MathModes>,
    /// Numbers of the atomics modes.
    pub atomics_modes: AtomicsModes,
    /// Whether a new handle allows atomics.
    pub atomics_allowed_at_first: bool,
    /// Whether binding a stream restores the handle's own workspace.
    pub set_stream_resets_workspace: bool,
    /// The codes of `end_capture` after which the stream on which the capture began stays unusable. The destruction of that
    /// stream frees the streams that joined. Empty if streams survive a lost capture.
    pub streams_die_after: &'static [i32],
    /// Whether queries of an event, and waits for it, read the stream of its last record. They fail after that stream is
    /// destroyed and while it takes part in a capture. The vendor must then wait for a stream's work when it destroys the
    /// stream.
    pub events_follow_streams: bool,
    /// Whether one call copies rows between devices, and one call rows over several mappings of a device. Otherwise, each row is a copy
    /// of its own.
    pub rows_anywhere: bool,
}

impl Quirks {
    /// Returns the number of an element type.
    #[must_use]
    pub const fn type_code(&self, data_type: DataType) -> i32 {
        match data_type {
            DataType::F16 => self.type_codes.f16,
            DataType::Bf16 => self.type_codes.bf16,
            DataType::F32 => self.type_codes.f32,
            DataType::F64 => self.type_codes.f64,
            // No device has a capability for a type that this crate does not know.
            _ => -1,
        }
    }

    /// Returns the compute type for factors of type `factor`. The result's type does not matter, because halves
    /// accumulate in 32 bits.
    pub(super) const fn compute_code(&self, factor: DataType, mode: MathMode) -> i32 {
        match (factor, mode) {
            (DataType::F64, _) => self.compute_codes.f64,
            (DataType::F32, MathMode::Tf32) if self.math_modes.is_none() => self.compute_codes.tf32,
            _ => self.compute_codes.f32,
        }
    }

    /// Returns the number of the operation on a factor.
    #[must_use]
    pub const fn transpose_code(&self, transpose: Transpose) -> i32 {
        match transpose {
            Transpose::No => self.transpose_codes.no,
            Transpose::Yes => self.transpose_codes.yes,
        }
    }
}

/// A vendor's BLAS.
#[derive(Debug, Clone, Copy)]
pub struct Blas {
    /// Its calls.
    pub calls: BlasCalls,
    /// The meaning of its codes.
    pub codes: &'static Codes,
}

/// The settings that a platform reads from a new BLAS handle. A setting that the library lacks is `None`.
pub type BlasSettings = [Option<i32>; 6];

/// Memory that other processes can open by a descriptor or over a fabric.
#[derive(Debug)]
pub struct SharedBlock {
    /// The mapped address.
    pub address: DevicePtr,
    /// The vendor's handle of the allocation.
    pub allocation: u64,
    /// The mapped bytes: the requested bytes, rounded up.
    pub bytes: usize,
}

/// A vendor: its table of calls, the meaning of its codes, its behavior as data, and its own operations.
///
/// # Safety
/// [`DriverBackend`](crate::DriverBackend) frees and reuses memory by the results of these calls. The implementation
/// must ensure that:
/// - the calls are the vendor's own, and take the arguments that the tables declare;
/// - streams, events and copies keep the order that the vendor's manual promises.
pub unsafe trait Platform: Send + Sync + fmt::Debug + Sized + 'static {
    /// The state that [`Platform::restore`] needs to make the previous device current again.
    type Previous: Copy + fmt::Debug;

    /// Returns the calls of the driver.
    fn calls(&self) -> &Calls;

    /// Returns the meaning of the driver's codes.
    fn codes(&self) -> &'static Codes;

    /// Returns the vendor's behavior.
    fn quirks(&self) -> &'static Quirks;

    /// Returns the BLAS.
    fn blas(&self) -> &Blas;

    /// Returns a device that is already in use, or 0 if none is. Calls that need any device use this one, because a
    /// context takes memory of its device.
    fn device_in_use(&self) -> u32 {
        0
    }

    /// Makes `device` current in this thread. Returns the previous state, or `None` if `device` was current already.
    ///
    /// # Errors
    /// The vendor's code.
    fn make_current(&self, device: u32) -> Result<Option<Self::Previous>, i32>;

    /// Makes the previous device current again.
    fn restore(&self, previous: Self::Previous);

    /// Lets `device` access the memory of `peer`. The device is current, and the call is made once for each pair.
    ///
    /// # Errors
    /// The vendor's code, unless access was enabled before.
    fn enable_peer_access(&self, device: u32, peer: u32) -> Result<(), i32>;

    /// Enqueues a copy from one device to another and returns the vendor's code.
    ///
    /// # Safety
    /// The same as for [`Backend::copy`](highwater_hal::Backend::copy).
    unsafe fn memcpy_peer_async(
        &self,
        dst: (u32, DevicePtr),
        src: (u32, DevicePtr),
        bytes: usize,
        stream: RawStream,
    ) -> i32;

    /// Enqueues a copy of rows within one device, or between it and page-locked memory, and returns the vendor's code. The stream's
    /// device is current, and a row has at least one byte. No pitch exceeds [`MAX_PITCH`]. With
    /// [`Quirks::rows_anywhere`], the copy may be one between devices.
    ///
    /// # Safety
    /// The same as for [`Backend::copy_2d`](highwater_hal::Backend::copy_2d).
    unsafe fn memcpy_2d_async(&self, copy: &MemoryCopy2d, stream: RawStream) -> i32;

    /// Returns whether a foreign stream belongs to `device`.
    ///
    /// # Safety
    /// The caller must ensure that the stream is alive.
    ///
    /// # Errors
    /// The vendor's code.
    unsafe fn stream_is_of(&self, stream: RawStream, device: u32) -> Result<bool, i32>;

    /// Allocates memory that can be shared by a descriptor or over a fabric. The device is current.
    ///
    /// # Errors
    /// `Unsupported` if the vendor has no such memory, and the vendor's errors.
    fn allocate_shared(&self, device: u32, transport: Transport, bytes: usize) -> Result<SharedBlock> {
        let _ = (device, transport, bytes);
        Err(Error::lacks("allocate", "ipc_transports"))
    }

    /// Frees a block of [`Platform::allocate_shared`] or [`Platform::open_shared`].
    ///
    /// # Errors
    /// The vendor's errors.
    ///
    /// # Safety
    /// The caller must ensure that nothing uses the block.
    unsafe fn free_shared(&self, operation: &'static str, block: &SharedBlock) -> Result<()> {
        let _ = block;
        Err(Error::lacks(operation, "ipc_transports"))
    }

    /// Exports a block of [`Platform::allocate_shared`].
    ///
    /// # Errors
    /// The vendor's errors.
    fn export_shared(&self, block: &SharedBlock, transport: Transport, handle: MemoryHandle) -> Result<MemoryHandle> {
        let _ = (block, transport, handle);
        Err(Error::lacks("export_memory", "ipc_transports"))
    }

    /// Opens a handle of [`Platform::export_shared`] for `device`, which is current.
    ///
    /// # Errors
    /// `InvalidArgument` for bytes that are no handle, and the vendor's errors.
    fn open_shared(&self, device: u32, handle: &MemoryHandle) -> Result<SharedBlock> {
        let _ = (device, handle);
        Err(Error::lacks("open_memory", "ipc_transports"))
    }

    /// Reserves addresses for the device, which is current. The bytes are a multiple of the granularity.
    ///
    /// # Errors
    /// `Unsupported` if the vendor has no mapped memory, and the vendor's errors; also below.
    fn reserve_addresses(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        let _ = (device, bytes);
        Err(Error::lacks("reserve_addresses", "mapped_memory"))
    }

    /// Frees addresses of [`Platform::reserve_addresses`].
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// The caller must ensure that no memory is mapped there.
    unsafe fn free_addresses(&self, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let _ = (ptr, bytes);
        Err(Error::lacks("free_addresses", "mapped_memory"))
    }

    /// Creates physical memory of the device, which is current. Returns the vendor's handle.
    ///
    /// # Errors
    /// As above.
    fn create_memory(&self, device: u32, options: &PhysicalMemoryOptions) -> Result<u64> {
        let _ = (device, options);
        Err(Error::lacks("create_memory", "mapped_memory"))
    }

    /// Releases a handle of [`Platform::create_memory`].
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// The caller must ensure that the handle is not used again.
    unsafe fn release_memory(&self, allocation: u64) -> Result<()> {
        let _ = allocation;
        Err(Error::lacks("destroy_memory", "mapped_memory"))
    }

    /// Maps all of the memory at reserved addresses.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// The caller must pass a reserved range without mappings, of as many bytes as the memory has.
    unsafe fn map_memory(&self, ptr: DevicePtr, bytes: usize, allocation: u64) -> Result<()> {
        let _ = (ptr, bytes, allocation);
        Err(Error::lacks("map_memory", "mapped_memory"))
    }

    /// Lets a device read and write mapped memory.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// The caller must pass a range of whole mappings.
    unsafe fn set_memory_access(&self, ptr: DevicePtr, bytes: usize, accessing: u32) -> Result<()> {
        let _ = (ptr, bytes, accessing);
        Err(Error::lacks("set_memory_access", "mapped_memory"))
    }

    /// Unmaps memory.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// The caller must pass a range of whole mappings that no work uses.
    unsafe fn unmap_memory(&self, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let _ = (ptr, bytes);
        Err(Error::lacks("unmap_memory", "mapped_memory"))
    }

    /// Refuses memory of other devices if the device has no context yet. So a search for the device of an address creates none.
    ///
    /// # Errors
    /// `WrongDevice` for memory of another device.
    fn refuse_memory_of_others(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        let _ = (device, ptr);
        Ok(())
    }

    /// Describes the memory at an address that is not null. The device is current. `transports` are those by which the vendor
    /// may export the start of the range.
    ///
    /// # Errors
    /// `Unsupported` if the vendor cannot tell, `InvalidPointer` for no memory of a device, `WrongDevice` for memory of
    /// another device.
    fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        let _ = (device, ptr);
        Err(Error::lacks("describe_memory", "foreign_memory"))
    }

    /// Exports the mapping of other code that starts at `ptr`. The device is current.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// The caller must ensure that the memory stays mapped during the call.
    unsafe fn export_foreign(
        &self,
        ptr: DevicePtr,
        transport: Transport,
        handle: MemoryHandle,
    ) -> Result<MemoryHandle> {
        let _ = (ptr, transport, handle);
        Err(Error::lacks("export_memory", "foreign_memory"))
    }

    /// Opens a handle of mapped memory without mapping it, for `device`, which is current. Returns the vendor's handle, which
    /// [`Platform::release_memory`] releases.
    ///
    /// # Errors
    /// `InvalidArgument` for bytes that are no handle, and the vendor's errors.
    fn import_memory(&self, device: u32, handle: &MemoryHandle) -> Result<u64> {
        let _ = (device, handle);
        Err(Error::lacks("import_memory", "foreign_memory"))
    }

    /// Returns whether BLAS handles of `device` can work, for vendors that would not report it by a code.
    ///
    /// # Errors
    /// `Unsupported`, with the missing part and the places that were searched.
    fn may_create_blas(&self, device: u32) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// Reads the settings of a new BLAS handle that only this vendor has, for [`Platform::restore_blas`].
    fn blas_settings(&self, handle: RawBlas) -> BlasSettings {
        let _ = handle;
        BlasSettings::default()
    }

    /// Restores these settings after changes by foreign code.
    ///
    /// # Errors
    /// The vendor's code.
    fn restore_blas(&self, handle: RawBlas, fresh: &BlasSettings) -> Result<(), i32> {
        let _ = (handle, fresh);
        Ok(())
    }

    /// Returns the Lt library, if it was opened.
    #[inline(always)]
    fn lt(&self) -> Option<&Lt> {
        None
    }

    /// Returns the blocks of zeros of a device, which Lt plans read. A vendor with an Lt library must return some for each of
    /// its devices.
    fn zeros(&self, device: u32) -> Option<&Zeros> {
        let _ = device;
        None
    }
}

/// An opened vendor: its identity and its devices.
#[derive(Debug)]
pub struct Opened<P> {
    /// The vendor.
    pub platform: P,
    /// The identity of the backend. Its tag is part of every id.
    pub identity: Identity,
    /// The devices, by ordinal.
    pub devices: Vec<(DeviceInfo, Capabilities)>,
    /// The captures in the vendor's library, which all backends over it share.
    pub captures: Arc<Captures>,
}
