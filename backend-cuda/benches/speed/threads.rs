//! Sixteen threads on four streams: handles from the pool against a private handle in each thread.
//!
//! Only one stream may use a workspace, so a private handle that moves between streams has a workspace for each.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use highwater_core::{DataType, DeviceBuffer, GemmShape, Stream};

use crate::Bench;
use crate::measure::{Pairs, Random, Side};
use crate::raw::{Owned, kind_of};
use crate::table::{Bar, Row, Table, Unit};

const THREADS: usize = 16;
const STREAMS: usize = 4;
const SIZE: usize = 32;
const ELEMENTS: usize = SIZE * SIZE;
/// Warm-up rounds.
const WARM: usize = 4;

/// The state of all threads.
struct Shared<'b> {
    bench: &'b Bench<'b>,
    streams: Vec<Stream>,
    raw_streams: Vec<Owned>,
    /// The products of a thread in a round. Together, the threads stay below the capacity of a stream's queue.
    calls: usize,
    rounds: usize,
    /// Whether a thread moves from stream to stream or stays on one.
    rotates: bool,
    barrier: Barrier,
}

/// The buffers of one thread. Consecutive products have different factors, and each has a result of its own.
struct Worker {
    number: usize,
    a: Vec<DeviceBuffer<f32>>,
    b: DeviceBuffer<f32>,
    c: DeviceBuffer<f32>,
    expected: Vec<Vec<f64>>,
    raw_handle: Owned,
    raw_workspaces: Vec<Owned>,
}

/// The measurements of one thread.
#[derive(Default)]
struct Seen {
    /// The start and end of each round.
    ours: Vec<(Instant, Instant)>,
    raw: Vec<(Instant, Instant)>,
    wrong: [usize; 2],
}

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    compare(bench, table, false)?;
    compare(bench, table, true)
}

fn compare(bench: &Bench<'_>, table: &mut Table, rotates: bool) -> Result<()> {
    let quick = bench.options.quick;
    let shared = Shared {
        bench,
        streams: (0..STREAMS).map(|_| Ok(bench.device.create_stream()?)).collect::<Result<_>>()?,
        raw_streams: (0..STREAMS).map(|_| bench.raw.stream()).collect::<Result<_>>()?,
        calls: if quick { 8 } else { 100 },
        rounds: bench.options.pairs.min(200),
        rotates,
        barrier: Barrier::new(THREADS),
    };
    let workers = (0..THREADS).map(|number| Worker::new(&shared, number)).collect::<Result<Vec<_>>>()?;
    let seen = thread::scope(|scope| {
        let threads: Vec<_> = workers.iter().map(|worker| scope.spawn(|| worker.run(&shared))).collect();
        let joined = threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
        joined.collect::<Result<Vec<_>>>()
    })?;
    let products = (shared.calls * THREADS) as f64;
    // From the start of the first thread to the end of the last one.
    let time = |times: &dyn Fn(&Seen) -> (Instant, Instant)| {
        let (start, end) = (seen.iter().map(|seen| times(seen).0).min(), seen.iter().map(|seen| times(seen).1).max());
        start.zip(end).map_or(f64::NAN, |(start, end)| end.duration_since(start).as_nanos() as f64 / products)
    };
    let pairs = Pairs {
        ours: (WARM..WARM + shared.rounds).map(|round| time(&|seen| seen.ours[round])).collect(),
        raw: (WARM..WARM + shared.rounds).map(|round| time(&|seen| seen.raw[round])).collect(),
    };
    let [wrong, raw_wrong] = [0, 1].map(|side| seen.iter().map(|seen| seen.wrong[side]).sum::<usize>());
    ensure!(raw_wrong == 0, "{raw_wrong} raw products are wrong: the comparison itself is broken");
    let row = if rotates {
        let what = format!("the same, another stream in each call; raw: {} private workspaces", THREADS * STREAMS);
        Row::pairs(what, &pairs).unit(Unit::Calls)
    } else {
        let what = format!(
            "{THREADS} threads on {STREAMS} streams, gemm 32x32x32 f32; raw: {THREADS} private handles and workspaces"
        );
        Row::pairs(what, &pairs).unit(Unit::Calls).bar(Bar::Faster)
    };
    table.push(row);
    let all = (shared.rounds + WARM) as f64 * products;
    table.push(
        Row::once(format!("wrong ones among {all} products"), wrong as f64, None).unit(Unit::Count).bar(Bar::Zero),
    );
    let handles = bench.runtime.statistics().blas_handles.created;
    table.push(
        Row::once("handles that the pool has made by then", handles as f64, Some(THREADS as f64)).unit(Unit::Count),
    );
    Ok(())
}

impl Shared<'_> {
    fn stream_of(&self, thread: usize, call: usize) -> usize {
        if self.rotates { (thread + call) % STREAMS } else { thread % STREAMS }
    }
}

impl Worker {
    fn new(shared: &Shared<'_>, number: usize) -> Result<Self> {
        let (bench, stream) = (shared.bench, &shared.streams[0]);
        let bytes = bench.options.workspace_bytes;
        let mut random = Random::new(number as u64 + 1);
        let mut matrix = || -> Vec<f32> { (0..ELEMENTS).map(|_| random.number()).collect() };
        let b_values = matrix();
        let a_values: Vec<_> = (0..STREAMS + 1).map(|_| matrix()).collect();
        let c_values: Vec<f32> = (0..shared.calls).flat_map(|_| matrix()).collect();
        let upload = |values: &Vec<f32>| Ok(stream.upload(values)?);
        Ok(Self {
            number,
            expected: a_values.iter().map(|a| multiply(a, &b_values)).collect(),
            a: a_values.iter().map(upload).collect::<Result<_>>()?,
            b: upload(&b_values)?,
            c: upload(&c_values)?,
            raw_handle: bench.raw.handle()?,
            raw_workspaces: (0..STREAMS).map(|_| bench.raw.memory(bytes)).collect::<Result<_>>()?,
        })
    }

    /// Runs all rounds of both sides. A thread that fails still reaches the barrier, so that the others end too.
    fn run(&self, shared: &Shared<'_>) -> Result<Seen> {
        let current = shared.bench.raw.enter();
        let mut seen = Seen::default();
        let mut failure = current.as_ref().err().map(|error| anyhow!("{error:#}"));
        for round in 0..shared.rounds + WARM {
            let order = if round / 2 % 2 == 0 { [Side::Ours, Side::Raw] } else { [Side::Raw, Side::Ours] };
            for side in order {
                if failure.is_none() {
                    failure = self.poison(shared).err();
                }
                shared.barrier.wait();
                let start = Instant::now();
                if failure.is_none() {
                    let outcome = match side {
                        Side::Ours => self.ours(shared),
                        Side::Raw => self.raw(shared),
                    };
                    failure = outcome.err();
                }
                let end = Instant::now();
                match side {
                    Side::Ours => seen.ours.push((start, end)),
                    Side::Raw => seen.raw.push((start, end)),
                }
                shared.barrier.wait();
                if failure.is_none() {
                    match self.wrong(shared) {
                        Ok(wrong) => seen.wrong[usize::from(side == Side::Raw)] += wrong,
                        Err(error) => failure = Some(error),
                    }
                }
            }
        }
        failure.map_or(Ok(seen), Err)
    }

    /// Overwrites every result, so that a product that does not run is detected.
    fn poison(&self, shared: &Shared<'_>) -> Result<()> {
        let stream = &shared.streams[self.number % STREAMS];
        stream.fill(&self.c, f32::NAN)?;
        Ok(stream.synchronize()?)
    }

    fn ours(&self, shared: &Shared<'_>) -> Result<()> {
        let shape = GemmShape::of::<f32>(SIZE, SIZE, SIZE);
        for call in 0..shared.calls {
            let stream = &shared.streams[shared.stream_of(self.number, call)];
            let c = self.c.slice(call * ELEMENTS..(call + 1) * ELEMENTS)?;
            stream.blas()?.gemm(&shape, 1.0, &self.a[call % self.a.len()], &self.b, 0.0, c)?;
        }
        Ok(shared.streams.iter().try_for_each(Stream::synchronize)?)
    }

    fn raw(&self, shared: &Shared<'_>) -> Result<()> {
        let Bench { raw, options, .. } = shared.bench;
        let (kind, size) = (kind_of(DataType::F32)?, SIZE as i32);
        for call in 0..shared.calls {
            let i = shared.stream_of(self.number, call);
            // A handle that stays on its stream is bound once.
            if shared.rotates || call == 0 {
                raw.bind(&self.raw_handle, &shared.raw_streams[i], &self.raw_workspaces[i], options.workspace_bytes)?;
            }
            let c = self.c.ptr().get() + (call * ELEMENTS * size_of::<f32>()) as u64;
            let matrices = [self.a[call % self.a.len()].ptr().get(), self.b.ptr().get(), c];
            // SAFETY: The buffers hold matrices of this size and live until the streams were waited for. No two
            // products have the same C.
            unsafe { raw.gemm(self.raw_handle.get(), kind, size, matrices)? };
        }
        shared.raw_streams.iter().try_for_each(|stream| raw.synchronize(stream))
    }

    /// Returns the number of wrong products.
    fn wrong(&self, shared: &Shared<'_>) -> Result<usize> {
        let values = shared.streams[self.number % STREAMS].download(&self.c)?;
        let products = values.chunks_exact(ELEMENTS).enumerate();
        let right = |(call, product): (usize, &[f32])| {
            let expected = &self.expected[call % self.expected.len()];
            product.iter().zip(expected).all(|(&value, expected)| (f64::from(value) - expected).abs() < 1e-4)
        };
        Ok(products.filter(|&product| !right(product)).count())
    }
}

/// Computes the product of two square matrices in column order.
fn multiply(a: &[f32], b: &[f32]) -> Vec<f64> {
    let dot = |row: usize, column: usize| {
        (0..SIZE).map(|k| f64::from(a[row + k * SIZE]) * f64::from(b[k + column * SIZE])).sum()
    };
    (0..ELEMENTS).map(|i| dot(i % SIZE, i / SIZE)).collect()
}
