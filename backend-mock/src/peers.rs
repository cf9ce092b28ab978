//! Liveness of other processes.
//!
//! A process has ended exactly if its process descriptor is readable. A process id and the start time together name a
//! process, because ids are used again. Ids count in one namespace, so processes of two containers do not find each
//! other.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

/// The largest number of process descriptors that are kept.
const KEPT: usize = 64;

/// A process, as long as the machine runs: its id and the low half of its start time, as they stand in shared memory. 0
/// is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProcessId(pub(crate) u64);

impl ProcessId {
    fn own() -> Self {
        let number = std::process::id();
        Self::of(number, start_time(number).unwrap_or(0))
    }

    fn of(number: u32, start: u32) -> Self {
        Self(u64::from(number) << 32 | u64::from(start))
    }

    fn pid(self) -> Option<Pid> {
        i32::try_from(self.0 >> 32).ok().and_then(Pid::from_raw)
    }

    fn start(self) -> u32 {
        self.0 as u32
    }
}

/// The other processes that events asked for.
#[derive(Debug)]
pub(crate) struct Peers {
    pub(crate) own: ProcessId,
    alive: Mutex<BTreeMap<ProcessId, OwnedFd>>,
}

impl Peers {
    pub(crate) fn new() -> Self {
        Self { own: ProcessId::own(), alive: Mutex::new(BTreeMap::new()) }
    }

    /// Returns whether the process has ended. If the system cannot tell (no descriptors are left, say), it has not.
    pub(crate) fn has_ended(&self, process: ProcessId) -> bool {
        if process == self.own {
            return false;
        }
        let mut alive = self.alive.lock();
        if let Some(descriptor) = alive.get(&process) {
            let ended = is_readable(descriptor);
            if ended {
                alive.remove(&process);
            }
            return ended;
        }
        let Some(pid) = process.pid() else { return true };
        let descriptor = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            // INVAL: the id belongs to a thread by now.
            Err(error) => return matches!(error, Errno::SRCH | Errno::INVAL),
        };
        // Read after the descriptor was opened. If the id changed hands before, the times differ. If it changes hands
        // now, the descriptor becomes readable.
        let another = start_time(pid.as_raw_nonzero().get() as u32).is_some_and(|start| start != process.start());
        if another || is_readable(&descriptor) {
            return true;
        }
        if alive.len() >= KEPT {
            alive.pop_first();
        }
        alive.insert(process, descriptor);
        false
    }
}

fn is_readable(descriptor: &OwnedFd) -> bool {
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut asked = [PollFd::new(descriptor, PollFlags::IN)];
    rustix::event::poll(&mut asked, Some(&now)).is_ok() && asked[0].revents().contains(PollFlags::IN)
}

/// Returns the start time of a process in the kernel's ticks, the low half. See proc_pid_stat(5), field 22.
pub(crate) fn start_time(number: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The second field, the name in parentheses, may hold any text.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: u64 = fields.split_whitespace().nth(19)?.parse().ok()?;
    Some(ticks as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that is killed with the test, however the test ends.
    struct Sleeper(std::process::Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_has_ended_when_it_was_killed_and_not_before() {
        let peers = Peers::new();
        assert!(!peers.has_ended(peers.own));
        let mut sleeper = Sleeper(std::process::Command::new("sleep").arg("60").spawn().unwrap());
        let child = &mut sleeper.0;
        let id = ProcessId::of(child.id(), start_time(child.id()).unwrap());
        assert!(!peers.has_ended(id) && !peers.has_ended(id));
        assert_eq!(peers.alive.lock().len(), 1);
        // Another process had this number before.
        assert!(peers.has_ended(ProcessId(id.0 ^ 1)));
        child.kill().unwrap();
        // Nobody has waited for it yet.
        while !peers.has_ended(id) {
            std::thread::yield_now();
        }
        assert_eq!(peers.alive.lock().len(), 0);
        child.wait().unwrap();
        assert!(peers.has_ended(id));
    }

    #[test]
    fn numbers_that_are_no_process_have_ended() {
        let peers = Peers::new();
        for nobody in [0, 1 << 31, u64::MAX, (1 << 22 | 1) << 32] {
            assert!(peers.has_ended(ProcessId(nobody)), "{nobody:#x}");
        }
    }
}
