//! Runs cells in child processes, with a limit of time for each.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

use highwater_simulated_harness::Answer;

use crate::calls::{Blas, Driver, Lt, blas, cu, ok};
use crate::cells::{self, Cell};
use crate::record::Record;
use crate::rig::own_program;
use crate::setting::{Rig, answer};

/// Begins a line of a child that is meant for its parent.
const MARK: &str = "\u{1e}";
/// The time limit of a cell.
const LIMIT: Duration = Duration::from_secs(10);
/// The time limit of a child's start. Drivers and kernels are slow to load.
const START_LIMIT: Duration = Duration::from_secs(60);
/// With the few connections of the default, a blocked stream stops others that have nothing to do with it.
const ENVIRONMENT: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Returns the answers of cells.
///
/// # Errors
/// If no child starts.
pub(crate) fn answers(cells: &[Cell]) -> Answer<Record> {
    let mut record = Record::default();
    let begun = Instant::now();
    let mut children = 0;
    while record.len() < cells.len() {
        children += 1;
        let rest = &cells[record.len()..];
        let before = record.len();
        Server::start(rest)?.listen(rest, &mut record)?;
        if record.len() == before {
            return Err("a child answered no cell".to_owned());
        }
    }
    eprintln!("{} cells by {children} processes in {:.1} s", cells.len(), begun.elapsed().as_secs_f64());
    Ok(record)
}

/// A child and the lines that it prints.
struct Server {
    child: Child,
    lines: Receiver<String>,
}

impl Server {
    fn start(cells: &[Cell]) -> Answer<Self> {
        let text = |error: std::io::Error| format!("a child: {error}");
        let mut command = own_program()?;
        command.arg("--serve").env(ENVIRONMENT.0, ENVIRONMENT.1).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(text)?;
        let output = child.stdout.take().ok_or("a child has no output")?;
        let mut input = child.stdin.take().ok_or("a child has no input")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut numbers = String::new();
        for cell in cells {
            numbers.push_str(&format!("{}\n", cell.number));
        }
        // A thread of its own, because a child that answers slowly reads slowly. A child that has ended reads nothing.
        std::thread::spawn(move || drop(input.write_all(numbers.as_bytes())));
        Ok(Self { child, lines })
    }

    /// Adds answers until every cell has one, or the child has ended.
    fn listen(mut self, cells: &[Cell], record: &mut Record) -> Answer {
        let mut rest = cells.iter();
        let mut current: Option<&Cell> = None;
        let mut progress = false;
        loop {
            let limit = if progress { LIMIT } else { START_LIMIT };
            let line = match self.lines.recv_timeout(limit) {
                Ok(line) => line,
                Err(error) => {
                    let what = match error {
                        RecvTimeoutError::Timeout => "hangs".to_owned(),
                        RecvTimeoutError::Disconnected => format!("ends the process: {}", self.ended()),
                    };
                    return match current {
                        Some(cell) => {
                            eprintln!("{}: {what}", cell.name());
                            record.add(cell.name(), what);
                            Ok(())
                        }
                        // Between two cells: the last one spoilt the child, which said so and ended.
                        None if progress => Ok(()),
                        None => Err(format!("a child, before its first cell: {what}")),
                    };
                }
            };
            let Some(told) = line.strip_prefix(MARK) else {
                eprintln!("  | {line}");
                continue;
            };
            match told.split_once(' ') {
                Some(("header", text)) if record.len() == 0 => record.header.push(text.to_owned()),
                Some(("header", _)) => {}
                Some(("cell", _)) => {
                    current = rest.next();
                    progress = true;
                }
                Some(("answer", text)) => {
                    let cell = current.take().ok_or("a child answered a cell that it had not begun")?;
                    record.add(cell.name(), text.to_owned());
                    if rest.len() == 0 {
                        return Ok(());
                    }
                }
                _ => return Err(format!("a child said `{told}`")),
            }
        }
    }

    fn ended(&mut self) -> String {
        self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended needs no stop.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tell(kind: &str, text: &str) {
    let mut output = std::io::stdout().lock();
    // A failure is ignored: without a parent nobody reads it.
    let _ = writeln!(output, "{MARK}{kind} {}", text.replace('\n', " "));
    let _ = output.flush();
}

/// Runs the cells whose numbers it reads: the part of a child.
///
/// # Errors
/// If the libraries or the device cannot be used.
pub(crate) fn serve() -> Answer {
    Driver::open().map_err(|reason| format!("no CUDA driver: {reason}"))?;
    // cuBLASLt first: cuBLAS depends on it and would take whichever the loader finds.
    Lt::open().map_err(|reason| format!("no cuBLASLt: {reason}"))?;
    Blas::open().map_err(|reason| format!("no cuBLAS: {reason}"))?;
    let rig = Rig::new()?;
    for line in header(&rig)? {
        tell("header", &line);
    }
    let all = cells::all();
    for line in std::io::stdin().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let cell = line.parse::<usize>().ok().and_then(|number| all.get(number)).ok_or("no cell has this number")?;
        tell("cell", &line);
        let text = answer(&rig, cell);
        let spoilt = rig.spoilt();
        match spoilt {
            None => tell("answer", &text),
            Some(why) => {
                tell("answer", &format!("{text}, leaves {why}"));
                // The next cell needs a process that is as new.
                std::process::exit(0);
            }
        }
    }
    Ok(())
}

/// Returns the facts on which answers may depend.
fn header(rig: &Rig) -> Answer<Vec<String>> {
    let (mut driver, mut parts) = (0, [0; 3]);
    ok!(cu cuDriverGetVersion(&mut driver));
    for (which, part) in parts.iter_mut().enumerate() {
        ok!(blas cublasGetProperty(which as u32, part));
    }
    let library = parts[0] * 10_000 + parts[1] * 100 + parts[2];
    let attribute = |number: u32| {
        let mut value = -1;
        cu!(cuDeviceGetAttribute(&mut value, number, 0));
        value
    };
    Ok(vec![
        "Answers of the CUDA driver and cuBLAS: one line for each cell of backend-cuda/tests/answers.".to_owned(),
        format!(
            "device: {}, compute capability {}.{}, {} of them",
            rig.name()?,
            attribute(75),
            attribute(76),
            rig.count
        ),
        format!("date: {}", today()),
        format!("driver: CUDA {driver}, {}", kernel_module()),
        format!("cuBLAS: {library}"),
        format!("pageable memory access: {}, host page tables: {}", attribute(88), attribute(100)),
    ])
}

/// Returns the date in UTC.
fn today() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut days = now.as_secs() / 86_400;
    let mut year = 1970;
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

/// Returns the version of the kernel's module, which is that of the driver.
fn kernel_module() -> String {
    std::fs::read_to_string("/sys/module/nvidia/version")
        .map_or_else(|_| "no kernel module".to_owned(), |version| version.trim().to_owned())
}
