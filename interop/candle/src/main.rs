//! A candle program that stages through Highwater's pinned pool and multiplies with its pooled handles.
//!
//! It runs a model with candle alone and with the pools. It checks that all outputs are candle's own numbers, bit for bit, and prints the time
//! for staging and for handles. The exit status is 1 if a number differs.

mod measure;
mod model;
mod report;
mod ways;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::cublas::CudaBlas;
use clap::{Parser, ValueEnum};
use highwater::Runtime;
use highwater::hal::HostMemoryKind;

use measure::{Result, Samples, Summary, together};
use model::{Model, Sizes, Values};
use report::{Report, Row};
use ways::{Memory, Place, Staging, Way, read_back};

/// Runs a model with candle alone and with Highwater's pools, and compares numbers and times.
#[derive(Debug, Parser)]
struct Options {
    /// Samples of each figure in each thread, after the first one.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: u32,
    /// Threads that work at the same time. One thread is measured, too.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Measures one of candle's streams only.
    #[arg(long)]
    stream: Option<StreamKind>,
    /// Rows of the inputs.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Columns of the inputs, and rows and columns of each weight.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..))]
    width: u16,
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=1000))]
    layers: u16,
    /// Leaves out bias and activation, which need candle's kernels.
    #[arg(long)]
    products_only: bool,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum StreamKind {
    /// That of `Device::new_cuda`.
    PerThread,
    /// That of `Device::new_cuda_with_stream`.
    Own,
}

impl StreamKind {
    fn name(self) -> &'static str {
        match self {
            Self::PerThread => "per-thread",
            Self::Own => "own",
        }
    }

    fn device(self) -> Result<Device> {
        Ok(match self {
            Self::PerThread => Device::new_cuda(0)?,
            Self::Own => Device::new_cuda_with_stream(0)?,
        })
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let report = match run(&options) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("failed: {error}");
            return ExitCode::FAILURE;
        }
    };
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).expect("the report has text keys"))
    } else {
        report.print()
    }
    if report.differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(options: &Options) -> Result<Report> {
    // Highwater opens first, because its error names what is missing.
    let runtime = Runtime::open("cuda")?;
    let values = Values::new(Sizes {
        batch: options.batch.into(),
        width: options.width.into(),
        layers: options.layers.into(),
        products_only: options.products_only,
    });
    let kinds = options.stream.map_or(vec![StreamKind::PerThread, StreamKind::Own], |kind| vec![kind]);
    let expected = expected(&values, kinds[0])?;
    let iterations = options.iterations as usize;
    let program = Program {
        runtime,
        values,
        expected,
        iterations,
        equal: AtomicUsize::new(0),
        differences: Mutex::new(Vec::new()),
    };

    let mut rows = Vec::new();
    for kind in kinds {
        for threads in [1].into_iter().chain((options.threads > 1).then_some(options.threads.into())) {
            let row = |(what, time)| Row { stream: kind.name(), threads, what, time };
            rows.extend(program.measure(kind, threads)?.into_iter().map(row));
        }
    }
    let sizes = program.values.sizes;
    Ok(Report {
        device: program.runtime.device(0)?.info().name.clone(),
        iterations,
        sizes,
        staged_bytes: sizes.staged_bytes(),
        equal: program.equal.into_inner(),
        differences: program.differences.into_inner().unwrap_or_default(),
        rows,
    })
}

/// Returns candle's own numbers on the device, and checks them against those of its CPU.
fn expected(values: &Values, kind: StreamKind) -> Result<Vec<f32>> {
    let device = kind.device()?;
    let numbers = Model::alone(values, &device)?.run(&Way::Candle)?.flatten_all()?.to_vec1::<f32>()?;
    let cpu = values.on_cpu()?;
    let largest = cpu.iter().fold(0.0_f32, |most, it| most.max(it.abs()));
    // Sums of another order differ by rounding only.
    let apart = numbers.iter().zip(&cpu).fold(0.0_f32, |most, (one, other)| most.max((one - other).abs()));
    let agrees = largest > 0.0 && apart <= largest * 1e-3;
    if !agrees || numbers.iter().any(|it| !it.is_finite()) {
        return Err(
            format!("candle on CUDA and on the CPU differ by {apart}, expected at most {}", largest * 1e-3).into()
        );
    }
    Ok(numbers)
}

struct Program {
    runtime: Runtime,
    values: Values,
    expected: Vec<f32>,
    iterations: usize,
    equal: AtomicUsize,
    differences: Mutex<Vec<String>>,
}

impl Program {
    fn measure(&self, kind: StreamKind, threads: usize) -> Result<Vec<(&'static str, Summary)>> {
        use HostMemoryKind::{Default, WriteCombined};
        let mut rows = Vec::new();
        for (memory, staged, pinned) in [
            (Memory::Pageable, "stage: candle, pageable", None),
            (Memory::Cudarc, "stage: pinned of cudarc", Some("  of it alloc and free")),
            (Memory::Pool(Default), "stage: pinned of the pool", Some("  of it take and return")),
            (Memory::Pool(WriteCombined), "stage: the same, write-combined", Some("  of it take and return")),
        ] {
            let both = together(threads, || self.place(kind), |place| self.stage(&place, memory))?;
            let (total, part): (Vec<_>, Vec<_>) = both.into_iter().unzip();
            rows.push((staged, Summary::of(&total)));
            rows.extend(pinned.map(|name| (name, Summary::of(&part))));
        }
        let devices = together(threads, || Ok(()), |()| self.samples(|| kind.device()))?;
        rows.push(("handle: candle's device", Summary::of(&devices)));
        let created = together(threads, || self.place(kind), |place| self.handles_of_cudarc(&place))?;
        rows.push(("handle: CudaBlas, new and drop", Summary::of(&created)));
        let leased = |place: Place| self.handles_of_the_pool(|| Ok(place.stream.blas()?));
        rows.push(("handle: of the pool, a lease", Summary::of(&together(threads, || self.place(kind), leased)?)));
        let product = |place: Place| {
            // SAFETY: Nothing is done with the handle.
            self.handles_of_the_pool(|| Ok(unsafe { place.stream.blas()?.enqueue_raw(black_box)? }))
        };
        rows.push((
            "handle: of the pool, of a product",
            Summary::of(&together(threads, || self.place(kind), product)?),
        ));
        let lent = |place: Place| self.handles_of_the_pool(|| Ok(place.blas.with_handle(black_box)?));
        rows.push(("handle: of the pool, with_handle", Summary::of(&together(threads, || self.place(kind), lent)?)));
        for (name, memory, pooled) in [
            ("run: candle alone", Memory::Pageable, false),
            ("run: pinned of cudarc", Memory::Cudarc, false),
            ("run: pinned of the pool", Memory::Pool(Default), false),
            ("run: the same and its handles", Memory::Pool(Default), true),
        ] {
            let runs = together(threads, || self.place(kind), |place| self.runs(&place, (name, memory, pooled)))?;
            rows.push((name, Summary::of(&runs)));
        }
        Ok(rows)
    }

    fn place(&self, kind: StreamKind) -> Result<Place> {
        Ok(Place::new(&self.runtime, kind.device()?)?)
    }

    /// Measures `work` and the drop of its result.
    fn samples<R>(&self, mut work: impl FnMut() -> Result<R>) -> Result<Samples> {
        let one = |_| {
            let start = Instant::now();
            drop(black_box(work()?));
            Ok(start.elapsed())
        };
        (0..=self.iterations).map(one).collect()
    }

    /// Returns the times to stage a model, and the parts of them for pinned memory.
    fn stage(&self, place: &Place, memory: Memory) -> Result<(Samples, Samples)> {
        let mut pinned = Samples::new();
        let total = self.samples(|| {
            let mut staging = Staging::new(place, memory);
            let model = Model::stage(&self.values, &mut staging)?;
            pinned.push(staging.finish()?);
            Ok(model)
        })?;
        Ok((total, pinned))
    }

    fn handles_of_cudarc(&self, place: &Place) -> Result<Samples> {
        self.samples(|| Ok(CudaBlas::new(place.stream.cuda_stream().clone())?))
    }

    /// The first sample is one handle. The others are means of 1,000.
    fn handles_of_the_pool<R>(&self, take: impl Fn() -> Result<R>) -> Result<Samples> {
        let start = Instant::now();
        drop(black_box(take()?));
        let first = start.elapsed();
        let later = self.samples(|| (0..1000).try_for_each(|_| take().map(|it| drop(black_box(it)))))?;
        Ok([first].into_iter().chain(later.into_iter().map(|it| it / 1000)).collect())
    }

    /// Stages a model, runs it and reads the outputs, again and again. Compares all outputs.
    fn runs(&self, place: &Place, (name, memory, pooled): (&str, Memory, bool)) -> Result<Samples> {
        let way = if pooled { Way::Pooled(place.blas.clone()) } else { Way::Candle };
        let one = |_| {
            let start = Instant::now();
            let mut staging = Staging::new(place, memory);
            let output = Model::stage(&self.values, &mut staging)?.run(&way)?;
            let numbers = match memory {
                Memory::Pool(_) => read_back(place, &output)?,
                Memory::Pageable | Memory::Cudarc => output.flatten_all()?.to_vec1()?,
            };
            staging.finish()?;
            let time = start.elapsed();
            self.compare(&numbers, name);
            Ok(time)
        };
        let samples = (0..=self.iterations).map(one).collect::<Result<_>>()?;
        place.stream.cuda_stream().context().check_err()?;
        Ok(samples)
    }

    fn compare(&self, numbers: &[f32], name: &str) {
        let expected = &self.expected;
        let differ = |at: &usize| numbers.get(*at).map(|it| it.to_bits()) != expected.get(*at).map(|it| it.to_bits());
        let wrong = (0..numbers.len().max(expected.len())).filter(differ).collect::<Vec<_>>();
        let Some(&at) = wrong.first() else {
            self.equal.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let difference = format!(
            "{name}: {} of {} numbers differ; number {at} is {:?}, expected {:?}",
            wrong.len(),
            expected.len(),
            numbers.get(at),
            expected.get(at)
        );
        self.differences.lock().unwrap_or_else(PoisonError::into_inner).push(difference);
    }
}
