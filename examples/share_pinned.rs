//! Several processes copy one page-locked buffer to their device: `cargo run --release --example share_pinned`.
//!
//! Arguments: the number of processes, the MiB of the buffer, and the backend. By default these are 4, 256, and a real device
//! if one works, else the mock. The program prints the speed of each process's copies. It also prints the proportional set size
//! (PSS) of the buffer, in which a page counts as a part for each process that maps it. The sum is the size of one copy.
//!
//! The other processes are this program, started again with the ticket.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use highwater::{Fallback, PinnedSlice, Result, Runtime, SharedPinnedBuffer, Ticket};

const MIB: usize = 1 << 20;
const COPIES: u32 = 8;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default| arguments.get(at).map_or(default, |text| text.parse().expect("a number"));
    let runtime = match arguments.get(2) {
        Some(backend) => Runtime::open(backend)?,
        None => Runtime::open_best(Fallback::Mock)?,
    };
    match arguments.get(3) {
        Some(ticket) => open(&runtime, &ticket.parse()?),
        None => share(&runtime, number(0, 4), number(1, 256)),
    }
}

/// Fills a buffer, shares it with other processes, and adds up what all of them have.
fn share(runtime: &Runtime, processes: usize, mib: usize) -> Result<()> {
    let pinned = runtime.pinned::<u32>(mib * MIB / 4)?;
    println!("memory of the pool: {:.1} GB/s", copy(runtime, || (&pinned).into(), mib)?);
    drop(pinned);
    let mut buffer = runtime.pinned_shared::<u32>(mib * MIB / 4)?;
    buffer.write()?.fill(7);
    let ticket = buffer.share()?.to_string();
    let backend = &*runtime.identity().name;
    let program = std::env::current_exe().expect("a program knows where it is");
    let start = |_| {
        let mut command = Command::new(&program);
        let arguments = [&processes.to_string(), &mib.to_string(), backend, &ticket];
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().expect("it can be started again")
    };
    let mut others: Vec<Child> = (1..processes).map(start).collect();
    // Each prints a line once it has the buffer, and keeps it until its input ends.
    for other in &mut others {
        let mut line = String::new();
        let output = other.stdout.as_mut().expect("it is piped");
        BufReader::new(output).read_line(&mut line).expect("the other process answers");
        print!("process {}: {line}", other.id());
    }
    println!("process {}: {:.1} GB/s", std::process::id(), speed(runtime, &buffer)?);
    let all = others.iter().map(Child::id).chain([std::process::id()]);
    let pss: Option<u64> = all.map(pss_of_buffer).sum();
    println!("PSS of the buffer in {processes} processes: {} KiB, of {} KiB", pss.unwrap_or(0), mib * 1024);
    for mut other in others {
        drop(other.stdin.take());
        assert!(other.wait().expect("it ends").success(), "the other process failed");
    }
    Ok(())
}

/// Opens the buffer, copies it, and keeps it until the input ends.
fn open(runtime: &Runtime, ticket: &Ticket) -> Result<()> {
    let buffer = runtime.open_pinned::<u32>(ticket)?;
    assert!(buffer.read()?.iter().all(|value| *value == 7));
    println!("{:.1} GB/s", speed(runtime, &buffer)?);
    std::io::stdout().flush().expect("the output is open");
    std::io::stdin().lines().for_each(drop);
    Ok(())
}

/// Returns the speed of copies of a shared buffer.
fn speed(runtime: &Runtime, buffer: &SharedPinnedBuffer<u32>) -> Result<f64> {
    copy(runtime, || buffer.into(), buffer.len() * 4 / MIB)
}

/// Returns the GB/s of copies to the first device.
fn copy<'b>(runtime: &Runtime, from: impl Fn() -> PinnedSlice<'b, u32>, mib: usize) -> Result<f64> {
    let device = runtime.device(0)?;
    let (stream, target) = (device.create_stream()?, device.allocate::<u32>(mib * MIB / 4)?);
    stream.copy_to_device(from(), &target)?;
    stream.synchronize()?;
    let started = Instant::now();
    (0..COPIES).try_for_each(|_| stream.copy_to_device(from(), &target))?;
    stream.synchronize()?;
    let bytes = f64::from(COPIES) * (mib * MIB) as f64;
    Ok(bytes / started.elapsed().as_secs_f64() / 1e9)
}

/// Returns the PSS of the buffer in a process, in KiB, if the system reports it.
fn pss_of_buffer(pid: u32) -> Option<u64> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    let lines = smaps.lines().skip_while(|line| !line.contains("memfd:highwater-pinned"));
    let pss = lines.into_iter().find_map(|line| line.strip_prefix("Pss:"))?;
    pss.trim().strip_suffix(" kB")?.trim().parse().ok()
}
