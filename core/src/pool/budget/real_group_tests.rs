//! The budget of a process in a real control group, made below the group of the tests and removed at the end.
//!
//! Only a process of the test's own enters it. Where no such group can be made, the test prints why and checks nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::groups::Version;
use super::{Budget, Machine};

const GROUP: &str = "HIGHWATER_TEST_CONTROL_GROUP";
const LIMIT: u64 = 256 << 20;
/// Bytes that the process touches. Less than the limit.
const TOUCHED: usize = 96 << 20;

/// A control group, removed at the end.
struct Made(PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        // A process that has ended may still be counted for a moment.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        println!("{} was not removed", self.0.display());
    }
}

/// Returns a group with the limit, below the group of this process, and the file that states the limit.
fn make() -> Result<(Made, &'static str), String> {
    let machine = Machine::new("/");
    let limit = |version: Version| match version {
        Version::One => "memory.limit_in_bytes",
        Version::Two => "memory.max",
    };
    // Children of a group of version 2 count memory only if it lets them. Those of version 1 always do.
    let lets = |directory: &Path| {
        let controllers = fs::read_to_string(directory.join("cgroup.subtree_control")).unwrap_or_default();
        controllers.split_whitespace().any(|controller| controller == "memory")
    };
    let own = [Version::One, Version::Two].into_iter().find_map(|version| {
        let own = machine.groups.iter().find(|group| group.version == version)?;
        let children_count = if version == Version::One { own.counts_memory } else { lets(&own.directory) };
        children_count.then_some(own)
    });
    let own = own.ok_or("the process's group gives no memory controller to groups below it")?;
    let directory = own.directory.join(format!("highwater-test-{}", std::process::id()));
    fs::create_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let made = Made(directory);
    let file = limit(own.version);
    fs::write(made.0.join(file), LIMIT.to_string())
        .map_err(|error| format!("{file} of {}: {error}", made.0.display()))?;
    Ok((made, file))
}

#[test]
fn a_real_control_group_is_measured() {
    let (made, file) = match make() {
        Ok(made) => made,
        Err(reason) => return println!("skipped, no control group can be made here: {reason}"),
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "pool::budget::real_group_tests::scenario", "--nocapture", "--test-threads=1"]);
    let output = command.env(GROUP, &made.0).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter_map(|line| line.split_once("group: ")).map(|(_, line)| line).collect::<Vec<_>>();
    println!("{}: {lines:?}", made.0.join(file).display());
    if let Some(refused) = lines.iter().find_map(|line| line.strip_prefix("not entered: ")) {
        return println!("skipped, a process cannot enter the group: {refused}");
    }
    assert!(
        output.status.success() && lines.last() == Some(&"done"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let shown = made.0.join(file);
    assert!(lines.iter().any(|line| line.contains(&*shown.to_string_lossy())), "{shown:?}: {text}");
}

/// Runs in a process of its own, and does nothing when run as a test.
#[test]
fn scenario() {
    let Some(group) = std::env::var_os(GROUP).map(PathBuf::from) else { return };
    if let Err(error) = fs::write(group.join("cgroup.procs"), "0") {
        return println!("group: not entered: {error}");
    }
    let budget = Budget::of_process();
    let left = || budget.machine.left(u64::MAX).find(|left| left.of_group && left.limit == LIMIT).unwrap().bytes;
    let before = left();
    assert!(
        before > LIMIT / 2 && before <= LIMIT,
        "{before} of {LIMIT} bytes are left to a process that has just begun"
    );
    assert!(budget.room(4096, 0, None).is_ok());
    let shortage = budget.room(LIMIT, 0, None).unwrap_err();
    println!("group: {}", budget.out_of_memory("pinned", &shortage));

    let touched = vec![1_u8; TOUCHED];
    let after = left();
    let used = before.saturating_sub(after);
    // The kernel charges a group in batches for each processor.
    let slack = 8 << 20;
    assert!(used.abs_diff(TOUCHED as u64) < slack, "{TOUCHED} bytes were touched, and {used} fewer are left");
    // What still fits can be touched, and the process lives.
    let rest = after - (64 << 20);
    assert!(budget.room(rest + slack, TOUCHED as u64, None).is_err());
    assert!(budget.room(rest - slack, TOUCHED as u64, None).is_ok());
    let more = vec![1_u8; usize::try_from(rest - slack).unwrap()];
    assert!(budget.room(slack * 2, (touched.len() + more.len()) as u64, None).is_err());
    drop((std::hint::black_box(touched), std::hint::black_box(more)));
    let freed = left();
    assert!(freed.abs_diff(before) < slack, "{before} bytes were left, {freed} after the process freed its memory");
    println!("group: done");
}
