//! Checks tables of vendor calls against bindings that were generated from a vendor's headers. Each call must have its
//! symbol, and arguments and a result of the same size and kind (integer or floating point). For unit tests.

/// How an argument is passed: its size, and whether it uses a floating-point register.
pub type Class = (usize, bool);

fn class<T>() -> Class {
    let name = std::any::type_name::<T>();
    (size_of::<T>(), name == "f32" || name == "f64")
}

/// The arguments and the result of a function.
pub trait Signature: Copy {
    /// The sizes of the result and the arguments.
    const SIZES: &'static [usize];

    /// Returns how the result and the arguments are passed.
    fn classes() -> Vec<Class>;
}

macro_rules! signature {
    ($($argument:ident)*) => {
        impl<Answer, $($argument),*> Signature for unsafe extern "C" fn($($argument),*) -> Answer {
            const SIZES: &'static [usize] = &[size_of::<Answer>(), $(size_of::<$argument>()),*];

            fn classes() -> Vec<Class> {
                vec![class::<Answer>(), $(class::<$argument>()),*]
            }
        }
        impl<Answer, $($argument),*> Signature for unsafe fn($($argument),*) -> Answer {
            const SIZES: &'static [usize] = &[size_of::<Answer>(), $(size_of::<$argument>()),*];

            fn classes() -> Vec<Class> {
                vec![class::<Answer>(), $(class::<$argument>()),*]
            }
        }
    };
}

macro_rules! all_signatures {
    ($first:ident $($rest:ident)*) => {
        signature!($first $($rest)*);
        all_signatures!($($rest)*);
    };
    () => {
        signature!();
    };
}

all_signatures!(A B C D E F G H I J K L M N O P Q R S T U V W);

/// Returns the classes of a table's field. The field's type suffices, so no table is needed.
pub fn declared<Table, Call: Signature>(_: fn(&Table) -> Call) -> Vec<Class> {
    Call::classes()
}

/// Returns the classes of an optional field.
pub fn declared_optional<Table, Call: Signature>(_: fn(&Table) -> Option<Call>) -> Vec<Class> {
    Call::classes()
}

/// Returns the classes of a function in a header.
pub fn in_header<Call: Signature>(_: Call) -> Vec<Class> {
    Call::classes()
}

/// Returns the sizes of a table's field.
#[must_use]
pub const fn sizes<Table, Call: Signature>(_: fn(&Table) -> Call) -> &'static [usize] {
    Call::SIZES
}

/// Returns the sizes of an optional field.
#[must_use]
pub const fn sizes_optional<Table, Call: Signature>(_: fn(&Table) -> Option<Call>) -> &'static [usize] {
    Call::SIZES
}

/// Returns the sizes of a function in a header.
#[must_use]
pub const fn sizes_in_header<Call: Signature>(_: Call) -> &'static [usize] {
    Call::SIZES
}

/// Returns whether two functions have arguments and results of the same sizes.
#[must_use]
pub const fn alike(one: &[usize], other: &[usize]) -> bool {
    let mut index = 0;
    while index < one.len() && index < other.len() && one[index] == other[index] {
        index += 1;
    }
    index == one.len() && index == other.len()
}

/// A field of a table, the vendor's symbol, the classes in the table and the classes in the header.
pub type Pair = (&'static str, &'static str, Vec<Class>, Vec<Class>);

/// Checks at compile time that a table's fields and the functions of a binding crate have arguments and results of the
/// same sizes. The functions are of the kind `rust` or `c`. None of them is linked.
#[macro_export]
macro_rules! abi_sizes {
    (@kind rust ($($argument:tt),*)) => { unsafe fn($($argument),*) -> _ };
    (@kind c ($($argument:tt),*)) => { unsafe extern "C" fn($($argument),*) -> _ };
    (
        $table:ty, $kind:ident $($sys:ident)::+,
        required { $($field:ident = $symbol:ident($($argument:tt),*);)* }
        optional { $($optional:ident = $optional_symbol:ident($($optional_argument:tt),*);)* }
    ) => {
        const _: () = {
            use $crate::abi_check;
            use $($sys)::+ as sys;
            $(assert!(
                abi_check::alike(
                    abi_check::sizes(|table: &$table| table.$field),
                    abi_check::sizes_in_header(sys::$symbol as $crate::abi_sizes!(@kind $kind ($($argument),*))),
                ),
                stringify!($field),
            );)*
            $(assert!(
                abi_check::alike(
                    abi_check::sizes_optional(|table: &$table| table.$optional),
                    abi_check::sizes_in_header(
                        sys::$optional_symbol as $crate::abi_sizes!(@kind $kind ($($optional_argument),*))
                    ),
                ),
                stringify!($optional),
            );)*
        };
    };
}

/// Checks the sizes, and returns the pairs of fields and functions for [`check`].
#[macro_export]
macro_rules! abi_pairs {
    (
        $table:ty, $kind:ident $($sys:ident)::+,
        required { $($field:ident = $symbol:ident($($argument:tt),*);)* }
        optional { $($optional:ident = $optional_symbol:ident($($optional_argument:tt),*);)* }
    ) => {{
        use $crate::abi_check;
        use $($sys)::+ as sys;
        $crate::abi_sizes! { $table, $kind $($sys)::+,
            required { $($field = $symbol($($argument),*);)* }
            optional { $($optional = $optional_symbol($($optional_argument),*);)* }
        }
        let pairs: Vec<abi_check::Pair> = vec![
            $((
                stringify!($field),
                stringify!($symbol),
                abi_check::declared(|table: &$table| table.$field),
                abi_check::in_header(sys::$symbol as $crate::abi_sizes!(@kind $kind ($($argument),*))),
            ),)*
            $((
                stringify!($optional),
                stringify!($optional_symbol),
                abi_check::declared_optional(|table: &$table| table.$optional),
                abi_check::in_header(
                    sys::$optional_symbol as $crate::abi_sizes!(@kind $kind ($($optional_argument),*))
                ),
            ),)*
        ];
        pairs
    }};
}

/// Checks a table's fields against the pairs. Every field, except those in `apart`, must be in one pair under its own
/// symbol.
///
/// # Panics
/// If a field and its function differ.
pub fn check(names: &[(&str, &str)], symbol: fn(&str) -> String, pairs: &[Pair], apart: &[&str]) {
    for (field, name) in names {
        if apart.contains(field) {
            continue;
        }
        let found = pairs.iter().find(|pair| pair.0 == *field);
        let Some((_, expected, declared, in_header)) = found else { panic!("{field} is held against nothing") };
        assert_eq!(symbol(name), *expected, "{field}");
        assert_eq!(declared, in_header, "{field}");
    }
    assert_eq!(pairs.len() + apart.len(), names.len());
}
