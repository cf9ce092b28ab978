//! Device memory: alignment, limits, and frees.

use highwater_hal::{AllocateOptions, Backend, DeviceMemoryKind, ErrorKind, MemoryInfo, PhysicalMemoryOptions};

use super::sharing::transports;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Block, DEVICE, Event, Stream};
use crate::random::Random;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "memory";
    addresses_are_aligned: ["memory.aligned"];
    blocks_do_not_overlap: ["memory.disjoint"] => lie_apart(DeviceMemoryKind::Plain);
    blocks_keep_their_bytes: ["memory.disjoint"];
    zero_bytes_are_refused: ["memory.zero"];
    more_than_there_is_is_refused: ["memory.exhausted"];
    more_than_there_is_is_refused_for_every_kind: ["memory.exhausted", "mapped.exhausted"];
    blocks_of_several_sizes_fill_the_memory: ["memory.exhausted", "memory.free-returns", "memory.disjoint", "memory.info-counts"];
    freed_bytes_come_back: ["memory.free-returns"];
    live_bytes_are_not_free: ["memory.info-counts", "memory.info"];
    answers_about_memory_follow_other_threads: ["memory.info-counts"];
    freed_bytes_are_free_at_once: ["memory.info-returns", "memory.free-returns"];
    bytes_freed_by_another_thread_are_free_at_once: ["memory.info-returns", "memory.free-returns"];
    exported_bytes_are_free_at_once: ["memory.info-returns", "memory.free-returns"] needs [has::shareable_memory];
    shareable_memory_is_memory: ["memory.aligned", "memory.disjoint"] needs [has::shareable_memory];
    stream_ordered_memory_is_memory: ["memory.aligned", "memory.disjoint"] needs [has::stream_ordered_memory];
    stream_ordered_bytes_come_back: ["memory.free-returns"] needs [has::stream_ordered_memory];
    stream_ordered_bytes_come_back_after_their_stream: ["memory.free-returns", "stream.destroy-pending"]
        needs [has::stream_ordered_memory];
    stream_ordered_bytes_are_given_to_nobody_too_early: ["memory.stream-ordered", "memory.disjoint", "stream.order"]
        needs [has::stream_ordered_memory];
    stream_ordered_bytes_are_there_in_order: ["memory.stream-ordered", "event.wait-orders"] needs [has::stream_ordered_memory];
    stream_ordered_free_keeps_work_before_it: ["memory.free-returns", "stream.order"] needs [has::stream_ordered_memory];
    stream_ordered_free_keeps_work_that_its_stream_waited_for: ["memory.free-returns", "memory.disjoint", "event.wait-orders"]
        needs [has::stream_ordered_memory];
    stream_ordered_bytes_freed_on_another_stream_come_back: ["memory.free-returns"] needs [has::stream_ordered_memory];
    stream_ordered_free_on_another_stream_keeps_work_before_it: ["memory.free-returns", "memory.disjoint", "event.wait-orders"]
        needs [has::stream_ordered_memory];
}

/// Sizes around the usual borders of allocators.
const SIZES: [usize; 12] = [1, 2, 255, 256, 257, 511, 4095, 4096, 4097, 65_536, 1 << 20, (1 << 20) + 1];

/// The case fills a device of at most this many bytes, if nothing else uses it.
const SMALL: u64 = 512 << 20;
/// The most bytes that the case takes of another device.
const PART: u64 = 64 << 20;
/// The most blocks that the case allocates. Each size fits a few times once the next larger one does not.
const MOST_BLOCKS: usize = 256;

/// Allocates blocks of falling sizes until nothing fits. After each block, a request for more than the rest of the device fails.
/// After every second block is freed, and after all are, the same sizes fit again.
///
/// A larger device may have other users, which must not find it full. The blocks take a part of it.
fn blocks_of_several_sizes_fill_the_memory(backend: &dyn Backend) -> CaseResult {
    const REFUSALS: u64 = 64;
    const PAGE: u64 = 4096;
    let MemoryInfo { free, total, .. } = backend.memory_info(DEVICE)?;
    let is_whole = free == total && total <= SMALL;
    let part = if is_whole { total } else { PART.min(total / 64) };
    let more_than_the_rest_is_refused = |taken: u64| -> CaseResult {
        let more = (total - taken + 1) as usize;
        check_error!(
            Block::new(backend, more),
            OutOfMemory,
            "allocation of {more} bytes, with {taken} of {total} in other blocks"
        );
        Ok(())
    };
    // Others may use a real device at the same time.
    if !backend.identity().real_device {
        let before = backend.memory_info(DEVICE)?.free;
        (0..REFUSALS).try_for_each(|_| more_than_the_rest_is_refused(0))?;
        let lost = before.saturating_sub(backend.memory_info(DEVICE)?.free);
        check!(lost < REFUSALS * PAGE, "{REFUSALS} refused allocations left {lost} bytes less free");
    }
    let (mut blocks, mut taken, mut size) = (Vec::new(), 0, part / 16 * 5);
    while size > 0 && blocks.len() < MOST_BLOCKS {
        if !is_whole && taken + size > part {
            size /= 2;
            continue;
        }
        match Block::new(backend, size as usize) {
            Ok(block) => {
                taken += size;
                check!(taken <= total, "{} blocks have {taken} bytes, of {total} of the device", blocks.len() + 1);
                blocks.push(block);
                more_than_the_rest_is_refused(taken)?;
            }
            Err(error) if is_whole && error.kind() == ErrorKind::OutOfMemory => size /= 2,
            Err(error) => return Err(error.into()),
        }
    }
    let count = blocks.len();
    check!(taken > part / 2, "after {count} blocks with {taken} of {part} bytes, {size} bytes are the most that fit");
    let mut places: Vec<_> = blocks.iter().map(|block| (block.ptr().get(), block.bytes())).collect();
    places.sort_unstable();
    let apart = places.windows(2).all(|pair| pair[0].0 + pair[0].1 as u64 <= pair[1].0);
    check!(apart, "blocks that fill a device overlap");
    let left = backend.memory_info(DEVICE)?.free;
    check!(left <= total - taken, "{left} bytes are reported as free, and {taken} of {total} are in blocks");
    // Every second one, the last first, and then all of them.
    for step in [2, 1] {
        let mut sizes = Vec::new();
        for index in (0..blocks.len()).step_by(step).collect::<Vec<_>>().into_iter().rev() {
            let block = blocks.remove(index);
            sizes.push(block.bytes());
            block.give_back()?;
        }
        for &bytes in sizes.iter().rev() {
            blocks.push(Block::new(backend, bytes)?);
        }
        more_than_the_rest_is_refused(taken)?;
    }
    Ok(())
}

/// Checks alignment and distance of blocks of many sizes that live at once.
fn lie_apart(backend: &dyn Backend, kind: DeviceMemoryKind) -> CaseResult {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    for (round, bytes) in SIZES.iter().chain(&SIZES).copied().enumerate() {
        let block = Block::with_kind(backend, DEVICE, bytes, kind)?;
        check!(block.ptr().is_aligned_to(256), "{bytes} bytes at {:?}, which is no multiple of 256", block.ptr());
        for other in &blocks {
            let (start, end) = (block.ptr().get(), block.ptr().offset(bytes).get());
            let (other_start, other_end) = (other.ptr().get(), other.ptr().offset(other.bytes()).get());
            check!(
                end <= other_start || other_end <= start,
                "a block from {start:#x} to {end:#x} overlaps one from {other_start:#x} to {other_end:#x}"
            );
        }
        blocks.push(block);
        // Gaps in the middle make the allocator reuse addresses.
        if round % 3 == 2 {
            drop(blocks.remove(blocks.len() / 2));
        }
    }
    Ok(())
}

fn addresses_are_aligned(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        for bytes in SIZES {
            let block = Block::on(backend, device, bytes)?;
            check!(block.ptr().is_aligned_to(256), "{bytes} bytes at {:?}, which is no multiple of 256", block.ptr());
        }
    }
    Ok(())
}

fn blocks_keep_their_bytes(backend: &dyn Backend) -> CaseResult {
    let mut random = Random::new(3);
    let mut blocks = Vec::new();
    for bytes in SIZES {
        let content = random.bytes(bytes);
        blocks.push((Block::holding(backend, &content)?, content));
    }
    blocks.remove(5);
    blocks.remove(2);
    for (block, content) in &blocks {
        check!(block.read()? == *content, "a block of {} bytes changed while others were written", content.len());
    }
    Ok(())
}

fn zero_bytes_are_refused(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    check_error!(backend.allocate(DEVICE, &AllocateOptions::new(0)), InvalidArgument, "allocate of 0 bytes");
    if backend.capabilities(DEVICE)?.stream_ordered_memory {
        let stream = Stream::new(backend)?;
        let options = AllocateOptions::new(0).with_kind(DeviceMemoryKind::StreamOrdered(stream.id()));
        check_error!(backend.allocate(DEVICE, &options), InvalidArgument, "allocate of 0 bytes in stream order");
    }
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    Ok(())
}

/// Returns the kinds of memory that the stream's device has. Stream-ordered memory is in the order of this stream.
fn kinds_in_order_of(backend: &dyn Backend, stream: &Stream<'_>) -> Result<Vec<DeviceMemoryKind>, Failure> {
    let can = backend.capabilities(stream.id().device())?;
    let mut kinds = vec![DeviceMemoryKind::Plain];
    if can.stream_ordered_memory {
        kinds.push(DeviceMemoryKind::StreamOrdered(stream.id()));
    }
    if can.shareable_memory {
        kinds.extend(transports(backend)?.into_iter().map(DeviceMemoryKind::Shareable));
    }
    Ok(kinds)
}

/// Refuses each kind on each device, many times: more than the device has, and more than the rest beside a block.
fn more_than_there_is_is_refused_for_every_kind(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let stream = Stream::on(backend, device)?;
        let total = usize::try_from(backend.memory_info(device)?.total).unwrap_or(usize::MAX);
        for kind in kinds_in_order_of(backend, &stream)? {
            let before = backend.live_objects();
            for bytes in [total.saturating_add(1 << 20), total.saturating_mul(16), isize::MAX as usize].repeat(10) {
                let options = AllocateOptions::new(bytes).with_kind(kind);
                check_error!(backend.allocate(device, &options), OutOfMemory, "allocate of {bytes} bytes of {kind:?}");
            }
            check_eq!(backend.live_objects(), before, "live objects after refused calls for {kind:?}");
            let block = Block::with_kind(backend, device, 4096, kind)?;
            stream.set(block.all(), 5)?;
            stream.synchronize()?;
            check!(block.read()? == [5; 4096], "{kind:?} memory that was allocated after a refused call does not work");
            let options = AllocateOptions::new(total).with_kind(kind);
            refusals_take_nothing(backend, device, &format!("{kind:?}"), || {
                backend.allocate(device, &options).map(drop)
            })?;
        }
        let can = backend.capabilities(device)?;
        if can.mapped_memory {
            let options = PhysicalMemoryOptions::new(even(backend, device, total as u64)?);
            refusals_take_nothing(backend, device, "physical", || backend.create_memory(device, &options).map(drop))?;
        }
    }
    Ok(())
}

/// Requests all bytes of the device while a block has some. The backend must refuse, and the free memory must not change.
fn refusals_take_nothing(
    backend: &dyn Backend,
    device: u32,
    what: &str,
    request: impl Fn() -> highwater_hal::Result<()>,
) -> CaseResult {
    const TIMES: usize = 4;
    const PAGE: u64 = 4096;
    let held = even(backend, device, PART.min(backend.memory_info(device)?.total / 64))?;
    let held = Block::on(backend, device, held.max(1))?;
    let before = backend.live_objects();
    let mut lost = Vec::new();
    for _ in 0..TIMES {
        let free = backend.memory_info(device)?.free;
        check_error!(
            request(),
            OutOfMemory,
            "a request for all {what} memory of device {device}, of which a block has some"
        );
        lost.push(free.saturating_sub(backend.memory_info(device)?.free));
        // Other programs may take memory of a real device at the same time, so one request that takes nothing is proof.
        if lost.last() < Some(&PAGE) {
            break;
        }
    }
    check!(
        lost.last() < Some(&PAGE),
        "refused requests for {what} memory left {lost:?} bytes less free on device {device}"
    );
    check_eq!(backend.live_objects(), before, "live objects after refused requests for {what} memory");
    drop(held);
    Ok(())
}

fn more_than_there_is_is_refused(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    let total = usize::try_from(backend.memory_info(DEVICE)?.total).unwrap_or(usize::MAX);
    for bytes in [total.saturating_add(1 << 20), total.saturating_mul(16), isize::MAX as usize] {
        check_error!(backend.allocate(DEVICE, &AllocateOptions::new(bytes)), OutOfMemory, "allocate of {bytes} bytes");
    }
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    let block = Block::filled(backend, 4096, 5)?;
    check!(block.read()? == [5; 4096], "memory allocated after a refused call does not work");
    Ok(())
}

/// Returns roughly the largest part of the free memory that fits one block, and a number of such blocks that exceeds the
/// device.
fn large_part(backend: &dyn Backend) -> Result<(usize, usize), Failure> {
    let memory = backend.memory_info(DEVICE)?;
    let mut bytes = usize::try_from(memory.free / 10 * 6).unwrap_or(usize::MAX);
    loop {
        match Block::new(backend, bytes) {
            Ok(_) => return Ok((bytes, usize::try_from(memory.total).unwrap_or(usize::MAX) / bytes + 2)),
            Err(error) if error.kind() == ErrorKind::OutOfMemory && bytes > 1 << 20 => bytes /= 2,
            Err(error) => return Err(error.into()),
        }
    }
}

fn freed_bytes_come_back(backend: &dyn Backend) -> CaseResult {
    let (bytes, rounds) = large_part(backend)?;
    for round in 0..rounds {
        let block = Block::new(backend, bytes);
        check!(block.is_ok(), "{bytes} bytes were freed {round} times, and then: {:?}", block.err());
    }
    Ok(())
}

/// Returns how to make a block of each kind of memory, mapped memory included, and whether the kind is stream-ordered.
pub(super) fn makers<'b>(backend: &'b dyn Backend, stream: &Stream<'b>) -> Result<Vec<Maker<'b>>, Failure> {
    let device = stream.id().device();
    let mut makers: Vec<Maker<'b>> = Vec::new();
    for kind in kinds_in_order_of(backend, stream)? {
        let make = Box::new(move |bytes| Block::with_kind(backend, device, bytes, kind));
        makers.push(Maker {
            what: format!("{kind:?}"),
            is_ordered: matches!(kind, DeviceMemoryKind::StreamOrdered(_)),
            make,
        });
    }
    if backend.capabilities(device)?.mapped_memory {
        let make = Box::new(move |bytes| Block::mapped(backend, device, &[bytes]));
        makers.push(Maker { what: "Mapped".to_owned(), is_ordered: false, make });
    }
    // Last, because vendors keep stream-ordered memory that was freed.
    makers.sort_by_key(|maker| maker.is_ordered);
    Ok(makers)
}

/// Makes blocks of one kind of memory.
pub(super) struct Maker<'b> {
    pub(super) what: String,
    is_ordered: bool,
    pub(super) make: Box<dyn Fn(usize) -> highwater_hal::Result<Block<'b>> + 'b>,
}

/// Returns `bytes`, rounded down to a size that each kind of memory can have.
fn even(backend: &dyn Backend, device: u32, bytes: u64) -> Result<usize, Failure> {
    let granularity = backend.capabilities(device)?.mapped_memory_granularity.max(1);
    Ok(usize::try_from(bytes).unwrap_or(usize::MAX) / granularity * granularity)
}

/// Holds large blocks of each kind. Their bytes are not free, even if other programs free memory.
fn live_bytes_are_not_free(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let stream = Stream::on(backend, device)?;
        for Maker { what, is_ordered, make } in makers(backend, &stream)? {
            // Vendors keep stream-ordered memory, and later cases need some.
            let tenths = if is_ordered { 2 } else { 4 };
            let size = even(backend, device, backend.memory_info(device)?.free / 10 * tenths)?;
            let (mut blocks, mut live) = (Vec::new(), 0);
            // Free memory need not be contiguous, so a later block may be refused.
            for bytes in [size, size, size / 4] {
                let bytes = even(backend, device, bytes as u64)?;
                match make(bytes) {
                    Ok(block) => blocks.push(block),
                    Err(error) if error.kind() == ErrorKind::OutOfMemory && !blocks.is_empty() => break,
                    Err(error) => return Err(error.into()),
                }
                live += bytes as u64;
                // The answer for one device must not be given for another, in any order of the queries.
                (0..backend.device_count()).try_for_each(|other| backend.memory_info(other).map(drop))?;
                let memory = backend.memory_info(device)?;
                check!(
                    memory.free <= memory.total.saturating_sub(live),
                    "{} of {} bytes are free while blocks of {live} bytes of {what} memory are alive on device {device}",
                    memory.free,
                    memory.total
                );
            }
            drop(blocks);
            stream.synchronize()?;
        }
    }
    Ok(())
}

/// One thread has asked for the free memory, another one allocates, and the first asks again.
fn answers_about_memory_follow_other_threads(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let free = backend.memory_info(device)?.free;
        let bytes = even(backend, device, free / 10 * 4)?;
        let made = std::thread::scope(|scope| scope.spawn(|| Block::on(backend, device, bytes)).join());
        let block = made.map_err(|_| Failure::new("a thread panicked"))??;
        let memory = backend.memory_info(device)?;
        check!(
            memory.free <= memory.total - bytes as u64,
            "{} of {} bytes of device {device} are free, and another thread has allocated {bytes}",
            memory.free,
            memory.total
        );
        drop(block);
    }
    Ok(())
}

/// Frees a block of each kind that vendors do not keep, while a stream of the device is busy with other work.
fn freed_bytes_are_free_at_once(backend: &dyn Backend) -> CaseResult {
    const SIZES: [u64; 2] = [64 << 20, 200 << 20];
    for device in 0..backend.device_count() {
        let (stream, occupied) = (Stream::on(backend, device)?, Stream::on(backend, device)?);
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let makers = makers(backend, &stream)?;
        let kinds = makers.iter().filter(|maker| !maker.is_ordered);
        for (Maker { what, make, .. }, bytes) in kinds.flat_map(|maker| SIZES.map(|bytes| (maker, bytes))) {
            let granularity = backend.capabilities(device)?.mapped_memory_granularity.max(1);
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).next_multiple_of(granularity);
            if backend.memory_info(device)?.free < bytes as u64 {
                continue;
            }
            free_memory_grows(backend, device, false, &format!("{what} memory, beside a busy stream,"), || {
                let block = make(bytes)?;
                if !occupied.is_pending()? {
                    busy.enqueue(&occupied, 1)?;
                }
                Ok(block)
            })?;
        }
        occupied.synchronize()?;
    }
    Ok(())
}

/// The thread that frees a block did not allocate it, and has ended when the memory is asked for.
fn bytes_freed_by_another_thread_are_free_at_once(backend: &dyn Backend) -> CaseResult {
    const LARGE: usize = 64 << 20;
    for device in 0..backend.device_count() {
        let stream = Stream::on(backend, device)?;
        let bytes = LARGE.next_multiple_of(backend.capabilities(device)?.mapped_memory_granularity.max(1));
        for Maker { what, make, .. } in makers(backend, &stream)?.iter().filter(|maker| !maker.is_ordered) {
            free_memory_grows(backend, device, true, &format!("{what} memory, in another thread,"), || make(bytes))?;
        }
    }
    Ok(())
}

/// The handle was dropped before the block is freed, and no process opened it.
fn exported_bytes_are_free_at_once(backend: &dyn Backend) -> CaseResult {
    const LARGE: u64 = 64 << 20;
    let bytes = even(backend, DEVICE, LARGE)?;
    for transport in transports(backend)? {
        free_memory_grows(backend, DEVICE, false, &format!("memory that was exported by {transport:?}"), || {
            let block = Block::with_kind(backend, DEVICE, bytes, DeviceMemoryKind::Shareable(transport))?;
            block.export(transport).map(drop)?;
            Ok(block)
        })?;
    }
    Ok(())
}

/// Makes blocks and gives them back until the free memory has grown by the bytes of one. Another program may take the memory at the same
/// time, so one success is proof.
fn free_memory_grows<'b>(
    backend: &dyn Backend,
    device: u32,
    in_another_thread: bool,
    what: &str,
    make: impl Fn() -> highwater_hal::Result<Block<'b>>,
) -> CaseResult {
    const TIMES: usize = 20;
    let mut grown = Vec::new();
    for _ in 0..TIMES {
        let block = make()?;
        let bytes = block.bytes() as u64;
        let before = backend.memory_info(device)?.free;
        if in_another_thread {
            let given = std::thread::scope(|scope| scope.spawn(|| block.give_back()).join());
            given.map_err(|_| Failure::new("a thread panicked"))??;
        } else {
            block.give_back()?;
        }
        grown.push(backend.memory_info(device)?.free.saturating_sub(before));
        if grown.last() >= Some(&bytes) {
            return Ok(());
        }
    }
    Err(Failure::new(format!(
        "the free memory of device {device} grew by {grown:?} bytes each time a block of {what} was given back"
    )))
}

fn shareable_memory_is_memory(backend: &dyn Backend) -> CaseResult {
    for transport in transports(backend)? {
        let kind = DeviceMemoryKind::Shareable(transport);
        lie_apart(backend, kind)?;
        let block = Block::with_kind(backend, DEVICE, 5000, kind)?;
        let content = Random::new(4).bytes(5000);
        block.write(0, &content)?;
        check!(block.read()? == content, "memory shareable by {transport:?} does not keep its bytes");
    }
    Ok(())
}

fn stream_ordered_memory_is_memory(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    lie_apart(backend, DeviceMemoryKind::StreamOrdered(stream.id()))?;
    let block = Block::with_kind(backend, DEVICE, 5000, DeviceMemoryKind::StreamOrdered(stream.id()))?;
    stream.set(block.all(), 6)?;
    stream.synchronize()?;
    check!(block.read()? == [6; 5000], "stream-ordered memory does not keep its bytes");
    Ok(())
}

fn stream_ordered_bytes_come_back(backend: &dyn Backend) -> CaseResult {
    let (bytes, rounds) = large_part(backend)?;
    let stream = Stream::new(backend)?;
    for round in 0..rounds {
        let block = Block::with_kind(backend, DEVICE, bytes, DeviceMemoryKind::StreamOrdered(stream.id()));
        let block = match block {
            Ok(block) => block,
            Err(error) => {
                return Err(Failure::new(format!("{bytes} bytes were freed {round} times, and then: {error}")));
            }
        };
        stream.set(block.span(0..4096), 1)?;
        block.free_in_order()?;
        // The stream may use a part of the same bytes for this smaller block at once. The rest comes back too.
        let part = Block::with_kind(backend, DEVICE, bytes / 3, DeviceMemoryKind::StreamOrdered(stream.id()))?;
        stream.set(part.span(0..4096), 2)?;
        part.free_in_order()?;
        stream.synchronize()?;
    }
    Ok(())
}

/// The stream is destroyed with work outstanding, and the free of the block behind it.
fn stream_ordered_bytes_come_back_after_their_stream(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (bytes, rounds) = large_part(backend)?;
    until_conclusive("a stream was idle when it was destroyed", |load| {
        let mut pending = true;
        for round in 0..rounds {
            let stream = Stream::new(backend)?;
            let block = Block::with_kind(backend, DEVICE, bytes, DeviceMemoryKind::StreamOrdered(stream.id()));
            let block = block.map_err(|error| {
                Failure::new(format!(
                    "{bytes} bytes were freed {round} times on a stream that ended, and then: {error}"
                ))
            })?;
            busy.enqueue(&stream, load)?;
            pending &= stream.is_pending()?;
            block.free_in_order()?;
            stream.destroy()?;
            // The next allocation comes after the free.
            backend.synchronize_device(DEVICE)?;
        }
        Ok(Attempt::seen(pending))
    })
}

/// The bytes of stream-ordered blocks: vendors take short and long ones from different pools.
const ORDERED_SIZES: [usize; 2] = [1 << 16, 4 << 20];

fn stream_ordered_bytes_are_given_to_nobody_too_early(backend: &dyn Backend) -> CaseResult {
    ORDERED_SIZES.iter().try_for_each(|&bytes| ordered_bytes_are_given_to_nobody_too_early(backend, bytes))
}

fn ordered_bytes_are_given_to_nobody_too_early(backend: &dyn Backend, bytes: usize) -> CaseResult {
    const OTHERS: usize = 8;
    // Enough to see the mistake, and few enough to be written while the stream is busy.
    const USED: usize = ORDERED_SIZES[0];
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("the work before a stream-ordered free was over before others had their memory", |load| {
        let result = Block::filled(backend, USED, 0)?;
        let (stream, other, there) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
        // One more stream waited for an event of the first one, which was recorded before the work and the free.
        let (follower, earlier) = (Stream::new(backend)?, Event::new(backend)?);
        stream.record(&earlier)?;
        follower.wait(&earlier)?;
        let ordered = || Block::with_kind(backend, DEVICE, bytes, DeviceMemoryKind::StreamOrdered(stream.id()));
        // It lies between others, so that its bytes are the best place for a block of the same size.
        let (_before, block, _after) = (ordered()?, ordered()?, ordered()?);
        stream.set(block.all(), 1)?;
        stream.synchronize()?;
        busy.enqueue(&stream, load)?;
        stream.record(&there)?;
        stream.copy(result.all(), block.span(0..USED))?;
        block.free_in_order()?;
        // The stream has not reached the copy. If an allocation on another stream, or on none, now returns these bytes, its
        // owner changes what the copy will read.
        let mut others = Vec::new();
        for index in 0..OTHERS {
            let (kind, on) = match index % 3 {
                0 => (DeviceMemoryKind::Plain, &other),
                1 => (DeviceMemoryKind::StreamOrdered(other.id()), &other),
                _ => (DeviceMemoryKind::StreamOrdered(follower.id()), &follower),
            };
            let block = Block::with_kind(backend, DEVICE, bytes, kind)?;
            on.set(block.span(0..USED), 2)?;
            others.push(block);
        }
        other.synchronize()?;
        follower.synchronize()?;
        let not_there_yet = there.is_pending()?;
        stream.synchronize()?;
        check!(
            result.read()? == [1; USED],
            "stream-ordered memory was given to somebody else while work before its free was still to come"
        );
        Ok(Attempt::seen(not_there_yet))
    })
}

fn stream_ordered_bytes_are_there_in_order(backend: &dyn Backend) -> CaseResult {
    ORDERED_SIZES.iter().try_for_each(|&bytes| ordered_bytes_are_there_in_order(backend, bytes))
}

fn ordered_bytes_are_there_in_order(backend: &dyn Backend, bytes: usize) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("stream-ordered allocation or free waits for the stream", |load| {
        let (stream, other, third) = (Stream::new(backend)?, Stream::new(backend)?, Stream::new(backend)?);
        let (before, allocated) = (Event::new(backend)?, Event::new(backend)?);
        let ordered = |stream: &Stream<'_>| {
            Block::with_kind(backend, DEVICE, bytes, DeviceMemoryKind::StreamOrdered(stream.id()))
        };
        let earlier = [ordered(&stream)?, ordered(&stream)?, ordered(&stream)?];
        busy.enqueue(&stream, load)?;
        stream.record(&before)?;
        for block in earlier {
            stream.set(block.all(), 1)?;
            block.free_in_order()?;
        }
        // On an idle stream, which needs no event for memory in its own order.
        let elsewhere = ordered(&third)?;
        third.set(elsewhere.all(), 2)?;
        // These may get the bytes of the earlier blocks, whose work is outstanding.
        let (own, awaited) = (ordered(&stream)?, ordered(&stream)?);
        stream.record(&allocated)?;
        other.wait(&allocated)?;
        stream.set(own.all(), 3)?;
        other.set(awaited.all(), 4)?;
        let pending = before.is_pending()?;
        for stream in [&stream, &other, &third] {
            stream.synchronize()?;
        }
        for (block, byte, order) in [
            (&elsewhere, 2, "a stream that has nothing to do"),
            (&own, 3, "the stream itself, after the allocation"),
            (&awaited, 4, "a stream that waits for the allocation"),
        ] {
            check!(
                block.read()? == vec![byte; bytes],
                "earlier work spoiled stream-ordered memory that is used on {order}"
            );
        }
        Ok(Attempt::seen(pending))
    })
}

fn stream_ordered_free_keeps_work_before_it(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 1 << 16;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("stream-ordered allocation or free waits for the stream", |load| {
        let result = Block::filled(backend, BYTES, 0)?;
        let (stream, before) = (Stream::new(backend)?, Event::new(backend)?);
        busy.enqueue(&stream, load)?;
        stream.record(&before)?;
        let first = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::StreamOrdered(stream.id()))?;
        stream.set(first.all(), 1)?;
        stream.copy(result.all(), first.all())?;
        first.free_in_order()?;
        // It may get the bytes of the first block, but only after the copy.
        let second = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::StreamOrdered(stream.id()))?;
        stream.set(second.all(), 2)?;
        second.free_in_order()?;
        let pending = before.is_pending()?;
        stream.synchronize()?;
        check!(result.read()? == [1; BYTES], "a block was given to somebody else before the work before its free");
        Ok(Attempt::seen(pending))
    })
}

/// A free in stream order comes after all that its stream waited for, also on other streams.
fn stream_ordered_free_keeps_work_that_its_stream_waited_for(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 1 << 16;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("stream-ordered allocation or free waits for the stream", |load| {
        let result = Block::filled(backend, BYTES, 0)?;
        let (stream, reader) = (Stream::new(backend)?, Stream::new(backend)?);
        let (written, read) = (Event::new(backend)?, Event::new(backend)?);
        let first = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::StreamOrdered(stream.id()))?;
        stream.set(first.all(), 1)?;
        stream.record(&written)?;
        reader.wait(&written)?;
        busy.enqueue(&reader, load)?;
        reader.copy(result.all(), first.all())?;
        reader.record(&read)?;
        stream.wait(&read)?;
        first.free_in_order()?;
        // It may get the bytes of the first block, but only after the copy of the other stream.
        let second = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::StreamOrdered(stream.id()))?;
        stream.set(second.all(), 2)?;
        second.free_in_order()?;
        let pending = read.is_pending()?;
        reader.synchronize()?;
        stream.synchronize()?;
        check!(
            result.read()? == [1; BYTES],
            "a block was given to somebody else before the work that its free waited for"
        );
        Ok(Attempt::seen(pending))
    })
}

fn stream_ordered_bytes_freed_on_another_stream_come_back(backend: &dyn Backend) -> CaseResult {
    let (bytes, rounds) = large_part(backend)?;
    let (stream, other, ready) = (Stream::new(backend)?, Stream::new(backend)?, Event::new(backend)?);
    for round in 0..rounds {
        let block = Block::with_kind(backend, DEVICE, bytes, DeviceMemoryKind::StreamOrdered(stream.id()));
        let block = block.map_err(|error| {
            Failure::new(format!("{bytes} bytes were freed {round} times on another stream, and then: {error}"))
        })?;
        stream.set(block.span(0..4096), 1)?;
        stream.record(&ready)?;
        other.wait(&ready)?;
        block.free_in_order_of(&other)?;
        // The next allocation comes after the free.
        other.synchronize()?;
        stream.synchronize()?;
    }
    Ok(())
}

/// A free has its place in the order of the stream that it names, not of the stream of the allocation.
fn stream_ordered_free_on_another_stream_keeps_work_before_it(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 1 << 16;
    const OTHERS: usize = 4;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("stream-ordered allocation or free waits for the stream", |load| {
        let result = Block::filled(backend, BYTES, 0)?;
        let (stream, reader, third) = (Stream::new(backend)?, Stream::new(backend)?, Stream::new(backend)?);
        let (written, before) = (Event::new(backend)?, Event::new(backend)?);
        // The third stream waited for the reader once, before the reader had its work.
        let earlier = Event::new(backend)?;
        reader.record(&earlier)?;
        third.wait(&earlier)?;
        let ordered =
            |on: &Stream<'_>| Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::StreamOrdered(on.id()));
        // It lies between others, so that its bytes are the best place for a block of the same size.
        let (_before, block, _after) = (ordered(&stream)?, ordered(&stream)?, ordered(&stream)?);
        stream.set(block.all(), 1)?;
        stream.record(&written)?;
        reader.wait(&written)?;
        busy.enqueue(&reader, load)?;
        reader.record(&before)?;
        reader.copy(result.all(), block.all())?;
        block.free_in_order_of(&reader)?;
        // The stream of the allocation is idle, and so is a third one. Neither may have the bytes before the copy has read them.
        let mut others = Vec::new();
        for on in [&stream, &third].into_iter().cycle().take(OTHERS) {
            let other = ordered(on)?;
            on.set(other.all(), 2)?;
            others.push(other);
        }
        stream.synchronize()?;
        third.synchronize()?;
        let pending = before.is_pending()?;
        reader.synchronize()?;
        check!(
            result.read()? == [1; BYTES],
            "a block that was freed on another stream was given to somebody else before the work before its free"
        );
        Ok(Attempt::seen(pending))
    })
}
