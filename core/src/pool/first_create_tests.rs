//! Tests of the first creation. `tests/loom_first.rs` tries the interleavings.

use std::time::Duration;

use super::first_create::{Demand, FirstCreate};

#[test]
fn only_the_first_creation_is_waited_for() {
    let gate = FirstCreate::new();
    let first = gate.enter(None);
    assert!(first.is_first() && !first.has_waited());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| gate.enter(None).has_waited());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!other.is_finished());
        drop(first);
        other.join().unwrap();
    });
    let later = gate.enter(None);
    assert!(!later.is_first() && !later.has_waited());
}

#[test]
fn after_a_panic_in_the_first_creation_the_others_create() {
    let gate = FirstCreate::new();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _entry = gate.enter(None);
        panic!("the vendor's library panics");
    }));
    assert!(panic.is_err() && !gate.enter(None).has_waited());
}

#[test]
fn the_demand_counts_threads_and_the_distinct_streams_that_lack_a_workspace() {
    let gate = FirstCreate::new();
    let first = gate.enter(Some(1));
    assert_eq!(first.demand(), Demand::default());
    std::thread::scope(|scope| {
        for stream in [Some(1), Some(2), Some(2), Some(3), None] {
            let gate = &gate;
            scope.spawn(move || gate.enter(stream));
        }
        while first.demand().handles < 5 {
            std::thread::yield_now();
        }
        assert_eq!(first.demand(), Demand { handles: 5, workspaces: 3 });
        drop(first);
    });
    assert_eq!(gate.enter(Some(4)).demand(), Demand::default());
}
