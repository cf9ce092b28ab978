"""Sends PyTorch's CUDA tensors between processes by Highwater's tickets, and makes memory pools of PyTorch that others can open.

`install_reducers` makes `torch.multiprocessing` send CUDA tensors by tickets, through queues, pipes and arguments of processes.
`share` and `open` do the same by hand. Nothing is copied. Each process sees the writes of the others.

The memory of a sent tensor stays until the sender has dropped every tensor over it and no process has it open. A ticket that no
process has opened keeps the memory for a limited time. A process that is killed releases what it has open.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import io
import itertools
import logging
import math
import multiprocessing.reduction
import operator
import os
import pathlib
import pickle
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from . import _highwater
from ._errors import Error, Expired, Forked, InvalidArgument, InvalidState, OperatingSystem, Unsupported
from ._highwater import Buffer, Runtime, Stream, Ticket, TicketBatch

__all__ = [
    "MemPool",
    "TensorBatch",
    "TensorTicket",
    "collect",
    "install_host_allocator",
    "install_reducers",
    "kept_bytes",
    "last_allocation_failure",
    "open",
    "open_all",
    "runtime",
    "share",
    "share_all",
    "uninstall_reducers",
]

# As `Any`: PyTorch may be missing where types are checked.
try:
    torch: Any = importlib.import_module("torch")
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError("highwater.torch needs PyTorch: install it (`pip install torch`)", name="torch") from error
# This registers the reducers that are replaced.
reductions: Any = importlib.import_module("torch.multiprocessing.reductions")

_log = logging.getLogger("highwater")


# The first seven fields of a `TensorTicket`, and the last six.
_Described = tuple[str, Any, tuple[int, ...], tuple[int, ...], int, bool, tuple[bool, bool]]
_Shared = tuple[int, int, bytes, bytes, int, int]
# The common properties of tensors of one kind and shape: dtype, size and stride, then kind, requires_grad and views. Most tensors have the defaults
# of the last three, and `None` in their place.
_Layout = tuple[Any, tuple[int, ...], tuple[int, ...], tuple[str, bool, tuple[bool, bool]] | None]


class TensorTicket(NamedTuple):
    """Names a tensor for other processes. `share` returns it. It can be pickled, and goes through queues and pipes."""

    kind: str
    """`"Tensor"` or `"Parameter"`."""
    dtype: Any
    """The `torch.dtype`."""
    size: tuple[int, ...]
    """The lengths of the dimensions."""
    stride: tuple[int, ...]
    """The distance between neighbors in each dimension, in elements."""
    offset: int
    """The place of the first element in the storage, in elements."""
    requires_grad: bool
    """Whether the tensor requires a gradient."""
    views: tuple[bool, bool]
    """Whether the tensor is a conjugate view, and whether it is a negative view."""
    device: int
    """The index of the device in the process that shared the tensor."""
    nbytes: int
    """The number of bytes of the storage."""
    ticket: bytes
    """The bytes of the `highwater.Ticket` of the storage. Empty for an empty storage."""
    exporter: bytes
    """The name under which the exporter receives receipts."""
    serial: int
    """The number of the storage in the exporter."""
    token: int
    """The number of this ticket in its receipt. 0 if it needs no receipt."""

    def __repr__(self) -> str:
        # Without its secrets.
        return f"<highwater.torch.TensorTicket {self.kind} {self.size} {self.dtype}>"


class TensorBatch(NamedTuple):
    """Names many tensors over few storages. `share_all` returns it. It can be pickled, and goes through queues and pipes."""

    layouts: tuple[_Layout, ...]
    """The types and shapes of the tensors, each once."""
    places: bytes
    """For each tensor three integers of 8 bytes: the number of its storage, the number of its layout, and its offset in elements."""
    batch: TicketBatch
    """The tickets of the storages."""
    exporter: bytes
    """The name under which the exporter receives receipts."""
    serials: tuple[int, ...]
    """The numbers of the storages in the exporter."""
    token: int
    """The number of this batch in its receipt."""

    def __repr__(self) -> str:
        return f"<highwater.torch.TensorBatch of {len(self.places) // 24} tensors over {len(self.serials)} storages>"


class _Keep:
    """Keeps a storage while its memory is shared."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def uses(self) -> tuple[int, int]:
        """The references to the storage, from C++ and from Python."""
        return torch._C._storage_Use_Count(self.storage._cdata), sys.getrefcount(self.storage)


def _new_token() -> bytes:
    # 0 is the number of a ticket without receipts.
    return os.urandom(8).replace(bytes(8), b"\1" * 8)


def _uses_of_idle() -> tuple[int, int]:
    """The references to a storage that only a `_Keep` has."""
    return _Keep(torch.UntypedStorage(1)).uses()


# A full collection of Python's garbage collector takes tens of milliseconds with PyTorch's modules, and comes after a number of new objects that it
# scans. So a message that is one tensor makes few of them: no list, no set and no function.
class _Flight:
    """A message that is on its way."""

    __slots__ = ("named", "opens", "until")

    def __init__(self, opens: int, until: float, named: _Export | list[_Export]) -> None:
        self.opens = opens
        self.until = until
        self.named = named
        """The storages that it names."""

    def exports(self) -> list[_Export]:
        return self.named if isinstance(self.named, list) else [self.named]


class _Export:
    """A storage that this process shares."""

    __slots__ = ("address", "buffer", "flight", "further", "keep", "nbytes", "serial")

    def __init__(self, keep: _Keep, buffer: Buffer, serial: int, address: int, nbytes: int) -> None:
        self.keep = keep
        self.buffer = buffer
        self.serial = serial
        self.address = address
        self.nbytes = nbytes
        self.flight = 0
        self.further: set[int] | None = None
        """The tokens of the messages that name it and are on their way: one, or 0, and further ones."""

    def is_of(self, storage: Any) -> bool:
        return bool(storage.data_ptr() == self.address and storage.nbytes() == self.nbytes)

    def tokens(self) -> set[int]:
        return {token for token in (self.flight, *(self.further or ())) if token}

    def is_flying(self) -> bool:
        return self.flight != 0 or bool(self.further)

    def add(self, token: int) -> None:
        """Notes a message on its way."""
        if self.flight == 0:
            self.flight = token
        elif self.further is None:
            self.further = {token}
        else:
            self.further.add(token)

    def discard(self, token: int) -> None:
        """Forgets a message. A second call does nothing."""
        if self.flight == token:
            self.flight = 0
        elif self.further is not None:
            self.further.discard(token)


# A storage that this process has opened: its address, to which the record has a weak reference, and the ticket by which it goes on to other
# processes. Plain tuples of such values need no scans of the garbage collector.
_Received = tuple[int, bytes | tuple[TicketBatch, int]]


FIRST_LOOK_SECONDS = 0.02
LAST_LOOK_SECONDS = 0.5
UNOPENED_SECONDS = 60.0
TICKET_BYTES = 136
# The most tickets of opened segments that a process remembers, and for how long. Their mappings may have ended meanwhile.
MOST_MAPPED = 4096
MAPPED_SECONDS = 10.0
# The most storages of a `TicketBatch`. Further tensors of a message have tickets of their own.
MOST_STORAGES = 1 << 16


class _State:
    """What this process shares and has open."""

    def __init__(self) -> None:
        # First, because its errors have remedies.
        self.runtime = _highwater.standing_runtime(_backend())
        torch.cuda.init()
        needed = [(torch._C, name) for name in ("_storage_Use_Count", "_construct_CUDA_Tensor_From_Storage_And_Metadata")]
        needed += [(torch.UntypedStorage, name) for name in ("_weak_ref", "_expired", "_free_weak_ref", "_new_with_weak_ptr")]
        for owner, name in needed:
            if not hasattr(owner, name):
                message = f"PyTorch {torch.__version__} has no {owner.__name__}.{name}"
                raise Unsupported("Unsupported", "torch", message, None, "use PyTorch 2.11, or another one with this function")
        # The public functions run more Python code in each call.
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
        self.from_dlpack = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
        self.functions = _tensor_functions()
        self.pid = os.getpid()
        self.device = functools.cache(self.runtime.device)
        self.receipts = _highwater.Receipts(os.urandom(16))
        self.name = self.receipts.name
        # A finalizer may run under the lock and come back.
        self.lock = threading.RLock()
        self.serials = itertools.count(1)
        self.exports: dict[int, _Export] = {}
        self.by_serial: dict[int, _Export] = {}
        self.flights: dict[int, _Flight] = {}
        self.received: dict[tuple[bytes, int], _Received] = {}
        self.received_by_cdata: dict[int, tuple[bytes, int]] = {}
        self.most_received = 128
        self.mapped: set[bytes] = set()
        """The tickets of segments that this process has opened."""
        self.mapped_until = 0.0
        # Not a `WeakSet`, whose methods run Python code.
        self.keeps: set[weakref.ref[_Keep]] = set()
        self.forget_keep = self.keeps.discard
        self.streams: dict[tuple[int, int], Stream] = {}
        self.idle_uses = _uses_of_idle()
        self.is_looking = False
        threading.Thread(target=self.look, name="highwater-torch", daemon=True).start()

    def look(self) -> None:
        """Releases storages that no process needs. Sleeps while no storage is shared. Never returns."""
        wait: float | None = None
        next_sweep = took = 0.0
        while True:
            try:
                with self.lock:
                    self.is_looking = bool(self.keeps)
                    if not self.is_looking:
                        wait = None
                tokens = self.receipts.take(None if wait is None else max(next_sweep - time.monotonic(), 0.0))
                arrived = self.land(tokens)
                begin = time.monotonic()
                # The search of all storages takes at most 5 % of a core, however many receipts arrive.
                if wait is None or tokens:
                    wait = FIRST_LOOK_SECONDS
                    next_sweep = min(next_sweep, begin + max(wait, 20 * took))
                if begin < next_sweep:
                    has_ended = self.release(arrived)
                    # Receipts of tensors that this process still has change nothing, and may come later.
                    if tokens:
                        self.receipts.pause(not has_ended)
                    continue
                arrived.clear()
                if self.sweep():
                    self.receipts.pause(False)
                end = time.monotonic()
                took = end - begin
                next_sweep = end + max(wait, 20 * took)
                wait = min(wait * 2, LAST_LOOK_SECONDS)
            except Exception:
                # The thread must continue, because nothing else releases the memory.
                _log.exception("the search for tensors that no process needs has failed")
                time.sleep(LAST_LOOK_SECONDS)

    def land(self, tokens: list[int]) -> list[_Export]:
        """Notes the receipts of messages. Returns the storages of the messages that have arrived."""
        arrived: list[_Export] = []
        with self.lock:
            for token in tokens:
                flight = self.flights.get(token)
                if flight is not None:
                    flight.opens -= 1
                    if flight.opens <= 0:
                        arrived += self.end_flight(token)
        return arrived

    def end_flight(self, token: int) -> list[_Export]:
        exports = self.flights[token].exports()
        for export in exports:
            export.discard(token)
        # Last, so that an interrupt leaves nothing that no search ends.
        del self.flights[token]
        return exports

    def sweep(self) -> bool:
        """Ends the shares of all storages that no tensor of this process and no message on its way needs. Returns whether there were any."""
        now = time.monotonic()
        with self.lock:
            for token in [token for token, flight in self.flights.items() if flight.until < now]:
                self.end_flight(token)
            found = list(self.exports.values())
        return self.release(found)

    def release(self, exports: list[_Export]) -> bool:
        """Ends the shares of the given storages, except those that a tensor of this process or a message on its way needs.

        Returns whether it ended any.
        """
        ended: list[_Export] = []
        with self.lock:
            for export in exports:
                is_shared = self.by_serial.get(export.serial) is export
                if is_shared and not export.is_flying() and self.is_idle(export):
                    del self.exports[export.keep.storage._cdata], self.by_serial[export.serial]
                    ended.append(export)
        exports.clear()
        has_ended = bool(ended)
        # Outside of the lock: this frees the memory, or keeps it until no process has it open.
        ended.clear()
        return has_ended

    def is_idle(self, export: _Export) -> bool:
        found = export.keep.uses()
        return found[0] <= self.idle_uses[0] and found[1] <= self.idle_uses[1]

    def forget_received(self) -> None:
        """Removes the records of storages that no tensor has. The caller must hold the lock."""
        is_expired = torch.UntypedStorage._expired
        for key in [key for key, (cdata, _) in self.received.items() if is_expired(cdata)]:
            self.forget(key)
        self.most_received = max(128, 2 * len(self.received))

    def forget(self, key: tuple[bytes, int]) -> None:
        """Removes the records of a received storage. The caller must hold the lock."""
        received = self.received.pop(key, None)
        if received is not None:
            cdata = received[0]
            if self.received_by_cdata.get(cdata) == key:
                del self.received_by_cdata[cdata]
            torch.UntypedStorage._free_weak_ref(cdata)

    def stream(self, device: int) -> Stream:
        """The stream to which PyTorch enqueues this thread's work."""
        key = (device, self.raw_stream(device))
        known = self.streams.get(key)
        if known is None:
            known = self.streams[key] = self.device(device).stream_from_raw(torch.cuda.current_stream(device))
        return known

    def export_of(self, storage: Any, device: int) -> _Export:
        key = storage._cdata
        # Needs no lock: no thread ends the share of a storage that the caller has.
        known = self.exports.get(key)
        if known is not None and known.is_of(storage):
            return known
        keep, address, nbytes = _Keep(storage), storage.data_ptr(), storage.nbytes()
        buffer = self.device(device).adopt(address, nbytes, "uint8", keep)
        made = _Export(keep, buffer, next(self.serials), address, nbytes)
        with self.lock:
            known = self.exports.get(key)
            if known is not None and known.is_of(storage):
                return known
            if known is not None:
                self.drop(known)
            self.exports[key] = self.by_serial[made.serial] = made
            self.keeps.add(weakref.ref(keep, self.forget_keep))
            # A send that fails later leaves it to the thread.
            self.start_to_look()
        return made

    def start_to_look(self) -> None:
        """Wakes the thread if it sleeps. The caller must hold the lock."""
        if not self.is_looking:
            self.is_looking = True
            self.receipts.wake()

    def drop(self, export: _Export) -> None:
        """Forgets the share of a storage whose memory has changed."""
        for token in export.tokens():
            flight = self.flights[token]
            flight.named = [other for other in flight.exports() if other is not export]
        del self.by_serial[export.serial]

    def share(self, storage: Any, device: int, opens: int) -> _Shared:
        nbytes = storage.nbytes()
        if nbytes == 0:
            return device, 0, b"", self.name, 0, 0
        forwarded = self.forwarded(storage)
        if forwarded is not None:
            # The exporter cannot wait for the work of this process.
            torch.cuda.current_stream(device).synchronize()
            (exporter, serial), data = forwarded
            return device, nbytes, data, exporter, serial, 0
        export = self.export_of(storage, device)
        self.stream(device).note_device_use(export.buffer)
        data = export.buffer.share().to_bytes()
        return device, nbytes, data, self.name, export.serial, self.fly(export, opens, _new_token())

    def fly(self, named: _Export | list[_Export], opens: int, name: bytes) -> int:
        """Keeps storages until a message has arrived. Returns the number of its receipts, whose bytes are `name`."""
        token = int.from_bytes(name, "little")
        flight = _Flight(opens, time.monotonic() + _unopened_seconds, named)
        with self.lock:
            # First, so that an interrupt leaves nothing that no search ends.
            self.flights[token] = flight
            for export in flight.exports():
                export.add(token)
            self.start_to_look()
        return token

    def share_all(self, tensors: list[Any], opens: int) -> TensorBatch:
        try:
            stored = list(map(torch.Tensor.untyped_storage, tensors))
            places, of_storages, of_layouts, is_plain = _places(tensors, stored, self.functions)
        except (AttributeError, TypeError, RuntimeError):
            # One of them has no storage, or no shape.
            for place, tensor in enumerate(tensors):
                _check_tensor("share_all", f"tensor {place}", tensor)
            raise
        # Nothing is shared before all are checked. A checked storage and a checked layout determine the rest: the device and the type.
        firsts = set(of_storages)
        for place in sorted(firsts.union(of_layouts)) if is_plain else range(len(tensors)):
            _check_tensor("share_all", f"tensor {place}", tensors[place])
            if place in firsts and (stored[place].nbytes() == 0 or self.forwarded(stored[place]) is not None):
                message = f"tensor {place} is empty or came from another process"
                raise InvalidArgument("InvalidArgument", "share_all", message, None, "send it by `share`")
        storages = [stored[place] for place in of_storages]
        devices = [storage.device.index for storage in storages]
        exports = [self.export_of(storage, device) for storage, device in zip(storages, devices, strict=True)]
        for export, device in zip(exports, devices, strict=True):
            self.stream(device).note_device_use(export.buffer)
        batch = self.runtime.share_all([export.buffer for export in exports])
        serials = tuple(export.serial for export in exports)
        described = tuple(_layout(*_seen(tensors[place])) for place in of_layouts)
        token = self.fly(exports, opens, _new_token())
        return TensorBatch(described, places, batch, self.name, serials, token)

    def open_batch(self, exporter: bytes, serials: Sequence[int], batch: TicketBatch) -> _Incoming:
        """Opens the storages of a message, all or none."""
        if exporter == self.name:
            return _Incoming(self, exporter, serials, batch, [], [self.original(serial) for serial in serials])
        # The open waits for the work before the share, so it is needed even if a storage is open.
        buffers = self.runtime.open_shared_all(batch)
        if len(buffers) != len(serials):
            raise _wrong_layout(f"{len(serials)} storages, of which it opens {len(buffers)}")
        return _Incoming(self, exporter, serials, batch, buffers, [None] * len(buffers))

    def acknowledge(self, exporter: bytes, token: int) -> None:
        """Sends the receipt of a message."""
        if exporter == self.name:
            self.land([token])
        elif token:
            _highwater.acknowledge(exporter, token)

    def forwarded(self, storage: Any) -> tuple[tuple[bytes, int], bytes] | None:
        """The exporter, the number and the ticket of a storage that came from another process."""
        # Needs no lock: no thread removes the records of a storage that the caller has.
        key = self.received_by_cdata.get(storage._cdata)
        received = None if key is None else self.received.get(key)
        if key is None or received is None or received[0] != storage._cdata:
            return None
        ticket = received[1]
        return key, ticket if isinstance(ticket, bytes) else ticket[0].ticket(ticket[1]).to_bytes()

    def open(self, shared: _Shared, maker: _Maker, offset: int) -> Any:
        """A tensor over the storage of a ticket: the original, one that is open already, or a new one."""
        device, nbytes, data, exporter, serial, _ = shared
        if nbytes == 0:
            storage = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).untyped_storage()
        elif exporter == self.name:
            storage = self.original(serial)
        else:
            # The open waits for the work before the share, so it is needed even if the storage is open.
            buffer = _highwater.open_storage(self.runtime, data, nbytes)
            whole = maker.whole if offset == 0 and maker.nbytes == nbytes else None
            storage, tensor = self.received_as((exporter, serial), buffer, data, whole)
            if tensor is not None and whole is not None:
                return tensor
        return maker.make(storage, offset)

    def segment_ticket(self, storage: Any, device: int, ticket: bytes, exporter: bytes) -> bytes:
        """The ticket of the segment of a storage, which receivers keep mapped. Empty if they keep nothing mapped."""
        has_own_ticket = exporter == self.name and bool(ticket)
        found = _highwater.segment_ticket(device, storage.data_ptr(), ticket) if has_own_ticket else None
        return found or b""

    def keep_mapped(self, exporter: bytes, segment: bytes) -> bool:
        """Maps a segment of another process. Returns whether it is mapped.

        The mapping stays until that process frees the segment or ends, or this runtime is trimmed.
        """
        now = time.monotonic()
        if now >= self.mapped_until or len(self.mapped) >= MOST_MAPPED:
            # A further open finds the mapping, or maps what was trimmed.
            self.mapped.clear()
            self.mapped_until = now + MAPPED_SECONDS
        if segment in self.mapped or exporter == self.name:
            return True
        try:
            # The mapping stays after the drop of the buffer.
            self.runtime.open_shared(Ticket(segment))
        except Error:
            # A mapping only saves time.
            return False
        self.mapped.add(segment)
        return True

    def original(self, serial: int) -> Any:
        """A storage that this process shares."""
        with self.lock:
            export = self.by_serial.get(serial)
        if export is None:
            raise Expired("Expired", "open", "the memory of the ticket was released", None, "keep the tensor until it is opened")
        return export.keep.storage

    def received_as(
        self, key: tuple[bytes, int], buffer: Buffer, ticket: bytes | tuple[TicketBatch, int], whole: _Whole | None = None
    ) -> tuple[Any, Any]:
        """The storage over a buffer of another process. If one is open already, returns that one.

        Also returns the tensor over a new storage, which is as `whole` describes.
        """
        if key in self.received:
            with self.lock:
                storage = self.opened(key, buffer)
            if storage is not None:
                return storage, None
        tensor = self.from_dlpack(_capsule_of(buffer, whole))
        made = tensor.untyped_storage()
        with self.lock:
            # Another thread may have opened it meanwhile.
            storage = self.opened(key, buffer)
            if storage is not None:
                return storage, None
            cdata = made._weak_ref()
            self.received[key] = (cdata, ticket)
            self.received_by_cdata[cdata] = key
            if len(self.received) > self.most_received:
                self.forget_received()
        return made, tensor

    def opened(self, key: tuple[bytes, int], buffer: Buffer) -> Any:
        """The storage over a buffer, if one is open. A wrong ticket may have put another one under its key."""
        received = self.received.get(key)
        if received is None:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(received[0])
        if storage is not None and (storage.data_ptr(), storage.nbytes()) == (buffer.ptr, buffer.nbytes):
            return storage
        self.forget(key)
        return None


# The name of a type and the lengths of the dimensions.
_Whole = tuple[str, tuple[int, ...]]
_capsule_of: Callable[[Buffer, _Whole | None], Any] = _highwater.capsule_of


def _raw_stream(device: int) -> int:
    """The address of the stream to which PyTorch enqueues this thread's work."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def _described(tensor: Any) -> _Described:
    """The first seven fields of a `TensorTicket`."""
    kind = "Parameter" if type(tensor) is torch.nn.Parameter else "Tensor"
    shape = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
    return (kind, tensor.dtype, *shape, tensor.requires_grad, (tensor.is_conj(), tensor.is_neg()))


# The parts of a layout: the class, dtype, size, stride, whether a gradient is required, and the two signs.
_Seen = tuple[type, Any, tuple[int, ...], tuple[int, ...], bool, bool, bool]


def _seen(tensor: Any) -> _Seen:
    size, stride = tensor.size(), tensor.stride()
    return type(tensor), tensor.dtype, size, stride, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()


def _all_seen(tensors: Sequence[Any]) -> Iterable[_Seen]:
    """As `_seen`, for many tensors, without Python code for each."""
    kind = torch.Tensor
    shapes = map(kind.size, tensors), map(kind.stride, tensors)
    dtypes, gradients = map(operator.attrgetter("dtype"), tensors), map(operator.attrgetter("requires_grad"), tensors)
    return zip(map(type, tensors), dtypes, *shapes, gradients, map(kind.is_conj, tensors), map(kind.is_neg, tensors), strict=True)


class _Numbers(dict[Any, int]):
    """Assigns 0, 1, 2 and so on to keys in the order of their first lookup."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


def _places(tensors: list[Any], storages: list[Any], functions: Any) -> tuple[bytes, list[int], list[int], bool]:
    """Returns the `places` of a batch, the first tensor of each storage and of each layout, and whether all tensors are plain.

    Plain tensors have no names and require no gradient.
    """
    kind, requires_grad = torch.Tensor, operator.attrgetter("requires_grad")
    is_plain = not (any(map(kind.has_names, tensors)) or any(map(requires_grad, tensors)))
    if functions is not None and is_plain and set(map(type, tensors)) == {kind} and not any(map(kind.is_neg, tensors)):
        found = functions.places(_aoti().unsafe_alloc_void_ptrs_from_tensors, tensors, storages)
        # Only complex numbers can be conjugated.
        if found is not None and not any(tensors[place].is_complex() for place in found[2]):
            return (*found, True)
    numbers = array.array("q", map(_Numbers().__getitem__, map(operator.attrgetter("_cdata"), storages)))
    layouts = array.array("q", map(_Numbers().__getitem__, _all_seen(tensors)))
    places = array.array("q", bytes(24 * len(tensors)))
    places[0::3], places[1::3], places[2::3] = numbers, layouts, array.array("q", map(kind.storage_offset, tensors))
    return places.tobytes(), _firsts(numbers), _firsts(layouts), is_plain


def _firsts(numbers: Sequence[int]) -> list[int]:
    """Returns the index of the first occurrence of each number."""
    places = range(len(numbers) - 1, -1, -1)
    firsts = dict(zip(reversed(numbers), places, strict=True))
    return [firsts[number] for number in range(len(firsts))]


def _aoti() -> Any:
    return torch._C._aoti


def _tensor_functions() -> Any:
    """Returns PyTorch's C functions for batches. Returns `None` if this PyTorch lacks one, or if a trial gives another result."""
    path = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    functions = _highwater.TensorFunctions.load(str(path))
    if functions is None:
        return None
    try:
        whole = torch.zeros(12, device="cpu")
        part = whole.as_strided((2, 3), (5, 1), 1)
        storages = [whole.untyped_storage()] * 3
        places = struct.pack("9q", 0, 0, 0, 0, 1, 1, 0, 1, 1)
        if functions.places(_aoti().unsafe_alloc_void_ptrs_from_tensors, [whole, part, part], storages) != (places, [0], [0, 1]):
            return None
        layouts = [_layout(*_seen(tensor)) for tensor in (whole, part)]
        views = _views(functions, places, layouts, storages[:1], _empty_of_cpu)
        same = zip(views or (), (whole, part, part), strict=True)
        is_right = all(_seen(view) == _seen(tensor) and view.data_ptr() == tensor.data_ptr() for view, tensor in same)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return functions if is_right else None


def _empty_of_cpu(storage: Any, dtype: Any) -> Any:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (0,), (1,))


def _views(functions: Any, places: bytes, layouts: Sequence[_Layout], storages: list[Any], empty: Callable[[Any, Any], Any]) -> list[Any] | None:
    """Makes the tensors of a batch. `empty` makes a tensor of a type over a storage. Returns `None` if a place, a layout or a range
    is invalid, or if PyTorch refuses."""
    for layout in layouts:
        _check_layout(layout)
    types = _Numbers()
    described = [(size, stride, dtype.itemsize, types[dtype]) for dtype, size, stride, _ in layouts]
    calls = _aoti().unsafe_alloc_void_ptrs_from_tensors, _aoti().alloc_tensors_by_stealing_from_void_ptrs
    nbytes = [storage.nbytes() for storage in storages]
    tensors: list[Any] | None = functions.views(
        calls, places, described, nbytes, lambda number, layout: empty(storages[number], layouts[layout][0])
    )
    if tensors is None:
        return None
    if any(rest for _, _, _, rest in layouts):
        for place, number in enumerate(array.array("q", places)[1::3]):
            rest = layouts[number][3]
            if rest is not None:
                tensors[place] = _finished(tensors[place], *rest)
    return tensors


def _layout(
    kind: type, dtype: Any, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool, is_conj: bool, is_neg: bool
) -> _Layout:
    is_parameter = kind is torch.nn.Parameter
    is_plain = not (is_parameter or requires_grad or is_conj or is_neg)
    rest = None if is_plain else ("Parameter" if is_parameter else "Tensor", requires_grad, (is_conj, is_neg))
    return dtype, tuple(size), tuple(stride), rest


class _Incoming:
    """The storages of a message of another process, while its tensors are made."""

    def __init__(
        self,
        state: _State,
        exporter: bytes,
        serials: Sequence[int],
        batch: TicketBatch,
        buffers: list[Buffer],
        storages: list[Any],
    ) -> None:
        self.state = state
        self.exporter = exporter
        self.serials = serials
        self.batch = batch
        self.buffers = buffers
        self.storages = storages

    def storage(self, number: int) -> Any:
        storage = self.storages[number]
        if storage is None:
            key = self.exporter, self.serials[number]
            storage, _ = self.state.received_as(key, self.buffers[number], (self.batch, number))
            self.storages[number] = storage
        return storage


class _Sent:
    """A storage of a message, while it is pickled. The tensors over it name it, so that the message has it once."""

    __slots__ = ("number", "token")

    def __init__(self, token: bytes, number: int) -> None:
        self.token = token
        self.number = number

    def __reduce__(self) -> Any:
        return _storage_of, (self.token, self.number)


class _Outgoing:
    """The storages of a message, while it is pickled."""

    __slots__ = ("exports", "layouts", "sent", "state", "storages", "streams", "token")

    def __init__(self) -> None:
        # Set with the first storage.
        self.state: Any = None
        self.token = b""
        """The number of the message in its receipt, under which the tensors of the message find its storages."""
        self.sent: dict[int, _Sent] = {}
        """By the number of the storage in PyTorch."""
        self.layouts: dict[_Seen, _Layout] = {}
        self.exports: list[_Export] = []
        # These keep the storages until the message is on its way.
        self.storages: list[Any] = []
        self.streams: dict[int, Stream] = {}

    def reduce(self, tensor: Any) -> Any:
        """Returns what makes the tensor in the receiver. `None` if a ticket of its own must name its storage."""
        storage = tensor.untyped_storage()
        sent = self.sent.get(storage._cdata)
        if sent is None:
            sent = self.add(storage, tensor)
            if sent is None:
                return None
        seen = _seen(tensor)
        layout = self.layouts.get(seen)
        if layout is None:
            layout = self.layouts[seen] = _layout(*seen)
        return _view, (sent, layout, tensor.storage_offset())

    def add(self, storage: Any, tensor: Any) -> _Sent | None:
        state = self.state
        if state is None:
            state = self.state = _current()
            self.token = _new_token()
        is_full = len(self.exports) >= MOST_STORAGES
        if is_full or storage.nbytes() == 0 or state.forwarded(storage) is not None:
            return None
        device = tensor.device.index
        export = state.export_of(storage, device)
        stream = self.streams.get(device)
        if stream is None:
            stream = self.streams[device] = state.stream(device)
        stream.note_device_use(export.buffer)
        sent = self.sent[storage._cdata] = _Sent(self.token, len(self.exports))
        self.exports.append(export)
        self.storages.append(storage)
        return sent

    def header(self) -> bytes:
        """Sends the storages. Returns the opcodes that open them before the objects of the message are made.

        The opcodes leave the `_Incoming` on the stack of the unpickler, below the objects of the message, and use no memo. So it lives
        until the message is read.
        """
        state = self.state
        batch = state.runtime.share_all([export.buffer for export in self.exports])
        serials = array.array("Q", [export.serial for export in self.exports]).tobytes()
        segments = self.segment_tickets(batch) if _keeps_mapped else []
        state.fly(self.exports, 1, self.token)
        fields = _FIELDS.pack(self.token, state.name, len(self.exports), len(segments))
        content = b"".join((fields, serials, *segments, batch.to_bytes()))
        return b"".join((_BEFORE_FIELDS, len(content).to_bytes(4, "little"), content, _AFTER_FIELDS))

    def segment_tickets(self, batch: TicketBatch) -> list[bytes]:
        """The tickets of the segments of the storages, each once."""
        found: dict[bytes, None] = {}
        for number, storage in enumerate(self.storages):
            segment = self.state.segment_ticket(storage, storage.device.index, batch.ticket(number).to_bytes(), self.state.name)
            if segment:
                found[segment] = None
        return list(found)


_FIELDS = struct.Struct("<8s16sII")
"""The token of a message, the name of its exporter, and the numbers of its storages and of their segments. The serial numbers of the storages, the
tickets of the segments and the tickets of the storages follow."""


# Protocol 3 has no frames, which would hide what follows.
_BEFORE_FIELDS = b"".join((pickle.PROTO, b"\x03", pickle.GLOBAL, f"{__name__}\n_receive\n".encode(), pickle.BINBYTES))
_AFTER_FIELDS = pickle.TUPLE1 + pickle.REDUCE


class _Threads(threading.local):
    """The messages that a thread pickles and reads."""

    outgoing: _Outgoing | None = None

    def __init__(self) -> None:
        self.incoming: weakref.WeakValueDictionary[bytes, _Incoming] = weakref.WeakValueDictionary()


_threads = _Threads()


def _receive(fields: bytes) -> _Incoming:
    """Opens the storages of a message."""
    token, exporter, count, segment_count = _FIELDS.unpack_from(fields)
    serials, end = array.array("Q"), _FIELDS.size + 8 * count
    serials.frombytes(fields[_FIELDS.size : end])
    state = _current()
    begin, end = end, end + segment_count * TICKET_BYTES
    incoming = state.open_batch(exporter, serials, TicketBatch(fields[end:]))
    state.acknowledge(exporter, int.from_bytes(token, "little"))
    # After the opens, which fail if the exporter does not answer.
    for place in range(begin, end, TICKET_BYTES):
        if not state.keep_mapped(exporter, fields[place : place + TICKET_BYTES]):
            break
    _threads.incoming[token] = incoming
    return incoming


def _storage_of(token: bytes, number: int) -> Any:
    """Finds a storage of a message."""
    incoming = _threads.incoming.get(token)
    if incoming is None:
        message = "the message that has the memory of the tensor is not being read"
        raise InvalidState("InvalidState", "open", message, None, "read the tensor with its message, in the same thread")
    return incoming.storage(number)


def _view(storage: Any, layout: _Layout, offset: int) -> Any:
    """Makes a tensor over a storage."""
    return _maker(layout).make(storage, offset)


class _Maker:
    """Makes tensors of a layout."""

    __slots__ = ("dtype", "extent", "nbytes", "rest", "size", "stride", "whole")

    def __init__(self, layout: _Layout) -> None:
        _check_layout(layout)
        self.dtype, self.size, self.stride, self.rest = layout
        is_empty = 0 in self.size
        self.extent = 0 if is_empty else 1 + sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        """The elements from the first to the last one."""
        self.nbytes = self.extent * self.dtype.itemsize
        name = str(self.dtype).removeprefix("torch.")
        is_whole = not is_empty and self.rest is None and self.stride == _row_major(self.size) and name in _highwater.dtype_names()
        self.whole: _Whole | None = (name, self.size) if is_whole else None
        """What DLPack has to state for a tensor over a whole storage. `None` if DLPack makes no such tensor."""

    def make(self, storage: Any, offset: int) -> Any:
        # PyTorch does not check the range. A tensor without elements may have any offset that is not negative.
        if offset < 0 or (self.extent > 0 and (offset + self.extent) * self.dtype.itemsize > storage.nbytes()):
            raise _wrong_layout(f"{self.extent} elements of {self.dtype} from {offset}, in a storage of {storage.nbytes()} bytes")
        metadata = {"dtype": self.dtype, "size": self.size, "stride": self.stride, "storage_offset": offset}
        tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)
        return tensor if self.rest is None else _finished(tensor, *self.rest)


def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of values that follow each other."""
    return tuple(math.prod(size[place + 1 :]) for place in range(len(size)))


def _maker(layout: _Layout) -> _Maker:
    """Returns the maker of a layout."""
    try:
        return _new_maker(layout)
    except TypeError:
        # A part of the layout cannot be hashed, so its type is wrong.
        _check_layout(layout)
        raise


# The tensors of a program have few layouts, and the check of one takes longer than the making of a tensor.
_new_maker = functools.lru_cache(maxsize=1024)(_Maker)


# Tensors of more go PyTorch's way.
MOST_DIMENSIONS = 64


def _check_layout(layout: _Layout) -> None:
    """Refuses a layout of a ticket that no tensor can have."""
    if not (type(layout) is tuple and len(layout) == 4):
        raise _wrong_layout(f"a layout of the type {type(layout).__name__}")
    dtype, size, stride, rest = layout
    if type(dtype) is not torch.dtype:
        raise _wrong_layout(f"a dtype of the type {type(dtype).__name__}")
    for shape in (size, stride):
        is_shape = type(shape) is tuple and len(shape) <= MOST_DIMENSIONS and all(type(number) is int for number in shape)
        if not is_shape or any(not 0 <= number < 1 << 63 for number in shape):
            raise _wrong_layout(f"lengths or strides that are no tuple of at most {MOST_DIMENSIONS} numbers from 0 to 2^63 - 1")
    if len(size) != len(stride) or math.prod(size) >= 1 << 63:
        raise _wrong_layout(f"the lengths {size} and the strides {stride}")
    if rest is not None:
        is_rest = type(rest) is tuple and len(rest) == 3 and rest[0] in ("Tensor", "Parameter") and type(rest[1]) is bool
        signs = rest[2] if is_rest else None
        if not (type(signs) is tuple and len(signs) == 2 and all(type(sign) is bool for sign in signs)):
            raise _wrong_layout("other properties than a kind, a gradient flag and two signs")


def _wrong_layout(found: str) -> InvalidArgument:
    message = f"the ticket describes no tensor: {found}"
    return InvalidArgument("InvalidArgument", "open", message, None, "pass a ticket as `share` or `share_all` returned it")


def _finished(tensor: Any, kind: str, requires_grad: bool, signs: tuple[bool, bool]) -> Any:
    is_conj, is_neg = signs
    try:
        if is_conj:
            tensor = tensor.conj()
        if is_neg:
            tensor = torch._neg_view(tensor)
        if kind == "Parameter":
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        if requires_grad:
            tensor.requires_grad_()
    except RuntimeError as error:
        raise _wrong_layout(str(error)) from error
    return tensor


_unopened_seconds = UNOPENED_SECONDS
_state: _State | None = None
_state_lock = threading.Lock()


def _backend() -> str:
    return os.environ.get("HIGHWATER_BACKEND") or ("rocm" if torch.version.hip else "cuda")


def _current() -> _State:
    global _state
    state = _state
    if state is None:
        with _state_lock:
            if _state is None:
                _state = _State()
            state = _state
    if state.pid != os.getpid():
        raise Forked(
            "Forked",
            "torch",
            "the process was forked after it had shared or opened tensors",
            None,
            'start processes with torch.multiprocessing.get_context("spawn") or "forkserver"',
        )
    return state


@atexit.register
def _end() -> None:
    """Releases storages that no process needs, before PyTorch ends."""
    state = _state
    if state is not None and state.pid == os.getpid():
        state.sweep()


def runtime() -> Runtime:
    """Returns the runtime of this process for PyTorch's memory. The first call opens it.

    The environment variable `HIGHWATER_BACKEND` names its backend. By default, it is PyTorch's backend: CUDA or ROCm. The runtime
    lives as long as the process.
    """
    return _current().runtime


NO_CUDA_TENSOR = "it is no tensor of a CUDA device"


def _unfit(tensor: Any) -> str | None:
    """Returns why a tensor cannot be shared. `None` if it can."""
    kind = type(tensor)
    is_known = kind is torch.Tensor or kind is torch.nn.Parameter
    if not (is_known or isinstance(tensor, torch.Tensor)) or not tensor.is_cuda:
        return NO_CUDA_TENSOR
    if not is_known:
        return f"its class is {kind.__name__}, expected Tensor or Parameter"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "it is not strided: it is sparse, nested or quantized"
    if tensor.requires_grad and not tensor.is_leaf:
        return "it is no leaf and requires a gradient"
    if tensor.has_names():
        return "its dimensions have names"
    if len(tensor.size()) > MOST_DIMENSIONS:
        return f"it has more than {MOST_DIMENSIONS} dimensions"
    return None


def _check_tensor(operation: str, name: str, tensor: Any) -> None:
    reason = _unfit(tensor)
    if reason is not None:
        message = f"{name} cannot be shared: {reason}"
        hint = "move it by `tensor.cuda()`" if reason == NO_CUDA_TENSOR else "pass a plain tensor, such as `tensor.detach()`"
        raise InvalidArgument("InvalidArgument", operation, message, None, hint)


def _check_opens(operation: str, opens: int) -> None:
    if opens < 1:
        raise InvalidArgument("InvalidArgument", operation, f"opens is {opens}", None, "pass 1 or more")


def share(tensor: Any, *, opens: int = 1) -> TensorTicket:
    """Returns a ticket by which other processes `open` a CUDA tensor. Copies nothing. Waits only for a tensor that came from another process.

    Each open waits for the work that this thread's current stream has at the call. `opens` is the number of opens for which the
    ticket keeps the memory after this process has dropped the tensor. The ticket keeps it for at most 60 seconds, or the
    `unopened_seconds` of `install_reducers`. While this process has the tensor, any number of processes can open the ticket.

    For a tensor that came from another process, returns a ticket of its owner. This waits for the current stream. Such a ticket
    keeps nothing, so the owner must still have the tensor at the open.

    Raises `InvalidArgument` for other tensors, and for memory that no process can open, such as that of `cudaMallocAsync`.
    """
    _check_tensor("share", "the tensor", tensor)
    _check_opens("share", opens)
    return TensorTicket(*_described(tensor), *_current().share(tensor.untyped_storage(), tensor.device.index, opens))


def open(ticket: TensorTicket) -> Any:
    """Returns a tensor over the memory of a ticket. Copies nothing. Waits until the work before the share is done.

    Tensors over one storage arrive as views of one storage, also by several tickets. In the process that shared the tensor, the
    result is over the original storage. The memory stays while a tensor over it lives, here or in the exporter. The last drop
    waits for the device, because PyTorch does not report which streams used the tensor.

    Raises `Expired` or `PeerLost` if the memory was released, `DeviceMissing` if its device is not visible here, `InvalidArgument`
    if the shape of the ticket exceeds its storage, and `Forked` in a child of `fork`.
    """
    if not isinstance(ticket, TensorTicket):
        raise _wrong_layout(f"an object of the type {type(ticket).__name__}")
    kind, dtype, size, stride, offset, requires_grad, signs = ticket[:7]
    return _opened(_maker((dtype, size, stride, (kind, requires_grad, signs))), offset, ticket[7:])


def _opened(maker: _Maker, offset: int, shared: _Shared) -> Any:
    state = _current()
    tensor = state.open(shared, maker, offset)
    state.acknowledge(shared[3], shared[5])
    return tensor


def share_all(tensors: Sequence[Any], *, opens: int = 1) -> TensorBatch:
    """Returns one message by which other processes open many CUDA tensors, such as the weights of a model, with `open_all`.

    The message names each storage once. One flat storage with many views makes the smallest message. The tensors must not be
    empty, and must not come from another process. Otherwise as `share`. Raises `InvalidArgument` with the place of a wrong tensor.
    """
    _check_opens("share_all", opens)
    return _current().share_all(list(tensors), opens)


def open_all(batch: TensorBatch) -> list[Any]:
    """Returns the tensors of a batch, in order. Opens all storages or none. Otherwise as `open`.

    Python's garbage collection is off while the tensors are made.
    """
    _check_batch(batch)
    state = _current()
    incoming = state.open_batch(batch.exporter, batch.serials, batch.batch)
    storages = [incoming.storage(number) for number in range(len(batch.serials))]
    tensors = None
    with _no_collection:
        if state.functions is not None:
            tensors = _views(state.functions, batch.places, batch.layouts, storages, lambda storage, dtype: _empty(dtype).make(storage, 0))
        if tensors is None:
            makers = [_maker(layout) for layout in batch.layouts]
            _check_places(batch.places, len(storages), len(makers))
            rows = iter(array.array("q", batch.places))
            tensors = [makers[layout].make(storages[number], offset) for number, layout, offset in zip(rows, rows, rows, strict=True)]
    state.acknowledge(batch.exporter, batch.token)
    return tensors


class _NoCollection:
    """Pauses Python's garbage collection, which would scan every new tensor, although all of them are live."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.collects = False
        os.register_at_fork(after_in_child=self.end_in_child)

    def __enter__(self) -> None:
        with self.lock:
            if self.users == 0:
                self.collects = gc.isenabled()
                gc.disable()
            self.users += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0 and self.collects:
                gc.enable()

    def end_in_child(self) -> None:
        """The threads that made tensors do not exist in a child."""
        self.lock = threading.Lock()
        if self.users > 0 and self.collects:
            gc.enable()
        self.users = 0


_no_collection = _NoCollection()


def _check_batch(batch: TensorBatch) -> None:
    """Refuses a batch with fields of wrong types."""
    is_right = (
        isinstance(batch, TensorBatch)
        and type(batch.layouts) is tuple
        and type(batch.places) is bytes
        and isinstance(batch.batch, TicketBatch)
        and type(batch.exporter) is bytes
        and type(batch.serials) is tuple
        and all(type(serial) is int for serial in batch.serials)
        and type(batch.token) is int
        and 0 <= batch.token < 1 << 64
    )
    if not is_right:
        raise _wrong_layout("fields of other types than those of `share_all`")


def _check_places(places: bytes, storages: int, layouts: int) -> None:
    numbers = array.array("q", places[: len(places) // 8 * 8])
    most = max(numbers[0::3], default=-1), max(numbers[1::3], default=-1)
    if len(places) % 24 or min(numbers, default=0) < 0 or most[0] >= storages or most[1] >= layouts:
        raise _wrong_layout(f"its places are cut, or a number in them is negative or exceeds the {storages} storages or the {layouts} layouts")


def _empty(dtype: Any) -> _Maker:
    return _maker((dtype, (0,), (1,), None))


_replaced: dict[type, Callable[[Any], Any]] = {}
_install_lock = threading.Lock()
_keeps_mapped = False
"""Whether messages have the tickets of segments."""


def _reduce(tensor: Any) -> Any:
    """Pickles a tensor for another process."""
    if _unfit(tensor) is not None:
        # PyTorch's own way, which also raises PyTorch's own errors.
        return reductions.reduce_tensor(tensor)
    # The hooks of other tensors never run.
    if tensor.requires_grad:
        torch.utils.hooks.warn_if_has_hooks(tensor)
    outgoing = _threads.outgoing
    reduced = None if outgoing is None else outgoing.reduce(tensor)
    return reduced or (open, (share(tensor),))


def _begin(pickler: Any, *arguments: Any) -> None:
    """`ForkingPickler.__init__`: notes the file."""
    _methods["__init__"](pickler, *arguments)
    file = arguments[0] if arguments else None
    # The storages of a message are put before its objects, once all are known.
    pickler._highwater_file = file if type(file) is io.BytesIO else None


def _dump(pickler: Any, message: Any) -> None:
    """`ForkingPickler.dump`: names the storages of the tensors of a message together, so that they are opened together."""
    file = getattr(pickler, "_highwater_file", None)
    outgoing = None if file is None else _Outgoing()
    begin = 0 if file is None else file.tell()
    # The pickling of an object may pickle another message.
    before = _threads.outgoing
    try:
        _threads.outgoing = outgoing
        _methods["dump"](pickler, message)
    finally:
        _threads.outgoing = before
    if file is None or outgoing is None or not outgoing.exports:
        return
    header, end = outgoing.header(), file.tell()
    rest = file.getvalue()[begin:]
    file.seek(begin)
    file.write(header)
    file.write(rest)
    file.seek(end + len(header))


# The fixed fields of a message that is one tensor: the sizes of its packed layout and its ticket, the offset, and the fields of a `_Shared` without
# its ticket. After the fixed fields come the packed layout, the ticket, and the ticket of the segment, which may be empty.
_TENSOR = struct.Struct("<IIQIQ16sQQ")
_BEFORE_TENSOR = b"".join((pickle.PROTO, b"\x03", pickle.GLOBAL, f"{__name__}\n_receive_tensor\n".encode(), pickle.BINBYTES))
_AFTER_TENSOR = pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


def _dumps(kind: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
    """`ForkingPickler.dumps`: writes a message that is one tensor directly, because a pickler is slow."""
    is_tensor = kind is ForkingPickler and _reducers().get(type(obj)) is _reduce and _unfit(obj) is None
    if not is_tensor or arguments or named or not _is_unchanged():
        original = _methods["dumps"]
        return (original.__get__(None, kind) if hasattr(original, "__get__") else original)(obj, *arguments, **named)
    if obj.requires_grad:
        torch.utils.hooks.warn_if_has_hooks(obj)
    layout, offset = _packed(*_seen(obj)), obj.storage_offset()
    state, storage = _current(), obj.untyped_storage()
    device, nbytes, ticket, exporter, serial, token = state.share(storage, obj.device.index, 1)
    segment = state.segment_ticket(storage, device, ticket, exporter) if _keeps_mapped else b""
    fields = _TENSOR.pack(len(layout), len(ticket), offset, device, nbytes, exporter, serial, token)
    length = (len(fields) + len(layout) + len(ticket) + len(segment)).to_bytes(4, "little")
    return memoryview(bytearray().join((_BEFORE_TENSOR, length, fields, layout, ticket, segment, _AFTER_TENSOR)))


def _is_unchanged() -> bool:
    """Whether no other library has changed how `ForkingPickler` pickles."""
    now = vars(ForkingPickler)
    is_own = now["__init__"] is _begin and now.get("dump") is _dump
    return is_own and _replaces_pythons and "reducer_override" not in now and "persistent_id" not in now


def _receive_tensor(fields: bytes) -> Any:
    """Opens a message that is one tensor."""
    layout_size, ticket_size, offset, device, nbytes, exporter, serial, token = _TENSOR.unpack_from(fields)
    begin = _TENSOR.size + layout_size
    end = begin + ticket_size
    maker = _unpacked(fields[_TENSOR.size : begin])
    tensor = _opened(maker, offset, (device, nbytes, fields[begin:end], exporter, serial, token))
    # After the open, which fails if the exporter does not answer.
    if len(fields) > end:
        _current().keep_mapped(exporter, fields[end:])
    return tensor


@functools.lru_cache(maxsize=1024)
def _packed(*seen: Any) -> bytes:
    return pickle.dumps(_layout(*seen))


@functools.lru_cache(maxsize=1024)
def _unpacked(layout: bytes) -> _Maker:
    return _maker(pickle.loads(layout))


_replacements: dict[str, Any] = {"__init__": _begin, "dump": _dump, "dumps": classmethod(_dumps)}


def _method(name: str) -> Any:
    return vars(ForkingPickler).get(name, getattr(pickle.Pickler, name, None))


_methods: dict[str, Any] = {name: _method(name) for name in _replacements}
"""The methods before the installation."""
_installed: set[str] = set()
_replaces_pythons = False
"""Whether all of `_methods` are Python's own."""


def _is_pythons(name: str) -> bool:
    method = _methods[name]
    function = getattr(method, "__func__", method)
    is_of_module = getattr(function, "__globals__", None) is vars(multiprocessing.reduction)
    return is_of_module or method is getattr(pickle.Pickler, name, None)


def install_reducers(*, unopened_seconds: float = UNOPENED_SECONDS, keep_mapped: bool = False) -> None:
    """Makes `torch.multiprocessing` send CUDA tensors by tickets from this process.

    A process needs the call to send, and not to receive. Other tensors, such as those of the CPU, go PyTorch's way. A later call
    only changes the arguments. A message that no process receives keeps the memory of its tensors for `unopened_seconds`.

    With `keep_mapped`, receivers keep the segments of PyTorch's allocator mapped until PyTorch frees them, as `torch.cuda.empty_cache` does. New
    tensors arrive faster then, because PyTorch reuses its segments. A free of a segment waits until running receivers have unmapped it, at most 10
    seconds. The call initializes CUDA and opens the runtime. The first one on a machine compiles a small C++ file, as `install_host_allocator` does.

    Start processes with `spawn` or `forkserver`. In a child of `fork`, tensors raise `Forked`.

    With `keep_mapped`, raises `Unsupported` without PyTorch 2.11 for CUDA, its default allocator, or a compiler. Raises `OperatingSystem` if the
    compiler fails, and the errors of `runtime`.
    """
    if not 0 <= unopened_seconds < float("inf"):
        raise InvalidArgument(
            "InvalidArgument", "install_reducers", f"unopened_seconds is {unopened_seconds}", None, "pass a finite number, at least 0"
        )
    global _unopened_seconds, _keeps_mapped, _replaces_pythons
    with _install_lock:
        if keep_mapped:
            _watch_segments()
        _unopened_seconds, _keeps_mapped = unopened_seconds, keep_mapped
        for kind, reducer in list(_reducers().items()):
            if reducer is reductions.reduce_tensor:
                _replaced[kind] = reducer
                ForkingPickler.register(kind, _reduce)
        for name, replacement in _replacements.items():
            # Another library may have wrapped the replacement meanwhile. It then calls it.
            if name not in _installed:
                _methods[name] = _method(name)
                setattr(ForkingPickler, name, replacement)
                _installed.add(name)
        _replaces_pythons = all(map(_is_pythons, _replacements))


def uninstall_reducers() -> None:
    """Makes `torch.multiprocessing` send CUDA tensors in PyTorch's own way again. Tickets that were sent stay valid."""
    global _keeps_mapped
    with _install_lock:
        _keeps_mapped = False
        for kind, reducer in _replaced.items():
            # Another library may have replaced the reducer meanwhile.
            if _reducers().get(kind) is _reduce:
                ForkingPickler.register(kind, reducer)
        _replaced.clear()
        for name, replacement in _replacements.items():
            if _method(name) is not replacement:
                continue
            if getattr(pickle.Pickler, name, None) is _methods[name]:
                delattr(ForkingPickler, name)
            else:
                setattr(ForkingPickler, name, _methods[name])
            _installed.discard(name)


def _reducers() -> dict[type, Callable[[Any], Any]]:
    found: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    return found


def collect() -> None:
    """Releases the memory of sent tensors that no process needs. A thread of this module does the same regularly."""
    if _state is not None:
        state = _current()
        state.land(state.receipts.take(0.0))
        state.sweep()


def kept_bytes() -> int:
    """Returns the bytes of all storages that this process shares, or has dropped while other processes have them open."""
    state = _state
    if state is None:
        return 0
    with state.lock:
        keeps = [reference() for reference in list(state.keeps)]
    return sum(keep.storage.nbytes() for keep in keeps if keep is not None)


_allocators: list[Any] = []


def MemPool() -> Any:
    """Returns a `torch.cuda.MemPool` whose memory comes from Highwater's device memory, and which other processes can open.

    PyTorch allocates from it inside `torch.cuda.use_mem_pool(pool)`, and caches its blocks as always. `share` and the reducers of
    `install_reducers` send tensors of the pool. PyTorch's own way may not know such memory.

    Raises `Unsupported` for a PyTorch without `torch.cuda.MemPool`, and the errors of `runtime`. If the device has no memory left,
    PyTorch raises `torch.OutOfMemoryError`, and `last_allocation_failure` returns Highwater's reason.
    """
    kind = getattr(torch.cuda, "MemPool", None)
    if kind is None:
        raise Unsupported("Unsupported", "MemPool", "this PyTorch has no torch.cuda.MemPool", None, "use PyTorch 2.5 or newer")
    runtime()
    # PyTorch keeps no reference to the allocator, and uses it for as long as a block of it lives.
    if not _allocators:
        library = _highwater.__file__
        _allocators.append(torch.cuda.memory.CUDAPluggableAllocator(library, "highwater_torch_alloc", "highwater_torch_free"))
    return kind(_allocators[0].allocator())


def last_allocation_failure() -> str | None:
    """Returns the text of the last failed allocation for a `MemPool` or a page-locked tensor of this process. `None` if none failed."""
    return _highwater.last_failure()


_HOST_SOURCE = pathlib.Path(__file__).with_name("_torch_host.cpp")
_SEGMENTS_SOURCE = _HOST_SOURCE.with_name("_torch_segments.cpp")
_host_library: Any = None
_segments_library: Any = None


def install_host_allocator() -> None:
    """Puts Highwater's pool of page-locked memory behind `torch.empty(.., pin_memory=True)`, `Tensor.pin_memory` and `DataLoader`.

    The allocator stays until the process ends. Tensors that were allocated before keep PyTorch's allocator. It also allocates tensors of more
    than one registration of the device, which is 64 MiB with CUDA. The first call on a machine compiles a small C++ file for the installed
    PyTorch, and keeps the result in `~/.cache/highwater`, or under `XDG_CACHE_HOME`. It needs a C++17 compiler: `c++`, or the command in the
    variable `CXX`. No other thread may allocate page-locked memory during the call.

    `torch.cuda.host_memory_stats` then has the pool's counts. Memory that a CUDA graph of PyTorch copies from or to is not reused before
    the process ends.

    Raises `Unsupported` for a PyTorch other than 2.11 and without a compiler, `OperatingSystem` if the compiler fails, and the
    errors of `runtime`.
    """
    global _host_library
    with _install_lock:
        if _host_library is not None:
            return
        operation = "install_host_allocator"
        version = _checked_version(operation, "use PyTorch 2.11, or its own allocator")
        _highwater.standing_runtime(_backend())
        library = _loaded(operation, _HOST_SOURCE)
        functions = (ctypes.c_void_p * 7)(*_highwater.host_functions())
        library.highwater_install_host_allocator.restype = ctypes.c_bool
        if not library.highwater_install_host_allocator(functions):
            message = f"PyTorch {version} was built without CUDA and ROCm"
            raise Unsupported("Unsupported", operation, message, None, "use a PyTorch for CUDA or ROCm")
        _host_library = library


def _checked_version(operation: str, hint: str) -> str:
    """Returns the version of PyTorch. Raises `Unsupported` unless it is 2.11, whose interface of allocators this module knows."""
    version = str(torch.__version__)
    if version.split(".")[:2] != ["2", "11"]:
        message = f"PyTorch {version} has another interface of allocators"
        raise Unsupported("Unsupported", operation, message, None, hint)
    return version


def _watch_segments() -> None:
    """Makes PyTorch report the segments that it frees. The caller must hold `_install_lock`."""
    global _segments_library
    if _segments_library is not None:
        return
    operation, hint = "install_reducers", "use PyTorch 2.11 for CUDA with its default allocator, or omit `keep_mapped`"
    version = _checked_version(operation, hint)
    if torch.version.cuda is None:
        raise Unsupported("Unsupported", operation, f"PyTorch {version} was built without CUDA", None, hint)
    headers = str(_SEGMENTS_SOURCE.with_name("_cuda"))
    library = _loaded(operation, _SEGMENTS_SOURCE, "-isystem", headers, "-lc10_cuda")
    # This initializes CUDA, so PyTorch's allocator exists.
    _current()
    library.highwater_watch_segments.restype = ctypes.c_bool
    freed = _highwater.segment_freed_function(ctypes.cast(library.highwater_segment_of, ctypes.c_void_p).value or 0)
    if not library.highwater_watch_segments(ctypes.c_void_p(freed)):
        raise Unsupported("Unsupported", operation, "PyTorch's allocator does not report the segments that it frees", None, hint)
    _segments_library = library


def _loaded(operation: str, source: pathlib.Path, *further: str) -> ctypes.CDLL:
    """Loads the library of a C++ file. Compiles the file again if its library is damaged."""
    path = _compiled(operation, source, *further)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(path))
    path.unlink(missing_ok=True)
    return ctypes.CDLL(str(_compiled(operation, source, *further)))


def _compiled(operation: str, source: pathlib.Path, *further: str) -> pathlib.Path:
    """Compiles a C++ file against the installed PyTorch, with further options. Returns the library, which later processes find."""
    root = pathlib.Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    options += ["-isystem", str(root / "include"), "-L", str(root / "lib"), "-ltorch_cpu", "-lc10", *further]
    command = shlex.split(os.environ.get("CXX") or "c++")
    if not command or shutil.which(command[0]) is None:
        message = f"there is no C++ compiler {' '.join(command)!r}"
        raise Unsupported("Unsupported", operation, message, None, "install g++ or clang, or set CXX to a compiler")
    made_of = "\0".join([torch.__version__, *command, *options]).encode() + source.read_bytes()
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "highwater"
    library = folder / f"{source.stem}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if library.exists():
            return library
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = pathlib.Path(scratch) / library.name
            # The libraries come after the source that needs them.
            done = subprocess.run([*command, str(source), *options, "-o", str(made)], capture_output=True, text=True)
            if done.returncode != 0:
                printed = done.stderr.strip()[-1000:] or "it printed nothing"
                message = f"{' '.join(command)} cannot compile {source.name} for PyTorch {torch.__version__}: {printed}"
                hint = "use a compiler with C++17, and the headers that PyTorch's wheel has"
                raise OperatingSystem("OperatingSystem", operation, message, done.returncode, hint)
            # A crash of the system must not leave a file that is cut.
            with made.open("rb") as file:
                os.fsync(file)
            # Another process may do the same.
            made.replace(library)
    except OSError as error:
        message, hint = f"the folder {folder} cannot be used: {error}", "set XDG_CACHE_HOME to a folder that can be written to"
        raise OperatingSystem("OperatingSystem", operation, message, error.errno, hint) from error
    return library
