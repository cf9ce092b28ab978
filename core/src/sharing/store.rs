//! The descriptor store of a service manager, in which a [`Holder`](super::Holder) survives its own restart.
//!
//! systemd has such a store: a service sends it descriptors with `FDSTORE=1` over the socket of `NOTIFY_SOCKET`. The next process of the
//! service gets them from descriptor 3 on, as `LISTEN_FDS`, `LISTEN_FDNAMES` and `LISTEN_PID` state. Here, each descriptor has a name of its
//! own. One of them is a file in memory with the state that describes the others.
//!
//! *Crashes.* New descriptors are stored first, then the new state, under a number that only grows. Descriptors that only the former state
//! needs are removed last. So the store has a complete state at each moment. The next process takes the latest complete one.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::listing::{from_file, to_file};
use super::message::Part;
use super::options::Openers;
use super::system::{os_error, send};
use super::ticket::{Fields, Ticket};
use highwater_hal::{Error, ErrorKind, Result};

const OPERATION: &str = "hold";
const MAGIC: [u8; 4] = *b"HWHS";
const VERSION: u32 = 1;
/// The start of the names of this library.
const PREFIX: &str = "highwater-";
/// The start of the names of states. A number follows.
const STATE: &str = "highwater-state-";
/// The maximum length of a state.
const MOST_BYTES: usize = 1 << 28;
/// The first descriptor that a service manager passes.
const FIRST: i32 = 3;
/// Time limit for the service manager to read a message.
const READS_WITHIN: Duration = Duration::from_secs(10);

/// The descriptors of a holder, and the bytes that describe them, for [`Holder::restore`](super::Holder::restore) in another process.
///
/// The descriptors keep the memory. The bytes have the secrets of the tickets.
#[derive(Debug)]
pub struct HolderState {
    /// The descriptors, each with a name of its own. A descriptor has the same name in each state.
    pub descriptors: Vec<(String, OwnedFd)>,
    /// The description of the descriptors, by their names.
    pub bytes: Vec<u8>,
}

/// An allocation in a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Saved {
    pub(super) ticket: Ticket,
    /// The numbers of the latest share, and of the latest share whose work is done.
    pub(super) numbers: (u64, u64),
    pub(super) openers: Openers,
    /// The process that answers: its id and the inode of its pidfd. `None` if the holder answers.
    pub(super) owner: Option<(i32, u64)>,
    pub(super) parts: Vec<Part>,
}

impl Saved {
    fn exporter(&self) -> String {
        format!("{PREFIX}{:032x}", u128::from_be_bytes(self.ticket.exporter().incarnation))
    }

    /// Returns the name of the descriptor of a part.
    pub(super) fn part(&self, part: usize) -> String {
        format!("{}-{}-{part}", self.exporter(), self.ticket.serial)
    }

    /// Returns the name of the pidfd of the owner, or of the socket on which the holder answers.
    pub(super) fn proof(&self) -> String {
        match self.owner {
            Some((pid, inode)) => format!("{}-owner-{pid}-{inode}", self.exporter()),
            None => format!("{}-socket", self.exporter()),
        }
    }

    fn names(&self) -> impl Iterator<Item = String> + '_ {
        (0..self.parts.len()).map(|part| self.part(part)).chain([self.proof()])
    }
}

pub(super) fn encode(all: &[Saved]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((all.len() as u64).to_le_bytes());
    for Saved { ticket, numbers, openers, owner, parts } in all {
        let ticket = ticket.to_bytes();
        bytes.extend((ticket.len() as u32).to_le_bytes());
        bytes.extend(ticket);
        bytes.extend(numbers.0.to_le_bytes());
        bytes.extend(numbers.1.to_le_bytes());
        let (kind, group): (u32, u32) = match openers {
            Openers::SameUser => (0, 0),
            Openers::Group(group) => (1, *group),
            Openers::Secret => (2, 0),
        };
        let (pid, inode) = owner.unwrap_or_default();
        for number in [kind, group, u32::from(owner.is_some()), pid.cast_unsigned()] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(inode.to_le_bytes());
        bytes.extend((parts.len() as u32).to_le_bytes());
        for part in parts {
            bytes.extend(part.bytes.to_le_bytes());
            bytes.extend(part.payload);
        }
    }
    bytes
}

/// # Errors
/// `InvalidArgument` for bytes that are not of [`encode`].
pub(super) fn decode(bytes: &[u8]) -> Result<Vec<Saved>> {
    let mut fields = Fields { bytes };
    let all = take_all(&mut fields).filter(|_| fields.bytes.is_empty());
    all.ok_or_else(|| invalid("bytes that are not the state of a holder of this version"))
}

fn take_all(fields: &mut Fields<'_>) -> Option<Vec<Saved>> {
    if fields.array()? != MAGIC || fields.u32()? != VERSION {
        return None;
    }
    let count = fields.u64()?;
    // Nothing is allocated for `count`, which may be wrong.
    let mut all = Vec::new();
    for _ in 0..count {
        let length = fields.u32()? as usize;
        let (ticket, rest) = fields.bytes.split_at_checked(length)?;
        fields.bytes = rest;
        let ticket = Ticket::from_bytes(ticket).ok()?;
        let numbers = (fields.u64()?, fields.u64()?);
        let openers = match (fields.u32()?, fields.u32()?) {
            (0, _) => Openers::SameUser,
            (1, group) => Openers::Group(group),
            (2, _) => Openers::Secret,
            _ => return None,
        };
        let (has_owner, pid, inode) = (fields.u32()?, fields.u32()?.cast_signed(), fields.u64()?);
        let owner = (has_owner != 0).then_some((pid, inode));
        let count = fields.u32()?;
        let mut parts = Vec::new();
        for _ in 0..count {
            parts.push(Part { bytes: fields.u64()?, payload: fields.array()? });
        }
        all.push(Saved { ticket, numbers, openers, owner, parts });
    }
    Some(all)
}

pub(super) fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, OPERATION, format!("the state of a holder has {what}"))
        .with_hint("pass the descriptors and the bytes of `Holder::save` unchanged")
}

/// The descriptor store of the service manager that has started this process.
#[derive(Debug)]
pub struct DescriptorStore {
    manager: UnixDatagram,
    /// The names of the descriptors in the store.
    stored: HashSet<String>,
    /// The number of the latest state.
    latest: u64,
    /// The bytes of the latest state, if this process has stored it.
    bytes: Option<Vec<u8>>,
}

impl DescriptorStore {
    /// Returns the store of the service manager that has started this process, and the state that an earlier process left there. `None` if
    /// no service manager has started this process.
    ///
    /// The first call takes the descriptors. Later calls return no state, and neither do calls in a process that `LISTEN_PID` does not name.
    /// The service must enable the store: for systemd, by `FileDescriptorStoreMax=`.
    ///
    /// # Errors
    /// `InvalidArgument` if the variables of the service manager are invalid; `OperatingSystem` if its socket cannot be used.
    pub fn from_environment() -> Result<Option<(Self, Option<HolderState>)>> {
        static IS_TAKEN: AtomicBool = AtomicBool::new(false);
        let Ok(address) = std::env::var("NOTIFY_SOCKET") else { return Ok(None) };
        let manager = connect(&address)?;
        let passed = if IS_TAKEN.swap(true, Ordering::Relaxed) { Vec::new() } else { passed()? };
        let stored: HashSet<String> = passed.iter().map(|(name, _)| name.clone()).collect();
        let mut states: Vec<u64> = stored.iter().filter_map(|name| name.strip_prefix(STATE)?.parse().ok()).collect();
        states.sort_unstable_by(|one, other| other.cmp(one));
        let latest = states.first().copied().unwrap_or(0);
        let mut descriptors: HashMap<String, OwnedFd> = passed.into_iter().collect();
        let mut state = None;
        for number in states {
            let Some(bytes) = descriptors.get(&format!("{STATE}{number}")).and_then(|file| from_file(file, MOST_BYTES))
            else {
                continue;
            };
            let Ok(all) = decode(&bytes) else { continue };
            let names: HashSet<String> = all.iter().flat_map(Saved::names).collect();
            if names.iter().all(|name| descriptors.contains_key(name)) {
                let descriptors = names.into_iter().filter_map(|name| descriptors.remove_entry(&name)).collect();
                state = Some(HolderState { descriptors, bytes });
                break;
            }
        }
        Ok(Some((Self { manager, stored, latest, bytes: None }, state)))
    }

    /// Stores a state in place of the former one. Does nothing if it is the same.
    ///
    /// # Errors
    /// `OperatingSystem` if the service manager cannot be reached. The former state stays in the store.
    pub fn keep(&mut self, state: &HolderState) -> Result<()> {
        if self.bytes.as_ref() == Some(&state.bytes) {
            return Ok(());
        }
        for (name, descriptor) in &state.descriptors {
            if !self.stored.contains(name) {
                self.store(name, descriptor.as_fd())?;
            }
        }
        let file = to_file(&state.bytes).map_err(|errno| os_error(OPERATION, "file of a state", errno))?;
        self.latest += 1;
        let latest = format!("{STATE}{}", self.latest);
        self.store(&latest, file.as_fd())?;
        self.bytes = Some(state.bytes.clone());
        let needed: HashSet<&String> = state.descriptors.iter().map(|(name, _)| name).chain([&latest]).collect();
        // Names of other code of the program stay.
        let is_over = |name: &&String| name.starts_with(PREFIX) && !needed.contains(name);
        let over: Vec<String> = self.stored.iter().filter(is_over).cloned().collect();
        for name in over {
            self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None)?;
            self.stored.remove(&name);
        }
        Ok(())
    }

    fn store(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<()> {
        // A pidfd hangs up with its process. The manager must keep it then, too.
        self.tell(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), Some(descriptor))?;
        self.stored.insert(name.to_owned());
        Ok(())
    }

    /// Sends a message once the manager has space for it.
    fn tell(&self, message: &str, descriptor: Option<BorrowedFd<'_>>) -> Result<()> {
        let until = Instant::now() + READS_WITHIN;
        let descriptors: Vec<_> = descriptor.into_iter().collect();
        loop {
            match send(self.manager.as_fd(), message.as_bytes(), &descriptors) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) if Instant::now() < until => {
                    let mut ends = [PollFd::from_borrowed_fd(self.manager.as_fd(), PollFlags::OUT)];
                    let most = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                    // Interrupted or not, the send is tried again.
                    let _ = rustix::event::poll(&mut ends, Some(&most));
                }
                Err(errno) => return Err(os_error(OPERATION, "connection to the service manager", errno)),
            }
        }
    }
}

/// Connects to the socket of `NOTIFY_SOCKET`: a path, or an abstract name after `@`.
fn connect(address: &str) -> Result<UnixDatagram> {
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::OperatingSystem, OPERATION, format!("the socket `{address}` cannot be used: {error}"))
            .with_hint("start this process by a service manager, or unset NOTIFY_SOCKET")
    };
    let name = match address.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(address),
    };
    let socket = UnixDatagram::unbound().map_err(failed)?;
    socket.connect_addr(&name.map_err(failed)?).map_err(failed)?;
    Ok(socket)
}

/// Takes the descriptors that the service manager has passed to this process, with their names.
fn passed() -> Result<Vec<(String, OwnedFd)>> {
    let variable = |name: &str| std::env::var(name).ok();
    // With another id, the variables are those of a parent.
    if variable("LISTEN_PID").and_then(|pid| pid.parse().ok()) != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let count = variable("LISTEN_FDS").unwrap_or_default();
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<&str> = names.split(':').collect();
    let wrong = |what: String| {
        Error::new(ErrorKind::InvalidArgument, OPERATION, what)
            .with_hint("set LISTEN_FDS to the number of descriptors from 3 on, and LISTEN_FDNAMES to a name for each")
    };
    let count: i32 = count.parse().map_err(|_| wrong(format!("LISTEN_FDS is `{count}`, which is no number")))?;
    if usize::try_from(count) != Ok(names.len()) && count != 0 {
        return Err(wrong(format!("LISTEN_FDS is {count}, and LISTEN_FDNAMES has {} names", names.len())));
    }
    let numbers: Vec<i32> = (0..count).map(|at| FIRST + at).collect();
    // All of them are checked before one is taken.
    for number in &numbers {
        // SAFETY: The call takes a number and touches no memory. A number that is not open is an error.
        let flags = unsafe { libc::fcntl(*number, libc::F_GETFD) };
        if flags < 0 || flags & libc::FD_CLOEXEC != 0 {
            return Err(wrong(format!("descriptor {number} was not passed to this process")));
        }
    }
    let taken = numbers.into_iter().zip(names).map(|(number, name)| {
        // SAFETY: The descriptor is open, and the manager has passed it to this process. It does not close on exec, so no other code of
        // this process has opened it. This function runs once.
        let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
        let _ = rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC);
        (name.to_owned(), descriptor)
    });
    Ok(taken.collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn saved(serial: u64) -> Saved {
        let ticket = Ticket::example(serial, 3 * 4096);
        let parts = vec![Part { bytes: 4096, payload: [9; 64] }; 3];
        let owner = serial.is_multiple_of(2).then_some((77, 1 << 40));
        Saved { ticket, numbers: (3, 2), openers: Openers::Group(5), owner, parts }
    }

    #[test]
    fn a_state_comes_back_and_a_cut_one_does_not() {
        let all = vec![saved(1), saved(2)];
        let bytes = encode(&all);
        assert_eq!(decode(&bytes).unwrap(), all);
        for length in 0..bytes.len() {
            let error = decode(&bytes[..length]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
        assert_eq!(decode(&encode(&[])).unwrap(), []);
    }

    #[test]
    fn the_names_of_a_state_differ() {
        let (one, two) = (saved(1), saved(2));
        let names: Vec<_> = one.names().chain(two.names()).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), 8);
        assert!(names.iter().all(|name| name.len() < 256 && !name.contains(':')), "{names:?}");
    }

    proptest! {
        #[test]
        fn garbage_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            if bytes.len() >= 8 {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
            }
            let _ = decode(&bytes);
        }
    }
}
