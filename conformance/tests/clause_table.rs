//! The table of clauses says what the documentation of the traits says, word for word.

use highwater_conformance::{clauses, clauses_without_case};

const SOURCES: [&str; 4] = [
    include_str!("../../core/src/backend.rs"),
    include_str!("../../core/src/blas.rs"),
    include_str!("../../core/src/host.rs"),
    include_str!("../../core/src/ipc.rs"),
];

/// The clauses of the documentation: trait, id and promise, in order.
///
/// A clause is an item of a list that begins with its id, `` - `group.name`: ``, and goes on while lines are indented. It
/// belongs to the trait that is being documented, or inside of which it stands.
fn documented() -> Vec<(String, String, String)> {
    let mut clauses: Vec<(String, String, String)> = Vec::new();
    for source in SOURCES {
        let (mut inside, mut waiting, mut open) = (String::new(), 0, false);
        for line in source.lines().map(str::trim) {
            let Some(text) = line.strip_prefix("///") else {
                open = false;
                let words: Vec<&str> = line.split(' ').filter(|word| !matches!(*word, "pub" | "unsafe")).collect();
                if let ["trait", name, ..] = words[..] {
                    inside = name.trim_end_matches(':').to_owned();
                    let first = clauses.len() - waiting;
                    clauses[first..].iter_mut().for_each(|(of, ..)| of.clone_from(&inside));
                }
                if !line.starts_with("#[") {
                    waiting = 0;
                }
                continue;
            };
            let item = text.strip_prefix(" - `").and_then(|item| item.split_once("`: "));
            if let Some((id, promise)) = item.filter(|(id, _)| id.contains('.')) {
                clauses.push((inside.clone(), id.to_owned(), promise.to_owned()));
                (waiting, open) = (waiting + 1, true);
            } else if let (true, Some(more)) = (open, text.strip_prefix("   ")) {
                let (_, _, promise) = clauses.last_mut().unwrap();
                promise.push(' ');
                promise.push_str(more.trim());
            } else {
                open = false;
            }
        }
    }
    clauses
}

#[test]
fn the_table_says_what_the_traits_say() {
    let documented = documented();
    let table: Vec<_> = clauses()
        .iter()
        .map(|clause| (clause.of.to_owned(), clause.id.to_owned(), clause.promise.to_owned()))
        .collect();
    assert!(documented.len() >= 80, "only {} clauses were found", documented.len());
    for (of, id, promise) in documented.iter().filter(|clause| !table.contains(clause)) {
        println!("in the traits and not in the table:\n    clause({of:?}, {id:?}, {promise:?}),");
    }
    for (of, id, promise) in table.iter().filter(|clause| !documented.contains(clause)) {
        println!("in the table and not in the traits:\n    clause({of:?}, {id:?}, {promise:?}),");
    }
    assert!(table == documented, "src/clauses.rs differs from the traits, or its order does; see the lines above");
}

#[test]
fn every_clause_has_a_case() {
    assert!(clauses_without_case().is_empty(), "{:?}", clauses_without_case());
}
