"""The statistics of a runtime, as dataclasses. Sizes are in bytes. Other numbers are counts, unless the text has a unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryInfo:
    """The memory of a device."""

    free: int
    """Bytes that are free."""
    total: int
    """Bytes of the device."""


@dataclass(frozen=True)
class HandlePoolStatistics:
    """The statistics of a handle pool."""

    created: int
    """Handles created so far."""
    live: int
    """Handles that exist."""
    peak_live: int
    """The most handles that existed at once."""
    removed: int
    """Handles that left the pool, to be destroyed or kept for another key."""
    warmed: int
    """Handles that a runtime made before a thread asked for one."""
    idle: int
    """Handles that no thread has claimed."""
    leased: int
    """Handles under a lease."""
    threads_served: int
    """Threads that have obtained a handle, counted once for each key."""


@dataclass(frozen=True)
class HostCacheStatistics:
    """The state and the history of the pool of page-locked memory."""

    requested_bytes: int
    """Bytes requested by the live buffers."""
    rounding_bytes: int
    """Bytes that the blocks of those buffers have in addition. Requests of up to 2 KiB are rounded up to multiples
    of 256 bytes, larger ones to pages."""
    held_bytes: int
    """Bytes of page-locked memory held, in any state."""
    peak_held_bytes: int
    """Maximum of `held_bytes` so far."""
    peak_live_bytes: int
    """Maximum so far of `live_bytes`, `cached_bytes` and the bytes that wait in thread caches together, as a bound
    of the maximum of `live_bytes`. The bound is too large by at most the other two at the time of that maximum. It
    is found on slow paths, because a hit of a thread cache does not change the sum."""
    pieces: int
    """Pieces held: memory that the backend registered, or allocated, in one call."""
    live_blocks: int
    """Blocks that buffers own."""
    live_bytes: int
    """Bytes of those, including `rounding_bytes`."""
    graph_blocks: int
    """Blocks whose buffers are gone and that captures or graphs keep."""
    graph_bytes: int
    """Bytes of those."""
    free_bytes: int
    """Bytes of free pages, which any request can use."""
    slab_bytes: int
    """Bytes of slabs that are in no block. A slab has 64 KiB and blocks of one size, a multiple of 256 bytes up to
    2 KiB."""
    cached_blocks: int
    """Free blocks that threads keep for requests of the same size. They are merged before the pool grows."""
    cached_bytes: int
    """Bytes of those."""
    inbox_blocks: int
    """Cached blocks that another thread dropped, and that are in the inbox of the thread that requested them."""
    inbox_bytes: int
    """Bytes of those."""
    waiting_blocks: int
    """Blocks whose streams may not have passed their last use. A block counts until the pool queries its completion
    events, even if its streams are done. The pool does so at the latest before it grows, and in each trim."""
    waiting_bytes: int
    """Bytes of those."""
    unmarked_blocks: int
    """Blocks of which it is unknown when the device stops using them. They are freed when the runtime ends."""
    unmarked_bytes: int
    """Bytes of those."""
    remnant_blocks: int
    """Pieces that the backend released, and whose pages the system did not take back. They are not held, and no
    code uses them. `Runtime.trim` and the end of the runtime retry them."""
    remnant_bytes: int
    """Bytes of those."""
    hits: int
    """Requests served without a growth."""
    cache_hits: int
    """Of those, requests that the cache of the thread served."""
    inbox_hits: int
    """Of those, requests that a block from the inbox of the thread served."""
    free_hits: int
    """Of those, requests that free pages served."""
    waiting_hits: int
    """Of those, requests that a block served whose streams were found to be done: one that waited in the cache of
    the thread, or free pages after waiting blocks had been collected."""
    merged_hits: int
    """Of those, requests that free pages served after all thread caches had been emptied and their blocks merged."""
    misses: int
    """Requests for which the pool grew."""
    allocations: int
    """Pieces that the backend registered or allocated."""
    frees: int
    """Pieces that were released, for any reason, including remnants."""
    trim_frees: int
    """Pieces that `Runtime.trim` released."""
    cap_evictions: int
    """Pieces that were released because of the cap on idle memory."""
    idle_time_frees: int
    """Pieces that were released because no request had used them for the idle time."""
    exhaustion_frees: int
    """Pieces that were released because memory was scarce for a growth: below the cap, on the machine or in the
    backend."""
    failed_growth_frees: int
    """Pieces that were released because a later piece of the same growth failed."""


@dataclass(frozen=True)
class BufferStatistics:
    """The device memory of live buffers that have a block of their own: those of `Device.allocate` and
    `Device.allocate_shared`. Buffers that streams allocate are parts of a pool: `Statistics.device_memory`."""

    blocks: int
    """Blocks that buffers own."""
    bytes: int
    """Bytes of those blocks."""


@dataclass(frozen=True)
class DeviceMemoryStatistics:
    """The state and the history of the device memory that streams allocate."""

    held_bytes: int
    """Bytes that the pool got from the backend and has not given back."""
    peak_held_bytes: int
    """The most bytes held at once, as a sum over the devices."""
    parts: int
    """Parts that the held bytes consist of: mappings of 2 MiB, or plain allocations."""
    live_blocks: int
    """Blocks that buffers, captures and graphs own."""
    live_bytes: int
    """Bytes of those blocks, rounded up to pages of 4 KiB or parts of a slab."""
    peak_live_bytes: int
    """The most live bytes, as a sum over the devices: seen at growths and at calls of `Runtime.statistics`."""
    free_bytes: int
    """Bytes of free pages in the memories of streams."""
    slab_bytes: int
    """Bytes of slabs that are in no block."""
    spare_bytes: int
    """Bytes of parts that no stream has."""
    cached_blocks: int
    """Freed blocks that streams keep for the next request of exactly their size."""
    cached_bytes: int
    """Bytes of those blocks."""
    waiting_blocks: int
    """Freed blocks that wait for other streams, or for the end of their own."""
    waiting_bytes: int
    """Bytes of those blocks."""
    unmarked_blocks: int
    """Freed blocks whose last use has no completion event. They stay until the runtime ends."""
    unmarked_bytes: int
    """Bytes of those blocks."""
    cache_hits: int
    """Requests that took a cached block."""
    free_hits: int
    """Requests that took free pages."""
    waiting_hits: int
    """Requests that took free pages after waiting blocks were collected."""
    merged_hits: int
    """Requests that took free pages after all cached blocks of the stream were merged."""
    misses: int
    """Requests for which the memory of the stream grew, by spare, moved or new parts."""
    allocations: int
    """Parts that the backend made."""
    frees: int
    """Parts that the backend took back."""
    moved_bytes: int
    """Bytes of parts that were taken from one place for another, within a stream or between streams."""


@dataclass(frozen=True)
class SharingStatistics:
    """The memory that a runtime shares with other processes, and the memory of other processes that it has open."""

    exported_blocks: int
    """Allocations of this runtime that were shared and are not yet freed."""
    exported_bytes: int
    """Bytes of those."""
    limbo_blocks: int
    """Of those, allocations that this runtime has dropped and other processes still hold."""
    limbo_bytes: int
    """Bytes of those."""
    peers: int
    """Processes that have opened an allocation and may hold it."""
    lost_peers: int
    """Importers that ended without releasing their allocations."""
    lost_exporters: int
    """Exporters that ended while this runtime was connected to them."""
    imports: int
    """Opens of allocations of other processes that buffers hold: one for each ticket, and one for each allocation
    of a batch."""
    mappings: int
    """Allocations of other processes that are mapped, open or kept for the next open."""
    mapped_bytes: int
    """Bytes of those."""
    pinned_blocks: int
    """Blocks of page-locked memory of this runtime that can be shared, shared or not. The counts above contain
    those that were shared."""
    pinned_bytes: int
    """Bytes of those, in whole pages. They count toward the cap of page-locked memory."""
    pinned_mappings: int
    """Of the mappings, those of page-locked memory."""
    pinned_mapped_bytes: int
    """Bytes of those, in whole pages. They do not count toward the cap of page-locked memory here."""
    opens: int
    """Opens of allocations of other processes so far: one for each ticket, and one for each allocation of a batch."""
    kept_opens: int
    """Of those, opens with an existing mapping."""
    trims: int
    """Number of searches for memory that other processes have released. `Runtime.trim`, the end of the runtime, and
    allocations that found no memory make them."""
    trimmed_bytes: int
    """Bytes in limbo that those searches freed. The sharing thread frees most of the memory earlier, as soon as it
    is released."""


@dataclass(frozen=True)
class GraphStatistics:
    """The state of captures and graphs."""

    capturing_streams: int
    """Streams that take part in open captures."""
    graphs: int
    """Live graphs."""
    device_blocks: int
    """Blocks of device memory that graphs keep, counted for each graph."""
    pinned_blocks: int
    """Blocks of page-locked memory that graphs keep, counted for each graph."""
    workspaces: int
    """Workspaces that graphs own."""


@dataclass(frozen=True)
class Limits:
    """The limits of a runtime that its options or the variable `HIGHWATER_HOST_MEMORY` set. `None` means unlimited."""

    pinned_bytes: int | None
    """Bytes of page-locked memory that the runtime may hold."""
    idle_pinned_bytes: int | None
    """Bytes of page-locked memory that no buffer owns."""
    idle_pinned_time: float | None
    """The time after which such memory is released. In seconds."""
    device_bytes: int | None
    """Bytes of memory of each device that streams may hold."""


@dataclass(frozen=True)
class Statistics:
    """The state and the history of a runtime's pools."""

    blas_handles: HandlePoolStatistics
    """The pool of BLAS handles."""
    lt_handles: HandlePoolStatistics
    """The pool of Lt handles."""
    workspaces: int
    """Workspaces that are allocated, over all devices."""
    workspace_bytes: int
    """Bytes of those workspaces."""
    peak_workspaces: int
    """The most workspaces that were allocated at once, as a sum over the devices."""
    peak_workspace_bytes: int
    """The most bytes of workspaces that were allocated at once, as a sum over the devices."""
    events: int
    """Events that the pools own, over all devices: completion events of recent work, and idle ones."""
    idle_events: int
    """The idle events among them, kept for reuse. `Runtime.trim` destroys them."""
    host: HostCacheStatistics
    """The cache of page-locked host memory."""
    buffers: BufferStatistics
    """The device memory of buffers that no stream allocated, over all devices."""
    device_memory: DeviceMemoryStatistics
    """The device memory that streams allocate, over all devices."""
    sharing: SharingStatistics
    """Memory shared with other processes."""
    graphs: GraphStatistics
    """Memory that captures and graphs hold."""
    limits: Limits
    """The limits in force."""
    warnings: int
    """Number of warnings that core has given in this process, of all its runtimes: the events of level `WARN` of
    `tracing`."""
    failed_releases: int
    """Releases that the backend refused."""
    refused_destroys: int
    """Of those, streams, events and graphs that still wait to be destroyed. `Runtime.trim_device_memory`,
    `Runtime.trim` and the end of the runtime retry them. An object for which the backend returns `InvalidHandle` no
    longer exists, so it is not retried."""
    left_at_exit: int
    """Streams, events, buffers and handles that were left on purpose because the process was exiting."""
