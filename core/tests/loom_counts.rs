//! Model checking of the counts that two processes share, and of the count that decides about an unmap. Every interleaving of
//! the steps below is tried.
//!
//! The processes are threads here, and the shared memory is a cell that loom watches. Loom fails a test in which the exporter
//! uses the memory again while the importer may still use it, or without having seen the importer's accesses. The addresses of
//! an import are such a cell too, which the unmapping thread writes.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the files under test are compiled as part of this test")]

mod primitive {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
}

#[path = "../src/sharing/counts.rs"]
mod counts;
#[path = "../src/sharing/open_count.rs"]
mod open_count;

use counts::{Acquired, Flags, Slot};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use open_count::OpenCount;

const SERIAL: u64 = 7;

/// What exporter and importer map, and the allocation.
struct Shared {
    word: AtomicU64,
    bits: Vec<AtomicU64>,
    summary: Vec<AtomicU64>,
    memory: UnsafeCell<u32>,
}

impl Shared {
    /// An allocation that the importer does not know.
    fn unknown() -> Arc<Self> {
        let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { word: AtomicU64::new(0), bits: words(64), summary: words(1), memory: UnsafeCell::new(0) })
    }

    /// An allocation that the importer has open once.
    fn open() -> Arc<Self> {
        let shared = Self::unknown();
        assert!(shared.slot().grant());
        shared
    }

    fn slot(&self) -> Slot<'_> {
        Slot::new(&self.word, SERIAL)
    }

    fn released(&self) -> Flags<'_> {
        Flags::new(&self.bits, &self.summary)
    }

    /// Work of the importer on the memory, as long as it holds it.
    fn read(&self) {
        // SAFETY: the importer holds the allocation; loom fails the test where the exporter writes it meanwhile.
        self.memory.with(|memory| assert_eq!(unsafe { *memory }, 0));
    }

    /// The exporter uses the memory for something else.
    fn reuse(&self) {
        // SAFETY: No thread holds the allocation. Loom fails the test if a thread reads it in the meantime.
        self.memory.with_mut(|memory| unsafe { *memory += 1 });
    }

    fn release(&self) {
        if self.slot().release() {
            self.released().raise(0);
        }
    }

    /// What the exporter does when its owner drops the allocation: says whether it was freed at once.
    fn close(&self, or_maps: bool) -> bool {
        self.slot().close();
        let free = !self.slot().is_held(or_maps);
        if free {
            self.reuse();
        }
        free
    }

    /// What the exporter does when it is rung: says whether the allocation was freed.
    fn settle(&self, or_maps: bool) -> bool {
        let mut raised = false;
        self.released().drain(|slot| raised |= slot == 0);
        let free = raised && !self.slot().is_held(or_maps);
        if free {
            self.reuse();
        }
        free
    }
}

#[test]
fn a_release_beside_the_close_is_neither_early_nor_lost() {
    loom::model(|| {
        let shared = Shared::open();
        let importer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.read();
                shared.release();
            })
        };
        let mut freed = u32::from(shared.close(false));
        if freed == 0 {
            freed += u32::from(shared.settle(false));
        }
        importer.join().unwrap();
        if freed == 0 {
            freed += u32::from(shared.settle(false));
        }
        assert_eq!(freed, 1);
    });
}

#[test]
fn an_open_beside_the_close_holds_the_memory_or_is_refused() {
    loom::model(|| {
        let shared = Shared::open();
        // Kept for the next open.
        shared.release();
        let importer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || match shared.slot().acquire() {
                Acquired::Yes => {
                    shared.read();
                    shared.release();
                }
                refused => assert_eq!(refused, Acquired::Closed),
            })
        };
        let mut freed = u32::from(shared.close(false));
        importer.join().unwrap();
        if freed == 0 {
            freed += u32::from(shared.settle(false));
        }
        assert_eq!(freed, 1);
    });
}

/// Withdraws, if the exporter forgets the importer. Otherwise, or if that fails, closes as for a dropped buffer. Returns the number of
/// frees.
fn forget_or_close(shared: &Shared, forgets: bool) -> u32 {
    if forgets && shared.slot().withdraw() {
        shared.reuse();
        return 1;
    }
    u32::from(shared.close(true))
}

#[test]
fn a_prepared_open_beside_the_close_or_the_withdrawal_holds_the_memory_or_is_refused() {
    for forgets in [false, true] {
        loom::model(move || {
            let shared = Shared::unknown();
            assert!(shared.slot().prepare() && !shared.slot().prepare());
            let importer = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let word = shared.slot().prepared();
                    if word.is_some_and(|word| shared.slot().take(word)) {
                        shared.read();
                        shared.release();
                        if shared.slot().unmapped() {
                            shared.released().raise(0);
                        }
                    }
                })
            };
            let mut freed = forget_or_close(&shared, forgets);
            importer.join().unwrap();
            if freed == 0 {
                freed += u32::from(shared.settle(true));
            }
            assert_eq!(freed, 1);
        });
    }
}

#[test]
fn two_threads_that_release_tell_the_exporter_once() {
    loom::model(|| {
        let shared = Shared::open();
        assert_eq!(shared.slot().acquire(), Acquired::Yes);
        let importers: Vec<_> = (0..2)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    shared.read();
                    shared.release();
                })
            })
            .collect();
        let mut freed = u32::from(shared.close(false));
        importers.into_iter().for_each(|importer| importer.join().unwrap());
        if freed == 0 {
            freed += u32::from(shared.settle(false));
        }
        assert_eq!(freed, 1);
    });
}

#[test]
fn where_a_mapping_counts_the_memory_is_freed_after_it_is_gone() {
    loom::model(|| {
        let shared = Shared::open();
        shared.release();
        let importer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // Trimmed: the mapping is read until it is taken down.
                shared.read();
                if shared.slot().unmapped() {
                    shared.released().raise(0);
                }
            })
        };
        let mut freed = u32::from(shared.close(true));
        importer.join().unwrap();
        if freed == 0 {
            freed += u32::from(shared.settle(true));
        }
        assert_eq!(freed, 1);
    });
}

#[test]
fn a_slot_that_serves_the_next_allocation_is_left_alone_by_the_old_mapping() {
    loom::model(|| {
        let shared = Shared::open();
        shared.release();
        assert!(shared.close(false));
        let unmapping = {
            let shared = Arc::clone(&shared);
            // The result does not matter: the exporter freed this allocation long ago.
            thread::spawn(move || shared.slot().unmapped())
        };
        // Meanwhile the exporter grants the next allocation of the slot.
        let next = Slot::new(&shared.word, SERIAL + 1);
        assert!(next.grant());
        unmapping.join().unwrap();
        assert!(next.is_held(false));
        assert_eq!(next.acquire(), Acquired::Yes);
        assert_eq!(shared.slot().acquire(), Acquired::Closed);
    });
}

#[test]
fn every_raised_flag_is_drained_once() {
    loom::model(|| {
        let shared = Shared::open();
        let raising = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.released().raise(3);
                shared.released().raise(70);
            })
        };
        let mut drained = Vec::new();
        shared.released().drain(|slot| drained.push(slot));
        raising.join().unwrap();
        shared.released().drain(|slot| drained.push(slot));
        drained.sort_unstable();
        assert_eq!(drained, [3, 70]);
    });
}

/// An import: the word that it shares with the exporter, and what decides about its addresses.
struct Import {
    shared: Arc<Shared>,
    open: OpenCount,
    addresses: UnsafeCell<u32>,
}

impl Import {
    /// Open once.
    fn open() -> Arc<Self> {
        let import = Self { shared: Shared::open(), open: OpenCount::open(), addresses: UnsafeCell::new(0) };
        Arc::new(import)
    }

    /// Kept for the next open.
    fn kept() -> Arc<Self> {
        let import = Self::open();
        assert!(!import.close());
        import
    }

    /// Opens it again where it is not gone, uses it and lets go of it. Says whether this thread has unmapped it.
    fn use_once(&self) -> bool {
        if !self.open.enter() {
            return false;
        }
        match self.shared.slot().acquire() {
            Acquired::Yes => self.close(),
            refused => {
                assert_eq!(refused, Acquired::Closed);
                self.leave()
            }
        }
    }

    /// Uses what is open, and lets go of it.
    fn close(&self) -> bool {
        // SAFETY: this thread has it open; loom fails the test where it is unmapped meanwhile.
        self.addresses.with(|mapped| assert_eq!(unsafe { *mapped }, 0));
        self.shared.release();
        self.leave()
    }

    fn leave(&self) -> bool {
        self.open.leave() && self.shared.slot().is_closed() && self.unmap()
    }

    fn unmap(&self) -> bool {
        let unmaps = self.open.try_gone();
        if unmaps {
            // SAFETY: No thread has it open. Loom fails the test if a thread reads it in the meantime.
            self.addresses.with_mut(|mapped| unsafe { *mapped += 1 });
            if self.shared.slot().unmapped() {
                self.shared.released().raise(0);
            }
        }
        unmaps
    }

    /// The exporter frees the allocation. The importer then unmaps it if no buffer has it open.
    fn is_freed(&self) -> bool {
        self.shared.slot().close();
        assert!(self.shared.slot().is_closed());
        self.unmap()
    }
}

#[test]
fn nothing_is_unmapped_while_a_thread_has_it_open() {
    loom::model(|| {
        let import = Import::kept();
        let opening = {
            let import = Arc::clone(&import);
            thread::spawn(move || import.use_once())
        };
        // Trimmed: without a reason that the other thread could find.
        let trimmed = import.unmap();
        assert!(!opening.join().unwrap());
        // An open import is not unmapped then, and an unmapped one is not opened.
        assert_ne!(import.open.enter(), trimmed);
    });
}

#[test]
fn what_is_closed_while_it_is_open_is_unmapped_once_and_never_forgotten() {
    loom::model(|| {
        let import = Import::open();
        let closing = {
            let import = Arc::clone(&import);
            thread::spawn(move || import.close())
        };
        let by_the_service = import.is_freed();
        let by_the_last = closing.join().unwrap();
        assert!(by_the_service != by_the_last, "unmapped by {by_the_service} and {by_the_last}");
        assert!(!import.open.enter());
    });
}

#[test]
fn an_open_a_close_and_an_unmap_at_once_leave_nothing_mapped() {
    let mut model = loom::model::Builder::new();
    // Of three threads: those interleavings in which a thread is interrupted so often at most.
    model.preemption_bound = Some(3);
    model.check(|| {
        let import = Import::kept();
        let opening = {
            let import = Arc::clone(&import);
            thread::spawn(move || import.use_once())
        };
        let trimming = {
            let import = Arc::clone(&import);
            thread::spawn(move || import.unmap())
        };
        let unmapped = [import.is_freed(), opening.join().unwrap(), trimming.join().unwrap()];
        assert_eq!(unmapped.into_iter().filter(|unmapped| *unmapped).count(), 1);
    });
}
