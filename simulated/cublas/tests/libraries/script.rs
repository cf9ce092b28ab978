//! The script: what it lays out, and that it is not seen otherwise.

use std::ffi::OsStr;
use std::path::PathBuf;

use libloading::Library;

use crate::rig::under;

/// The folder of a variant, laid out.
fn folder(vendor: &str) -> PathBuf {
    let output = under(vendor, &["sh", "-c", "printf %s \"${LD_LIBRARY_PATH%%:*}\""].map(OsStr::new), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).unwrap())
}

fn files(vendor: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder(vendor)).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Which of the symbols the driver of a variant has.
fn symbols<'a>(vendor: &str, names: &[&'a str]) -> Vec<&'a str> {
    // SAFETY: the libraries may be opened at any time; the symbols are looked up and not used.
    unsafe {
        let library = Library::new(folder(vendor).join("libcuda.so.1")).unwrap();
        names.iter().copied().filter(|name| library.get::<*const ()>(name.as_bytes()).is_ok()).collect()
    }
}

#[test]
fn output_and_exit_status_are_those_of_the_command() {
    let output = under("cuda", &["sh", "-c", "echo seen; echo told >&2; exit 9"].map(OsStr::new), &[]);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(9), b"seen\n".as_slice()));
    assert!(String::from_utf8_lossy(&output.stderr).ends_with("told\n"));
}

#[test]
fn misuse_says_how_it_is_used() {
    for (vendor, command) in [("cuda", &[][..]), ("vulkan", &["true"]), ("cuda:none-such", &["true"]), ("", &[])] {
        let command: Vec<_> = command.iter().map(OsStr::new).collect();
        let output = under(vendor, &command, &[]);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{vendor}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("Usage: scripts/simulated.sh"));
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
    assert_eq!(symbols("cuda", &names), names);
    assert_eq!(symbols("cuda:two-symbols", &names), names[..2]);
    assert_eq!(symbols("cuda:no-symbol", &names), [names[0], names[1], names[3], names[4]]);
    // SAFETY: a file that is no library is not run.
    assert!(unsafe { Library::new(folder("cuda:junk").join("libcuda.so.1")) }.is_err());
}

#[test]
fn many_at_once_find_whole_libraries() {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| symbols("cuda", &["cuInit"]))).collect();
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
