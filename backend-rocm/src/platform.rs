//! HIP as a [`Platform`].

use highwater_driver::{Blas, Calls, Codes, Lt, Platform, Quirks, RawStream, Zeros};
use highwater_hal::{DevicePtr, Location, MemoryCopy2d, MemoryRange, Result};

use crate::driver::Driver;
use crate::kernels::Kernels;
use crate::{codes, foreign, quirks};

/// The runtime, hipBLAS and hipBLASLt.
#[derive(Debug)]
pub(crate) struct Rocm {
    pub(crate) driver: &'static Driver,
    pub(crate) blas: Blas,
    pub(crate) lt: Option<Lt>,
    pub(crate) quirks: &'static Quirks,
    pub(crate) kernels: Kernels,
    /// The architectures, by ordinal.
    pub(crate) architectures: Vec<String>,
}

impl Rocm {
    #[inline(always)]
    fn set_device(&self, device: i32) -> i32 {
        // SAFETY: The call takes a number, and refuses a device that does not exist.
        unsafe { (self.driver.own.set_device)(device) }
    }
}

// SAFETY: The calls are those of AMD's runtime and of hipBLAS. They were looked up under their own symbols and are
// declared with their own arguments, which `abi_check.rs` checks. AMD's manuals promise the order of streams, the
// results of queries and the effect of copies. A flag of each event requests that a wait for it makes device writes to
// host memory visible.
unsafe impl Platform for Rocm {
    /// The device that was current.
    type Previous = i32;

    fn calls(&self) -> &Calls {
        &self.driver.calls
    }

    fn blas(&self) -> &Blas {
        &self.blas
    }

    fn codes(&self) -> &'static Codes {
        &codes::HIP
    }

    fn quirks(&self) -> &'static Quirks {
        self.quirks
    }

    #[inline(always)]
    fn make_current(&self, device: u32) -> Result<Option<i32>, i32> {
        let mut before = -1;
        // SAFETY: The call writes one number, which outlives it. The current device is queried each time, because
        // foreign code may change it.
        match unsafe { (self.driver.own.get_device)(&mut before) } {
            0 if before == device as i32 => Ok(None),
            0 => match self.set_device(device as i32) {
                0 => Ok(Some(before)),
                code => Err(code),
            },
            code => Err(code),
        }
    }

    #[inline(always)]
    fn restore(&self, previous: i32) {
        self.set_device(previous);
    }

    fn enable_peer_access(&self, device: u32, peer: u32) -> Result<(), i32> {
        let own = &self.driver.own;
        let mut reaches = 0;
        // SAFETY: The call writes one number, which outlives it.
        let asked = unsafe { (own.device_can_access_peer)(&mut reaches, device as i32, peer as i32) };
        if asked != 0 || reaches == 0 {
            return Err(if asked == 0 { quirks::PEER_ACCESS_UNSUPPORTED } else { asked });
        }
        // SAFETY: The call takes numbers only.
        let enabled = unsafe { (own.device_enable_peer_access)(peer as i32, 0) };
        if enabled == 0 || enabled == quirks::PEER_ACCESS_ALREADY_ENABLED { Ok(()) } else { Err(enabled) }
    }

    unsafe fn memcpy_peer_async(
        &self,
        dst: (u32, DevicePtr),
        src: (u32, DevicePtr),
        bytes: usize,
        stream: RawStream,
    ) -> i32 {
        // SAFETY: The caller promises that both ranges and the stream are valid.
        unsafe { (self.driver.own.memcpy_peer_async)(dst.1, dst.0 as i32, src.1, src.0 as i32, bytes, stream) }
    }

    unsafe fn memcpy_2d_async(&self, copy: &MemoryCopy2d, stream: RawStream) -> i32 {
        let address = |side| match side {
            Location::Host(host) => DevicePtr::new(host.address() as u64),
            Location::Device { ptr, .. } => ptr,
        };
        let kind = match (copy.dst, copy.src) {
            (Location::Host(_), _) => quirks::MEMCPY_DEVICE_TO_HOST,
            (_, Location::Host(_)) => quirks::MEMCPY_HOST_TO_DEVICE,
            _ => quirks::MEMCPY_DEVICE_TO_DEVICE,
        };
        let (dst, src, shape) = (address(copy.dst), address(copy.src), copy.shape);
        let call = self.driver.own.memcpy_2d_async;
        // SAFETY: The caller promises that all rows and the stream are valid.
        unsafe { call(dst, shape.dst_pitch, src, shape.src_pitch, shape.width, shape.height, kind, stream) }
    }

    unsafe fn stream_is_of(&self, stream: RawStream, device: u32) -> Result<bool, i32> {
        let mut own = -1;
        // SAFETY: The caller promises that the stream is alive. The call writes one number, which outlives it.
        let code = unsafe { (self.driver.own.stream_get_device)(stream, &mut own) };
        if code == 0 { Ok(own == device as i32) } else { Err(code) }
    }

    fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        foreign::describe(&self.driver.calls, self.driver.own.pointer_get_attributes, device, ptr)
    }

    #[inline(always)]
    fn lt(&self) -> Option<&Lt> {
        self.lt.as_ref()
    }

    fn zeros(&self, device: u32) -> Option<&Zeros> {
        self.driver.zeros.get(device as usize)
    }

    fn may_create_blas(&self, device: u32) -> Result<()> {
        self.architectures.get(device as usize).map_or(Ok(()), |architecture| self.kernels.check(architecture))
    }
}
