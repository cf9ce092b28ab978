//! Owners that die: what an importer keeps, what it releases, and how it learns of the death.

use std::any::Any;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use highwater_core::{
    Access, Answer, Backend, BackendLayer, Call, CaptureMode, DeviceBuffer, Error, ErrorKind, GemmShape, ImportOptions,
    Owner, OwnerDeath, Result, Runtime, Ticket, TicketBatch,
};
use highwater_mock::{MockGpu, MockOptions};
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use crate::Exporter;
use crate::peer::{Peer, until};

fn release() -> ImportOptions {
    ImportOptions::new().with_owner_death(OwnerDeath::Release)
}

impl Exporter {
    fn open_to_release(&self, ticket: &str) -> DeviceBuffer<u32> {
        self.runtime.open_shared_with(&ticket.parse::<Ticket>().unwrap(), &release()).unwrap()
    }

    /// The allocations of others that are mapped here, and the buffers' counts of them.
    fn mapped(&self) -> (u64, u64, u64) {
        let sharing = self.runtime.statistics().sharing;
        (sharing.mappings, sharing.mapped_bytes, sharing.imports)
    }
}

fn owner_of(buffer: &DeviceBuffer<u32>) -> Owner {
    buffer.owner().expect("another process made it")
}

#[track_caller]
fn assert_expired<T>(result: Result<T>) {
    let error: Error = result.err().expect("the memory was released");
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    assert!(error.message().contains("has died") && error.hint().contains("OwnerDeath::Keep"), "{error}");
}

/// A thread that this one traces, so that its process does not end before [`Traced::leave`].
struct Traced(i32);

impl Traced {
    /// Traces the youngest thread of a process.
    fn of(process: u32) -> Self {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let thread: Option<i32> =
            threads.map(|thread| thread.unwrap().file_name().to_str().unwrap().parse().unwrap()).max();
        let thread = thread.unwrap();
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: The call reads and writes no memory of this process.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, nothing, nothing) }, 0);
        Self(thread)
    }

    /// Waits for the end of the thread. Until then, the process does not end.
    fn leave(self) {
        let mut status = 0;
        // SAFETY: Waits for the thread, and writes its status.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) }, self.0);
    }
}

/// The kernel takes a killed process apart before it reports the end.
#[test]
fn memory_of_a_killed_owner_is_released_before_its_process_has_ended() {
    let this = rustix::process::getpid();
    let thread = rustix::process::PidfdFlags::from_bits_retain(libc::O_EXCL as u32);
    if rustix::process::pidfd_open(this, thread).is_err() {
        eprintln!("skipped: before Linux 6.9, the kernel does not report the end of a thread");
        return;
    }
    let importer = Exporter::new();
    let mut peer = Peer::start();
    peer.tell("threads");
    let tickets = [(); 2].map(|()| peer.tell("make a 4096 7"));
    let kept: DeviceBuffer<u32> = importer.runtime.open_shared(&tickets[0].parse().unwrap()).unwrap();
    let idle = importer.open_to_release(&tickets[1]);
    let third = peer.tell("make b 4096 8");
    let released = importer.open_to_release(&third);
    drop(idle);
    let owner = owner_of(&released);
    // The end of a thread is not that of the process.
    peer.tell("end-thread");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(importer.mapped().0, 3);
    assert!(owner.is_alive());
    importer.stream.fill(&released, 8).unwrap();
    let traced = Traced::of(peer.pid());
    peer.signal(Signal::KILL);
    until("it is released", || importer.mapped() == (1, 4096 * 4, 1));
    assert_expired(importer.stream.fill(&released, 3));
    assert!(!owner.is_alive() && !owner.wait(Duration::ZERO).unwrap(), "the process has ended");
    // So is what is opened after that.
    let again = importer.open_to_release(&tickets[0]);
    assert_expired(importer.stream.fill(&again, 3));
    traced.leave();
    assert!(owner.wait(Duration::from_secs(60)).unwrap());
    // Memory that this process keeps stays usable.
    assert_eq!(importer.stream.download(&kept).unwrap(), [7; 4096]);
    peer.wait();
    importer.end_after((kept, released, again));
}

#[test]
fn memory_of_a_dead_owner_is_released_though_the_program_holds_its_buffers() {
    let importer = Exporter::with(MockOptions::new().with_checks());
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 4096 7");
    let first = importer.open_to_release(&ticket);
    let second = importer.open_to_release(&ticket);
    let other = importer.make(4096, 1);
    let mut graph = importer.stream.capture(|stream| stream.copy(&first, &other)).unwrap();
    graph.launch(&importer.stream).unwrap();
    assert_eq!(importer.stream.download(&second).unwrap(), [7; 4096]);
    assert_eq!(importer.mapped(), (1, 4096 * 4, 2));
    peer.kill();
    until("it is released", || importer.mapped() == (0, 0, 0));
    // The buffers are still here, and nothing can be done with them.
    let stream = &importer.stream;
    for buffer in [&first, &second] {
        assert_expired(stream.fill(buffer, 3));
        assert_expired(stream.fill_zero(buffer));
        assert_expired(stream.download(buffer));
        assert_expired(stream.write(&[3; 4096], buffer));
        assert_expired(stream.copy(buffer, &other));
        assert_expired(stream.copy(&other, buffer));
        assert_expired(stream.note_device_use(buffer, Access::Read));
        assert_expired(stream.capture(|stream| stream.fill(buffer, 3)));
        assert_expired(buffer.share());
        assert_eq!(buffer.len(), 4096);
    }
    assert_expired(graph.launch(stream));
    let pinned = importer.runtime.pinned::<u32>(4096).unwrap();
    assert_expired(stream.copy_to_device(&pinned, &first));
    // The stream goes on.
    assert_eq!(stream.download(&other).unwrap(), [7; 4096]);
    // The end of the buffers releases nothing twice.
    drop((first, graph, pinned));
    assert_eq!(importer.mapped(), (0, 0, 0));
    drop(second);
    // The end of the process comes after the release.
    until("it has ended", || importer.runtime.statistics().sharing.lost_exporters == 1);
    assert_eq!(importer.mapped(), (0, 0, 0));
    assert_eq!(importer.gpu.violations(), []);
    importer.end_after(other);
}

#[test]
fn products_with_memory_of_a_dead_owner_are_refused() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 64 0");
    let ticket: Ticket = ticket.parse().unwrap();
    let factor = importer.runtime.open_shared_with::<f32>(&ticket, &release()).unwrap();
    let stream = importer.stream.clone();
    let (identity, result) = (stream.upload(&[1.0_f32; 64]).unwrap(), stream.upload(&[2.0_f32; 64]).unwrap());
    let shape = GemmShape::of::<f32>(8, 8, 8);
    let multiply = || stream.blas()?.gemm(&shape, 1.0, &factor, &identity, 0.0, &result);
    multiply().unwrap();
    // A second one takes the short way, if any does.
    multiply().unwrap();
    assert_eq!(stream.download(&result).unwrap(), [0.0; 64]);
    peer.kill();
    until("it is released", || importer.mapped() == (0, 0, 0));
    assert_expired(multiply());
    importer.end_after((factor, identity, result, stream));
}

#[test]
fn memory_is_kept_without_the_option_and_beside_it() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 1000 7");
    let kept = importer.runtime.open_shared::<u32>(&ticket.parse().unwrap()).unwrap();
    let released = importer.open_to_release(&ticket);
    assert_eq!(importer.mapped(), (1, 4000, 2));
    peer.kill();
    until("one is released", || importer.mapped() == (1, 4000, 1));
    assert_expired(importer.stream.download(&released));
    assert_eq!(importer.stream.download(&kept).unwrap(), [7; 1000]);
    assert!(!owner_of(&kept).is_alive());
    drop(kept);
    until("both are released", || importer.mapped() == (0, 0, 0));
    importer.end_after(released);
}

#[test]
fn queued_work_ends_before_the_memory_is_unmapped() {
    let importer = Exporter::with(MockOptions::new().with_latency(Duration::from_millis(20)).with_checks());
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 1000 7");
    let buffer = importer.open_to_release(&ticket);
    let result = importer.runtime.device(0).unwrap().allocate::<u32>(1000).unwrap();
    let others: Vec<_> = (0..3).map(|_| importer.runtime.device(0).unwrap().create_stream().unwrap()).collect();
    importer.stream.synchronize().unwrap();
    for stream in &others {
        (0..15).for_each(|_| stream.fill(&buffer, 9).unwrap());
    }
    importer.stream.copy(&buffer, &result).unwrap();
    let owner = owner_of(&buffer);
    peer.kill();
    assert!(owner.wait(Duration::from_secs(60)).unwrap());
    until("later work is refused", || importer.stream.fill(&buffer, 1).is_err());
    // 300 ms of work are queued on each stream.
    assert_eq!(importer.mapped(), (1, 4000, 1));
    until("it is released", || importer.mapped() == (0, 0, 0));
    assert!(others.iter().all(|stream| stream.is_complete().unwrap()));
    let values = importer.stream.download(&result).unwrap();
    assert!(values.iter().all(|value| [7, 9].contains(value)), "{values:?}");
    assert_eq!(importer.gpu.violations(), []);
    importer.end_after((buffer, result, others));
}

#[test]
fn threads_that_use_the_memory_at_the_death_find_it_or_an_error() {
    for round in 0..8 {
        let importer = Exporter::with(MockOptions::new().with_latency(Duration::from_micros(30)).with_checks());
        let mut peer = Peer::start();
        let ticket = peer.tell("make a 256 5");
        let buffer = importer.open_to_release(&ticket);
        let uses = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let stream = importer.runtime.device(0).unwrap().create_stream().unwrap();
                    loop {
                        match stream.fill(&buffer, 5) {
                            Ok(()) => uses.fetch_add(1, Ordering::Relaxed),
                            refused => break assert_expired(refused),
                        };
                        if uses.load(Ordering::Relaxed).is_multiple_of(64) {
                            stream.synchronize().unwrap();
                        }
                    }
                });
            }
            until("the memory is in use", || uses.load(Ordering::Relaxed) > 64);
            std::thread::sleep(Duration::from_millis(round));
            peer.kill();
        });
        until("it is released", || importer.mapped() == (0, 0, 0));
        assert_eq!(importer.gpu.violations(), []);
        importer.end_after(buffer);
    }
}

#[test]
fn a_cut_connection_and_a_stopped_process_are_no_deaths() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 1000 7");
    let buffer = importer.open_to_release(&ticket);
    let owner = owner_of(&buffer);
    let called = Arc::new(AtomicBool::new(false));
    let call = Arc::clone(&called);
    let watch = owner.on_death(move || call.store(true, Ordering::Relaxed)).unwrap();
    assert_ne!(peer.tell("cut-sockets"), "0");
    peer.signal(Signal::STOP);
    assert!(!owner.wait(Duration::from_millis(300)).unwrap());
    assert!(owner.is_alive() && !called.load(Ordering::Relaxed));
    importer.runtime.trim().unwrap();
    assert_eq!(importer.mapped(), (1, 4000, 1));
    assert_eq!(importer.stream.download(&buffer).unwrap(), [7; 1000]);
    peer.signal(Signal::CONT);
    peer.kill();
    until("it is released", || importer.mapped() == (0, 0, 0));
    until("the call is made", || called.load(Ordering::Relaxed));
    assert_expired(importer.stream.fill(&buffer, 1));
    importer.end_after((buffer, watch));
}

#[test]
fn a_program_learns_of_the_death_in_each_way() {
    let importer = Exporter::new();
    let (own, ticket) = importer.make_shared(8, 1);
    let opened_here = importer.runtime.open_shared::<u32>(&ticket).unwrap();
    assert!(own.owner().is_none() && opened_here.owner().is_none());
    let mut peer = Peer::start();
    let tickets = [peer.tell("make a 1000 7"), peer.tell("make b 1000 8")];
    let [kept, released] =
        [importer.runtime.open_shared(&tickets[0].parse().unwrap()).unwrap(), importer.open_to_release(&tickets[1])];
    let owner = owner_of(&kept);
    assert_eq!((owner.pid(), owner_of(&released).pid()), (Some(peer.pid()), Some(peer.pid())));
    assert!(owner.is_alive() && !owner.wait(Duration::ZERO).unwrap());
    let (sender, calls) = std::sync::mpsc::channel();
    let released = Arc::new(released);
    let (in_call, stream) = (Arc::clone(&released), importer.stream.clone());
    let first = sender.clone();
    let watch = owner.on_death(move || first.send(("first", stream.fill(&*in_call, 1).is_err())).unwrap()).unwrap();
    let cancelled = sender.clone();
    drop(owner.on_death(move || cancelled.send(("cancelled", true)).unwrap()).unwrap());
    let panics = owner.on_death(|| panic!("a panic of the program")).unwrap();
    let readable = |owner: &Owner| {
        assert_eq!(owner.as_raw_fd(), owner.as_fd().as_raw_fd());
        let mut end = [PollFd::from_borrowed_fd(owner.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut end, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    assert!(!readable(&owner));
    assert_eq!(calls.recv_timeout(Duration::from_millis(50)).ok(), None);
    let waits = {
        let owner = owner.clone();
        std::thread::spawn(move || owner.wait(Duration::MAX).unwrap())
    };
    peer.kill();
    assert!(waits.join().unwrap());
    // Its memory was revoked before.
    assert_eq!(calls.recv_timeout(Duration::from_secs(60)).unwrap(), ("first", true));
    assert!(!owner.is_alive() && readable(&owner));
    // A dead owner calls at once, and the panic ended no thread.
    let late = owner.on_death(move || sender.send(("late", true)).unwrap()).unwrap();
    assert_eq!(calls.recv_timeout(Duration::from_secs(60)).unwrap(), ("late", true));
    assert_eq!(calls.recv_timeout(Duration::from_millis(50)).ok(), None);
    // The handle keeps no memory and outlives the runtime.
    drop((kept, released, own, opened_here, watch, panics, late));
    until("all is released", || importer.mapped() == (0, 0, 0));
    importer.end();
    assert!(owner.wait(Duration::ZERO).unwrap());
    assert_eq!(owner.on_death(|| ()).unwrap_err().kind(), ErrorKind::ShuttingDown);
}

#[test]
fn memory_whose_address_other_code_has_is_released_with_its_buffer() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket = peer.tell("make a 1000 7");
    let buffer = importer.open_to_release(&ticket);
    let other = importer.open_to_release(&peer.tell("make b 1000 8"));
    importer.stream.note_device_use(&buffer, Access::Write).unwrap();
    importer.stream.note_device_use(&importer.make(8, 1), Access::Write).unwrap();
    peer.kill();
    until("the other one is released", || importer.mapped() == (1, 4000, 1));
    // Its release would come at the same time.
    std::thread::sleep(Duration::from_millis(100));
    importer.runtime.trim().unwrap();
    assert_eq!(importer.mapped(), (1, 4000, 1));
    assert_expired(importer.stream.fill(&buffer, 1));
    drop((buffer, other));
    until("it is released", || importer.mapped() == (0, 0, 0));
    importer.end();
}

#[test]
fn a_capture_by_other_code_delays_the_release_until_it_ends() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let buffer = importer.open_to_release(&peer.tell("make a 1000 7"));
    let stream = importer.runtime.device(0).unwrap().create_stream().unwrap();
    stream.fill(&buffer, 9).unwrap();
    importer.gpu.begin_capture(stream.id(), CaptureMode::Relaxed).unwrap();
    let owner = owner_of(&buffer);
    peer.kill();
    assert!(owner.wait(Duration::from_secs(60)).unwrap());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(importer.mapped(), (1, 4000, 1));
    // SAFETY: the capture was begun above.
    let graph = unsafe { importer.gpu.end_capture(stream.id()) }.unwrap();
    importer.gpu.destroy_graph(graph).unwrap();
    until("it is released", || importer.mapped() == (0, 0, 0));
    importer.end_after((buffer, stream));
}

#[test]
fn batches_are_released_as_well() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let batch: TicketBatch = peer.tell("make-batch m 5 100 7").parse().unwrap();
    let buffers = importer.runtime.open_shared_all_with::<u32>(&batch, &release()).unwrap();
    assert_eq!(importer.mapped(), (5, 5 * 400, 5));
    assert_eq!(importer.stream.download(&buffers[3]).unwrap(), [7; 100]);
    peer.kill();
    until("all are released", || importer.mapped() == (0, 0, 0));
    buffers.iter().for_each(|buffer| assert_expired(importer.stream.download(buffer)));
    importer.end_after(buffers);
}

#[test]
fn owners_killed_one_after_the_other_leave_nothing_for_long() {
    const KILLS: usize = 25;
    let importer = Exporter::with(MockOptions::new().with_checks());
    let mut took = Vec::new();
    // All of them live at once, so each death concerns one of many.
    let mut peers: Vec<_> = (0..KILLS).map(|_| Peer::start()).collect();
    let buffers: Vec<_> = peers
        .iter_mut()
        .enumerate()
        .map(|(value, peer)| importer.open_to_release(&peer.tell(&format!("make a 1000 {value}"))))
        .collect();
    for (value, peer) in peers.into_iter().enumerate() {
        let left = (KILLS - value) as u64;
        assert_eq!(importer.mapped(), (left, left * 4000, left));
        importer.stream.fill(&buffers[value], 9).unwrap();
        peer.signal(Signal::KILL);
        let killed = Instant::now();
        until("it is released", || importer.mapped() == (left - 1, (left - 1) * 4000, left - 1));
        took.push(killed.elapsed());
        peer.kill();
        for (value, buffer) in buffers.iter().enumerate().skip(value + 1) {
            assert_eq!(importer.stream.download(buffer).unwrap(), vec![u32::try_from(value).unwrap(); 1000]);
        }
    }
    took.sort_unstable();
    // The median, because other tests take the processors.
    assert!(took[KILLS / 2] < Duration::from_millis(100), "{took:?}");
    assert_eq!(importer.gpu.violations(), []);
    importer.end_after(buffers);
}

/// The mock, whose fills wait in the call while the gate is closed.
#[derive(Debug)]
struct Gated {
    gpu: Arc<MockGpu>,
    is_closed: AtomicBool,
    waiting: AtomicU64,
}

// SAFETY: Each call is forwarded as it came.
unsafe impl BackendLayer for Gated {
    fn below(&self) -> &dyn Backend {
        &*self.gpu
    }

    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        if call.operation == "fill" && self.is_closed.load(Ordering::SeqCst) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            until("the gate is open", || !self.is_closed.load(Ordering::SeqCst));
        }
        forward(&*self.gpu)
    }
}

#[test]
fn a_call_that_waited_for_its_stream_finds_the_memory_revoked_and_delays_no_other_process() {
    let gpu = MockGpu::open(MockOptions::new().with_checks()).unwrap();
    let gated = Arc::new(Gated { gpu: gpu.clone(), is_closed: AtomicBool::new(false), waiting: AtomicU64::new(0) });
    let runtime = Runtime::new(Arc::clone(&gated) as Arc<dyn Backend>).unwrap();
    let device = runtime.device(0).unwrap();
    let (stream, free) = (device.create_stream().unwrap(), device.memory_info().unwrap().free);
    let importer = Exporter { gpu, runtime, stream, free };
    let (own, ticket) = importer.make_shared(100, 3);
    let (mut owner, mut other) = (Peer::start(), Peer::start());
    let buffer = importer.open_to_release(&owner.tell("make a 1000 7"));
    let (elsewhere, scratch) = (device.create_stream().unwrap(), device.allocate::<u32>(1000).unwrap());
    importer.stream.fill(&buffer, 8).unwrap();
    gated.is_closed.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        // The first call is in the vendor and holds the submission lock. The second one waits for it.
        let first = scope.spawn(|| importer.stream.fill(&own, 4));
        until("the first call is in the vendor", || gated.waiting.load(Ordering::SeqCst) == 1);
        let second = scope.spawn(|| importer.stream.fill(&buffer, 9));
        std::thread::sleep(Duration::from_millis(100));
        let death = owner_of(&buffer);
        owner.kill();
        assert!(death.wait(Duration::from_secs(60)).unwrap());
        // On another stream, which nothing holds.
        until("the memory is revoked", || elsewhere.copy(&buffer, &scratch).is_err());
        // The stream may still use it, and the sharing thread waits for nobody.
        assert_eq!(other.tell(&format!("open x {ticket}")), "100");
        assert_eq!(importer.mapped(), (1, 4000, 1));
        gated.is_closed.store(false, Ordering::SeqCst);
        first.join().unwrap().unwrap();
        assert_expired(second.join().unwrap());
    });
    until("it is released", || importer.mapped() == (0, 0, 0));
    assert_eq!(importer.gpu.violations(), []);
    drop(gated);
    assert!(other.quit().success());
    drop((own, buffer, elsewhere, scratch, device));
    importer.end_once_all_is_back();
}

/// Each sharing thread ends the runtime of the other one.
#[test]
fn two_closures_of_deaths_may_end_the_runtimes_of_each_other() {
    let importers = [Exporter::new(), Exporter::new()];
    let mut peer = Peer::start();
    let ticket: Ticket = peer.tell("make a 1000 7").parse().unwrap();
    let opened = importers.each_ref().map(|importer| importer.runtime.open_shared::<u32>(&ticket).unwrap());
    let owners = opened.each_ref().map(|opened| opened.owner().unwrap());
    let gpus = importers.each_ref().map(|importer| importer.gpu.clone());
    let barrier = Arc::new(Barrier::new(2));
    let (sender, ended) = channel();
    // The sharing thread of each owner's runtime gets the runtime of the other one.
    let ends = importers.into_iter().zip(opened).rev();
    let watches = owners.iter().zip(ends).map(|(owner, end)| {
        let (barrier, sender) = (Arc::clone(&barrier), sender.clone());
        let call = move || {
            barrier.wait();
            let (importer, opened) = end;
            drop((opened, importer));
            sender.send(()).unwrap();
        };
        owner.on_death(call).unwrap()
    });
    let watches: Vec<_> = watches.collect();
    peer.kill();
    for _ in 0..2 {
        ended.recv_timeout(Duration::from_secs(30)).expect("neither thread waits for the other");
    }
    drop(watches);
    until("nothing is alive", || gpus.iter().all(|gpu| gpu.live_objects().total() == 0));
}

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a panic of the program");
    }
}

#[test]
fn closures_that_panic_in_their_drop_do_not_disturb_the_end_of_the_runtime() {
    let importer = Exporter::new();
    let mut peer = Peer::start();
    let ticket: Ticket = peer.tell("make a 1000 7").parse().unwrap();
    let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
    let owner = opened.owner().unwrap();
    let flag = Arc::new(());
    let watches: Vec<_> = (0..2)
        .map(|_| {
            let values = (Bomb, Arc::clone(&flag));
            owner.on_death(move || drop(values)).unwrap()
        })
        .collect();
    assert_eq!(Arc::strong_count(&flag), 3);
    importer.end_after(opened);
    assert_eq!(Arc::strong_count(&flag), 1, "a closure stayed, or was dropped in part");
    drop(watches);
    assert!(owner.is_alive() && peer.quit().success());
}

/// The sharing thread of one runtime ends the other one, whose notifier ends the first.
#[test]
fn a_closure_of_a_death_and_one_of_a_wait_may_end_the_runtimes_of_each_other() {
    let (importer, other) =
        (Exporter::new(), Exporter::with(MockOptions::new().with_latency(Duration::from_millis(5))));
    let mut peer = Peer::start();
    let ticket: Ticket = peer.tell("make a 1000 7").parse().unwrap();
    let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
    let (owner, buffer) = (opened.owner().unwrap(), other.make(1000, 1));
    let done = other.stream.done();
    let gpus = [&importer, &other].map(|end| end.gpu.clone());
    let barrier = Arc::new(Barrier::new(2));
    let (sender, ended) = channel();
    let call = |owned: Box<dyn Any + Send>| {
        let (barrier, sender) = (Arc::clone(&barrier), sender.clone());
        move || {
            barrier.wait();
            drop(owned);
            sender.send(()).unwrap();
        }
    };
    let of_wait = call(Box::new((opened, importer)));
    let watch = owner.on_death(call(Box::new((buffer, other)))).unwrap();
    done.on_done(move |_| of_wait());
    peer.kill();
    for _ in 0..2 {
        ended.recv_timeout(Duration::from_secs(30)).expect("neither thread waits for the other");
    }
    drop(watch);
    until("nothing is alive", || gpus.iter().all(|gpu| gpu.live_objects().total() == 0));
}
