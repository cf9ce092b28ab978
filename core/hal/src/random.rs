//! Random numbers: those of the operating system, and a generator that repeats.

use crate::error::{Error, ErrorKind, Result};

/// Returns random bytes of the operating system.
///
/// # Errors
/// [`ErrorKind::OperatingSystem`] if the system refuses.
pub fn random<const N: usize>(operation: &'static str) -> Result<[u8; N]> {
    let mut bytes = [0_u8; N];
    let mut filled = 0;
    while filled < N {
        let rest = &mut bytes[filled..];
        // SAFETY: the call writes at most `rest.len()` bytes to `rest`.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => filled += got,
            Err(_) => {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    let message = format!("the system gives no random numbers: {error}");
                    return Err(Error::new(ErrorKind::OperatingSystem, operation, message)
                        .with_hint("a sandbox may refuse `getrandom`: allow it"));
                }
            }
        }
    }
    Ok(bytes)
}

/// The SplitMix64 generator of Steele, Lea and Flood ("Fast splittable pseudorandom number generators", OOPSLA 2014).
///
/// Equal seeds give equal numbers. Not for secrets.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator with this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub const fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random::<16>("test").unwrap(), random::<16>("test").unwrap());
    }
    #[test]
    fn the_sequence_of_a_seed_is_the_published_one() {
        // The first outputs for the seed 1234567, as in the reference implementation's test vector.
        let mut generator = SplitMix64::new(1_234_567);
        let first: [u64; 3] = std::array::from_fn(|_| generator.draw());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
