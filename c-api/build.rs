//! Links the library with its soname, and so that it cannot be unloaded: its threads, its exit handlers and the vendor's driver outlive
//! every user. Before 1.0, a minor version may break the ABI.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let [major, minor] = ["MAJOR", "MINOR"].map(|part| std::env::var(format!("CARGO_PKG_VERSION_{part}")).unwrap());
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhighwater.so.{major}.{minor}");
}
