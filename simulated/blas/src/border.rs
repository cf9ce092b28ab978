//! The border between foreign code and a look-alike: exported functions, and what they write for their callers. The drivers'
//! look-alikes have the same.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of an exported function, and gives 0 or the code that it failed with. A panic does not cross into foreign
/// code, it becomes the code `panicked`.
pub fn guarded(panicked: u32, body: impl FnOnce() -> Result<(), u32>) -> u32 {
    // Unwind safety: what a panicking call leaves half done is behind locks and atomics, of a slot or of the engine.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(answer) => answer.err().unwrap_or(0),
        Err(_) => panicked,
    }
}

/// Writes an answer. Where there is no place for it, that is the error.
///
/// # Errors
/// `no_place` for null.
///
/// # Safety
/// `place` is null or valid for a write.
pub unsafe fn put<T, E>(place: *mut T, value: T, no_place: E) -> Result<(), E> {
    if place.is_null() {
        return Err(no_place);
    }
    // SAFETY: the caller says that the place is valid when it is not null.
    unsafe { place.write(value) };
    Ok(())
}

/// Sets a mode that is 0 or 1.
///
/// # Errors
/// `no_mode` for another number.
pub fn set_switch<E>(switch: &mut u32, value: u32, no_mode: E) -> Result<(), E> {
    if value > 1 {
        return Err(no_mode);
    }
    *switch = value;
    Ok(())
}

/// Functions that a look-alike exports. `call` runs their bodies: it is given the name and the body, and gives the code. Before
/// it stands what callers promise about handles.
///
/// ```text
/// export! {
///     /// Handles are null or were given by `cublasCreate_v2`.
///     call -> u32;
///
///     /// Waits for the device.
///     fn cublasDestroy_v2(handle: *mut c_void) { ... }
/// }
/// ```
#[macro_export]
macro_rules! export {
    (
        #[$promise:meta]
        $call:ident -> $code:ty;
        $($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*
    ) => {
        $(
            #[doc = concat!("The vendor's `", stringify!($name), "`.")]
            $(#[$doc])*
            ///
            /// # Safety
            /// Pointers are null or valid for what the vendor's function of this name reads and writes.
            #[$promise]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> $code {
                $call(stringify!($name), move || $body)
            }
        )*
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code() {
        assert_eq!(guarded(9, || Ok(())), 0);
        assert_eq!(guarded(9, || Err(4)), 4);
        assert_eq!(guarded(9, || panic!("on purpose")), 9);
    }

    #[test]
    fn a_missing_place_is_the_callers_error() {
        let mut place = 1;
        // SAFETY: the first place is live, the second null.
        let answers = unsafe { [put(&mut place, 2, 7), put(std::ptr::null_mut::<i32>(), 2, 7)] };
        assert_eq!((place, answers), (2, [Ok(()), Err(7)]));
    }
}
