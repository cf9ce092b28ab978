//! Memory that other code allocated, opened by other processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use highwater_core::{
    AllocateOptions, Backend, DeviceBuffer, DeviceMemoryKind, DevicePtr, ErrorKind, PhysicalMemoryOptions, Runtime,
    TicketBatch, Transport,
};
use highwater_mock::{MockGpu, MockOptions, Operation};

use crate::Exporter;
use crate::peer::{Peer, until};

/// What other code allocated. Dropping it frees the memory.
struct Foreign {
    gpu: Arc<MockGpu>,
    ptr: DevicePtr,
    /// Bytes and number of the mappings; `None` for one block.
    pieces: Option<(usize, usize)>,
    dropped: Arc<AtomicUsize>,
}

impl Foreign {
    fn block(gpu: &Arc<MockGpu>, bytes: usize) -> (Self, Arc<AtomicUsize>) {
        let kind = DeviceMemoryKind::Shareable(Transport::Descriptor);
        let ptr = gpu.allocate(0, &AllocateOptions::new(bytes).with_kind(kind)).unwrap();
        Self::of(gpu, ptr, None)
    }

    /// Mappings of one granule each, without a gap, as an allocator of expandable segments makes them.
    fn segments(gpu: &Arc<MockGpu>, count: usize) -> (Self, Arc<AtomicUsize>) {
        let piece = gpu.capabilities(0).unwrap().mapped_memory_granularity;
        let ptr = gpu.reserve_addresses(0, count * piece).unwrap();
        for index in 0..count {
            let options = PhysicalMemoryOptions::new(piece).with_shareable(Transport::Descriptor);
            let memory = gpu.create_memory(0, &options).unwrap();
            // SAFETY: the addresses are this value's, and each piece has its own.
            unsafe { gpu.map_memory(0, ptr.offset(index * piece), memory) }.unwrap();
            gpu.destroy_memory(memory).unwrap();
        }
        // SAFETY: as above.
        unsafe { gpu.set_memory_access(0, ptr, count * piece, 0) }.unwrap();
        Self::of(gpu, ptr, Some((piece, count)))
    }

    fn of(gpu: &Arc<MockGpu>, ptr: DevicePtr, pieces: Option<(usize, usize)>) -> (Self, Arc<AtomicUsize>) {
        let dropped = Arc::<AtomicUsize>::default();
        (Self { gpu: gpu.clone(), ptr, pieces, dropped: dropped.clone() }, dropped)
    }

    /// Adopts `len` values from an offset on.
    fn adopt(self, runtime: &Runtime, offset: usize, len: usize) -> DeviceBuffer<u32> {
        let device = runtime.device(0).unwrap();
        // SAFETY: the memory stays until this value is dropped, and nothing else uses it.
        unsafe { device.adopt(self.ptr.offset(offset), len * 4, self) }.unwrap()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
        // SAFETY: no work uses the memory, which the mock checks, and no process has it open, which the tests check.
        unsafe {
            match self.pieces {
                None => self.gpu.free(0, self.ptr, None).unwrap(),
                Some((piece, count)) => {
                    self.gpu.unmap_memory(0, self.ptr, count * piece).unwrap();
                    self.gpu.free_addresses(0, self.ptr, count * piece).unwrap();
                }
            }
        }
    }
}

/// Adopts a whole range of mappings, for a process that obeys.
pub(crate) fn adopt_segments(gpu: &Arc<MockGpu>, runtime: &Runtime, count: usize) -> DeviceBuffer<u32> {
    let piece = gpu.capabilities(0).unwrap().mapped_memory_granularity;
    Foreign::segments(gpu, count).0.adopt(runtime, 0, count * piece / 4)
}

#[test]
fn a_part_of_a_foreign_block_is_opened_at_its_offset() {
    let exporter = Exporter::new();
    let (foreign, dropped) = Foreign::block(&exporter.gpu, 1 << 16);
    let buffer = foreign.adopt(&exporter.runtime, 4096, 1000);
    exporter.stream.fill(&buffer, 5_u32).unwrap();
    exporter.stream.fill(buffer.slice(0..10).unwrap(), 6_u32).unwrap();
    let mut peer = Peer::with_open(&buffer.share().unwrap());
    assert_eq!(peer.tell("read a"), "several");
    peer.tell(&format!("open first {}", buffer.slice(0..10).unwrap().share().unwrap()));
    assert_eq!(peer.tell("read first"), "6");
    peer.tell("drop first");
    peer.tell(&format!("open b {}", buffer.slice(10..1000).unwrap().share().unwrap()));
    assert_eq!(peer.tell("read b"), "5");
    peer.tell("fill b 9 1");
    peer.tell("read b");
    let seen = exporter.stream.download(&buffer).unwrap();
    assert_eq!((&seen[..10], &seen[10..]), (&[6; 10][..], &[9; 990][..]));
    // The owner drops the buffer first: the memory stays until the importer has released both.
    drop(buffer);
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 1);
    peer.tell("drop a");
    assert_eq!(peer.tell("read b"), "9");
    assert_eq!(dropped.load(Ordering::SeqCst), 0, "the importer still has it open");
    peer.tell("drop b");
    until("the memory is let go", || dropped.load(Ordering::SeqCst) == 1);
    assert!(peer.quit().success());
    exporter.end_once_all_is_back();
}

#[test]
fn mappings_are_one_range_in_the_other_process() {
    // More pieces than one message carries.
    const COUNT: usize = 37;
    let exporter = Exporter::with(MockOptions::new().with_memory_bytes(1 << 30));
    let piece = exporter.gpu.capabilities(0).unwrap().mapped_memory_granularity;
    let (foreign, dropped) = Foreign::segments(&exporter.gpu, COUNT);
    let len = (COUNT - 1) * piece / 4;
    let buffer = foreign.adopt(&exporter.runtime, piece / 2, len);
    exporter.stream.fill(&buffer, 1_u32).unwrap();
    let border = piece / 8;
    exporter.stream.fill(buffer.slice(border - 2..border + 2).unwrap(), 7_u32).unwrap();
    exporter.stream.fill(buffer.slice(len - 1..len).unwrap(), 8_u32).unwrap();
    let whole = buffer.share().unwrap();
    let mut peer = Peer::start_with("memory=1GiB", |_| {});
    peer.tell(&format!("open a {whole}"));
    assert_eq!(peer.tell("read a"), "several");
    let cut = |range: std::ops::Range<usize>| buffer.slice(range).unwrap().share().unwrap();
    peer.tell(&format!("open border {}", cut(border - 2..border + 2)));
    peer.tell(&format!("open last {}", cut(len - 1..len)));
    assert_eq!((peer.tell("read border"), peer.tell("read last")), ("7".to_owned(), "8".to_owned()));
    // One fill over every border in the importer.
    peer.tell("fill a 3 1");
    peer.tell("read a");
    assert_eq!(exporter.stream.download(&buffer).unwrap(), vec![3; len]);
    drop(buffer);
    ["a", "border", "last"].iter().for_each(|name| drop(peer.tell(&format!("drop {name}"))));
    until("the memory is let go", || dropped.load(Ordering::SeqCst) == 1);
    // The end of the process checks that nothing is left in it.
    assert!(peer.quit().success());
    exporter.end_once_all_is_back();
}

#[test]
fn a_batch_names_adopted_memory_of_one_part_and_of_several() {
    // More pieces than one message carries.
    const COUNT: usize = 37;
    let options = || MockOptions::new().with_memory_bytes(1 << 30);
    let (exporter, importer) = (Exporter::with(options()), Exporter::with(options()));
    let piece = exporter.gpu.capabilities(0).unwrap().mapped_memory_granularity;
    let (foreign, block_dropped) = Foreign::block(&exporter.gpu, 1 << 16);
    let tensor = foreign.adopt(&exporter.runtime, 4096, 1000);
    let adopt = |value: u32| {
        let (foreign, dropped) = Foreign::segments(&exporter.gpu, COUNT);
        let buffer = foreign.adopt(&exporter.runtime, piece / 2, (COUNT - 1) * piece / 4);
        exporter.stream.fill(&buffer, value).unwrap();
        (buffer, dropped)
    };
    let ((first, first_dropped), (second, second_dropped)) = (adopt(1), adopt(2));
    let own = exporter.make(500, 3);
    exporter.stream.fill(&tensor, 4_u32).unwrap();
    let (border, len) = (piece / 8, first.len());
    exporter.stream.fill(first.slice(border - 2..border + 2).unwrap(), 7_u32).unwrap();
    exporter.stream.fill(second.slice(len - 1..len).unwrap(), 8_u32).unwrap();
    exporter.stream.fill(tensor.slice(10..20).unwrap(), 9_u32).unwrap();
    let parts = [
        (&tensor, 10..20, 9),
        (&first, border - 2..border + 2, 7),
        (&own, 0..500, 3),
        (&second, len - 1..len, 8),
        (&first, border + 2..len, 1),
        (&tensor, 20..1000, 4),
    ];
    let slices: Vec<_> = parts.iter().map(|(buffer, range, _)| buffer.slice(range.clone()).unwrap()).collect();
    let batch = exporter.runtime.share_all(&slices).unwrap();
    assert_eq!((batch.len(), batch.allocations()), (6, 4));
    let batch: TicketBatch = batch.to_string().parse().unwrap();
    // The exporter cannot export a part of the second range of mappings.
    exporter.gpu.fail_call(Operation::ExportMemory, 4 + 50, ErrorKind::OutOfMemory).unwrap();
    let error = importer.runtime.open_shared_all::<u32>(&batch).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert_eq!(importer.runtime.statistics().sharing.imports, 0);
    let opened = importer.runtime.open_shared_all::<u32>(&batch).unwrap();
    for (place, (opened, (_, range, value))) in opened.iter().zip(&parts).enumerate() {
        assert_eq!(importer.stream.download(opened).unwrap(), vec![*value; range.len()], "slice {place}");
        // A ticket of the slice is the same memory.
        let single = importer.runtime.open_shared::<u32>(&batch.ticket(place).unwrap()).unwrap();
        assert_eq!((single.ptr(), single.len()), (opened.ptr(), opened.len()), "slice {place}");
    }
    // What was opened is shared on.
    let again = importer.runtime.share_all(&[(&opened[1]).into(), (&opened[5]).into()]).unwrap();
    let back = exporter.runtime.open_shared_all::<u32>(&again).unwrap();
    assert_eq!([back[0].ptr(), back[1].ptr()], [slices[1].ptr(), slices[5].ptr()]);
    // In the exporter, the batch is the original buffers.
    let originals = exporter.runtime.open_shared_all::<u32>(&batch).unwrap();
    for (place, (original, slice)) in originals.iter().zip(&slices).enumerate() {
        assert_eq!((original.ptr(), original.len()), (slice.ptr(), slice.len()), "slice {place}");
    }
    drop(slices);
    drop((back, originals, tensor, first, second, own));
    let dropped = || [&block_dropped, &first_dropped, &second_dropped].map(|dropped| dropped.load(Ordering::SeqCst));
    assert_eq!(dropped(), [0; 3], "the importer still has all of it open");
    drop(opened);
    until("the memory is let go", || dropped() == [1; 3]);
    importer.end_once_all_is_back();
    exporter.end_once_all_is_back();
}

#[test]
fn two_tensors_of_one_block_have_two_lives() {
    let exporter = Exporter::new();
    let (foreign, dropped) = Foreign::block(&exporter.gpu, 1 << 16);
    let ptr = foreign.ptr;
    let foreign = Arc::new(foreign);
    let device = exporter.runtime.device(0).unwrap();
    // SAFETY: the block keeps the bytes of both.
    let first: DeviceBuffer<u32> = unsafe { device.adopt(ptr, 4096, foreign.clone()) }.unwrap();
    // SAFETY: as above.
    let second: DeviceBuffer<u32> = unsafe { device.adopt(ptr.offset(8192), 4096, foreign) }.unwrap();
    drop(device);
    exporter.stream.fill(&first, 1_u32).unwrap();
    exporter.stream.fill(&second, 2_u32).unwrap();
    let mut peer = Peer::start();
    for (name, buffer) in [("a", &first), ("b", &second)] {
        peer.tell(&format!("open {name} {}", buffer.share().unwrap()));
    }
    assert_eq!((peer.tell("read a"), peer.tell("read b")), ("1".to_owned(), "2".to_owned()));
    drop(first);
    peer.tell("drop a");
    until("the first is let go", || exporter.runtime.statistics().sharing.limbo_blocks == 0);
    assert_eq!(peer.tell("read b"), "2");
    drop(second);
    assert_eq!(dropped.load(Ordering::SeqCst), 0);
    peer.tell("drop b");
    until("the memory is let go", || dropped.load(Ordering::SeqCst) == 1);
    assert!(peer.quit().success());
    exporter.end_once_all_is_back();
}

#[test]
fn a_killed_importer_lets_go_of_adopted_memory() {
    let exporter = Exporter::with(MockOptions::new().with_memory_bytes(1 << 30));
    for round in 0..10 {
        let (foreign, dropped) = Foreign::segments(&exporter.gpu, 20);
        let buffer = foreign.adopt(&exporter.runtime, 0, 1000);
        let whole = exporter.gpu.capabilities(0).unwrap().mapped_memory_granularity * 20 / 4;
        let (foreign, all_dropped) = Foreign::segments(&exporter.gpu, 20);
        let all = foreign.adopt(&exporter.runtime, 0, whole);
        let mut peer = Peer::start_with("memory=1GiB", |_| {});
        peer.tell(&format!("open a {}", buffer.share().unwrap()));
        // It is killed at some point of the open of twenty parts.
        peer.say(&format!("open b {}", all.share().unwrap()));
        std::thread::sleep(std::time::Duration::from_micros(200 * round));
        drop((buffer, all));
        peer.kill();
        until("the memory is let go", || {
            dropped.load(Ordering::SeqCst) == 1 && all_dropped.load(Ordering::SeqCst) == 1
        });
    }
    exporter.end_once_all_is_back();
}

#[test]
fn a_refused_part_leaves_nothing_behind() {
    let exporter = Exporter::with(MockOptions::new().with_memory_bytes(1 << 30));
    let piece = exporter.gpu.capabilities(0).unwrap().mapped_memory_granularity;
    let (foreign, dropped) = Foreign::segments(&exporter.gpu, 20);
    let buffer = foreign.adopt(&exporter.runtime, 0, 20 * piece / 4);
    exporter.stream.fill(&buffer, 4_u32).unwrap();
    let ticket = buffer.share().unwrap();
    // The exporter cannot export the 18th part, and the importer cannot take in the 5th.
    exporter.gpu.fail_call(Operation::ExportMemory, 18, ErrorKind::OutOfMemory).unwrap();
    let mut peer = Peer::start_with("memory=1GiB", |_| {});
    let refused = peer.ask(&format!("open a {ticket}"));
    assert!(refused.starts_with("error OutOfMemory"), "{refused}");
    for fault in ["import_memory:5", "map_memory:3", "set_memory_access:1", "reserve_addresses:1"] {
        let mut poor = Peer::start_with(&format!("memory=1GiB,fail={fault}:vendor-error"), |_| {});
        let refused = poor.ask(&format!("open a {ticket}"));
        assert!(refused.starts_with("error Vendor"), "{fault}: {refused}");
        // The end of the process checks that nothing is left in it.
        poor.tell(&format!("open a {ticket}"));
        assert_eq!(poor.tell("read a"), "4", "{fault}");
        poor.tell("drop a");
        assert!(poor.quit().success(), "{fault}");
    }
    peer.tell(&format!("open a {ticket}"));
    assert_eq!(peer.tell("read a"), "4");
    peer.tell("drop a");
    assert!(peer.quit().success());
    drop(buffer);
    until("the memory is let go", || dropped.load(Ordering::SeqCst) == 1);
    exporter.end_once_all_is_back();
}

#[test]
fn adopted_memory_outlives_its_killed_owner() {
    let mut owner = Peer::start_with("memory=1GiB", |_| {});
    let ticket = owner.tell("adopt s 20 6");
    let mut peer = Peer::start_with("memory=1GiB", |_| {});
    peer.tell(&format!("open a {ticket}"));
    owner.kill();
    assert_eq!(peer.tell("read a"), "6");
    peer.tell("fill a 7 1");
    assert_eq!(peer.tell("read a"), "7");
    peer.tell("drop a");
    assert!(peer.quit().success());
}
