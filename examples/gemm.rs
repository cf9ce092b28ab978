//! Multiplies two matrices on the best device of the machine, or on the mock.
//!
//! `cargo run --example gemm`, or `--no-default-features --features cuda` for one backend only.

#![forbid(unsafe_code)]

use highwater::{Fallback, Matrix, Result, Runtime, open_best};

fn main() -> Result<()> {
    let opened = open_best(Fallback::Mock)?;
    println!("{}", opened.report);
    let runtime = Runtime::new(opened.backend)?;
    {
        let device = runtime.device(0)?;
        let stream = device.create_stream()?;
        let a = stream.upload(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
        let b = stream.upload(&[7.0_f32, 8.0, 9.0, 10.0, 11.0, 12.0])?;
        let c = device.allocate::<f32>(4)?;
        // The handle comes from the pool and goes back at the end of the statement.
        stream.matmul(Matrix::row_major(&a, 2, 3), Matrix::row_major(&b, 3, 2), Matrix::row_major(&c, 2, 2)).run()?;
        println!("{device}: {:?}", stream.download(&c)?);
    }
    println!("{} objects are left", runtime.close()?.total());
    Ok(())
}
