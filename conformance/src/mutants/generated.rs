//! Mutants by construction: each generic mistake, in each operation, under each condition.
//!
//! A [`Mistake`] changes one operation where a [`Condition`] holds. The wrapper makes it for every operation alike, so an operation
//! that is added to [`OPERATIONS`] has all of its mutants. A mutant that no case can notice is *equivalent*; [`equivalent`] gives the
//! proof in one sentence.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;
use std::thread::{self, ThreadId};

use highwater_hal::{
    AnyId, AtomicsMode, Call, CaptureMode, DevicePtr, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId,
    HostPtr, Identity, MathMode, MemoryCopy, MemoryCopy2d, MemoryFill, MemoryHandle, PhysicalMemoryId, PlanArguments,
    PlanId, PlanOptions, StreamId, StreamOptions, StreamPriority, Transport, Workspace, clauses,
};

use super::reference::Reference;
use super::state::{Deferred, Shared};
use super::{Act, Mutant};

/// A generic mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mistake {
    /// Does nothing.
    Drop,
    /// Does it twice.
    Repeat,
    /// Does it at the next call that enqueues nothing.
    Delay,
    /// Does it after the next operation of the stream.
    Swap,
    /// Does it on another stream, or with another event, of the same device.
    Neighbor,
    /// Does it at once, ahead of the stream's work.
    Early,
}

/// Where a mistake is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Condition {
    Always,
    /// On a device other than the first.
    OtherDevice,
    /// In another thread than the one that made the stream, the event or the handle.
    OtherThread,
    /// On a stream that is not of normal priority.
    Priority,
    /// On a default stream.
    DefaultStream,
    /// On a stream of other code.
    Foreign,
    /// On a stream that takes part in a capture.
    Recording,
    /// For more than 1 MiB, and for products beyond the limits of simple kernels.
    Large,
    /// For every object of the kind but the first.
    NotFirst,
    /// At every third use, of its object where that has several.
    Third,
}

impl Mistake {
    const fn words(self) -> &'static str {
        match self {
            Self::Drop => "Leaves it out",
            Self::Repeat => "Does it twice",
            Self::Delay => "Does it when the next call that enqueues nothing comes",
            Self::Swap => "Does it after the next operation of the stream",
            Self::Neighbor => "Does it to the neighbor, a stream or event of the same device",
            Self::Early => "Does it ahead of the earlier work of the stream",
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Repeat => "repeat",
            Self::Delay => "delay",
            Self::Swap => "swap",
            Self::Neighbor => "neighbor",
            Self::Early => "early",
        }
    }
}

impl Condition {
    const fn words(self) -> &'static str {
        match self {
            Self::Always => "",
            Self::OtherDevice => ", on a device other than the first",
            Self::OtherThread => ", in another thread than the one that made the object",
            Self::Priority => ", on a stream that is not of normal priority",
            Self::DefaultStream => ", on a default stream",
            Self::Foreign => ", on a stream of other code",
            Self::Recording => ", on a stream that takes part in a capture",
            Self::Large => ", for large operands",
            Self::NotFirst => ", for every object but the first",
            Self::Third => ", at every third use",
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::OtherDevice => "other-device",
            Self::OtherThread => "other-thread",
            Self::Priority => "priority",
            Self::DefaultStream => "default-stream",
            Self::Foreign => "foreign",
            Self::Recording => "recording",
            Self::Large => "large",
            Self::NotFirst => "not-first",
            Self::Third => "third",
        }
    }
}

use Condition::{
    Always, DefaultStream, Foreign, Large, NotFirst, OtherDevice, OtherThread, Priority, Recording, Third,
};
use Mistake::{Delay, Drop, Early, Neighbor, Repeat, Swap};

/// What is generated for an operation.
struct Generated {
    operation: &'static str,
    mistakes: &'static [Mistake],
    conditions: &'static [Condition],
    /// Clauses that the mistakes break, besides those of the method.
    clauses: &'static [&'static str],
}

const ON_STREAMS: &[Condition] = &[Always, OtherDevice, OtherThread, Priority, DefaultStream, Foreign, NotFirst, Third];
const ON_RECORDED: &[Condition] =
    &[Always, OtherDevice, OtherThread, Priority, DefaultStream, Foreign, Recording, Large, NotFirst, Third];
const ON_OBJECTS: &[Condition] = &[Always, OtherDevice, OtherThread, NotFirst, Third];
const EVERYWHERE: &[Condition] = &[Always, OtherDevice, Third];

/// The operations, with what is generated for them.
const OPERATIONS: &[Generated] = &[
    Generated {
        operation: "copy",
        mistakes: &[Drop, Repeat, Delay, Swap, Neighbor, Early],
        conditions: ON_RECORDED,
        clauses: &["stream.order", "capture.replay", "capture.not-executed", "event.wait-orders", "capture.joins"],
    },
    Generated {
        operation: "copy_2d",
        mistakes: &[Drop, Repeat, Delay, Swap, Neighbor, Early],
        conditions: ON_RECORDED,
        clauses: &["stream.order", "capture.replay", "capture.not-executed", "event.wait-orders", "capture.joins"],
    },
    Generated {
        operation: "fill",
        mistakes: &[Drop, Repeat, Delay, Swap, Neighbor, Early],
        conditions: ON_RECORDED,
        clauses: &["stream.order", "capture.replay", "capture.not-executed", "event.wait-orders", "capture.joins"],
    },
    Generated {
        operation: "record_event",
        mistakes: &[Drop, Repeat, Delay, Swap, Neighbor, Early],
        conditions: &[Always, OtherDevice, OtherThread, Priority, DefaultStream, Foreign, Recording, NotFirst, Third],
        clauses: &["event.wait-orders", "event.synchronize", "event.query", "capture.joins", "capture.unjoined"],
    },
    Generated {
        operation: "stream_wait_event",
        mistakes: &[Drop, Repeat, Delay, Swap, Neighbor, Early],
        conditions: &[Always, OtherDevice, OtherThread, Priority, DefaultStream, Foreign, Recording, NotFirst, Third],
        clauses: &["capture.joins", "capture.unjoined", "event.destroy-pending", "event.outlives-stream"],
    },
    Generated {
        operation: "launch_graph",
        mistakes: &[Drop, Repeat, Delay, Swap, Neighbor, Early],
        conditions: &[Always, OtherDevice, OtherThread, Priority, NotFirst, Third],
        clauses: &["stream.order", "capture.replay", "capture.by-value"],
    },
    Generated {
        operation: "gemm",
        mistakes: &[Drop, Repeat, Early],
        conditions: ON_RECORDED,
        clauses: &["blas.stream-bound", "capture.replay", "capture.not-executed"],
    },
    Generated {
        operation: "run_plan",
        mistakes: &[Drop, Repeat, Early],
        conditions: ON_STREAMS,
        clauses: &["blas.stream-bound", "capture.replay", "plan.value"],
    },
    Generated {
        operation: "synchronize_stream",
        mistakes: &[Drop, Repeat, Neighbor],
        conditions: ON_STREAMS,
        clauses: &[],
    },
    Generated { operation: "synchronize_device", mistakes: &[Drop, Repeat], conditions: EVERYWHERE, clauses: &[] },
    Generated {
        operation: "synchronize_event",
        mistakes: &[Drop, Repeat, Neighbor],
        conditions: ON_OBJECTS,
        clauses: &["event.outlives-stream"],
    },
    Generated { operation: "destroy_stream", mistakes: &[Drop, Neighbor], conditions: ON_OBJECTS, clauses: LEAK },
    Generated { operation: "destroy_event", mistakes: &[Drop, Neighbor], conditions: ON_OBJECTS, clauses: LEAK },
    // `Repeat` is left out: by chance, another thread may get the address between the two frees.
    Generated { operation: "free", mistakes: &[Drop], conditions: EVERYWHERE, clauses: LEAK },
    Generated { operation: "begin_capture", mistakes: &[Drop, Repeat], conditions: ON_OBJECTS, clauses: RECORDS },
    Generated { operation: "destroy_graph", mistakes: &[Drop], conditions: ON_OBJECTS, clauses: LEAK },
    Generated { operation: "destroy_graph_exec", mistakes: &[Drop], conditions: ON_OBJECTS, clauses: LEAK },
    Generated { operation: "destroy_memory", mistakes: &[Drop], conditions: EVERYWHERE, clauses: LEAK },
    Generated { operation: "free_addresses", mistakes: &[Drop], conditions: EVERYWHERE, clauses: LEAK },
    Generated { operation: "map_memory", mistakes: &[Drop], conditions: EVERYWHERE, clauses: MAPS },
    Generated { operation: "set_memory_access", mistakes: &[Drop, Repeat], conditions: EVERYWHERE, clauses: MAPS },
    Generated { operation: "unmap_memory", mistakes: &[Drop], conditions: EVERYWHERE, clauses: MAPS },
    Generated { operation: "set_stream", mistakes: &[Drop, Repeat, Neighbor], conditions: ON_STREAMS, clauses: BOUND },
    Generated { operation: "set_workspace", mistakes: &[Drop, Repeat], conditions: ON_OBJECTS, clauses: &[] },
    Generated { operation: "destroy_plan", mistakes: &[Drop], conditions: ON_OBJECTS, clauses: &["plan.stale"] },
    Generated { operation: "reset", mistakes: &[Drop, Repeat], conditions: ON_OBJECTS, clauses: &[] },
    Generated { operation: "destroy", mistakes: &[Drop], conditions: ON_OBJECTS, clauses: LEAK },
    Generated { operation: "host_free", mistakes: &[Drop], conditions: &[Always, Third], clauses: LEAK },
    Generated { operation: "host_register", mistakes: &[Drop], conditions: &[Always, Third], clauses: &[] },
    Generated { operation: "host_unregister", mistakes: &[Drop], conditions: &[Always, Third], clauses: LEAK },
    Generated { operation: "close_memory", mistakes: &[Drop], conditions: EVERYWHERE, clauses: LEAK },
];

const LEAK: &[&str] = &["backend.live-objects"];
const RECORDS: &[&str] = &["capture.not-executed", "capture.joins", "capture.begin-again", "capture.replay"];
const MAPS: &[&str] = &["mapped.whole", "mapped.contiguous", "mapped.peer", "mapped.move"];
const BOUND: &[&str] = &["blas.stream-bound", "blas.unbound"];

/// Returns why no case can notice a mutant, in one sentence, if so.
fn equivalent(operation: &str, mistake: Mistake, condition: Condition) -> Option<&'static str> {
    match (operation, mistake, condition) {
        ("copy" | "copy_2d" | "fill", Repeat, _) => {
            Some("the second time writes the bytes that the first time has written")
        }
        ("record_event", Repeat, _) => Some("nothing is enqueued between the two records"),
        ("stream_wait_event", Repeat, _) => Some("the second wait is for the record that the first has waited for"),
        ("synchronize_stream" | "synchronize_device" | "synchronize_event", Repeat, _) => {
            Some("nothing is enqueued between the two waits")
        }
        ("set_stream" | "set_workspace" | "reset" | "set_memory_access", Repeat, _) => {
            Some("the second call sets what the first has set")
        }
        ("begin_capture", Repeat, _) => Some("the second call is refused, and changes nothing"),
        _ => None,
    }
}

/// Returns why a mutant is not given to a real device, in one sentence, if so.
///
/// A real device does not check every range. No mutation passes another range than the suite did, so the question is what still uses
/// memory, an object or a handle when the suite gives it back:
///
/// | mistake | on a real device |
/// | --- | --- |
/// | the work is left out, or done twice or early | it uses memory that lives: early work is waited for in the call |
/// | the work comes later | every call that is no work releases it, before anything is given back |
/// | the work goes to a neighbor | that stream is waited for before memory is given back; work that is not recorded goes to no stream that records, because its graph would use the memory later |
/// | a wait is left out | the wrapper waits for all devices before memory is given back, so that no copy writes to host memory that is free |
/// | a release is left out | the object leaks until the process of the mutant ends |
/// | a capture is begun twice | the backend knows its captures, and refuses the second |
/// | a handle keeps another stream or workspace | the backend refuses a stream that is gone; products use the device's memory alone, and a fault ends one process |
/// | memory is not mapped, or no device has access | the device faults, and that ends one process |
/// | another stream or event is destroyed | **left out** |
fn unfit_for_devices(operation: &str, mistake: Mistake) -> Option<&'static str> {
    match (operation, mistake) {
        ("destroy_stream" | "destroy_event", Neighbor) => Some(
            "the neighbor may be what other code knows by its raw handle, and a driver that gets the handle of a destroyed object may do \
             anything",
        ),
        _ => None,
    }
}

/// One generated mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mutation {
    pub(super) operation: &'static str,
    pub(super) mistake: Mistake,
    pub(super) condition: Condition,
}

impl Mutation {
    /// Returns why a backend does not get the mutant, if so.
    pub(super) fn unfit_for(self, identity: &Identity, device_count: u32) -> Option<&'static str> {
        match self.condition {
            OtherDevice if device_count < 2 => Some("the backend has one device"),
            _ => unfit_for_devices(self.operation, self.mistake).filter(|_| identity.real_device),
        }
    }
}

/// Returns every generated mutant. They live as long as the process, as the others do.
pub(super) fn generated() -> &'static [Mutant] {
    static MUTANTS: OnceLock<Vec<Mutant>> = OnceLock::new();
    MUTANTS.get_or_init(|| {
        let mut all = Vec::new();
        for &Generated { operation, mistakes, conditions, clauses: others } in OPERATIONS {
            let method = operation.strip_prefix("host_").unwrap_or(operation);
            let of = if method == operation { None } else { Some("HostAllocator") };
            let own = clauses().iter().filter(|clause| clause.method == Some(method));
            let own = own.filter(|clause| of.is_none_or(|of| clause.of == of)).map(|clause| clause.id);
            let broken: Vec<&'static str> = own.chain(others.iter().copied()).collect();
            let broken: &'static [&'static str] = broken.leak();
            for &mistake in mistakes {
                for &condition in conditions {
                    let mutation = Mutation { operation, mistake, condition };
                    let name = format!("{}-{}-{}", operation.replace('_', "-"), mistake.name(), condition.name());
                    let what = format!("`{operation}`: {}{}.", mistake.words(), condition.words());
                    all.push(Mutant {
                        name: String::leak(name),
                        clause: broken.first().copied().unwrap_or("backend.live-objects"),
                        needs: &[],
                        also: broken,
                        what: String::leak(what),
                        needs_launcher: operation == "close_memory",
                        needs_large_block: false,
                        survives: equivalent(operation, mistake, condition),
                        act: Act::Generated(mutation),
                    });
                }
            }
        }
        all
    })
}

// ------------------------------------------------------------------------------------------------------------- tracks

/// What a mutant knows of the objects of a case.
#[derive(Debug, Default)]
struct Tracks {
    streams: Vec<StreamId>,
    events: Vec<EventId>,
    makers: HashMap<AnyId, ThreadId>,
    unusual: Vec<StreamId>,
    foreign: Vec<StreamId>,
    first: Option<AnyId>,
    first_handle: Option<u64>,
    uses: HashMap<Option<AnyId>, u32>,
    captures: u32,
}

/// The handle of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle {
    pub(super) maker: ThreadId,
    pub(super) device: u32,
    pub(super) raw: u64,
}

/// A generated mutation, applied to the calls of one backend.
pub(super) struct Applied {
    pub(super) mutation: Mutation,
    /// Whether the device is real: see [`unfit_for_devices`].
    pub(super) is_real: bool,
    tracks: Shared<Tracks>,
    pub(super) deferred: Deferred,
}

impl fmt::Debug for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Applied").field("mutation", &self.mutation).finish_non_exhaustive()
    }
}

/// The calls that enqueue work.
const ENQUEUE: [&str; 8] =
    ["copy", "copy_2d", "fill", "record_event", "stream_wait_event", "launch_graph", "gemm", "run_plan"];

impl Applied {
    pub(super) fn new(mutation: Mutation, is_real: bool) -> Self {
        Self { mutation, is_real, tracks: Shared::default(), deferred: Deferred::default() }
    }

    /// Releases what was delayed, if the call enqueues nothing.
    pub(super) fn enter(&self, below: &Reference, operation: &str) -> highwater_hal::Result<()> {
        if matches!(self.mutation.mistake, Delay | Swap) && !ENQUEUE.contains(&operation) {
            return self.deferred.release(below, None);
        }
        Ok(())
    }

    /// Releases what was delayed until after another operation of the stream.
    pub(super) fn leave(
        &self,
        below: &Reference,
        operation: &str,
        stream: Option<StreamId>,
    ) -> highwater_hal::Result<()> {
        match stream {
            Some(stream)
                if self.mutation.mistake == Swap && ENQUEUE.contains(&operation) && self.deferred.has(stream) =>
            {
                self.deferred.release(below, Some(stream))
            }
            _ => Ok(()),
        }
    }

    /// Notes an object that a call has made.
    pub(super) fn made(&self, operation: &str, id: Option<AnyId>, probe: Probe) {
        let Some(id) = id else { return };
        self.tracks.with(|tracks| {
            tracks.makers.insert(id, thread::current().id());
            match id {
                AnyId::Stream(stream) => {
                    tracks.streams.push(stream);
                    if probe.is_unusual {
                        tracks.unusual.push(stream);
                    }
                    if operation == "stream_from_raw" {
                        tracks.foreign.push(stream);
                    }
                }
                AnyId::Event(event) => tracks.events.push(event),
                _ => {}
            }
        });
    }

    /// Counts the open captures.
    pub(super) fn count_capture(&self, operation: &str) {
        self.tracks.with(|tracks| match operation {
            "begin_capture" => tracks.captures += 1,
            "end_capture" => tracks.captures = tracks.captures.saturating_sub(1),
            _ => {}
        });
    }

    /// Returns whether a capture is open, which a wait for a device would lose.
    pub(super) fn captures(&self) -> bool {
        self.tracks.with(|tracks| tracks.captures > 0)
    }

    /// Forgets an object that a call has destroyed.
    pub(super) fn gone(&self, id: Option<AnyId>) {
        self.tracks.with(|tracks| match id {
            Some(AnyId::Stream(gone)) => tracks.streams.retain(|stream| *stream != gone),
            Some(AnyId::Event(gone)) => tracks.events.retain(|event| *event != gone),
            _ => {}
        });
    }

    /// Returns whether the mistake is made in this call.
    pub(super) fn is_due(
        &self,
        below: &Reference,
        call: &Call,
        bound: Option<StreamId>,
        handle: Option<Handle>,
        probe: Probe,
    ) -> bool {
        if call.operation != self.mutation.operation {
            return false;
        }
        let stream = call.stream().or(bound);
        let object = stream.map(AnyId::Stream).or_else(|| call.ids().next());
        match self.mutation.condition {
            Always => true,
            OtherDevice => {
                let of_object = object.map(|id| id.parts().device);
                let of_stream = stream.map(|stream| stream.device());
                let of_handle = handle.map(|handle| handle.device);
                of_stream.or(of_object).or(of_handle).or(call.device).is_some_and(|device| device > 0)
            }
            OtherThread => {
                let made = handle.map(|handle| handle.maker).or_else(|| {
                    let ids: Vec<AnyId> = object.into_iter().chain(call.ids()).collect();
                    self.tracks.with(|tracks| ids.iter().find_map(|id| tracks.makers.get(id).copied()))
                });
                made.is_some_and(|made| made != thread::current().id())
            }
            Priority => stream.is_some_and(|stream| self.tracks.with(|tracks| tracks.unusual.contains(&stream))),
            DefaultStream => stream.is_some_and(|stream| stream.is_legacy_default() || stream.is_per_thread_default()),
            Foreign => stream.is_some_and(|stream| self.tracks.with(|tracks| tracks.foreign.contains(&stream))),
            Recording => stream.is_some_and(|stream| below.is_recording(stream)),
            Large => probe.is_large,
            NotFirst => self.tracks.with(|tracks| match (object, handle) {
                (Some(object), _) => *tracks.first.get_or_insert(object) != object,
                (None, Some(handle)) => *tracks.first_handle.get_or_insert(handle.raw) != handle.raw,
                (None, None) => false,
            }),
            Third => self.tracks.with(|tracks| {
                // An object is made or destroyed once.
                let repeats = ENQUEUE.contains(&call.operation) || call.operation.starts_with("synchronize");
                let uses = tracks.uses.entry(object.filter(|_| repeats)).or_default();
                *uses += 1;
                uses.is_multiple_of(3)
            }),
        }
    }

    /// Returns another stream of the same device.
    fn beside_stream(&self, below: &Reference, stream: StreamId) -> StreamId {
        let beside = |other: &StreamId| *other != stream && other.device() == stream.device();
        let mut others: Vec<StreamId> =
            self.tracks.with(|tracks| tracks.streams.iter().rev().copied().filter(beside).collect());
        if self.is_real {
            let is_recording = below.is_recording(stream);
            others.retain(|other| below.is_recording(*other) == is_recording);
        }
        others.first().copied().unwrap_or(stream)
    }

    /// Returns another event of the same device.
    fn beside_event(&self, event: EventId) -> EventId {
        let other = self.tracks.with(|tracks| {
            tracks.events.iter().rev().copied().find(|other| *other != event && other.device() == event.device())
        });
        other.unwrap_or(event)
    }
}

// ---------------------------------------------------------------------------------------------------------- arguments

/// What the arguments of a call tell a mutant.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Probe {
    /// The stream has not the normal priority.
    is_unusual: bool,
    is_large: bool,
}

impl Probe {
    pub(super) fn with(self, other: Self) -> Self {
        Self { is_unusual: self.is_unusual || other.is_unusual, is_large: self.is_large || other.is_large }
    }
}

/// An argument of an operation, as a mutant treats it.
pub(super) trait Treat: Copy {
    /// The argument with nothing borrowed.
    type Kept: Lend + Send + 'static;

    fn probe(self) -> Probe {
        Probe::default()
    }

    /// Returns the argument on another stream.
    fn on(self, _: StreamId) -> Self {
        self
    }

    /// Returns the neighbor of the argument, if it is a stream or, where the call has no stream, an event.
    fn neighbor(self, _: &Applied, _: &Reference, _has_stream: bool) -> Self {
        self
    }

    fn keep(self) -> Self::Kept;
}

/// Lends an argument that was kept.
pub(super) trait Lend {
    type Lent<'l>
    where
        Self: 'l;

    fn lend(&self) -> Self::Lent<'_>;
}

/// An argument by value.
pub(super) struct Value<T>(T);

/// An argument by reference.
pub(super) struct Referent<T>(T);

impl<T: Copy> Lend for Value<T> {
    type Lent<'l>
        = T
    where
        Self: 'l;

    fn lend(&self) -> T {
        self.0
    }
}

impl<T> Lend for Referent<T> {
    type Lent<'l>
        = &'l T
    where
        Self: 'l;

    fn lend(&self) -> &T {
        &self.0
    }
}

macro_rules! by_value {
    ($($type:ty),*) => {
        $(impl Treat for $type {
            type Kept = Value<$type>;

            fn keep(self) -> Self::Kept {
                Value(self)
            }
        })*
    };
}

by_value!(u32, u64, usize, DevicePtr, HostPtr, CaptureMode, GraphId, GraphExecId, Transport, Option<Workspace>);
by_value!(MathMode, AtomicsMode, PlanId, PhysicalMemoryId);

impl Treat for StreamId {
    type Kept = Value<Self>;

    fn on(self, stream: StreamId) -> Self {
        stream
    }

    fn neighbor(self, applied: &Applied, below: &Reference, _: bool) -> Self {
        applied.beside_stream(below, self)
    }

    fn keep(self) -> Self::Kept {
        Value(self)
    }
}

impl Treat for EventId {
    type Kept = Value<Self>;

    fn neighbor(self, applied: &Applied, _: &Reference, has_stream: bool) -> Self {
        if has_stream { self } else { applied.beside_event(self) }
    }

    fn keep(self) -> Self::Kept {
        Value(self)
    }
}

impl Treat for Option<StreamId> {
    type Kept = Value<Self>;

    fn keep(self) -> Self::Kept {
        Value(self)
    }
}

macro_rules! by_reference {
    ($($type:ty $(: $probe:expr)?;)*) => {
        $(impl Treat for &$type {
            type Kept = Referent<$type>;

            $(fn probe(self) -> Probe {
                let probe: fn(&$type) -> Probe = $probe;
                probe(self)
            })?

            fn keep(self) -> Self::Kept {
                Referent(self.clone())
            }
        })*
    };
}

const LARGE_BYTES: usize = 1 << 20;

by_reference! {
    StreamOptions: |options| Probe { is_unusual: options.priority != StreamPriority::Normal, is_large: false };
    MemoryCopy: |copy| Probe { is_unusual: false, is_large: copy.bytes > LARGE_BYTES };
    MemoryCopy2d: |copy| Probe {
        is_unusual: copy.shape.src_pitch != copy.shape.dst_pitch,
        // The cells copy every second row of a large operand.
        is_large: copy.shape.src_bytes().is_none_or(|bytes| bytes > LARGE_BYTES / 2),
    };
    MemoryFill: |fill| Probe { is_unusual: false, is_large: fill.count * fill.pattern.bytes() > LARGE_BYTES };
    Gemm: |gemm| {
        let shape = &gemm.shape;
        let is_large = shape.m > 1024 || shape.n > 65_535 || shape.batch_count() > 100 || shape.ldc > 65_535;
        Probe { is_unusual: false, is_large }
    };
    EventOptions;
    PlanArguments;
    PlanOptions;
    MemoryHandle;
    EventHandle;
    highwater_hal::AllocateOptions;
    highwater_hal::BlasOptions;
    highwater_hal::HostOptions;
    highwater_hal::PhysicalMemoryOptions;
}

/// Returns the answer of a call that did nothing, if an operation has one: that of operations without an answer.
pub(super) fn nothing<T: 'static>() -> Option<T> {
    let unit: Box<dyn Any> = Box::new(());
    unit.downcast().ok().map(|nothing| *nothing)
}
