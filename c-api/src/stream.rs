//! Streams and events.

use front::{Event, Stream};

use crate::device::highwater_device;
use crate::failure::call;
use crate::handle::{self, get, make_from, place, put, release};
use crate::numbers::highwater_status;

/// Work in order on a device.
#[derive(Debug)]
pub enum highwater_stream {}

/// A point in the work of a stream.
#[derive(Debug)]
pub enum highwater_event {}

handle::kinds! {
    highwater_stream: Stream = b"hw-strea";
    highwater_event: Event = b"hw-event";
}

/// Creates a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_create(
    device: *mut highwater_device,
    stream: *mut *mut highwater_stream,
) -> highwater_status {
    call!(highwater_stream_create, { make_from(device, stream, |device| device.create_stream()) })
}

/// Wraps a stream of other code: the vendor's handle as a number. The caller must keep that stream alive until this handle is
/// released and every buffer that was used on it is too. Refuses 0, because it names two default streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_wrap(
    device: *mut highwater_device,
    raw: u64,
    stream: *mut *mut highwater_stream,
) -> highwater_status {
    call!(highwater_stream_wrap, { make_from(device, stream, |device| device.stream_from_raw(raw)) })
}

/// Wraps the legacy default stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_legacy_default(
    device: *mut highwater_device,
    stream: *mut *mut highwater_stream,
) -> highwater_status {
    call!(highwater_stream_legacy_default, { make_from(device, stream, |device| device.legacy_default_stream()) })
}

/// Wraps the default stream of the calling thread. Only this thread can use the handle; in others, calls return
/// HIGHWATER_ERROR_INVALID_STATE. Any thread may release it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_per_thread_default(
    device: *mut highwater_device,
    stream: *mut *mut highwater_stream,
) -> highwater_status {
    call!(highwater_stream_per_thread_default, {
        make_from(device, stream, |device| device.per_thread_default_stream())
    })
}

/// Writes the vendor's handle of the stream. The caller must not destroy it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_raw(stream: *mut highwater_stream, raw: *mut u64) -> highwater_status {
    call!(highwater_stream_raw, {
        let stream = get(stream)?;
        place(raw, "raw stream")?;
        put(raw, stream.raw()?);
        Ok(())
    })
}

/// Waits for all work of the stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_synchronize(stream: *mut highwater_stream) -> highwater_status {
    call!(highwater_stream_synchronize, { get(stream)?.synchronize() })
}

/// Writes whether all work of the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_is_complete(
    stream: *mut highwater_stream,
    complete: *mut bool,
) -> highwater_status {
    call!(highwater_stream_is_complete, {
        let stream = get(stream)?;
        place(complete, "answer")?;
        put(complete, stream.is_complete()?);
        Ok(())
    })
}

/// Records an event after the work of the stream so far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_record(
    stream: *mut highwater_stream,
    event: *mut *mut highwater_event,
) -> highwater_status {
    call!(highwater_stream_record, { make_from(stream, event, |stream| stream.record()) })
}

/// As highwater_stream_record, for highwater_event_elapsed_ns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_record_timed(
    stream: *mut highwater_stream,
    event: *mut *mut highwater_event,
) -> highwater_status {
    call!(highwater_stream_record_timed, { make_from(stream, event, |stream| stream.record_timed()) })
}

/// Makes later work of the stream wait for an event. The thread does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_wait(
    stream: *mut highwater_stream,
    event: *mut highwater_event,
) -> highwater_status {
    call!(highwater_stream_wait, { get(stream)?.wait(get(event)?) })
}

/// As highwater_stream_wait, for an event of other code: the vendor's handle as a number. The event must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_wait_raw(stream: *mut highwater_stream, event: u64) -> highwater_status {
    call!(highwater_stream_wait_raw, { get(stream)?.wait_raw(event) })
}

/// Releases the handle. Queued work continues.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_release(stream: *mut *mut highwater_stream) -> highwater_status {
    call!(highwater_stream_release, { release(stream) })
}

/// Wraps an event of other code: the vendor's handle as a number. The caller must keep that event alive until this handle is
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_event_wrap(
    device: *mut highwater_device,
    raw: u64,
    event: *mut *mut highwater_event,
) -> highwater_status {
    call!(highwater_event_wrap, { make_from(device, event, |device| device.event_from_raw(raw)) })
}

/// Writes whether the stream has passed the event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_event_is_complete(
    event: *mut highwater_event,
    complete: *mut bool,
) -> highwater_status {
    call!(highwater_event_is_complete, {
        let event = get(event)?;
        place(complete, "answer")?;
        put(complete, event.is_complete()?);
        Ok(())
    })
}

/// Waits until the stream has passed the event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_event_synchronize(event: *mut highwater_event) -> highwater_status {
    call!(highwater_event_synchronize, { get(event)?.synchronize() })
}

/// Writes the nanoseconds from one event to a later one, both recorded by highwater_stream_record_timed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_event_elapsed_ns(
    earlier: *mut highwater_event,
    later: *mut highwater_event,
    nanoseconds: *mut u64,
) -> highwater_status {
    call!(highwater_event_elapsed_ns, {
        let (earlier, later) = (get(earlier)?, get(later)?);
        place(nanoseconds, "nanoseconds")?;
        put(nanoseconds, earlier.elapsed_ns(later)?);
        Ok(())
    })
}

/// Releases the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_event_release(event: *mut *mut highwater_event) -> highwater_status {
    call!(highwater_event_release, { release(event) })
}
