//! Memory that goes to a stand-in for PyTorch and comes from it, in another process, over the simulated CUDA. Either side is
//! killed in the middle.
//!
//! Each test runs again under `scripts/simulated.sh`. With `HIGHWATER_TEST_INSIDE=0`, the tests run over the driver that the
//! loader finds, a real one included.

mod stand_in;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use highwater_core::{CaptureMode, DeviceBuffer, ErrorKind, Runtime, Stream, Transport};
use highwater_pytorch::{Receiver, Sender, TorchStorage, open};
use highwater_simulated_harness::isolated;
use stand_in::{Gpu, Receives, Sends, TENSORS, Tuple, tensor};

const ROLE: &str = "HIGHWATER_TEST_ROLE";
/// Marks the lines of the protocol among those of the test program.
const MARK: &str = "> ";
const LIMIT: Duration = Duration::from_secs(20);

/// Runs a test again over the simulation. Returns the role of the process in that run, and `None` after it.
fn role(test: &str) -> Option<String> {
    if isolated::version().is_some() {
        return Some(std::env::var(ROLE).unwrap_or_default());
    }
    isolated::outside(test, &["cuda"], &[("HIGHWATER_MOCK", "devices=1")], None);
    None
}

/// The other process of a test.
struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(test: &str, role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ROLE, role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn write(&mut self, lines: &[String]) {
        let input = self.input.as_mut().unwrap();
        for line in lines {
            writeln!(input, "{line}").unwrap();
        }
        input.flush().unwrap();
    }

    fn read(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the other process has ended");
            // The test program writes the name of the test without an end of line.
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim_end().to_owned();
            }
        }
    }

    fn read_all(&mut self) -> Vec<String> {
        (0..TENSORS).map(|_| self.read()).collect()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn ends_well(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

fn say(line: &str) {
    println!("{MARK}{line}");
}

fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn runtime() -> (Runtime, Stream) {
    let runtime = Runtime::new(highwater_cuda::open().unwrap()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    (runtime, stream)
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn open_all(runtime: &Runtime, lines: &[String]) -> Vec<DeviceBuffer<u32>> {
    let device = runtime.device(0).unwrap();
    lines.iter().map(|line| open(&device, &line.parse().unwrap()).unwrap()).collect()
}

fn compare(stream: &Stream, opened: &[DeviceBuffer<u32>]) {
    assert_eq!(opened.len(), TENSORS);
    for (index, buffer) in opened.iter().enumerate() {
        let (values, value) = tensor(index);
        assert_eq!(stream.download(buffer).unwrap(), vec![value; values], "tensor {index}");
    }
}

/// Shares the tensors, in blocks of 20. Drops the blocks.
fn share_all(runtime: &Runtime, sender: &Sender, stream: &Stream, receiver: Option<&Receiver>) -> Vec<String> {
    let device = runtime.device(0).unwrap();
    let mut lines = Vec::new();
    for block in 0..TENSORS / 20 {
        let memory = device.allocate_shared_by::<u32>(20 * 128, Transport::Legacy).unwrap();
        for part in 0..20 {
            let (values, value) = tensor(20 * block + part);
            let slice = memory.slice(128 * part..128 * part + values).unwrap();
            stream.fill(slice, value).unwrap();
            let storage = match receiver {
                Some(receiver) => sender.share_with(slice, stream, receiver).unwrap(),
                None => sender.share(slice, stream).unwrap(),
            };
            assert_eq!((storage.handle.len(), storage.event_handle.len()), (64, 64));
            lines.push(storage.to_string());
        }
    }
    lines
}

fn files_of(process: u32) -> usize {
    let start = format!("highwater_torch_{process}_");
    let entries = std::fs::read_dir("/dev/shm").unwrap().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&start)).count()
}

/// The stand-in sends, and waits for its counts. At its end it reports the bytes that did not come back.
fn stand_in_sends(is_late: bool) {
    wait_for_release(Sends::all(is_late));
}

fn wait_for_release(sends: Sends) {
    sends.tuples.iter().for_each(|tuple| say(&tuple.text()));
    hear();
    until("each count is 0", || sends.counts().iter().all(|count| *count == 0));
    assert_eq!(sends.counters.users().load(std::sync::atomic::Ordering::SeqCst), 1, "only the sender is attached");
    say(&sends.end().to_string());
}

fn stand_in_receives() {
    let (gpu, mut receives) = (Gpu::open(), Receives::default());
    for _ in 0..TENSORS {
        receives.open(&gpu, Tuple::read(&hear()));
    }
    receives.compare(&gpu);
    say("compared");
    hear();
    receives.release(&gpu);
}

#[test]
fn storages_of_the_stand_in_open_and_are_released() {
    const TEST: &str = "storages_of_the_stand_in_open_and_are_released";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => stand_in_sends(false),
        Some(_) => {
            let mut other = Other::start(TEST, "stand-in");
            let (runtime, stream) = runtime();
            let opened = open_all(&runtime, &other.read_all());
            compare(&stream, &opened);
            // Work that is outstanding at the drop comes before the release.
            opened.iter().for_each(|buffer| stream.fill(buffer, 7).unwrap());
            drop(opened);
            other.write(&["released".to_owned()]);
            assert_eq!(other.read(), "0", "bytes that did not return to the sender");
            other.ends_well();
            drop(stream);
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

#[test]
fn the_memory_stays_readable_after_the_stand_in_was_killed() {
    const TEST: &str = "the_memory_stays_readable_after_the_stand_in_was_killed";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => stand_in_sends(false),
        Some(_) => {
            let mut other = Other::start(TEST, "stand-in");
            let (runtime, stream) = runtime();
            let lines = other.read_all();
            let opened = open_all(&runtime, &lines);
            other.kill();
            compare(&stream, &opened);
            drop((opened, stream));
            let tuple = Tuple::read(&lines[0]);
            let counters = stand_in::Counters::attach(&tuple.file, false).unwrap();
            until("each count is 0", || (0..TENSORS).all(|slot| counters.get(slot) == 0));
            tuple.remove_file();
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

#[test]
fn storages_in_an_expandable_segment_open_and_are_released() {
    const TEST: &str = "storages_in_an_expandable_segment_open_and_are_released";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => wait_for_release(Sends::in_pages()),
        Some(_) => {
            let mut other = Other::start(TEST, "stand-in");
            let (runtime, stream) = runtime();
            let lines = other.read_all();
            let opened = open_all(&runtime, &lines);
            compare(&stream, &opened);
            // Four pages, and four pairs of pages.
            let reserved = runtime.backend().live_objects().reservations;
            assert_eq!(reserved, 8);
            let device = runtime.device(0).unwrap();
            let good: TorchStorage = lines[9].parse().unwrap();
            drop(opened);
            until("the segments are unmapped", || runtime.backend().live_objects().reservations < reserved - 7);
            let refused = |change: &dyn Fn(&mut TorchStorage)| {
                let mut wanted = TorchStorage { ref_counter_offset: 5000, ..good.clone() };
                change(&mut wanted);
                open::<u32>(&device, &wanted).unwrap_err().kind()
            };
            let counters = stand_in::Counters::attach(&Tuple::read(&lines[9]).file, false).unwrap();
            counters.set(5000, 1);
            assert_eq!(refused(&|it| it.offset_bytes = 2 << 20), ErrorKind::InvalidPointer);
            // A descriptor that is no memory, one that is closed, a process that is gone, and other sizes.
            let last = good.handle.len() - 4;
            assert_eq!(refused(&|it| it.handle[last..].copy_from_slice(&[0; 4])), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.handle[last..].copy_from_slice(&[0, 0, 1, 0])), ErrorKind::Expired);
            assert_eq!(refused(&|it| it.handle[2..6].copy_from_slice(&i32::MAX.to_le_bytes())), ErrorKind::Expired);
            assert_eq!(refused(&|it| it.handle[10] = 1), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.handle[0] = 3), ErrorKind::Unsupported);
            assert_eq!(counters.get(5000), 1);
            drop(counters);
            assert_eq!(runtime.backend().live_objects().reservations, 0);
            other.write(&["released".to_owned()]);
            assert_eq!(other.read(), "0");
            other.ends_well();
            drop((stream, device));
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

#[test]
fn an_open_waits_for_the_work_of_the_stand_in() {
    const TEST: &str = "an_open_waits_for_the_work_of_the_stand_in";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => stand_in_sends(true),
        Some(_) => {
            let (runtime, stream) = runtime();
            let mut other = Other::start(TEST, "stand-in");
            let first = other.read();
            // The sender's stream sleeps, and its process does not.
            let opened = open_all(&runtime, std::slice::from_ref(&first));
            assert_eq!(stream.download(&opened[0]).unwrap(), [tensor(0).1]);
            drop((opened, stream));
            other.kill();
            Tuple::read(&first).remove_file();
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

#[test]
fn the_stand_in_waits_for_work_that_a_share_does_not_wait_for() {
    const TEST: &str = "the_stand_in_waits_for_work_that_a_share_does_not_wait_for";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => stand_in_receives(),
        Some(_) => {
            let mut other = Other::start(TEST, "stand-in");
            let (runtime, stream) = runtime();
            let sender = Sender::new(&runtime).unwrap();
            stand_in::delay(stream.raw().unwrap() as _);
            let lines = share_all(&runtime, &sender, &stream, None);
            assert!(!stream.is_complete().unwrap(), "the shares waited for the stream");
            other.write(&lines);
            assert_eq!(other.read(), "compared");
            other.write(&["release".to_owned()]);
            other.ends_well();
            assert!(sender.wait(Some(LIMIT)), "{sender:?}");
            drop((sender, stream));
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

/// The format cannot tell the death: the counts stay. The sender's program knows of it, and releases the counts itself.
#[test]
fn a_killed_receiver_leaves_its_counts_to_the_stand_in() {
    const TEST: &str = "a_killed_receiver_leaves_its_counts_to_the_stand_in";
    match role(TEST).as_deref() {
        None => {}
        Some("highwater") => {
            let lines: Vec<_> = (0..TENSORS).map(|_| hear()).collect();
            let (runtime, stream) = runtime();
            let opened = open_all(&runtime, &lines);
            compare(&stream, &opened);
            say("opened");
            hear();
            unreachable!("it is killed");
        }
        Some(_) => {
            let sends = Sends::all(false);
            let mut other = Other::start(TEST, "highwater");
            other.write(&sends.tuples.iter().map(Tuple::text).collect::<Vec<_>>());
            assert_eq!(other.read(), "opened");
            other.kill();
            assert_eq!(sends.counts(), vec![1; TENSORS]);
            assert_eq!(
                sends.counters.users().load(std::sync::atomic::Ordering::SeqCst),
                1,
                "only the sender is attached"
            );
            sends.tuples.iter().for_each(stand_in::release);
            assert_eq!(sends.counts(), vec![0; TENSORS]);
            assert_eq!(sends.end(), 0, "bytes that did not return");
        }
    }
}

#[test]
fn the_stand_in_opens_buffers_and_releases_them() {
    const TEST: &str = "the_stand_in_opens_buffers_and_releases_them";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => stand_in_receives(),
        Some(_) => {
            let (runtime, stream) = runtime();
            let free = runtime.device(0).unwrap().memory_info().unwrap().free;
            let sender = Sender::new(&runtime).unwrap();
            let lines = share_all(&runtime, &sender, &stream, None);
            let mut other = Other::start(TEST, "stand-in");
            other.write(&lines);
            assert_eq!(other.read(), "compared");
            assert_eq!(sender.outstanding(), TENSORS);
            assert!(!sender.wait(Some(Duration::from_millis(50))));
            other.write(&["release".to_owned()]);
            other.ends_well();
            assert!(sender.wait(Some(LIMIT)), "{sender:?}");
            // As of all dropped buffers: a wait for a stream frees the memory.
            stream.synchronize().unwrap();
            assert_eq!(runtime.device(0).unwrap().memory_info().unwrap().free, free);
            assert_eq!(files_of(std::process::id()), 1);
            drop((sender, stream));
            assert_eq!(files_of(std::process::id()), 0);
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

#[test]
fn the_shares_of_a_receiver_that_was_killed_end() {
    const TEST: &str = "the_shares_of_a_receiver_that_was_killed_end";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => stand_in_receives(),
        Some(_) => {
            let mut other = Other::start(TEST, "stand-in");
            let (runtime, stream) = runtime();
            let sender = Sender::new(&runtime).unwrap();
            let receiver = Receiver::by_pid(other.child.id()).unwrap();
            let lines = share_all(&runtime, &sender, &stream, Some(&receiver));
            other.write(&lines);
            assert_eq!(other.read(), "compared");
            assert_eq!(sender.outstanding(), TENSORS);
            let storage: TorchStorage = lines[0].parse().unwrap();
            other.kill();
            let killed = Instant::now();
            assert!(sender.wait(Some(LIMIT)), "{sender:?}");
            assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
            // Another receiver has no time limit: one share of these counts down to 0.
            let again = share_all(&runtime, &sender, &stream, None);
            assert_ne!(again[0].parse::<TorchStorage>().unwrap().ref_counter_offset, storage.ref_counter_offset);
            again.iter().for_each(|line| line.parse::<TorchStorage>().unwrap().release().unwrap());
            assert!(sender.wait(Some(LIMIT)), "{sender:?}");
            drop((sender, stream));
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

#[test]
fn the_stand_in_reads_on_after_highwater_was_killed_and_the_next_sender_removes_the_file() {
    const TEST: &str = "the_stand_in_reads_on_after_highwater_was_killed_and_the_next_sender_removes_the_file";
    match role(TEST).as_deref() {
        None => {}
        Some("highwater") => {
            let (runtime, stream) = runtime();
            let sender = Sender::new(&runtime).unwrap();
            share_all(&runtime, &sender, &stream, None).iter().for_each(|line| say(line));
            hear();
            unreachable!("it is killed");
        }
        Some(_) => {
            let (gpu, mut receives) = (Gpu::open(), Receives::default());
            let mut other = Other::start(TEST, "highwater");
            other.read_all().iter().for_each(|line| receives.open(&gpu, Tuple::read(line)));
            assert_eq!(files_of(other.child.id()), 1);
            other.kill();
            receives.compare(&gpu);
            receives.release(&gpu);
            // The senders of other tests may have removed the file already.
            let (runtime, stream) = runtime();
            drop((Sender::new(&runtime).unwrap(), stream));
            assert_eq!(files_of(other.child.id()), 0);
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

#[test]
fn wrong_storages_are_refused_and_leave_the_count() {
    const TEST: &str = "wrong_storages_are_refused_and_leave_the_count";
    match role(TEST).as_deref() {
        None => {}
        Some("stand-in") => stand_in_sends(false),
        Some(_) => {
            let mut other = Other::start(TEST, "stand-in");
            let (runtime, stream) = runtime();
            let device = runtime.device(0).unwrap();
            let lines = other.read_all();
            let good: TorchStorage = lines[99].parse().unwrap();
            let refused = |change: &dyn Fn(&mut TorchStorage)| {
                let mut wanted = good.clone();
                change(&mut wanted);
                open::<u32>(&device, &wanted).unwrap_err().kind()
            };
            let segment = 2 << 20;
            assert_eq!(refused(&|it| it.offset_bytes = segment), ErrorKind::InvalidPointer);
            assert_eq!(refused(&|it| it.offset_bytes = segment - it.size_bytes + 4), ErrorKind::InvalidPointer);
            assert_eq!(refused(&|it| it.offset_bytes = u64::MAX), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.offset_bytes = 2), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.size_bytes = segment + 4), ErrorKind::InvalidPointer);
            assert_eq!(refused(&|it| it.size_bytes = 0), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.size_bytes = 6), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.handle[10] ^= 1), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.handle.truncate(12)), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.event_handle.truncate(63)), ErrorKind::InvalidArgument);
            assert_eq!(refused(&|it| it.ref_counter_offset = TENSORS as u64), ErrorKind::Expired);
            assert_eq!(refused(&|it| it.ref_counter_offset = 10_000), ErrorKind::InvalidArgument);
            // Not one of them has counted, and nothing is mapped.
            let first = open::<u32>(&device, &good).unwrap();
            assert_eq!(open::<u32>(&device, &good).unwrap_err().kind(), ErrorKind::InvalidState);
            assert!(first.share().is_err(), "memory of another process");
            let mut refused = None;
            let captured = stream.capture_with(CaptureMode::ThreadLocal, |_| {
                refused = open::<u32>(&device, &good).err().map(|error| error.kind());
                Ok(())
            });
            drop(captured);
            assert_eq!(refused, Some(ErrorKind::Capture));
            drop(first);
            until("the share ends", || {
                open::<u32>(&device, &good).err().is_some_and(|error| error.kind() == ErrorKind::Expired)
            });
            for line in lines.iter().filter(|line| **line != lines[99]) {
                line.parse::<TorchStorage>().unwrap().release().unwrap();
            }
            other.write(&["released".to_owned()]);
            assert_eq!(other.read(), "0");
            other.ends_well();
            drop((stream, device));
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

/// A child of a fork shares nothing, and its drop of the sender takes no file away from the parent.
#[test]
fn a_forked_child_leaves_the_shares_to_its_parent() {
    if role("a_forked_child_leaves_the_shares_to_its_parent").is_none() {
        return;
    }
    let (runtime, stream) = runtime();
    let sender = Sender::new(&runtime).unwrap();
    let lines = share_all(&runtime, &sender, &stream, None);
    let good = runtime.device(0).unwrap().allocate_shared_by::<u32>(10, Transport::Legacy).unwrap();
    let storage = sender.share(&good, &stream).unwrap();
    // SAFETY: The child takes no lock that another thread may hold, and ends with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let is_forked = |kind: Option<ErrorKind>| kind == Some(ErrorKind::Forked);
        let told = is_forked(sender.share(&good, &stream).err().map(|error| error.kind()))
            && is_forked(Sender::new(&runtime).err().map(|error| error.kind()))
            && is_forked(open::<u32>(&runtime.device(0).unwrap(), &storage).err().map(|error| error.kind()))
            && sender.outstanding() == 0
            && sender.wait(None);
        drop(sender);
        // SAFETY: Ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!told)) };
    }
    let mut status = 0;
    // SAFETY: Waits for the child made above.
    unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!((files_of(std::process::id()), sender.outstanding()), (1, TENSORS + 1));
    lines.iter().for_each(|line| line.parse::<TorchStorage>().unwrap().release().unwrap());
    storage.release().unwrap();
    assert!(sender.wait(Some(LIMIT)), "{sender:?}");
    drop((good, sender, stream));
    assert_eq!(files_of(std::process::id()), 0);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn memory_that_pytorch_cannot_open_is_not_shared() {
    if role("memory_that_pytorch_cannot_open_is_not_shared").is_none() {
        return;
    }
    let (runtime, stream) = runtime();
    let device = runtime.device(0).unwrap();
    let sender = Sender::new(&runtime).unwrap();
    let kind = |buffer: &DeviceBuffer<u32>| sender.share(buffer, &stream).unwrap_err().kind();
    let plain = device.allocate::<u32>(10).unwrap();
    assert_eq!(kind(&plain), ErrorKind::InvalidArgument);
    let by_descriptor = device.allocate_shared_by::<u32>(10, Transport::Descriptor).unwrap();
    assert_eq!(kind(&by_descriptor), ErrorKind::InvalidArgument);
    let good = device.allocate_shared_by::<u32>(10, Transport::Legacy).unwrap();
    assert_eq!(sender.share(good.slice(3..3).unwrap(), &stream).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let (other, theirs) = self::runtime();
    assert_eq!(sender.share(&good, &theirs).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let mut refused = None;
    let captured = stream.capture_with(CaptureMode::Relaxed, |stream| {
        refused = sender.share(&good, stream).err().map(|error| error.kind());
        Ok(())
    });
    drop(captured);
    assert_eq!(refused, Some(ErrorKind::Capture));
    assert_eq!(sender.outstanding(), 0);
    // Shares beyond PyTorch's number of events wait for the stream instead.
    let storages: Vec<_> = (0..1002).map(|_| sender.share(&good, &stream).unwrap()).collect();
    let waits: Vec<_> = storages.iter().map(|storage| storage.event_sync_required).collect();
    assert_eq!(waits, [vec![true; 1000], vec![false; 2]].concat());
    storages.iter().for_each(|storage| storage.release().unwrap());
    assert!(sender.wait(Some(LIMIT)));
    assert!(sender.share(&good, &stream).unwrap().event_sync_required);
    // A sender that is dropped keeps its last share, until it ends.
    let last = sender.share(&good, &stream).unwrap();
    drop((sender, plain, by_descriptor, good));
    drop((stream, device, theirs));
    assert_eq!(other.close().unwrap().total(), 0);
    assert_eq!(runtime.clone().close().unwrap_err().kind(), ErrorKind::InvalidState);
    let before = TorchStorage { ref_counter_offset: last.ref_counter_offset - 1, ..last.clone() };
    last.release().unwrap();
    before.release().unwrap();
    until("the file is gone", || files_of(std::process::id()) == 0);
    assert_eq!(runtime.close().unwrap().total(), 0);
}
