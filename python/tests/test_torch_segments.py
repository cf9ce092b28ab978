"""Segments of PyTorch's allocator that receivers keep mapped. Needs the simulated CUDA, or PyTorch and a CUDA device."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

import highwater
from conftest import BACKEND
from highwater import _highwater
from test_sharing import until
from test_torch_reducers import LENGTH, Worker, fields_of, hwt, nothing_is_kept
from torch_here import IS_REAL, torch

pytestmark = pytest.mark.skipif(BACKEND != "cuda", reason="the mock has no memory that a receiver must unmap before it is freed")

HALF = (12 if IS_REAL else 1) << 20
DRIVER = ctypes.CDLL("libcuda.so.1") if BACKEND == "cuda" else None


def load_shim() -> Any:
    library = ctypes.CDLL(os.path.join(os.environ["HIGHWATER_STANDIN"], "lib", "libtorch_cpu.so"))
    library.standin_add_segment.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.standin_free_segment.argtypes = [ctypes.c_uint64]
    return library


SHIM: Any = None if IS_REAL or BACKEND != "cuda" else load_shim()


def call_driver(name: str, *arguments: Any) -> None:
    context = ctypes.c_void_p()
    assert DRIVER is not None
    hwt.runtime()
    assert DRIVER.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert DRIVER.cuCtxPushCurrent_v2(context) == 0
    assert getattr(DRIVER, name)(*arguments) == 0
    assert DRIVER.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0


def allocate_past_pytorch() -> int:
    address = ctypes.c_uint64()
    call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(2 * HALF))
    return address.value


class Segment:
    """A segment of two tensors. On the simulated CUDA, the test allocates and frees it as PyTorch does."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        if IS_REAL:
            torch.cuda.empty_cache()
            torch.empty(2 * HALF, dtype=torch.uint8, device="cuda")
            self.tensors = [torch.full((HALF // 4,), float(place), device="cuda") for place in range(2)]
            assert self.tensors[1].data_ptr() - self.tensors[0].data_ptr() == HALF
            return
        self.address = allocate_past_pytorch()
        SHIM.standin_add_segment(self.address, 2 * HALF)
        for place in range(2):
            buffer = hwt.runtime().device(0).adopt(self.address + place * HALF, HALF, "uint8", None)
            storage = torch.UntypedStorage(HALF, buffer)
            self.tensors.append(torch.Tensor(storage, torch.float32, (HALF // 4,), (1,), 0).fill_(float(place)))

    def message(self, place: int) -> bytes:
        return bytes(ForkingPickler.dumps(self.tensors[place]))

    def free(self) -> float:
        """Frees the segment. Returns the seconds that it took."""
        begin = time.monotonic()
        if IS_REAL:
            torch.cuda.empty_cache()
        else:
            SHIM.standin_free_segment(self.address)
        end = time.monotonic()
        if not IS_REAL:
            call_driver("cuMemFree_v2", ctypes.c_uint64(self.address))
        return end - begin


def drop(*segments: Segment) -> None:
    """Drops the tensors of segments, and waits until nothing uses them."""
    for segment in segments:
        segment.tensors.clear()
    until(nothing_is_kept)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.kill()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not IS_REAL:
        monkeypatch.setattr(hwt, "_segments_library", None)
        monkeypatch.setattr(hwt, "_loaded", lambda *_: SHIM)
        monkeypatch.setattr(torch, "__version__", "2.11.0")
        monkeypatch.setattr(torch.version, "cuda", "13.0", raising=False)
    hwt.install_reducers(keep_mapped=True)
    yield
    hwt.uninstall_reducers()


def test_another_version_of_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hwt, "_segments_library", None)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(highwater.Unsupported, match="PyTorch 2.10.0 has another interface") as caught:
        hwt.install_reducers(keep_mapped=True, unopened_seconds=7)
    assert "keep_mapped" in str(caught.value)
    # Nothing has changed.
    assert hwt._keeps_mapped and hwt._unopened_seconds == 60


def first(worker: Worker, message: bytes) -> Any:
    """The first value of the tensor of a message, which the receiver drops again."""
    return worker.ask("read_first", message)


def test_a_mapping_stays_until_the_segment_is_freed(worker: Worker) -> None:
    segment = Segment()
    assert worker.ask("mappings") == 0
    # The first tensor maps itself and its segment. The second adds one mapping.
    assert first(worker, segment.message(0)) == 0.0
    assert worker.ask("mappings") == 2
    assert first(worker, segment.message(1)) == 1.0
    assert worker.ask("mappings") == 3
    # The mappings of the tensors have ended. That of the segment stays.
    drop(segment)
    until(lambda: worker.ask("mappings") == 1)
    segment.free()
    # The free has waited for it.
    assert worker.ask("mappings") == 0


def test_without_the_argument_nothing_stays_mapped(worker: Worker) -> None:
    hwt.install_reducers()
    segment = Segment()
    message = segment.message(0)
    assert segment_at(message) == len(message) - len(hwt._AFTER_TENSOR)
    assert first(worker, message) == 0.0
    assert worker.ask("mappings") == 1
    drop(segment)
    until(lambda: worker.ask("mappings") == 0)
    segment.free()


def test_the_next_segment_at_an_address_is_mapped_anew(worker: Worker) -> None:
    for _ in range(3):
        segment = Segment()
        for place in (0, 1, 0):
            assert first(worker, segment.message(place)) == float(place)
        drop(segment)
        segment.free()
        assert worker.ask("mappings") == 0


def test_uninstall_leaves_the_mappings_until_the_free(worker: Worker) -> None:
    segment = Segment()
    assert first(worker, segment.message(1)) == 1.0
    hwt.uninstall_reducers()
    drop(segment)
    until(lambda: worker.ask("mappings") == 1)
    segment.free()
    assert worker.ask("mappings") == 0


def test_a_segment_that_was_trimmed_is_mapped_again_after_a_time(worker: Worker) -> None:
    segment = Segment()
    worker.ask("forget_mapped")
    assert first(worker, segment.message(0)) == 0.0
    worker.ask("trim")
    assert worker.ask("mappings") == 0
    assert first(worker, segment.message(0)) == 0.0
    assert worker.ask("mappings") == 1
    worker.ask("forget_mapped")
    assert first(worker, segment.message(0)) == 0.0
    assert worker.ask("mappings") == 2
    drop(segment)
    segment.free()
    assert worker.ask("mappings") == 0


def test_a_stopped_receiver_delays_no_free(worker: Worker) -> None:
    stopped = Worker()
    try:
        segments = [Segment() for _ in range(6)]
        for segment in segments:
            assert first(stopped, segment.message(0)) == 0.0
        # The running one has each second segment mapped, too.
        for segment in segments[::2]:
            assert first(worker, segment.message(0)) == 0.0
        drop(*segments)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        took = [segment.free() for segment in segments]
        assert max(took) < 0.5, took
        assert worker.ask("mappings") == 0
        os.kill(stopped.process.pid, signal.SIGCONT)
        until(lambda: stopped.ask("mappings") == 0)
    finally:
        stopped.kill()


def test_a_free_waits_for_a_receiver_whose_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver may unmap only once the work of the receiver is done.
    monkeypatch.setenv("HIGHWATER_MOCK", "latency=40ms")
    busy = Worker()
    try:
        segments = [Segment() for _ in range(3)]
        for segment in segments:
            assert first(busy, segment.message(0)) == 0.0
        drop(*segments)
        busy.ask("make_busy")
        for segment in segments:
            segment.free()
        assert busy.ask("mappings") == 0
    finally:
        busy.kill()


def test_a_killed_receiver_delays_no_free(worker: Worker) -> None:
    killed = Worker()
    segment = Segment()
    assert first(killed, segment.message(0)) == 0.0
    before = hwt.runtime().statistics().sharing.lost_peers
    killed.kill()
    until(lambda: hwt.runtime().statistics().sharing.lost_peers > before)
    drop(segment)
    assert segment.free() < 0.4


def segment_at(message: bytes) -> int:
    """The place of a segment's ticket in a message."""
    fields = fields_of(message)
    return len(hwt._BEFORE_TENSOR) + 4 + int(hwt._TENSOR.size + fields["layout_size"] + fields["ticket_size"])


def test_a_message_with_a_ticket_of_no_segment_opens(worker: Worker) -> None:
    segment, freed = Segment(), Segment()
    message, other = segment.message(0), freed.message(1)
    assert first(worker, other) == 1.0
    freed.tensors.clear()
    until(lambda: hwt.kept_bytes() == HALF or hwt.collect())
    freed.free()
    begin, end = len(hwt._BEFORE_TENSOR), segment_at(message)
    # A wrong ticket of a segment is ignored, because the mapping only saves time.
    for ticket in (other[segment_at(other) : -len(hwt._AFTER_TENSOR)], os.urandom(136), b"x", b""):
        body = message[begin + 4 : end] + ticket
        changed = message[:begin] + struct.pack("<I", len(body)) + body + hwt._AFTER_TENSOR
        assert first(worker, changed) == 0.0
    assert worker.ask("mappings") == 1
    drop(segment)
    segment.free()


def test_memory_of_another_library_is_not_kept_mapped(worker: Worker) -> None:
    address = allocate_past_pytorch()
    buffer = hwt.runtime().device(0).adopt(address, HALF, "uint8", None)
    if IS_REAL:
        tensor = torch.from_dlpack(buffer)
    else:
        tensor = torch.Tensor(torch.UntypedStorage(HALF, buffer), torch.uint8, (HALF,), (1,), 0)
    message = bytes(ForkingPickler.dumps(tensor))
    assert segment_at(message) == len(message) - len(hwt._AFTER_TENSOR)
    first(worker, message)
    assert worker.ask("mappings") == 1
    del tensor, buffer
    until(nothing_is_kept)
    until(lambda: worker.ask("mappings") == 0)
    call_driver("cuMemFree_v2", ctypes.c_uint64(address))


def test_memory_that_may_be_freed_under_a_mapping_is_not_kept_mapped(worker: Worker) -> None:
    if IS_REAL:
        with torch.cuda.use_mem_pool(hwt.MemPool()):
            tensor = torch.zeros(LENGTH, device="cuda")
    else:
        # The memory has a descriptor, which keeps it.
        tensor = torch.tensor([0.0] * LENGTH, device="cuda")
        SHIM.standin_add_segment(tensor.data_ptr(), 4 * LENGTH)
    message = bytes(ForkingPickler.dumps(tensor))
    assert segment_at(message) == len(message) - len(hwt._AFTER_TENSOR)
    assert first(worker, message) == 0.0
    if not IS_REAL:
        SHIM.standin_free_segment(tensor.data_ptr())
    del tensor
    until(nothing_is_kept)
    until(lambda: worker.ask("mappings") == 0)


def test_the_segments_of_a_message_of_many_tensors_stay_mapped(worker: Worker) -> None:
    segments = [Segment() for _ in range(3)]
    tensors = [tensor for segment in segments for tensor in segment.tensors]
    for _ in range(2):
        message = bytes(ForkingPickler.dumps([*tensors, tensors[0]]))
        assert worker.ask("read_firsts", message) == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
        assert worker.ask("mappings") == 9
    del tensors
    drop(*segments)
    until(lambda: worker.ask("mappings") == 3)
    for segment in segments:
        segment.free()
    assert worker.ask("mappings") == 0


def test_a_segment_that_cannot_be_mapped_ends_the_attempts_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [Segment() for _ in range(3)]
    message = bytes(ForkingPickler.dumps([segment.tensors[0] for segment in segments]))
    tried: list[bytes] = []

    def fail(_: Any, __: bytes, ticket: bytes) -> bool:
        tried.append(ticket)
        return False

    monkeypatch.setattr(hwt._State, "keep_mapped", fail)
    assert len(ForkingPickler.loads(message)) == 3
    assert len(tried) == 1 and tried[0] in message
    drop(*segments)
    for segment in segments:
        segment.free()


def test_a_damaged_number_of_segments_is_refused_at_once() -> None:
    segments = [Segment() for _ in range(2)]
    message = bytes(ForkingPickler.dumps([segment.tensors[0] for segment in segments]))
    place = len(hwt._BEFORE_FIELDS) + 4 + hwt._FIELDS.size - 4
    assert message[place : place + 4] == struct.pack("<I", 2)
    begin = time.monotonic()
    for number in (0, 1, 3, 3_000_000, 0xFFFF_FFFF):
        with pytest.raises(highwater.Error):
            ForkingPickler.loads(message[:place] + struct.pack("<I", number) + message[place + 4 :])
    assert time.monotonic() - begin < 1
    ForkingPickler.loads(message)
    drop(*segments)
    for segment in segments:
        segment.free()


def test_threads_send_tensors_of_new_segments_at_once(worker: Worker) -> None:
    segments = [Segment() for _ in range(4)]
    messages: list[bytes] = []

    def send(number: int) -> None:
        for place in (0, 1):
            for segment in segments:
                messages.append(segment.message(place if number % 2 else 1 - place))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for message in messages:
        first(worker, message)
    # Each of the segments once, beside each of the tensors.
    assert worker.ask("mappings") == 12
    drop(*segments)
    for segment in segments:
        segment.free()
    assert worker.ask("mappings") == 0


def test_a_free_in_a_child_of_fork_touches_nothing(worker: Worker) -> None:
    segment = Segment()
    assert first(worker, segment.message(0)) == 0.0
    child = os.fork()
    if child == 0:
        hwt.install_reducers(keep_mapped=True)
        segment_of = ctypes.cast(hwt._segments_library.highwater_segment_of, ctypes.c_void_p).value
        freed = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(_highwater.segment_freed_function(segment_of or 0))
        freed(segment.tensors[0].data_ptr())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.ask("mappings") == 2
    drop(segment)
    segment.free()
    assert worker.ask("mappings") == 0
