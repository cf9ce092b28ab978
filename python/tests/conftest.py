"""The backend that the tests run on: the mock, or the one that ``HIGHWATER_TEST_BACKEND`` names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO

import pytest

import highwater

BACKEND = os.environ.get("HIGHWATER_TEST_BACKEND", "mock")


@pytest.fixture
def runtime() -> Iterator[highwater.Runtime]:
    with highwater.open(BACKEND) as opened:
        yield opened


@pytest.fixture
def device(runtime: highwater.Runtime) -> highwater.Device:
    return runtime.device(0)


@pytest.fixture
def stream(device: highwater.Device) -> highwater.Stream:
    return device.create_stream()


LATENCY = "latency=40ms"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> highwater.Runtime:
    """A runtime whose devices take 40 ms for each operation. Simulated libraries read the variable once in a process."""
    if BACKEND == "mock":
        monkeypatch.setenv("HIGHWATER_MOCK", LATENCY)
    elif os.environ.get("HIGHWATER_MOCK") != LATENCY:
        pytest.skip(f"needs HIGHWATER_MOCK={LATENCY} and simulated libraries")
    return highwater.open(BACKEND)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: the devices are slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


def until(holds: Callable[[], bool]) -> None:
    """Waits for another process or thread, at most 20 seconds."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


class Child:
    """Another Python process, to which and from which lines go."""

    def __init__(self, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, BACKEND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def write(self, line: str) -> None:
        pipe = self.pipe(self.process.stdin)
        pipe.write(line + "\n")
        pipe.flush()

    def read(self) -> str:
        return self.pipe(self.process.stdout).readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    children: list[Child] = []

    def start(program: str) -> Child:
        children.append(Child(program))
        return children[-1]

    yield start
    for started in children:
        started.kill()
        started.pipe(started.process.stdin).close()
        started.pipe(started.process.stdout).close()
