//! Reading device properties from the vendor and the system.

use highwater_hal::DeviceInfo;

/// Returns the text before the first zero byte of a vendor's buffer.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Sets the PCI address that the vendor wrote, and the NUMA node that the system reports for it. On a machine without
/// NUMA, the system reports -1, and no node is set.
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
