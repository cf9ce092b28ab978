//! Batches: many slices of few allocations, shared and opened with one call each.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use highwater_core::{
    Answer, Backend, BackendLayer, Call, DeviceBuffer, DevicePtr, DeviceSlice, Error, ErrorKind, IpcSharing,
    MemoryHandle, Result, Runtime, SharingLayer, SplitMix64, TicketBatch, Transport,
};
use highwater_mock::{MockGpu, MockOptions, Operation};

use crate::Exporter;
use crate::peer::{Peer, until};

/// Views of whole buffers.
fn whole<'b>(buffers: impl IntoIterator<Item = &'b DeviceBuffer<u32>>) -> Vec<DeviceSlice<'b, u32>> {
    buffers.into_iter().map(DeviceSlice::from).collect()
}

/// The batch with other bytes, and a checksum that fits them.
fn forged(batch: &TicketBatch, change: impl FnOnce(&mut [u8])) -> TicketBatch {
    let mut bytes = batch.to_bytes();
    let checked = bytes.len() - 4;
    change(&mut bytes[..checked]);
    let sum = crc32fast::hash(&bytes[..checked]);
    bytes[checked..].copy_from_slice(&sum.to_le_bytes());
    TicketBatch::from_bytes(&bytes).unwrap()
}

impl Exporter {
    /// Buffers with the values 0, 1, and so on.
    fn make_all(&self, count: u32, len: usize) -> Vec<DeviceBuffer<u32>> {
        (0..count).map(|value| self.make(len, value)).collect()
    }

    fn open_all(&self, batch: &TicketBatch) -> Result<Vec<DeviceBuffer<u32>>> {
        self.runtime.open_shared_all(batch)
    }

    fn refused(&self, batch: &TicketBatch) -> Error {
        let error = self.open_all(batch).map(drop).unwrap_err();
        assert!(!error.message().is_empty() && !error.hint().is_empty(), "{error:?}");
        error
    }

    /// Opens of allocations, opens with a mapping that was kept, and those that are held.
    fn opens(&self) -> (u64, u64, u64) {
        let sharing = self.runtime.statistics().sharing;
        (sharing.opens, sharing.kept_opens, sharing.imports)
    }
}

#[test]
fn many_slices_of_forty_allocations_are_forty_opens() {
    const SLICES: usize = 19_500;
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let buffers = exporter.make_all(40, 1000);
    let slice = |at: usize| buffers[at * 40 / SLICES].slice(at % 900..at % 900 + 1 + at % 100).unwrap();
    let slices: Vec<_> = (0..SLICES).map(slice).collect();
    let batch = exporter.runtime.share_all(&slices).unwrap();
    assert_eq!((batch.len(), batch.allocations()), (SLICES, 40));
    let batch = TicketBatch::from_bytes(&batch.to_bytes()).unwrap();
    let opened = importer.open_all(&batch).unwrap();
    let calls = || {
        let opens = [Operation::OpenMemory, Operation::CloseMemory].map(|operation| importer.gpu.calls(operation));
        (exporter.gpu.calls(Operation::ExportMemory), opens)
    };
    assert_eq!(calls(), (40, [40, 0]));
    assert_eq!(importer.opens(), (40, 0, 40));
    assert!(opened.iter().zip(&slices).all(|(opened, slice)| opened.len() == slice.len()));
    for at in (0..SLICES).step_by(137) {
        let values = vec![(at * 40 / SLICES) as u32; slices[at].len()];
        assert_eq!(importer.stream.download(&opened[at]).unwrap(), values);
    }
    // Again: no call of the backend at all.
    let again = importer.open_all(&batch).unwrap();
    assert_eq!(calls(), (40, [40, 0]));
    assert_eq!(importer.opens(), (80, 40, 80));
    assert!(again.iter().zip(&opened).all(|(again, opened)| again.ptr() == opened.ptr()));
    drop((again, opened));
    until("all is let go of", || importer.opens().2 == 0);
    assert_eq!(calls(), (40, [40, 0]), "the mappings are kept");
    drop(slices);
    drop(buffers);
    until("the memory is back", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn a_batch_asks_each_stream_once_whether_its_work_is_done() {
    let exporter = Exporter::with(MockOptions::new().with_latency(Duration::from_millis(20)));
    let other = exporter.runtime.device(0).unwrap().create_stream().unwrap();
    let buffers = exporter.make_all(40, 100);
    exporter.stream.synchronize().unwrap();
    for buffer in &buffers {
        other.fill(buffer, 3_u32).unwrap();
    }
    let calls = || [Operation::QueryStream, Operation::RecordEvent].map(|operation| exporter.gpu.calls(operation));
    let before = calls();
    let batch = exporter.runtime.share_all(&whole(&buffers)).unwrap();
    let [queries, records] = calls();
    // The service asks events, and no stream.
    assert!(queries - before[0] <= 2 && records - before[1] <= 2, "{queries} {records} {before:?}");
    // Each allocation waits for the work.
    let importer = Exporter::new();
    for (place, opened) in importer.open_all(&batch).unwrap().iter().enumerate() {
        assert_eq!(importer.stream.download(opened).unwrap(), [3; 100], "{place}");
    }
    drop((buffers, other));
    until("the memory is back", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn each_buffer_is_dropped_by_itself_and_the_last_one_releases_the_allocation() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let buffers = exporter.make_all(2, 1000);
    let slices = [buffers[0].slice(0..500), buffers[1].slice(0..1000), buffers[0].slice(250..1000)];
    let batch = exporter.runtime.share_all(&slices.map(Result::unwrap)).unwrap();
    let mut opened = importer.open_all(&batch).unwrap();
    drop(buffers);
    let limbo = || exporter.runtime.statistics().sharing.limbo_blocks;
    assert_eq!(limbo(), 2);
    drop(opened.remove(1));
    until("one is let go of", || limbo() == 1);
    assert_eq!(importer.opens().2, 1);
    // The first buffer goes, the other of its allocation stays.
    drop(opened.remove(0));
    exporter.runtime.trim_shared().unwrap();
    assert_eq!((limbo(), importer.opens().2), (1, 1));
    assert_eq!(importer.stream.download(&opened[0]).unwrap(), vec![0; 750]);
    // Work that is queued on one keeps the allocation after the last drop.
    importer.gpu.set_latency(Duration::from_millis(200));
    importer.stream.fill(&opened[0], 5_u32).unwrap();
    drop(opened);
    exporter.runtime.trim_shared().unwrap();
    assert_eq!(limbo(), 1);
    until("both are let go of", || limbo() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn overlapping_repeated_and_empty_slices_are_buffers_of_their_own() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let buffer = exporter.make(1000, 3);
    let ranges = [0..1000, 100..600, 100..600, 500..500, 0..1, 1000..1000];
    let slices: Vec<_> = ranges.iter().map(|range| buffer.slice(range.clone()).unwrap()).collect();
    let batch = exporter.runtime.share_all(&slices).unwrap();
    let opened = importer.open_all(&batch).unwrap();
    assert_eq!(importer.opens(), (1, 0, 1));
    let start = opened[0].ptr();
    for (opened, range) in opened.iter().zip(&ranges) {
        assert_eq!((opened.len(), opened.ptr()), (range.len(), start.offset(range.start * 4)));
    }
    importer.stream.fill(&opened[2], 9_u32).unwrap();
    assert_eq!(importer.stream.download(&opened[0]).unwrap()[599..601], [9, 3]);
    assert_eq!(importer.stream.download(&opened[1]).unwrap(), vec![9; 500]);
    // Nothing, and nothing of it.
    let nothing = exporter.runtime.share_all::<u32>(&[]).unwrap();
    assert!(nothing.is_empty());
    assert!(importer.open_all(&TicketBatch::from_bytes(&nothing.to_bytes()).unwrap()).unwrap().is_empty());
    // One slice by its ticket.
    let one = importer.runtime.open_shared::<u32>(&batch.ticket(1).unwrap()).unwrap();
    assert_eq!(importer.stream.download(&one).unwrap(), vec![9; 500]);
    drop((one, opened, slices));
    drop(buffer);
    until("the memory is back", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn slices_of_several_devices_and_types_are_one_batch() {
    let options = || MockOptions::new().with_devices(2);
    let (exporter, importer) = (Exporter::with(options()), Exporter::with(options()));
    let mut buffers = Vec::new();
    for device in [0, 1, 1] {
        let device = exporter.runtime.device(device).unwrap();
        let stream = device.create_stream().unwrap();
        let buffer = device.allocate_shared::<u32>(1000).unwrap();
        stream.fill(&buffer, buffers.len() as u32 + 7).unwrap();
        buffers.push(buffer);
    }
    let halves = exporter.runtime.device(0).unwrap().allocate_shared::<u16>(10).unwrap();
    exporter.stream.fill(&halves, 0x1234_u16).unwrap();
    let bytes: Vec<_> = whole(&buffers).iter().map(DeviceSlice::as_bytes).collect();
    let bytes = [&bytes[..], &[halves.slice(3..9).unwrap().as_bytes()]].concat();
    let batch = exporter.runtime.share_all(&bytes).unwrap();
    let mut opened = importer.runtime.open_shared_all::<u8>(&batch).unwrap();
    assert_eq!(opened.iter().map(DeviceBuffer::device).collect::<Vec<_>>(), [0, 1, 1, 0]);
    let opened_halves = opened.pop().unwrap().reinterpret::<u16>().unwrap();
    assert_eq!(importer.stream.download(&opened_halves).unwrap(), vec![0x1234; 6]);
    for (value, opened) in (7_u32..).zip(opened) {
        let stream = importer.runtime.device(opened.device()).unwrap().create_stream().unwrap();
        let opened = opened.reinterpret::<u32>().unwrap();
        assert_eq!(stream.download(&opened).unwrap(), vec![value; 1000]);
    }
    // The wrong type is refused before anything is opened, with the slice.
    let odd = [halves.slice(0..4).unwrap().as_bytes(), buffers[0].slice(1..2).unwrap().as_bytes()];
    let odd = exporter.runtime.share_all(&odd).unwrap();
    let before = importer.opens();
    let error = importer.runtime.open_shared_all::<f64>(&odd).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("slice 1: the range of 4 bytes at offset 4"), "{error}");
    assert_eq!(importer.opens().0, before.0);
    drop((opened_halves, bytes));
    drop((halves, buffers));
    until("the memory is back", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn the_values_of_a_buffer_are_read_as_another_type_only_in_whole() {
    let exporter = Exporter::new();
    let buffer = exporter.make(10, 1);
    let ticket = buffer.slice(1..4).unwrap().share().unwrap();
    let opened = exporter.runtime.open_shared::<u32>(&ticket).unwrap();
    let bytes = opened.reinterpret::<u8>().unwrap();
    assert_eq!(bytes.len(), 12);
    let error = bytes.reinterpret::<u64>().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("12 bytes at offset 4"), "{error}");
    // The refused buffer is dropped; the memory is not.
    exporter.end_after(buffer);
}

#[test]
fn a_batch_of_this_runtime_is_the_original_buffers() {
    let exporter = Exporter::new();
    let buffers = exporter.make_all(3, 100);
    let batch = exporter.runtime.share_all(&whole(&buffers)).unwrap();
    let opened = exporter.open_all(&batch).unwrap();
    assert!(opened.iter().zip(&buffers).all(|(opened, buffer)| opened.ptr() == buffer.ptr()));
    assert_eq!(exporter.opens(), (0, 0, 0));
    drop(buffers);
    assert_eq!(exporter.stream.download(&opened[2]).unwrap(), vec![2; 100]);
    drop(opened);
    assert_eq!(exporter.refused(&batch).kind(), ErrorKind::Expired);
    exporter.end();
}

#[test]
fn imports_of_several_exporters_are_shared_on_in_one_batch() {
    let (first, second, middle, last) = (Exporter::new(), Exporter::new(), Exporter::new(), Exporter::new());
    let (one, two, own) = (first.make(100, 1), second.make(100, 2), middle.make(100, 3));
    let opened = [
        middle.runtime.open_shared::<u32>(&one.share().unwrap()).unwrap(),
        middle.runtime.open_shared::<u32>(&two.slice(50..100).unwrap().share().unwrap()).unwrap(),
        // The allocation of the first one again, by a block of its own.
        middle.runtime.open_shared::<u32>(&one.slice(0..10).unwrap().share().unwrap()).unwrap(),
    ];
    let batch = middle.runtime.share_all(&whole(opened.iter().chain([&own]))).unwrap();
    assert_eq!((batch.len(), batch.allocations()), (4, 3));
    let again = last.open_all(&batch).unwrap();
    assert_eq!(last.opens(), (3, 0, 3));
    for (buffer, (value, len)) in again.iter().zip([(1, 100), (2, 50), (1, 10), (3, 100)]) {
        assert_eq!(last.stream.download(buffer).unwrap(), vec![value; len]);
    }
    // One of the exporters gets part of its own memory back.
    let home = first.open_all(&batch).unwrap();
    assert_eq!((home[0].ptr(), first.opens().2), (one.ptr(), 2));
    drop((home, again, opened, one, two, own));
    for side in [last, middle, first, second] {
        until("the memory is back", || side.taken() == 0);
        side.end();
    }
}

#[test]
fn an_open_waits_for_the_work_before_the_share_of_each_allocation() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let buffers = exporter.make_all(20, 1000);
    exporter.gpu.set_latency(Duration::from_millis(3));
    for buffer in buffers.iter().rev() {
        exporter.stream.fill(buffer, 77_u32).unwrap();
    }
    let batch = exporter.runtime.share_all(&whole(&buffers)).unwrap();
    for opened in importer.open_all(&batch).unwrap() {
        assert_eq!(importer.stream.download(&opened).unwrap(), vec![77; 1000]);
    }
    importer.end_after(buffers);
    exporter.end();
}

#[test]
fn slices_that_cannot_be_shared_are_refused_by_their_place() {
    let (exporter, other) = (Exporter::new(), Exporter::new());
    let shared = exporter.make(100, 1);
    let plain = exporter.runtime.device(0).unwrap().allocate::<u32>(100).unwrap();
    // A part of the stream's own memory.
    let ordered = exporter.stream.allocate::<u32>(100).unwrap();
    let foreign = other.make(100, 1);
    for (wrong, why) in
        [(&plain, "not allocated to be shared"), (&ordered, "stream-ordered"), (&foreign, "another runtime")]
    {
        let error = exporter.runtime.share_all(&whole([&shared, &shared, wrong])).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidArgument, "share_all"));
        assert!(error.message().starts_with("slice 2: ") && error.message().contains(why), "{error}");
        assert!(!error.hint().is_empty());
    }
    let too_many = vec![DeviceSlice::from(&shared); TicketBatch::MAX_SLICES + 1];
    let error = exporter.runtime.share_all(&too_many).unwrap_err();
    assert!(error.message().contains("at most 1048576 slices, not 1048577"), "{error}");
    let batch = exporter.runtime.share_all(&whole([&shared])).unwrap();
    exporter
        .stream
        .capture(|_| {
            let error = exporter.runtime.share_all(&whole([&shared])).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Capture);
            assert_eq!(exporter.refused(&batch).kind(), ErrorKind::Capture);
            Ok(())
        })
        .unwrap();
    drop((plain, ordered, shared));
    other.end_after(foreign);
    exporter.end();
}

#[test]
fn a_batch_of_which_one_allocation_is_wrong_opens_nothing_and_loses_nothing() {
    let options = || MockOptions::new().with_devices(2);
    let (exporter, importer) = (Exporter::with(options()), Exporter::with(options()));
    let mut buffers = exporter.make_all(40, 100);
    let slices: Vec<_> = (0..80).map(|at| buffers[at % 40].slice(at / 40..100).unwrap()).collect();
    let batch = exporter.runtime.share_all(&slices).unwrap();
    let at_33 = |offset: usize| 32 + 33 * 84 + offset;
    let wrong = |change: &dyn Fn(&mut [u8])| importer.refused(&forged(&batch, change));
    let refusals = [
        (wrong(&|bytes| bytes[at_33(4)] ^= 1), ErrorKind::Expired, "another boot"),
        (wrong(&|bytes| bytes[at_33(20)] ^= 1), ErrorKind::Expired, "another exporter"),
        (wrong(&|bytes| bytes[at_33(36)] ^= 1), ErrorKind::DeviceMissing, "another device"),
        (wrong(&|bytes| bytes[at_33(56)] ^= 64), ErrorKind::Expired, "another index"),
        (wrong(&|bytes| bytes[at_33(67)] ^= 2), ErrorKind::Expired, "another generation"),
        (wrong(&|bytes| bytes[at_33(0)] = 2), ErrorKind::Unsupported, "another transport"),
        (wrong(&|bytes| bytes[at_33(78)] = 1), ErrorKind::InvalidArgument, "another size"),
        (wrong(&|bytes| bytes[at_33(68)] = 200), ErrorKind::InvalidArgument, "a share that was not made"),
    ];
    for (error, kind, what) in refusals {
        assert_eq!((error.kind(), error.operation()), (kind, "open_shared_all"), "{what}: {error}");
        assert!(error.message().starts_with("allocation 33, which slice 33 uses first: "), "{what}: {error}");
    }
    assert_eq!(importer.opens(), (0, 0, 0));
    // The owner drops one.
    drop(slices);
    drop(buffers.remove(20));
    let error = importer.refused(&batch);
    assert_eq!(error.kind(), ErrorKind::Expired);
    assert!(error.message().starts_with("allocation 20, which slice 20 uses first: "), "{error}");
    assert_eq!(importer.opens(), (0, 0, 0));
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 0);
    // The rest is as good as before, and comes back.
    let rest = exporter.runtime.share_all(&whole(&buffers)).unwrap();
    let opened = importer.open_all(&rest).unwrap();
    assert_eq!(importer.stream.download(&opened[38]).unwrap(), vec![39; 100]);
    drop((opened, buffers));
    until("the memory is back", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn a_batch_that_names_page_locked_memory_as_device_memory_opens_nothing() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let buffer = exporter.make(100, 1);
    let batch = exporter.runtime.share_all(&whole([&buffer])).unwrap();
    let mut pinned = exporter.runtime.pinned_shared::<u32>(100).unwrap();
    pinned.write().unwrap().fill(2);
    let ticket = pinned.share().unwrap().to_bytes();
    // The allocation of the ticket, as it is and with the UUID of the device.
    let without_device = forged(&batch, |bytes| bytes[32..116].copy_from_slice(&ticket[12..96]));
    let with_device = forged(&batch, |bytes| {
        bytes[32..68].copy_from_slice(&ticket[12..48]);
        bytes[84..116].copy_from_slice(&ticket[64..96]);
    });
    for process in [&exporter, &importer] {
        assert_eq!(process.refused(&without_device).kind(), ErrorKind::DeviceMissing);
        assert_eq!(process.refused(&with_device).kind(), ErrorKind::InvalidArgument);
        assert_eq!(process.opens(), (0, 0, 0));
        let sharing = process.runtime.statistics().sharing;
        assert_eq!((sharing.mappings, sharing.pinned_mappings), (0, 0));
    }
    // Both are as good as before.
    let opened = importer.runtime.open_pinned::<u32>(&pinned.share().unwrap()).unwrap();
    assert_eq!(opened.read().unwrap(), [2; 100]);
    let buffers = importer.open_all(&batch).unwrap();
    assert_eq!(importer.stream.download(&buffers[0]).unwrap(), vec![1; 100]);
    drop((opened, buffers, pinned, buffer));
    until("the memory is back", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn a_call_of_a_batch_that_fails_opens_nothing_and_loses_nothing() {
    let mut steps = 0;
    for (operation, by_exporter) in [(Operation::ExportMemory, true), (Operation::OpenMemory, false)] {
        for kind in [ErrorKind::OutOfMemory, ErrorKind::Vendor, ErrorKind::Unsupported] {
            for nth in [1, 2, 31, 32, 33, 40] {
                let (exporter, importer) = (Exporter::new(), Exporter::new());
                let buffers = exporter.make_all(40, 100);
                let batch = exporter.runtime.share_all(&whole(&buffers)).unwrap();
                let gpu = if by_exporter { &exporter.gpu } else { &importer.gpu };
                gpu.fail_call(operation, nth, kind).unwrap();
                if kind == ErrorKind::OutOfMemory && !by_exporter {
                    // Asked for again, once memory was given back.
                    gpu.fail_call(operation, nth + 1, kind).unwrap();
                }
                let error = importer.refused(&batch);
                assert_eq!(error.kind(), kind, "{operation} {nth}: {error}");
                assert_eq!(importer.opens(), (0, 0, 0), "{operation} {nth}");
                // Nothing is held: the owner's drop frees everything once the mappings are gone.
                let mapped = importer.runtime.statistics().sharing.mappings;
                assert_eq!(importer.gpu.live_objects().mappings, mapped);
                let opened = importer.open_all(&batch).unwrap();
                assert_eq!(importer.opens(), (40, mapped, 40), "{operation} {nth}");
                for (value, opened) in (0..).zip(&opened) {
                    assert_eq!(importer.stream.download(opened).unwrap(), vec![value; 100]);
                }
                drop((opened, buffers));
                until("the memory is back", || exporter.taken() == 0);
                importer.end();
                exporter.end();
                steps += 1;
            }
        }
    }
    assert_eq!(steps, 36);
}

#[test]
fn a_dead_process_on_either_side_of_a_batch_leaves_the_other_what_it_has() {
    // The importer dies.
    let exporter = Exporter::new();
    let buffers = exporter.make_all(20, 1000);
    let batch = exporter.runtime.share_all(&whole(&buffers)).unwrap();
    let mut peer = Peer::start();
    assert_eq!(peer.tell(&format!("open-batch a {batch}")), "20");
    assert!(peer.tell("statistics").starts_with("imports=20 mappings=20 opens=20 kept=0"));
    drop(buffers);
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 20);
    peer.kill();
    exporter.end_once_all_is_back();
    // The exporter dies.
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let batch: TicketBatch = peer.tell("make-batch a 20 1000 6").parse().unwrap();
    let opened = importer.open_all(&batch).unwrap();
    peer.kill();
    for opened in &opened {
        assert_eq!(importer.stream.download(opened).unwrap(), vec![6; 1000]);
    }
    until("the end is noticed", || importer.runtime.statistics().sharing.lost_exporters == 1);
    let error = importer.refused(&batch);
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    assert!(error.message().starts_with("allocation 0, which slice 0 uses first: "), "{error}");
    assert_eq!(importer.opens(), (20, 0, 20));
    drop(opened);
    until("the mappings are gone", || importer.gpu.live_objects().mappings == 0);
    importer.end();
}

#[test]
fn importers_killed_in_the_middle_of_a_batch_lose_no_memory() {
    const KILLS: u32 = 60;
    const BUFFERS: u32 = 24;
    let exporter = Exporter::with(MockOptions::new().with_memory_bytes(4 * u64::from(BUFFERS) * 4096).with_checks());
    let mut random = SplitMix64::new(11);
    let mut opened = 0;
    // A kill comes within this time. It doubles until a process has opened something, because a busy machine is slow.
    let mut longest = Duration::from_millis(4);
    for round in 0..KILLS {
        let mut peer = Peer::start();
        let mut buffers = Vec::new();
        until("there is memory again", || {
            // The dead of the round before are noticed in the meantime.
            while buffers.len() < BUFFERS as usize {
                let Ok(buffer) = exporter.runtime.device(0).unwrap().allocate_shared::<u32>(1024) else { return false };
                exporter.stream.fill(&buffer, round).unwrap();
                buffers.push(buffer);
            }
            true
        });
        let batch = exporter.runtime.share_all(&whole(&buffers)).unwrap().to_string();
        peer.say(&format!("open-batch a {batch}"));
        peer.say("drop-batch a");
        peer.say(&format!("open-batch b {batch}"));
        std::thread::sleep(longest.mul_f64((random.draw() % 1024) as f64 / 1024.0));
        if random.draw().is_multiple_of(2) {
            buffers.clear();
        }
        opened += exporter.runtime.statistics().sharing.peers;
        if opened == 0 {
            longest = 2 * longest.min(Duration::from_secs(1));
        }
        peer.kill();
        for buffer in &buffers {
            assert_eq!(exporter.stream.download(buffer).unwrap(), vec![round; 1024]);
        }
    }
    assert!(opened > 0, "no process was killed after it had opened something");
    until("the memory is back", || exporter.taken() == 0);
    until("the dead are forgotten", || exporter.runtime.statistics().sharing.peers == 0);
    assert_eq!(exporter.gpu.violations(), []);
    exporter.end();
}

#[test]
fn exporters_killed_in_the_middle_of_a_batch_leave_nothing_open() {
    let importer = Exporter::with(MockOptions::new().with_checks());
    let mut random = SplitMix64::new(12);
    // A kill comes within twice the time of an open. How long one takes depends on the machine and its load.
    let mut longest: Duration = {
        let mut peer = Peer::start();
        let batch: TicketBatch = peer.tell("make-batch a 40 100 255").parse().unwrap();
        let began = Instant::now();
        drop(importer.open_all(&batch).unwrap());
        2 * began.elapsed()
    };
    until("nothing is open", || importer.opens().2 == 0);
    let (mut opened, mut expired) = (0, 0);
    for round in 0..40 {
        let mut peer = Peer::start();
        let batch: TicketBatch = peer.tell(&format!("make-batch a 40 100 {round}")).parse().unwrap();
        let wait = longest.mul_f64((random.draw() % 1024) as f64 / 1024.0);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(wait);
            peer.kill();
        });
        match importer.open_all(&batch) {
            Ok(buffers) => {
                opened += 1;
                assert_eq!(buffers.len(), 40);
                assert_eq!(importer.stream.download(&buffers[39]).unwrap(), vec![round; 100]);
            }
            Err(error) => {
                expired += 1;
                assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
                if opened == 0 {
                    longest = 2 * longest.min(Duration::from_secs(1));
                }
            }
        }
        killer.join().unwrap();
        until("nothing is open", || importer.opens().2 == 0);
    }
    assert!(opened > 0 && opened + expired == 40, "{opened} opened, {expired} expired");
    until("the mappings are gone", || importer.gpu.live_objects().mappings == 0);
    assert_eq!(importer.gpu.violations(), []);
    importer.end();
}

#[test]
fn threads_that_open_the_same_allocations_in_other_orders_do_not_wait_for_each_other_for_ever() {
    let (first, second, importer) = (Exporter::new(), Exporter::new(), Exporter::new());
    let side = |at: usize| [&first, &second][at % 2];
    let buffers: Vec<_> = (0..60).map(|value| side(value as usize).make(10, value)).collect();
    // Batches of one exporter, and of both by sharing imports on.
    let on = first.runtime.open_shared::<u32>(&buffers[1].share().unwrap()).unwrap();
    let mixed = first.runtime.share_all(&whole([&buffers[58], &on, &buffers[0], &buffers[2]])).unwrap();
    let mut batches = vec![mixed];
    for at in 0..2 {
        let own: Vec<_> = buffers.iter().skip(at).step_by(2).collect();
        batches.push(side(at).runtime.share_all(&whole(own.iter().copied())).unwrap());
        batches.push(side(at).runtime.share_all(&whole(own.into_iter().rev())).unwrap());
    }
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (importer, batches, buffers) = (&importer, &batches, &buffers);
            scope.spawn(move || {
                for round in 0..60 {
                    let batch = &batches[(thread + round) % batches.len()];
                    let opened = importer.open_all(batch).unwrap();
                    let one = importer.runtime.open_shared::<u32>(&buffers[round].share().unwrap()).unwrap();
                    assert_eq!((opened.len(), one.len()), (batch.len(), 10));
                    drop((opened, one));
                    importer.runtime.trim().unwrap();
                }
            });
        }
    });
    drop((on, buffers));
    until("nothing is open", || importer.opens().2 == 0);
    for side in [importer, first, second] {
        until("the memory is back", || side.taken() == 0);
        side.end();
    }
}

/// A device whose exports and opens take long, as on some machines.
#[derive(Debug)]
struct Slow {
    gpu: Arc<MockGpu>,
    sharing: Arc<SlowSharing>,
}

#[derive(Debug)]
struct SlowSharing {
    below: Arc<dyn IpcSharing>,
    running: AtomicUsize,
    most: AtomicUsize,
    threads: std::sync::Mutex<Vec<ThreadId>>,
}

const SLOW: Duration = Duration::from_millis(3);

impl SlowSharing {
    fn slowly<T>(&self, call: impl FnOnce() -> T) -> T {
        self.most.fetch_max(self.running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        self.threads.lock().unwrap().push(std::thread::current().id());
        std::thread::sleep(SLOW);
        let result = call();
        self.running.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

// SAFETY: Each call is forwarded as it came.
unsafe impl BackendLayer for Slow {
    fn below(&self) -> &dyn Backend {
        &*self.gpu
    }

    fn around<T: Answer>(&self, _: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        forward(&*self.gpu)
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        Some(Arc::clone(&self.sharing) as Arc<dyn IpcSharing>)
    }
}

impl SharingLayer for SlowSharing {
    fn below(&self) -> &dyn IpcSharing {
        &*self.below
    }

    fn around<T: Answer>(&self, _: &Call, forward: impl FnOnce(&dyn IpcSharing) -> Result<T>) -> Result<T> {
        forward(&*self.below)
    }

    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        // SAFETY: Forwarded as it came.
        self.slowly(|| unsafe { self.below.export_memory(device, ptr, transport) })
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        self.slowly(|| self.below.open_memory(device, handle))
    }
}

fn slow() -> (Arc<Slow>, Exporter) {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let sharing = SlowSharing {
        below: gpu.ipc_sharing().unwrap(),
        running: AtomicUsize::new(0),
        most: AtomicUsize::new(0),
        threads: std::sync::Mutex::default(),
    };
    let slow = Arc::new(Slow { gpu: gpu.clone(), sharing: Arc::new(sharing) });
    let runtime = Runtime::new(Arc::clone(&slow) as Arc<dyn Backend>).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let free = device.memory_info().unwrap().free;
    (slow, Exporter { gpu, runtime, stream, free })
}

#[test]
fn slow_calls_of_a_vendor_are_made_by_several_threads_and_lose_nothing() {
    for failing in [None, Some(Operation::ExportMemory), Some(Operation::OpenMemory)] {
        let ((from, exporter), (to, importer)) = (slow(), slow());
        let buffers = exporter.make_all(40, 100);
        let batch = exporter.runtime.share_all(&whole(&buffers)).unwrap();
        if let Some(operation) = failing {
            let gpu = if operation == Operation::ExportMemory { &exporter.gpu } else { &importer.gpu };
            gpu.fail_call(operation, 25, ErrorKind::Vendor).unwrap();
            assert_eq!(importer.refused(&batch).kind(), ErrorKind::Vendor);
            assert_eq!(importer.opens(), (0, 0, 0));
        }
        let opened = importer.open_all(&batch).unwrap();
        for (value, opened) in (0..).zip(&opened) {
            assert_eq!(importer.stream.download(opened).unwrap(), vec![value; 100]);
        }
        for side in [from, to] {
            let most = side.sharing.most.load(Ordering::SeqCst);
            assert!((2..=4).contains(&most), "{most} calls at once");
        }
        drop((opened, buffers));
        until("the memory is back", || exporter.taken() == 0);
        importer.end();
        exporter.end();
    }
}
