//! How much page-locked memory the pool may still take. The kernel kills a process that touches too much, instead of returning
//! an error. So the pool asks before each growth.
//!
//! *Limits.* [`Machine`] reads `MemAvailable` of `/proc/meminfo` and, for the process's control group and each ancestor that it
//! sees, the limit and the usage: `memory.max` and `memory.high` (version 2) or `memory.limit_in_bytes` (version 1). A file that
//! is absent or malformed sets no limit. Inactive cached files count as free. Active ones are reclaimed too, at a cost for other
//! work. So a growth that needs them takes only what the request needs.
//!
//! *Reserve.* A growth leaves max(64 MiB, 2 %) of each limit free.
//!
//! *Pressure.* When all tasks of the group waited for memory during 10 % of the last ten seconds (`full avg10` of
//! `memory.pressure`), the pool releases idle memory first, and grows only by the request.
//!
//! *What does not count.* `RLIMIT_MEMLOCK` limits `mlock`, and drivers that charge pinned pages to it. NVIDIA's open kernel module
//! pins without charging. A driver that charges returns an error, and the kernel kills nothing. Swap does not count, because pinned
//! pages cannot be swapped out. Pages that the user reserved for `MAP_HUGETLB` are not part of `MemAvailable`; a mapping of them
//! needs no check.
//!
//! *Cost.* The paths are found once. A check opens `meminfo`, the limits of each group, the usage where there is a limit, and the
//! pressure: here five files, three of them of nested groups of version 1 without a limit. It took 70 to 90 µs in five runs of a
//! debug build on two cores that other programs used, most of it to open the files. `memory.stat` takes three times as long as a
//! limit. It is read only if free memory does not suffice, or if a namespace may hide ancestors (version 1).
//! `cargo test -p highwater-core --lib time_of_a_check -- --ignored --nocapture` prints the time.
//!
//! *No promise.* Other processes may take memory between the check and the touch.

mod groups;
mod machine;
#[cfg(test)]
mod real_group_tests;
#[cfg(test)]
mod tests;

use std::fmt::Write;
use std::sync::OnceLock;

use highwater_hal::{Error, ErrorKind, counted};

pub(crate) use machine::{Left, Machine};

/// The pool grows by multiples of this much. If free memory covers it, cached files are not counted.
const STEP: u64 = 2 << 20;
/// The percentage of time at which memory is under pressure.
const PRESSURE: f64 = 10.0;

/// The limits that bind the process.
#[derive(Debug)]
pub(crate) struct Budget {
    machine: Machine,
}

/// How the pool may grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Maximum bytes of the growth: at least the request, and exactly the request if `release_idle_first`.
    pub(crate) most: u64,
    /// Memory is scarce: the pool releases its idle memory, and then grows by the request.
    pub(crate) release_idle_first: bool,
}

/// A request that does not fit. The pool releases idle memory and checks once more, before it returns
/// [`Budget::out_of_memory`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shortage {
    request: u64,
    held: u64,
    cap: Option<u64>,
    /// What the tightest limit leaves. `None` if the cap refused the request.
    left: Option<Left>,
}

impl Budget {
    /// Returns the budget of a machine.
    pub(crate) const fn new(machine: Machine) -> Self {
        Self { machine }
    }

    /// Returns the budget of this process.
    pub(crate) fn of_process() -> &'static Self {
        static BUDGET: OnceLock<Budget> = OnceLock::new();
        BUDGET.get_or_init(|| Self::new(Machine::new("/")))
    }

    /// As [`Budget::room`], for a growth that takes reserved huge pages only: they are not part of what the machine has left.
    pub(crate) fn room_below_cap(&self, request: u64, held: u64, cap: Option<u64>) -> Result<Room, Shortage> {
        let most = cap.map_or(u64::MAX, |cap| cap.saturating_sub(held));
        if request > most {
            return Err(Shortage { request, held, cap, left: None });
        }
        Ok(Room { most, release_idle_first: false })
    }

    /// Returns how the pool may grow by `request` bytes, if it holds `held` and may hold `cap`.
    pub(crate) fn room(&self, request: u64, held: u64, cap: Option<u64>) -> Result<Room, Shortage> {
        let shortage = |left| Shortage { request, held, cap, left };
        let mut room = self.room_below_cap(request, held, cap)?;
        let mut tightest: Option<Left> = None;
        for left in self.machine.left(wanted(request)) {
            if request > left.grants() && tightest.as_ref().is_none_or(|other| left.grants() < other.grants()) {
                tightest = Some(left);
                continue;
            }
            let free = left.bytes.saturating_sub(left.reserve());
            room.release_idle_first |= request > free;
            room.most = room.most.min(free);
        }
        if tightest.is_some() {
            return Err(shortage(tightest));
        }
        room.release_idle_first |= self.machine.pressure().is_some_and(|percent| percent >= PRESSURE);
        if room.release_idle_first {
            room.most = request;
        }
        Ok(room)
    }

    /// Returns the error for a request that does not fit even after idle memory was released.
    pub(crate) fn out_of_memory(&self, operation: &'static str, shortage: &Shortage) -> Error {
        let Shortage { request, held, cap, ref left } = *shortage;
        let [request, held] = [request, held].map(|bytes| counted(bytes, "byte"));
        let mut message = format!("the pool would grow by {request}, it holds {held}, ");
        let _ = match cap {
            Some(cap) => write!(message, "the cap is {}", counted(cap, "byte")),
            None => write!(message, "there is no cap"),
        };
        // The cap is checked before any file is read.
        let tightest = || self.machine.left(u64::MAX).min_by_key(Left::grants);
        if let Some(left) = left.clone().or_else(tightest) {
            let place = if left.of_group { "the control group" } else { "the system" };
            let (bytes, limit, reserve) = (left.most(), left.limit, left.reserve());
            let file = left.file.display();
            let _ = write!(message, "; {place} has {bytes} of {limit} bytes left, {reserve} of them reserved ({file})");
        }
        let remedy = match left {
            None => "raise the cap (`cap` in HIGHWATER_HOST_MEMORY)".to_owned(),
            Some(left) if left.of_group => {
                format!("raise the memory limit of the process's control group ({})", left.file.display())
            }
            Some(_) => "end other processes that use memory".to_owned(),
        };
        Error::new(ErrorKind::OutOfMemory, operation, message)
            .with_hint(format!("request fewer bytes, drop buffers and trim, or {remedy}"))
    }
}

/// Returns the free bytes with which a request is granted without counting cached files.
const fn wanted(request: u64) -> u64 {
    match request.checked_next_multiple_of(STEP) {
        Some(bytes) => bytes,
        None => u64::MAX,
    }
}
