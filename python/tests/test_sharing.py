"""Device memory that processes share, also after one of them was killed."""

from __future__ import annotations

import multiprocessing
import pickle
import select
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import highwater
from conftest import BACKEND, Child
from conftest import until as until

PRODUCER = """
import sys, pickle, highwater
runtime = highwater.open(sys.argv[1])
stream = runtime.device(0).create_stream()
buffer = runtime.device(0).allocate_shared((25, 40), "float32")
stream.fill(buffer, 0.5)
print(pickle.dumps(buffer.share()).hex(), flush=True)
for line in sys.stdin:
    stream.fill(buffer, float(line))
    stream.synchronize()
    print("done", flush=True)
"""

CONSUMER = """
import sys, pickle, highwater
runtime = highwater.open(sys.argv[1])
stream = runtime.device(0).create_stream()
for line in sys.stdin:
    buffer = runtime.open_shared(pickle.loads(bytes.fromhex(line)))
    print(stream.download(buffer).sum(), flush=True)
"""


def test_a_process_opens_the_memory_of_another(
    runtime: highwater.Runtime, stream: highwater.Stream, child: Callable[[str], Child]
) -> None:
    producer = child(PRODUCER)
    ticket = pickle.loads(bytes.fromhex(producer.read()))
    assert (ticket.shape, ticket.dtype, ticket.nbytes) == ((25, 40), "float32", 4000)
    assert ticket.exporter_pid == producer.process.pid and ticket.to_bytes().hex() not in repr(ticket)
    buffer = runtime.open_shared(ticket)
    assert np.array_equal(stream.download(buffer), np.full((25, 40), 0.5))
    producer.write("2.0")
    assert producer.read() == "done" and np.array_equal(stream.download(buffer), np.full((25, 40), 2))
    owner = buffer.owner
    assert owner is not None and owner.pid == producer.process.pid and owner.is_alive and not owner.wait(0)
    for time_that_is_none in (-1.0, float("nan")):
        with pytest.raises(ValueError):
            owner.wait(time_that_is_none)


def test_a_killed_producer_is_noticed_and_its_memory_stays(
    runtime: highwater.Runtime, stream: highwater.Stream, child: Callable[[str], Child]
) -> None:
    producer = child(PRODUCER)
    ticket = pickle.loads(bytes.fromhex(producer.read()))
    buffer = runtime.open_shared(ticket)
    owner = buffer.owner
    assert owner is not None
    assert select.select([owner], [], [], 0)[0] == []
    producer.kill()
    assert select.select([owner], [], [], 20)[0] == [owner]
    assert owner.wait(20) and not owner.is_alive
    assert np.array_equal(stream.download(buffer), np.full((25, 40), 0.5))
    # This runtime may still have the mapping, and opens it again.
    with pytest.raises((highwater.Expired, highwater.PeerLost)):
        highwater.open(BACKEND).open_shared(ticket)


def test_memory_of_a_killed_producer_is_released_on_request(
    runtime: highwater.Runtime, stream: highwater.Stream, child: Callable[[str], Child]
) -> None:
    producer = child(PRODUCER)
    buffer = runtime.open_shared(pickle.loads(bytes.fromhex(producer.read())), owner_death="release")
    producer.kill()

    def is_released() -> bool:
        try:
            stream.download(buffer)
        except highwater.Expired:
            return True
        return False

    until(is_released)


def test_a_killed_consumer_keeps_nothing(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream, child: Callable[[str], Child]
) -> None:
    buffer = device.allocate_shared(1000, np.float32)
    stream.fill(buffer, 1.5)
    consumers = [child(CONSUMER) for _ in range(2)]
    for consumer in consumers:
        consumer.write(pickle.dumps(buffer.share()).hex())
    assert [float(consumer.read()) for consumer in consumers] == [1500, 1500]
    consumers[0].kill()
    until(lambda: runtime.statistics().sharing.lost_peers == 1)
    assert np.array_equal(stream.download(buffer), np.full(1000, 1.5))
    del buffer
    assert runtime.statistics().sharing.limbo_blocks == 1  # The living consumer has it.
    consumers[1].kill()
    until(lambda: runtime.statistics().sharing.limbo_blocks == 0)
    assert runtime.statistics().sharing.exported_bytes == 0


OF_BATCHES = """
import sys, pickle, highwater
runtime = highwater.open(sys.argv[1])
stream = runtime.device(0).create_stream()
for line in sys.stdin:
    buffers = runtime.open_shared_all(pickle.loads(bytes.fromhex(line)))
    print([(buffer.shape, buffer.dtype, stream.download(buffer).sum().item()) for buffer in buffers], flush=True)
"""


def test_a_batch_opens_many_buffers(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream, child: Callable[[str], Child]
) -> None:
    first, second = device.allocate_shared((2, 3), "float32"), device.allocate_shared(4, "int64")
    stream.fill(first, 0.5)
    stream.write([1, 2, 3, 4], second)
    batch = runtime.share_all([first, second, first])
    assert (len(batch), batch.allocations) == (3, 2) and batch.to_bytes().hex() not in repr(batch)
    consumer = child(OF_BATCHES)
    consumer.write(pickle.dumps(batch).hex())
    assert consumer.read() == "[((2, 3), 'float32', 3.0), ((4,), 'int64', 10), ((2, 3), 'float32', 3.0)]"
    # Here, they are the originals.
    again = runtime.open_shared_all(batch)
    stream.fill(again[2], 2.0)
    assert np.array_equal(stream.download(first), np.full((2, 3), 2))
    with pytest.raises(highwater.InvalidArgument, match="buffer 1"):
        runtime.share_all([first, device.allocate(4, "int64")])
    wrong: list[Any] = [[], [((2, 3), "float32"), (5, "int64"), ((2, 3), "float32")]]
    for kinds in wrong:
        with pytest.raises(highwater.InvalidArgument):
            highwater.TicketBatch(batch.to_bytes(), kinds)
    with pytest.raises(highwater.InvalidArgument):
        highwater.TicketBatch(batch.to_bytes()[:-1], batch.kinds)


def consume(queue: Any, results: Any) -> None:
    with highwater.open(BACKEND) as runtime:
        stream = runtime.device(0).create_stream()
        results.put(float(stream.download(runtime.open_shared(queue.get())).sum()))


def test_tickets_go_through_queues(device: highwater.Device, stream: highwater.Stream) -> None:
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    process = context.Process(target=consume, args=(queue, results))
    process.start()
    buffer = device.allocate_shared(100, "float64")
    stream.write(np.full(100, 2.0), buffer)
    queue.put(buffer.share())
    assert results.get(timeout=60) == 200
    process.join()


def test_a_ticket_of_this_runtime_opens_the_original(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream
) -> None:
    buffer = device.allocate_shared((2, 4), "int16")
    ticket = buffer.share()
    again = runtime.open_shared(highwater.Ticket(ticket.to_bytes(), (2, 4), "int16"))
    stream.write([[1, 2, 3, 4], [5, 6, 7, 8]], buffer)
    assert np.array_equal(stream.download(again), [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert again.owner is None and ticket.device_uuid == device.uuid


def test_memory_of_other_code_is_shared_and_kept(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream, child: Callable[[str], Child]
) -> None:
    class Keep:
        def __init__(self, memory: highwater.Buffer) -> None:
            self.memory = memory

    # The memory of a buffer, as that of any library.
    keep = Keep(device.allocate_shared(1000, "float32"))
    gone = weakref.ref(keep)
    adopted = device.adopt(keep.memory.ptr + 400, (30, 30), "float32", keep)
    del keep
    stream.note_device_use(adopted)
    stream.fill(adopted, 2.5)
    ticket = adopted.share()
    consumer = child(CONSUMER)
    consumer.write(pickle.dumps(ticket).hex())
    assert float(consumer.read()) == 2250 and gone() is not None
    del adopted
    assert gone() is not None  # The consumer has it open.
    consumer.kill()
    # A thread of the library drops it. Python hears of that with the next call.
    until(lambda: runtime.statistics().sharing.limbo_blocks == 0 and gone() is None)
    with pytest.raises(highwater.InvalidPointer):
        device.adopt(0, 4, "float32", None)
    with pytest.raises(highwater.InvalidArgument):
        device.adopt(stream.upload([1.0]).ptr, 0, "float32", None)
