//! Answers that never change: identity, descriptions, capabilities and total memory are asked again while objects of every kind
//! are alive, in another thread, and when all objects are gone.

use highwater_hal::{
    Backend, BlasKind, Capabilities, CaptureMode, DataType, DeviceInfo, DeviceMemoryKind, Epilogue, EventOptions,
    GemmShape, HostMemoryKind, HostOptions, Identity, PhysicalMemoryOptions, PlanOptions, Result, StreamOptions,
    StreamPriority, Transport,
};

use crate::case::{CaseResult, Failure, cases, check_eq};
use crate::device::{Addresses, Block, Capture, Event, Handle, PhysicalMemory, Pinned, Registered, Stream};
use crate::sweep::as_one;

cases! {
    group "stability";
    with_streams_and_events: ["identity.stable", "devices.capabilities-stable", "devices.uuid", "memory.info"];
    with_memory: ["identity.stable", "devices.capabilities-stable", "devices.uuid", "memory.info"];
    with_host_memory: ["identity.stable", "devices.capabilities-stable", "devices.uuid", "memory.info"];
    with_mapped_memory: ["identity.stable", "devices.capabilities-stable", "devices.uuid", "memory.info"]
        needs [has::mapped_memory];
    with_graphs: ["identity.stable", "devices.capabilities-stable", "devices.uuid", "memory.info"] needs [has::capture];
    with_handles: ["identity.stable", "devices.capabilities-stable", "devices.uuid", "memory.info"];
}

/// What a backend answers about itself.
#[derive(Debug, PartialEq)]
struct Answers {
    identity: Identity,
    count: u32,
    devices: Vec<(DeviceInfo, Capabilities, u64)>,
}

impl Answers {
    fn of(backend: &dyn Backend) -> Result<Self> {
        let describe = |device| -> Result<_> {
            Ok((backend.device_info(device)?, backend.capabilities(device)?, backend.memory_info(device)?.total))
        };
        // The questions are equal each time.
        let devices = as_one(|| (0..backend.device_count()).map(describe).collect::<Result<_>>())?;
        Ok(Self { identity: backend.identity().clone(), count: backend.device_count(), devices })
    }
}

/// The answers at the beginning of a case.
pub(super) struct First<'b> {
    backend: &'b dyn Backend,
    answers: Answers,
}

impl<'b> First<'b> {
    pub(super) fn of(backend: &'b dyn Backend) -> Result<Self> {
        Ok(Self { backend, answers: Answers::of(backend)? })
    }

    /// Asks again.
    pub(super) fn check(&self, when: &str) -> CaseResult {
        let now = Answers::of(self.backend)?;
        check_eq!(now.identity, self.answers.identity, "the identity {when}");
        check_eq!(now.count, self.answers.count, "the number of devices {when}");
        for (now, first) in now.devices.iter().zip(&self.answers.devices) {
            check_eq!(now.0, first.0, "the description of a device {when}");
            check_eq!(now.1, first.1, "the capabilities of device {} {when}", first.0.ordinal);
            check_eq!(now.2, first.2, "the total memory of device {} {when}", first.0.ordinal);
        }
        Ok(())
    }

    /// Asks again in this thread and in another one.
    fn check_in_threads(&self, when: &str) -> CaseResult {
        self.check(when)?;
        let other = std::thread::scope(|scope| scope.spawn(|| self.check(when)).join());
        other.map_err(|_| Failure::new("a thread panicked"))?.map_err(|failure| failure.with_details("another thread"))
    }
}

/// Makes objects, asks after each of them, and again when all are gone.
fn stays<T>(backend: &dyn Backend, make: impl Fn(u32, &First<'_>) -> Result<T, Failure>) -> CaseResult {
    let first = First::of(backend)?;
    let mut alive = Vec::new();
    for device in 0..backend.device_count().min(2) {
        alive.push(make(device, &first)?);
        first.check_in_threads(&format!("with objects on {} devices", device + 1))?;
    }
    drop(alive);
    first.check_in_threads("when the objects are gone")
}

/// The number of objects of one kind: above the small numbers at which a backend may begin to share or to load something.
const MANY: usize = 9;

fn with_streams_and_events(backend: &dyn Backend) -> CaseResult {
    stays(backend, |device, first| {
        let can = backend.capabilities(device)?;
        let (mut streams, mut events) = (Vec::new(), Vec::new());
        let mut priorities = vec![StreamPriority::Normal];
        if can.stream_priority {
            priorities.extend([StreamPriority::Low, StreamPriority::High]);
        }
        for priority in priorities {
            for _ in 0..MANY {
                let options = StreamOptions::new().with_priority(priority);
                streams.push(Stream::with_options(backend, device, &options)?);
            }
            first.check(&format!("with streams of {priority:?} priority"))?;
        }
        let kinds = [
            (true, EventOptions::new()),
            (can.event_timing, EventOptions::new().with_timing()),
            (can.interprocess_events, EventOptions::new().with_interprocess()),
        ];
        for (_, options) in kinds.into_iter().filter(|(has, _)| *has) {
            for stream in streams.iter().take(MANY) {
                let event = Event::with_options(backend, device, &options)?;
                stream.record(&event)?;
                event.synchronize()?;
                events.push(event);
            }
            first.check(&format!("with events of {options:?}"))?;
        }
        Ok((streams, events))
    })
}

fn with_memory(backend: &dyn Backend) -> CaseResult {
    stays(backend, |device, first| {
        let can = backend.capabilities(device)?;
        let stream = Stream::on(backend, device)?;
        let mut kinds = vec![DeviceMemoryKind::Plain];
        if can.stream_ordered_memory {
            kinds.push(DeviceMemoryKind::StreamOrdered(stream.id()));
        }
        if can.shareable_memory {
            let all = [Transport::Legacy, Transport::Descriptor, Transport::Fabric].into_iter();
            kinds.extend(all.filter(|&each| can.ipc_transports.contains(each)).map(DeviceMemoryKind::Shareable));
        }
        let mut blocks = Vec::new();
        for kind in kinds {
            for bytes in [1, 4096, 40 << 20] {
                blocks.push(Block::with_kind(backend, device, bytes, kind)?);
                first.check(&format!("with {bytes} bytes of {kind:?} memory"))?;
            }
        }
        stream.synchronize()?;
        Ok((blocks, stream))
    })
}

fn with_host_memory(backend: &dyn Backend) -> CaseResult {
    stays(backend, |device, first| {
        let can = backend.capabilities(device)?;
        let mut kinds = vec![HostMemoryKind::Default];
        if can.write_combined {
            kinds.push(HostMemoryKind::WriteCombined);
        }
        let (mut blocks, mut registered) = (Vec::new(), Vec::new());
        for kind in kinds {
            for bytes in [1, 4096, 8 << 20] {
                blocks.push(Pinned::with_options(backend, bytes, &HostOptions::new().with_kind(kind))?);
                first.check(&format!("with {bytes} bytes of {kind:?} host memory"))?;
            }
        }
        if can.host_register {
            for bytes in [4096, 8 << 20] {
                registered.push(Registered::new(backend, &vec![1; bytes])?);
                first.check(&format!("with {bytes} registered bytes"))?;
            }
        }
        Ok((blocks, registered))
    })
}

fn with_mapped_memory(backend: &dyn Backend) -> CaseResult {
    stays(backend, |device, first| {
        let piece = backend.capabilities(device)?.mapped_memory_granularity;
        let addresses = Addresses::new(backend, device, 64 * piece)?;
        first.check("with reserved addresses")?;
        let free = PhysicalMemory::create(backend, device, &PhysicalMemoryOptions::new(2 * piece))?;
        first.check("with physical memory")?;
        let memory = PhysicalMemory::create(backend, device, &PhysicalMemoryOptions::new(3 * piece))?;
        addresses.map(piece, &memory, 3 * piece)?;
        first.check("with mapped memory")?;
        addresses.give_access(piece..4 * piece, device)?;
        first.check("with mapped memory that a device may access")?;
        let stale = memory.destroy();
        first.check("with mapped memory whose id is destroyed")?;
        stale?;
        Ok((addresses, free))
    })
}

fn with_graphs(backend: &dyn Backend) -> CaseResult {
    let blocks: Vec<Block<'_>> =
        (0..backend.device_count().min(2)).map(|device| Block::on(backend, device, 4096)).collect::<Result<_>>()?;
    stays(backend, |device, first| {
        let (stream, block) = (Stream::on(backend, device)?, &blocks[device as usize]);
        let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
        stream.set(block.all(), 1)?;
        let graph = capture.end(&[block])?;
        first.check("with a graph")?;
        let executables = (0..MANY).map(|_| graph.instantiate()).collect::<Result<Vec<_>>>()?;
        first.check("with executable graphs")?;
        executables[0].launch(&stream)?;
        stream.synchronize()?;
        first.check("after a launch")?;
        Ok((graph, executables))
    })
}

fn with_handles(backend: &dyn Backend) -> CaseResult {
    stays(backend, |device, first| {
        let can = backend.capabilities(device)?;
        let stream = Stream::on(backend, device)?;
        let mut handles = Vec::new();
        for (_, kind) in [(true, BlasKind::Blas), (can.lt_plans, BlasKind::Lt)].into_iter().filter(|(has, _)| *has) {
            for number in 1..=MANY / 2 {
                let mut handle = Handle::unbound(backend, kind, device)?;
                handle.set_stream(&stream)?;
                if kind == BlasKind::Lt && can.gemm_f32 && number == 1 {
                    let shape = GemmShape::new(DataType::F32, 8, 8, 8);
                    handle.raw_mut().create_plan(&PlanOptions::new(shape, Epilogue::None, 0))?;
                }
                handles.push(handle);
                first.check(&format!("with {number} handles of kind {kind:?}"))?;
            }
        }
        Ok((handles, stream))
    })
}
