//! A kernel of the program's own, compiled by NVRTC, on memory of Highwater: `cargo run --example own_kernel`.
//!
//! Where NVRTC is missing, or the driver loads no modules, a fill takes the kernel's place, and the program says so. The exit status is
//! 1 if a check fails. With the argument `--kernel`, it is also 1 if the kernel cannot run.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DevicePtrMut, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc;
use highwater_core::{Runtime, Stream};
use highwater_cudarc::{JoinedStream, LentBuffer, StreamExt};

const AXPY: &str = r#"
extern "C" __global__ void axpy(float a, const float *x, float *y, size_t n) {
    size_t at = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (at < n) y[at] += a * x[at];
}
"#;
const LEN: usize = 100_000;

fn main() -> ExitCode {
    match run(std::env::args().any(|argument| argument == "--kernel")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn run(needs_kernel: bool) -> Result<(), Box<dyn Error>> {
    // First: without a driver, cudarc panics.
    let runtime = Runtime::new(highwater_cuda::open().map_err(|unavailable| unavailable.error)?)?;
    let context = CudaContext::new(0)?;
    println!("device: {}", context.name()?);
    let kernel = match compile(&context)? {
        Ok(kernel) => Some(kernel),
        Err(reason) if needs_kernel => return Err(reason.into()),
        Err(reason) => {
            println!("no kernel: {reason}; a fill takes its place");
            None
        }
    };
    for (name, theirs) in
        [("a stream of its own", context.new_stream()?), ("the per-thread stream", context.per_thread_stream())]
    {
        on_stream(&Stream::of(&runtime, &theirs)?, kernel.as_ref())?;
        let work = if kernel.is_some() { "the kernel" } else { "the fill" };
        println!("checked: {work} on {name} wrote {LEN} values, and its memory was freed after it");
    }
    context.check_err()?;
    Ok(())
}

/// Compiles the kernel. The inner error is the reason why this machine cannot.
fn compile(context: &Arc<CudaContext>) -> Result<Result<CudaFunction, String>, Box<dyn Error>> {
    // SAFETY: Both look for names in libraries, which stay loaded.
    let (has_nvrtc, loads_modules) = unsafe {
        (nvrtc::sys::is_culib_present(), sys::culib().get::<unsafe extern "C" fn()>(b"cuModuleLoadData\0").is_ok())
    };
    if !has_nvrtc {
        return Ok(Err("NVRTC is not installed".to_owned()));
    }
    if !loads_modules {
        return Ok(Err("the driver has no cuModuleLoadData".to_owned()));
    }
    let module = context.load_module(nvrtc::compile_ptx(AXPY)?)?;
    Ok(Ok(module.load_function("axpy")?))
}

fn on_stream(stream: &JoinedStream, kernel: Option<&CudaFunction>) -> Result<(), Box<dyn Error>> {
    let device = stream.runtime().device(stream.device())?;
    let (x, y) = (stream.upload(&vec![1.0_f32; LEN])?, stream.upload(&vec![3.0_f32; LEN])?);
    let result = device.allocate::<f32>(LEN)?;
    {
        // `lend` notes the use before the launch, and on a per-thread stream its drop notes it once more.
        let (x, mut y) = (stream.lend(&x)?, stream.lend(&y)?);
        match kernel {
            Some(kernel) => launch(stream.cuda_stream(), kernel, &x, &y)?,
            None => fill(stream.cuda_stream(), &mut y)?,
        }
    }
    stream.copy(&y, &result)?;
    // The kernel may still run. Highwater frees the memory after it, and gives it to no other stream before.
    drop((x, y));
    let elsewhere = device.create_stream()?;
    let others = [device.allocate::<f32>(LEN)?, device.allocate::<f32>(LEN)?];
    for other in &others {
        elsewhere.fill(other, 9.0_f32)?;
    }
    if stream.download(&result)? != vec![5.0; LEN] {
        return Err("the kernel's memory has other values than 5".into());
    }
    if others.iter().any(|other| elsewhere.download(other).ok() != Some(vec![9.0; LEN])) {
        return Err("the kernel wrote memory that was freed".into());
    }
    Ok(())
}

fn launch(
    stream: &CudaStream,
    kernel: &CudaFunction,
    x: &LentBuffer<'_, f32>,
    y: &LentBuffer<'_, f32>,
) -> Result<(), Box<dyn Error>> {
    let (factor, len) = (2.0_f32, LEN);
    let mut arguments = stream.launch_builder(kernel);
    arguments.arg(&factor).arg(x).arg(y).arg(&len);
    // SAFETY: The arguments have the types of the kernel, which stays inside the buffers.
    unsafe { arguments.launch(LaunchConfig::for_num_elems(u32::try_from(LEN)?))? };
    Ok(())
}

/// Writes what the kernel would.
fn fill(stream: &CudaStream, y: &mut LentBuffer<'_, f32>) -> Result<(), Box<dyn Error>> {
    let (address, _uses) = y.device_ptr_mut(stream);
    // SAFETY: The buffer has `LEN` values, and is noted.
    unsafe { sys::cuMemsetD32Async(address, 5.0_f32.to_bits(), LEN, stream.cu_stream()).result()? };
    Ok(())
}
