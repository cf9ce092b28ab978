//! The first handles of a process, which a process of their own measures.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::{ErrorKind, Runtime, Stream};

use super::super::args::ChildArguments;
use super::super::child::{self, Child};
use super::super::failure::{Explanation, Failure};
use super::super::frame::{Message as _, messages};
use super::super::{Verdict, backends};

/// The time for a process to open the backend and to create its first handles. It takes a second or two, and more if the files of
/// the vendor's libraries have to be read.
const LIMIT: Duration = Duration::from_secs(120);

messages! {
    /// The message of the bench.
    enum Order {
        1 Measure {
            /// The backend, by its `backends::address`.
            backend: String,
            /// Threads that lease at once.
            threads: u64,
            /// Whether handles and workspaces for them are made before.
            warm: bool,
        },
    }
}

messages! {
    /// The answer of the process.
    enum Notice {
        2 Taken { nanoseconds: u64 },
        3 Failed(why: Explanation),
    }
}

/// Measures the first leases of a fresh process, by `threads` threads at once. Returns the time until all have one.
pub(super) fn measure(address: &str, threads: usize, warm: bool) -> highwater::Result<Duration> {
    let order = Order::Measure { backend: address.to_owned(), threads: threads as u64, warm };
    let ask = || {
        let arguments: Vec<String> =
            std::iter::once("bench-first-handle".to_owned()).chain(backends::arguments_of_children()).collect();
        let mut child = Child::start(&arguments)?;
        order.send(child.socket())?;
        child.wait_for::<Notice>(LIMIT)
    };
    let fail = |kind, message: String| highwater::Error::new(kind, "first_handle", message);
    match ask() {
        Ok(Some(Notice::Taken { nanoseconds })) => Ok(Duration::from_nanos(nanoseconds)),
        Ok(Some(Notice::Failed(why))) => {
            // With these two kinds the row is skipped.
            let mut kinds = [ErrorKind::OutOfMemory, ErrorKind::Unsupported].into_iter();
            let kind = kinds.find(|kind| why.kind.as_deref() == Some(kind.as_str())).unwrap_or(ErrorKind::InvalidState);
            Err(fail(kind, why.message).with_hint(why.hint))
        }
        Ok(None) => {
            let seconds = LIMIT.as_secs();
            let message = format!("the process that measures ended, or sent nothing for {seconds} seconds");
            Err(fail(ErrorKind::OperatingSystem, message))
        }
        Err(error) => Err(fail(ErrorKind::OperatingSystem, format!("the process that measures is lost: {error}"))),
    }
}

/// Measures, as the process that [`measure`] starts.
pub(in super::super) fn command(arguments: &ChildArguments) -> Result<Verdict> {
    let (socket, mut inbox) = child::serve(arguments.parent, c"hw-first-handle", "highwater bench handles")?;
    let Some(Order::Measure { backend, threads, warm }) = inbox.wait(&socket)? else {
        let hint = "`highwater bench handles` starts this process, and says what to measure";
        return Err(Failure::new(ErrorKind::InvalidState, "this process has nothing to measure", hint).into());
    };
    let outcome = first_leases(&backend, threads as usize, warm);
    let notice = match &outcome {
        Ok(time) => Notice::Taken { nanoseconds: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) },
        Err(error) => Notice::Failed(Explanation::of(error)),
    };
    if notice.send(&socket).is_err() {
        child::die();
    }
    Ok(if outcome.is_ok() { Verdict::Good } else { Verdict::Bad })
}

/// Returns the time in which `threads` threads, each with a stream of its own, get a handle: from the start of the first thread to
/// the end of the last one.
fn first_leases(address: &str, threads: usize, warm: bool) -> Result<Duration> {
    let runtime = Runtime::new(backends::reopen(address)?)?;
    let device = runtime.device(0)?;
    // The first stream creates the context.
    let streams = (0..threads).map(|_| device.create_stream()).collect::<highwater::Result<Vec<_>>>()?;
    if warm {
        device.warm(threads)?;
    }
    let barrier = Barrier::new(threads);
    let times = thread::scope(|scope| {
        let lease = |stream| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                let started = Instant::now();
                let lease = Stream::blas(stream);
                let ended = Instant::now();
                // Every thread keeps its handle until all have one.
                barrier.wait();
                lease.map(|_| (started, ended))
            })
        };
        let leasing: Vec<_> = streams.iter().map(lease).collect();
        let joined = leasing.into_iter().map(|thread| thread.join());
        joined
            .map(|times| times.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect::<highwater::Result<Vec<_>>>()
    })?;
    let started = times.iter().map(|(started, _)| started).min();
    let ended = times.iter().map(|(_, ended)| ended).max();
    Ok(ended.zip(started).map_or(Duration::ZERO, |(ended, started)| ended.duration_since(*started)))
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::tests::check_round_trip;
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        check_round_trip(&Order::Measure { backend: "mock".into(), threads: 16, warm: true });
        check_round_trip(&Notice::Taken { nanoseconds: 6_000_000 });
        let why = Explanation { kind: Some("out of memory".into()), message: "none".into(), hint: String::new() };
        check_round_trip(&Notice::Failed(why));
    }
}
