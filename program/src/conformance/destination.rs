//! A file to write after a long run: checked before the run, and touched only after it.
//!
//! A complete new file replaces a regular file, or the old file stays. The new file has no name while it is written, so that an
//! interrupted run leaves nothing. Only a file that replaces another has a second name, between two calls: no call of Linux
//! links over an existing file. Any other writable target, such as a pipe or `/dev/stdout`, is written into and stays.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use highwater::hal::display_foreign;
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// The most links to follow, as in the kernel.
const MOST_LINKS: usize = 40;

/// The type of the file system `/proc`. No certificate is written to its files.
const PROC: u64 = 0x9fa0;

#[derive(Debug)]
pub(super) enum Destination {
    /// To replace or make: the path without links, and the permissions of the existing file.
    Replace { path: PathBuf, permissions: Option<Permissions> },
    /// To write into.
    Write(File),
}

impl Destination {
    /// Checks that a path can be written to.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        // A slash or a dot at the end names a folder, and `file_name` leaves it out.
        if [&b"/"[..], b"/."].iter().any(|end| path.as_os_str().as_bytes().ends_with(end)) {
            return Err(refused("its name ends as that of a folder"));
        }
        let Some(path) = resolved(path)? else { return write_into(path) };
        match fs::metadata(&path) {
            Ok(found) if found.is_file() => {
                rustix::fs::access(&path, Access::WRITE_OK)?;
                Self::replace(path, Some(found.permissions()))
            }
            Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if found.file_type().is_block_device() => Err(refused("it is a block device")),
            Ok(found) if found.file_type().is_socket() => Err(refused("it is a socket")),
            Ok(_) => write_into(&path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::replace(path, None),
            Err(error) => Err(error),
        }
    }

    fn replace(path: PathBuf, permissions: Option<Permissions>) -> io::Result<Self> {
        rustix::fs::access(folder_of(&path), Access::WRITE_OK | Access::EXEC_OK)?;
        Ok(Self::Replace { path, permissions })
    }

    /// Writes the content.
    pub(super) fn write(self, text: &str) -> io::Result<()> {
        match self {
            Self::Write(mut file) => file.write_all(text.as_bytes()),
            Self::Replace { path, permissions } => replace(&path, permissions, text),
        }
    }
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write_into(path: &Path) -> io::Result<Destination> {
    let there = fs::metadata(path)?;
    // A stream of this process is not opened again: a second position in one file would overwrite what the first has written.
    for ours in [io::stdout().as_fd().try_clone_to_owned()?, io::stderr().as_fd().try_clone_to_owned()?] {
        let ours = File::from(ours);
        let of_ours = ours.metadata()?;
        if (of_ours.dev(), of_ours.ino()) == (there.dev(), there.ino()) {
            return Ok(Destination::Write(ours));
        }
    }
    let kind = there.file_type();
    if kind.is_block_device() {
        return Err(refused("it is a block device"));
    }
    if kind.is_char_device() && !takes_text(there.rdev()) {
        return Err(refused("it is a device other than a terminal"));
    }
    if kind.is_file() && rustix::fs::statfs(path)?.f_type as u64 == PROC {
        return Err(refused("it is a file of the kernel"));
    }
    // A pipe without a reader would block the open.
    let open = OpenOptions::new().append(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path);
    let file = open.map_err(|error| match error.raw_os_error() {
        Some(code) if code == Errno::NXIO.raw_os_error() && kind.is_fifo() => {
            refused("no process reads from this pipe")
        }
        _ => error,
    })?;
    rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(Destination::Write(file))
}

/// Returns whether a character device is a terminal, or one of `/dev/null`, `/dev/zero` and `/dev/full`.
fn takes_text(device: u64) -> bool {
    match (rustix::fs::major(device), rustix::fs::minor(device)) {
        (1, minor) => matches!(minor, 3 | 5 | 7),
        // Consoles and serial lines, the terminal of this process, pseudo-terminals, and serial adapters.
        (major, _) => matches!(major, 4 | 5 | 136..=143 | 166 | 188),
    }
}

/// The target of a path's links, whether or not it exists. `None` for a link of `/proc`, which stands for an open file.
fn resolved(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let folder = fs::canonicalize(folder_of(&path))?;
        let found = folder.join(name);
        // No file can be made here.
        if folder.starts_with("/proc") {
            return Ok(None);
        }
        if !fs::symlink_metadata(&found).is_ok_and(|found| found.is_symlink()) {
            return Ok(Some(found));
        }
        path = folder.join(fs::read_link(&found)?);
    }
    Err(Errno::LOOP.into())
}

fn replace(path: &Path, permissions: Option<Permissions>, text: &str) -> io::Result<()> {
    let fill = |mut file: &File| {
        file.write_all(text.as_bytes())?;
        if let Some(permissions) = permissions.clone() {
            file.set_permissions(Permissions::from_mode(permissions.mode() & 0o777))?;
        }
        file.sync_all()
    };
    let folder = folder_of(path);
    let mut draft = path.file_name().unwrap_or_default().to_owned();
    // The process id alone could be that of a process in another container.
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    draft.push(format!(".{}.{}.draft", std::process::id(), since.as_nanos()));
    let draft = Draft(folder.join(draft));
    let nameless = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    match rustix::fs::open(folder, nameless, Mode::from_raw_mode(0o666)) {
        Ok(file) => {
            let file = File::from(file);
            fill(&file)?;
            let name = format!("/proc/self/fd/{}", file.as_raw_fd());
            let link = |to: &Path| rustix::fs::linkat(CWD, &name, CWD, to, AtFlags::SYMLINK_FOLLOW);
            match link(path) {
                // A temporary name, because no call links over an existing file.
                Err(Errno::EXIST) => link(&draft.0)?,
                linked => return Ok(linked?),
            }
        }
        // The file system has no nameless files.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => fill(&File::create_new(&draft.0)?)?,
        Err(error) => return Err(error.into()),
    }
    put_in_place(draft, path)
}

/// Gives the file of the draft the name of the old file.
///
/// The run was long. Something else may have taken the name, or may take it between a check and a rename. So the function exchanges the
/// two names in one step. It checks the displaced file under the name of the draft, where nothing else changes it.
fn put_in_place(draft: Draft, path: &Path) -> io::Result<()> {
    let is_other = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| !found.is_file());
    // The file may vanish, and another may come, before each step.
    for _ in 0..MOST_LINKS {
        match rename(&draft.0, path, RenameFlags::EXCHANGE) {
            Ok(()) if is_other(&draft.0) => return Err(give_back(draft, path)),
            Ok(()) => return Ok(()),
            Err(Errno::NOENT) => match rename(&draft.0, path, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(()),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            },
            // The file system cannot exchange names.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                return if is_other(path) { Err(refused(NO_REGULAR_FILE)) } else { fs::rename(&draft.0, path) };
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Moves the file that an exchange has displaced back to its name. Returns the refusal. If the move fails, the file keeps the name of
/// the draft, and the refusal names it.
fn give_back(draft: Draft, path: &Path) -> io::Error {
    let returned =
        rename(&draft.0, path, RenameFlags::EXCHANGE).or_else(|_| rename(&draft.0, path, RenameFlags::NOREPLACE));
    let Err(error) = returned else { return refused(NO_REGULAR_FILE) };
    let kept = draft.keep();
    refused(&format!("the object that took the place of the file is now `{}`: {error}", display_foreign(&kept)))
}

fn rename(from: &Path, to: &Path, flags: RenameFlags) -> rustix::io::Result<()> {
    rustix::fs::renameat_with(CWD, from, CWD, to, flags)
}

const NO_REGULAR_FILE: &str = "the path now holds no regular file";

/// The temporary name of a file that is about to be renamed. After an exchange of names, it is that of the old file.
struct Draft(PathBuf);

impl Draft {
    /// Returns the name, without removing the file.
    fn keep(self) -> PathBuf {
        std::mem::take(&mut std::mem::ManuallyDrop::new(self).0)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // The name is gone after a rename, and never existed if none was needed.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A folder of one test, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("highwater-destination-{test}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(fs::canonicalize(path).unwrap())
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_is_made_or_replaced_as_a_whole_and_nothing_else_is_left() {
        let folder = Folder::new("replaced");
        let path = folder.0.join("a.json");
        let made = Destination::of(&path).unwrap();
        assert!(folder.names().is_empty(), "nothing is touched before");
        made.write("one").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let (old, other) = (fs::metadata(&path).unwrap().ino(), folder.0.join("other"));
        fs::hard_link(&path, &other).unwrap();
        Destination::of(&path).unwrap().write("two").unwrap();
        let new = fs::metadata(&path).unwrap();
        assert!(new.ino() != old && new.mode() & 0o777 == 0o640, "{new:?}");
        // A reader that has the old file open reads it to its end.
        assert_eq!(
            (fs::read_to_string(&path).unwrap(), fs::read_to_string(&other).unwrap()),
            ("two".into(), "one".into())
        );
        assert_eq!(folder.names(), ["a.json", "other"]);
    }

    #[test]
    fn a_link_stays_and_what_it_leads_to_is_replaced_or_made() {
        let folder = Folder::new("links");
        fs::create_dir(folder.0.join("there")).unwrap();
        symlink("there/a.json", folder.0.join("second")).unwrap();
        symlink("second", folder.0.join("first")).unwrap();
        for text in ["one", "two"] {
            Destination::of(&folder.0.join("first")).unwrap().write(text).unwrap();
            assert_eq!(fs::read_to_string(folder.0.join("there/a.json")).unwrap(), text);
        }
        assert!(fs::symlink_metadata(folder.0.join("first")).unwrap().is_symlink());
        assert_eq!(folder.names(), ["first", "second", "there"]);
        symlink("circle", folder.0.join("circle")).unwrap();
        assert!(Destination::of(&folder.0.join("circle")).is_err());
    }

    #[test]
    fn what_is_no_regular_file_is_written_into_and_stays_what_it_is() {
        let folder = Folder::new("special");
        let full = Destination::of(Path::new("/dev/full")).unwrap().write("text").unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert!(fs::metadata("/dev/full").unwrap().file_type().is_char_device());
        Destination::of(Path::new("/dev/null")).unwrap().write("text").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        // A link of /proc, such as /dev/stdout, leads to the same open file.
        let path = folder.0.join("open");
        fs::write(&path, "before ").unwrap();
        let open = OpenOptions::new().append(true).open(&path).unwrap();
        let link = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        Destination::of(&link).unwrap().write("text").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), open.metadata().unwrap().ino());
        assert_eq!(fs::read_to_string(&path).unwrap(), "before text");
        let fifo = folder.0.join("fifo");
        rustix::fs::mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
        let mut reader = File::from(rustix::fs::open(&fifo, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).unwrap());
        Destination::of(&fifo).unwrap().write("text").unwrap();
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "text");
        assert!(fs::metadata(&fifo).unwrap().file_type().is_fifo());
        assert_eq!(folder.names(), ["fifo", "open"]);
    }

    #[test]
    fn what_takes_the_place_during_the_run_stays() {
        let folder = Folder::new("meanwhile");
        let path = folder.0.join("a.json");
        for was_there in [false, true] {
            if was_there {
                fs::write(&path, "old").unwrap();
            }
            let destination = Destination::of(&path).unwrap();
            let _ = fs::remove_file(&path);
            rustix::fs::mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
            let error = destination.write("text").unwrap_err();
            assert!(error.to_string().contains("no regular file"), "{error}");
            assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
            assert_eq!(folder.names(), ["a.json"]);
            fs::remove_file(&path).unwrap();
        }
        // A file that another run has made is replaced.
        let destination = Destination::of(&path).unwrap();
        fs::write(&path, "of another run").unwrap();
        destination.write("text").unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap(), folder.names()), ("text".into(), vec!["a.json".to_owned()]));
    }

    /// Failed before: what came between the look and the rename was replaced.
    #[test]
    fn what_takes_the_place_at_the_last_moment_stays() {
        let folder = Folder::new("last-moment");
        let (path, draft) = (folder.0.join("a.json"), folder.0.join("draft"));
        let made = || {
            fs::write(&draft, "new").unwrap();
            Draft(draft.clone())
        };
        // As if it had come right before the exchange.
        rustix::fs::mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let error = put_in_place(made(), &path).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error}");
        assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
        assert_eq!(folder.names(), ["a.json"]);
        fs::remove_file(&path).unwrap();
        // The old file vanished, and then a file came.
        for _ in 0..2 {
            put_in_place(made(), &path).unwrap();
            assert_eq!((fs::read_to_string(&path).unwrap(), folder.names()), ("new".into(), vec!["a.json".to_owned()]));
        }
    }

    #[test]
    fn a_file_that_cannot_get_its_name_back_is_kept_and_named() {
        let folder = Folder::new("displaced");
        let (path, draft) = (folder.0.join("a.json"), folder.0.join("draft"));
        // The state after the exchange. First the path vanishes meanwhile, and then its folder.
        rustix::fs::mkfifoat(CWD, &draft, Mode::RUSR | Mode::WUSR).unwrap();
        let error = give_back(Draft(draft.clone()), &path);
        assert!(error.to_string().contains("no regular file"), "{error}");
        assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
        assert_eq!(folder.names(), ["a.json"]);
        let error = give_back(Draft(path.clone()), &folder.0.join("gone/a.json"));
        assert!(error.to_string().contains(&format!("is now `{}`", path.display())), "{error}");
        assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
        assert_eq!(folder.names(), ["a.json"]);
    }

    #[test]
    fn runs_that_end_together_leave_one_whole_file() {
        let folder = Folder::new("together");
        let path = folder.0.join("a.json");
        for _ in 0..20 {
            let texts = ["one".repeat(10_000), "two".repeat(20_000), "three".repeat(30_000)];
            std::thread::scope(|scope| {
                for text in &texts {
                    let destination = Destination::of(&path).unwrap();
                    scope.spawn(move || destination.write(text).unwrap());
                }
            });
            assert!(texts.contains(&fs::read_to_string(&path).unwrap()));
            assert_eq!(folder.names(), ["a.json"]);
        }
    }

    #[test]
    fn a_socket_a_folder_and_links_without_a_file_are_refused_or_followed() {
        let folder = Folder::new("kinds");
        let _socket = UnixListener::bind(folder.0.join("socket")).unwrap();
        fs::create_dir(folder.0.join("folder")).unwrap();
        symlink("folder", folder.0.join("to-folder")).unwrap();
        symlink("/dev/null", folder.0.join("to-device")).unwrap();
        symlink("made", folder.0.join("dangling")).unwrap();
        let names = folder.names();
        fs::write(folder.0.join("file"), "old").unwrap();
        let names = [names, vec!["file".to_owned()]].concat();
        let refusals = [
            ("socket", "it is a socket"),
            ("folder", "directory"),
            ("to-folder", "directory"),
            ("folder/", "as that of a folder"),
            ("file/", "as that of a folder"),
            ("file/.", "as that of a folder"),
            ("new/", "as that of a folder"),
        ];
        for (name, why) in refusals {
            let error = Destination::of(&folder.0.join(name)).unwrap_err();
            assert!(error.to_string().contains(why), "{name}: {error}");
        }
        Destination::of(&folder.0.join("to-device")).unwrap().write("text").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        let mut names = names;
        names.sort();
        assert_eq!(folder.names(), names);
        Destination::of(&folder.0.join("dangling")).unwrap().write("text").unwrap();
        assert_eq!(fs::read_to_string(folder.0.join("made")).unwrap(), "text");
        assert!(fs::symlink_metadata(folder.0.join("dangling")).unwrap().is_symlink());
    }

    /// Failed before: the open of the pipe waited for a reader, and the memory of the process was written to.
    #[test]
    fn a_pipe_without_a_reader_and_the_files_of_the_kernel_are_refused_before() {
        let folder = Folder::new("kernel");
        let fifo = folder.0.join("fifo");
        rustix::fs::mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
        for (path, why) in [
            (&*fifo, "no process reads from this pipe"),
            (Path::new("/proc/self/mem"), "it is a file of the kernel"),
            (Path::new("/proc/self/comm"), "it is a file of the kernel"),
            (Path::new("/dev/random"), "it is a device other than a terminal"),
        ] {
            let error = Destination::of(path).unwrap_err();
            assert!(error.to_string().contains(why), "{path:?}: {error}");
        }
        // A pipe with a reader receives the whole text, and the write waits for a slow reader.
        let (mut reader, writer) = io::pipe().unwrap();
        let text = "x".repeat(1 << 20);
        let path = PathBuf::from(format!("/proc/self/fd/{}", writer.as_raw_fd()));
        let destination = Destination::of(&path).unwrap();
        drop(writer);
        std::thread::scope(|scope| {
            scope.spawn(|| destination.write(&text).unwrap());
            assert_eq!(io::read_to_string(&mut reader).unwrap(), text);
        });
    }

    #[test]
    fn what_cannot_be_written_to_is_refused_before() {
        for path in ["/", "/nowhere/at/all.json", "/dev", "", "/proc/self/fd/12345"] {
            assert!(Destination::of(Path::new(path)).is_err(), "{path}");
        }
    }
}
