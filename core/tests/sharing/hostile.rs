//! Tickets and peers that are wrong on purpose, and machines that have run out.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use highwater_core::{ErrorKind, Ticket};
use highwater_mock::MockOptions;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;

use crate::Exporter;
use crate::peer::{Peer, until};

/// The ticket with other bytes, and a checksum that fits them.
pub(crate) fn forged(ticket: &Ticket, change: impl FnOnce(&mut [u8])) -> Ticket {
    let mut bytes = ticket.to_bytes();
    let checked = bytes.len() - 4;
    change(&mut bytes[..checked]);
    let sum = crc32fast::hash(&bytes[..checked]);
    bytes[checked..].copy_from_slice(&sum.to_le_bytes());
    Ticket::from_bytes(&bytes).unwrap()
}

#[test]
fn tickets_of_nothing_are_refused_by_what_is_wrong() {
    let exporter = Exporter::new();
    let other = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 1);
    let kind = |change: fn(&mut [u8])| other.runtime.open_shared::<u32>(&forged(&ticket, change)).unwrap_err().kind();
    assert_eq!(kind(|bytes| bytes[16] ^= 1), ErrorKind::Expired, "another boot");
    assert_eq!(kind(|bytes| bytes[32] ^= 1), ErrorKind::Expired, "another exporter");
    assert_eq!(kind(|bytes| bytes[48] ^= 1), ErrorKind::DeviceMissing, "another device");
    assert_eq!(kind(|bytes| bytes[68] ^= 1), ErrorKind::Expired, "another index");
    assert_eq!(kind(|bytes| bytes[71] ^= 128), ErrorKind::Expired, "an index far away");
    assert_eq!(kind(|bytes| bytes[72] ^= 2), ErrorKind::Expired, "another generation");
    assert_eq!(kind(|bytes| bytes[12] = 2), ErrorKind::Unsupported, "another transport");
    assert_eq!(kind(|bytes| bytes[90] = 1), ErrorKind::InvalidArgument, "another size");
    // Nothing of it is counted.
    assert_eq!(other.runtime.statistics().sharing.imports, 0);
    let opened = other.runtime.open_shared::<u32>(&ticket).unwrap();
    drop((opened, buffer));
    until("nobody holds it", || exporter.taken() == 0);
    other.end();
    exporter.end();
}

/// Opens the ticket in another thread and returns the refusal. Without a refusal, the open would wait for ever.
#[track_caller]
fn refused_in_time(importer: &Exporter, ticket: Ticket) -> highwater_core::Error {
    let runtime = importer.runtime.clone();
    let (sender, answer) = std::sync::mpsc::channel();
    let opening = std::thread::spawn(move || sender.send(runtime.open_shared::<u32>(&ticket).map(drop)));
    let opened = answer.recv_timeout(std::time::Duration::from_secs(60)).expect("an answer within a minute");
    // The thread has the runtime, which ends later only if no other code has it.
    opening.join().unwrap().unwrap();
    opened.unwrap_err()
}

#[test]
fn a_number_from_the_future_is_refused_while_the_exporter_lives() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket: Ticket = peer.tell("make a 10 1").parse().unwrap();
    let later = |number: u64| forged(&ticket, |bytes| bytes[80..88].copy_from_slice(&number.to_le_bytes()));
    let refuses = || {
        for number in [99, u64::MAX - 1, u64::MAX] {
            let error = refused_in_time(&importer, later(number));
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(
                error.message().contains("the exporter did not issue this ticket")
                    && error.hint().contains("unchanged"),
                "{error}"
            );
            assert_eq!(importer.runtime.statistics().sharing.imports, 0);
        }
    };
    // At the first open, and by the mapping that is kept from it.
    refuses();
    drop(importer.runtime.open_shared::<u32>(&ticket).unwrap());
    until("it is let go of", || importer.runtime.statistics().sharing.imports == 0);
    refuses();
    assert_eq!(importer.runtime.statistics().sharing.mappings, 1);
    peer.quit();
    importer.end();
}

#[test]
fn numbers_are_those_of_the_allocation_and_not_of_the_one_before_it() {
    let slow = MockOptions::new().with_latency(std::time::Duration::from_millis(2));
    let (exporter, importer) = (Exporter::with(slow), Exporter::new());
    let number = |ticket: &Ticket| u64::from_le_bytes(ticket.to_bytes()[80..88].try_into().unwrap());
    let index = |ticket: &Ticket| ticket.to_bytes()[68..72].to_vec();
    let first = exporter.make(10, 1);
    let mut ticket = first.share().unwrap();
    while number(&ticket) < 5 {
        exporter.stream.fill(&first, 2_u32).unwrap();
        ticket = first.share().unwrap();
        // Issued, and waited for by an importer that has it mapped.
        let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
        assert_eq!(importer.stream.download(&opened).unwrap(), vec![2; 10]);
    }
    drop(first);
    until("nobody holds the first", || exporter.taken() == 0);
    let second = exporter.make(10, 3);
    exporter.stream.synchronize().unwrap();
    let young = second.share().unwrap();
    assert_eq!(index(&young), index(&ticket), "the slot is used again");
    assert_eq!(number(&young), 0, "no work was outstanding, so no number was issued since");
    let old_number = forged(&young, |bytes| bytes[80] = 5);
    assert_eq!(refused_in_time(&importer, old_number).kind(), ErrorKind::InvalidArgument);
    let opened = importer.runtime.open_shared::<u32>(&young).unwrap();
    assert_eq!(importer.stream.download(&opened).unwrap(), vec![3; 10]);
    drop((opened, second));
    until("nobody holds the second", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

/// Where an exporter listens: tickets name it.
pub(crate) fn name_of(ticket: &Ticket) -> Vec<u8> {
    let bytes: [u8; 16] = ticket.to_bytes()[32..48].try_into().unwrap();
    format!("highwater-{:032x}", u128::from_be_bytes(bytes)).into_bytes()
}

/// A socket, and the address of the exporter that a ticket names.
fn socket_for(ticket: &Ticket) -> (OwnedFd, SocketAddrUnix) {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    (socket.unwrap(), SocketAddrUnix::new_abstract_name(&name_of(ticket)).unwrap())
}

/// Connects to the exporter that a ticket names.
pub(crate) fn connect(ticket: &Ticket) -> rustix::io::Result<OwnedFd> {
    let (socket, address) = socket_for(ticket);
    rustix::net::connect(&socket, &address).map(|()| socket)
}

/// The greeting of an importer.
pub(crate) const HELLO: &[u8] = b"HWSH\x01\0\0\0\x06\0\x06\0";

/// The greeting of an exporter, or of an heir, for its user.
pub(crate) fn welcome(incarnation: &[u8], is_heir: bool) -> Vec<u8> {
    let pid = std::process::id().to_le_bytes();
    [b"HWSH\x02\0\0\0\x06\0\x06\0", incarnation, &[u8::from(is_heir), 0, 0, 0], &[0; 8], &pid].concat()
}

/// Listens in the place of the exporter that a ticket names.
pub(crate) fn listen(ticket: &Ticket) -> OwnedFd {
    let (socket, address) = socket_for(ticket);
    rustix::net::bind(&socket, &address).unwrap();
    rustix::net::listen(&socket, 8).unwrap();
    socket
}

/// In parallel, because each mostly waits.
#[test]
fn processes_that_are_stopped_or_silent_delay_no_others() {
    std::thread::scope(|scope| {
        scope.spawn(an_open_waits_one_second_for_all_stopped_owners_together);
        scope.spawn(an_impostor_that_listens_for_a_dead_exporter_is_found_out);
        scope.spawn(an_exporter_that_is_stopped_is_named_with_its_state_and_soon);
        scope.spawn(opens_of_many_threads_at_a_stopped_exporter_wait_together);
        scope.spawn(an_exporter_that_is_stopped_before_its_shared_work_is_done_delays_no_importer);
        scope.spawn(a_process_that_connects_and_says_nothing_takes_no_descriptors_from_others);
        scope.spawn(a_process_that_greets_and_asks_for_nothing_takes_no_descriptors_from_others);
    });
}

/// The same happens if owners hand over one after the other, and each is stopped. Failed before: each new connection waited for 1 s.
fn an_open_waits_one_second_for_all_stopped_owners_together() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let (buffer, ticket) = exporter.make_shared(1000, 7);
    let mut owner = Peer::start();
    let ticket = forged(&ticket, |bytes| {
        bytes[32] ^= 1;
        bytes[64..68].copy_from_slice(&owner.pid().to_le_bytes());
    });
    owner.tell(&format!("stall {ticket}"));
    owner.signal(Signal::STOP);
    let (error, took) = std::thread::scope(|scope| {
        let opening = scope.spawn(|| {
            let started = Instant::now();
            let error = importer.runtime.open_shared::<u32>(&ticket).map(drop).unwrap_err();
            (error, started.elapsed())
        });
        while !opening.is_finished() {
            // It is continued for a moment, and cuts the connection.
            std::thread::sleep(Duration::from_millis(700));
            owner.signal(Signal::CONT);
        }
        opening.join().unwrap()
    });
    owner.kill();
    assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
    assert!(took < Duration::from_millis(1900), "{took:?}: {error}");
    importer.end();
    exporter.end_after(buffer);
}

#[test]
fn peers_that_send_garbage_harm_only_themselves() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 1);
    let connect = || connect(&ticket).unwrap();
    let send = |socket: &std::os::fd::OwnedFd, bytes: &[u8]| {
        let _ = rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL);
    };
    let mut seed = 12345_u64;
    let mut kept = Vec::new();
    for length in 0..400_usize {
        let garbage: Vec<u8> = (0..length * 5)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 56) as u8
            })
            .collect();
        let socket = connect();
        send(&socket, &garbage);
        // The right beginning, and garbage behind it.
        send(&socket, &[b"HWSH", &[(length % 8) as u8, 0, 0, 0][..], &garbage].concat());
        if length % 40 == 0 {
            kept.push(socket);
        }
    }
    // A client that greets and then requests everything, without a bell, with messages that are too long, and never reads.
    let socket = connect();
    for _ in 0..2000 {
        let _ = rustix::net::send(
            socket.as_fd(),
            HELLO,
            rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL,
        );
    }
    // The others are served.
    let mut peer = Peer::with_open(&ticket);
    assert_eq!(peer.tell("read a"), "1");
    peer.quit();
    drop(kept);
    drop(buffer);
    exporter.end_once_all_is_back();
}

#[test]
fn a_peer_of_another_version_is_told_so() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 1);
    for versions in [[1_u8, 0, 1, 0], [2, 0, 2, 0], [0xff, 0, 0xff, 0]] {
        let socket = connect(&ticket).unwrap();
        rustix::net::send(&socket, &[b"HWSH\x01\0\0\0", &versions[..]].concat(), rustix::net::SendFlags::NOSIGNAL)
            .unwrap();
        let mut answer = [0_u8; 1000];
        let (bytes, _) = rustix::net::recv(&socket, &mut answer[..], rustix::net::RecvFlags::empty()).unwrap();
        // Refused, as `Unsupported`, with both versions.
        assert_eq!((&answer[4..6], &answer[12..16]), (&[6, 0][..], &[5, 0, 0, 0][..]));
        let text = std::str::from_utf8(&answer[16..bytes]).unwrap();
        assert!(text.contains(&format!("versions {} to {} of the protocol", versions[0], versions[0])), "{text}");
    }
    exporter.end_after(buffer);
}

fn an_impostor_that_listens_for_a_dead_exporter_is_found_out() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket: Ticket = peer.tell("make a 10 1").parse().unwrap();
    let exporter = peer.pid();
    peer.kill();
    // The name is free again: somebody else takes it, and answers with garbage.
    let socket = listen(&ticket);
    // It is not the ticket's process, so the importer does not wait for it.
    let started = std::time::Instant::now();
    let error = importer.runtime.open_shared::<u32>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    let (exporter, impostor) = (format!("(process {exporter})"), format!("process {}", std::process::id()));
    assert!(error.message().contains(&exporter) && error.message().contains(&impostor), "{error}");
    assert!(started.elapsed() < std::time::Duration::from_secs(10), "{:?}", started.elapsed());
    drop(rustix::net::accept(&socket).unwrap());
    // A process that its id does not distinguish from the exporter.
    let ticket = forged(&ticket, |bytes| bytes[64..68].copy_from_slice(&std::process::id().to_le_bytes()));
    let runtime = importer.runtime.clone();
    let opening = std::thread::spawn(move || runtime.open_shared::<u32>(&ticket).map(drop));
    let connection = rustix::net::accept(&socket).unwrap();
    rustix::net::send(&connection, b"HWSH nonsense", rustix::net::SendFlags::NOSIGNAL).unwrap();
    assert_eq!(opening.join().unwrap().unwrap_err().kind(), ErrorKind::InvalidArgument);
    importer.end();
}

fn an_exporter_that_is_stopped_is_named_with_its_state_and_soon() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let known: Ticket = peer.tell("make a 10 1").parse().unwrap();
    let other: Ticket = peer.tell("make b 10 2").parse().unwrap();
    let stopped_at = || {
        peer.signal(rustix::process::Signal::STOP);
        std::time::Instant::now()
    };
    let refused = |ticket: &Ticket, started: std::time::Instant| {
        let error = importer.runtime.open_shared::<u32>(ticket).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
        assert!(error.message().contains(&format!("process {}", peer.pid())), "{error}");
        assert!(error.message().contains("is stopped") && error.hint().contains("kill -CONT"), "{error}");
        assert!(started.elapsed() < std::time::Duration::from_secs(15), "{:?}", started.elapsed());
    };
    // In the handshake, and on an open connection.
    refused(&known, stopped_at());
    peer.signal(rustix::process::Signal::CONT);
    drop(importer.runtime.open_shared::<u32>(&known).unwrap());
    refused(&other, stopped_at());
    peer.signal(rustix::process::Signal::CONT);
    drop(importer.runtime.open_shared::<u32>(&other).unwrap());
    peer.quit();
    importer.end();
}

/// Failed before: each open waited for the time limits of those before it.
fn opens_of_many_threads_at_a_stopped_exporter_wait_together() {
    // On an open connection, in the handshake, and of one ticket.
    let (importer, fresh, same) = (Exporter::new(), Exporter::new(), Exporter::new());
    let mut peer = Peer::start();
    let tickets: Vec<Ticket> = (0..8).map(|n| peer.tell(&format!("make b{n} 10 {n}")).parse().unwrap()).collect();
    drop(importer.runtime.open_shared::<u32>(&tickets[0]).unwrap());
    peer.signal(rustix::process::Signal::STOP);
    let started = std::time::Instant::now();
    std::thread::scope(|scope| {
        for runtime in [&importer, &fresh, &same].map(|importer| importer.runtime.clone()) {
            let is_same = std::ptr::eq(runtime.backend(), same.runtime.backend());
            for ticket in tickets[1..].iter().map(|ticket| if is_same { &tickets[1] } else { ticket }) {
                let runtime = runtime.clone();
                scope.spawn(move || {
                    let error = runtime.open_shared::<u32>(ticket).map(drop).unwrap_err();
                    assert!(error.message().contains("is stopped") && error.hint().contains("kill -CONT"), "{error}");
                });
            }
        }
    });
    assert!(started.elapsed() < std::time::Duration::from_millis(1900), "{:?}", started.elapsed());
    peer.signal(rustix::process::Signal::CONT);
    // They ask again once it runs.
    for importer in [&importer, &fresh, &same] {
        drop(importer.runtime.open_shared::<u32>(&tickets[2]).unwrap());
    }
    peer.quit();
    [importer, fresh, same].into_iter().for_each(Exporter::end);
}

fn an_exporter_that_is_stopped_before_its_shared_work_is_done_delays_no_importer() {
    let importer = Exporter::new();
    let mut peer = Peer::start_with("latency=5s", |_| {});
    // The exporter shares while its fill runs. Only it can report the end of the fill.
    let ticket: Ticket = peer.tell("make a 10 1").parse().unwrap();
    let runtime = importer.runtime.clone();
    let opening = {
        let ticket = ticket.clone();
        std::thread::spawn(move || runtime.open_shared::<u32>(&ticket).map(drop))
    };
    until("the importer has mapped the memory", || importer.runtime.statistics().sharing.mappings == 1);
    peer.signal(rustix::process::Signal::STOP);
    let error = opening.join().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
    assert!(error.message().contains("is stopped") && error.hint().contains("kill -CONT"), "{error}");
    peer.kill();
    importer.end();
}

#[test]
fn a_ticket_of_an_exporter_that_cannot_read_the_boot_id_is_opened() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let buffer = exporter.make(1000, 1);
    // The ticket of an exporter without `/proc`.
    let ticket = forged(&buffer.share().unwrap(), |bytes| bytes[16..32].fill(0));
    let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
    assert_eq!(importer.stream.download(&opened).unwrap(), vec![1; 1000]);
    importer.end_after((opened, buffer));
    exporter.end();
}

#[test]
fn another_users_process_is_refused() {
    if !rustix::process::geteuid().is_root() {
        // Only the superuser can become somebody else; `another_user_is_refused_and_told_why` checks the rule itself.
        return;
    }
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 1);
    let copy = std::env::temp_dir().join(format!("test-of-another-user-{}", std::process::id()));
    // Another user may not be able to reach the build's folder.
    // Copied by another process: a child that is forked here in the meantime would hold the copy open for writing, and then the
    // copy could not be executed.
    let copied = std::process::Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&copy).status();
    assert!(copied.unwrap().success());
    let mut peer = Peer::start_with("", |command| {
        let mut other = std::process::Command::new(&copy);
        other.args(command.get_args().map(std::ffi::OsStr::to_owned).collect::<Vec<_>>());
        other.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        other.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).uid(65534).current_dir("/");
        *command = other;
    });
    let answer = peer.ask(&format!("open a {ticket}"));
    assert!(answer.starts_with("error PermissionDenied"), "{answer}");
    assert!(answer.contains("user"), "{answer}");
    peer.quit();
    std::fs::remove_file(&copy).unwrap();
    assert_eq!(exporter.runtime.statistics().sharing.peers, 0);
    exporter.end_after(buffer);
}

/// Limits the descriptors of a process to be.
fn limit_descriptors(command: &mut std::process::Command, most: u64) {
    limit(command, rustix::process::Resource::Nofile, most);
}

/// Limits the resources of a process to start.
fn limit(command: &mut std::process::Command, what: rustix::process::Resource, most: u64) {
    let limit = rustix::process::Rlimit { current: Some(most), maximum: Some(most) };
    // SAFETY: between fork and exec the child makes one system call.
    unsafe { command.pre_exec(move || rustix::process::setrlimit(what, limit).map_err(Into::into)) };
}

#[test]
fn an_exporter_whose_files_are_limited_says_so_and_lives() {
    // Enough for the memory of its device, and not for what it shares with importers.
    let files = |command: &mut std::process::Command| limit(command, rustix::process::Resource::Fsize, 300_000);
    let mut exporter = Peer::start_with("memory=256KiB", files);
    let answer = exporter.ask("make a 1000 3");
    assert!(answer.starts_with("error OutOfMemory share: "), "{answer}");
    assert!(answer.contains("`ulimit -f`"), "{answer}");
    assert!(exporter.quit().success());
}

#[test]
fn an_importer_without_descriptors_says_so_and_counts_nothing() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 1);
    let mut outcomes = Vec::new();
    // From hardly enough to start, up to enough for everything.
    for most in 4..32 {
        let mut peer = Peer::start_with("", |command| limit_descriptors(command, most));
        let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| peer.ask(&format!("open a {ticket}"))));
        // With too few for its own device the process does not even start.
        let Ok(answer) = answer else { continue };
        match answer.strip_prefix("error ") {
            Some(error) => {
                assert!(error.starts_with("OperatingSystem"), "{most}: {answer}");
                assert!(error.contains("ulimit -n"), "{most}: {answer}");
                assert!(error.contains(" open_shared: ") && !error.contains(" share: "), "{most}: {answer}");
                outcomes.push(false);
            }
            None => {
                assert_eq!(peer.tell("read a"), "1");
                outcomes.push(true);
            }
        }
        peer.quit();
    }
    assert!(outcomes.contains(&false) && outcomes.last() == Some(&true), "{outcomes:?}");
    drop(buffer);
    exporter.end_once_all_is_back();
}

#[test]
fn an_exporter_without_descriptors_tells_its_importers_and_serves_them_later() {
    // Room for a few importers, so that few more are needed: this process may not have many descriptors either.
    let mut exporter = Peer::start_with("", |command| limit_descriptors(command, 30));
    let ticket: Ticket = exporter.tell("make a 1000 3").parse().unwrap();
    let importers: Vec<_> = (0..12).map(|_| Exporter::new()).collect();
    let mut opened = Vec::new();
    let mut refused = 0;
    for importer in &importers {
        match importer.runtime.open_shared::<u32>(&ticket) {
            Ok(buffer) => {
                assert_eq!(importer.stream.download(&buffer).unwrap(), vec![3; 1000]);
                opened.push(buffer);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::OperatingSystem, "{error}");
                assert!(error.hint().contains("the exporter's limits (ulimit -n)"), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0 && !opened.is_empty(), "{refused} refused, {} opened", opened.len());
    // Those that close give their descriptors back.
    opened.clear();
    importers.into_iter().for_each(Exporter::end);
    let late = Exporter::new();
    until("there is room again", || late.runtime.open_shared::<u32>(&ticket).is_ok());
    late.end();
    assert!(exporter.quit().success());
}

/// Opens a ticket over and over while another process crowds the exporter, and expects every open to succeed.
fn opens_in_a_crowd(what: &str) {
    let mut exporter = Peer::start_with("", |command| limit_descriptors(command, 200));
    let ticket = exporter.tell("make a 1000 3");
    let mut crowd = Peer::start();
    crowd.tell(&format!("crowd {what} 400 {ticket}"));
    let ticket: Ticket = ticket.parse().unwrap();
    for round in 0..60 {
        let importer = Exporter::new();
        let opened = importer.runtime.open_shared::<u32>(&ticket);
        let opened = opened.unwrap_or_else(|error| panic!("open {round}: {error} ({})", error.hint()));
        assert_eq!(importer.stream.download(&opened).unwrap(), vec![3; 1000]);
        drop(opened);
        importer.end();
    }
    // Processes that open nothing are no importers.
    until("the crowd counts for nothing", || exporter.tell("statistics").contains("peers=0"));
    crowd.kill();
    assert!(exporter.quit().success());
}

fn a_process_that_connects_and_says_nothing_takes_no_descriptors_from_others() {
    opens_in_a_crowd("is-silent");
}

fn a_process_that_greets_and_asks_for_nothing_takes_no_descriptors_from_others() {
    opens_in_a_crowd("greets");
}

#[test]
fn nothing_needs_a_file_system_to_write_to() {
    let exporter = Exporter::new();
    let buffer = exporter.make(1000, 1);
    let mut peer = Peer::start_with("", |command| {
        command.env("TMPDIR", "/nowhere").current_dir("/");
    });
    let answer = peer.ask(&format!("open a {}", buffer.share().unwrap()));
    assert_eq!(answer, "1000");
    // Neither process has a file open in a place that could be full.
    for pid in [peer.pid(), std::process::id()] {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let targets = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let places = ["/tmp", "/var/tmp", "/dev/shm", "/run"];
        let there: Vec<_> = targets.filter(|target| places.iter().any(|place| target.starts_with(place))).collect();
        assert!(there.iter().all(|target| !target.to_string_lossy().contains("highwater")), "{there:?}");
    }
    let in_shared_memory = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().contains("highwater");
    let left = std::fs::read_dir("/dev/shm").map_or(0, |entries| entries.flatten().filter(in_shared_memory).count());
    assert_eq!(left, 0);
    peer.quit();
    exporter.end_after(buffer);
}

#[test]
fn shared_memory_cannot_be_made_shorter() {
    let exporter = Exporter::with(MockOptions::new());
    let other = Exporter::new();
    let buffer = exporter.make(1000, 1);
    let opened = other.runtime.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    let mut counts = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if !target.to_string_lossy().contains("memfd:highwater") {
            continue;
        }
        counts += usize::from(target.to_string_lossy().contains("highwater-share"));
        let file = std::fs::OpenOptions::new().write(true).open(entry.path());
        if let Ok(file) = file {
            let error = file.set_len(0).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{target:?}");
        }
    }
    assert!(counts >= 2, "{counts}");
    other.end_after((opened, buffer));
    exporter.end();
}
