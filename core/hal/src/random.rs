//! Random bytes of the operating system.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random::<16>("test").unwrap(), random::<16>("test").unwrap());
    }
}
