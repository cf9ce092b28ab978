//! The functions of a vendor's library, by their symbols.

use std::error::Error;
use std::ffi::{CStr, c_char};

use libloading::Library;

use crate::Answer;

/// Opens the library that `variable` names, else the first one of `names` that the loader finds.
///
/// # Errors
/// Why each of them does not open.
pub fn open(variable: &str, names: &[&str]) -> Answer<Library> {
    let given = std::env::var(variable).ok().filter(|value| !value.is_empty());
    let mut reasons = Vec::new();
    for name in given.as_deref().map_or(names, |_| &[]).iter().copied().chain(given.as_deref()) {
        // SAFETY: the constructors of the vendors' libraries may run in any process.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(error.source().map_or_else(|| error.to_string(), ToString::to_string)),
        }
    }
    Err(reasons.join("; "))
}

/// Calls a function that returns the name or the text of a code.
///
/// # Errors
/// Why there is no such function.
pub fn text_of<C>(library: &Library, function: &str, code: C) -> Answer<String> {
    // SAFETY: functions of such names have this type, and return a string that is never freed.
    unsafe {
        let function = library.get::<unsafe extern "C" fn(C) -> *const c_char>(function.as_bytes());
        Ok(CStr::from_ptr(function.map_err(|error| error.to_string())?(code)).to_string_lossy().into_owned())
    }
}

/// Declares functions of a library that return a code. `get` panics if the library or a symbol is missing, `open` says why.
///
/// ```text
/// library! {
///     /// The driver.
///     Driver: u32, "HIGHWATER_CUDA_LIBRARY", &["libcuda.so.1"];
///     cuInit(u32);
/// }
/// ```
#[macro_export]
macro_rules! library {
    (
        $(#[$doc:meta])* $type:ident: $code:ty, $variable:expr, $files:expr;
        $($name:ident($($argument:ty),* $(,)?);)*
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the symbols have the vendor's names")]
        pub(crate) struct $type {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $code,)*
            #[allow(dead_code, reason = "most libraries are only kept open")]
            pub(crate) library: libloading::Library,
        }

        impl $type {
            /// Returns the functions, or why the library does not open.
            pub(crate) fn open() -> Result<&'static Self, String> {
                static TABLE: std::sync::OnceLock<Result<$type, String>> = std::sync::OnceLock::new();
                TABLE.get_or_init(|| {
                    let library = $crate::library::open($variable, $files)?;
                    // SAFETY: the vendor documents these types for these symbols.
                    unsafe {
                        Ok(Self {
                            $($name: *library
                                .get(concat!(stringify!($name), "\0").as_bytes())
                                .map_err(|_| concat!("the symbol `", stringify!($name), "` is missing").to_owned())?,)*
                            library,
                        })
                    }
                }).as_ref().map_err(Clone::clone)
            }

            /// Returns the functions of a library that is known to be there.
            pub(crate) fn get() -> &'static Self {
                Self::open().unwrap_or_else(|reason| panic!("{}: {reason}", stringify!($type)))
            }
        }
    };
}

/// Calls a function of a library that the caller has in scope, and returns its code.
#[macro_export]
macro_rules! code {
    ($library:ident.$name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are live, or wrong in a way that the function reports.
        unsafe { ($library::get().$name)($($argument),*) }
    }};
}

/// Calls a function of a library that the caller has in scope, and asserts that it succeeds.
#[macro_export]
macro_rules! ok {
    ($library:ident.$name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!($crate::code!($library.$name($($argument),*)), 0, stringify!($name))
    };
}
