//! The header is that of the code. `HIGHWATER_WRITE_HEADER=1 cargo test -p highwater-c --test header` writes it.

use std::path::Path;

const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn the_header_is_that_of_the_code() {
    let config = cbindgen::Config::from_file(Path::new(FOLDER).join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::generate_with_config(FOLDER, config).unwrap();
    let mut expected = Vec::new();
    bindings.write(&mut expected);
    let expected = String::from_utf8(expected).unwrap();
    let path = Path::new(FOLDER).join("include/highwater/highwater.h");
    if std::env::var_os("HIGHWATER_WRITE_HEADER").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap();
    // The whole header is too long for a message.
    let differs = (1..).zip(found.lines().zip(expected.lines())).find(|(_, (found, expected))| found != expected);
    assert!(
        found == expected,
        "run `HIGHWATER_WRITE_HEADER=1 cargo test -p highwater-c --test header`; the first line that differs: {differs:?}"
    );
}

/// `call!` gets the name of the function, for its messages.
#[test]
fn each_function_names_itself_in_its_errors() {
    let mut functions = 0;
    for file in std::fs::read_dir(Path::new(FOLDER).join("src")).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for function in text.split("\npub unsafe extern \"C\" fn ").skip(1) {
            let name = function.split('(').next().unwrap();
            let body = function.split("\n}\n").next().unwrap();
            if let Some((_, call)) = body.split_once("call!(") {
                assert_eq!(call.split(',').next().unwrap(), name);
                functions += 1;
            }
        }
    }
    assert!(functions > 50, "{functions}");
}
