"""Tensors that go to other libraries and come from them, through DLPack and the array interfaces."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import highwater
from conftest import BACKEND

on_mock = pytest.mark.skipif(BACKEND != "mock", reason="only the memory of the mock's devices is memory of the CPU")
on_cuda = pytest.mark.skipif(BACKEND != "cuda", reason="needs a CUDA device, or the simulated one")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_numpy_reads_page_locked_memory_by_dlpack(runtime: highwater.Runtime, dtype: str, shape: tuple[int, ...]) -> None:
    pinned = runtime.pinned(shape, dtype)
    pinned.array[...] = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    taken = np.from_dlpack(pinned)
    assert taken.dtype == np.dtype(dtype) and taken.shape == shape and np.array_equal(taken, pinned.array)
    assert taken.size == 0 or np.shares_memory(taken, pinned.array)


@pytest.mark.parametrize("newest", [None, (0, 8), (1, 0), (2, 5)])
def test_a_capsule_that_nobody_takes_frees_its_tensor(runtime: highwater.Runtime, newest: tuple[int, int] | None) -> None:
    pinned = runtime.pinned(10, "float32")
    capsule = pinned.__dlpack__(max_version=newest)
    assert ("dltensor_versioned" in repr(capsule)) == (newest is not None and newest[0] >= 1)
    del pinned
    assert runtime.statistics().host.live_blocks == 1
    del capsule
    assert runtime.statistics().host.live_blocks == 0


def test_a_tensor_keeps_the_memory_and_any_thread_may_end_it(runtime: highwater.Runtime) -> None:
    taken = [np.from_dlpack(runtime.pinned(1000, "float32")) for _ in range(20)]
    gc.collect()
    assert runtime.statistics().host.live_blocks == 20
    threads = [threading.Thread(target=taken.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runtime.statistics().host.live_blocks == 0


@on_mock
def test_the_mocks_device_memory_is_memory_of_the_cpu(slow: highwater.Runtime) -> None:
    device = slow.device(0)
    stream = device.create_stream()
    buffer = device.allocate((3, 4), "float32")
    stream.fill(buffer, 2.5)
    array = np.from_dlpack(buffer)  # Waits for the fill.
    assert np.array_equal(array, np.full((3, 4), 2.5))
    del buffer
    gc.collect()
    assert np.array_equal(array, np.full((3, 4), 2.5))


@on_mock
def test_a_tensor_comes_back_without_a_copy(stream: highwater.Stream, device: highwater.Device) -> None:
    buffer = device.allocate((3, 4), "int32")
    again = stream.from_dlpack(buffer)
    assert again.ptr == buffer.ptr and again.shape == (3, 4) and again.dtype == "int32"
    stream.fill(again, 7)
    del again
    assert np.array_equal(stream.download(buffer), np.full((3, 4), 7))


@on_mock
def test_an_import_ends_its_tensor_once_its_work_is_done(slow: highwater.Runtime) -> None:
    device = slow.device(0)
    stream = device.create_stream()
    ended = threading.Event()

    class Watched:
        """A tensor over a buffer, with an end that the test sees."""

        def __init__(self, buffer: highwater.Buffer) -> None:
            self.array = np.from_dlpack(buffer)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            class Ends(np.ndarray[Any, Any]):
                def __del__(self) -> None:
                    ended.set()

            return self.array.view(Ends).__dlpack__()

    imported = stream.from_dlpack(Watched(device.allocate(1000, "float32")))
    result = device.allocate(1000, "float32")
    for number in range(10):
        stream.fill(imported, number - 6.0)
    stream.copy(imported, result)
    del imported
    gc.collect()
    assert not ended.is_set()
    assert np.array_equal(stream.download(result), np.full(1000, 3.0))
    slow.trim()
    assert ended.wait(20)


@on_mock
def test_memory_that_only_the_mock_can_address_is_not_exported(stream: highwater.Stream) -> None:
    # The memory of streams is mapped at addresses of its own, and so is memory of another process.
    buffer = stream.upload(np.ones(1000))
    with pytest.raises(highwater.Unsupported) as refused:
        np.from_dlpack(buffer)
    assert "Device.allocate" in refused.value.hint


@on_mock
def test_tensors_of_the_cpu_are_refused_as_device_memory(stream: highwater.Stream) -> None:
    for tensor in (np.ones(4), np.ones((4, 4))[::2, ::2], np.broadcast_to(np.float32(1), (3,))):
        with pytest.raises(Exception) as refused:
            stream.from_dlpack(tensor)
        assert isinstance(refused.value, (highwater.Error, BufferError))


@pytest.mark.parametrize("answer", [None, 3, "capsule"])
def test_a_wrong_capsule_is_refused(stream: highwater.Stream, device: highwater.Device, answer: Any) -> None:
    class Wrong:
        def __dlpack_device__(self) -> Any:
            return device.allocate(1, "int8").__dlpack_device__()

        def __dlpack__(self, **_: Any) -> Any:
            return answer

    with pytest.raises(TypeError):
        stream.from_dlpack(Wrong())


@on_mock
def test_a_capsule_is_taken_once(stream: highwater.Stream, device: highwater.Device) -> None:
    capsule = device.allocate(4, "int8").__dlpack__()

    class Held:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    first = stream.from_dlpack(Held())
    with pytest.raises(TypeError, match="took it"):
        stream.from_dlpack(Held())
    assert first.shape == (4,)


@on_mock
def test_no_device_but_cuda_has_its_array_interface(device: highwater.Device) -> None:
    assert not hasattr(device.allocate(4, "float32"), "__cuda_array_interface__")


@on_cuda
def test_the_cuda_array_interface_describes_the_memory(stream: highwater.Stream) -> None:
    buffer = stream.upload(np.ones((3, 4), "float32"))
    interface = buffer.__cuda_array_interface__
    assert interface["data"] == (buffer.ptr, False) and interface["shape"] == (3, 4) and interface["typestr"] == "<f4"
    assert interface["version"] == 3 and interface["stream"] is None and stream.is_complete
    with pytest.raises(highwater.Unsupported):
        stream.allocate(3, "bfloat16").__cuda_array_interface__


@on_cuda
def test_a_consumers_stream_waits_for_the_producers(slow: highwater.Runtime) -> None:
    device = slow.device(0)
    producer, consumer = device.create_stream(), device.create_stream()
    source = device.allocate(1000, "float32")
    for number in range(10):
        producer.fill(source, number - 5.0)
    taken = consumer.from_dlpack(source)
    assert not producer.is_complete and source.__dlpack_device__() == (2, 0)
    result = device.allocate(1000, "float32")
    consumer.copy(taken, result)
    assert np.array_equal(consumer.download(result), np.full(1000, 4))
    for stream in (0, -2):
        with pytest.raises(highwater.InvalidArgument):
            source.__dlpack__(stream=stream)
    for usual in (None, -1, 1, 2):
        source.__dlpack__(stream=usual)


@on_cuda
@pytest.mark.parametrize("kind", ["pinned", "array", "device", "pointer"])
def test_memory_is_not_reused_under_copies_that_highwater_does_not_see(slow: highwater.Runtime, kind: str) -> None:
    """Another library has the address, enqueues a copy from it on a stream of its own, and drops the tensor."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.c_uint64, ctypes.c_size_t
    device = slow.device(0)
    stream = device.create_stream()
    target = device.allocate(10_000, "int64")
    held = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(held), 0) == 0
    assert driver.cuCtxPushCurrent_v2(held) == 0
    others = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(others), 1) == 0
    for number in range(1, 4):
        values = np.arange(10_000) * number
        source: Any
        if kind == "device":
            source = stream.upload(values)
            tensor, address = source.__dlpack__(stream=-1), source.ptr
            stream.synchronize()
        else:
            source = slow.pinned(10_000, "int64")
            address = source.ptr
            ctypes.memmove(address, values.ctypes.data, values.nbytes)
            tensor = {"array": lambda: source.array, "pinned": source.__dlpack__, "pointer": lambda: None}[kind]()
        copy = driver.cuMemcpyDtoDAsync_v2 if kind == "device" else driver.cuMemcpyHtoDAsync_v2
        for _ in range(4):
            assert copy(pointer(target.ptr), pointer(address), size(values.nbytes), others) == 0
        del source, tensor
        gc.collect()
        # Takes the memory, if it is free, and overwrites it.
        if kind == "device":
            stream.fill(stream.allocate(10_000, "int64"), 0)
            stream.synchronize()
        else:
            slow.pinned(10_000, "int64").array[:] = -1
        assert driver.cuStreamSynchronize(others) == 0
        assert np.array_equal(stream.download(target), values)
    assert driver.cuStreamDestroy_v2(others) == 0
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(held)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
