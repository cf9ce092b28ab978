"""PyTorch's page-locked memory from Highwater's pool. Needs PyTorch 2.11 and a C++ compiler.

Without a CUDA device, the pool is the mock's, and a program in C++ calls PyTorch's allocator in place of `pin_memory=True`.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from conftest import BACKEND

# Calls the allocator that PyTorch has for CUDA.
CALLS = """
#include <ATen/core/CachingHostAllocator.h>
#define EXPORT extern "C" __attribute__((visibility("default")))
static at::HostAllocator* allocator() { return at::getHostAllocator(at::kCUDA); }
EXPORT at::DataPtr* allocate(size_t bytes) {
  try { return new at::DataPtr(allocator()->allocate(bytes)); } catch (...) { return nullptr; }
}
EXPORT void* address(at::DataPtr* data) { return data->get(); }
EXPORT void release(at::DataPtr* data) { delete data; }
EXPORT bool record(void* address, void* context, int64_t stream, int device) {
  return allocator()->record_event(address, context, c10::Stream(c10::Stream::UNSAFE, c10::Device(at::kCUDA, device), stream));
}
EXPORT void empty_cache() { allocator()->empty_cache(); }
EXPORT int64_t counts(int which) {
  auto stats = allocator()->get_stats();
  const int64_t found[] = {stats.active_requests.current, stats.active_bytes.current, stats.allocated_bytes.current};
  return found[which];
}
"""

WITHOUT_DEVICE = """
import ctypes, os, pathlib, sys
import torch, highwater.torch as hwt
from highwater import _highwater
hwt.install_host_allocator()
hwt.install_host_allocator()
source = pathlib.Path(sys.argv[1])
calls = ctypes.CDLL(str(hwt._compiled("test", source)))
for name in ("allocate", "address"):
    getattr(calls, name).restype = ctypes.c_void_p
calls.allocate.argtypes = [ctypes.c_size_t]
calls.counts.restype = ctypes.c_int64
calls.address.argtypes = calls.release.argtypes = [ctypes.c_void_p]
calls.record.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
calls.record.restype = ctypes.c_bool
host = lambda: _highwater.standing_runtime(os.environ["HIGHWATER_BACKEND"]).statistics().host

blocks = [calls.allocate(size) for size in (1, 4096, 1 << 20, 4 << 20)]
addresses = [calls.address(block) for block in blocks]
assert all(addresses) and len(set(addresses)) == 4
# More than a registration: PyTorch's own allocator, which has no device here.
assert calls.allocate(100 << 20) is None and hwt.last_allocation_failure() is None
assert calls.address(calls.allocate(0)) is None
assert host().live_blocks == calls.counts(0) == 4 and host().live_bytes == calls.counts(1) >= (5 << 20)
for address, size in zip(addresses, (1, 4096, 1 << 20, 4 << 20)):
    ctypes.memset(address, 7, size)
# A use in the middle of a block, without the context of its tensor.
assert calls.record(addresses[2] + 100, None, 0, 0)
# Memory of other code is PyTorch's own.
own = ctypes.create_string_buffer(64)
assert not calls.record(ctypes.addressof(own), None, 0, 0)
for block in blocks:
    calls.release(block)
assert host().live_blocks == calls.counts(0) == 0
# Freed memory is used again, once the device is done.
held = host().held_bytes
_highwater.standing_runtime(os.environ["HIGHWATER_BACKEND"]).device(0).synchronize()
again = calls.allocate(1 << 20)
retired = calls.address(again)
assert retired and host().held_bytes == held
# The end of this use is unknown, because there is no such device.
assert calls.record(retired, None, 0, 99)
assert "device" in hwt.last_allocation_failure()
calls.release(again)
other = calls.allocate(1 << 20)
assert calls.address(other) != retired and host().live_blocks == 2
calls.release(other)
held = host().held_bytes
calls.empty_cache()
assert host().held_bytes == calls.counts(2) < held
block = calls.allocate(4096)
child = os.fork()
if child == 0:
    calls.release(block)
    os._exit(0 if calls.allocate(4096) is None else 1)
assert os.waitpid(child, 0)[1] == 0
calls.release(block)
assert host().live_blocks == 1
print("done")
"""

WITH_DEVICE = """
import torch, highwater.torch as hwt
before = torch.ones(1000, pin_memory=True)
hwt.install_host_allocator()
host = lambda: hwt.runtime().statistics().host
pinned = torch.arange(1 << 20, dtype=torch.int32, pin_memory=True)
assert pinned.is_pinned() and host().live_blocks == 1
address, kept = pinned.data_ptr(), []
side = torch.cuda.Stream()
for turn in range(200):
    source = torch.full((1 << 18,), turn, dtype=torch.int32).pin_memory()
    with torch.cuda.stream(side):
        kept.append(source.to("cuda", non_blocking=True))
    # Dropped under the copy.
    del source
assert all((tensor == turn).all() for turn, tensor in enumerate(kept))
assert before.to("cuda", non_blocking=True).sum().item() == 1000
back = torch.empty(1 << 20, dtype=torch.int32, pin_memory=True)
back.copy_(pinned.to("cuda", non_blocking=True), non_blocking=True)
torch.cuda.synchronize()
assert torch.equal(back, pinned)
loader = torch.utils.data.DataLoader(torch.arange(1000), batch_size=100, pin_memory=True)
assert all(batch.is_pinned() for batch in loader)
graph, static = torch.cuda.CUDAGraph(), torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
with torch.cuda.graph(graph):
    static.copy_(pinned, non_blocking=True)
graph.replay()
assert torch.equal(static.cpu(), pinned)
del pinned, back
assert torch.cuda.host_memory_stats()["active_requests.current"] == host().live_blocks
print("done")
"""


# The stand-in for PyTorch has no such file.
IS_HERE = any(pathlib.Path(path, "torch", "version.py").exists() for path in sys.path)
pytestmark = pytest.mark.skipif(not IS_HERE or shutil.which("c++") is None, reason="needs PyTorch and a C++ compiler")


def run(program: str, folder: pathlib.Path, **variables: str) -> str:
    source = folder / "calls.cpp"
    source.write_text(CALLS)
    environment = dict(os.environ) | {"XDG_CACHE_HOME": str(folder), "HIGHWATER_BACKEND": BACKEND} | variables
    # PyTorch is loaded with symbols that it lacks where its CUDA libraries are stubs.
    lazily = "import os, sys; sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)\n"
    found = subprocess.run([sys.executable, "-c", lazily + program, str(source)], env=environment, capture_output=True, text=True)
    return found.stdout.strip() or found.stderr


def test_pytorch_allocates_from_the_pool(tmp_path: pathlib.Path) -> None:
    assert run(WITHOUT_DEVICE if BACKEND == "mock" else WITH_DEVICE, tmp_path) == "done"
    libraries = [path.name for path in (tmp_path / "highwater").iterdir()]
    assert sum(name.startswith("_torch_host-") for name in libraries) == 1 and all(name.endswith(".so") for name in libraries)


def test_another_version_and_a_missing_compiler_are_refused_with_the_remedy(tmp_path: pathlib.Path) -> None:
    program = "import torch, highwater.torch as hwt\n{}\ntry: hwt.install_host_allocator()\nexcept Exception as error: print(error)"
    assert "2.15.0" in run(program.format("torch.__version__ = '2.15.0+cpu'"), tmp_path)
    assert "set CXX" in run(program.format(""), tmp_path, CXX="no-such-compiler")
    assert "cannot compile" in run(program.format(""), tmp_path, CXX="false")
    assert not list(tmp_path.glob("highwater/*"))
    # A compiler that is killed prints nothing.
    assert "it printed nothing" in run(program.format(""), tmp_path, CXX="sh -c 'kill -9 $$'")
    file = tmp_path / "file"
    file.touch()
    assert "set XDG_CACHE_HOME" in run(program.format(""), tmp_path, XDG_CACHE_HOME=str(file))


def test_a_damaged_library_is_compiled_again(tmp_path: pathlib.Path) -> None:
    program = "import highwater.torch as hwt\nhwt.install_host_allocator()\nprint('done')"
    for _ in range(2):
        assert run(program, tmp_path, CXX="env c++") == "done"
        library, *others = (tmp_path / "highwater").iterdir()
        assert not others
        library.write_bytes(b"damaged")
