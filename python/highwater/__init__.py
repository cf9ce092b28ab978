"""Page-locked host memory, device memory, streams, and device memory shared between processes, over CUDA, ROCm or a mock device.

`open` returns a `Runtime`. Its `device` returns a `Device`, which makes a `Stream` and `Buffer`s. Its `pinned` returns page-locked
memory, a `Pinned`. All sizes are in bytes, and all shapes are tuples of lengths, in row-major order. Every error is an `Error`
with a `kind` and a `hint`.

Calls of a stream enqueue work and return before it is done, unless their text says that they wait. Each call that waits
releases the interpreter's lock. A child of `os.fork` cannot use the objects of its parent: their calls raise `Forked`.
"""

from ._errors import (
    Capture,
    DeviceLost,
    DeviceMissing,
    Error,
    Expired,
    Forked,
    InvalidArgument,
    InvalidHandle,
    InvalidPointer,
    InvalidState,
    LibraryMissing,
    OperatingSystem,
    OutOfMemory,
    PeerLost,
    PermissionDenied,
    ShuttingDown,
    SymbolMissing,
    UnknownBackend,
    Unsupported,
    Vendor,
    WrongDevice,
)
from ._highwater import Buffer, Device, Event, Owner, Pinned, Runtime, Stream, Ticket, __version__, open, survey
from ._statistics import (
    DeviceMemoryStatistics,
    GraphStatistics,
    HandlePoolStatistics,
    HostCacheStatistics,
    Limits,
    MemoryInfo,
    SharingStatistics,
    Statistics,
)

__all__ = [
    "Buffer",
    "Capture",
    "Device",
    "DeviceLost",
    "DeviceMemoryStatistics",
    "DeviceMissing",
    "Error",
    "Event",
    "Expired",
    "Forked",
    "GraphStatistics",
    "HandlePoolStatistics",
    "HostCacheStatistics",
    "InvalidArgument",
    "InvalidHandle",
    "InvalidPointer",
    "InvalidState",
    "LibraryMissing",
    "Limits",
    "MemoryInfo",
    "OperatingSystem",
    "OutOfMemory",
    "Owner",
    "PeerLost",
    "PermissionDenied",
    "Pinned",
    "Runtime",
    "SharingStatistics",
    "ShuttingDown",
    "Statistics",
    "Stream",
    "SymbolMissing",
    "Ticket",
    "UnknownBackend",
    "Unsupported",
    "Vendor",
    "WrongDevice",
    "__version__",
    "open",
    "survey",
]
