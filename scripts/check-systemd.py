#!/usr/bin/env python3
"""Runs `highwater ipc hold` as a service of systemd, over the mock. Checks that memory survives its owner and three kills of the service.

    sudo scripts/check-systemd.py

The user's manager of systemd runs in namespaces of its own, so systemd must be installed, but need not have booted the machine. The script
needs root, for the namespaces. It builds the program and the test binary `ipc`, whose processes share and open the memory.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MANAGER = "/usr/lib/systemd/systemd"
UNIT = "highwater-hold.service"


class Peer:
    """A process that shares memory or opens it."""

    def __init__(self, binary):
        command = [binary, "--exact", "obey", "--nocapture", "--test-threads=1"]
        environment = {**os.environ, "HIGHWATER_IPC_PEER": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, command):
        print(command, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if "answer: " in line:
                return line.split("answer: ")[1].strip()
        sys.exit(f"{command}: the process has ended")

    def kill(self):
        self.process.kill()
        self.process.wait()


def systemctl(*arguments):
    command = ["systemctl", "--user", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def shown(name):
    return systemctl("show", "-p", name, "--value", UNIT)


def until(what, is_so):
    started = time.monotonic()
    while not is_so():
        if time.monotonic() - started > 30:
            sys.exit(f"{what}: not within 30 s")
        time.sleep(0.01)
    print(f"{what}: after {time.monotonic() - started:.2f} s")


def check(what, got, expected):
    print(f"{what}: {got}")
    if got != expected:
        sys.exit(f"{what}: {got}, expected {expected}")


def run(program, peers, folder):
    output = folder / "output"
    owner, stranger = Peer(peers), Peer(peers)
    ticket = owner.tell("share 64")
    unit = f"""[Service]
ExecStart={program} ipc hold {ticket}
Restart=on-failure
NotifyAccess=main
FileDescriptorStoreMax=1024
StandardOutput=append:{output}
"""
    units = folder / "systemd" / "user"
    units.mkdir(parents=True)
    (units / UNIT).write_text(unit)
    systemctl("daemon-reload")
    systemctl("start", UNIT)
    until("descriptors are stored", lambda: shown("NFileDescriptorStore") == "3")
    owner.kill()
    until("the service answers for its dead owner", lambda: "this process answers" in output.read_text())
    check("another process can open the memory", stranger.tell(f"can-open {ticket}"), "true")
    for kill in range(1, 4):
        output.write_text("")
        systemctl("kill", "-s", "KILL", UNIT)
        until(f"kill {kill}: the next process answers", lambda: "this process answers" in output.read_text())
        fresh = Peer(peers)
        check("a new process can open the memory", fresh.tell(f"can-open {ticket}"), "true")
        fresh.kill()
    check("restarts", shown("NRestarts"), "3")
    systemctl("stop", UNIT)
    fresh = Peer(peers)
    check("after the stop, a new process can open the memory", fresh.tell(f"can-open {ticket}"), "false")
    check("stored descriptors", shown("NFileDescriptorStore"), "0")
    fresh.kill()
    stranger.kill()


def inside(program, peers):
    # The manager refuses to run unless this folder exists.
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    pathlib.Path("/run/systemd/system").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "run").mkdir(mode=0o700)
        os.environ.update(XDG_RUNTIME_DIR=str(folder / "run"), XDG_CONFIG_HOME=name)
        os.environ.pop("DBUS_SESSION_BUS_ADDRESS", None)
        manager = subprocess.Popen([MANAGER, "--user"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until("systemd runs", lambda: (folder / "run" / "systemd" / "private").exists())
            run(program, peers, folder)
        finally:
            manager.terminate()
            manager.wait()


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(*sys.argv[2:])
    if os.geteuid() != 0 or not os.path.exists(MANAGER):
        sys.exit(f"run this as root, on a machine that has {MANAGER}")
    subprocess.run(["cargo", "build", "--quiet", "--locked", "-p", "highwater-cli"], cwd=ROOT, check=True)
    build = ["cargo", "test", "--quiet", "--locked", "-p", "highwater-cli", "--test", "ipc", "--no-run"]
    built = subprocess.run([*build, "--message-format=json"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    peers = [message["executable"] for message in messages if message.get("target", {}).get("name") == "ipc"][-1]
    program = pathlib.Path(peers).parent.parent / "highwater"
    version = subprocess.run([MANAGER, "--version"], capture_output=True, text=True).stdout.splitlines()
    print(version[0] if version else "systemd")
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ended = subprocess.run([*namespaces, sys.executable, __file__, "--inside", program, peers])
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
