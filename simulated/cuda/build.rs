//! Gives the library the name that programs look for, and keeps it loaded: its worker threads outlive `dlclose`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Its functions call each other whoever else has the same names in the process.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
