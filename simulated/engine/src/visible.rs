//! `CUDA_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES`: the devices that are visible to the process, in their order.
//!
//! Entries are ordinals or prefixes of UUIDs (`GPU-...`), separated by commas. The list ends before the first entry that is
//! unknown or repeated, as with the vendor. An empty variable hides all devices.

use highwater_hal::Backend;
use highwater_mock::MockGpu;

use crate::code::{Answer, Code};
use crate::variants::{Vendor, vendor};

fn variable() -> &'static str {
    match vendor() {
        Vendor::Cuda => "CUDA_VISIBLE_DEVICES",
        Vendor::Hip => "HIP_VISIBLE_DEVICES",
    }
}

/// Returns a UUID in the format of the vendor's tools.
fn written(uuid: [u8; 16]) -> String {
    let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// Returns the mock's ordinals of the devices that `text` names among those with these UUIDs.
fn choose(text: &str, uuids: &[String]) -> Vec<u32> {
    let mut chosen = Vec::new();
    for entry in text.split(',').map(str::trim) {
        let device = match entry.parse::<usize>() {
            Ok(ordinal) => Some(ordinal).filter(|&ordinal| ordinal < uuids.len()),
            Err(_) if entry.len() > "GPU-".len() => uuids.iter().position(|uuid| uuid.starts_with(entry)),
            Err(_) => None,
        };
        match device.and_then(|device| u32::try_from(device).ok()) {
            Some(device) if !chosen.contains(&device) => chosen.push(device),
            _ => break,
        }
    }
    chosen
}

/// Returns the mock's devices that are visible to the process.
pub(crate) fn devices(gpu: &MockGpu) -> Answer<Vec<u32>> {
    let Ok(text) = std::env::var(variable()) else { return Ok((0..gpu.device_count()).collect()) };
    let uuid = |device| gpu.device_info(device).map(|info| written(info.uuid));
    let uuids = (0..gpu.device_count()).map(uuid).collect::<Result<Vec<_>, _>>().map_err(Code::from)?;
    Ok(choose(&text, &uuids))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_ordinal_and_uuid_up_to_the_first_that_is_none() {
        let uuids = [written([0xab; 16]), written([0xcd; 16]), written([7; 16])];
        assert_eq!(uuids[0], "GPU-abababab-abab-abab-abab-abababababab");
        for (text, chosen) in [
            ("2,0", &[2, 0][..]),
            (" 1 , 2", &[1, 2]),
            ("GPU-cd,0", &[1, 0]),
            ("0,3,1", &[0]),
            ("1,-1,0", &[1]),
            ("1,1,0", &[1]),
            ("GPU-,0", &[]),
            ("", &[]),
        ] {
            assert_eq!(choose(text, &uuids), chosen, "`{text}`");
        }
    }
}
