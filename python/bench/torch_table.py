"""Measures tensors between processes: PyTorch's own way beside Highwater's, interleaved in one run. Needs PyTorch and a CUDA device.

    python python/bench/torch_table.py [--rounds 300] [--tensors 1000] [--views 19500] [--consumers 1,4,8] [--keep-mapped]

`--keep-mapped` installs the reducers with `keep_mapped=True`. Prints a table in Markdown, with the device, the driver, the versions and the
date. Times are medians. The bytes are those that stay allocated after each process has dropped the tensors of a scenario or was killed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

torch: Any = importlib.import_module("torch")
hwt: Any = importlib.import_module("highwater.torch")

WAYS = ("PyTorch", "Highwater")
MIB = 1 << 20
SETTLE_SECONDS = 1.5


keeps_mapped = False


def use(way: str) -> None:
    """Installs the reducers of a way."""
    if way == "Highwater":
        hwt.install_reducers(keep_mapped=keeps_mapped)
    else:
        hwt.uninstall_reducers()


def serve(connection: Any, queue: Any, keep_mapped: bool) -> None:
    """A consumer, or a producer that sends tensors of its own."""
    global keeps_mapped
    keeps_mapped = keep_mapped
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    kept: Any = None
    connection.send("ready")
    while True:
        try:
            step, argument = connection.recv()
        except EOFError:
            return
        if step == "time":
            message = connection.recv_bytes()
            begin = time.perf_counter()
            tensor = ForkingPickler.loads(message)
            value = tensor[0].item()
            del tensor
            end = time.perf_counter()
            connection.send((end - begin, value))
        elif step == "queue":
            total, (number, reads) = 0.0, argument
            for _ in range(number):
                tensor = queue.get()
                total += tensor[0].item() if reads else 1.0
                del tensor
            connection.send(total)
        elif step == "hold":
            kept = ForkingPickler.loads(connection.recv_bytes())
            if isinstance(kept, hwt.TensorBatch):
                kept = hwt.open_all(kept)
            if argument is not None:
                kept = (kept, kept[:: -(-len(kept) // argument)])
                connection.send(sum(tensor[0].item() for tensor in kept[1]))
                continue
            total = sum(tensor[0].item() for tensor in kept)
            connection.send(total)
        elif step == "drop":
            kept = None
            connection.send("dropped")
        elif step == "produce":
            way, number = argument
            use(way)
            kept = separate(number)
            torch.cuda.synchronize()
            connection.send_bytes(ForkingPickler.dumps(kept))


class Process:
    def __init__(self) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.queue = context.Queue()
        self.process = context.Process(target=serve, args=(other, self.queue, keeps_mapped), daemon=True)
        self.process.start()
        other.close()

    def wait(self) -> Any:
        if not self.connection.poll(120):
            raise TimeoutError("a process does not answer")
        return self.connection.recv()

    def ask(self, step: str, argument: Any = None, message: bytes | None = None) -> None:
        self.connection.send((step, argument))
        if message is not None:
            self.connection.send_bytes(message)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


# Started at once, because each import of PyTorch takes seconds.
pool: list[Process] = []
victims: list[Process] = []


def collect() -> None:
    torch.cuda.ipc_collect()
    hwt.collect()


def settled(left: Callable[[], int]) -> tuple[int, float]:
    """The bytes that are left, once they are 0 or after 5 seconds, and the seconds that it took."""
    begin = time.perf_counter()
    while True:
        collect()
        found, took = left(), time.perf_counter() - begin
        if found <= 0 or took > SETTLE_SECONDS:
            return max(found, 0), took
        time.sleep(0.002)


def one_tensor(rounds: int, is_new: bool) -> dict[str, str]:
    """A tensor of 1 MiB: the time to pickle it, and the time to receive it, read a value and drop it.

    Each way has a consumer of its own. In one process, PyTorch's unmapping would delay Highwater's reads.
    """
    consumers = dict(zip(WAYS, pool, strict=False))
    tensor = torch.full((MIB // 4,), 1.0, device="cuda")
    sends: dict[str, list[float]] = {way: [] for way in WAYS}
    receives: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS:
            use(way)
            if is_new:
                tensor = torch.full((MIB // 4,), 1.0, device="cuda")
            torch.cuda.synchronize()
            begin = time.perf_counter()
            message = bytes(ForkingPickler.dumps(tensor))
            end = time.perf_counter()
            consumers[way].ask("time", None, message)
            received, value = consumers[way].wait()
            assert value == 1.0
            if turn >= 10:
                sends[way].append(end - begin)
                receives[way].append(received)

    def shown(way: str) -> str:
        send, receive = (statistics.median(times[way]) * 1e6 for times in (sends, receives))
        slow = sorted(receives[way])[int(len(receives[way]) * 0.99)] * 1e6
        return f"send {send:.0f} us, receive {receive:.0f} us (99 %: {slow:.0f} us)"

    return {way: shown(way) for way in WAYS}


def separate(number: int) -> list[Any]:
    return [torch.full((MIB // 4,), 1.0, device="cuda") for _ in range(number)]


def of_one_segment(number: int) -> list[Any]:
    """Storages of their own in one allocation of PyTorch's."""
    torch.cuda.empty_cache()
    segment = torch.empty((MIB + 512) * number + 64 * MIB, dtype=torch.uint8, device="cuda")
    del segment
    return [torch.full((MIB // 4 + 128,), 1.0, device="cuda") for _ in range(number)]


def views(number: int) -> list[Any]:
    storage = torch.full((number, MIB // 4), 1.0, device="cuda")
    return [storage[place] for place in range(number)]


def queued(number: int, make: Callable[[int], list[Any]], reads: bool) -> dict[str, str]:
    """`number` tensors of 1 MiB through a queue, whose consumer reads one value of each if `reads`, and drops it: the time for one, from the
    first `put` to the last drop. Repeats this five times. PyTorch's allocator may reuse the segments of earlier times."""
    consumers = dict(zip(WAYS, pool, strict=False))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(5):
        for way in WAYS:
            use(way)
            tensors = make(number)
            torch.cuda.synchronize()
            consumer = consumers[way]
            consumer.ask("queue", (number, reads))
            time.sleep(0.05)
            begin = time.perf_counter()
            for tensor in tensors:
                consumer.queue.put(tensor)
            assert consumer.wait() == number
            found[way].append((time.perf_counter() - begin) / number)
            del tensors, tensor
            collect()
    return {way: f"{statistics.median(times) * 1e6:.0f} us (first time {times[0] * 1e6:.0f} us)" for way, times in found.items()}


def freed_segments(number: int) -> dict[str, str]:
    """A consumer receives `number` tensors, reads one value of each and drops them. Then this process frees their segments: the time of
    `empty_cache`."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(5):
        for way, consumer in zip(WAYS, pool, strict=False):
            use(way)
            torch.cuda.empty_cache()
            before, tensors = torch.cuda.memory_allocated(), separate(number)
            torch.cuda.synchronize()
            consumer.ask("queue", (number, True))
            for tensor in tensors:
                consumer.queue.put(tensor)
            assert consumer.wait() == number
            del tensors, tensor
            settled(lambda before=before: torch.cuda.memory_allocated() - before)  # type: ignore[misc]
            begin = time.perf_counter()
            torch.cuda.empty_cache()
            found[way].append(time.perf_counter() - begin)
    return {way: f"{statistics.median(times) * 1e3:.0f} ms" for way, times in found.items()}


def many_tensors(number: int, consumers: int) -> dict[str, str]:
    """`number` tensors of 1 MiB to each consumer: the time until each has read one value of each; and the bytes left."""
    processes = pool[:consumers]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    lefts: dict[str, tuple[int, float]] = {}
    for _ in range(3):
        for way in WAYS:
            use(way)
            before = torch.cuda.memory_allocated()
            tensors = separate(number)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for process in processes:
                process.ask("hold", None, bytes(ForkingPickler.dumps(tensors)))
            for process in processes:
                assert process.wait() == number
            found[way].append(time.perf_counter() - begin)
            del tensors
            for process in processes:
                process.ask("drop")
            for process in processes:
                process.wait()
            lefts[way] = settled(lambda before=before: torch.cuda.memory_allocated() - before)  # type: ignore[misc]
    return {
        way: f"{statistics.median(found[way]) * 1e3:.0f} ms; {lefts[way][0]} bytes left after {lefts[way][1] * 1e3:.0f} ms"
        for way in WAYS
    }


def many_views(views: int, storages: int, consumers: int) -> dict[str, str]:
    """Views over few storages to each consumer, as the weights of a model: the time until each has read one of each storage."""
    processes = pool[:consumers]
    length = -(-views // storages)
    flat = [torch.full((length * 256,), 1.0, device="cuda") for _ in range(storages)]
    tensors = [flat[place // length][place % length * 256 :][:256] for place in range(views)]
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(2):
        for way in WAYS:
            use(way)
            begin = time.perf_counter()
            if way == "Highwater":
                message = bytes(ForkingPickler.dumps(hwt.share_all(tensors, opens=consumers)))
                messages = [message] * consumers
            else:
                # Each message is opened once, as PyTorch's counters need.
                messages = [bytes(ForkingPickler.dumps(tensors)) for _ in processes]
            for process, message in zip(processes, messages, strict=True):
                process.ask("hold", storages, message)
            for process in processes:
                assert process.wait() == storages
            found[way].append(time.perf_counter() - begin)
            for process in processes:
                process.ask("drop")
            for process in processes:
                process.wait()
            collect()
    return {way: f"{statistics.median(found[way]) * 1e3:.0f} ms" for way in WAYS}


def killed_consumer(number: int) -> dict[str, str]:
    """A consumer is killed while it has the tensors. Then the producer drops them."""
    found = {}
    for way in WAYS:
        use(way)
        consumer = victims.pop()
        before = torch.cuda.memory_allocated()
        tensors = separate(number)
        torch.cuda.synchronize()
        consumer.ask("hold", None, bytes(ForkingPickler.dumps(tensors)))
        assert consumer.wait() == number
        consumer.kill()
        del tensors
        left, took = settled(lambda before=before: torch.cuda.memory_allocated() - before)  # type: ignore[misc]
        found[way] = f"{left} bytes left after {took * 1e3:.0f} ms"
    return found


def killed_producer(number: int) -> dict[str, str]:
    """A producer is killed while this process has its tensors. Then this process drops them."""
    found = {}
    for way in WAYS:
        producer = victims.pop()
        producer.ask("produce", (way, number))
        tensors = ForkingPickler.loads(producer.connection.recv_bytes())
        assert tensors[-1][0].item() == 1.0
        producer.kill()
        time.sleep(0.5)  # The driver frees what the process alone had.
        held = torch.cuda.mem_get_info()[0]
        values = sum(tensor[-1].item() for tensor in tensors)
        del tensors
        left, took = settled(lambda held=held: held + number * MIB - torch.cuda.mem_get_info()[0])  # type: ignore[misc]
        found[way] = f"{values:.0f} of {number} values right; {left} bytes left after {took * 1e3:.0f} ms"
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=300)
    arguments.add_argument("--tensors", type=int, default=1000)
    arguments.add_argument("--views", type=int, default=19_500)
    arguments.add_argument("--consumers", default="1,4,8")
    arguments.add_argument("--keep-mapped", action="store_true")
    options = arguments.parse_args()
    global keeps_mapped
    keeps_mapped = options.keep_mapped
    torch.cuda.init()
    counts = [int(consumers) for consumers in options.consumers.split(",")]
    pool.extend(Process() for _ in range(max(*counts, 4)))
    victims.extend(Process() for _ in range(4))
    for process in pool + victims:
        assert process.wait() == "ready"
    scenarios: list[tuple[str, Callable[[], dict[str, str]]]] = [
        ("one tensor of 1 MiB, sent again and again", lambda: one_tensor(options.rounds, False)),
        ("a new tensor of 1 MiB each time", lambda: one_tensor(options.rounds, True)),
    ]
    for make, name in ((separate, "tensors, two in each allocation,"), (of_one_segment, "storages of one allocation"), (views, "views of one storage")):
        for reads in (True, False):
            what = f"{2 * options.tensors} {name} through a queue, each" + ("" if reads else ", no value read")
            scenarios.append((what, lambda make=make, reads=reads: queued(2 * options.tensors, make, reads)))  # type: ignore[misc]
    name = f"`empty_cache()` after {options.tensors} tensors, two in each allocation"
    scenarios.append((name, lambda: freed_segments(options.tensors)))
    for consumers in counts:
        name = f"{options.tensors} tensors of 1 MiB, {consumers} consumers"
        scenarios.append((name, lambda consumers=consumers: many_tensors(options.tensors, consumers)))  # type: ignore[misc]
    scenarios += [
        (f"{options.views} views of 40 storages, 4 consumers", lambda: many_views(options.views, 40, 4)),
        (f"a consumer killed with {options.tensors} tensors", lambda: killed_consumer(options.tensors)),
        (f"a producer killed, {options.tensors} tensors open", lambda: killed_producer(options.tensors)),
    ]
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    print("with keep_mapped" if keeps_mapped else "without keep_mapped")
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}, {now}\n")
    print("| what | PyTorch | Highwater |\n| --- | --- | --- |", flush=True)
    for name, measure in scenarios:
        try:
            found = measure()
        except Exception as error:
            found = dict.fromkeys(WAYS, f"failed: {type(error).__name__}: {error}")
        print(f"| {name} | {found['PyTorch']} | {found['Highwater']} |", flush=True)
    for process in pool:
        process.queue.cancel_join_thread()
        process.kill()


if __name__ == "__main__":
    main()
