//! Checks whether another user could change a file that is about to be loaded.
//!
//! A plugin is code. So the file and each folder on the way to it must belong to the caller or the superuser, and no other user
//! may write to them. Group rights count as others' rights: the members of a group cannot be known for certain, and the group
//! bits are also the mask of an access list.
//!
//! *Sticky folders*, such as `/tmp`: every user may add to them, but only the owner of a file renames or removes it. So a sticky
//! folder is safe on the way to a file of the caller. It is not a place to search, because any user can add a plugin there.
//!
//! Links are resolved first, and the resolved path is checked and then loaded. Another user cannot swap a file that has passed,
//! so the check still holds at the use.

use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use highwater_hal::display_foreign;

use super::super::environment::{ALLOW_INSECURE, Environment};

/// Write access of the group and of others.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Only owners rename and remove.
const STICKY: u32 = 0o1000;

/// The users that are trusted.
#[derive(Debug, Clone)]
pub(super) struct Trust {
    /// The effective user of this process. The superuser is trusted, too.
    pub(super) user: u32,
    /// Whether complaints are only notes.
    pub(super) insecure: bool,
    /// The value of the variable, if it has no meaning.
    strange: Option<String>,
}

/// A fault of a file or folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Complaint {
    pub(super) path: PathBuf,
    pub(super) what: String,
    pub(super) hint: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", display_foreign(&self.path), self.what)
    }
}

/// The purpose of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// It is read, or searched for plugins.
    Itself,
    /// It is a folder on the way.
    OnTheWay,
}

impl Trust {
    pub(super) fn new(allow_insecure: bool, environment: &Environment) -> Self {
        let variable = environment.get(ALLOW_INSECURE);
        let known = variable.is_none_or(|value| value == "1" || value == "0");
        Self {
            user: environment.user,
            insecure: allow_insecure || variable.is_some_and(|value| value == "1"),
            strange: variable.filter(|_| !known).map(|value| display_foreign(value).to_string()),
        }
    }

    /// Checks a file or folder and every folder on the way to it.
    ///
    /// `path` is absolute, without links.
    pub(super) fn check(&self, path: &Path) -> Result<(), Complaint> {
        let mut role = Role::Itself;
        for part in path.ancestors() {
            let complain = |what: String, hint: String| Complaint { path: part.to_owned(), what, hint };
            // Does not follow links: a link here means that the path has just changed.
            let metadata = fs::symlink_metadata(part).map_err(|error| {
                complain(format!("cannot be inspected: {}", text_of(&error)), "check its permissions".into())
            })?;
            self.check_one(&metadata, role).map_err(|(what, hint)| complain(what, self.hint(&hint, part)))?;
            role = Role::OnTheWay;
        }
        Ok(())
    }

    /// Returns the fault, and the beginning of the command that repairs it.
    fn check_one(&self, metadata: &Metadata, role: Role) -> Result<(), (String, String)> {
        if metadata.is_symlink() {
            return Err(("became a link during the check".into(), "ls -l".into()));
        }
        let owner = metadata.uid();
        if owner != 0 && owner != self.user {
            let what = format!(
                "belongs to user {owner}, not to the superuser or to user {}, the user of this process",
                self.user
            );
            return Err((what, format!("chown {}", self.user)));
        }
        let mode = metadata.mode();
        let sticky = role == Role::OnTheWay && metadata.is_dir() && mode & STICKY != 0;
        if mode & WRITABLE_BY_OTHERS != 0 && !sticky {
            let who = if mode & 0o002 != 0 { "every user" } else { "its group" };
            let what = format!("can be written to by {who} (mode {:04o})", mode & 0o7777);
            return Err((what, "chmod go-w".into()));
        }
        Ok(())
    }

    fn hint(&self, command: &str, path: &Path) -> String {
        let strange =
            self.strange.as_ref().map_or_else(String::new, |value| format!(" (it is `{value}`, which allows nothing)"));
        format!(
            "`{command} {}`, or, where every user of this machine is trusted, {ALLOW_INSECURE}=1{strange} or \
             `highwater --allow-insecure-plugins`",
            display_foreign(path)
        )
    }
}

/// Returns the text of an error of the system, without its number.
pub(super) fn text_of(error: &io::Error) -> String {
    let text = error.to_string();
    text.find(" (os error").map_or(text.clone(), |end| text[..end].to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::testing::Folder;
    use super::*;

    pub(crate) fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// The user of the tests, who owns the files that they write.
    fn trust() -> Trust {
        Trust::new(false, &Environment::of_process())
    }

    #[test]
    fn what_others_can_write_to_is_refused_wherever_it_is_on_the_way() {
        let folder = Folder::new();
        let file = folder.file("inner/plugin.so", "");
        assert_eq!(trust().check(&file), Ok(()));
        let inner = file.parent().unwrap();
        for (path, mode, who) in [
            (&*file, 0o664, "its group"),
            (&*file, 0o646, "every user"),
            (inner, 0o775, "its group"),
            (inner, 0o757, "every user"),
        ] {
            let before = fs::metadata(path).unwrap().permissions();
            chmod(path, mode);
            let complaint = trust().check(&file).unwrap_err();
            assert_eq!(complaint.path, path, "{mode:o}");
            let expected = format!("can be written to by {who} (mode {mode:04o})");
            assert_eq!(complaint.what, expected);
            assert!(complaint.hint.starts_with(&format!("`chmod go-w {}`", path.display())), "{}", complaint.hint);
            fs::set_permissions(path, before).unwrap();
        }
        assert_eq!(trust().check(&file), Ok(()));
    }

    #[test]
    fn a_sticky_folder_is_good_on_the_way_and_not_to_be_searched() {
        let folder = Folder::new();
        let file = folder.file("sticky/plugin.so", "");
        let sticky = file.parent().unwrap();
        chmod(sticky, 0o1777);
        assert_eq!(trust().check(&file), Ok(()));
        assert!(trust().check(sticky).unwrap_err().what.contains("every user (mode 1777)"));
    }

    #[test]
    fn what_belongs_to_another_user_is_refused() {
        let folder = Folder::new();
        let file = folder.file("plugin.so", "");
        let owner = fs::metadata(&file).unwrap().uid();
        let stranger = Trust { user: owner + 1, insecure: false, strange: None };
        let checked = stranger.check(&file);
        if owner == 0 {
            // Every user may load the superuser's files.
            assert_eq!(checked, Ok(()));
            if std::os::unix::fs::chown(&file, Some(12345), None).is_ok() {
                let complaint = trust().check(&file).unwrap_err();
                assert!(complaint.what.contains("belongs to user 12345"), "{complaint}");
            }
        } else {
            assert!(checked.unwrap_err().what.contains(&format!("belongs to user {owner}")));
        }
    }

    #[test]
    fn a_link_that_was_not_resolved_is_noticed() {
        let folder = Folder::new();
        folder.file("real/plugin.so", "");
        std::os::unix::fs::symlink("real", folder.path().join("link")).unwrap();
        let complaint = trust().check(&folder.path().join("link/plugin.so")).unwrap_err();
        assert_eq!(complaint.path, folder.path().join("link"));
    }

    #[test]
    fn the_variable_allows_by_one_and_by_nothing_else() {
        let with = |value: &str| Trust::new(false, &Environment::default().with(ALLOW_INSECURE, value));
        assert!(with("1").insecure && !with("0").insecure && !with("").insecure && !with("yes").insecure);
        assert!(with("yes").hint("chmod", Path::new("/p")).contains("it is `yes`, which allows nothing"));
        assert!(Trust::new(true, &Environment::default()).insecure);
    }
}
