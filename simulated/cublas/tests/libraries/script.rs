//! The script: what it lays out, and that it is not seen otherwise.

use std::ffi::OsStr;

use libloading::Library;

use highwater_simulated_harness::script::{check_misuse, check_output, files, folder, symbols, under};

#[test]
fn output_and_exit_status_are_those_of_the_command() {
    check_output("cuda");
}

#[test]
fn misuse_says_how_it_is_used() {
    for (vendor, command) in [("cuda", &[][..]), ("vulkan", &["true"]), ("cuda:none-such", &["true"]), ("", &[])] {
        check_misuse(vendor, command);
    }
}

#[test]
fn each_variant_lacks_what_its_name_says() {
    let linked =
        ["libcublas.so", "libcublas.so.13", "libcublasLt.so", "libcublasLt.so.13", "libcuda.so", "libcuda.so.1"];
    assert_eq!(files("cuda"), linked);
    assert_eq!(files("cuda:no-cublas"), ["libcuda.so", "libcuda.so.1"]);
    assert_eq!(files("cuda:wrong-major"), ["libcublas.so.11", "libcublasLt.so.11", "libcuda.so", "libcuda.so.1"]);
    assert_eq!(files("cuda:cuda-12"), ["libcublas.so.12", "libcublasLt.so.12", "libcuda.so", "libcuda.so.1"]);
    // A library that is open answers to the name inside of it.
    let library = std::fs::read(folder("cuda:cuda-12").join("libcublasLt.so.12")).unwrap();
    let holds = |name: &[u8]| library.windows(name.len()).any(|window| window == name);
    assert!(holds(b"\0libcublasLt.so.12\0") && !holds(b"\0libcublasLt.so.13\0"));
    let names = ["cuInit", "cuDriverGetVersion", "cuStreamWaitEvent", "cuStreamCreate", "cuMemAlloc_v2"];
    assert_eq!(symbols("cuda", "libcuda.so.1", &names), names);
    assert_eq!(symbols("cuda:two-symbols", "libcuda.so.1", &names), names[..2]);
    assert_eq!(symbols("cuda:no-symbol", "libcuda.so.1", &names), [names[0], names[1], names[3], names[4]]);
    // SAFETY: a file that is no library is not run.
    assert!(unsafe { Library::new(folder("cuda:junk").join("libcuda.so.1")) }.is_err());
}

#[test]
fn many_at_once_find_whole_libraries() {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| symbols("cuda", "libcuda.so.1", &["cuInit"]))).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), ["cuInit"]);
        }
    });
}

#[test]
fn settings_of_the_caller_stay_beside_those_of_the_variant() {
    let command = ["sh", "-c", "printf %s \"$HIGHWATER_SIMULATED_CUDA\""].map(OsStr::new);
    let output = under("cuda:old-driver", &command, &[("HIGHWATER_SIMULATED_CUDA", "unknown-code=cuStreamQuery")]);
    assert_eq!(output.stdout, b"unknown-code=cuStreamQuery,driver-version=11080");
}
