//! Tests that need a process of their own, because what a process does to the driver stays with it; and which driver
//! they run over.

use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use highwater_simulated_harness::isolated::{outside, version};
use libloading::Library;

/// The driver to run the scenarios over, in place of the simulated one.
const DRIVER: &str = "HIGHWATER_TEST_DRIVER";

fn real_driver() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let open = || std::env::var_os(DRIVER).map(|name| unsafe { Library::new(name) }.unwrap());
    LIBRARY.get_or_init(open).as_ref()
}

/// Whether the scenarios run over the simulated driver. What only it has, and what a real one dies of, is left out
/// otherwise.
pub(crate) fn is_simulated() -> bool {
    real_driver().is_none()
}

/// The function to call for one of the simulated driver, by how many arguments it takes.
pub(crate) mod choose {
    use super::real_driver;

    fn chosen<F: Copy>(simulated: F, symbol: &str) -> F {
        real_driver().map_or(simulated, |library| *unsafe { library.get::<F>(symbol) }.unwrap())
    }

    macro_rules! choose {
        ($($name:ident($($argument:ident)*);)*) => {
            $(
                pub(crate) fn $name<$($argument),*>(
                    simulated: unsafe extern "C" fn($($argument),*) -> u32,
                    symbol: &str,
                ) -> unsafe extern "C" fn($($argument),*) -> u32 {
                    chosen(simulated, symbol)
                }
            )*
        };
    }

    choose! {
        none();
        one(A);
        two(A B);
        three(A B C);
        four(A B C D);
        five(A B C D E);
        six(A B C D E F);
    }
}

static DIFFERENCES: AtomicU32 = AtomicU32::new(0);

/// Compares what a call gave with what it should. Over a real driver a difference is told and the scenario goes on, so
/// that one run finds all of them.
#[track_caller]
pub(crate) fn compare<A: Debug + PartialEq<B> + ?Sized, B: Debug + ?Sized>(
    seen: &A,
    expected: &B,
    words: &str,
    what: String,
) {
    if seen == expected {
        return;
    }
    let text = format!("{words}: {seen:?}, expected {expected:?} {what}");
    assert!(!is_simulated(), "{text}");
    eprintln!("difference at {}: {text}", std::panic::Location::caller());
    DIFFERENCES.fetch_add(1, Ordering::SeqCst);
}

/// Runs `body` in a process of its own with these settings. `name` is the test's path.
#[track_caller]
pub(crate) fn alone(name: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if version().is_some() {
        body();
        assert_eq!(DIFFERENCES.load(Ordering::SeqCst), 0, "differences");
        return;
    }
    outside(name, &[], settings, None);
}

/// The same for what only the simulated driver has.
#[track_caller]
pub(crate) fn alone_simulated(name: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if is_simulated() {
        alone(name, settings, body);
    }
}
