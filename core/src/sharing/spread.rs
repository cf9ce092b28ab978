//! Calls of the backend in several threads, where the vendor is slow.
//!
//! The export or the import of a descriptor takes up to a millisecond on some machines, and 20 us on others. A batch has many of
//! them. So the calling thread makes one call after the other, and takes helpers once a call was slow.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Duration of a call that makes helpers worthwhile: several times the start of a thread.
const SLOW: Duration = Duration::from_micros(100);
/// Maximum number of threads, the calling one included.
const MOST_THREADS: usize = 4;

/// Passes each item to `work` once, and returns the results in the order of the items.
pub(super) fn spread<I: Send, O: Send>(items: Vec<I>, work: impl Fn(I) -> O + Sync) -> Vec<O> {
    let mut results = Vec::with_capacity(items.len());
    let mut items = items.into_iter();
    for item in items.by_ref() {
        let started = Instant::now();
        results.push(work(item));
        if started.elapsed() >= SLOW {
            break;
        }
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
            let item = place.lock().0.take();
            let result = item.map(&work);
            place.lock().1 = result;
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
                let expected: Vec<_> = (0..count).map(|item| item * 3).collect();
                assert_eq!(spread((0..count).collect(), work), expected);
            }
        }
    }

    #[test]
    fn slow_calls_run_at_the_same_time() {
        let running = AtomicUsize::new(0);
        let most = AtomicUsize::new(0);
        let threads = Mutex::new(HashSet::new());
        spread((0..24).collect(), |_: i32| {
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
