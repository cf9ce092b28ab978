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
use super::listing::{LONGEST, Listed, ListedExport, ListedImport, Listing, NAME, is_greeting, is_sealed};
use super::options::Openers;
use super::system::{Received, os_error, receive};
use highwater_hal::{Error, ErrorKind, Result, Transport};

const OPERATION: &str = "processes";
/// Number of sockets that are asked at once.
const AT_ONCE: usize = 64;

/// A process that shares memory or has memory of others open.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharingProcess {
    /// Its process id, as this process sees it. 0 if it is in a PID namespace that is hidden from here.
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
/// call asks 64 runtimes at a time, and asks a silent process only once. So each 64 silent processes delay it by `limit`. The call
/// finds only processes of this user in the network namespace of this process.
///
/// # Errors
/// `OperatingSystem` if `/proc/net/unix` cannot be read, or if this process has no descriptor left.
pub fn processes(limit: Duration) -> Result<Vec<SharingProcess>> {
    let names = names().map_err(|error| {
        Error::new(ErrorKind::OperatingSystem, OPERATION, format!("/proc/net/unix cannot be read: {error}"))
            .with_code(i64::from(error.raw_os_error().unwrap_or(0)))
            .with_hint("mount /proc in this container")
    })?;
    let mut found: BTreeMap<u32, SharingProcess> = BTreeMap::new();
    let mut owners = Owners::default();
    for names in names.chunks(AT_ONCE) {
        ask(names, limit, &mut owners, &mut found)?;
    }
    Ok(found.into_values().filter(|process| !process.is_empty()).collect())
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

/// The processes of this user by their sockets, for sockets that cannot be asked. Read at the first such socket.
#[derive(Default)]
struct Owners(Option<HashMap<u64, u32>>);

impl Owners {
    fn of(&mut self, inode: u64) -> Option<u32> {
        self.0.get_or_insert_with(sockets_of_processes).get(&inode).copied()
    }
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
    pid: u32,
}

/// Result of a connection to a list.
enum Connected<'n> {
    To(Asked<'n>),
    /// The queue of the socket is full, so nobody answers there.
    Full,
    /// The process has ended or belongs to another user.
    Nobody,
}

fn connect(name: &Name) -> Result<Connected<'_>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|errno| os_error(OPERATION, "socket", errno))?;
    let Ok(address) = SocketAddrUnix::new_abstract_name(&name.bytes) else { return Ok(Connected::Nobody) };
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(Connected::Full),
            Err(_) => return Ok(Connected::Nobody),
        }
    }
    match Process::of_peer(OPERATION, socket.as_fd(), Openers::SameUser) {
        Ok(process) if !process.has_ended() => {
            let pid = process.number();
            Ok(Connected::To(Asked { name, socket, process, pid }))
        }
        // The descriptors of this process have run out.
        Err(error) if error.code() == Some(i64::from(Errno::MFILE.raw_os_error())) => Err(error),
        _ => Ok(Connected::Nobody),
    }
}

/// Asks some sockets at once, and adds what they answer.
fn ask(names: &[Name], limit: Duration, owners: &mut Owners, found: &mut BTreeMap<u32, SharingProcess>) -> Result<()> {
    let mut waiting = Vec::new();
    for name in names {
        match connect(name)? {
            Connected::To(asked) => {
                let known = found.entry(asked.pid).or_insert_with(|| SharingProcess::new(asked.pid));
                if known.answer != Answer::Complete {
                    // It has not answered before, and does not get more time.
                } else if asked.process.is_stopped() {
                    known.answer = Answer::Stopped;
                } else {
                    waiting.push(asked);
                }
            }
            Connected::Full => {
                if let Some(pid) = owners.of(name.inode) {
                    found.entry(pid).or_insert_with(|| SharingProcess::new(pid)).answer = Answer::None;
                }
            }
            Connected::Nobody => {}
        }
    }
    let until = Instant::now() + limit;
    while !waiting.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let mut ends: Vec<_> = waiting.iter().map(|asked| PollFd::new(&asked.socket, PollFlags::IN)).collect();
        let timeout = rustix::time::Timespec::try_from(left).ok();
        // Interrupted or not, each socket is read.
        let _ = rustix::event::poll(&mut ends, timeout.as_ref());
        let is_over = left.is_zero();
        waiting.retain(|asked| {
            let answer = match answer_of(asked) {
                Some(Ok(listing)) => {
                    if let Some(process) = found.get_mut(&asked.pid) {
                        process.add(listing);
                    }
                    return false;
                }
                // A process that ends in the meantime shares nothing.
                _ if asked.process.has_ended() => return false,
                Some(Err(answer)) => answer,
                None if !is_over => return true,
                None if asked.process.is_stopped() => Answer::Stopped,
                None => Answer::None,
            };
            if let Some(process) = found.get_mut(&asked.pid) {
                process.answer = answer;
            }
            false
        });
    }
    Ok(())
}

/// Returns the answer of a process, if it is here.
fn answer_of(asked: &Asked<'_>) -> Option<std::result::Result<Listing, Answer>> {
    let mut buffer = [0; 16];
    let (bytes, descriptors) = match receive(asked.socket.as_fd(), &mut buffer) {
        Ok(Received::Nothing) => return None,
        Ok(Received::Message(bytes, descriptors)) => (bytes, descriptors),
        // The runtime has ended, or has no descriptor left for its list. Its socket still exists in the second case.
        Ok(Received::End) if matches!(connect(asked.name), Ok(Connected::To(_))) => return Some(Err(Answer::None)),
        Ok(Received::End) => return Some(Ok(Listing::default())),
        Ok(Received::Cut { .. }) | Err(_) => return Some(Err(Answer::Invalid)),
    };
    let file = descriptors.first().filter(|_| is_greeting(&buffer[..bytes]) && descriptors.len() == 1);
    let listing = file.and_then(read).and_then(|bytes| Listing::decode(&bytes));
    Some(listing.ok_or(Answer::Invalid))
}

/// Reads a list. The file is sealed memory, so no read waits.
fn read(file: &OwnedFd) -> Option<Vec<u8>> {
    if !is_sealed(file) {
        return None;
    }
    let length = usize::try_from(rustix::fs::fstat(file).ok()?.st_size).ok().filter(|length| *length <= LONGEST)?;
    let mut bytes = vec![0; length];
    let mut here = 0;
    while here < length {
        match rustix::io::pread(file, &mut bytes[here..], here as u64) {
            Ok(0) => return None,
            Ok(count) => here += count,
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

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
