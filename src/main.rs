//! The `highwater` program: classifies handwritten digits through the library, says which backends work here, and runs
//! the conformance suite.

#![forbid(unsafe_code)]

mod program;

fn main() -> std::process::ExitCode {
    program::main()
}
