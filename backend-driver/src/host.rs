//! The trait `HostAllocator` over a vendor's table of calls.

use std::ptr::NonNull;
use std::sync::Arc;

use super::platform::Platform;
use super::state::{DriverState, HostBlock};
use highwater_hal::{DevicePtr, Error, ErrorKind, HostAllocator, HostMemoryKind, HostOptions, HostPtr, Result};

/// The allocator of page-locked memory.
#[derive(Debug)]
pub(super) struct DriverHost<P: Platform>(Arc<DriverState<P>>);

/// Page-locked memory belongs to all devices, so the first device's capabilities apply.
const ANY_DEVICE: u32 = 0;

impl<P: Platform> DriverHost<P> {
    pub(super) const fn new(state: Arc<DriverState<P>>) -> Self {
        Self(state)
    }

    /// Removes the block that starts at `ptr` from the table.
    fn take(&self, operation: &'static str, ptr: HostPtr, registered: bool) -> Result<HostBlock> {
        let mut blocks = self.0.host_blocks.lock();
        match blocks.get(&ptr.address()).copied() {
            Some(block) if block.registered == registered => {
                blocks.remove(&ptr.address());
                Ok(block)
            }
            _ => {
                let how = if registered { "register" } else { "allocate" };
                let message = format!("{ptr} is not the start of live memory of `{how}`");
                Err(Error::new(ErrorKind::InvalidPointer, operation, message)
                    .with_hint(format!("pass each address of `{how}` once")))
            }
        }
    }
}

fn no_bytes(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation, "0 bytes were requested, expected at least 1")
}

// SAFETY: The vendor's page-locked memory has the requested size and is readable, writable and aligned to a page. It is
// distinct from all other memory until it is freed. Its bytes are initialized, because they come from the kernel or the
// vendor's pool, not from a Rust allocator.
unsafe impl<P: Platform> HostAllocator for DriverHost<P> {
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        const OPERATION: &str = "host_allocate";
        let state = &*self.0;
        state.enter(OPERATION)?;
        if bytes == 0 {
            return Err(no_bytes(OPERATION));
        }
        let vendor = state.platform.quirks().host_flags;
        let flags = match options.kind {
            HostMemoryKind::Default => vendor.default,
            HostMemoryKind::WriteCombined => {
                state.require(OPERATION, ANY_DEVICE, |can| can.write_combined, "write_combined")?;
                vendor.write_combined
            }
            kind => return Err(Error::unknown(OPERATION, &kind)),
        };
        if isize::try_from(bytes).is_err() {
            let message = format!("{bytes} bytes were requested, expected at most half of the address space");
            return Err(Error::new(ErrorKind::OutOfMemory, OPERATION, message).with_hint("request fewer bytes"));
        }
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, state.platform.device_in_use())?;
        let mut address = std::ptr::null_mut();
        // SAFETY: The call writes one address, which outlives it.
        state.check(OPERATION, unsafe { (state.platform.calls().mem_host_alloc)(&mut address, bytes, flags) })?;
        let address = NonNull::new(address).ok_or_else(|| super::state::nothing(OPERATION))?;
        let ptr = HostPtr::new(address);
        state.host_blocks.lock().insert(ptr.address(), HostBlock { bytes, registered: false });
        Ok(ptr)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        const OPERATION: &str = "host_free";
        let state = &*self.0;
        state.enter(OPERATION)?;
        let block = self.take(OPERATION, ptr, false)?;
        let outcome = (|| {
            let _relaxed = state.relaxed();
            let _current = state.make_current(OPERATION, state.platform.device_in_use())?;
            // SAFETY: The address is the start of memory from the vendor, and the caller promises that nothing uses it.
            state.check(OPERATION, unsafe { (state.platform.calls().mem_free_host)(ptr.as_ptr()) })
        })();
        if outcome.is_err() {
            state.host_blocks.lock().insert(ptr.address(), block);
        }
        outcome
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        const OPERATION: &str = "host_register";
        let state = &*self.0;
        state.enter(OPERATION)?;
        state.require(OPERATION, ANY_DEVICE, |can| can.host_register, "host_register")?;
        if options.read_only {
            state.require(OPERATION, ANY_DEVICE, |can| can.host_register_read_only, "host_register_read_only")?;
        }
        if options.kind != HostMemoryKind::Default {
            let message = "registered memory cannot be write-combined";
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, message)
                .with_hint("register the memory as `HostMemoryKind::Default`"));
        }
        if bytes == 0 {
            return Err(no_bytes(OPERATION));
        }
        let start = ptr.address();
        let Some(end) = start.checked_add(bytes) else {
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, "the range exceeds the address space"));
        };
        {
            let mut blocks = state.host_blocks.lock();
            if let Some((other, block)) =
                blocks.range(..end).next_back().filter(|(other, block)| *other + block.bytes > start)
            {
                let message = format!("{bytes} bytes at {ptr} overlap {} page-locked bytes at {other:#x}", block.bytes);
                return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                    .with_hint("register each range once, and no memory of `allocate`"));
            }
            // Added to the table first, so that no other thread registers the range meanwhile.
            blocks.insert(start, HostBlock { bytes, registered: true });
        }
        let outcome = (|| {
            let _relaxed = state.relaxed();
            let _current = state.make_current(OPERATION, state.platform.device_in_use())?;
            let quirks = state.platform.quirks();
            let read_only = if options.read_only { quirks.register_read_only_flag } else { 0 };
            let flags = quirks.register_flags | read_only;
            // SAFETY: The caller promises that the range is mapped and stays mapped.
            state.check(OPERATION, unsafe { (state.platform.calls().mem_host_register)(ptr.as_ptr(), bytes, flags) })
        })();
        if outcome.is_err() {
            state.host_blocks.lock().remove(&start);
        }
        outcome
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        const OPERATION: &str = "host_unregister";
        let state = &*self.0;
        state.enter(OPERATION)?;
        state.require(OPERATION, ANY_DEVICE, |can| can.host_register, "host_register")?;
        let block = self.take(OPERATION, ptr, true)?;
        let outcome = (|| {
            let _relaxed = state.relaxed();
            let _current = state.make_current(OPERATION, state.platform.device_in_use())?;
            // SAFETY: The address is the start of a registered range, and the caller promises that no work uses it.
            state.check(OPERATION, unsafe { (state.platform.calls().mem_host_unregister)(ptr.as_ptr()) })
        })();
        if outcome.is_err() {
            state.host_blocks.lock().insert(ptr.address(), block);
        }
        outcome
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        const OPERATION: &str = "host_device_address";
        let state = &*self.0;
        state.enter(OPERATION)?;
        state.device(OPERATION, device)?;
        let (start, inside) = state.host_block(OPERATION, ptr)?;
        let _current = state.make_current(OPERATION, device)?;
        let mut address = DevicePtr::new(0);
        // SAFETY: The start is page-locked, and the call writes one number, which outlives it.
        let code = unsafe { (state.platform.calls().mem_host_get_device_pointer)(&mut address, start as *mut u8, 0) };
        state.check(OPERATION, code)?;
        Ok(address.offset(inside))
    }
}
