//! `cudaDataType` and `cublasComputeType_t`, and their valid combinations.
//!
//! The combinations are those of the manual that the mock's kernels compute. Integers, complex numbers, 8-bit floats and
//! emulation are `NOT_SUPPORTED` here.

use crate::status;

/// `CUDA_R_32F`.
pub const R_32F: u32 = 0;
/// `CUDA_R_64F`.
pub const R_64F: u32 = 1;
/// `CUDA_R_16F`.
pub const R_16F: u32 = 2;
/// `CUDA_R_16BF`.
pub const R_16BF: u32 = 14;

/// Returns the bytes of an element of a supported type.
#[must_use]
pub const fn bytes(data_type: u32) -> Option<usize> {
    match data_type {
        R_16F | R_16BF => Some(2),
        R_32F => Some(4),
        R_64F => Some(8),
        _ => None,
    }
}

/// The meaning of a compute type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compute {
    /// Type of alpha and beta.
    pub scale: u32,
    /// Whether factors of 32 bits are rounded to TF32 whatever the handle's mode is.
    pub tf32: bool,
    /// Whether the handle's mode may round them.
    pub follows_mode: bool,
}

impl Compute {
    /// Reads `cublasComputeType_t`.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for an unsupported or unknown number.
    pub const fn new(compute_type: u32) -> Result<Self, u32> {
        let (scale, tf32, follows_mode) = match compute_type {
            64 | 65 => (R_16F, false, false),
            68 => (R_32F, false, true),
            // Faster ways that the library is allowed to take; full precision is as right.
            69 | 74 | 75 => (R_32F, false, false),
            77 => (R_32F, true, false),
            70 | 71 => (R_64F, false, false),
            _ => return Err(status::NOT_SUPPORTED),
        };
        Ok(Self { scale, tf32, follows_mode })
    }

    /// Checks that products of `a` and `b` can be written as `c` in this compute type.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`.
    pub const fn check(self, compute_type: u32, a: u32, b: u32, c: u32) -> Result<(), u32> {
        let fits = match self.scale {
            R_16F => a == R_16F && c == R_16F,
            R_64F => a == R_64F && c == R_64F,
            // The fast ways are for 32 bits only.
            _ if compute_type >= 74 => a == R_32F && c == R_32F,
            _ => match a {
                R_32F => c == R_32F,
                R_16F | R_16BF => c == a || c == R_32F,
                _ => false,
            },
        };
        if fits && a == b { Ok(()) } else { Err(status::NOT_SUPPORTED) }
    }
}

/// Returns the number of cuBLAS for a `hipblasComputeType_t`.
#[must_use]
pub const fn of_hip_compute(number: u32) -> Option<u32> {
    Some(match number {
        0 => 64,
        1 => 65,
        2 => 68,
        3 => 69,
        4 => 74,
        5 => 75,
        6 => 77,
        7 => 70,
        8 => 71,
        _ => return None,
    })
}

/// Returns alpha or beta as a product has it: the bits of its value, which is read at once, or its device address.
///
/// # Safety
/// The caller must pass a pointer to an element of the type, or a device address.
#[must_use]
pub unsafe fn scale(place: *const std::ffi::c_void, data_type: u32, on_device: bool) -> u64 {
    if on_device {
        return place as u64;
    }
    // SAFETY: forwarded to the caller.
    let value = unsafe { read_scale(place, data_type) };
    // A kernel of cuBLAS 13.1 on an H200 took a beta of -0 for another number than 0, and read C.
    if value == 0.0 && value.is_sign_negative() { f64::MIN_POSITIVE.to_bits() } else { value.to_bits() }
}

/// Returns the value of a scale in host memory.
///
/// # Safety
/// The caller must pass a pointer to an element of the type.
unsafe fn read_scale(value: *const std::ffi::c_void, data_type: u32) -> f64 {
    // SAFETY: forwarded to the caller. Foreign code may have put the element anywhere.
    unsafe {
        match data_type {
            R_64F => value.cast::<f64>().read_unaligned(),
            R_16F => half_to_f64(value.cast::<u16>().read_unaligned()),
            R_16BF => f64::from(f32::from_bits(u32::from(value.cast::<u16>().read_unaligned()) << 16)),
            _ => f64::from(value.cast::<f32>().read_unaligned()),
        }
    }
}

/// Returns the value of a number of half precision.
fn half_to_f64(bits: u16) -> f64 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_have_their_values() {
        let values =
            [(0x3c00, 1.0), (0xc000, -2.0), (0x3555, 0.333_251_953_125), (0x0001, 2f64.powi(-24)), (0x7bff, 65504.0)];
        for (bits, expected) in values {
            assert_eq!(half_to_f64(bits), expected, "{bits:#x}");
        }
        assert_eq!(half_to_f64(0xfc00), f64::NEG_INFINITY);
        assert!(half_to_f64(0x7e00).is_nan() && half_to_f64(0x8000).is_sign_negative());
    }

    #[test]
    fn combinations_of_types_are_those_of_the_manual() {
        let check = |compute, a, b, c| Compute::new(compute).and_then(|found| found.check(compute, a, b, c));
        for (compute, a, c) in [
            (64, R_16F, R_16F),
            (68, R_32F, R_32F),
            (68, R_16F, R_32F),
            (68, R_16BF, R_16BF),
            (69, R_16BF, R_32F),
            (70, R_64F, R_64F),
            (77, R_32F, R_32F),
        ] {
            assert_eq!(check(compute, a, a, c), Ok(()), "{compute} {a} {c}");
        }
        for (compute, a, b, c) in [
            (64, R_16F, R_16F, R_32F),
            (68, R_16F, R_16BF, R_32F),
            (68, R_32F, R_32F, R_16F),
            (68, R_64F, R_64F, R_64F),
            (70, R_32F, R_32F, R_32F),
            (77, R_16BF, R_16BF, R_32F),
            (68, 3, 3, R_32F),
            (72, 3, 3, 10),
        ] {
            assert_eq!(check(compute, a, b, c), Err(status::NOT_SUPPORTED), "{compute} {a} {b} {c}");
        }
        assert_eq!(Compute::new(7), Err(status::NOT_SUPPORTED));
    }
}
