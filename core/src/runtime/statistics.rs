//! [`Statistics`]: the state and the history of a runtime's pools.

use std::fmt;
use std::time::Duration;

use super::Runtime;
use super::inner::RuntimeInner;
use crate::capture::GraphStatistics;
use crate::ledger::BufferStatistics;
use crate::pool::{DeviceMemoryStatistics, HandlePoolStatistics, HostCacheStatistics};
use crate::sharing::SharingStatistics;
use highwater_hal::{BlasKind, counted};

/// The state and the history of a runtime's pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// The pool of BLAS handles.
    pub blas_handles: HandlePoolStatistics,
    /// The pool of Lt handles.
    pub lt_handles: HandlePoolStatistics,
    /// Workspaces that are allocated, over all devices.
    pub workspaces: u64,
    /// Bytes of those workspaces.
    pub workspace_bytes: u64,
    /// The most workspaces that were allocated at once, as a sum over the devices.
    pub peak_workspaces: u64,
    /// The most bytes of workspaces that were allocated at once, as a sum over the devices.
    pub peak_workspace_bytes: u64,
    /// Events that the pools own, over all devices: completion events of recent work, and idle ones.
    pub events: u64,
    /// The idle events among them, kept for reuse. [`Runtime::trim`](crate::Runtime::trim) destroys them.
    pub idle_events: u64,
    /// The cache of page-locked host memory.
    pub host: HostCacheStatistics,
    /// The device memory of buffers that no stream allocated, over all devices. [`Device::buffers`](crate::Device::buffers) has that
    /// of one.
    pub buffers: BufferStatistics,
    /// The device memory that streams allocate, over all devices.
    pub device_memory: DeviceMemoryStatistics,
    /// Memory shared with other processes.
    pub sharing: SharingStatistics,
    /// Memory that captures and graphs hold.
    pub graphs: GraphStatistics,
    /// The limits in force.
    pub limits: Limits,
    /// Number of warnings that core has given in this process, of all its runtimes: the events of level `WARN` of `tracing`.
    pub warnings: u64,
    /// Releases that the backend refused.
    pub failed_releases: u64,
    /// Of those, streams, events and graphs that still wait to be destroyed.
    /// [`Runtime::trim_device_memory`](crate::Runtime::trim_device_memory), [`Runtime::trim`](crate::Runtime::trim) and the end
    /// of the runtime retry them. An object for which the backend returns `InvalidHandle` no longer exists, so it is not
    /// retried.
    pub refused_destroys: u64,
    /// Streams, events, buffers and handles that were left on purpose because the process was exiting.
    pub left_at_exit: u64,
}

/// The limits of a runtime that its options or the variable `HIGHWATER_HOST_MEMORY` set. `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of page-locked memory that the runtime may hold: [`HostMemoryOptions::cap_bytes`](crate::HostMemoryOptions::cap_bytes).
    pub pinned_bytes: Option<u64>,
    /// Bytes of page-locked memory that no buffer owns:
    /// [`HostMemoryOptions::idle_cap_bytes`](crate::HostMemoryOptions::idle_cap_bytes).
    pub idle_pinned_bytes: Option<u64>,
    /// The time after which such memory is released: [`HostMemoryOptions::idle_time`](crate::HostMemoryOptions::idle_time).
    pub idle_pinned_time: Option<Duration>,
    /// Bytes of memory of each device that streams may hold:
    /// [`DeviceMemoryOptions::cap_bytes`](crate::DeviceMemoryOptions::cap_bytes).
    pub device_bytes: Option<u64>,
}

impl Runtime {
    /// Returns the statistics of the runtime's pools.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let inner = &*self.inner;
        if !inner.generation.is_current() {
            return Statistics::default();
        }
        let (workspaces, workspace_bytes) = inner.workspaces.held();
        let (peak_workspaces, peak_workspace_bytes) = inner.workspaces.peak();
        let add = |sum: (u64, u64), held: (u64, u64)| (sum.0 + held.0, sum.1 + held.1);
        let (events, idle_events) = inner.devices.iter().map(|device| device.events.held()).fold((0, 0), add);
        Statistics {
            blas_handles: inner.handles.statistics(BlasKind::Blas),
            lt_handles: inner.handles.statistics(BlasKind::Lt),
            workspaces,
            workspace_bytes,
            peak_workspaces,
            peak_workspace_bytes,
            events,
            idle_events,
            host: inner.pinned.statistics(),
            buffers: inner.ledger.all_buffers(),
            device_memory: inner.frees.memory.statistics(),
            sharing: sharing_of(inner),
            graphs: inner.graphs.statistics(inner.devices.iter().map(|device| &device.capture_gate)),
            limits: inner.limits,
            warnings: crate::warnings::given(),
            failed_releases: inner.failed_releases(),
            refused_destroys: inner.refused_destroys(),
            left_at_exit: inner.left_at_exit(),
        }
    }
}

/// Returns the statistics of shared memory.
fn sharing_of(inner: &RuntimeInner) -> SharingStatistics {
    let sharing = inner.sharing.get().map(|sharing| sharing.statistics()).unwrap_or_default();
    let files = inner.pinned.files.counts();
    SharingStatistics {
        pinned_blocks: files.made,
        pinned_bytes: files.made_bytes,
        pinned_mappings: files.opened,
        pinned_mapped_bytes: files.opened_bytes,
        ..sharing
    }
}

/// A number of bytes with its unit.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let exponent = self.0.checked_ilog2().unwrap_or(0) as usize / 10;
        match exponent.checked_sub(1) {
            None => write!(f, "{} B", self.0),
            Some(unit) => write!(f, "{:.1} {}", self.0 as f64 / (1_u64 << (10 * exponent)) as f64, UNITS[unit]),
        }
    }
}

/// Writes a block of several lines, one for each pool.
impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "BLAS handles: {}", self.blas_handles)?;
        writeln!(f, "Lt handles: {}", self.lt_handles)?;
        write!(f, "workspaces: {} ({}), ", self.workspaces, Bytes(self.workspace_bytes))?;
        writeln!(f, "{} at most ({})", self.peak_workspaces, Bytes(self.peak_workspace_bytes))?;
        writeln!(f, "events: {}, {} idle", self.events, self.idle_events)?;
        writeln!(f, "page-locked memory: {}", self.host)?;
        writeln!(
            f,
            "device memory of buffers: {} ({})",
            counted(self.buffers.blocks, "block"),
            Bytes(self.buffers.bytes)
        )?;
        writeln!(f, "device memory of streams: {}", self.device_memory)?;
        writeln!(f, "sharing: {}", self.sharing)?;
        writeln!(f, "graphs: {}", self.graphs)?;
        let Self { failed_releases, refused_destroys, left_at_exit, .. } = self;
        write!(f, "releases: {failed_releases} refused, {refused_destroys} to retry, {left_at_exit} left at exit")?;
        write!(f, "\nlimits: {}\nwarnings: {}", self.limits, self.warnings)
    }
}

impl fmt::Display for HandlePoolStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { created, live, peak_live, removed, warmed, idle, leased, threads_served } = self;
        write!(f, "{live} live ({leased} leased, {idle} idle), {peak_live} at most, {created} created ")?;
        write!(f, "({warmed} ahead of use), {removed} removed, {} served", counted(*threads_served, "thread"))
    }
}

impl fmt::Display for HostCacheStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} held in {}, ", Bytes(self.held_bytes), counted(self.pieces, "piece"))?;
        write!(f, "{} at most ({} live): ", Bytes(self.peak_held_bytes), Bytes(self.peak_live_bytes))?;
        write!(f, "{} live ({}, ", self.live_blocks, Bytes(self.live_bytes))?;
        write!(f, "of which {} requested), ", Bytes(self.requested_bytes))?;
        write!(f, "{} free, {} free in slabs, ", Bytes(self.free_bytes), Bytes(self.slab_bytes))?;
        write!(f, "{} in thread caches ({}, ", self.cached_blocks, Bytes(self.cached_bytes))?;
        write!(f, "of which {} in inboxes), ", Bytes(self.inbox_bytes))?;
        write!(f, "{} in graphs ({}), ", self.graph_blocks, Bytes(self.graph_bytes))?;
        write!(f, "{} waiting ({}), ", self.waiting_blocks, Bytes(self.waiting_bytes))?;
        write!(f, "{} unmarked ({}), ", self.unmarked_blocks, Bytes(self.unmarked_bytes))?;
        write!(f, "{} ({}); ", counted(self.remnant_blocks, "remnant"), Bytes(self.remnant_bytes))?;
        write!(f, "{} ({} in thread caches, ", counted(self.hits, "hit"), self.cache_hits)?;
        write!(f, "{} in inboxes, ", self.inbox_hits)?;
        write!(f, "{} in free pages, {} in waiting blocks, ", self.free_hits, self.waiting_hits)?;
        write!(f, "{} in other thread caches), ", self.merged_hits)?;
        write!(f, "{}, {}, ", counted(self.misses, "miss"), counted(self.allocations, "allocation"))?;
        write!(
            f,
            "{} ({} by trims, {} by the cap, ",
            counted(self.frees, "free"),
            self.trim_frees,
            self.cap_evictions
        )?;
        write!(f, "{} by the idle time, {} by exhaustion, ", self.idle_time_frees, self.exhaustion_frees)?;
        write!(f, "{} of failed growths)", self.failed_growth_frees)
    }
}

impl fmt::Display for DeviceMemoryStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} held in {}, ", Bytes(self.held_bytes), counted(self.parts, "part"))?;
        write!(f, "{} at most ({} live): ", Bytes(self.peak_held_bytes), Bytes(self.peak_live_bytes))?;
        write!(f, "{} live ({}), ", self.live_blocks, Bytes(self.live_bytes))?;
        write!(f, "{} free, {} free in slabs, ", Bytes(self.free_bytes), Bytes(self.slab_bytes))?;
        write!(f, "{} of no stream, ", Bytes(self.spare_bytes))?;
        write!(f, "{} cached ({}), ", self.cached_blocks, Bytes(self.cached_bytes))?;
        write!(f, "{} waiting ({}), ", self.waiting_blocks, Bytes(self.waiting_bytes))?;
        write!(f, "{} unmarked ({}); ", self.unmarked_blocks, Bytes(self.unmarked_bytes))?;
        write!(f, "{} in lists, {} in free pages, ", counted(self.cache_hits, "hit"), self.free_hits)?;
        write!(f, "{} in waiting blocks, {} in merged blocks, ", self.waiting_hits, self.merged_hits)?;
        write!(f, "{}, {}, ", counted(self.misses, "miss"), counted(self.allocations, "allocation"))?;
        write!(f, "{}, ", counted(self.frees, "free"))?;
        write!(f, "{} moved", Bytes(self.moved_bytes))
    }
}

impl fmt::Display for SharingStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} exported ({}), ", self.exported_blocks, Bytes(self.exported_bytes))?;
        write!(f, "{} in limbo ({}), ", self.limbo_blocks, Bytes(self.limbo_bytes))?;
        write!(f, "{} ({} lost), ", counted(self.peers, "peer"), self.lost_peers)?;
        write!(f, "{} page-locked ({}); ", self.pinned_blocks, Bytes(self.pinned_bytes))?;
        write!(f, "{} imported, {} mapped ({}), ", self.imports, self.mappings, Bytes(self.mapped_bytes))?;
        write!(f, "of which {} page-locked ({}), ", self.pinned_mappings, Bytes(self.pinned_mapped_bytes))?;
        write!(f, "{} ({} by kept mappings), ", counted(self.opens, "open"), self.kept_opens)?;
        write!(f, "{} lost; ", counted(self.lost_exporters, "exporter"))?;
        write!(f, "{} freed {}", counted(self.trims, "trim"), Bytes(self.trimmed_bytes))
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |bytes| Bytes(bytes).to_string());
        write!(f, "{} of page-locked memory, ", bytes(self.pinned_bytes))?;
        write!(f, "{} of it idle, ", bytes(self.idle_pinned_bytes))?;
        match self.idle_pinned_time {
            Some(time) => write!(f, "for {time:?} at most; ")?,
            None => f.write_str("for any time; ")?,
        }
        write!(f, "{} of each device in streams", bytes(self.device_bytes))
    }
}

impl fmt::Display for GraphStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { capturing_streams, graphs, device_blocks, pinned_blocks, workspaces } = self;
        write!(f, "{graphs} live with {}, ", counted(*device_blocks, "device block"))?;
        write!(f, "{} ", counted(*pinned_blocks, "page-locked block"))?;
        write!(f, "and {}; {} capturing", counted(*workspaces, "workspace"), counted(*capturing_streams, "stream"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ManualBackend;
    use crate::{DeviceMemoryOptions, HostMemoryOptions, RuntimeOptions};

    #[test]
    fn statistics_read_as_one_block_with_units() {
        let bytes = [0, 1023, 1024, 1536, 5 << 30, u64::MAX].map(|bytes| Bytes(bytes).to_string());
        assert_eq!(bytes, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "16.0 EiB"]);
        let runtime = Runtime::new(ManualBackend::new()).unwrap();
        let _pinned = runtime.pinned::<u8>(3 << 20).unwrap();
        let text = runtime.statistics().to_string();
        assert_eq!(text.lines().count(), 12, "{text}");
        assert!(text.contains("limits: unlimited of page-locked memory"), "{text}");
        assert!(text.contains("1 live (3.0 MiB, of which 3.0 MiB requested)"), "{text}");
    }

    #[test]
    fn limits_of_the_options_are_reported() {
        let host = HostMemoryOptions::new().with_cap_bytes(64 << 20).with_idle_cap_bytes(1 << 20);
        let host = host.with_idle_time(Duration::from_secs(60));
        let options = RuntimeOptions::new().with_host_memory(host);
        let options = options.with_device_memory(DeviceMemoryOptions::new().with_cap_bytes(1 << 30));
        let runtime = Runtime::with_options(ManualBackend::new(), &options).unwrap();
        let limits = runtime.statistics().limits;
        assert_eq!((limits.pinned_bytes, limits.idle_pinned_bytes), (Some(64 << 20), Some(1 << 20)));
        assert_eq!((limits.idle_pinned_time, limits.device_bytes), (Some(Duration::from_secs(60)), Some(1 << 30)));
        let text = limits.to_string();
        assert_eq!(
            text,
            "64.0 MiB of page-locked memory, 1.0 MiB of it idle, for 60s at most; 1.0 GiB of each device in streams"
        );
    }

    #[test]
    fn a_refused_release_is_a_warning_of_the_statistics() {
        let runtime = Runtime::new(ManualBackend::new()).unwrap();
        let before = runtime.statistics();
        runtime.inner.count_failed_release(&highwater_hal::Error::new(highwater_hal::ErrorKind::Vendor, "test", "no"));
        let after = runtime.statistics();
        assert_eq!(after.failed_releases, before.failed_releases + 1);
        // Other tests of this process warn, too.
        assert!(after.warnings > before.warnings, "{after}");
    }
}
