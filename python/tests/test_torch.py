"""With PyTorch on a CUDA device: ``HIGHWATER_TEST_BACKEND=cuda python -m pytest python/tests``. Skipped elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import BACKEND

import highwater

torch: Any = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.skipif(
    BACKEND != "cuda" or not torch.cuda.is_available(), reason="needs a CUDA device that PyTorch can use"
)

ROUNDS = 10_000
LENGTH = 1 << 16


def test_pytorch_knows_that_memory_is_pinned_and_copies_from_it(runtime: highwater.Runtime) -> None:
    torch.cuda.init()  # Before, PyTorch says that no memory is pinned.
    pinned = runtime.pinned((LENGTH,), "float32")
    pinned.array[:] = np.arange(LENGTH)
    tensor = torch.from_numpy(pinned.array)
    assert tensor.is_pinned()
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), torch.arange(LENGTH, dtype=torch.float32))


def test_pytorch_reads_and_writes_device_memory(device: highwater.Device, stream: highwater.Stream) -> None:
    buffer = device.allocate((64, 32), "float32")
    stream.fill(buffer, 1.5)
    tensor = torch.from_dlpack(buffer)
    assert tensor.shape == (64, 32) and tensor.data_ptr() == buffer.ptr
    assert tensor.sum().item() == 64 * 32 * 1.5
    tensor.mul_(2)
    torch.cuda.synchronize()
    assert (stream.download(buffer) == 3).all()
    seen = torch.as_tensor(buffer, device="cuda")
    assert seen.data_ptr() == buffer.ptr and torch.equal(seen, tensor)


def test_a_product_of_tensors_equals_pytorchs(device: highwater.Device) -> None:
    a, b = torch.randn(96, 64, device="cuda"), torch.randn(64, 80, device="cuda")
    stream = device.stream_from_raw(torch.cuda.current_stream())
    product = stream.matmul(stream.from_dlpack(a), stream.from_dlpack(b))
    expected = (a.double() @ b.double()).cpu().numpy()
    assert np.abs(stream.download(product) - expected).max() < 0.1


def test_work_on_pytorchs_stream_is_ordered(device: highwater.Device) -> None:
    side = torch.cuda.Stream()
    stream = device.stream_from_raw(side)
    buffer = device.allocate((LENGTH,), "float32")
    with torch.cuda.stream(side):
        for value in range(100):
            stream.fill(buffer, float(value))
            tensor = torch.from_dlpack(buffer)
            tensor.add_(1)
            assert tensor[0].item() == value + 1


def test_device_memory_dropped_under_copies_is_not_reused(device: highwater.Device, stream: highwater.Stream) -> None:
    side = torch.cuda.Stream()
    out = torch.empty(LENGTH, device="cuda")
    delay = torch.randn(256, 256, device="cuda")
    corrupted = 0
    for turn in range(ROUNDS):
        buffer = device.allocate((LENGTH,), "float32")
        stream.fill(buffer, float(turn))
        with torch.cuda.stream(side):
            tensor = torch.from_dlpack(buffer)
            delay @ delay
            out.copy_(tensor, non_blocking=True)
        del tensor, buffer
        stream.fill(device.allocate((LENGTH,), "float32"), -1.0)
        with torch.cuda.stream(side):
            corrupted += int((out != turn).any().item())
    assert corrupted == 0


def test_pinned_memory_dropped_under_copies_is_not_reused(runtime: highwater.Runtime) -> None:
    corrupted = 0
    for turn in range(ROUNDS):
        pinned = runtime.pinned((LENGTH,), "float32")
        pinned.array[:] = turn
        out = torch.from_numpy(pinned.array).to("cuda", non_blocking=True)
        del pinned
        runtime.pinned((LENGTH,), "float32").array[:] = -1
        corrupted += int((out != turn).any().item())
    assert corrupted == 0
