//! Names and texts of the codes, each with a zero byte at its end.

use highwater_simulated_engine::Code;

/// The codes of HIP alone, and the one with a text of HIP's own.
const OWN: &[(i32, &str, &str)] = &[
    (9, "hipErrorInvalidConfiguration\0", "invalid configuration argument\0"),
    (21, "hipErrorInvalidMemcpyDirection\0", "invalid copy direction for memcpy\0"),
    (35, "hipErrorInsufficientDriver\0", "driver version is insufficient for runtime version\0"),
    (100, "hipErrorNoDevice\0", "no ROCm-capable device is detected\0"),
];

/// Returns the name and the text of a code.
pub(crate) fn describe(code: i32) -> (&'static str, &'static str) {
    let own = OWN.iter().find(|text| text.0 == code).map(|text| (text.1, text.2));
    let known = own.or_else(|| Code::describe_hip(u32::try_from(code).ok()?));
    known.unwrap_or(("hipErrorUnknown\0", "unknown error\0"))
}
