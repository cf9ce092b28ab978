//! Multiplies two matrices on the best device that there is, or on the mock.
//!
//! `cargo run --example gemm`, or `--no-default-features --features cuda` for one backend only.

#![forbid(unsafe_code)]

use highwater::{Fallback, GemmShape, Result, Runtime};

fn main() -> Result<()> {
    let opened = highwater::open_best(Fallback::Mock)?;
    println!("{}", opened.report);
    let runtime = Runtime::new(opened.backend)?;
    {
        let device = runtime.device(0)?;
        let stream = device.create_stream()?;
        // Column-major, as in every BLAS: A is 2 x 3, B is 3 x 2.
        let a = stream.upload(&[1.0_f32, 4.0, 2.0, 5.0, 3.0, 6.0])?;
        let b = stream.upload(&[7.0_f32, 9.0, 11.0, 8.0, 10.0, 12.0])?;
        let c = device.allocate::<f32>(4)?;
        // The handle comes from the pool and goes back at the end of the statement.
        stream.blas()?.gemm(&GemmShape::of::<f32>(2, 2, 3), 1.0, &a, &b, 0.0, &c)?;
        println!("{:?}", stream.download(&c)?);
    }
    println!("{} objects are left", runtime.close()?.total());
    Ok(())
}
