//! The state that the backend, its BLAS handles and its sharing have in common.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use highwater_hal::{
    Capabilities, Error, ErrorKind, EventId, GraphExecId, GraphId, IdTable, Identity, PhysicalMemoryId, Result,
    StreamId, exit,
};
use parking_lot::Mutex;

use crate::calls::Calls;
use crate::checks::Checks;
use crate::device::Device;
use crate::engine::Engine;
use crate::event::Event;
use crate::foreign::{ThreadStreams, Wrappers};
use crate::host::MockHost;
use crate::mapped_memory::{MappedMemory, PhysicalMemory};
use crate::operation::Operation;
use crate::peers::Peers;
use crate::races::finder::Finder;
use crate::recording::{Graph, OpenCaptures};
use crate::schedule::Schedule;
use crate::sealed_file::Exported;
use crate::stream::Stream;

/// The state, shared by its users.
pub(crate) struct Shared(pub(crate) ManuallyDrop<State>);

pub(crate) struct State {
    pub(crate) identity: Identity,
    pub(crate) devices: u32,
    pub(crate) capabilities: Capabilities,
    pub(crate) calls: Arc<Calls>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) streams: IdTable<StreamId, Stream>,
    /// Grows whenever a stream's id becomes stale, so that the result of a check can be remembered.
    pub(crate) streams_epoch: AtomicU64,
    pub(crate) legacy_streams: Vec<OnceLock<Arc<Stream>>>,
    pub(crate) thread_streams: Arc<ThreadStreams>,
    pub(crate) wrapped_streams: Wrappers<StreamId>,
    pub(crate) events: IdTable<EventId, Event>,
    pub(crate) wrapped_events: Wrappers<EventId>,
    pub(crate) graphs: IdTable<GraphId, Graph>,
    pub(crate) graph_execs: IdTable<GraphExecId, Graph>,
    pub(crate) captures: Mutex<OpenCaptures>,
    pub(crate) physical_memory: IdTable<PhysicalMemoryId, PhysicalMemory>,
    pub(crate) mapped_memory: Mutex<MappedMemory>,
    pub(crate) host: Arc<MockHost>,
    pub(crate) handles: AtomicU64,
    /// The settings of BLAS handles that foreign code can change, by raw handle.
    pub(crate) raw_handles: Mutex<HashMap<u64, Arc<AtomicBool>>>,
    pub(crate) create_handle_latency_ns: Vec<AtomicU64>,
    pub(crate) first_handle_latency: Duration,
    /// Of each device: whether a creation of a handle has ended, and the turn of those that begin before.
    pub(crate) first_handle: Vec<(AtomicBool, Mutex<()>)>,
    pub(crate) gemm_gap: Duration,
    /// The descriptors that exported handles carry.
    pub(crate) exported: Exported,
    /// The number of memory files of events.
    pub(crate) event_files: Arc<AtomicU64>,
    pub(crate) peers: OnceLock<Arc<Peers>>,
    pub(crate) checks: Option<Arc<Checks>>,
    pub(crate) races: Option<Arc<Finder>>,
    pub(crate) schedule: Option<Arc<Schedule>>,
    /// Whether the mock prints its races to standard error at the end.
    pub(crate) prints_races: bool,
}

impl Deref for Shared {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A child has no workers to join, and a thread that it does not have may hold a lock. At exit the system gives
        // everything back. Both leak on purpose.
        if !self.calls.is_own_process() || exit::has_begun() {
            return;
        }
        self.engine.stop();
        if let Some(races) = self.races.as_ref().filter(|_| self.prints_races) {
            races.print();
        }
        // SAFETY: this is the destructor, and nothing touches the state after it.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl State {
    pub(crate) fn device(&self, operation: Operation, device: u32) -> Result<&Arc<Device>> {
        self.engine.devices.get(device as usize).ok_or_else(|| self.no_device(operation.name(), device))
    }

    #[cold]
    pub(crate) fn no_device(&self, operation: &'static str, device: u32) -> Error {
        Error::new(
            ErrorKind::InvalidArgument,
            operation,
            format!("device {device} was asked for, there are {}", self.devices),
        )
        .with_hint("ordinals count from 0 and are below `device_count`")
    }

    /// Checks a stream's id.
    #[inline]
    pub(crate) fn check_stream(&self, operation: Operation, id: StreamId) -> Result<()> {
        if id.is_legacy_default() || id.is_per_thread_default() {
            self.check_default_stream(operation, id)
        } else {
            self.streams.check(operation.name(), id)
        }
    }

    /// Returns the stream of an id.
    pub(crate) fn stream(&self, operation: Operation, id: StreamId) -> Result<Arc<Stream>> {
        if id.is_legacy_default() || id.is_per_thread_default() {
            self.check_default_stream(operation, id)?;
            return Ok(if id.is_legacy_default() {
                self.legacy_stream(id.device())
            } else {
                self.thread_streams.get(&self.engine, id.device())
            });
        }
        self.streams.get(operation.name(), id)
    }

    pub(crate) fn legacy_stream(&self, device: u32) -> Arc<Stream> {
        Arc::clone(self.legacy_streams[device as usize].get_or_init(|| Stream::legacy(&self.engine, device)))
    }

    pub(crate) fn check_default_stream(&self, operation: Operation, id: StreamId) -> Result<()> {
        let issued = [
            StreamId::legacy_default(self.identity.tag, id.device()),
            StreamId::per_thread_default(self.identity.tag, id.device()),
        ];
        if id.device() >= self.devices || !issued.contains(&id) {
            return Err(operation
                .error(
                    ErrorKind::InvalidHandle,
                    format!("the {id} is not a default stream of backend {}", self.identity.tag.get()),
                )
                .with_hint("create the id with this backend's tag and a device that it has"));
        }
        let (can, name) = if id.is_legacy_default() {
            (self.capabilities.legacy_default_stream, "legacy_default_stream")
        } else {
            (self.capabilities.per_thread_default_stream, "per_thread_default_stream")
        };
        if can { Ok(()) } else { Err(operation.lacks(name)) }
    }

    pub(crate) fn same_device(operation: Operation, stream: StreamId, what: &str, device: u32) -> Result<()> {
        if stream.device() == device { Ok(()) } else { Err(wrong_device(operation, stream, what, device)) }
    }

    /// Returns the other processes, as the events of this backend see them.
    pub(crate) fn peers(&self) -> &Arc<Peers> {
        self.peers.get_or_init(|| Arc::new(Peers::new()))
    }

    /// Enters an operation, and checks that the device captures.
    pub(crate) fn enter_capture(&self, operation: Operation) -> Result<&Self> {
        self.calls.enter(operation)?;
        if self.capabilities.capture { Ok(self) } else { Err(operation.lacks("capture")) }
    }

    /// Enters an operation, and checks that the device has mapped memory.
    pub(crate) fn enter_mapped(&self, operation: Operation) -> Result<&Self> {
        self.calls.enter(operation)?;
        if self.capabilities.mapped_memory { Ok(self) } else { Err(operation.lacks("mapped_memory")) }
    }

    /// Enters an operation, and checks that objects of other code can be wrapped.
    pub(crate) fn enter_foreign(&self, operation: Operation) -> Result<&Self> {
        self.calls.enter(operation)?;
        if self.capabilities.foreign_objects { Ok(self) } else { Err(operation.lacks("foreign_objects")) }
    }

    /// Checks that memory of other code can be described and imported.
    pub(crate) fn check_foreign_memory(&self, operation: Operation) -> Result<()> {
        if self.capabilities.foreign_memory { Ok(()) } else { Err(operation.lacks("foreign_memory")) }
    }

    pub(crate) fn event(&self, operation: Operation, id: EventId) -> Result<Arc<Event>> {
        self.events.get(operation.name(), id)
    }
}

#[cold]
pub(crate) fn wrong_device(operation: Operation, stream: StreamId, what: &str, device: u32) -> Error {
    operation
        .error(
            ErrorKind::WrongDevice,
            format!("the {stream} is a stream of device {}, {what} belongs to device {device}", stream.device()),
        )
        .with_hint("use a stream of the same device")
}

/// Returns the UUID of a device: the same in every process.
pub(crate) fn device_uuid(device: u32) -> [u8; 16] {
    let mut uuid = *b"highwater mock\0\0";
    uuid[15] = device as u8;
    uuid
}
