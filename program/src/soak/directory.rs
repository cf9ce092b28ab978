//! The directory in which half of the workers rendezvous.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Result;
use highwater::ErrorKind;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{Pid, getpid, getuid, test_kill_process};

use super::super::failure::Failure;

/// The start of its name. The process id of the supervisor follows, and then the seed.
const PREFIX: &str = "hw-soak-";
/// The name of a file in it.
const LOCK: &str = "supervisor";

/// A directory with the name of this process. It is removed at the end.
pub(super) struct Directory {
    pub(super) path: PathBuf,
    /// Locked while the supervisor lives. Process ids alone prove nothing, because of PID namespaces.
    _lock: File,
}

impl Directory {
    /// Makes the directory, and removes those of dead supervisors.
    pub(super) fn make(seed: u64) -> Result<Self> {
        let parent = std::env::temp_dir();
        remove_abandoned(&parent);
        let path = parent.join(format!("{PREFIX}{}-{}", getpid(), seed % 1_000_000));
        let make = || {
            fs::DirBuilder::new().mode(0o700).create(&path)?;
            lock(&path, true).inspect_err(|_| {
                let _ = fs::remove_dir_all(&path);
            })
        };
        let lock = make().map_err(|error| {
            let what = format!("the directory {} could not be made", path.display());
            Failure::new(ErrorKind::OperatingSystem, what, "set TMPDIR to a directory that can be written")
                .because_of(error)
        })?;
        Ok(Self { path, _lock: lock })
    }

    /// Returns the number of files of exporters in it.
    pub(super) fn files(&self) -> Result<u64> {
        Ok(fs::read_dir(&self.path)?.count().saturating_sub(1) as u64)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!("{} could not be removed: {error}", self.path.display());
        }
    }
}

/// Opens the file by which a directory is locked, and locks it. Fails if another process has it locked.
///
/// The directory itself cannot serve: exporters lock it.
fn lock(directory: &Path, is_new: bool) -> std::io::Result<File> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(is_new).mode(0o600).custom_flags(flags).open(directory.join(LOCK))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// Returns the process id in the name of a directory.
fn supervisor_of(name: &str) -> Option<Pid> {
    let (pid, seed) = name.strip_prefix(PREFIX)?.split_once('-')?;
    seed.parse::<u64>().ok()?;
    Pid::from_raw(pid.parse().ok().filter(|pid| *pid > 0)?)
}

/// Removes the directories of this user whose supervisors were killed.
fn remove_abandoned(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(supervisor_of) else { continue };
        if test_kill_process(pid) != Err(Errno::SRCH) {
            continue;
        }
        let path = entry.path();
        let is_own = fs::symlink_metadata(&path).is_ok_and(|of| of.is_dir() && of.uid() == getuid().as_raw());
        // A supervisor in another PID namespace holds the lock.
        if is_own
            && let Ok(_lock) = lock(&path, false)
            && let Err(error) = fs::remove_dir_all(&path)
        {
            tracing::warn!("{} could not be removed: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_a_soak_have_a_supervisor() {
        assert_eq!(supervisor_of("hw-soak-12-345").map(Pid::as_raw_pid), Some(12));
        for other in ["hw-soak-12", "hw-soak-0-1", "hw-soak--1-1", "hw-soak-12-x", "hw-soak-12-3-4", "soak-12-3"] {
            assert_eq!(supervisor_of(other), None, "{other}");
        }
    }
}
