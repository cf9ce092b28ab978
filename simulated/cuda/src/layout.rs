//! Structures of the vendor's header, as far as calls here take them.

use std::ffi::c_void;

pub use highwater_simulated_engine::border::{IpcHandle, Uuid};
use highwater_simulated_engine::vmm::Properties;

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

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AccessDescription {
    pub(crate) location_kind: u32,
    pub(crate) location: i32,
    pub(crate) flags: u32,
}
