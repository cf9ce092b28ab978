//! Links the plugin so that it cannot be unloaded: its threads, its exit handlers and the vendor's driver outlive every
//! user.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
