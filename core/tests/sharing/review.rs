//! Mistakes that a review of the code found, one test each.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use highwater_core::{Backend, DeviceBuffer, Error, ErrorKind, Ticket, Transport};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::Exporter;
use crate::hostile::{connect, forged, listen, welcome};
use crate::peer::{Peer, until};

/// What `work` gives, which must not take for ever.
#[track_caller]
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    std::thread::spawn(move || drop(sender.send(work())));
    receiver.recv_timeout(Duration::from_secs(15)).expect("an end within 15 seconds")
}

#[track_caller]
fn kind_of(opened: Result<DeviceBuffer<u32>, Error>) -> ErrorKind {
    opened.map(drop).unwrap_err().kind()
}

fn put(at: usize, number: u64) -> impl Fn(&mut [u8]) {
    move |bytes: &mut [u8]| bytes[at..at + 8].copy_from_slice(&number.to_le_bytes())
}

// -------------------------------------------------------------------- tickets

#[test]
fn a_forged_range_is_refused_also_where_the_allocation_is_known_already() {
    let (exporter, other) = (Exporter::new(), Exporter::new());
    let (buffer, ticket) = exporter.make_shared(1000, 1);
    let opened = other.runtime.open_shared::<u32>(&ticket).unwrap();
    // Far behind the end of the allocation, and with a checksum that fits.
    let far = forged(&ticket, |bytes| {
        put(88, 1 << 40)(bytes);
        put(96, 1 << 30)(bytes);
    });
    for runtime in [&exporter.runtime, &other.runtime] {
        assert_eq!(kind_of(runtime.open_shared(&far)), ErrorKind::InvalidArgument);
    }
    let elsewhere = forged(&ticket, |bytes| bytes[68] ^= 1);
    assert_eq!(other.refusal(&elsewhere), ErrorKind::Expired);
    other.end_after((opened, buffer));
    exporter.end();
}

#[test]
fn a_number_from_the_future_of_this_runtime_is_not_waited_for() {
    let exporter = Exporter::new();
    let buffer = exporter.make(1000, 1);
    let ticket = forged(&buffer.share().unwrap(), put(80, 99));
    let runtime = exporter.runtime.clone();
    let kind = in_time(move || kind_of(runtime.open_shared(&ticket)));
    assert_eq!(kind, ErrorKind::InvalidArgument);
    exporter.end_after(buffer);
}

// -------------------------------------------------------------------- early frees

#[test]
fn an_importer_that_is_cut_off_while_it_keeps_a_mapping_is_not_forgotten() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(50_000, 5);
    let mut peer = Peer::with_open(&ticket);
    peer.tell("drop a");
    assert!(peer.tell("statistics").starts_with("imports=0 mappings=1"));
    assert_ne!(peer.tell("cut-sockets"), "0");
    // Time for the exporter to notice the cut.
    std::thread::sleep(Duration::from_millis(50));
    exporter.runtime.trim_shared().unwrap();
    // By the mapping that it kept, without a word to the exporter.
    peer.tell(&format!("open a {ticket}"));
    drop(buffer);
    assert_eq!(exporter.runtime.statistics().sharing.limbo_blocks, 1);
    let others: Vec<_> = (0..20).map(|_| exporter.make(50_000, 6)).collect();
    assert_eq!(peer.tell("read a"), "5");
    // No process can ring any more. The release is detected nevertheless, while the importer lives.
    peer.tell("drop a");
    until("it comes back", || exporter.runtime.statistics().sharing.limbo_blocks == 0);
    // And it finds its way back.
    peer.tell(&format!("open b {}", others[0].share().unwrap()));
    assert_eq!(peer.tell("read b"), "6");
    peer.quit();
    drop(others);
    exporter.end_once_all_is_back();
}

// -------------------------------------------------------------------- the service

#[test]
fn closing_and_sharing_at_once_does_not_hang() {
    let exporter = Exporter::new();
    let buffer = exporter.make(1000, 5);
    let runtime = exporter.runtime.clone();
    in_time(move || {
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| {
                for _ in 0..3000 {
                    assert_eq!(runtime.clone().close().unwrap_err().kind(), ErrorKind::InvalidState);
                }
            });
            while !closing.is_finished() {
                buffer.share().unwrap();
            }
        });
    });
    exporter.end();
}

#[test]
fn who_drops_a_runtime_gives_everything_back_before_the_drop_returns() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 5);
    for round in 0..300 {
        let Exporter { gpu, runtime, stream, .. } = Exporter::new();
        let opened = runtime.open_shared::<u32>(&ticket).unwrap();
        stream.fill(&opened, 5_u32).unwrap();
        // Wakes the service, which refers to the runtime for a moment.
        drop(opened);
        drop(stream);
        drop(runtime);
        assert_eq!(gpu.live_objects().total(), 0, "round {round}");
    }
    exporter.end_after(buffer);
}

#[test]
fn a_runtime_whose_device_is_lost_stops_to_listen_when_it_ends() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(10, 1);
    assert!(connect(&ticket).is_ok());
    exporter.gpu.lose_device(0).unwrap();
    drop((buffer, exporter));
    assert!(connect(&ticket).is_err(), "somebody listens for importers of the ticket");
}

/// A process that inherits every socket of this one, until this is dropped.
struct Heir(Child);

impl Drop for Heir {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn heir() -> Heir {
    let mut command = Command::new("sleep");
    command.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut sockets: Vec<OwnedFd> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.to_string_lossy().starts_with("socket:") {
            let number = entry.file_name().to_str().unwrap().parse::<i32>().unwrap();
            // SAFETY: the call takes a number and touches no memory. A number that another test has closed is an error.
            let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
            if copy >= 0 {
                // SAFETY: the descriptor is new, and no other code has it.
                sockets.push(unsafe { OwnedFd::from_raw_fd(copy) });
            }
        }
    }
    // The child inherits the copies. Another test may close an original, and the number may become that of a socket on which the spawn of a
    // process waits.
    let numbers: Vec<i32> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: between fork and exec the child only makes system calls.
    unsafe {
        command.pre_exec(move || {
            for number in &numbers {
                libc::fcntl(*number, libc::F_SETFD, 0);
            }
            Ok(())
        });
    }
    let child = command.spawn().unwrap();
    drop(sockets);
    Heir(child)
}

#[test]
fn a_runtime_that_ends_is_gone_for_its_peers_although_an_heir_keeps_its_sockets() {
    let (exporter, other, late, watching) = (Exporter::new(), Exporter::new(), Exporter::new(), Exporter::new());
    let (first, second) = (exporter.make(1000, 5), exporter.make(1000, 6));
    let kept = watching.make(10, 1);
    let tickets = [first.share().unwrap(), second.share().unwrap()];
    drop(other.runtime.open_shared::<u32>(&tickets[0]).unwrap());
    drop(exporter.runtime.open_shared::<u32>(&kept.share().unwrap()).unwrap());
    assert_eq!(watching.runtime.statistics().sharing.peers, 1);
    let heir = heir();
    exporter.end_after((first, second));
    let (runtimes, ticket) = ([other.runtime.clone(), late.runtime.clone()], tickets[1].clone());
    let kinds = in_time(move || runtimes.map(|runtime| kind_of(runtime.open_shared(&ticket))));
    assert_eq!(kinds, [ErrorKind::Expired; 2]);
    until("its exporter has forgotten it", || watching.runtime.statistics().sharing.peers == 0);
    drop(heir);
}

#[test]
fn an_exporter_that_is_behind_with_reading_is_waited_for() {
    let importer = Exporter::new();
    let mut exporter = Peer::start();
    let tickets: Vec<Ticket> = (0..700).map(|n| exporter.tell(&format!("make b{n} 4 {n}")).parse().unwrap()).collect();
    let last: Ticket = exporter.tell("make last 4 1").parse().unwrap();
    let opened: Vec<_> = tickets.iter().map(|ticket| importer.runtime.open_shared::<u32>(ticket).unwrap()).collect();
    (0..700).for_each(|n| drop(exporter.tell(&format!("drop b{n}"))));
    let signal = |name: &str| {
        let pid = exporter.pid().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    };
    signal("-STOP");
    // Each one rings, more often than a socket holds.
    drop(opened);
    let runtime = importer.runtime.clone();
    let opening = std::thread::spawn(move || runtime.open_shared::<u32>(&last).map(drop));
    std::thread::sleep(Duration::from_millis(50));
    signal("-CONT");
    opening.join().unwrap().unwrap();
    exporter.quit();
    importer.end();
}

// -------------------------------------------------------------------- hostile exporters

const MAPPED: u64 = 1 << 62;
const CLOSED: u64 = 1 << 63;

/// A process of the same user that speaks the protocol and shares real memory, but does not behave like an exporter.
struct Impostor {
    ticket: Ticket,
    counts: std::fs::File,
    /// Keeps the connections, which the importer would miss.
    serving: JoinHandle<Vec<OwnedFd>>,
    serial: u64,
}

fn sealed_file() -> std::fs::File {
    let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 2 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file.into()
}

fn message(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    [b"HWSH", &[kind, 0, 0, 0][..], &fields.concat()].concat()
}

fn send(socket: &OwnedFd, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors)));
    let message = std::io::IoSlice::new(message);
    rustix::net::sendmsg(socket, &[message], &mut control, SendFlags::NOSIGNAL).is_ok()
}

fn receive(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut buffer = [0_u8; 1000];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = std::io::IoSliceMut::new(&mut buffer);
    let received = rustix::net::recvmsg(socket, &mut [message], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => rights.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let descriptors = descriptors.collect();
    (buffer[..received.bytes].to_vec(), descriptors)
}

impl Impostor {
    /// Shares a buffer that it has; `answer` makes what is sent in answer to an open, with these descriptors.
    fn new(
        victim: &Exporter,
        buffer: &DeviceBuffer<u32>,
        answer: impl FnOnce(&OwnedFd, &[u8], &[u8], &[BorrowedFd<'_>]) + Send + 'static,
    ) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = u128::from(NUMBER.fetch_add(1, Ordering::Relaxed));
        let incarnation = (u128::from(std::process::id()) << 64 | number).to_le_bytes();
        let ticket = forged(&buffer.share().unwrap(), |bytes| bytes[32..48].copy_from_slice(&incarnation));
        let serial = u64::from_le_bytes(ticket.to_bytes()[72..80].try_into().unwrap());
        let ipc = victim.runtime.backend().ipc_sharing().unwrap();
        // SAFETY: the buffer is alive.
        let handle = unsafe { ipc.export_memory(0, buffer.ptr(), Transport::Descriptor) }.unwrap();
        let listener = listen(&ticket);
        let (counts, ready) = (sealed_file(), sealed_file());
        let theirs = counts.try_clone().unwrap();
        let serving = std::thread::spawn(move || {
            let socket = rustix::net::accept(&listener).unwrap();
            let (_, line) = receive(&socket);
            send(&socket, &welcome(&incarnation, false), &[]);
            let (question, _) = receive(&socket);
            let opened = [&0x1_u32.to_le_bytes()[..], &handle.device_uuid, &handle.bytes.to_le_bytes()].concat();
            let opened = [&opened[..], &handle.payload, &1_u32.to_le_bytes()].concat();
            let memory = handle.descriptor.as_ref().unwrap();
            let descriptors = [memory.as_ref().as_fd(), theirs.as_fd(), ready.as_fd()];
            answer(&socket, &question[8..12], &opened, &descriptors);
            [line, vec![socket, listener]].into_iter().flatten().collect()
        });
        let impostor = Self { ticket, counts, serving, serial };
        impostor.scribble(MAPPED | 1);
        impostor
    }

    /// One that answers as it should.
    fn polite(victim: &Exporter, buffer: &DeviceBuffer<u32>) -> Self {
        Self::new(victim, buffer, |socket, question, opened, descriptors| {
            assert!(send(socket, &message(4, &[question, opened]), descriptors));
        })
    }

    /// Writes the word of its allocation, whose index is 0.
    fn scribble(&self, word: u64) {
        let word = word | (self.serial & ((1 << 30) - 1)) << 32;
        self.counts.write_all_at(&word.to_le_bytes(), (16 + 16 + 1024 + 1024) * 8).unwrap();
    }

    /// Tells the importer that the allocation was freed.
    fn raise_closed(&self) {
        self.counts.write_all_at(&1_u64.to_le_bytes(), (16 + 16 + 1024) * 8).unwrap();
        self.counts.write_all_at(&1_u64.to_le_bytes(), 16 * 8).unwrap();
    }
}

#[test]
fn an_exporter_that_scribbles_on_the_counts_takes_no_memory_away() {
    let (owner, importer) = (Exporter::new(), Exporter::new());
    let buffer = owner.make(1000, 7);
    owner.stream.synchronize().unwrap();
    let impostor = Impostor::polite(&owner, &buffer);
    let opened = importer.runtime.open_shared::<u32>(&impostor.ticket).unwrap();
    // The exporter's word claims that the allocation is not open, or that it is another one by now.
    for word in [CLOSED | MAPPED, 0, CLOSED | 5 << 32] {
        impostor.scribble(word);
        impostor.raise_closed();
        importer.runtime.trim_shared().unwrap();
        importer.runtime.trim().unwrap();
        assert_eq!(importer.runtime.statistics().sharing.mappings, 1, "{word:x}");
        assert_eq!(importer.stream.download(&opened).unwrap(), vec![7; 1000]);
    }
    drop(opened);
    until("it is unmapped", || {
        importer.runtime.trim().unwrap();
        importer.runtime.statistics().sharing.mappings == 0
    });
    importer.end();
    drop(impostor.serving.join().unwrap());
    owner.end_after(buffer);
}

#[test]
fn an_exporter_that_scribbles_on_the_counts_makes_nobody_wait() {
    let (owner, importer) = (Exporter::new(), Exporter::new());
    let buffer = owner.make(1000, 7);
    owner.stream.synchronize().unwrap();
    let impostor = Impostor::polite(&owner, &buffer);
    let opened = importer.runtime.open_shared::<u32>(&impostor.ticket).unwrap();
    let another_generation = 1 << 61 | MAPPED | 1;
    let words = [
        (1, ErrorKind::InvalidArgument),
        (MAPPED | u64::from(u32::MAX), ErrorKind::InvalidArgument),
        (another_generation, ErrorKind::Expired),
    ];
    for (word, expected) in words {
        impostor.scribble(word);
        let (runtime, ticket) = (importer.runtime.clone(), impostor.ticket.clone());
        let kind = in_time(move || kind_of(runtime.open_shared(&ticket)));
        assert_eq!(kind, expected, "{word:x}");
    }
    drop(opened);
    assert_eq!(importer.runtime.statistics().sharing.imports, 0);
    drop(impostor.serving.join().unwrap());
    drop(buffer);
}

#[test]
fn an_exporter_that_answers_without_end_but_never_the_question_is_given_up() {
    let (owner, importer) = (Exporter::new(), Exporter::new());
    let buffer = owner.make(1000, 7);
    let impostor = Impostor::new(&owner, &buffer, |socket, _, opened, _| {
        // Refusals and grants of other requests, until the other end is closed.
        while send(socket, &message(6, &[&[9; 4], &[2, 0, 0, 0]]), &[])
            && send(socket, &message(4, &[&[9; 4], opened]), &[])
        {}
    });
    let (runtime, ticket) = (importer.runtime.clone(), impostor.ticket.clone());
    assert_eq!(in_time(move || kind_of(runtime.open_shared(&ticket))), ErrorKind::InvalidArgument);
    drop(impostor.counts);
    assert_eq!(importer.runtime.statistics().sharing.imports, 0);
    importer.end();
    drop(impostor.serving.join().unwrap());
    owner.end_after(buffer);
}

// -------------------------------------------------------------------- what is counted

#[test]
fn importers_that_have_let_go_before_they_end_are_not_counted_as_lost() {
    let exporter = Exporter::new();
    let buffer = exporter.make(1000, 7);
    for _ in 0..10 {
        let mut peer = Peer::with_open(&buffer.share().unwrap());
        peer.tell("drop a");
        peer.tell("trim");
        assert!(peer.tell("statistics").starts_with("imports=0 mappings=0"));
        // It holds nothing: that it ends in disorder loses nothing.
        peer.kill();
    }
    until("they are forgotten", || exporter.runtime.statistics().sharing.peers == 0);
    assert_eq!(exporter.runtime.statistics().sharing.lost_peers, 0);
    exporter.end_after(buffer);
}
