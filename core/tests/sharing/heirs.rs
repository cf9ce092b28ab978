//! Heirs: memory that outlives its owner, and tickets that stay valid.

use std::path::Path;
use std::time::{Duration, Instant};

use highwater_core::ipc::{HeldState, Holder, HolderState};
use highwater_core::{
    Backend as _, DeviceBuffer, ErrorKind, ImportOptions, Openers, OwnerDeath, Rendezvous, Result, Runtime,
    RuntimeOptions, SharingOptions, Ticket, TicketBatch,
};
use highwater_mock::{MockGpu, MockOptions};
use rustix::event::Timespec;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::Signal;

use crate::Exporter;
use crate::hostile::{forged, listen, welcome};
use crate::peer::{Peer, until};

impl Exporter {
    pub(crate) fn open_as_heir(&self, ticket: &Ticket) -> Result<DeviceBuffer<u32>> {
        self.runtime.open_shared_with(ticket, &ImportOptions::new().with_owner_death(OwnerDeath::Inherit))
    }

    /// The shared allocations, those in limbo, and the importers.
    pub(crate) fn exports(&self) -> (u64, u64, u64) {
        let sharing = self.runtime.statistics().sharing;
        (sharing.exported_blocks, sharing.limbo_blocks, sharing.peers)
    }

    /// Opens a ticket as soon as somebody answers it.
    #[track_caller]
    pub(crate) fn open_in_time(&self, ticket: &Ticket) -> DeviceBuffer<u32> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match self.runtime.open_shared(ticket) {
                Ok(buffer) => return buffer,
                Err(error) => assert!(error.kind() == ErrorKind::Expired && Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    #[track_caller]
    pub(crate) fn assert_value(&self, buffer: &DeviceBuffer<u32>, value: u32) {
        assert!(self.stream.download(buffer).unwrap().iter().all(|is| *is == value));
    }
}

/// An owner in another process, with an allocation of 1000 times this value.
fn owner(value: u32) -> (Peer, Ticket) {
    let mut owner = Peer::start();
    let ticket = owner.tell(&format!("make a 1000 {value}")).parse().unwrap();
    (owner, ticket)
}

#[test]
fn tickets_of_a_dead_owner_stay_valid_and_its_heir_frees_the_memory() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    let mut took = Vec::new();
    for value in 1..6 {
        let (owner, ticket) = owner(value);
        let kept = heir.open_as_heir(&ticket).unwrap();
        let known = third.runtime.open_shared::<u32>(&ticket).unwrap();
        owner.signal(Signal::KILL);
        let killed = Instant::now();
        // A process that never had it, and one that had it all the time.
        let mut stranger = Peer::start();
        until("a stranger opens an old ticket", || !stranger.ask(&format!("open a {ticket}")).starts_with("error"));
        took.push(killed.elapsed());
        assert_eq!(stranger.tell("read a"), value.to_string());
        owner.kill();
        until("the living importers are counted", || heir.exports() == (1, 0, 2));
        let again = third.open_in_time(&ticket);
        third.stream.fill(&again, 99).unwrap();
        third.assert_value(&known, 99);
        heir.assert_value(&kept, 99);
        // The heir itself opens the ticket, and shares the memory as before.
        let own = heir.runtime.open_shared::<u32>(&kept.share().unwrap()).unwrap();
        heir.assert_value(&own, 99);
        // This process owns it, so no death revokes it. Failed before: it was revoked at once.
        let options = ImportOptions::new().with_owner_death(OwnerDeath::Release);
        let released = heir.runtime.open_shared_with::<u32>(&ticket, &options).unwrap();
        heir.assert_value(&released, 99);
        assert_eq!(heir.runtime.statistics().sharing.mappings, 1);
        drop((released, own, kept));
        // Closed as by an owner: nobody opens it any more, and it waits for those that hold it.
        until("it is in limbo", || heir.exports().1 == 1);
        assert_eq!(Peer::start().ask(&format!("open a {ticket}")).split(' ').nth(1), Some("Expired"));
        third.assert_value(&again, 99);
        drop((known, again));
        assert_eq!(heir.exports().1, 1, "the stranger holds it");
        stranger.kill();
        until("the last one has released it", || heir.exports() == (0, 0, 0));
        until("nothing is mapped", || third.runtime.statistics().sharing.mappings == 0);
    }
    heir.end();
    third.end();
}

#[test]
fn one_of_several_heirs_answers_for_all_memory_and_the_next_one_follows_it() {
    let importer = Exporter::with(MockOptions::new().with_memory_bytes(1 << 30));
    let mut owner = Peer::start_with("memory=1GiB", |_| {});
    let common = owner.tell("make a 1000 7");
    // Each heir also has memory that no other one has. One has many parts.
    let mut tickets: Vec<String> = (0..3).map(|value| owner.tell(&format!("make b{value} 1000 {value}"))).collect();
    tickets.push(owner.tell("adopt many 40 3"));
    let start = |(value, ticket): (usize, &String)| {
        let mut heir = Peer::start_with("memory=1GiB", |_| {});
        heir.tell(&format!("open-heir a {common}"));
        heir.tell(&format!("open-heir b {ticket}"));
        (heir, value)
    };
    let mut heirs: Vec<_> = tickets.iter().enumerate().map(start).collect();
    owner.kill();
    let mut winners = Vec::new();
    while !heirs.is_empty() {
        // One answers for the common allocation and for one of each heir, and counts all others.
        let (blocks, others) = (heirs.len() + 1, heirs.len() - 1);
        let mut all: Vec<String> = Vec::new();
        until("one has inherited, and the others are registered", || {
            all = heirs.iter_mut().map(|(heir, _)| heir.tell("exports")).collect();
            all.contains(&format!("{blocks} 0 {others}"))
        });
        assert_eq!(all.iter().filter(|counts| *counts == "0 0 0").count(), others, "{all:?}");
        let winner = all.iter().position(|counts| *counts != "0 0 0").unwrap();
        for (value, ticket) in tickets.iter().enumerate() {
            let ticket = ticket.parse().unwrap();
            if winners.contains(&value) {
                // No process has it any more.
                until("it is lost", || importer.runtime.open_shared::<u32>(&ticket).is_err());
            } else {
                importer.assert_value(&importer.open_in_time(&ticket), value as u32);
            }
        }
        importer.assert_value(&importer.open_in_time(&common.parse().unwrap()), 7);
        let (heir, value) = heirs.swap_remove(winner);
        winners.push(value);
        heir.kill();
    }
    until("nobody answers", || importer.runtime.open_shared::<u32>(&common.parse().unwrap()).is_err());
    until("nothing is mapped", || importer.runtime.statistics().sharing.mappings == 0);
    importer.end();
}

/// Catches an heir that takes a cut connection, or a free name, for a death.
#[test]
fn an_owner_without_sockets_is_alive_and_has_no_heir() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    for how in ["cut-sockets", "close-sockets"] {
        let mut owner = Peer::start_with("latency=20ms", |_| {});
        let ticket: Ticket = owner.tell("make a 1000 7").parse().unwrap();
        let kept = heir.open_as_heir(&ticket).unwrap();
        owner.tell(how);
        let connections = rustix::event::poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
        assert_eq!(connections, Ok(0));
        // It works on the memory meanwhile.
        owner.tell("fill a 8 1000");
        assert_eq!((heir.exports(), third.refusal(&ticket)), ((0, 0, 0), ErrorKind::Expired), "{how}");
        assert!(kept.owner().unwrap().is_alive());
        owner.kill();
        let opened = third.open_in_time(&ticket);
        // Its work has ended: nothing changes what the heir's importers write.
        third.stream.fill(&opened, 9).unwrap();
        third.assert_value(&opened, 9);
        std::thread::sleep(Duration::from_millis(50));
        heir.assert_value(&kept, 9);
        drop((kept, opened));
        until("it is released", || heir.exports() == (0, 0, 0));
    }
    heir.end();
    third.end();
}

/// Catches an heir that follows another one as soon as the name is free. A process that ends loses its sockets before its device work has
/// ended, so this process only looks as if it ended.
#[test]
fn the_next_heir_waits_until_the_process_of_the_first_has_ended() {
    let third = Exporter::new();
    let (owner, ticket) = owner(7);
    let mut heir = Peer::start();
    heir.tell(&format!("open-heir a {ticket}"));
    heir.signal(Signal::STOP);
    owner.kill();
    // This process is the first heir.
    let answer_as_heir = || {
        let listener = listen(&ticket);
        heir.signal(Signal::CONT);
        let connection = rustix::net::accept(&listener).unwrap();
        let mut message = [0; 2000];
        let mut hear = || rustix::net::recv(&connection, &mut message[..], RecvFlags::empty()).unwrap().1;
        assert!(hear() > 0, "it greets");
        let welcome = welcome(&ticket.to_bytes()[32..48], true);
        rustix::net::send(&connection, &welcome, SendFlags::NOSIGNAL).unwrap();
        assert!(hear() > 0, "it registers");
    };
    for _ in 0..2 {
        // The second time, the name must be free: the heir has not taken it, and looks for the one that answers.
        answer_as_heir();
        let nothing = rustix::event::poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
        assert_eq!((nothing, third.refusal(&ticket)), (Ok(0), ErrorKind::Expired));
    }
    assert_eq!(heir.tell("exports"), "0 0 0");
    heir.kill();
    third.end();
}

/// Failed before: the thread that looked for an heir kept its connection after the end, and what the runtime had made.
#[test]
fn the_end_of_a_runtime_or_a_holder_ends_the_search_for_an_heir() {
    for command in ["open a", "open-heir a", "hold"] {
        let end = || {
            let (owner, ticket) = owner(7);
            let mut importer = Peer::start();
            importer.tell(&format!("{command} {ticket}"));
            importer.signal(Signal::STOP);
            owner.kill();
            // This process has the name, and answers nothing. The search waits for a second at a time.
            let listener = listen(&ticket);
            importer.signal(Signal::CONT);
            let _connection = rustix::net::accept(&listener).unwrap();
            let ended = importer.tell("close");
            importer.kill();
            let (sockets, took) = ended.split_once(' ').unwrap();
            assert_eq!(sockets, "0", "{command}");
            took.parse::<u64>().unwrap()
        };
        // Other work on the machine may delay one of them.
        assert!((0..5).any(|_| end() < 400), "{command}: the end waits for the answer to the search");
    }
}

/// Catches a refused `close` that leaves the memory without a search, and so without an heir.
#[test]
fn a_search_goes_on_after_a_refused_close() {
    let third = Exporter::new();
    let (owner, ticket) = owner(7);
    let mut heir = Peer::start();
    heir.tell(&format!("open-heir a {ticket}"));
    let opened = third.runtime.open_shared::<u32>(&ticket).unwrap();
    heir.signal(Signal::STOP);
    owner.kill();
    // The search has no answer yet. The stopped heir has not taken the name.
    let listener = listen(&ticket);
    let connection = rustix::net::accept(&listener).unwrap();
    let error = third.runtime.clone().close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
    drop((connection, listener));
    heir.signal(Signal::CONT);
    until("the heir counts the importer", || heir.exports() == (1, 1));
    drop(opened);
    heir.kill();
    third.end();
}

/// The closure runs in the sharing thread, which the search does not wait for.
#[test]
fn a_closure_of_a_death_may_end_the_runtime_that_looks_for_an_heir() {
    let importer = Exporter::new();
    let (owner, ticket) = owner(7);
    let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
    let of_memory = opened.owner().unwrap();
    let gpu = importer.gpu.clone();
    let (began, has_begun) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel();
    let call = move || {
        has_begun.recv().unwrap();
        drop((opened, importer));
        end.send(()).unwrap();
    };
    let watch = of_memory.on_death(call).unwrap();
    owner.kill();
    let listener = listen(&ticket);
    let _connection = rustix::net::accept(&listener).unwrap();
    began.send(()).unwrap();
    ended.recv_timeout(Duration::from_secs(30)).expect("neither thread waits for the other");
    until("nothing is alive", || gpu.live_objects().total() == 0);
    drop(watch);
}

#[test]
fn a_share_whose_work_died_with_the_owner_stays_refused_and_earlier_ones_open() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    let mut owner = Peer::start_with("latency=20ms", |_| {});
    let done: Ticket = owner.tell("make a 1000 7").parse().unwrap();
    let kept = heir.open_as_heir(&done).unwrap();
    owner.tell("fill a 8 1000");
    let pending: Ticket = owner.tell("share a").parse().unwrap();
    owner.kill();
    drop(third.open_in_time(&done));
    let error = third.runtime.open_shared::<u32>(&pending).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired);
    assert!(error.message().contains("before its device work of this share was done"), "{error}");
    drop(kept);
    until("it is released", || heir.exports() == (0, 0, 0));
    heir.end();
    third.end();
}

#[test]
fn memory_without_descriptors_and_owners_without_a_name_have_no_heir() {
    let (owner, heir) = (Exporter::new(), Exporter::new());
    let (buffer, ticket) = owner.make_shared(1000, 7);
    let legacy = forged(&ticket, |bytes| bytes[12] = 0);
    let error = heir.open_as_heir(&legacy).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("Legacy") && error.hint().contains("Transport::Descriptor"), "{error}");
    let at_descriptor = forged(&ticket, |bytes| bytes[8] |= 128);
    let error = heir.open_as_heir(&at_descriptor).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("inherited descriptor") && error.hint().contains("rendezvous"), "{error}");
    let in_directory = forged(&ticket, |bytes| bytes[8] |= 64);
    let error = heir.open_as_heir(&in_directory).unwrap_err();
    assert_eq!((error.kind(), heir.runtime.statistics().sharing.mappings), (ErrorKind::InvalidArgument, 0), "{error}");
    heir.end();
    owner.end_after(buffer);
}

#[test]
fn a_batch_is_inherited_with_all_its_allocations() {
    let (heir, third) = (Exporter::new(), Exporter::new());
    let mut owner = Peer::start();
    let batch: TicketBatch = owner.tell("make-batch a 40 100 6").parse().unwrap();
    let options = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
    let kept = heir.runtime.open_shared_all_with::<u32>(&batch, &options).unwrap();
    owner.kill();
    until("the heir has all", || heir.exports().0 == 40);
    let opened = third.runtime.open_shared_all::<u32>(&batch).unwrap();
    opened.iter().for_each(|buffer| third.assert_value(buffer, 6));
    drop(kept);
    until("all wait for the importer", || heir.exports() == (40, 40, 1));
    drop(opened);
    until("all are released", || heir.exports() == (0, 0, 0));
    heir.end();
    third.end();
}

/// A runtime with options of sharing.
pub(crate) fn runtime(rendezvous: Rendezvous, openers: Openers) -> Exporter {
    let sharing = SharingOptions::new().with_rendezvous(rendezvous).with_openers(openers);
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_sharing(sharing)).unwrap();
    let device = runtime.device(0).unwrap();
    let (stream, free) = (device.create_stream().unwrap(), device.memory_info().unwrap().free);
    Exporter { gpu, runtime, stream, free }
}

#[test]
fn heirs_in_a_directory_replace_the_file_and_know_the_secret() {
    let folder = std::env::temp_dir().join(format!("test-of-heirs-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let path: &'static Path = Box::leak(folder.clone().into_boxed_path());
    let files = || std::fs::read_dir(path).unwrap().count();
    let sharing = format!("rendezvous=directory:{},openers=secret", path.display());
    let start = || {
        Peer::start_with("", |command| {
            command.env("HIGHWATER_SHARING", &sharing);
        })
    };
    let importer = runtime(Rendezvous::Directory(path), Openers::Secret);
    let mut owner = start();
    let text = owner.tell("make a 1000 7");
    let ticket: Ticket = text.parse().unwrap();
    assert!(ticket.has_secret());
    let mut heirs = [start(), start(), start()];
    heirs.iter_mut().for_each(|heir| drop(heir.tell(&format!("open-heir a {text}"))));
    owner.kill();
    let opened = importer.open_in_time(&ticket);
    importer.assert_value(&opened, 7);
    assert_eq!(files(), 1, "the heir's, in place of the owner's");
    let without_secret = forged(&ticket, |bytes| {
        bytes[8] &= !32;
        bytes[112..128].fill(0);
    });
    let stranger = runtime(Rendezvous::Directory(path), Openers::Secret);
    assert_eq!(stranger.refusal(&forged(&ticket, |bytes| bytes[112] ^= 1)), ErrorKind::PermissionDenied);
    assert_eq!(stranger.refusal(&without_secret), ErrorKind::PermissionDenied);
    drop(opened);
    for heir in heirs {
        assert!(heir.quit().success());
    }
    importer.end();
    stranger.end();
    assert_eq!(files(), 0, "files were left");
    std::fs::remove_dir(path).unwrap();
}

#[test]
fn holders_without_a_device_answer_one_after_the_other() {
    let importer = Exporter::new();
    let (mut owner, ticket) = owner(7);
    let pinned: Ticket = owner.tell("pinned-make p 1000 9").parse().unwrap();
    let mut holders = vec![Peer::start(), Peer::start()];
    for holder in &mut holders {
        assert_eq!(holder.tell(&format!("hold {ticket}")), "held");
        assert_eq!(holder.tell(&format!("hold {pinned}")), "held");
        assert_eq!(holder.tell(&format!("hold {ticket}")), "held");
        let owned = format!("Owned {{ pid: Some({}) }}", owner.pid());
        assert_eq!(holder.tell("held"), format!("{owned},{owned}"));
    }
    owner.kill();
    while !holders.is_empty() {
        let mut states: Vec<String> = Vec::new();
        until("one holder answers, and the other one knows it", || {
            states = holders.iter_mut().map(|holder| holder.tell("held")).collect();
            let owned = states.iter().filter(|state| state.matches("Owned").count() == 2).count();
            states.contains(&"Inherited,Inherited".to_owned()) && owned == states.len() - 1
        });
        let winner = states.iter().position(|state| state == "Inherited,Inherited").unwrap();
        let mut stranger = Peer::start();
        until("a stranger opens it", || !stranger.ask(&format!("open a {ticket}")).starts_with("error"));
        assert_eq!(stranger.tell("read a"), "7");
        stranger.tell(&format!("pinned-open p {pinned}"));
        assert_eq!(stranger.tell("pinned-read p"), "9");
        holders.swap_remove(winner).kill();
        stranger.kill();
    }
    until("nobody answers", || importer.runtime.open_shared::<u32>(&ticket).is_err());
    importer.end();
}

#[test]
fn a_holder_lets_go_what_a_live_owner_drops_and_ends_without_a_trace() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 7);
    let (other, other_ticket) = exporter.make_shared(1000, 8);
    let mut holder = Peer::start();
    holder.tell(&format!("hold {ticket}"));
    holder.tell(&format!("hold {other_ticket}"));
    assert_eq!(exporter.exports(), (2, 0, 1));
    drop(buffer);
    let owned = format!("Owned {{ pid: Some({}) }}", std::process::id());
    until("it is released", || holder.tell("held") == format!("Released,{owned}"));
    until("the exporter has it back", || exporter.exports().0 == 1);
    // Failed before: the holder kept the descriptor until its end.
    until("its descriptor is closed", || descriptors_of_blocks(holder.pid()) == 1);
    holder.tell("end-holder");
    drop(other);
    exporter.end_once_all_is_back();
    assert!(holder.quit().success());
}

/// The descriptors of memory that a process has.
fn descriptors_of_blocks(pid: u32) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("highwater-mock-block")).count()
}

/// Failed before: the open of the slower thread was never released.
#[test]
fn threads_that_hold_one_ticket_at_once_count_once() {
    let exporter = Exporter::new();
    let holder = Holder::new().unwrap();
    for _ in 0..30 {
        let (buffer, ticket) = exporter.make_shared(1000, 7);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| holder.hold(&ticket).unwrap());
            }
        });
        drop(buffer);
        until("the exporter has it back", || exporter.exports().0 == 0);
    }
    assert!(holder.held().iter().all(|held| held.state == HeldState::Released));
    drop(holder);
    exporter.end_once_all_is_back();
}

/// Failed before: the child waited for a thread that it does not have.
#[test]
fn a_forked_child_drops_its_copy_of_a_holder_at_once() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 7);
    let holder = Holder::new().unwrap();
    holder.hold(&ticket).unwrap();
    // SAFETY: the child drops one object, which must take no lock and allocate nothing, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // Failed before: the child used the connections of its parent.
        let is_forked =
            |error: Option<highwater_core::Error>| error.is_some_and(|error| error.kind() == ErrorKind::Forked);
        let is_refused =
            is_forked(holder.hold(&ticket).err()) && is_forked(holder.save().err()) && holder.held().is_empty();
        drop(holder);
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!is_refused)) };
    }
    let mut status = -1;
    let deadline = Instant::now() + Duration::from_secs(30);
    let has_ended = loop {
        // SAFETY: asks for the child made above.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            break true;
        }
        if Instant::now() > deadline {
            // SAFETY: ends the child made above, and waits for it.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            break false;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(has_ended && status == 0, "{status}");
    // That of this process holds on.
    assert_eq!(
        (holder.held()[0].state, exporter.exports()),
        (HeldState::Owned { pid: Some(std::process::id()) }, (1, 0, 1))
    );
    drop((holder, buffer));
    exporter.end_once_all_is_back();
}

#[test]
fn a_holder_continues_from_a_whole_state_and_refuses_any_other() {
    let exporter = Exporter::new();
    let (buffer, ticket) = exporter.make_shared(1000, 7);
    let holder = Holder::new().unwrap();
    holder.hold(&ticket).unwrap();
    let options = SharingOptions::new();
    let refused = |change: fn(&mut HolderState)| {
        let mut state = holder.save().unwrap();
        change(&mut state);
        let error = Holder::restore(state, &options).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        error.to_string()
    };
    assert!(refused(|state| state.bytes.truncate(100)).contains("not the state"));
    assert!(refused(|state| state.descriptors.retain(|(name, _)| !name.contains("-owner-"))).contains("-owner-"));
    assert!(refused(|state| state.descriptors.retain(|(name, _)| !name.ends_with("-1-0"))).contains("-1-0`"));
    let error = refused(|state| {
        let null = || std::fs::File::open("/dev/null").unwrap().into();
        state.descriptors.iter_mut().for_each(|(_, descriptor)| *descriptor = null());
    });
    assert!(error.contains("no pidfd"), "{error}");
    let state = holder.save().unwrap();
    drop(holder);
    let next = Holder::restore(state, &options).unwrap();
    until("the owner counts it", || next.held()[0].state == HeldState::Owned { pid: Some(std::process::id()) });
    assert_eq!(exporter.exports(), (1, 0, 1));
    drop(buffer);
    until("it is released", || next.held()[0].state == HeldState::Released);
    drop(next);
    exporter.end_once_all_is_back();
}

/// Failed before: only a holder could keep page-locked memory beyond its owner.
#[test]
fn an_importer_inherits_page_locked_memory_as_it_does_device_memory() {
    let heir = Exporter::new();
    let open = |ticket: &Ticket, death| {
        heir.runtime.open_pinned_with::<u32>(ticket, &ImportOptions::new().with_owner_death(death))
    };
    for hands_over in [false, true] {
        let mut owner = Peer::start();
        let pages: Ticket = owner.tell("pinned-make p 1000 7").parse().unwrap();
        let tensor: Ticket = owner.tell("make a 1000 8").parse().unwrap();
        let error = open(&pages, OwnerDeath::Release).map(drop).unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.hint().contains("OwnerDeath::Inherit"), "{error}");
        // A buffer of before is the same memory, and is kept with it.
        let plain = heir.runtime.open_pinned::<u32>(&pages).unwrap();
        let kept = open(&pages, OwnerDeath::Inherit).unwrap();
        assert_eq!(kept.ptr(), plain.ptr());
        drop(plain);
        let kept_tensor = heir.open_as_heir(&tensor).unwrap();
        let mut early = Peer::start();
        early.tell(&format!("pinned-open p {pages}"));
        if hands_over {
            owner.tell("hand-over 60000");
        }
        owner.kill();
        let mut stranger = Peer::start();
        let opens = |peer: &mut Peer| !peer.ask(&format!("pinned-open p {pages}")).starts_with("error");
        until("a stranger opens an old ticket", || opens(&mut stranger));
        assert_eq!((stranger.tell("pinned-read p"), early.tell("pinned-read p")), ("7".to_owned(), "7".to_owned()));
        assert_eq!(kept.read().unwrap(), [7; 1000]);
        until("both are counted", || heir.exports() == (2, 0, 2));
        drop((kept, kept_tensor));
        until("it is in limbo", || heir.exports().1 == 1);
        assert!(Peer::start().ask(&format!("pinned-open p {pages}")).contains("Expired"));
        early.kill();
        stranger.kill();
        until("nothing is left", || heir.exports() == (0, 0, 0));
    }
    heir.end();
}
