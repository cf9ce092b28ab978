"""Bad input raises an `Error`, or an exception of Python, and never panics: the exception of a panic is no `Exception`."""

from __future__ import annotations

import copy
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import highwater
from conftest import BACKEND


def test_an_error_has_the_kind_and_the_hint_of_the_library() -> None:
    with pytest.raises(highwater.UnknownBackend) as caught:
        highwater.open("metal")
    error = caught.value
    assert error.kind == "UnknownBackend" and error.operation == "open" and "metal" in error.message and error.hint
    assert not error.is_temporary and error.code is None
    assert error.message in str(error) and error.hint in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and vars(again) == vars(error) and vars(copy.copy(error)) == vars(error)


def test_memory_that_is_exhausted_is_a_memory_error(device: highwater.Device) -> None:
    with pytest.raises(MemoryError) as caught:
        device.allocate(1 << 45, "uint8")
    assert isinstance(caught.value, highwater.OutOfMemory) and caught.value.is_temporary


Call = Callable[[highwater.Runtime, highwater.Device, highwater.Stream, highwater.Buffer], Any]
BAD: dict[str, Call] = {
    "no device": lambda r, d, s, b: r.device(99),
    "negative device": lambda r, d, s, b: r.device(-1),
    "negative shape": lambda r, d, s, b: d.allocate((2, -1), "float32"),
    "huge shape": lambda r, d, s, b: d.allocate((1 << 40, 1 << 40), "float32"),
    "shape of bytes beyond the address space": lambda r, d, s, b: r.pinned(1 << 62, "float64"),
    "shape above 64 bits": lambda r, d, s, b: r.pinned(1 << 70, "float64"),
    "huge pinned": lambda r, d, s, b: r.pinned(1 << 60, "uint8"),
    "no shape": lambda r, d, s, b: d.allocate(None, "float32"),  # type: ignore[arg-type]
    "shape of text": lambda r, d, s, b: d.allocate("ab", "float32"),  # type: ignore[arg-type]
    "unknown type": lambda r, d, s, b: d.allocate(4, "float8"),
    "type of objects": lambda r, d, s, b: d.allocate(4, object),
    "no type": lambda r, d, s, b: d.allocate(4, None),
    "upload of objects": lambda r, d, s, b: s.upload([object()]),  # type: ignore[arg-type]
    "upload of text": lambda r, d, s, b: s.upload(["a"]),
    "upload of ragged lists": lambda r, d, s, b: s.upload([[1], [1, 2]]),
    "upload of the other byte order": lambda r, d, s, b: s.upload(np.ones(3, ">f4")),
    "upload of floats as bfloat16": lambda r, d, s, b: s.upload(np.ones(3), "bfloat16"),
    "write of another length": lambda r, d, s, b: s.write(np.ones(3, "float32"), b),
    "copy of two lengths": lambda r, d, s, b: s.copy(b, r.pinned(3, "float32")),
    "copy of two types": lambda r, d, s, b: s.copy(b, r.pinned((2, 2), "int32")),
    "copy of two page-locked": lambda r, d, s, b: s.copy(r.pinned(4, "float32"), r.pinned(4, "float32")),
    "copy of an array": lambda r, d, s, b: s.copy(np.ones(4), b),  # type: ignore[arg-type]
    "copy of rows of two shapes": lambda r, d, s, b: s.copy_2d(b, d.allocate((3, 2), "float32")),
    "copy of rows of an array": lambda r, d, s, b: s.copy_2d(np.ones((2, 2)), b),  # type: ignore[arg-type]
    "copy of rows by numbers": lambda r, d, s, b: s.copy_2d(b, d.allocate((2, 2), "float32"), (0, 1)),  # type: ignore[arg-type]
    "copy of rows of another runtime": lambda r, d, s, b: s.copy_2d(highwater.open(BACKEND).pinned((2, 2), "float32"), b),
    "fill with text": lambda r, d, s, b: s.fill(b, "a"),  # type: ignore[arg-type]
    "fill of an integer out of range": lambda r, d, s, b: s.fill(d.allocate(3, "uint8"), 256),
    "fill of an integer with a fraction": lambda r, d, s, b: s.fill(d.allocate(3, "uint8"), 0.5),
    "fill of eight bytes": lambda r, d, s, b: s.fill(d.allocate(3, "float64"), 1.0),
    "product that does not fit": lambda r, d, s, b: s.matmul(b, d.allocate((3, 2), "float32")),
    "product of vectors": lambda r, d, s, b: s.matmul(d.allocate(4, "float32"), b),
    "product of integers": lambda r, d, s, b: s.matmul(d.allocate((2, 2), "int32"), b),
    "product onto itself": lambda r, d, s, b: s.matmul(b, b, b),
    "product with beta and no result": lambda r, d, s, b: s.matmul(b, b, beta=1.0),
    "buffer of another runtime": lambda r, d, s, b: s.download(highwater.open(BACKEND).device(0).allocate(4, "float32")),
    "pinned of another runtime": lambda r, d, s, b: s.copy(highwater.open(BACKEND).pinned((2, 2), "float32"), b),
    "event of another runtime": lambda r, d, s, b: s.wait(highwater.open(BACKEND).device(0).create_stream().record()),
    "time between events without one": lambda r, d, s, b: s.record().elapsed_ns(s.record()),
    "share of plain memory": lambda r, d, s, b: b.share(),
    "ticket of no bytes": lambda r, d, s, b: highwater.Ticket(b""),
    "ticket of text": lambda r, d, s, b: highwater.Ticket("a"),  # type: ignore[arg-type]
    "ticket with another shape": lambda r, d, s, b: highwater.Ticket(d.allocate_shared(8, "uint8").share().to_bytes(), 9),
    "wish for an owner's death": lambda r, d, s, b: r.open_shared(
        d.allocate_shared(8, "uint8").share(),
        owner_death="x",  # type: ignore[arg-type]
    ),
    "fallback that is unknown": lambda r, d, s, b: highwater.open("auto", fallback="x"),  # type: ignore[arg-type]
    "length of a single value": lambda r, d, s, b: len(d.allocate((), "int8")),
    "stream of text": lambda r, d, s, b: d.stream_from_raw("a"),  # type: ignore[arg-type]
    "no tensor": lambda r, d, s, b: s.from_dlpack(3),  # type: ignore[arg-type]
    "tensor with a copy": lambda r, d, s, b: b.__dlpack__(copy=True),
    "tensor for another device": lambda r, d, s, b: b.__dlpack__(dl_device=(99, 0)),
    "pinned for another device": lambda r, d, s, b: r.pinned(4, "int8").__dlpack__(dl_device=(2, 0)),
    "stream for the memory of a CPU": lambda r, d, s, b: r.pinned(4, "int8").__dlpack__(stream=7),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_leaves_everything_usable(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream, name: str
) -> None:
    buffer = stream.upload(np.ones((2, 2), "float32"))
    with pytest.raises(Exception) as caught:
        BAD[name](runtime, device, stream, buffer)
    if isinstance(caught.value, highwater.Error):
        assert caught.value.message and caught.value.kind == type(caught.value).__name__
    assert np.array_equal(stream.download(buffer), np.ones((2, 2)))


def test_memory_that_another_library_takes_for_a_value_says_what_to_do(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream
) -> None:
    buffer, pinned = stream.upload(np.ones((2, 2), "float32")), runtime.pinned(4, "float32")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: np.asarray(buffer), "Stream.download"),
        (lambda: np.sum(buffer), "Stream.download"),
        (lambda: stream.upload(buffer), "Stream.download"),
        (lambda: pickle.dumps(buffer), "buffer.share()"),
        (lambda: copy.copy(buffer), "buffer.share()"),
        (lambda: pickle.dumps(pinned), "pinned.array"),
    ]
    for call, remedy in calls:
        with pytest.raises(TypeError, match=re.escape(remedy)):
            call()


def test_messages_of_the_library_name_functions_of_the_package(device: highwater.Device, runtime: highwater.Runtime) -> None:
    with pytest.raises(highwater.InvalidArgument, match=re.escape("`Device.default_stream`")):
        device.stream_from_raw(0)
    other = highwater.open(BACKEND)
    kept = other.device(0)
    with pytest.raises(highwater.InvalidState) as caught:
        other.close()
    assert "clones" not in caught.value.hint
    with pytest.raises(highwater.InvalidHandle, match="another opened backend"):
        runtime.device(0).create_stream().wait(kept.create_stream().record())


def test_equal_tickets_are_equal(device: highwater.Device) -> None:
    ticket = device.allocate_shared((2, 3), "float32").share()
    again = pickle.loads(pickle.dumps(ticket))
    assert again == ticket and hash(again) == hash(ticket) and len({again, ticket}) == 1
    assert ticket != highwater.Ticket(ticket.to_bytes(), 6, "float32") and ticket != 3


def test_random_tickets_are_refused(runtime: highwater.Runtime, device: highwater.Device) -> None:
    good, chance = device.allocate_shared(100, "float32").share().to_bytes(), random.Random(7)
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if bytes(data) == good:
            continue
        with pytest.raises(highwater.Error):
            runtime.open_shared(highwater.Ticket(bytes(data)))
    for length in range(len(good) + 10):
        with pytest.raises(highwater.Error):
            highwater.Ticket(os.urandom(length))


def test_a_child_of_fork_gets_errors_and_ends(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream
) -> None:
    buffer, pinned = device.allocate_shared(10, "float32"), runtime.pinned(10, "float32")
    matrix, page = device.allocate((2, 5), "float32"), runtime.pinned((2, 5), "float32")
    event, ticket = stream.record(), buffer.share()
    stream.fill(buffer, 1.0)
    exported = pinned.array  # The end of exported memory waits for the devices, which a child cannot.
    calls: list[Callable[[], Any]] = [
        lambda: runtime.pinned(10, "float32"),
        lambda: device.allocate(10, "float32"),
        device.create_stream,
        device.synchronize,
        stream.synchronize,
        lambda: stream.upload([1.0]),
        lambda: stream.download(buffer),
        lambda: stream.copy(pinned, buffer),
        lambda: stream.copy_2d(matrix, page),
        lambda: stream.fill(buffer, 0.0),
        event.synchronize,
        stream.record,
        buffer.share,
        pinned.wait,
        lambda: pinned.array,
        lambda: runtime.open_shared(ticket),
        runtime.close,
    ]
    child = os.fork()
    if child == 0:
        status = 0
        for number, call in enumerate(calls):
            try:
                call()
                status = 100 + number
            except highwater.Forked:
                pass
            except BaseException:
                status = 200 + number
            if status:
                break
        # Destructors return at once.
        del buffer, matrix, page, pinned, exported, event, stream, device, runtime, calls, call
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(stream.download(buffer), np.ones(10, "float32"))
    assert (pinned.array.shape, event.is_complete) == ((10,), True)


def test_a_program_ends_with_everything_alive() -> None:
    program = """
import sys, threading, numpy as np, highwater
runtime = highwater.open(sys.argv[1])
device = runtime.device(0)
stream = device.create_stream()
buffer, pinned = device.allocate_shared(1000, "float32"), runtime.pinned(1000, "float32")
event, ticket, array = stream.record(), buffer.share(), pinned.array
tensor, capsule = np.from_dlpack(pinned), pinned.__dlpack__()
threading.Thread(target=device.synchronize, daemon=True).start()
for _ in range(20):
    stream.copy(pinned, buffer)
"""
    run = subprocess.run([sys.executable, "-c", program, BACKEND], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
