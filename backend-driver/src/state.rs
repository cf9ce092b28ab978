//! The state that a backend shares with its BLAS handles: the vendor, the tables of ids and blocks, and the checks of
//! every call.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex};

use super::calls::{capture_mode, capture_status};
use super::captures::Captures;
use super::codes::Codes;
use super::event_homes::Paused;
use super::hazards::Asking;
use super::mapped_memory::{MappedMemory, PhysicalMemory};
use super::objects::{BEHIND_DEFAULT, Held, Link, Objects, Removed};
use super::platform::{Opened, Platform, SharedBlock};
use super::raw::{Raw, RawEvent, RawGraph, RawGraphExec, RawMemPool, RawStream};
use super::turns::{Family, Turns};
use highwater_hal::{
    Capabilities, Completion, DeviceInfo, DevicePtr, Error, ErrorKind, EventId, GraphExecId, GraphId, HostPtr, IdTable,
    Identity, PhysicalMemoryId, Result, StreamId, Transport,
    fork::{self, Generation},
};

/// Object flag: foreign code created the object and owns it.
pub(super) const FOREIGN: u64 = 1;
/// Stream flag: a capture that this backend began is open.
pub(super) const CAPTURES: u64 = 2;
/// Event flag: the event has timing.
pub(super) const TIMING: u64 = 4;
/// Event flag: other processes can open the event.
pub(super) const INTERPROCESS: u64 = 8;
/// Stream flags: low priority, and high priority.
pub(super) const LOW: u64 = 16;
pub(super) const HIGH: u64 = 32;
/// Event flag: a call is recording the event.
pub(super) const RECORDING: u64 = 64;
/// Event flag: foreign code knows the vendor's handle.
pub(super) const EXPOSED: u64 = 128;

/// A block of device memory.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) device: u32,
    pub(super) bytes: usize,
    pub(super) kind: BlockKind,
}

#[derive(Debug)]
pub(super) enum BlockKind {
    Plain,
    Legacy,
    Shared { transport: Transport, token: [u8; 16], block: SharedBlock },
    StreamOrdered,
}

/// A block of page-locked memory. Its start is the key of the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostBlock {
    pub(super) bytes: usize,
    pub(super) registered: bool,
}

/// Memory of another process that is mapped here.
#[derive(Debug)]
pub(super) struct Mapped {
    /// `None` while a thread maps or unmaps it.
    pub(super) address: Option<DevicePtr>,
    /// The bytes in the handle that was opened.
    pub(super) bytes: u64,
    pub(super) opens: u64,
    /// The block that the platform opened; `None` for a legacy handle.
    pub(super) block: Option<SharedBlock>,
}

/// The key of a mapping: device, transport and payload.
pub(super) type MappedKey = (u32, u32, [u8; 64]);

#[derive(Debug)]
pub(super) struct DeviceState {
    pub(super) info: DeviceInfo,
    pub(super) capabilities: Capabilities,
    /// The pool of stream-ordered memory, once it is set up.
    pub(super) pool: OnceLock<Option<RawMemPool>>,
    /// The relay (`event_homes.rs`), once an event was recorded on a thread's own default stream.
    pub(super) relay: OnceLock<RawStream>,
}

/// The state that a backend shares with its BLAS handles.
pub struct DriverState<P: Platform> {
    pub(super) platform: P,
    pub(super) identity: Identity,
    pub(super) devices: Vec<DeviceState>,
    generation: fork::Guard,
    pub(super) streams: Objects<StreamId>,
    pub(super) events: Objects<EventId>,
    pub(super) graphs: Objects<GraphId>,
    pub(super) graph_turns: Turns,
    pub(super) graph_execs: Objects<GraphExecId>,
    pub(super) blocks: Mutex<HashMap<DevicePtr, Block>>,
    pub(super) host_blocks: Mutex<BTreeMap<usize, HostBlock>>,
    pub(super) physical_memory: IdTable<PhysicalMemoryId, PhysicalMemory>,
    pub(super) mapped_memory: Mutex<MappedMemory>,
    /// True once memory was mapped.
    pub(super) has_mapped: AtomicBool,
    pub(super) mapped: Mutex<HashMap<MappedKey, Mapped>>,
    pub(super) mapped_changed: Condvar,
    /// The descriptors of exported handles, held weakly, because dropping the last copy of a descriptor notifies no
    /// one.
    pub(super) exported: Mutex<Vec<highwater_hal::DescriptorWatch>>,
    handles: AtomicU64,
    /// The captures that are open in the vendor's library.
    pub(super) captures: Arc<Captures>,
    /// The streams that take part in a capture or are about to, on a vendor that follows events to their streams.
    pub(super) paused: Mutex<Vec<Paused>>,
    /// Streams that never take part in a capture, with their devices. No pause uses these.
    pub(super) helpers: Mutex<Vec<(u32, RawStream)>>,
    /// Whether a foreign stream was wrapped. Its captures are unknown here.
    foreign: AtomicBool,
    /// Whether peer access is enabled, by device and peer.
    peers: Vec<OnceLock<bool>>,
}

impl<P: Platform> fmt::Debug for DriverState<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverState")
            .field("backend", &self.identity.name)
            .field("tag", &self.identity.tag)
            .finish_non_exhaustive()
    }
}

/// A stream's vendor handle, which is not destroyed while this value is alive.
#[derive(Debug)]
pub struct HeldStream<'r> {
    raw: RawStream,
    held: Option<Held<'r, StreamId>>,
}

impl HeldStream<'_> {
    /// Returns the vendor's handle.
    #[must_use]
    #[inline(always)]
    pub const fn raw(&self) -> RawStream {
        self.raw
    }

    /// Returns whether this is a default stream, which follows the current device.
    #[inline(always)]
    pub(super) const fn is_default(&self) -> bool {
        self.held.is_none()
    }

    /// Returns the vendor's handle and the link of events that are recorded on it; [`BEHIND_DEFAULT`] for a default stream.
    pub(super) fn raw_and_link(&self, id: StreamId) -> (RawStream, Link) {
        let Some(held) = &self.held else { return (self.raw, BEHIND_DEFAULT) };
        let (raw, number) = held.raw_and_number();
        (raw, Objects::link_of(id, number))
    }

    /// Returns the stream's flags; 0 for a default stream.
    pub(super) fn flags(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| held.flags())
    }

    /// Stores the thread that must end the stream's capture; 0 if any thread can end it.
    pub(super) fn set_capturing_thread(&self, thread: u64) {
        if let Some(held) = &self.held {
            held.set_number(thread);
        }
    }

    /// Returns whether this thread can end the capture that this backend began on the stream.
    pub(super) fn can_end_here(&self) -> bool {
        let Some(held) = &self.held else { return true };
        held.flags() & CAPTURES == 0 || held.number() == 0 || held.number() == this_thread()
    }

    /// Sets or clears a flag and returns its previous value. A default stream has no flags.
    pub(super) fn set_flag(&self, flag: u64, on: bool) -> bool {
        self.held.as_ref().is_some_and(|held| held.set_flag(flag, on))
    }
}

/// Returns a number, never 0, that no other thread has.
pub(super) fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // An ending thread has lost its number, so it gets another unique one.
    NUMBER.try_with(|number| *number).unwrap_or_else(|_| NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Keeps a device current in this thread until it is dropped.
#[derive(Debug)]
pub struct Current<'r, P: Platform> {
    platform: &'r P,
    previous: Option<P::Previous>,
}

impl<P: Platform> Drop for Current<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            self.platform.restore(previous);
        }
    }
}

/// Keeps this thread in the relaxed capture mode until it is dropped.
#[derive(Debug)]
pub struct Relaxed<'r, P: Platform> {
    exchange: Option<(&'r P, unsafe extern "C" fn(*mut u32) -> i32)>,
    previous: u32,
}

impl<P: Platform> Drop for Relaxed<'_, P> {
    fn drop(&mut self) {
        if let Some((_, exchange)) = self.exchange {
            // SAFETY: The call reads and writes one number that lives until it returns.
            unsafe { exchange(&mut self.previous) };
        }
    }
}

/// Counts one live BLAS handle until it is dropped.
#[derive(Debug)]
pub struct HandleCount<P: Platform>(std::sync::Arc<DriverState<P>>);

impl<P: Platform> Drop for HandleCount<P> {
    fn drop(&mut self) {
        self.0.handles.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<P: Platform> DriverState<P> {
    pub(super) fn new(opened: Opened<P>) -> Self {
        let tag = opened.identity.tag;
        let devices: Vec<DeviceState> = opened
            .devices
            .into_iter()
            .map(|(info, capabilities)| DeviceState {
                info,
                capabilities,
                pool: OnceLock::new(),
                relay: OnceLock::new(),
            })
            .collect();
        let pairs = devices.len() * devices.len();
        Self {
            platform: opened.platform,
            identity: opened.identity,
            devices,
            generation: fork::Guard::new(),
            streams: Objects::new(tag),
            events: Objects::new(tag),
            graphs: Objects::new(tag),
            graph_turns: Turns::default(),
            graph_execs: Objects::new(tag),
            blocks: Mutex::default(),
            host_blocks: Mutex::default(),
            physical_memory: IdTable::new(tag),
            mapped_memory: Mutex::default(),
            has_mapped: AtomicBool::new(false),
            mapped: Mutex::default(),
            mapped_changed: Condvar::new(),
            exported: Mutex::default(),
            handles: AtomicU64::new(0),
            captures: opened.captures,
            paused: Mutex::default(),
            helpers: Mutex::default(),
            foreign: AtomicBool::new(false),
            peers: (0..pairs).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Returns the vendor.
    #[must_use]
    pub const fn platform(&self) -> &P {
        &self.platform
    }

    /// Checks that this process may call the vendor.
    ///
    /// # Errors
    /// `Forked` in a forked child, and `ShuttingDown` once the process has begun to exit.
    #[inline(always)]
    pub fn enter(&self, operation: &'static str) -> Result<()> {
        if self.generation.is_current() && !highwater_hal::exit::has_begun() {
            Ok(())
        } else {
            Err(self.out_of_service(operation))
        }
    }

    #[cold]
    fn out_of_service(&self, operation: &'static str) -> Error {
        if self.generation.is_current() { highwater_hal::exit::error(operation) } else { Generation::error(operation) }
    }

    pub(super) fn is_own_process(&self) -> bool {
        self.generation.is_current()
    }

    /// Returns whether this process may call the vendor: it is no forked child and has not begun to exit.
    #[must_use]
    #[inline(always)]
    pub fn is_in_service(&self) -> bool {
        self.generation.is_current() && !highwater_hal::exit::has_begun()
    }

    /// Checks that a successful call returned an object. Other calls would take 0 for a default.
    ///
    /// # Errors
    /// `Vendor` for 0.
    #[inline]
    pub fn made<R: Raw>(&self, operation: &'static str, raw: R) -> Result<R> {
        if raw.number() == 0 { Err(nothing(operation)) } else { Ok(raw) }
    }

    /// Converts a code of the driver.
    ///
    /// # Errors
    /// Every code but 0, as [`Platform::codes`] describes it.
    #[inline(always)]
    pub fn check(&self, operation: &'static str, code: i32) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.platform.codes().error(operation, code)) }
    }

    /// Returns the error of a BLAS call that returned `code`. If the code only reports a failure, asks the driver
    /// whether the device is lost.
    #[cold]
    #[must_use]
    pub fn blas_error(&self, operation: &'static str, codes: &Codes, device: u32, code: i32) -> Error {
        let error = codes.error(operation, code);
        if error.kind() != ErrorKind::Vendor {
            return error;
        }
        let (mut free, mut total) = (0, 0);
        let Ok(_current) = self.make_current(operation, device) else { return error };
        let _relaxed = self.relaxed();
        // SAFETY: The call writes two numbers, which outlive it.
        let asked = self.check(operation, unsafe { (self.platform.calls().mem_get_info)(&mut free, &mut total) });
        asked.err().filter(|error| error.kind() == ErrorKind::DeviceLost).unwrap_or(error)
    }

    #[inline(always)]
    pub(super) fn device(&self, operation: &'static str, device: u32) -> Result<&DeviceState> {
        self.devices.get(device as usize).ok_or_else(|| self.no_device(operation, device))
    }

    #[cold]
    fn no_device(&self, operation: &'static str, device: u32) -> Error {
        let message = format!("the ordinal is {device}, expected less than {}", self.devices.len());
        Error::new(ErrorKind::InvalidArgument, operation, message).with_hint("pass an ordinal below `device_count`")
    }

    /// Returns the capabilities of a device.
    ///
    /// # Errors
    /// `InvalidArgument` for a device that does not exist.
    #[inline(always)]
    pub fn capabilities(&self, operation: &'static str, device: u32) -> Result<&Capabilities> {
        Ok(&self.device(operation, device)?.capabilities)
    }

    /// Checks that the device has the capability `name`.
    ///
    /// # Errors
    /// `Unsupported`, and `InvalidArgument` for a device that does not exist.
    pub fn require(
        &self,
        operation: &'static str,
        device: u32,
        has: fn(&Capabilities) -> bool,
        name: &str,
    ) -> Result<()> {
        if has(self.capabilities(operation, device)?) { Ok(()) } else { Err(Error::lacks(operation, name)) }
    }

    /// Returns the vendor's handle of a stream, for a BLAS handle of `device`.
    ///
    /// # Errors
    /// The same as [`DriverState::stream`], and `WrongDevice` for a stream of another device.
    #[inline]
    pub fn stream_for_handle(&self, operation: &'static str, id: StreamId, device: u32) -> Result<HeldStream<'_>> {
        let held = self.stream(operation, id)?;
        if id.device() == device { Ok(held) } else { Err(wrong_device(operation, id, "the handle", device)) }
    }

    /// Makes `device` current until the result is dropped.
    ///
    /// # Errors
    /// The vendor's errors.
    #[inline(always)]
    pub fn make_current(&self, operation: &'static str, device: u32) -> Result<Current<'_, P>> {
        match self.platform.make_current(device) {
            Ok(previous) => Ok(Current { platform: &self.platform, previous }),
            Err(code) => Err(self.platform.codes().error(operation, code)),
        }
    }

    /// Returns the vendor's handle of a stream.
    ///
    /// # Errors
    /// `InvalidHandle` for a stale or forged id, and `Unsupported` for a default stream that the device lacks.
    #[inline(always)]
    pub fn stream(&self, operation: &'static str, id: StreamId) -> Result<HeldStream<'_>> {
        if id.is_legacy_default() || id.is_per_thread_default() {
            return self.default_stream(operation, id);
        }
        let held = self.streams.hold(operation, id)?;
        Ok(HeldStream { raw: held.raw(), held: Some(held) })
    }

    /// Returns the handles of a stream and an event at the cost of one.
    #[inline(always)]
    pub(super) fn stream_and_event(
        &self,
        operation: &'static str,
        stream: StreamId,
        event: EventId,
    ) -> Result<(HeldStream<'_>, Held<'_, EventId>)> {
        if stream.is_legacy_default() || stream.is_per_thread_default() {
            return Ok((self.default_stream(operation, stream)?, self.events.hold(operation, event)?));
        }
        let (held, mark) = self.streams.hold_with(operation, stream, &self.events, event)?;
        Ok((HeldStream { raw: held.raw(), held: Some(held) }, mark))
    }

    #[cold]
    fn default_stream(&self, operation: &'static str, id: StreamId) -> Result<HeldStream<'_>> {
        let tag = self.identity.tag;
        let issued = [StreamId::legacy_default(tag, id.device()), StreamId::per_thread_default(tag, id.device())];
        let Some(device) = self.devices.get(id.device() as usize).filter(|_| issued.contains(&id)) else {
            let message = format!("the {id} is not a default stream of backend {}", tag.get());
            return Err(Error::new(ErrorKind::InvalidHandle, operation, message)
                .with_hint("create the id with this backend's tag and an existing device"));
        };
        let quirks = self.platform.quirks();
        let (can, name, raw) = if id.is_legacy_default() {
            (device.capabilities.legacy_default_stream, "legacy_default_stream", quirks.legacy_stream)
        } else {
            (device.capabilities.per_thread_default_stream, "per_thread_default_stream", quirks.per_thread_stream)
        };
        if can { Ok(HeldStream { raw, held: None }) } else { Err(Error::lacks(operation, name)) }
    }

    /// Makes the device of a default stream current. The handle of any other stream names its device.
    #[inline(always)]
    pub(super) fn current_for(
        &self,
        operation: &'static str,
        stream: &HeldStream<'_>,
        device: u32,
    ) -> Result<Option<Current<'_, P>>> {
        if stream.is_default() { self.make_current(operation, device).map(Some) } else { Ok(None) }
    }

    /// Puts this thread into the relaxed capture mode, in which a capture forbids no call.
    #[inline(never)]
    pub fn relaxed(&self) -> Relaxed<'_, P> {
        let mut relaxed = Relaxed { exchange: None, previous: capture_mode::RELAXED };
        if let Some(exchange) = self.platform.calls().thread_exchange_stream_capture_mode {
            // SAFETY: The call reads and writes one number, which outlives it.
            if unsafe { exchange(&mut relaxed.previous) } == 0 {
                relaxed.exchange = Some((&self.platform, exchange));
            }
        }
        relaxed
    }

    /// Puts this thread into the relaxed mode for a query, if a capture may be open. Relaxing every query would take a
    /// third of its time. A capture that begins meanwhile waits for the query. Without a question to wait for, the
    /// query is always relaxed.
    #[inline(always)]
    pub(super) fn relaxed_if_capturing(&self, asking: Option<&Asking>) -> Option<Relaxed<'_, P>> {
        if asking.is_none() || self.captures.may_be_open() { Some(self.relaxed()) } else { None }
    }

    /// Converts the code of a query.
    #[inline(always)]
    pub(super) fn answer(&self, operation: &'static str, code: i32) -> Result<Completion> {
        match code {
            0 => Ok(Completion::Complete),
            code if code == self.platform.quirks().not_ready => Ok(Completion::Pending),
            code => Err(self.platform.codes().error(operation, code)),
        }
    }

    #[inline(always)]
    pub(super) fn may_capture(&self) -> bool {
        self.captures.is_any_open() || self.foreign.load(Ordering::Relaxed)
    }

    /// Returns whether a foreign stream was wrapped, so that its captures are unknown here.
    pub(super) fn has_foreign(&self) -> bool {
        self.foreign.load(Ordering::Relaxed)
    }

    pub(super) fn note_foreign(&self) {
        self.foreign.store(true, Ordering::Relaxed);
        self.captures.note_foreign();
    }

    /// Returns whether the stream takes part in a capture.
    #[inline(always)]
    pub(super) fn takes_part(&self, operation: &'static str, stream: &HeldStream<'_>) -> Result<bool> {
        if !self.may_capture() || stream.is_default() { Ok(false) } else { self.is_capturing(operation, stream.raw) }
    }

    /// Asks the vendor whether the stream takes part in a capture, which may be lost.
    #[cold]
    pub(super) fn is_capturing(&self, operation: &'static str, raw: RawStream) -> Result<bool> {
        Ok(self.capture_status(operation, raw)? != capture_status::NONE)
    }

    /// Returns the vendor's [`capture_status`] of a stream.
    #[cold]
    pub(super) fn capture_status(&self, operation: &'static str, raw: RawStream) -> Result<u32> {
        let Some(state) = self.platform.calls().stream_is_capturing else { return Ok(capture_status::NONE) };
        let mut value = capture_status::NONE;
        // SAFETY: The caller holds the stream, and the call writes one number, which outlives it.
        self.check(operation, unsafe { state(raw, &mut value) })?;
        Ok(value)
    }

    /// Refuses calls on a capturing stream that would lose the capture or record unintended work.
    #[inline(always)]
    pub(super) fn refuse_in_capture(&self, operation: &'static str, stream: &HeldStream<'_>) -> Result<()> {
        if self.takes_part(operation, stream)? {
            return Err(in_capture(operation));
        }
        Ok(())
    }

    /// Counts a live BLAS handle until the result is dropped.
    pub fn count_handle(self: &std::sync::Arc<Self>) -> HandleCount<P> {
        self.handles.fetch_add(1, Ordering::Relaxed);
        HandleCount(std::sync::Arc::clone(self))
    }

    pub(super) fn live_handles(&self) -> u64 {
        self.handles.load(Ordering::Relaxed)
    }

    /// Enables peer access once for each pair. Returns whether it is enabled.
    pub(super) fn enable_peer(&self, operation: &'static str, device: u32, peer: u32) -> Result<bool> {
        let Some(state) = self.peers.get(device as usize * self.devices.len() + peer as usize) else {
            return Ok(false);
        };
        if let Some(known) = state.get() {
            return Ok(*known);
        }
        let _relaxed = self.relaxed();
        let _current = self.make_current(operation, device)?;
        // If two threads enable it, the second gets the code for "already enabled", which is a success.
        let enabled = match self.platform.enable_peer_access(device, peer) {
            Ok(()) => true,
            Err(code) => {
                let error = self.platform.codes().error(operation, code);
                tracing::warn!("copies from device {device} to {peer} go through the host: {error}");
                false
            }
        };
        Ok(*state.get_or_init(|| enabled))
    }

    /// Returns the pool of stream-ordered memory, which is set up to keep freed memory.
    pub(super) fn pool(&self, device: u32) -> Option<RawMemPool> {
        let state = self.devices.get(device as usize)?;
        match state.pool.get() {
            Some(pool) => *pool,
            // The cell is filled after the calls, so that no other thread waits for the vendor. Two threads may both
            // set up the pool.
            None => {
                let pool = self.set_up_pool(device);
                *state.pool.get_or_init(|| pool)
            }
        }
    }

    #[cold]
    fn set_up_pool(&self, device: u32) -> Option<RawMemPool> {
        let calls = self.platform.calls();
        let (default_pool, set) = (calls.device_get_default_mem_pool?, calls.mem_pool_set_attribute?);
        let (mut pool, mut keep) = (RawMemPool::NULL, u64::MAX);
        // SAFETY: The calls read and write numbers, which outlive them.
        let code = unsafe {
            match default_pool(&mut pool, i32::try_from(device).ok()?) {
                0 => set(pool, self.platform.quirks().pool_release_threshold, &mut keep),
                code => code,
            }
        };
        (code == 0).then_some(pool)
    }

    /// Frees the unused memory of the pool. Returns whether that succeeded.
    pub(super) fn trim_pool(&self, device: u32) -> bool {
        let pool = self.devices.get(device as usize).and_then(|state| state.pool.get().copied().flatten());
        let (Some(pool), Some(trim)) = (pool, self.platform.calls().mem_pool_trim_to) else { return false };
        // SAFETY: The pool is the device's own and is never destroyed.
        unsafe { trim(pool, 0) == 0 }
    }

    /// Returns the start of the page-locked block that contains `ptr`, and the offset of `ptr` in it.
    pub(super) fn host_block(&self, operation: &'static str, ptr: HostPtr) -> Result<(usize, usize)> {
        let blocks = self.host_blocks.lock();
        match blocks.range(..=ptr.address()).next_back() {
            Some((&start, block)) if ptr.address() - start < block.bytes => Ok((start, ptr.address() - start)),
            _ => Err(Error::new(
                ErrorKind::InvalidPointer,
                operation,
                format!("{ptr} is not page-locked memory of this backend"),
            )
            .with_hint("pass an address in memory of `allocate` or `register`")),
        }
    }

    /// Destroys a stream that no call uses.
    pub(super) fn destroy_raw_stream(&self, operation: &'static str, stream: &Removed<RawStream>) -> Result<()> {
        let outcome = if self.events_follow() {
            self.destroy_followed_stream(operation, stream)
        } else if stream.flags & FOREIGN != 0 {
            Ok(())
        } else {
            self.destroy_stream_now(operation, stream.raw)
        };
        // A capture ends with its stream and is counted until then.
        if stream.flags & CAPTURES != 0 {
            self.captures.ended(stream.device);
        }
        outcome
    }

    /// Makes the vendor's call that destroys a stream.
    pub(super) fn destroy_stream_now(&self, operation: &'static str, raw: RawStream) -> Result<()> {
        let _relaxed = self.relaxed();
        // SAFETY: The id is stale or names another handle, and no call uses this one.
        self.check(operation, unsafe { (self.platform.calls().stream_destroy)(raw) })
    }

    pub(super) fn destroy_raw_event(&self, operation: &'static str, event: &Removed<RawEvent>) -> Result<()> {
        if event.flags & FOREIGN != 0 {
            return Ok(());
        }
        let _asking =
            self.events_follow().then(|| self.ask_while_home_stays(operation, self.events.link_of_removed(event)));
        let _relaxed = self.relaxed();
        // SAFETY: The id is stale, and no call uses the handle.
        self.check(operation, unsafe { (self.platform.calls().event_destroy)(event.raw) })
    }

    pub(super) fn destroy_raw_graph(&self, operation: &'static str, graph: &Removed<RawGraph>) -> Result<()> {
        let Some(destroy) = self.platform.calls().graph_destroy else { return Ok(()) };
        let _turn = self.graph_turns.wait_for(Family(graph.number()));
        // SAFETY: As above. No other call uses an executable of it, except launches.
        self.check(operation, unsafe { destroy(graph.raw) })
    }

    pub(super) fn destroy_raw_graph_exec(&self, operation: &'static str, graph: &Removed<RawGraphExec>) -> Result<()> {
        let Some(destroy) = self.platform.calls().graph_exec_destroy else { return Ok(()) };
        let _relaxed = self.relaxed();
        let _turn = self.graph_turns.wait_for(Family(graph.number()));
        // SAFETY: As above. No other call uses its graph or another executable of it, except launches.
        self.check(operation, unsafe { destroy(graph.raw) })
    }
}

impl<P: Platform> DriverState<P> {
    /// Destroys the objects whose destruction was postponed and that no call uses any more.
    pub(super) fn sweep(&self, operation: &'static str) {
        self.streams.sweep(|stream| self.destroy_raw_stream(operation, stream));
        self.events.sweep(|event| self.destroy_raw_event(operation, event));
        self.graphs.sweep(|graph| self.destroy_raw_graph(operation, graph));
        self.graph_execs.sweep(|graph| self.destroy_raw_graph_exec(operation, graph));
    }
}

#[cold]
fn in_capture(operation: &'static str) -> Error {
    Error::new(ErrorKind::Capture, operation, "the stream takes part in a capture")
        .with_hint("end the capture first, or use another stream")
}

#[cold]
pub(super) fn wrong_device(operation: &'static str, stream: StreamId, what: &str, device: u32) -> Error {
    let message = format!("the {stream} belongs to device {}, expected device {device} of {what}", stream.device());
    Error::new(ErrorKind::WrongDevice, operation, message).with_hint("use a stream of the same device")
}

#[cold]
pub(super) fn nothing(operation: &'static str) -> Error {
    Error::new(ErrorKind::Vendor, operation, "the vendor reported success and returned no object")
        .with_hint("look for an earlier error of the device")
}

impl<P: Platform> Drop for DriverState<P> {
    fn drop(&mut self) {
        // At exit and in a forked child, the vendor is not called.
        if self.is_in_service() {
            self.sweep("close");
            self.forget_helpers();
            // No caller can end these captures any more, and they must not block other backends.
            self.streams.devices_with(CAPTURES).into_iter().for_each(|device| self.captures.ended(device));
        }
    }
}

#[cfg(test)]
impl<P: Platform> DriverState<P> {
    /// Returns whether a lock of the state is held. The vendor is never called under one.
    pub(super) fn is_locked(&self) -> bool {
        self.blocks.is_locked()
            || self.host_blocks.is_locked()
            || self.mapped.is_locked()
            || self.mapped_memory.is_locked()
            || self.exported.is_locked()
            || self.paused.is_locked()
            || self.helpers.is_locked()
            || self.streams.is_locked()
            || self.events.is_locked()
            || self.graphs.is_locked()
            || self.graph_turns.is_locked()
            || self.graph_execs.is_locked()
    }
}
