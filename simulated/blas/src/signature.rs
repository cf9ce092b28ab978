//! What of a function's type the ABI sees: sizes and classes of its result and arguments. The libraries' tests compare
//! theirs with those of bindings that were generated from the vendor's headers.

/// Size, alignment, and `*`, `f` or `i` for a pointer, a floating-point number, or another type.
pub type Class = (usize, usize, char);

/// Functions by name, each with the classes of the simulated library and those of the vendor's header.
pub type Pairs = Vec<(&'static str, [Vec<Class>; 2])>;

/// Compares the functions of simulated libraries with those of the vendor's header.
///
/// # Panics
/// For a function that differs.
pub fn check(functions: &[Pairs]) {
    for (name, [ours, theirs]) in functions.iter().flatten() {
        assert_eq!(ours, theirs, "{name}");
    }
}

/// Pairs functions in scope that `export!` does not pair: those with other results or other names than the vendor's.
#[macro_export]
macro_rules! pairs {
    (@one [$($kind:tt)*] $vendor:ident $name:ident $theirs:ident ($($argument:tt),*)) => {{
        use $crate::signature::Signature;
        let ours = $name as unsafe extern "C" fn($($argument),*) -> _;
        let theirs = $vendor::$theirs as $($kind)*($($argument),*) -> _;
        (stringify!($name), [ours.classes(), theirs.classes()])
    }};
    ($vendor:path, $kind:tt: $($name:ident = $theirs:ident $arguments:tt;)*) => {{
        use $vendor as vendor;
        Vec::from([$($crate::pairs!(@one $kind vendor $name $theirs $arguments)),*])
    }};
}

fn class<T>() -> Class {
    let class = match std::any::type_name::<T>() {
        pointer if pointer.starts_with('*') => '*',
        "f32" | "f64" => 'f',
        _ => 'i',
    };
    (size_of::<T>(), align_of::<T>(), class)
}

/// A function pointer.
pub trait Signature {
    /// The classes of the result and the arguments.
    fn classes(self) -> Vec<Class>;
}

macro_rules! signatures {
    ($($argument:ident)*) => {
        signatures!(@ $($argument)*);
        signatures!(# $($argument)*);
    };
    (#) => {};
    (# $first:ident $($argument:ident)*) => { signatures!($($argument)*); };
    (@ $($argument:ident)*) => {
        impl<R, $($argument),*> Signature for unsafe extern "C" fn($($argument),*) -> R {
            fn classes(self) -> Vec<Class> {
                Vec::from([class::<R>(), $(class::<$argument>()),*])
            }
        }
        impl<R, $($argument),*> Signature for unsafe fn($($argument),*) -> R {
            fn classes(self) -> Vec<Class> {
                Vec::from([class::<R>(), $(class::<$argument>()),*])
            }
        }
    };
}

signatures!(A B C D E F G H I J K L M N O P Q S T U V W X Y);
