//! Panics of the program's code in a thread of core: none of them ends the thread.
//!
//! The payload of a panic is a value of the program too, and its drop may panic. So no payload is dropped outside a catch.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// Runs code. Returns `None` if it panics.
pub(crate) fn contain<T>(code: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(code)).map_err(discard).ok()
}

/// Waits for the end of a thread. Returns whether it has panicked.
pub(crate) fn has_panicked(thread: JoinHandle<()>) -> bool {
    thread.join().map_err(discard).is_err()
}

/// Drops the payload of a panic. A payload of that drop stays allocated, so this ends.
fn discard(payload: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(second);
    }
}

#[cfg(test)]
mod tests {
    use super::{contain, has_panicked};

    /// Panics when it is dropped, with itself as the payload.
    struct Endless;

    impl Drop for Endless {
        fn drop(&mut self) {
            std::panic::panic_any(Self);
        }
    }

    #[test]
    fn no_payload_of_a_panic_escapes() {
        assert_eq!(contain(|| 5), Some(5));
        assert_eq!(contain(|| -> u8 { panic!("on purpose") }), None);
        assert!(contain(|| drop(Endless)).is_none());
        assert!(has_panicked(std::thread::spawn(|| drop(Endless))));
        assert!(!has_panicked(std::thread::spawn(|| ())));
    }
}
