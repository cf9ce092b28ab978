//! The control groups whose memory limits bind the process: its own group and all ancestors that it can see.
//!
//! `/proc/self/cgroup` has the process's path in each hierarchy. `/proc/self/mountinfo` has the mount points, and the part of
//! the hierarchy that each shows. Both may be relative to a namespace. An ancestor that no mount shows cannot be read.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// A version of the interface of control groups. In a hybrid system the memory controller belongs to one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    One,
    Two,
}

impl Version {
    /// Returns the file that states the bytes in use. A group without the memory controller lacks it.
    pub(super) const fn usage(self) -> &'static str {
        match self {
            Self::One => "memory.usage_in_bytes",
            Self::Two => "memory.current",
        }
    }
}

/// A control group that the process is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) version: Version,
    pub(super) directory: PathBuf,
    pub(super) counts_memory: bool,
    /// The group has ancestors that no mount shows. Only version 1 states their lowest limit.
    pub(super) hides_ancestors: bool,
}

/// The mount of a hierarchy.
#[derive(Debug)]
struct Mount {
    version: Version,
    /// The group that the mount point shows.
    shown: PathBuf,
    point: PathBuf,
}

/// Returns the groups of the process, innermost first, in the file system below `root`.
pub(super) fn find(root: &Path) -> Vec<Group> {
    let text = |path: &str| fs::read(root.join(path)).unwrap_or_default();
    let mounts = mounts(&String::from_utf8_lossy(&text("proc/self/mountinfo")));
    let paths = String::from_utf8_lossy(&text("proc/self/cgroup")).lines().filter_map(path_of).collect::<Vec<_>>();
    paths.iter().flat_map(|(version, path)| of_hierarchy(root, *version, path, &mounts)).collect()
}

/// Returns the process's path from a line of `/proc/self/cgroup`, if the hierarchy may have the memory controller.
fn path_of(line: &str) -> Option<(Version, PathBuf)> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let version = match controllers {
        "" if id == "0" => Version::Two,
        _ if controllers.split(',').any(|controller| controller == "memory") => Version::One,
        _ => return None,
    };
    Some((version, path.into()))
}

fn mounts(mountinfo: &str) -> Vec<Mount> {
    mountinfo.lines().filter_map(mount).collect()
}

/// Returns the mount of a line of `/proc/self/mountinfo`, if it shows a hierarchy that may have the memory controller.
fn mount(line: &str) -> Option<Mount> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let version = match kind.next()? {
        "cgroup2" => Version::Two,
        "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => Version::One,
        _ => return None,
    };
    let mut paths = mount.split(' ').skip(3).map(unescape);
    Some(Mount { version, shown: paths.next()?, point: paths.next()? })
}

/// Replaces the octal escapes with which the kernel writes spaces, tabs, line ends and backslashes of a path.
fn unescape(field: &str) -> PathBuf {
    let mut rest = field.as_bytes();
    let mut path = Vec::with_capacity(rest.len());
    while let Some((&first, after)) = rest.split_first() {
        let digits =
            after.get(..3).filter(|digits| first == b'\\' && digits.iter().all(|digit| (b'0'..=b'7').contains(digit)));
        let escaped =
            digits.map(|digits| digits.iter().fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0')));
        match escaped.and_then(|value| u8::try_from(value).ok()) {
            Some(byte) => (path.push(byte), rest = &after[3..]),
            None => (path.push(first), rest = after),
        };
    }
    OsString::from_vec(path).into()
}

fn of_hierarchy(root: &Path, version: Version, path: &Path, mounts: &[Mount]) -> Vec<Group> {
    let candidates = mounts.iter().filter(|mount| mount.version == version).filter_map(|mount| {
        let top = root.join(mount.point.strip_prefix("/").ok()?);
        let below = within(path, &mount.shown)?.components();
        Some((below.fold(top.clone(), |path, part| path.join(part)), top, mount.shown.components().count()))
    });
    // The mount with the most ancestors. A path that another mount covers does not exist.
    let Some((own, top, _)) = candidates.min_by_key(|(own, _, depth)| (!own.is_dir(), *depth)) else {
        return Vec::new();
    };
    let group = |directory: &Path| Group {
        version,
        directory: directory.into(),
        counts_memory: directory.join(version.usage()).exists(),
        // Only the root of a hierarchy has a release agent.
        hides_ancestors: directory == top && !directory.join("release_agent").exists(),
    };
    own.ancestors().take_while(|directory| directory.starts_with(&top)).map(group).collect()
}

/// Returns the path of a process's group below a mount point that shows the group `shown`. Returns `None` if the process is not
/// in that part of the hierarchy.
fn within<'a>(path: &'a Path, shown: &Path) -> Option<&'a Path> {
    let up = |path: &Path| path.components().filter(|part| *part == Component::ParentDir).count();
    match path.strip_prefix(shown) {
        Ok(below) if up(below) == 0 => Some(below),
        // The mount shows an ancestor of the namespace's root. The names between the two are not known.
        _ if shown.components().skip(1).all(|part| part == Component::ParentDir) && up(path) <= up(shown) => {
            Some("".as_ref())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_with_the_memory_controller_are_found() {
        let path = |line| path_of(line).map(|(version, path)| (version, path.to_str().unwrap().to_owned()));
        assert_eq!(path("0::/outer/inner"), Some((Version::Two, "/outer/inner".to_owned())));
        assert_eq!(path("4:cpuset,memory:/a:b"), Some((Version::One, "/a:b".to_owned())));
        for other in ["", "0", "0:", "0::".trim_end_matches(':'), "3:cpu:/x", "9:name=memory:/x", "1:memory_like:/x"] {
            assert_eq!(path(other), None, "{other:?}");
        }
    }

    #[test]
    fn mounts_of_both_versions_are_found() {
        let lines = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            35 31 0:32 /docker/x /sys/fs/cgroup/memory rw,relatime shared:5 master:2 - cgroup cgroup rw,memory\n\
            36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
            41 31 0:38 / /mnt/two\\040words rw - cgroup2 cgroup2 rw,nsdelegate\n\
            41 31 - cgroup2\n 5 - cgroup\n - \n";
        let found = mounts(lines);
        let found: Vec<_> =
            found.iter().map(|m| (m.version, m.shown.to_str().unwrap(), m.point.to_str().unwrap())).collect();
        assert_eq!(
            found,
            [(Version::One, "/docker/x", "/sys/fs/cgroup/memory"), (Version::Two, "/", "/mnt/two words")]
        );
    }

    #[test]
    fn escapes_of_the_kernel_are_replaced_and_nothing_else() {
        for (field, path) in
            [("a\\040b", "a b"), ("\\134", "\\"), ("\\04", "\\04"), ("\\999", "\\999"), ("\\", "\\"), ("", "")]
        {
            assert_eq!(unescape(field), Path::new(path));
        }
    }

    #[test]
    fn a_path_is_relative_to_the_group_that_the_mount_shows() {
        let within = |path: &str, shown: &str| {
            within(path.as_ref(), shown.as_ref()).map(|path| path.to_str().unwrap().to_owned())
        };
        let some = |path: &str| Some(path.to_owned());
        assert_eq!(within("/", "/"), some(""));
        assert_eq!(within("/a/b", "/"), some("a/b"));
        assert_eq!(within("/docker/x", "/docker/x"), some(""), "a container without a namespace of its own");
        assert_eq!(within("/docker/x/y", "/docker/x"), some("y"));
        assert_eq!(within("/docker/xy", "/docker/x"), None, "a sibling whose name begins alike");
        assert_eq!(within("/a", "/b"), None);
        assert_eq!(within("/../x", "/.."), some("x"), "the process is outside of the namespace's root");
        assert_eq!(within("/", "/.."), some(""), "the mount was made outside of the namespace");
        assert_eq!(within("/a", "/../.."), some(""));
        assert_eq!(within("/../../x", "/.."), None);
        assert_eq!(within("/../x", "/"), None);
    }
}
