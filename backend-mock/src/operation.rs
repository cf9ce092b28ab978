//! The operations of the mock: the calls that it counts, and can make fail.

use std::fmt;
use std::str::FromStr;

use highwater_hal::{Error, ErrorKind, Result, display_foreign};

macro_rules! operations {
    (name HostAllocator $method:ident) => { concat!("host_", stringify!($method)) };
    (name $trait:ident $method:ident) => { stringify!($method) };
    ($($trait:ident { $($variant:ident: $fn:tt $method:ident $arguments:tt -> $answer:ty;)* })*) => {
        /// A trait method of the mock, by name. The methods of `HostAllocator` have the prefix `host_`. All others have
        /// the names of their traits.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Operation {
            $($(#[doc = concat!("`", operations!(name $trait $method), "`")] $variant,)*)*
            /// `cpu_access`: an access of the CPU to page-locked memory that was reported to the race finder. It is no call, so
            /// it cannot fail, and no fault has its name.
            CpuAccess,
        }

        impl Operation {
            /// Every operation that is a call: all but [`Operation::CpuAccess`].
            pub const ALL: &'static [Self] = &[$($(Self::$variant,)*)*];

            /// Returns the name that faults and errors use.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $($(Self::$variant => operations!(name $trait $method),)*)*
                    Self::CpuAccess => "cpu_access",
                }
            }

            /// Returns the kind of error of a fault that names none: `OutOfMemory` for calls that create something,
            /// `Vendor` for the others.
            #[must_use]
            pub const fn usual_failure(self) -> ErrorKind {
                match self {
                    Self::CreateStream
                    | Self::CreateEvent
                    | Self::Allocate
                    | Self::ReserveAddresses
                    | Self::CreateMemory
                    | Self::CreateBlasHandle
                    | Self::HostAllocate
                    | Self::ExportMemory
                    | Self::OpenMemory
                    | Self::ImportMemory
                    | Self::ExportEvent
                    | Self::OpenEvent => ErrorKind::OutOfMemory,
                    _ => ErrorKind::Vendor,
                }
            }
        }
    };
}

highwater_hal::for_each_operation!(operations);

/// The number of all operations.
pub(crate) const COUNT: usize = Operation::CpuAccess as usize + 1;
// The armed operations are a set of bits in one word.
const _: () = assert!(COUNT <= 64);

impl Operation {
    /// Returns an error of this operation.
    #[cold]
    pub(crate) fn error(self, kind: ErrorKind, message: impl Into<String>) -> Error {
        Error::new(kind, self.name(), message)
    }

    /// Returns the error of an ability that is false: `Unsupported`.
    #[cold]
    pub(crate) fn lacks(self, ability: &str) -> Error {
        Error::lacks(self.name(), ability)
    }

    pub(crate) const fn bit(self) -> u64 {
        1 << self as u32
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl AsRef<str> for Operation {
    fn as_ref(&self) -> &str {
        self.name()
    }
}

impl FromStr for Operation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|operation| operation.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|operation| operation.name()).collect();
            Error::new(
                ErrorKind::InvalidArgument,
                "mock_operation",
                format!("no operation is named `{}`", display_foreign(name)),
            )
            .with_hint(format!("{}the operations are {}", did_you_mean(name, &known), known.join(", ")))
        })
    }
}

/// Returns a question for the name that a misspelled one probably means, or an empty text.
pub(crate) fn did_you_mean(name: &str, known: &[impl AsRef<str>]) -> String {
    // Two errors turn a name of three letters into almost any other.
    let most = (name.chars().count() / 3).min(2);
    let errors = known.iter().map(|known| (strsim::osa_distance(name, known.as_ref()), known.as_ref()));
    let nearest = errors.filter(|(errors, _)| *errors <= most).min_by_key(|(errors, _)| *errors);
    nearest.map_or_else(String::new, |(_, known)| format!("did you mean `{known}`? "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_operation_and_a_typo_names_the_known_ones() {
        for &operation in Operation::ALL {
            assert_eq!(operation.name().parse::<Operation>().unwrap(), operation);
        }
        assert!("cpu_access".parse::<Operation>().is_err(), "no call");
        let error = "alocate".parse::<Operation>().unwrap_err();
        assert!(error.message().contains("`alocate`") && error.hint().contains("allocate, free"), "{error}");
        assert!(error.hint().starts_with("did you mean `allocate`? "), "{error}");
        assert!("sleep".parse::<Operation>().unwrap_err().hint().starts_with("the operations are"));
    }
}
