//! What sharing promises while everybody lives.

use std::time::Duration;

use highwater_core::{ErrorKind, Runtime, Ticket};
use highwater_mock::{MockGpu, MockOptions};

use crate::Exporter;
use crate::peer::{Peer, mapped_inodes, until};

#[test]
fn what_one_writes_the_other_reads_both_ways() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(10_000, 7);
    let mut peer = Peer::start();
    assert_eq!(peer.tell(&format!("open a {ticket}")), "10000");
    assert_eq!(peer.tell("read a"), "7");
    peer.tell("fill a 8 1");
    assert_eq!(peer.tell("read a"), "8");
    assert_eq!(exporter.stream.download(&buffer).unwrap(), vec![8; 10_000]);
    exporter.stream.fill(&buffer, 9_u32).unwrap();
    exporter.stream.synchronize().unwrap();
    assert_eq!(peer.tell("read a"), "9");
    // One memory, not two that are kept equal: the other process maps the very file that this one does.
    let theirs = peer.tell("mapped-inodes");
    let ours = mapped_inodes();
    assert!(theirs.split(',').any(|inode| ours.iter().any(|own| own == inode)), "{theirs} in {ours:?}");
    assert!(peer.quit().success());
    exporter.end_after(buffer);
}

#[test]
fn work_before_the_share_is_done_when_it_is_open() {
    let slow = MockOptions::new().with_latency(std::time::Duration::from_millis(3));
    let exporter = Exporter::with(slow);
    let mut peer = Peer::start();
    let buffer = exporter.make(1000, 0);
    for value in 1..=20 {
        (0..5).for_each(|_| exporter.stream.fill(&buffer, value).unwrap());
        let ticket = buffer.share().unwrap();
        peer.tell(&format!("open a {ticket}"));
        assert_eq!(peer.tell("read a"), value.to_string());
        peer.tell("drop a");
    }
    peer.quit();
    exporter.end_after(buffer);
}

#[test]
fn a_buffer_that_others_hold_waits_in_limbo_and_comes_back_by_itself() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(100_000, 5);
    let mut peers = [Peer::start(), Peer::start(), Peer::start()];
    for peer in &mut peers {
        peer.tell(&format!("open a {ticket}"));
        peer.tell(&format!("open a {ticket}"));
    }
    drop(buffer);
    let limbo = exporter.runtime.statistics().sharing;
    assert_eq!((limbo.limbo_blocks, limbo.limbo_bytes), (1, 400_000));
    // What is allocated meanwhile is somewhere else.
    let others: Vec<_> = (0..10).map(|_| exporter.make(100_000, 6)).collect();
    for peer in &mut peers {
        assert_eq!(peer.tell("read a"), "5");
        peer.tell("drop a");
    }
    exporter.runtime.trim_shared().unwrap();
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 1);
    let error = peers[0].ask(&format!("open b {ticket}"));
    assert!(error.starts_with("error Expired"), "{error}");
    for peer in &mut peers {
        assert_eq!(peer.tell("read a"), "5");
        peer.tell("drop a");
    }
    // No call is made: the service detects the last release.
    until("the memory is back", || exporter.runtime.statistics().sharing.limbo_blocks == 0);
    drop(others);
    exporter.stream.synchronize().unwrap();
    until("all memory is back", || exporter.taken() == 0);
    for peer in peers {
        assert!(peer.quit().success());
    }
    exporter.end();
}

#[test]
fn one_ticket_opens_often_and_the_mapping_is_kept_until_the_exporter_frees() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(64, 1);
    let mut peer = Peer::start();
    for _ in 0..50 {
        peer.tell(&format!("open a {ticket}"));
        peer.tell("drop a");
    }
    (0..50).for_each(|_| drop(peer.tell(&format!("open a {}", buffer.share().unwrap()))));
    let statistics = peer.tell("statistics");
    assert!(statistics.starts_with("imports=50 mappings=1 opens=100 kept=99"), "{statistics}");
    (0..50).for_each(|_| drop(peer.tell("drop a")));
    until("all are let go of", || peer.tell("statistics").starts_with("imports=0 mappings=1"));
    drop(buffer);
    until("it is unmapped over there", || peer.tell("statistics").starts_with("imports=0 mappings=0"));
    until("the memory is back", || exporter.taken() == 0);
    peer.quit();
    exporter.end();
}

#[test]
fn trim_unmaps_what_nobody_has_open_and_it_can_be_opened_again() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(64, 1);
    let mut peer = Peer::start();
    for _ in 0..3 {
        peer.tell(&format!("open a {ticket}"));
        peer.tell("trim");
        assert!(peer.tell("statistics").starts_with("imports=1 mappings=1"));
        peer.tell("drop a");
        until("the trim unmaps it", || {
            peer.tell("trim");
            peer.tell("statistics").starts_with("imports=0 mappings=0")
        });
    }
    drop(buffer);
    peer.quit();
    exporter.end();
}

#[test]
fn a_ticket_of_this_runtime_opens_the_original() {
    let exporter = Exporter::new();
    let buffer = exporter.make(100, 4);
    let opened = exporter.runtime.open_shared::<u32>(&buffer.slice(10..60).unwrap().share().unwrap()).unwrap();
    assert_eq!(opened.len(), 50);
    assert_eq!(opened.ptr().get(), buffer.ptr().get() + 40);
    assert_eq!(exporter.runtime.statistics().sharing.mappings, 0);
    // It keeps the memory like any other reference.
    let ticket = buffer.share().unwrap();
    drop(buffer);
    assert_eq!(exporter.stream.download(&opened).unwrap(), vec![4; 50]);
    drop(opened);
    assert_eq!(exporter.refusal(&ticket), ErrorKind::Expired);
    exporter.end();
}

#[test]
fn another_runtime_of_this_process_is_a_peer_like_any_other() {
    let exporter = Exporter::new();
    let other = Exporter::new();
    let buffer = exporter.make(5000, 3);
    let opened = other.runtime.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    assert_eq!(other.stream.download(&opened).unwrap(), vec![3; 5000]);
    drop(buffer);
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 1);
    other.stream.fill(&opened, 2_u32).unwrap();
    drop(opened);
    until("it comes back", || exporter.runtime.statistics().sharing.limbo_blocks == 0);
    other.end();
    exporter.end();
}

#[test]
fn an_import_can_be_shared_on() {
    let exporter = Exporter::new();
    let buffer = exporter.make(5000, 3);
    let (mut first, mut second) = (Peer::start(), Peer::start());
    first.tell(&format!("open a {}", buffer.share().unwrap()));
    first.tell("fill a 11 3");
    let ticket = first.tell("share a");
    second.tell(&format!("open a {ticket}"));
    assert_eq!(second.tell("read a"), "11");
    // The second holds it from the exporter, not from the first.
    first.kill();
    drop(buffer);
    assert_eq!(second.tell("read a"), "11");
    assert!(second.quit().success());
    exporter.end_once_all_is_back();
}

#[test]
fn importers_of_parts_see_their_parts() {
    let exporter = Exporter::new();
    let buffer = exporter.stream.upload(&[0_u32; 4]).unwrap();
    assert_eq!(buffer.share().unwrap_err().kind(), ErrorKind::InvalidArgument);
    let shared = exporter.make(300, 1);
    exporter.stream.fill(shared.slice(100..200).unwrap(), 2_u32).unwrap();
    let mut peer = Peer::start();
    peer.tell(&format!("open middle {}", shared.slice(100..200).unwrap().share().unwrap()));
    peer.tell(&format!("open end {}", shared.slice(200..300).unwrap().share().unwrap()));
    assert_eq!(peer.tell("read middle"), "2");
    assert_eq!(peer.tell("read end"), "1");
    // Values of four bytes do not start in the middle of another, nor is three and a half of them a buffer.
    let bytes = exporter.runtime.device(0).unwrap().allocate_shared::<u8>(64).unwrap();
    for range in [1..9, 0..7] {
        let answer = peer.ask(&format!("open odd {}", bytes.slice(range).unwrap().share().unwrap()));
        assert!(answer.starts_with("error InvalidArgument"), "{answer}");
    }
    peer.quit();
    exporter.end_after((buffer, shared, bytes));
}

#[test]
fn a_runtime_does_not_close_while_others_have_its_memory() {
    let exporter = Exporter::new();
    let buffer = exporter.make(1000, 6);
    let mut peer = Peer::with_open(&buffer.share().unwrap());
    drop(buffer);
    let again = exporter.runtime.clone();
    drop(exporter.stream);
    let error = exporter.runtime.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState);
    assert!(error.message().contains(&peer.pid().to_string()), "{error}");
    assert_eq!(peer.tell("read a"), "6");
    peer.quit();
    let live = again.close().unwrap();
    assert_eq!(live.total(), 0, "{live:?}");
}

#[test]
fn a_device_that_shares_nothing_says_so() {
    let options = MockOptions::new().with_capabilities(|can| {
        can.shareable_memory = false;
        can.ipc_transports = highwater_core::Transports::NONE;
    });
    let runtime = Runtime::new(MockGpu::open(options).unwrap()).unwrap();
    let error = runtime.device(0).unwrap().allocate_shared::<u8>(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    // And opens nothing.
    let exporter = Exporter::new();
    let buffer = exporter.make(10, 1);
    let error = runtime.open_shared::<u32>(&buffer.share().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn many_allocations_are_shared_and_come_back() {
    let exporter = Exporter::with(MockOptions::new().with_memory_bytes(1 << 30));
    let mut peer = Peer::start_with("memory=1GiB", |_| {});
    let buffers: Vec<_> = (0..300).map(|value| exporter.make(16, value)).collect();
    for (value, buffer) in buffers.iter().enumerate() {
        peer.tell(&format!("open b{value} {}", buffer.share().unwrap()));
        assert_eq!(peer.tell(&format!("read b{value}")), value.to_string());
    }
    drop(buffers);
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 300);
    (0..150).for_each(|value| drop(peer.tell(&format!("drop b{value}"))));
    until("half of them is back", || exporter.runtime.statistics().sharing.limbo_blocks == 150);
    assert_eq!(peer.tell("read b200"), "200");
    peer.quit();
    exporter.end_once_all_is_back();
}

#[test]
fn tickets_are_text_and_bytes() {
    let exporter = Exporter::new();
    let ticket = exporter.make(10, 1).share().unwrap();
    assert_eq!(Ticket::from_bytes(&ticket.to_bytes()).unwrap(), ticket);
    assert_eq!(ticket.bytes(), 40);
    assert_eq!(ticket.exporter_pid(), std::process::id());
    exporter.end();
}

#[test]
fn a_drop_after_an_open_is_known_at_once() {
    let exporter = Exporter::new();
    let (first, second) = (Exporter::new(), Exporter::new());
    for value in 0..500 {
        let (buffer, ticket) = exporter.make_shared(1, value);
        let opened = first.runtime.open_shared::<u32>(&ticket).unwrap();
        drop(buffer);
        assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 1, "in round {value}");
        assert_eq!(second.refusal(&ticket), ErrorKind::Expired);
        drop(opened);
        until("it comes back", || exporter.runtime.statistics().sharing.limbo_blocks == 0);
    }
    first.end();
    second.end();
    exporter.end();
}

#[test]
fn a_collect_beside_the_service_loses_no_release() {
    let exporter = Exporter::new();
    let importer = Exporter::with(MockOptions::new().with_latency(Duration::from_micros(300)));
    let (buffer, ticket) = exporter.make_shared(10, 1);
    for _ in 0..300 {
        let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
        importer.stream.fill(&opened, 2_u32).unwrap();
        drop(opened);
        for _ in 0..8 {
            importer.runtime.trim_shared().unwrap();
        }
        // From here on only the service processes it.
        until("it is let go of", || importer.runtime.statistics().sharing.imports == 0);
    }
    importer.end_after(buffer);
    exporter.end();
}

#[test]
fn an_open_beside_a_trim_and_another_open_got_the_mapping_that_was_gone() {
    const THREADS: u32 = 12;
    let exporter = Exporter::new();
    let importer = Exporter::with(MockOptions::new().with_checks());
    let (buffer, ticket) = exporter.make_shared(10, 1);
    std::thread::scope(|scope| {
        let openers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..30_000 {
                        let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
                        assert!(importer.runtime.block_of(opened.ptr()).is_some(), "it is not mapped");
                    }
                })
            })
            .collect();
        while openers.iter().any(|opener| !opener.is_finished()) {
            importer.runtime.trim().unwrap();
        }
    });
    assert_eq!(importer.gpu.violations(), []);
    importer.end_after(buffer);
    exporter.end();
}
