//! The command line.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};

use super::control::DieAt;
use super::modes;
use super::service::Mode;

/// The limit on threads. Fewer threads are faster, and the buffers of this number still fit.
const MOST_THREADS: usize = 1024;

/// The limit on workers. Fewer workers are faster, and the sockets of this number still fit.
const MOST_WORKERS: usize = 64;

const AFTER_HELP: &str = r#"Environment:
  HIGHWATER_BACKEND
                  the backend to use if --backend names none: a name, or the path of a plugin
  HIGHWATER_PLUGIN_PATH
                  folders with plugins, separated by colons, searched before those of the user and the system
  HIGHWATER_ALLOW_INSECURE_PLUGINS
                  1: load plugins that other users can change
  HIGHWATER_SHARING
                  how processes that share memory find each other, and who may open it, as key=value pairs, separated by
                  commas: rendezvous=directory:/run/highwater,openers=secret
  HIGHWATER_MOCK  describes the mock device as key=value pairs, separated by commas: memory=64MiB, latency=1ms,
                  devices=2, fail=run_plan:5 (the fifth call of run_plan fails), and more
  HIGHWATER_CONFORMANCE_SEED
                  the number from which conformance draws shapes, values and cells, to draw those of an earlier run

With --json, standard output holds one JSON object and nothing else; all other lines go to standard error. If the
command cannot do its work, the object is {"error": {"message": ..., "hint": ..., "kind": ...}}. A wrong command line
leaves standard output empty. A reader may close standard output early; the exit code is then that of the work.

Exit codes: 0 the result is good; 1 the result is bad (wrong predictions, leaks, failed cases, no usable backend);
2 the command line is wrong or the command could not do its work; 3 a worker died"#;

/// Classifies handwritten digits on a GPU or on a mock, and reports the statistics of the resource pools.
///
/// This process loads the weights of a small network once into the memory of each device that is used. It shares them with
/// its child processes, the workers, which use the devices in turn. Each thread of a worker leases a pooled handle, copies
/// images through pinned memory, and runs the layers on the device.
#[derive(Debug, Parser)]
#[command(name = "highwater", version, after_help = AFTER_HELP)]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Option<Command>,

    #[command(flatten)]
    pub(super) digits: DigitsArguments,

    /// Print one JSON object on standard output and nothing else
    #[arg(long, global = true)]
    pub(super) json: bool,

    /// Load plugins that other users can change
    #[arg(long, global = true)]
    pub(super) allow_insecure_plugins: bool,

    /// Seconds that a plugin may take to open, and the multi-process service to start [default: 10]
    #[arg(long, value_name = "S", global = true, allow_negative_numbers = true, value_parser = seconds)]
    pub(super) load_limit: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Report which backends work on this machine, and why the others do not
    Doctor,
    /// Run the conformance suite against a backend
    Conformance(ConformanceArguments),
    /// Show or keep the memory that processes share
    Ipc(IpcArguments),
    /// Run under random faults, and check that nothing is lost
    Soak(SoakArguments),
    /// Measure a part of the library against its bars
    Bench(BenchArguments),
    /// The process of the cases of `conformance`, which starts it
    #[command(hide = true)]
    ConformanceWorker(ConformanceWorkerArguments),
    /// Load a plugin and report the result as JSON; the library starts it before it loads a plugin
    #[command(hide = true)]
    Probe(ProbeArguments),
    /// A worker of the main job, which starts it
    #[command(hide = true)]
    Worker(ChildArguments),
    /// A worker of `soak ipc`, which starts it
    #[command(hide = true)]
    SoakWorker(ChildArguments),
    /// A child of a worker of `soak ipc`, which starts it
    #[command(hide = true)]
    SoakHeir,
    /// An owner of `soak ipc --owner-kills`, which starts it
    #[command(hide = true)]
    SoakOwner(ChildArguments),
    /// An owner or an heir of `soak ipc --heir-kills`, which starts it
    #[command(hide = true)]
    SoakSuccessor(ChildArguments),
    /// A process of `bench handles`, which starts it
    #[command(hide = true)]
    BenchFirstHandle(ChildArguments),
    /// A process of `bench share`, which starts it
    #[command(hide = true)]
    BenchImporter(ChildArguments),
}

#[derive(Debug, Default, Args)]
pub(super) struct DigitsArguments {
    /// Backend to use, built in or a plugin, and no other [default: a real device that works, else the mock]
    #[arg(long, value_name = "NAME")]
    pub(super) backend: Option<String>,

    /// Child processes that classify, with the weights of this process, on all devices in turn; 0: this process alone, on
    /// device 0
    #[arg(long, value_name = "N", default_value = "2", allow_negative_numbers = true, value_parser = workers)]
    pub(super) workers: usize,

    /// Threads of each worker, each with a stream, buffers and a pooled handle
    #[arg(long, value_name = "N", default_value = "2", allow_negative_numbers = true, value_parser = threads)]
    pub(super) threads: usize,

    /// Number of times to classify the test set, in the same threads [default: 1, with --scale 100]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = repeat)]
    pub(super) repeat: Option<usize>,

    /// Measure the speed of 1, 2 and 4 workers
    #[arg(long)]
    pub(super) scale: bool,

    /// Start each worker in user, network, PID, IPC and mount namespaces of its own, as in a container; needs `unshare` and a
    /// rendezvous other than abstract names (HIGHWATER_SHARING)
    #[arg(long)]
    pub(super) isolate_workers: bool,

    /// Use of NVIDIA's multi-process service, with which several processes use one GPU at the same time
    #[arg(long, value_name = "MODE", value_enum, default_value = "auto")]
    pub(super) mps: Mode,

    /// Process that started this one, with the variables of the service; this one ends with it
    #[arg(long, value_name = "PID", hide = true)]
    pub(super) launcher: Option<u32>,

    /// Make a worker kill itself before it opens the weights (`ticket`) or before it finishes image N; for tests
    #[arg(long, value_name = "N", hide = true, value_parser = die_at)]
    pub(super) die_at: Option<DieAt>,

    /// Folder with `weights.safetensors` and `test.safetensors`, instead of the built-in ones
    #[arg(long, value_name = "DIR")]
    pub(super) data: Option<PathBuf>,
}

/// The backend of a command, and of all processes that it starts.
#[derive(Debug, Args)]
pub(super) struct BackendArguments {
    /// Backend to test
    #[arg(long, value_name = "NAME", default_value = "mock")]
    pub(super) backend: String,

    /// File of the plugin to test, instead of a built-in backend
    #[arg(long, value_name = "FILE", conflicts_with = "backend")]
    pub(super) plugin: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct ConformanceArguments {
    #[command(flatten)]
    pub(super) backend: BackendArguments,

    /// Run only the cases whose name contains this text, or that prove the clause of this id
    #[arg(long, value_name = "TEXT")]
    pub(super) filter: Option<String>,

    /// List the cases and the clauses that they prove, or with --saboteurs or --mutants the mutants, and run none
    #[arg(long)]
    pub(super) list: bool,

    /// Number of rounds of the cases
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = rounds)]
    pub(super) repeat: u32,

    /// Run the cases in a random order in each round, which the seed decides [default seed: random]
    #[arg(long, value_name = "SEED", num_args = 0..=1, allow_negative_numbers = true, value_parser = seed)]
    pub(super) shuffle: Option<Option<u64>>,

    /// Seconds that a case may take; a case that takes longer fails, and its process is killed
    #[arg(long, value_name = "SECONDS", default_value = "60", allow_negative_numbers = true, value_parser = seconds)]
    pub(super) limit: u64,

    /// Write a certificate of a full run: backend, devices, versions, and the proof of each clause
    #[arg(long, value_name = "FILE")]
    pub(super) certificate: Option<PathBuf>,

    /// Run each case once more for each fallible call, with that call refused, and check that nothing leaks
    #[arg(long)]
    pub(super) fault_sweep: bool,

    /// Run the suite against mutants that break one promise each, and report the ones that it catches
    #[arg(long)]
    pub(super) saboteurs: bool,

    /// Run the suite against mutants by construction: each generic mistake, in each operation, under each condition
    #[arg(long)]
    pub(super) mutants: bool,

    /// Run the mock's race finder on known mistakes and on their corrections
    #[arg(long)]
    pub(super) races: bool,

    /// Take only every N-th refused call of --fault-sweep, or every N-th mutant of --saboteurs or --mutants
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = sample)]
    pub(super) sample: u32,

    /// Seconds after which --saboteurs or --mutants try no further mutant and skip the rest [default: unlimited]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    pub(super) total_limit: Option<u64>,

    /// Processes of --fault-sweep [default: one on a real device, else one for each processor]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = jobs)]
    pub(super) jobs: Option<usize>,
}

/// Arguments of a process of the cases.
#[derive(Debug, Args)]
pub(super) struct ConformanceWorkerArguments {
    #[command(flatten)]
    pub(super) child: ChildArguments,

    #[command(flatten)]
    pub(super) backend: BackendArguments,

    /// Mutant that makes the backend wrong
    #[arg(long, value_name = "NAME")]
    pub(super) mutant: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct SoakArguments {
    #[command(subcommand)]
    pub(super) what: Soak,
}

#[derive(Debug, Args)]
pub(super) struct IpcArguments {
    #[command(subcommand)]
    pub(super) what: Ipc,
}

#[derive(Debug, Subcommand)]
pub(super) enum Ipc {
    /// List the processes of this user that share memory: with whom, how much, on which device, and since when
    Ls,
    /// Keep shared memory beyond the death of its owner and answer its tickets, until a signal ends this process or nothing is left to keep; needs no device
    Hold(IpcHoldArguments),
}

#[derive(Debug, Args)]
pub(super) struct IpcHoldArguments {
    /// Tickets as text; each stands for its whole allocation
    #[arg(value_name = "TICKET", required = true)]
    pub(super) tickets: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Soak {
    /// Share memory among processes that are killed and stopped at random moments, and check that nothing is lost, freed early or
    /// delayed
    Ipc(SoakIpcArguments),
}

#[derive(Debug, Args)]
pub(super) struct SoakIpcArguments {
    /// Processes to kill
    #[arg(long, value_name = "N", default_value = "1000", allow_negative_numbers = true, value_parser = kills)]
    pub(super) kills: u64,

    /// Seed of the random choices [default: random]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = seed)]
    pub(super) seed: Option<u64>,

    /// Processes at the same time, of which one is stopped but never killed; with --owner-kills, processes that own memory
    #[arg(long, value_name = "N", default_value = "8", allow_negative_numbers = true, value_parser = processes)]
    pub(super) processes: usize,

    /// Instead, kill N processes whose memory this one has open, and measure the time until it is free
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = kills)]
    pub(super) owner_kills: Option<u64>,

    /// Instead, kill N processes whose memory has heirs, and measure the time until an old ticket opens again
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = kills)]
    pub(super) heir_kills: Option<u64>,

    /// Backend to use, built in or a plugin [default: the mock]
    #[arg(long, value_name = "NAME")]
    pub(super) backend: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct BenchArguments {
    #[command(subcommand)]
    pub(super) what: Bench,
}

#[derive(Debug, Subcommand)]
pub(super) enum Bench {
    /// Measure page-locked host memory: the time of requests, and the memory held after traces of requests
    Host(BenchHostArguments),
    /// Measure the device memory of streams: the time of requests, and the memory held and moved by traces of requests
    Device(BenchDeviceArguments),
    /// Measure the pool of BLAS handles: the first handles of a process, and leases
    Handles(BenchHandlesArguments),
    /// Measure sharing between two processes: a batch of many slices, and one ticket for each
    Share(BenchShareArguments),
    /// Measure waits that block no thread: the time from the end of the work to the task, and the processor time of a wake
    Waits(BenchWaitsArguments),
}

/// Options of every bench.
#[derive(Debug, Args)]
pub(super) struct BenchOptions {
    /// Backend to use, built in or a plugin, and no other [default: a real device that works, else the mock]
    #[arg(long, value_name = "NAME")]
    pub(super) backend: Option<String>,

    /// Measure only the rows with this text in their names
    #[arg(long, value_name = "TEXT")]
    pub(super) rows: Option<String>,

    /// Number of threads to measure beside 1, 4 and 16
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = threads)]
    pub(super) threads: Option<usize>,

    /// Rounds of each row of time; the value is the median
    #[arg(long, value_name = "N", default_value = "7", allow_negative_numbers = true, value_parser = rounds)]
    pub(super) rounds: u32,

    /// Milliseconds that a row of time takes in each round
    #[arg(long, value_name = "MS", default_value = "25", allow_negative_numbers = true, value_parser = milliseconds)]
    pub(super) milliseconds: u64,

    /// Peer to show beside: `auto` for PyTorch, if it is installed and the device is real, `none`, or a file of its values
    #[arg(long, value_name = "FILE", default_value = "auto", value_parser = peer)]
    pub(super) peer: PeerSource,
}

/// Options of the benches that have traces.
#[derive(Debug, Args)]
pub(super) struct BenchTraceOptions {
    /// Seeds of the distributions of memory [default: 200 of page-locked and 20 of device memory, on the mock 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = seeds)]
    pub(super) seeds: Option<u64>,

    /// Replay the trace in this file instead of the table
    #[arg(long, value_name = "FILE")]
    pub(super) replay: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct BenchHostArguments {
    #[command(flatten)]
    pub(super) options: BenchOptions,

    #[command(flatten)]
    pub(super) traces: BenchTraceOptions,

    /// Write a trace of the table to this file and measure nothing
    #[arg(long, value_name = "FILE")]
    pub(super) write_trace: Option<PathBuf>,

    /// The trace that --write-trace writes
    #[arg(long, value_name = "NAME", value_enum, default_value = "three-seeds")]
    pub(super) trace: TraceName,
}

#[derive(Debug, Args)]
pub(super) struct BenchDeviceArguments {
    #[command(flatten)]
    pub(super) options: BenchOptions,

    #[command(flatten)]
    pub(super) traces: BenchTraceOptions,
}

#[derive(Debug, Args)]
pub(super) struct BenchHandlesArguments {
    #[command(flatten)]
    pub(super) options: BenchOptions,
}

#[derive(Debug, Args)]
pub(super) struct BenchShareArguments {
    #[command(flatten)]
    pub(super) options: BenchOptions,
}

#[derive(Debug, Args)]
pub(super) struct BenchWaitsArguments {
    #[command(flatten)]
    pub(super) options: BenchOptions,
}

/// The traces of `bench host` that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TraceName {
    ThreeSeeds,
    BlocksThenOdd,
}

/// The source of the peer's values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PeerSource {
    Auto,
    None,
    File(PathBuf),
}

/// Arguments of every process that this program starts.
#[derive(Debug, Args)]
pub(super) struct ChildArguments {
    /// Process that started this one
    #[arg(long)]
    pub(super) parent: u32,
}

#[derive(Debug, Args)]
pub(super) struct ProbeArguments {
    /// Library of the plugin
    pub(super) file: PathBuf,

    /// Open its backend too
    #[arg(long)]
    pub(super) open: bool,

    /// Process that started this one; this one ends with it
    #[arg(long)]
    pub(super) parent: Option<u32>,
}

fn number(text: &str, what: &str, range: RangeInclusive<usize>) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("expected a number of {what} from {} to {}", range.start(), range.end()))
}

fn workers(text: &str) -> Result<usize, String> {
    number(text, "workers", 0..=MOST_WORKERS)
}

fn threads(text: &str) -> Result<usize, String> {
    number(text, "threads", 1..=MOST_THREADS)
}

fn repeat(text: &str) -> Result<usize, String> {
    // The total number of images then fits a u64.
    number(text, "passes", 1..=u32::MAX as usize)
}

fn rounds(text: &str) -> Result<u32, String> {
    Ok(number(text, "rounds", 1..=1_000_000)? as u32)
}

fn seed(text: &str) -> Result<u64, String> {
    let expected = || format!("expected a number from 0 to {}; without a number, the seed is random", u64::MAX);
    text.parse().map_err(|_| expected())
}

fn sample(text: &str) -> Result<u32, String> {
    let sample = number(text, "calls or mutants", 1..=1_000_000);
    Ok(sample.map_err(|expected| format!("{expected}; 1 takes each of them, and so does a run without `--sample`"))?
        as u32)
}

fn jobs(text: &str) -> Result<usize, String> {
    number(text, "processes", 1..=64)
}

fn kills(text: &str) -> Result<u64, String> {
    Ok(number(text, "kills", 1..=1_000_000)? as u64)
}

fn processes(text: &str) -> Result<usize, String> {
    number(text, "processes", 2..=32)
}

fn seconds(text: &str) -> Result<u64, String> {
    Ok(number(text, "seconds", 1..=3600)? as u64)
}

fn milliseconds(text: &str) -> Result<u64, String> {
    Ok(number(text, "milliseconds", 1..=60_000)? as u64)
}

fn seeds(text: &str) -> Result<u64, String> {
    Ok(number(text, "seeds", 1..=1_000_000)? as u64)
}

#[allow(clippy::unnecessary_wraps, reason = "clap expects a result")]
fn peer(text: &str) -> Result<PeerSource, String> {
    Ok(match text {
        "auto" => PeerSource::Auto,
        "none" => PeerSource::None,
        file => PeerSource::File(file.into()),
    })
}

fn die_at(text: &str) -> Result<DieAt, String> {
    match text {
        "ticket" => Ok(DieAt::Ticket),
        image => image.parse().map(DieAt::Image).map_err(|_| "expected the number of an image, or `ticket`".into()),
    }
}

/// Parses the arguments of this process.
pub(super) fn parse() -> Result<Arguments, clap::Error> {
    parse_from(std::env::args_os())
}

pub(super) fn parse_from<T: Into<std::ffi::OsString> + Clone>(
    arguments: impl IntoIterator<Item = T>,
) -> Result<Arguments, clap::Error> {
    let mut command = Arguments::command();
    let matches = command.try_get_matches_from_mut(arguments)?;
    let (mut path, mut inner, mut chosen) = (Vec::new(), &mut command, &matches);
    loop {
        if let Some(fault) = modes::fault(&path.join(" "), inner, chosen) {
            return Err(inner.error(ErrorKind::ArgumentConflict, fault));
        }
        let Some((name, further)) = chosen.subcommand() else { break };
        path.push(name);
        chosen = further;
        inner = inner.find_subcommand_mut(name).ok_or_else(|| clap::Error::new(ErrorKind::InvalidSubcommand))?;
    }
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Arguments, String> {
        parse_from(line.split_whitespace()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn json_stands_before_or_after_the_command() {
        for line in ["highwater --json", "highwater --json doctor", "highwater doctor --json"] {
            assert!(parsed(line).unwrap().json, "{line}");
        }
        assert!(!parsed("highwater doctor").unwrap().json);
    }

    #[test]
    fn options_of_the_main_job_are_refused_in_front_of_a_command() {
        let error = parsed("highwater --backend cuda conformance").unwrap_err();
        assert!(error.contains("`--backend` in front of `conformance`"), "{error}");
        let Some(Command::Conformance(arguments)) = parsed("highwater conformance --backend cuda").unwrap().command
        else {
            panic!("another command");
        };
        assert_eq!(arguments.backend.backend, "cuda");
    }

    #[test]
    fn numbers_are_checked_and_the_range_is_named() {
        for bad in ["0", "-1", "1025", "many", ""] {
            assert!(threads(bad).unwrap_err().contains("from 1 to 1024"), "{bad:?}");
        }
        assert_eq!(threads("1024"), Ok(1024));
        assert!(parsed("highwater --threads 0").unwrap_err().contains("from 1 to 1024"));
        assert!(parsed("highwater --repeat 0").unwrap_err().contains("number of passes"));
        assert_eq!((workers("0"), workers("64")), (Ok(0), Ok(64)));
        assert!(parsed("highwater --workers 65").unwrap_err().contains("number of workers from 0 to 64"));
        assert!(parsed("highwater conformance --repeat 0").unwrap_err().contains("number of rounds from 1"));
        assert!(parsed("highwater conformance --limit 0").unwrap_err().contains("number of seconds from 1 to 3600"));
        assert!(
            parsed("highwater conformance --fault-sweep --sample -3")
                .unwrap_err()
                .contains("number of calls or mutants from 1")
        );
        assert!(
            parsed("highwater conformance --fault-sweep --jobs 65").unwrap_err().contains("processes from 1 to 64")
        );
        assert!(parsed("highwater soak ipc --kills 0").unwrap_err().contains("number of kills from 1"));
    }

    #[test]
    fn a_shuffle_has_a_seed_or_takes_one() {
        let shuffle = |line: &str| match parsed(line).unwrap().command {
            Some(Command::Conformance(arguments)) => arguments.shuffle,
            other => panic!("{other:?}"),
        };
        assert_eq!(shuffle("highwater conformance"), None);
        assert_eq!(shuffle("highwater conformance --shuffle"), Some(None));
        assert_eq!(shuffle("highwater conformance --shuffle 7 --json"), Some(Some(7)));
        for bad in ["soon", "-1", "18446744073709551616"] {
            let error = parsed(&format!("highwater conformance --shuffle {bad}")).unwrap_err();
            assert!(error.contains("expected a number from 0 to 18446744073709551615"), "{error}");
        }
        // Failed before: `-1` was called an unexpected argument, and the range was not named.
        for bad in ["-1", "18446744073709551616", "x"] {
            let error = parsed(&format!("highwater soak ipc --seed {bad}")).unwrap_err();
            assert!(error.contains("expected a number from 0 to 18446744073709551615; without"), "{error}");
        }
        assert!(
            parsed("highwater conformance --fault-sweep --sample 0").unwrap_err().contains("; 1 takes each of them")
        );
    }

    #[test]
    fn a_sweep_is_neither_shuffled_nor_certified() {
        for other in ["--repeat 2", "--shuffle", "--certificate there.json"] {
            let error = parsed(&format!("highwater conformance --fault-sweep {other}")).unwrap_err();
            assert!(error.contains("has no effect with `--fault-sweep`"), "{error}");
        }
        assert!(parsed("highwater conformance --sample 2").unwrap_err().contains("--fault-sweep"));
        assert!(parsed("highwater conformance --fault-sweep --sample 2 --jobs 1 --filter ids.").is_ok());
    }

    #[test]
    fn a_worker_dies_at_an_image_or_with_the_ticket() {
        let at = |text| parsed(&format!("highwater --die-at {text}")).map(|arguments| arguments.digits.die_at);
        assert_eq!((at("7").unwrap(), at("ticket").unwrap()), (Some(DieAt::Image(7)), Some(DieAt::Ticket)));
        assert!(at("dawn").unwrap_err().contains("or `ticket`"));
        assert!(parsed("highwater --scale --die-at 7").is_err());
    }
}
