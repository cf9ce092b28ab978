//! A backend whose first two devices have exchanged their ordinals.
//!
//! A case uses device 0. Over this layer, the same case proves its clauses on the second device. The layer exchanges the ordinals in
//! arguments, in ids, and in answers, and forwards everything else unchanged.

use std::sync::{Arc, OnceLock};

use highwater_hal::{
    AllocateOptions, Answer, Backend, BlasHandle, BlasOptions, Call, Capabilities, CaptureMode, Completion, DeviceInfo,
    DeviceMemoryKind, DevicePtr, EventHandle, EventId, EventOptions, GraphExecId, GraphId, HandleLayer, HostAllocator,
    HostLayer, HostObserver, HostPtr, Identity, IpcSharing, LiveObjects, Location, MemoryCopy, MemoryCopy2d,
    MemoryFill, MemoryHandle, MemoryInfo, MemoryRange, ObjectId, PhysicalMemoryId, PhysicalMemoryOptions, Result,
    SharingLayer, StreamId, StreamOptions, Transport, for_each_operation,
};

/// The layer over a backend with two devices or more.
#[derive(Debug)]
pub(crate) struct Exchanged<'b> {
    below: &'b dyn Backend,
    /// The objects that `host_allocator` and `ipc_sharing` return, the same ones in every call.
    allocator: OnceLock<Arc<ExchangedAllocator>>,
    sharing: OnceLock<Arc<ExchangedSharing>>,
}

impl<'b> Exchanged<'b> {
    pub(crate) fn new(below: &'b dyn Backend) -> Self {
        Self { below, allocator: OnceLock::new(), sharing: OnceLock::new() }
    }
}

#[derive(Debug)]
struct ExchangedHandle(Box<dyn BlasHandle>);

#[derive(Debug)]
struct ExchangedAllocator(Arc<dyn HostAllocator>);

#[derive(Debug)]
struct ExchangedSharing(Arc<dyn IpcSharing>);

/// Returns the ordinal on the other side of the layer.
fn ordinal(device: u32) -> u32 {
    match device {
        0 => 1,
        1 => 0,
        further => further,
    }
}

/// A value that passes the layer by value, as an argument or as an answer.
trait Exchange {
    fn exchanged(self) -> Self;
}

impl Exchange for u32 {
    /// Every number of 32 bits among the arguments is an ordinal.
    fn exchanged(self) -> Self {
        ordinal(self)
    }
}

macro_rules! ids {
    ($($id:ty),*) => {$(
        impl Exchange for $id {
            fn exchanged(self) -> Self {
                let mut parts = self.parts();
                parts.device = ordinal(parts.device);
                // SAFETY: the id is as genuine as the one that passes the layer, and no runtime uses the backend of a case.
                unsafe { Self::from_parts(parts) }
            }
        }
    )*};
}

ids!(StreamId, EventId, GraphId, GraphExecId, PhysicalMemoryId);

impl Exchange for Option<StreamId> {
    fn exchanged(self) -> Self {
        self.map(Exchange::exchanged)
    }
}

impl Exchange for DeviceInfo {
    fn exchanged(mut self) -> Self {
        self.ordinal = ordinal(self.ordinal);
        self
    }
}

impl Exchange for Box<dyn BlasHandle> {
    fn exchanged(self) -> Self {
        Box::new(ExchangedHandle(self))
    }
}

macro_rules! without_ordinals {
    ($($type:ty),* $(,)?) => { $(impl Exchange for $type { fn exchanged(self) -> Self { self } })* };
}

without_ordinals!(
    (),
    bool,
    u64,
    usize,
    Capabilities,
    CaptureMode,
    Completion,
    DevicePtr,
    MemoryInfo,
    MemoryRange,
    &BlasOptions,
    &EventOptions,
    &PhysicalMemoryOptions,
    &StreamOptions,
);

/// An argument. While the call runs, the layer keeps a changed copy of the object that a reference names.
trait Pass<'c> {
    type Kept: 'c;
    fn keep(self) -> Self::Kept;
    fn pass(kept: &'c Self::Kept) -> Self;
}

impl<'c, T: Exchange + Copy + 'c> Pass<'c> for T {
    type Kept = T;
    fn keep(self) -> T {
        self.exchanged()
    }
    fn pass(kept: &'c T) -> T {
        *kept
    }
}

impl<'c> Pass<'c> for &'c AllocateOptions {
    type Kept = AllocateOptions;
    fn keep(self) -> AllocateOptions {
        match self.kind {
            DeviceMemoryKind::StreamOrdered(stream) => {
                self.with_kind(DeviceMemoryKind::StreamOrdered(stream.exchanged()))
            }
            _ => *self,
        }
    }
    fn pass(kept: &'c AllocateOptions) -> Self {
        kept
    }
}

fn exchanged_side(side: Location) -> Location {
    match side {
        Location::Device { device, ptr } => Location::Device { device: ordinal(device), ptr },
        host @ Location::Host(_) => host,
    }
}

impl<'c> Pass<'c> for &'c MemoryCopy2d {
    type Kept = MemoryCopy2d;
    fn keep(self) -> MemoryCopy2d {
        MemoryCopy2d::new(exchanged_side(self.dst), exchanged_side(self.src), self.shape)
    }
    fn pass(kept: &'c MemoryCopy2d) -> Self {
        kept
    }
}

impl<'c> Pass<'c> for &'c MemoryCopy {
    type Kept = MemoryCopy;
    fn keep(self) -> MemoryCopy {
        MemoryCopy::new(exchanged_side(self.dst), exchanged_side(self.src), self.bytes)
    }
    fn pass(kept: &'c MemoryCopy) -> Self {
        kept
    }
}

impl<'c> Pass<'c> for &'c MemoryFill {
    type Kept = MemoryFill;
    fn keep(self) -> MemoryFill {
        MemoryFill::new(ordinal(self.device), self.dst, self.pattern, self.count)
    }
    fn pass(kept: &'c MemoryFill) -> Self {
        kept
    }
}

macro_rules! exchanged_backend {
    (Backend { $($variant:ident: [$($fn:tt)+] $method:ident($($arg:ident: $type:ty),*) -> $answer:ty;)* } $($others:tt)*) => {
        // SAFETY: the backend below keeps the clauses, and the layer changes only which device is called by which ordinal.
        unsafe impl Backend for Exchanged<'_> {
            fn identity(&self) -> &Identity {
                self.below.identity()
            }

            fn device_count(&self) -> u32 {
                self.below.device_count()
            }

            fn live_objects(&self) -> LiveObjects {
                self.below.live_objects()
            }

            fn is_exiting(&self) -> bool {
                self.below.is_exiting()
            }

            fn host_allocator(&self) -> Arc<dyn HostAllocator> {
                let new = || Arc::new(ExchangedAllocator(self.below.host_allocator()));
                Arc::<ExchangedAllocator>::clone(self.allocator.get_or_init(new))
            }

            fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
                let inner = self.below.ipc_sharing()?;
                let sharing = self.sharing.get_or_init(|| Arc::new(ExchangedSharing(inner)));
                Some(Arc::<ExchangedSharing>::clone(sharing))
            }

            fn host_observer(&self) -> Option<Arc<dyn HostObserver>> {
                self.below.host_observer()
            }

            $($($fn)+ $method(&self, $($arg: $type),*) -> Result<$answer> {
                $(let $arg = Pass::keep($arg);)*
                #[allow(unused_unsafe, reason = "some methods are safe to call")]
                // SAFETY: the caller promises for its ordinals what the method asks for, and these are the same devices.
                unsafe { self.below.$method($(Pass::pass(&$arg)),*) }.map(Exchange::exchanged)
            })*
        }
    };
}

for_each_operation!(exchanged_backend);

impl HandleLayer for ExchangedHandle {
    fn below(&self) -> &dyn BlasHandle {
        &*self.0
    }

    fn around<T: Answer>(&mut self, _: &Call, forward: impl FnOnce(&mut dyn BlasHandle) -> Result<T>) -> Result<T> {
        forward(&mut *self.0)
    }

    fn device(&self) -> u32 {
        ordinal(self.0.device())
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        self.0.set_stream(stream.exchanged())
    }
}

// SAFETY: every call goes to an allocator that keeps the clauses, and only the ordinal differs.
unsafe impl HostLayer for ExchangedAllocator {
    fn below(&self) -> &dyn HostAllocator {
        &*self.0
    }

    fn around<T: Answer>(&self, _: &Call, forward: impl FnOnce(&dyn HostAllocator) -> Result<T>) -> Result<T> {
        forward(&*self.0)
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        self.0.device_address(ptr, ordinal(device))
    }
}

impl SharingLayer for ExchangedSharing {
    fn below(&self) -> &dyn IpcSharing {
        &*self.0
    }

    fn around<T: Answer>(&self, _: &Call, forward: impl FnOnce(&dyn IpcSharing) -> Result<T>) -> Result<T> {
        forward(&*self.0)
    }

    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        // SAFETY: the caller promises what the method asks for.
        unsafe { self.0.export_memory(ordinal(device), ptr, transport) }
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        self.0.open_memory(ordinal(device), handle)
    }

    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: the caller promises what the method asks for.
        unsafe { self.0.close_memory(ordinal(device), ptr) }
    }

    fn import_memory(&self, device: u32, handle: &MemoryHandle) -> Result<PhysicalMemoryId> {
        Ok(self.0.import_memory(ordinal(device), handle)?.exchanged())
    }

    fn export_event(&self, event: EventId) -> Result<EventHandle> {
        self.0.export_event(event.exchanged())
    }

    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId> {
        Ok(self.0.open_event(ordinal(device), handle)?.exchanged())
    }
}

#[cfg(test)]
mod tests {
    use highwater_hal::{BackendLayer, Error, ErrorKind};
    use highwater_mock::{MockGpu, MockOptions};

    use super::*;
    use crate::{Options, Report, run};

    /// A mock whose second device lacks timing.
    #[derive(Debug)]
    struct WithoutTimingThere {
        below: Arc<MockGpu>,
        /// Whether that device times events nevertheless.
        times_nevertheless: bool,
    }

    // SAFETY: the mock keeps the clauses, and a call that is refused has no effect.
    unsafe impl BackendLayer for WithoutTimingThere {
        fn below(&self) -> &dyn Backend {
            &*self.below
        }

        fn around<T: Answer>(&self, _: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
            forward(&*self.below)
        }

        fn capabilities(&self, device: u32) -> Result<Capabilities> {
            let mut capabilities = self.below.capabilities(device)?;
            capabilities.event_timing &= device == 0;
            Ok(capabilities)
        }

        fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
            if device == 1 && options.timing && !self.times_nevertheless {
                return Err(Error::lacks("create_event", "event_timing"));
            }
            self.below.create_event(device, options)
        }

        fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
            // Ids are checked first.
            match self.below.event_elapsed_ns(start, end) {
                Err(error) if error.kind() == ErrorKind::InvalidArgument && start.device() == 1 => {
                    Err(Error::lacks("event_elapsed_ns", "event_timing"))
                }
                answer => answer,
            }
        }
    }

    /// Runs cases on a mock whose second device lacks timing.
    fn run_on(times_nevertheless: bool, filter: &str) -> Report {
        let below = MockGpu::open(MockOptions::new().with_devices(2)).unwrap();
        run(&WithoutTimingThere { below, times_nevertheless }, &Options::new().with_filter(filter))
    }

    #[test]
    fn devices_may_differ_and_each_keeps_its_word() {
        for filter in ["event", "cells.fills", "stability.", "lacking."] {
            let honest = run_on(false, filter);
            assert!(honest.is_success(), "{honest}");
        }
        let lacking = run_on(false, "lacking.event_timing");
        assert_eq!(lacking.passed(), 1, "{lacking}");
        let wrong = run_on(true, "lacking.").to_string();
        let (case, device) = ("lacking.event_timing", "device 0 of this case is the second device");
        assert!(wrong.contains(case) && wrong.contains(device), "{wrong}");
    }
}
