//! Graphs that recorded memory of other processes, or memory that others have open.

use highwater_core::ErrorKind;
use highwater_mock::MockOptions;

use crate::Exporter;
use crate::peer::{Peer, until};

/// How many allocations of a process that it has dropped are held by others.
fn limbo(peer: &mut Peer) -> String {
    let statistics = peer.tell("statistics");
    statistics.split_whitespace().find_map(|word| word.strip_prefix("limbo=")).unwrap().to_owned()
}

#[test]
fn an_import_that_a_graph_recorded_keeps_the_exporters_memory_until_the_last_launch_is_done() {
    let importer = Exporter::with(MockOptions::new().with_latency(std::time::Duration::from_millis(2)));
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 1000 9");
    let opened = importer.runtime.open_shared::<u32>(&ticket.parse().unwrap()).unwrap();
    let result = importer.runtime.device(0).unwrap().allocate::<u32>(1000).unwrap();
    let mut graph = importer
        .stream
        .capture(|stream| {
            stream.copy(&opened, &result)?;
            (0..20).try_for_each(|_| stream.fill(&opened, 10))
        })
        .unwrap();
    drop(opened);
    peer.tell("drop a");
    assert_eq!(importer.runtime.statistics().sharing.imports, 1);
    assert_eq!(limbo(&mut peer), "1");
    graph.launch(&importer.stream).unwrap();
    assert_eq!(importer.stream.download(&result).unwrap(), [9; 1000]);
    graph.launch(&importer.stream).unwrap();
    drop(graph);
    // 40 ms of work are queued: nothing was let go of yet.
    assert_eq!(importer.runtime.statistics().sharing.imports, 1);
    until("the exporter has it back", || limbo(&mut peer) == "0");
    assert!(importer.stream.is_complete().unwrap());
    assert_eq!(importer.stream.download(&result).unwrap(), [10; 1000]);
    assert!(peer.quit().success());
    importer.end_after(result);
}

#[test]
fn an_import_dropped_in_a_capture_that_does_not_use_it_is_let_go_of() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 1000 9");
    let opened = importer.runtime.open_shared::<u32>(&ticket.parse().unwrap()).unwrap();
    let other = importer.runtime.device(0).unwrap().allocate::<u32>(1000).unwrap();
    // Its use before the capture is over by the mark of that time; the stream cannot be asked.
    importer.stream.copy(&opened, &other).unwrap();
    peer.tell("drop a");
    let mut graph = importer
        .stream
        .capture(|stream| {
            stream.fill(&other, 3)?;
            drop(opened);
            until("the exporter has it back", || limbo(&mut peer) == "0");
            Ok(())
        })
        .unwrap();
    assert_eq!(importer.stream.download(&other).unwrap(), [9; 1000]);
    graph.launch(&importer.stream).unwrap();
    assert_eq!(importer.stream.download(&other).unwrap(), [3; 1000]);
    drop((graph, other));
    peer.quit();
    importer.end();
}

#[test]
fn shared_memory_that_a_graph_keeps_is_open_to_others_until_the_graph_is_gone() {
    let exporter = Exporter::new();
    let buffer = exporter.make(1000, 5);
    let mut graph = exporter.stream.capture(|stream| stream.fill(&buffer, 6)).unwrap();
    let ticket = buffer.share().unwrap();
    drop(buffer);
    let mut peer = Peer::start();
    // The buffer is gone, its memory is not.
    peer.tell(&format!("open a {ticket}"));
    assert_eq!(peer.tell("read a"), "5");
    graph.launch(&exporter.stream).unwrap();
    exporter.stream.synchronize().unwrap();
    assert_eq!(peer.tell("read a"), "6");
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 0);
    drop(graph);
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 1);
    assert_eq!(exporter.refusal(&ticket), ErrorKind::Expired);
    assert_eq!(peer.tell("read a"), "6");
    peer.tell("drop a");
    until("the memory is back", || exporter.taken() == 0);
    peer.quit();
    exporter.end();
}
