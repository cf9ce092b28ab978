//! `highwater ipc ls`, over real processes on the mock: this binary runs itself again.

use std::io::{BufRead, BufReader, IoSliceMut, Write};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use highwater::mock::{MockGpu, MockOptions};
use highwater::{DeviceBuffer, ImportOptions, OwnerDeath, Runtime, SharedPinnedBuffer, Ticket};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;

use crate::started::Run;

const PEER: &str = "HIGHWATER_IPC_PEER";
const ANSWER: &str = "answer: ";
const KIB: u64 = 1 << 10;

/// A process that shares memory, or only says that it does.
struct Peer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    fn start() -> Self {
        Self::start_as(|_| {}).unwrap()
    }

    fn start_as(change: impl FnOnce(&mut Command)) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "ipc::obey", "--nocapture", "--test-threads=1"]).env(PEER, "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn()?;
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Ok(Self { child, stdin, stdout })
    }

    fn pid(&self) -> u64 {
        self.child.id().into()
    }

    /// Says a command and returns its answer.
    #[track_caller]
    fn tell(&mut self, command: &str) -> String {
        writeln!(self.stdin, "{command}").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "{command}: the process has ended");
            // The test harness prints the test's name in front of the first line.
            if let Some((_, answer)) = line.trim_end().split_once(ANSWER) {
                return answer.to_owned();
            }
        }
    }

    fn stop(&self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).unwrap();
        // Each thread stops on its own.
        waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
    }

    fn go_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test by itself: what the other processes of these tests run.
#[test]
fn obey() {
    if std::env::var_os(PEER).is_none() {
        return;
    }
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let (mut buffers, mut pinned): (Vec<DeviceBuffer<u8>>, Vec<SharedPinnedBuffer<u8>>) = (Vec::new(), Vec::new());
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let answer = match *line.split_whitespace().collect::<Vec<_>>() {
            ["share", kib] => {
                let bytes = kib.parse::<usize>().unwrap() << 10;
                buffers.push(runtime.device(0).unwrap().allocate_shared::<u8>(bytes).unwrap());
                buffers.last().unwrap().share().unwrap().to_string()
            }
            ["share-pinned", kib] => {
                let buffer = runtime.pinned_shared::<u8>(kib.parse::<usize>().unwrap() << 10).unwrap();
                let ticket = buffer.share().unwrap().to_string();
                pinned.push(buffer);
                ticket
            }
            ["open", ticket] => {
                buffers.push(runtime.open_shared(&ticket.parse::<Ticket>().unwrap()).unwrap());
                "open".to_owned()
            }
            ["inherit", ticket] => {
                let options = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
                buffers.push(runtime.open_shared_with(&ticket.parse::<Ticket>().unwrap(), &options).unwrap());
                "open".to_owned()
            }
            ["can-open", ticket] => runtime.open_shared::<u8>(&ticket.parse::<Ticket>().unwrap()).is_ok().to_string(),
            ["open-pinned", ticket] => {
                pinned.push(runtime.open_pinned(&ticket.parse::<Ticket>().unwrap()).unwrap());
                "open".to_owned()
            }
            ["drop"] => buffers.pop().is_some().to_string(),
            ["pretend", how] => {
                let how = how.to_owned();
                let (sender, listens) = std::sync::mpsc::channel();
                std::thread::spawn(move || pretend(&how, &sender));
                listens.recv().unwrap();
                "pretends".to_owned()
            }
            ref other => panic!("no such command: {other:?}"),
        };
        println!("{ANSWER}{answer}");
        std::io::stdout().flush().unwrap();
    }
}

/// Returns a socket that listens with the name of a list.
fn listen(backlog: i32) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let digits =
        u128::from(std::process::id()) << 64 | SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() & 0xffff_ffff;
    let name = format!("highwater-list-{digits:032x}");
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    rustix::net::listen(&socket, backlog).unwrap();
    socket
}

/// Returns a list of 100 allocations of 1 to 100 bytes, each with 100 holders, of which each is named ten times.
fn long_list() -> Vec<u8> {
    let mut list = b"HWLS\x01\0\x01\0".to_vec();
    [100_u32, 0, 100_000, 0].iter().for_each(|count| list.extend(count.to_le_bytes()));
    for bytes in 1..=100_u64 {
        // A descriptor, on device 0.
        [1_u32, 0, 0, 0, 0, 0].iter().for_each(|field| list.extend(field.to_le_bytes()));
        [bytes, 0].iter().for_each(|field| list.extend(field.to_le_bytes()));
        [0_u32, 1000].iter().for_each(|field| list.extend(field.to_le_bytes()));
    }
    for first in 1..=100_u32 {
        (0..1000).for_each(|holder| list.extend((first * 1000 + holder % 100).to_le_bytes()));
    }
    list
}

/// Answers requests of the list with something else, for as long as the process lives.
fn pretend(how: &str, listens: &std::sync::mpsc::Sender<()>) {
    const GREETING: &[u8] = b"HWLS\x01\0\x01\0";
    let file_of = |content: &[u8], bytes: u64, sealed: bool| {
        let file = rustix::fs::memfd_create("pretended", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        assert_eq!(rustix::io::pwrite(&file, content, 0), Ok(content.len()));
        if sealed {
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE).unwrap();
        }
        file
    };
    let file = |bytes, sealed| file_of(&[], bytes, sealed);
    let (reader, _writer) = std::io::pipe().unwrap();
    let (message, descriptor) = match how {
        // The queue holds one connection, which stays there.
        "full" | "silent" => (&b""[..], None),
        "garbage" => (&b"garbage, and more of it than fits"[..], None),
        "no-file" => (GREETING, None),
        // A read of it would wait without end.
        "pipe" => (GREETING, Some(OwnedFd::from(reader))),
        "unsealed" => (GREETING, Some(file(24, false))),
        "zeros" => (GREETING, Some(file(24, true))),
        "endless" => (GREETING, Some(file(1 << 40, true))),
        "many" => {
            let list = long_list();
            (GREETING, Some(file_of(&list, list.len() as u64, true)))
        }
        _ => panic!("{how}"),
    };
    let socket = listen(if how == "full" { 0 } else { 64 });
    listens.send(()).unwrap();
    if how == "full" || how == "silent" {
        loop {
            std::thread::park();
        }
    }
    while let Ok(client) = rustix::net::accept(&socket) {
        let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let message = std::io::IoSlice::new(message);
        let _ = rustix::net::sendmsg(&client, &[message], &mut control, SendFlags::NOSIGNAL);
    }
}

fn ls(arguments: &[&str]) -> Run {
    let arguments = [&["ipc", "ls"], arguments].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_highwater")).args(&arguments).output().unwrap();
    Run::of(output, &arguments).ended(0)
}

/// The entry of a process, if it is listed. Other tests and programs run at the same time.
fn entry(pid: u64) -> Option<Value> {
    let object = ls(&["--json"]).object();
    assert_eq!(object.as_object().unwrap().len(), 1, "{object}");
    let processes = object["processes"].as_array().unwrap().clone();
    processes.into_iter().find(|process| process["pid"] == pid)
}

/// The rows of the table that begin with a process.
fn rows(pid: u64) -> Vec<Vec<String>> {
    let cells = |line: &str| line.split(['│', '┆', '|']).map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows = ls(&[]).stdout.lines().map(cells).collect::<Vec<_>>();
    rows.into_iter().filter(|row| row.iter().any(|cell| cell.starts_with(&format!("{pid} (")))).collect()
}

#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not so within a minute: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn with_row(rows: &[Vec<String>], parts: &[&str]) -> bool {
    rows.iter().any(|row| parts.iter().all(|part| row.iter().any(|cell| cell == part)))
}

#[test]
fn owners_and_importers_are_listed_with_each_other() {
    let started = SystemTime::now() - Duration::from_secs(1);
    let (mut owner, mut importer) = (Peer::start(), Peer::start());
    assert_eq!((entry(owner.pid()), entry(importer.pid())), (None, None), "they share nothing yet");
    let tickets = [owner.tell("share 64"), owner.tell("share 128")];
    let pinned = owner.tell("share-pinned 256");
    tickets.iter().for_each(|ticket| drop(importer.tell(&format!("open {ticket}"))));
    importer.tell(&format!("open-pinned {pinned}"));
    owner.tell("drop");

    let shared = entry(owner.pid()).unwrap();
    assert_eq!((&shared["answers"], &shared["note"], &shared["left_off"]), (&true.into(), &Value::Null, &0.into()));
    assert!(shared["opened"].as_array().unwrap().is_empty() && !shared["command"].as_str().unwrap().is_empty());
    let of = |list: &Value, kind: &str, bytes: u64| {
        let found = list.as_array().unwrap().iter().find(|one| one["kind"] == kind && one["bytes"] == bytes);
        found.unwrap_or_else(|| panic!("no {bytes} bytes in {list}")).clone()
    };
    for (kind, bytes, device, dropped) in [
        ("device", 64 * KIB, Value::from(0), false),
        ("device", 128 * KIB, Value::from(0), true),
        ("page-locked", 256 * KIB, Value::Null, false),
    ] {
        let one = of(&shared["shared"], kind, bytes);
        assert_eq!((&one["device"], &one["dropped"]), (&device, &dropped.into()), "{one}");
        assert_eq!((&one["holders"], &one["transport"]), (&vec![importer.pid()].into(), &"descriptor".into()), "{one}");
        let since = one["since"].as_str().unwrap();
        assert!(since >= &*date_of(started) && since <= &*date_of(SystemTime::now()), "{since}");
        let other = entry(importer.pid()).unwrap();
        let other = of(&other["opened"], kind, bytes);
        assert_eq!((&other["owner"], &other["device"]), (&owner.pid().into(), &device), "{other}");
        assert_eq!((&other["owner_has_ended"], &other["idle"]), (&false.into(), &false.into()), "{other}");
        assert_eq!(other["uuid"], one["uuid"]);
        assert_eq!(one["uuid"].is_string(), kind == "device");
    }
    let importer_pid = importer.pid().to_string();
    let of_owner = rows(owner.pid());
    assert!(with_row(&of_owner, &["shares", "device 0, descriptor", "1", "65536", &importer_pid]), "{of_owner:?}");
    assert!(with_row(&of_owner, &["shares, has dropped it", "131072", &importer_pid]), "{of_owner:?}");
    assert!(with_row(&of_owner, &["shares", "page-locked", "262144", &importer_pid]), "{of_owner:?}");
    let of_importer = rows(importer.pid());
    let owner_pid = owner.pid().to_string();
    assert!(
        with_row(&of_importer, &["has open", "device 0, descriptor", "2", "196608", &owner_pid]),
        "{of_importer:?}"
    );

    // The importer lets go of what the owner has dropped, which is no longer listed.
    importer.tell("drop");
    until("the dropped buffer is gone", || {
        let shared = entry(owner.pid()).unwrap();
        shared["shared"].as_array().unwrap().iter().all(|one| one["dropped"] == false)
    });
}

#[test]
fn importers_of_a_killed_owner_are_listed_until_they_let_go() {
    let (mut owner, mut importer) = (Peer::start(), Peer::start());
    let ticket = owner.tell("share 64");
    importer.tell(&format!("open {ticket}"));
    let pid = owner.pid();
    drop(owner);
    assert_eq!(entry(pid), None, "a dead process is listed");
    let held = entry(importer.pid()).unwrap();
    let held = &held["opened"].as_array().unwrap()[0];
    assert_eq!(
        (&held["owner"], &held["owner_has_ended"], &held["bytes"]),
        (&pid.into(), &true.into(), &(64 * KIB).into())
    );
    let row = rows(importer.pid());
    assert!(with_row(&row, &["holds memory of a dead owner", "65536", &pid.to_string()]), "{row:?}");
    importer.tell("drop");
    until("the memory is unmapped", || entry(importer.pid()).is_none());
}

#[test]
fn a_stopped_process_delays_no_list() {
    let (mut stopped, mut other) = (Peer::start(), Peer::start());
    stopped.tell("share 64");
    other.tell("share 128");
    stopped.stop();
    let began = Instant::now();
    let found = entry(stopped.pid()).unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!((&found["answers"], &found["note"]), (&false.into(), &"does not answer: it is stopped".into()));
    assert!(with_row(&rows(stopped.pid()), &["does not answer: it is stopped"]));
    assert_eq!(entry(other.pid()).unwrap()["shared"].as_array().unwrap().len(), 1);
    stopped.go_on();
    until("it answers again", || entry(stopped.pid()).is_some_and(|found| found["answers"] == true));
}

#[test]
fn a_process_that_pretends_spoils_only_its_own_entry() {
    let mut other = Peer::start();
    other.tell("share 128");
    for (how, note) in [
        ("silent", "does not answer"),
        ("garbage", "does not answer in a form that this version knows"),
        ("no-file", "does not answer in a form that this version knows"),
        ("pipe", "does not answer in a form that this version knows"),
        ("unsealed", "does not answer in a form that this version knows"),
        ("zeros", "does not answer in a form that this version knows"),
        ("endless", "does not answer in a form that this version knows"),
    ] {
        let mut hostile = Peer::start();
        hostile.tell(&format!("pretend {how}"));
        let began = Instant::now();
        let found = entry(hostile.pid()).unwrap_or_else(|| panic!("{how}: not listed"));
        assert!(began.elapsed() < Duration::from_secs(10), "{how}: {:?}", began.elapsed());
        assert_eq!((&found["answers"], &found["note"]), (&false.into(), &note.into()), "{how}");
        let other = entry(other.pid()).unwrap();
        assert_eq!((&other["answers"], other["shared"].as_array().unwrap().len()), (&true.into(), 1), "{how}");
    }
}

#[test]
fn a_process_whose_queue_is_full_is_found_by_its_socket() {
    let mut hostile = Peer::start();
    hostile.tell("pretend full");
    // The first of these requests stays in the queue.
    let notes: Vec<_> = (0..4).map(|_| entry(hostile.pid()).unwrap()["note"].clone()).collect();
    assert!(
        notes.iter().all(|note| note == "does not answer" || note == "does not answer: its queue is full"),
        "{notes:?}"
    );
    assert!(notes[3] == "does not answer: its queue is full", "{notes:?}");
}

/// The name of the socket on which a process gives its list.
fn list_of(pid: u64) -> Vec<u8> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let sockets: Vec<_> = descriptors.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok()).collect();
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let of_process = table.lines().filter(|line| {
        let inode = line.split_ascii_whitespace().nth(6).unwrap_or_default();
        sockets.iter().any(|socket| socket.to_str() == Some(&*format!("socket:[{inode}]")))
    });
    let mut names = of_process.filter_map(|line| line.split_once('@')).map(|(_, name)| name.as_bytes().to_vec());
    names.find(|name| name.starts_with(b"highwater-list-")).unwrap()
}

/// Failed before: a process whose queue others kept full was listed as one that does not answer.
#[test]
fn a_process_whose_socket_is_flooded_still_gives_its_list() {
    let mut peer = Peer::start();
    peer.tell("share 64");
    let name = list_of(peer.pid());
    let ends = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let address = SocketAddrUnix::new_abstract_name(&name).unwrap();
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                while !ends.load(std::sync::atomic::Ordering::Relaxed) {
                    let socket =
                        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
                    let _ = rustix::net::connect(&socket, &address);
                }
            });
        }
        let found: Vec<_> = (0..4).map(|_| entry(peer.pid())).collect();
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
        let answers = |found: &Value| found["answers"] == true && found["shared"].as_array().unwrap().len() == 1;
        assert!(found.iter().all(|found| found.as_ref().is_some_and(answers)), "{found:?}");
    });
}

/// Failed before: all of them had the process id 0 and one entry. One that did not answer hid the memory of the others.
#[test]
fn processes_of_a_hidden_namespace_have_entries_of_their_own() {
    let (mut silent, mut first, mut second) = (Peer::start(), Peer::start(), Peer::start());
    silent.tell("pretend silent");
    first.tell("share 40");
    second.tell("share 44");
    let arguments = ["-Urpf", env!("CARGO_BIN_EXE_highwater"), "ipc", "ls", "--json"];
    let output = Command::new("unshare").args(arguments).output().unwrap();
    let object = Run::of(output, &arguments).ended(0).object();
    let hidden: Vec<_> = object["processes"].as_array().unwrap().iter().filter(|one| one["pid"] == 0).collect();
    for kib in [40, 44] {
        let shares = |one: &&&Value| one["shared"].as_array().unwrap().iter().any(|one| one["bytes"] == kib * KIB);
        let found: Vec<_> = hidden.iter().filter(shares).collect();
        assert_eq!(found.len(), 1, "{kib} KiB in {hidden:?}");
        assert_eq!(found[0]["answers"], true, "{hidden:?}");
    }
    assert!(hidden.iter().any(|one| one["note"] == "does not answer"), "{hidden:?}");
}

/// Failed before: with few descriptors, the command failed and listed nothing.
#[test]
fn few_descriptors_suffice_for_many_processes() {
    let (mut hostile, mut peer) = (Peer::start(), Peer::start());
    (0..60).for_each(|_| drop(hostile.tell("pretend zeros")));
    peer.tell("share 64");
    for descriptors in [12, 50] {
        let script = format!("ulimit -n {descriptors}; exec \"$0\" ipc ls --json");
        let output = Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_highwater")]).output().unwrap();
        let object = Run::of(output, &[&script]).ended(0).object();
        let found = |pid| object["processes"].as_array().unwrap().iter().find(|one| one["pid"] == pid).cloned();
        let (peer, hostile) = (found(peer.pid()).unwrap(), found(hostile.pid()).unwrap());
        assert_eq!((&peer["answers"], peer["shared"].as_array().unwrap().len()), (&true.into(), 1), "{descriptors}");
        assert_eq!(hostile["note"], "does not answer in a form that this version knows", "{descriptors}");
    }
}

#[test]
fn nothing_of_another_user_is_listed() {
    // Without rights, no test can start a process of another user. Then there is nothing to find.
    let foreign = Peer::start_as(|command| {
        command.uid(65_534);
    });
    let Ok(mut foreign) = foreign else { return };
    foreign.tell("share 64");
    assert_eq!(entry(foreign.pid()), None);
    foreign.tell("pretend silent");
    let began = Instant::now();
    assert_eq!(entry(foreign.pid()), None);
    assert!(began.elapsed() < Duration::from_secs(10), "a process of another user is waited for");
}

/// Failed before: the table named each holder of each allocation, which made 10 MB of text.
#[test]
fn a_table_is_short_however_many_allocations_and_holders_a_list_has() {
    let mut hostile = Peer::start();
    hostile.tell("pretend many");
    let rows = rows(hostile.pid());
    let text: usize = rows.iter().flatten().map(String::len).sum();
    assert!(rows.len() == 32 && text < 8000, "{} rows with {text} bytes", rows.len());
    let largest = "100000, 100001, 100002, 100003, 100004, 100005, 100006, 100007 and 92 others";
    assert!(with_row(&rows, &["shares", "1", "100", largest]), "{rows:?}");
    // The allocations of 1 to 69 bytes.
    assert!(with_row(&rows, &["has more", "69", "2415", "69 groups"]), "{rows:?}");
    let found = entry(hostile.pid()).unwrap();
    let shared = found["shared"].as_array().unwrap();
    assert_eq!((shared.len(), shared[99]["holders"].as_array().unwrap().len()), (100, 1000), "JSON has them all");
}

/// A time as the program prints it.
fn date_of(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let date = Command::new("date").args(["-u", "-d", &format!("@{seconds}"), "+%Y-%m-%dT%H:%M:%SZ"]).output().unwrap();
    String::from_utf8(date.stdout).unwrap().trim_end().to_owned()
}

#[test]
fn an_heir_is_listed_as_the_owner_and_holds_its_importers() {
    let (mut owner, mut heir, mut importer) = (Peer::start(), Peer::start(), Peer::start());
    let ticket = owner.tell("share 64");
    heir.tell(&format!("inherit {ticket}"));
    importer.tell(&format!("open {ticket}"));
    drop(owner);
    until("the heir owns it, and the importer holds it", || {
        let (heir, other) = (entry(heir.pid()).unwrap(), entry(importer.pid()).unwrap());
        let holders = heir["shared"][0]["holders"].clone();
        let owner = (&other["opened"][0]["owner"], &other["opened"][0]["owner_has_ended"]);
        holders == Value::from(vec![importer.pid()])
            && heir["opened"] == Value::Array(Vec::new())
            && owner == (&heir["pid"], &Value::Bool(false))
    });
}

#[test]
fn a_holder_answers_for_a_killed_owner_until_it_is_told_to_end() {
    for arguments in [&["ipc", "hold"][..], &["--json", "ipc", "hold"]] {
        let (mut owner, mut stranger) = (Peer::start(), Peer::start());
        let ticket = owner.tell("share 64");
        let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
        command.args(arguments).arg(&ticket).stdout(Stdio::piped());
        let mut holder = command.spawn().unwrap();
        let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut wait_for = |part: String| assert!(lines.any(|line| line.contains(&part)), "{part}");
        let is_json = arguments.len() == 3;
        wait_for(if is_json {
            format!("\"owner\":{}", owner.pid())
        } else {
            format!("process {} answers", owner.pid())
        });
        drop(owner);
        wait_for(if is_json { "\"state\":\"inherited\"".to_owned() } else { "this process answers".to_owned() });
        assert_eq!(stranger.tell(&format!("can-open {ticket}")), "true");
        kill_process(Pid::from_child(&holder), Signal::TERM).unwrap();
        assert_eq!(holder.wait().unwrap().code(), Some(0));
        let mut late = Peer::start();
        assert_eq!(late.tell(&format!("can-open {ticket}")), "false");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_highwater")).args(["ipc", "hold", "nothing"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
}

/// The lines that a holder prints.
type Lines = Box<dyn Iterator<Item = String>>;

/// Plays a service manager with a store for descriptors.
struct Manager {
    socket: UnixDatagram,
    name: String,
    ticket: String,
    store: Vec<(String, OwnedFd)>,
}

impl Manager {
    fn new(ticket: &str) -> Self {
        let name = format!("test-of-a-store-{}-{}", std::process::id(), &ticket[ticket.len() - 16..]);
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        Self { socket, name, ticket: ticket.to_owned(), store: Vec::new() }
    }

    /// Starts the next process of the service.
    fn start(&self) -> (Child, Lines) {
        let (mut redirected, mut names) = (String::new(), Vec::new());
        // Inheritable copies above the numbers that they get, for the time of the start.
        let copy = |(_, stored): &(String, OwnedFd)| {
            let copy = fcntl_dupfd_cloexec(stored, 30).unwrap();
            fcntl_setfd(&copy, FdFlags::empty()).unwrap();
            copy
        };
        let copies: Vec<OwnedFd> = self.store.iter().map(copy).collect();
        for (at, (name, _)) in self.store.iter().enumerate() {
            let copy = copies[at].as_raw_fd();
            redirected += &format!(" {}<&{copy} {copy}<&-", at + 3);
            names.push(name.as_str());
        }
        let mut command = Command::new("bash");
        let script = format!("LISTEN_PID=$$ exec \"$@\"{redirected}");
        command.args(["-c", &script, "bash", env!("CARGO_BIN_EXE_highwater"), "ipc", "hold", &self.ticket]);
        command.env("NOTIFY_SOCKET", format!("@{}", self.name)).env("LISTEN_FDS", names.len().to_string());
        command.env("LISTEN_FDNAMES", names.join(":")).stdout(Stdio::piped());
        let mut holder = command.spawn().unwrap();
        let lines = BufReader::new(holder.stdout.take().unwrap()).lines().map(Result::unwrap);
        (holder, Box::new(lines))
    }

    /// Obeys the service until the store has one descriptor with each of these parts in its name, and no other one.
    #[track_caller]
    fn until_it_has(&mut self, parts: &[&str]) {
        let is_so = |store: &[(String, OwnedFd)]| {
            store.len() == parts.len() && parts.iter().all(|part| store.iter().any(|(name, _)| name.contains(part)))
        };
        self.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        while !is_so(&self.store) {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let (mut control, mut bytes) = (RecvAncillaryBuffer::new(&mut space), [0; 1000]);
            let mut data = [IoSliceMut::new(&mut bytes)];
            let received = recvmsg(&self.socket, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            let mut descriptors = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            let text = std::str::from_utf8(&bytes[..received.bytes]).unwrap();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap().to_owned();
            if text.starts_with("FDSTORE=1\n") {
                self.store.push((name, descriptors.pop().unwrap()));
            } else {
                assert!(text.starts_with("FDSTOREREMOVE=1\n"), "{text}");
                self.store.retain(|(stored, _)| *stored != name);
            }
        }
    }
}

fn end(mut holder: Child, signal: Signal) -> Option<i32> {
    kill_process(Pid::from_child(&holder), signal).unwrap();
    holder.wait().unwrap().code()
}

/// Whatever ends while the holder is away, its next process has the memory.
#[test]
fn a_holder_survives_its_own_death_in_the_store_of_a_service_manager() {
    let mut stranger = Peer::start();
    for dies_meanwhile in [false, true] {
        let mut owner = Peer::start();
        let ticket = owner.tell("share 64");
        let owned = format!("process {} answers", owner.pid());
        let mut manager = Manager::new(&ticket);
        let has = |mut lines: Lines, part: &str| {
            assert!(lines.any(|line| line.contains(part)), "{part}");
            lines
        };
        let (holder, lines) = manager.start();
        let lines = has(lines, &owned);
        manager.until_it_has(&["-state-1", "-0", "-owner-"]);
        end(holder, Signal::KILL);
        drop(lines);
        let (holder, lines) = if dies_meanwhile {
            drop(owner);
            let (holder, lines) = manager.start();
            (holder, has(lines, "this process answers"))
        } else {
            let (holder, lines) = manager.start();
            let lines = has(lines, &owned);
            // The live owner counts it again, and its death is noticed.
            assert_eq!(stranger.tell(&format!("can-open {ticket}")), "true");
            drop(owner);
            (holder, has(lines, "this process answers"))
        };
        manager.until_it_has(&["-state-", "-0", "-socket"]);
        assert_eq!(stranger.tell(&format!("can-open {ticket}")), "true");
        end(holder, Signal::KILL);
        drop(lines);
        // The store has the name, and no process answers.
        assert_eq!(Peer::start().tell(&format!("can-open {ticket}")), "false");
        let (holder, lines) = manager.start();
        let lines = has(lines, "this process answers");
        assert_eq!(Peer::start().tell(&format!("can-open {ticket}")), "true");
        assert_eq!(end(holder, Signal::TERM), Some(0));
        drop((lines, manager));
        assert_eq!(Peer::start().tell(&format!("can-open {ticket}")), "false");
    }
}
