//! Shares device memory between two processes: `cargo run --example share`.
//!
//! The second process is this program, started again with the ticket as its argument.

#![forbid(unsafe_code)]

use std::process::Command;

use highwater::{Fallback, Result, Runtime, Ticket};

const VALUES: usize = 1 << 20;

fn main() -> Result<()> {
    // A real device if one works, else the mock.
    let runtime = Runtime::open_best(Fallback::Mock)?;
    match std::env::args().nth(1) {
        Some(ticket) => add(&runtime, &ticket.parse()?),
        None => share(&runtime),
    }
}

/// Shares a buffer, and reads the values that the other process wrote to it.
fn share(runtime: &Runtime) -> Result<()> {
    let device = runtime.device(0)?;
    let stream = device.create_stream()?;
    let buffer = device.allocate_shared::<u32>(VALUES)?;
    stream.fill(&buffer, 1_u32)?;
    let ticket = buffer.share()?.to_string();
    println!("process {} shares {} bytes", std::process::id(), VALUES * size_of::<u32>());
    let program = std::env::current_exe().expect("a program knows where it is");
    let status = Command::new(program).arg(ticket).status().expect("it can be started again");
    assert!(status.success(), "the other process: {status}");
    assert_eq!(stream.download(&buffer)?, vec![2; VALUES]);
    println!("process {} reads what the other wrote", std::process::id());
    Ok(())
}

/// Opens the other process's buffer and writes to it.
fn add(runtime: &Runtime, ticket: &Ticket) -> Result<()> {
    let stream = runtime.device(0)?.create_stream()?;
    let buffer = runtime.open_shared::<u32>(ticket)?;
    assert_eq!(stream.download(&buffer)?, vec![1; VALUES]);
    stream.fill(&buffer, 2_u32)?;
    stream.synchronize()?;
    println!("process {} opened it and wrote to it", std::process::id());
    Ok(())
}
