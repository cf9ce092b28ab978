"""A `DataLoader` whose batches go to the device through page-locked memory of Highwater. Needs PyTorch and a CUDA device."""

from collections.abc import Iterator
from typing import Any

import torch

import highwater.torch


class PinnedLoader:
    """Copies each batch of a loader to the device while the program works on the previous batch. A batch is one tensor."""

    def __init__(self, loader: Any, device: int = 0, slots: int = 2) -> None:
        self.loader = loader
        self.device = torch.device("cuda", device)
        self.stream = torch.cuda.Stream(self.device)
        # Each slot has its page-locked tensor, and an event after the last copy from it.
        self.slots: list[Any] = [None] * slots

    def staged(self, place: int, batch: Any) -> Any:
        """Copies a batch to a slot after the last copy from it. A new slot comes from the pool."""
        slot = self.slots[place]
        if slot is not None:
            slot[2].synchronize()
        if slot is None or slot[1].shape != batch.shape or slot[1].dtype != batch.dtype:
            memory = highwater.torch.runtime().device(self.device.index).pinned(tuple(batch.shape), batch.dtype)
            slot = self.slots[place] = (memory, torch.from_dlpack(memory), torch.cuda.Event())
        slot[1].copy_(batch)
        return slot

    def __iter__(self) -> Iterator[Any]:
        ahead: Any = None
        for number, batch in enumerate(self.loader):
            slot = self.staged(number % len(self.slots), batch)
            with torch.cuda.stream(self.stream):
                copied = slot[1].to(self.device, non_blocking=True)
                slot[2].record()
            if ahead is not None:
                yield self.arrived(ahead)
            ahead = (copied, slot[2])
        if ahead is not None:
            yield self.arrived(ahead)

    def arrived(self, ahead: Any) -> Any:
        copied, event = ahead
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        copied.record_stream(current)
        return copied


def main() -> None:
    values = torch.arange(40_000, dtype=torch.float32).reshape(1000, 40)
    loader = torch.utils.data.DataLoader(values, batch_size=64)
    pinned = PinnedLoader(loader)
    batches = [batch.cpu() for batch in pinned]
    assert torch.equal(torch.cat(batches), values)
    assert all(slot[1].is_pinned() for slot in pinned.slots)
    print("all batches arrived through page-locked memory")


if __name__ == "__main__":
    main()
