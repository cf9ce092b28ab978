//! `highwater.h`: the table in C, made from the list that the code is made from.

use std::fmt::Write as _;

use super::codes::{
    Abilities, CHOICES, Constant, Facts, LOCATION_DEVICE, LOCATION_HOST, MEMORY_PLAIN, MEMORY_SHAREABLE,
    MEMORY_STREAM_ORDERED, PANICKED,
};
use super::load::ENTRY_POINT;
use super::logging::LEVELS;
use super::raw::{Struct, structs};
use super::table::{Group, TABLE_VERSIONS, Table, slot_list};
use crate::id::{FIRST_NAMED_SLOT, LEGACY_SLOT, PER_THREAD_SLOT};

const TOP: &str = r#"/* highwater.h: backends of Highwater as plugins, in C.
 *
 * Made from the list in highwater-core's plugin module; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A plugin is a shared library that exports one function, highwater_plugin. The program calls it once, and the plugin answers
 * with a struct that says who it is and where its table is. Through the table the program opens a backend and uses it.
 *
 * What holds for everything here:
 *  - Every function of the table answers 0, or one of HW_ERROR_..., and then says what was wrong in *error. It writes to its
 *    answer only where it answers 0.
 *  - Functions may be called from any thread, and several at once, except that a handle is used by one thread at a time. No
 *    device or context is current before; the plugin leaves the caller's as it was.
 *  - Every struct that is handed over by a pointer begins with its size in bytes, which the side that makes it sets; hw_id,
 *    hw_location and hw_gemm_shape stand inside of others, have none, and never grow. A shorter struct means zeros for the rest.
 *    A longer one is to be refused (HW_ERROR_INVALID_ARGUMENT) where it is not zero behind what the reader knows. Into a
 *    struct for an answer, no more than its size is written, and its size is set to what was written.
 *  - Structs and the table only ever grow at the end. Slots that are null are not supported. Slots are in groups: a table has
 *    all of a group or none.
 *  - Pointers in arguments are good until the call returns. What the plugin gives in hw_plugin lives as long as the process.
 *  - Nothing may be thrown or jumped over the border. HW_PANICKED says that something was, inside the plugin, which is then not
 *    called any more.
 *  - The library is never unloaded. Nothing is called in a forked child, and nothing once the process exits.
 *  - Matrices are column-major. Sizes are bytes where nothing else is said.
 *
 * What each operation promises is written at the method of the same name in the documentation of highwater-core's traits
 * (Backend, BlasHandle, HostAllocator, IpcSharing), clause by clause; `highwater conformance --plugin FILE` checks it.
 */
#ifndef HIGHWATER_H
#define HIGHWATER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
"#;

/// The text of `highwater.h`.
///
/// In this repository it stands in `core/include/highwater.h`, and a test holds the two together.
#[must_use]
pub fn header() -> String {
    let mut text = TOP.to_owned();
    // Writing to a text does not fail.
    let _ = write_header(&mut text);
    text
}

fn write_header(text: &mut String) -> std::fmt::Result {
    writeln!(text, "\n/* Versions of the table that this header describes. */")?;
    writeln!(text, "#define HW_TABLE_VERSION_MIN {}u", TABLE_VERSIONS.start())?;
    writeln!(text, "#define HW_TABLE_VERSION_MAX {}u", TABLE_VERSIONS.end())?;
    writeln!(text, "\n/* Answers: all went well; something was thrown inside the plugin. */")?;
    writeln!(text, "#define HW_OK 0\n#define HW_PANICKED ({PANICKED})")?;
    for (what, constants) in CHOICES {
        // Answers are of the type `int32_t`.
        let suffix = if constants.iter().any(|constant| constant.name.starts_with("ERROR_")) { "" } else { "u" };
        writeln!(text, "\n/* Numbers for {what}. */")?;
        for Constant { name, value } in *constants {
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
            "Places in ids: those from the first on are no objects; the default streams have one each, in generation 1.",
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
        for Constant { name, value } in set {
            writeln!(text, "#define HW_{name} (UINT64_C(1) << {})", value.trailing_zeros())?;
        }
    }
    writeln!(text, "\n/* An open backend, and a BLAS or an Lt handle: only the plugin knows what they are. */")?;
    writeln!(text, "typedef struct hw_backend hw_backend;\ntypedef struct hw_handle hw_handle;")?;
    writeln!(text, "typedef struct hw_table hw_table;")?;
    for one in structs() {
        write_struct(text, &one)?;
        if one.name == "hw_error" {
            writeln!(
                text,
                "\n/* Takes a log line: HW_LOG_..., the text, its bytes. May be called from any thread. */"
            )?;
            writeln!(text, "typedef void (*hw_log_call)(uint32_t level, const char *text, uint64_t bytes);")?;
        }
        if one.name == "hw_open" {
            writeln!(text, "\n/* Opens the backend. */")?;
            writeln!(
                text,
                "typedef int32_t (*hw_open_call)(const hw_open *request, hw_backend **backend, hw_error *error);"
            )?;
            writeln!(text, "/* Gives the table of a version, one of those that the plugin named. */")?;
            writeln!(text, "typedef const hw_table *(*hw_table_call)(uint32_t version);")?;
        }
    }
    writeln!(text, "\n/* The operations of a backend. */\nstruct hw_table {{")?;
    writeln!(text, "    /* Bytes of this struct. */\n    uint64_t size;")?;
    let mut group = None;
    for slot in slot_list() {
        if group != Some(slot.group) {
            group = Some(slot.group);
            writeln!(text, "\n    /* ---- group {}: {} */", slot.group.name(), words(slot.group))?;
        }
        write_comment(text, "    ", &slot.doc)?;
        writeln!(text, "    int32_t (*{})({});", slot.name, slot.arguments.join(", "))?;
    }
    writeln!(text, "}};")?;
    writeln!(
        text,
        "\n/* The one symbol of a plugin. `host` lives as long as the process. Null refuses the program. */"
    )?;
    writeln!(text, "const hw_plugin *{ENTRY_POINT}(const hw_host *host);")?;
    writeln!(text, "\n#ifdef __cplusplus\n}}\n#endif\n\n#endif /* HIGHWATER_H */")
}

const fn words(group: Group) -> &'static str {
    match group {
        Group::Required => "what every backend has",
        Group::Timing => "elapsed time between events",
        Group::Foreign => "streams and events for other code, and of other code",
        Group::Host => "page-locked host memory",
        Group::Register => "page-locking memory that somebody else allocated",
        Group::Blas => "BLAS and Lt handles",
        Group::Lt => "Lt plans",
        Group::Capture => "stream capture and replay",
        Group::Ipc => "memory and events of other processes",
        Group::Reset => "restoring a handle that foreign code had",
    }
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

/// Where every field of every struct and every slot of the table lies: a line `struct field offset bytes` for each, and
/// `struct - 0 bytes` for the struct as a whole.
///
/// The layout of each version of the table is kept, and tests hold this one and a C compiler's against it.
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
            let rules = TOP.split("have none, and never grow").next().unwrap_or_default();
            assert!(rules.contains(name) && rules.len() < TOP.len(), "the header does not say that {name} has no size");
        }
    }
}
