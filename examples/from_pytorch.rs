//! Opens device memory of a Python program that uses PyTorch: `python examples/from_pytorch.py target/debug/examples/from_pytorch`.
//!
//! The Python program starts this one. It writes a number of tensors, and then the result of `storage._share_cuda_()` of each as a
//! line of text. This program reports the values, and releases the tensors on request.

#![forbid(unsafe_code)]

use std::io::{BufRead, Write};
use std::time::Instant;

use highwater::{DeviceBuffer, Result, Runtime};
use highwater_pytorch::TorchStorage;

fn main() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines().map(|line| line.expect("the Python program writes text"));
    let backend = std::env::args().nth(1).unwrap_or_else(|| "cuda".to_owned());
    let runtime = Runtime::open(&backend)?;
    let device = runtime.device(0)?;
    let stream = device.create_stream()?;
    let mut output = std::io::stdout().lock();
    let mut say =
        |line: String| output.write_all(line.as_bytes()).and_then(|()| output.flush()).expect("the pipe is open");

    let tensors: usize = lines.next().and_then(|line| line.trim().parse().ok()).expect("the number of tensors");
    let storages: Vec<TorchStorage> = lines.by_ref().take(tensors).map(|line| line.parse()).collect::<Result<_>>()?;
    let started = Instant::now();
    let opened = storages.iter().map(|storage| highwater_pytorch::open::<f32>(&device, storage));
    let opened: Vec<DeviceBuffer<f32>> = opened.collect::<Result<_>>()?;
    say(format!("opened {} {}\n", opened.len(), started.elapsed().as_micros()));

    // Each line from Python is a command.
    let mut opened = Some(opened);
    for command in lines {
        match (command.trim(), &opened) {
            ("compare", Some(opened)) => {
                // The Python program compares: each tensor has one value, repeated.
                for (index, buffer) in opened.iter().enumerate() {
                    let values = stream.download(buffer)?;
                    let same = values.iter().all(|value| *value == values[0]);
                    say(format!("values {index} {} {} {}\n", values.len(), values[0], u8::from(same)));
                }
            }
            ("write", Some(opened)) => {
                // The Python program sees these values in its own tensors.
                opened.iter().try_for_each(|buffer| stream.fill(buffer, -1.0_f32))?;
                stream.synchronize()?;
                say("written\n".to_owned());
            }
            ("release", Some(_)) => {
                opened = None;
                say("released\n".to_owned());
            }
            _ => break,
        }
    }
    drop((opened, stream, device));
    let left = runtime.close()?.total();
    say(format!("closed {left}\n"));
    Ok(())
}
