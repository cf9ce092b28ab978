"""`python -m highwater doctor` and `python -m highwater ipc ls`: two reports of the program `highwater`, without the program."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import Error, _highwater, open, survey


def doctor() -> int:
    """Prints which backends open and why others do not, and the devices of the best one. Returns 1 if no real device works."""
    print(survey())
    try:
        with open("auto") as runtime:
            devices = [runtime.device(ordinal) for ordinal in range(runtime.device_count)]
            print(f"\n`auto` opens {runtime.backend}: {runtime.description}")
            for device in devices:
                print(f"  device {device.ordinal}: {device.name}, {device.memory_bytes >> 20} MiB, UUID {device.uuid}")
    except Error as error:
        print(f"\n`auto` opens nothing: {error}")
        return 1
    return 0


def command_of(pid: int) -> str:
    try:
        name = pathlib.Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""
    # The process chose the name, so it may contain anything.
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def rows_of(process: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    pid = process["pid"]
    name = f"{pid} ({process['command']})" if process["command"] else str(pid)
    for it in process["shared"]:
        role = "shares, has dropped it" if it["dropped"] else "shares"
        yield name, role, memory_of(it), str(it["bytes"]), ", ".join(map(str, it["holders"])) or "nobody now", it["since"]
    for it in process["opened"]:
        role = "keeps mapped" if it["idle"] else "has open"
        role = "holds memory of a dead owner" if it["owner_has_ended"] else role
        yield name, role, memory_of(it), str(it["bytes"]), str(it["owner"]), it["since"]
    if not process["answers"]:
        yield name, "does not answer", "", "", "", ""


def memory_of(allocation: dict[str, Any]) -> str:
    if allocation["device"] is None:
        return "page-locked"
    return f"device {allocation['device']}, {allocation['transport']}"


def ipc_ls(as_json: bool) -> int:
    """Prints the processes of this user that share memory, with the other processes, the bytes and the begin of each share."""
    processes = _highwater.processes()
    for process in processes:
        process["command"] = command_of(process["pid"]) if process["pid"] else ""
        for it in process["shared"] + process["opened"]:
            since = datetime.datetime.fromtimestamp(it["since"], datetime.timezone.utc)
            it["since"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
    if as_json:
        print(json.dumps({"processes": processes}))
    elif not processes:
        print("no process of this user shares memory")
    else:
        table = [("process", "role", "memory", "bytes", "with", "since")]
        table += [row for process in processes for row in rows_of(process)]  # type: ignore[misc]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def written(report: Callable[[], int]) -> int:
    """Prints a report, and returns its exit status. A reader may end early. Returns 2 if the output cannot be written."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = report()
    try:
        print(output.getvalue(), end="", flush=True)
    except OSError as error:
        # The interpreter flushes the rest at its end.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if not isinstance(error, BrokenPipeError):
            print(f"error: the result cannot be written: {error}; give the program an output with room", file=sys.stderr)
            return 2
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m highwater", description="Reports GPUs and shared memory of this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="which backends open and why others do not, and the devices of the best one")
    ls = commands.add_parser("ipc", help="shared memory").add_subparsers(dest="action", required=True)
    ls.add_parser("ls", help="the processes that share memory").add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    return written(doctor if arguments.command == "doctor" else lambda: ipc_ls(arguments.json))


if __name__ == "__main__":
    sys.exit(main())
