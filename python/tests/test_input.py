"""Numbers that a type does not hold, types of the other byte order, and numbers out of range are refused by `InvalidArgument`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import highwater

REFUSED: list[tuple[str, Any]] = [
    ("int8", 300),
    ("int8", 10**400),
    ("float16", 1e6),
    ("float16", 65520.0),
    ("float32", 1e39),
    ("float32", -1e39),
    ("float32", 10**400),
    ("float32", 10**5000),
    ("float32", 1j),
    ("float32", "a"),
    ("bfloat16", 1e39),
    ("bool", 2),
    ("bool", 0.5),
    ("bool", None),
    ("bool", np.array([0, 1])),
    ("complex64", 1e39j),
    ("complex64", 1j),
    ("complex128", "a"),
    ("float64", 1.0),
]
KEPT: list[tuple[str, Any, Any]] = [
    ("float16", 65519.0, 65504.0),
    ("float32", 3.4e38, np.float32(3.4e38)),
    ("float32", np.float32(0.5), 0.5),
    ("float32", True, 1.0),
    ("float32", float("inf"), np.inf),
    ("float16", -float("inf"), -np.inf),
    ("bfloat16", 1.0, 0x3F80),
    ("bool", True, True),
    ("bool", np.bool_(False), False),
    ("bool", 1, True),
    ("int8", -128, -128),
    ("complex64", 0, 0),
]


def test_fill_refuses_numbers_that_the_type_does_not_hold(device: highwater.Device, stream: highwater.Stream) -> None:
    for dtype, value in REFUSED:
        buffer = device.allocate(1, dtype)
        with pytest.raises(highwater.InvalidArgument) as caught:
            stream.fill(buffer, value)
        assert caught.value.operation == "fill" and caught.value.hint and len(str(caught.value)) < 200, (dtype, str(value)[:20])


def test_fill_keeps_numbers_that_the_type_holds(device: highwater.Device, stream: highwater.Stream) -> None:
    for dtype, value, expected in KEPT:
        buffer = device.allocate(1, dtype)
        stream.fill(buffer, value)
        assert stream.download(buffer)[0] == expected, (dtype, value)
    buffer = device.allocate(1, "float32")
    stream.fill(buffer, float("nan"))
    assert np.isnan(stream.download(buffer)[0])


def test_types_of_the_other_byte_order_are_refused(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream
) -> None:
    other = np.dtype(">f4")
    ticket = device.allocate_shared(1, "float32").share().to_bytes()
    calls: list[Callable[[], Any]] = [
        lambda: runtime.pinned(3, other),
        lambda: device.pinned(3, other),
        lambda: device.allocate(3, other),
        lambda: device.allocate_shared(3, other),
        lambda: stream.allocate(3, other),
        lambda: stream.upload([1.0], other),
        lambda: stream.upload(np.ones(3, other)),
        lambda: highwater.Ticket(ticket, 1, other),
    ]
    for call in calls:
        with pytest.raises(highwater.InvalidArgument, match="byte order"):
            call()
    assert runtime.pinned(3, np.dtype("<f4")).array.dtype.isnative


def test_numbers_out_of_range_are_refused(runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream) -> None:
    shared = device.allocate_shared(1, "int8")
    batch = runtime.share_all([shared])
    calls: list[Callable[[], Any]] = [
        lambda: runtime.device(-1),
        lambda: runtime.device(1 << 40),
        lambda: batch.ticket(-1),
        lambda: batch.ticket(1 << 70),
        lambda: device.allocate(1 << 63, "int8"),
        lambda: device.allocate((2, 1 << 70), "int8"),
        lambda: device.allocate(-(1 << 70), "int8"),
        lambda: device.adopt(-1, 1, "int8", None),
        lambda: device.stream_from_raw(-1),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(highwater.InvalidArgument):
            call()
            pytest.fail(f"call {number}")


def test_type_errors_name_the_argument(runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "ordinal": lambda: runtime.device("0"),  # type: ignore[arg-type]
        "ordinal is `None`": lambda: runtime.device(None),  # type: ignore[arg-type]
        "shape": lambda: device.allocate("ab", "int8"),  # type: ignore[arg-type]
        "owner_death": lambda: runtime.open_shared(
            device.allocate_shared(1, "int8").share(),
            owner_death=None,  # type: ignore[arg-type]
        ),
        "place": lambda: runtime.share_all([]).ticket("a"),  # type: ignore[arg-type]
        "stream": lambda: device.stream_from_raw("a"),  # type: ignore[arg-type]
        "tensor": lambda: stream.from_dlpack(3),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=name):
            call()


def test_an_empty_tensor_of_the_package_comes_back(device: highwater.Device, stream: highwater.Stream) -> None:
    buffer = stream.from_dlpack(device.allocate((0, 3), "float32"))
    assert (buffer.shape, buffer.dtype, stream.download(buffer).size) == ((0, 3), "float32", 0)


def test_an_array_of_numpy_is_refused_with_the_call_that_copies_it(runtime: highwater.Runtime, stream: highwater.Stream) -> None:
    with pytest.raises(highwater.Error) as caught:
        stream.from_dlpack(np.ones(3, "float32"))
    assert "Stream.upload" in caught.value.hint
