//! Makes the table of clauses from the documentation of the traits, the only source of clauses.
//!
//! A clause is an item "- `group.name`: promise" of a doc comment before a trait or one of its methods. Indented lines
//! below the item continue it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

const SOURCES: [&str; 4] = ["src/backend.rs", "src/blas.rs", "src/host.rs", "src/ipc.rs"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let mut ids = BTreeSet::new();
    let mut table = "static CLAUSES: &[Clause] = &[\n".to_owned();
    for source in SOURCES {
        println!("cargo:rerun-if-changed={source}");
        let text = fs::read_to_string(source).unwrap_or_else(|error| panic!("{source}: {error}"));
        for clause in clauses(source, &text) {
            let Clause { id, of, method, promise } = &clause;
            assert!(ids.insert(id.clone()), "{source}: the clause `{id}` is documented twice");
            // Writing to a `String` does not fail.
            let _ =
                writeln!(table, "    Clause {{ id: {id:?}, of: {of:?}, method: {method:?}, promise: {promise:?} }},");
        }
    }
    table.push_str("];\n");
    let folder = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&folder).join("clauses.rs"), table).expect("OUT_DIR can be written");
}

struct Clause {
    id: String,
    of: String,
    method: Option<String>,
    promise: String,
}

/// The clauses of a source file, in its order.
fn clauses(source: &str, text: &str) -> Vec<Clause> {
    let (mut done, mut pending, mut of, mut continues) = (Vec::new(), Vec::<(String, String)>::new(), None, false);
    for line in text.lines() {
        if line == "}" {
            of = None;
        }
        let line = line.trim();
        if let Some(comment) = line.strip_prefix("///") {
            let item = comment.strip_prefix(" - `").and_then(|item| item.split_once("`: "));
            if let Some((id, promise)) = item.filter(|(id, _)| id.contains('.')) {
                pending.push((id.to_owned(), promise.trim().to_owned()));
                continues = true;
            } else if let (true, Some(more), Some((_, promise))) =
                (continues, comment.strip_prefix("   "), pending.last_mut())
            {
                promise.push(' ');
                promise.push_str(more.trim());
            } else {
                continues = false;
            }
            continue;
        }
        continues = false;
        if line.starts_with("#[") {
            continue;
        }
        let declared = |keyword: &str| {
            let mut words = line.split([' ', '(', ':', '<']).skip_while(|word| matches!(*word, "pub" | "unsafe"));
            (words.next() == Some(keyword)).then(|| words.next().unwrap_or_default().to_owned())
        };
        if let Some(name) = declared("trait") {
            of = Some(name);
        }
        for (id, promise) in pending.drain(..) {
            let method = declared("fn");
            let promised_by = of.clone().filter(|_| method.is_some() || line.contains("trait "));
            let of =
                promised_by.unwrap_or_else(|| panic!("{source}: `{id}` is not before a trait or its method: {line}"));
            done.push(Clause { id, of, method, promise });
        }
    }
    done
}
