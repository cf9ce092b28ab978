//! `highwater conformance`: runs, rounds, cases that hang or die, certificates, and the fault sweep.

use std::collections::BTreeSet;
use std::fs;
use std::process::Output;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::output::{command_on, highwater, highwater_on, run_to_its_end, scratch_folder, wait_until};
use crate::started::Process;

#[test]
fn conformance_counts_its_cases() {
    let object = highwater(&["conformance", "--backend", "mock", "--filter", "copies.", "--json"]).ended(0).object();
    assert_eq!(object["backend"], "mock");
    let integer = |key: &str| object[key].as_u64().unwrap();
    assert!(integer("passed") > 0 && integer("failed") == 0, "{object}");
    assert_eq!(
        integer("cases"),
        integer("passed") + integer("failed") + integer("skipped") + integer("expected_failures")
    );
    assert_eq!(object["skips"].as_array().unwrap().len() as u64, integer("skipped"));
}

#[test]
fn conformance_starts_the_program_again_for_cases_about_two_processes() {
    let object =
        highwater(&["conformance", "--backend", "mock", "--filter", "sharing.devices_", "--json"]).ended(0).object();
    assert_eq!((&object["passed"], &object["cases"]), (&1.into(), &1.into()), "{object}");
}

#[test]
fn conformance_fails_where_a_promise_is_broken() {
    let arguments = ["conformance", "--backend", "mock", "--filter", "fills."];
    let object = highwater_on("fail=fill:1", &[&arguments[..], &["--json"]].concat()).ended(1).object();
    assert_eq!(object["failed"], 1, "{object}");
    let failure = &object["failures"][0];
    assert!(failure["case"].as_str().unwrap().starts_with("fills."), "{failure}");
    assert!(failure["message"].as_str().unwrap().contains("fill"), "{failure}");
    let table = highwater_on("fail=fill:1", &arguments).ended(1);
    assert!(table.stdout.contains("1 failed"), "{}", table.stdout);
}

#[test]
fn conformance_says_why_it_skips_and_names_the_clause_of_a_failure_at_once() {
    let run = highwater_on("gemm-f16=off,gemm-bf16=off,fail=copy:1", &["conformance", "--filter", "gemm."]);
    let failed =
        run.stderr.lines().find(|line| line.starts_with("failed: ")).unwrap_or_else(|| panic!("{}", run.stderr));
    assert!(failed.contains(" [") && failed.contains("]: "), "{failed}");
    let skips: Vec<&str> = run.stdout.lines().filter(|line| line.starts_with("skipped: ")).collect();
    let of = |reason: &str| *skips.iter().find(|line| line.contains(reason)).unwrap_or_else(|| panic!("{skips:?}"));
    assert!(of("the capability `gemm_f16` is false: ").contains("gemm.multiplies_f16"), "{skips:?}");
    assert!(!run.stdout.contains("as expected"), "{}", run.stdout);
}

#[test]
fn conformance_lists_cases_and_clauses_and_runs_none() {
    let arguments = ["conformance", "--list", "--filter", "copy.exact"];
    let run = highwater(&arguments).ended(0);
    let line = |start: &str| run.stdout.lines().find(|line| line.starts_with(start)).map(str::to_owned);
    assert!(line("copies.").is_some_and(|line| line.contains("[copy.exact")), "{}", run.stdout);
    let clause = line("copy.exact (Backend::copy): exactly `bytes` bytes arrive");
    assert!(clause.is_some(), "{}", run.stdout);
    let object = highwater(&[&arguments[..], &["--json"]].concat()).object();
    let cases = object["cases"].as_array().unwrap();
    assert!(
        !cases.is_empty() && cases.iter().all(|case| case["clauses"].to_string().contains("copy.exact")),
        "{object}"
    );
    assert!(object["clauses"].to_string().contains("exactly `bytes` bytes arrive"), "{object}");
    // Without a filter, the list is complete.
    let all = highwater(&["conformance", "--list", "--json"]).object();
    assert!(all["cases"].as_array().unwrap().len() > 300 && all["clauses"].as_array().unwrap().len() > 90);
    assert_eq!(highwater(&["conformance", "--list", "--races"]).code, Some(2));
    // With `--saboteurs`, it names the mutants.
    let mutants = highwater(&["conformance", "--saboteurs", "--list", "--filter", "memory.zero"]);
    assert!(mutants.stdout.starts_with("nothing-allocated [memory.zero] "), "{}", mutants.stdout);
    let mutants = highwater(&["conformance", "--saboteurs", "--list", "--json"]).object();
    assert!(mutants["saboteurs"].as_array().unwrap().len() > 300, "{mutants}");
}

#[test]
fn conformance_draws_from_the_number_of_the_environment() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let run_with = |seed: &OsStr, arguments: &[&str]| {
        let mut command = command_on("devices=1", &[&["conformance", "--filter", "identity."], arguments].concat());
        let child = command.env("HIGHWATER_CONFORMANCE_SEED", seed).spawn().unwrap();
        run_to_its_end(child, arguments, "that draws from a number")
    };
    let run = run_with(OsStr::new("7"), &[]).ended(0);
    assert!(run.stderr.contains("drawn from 7 (HIGHWATER_CONFORMANCE_SEED)"), "{}", run.stderr);
    for bad in [OsStr::new("x"), OsStr::from_bytes(b"7\xff")] {
        let run = run_with(bad, &[]).ended(2);
        assert!(run.stderr.contains("HIGHWATER_CONFORMANCE_SEED is `"), "{}", run.stderr);
        // A list draws nothing.
        run_with(bad, &["--list"]).ended(0);
    }
}

#[test]
fn conformance_without_a_matching_case_is_an_error() {
    highwater(&["conformance", "--filter", "no such case"]).assert_error(&["`no such case`", "name a part of a case"]);
    let run = highwater(&["conformance", "--filter", "no such case", "--json"]);
    run.assert_error(&["`no such case`"]);
    assert_eq!(run.object()["error"]["kind"], "invalid argument");
}

/// A run of the suite in which every copy and fill takes longer than any test.
const HANGING: &str = "latency=1000s";

#[test]
fn conformance_kills_a_case_that_does_not_end_and_goes_on() {
    // The first of them hangs. The others work on no stream, and pass in a new process.
    let arguments = ["conformance", "--filter", "ids.st", "--limit", "1", "--json"];
    let object = highwater_on(HANGING, &arguments).ended(1).object();
    assert_eq!((&object["failed"], &object["passed"]), (&1.into(), &3.into()), "{object}");
    let failure = &object["failures"][0];
    assert_eq!(failure["case"], "ids.stale_streams_are_refused", "{object}");
    assert_eq!(failure["message"], "it did not end within 1 s (`--limit`), so its process was killed", "{object}");
    assert!(object["worker_end"].is_null(), "{object}");
}

#[test]
fn conformance_survives_the_death_of_a_case() {
    let arguments = ["conformance", "--filter", "fills.", "--json", "--limit", "1000"];
    let child = command_on(HANGING, &arguments).spawn().unwrap();
    let runner = Process(child.id());
    let ending = thread::spawn(move || {
        // Each case hangs until its process is ended here.
        let mut ended = Vec::new();
        wait_until("eight processes were ended", Duration::from_secs(50), || {
            for worker in runner.children() {
                let threads = fs::read_dir(format!("/proc/{}/task", worker.0)).map_or(0, Iterator::count);
                // A stream of the case has begun to work.
                if threads > 1 && !ended.contains(&worker) {
                    ended.push(worker);
                    worker.send(Signal::ABORT);
                }
            }
            ended.len() == 8
        });
    });
    let run = run_to_its_end(child, &arguments, "whose cases are killed");
    ending.join().unwrap();
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let object = run.object();
    assert_eq!((&object["failed"], &object["cases"]), (&8.into(), &8.into()), "{object}");
    for failure in object["failures"].as_array().unwrap() {
        assert!(failure["message"].as_str().unwrap().starts_with("its process ended: signal: 6 (SIGABRT)"), "{object}");
    }
}

#[test]
fn conformance_counts_every_round_and_repeats_a_shuffle() {
    let arguments = ["conformance", "--filter", "fills.", "--repeat", "2", "--shuffle", "11"];
    // Which case the fault hits tells where it stood.
    let first_of = |seed: &str| {
        let arguments = ["conformance", "--filter", "fills.", "--repeat", "2", "--shuffle", seed, "--json"];
        let run = highwater_on("fail=fill:1", &arguments);
        assert!(run.stderr.contains(&format!("seed {seed}\n")), "{}", run.stderr);
        let object = run.object();
        assert_eq!(
            (&object["cases"], &object["rounds"], &object["failed"]),
            (&16.into(), &2.into(), &1.into()),
            "{object}"
        );
        assert_eq!(
            (object["seed"].to_string(), &object["failures"][0]["round"]),
            (seed.to_owned(), &0.into()),
            "{object}"
        );
        object["failures"][0]["case"].as_str().unwrap().to_owned()
    };
    assert_eq!(first_of("11"), first_of("11"));
    let others: BTreeSet<String> = ["1", "2", "3", "4"].map(first_of).into();
    assert!(others.len() > 1, "{others:?}");
    let run = highwater(&arguments).ended(0);
    assert!(
        run.stdout.contains("16 cases: 16 passed") && run.stderr.contains("seed 11"),
        "{}{}",
        run.stdout,
        run.stderr
    );
}

#[test]
fn conformance_certifies_a_full_run() {
    let folder = scratch_folder("certificate");
    let file = folder.join("mock.json");
    let path = file.to_str().unwrap();
    let run = highwater(&["conformance", "--certificate", path, "--json"]).ended(0);
    assert!(run.stderr.contains(&format!("certificate: {path}")), "{}", run.stderr);
    let (object, certificate) = (run.object(), fs::read_to_string(&file).unwrap());
    let certificate: Value = serde_json::from_str(&certificate).unwrap();
    assert_eq!(certificate["conforms"], true);
    assert_eq!((&certificate["backend"]["name"], &certificate["cases"]), (&"mock".into(), &object["cases"]));
    let device = &certificate["backend"]["devices"][0];
    assert_eq!(device["uuid"].as_str().unwrap().len(), 32, "{device}");
    assert_eq!(device["architecture"], "mock");
    assert!(certificate["date"].as_str().unwrap().ends_with('Z'), "{}", certificate["date"]);
    let clauses = certificate["clauses"].as_array().unwrap();
    assert_eq!(clauses.len() as u64, object["clauses"].as_u64().unwrap());
    let order = clauses.iter().find(|clause| clause["clause"] == "stream.order").unwrap();
    assert_eq!((&order["outcome"], &order["trait"]), (&"proved".into(), &"Backend".into()), "{order}");
    // The cases of two devices are skipped.
    let cases = order["cases"].as_array().unwrap();
    let outcomes = |outcome: &str| cases.iter().filter(|case| case["outcome"] == outcome).count();
    assert!(outcomes("passed") > 20 && outcomes("passed") + outcomes("skipped") == cases.len(), "{order}");
    assert!(clauses.iter().all(|clause| !clause["cases"].as_array().unwrap().is_empty()), "clauses without a case");
    // The seeds, and the cells of each kind of work that the device has.
    assert_eq!((&certificate["seed"], &certificate["drawn_from"]), (&Value::Null, &object["drawn_from"]));
    assert!(certificate["drawn_from"].as_u64().is_some_and(|seed| seed < 1 << 53), "{}", certificate["drawn_from"]);
    assert!(certificate["worker_end"].is_null(), "{}", certificate["worker_end"]);
    let cells = certificate["cells"].as_array().unwrap();
    let ran = |case: &str| cells.iter().any(|table| table["case"] == case);
    assert!(ran("cells.fills") && ran("cells.plans") && !ran("cells.copies_to_another_device"), "{cells:?}");
    let fills = cells.iter().find(|table| table["case"] == "cells.fills").unwrap();
    let axes = fills["axes"].as_array().unwrap();
    let count = |key: &str| axes.iter().map(|axis| axis[key].as_array().unwrap().len() as u64).sum::<u64>();
    // The plain cell, and one for each value that is not plain.
    assert_eq!(fills["always"].as_u64().unwrap(), 1 + count("values") - axes.len() as u64, "{fills}");
    assert_eq!(fills["drawn"], 12, "{fills}");
    let device = axes.iter().find(|axis| axis["axis"] == "device").unwrap();
    assert_eq!((&device["values"], &device["left_out"]), (&json!(["device 0"]), &json!(["device 1"])), "{fills}");
    let observer = axes.iter().find(|axis| axis["axis"] == "observer").unwrap();
    assert!(observer["values"].to_string().contains("\"other stream after destroy\""), "{observer}");
    // Refused before the run, and what is there stays.
    highwater(&["conformance", "--filter", "ids.", "--certificate", path])
        .assert_error(&["full run only", "leave out `--filter`"]);
    highwater(&["conformance", "--certificate", "/nowhere/at/all.json"]).assert_error(&["/nowhere/at/all.json"]);
    assert!(fs::read_to_string(&file).unwrap().contains("stream.order"));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "a draft was left behind");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn conformance_names_the_nearest_clause_case_or_mutant_to_a_misspelled_filter() {
    highwater(&["conformance", "--filter", "stream.ordr"])
        .assert_error(&["no case matches", "did you mean `stream.order`?"]);
    highwater(&["conformance", "--list", "--filter", "streams.runs_in_odrer"])
        .assert_error(&["did you mean `streams.runs_in_order`?"]);
    highwater(&["conformance", "--saboteurs", "--filter", "copies-cutt"])
        .assert_error(&["no mutant matches", "did you mean `copies-cut`?"]);
    highwater(&["conformance", "--filter", "zebra"]).assert_error(&["hint: name a part of a case, such as `identity`"]);
}

/// A mock with few abilities and little memory: two thirds of the cases are skipped, so a full run takes less time.
const FEW_ABILITIES: &str = "memory=64MiB,gemm_f32=off,gemm_f64=off,gemm_f16=off,gemm_bf16=off,gemm_mixed=off,tf32=off,\
    lt_plans=off,strided_batch=off,blas_workspace=off,atomics_mode=off,capture=off,stream_ordered_memory=off,\
    shareable_memory=off,interprocess_events=off,host_register=off,write_combined=off,mapped_memory=off,foreign_memory=off,\
    foreign_objects=off,legacy_default_stream=off,per_thread_default_stream=off,stream_priority=off,event_timing=off";

/// Failed once: as root, `--certificate /dev/full` replaced the device by a file.
#[test]
fn conformance_writes_its_certificate_into_a_device_and_never_replaces_it() {
    use std::os::unix::fs::FileTypeExt as _;
    use std::path::Path;

    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

    let folder = scratch_folder("certificate-device");
    let node = folder.join("full");
    // Only root makes devices. Nobody else could replace the system's own one either, because they cannot write to `/dev`.
    let made = mknodat(CWD, &node, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, makedev(1, 7)).is_ok();
    // Containers may make devices that no process opens.
    let usable = made && fs::File::open(&node).is_ok();
    let path = if usable { node.as_path() } else { Path::new("/dev/full") };
    let run = highwater_on(FEW_ABILITIES, &["conformance", "--certificate", path.to_str().unwrap()]).ended(2);
    assert!(
        run.stderr.contains("cannot be written")
            && run.stderr.contains("No space left on device")
            && run.stderr.contains("free space on this disk"),
        "{}",
        run.stderr
    );
    assert!(fs::symlink_metadata(path).unwrap().file_type().is_char_device(), "{} was replaced", path.display());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), usize::from(made), "a draft was left behind");
    fs::remove_dir_all(&folder).unwrap();
}

/// Returns whether this process, and so each program that it starts, ignores a signal. Shells let commands in the background ignore
/// SIGINT.
fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 << (signal.as_raw() - 1) != 0
}

#[test]
fn conformance_that_is_ended_by_a_signal_leaves_no_certificate_and_no_draft() {
    let folder = scratch_folder("certificate-signals");
    let (new, old) = (folder.join("new.json"), folder.join("old.json"));
    fs::write(&old, "old").unwrap();
    let signals = [Signal::INT, Signal::TERM, Signal::KILL].into_iter().filter(|signal| !is_ignored(*signal));
    for (signal, file) in signals.flat_map(|signal| [(signal, &new), (signal, &old)]) {
        let arguments = ["conformance", "--certificate", file.to_str().unwrap()];
        let mut child = command_on(HANGING, &arguments).spawn().unwrap();
        let runner = Process(child.id());
        wait_until("a worker runs", Duration::from_secs(50), || !runner.children().is_empty());
        runner.send(signal);
        assert!(!child.wait().unwrap().success());
        let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!((names, fs::read_to_string(&old).unwrap()), (vec!["old.json".into()], "old".to_owned()));
    }
    fs::remove_dir_all(&folder).unwrap();
}

/// Failed before: what followed the certificate was written over its beginning.
#[test]
fn conformance_writes_its_certificate_to_its_own_output_in_one_piece() {
    let folder = scratch_folder("certificate-output");
    let file = folder.join("both.json");
    // The target of `/dev/stdout`; some containers have none.
    let link = folder.join("stdout");
    std::os::unix::fs::symlink("/proc/self/fd/1", &link).unwrap();
    let mut command = command_on(FEW_ABILITIES, &["conformance", "--certificate", link.to_str().unwrap(), "--json"]);
    let Output { status, stderr, .. } = command.stdout(fs::File::create(&file).unwrap()).output().unwrap();
    let stderr = String::from_utf8_lossy(&stderr);
    let text = fs::read_to_string(&file).unwrap();
    let objects: Result<Vec<Value>, _> = serde_json::Deserializer::from_str(&text).into_iter().collect();
    let objects = objects.unwrap_or_else(|error| panic!("{status}: {error}: {text}{stderr}"));
    assert_eq!(objects.len(), 2, "{status}: {text}{stderr}");
    let report = &objects[1];
    assert!(status.success(), "{status}: {} {} {}", report["failures"], report["worker_end"], report["drawn_from"]);
    assert_eq!((&objects[0]["conforms"], &objects[1]["failed"]), (&true.into(), &0.into()));
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn conformance_sweeps_the_calls_of_its_cases() {
    let arguments = ["conformance", "--fault-sweep", "--filter", "ids.", "--sample", "5", "--json"];
    let object = highwater(&arguments).ended(0).object();
    assert!(object["calls_swept"].as_u64().unwrap() > 50 && object["failures"] == json!([]), "{object}");
    // The mock's own fault is none that may be.
    let run = highwater_on(
        "fail=destroy_event:1",
        &["conformance", "--fault-sweep", "--filter", "ids.streams_and_events_count", "--jobs", "1"],
    )
    .ended(1);
    assert!(run.stdout.contains("without a fault"), "{}", run.stdout);
}

#[test]
fn conformance_refuses_arguments_that_say_nothing() {
    for (arguments, part) in [
        (&["--repeat", "0"][..], "number of rounds from 1"),
        (&["--limit", "0"], "number of seconds from 1"),
        (&["--shuffle", "soon"], "expected a number from 0 to 18446744073709551615"),
        (&["--certificate", "./new.json/"], "its name ends as that of a folder"),
        (&["--sample", "3"], "--fault-sweep"),
        (
            &["--fault-sweep", "--certificate", "x.json"],
            "`--certificate` has no effect with `--fault-sweep`; leave out one",
        ),
        (&["--list", "--limit", "3"], "`--limit` has no effect with `--list`; leave out one of them"),
    ] {
        let run = highwater(&[&["conformance"], arguments].concat());
        assert_eq!((run.code, &*run.stdout), (Some(2), ""), "{}", run.stderr);
        assert!(run.stderr.contains(part), "{}", run.stderr);
    }
}
