//! A program of cudarc that takes pinned memory, handles and products from Highwater: `cargo run --example cudarc_program`.
//!
//! It checks each result against cudarc's own and prints what it checked. The exit status is 1 if a check fails.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, sys::cublasOperation_t};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use highwater_core::{Matrix, Runtime, Stream};
use highwater_cudarc::{CudarcPinned, JoinedStream, PooledBlas, StreamExt};

/// Rows and columns of the matrices.
const N: usize = 128;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check(what: &str, holds: bool) -> Result<(), Box<dyn Error>> {
    if !holds {
        return Err(what.into());
    }
    println!("checked: {what}");
    Ok(())
}

pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    // First: without a driver, cudarc panics.
    let runtime = Runtime::new(highwater_cuda::open().map_err(|unavailable| unavailable.error)?)?;
    let context = CudaContext::new(0)?;
    println!("device: {}", context.name()?);
    let streams = [
        ("a stream of its own", context.new_stream()?),
        ("the default stream", context.default_stream()),
        ("the per-thread stream", context.per_thread_stream()),
    ];
    for (name, theirs) in streams {
        println!("on {name}:");
        on_stream(&Stream::of(&runtime, &theirs)?, &theirs)?;
    }
    context.check_err()?;
    Ok(())
}

fn on_stream(stream: &JoinedStream, theirs: &Arc<CudaStream>) -> Result<(), Box<dyn Error>> {
    // Values are staged in pinned memory of the pool. Small integers keep all products exact.
    let mut pinned = CudarcPinned::new(stream.runtime().pinned::<f32>(N * N)?, stream)?;
    for (at, value) in pinned.write()?.iter_mut().enumerate() {
        *value = (at % 7) as f32 - 3.0;
    }
    let a = theirs.clone_htod(&pinned)?;
    let mut back = CudarcPinned::new(stream.runtime().pinned::<f32>(N * N)?, stream)?;
    theirs.memcpy_dtoh(&a, &mut back)?;
    check("values come back through pinned memory of the pool", back.read()? == pinned.read()?)?;

    let expected = {
        let values = pinned.read()?;
        let dot = |row: usize, column: usize| (0..N).map(|k| values[row * N + k] * values[k * N + column]).sum::<f32>();
        (0..N * N).map(|at| dot(at / N, at % N)).collect::<Vec<_>>()
    };
    let own = product(&CudaBlas::new(theirs.clone())?, theirs, &a)?;
    check("cudarc's own handle multiplies", own == expected)?;
    let pooled = product(&PooledBlas::new(stream), theirs, &a)?;
    check("a pooled handle gives the same numbers", pooled == expected)?;

    let mut c = theirs.alloc_zeros::<f32>(N * N)?;
    {
        // SAFETY: This block uses both on `stream` only, in no capture, and drops them.
        let (a, c) = unsafe { (stream.read(&a)?, stream.write(&mut c)?) };
        let [left, right, result] = [&*a, &*a, &*c].map(|buffer| Matrix::row_major(buffer, N, N));
        stream.matmul(left, right, result).run()?;
    }
    check("Highwater multiplies slices of cudarc", theirs.clone_dtoh(&c)? == expected)?;

    let ours = stream.upload(&vec![0.0_f32; N * N])?;
    theirs.memcpy_dtod(&c, &mut stream.lend(&ours)?)?;
    drop(c);
    check("cudarc copies to a buffer of Highwater", stream.download(&ours)? == expected)
}

/// A product as a program of cudarc writes it: row by row, so `a` and `b` change places.
fn product<B: Gemm<f32>>(blas: &B, stream: &Arc<CudaStream>, a: &CudaSlice<f32>) -> Result<Vec<f32>, Box<dyn Error>> {
    let mut c = stream.alloc_zeros::<f32>(N * N)?;
    let (keep, n) = (cublasOperation_t::CUBLAS_OP_N, i32::try_from(N)?);
    let config =
        GemmConfig { transa: keep, transb: keep, m: n, n, k: n, alpha: 1.0, lda: n, ldb: n, beta: 0.0, ldc: n };
    // SAFETY: All matrices have `N` rows and columns.
    unsafe { blas.gemm(config, a, a, &mut c)? };
    Ok(stream.clone_dtoh(&c)?)
}
