//! ROCm, of both major versions.

use super::{Simulated, is_installed};

const ROCM_7: Simulated = Simulated { libraries: "rocm", backend: "rocm" };
const ROCM_6: Simulated = Simulated { libraries: "rocm6", backend: "rocm" };

#[test]
fn installations_are_told_apart() {
    // Variant, what became of it, a part of the reason, a part of the hint.
    ROCM_7.are_told_apart(&[
        ("", "usable", "AMD ROCm, 1 device", "", &[]),
        ("no-symbol", "symbol missing", "libamdhip64.so.7 lacks hipStreamWaitEvent", "ROCm 6 or 7", &[]),
        ("two-symbols", "symbol missing", "lacks hipStreamQuery, ", "ROCm 6 or 7", &[]),
        ("junk", "library missing", "file too short", "install", &["libamdhip64.so.6", "libamdhip64.so.5"]),
        ("no-device", "no device", "hipErrorNoDevice", "HIP_VISIBLE_DEVICES", &[]),
        ("no-hipblas", "library missing", "libhipblas.so.3", "HIGHWATER_HIPBLAS_LIBRARY", &["libhipblas.so.3"]),
        ("wrong-major", "library missing", "libhipblas.so.3", "", &["libhipblas.so.3"]),
        (
            "hip-5",
            "unsupported",
            "libamdhip64.so.5",
            "libamdhip64.so.7 or libamdhip64.so.6",
            &["libamdhip64.so.7", "libamdhip64.so.6"],
        ),
    ]);
    ROCM_6.are_told_apart(&[("", "usable", "AMD ROCm, 1 device", "", &[])]);
}

#[test]
fn doctor_says_that_there_are_no_lt_plans_without_hipblaslt() {
    for rocm in [ROCM_6, ROCM_7] {
        for (variant, words) in [
            ("", "opened"),
            ("no-hipblaslt", "none, so there are no Lt plans: hipBLASLt could not be opened"),
            ("old-lt", "lacks hipblasLt"),
        ] {
            if variant == "no-hipblaslt" && ["libhipblaslt.so.0", "libhipblaslt.so.1"].into_iter().any(is_installed) {
                continue;
            }
            let object = rocm.run(variant, &[], &["doctor", "--json"]).ended(0).object();
            let mut backends = object["backends"].as_array().unwrap().iter();
            let said = &backends.find(|backend| backend["name"] == "rocm").unwrap()["versions"]["hipBLASLt"];
            assert!(said.as_str().unwrap().contains(words), "{variant}: {said}");
        }
    }
}

#[test]
fn a_code_that_no_header_knows_is_an_error_with_its_number() {
    ROCM_7.tells_an_unknown_code();
}

#[test]
fn an_architecture_without_kernels_is_refused_before_rocblas_ends_the_process() {
    for rocm in [ROCM_6, ROCM_7] {
        let run = rocm.run("no-kernels", &[], &["--backend", "rocm", "--json"]);
        run.assert_error(&["TensileLibrary_lazy_gfx942.dat"]);
        assert_eq!(run.object()["error"]["kind"], "unsupported");
    }
}

#[test]
fn the_main_job_runs_in_three_processes_on_one_copy_of_the_weights() {
    for rocm in [ROCM_6, ROCM_7] {
        assert_eq!(rocm.main_job(&[], "2")["processes"], 3);
    }
}

#[test]
fn the_main_job_runs_on_two_devices_with_the_weights_in_the_memory_of_each() {
    ROCM_7.main_job_on_two_devices("legacy");
}

#[test]
fn the_plugin_says_what_the_built_in_backend_says() {
    ROCM_7.says_the_same_as_plugin();
}
