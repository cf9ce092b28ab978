"""One process makes the weights, and three workers use them without a copy. Needs PyTorch and a CUDA device.

The program also shows that killed workers keep no memory.
"""

import multiprocessing
import time
from typing import Any

import torch

import highwater.torch


def work(queue: Any, results: Any) -> None:
    weights = queue.get()  # The memory of the producer, not a copy.
    results.put(sum(map(sum, weights["first"].tolist())))
    while True:
        time.sleep(1)  # A real worker uses the weights here.


def main() -> None:
    highwater.torch.install_reducers()
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    workers = [context.Process(target=work, args=(queue, results), daemon=True) for _ in range(3)]
    for worker in workers:
        worker.start()
    first = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cuda")
    weights = {"first": first, "transposed": first.t()}  # Views of one storage arrive as views of one.
    for _ in workers:
        queue.put(weights)
    assert [results.get(timeout=60) for _ in workers] == [10.0, 10.0, 10.0]

    del first, weights
    assert highwater.torch.kept_bytes() == 16  # The workers have the storage.
    for worker in workers:
        worker.kill()
        worker.join()
    while highwater.torch.kept_bytes() > 0:  # The killed workers keep nothing.
        time.sleep(0.01)
    highwater.torch.uninstall_reducers()
    print("three workers read the weights, and their memory is free")


if __name__ == "__main__":
    main()
