//! The process at the other end of a socket: its credentials, its identity, and whether it is alive.
//!
//! The identity of a process is its pidfd. A process id is only a number of one PID namespace, and the system may use it again. A
//! process of another namespace has no id here, which shows as 0. Ids are therefore for error messages and for `/proc`.
//!
//! | kernel | source of the pidfd |
//! | --- | --- |
//! | since 6.5 | the socket (`SO_PEERPIDFD`); since 6.16 also for a process that has been reaped, whose pidfd is readable at once |
//! | before 6.5, one PID namespace | `pidfd_open` of the id; a later answer on the socket proves that the id had not been used again |
//! | before 6.5, two PID namespaces | the other process sends its own pidfd with its greeting |
//!
//! User and group ids are those of this process's user namespace. The kernel translates them. It shows an id without a value here
//! as the overflow id (65534). That id may stand for any user, so it matches nobody.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::options::Openers;
use super::system::{invalid_message, is_readable, os_error};
use highwater_hal::{Error, ErrorKind, Result};

/// The overflow id, which the kernel shows for an id without a value in this namespace. A system may set another.
const OVERFLOW_ID: u32 = 65534;
/// Number of ids of a namespace that maps all of them.
const ALL_IDS: u64 = u32::MAX as u64;

/// The kernel's answers about the other end of a socket. Tests imitate other kernels.
pub(crate) trait Answers {
    fn credentials(&self, socket: BorrowedFd<'_>) -> std::result::Result<libc::ucred, Errno>;
    /// Returns the supplementary groups.
    fn groups(&self, socket: BorrowedFd<'_>) -> std::result::Result<Vec<u32>, Errno>;
    fn pidfd(&self, socket: BorrowedFd<'_>) -> std::result::Result<OwnedFd, Errno>;
    /// Opens a process by its id.
    fn open(&self, pid: Pid) -> std::result::Result<OwnedFd, Errno>;
}

/// The running kernel.
pub(crate) struct Kernel;

impl Answers for Kernel {
    /// Does not use rustix, whose process ids are never 0.
    fn credentials(&self, socket: BorrowedFd<'_>) -> std::result::Result<libc::ucred, Errno> {
        let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: The call writes at most one `ucred`, and `length` is its size. Every bit pattern is a valid `ucred`.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut credentials).cast(),
                &raw mut length,
            )
        };
        if result == 0 { Ok(credentials) } else { Err(last_errno()) }
    }

    fn groups(&self, socket: BorrowedFd<'_>) -> std::result::Result<Vec<u32>, Errno> {
        let mut groups = vec![0_u32; 32];
        loop {
            let mut length = (groups.len() * size_of::<u32>()) as libc::socklen_t;
            // SAFETY: The call writes at most `length` bytes to the vector, which has that many. Every bit pattern is valid.
            let result = unsafe {
                libc::getsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_PEERGROUPS,
                    groups.as_mut_ptr().cast(),
                    &raw mut length,
                )
            };
            let count = length as usize / size_of::<u32>();
            match if result == 0 { Ok(()) } else { Err(last_errno()) } {
                Ok(()) => {
                    groups.truncate(count);
                    return Ok(groups);
                }
                Err(Errno::RANGE) if count > groups.len() => groups.resize(count, 0),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn pidfd(&self, socket: BorrowedFd<'_>) -> std::result::Result<OwnedFd, Errno> {
        let mut descriptor: libc::c_int = -1;
        let mut length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: The call writes one `c_int` to `descriptor`, and `length` is its size.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERPIDFD,
                (&raw mut descriptor).cast(),
                &raw mut length,
            )
        };
        if result != 0 {
            return Err(last_errno());
        }
        // SAFETY: The call succeeded, so the descriptor is new and has no other owner.
        let pidfd = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // Old kernels return it without the flag.
        let _ = rustix::io::fcntl_setfd(&pidfd, rustix::io::FdFlags::CLOEXEC);
        Ok(pidfd)
    }

    fn open(&self, pid: Pid) -> std::result::Result<OwnedFd, Errno> {
        rustix::process::pidfd_open(pid, PidfdFlags::empty())
    }
}

fn last_errno() -> Errno {
    Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// The numbers by which the processes of one PID namespace find a process, without a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    pid: u64,
    /// The number that no other process has had since the boot: [`Process::unique_inode`].
    inode: u64,
    /// The number of the PID namespace in which the id is valid.
    namespace: u64,
}

impl Mark {
    pub(super) const WORDS: usize = 3;

    pub(super) fn to_words(self) -> [u64; Self::WORDS] {
        [self.pid, self.inode, self.namespace]
    }

    /// Returns `None` for zeros, which stand for a process without a mark.
    pub(super) fn of_words([pid, inode, namespace]: [u64; Self::WORDS]) -> Option<Self> {
        (pid != 0 && inode != 0 && namespace != 0).then_some(Self { pid, inode, namespace })
    }
}

/// Returns the number of this process's PID namespace.
fn pid_namespace() -> Option<u64> {
    rustix::fs::stat("/proc/self/ns/pid").ok().map(|stat| stat.st_ino)
}

/// The process at the other end of a socket.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its id in this PID namespace; 0 if it has none.
    pid: i32,
    /// Unset until the process has sent it.
    pidfd: OnceLock<Arc<OwnedFd>>,
    /// True if the kernel cannot name the process at the other end of a socket by itself.
    kernel_is_old: bool,
    /// True if the process had ended before its pidfd could be opened.
    has_gone: bool,
    /// Set when [`Process::note_kill`] has noted a kill.
    killed: AtomicBool,
}

/// Writes the process for a message.
impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            0 => f.write_str("a process of another PID namespace"),
            pid => write!(f, "process {pid}"),
        }
    }
}

impl Process {
    /// Returns the process at the other end of a socket, which must be one of the openers.
    ///
    /// # Errors
    /// `PermissionDenied` for any other process; `Expired` for one that has ended.
    pub(crate) fn of_peer(operation: &'static str, socket: BorrowedFd<'_>, openers: Openers) -> Result<Self> {
        Self::answered(operation, &Kernel, socket, openers, &Ids::of_process)
    }

    /// Returns the id of the process at the other end of a socket, which may have ended. `None` for a process of another PID namespace.
    pub(crate) fn pid_of_peer(socket: BorrowedFd<'_>) -> Option<i32> {
        Kernel.credentials(socket).ok().map(|peer| peer.pid).filter(|pid| *pid != 0)
    }

    fn answered(
        operation: &'static str,
        kernel: &dyn Answers,
        socket: BorrowedFd<'_>,
        openers: Openers,
        ids: &dyn Fn() -> Ids,
    ) -> Result<Self> {
        let peer = kernel
            .credentials(socket)
            .map_err(|errno| os_error(operation, "credentials of the other process", errno))?;
        check(operation, openers, &peer, || kernel.groups(socket), ids)?;
        let process = |pidfd: Option<OwnedFd>, kernel_is_old| Self {
            pid: peer.pid,
            pidfd: pidfd.map_or_else(OnceLock::new, |pidfd| OnceLock::from(Arc::new(pidfd))),
            kernel_is_old,
            has_gone: false,
            killed: AtomicBool::new(false),
        };
        let process = match kernel.pidfd(socket) {
            Ok(pidfd) => process(Some(pidfd), false),
            Err(Errno::SRCH | Errno::INVAL) => return Err(ended(operation, &process(None, false))),
            Err(Errno::NOPROTOOPT) => match Pid::from_raw(peer.pid).map(|pid| kernel.open(pid)) {
                Some(Ok(pidfd)) => process(Some(pidfd), true),
                Some(Err(Errno::SRCH)) => return Err(ended(operation, &process(None, true))),
                Some(Err(errno)) => return Err(os_error(operation, "descriptor of the other process", errno)),
                None => process(None, true),
            },
            Err(errno) => return Err(os_error(operation, "descriptor of the other process", errno)),
        };
        // Newer kernels return the pidfd of a process that has been reaped, too.
        if process.has_ended() { Err(ended(operation, &process)) } else { Ok(process) }
    }

    /// Returns the process of a descriptor that a third process has sent. `None` if it is not a pidfd.
    pub(crate) fn of_pidfd(pidfd: OwnedFd) -> Option<Self> {
        if !is_pidfd(pidfd.as_fd()) {
            return None;
        }
        // The kernel shows the id in the namespace of `/proc`: 0 for a process of another one, and -1 for one that has ended.
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).unwrap_or_default();
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse::<i32>().ok());
        let (pid, pidfd) = (pid.unwrap_or(0).max(0), OnceLock::from(Arc::new(pidfd)));
        Some(Self { pid, pidfd, kernel_is_old: false, has_gone: false, killed: AtomicBool::new(false) })
    }

    /// Returns the numbers by which other processes of this PID namespace find the process. `None` before Linux 6.9, without `/proc`, and
    /// for a process of another namespace.
    pub(super) fn mark(&self) -> Option<Mark> {
        let pid = u64::try_from(self.pid()?).ok()?;
        Mark::of_words([pid, self.unique_inode()?, pid_namespace()?])
    }

    /// Finds the process of a mark. Returns `None` if this process cannot determine whether that one lives: it has another PID
    /// namespace, or no free descriptor.
    pub(super) fn of_mark(mark: Mark) -> Option<Self> {
        if pid_namespace()? != mark.namespace {
            return None;
        }
        let number = i32::try_from(mark.pid).ok()?;
        let gone = || Self {
            pid: number,
            pidfd: OnceLock::new(),
            kernel_is_old: false,
            has_gone: true,
            killed: AtomicBool::new(false),
        };
        match Kernel.open(Pid::from_raw(number)?) {
            Ok(pidfd) => {
                let found = Self {
                    pid: number,
                    pidfd: OnceLock::from(Arc::new(pidfd)),
                    kernel_is_old: false,
                    has_gone: false,
                    killed: AtomicBool::new(false),
                };
                // Otherwise another process has the id.
                found.unique_inode().map(|inode| if inode == mark.inode { found } else { gone() })
            }
            // No process has the id, or a thread of another process has it.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Some(gone()),
            Err(_) => None,
        }
    }

    /// Returns the descriptor of this process that the other one needs, if the kernel gives it none. It goes with the greeting.
    pub(crate) fn own_pidfd(&self, operation: &'static str) -> Result<Option<OwnedFd>> {
        let open = || Kernel.open(rustix::process::getpid());
        let opened = self.kernel_is_old.then(open).transpose();
        opened.map_err(|errno| os_error(operation, "descriptor of this process", errno))
    }

    /// Takes the pidfd that the process has sent, if the kernel gave none.
    ///
    /// # Errors
    /// `InvalidArgument` if it has sent none; `Expired` if the process has ended.
    pub(crate) fn identify(&self, operation: &'static str, sent: Option<OwnedFd>) -> Result<()> {
        if self.pidfd.get().is_some() {
            return Ok(());
        }
        let sent = sent.filter(|sent| is_pidfd(sent.as_fd())).ok_or_else(|| {
            invalid_message(operation, "a greeting without its pidfd, which a kernel before Linux 6.5 requires")
        })?;
        let _ = self.pidfd.set(Arc::new(sent));
        if self.has_ended() { Err(ended(operation, self)) } else { Ok(()) }
    }

    /// Returns whether the process has ended: its pidfd is readable. No other sign is reliable. A socket can be closed while
    /// work of a dead process still runs on the device, and a forked child can keep it open.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_gone || self.pidfd().is_some_and(is_readable)
    }

    /// Returns the pidfd. `None` before the greeting of a process that has to send it.
    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.shared_pidfd().map(|pidfd| pidfd.as_fd())
    }

    /// Returns the same as [`Process::pidfd`], for callers that keep it.
    pub(super) fn shared_pidfd(&self) -> Option<&Arc<OwnedFd>> {
        self.pidfd.get()
    }

    /// Returns the id for lists; 0 for a process of another PID namespace.
    pub(super) fn number(&self) -> u32 {
        self.pid.cast_unsigned()
    }

    /// Returns the id in this PID namespace; `None` for a process of another one.
    pub(crate) fn pid(&self) -> Option<i32> {
        (self.pid != 0).then_some(self.pid)
    }

    /// Returns a value that tells processes apart, also those of other PID namespaces. Before Linux 6.9, two processes of other
    /// namespaces have the same value.
    pub(crate) fn key(&self) -> (i32, u64) {
        let inode = self.pidfd().and_then(|pidfd| rustix::fs::fstat(pidfd).ok()).map_or(0, |stat| stat.st_ino);
        (self.pid, inode)
    }

    /// Returns a number that no other process has had since the boot. `None` before Linux 6.9, where all pidfds have one inode.
    pub(super) fn unique_inode(&self) -> Option<u64> {
        const PIDFS: u64 = 0x5049_4446;
        let pidfd = self.pidfd()?;
        let is_pidfs = rustix::fs::fstatfs(pidfd).is_ok_and(|system| system.f_type as u64 == PIDFS);
        is_pidfs.then(|| rustix::fs::fstat(pidfd).ok()).flatten().map(|stat| stat.st_ino)
    }

    /// Returns the process id in the process's own namespace. `None` if the system does not report it.
    pub(crate) fn own_number(&self) -> Option<u32> {
        self.status("NSpid:")?.split_whitespace().next_back()?.parse().ok()
    }

    /// Returns whether the system reports the process as stopped, by a signal or a debugger.
    pub(crate) fn is_stopped(&self) -> bool {
        self.status("State:").is_some_and(|state| state.trim_start().starts_with(['T', 't']))
    }

    /// Returns whether `SIGKILL` was sent to the process, and it has not ended yet. Nothing can keep a killed process alive. `false` for a
    /// process of another PID namespace.
    pub(super) fn is_being_killed(&self) -> bool {
        const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
        // The kernel keeps the signal here until the process has ended.
        let pending = self.status("ShdPnd:").and_then(|pending| u64::from_str_radix(pending.trim(), 16).ok());
        pending.is_some_and(|pending| pending & SIGKILL != 0)
    }

    /// Notes whether the process [is being killed](Self::is_being_killed). Returns whether the kill is new.
    pub(super) fn note_kill(&self) -> bool {
        self.is_being_killed() && !self.killed.swap(true, Ordering::Relaxed)
    }

    /// Returns whether [`Process::note_kill`] has noted a kill.
    pub(super) fn is_killed(&self) -> bool {
        self.killed.load(Ordering::Relaxed)
    }

    /// Returns descriptors of up to two threads of the process, besides its first one. Each becomes readable when its thread ends. The last
    /// thread of a killed process ends long after the others, because it takes apart the memory and the files of the process. With a CUDA
    /// context, that takes 30 to 100 milliseconds. At most one of the two threads is the last one, so the other ends at once. Empty before
    /// Linux 6.9, and for a process of another PID namespace.
    pub(super) fn threads(&self) -> Vec<OwnedFd> {
        const THREAD: PidfdFlags = PidfdFlags::from_bits_retain(libc::O_EXCL as u32);
        let Some(pid) = self.pid().filter(|_| proc_is_of_this_namespace()) else { return Vec::new() };
        let names = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let mut threads: Vec<i32> = names.filter_map(|name| name.file_name().to_str()?.parse().ok()).collect();
        // The oldest threads are the most likely to live as long as the process.
        threads.sort_unstable();
        let open = |thread: i32| rustix::process::pidfd_open(Pid::from_raw(thread)?, THREAD).ok();
        threads.into_iter().filter(|thread| *thread != pid).filter_map(open).take(2).collect()
    }

    /// Returns the state of the process in `/proc`, if `/proc` shows this process's namespace, and the process is in it.
    fn status(&self, field: &str) -> Option<String> {
        let pid = self.pid().filter(|_| proc_is_of_this_namespace())?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let value = status.lines().find_map(|line| line.strip_prefix(field))?.to_owned();
        // The process was still alive here, so its id has not been reused.
        (!self.has_ended()).then_some(value)
    }
}

/// Returns whether `/proc` shows the processes of this process's PID namespace.
fn proc_is_of_this_namespace() -> bool {
    let shown = std::fs::read_link("/proc/self").ok();
    shown.and_then(|shown| shown.to_str()?.parse().ok()) == Some(std::process::id())
}

/// Returns whether a descriptor is that of a process. Sends no signal.
fn is_pidfd(descriptor: BorrowedFd<'_>) -> bool {
    let nothing: *const libc::siginfo_t = std::ptr::null();
    // SAFETY: Signal 0 is only checked and not sent. The call reads no memory through a null pointer.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, descriptor.as_raw_fd(), 0, nothing, 0) };
    // Other errors are about the process: it has ended, or this process must not send it signals.
    result == 0 || last_errno() != Errno::BADF
}

/// Returns whether this kernel names the process at the other end of a socket (`SO_PEERPIDFD`, Linux 6.5).
pub(super) fn kernel_names_peers(socket: BorrowedFd<'_>) -> bool {
    !matches!(Kernel.pidfd(socket), Err(Errno::NOPROTOOPT))
}

fn ended(operation: &'static str, process: &Process) -> Error {
    Error::new(ErrorKind::Expired, operation, format!("the other process ({process}) has ended"))
        .with_hint("request a ticket from a running process")
}

/// The ids of this process, and those that stand for ids without a value in its user namespace.
#[derive(Debug, Clone, Copy)]
struct Ids {
    user: u32,
    /// `None` if the namespace maps every user.
    unmapped_user: Option<u32>,
    /// `None` if the namespace maps every group.
    unmapped_group: Option<u32>,
}

impl Ids {
    fn of_process() -> Self {
        let unmapped = |map: &str, overflow: &str| (!maps_all(map)).then(|| overflow_id(overflow));
        Self {
            user: rustix::process::geteuid().as_raw(),
            unmapped_user: unmapped("/proc/self/uid_map", "/proc/sys/kernel/overflowuid"),
            unmapped_group: unmapped("/proc/self/gid_map", "/proc/sys/kernel/overflowgid"),
        }
    }
}

/// Returns whether this process's user namespace maps every id. `false` if the system does not report it.
pub(super) fn maps_all(file: &str) -> bool {
    let lengths =
        |map: String| map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum();
    std::fs::read_to_string(file).map_or(0, lengths) >= ALL_IDS
}

fn overflow_id(file: &str) -> u32 {
    std::fs::read_to_string(file).ok().and_then(|id| id.trim().parse().ok()).unwrap_or(OVERFLOW_ID)
}

/// Refuses a process that is not one of the openers.
fn check(
    operation: &'static str,
    openers: Openers,
    peer: &libc::ucred,
    groups: impl FnOnce() -> std::result::Result<Vec<u32>, Errno>,
    ids: &dyn Fn() -> Ids,
) -> Result<()> {
    if openers == Openers::Secret {
        // The secret decides.
        return Ok(());
    }
    let ids = ids();
    let is_mapped = ids.unmapped_user != Some(peer.uid);
    if peer.uid == ids.user && is_mapped {
        return Ok(());
    }
    if let Openers::Group(group) = openers
        && ids.unmapped_group != Some(group)
    {
        let groups = || match groups() {
            // Before Linux 4.13, only the primary group is known.
            Err(Errno::NOPROTOOPT) => Ok(Vec::new()),
            groups => groups.map_err(|errno| os_error(operation, "groups of the other process", errno)),
        };
        if peer.gid == group || groups()?.contains(&group) {
            return Ok(());
        }
    }
    let theirs =
        if is_mapped { format!("user {}", peer.uid) } else { format!("a user without an id here ({})", peer.uid) };
    let (group, hint) = match openers {
        Openers::Group(group) => {
            (format!(", and not to group {group}"), "run both processes as one user or in that group")
        }
        _ if is_mapped => (String::new(), "run both processes as the same user, or set `openers` on both sides"),
        _ => (
            String::new(),
            "map one user into both user namespaces, or set `openers=secret` on both sides: `HIGHWATER_SHARING`",
        ),
    };
    let what = format!("the other process belongs to {theirs}{group}, this one to user {}", ids.user);
    Err(Error::new(ErrorKind::PermissionDenied, operation, what).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    const USER: u32 = 1000;
    /// In a namespace that maps some ids.
    const SOME: Ids = Ids { user: USER, unmapped_user: Some(OVERFLOW_ID), unmapped_group: Some(OVERFLOW_ID) };

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// Answers of a kernel: the credentials, the supplementary groups, and those to `SO_PEERPIDFD` and `pidfd_open`.
    struct Faked {
        peer: libc::ucred,
        groups: std::result::Result<Vec<u32>, Errno>,
        pidfd: fn() -> std::result::Result<OwnedFd, Errno>,
        open: fn() -> std::result::Result<OwnedFd, Errno>,
    }

    impl Faked {
        fn of(uid: u32, gid: u32) -> Self {
            let peer = libc::ucred { pid: 7, uid, gid };
            Self { peer, groups: Ok(Vec::new()), pidfd: own, open: || unreachable!("not asked by id") }
        }

        fn ask(&self, openers: Openers, ids: Ids) -> Result<Process> {
            Process::answered("test", self, pair().0.as_fd(), openers, &|| ids)
        }
    }

    impl Answers for Faked {
        fn credentials(&self, _: BorrowedFd<'_>) -> std::result::Result<libc::ucred, Errno> {
            Ok(self.peer)
        }

        fn groups(&self, _: BorrowedFd<'_>) -> std::result::Result<Vec<u32>, Errno> {
            self.groups.clone()
        }

        fn pidfd(&self, _: BorrowedFd<'_>) -> std::result::Result<OwnedFd, Errno> {
            (self.pidfd)()
        }

        fn open(&self, _: Pid) -> std::result::Result<OwnedFd, Errno> {
            (self.open)()
        }
    }

    fn own() -> std::result::Result<OwnedFd, Errno> {
        Kernel.open(rustix::process::getpid())
    }

    /// The pidfd of a process that has been reaped.
    fn reaped() -> std::result::Result<OwnedFd, Errno> {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pidfd = Kernel.open(Pid::from_child(&child)).unwrap();
        child.wait().unwrap();
        Ok(pidfd)
    }

    #[track_caller]
    fn is_refused<T: fmt::Debug>(result: Result<T>, kind: ErrorKind, text: &str) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text) && !error.hint().is_empty(), "{error}");
    }

    #[test]
    fn another_user_is_refused_and_told_why() {
        Faked::of(USER, 5).ask(Openers::SameUser, SOME).unwrap();
        let refused = Faked::of(0, 5).ask(Openers::SameUser, SOME);
        is_refused(refused, ErrorKind::PermissionDenied, "belongs to user 0, this one to user 1000");
    }

    #[test]
    fn an_id_without_a_value_here_is_nobodys() {
        let nobody = Ids { user: OVERFLOW_ID, ..SOME };
        let refused = Faked::of(OVERFLOW_ID, 5).ask(Openers::SameUser, nobody);
        is_refused(refused, ErrorKind::PermissionDenied, "a user without an id here (65534)");
        let stranger = Faked { groups: Ok(vec![OVERFLOW_ID]), ..Faked::of(OVERFLOW_ID, OVERFLOW_ID) };
        is_refused(stranger.ask(Openers::Group(OVERFLOW_ID), SOME), ErrorKind::PermissionDenied, "without an id here");
        // If every id has a value, this one is a user and a group like others.
        let all = Ids { user: OVERFLOW_ID, unmapped_user: None, unmapped_group: None };
        stranger.ask(Openers::SameUser, all).unwrap();
        stranger.ask(Openers::Group(OVERFLOW_ID), Ids { user: USER, ..all }).unwrap();
    }

    #[test]
    fn the_file_decides_whether_every_id_has_a_value() {
        let file = std::env::temp_dir().join(format!("highwater-map-{}", std::process::id()));
        for (map, all) in [
            ("         0          0 4294967295\n", true),
            ("         0       1000          1\n", false),
            ("         0       1000          1\n         1     100000      65536\n", false),
            ("", false),
        ] {
            std::fs::write(&file, map).unwrap();
            assert_eq!(maps_all(file.to_str().unwrap()), all, "{map}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(!maps_all(file.to_str().unwrap()), "without the file, nothing is certain");
        assert_eq!(overflow_id(file.to_str().unwrap()), OVERFLOW_ID);
    }

    #[test]
    fn members_of_a_group_are_let_in_by_any_of_their_groups() {
        let group = Openers::Group(50);
        Faked::of(1, 50).ask(group, SOME).unwrap();
        Faked { groups: Ok(vec![3, 50]), ..Faked::of(1, 5) }.ask(group, SOME).unwrap();
        Faked::of(USER, 5).ask(group, SOME).unwrap();
        for groups in [Ok(vec![3, 51]), Err(Errno::NOPROTOOPT)] {
            let refused = Faked { groups, ..Faked::of(1, 5) }.ask(group, SOME);
            is_refused(refused, ErrorKind::PermissionDenied, "and not to group 50");
        }
        let broken = Faked { groups: Err(Errno::NOMEM), ..Faked::of(1, 5) };
        is_refused(broken.ask(group, SOME), ErrorKind::OperatingSystem, "groups of the other process");
    }

    #[test]
    fn a_secret_replaces_the_users() {
        Faked::of(OVERFLOW_ID, OVERFLOW_ID).ask(Openers::Secret, SOME).unwrap();
    }

    #[test]
    fn a_process_that_has_been_reaped_has_ended_on_every_kernel() {
        let old = |open| Faked { pidfd: || Err(Errno::NOPROTOOPT), open, ..Faked::of(USER, 5) };
        let kernels = [
            // Linux 6.16: the pidfd of a reaped process.
            Faked { pidfd: reaped, ..Faked::of(USER, 5) },
            // Linux 6.5, and 6.5 with a reaped leader of the process.
            Faked { pidfd: || Err(Errno::SRCH), ..Faked::of(USER, 5) },
            Faked { pidfd: || Err(Errno::INVAL), ..Faked::of(USER, 5) },
            old(|| Err(Errno::SRCH)),
            old(reaped),
        ];
        for (place, kernel) in kernels.iter().enumerate() {
            let error = kernel.ask(Openers::SameUser, SOME).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Expired, "kernel {place}: {error}");
            assert!(error.message().contains("(process 7) has ended"), "kernel {place}: {error}");
        }
    }

    #[test]
    fn an_old_kernel_is_asked_by_id_and_a_hidden_process_sends_its_own_pidfd() {
        let refuses = || Err(Errno::NOPROTOOPT);
        let visible = Faked { pidfd: refuses, open: own, ..Faked::of(USER, 5) }.ask(Openers::SameUser, SOME).unwrap();
        assert!(visible.pidfd().is_some() && visible.own_pidfd("test").unwrap().is_some());
        let new = Faked::of(USER, 5).ask(Openers::SameUser, SOME).unwrap();
        assert!(new.own_pidfd("test").unwrap().is_none(), "the other process asks its socket");

        let hidden = || {
            let mut kernel = Faked { pidfd: refuses, ..Faked::of(USER, 5) };
            kernel.peer.pid = 0;
            kernel.ask(Openers::SameUser, SOME).unwrap()
        };
        let process = hidden();
        assert!(process.pidfd().is_none() && !process.has_ended());
        assert_eq!((process.pid(), process.to_string().as_str()), (None, "a process of another PID namespace"));
        is_refused(process.identify("test", None), ErrorKind::InvalidArgument, "without its pidfd");
        is_refused(process.identify("test", Some(pair().0)), ErrorKind::InvalidArgument, "without its pidfd");
        process.identify("test", Some(own().unwrap())).unwrap();
        assert!(process.pidfd().is_some() && !process.has_ended());
        is_refused(hidden().identify("test", Some(reaped().unwrap())), ErrorKind::Expired, "has ended");
    }

    #[test]
    fn an_importer_that_is_reaped_before_it_is_accepted_has_ended() {
        let name = format!("highwater-reaped-{}", std::process::id());
        let address = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let socket = || {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
        };
        let (listener, importer) = (socket(), socket());
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        // SAFETY: the child makes one system call, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let connected = rustix::net::connect(&importer, &address).is_ok();
            // SAFETY: ends the child without running anything else.
            unsafe { libc::_exit(i32::from(!connected)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child connected");
        let accepted = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        let refused = Process::of_peer("test", accepted.as_fd(), Openers::SameUser);
        is_refused(refused, ErrorKind::Expired, &format!("(process {child}) has ended"));
    }

    #[test]
    fn hidden_processes_are_told_apart_by_their_pidfds() {
        let known = |pidfd| OnceLock::from(Arc::new(pidfd));
        let hidden = |pidfd| Process {
            pid: 0,
            pidfd: known(pidfd),
            kernel_is_old: false,
            has_gone: false,
            killed: AtomicBool::new(false),
        };
        let (ours, again, other) = (hidden(own().unwrap()), hidden(own().unwrap()), hidden(reaped().unwrap()));
        assert_eq!(ours.key(), again.key());
        // Since Linux 6.9, each process has an inode.
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
        if (numbers.next(), numbers.next()) >= (Some(6), Some(9)) {
            assert_ne!(ours.key(), other.key(), "on Linux {release}");
        }
    }

    #[test]
    fn this_process_lives_and_a_child_ends() {
        let (ours, _theirs) = pair();
        let process = Process::of_peer("test", ours.as_fd(), Openers::SameUser).unwrap();
        assert!(!process.has_ended());
        assert_eq!(process.pid(), Some(i32::try_from(std::process::id()).unwrap()));
        let own_groups = rustix::process::getgroups().unwrap();
        assert_eq!(Kernel.groups(ours.as_fd()).unwrap().len(), own_groups.len());
        let process = Process::of_pidfd(reaped().unwrap()).unwrap();
        assert!(process.has_ended());
    }

    #[test]
    fn a_mark_finds_its_process_and_no_other_one() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pidfd = Kernel.open(Pid::from_child(&child)).unwrap();
        let process = Process::of_pidfd(pidfd).unwrap();
        let mark = process.mark();
        // Before Linux 6.9, no process has a mark.
        let found = mark.map(|mark| {
            assert_eq!(Mark::of_words(mark.to_words()), Some(mark));
            assert_eq!(Mark::of_words([0; Mark::WORDS]), None);
            let found = Process::of_mark(mark).unwrap();
            assert!(!found.has_ended() && found.key() == process.key());
            assert!(Process::of_mark(Mark { namespace: mark.namespace + 1, ..mark }).is_none());
            let another = Process::of_mark(Mark { inode: mark.inode + 1, ..mark }).unwrap();
            assert!(another.has_ended() && another.pidfd().is_none(), "the id is that of another process");
            (mark, found)
        });
        child.kill().unwrap();
        child.wait().unwrap();
        if let Some((mark, found)) = found {
            assert!(found.has_ended() && Process::of_mark(mark).unwrap().has_ended());
        }
    }
}
