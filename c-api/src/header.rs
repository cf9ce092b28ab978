//! The header, from the declarations. `HIGHWATER_WRITE_HEADER=1 cargo test -p highwater-c header` writes it.

use std::fmt::Write as _;

use front::hal::numbers::CHOICES;

use crate::declare::{Function, Struct};
use crate::{blas, capture, device, memory, opening, sharing, stream};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/highwater/highwater.h");

const TOP: &str = include_str!("header/top.h");
const BOTTOM: &str = "\n#ifdef __cplusplus\n}\n#endif\n\n#endif\n";

/// The C name of a Rust type, with the space or the star before a name.
fn c_type(rust: &str) -> String {
    let words: Vec<&str> = rust.split([' ', '*']).filter(|word| !word.is_empty()).collect();
    let (base, qualifiers) = words.split_last().unwrap();
    let base = match *base {
        "c_char" => "char",
        "c_void" => "void",
        "u8" => "uint8_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "i64" => "int64_t",
        "usize" => "size_t",
        "f64" => "double",
        "bool" => "bool",
        name => {
            assert!(name.starts_with("highwater_"), "a type without a name in C: {rust}");
            name
        }
    };
    let constant = if qualifiers.last() == Some(&"const") { "const " } else { "" };
    format!("{constant}{base} {}", "*".repeat(qualifiers.len()))
}

fn comment(text: &mut String, indent: &str, docs: &[&str]) {
    match docs {
        [line] => writeln!(text, "{indent}/*{line} */").unwrap(),
        lines => {
            for (index, line) in lines.iter().enumerate() {
                let start = if index == 0 { "/*" } else { " *" };
                let end = if index + 1 == lines.len() { " */" } else { "" };
                writeln!(text, "{indent}{start}{line}{end}").unwrap();
            }
        }
    }
}

fn function(text: &mut String, function: &Function) {
    text.push('\n');
    comment(text, "", function.docs);
    let arguments: Vec<String> =
        function.arguments.iter().map(|(name, rust)| format!("{}{name}", c_type(rust))).collect();
    let line = format!("highwater_status {}({});", function.name, arguments.join(", "));
    if line.len() <= 120 {
        writeln!(text, "{line}").unwrap();
    } else {
        writeln!(text, "highwater_status {}(\n    {});", function.name, arguments.join(",\n    ")).unwrap();
    }
}

fn structure(text: &mut String, structure: &Struct) {
    text.push('\n');
    comment(text, "", structure.docs);
    writeln!(text, "typedef struct {} {{", structure.name).unwrap();
    writeln!(text, "    /* sizeof({}). */\n    size_t size;", structure.name).unwrap();
    for (docs, name, rust) in structure.fields {
        comment(text, "    ", docs);
        writeln!(text, "    {}{name};", c_type(rust)).unwrap();
    }
    writeln!(text, "}} {};", structure.name).unwrap();
}

fn header() -> String {
    let mut text = TOP.to_owned();
    writeln!(text, "\n/* Statuses. */\n#define HIGHWATER_OK 0\n#define HIGHWATER_PANICKED (-1)").unwrap();
    for (what, constants) in CHOICES {
        let used = ["ERROR_", "DATA_TYPE_", "CAPTURE_"];
        if !used.iter().any(|prefix| constants[0].name.starts_with(prefix)) {
            continue;
        }
        let errors = constants[0].name.starts_with("ERROR_");
        if !errors {
            writeln!(text, "\n/* Numbers for {what}. */").unwrap();
        }
        for constant in *constants {
            writeln!(text, "#define HIGHWATER_{} {}{}", constant.name, constant.value, if errors { "" } else { "u" })
                .unwrap();
        }
    }
    let deaths = "\n/* What happens to opened memory when its owner dies: it stays until the buffer is released; it is released at once; this\n \
        * process becomes the owner. */\n#define HIGHWATER_OWNER_DEATH_KEEP 0u\n#define HIGHWATER_OWNER_DEATH_RELEASE 1u\n#define \
        HIGHWATER_OWNER_DEATH_INHERIT 2u\n";
    text.push_str(deaths);
    for (name, docs) in [opening::KINDS, device::KINDS, stream::KINDS, memory::KINDS, capture::KINDS].concat() {
        text.push('\n');
        comment(&mut text, "", docs);
        writeln!(text, "typedef struct {name} {name};").unwrap();
    }
    text.push_str(include_str!("header/callbacks.h"));
    for one in [opening::STRUCTS, blas::STRUCTS].concat_all() {
        structure(&mut text, one);
    }
    text.push_str(include_str!("header/texts.h"));
    let parts = [
        opening::FUNCTIONS,
        device::FUNCTIONS,
        stream::FUNCTIONS,
        memory::FUNCTIONS,
        blas::FUNCTIONS,
        capture::FUNCTIONS,
        sharing::FUNCTIONS,
    ];
    for one in parts.concat_all() {
        function(&mut text, one);
    }
    text.push_str(include_str!("header/standing.h"));
    text.push_str(BOTTOM);
    text
}

/// Joins lists of values that are not `Clone`.
trait ConcatAll<T> {
    fn concat_all(&self) -> Vec<&'static T>;
}

impl<T, const N: usize> ConcatAll<T> for [&'static [T]; N] {
    fn concat_all(&self) -> Vec<&'static T> {
        self.iter().flat_map(|list| list.iter()).collect()
    }
}

#[test]
fn the_header_is_that_of_the_code() {
    let expected = header();
    if std::env::var_os("HIGHWATER_WRITE_HEADER").is_some() {
        std::fs::write(PATH, &expected).unwrap();
    }
    let found = std::fs::read_to_string(PATH).unwrap();
    assert_eq!(found, expected, "run `HIGHWATER_WRITE_HEADER=1 cargo test -p highwater-c header`");
}

#[test]
fn types_have_their_c_names() {
    let c =
        ["* mut * mut highwater_stream", "*const c_char", "usize", "* mut bool", "*const highwater_gemm"].map(c_type);
    assert_eq!(c, ["highwater_stream **", "const char *", "size_t ", "bool *", "const highwater_gemm *"]);
}
