//! The library as cargo builds it: its name, its symbols, and that it works when it is loaded.

use std::path::PathBuf;
use std::process::Command;

use highwater_simulated_harness::isolated;
use libloading::Library;

/// Builds the library and gives its path.
fn library_file() -> PathBuf {
    // The test lies in `deps` of the folder that the library is put into.
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().and_then(|deps| deps.parent()).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--package", env!("CARGO_PKG_NAME"), "--target-dir"]);
    cargo.arg(folder.parent().unwrap());
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    let output = cargo.output();
    let output =
        output.unwrap_or_else(|error| panic!("this test builds the library: {cargo:?} does not start: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder.join("libhwsim_cuda.so")
}

isolated! {
    fn the_built_library_is_found_by_its_name_and_works(_) over [] with HIGHWATER_MOCK = "devices=3" {
        let file = library_file();
        let bytes = std::fs::read(&file).unwrap();
        for text in [&b"libcuda.so.1\0"[..], b"cuStreamWaitEvent\0", b"highwater_simulated_blas\0"] {
            assert!(bytes.windows(text.len()).any(|window| window == text), "{}", String::from_utf8_lossy(text));
        }
        let library = unsafe { Library::new(&file) }.unwrap();
        type Init = unsafe extern "C" fn(u32) -> u32;
        type Count = unsafe extern "C" fn(*mut i32) -> u32;
        let (init, count): (Init, Count) =
            unsafe { (*library.get(b"cuInit\0").unwrap(), *library.get(b"cuDeviceGetCount\0").unwrap()) };
        let mut devices = -1;
        assert_eq!(unsafe { (count(&mut devices), init(0), count(&mut devices)) }, (3, 0, 0));
        assert_eq!(devices, 3);
        // It is found by its own name once it is loaded, and stays when it is closed, with its devices.
        drop(library);
        let again = unsafe { Library::new("libcuda.so.1") }.unwrap();
        let same: Count = unsafe { *again.get(b"cuDeviceGetCount\0").unwrap() };
        assert_eq!((same as usize, unsafe { same(&mut devices) }), (count as usize, 0));
    }
}
