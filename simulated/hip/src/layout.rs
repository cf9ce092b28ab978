//! Structures of the vendor's headers, as far as calls here take them.

use std::ffi::c_void;

pub use highwater_simulated_engine::border::{IpcHandle, Uuid};
use highwater_simulated_engine::hip::{Pointer, Properties};
use highwater_simulated_engine::{Answer, Code};

/// `hipPointerAttribute_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PointerAttributes {
    memory_type: i32,
    device: i32,
    device_pointer: *mut c_void,
    host_pointer: *mut c_void,
    is_managed: i32,
    flags: u32,
}

const _: () = assert!(size_of::<PointerAttributes>() == 32);

impl From<Pointer> for PointerAttributes {
    fn from(found: Pointer) -> Self {
        let Pointer { memory_type, device, on_device, on_host, flags } = found;
        let [device_pointer, host_pointer] =
            [on_device, on_host].map(|address| std::ptr::with_exposed_provenance_mut(address as usize));
        Self { memory_type, device, device_pointer, host_pointer, is_managed: 0, flags }
    }
}

/// `hipDeviceProp_t`: where its fields lie, in bytes. The two layouts have the same fields at other places, as far as they are
/// filled here; the rest is 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PropertiesLayout {
    bytes: usize,
    uuid: Option<usize>,
    memory: usize,
    arch: usize,
    /// Place of a number of 32 bits, and the attribute that tells it.
    numbers: &'static [(usize, i32)],
}

/// That of HIP 5, which the symbol without a suffix fills in every version.
pub(crate) const R0000: PropertiesLayout = PropertiesLayout {
    bytes: 792,
    uuid: None,
    memory: 256,
    arch: 396,
    numbers: &[
        (272, 71),
        (276, 87),
        (280, 56),
        (284, 26),
        (288, 27),
        (292, 28),
        (296, 29),
        (300, 30),
        (304, 31),
        (308, 5),
        (312, 60),
        (316, 59),
        (328, 23),
        (332, 61),
        (336, 63),
        (340, 19),
        (360, 8),
        (364, 69),
        (368, 67),
        (372, 68),
        (388, 3),
    ],
};

/// That of HIP 6 and later.
pub(crate) const R0600: PropertiesLayout = PropertiesLayout {
    bytes: 1472,
    uuid: Some(256),
    memory: 288,
    arch: 1160,
    numbers: &[
        (304, 71),
        (308, 87),
        (320, 56),
        (324, 26),
        (328, 27),
        (332, 28),
        (336, 29),
        (340, 30),
        (344, 31),
        (348, 5),
        (360, 23),
        (364, 61),
        (388, 63),
        (396, 16),
        (400, 3),
        (576, 8),
        (584, 67),
        (588, 68),
        (592, 69),
        (600, 2),
        (604, 85),
        (608, 60),
        (612, 59),
        (616, 19),
        (628, 78),
    ],
};

impl PropertiesLayout {
    /// The structure, byte for byte.
    pub(crate) fn fill(&self, properties: &Properties) -> Answer<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        let mut write = |at: usize, value: &[u8]| -> Answer<()> {
            let place = bytes.get_mut(at..at + value.len()).ok_or(Code::UNKNOWN)?;
            place.copy_from_slice(value);
            Ok(())
        };
        // Names end with a zero byte in 256 bytes.
        let cut = |text: &str| text.as_bytes()[..text.len().min(255)].to_vec();
        write(0, &cut(&properties.name))?;
        write(self.arch, &cut(&properties.arch))?;
        write(self.memory, &properties.memory_bytes.to_ne_bytes())?;
        if let Some(uuid) = self.uuid {
            write(uuid, &properties.uuid)?;
        }
        for &(at, attribute) in self.numbers {
            write(at, &properties.attribute(attribute)?.to_ne_bytes())?;
        }
        Ok(bytes)
    }
}
