//! The vendors' backends over simulated libraries: what the program says of installations that are whole, old or broken, the
//! main job in three processes, and samples of the checks of a backend.
//!
//! `scripts/simulated.sh` builds the libraries at the first run. CI runs the whole suite over them: `scripts/conformance-simulated.sh`.

mod cuda;
mod rocm;

use std::path::Path;
use std::process::Command;

use highwater_simulated_harness::script::script;
use serde_json::Value;

use crate::started::{Run, plugin_says_the_same};

/// What describes devices and libraries to the program, so that a test says it all.
const VARIABLES: [&str; 10] = [
    "HIGHWATER_MOCK",
    "HIGHWATER_SIMULATED_CUDA",
    "HIGHWATER_SIMULATED_HIP",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "ROCBLAS_TENSILE_LIBPATH",
    "VIRTUAL_ENV",
];

/// Whether the loader or the search of a backend finds a real library of this name.
fn is_installed(name: &str) -> bool {
    let cached =
        Command::new("ldconfig").arg("-p").output().or_else(|_| Command::new("/sbin/ldconfig").arg("-p").output());
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    cached.is_ok_and(|cache| String::from_utf8_lossy(&cache.stdout).lines().any(|line| line.trim().starts_with(name)))
        || Path::new("/usr/local/cuda/lib64").join(name).exists()
        || std::env::split_paths(&folders).any(|folder| folder.join(name).exists())
}

/// Simulated libraries: as `scripts/simulated.sh` names them, and the backend that they are for.
#[derive(Clone, Copy)]
struct Simulated {
    libraries: &'static str,
    backend: &'static str,
}

impl Simulated {
    /// The program over a variant of the libraries. The process is the program's own once they are built.
    fn command(self, variant: &str, settings: &[(&str, &str)], arguments: &[&str]) -> Command {
        let libraries = self.libraries;
        let chosen = if variant.is_empty() { libraries.to_owned() } else { format!("{libraries}:{variant}") };
        let mut command = script(&chosen);
        command.arg(env!("CARGO_BIN_EXE_highwater")).args(arguments);
        for variable in VARIABLES {
            command.env_remove(variable);
        }
        command.envs(settings.iter().copied());
        command
    }

    /// Runs the program over a variant of the libraries.
    fn run(self, variant: &str, settings: &[(&str, &str)], arguments: &[&str]) -> Run {
        Run::of(self.command(variant, settings, arguments).output().expect("bash runs the script"), arguments)
    }

    /// What `doctor` says of the backend: what became of it, why, and what to do.
    #[track_caller]
    fn doctor(self, variant: &str, settings: &[(&str, &str)]) -> (String, String, String) {
        let object = self.run(variant, settings, &["doctor", "--json"]).ended(0).object();
        let mut backends = object["backends"].as_array().unwrap().iter();
        let backend = backends.find(|backend| backend["name"] == self.backend).unwrap();
        let text = |key: &str| backend[key].as_str().unwrap().to_owned();
        (text("outcome"), text("reason"), text("hint"))
    }

    /// `doctor` says of each variant what became of it, and this in the reason and the hint. The last value names real
    /// libraries that take the place of what a variant lacks: where this machine has one, that variant shows nothing.
    #[track_caller]
    fn are_told_apart(self, expected: &[(&str, &str, &str, &str, &[&str])]) {
        for (variant, outcome, reason, hint, substitutes) in expected {
            if let Some(substitute) = substitutes.iter().find(|name| is_installed(name)) {
                eprintln!("{variant} is left out: this machine has {substitute}");
                continue;
            }
            let said = self.doctor(variant, &[]);
            assert_eq!(said.0, *outcome, "{variant}: {said:?}");
            assert!(said.1.contains(reason) && said.2.contains(hint), "{variant}: {said:?}");
        }
    }

    /// Runs the main job, which works in three processes on one copy of the weights, and leaks nothing.
    #[track_caller]
    fn main_job(self, settings: &[(&str, &str)], workers: &str) -> Value {
        // The control program of a machine with a GPU would start a service for simulated devices.
        let arguments = ["--backend", self.backend, "--workers", workers, "--mps", "use-only", "--json"];
        let object = self.run("", settings, &arguments).ended(0).object();
        assert_eq!(object["backend"], self.backend);
        assert_eq!((&object["leaks"], &object["predictions_equal_cpu"]), (&0.into(), &true.into()), "{object}");
        assert_eq!(object["correct"], 530, "{object}");
        assert!(object["weights_shared_bytes"].as_u64().unwrap() > 0, "{object}");
        object
    }

    /// Runs the main job on two devices with one worker on each, and with three, and gives how the weights went.
    #[track_caller]
    fn main_job_on_two_devices(self, transport: &str) {
        for (workers, on_each) in [("2", [1, 1]), ("3", [2, 1])] {
            let object = self.main_job(&[("HIGHWATER_MOCK", "devices=2")], workers);
            assert_eq!(object["weights_transport"], transport, "{object}");
            let devices = object["devices"].as_array().unwrap();
            let workers: Vec<_> = devices.iter().map(|device| device["workers"].as_u64().unwrap()).collect();
            assert_eq!(workers, on_each, "{object}");
            assert!(devices.iter().all(|device| device["images"].as_u64().unwrap() > 0), "{object}");
        }
    }

    /// A code that no header knows is an error with its number.
    #[track_caller]
    fn tells_an_unknown_code(self) {
        self.run("unknown-code", &[], &["--backend", self.backend, "--json"]).assert_error(&["921"]);
    }

    /// Checks that the backend's plugin says of itself what the built-in backend says.
    #[track_caller]
    fn says_the_same_as_plugin(self) {
        let plugin = crate::built::plugin(self.backend);
        // Some users build with files that are writable by a group, by their umask, and have such plugins too.
        let through = ["--plugin", plugin.to_str().unwrap(), "--allow-insecure-plugins"];
        plugin_says_the_same(&["--backend", self.backend], &through, |which| self.conformance(which));
    }

    /// Runs cases, of which none may fail.
    #[track_caller]
    fn conformance(self, which: &[&str]) -> Value {
        let object = self.run("", &[], &[&["conformance", "--json"], which].concat()).ended(0).object();
        assert_eq!(object["failed"], 0, "{object}");
        object
    }
}
