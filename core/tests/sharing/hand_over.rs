//! Hand-overs: a living owner gives its memory to an heir.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use highwater_core::{ErrorKind, ImportOptions, Openers, OwnerDeath, Rendezvous, Ticket};
use highwater_mock::MockOptions;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::Signal;

use crate::Exporter;
use crate::adopted::adopt_segments;
use crate::heirs::runtime;
use crate::hostile::{HELLO, connect};
use crate::peer::{Peer, until};

const LIMIT: Duration = Duration::from_secs(60);

fn owner(value: u32) -> (Peer, Ticket) {
    let mut owner = Peer::start();
    let ticket = owner.tell(&format!("make a 1000 {value}")).parse().unwrap();
    (owner, ticket)
}

#[test]
fn every_open_during_a_hand_over_succeeds_and_the_former_owner_leaves_nothing() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    for value in 1..6 {
        let (mut owner, ticket) = owner(value);
        let kept = heir.open_as_heir(&ticket).unwrap();
        let known = third.runtime.open_shared::<u32>(&ticket).unwrap();
        let is_done = AtomicBool::new(false);
        let opens = std::thread::scope(|scope| {
            let opening = scope.spawn(|| {
                let mut opens = 0;
                while !is_done.load(Ordering::Relaxed) || opens < 20 {
                    // Each has its own connection.
                    let stranger = Exporter::new();
                    let opened = stranger.runtime.open_shared::<u32>(&ticket).unwrap();
                    stranger.assert_value(&opened, value);
                    stranger.end_after(opened);
                    opens += 1;
                }
                opens
            });
            owner.tell("hand-over 60000");
            // Its buffer does not wait for anybody, and its process may end.
            owner.tell("drop a");
            assert_eq!(owner.tell("exports"), "0 0 0");
            is_done.store(true, Ordering::Relaxed);
            opening.join().unwrap()
        });
        assert!(opens >= 20);
        assert!(owner.quit().success());
        // The importer of before is counted at the heir, and the strangers are gone.
        until("the living importer is counted", || heir.exports() == (1, 0, 1));
        third.stream.fill(&known, 99).unwrap();
        third.stream.synchronize().unwrap();
        heir.assert_value(&kept, 99);
        drop(kept);
        until("it is in limbo", || heir.exports().1 == 1);
        assert_eq!(Exporter::new().refusal(&ticket), ErrorKind::Expired);
        drop(known);
        until("it is released", || heir.exports() == (0, 0, 0));
        until("nothing is mapped", || third.runtime.statistics().sharing.mappings == 0);
    }
    heir.end();
    third.end();
}

/// Failed before: children that the heir forked meanwhile had the socket.
#[test]
fn children_of_an_heir_have_no_socket_that_it_receives() {
    let mut heir = Peer::start();
    let mut owners: Vec<_> = (1..13).map(owner).collect();
    for (place, (_, ticket)) in owners.iter().enumerate() {
        heir.tell(&format!("open-heir kept-{place} {ticket}"));
    }
    std::thread::scope(|scope| {
        let forks = scope.spawn(|| heir.tell("fork-storm 300"));
        for (owner, _) in &mut owners {
            owner.tell("hand-over 60000");
        }
        assert_eq!(forks.join().unwrap(), "0");
    });
    owners.into_iter().for_each(|(owner, _)| owner.kill());
    heir.kill();
}

/// The socket then has the name of a process that has ended, until the heir listens on it.
#[test]
fn an_owner_that_ends_at_once_after_a_hand_over_leaves_no_moment_at_which_an_open_is_refused() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    for value in 0..20 {
        let (mut owner, ticket) = owner(value);
        let kept = heir.open_as_heir(&ticket).unwrap();
        owner.tell("hand-over 60000");
        owner.kill();
        let opener = if value % 2 == 0 { &heir } else { &third };
        let opened = opener.runtime.open_shared::<u32>(&ticket).unwrap();
        opener.assert_value(&opened, value);
        drop((opened, kept));
    }
    until("it is released", || heir.exports() == (0, 0, 0));
    heir.end();
    third.end();
}

#[test]
fn the_heir_answers_after_the_queued_work_of_the_owner() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    let mut owner = Peer::start_with("latency=5ms", |_| {});
    let done: Ticket = owner.tell("make a 1000 7").parse().unwrap();
    let kept = heir.open_as_heir(&done).unwrap();
    owner.tell("fill a 8 20");
    let pending: Ticket = owner.tell("share a").parse().unwrap();
    owner.tell("fill a 9 20");
    owner.tell("hand-over 60000");
    // Nothing is lost with the process, unlike at a death.
    owner.kill();
    let opened = third.open_in_time(&pending);
    third.assert_value(&opened, 9);
    third.stream.fill(&opened, 10).unwrap();
    third.assert_value(&opened, 10);
    std::thread::sleep(Duration::from_millis(20));
    heir.assert_value(&kept, 10);
    drop((opened, kept));
    until("it is released", || heir.exports() == (0, 0, 0));
    heir.end();
    third.end();
}

#[test]
fn without_an_heir_of_all_memory_the_owner_keeps_it() {
    let (owner, heir, third) = (Exporter::new(), Exporter::new(), Exporter::new());
    let hand_over = |limit| owner.runtime.hand_over(Duration::from_millis(limit));
    let error = hand_over(10).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidState && error.message().contains("shares no memory"), "{error}");
    let (buffer, ticket) = owner.make_shared(1000, 7);
    let (other, other_ticket) = owner.make_shared(1000, 8);
    let importer = third.runtime.open_shared::<u32>(&ticket).unwrap();
    let error = hand_over(10).unwrap_err();
    assert!(
        error.kind() == ErrorKind::InvalidState && error.message().contains("no importer that keeps it"),
        "{error}"
    );
    assert!(error.hint().contains("OwnerDeath::Inherit"), "{error}");
    let kept = heir.open_as_heir(&ticket).unwrap();
    let error = hand_over(300).unwrap_err();
    assert!(error.message().contains("the heir keeps all but 1 of 2 allocations"), "{error}");
    // As before.
    assert_eq!((owner.exports(), heir.exports()), ((2, 0, 2), (0, 0, 0)));
    third.assert_value(&third.runtime.open_shared::<u32>(&other_ticket).unwrap(), 8);
    // What is dropped and still open elsewhere is not handed over.
    let known = third.runtime.open_shared::<u32>(&other_ticket).unwrap();
    drop(other);
    until("it is in limbo", || owner.exports().1 == 1);
    owner.runtime.hand_over(LIMIT).unwrap();
    until("the heir has it", || heir.exports() == (1, 0, 1));
    assert_eq!(owner.exports(), (1, 1, 1));
    drop(known);
    until("the owner has it back", || owner.exports().0 == 0);
    // The former owner uses its buffer, and shares it again. It cannot share others.
    owner.stream.fill(&buffer, 9).unwrap();
    let again = third.runtime.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    third.assert_value(&again, 9);
    assert_eq!(owner.runtime.open_shared::<u32>(&ticket).unwrap().ptr(), buffer.ptr());
    let error = owner.make(10, 1).share().unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidState && error.hint().contains("another `Runtime`"), "{error}");
    drop(buffer);
    assert_eq!(owner.exports(), (0, 0, 0));
    // The descriptors keep the memory, whatever the former owner allocates.
    let anew = [(); 3].map(|()| owner.make(1000, 5));
    third.assert_value(&importer, 9);
    third.stream.fill(&importer, 6).unwrap();
    third.assert_value(&importer, 6);
    anew.iter().for_each(|buffer| owner.assert_value(buffer, 5));
    heir.assert_value(&kept, 6);
    drop(anew);
    drop((importer, again, kept));
    until("it is released", || heir.exports() == (0, 0, 0));
    for exporter in [heir, third, owner] {
        exporter.end();
    }
}

#[test]
fn adopted_memory_is_not_handed_over() {
    let owner = Exporter::with(MockOptions::new().with_memory_bytes(1 << 30));
    let adopted = adopt_segments(&owner.gpu, &owner.runtime, 2);
    let ticket = adopted.share().unwrap();
    let error = owner.runtime.hand_over(LIMIT).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("adopted"), "{error}");
    drop(adopted);
    until("it is forgotten", || owner.exports().0 == 0);
    assert_eq!(Exporter::new().refusal(&ticket), ErrorKind::Expired);
    owner.end();
}

/// Catches an owner that gives its name away unasked, and one that takes a claim for a hand-over.
#[test]
fn an_owner_that_offers_nothing_gives_nothing() {
    let (owner, third) = (Exporter::new(), Exporter::new());
    let (buffer, ticket) = owner.make_shared(1000, 7);
    let socket = connect(&ticket).unwrap();
    let (line, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let theirs = [theirs.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&theirs)));
    let hello = std::io::IoSlice::new(HELLO);
    rustix::net::sendmsg(&socket, &[hello], &mut control, SendFlags::NOSIGNAL).unwrap();
    let hear = |socket: &OwnedFd| {
        let mut bytes = [0; 2000];
        let (_, length) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).unwrap();
        bytes[..length].to_vec()
    };
    assert_eq!(hear(&socket)[4], 2, "a welcome");
    // A claim of the allocation, and the taking.
    let mut claim = b"HWSH\x0a\0\0\0\x01\0\0\0".to_vec();
    claim.extend(&ticket.to_bytes()[68..72]);
    claim.extend(&ticket.to_bytes()[72..80]);
    claim.extend([0; 4 + 16 + 16 + 24 + 12]);
    for request in [claim, b"HWSH\x0c\0\0\0\x02\0\0\0".to_vec()] {
        rustix::net::send(&socket, &request, SendFlags::NOSIGNAL).unwrap();
        let answer = hear(&socket);
        assert_eq!(answer[4], 6, "a refusal");
        assert!(String::from_utf8_lossy(&answer).contains("is alive, and does not hand it over"), "{answer:?}");
    }
    third.assert_value(&third.runtime.open_shared::<u32>(&ticket).unwrap(), 7);
    assert_eq!(owner.exports().0, 1);
    drop(line);
    third.end();
    owner.end_after(buffer);
}

/// At any moment, one process answers the ticket: the owner, or one of the heirs.
#[test]
fn either_side_may_be_killed_at_any_moment_of_a_hand_over() {
    let third = Exporter::new();
    for round in 0..24_u32 {
        let (mut owner, ticket) = owner(round);
        let mut heirs = vec![Peer::start(), Peer::start()];
        for heir in &mut heirs {
            heir.tell(&format!("open-heir a {ticket}"));
        }
        let known = third.runtime.open_shared::<u32>(&ticket).unwrap();
        owner.say("hand-over 60000");
        // A hand-over takes about a millisecond.
        let moment = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(round / 3) * 200_000 };
        let _ = rustix::event::poll(&mut [], Some(&moment));
        let (victim, mut others) = match round % 3 {
            0 => (owner, heirs),
            killed => {
                let victim = heirs.swap_remove(killed as usize - 1);
                heirs.push(owner);
                (victim, heirs)
            }
        };
        victim.signal(Signal::KILL);
        third.assert_value(&third.open_in_time(&ticket), round);
        drop(third.open_in_time(&ticket));
        // One answers for the memory, and the last importer is counted there.
        until("one process owns the memory", || {
            let counts: Vec<_> = others.iter_mut().map(|other| other.exports()).collect();
            counts.iter().filter(|(blocks, _)| *blocks == 1).count() == 1 && counts.iter().any(|(_, peers)| *peers > 0)
        });
        assert_eq!(others.len(), 2);
        third.assert_value(&known, round);
        drop(known);
        others.into_iter().for_each(Peer::kill);
        victim.wait();
        until("nothing is mapped", || third.runtime.statistics().sharing.mappings == 0);
    }
    third.end();
}

#[test]
fn a_chain_of_hand_overs_ends_at_a_holder_and_pages_and_buffers_go_along() {
    let third = Exporter::new();
    let mut first = Peer::start();
    let ticket: Ticket = first.tell("make a 1000 7").parse().unwrap();
    let mut second = Peer::start();
    second.tell(&format!("open-heir a {ticket}"));
    let follower = third
        .runtime
        .open_shared_with::<u32>(&ticket, &ImportOptions::new().with_owner_death(OwnerDeath::Release))
        .unwrap();
    first.tell("hand-over 60000");
    assert!(first.quit().success());
    // The heir itself hands over. Its pages come from it alone.
    let mut holder = Peer::start();
    holder.tell(&format!("hold {ticket}"));
    until("the follower knows its owner", || follower.owner().is_some_and(|owner| owner.pid() == Some(second.pid())));
    second.tell("hand-over 60000");
    until("the holder has it", || holder.tell("held") == "Inherited");
    assert!(second.quit().success());
    until("the follower knows the holder", || follower.owner().is_some_and(|owner| owner.pid() == Some(holder.pid())));
    third.assert_value(&follower, 7);
    third.assert_value(&third.open_in_time(&ticket), 7);
    // An owner with pages: a holder takes both.
    let mut both = Peer::start();
    let (tensor, pages) = (both.tell("make a 1000 8"), both.tell("pinned-make p 1000 9"));
    holder.tell(&format!("hold {tensor}"));
    holder.tell(&format!("hold {pages}"));
    both.tell("hand-over 60000");
    until("the holder has both", || holder.tell("held") == "Inherited,Inherited,Inherited");
    both.kill();
    let mut stranger = Peer::with_open(&tensor.parse().unwrap());
    assert_eq!(stranger.tell("read a"), "8");
    stranger.tell(&format!("pinned-open p {pages}"));
    assert_eq!(stranger.tell("pinned-read p"), "9");
    stranger.kill();
    // Memory that goes with its owner goes with the last one.
    let last = format!("(process {})", holder.pid());
    holder.kill();
    until("it is revoked", || third.stream.download(&follower).is_err());
    // The first owner has handed over, and the second. The last one has died.
    let error = third.stream.download(&follower).unwrap_err();
    assert!(error.kind() == ErrorKind::Expired && error.message().contains(&last), "{error}");
    drop(follower);
    until("nothing is mapped", || third.runtime.statistics().sharing.mappings == 0);
    third.end();
}

/// Catches a holder that takes what the owner has dropped for a part of the hand-over: it would wait in limbo as long as the holder lives.
#[test]
fn memory_that_was_dropped_before_the_hand_over_goes_back_to_its_owner() {
    let (owner, heir, third) = (Exporter::new(), Exporter::new(), Exporter::new());
    let (dropped, dropped_ticket) = owner.make_shared(1000, 7);
    let (buffer, ticket) = owner.make_shared(1000, 8);
    let kept = heir.open_as_heir(&ticket).unwrap();
    let mut holder = Peer::start();
    holder.tell(&format!("hold {dropped_ticket}"));
    holder.tell(&format!("hold {ticket}"));
    // It learns of the drop and of the hand-over at once.
    holder.signal(Signal::STOP);
    drop(dropped);
    until("it is in limbo", || owner.exports().1 == 1);
    // Either may be the heir. The holder is stopped.
    owner.runtime.hand_over(LIMIT).unwrap();
    holder.signal(Signal::CONT);
    until("the owner has it back", || owner.exports().0 == 0);
    assert_eq!(third.refusal(&dropped_ticket), ErrorKind::Expired);
    until("the heir counts the holder", || heir.exports() == (1, 0, 1));
    third.assert_value(&third.runtime.open_shared::<u32>(&ticket).unwrap(), 8);
    // The heir counts it first. The holder knows that once it has read the answer.
    until("the holder knows its heir", || holder.tell("held").starts_with("Released,Owned"));
    holder.kill();
    drop((kept, buffer));
    until("it is released", || heir.exports() == (0, 0, 0));
    for exporter in [heir, third, owner] {
        exporter.end();
    }
}

#[test]
fn in_a_directory_the_file_goes_to_the_heir_and_the_secret_stays() {
    let folder = std::env::temp_dir().join(format!("test-of-hand-over-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let path: &'static std::path::Path = Box::leak(folder.clone().into_boxed_path());
    let files = || std::fs::read_dir(path).unwrap().count();
    let new = || runtime(Rendezvous::Directory(path), Openers::Secret);
    let (owner, heir, third) = (new(), new(), new());
    let (buffer, ticket) = owner.make_shared(1000, 7);
    let kept = heir.open_as_heir(&ticket).unwrap();
    owner.runtime.hand_over(LIMIT).unwrap();
    drop((buffer, owner));
    assert_eq!(files(), 1);
    assert_eq!(third.refusal(&crate::hostile::forged(&ticket, |bytes| bytes[112] ^= 1)), ErrorKind::PermissionDenied);
    third.assert_value(&third.runtime.open_shared::<u32>(&ticket).unwrap(), 7);
    drop(kept);
    heir.end();
    third.end();
    assert_eq!(files(), 0, "files were left");
    std::fs::remove_dir(path).unwrap();
}

/// A stopped owner has handed over or not: its importers need no answer of it once it has.
#[test]
fn an_owner_that_is_stopped_after_the_hand_over_delays_nobody() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    let (mut owner, ticket) = owner(7);
    let kept = heir.open_as_heir(&ticket).unwrap();
    owner.tell("hand-over 60000");
    owner.signal(Signal::STOP);
    until("the heir answers", || heir.exports().0 == 1);
    let started = std::time::Instant::now();
    let opened = third.runtime.open_shared::<u32>(&ticket).unwrap();
    assert!(started.elapsed() < Duration::from_secs(1));
    third.assert_value(&opened, 7);
    assert!(kept.owner().is_none(), "this process owns it");
    owner.kill();
    drop((opened, kept));
    until("it is released", || heir.exports() == (0, 0, 0));
    heir.end();
    third.end();
}

/// Failed before: the importer noted the mapping and slept. No later event came, because it does not wait for a former owner.
#[test]
fn a_hand_over_unmaps_memory_that_no_buffer_has_open() {
    let (owner, heir, third) = (Exporter::new(), Exporter::new(), Exporter::new());
    let (buffer, ticket) = owner.make_shared(1000, 7);
    let kept = heir.open_as_heir(&ticket).unwrap();
    drop(third.runtime.open_shared::<u32>(&ticket).unwrap());
    assert_eq!(third.runtime.statistics().sharing.mappings, 1);
    owner.runtime.hand_over(LIMIT).unwrap();
    until("nothing is mapped", || third.runtime.statistics().sharing.mappings == 0);
    heir.assert_value(&kept, 7);
    drop((buffer, kept));
    for exporter in [heir, third, owner] {
        exporter.end();
    }
}

/// Failed before: the open succeeded, and the memory had no heir. The tickets ended with the heir, though the former owner had the memory.
#[test]
fn an_owner_that_has_handed_its_memory_over_does_not_inherit_it_again() {
    let (owner, heir) = (Exporter::new(), Exporter::new());
    let (buffer, ticket) = owner.make_shared(1000, 7);
    let pages = owner.runtime.pinned_shared::<u32>(1000).unwrap();
    let of_pages = pages.share().unwrap();
    let batch = owner.runtime.share_all(&[(&buffer).into()]).unwrap();
    let inherit = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
    drop(owner.open_as_heir(&ticket).unwrap());
    let kept = heir.open_as_heir(&ticket).unwrap();
    let kept_pages = heir.runtime.open_pinned_with::<u32>(&of_pages, &inherit).unwrap();
    owner.runtime.hand_over(LIMIT).unwrap();
    let errors = [
        owner.open_as_heir(&ticket).map(drop).unwrap_err(),
        owner.runtime.open_shared_all_with::<u32>(&batch, &inherit).map(drop).unwrap_err(),
        owner.runtime.open_pinned_with::<u32>(&of_pages, &inherit).map(drop).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
        assert!(error.message().contains("handed the memory of this ticket over"), "{error}");
    }
    owner.assert_value(&owner.runtime.open_shared::<u32>(&ticket).unwrap(), 7);
    drop((buffer, pages, kept, kept_pages));
    for exporter in [heir, owner] {
        exporter.end();
    }
}

/// An owner that has handed its memory over to an heir, while an importer was stopped. The importer releases the memory when the heir dies.
fn handed_over(value: u32) -> (Peer, Peer, Peer) {
    let (mut owner, ticket) = owner(value);
    let (mut heir, mut importer) = (Peer::start(), Peer::start());
    heir.tell(&format!("open-heir a {ticket}"));
    importer.tell(&format!("open-release a {ticket}"));
    importer.signal(Signal::STOP);
    owner.tell("hand-over 60000");
    until("the heir has it", || heir.exports().0 == 1);
    (owner, heir, importer)
}

/// At once, because both mostly wait.
#[test]
fn an_heir_that_is_silent_for_long_is_alive() {
    std::thread::scope(|scope| {
        scope.spawn(an_heir_that_does_not_answer_for_long_is_alive);
        scope.spawn(an_importer_without_a_connection_knows_whether_the_heir_lives);
    });
}

/// Failed before: the importer took the heir for dead after 5 seconds without an answer.
fn an_heir_that_does_not_answer_for_long_is_alive() {
    let mut rounds: Vec<_> = ["stop", "close-sockets", "cut-sockets"].map(|how| (how, handed_over(7))).into();
    for (how, (_, heir, importer)) in &mut rounds {
        if *how == "stop" {
            heir.signal(Signal::STOP);
        } else {
            heir.tell(how);
        }
        importer.signal(Signal::CONT);
    }
    std::thread::sleep(Duration::from_millis(5500));
    for (how, (owner, mut heir, mut importer)) in rounds {
        assert_eq!(importer.ask("read a"), "7", "{how}");
        if how == "stop" {
            heir.signal(Signal::CONT);
            until("the importer is counted", || heir.exports() == (1, 1));
        }
        heir.kill();
        until("the memory has gone with the heir", || importer.ask("read a").starts_with("error Expired"));
        owner.kill();
        importer.kill();
    }
}

/// Failed before: the importer took the heir for dead after 5 seconds. The name of the heir cannot arrive over a connection that was cut, and
/// an importer without descriptors cannot find the heir.
fn an_importer_without_a_connection_knows_whether_the_heir_lives() {
    let round = |lacks_descriptors: bool| {
        let (mut owner, ticket) = owner(7);
        let (mut heir, mut importer) = (Peer::start(), Peer::start());
        heir.tell(&format!("open-heir a {ticket}"));
        importer.tell(&format!("open-release a {ticket}"));
        assert_eq!(importer.tell("read a"), "7");
        importer.tell("cut-sockets");
        if lacks_descriptors {
            importer.tell("use-descriptors");
        }
        importer.signal(Signal::STOP);
        owner.tell("hand-over 60000");
        until("the heir has it", || heir.exports().0 == 1);
        heir.tell("close-sockets");
        owner.kill();
        importer.signal(Signal::CONT);
        (heir, importer, lacks_descriptors)
    };
    let rounds = [round(false), round(true)];
    std::thread::sleep(Duration::from_millis(6500));
    for (heir, mut importer, lacks_descriptors) in rounds {
        assert_eq!(importer.ask("read a"), "7", "without descriptors: {lacks_descriptors}");
        if lacks_descriptors {
            importer.tell("free-descriptors");
        }
        heir.kill();
        let killed = std::time::Instant::now();
        until("the memory has gone with the heir", || importer.ask("read a").starts_with("error Expired"));
        assert!(lacks_descriptors || killed.elapsed() < Duration::from_secs(4), "{:?}", killed.elapsed());
        importer.kill();
    }
}

/// Failed before: the importer knew only after 5 seconds that no heir comes.
#[test]
fn an_importer_knows_the_death_of_an_heir_that_has_not_counted_it() {
    let (owner, heir, mut importer) = handed_over(7);
    let pid = heir.pid();
    heir.kill();
    importer.signal(Signal::CONT);
    let started = std::time::Instant::now();
    let mut refused = String::new();
    until("the memory has gone with the heir", || {
        refused = importer.ask("read a");
        refused.starts_with("error Expired")
    });
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(refused.contains("heir of") || refused.contains(&format!("process {pid}")), "{refused}");
    owner.kill();
    importer.kill();
}
