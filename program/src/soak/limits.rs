//! What a soak needs of the machine, checked before it starts. A process that reaches a limit in the middle looks like a defect.

use std::path::Path;

use highwater::ErrorKind;
use highwater::hal::counted;
use rustix::fs::{StatVfs, statvfs};
use rustix::process::{Resource, getrlimit};

use super::super::failure::Failure;

/// The least free bytes of a directory.
const BYTES: u64 = 64 << 10;

/// Returns the descriptors that each process may need: its connections to the others, and twice that while it starts a child.
fn descriptors(processes: u64) -> u64 {
    32 + 12 * processes
}

/// Checks the descriptors that a process may have.
pub(super) fn check_descriptors(processes: u64) -> Result<(), Failure> {
    // `None` stands for no limit.
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let needed = descriptors(processes);
    if limit >= needed {
        return Ok(());
    }
    let what = format!(
        "a process may have {}, and a soak of {} needs {needed}",
        counted(limit, "descriptor"),
        counted(processes, "process")
    );
    let hint = format!("raise the limit (`ulimit -n {needed}`), or use fewer `--processes`");
    Err(Failure::new(ErrorKind::OperatingSystem, what, hint))
}

/// Checks that a directory has space for the files of exporters.
pub(super) fn check_space(directory: &Path, processes: u64) -> Result<(), Failure> {
    // An unknown file system refuses the files later.
    statvfs(directory).map_or(Ok(()), |state| check_state(directory, &state, processes))
}

fn check_state(directory: &Path, state: &StatVfs, processes: u64) -> Result<(), Failure> {
    // Killed processes leave their files for a time. Some file systems have no limit of files, and state 0.
    let files = 4 * processes;
    let bytes = state.f_bavail.saturating_mul(state.f_frsize);
    let missing = if state.f_files > 0 && state.f_favail < files {
        format!("{} more files, and {files} are needed", state.f_favail)
    } else if bytes < BYTES {
        format!("{bytes} more bytes, and {BYTES} are needed")
    } else {
        return Ok(());
    };
    let what = format!("the directory {} has space for {missing}", directory.display());
    let hint = "free space in the directory, or set TMPDIR to another one";
    Err(Failure::new(ErrorKind::OperatingSystem, what, hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_directory_is_refused_and_the_error_names_what_is_missing() {
        let check = |files, free_files, blocks| {
            let mut state = statvfs("/").unwrap();
            (state.f_files, state.f_favail, state.f_bavail, state.f_frsize) = (files, free_files, blocks, 4096);
            check_state(Path::new("/place"), &state, 8).map_err(|error| error.to_string())
        };
        assert_eq!(check(1000, 32, 16), Ok(()));
        assert_eq!(check(0, 0, 16), Ok(()), "no limit of files");
        let files = "the directory /place has space for 31 more files, and 32 are needed";
        assert_eq!(check(1000, 31, 16).unwrap_err(), files);
        let bytes = "the directory /place has space for 61440 more bytes, and 65536 are needed";
        assert_eq!(check(1000, 32, 15).unwrap_err(), bytes);
    }
}
