//! What vendors and the system say of a device, made readable.

use highwater_hal::DeviceInfo;

/// The text up to the first zero, as vendors write names into buffers.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Sets the place where a device is plugged in: its PCI address as the vendor writes it, and the NUMA node that the system
/// reports for that address. A machine without NUMA reports -1.
pub fn set_pci_address(info: &mut DeviceInfo, address: &[u8]) {
    let address = text(address).to_lowercase();
    let node = std::fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok();
    info.numa_node = node.and_then(|node| node.trim().parse().ok());
    info.pci_address = Some(address);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_at_its_first_zero_or_with_its_bytes() {
        assert_eq!([text(b"name\0rest"), text(b"name"), text(b"\0")], ["name", "name", ""]);
    }

    #[test]
    fn a_place_that_the_system_does_not_know_has_no_node() {
        let mut info = DeviceInfo::new(0, "device", [0; 16], 1);
        set_pci_address(&mut info, b"FFFF:FF:1F.7\0");
        assert_eq!((info.pci_address.as_deref(), info.numa_node), (Some("ffff:ff:1f.7"), None));
    }
}
