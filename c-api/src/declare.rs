//! The macros that declare functions and structs, and keep their text for the header.

/// A function of the header.
#[cfg(test)]
pub(crate) struct Function {
    pub(crate) docs: &'static [&'static str],
    pub(crate) name: &'static str,
    pub(crate) arguments: &'static [(&'static str, &'static str)],
}

/// A struct of the header.
#[cfg(test)]
pub(crate) struct Struct {
    pub(crate) docs: &'static [&'static str],
    pub(crate) name: &'static str,
    pub(crate) fields: &'static [(&'static [&'static str], &'static str, &'static str)],
}

/// Declares functions that return a status. A body may use its arguments as the header allows, and returns `Result<()>`.
macro_rules! api {
    ($($(#[doc = $doc:literal])+ fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)+) => {
        $(
            $(#[doc = $doc])+
            // SAFETY: no other symbol has this name.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> i32 {
                crate::failure::call(stringify!($name), |operation| {
                    let _ = operation;
                    #[allow(unused_unsafe, reason = "some functions only pass numbers")]
                    // SAFETY: The caller passes pointers and handles as the header describes them.
                    unsafe { crate::failure::naming(operation, || $body) }
                })
            }
        )+

        #[cfg(test)]
        pub(crate) const FUNCTIONS: &[crate::declare::Function] = &[$(crate::declare::Function {
            docs: &[$($doc),+],
            name: stringify!($name),
            arguments: &[$((stringify!($argument), stringify!($type))),*],
        }),+];
    };
}

/// Declares structs that the caller fills. The field `size` is added before the others.
macro_rules! structs {
    ($($(#[doc = $doc:literal])+ struct $name:ident { $($(#[doc = $field_doc:literal])+ $field:ident: $type:ty,)+ })+) => {
        $(
            $(#[doc = $doc])+
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            pub(crate) struct $name {
                /// Bytes of this struct.
                pub(crate) size: usize,
                $($(#[doc = $field_doc])+ pub(crate) $field: $type,)+
            }
        )+

        #[cfg(test)]
        pub(crate) const STRUCTS: &[crate::declare::Struct] = &[$(crate::declare::Struct {
            docs: &[$($doc),+],
            name: stringify!($name),
            fields: &[$((&[$($field_doc),+], stringify!($field), stringify!($type))),+],
        }),+];
    };
}

pub(crate) use {api, structs};
