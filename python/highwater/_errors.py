"""The exceptions of the package: one class for each kind of error."""

from __future__ import annotations

from ._words import in_python, of_buffers, operation_in_python


class Error(Exception):
    """An error of Highwater. The text has all parts on one line."""

    kind: str
    """The name of the kind, which is the name of the subclass, such as ``"OutOfMemory"``."""
    operation: str
    """The operation that failed."""
    message: str
    """The fault, and the expected value."""
    code: int | None
    """The vendor's code, if a vendor call failed, or the ``errno``."""
    hint: str
    """The remedy. May be empty."""
    is_temporary: bool
    """Whether the same call may succeed later, after other work has ended or has freed something."""

    def __init__(
        self, kind: str, operation: str, message: str, code: int | None = None, hint: str = "", is_temporary: bool = False
    ) -> None:
        # All of them, so that the exception can be pickled.
        super().__init__(kind, operation, message, code, hint, is_temporary)
        self.kind = kind
        self.operation = operation
        self.message = message
        self.code = code
        self.hint = hint
        self.is_temporary = is_temporary

    def __str__(self) -> str:
        code = "" if self.code is None else f" (code {self.code})"
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.operation}: {self.message}{code}{hint}"


class InvalidArgument(Error, ValueError):
    """The operation does not accept an argument (size, alignment, leading dimension, option)."""


class InvalidHandle(Error):
    """A stream, event, graph or handle id is stale, forged, or belongs to another backend."""


class InvalidPointer(Error):
    """A pointer is not from this runtime, was freed, or points into the middle of a block."""


class WrongDevice(Error):
    """Objects of different devices were mixed in one operation."""


class Unsupported(Error):
    """The device lacks the capability, or this version does not support it."""


class OutOfMemory(Error, MemoryError):
    """Device or host memory is exhausted."""


class LibraryMissing(Error):
    """A vendor library could not be opened."""


class SymbolMissing(Error):
    """A vendor library lacks a required symbol."""


class DeviceMissing(Error):
    """The library works, but there is no usable device."""


class UnknownBackend(Error):
    """No backend of that name is known."""


class Capture(Error):
    """A stream capture was refused or lost."""


class InvalidState(Error):
    """The object is in a state that forbids this operation now."""


class DeviceLost(Error):
    """A device error from which no call recovers. The process must end."""


class ShuttingDown(Error):
    """The process is exiting, and the driver must not be called."""


class Forked(Error):
    """The process was forked after the backend was opened; the child cannot use it."""


class PeerLost(Error):
    """The process at the other end of a share has ended."""


class Expired(Error):
    """The memory of a ticket is no longer shared: its exporter has freed it or has ended."""


class OperatingSystem(Error):
    """A call of the operating system failed; the code is its `errno`."""


class PermissionDenied(Error):
    """The operating system or the driver refused permission."""


class Vendor(Error):
    """Any other vendor error; the vendor's code says which."""


def make(kind: str, operation: str, message: str, code: int | None, hint: str, is_temporary: bool) -> Error:
    """Returns the exception of an error. A kind of a later version is an `Error` itself."""
    found = globals().get(kind)
    subclass = found if isinstance(found, type) and issubclass(found, Error) else Error
    if operation in ("share_all", "open_shared_all"):
        message = of_buffers(message)
    return subclass(kind, operation_in_python(operation), in_python(message), code, in_python(hint), is_temporary)
