//! The script: what it lays out, and that it is not seen otherwise.

use std::ffi::OsStr;

use libloading::Library;

use highwater_simulated_harness::script::{check_misuse, check_output, files, folder, symbols, under};

#[test]
fn output_and_exit_status_are_those_of_the_command() {
    check_output("rocm");
}

#[test]
fn a_folder_is_laid_out_again_when_it_is_gone_or_of_another_build() {
    // A variant that no other test uses.
    const VARIANT: &str = "rocm6:hip-5";
    let folder = folder(VARIANT);
    let made_of = folder.with_added_extension("made-of");
    let (right, files_of_it) = (std::fs::read(&made_of).unwrap(), files(VARIANT));
    let library = folder.join("libamdhip64.so.5");
    let bytes = std::fs::read(&library).unwrap();
    std::fs::write(&library, "of another build").unwrap();
    assert_eq!(files(VARIANT), files_of_it);
    assert_eq!(std::fs::read(&library).unwrap(), b"of another build", "a folder that is up to date is left alone");
    std::fs::write(&made_of, "another build\n").unwrap();
    assert_eq!(files(VARIANT), files_of_it);
    assert_eq!((std::fs::read(&library).unwrap() == bytes, std::fs::read(&made_of).unwrap()), (true, right));
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(files(VARIANT), files_of_it);
    assert!(std::fs::read(&library).unwrap() == bytes);
}

#[test]
fn misuse_says_how_it_is_used() {
    for vendor in ["rocm:none-such", "rocm6:cuda-12", "rocm:stub", "rocm5", "cuda:hip-5"] {
        check_misuse(vendor, &["true"]);
    }
}

#[test]
fn each_variant_lacks_what_its_name_says() {
    assert_eq!(files("rocm"), ["libamdhip64.so.7", "libhipblas.so.3", "libhipblaslt.so.1", "rocblas"]);
    assert_eq!(files("rocm6"), ["libamdhip64.so.6", "libhipblas.so.2", "libhipblaslt.so.0", "rocblas"]);
    assert_eq!(files("rocm:no-hipblas"), ["libamdhip64.so.7"]);
    assert_eq!(files("rocm:no-hipblaslt"), ["libamdhip64.so.7", "libhipblas.so.3", "rocblas"]);
    assert_eq!(files("rocm:wrong-major"), ["libamdhip64.so.7", "libhipblas.so.2", "libhipblaslt.so.1", "rocblas"]);
    assert_eq!(files("rocm6:wrong-major"), ["libamdhip64.so.6", "libhipblas.so.3", "libhipblaslt.so.0", "rocblas"]);
    assert_eq!(files("rocm:hip-5"), ["libamdhip64.so.5"]);
    assert_eq!(files("rocm:no-kernels"), ["libamdhip64.so.7", "libhipblas.so.3", "rocblas"]);
    for (vendor, kernels) in [("rocm", vec!["TensileLibrary_lazy_gfx942.dat"]), ("rocm:no-kernels", vec![])] {
        let entries = std::fs::read_dir(folder(vendor).join("rocblas/library")).unwrap();
        let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, kernels, "{vendor}");
    }
    // A library that is open answers to the name inside of it.
    for (vendor, file) in [
        ("rocm", "libamdhip64.so.7"),
        ("rocm6", "libamdhip64.so.6"),
        ("rocm6", "libhipblas.so.2"),
        ("rocm6", "libhipblaslt.so.0"),
        ("rocm:hip-5", "libamdhip64.so.5"),
    ] {
        let library = std::fs::read(folder(vendor).join(file)).unwrap();
        let name = format!("\0{file}\0");
        assert!(library.windows(name.len()).any(|window| window == name.as_bytes()), "{vendor} {file}");
    }
    let names = ["hipInit", "hipRuntimeGetVersion", "hipStreamWaitEvent", "hipMalloc", "hipStreamGetId"];
    assert_eq!(symbols("rocm", "libamdhip64.so.7", &names), names);
    assert_eq!(symbols("rocm6", "libamdhip64.so.6", &names), names[..4]);
    assert_eq!(symbols("rocm:two-symbols", "libamdhip64.so.7", &names), names[..2]);
    assert_eq!(symbols("rocm6:no-symbol", "libamdhip64.so.6", &names), [names[0], names[1], names[3]]);
    let names = ["hipblasLtCreate", "hipblasLtMatmulAlgoGetHeuristic", "hipblasLtMatmul"];
    assert_eq!(symbols("rocm", "libhipblaslt.so.1", &names), names);
    assert_eq!(symbols("rocm:old-lt", "libhipblaslt.so.1", &names), [names[0], names[2]]);
    // SAFETY: a file that is no library is not run.
    assert!(unsafe { Library::new(folder("rocm:junk").join("libamdhip64.so.7")) }.is_err());
}

#[test]
fn settings_of_the_caller_stay_beside_those_of_the_script() {
    let command = ["sh", "-c", "printf %s \"$HIGHWATER_SIMULATED_HIP\""].map(OsStr::new);
    let output = under("rocm6:no-device", &command, &[("HIGHWATER_SIMULATED_HIP", "arch=gfx90a")]);
    assert_eq!(output.stdout, b"version=6.4,devices=none,arch=gfx90a");
}
