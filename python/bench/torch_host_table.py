"""Measures page-locked tensors: PyTorch's own allocator beside Highwater's, interleaved in one run. Needs PyTorch 2.11, a CUDA device
and a C++ compiler.

    python python/bench/torch_host_table.py [--rounds 7]

Two processes take alternate rounds, because an installed allocator stays. Prints a table in Markdown, with the device, the versions and
the date. Times are medians of the rounds.

The processors of a virtual machine may differ in speed, each for a while. So both processes take the rounds of one thread on the same
processor, the next one after each pair of rounds. These rows also have the median of the quotients of the pairs.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import multiprocessing
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

WAYS = ("PyTorch", "Highwater")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "64 MiB": 64 * MIB}


def serve(connection: Any, way: str) -> None:
    torch: Any = importlib.import_module("torch")
    hwt: Any = importlib.import_module("highwater.torch")
    torch.cuda.init()
    if way == "Highwater":
        hwt.install_host_allocator()
    threads = ctypes.CDLL(str(hwt._compiled("torch_host_table", pathlib.Path(__file__).with_name("_host_threads.cpp"))))
    threads.nanoseconds_per_pair.restype = ctypes.c_double
    target = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")

    every = os.sched_getaffinity(0)

    def empty(size: int, pairs: int) -> float:
        for _ in range(200):
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
        begin = time.perf_counter()
        for _ in range(pairs):
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return (time.perf_counter() - begin) / pairs * 1e9

    def copied(size: int, pairs: int) -> float:
        """Allocates, copies to the device without waiting, and frees under the running copy."""
        for _ in range(200):
            target[:size].copy_(torch.empty(size, dtype=torch.uint8, pin_memory=True), non_blocking=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(pairs):
            target[:size].copy_(torch.empty(size, dtype=torch.uint8, pin_memory=True), non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / pairs * 1e9

    def held(seed: int) -> float:
        """1.5 GiB of tensors of mixed sizes, all alive: the page-locked bytes over the requested ones."""
        draw, kept, requested = random.Random(seed), [], 0
        while requested < 3 * GIB // 2:
            size = int(2 ** draw.uniform(12, 26))
            kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            requested += size
        return float(torch.cuda.host_memory_stats()["allocated_bytes.current"]) / requested

    steps: dict[str, Callable[..., float]] = {
        "empty": empty,
        "copied": copied,
        "threads": lambda size, pairs: threads.nanoseconds_per_pair(16, ctypes.c_size_t(size), pairs),
        "held": held,
    }
    connection.send("ready")
    while True:
        try:
            step, processor, arguments = connection.recv()
        except EOFError:
            return
        os.sched_setaffinity(0, every if processor is None else {processor})
        connection.send(steps[step](*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    context: Any = multiprocessing.get_context("spawn")
    lines: dict[str, Any] = {}
    for way in WAYS:
        lines[way], other = context.Pipe()
        context.Process(target=serve, args=(other, way), daemon=True).start()
        other.close()
    for way in WAYS:
        assert lines[way].recv() == "ready"

    def measure(step: str, *arguments: int, repeats: int = rounds, processors: Sequence[int | None]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(repeats):
            for way in WAYS:
                lines[way].send((step, processors[turn % len(processors)], arguments))
                found[way].append(lines[way].recv())
        return found

    torch: Any = importlib.import_module("torch")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}, {now}\n")
    print("| what | PyTorch | Highwater |\n| --- | --- | --- |", flush=True)

    def row(what: str, found: dict[str, list[float]], unit: str = "ns", in_pairs: bool = False) -> None:
        digits = 2 if unit == "" else 0
        shown = [f"{statistics.median(found[way]):,.{digits}f} {unit}".strip() for way in WAYS]
        if in_pairs:
            quotient = statistics.median(own / other for other, own in zip(*(found[way] for way in WAYS), strict=True))
            shown[1] += f" ({quotient:.3f} times PyTorch's, in pairs)"
        print(f"| {what} | {' | '.join(shown)} |", flush=True)

    def one_thread(what: str, step: str, size: int) -> None:
        row(what, measure(step, size, 2000, repeats=16 * rounds, processors=sorted(os.sched_getaffinity(0))), in_pairs=True)

    # Before any memory is idle.
    row("1.5 GiB of tensors of mixed sizes: held over requested", measure("held", 7, repeats=1, processors=[None]), "")
    for name, size in SIZES.items():
        one_thread(f"`torch.empty(pin_memory=True)` and its release, {name}, 1 thread", "empty", size)
    for name, size in SIZES.items():
        row(f"the same in C++, 16 threads, {name}", measure("threads", size, 20_000, processors=[None]))
    one_thread("allocate, copy 4 KiB to the device, release, 1 thread", "copied", 4 * KIB)


if __name__ == "__main__":
    main()
