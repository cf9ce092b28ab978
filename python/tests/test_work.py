"""Streams, buffers, page-locked memory and products."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import highwater
from conftest import BACKEND, until

NUMBERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 3, 2)])
def test_values_come_back_with_their_shape_and_type(stream: highwater.Stream, dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    buffer = stream.upload(values)
    assert (buffer.shape, buffer.dtype, buffer.nbytes) == (shape, dtype, values.nbytes)
    back = stream.download(buffer)
    assert back.dtype == values.dtype and back.shape == shape and np.array_equal(back, values)


def test_strided_values_and_lists_are_uploaded_in_row_major_order(stream: highwater.Stream) -> None:
    values = np.arange(12.0).reshape(3, 4)
    assert np.array_equal(stream.download(stream.upload(values.T[::2])), values.T[::2])
    assert np.array_equal(stream.download(stream.upload([[1, 2], [3, 4]], "float32")), [[1, 2], [3, 4]])


def test_bfloat16_goes_as_its_bits(stream: highwater.Stream) -> None:
    ones = stream.upload(np.full((2, 2), 0x3F80, "uint16"), "bfloat16")
    out = stream.allocate((2, 2), "float32")
    assert np.array_equal(stream.download(stream.matmul(ones, ones, out)), [[2, 2], [2, 2]])
    assert np.array_equal(stream.download(stream.matmul(ones, ones)), np.full((2, 2), 0x4000))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_product_is_numpys(stream: highwater.Stream, dtype: str) -> None:
    a, b = np.arange(6).reshape(2, 3).astype(dtype), np.arange(12).reshape(4, 3).astype(dtype)
    on_device = stream.upload(a), stream.upload(b)
    assert np.array_equal(stream.download(stream.matmul(*on_device, transpose_b=True)), a @ b.T)
    out = stream.upload(np.ones((2, 4), dtype))
    assert stream.matmul(*on_device, out, transpose_b=True, alpha=2, beta=3) is out
    assert np.array_equal(stream.download(out), 2 * (a @ b.T) + 3)


SHAPES = [
    ((5, 2, 3), (5, 3, 4), False, False),
    ((2, 5, 3, 2), (2, 5, 3, 4), True, False),
    ((5, 2, 3), (4, 3), False, True),
    ((3, 2), (7, 4, 3), True, True),
    ((1, 2, 3), (1, 3, 4), False, False),
]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("of_a", "of_b", "transpose_a", "transpose_b"), SHAPES)
def test_a_batch_of_products_is_numpys(
    stream: highwater.Stream,
    dtype: str,
    of_a: tuple[int, ...],
    of_b: tuple[int, ...],
    transpose_a: bool,
    transpose_b: bool,
) -> None:
    a, b = (np.arange(math.prod(shape)).reshape(shape).astype(dtype) % 7 for shape in (of_a, of_b))
    expected = (a.swapaxes(-1, -2) if transpose_a else a) @ (b.swapaxes(-1, -2) if transpose_b else b)
    on_device = stream.upload(a), stream.upload(b)
    made = stream.matmul(*on_device, transpose_a=transpose_a, transpose_b=transpose_b)
    assert made.shape == expected.shape and np.array_equal(stream.download(made), expected)
    out = stream.upload(np.ones(expected.shape, dtype))
    stream.matmul(*on_device, out, transpose_a=transpose_a, transpose_b=transpose_b, alpha=2, beta=3)
    assert np.array_equal(stream.download(out), 2 * expected + 3)


def test_a_batch_has_a_result_of_more_precision_and_may_be_empty(stream: highwater.Stream) -> None:
    ones = stream.upload(np.full((3, 1, 300), 0x3F80, "uint16"), "bfloat16")
    out = stream.allocate((3, 1, 1), "float32")
    assert (stream.download(stream.matmul(ones, ones, out, transpose_b=True)) == 300).all()
    none = stream.upload(np.ones((0, 2, 3), "float32"))
    assert stream.matmul(none, stream.upload(np.ones((3, 4), "float32"))).shape == (0, 2, 4)


def test_a_wrong_batch_is_refused(stream: highwater.Stream) -> None:
    def upload(*shape: int) -> highwater.Buffer:
        return stream.upload(np.ones(shape, "float32"))

    one = upload(2, 2)
    for a, b, out, reason in [
        (upload(2, 2, 3), upload(3, 3, 2), None, "same lengths"),
        (upload(2, 2, 3), upload(2, 2, 3), None, "fit together"),
        (upload(2, 2, 3), upload(3, 2), upload(2, 2), r"expected \[2, 2, 2\]"),
        (one, one, upload(1, 2, 2), r"expected \[2, 2\]"),
        (upload(4), one, None, "two or more lengths"),
    ]:
        with pytest.raises(highwater.InvalidArgument, match=reason):
            stream.matmul(a, b, out)
    square = upload(3, 2, 2)
    for factors in ((square, one), (one, square)):
        with pytest.raises(highwater.InvalidArgument, match="out overlaps"):
            stream.matmul(*factors, square)


PARTS: list[tuple[tuple[int, ...], Any, tuple[int, ...], Any]] = [
    ((6, 4), np.s_[1:4, 1:3], (3, 2), None),
    ((3, 2), None, (6, 4), np.s_[2:5, 2:4]),
    ((6, 4), np.s_[::2], (3, 4), None),
    ((6, 4), np.s_[5:, :], (7, 4), np.s_[3:4]),
    ((6, 4), np.s_[-3:100:2, -1:], (4, 5), np.s_[1::2, 2:3]),
    ((6, 4), (slice(1, 3),), (2, 4), None),
    ((6, 4), np.s_[1 : 2 : 1 << 62, 0 : 1 : 1 << 62], (1, 1), None),
    ((6, 4), np.s_[6:, :], (2, 4), np.s_[0:0]),
    ((6, 4), np.s_[:, 4:], (6, 0), None),
    ((4, 5, 3, 2), np.s_[1::2, 2:4], (2, 2, 3, 2), None),
]


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize(("of_src", "src_part", "of_dst", "dst_part"), PARTS)
def test_a_copy_of_rows_is_numpys_assignment(
    stream: highwater.Stream,
    device: highwater.Device,
    dtype: str,
    of_src: tuple[int, ...],
    src_part: Any,
    of_dst: tuple[int, ...],
    dst_part: Any,
) -> None:
    in_numpy = "uint16" if dtype == "bfloat16" else dtype
    src = np.arange(math.prod(of_src)).reshape(of_src).astype(in_numpy)
    dst = (np.arange(math.prod(of_dst)).reshape(of_dst) + 100).astype(in_numpy)
    expected = dst.copy()
    expected[... if dst_part is None else dst_part] = src[... if src_part is None else src_part]

    def on_device(values: Any) -> highwater.Buffer:
        return stream.upload(values, dtype)

    def pinned(values: Any) -> highwater.Pinned:
        made = device.pinned(values.shape, dtype)
        made.array[...] = values
        return made

    places: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]]
    places = [(on_device, on_device), (pinned, on_device), (on_device, pinned)]
    for place, other in places:
        from_, to = place(src), other(dst)
        stream.copy_2d(from_, to, src_part, dst_part)
        found = stream.download(to) if isinstance(to, highwater.Buffer) else to.array
        assert np.array_equal(found, expected)


def test_columns_of_one_buffer_are_copied_unless_they_overlap(stream: highwater.Stream) -> None:
    matrix = stream.upload(np.arange(12.0).reshape(3, 4))
    stream.copy_2d(matrix, matrix, np.s_[:, 0:2], np.s_[:, 2:4])
    assert np.array_equal(stream.download(matrix), [[0, 1, 0, 1], [4, 5, 4, 5], [8, 9, 8, 9]])
    with pytest.raises(highwater.InvalidArgument, match="overlap"):
        stream.copy_2d(matrix, matrix, np.s_[:, 0:2], np.s_[:, 1:3])


def test_parts_that_do_not_fit_are_refused(stream: highwater.Stream, device: highwater.Device) -> None:
    matrix, other = stream.upload(np.ones((6, 4), "float32")), stream.upload(np.zeros((3, 2), "float32"))
    refused: list[tuple[Any, Any, Any, Any, str]] = [
        (matrix, other, None, None, r"the shape \[6, 4\], that of the destination \[3, 2\]"),
        (matrix, other, np.s_[4:, :2], None, r"the shape \[2, 2\], that of the destination \[3, 2\]"),
        (matrix, other, np.s_[:3, ::2], None, "the columns of src have the step 2, expected 1"),
        (matrix, other, np.s_[2::-1, :2], None, "the part of src has the step -1, expected a positive one"),
        (other, matrix, None, np.s_[:3, 1::-1], "the part of dst has the step -1"),
        (matrix, device.pinned((3, 2), "int32"), np.s_[:3, :2], None, "values of float32, the destination of int32"),
        (device.pinned(6, "float32"), other, None, None, r"src has the shape \[6\]"),
        (other, device.allocate((), "float32"), None, None, r"dst has the shape \[\]"),
    ]
    for src, dst, src_part, dst_part, reason in refused:
        with pytest.raises(highwater.InvalidArgument, match=reason) as caught:
            stream.copy_2d(src, dst, src_part, dst_part)
        assert caught.value.operation == "copy_2d" and caught.value.hint
    parts: list[Any] = [3, "a", (slice(1), 3), (slice(1), slice(1), slice(1)), [slice(1)], ...]
    for part in parts:
        with pytest.raises(TypeError, match="the part of src is .*, expected a slice of rows"):
            stream.copy_2d(matrix, other, part)
    with pytest.raises(TypeError, match="copy_2d takes a Buffer and a Buffer"):
        stream.copy_2d(device.pinned((3, 2), "float32"), device.pinned((3, 2), "float32"))
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        stream.copy_2d(matrix, other, np.s_[::0])
    assert not stream.download(other).any()


def test_copies_of_rows_are_recorded(stream: highwater.Stream, device: highwater.Device) -> None:
    pinned, out = device.pinned((4, 4), "float32"), stream.upload(np.zeros((2, 2), "float32"))
    pinned.array[...] = 1
    graph = stream.capture(lambda: stream.copy_2d(pinned, out, np.s_[1:3, 1:3]))
    assert not stream.download(out).any(), "recorded, not executed"
    del pinned
    graph.launch(stream)
    assert (stream.download(out) == 1).all()


def test_a_graph_is_launched_many_times(stream: highwater.Stream, device: highwater.Device) -> None:
    a, b = stream.upload(np.full((2, 2), 2.0, "float32")), stream.upload(np.eye(2, dtype="float32"))
    total = stream.upload(np.zeros((2, 2), "float32"))
    source = device.pinned((2, 2), "float32")
    source.array[:] = 1
    source.wait()

    def record() -> None:
        stream.copy(source, b)
        # Memory of the graph.
        stream.matmul(stream.matmul(a, b), b, total, beta=1.0)

    graph = stream.capture(record)
    assert graph.device == 0 and "device 0" in repr(graph)
    assert not stream.download(total).any(), "recorded, not executed"
    other = device.create_stream()
    for _ in range(2):
        graph.launch(stream)
    assert (stream.download(total) == 16).all()
    source.array[:] = 0.5
    # The graph keeps what it uses.
    kept = stream.upload(np.zeros(1, "float32"))
    del a, b, source
    graph.launch(other)
    # Only the device knows when the launch on the other stream is done.
    total.wait()
    assert (stream.download(total) == 18).all() and not stream.download(kept).any()


def test_a_capture_ends_with_the_exception_of_its_function(stream: highwater.Stream) -> None:
    buffer = stream.upload(np.ones(4, "float32"))

    def fails() -> None:
        stream.fill(buffer, 5)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stream.capture(fails)
    # The capture goes on after a refused call.
    refused = []

    def waits() -> None:
        with pytest.raises(highwater.Capture) as error:
            stream.download(buffer)
        refused.append(error.value.hint)
        with pytest.raises(highwater.Capture):
            stream.capture(lambda: None)
        stream.fill(buffer, 7)

    graph = stream.capture(waits, mode="relaxed")
    assert refused and (stream.download(buffer) == 1).all()
    graph.launch(stream)
    assert (stream.download(buffer) == 7).all()
    with pytest.raises(highwater.InvalidArgument, match="thread_local"):
        stream.capture(lambda: None, mode="local")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        stream.capture(5)  # type: ignore[arg-type]


def test_a_graph_is_launched_on_streams_of_its_device_only(stream: highwater.Stream, runtime: highwater.Runtime) -> None:
    buffer = stream.upload(np.ones(4, "float32"))
    graph = stream.capture(lambda: stream.fill(buffer, 2))
    with highwater.open(BACKEND) as other:
        with pytest.raises(highwater.InvalidHandle):
            graph.launch(other.device(0).create_stream())

    def launches() -> None:
        with pytest.raises(highwater.Capture):
            graph.launch(stream)

    stream.capture(launches)
    child = os.fork()
    if child == 0:
        try:
            graph.launch(stream)
        except highwater.Forked:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    graph.launch(stream)
    assert (stream.download(buffer) == 2).all()


def test_memory_that_other_code_has_ends_after_a_capture(runtime: highwater.Runtime, stream: highwater.Stream) -> None:
    device = runtime.device(0)
    free = device.memory_info().free
    held: list[highwater.Buffer | highwater.Pinned] = [device.allocate_shared(1 << 22, "uint8")]
    held.append(device.pinned(4096, "uint8"))
    target = device.allocate(4, "uint8")

    def record() -> None:
        for memory in held:
            assert memory.ptr
        held.clear()
        stream.fill(target, 1)

    graph = stream.capture(record)
    graph.launch(stream)
    stream.synchronize()
    del target, graph

    def is_released() -> bool:
        runtime.trim()
        # The driver keeps some memory for what it made meanwhile.
        return device.memory_info().free > free - (1 << 20) and runtime.statistics().host.live_blocks == 0

    # The drop of the graph waits for nothing: a thread of the library ends its memory.
    until(is_released)


FILLS = [("float32", 1.5), ("float16", -2.0), ("int8", -3), ("uint32", 2**32 - 1), ("float64", 0)]


@pytest.mark.parametrize(("dtype", "value"), FILLS)
def test_a_fill_writes_each_value(stream: highwater.Stream, dtype: str, value: float) -> None:
    buffer = stream.upload(np.ones(1000, dtype))
    stream.fill(buffer, value)
    assert np.array_equal(stream.download(buffer), np.full(1000, value, dtype))


def test_copies_go_between_page_locked_memory_and_devices(runtime: highwater.Runtime, stream: highwater.Stream) -> None:
    source, result = runtime.pinned((50, 20), "int32"), runtime.device(0).pinned((50, 20), np.int32)
    source.array[:] = np.arange(1000).reshape(50, 20)
    first, second = stream.allocate((50, 20), "int32"), runtime.device().allocate(1000, "int32")
    stream.copy(source, first)
    stream.copy(first, second)
    stream.copy(second, result)
    assert np.array_equal(result.array, source.array)
    stream.write(np.zeros(1000, "int32"), second)
    assert not stream.download(second).any()


def test_an_array_is_the_page_locked_memory_and_keeps_it(runtime: highwater.Runtime) -> None:
    pinned = runtime.pinned((4, 5), "float32")
    array = pinned.array
    assert array.ctypes.data == pinned.ptr and array.flags.writeable and array.shape == (4, 5)
    array[:] = 3
    alive = weakref.ref(array)
    part = array[1]
    del pinned, array
    gc.collect()
    assert runtime.statistics().host.live_blocks == 1 and (part == 3).all()
    del part
    assert alive() is None and runtime.statistics().host.live_blocks == 0


def test_streams_wait_for_events(slow: highwater.Runtime) -> None:
    first, second = slow.device(0).create_stream(), slow.device(0).create_stream()
    buffer = slow.device(0).allocate(10, "int64")
    for number in range(10):
        first.write(np.arange(10) * number, buffer)
    event = first.record()
    assert not event.is_complete and not first.is_complete
    second.wait(event)
    assert np.array_equal(second.download(buffer), np.arange(10) * 9) and event.is_complete


def test_timed_events_measure(stream: highwater.Stream) -> None:
    first, buffer = stream.record(timed=True), stream.upload(np.zeros(1000))
    second = stream.record(timed=True)
    second.synchronize()
    assert first.elapsed_ns(second) > 0 and second.elapsed_ns(first) == 0
    assert buffer.nbytes == 8000


def test_a_stream_of_other_code_is_wrapped(device: highwater.Device, stream: highwater.Stream) -> None:
    class OfTorch:
        cuda_stream = stream.raw

    for raw in (stream.raw, OfTorch()):
        wrapped = device.stream_from_raw(raw)
        assert wrapped.raw == stream.raw and wrapped.device == 0
        buffer = wrapped.upload(np.ones(10))
        assert np.array_equal(stream.download(buffer), np.ones(10))
        del wrapped, buffer
    OfTorch.cuda_stream = 0  # PyTorch's default stream.
    assert device.stream_from_raw(OfTorch()).raw == device.default_stream().raw


@pytest.mark.parametrize("wait", ["synchronize", "download", "event", "pinned", "array", "device", "dlpack"])
def test_a_wait_lets_other_threads_run(slow: highwater.Runtime, wait: str) -> None:
    device = slow.device(0)
    stream = device.create_stream()
    buffer, pinned = device.allocate(1000, "float32"), slow.pinned(1000, "float32")
    calls: dict[str, Callable[[], Any]] = {
        "synchronize": stream.synchronize,
        "download": lambda: stream.download(buffer),
        "event": lambda: stream.record().synchronize(),
        "pinned": pinned.wait,
        "array": lambda: pinned.array,
        "device": device.synchronize,
        "dlpack": lambda: pinned.__dlpack__(),
    }
    for _ in range(8):
        stream.copy(buffer, pinned)
    ended = threading.Event()

    def call() -> None:
        calls[wait]()
        ended.set()

    thread = threading.Thread(target=call)
    thread.start()
    steps = 0
    while not ended.is_set():
        steps += 1
        time.sleep(0.001)
    thread.join()
    # The copies take 320 ms. A call that keeps the lock lets this thread make one or two steps.
    assert steps > 10


@pytest.mark.parametrize("exported", [False, True])
def test_page_locked_memory_that_is_dropped_under_a_copy_is_not_reused(slow: highwater.Runtime, exported: bool) -> None:
    device = slow.device(0)
    stream = device.create_stream()
    for number in range(3):
        buffer, source = device.allocate(10_000, "int64"), slow.pinned(10_000, "int64")
        values = np.arange(10_000) * (number + 1)
        if exported:
            source.array[:] = values
        else:
            stream.copy(stream.upload(values), source)
        stream.copy(source, buffer)
        del source
        other = slow.pinned(10_000, "int64")
        other.array[:] = -1
        assert np.array_equal(stream.download(buffer), values)


def test_device_memory_that_is_dropped_under_work_is_not_reused(stream: highwater.Stream, device: highwater.Device) -> None:
    other = device.create_stream()
    for number in range(1000):
        values = np.full(1000, number)
        source, target = stream.upload(values), device.allocate(1000, "int64")
        stream.copy(source, target)
        del source
        other.fill(other.allocate(1000, "int64"), 0)
        assert np.array_equal(stream.download(target), values)


def test_statistics_are_dataclasses_with_every_number(runtime: highwater.Runtime, stream: highwater.Stream) -> None:
    before = runtime.statistics()
    assert isinstance(before, highwater.Statistics) and isinstance(before.limits, highwater.Limits)
    pinned = runtime.pinned(1 << 20, "uint8")
    after = runtime.statistics()
    assert after.host.live_blocks == before.host.live_blocks + 1
    assert after.host.live_bytes >= before.host.live_bytes + pinned.nbytes

    def numbers(part: Any) -> int:
        values = [getattr(part, field.name) for field in dataclasses.fields(part)]
        return sum(numbers(value) if dataclasses.is_dataclass(value) else 1 for value in values)

    assert numbers(after) > 100
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.events = 0  # type: ignore[misc]


def test_a_device_describes_itself(device: highwater.Device) -> None:
    info = device.memory_info()
    assert 0 < info.free <= info.total and device.memory_bytes > 0 and len(device.uuid) == 32
    assert device.name and device.architecture and device.ordinal == 0 and "Device 0" in repr(device)


def test_threads_share_everything(runtime: highwater.Runtime, device: highwater.Device) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream = device.create_stream()
            for step in range(50):
                pinned = runtime.pinned(1000, "int64")
                pinned.array[:] = number * 1000 + step
                buffer = stream.allocate(1000, "int64")
                stream.copy(pinned, buffer)
                del pinned
                assert (stream.download(buffer) == number * 1000 + step).all()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_close_in_a_capture_changes_nothing(runtime: highwater.Runtime, stream: highwater.Stream) -> None:
    with pytest.raises(highwater.Capture, match="inside a capture"):
        stream.capture(runtime.close)
    assert not runtime.is_closed
    assert runtime.device(0).create_stream().is_complete


def test_a_runtime_closes_and_reports_what_is_left() -> None:
    runtime = highwater.open(BACKEND)
    device = runtime.device(0)
    with pytest.raises(highwater.InvalidState, match="alive"):
        runtime.close()
    assert runtime.is_closed and "closed" in repr(runtime)
    with pytest.raises(highwater.InvalidState, match="closed"):
        runtime.device(0)
    assert device.create_stream().is_complete  # The runtime ends with its last object.
    runtime.close()
    del device
    other = highwater.open(BACKEND)
    other.close()
    with highwater.open(BACKEND) as left:
        pinned = left.pinned(4, "float32")
    assert left.is_closed and pinned.array.shape == (4,)
