//! Gives the library the name that programs look for.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhipblaslt.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Its functions call each other whoever else has the same names in the process.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
