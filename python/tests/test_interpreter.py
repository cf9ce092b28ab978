"""The end of the interpreter, other interpreters of the process, and signals."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import highwater
from conftest import BACKEND, Child


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, BACKEND], capture_output=True, text=True, timeout=60)


SUB_INTERPRETER = """
import sys
try:
    import _interpreters as interpreters
    interpreter = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    interpreter = interpreters.create()
program = '''
try:
    import highwater
except ImportError as error:
    print(error, flush=True)
else:
    runtime = highwater.open("mock")
'''
interpreters.run_string(interpreter, program)
import highwater
print(highwater.open(sys.argv[1]).device_count > 0, flush=True)
interpreters.run_string(interpreter, program)
"""


def test_a_sub_interpreter_is_refused_and_the_process_ends() -> None:
    found = run(SUB_INTERPRETER)
    before, main, after = found.stdout.splitlines()
    assert found.returncode == 0 and main == "True" and before == after, found
    assert "sub-interpreter" in before and "main interpreter" in before and "start a process" in before


AT_THE_END = """
import builtins, sys, highwater
runtime = highwater.open(sys.argv[1])
stream = runtime.device(0).create_stream()
buffer = stream.upload([1.5])
class Last:
    def __init__(self): self.of = stream, buffer, highwater.InvalidArgument
    def __del__(self):
        stream, buffer, refused = self.of
        print(stream.download(buffer).tolist())
        try:
            stream.fill(buffer, "a")
        except refused as error:
            print("refused")
# Ends after the modules.
builtins.last = Last()
"""


def test_a_destructor_at_the_end_downloads_and_gets_exceptions() -> None:
    found = run(AT_THE_END)
    assert (found.returncode, found.stdout.splitlines(), found.stderr) == (0, ["[1.5]", "refused"], "")


def test_a_runtime_that_a_child_failed_to_close_is_not_closed(runtime: highwater.Runtime) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            runtime.close()
        except highwater.Forked as error:
            status = 0 if not runtime.is_closed and "spawn" in error.hint else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


OWNER = """
import sys, pickle, highwater
runtime = highwater.open(sys.argv[1])
buffer = runtime.device(0).allocate_shared(4, "int32")
print(pickle.dumps(buffer.share()).hex(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler. A shell starts commands in the background with SIGINT ignored, and Python then installs none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("limit", [None, float("inf"), 1e300, 60.0])
def test_ctrl_c_ends_the_wait_for_an_owner(
    runtime: highwater.Runtime, child: Callable[[str], Child], limit: float | None
) -> None:
    process = child(OWNER)
    owner = runtime.open_shared(pickle.loads(bytes.fromhex(process.read()))).owner
    assert owner is not None and repr(owner) == f"<highwater.Owner, process {process.process.pid}, alive>"
    # Before the wait or in it: both end it.
    main = threading.get_ident()
    sender = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sender.start()
        owner.wait(limit)
    assert time.monotonic() - start < 30
    sender.join()
    process.kill()
    assert owner.wait(limit) and owner.wait() and "dead" in repr(owner)


def test_a_wait_without_signals_ends_with_its_time(runtime: highwater.Runtime, child: Callable[[str], Child]) -> None:
    owner = runtime.open_shared(pickle.loads(bytes.fromhex(child(OWNER).read()))).owner
    assert owner is not None
    start = time.monotonic()
    assert not owner.wait(0.12) and time.monotonic() - start >= 0.12
    assert not owner.wait(0)
    for wrong in (-1.0, -1e300, float("nan")):
        with pytest.raises(highwater.InvalidArgument) as caught:
            owner.wait(wrong)
        assert len(str(caught.value)) < 150
