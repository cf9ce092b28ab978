//! The C boundary of every simulated library: exported functions, and the results that they write for their callers.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of an exported function and returns 0 or its code. A panic becomes the code `panicked`, because none may
/// unwind into foreign code.
pub fn guarded(panicked: u32, body: impl FnOnce() -> Result<(), u32>) -> u32 {
    // Unwind safety: what a panicking call leaves half done is behind locks and atomics, of a slot or of the engine.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(answer) => answer.err().unwrap_or(0),
        Err(_) => panicked,
    }
}

/// Writes a result.
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

/// Writes the value of an expression to the place that an exported function was given for it; the caller's `INVALID_VALUE`
/// for null.
#[macro_export]
macro_rules! answer {
    ($place:ident = $value:expr) => {{
        let answer = $value;
        // SAFETY: the caller of the exported function must pass null or a valid place.
        unsafe { $crate::border::put($place, answer, INVALID_VALUE) }
    }};
}

/// Makes a value and writes the address of its slot. Without a place, returns the caller's `INVALID_VALUE` and makes nothing.
#[macro_export]
macro_rules! create {
    ($place:ident in $slots:expr, $value:expr) => {
        if $place.is_null() { Err(INVALID_VALUE) } else { $crate::answer!($place = $slots.insert($value)) }
    };
}

/// Runs a closure on the state of a handle, by the caller's function `with`.
#[macro_export]
macro_rules! on {
    ($handle:ident, $body:expr) => {
        // SAFETY: the caller of the exported function must pass null or a handle of this library.
        unsafe { with($handle, $body) }
    };
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

/// An exported function, by its symbol.
#[derive(Debug)]
pub struct Function {
    symbol: &'static str,
    address: *mut c_void,
}

// SAFETY: nothing writes through the address of a function.
unsafe impl Sync for Function {}

impl Function {
    /// A function and its symbol.
    #[must_use]
    pub const fn new(symbol: &'static str, address: *mut c_void) -> Self {
        Self { symbol, address }
    }

    /// Returns the symbol.
    #[must_use]
    pub const fn symbol(&self) -> &'static str {
        self.symbol
    }

    /// Returns the address.
    #[must_use]
    pub const fn address(&self) -> *mut c_void {
        self.address
    }
}

/// Exports functions of a simulated library. `call` receives the name and the body of a function, runs the body, and
/// returns the code. The doc line before it states the callers' promise about handles.
///
/// `listed in NAME` makes a list of the functions. `checked in NAME against PATH` makes a test's function, which returns
/// each function's type beside that of the function of the same name in bindings of the vendor's header. The brackets
/// hold the kind of function that the bindings declare.
///
/// ```text
/// export! {
///     /// The caller must pass null or a handle from `cublasCreate_v2`.
///     call -> u32;
///     listed in FUNCTIONS;
///     checked in signatures against cudarc::cublas::sys, [unsafe fn];
///
///     /// Waits for the device.
///     fn cublasDestroy_v2(handle: *mut c_void) { ... }
/// }
/// ```
#[macro_export]
macro_rules! export {
    (@listed [] $($rest:tt)*) => {};
    (@listed [$list:ident] $($name:ident)*) => {
        pub(crate) static $list: &[$crate::border::Function] = &[
            $($crate::border::Function::new(stringify!($name), $name as *mut ::std::ffi::c_void)),*
        ];
    };
    (@checked [] $($rest:tt)*) => {};
    (@checked [$check:ident, $vendor:path, $kind:tt] $($name:ident $arguments:tt)*) => {
        #[cfg(test)]
        pub(crate) fn $check() -> $crate::signature::Pairs {
            use $vendor as vendor;
            Vec::from([$($crate::export!(@pair $kind vendor $name $arguments)),*])
        }
    };
    (@pair [$($kind:tt)*] $vendor:ident $name:ident ($($argument:ident)*)) => {{
        use $crate::signature::Signature;
        let ours = $name as unsafe extern "C" fn($($crate::export!(@any $argument)),*) -> _;
        let theirs = $vendor::$name as $($kind)*($($crate::export!(@any $argument)),*) -> _;
        (stringify!($name), [ours.classes(), theirs.classes()])
    }};
    (@any $argument:ident) => { _ };
    (
        #[$promise:meta]
        $call:ident -> $code:ty;
        $(listed in $list:ident;)?
        $(checked in $check:ident against $vendor:path, $kind:tt;)?
        $($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*
    ) => {
        $(
            #[doc = concat!("The vendor's `", stringify!($name), "`.")]
            $(#[$doc])*
            ///
            /// # Safety
            /// The caller must pass pointers that are null or valid for what the vendor's function reads and writes.
            #[$promise]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> $code {
                $call(stringify!($name), move || $body)
            }
        )*
        $crate::export!(@listed [$($list)?] $($name)*);
        $crate::export!(@checked [$($check, $vendor, $kind)?] $($name ($($argument)*))*);
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
