//! Page-locked memory that several processes have as one copy.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use highwater_core::{
    Access, Backend, Capabilities, Error, ErrorKind, HostMemoryOptions, HugePages, Result, Runtime, RuntimeOptions,
    SharedPinnedBuffer, Stream, Ticket,
};
use highwater_mock::{MockGpu, MockOptions, Operation};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags};

use crate::Exporter;
use crate::hostile::{forged, listen, welcome};
use crate::peer::{Peer, until};

const MIB: usize = 1 << 20;

/// Obeys a command about page-locked memory.
pub(crate) fn obey(
    runtime: &Runtime,
    stream: &Stream,
    buffers: &mut std::collections::HashMap<String, SharedPinnedBuffer<u32>>,
    words: &[&str],
) -> Result<String> {
    let unknown = |name: &str| Error::new(ErrorKind::InvalidArgument, "obey", format!("nothing is named {name}"));
    match *words {
        ["pinned-make", name, len, value] => {
            let mut buffer = runtime.pinned_shared::<u32>(len.parse().unwrap())?;
            buffer.write()?.fill(value.parse().unwrap());
            let ticket = buffer.share()?.to_string();
            buffers.insert(name.to_owned(), buffer);
            Ok(ticket)
        }
        ["pinned-open", name, ticket] => {
            let buffer = runtime.open_pinned::<u32>(&ticket.parse::<Ticket>()?)?;
            let len = buffer.len();
            buffers.insert(name.to_owned(), buffer);
            Ok(len.to_string())
        }
        // The one value that the buffer has, for the CPU and for the device.
        ["pinned-read", name] => {
            let buffer = buffers.get(name).ok_or_else(|| unknown(name))?;
            let values = buffer.read()?;
            let on_device = runtime.device(0)?.allocate::<u32>(values.len().min(MIB))?;
            stream.copy_to_device(buffer.slice(0..on_device.len())?, &on_device)?;
            let copied = stream.download(&on_device)?;
            let is_one = values.iter().chain(&copied).all(|value| *value == values[0]);
            Ok(if is_one { values[0].to_string() } else { "several".to_owned() })
        }
        // A copy from the buffer that is still on its way.
        ["pinned-copy", name] => {
            let buffer = buffers.get(name).ok_or_else(|| unknown(name))?;
            let on_device = runtime.device(0)?.allocate::<u32>(buffer.len())?;
            stream.copy_to_device(buffer, &on_device)?;
            Ok("enqueued".to_owned())
        }
        ["pinned-drop", name] => Ok(buffers.remove(name).is_some().to_string()),
        ["pinned-share", name] => Ok(buffers.get(name).ok_or_else(|| unknown(name))?.share()?.to_string()),
        _ => panic!("no such command: {words:?}"),
    }
}

impl Exporter {
    fn make_pinned(&self, len: usize, value: u32) -> (SharedPinnedBuffer<u32>, Ticket) {
        let mut buffer = self.runtime.pinned_shared::<u32>(len).unwrap();
        buffer.write().unwrap().fill(value);
        let ticket = buffer.share().unwrap();
        (buffer, ticket)
    }

    fn copy_of(&self, buffer: &SharedPinnedBuffer<u32>) -> Vec<u32> {
        let on_device = self.runtime.device(0).unwrap().allocate::<u32>(buffer.len()).unwrap();
        self.stream.copy_to_device(buffer, &on_device).unwrap();
        self.stream.download(&on_device).unwrap()
    }

    /// Drops a buffer, and ends once the importers' refusals are known.
    fn end_after_release(self, buffer: SharedPinnedBuffer<u32>) {
        drop(buffer);
        until("no importer holds it", || self.sharing().limbo_blocks == 0);
        self.end();
    }

    fn sharing(&self) -> highwater_core::SharingStatistics {
        self.runtime.statistics().sharing
    }
}

/// The PSS and the RSS, in KiB, of the mappings of a process whose names contain `what`.
fn resident(pid: u32, what: &str) -> (u64, u64) {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut is_in, mut pss, mut rss) = (false, 0, 0);
    let number =
        |line: &str, name: &str| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok();
    for line in smaps.lines() {
        // The first line of each mapping begins with its addresses.
        if line.split_once(' ').is_some_and(|(range, _)| range.contains('-')) {
            is_in = line.contains(what);
        } else if is_in {
            pss += number(line, "Pss:").unwrap_or(0);
            rss += number(line, "Rss:").unwrap_or(0);
        }
    }
    (pss, rss)
}

/// The PSS of a whole process, in KiB.
fn total_pss(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap()
}

#[test]
fn four_processes_have_256_mib_as_one_copy() {
    const KIB: u64 = 256 << 10;
    let mut peers: Vec<_> = (0..4).map(|_| Peer::start()).collect();
    let before: u64 = peers.iter().map(|peer| total_pss(peer.pid())).sum();
    let ticket = peers[0].tell(&format!("pinned-make a {} 7", 256 * MIB / 4));
    for peer in &mut peers[1..] {
        peer.tell(&format!("pinned-open a {ticket}"));
    }
    for peer in &mut peers {
        assert_eq!(peer.tell("pinned-read a"), "7");
    }
    let memory: Vec<_> = peers.iter().map(|peer| resident(peer.pid(), "memfd:highwater-pinned")).collect();
    assert!(memory.iter().all(|(_, rss)| *rss == KIB), "each process has all of it present: {memory:?}");
    let pss: u64 = memory.iter().map(|(pss, _)| pss).sum();
    // Shares of a page are rounded down.
    assert!(pss <= KIB && pss > KIB - 1024, "{memory:?}");
    let more = peers.iter().map(|peer| total_pss(peer.pid())).sum::<u64>() - before;
    println!("4 processes: the PSS of the memory is {pss} KiB, of everything {more} KiB more than before");
    // The device memory of the copies is 4 MiB in each.
    assert!(more < KIB + (64 << 10), "{more} KiB");
    // The maker ends first, then all others but one.
    for peer in peers.drain(..3) {
        peer.kill();
    }
    let last = &mut peers[0];
    assert_eq!(last.tell("pinned-read a"), "7");
    assert_eq!(resident(last.pid(), "memfd:highwater-pinned"), (KIB, KIB), "now it is the only one");
    last.tell("pinned-drop a");
    let pid = last.pid();
    until("it is unmapped", || resident(pid, "memfd:highwater-pinned") == (0, 0));
    peers.remove(0).quit();
}

#[test]
fn a_buffer_is_written_until_it_is_shared_and_read_everywhere_afterwards() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let mut buffer = exporter.runtime.pinned_shared::<u32>(3000).unwrap();
    assert_eq!(buffer.read().unwrap(), [0; 3000]);
    buffer.write().unwrap().fill(1);
    // The device writes it too.
    let on_device = exporter.runtime.device(0).unwrap().allocate::<u32>(1000).unwrap();
    exporter.stream.fill(&on_device, 2_u32).unwrap();
    exporter.stream.copy_to_host(&on_device, buffer.slice_mut(1000..2000).unwrap()).unwrap();
    let expected: Vec<u32> = [1, 2, 1].iter().flat_map(|value| [*value; 1000]).collect();
    assert_eq!(buffer.read().unwrap(), expected);
    assert!(buffer.is_writable() && buffer.as_mut_ptr().is_ok());

    let ticket = buffer.share().unwrap();
    assert!(ticket.is_pinned() && ticket.bytes() == 12_000 && ticket.device_uuid() == [0; 16]);
    let mut opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    for buffer in [&mut buffer, &mut opened] {
        assert!(!buffer.is_writable());
        let errors = [
            buffer.write().map(drop).unwrap_err(),
            buffer.write_with(|_| ()).unwrap_err(),
            buffer.slice_mut(0..1).map(drop).unwrap_err(),
            buffer.as_mut_ptr().map(drop).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidState);
            assert!(error.hint().contains("before its first `share`"), "{error}");
        }
        assert_eq!(buffer.read().unwrap(), expected);
        assert_eq!(buffer.read_with(<[u32]>::to_vec).unwrap(), expected);
    }
    assert_eq!(importer.copy_of(&opened), expected);
    assert_eq!(exporter.copy_of(&buffer), expected);
    // A view, and a ticket that the importer passes on.
    let part = opened.slice(990..1010).unwrap();
    let few = importer.runtime.device(0).unwrap().allocate::<u32>(20).unwrap();
    importer.stream.copy_to_device(part, &few).unwrap();
    assert_eq!(importer.stream.download(&few).unwrap(), expected[990..1010]);
    assert_eq!(opened.share().unwrap(), buffer.share().unwrap());
    // The mapping of the importer is read-only for the kernel.
    let line = |address: usize| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = format!("{address:x}-");
        maps.lines().find(|line| line.starts_with(&start)).unwrap().to_owned()
    };
    assert!(line(opened.ptr().address()).contains(" r--s "), "{}", line(opened.ptr().address()));
    assert!(line(buffer.ptr().address()).contains(" rw-s "));
    drop((few, on_device));
    importer.end_after(opened);
    exporter.end_after(buffer);
}

#[test]
fn an_open_waits_for_the_copies_that_fill_the_buffer() {
    let exporter = Exporter::with(MockOptions::new().with_latency(Duration::from_millis(50)).with_checks());
    let importer = Exporter::new();
    let mut buffer = exporter.runtime.pinned_shared::<u32>(1000).unwrap();
    let on_device = exporter.runtime.device(0).unwrap().allocate::<u32>(1000).unwrap();
    exporter.stream.fill(&on_device, 9_u32).unwrap();
    exporter.stream.copy_to_host(&on_device, buffer.slice_mut(0..1000).unwrap()).unwrap();
    let ticket = buffer.share().unwrap();
    let opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    assert_eq!(opened.read().unwrap(), [9; 1000]);
    // In the exporter's own process too.
    let own = exporter.runtime.open_pinned::<u32>(&ticket).unwrap();
    assert_eq!((own.ptr(), own.read().unwrap()), (buffer.ptr(), &[9; 1000][..]));
    assert_eq!(exporter.gpu.violations(), []);
    drop((own, on_device));
    importer.end_after(opened);
    exporter.end_after(buffer);
}

#[test]
fn memory_is_unregistered_only_after_the_copies_from_it() {
    let slow = || MockOptions::new().with_latency(Duration::from_millis(60)).with_checks();
    let (exporter, importer) = (Exporter::with(slow()), Exporter::with(slow()));
    let (buffer, ticket) = exporter.make_pinned(1000, 3);
    let opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    for (side, buffer) in [(&exporter, buffer), (&importer, opened)] {
        let on_device = side.runtime.device(0).unwrap().allocate::<u32>(1000).unwrap();
        side.stream.copy_to_device(&buffer, &on_device).unwrap();
        let blocks = side.gpu.live_objects().host_allocations;
        drop(buffer);
        assert_eq!(side.gpu.live_objects().host_allocations, blocks, "the copy is on its way");
        assert_eq!(side.stream.download(&on_device).unwrap(), [3; 1000]);
    }
    until("the exporter's is unregistered", || exporter.sharing().pinned_blocks == 0);
    until("the importer's is unregistered", || importer.sharing().pinned_mappings == 0);
    assert_eq!((exporter.gpu.violations(), importer.gpu.violations()), (vec![], vec![]));
    importer.end();
    exporter.end();
}

#[test]
fn counts_and_tickets_are_those_of_device_memory() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let (buffer, ticket) = exporter.make_pinned(5000, 3);
    let whole = 5000_u64 * 4;
    let pages = whole.next_multiple_of(4096);
    let counts = |side: &Exporter| {
        let sharing = side.sharing();
        let exported = (sharing.exported_blocks, sharing.exported_bytes, sharing.pinned_blocks, sharing.pinned_bytes);
        (exported, (sharing.mappings, sharing.mapped_bytes, sharing.pinned_mappings, sharing.pinned_mapped_bytes))
    };
    assert_eq!(counts(&exporter), ((1, whole, 1, pages), (0, 0, 0, 0)));
    let opened = [(); 2].map(|()| importer.runtime.open_pinned::<u32>(&ticket).unwrap());
    assert_eq!(opened[0].ptr(), opened[1].ptr(), "one mapping");
    assert_eq!(counts(&importer), ((0, 0, 0, 0), (1, whole, 1, pages)));
    assert_eq!((importer.sharing().opens, importer.sharing().kept_opens), (2, 1));
    assert_eq!(exporter.sharing().peers, 1);
    // By address too.
    let inside = opened[0].ptr().offset(5000);
    assert_eq!(importer.runtime.pinned_block_of(inside).unwrap().base, opened[0].ptr());
    importer.stream.note_host_use(inside, Access::Read).unwrap();

    // The exporter drops it: in limbo until the importer has released it, and no longer opened by anybody.
    drop(buffer);
    assert_eq!((exporter.sharing().limbo_blocks, exporter.sharing().limbo_bytes), (1, whole));
    assert_eq!((exporter.sharing().pinned_blocks, exporter.sharing().pinned_bytes), (0, 0), "unregistered here");
    let refused = |side: &Exporter| side.runtime.open_pinned::<u32>(&ticket).map(drop).unwrap_err().kind();
    assert_eq!((refused(&importer), refused(&exporter)), (ErrorKind::Expired, ErrorKind::Expired));
    assert_eq!(opened[1].read().unwrap(), [3; 5000], "the importer keeps it");
    drop(opened);
    until("it has left limbo", || exporter.sharing().limbo_blocks == 0 && exporter.sharing().exported_blocks == 0);
    until("it is unmapped", || counts(&importer) == ((0, 0, 0, 0), (0, 0, 0, 0)));

    // A ticket that nobody opened in time.
    let (buffer, ticket) = exporter.make_pinned(10, 1);
    drop(buffer);
    let error = importer.runtime.open_pinned::<u32>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    // Each kind of ticket has its own open.
    let (on_device, of_device) = exporter.make_shared(10, 1);
    let (buffer, ticket) = exporter.make_pinned(10, 1);
    let error = importer.runtime.open_pinned::<u32>(&of_device).map(drop).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.hint().contains("open_shared"), "{error}");
    let error = importer.runtime.open_shared::<u32>(&ticket).map(drop).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.hint().contains("open_pinned"), "{error}");
    let error = importer.runtime.open_pinned::<[u32; 3]>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    drop(on_device);
    importer.end();
    exporter.end_after(buffer);
}

#[test]
fn each_side_survives_the_death_of_the_other() {
    // An importer is killed while it has the memory and copies from it.
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_pinned(MIB, 4);
    let mut peers: Vec<_> = (0..3).map(|_| Peer::start_with("latency=20ms", |_| {})).collect();
    for peer in &mut peers {
        peer.tell(&format!("pinned-open a {ticket}"));
        peer.tell("pinned-copy a");
    }
    drop(buffer);
    assert_eq!(exporter.sharing().limbo_blocks, 1);
    for (place, peer) in peers.into_iter().enumerate() {
        assert_eq!(exporter.sharing().limbo_blocks, 1, "{place} are dead");
        peer.kill();
    }
    until("the last of them is dead", || exporter.sharing().limbo_blocks == 0);
    assert_eq!(exporter.sharing().lost_peers, 3);
    // The exporter is killed.
    let mut peer = Peer::start();
    let ticket: Ticket = peer.tell("pinned-make a 1000 5").parse().unwrap();
    let opened = exporter.runtime.open_pinned::<u32>(&ticket).unwrap();
    peer.kill();
    until("the death is known", || exporter.sharing().lost_exporters == 1);
    assert_eq!((opened.read().unwrap(), exporter.copy_of(&opened)), (&[5; 1000][..], vec![5; 1000]));
    let error = exporter.runtime.open_pinned::<u32>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    drop(opened);
    until("it is unmapped", || exporter.sharing().pinned_mappings == 0);
    exporter.end();
}

#[test]
fn writable_memory_is_written_by_every_process() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let mut buffer = exporter.runtime.pinned_shared::<u32>(1000).unwrap();
    // SAFETY: The two sides access the values in turn.
    let ticket = unsafe { buffer.share_writable() }.unwrap();
    let mut opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    assert!(buffer.is_writable() && opened.is_writable());
    // SAFETY: Inside the buffer, and no other code accesses it now.
    unsafe { opened.as_mut_ptr().unwrap().add(999).write(8) };
    assert_eq!(buffer.read().unwrap()[998..], [0, 8]);
    let on_device = importer.runtime.device(0).unwrap().allocate::<u32>(10).unwrap();
    importer.stream.fill(&on_device, 6_u32).unwrap();
    importer.stream.copy_to_host(&on_device, opened.slice_mut(0..10).unwrap()).unwrap();
    assert_eq!(opened.read().unwrap()[9..11], [6, 0]);
    assert_eq!(buffer.read().unwrap()[9..11], [6, 0]);
    // A plain slice to write would be an alias of what others read.
    for buffer in [&mut buffer, &mut opened] {
        assert_eq!(buffer.write().map(drop).unwrap_err().kind(), ErrorKind::InvalidState);
    }
    // SAFETY: As above.
    assert_eq!(unsafe { opened.share_writable() }.unwrap(), ticket);
    let (read_only, ticket) = exporter.make_pinned(10, 1);
    // SAFETY: It is refused.
    let error = unsafe { read_only.share_writable() }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
    let other = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    // SAFETY: As above.
    assert_eq!(unsafe { other.share_writable() }.unwrap_err().kind(), ErrorKind::InvalidState);
    drop(on_device);
    importer.end_after((opened, other));
    exporter.end_after((buffer, read_only));
}

#[test]
fn devices_that_cannot_register_read_only_memory_share_it_by_agreement() {
    let lacks = |can: &mut Capabilities| can.host_register_read_only = false;
    let options = || MockOptions::new().with_capabilities(lacks);
    let (exporter, importer) = (Exporter::with(options()), Exporter::with(options()));
    let (buffer, ticket) = exporter.make_pinned(1000, 3);
    let mut opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    assert!(!opened.is_writable() && opened.slice_mut(0..1).is_err());
    assert_eq!(importer.copy_of(&opened), [3; 1000]);
    importer.end_after(opened);
    // Sealed memory cannot be registered there, and the refusal names what is missing.
    let able = Exporter::new();
    let (sealed, ticket) = able.make_pinned(1000, 3);
    let importer = Exporter::with(options());
    let error = importer.runtime.open_pinned::<u32>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("host_register_read_only"), "{error}");
    importer.end();
    able.end_after_release(sealed);
    exporter.end_after(buffer);
    // Without registration there is nothing to share.
    for lacks in
        [|can: &mut Capabilities| can.host_register = false, |can: &mut Capabilities| can.register_piece_bytes = 0]
    {
        let unable = Exporter::with(MockOptions::new().with_capabilities(lacks));
        let error = unable.runtime.pinned_shared::<u32>(10).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let able = Exporter::new();
        let (buffer, ticket) = able.make_pinned(1000, 3);
        let error = unable.runtime.open_pinned::<u32>(&ticket).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        unable.end();
        able.end_after_release(buffer);
    }
}

#[test]
fn copies_cross_the_borders_of_registrations_and_sizes_need_not_be_round() {
    let pieces = |can: &mut Capabilities| can.register_piece_bytes = 2 * MIB;
    let options = || MockOptions::new().with_capabilities(pieces);
    let (exporter, importer) = (Exporter::with(options()), Exporter::with(options()));
    let mut buffer = exporter.runtime.pinned_shared::<u32>((5 * MIB + 8) / 4).unwrap();
    let values: Vec<u32> = (0..buffer.len() as u32).collect();
    buffer.write().unwrap().copy_from_slice(&values);
    let ticket = buffer.share().unwrap();
    let opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    for (side, buffer) in [(&exporter, &buffer), (&importer, &opened)] {
        let registrations: Vec<_> = buffer.registrations().collect();
        assert_eq!(registrations, [0..2 * MIB, 2 * MIB..4 * MIB, 4 * MIB..5 * MIB + 8]);
        assert_eq!(side.copy_of(buffer), values);
        let address = buffer.device_address(&side.runtime.device(0).unwrap()).unwrap();
        assert_eq!(address.get(), buffer.ptr().address() as u64);
    }
    // Neither side takes the other's buffer.
    let on_device = importer.runtime.device(0).unwrap().allocate::<u32>(buffer.len()).unwrap();
    let error = importer.stream.copy_to_device(&buffer, &on_device).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidPointer, "{error}");
    drop(on_device);
    importer.end_after(opened);
    for len in [0, 1, 1023, 1024, 1025] {
        let (buffer, ticket) = exporter.make_pinned(len, 1);
        let other = Exporter::new();
        let opened = other.runtime.open_pinned::<u32>(&ticket).unwrap();
        assert_eq!((buffer.len(), opened.len(), opened.read().unwrap()), (len, len, &vec![1; len][..]));
        other.end_after((opened, buffer));
    }
    exporter.end_after(buffer);
}

#[test]
fn graphs_keep_the_memory_and_a_graph_that_writes_it_forbids_a_share() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let mut buffer = exporter.runtime.pinned_shared::<u32>(100).unwrap();
    let on_device = exporter.runtime.device(0).unwrap().allocate::<u32>(100).unwrap();
    exporter.stream.fill(&on_device, 4_u32).unwrap();
    let slice = buffer.slice_mut(0..100).unwrap();
    let mut writes = exporter.stream.capture(|stream| stream.copy_to_host(&on_device, slice)).unwrap();
    let error = buffer.share().unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidState && error.message().contains("a graph writes"), "{error}");
    writes.launch(&exporter.stream).unwrap();
    drop(writes);
    let opened = importer.runtime.open_pinned::<u32>(&buffer.share().unwrap()).unwrap();
    assert_eq!(opened.read().unwrap(), [4; 100]);
    // A graph of the importer keeps what it reads.
    let target = importer.runtime.device(0).unwrap().allocate::<u32>(100).unwrap();
    let mut reads = importer.stream.capture(|stream| stream.copy_to_device(&opened, &target)).unwrap();
    drop((opened, buffer));
    reads.launch(&importer.stream).unwrap();
    assert_eq!(importer.stream.download(&target).unwrap(), [4; 100]);
    assert_eq!((exporter.sharing().limbo_blocks, importer.sharing().pinned_mappings), (1, 1));
    drop(reads);
    until("it is let go of", || (exporter.sharing().limbo_blocks, importer.sharing().pinned_mappings) == (0, 0));
    drop((on_device, target));
    importer.end();
    exporter.end();
}

#[test]
fn the_cap_counts_memory_made_here_and_none_that_was_opened() {
    let open = |cap: usize| {
        let gpu = MockGpu::open(MockOptions::new()).unwrap();
        let options = RuntimeOptions::new().with_host_memory(HostMemoryOptions::new().with_cap_bytes(cap as u64));
        Runtime::with_options(gpu, &options).unwrap()
    };
    let (exporter, importer) = (open(8 * MIB), open(MIB));
    let first = exporter.pinned_shared::<u8>(6 * MIB).unwrap();
    let error = exporter.pinned_shared::<u8>(3 * MIB).map(drop).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::InvalidArgument), "{error}");
    let error = exporter.pinned::<u8>(3 * MIB).map(drop).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::InvalidArgument), "{error}");
    // Idle memory of the pool makes way.
    drop(exporter.pinned::<u8>(2 * MIB).unwrap());
    let second = exporter.pinned_shared::<u8>(2 * MIB).unwrap();
    let opened = importer.open_pinned::<u8>(&first.share().unwrap()).unwrap();
    assert_eq!(importer.statistics().sharing.pinned_mapped_bytes, 6 << 20);
    drop((first, second, opened));
    assert_eq!(importer.close().unwrap().total(), 0);
    assert_eq!(exporter.close().unwrap().total(), 0);
}

#[test]
fn reserved_huge_pages_that_are_missing_are_replaced() {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let host = HostMemoryOptions::new().with_huge_pages(HugePages::Reserved);
    let runtime = Runtime::with_options(gpu, &RuntimeOptions::new().with_host_memory(host)).unwrap();
    let importer = Exporter::new();
    let mut buffer = runtime.device(0).unwrap().pinned_shared::<u32>(3 * MIB / 4).unwrap();
    buffer.write().unwrap().fill(2);
    let opened = importer.runtime.open_pinned::<u32>(&buffer.share().unwrap()).unwrap();
    assert_eq!(importer.copy_of(&opened), vec![2; 3 * MIB / 4]);
    importer.end_after((opened, buffer));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_child_inherits_neither_the_memory_nor_its_descriptor() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_pinned(MIB, 4);
    let importer = Exporter::new();
    let opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    // A child that lives on, as another program.
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let names = |folder: &str| std::fs::read_dir(format!("/proc/{}/{folder}", child.id())).unwrap().flatten();
    let links = names("fd").filter_map(|entry| std::fs::read_link(entry.path()).ok());
    assert!(links.into_iter().all(|link| !link.to_string_lossy().contains("highwater-pinned")));
    child.kill().unwrap();
    child.wait().unwrap();
    // A child of `fork` has no mapping of it.
    // SAFETY: The child only looks at files, with calls that need no lock of another thread, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: Ends the child at the signal of its parent.
        unsafe {
            libc::pause();
            libc::_exit(0);
        }
    }
    let memory = resident(u32::try_from(pid).unwrap(), "memfd:highwater-pinned");
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
    assert_eq!(memory, (0, 0));
    importer.end_after(opened);
    exporter.end_after(buffer);
}

// -------------------------------------------------------------------------------------------------- hostile exporters

fn file(bytes: usize, seals: SealFlags) -> OwnedFd {
    let file = rustix::fs::memfd_create("highwater-pinned", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, bytes as u64).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Answers one importer as the exporter of a ticket, with this file as the memory.
fn answer(listener: &OwnedFd, ticket: &Ticket, access: u8, memory: &OwnedFd) {
    let receive = |socket: &OwnedFd| {
        let mut bytes = [0_u8; 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::empty());
        control.drain().for_each(drop);
        received.map(|received| bytes[..received.bytes].to_vec()).unwrap_or_default()
    };
    let socket = rustix::net::accept_with(listener, SocketFlags::CLOEXEC).unwrap();
    assert_eq!(receive(&socket)[4], 1, "a greeting");
    let bytes = ticket.to_bytes();
    rustix::net::send(&socket, &welcome(&bytes[32..48], false), SendFlags::NOSIGNAL).unwrap();
    let open = receive(&socket);
    assert_eq!(open[4], 3, "a request");
    let mut payload = [0_u8; 64];
    payload[..5].copy_from_slice(&[b'H', b'W', b'P', b'L', access]);
    let opened = [
        &b"HWSH\x04\0\0\0"[..],
        &open[8..12],
        &1_u32.to_le_bytes(),
        &[0; 16],
        &bytes[88..96],
        &payload,
        &1_u32.to_le_bytes(),
    ]
    .concat();
    let counts = file(2 * MIB, SealFlags::SHRINK);
    let files = [memory.as_fd(), counts.as_fd(), counts.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    rustix::net::sendmsg(&socket, &[IoSlice::new(&opened)], &mut control, SendFlags::NOSIGNAL).unwrap();
    // Until the importer hangs up.
    while !receive(&socket).is_empty() {}
}

#[test]
fn files_that_are_not_safe_to_map_are_refused() {
    let size = SealFlags::SHRINK | SealFlags::GROW;
    let all = size | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    let pipe = || OwnedFd::from(std::io::pipe().unwrap().0);
    let regular = || std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into();
    let bytes = 3 * 4096_usize;
    // Access 1 is read-only, 2 by agreement, 3 writable.
    let cases: [(&str, u8, OwnedFd, Option<&str>); 12] = [
        ("as it should be", 1, file(bytes, all), None),
        ("as it should be, by agreement", 2, file(bytes, size | SealFlags::SEAL), None),
        ("in huge pages", 1, file(2 * MIB, all), None),
        ("unsealed", 1, file(bytes, SealFlags::empty()), Some("size is not sealed")),
        (
            "it can shrink",
            1,
            file(bytes, SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL),
            Some("size is not sealed"),
        ),
        ("more seals can follow", 2, file(bytes, size), Some("size is not sealed")),
        ("it can be written", 1, file(bytes, size | SealFlags::SEAL), Some("not sealed against writes")),
        ("truncated", 1, file(4096, all), Some("a file of 4096 bytes")),
        ("far too large", 1, file(1 << 40, all), Some("a file of 1099511627776 bytes")),
        ("a pipe", 1, pipe(), Some("no file in memory")),
        ("a file of a disk", 1, regular(), Some("no file in memory")),
        ("unknown access", 9, file(bytes, all), Some("not page-locked memory")),
    ];
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_pinned(bytes / 4 - 7, 1);
    for (number, (what, access, memory, refusal)) in cases.into_iter().enumerate() {
        let importer = Exporter::new();
        // A name of its own.
        let ticket = forged(&ticket, |bytes| bytes[32] ^= number as u8 + 1);
        let listener = listen(&ticket);
        let runtime = importer.runtime.clone();
        let answering = std::thread::spawn({
            let ticket = ticket.clone();
            move || answer(&listener, &ticket, access, &memory)
        });
        match (runtime.open_pinned::<u32>(&ticket), refusal) {
            (Ok(opened), None) => assert_eq!(opened.read().unwrap(), vec![0; bytes / 4 - 7], "{what}"),
            (Err(error), Some(refusal)) => {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{what}: {error}");
                assert!(error.message().contains(refusal) && !error.hint().is_empty(), "{what}: {error}");
                assert_eq!(importer.sharing().pinned_mappings, 0, "{what}");
                assert_eq!(importer.gpu.live_objects().host_allocations, 0, "{what}");
            }
            (opened, _) => panic!("{what}: {opened:?}"),
        }
        drop(runtime);
        importer.end();
        answering.join().unwrap();
    }
    exporter.end_after(buffer);
}

#[test]
fn an_importer_cannot_change_what_others_read() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_pinned(MIB, 4);
    let importer = Exporter::new();
    let opened = importer.runtime.open_pinned::<u32>(&ticket).unwrap();
    // What a process that has the descriptor can try. This process has it, as the exporter.
    let descriptor = std::fs::read_dir("/proc/self/fd").unwrap().flatten().find(|entry| {
        let inode = |path: &std::path::Path| {
            std::fs::metadata(path).ok().map(|data| std::os::unix::fs::MetadataExt::ino(&data))
        };
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = format!("{:x}-", buffer.ptr().address());
        let mapped = maps.lines().find(|line| line.starts_with(&start)).unwrap().to_owned();
        inode(&entry.path()).is_some_and(|inode| mapped.split_whitespace().nth(4) == Some(&inode.to_string()))
    });
    let descriptor: i32 = descriptor.unwrap().file_name().to_str().unwrap().parse().unwrap();
    // SAFETY: The runtime keeps it open, and no thread closes it meanwhile.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
    assert!(rustix::io::pwrite(file, &[9; 4096], 0).is_err());
    assert!(rustix::fs::ftruncate(file, 0).is_err() && rustix::fs::ftruncate(file, 1 << 30).is_err());
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(file, hole, 0, 4096).is_err());
    // SAFETY: A new mapping at an address that the kernel chooses, if any.
    let mapped = unsafe {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
    };
    assert!(mapped.is_err(), "it can be mapped for writing");
    assert_eq!(opened.read().unwrap(), vec![4; MIB]);
    importer.end_after(opened);
    exporter.end_after(buffer);
}

// ------------------------------------------------------------------------------------------------------------ faults

/// Makes, fills, shares, opens, copies and drops, whatever is refused. Returns the errors.
fn round(exporter: &Exporter, importer: &Exporter, tag: u32) -> Vec<Error> {
    let mut errors = Vec::new();
    let mut note = |error: Error| {
        assert!(!error.message().is_empty(), "{error:?}");
        errors.push(error);
    };
    let made = exporter.runtime.pinned_shared::<u32>(3 * MIB / 4);
    let Ok(mut buffer) = made.map_err(&mut note) else { return errors };
    if let Ok(values) = buffer.write().map_err(&mut note) {
        values.fill(tag);
    }
    let Ok(ticket) = buffer.share().map_err(&mut note) else { return errors };
    if let Ok(opened) = importer.runtime.open_pinned::<u32>(&ticket).map_err(&mut note) {
        assert_eq!(opened.read().unwrap(), vec![tag; 3 * MIB / 4]);
        let copied = || {
            let on_device = importer.runtime.device(0)?.allocate::<u32>(opened.len())?;
            importer.stream.copy_to_device(&opened, &on_device)?;
            importer.stream.download(&on_device)
        };
        match copied() {
            Ok(values) => assert_eq!(values, vec![tag; 3 * MIB / 4]),
            Err(error) => note(error),
        }
        drop(buffer);
        assert_eq!(opened.read().unwrap(), vec![tag; 3 * MIB / 4], "freed under the importer");
    }
    errors
}

#[test]
fn a_call_that_fails_leaves_nothing_behind() {
    // Two registrations for each buffer.
    let pieces = |can: &mut Capabilities| can.register_piece_bytes = 2 * MIB;
    for operation in [Operation::HostRegister, Operation::HostUnregister, Operation::RecordEvent, Operation::QueryEvent]
    {
        for nth in 1..=6 {
            let options = || MockOptions::new().with_capabilities(pieces).with_latency(Duration::from_micros(100));
            let (exporter, importer) = (Exporter::with(options()), Exporter::with(options()));
            for side in [&exporter, &importer] {
                side.gpu.fail_call(operation, nth, ErrorKind::Vendor).unwrap();
            }
            let mut errors = Vec::new();
            for tag in 0..6 {
                errors.extend(round(&exporter, &importer, tag));
                until("it is settled", || importer.sharing().imports == 0);
            }
            let faults = exporter.gpu.faults(operation) + importer.gpu.faults(operation);
            assert!(faults > 0 || operation == Operation::QueryEvent, "{operation} {nth}");
            if operation == Operation::HostRegister {
                assert_eq!(errors.len() as u64, faults, "{operation} {nth}: {errors:?}");
            }
            if operation == Operation::HostUnregister {
                let counted = |side: &Exporter| side.runtime.statistics().failed_releases;
                assert_eq!(counted(&exporter) + counted(&importer), faults, "{operation} {nth}");
            }
            assert!(round(&exporter, &importer, 7).is_empty(), "{operation} {nth}");
            // What was refused is released by a trim.
            until("all is released", || {
                exporter.runtime.trim().unwrap();
                importer.runtime.trim().unwrap();
                let (made, opened) = (exporter.sharing(), importer.sharing());
                (made.pinned_blocks, made.limbo_blocks, opened.pinned_mappings) == (0, 0, 0)
            });
            let left =
                |side: &Exporter| side.gpu.live_objects().host_allocations - side.runtime.statistics().host.pieces;
            assert_eq!((left(&exporter), left(&importer)), (0, 0), "{operation} {nth}");
            importer.end();
            exporter.end();
        }
    }
}

#[test]
fn what_was_never_released_is_released_by_the_end_of_the_runtime() {
    let exporter = Exporter::with(MockOptions::new().with_latency(Duration::from_millis(50)));
    let (buffer, ticket) = exporter.make_pinned(1000, 1);
    exporter.gpu.fail_call(Operation::HostUnregister, 1, ErrorKind::Vendor).unwrap();
    drop(buffer);
    assert_eq!(exporter.sharing().pinned_blocks, 1, "refused");
    assert_eq!(exporter.runtime.open_pinned::<u32>(&ticket).map(drop).unwrap_err().kind(), ErrorKind::Expired);
    exporter.end();
    // Dropped inside a capture, in which nothing is unregistered. The runtime shares nothing, so it has no thread that would
    // unregister the memory at once.
    let exporter = Exporter::with(MockOptions::new());
    let buffer = exporter.runtime.pinned_shared::<u32>(1000).unwrap();
    let registered = exporter.gpu.calls(Operation::HostUnregister);
    let dropped = exporter.stream.capture(|_| {
        drop(buffer);
        assert_eq!(exporter.gpu.calls(Operation::HostUnregister), registered);
        Ok(())
    });
    drop(dropped.unwrap());
    exporter.end();
}
