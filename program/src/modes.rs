//! The modes of each command, and the options that have an effect in each. Every other option is refused there, because it would be
//! ignored.

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

/// A mode of a command.
struct Mode {
    /// The command without the program: `soak ipc`. Empty for the main job.
    command: &'static str,
    /// The options that together choose the mode. `=` precedes a value. Empty for the default mode.
    chosen_by: &'static [&'static str],
    /// The further options that have an effect.
    options: &'static [&'static str],
}

/// The modes of all commands. The first mode of a command that is chosen counts. A command without modes ignores no option.
const MODES: &[Mode] = &[
    Mode {
        command: "",
        chosen_by: &["scale"],
        options: &["backend", "threads", "repeat", "isolate-workers", "mps", "launcher", "data"],
    },
    Mode {
        command: "",
        chosen_by: &["workers=0"],
        options: &["backend", "threads", "repeat", "mps", "launcher", "data"],
    },
    Mode {
        command: "",
        chosen_by: &[],
        options: &["backend", "workers", "threads", "repeat", "isolate-workers", "mps", "launcher", "die-at", "data"],
    },
    Mode { command: "conformance", chosen_by: &["races"], options: &[] },
    Mode { command: "conformance", chosen_by: &["list", "saboteurs"], options: &["filter"] },
    Mode { command: "conformance", chosen_by: &["list", "mutants"], options: &["filter"] },
    Mode { command: "conformance", chosen_by: &["list"], options: &["filter"] },
    Mode {
        command: "conformance",
        chosen_by: &["fault-sweep"],
        options: &["backend", "plugin", "filter", "limit", "sample", "jobs"],
    },
    Mode {
        command: "conformance",
        chosen_by: &["saboteurs"],
        options: &["backend", "plugin", "filter", "limit", "sample", "total-limit"],
    },
    Mode {
        command: "conformance",
        chosen_by: &["mutants"],
        options: &["backend", "plugin", "filter", "limit", "sample", "total-limit"],
    },
    Mode {
        command: "conformance",
        chosen_by: &[],
        options: &["backend", "plugin", "filter", "repeat", "shuffle", "limit", "certificate"],
    },
    Mode { command: "soak ipc", chosen_by: &["owner-kills"], options: &["seed", "processes", "backend"] },
    Mode { command: "soak ipc", chosen_by: &["heir-kills"], options: &["seed", "backend"] },
    Mode { command: "soak ipc", chosen_by: &[], options: &["kills", "seed", "processes", "backend"] },
    Mode { command: "bench host", chosen_by: &["write-trace"], options: &["trace"] },
    Mode { command: "bench host", chosen_by: &["replay"], options: &["backend"] },
    Mode {
        command: "bench host",
        chosen_by: &[],
        options: &["backend", "rows", "threads", "rounds", "milliseconds", "peer", "seeds"],
    },
    Mode { command: "bench device", chosen_by: &["replay"], options: &["backend"] },
    Mode {
        command: "bench device",
        chosen_by: &[],
        options: &["backend", "rows", "threads", "rounds", "milliseconds", "peer", "seeds"],
    },
    Mode { command: "bench share", chosen_by: &[], options: &["backend", "rows", "rounds", "peer"] },
    Mode { command: "bench waits", chosen_by: &[], options: &["backend", "rows", "rounds", "peer"] },
];

impl Mode {
    /// Returns whether a command line chooses this mode.
    fn is_chosen(&self, matches: &ArgMatches) -> bool {
        self.chosen_by.iter().all(|choice| {
            let (option, value) =
                choice.split_once('=').map_or((*choice, None), |(option, value)| (option, Some(value)));
            let id = id(option);
            is_given(matches, &id)
                && value
                    .is_none_or(|value| matches.get_raw(&id).is_some_and(|mut given| given.all(|given| given == value)))
        })
    }

    /// Returns whether an option has an effect in this mode.
    fn has(&self, option: &str) -> bool {
        let chooses = |choice: &&str| choice.split('=').next() == Some(option);
        self.chosen_by.iter().any(chooses) || self.options.contains(&option)
    }

    /// Returns the options that choose it, as on a command line: `--list --mutants`.
    fn line(&self) -> String {
        let options = self.chosen_by.iter().map(|choice| format!("--{}", choice.replace('=', " ")));
        options.collect::<Vec<_>>().join(" ")
    }
}

/// Returns the id of an option in the parser.
fn id(option: &str) -> String {
    option.replace('-', "_")
}

fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

/// Returns the options of a command that are not those of every command, by their long names.
fn options(command: &Command) -> impl Iterator<Item = &str> {
    let is_own = |option: &&Arg| !option.is_global_set() && !["help", "version"].contains(&option.get_id().as_str());
    command.get_arguments().filter(is_own).filter_map(Arg::get_long)
}

/// Returns a message about the first option that has no effect, if there is one. `path` is the command without the program.
pub(super) fn fault(path: &str, command: &Command, matches: &ArgMatches) -> Option<String> {
    if let Some((name, _)) = matches.subcommand() {
        // These options precede a further command.
        let given = options(command).find(|option| is_given(matches, &id(option)));
        return given
            .map(|option| format!("`--{option}` in front of `{name}` has no effect; see `highwater {name} --help`"));
    }
    let mode = MODES.iter().find(|mode| mode.command == path && mode.is_chosen(matches))?;
    let option = options(command).find(|option| is_given(matches, &id(option)) && !mode.has(option))?;
    let useful: Vec<&Mode> = MODES.iter().filter(|other| other.command == path && other.has(option)).collect();
    let lines = useful.iter().map(|mode| format!("`{}`", mode.line())).collect::<Vec<_>>().join(", ");
    Some(match (mode.chosen_by.is_empty(), useful.iter().any(|mode| mode.chosen_by.is_empty())) {
        (false, true) => format!("`--{option}` has no effect with `{}`; leave out one of them", mode.line()),
        (false, false) if !useful.is_empty() => {
            format!("`--{option}` has no effect with `{}`; it has one with {lines}", mode.line())
        }
        _ if !useful.is_empty() => {
            format!("`--{option}` has an effect only with {lines}; add it, or leave out `--{option}`")
        }
        _ => format!("`--{option}` has no effect on `highwater {path}`; leave it out"),
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::super::args::{Arguments, parse_from};
    use super::*;

    /// Returns the command of a path.
    fn command<'c>(root: &'c Command, path: &str) -> &'c Command {
        path.split_whitespace().fold(root, |command, name| command.find_subcommand(name).unwrap())
    }

    /// Returns an option with a value that the parser accepts.
    fn with_value(command: &Command, option: &str) -> Vec<String> {
        let argument = command.get_arguments().find(|argument| argument.get_long() == Some(option)).unwrap();
        let value = match option {
            "mps" => "off",
            "trace" => "three-seeds",
            "processes" => "2",
            _ => "1",
        };
        let takes_value = argument.get_action().takes_values();
        std::iter::once(format!("--{option}")).chain(takes_value.then(|| value.to_owned())).collect()
    }

    /// Failed before: `--jobs --list`, `--limit --list`, `--workers 0 --isolate-workers` and others were accepted and ignored.
    #[test]
    fn each_option_is_accepted_in_the_modes_in_which_it_has_an_effect_and_in_no_other() {
        let mut root = Arguments::command();
        root.build();
        let mut pairs = 0;
        for mode in MODES {
            let command = command(&root, mode.command);
            for option in options(command) {
                let chosen = mode.chosen_by.iter().any(|choice| choice.split('=').next() == Some(option));
                let mut line: Vec<String> = vec!["highwater".into()];
                line.extend(mode.command.split_whitespace().map(str::to_owned));
                for choice in mode.chosen_by {
                    match choice.split_once('=') {
                        Some((option, value)) => line.extend([format!("--{option}"), value.to_owned()]),
                        None => line.extend(with_value(command, choice)),
                    }
                }
                if !chosen {
                    line.extend(with_value(command, option));
                }
                // An option may choose another mode, which then decides.
                let counts = MODES.iter().filter(|other| other.command == mode.command).find(|other| {
                    other.chosen_by.iter().all(|choice| {
                        let first = choice.split('=').next().unwrap();
                        mode.chosen_by.contains(choice) || (first == option && !choice.contains('='))
                    })
                });
                let counts = counts.unwrap();
                let given = mode.chosen_by.iter().map(|choice| choice.split('=').next().unwrap()).chain([option]);
                let expected = given.clone().all(|given| counts.has(given));
                let parsed = parse_from(&line);
                assert_eq!(parsed.is_ok(), expected, "{line:?}: {:?}", parsed.err().map(|error| error.to_string()));
                if let Err(error) = parsed {
                    let text = error.to_string();
                    let says = text.contains("no effect") || text.contains("has an effect only with");
                    assert!(says && text.contains("leave") | text.contains("it has one with"), "{text}");
                }
                pairs += 1;
            }
        }
        assert!(pairs > 150, "only {pairs} pairs");
    }

    #[test]
    fn the_table_names_each_option_and_no_other() {
        let mut root = Arguments::command();
        root.build();
        for mode in MODES {
            let command = command(&root, mode.command);
            let named =
                mode.chosen_by.iter().filter_map(|choice| choice.split('=').next()).chain(mode.options.iter().copied());
            for option in named {
                assert!(options(command).any(|known| known == option), "`{}` has no option `--{option}`", mode.command);
            }
        }
        // `bench share` and `bench waits` have the options of every bench.
        let without = |command: &str, option: &str| {
            ["bench share", "bench waits"].contains(&command) && ["threads", "milliseconds"].contains(&option)
        };
        for path in MODES.iter().map(|mode| mode.command) {
            for option in options(command(&root, path)).filter(|option| !without(path, option)) {
                let has = MODES.iter().any(|mode| mode.command == path && mode.has(option));
                assert!(has, "`--{option}` of `{path}` is in no mode: add it to the table");
            }
        }
    }

    #[test]
    fn the_message_names_the_modes_in_which_the_option_has_an_effect() {
        let said = |line: &str| parse_from(line.split_whitespace()).unwrap_err().to_string();
        for (line, text) in [
            (
                "highwater conformance --jobs 2 --list",
                "`--jobs` has no effect with `--list`; it has one with `--fault-sweep`",
            ),
            (
                "highwater conformance --jobs 2 --races",
                "`--jobs` has no effect with `--races`; it has one with `--fault-sweep`",
            ),
            ("highwater conformance --limit 9 --list", "`--limit` has no effect with `--list`; leave out one of them"),
            (
                "highwater conformance --jobs 2",
                "`--jobs` has an effect only with `--fault-sweep`; add it, or leave out `--jobs`",
            ),
            (
                "highwater --workers 0 --isolate-workers",
                "`--isolate-workers` has no effect with `--workers 0`; leave out one",
            ),
            ("highwater bench share --threads 2", "`--threads` has no effect on `highwater bench share`; leave it out"),
            ("highwater bench waits --threads 2", "`--threads` has no effect on `highwater bench waits`; leave it out"),
        ] {
            assert!(said(line).contains(text), "{line}: {}", said(line));
        }
    }
}
