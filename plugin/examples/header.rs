//! Prints `highwater.h`: `cargo run -q -p highwater-plugin --example header > plugin/include/highwater.h`. With `layout`, prints
//! where every field lies.

fn main() {
    match std::env::args().nth(1).as_deref() {
        None => print!("{}", highwater_plugin::header()),
        Some("layout") => print!("{}", highwater_plugin::layout()),
        Some(other) => {
            eprintln!("error: unknown argument `{other}`\nhint: `layout`, or nothing for the header");
            std::process::exit(2);
        }
    }
}
