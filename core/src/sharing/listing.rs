//! The list of the memory that a runtime shares and has open. The runtime sends it to other processes of the user.
//!
//! Each runtime that shares or opens memory listens on a second abstract socket, `highwater-list-` and its incarnation. A connection
//! is the whole request. The sharing thread answers with one message, which carries a sealed file, and closes the connection. It reads
//! nothing from the client and keeps no state of it, so no client can delay it.
//!
//! The message has 8 bytes: `HWLS`, the version of the format, and the oldest version that a reader must know. The file:
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 4 | `HWLS` |
//! | 4 | 2 | version of the format, 1 |
//! | 6 | 2 | oldest version that a reader must know, 1 |
//! | 8 | 4 | number of allocations that the runtime shares, S |
//! | 12 | 4 | number of allocations of others that it has open, O |
//! | 16 | 4 | number of holders of all shared allocations together, H |
//! | 20 | 4 | number of allocations that the list leaves off, because it would be longer than [`LONGEST`] |
//! | 24 | 48 S | the shared allocations |
//! | 24 + 48 S | 48 O | the open ones |
//! | 24 + 48 (S + O) | 4 H | the process ids of the holders, in the order of the allocations |
//!
//! An allocation:
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 4 | transport: 0 legacy, 1 descriptor, 2 fabric |
//! | 4 | 4 | ordinal of the device in the process; 2^32 - 1 for page-locked memory |
//! | 8 | 16 | UUID of the device; 0 for page-locked memory |
//! | 24 | 8 | bytes |
//! | 32 | 8 | time of the first share, or of the open: milliseconds since 1970 |
//! | 40 | 4 | 1: the owner has dropped it (shared), or has ended (open). 2: no buffer has it open, and the mapping is kept (open) |
//! | 44 | 4 | number of holders (shared), or process id of the owner (open) |

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::identity::Process;
use super::options::Openers;
use super::system::{os_error, send};
use super::ticket::Fields;
use highwater_hal::{Error, Result, Transport};

/// The name of each list, before the incarnation.
pub(super) const NAME: &str = "highwater-list-";
/// Bytes of the longest file.
pub(super) const LONGEST: usize = 32 << 20;

const MAGIC: [u8; 4] = *b"HWLS";
const VERSION: u16 = 1;
const OLDEST_READER: u16 = 1;
const HEADER: usize = 24;
const ENTRY: usize = 48;
const HOLDER: usize = 4;
const NO_DEVICE: u32 = u32::MAX;
const GONE: u32 = 1;
const IDLE: u32 = 2;
/// Connections that wait to be accepted. Each is answered at once.
const BACKLOG: i32 = 64;
/// Maximum number of lists that the thread gives before it serves the importers.
const AT_ONCE: usize = 16;

/// The seals of a list. With them, no process can change it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

/// An allocation, as both sides list it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) transport: Transport,
    /// `None` for page-locked memory.
    pub(crate) device: Option<u32>,
    pub(crate) device_uuid: [u8; 16],
    pub(crate) bytes: u64,
    pub(crate) since: SystemTime,
}

/// An allocation that the runtime shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedExport {
    pub(crate) what: Listed,
    pub(crate) is_dropped: bool,
    /// Processes that may hold it.
    pub(crate) holders: Vec<u32>,
}

/// An allocation of another runtime that the runtime has mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListedImport {
    pub(crate) what: Listed,
    pub(crate) owner: u32,
    pub(crate) owner_has_ended: bool,
    /// True if no buffer has it open.
    pub(crate) is_idle: bool,
}

/// The memory that one runtime shares and has open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Listing {
    pub(crate) exports: Vec<ListedExport>,
    pub(crate) imports: Vec<ListedImport>,
    pub(crate) left_off: u32,
}

/// Returns the time in milliseconds since 1970.
fn to_millis(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn put(bytes: &mut Vec<u8>, what: &Listed, flags: u32, last: u32) {
    bytes.extend((what.transport as u32).to_le_bytes());
    bytes.extend(what.device.unwrap_or(NO_DEVICE).to_le_bytes());
    bytes.extend(what.device_uuid);
    bytes.extend(what.bytes.to_le_bytes());
    bytes.extend(to_millis(what.since).to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(last.to_le_bytes());
}

fn take(fields: &mut Fields<'_>) -> Option<(Listed, u32, u32)> {
    let transport = fields.u32()?;
    let known = [Transport::Legacy, Transport::Descriptor, Transport::Fabric];
    let transport = known.into_iter().find(|known| *known as u32 == transport)?;
    let device = Some(fields.u32()?).filter(|device| *device != NO_DEVICE);
    let (device_uuid, bytes) = (fields.array()?, fields.u64()?);
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(fields.u64()?))?;
    Some((Listed { transport, device, device_uuid, bytes, since }, fields.u32()?, fields.u32()?))
}

impl Listing {
    /// Leaves off the allocations that do not fit into a file.
    fn limit(&mut self) {
        let mut space = LONGEST - HEADER;
        let mut fits = |bytes: usize| {
            let left = space.checked_sub(bytes);
            space = left.unwrap_or(0);
            left.is_some()
        };
        let all = self.exports.len() + self.imports.len();
        // Imports first, because memory whose owner has ended is found nowhere else.
        self.imports.retain(|_| fits(ENTRY));
        self.exports.retain(|export| fits(ENTRY + HOLDER * export.holders.len()));
        let left_off = all - self.exports.len() - self.imports.len();
        self.left_off = u32::try_from(left_off).unwrap_or(u32::MAX);
    }

    /// Returns the list in the format above. It must not be longer than the longest file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let holders: usize = self.exports.iter().map(|export| export.holders.len()).sum();
        let mut bytes =
            Vec::with_capacity(HEADER + ENTRY * (self.exports.len() + self.imports.len()) + HOLDER * holders);
        bytes.extend(greeting());
        for count in [self.exports.len(), self.imports.len(), holders] {
            bytes.extend((count as u32).to_le_bytes());
        }
        bytes.extend(self.left_off.to_le_bytes());
        for ListedExport { what, is_dropped, holders } in &self.exports {
            put(&mut bytes, what, if *is_dropped { GONE } else { 0 }, holders.len() as u32);
        }
        for ListedImport { what, owner, owner_has_ended, is_idle } in &self.imports {
            let flags = if *owner_has_ended { GONE } else { 0 } | if *is_idle { IDLE } else { 0 };
            put(&mut bytes, what, flags, *owner);
        }
        let holders = self.exports.iter().flat_map(|export| &export.holders);
        holders.for_each(|holder| bytes.extend(holder.to_le_bytes()));
        bytes
    }

    /// Reads a list; `None` for anything that is not one, to the last byte. Allocates no more than the bytes justify.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields { bytes };
        if !is_greeting(&fields.array::<8>()?) {
            return None;
        }
        let [exports, imports, holders] = [fields.u32()?, fields.u32()?, fields.u32()?].map(|count| count as usize);
        let left_off = fields.u32()?;
        // Before anything is allocated. The counts are too small to overflow.
        if fields.bytes.len() != ENTRY * (exports + imports) + HOLDER * holders {
            return None;
        }
        let (entries, mut of_holders) = fields.bytes.split_at(ENTRY * (exports + imports));
        let mut fields = Fields { bytes: entries };
        let mut export = || {
            let (what, flags, count) = take(&mut fields)?;
            let (holders, rest) = of_holders.split_at_checked((count as usize).checked_mul(HOLDER)?)?;
            of_holders = rest;
            let holders = holders.as_chunks().0.iter().map(|holder| u32::from_le_bytes(*holder)).collect();
            Some(ListedExport { what, is_dropped: flags & GONE != 0, holders })
        };
        let exports = (0..exports).map(|_| export()).collect::<Option<Vec<_>>>()?;
        let mut import = || {
            let (what, flags, owner) = take(&mut fields)?;
            Some(ListedImport { what, owner, owner_has_ended: flags & GONE != 0, is_idle: flags & IDLE != 0 })
        };
        let imports = (0..imports).map(|_| import()).collect::<Option<Vec<_>>>()?;
        of_holders.is_empty().then_some(Self { exports, imports, left_off })
    }
}

/// Returns the message that carries a list.
fn greeting() -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
    bytes[6..].copy_from_slice(&OLDEST_READER.to_le_bytes());
    bytes
}

/// Returns whether a message carries a list that this version can read.
pub(super) fn is_greeting(message: &[u8]) -> bool {
    let mut fields = Fields { bytes: message };
    let starts = fields.array() == Some(MAGIC) && fields.u16().is_some_and(|version| version >= VERSION);
    starts && fields.u16().is_some_and(|oldest| oldest <= VERSION) && fields.bytes.is_empty()
}

/// Returns whether a file cannot change any more.
pub(super) fn is_sealed(file: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::WRITE))
}

/// Listens for processes that request the list of a runtime.
pub(super) fn listen(incarnation: &[u8; 16]) -> Result<OwnedFd> {
    let failed = |errno| os_error("list", "socket for lists", errno);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
    let name = format!("{NAME}{:032x}", u128::from_be_bytes(*incarnation));
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed)?;
    rustix::net::bind(&socket, &address).map_err(failed)?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
    Ok(socket)
}

/// Writes a list to a file that nobody can change.
pub(super) fn to_file(list: &[u8]) -> std::result::Result<OwnedFd, Errno> {
    if !highwater_hal::file_limit::allows(list.len() as u64) {
        return Err(Errno::FBIG);
    }
    let file = rustix::fs::memfd_create("highwater-list", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = list;
    while !rest.is_empty() {
        match rustix::io::write(&file, rest) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => rest = &rest[written..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Reads a file of [`to_file`]. It is sealed memory, so no read waits. `None` if it is not sealed, or has more than `most` bytes.
pub(super) fn from_file(file: &OwnedFd, most: usize) -> Option<Vec<u8>> {
    if !is_sealed(file) {
        return None;
    }
    let length = usize::try_from(rustix::fs::fstat(file).ok()?.st_size).ok().filter(|length| *length <= most)?;
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

/// Gives the list to each connected process of this user. `lister` is the socket, and `list` makes the list.
pub(super) fn answer(lister: impl AsFd, list: impl Fn() -> Listing) {
    let mut file: Option<OwnedFd> = None;
    for _ in 0..AT_ONCE {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(&lister, flags) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(_) => return,
        };
        // A process of another user gets nothing, and learns nothing.
        if Process::of_peer("list", socket.as_fd(), Openers::SameUser).is_err() {
            continue;
        }
        let made = match file.take() {
            Some(file) => Ok(file),
            None => {
                let mut listing = list();
                listing.limit();
                to_file(&listing.encode())
            }
        };
        let sent = made.and_then(|made| {
            let sent = send(socket.as_fd(), &greeting(), &[made.as_fd()]);
            file = Some(made);
            sent
        });
        if let Err(errno) = sent {
            let error: Error = os_error("list", "list of shared memory", errno);
            tracing::debug!("a process got no list: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn what(bytes: u64) -> Listed {
        let since = UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
        Listed { transport: Transport::Descriptor, device: Some(1), device_uuid: [3; 16], bytes, since }
    }

    fn small() -> Listing {
        let pinned = Listed { device: None, device_uuid: [0; 16], ..what(7) };
        let export = |what, is_dropped, holders: &[u32]| ListedExport { what, is_dropped, holders: holders.to_vec() };
        let import = |owner_has_ended, is_idle| ListedImport { what: what(9), owner: 70, owner_has_ended, is_idle };
        Listing {
            exports: vec![export(what(4096), false, &[5, 6]), export(pinned, true, &[]), export(what(1), false, &[7])],
            imports: vec![import(true, false), import(false, true)],
            left_off: 3,
        }
    }

    #[test]
    fn lists_come_back_and_cut_ones_do_not() {
        for listing in [Listing::default(), small()] {
            let bytes = listing.encode();
            assert_eq!(Listing::decode(&bytes), Some(listing));
            (0..bytes.len()).for_each(|length| assert_eq!(Listing::decode(&bytes[..length]), None));
            assert_eq!(Listing::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }

    #[test]
    fn holders_of_other_allocations_are_not_taken() {
        let mut bytes = small().encode();
        // The number of holders of the first allocation.
        bytes[HEADER + 44] = 9;
        assert_eq!(Listing::decode(&bytes), None);
    }

    #[test]
    fn a_list_that_is_too_long_says_how_much_it_leaves_off() {
        let most = (LONGEST - HEADER) / ENTRY;
        let exports = vec![ListedExport { what: what(1), is_dropped: false, holders: Vec::new() }; most + 10];
        let mut listing = Listing { exports, imports: small().imports, left_off: 0 };
        listing.limit();
        assert_eq!((listing.imports.len(), listing.left_off), (2, 12));
        assert!(listing.encode().len() <= LONGEST);
    }

    #[test]
    fn the_file_of_a_list_cannot_change() {
        let file = to_file(&small().encode()).unwrap();
        assert!(is_sealed(&file));
        assert!(rustix::io::pwrite(&file, &[1], 0).is_err() && rustix::fs::ftruncate(&file, 0).is_err());
        let open = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(!is_sealed(&open));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(mut bytes in vec(any::<u8>(), 0..300)) {
            if bytes.len() >= 8 {
                bytes[..8].copy_from_slice(&greeting());
            }
            if let Some(listing) = Listing::decode(&bytes) {
                prop_assert_eq!(listing.encode().len(), bytes.len());
            }
        }
    }
}
