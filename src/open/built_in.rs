//! The backends that are part of the program, by feature.

use std::sync::Arc;

use highwater_hal::Backend;
use highwater_hal::Unavailable;

use super::choice::{Contender, Failure, Opening, State};
use super::report::{Origin, Outcome};

/// A backend that this version knows, built in or not.
pub(super) struct Known {
    /// Its name, and the name of its feature.
    pub(super) name: &'static str,
    /// Whether it drives hardware.
    pub(super) real: bool,
    /// Opens it; `None` if its feature is off.
    pub(super) open: Option<Opener>,
}

type Opener = fn() -> Result<Arc<dyn Backend>, Unavailable>;

/// The backends, in order of preference.
pub(super) static KNOWN: [Known; 3] = [
    Known {
        name: "cuda",
        real: true,
        #[cfg(feature = "cuda")]
        open: Some(highwater_cuda::open),
        #[cfg(not(feature = "cuda"))]
        open: None,
    },
    Known {
        name: "rocm",
        real: true,
        #[cfg(feature = "rocm")]
        open: Some(highwater_rocm::open),
        #[cfg(not(feature = "rocm"))]
        open: None,
    },
    Known {
        name: "mock",
        real: false,
        #[cfg(feature = "mock")]
        open: Some(open_mock),
        #[cfg(not(feature = "mock"))]
        open: None,
    },
];

/// Opens the mock as the environment describes it.
#[cfg(feature = "mock")]
fn open_mock() -> Result<Arc<dyn Backend>, Unavailable> {
    let options = highwater_mock::MockOptions::from_environment()?;
    Ok(highwater_mock::MockGpu::open(options)?)
}

/// Returns the names of the built-in backends, in order of preference.
///
/// ```
/// assert_eq!(highwater::opening::backends().contains(&"cuda"), cfg!(feature = "cuda"));
/// ```
#[must_use]
pub fn backends() -> &'static [&'static str] {
    &[
        #[cfg(feature = "cuda")]
        "cuda",
        #[cfg(feature = "rocm")]
        "rocm",
        #[cfg(feature = "mock")]
        "mock",
    ]
}

impl From<Unavailable> for Failure {
    fn from(unavailable: Unavailable) -> Self {
        let outcome = Outcome::of(&unavailable.error);
        Self { outcome, error: unavailable.error, tried: unavailable.tried, notes: Vec::new() }
    }
}

/// Refuses to open anything while a plugin's constructor blocks the system's loader: a vendor's library would not open, and the
/// mock's threads would not start, so the call would hang.
pub(super) fn check_loader() -> Result<(), Failure> {
    #[cfg(feature = "plugins")]
    if let Some(error) = highwater_plugin::blocked() {
        return Err(Failure::new(Outcome::Failed, error));
    }
    Ok(())
}

impl From<&'static Known> for Contender<'_> {
    fn from(known: &'static Known) -> Self {
        let open = |open: Opener| {
            State::Ready(Box::new(move || {
                check_loader()?;
                Ok(Opening { backend: open()?, name: None, notes: Vec::new() })
            }))
        };
        Self {
            name: known.name.into(),
            origin: Origin::BuiltIn,
            given: false,
            hidden: false,
            real: Some(known.real),
            state: known.open.map_or(State::Off, open),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_names_agrees_with_the_table() {
        let built_in: Vec<&str> = KNOWN.iter().filter(|known| known.open.is_some()).map(|known| known.name).collect();
        assert_eq!(backends(), built_in);
    }
}
