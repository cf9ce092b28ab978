//! The files in which the kernel states how much memory the process may still use.

use std::fs;
use std::path::{Path, PathBuf};

use super::groups::{self, Group, Version};

/// Version 1 writes "unlimited" as the largest number of whole pages. No machine has this much.
const UNLIMITED: u64 = 1 << 62;
/// The bytes of a limit that a growth leaves free: at least this many, and one part in [`RESERVE_PART`].
const RESERVE: u64 = 64 << 20;
const RESERVE_PART: u64 = 50;

/// Reads the limits of the machine and of the process's control groups. The paths are found once: a process that is moved to
/// another group later is measured by its old one. A file that cannot be read or parsed counts as absent.
#[derive(Debug)]
pub(crate) struct Machine {
    root: PathBuf,
    pub(super) groups: Vec<Group>,
}

/// What one limit leaves to the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Left {
    /// The file that states the limit.
    pub(crate) file: PathBuf,
    /// The process is in a control group that has the limit. Otherwise it is the limit of the machine.
    pub(crate) of_group: bool,
    pub(crate) limit: u64,
    /// Bytes that are free, or that the kernel can reclaim at little cost.
    pub(crate) bytes: u64,
    /// Further bytes of cached files that were used recently. The kernel reclaims them, but other work has to read them again.
    pub(crate) active_files: u64,
}

impl Left {
    /// Returns all bytes that the process can get before the kernel kills a process.
    pub(crate) fn most(&self) -> u64 {
        self.bytes.saturating_add(self.active_files)
    }

    /// Returns the bytes of it that a growth leaves free.
    pub(crate) fn reserve(&self) -> u64 {
        RESERVE.max(self.limit / RESERVE_PART)
    }

    /// Returns the largest request that fits.
    pub(crate) fn grants(&self) -> u64 {
        self.most().saturating_sub(self.reserve())
    }
}

impl Machine {
    /// Returns a reader of the file system below `root`: `/`, or a folder with a copy of `/proc` and `/sys`.
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let groups = groups::find(&root);
        Self { root, groups }
    }

    /// Returns what each limit leaves: the machine's first, then those of the groups from the innermost. If free memory alone
    /// covers `wanted` bytes and the reserve, cached files are not counted: the kernel may take long to sum them up.
    pub(crate) fn left(&self, wanted: u64) -> impl Iterator<Item = Left> + '_ {
        let counting = self.groups.iter().filter(|group| group.counts_memory);
        self.of_system().into_iter().chain(counting.filter_map(move |group| self.of_group(group, wanted)))
    }

    /// Returns the percentage of the last ten seconds in which all tasks of the process's group waited for memory. Without a
    /// group that states it, returns that of the machine.
    pub(crate) fn pressure(&self) -> Option<f64> {
        let of_groups = self.groups.iter().filter(|group| group.version == Version::Two);
        let files = of_groups.map(|group| group.directory.join("memory.pressure"));
        let mut files = files.chain([self.root.join("proc/pressure/memory")]);
        files.find_map(|file| full_avg10(&fs::read_to_string(file).ok()?))
    }

    fn of_system(&self) -> Option<Left> {
        let file = self.root.join("proc/meminfo");
        let meminfo = fs::read_to_string(&file).ok()?;
        let bytes = kib(&meminfo, "MemAvailable:")?;
        let limit = kib(&meminfo, "MemTotal:").unwrap_or(bytes);
        Some(Left { file: self.shown(&file), of_group: false, limit, bytes, active_files: 0 })
    }

    fn of_group(&self, group: &Group, wanted: u64) -> Option<Left> {
        let number = |file: &str| number(&group.directory.join(file));
        let prefix = match group.version {
            Version::One => "total_",
            Version::Two => "",
        };
        let stat = || fs::read_to_string(group.directory.join("memory.stat")).unwrap_or_default();
        // "max" is not a number: there is no limit.
        let limits = match group.version {
            Version::One => {
                let above = || counter(&stat(), "hierarchical_memory_limit").map(|limit| (limit, "memory.stat"));
                let own = number("memory.limit_in_bytes").map(|limit| (limit, "memory.limit_in_bytes"));
                [own, if group.hides_ancestors { above() } else { None }]
            }
            Version::Two => ["memory.max", "memory.high"].map(|file| Some((number(file)?, file))),
        };
        let lowest = limits.into_iter().flatten().min_by_key(|(limit, _)| *limit);
        let (limit, file) = lowest.filter(|(limit, _)| *limit < UNLIMITED)?;
        let usage = number(group.version.usage())?;
        let left = |used: u64, active_files: u64| {
            let (file, bytes) = (self.shown(&group.directory.join(file)), limit.saturating_sub(used));
            Left { file, of_group: true, limit, bytes, active_files }
        };
        let free = left(usage, 0);
        if free.bytes >= wanted.saturating_add(free.reserve()) {
            return Some(free);
        }
        let stat = stat();
        let files = |kind: &str| counter(&stat, &format!("{prefix}{kind}_file")).unwrap_or(0);
        // Files cannot be more than the usage. The two are read at different times.
        let inactive = files("inactive").min(usage);
        let excess = (usage - inactive).saturating_sub(limit);
        Some(left(usage - inactive, files("active").min(usage - inactive).saturating_sub(excess)))
    }

    /// Returns the path as the process knows it.
    fn shown(&self, file: &Path) -> PathBuf {
        file.strip_prefix(&self.root).map_or_else(|_| file.into(), |below| Path::new("/").join(below))
    }
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns a line of `/proc/meminfo` in bytes.
fn kib(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns a line of `memory.stat`.
fn counter(stat: &str, key: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

fn full_avg10(pressure: &str) -> Option<f64> {
    let full = pressure.lines().find_map(|line| line.strip_prefix("full "))?;
    let avg10 = full.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    avg10.parse().ok().filter(|percent| (0.0..=100.0).contains(percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_own_estimate_is_read() {
        let text = "MemTotal:       24689012 kB\nMemFree:         100 kB\nMemAvailable:   2048 kB\nBuffers: 1 kB\n";
        assert_eq!(kib(text, "MemAvailable:"), Some(2 << 20));
        assert_eq!(kib("MemTotal: 5 kB\n", "MemAvailable:"), None);
        for bad in ["many", "5", "5 MB", "-5 kB", "99999999999999999999 kB", "18446744073709551615 kB"] {
            assert_eq!(kib(&format!("MemAvailable: {bad}\n"), "MemAvailable:"), None, "{bad:?}");
        }
    }

    #[test]
    fn a_counter_is_found_by_its_whole_name() {
        let stat = "inactive_file_like 1\ntotal_inactive_file 2\ninactive_file 3\nbad x\n";
        assert_eq!(counter(stat, "inactive_file"), Some(3));
        assert_eq!(counter(stat, "total_inactive_file"), Some(2));
        assert_eq!(counter(stat, "bad"), None);
    }

    #[test]
    fn pressure_is_read_from_the_line_of_all_tasks() {
        let text = "some avg10=30.00 avg60=2.00 avg300=1.00 total=9\nfull avg10=12.34 avg60=0.00 avg300=0.00 total=5\n";
        assert_eq!(full_avg10(text), Some(12.34));
        for bad in [
            "",
            "full",
            "full avg60=1.00",
            "full avg10=",
            "full avg10=NaN",
            "full avg10=-1",
            "full avg10=inf",
            "full avg10=101",
        ] {
            assert_eq!(full_avg10(bad), None, "{bad:?}");
        }
    }
}
