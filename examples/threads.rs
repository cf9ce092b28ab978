//! Shares one device between threads: each has a stream, handles come from the pool, and the weights are uploaded once.

#![forbid(unsafe_code)]

use std::thread;

use highwater::{Epilogue, Fallback, GemmShape, Result, Runtime};

fn main() -> Result<()> {
    let runtime = Runtime::open_best(Fallback::Mock)?;
    let device = runtime.device(0)?;
    let uploads = device.create_stream()?;
    let weight = uploads.upload(&[1.0_f32, 0.0, -1.0, 0.0, 2.0, -2.0])?; // 3 x 2, column-major
    let bias = uploads.upload(&[0.5_f32, 0.5, 0.5])?;
    let uploaded = uploads.record()?;
    let layer = |input: [f32; 2]| -> Result<Vec<f32>> {
        let stream = device.create_stream()?;
        stream.wait(&uploaded)?; // The device waits, not this thread.
        let (input, output) = (stream.upload(&input)?, device.allocate::<f32>(3)?);
        let shape = GemmShape::of::<f32>(3, 1, 2);
        let bias = Some((&bias).into());
        stream.lt()?.matmul(&shape, Epilogue::BiasRelu, 1.0, &weight, &input, 0.0, &output, bias)?;
        stream.download(&output)
    };
    thread::scope(|scope| -> Result<()> {
        let threads = [[1.0, 2.0], [3.0, 4.0], [-1.0, -2.0]].map(|input| scope.spawn(move || layer(input)));
        for thread in threads {
            println!("{:?}", thread.join().expect("no thread panics")?);
        }
        Ok(())
    })?;
    let handles = runtime.statistics().lt_handles;
    println!("{} handles for {} threads", handles.created, handles.threads_served);
    Ok(())
}
