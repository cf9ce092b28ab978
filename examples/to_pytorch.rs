//! Shares device memory with a Python program that uses PyTorch: `python examples/to_pytorch.py target/debug/examples/to_pytorch`.
//!
//! The Python program starts this one. It writes the id of the receiving process, and a number of tensors. This program answers
//! with a line for each tensor, which `torch.UntypedStorage._new_shared_cuda` opens. Then it reports the shares that it waits for.

#![forbid(unsafe_code)]

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use highwater::{DeviceBuffer, Result, Runtime, Transport};
use highwater_pytorch::{Receiver, Sender};

/// Values of a block of memory, and of the part of it that a tensor has.
const BLOCK: usize = 20 * PART;
const PART: usize = 1 << 16;

fn main() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines().map(|line| line.expect("the Python program writes text"));
    let mut number = || lines.next().and_then(|line| line.trim().parse::<u32>().ok());
    let backend = std::env::args().nth(1).unwrap_or_else(|| "cuda".to_owned());
    let runtime = Runtime::open(&backend)?;
    let device = runtime.device(0)?;
    let stream = device.create_stream()?;
    let sender = Sender::new(&runtime)?;

    let (process, tensors) =
        (number().expect("the receiver's process"), number().expect("the number of tensors") as usize);
    // The share of a receiver that is killed ends with its process.
    let receiver = Receiver::by_pid(process)?;
    let blocks =
        (0..tensors.div_ceil(BLOCK / PART)).map(|_| device.allocate_shared_by::<f32>(BLOCK, Transport::Legacy));
    let blocks: Vec<DeviceBuffer<f32>> = blocks.collect::<Result<_>>()?;
    let started = Instant::now();
    let mut text = String::new();
    for tensor in 0..tensors {
        let start = tensor % (BLOCK / PART) * PART;
        let len = 1 + tensor * 97 % PART;
        let values = blocks[tensor / (BLOCK / PART)].slice(start..start + len)?;
        stream.fill(values, tensor as f32)?;
        text += &format!("tensor {}\n", sender.share_with(values, &stream, &receiver)?);
    }
    let took = started.elapsed().as_micros();
    let mut output = std::io::stdout().lock();
    let mut say =
        |line: &str| output.write_all(line.as_bytes()).and_then(|()| output.flush()).expect("the pipe is open");
    say(&text);
    say(&format!("shared {tensors} {took}\n"));
    // From now on, only the receiver keeps the memory.
    drop(blocks);

    // The Python program says when it expects the shares to have ended. Its end says so, too.
    let _ = number();
    let started = Instant::now();
    let ended = sender.wait(Some(Duration::from_secs(10)));
    let took = started.elapsed().as_micros();
    stream.synchronize()?;
    // Blocks of device memory that are still allocated.
    let (left, blocks) = (sender.outstanding(), runtime.backend().live_objects().allocations);
    say(&format!("ended {} {left} {blocks} {took}\n", u8::from(ended)));
    drop((sender, stream, device));
    // In the end nothing is left, if every share has ended.
    match runtime.close() {
        Ok(left) => say(&format!("closed {}\n", left.total())),
        Err(error) => say(&format!("closed {error}\n")),
    }
    Ok(())
}
