//! The numbers of the header, as cbindgen sees them: literals. The tests compare them with those of `highwater-hal`.

/// HIGHWATER_OK, HIGHWATER_PANICKED, or HIGHWATER_ERROR_...
pub type highwater_status = i32;

/// Success.
pub const HIGHWATER_OK: i32 = 0;
/// A panic was contained: an error in Highwater itself.
pub const HIGHWATER_PANICKED: i32 = -1;

/// The function does not accept an argument.
pub const HIGHWATER_ERROR_INVALID_ARGUMENT: i32 = 1;
/// A handle is released, of another kind, or no handle.
pub const HIGHWATER_ERROR_INVALID_HANDLE: i32 = 2;
/// An address is not from this runtime, was freed, or points into the middle of a block.
pub const HIGHWATER_ERROR_INVALID_POINTER: i32 = 3;
/// Objects of different devices were mixed in one call.
pub const HIGHWATER_ERROR_WRONG_DEVICE: i32 = 4;
/// The device lacks the capability, or this version does not support it.
pub const HIGHWATER_ERROR_UNSUPPORTED: i32 = 5;
/// Memory of the device or the host is exhausted.
pub const HIGHWATER_ERROR_OUT_OF_MEMORY: i32 = 6;
/// A library of the vendor could not be opened.
pub const HIGHWATER_ERROR_LIBRARY_MISSING: i32 = 7;
/// A library of the vendor lacks a required symbol.
pub const HIGHWATER_ERROR_SYMBOL_MISSING: i32 = 8;
/// The library works, but there is no usable device.
pub const HIGHWATER_ERROR_DEVICE_MISSING: i32 = 9;
/// No backend of that name is known.
pub const HIGHWATER_ERROR_UNKNOWN_BACKEND: i32 = 10;
/// A capture was refused or lost.
pub const HIGHWATER_ERROR_CAPTURE: i32 = 11;
/// The object is in a state that forbids this call now.
pub const HIGHWATER_ERROR_INVALID_STATE: i32 = 12;
/// A device error from which no call recovers. The process must end.
pub const HIGHWATER_ERROR_DEVICE_LOST: i32 = 13;
/// The process is exiting, or the runtime has ended.
pub const HIGHWATER_ERROR_SHUTTING_DOWN: i32 = 14;
/// The process was forked after the runtime was opened; the child cannot use it.
pub const HIGHWATER_ERROR_FORKED: i32 = 15;
/// The process at the other end of a share has ended.
pub const HIGHWATER_ERROR_PEER_LOST: i32 = 16;
/// The memory of a ticket is no longer shared: its owner has freed it or has ended.
pub const HIGHWATER_ERROR_EXPIRED: i32 = 17;
/// A call of the operating system failed; the code is its errno.
pub const HIGHWATER_ERROR_OPERATING_SYSTEM: i32 = 18;
/// The operating system or the driver refused permission.
pub const HIGHWATER_ERROR_PERMISSION_DENIED: i32 = 19;
/// Any other error of the vendor; the vendor's code says which.
pub const HIGHWATER_ERROR_VENDOR: i32 = 20;

/// A forbidden call of the capturing thread loses the capture.
pub const HIGHWATER_CAPTURE_THREAD_LOCAL: u32 = 0;
/// A forbidden call of any thread loses the capture.
pub const HIGHWATER_CAPTURE_GLOBAL: u32 = 1;
/// No call is forbidden.
pub const HIGHWATER_CAPTURE_RELAXED: u32 = 2;

/// 32-bit floating point.
pub const HIGHWATER_DATA_TYPE_F32: u32 = 0;
/// 64-bit floating point.
pub const HIGHWATER_DATA_TYPE_F64: u32 = 1;
/// 16-bit floating point, IEEE 754 binary16.
pub const HIGHWATER_DATA_TYPE_F16: u32 = 2;
/// 16-bit floating point with the exponent of 32 bits, bfloat16.
pub const HIGHWATER_DATA_TYPE_BF16: u32 = 3;

/// The memory stays until the buffer is released.
pub const HIGHWATER_OWNER_DEATH_KEEP: u32 = 0;
/// The memory is released at once. Later calls on the buffer return HIGHWATER_ERROR_EXPIRED.
pub const HIGHWATER_OWNER_DEATH_RELEASE: u32 = 1;
/// This process becomes the owner: the memory stays, and the process answers its tickets.
pub const HIGHWATER_OWNER_DEATH_INHERIT: u32 = 2;

#[cfg(test)]
mod tests {
    use front::hal::numbers::CHOICES;

    /// The constants of this file, by name.
    fn written() -> Vec<(String, u64)> {
        let lines = include_str!("numbers.rs").lines().filter_map(|line| line.strip_prefix("pub const HIGHWATER_"));
        let parts = lines.filter_map(|line| Some((line.split_once(": ")?.0, line.split_once(" = ")?.1)));
        parts.filter_map(|(name, value)| Some((name.to_owned(), value.strip_suffix(';')?.parse().ok()?))).collect()
    }

    #[test]
    fn the_numbers_are_those_of_the_traits() {
        let groups = ["ERROR_", "CAPTURE_", "DATA_TYPE_"];
        let in_groups = |name: &str| groups.iter().any(|group| name.starts_with(group));
        let mut written = written();
        written.retain(|(name, _)| in_groups(name));
        let all = CHOICES.iter().flat_map(|(_, constants)| constants.iter());
        let known = all.map(|constant| (constant.name.to_owned(), constant.value));
        let mut known: Vec<_> = known.filter(|(name, _)| in_groups(name)).collect();
        written.sort();
        known.sort();
        assert_eq!(written, known);
    }
}
