//! The header `highwater.h`: the table in C, from the same list as the code.

use std::fmt::Write as _;

use super::codes::{
    Abilities, CHOICES, Constant, Facts, LOCATION_DEVICE, LOCATION_HOST, MEMORY_PLAIN, MEMORY_SHAREABLE,
    MEMORY_STREAM_ORDERED, PANICKED,
};
use super::load::ENTRY_POINT;
use super::logging::LEVELS;
use super::raw::{Struct, structs};
use super::table::{Group, Slot, TABLE_VERSIONS, Table, slot_list};
use highwater_hal::{Clause, FIRST_NAMED_SLOT, LEGACY_SLOT, PER_THREAD_SLOT, clauses};

const TOP: &str = r#"/* highwater.h: backends of Highwater as plugins, in C.
 *
 * Generated from the list in highwater-plugin; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A plugin is a shared library that exports one function, highwater_plugin. The program calls it once. The function returns a
 * struct that describes the plugin and gives its table. Through the table, the program opens a backend and uses it.
 *
 * Rules for every function and struct:
 *  - Every function of the table returns 0, or one of HW_ERROR_... with the details in *error. It writes its answer only if it
 *    returns 0.
 *  - Any thread may call a function, and several may call at once. A handle is used by one thread at a time. The program sets no
 *    current device or context. The plugin restores the caller's.
 *  - Every struct that is passed by pointer begins with its size in bytes, which its creator sets. hw_id, hw_location and
 *    hw_gemm_shape are parts of other structs: they have no size and never grow. The missing fields of a shorter struct are
 *    zero. A longer struct must be rejected (HW_ERROR_INVALID_ARGUMENT) if any byte that the reader does not know is not zero.
 *    The writer of an answer writes at most the struct's size, and sets that size to the number of bytes written.
 *  - Structs and the table grow at the end only. A null slot is not supported. Slots are in groups: a table has all of a group
 *    or none.
 *  - Pointers in arguments are valid until the call returns. The contents of hw_plugin are valid for the life of the process.
 *  - No exception and no longjmp may cross the table. HW_PANICKED reports one inside the plugin. The program then never calls
 *    the plugin again.
 *  - The library is never unloaded. No function is called in a forked child, or once the process exits.
 *  - Matrices are column-major. Sizes are in bytes unless the comment states another unit.
 *
 * Clauses are the promises on which the program relies. Each has an id, such as stream.order. The comment of an operation lists
 * the clauses that it must keep. `highwater conformance --plugin FILE` tests every clause, and names those of each failed case.
 * Every operation must keep these:
CLAUSES
 */
#ifndef HIGHWATER_H
#define HIGHWATER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
"#;

/// Returns the text of `highwater.h`.
///
/// The repository has it in `plugin/include/highwater.h`, and a test compares the two.
#[must_use]
pub fn header() -> String {
    let slots = slot_list();
    let kept_by_all = clauses().iter().filter(|clause| home(&slots, clause) == Home::Everything);
    let mut text = TOP.replace("CLAUSES", &clause_items(&slots, "", kept_by_all).join("\n"));
    // Writing to a `String` does not fail.
    let _ = write_header(&mut text, &slots);
    text
}

fn write_header(text: &mut String, slots: &[Slot]) -> std::fmt::Result {
    writeln!(text, "\n/* Versions of the table that this header describes. */")?;
    writeln!(text, "#define HW_TABLE_VERSION_MIN {}u", TABLE_VERSIONS.start())?;
    writeln!(text, "#define HW_TABLE_VERSION_MAX {}u", TABLE_VERSIONS.end())?;
    writeln!(text, "\n/* Results: success; an exception inside the plugin. */")?;
    writeln!(text, "#define HW_OK 0\n#define HW_PANICKED ({PANICKED})")?;
    for (what, constants) in CHOICES {
        // Results have the type `int32_t`.
        let suffix = if constants.iter().any(|constant| constant.name.starts_with("ERROR_")) { "" } else { "u" };
        writeln!(text, "\n/* Numbers for {what}. */")?;
        for Constant { name, value, .. } in *constants {
            writeln!(text, "#define HW_{name} {value}{suffix}")?;
        }
    }
    let more: [(&str, Vec<(&str, u32)>); 4] = [
        (
            "Numbers for a kind of device memory.",
            vec![
                ("DEVICE_MEMORY_PLAIN", MEMORY_PLAIN),
                ("DEVICE_MEMORY_SHAREABLE", MEMORY_SHAREABLE),
                ("DEVICE_MEMORY_STREAM_ORDERED", MEMORY_STREAM_ORDERED),
            ],
        ),
        (
            "Numbers for the side of a copy.",
            vec![("LOCATION_HOST", LOCATION_HOST), ("LOCATION_DEVICE", LOCATION_DEVICE)],
        ),
        (
            "Slots of ids: those from the first one on are not objects. The default streams have one each, in generation 1.",
            vec![
                ("FIRST_NAMED_SLOT", FIRST_NAMED_SLOT),
                ("SLOT_LEGACY_DEFAULT_STREAM", LEGACY_SLOT),
                ("SLOT_PER_THREAD_DEFAULT_STREAM", PER_THREAD_SLOT),
            ],
        ),
        ("Levels of log lines.", LEVELS.to_vec()),
    ];
    for (what, constants) in more {
        writeln!(text, "\n/* {what} */")?;
        for (name, value) in constants {
            writeln!(text, "#define HW_{name} {value}u")?;
        }
    }
    for (what, set) in
        [("Bits of hw_capabilities.abilities.", Abilities::NAMES), ("Bits of hw_capabilities.facts.", Facts::NAMES)]
    {
        writeln!(text, "\n/* {what} */")?;
        for Constant { name, value, .. } in set {
            writeln!(text, "#define HW_{name} (UINT64_C(1) << {})", value.trailing_zeros())?;
        }
    }
    writeln!(text, "\n/* An open backend, and a BLAS or an Lt handle. Only the plugin knows their contents. */")?;
    writeln!(text, "typedef struct hw_backend hw_backend;\ntypedef struct hw_handle hw_handle;")?;
    writeln!(text, "typedef struct hw_table hw_table;")?;
    for one in structs() {
        write_struct(text, &one)?;
        if one.name == "hw_error" {
            writeln!(text, "\n/* Receives a log line: HW_LOG_..., the text, its bytes. Any thread may call it. */")?;
            writeln!(text, "typedef void (*hw_log_call)(uint32_t level, const char *text, uint64_t bytes);")?;
        }
        if one.name == "hw_open" {
            writeln!(
                text,
                "\n/* Opens the backend, which has at least one device. If it cannot, it returns the reason: \
                 HW_ERROR_LIBRARY_MISSING for a\n * library of the vendor, HW_ERROR_SYMBOL_MISSING for a function in it, \
                 HW_ERROR_DEVICE_MISSING if there is no device. The\n * program reports the reason, and tries other backends \
                 unless the user named this one. */"
            )?;
            writeln!(
                text,
                "typedef int32_t (*hw_open_call)(const hw_open *request, hw_backend **backend, hw_error *error);"
            )?;
            writeln!(text, "/* Returns the table of a version, which is one of the plugin's versions. */")?;
            writeln!(text, "typedef const hw_table *(*hw_table_call)(uint32_t version);")?;
        }
    }
    writeln!(text, "\n/* The operations of a backend. */\nstruct hw_table {{")?;
    writeln!(text, "    /* Bytes of this struct. */\n    uint64_t size;")?;
    let mut group = None;
    for slot in slots {
        if group != Some(slot.group) {
            group = Some(slot.group);
            let title = format!("---- group {}: {}", slot.group.name(), slot.group.words());
            writeln!(text)?;
            write_comment_with_clauses(text, slots, &title, Home::Group(slot.group))?;
        }
        write_comment_with_clauses(text, slots, &slot.doc, Home::Slot(slot.name))?;
        writeln!(text, "    int32_t (*{})({});", slot.name, slot.arguments.join(", "))?;
    }
    writeln!(text, "}};")?;
    writeln!(
        text,
        "\n/* The only symbol of a plugin. `host` is valid for the life of the process. Null rejects the program. */"
    )?;
    writeln!(text, "const hw_plugin *{ENTRY_POINT}(const hw_host *host);")?;
    writeln!(text, "\n#ifdef __cplusplus\n}}\n#endif\n\n#endif /* HIGHWATER_H */")
}

/// The comment of the header that lists a clause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    /// The comment at the top.
    Everything,
    /// The comment of a group, for a promise that is not of one operation.
    Group(Group),
    /// The comment of an operation.
    Slot(&'static str),
}

fn home(slots: &[Slot], clause: &Clause) -> Home {
    let slot =
        slots.iter().find(|slot| slot.method.is_some() && slot.method == clause.method.map(|name| (clause.of, name)));
    match (slot, clause.of, clause.method) {
        (Some(slot), ..) => Home::Slot(slot.name),
        (None, "HostAllocator", _) => Home::Group(Group::Host),
        (None, "BlasHandle", _) => Home::Group(Group::Blas),
        (None, "IpcSharing", _) | (None, _, Some("ipc_sharing")) => Home::Group(Group::Ipc),
        _ => Home::Everything,
    }
}

/// Writes a comment inside the table, with the clauses that belong there.
fn write_comment_with_clauses(text: &mut String, slots: &[Slot], comment: &str, at: Home) -> std::fmt::Result {
    let listed = clause_items(slots, "    ", clauses().iter().filter(|clause| home(slots, clause) == at));
    if listed.is_empty() {
        return write_comment(text, "    ", comment);
    }
    let mut lines = comment.lines();
    write!(text, "    /* {}", lines.next().unwrap_or_default())?;
    for line in lines {
        write!(text, "\n     * {line}")?;
    }
    writeln!(text, "\n{} */", listed.join("\n"))
}

/// The width of a comment.
const WIDTH: usize = 126;

/// Returns the lines ` *  - ID: PROMISE` of clauses, with the names of C.
fn clause_items<'c>(slots: &[Slot], indent: &str, listed: impl Iterator<Item = &'c Clause>) -> Vec<String> {
    let mut lines = Vec::new();
    for clause in listed {
        let mut line = format!("{indent} *  - {}:", clause.id);
        for word in in_c(slots, clause).split(' ') {
            if line.len() + 1 + word.len() > WIDTH {
                lines.push(std::mem::replace(&mut line, format!("{indent} *   ")));
            }
            line.push(' ');
            line.push_str(word);
        }
        lines.push(line);
    }
    lines
}

/// Returns a promise with the names of C.
fn in_c(slots: &[Slot], clause: &Clause) -> String {
    let promise = clause.promise.replace("[`", "`").replace("`]", "`");
    let parts = promise.split('`').enumerate().map(|(place, part)| match (place % 2, name_in_c(slots, clause, part)) {
        (0, _) => part.to_owned(),
        (_, Some(name)) => name,
        (_, None) => format!("`{part}`"),
    });
    parts.collect()
}

/// Returns the name in C of an item of the traits, if it differs.
fn name_in_c(slots: &[Slot], clause: &Clause, name: &str) -> Option<String> {
    let last = name.rsplit("::").next().unwrap_or(name);
    let other = match name {
        "Shareable" => Some("HW_DEVICE_MEMORY_SHAREABLE"),
        "device_info().memory_bytes" => Some("hw_device_info.memory_bytes"),
        "identity().tag" => Some("hw_open.tag"),
        "live_objects().handles" => Some("hw_live_objects.handles"),
        "live_objects().host_allocations" => Some("hw_live_objects.host_allocations"),
        "ipc_transports" | "workspace_alignment" | "mapped_memory_granularity" => {
            return Some(format!("hw_capabilities.{name}"));
        }
        _ => None,
    };
    let choices = CHOICES.iter().flat_map(|(_, constants)| *constants);
    let mut named = choices.chain(Abilities::NAMES).chain(Facts::NAMES).filter(|constant| constant.rust == last);
    // A name that two enums share is ambiguous.
    let constant = named.next().filter(|_| named.next().is_none());
    let slot = slots.iter().find(|slot| slot.method == Some((clause.of, name)) && slot.name != name);
    other
        .map(ToOwned::to_owned)
        .or_else(|| constant.map(|constant| format!("HW_{}", constant.name)))
        .or_else(|| slot.map(|slot| format!("`{}`", slot.name)))
}

fn write_struct(text: &mut String, one: &Struct) -> std::fmt::Result {
    writeln!(text)?;
    write_comment(text, "", &one.doc)?;
    writeln!(text, "typedef struct {} {{", one.name)?;
    for field in &one.fields {
        write_comment(text, "    ", &field.doc)?;
        writeln!(text, "    {};", field.declaration)?;
    }
    writeln!(text, "}} {};", one.name)
}

fn write_comment(text: &mut String, indent: &str, comment: &str) -> std::fmt::Result {
    let mut lines = comment.lines();
    write!(text, "{indent}/* {}", lines.next().unwrap_or_default())?;
    for line in lines {
        write!(text, "\n{indent} * {line}")?;
    }
    writeln!(text, " */")
}

/// Returns the layout of every struct and of the table: a line `struct field offset bytes` for each field, and
/// `struct - 0 bytes` for the whole struct.
///
/// The repository keeps the layout of each version of the table. Tests compare it with this one and with a C compiler's.
#[must_use]
pub fn layout() -> String {
    let mut text = String::new();
    for one in structs() {
        text += &format!("{} - 0 {}\n", one.name, one.bytes);
        for field in &one.fields {
            text += &format!("{} {} {} {}\n", one.name, field.name, field.offset, field.bytes);
        }
    }
    text += &format!("hw_table - 0 {}\nhw_table size 0 8\n", size_of::<Table>());
    for slot in slot_list() {
        text += &format!("hw_table {} {} {}\n", slot.name, slot.offset, size_of::<usize>());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structs_that_cannot_grow_are_named_and_no_others() {
        let sizeless = structs().into_iter().filter(|one| one.fields.first().is_none_or(|field| field.name != "size"));
        let sizeless: Vec<_> = sizeless.map(|one| one.name).collect();
        assert_eq!(sizeless, ["hw_id", "hw_location", "hw_gemm_shape"]);
        for name in sizeless {
            let rules = TOP.split("they have no size and never grow").next().unwrap_or_default();
            assert!(rules.contains(name) && rules.len() < TOP.len(), "the header does not say that {name} has no size");
        }
    }

    /// The words of each clause's comment, with the place of its item.
    fn comment_of(id: &str) -> String {
        let text = header();
        let start = format!("*  - {id}: ");
        assert_eq!(text.matches(&start).count(), 1, "the header states {id} once");
        let after = text.split_once(&start).map(|(_, after)| after).unwrap_or_default();
        let lines =
            after.lines().enumerate().map_while(|(number, line)| match line.trim_start().strip_prefix("*   ") {
                _ if number == 0 => Some(line),
                Some(more) if !more.starts_with(" -") => Some(more.trim()),
                _ => None,
            });
        lines.collect::<Vec<_>>().join(" ").trim_end_matches("*/").trim().to_owned()
    }

    #[test]
    fn the_header_states_every_clause_in_the_words_of_c() {
        for clause in clauses() {
            let comment = comment_of(clause.id);
            assert_eq!(comment, in_c(&slot_list(), clause), "{}", clause.id);
            // Backticks enclose names and formulas. C does not know the names of Rust's variants.
            for name in comment.split('`').skip(1).step_by(2) {
                let of_rust = name.chars().any(char::is_lowercase) && name.starts_with(char::is_uppercase);
                assert!(!of_rust && !name.contains("::"), "{}: C has no `{name}`", clause.id);
            }
        }
        assert!(clauses().len() >= 90);
    }

    #[test]
    fn the_header_names_codes_capabilities_and_slots_as_c_does() {
        assert!(comment_of("backend.device-checked").contains("returns HW_ERROR_INVALID_ARGUMENT"));
        assert!(comment_of("blas.unbound").contains("return HW_ERROR_INVALID_STATE"));
        assert!(comment_of("gemm.alpha-zero").contains("with alpha 0"));
        assert!(comment_of("gemm.mixed").contains("Needs HW_CAN_GEMM_MIXED"));
        assert!(comment_of("host.unregister-unknown").contains("was not passed to `host_register`"));
        assert!(comment_of("ipc.open-outlives").contains("with HW_TRANSPORT_DESCRIPTOR"));
        assert!(header().contains("HW_ERROR_DEVICE_MISSING if there is no device"));
    }

    #[test]
    fn clauses_stand_at_their_operation() {
        let text = header();
        let place = |of: &str| text.find(of).unwrap_or_else(|| panic!("the header lacks {of}"));
        let order = ["- copy.zero:", "(*copy)(", "- fill.exact:", "(*fill)(", "- gemm.value:", "(*handle_gemm)("];
        assert!(order.map(place).is_sorted());
        assert!(place("- backend.forked:") < place("#ifndef HIGHWATER_H"));
    }
}
