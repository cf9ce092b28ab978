#!/usr/bin/env python3
"""PyTorch's side of the rows of `highwater bench`: one JSON object of names and numbers on standard output.

    bench-pytorch.py [host|device|handles] [--rows TEXT] [--threads N] [--rounds N] [--seeds N] > peer.json
    highwater bench host --peer peer.json

The rows of time call PyTorch's allocators and its handles from C++, because a call from Python costs several times as much and
its threads share a lock. They need a C++ compiler and ninja; without them they are left out. Blocks of traces are
`torch.empty`, in page-locked memory or in device memory with the default settings of PyTorch's allocator. The first handles are
those of a forked process, in which CUDA starts. Without PyTorch, NumPy or a device, the program exits with 1.
"""

import argparse
import inspect
import json
import os
import statistics
import sys
import threading
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
#include <pybind11/pybind11.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

// A part of a loop that is timed, and one after it that is not.
struct Work {
  std::function<void(int)> batch;
  std::function<void()> settle = [] {};
  int size_of_batch = 256;
};

#if defined(HOST)
#include <ATen/core/CachingHostAllocator.h>

// kind 0: allocate and free; 1: with a use of the thread's stream; 2: with a copy of 4 KiB.
Work start(int kind, size_t size, c10::cuda::CUDAStream stream) {
  auto* pool = at::getHostAllocator(at::kCUDA);
  void* memory = nullptr;
  if (kind == 2 && cudaMalloc(&memory, size) != cudaSuccess) throw std::runtime_error("no device memory");
  auto device = std::shared_ptr<void>(memory, cudaFree);
  Work work{[=](int count) {
    for (int i = 0; i < count; ++i) {
      auto block = pool->allocate(size);
      if (kind == 2) cudaMemcpyAsync(device.get(), block.get(), size, cudaMemcpyHostToDevice, stream.stream());
      if (kind) pool->record_event(block.get(), block.get_context(), stream.unwrap());
    }
  }};
  if (kind) work.settle = [=] { stream.synchronize(); };
  if (kind == 1) work.size_of_batch = int(std::clamp<size_t>((32 << 20) / size, 4, 256));
  return work;
}
#elif defined(DEVICE)
#include <c10/cuda/CUDACachingAllocator.h>

// kind 0: allocate and free; 1: with a fill by the thread's stream; 2: with a fill by another stream, which waits for the
// allocation and is recorded.
Work start(int kind, size_t size, c10::cuda::CUDAStream stream) {
  auto* pool = c10::cuda::CUDACachingAllocator::get();
  if (kind == 0) {
    return Work{[=](int count) {
      for (int i = 0; i < count; ++i) auto block = pool->allocate(size);
    }};
  }
  auto other = kind == 2 ? c10::cuda::getStreamFromPool(false, 0) : stream;
  cudaEvent_t created = nullptr;
  if (cudaEventCreateWithFlags(&created, cudaEventDisableTiming) != cudaSuccess) throw std::runtime_error("no event");
  auto event = std::shared_ptr<CUevent_st>(created, cudaEventDestroy);
  auto batch = [=](int count) {
    for (int i = 0; i < count; ++i) {
      auto block = pool->allocate(size);
      if (kind == 2) {
        cudaEventRecord(event.get(), stream.stream());
        cudaStreamWaitEvent(other.stream(), event.get(), 0);
      }
      cudaMemsetAsync(block.get(), 1, size, other.stream());
      if (kind == 2) pool->recordStream(block, other);
    }
  };
  auto settle = [=] {
    stream.synchronize();
    other.synchronize();
  };
  return Work{batch, settle, int(std::clamp<size_t>((32 << 20) / size, 4, 64))};
}
#else
#include <ATen/cuda/CUDAContextLight.h>

// The handle of the current stream. kind 0: always the same stream; 1: another one each time.
Work start(int kind, size_t, c10::cuda::CUDAStream stream) {
  if (kind == 0) {
    return Work{[](int count) {
      for (int i = 0; i < count; ++i) at::cuda::getCurrentCUDABlasHandle();
    }};
  }
  auto other = c10::cuda::getStreamFromPool(false, 0);
  return Work{[=](int count) {
    for (int i = 0; i < count; ++i) {
      c10::cuda::setCurrentCUDAStream(i % 2 ? stream : other);
      at::cuda::getCurrentCUDABlasHandle();
    }
  }};
}
#endif

// Mean nanoseconds over the threads. With own_sizes, each thread has twice the size of the one before.
double loop(int kind, int64_t bytes, int threads, double seconds, bool own_sizes) {
  using clock = std::chrono::steady_clock;
  std::barrier together(threads);
  std::vector<double> times(threads, -1);
  auto run = [&](int thread) {
    Work work;
    bool ready = false;
    try {
      auto stream = c10::cuda::getStreamFromPool(false, 0);
      c10::cuda::setCurrentCUDAStream(stream);
      work = start(kind, own_sizes ? size_t(bytes) << thread : size_t(bytes), stream);
      for (int i = 0; i < 2; ++i) { work.batch(work.size_of_batch); work.settle(); }
      ready = true;
    } catch (...) {
    }
    together.arrive_and_wait();
    if (!ready) return;
    try {
      double timed = 0;
      int64_t count = 0;
      while (timed < seconds) {
        auto begun = clock::now();
        work.batch(work.size_of_batch);
        timed += std::chrono::duration<double>(clock::now() - begun).count();
        count += work.size_of_batch;
        work.settle();
      }
      times[thread] = timed * 1e9 / double(count);
    } catch (...) {
    }
  };
  {
    pybind11::gil_scoped_release released;
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread) running.emplace_back(run, thread);
    for (auto& each : running) each.join();
  }
  double sum = 0;
  for (double each : times) {
    if (each < 0) throw std::runtime_error("a thread failed, for example because no memory was left");
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


class Cache:
    """An empty cache of page-locked memory, and the largest sum of the bytes given out since."""

    def __init__(self):
        self.empty()
        self.before = self.bytes_held()
        self.peak = 0

    @staticmethod
    def empty():
        torch.cuda.synchronize()
        torch._C._host_emptyCache()

    @staticmethod
    def bytes_held():
        return torch.cuda.memory.host_memory_stats()["allocated_bytes.current"]

    @staticmethod
    def allocate(size):
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

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
            held[slot] = self.allocate(size)
        return (time.perf_counter() - start) * 1e3

    def held(self):
        return self.bytes_held() - self.before

    def ratio(self, *traces):
        for trace in traces:
            self.run(trace)
        return self.held() / self.peak


class DeviceCache(Cache):
    """An empty cache of device memory. It holds the most that it held since."""

    @staticmethod
    def empty():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @staticmethod
    def bytes_held():
        return torch.cuda.max_memory_reserved()

    @staticmethod
    def allocate(size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def groups(options):
    """The groups of rows of time that are interleaved: kind, bytes, threads, and whether each thread has its own size."""
    counts = sorted({1, 4, 16, options.threads})
    if options.part == "host":
        return [
            {f"hit_{size}_t{count}": (0, bytes, count, False) for size, bytes in SIZES.items() for count in counts}
            | {"hit_own_size_t16": (0, 4096, 16, True)},
            {f"use_{size}_t{count}": (1, bytes, count, False) for count in counts for size, bytes in SIZES.items()},
            {f"copy_4KiB_t{count}": (2, 4096, count, False) for count in counts},
        ]
    if options.part == "device":
        uses = {"own_stream": 1, "other_stream": 2}
        return [
            {f"same_stream_{size}_{count}t": (0, bytes, count, False) for size, bytes in SIZES.items() for count in counts},
            {
                f"{name}_{size}_{count}t": (kind, SIZES[size], count, False)
                for size in ("4KiB", "1MiB")
                for count in counts
                for name, kind in uses.items()
            },
        ]
    leases = {"lease_same_stream": 0, "lease_other_stream": 1}
    return [{f"{name}_{count}t": (kind, 0, count, False) for count in counts} for name, kind in leases.items()]


def times(options, wanted, rows):
    """The rows of time."""
    selected = [{name: loop for name, loop in group.items() if wanted(name)} for group in groups(options)]
    if not any(selected):
        return
    from torch.utils.cpp_extension import CUDA_HOME, load_inline

    # Without a toolkit, the headers of PyTorch's own packages serve.
    packages = Path(torch.__file__).parent.parent / "nvidia"
    settings = dict(
        extra_cflags=["-O3", "-std=c++20", f"-D{options.part.upper()}"],
        extra_ldflags=["-lc10_cuda", "-ltorch_cuda"],
        extra_include_paths=[str(folder) for end in ("include", "include/cccl") for folder in packages.glob(f"*/{end}")],
        with_cuda=CUDA_HOME is not None,
    )
    # The headers that are included otherwise take most of the time of the compiler.
    if "no_implicit_headers" in inspect.signature(load_inline).parameters:
        settings["no_implicit_headers"] = True
    library = load_inline(f"highwater_bench_{options.part}", CPP, **settings)
    for group in selected:
        measured = {name: [] for name in group}
        for _ in range(options.rounds):
            for name, (kind, size, count, own) in group.items():
                measured[name].append(library.loop(kind, size, count, 0.005, own))
        rows.update({name: statistics.median(values) for name, values in measured.items()})
        if options.part != "handles":
            (Cache if options.part == "host" else DeviceCache).empty()


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
        Cache.empty()
        start = time.perf_counter()
        block = torch.empty(8 << 30, dtype=torch.uint8, pin_memory=True)
        rows["page_lock_8GiB"] = time.perf_counter() - start
        del block
        Cache.empty()


def device_memory(options, wanted, rows):
    """The traces in device memory. PyTorch has one kind of it, so both kinds of `highwater` get its values."""

    def add(name, value):
        rows.update({f"{name}_{kind}": value for kind in ("mapped", "plain")})

    def any_wanted(*names):
        return any(wanted(f"{name}_{kind}") for name in names for kind in ("mapped", "plain"))

    def ratio(*seeds):
        return DeviceCache().ratio(*map(log_uniform, seeds))

    if any_wanted("trace_three_seeds"):
        add("trace_three_seeds", ratio(1, 2, 3))
    if any_wanted("trace_others", "trace_others_p90"):
        firsts = [4 + 3 * at for at in range((options.seeds + 1) // 2)]
        ratios = [ratio(first, first + 1, first + 2) for first in firsts]
        add("trace_others", quantile(ratios, 0.5))
        add("trace_others_p90", quantile(ratios, 0.9))
    if any_wanted("trace_fresh_seeds", "trace_fresh_seeds_p90"):
        ratios = [ratio(seed) for seed in range(1, options.seeds + 1)]
        add("trace_fresh_seeds", quantile(ratios, 0.5))
        add("trace_fresh_seeds_p90", quantile(ratios, 0.9))


def first_handle_here(threads):
    """Starts CUDA, and returns the milliseconds in which threads get the handles of a stream each."""
    torch.cuda.init()
    streams = [torch.cuda.Stream() for _ in range(threads)]
    barrier = threading.Barrier(threads, timeout=60)
    taken = []

    def take(stream):
        torch.cuda.set_stream(stream)
        barrier.wait()
        start = time.perf_counter()
        torch.cuda.current_blas_handle()
        taken.append((start, time.perf_counter()))
        # Every thread keeps its handle until all have one.
        barrier.wait()

    running = [threading.Thread(target=take, args=(stream,)) for stream in streams]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if len(taken) < threads:
        raise RuntimeError("a thread failed")
    starts, ends = zip(*taken)
    return (max(ends) - min(starts)) * 1e3


def first_handle(threads):
    """The same in a forked process. Starting Python and PyTorch again would take seconds."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sender, str(first_handle_here(threads)).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return float(text)


def first_handles(options, wanted, rows):
    """The first handles of fresh processes. CUDA must not have started in this one."""
    counts = {name: count for name, count in {"first_handle_1t": 1, "first_handle_16t": 16}.items() if wanted(name)}
    measured = {name: [] for name in counts}
    for _ in range(options.rounds):
        for name, count in counts.items():
            measured[name].append(first_handle(count))
    rows.update({name: statistics.median(values) for name, values in measured.items()})


def attempt(part):
    try:
        part()
    except Exception as error:  # The other rows count.
        print(f"left out: {error}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="host", choices=["host", "device", "handles"], help="[default: host]")
    parser.add_argument("--rows", default="", help="measure only the rows with this text in their names")
    parser.add_argument("--threads", type=int, default=1, help="number of threads beside 1, 4 and 16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    # The output of a compiler goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rows = {}

    def wanted(name):
        return options.rows in name

    if options.part == "handles":
        attempt(lambda: first_handles(options, wanted, rows))
    if not torch.cuda.is_available():
        sys.exit("PyTorch has no device")
    torch.empty(1, device="cuda")
    attempt(lambda: times(options, wanted, rows))
    if options.part == "host":
        attempt(lambda: memory(options, wanted, rows))
        attempt(lambda: passes(options, wanted, rows))
        attempt(lambda: page_lock(wanted, rows))
    if options.part == "device":
        attempt(lambda: device_memory(options, wanted, rows))
    print(json.dumps({name: value for name, value in rows.items() if wanted(name)}), file=out)


if __name__ == "__main__":
    main()
