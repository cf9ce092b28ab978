#!/usr/bin/env python3
"""PyTorch's side of the rows of `highwater bench host`: one JSON object of names and numbers on standard output.

    bench-pytorch.py [--rows TEXT] [--threads N] [--rounds N] [--seeds N] > peer.json
    highwater bench host --peer peer.json

The rows of time call PyTorch's allocator from C++, because a call from Python costs several times as much and its threads
share a lock. They need a C++ compiler and ninja; without them they are left out. Blocks of traces are
`torch.empty(..., pin_memory=True)`. Without PyTorch, NumPy or a device, the program exits with 1.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

try:
    import numpy as np
    import torch
except ImportError as missing:
    sys.exit(f"not installed: {missing.name}")

SIZES = {"4KiB": 4096, "1MiB": 1 << 20, "64MiB": 64 << 20}
SIX_SIZES = np.array([2, 3, 5, 8, 12, 20]) << 20
BLOCKS, OTHER_BLOCKS = 2, 101

CPP = r"""
#include <torch/extension.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

// Mean nanoseconds over the threads. kind 0: allocate and free; 1: with a use of the thread's stream; 2: with a copy of 4 KiB.
// With own_sizes, each thread has twice the size of the one before.
double loop(int kind, int64_t bytes, int threads, double seconds, bool own_sizes) {
  using clock = std::chrono::steady_clock;
  auto* pool = at::getHostAllocator(at::kCUDA);
  std::barrier together(threads);
  std::vector<double> times(threads);
  auto work = [&](int thread) {
    auto stream = c10::cuda::getStreamFromPool(false, 0);
    c10::cuda::setCurrentCUDAStream(stream);
    const size_t size = own_sizes ? size_t(bytes) << thread : size_t(bytes);
    void* device = nullptr;
    if (kind == 2 && cudaMalloc(&device, size) != cudaSuccess) times[thread] = -1;
    auto batch = [&](int count) {
      for (int i = 0; i < count; ++i) {
        auto block = pool->allocate(size);
        if (kind == 2) cudaMemcpyAsync(device, block.get(), size, cudaMemcpyHostToDevice, stream.stream());
        if (kind) pool->record_event(block.get(), block.get_context(), stream.unwrap());
      }
    };
    auto settle = [&] { if (kind) stream.synchronize(); };
    const int size_of_batch = kind == 1 ? int(std::clamp<size_t>((32 << 20) / size, 4, 256)) : 256;
    batch(size_of_batch / 4); settle(); batch(size_of_batch / 4); settle();
    together.arrive_and_wait();
    double timed = 0;
    int64_t count = 0;
    while (timed < seconds) {
      auto start = clock::now();
      batch(size_of_batch);
      timed += std::chrono::duration<double>(clock::now() - start).count();
      count += size_of_batch;
      settle();
    }
    if (times[thread] == 0) times[thread] = timed * 1e9 / double(count);
    cudaFree(device);
  };
  {
    pybind11::gil_scoped_release released;
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread) running.emplace_back(work, thread);
    for (auto& each : running) each.join();
  }
  double sum = 0;
  for (double each : times) {
    if (each < 0) throw std::runtime_error("no device memory");
    sum += each;
  }
  return sum / threads;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("loop", &loop); }
"""


def draw(rng, sizes, live):
    """Sizes and slots; the first `live` requests fill the slots in order."""
    slots = rng.integers(0, live, len(sizes))
    slots[:live] = np.arange(live)
    return [int(size) for size in sizes], [int(slot) for slot in slots], live


def log_uniform(seed):
    rng = np.random.default_rng(seed)
    return draw(rng, np.exp(rng.uniform(np.log(4096), np.log(64 << 20), 1000)).astype(np.uint64), 32)


def blocks(seed):
    rng = np.random.default_rng(seed)
    first = draw(rng, SIX_SIZES[rng.integers(0, 6, 1500)], 200)
    return first, draw(rng, rng.integers(1 << 20, 33 << 20, 600), 120)


def empty_cache():
    torch.cuda.synchronize()
    torch._C._host_emptyCache()


def bytes_held():
    return torch.cuda.memory.host_memory_stats()["allocated_bytes.current"]


class Cache:
    """An empty cache, and the largest sum of the bytes given out since."""

    def __init__(self):
        empty_cache()
        self.before = bytes_held()
        self.peak = 0

    def run(self, trace):
        """Runs a trace, and returns the milliseconds without those of freeing the last blocks."""
        sizes, slots, live = trace
        given, total = [0] * live, 0
        for size, slot in zip(sizes, slots):
            total += size - given[slot]
            given[slot] = size
            self.peak = max(self.peak, total)
        held = [None] * live
        start = time.perf_counter()
        for size, slot in zip(sizes, slots):
            held[slot] = None
            held[slot] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return (time.perf_counter() - start) * 1e3

    def held(self):
        return bytes_held() - self.before

    def ratio(self, *traces):
        for trace in traces:
            self.run(trace)
        return self.held() / self.peak


def times(options, wanted, rows):
    """The rows of time, interleaved by groups as in `highwater`."""
    counts = sorted({1, 4, 16, options.threads})
    groups = [
        {f"hit_{size}_t{count}": (0, bytes, count, False) for size, bytes in SIZES.items() for count in counts}
        | {"hit_own_size_t16": (0, 4096, 16, True)},
        {f"use_{size}_t{count}": (1, bytes, count, False) for count in counts for size, bytes in SIZES.items()},
        {f"copy_4KiB_t{count}": (2, 4096, count, False) for count in counts},
    ]
    groups = [{name: loop for name, loop in group.items() if wanted(name)} for group in groups]
    if not any(groups):
        return
    from torch.utils.cpp_extension import CUDA_HOME, load_inline

    # Without a toolkit, the headers of PyTorch's own packages serve.
    packages = Path(torch.__file__).parent.parent / "nvidia"
    library = load_inline(
        "highwater_bench_host",
        CPP,
        extra_cflags=["-O3", "-std=c++20"],
        extra_ldflags=["-lc10_cuda", "-ltorch_cuda"],
        extra_include_paths=[str(folder) for folder in packages.glob("*/include")],
        with_cuda=CUDA_HOME is not None,
    )
    for group in groups:
        measured = {name: [] for name in group}
        for _ in range(options.rounds):
            for name, (kind, size, count, own) in group.items():
                measured[name].append(library.loop(kind, size, count, 0.005, own))
        rows.update({name: statistics.median(values) for name, values in measured.items()})
        empty_cache()


def quantile(values, part):
    values = sorted(values)
    return statistics.median(values) if part == 0.5 else values[min(int(part * len(values)), len(values) - 1)]


def memory(options, wanted, rows):
    def any_wanted(*names):
        return any(map(wanted, names))

    if any_wanted("trace_three_seeds"):
        rows["trace_three_seeds"] = Cache().ratio(*map(log_uniform, (1, 2, 3)))
    if any_wanted("trace_three_seeds_others_median", "trace_three_seeds_others_p90"):
        firsts = [4 + 3 * at for at in range((options.seeds + 1) // 2)]
        ratios = [Cache().ratio(*map(log_uniform, (first, first + 1, first + 2))) for first in firsts]
        rows["trace_three_seeds_others_median"] = quantile(ratios, 0.5)
        rows["trace_three_seeds_others_p90"] = quantile(ratios, 0.9)
    if any_wanted("trace_fresh_seeds", "trace_fresh_seeds_p90"):
        ratios = [Cache().ratio(log_uniform(seed)) for seed in range(1, options.seeds + 1)]
        rows["trace_fresh_seeds"], rows["trace_fresh_seeds_p90"] = quantile(ratios, 0.5), quantile(ratios, 0.9)

    def both(seed):
        cache, (first, then) = Cache(), blocks(seed)
        return cache.ratio(first), cache.ratio(then)

    if any_wanted("trace_blocks", "trace_blocks_then_odd"):
        rows["trace_blocks"], rows["trace_blocks_then_odd"] = both(BLOCKS)
    if any_wanted("trace_blocks_others", "trace_blocks_then_odd_others"):
        ratios = [both(seed) for seed in range(OTHER_BLOCKS, OTHER_BLOCKS + (options.seeds + 9) // 10)]
        rows["trace_blocks_others"], rows["trace_blocks_then_odd_others"] = map(max, zip(*ratios))


def passes(options, wanted, rows):
    repetitions = min(options.rounds, 3)
    for name, seeds in {"pass_three_seeds": (1, 2, 3), "pass_same_seed": (1, 1, 1)}.items():
        numbers = [number for number in (1, 2, 3) if (name, number) != ("pass_same_seed", 1)]
        if not any(wanted(f"{name}_{end}") for end in [*numbers, "growth"]):
            continue
        runs, growth = [], 0
        for _ in range(repetitions):
            cache, run, held = Cache(), [], []
            for seed in seeds:
                run.append(cache.run(log_uniform(seed)))
                held.append(cache.held())
            runs.append(run)
            growth = max(growth, 100 * (held[2] - held[0]) / held[0])
        for number in numbers:
            rows[f"{name}_{number}"] = statistics.median(run[number - 1] for run in runs)
        if name == "pass_same_seed":
            rows["pass_same_seed_growth"] = growth


def page_lock(wanted, rows):
    if wanted("page_lock_8GiB"):
        empty_cache()
        start = time.perf_counter()
        block = torch.empty(8 << 30, dtype=torch.uint8, pin_memory=True)
        rows["page_lock_8GiB"] = time.perf_counter() - start
        del block
        empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="measure only the rows with this text in their names")
    parser.add_argument("--threads", type=int, default=1, help="number of threads beside 1, 4 and 16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch has no device")
    # The output of a compiler goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.empty(1, device="cuda")
    rows = {}

    def wanted(name):
        return options.rows in name

    parts = [
        lambda: times(options, wanted, rows),
        lambda: memory(options, wanted, rows),
        lambda: passes(options, wanted, rows),
        lambda: page_lock(wanted, rows),
    ]
    for part in parts:
        try:
            part()
        except Exception as error:  # The other rows count.
            print(f"left out: {error}", file=sys.stderr)
    print(json.dumps({name: value for name, value in rows.items() if wanted(name)}), file=out)


if __name__ == "__main__":
    main()
