//! What of a function's type the ABI sees: sizes and classes of its result and arguments. The libraries' tests compare
//! theirs with those of bindings that were generated from the vendor's headers.

/// Size, and `*`, `f` or `i` for a pointer, a floating-point number, or anything else.
pub type Class = (usize, char);

fn class<T>() -> Class {
    let class = match std::any::type_name::<T>() {
        pointer if pointer.starts_with('*') => '*',
        "f32" | "f64" => 'f',
        _ => 'i',
    };
    (size_of::<T>(), class)
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
