//! Device memory through CUDA's virtual memory calls: memory that can be shared by a descriptor or over a fabric, and mapped
//! memory.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;
use highwater_driver::SharedBlock;
use highwater_hal::{
    Descriptor, DevicePtr, Error, ErrorKind, MemoryHandle, PhysicalMemoryOptions, Result, Transport, Transports,
};

use crate::calls::{RawAllocation, VirtualMemoryCalls};
use crate::codes;

/// The properties of an allocation, in the driver's layout with numbers instead of enums.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    metadata: usize,
    flags: u64,
}

/// The location of memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    kind: u32,
    id: i32,
}

/// The access to memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    location: Location,
    flags: u32,
}

const _: () = {
    assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());
    assert!(std::mem::offset_of!(Properties, location) == std::mem::offset_of!(sys::CUmemAllocationProp, location));
    assert!(std::mem::offset_of!(Properties, flags) == std::mem::offset_of!(sys::CUmemAllocationProp, allocFlags));
    assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());
    assert!(std::mem::offset_of!(Access, flags) == std::mem::offset_of!(sys::CUmemAccessDesc, flags));
};

const PINNED: u32 = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32;
const ON_DEVICE: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
const READ_AND_WRITE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32;
const LEAST: u32 = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32;

/// The flag for memory that network adapters access: `gpuDirectRDMACapable`, the second byte of `allocFlags`.
const RDMA: u64 = u64::from_ne_bytes([0, 1, 0, 0, 0, 0, 0, 0]);

const fn handle_type(transport: Transport) -> u32 {
    match transport {
        Transport::Fabric => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0,
        _ => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0,
    }
}

impl VirtualMemoryCalls {
    const fn location(device: i32) -> Location {
        Location { kind: ON_DEVICE, id: device }
    }

    const fn properties(device: i32, transport: Transport) -> Properties {
        Self::properties_of(device, Some(transport), false)
    }

    /// Rounds `bytes` up to the driver's granularity.
    fn round(&self, operation: &'static str, properties: &Properties, bytes: usize) -> Result<usize> {
        let mut granularity = 0;
        // SAFETY: The call reads the properties and writes one number, which outlive it.
        let code = unsafe { (self.mem_get_allocation_granularity)(&mut granularity, properties, LEAST) };
        codes::CUDA.check(operation, code)?;
        bytes.checked_next_multiple_of(granularity.max(1)).ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, operation, format!("{bytes} bytes exceed the address space"))
        })
    }

    /// Returns whether memory for the transport can be created. The device's attributes do not suffice to tell.
    pub(crate) fn works(&self, device: i32, transport: Transport) -> bool {
        let properties = Self::properties(device, transport);
        let Ok(bytes) = self.round("open", &properties, 1) else { return false };
        let mut memory = RawAllocation::NULL;
        // SAFETY: As above. The allocation is released.
        unsafe { (self.mem_create)(&mut memory, bytes, &properties, 0) == 0 && (self.mem_release)(memory) == 0 }
    }

    /// Returns the properties of physical memory.
    const fn properties_of(device: i32, shareable: Option<Transport>, rdma: bool) -> Properties {
        Properties {
            kind: PINNED,
            handle_types: match shareable {
                Some(transport) => handle_type(transport),
                None => 0,
            },
            location: Self::location(device),
            metadata: 0,
            flags: if rdma { RDMA } else { 0 },
        }
    }

    /// Returns the granularity of mapped memory with any of the transports; `None` if the driver does not report it.
    pub(crate) fn granularity(&self, device: i32, transports: Transports, rdma: bool) -> Option<usize> {
        let shareable = [Transport::Descriptor, Transport::Fabric].into_iter().filter(|it| transports.contains(*it));
        let kinds = shareable.map(Some).chain([None]);
        let bytes = kinds.map(|shareable| self.round("open", &Self::properties_of(device, shareable, rdma), 1).ok());
        // The granularities are powers of two, so the largest is a multiple of the others.
        bytes.into_iter().try_fold(0, |most, bytes| Some(bytes?.max(most)))
    }

    pub(crate) fn reserve(&self, bytes: usize) -> Result<DevicePtr> {
        let mut address = DevicePtr::new(0);
        // SAFETY: The call writes one number, which outlives it.
        let code = unsafe { (self.mem_address_reserve)(&mut address, bytes, 0, DevicePtr::new(0), 0) };
        codes::CUDA.check("reserve_addresses", code).map(|()| address)
    }

    /// Creates physical memory. The device is current.
    pub(crate) fn create(&self, device: i32, options: &PhysicalMemoryOptions) -> Result<RawAllocation> {
        let properties = Self::properties_of(device, options.shareable, options.rdma);
        let mut memory = RawAllocation::NULL;
        // SAFETY: The call reads the properties and writes one number, which outlive it.
        let code = unsafe { (self.mem_create)(&mut memory, options.bytes, &properties, 0) };
        codes::CUDA.check("create_memory", code).map(|()| memory)
    }

    /// Grants a device access to mapped memory.
    ///
    /// # Safety
    /// The caller must pass a range of whole mappings.
    pub(crate) unsafe fn grant(&self, ptr: DevicePtr, bytes: usize, device: i32) -> Result<()> {
        let access = Access { location: Self::location(device), flags: READ_AND_WRITE };
        // SAFETY: As the caller promises. The description outlives the call.
        codes::CUDA.check("set_memory_access", unsafe { (self.mem_set_access)(ptr, bytes, &access, 1) })
    }

    /// Creates and maps memory. The device is current.
    pub(crate) fn allocate(&self, device: i32, transport: Transport, bytes: usize) -> Result<SharedBlock> {
        const OPERATION: &str = "allocate";
        let properties = Self::properties(device, transport);
        let bytes = self.round(OPERATION, &properties, bytes)?;
        let mut memory = RawAllocation::NULL;
        // SAFETY: The call reads the properties and writes one number, which outlive it.
        codes::CUDA.check(OPERATION, unsafe { (self.mem_create)(&mut memory, bytes, &properties, 0) })?;
        self.place(OPERATION, device, memory, bytes)
    }

    /// Maps an allocation. If that fails, releases the allocation.
    fn place(&self, operation: &'static str, device: i32, memory: RawAllocation, bytes: usize) -> Result<SharedBlock> {
        let mut address = DevicePtr::new(0);
        let access = Access { location: Self::location(device), flags: READ_AND_WRITE };
        // SAFETY: The allocation was just created or imported with at least these bytes, or the mapping fails. Numbers
        // and descriptions outlive the calls. Reserved and mapped addresses are freed on failure.
        let code = unsafe {
            match (self.mem_address_reserve)(&mut address, bytes, 0, DevicePtr::new(0), 0) {
                0 => match (self.mem_map)(address, bytes, 0, memory, 0) {
                    0 => match (self.mem_set_access)(address, bytes, &access, 1) {
                        0 => return Ok(SharedBlock { address, allocation: memory.0, bytes }),
                        code => {
                            (self.mem_unmap)(address, bytes);
                            (self.mem_address_free)(address, bytes);
                            code
                        }
                    },
                    code => {
                        (self.mem_address_free)(address, bytes);
                        code
                    }
                },
                code => code,
            }
        };
        // SAFETY: Nothing maps the memory.
        unsafe { (self.mem_release)(memory) };
        Err(codes::CUDA.error(operation, code))
    }

    /// Frees a block.
    ///
    /// # Safety
    /// The caller must ensure that nothing uses the block.
    pub(crate) unsafe fn free(&self, operation: &'static str, block: &SharedBlock) -> Result<()> {
        // SAFETY: The block is mapped, and nothing uses it.
        codes::CUDA.check(operation, unsafe { (self.mem_unmap)(block.address, block.bytes) })?;
        // The mapping is gone, so later failures cannot be repeated as a whole and are only logged.
        // SAFETY: The addresses are reserved and hold no mapping. Nothing maps the allocation.
        let codes = unsafe {
            [(self.mem_address_free)(block.address, block.bytes), (self.mem_release)(RawAllocation(block.allocation))]
        };
        for code in codes {
            if let Err(error) = codes::CUDA.check(operation, code) {
                tracing::warn!("a part of {} bytes of shared memory was leaked: {error}", block.bytes);
            }
        }
        Ok(())
    }

    pub(crate) fn export(
        &self,
        block: &SharedBlock,
        transport: Transport,
        handle: MemoryHandle,
    ) -> Result<MemoryHandle> {
        self.export_allocation(RawAllocation(block.allocation), transport, handle)
    }

    /// Completes the handle of an allocation.
    pub(crate) fn export_allocation(
        &self,
        memory: RawAllocation,
        transport: Transport,
        mut handle: MemoryHandle,
    ) -> Result<MemoryHandle> {
        const OPERATION: &str = "export_memory";
        let export = self.mem_export_to_shareable_handle;
        let number = handle_type(transport);
        if transport == Transport::Fabric {
            // SAFETY: The call writes the 64 bytes of a fabric handle, which outlive it.
            let code = unsafe { export(handle.payload.as_mut_ptr(), memory, number, 0) };
            return codes::CUDA.check(OPERATION, code).map(|()| handle);
        }
        let mut descriptor: i32 = -1;
        // SAFETY: The call writes one descriptor, which outlives it.
        let code = unsafe { export((&raw mut descriptor).cast(), memory, number, 0) };
        codes::CUDA.check(OPERATION, code)?;
        if descriptor < 0 {
            return Err(Error::new(ErrorKind::Vendor, OPERATION, "CUDA reported success and returned no descriptor"));
        }
        // SAFETY: The descriptor was just created, and no other code knows it.
        Ok(handle.with_descriptor(Descriptor::new(unsafe { OwnedFd::from_raw_fd(descriptor) })))
    }

    /// Takes over a handle of another process. The device is current.
    pub(crate) fn import(&self, operation: &'static str, handle: &MemoryHandle) -> Result<RawAllocation> {
        let number = handle_type(handle.transport);
        let argument: *const u8 = match (&handle.descriptor, handle.transport) {
            (_, Transport::Fabric) => handle.payload.as_ptr(),
            // The driver takes the number of the descriptor in place of a pointer.
            (Some(descriptor), _) => std::ptr::without_provenance(descriptor.as_ref().as_raw_fd() as usize),
            (None, _) => {
                return Err(Error::new(ErrorKind::InvalidArgument, operation, "the handle has no descriptor")
                    .with_hint("pass the handle with its descriptor"));
            }
        };
        let mut memory = RawAllocation::NULL;
        // SAFETY: The descriptor is open, or the handle has 64 bytes. The number outlives the call.
        let code = unsafe { (self.mem_import_from_shareable_handle)(&mut memory, argument, number) };
        codes::CUDA.check(operation, code).map(|()| memory).map_err(not_one)
    }

    /// Opens a handle of another process. The device is current.
    pub(crate) fn open(&self, device: i32, handle: &MemoryHandle) -> Result<SharedBlock> {
        const OPERATION: &str = "open_memory";
        let memory = self.import(OPERATION, handle)?;
        let wanted = usize::try_from(handle.bytes).unwrap_or(usize::MAX);
        let bytes = self.round(OPERATION, &Self::properties(device, handle.transport), wanted);
        match bytes {
            Ok(bytes) => self.place(OPERATION, device, memory, bytes).map_err(not_one),
            Err(error) => {
                // SAFETY: Nothing maps the memory.
                unsafe { (self.mem_release)(memory) };
                Err(error)
            }
        }
    }

    /// Retains the allocation that is mapped at an address; `None` if none is.
    pub(crate) fn retain(&self, ptr: DevicePtr) -> Option<RawAllocation> {
        let mut memory = RawAllocation::NULL;
        // SAFETY: The call writes one number, which outlives it.
        let code = unsafe { (self.mem_retain_allocation_handle?)(&mut memory, ptr) };
        (code == 0).then_some(memory)
    }

    /// Releases an allocation that was retained.
    pub(crate) fn release_retained(&self, memory: RawAllocation) {
        // SAFETY: This code retained the allocation, and does not use it again.
        let code = unsafe { (self.mem_release)(memory) };
        if let Err(error) = codes::CUDA.check("describe_memory", code) {
            tracing::warn!("a retained allocation was leaked: {error}");
        }
    }
}

/// Converts the error of a handle that the driver does not take. Its codes for bytes that are no handle are not documented.
fn not_one(error: Error) -> Error {
    match error.kind() {
        ErrorKind::OutOfMemory | ErrorKind::DeviceLost | ErrorKind::PermissionDenied => error,
        _ => Error::new(
            ErrorKind::InvalidArgument,
            error.operation(),
            format!("the handle does not name shared memory: {}", error.message()),
        )
        .with_code(error.code().unwrap_or(0))
        .with_hint("pass the exported handle unchanged, with its descriptor, to the device with its UUID"),
    }
}
