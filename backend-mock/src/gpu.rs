//! [`MockGpu`]: the `Backend` of the simulated devices.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;

use highwater_hal::fork::Generation;
use highwater_hal::{
    AllocateOptions, Backend, BackendTag, BlasHandle, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion,
    CopyShape, DeviceInfo, DeviceMemoryKind, DevicePtr, Error, ErrorKind, EventId, EventOptions, FillPattern,
    GraphExecId, GraphId, HostAllocator, HostObserver, IdTable, Identity, IpcSharing, LiveObjects, Location,
    MemoryCopy, MemoryCopy2d, MemoryFill, MemoryInfo, MemoryRange, PhysicalMemoryId, PhysicalMemoryOptions, Result,
    StreamId, StreamOptions, StreamPriority, counted, exit,
};
use parking_lot::Mutex;

use crate::arena::Owner;
use crate::blas::MockBlas;
use crate::calls::{CallObserver, Calls};
use crate::checks::{Checks, Violation};
use crate::command::{Command, Step};
use crate::device::{self, Device, DeviceOptions};
use crate::engine::{Engine, Scheduler, nanoseconds};
use crate::event::Event;
use crate::foreign::{self, ThreadStreams, Wrappers};
use crate::held::Held;
use crate::host::MockHost;
use crate::host_observer::MockHostObserver;
use crate::ipc::{self, MockIpc};
use crate::mapped_memory::MappedMemory;
use crate::memory_use::uses;
use crate::observer::{Observers, OrderObserver, Range, Space, Store, UseObserver};
use crate::operation::Operation;
use crate::options::MockOptions;
use crate::races::finder::Finder;
use crate::races::{HandOver, Race};
use crate::raw_handles::RawHandles;
use crate::recording::{self, OpenCaptures};
use crate::schedule::Schedule;
use crate::sealed_file::Exported;
use crate::shared_event::{Progress, SharedEvent};
use crate::state::{Shared, State, device_uuid};
use crate::stream::Stream;

/// Simulated devices. Open them with [`MockGpu::open`], and use them through [`Backend`].
///
/// BLAS handles, the host allocator and the sharing keep the devices alive, so the devices end with the last of them.
/// Then the mock executes the queued work without latency, joins the worker threads, and gives memory and descriptors
/// back. In a forked child, and once the process has begun to exit, dropping does nothing.
pub struct MockGpu {
    pub(crate) shared: Arc<Shared>,
    ipc: Arc<MockIpc>,
}

impl fmt::Debug for MockGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockGpu")
            .field("tag", &self.shared.identity.tag)
            .field("devices", &self.shared.devices)
            .finish_non_exhaustive()
    }
}

impl MockGpu {
    /// Opens the devices.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported` for options that the mock does not have, `OutOfMemory` if the system refuses
    /// the memory.
    pub fn open(mut options: MockOptions) -> Result<Arc<Self>> {
        if !options.capabilities.mapped_memory {
            options.capabilities.mapped_memory_rdma = false;
            options.capabilities.mapped_memory_granularity = 0;
        }
        let faults = options.check()?;
        let schedule = options.schedule.map(Schedule::new);
        let calls = Arc::new(Calls::new(options.seed, schedule.clone().map(|it| it as Arc<dyn CallObserver>)));
        for (operation, numbers, kind) in faults {
            calls.fail(operation, numbers, kind)?;
        }
        for (operation, per_million, kind) in options.check_chances()? {
            calls.fail_by_chance(operation, per_million, kind)?;
        }
        let tag = BackendTag::next();
        let mut identity = Identity::new("mock", "devices simulated on the CPU", tag);
        identity.real_device = false;
        identity.versions = vec![("highwater-mock".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
        identity.blas_workspace_variables = &["CUBLAS_WORKSPACE_CONFIG"];
        identity.lt_workspace_variables = &["CUBLASLT_WORKSPACE_SIZE"];
        let checks = options.checks.then(Arc::<Checks>::default);
        let races = options.race_detector.then(|| Finder::new(Arc::clone(&calls), options.thread_races));
        let observers = Observers {
            uses: checks.clone().map(|checks| checks as Arc<dyn UseObserver>),
            order: races.clone().map(|races| races as Arc<dyn OrderObserver>),
        };
        let device_options = DeviceOptions { quarantine: options.quarantine, poisons: options.checks };
        let device = |ordinal| Device::new(ordinal, options.memory_bytes, &device_options, observers.clone());
        let devices = (0..options.devices).map(|ordinal| device(ordinal).map(Arc::new)).collect::<Result<Vec<_>>>()?;
        // Thread names hold 15 bytes.
        let thread_name = format!("hw-mock-{}", tag.get());
        if let Some(schedule) = &schedule {
            schedule.watch(thread_name.clone()).map_err(|error| {
                let message = format!("cannot start a thread of the mock: {error}");
                Error::new(ErrorKind::OutOfMemory, "open", message).with_hint("raise the limit on threads (ulimit -u)")
            })?;
        }
        let host = MockHost::new(
            Arc::clone(&calls),
            options.capabilities,
            options.devices,
            options.host_memory_bytes,
            options.checks,
            observers.clone(),
        );
        let held = options.held.then(|| Arc::<Held>::default() as Arc<dyn Scheduler>);
        let scheduler = schedule.clone().map(|schedule| schedule as Arc<dyn Scheduler>).or(held);
        let engine = Engine::new(devices, options.latency, thread_name, scheduler, observers, RawHandles::new(tag));
        let create_handle_latency = |device| options.create_handle_latency.get(&device).copied().unwrap_or_default();
        let state = State {
            identity,
            devices: options.devices,
            capabilities: options.capabilities,
            thread_streams: ThreadStreams::new(Arc::clone(&calls)),
            wrapped_streams: Wrappers::new(),
            wrapped_events: Wrappers::new(),
            calls,
            engine,
            streams: IdTable::new(tag),
            streams_epoch: AtomicU64::new(0),
            legacy_streams: (0..options.devices).map(|_| OnceLock::new()).collect(),
            events: IdTable::new(tag),
            graphs: IdTable::new(tag),
            graph_execs: IdTable::new(tag),
            captures: Mutex::new(OpenCaptures::default()),
            physical_memory: IdTable::new(tag),
            mapped_memory: Mutex::new(MappedMemory::default()),
            host: Arc::new(host),
            handles: AtomicU64::new(0),
            raw_handles: Mutex::default(),
            create_handle_latency_ns: (0..options.devices)
                .map(|device| AtomicU64::new(nanoseconds(create_handle_latency(device))))
                .collect(),
            first_handle_latency: options.first_handle_latency,
            first_handle: (0..options.devices).map(|_| Default::default()).collect(),
            gemm_gap: options.gemm_gap,
            exported: Exported::default(),
            event_files: Arc::default(),
            peers: OnceLock::new(),
            checks,
            races,
            schedule,
            prints_races: options.prints_races,
        };
        // No vendor has exit handlers that must run first. Once for all backends of the process.
        static WATCH: Once = Once::new();
        WATCH.call_once(exit::watch);
        let shared = Arc::new(Shared(ManuallyDrop::new(state)));
        let ipc = Arc::new(MockIpc::new(&shared));
        Ok(Arc::new(Self { shared, ipc }))
    }

    #[cfg(feature = "simulated")]
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Changes the extra time that every operation of a stream takes, from the next one on.
    pub fn set_latency(&self, latency: Duration) {
        // Relaxed: a setting, which orders nothing.
        self.shared.engine.latency_ns.store(nanoseconds(latency), Ordering::Relaxed);
    }

    /// Changes the time that creating a handle of `device` takes.
    ///
    /// # Errors
    /// `InvalidArgument` if the device does not exist.
    pub fn set_create_handle_latency(&self, device: u32, latency: Duration) -> Result<()> {
        let setting = self.shared.create_handle_latency_ns.get(device as usize);
        let setting = setting.ok_or_else(|| self.shared.no_device("set_create_handle_latency", device))?;
        setting.store(nanoseconds(latency), Ordering::Relaxed);
        Ok(())
    }

    /// Sets the pointer mode of a raw BLAS handle, as foreign code does. With `true`, the device reads alpha and beta.
    /// A product on the handle then returns `InvalidPointer`, because the trait passes host addresses.
    ///
    /// # Errors
    /// `InvalidHandle` if `raw` is not a live handle.
    pub fn set_pointer_mode(&self, raw: u64, on_device: bool) -> Result<()> {
        let handle = self.shared.raw_handles.lock().get(&raw).cloned().ok_or_else(|| {
            Error::new(ErrorKind::InvalidHandle, "set_pointer_mode", format!("{raw} is not a live handle"))
                .with_hint("pass the result of `BlasHandle::raw` while the handle lives")
        })?;
        handle.store(on_device, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the `nth_from_now`-th call of an operation fail; 1 is the next one. `operation` is an [`Operation`] or its
    /// name. [`MockOptions::with_fault`] says what a `Runtime` makes of the failure.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown name and for 0.
    pub fn fail_call(&self, operation: impl AsRef<str>, nth_from_now: u64, kind: ErrorKind) -> Result<()> {
        self.shared.calls.fail(operation.as_ref().parse()?, nth_from_now..=nth_from_now, kind)
    }

    /// Makes `per_million` of a million calls of an operation fail on average, from the next one on; 0 ends it. The
    /// seed of the options, the operation, and the number of its calls since then decide which calls fail. A due fault
    /// of [`MockGpu::fail_call`] comes first.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown name and for more than a million.
    pub fn fail_by_chance(&self, operation: impl AsRef<str>, per_million: u32, kind: ErrorKind) -> Result<()> {
        self.shared.calls.fail_by_chance(operation.as_ref().parse()?, per_million, kind)
    }

    /// Returns how many calls of an operation the mock made fail.
    #[must_use]
    pub fn faults(&self, operation: Operation) -> u64 {
        self.shared.calls.faults(operation)
    }

    /// Returns how often an operation was called, failed calls included.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.shared.calls.count(operation)
    }

    /// Returns how often any operation was called.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        Operation::ALL.iter().map(|&operation| self.calls(operation)).sum()
    }

    /// Returns the first 1000 rules of use that were broken since the backend was opened in test mode
    /// ([`MockOptions::with_checks`]). Without test mode the list is empty.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        // In a child, a thread that the child does not have may hold the lock.
        let checks = self.shared.checks.as_ref().filter(|_| self.shared.calls.is_own_process());
        checks.map_or_else(Vec::new, |checks| checks.violations())
    }

    /// Returns how many rules of use were broken in all.
    #[must_use]
    pub fn violation_count(&self) -> u64 {
        let checks = self.shared.checks.as_ref().filter(|_| self.shared.calls.is_own_process());
        checks.map_or(0, |checks| checks.count())
    }

    /// Returns the first 1000 races since the backend was opened with [`MockOptions::with_race_detector`], in the order
    /// in which their second operations were called. Two operations make one race, however many bytes they share.
    /// Without the finder the list is empty. See [`races`](crate::races).
    #[must_use]
    pub fn races(&self) -> Vec<Race> {
        // In a child, a thread that the child does not have may hold the lock.
        let races = self.shared.races.as_ref().filter(|_| self.shared.calls.is_own_process());
        races.map_or_else(Vec::new, |races| races.races())
    }

    /// Returns how many races there were in all.
    #[must_use]
    pub fn race_count(&self) -> u64 {
        let races = self.shared.races.as_ref().filter(|_| self.shared.calls.is_own_process());
        races.map_or(0, |races| races.count())
    }

    /// Fails if a race was found, for the end of a test.
    ///
    /// # Errors
    /// `InvalidState` with every race in full, and if the finder is off; `Forked` in a forked child.
    pub fn check_races(&self) -> Result<()> {
        const OPERATION: &str = "check_races";
        if !self.shared.calls.is_own_process() {
            return Err(Generation::error(OPERATION));
        }
        if self.shared.races.is_none() {
            return Err(Error::new(ErrorKind::InvalidState, OPERATION, "the race finder is off")
                .with_hint("open the mock with `MockOptions::with_race_detector()`"));
        }
        let count = self.race_count();
        if count == 0 {
            return Ok(());
        }
        let races: String = self.races().iter().map(|race| format!("\n{race}")).collect();
        Err(Error::new(ErrorKind::InvalidState, OPERATION, format!("{} found{races}", counted(count, "race"))))
    }

    /// Returns what the calling thread knows, for another thread to take over. With `HandOver::take_over`, it declares a
    /// hand-over that the race finder does not see: a channel, a lock, or the end of a thread. See
    /// [`MockOptions::with_thread_races`].
    pub fn hand_over(&self) -> HandOver {
        // In a child, a thread that the child does not have may hold the lock.
        HandOver::new(self.shared.races.as_ref().filter(|_| self.shared.calls.is_own_process()))
    }

    /// Returns how many operations of streams happened outside of the schedule ([`MockOptions::with_schedule`]),
    /// because nobody called for two seconds. While it is 0, equal calls give equal schedules.
    #[must_use]
    pub fn unscheduled_operations(&self) -> u64 {
        self.shared.schedule.as_ref().map_or(0, |schedule| schedule.unprompted())
    }

    /// Lets a held stream ([`MockOptions::with_held_streams`]) execute what is enqueued on it, and returns when that is
    /// done. This is no wait of the program: the race finder orders nothing by it.
    ///
    /// # Errors
    /// `InvalidHandle` for an unknown stream, `Forked` in a forked child.
    pub fn release_stream(&self, stream: StreamId) -> Result<()> {
        if !self.shared.calls.is_own_process() {
            return Err(Generation::error("release_stream"));
        }
        let stream = self.shared.stream(Operation::SynchronizeStream, stream)?;
        stream.release(stream.queue.lock());
        Ok(())
    }

    /// Returns whether queued or running work uses the byte at `at`. Needs test mode ([`MockOptions::with_checks`]).
    #[must_use]
    pub fn is_in_use(&self, at: Location) -> bool {
        // In a child, a thread that the child does not have may hold the lock.
        let checks = self.shared.checks.as_ref().filter(|_| self.shared.calls.is_own_process());
        checks.is_some_and(|checks| checks.is_in_use(byte(at)))
    }

    /// Returns whether a live executable graph uses the byte at `at`.
    #[must_use]
    pub fn is_recorded(&self, at: Location) -> bool {
        let graphs = if self.shared.calls.is_own_process() { self.shared.graph_execs.objects() } else { Vec::new() };
        let mut steps = graphs.iter().flat_map(|graph| &graph.0);
        let used = |step: &Step| uses(&step.command, &self.shared.engine.devices);
        steps.any(|step| used(step).iter().any(|used| used.range.meets(&byte(at))))
    }

    /// Returns the inode of the memory file that holds a byte of a device. A process that has opened the block around it has
    /// this inode among its mappings (`/proc/PID/maps`).
    ///
    /// # Errors
    /// `InvalidArgument` if the device does not exist, `InvalidPointer` if no file holds the byte.
    pub fn memory_inode(&self, device: u32, ptr: DevicePtr) -> Result<u64> {
        let operation = "memory_inode";
        let found = self.shared.engine.devices.get(device as usize);
        match found.ok_or_else(|| self.shared.no_device(operation, device))?.locate(ptr.get()) {
            Some((Store::File(inode), ..)) => Ok(inode),
            _ => {
                let message = format!("device {device} has no memory at {ptr}");
                Err(Error::new(ErrorKind::InvalidPointer, operation, message)
                    .with_hint("pass the address of a block of the device, or of memory that is open for it"))
            }
        }
    }

    /// Loses a device for good. It executes nothing any more, and calls that need it return `DeviceLost`.
    ///
    /// # Errors
    /// `InvalidArgument` if the device does not exist.
    pub fn lose_device(&self, device: u32) -> Result<()> {
        let found = self.shared.engine.devices.get(device as usize);
        found.ok_or_else(|| self.shared.no_device("lose_device", device))?.lose();
        Ok(())
    }

    /// Enqueues a copy of rows; a flat copy has one.
    fn enqueue_copy(
        &self,
        operation: Operation,
        dst: Location,
        src: Location,
        shape: CopyShape,
        stream: StreamId,
    ) -> Result<()> {
        let shared = &*self.shared;
        let queue = shared.stream(operation, stream)?;
        shape.check(operation.name())?;
        let (Some(to_bytes), Some(from_bytes)) = (shape.dst_bytes(), shape.src_bytes()) else {
            return Err(out_of_range(operation, "the copy"));
        };
        let on_device = |what: &str, device: u32, ptr: DevicePtr, bytes| {
            let device = shared.device(operation, device)?;
            // Nothing is touched, so any address will do.
            if bytes == 0 { Ok(0) } else { device.range(operation, what, ptr, bytes) }
        };
        let command = match (dst, src) {
            (Location::Device { device, ptr }, Location::Host(host)) => {
                let dst = on_device("destination", device, ptr, to_bytes)?;
                State::same_device(operation, stream, "the destination", device)?;
                if from_bytes > 0 {
                    shared.host.range(operation, "source", host, from_bytes)?;
                }
                Command::CopyToDevice { src: host, dst, shape, device }
            }
            (Location::Host(host), Location::Device { device, ptr }) => {
                let src = on_device("source", device, ptr, from_bytes)?;
                State::same_device(operation, stream, "the source", device)?;
                if to_bytes > 0 {
                    shared.host.range(operation, "destination", host, to_bytes)?;
                }
                Command::CopyToHost { src, dst: host, shape, device }
            }
            (
                Location::Device { device: dst_device, ptr: dst_ptr },
                Location::Device { device: src_device, ptr: src_ptr },
            ) => {
                let dst = on_device("destination", dst_device, dst_ptr, to_bytes)?;
                let src = on_device("source", src_device, src_ptr, from_bytes)?;
                if dst_device != src_device && !shared.capabilities.peer_copy {
                    return Err(operation.lacks("peer_copy"));
                }
                if stream.device() != src_device {
                    State::same_device(operation, stream, "the destination", dst_device)?;
                }
                if dst_device == src_device && shape.overlaps(dst as u64, src as u64) {
                    return Err(operation.error(
                        ErrorKind::InvalidArgument,
                        format!("{from_bytes} bytes at {src_ptr} and at {dst_ptr} overlap"),
                    ));
                }
                Command::CopyOnDevices { src, src_device, dst, dst_device, shape }
            }
            (Location::Host(_), Location::Host(_)) => {
                return Err(operation
                    .error(ErrorKind::InvalidArgument, "both sides are host memory")
                    .with_hint("copy between host blocks with the CPU"));
            }
        };
        if shape.is_empty() { Ok(()) } else { queue.enqueue(operation, command) }
    }
}

fn byte(at: Location) -> Range {
    let (space, address) = match at {
        Location::Host(ptr) => (Space::Host, ptr.address() as u64),
        Location::Device { device, ptr } => (Space::Device(device), ptr.get()),
    };
    Range { space, address, bytes: 1 }
}

fn out_of_range(operation: Operation, what: &str) -> Error {
    operation.error(ErrorKind::InvalidArgument, format!("{what} reaches past the address space"))
}

// SAFETY: one worker executes the commands of a stream in order. A record is reached once the worker has executed all
// that was enqueued before it, and events and streams answer by that. Copies move exactly the checked ranges.
unsafe impl Backend for MockGpu {
    fn identity(&self) -> &Identity {
        &self.shared.identity
    }

    fn device_count(&self) -> u32 {
        self.shared.devices
    }

    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        let operation = self.shared.calls.enter(Operation::DeviceInfo)?;
        let memory_bytes = self.shared.device(operation, device)?.memory.bytes();
        let name = format!("Highwater mock device {device}");
        let mut info = DeviceInfo::new(device, name, device_uuid(device), memory_bytes);
        info.architecture = "mock".to_owned();
        Ok(info)
    }

    fn capabilities(&self, device: u32) -> Result<Capabilities> {
        let operation = self.shared.calls.enter(Operation::Capabilities)?;
        self.shared.device(operation, device)?;
        Ok(self.shared.capabilities)
    }

    fn memory_info(&self, device: u32) -> Result<MemoryInfo> {
        let operation = self.shared.calls.enter(Operation::MemoryInfo)?;
        Ok(self.shared.device(operation, device)?.memory_info())
    }

    fn live_objects(&self) -> LiveObjects {
        let mut live = LiveObjects::default();
        let shared = &*self.shared;
        // A child owns no object of its parent.
        if shared.calls.is_own_process() {
            // Wrapped objects belong to other code.
            live.streams = (shared.streams.len() as u64).saturating_sub(shared.wrapped_streams.count());
            live.events = (shared.events.len() as u64).saturating_sub(shared.wrapped_events.count());
            live.handles = shared.handles.load(Ordering::Relaxed);
            live.allocations = shared.engine.devices.iter().map(|device| device.callers_blocks()).sum();
            live.host_allocations = shared.host.blocks();
            live.mappings = shared.engine.devices.iter().map(|device| device.memory.imports.read().count()).sum();
            live.descriptors = shared.exported.count();
            live.shared_files = shared.event_files.load(Ordering::Relaxed);
            live.reservations = shared.mapped_memory.lock().reservations();
            live.physical_memory = shared.physical_memory.len() as u64;
            live.graphs = (shared.graphs.len() + shared.graph_execs.len()) as u64;
        }
        live
    }

    fn is_exiting(&self) -> bool {
        exit::has_begun()
    }

    // ------------------------------------------------------------------ streams

    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId> {
        let shared = &*self.shared;
        let operation = shared.calls.enter(Operation::CreateStream)?;
        shared.device(operation, device)?.check_not_lost(operation)?;
        if options.priority != StreamPriority::Normal && !shared.capabilities.stream_priority {
            return Err(operation.lacks("stream_priority"));
        }
        let stream = Stream::new(&shared.engine, device);
        let id = shared.streams.insert(operation.name(), device, Arc::clone(&stream))?;
        // No other thread knows the stream yet.
        let _ = stream.id.set(id);
        Ok(id)
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        let shared = &*self.shared;
        let operation = shared.calls.enter(Operation::DestroyStream)?;
        if stream.is_legacy_default() || stream.is_per_thread_default() {
            shared.check_default_stream(operation, stream)?;
            return Err(operation
                .error(ErrorKind::InvalidArgument, "a default stream cannot be destroyed")
                .with_hint("destroy only streams that `create_stream` returned"));
        }
        let removed = shared.streams.remove(operation.name(), stream)?;
        // Relaxed: a thread that relies on the id being stale learned of this call's return by other means.
        shared.streams_epoch.fetch_add(1, Ordering::Relaxed);
        if !shared.wrapped_streams.forget(&stream) {
            removed.close();
        }
        Ok(())
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        let operation = self.shared.calls.enter(Operation::QueryStream)?;
        self.shared.stream(operation, stream)?.query(operation)
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::SynchronizeStream)?;
        self.shared.stream(operation, stream)?.synchronize(operation)
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::SynchronizeDevice)?;
        let device = self.shared.device(operation, device)?;
        let clock = self.shared.engine.clock_of(device.ordinal);
        let streams = self.shared.engine.streams_of(device.ordinal);
        // Every capture is lost, not only the first one that is met. Nothing is waited for then.
        let refusals: Vec<_> = streams.iter().map(|stream| stream.queue.lock().refuse_to_answer(operation)).collect();
        refusals.into_iter().collect::<Result<()>>()?;
        for stream in streams {
            stream.synchronize(operation)?;
        }
        self.shared.engine.waited(clock);
        device.check_not_lost(operation)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::StreamWaitEvent)?;
        let stream = self.shared.stream(operation, stream)?;
        match self.shared.event(operation, event)?.latest() {
            Some(point) => stream.wait_for(operation, point),
            None => Ok(()),
        }
    }

    fn raw_stream(&self, stream: StreamId) -> Result<u64> {
        let operation = Operation::RawStream;
        let shared = self.shared.enter_foreign(operation)?;
        shared.stream(operation, stream).map(|stream| stream.raw)
    }

    unsafe fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        let operation = Operation::StreamFromRaw;
        let shared = self.shared.enter_foreign(operation)?;
        shared.device(operation, device)?;
        let is_it = |stream: &Arc<Stream>| stream.raw == raw && !stream.is_closed();
        let find = |device| shared.engine.streams_of(device).into_iter().find(is_it);
        let other = || (0..shared.engine.devices.len() as u32).find(|&other| find(other).is_some());
        let stream = find(device).ok_or_else(|| foreign::unknown(operation, "stream", device, other(), raw))?;
        let id = shared.streams.insert(operation.name(), device, stream)?;
        shared.wrapped_streams.add(id);
        Ok(id)
    }

    // ------------------------------------------------------------------ events

    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
        let shared = &*self.shared;
        let operation = shared.calls.enter(Operation::CreateEvent)?;
        shared.device(operation, device)?.check_not_lost(operation)?;
        if options.timing && options.interprocess {
            return Err(
                operation.error(ErrorKind::InvalidArgument, "an event has timing or is for other processes, not both")
            );
        }
        if options.timing && !shared.capabilities.event_timing {
            return Err(operation.lacks("event_timing"));
        }
        if options.interprocess {
            if !shared.capabilities.interprocess_events {
                return Err(operation.lacks("interprocess_events"));
            }
            let state = SharedEvent::create(operation, shared.peers(), &shared.event_files)?;
            return shared.events.insert(
                operation.name(),
                device,
                Event::interprocess(device, state, shared.engine.raw_handles.take()),
            );
        }
        shared.events.insert(
            operation.name(),
            device,
            Event::new(device, options.timing, shared.engine.raw_handles.take()),
        )
    }

    fn destroy_event(&self, event: EventId) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::DestroyEvent)?;
        self.shared.events.remove(operation.name(), event)?;
        self.shared.wrapped_events.forget(&event);
        Ok(())
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::RecordEvent)?;
        let object = self.shared.event(operation, event)?;
        let queue = self.shared.stream(operation, stream)?;
        State::same_device(operation, stream, "the event", event.device())?;
        if object.shared.is_some() && queue.is_recording() {
            return Err(operation
                .error(ErrorKind::Capture, "an event for several processes cannot be recorded in a capture")
                .with_hint("record it before or after the capture; the capture goes on"));
        }
        let point = queue.record(operation, object.point(operation)?)?;
        object.move_to(Arc::clone(&point));
        if let Some(schedule) = self.shared.schedule.as_ref().filter(|_| object.shared.is_some()) {
            // A wait of another process executes nothing here.
            schedule.try_to_reach(|| !matches!(point.progress(), Progress::Ahead));
        }
        Ok(())
    }

    fn query_event(&self, event: EventId) -> Result<Completion> {
        let operation = self.shared.calls.enter(Operation::QueryEvent)?;
        match self.shared.event(operation, event)?.reachable(operation)?.map(|point| self.shared.engine.ask_for(&point))
        {
            None | Some(Progress::Reached(_)) => Ok(Completion::Complete),
            Some(Progress::Ahead) => Ok(Completion::Pending),
            Some(Progress::Lost) => Err(device::lost(operation, event.device())),
        }
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::SynchronizeEvent)?;
        match self.shared.event(operation, event)?.reachable(operation)? {
            Some(point) if self.shared.engine.wait_for(&point).is_none() => {
                Err(device::lost(operation, event.device()))
            }
            _ => Ok(()),
        }
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
        let operation = self.shared.calls.enter(Operation::EventElapsedNs)?;
        if !self.shared.capabilities.event_timing {
            return Err(operation.lacks("event_timing"));
        }
        let time = |id: EventId| {
            let event = self.shared.event(operation, id)?;
            let error = |kind, what: &str| Error::new(kind, operation.name(), format!("the {id} {what}"));
            if !event.timing {
                return Err(error(ErrorKind::InvalidArgument, "has no timing")
                    .with_hint("create both events with `EventOptions::with_timing`"));
            }
            match event.reachable(operation)?.map(|point| self.shared.engine.ask_for(&point)) {
                None => Err(error(ErrorKind::InvalidArgument, "was never recorded")),
                Some(Progress::Ahead) => Err(error(ErrorKind::InvalidState, "has not been reached yet")
                    .with_hint("synchronize with the later event first")),
                Some(Progress::Lost) => Err(device::lost(operation, event.device)),
                Some(Progress::Reached(time)) => Ok(time),
            }
        };
        let (from, to) = (time(start)?, time(end)?);
        if start.device() != end.device() {
            return Err(operation.error(
                ErrorKind::WrongDevice,
                format!("the {start} and the {end} belong to two devices, whose clocks do not compare"),
            ));
        }
        Ok(nanoseconds(to.saturating_duration_since(from)))
    }

    fn raw_event(&self, event: EventId) -> Result<u64> {
        let operation = Operation::RawEvent;
        self.shared.enter_foreign(operation)?.event(operation, event).map(|event| event.raw.number)
    }

    unsafe fn event_from_raw(&self, device: u32, raw: u64) -> Result<EventId> {
        let operation = Operation::EventFromRaw;
        let shared = self.shared.enter_foreign(operation)?;
        shared.device(operation, device)?;
        let found = shared.events.objects().into_iter().find(|event: &Arc<Event>| event.raw.number == raw);
        let other = found.as_ref().map(|event| event.device);
        let event = found.filter(|event| event.device == device);
        let event = event.ok_or_else(|| foreign::unknown(operation, "event", device, other, raw))?;
        let id = shared.events.insert(operation.name(), device, event)?;
        shared.wrapped_events.add(id);
        Ok(id)
    }

    // ------------------------------------------------------------------ device memory

    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        let shared = &*self.shared;
        let operation = shared.calls.enter(Operation::Allocate)?;
        let device = shared.device(operation, device)?;
        device.check_not_lost(operation)?;
        let mut in_order_of = None;
        let owner = match options.kind {
            DeviceMemoryKind::Plain => Owner::Plain,
            DeviceMemoryKind::Shareable(transport) => {
                if !shared.capabilities.shareable_memory {
                    return Err(operation.lacks("shareable_memory"));
                }
                if !shared.capabilities.ipc_transports.contains(transport) {
                    return Err(ipc::unsupported(operation, transport));
                }
                Owner::Shareable
            }
            DeviceMemoryKind::StreamOrdered(stream) => {
                if !shared.capabilities.stream_ordered_memory {
                    return Err(operation.lacks("stream_ordered_memory"));
                }
                let queue = shared.stream(operation, stream)?;
                State::same_device(operation, stream, "the memory", device.ordinal)?;
                queue.refuse_stream_order(operation)?;
                in_order_of = Some(queue);
                Owner::StreamOrdered
            }
            other => {
                return Err(operation
                    .error(ErrorKind::Unsupported, format!("the mock does not support the kind of memory {other:?}")));
            }
        };
        if options.bytes == 0 {
            return Err(operation.error(ErrorKind::InvalidArgument, "0 bytes were asked for, expected at least 1"));
        }
        let ptr = device.allocate(operation, options.bytes, owner, in_order_of.as_ref().map(Stream::key))?;
        if let Some(stream) = in_order_of {
            stream.note_allocation(operation, ptr, options.bytes as u64);
        }
        Ok(ptr)
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        let shared = &*self.shared;
        let operation = shared.calls.enter(Operation::Free)?;
        let device = shared.device(operation, device)?;
        let Some(id) = stream else {
            let block = device.retire(operation, ptr, false)?;
            device.note_free(operation, ptr, block.bytes);
            device.release(block);
            return Ok(());
        };
        if !shared.capabilities.stream_ordered_memory {
            return Err(operation.lacks("stream_ordered_memory"));
        }
        let stream = shared.stream(operation, id)?;
        State::same_device(operation, id, "the memory", device.ordinal)?;
        let block = device.retire(operation, ptr, true)?;
        stream.enqueue(operation, Command::Release(block)).inspect_err(|_| device.revive(ptr))?;
        device.offer(block, stream.key());
        Ok(())
    }

    // ------------------------------------------------------------------ mapped memory

    fn reserve_addresses(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        let operation = Operation::ReserveAddresses;
        self.shared.enter_mapped(operation)?.reserve_addresses(operation, device, bytes)
    }

    unsafe fn free_addresses(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let operation = Operation::FreeAddresses;
        self.shared.enter_mapped(operation)?.free_addresses(operation, device, ptr, bytes)
    }

    fn create_memory(&self, device: u32, options: &PhysicalMemoryOptions) -> Result<PhysicalMemoryId> {
        let operation = Operation::CreateMemory;
        self.shared.enter_mapped(operation)?.create_memory(operation, device, options)
    }

    fn destroy_memory(&self, memory: PhysicalMemoryId) -> Result<()> {
        let operation = Operation::DestroyMemory;
        self.shared.enter_mapped(operation)?.physical_memory.remove(operation.name(), memory).map(|_| ())
    }

    unsafe fn map_memory(&self, device: u32, ptr: DevicePtr, memory: PhysicalMemoryId) -> Result<()> {
        let operation = Operation::MapMemory;
        self.shared.enter_mapped(operation)?.map_memory(operation, device, ptr, memory)
    }

    unsafe fn set_memory_access(&self, device: u32, ptr: DevicePtr, bytes: usize, accessing: u32) -> Result<()> {
        let operation = Operation::SetMemoryAccess;
        self.shared.enter_mapped(operation)?.set_memory_access(operation, device, (ptr, bytes), accessing)
    }

    unsafe fn unmap_memory(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let operation = Operation::UnmapMemory;
        self.shared.enter_mapped(operation)?.unmap_memory(operation, device, ptr, bytes)
    }

    fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        let operation = self.shared.calls.enter(Operation::DescribeMemory)?;
        self.shared.check_foreign_memory(operation)?;
        self.shared.describe_memory(operation, device, ptr)
    }

    // ------------------------------------------------------------------ copies and fills

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::Copy)?;
        self.enqueue_copy(operation, copy.dst, copy.src, CopyShape::new(copy.bytes, 1), stream)
    }

    unsafe fn copy_2d(&self, copy: &MemoryCopy2d, stream: StreamId) -> Result<()> {
        let operation = self.shared.calls.enter(Operation::Copy2d)?;
        self.enqueue_copy(operation, copy.dst, copy.src, copy.shape, stream)
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        let shared = &*self.shared;
        let operation = shared.calls.enter(Operation::Fill)?;
        let queue = shared.stream(operation, stream)?;
        let &MemoryFill { device, dst, pattern, count, .. } = fill;
        let target = shared.device(operation, device)?;
        State::same_device(operation, stream, "the destination", device)?;
        if count == 0 {
            return Ok(());
        }
        let size = pattern.bytes();
        if !dst.is_aligned_to(size) {
            return Err(operation.error(
                ErrorKind::InvalidArgument,
                format!("{dst} is not a multiple of the {size} bytes of the pattern"),
            ));
        }
        let bytes = count.checked_mul(size).ok_or_else(|| out_of_range(operation, "the fill"))?;
        let dst = target.range(operation, "destination", dst, bytes)?;
        let pattern = match pattern {
            FillPattern::U8(value) => u64::from_ne_bytes([value; 8]),
            FillPattern::U16(value) => bytemuck::cast([value; 4]),
            FillPattern::U32(value) => bytemuck::cast([value; 2]),
        };
        queue.enqueue(operation, Command::Fill { device, dst, bytes, pattern })
    }

    // ------------------------------------------------------------------ capture and replay

    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        let operation = Operation::BeginCapture;
        let queue = self.shared.enter_capture(operation)?.stream(operation, stream)?;
        if stream.is_legacy_default() {
            return Err(recording::legacy_stream(operation));
        }
        self.shared.captures.lock().push(queue.begin_capture(operation, mode)?);
        Ok(())
    }

    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        let operation = Operation::EndCapture;
        let shared = self.shared.enter_capture(operation)?;
        let graph = shared.stream(operation, stream)?.end_capture(operation)?;
        shared.graphs.insert(operation.name(), stream.device(), Arc::new(graph))
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        let operation = Operation::IsCapturing;
        let stream = self.shared.enter_capture(operation)?.stream(operation, stream)?;
        Ok(stream.is_recording())
    }

    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        let operation = Operation::InstantiateGraph;
        let shared = self.shared.enter_capture(operation)?;
        let recorded = shared.graphs.get(operation.name(), graph)?;
        shared.graph_execs.insert(operation.name(), graph.device(), recorded)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        let operation = Operation::LaunchGraph;
        let shared = self.shared.enter_capture(operation)?;
        let recorded = shared.graph_execs.get(operation.name(), graph)?;
        let queue = shared.stream(operation, stream)?;
        State::same_device(operation, stream, "the graph", graph.device())?;
        queue.launch(operation, &recorded, graph)
    }

    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        let operation = Operation::DestroyGraph;
        self.shared.enter_capture(operation)?.graphs.remove(operation.name(), graph).map(|_| ())
    }

    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        let operation = Operation::DestroyGraphExec;
        self.shared.enter_capture(operation)?.graph_execs.remove(operation.name(), graph).map(|_| ())
    }

    // ------------------------------------------------------------------ the other traits

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let shared = &*self.shared;
        let operation = shared.calls.enter(Operation::CreateBlasHandle)?;
        shared.device(operation, device)?.check_not_lost(operation)?;
        match options.kind {
            BlasKind::Blas => {}
            BlasKind::Lt if shared.capabilities.lt_plans => {}
            BlasKind::Lt => return Err(operation.lacks("lt_plans")),
            other => {
                return Err(operation
                    .error(ErrorKind::Unsupported, format!("the mock does not support the kind of handle {other:?}")));
            }
        }
        if !shared.capabilities.create_during_capture {
            shared.captures.lock().refuse_creation(operation)?;
        }
        let latency = Duration::from_nanos(shared.create_handle_latency_ns[device as usize].load(Ordering::Relaxed));
        if !latency.is_zero() {
            std::thread::sleep(latency);
        }
        let (has_ended, turn) = &shared.first_handle[device as usize];
        if !shared.first_handle_latency.is_zero() && !has_ended.load(Ordering::Relaxed) {
            let _turn = turn.lock();
            std::thread::sleep(shared.first_handle_latency);
            has_ended.store(true, Ordering::Relaxed);
        }
        Ok(Box::new(MockBlas::new(&self.shared, device, options.kind)?))
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::<MockHost>::clone(&self.shared.host)
    }

    fn host_observer(&self) -> Option<Arc<dyn HostObserver>> {
        let order = self.shared.engine.observers.order.as_ref();
        order.map(|_| Arc::new(MockHostObserver(Arc::clone(&self.shared))) as Arc<dyn HostObserver>)
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        let offered = !self.shared.capabilities.ipc_transports.is_empty();
        offered.then(|| Arc::<MockIpc>::clone(&self.ipc) as Arc<dyn IpcSharing>)
    }
}
