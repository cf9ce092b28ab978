//! The race finder in detail: tiles, aliases, graphs, workspaces, other processes, and its reports.

use std::sync::{Barrier, Mutex};

use highwater_hal::{
    Backend, BlasHandle, BlasKind, Completion, DataType, DevicePtr, ErrorKind, FillPattern, Gemm, GemmShape, Location,
    StreamId, Workspace,
};
use highwater_mock::races::{Race, RaceKind};
use highwater_mock::{MockOptions, Operation};

use crate::rig::{Rig, at, kind, millis, small};

const BYTES: usize = 4096;

fn watched() -> MockOptions {
    small().with_devices(2).with_race_detector()
}

fn fill(rig: &Rig, block: DevicePtr, stream: StreamId) {
    rig.fill(block, FillPattern::U8(1), BYTES, stream).unwrap();
}

/// The only race that there is.
fn the_race(rig: &Rig) -> Race {
    let races = rig.gpu.races();
    assert_eq!((races.len(), rig.gpu.race_count()), (1, 1), "{races:#?}");
    races.into_iter().next().unwrap()
}

fn assert_none(rig: &Rig) {
    rig.gpu.check_races().unwrap();
}

#[test]
fn without_the_finder_nothing_is_found_and_nothing_can_be_claimed() {
    let rig = Rig::new(small());
    let (block, other) = (rig.allocate(0, BYTES), rig.stream(0));
    fill(&rig, block, rig.stream);
    fill(&rig, block, other);
    assert!(rig.gpu.races().is_empty() && rig.gpu.race_count() == 0);
    assert_eq!(kind(rig.gpu.check_races()), ErrorKind::InvalidState);
}

#[test]
fn a_race_tells_both_calls_the_shared_bytes_and_the_way_out() {
    let rig = Rig::new(watched());
    let (block, other) = (rig.allocate(0, BYTES), rig.stream(0));
    fill(&rig, block, rig.stream);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    fill(&rig, block, rig.stream);
    let later = DevicePtr::new(block.get() + 1024);
    let host = rig.pinned(BYTES);
    std::thread::scope(|scope| {
        let copy = || rig.copy(Location::Host(host), at(0, later), 512, other).unwrap();
        std::thread::Builder::new().name("copies".to_owned()).spawn_scoped(scope, copy).unwrap();
    });
    let race = the_race(&rig);
    assert_eq!(race.kind(), RaceKind::Unordered);
    assert_eq!((race.overlap().device, race.overlap().address, race.overlap().bytes), (Some(0), later.get(), 512));
    let (first, second) = (race.first(), race.second());
    assert_eq!((first.operation(), first.call(), first.writes()), (Operation::Fill, 2, true));
    assert_eq!((second.operation(), second.call(), second.writes()), (Operation::Copy, 1, false));
    assert_eq!((first.stream(), second.stream()), (Some(rig.stream), Some(other)));
    assert_eq!((first.bytes().bytes, second.bytes().bytes, second.thread()), (4096, 512, "copies"));
    assert!(second.location().unwrap().contains("rig.rs"), "{race}");
    assert!(second.frames().iter().any(|frame| frame.to_string().contains("races.rs")), "{race}");
    let error = rig.gpu.check_races().unwrap_err();
    let text = error.to_string();
    for part in ["1 race found", "`fill` (call 2) writes 4096 bytes", "`copy` (call 1) reads 512 bytes", "hint:"] {
        assert!(text.contains(part), "`{part}` is missing in {text}");
    }
    rig.gpu.synchronize_device(0).unwrap();
}

#[test]
fn many_races_of_one_pair_are_one_and_not_all_of_a_flood_are_kept() {
    let rig = Rig::new(watched());
    let (block, other) = (rig.allocate(0, BYTES), rig.stream(0));
    for _ in 0..1100 {
        fill(&rig, block, rig.stream);
        rig.gpu.synchronize_stream(other).unwrap();
        fill(&rig, block, other);
        rig.gpu.synchronize_stream(rig.stream).unwrap();
    }
    // Each but the first fill of the first stream meets the last one of the other, too.
    assert_eq!((rig.gpu.races().len(), rig.gpu.race_count()), (1000, 2 * 1100 - 1));
}

fn products(rig: &Rig, stream: StreamId, room: DevicePtr) -> Box<dyn BlasHandle> {
    let mut handle = rig.blas(BlasKind::Blas, stream);
    // SAFETY: the room stays allocated as long as the mock.
    unsafe { handle.set_workspace(Some(Workspace { ptr: room, bytes: BYTES })).unwrap() };
    handle
}

fn gemm(handle: &mut dyn BlasHandle, gemm: &Gemm) {
    // SAFETY: the blocks stay allocated as long as the mock; contents are not looked at.
    unsafe { handle.gemm(gemm).unwrap() }
}

#[test]
fn tiles_of_one_matrix_do_not_meet_and_overlapping_ones_do() {
    let rig = Rig::new(watched());
    let other = rig.stream(0);
    let (a, b, matrix) = (rig.allocate(0, BYTES), rig.allocate(0, BYTES), rig.allocate(0, BYTES));
    let mut handles = [rig.stream, other].map(|stream| products(&rig, stream, rig.allocate(0, BYTES)));
    // 4 x 4 out of 16 x 16, at this row and column.
    let tile = |row: u64, column: u64| {
        let shape = GemmShape::new(DataType::F32, 4, 4, 4).with_leading_dimensions(4, 4, 16);
        Gemm::new(shape, a, b, DevicePtr::new(matrix.get() + 4 * (column * 16 + row)))
    };
    gemm(&mut *handles[0], &tile(0, 0));
    gemm(&mut *handles[1], &tile(4, 0));
    gemm(&mut *handles[1], &tile(0, 4));
    assert_none(&rig);
    gemm(&mut *handles[1], &tile(3, 3));
    let race = the_race(&rig);
    assert_eq!((race.overlap().address, race.overlap().bytes), (matrix.get() + 4 * (3 * 16 + 3), 4));
    rig.gpu.synchronize_device(0).unwrap();
}

#[test]
fn products_on_one_stream_in_one_workspace_must_take_turns() {
    let run = |take_turns: bool| {
        let rig = Rig::new(watched().with_gemm_gap(millis(20)));
        let room = rig.allocate(0, BYTES);
        let (turn, start) = (Mutex::new(()), Barrier::new(2));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let (a, b, c) = (rig.allocate(0, 64), rig.allocate(0, 64), rig.allocate(0, 64));
                    let mut handle = products(&rig, rig.stream, room);
                    start.wait();
                    let _turn = take_turns.then(|| turn.lock().unwrap());
                    gemm(&mut *handle, &Gemm::new(GemmShape::new(DataType::F32, 4, 4, 4), a, b, c));
                });
            }
        });
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        rig.gpu.races()
    };
    assert!(run(true).is_empty());
    // The threads may miss each other on a busy machine.
    let races = (0..50).map(|_| run(false)).find(|races| !races.is_empty()).expect("no products met in 50 runs");
    assert!(races.iter().all(|race| race.kind() == RaceKind::Interleaved), "{races:?}");
    assert!(races[0].first().is_workspace() && races[0].second().is_workspace(), "{}", races[0]);
    assert!(races[0].to_string().contains("(its workspace)"), "{}", races[0]);
}

#[test]
fn recording_is_no_use_and_a_launch_is_one_in_its_place() {
    let rig = Rig::new(watched());
    let (block, other) = (rig.allocate(0, BYTES), rig.stream(0));
    let graph = rig.captured(rig.stream, || fill(&rig, block, rig.stream));
    fill(&rig, block, other);
    assert_none(&rig);
    rig.launch(graph, other).unwrap();
    assert_none(&rig);
    rig.fill(block, FillPattern::U8(2), 1, rig.stream).unwrap();
    let races = rig.gpu.races();
    let places: Vec<_> = races.iter().map(|race| (race.first().operation(), race.first().recorded())).collect();
    // The launch came after the fill on its stream and takes its place.
    assert_eq!(places, [(Operation::LaunchGraph, Some((Operation::Fill, 1)))]);
    let text = races[0].to_string();
    assert!(text.contains("where the `fill` of call 1 writes") && text.contains("recorded by"), "{text}");
    rig.gpu.synchronize_device(0).unwrap();
}

#[test]
fn a_graph_whose_memory_was_freed_is_found_when_it_is_launched() {
    for is_shareable in [false, true] {
        let rig = Rig::new(watched());
        let allocate = || if is_shareable { rig.shareable(BYTES) } else { rig.allocate(0, BYTES) };
        let block = allocate();
        let graph = rig.captured(rig.stream, || fill(&rig, block, rig.stream));
        rig.launch(graph, rig.stream).unwrap();
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        rig.free(0, block, None).unwrap();
        assert_none(&rig);
        rig.launch(graph, rig.stream).unwrap();
        let race = the_race(&rig);
        assert_eq!((race.kind(), race.first().operation()), (RaceKind::AfterFree, Operation::Free));
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        // Handed out again, it is the next owner's.
        let again = allocate();
        assert_eq!(again, block);
        rig.launch(graph, rig.stream).unwrap();
        assert_eq!(rig.gpu.race_count(), 1);
        rig.gpu.synchronize_stream(rig.stream).unwrap();
    }
}

#[test]
fn a_free_of_shared_memory_meets_the_work_by_its_own_addresses_only() {
    let rig = Rig::new(watched());
    let (block, other) = (rig.shareable(BYTES), rig.stream(0));
    let alias = rig.ipc().open_memory(0, &rig.export(block)).unwrap();
    // An importer may use the memory before, during and after the free.
    fill(&rig, alias, other);
    rig.free(0, block, None).unwrap();
    fill(&rig, alias, other);
    assert_none(&rig);
    rig.gpu.synchronize_stream(other).unwrap();
    let next = rig.shareable(BYTES);
    assert_eq!(next, block, "the test wants the place back");
    fill(&rig, next, rig.stream);
    fill(&rig, alias, other);
    assert_none(&rig);
    // Its own work must be over.
    rig.free(0, next, None).unwrap();
    let race = the_race(&rig);
    assert_eq!((race.kind(), race.second().operation()), (RaceKind::Unordered, Operation::Free));
    rig.gpu.synchronize_device(0).unwrap();
}

#[test]
fn memory_and_events_that_were_opened_here_are_those_that_were_exported() {
    let rig = Rig::new(watched());
    let (other, block, event) = (rig.stream(0), rig.shareable(BYTES), rig.interprocess_event());
    let alias = rig.ipc().open_memory(0, &rig.export(block)).unwrap();
    let opened = rig.open_event_of(&rig, event);
    assert_ne!((alias, opened), (block, event));

    fill(&rig, block, rig.stream);
    rig.gpu.record_event(opened, rig.stream).unwrap();
    rig.gpu.stream_wait_event(other, event).unwrap();
    fill(&rig, alias, other);
    assert_none(&rig);
    fill(&rig, block, rig.stream);
    let race = the_race(&rig);
    assert_eq!((race.first().bytes().address, race.second().bytes().address), (alias.get(), block.get()));
    // Closing memory that is in use by its addresses is found. The other addresses stay valid.
    // SAFETY: the work on the memory is device work, whose contents are not looked at.
    unsafe { rig.ipc().close_memory(0, alias).unwrap() };
    let races = rig.gpu.races();
    let last = races.last().unwrap();
    assert_eq!((races.len(), last.second().operation()), (2, Operation::CloseMemory));
    assert_eq!(last.first().bytes().address, alias.get());
}

#[test]
fn who_waits_for_another_process_that_waited_for_this_one_is_not_blamed() {
    // Two backends stand for two processes: neither sees the other's calls.
    let (here, there) = (Rig::new(watched()), Rig::new(watched()));
    let (written, answered) = (here.interprocess_event(), there.interprocess_event());
    let (written_there, answered_here) = (there.open_event_of(&here, written), here.open_event_of(&there, answered));
    let (block, other) = (here.allocate(0, BYTES), here.stream(0));

    fill(&here, block, here.stream);
    here.gpu.record_event(written, here.stream).unwrap();
    there.gpu.stream_wait_event(there.stream, written_there).unwrap();
    there.gpu.record_event(answered, there.stream).unwrap();
    here.gpu.stream_wait_event(other, answered_here).unwrap();
    fill(&here, block, other);
    assert_none(&here);
    // A record that was never passed on orders nothing.
    fill(&here, block, here.stream);
    assert_eq!(here.gpu.race_count(), 1);
    here.gpu.synchronize_device(0).unwrap();
}

#[test]
fn blocks_of_other_sizes_in_the_same_place_met_what_was_freed_there() {
    let rig = Rig::new(watched());
    for bytes in [300, 10, 600, 1, 257] {
        let block = rig.allocate(0, bytes);
        rig.fill(block, FillPattern::U8(1), bytes, rig.stream).unwrap();
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        rig.free(0, block, None).unwrap();
    }
    assert_none(&rig);
}

#[test]
fn a_wait_for_the_device_did_not_count_for_streams_that_were_gone() {
    let rig = Rig::new(watched());
    for _ in 0..20 {
        let (stream, block) = (rig.stream(0), rig.allocate(0, BYTES));
        fill(&rig, block, stream);
        rig.gpu.destroy_stream(stream).unwrap();
        // Long enough for the worker to end, most times.
        std::thread::sleep(millis(2));
        rig.gpu.synchronize_device(0).unwrap();
        rig.free(0, block, None).unwrap();
    }
    assert_none(&rig);
}

#[test]
fn what_one_thread_waited_for_counts_for_all() {
    let rig = Rig::new(watched());
    let (block, other) = (rig.allocate(0, BYTES), rig.stream(0));
    fill(&rig, block, rig.stream);
    std::thread::scope(|scope| {
        scope.spawn(|| while rig.gpu.query_stream(rig.stream).unwrap() == Completion::Pending {});
    });
    fill(&rig, block, other);
    assert_none(&rig);
    rig.gpu.synchronize_device(0).unwrap();
}

#[test]
fn the_default_streams_of_threads_are_streams_of_their_own() {
    let rig = Rig::new(watched());
    let block = rig.allocate(0, BYTES);
    let tag = rig.gpu.identity().tag;
    let (mine, legacy) = (StreamId::per_thread_default(tag, 0), StreamId::legacy_default(tag, 0));
    fill(&rig, block, mine);
    fill(&rig, block, mine);
    assert_none(&rig);
    fill(&rig, block, legacy);
    let text = the_race(&rig).to_string();
    assert!(text.contains("the default stream of a thread on device 0"), "{text}");
    assert!(text.contains("the legacy default stream of device 0"), "{text}");
    std::thread::scope(|scope| {
        scope.spawn(|| fill(&rig, block, mine));
    });
    assert_eq!(rig.gpu.race_count(), 3, "with the streams of the first thread and of all threads");
    rig.gpu.synchronize_device(0).unwrap();
}

#[test]
fn streams_that_come_and_go_are_told_apart() {
    let rig = Rig::new(watched());
    let block = rig.allocate(0, BYTES);
    for wait in [true, false] {
        for _ in 0..50 {
            let stream = rig.stream(0);
            fill(&rig, block, stream);
            if wait {
                rig.gpu.synchronize_stream(stream).unwrap();
            }
            rig.gpu.destroy_stream(stream).unwrap();
        }
        assert_eq!(rig.gpu.race_count() > 0, !wait);
    }
    // The n-th stream without a wait meets the n - 1 before it.
    assert_eq!(rig.gpu.race_count(), 50 * 49 / 2);
    rig.gpu.synchronize_device(0).unwrap();
}

#[test]
fn a_mock_of_the_environment_tells_its_races_when_it_is_closed() {
    const NAME: &str = "races::a_mock_of_the_environment_tells_its_races_when_it_is_closed";
    const INSIDE: &str = "HW_TEST_TELLS_RACES";
    if std::env::var_os(INSIDE).is_some() {
        let rig = Rig::new(MockOptions::from_environment().unwrap());
        let (block, other) = (rig.allocate(0, BYTES), rig.stream(0));
        fill(&rig, block, rig.stream);
        fill(&rig, block, other);
        return;
    }
    let told = |mock: &str| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", NAME, "--nocapture"]).env(INSIDE, "1").env("HIGHWATER_MOCK", mock);
        let output = command.output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let text = told("race_detector=on");
    assert!(text.contains("highwater-mock: race: nothing orders `fill` and `fill`"), "{text}");
    assert!(text.contains("highwater-mock: race detector: 1 race in 2 operations"), "{text}");
    assert!(text.contains("tests/device/races.rs:"), "{text}");
    assert!(!told("race_detector=off").contains("race"));
}
