//! Calls of the backend in several threads, where the vendor is slow.
//!
//! The export or the import of a handle takes up to a millisecond on some machines, and 20 us on others. A batch has many of
//! them. The calling thread makes one call at a time. It starts helpers after two slow calls in a row; the first may be of an earlier
//! batch. Calls beside helpers are not timed, because they may only wait for each other.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Duration of a call that makes helpers worthwhile: several times the start of a thread.
const SLOW: Duration = Duration::from_micros(100);
/// Maximum number of threads, the calling one included.
const MOST_THREADS: usize = 4;

/// Passes each item to `work` once, and returns the results in the order of the items. `slow` reports whether the last call that was made
/// alone was slow.
pub(super) fn spread<I: Send, O: Send>(items: Vec<I>, slow: &AtomicBool, work: impl Fn(I) -> O + Sync) -> Vec<O> {
    let mut results = Vec::with_capacity(items.len());
    let mut items = items.into_iter();
    // Relaxed: the flag only chooses how the calls are made.
    let mut was_slow = slow.load(Ordering::Relaxed);
    loop {
        let Some(item) = items.next() else { return results };
        let started = Instant::now();
        results.push(work(item));
        let is_slow = started.elapsed() >= SLOW;
        slow.store(is_slow, Ordering::Relaxed);
        if is_slow && was_slow {
            break;
        }
        was_slow = is_slow;
    }
    let rest: Vec<_> = items.map(|item| Mutex::new((Some(item), None))).collect();
    if rest.is_empty() {
        return results;
    }
    let next = AtomicUsize::new(0);
    let help = || {
        // Relaxed: the locks order the items and the results.
        while let Some(place) = rest.get(next.fetch_add(1, Ordering::Relaxed)) {
            // The lock is not held during the call.
            let Some(item) = place.lock().0.take() else { continue };
            let result = work(item);
            place.lock().1 = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..MOST_THREADS.min(rest.len()) {
            let helper = std::thread::Builder::new().name("highwater-spread".to_owned());
            // Without another thread, this one does everything.
            if helper.spawn_scoped(scope, help).is_err() {
                break;
            }
        }
        help();
    });
    results.extend(rest.into_iter().filter_map(|place| place.into_inner().1));
    results
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn results_come_in_order_from_slow_and_from_fast_calls() {
        for slow in [usize::MAX, 0, 7] {
            let work = |item: usize| {
                if item >= slow {
                    std::thread::sleep(SLOW * 2);
                }
                item * 3
            };
            for count in [0, 1, 2, 40] {
                for before in [false, true] {
                    let expected: Vec<_> = (0..count).map(|item| item * 3).collect();
                    let is_slow = AtomicBool::new(before);
                    assert_eq!(spread((0..count).collect(), &is_slow, work), expected);
                    // The flag is that of the calls that were made.
                    assert!(count == 0 || slow >= count || is_slow.into_inner(), "{slow} {count} {before}");
                }
            }
        }
    }

    #[test]
    fn calls_that_are_fast_again_are_made_by_one_thread() {
        let slow = AtomicBool::new(true);
        // A busy machine may stop a thread in the middle of a call, which then looks slow.
        let became_fast = (0..1000).any(|_| {
            spread((0..8).collect(), &slow, |_: i32| ());
            !slow.load(Ordering::Relaxed)
        });
        assert!(became_fast);
    }

    #[test]
    fn calls_that_would_only_wait_for_each_other_are_made_by_one_thread() {
        let (slow, driver) = (AtomicBool::new(true), Mutex::new(()));
        let threads = Mutex::new(HashSet::new());
        let work = |_: i32| {
            threads.lock().insert(std::thread::current().id());
            let _driver = driver.lock();
            let end = Instant::now() + SLOW / 2;
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        };
        let one_thread = (0..100).any(|_| {
            threads.lock().clear();
            spread((0..20).collect(), &slow, work);
            threads.lock().len() == 1 && !slow.load(Ordering::Relaxed)
        });
        assert!(one_thread);
    }

    #[test]
    fn slow_calls_run_at_the_same_time() {
        let running = AtomicUsize::new(0);
        let most = AtomicUsize::new(0);
        let threads = Mutex::new(HashSet::new());
        spread((0..24).collect(), &AtomicBool::new(false), |_: i32| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            threads.lock().insert(std::thread::current().id());
            std::thread::sleep(Duration::from_millis(5));
            running.fetch_sub(1, Ordering::SeqCst);
        });
        let most = most.into_inner();
        assert!((2..=MOST_THREADS).contains(&most), "{most} at once");
        assert!(threads.into_inner().len() <= MOST_THREADS);
    }
}
