//! Model checking of the batches of uses of a stream: the record of a batch covers the work of every use that joined it. Every
//! interleaving of the steps below is tried. Wrong orders of the steps must fail.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the file under test is compiled as part of this test")]

mod primitive {
    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
}

#[path = "../src/pool/use_batches.rs"]
mod use_batches;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use use_batches::{OpenBatch, Progress};

#[derive(Clone, Copy, PartialEq)]
enum Order {
    Right,
    /// A use joins before its work is enqueued, in a hold of the lock of its own.
    JoinFirst,
    /// A batch is closed after its record, in a hold of the lock of its own.
    CloseLater,
}

/// A batch, with the number of operations that precede its event.
struct Batch {
    progress: Progress,
    covers: AtomicU32,
}

/// What the submission lock guards: the open batch, and the number of operations on the stream.
#[derive(Default)]
struct Submission {
    batch: OpenBatch<Batch>,
    enqueued: u32,
}

impl Submission {
    fn enqueue(&mut self) -> u32 {
        self.enqueued += 1;
        self.enqueued
    }

    fn join(&mut self) -> Arc<Batch> {
        if self.batch.get().is_none() {
            self.batch.open(Batch { progress: Progress::new(false), covers: AtomicU32::new(0) });
        }
        self.batch.join(4096).unwrap().0
    }

    fn record(&self) {
        if let Some(batch) = self.batch.get() {
            // Relaxed: the progress orders it.
            batch.covers.store(self.enqueued, Ordering::Relaxed);
            batch.progress.set_recorded();
        }
    }
}

/// Uses the stream once. Returns the batch of the use and the number of its operation.
fn use_once(stream: &Mutex<Submission>, order: Order) -> (Arc<Batch>, u32) {
    if order == Order::JoinFirst {
        let batch = stream.lock().unwrap().join();
        let number = stream.lock().unwrap().enqueue();
        return (batch, number);
    }
    let mut submission = stream.lock().unwrap();
    let number = submission.enqueue();
    (submission.join(), number)
}

/// Closes the open batch, as a thread that needs memory.
fn close(stream: &Mutex<Submission>, order: Order) {
    let mut submission = stream.lock().unwrap();
    submission.record();
    if order == Order::CloseLater {
        drop(submission);
        submission = stream.lock().unwrap();
    }
    submission.batch.close();
}

fn check(batch: &Batch, number: u32) {
    if batch.progress.is_closed() {
        assert!(
            batch.covers.load(Ordering::Relaxed) >= number,
            "a use is not covered: its work is enqueued after the record"
        );
    }
}

/// Two threads use a stream, and a third closes the batch.
fn uses_beside_a_record(order: Order) {
    let stream = Arc::new(Mutex::new(Submission::default()));
    let users: Vec<_> = (0..2)
        .map(|_| {
            let stream = Arc::clone(&stream);
            thread::spawn(move || {
                let (batch, number) = use_once(&stream, order);
                check(&batch, number);
                (batch, number)
            })
        })
        .collect();
    close(&stream, order);
    let uses: Vec<_> = users.into_iter().map(|user| user.join().unwrap()).collect();
    close(&stream, Order::Right);
    for (batch, number) in uses {
        assert!(batch.progress.is_closed(), "a use is not covered: no record follows it");
        check(&batch, number);
    }
}

#[test]
fn the_record_of_a_batch_covers_each_use_that_joined() {
    loom::model(|| uses_beside_a_record(Order::Right));
}

#[test]
#[should_panic(expected = "a use is not covered")]
fn a_use_that_joins_before_its_work_is_enqueued_is_found() {
    loom::model(|| uses_beside_a_record(Order::JoinFirst));
}

#[test]
#[should_panic(expected = "a use is not covered")]
fn a_batch_that_is_closed_after_the_lock_was_released_is_found() {
    loom::model(|| uses_beside_a_record(Order::CloseLater));
}
