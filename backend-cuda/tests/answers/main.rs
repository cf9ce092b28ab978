//! Answers of NVIDIA's libraries to each call in each cell of a table, and the comparison of the simulation with them.
//!
//! A cell is a call with one value for each axis that concerns it: the stream, its state, the calling thread, the current
//! context, the memory and the size. [`table`] lists the calls, and [`cells`] forms the product. Each cell is set up anew,
//! makes one call, and prints one line: the codes, whether the call waited, what a capture became, and the resulting bytes.
//!
//! ```text
//! answers                      compares the simulation with the recorded answers of a device
//! answers --run [--only TEXT]... [--write FILE] [--compare FILE]
//! answers --list [--only TEXT]...
//!
//!   --run           runs the cells over the libraries that the loader finds
//!   --only TEXT     the cells whose name holds TEXT; several are alternatives
//!   --write FILE    writes the header and the answers
//!   --compare FILE  compares with an earlier record, and fails if a cell differs or has no answer there
//!   --list          prints the names of the cells, and runs nothing
//! ```
//!
//! Cells run in a child process. A cell that ends the child, or that takes more than 20 s, gets that as its answer, and
//! the next cells run in a new child. Cells about two devices have the answer `left out` on a machine with one.
//!
//! Cells that are not in the table, because they lose the context, crash the process or depend on the machine:
//!
//! - handles of destroyed objects: the driver reads freed memory;
//! - work on addresses of nothing that the driver does not check, and on freed memory: the context is lost;
//! - a source of `cuMemcpyHtoDAsync` on the device, and null as a host address: the call reads it on the CPU;
//! - fills of pageable memory: the answer depends on whether the kernel lets the device read it;
//! - `cuCtxEnablePeerAccess` between two devices: it lasts, so that later cells would depend on it;
//! - a capture by the legacy stream's number that another stream's capture refuses: `BeginCapture` on it is in the table.

#[path = "../rules/calls.rs"]
#[allow(dead_code, unused_imports, reason = "the rules use the rest")]
mod calls;
mod cells;
mod memory;
#[path = "../rules/plan.rs"]
mod plan;
mod record;
#[path = "../rules/rig.rs"]
#[allow(dead_code, reason = "the rules use the rest")]
mod rig;
mod run;
mod setting;
mod table;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use highwater_simulated_harness::Answer;
use highwater_simulated_harness::script::under;

use crate::cells::Cell;
use crate::record::Record;

/// The recorded answers, from the root of this package.
const RECORDED: &str = "../simulated/answers/cuda-13.txt";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match arguments.first().map(String::as_str) {
        Some("--serve") => run::serve(&arguments[1..]),
        Some("--run") => Options::of(&arguments[1..]).and_then(|options| options.run()),
        Some("--list") => Options::of(&arguments[1..]).map(|options| {
            for cell in options.chosen() {
                println!("{}", cell.name());
            }
        }),
        // What `cargo test` passes to every test program is of no use here.
        _ => over_the_simulation(),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("answers: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every cell over the simulated libraries, and compares the answers with the recorded ones.
fn over_the_simulation() -> Answer {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORDED);
    let arguments = [own.as_os_str(), OsStr::new("--run"), OsStr::new("--compare"), recorded.as_os_str()];
    let output = under("cuda", &arguments, &[("HIGHWATER_MOCK", "devices=2")]);
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(()) } else { Err(format!("the comparison ended with {}", output.status)) }
}

#[derive(Default)]
struct Options {
    only: Vec<String>,
    write: Option<PathBuf>,
    compare: Option<PathBuf>,
}

impl Options {
    fn of(arguments: &[String]) -> Answer<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter();
        while let Some(option) = rest.next() {
            let value = rest.next().ok_or_else(|| format!("`{option}` has no value, or is no option"))?;
            match option.as_str() {
                "--only" => options.only.push(value.clone()),
                "--write" => options.write = Some(value.into()),
                "--compare" => options.compare = Some(value.into()),
                _ => return Err(format!("`{option}` is none of --only, --write, --compare")),
            }
        }
        Ok(options)
    }

    /// Returns the chosen cells, each with its place in the table.
    fn chosen(&self) -> Vec<Cell> {
        let all = cells::all();
        all.into_iter()
            .filter(|cell| self.only.is_empty() || self.only.iter().any(|text| cell.name().contains(text)))
            .collect()
    }

    fn run(&self) -> Answer {
        let cells = self.chosen();
        if cells.is_empty() {
            return Err("no cell has such a name; `--list` prints the names".to_owned());
        }
        let recorded = self.compare.as_deref().map(Record::read).transpose()?;
        let answers = run::answers(&cells)?;
        if let Some(file) = &self.write {
            answers.write(file)?;
        }
        let Some(recorded) = recorded else {
            if self.write.is_none() {
                print!("{answers}");
            }
            return Ok(());
        };
        let differences = answers.differences(&recorded, self.only.is_empty());
        for difference in &differences {
            println!("{difference}");
        }
        println!("{} cells, {} differ", answers.len(), differences.len());
        if differences.is_empty() { Ok(()) } else { Err(format!("{} cells differ", differences.len())) }
    }
}
