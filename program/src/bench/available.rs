//! The memory that this process can still use.

use std::fs::read_to_string;

/// Returns the bytes that the machine has available and the control group leaves, or `None` if the system does not report it.
pub(super) fn bytes() -> Option<u64> {
    let machine = read_to_string("/proc/meminfo").ok().and_then(|text| of_machine(&text));
    let number = |path: &str| read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = |limit: &str, used: &str| Some(number(limit)?.saturating_sub(number(used)?));
    let second = group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current");
    let first = group("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes");
    [machine, second, first].into_iter().flatten().min()
}

fn of_machine(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_machines_memory_is_read_in_bytes() {
        let text = "MemTotal:       24689764 kB\nMemFree:        1 kB\nMemAvailable:   23059204 kB\n";
        assert_eq!(super::of_machine(text), Some(23_059_204 * 1024));
        assert_eq!(super::of_machine("MemTotal: 1 kB\n"), None);
    }
}
