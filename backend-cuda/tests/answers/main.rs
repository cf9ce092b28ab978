//! Answers of NVIDIA's libraries to each call in each cell of a table, and the comparison of the simulation with them.
//!
//! A cell is a call with one value for each axis that concerns it: the stream, its state, the calling thread, the current
//! context, the memory and the size. [`table`] lists the calls, and [`cells`] forms the product. Each cell makes its objects,
//! makes one call, and prints one line: the codes, whether the call waited, what a capture became, and the resulting bytes.
//!
//! ```text
//! answers                                   compares the simulation with the recorded answers of a device
//! answers --run [--only TEXT]... [--write FILE] [--compare FILE] [--all]
//! answers --list [--only TEXT]...
//!
//!   --run           runs the cells over the libraries that the loader finds
//!   --only TEXT     the cells whose name holds TEXT; several are alternatives
//!   --write FILE    writes the header and the answers; without it and --compare they are printed
//!   --compare FILE  compares with an earlier record, and fails if a cell differs or has no answer there
//!   --all           fails if a cell was left out
//!   --list          prints the names of the cells, and runs nothing
//! ```
//!
//! Cells run in a child process. If a cell ends the child, or takes more than 10 s, the answer says so. The next cells run in
//! a new child, also after a cell that leaves an error behind. On a machine with one device, cells about two have the answer
//! `left out`.
//!
//! An answer begins with the code of the call. These parts follow, as far as they apply:
//!
//! | part | meaning |
//! | --- | --- |
//! | `gives N` | a value that the call returned |
//! | `waits` | the call returned only after the work of the busy stream |
//! | `status N`, `origin N` | the capture of the call's stream, and of the stream that began it: 0 none, 1 active, 2 lost |
//! | `query N` | the busy stream after the call |
//! | `join N` | the code of the failed wait of the origin for a member |
//! | `end N nodes [..] launch N` | the code that ended the capture, the kinds of nodes of its graph, the launch of that graph |
//! | `sync N` | a wait for the stream that failed |
//! | `bytes`, `values`, `counted`, `event` | what the work left behind |
//! | `leaves` | an error that the next cell would meet |
//!
//! Some cells are not in the table, because they lose the context, crash the process or depend on the machine:
//!
//! - A handle of a destroyed object: the driver reads freed memory.
//! - Work on freed memory, or on addresses that the driver does not check: the context is lost.
//! - A host address of a copy that is null or on the device: the call itself accesses it on the CPU.
//! - A fill of pageable memory: the answer depends on the kernel's support for page tables of the host.
//! - `cuCtxEnablePeerAccess` for another device: it lasts, and later cells would depend on it.
//! - Products with another device's context current: the answer depends on the kernels that are loaded there.
//! - A wait for the legacy stream's membership in a capture: the legacy stream joins none, and the setup would fail.

#[path = "../rules/calls.rs"]
#[allow(dead_code, reason = "the rules use the rest")]
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

const HELP: &str = "\
answers                                   compares the simulation with the recorded answers of a device
answers --run [--only TEXT]... [--write FILE] [--compare FILE] [--all]
answers --list [--only TEXT]...

  --run           runs the cells over the libraries that the loader finds
  --only TEXT     the cells whose name holds TEXT; several are alternatives
  --write FILE    writes the header and the answers; without it and --compare they are printed
  --compare FILE  compares with an earlier record, and fails if a cell differs or has no answer there
  --all           fails if a cell was left out
  --list          prints the names of the cells, and runs nothing
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match arguments.first().map(String::as_str) {
        Some("--serve") => run::serve(),
        Some("--run") => Options::of(&arguments[1..]).and_then(|options| options.run()),
        Some("--list") => Options::of(&arguments[1..]).map(|options| {
            for cell in options.chosen() {
                println!("{}", cell.name());
            }
        }),
        Some("--help" | "-h") => {
            print!("{HELP}");
            Ok(())
        }
        _ if is_not_asked_for(&arguments) => Ok(()),
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

/// Returns whether `cargo test` looks for tests of another name.
fn is_not_asked_for(arguments: &[String]) -> bool {
    let mut names = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
    names.peek().is_some() && !names.any(|name| "answers".contains(name.as_str()))
}

/// Runs every cell over the simulated libraries, and compares the answers with the recorded ones.
fn over_the_simulation() -> Answer {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORDED);
    let arguments =
        [own.as_os_str(), OsStr::new("--run"), OsStr::new("--all"), OsStr::new("--compare"), recorded.as_os_str()];
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
    all: bool,
}

impl Options {
    fn of(arguments: &[String]) -> Answer<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter();
        while let Some(option) = rest.next() {
            if option == "--all" {
                options.all = true;
                continue;
            }
            let value = rest.next().ok_or_else(|| format!("`{option}` has no value, or is no option"))?;
            match option.as_str() {
                "--only" => options.only.push(value.clone()),
                "--write" => options.write = Some(value.into()),
                "--compare" => options.compare = Some(value.into()),
                _ => return Err(format!("`{option}` is none of --only, --write, --compare, --all")),
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
        if self.write.is_none() && recorded.is_none() {
            print!("{answers}");
        }
        let differences =
            recorded.map_or_else(Vec::new, |recorded| answers.differences(&recorded, self.only.is_empty()));
        for difference in &differences {
            println!("{difference}");
        }
        let left_out = answers.left_out();
        eprintln!("{} cells, {left_out} left out, {} differ", answers.len(), differences.len());
        match differences.len() {
            0 if self.all && left_out > 0 => Err(format!("{left_out} cells were left out")),
            0 => Ok(()),
            count => Err(format!("{count} cells differ from the record")),
        }
    }
}
