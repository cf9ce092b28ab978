"""Names of the Rust library in its errors, as names of this package."""

from __future__ import annotations

import re

# What the package spells in another way than the Rust library. Both sides are parts of sentences.
_SPELLED = {
    "`EventOptions::with_timing`": "`Stream.record(timed=True)`",
    "`OwnerDeath::Keep`": '`owner_death="keep"`',
    "`OwnerDeath::Inherit`": '`owner_death="inherit"`',
    ", or by `Holder::hold`": "",
    ", or `SharingOptions::with_rendezvous`": "",
    ", or `HostMemoryOptions::with_idle_time`": "",
    "`Device::legacy_default_stream`": "`Device.default_stream`",
    "call `legacy_default_stream` or `per_thread_default_stream`, whichever that code uses": "use `Device.default_stream`",
    "drop its devices, streams, events, buffers and clones first": "drop its devices, streams, events and buffers first",
    "allow the mock, or ask for it by name, to compute on the CPU": 'pass fallback="mock", or open "mock", to compute on the CPU',
    "open it with `Runtime::open_pinned`": "open it in a program in Rust, because the package has no shared page-locked memory",
    "use `fill_zero`, or upload the values": "fill with 0, or upload the values",
    "`device_count()`": "`Runtime.device_count`",
    "`device_count`": "`Runtime.device_count`",
    "`create_stream`": "`Device.create_stream`",
    "use `open_best(Fallback::Mock)`": 'pass fallback="mock"',
    "open the backend in the child only, or start the child with exec (spawn)": (
        "start the child with exec, such as by the method `spawn` of `multiprocessing`, and open a runtime there"
    ),
}
_SPELLED_PATTERN = re.compile("|".join(map(re.escape, _SPELLED)))
_PATH = re.compile(r"`([^`\n]*::[^`\n]*)`")
_SLICE = re.compile(r"\bslice (\d+)\b")
# The classes and the members that both have.
_SHARED = {
    "Device": {"allocate", "allocate_shared"},
    "Owner": {"wait"},
    "Runtime": {"open_shared", "pinned", "trim"},
    "Stream": {"capture", "matmul", "note_device_use"},
    "Ticket": {"to_bytes"},
    "TicketBatch": {"to_bytes"},
}


def _named(path: re.Match[str]) -> str:
    owner, _, member = path[1].partition("::")
    name = path[1].replace("::", ".")
    return f"`{name}`" if member in _SHARED.get(owner, ()) else f"`{name}` (in Rust)"


def in_python(text: str) -> str:
    """Returns a text of the Rust library with the names of this package. Names that only Rust has are marked."""
    return _PATH.sub(_named, _SPELLED_PATTERN.sub(lambda found: _SPELLED[found[0]], text))


# The operations of the Rust library that have other names here. The others have the same name, or are of no function of the package.
_OPERATIONS = {"gemm": "matmul", "gemm_mixed": "matmul", "scope": "download"}


def operation_in_python(operation: str) -> str:
    """Returns the name of the function of this package for an operation of the Rust library."""
    return _OPERATIONS.get(operation, operation)


def of_buffers(text: str) -> str:
    """Returns a text about a batch, whose parts Rust calls slices."""
    return _SLICE.sub(r"buffer \1", text)
