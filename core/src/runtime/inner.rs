//! The pools of a runtime, and its users.

use std::ops::Deref;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::statistics::Limits;
use super::warm_up::WarmUp;
use crate::capture::thread::in_capture;
use crate::pool::blas_handles::BlasHandles;
use crate::pool::completion_events::CompletionEvent;
use crate::pool::deferred::DeferredFrees;
use crate::pool::device_memory::DeviceMemory;
use crate::pool::pinned_pools::PinnedPools;
use crate::pool::recorder::Recorder;
use crate::pool::workspaces::Workspaces;
use crate::pool::{DeviceMemoryOptions, HostMemoryOptions, Nodes, PoolKey};
use crate::services::{Owner, Services};
use crate::sharing::{Meeting, Sharing};
use crate::stream::core::StreamCore;
use highwater_hal::Result;

/// The state that all users of a runtime share. The sharing thread refers only to the inner part. The last user ends that
/// thread. So the runtime ends where its last user drops it, and before that drop returns.
pub(crate) struct Users(pub(crate) Arc<RuntimeInner>);

impl Deref for Users {
    type Target = RuntimeInner;

    #[inline]
    fn deref(&self) -> &RuntimeInner {
        &self.0
    }
}

impl Users {
    /// Returns the sharing state, whose thread it starts if necessary.
    pub(crate) fn sharing(&self, operation: &'static str) -> Result<&Arc<Sharing>> {
        let sharing = self.sharing_unstarted(operation)?;
        sharing.start(operation)?;
        Ok(sharing)
    }

    /// Returns the sharing state.
    pub(crate) fn sharing_unstarted(&self, operation: &'static str) -> Result<&Arc<Sharing>> {
        Ok(match self.sharing.get() {
            Some(sharing) => sharing,
            None => {
                let (frees, files) = (Arc::clone(&self.frees), Arc::clone(&self.pinned.files));
                let fresh = Arc::new(Sharing::new(frees, files, Arc::clone(&self.meeting), operation)?);
                self.sharing.get_or_init(|| fresh)
            }
        })
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        if !self.0.services.generation.is_current() {
            // A thread that does not exist in this child may hold a lock.
            return;
        }
        if let Some(sharing) = self.0.sharing.get()
            && !self.0.services.backend.is_exiting()
        {
            sharing.stop();
        }
        if let Some(warm_up) = self.0.warm_up.get() {
            warm_up.stop(!self.0.services.backend.is_exiting());
        }
        self.0.pinned.stop_background();
        self.0.pinned.leave_to_buffers(Arc::<RuntimeInner>::clone(&self.0));
    }
}

/// The pools of a runtime. `shutdown.rs` gives the order in which they end.
pub(crate) struct RuntimeInner {
    pub(crate) services: Arc<Services>,
    pub(crate) handles: BlasHandles,
    pub(crate) workspaces: Arc<Workspaces>,
    pub(crate) frees: Arc<DeferredFrees>,
    pub(crate) pinned: PinnedPools,
    /// The rendezvous with other processes that share memory.
    pub(crate) meeting: Arc<Meeting>,
    /// Created by the first share or open.
    pub(crate) sharing: OnceLock<Arc<Sharing>>,
    /// The vendor's legacy default stream of each device: one for all users, so that their calls share one submission lock.
    pub(crate) legacy_streams: Box<[Mutex<Weak<StreamCore>>]>,
    /// The thread that makes handles ahead of use, if the options request it.
    pub(super) warm_up: OnceLock<WarmUp>,
    pub(super) closed: AtomicBool,
    /// The limits that the options and the environment set.
    pub(super) limits: Limits,
}

impl Deref for RuntimeInner {
    type Target = Services;

    #[inline]
    fn deref(&self) -> &Services {
        &self.services
    }
}

impl RuntimeInner {
    pub(super) fn new(
        services: Arc<Services>,
        (host_memory, device_memory): (&HostMemoryOptions, &DeviceMemoryOptions),
        nodes: &Nodes,
        recorder: Option<&Arc<Recorder>>,
        meeting: Meeting,
    ) -> Arc<Self> {
        let limits = Limits {
            pinned_bytes: host_memory.cap_bytes,
            idle_pinned_bytes: host_memory.idle_cap_bytes,
            idle_pinned_time: host_memory.idle_time,
            device_bytes: device_memory.cap_bytes,
        };
        let memory = DeviceMemory::new(Arc::clone(&services), device_memory);
        let workspaces = Arc::new(Workspaces::new(Arc::clone(&memory)));
        let inner = Arc::new(Self {
            handles: BlasHandles::new(Arc::clone(&memory), Arc::clone(&workspaces)),
            workspaces,
            frees: Arc::new(DeferredFrees::new(memory)),
            pinned: PinnedPools::new(&services, host_memory, nodes, recorder),
            meeting: Arc::new(meeting),
            sharing: OnceLock::new(),
            legacy_streams: services.devices.iter().map(|_| Mutex::default()).collect(),
            warm_up: OnceLock::new(),
            limits,
            closed: AtomicBool::new(false),
            services,
        });
        let owner: Weak<Self> = Arc::downgrade(&inner);
        inner.services.set_owner(owner);
        inner
    }

    /// Frees idle objects.
    pub(super) fn trim(&self) -> Result<()> {
        let handles = self.retry_refused().and(self.handles.trim());
        let memory = handles.and(self.frees.trim(false)).and(self.workspaces.trim(false)).and(self.pinned.trim());
        memory.and(self.trim_pools()).and(self.destroy_idle_events())
    }

    /// Frees the memory that streams keep, as far as their work is done.
    pub(super) fn trim_pools(&self) -> Result<()> {
        // All of them, whatever the first error.
        let trimmed: Vec<_> = self.frees.memory.pools.iter().map(|pool| pool.trim(false)).collect();
        trimmed.into_iter().collect()
    }
}

impl Owner for RuntimeInner {
    fn trim_in_passing(&self) {
        if self.frees.len() > 0
            && !in_capture()
            && let Err(error) = self.frees.trim(false)
        {
            // Refused releases are counted, and are not a reason to fail.
            tracing::debug!("memory could not be freed in passing: {error}");
        }
        self.pinned.trim_in_passing();
    }

    fn trim_device_memory(&self) {
        if let Some(sharing) = self.sharing.get() {
            sharing.trim();
        }
        // A refused release is counted, and the allocation retries with the memory that the others freed.
        let pools = self.frees.memory.pools.iter().map(|pool| pool.trim(true));
        for freed in [self.frees.trim(true), self.workspaces.trim(true), self.handles.trim()].into_iter().chain(pools) {
            if let Err(error) = freed {
                tracing::debug!("not everything could be freed: {error}");
            }
        }
    }

    fn keep_handles_of(&self, keys: [PoolKey; 2], after: Option<&Arc<CompletionEvent>>) {
        self.handles.keep_spare(keys, after);
    }
}

#[cfg(test)]
impl RuntimeInner {
    /// Holds every lock of the runtime's pools, for the fork test.
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        let sharing = self.sharing.get().map(|sharing| sharing.hold_locks());
        let places: Vec<_> = self.legacy_streams.iter().map(Mutex::lock).collect();
        let pools = (self.handles.hold_locks(), self.workspaces.hold_locks(), self.frees.hold_locks());
        crate::testing::Held((self.services.hold_locks(), pools, self.pinned.hold_locks(), places, sharing))
    }

    /// Returns whether any lock of the runtime's pools is held. If only one thread runs, that thread holds it.
    pub(crate) fn is_locked(&self) -> bool {
        self.services.is_locked()
            || self.handles.is_locked()
            || self.workspaces.is_locked()
            || self.frees.is_locked()
            || self.pinned.is_locked()
            || self.legacy_streams.iter().any(Mutex::is_locked)
            || self.sharing.get().is_some_and(|sharing| sharing.is_locked())
    }
}
