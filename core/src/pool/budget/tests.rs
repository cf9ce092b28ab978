//! The budget over faked trees of `/proc` and `/sys/fs/cgroup`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use highwater_hal::ErrorKind;
use proptest::option::of;
use proptest::prelude::*;

use super::{Budget, Machine, Room, Shortage};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Page-locked bytes that the pool of these tests holds.
const HELD: u64 = 4096;

const TWO: &str = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
const ONE: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

/// A faked root, removed at the end.
struct Tree(PathBuf);

impl Tree {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("highwater-budget-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let root = std::env::temp_dir().join(name);
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    fn file(self, path: &str, text: impl AsRef<[u8]>) -> Self {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// A system with so much memory available, of twice as much.
    fn available(self, bytes: u64) -> Self {
        let (total, available) = (bytes / 512, bytes / 1024);
        self.file("proc/meminfo", format!("MemTotal: {total} kB\nMemFree: 0 kB\nMemAvailable: {available} kB\n"))
    }

    /// A process in a group of one hierarchy.
    fn process(self, cgroup: &str, mountinfo: &str) -> Self {
        self.file("proc/self/cgroup", cgroup).file("proc/self/mountinfo", mountinfo)
    }

    /// A group of version 2. `stat` has the inactive and the active files.
    fn two(self, path: &str, max: &str, current: u64, stat: (u64, u64)) -> Self {
        self.file(&format!("{path}/memory.max"), format!("{max}\n"))
            .file(&format!("{path}/memory.current"), format!("{current}\n"))
            .file(&format!("{path}/memory.stat"), format!("anon 7\ninactive_file {}\nactive_file {}\n", stat.0, stat.1))
    }

    /// A group of version 1. `stat` has the inactive files of the group and its children, and the lowest limit above.
    fn one(self, path: &str, limit: u64, usage: u64, stat: (u64, u64)) -> Self {
        let (files, above) = stat;
        let stat =
            format!("inactive_file 3\nactive_file 3\nhierarchical_memory_limit {above}\ntotal_inactive_file {files}\n");
        self.file(&format!("{path}/memory.limit_in_bytes"), format!("{limit}\n"))
            .file(&format!("{path}/memory.usage_in_bytes"), format!("{usage}\n"))
            .file(&format!("{path}/memory.stat"), stat)
    }

    fn budget(&self) -> Budget {
        Budget::new(Machine::new(&self.0))
    }

    fn room(&self, request: u64) -> Result<Room, Shortage> {
        self.budget().room(request, HELD, None)
    }

    /// Checks that exactly `bytes` fit, and that `file` is what refuses more.
    #[track_caller]
    fn fits(&self, bytes: u64, file: &str) {
        assert!(self.room(bytes).is_ok(), "{:?}", self.room(bytes));
        let shortage = self.room(bytes + 1).expect_err("more than is left fits");
        assert_eq!(shortage.left.as_ref().unwrap().file, Path::new(file), "{shortage:?}");
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Half a limit with nothing else in the way. 64 MiB of it stay free.
const HALF: u64 = 512 * MIB;
const FITS: u64 = HALF - 64 * MIB;

// ------------------------------------------------------------------------------------------------ the system

#[test]
fn without_control_groups_the_system_alone_counts() {
    let tree = Tree::new().available(HALF);
    tree.fits(FITS, "/proc/meminfo");
    let shortage = tree.room(GIB).unwrap_err();
    let error = tree.budget().out_of_memory("pinned", &shortage);
    assert_eq!((error.kind(), error.operation()), (ErrorKind::OutOfMemory, "pinned"));
    assert_eq!(
        error.message(),
        "the pool would grow by 1073741824 bytes, it holds 4096 bytes, there is no cap; the system has 536870912 of 1073741824 bytes \
         left, 67108864 of them reserved (/proc/meminfo)"
    );
    assert_eq!(error.hint(), "request fewer bytes, drop buffers and trim, or end other processes that use memory");
}

#[test]
fn a_large_limit_keeps_two_percent_free() {
    let tree = Tree::new().available(500 * GIB);
    tree.fits(500 * GIB - 1000 * GIB / 50, "/proc/meminfo");
}

#[test]
fn a_machine_that_states_nothing_limits_nothing() {
    let tree = Tree::new();
    assert_eq!(tree.room(u64::MAX), Ok(Room { most: u64::MAX, release_idle_first: false }));
}

#[test]
fn this_machine_refuses_what_no_machine_has_and_grants_a_page() {
    let budget = Budget::of_process();
    assert!(budget.room(4096, 0, None).is_ok());
    assert!(budget.room(1 << 60, 0, None).is_err());
    assert!(std::ptr::eq(budget, Budget::of_process()), "the paths are found once");
}

// ------------------------------------------------------------------------------------------------ the cap

#[test]
fn the_cap_bounds_what_is_held_and_reads_no_file() {
    let budget = Tree::new().available(HALF).budget();
    assert_eq!(budget.room(100, 900, Some(1000)).unwrap().most, 100);
    assert_eq!(budget.room(60, 900, Some(1000)).unwrap().most, 100);
    for (request, held) in [(101, 900), (1, 1000), (1, 5000), (u64::MAX, 0)] {
        let shortage = budget.room(request, held, Some(1000)).unwrap_err();
        assert_eq!(shortage, Shortage { request, held, cap: Some(1000), left: None });
    }
}

#[test]
fn an_error_of_the_cap_says_what_the_machine_has_left() {
    let tree = Tree::new().available(HALF);
    let budget = tree.budget();
    let error = budget.out_of_memory("pinned", &budget.room(300, 900, Some(1000)).unwrap_err());
    assert_eq!(
        error.message(),
        "the pool would grow by 300 bytes, it holds 900 bytes, the cap is 1000 bytes; the system has 536870912 of 1073741824 bytes left, \
         67108864 of them reserved (/proc/meminfo)"
    );
    assert!(error.hint().ends_with("or raise the cap (`cap` in HIGHWATER_HOST_MEMORY)"), "{error}");
    let nowhere = Tree::new().budget();
    let error = nowhere.out_of_memory("pinned", &nowhere.room(2, 0, Some(1)).unwrap_err());
    assert_eq!(error.message(), "the pool would grow by 2 bytes, it holds 0 bytes, the cap is 1 byte");
}

// ------------------------------------------------------------------------------------------------ version 2

#[test]
fn inactive_files_of_a_group_count_as_free() {
    let tree = Tree::new().available(GIB).process("0::/inner\n", TWO);
    let tree = tree.two("sys/fs/cgroup/inner", "536870912", 400 * MIB, (300 * MIB, 0));
    tree.fits((512 - 400 + 300 - 64) * MIB, "/sys/fs/cgroup/inner/memory.max");
    let error = tree.budget().out_of_memory("pinned", &tree.room(GIB).unwrap_err());
    let told = "the control group has 432013312 of 536870912 bytes left, 67108864 of them reserved \
        (/sys/fs/cgroup/inner/memory.max)";
    assert!(error.message().ends_with(told), "{error}");
    let remedy = "raise the memory limit of the process's control group (/sys/fs/cgroup/inner/memory.max)";
    assert!(error.hint().ends_with(remedy), "{error}");
}

#[test]
fn a_growth_that_needs_active_files_takes_only_the_request() {
    let tree = Tree::new().available(GIB).process("0::/inner\n", TWO);
    let tree = tree.two("sys/fs/cgroup/inner", "536870912", 500 * MIB, (100 * MIB, 200 * MIB));
    // 12 MiB are free, 100 MiB are inactive files, 64 MiB stay free.
    assert_eq!(tree.room(48 * MIB), Ok(Room { most: 48 * MIB, release_idle_first: false }));
    assert_eq!(tree.room(48 * MIB + 1), Ok(Room { most: 48 * MIB + 1, release_idle_first: true }));
    tree.fits(248 * MIB, "/sys/fs/cgroup/inner/memory.max");
}

#[test]
fn a_group_above_its_limit_has_only_what_can_be_reclaimed() {
    let tree = Tree::new().available(GIB).process("0::/\n", TWO);
    // 300 MiB must stay, of 200 MiB.
    let over = tree.two("sys/fs/cgroup", "209715200", 400 * MIB, (60 * MIB, 40 * MIB));
    let left = over.room(1).unwrap_err().left.unwrap();
    assert_eq!((left.bytes, left.active_files), (0, 0));
    let over = over.two("sys/fs/cgroup", "209715200", 400 * MIB, (60 * MIB, 240 * MIB));
    let left = over.room(100 * MIB).unwrap_err().left.unwrap();
    assert_eq!((left.bytes, left.active_files), (0, 100 * MIB));
    over.fits(36 * MIB, "/sys/fs/cgroup/memory.max");
}

#[test]
fn the_files_that_a_stat_claims_are_at_most_the_usage() {
    let tree = Tree::new().available(GIB).process("0::/\n", TWO);
    tree.two("sys/fs/cgroup", "536870912", 512 * MIB, (u64::MAX, u64::MAX))
        .fits(448 * MIB, "/sys/fs/cgroup/memory.max");
}

#[test]
fn the_lower_of_the_hard_and_the_throttling_limit_counts() {
    let tree = Tree::new().available(GIB).process("0::/\n", TWO).two("sys/fs/cgroup", "max", 0, (0, 0));
    tree.fits(GIB - 64 * MIB, "/proc/meminfo");
    let tree = tree.file("sys/fs/cgroup/memory.high", format!("{HALF}\n"));
    tree.fits(FITS, "/sys/fs/cgroup/memory.high");
    let tree = tree.file("sys/fs/cgroup/memory.max", "268435456\n");
    tree.fits(192 * MIB, "/sys/fs/cgroup/memory.max");
}

#[test]
fn limits_of_all_control_groups_around_the_process_count() {
    let tree = Tree::new().available(GIB).process("12:cpu:/other\n0::/outer/middle/inner\n", TWO);
    let tree = tree.two("sys/fs/cgroup/outer/middle/inner", "max", 0, (0, 0));
    let tree = tree.two("sys/fs/cgroup/outer", "629145600", 88 * MIB, (0, 0));
    tree.fits(FITS, "/sys/fs/cgroup/outer/memory.max");
    let tree = tree.two("sys/fs/cgroup/outer/middle/inner", "268435456", 0, (0, 0));
    tree.fits(192 * MIB, "/sys/fs/cgroup/outer/middle/inner/memory.max");
    let tree = tree.available(128 * MIB);
    tree.fits(64 * MIB, "/proc/meminfo");
}

#[test]
fn a_limit_below_the_reserve_leaves_nothing() {
    let tree = Tree::new().available(GIB).process("0::/\n", TWO).two("sys/fs/cgroup", "0", 0, (0, 0));
    assert!(tree.room(1).is_err() && tree.room(0).is_ok());
    let tree = tree.two("sys/fs/cgroup", "67108864", 0, (0, 0));
    assert!(tree.room(1).is_err());
}

#[test]
fn a_limit_that_changes_counts_from_the_next_check() {
    let tree = Tree::new().available(GIB).process("0::/\n", TWO).two("sys/fs/cgroup", "max", 0, (0, 0));
    let budget = tree.budget();
    assert!(budget.room(FITS + 1, 0, None).is_ok());
    let tree = tree.two("sys/fs/cgroup", "536870912", 0, (0, 0));
    assert!(budget.room(FITS + 1, 0, None).is_err());
    drop(tree);
    assert!(budget.room(FITS + 1, 0, None).is_ok(), "the files are gone");
}

// ------------------------------------------------------------------------------------------------ version 1

#[test]
fn version_one_counts_the_files_of_children_too() {
    let tree = Tree::new().available(GIB).process("4:cpuset,memory:/inner\n", ONE);
    let tree = tree.one("sys/fs/cgroup/memory/inner", HALF, 400 * MIB, (300 * MIB, HALF));
    tree.fits((512 - 400 + 300 - 64) * MIB, "/sys/fs/cgroup/memory/inner/memory.limit_in_bytes");
}

#[test]
fn version_one_writes_unlimited_as_a_number() {
    let tree = Tree::new().available(GIB).process("4:memory:/inner\n", ONE);
    for unlimited in [0x7fff_ffff_ffff_f000, 0x7fff_ffff_ffff_0000, u64::MAX] {
        let path = "sys/fs/cgroup/memory/inner";
        Tree::new()
            .available(GIB)
            .process("4:memory:/inner\n", ONE)
            .one(path, unlimited, 5, (0, unlimited))
            .fits(GIB - 64 * MIB, "/proc/meminfo");
    }
    let tree = tree.one("sys/fs/cgroup/memory", 0x7fff_ffff_ffff_f000, 0, (0, 0x7fff_ffff_ffff_f000));
    let tree = tree.one("sys/fs/cgroup/memory/inner", HALF, 0, (0, HALF));
    tree.fits(FITS, "/sys/fs/cgroup/memory/inner/memory.limit_in_bytes");
}

#[test]
fn version_one_states_the_limit_of_ancestors_that_a_namespace_hides() {
    let unlimited = 0x7fff_ffff_ffff_f000;
    let tree =
        Tree::new().available(GIB).process("4:memory:/\n", ONE).one("sys/fs/cgroup/memory", unlimited, 0, (0, HALF));
    tree.fits(FITS, "/sys/fs/cgroup/memory/memory.stat");
    // The root of the hierarchy has no ancestor, and its statistics need not be read.
    tree.file("sys/fs/cgroup/memory/release_agent", "\n").fits(GIB - 64 * MIB, "/proc/meminfo");
}

// ------------------------------------------------------------------------------------------------ mounts and namespaces

#[test]
fn a_container_without_a_namespace_sees_its_group_at_the_mount_point() {
    let two = "41 31 0:38 /docker/x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    let tree = Tree::new().available(GIB).process("0::/docker/x\n", two).two("sys/fs/cgroup", "536870912", 0, (0, 0));
    tree.fits(FITS, "/sys/fs/cgroup/memory.max");
    let one = "35 31 0:32 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    let tree =
        Tree::new().available(GIB).process("4:memory:/docker/x\n", one).one("sys/fs/cgroup/memory", HALF, 0, (0, HALF));
    tree.fits(FITS, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
}

#[test]
fn a_hierarchy_is_found_at_any_mount_point() {
    let tree = Tree::new().available(GIB).process("0::/a\n", "41 31 0:38 / /mnt/my\\040groups rw - cgroup2 none rw\n");
    tree.two("mnt/my groups/a", "536870912", 0, (0, 0)).fits(FITS, "/mnt/my groups/a/memory.max");
}

#[test]
fn of_two_mounts_the_one_with_more_ancestors_counts() {
    let part = "40 31 0:38 /a/b /part rw - cgroup2 cgroup2 rw\n";
    for mounts in [format!("{part}{TWO}"), format!("{TWO}{part}")] {
        let tree =
            Tree::new().available(GIB).process("0::/a/b\n", &mounts).two("sys/fs/cgroup/a", "536870912", 0, (0, 0));
        tree.two("sys/fs/cgroup/a/b", "max", 0, (0, 0)).fits(FITS, "/sys/fs/cgroup/a/memory.max");
        // A mount that something else covers shows nothing.
        let tree = Tree::new().available(GIB).process("0::/a/b\n", &mounts);
        tree.two("part", "536870912", 0, (0, 0)).fits(FITS, "/part/memory.max");
    }
}

#[test]
fn groups_of_other_processes_do_not_count() {
    let other = "41 31 0:38 /other /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    let tree = Tree::new().available(GIB).process("0::/mine\n", other).two("sys/fs/cgroup", "4096", 0, (0, 0));
    tree.fits(GIB - 64 * MIB, "/proc/meminfo");
}

#[test]
fn in_a_hybrid_system_the_version_with_the_controller_counts() {
    let unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    let tree = Tree::new().available(GIB).process("4:memory:/a\n0::/b\n", &format!("{ONE}{unified}"));
    let tree = tree.file("sys/fs/cgroup/unified/b/cgroup.procs", "1\n");
    let tree = tree.one("sys/fs/cgroup/memory/a", HALF, 0, (0, HALF));
    tree.fits(FITS, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes");
    let tree = tree.file("sys/fs/cgroup/unified/b/memory.pressure", "full avg10=20.00 avg60=0 avg300=0 total=0\n");
    assert!(tree.room(1).unwrap().release_idle_first, "the pressure of version 2 needs no controller");
}

// ------------------------------------------------------------------------------------------------ pressure

#[test]
fn under_pressure_the_pool_grows_by_the_request_only() {
    let tree = Tree::new().available(GIB).process("0::/a\n", TWO).two("sys/fs/cgroup/a", "max", 0, (0, 0));
    let ample = Room { most: GIB - 64 * MIB, release_idle_first: false };
    let tight = Room { most: 100, release_idle_first: true };
    assert_eq!(tree.room(100), Ok(ample), "nothing states the pressure");
    let full = |percent: &str| {
        format!("some avg10=99.00 avg60=0 avg300=0 total=0\nfull avg10={percent} avg60=99 avg300=99 total=0\n")
    };
    let tree = tree.file("proc/pressure/memory", full("9.99"));
    assert_eq!(tree.room(100), Ok(ample));
    let tree = tree.file("proc/pressure/memory", full("10.00"));
    assert_eq!(tree.room(100), Ok(tight));
    let tree = tree.file("sys/fs/cgroup/a/memory.pressure", full("0.00"));
    assert_eq!(tree.room(100), Ok(ample), "the group's own pressure replaces the machine's");
    let tree = tree.file("sys/fs/cgroup/a/memory.pressure", full("55.00"));
    assert_eq!(tree.room(100), Ok(tight));
    let tree =
        tree.file("sys/fs/cgroup/a/memory.pressure", "full avg10=lots\n").file("proc/pressure/memory", full("0.00"));
    assert_eq!(tree.room(100), Ok(ample), "a malformed file states nothing");
    assert!(tree.room(GIB).is_err());
}

// ------------------------------------------------------------------------------------------------ malformed files

#[test]
fn malformed_files_count_as_absent() {
    for bad in
        [&b""[..], b"many\n", b"-1\n", b"1 2\n", b"99999999999999999999999\n", b"\xff\xfe\x00", b"MemAvailable:\n"]
    {
        let ample = |tree: &Tree| assert_eq!(tree.room(GIB).unwrap().most, 2 * GIB - 4 * GIB / 50, "{bad:?}");
        let group = || Tree::new().available(2 * GIB).process("0::/\n", TWO).two("sys/fs/cgroup", "1", 0, (0, 0));
        assert!(group().room(GIB).is_err());
        ample(&group().file("sys/fs/cgroup/memory.max", bad));
        ample(&group().file("sys/fs/cgroup/memory.current", bad));
        ample(&group().file("proc/self/cgroup", bad));
        ample(&group().file("proc/self/mountinfo", bad));
        let tree = group().file("sys/fs/cgroup/memory.stat", bad).file("proc/meminfo", bad);
        assert_eq!(tree.room(GIB).unwrap_err().left.unwrap().most(), 1);
        let tree = Tree::new().available(GIB).process("4:memory:/\n", ONE).one("sys/fs/cgroup/memory", 1, 0, (0, 1));
        assert!(tree.room(1).is_err());
        let tree =
            tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", bad).file("sys/fs/cgroup/memory/memory.stat", bad);
        assert!(tree.room(1).is_ok());
    }
}

#[test]
fn a_folder_in_place_of_a_file_counts_as_absent() {
    let tree = Tree::new().process("0::/\n", TWO).file("sys/fs/cgroup/memory.max/x", "").file("proc/meminfo/x", "");
    assert_eq!(tree.room(GIB).unwrap().most, u64::MAX);
}

// ------------------------------------------------------------------------------------------------ laws

/// The figures of a group: limit, usage, inactive and active files, in MiB. The files are part of the usage.
fn figures() -> impl Strategy<Value = [u64; 4]> {
    (of(0..2048_u64), 0..2048_u64, 0..=100_u64, 0..=100_u64).prop_map(|(limit, usage, inactive, active)| {
        let inactive = usage * inactive / 100;
        [limit.unwrap_or(u64::MAX), usage, inactive, (usage - inactive) * active / 100]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_granted_fits_everywhere_and_what_is_refused_does_not(
        (outer, inner) in (figures(), figures()),
        available in 0..2048_u64,
        pressure in 0..20_u64,
        (request, held, cap) in (0..2048_u64, 0..2048_u64, of(0..4096_u64)),
    ) {
        let mut tree = Tree::new().available(available * MIB).process("0::/outer/inner\n", TWO);
        for (path, [limit, usage, inactive, active]) in [("outer", outer), ("outer/inner", inner)] {
            let max = if limit == u64::MAX { "max".to_owned() } else { (limit * MIB).to_string() };
            tree = tree.two(&format!("sys/fs/cgroup/{path}"), &max, usage * MIB, (inactive * MIB, active * MIB));
        }
        let tree = tree.file("proc/pressure/memory", format!("full avg10={pressure}.00 avg60=0 avg300=0 total=0\n"));
        // What must stay, and the limit, in MiB.
        let groups = [outer, inner].map(|[limit, usage, inactive, active]| (usage - inactive - active, limit));
        let limits = || groups.into_iter().chain([(available, 2 * available)]);
        let overflows = |request: u64| {
            let over_limit = limits().any(|(stays, limit)| {
                limit != u64::MAX && (request + stays) * MIB + (64 * MIB).max(limit * MIB / 50) > limit * MIB
            });
            over_limit || cap.is_some_and(|cap| held + request > cap)
        };
        let room = tree.budget().room(request * MIB, held * MIB, cap.map(|cap| cap * MIB));
        // Nothing is requested where nothing fits.
        prop_assert_eq!(room.is_err(), overflows(request) && request > 0, "{:?}", room);
        if let Ok(room) = room {
            prop_assert!(room.most >= request * MIB);
            prop_assert!(!overflows(room.most / MIB) || room.most == 0, "{room:?}");
            prop_assert!(!room.release_idle_first || room.most == request * MIB);
            prop_assert!(room.release_idle_first || pressure < 10);
        }
    }
}

/// Prints the time of a check on this machine: `cargo test -p highwater-core --lib time_of_a_check -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn time_of_a_check() {
    let budget = Budget::of_process();
    let mut rounds = [0; 7].map(|_: u32| {
        let start = std::time::Instant::now();
        for _ in 0..1000 {
            std::hint::black_box(budget.room(4096, 0, None)).unwrap();
        }
        start.elapsed() / 1000
    });
    rounds.sort_unstable();
    println!("a check takes {:?}, the median of {rounds:?}; groups: {:?}", rounds[3], budget.machine.groups);
}
