"""One process loads weights into device memory, and others multiply by them without a copy."""

import multiprocessing
import sys
from typing import Any

import numpy as np

import highwater

WORKERS = 3


def work(number: int, tickets: Any, results: Any) -> None:
    with highwater.open("auto", fallback="mock") as runtime:
        stream = runtime.device(0).create_stream()
        weights = runtime.open_shared(tickets.get())
        inputs = stream.upload(np.full((1, 4), number, "float32"))
        results.put((number, stream.download(stream.matmul(inputs, weights)).tolist()))


def main() -> None:
    # A child of `fork` cannot use a GPU that its parent has opened.
    context = multiprocessing.get_context("spawn")
    tickets, results = context.Queue(), context.Queue()
    workers = [context.Process(target=work, args=(number, tickets, results)) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    with highwater.open("auto", fallback="mock") as runtime:
        device = runtime.device(0)
        weights = device.allocate_shared((4, 2), "float32")
        device.create_stream().write([[1, 10], [2, 20], [3, 30], [4, 40]], weights)
        for _ in workers:
            tickets.put(weights.share())
        answers = sorted(results.get(timeout=60) for _ in workers)
        # The weights stay until here.
        del weights
    for worker in workers:
        worker.join()
    for number, answer in answers:
        print(f"worker {number}: {answer}")
    if answers != [(number, [[10.0 * number, 100.0 * number]]) for number in range(WORKERS)]:
        sys.exit("an answer is wrong")


if __name__ == "__main__":
    main()
