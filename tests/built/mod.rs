//! Libraries that tests build for themselves: `cargo test` makes none.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The plugin of a backend, `cuda`, `rocm` or `mock`, built as it is in development.
pub(crate) fn plugin(backend: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is a folder of the target's");
    let package = format!("highwater-{backend}-plugin");
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--locked", "-p", &package, "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo starts");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    target.join(format!("debug/libhighwater_{backend}.so"))
}
