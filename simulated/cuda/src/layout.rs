//! Structures of the vendor's header, as far as calls here take them.

pub use highwater_simulated_engine::border::{IpcHandle, Uuid};
use highwater_simulated_engine::copies::CopyShape;
use highwater_simulated_engine::vmm::Properties;
use highwater_simulated_engine::{Answer, Code};
use std::ffi::c_void;

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AllocationProperties {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location_kind: u32,
    pub(crate) location: i32,
    pub(crate) win32_data: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

const _: () = assert!(size_of::<AllocationProperties>() == 32);

impl From<AllocationProperties> for Properties {
    fn from(given: AllocationProperties) -> Self {
        let AllocationProperties { kind, handle_types, location_kind, location, .. } = given;
        Self { kind, handle_types, location_kind, location }
    }
}

/// `CUDA_MEMCPY2D`, with numbers instead of enums.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RowsDescription {
    pub(crate) src: Rows,
    pub(crate) dst: Rows,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

const _: () = assert!(size_of::<RowsDescription>() == 128);

/// One side of `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Rows {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) kind: u32,
    pub(crate) host: *mut c_void,
    pub(crate) device: u64,
    pub(crate) array: *mut c_void,
    pub(crate) pitch: usize,
}

impl Rows {
    /// Returns the address of the first row, and whether it must be memory of the driver.
    pub(crate) fn start(&self) -> Answer<(u64, bool)> {
        let (base, is_known) = match self.kind {
            1 => (self.host.addr() as u64, false),
            2 => (self.device, true),
            4 => (self.device, false),
            // Arrays are not simulated.
            _ => return Err(Code::INVALID_VALUE),
        };
        let behind = self.y.checked_mul(self.pitch).and_then(|bytes| bytes.checked_add(self.x));
        let start = behind.and_then(|bytes| base.checked_add(bytes as u64));
        start.map(|start| (start, is_known)).ok_or(Code::INVALID_VALUE)
    }
}

/// `CUDA_MEMCPY3D_PEER`, with numbers instead of enums.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PeerRowsDescription {
    pub(crate) src: PeerRows,
    pub(crate) dst: PeerRows,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
}

const _: () = assert!(size_of::<PeerRowsDescription>() == 200);

/// One side of `CUDA_MEMCPY3D_PEER`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PeerRows {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) z: usize,
    pub(crate) lod: usize,
    pub(crate) kind: u32,
    pub(crate) host: *mut c_void,
    pub(crate) device: u64,
    pub(crate) array: *mut c_void,
    pub(crate) context: *mut c_void,
    pub(crate) pitch: usize,
    pub(crate) height: usize,
}

impl PeerRows {
    /// Returns the address of the first row. Only one layer of memory of the driver is simulated.
    fn start(&self) -> Answer<u64> {
        let &Self { x, y, z: 0, lod: 0, kind: kind @ (2 | 4), host, device, array, pitch, .. } = self else {
            return Err(Code::INVALID_VALUE);
        };
        Rows { x, y, kind, host, device, array, pitch }.start().map(|(start, _)| start)
    }
}

/// Returns where the rows of a copy between devices begin, the destination first, and their shape.
///
/// # Errors
/// 1 for what is not simulated.
pub fn peer_rows(dst: &PeerRows, src: &PeerRows, [width, height, depth]: [usize; 3]) -> Answer<(u64, u64, CopyShape)> {
    // With 0 layers, nothing is copied.
    let height = if depth == 0 { 0 } else { height };
    if depth > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let shape = CopyShape::new(width, height).with_src_pitch(src.pitch).with_dst_pitch(dst.pitch);
    Ok((dst.start()?, src.start()?, shape))
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AccessDescription {
    pub(crate) location_kind: u32,
    pub(crate) location: i32,
    pub(crate) flags: u32,
}
