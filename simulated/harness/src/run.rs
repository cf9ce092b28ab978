//! Runs rules in processes, with a limit of time, and tells what became of them.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::Answer;
use crate::log::{Log, MARK, tell};

/// The process that a rule runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// One with the other rules of its kind: it leaves nothing behind that they could see.
    Shared,
    /// One of its own.
    Own,
}

/// A rule of a vendor's libraries, shown by the results of calls. `N` names its requirements.
#[derive(Debug)]
pub struct Rule<N: 'static> {
    /// By which a rule is chosen.
    pub name: &'static str,
    /// What the libraries do.
    pub statement: &'static str,
    /// What has to be there.
    pub needs: N,
    /// Where it runs.
    pub process: Process,
    /// Observes the libraries.
    pub check: fn(&mut Log) -> Answer,
}

/// The rules of a module. Their needs are variants of the type `Needs` in the root of the calling crate.
#[allow(clippy::crate_in_macro_def, reason = "the needs are the caller's")]
#[macro_export]
macro_rules! rules {
    ($($name:literal $needs:ident $process:ident $check:path: $statement:literal;)*) => {
        pub(crate) const RULES: &[$crate::run::Rule<crate::Needs>] = &[$($crate::run::Rule {
            name: $name,
            statement: $statement,
            needs: crate::Needs::$needs,
            process: $crate::run::Process::$process,
            check: $check,
        }),*];
    };
}

/// Rules over one installation.
#[derive(Debug)]
pub struct Suite<N: 'static> {
    /// The rules of each module.
    pub rules: Vec<&'static [Rule<N>]>,
    /// Finds the library without which no rule runs.
    pub driver: fn() -> Answer,
    /// What a program without that library prints.
    pub advice: &'static str,
    /// Returns why a need is not met.
    pub lacking: fn(&N) -> Option<String>,
    /// Whether a need is met on every machine of the vendor.
    pub is_met_everywhere: fn(&N) -> bool,
    /// Runs before each rule of a shared process.
    pub begin: fn() -> Answer,
    /// Runs after each rule of a shared process. What a rule left in the device would be seen by the next.
    pub end: fn() -> Answer,
    /// Variables of the processes that run rules, where the caller has not set them.
    pub environment: &'static [(&'static str, &'static str)],
}

/// Set in a process that runs rules for another: their names.
const NAMES: &str = "HIGHWATER_RULES_NAMES";
/// Set to `required`, makes a rule that is left out a failure.
const REQUIRED: &str = "HIGHWATER_RULES";
/// How long a rule may take between two of its observations. The first use of a library on a cold machine is slow.
const LIMIT: Duration = Duration::from_secs(90);

/// What became of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Kept,
    Broken(String),
    LeftOut(String),
}

#[derive(Debug)]
struct Result {
    outcome: Outcome,
    /// What was seen, its value, and the value that is known to be right.
    observations: Vec<(String, String, Option<String>)>,
}

struct Options {
    list: bool,
    json: Option<std::path::PathBuf>,
    filters: Vec<String>,
}

fn options() -> Answer<Options> {
    let mut options = Options { list: false, json: None, filters: Vec::new() };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--list" => options.list = true,
            "--json" => options.json = Some(arguments.next().ok_or("`--json` needs the name of a file")?.into()),
            // What `cargo test` and its users pass to every test program.
            "--nocapture" | "--quiet" | "-q" | "--test" | "--exact" => {}
            other if other.starts_with("--test-threads") || other.starts_with("--format") => {}
            other if other.starts_with('-') => return Err(format!("`{other}` is no option of this program")),
            _ => options.filters.push(argument),
        }
    }
    Ok(options)
}

impl<N> Suite<N> {
    /// Runs the rules that the arguments of the program choose.
    pub fn main(&self) -> ExitCode {
        // Rules that share a process stand together.
        let mut rules: Vec<_> = self.rules.iter().flat_map(|rules| rules.iter()).collect();
        rules.sort_by_key(|rule| rule.process == Process::Own);
        match std::env::var(NAMES) {
            Ok(names) => serve(self, &rules, &names),
            Err(_) => choose(self, &rules),
        }
    }
}

fn choose<N>(suite: &Suite<N>, rules: &[&'static Rule<N>]) -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let wanted =
        |rule: &Rule<N>| options.filters.is_empty() || options.filters.iter().any(|f| rule.name.contains(&**f));
    let rules: Vec<_> = rules.iter().copied().filter(|rule| wanted(rule)).collect();
    if options.list {
        for rule in &rules {
            println!("{}: {}", rule.name, rule.statement);
        }
        return ExitCode::SUCCESS;
    }
    let required = std::env::var(REQUIRED).is_ok_and(|value| value == "required");
    if let Err(reason) = (suite.driver)() {
        println!("not run: {reason}");
        println!("{}", suite.advice);
        return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    if rules.is_empty() {
        println!("no rule has such a name; `--list` tells all");
        return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let results = run(suite.environment, &rules);
    let broken = summary(&rules, &results);
    if let Some(file) = &options.json
        && let Err(error) = std::fs::write(file, json(&rules, &results))
    {
        eprintln!("cannot write `{}`: {error}", file.display());
        return ExitCode::FAILURE;
    }
    // Not everybody has two devices.
    let missed = rules
        .iter()
        .zip(&results)
        .any(|(rule, result)| (suite.is_met_everywhere)(&rule.needs) && matches!(result.outcome, Outcome::LeftOut(_)));
    if broken > 0 || (required && missed) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn summary<N>(rules: &[&'static Rule<N>], results: &[Result]) -> usize {
    let count = |is: fn(&Outcome) -> bool| results.iter().filter(|result| is(&result.outcome)).count();
    let (broken, left_out) = (
        count(|outcome| matches!(outcome, Outcome::Broken(_))),
        count(|outcome| matches!(outcome, Outcome::LeftOut(_))),
    );
    if broken > 0 {
        println!("\nbroken:");
    }
    for (rule, result) in rules.iter().zip(results) {
        if let Outcome::Broken(reason) = &result.outcome {
            println!("  {}: {}\n    {reason}", rule.name, rule.statement);
        }
    }
    let observations = results.iter().flat_map(|result| &result.observations);
    let asserted = observations.clone().filter(|observation| observation.2.is_some()).count();
    println!(
        "\n{} rules: {} kept, {broken} broken, {left_out} left out; {} observations, {asserted} of them with a known value",
        rules.len(),
        rules.len() - broken - left_out,
        observations.count()
    );
    broken
}

fn json<N>(rules: &[&'static Rule<N>], results: &[Result]) -> String {
    let mut all = serde_json::Map::new();
    let mut sorted: Vec<_> = rules.iter().zip(results).collect();
    sorted.sort_by_key(|(rule, _)| rule.name);
    for (rule, result) in sorted {
        let line = |(what, seen, expected): &(String, String, Option<String>)| {
            serde_json::Value::from(match expected {
                Some(expected) if expected == seen => format!("{what}: {seen}"),
                Some(expected) => format!("{what}: {seen} (not {expected})"),
                None => format!("{what}: {seen} (observed)"),
            })
        };
        let outcome = match &result.outcome {
            Outcome::Kept => "kept".to_owned(),
            Outcome::Broken(_) => "broken".to_owned(),
            Outcome::LeftOut(reason) => format!("left out: {reason}"),
        };
        let lines: Vec<_> =
            std::iter::once(outcome.into()).chain(result.observations.iter().map(line)).collect::<Vec<_>>();
        all.insert(rule.name.to_owned(), lines.into());
    }
    let mut text = format!("{:#}", serde_json::Value::from(all));
    text.push('\n');
    text
}

/// A process that runs rules.
struct Server {
    child: Child,
    lines: Receiver<String>,
}

impl Server {
    fn start(environment: &[(&str, &str)], names: &[&str]) -> Answer<Self> {
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(own);
        command
            .envs(environment.iter().filter(|(name, _)| std::env::var_os(name).is_none()).copied())
            .env(NAMES, names.join(","))
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start this program again: {error}"))?;
        let (sender, lines) = channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).split(b'\n').map_while(std::io::Result::ok) {
                    let line = String::from_utf8_lossy(&line).into_owned();
                    match line.split_once(MARK) {
                        Some((_, told)) => {
                            if sender.send(told.to_owned()).is_err() {
                                return;
                            }
                        }
                        None => println!("  | {line}"),
                    }
                }
            });
        }
        Ok(Self { child, lines })
    }

    fn stop(&mut self) -> String {
        // It may have ended by itself; there is nothing to be done about one that cannot be stopped.
        let _ = self.child.kill();
        self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }

    fn ended(&mut self) -> String {
        self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

fn run<N>(environment: &[(&str, &str)], rules: &[&'static Rule<N>]) -> Vec<Result> {
    let mut results = Vec::new();
    let mut waiting: VecDeque<&'static Rule<N>> = rules.iter().copied().collect();
    while let Some(first) = waiting.front() {
        let together = match first.process {
            Process::Own => 1,
            Process::Shared => waiting.iter().take_while(|rule| rule.process == Process::Shared).count(),
        };
        let names: Vec<_> = waiting.iter().take(together).map(|rule| rule.name).collect();
        let mut server = match Server::start(environment, &names) {
            Ok(server) => server,
            Err(error) => {
                let rule = waiting.pop_front();
                print(rule, results.len() + 1, rules.len(), &Outcome::Broken(error.clone()));
                results.push(Result { outcome: Outcome::Broken(error), observations: Vec::new() });
                continue;
            }
        };
        // A process that ended or blocked in the midst of its rules has spoilt one of them; the others get another.
        for _ in 0..together {
            let (result, goes_on) = one(&mut server);
            let rule = waiting.pop_front();
            print(rule, results.len() + 1, rules.len(), &result.outcome);
            // A broken rule may have left an open capture or a lost context behind.
            let spoilt = !goes_on || matches!(result.outcome, Outcome::Broken(_));
            results.push(result);
            if spoilt {
                break;
            }
        }
        server.stop();
    }
    results
}

/// Listens to a process until its next rule is done. False when the process is gone.
fn one(server: &mut Server) -> (Result, bool) {
    let mut observations = Vec::new();
    loop {
        let told = match server.lines.recv_timeout(LIMIT) {
            Ok(told) => told,
            Err(error) => {
                let reason = match error {
                    RecvTimeoutError::Timeout => {
                        server.stop();
                        format!("no word for {} s: it was stopped", LIMIT.as_secs())
                    }
                    RecvTimeoutError::Disconnected => format!("its process ended early, with {}", server.ended()),
                };
                return (Result { outcome: Outcome::Broken(reason), observations }, false);
            }
        };
        match told.split('\t').collect::<Vec<_>>()[..] {
            ["expected", what, seen, expected] => {
                observations.push((what.to_owned(), seen.to_owned(), Some(expected.to_owned())));
            }
            ["observed", what, seen] => observations.push((what.to_owned(), seen.to_owned(), None)),
            ["kept"] => return (Result { outcome: Outcome::Kept, observations }, true),
            ["broken", reason] => {
                return (Result { outcome: Outcome::Broken(reason.to_owned()), observations }, true);
            }
            ["left out", reason] => {
                return (Result { outcome: Outcome::LeftOut(reason.to_owned()), observations }, true);
            }
            _ => println!("  | {told}"),
        }
    }
}

fn print<N>(rule: Option<&'static Rule<N>>, number: usize, of: usize, outcome: &Outcome) {
    let name = rule.map_or("", |rule| rule.name);
    match outcome {
        Outcome::Kept => println!("[{number:>3}/{of}] kept      {name}"),
        Outcome::Broken(reason) => println!("[{number:>3}/{of}] BROKEN    {name}: {reason}"),
        Outcome::LeftOut(reason) => println!("[{number:>3}/{of}] left out  {name}: {reason}"),
    }
}

/// Runs rules for the process that started this one.
fn serve<N>(suite: &Suite<N>, rules: &[&'static Rule<N>], names: &str) -> ExitCode {
    for name in names.split(',') {
        let Some(rule) = rules.iter().find(|rule| rule.name == name) else { return ExitCode::FAILURE };
        if let Some(reason) = (suite.lacking)(&rule.needs) {
            tell(&["left out", &reason]);
            continue;
        }
        let mut log = Log::default();
        let started = if rule.process == Process::Shared { (suite.begin)() } else { Ok(()) };
        let ended = started.and_then(|()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (rule.check)(&mut log)))
                .unwrap_or_else(|_| Err("the check itself panicked".to_owned()))
        });
        let ended = ended.and_then(|()| match rule.process {
            Process::Shared => (suite.end)(),
            Process::Own => Ok(()),
        });
        match log.finish(ended) {
            Ok(()) => tell(&["kept"]),
            Err(reason) => tell(&["broken", &reason]),
        }
    }
    ExitCode::SUCCESS
}
