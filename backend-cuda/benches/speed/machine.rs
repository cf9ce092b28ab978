//! The machine of the measurements.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use highwater_core::{Device, Runtime};

use crate::table::time;

/// Returns lines for the head of the table, as `(what, value)`.
pub(crate) fn describe(runtime: &Runtime, device: &Device, opened: Duration) -> Vec<(String, String)> {
    let info = device.info();
    let mut lines = vec![
        ("date (UTC)".to_owned(), date(SystemTime::now())),
        ("GPU".to_owned(), format!("{} ({}), {} MiB", info.name, info.architecture, info.memory_bytes >> 20)),
        ("kernel driver".to_owned(), first_line("/sys/module/nvidia/version").unwrap_or_else(|| "not told".to_owned())),
        ("CPU".to_owned(), cpu()),
        ("Linux".to_owned(), first_line("/proc/sys/kernel/osrelease").unwrap_or_else(|| "not told".to_owned())),
        ("opening the backend".to_owned(), time(opened.as_nanos() as f64)),
    ];
    let versions = &runtime.identity().versions;
    lines.extend(versions.iter().filter(|(what, _)| what != "library").cloned());
    let libraries: Vec<&str> =
        versions.iter().filter(|(what, _)| what == "library").map(|(_, file)| file.as_str()).collect();
    lines.push(("libraries".to_owned(), libraries.join(", ")));
    lines
}

fn first_line(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.lines().next()?.trim().to_owned())
}

fn cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{}, {threads} threads for this process", model.map_or("not told", str::trim))
}

/// Formats year, month, day, hour and minute.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut days, mut year, mut month) = (seconds / 86400, 1970, 0);
    while days >= if leap(year) { 366 } else { 365 } {
        days -= if leap(year) { 366 } else { 365 };
        year += 1;
    }
    let lengths = [31, if leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{year}-{:02}-{:02} {hour:02}:{minute:02}", month + 1, days + 1)
}
