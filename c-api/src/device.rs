//! Devices.

use std::ffi::c_char;

use front::Device;

use crate::failure::call;
use crate::handle::{self, get, make, place, put, release};
use crate::numbers::highwater_status;
use crate::opening::highwater_runtime;
use crate::{json, texts};

/// A device of a runtime.
#[derive(Debug)]
pub enum highwater_device {}

handle::kinds! {
    highwater_device: Device = b"hw-devic";
}

/// Makes a handle of the device with an ordinal, from 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_get(
    runtime: *mut highwater_runtime,
    ordinal: u32,
    device: *mut *mut highwater_device,
) -> highwater_status {
    call!(highwater_device_get, {
        let runtime = get(runtime)?;
        make(device, || runtime.device(ordinal))
    })
}

/// Writes the device's name, UUID, memory and capabilities as a JSON text. Release it with highwater_text_release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_describe(
    device: *mut highwater_device,
    description: *mut *mut c_char,
) -> highwater_status {
    call!(highwater_device_describe, {
        let device = get(device)?;
        place(description, "description")?;
        texts::give(description, &json::device(device.info(), device.capabilities()));
        Ok(())
    })
}

/// Writes the bytes of free memory and of all memory of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_memory(
    device: *mut highwater_device,
    free_bytes: *mut u64,
    total_bytes: *mut u64,
) -> highwater_status {
    call!(highwater_device_memory, {
        let device = get(device)?;
        place(free_bytes, "free bytes")?;
        place(total_bytes, "total bytes")?;
        let memory = device.memory_info()?;
        put(free_bytes, memory.free);
        put(total_bytes, memory.total);
        Ok(())
    })
}

/// Makes BLAS handles ahead of use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_warm(device: *mut highwater_device, handles: usize) -> highwater_status {
    call!(highwater_device_warm, { get(device)?.warm(handles) })
}

/// Waits for all work of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_synchronize(device: *mut highwater_device) -> highwater_status {
    call!(highwater_device_synchronize, { get(device)?.synchronize() })
}

/// Releases the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_release(device: *mut *mut highwater_device) -> highwater_status {
    call!(highwater_device_release, { release(device) })
}
