//! Events that several processes record, query and wait for. Their state lies in a sealed memory file of their own.
//!
//! The state consists of atomics only. A process may be killed between any two steps, so no step leaves anything behind
//! that others would have to wait for. Nothing in the file is trusted: a number out of range is no record.
//!
//! Each record of the event has a number, counted from 1, and a word in a ring of [`SLOTS`] words: the number, the
//! recorder, and the progress. To *record* is to
//!
//! 1. take the next number;
//! 2. put the word into the ring, as pending. If the previous word in that slot is still pending, too many records are
//!    outstanding, and the call fails;
//! 3. enqueue the record on the stream;
//! 4. raise `latest` to the number: from here on the event *is* this record, for every process.
//!
//! The worker that reaches the record sets the word to reached, increments `changes`, and wakes the sleeping waiters. A
//! wait takes `latest` at the time of the call and then reads that one word. If the ring has moved on, the record was
//! settled before.
//!
//! A sleeping waiter checks every [`LOOK_AFTER`] whether the process that made the record still lives. If it does not,
//! its work has ended with it: the record counts as reached, and the waiter writes that into the ring.
//!
//! | in the ring | next | by whom |
//! |---|---|---|
//! | pending | reached, lost | the recorder's worker |
//! | pending | reached | anybody, after the recorder has ended |
//! | reached, lost | pending with a higher number | a recorder |
//!
//! A number that was taken and never became `latest` is skipped: its recorder was killed, or its stream refused.
//!
//! *Orderings.* Settling is a release and reading an acquire, so a process that sees a record reached sees the work
//! before it. `latest` is raised with release after the word was put, so a process that finds the number finds the
//! word. A waiter reads `changes` before the word and sleeps only while it has not moved, so it misses no wake.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use highwater_hal::{ErrorKind, EventHandle, Result};
use rustix::thread::futex;

use crate::mapping::Mapping;
use crate::operation::Operation;
use crate::payload::{open_payload, seal_payload};
use crate::peers::{Peers, ProcessId};
use crate::sealed_file::{self, Exported};

const EVENT_MAGIC: u64 = u64::from_le_bytes(*b"HWMKEVT1");
/// The largest number of outstanding records.
pub(crate) const SLOTS: usize = 1792;
/// The largest number of living processes that record one event. A place of an ended process is used again.
const RECORDERS: usize = 251;
/// The time that a waiter sleeps before it checks the recorder.
const LOOK_AFTER: Duration = Duration::from_millis(10);

/// The file's contents. Zeros are an event that was never recorded.
#[repr(C)]
struct State {
    magic: AtomicU64,
    /// The last number that was taken.
    next: AtomicU64,
    /// The number of the latest record; 0 before the first.
    latest: AtomicU64,
    /// Grows with every record that is settled.
    changes: AtomicU32,
    spare: AtomicU32,
    /// The processes that the words of the ring refer to by index.
    recorders: [AtomicU64; RECORDERS],
    spare_too: AtomicU64,
    ring: [AtomicU64; SLOTS],
}

const STATE_BYTES: u64 = size_of::<State>() as u64;
const _: () = assert!(STATE_BYTES == 16384);

/// The progress of a point.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Progress {
    /// The stream has not reached the point.
    Ahead,
    /// The stream reached the point at this time.
    Reached(Instant),
    /// The device was lost before.
    Lost,
}

/// A word of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Word {
    number: u64,
    recorder: u8,
    standing: Standing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Standing {
    Pending = 1,
    Reached = 2,
    Lost = 3,
}

impl Word {
    const fn pack(self) -> u64 {
        self.number << 16 | (self.recorder as u64) << 8 | self.standing as u64
    }

    /// Unpacks a word. A word that no recorder wrote counts as reached.
    const fn unpack(word: u64) -> Self {
        let standing = match word as u8 {
            1 => Standing::Pending,
            3 => Standing::Lost,
            _ => Standing::Reached,
        };
        Self { number: word >> 16, recorder: (word >> 8) as u8, standing }
    }
}

/// One process's view of the event.
#[derive(Debug)]
pub(crate) struct SharedEvent {
    mapping: Mapping,
    /// The inode of its file.
    inode: u64,
    /// Kept by the process that created the event, for exports.
    file: Option<(OwnedFd, Arc<AtomicU64>)>,
    peers: Arc<Peers>,
}

impl SharedEvent {
    /// Creates an event. `files` counts the files that are alive.
    pub(crate) fn create(operation: Operation, peers: &Arc<Peers>, files: &Arc<AtomicU64>) -> Result<Arc<Self>> {
        let failed =
            |error| sealed_file::not_made(operation.name(), "cannot create a memory file for the event", error);
        let file = sealed_file::create("highwater-mock-event", STATE_BYTES).map_err(failed)?;
        // SAFETY: the file was just made with this size and sealed.
        let mapping = unsafe { Mapping::new(&file, 0, STATE_BYTES) }.map_err(failed)?;
        let id = sealed_file::identify(&file)
            .map_err(|error| sealed_file::failed(operation, "cannot identify the memory file", error))?;
        files.fetch_add(1, Ordering::Relaxed);
        let event = Self { mapping, inode: id.inode, file: Some((file, Arc::clone(files))), peers: Arc::clone(peers) };
        event.state().magic.store(EVENT_MAGIC, Ordering::Release);
        Ok(Arc::new(event))
    }

    /// Creates a handle of an event that this process created.
    pub(crate) fn export(&self, operation: Operation, uuid: [u8; 16], exported: &Exported) -> Result<EventHandle> {
        let (file, _) = self.file.as_ref().ok_or_else(|| {
            operation
                .error(ErrorKind::InvalidArgument, "this process opened the event and did not create it")
                .with_hint("pass on the handle that it was opened with, or export it in the process that created it")
        })?;
        let id = sealed_file::identify(file)
            .map_err(|error| sealed_file::failed(operation, "cannot identify the memory file", error))?;
        let descriptor = exported.duplicate(operation, file)?;
        Ok(EventHandle::new(uuid, seal_payload(&[EVENT_MAGIC], &uuid, id)).with_descriptor(descriptor))
    }

    /// Opens an event of the device with this UUID.
    pub(crate) fn open(
        operation: Operation,
        handle: &EventHandle,
        uuid: [u8; 16],
        peers: &Arc<Peers>,
    ) -> Result<Arc<Self>> {
        let refused = |message: String| {
            operation.error(ErrorKind::InvalidArgument, message).with_hint(
                "pass a handle as `export_event` returned it, with its descriptor, for the device with its UUID",
            )
        };
        if handle.device_uuid != uuid {
            return Err(refused(format!(
                "the handle is of the device with the UUID {:02x?}, the one asked for has {uuid:02x?}",
                handle.device_uuid
            )));
        }
        let descriptor =
            handle.descriptor.as_ref().ok_or_else(|| refused("the handle has no descriptor".to_owned()))?.as_ref();
        let (file, bytes) = sealed_file::check(operation, descriptor)?;
        if open_payload(&handle.payload, EVENT_MAGIC, &uuid, file).is_none() || bytes != STATE_BYTES {
            return Err(refused("the payload was not exported for this descriptor".to_owned()));
        }
        // SAFETY: the check found the file of this length and sealed against shrinking.
        let mapping = unsafe { Mapping::new(descriptor, 0, STATE_BYTES) }
            .map_err(|error| sealed_file::failed(operation, "cannot map the memory file", error))?;
        let event = Self { mapping, inode: file.inode, file: None, peers: Arc::clone(peers) };
        if event.state().magic.load(Ordering::Acquire) != EVENT_MAGIC {
            return Err(refused("the memory file holds no event".to_owned()));
        }
        Ok(Arc::new(event))
    }

    fn state(&self) -> &State {
        // SAFETY: the mapping is page-aligned, as long as a `State`, and lives as long as `self`. Every process
        // accesses it only as a `State`: atomics without gaps, for which any bytes are values.
        unsafe { &*self.mapping.words().as_ptr().cast::<State>() }
    }

    /// Returns the number of records.
    #[cfg(feature = "simulated")]
    pub(crate) fn records(&self) -> u64 {
        self.state().latest.load(Ordering::Acquire)
    }

    /// Returns the latest record; `None` if there was none.
    pub(crate) fn latest(self: &Arc<Self>) -> Option<Record> {
        let number = self.state().latest.load(Ordering::Acquire);
        (number > 0).then(|| Record { event: Arc::clone(self), number })
    }

    /// Takes steps 1 and 2 of a record.
    pub(crate) fn begin_record(self: &Arc<Self>, operation: Operation) -> Result<Record> {
        let state = self.state();
        let crowded = |what: String| {
            operation
                .error(ErrorKind::InvalidState, what)
                .with_hint("wait for earlier records, or use more than one event")
        };
        let recorder = self
            .recorder()
            .ok_or_else(|| crowded(format!("{RECORDERS} living processes have recorded the event already")))?;
        let number = state.next.fetch_add(1, Ordering::Relaxed).wrapping_add(1) & (u64::MAX >> 16);
        let slot = self.slot(number);
        let mut old = slot.load(Ordering::Acquire);
        loop {
            let before = Word::unpack(old);
            let taken = before.standing == Standing::Pending && !self.has_ended(before.recorder);
            if taken || before.number >= number {
                return Err(crowded(format!("{SLOTS} records of the event are outstanding")));
            }
            let word = Word { number, recorder, standing: Standing::Pending }.pack();
            match slot.compare_exchange(old, word, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(Record { event: Arc::clone(self), number }),
                Err(now) => old = now,
            }
        }
    }

    /// Returns the index of this process among the recorders; `None` if no place is left.
    fn recorder(&self) -> Option<u8> {
        let recorders = &self.state().recorders;
        let own = self.peers.own.0;
        let index = recorders.iter().position(|other| other.load(Ordering::Acquire) == own);
        // Two threads may take two places; either is good.
        let claim = |index: &usize, from: u64| {
            recorders[*index].compare_exchange(from, own, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let index = index.or_else(|| (0..RECORDERS).find(|index| claim(index, 0))).or_else(|| {
            (0..RECORDERS).find(|index| {
                let other = recorders[*index].load(Ordering::Acquire);
                if !self.peers.has_ended(ProcessId(other)) {
                    return false;
                }
                // Pending words of the ended process must not count as those of this one.
                self.settle_all_of(*index as u8);
                claim(index, other)
            })
        });
        index.map(|index| index as u8)
    }

    fn settle_all_of(&self, recorder: u8) {
        for slot in &self.state().ring {
            let word = Word::unpack(slot.load(Ordering::Acquire));
            if word.recorder == recorder && word.standing == Standing::Pending {
                self.settle(word, Standing::Reached);
            }
        }
    }

    fn has_ended(&self, recorder: u8) -> bool {
        let process = self.state().recorders.get(usize::from(recorder));
        process.is_none_or(|process| self.peers.has_ended(ProcessId(process.load(Ordering::Acquire))))
    }

    fn slot(&self, number: u64) -> &AtomicU64 {
        &self.state().ring[(number % SLOTS as u64) as usize]
    }

    /// Settles a pending word, unless another thread or process did.
    fn settle(&self, word: Word, standing: Standing) {
        let settled = Word { standing, ..word }.pack();
        let slot = self.slot(word.number);
        if slot.compare_exchange(word.pack(), settled, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let changes = &self.state().changes;
            changes.fetch_add(1, Ordering::AcqRel);
            if let Err(error) = futex::wake(changes, futex::Flags::empty(), i32::MAX as u32) {
                tracing::warn!(%error, "cannot wake the waiters of an event; they check by themselves");
            }
        }
    }
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        if let Some((_, files)) = &self.file {
            files.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// One record of an event.
#[derive(Debug)]
pub(crate) struct Record {
    event: Arc<SharedEvent>,
    number: u64,
}

impl Record {
    /// Returns the inode of the event's file, and the number of the record.
    pub(crate) fn key(&self) -> (u64, u64) {
        (self.event.inode, self.number)
    }

    /// Takes step 4 of a record.
    pub(crate) fn publish(&self) {
        self.event.state().latest.fetch_max(self.number, Ordering::AcqRel);
    }

    /// Settles the record: the stream has reached it, or never will.
    pub(crate) fn settle(&self, progress: Progress) {
        let standing = if matches!(progress, Progress::Lost) { Standing::Lost } else { Standing::Reached };
        let word = Word::unpack(self.event.slot(self.number).load(Ordering::Acquire));
        if word.number == self.number && word.standing == Standing::Pending {
            self.event.settle(word, standing);
        }
    }

    /// Returns the progress of the record.
    pub(crate) fn progress(&self) -> Progress {
        match self.pending() {
            Ok(word) if self.event.has_ended(word.recorder) => {
                self.event.settle(word, Standing::Reached);
                Progress::Reached(Instant::now())
            }
            Ok(_) => Progress::Ahead,
            Err(settled) => settled,
        }
    }

    /// Waits until the record is settled, or its process has ended.
    pub(crate) fn wait(&self) -> Progress {
        let changes = &self.event.state().changes;
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: LOOK_AFTER.subsec_nanos().into() };
        let mut looked = Instant::now();
        loop {
            let seen = changes.load(Ordering::Acquire);
            if let Err(settled) = self.pending() {
                return settled;
            }
            // An error is a timeout, a change that came first, or a signal: look again.
            let _ = futex::wait(changes, futex::Flags::empty(), seen, Some(&timeout));
            if looked.elapsed() >= LOOK_AFTER {
                if let settled @ (Progress::Reached(_) | Progress::Lost) = self.progress() {
                    return settled;
                }
                looked = Instant::now();
            }
        }
    }

    /// Returns the word while it is pending, else how it was settled.
    fn pending(&self) -> Result<Word, Progress> {
        let word = Word::unpack(self.event.slot(self.number).load(Ordering::Acquire));
        match word.standing {
            // The ring has moved on.
            _ if word.number != self.number => Err(Progress::Reached(Instant::now())),
            Standing::Pending => Ok(word),
            Standing::Reached => Err(Progress::Reached(Instant::now())),
            Standing::Lost => Err(Progress::Lost),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATION: Operation = Operation::RecordEvent;

    fn event() -> Arc<SharedEvent> {
        SharedEvent::create(Operation::CreateEvent, &Arc::new(Peers::new()), &Arc::default()).unwrap()
    }

    fn record(event: &Arc<SharedEvent>) -> Record {
        let record = event.begin_record(OPERATION).unwrap();
        record.publish();
        record
    }

    fn is_ahead(record: &Record) -> bool {
        matches!(record.progress(), Progress::Ahead)
    }

    #[test]
    fn each_record_is_reached_by_itself_in_whichever_order() {
        let event = event();
        assert!(event.latest().is_none());
        let unpublished = event.begin_record(OPERATION).unwrap();
        assert!(event.latest().is_none());
        let first = record(&event);
        let second = record(&event);
        assert_eq!(event.latest().unwrap().number, second.number);
        unpublished.publish();
        assert_eq!(event.latest().unwrap().number, second.number, "an earlier record does not come back");
        second.settle(Progress::Reached(Instant::now()));
        assert!(is_ahead(&first) && !is_ahead(&second));
        first.settle(Progress::Lost);
        assert!(matches!(first.wait(), Progress::Lost));
        assert!(matches!(second.wait(), Progress::Reached(_)));
    }

    #[test]
    fn a_sleeping_waiter_is_woken() {
        let event = event();
        let record = record(&event);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| event.latest().unwrap().wait());
            record.settle(Progress::Reached(Instant::now()));
            assert!(matches!(waiter.join().unwrap(), Progress::Reached(_)));
        });
    }

    #[test]
    fn too_many_outstanding_records_are_refused_and_what_was_settled_makes_room() {
        let event = event();
        let records: Vec<_> = (0..SLOTS).map(|_| record(&event)).collect();
        let error = event.begin_record(OPERATION).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        assert!(error.message().contains("1792 records"), "{error}");
        assert_eq!(event.latest().unwrap().number, SLOTS as u64);
        for record in &records[1..4] {
            record.settle(Progress::Reached(Instant::now()));
        }
        // The refused number is skipped, together with its slot.
        let later = record(&event);
        assert_eq!(later.number, SLOTS as u64 + 2);
        assert!(is_ahead(&records[0]) && is_ahead(&later));
        assert!(!is_ahead(&records[1]), "the ring has moved on over what was settled");
    }

    /// Makes a record look like that of a process that has ended.
    fn by_the_dead(event: &Arc<SharedEvent>, index: u8) -> Record {
        let nobody = (1 << 22 | 1) << 32 | u64::from(index);
        event.state().recorders[usize::from(index)].store(nobody, Ordering::Relaxed);
        let record = record(event);
        let word = Word { number: record.number, recorder: index, standing: Standing::Pending };
        event.slot(record.number).store(word.pack(), Ordering::Relaxed);
        record
    }

    #[test]
    fn the_places_of_processes_that_have_ended_are_used_again_after_their_records_were_settled() {
        let event = event();
        // This process takes the place after each. At the last one, only the first can be used again.
        let records: Vec<_> = (0..RECORDERS as u8).map(|index| by_the_dead(&event, index)).collect();
        let own = record(&event);
        assert_eq!(Word::unpack(event.slot(own.number).load(Ordering::Relaxed)).recorder, 0);
        assert!(records[0].pending().is_err() && records[1].pending().is_ok());
        assert!(is_ahead(&own) && records.iter().all(|record| !is_ahead(record)));
        assert!(matches!(records[7].wait(), Progress::Reached(_)));
    }

    #[test]
    fn nonsense_in_the_file_ends_waits_and_is_no_harm() {
        let event = event();
        let record = record(&event);
        for word in [u64::MAX, record.number << 16 | 0xff01, record.number << 16 | 0x0077, 0] {
            event.slot(record.number).store(word, Ordering::Relaxed);
            assert!(matches!(record.wait(), Progress::Reached(_)), "{word:#x}");
        }
        for number in [u64::MAX, (u64::MAX >> 16) - 1] {
            event.state().latest.store(number, Ordering::Relaxed);
            assert!(matches!(event.latest().unwrap().wait(), Progress::Reached(_)));
            event.state().next.store(number, Ordering::Relaxed);
            let _ = event.begin_record(OPERATION);
        }
    }
}
