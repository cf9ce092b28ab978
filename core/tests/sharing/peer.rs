//! A second process: the test binary runs itself again and obeys commands, one line each, answered by one line each.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use highwater_core::ipc::Holder;
use highwater_core::{
    DeviceBuffer, Error, ErrorKind, ImportOptions, OwnerDeath, Runtime, SharedPinnedBuffer, Stream, Ticket,
};
use highwater_mock::{MockGpu, MockOptions};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::adopted::adopt_segments;
use crate::hostile::{HELLO, listen, name_of};
use crate::pinned;

const PEER: &str = "HIGHWATER_SHARING_PEER";
const ANSWER: &str = "answer: ";

/// A process that obeys.
pub(crate) struct Peer {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
}

impl Peer {
    pub(crate) fn start() -> Self {
        Self::start_with("", |_| {})
    }

    /// Starts it, and opens a ticket by the name `a`.
    pub(crate) fn with_open(ticket: &Ticket) -> Self {
        let mut peer = Self::start();
        peer.tell(&format!("open a {ticket}"));
        peer
    }

    /// Starts it with settings of the mock, and with changes to the command.
    pub(crate) fn start_with(mock: &str, change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "obey", "--nocapture", "--test-threads=1"]).env(PEER, mock);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test harness prints the test's name in front of the first line.
                let answer = line.split_once(ANSWER).map(|(_, answer)| answer.to_owned());
                if answer.is_some_and(|answer| sender.send(answer).is_err()) {
                    return;
                }
            }
        });
        Self { child, stdin, answers }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn say(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
        self.stdin.flush().unwrap();
    }

    pub(crate) fn hear(&self) -> String {
        self.answers.recv_timeout(Duration::from_secs(60)).expect("an answer within a minute")
    }

    /// Says a command and waits for its answer.
    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.say(command);
        self.hear()
    }

    /// Says a command that has to succeed.
    #[track_caller]
    pub(crate) fn tell(&mut self, command: &str) -> String {
        let answer = self.ask(command);
        assert!(!answer.starts_with("error"), "{command}: {answer}");
        answer
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
        if signal == rustix::process::Signal::STOP {
            // Each thread stops on its own.
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED).unwrap();
        }
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The allocations that the process owns, and the importers that it counts. An answer to an earlier command may come first.
    pub(crate) fn exports(&mut self) -> (u64, u64) {
        let mut counts = self.ask("exports");
        while counts.starts_with("handed") || counts.starts_with("error") {
            counts = self.hear();
        }
        let counts: Vec<u64> = counts.split(' ').map(|count| count.parse().unwrap()).collect();
        (counts[0], counts[2])
    }

    /// Waits for the end of a process that was killed.
    pub(crate) fn wait(mut self) {
        self.child.wait().unwrap();
    }

    pub(crate) fn quit(mut self) -> ExitStatus {
        self.say("quit");
        self.child.wait().unwrap()
    }
}

/// Waits until something is so.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not so within a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The other side of [`Peer`]; does nothing where no test has started the process.
pub(crate) fn obey() {
    let Ok(mock) = std::env::var(PEER) else { return };
    let options = MockOptions::parse(&mock).unwrap();
    let gpu = MockGpu::open(options).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let mut peer = Obedient {
        gpu,
        stream: None,
        thread: None,
        runtime,
        buffers: HashMap::new(),
        batches: HashMap::new(),
        pinned: HashMap::new(),
        children: Vec::new(),
        holder: None,
        files: Vec::new(),
    };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words == ["quit"] {
            break;
        }
        let answer = peer.obey(&words).unwrap_or_else(|error| format!("error {:?} {error}", error.kind()));
        println!("{ANSWER}{answer}");
        std::io::stdout().flush().unwrap();
    }
    peer.children.iter_mut().for_each(|child| drop(child.kill()));
    peer.buffers.clear();
    peer.batches.clear();
    peer.pinned.clear();
    peer.stream = None;
    let live = peer.runtime.close().unwrap();
    assert_eq!(live.total(), 0, "{live:?}");
}

/// Crowds an exporter for as long as the process lives. Reports after a given number of connections.
fn crowd(name: &[u8], greets: bool, count: usize, crowded: &Sender<()>) {
    let address = SocketAddrUnix::new_abstract_name(name).unwrap();
    let connect = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::connect(&socket, &address).ok()?;
        let line = greets.then(|| {
            let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let theirs = [theirs.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&theirs)));
            let hello = std::io::IoSlice::new(HELLO);
            let _ = rustix::net::sendmsg(&socket, &[hello], &mut control, SendFlags::NOSIGNAL);
            ours
        });
        Some((socket, line))
    };
    let mut open = Vec::new();
    for _ in 0..count {
        open.extend(connect());
    }
    let _ = crowded.send(());
    loop {
        // The exporter's messages are not read. A connection is closed when the other end hangs up.
        open.retain(|(socket, _)| {
            let mut polled = [PollFd::new(socket, PollFlags::empty())];
            let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|ready| ready == 0)
        });
        while open.len() < count
            && let Some(connection) = connect()
        {
            open.push(connection);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The files of device memory that this process has mapped.
pub(crate) fn mapped_inodes() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = maps.lines().filter(|line| line.contains("memfd:highwater-mock"));
    memory.filter_map(|line| line.split_whitespace().nth(4)).map(str::to_owned).collect()
}

struct Obedient {
    gpu: Arc<MockGpu>,
    runtime: Runtime,
    stream: Option<Stream>,
    thread: Option<(Sender<()>, std::thread::JoinHandle<()>)>,
    buffers: HashMap<String, Vec<DeviceBuffer<u32>>>,
    batches: HashMap<String, Vec<DeviceBuffer<u32>>>,
    pinned: HashMap<String, SharedPinnedBuffer<u32>>,
    children: Vec<Child>,
    holder: Option<Holder>,
    files: Vec<std::fs::File>,
}

impl Obedient {
    fn stream(&mut self) -> highwater_core::Result<Stream> {
        if self.stream.is_none() {
            self.stream = Some(self.runtime.device(0)?.create_stream()?);
        }
        Ok(self.stream.clone().unwrap())
    }

    fn buffer(&self, name: &str) -> highwater_core::Result<&DeviceBuffer<u32>> {
        let buffer = self.buffers.get(name).and_then(|buffers| buffers.last());
        buffer.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "obey", format!("nothing is named {name}")))
    }

    fn obey(&mut self, words: &[&str]) -> highwater_core::Result<String> {
        match *words {
            ["open", name, ticket] => {
                let buffer = self.runtime.open_shared::<u32>(&ticket.parse::<Ticket>()?)?;
                let len = buffer.len();
                self.buffers.entry(name.to_owned()).or_default().push(buffer);
                Ok(len.to_string())
            }
            // To inherit it, or to release it when its owner dies.
            [how @ ("open-heir" | "open-release"), name, ticket] => {
                let death = if how == "open-heir" { OwnerDeath::Inherit } else { OwnerDeath::Release };
                let options = ImportOptions::new().with_owner_death(death);
                let buffer = self.runtime.open_shared_with::<u32>(&ticket.parse::<Ticket>()?, &options)?;
                let len = buffer.len();
                self.buffers.entry(name.to_owned()).or_default().push(buffer);
                Ok(len.to_string())
            }
            // Holds the allocation of a ticket, without a device.
            ["hold", ticket] => {
                if self.holder.is_none() {
                    self.holder = Some(Holder::new()?);
                }
                self.holder.as_ref().unwrap().hold(&ticket.parse()?).map(|()| "held".to_owned())
            }
            ["held"] => {
                let held = self.holder.as_ref().map(Holder::held).unwrap_or_default();
                Ok(held.iter().map(|held| format!("{:?}", held.state)).collect::<Vec<_>>().join(","))
            }
            ["end-holder"] => Ok(self.holder.take().is_some().to_string()),
            ["open-batch", name, batch] => {
                let buffers = self.runtime.open_shared_all::<u32>(&batch.parse()?)?;
                let len = buffers.len();
                self.batches.insert(name.to_owned(), buffers);
                Ok(len.to_string())
            }
            ["drop-batch", name] => Ok(self.batches.remove(name).is_some().to_string()),
            ["make-batch", name, count, len, value] => {
                let device = self.runtime.device(0)?;
                let make = |_| device.allocate_shared::<u32>(len.parse().unwrap());
                let buffers = (0..count.parse().unwrap()).map(make).collect::<highwater_core::Result<Vec<_>>>()?;
                for buffer in &buffers {
                    self.stream()?.fill(buffer, value.parse::<u32>().unwrap())?;
                }
                let slices: Vec<_> = buffers.iter().map(highwater_core::DeviceSlice::from).collect();
                let batch = self.runtime.share_all(&slices)?.to_string();
                self.batches.insert(name.to_owned(), buffers);
                Ok(batch)
            }
            ["make", name, len, value] => {
                let buffer = self.runtime.device(0)?.allocate_shared::<u32>(len.parse().unwrap())?;
                self.stream()?.fill(&buffer, value.parse::<u32>().unwrap())?;
                let ticket = buffer.share()?.to_string();
                self.buffers.entry(name.to_owned()).or_default().push(buffer);
                Ok(ticket)
            }
            // A buffer over mappings that other code made.
            ["adopt", name, count, value] => {
                let buffer = adopt_segments(&self.gpu, &self.runtime, count.parse().unwrap());
                self.stream()?.fill(&buffer, value.parse::<u32>().unwrap())?;
                let ticket = buffer.share()?.to_string();
                self.buffers.entry(name.to_owned()).or_default().push(buffer);
                Ok(ticket)
            }
            ["share", name] => Ok(self.buffer(name)?.share()?.to_string()),
            // A thread that ends with `end-thread`, and a younger one that ends with the process.
            ["threads"] => {
                let (end, ended) = channel::<()>();
                self.thread = Some((end, std::thread::spawn(move || ended.recv().unwrap_or_default())));
                std::thread::spawn(|| {
                    loop {
                        std::thread::park();
                    }
                });
                Ok("started".to_owned())
            }
            ["end-thread"] => {
                let (end, thread) = self.thread.take().unwrap();
                drop(end);
                thread.join().unwrap();
                Ok("ended".to_owned())
            }
            ["drop", name] => {
                let dropped = self.buffers.get_mut(name).and_then(Vec::pop).is_some();
                Ok(dropped.to_string())
            }
            // Enqueued only.
            ["fill", name, value, times] => {
                let stream = self.stream()?;
                for _ in 0..times.parse().unwrap() {
                    stream.fill(self.buffer(name)?, value.parse::<u32>().unwrap())?;
                }
                Ok("filled".to_owned())
            }
            // The one value that the whole buffer has, or that there are several.
            ["read", name] => {
                let stream = self.stream()?;
                let values = stream.download(self.buffer(name)?)?;
                let one = values.iter().all(|value| *value == values[0]);
                Ok(if one { values[0].to_string() } else { "several".to_owned() })
            }
            ["statistics"] => {
                let sharing = self.runtime.statistics().sharing;
                Ok(format!(
                    "imports={} mappings={} opens={} kept={} limbo={} peers={} lost={}",
                    sharing.imports,
                    sharing.mappings,
                    sharing.opens,
                    sharing.kept_opens,
                    sharing.limbo_blocks,
                    sharing.peers,
                    sharing.lost_exporters
                ))
            }
            // The allocations that this process shares or has inherited, and the importers that it counts.
            ["exports"] => {
                let sharing = self.runtime.statistics().sharing;
                Ok(format!("{} {} {}", sharing.exported_blocks, sharing.limbo_blocks, sharing.peers))
            }
            // Waits at most this number of milliseconds for an heir.
            ["hand-over", limit] => {
                let limit = Duration::from_millis(limit.parse().unwrap());
                self.runtime.hand_over(limit).map(|()| "handed over".to_owned())
            }
            // Closes every socket, so that the names of the process are free, as after its end.
            ["close-sockets"] => {
                let null = std::fs::File::open("/dev/null").unwrap();
                let mut closed = 0;
                for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
                    let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
                    let target = std::fs::read_link(entry.path()).unwrap_or_default();
                    if number > 2 && target.to_string_lossy().starts_with("socket:") {
                        // SAFETY: the number stays open, as another file.
                        assert!(unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), number) } >= 0);
                        closed += 1;
                    }
                }
                Ok(closed.to_string())
            }
            // Opens descriptors until none is left.
            ["use-descriptors"] => {
                while let Ok(file) = std::fs::File::open("/dev/null") {
                    self.files.push(file);
                }
                Ok(self.files.len().to_string())
            }
            ["free-descriptors"] => {
                self.files.clear();
                Ok("freed".to_owned())
            }
            // Listens in the place of an exporter, cuts each connection, and then stops the process. Answers no open.
            ["stall", ticket] => {
                let listener = listen(&ticket.parse()?);
                std::thread::spawn(move || {
                    while let Ok(connection) = rustix::net::accept(&listener) {
                        drop(connection);
                        let this = rustix::process::getpid();
                        rustix::process::kill_process(this, rustix::process::Signal::STOP).unwrap();
                        // Another thread may have the signal first.
                        std::thread::sleep(Duration::from_millis(50));
                    }
                });
                Ok("stalls".to_owned())
            }
            // Ends the runtime and the holder. Returns the sockets that the process has left, and the milliseconds that it took.
            ["close"] => {
                let started = Instant::now();
                self.buffers.clear();
                self.stream = None;
                self.holder = None;
                let live = std::mem::replace(&mut self.runtime, Runtime::new(self.gpu.clone())?).close()?;
                assert_eq!(live.total(), 0, "{live:?}");
                let took = started.elapsed().as_millis();
                let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
                let links = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
                let sockets = links.filter(|link| link.to_string_lossy().starts_with("socket:")).count();
                Ok(format!("{sockets} {took}"))
            }
            ["trim"] => self.runtime.trim().map(|()| "trimmed".to_owned()),
            // A process that inherits every descriptor of this one, and lives on.
            ["spawn-heir"] => {
                for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
                    let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
                    // SAFETY: only a flag of a descriptor is changed; a number that is not open any more is an error.
                    unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
                }
                let heir = Command::new("sleep").arg("600").spawn().unwrap();
                let pid = heir.id();
                self.children.push(heir);
                Ok(pid.to_string())
            }
            // A child that lives on and does nothing.
            ["fork"] => {
                // SAFETY: the child makes system calls only, and is killed.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    loop {
                        // SAFETY: waits for a signal.
                        unsafe { libc::pause() };
                    }
                }
                Ok(child.to_string())
            }
            // Forks while another thread shares for the first time and ends its runtimes. Returns how many sockets that listen the
            // children have.
            ["fork-storm", count] => {
                let is_over = AtomicBool::new(false);
                let mut kept = 0;
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !is_over.load(Ordering::Relaxed) {
                            let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
                            let buffer = runtime.device(0).unwrap().allocate_shared::<u8>(1).unwrap();
                            buffer.share().unwrap();
                        }
                    });
                    for _ in 0..count.parse().unwrap() {
                        kept += listening_sockets_of_a_child();
                    }
                    is_over.store(true, Ordering::Relaxed);
                });
                Ok(kept.to_string())
            }
            // Cuts every socket of the process, as its end would.
            ["cut-sockets"] => {
                let mut cut = 0;
                for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
                    let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
                    // SAFETY: a call on a number that is no socket is an error.
                    cut += i32::from(unsafe { libc::shutdown(number, libc::SHUT_RDWR) } == 0);
                }
                Ok(cut.to_string())
            }
            // Keeps a number of connections to an exporter, and replaces each that is closed. It sends nothing on them,
            // or only a greeting.
            ["crowd", what, count, ticket] => {
                let (ticket, count) = (ticket.parse::<Ticket>()?, count.parse().unwrap());
                let greets = what == "greets";
                let (sender, crowded) = channel();
                std::thread::spawn(move || crowd(&name_of(&ticket), greets, count, &sender));
                crowded.recv().unwrap();
                Ok("crowded".to_owned())
            }
            [command, ..] if command.starts_with("pinned-") => {
                let stream = self.stream()?;
                pinned::obey(&self.runtime, &stream, &mut self.pinned, words)
            }
            ["mapped-inodes"] => Ok(mapped_inodes().join(",")),
            _ => panic!("no such command: {words:?}"),
        }
    }
}

/// Forks a child that counts its sockets that listen.
fn listening_sockets_of_a_child() -> i32 {
    // SAFETY: the child makes system calls only, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let listens = |number: i32| {
            let (mut value, mut length) = (0, size_of::<i32>() as libc::socklen_t);
            let place = (&raw mut value).cast();
            // SAFETY: the call writes one number.
            let asked =
                unsafe { libc::getsockopt(number, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, place, &raw mut length) };
            asked == 0 && value == 1
        };
        let count = (0..1000).filter(|number| listens(*number)).count();
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::try_from(count.min(100)).unwrap_or(100)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    libc::WEXITSTATUS(status)
}
