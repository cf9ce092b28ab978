//! Events by their raw handles.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use highwater_hal::{Backend, Completion, EventHandle, EventId, EventOptions};
use highwater_mock::simulated::Call;
use parking_lot::{Mutex, RwLock};

use crate::capture_state::{CAPTURES, Part, node};
use crate::code::{Answer, Code};
use crate::current::with_context;
use crate::handles::{Handles, Stream};
use crate::process::{Simulation, die, simulation};
use crate::streams;
use crate::variants::{Vendor, hip_major, vendor};

/// Flags of `cuEventCreate`.
pub mod flags {
    /// `CU_EVENT_BLOCKING_SYNC`; a wait here always sleeps.
    pub const BLOCKING_SYNC: u32 = 1;
    /// `CU_EVENT_DISABLE_TIMING`.
    pub const DISABLE_TIMING: u32 = 2;
    /// `CU_EVENT_INTERPROCESS`.
    pub const INTERPROCESS: u32 = 4;
    /// `CU_EVENT_WAIT_EXTERNAL`, a flag of `cuStreamWaitEvent`.
    pub const WAIT_EXTERNAL: u32 = 1;
    /// Flags of `hipEventCreateWithFlags` that set how far a record makes writes visible.
    pub const HIP_RELEASES: u32 = 0x2000_0000 | 0x4000_0000 | 0x8000_0000;
}

/// The number of records of an interprocess event that HIP 7 orders.
const IPC_RECORDS: u64 = 32;

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) id: EventId,
    pub(crate) device: u32,
    pub(crate) flags: u32,
    /// True if it was opened by a handle of another process.
    pub(crate) is_import: bool,
    /// The last record of the event.
    last: Mutex<Last>,
    /// The exported handle, whose descriptor importers open in this process.
    pub(crate) exported: Mutex<Option<EventHandle>>,
}

/// The last record of an event.
#[derive(Debug, Default)]
struct Last {
    /// The part of the stream in the capture that recorded it; `None` for a record outside of captures.
    part: Option<Arc<Part>>,
    /// The stream, which HIP follows in later calls (`captureStream_`). The legacy default stream is not followed.
    stream: Option<Weak<Stream>>,
}

impl Event {
    /// Returns whether every query and wait finds the event complete. This holds for an interprocess event of HIP 6, in each
    /// process. A record never writes the shared words, which queries and waits read (clr 6.4.3, `hip_event_ipc.cpp`:
    /// `isUnRecorded` is false for a new event).
    fn orders_nothing(&self) -> bool {
        vendor() == Vendor::Hip && hip_major() < 7 && self.flags & flags::INTERPROCESS != 0
    }
}

/// Every live event.
static EVENTS: RwLock<BTreeMap<u64, Arc<Event>>> = RwLock::new(BTreeMap::new());
static HANDLES: Handles = Handles::new();

impl Simulation {
    /// Returns the event of a raw handle.
    ///
    /// # Errors
    /// 400 for an unknown event, the code of a lost context.
    pub(crate) fn event(&self, raw: u64) -> Answer<Arc<Event>> {
        let event = EVENTS.read().get(&raw).cloned().ok_or(Code::INVALID_HANDLE)?;
        self.check_context(event.device)?;
        Ok(event)
    }

    pub(crate) fn insert_event(&self, id: EventId, device: u32, flags: u32, is_import: bool) -> u64 {
        let raw = HANDLES.take();
        let (last, exported) = (Mutex::default(), Mutex::new(None));
        let event = Arc::new(Event { id, device, flags, is_import, last, exported });
        EVENTS.write().insert(raw, event);
        raw
    }

    /// Destroys the events of a context that ends.
    pub(crate) fn end_events(&self, device: u32) {
        let ended: Vec<_> = EVENTS.write().extract_if(.., |_, event| event.device == device).collect();
        for (raw, event) in ended {
            // The mock's table holds it as long as this table does.
            let _ = self.gpu.destroy_event(event.id);
            HANDLES.give_back(raw);
        }
    }

    /// Checks a query of an event or a wait of the host for it. Returns whether to ask the mock. If not, the event is complete
    /// (HIP).
    fn check_askable(&self, event: &Event, waits: bool) -> Answer<bool> {
        if vendor() == Vendor::Hip {
            return self.check_hip_askable(event, waits);
        }
        if let Some(part) = &event.last.lock().part {
            if part.has_left() {
                return Err(Code::INVALID_VALUE);
            }
            self.lose_capture(part);
            return Err(Code::CAPTURED_EVENT);
        }
        self.check_unsafe_call().map(|()| true)
    }

    /// The rules of HIP (clr 6.4.3 and 7.2, `hip_event.cpp`): the call follows the stream of the last record.
    fn check_hip_askable(&self, event: &Event, waits: bool) -> Answer<bool> {
        if event.orders_nothing() {
            return Ok(false);
        }
        let last = event.last.lock();
        // At the end of a capture, the runtime clears the streams of the capture's events, which are then complete.
        if last.part.as_ref().is_some_and(|part| part.has_left()) {
            return Ok(false);
        }
        let Some(stream) = &last.stream else { return Ok(true) };
        let Some(stream) = stream.upgrade() else {
            if hip_major() < 7 {
                return Err(Code::CAPTURED_EVENT);
            }
            die(
                "the simulated HIP runtime: a call followed an event to a stream after its end, which is a use after free",
            )
        };
        let part = CAPTURES.of(stream.id);
        if let Some(part) = part.as_ref().filter(|part| !part.is_lost()) {
            // HIP 6 does not distinguish events of the capture from events that were recorded before.
            if hip_major() < 7 || last.part.as_ref().is_some_and(|own| Arc::ptr_eq(own, part)) {
                self.lose_capture(part);
                return Err(Code::CAPTURED_EVENT);
            }
        }
        match part {
            Some(part) if part.is_lost() && waits && hip_major() < 7 => Err(Code::STREAM_CAPTURE_UNSUPPORTED),
            // A query of HIP 6 checks nothing else.
            _ if hip_major() < 7 && !waits => Ok(()),
            _ => self.check_unsafe_call(),
        }?;
        Ok(last.part.is_none())
    }
}

/// `cuEventCreate`.
///
/// # Errors
/// 1 for unknown flags and for an interprocess event with timing, 201 without a context.
pub fn create(wanted: u32) -> Answer<u64> {
    let (simulation, device) = with_context()?;
    let known = flags::BLOCKING_SYNC | flags::DISABLE_TIMING | flags::INTERPROCESS;
    let releases = if vendor() == Vendor::Hip { wanted & flags::HIP_RELEASES } else { 0 };
    // HIP: at most one kind of release.
    if wanted & !(known | releases) != 0 || releases.count_ones() > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let mut options = EventOptions::new();
    if wanted & flags::DISABLE_TIMING == 0 {
        options = options.with_timing();
    }
    if wanted & flags::INTERPROCESS != 0 {
        if options.timing {
            return Err(Code::INVALID_VALUE);
        }
        options = options.with_interprocess();
    }
    let id = simulation.gpu.create_event(device, &options).map_err(|error| simulation.code_of(error))?;
    Ok(simulation.insert_event(id, device, wanted, false))
}

/// `cuEventDestroy_v2`. Queued waits continue.
///
/// # Errors
/// 400 for an unknown event, the code of a lost context.
pub fn destroy(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let mut events = EVENTS.write();
    simulation.check_context(events.get(&raw).ok_or(Code::INVALID_HANDLE)?.device)?;
    let event = events.remove(&raw).ok_or(Code::INVALID_HANDLE)?;
    drop(events);
    let destroyed = simulation.gpu.destroy_event(event.id).map_err(|error| simulation.code_of(error));
    HANDLES.give_back(raw);
    destroyed
}

/// `cuEventRecord`.
///
/// # Errors
/// 400 if the event belongs to another device than the stream, 900 for an interprocess event in a capture, 901 in an
/// invalidated capture.
pub fn record(raw: u64, raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    let stream = simulation.stream(raw_stream)?;
    if event.device != stream.device {
        return Err(Code::INVALID_HANDLE);
    }
    simulation.before_enqueue(&stream)?;
    let part = CAPTURES.of(stream.id);
    // Locked before the record, so that no thread mistakes a captured record for an ordinary one.
    let mut last = event.last.lock();
    simulation.gpu.record_event(event.id, stream.id).map_err(|error| simulation.code_of(error))?;
    *last = Last { part, stream: streams::followed(raw_stream, &stream) };
    Ok(())
}

/// `cuEventQuery`.
///
/// # Errors
/// 600 until the event is reached. If it was last recorded in a capture, 907 until the end of the capture, which is
/// invalidated, and 1 after that (HIP: 0). 900 as [`Simulation::check_unsafe_call`] (HIP 6: not for a query). HIP 6: 907 for an
/// event from before the capture of its stream, and the capture is invalidated. 907 also for an event of a destroyed stream; HIP
/// 7 ends the process instead.
pub fn query(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    if !simulation.check_askable(&event, false)? {
        return Ok(());
    }
    match simulation.gpu.query_event(event.id).map_err(|error| simulation.code_of(error))? {
        Completion::Complete => Ok(()),
        _ => Err(Code::NOT_READY),
    }
}

/// `cuEventSynchronize`.
///
/// # Errors
/// As [`query`], except 600.
pub fn synchronize(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    if !simulation.check_askable(&event, true)? {
        return Ok(());
    }
    simulation.gpu.synchronize_event(event.id).map_err(|error| simulation.code_of(error))
}

/// `cuEventElapsedTime`, in milliseconds.
///
/// # Errors
/// 400 for events without timing, of two devices, or never recorded; 600 if one is not reached; 907 if one was last recorded in
/// a capture (HIP: 400).
pub fn elapsed(raw_start: u64, raw_end: u64) -> Answer<f32> {
    let simulation = simulation()?;
    let (start, end) = (simulation.event(raw_start)?, simulation.event(raw_end)?);
    for event in [&start, &end] {
        if event.flags & flags::DISABLE_TIMING != 0 || event.device != start.device {
            return Err(Code::INVALID_HANDLE);
        }
    }
    for event in [&start, &end] {
        if event.last.lock().part.is_some() {
            return Err(if vendor() == Vendor::Hip { Code::INVALID_HANDLE } else { Code::CAPTURED_EVENT });
        }
    }
    let elapsed = simulation.gpu.event_elapsed_ns(start.id, end.id).map_err(|error| match error.kind() {
        highwater_hal::ErrorKind::InvalidArgument => Code::INVALID_HANDLE,
        highwater_hal::ErrorKind::InvalidState => {
            // An event that was never recorded takes precedence over one that is not complete.
            let never = |id| {
                let alone = simulation.gpu.event_elapsed_ns(id, id);
                alone.is_err_and(|error| error.kind() == highwater_hal::ErrorKind::InvalidArgument)
            };
            if never(start.id) || never(end.id) { Code::INVALID_HANDLE } else { Code::NOT_READY }
        }
        _ => simulation.code_of(error),
    })?;
    if elapsed > 0 {
        return Ok(elapsed as f32 / 1e6);
    }
    // For two points in reverse order, the mock returns zero and the vendor a negative time.
    let back = simulation.gpu.event_elapsed_ns(end.id, start.id).map_err(|error| simulation.code_of(error))?;
    Ok(-(back as f32) / 1e6)
}

/// `cuStreamWaitEvent`.
///
/// # Errors
/// 1 for unknown flags; 401 for an external wait outside of captures; 905 if a stream in a capture would wait for a record
/// outside of it; 902 for a record of another capture; 906 if the legacy default stream would join, or while a blocking stream
/// is captured; 901 in an invalidated capture. The last four invalidate the captures. HIP: see `hip_stream_wait`.
pub fn stream_wait(raw_stream: u64, raw: u64, wait_flags: u32) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    let stream = simulation.stream(raw_stream)?;
    if vendor() == Vendor::Hip {
        return match wait_flags {
            0 => simulation.hip_stream_wait(&stream, &event),
            flags::WAIT_EXTERNAL => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        };
    }
    if event.flags & flags::INTERPROCESS != 0 && event.device != stream.device {
        eprintln!(
            "cuStreamWaitEvent: a stream of device {} waits for an interprocess event of device {}",
            stream.device, event.device
        );
        // Rule `devices.interprocess-events`. Rust's handler would return from a raised signal, so the default action comes first.
        // SAFETY: The calls touch no memory.
        unsafe {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            libc::raise(libc::SIGSEGV);
        }
    }
    if stream.is_legacy() {
        simulation.check_legacy_use(stream.device)?;
    }
    let part = CAPTURES.of(stream.id);
    if part.as_ref().is_some_and(|part| part.is_lost()) {
        return Err(Code::STREAM_CAPTURE_INVALIDATED);
    }
    match wait_flags {
        0 => {}
        flags::WAIT_EXTERNAL if part.is_none() => return Err(Code::ILLEGAL_STATE),
        flags::WAIT_EXTERNAL => {
            // The launched graph waits for the record that is the last one then.
            let wait = Call::new(move || drop(simulation.gpu.synchronize_event(event.id)));
            simulation.hooks.enqueue_call(stream.id, wait).map_err(|error| simulation.code_of(error))?;
            simulation.note_nodes(&stream, node::WAIT, 1);
            return Ok(());
        }
        _ => return Err(Code::INVALID_VALUE),
    }
    let recorded_in = event.last.lock().part.clone();
    let wait = || simulation.gpu.stream_wait_event(stream.id, event.id).map_err(|error| simulation.code_of(error));
    match (recorded_in, part) {
        (None, None) => {
            simulation.before_enqueue(&stream)?;
            wait()
        }
        (None, Some(part)) => {
            // A wait for an event that was never recorded does nothing.
            wait().inspect_err(|_| simulation.lose_capture(&part)).map_err(|code| match code {
                Code::STREAM_CAPTURE_UNSUPPORTED => Code::STREAM_CAPTURE_ISOLATION,
                code => code,
            })
        }
        (Some(other), _) if other.has_left() => Err(Code::CAPTURED_EVENT),
        (Some(other), _) if other.is_lost() => Err(Code::STREAM_CAPTURE_INVALIDATED),
        (Some(other), Some(part)) if Arc::ptr_eq(&other.capture, &part.capture) => wait(),
        (Some(other), Some(part)) => {
            simulation.lose_capture(&other);
            simulation.lose_capture(&part);
            Err(Code::STREAM_CAPTURE_MERGE)
        }
        (Some(other), None) if stream.is_legacy() => {
            simulation.lose_capture(&other);
            Err(Code::STREAM_CAPTURE_IMPLICIT)
        }
        (Some(other), None) => {
            wait()?;
            CAPTURES.join(Part::new(stream, Arc::clone(&other.capture), Some(other.stream.id)));
            Ok(())
        }
    }
}

impl Simulation {
    /// `hipStreamWaitEvent` (clr 6.4.3, `hip_stream.cpp`).
    ///
    /// A stream that waits for an event of a capture joins that capture, even after it was invalidated or its graph deleted. If
    /// a captured stream waits for an event that was recorded outside the capture, the wait is not recorded. An event of a
    /// destroyed stream is complete. Rule R3.20 of `docs/rocm.md` covers interprocess events.
    ///
    /// # Errors
    /// 1 for an interprocess event that was never recorded, or was recorded more than 32 times (HIP 7); 905 for an event from
    /// before the capture of its stream, and that capture goes on; 902 for a record of another capture; 400 if the legacy
    /// default stream would join; 901 on an invalidated stream.
    fn hip_stream_wait(&self, stream: &Stream, event: &Event) -> Answer<()> {
        if event.flags & flags::INTERPROCESS != 0 {
            if event.orders_nothing() {
                return Ok(());
            }
            // HIP 7 orders 32 records of an event in all.
            let records = self.hooks.records_of(event.id).map_err(|error| self.code_of(error))?;
            if !(1..=IPC_RECORDS).contains(&records) {
                return Err(Code::INVALID_VALUE);
            }
        }
        let last = event.last.lock();
        let own = CAPTURES.of(stream.id);
        if own.as_ref().is_some_and(|own| own.is_lost()) {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let wait = || self.gpu.stream_wait_event(stream.id, event.id).map_err(|error| self.code_of(error));
        if let Some(part) = last.part.as_ref().filter(|part| !part.has_left()) {
            if stream.is_legacy() {
                return Err(Code::INVALID_HANDLE);
            }
            if own.as_ref().is_some_and(|own| !Arc::ptr_eq(&own.capture, &part.capture)) {
                return Err(Code::STREAM_CAPTURE_MERGE);
            }
            if !part.capture.is_ended() {
                wait()?;
            }
            if own.is_none() {
                CAPTURES.join(Part::new(*stream, Arc::clone(&part.capture), Some(part.stream.id)));
            }
            return Ok(());
        }
        if last.part.is_some() {
            return Ok(());
        }
        if let Some(followed) = &last.stream {
            let Some(followed) = followed.upgrade() else { return Ok(()) };
            if CAPTURES.of(followed.id).is_some_and(|part| !part.is_lost()) {
                return Err(Code::STREAM_CAPTURE_ISOLATION);
            }
        }
        if own.is_some() {
            return Ok(());
        }
        self.before_enqueue(stream)?;
        wait()
    }
}
