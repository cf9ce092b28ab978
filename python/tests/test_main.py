"""`python -m highwater`."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable

import highwater
from conftest import BACKEND, Child

ROOT = pathlib.Path(__file__).parents[2]
HOLDER = """
import sys, pickle, highwater
runtime = highwater.open(sys.argv[1])
buffer = runtime.open_shared(pickle.loads(bytes.fromhex(sys.stdin.readline())))
print("open", flush=True)
sys.stdin.readline()
"""


def run(*arguments: str, backend: str = BACKEND) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HIGHWATER_BACKEND": backend}
    return subprocess.run(
        [sys.executable, "-m", "highwater", *arguments], capture_output=True, text=True, env=environment, timeout=60
    )


def test_doctor_names_the_backends_and_the_devices() -> None:
    found = run("doctor")
    assert found.returncode == 0 and all(name in found.stdout for name in ("cuda", "rocm", "mock"))
    assert f"`auto` opens {BACKEND}" in found.stdout and "device 0: " in found.stdout
    missing = run("doctor", backend="no-such-backend")
    assert missing.returncode == 1 and "`auto` opens nothing" in missing.stdout


def test_ipc_ls_has_the_owner_and_the_holder(device: highwater.Device, child: Callable[[str], Child]) -> None:
    buffer = device.allocate_shared(1000, "float32")
    holder = child(HOLDER)
    holder.write(pickle.dumps(buffer.share()).hex())
    assert holder.read() == "open"
    processes = {process["pid"]: process for process in json.loads(run("ipc", "ls", "--json").stdout)["processes"]}
    mine, theirs = processes[os.getpid()], processes[holder.process.pid]
    (shared,) = [it for it in mine["shared"] if it["holders"] == [holder.process.pid]]
    (opened,) = theirs["opened"]
    assert shared["bytes"] == opened["bytes"] >= 4000 and shared["uuid"] == opened["uuid"] == device.uuid
    assert opened["owner"] == os.getpid() and not shared["dropped"] and not opened["owner_has_ended"]
    # As the program writes them.
    written = (ROOT / "program/src/ipc.rs").read_text()
    keys = set(re.findall(r'"(\w+)":', written)) - {"processes", "note"}
    assert keys == {*mine, *shared, *opened}
    table = run("ipc", "ls").stdout
    assert re.search(rf"{os.getpid()} .*shares .*{holder.process.pid}", table) and "has open" in table


def test_a_wrong_command_is_refused() -> None:
    assert run("ipc").returncode == 2 and run("other").returncode == 2


def test_an_output_that_ends_early_or_is_full_is_no_traceback() -> None:
    for arguments in (["doctor"], ["ipc", "ls"]):
        command = [sys.executable, "-m", "highwater", *arguments]
        environment = {**os.environ, "HIGHWATER_BACKEND": BACKEND}
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as closed:
            ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, "")
        with open("/dev/full", "wb") as full:
            refused = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
        assert refused.returncode == 2 and refused.stderr.startswith("error: the result cannot be written")
        assert "Traceback" not in refused.stderr and refused.stderr.count("\n") == 1
