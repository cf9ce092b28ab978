"""The parts of PyTorch's module that `highwater.torch` uses."""

from __future__ import annotations

from typing import Any, NoReturn

from .. import UntypedStorage


class StorageWeakRef:
    def __init__(self, storage: UntypedStorage) -> None:
        self.cdata = storage._cdata

    def expired(self) -> bool:
        return UntypedStorage._new_with_weak_ptr(self.cdata) is None


def reduce_tensor(tensor: Any) -> NoReturn:
    raise RuntimeError("PyTorch's own way")
