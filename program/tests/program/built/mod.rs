//! Libraries that tests build for themselves: `cargo test` makes none.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The plugin of a backend, `cuda`, `rocm` or `mock`, in a development build. On a machine without cargo it is the
/// copied file.
pub(crate) fn plugin(backend: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is a folder of the target's");
    let package = format!("highwater-{backend}-plugin");
    let file = target.join(format!("debug/libhighwater_{backend}.so"));
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--locked", "-p", &package, "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    match built {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            let cargo = env!("CARGO");
            assert!(
                file.is_file(),
                "`{cargo}` does not start ({error}), and {} is not there: install Rust, or copy the plugin there",
                file.display()
            );
        }
    }
    file
}
