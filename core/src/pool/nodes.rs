//! NUMA nodes: which nodes of the machine have memory, and how a mapping gets its pages from one of them.
//!
//! A copy between a device and memory of another node crosses the link between the nodes. So each node that a device is attached
//! to has a pool of its own, if the machine has several nodes with memory.
//!
//! *Policy.* `mbind` sets the policy of a mapping before its first page is touched. The policy is `MPOL_PREFERRED`: if the node is
//! full, the kernel takes pages of the nearest other node. With `MPOL_BIND`, the kernel would end a process for lack of memory on
//! one node, while other nodes have some. Pages that are page-locked do not move later.
//!
//! *Refusals.* The kernel refuses a node that the process's control group excludes (`cpuset.mems`), and a sandbox may refuse the
//! call. Then the pages are where the system puts them, which costs only speed.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use highwater_hal::{DeviceInfo, HostPtr};

/// From `linux/mempolicy.h`.
const MPOL_PREFERRED: libc::c_int = 1;
/// More nodes than any kernel supports.
const MOST_NODES: u32 = 1 << 10;

/// The nodes of a machine that have memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Nodes(BTreeSet<u32>);

impl Nodes {
    /// Returns the nodes of the machine whose root directory is `root`. None if the kernel does not report them.
    pub(crate) fn of_machine(root: &Path) -> Self {
        let list = std::fs::read_to_string(root.join("sys/devices/system/node/has_memory"));
        Self(list.ok().and_then(|list| numbers(list.trim())).unwrap_or_default())
    }

    /// Returns the node of a device, if the device's memory should lie there: it has memory, and is not the only one.
    pub(crate) fn of_device(&self, info: &DeviceInfo) -> Option<u32> {
        info.numa_node.filter(|node| self.0.len() > 1 && self.0.contains(node))
    }
}

/// Reads a list of the form `0-2,5`.
fn numbers(list: &str) -> Option<BTreeSet<u32>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok().filter(|last: &u32| *last < MOST_NODES)?);
        Some(first..=last)
    };
    list.split(',').map(range).collect::<Option<Vec<_>>>().map(|ranges| ranges.into_iter().flatten().collect())
}

/// Makes the kernel prefer a node for the pages of a mapping that are touched from now on.
///
/// # Safety
/// The caller must pass whole pages that it has mapped.
pub(crate) unsafe fn prefer_node(ptr: HostPtr, bytes: usize, node: u32) -> io::Result<()> {
    let mut mask = [0_u64; (MOST_NODES / 64) as usize];
    *mask.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)? = 1 << (node % 64);
    // The kernel reads one bit less than the number that it gets.
    let bits = u64::from(MOST_NODES) + 1;
    // SAFETY: The caller's own mapping, and a mask of so many bits. The policy changes no contents.
    let result = unsafe { libc::syscall(libc::SYS_mbind, ptr.as_ptr(), bytes, MPOL_PREFERRED, mask.as_ptr(), bits, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
