//! The rendezvous of exporters and importers, by one of three methods. Each ends with a connection over which the kernel names
//! each process to the other (`identity.rs`). So the messages are the same for all methods.
//!
//! | method | exporter | importer |
//! | --- | --- | --- |
//! | abstract | binds the abstract name of its incarnation | connects to it |
//! | directory | binds a file with that name in the directory | connects to it |
//! | descriptor | reads from its end of the inherited pair | sends `Knock` with one end of a new pair |
//!
//! *Descriptor.* The kernel names the creator of a pair of sockets at both ends. So the exporter knows the importer by the end
//! that came with `Knock`. It answers there with `Door` and one end of a pair of its own. The importer knows the exporter by that
//! end. The further messages use the exporter's pair.
//!
//! *Directory.* The runtime removes its file when it ends. The file of a killed process stays until a later exporter of the same
//! boot finds that no process has it open. That exporter tries a socket of another type and reads the error. So it makes no
//! connection, and disturbs no live exporter. Files of another boot stay, because they may belong to another machine that mounts
//! the directory.
//!
//! *Heirs.* An heir takes the name of a dead exporter. The kernel frees an abstract name when its last socket is closed, and binding
//! it decides between several heirs. The file of a dead exporter stays. Heirs and exporters that remove such files hold the lock
//! of the directory (`flock`) meanwhile, so none of them removes the file of a live process. A living exporter that hands over gives
//! its socket itself, so the name is never free (`hand_over.rs`).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::listening::ListeningSocket;
use super::message::{LONGEST, Message};
use super::name::Name;
use super::options::{self, Method, Openers, Rendezvous, SharingOptions};
use super::patience::{OPERATION, Patience, expired, refusal};
use super::system::{Received, invalid_message, os_error, receive, send};
use highwater_hal::{Error, ErrorKind, Result};

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Pause before another try, if a queue is full.
const PAUSE: Duration = Duration::from_millis(2);

/// The place where a runtime finds others, and the processes that it admits.
#[derive(Debug)]
pub(crate) struct Meeting {
    place: Place,
    pub(crate) openers: Openers,
}

#[derive(Debug)]
enum Place {
    Abstract,
    Directory(Directory),
    /// An end of the inherited pair.
    Descriptor(OwnedFd),
}

/// A directory that several processes mount.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    descriptor: OwnedFd,
}

/// The socket on which an exporter listens.
#[derive(Debug)]
pub(crate) struct Listener {
    /// `None` once an heir has it.
    socket: Mutex<Option<Arc<ListeningSocket>>>,
    /// True if the socket is the inherited one.
    is_inherited: bool,
    /// Set when no other process holds the other end of the inherited pair, or the socket was shut down.
    has_ended: AtomicBool,
}

impl Meeting {
    /// Opens the place of the options.
    pub(crate) fn open(options: SharingOptions) -> Result<Self> {
        let place = match options.rendezvous.unwrap_or_default() {
            Rendezvous::Abstract => Place::Abstract,
            Rendezvous::Directory(path) => Place::Directory(Directory::open(path)?),
            Rendezvous::Descriptor(number) => Place::Descriptor(inherited(number)?),
        };
        Ok(Self { place, openers: options.openers.unwrap_or_default() })
    }

    pub(crate) fn method(&self) -> Method {
        match self.place {
            Place::Abstract => Method::Abstract,
            Place::Directory(_) => Method::Directory,
            Place::Descriptor(_) => Method::Descriptor,
        }
    }

    /// Listens for importers.
    pub(crate) fn listen(&self, name: Name) -> Result<Listener> {
        let failed = |errno| os_error("share", "socket for importers", errno);
        if let Place::Descriptor(end) = &self.place {
            let end = ListeningSocket::make(|| rustix::io::fcntl_dupfd_cloexec(end, 0)).map_err(failed)?;
            return Ok(Listener::new(end, true));
        }
        let socket = ListeningSocket::make(|| new_socket(SocketType::SEQPACKET)).map_err(failed)?;
        match &self.place {
            Place::Directory(directory) => {
                directory.sweep(name);
                directory.bind(&socket, name, self.openers).map_err(|errno| directory.failed("share", errno))?;
            }
            _ => {
                let address = SocketAddrUnix::new_abstract_name(&name.address()).map_err(failed)?;
                rustix::net::bind(&socket, &address).map_err(failed)?;
            }
        }
        rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
        Ok(Listener::new(socket, false))
    }

    /// Takes the name of an exporter that has ended, and listens for its importers. `None` while another process has the name.
    pub(super) fn inherit(&self, name: Name, openers: Openers) -> Result<Option<Listener>> {
        let failed = |errno| os_error("inherit", "socket for importers", errno);
        let socket = ListeningSocket::make(|| new_socket(SocketType::SEQPACKET)).map_err(failed)?;
        let bound = match &self.place {
            Place::Directory(directory) => directory.rebind(&socket, name, openers),
            Place::Abstract => SocketAddrUnix::new_abstract_name(&name.address())
                .and_then(|address| rustix::net::bind(&socket, &address)),
            Place::Descriptor(_) => return Err(no_name()),
        };
        match bound {
            Ok(()) => {}
            Err(Errno::ADDRINUSE | Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        }
        rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
        Ok(Some(Listener::new(socket, false)))
    }

    /// Listens on the socket of an exporter that has handed it over.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not a socket that listens.
    pub(super) fn take_over(socket: OwnedFd) -> Result<Listener> {
        let socket = ListeningSocket::of(socket);
        let listens = rustix::net::sockopt::socket_acceptconn(&socket) == Ok(true);
        if !is_seqpacket(socket.as_fd()) || !listens {
            return Err(invalid_message("inherit", "a socket on which no exporter listens"));
        }
        // The kernel names the process that called this last to those that connect.
        rustix::net::listen(&socket, BACKLOG).map_err(|errno| os_error("inherit", "socket for importers", errno))?;
        Ok(Listener::new(socket, false))
    }

    /// Returns whether an heir can take the names of exporters here.
    ///
    /// # Errors
    /// `Unsupported` at an inherited descriptor.
    pub(super) fn check_named(&self) -> Result<()> {
        if matches!(self.place, Place::Descriptor(_)) { Err(no_name()) } else { Ok(()) }
    }

    /// Returns whether this process can take the name of an exporter that is found by a method.
    ///
    /// # Errors
    /// `Unsupported` if the method has no names; `InvalidArgument` if the place is not that of the exporter.
    pub(super) fn check_heir(&self, method: Method) -> Result<()> {
        match (method, &self.place) {
            (Method::Descriptor, _) => Err(no_name()),
            (Method::Directory, Place::Directory(directory)) => match directory.lock() {
                Ok(_) | Err(Errno::AGAIN) => Ok(()),
                Err(errno) => Err(directory
                    .failed("inherit", errno)
                    .with_hint("give this process the right to list the directory, which an heir locks")),
            },
            (Method::Abstract, Place::Abstract) => Ok(()),
            _ => Err(self.elsewhere(method)),
        }
    }

    /// Ends the listening at the end of a runtime, and removes its file.
    pub(crate) fn close(&self, listener: &Listener, name: Name) {
        if listener.is_inherited {
            // Other processes use the pair.
            listener.has_ended.store(true, Ordering::Relaxed);
            return;
        }
        // The file and the socket may be those of an heir.
        let Some(socket) = listener.socket.lock().clone() else { return };
        if let Place::Directory(directory) = &self.place {
            directory.remove(&name.file());
        }
        // Another process may have a copy of the socket, so shut it down.
        let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
    }

    /// Connects to an exporter by the method of its ticket. `who` names the exporter in errors, and `check` fails if this
    /// process must stop waiting.
    pub(super) fn reach(
        &self,
        method: Method,
        name: Name,
        who: &str,
        patience: Patience,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<OwnedFd> {
        let failed = |errno| os_error(OPERATION, "socket for the exporter", errno);
        match (method, &self.place) {
            (Method::Descriptor, Place::Descriptor(end)) => knock(end, name, who, patience, check),
            (Method::Directory, Place::Directory(directory)) => {
                let socket = new_socket(SocketType::SEQPACKET).map_err(failed)?;
                let connect = || directory.connect(&socket, &name.file());
                let hint = "open the ticket again if an heir of the exporter is about to answer; otherwise request a new one; \
                            between containers, mount the exporter's directory in both";
                reached(connect, who, patience, check, hint, &|errno| directory.refused(who, errno))?;
                Ok(socket)
            }
            (Method::Abstract, _) => {
                let socket = new_socket(SocketType::SEQPACKET).map_err(failed)?;
                let address = SocketAddrUnix::new_abstract_name(&name.address()).map_err(failed)?;
                let connect = || rustix::net::connect(&socket, &address);
                let hint = "open the ticket again if an heir of the exporter is about to answer; otherwise request a new one; \
                            between containers, share the network namespace, in which the exporter listens, or set `rendezvous` on both sides: `HIGHWATER_SHARING`";
                reached(connect, who, patience, check, hint, &failed)?;
                Ok(socket)
            }
            _ => Err(self.elsewhere(method)),
        }
    }

    /// Returns the error for a ticket whose exporter is at a place that this runtime does not have.
    fn elsewhere(&self, method: Method) -> Error {
        let (theirs, ours) = (method.name(), self.method().name());
        let message =
            format!("the ticket's exporter is found by `{theirs}`, and this runtime has the rendezvous `{ours}`");
        let example = match method {
            Method::Directory => "rendezvous=directory:PATH",
            _ => "rendezvous=descriptor:NUMBER",
        };
        Error::new(ErrorKind::InvalidArgument, OPERATION, message)
            .with_hint(format!("set `{example}` in HIGHWATER_SHARING, or `SharingOptions::with_rendezvous`"))
    }
}

/// Returns the error for an heir of an exporter without a name.
fn no_name() -> Error {
    let message = "an exporter at an inherited descriptor has no name that an heir could take";
    Error::new(ErrorKind::Unsupported, OPERATION, message).with_hint(
        "share with the rendezvous `abstract` or `directory:PATH`, or open the memory with `OwnerDeath::Keep`",
    )
}

/// Connects until the exporter's queue of connections has space.
fn reached(
    connect: impl Fn() -> std::result::Result<(), Errno>,
    who: &str,
    patience: Patience,
    check: &dyn Fn() -> Result<()>,
    hint: &str,
    failed: &dyn Fn(Errno) -> Error,
) -> Result<()> {
    loop {
        match connect() {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if !patience.is_over() => {
                check()?;
                std::thread::sleep(PAUSE);
            }
            Err(Errno::AGAIN) => return Err(patience.lost_with(&format!("the exporter ({who})"))),
            Err(Errno::CONNREFUSED | Errno::NOENT) => {
                return Err(expired(format!("the exporter ({who}) or its runtime has ended")).with_hint(hint));
            }
            Err(errno) => return Err(failed(errno)),
        }
    }
}

/// Reaches the exporter at the other end of an inherited pair.
fn knock(end: &OwnedFd, name: Name, who: &str, patience: Patience, check: &dyn Fn() -> Result<()>) -> Result<OwnedFd> {
    const GONE: &str = "no process at the other end of the inherited descriptor exports memory any more";
    const HINT: &str = "give the exporter one end of the pair and the importers the other, and request a new ticket";
    let failed = |errno| os_error(OPERATION, "connection to the exporter", errno);
    let gone = || expired(GONE.to_owned()).with_hint(HINT);
    let (ours, theirs) = pair().map_err(|errno| os_error(OPERATION, "socket", errno))?;
    let message = Message::Knock { incarnation: name.incarnation }.encode();
    loop {
        match send(end.as_fd(), &message, &[theirs.as_fd()]) {
            Ok(()) => break,
            Err(Errno::AGAIN) if !patience.is_over() => {
                check()?;
                std::thread::sleep(PAUSE);
            }
            Err(Errno::AGAIN) => return Err(patience.lost_with(&format!("the exporter ({who})"))),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Err(gone()),
            Err(errno) => return Err(failed(errno)),
        }
    }
    drop(theirs);
    let mut buffer = [0_u8; LONGEST + 1];
    loop {
        match receive(ours.as_fd(), &mut buffer).map_err(failed)? {
            Received::Message(bytes, descriptors) => match Message::decode(&buffer[..bytes]) {
                Some(Message::Door) => {
                    let door = descriptors.into_iter().next().filter(|door| is_seqpacket(door.as_fd()));
                    return door.ok_or_else(|| invalid_message(OPERATION, "a connection that is not a socket"));
                }
                Some(Message::Refused { kind, text, .. }) => return Err(refusal(kind, text)),
                _ => return Err(invalid_message(OPERATION, "an answer that does not follow a knock")),
            },
            Received::Cut { descriptors: true } => {
                return Err(os_error(OPERATION, "free descriptors for the exporter's answer", Errno::MFILE));
            }
            Received::Cut { descriptors: false } => {
                return Err(invalid_message(OPERATION, "a message that is too long"));
            }
            Received::End => return Err(gone()),
            Received::Nothing => {}
        }
        check()?;
        if patience.is_over() {
            return Err(patience.lost_with(&format!("the exporter ({who})")));
        }
        let most = patience.left().min(Duration::from_millis(100));
        let most = rustix::time::Timespec::try_from(most).ok();
        // Interrupted or not, everything is checked again.
        let _ = rustix::event::poll(&mut [PollFd::from_borrowed_fd(ours.as_fd(), PollFlags::IN)], most.as_ref());
    }
}

impl Listener {
    fn new(socket: ListeningSocket, is_inherited: bool) -> Self {
        let socket = Mutex::new(Some(Arc::new(socket)));
        Self { socket, is_inherited, has_ended: AtomicBool::new(false) }
    }

    /// Returns the descriptor that is readable when an importer has come. `None` once no importer can come.
    pub(super) fn descriptor(&self) -> Option<Arc<ListeningSocket>> {
        if self.has_ended.load(Ordering::Relaxed) { None } else { self.socket.lock().clone() }
    }

    /// Closes the socket, which an heir has from now on.
    pub(super) fn give_up(&self) {
        // Closed without the lock, or by the thread that waits for it.
        let given = self.socket.lock().take();
        drop(given);
    }

    /// Records that the socket was shut down. The socket stays readable, and no importer can connect. An end of an inherited pair
    /// may still have messages. For it, [`Listener::accept`] records the shutdown.
    pub(crate) fn hung_up(&self) {
        if !self.is_inherited {
            self.has_ended.store(true, Ordering::Relaxed);
        }
    }

    /// Returns a socket of an importer that has come. The kernel names the importer at its other end. `None` for a message of
    /// another kind.
    ///
    /// # Errors
    /// `AGAIN` if no importer has come.
    pub(crate) fn accept(&self, incarnation: [u8; 16]) -> std::result::Result<Option<OwnedFd>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = self.socket.lock().clone().ok_or(Errno::AGAIN)?;
        if !self.is_inherited {
            return rustix::net::accept_with(&*socket, flags).map(Some);
        }
        let mut buffer = [0_u8; LONGEST + 1];
        match receive(socket.as_fd(), &mut buffer)? {
            Received::Nothing => Err(Errno::AGAIN),
            Received::End => {
                self.has_ended.store(true, Ordering::Relaxed);
                Err(Errno::AGAIN)
            }
            // The importer learns from the end of its pair that its knock is lost.
            Received::Cut { .. } => Ok(None),
            Received::Message(bytes, descriptors) => {
                let Some(socket) = descriptors.into_iter().next().filter(|socket| is_seqpacket(socket.as_fd())) else {
                    return Ok(None);
                };
                match Message::decode(&buffer[..bytes]) {
                    Some(Message::Knock { incarnation: wanted }) if wanted == incarnation => Ok(Some(socket)),
                    Some(Message::Knock { .. }) => {
                        let what = "another exporter has this end of the inherited descriptor";
                        let error = Error::new(ErrorKind::Expired, "share", what);
                        let _ = send(socket.as_fd(), &Message::refusal(0, &error).encode(), &[]);
                        Ok(None)
                    }
                    _ => Ok(None),
                }
            }
        }
    }

    /// Returns the connection with an admitted importer.
    pub(crate) fn admit(&self, socket: OwnedFd) -> Result<OwnedFd> {
        if !self.is_inherited {
            return Ok(socket);
        }
        let (ours, theirs) = pair().map_err(|errno| os_error("share", "socket for an importer", errno))?;
        send(socket.as_fd(), &Message::Door.encode(), &[theirs.as_fd()])
            .map_err(|errno| os_error("share", "connection to an importer", errno))?;
        Ok(ours)
    }
}

impl Directory {
    fn open(path: &Path) -> Result<Self> {
        let open = |flags| rustix::fs::open(path, flags | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        // A process that may not list the directory can use it, and leaves dead files to others.
        let opened = match open(OFlags::RDONLY) {
            Err(Errno::ACCESS) => open(OFlags::PATH),
            opened => opened,
        };
        let invalid = |what: String, hint: &str| {
            let message = format!("the directory of the rendezvous, {}, {what}", path.display());
            Error::new(ErrorKind::InvalidArgument, options::OPERATION, message).with_hint(hint)
        };
        let descriptor = opened.map_err(|errno| {
            invalid(
                format!("cannot be opened: {errno}"),
                "create it, and mount it in every container that shares memory",
            )
        })?;
        let mode = rustix::fs::fstat(&descriptor).map_or(0, |stat| stat.st_mode);
        if mode & 0o002 != 0 && mode & 0o1000 == 0 {
            let what = "lets every user replace the files of others".to_owned();
            return Err(invalid(what, "make it sticky (`chmod +t`), or take the right to write from other users"));
        }
        Ok(Self { path: path.to_owned(), descriptor })
    }

    fn failed(&self, operation: &'static str, errno: Errno) -> Error {
        let error = os_error(operation, &format!("socket in {}", self.path.display()), errno);
        match errno {
            Errno::ACCESS | Errno::PERM => {
                let hint = "give this process the right to write to the directory, or name another one, which can hold sockets";
                error.with_hint(hint)
            }
            Errno::NAMETOOLONG => error.with_hint("mount /proc, or use a path of at most 47 bytes"),
            Errno::ROFS => error.with_hint("mount the directory with the right to write"),
            Errno::NOSPC | Errno::DQUOT => error.with_hint("free space in the directory, or name another one"),
            _ => error.with_hint("name a directory that can hold sockets, such as one in /run or /tmp"),
        }
    }

    /// Returns the error of a connection to an exporter.
    fn refused(&self, who: &str, errno: Errno) -> Error {
        if errno != Errno::ACCESS {
            return self.failed(OPERATION, errno);
        }
        // The mode of the file.
        let what =
            format!("the exporter ({who}) admits only processes of its user to its socket in {}", self.path.display());
        Error::new(ErrorKind::PermissionDenied, OPERATION, what)
            .with_hint("run both processes as one user, or set `openers` in the exporter")
            .with_code(i64::from(errno.raw_os_error()))
    }

    /// Returns the address of a file. It goes through the descriptor, because the address of a socket has at most 107 bytes.
    fn address(&self, file: &str) -> std::result::Result<SocketAddrUnix, Errno> {
        let through = PathBuf::from(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()));
        // Without `/proc`, or with that of another namespace, only the path is left.
        let directory = if through.exists() { &through } else { &self.path };
        SocketAddrUnix::new(directory.join(file))
    }

    fn connect(&self, socket: &OwnedFd, file: &str) -> std::result::Result<(), Errno> {
        rustix::net::connect(socket, &self.address(file)?)
    }

    fn bind(&self, socket: &ListeningSocket, name: Name, openers: Openers) -> std::result::Result<(), Errno> {
        let file = name.file();
        rustix::net::bind(socket, &self.address(&file)?)?;
        // The credentials decide. The mode only keeps others from the queue, where they have nothing to expect.
        let mode = if openers == Openers::SameUser { 0o600 } else { 0o666 };
        let changed = rustix::fs::chmodat(&self.descriptor, file.as_str(), Mode::from_raw_mode(mode), AtFlags::empty());
        changed.inspect_err(|_| self.remove(&file))
    }

    /// Takes the lock for removing the files of dead exporters. The lock ends with the result, or with this process.
    ///
    /// # Errors
    /// `AGAIN` if another process has it.
    fn lock(&self) -> std::result::Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // A description of its own, because two threads of one process exclude each other, too.
        let lock = rustix::fs::openat(&self.descriptor, ".", flags, Mode::empty())?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(lock)
    }

    /// Binds the name of an exporter that has ended, in place of its file.
    fn rebind(&self, socket: &ListeningSocket, name: Name, openers: Openers) -> std::result::Result<(), Errno> {
        let _lock = self.lock()?;
        let file = name.file();
        if self.is_left(&file) {
            rustix::fs::unlinkat(&self.descriptor, file.as_str(), AtFlags::empty())?;
        }
        self.bind(socket, name, openers)
    }

    fn remove(&self, file: &str) {
        // A later exporter removes it otherwise.
        let _ = rustix::fs::unlinkat(&self.descriptor, file, AtFlags::empty());
    }

    /// Removes the files of exporters of this boot that have been killed.
    fn sweep(&self, name: Name) {
        if name.boot == [0; 16] {
            return;
        }
        let prefix = name.boot_prefix();
        // Without the lock, a file may be that of an heir by the time of its removal.
        let Ok(_lock) = self.lock() else { return };
        let Ok(entries) = Dir::read_from(&self.descriptor) else { return };
        for entry in entries.filter_map(std::result::Result::ok) {
            if let Some(file) = entry.file_name().to_str().ok().filter(|file| file.starts_with(&prefix))
                && self.is_left(file)
            {
                self.remove(file);
            }
        }
    }

    /// Returns whether a file is a socket that no process has open. A live one refuses a socket of another type with `PROTOTYPE`.
    fn is_left(&self, file: &str) -> bool {
        // Connections to other files are refused, too.
        let found = rustix::fs::statat(&self.descriptor, file, AtFlags::SYMLINK_NOFOLLOW);
        if !found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Socket) {
            return false;
        }
        let socket = new_socket(SocketType::DGRAM);
        socket.is_ok_and(|socket| self.connect(&socket, file) == Err(Errno::CONNREFUSED))
    }
}

fn new_socket(kind: SocketType) -> std::result::Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
}

fn pair() -> std::result::Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Returns whether a descriptor is a Unix socket of the type of this protocol.
fn is_seqpacket(descriptor: BorrowedFd<'_>) -> bool {
    let family = rustix::net::sockopt::socket_domain(descriptor);
    family == Ok(AddressFamily::UNIX) && rustix::net::sockopt::socket_type(descriptor) == Ok(SocketType::SEQPACKET)
}

/// Returns a duplicate of an inherited descriptor.
fn inherited(number: i32) -> Result<OwnedFd> {
    let duplicate = duplicate(number).map_err(|errno| not_inherited(number, &format!("cannot be used: {errno}")))?;
    if !is_seqpacket(duplicate.as_fd()) || rustix::net::getpeername(&duplicate).is_err() {
        let what = "is not an end of a pair of Unix sockets of the type `SOCK_SEQPACKET`";
        return Err(not_inherited(number, what));
    }
    Ok(duplicate)
}

fn not_inherited(number: i32, what: &str) -> Error {
    let message = format!("descriptor {number} of the rendezvous {what}");
    Error::new(ErrorKind::InvalidArgument, options::OPERATION, message)
        .with_hint("inherit one end of `socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ...)` without close-on-exec")
}

/// Refuses a descriptor that closes on exec, so that this process cannot have inherited it.
pub(super) fn check_inherited(number: i32) -> Result<()> {
    // SAFETY: The call takes a number and touches no memory. A number that is not open is an error.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    if flags >= 0 && flags & libc::FD_CLOEXEC != 0 {
        return Err(not_inherited(number, "was not inherited: this process has made it"));
    }
    // If the number is not open, its use is an error.
    Ok(())
}

fn duplicate(number: i32) -> std::result::Result<OwnedFd, Errno> {
    use std::os::fd::FromRawFd;

    // SAFETY: The call takes a number and touches no memory. A number that is not open is an error.
    let duplicate = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if duplicate < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::BADF));
    }
    // SAFETY: The call succeeded, so the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}
