//! Memory and events that two processes share. A second process with the same backend takes part.

use std::time::{Duration, Instant};

use highwater_hal::numbers::Coded;
use highwater_hal::{
    Backend, CaptureMode, Descriptor, DeviceMemoryKind, DevicePtr, ErrorKind, MemoryHandle, PhysicalMemoryOptions,
    Transport,
};

use super::concurrency::in_thread;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Addresses, Block, Capture, DEVICE, Event, PhysicalMemory, Stream, sharing};
use crate::idle_stream::IdleStream;
use crate::peer::{Launcher, Peer, PeerEvent};
use crate::random::Random;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "sharing" with a second process;
    devices_have_one_uuid_in_every_process: ["devices.uuid"];
    processes_notice_their_exit: ["backend.exiting"];
    importers_see_what_the_exporter_writes: ["ipc.shared-bytes"] needs [has::shareable_memory];
    exporters_see_what_the_importer_writes: ["ipc.shared-bytes"] needs [has::shareable_memory];
    mappings_of_memory_made_elsewhere_are_shared: ["ipc.shared-bytes"] needs [has::shareable_memory];
    the_last_byte_is_shared_and_nothing_beside: ["ipc.shared-bytes", "copy.exact"] needs [has::shareable_memory];
    several_blocks_stay_apart: ["ipc.shared-bytes", "memory.disjoint"] needs [has::shareable_memory];
    large_blocks_of_one_size_stay_apart: ["ipc.shared-bytes", "memory.disjoint", "fill.exact"] needs [has::shareable_memory];
    handles_name_the_device_of_their_memory: ["ipc.shared-bytes", "ipc.open-checked"]
        needs [TWO_DEVICES, has::shareable_memory];
    blocks_of_a_batch_are_open_at_once: ["ipc.shared-bytes", "ipc.open-again", "memory.disjoint"]
        needs [has::shareable_memory];
    several_importers_share_one_block: ["ipc.shared-bytes"] needs [has::shareable_memory];
    processes_share_both_ways_at_once: ["ipc.shared-bytes"] needs [has::shareable_memory];
    importers_that_are_killed_leave_the_memory: ["ipc.shared-bytes", "memory.free-returns"] needs [has::shareable_memory];
    only_shareable_memory_is_exported: ["ipc.export-shareable"] needs [has::shareable_memory];
    other_transports_are_refused: ["ipc.export-transport"] needs [has::shareable_memory];
    exports_can_be_repeated: ["ipc.shared-bytes", "backend.live-objects"] needs [has::shareable_memory];
    opening_again_gives_the_same_address: ["ipc.open-again"] needs [has::shareable_memory];
    opening_anew_works_after_the_last_close: ["ipc.open-again", "ipc.shared-bytes"] needs [has::shareable_memory];
    addresses_that_are_not_open_are_not_closed: ["ipc.close-unknown"] needs [has::shareable_memory];
    mappings_outlive_a_killed_exporter: ["ipc.open-outlives"]
        needs [has::shareable_memory, DESCRIPTORS] => outlives(|_| Ok(()), |mut peer| peer.kill().map(drop));
    mappings_outlive_an_exporter_that_exits: ["ipc.open-outlives"]
        needs [has::shareable_memory, DESCRIPTORS] => outlives(|_| Ok(()), Peer::exit);
    mappings_outlive_an_exporter_that_forked: ["ipc.open-outlives"] needs [has::shareable_memory, DESCRIPTORS];
    descriptors_outlive_a_killed_exporter: ["ipc.descriptor-keeps", "ipc.shared-bytes"]
        needs [has::shareable_memory, DESCRIPTORS];
    importers_keep_memory_that_the_exporter_freed: ["ipc.free-keeps", "ipc.descriptor-keeps", "memory.disjoint"]
        needs [has::shareable_memory, DESCRIPTORS];
    importers_keep_mapped_memory_that_the_exporter_gave_back: ["ipc.free-keeps", "mapped.shared"]
        needs [has::shareable_memory, has::mapped_memory, DESCRIPTORS];
    memory_that_was_freed_elsewhere_is_kept: ["ipc.free-keeps"] needs [has::shareable_memory, DESCRIPTORS];
    altered_handles_are_refused: ["ipc.open-checked"] needs [has::shareable_memory];
    handles_of_another_device_are_refused: ["ipc.open-checked"] needs [has::shareable_memory];
    handles_are_refused_for_another_device: ["ipc.open-checked"] needs [TWO_DEVICES, has::shareable_memory];
    imports_are_refused_for_another_device: ["ipc.import-checked"]
        needs [TWO_DEVICES, has::shareable_memory, has::mapped_memory, has::foreign_memory];
    handles_without_their_descriptor_are_refused: ["ipc.open-checked"] needs [has::shareable_memory, DESCRIPTORS];
    open_memory_counts: ["backend.live-objects"] needs [has::shareable_memory];
    descriptors_of_handles_count: ["backend.live-objects"] needs [has::shareable_memory, DESCRIPTORS];
    opening_and_closing_do_not_disturb_captures: ["capture.undisturbed"]
        needs [has::shareable_memory, has::capture, has::create_during_capture];
    importing_does_not_disturb_captures: ["capture.undisturbed", "ipc.import-maps", "mapped.capture"]
        needs [has::shareable_memory, has::mapped_memory, has::foreign_memory, has::capture, has::create_during_capture];
    mapped_memory_is_shared: ["mapped.shared", "ipc.shared-bytes"] needs [has::shareable_memory, has::mapped_memory];
    imported_memory_is_the_exporters: ["ipc.import-maps", "ipc.shared-bytes"]
        needs [has::shareable_memory, has::mapped_memory, has::foreign_memory];
    altered_imports_are_refused: ["ipc.import-checked"]
        needs [has::shareable_memory, has::mapped_memory, has::foreign_memory];
    memory_that_is_not_mapped_is_not_imported: ["ipc.import-checked"]
        needs [has::shareable_memory, has::mapped_memory, has::foreign_memory];
    only_interprocess_events_are_exported: ["ipc.export-event"] needs [has::interprocess_events];
    opened_events_order_the_importer: ["ipc.event-orders", "event.wait-orders"]
        needs [has::interprocess_events, has::shareable_memory];
    opened_events_order_the_exporter: ["ipc.event-orders", "event.wait-orders"]
        needs [has::interprocess_events, has::shareable_memory] => recorded_elsewhere(Maker::Other);
    events_recorded_by_the_importer_order_the_exporter: ["ipc.event-orders", "event.record-moves"]
        needs [has::interprocess_events, has::shareable_memory] => recorded_elsewhere(Maker::This);
    processes_take_turns_by_events: ["ipc.event-orders", "event.record-moves"]
        needs [has::interprocess_events, has::shareable_memory];
    opened_events_are_pending_as_the_original: ["ipc.event-orders", "event.query", "event.synchronize"]
        needs [has::interprocess_events];
    opened_events_that_were_never_recorded_are_complete: ["event.never-recorded", "event.query-never-recorded"]
        needs [has::interprocess_events];
    waits_end_with_the_process_that_recorded: ["ipc.event-peer-ends"]
        needs [has::interprocess_events, has::event_waits_end_with_peer] => waits_end(|_| Ok(()));
    waits_end_though_the_process_had_forked: ["ipc.event-peer-ends"]
        needs [has::interprocess_events, has::event_waits_end_with_peer];
    opened_events_count: ["backend.live-objects", "event.destroy-stale"] needs [has::interprocess_events];
}

const BYTES: usize = 1 << 16;
const OLD: u8 = 0x10;
const NEW: u8 = 0x20;

/// Returns the transports by which the first device shares.
pub(super) fn transports(backend: &dyn Backend) -> Result<Vec<Transport>, Failure> {
    let offered = backend.capabilities(DEVICE)?.ipc_transports;
    let offered: Vec<_> = Transport::ALL.iter().copied().filter(|&transport| offered.contains(transport)).collect();
    check!(!offered.is_empty(), "the device has shareable memory, but no transport for it");
    Ok(offered)
}

fn shareable(backend: &dyn Backend, bytes: usize, transport: Transport) -> highwater_hal::Result<Block<'_>> {
    Block::with_kind(backend, DEVICE, bytes, DeviceMemoryKind::Shareable(transport))
}

fn start(launcher: &Launcher, backend: &dyn Backend) -> Result<Peer, Failure> {
    Peer::start(launcher, backend, DEVICE)
}

/// Runs the case for each transport, each with its own process.
fn with_each_transport(
    backend: &dyn Backend,
    launcher: &Launcher,
    run: impl Fn(Transport, &mut Peer) -> CaseResult,
) -> CaseResult {
    for transport in transports(backend)? {
        let mut peer = start(launcher, backend)?;
        run(transport, &mut peer)?;
        peer.end()?;
    }
    Ok(())
}

fn devices_have_one_uuid_in_every_process(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    for device in 0..backend.device_count() {
        // The process finds its device by the UUID, and fails if no device has it.
        Peer::start(launcher, backend, device)?.end()?;
    }
    Ok(())
}

/// The second process exits with its objects. An exit handler that was registered before the backend was opened calls
/// `is_exiting` and other methods.
fn processes_notice_their_exit(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let mut peer = start(launcher, backend)?;
    check!(!backend.is_exiting() && !peer.is_exiting()??, "a backend reports the exit of a process that does not exit");
    let (notices, not_refused) = peer.exit_and_tell()?;
    check!(notices, "a backend does not notice that its process has begun to exit");
    check!(
        not_refused.is_empty(),
        "a call after the process has begun to exit does not give `ShuttingDown`: {not_refused}"
    );
    check!(!backend.is_exiting(), "a backend reports the exit of its process after another process has exited");
    Ok(())
}

// ------------------------------------------------------------------------------------------------------------- bytes

fn importers_see_what_the_exporter_writes(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let block = shareable(backend, BYTES, transport)?;
        let before = Random::new(1).bytes(BYTES);
        block.write(0, &before)?;
        let opened = peer.open(&block.export(transport)?)??;
        check!(
            peer.read(opened, BYTES)?? == before,
            "the importer does not see bytes from before it opened the memory"
        );
        // A copy made by `open_memory` would show here.
        for seed in 2..5 {
            let after = Random::new(seed).bytes(BYTES);
            block.write(0, &after)?;
            let got = peer.read(opened, BYTES)??;
            check!(
                got == after,
                "the importer does not see bytes that the exporter wrote after the open: it has a copy"
            );
        }
        Ok(peer.close(opened)??)
    })
}

fn exporters_see_what_the_importer_writes(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let block = shareable(backend, BYTES, transport)?;
        block.write(0, &[OLD; BYTES])?;
        let opened = peer.open(&block.export(transport)?)??;
        for seed in 11..14 {
            let content = Random::new(seed).bytes(BYTES);
            peer.write(opened, &content)??;
            check!(block.read()? == content, "the exporter does not see the importer's bytes: the importer has a copy");
        }
        peer.close(opened)??;
        check!(block.read()? == Random::new(13).bytes(BYTES), "closing a mapping changed the memory");
        Ok(())
    })
}

fn mappings_of_memory_made_elsewhere_are_shared(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let there = peer.allocate(BYTES, transport)??;
        let mapping = Block::open(backend, DEVICE, &peer.export(there, transport)??)?;
        for seed in 21..24 {
            let content = Random::new(seed).bytes(BYTES);
            peer.write(there, &content)??;
            check!(mapping.read()? == content, "an importer does not see bytes that the exporter wrote after the open");
            let content = Random::new(seed + 10).bytes(BYTES);
            mapping.write(0, &content)?;
            check!(peer.read(there, BYTES)?? == content, "an exporter does not see the importer's bytes");
        }
        mapping.give_back()?;
        Ok(peer.free(there)??)
    })
}

fn the_last_byte_is_shared_and_nothing_beside(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        for bytes in [1, 255, 257, 4096, 4097, 100_001] {
            let (before, block) = (shareable(backend, bytes, transport)?, shareable(backend, bytes, transport)?);
            let after = shareable(backend, bytes, transport)?;
            for block in [&before, &block, &after] {
                block.write(0, &vec![OLD; bytes])?;
            }
            let handle = block.export(transport)?;
            check_eq!(handle.bytes, bytes as u64, "bytes in the handle of a block of {bytes}");
            let opened = peer.open(&handle)??;
            let mut expected = vec![OLD; bytes];
            for at in [0, bytes / 2, bytes - 1] {
                peer.write(opened.offset(at), &[NEW])??;
                expected[at] = NEW;
            }
            check!(
                block.read()? == expected,
                "single bytes of {bytes} that an importer wrote are not where they belong"
            );
            for neighbour in [&before, &after] {
                check!(neighbour.read()? == vec![OLD; bytes], "an importer of {bytes} bytes wrote beside them");
            }
            peer.close(opened)??;
        }
        Ok(())
    })
}

/// Blocks of one size, larger than a mebibyte: the first, the middle and the last bytes of each, after fills of either process.
fn large_blocks_of_one_size_stay_apart(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    const BLOCKS: usize = 4;
    const BYTES: usize = 3 << 20;
    const PIECE: usize = 4096;
    with_each_transport(backend, launcher, |transport, peer| {
        let mut shared = Vec::new();
        for index in 0..BLOCKS {
            let block = shareable(backend, BYTES, transport)?;
            block.write(0, &vec![1 + index as u8; BYTES])?;
            let opened = peer.open(&block.export(transport)?)??;
            shared.push((block, opened));
        }
        for (index, (_, opened)) in shared.iter().enumerate() {
            for at in [0, BYTES / 2, BYTES - PIECE] {
                let got = peer.read(opened.offset(at), PIECE)??;
                check!(got == [1 + index as u8; PIECE], "block {index} of {BLOCKS} has other bytes from {at} on");
            }
            peer.fill(*opened, BYTES, 100 + index as u8)??;
        }
        peer.synchronize_stream()??;
        for (index, (block, opened)) in shared.iter().enumerate() {
            let right = block.read()?.iter().all(|&byte| byte == 100 + index as u8);
            check!(right, "a fill of {BYTES} bytes of block {index} of {BLOCKS} in the importer did not arrive there");
            peer.close(*opened)??;
        }
        Ok(())
    })
}

fn handles_name_the_device_of_their_memory(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    for device in 0..backend.device_count() {
        let uuid = backend.device_info(device)?.uuid;
        for transport in transports(backend)? {
            let block = Block::with_kind(backend, device, BYTES, DeviceMemoryKind::Shareable(transport))?;
            block.write(0, &[10 + device as u8; BYTES])?;
            let handle = block.export(transport)?;
            check!(handle.device_uuid == uuid, "a handle of memory of device {device} has the UUID of another device");
            let mut peer = Peer::start(launcher, backend, device)?;
            let opened = peer.open(&handle)??;
            check!(
                peer.read(opened, BYTES)?? == [10 + device as u8; BYTES],
                "an importer of memory of device {device} sees other bytes"
            );
            peer.close(opened)??;
            peer.end()?;
        }
    }
    Ok(())
}

fn several_blocks_stay_apart(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    const BLOCKS: usize = 24;
    with_each_transport(backend, launcher, |transport, peer| {
        let mut shared = Vec::new();
        for index in 0..BLOCKS {
            let bytes = 1000 + 700 * index;
            let block = shareable(backend, bytes, transport)?;
            block.write(0, &vec![index as u8; bytes])?;
            let opened = peer.open(&block.export(transport)?)??;
            shared.push((block, opened));
        }
        for (index, (block, opened)) in shared.iter().enumerate() {
            let got = peer.read(*opened, block.bytes())??;
            check!(got.iter().all(|&byte| byte == index as u8), "block {index} of {BLOCKS} was opened as another");
            peer.fill(*opened, block.bytes(), 100 + index as u8)??;
        }
        peer.synchronize_stream()??;
        for (index, (block, opened)) in shared.iter().enumerate() {
            let right = block.read()?.iter().all(|&byte| byte == 100 + index as u8);
            check!(right, "a fill of block {index} of {BLOCKS} in the importer did not arrive there");
            peer.close(*opened)??;
        }
        Ok(())
    })
}

/// Opens as many allocations at once as a batch of a model has, each twice, and uses slices of them.
fn blocks_of_a_batch_are_open_at_once(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    const BLOCKS: usize = 40;
    const BYTES: usize = 10_000;
    const SLICES: [(usize, usize); 5] = [(0, 1), (1, 255), (257, 1024), (4095, 3000), (BYTES - 7, 7)];
    with_each_transport(backend, launcher, |transport, peer| {
        let mut shared = Vec::new();
        for index in 0..BLOCKS {
            let block = shareable(backend, BYTES, transport)?;
            let content = Random::new(60 + index as u64).bytes(BYTES);
            block.write(0, &content)?;
            let handle = block.export(transport)?;
            shared.push((block, content, peer.open(&handle)??, handle));
        }
        for (index, (_, content, opened, handle)) in shared.iter().enumerate() {
            check_eq!(peer.open(handle)??, *opened, "the address of block {index} of {BLOCKS}, opened a second time");
            for (at, bytes) in SLICES {
                let got = peer.read(opened.offset(at), bytes)??;
                check!(got == content[at..at + bytes], "block {index} of {BLOCKS} has other bytes from {at} on");
            }
        }
        // Every second block is closed once, which leaves it open, and the others twice.
        for (index, (_, _, opened, _)) in shared.iter().enumerate() {
            for _ in 0..1 + index % 2 {
                peer.close(*opened)??;
            }
        }
        for (index, (block, content, opened, _)) in shared.iter_mut().enumerate().filter(|(index, _)| index % 2 == 0) {
            let (at, bytes) = SLICES[index % SLICES.len()];
            peer.fill(opened.offset(at), bytes, index as u8)??;
            peer.synchronize_stream()??;
            content[at..at + bytes].fill(index as u8);
            check!(
                block.read()? == *content,
                "a fill of a slice of block {index} of {BLOCKS} did not arrive there alone"
            );
            peer.close(*opened)??;
        }
        Ok(())
    })
}

fn several_importers_share_one_block(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    for transport in transports(backend)? {
        let block = shareable(backend, BYTES, transport)?;
        let handle = block.export(transport)?;
        let mut importers = Vec::new();
        for _ in 0..2 {
            let mut peer = start(launcher, backend)?;
            let opened = peer.open(&handle)??;
            importers.push((peer, opened));
        }
        for writer in 0..importers.len() {
            let content = Random::new(31 + writer as u64).bytes(BYTES);
            let (peer, opened) = &mut importers[writer];
            peer.write(*opened, &content)??;
            for (reader, (peer, opened)) in importers.iter_mut().enumerate() {
                let got = peer.read(*opened, BYTES)??;
                check!(
                    got == content,
                    "importer {reader} does not see the bytes of importer {writer} of the same handle"
                );
            }
            check!(block.read()? == content, "the exporter does not see the bytes of importer {writer}");
        }
        for (mut peer, opened) in importers {
            peer.close(opened)??;
            peer.end()?;
        }
    }
    Ok(())
}

fn processes_share_both_ways_at_once(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let here = shareable(backend, BYTES, transport)?;
        let there = peer.allocate(BYTES, transport)??;
        let here_there = peer.open(&here.export(transport)?)??;
        let there_here = Block::open(backend, DEVICE, &peer.export(there, transport)??)?;
        let content = Random::new(41).bytes(BYTES);
        here.write(0, &content)?;
        // The second process copies from one memory to the other on a stream. This process reads the result through its
        // mapping.
        peer.copy(there, here_there, BYTES)??;
        peer.synchronize_stream()??;
        check!(there_here.read()? == content, "a copy from opened memory to the importer's own lost bytes");
        peer.close(here_there)??;
        there_here.give_back()?;
        Ok(peer.free(there)??)
    })
}

fn importers_that_are_killed_leave_the_memory(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    for transport in transports(backend)? {
        let before = backend.live_objects();
        let block = shareable(backend, BYTES, transport)?;
        let handle = block.export(transport)?;
        let mut peer = start(launcher, backend)?;
        let opened = peer.open(&handle)??;
        peer.write(opened, &[NEW; BYTES])??;
        check!(block.read()? == [NEW; BYTES], "the exporter does not see what the importer wrote");
        peer.kill()?;
        check!(block.read()? == [NEW; BYTES], "memory lost its contents when a process that had opened it was killed");
        block.write(0, &[OLD; BYTES])?;
        check!(block.read()? == [OLD; BYTES], "memory does not work after a process that had opened it was killed");
        // Other processes can still open it.
        let mut peer = start(launcher, backend)?;
        let opened = peer.open(&handle)??;
        check!(
            peer.read(opened, BYTES)?? == [OLD; BYTES],
            "memory cannot be opened again after an importer was killed"
        );
        peer.close(opened)??;
        peer.end()?;
        drop((block, handle));
        check_eq!(
            backend.live_objects(),
            before,
            "live objects after memory was shared with a process that was killed"
        );
    }
    Ok(())
}

// ----------------------------------------------------------------------------------------------------------- handles

fn only_shareable_memory_is_exported(backend: &dyn Backend, _: &Launcher) -> CaseResult {
    let offered = transports(backend)?;
    let plain = Block::filled(backend, BYTES, OLD)?;
    let before = backend.live_objects();
    for &transport in &offered {
        check_error!(plain.export(transport), InvalidArgument, "export of plain memory by {transport:?}");
        for &other in offered.iter().filter(|&&other| other != transport) {
            let block = shareable(backend, BYTES, other)?;
            check_error!(block.export(transport), InvalidArgument, "export of memory for {other:?} by {transport:?}");
        }
    }
    if backend.capabilities(DEVICE)?.stream_ordered_memory {
        let stream = Stream::new(backend)?;
        let ordered = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::StreamOrdered(stream.id()))?;
        stream.synchronize()?;
        for &transport in &offered {
            check_error!(
                ordered.export(transport),
                InvalidArgument,
                "export of stream-ordered memory by {transport:?}"
            );
        }
    }
    check_eq!(backend.live_objects(), before, "live objects after refused exports");
    check!(plain.read()? == [OLD; BYTES], "a refused export changed the memory");
    Ok(())
}

fn other_transports_are_refused(backend: &dyn Backend, _: &Launcher) -> CaseResult {
    let offered = transports(backend)?;
    let block = shareable(backend, BYTES, offered[0])?;
    for &transport in Transport::ALL {
        if !offered.contains(&transport) {
            let before = backend.live_objects();
            check_error!(block.export(transport), Unsupported, "export by {transport:?}, which the device lacks");
            let allocated = shareable(backend, BYTES, transport);
            check_error!(allocated, Unsupported, "allocate of memory for {transport:?}, which the device lacks");
            check_eq!(backend.live_objects(), before, "live objects after a refused transport");
        }
    }
    Ok(())
}

fn exports_can_be_repeated(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let before = backend.live_objects();
        let block = shareable(backend, BYTES, transport)?;
        let (first, second) = (block.export(transport)?, block.export(transport)?);
        let opened = [peer.open(&first)??, peer.open(&second)??];
        block.write(0, &[NEW; BYTES])?;
        for opened in opened {
            check!(peer.read(opened, BYTES)?? == [NEW; BYTES], "one of two handles of a block names other memory");
            peer.close(opened)??;
        }
        drop((first, second, block));
        check_eq!(backend.live_objects(), before, "live objects after handles and memory have gone");
        Ok(())
    })
}

/// Number of opens of one handle.
const OPENS: usize = 257;

fn opening_again_gives_the_same_address(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let block = shareable(backend, BYTES, transport)?;
        block.write(0, &[OLD; BYTES])?;
        let handle = block.export(transport)?;
        let first = peer.open(&handle)??;
        // More often than a count of 8 bits.
        for round in 2..=OPENS {
            check_eq!(peer.open(&handle)??, first, "the address of open number {round}");
        }
        // All closes but the last leave it open.
        for closed in 1..OPENS {
            peer.close(first)
                .map_err(|failure| failure.with_details(&format!("after {closed} of {OPENS} opens")))??;
            if !closed.is_multiple_of(64) && closed > 2 && closed < OPENS - 2 {
                continue;
            }
            block.write(0, &[NEW; BYTES])?;
            check!(peer.read(first, BYTES)?? == [NEW; BYTES], "a close ended more than one open");
            block.write(0, &[OLD; BYTES])?;
        }
        peer.close(first)??;
        check_error!(peer.close(first)?, InvalidPointer, "one close more than there were opens");
        Ok(())
    })
}

fn opening_anew_works_after_the_last_close(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let block = shareable(backend, BYTES, transport)?;
        let handle = block.export(transport)?;
        for round in 0..4 {
            let opened = peer.open(&handle)??;
            block.write(0, &[round; BYTES])?;
            check!(peer.read(opened, BYTES)?? == [round; BYTES], "memory opened for time {} is not shared", round + 1);
            peer.close(opened)??;
        }
        Ok(())
    })
}

fn addresses_that_are_not_open_are_not_closed(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let block = shareable(backend, BYTES, transport)?;
        let opened = peer.open(&block.export(transport)?)??;
        let own = peer.allocate(BYTES, transport)??;
        for (what, address) in [
            ("an address inside a mapping", opened.offset(256)),
            ("memory of the process itself", own),
            ("no address", highwater_hal::DevicePtr::new(0)),
            ("an address without memory", highwater_hal::DevicePtr::new(u64::MAX - 4095)),
        ] {
            check_error!(peer.close(address)?, InvalidPointer, "close_memory of {what}");
        }
        peer.write(opened, &[NEW; BYTES])??;
        peer.write(own, &[NEW; BYTES])??;
        check!(block.read()? == [NEW; BYTES], "a refused close ended a mapping");
        peer.close(opened)??;
        check_error!(peer.close(opened)?, InvalidPointer, "close_memory of closed memory");
        Ok(peer.free(own)??)
    })
}

/// Returns a handle that differs from a valid one.
type Alteration = (&'static str, fn(&mut MemoryHandle));

const ALTERATIONS: [Alteration; 6] = [
    ("a payload of zeros", |handle| handle.payload = [0; 64]),
    ("a payload of ones", |handle| handle.payload = [0xff; 64]),
    ("an inverted payload", |handle| handle.payload = handle.payload.map(|byte| !byte)),
    ("a payload of random bytes", |handle| {
        handle.payload = Random::new(51).bytes(64).try_into().expect("64 bytes were drawn");
    }),
    ("more bytes than the block has", |handle| handle.bytes += 1 << 30),
    ("no bytes", |handle| handle.bytes = 0),
];

/// Checks that the second process refuses a handle and maps nothing.
#[track_caller]
fn refused(peer: &mut Peer, handle: &MemoryHandle, what: &str) -> CaseResult {
    let before = peer.live_objects()??;
    check_error!(peer.open(handle)?, InvalidArgument, "open_memory of a handle with {what}");
    check_eq!(peer.live_objects()??, before, "live objects after a handle with {what} was refused");
    Ok(())
}

fn altered_handles_are_refused(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let block = shareable(backend, BYTES, transport)?;
        block.write(0, &[OLD; BYTES])?;
        let handle = block.export(transport)?;
        for (what, alter) in ALTERATIONS {
            let mut altered = handle.clone();
            alter(&mut altered);
            // A payload that the vendor does not use may be all zeros.
            if altered.payload != handle.payload || altered.bytes != handle.bytes {
                refused(peer, &altered, what)?;
            }
        }
        // The valid handle still works, and no other one does because its memory is open.
        let opened = peer.open(&handle)??;
        for (what, alter) in ALTERATIONS {
            let mut altered = handle.clone();
            alter(&mut altered);
            if altered.payload != handle.payload || altered.bytes != handle.bytes {
                refused(peer, &altered, &format!("{what}, while its memory is open"))?;
            }
        }
        check!(
            peer.read(opened, BYTES)?? == [OLD; BYTES],
            "a handle names other memory after altered ones were refused"
        );
        Ok(peer.close(opened)??)
    })
}

fn handles_of_another_device_are_refused(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let uuid = backend.device_info(DEVICE)?.uuid;
    let mut uuids = vec![[0; 16], uuid.map(|byte| !byte)];
    for device in DEVICE + 1..backend.device_count() {
        uuids.push(backend.device_info(device)?.uuid);
    }
    with_each_transport(backend, launcher, |transport, peer| {
        let block = shareable(backend, BYTES, transport)?;
        let handle = block.export(transport)?;
        check_eq!(handle.device_uuid, uuid, "the UUID in a handle");
        for other in &uuids {
            let mut altered = handle.clone();
            altered.device_uuid = *other;
            refused(peer, &altered, &format!("the UUID {other:x?}"))?;
        }
        Ok(())
    })
}

/// A handle as its exporter made it, opened for work of a device that does not have the memory.
fn handles_are_refused_for_another_device(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let there = peer.allocate(BYTES, transport)??;
        let handle = peer.export(there, transport)??;
        let before = backend.live_objects();
        let opened = Block::open(backend, DEVICE + 1, &handle);
        check_error!(opened, InvalidArgument, "open_memory for device {} of memory of device {DEVICE}", DEVICE + 1);
        check_eq!(backend.live_objects(), before, "live objects after an open for another device was refused");
        Block::open(backend, DEVICE, &handle)?.give_back()?;
        Ok(peer.free(there)??)
    })
}

fn imports_are_refused_for_another_device(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    with_each_transport(backend, launcher, |transport, peer| {
        if transport == Transport::Legacy {
            return Ok(());
        }
        let there = peer.allocate_mapped(piece, transport)??;
        let handle = peer.export(there, transport)??;
        let before = backend.live_objects();
        let imported = Block::imported(backend, DEVICE + 1, &handle);
        check_error!(imported, InvalidArgument, "import_memory for device {} of memory of device {DEVICE}", DEVICE + 1);
        check_eq!(backend.live_objects(), before, "live objects after an import for another device was refused");
        Block::imported(backend, DEVICE, &handle)?.give_back()?;
        Ok(peer.free(there)??)
    })
}

fn handles_without_their_descriptor_are_refused(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let block = shareable(backend, BYTES, Transport::Descriptor)?;
    let handle = block.export(Transport::Descriptor)?;
    check!(handle.descriptor.is_some(), "a handle that travels by descriptor has none");
    let mut peer = start(launcher, backend)?;
    let mut altered = handle.clone();
    altered.descriptor = None;
    refused(&mut peer, &altered, "no descriptor")?;
    // A descriptor of another object.
    let (reader, writer) = std::io::pipe().map_err(|error| Failure::new(format!("there is no pipe: {error}")))?;
    for end in [reader.into(), writer.into()] {
        altered.descriptor = Some(Descriptor::new(end));
        refused(&mut peer, &altered, "the descriptor of a pipe")?;
    }
    // A backend that knows open memory by its payload must check the descriptor all the same.
    let opened = peer.open(&handle)??;
    altered.descriptor = None;
    refused(&mut peer, &altered, "no descriptor, while its memory is open")?;
    peer.close(opened)??;
    refused(&mut peer, &altered, "no descriptor, after its memory was closed")?;
    peer.end()
}

fn open_memory_counts(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let there = peer.allocate(BYTES, transport)??;
        let before = backend.live_objects();
        let handle = peer.export(there, transport)??;
        let mapping = Block::open(backend, DEVICE, &handle)?;
        check_eq!(backend.live_objects().mappings, before.mappings + 1, "live mappings with one open");
        check_eq!(backend.live_objects().allocations, before.allocations, "blocks of this process with one open");
        mapping.give_back()?;
        drop(handle);
        check_eq!(backend.live_objects(), before, "live objects after the last close");
        Ok(peer.free(there)??)
    })
}

fn descriptors_of_handles_count(backend: &dyn Backend, _: &Launcher) -> CaseResult {
    let block = shareable(backend, BYTES, Transport::Descriptor)?;
    let before = backend.live_objects();
    let (first, second) = (block.export(Transport::Descriptor)?, block.export(Transport::Descriptor)?);
    check_eq!(backend.live_objects().descriptors, before.descriptors + 2, "live descriptors with two handles");
    drop(first);
    check_eq!(backend.live_objects().descriptors, before.descriptors + 1, "live descriptors with one of two handles");
    drop(second);
    check_eq!(backend.live_objects(), before, "live objects after the last handle was dropped");
    Ok(())
}

fn opening_and_closing_do_not_disturb_captures(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let there = peer.allocate(BYTES, transport)??;
        let handle = peer.export(there, transport)??;
        for (&mode, in_another_thread) in CaptureMode::ALL.iter().flat_map(|mode| [(mode, false), (mode, true)]) {
            let (block, stream) = (Block::filled(backend, BYTES, OLD)?, Stream::new(backend)?);
            let capture = Capture::begin(&stream, mode)?;
            stream.set(block.span(0..BYTES / 2), NEW)?;
            // It is closed without a wait, because nothing has used the mapping.
            let open = || Block::open(backend, DEVICE, &handle)?.give_back();
            if in_another_thread {
                in_thread(open)?
            } else {
                open()?
            }
            check!(backend.is_capturing(stream.id())?, "a capture ({mode:?}) was ended by opening memory");
            stream.set(block.span(BYTES / 2..BYTES), NEW)?;
            let graph = capture.end(&[&block]);
            check!(
                graph.is_ok(),
                "a capture ({mode:?}) was lost by opening memory, in another thread: {in_another_thread}: {:?}",
                graph.err()
            );
            graph?.instantiate()?.launch(&stream)?;
            stream.synchronize()?;
            check!(block.read()? == [NEW; BYTES], "a capture ({mode:?}) in which memory was opened is not whole");
        }
        drop(handle);
        Ok(peer.free(there)??)
    })
}

/// Imports of memory of another process, mapped in the middle of a capture, by either thread.
fn importing_does_not_disturb_captures(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    with_each_transport(backend, launcher, |transport, peer| {
        if transport == Transport::Legacy {
            return Ok(());
        }
        let there = peer.allocate_mapped(piece, transport)??;
        let content = Random::new(83).bytes(BYTES.min(piece));
        peer.write(there, &content)??;
        let handle = peer.export(there, transport)??;
        for &mode in CaptureMode::ALL {
            for in_another_thread in [false, true] {
                let (block, stream) = (Block::filled(backend, BYTES, OLD)?, Stream::new(backend)?);
                let before = backend.live_objects();
                let capture = Capture::begin(&stream, mode)?;
                stream.set(block.span(0..BYTES / 2), NEW)?;
                let import = || Block::imported(backend, DEVICE, &handle);
                let imported = if in_another_thread { in_thread(import)? } else { import()? };
                check!(backend.is_capturing(stream.id())?, "a capture ({mode:?}) was ended by an import of memory");
                stream.set(block.span(BYTES / 2..BYTES), NEW)?;
                let graph = capture.end(&[&block]);
                check!(graph.is_ok(), "a capture ({mode:?}) was lost by an import of memory: {:?}", graph.err());
                let graph = graph?;
                let got = imported.read()?;
                check!(got[..content.len()] == content, "memory that was imported during a capture has other bytes");
                graph.instantiate()?.launch(&stream)?;
                stream.synchronize()?;
                check!(block.read()? == [NEW; BYTES], "a capture ({mode:?}) in which memory was imported is not whole");
                drop(graph);
                imported.give_back()?;
                check_eq!(backend.live_objects(), before, "live objects after an import in a capture ({mode:?})");
            }
        }
        drop(handle);
        Ok(peer.free(there)??)
    })
}

// ----------------------------------------------------------------------------------------------------- mapped memory

fn mapped_memory_is_shared(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
        let options = PhysicalMemoryOptions::new(2 * piece).with_shareable(transport);
        // It shares plain memory only.
        if transport == Transport::Legacy {
            return Ok(());
        }
        let addresses = Addresses::new(backend, DEVICE, 4 * piece)?;
        // Memory beside it, which the handle does not name.
        let memory = PhysicalMemory::create(backend, DEVICE, &options)?;
        addresses.map(piece, &memory, 2 * piece)?;
        addresses.give_access(piece..3 * piece, DEVICE)?;
        let beside = addresses.fill_in(3 * piece..4 * piece)?;
        let content = Random::new(71).bytes(2 * piece);
        addresses.write(piece, &content)?;
        let handle = addresses.export(piece, transport)?;
        check_eq!(handle.bytes, 2 * piece as u64, "the bytes in a handle of mapped memory");
        let opened = peer.open(&handle)??;
        let last = 2 * piece - BYTES.min(piece);
        check!(peer.read(opened, BYTES.min(piece))?? == content[..BYTES.min(piece)], "the importer sees other bytes");
        let new = Random::new(72).bytes(BYTES.min(piece));
        peer.write(opened, &new)??;
        let read = addresses.read(piece..3 * piece)?;
        check!(read[..new.len()] == new, "the exporter does not see what the importer wrote to mapped memory");
        check!(read[last..] == content[last..], "bytes beside those that the importer wrote have changed");
        check_error!(addresses.export(3 * piece, transport), InvalidArgument, "export_memory of memory of one process");
        peer.close(opened)??;
        drop((addresses, beside, memory));
        Ok(())
    })
}

/// Runs a case for each transport of mapped memory, with two mappings next to each other, and their handles.
fn with_mappings(
    backend: &dyn Backend,
    launcher: &Launcher,
    run: impl Fn(&Addresses<'_>, [MemoryHandle; 2], &mut Peer) -> CaseResult,
) -> CaseResult {
    with_each_transport(backend, launcher, |transport, peer| {
        if transport == Transport::Legacy {
            return Ok(());
        }
        let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
        let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
        let options = PhysicalMemoryOptions::new(piece).with_shareable(transport);
        let memory = [0, piece].map(|offset| {
            let memory = PhysicalMemory::create(backend, DEVICE, &options)?;
            addresses.map(offset, &memory, piece)?;
            Ok::<_, Failure>(memory)
        });
        addresses.give_access(0..2 * piece, DEVICE)?;
        let handles = [addresses.export(0, transport)?, addresses.export(piece, transport)?];
        run(&addresses, handles, peer)?;
        for memory in memory {
            drop(memory?);
        }
        Ok(())
    })
}

fn imported_memory_is_the_exporters(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_mappings(backend, launcher, |addresses, handles, peer| {
        let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
        let bytes = BYTES.min(piece);
        let content = Random::new(81).bytes(2 * piece);
        addresses.write(0, &content)?;
        let before = peer.live_objects()??;
        let [first, second] = [peer.import(&handles[0])??, peer.import(&handles[1])??];
        check!(peer.read(first, bytes)?? == content[..bytes], "imported memory has other bytes than its exporter's");
        let last = piece - bytes;
        check!(
            peer.read(second.offset(last), bytes)?? == content[piece + last..],
            "the end of imported memory has other bytes than its exporter's"
        );
        let new = Random::new(82).bytes(bytes);
        peer.write(second, &new)??;
        let read = addresses.read(0..2 * piece)?;
        check!(read[piece..piece + bytes] == new, "the exporter does not see what the importer wrote");
        check!(read[..piece] == content[..piece], "a write to one import changed the other");
        peer.free(first)??;
        peer.free(second)??;
        check_eq!(peer.live_objects()??, before, "live objects after imported memory was unmapped");
        Ok(())
    })
}

/// Memory of `allocate` in the sizes of mapped memory and in others, in the process that exports it and in another one.
fn memory_that_is_not_mapped_is_not_imported(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    with_each_transport(backend, launcher, |transport, peer| {
        for bytes in [piece / 2, piece, piece + piece / 2, 2 * piece] {
            if transport == Transport::Fabric && bytes.is_multiple_of(piece) {
                continue;
            }
            let handle = shareable(backend, bytes, transport)?.export(transport)?;
            let before = (backend.live_objects(), peer.live_objects()??);
            let imported = sharing(backend, "import_memory")?.import_memory(DEVICE, &handle);
            let is_refused = imported.as_ref().is_err_and(|error| error.kind() == ErrorKind::InvalidArgument);
            let message = format!("import_memory of {bytes} bytes of `allocate` in the process that exports them");
            check!(is_refused, "{message}: {imported:?}");
            check_error!(peer.import(&handle)?, InvalidArgument, "import_memory of {bytes} bytes of `allocate`");
            check_eq!(
                (backend.live_objects(), peer.live_objects()??),
                before,
                "live objects after memory was refused that is not mapped"
            );
        }
        Ok(())
    })
}

fn altered_imports_are_refused(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let uuid = backend.device_info(DEVICE)?.uuid;
    with_mappings(backend, launcher, |_, [handle, _], peer| {
        let mut wrong: Vec<(&str, MemoryHandle)> = Vec::new();
        for (what, alter) in ALTERATIONS {
            let mut altered = handle.clone();
            alter(&mut altered);
            if altered.payload != handle.payload || altered.bytes != handle.bytes {
                wrong.push((what, altered));
            }
        }
        for other in [[0; 16], uuid.map(|byte| !byte)] {
            let mut altered = handle.clone();
            altered.device_uuid = other;
            wrong.push(("the UUID of another device", altered));
        }
        if handle.transport == Transport::Descriptor {
            let mut altered = handle.clone();
            altered.descriptor = None;
            wrong.push(("no descriptor", altered));
        }
        let plain = shareable(backend, 4096, handle.transport)?;
        wrong.push(("memory of `allocate`", plain.export(handle.transport)?));
        let before = peer.live_objects()??;
        for (what, altered) in &wrong {
            check_error!(peer.import(altered)?, InvalidArgument, "import_memory of a handle with {what}");
            check_eq!(peer.live_objects()??, before, "live objects after a handle with {what} was refused");
        }
        let imported = peer.import(&handle)??;
        Ok(peer.free(imported)??)
    })
}

// -------------------------------------------------------------------------------------------------- an exporter's end

/// Opens memory of a second process, ends that process in some way, and checks that the memory still exists.
fn outlives(
    backend: &dyn Backend,
    launcher: &Launcher,
    prepare: impl FnOnce(&mut Peer) -> CaseResult,
    end: impl FnOnce(Peer) -> CaseResult,
) -> CaseResult {
    let transport = Transport::Descriptor;
    let content = Random::new(61).bytes(BYTES);
    let mut peer = start(launcher, backend)?;
    let there = peer.allocate(BYTES, transport)??;
    peer.write(there, &content)??;
    let handle = peer.export(there, transport)??;
    let mapping = Block::open(backend, DEVICE, &handle)?;
    drop(handle);
    prepare(&mut peer)?;
    end(peer)?;
    check!(mapping.read()? == content, "opened memory lost its contents when its exporter ended");
    // Memory that is allocated now does not overlap it.
    let blocks = (0..8).map(|_| Block::filled(backend, BYTES, OLD)).collect::<Result<Vec<_>, _>>()?;
    let shared = shareable(backend, BYTES, transport)?;
    shared.write(0, &[OLD; BYTES])?;
    check!(mapping.read()? == content, "memory whose exporter has ended was given to somebody else");
    mapping.write(0, &[NEW; BYTES])?;
    check!(mapping.read()? == [NEW; BYTES], "opened memory cannot be written after its exporter has ended");
    for block in blocks.iter().chain([&shared]) {
        check!(block.read()? == [OLD; BYTES], "memory whose exporter has ended is also somebody else's");
    }
    mapping.give_back()?;
    Ok(())
}

fn mappings_outlive_an_exporter_that_forked(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let fork = |peer: &mut Peer| -> CaseResult { Ok(peer.fork()??) };
    outlives(backend, launcher, fork, |mut peer| peer.kill().map(drop))
}

/// A descriptor alone keeps the memory of a killed process. The process that has it and a third one open the memory.
fn descriptors_outlive_a_killed_exporter(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let transport = Transport::Descriptor;
    let content = Random::new(62).bytes(BYTES);
    let mut peer = start(launcher, backend)?;
    let there = peer.allocate(BYTES, transport)??;
    peer.write(there, &content)??;
    let handle = peer.export(there, transport)??;
    Block::open(backend, DEVICE, &handle)?.give_back()?;
    peer.kill()?;
    // Memory that is allocated now must not be the descriptor's.
    let blocks = (0..8).map(|_| Block::filled(backend, BYTES, OLD)).collect::<Result<Vec<_>, _>>()?;
    let mapping = Block::open(backend, DEVICE, &handle)?;
    check!(mapping.read()? == content, "the memory of a descriptor lost its contents when its exporter ended");
    let mut third = start(launcher, backend)?;
    let opened = third.open(&handle)??;
    check!(third.read(opened, BYTES)?? == content, "a third process sees other bytes after the exporter has ended");
    third.write(opened, &[NEW; BYTES])??;
    check!(mapping.read()? == [NEW; BYTES], "two processes that opened one descriptor do not share its memory");
    for block in &blocks {
        check!(block.read()? == [OLD; BYTES], "memory whose exporter has ended is also somebody else's");
    }
    third.close(opened)??;
    third.end()?;
    mapping.give_back()?;
    drop((handle, blocks));
    Ok(())
}

/// The exporter frees the memory, and allocates as much again. An importer keeps the old bytes, and finds them again when it
/// opens the handle.
fn importers_keep_memory_that_the_exporter_freed(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let transport = Transport::Descriptor;
    let mut peer = start(launcher, backend)?;
    let content = Random::new(63).bytes(BYTES);
    let block = shareable(backend, BYTES, transport)?;
    block.write(0, &content)?;
    let handle = block.export(transport)?;
    let opened = peer.open(&handle)??;
    block.give_back()?;
    let mut again = Vec::new();
    for _ in 0..4 {
        again.extend([shareable(backend, BYTES, transport)?, Block::new(backend, BYTES)?]);
    }
    for block in &again {
        block.write(0, &[OLD; BYTES])?;
    }
    check!(peer.read(opened, BYTES)?? == content, "an importer's memory lost its contents when the exporter freed it");
    peer.write(opened, &[NEW; BYTES])??;
    for block in &again {
        check!(block.read()? == [OLD; BYTES], "memory that an importer has open was allocated again");
    }
    peer.close(opened)??;
    // The handle alone keeps the memory.
    let opened = peer.open(&handle)??;
    check!(peer.read(opened, BYTES)?? == [NEW; BYTES], "the memory of a handle lost its contents after the last close");
    peer.close(opened)??;
    peer.end()?;
    drop((handle, again));
    Ok(())
}

/// The memory is destroyed while it is mapped, and ends with the mapping, or the other way around.
fn importers_keep_mapped_memory_that_the_exporter_gave_back(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let (transport, piece) = (Transport::Descriptor, backend.capabilities(DEVICE)?.mapped_memory_granularity);
    let content = Random::new(65).bytes(piece);
    let mut peer = start(launcher, backend)?;
    for is_destroyed_first in [true, false] {
        let addresses = Addresses::new(backend, DEVICE, piece)?;
        let options = PhysicalMemoryOptions::new(piece).with_shareable(transport);
        let memory = PhysicalMemory::create(backend, DEVICE, &options)?;
        addresses.map(0, &memory, piece)?;
        addresses.give_access(0..piece, DEVICE)?;
        addresses.write(0, &content)?;
        let handle = addresses.export(0, transport)?;
        let opened = peer.open(&handle)??;
        if is_destroyed_first {
            memory.destroy()?;
            addresses.unmap(0..piece)?;
        } else {
            addresses.unmap(0..piece)?;
            memory.destroy()?;
        }
        let again = Block::mapped_for(backend, DEVICE, piece, transport)?;
        again.write(0, &vec![OLD; piece])?;
        check!(
            peer.read(opened, piece)?? == content,
            "an importer's mapped memory lost its contents when the exporter gave it back, destroyed first: \
             {is_destroyed_first}"
        );
        peer.write(opened, &vec![NEW; piece])??;
        check!(again.read()? == vec![OLD; piece], "mapped memory that an importer has open was allocated again");
        peer.close(opened)??;
        // The handle alone keeps the memory.
        let opened = peer.open(&handle)??;
        check!(
            peer.read(opened, piece)?? == vec![NEW; piece],
            "the mapped memory of a handle lost its contents after the last close"
        );
        peer.close(opened)??;
        drop((handle, again));
    }
    peer.end()
}

/// The second process exports the memory and frees it.
fn memory_that_was_freed_elsewhere_is_kept(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let transport = Transport::Descriptor;
    let mut peer = start(launcher, backend)?;
    let content = Random::new(64).bytes(BYTES);
    let there = peer.allocate(BYTES, transport)??;
    peer.write(there, &content)??;
    let handle = peer.export(there, transport)??;
    let mapping = Block::open(backend, DEVICE, &handle)?;
    peer.free(there)??;
    let again = peer.allocate(BYTES, transport)??;
    peer.write(again, &[OLD; BYTES])??;
    check!(mapping.read()? == content, "opened memory lost its contents when its exporter freed it");
    mapping.write(0, &[NEW; BYTES])?;
    check!(
        peer.read(again, BYTES)?? == [OLD; BYTES],
        "memory that this process has open was allocated again elsewhere"
    );
    mapping.give_back()?;
    let mapping = Block::open(backend, DEVICE, &handle)?;
    check!(mapping.read()? == [NEW; BYTES], "the memory of a handle lost its contents when its exporter freed it");
    mapping.give_back()?;
    drop(handle);
    peer.free(again)??;
    peer.end()
}

// ------------------------------------------------------------------------------------------------------------ events

fn only_interprocess_events_are_exported(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let (own, for_others) = (Event::new(backend)?, Event::interprocess(backend)?);
    check_error!(own.export(), InvalidArgument, "export_event of an event for this process");
    let handle = for_others.export()?;
    check_eq!(handle.device_uuid, backend.device_info(DEVICE)?.uuid, "the UUID in the handle of an event");
    let stale = own.destroy()?;
    let sharing = crate::device::sharing(backend, "export_event")?;
    check_error!(sharing.export_event(stale), InvalidHandle, "export_event of a destroyed event");
    let mut peer = start(launcher, backend)?;
    let event = peer.create_event(false)??;
    check_error!(peer.export_event(event)?, InvalidArgument, "export_event of an event of the second process");
    // A handle of no event is refused; a handle of an event is accepted.
    let mut altered = handle.clone();
    altered.device_uuid = altered.device_uuid.map(|byte| !byte);
    check!(peer.open_event(&altered)?.is_err(), "open_event of a handle of a device that is not there succeeded");
    let opened = peer.open_event(&handle)??;
    peer.destroy_event(opened)??;
    peer.end()
}

/// The load of a producer, relative to the load of an attempt. A consumer that does not wait needs the time to run ahead;
/// otherwise its mistake does not show.
const PRODUCED: usize = 6;

fn check_new(got: &[u8], what: &str) -> CaseResult {
    let old = got.iter().filter(|&&byte| byte != NEW).count();
    check!(old == 0, "{what}: {old} of {BYTES} bytes were read before the work that the stream was to wait for");
    Ok(())
}

const TOO_EARLY: &str = "the producer was done before the consumer in the other process had its work";

fn opened_events_order_the_importer(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let transport = transports(backend)?[0];
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (producer, event) = (Stream::new(backend)?, Event::interprocess(backend)?);
    let shared = shareable(backend, BYTES, transport)?;
    let mut peer = start(launcher, backend)?;
    let (opened, handle) = (peer.open(&shared.export(transport)?)??, event.export()?);
    // Each id of the event orders work.
    let events = [peer.open_event(&handle)??, peer.open_event(&handle)??];
    let copied = peer.allocate(BYTES, transport)??;
    let here = (&producer, &event, &busy, &shared);
    orders_the_importer(&mut peer, here, (opened, events[1], copied))?;
    // The end of one id leaves the other.
    peer.destroy_event(events[1])??;
    orders_the_importer(&mut peer, here, (opened, events[0], copied))?;
    peer.end()
}

/// Shows that the stream of the second process waits for the event of this one.
fn orders_the_importer(
    peer: &mut Peer,
    (producer, event, busy, shared): (&Stream<'_>, &Event<'_>, &StreamLoad<'_>, &Block<'_>),
    (opened, opened_event, copied): (DevicePtr, PeerEvent, DevicePtr),
) -> CaseResult {
    until_conclusive(TOO_EARLY, |load| {
        shared.write(0, &[OLD; BYTES])?;
        // The importer has seen an earlier record complete, and may remember it.
        producer.record(event)?;
        producer.synchronize()?;
        check!(peer.query_event(opened_event)??.is_complete(), "an opened event is pending after it was reached");
        peer.synchronize_event(opened_event)??;
        peer.write(copied, &[OLD; BYTES])??;
        busy.enqueue(producer, load * PRODUCED)?;
        producer.set(shared.all(), NEW)?;
        producer.record(event)?;
        peer.wait_for(opened_event)??;
        peer.copy(copied, opened, BYTES)??;
        peer.let_others_begin()??;
        let outstanding = event.is_pending()?;
        peer.synchronize_stream()??;
        check_new(&peer.read(copied, BYTES)??, "a stream that waits for another process's event")?;
        producer.synchronize()?;
        Ok(Attempt::seen(outstanding))
    })
}

/// The process that creates an event of both processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maker {
    This,
    Other,
}

/// An event of both processes.
fn event_of_both<'b>(
    backend: &'b dyn Backend,
    peer: &mut Peer,
    maker: Maker,
) -> Result<(Event<'b>, PeerEvent), Failure> {
    match maker {
        Maker::This => {
            let here = Event::interprocess(backend)?;
            let there = peer.open_event(&here.export()?)??;
            Ok((here, there))
        }
        Maker::Other => {
            let there = peer.create_event(true)??;
            Ok((Event::open(backend, DEVICE, &peer.export_event(there)??)?, there))
        }
    }
}

/// The second process produces and records; this process waits.
fn recorded_elsewhere(backend: &dyn Backend, launcher: &Launcher, maker: Maker) -> CaseResult {
    let transport = transports(backend)?[0];
    let mut peer = start(launcher, backend)?;
    let (consumer, idle) = (Stream::new(backend)?, IdleStream::on(backend, DEVICE)?);
    let (shared, copied) = (shareable(backend, BYTES, transport)?, Block::new(backend, BYTES)?);
    let opened = peer.open(&shared.export(transport)?)??;
    let (here, there) = event_of_both(backend, &mut peer, maker)?;
    until_conclusive(TOO_EARLY, |load| {
        shared.write(0, &[OLD; BYTES])?;
        copied.write(0, &[OLD; BYTES])?;
        // This process has seen an earlier record complete, and may remember it.
        peer.record(there)??;
        here.synchronize()?;
        check!(here.query()?.is_complete(), "an opened event is pending after it was synchronized");
        peer.busy(Direction::ToDevice, load * PRODUCED)??;
        peer.fill(opened, BYTES, NEW)??;
        peer.record(there)??;
        consumer.wait(&here)?;
        consumer.copy(copied.all(), shared.all())?;
        idle.let_others_begin()?;
        let outstanding = !peer.query_stream()??.is_complete();
        consumer.synchronize()?;
        check_new(&copied.read()?, "a stream that waits for another process's record")?;
        peer.synchronize_stream()??;
        Ok(Attempt::seen(outstanding))
    })?;
    drop(here);
    peer.end()
}

fn processes_take_turns_by_events(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    // Some vendors order only the first 32 records of an event.
    const ROUNDS: u8 = 40;
    let transport = transports(backend)?[0];
    let (stream, ping) = (Stream::new(backend)?, Event::interprocess(backend)?);
    let shared = shareable(backend, BYTES, transport)?;
    let seen = Block::new(backend, BYTES * usize::from(ROUNDS))?;
    let mut peer = start(launcher, backend)?;
    let opened = peer.open(&shared.export(transport)?)??;
    let (ping_there, pong_there) = (peer.open_event(&ping.export()?)??, peer.create_event(true)??);
    let pong = Event::open(backend, DEVICE, &peer.export_event(pong_there)??)?;
    // No process waits on the CPU: only the events order the two streams.
    for round in 0..ROUNDS {
        stream.set(shared.all(), round)?;
        stream.record(&ping)?;
        peer.wait_for(ping_there)??;
        if round >= 32 {
            // Its fill is still outstanding when this stream waits for it, on a busy machine too.
            peer.busy(Direction::ToDevice, 4)??;
        }
        peer.fill(opened, BYTES / 2, 100 + round)??;
        peer.record(pong_there)??;
        stream.wait(&pong)?;
        let start = BYTES * usize::from(round);
        stream.copy(seen.span(start..start + BYTES), shared.all())?;
    }
    stream.synchronize()?;
    let got = seen.read()?;
    for (round, got) in (0..ROUNDS).zip(got.chunks(BYTES)) {
        let (theirs, ours) = got.split_at(BYTES / 2);
        let right = theirs.iter().all(|&byte| byte == 100 + round) && ours.iter().all(|&byte| byte == round);
        check!(right, "in round {round} of {ROUNDS}, work of two processes did not run in the order of their events");
    }
    drop(pong);
    peer.end()
}

fn opened_events_are_pending_as_the_original(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let mut peer = start(launcher, backend)?;
    let there = peer.create_event(true)??;
    let here = Event::open(backend, DEVICE, &peer.export_event(there)??)?;
    until_conclusive("the event of another process is never seen pending", |load| {
        peer.busy(Direction::ToDevice, load * PRODUCED)??;
        peer.record(there)??;
        let pending = here.is_pending()?;
        let outstanding = !peer.query_event(there)??.is_complete();
        check!(pending || !outstanding, "an opened event is complete while the other process has it pending");
        here.synchronize()?;
        check!(here.query()?.is_complete(), "an opened event is pending after it was synchronized");
        check!(
            peer.query_event(there)??.is_complete(),
            "an event is pending though another process has synchronized it"
        );
        Ok(Attempt::seen(pending))
    })?;
    // The same in the other direction.
    peer.record(there)??;
    peer.synchronize_event(there)??;
    check!(here.query()?.is_complete(), "an opened event is pending though its owner has synchronized it");
    drop(here);
    peer.end()
}

fn opened_events_that_were_never_recorded_are_complete(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let mut peer = start(launcher, backend)?;
    let there = peer.create_event(true)??;
    let here = Event::open(backend, DEVICE, &peer.export_event(there)??)?;
    check!(here.query()?.is_complete(), "an opened event that was never recorded is pending");
    here.synchronize()?;
    let (stream, block) = (Stream::new(backend)?, Block::filled(backend, BYTES, OLD)?);
    stream.wait(&here)?;
    stream.set(block.all(), NEW)?;
    stream.synchronize()?;
    check_new(&block.read()?, "a stream that waits for an opened event that was never recorded")?;
    drop(here);
    peer.end()
}

/// Waits until the condition holds, with a time limit.
fn comes_true(mut condition: impl FnMut() -> highwater_hal::Result<bool>) -> Result<bool, Failure> {
    const PATIENCE: Duration = Duration::from_secs(30);
    let deadline = Instant::now() + PATIENCE;
    while !condition()? {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(true)
}

/// Makes a stream wait for a record of a second process after its work, and kills that process meanwhile.
fn waits_end(backend: &dyn Backend, launcher: &Launcher, prepare: impl Fn(&mut Peer) -> CaseResult) -> CaseResult {
    for maker in [Maker::Other, Maker::This] {
        until_conclusive("the other process was done before it could be killed", |load| {
            let mut peer = start(launcher, backend)?;
            prepare(&mut peer)?;
            let (here, there) = event_of_both(backend, &mut peer, maker)?;
            let (block, stream) = (Block::filled(backend, BYTES, OLD)?, Stream::new(backend)?);
            peer.busy(Direction::ToDevice, load * PRODUCED * 4)??;
            peer.record(there)??;
            stream.wait(&here)?;
            stream.set(block.all(), NEW)?;
            let outstanding = stream.is_pending()?;
            peer.kill()?;
            if !comes_true(|| Ok(!stream.is_pending()?))? {
                // Giving these back would wait forever.
                std::mem::forget((stream, block, here));
                let message = "a stream still waits for an event of a process that has ended";
                return Err(Failure::new(message));
            }
            check!(comes_true(|| Ok(!here.is_pending()?))?, "an event is still pending though its process has ended");
            here.synchronize()?;
            stream.synchronize()?;
            check!(block.read()? == [NEW; BYTES], "work after a wait was lost when the process waited for ended");
            Ok(Attempt::seen(outstanding))
        })?;
    }
    Ok(())
}

fn waits_end_though_the_process_had_forked(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    waits_end(backend, launcher, |peer| Ok(peer.fork()??))
}

fn opened_events_count(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let mut peer = start(launcher, backend)?;
    let there = peer.create_event(true)??;
    let before = backend.live_objects();
    let handle = peer.export_event(there)??;
    let here = Event::open(backend, DEVICE, &handle)?;
    check_eq!(backend.live_objects().events, before.events + 1, "live events with one opened");
    drop(handle);
    let stale = here.destroy()?;
    check_error!(backend.query_event(stale), InvalidHandle, "query_event of an opened event that was destroyed");
    check_eq!(backend.live_objects(), before, "live objects after the opened event was destroyed");
    // The owner's event still works.
    peer.record(there)??;
    peer.synchronize_event(there)??;
    peer.destroy_event(there)??;
    peer.end()
}
