//! Folders for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder of one test, removed at the end. Only its user can write to it.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("highwater-finding-{}-{number}", std::process::id());
        let path = fs::canonicalize(std::env::temp_dir()).unwrap().join(name);
        fs::create_dir(&path).unwrap();
        super::permission::tests::chmod(&path, 0o755);
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file, with the folders that it needs.
    pub(super) fn file(&self, name: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        for folder in path.ancestors().skip(1).take_while(|folder| *folder != self.0) {
            fs::create_dir_all(folder).unwrap();
            super::permission::tests::chmod(folder, 0o755);
        }
        fs::write(&path, contents).unwrap();
        super::permission::tests::chmod(&path, 0o644);
        path
    }

    /// Creates a folder.
    pub(super) fn folder(&self, name: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir(&path).unwrap();
        super::permission::tests::chmod(&path, 0o755);
        path
    }

    /// Writes a valid manifest of a plugin whose library is the file `lib.so` beside it.
    pub(super) fn manifest(&self, name: &str) -> PathBuf {
        let stem = Path::new(name).file_stem().unwrap().to_str().unwrap();
        self.file(name, manifest_of(stem, "lib.so"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the text of a valid manifest.
pub(super) fn manifest_of(name: &str, library: &str) -> String {
    let platform = super::manifest::platform();
    format!(
        "name = \"{name}\"\nversion = \"1.2.0\"\nvendor = \"Acme\"\nlicence = \"MIT\"\n\
         table_versions = {{ min = 1, max = 1 }}\n\n[library]\n{platform} = \"{library}\"\n"
    )
}
