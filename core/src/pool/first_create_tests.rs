//! Tests of the first creation. `tests/loom_first.rs` tries the interleavings.

use std::time::Duration;

use super::first_create::FirstCreate;

#[test]
fn only_the_first_creation_is_waited_for() {
    let gate = FirstCreate::new();
    let first = gate.enter();
    assert!(first.is_first() && !first.has_waited());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| gate.enter().has_waited());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!other.is_finished());
        drop(first);
        other.join().unwrap();
    });
    let later = gate.enter();
    assert!(!later.is_first() && !later.has_waited());
}

#[test]
fn after_a_panic_in_the_first_creation_the_others_create() {
    let gate = FirstCreate::new();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _entry = gate.enter();
        panic!("the vendor's library panics");
    }));
    assert!(panic.is_err() && !gate.enter().has_waited());
}
