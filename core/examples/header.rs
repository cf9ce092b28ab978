//! Prints `highwater.h`: `cargo run -q -p highwater-core --example header > core/include/highwater.h`. With `layout`, prints
//! where every field lies.

fn main() {
    match std::env::args().nth(1).as_deref() {
        None => print!("{}", highwater_core::plugin::header()),
        Some("layout") => print!("{}", highwater_core::plugin::layout()),
        Some(other) => {
            eprintln!("error: unknown argument `{other}`\nhint: `layout`, or nothing for the header");
            std::process::exit(2);
        }
    }
}
