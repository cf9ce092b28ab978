//! The rows of sharing: many slices of few allocations, as one batch and as one ticket each. Another process opens them.

use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::{Device, DeviceBuffer, DeviceSlice, Error, ErrorKind, Runtime, Stream, Ticket, TicketBatch, Transport};

use super::super::args::ChildArguments;
use super::super::child::{self, Child};
use super::super::failure::{Explanation, Failure};
use super::super::frame::{Message as _, messages};
use super::super::{Verdict, backends};
use super::report::{Bar, Row};
use super::rounds::quantile;
use super::{Bench, Family};

const ALLOCATIONS: usize = 40;
const SLICES: usize = 19_500;
/// Slices of each allocation but the last ones.
const SLICES_OF_ONE: usize = SLICES.div_ceil(ALLOCATIONS);
/// Values of a slice.
const LEN: usize = 256;
/// Bytes of a ticket.
const TICKET: usize = 136;
/// The time for the other process to do what it is asked for, once it has the device.
const LIMIT: Duration = Duration::from_secs(120);

const TRANSPORTS: [(&str, Transport); 2] = [("descriptor", Transport::Descriptor), ("legacy", Transport::Legacy)];
/// The rows of a transport, with their units.
const ROWS: [(&str, &str); 8] = [
    ("batch", "ms"),
    ("batch_share", "ms"),
    ("batch_open", "ms"),
    ("batch_open_again", "ms"),
    ("tickets", "ms"),
    ("tickets_share", "ms"),
    ("ticket_first_open", "us"),
    ("ticket_next_open", "ns"),
];

messages! {
    /// A message to the process that opens.
    enum Order {
        1 Begin { backend: String },
        /// Open the slices of a batch.
        2 OpenBatch { bytes: Vec<u8> },
        /// Open tickets of one allocation.
        3 OpenTickets { bytes: Vec<u8> },
        /// Compare each value of the buffer that was opened last.
        4 Check { value: u32 },
        /// Drop every buffer, and unmap the allocations.
        5 Release,
    }
}

messages! {
    /// The answer of that process.
    enum Notice {
        6 Done,
        /// Time of the first open, and of all others.
        7 Opened { first: u64, others: u64 },
        8 Failed(why: Explanation),
    }
}

pub(super) fn families(_: &Bench<'_>) -> Vec<Family> {
    let of = |transport: &str| ROWS.map(|(row, _)| format!("{row}_{transport}")).into();
    vec![
        Family { names: of(TRANSPORTS[0].0), run: |bench| measure(bench, TRANSPORTS[0]) },
        Family { names: of(TRANSPORTS[1].0), run: |bench| measure(bench, TRANSPORTS[1]) },
    ]
}

/// Measures the rows of one transport.
fn measure(bench: &Bench<'_>, (name, transport): (&str, Transport)) -> highwater::Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let device = runtime.device(0)?;
    let stream = device.create_stream()?;
    let mut importer = Importer::start(bench.address)?;
    let mut times: [Vec<f64>; ROWS.len()] = Default::default();
    for round in 0..bench.rounds {
        let owner = Owner { runtime: &runtime, device: &device, stream: &stream, transport, value: round * 2 + 1 };
        let batch = owner.batch(&mut importer)?;
        let tickets = Owner { value: round * 2 + 2, ..owner }.tickets(&mut importer)?;
        times.iter_mut().zip(batch.into_iter().chain(tickets)).for_each(|(times, time)| times.push(time));
    }
    let is_real = bench.backend.identity().real_device;
    let bar = |row: &str| match row {
        "batch" => Bar::AtMost(if is_real { 20.0 } else { 10.0 }),
        "ticket_next_open" => Bar::AtMost(1000.0),
        _ => Bar::None,
    };
    let row = |((row, unit), times): ((&str, &'static str), Vec<f64>)| {
        Row::new(format!("{row}_{name}"), quantile(times, 0.5), unit, bar(row))
    };
    Ok(ROWS.into_iter().zip(times).map(row).collect())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The process that shares, in one round.
#[derive(Clone, Copy)]
struct Owner<'r> {
    runtime: &'r Runtime,
    device: &'r Device,
    stream: &'r Stream,
    transport: Transport,
    /// The value of all memory in this round.
    value: u32,
}

impl Owner<'_> {
    /// Allocates memory that no process has opened, with values that are there.
    fn allocate(&self) -> highwater::Result<Vec<DeviceBuffer<u32>>> {
        let allocate = |_| {
            let buffer = self.device.allocate_shared_by::<u32>(SLICES_OF_ONE * LEN, self.transport)?;
            self.stream.fill(&buffer, self.value)?;
            Ok(buffer)
        };
        let buffers = (0..ALLOCATIONS).map(allocate).collect::<highwater::Result<Vec<_>>>()?;
        self.stream.synchronize()?;
        Ok(buffers)
    }

    /// Shares all slices at once. Returns the times in the order of the rows.
    fn batch(&self, importer: &mut Importer) -> highwater::Result<[f64; 4]> {
        let buffers = self.allocate()?;
        let slices = slices(&buffers)?;
        let started = Instant::now();
        let bytes = self.runtime.share_all(&slices)?.to_bytes();
        let shared = started.elapsed();
        let opened = importer.ask_times(&Order::OpenBatch { bytes: bytes.clone() })?;
        let all = started.elapsed();
        importer.ask(&Order::Check { value: self.value })?;
        let again = importer.ask_times(&Order::OpenBatch { bytes })?;
        importer.ask(&Order::Release)?;
        Ok([all, shared, opened.0, again.0].map(milliseconds))
    }

    /// Shares each slice by a ticket of its own. Returns the times in the order of the rows.
    fn tickets(&self, importer: &mut Importer) -> highwater::Result<[f64; 4]> {
        let buffers = self.allocate()?;
        let slices = slices(&buffers)?;
        let (mut shared, mut first, mut others) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        let started = Instant::now();
        for slices in slices.chunks(SLICES_OF_ONE) {
            let sharing = Instant::now();
            let tickets = slices.iter().map(DeviceSlice::share).collect::<highwater::Result<Vec<_>>>()?;
            let bytes = tickets.iter().flat_map(Ticket::to_bytes).collect();
            shared += sharing.elapsed();
            let opened = importer.ask_times(&Order::OpenTickets { bytes })?;
            first += opened.0;
            others += opened.1;
        }
        let all = started.elapsed();
        importer.ask(&Order::Check { value: self.value })?;
        importer.ask(&Order::Release)?;
        let first = first.as_secs_f64() * 1e6 / ALLOCATIONS as f64;
        let next = others.as_secs_f64() * 1e9 / (SLICES - ALLOCATIONS) as f64;
        Ok([milliseconds(all), milliseconds(shared), first, next])
    }
}

/// Returns the slices, those of one allocation after the other.
fn slices(buffers: &[DeviceBuffer<u32>]) -> highwater::Result<Vec<DeviceSlice<'_, u32>>> {
    let slice = |at: usize| {
        let from = at % SLICES_OF_ONE * LEN;
        buffers[at / SLICES_OF_ONE].slice(from..from + LEN)
    };
    (0..SLICES).map(slice).collect()
}

/// The process that opens, as the owner sees it.
struct Importer(Child);

impl Importer {
    fn start(address: &str) -> highwater::Result<Self> {
        let arguments: Vec<String> =
            std::iter::once("bench-importer".to_owned()).chain(backends::arguments_of_children()).collect();
        let mut importer = Self(Child::start(&arguments).map_err(|error| lost(&error.to_string()))?);
        importer.ask(&Order::Begin { backend: address.to_owned() })?;
        Ok(importer)
    }

    /// Sends an order and waits until it is done.
    fn ask(&mut self, order: &Order) -> highwater::Result<()> {
        match self.exchange(order)? {
            Notice::Done => Ok(()),
            _ => Err(lost("it sent another answer")),
        }
    }

    /// Sends an order to open, and returns the times of the first open and of all others.
    fn ask_times(&mut self, order: &Order) -> highwater::Result<(Duration, Duration)> {
        match self.exchange(order)? {
            Notice::Opened { first, others } => Ok((Duration::from_nanos(first), Duration::from_nanos(others))),
            _ => Err(lost("it sent another answer")),
        }
    }

    fn exchange(&mut self, order: &Order) -> highwater::Result<Notice> {
        let exchanged = order.send(self.0.socket()).and_then(|()| self.0.wait_for::<Notice>(LIMIT));
        match exchanged.map_err(|error| lost(&error.to_string()))? {
            Some(Notice::Failed(why)) => {
                // With these two kinds the rows are skipped.
                let mut kinds = [ErrorKind::OutOfMemory, ErrorKind::Unsupported].into_iter();
                let kind = kinds.find(|kind| why.kind.as_deref() == Some(kind.as_str()));
                let kind = kind.unwrap_or(ErrorKind::InvalidState);
                Err(Error::new(kind, "bench_share", why.message).with_hint(why.hint))
            }
            Some(notice) => Ok(notice),
            None => Err(lost(&format!("it ended, or sent nothing for {} seconds", LIMIT.as_secs()))),
        }
    }
}

fn lost(why: &str) -> Error {
    Error::new(ErrorKind::OperatingSystem, "bench_share", format!("the process that opens tickets is lost: {why}"))
        .with_hint("look at its messages above")
}

/// Opens tickets, as the process that [`measure`] starts.
pub(in super::super) fn command(arguments: &ChildArguments) -> Result<Verdict> {
    let (socket, mut inbox) = child::serve(arguments.parent, c"hw-bench-open", "highwater bench share")?;
    let Some(Order::Begin { backend }) = inbox.wait(&socket)? else {
        let hint = "`highwater bench share` starts this process, and says what to open";
        return Err(Failure::new(ErrorKind::InvalidState, "this process has nothing to open", hint).into());
    };
    let mut opener = None;
    let begun = Opener::new(&backend).map(|new| {
        opener = Some(new);
        Notice::Done
    });
    let send = |outcome: Result<Notice>| {
        let is_good = outcome.is_ok();
        let notice = outcome.unwrap_or_else(|error| Notice::Failed(Explanation::of(&error)));
        if notice.send(&socket).is_err() {
            child::die();
        }
        is_good
    };
    if !send(begun) {
        return Ok(Verdict::Bad);
    }
    while let (Some(opener), Some(order)) = (&mut opener, inbox.wait(&socket)?) {
        if !send(opener.obey(order)) {
            return Ok(Verdict::Bad);
        }
    }
    Ok(Verdict::Good)
}

/// The state of the process that opens.
struct Opener {
    runtime: Runtime,
    stream: Stream,
    buffers: Vec<DeviceBuffer<u32>>,
}

impl Opener {
    fn new(address: &str) -> Result<Self> {
        let runtime = Runtime::new(backends::reopen(address)?)?;
        // The first stream creates the context.
        let stream = runtime.device(0)?.create_stream()?;
        Ok(Self { runtime, stream, buffers: Vec::new() })
    }

    fn obey(&mut self, order: Order) -> Result<Notice> {
        match order {
            Order::Begin { .. } => Ok(Notice::Done),
            Order::OpenBatch { bytes } => {
                let started = Instant::now();
                let opened = self.runtime.open_shared_all(&TicketBatch::from_bytes(&bytes)?)?;
                let first = nanoseconds(started);
                self.buffers.extend(opened);
                Ok(Notice::Opened { first, others: 0 })
            }
            Order::OpenTickets { bytes } => {
                let tickets: highwater::Result<Vec<_>> = bytes.chunks(TICKET).map(Ticket::from_bytes).collect();
                let tickets = tickets?;
                let (one, others) = tickets.split_at(tickets.len().min(1));
                let mut open = |tickets: &[Ticket]| {
                    self.buffers.reserve(tickets.len());
                    let started = Instant::now();
                    for ticket in tickets {
                        self.buffers.push(self.runtime.open_shared(ticket)?);
                    }
                    Ok::<_, Error>(nanoseconds(started))
                };
                Ok(Notice::Opened { first: open(one)?, others: open(others)? })
            }
            Order::Check { value } => {
                let Some(last) = self.buffers.last() else { return Ok(Notice::Done) };
                if self.stream.download(last)?.iter().any(|&is| is != value) {
                    let hint = "report this: the memory of another process is not what it shared";
                    let message = format!("the last buffer does not have the value {value}");
                    return Err(Failure::new(ErrorKind::InvalidState, message, hint).into());
                }
                Ok(Notice::Done)
            }
            Order::Release => {
                self.buffers.clear();
                self.runtime.trim()?;
                Ok(Notice::Done)
            }
        }
    }
}

fn nanoseconds(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::tests::check_round_trip;
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        check_round_trip(&Order::Begin { backend: "mock".into() });
        check_round_trip(&Order::OpenBatch { bytes: vec![1; 300] });
        check_round_trip(&Order::OpenTickets { bytes: vec![2; 2 * TICKET] });
        check_round_trip(&Order::Check { value: 7 });
        check_round_trip(&Order::Release);
        check_round_trip(&Notice::Done);
        check_round_trip(&Notice::Opened { first: 9_000_000, others: 1 });
        let why = Explanation { kind: Some("out of memory".into()), message: "none".into(), hint: String::new() };
        check_round_trip(&Notice::Failed(why));
    }

    #[test]
    fn the_slices_are_in_forty_allocations() {
        assert_eq!((SLICES - 1) / SLICES_OF_ONE + 1, ALLOCATIONS);
    }
}
