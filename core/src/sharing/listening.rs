//! [`ListeningSocket`]: a socket of which a child of `fork` keeps no copy.
//!
//! A child has a copy of each descriptor of its parent. With the copy of an exporter's socket, the name of the exporter would stay
//! taken after the exporter's death, and importers would connect to a socket that no process reads. So a handler of `fork`
//! replaces these copies in the child. It leaves none of their numbers without a file, because the objects of the child close them later.
//! A fork waits for threads that make, receive or close such a socket ([`WithoutForks`]): the child would have the socket and not know it.
//!
//! A raw `clone` call runs no handler, and a process can send its descriptors to others. So importers expect a dead exporter whose
//! socket is left (`importer.rs`).

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A socket that the children of this process do not keep.
#[derive(Debug)]
pub(super) struct ListeningSocket {
    entry: &'static Entry,
    socket: ManuallyDrop<OwnedFd>,
}

impl ListeningSocket {
    /// Makes a socket while no other thread forks.
    pub(super) fn make<E>(make: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Self, E> {
        let _none = WithoutForks::begin();
        make().map(Self::of)
    }

    /// Takes over a socket that was just made or received under [`WithoutForks`].
    pub(super) fn of(socket: OwnedFd) -> Self {
        Self { entry: list(&socket), socket: ManuallyDrop::new(socket) }
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        let _none = WithoutForks::begin();
        // Before the close, so that the entry never has the number of another file.
        self.entry.number.store(FREE, Ordering::Release);
        // SAFETY: the socket is not used afterward.
        unsafe { ManuallyDrop::drop(&mut self.socket) };
    }
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The number of threads that make, receive or close sockets, and [`FORK`] times that of threads that fork.
static STATE: AtomicU32 = AtomicU32::new(0);
const FORK: u32 = 1 << 16;

/// The time between two tries of a thread that waits for another one.
const LOOKS_EVERY: Duration = Duration::from_micros(50);
/// The longest time for which a fork waits. A handler of a signal that forks may have interrupted the thread that it waits for.
const FORK_WAITS_FOR: Duration = Duration::from_millis(100);

fn register_handlers() {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the handlers make system calls and use statics. The C library forgets them if this library is unloaded.
        let failed = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) } != 0;
        if failed {
            crate::warnings::warning!(
                "there is no room for handlers of fork; forked children will keep the sockets of this process"
            );
        }
    });
}

/// While it exists, no other thread forks. It must be short. Any number of threads may have one.
#[derive(Debug)]
pub(super) struct WithoutForks(());

impl WithoutForks {
    pub(super) fn begin() -> Self {
        register_handlers();
        while STATE.fetch_add(1, Ordering::Acquire) >= FORK {
            end();
            std::thread::sleep(LOOKS_EVERY);
        }
        Self(())
    }
}

impl Drop for WithoutForks {
    fn drop(&mut self) {
        end();
    }
}

fn end() {
    // A child that was forked inside a handler of a signal begins with 0.
    let one_less = |state: u32| (!state.is_multiple_of(FORK)).then(|| state - 1);
    let _ = STATE.fetch_update(Ordering::Release, Ordering::Relaxed, one_less);
}

extern "C" fn before_fork() {
    STATE.fetch_add(FORK, Ordering::Acquire);
    let begun = Instant::now();
    while !STATE.load(Ordering::Acquire).is_multiple_of(FORK) && begun.elapsed() < FORK_WAITS_FOR {
        std::thread::sleep(LOOKS_EVERY);
    }
}

extern "C" fn after_fork() {
    // If the handlers are registered during a fork, this one may run without `before_fork`.
    let one_less = |state: u32| state.checked_sub(FORK);
    let _ = STATE.fetch_update(Ordering::Release, Ordering::Relaxed, one_less);
}

/// In the child, no other thread exists.
extern "C" fn in_child() {
    replace_copies();
    STATE.store(0, Ordering::Release);
}

/// Lists the sockets among received descriptors that listen. Their entries stay until a [`ListeningSocket`] takes them over, or another
/// one has the number.
pub(super) fn note_received(descriptors: &[OwnedFd], _none: &WithoutForks) {
    for socket in descriptors {
        if rustix::net::sockopt::socket_acceptconn(socket) == Ok(true) {
            list(socket);
        }
    }
}

/// The number of an entry without a socket, and of one that is being written.
const FREE: i32 = -1;
const TAKEN: i32 = -2;

/// A socket to replace in children. In one cache line, and so in one page: a fork copies the memory page by page while other threads
/// write.
#[derive(Debug)]
#[repr(align(64))]
struct Entry {
    number: AtomicI32,
    /// Tells the socket from another file with the number. A fork copies the descriptors before the memory, so a socket that another
    /// thread makes meanwhile may be missing in the child.
    inode: AtomicU64,
    next: Option<&'static Entry>,
}

/// The first entry. Entries are used again and never freed, so the handler needs no lock.
static FIRST: AtomicPtr<Entry> = AtomicPtr::new(null_mut());

fn first() -> Option<&'static Entry> {
    // SAFETY: null, or an entry that is never freed. `Acquire` makes its contents visible.
    unsafe { FIRST.load(Ordering::Acquire).as_ref() }
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    std::iter::successors(first(), |entry| entry.next)
}

/// Adds an entry for a socket, and returns it.
fn list(socket: &OwnedFd) -> &'static Entry {
    register_handlers();
    let entry = take(socket.as_raw_fd());
    entry.inode.store(inode(socket.as_raw_fd()).unwrap_or_default(), Ordering::Relaxed);
    entry.number.store(socket.as_raw_fd(), Ordering::Release);
    entry
}

/// Returns an entry that no other socket has. One with this number is of the same socket, or of one that was closed.
fn take(number: i32) -> &'static Entry {
    let of = |found: i32| {
        entries()
            .find(|entry| entry.number.compare_exchange(found, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok())
    };
    if let Some(entry) = of(number).or_else(|| of(FREE)) {
        return entry;
    }
    let entry = Box::leak(Box::new(Entry { number: AtomicI32::new(TAKEN), inode: AtomicU64::new(0), next: first() }));
    loop {
        let next = entry.next.map_or(null_mut(), |next| std::ptr::from_ref(next).cast_mut());
        match FIRST.compare_exchange(next, entry, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return entry,
            Err(_) => entry.next = first(),
        }
    }
}

/// Returns the inode of a socket. `None` for other files, and for a number without a file.
fn inode(number: i32) -> Option<u64> {
    // SAFETY: numbers, for which zeros are valid values.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes the state of a file to the structure.
    let found = unsafe { libc::fstat(number, &raw mut status) } == 0;
    (found && status.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(status.st_ino)
}

/// Replaces the copies of the listed sockets, in a child of `fork`. Other threads of the parent may have held any lock. So this takes
/// none and allocates nothing.
fn replace_copies() {
    // SAFETY: the place of this thread's error number.
    let error = unsafe { *libc::__errno_location() };
    for entry in entries() {
        let number = entry.number.load(Ordering::Acquire);
        if number >= 0 && inode(number) == Some(entry.inode.load(Ordering::Relaxed)) {
            replace(number);
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = error };
}

/// Lets a number refer to another file.
fn replace(number: i32) {
    let mut other = unrelated();
    // SAFETY: the number is of the copy of a socket that the child must not use. It refers to an open file afterward, so its object can
    // close it.
    if other < 0 || unsafe { libc::dup3(other, number, libc::O_CLOEXEC) } < 0 {
        // There is no room for another number, or this one is above a lowered limit. No other thread can take it meanwhile.
        // SAFETY: as above.
        unsafe { libc::close(number) };
        if other < 0 {
            other = unrelated();
        }
        if other == number {
            return;
        }
        // SAFETY: as above. If it fails, the object closes a number without a file, which has no effect.
        unsafe { libc::dup3(other, number, libc::O_CLOEXEC) };
    }
    if other >= 0 {
        // SAFETY: it was opened above, and nothing else has it.
        unsafe { libc::close(other) };
    }
}

/// Opens a file that has nothing to do with sharing. Returns a negative number if none can be opened.
fn unrelated() -> i32 {
    // SAFETY: the call opens a file by a text that ends in 0.
    let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    // A sandbox may lack the device.
    // SAFETY: the call makes a socket without a name.
    if null >= 0 { null } else { unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

    fn socket() -> OwnedFd {
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// A socket that listens, and its address, which is of this process and this call.
    fn listening() -> (OwnedFd, SocketAddrUnix) {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("highwater-listening-{}-{number}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let socket = socket();
        bind(&socket, &address).unwrap();
        listen(&socket, 8).unwrap();
        (socket, address)
    }

    /// A forked child that waits, and is killed on drop.
    struct Child(i32);

    impl Child {
        /// Returns once `check` has run in the child, with its answer.
        fn new(check: impl Fn() -> bool) -> (Self, bool) {
            let (reader, writer) = std::io::pipe().unwrap();
            // SAFETY: the child makes system calls only, and is killed.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let byte = u8::from(check());
                // SAFETY: writes one byte, and waits for the end.
                unsafe {
                    libc::write(writer.as_raw_fd(), (&raw const byte).cast(), 1);
                    loop {
                        libc::pause();
                    }
                }
            }
            let child = Self(pid);
            let mut byte = [2];
            assert_eq!(rustix::io::read(&reader, &mut byte).unwrap(), 1);
            (child, byte == [1])
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: ends the child that was made for this object, and waits for it.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, null_mut(), 0);
            }
        }
    }

    #[test]
    fn a_forked_child_keeps_no_name_and_another_socket_it_keeps() {
        let (listed, address) = listening();
        let listed = ListeningSocket::of(listed);
        let (other, other_address) = listening();
        let number = listed.as_fd().as_raw_fd();
        // The number is of an open file, which the child can close.
        let (_child, is_replaced) = Child::new(|| {
            // SAFETY: reads the flags of a descriptor.
            inode(number).is_none() && unsafe { libc::fcntl(number, libc::F_GETFD) } == libc::FD_CLOEXEC
        });
        assert!(is_replaced);
        // In this process, nothing has changed.
        connect(socket(), &address).unwrap();
        drop((listed, other));
        // A program that another test starts has a copy for a moment.
        let refused = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            connect(socket(), &address) == Err(Errno::CONNREFUSED)
        });
        assert!(refused, "the child has the name");
        connect(socket(), &other_address).unwrap();
    }

    /// Sets the limit of descriptors, in a child.
    fn limit_descriptors(limit: u64) {
        let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
        // SAFETY: the call reads two numbers.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    }

    #[test]
    fn a_socket_is_replaced_without_room_for_another_descriptor() {
        let socket = listening().0;
        let number = socket.as_raw_fd();
        let (_child, is_replaced) = Child::new(|| {
            limit_descriptors(number as u64 + 1);
            while unrelated() >= 0 {}
            replace(number);
            // SAFETY: reads the flags of a descriptor.
            inode(number).is_none() && unsafe { libc::fcntl(number, libc::F_GETFD) } == libc::FD_CLOEXEC
        });
        assert!(is_replaced);
        let (_child, is_closed) = Child::new(|| {
            limit_descriptors(0);
            replace(number);
            inode(number).is_none()
        });
        assert!(is_closed);
    }

    #[test]
    fn received_sockets_are_listed_until_their_number_is_of_another_file() {
        let (socket, _) = listening();
        let number = socket.as_raw_fd();
        let sockets = [socket];
        note_received(&sockets, &WithoutForks::begin());
        let kept = |socket: i32| Child::new(|| inode(socket).is_some());
        assert!(!kept(number).1);
        let [socket] = sockets;
        let taken = ListeningSocket::of(socket);
        assert_eq!(entries().filter(|entry| entry.number.load(Ordering::Relaxed) == number).count(), 1);
        drop(taken);
    }

    #[test]
    fn calls_of_handlers_without_their_counterparts_block_nobody() {
        after_fork();
        end();
        drop(WithoutForks::begin());
    }

    #[test]
    fn the_number_of_a_closed_socket_is_left_alone() {
        // Entries are used again, in any order.
        for _ in 0..3 {
            let sockets: Vec<_> = (0..5).map(|_| ListeningSocket::of(listening().0)).collect();
            let number = sockets[2].as_fd().as_raw_fd();
            drop(sockets);
            let reader = rustix::io::fcntl_dupfd_cloexec(&listening().0, number).unwrap();
            let expected = inode(reader.as_raw_fd());
            let (_child, is_kept) = Child::new(|| expected.is_some() && inode(reader.as_raw_fd()) == expected);
            assert!(is_kept);
        }
        // An entry with the number of another file, as a fork in the middle of a change can show it.
        let listed = ListeningSocket::of(listening().0);
        listed.entry.inode.fetch_add(1, Ordering::Relaxed);
        let number = listed.as_fd().as_raw_fd();
        let (_child, is_kept) = Child::new(|| inode(number).is_some());
        assert!(is_kept);
    }
}
