//! [`SharingReport`]: whether processes can share memory by the chosen rendezvous, for `highwater doctor`.

use std::os::fd::AsFd;
use std::time::Duration;

use super::identity::{Process, kernel_names_peers, maps_all};
use super::name::Name;
use super::options::{self, Rendezvous, SharingOptions};
use super::patience::Patience;
use super::rendezvous::{Meeting, check_inherited};
use super::system::{boot_id, os_error};
use highwater_hal::Result;

/// The rendezvous of this process, and whether it works.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SharingReport {
    /// The options of the environment variable `HIGHWATER_SHARING`.
    pub options: SharingOptions,
    /// True if that variable is set.
    pub is_set: bool,
    /// The reason why the rendezvous cannot be used.
    pub problem: Option<highwater_hal::Error>,
    /// Whether the kernel names the process at the other end of a socket (`SO_PEERPIDFD`, Linux 6.5). If not, processes of
    /// different PID namespaces send each other their descriptors.
    pub kernel_names_peers: bool,
    /// Whether every user id has a value in this user namespace. If not, an unmapped user opens nothing without a secret.
    pub maps_all_users: bool,
}

impl SharingReport {
    /// Tries the rendezvous of the environment variable `HIGHWATER_SHARING`, or the default. For a directory or an abstract name,
    /// this process listens there for a moment and reaches itself. Of an inherited descriptor, only the type is checked, because
    /// other processes use it. A descriptor with close-on-exec is refused: this process has made it, and did not inherit it.
    #[must_use]
    pub fn of_environment() -> Self {
        let variable = options::variable();
        let is_set = variable.is_some();
        let (options, parsed) = match SharingOptions::of_variable(variable) {
            Ok(options) => (options, Ok(())),
            Err(error) => (SharingOptions::new(), Err(error)),
        };
        // This check comes first: a descriptor that this function makes could be mistaken for the inherited one.
        let problem = parsed.and_then(|()| inherits(options)).and_then(|()| try_out(options)).err();
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
        let pair = rustix::net::socketpair(family, kind, flags, None);
        Self {
            options,
            is_set,
            problem,
            kernel_names_peers: pair.is_ok_and(|(ours, _)| kernel_names_peers(ours.as_fd())),
            maps_all_users: maps_all("/proc/self/uid_map"),
        }
    }
}

/// Refuses a descriptor that this process did not inherit.
fn inherits(options: SharingOptions) -> Result<()> {
    match options.rendezvous {
        Some(Rendezvous::Descriptor(number)) => check_inherited(number),
        _ => Ok(()),
    }
}

fn try_out(options: SharingOptions) -> Result<()> {
    let meeting = Meeting::open(options)?;
    if meeting.method() == options::Method::Descriptor {
        return Ok(());
    }
    let name = Name { boot: boot_id(), incarnation: highwater_hal::random("share")? };
    let listener = meeting.listen(name)?;
    let met = || {
        let patience = Patience::new(Duration::from_secs(2));
        let ours = meeting.reach(meeting.method(), name, "this process", patience, &|| Ok(()))?;
        Process::of_peer("open_shared", ours.as_fd(), meeting.openers)?;
        let failed = |errno| os_error("share", "connection of this process", errno);
        let theirs = listener.accept(name.incarnation).map_err(failed)?;
        theirs.map_or(Ok(()), |theirs| Process::of_peer("share", theirs.as_fd(), meeting.openers).map(drop))
    };
    let met = met();
    meeting.close(&listener, name);
    met
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_place_is_tried_and_left_as_it_was() {
        try_out(SharingOptions::new()).unwrap();
        let folder = std::env::temp_dir().join(format!("highwater-survey-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path: &'static Path = Box::leak(folder.clone().into_boxed_path());
        try_out(SharingOptions::new().with_rendezvous(Rendezvous::Directory(path))).unwrap();
        // Longer than the address of a socket.
        let long = folder.join("a".repeat(150));
        std::fs::create_dir(&long).unwrap();
        let rendezvous = Rendezvous::Directory(Box::leak(long.clone().into_boxed_path()));
        try_out(SharingOptions::new().with_rendezvous(rendezvous)).unwrap();
        std::fs::remove_dir(&long).expect("nothing is left in the directory");
        std::fs::remove_dir(&folder).expect("nothing is left in the directory");
        try_out(SharingOptions::new().with_rendezvous(Rendezvous::Directory(path))).unwrap_err();
        try_out(SharingOptions::new().with_rendezvous(Rendezvous::Descriptor(1 << 20))).unwrap_err();
    }

    /// Failed before: `doctor` made a pair of sockets itself, and took it for the inherited one.
    #[test]
    fn a_descriptor_that_this_process_has_made_is_not_inherited() {
        use std::os::fd::AsRawFd;

        use rustix::net::{AddressFamily, SocketFlags, SocketType};

        for (flags, is_inherited) in [(SocketFlags::CLOEXEC, false), (SocketFlags::empty(), true)] {
            let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            let options = SharingOptions::new().with_rendezvous(Rendezvous::Descriptor(pair.0.as_raw_fd()));
            assert_eq!(inherits(options).is_ok(), is_inherited, "{flags:?}");
        }
    }
}
