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
    if "`" in text or "fork" in text or "exec" in text:
        text = _SPELLED_PATTERN.sub(lambda found: _SPELLED[found[0]], text)
        text = _PATH.sub(_named, text)
    return text


def of_buffers(text: str) -> str:
    """Returns a text about a batch, whose parts Rust calls slices."""
    return _SLICE.sub(r"buffer \1", text)
