//! `highwater bench` from outside, on the mock.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn command_on(mock: &str, part: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
    command.env("HIGHWATER_MOCK", mock).env("HIGHWATER_BACKEND", "mock");
    command.args(["bench", part]);
    command
}

fn command() -> Command {
    // The backend allocates whole blocks, which nothing touches.
    command_on("register-piece-bytes=0", "host")
}

/// The rows that `bench host` prints.
#[track_caller]
fn rows(arguments: &[&str]) -> Vec<Value> {
    rows_of(command().args(arguments))
}

/// The rows that a command prints. Each has the keys of a row and no others.
#[track_caller]
fn rows_of(command: &mut Command) -> Vec<Value> {
    let run = command.arg("--json").output().unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(0), "{stderr}");
    let object: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(object.as_object().unwrap().len(), 1, "{object}");
    let rows = object["rows"].as_array().unwrap().clone();
    for row in &rows {
        let keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["bar", "met", "name", "peer", "unit", "value"], "{row}");
        assert!(row["name"].is_string() && row["unit"].is_string(), "{row}");
        assert_eq!(row["met"].is_null(), row["bar"].is_null() || row["value"].is_null(), "{row}");
    }
    rows
}

#[track_caller]
fn assert_refused(arguments: &[&str], parts: &[&str]) {
    assert_failed(command().args(arguments), parts);
}

/// The command prints an error with these parts on standard error, and nothing else.
#[track_caller]
fn assert_failed(command: &mut Command, parts: &[&str]) {
    let run: Output = command.output().unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!((run.status.code(), run.stdout.len()), (Some(2), 0), "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "`{part}` is missing in:\n{stderr}");
    }
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["name"].as_str().unwrap()).collect()
}

/// A file that this test alone writes.
fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{}-{name}", std::process::id()))
}

const QUICK: [&str; 6] = ["--rounds", "1", "--milliseconds", "1", "--seeds", "2"];

#[test]
fn rows_of_time_have_positive_values() {
    for (filter, expected) in [
        ("hit_4KiB", &["hit_4KiB_t1", "hit_4KiB_t4", "hit_4KiB_t16", "hit_4KiB_t2"][..]),
        ("hit_own", &["hit_own_size_t16"]),
        ("use_4KiB_t1", &["use_4KiB_t1", "use_4KiB_t16"]),
        ("handoff", &["handoff_1_pair", "handoff_8_pairs"]),
        ("raw_copy_4KiB_t2", &["raw_copy_4KiB_t2"]),
        ("scaling", &["scaling_t2"]),
    ] {
        let rows = rows(&[&QUICK[..], &["--rows", filter, "--threads", "2"]].concat());
        assert_eq!(names(&rows), expected);
        assert!(rows.iter().all(|row| row["value"].as_f64().unwrap() > 0.0), "{rows:?}");
    }
}

#[test]
fn bars_that_depend_on_a_raw_row_are_there_without_it() {
    for filter in ["use_64MiB_t1", "copy_4KiB_t16"] {
        let rows = rows(&[&QUICK[..], &["--rows", filter]].concat());
        assert!(
            rows.iter().all(|row| row["name"].as_str().unwrap().starts_with("raw") || row["bar"].is_f64()),
            "{rows:?}"
        );
    }
}

#[test]
fn rows_of_memory_have_their_names_and_bars() {
    let rows = rows(&[&QUICK[..], &["--rows", "trace_"]].concat());
    let bar = |name: &str| rows.iter().find(|row| row["name"] == name).map(|row| row["bar"].as_f64().unwrap());
    let bars = [("trace_three_seeds", 1.15), ("trace_fresh_seeds", 1.22), ("trace_blocks", 1.15)];
    for (name, expected) in bars.into_iter().chain([("trace_blocks_then_odd", 1.2)]) {
        assert_eq!(bar(name), Some(expected), "{name}");
    }
    assert_eq!(rows.len(), 9);
    assert!(rows.iter().all(|row| row["value"].as_f64().unwrap() >= 1.0 && row["unit"] == "ratio"), "{rows:?}");
}

#[test]
fn the_peers_values_come_from_a_file() {
    let path = file("peer.json");
    fs::write(&path, r#"{"trace_three_seeds": 1.95, "elsewhere": 3}"#).unwrap();
    let rows = rows(&["--rows", "trace_three_seeds", "--seeds", "1", "--peer", path.to_str().unwrap()]);
    fs::remove_file(&path).unwrap();
    let peers: Vec<_> = rows.iter().map(|row| row["peer"].as_f64()).collect();
    assert_eq!(peers, [Some(1.95), None, None]);
}

#[test]
fn rows_without_memory_for_them_are_skipped_with_the_reason() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
    command.env("HIGHWATER_MOCK", "host-memory=1MiB").args(["bench", "host", "--json", "--backend", "mock"]);
    let run = command.args(["--rows", "page_lock_8GiB"]).output().unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("skipped page_lock_8GiB, page_lock_8GiB_stall: "), "{stderr}");
    let object: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert!(object["rows"].as_array().unwrap().iter().all(|row| row["value"].is_null() && row["met"].is_null()));
}

#[test]
fn a_written_trace_can_be_replayed_with_the_same_result() {
    let path = file("trace.jsonl");
    let text = path.to_str().unwrap();
    assert!(rows(&["--write-trace", text]).is_empty());
    let replayed = rows(&["--replay", text]);
    fs::remove_file(&path).unwrap();
    assert_eq!(names(&replayed), ["replay", "replay_held", "replay_peak", "replay_time"]);
    // The largest of the three seeds' peaks.
    assert_eq!(replayed[2]["value"], 495_133_013.0);
    let generated = rows(&["--rows", "trace_three_seeds", "--seeds", "1"]);
    let [replayed, generated] = [&replayed[0], &generated[0]].map(|row| row["value"].as_f64().unwrap());
    assert!((replayed / generated - 1.0).abs() < 0.05, "{replayed} and {generated}");
}

#[test]
fn what_a_program_records_can_be_replayed_with_the_same_result() {
    let [written, recorded] = ["written.jsonl", "recorded.jsonl"].map(file);
    let lines = [
        r#"{"t":0,"thread":1,"op":"alloc","id":7,"bytes":5000}"#,
        r#"{"t":5,"thread":2,"op":"use","id":7}"#,
        r#"{"t":6,"thread":1,"op":"alloc","id":9,"bytes":3000000}"#,
        r#"{"t":9,"thread":2,"op":"free","id":7}"#,
    ];
    fs::write(&written, lines.join("\n")).unwrap();
    let mut command = command();
    command.env("HIGHWATER_HOST_MEMORY", format!("record={}", recorded.display()));
    let run = command.arg("--replay").arg(&written).output().unwrap();
    assert_eq!(run.status.code(), Some(0), "{}", String::from_utf8_lossy(&run.stderr));
    let text = fs::read_to_string(&recorded).unwrap();
    assert_eq!(text.lines().count(), 5, "with the end of the last block: {text}");
    let [first, second] = [&written, &recorded].map(|path| rows(&["--replay", path.to_str().unwrap()]));
    for row in 0..3 {
        assert_eq!(first[row], second[row]);
    }
    [written, recorded].iter().for_each(|path| fs::remove_file(path).unwrap());
}

#[test]
fn a_trace_of_several_threads_with_uses_is_replayed() {
    let path = file("uses.jsonl");
    let lines = [
        r#"{"t":0,"thread":1,"op":"alloc","id":7,"bytes":4096}"#,
        r#"{"t":5,"thread":2,"op":"use","id":7}"#,
        r#"{"t":9,"thread":2,"op":"free","id":7}"#,
    ];
    fs::write(&path, lines.join("\n")).unwrap();
    let rows = rows(&["--replay", path.to_str().unwrap()]);
    fs::remove_file(&path).unwrap();
    assert_eq!(rows[2]["value"], 4096.0);
}

#[test]
fn bad_traces_are_refused_with_the_line() {
    let path = file("bad.jsonl");
    let text = path.to_str().unwrap();
    let alloc = r#"{"t":0,"thread":0,"op":"alloc","id":1,"bytes":16}"#;
    let free = r#"{"t":0,"thread":0,"op":"free","id":1}"#;
    for (lines, parts) in [
        (vec![alloc, "no json"], ["line 2", "expected"]),
        (vec![r#"{"t":0,"thread":0,"op":"alloc","id":1}"#], ["line 1", "`bytes` is not a whole number"]),
        (vec![r#"{"t":-1,"thread":0,"op":"free","id":1}"#], ["line 1", "`t` is not a whole number"]),
        (vec![r#"{"t":0,"thread":0,"op":"drop","id":1}"#], ["line 1", "`op` is none of"]),
        (vec![free], ["line 1", "block 1 was not allocated"]),
        (vec![alloc, free, free], ["line 3", "block 1 was freed before"]),
        (vec![alloc, alloc], ["line 2", "block 1 was allocated before"]),
        (vec![], ["has no lines", "docs/program.md"]),
    ] {
        fs::write(&path, lines.join("\n")).unwrap();
        assert_refused(&["--replay", text], &parts);
    }
    fs::remove_file(&path).unwrap();
    assert_refused(&["--replay", text], &["cannot be read", "hint: "]);
    assert_refused(&["--write-trace", "/nowhere/trace"], &["the trace cannot be written to /nowhere/trace"]);
}

#[test]
fn unknown_rows_and_bad_peers_are_refused() {
    assert_refused(&["--rows", "nothing"], &["no row has `nothing` in its name", "hit_4KiB_t1, ", "trace_three_seeds"]);
    let path = file("bad-peer.json");
    let text = path.to_str().unwrap();
    let with_peer = ["--rows", "trace_three_seeds", "--seeds", "1", "--peer", text];
    assert_refused(&with_peer, &["cannot be read", "scripts/bench-pytorch.py"]);
    fs::write(&path, r#"{"trace_three_seeds": "little"}"#).unwrap();
    assert_refused(&with_peer, &["`trace_three_seeds` is no number"]);
    fs::remove_file(&path).unwrap();
    assert_refused(&["--rounds", "0"], &["number of rounds from 1"]);
    assert_refused(&["--replay", "file", "--rows", "hit"], &["`--rows` has no effect with `--replay`"]);
    assert_refused(&["--trace", "blocks-then-odd"], &["--write-trace"]);
}

#[test]
fn rows_of_shared_memory_have_values() {
    // Memory that the backend allocates cannot be shared.
    let skipped = rows(&[&QUICK[..], &["--rows", "opened"]].concat());
    assert!(skipped.len() == 2 && skipped.iter().all(|row| row["value"].is_null()), "{skipped:?}");
    let rows = rows_of(command_on("", "host").args(QUICK).args(["--rows", "opened"]));
    assert_eq!(names(&rows), ["copy_from_opened", "copy_from_opened_ratio"]);
    assert!(rows.iter().all(|row| row["value"].as_f64().unwrap() > 0.0), "{rows:?}");
    assert_eq!(rows[1]["bar"], 0.97);
}

/// The names of all rows of a part, which the error about an unknown row lists.
fn all_rows(part: &str) -> Vec<String> {
    let run = command_on("", part).args(["--rows", "nothing"]).output().unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(2), "{stderr}");
    let (_, list) = stderr.split_once("the rows are ").unwrap();
    list.trim().split(", ").map(str::to_owned).collect()
}

#[test]
fn every_row_of_device_memory_and_of_handles_is_measured_alone() {
    for (part, count) in [("device", 48), ("handles", 16)] {
        let all = all_rows(part);
        assert_eq!(all.len(), count, "{all:?}");
        for name in all {
            let mut command = command_on("", part);
            command.args(["--rounds", "1", "--milliseconds", "1", "--rows", &name]);
            if part == "device" {
                command.args(["--seeds", "1"]);
            }
            let rows = rows_of(&mut command);
            assert_eq!(names(&rows), [&name]);
            let positive = !name.starts_with("moved");
            assert!(rows[0]["value"].as_f64().unwrap() > 0.0 || !positive, "{rows:?}");
        }
    }
}

#[test]
fn rows_of_device_memory_and_of_handles_have_their_bars() {
    let bars = |part: &str, filter: &str| {
        let rows = rows_of(command_on("", part).args(["--rounds", "1", "--milliseconds", "1", "--rows", filter]));
        let bar = |row: &Value| (row["name"].as_str().unwrap().to_owned(), row["bar"].as_f64());
        rows.iter().map(bar).collect::<Vec<_>>()
    };
    let named =
        |bars: &[(&str, Option<f64>)]| -> Vec<_> { bars.iter().map(|&(name, bar)| (name.to_owned(), bar)).collect() };
    let expected =
        [("same_stream_4KiB_1t", Some(60.0)), ("same_stream_4KiB_4t", None), ("same_stream_4KiB_16t", Some(120.0))];
    assert_eq!(bars("device", "same_stream_4KiB"), named(&expected));
    let expected = [("trace_three_seeds_mapped", Some(1.15)), ("trace_three_seeds_plain", Some(1.5))];
    assert_eq!(bars("device", "trace_three"), named(&expected));
    assert_eq!(bars("handles", "first_handle"), named(&[("first_handle_1t", None), ("first_handle_16t", Some(6.0))]));
    for (threads, more) in [("_1t", 20.0), ("_16t", 22.0)] {
        let rows = rows_of(command_on("", "handles").args(["--rounds", "1", "--milliseconds", "1", "--rows", threads]));
        let row = |name: &str| rows.iter().find(|row| row["name"] == format!("{name}{threads}")).unwrap();
        let raw = row("raw_setters")["value"].as_f64().unwrap();
        let bar = row("lease_other_stream")["bar"].as_f64().unwrap();
        assert!((bar - raw - more).abs() < 0.001, "{rows:?}");
    }
}

#[test]
fn a_device_without_mapped_memory_has_the_rows_of_plain_allocations() {
    let mut command = command_on("mapped-memory=off", "device");
    let rows = rows_of(command.args(["--seeds", "1", "--rows", "three_seeds"]));
    let has_value: Vec<_> = rows.iter().map(|row| (row["name"].as_str().unwrap(), !row["value"].is_null())).collect();
    let expected = [
        ("trace_three_seeds_mapped", false),
        ("moved_three_seeds_mapped", false),
        ("trace_three_seeds_plain", true),
        ("moved_three_seeds_plain", true),
    ];
    assert_eq!(has_value, expected);
}

#[test]
fn a_trace_is_replayed_in_device_memory() {
    let path = file("device.jsonl");
    let lines = [
        r#"{"t":0,"thread":1,"op":"alloc","id":7,"bytes":5000}"#,
        r#"{"t":5,"thread":2,"op":"use","id":7}"#,
        r#"{"t":6,"thread":1,"op":"alloc","id":9,"bytes":3000000}"#,
        r#"{"t":9,"thread":2,"op":"free","id":7}"#,
    ];
    fs::write(&path, lines.join("\n")).unwrap();
    let rows = rows_of(command_on("", "device").arg("--replay").arg(&path));
    fs::remove_file(&path).unwrap();
    assert_eq!(names(&rows), ["replay", "replay_held", "replay_peak", "replay_time"]);
    assert_eq!(rows[2]["value"], 3_005_000.0);
    assert!(rows[1]["value"].as_f64().unwrap() >= 3_005_000.0, "{rows:?}");
}

#[test]
fn each_first_handle_is_that_of_a_fresh_process() {
    let mut command = command_on("first-handle-latency=60ms", "handles");
    let rows = rows_of(command.args(["--rounds", "2", "--rows", "_handle_16t"]));
    assert_eq!(names(&rows), ["first_handle_16t", "warm_handle_16t"]);
    let [first, warm] = [0, 1].map(|at| rows[at]["value"].as_f64().unwrap());
    // The median of two rounds is their mean: a second round in the same process would halve it.
    assert!(first >= 60.0 && warm < 60.0, "{rows:?}");
    assert_eq!((&rows[0]["unit"], &rows[0]["met"], &rows[1]["bar"]), (&"ms".into(), &false.into(), &Value::Null));
}

#[test]
fn an_error_of_the_process_that_measures_first_handles_is_reported() {
    let mut command = command_on("fail=create_blas_handle:1:device-lost", "handles");
    assert_failed(command.args(["--rows", "first_handle_1t"]), &["device lost", "create_blas_handle"]);
    let mut command = command_on("fail=create_blas_handle:1..:out-of-memory", "handles");
    let rows = rows_of(command.args(["--rows", "first_handle_1t"]));
    assert!(names(&rows) == ["first_handle_1t"] && rows[0]["value"].is_null(), "{rows:?}");
}

const SHARE: [&str; 8] = [
    "batch",
    "batch_share",
    "batch_open",
    "batch_open_again",
    "tickets",
    "tickets_share",
    "ticket_first_open",
    "ticket_next_open",
];

#[test]
fn sharing_is_measured_by_each_transport_with_another_process() {
    let all = all_rows("share");
    let expected: Vec<_> =
        ["descriptor", "legacy"].iter().flat_map(|kind| SHARE.map(|row| format!("{row}_{kind}"))).collect();
    assert_eq!(all, expected);
    let rows = rows_of(command_on("", "share").args(["--rounds", "2"]));
    assert_eq!(names(&rows), expected);
    // The mock has no legacy handles.
    assert!(rows[8..].iter().all(|row| row["value"].is_null()), "{rows:?}");
    for row in &rows[..8] {
        let name = row["name"].as_str().unwrap();
        assert!(row["value"].as_f64().unwrap() > 0.0, "{row}");
        let bar = match name.rsplit_once('_').unwrap().0 {
            "batch" => Some(10.0),
            "ticket_next_open" => Some(1000.0),
            _ => None,
        };
        assert_eq!(row["bar"].as_f64(), bar, "{row}");
    }
}

#[test]
fn an_error_of_the_process_that_opens_is_reported() {
    let mut command = command_on("fail=open_memory:1:device-lost", "share");
    assert_failed(command.args(["--rows", "batch_descriptor"]), &["device lost", "allocation 0"]);
    let mut command = command_on("fail=create_stream:2:device-lost", "share");
    command.args(["--rows", "batch_descriptor", "--rounds", "1"]);
    assert_eq!(names(&rows_of(&mut command)), ["batch_descriptor"], "each process counts its own calls");
}

#[test]
fn waits_are_measured_beside_a_blocked_thread() {
    let forms = ["task", "awake_task", "closure", "thread", "parked_thread"];
    let of_work = |work| forms.map(|form| format!("{form}_after_{work}"));
    let times = of_work("1ms");
    let mut expected = times.to_vec();
    for work in ["10ms", "50ms"] {
        expected.extend(of_work(work));
        expected.push(format!("notifier_core_share_in_{work}"));
    }
    let others = ["wake_processor_time", "wake_processor_time_in_notifier", "waits_begun_before_their_end"];
    expected.extend(["notifier_core_share_in_2s"].into_iter().chain(others).map(str::to_owned));
    assert_eq!(all_rows("waits"), expected);
    // The mock executes so much at once that no wait may be left to time.
    let rows = rows_of(command_on("", "waits").args(["--rounds", "1", "--rows", "_1ms"]));
    assert_eq!(names(&rows), times);
    let bars: Vec<_> = rows.iter().filter_map(|row| row["bar"].as_f64()).collect();
    assert!(bars.iter().all(|&bar| bar == 20.0), "{rows:?}");
    assert!(rows[4]["value"].as_f64().unwrap() > 0.0, "no device takes part in this row: {rows:?}");
    let rows = rows_of(command_on("", "waits").args(["--rounds", "1", "--rows", "wait"]));
    assert_eq!(names(&rows), ["waits_begun_before_their_end"]);
    let part = rows[0]["value"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&part), "each task is woken once at most: {part}");
    let mut command = command_on("fail=query_event:1..:vendor-error", "waits");
    assert_failed(command.args(["--rows", "task_after_1ms", "--rounds", "1"]), &["vendor error"]);
}

#[test]
fn unknown_rows_and_options_of_another_part_are_refused() {
    for (part, row) in [
        ("device", "same_stream_4KiB_1t, "),
        ("handles", "first_handle_1t, "),
        ("share", "batch_descriptor, "),
        ("waits", "task_after_1ms, "),
    ] {
        let mut command = command_on("", part);
        assert_failed(command.args(["--rows", "hit_"]), &["no row has `hit_` in its name", row]);
        assert_failed(command_on("", part).args(["--write-trace", "file"]), &["--write-trace"]);
    }
    assert_failed(command_on("", "handles").args(["--seeds", "3"]), &["--seeds"]);
}
