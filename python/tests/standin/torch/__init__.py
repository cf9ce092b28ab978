"""A stand-in for PyTorch: storages and tensors over the memory of a Highwater runtime, with the names that `highwater.torch` uses.

It has no arithmetic. Tests use it where PyTorch or a CUDA device is missing, over the mock and the simulated CUDA.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import math
import os
import sys
import types
import weakref
from typing import Any

import numpy as np

__version__ = "stand-in"
version = types.SimpleNamespace(hip=None)
strided = "strided"


class dtype:
    def __init__(self, name: str) -> None:
        self.name = name
        self.itemsize = np.dtype(name).itemsize

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


float32, float64, int32, int64, uint8, complex64 = (
    dtype(name) for name in ("float32", "float64", "int32", "int64", "uint8", "complex64")
)


class device:
    def __init__(self, type: str, index: int = 0) -> None:
        self.type, self.index = type, index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, device) and (self.type, self.index) == (other.type, other.index)


# The name of a parameter of `empty`.
_device = device
_storages: weakref.WeakValueDictionary[int, UntypedStorage] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
weak_references: collections.Counter[int] = collections.Counter()
"""The weak references to storages, which the caller must free."""


class UntypedStorage:
    def __init__(self, nbytes: int, buffer: Any = None, on: device | None = None) -> None:
        self.buffer = buffer
        self._nbytes = nbytes
        self._address = 0 if buffer is None or nbytes == 0 else buffer.ptr
        self._cdata = next(_numbers)
        self.device = on or device("cpu" if buffer is None else "cuda", 0 if buffer is None else buffer.device)
        self._holder: weakref.ref[_Storage] | None = None
        _storages[self._cdata] = self

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._nbytes

    def held(self) -> _Storage:
        """What all tensors over the storage hold."""
        held = None if self._holder is None else self._holder()
        if held is None:
            held = _Storage(self)
            self._holder = weakref.ref(held)
        return held

    def tensors(self) -> int:
        """The number of tensors over the storage."""
        held = None if self._holder is None else self._holder()
        # Less the references of this function.
        return 0 if held is None else sys.getrefcount(held) - 2

    def _weak_ref(self) -> int:
        weak_references[self._cdata] += 1
        return self._cdata

    @staticmethod
    def _expired(cdata: int) -> bool:
        # PyTorch reads freed memory without a weak reference.
        assert weak_references[cdata] > 0
        return cdata not in _storages

    @staticmethod
    def _free_weak_ref(cdata: int) -> None:
        assert weak_references[cdata] > 0
        weak_references[cdata] -= 1

    @staticmethod
    def _new_with_weak_ptr(cdata: int) -> UntypedStorage | None:
        assert weak_references[cdata] > 0
        return _storages.get(cdata)


class _Storage:
    """Keeps the storage for its tensors. References of C++, which Python's count of the storage does not have."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage = storage


class Tensor:
    layout = strided
    is_nested = is_quantized = False

    def __init__(self, storage: UntypedStorage, kind: dtype, size: Any, stride: Any, offset: int) -> None:
        self._holds = storage.held()
        self.dtype, self._size, self._stride, self._offset = kind, tuple(size), tuple(stride), offset
        self.requires_grad, self.is_leaf = False, True
        self._is_conj = self._is_neg = False
        self.names: tuple[str, ...] = ()

    @property
    def device(self) -> device:
        return self._holds.storage.device

    @property
    def shape(self) -> tuple[int, ...]:
        return self._size

    def untyped_storage(self) -> UntypedStorage:
        return self._holds.storage

    def data_ptr(self) -> int:
        return self._holds.storage.data_ptr() + self._offset * self.dtype.itemsize

    def size(self) -> tuple[int, ...]:
        return self._size

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def storage_offset(self) -> int:
        return self._offset

    def is_conj(self) -> bool:
        return self._is_conj

    def is_complex(self) -> bool:
        return self.dtype is complex64

    def is_neg(self) -> bool:
        return self._is_neg

    def has_names(self) -> bool:
        return bool(self.names)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def requires_grad_(self) -> Tensor:
        self.requires_grad = True
        return self

    def conj(self) -> Tensor:
        result = self.as_strided(self._size, self._stride, self._offset)
        result._is_conj, result._is_neg = True, self._is_neg
        return result

    def as_strided(self, size: Any, stride: Any, offset: int) -> Tensor:
        return Tensor(self._holds.storage, self.dtype, size, stride, offset)

    def set_(self, storage: UntypedStorage, offset: int, size: Any, stride: Any) -> Tensor:
        self._holds = storage.held()
        self._size, self._stride, self._offset = tuple(size), tuple(stride), offset
        return self

    def t(self) -> Tensor:
        return self.as_strided(self._size[::-1], self._stride[::-1], self._offset)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._size[0])
        size, offset = (stop - start, *self._size[1:]), self._offset + start * self._stride[0]
        return self.as_strided(size, self._stride, offset)

    def _array(self, values: Any) -> Any:
        strides = [stride * self.dtype.itemsize for stride in self._stride]
        flat = values.view(self.dtype.name)[self._offset :]
        return np.lib.stride_tricks.as_strided(flat, self._size, strides)

    def tolist(self) -> Any:
        storage = self._holds.storage
        if storage.buffer is None:
            return self._array(np.empty(0, "uint8")).tolist()
        return self._array(_stream(storage.device.index).download(storage.buffer)).tolist()

    def fill_(self, value: float) -> Tensor:
        storage = self._holds.storage
        stream = _stream(storage.device.index)
        values = stream.download(storage.buffer)
        self._array(values)[...] = value
        stream.write(values, storage.buffer)
        return self


class Parameter(Tensor):
    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Parameter:
        return super().__new__(cls)

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__(data.untyped_storage(), data.dtype, data.size(), data.stride(), data.storage_offset())
        self.requires_grad = requires_grad


nn = types.SimpleNamespace(Parameter=Parameter)


def _neg_view(tensor: Tensor) -> Tensor:
    result = tensor.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    result._is_conj, result._is_neg = tensor.is_conj(), True
    return result


def empty(*size: int, dtype: dtype = float32, device: Any = "cpu") -> Tensor:
    """Allocates on the current stream's device, as PyTorch does. The contents are unspecified."""
    nbytes = math.prod(size) * dtype.itemsize
    stride = [math.prod(size[place + 1 :]) for place in range(len(size))]
    kind = device if isinstance(device, str) else device.type
    if kind == "cpu":
        return Tensor(UntypedStorage(nbytes), dtype, size, stride, 0)
    import highwater.torch

    ordinal = 0 if isinstance(device, str) else device.index
    if nbytes == 0:
        return Tensor(UntypedStorage(0, None, _device("cuda", ordinal)), dtype, size, stride, 0)
    buffer = highwater.torch.runtime().device(ordinal).allocate_shared(nbytes, "uint8")
    return Tensor(UntypedStorage(nbytes, buffer), dtype, size, stride, 0)


def tensor(values: Any, dtype: dtype = float32, device: Any = "cpu") -> Tensor:
    array = np.ascontiguousarray(values, dtype.name)
    made = empty(*array.shape, dtype=dtype, device=device)
    storage = made.untyped_storage()
    _stream(storage.device.index).write(array.reshape(-1).view("uint8"), storage.buffer)
    return made


def _use_count(cdata: int) -> int:
    return 1 + _storages[cdata].tensors()


def _construct(metadata: dict[str, Any], storage: UntypedStorage) -> Tensor:
    return Tensor(storage, metadata["dtype"], metadata["size"], metadata["stride"], metadata["storage_offset"])


_C = types.SimpleNamespace(_storage_Use_Count=_use_count, _construct_CUDA_Tensor_From_Storage_And_Metadata=_construct)


class _Shim:
    """Tensors of `shim.c`, in capsules."""

    def __init__(self, path: str) -> None:
        # Its counters need the interpreter's lock.
        self.functions = ctypes.PyDLL(path)
        self.functions.standin_new.restype = ctypes.c_void_p
        self.functions.standin_new.argtypes = [
            ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
        ]  # fmt: skip
        for name in ("standin_storage", "standin_dimensions", "standin_offset", "standin_live"):
            getattr(self.functions, name).restype = ctypes.c_int64
        self.types = [float32, float64, int32, int64, uint8, complex64]
        python = ctypes.pythonapi
        self.capsule, self.pointer = python.PyCapsule_New, python.PyCapsule_GetPointer
        self.capsule.restype, self.capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.pointer.restype, self.pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def fail_after(self, calls: int) -> None:
        """Lets the call after so many calls fail. Negative: none."""
        self.functions.standin_fail_after(ctypes.c_int64(calls))

    def live(self) -> int:
        return int(self.functions.standin_live())

    def unsafe_alloc_void_ptr_from_tensor(self, tensor: Tensor) -> Any:
        size, stride = tensor.size(), tensor.stride()
        number = self.types.index(tensor.dtype)
        sizes, strides = ((ctypes.c_int64 * max(len(shape), 1))(*shape) for shape in (size, stride))
        storage = tensor.untyped_storage()._cdata
        made = self.functions.standin_new(storage, number, len(size), sizes, strides, tensor.storage_offset())
        return self.capsule(made, None, None)

    def unsafe_alloc_void_ptrs_from_tensors(self, tensors: list[Tensor]) -> list[Any]:
        return [self.unsafe_alloc_void_ptr_from_tensor(tensor) for tensor in tensors]

    def steal(self, capsule: Any) -> Tensor:
        handle = ctypes.c_void_p(self.pointer(capsule, None))
        dimensions, shapes = self.functions.standin_dimensions(handle), [ctypes.POINTER(ctypes.c_int64)() for _ in range(2)]
        for name, shape in zip(("sizes", "strides"), shapes, strict=True):
            getattr(self.functions, f"aoti_torch_get_{name}")(handle, ctypes.byref(shape))
        size, stride = (shape[:dimensions] for shape in shapes)
        kind = ctypes.c_int32()
        self.functions.aoti_torch_get_dtype(handle, ctypes.byref(kind))
        storage = _storages[self.functions.standin_storage(handle)]
        tensor = Tensor(storage, self.types[kind.value], size, stride, self.functions.standin_offset(handle))
        self.functions.aoti_torch_delete_tensor_object(handle)
        return tensor

    def alloc_tensors_by_stealing_from_void_ptrs(self, capsules: list[Any]) -> list[Tensor]:
        return [self.steal(capsule) for capsule in capsules]


# The tests compile `shim.c` if they find a C compiler.
if "HIGHWATER_STANDIN" in os.environ:
    __file__ = os.path.join(os.environ["HIGHWATER_STANDIN"], "__init__.py")
    _C._aoti = _Shim(os.path.join(os.environ["HIGHWATER_STANDIN"], "lib", "libtorch_cpu.so"))


def zeros(length: int, device: Any = "cpu") -> Tensor:
    return Tensor(UntypedStorage(length * float32.itemsize), float32, (length,), (1,), 0)


def _from_dlpack(capsule: Any) -> Tensor:
    buffer, whole = capsule
    name, size = whole or ("uint8", (buffer.nbytes,))
    stride = [math.prod(size[place + 1 :]) for place in range(len(size))]
    kind = next(kind for kind in globals().values() if isinstance(kind, dtype) and kind.name == name)
    assert math.prod(size) * kind.itemsize == buffer.nbytes
    return Tensor(UntypedStorage(buffer.nbytes, buffer), kind, size, stride, 0)


utils = types.SimpleNamespace(
    dlpack=types.SimpleNamespace(from_dlpack=_from_dlpack), hooks=types.SimpleNamespace(warn_if_has_hooks=lambda tensor: None)
)

_streams: dict[int, Any] = {}


def _stream(index: int) -> Any:
    import highwater.torch

    if index not in _streams:
        _streams[index] = highwater.torch.runtime().device(index).create_stream()
    return _streams[index]


class _Stream:
    def __init__(self, index: int) -> None:
        self.stream = _stream(index)
        self.cuda_stream = self.stream.raw

    def synchronize(self) -> None:
        self.stream.synchronize()


_C._cuda_getCurrentRawStream = lambda index: _stream(index).raw


def _init() -> None:
    """The mock gives no capsule of opened memory, so tensors take the buffer."""
    import highwater.torch

    highwater.torch._capsule_of = lambda buffer, whole: (buffer, whole)


cuda = types.SimpleNamespace(init=_init, is_available=lambda: False, current_stream=_Stream)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the stand-in for PyTorch has no {name}")
