//! Random schedules of an exporter and two importers over the counts that they share. No allocation is freed while a process
//! holds it, and each is freed once, at any point of any process's death.
//!
//! `counts.rs` and `open_count.rs` are compiled against shuttle's types. Processes are sets of threads here. The surroundings
//! of the counts, the exporter's and the importers' tables of mappings, are modeled in their shortest form, with the same steps
//! as in `exporter.rs` and `importer.rs`.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the files under test are compiled as part of this test")]

mod primitive {
    pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering, fence};
}

#[path = "../src/sharing/counts.rs"]
mod counts;
#[path = "../src/sharing/open_count.rs"]
mod open_count;

use std::collections::{HashMap, VecDeque};

use counts::{Acquired, Flags, Slot};
use open_count::OpenCount;
use shuttle::rand::Rng;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::sync::{Arc, Mutex, MutexGuard};
use shuttle::thread;

const SCHEDULES: usize = 500;
const IMPORTERS: usize = 2;
const THREADS: usize = 2;
/// Fewer than allocations, so that they serve one after another.
const SLOTS: usize = 2;
const ALLOCATIONS: u64 = 5;

/// True once in so many times.
fn one_in(times: u32) -> bool {
    shuttle::rand::thread_rng().gen_range(0..times) == 0
}

/// The counts of one importer.
struct Table {
    words: [AtomicU64; SLOTS],
    bits: [Vec<AtomicU64>; 2],
    summary: [Vec<AtomicU64>; 2],
}

impl Table {
    fn new() -> Arc<Self> {
        let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            bits: std::array::from_fn(|_| words(64)),
            summary: std::array::from_fn(|_| words(1)),
        })
    }

    fn slot(&self, ticket: Ticket) -> Slot<'_> {
        Slot::new(&self.words[ticket.index], ticket.serial)
    }

    fn released(&self) -> Flags<'_> {
        Flags::new(&self.bits[0], &self.summary[0])
    }

    fn closed(&self) -> Flags<'_> {
        Flags::new(&self.bits[1], &self.summary[1])
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Ticket {
    index: usize,
    serial: u64,
}

/// What is so, whatever the counts say.
struct Memory {
    freed: AtomicBool,
    /// How often each importer has it in hand, and whether it maps it.
    in_hand: [AtomicU64; IMPORTERS],
    mapped: [AtomicU64; IMPORTERS],
}

// ------------------------------------------------------------------------------------------------ the exporter

struct Export {
    ticket: Ticket,
    peers: Vec<usize>,
    limbo: bool,
}

struct Book {
    exports: [Option<Export>; SLOTS],
    /// `None` for an importer that is dead or forgotten.
    tables: [Option<Arc<Table>>; IMPORTERS],
    is_dead: [bool; IMPORTERS],
}

struct Exporter {
    book: Mutex<Book>,
    /// Whether a mapping alone keeps the memory.
    or_maps: bool,
    memory: Vec<Memory>,
    /// The latest ticket of each slot, by its serial number.
    tickets: [AtomicU64; SLOTS],
    finished: AtomicBool,
}

impl Exporter {
    fn new(or_maps: bool) -> Arc<Self> {
        let memory = |_| Memory {
            freed: AtomicBool::new(false),
            in_hand: std::array::from_fn(|_| AtomicU64::new(0)),
            mapped: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        let tables = std::array::from_fn(|_| Some(Table::new()));
        let book = Book { exports: [const { None }; SLOTS], tables, is_dead: [false; IMPORTERS] };
        Arc::new(Self {
            book: Mutex::new(book),
            or_maps,
            memory: (0..=ALLOCATIONS).map(memory).collect(),
            tickets: std::array::from_fn(|_| AtomicU64::new(0)),
            finished: AtomicBool::new(false),
        })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap()
    }

    fn memory(&self, ticket: Ticket) -> &Memory {
        &self.memory[ticket.serial as usize]
    }

    fn free(&self, book: &Book, ticket: Ticket) {
        let memory = self.memory(ticket);
        for importer in (0..IMPORTERS).filter(|&importer| !book.is_dead[importer]) {
            let in_hand = memory.in_hand[importer].load(Ordering::SeqCst);
            assert_eq!(in_hand, 0, "{ticket:?} is freed while importer {importer} has it");
            if self.or_maps {
                let mapped = memory.mapped[importer].load(Ordering::SeqCst);
                assert_eq!(mapped, 0, "{ticket:?} is freed while importer {importer} maps it");
            }
        }
        assert!(!memory.freed.swap(true, Ordering::SeqCst), "{ticket:?} is freed twice");
    }

    fn is_held(&self, book: &Book, export: &Export) -> bool {
        let tables = export.peers.iter().filter_map(|&peer| book.tables[peer].as_ref());
        tables.into_iter().any(|table| table.slot(export.ticket).is_held(self.or_maps))
    }

    fn leave_limbo(&self, book: &mut Book, index: usize) {
        let leaves = book.exports[index].as_ref().is_some_and(|export| export.limbo && !self.is_held(book, export));
        if leaves && let Some(export) = book.exports[index].take() {
            self.free(book, export.ticket);
        }
    }

    /// A slot for the next allocation, if there is one.
    fn register(&self, serial: u64) -> Option<Ticket> {
        let mut book = self.book();
        let index = book.exports.iter().position(Option::is_none)?;
        let ticket = Ticket { index, serial };
        book.exports[index] = Some(Export { ticket, peers: Vec::new(), limbo: false });
        drop(book);
        self.tickets[index].store(serial, Ordering::SeqCst);
        Some(ticket)
    }

    fn grant(&self, importer: usize, ticket: Ticket) -> Option<Arc<Table>> {
        let mut book = self.book();
        let table = book.tables[importer].clone()?;
        let export = book.exports[ticket.index].as_mut()?;
        if export.ticket != ticket || export.limbo {
            return None;
        }
        assert!(table.slot(ticket).grant());
        if !export.peers.contains(&importer) {
            export.peers.push(importer);
        }
        Some(table)
    }

    /// Prepares opens of an allocation, as a share does.
    fn prepare(&self, ticket: Ticket) {
        let mut book = self.book();
        let Book { exports, tables, .. } = &mut *book;
        let Some(export) = exports[ticket.index].as_mut().filter(|export| export.ticket == ticket) else { return };
        for (importer, table) in tables.iter().enumerate() {
            if table.as_ref().is_some_and(|table| table.slot(ticket).prepare()) {
                export.peers.push(importer);
            }
        }
    }

    /// Forgets a live importer that has closed its connection, unless it has an allocation open or mapped.
    fn forget(&self, importer: usize) {
        let mut book = self.book();
        let Some(table) = book.tables[importer].clone() else { return };
        let of = |export: &&Export| export.peers.contains(&importer);
        let withdraw = |export: &Export| table.slot(export.ticket).withdraw();
        if book.exports.iter().flatten().filter(of).map(withdraw).fold(true, std::ops::BitAnd::bitand) {
            book.tables[importer] = None;
            book.exports.iter_mut().flatten().for_each(|export| export.peers.retain(|&peer| peer != importer));
            (0..SLOTS).for_each(|index| self.leave_limbo(&mut book, index));
        }
    }

    fn take_back(&self, importer: usize, ticket: Ticket) {
        let mut book = self.book();
        if let Some(table) = &book.tables[importer] {
            table.slot(ticket).take_back();
        }
        self.leave_limbo(&mut book, ticket.index);
    }

    fn close(&self, ticket: Ticket) {
        let mut book = self.book();
        let mut export = book.exports[ticket.index].take().unwrap();
        for table in export.peers.iter().filter_map(|&peer| book.tables[peer].as_ref()) {
            if table.slot(ticket).close() {
                table.closed().raise(ticket.index);
            }
        }
        if self.is_held(&book, &export) {
            export.limbo = true;
            book.exports[ticket.index] = Some(export);
        } else {
            self.free(&book, ticket);
        }
    }

    fn settle(&self) {
        let mut book = self.book();
        let mut raised = Vec::new();
        book.tables.iter().flatten().for_each(|table| table.released().drain(|slot| raised.push(slot)));
        raised.into_iter().for_each(|index| self.leave_limbo(&mut book, index));
    }

    fn peer_ended(&self, importer: usize) {
        let mut book = self.book();
        book.tables[importer] = None;
        book.is_dead[importer] = true;
        for index in 0..SLOTS {
            if let Some(export) = &mut book.exports[index] {
                export.peers.retain(|&peer| peer != importer);
            }
            self.leave_limbo(&mut book, index);
        }
    }

    /// Shares allocations one after another, closes the oldest when it likes or has to, and settles now and then.
    fn run(&self) {
        let mut shared: VecDeque<Ticket> = VecDeque::new();
        for serial in 1..=ALLOCATIONS {
            loop {
                if let Some(ticket) = self.register(serial) {
                    if !one_in(3) {
                        self.prepare(ticket);
                    }
                    shared.push_back(ticket);
                    break;
                }
                if let Some(oldest) = shared.pop_front() {
                    self.close(oldest);
                }
                // What waits in limbo is let go of in the end.
                self.settle();
                thread::yield_now();
            }
            if one_in(3)
                && let Some(oldest) = shared.pop_front()
            {
                self.close(oldest);
            }
            if one_in(6) {
                self.forget(shuttle::rand::thread_rng().gen_range(0..IMPORTERS));
            }
        }
        shared.into_iter().for_each(|ticket| self.close(ticket));
        self.settle();
        self.finished.store(true, Ordering::SeqCst);
    }
}

// ------------------------------------------------------------------------------------------------ an importer

/// Ends a thread of a process that was killed.
struct Killed;

type Alive<T> = Result<T, Killed>;

struct Import {
    ticket: Ticket,
    table: Arc<Table>,
    open: OpenCount,
}

impl Import {
    fn slot(&self) -> Slot<'_> {
        self.table.slot(self.ticket)
    }
}

struct Importer {
    number: usize,
    /// The table that the exporter gave it.
    table: Arc<Table>,
    exporter: Arc<Exporter>,
    killed: AtomicBool,
    /// `None` while one thread opens the allocation.
    imports: Mutex<HashMap<Ticket, Option<Arc<Import>>>>,
    /// Imports to unmap as soon as no buffer has them open.
    to_unmap: Mutex<Vec<Arc<Import>>>,
    /// Imports that the backend has refused to unmap.
    refused: Mutex<Vec<Arc<Import>>>,
}

impl Importer {
    /// Where the process may die.
    fn step(&self) -> Alive<()> {
        if self.killed.load(Ordering::SeqCst) { Err(Killed) } else { Ok(()) }
    }

    fn imports(&self) -> MutexGuard<'_, HashMap<Ticket, Option<Arc<Import>>>> {
        self.imports.lock().unwrap()
    }

    fn take_in_hand(&self, ticket: Ticket) {
        self.exporter.memory(ticket).in_hand[self.number].fetch_add(1, Ordering::SeqCst);
    }

    fn open(&self, ticket: Ticket) -> Alive<Option<Arc<Import>>> {
        loop {
            self.step()?;
            let mut imports = self.imports();
            match imports.get(&ticket) {
                Some(Some(import)) => {
                    let import = Arc::clone(import);
                    drop(imports);
                    self.step()?;
                    if import.open.enter() {
                        self.step()?;
                        return match import.slot().acquire() {
                            Acquired::Yes => {
                                self.take_in_hand(ticket);
                                Ok(Some(import))
                            }
                            Acquired::Closed => {
                                self.step()?;
                                self.leave(&import);
                                Ok(None)
                            }
                            Acquired::NotMapped => panic!("{ticket:?} is in the table, and its word says not mapped"),
                        };
                    }
                    // Another thread is unmapping it: wait for the result, then map again unless the backend refused.
                }
                Some(None) => drop(imports),
                None => {
                    imports.insert(ticket, None);
                    drop(imports);
                    let import = self.open_first(ticket)?;
                    match &import {
                        Some(import) => drop(self.imports().insert(ticket, Some(Arc::clone(import)))),
                        None => drop(self.imports().remove(&ticket)),
                    }
                    return Ok(import);
                }
            }
            thread::yield_now();
        }
    }

    fn open_first(&self, ticket: Ticket) -> Alive<Option<Arc<Import>>> {
        let slot = self.table.slot(ticket);
        let prepared = slot.prepared();
        self.step()?;
        let table = if prepared.is_some_and(|word| slot.take(word)) {
            Arc::clone(&self.table)
        } else {
            let Some(table) = self.exporter.grant(self.number, ticket) else { return Ok(None) };
            table
        };
        self.step()?;
        if one_in(6) {
            // It could not be mapped.
            self.exporter.take_back(self.number, ticket);
            return Ok(None);
        }
        self.exporter.memory(ticket).mapped[self.number].fetch_add(1, Ordering::SeqCst);
        self.take_in_hand(ticket);
        self.step()?;
        Ok(Some(Arc::new(Import { ticket, table, open: OpenCount::open() })))
    }

    fn check(&self, ticket: Ticket) -> Alive<()> {
        let memory = self.exporter.memory(ticket);
        let freed = memory.freed.load(Ordering::SeqCst);
        // What a dead process would see does not matter.
        self.step()?;
        assert!(!freed, "{ticket:?} was freed while importer {} has it", self.number);
        let mapped = memory.mapped[self.number].load(Ordering::SeqCst);
        assert_eq!(mapped, 1, "{ticket:?} is in the hand of importer {}, and mapped so often", self.number);
        Ok(())
    }

    fn release(&self, import: &Arc<Import>) -> Alive<()> {
        self.step()?;
        self.exporter.memory(import.ticket).in_hand[self.number].fetch_sub(1, Ordering::SeqCst);
        let last_of_closed = import.slot().release();
        if last_of_closed {
            self.step()?;
            import.table.released().raise(import.ticket.index);
        }
        self.step()?;
        self.leave(import);
        Ok(())
    }

    fn leave(&self, import: &Arc<Import>) {
        if import.open.leave() && import.slot().is_closed() {
            self.to_unmap.lock().unwrap().push(Arc::clone(import));
        }
    }

    fn unmap(&self, import: &Arc<Import>) -> Alive<()> {
        if !import.open.try_gone() {
            return Ok(());
        }
        self.step()?;
        let memory = self.exporter.memory(import.ticket);
        if self.exporter.or_maps {
            self.check(import.ticket)?;
        }
        // In the end every try succeeds.
        if !self.exporter.finished.load(Ordering::SeqCst) && one_in(4) {
            self.refused.lock().unwrap().push(Arc::clone(import));
            self.step()?;
            import.open.stays();
            return Ok(());
        }
        memory.mapped[self.number].fetch_sub(1, Ordering::SeqCst);
        self.step()?;
        if import.slot().unmapped() {
            self.step()?;
            import.table.released().raise(import.ticket.index);
        }
        self.step()?;
        self.imports().remove(&import.ticket);
        Ok(())
    }

    fn unmap_idle(&self) -> Alive<()> {
        let imports: Vec<_> = self.imports().values().flatten().cloned().collect();
        imports.iter().try_for_each(|import| self.unmap(import))
    }

    /// Performs a collection.
    fn try_refused_again(&self) {
        let refused = std::mem::take(&mut *self.refused.lock().unwrap());
        let closed = refused.into_iter().filter(|import| import.slot().is_closed());
        self.to_unmap.lock().unwrap().extend(closed);
    }

    /// What the service does: unmaps what exporters have freed, and what was put on the list.
    fn unmap_closed(&self) -> Alive<()> {
        let table = self.imports().values().flatten().next().map(|import| Arc::clone(&import.table));
        if let Some(table) = table {
            table.closed().drain(|index| {
                let imports = self.imports();
                let of_slot = imports.values().flatten().filter(|import| import.ticket.index == index);
                let closed = of_slot.filter(|import| import.slot().is_closed()).cloned();
                self.to_unmap.lock().unwrap().extend(closed);
            });
        }
        self.step()?;
        let to_unmap = std::mem::take(&mut *self.to_unmap.lock().unwrap());
        to_unmap.iter().try_for_each(|import| self.unmap(import))
    }

    /// One thread of the process; it lets go of everything in the end.
    fn run(&self) -> Alive<()> {
        let mut held: Vec<Arc<Import>> = Vec::new();
        let mut tickets: Vec<Ticket> = Vec::new();
        for _ in 0..5 {
            let index = shuttle::rand::thread_rng().gen_range(0..SLOTS);
            let serial = self.exporter.tickets[index].load(Ordering::SeqCst);
            if serial > 0 {
                tickets.push(Ticket { index, serial });
                // One from before may be expired, and its slot serve another allocation.
                let which = if one_in(3) { 0 } else { tickets.len() - 1 };
                held.extend(self.open(tickets[which])?);
            }
            held.iter().try_for_each(|import| self.check(import.ticket))?;
            if one_in(2)
                && let Some(import) = held.pop()
            {
                self.release(&import)?;
            }
            match shuttle::rand::thread_rng().gen_range(0..4) {
                0 => self.unmap_idle()?,
                1 => self.unmap_closed()?,
                _ => {}
            }
        }
        while let Some(import) = held.pop() {
            self.check(import.ticket)?;
            self.release(&import)?;
        }
        Ok(())
    }
}

/// Everybody at work; with `kills`, an importer dies somewhere, or both.
fn exporter_and_importers(or_maps: bool, kills: bool) {
    let exporter = Exporter::new(or_maps);
    let processes: Vec<_> = (0..IMPORTERS)
        .map(|number| {
            let importer = Arc::new(Importer {
                number,
                table: exporter.book().tables[number].clone().unwrap(),
                exporter: Arc::clone(&exporter),
                killed: AtomicBool::new(false),
                imports: Mutex::new(HashMap::new()),
                to_unmap: Mutex::new(Vec::new()),
                refused: Mutex::new(Vec::new()),
            });
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    let importer = Arc::clone(&importer);
                    // A thread of a killed process ends where it is.
                    thread::spawn(move || importer.run().unwrap_or(()))
                })
                .collect();
            thread::spawn(move || {
                if kills && one_in(2) {
                    (0..shuttle::rand::thread_rng().gen_range(0..60)).for_each(|_| thread::yield_now());
                    importer.killed.store(true, Ordering::SeqCst);
                }
                for thread in threads {
                    thread.join().unwrap();
                }
                // The service is left, which unmaps what the exporter closes.
                let served = || {
                    while !importer.exporter.finished.load(Ordering::SeqCst) {
                        importer.step()?;
                        importer.try_refused_again();
                        importer.unmap_closed()?;
                        thread::yield_now();
                    }
                    importer.try_refused_again();
                    importer.unmap_closed()
                };
                if served().and_then(|()| importer.step()).is_err() {
                    // It is dead when nothing of it runs any more.
                    importer.exporter.peer_ended(number);
                }
                importer
            })
        })
        .collect();
    exporter.run();
    let importers: Vec<_> = processes.into_iter().map(|process| process.join().unwrap()).collect();
    // No thread holds an object, and only the flags have informed the exporter.
    exporter.settle();
    let book = exporter.book();
    assert!(book.exports.iter().all(Option::is_none), "something is in limbo that nobody has");
    for memory in &exporter.memory[1..] {
        assert!(memory.freed.load(Ordering::SeqCst), "never freed");
        for importer in importers.iter().filter(|importer| importer.step().is_ok()) {
            let mapped = memory.mapped[importer.number].load(Ordering::SeqCst);
            assert_eq!(mapped, 0, "what the exporter has freed is mapped");
        }
    }
}

#[test]
fn nothing_is_freed_early_twice_or_never() {
    shuttle::check_random(|| exporter_and_importers(false, false), SCHEDULES);
    shuttle::check_pct(|| exporter_and_importers(false, false), SCHEDULES, 4);
}

#[test]
fn nothing_is_freed_early_twice_or_never_when_importers_die() {
    shuttle::check_random(|| exporter_and_importers(false, true), SCHEDULES);
    shuttle::check_pct(|| exporter_and_importers(false, true), SCHEDULES, 4);
}

#[test]
fn the_same_where_a_mapping_keeps_the_memory() {
    shuttle::check_random(|| exporter_and_importers(true, false), SCHEDULES / 2);
    shuttle::check_random(|| exporter_and_importers(true, true), SCHEDULES / 2);
    shuttle::check_pct(|| exporter_and_importers(true, true), SCHEDULES, 4);
}
