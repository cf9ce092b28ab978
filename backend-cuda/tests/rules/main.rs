//! Rules of NVIDIA's libraries, each stated once over raw calls, and checked over whichever libraries the loader finds.
//!
//! The simulated libraries of this repository imitate the real ones. What they imitate stands here, so that one program
//! tells whether both keep to it: `scripts/simulated.sh cuda cargo test -p highwater-cuda --test rules` over the simulation,
//! the same without the script on a machine with a GPU.
//!
//! ```text
//! rules [--list] [--json FILE] [NAME...]
//!
//!   --list       names and statements, and nothing is run
//!   --json FILE  writes every observation, to be compared with those over other libraries
//!   NAME         runs the rules whose name holds one of these
//! ```
//!
//! Rules run in processes of their own, so that a rule that ends or blocks its process fails alone. Rules that leave a
//! process as it was share one. Without a driver nothing is run and the program says so; with
//! `HIGHWATER_RULES=required` that is a failure, and so is a rule that is left out for lack of a library. Rules about two
//! devices are left out where there is one; the simulation has two.
//!
//! A rule asserts what was seen on an NVIDIA H200 (driver 580.159, CUDA 13.0, cuBLAS 13.1) or stands in the vendor's
//! documentation. Every other outcome is an observation, recorded for the comparison of two records.

mod blas;
mod calls;
mod capture;
mod devices;
mod events;
mod host;
mod lt;
mod memory;
mod plan;
mod process;
mod rig;
mod sharing;
mod streams;

use std::process::ExitCode;

use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::need;
use highwater_simulated_harness::run::Suite;

use crate::calls::{Blas, Driver, Lt, cu};

/// What a rule needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Driver,
    /// cuBLAS as well.
    Blas,
    /// cuBLASLt as well.
    Lt,
    /// Two devices.
    Devices,
    /// Two devices and cuBLAS.
    DevicesAndBlas,
}

fn main() -> ExitCode {
    match rig::peer_part() {
        Ok(None) => {}
        Ok(Some((name, line))) => return report(&name, sharing::peer(&name, line)),
        Err(error) => return report("peer", Err(error)),
    }
    if let Some(part) = process::ending_part() {
        return report("ending", process::end(&part));
    }
    let suite = Suite {
        rules: vec![
            process::RULES,
            memory::RULES,
            host::RULES,
            streams::RULES,
            events::RULES,
            capture::RULES,
            blas::RULES,
            lt::RULES,
            sharing::RULES,
            devices::RULES,
        ],
        driver: || Driver::open().map(drop).map_err(|reason| format!("no CUDA driver: {reason}")),
        advice: "over the simulation: scripts/simulated.sh cuda cargo test -p highwater-cuda --test rules",
        lacking,
        is_met_everywhere: |needs| !matches!(needs, Needs::Devices | Needs::DevicesAndBlas),
        begin: || rig::start(0).map(drop),
        end: || need("cuCtxSynchronize after the rule", cu!(cuCtxSynchronize())),
        // With the few of the default, a blocked stream stops others that have nothing to do with it.
        // The simulation has two devices, so that no rule is left out.
        environment: &[("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("HIGHWATER_MOCK", "devices=2")],
    };
    suite.main()
}

fn report(part: &str, ended: Answer) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{part}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns why a need is not met here. Only the number of devices is asked of the driver, and those rules start with that.
fn lacking(needs: &Needs) -> Option<String> {
    let library = |found: Answer<()>, what: &str| found.err().map(|reason| format!("no {what}: {reason}"));
    let driver = library(Driver::open().map(drop), "CUDA driver");
    let blas = || library(Blas::open().map(drop), "cuBLAS");
    let lt = || library(Lt::open().map(drop), "cuBLASLt");
    // cuBLASLt first: cuBLAS depends on it and would take whichever the loader finds.
    driver.or_else(|| match needs {
        Needs::Driver => None,
        Needs::Blas => lt().or_else(blas),
        Needs::Lt => lt(),
        Needs::Devices => one_device(),
        Needs::DevicesAndBlas => lt().or_else(blas).or_else(one_device),
    })
}

fn one_device() -> Option<String> {
    let mut count = 0;
    match (cu!(cuInit(0)), cu!(cuDeviceGetCount(&mut count))) {
        (0, 0) if count >= 2 => None,
        (0, 0) => Some(format!("it needs two devices, and there is {count}")),
        (code, other) => Some(format!("cuInit answered {code}, cuDeviceGetCount {other}")),
    }
}
