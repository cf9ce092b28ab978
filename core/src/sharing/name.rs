//! The names under which importers find exporters.

/// The start of every name.
const PREFIX: &str = "highwater-";

/// Names an exporter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Name {
    pub(crate) boot: [u8; 16],
    pub(crate) incarnation: [u8; 16],
}

impl Name {
    /// Returns the abstract name.
    pub(crate) fn address(&self) -> Vec<u8> {
        format!("{PREFIX}{:032x}", u128::from_be_bytes(self.incarnation)).into_bytes()
    }

    /// Returns the start of the names of all exporters of this boot. Half of the boot's id distinguishes machines.
    pub(super) fn boot_prefix(&self) -> String {
        let half = u128::from_be_bytes(self.boot) >> 64;
        format!("{PREFIX}{half:016x}-")
    }

    /// Returns the name of the file.
    pub(super) fn file(&self) -> String {
        format!("{}{:032x}", self.boot_prefix(), u128::from_be_bytes(self.incarnation))
    }
}
