//! [`processes`]: the processes of this user that share memory, and the memory that they share.
//!
//! No registry exists. The caller asks all abstract sockets of `/proc/net/unix` that have the name of a list (`listing.rs`). The kernel
//! names the process of a socket, and only processes of this user count.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::identity::Process;
use super::listing::{LONGEST, Listed, ListedExport, ListedImport, Listing, NAME, from_file, is_greeting};
use super::options::Openers;
use super::system::{Received, os_error, receive};
use highwater_hal::{Error, ErrorKind, Result, Transport};

const OPERATION: &str = "processes";
/// Number of sockets that are asked at once.
const AT_ONCE: usize = 64;
/// Pause before another try, if a queue is full.
const PAUSE: Duration = Duration::from_millis(1);

/// A process that shares memory or has memory of others open.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharingProcess {
    /// Its process id, as this process sees it. 0 if it is in a PID namespace that is hidden from here; several processes may
    /// then have this number.
    pub pid: u32,
    /// Whether the lists below are complete.
    pub answer: Answer,
    /// Allocations that it shares, including those that it has dropped and others hold.
    pub shared: Vec<SharedAllocation>,
    /// Allocations of other processes that it has mapped.
    pub opened: Vec<OpenedAllocation>,
    /// Number of allocations that are not in these lists. A list has at most 32 MiB, or about 700,000 allocations.
    pub left_off: u64,
}

/// The outcome of the request for a process's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The process has sent its complete lists.
    Complete,
    /// The process is stopped, by a signal or a debugger.
    Stopped,
    /// The process has not answered within the limit.
    None,
    /// The queue of its socket stayed full. Other processes fill the queue, or the process does not answer.
    Full,
    /// The process has sent something else. It has another version of this library, or is hostile.
    Invalid,
}

/// An allocation, as the process that lists it sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// The transport of the memory.
    pub transport: Transport,
    /// The ordinal of the device in that process. `None` for page-locked memory.
    pub device: Option<u32>,
    /// The UUID of the device; zeros for page-locked memory.
    pub device_uuid: [u8; 16],
    /// Size in bytes.
    pub bytes: u64,
    /// The time of its first share, or of the open that mapped it.
    pub since: SystemTime,
}

/// An allocation that a process shares.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedAllocation {
    /// The allocation.
    pub allocation: Allocation,
    /// True if the process has dropped its buffer and others still hold the memory.
    pub is_dropped: bool,
    /// Ids of the processes that have it open or mapped, as that process sees them.
    pub holders: Vec<u32>,
}

/// An allocation of another process that a process has mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenedAllocation {
    /// The allocation.
    pub allocation: Allocation,
    /// Id of the process that shares it, as that process sees it.
    pub owner: u32,
    /// True if that process has ended.
    pub owner_has_ended: bool,
    /// True if no buffer has it open: the mapping is kept for the next open.
    pub is_idle: bool,
}

impl From<Listed> for Allocation {
    fn from(listed: Listed) -> Self {
        let Listed { transport, device, device_uuid, bytes, since } = listed;
        Self { transport, device, device_uuid, bytes, since }
    }
}

impl SharingProcess {
    pub(super) fn new(pid: u32) -> Self {
        Self { pid, answer: Answer::Complete, shared: Vec::new(), opened: Vec::new(), left_off: 0 }
    }

    pub(super) fn add(&mut self, listing: Listing) {
        let shared = |ListedExport { what, is_dropped, holders }| SharedAllocation {
            allocation: what.into(),
            is_dropped,
            holders,
        };
        let opened = |ListedImport { what, owner, owner_has_ended, is_idle }| OpenedAllocation {
            allocation: what.into(),
            owner,
            owner_has_ended,
            is_idle,
        };
        self.shared.extend(listing.exports.into_iter().map(shared));
        self.opened.extend(listing.imports.into_iter().map(opened));
        self.left_off += u64::from(listing.left_off);
    }

    fn is_empty(&self) -> bool {
        self.answer == Answer::Complete && self.shared.is_empty() && self.opened.is_empty() && self.left_off == 0
    }
}

/// Returns the processes of this user that share memory through this library, or have such memory open, by process id.
///
/// Each process answers for itself. A process that is stopped, or does not answer within `limit`, is listed without its memory. The
/// call asks 64 runtimes at a time, fewer if this process has few descriptors left, and asks a silent process only once. So every 64
/// silent processes delay it by `limit`. Any process may fill the queue of a socket. The call tries all such sockets again for another
/// `limit`. It finds only processes of this user in the network namespace of this process.
///
/// # Errors
/// `OperatingSystem` if `/proc/net/unix` cannot be read, or if this process has no descriptor left.
pub fn processes(limit: Duration) -> Result<Vec<SharingProcess>> {
    let names = names().map_err(|error| {
        let code = error.raw_os_error().unwrap_or(0);
        let errno = Errno::from_raw_os_error(code);
        if matches!(errno, Errno::MFILE | Errno::NFILE) {
            return os_error(OPERATION, "list of sockets", errno);
        }
        Error::new(ErrorKind::OperatingSystem, OPERATION, format!("/proc/net/unix cannot be read: {error}"))
            .with_code(i64::from(code))
            .with_hint("mount /proc in this container")
    })?;
    let mut found = Found::default();
    let mut left: Vec<&Name> = names.iter().collect();
    let (mut full, mut at_once) = (Vec::new(), AT_ONCE);
    while !left.is_empty() {
        let later = left.split_off(left.len().min(at_once));
        let Unasked { full: more, without_descriptor } = found.ask(&left, limit, false)?;
        if !without_descriptor.is_empty() {
            at_once = (at_once / 2).max(1);
        }
        full.extend(more);
        left = [without_descriptor, later].concat();
    }
    // Other processes may fill a queue as fast as its process accepts, so only repeated tries get through.
    while !full.is_empty() {
        let Unasked { full: silent, without_descriptor } = found.ask(&full, limit, true)?;
        found.add_full(&silent);
        full = without_descriptor;
    }
    Ok(found.0.into_values().filter(|process| !process.is_empty()).collect())
}

/// The identity of a process. Not every process has a process id here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// A process id.
    Visible(u32),
    /// The inode of the pidfd of a process in a hidden PID namespace.
    Hidden(u64),
    /// The inode of a socket of such a process, before Linux 6.9.
    Socket(u64),
}

/// The processes that have been found.
#[derive(Default)]
struct Found(BTreeMap<Key, SharingProcess>);

/// The sockets that a round did not ask.
#[derive(Default)]
struct Unasked<'n> {
    /// Their queues were full.
    full: Vec<&'n Name>,
    /// This process had no descriptor left.
    without_descriptor: Vec<&'n Name>,
}

/// A socket with the name of a list.
struct Name {
    bytes: Vec<u8>,
    inode: u64,
}

/// Returns the sockets that listen and have the name of a list.
fn names() -> io::Result<Vec<Name>> {
    let table = std::fs::read("/proc/net/unix")?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(|line| name_in(std::str::from_utf8(line).ok()?)).collect())
}

/// Reads a line of `/proc/net/unix`: number, references, protocol, flags, type, state, inode and name.
fn name_in(line: &str) -> Option<Name> {
    const LISTENS: u32 = 1 << 16;
    let mut words = line.split_ascii_whitespace();
    let flags = u32::from_str_radix(words.nth(3)?, 16).ok()?;
    let (inode, name) = (words.nth(2)?.parse().ok()?, words.next()?.strip_prefix('@')?);
    let digits = name.strip_prefix(NAME)?;
    let is_list = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    (flags & LISTENS != 0 && is_list).then(|| Name { bytes: name.into(), inode })
}

/// Returns the sockets of all processes whose descriptors this process may read: those of this user.
fn sockets_of_processes() -> HashMap<u64, u32> {
    let mut sockets = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let is_of_user = std::fs::metadata(entry.path())
            .is_ok_and(|data| std::os::unix::fs::MetadataExt::uid(&data) == rustix::process::geteuid().as_raw());
        if !is_of_user {
            continue;
        }
        for descriptor in std::fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten() {
            let target = std::fs::read_link(descriptor.path()).unwrap_or_default();
            let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']'));
            sockets.extend(inode.and_then(|inode| inode.parse::<u64>().ok()).map(|inode| (inode, pid)));
        }
    }
    sockets
}

/// A process that is asked.
struct Asked<'n> {
    name: &'n Name,
    socket: OwnedFd,
    process: Process,
    key: Key,
}

/// Result of a connection to a list.
enum Connected<'n> {
    To(Asked<'n>),
    /// The queue of the socket is full.
    Full,
    /// This process has no descriptor left.
    NoDescriptor(Error),
    /// The process has ended or belongs to another user.
    Nobody,
}

fn connect(name: &Name) -> Result<Connected<'_>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = match rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) {
        Ok(socket) => socket,
        Err(errno @ (Errno::MFILE | Errno::NFILE)) => {
            return Ok(Connected::NoDescriptor(os_error(OPERATION, "socket", errno)));
        }
        Err(errno) => return Err(os_error(OPERATION, "socket", errno)),
    };
    let Ok(address) = SocketAddrUnix::new_abstract_name(&name.bytes) else { return Ok(Connected::Nobody) };
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(Connected::Full),
            Err(_) => return Ok(Connected::Nobody),
        }
    }
    let is_shortage = |code| [Errno::MFILE, Errno::NFILE].iter().any(|errno| code == i64::from(errno.raw_os_error()));
    Ok(match Process::of_peer(OPERATION, socket.as_fd(), Openers::SameUser) {
        Ok(process) if !process.has_ended() => {
            let key = match process.number() {
                0 => process.unique_inode().map_or(Key::Socket(name.inode), Key::Hidden),
                pid => Key::Visible(pid),
            };
            Connected::To(Asked { name, socket, process, key })
        }
        Err(error) if error.code().is_some_and(is_shortage) => Connected::NoDescriptor(error),
        _ => Connected::Nobody,
    })
}

/// The message of a process.
enum Sent {
    /// Nothing yet.
    Nothing,
    List(Listing),
    /// Something else, or the end of the connection.
    Fault(Answer),
    /// A list, for whose file this process had no descriptor left.
    Lost,
}

impl Found {
    fn of(&mut self, key: Key) -> &mut SharingProcess {
        let pid = if let Key::Visible(pid) = key { pid } else { 0 };
        self.0.entry(key).or_insert_with(|| SharingProcess::new(pid))
    }

    /// Lists the processes of this user whose queues stay full. Only `/proc` names them.
    fn add_full(&mut self, names: &[&Name]) {
        if names.is_empty() {
            return;
        }
        let owners = sockets_of_processes();
        for pid in names.iter().filter_map(|name| owners.get(&name.inode)) {
            self.of(Key::Visible(*pid)).answer = Answer::Full;
        }
    }

    /// Asks some sockets at once, and adds their answers. If `tries_again`, it tries sockets with a full queue until `limit`.
    fn ask<'n>(&mut self, names: &[&'n Name], limit: Duration, tries_again: bool) -> Result<Unasked<'n>> {
        // `None` for a time that does not end.
        let until = Instant::now().checked_add(limit);
        let mut unasked = Unasked::default();
        let mut waiting: Vec<Asked<'n>> = Vec::new();
        let mut to_connect = names.to_vec();
        loop {
            for name in std::mem::take(&mut to_connect) {
                match connect(name)? {
                    Connected::To(asked) => waiting.extend(self.may_wait_for(&asked).then_some(asked)),
                    Connected::Full if tries_again => to_connect.push(name),
                    Connected::Full => unasked.full.push(name),
                    Connected::NoDescriptor(error) if waiting.is_empty() => return Err(error),
                    Connected::NoDescriptor(_) => unasked.without_descriptor.push(name),
                    Connected::Nobody => {}
                }
            }
            if waiting.is_empty() && to_connect.is_empty() {
                return Ok(unasked);
            }
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            let pause = if to_connect.is_empty() { left } else { left.min(PAUSE) };
            let mut ends: Vec<_> = waiting.iter().map(|asked| PollFd::new(&asked.socket, PollFlags::IN)).collect();
            let timeout = rustix::time::Timespec::try_from(pause).ok();
            // Interrupted or not, each socket is read.
            let _ = rustix::event::poll(&mut ends, timeout.as_ref());
            let is_alone = waiting.len() == 1;
            let mut lost = Ok(());
            waiting.retain(|asked| match answer_of(asked) {
                Sent::Lost if is_alone => {
                    lost = Err(os_error(OPERATION, "list of a process", Errno::MFILE));
                    false
                }
                Sent::Lost => {
                    unasked.without_descriptor.push(asked.name);
                    false
                }
                sent => self.must_wait_for(asked, sent, left.is_zero()),
            });
            lost?;
            if left.is_zero() {
                unasked.full.append(&mut to_connect);
            }
        }
    }

    /// Returns whether to ask a process. Lists a stopped process.
    fn may_wait_for(&mut self, asked: &Asked<'_>) -> bool {
        let known = self.of(asked.key);
        if known.answer == Answer::Complete && asked.process.is_stopped() {
            known.answer = Answer::Stopped;
        }
        // A process that has not answered before does not get more time.
        known.answer == Answer::Complete
    }

    /// Adds the message of a process. Returns true if its answer is still to come. `is_over` is true once the time is over.
    fn must_wait_for(&mut self, asked: &Asked<'_>, sent: Sent, is_over: bool) -> bool {
        let answer = match sent {
            Sent::List(listing) => {
                self.of(asked.key).add(listing);
                return false;
            }
            // A process that ends in the meantime shares nothing.
            _ if asked.process.has_ended() => return false,
            Sent::Fault(answer) => answer,
            Sent::Nothing if !is_over => return true,
            _ if asked.process.is_stopped() => Answer::Stopped,
            _ => Answer::None,
        };
        self.of(asked.key).answer = answer;
        false
    }
}

/// Returns the answer of a process, if it is here.
fn answer_of(asked: &Asked<'_>) -> Sent {
    let mut buffer = [0; 16];
    let (bytes, descriptors) = match receive(asked.socket.as_fd(), &mut buffer) {
        Ok(Received::Nothing) => return Sent::Nothing,
        Ok(Received::Message(bytes, descriptors)) => (bytes, descriptors),
        // The runtime has ended, or has no descriptor left for its list. Its socket still exists in the second case.
        Ok(Received::End) if matches!(connect(asked.name), Ok(Connected::To(_) | Connected::Full)) => {
            return Sent::Fault(Answer::None);
        }
        Ok(Received::End) => return Sent::List(Listing::default()),
        // A message with too many descriptors is also truncated.
        Ok(Received::Cut { descriptors: true }) if rustix::io::fcntl_dupfd_cloexec(&asked.socket, 0).is_err() => {
            return Sent::Lost;
        }
        Ok(Received::Cut { .. }) | Err(_) => return Sent::Fault(Answer::Invalid),
    };
    let file = descriptors.first().filter(|_| is_greeting(&buffer[..bytes]) && descriptors.len() == 1);
    let listing = file.and_then(|file| from_file(file, LONGEST)).and_then(|bytes| Listing::decode(&bytes));
    listing.map_or(Sent::Fault(Answer::Invalid), Sent::List)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Failed before: it panicked.
    #[test]
    fn a_limit_may_be_longer_than_the_clock_counts() {
        assert!(Found::default().ask(&[], Duration::MAX, false).is_ok());
    }

    #[test]
    fn only_sockets_that_listen_and_have_the_name_of_a_list_are_asked() {
        let line = |flags: &str, name: &str| format!("0000000000000000: 00000002 00000000 {flags} 0005 01 71 {name}");
        let digits = "0123456789abcdef0123456789abcdef";
        let found = name_in(&line("00010000", &format!("@{NAME}{digits}"))).unwrap();
        assert_eq!((found.inode, found.bytes), (71, format!("{NAME}{digits}").into_bytes()));
        for (flags, name) in [
            ("00000000", format!("@{NAME}{digits}")),
            ("00010000", format!("@{NAME}{digits}0")),
            ("00010000", format!("@{NAME}{}", "g".repeat(32))),
            ("00010000", format!("/{NAME}{digits}")),
            ("00010000", "@highwater-0123456789abcdef0123456789abcdef".to_owned()),
            ("nonsense", format!("@{NAME}{digits}")),
        ] {
            assert!(name_in(&line(flags, &name)).is_none(), "{flags} {name}");
        }
        assert!(name_in("Num       RefCount Protocol Flags    Type St Inode Path").is_none() && name_in("").is_none());
    }
}
