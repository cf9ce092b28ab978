//! The memory that the system has available. The kernel kills a process that touches more, instead of returning an error.
//!
//! The pool checks before it touches a large block. A limit that cannot be read counts as no limit. Other processes may take
//! memory between the check and the touch. So the check catches sizes that no machine has, and promises nothing more.

use std::fs;
use std::path::Path;

/// If `bytes` more cannot be allocated, returns how many are available.
pub(crate) fn refuses(bytes: usize) -> Option<u64> {
    let bytes = bytes as u64;
    let refuses = |available: u64| (bytes > available).then_some(available);
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| of_system(&text));
    system.and_then(refuses).or_else(|| {
        let cgroup = fs::read_to_string("/proc/self/cgroup").ok()?;
        in_cgroups(Path::new("/sys/fs/cgroup"), of_unified(&cgroup)?, bytes)
    })
}

/// Returns the memory that the kernel estimates to be available without swapping, from `/proc/meminfo`.
fn of_system(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Returns the process's path in the unified hierarchy, from `/proc/self/cgroup`.
fn of_unified(cgroup: &str) -> Option<&str> {
    cgroup.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// As [`refuses`], for the limits of a control group (version 2) and of its parents.
fn in_cgroups(root: &Path, path: &str, bytes: u64) -> Option<u64> {
    root.join(path).ancestors().take_while(|directory| directory.starts_with(root)).find_map(|directory| {
        let number = |file: &str| fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok();
        // "max" is not a number: there is no limit.
        let free = number("memory.max")?.saturating_sub(number("memory.current")?);
        if bytes <= free {
            return None;
        }
        // Cached files count as used but can be evicted. Queried last, because the kernel may take long to sum them up.
        let cached = fs::read_to_string(directory.join("memory.stat")).ok().map_or(0, |stat| cached_files(&stat));
        let available = free.saturating_add(cached);
        (bytes > available).then_some(available)
    })
}

fn cached_files(stat: &str) -> u64 {
    let of = |key: &str| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok()).unwrap_or(0);
    of("active_file ").saturating_add(of("inactive_file "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_any_machine_has_is_out_of_the_question_and_a_page_is_not() {
        assert!(refuses(1 << 60).is_some_and(|available| available > 0));
        assert_eq!(refuses(4096), None);
    }

    #[test]
    fn the_kernels_own_estimate_is_read() {
        let text = "MemTotal:       24689012 kB\nMemFree:         100 kB\nMemAvailable:   2048 kB\nBuffers: 1 kB\n";
        assert_eq!(of_system(text), Some(2 << 20));
        assert_eq!(of_system("MemTotal: 5 kB\n"), None);
        assert_eq!(of_system("MemAvailable: many\n"), None);
    }

    #[test]
    fn limits_of_all_control_groups_around_the_process_count() {
        let cgroup = "12:cpu:/other\n0::/outer/inner\n";
        assert_eq!(of_unified(cgroup), Some("outer/inner"));
        assert_eq!(of_unified("3:memory:/old\n"), None);
        let root = std::env::temp_dir().join(format!("highwater-cgroup-{}", std::process::id()));
        let inner = root.join("outer/inner");
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(inner.join("memory.current"), "5000\n").unwrap();
        fs::write(root.join("outer/memory.max"), "10000\n").unwrap();
        fs::write(root.join("outer/memory.current"), "9000\n").unwrap();
        let stat = "anon 100\nactive_file 300\ninactive_file 700\nworkingset_refault_file 9\n";
        fs::write(root.join("outer/memory.stat"), stat).unwrap();
        let refused = [1000, 2000, 2001].map(|bytes| in_cgroups(&root, "outer/inner", bytes));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(refused, [None, None, Some(2000)]);
        assert_eq!(in_cgroups(&root, "outer/inner", 1 << 40), None, "nothing is known");
    }
}
