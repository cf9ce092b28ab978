//! Recording events in streams, and querying them.

use anyhow::{Result, ensure};

use crate::Bench;
use crate::measure::alternate;
use crate::raw::{answered, done};
use crate::table::{Bar, Row, Table};

/// The cost over raw that a call of the trait may have.
const OVER: Bar = Bar::Difference { share: 0.0, ns: 20.0 };

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let Bench { raw, device, runtime, .. } = bench;
    let backend = &**runtime.backend();
    let stream = device.create_stream()?;
    let mark = stream.record()?;
    let (id, event) = (stream.id(), mark.id());
    // Both sides use the same stream and event, because two of a kind differ by some ten nanoseconds for each call.
    let (raw_stream, raw_event) = (backend.raw_stream(id)?, backend.raw_event(event)?);
    let settle = |_| Ok(stream.synchronize()?);
    let raw_record = |_| {
        // SAFETY: both are alive.
        done("cuEventRecord", unsafe { (raw.cuda.event_record)(raw_event, raw_stream) })
    };
    let raw_query = |_| {
        // SAFETY: the event is alive.
        let complete = answered("cuEventQuery", unsafe { (raw.cuda.event_query)(raw_event) })?;
        ensure!(complete, "a stream that was waited for has not passed its event");
        Ok(())
    };
    let raw_stream_query = |_| {
        // SAFETY: the stream is alive.
        let complete = answered("cuStreamQuery", unsafe { (raw.cuda.stream_query)(raw_stream) })?;
        ensure!(complete, "a stream that was waited for is not done");
        Ok(())
    };
    let complete = |complete: bool| {
        ensure!(complete, "what was waited for is not done");
        Ok(())
    };
    let (records, queries) = (bench.bursts(200), bench.bursts(500));

    let pairs = alternate(records, settle, |_| Ok(backend.record_event(event, id)?), raw_record)?;
    table.push(Row::pairs("record an event, trait", &pairs).bar(OVER));
    let pairs = alternate(queries, settle, |_| complete(backend.query_event(event)?.is_complete()), raw_query)?;
    table.push(Row::pairs("ask an event that is done, trait", &pairs).bar(OVER));
    let pairs = alternate(queries, settle, |_| complete(backend.query_stream(id)?.is_complete()), raw_stream_query)?;
    table.push(Row::pairs("ask a stream that is done, trait", &pairs));

    let pairs = alternate(
        records,
        settle,
        |_| {
            drop(stream.record()?);
            Ok(())
        },
        raw_record,
    )?;
    table.push(Row::pairs("Stream::record, event from the pool and back", &pairs));
    let pairs = alternate(queries, settle, |_| complete(mark.is_complete()?), raw_query)?;
    table.push(Row::pairs("Event::is_complete", &pairs));
    let pairs = alternate(queries, settle, |_| complete(stream.is_complete()?), raw_stream_query)?;
    table.push(Row::pairs("Stream::is_complete", &pairs));
    Ok(())
}
