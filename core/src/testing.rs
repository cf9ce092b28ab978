//! The backend of core's own unit tests: the mock with held streams, below layers that watch the calls. A stream moves only
//! when core waits for it or the test says so. The layers panic when core breaks a promise: a call under a lock, a call that
//! the mock refuses, and memory that is freed while a stream may use it or a live graph has recorded it.

use std::collections::{BTreeMap, HashSet};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, Weak};

use highwater_hal::{Answer, AnyId, BackendLayer, Call, HostLayer};
use highwater_mock::{MockGpu, MockOptions, Operation};
use parking_lot::Mutex;

use crate::runtime::RuntimeInner;
use crate::*;

/// Locks that are held until this is dropped.
pub(crate) struct Held<T>(pub(crate) T);

impl<T> Drop for Held<T> {
    fn drop(&mut self) {}
}

type Intrusion = Box<dyn FnOnce() -> Result<()> + Send>;

pub(crate) struct ManualBackend {
    pub(crate) gpu: Arc<MockGpu>,
    host: Arc<dyn HostAllocator>,
    this: Weak<Self>,
    /// The runtime whose locks must be free at every call, in a test of one thread.
    runtime: Mutex<Option<Weak<RuntimeInner>>>,
    /// The code that runs in the next call of an operation. Its error is the error of the call.
    intrusion: Mutex<Option<(&'static str, Intrusion)>>,
    /// The other side of the copies that the test enqueues itself.
    scratch: OnceLock<DevicePtr>,
    /// The events that were recorded in the open captures.
    captured: Mutex<HashSet<AnyId>>,
    /// The page-locked memory: address and bytes of each registration and allocation.
    pieces: Mutex<BTreeMap<usize, usize>>,
    /// The NUMA nodes of the devices; unknown for devices after the last.
    nodes: Mutex<Vec<u32>>,
    /// The kinds of the page-locked memory that was allocated.
    kinds: Mutex<Vec<HostMemoryKind>>,
}

impl std::fmt::Debug for ManualBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gpu.fmt(f)
    }
}

impl ManualBackend {
    pub(crate) fn new() -> Arc<Self> {
        Self::with_capabilities(|_| ())
    }

    pub(crate) fn with_capabilities(change: impl FnOnce(&mut Capabilities)) -> Arc<Self> {
        Self::open(MockOptions::new(), change)
    }

    pub(crate) fn open(options: MockOptions, change: impl FnOnce(&mut Capabilities)) -> Arc<Self> {
        let options = options.with_held_streams().with_checks().with_capabilities(|can| {
            *can = Capabilities::none();
            (can.gemm_f32, can.blas_workspace, can.stream_ordered_memory) = (true, true, true);
            (can.capture, can.create_during_capture) = (true, true);
            (can.workspace_alignment, can.blas_workspace_bytes) = (256, 1 << 20);
            change(can);
        });
        let gpu = MockGpu::open(options).unwrap();
        Arc::new_cyclic(|this| Self {
            host: gpu.host_allocator(),
            gpu,
            this: this.clone(),
            runtime: Mutex::default(),
            intrusion: Mutex::default(),
            scratch: OnceLock::new(),
            captured: Mutex::default(),
            pieces: Mutex::default(),
            nodes: Mutex::default(),
            kinds: Mutex::default(),
        })
    }

    /// Attaches the first devices to these NUMA nodes.
    pub(crate) fn attach(&self, nodes: &[u32]) {
        *self.nodes.lock() = nodes.to_vec();
    }

    /// Panics from here on when the runtime calls while it holds one of its locks. For tests of one thread.
    pub(crate) fn watch_locks_of(&self, runtime: &Runtime) {
        *self.runtime.lock() = Some(Arc::downgrade(&runtime.inner.0));
    }

    /// Makes every `record_event` fail, or none.
    pub(crate) fn fail_record(&self, fail: bool) {
        self.gpu.fail_by_chance(Operation::RecordEvent, u32::from(fail) * 1_000_000, ErrorKind::Vendor).unwrap();
    }

    /// Runs this in the next call of the operation.
    pub(crate) fn intrude(&self, operation: &'static str, intrude: impl FnOnce() -> Result<()> + Send + 'static) {
        *self.intrusion.lock() = Some((operation, Box::new(intrude)));
    }

    /// Executes everything that is enqueued on the stream.
    pub(crate) fn advance(&self, stream: StreamId) {
        self.gpu.release_stream(stream).unwrap();
    }

    /// Returns whether some stream has not executed its last operation on this host or device address.
    pub(crate) fn is_in_use(&self, address: u64) -> bool {
        locations(address).into_iter().any(|at| self.gpu.is_in_use(at))
    }

    /// Returns whether a live graph has recorded this host or device address.
    pub(crate) fn is_recorded(&self, address: u64) -> bool {
        locations(address).into_iter().any(|at| self.gpu.is_recorded(at))
    }

    /// Enqueues a copy of the byte at a host address, behind the runtime's back.
    pub(crate) fn enqueue_use(&self, stream: StreamId, address: u64) {
        let ptr = *self.scratch.get_or_init(|| self.gpu.allocate(0, &AllocateOptions::new(1)).unwrap());
        let copy = MemoryCopy::new(Location::Device { device: 0, ptr }, locations(address)[0], 1);
        // SAFETY: the mock checks that the host memory is page-locked. The test notes the use, so it stays.
        unsafe { self.gpu.copy(&copy, stream) }.unwrap();
    }

    /// Returns the number of blocks of page-locked memory. Each registration is one.
    pub(crate) fn live_host_blocks(&self) -> u64 {
        self.gpu.live_objects().host_allocations
    }

    /// Returns the kinds of the page-locked memory that was allocated so far.
    pub(crate) fn allocated_kinds(&self) -> Vec<HostMemoryKind> {
        self.kinds.lock().clone()
    }

    /// Returns the page-locked memory: address and bytes of each registration and allocation.
    pub(crate) fn pieces(&self) -> BTreeMap<usize, usize> {
        self.pieces.lock().clone()
    }

    /// Returns whether the address lies in a block of page-locked memory.
    pub(crate) fn has_host_block(&self, address: u64) -> bool {
        matches!(locations(address), [Location::Host(ptr), _] if self.host.device_address(ptr, 0).is_ok())
    }

    fn watch<T>(&self, operation: &'static str, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        let runtime = self.runtime.lock().as_ref().and_then(Weak::upgrade);
        assert!(runtime.is_none_or(|runtime| !runtime.is_locked()), "the backend is called under a lock");
        let intrusion = self.intrusion.lock().take_if(|(at, _)| *at == operation);
        intrusion.map_or(Ok(()), |(_, intrude)| intrude())?;
        let answer = forward().inspect_err(|error| {
            // A fault that the test asked for is `Vendor`, and a lost capture `Capture`.
            let is_lost = operation == "end_capture" && error.kind() == ErrorKind::Capture;
            let expected = [ErrorKind::OutOfMemory, ErrorKind::Forked, ErrorKind::Vendor].contains(&error.kind());
            assert!(expected || is_lost, "core broke a rule: {error}");
        });
        assert_eq!(self.gpu.violations(), [], "core broke a rule");
        answer
    }

    fn watch_free(&self, operation: &'static str, at: Location, free: impl FnOnce() -> Result<()>) -> Result<()> {
        assert!(!self.gpu.is_recorded(at), "{at:?} is freed while a graph has recorded it");
        self.watch(operation, free)
    }
}

fn locations(address: u64) -> [Location; 2] {
    let host = HostPtr::new(NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize)).unwrap());
    [Location::Host(host), Location::Device { device: 0, ptr: DevicePtr::new(address) }]
}

// SAFETY: the overridden methods forward, and free only what the caller gave up.
unsafe impl BackendLayer for ManualBackend {
    fn below(&self) -> &dyn Backend {
        &*self.gpu
    }
    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        self.watch(call.operation, || {
            match (call.operation, call.ids().next()) {
                ("end_capture", _) => self.captured.lock().clear(),
                ("record_event" | "destroy_event", Some(event)) => {
                    assert!(!self.captured.lock().contains(&event), "{event:?} belongs to a capture");
                    if call.stream().is_some_and(|stream| self.gpu.is_capturing(stream).unwrap()) {
                        self.captured.lock().insert(event);
                    }
                }
                // Executes what was enqueued. The test cannot refer to the stream any more.
                ("destroy_stream", _) => self.gpu.release_stream(call.stream().unwrap())?,
                _ => {}
            }
            forward(&*self.gpu)
        })
    }
    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        let mut info = self.gpu.device_info(device)?;
        info.numa_node = self.nodes.lock().get(device as usize).copied();
        Ok(info)
    }
    fn live_objects(&self) -> LiveObjects {
        let mut live = self.watch("live_objects", || Ok(self.gpu.live_objects())).unwrap();
        live.allocations -= u64::from(self.scratch.get().is_some());
        live
    }
    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        // SAFETY: as the caller promises.
        self.watch_free("free", Location::Device { device, ptr }, || unsafe { self.gpu.free(device, ptr, stream) })
    }
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        self.this.upgrade().unwrap()
    }
}

// SAFETY: the overridden methods forward.
unsafe impl HostLayer for ManualBackend {
    fn below(&self) -> &dyn HostAllocator {
        &*self.host
    }
    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn HostAllocator) -> Result<T>) -> Result<T> {
        self.watch(call.operation, || forward(&*self.host))
    }
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        let ptr = self.watch("host_allocate", || self.host.allocate(bytes, options))?;
        self.pieces.lock().insert(ptr.address(), bytes);
        self.kinds.lock().push(options.kind);
        Ok(ptr)
    }
    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        // SAFETY: as the caller promises.
        self.watch("host_register", || unsafe { self.host.register(ptr, bytes, options) })?;
        self.pieces.lock().insert(ptr.address(), bytes);
        Ok(())
    }
    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: as the caller promises.
        self.watch_free("host_free", Location::Host(ptr), || unsafe { self.host.free(ptr) })?;
        self.pieces.lock().remove(&ptr.address());
        Ok(())
    }
    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: as the caller promises.
        self.watch_free("host_unregister", Location::Host(ptr), || unsafe { self.host.unregister(ptr) })?;
        self.pieces.lock().remove(&ptr.address());
        Ok(())
    }
}
