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
//! devices are left out where there is one (`HIGHWATER_MOCK=devices=2` gives the simulation two).
//!
//! A rule asserts what was seen on an NVIDIA H200 (driver 580.159, CUDA 13.0, cuBLAS 13.1) or stands in the vendor's
//! documentation. What is neither is an observation: recorded, and compared by whoever compares two records.

mod blas;
mod calls;
mod capture;
mod devices;
mod events;
mod host;
mod log;
mod lt;
mod memory;
mod process;
mod rig;
mod run;
mod sharing;
mod streams;
mod values;

use std::process::ExitCode;

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

/// Whose process a rule runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Process {
    /// One with the other rules of its kind: it leaves nothing behind that they could see.
    Shared,
    /// One of its own.
    Own,
}

/// Something that the vendor's libraries do, as the outcome of calls.
pub(crate) struct Rule {
    name: &'static str,
    statement: &'static str,
    needs: Needs,
    process: Process,
    check: fn(&mut log::Log) -> rig::Answer,
}

/// The rules of a module.
macro_rules! rules {
    ($($name:literal $needs:ident $process:ident $check:path: $statement:literal;)*) => {
        pub(crate) const RULES: &[crate::Rule] = &[$(crate::Rule {
            name: $name,
            statement: $statement,
            needs: crate::Needs::$needs,
            process: crate::Process::$process,
            check: $check,
        }),*];
    };
}
pub(crate) use rules;

/// Every rule. Those that share a process stand together.
fn all() -> Vec<&'static Rule> {
    let modules: [&'static [Rule]; 10] = [
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
    ];
    let mut rules: Vec<_> = modules.iter().flat_map(|rules| rules.iter()).collect();
    rules.sort_by_key(|rule| rule.process == Process::Own);
    rules
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
    run::main(&all())
}

fn report(part: &str, ended: rig::Answer) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{part}: {error}");
            ExitCode::FAILURE
        }
    }
}
