#!/usr/bin/env python3
"""Runs the tests of the workspace and checks that they end in time: `check-test-time.py [CARGO ARGUMENT...]`.

Builds all tests first, and the libraries and programs that tests build for themselves. Then runs `cargo test --workspace`, prints the slowest test files, and fails if the run took longer than 300 s.
Two idle cores are the measure. On a machine that is slower or busy with other work, a fixed piece of work takes longer too, and
the limit grows in proportion. The arguments go to cargo, such as `--locked`.
"""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300.0
CORES = 2
# Seconds that the fixed work takes on two idle cores of the machine on which the limit was set.
REFERENCE = 1.5
SHOWN = 10

WORK = "value = 1\nfor number in range(4_000_000): value = value * 48271 % 2147483647"


def fixed_work():
    """Seconds that one process on each of two cores takes for the same arithmetic."""
    begun = time.monotonic()
    running = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(CORES)]
    if any(one.wait() != 0 for one in running):
        sys.exit("test time: the fixed work failed")
    return time.monotonic() - begun


def cargo(*arguments):
    return ["cargo", "test", "--workspace", *sys.argv[1:], *arguments]


if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
    sys.exit(__doc__)
os.chdir(ROOT)
# What tests build for themselves is building time too.
PLUGINS = ("cuda", "rocm", "mock", "panicking")
for command in (
    cargo("--no-run"),
    *(["cargo", "build", "--quiet", "--locked", "-p", f"highwater-{name}-plugin"] for name in PLUGINS),
    ["cargo", "build", "--quiet", "--locked", "--examples", "-p", "highwater"],
    ["cargo", "build", "--quiet", "--locked", "-p", "highwater-c"],
    ["cargo", "build", "--quiet", "--locked", "-p", "highwater-simulated-cuda"],
    ["cargo", "build", "--quiet", "--locked", "--profile", "simulated", "-p", "highwater-example-backend"],
    *(["scripts/simulated.sh", vendor, "true"] for vendor in ("cuda", "rocm", "rocm6")),
):
    built = subprocess.run(command, check=False)
    if built.returncode != 0:
        sys.exit(built.returncode)

before = fixed_work()
begun, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
tests = subprocess.Popen(cargo(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
files, current = [], "?"
for line in tests.stdout:
    sys.stdout.write(line)
    sys.stdout.flush()
    if found := re.match(r"\s+(?:Running|Doc-tests) (.*)", line):
        # Many packages have a `src/lib.rs`; the binary has the package's name.
        current = re.sub(r"\((?:.*/)?(.*)-[0-9a-f]+\)", r"(\1)", found[1])
    elif found := re.match(r"test result: .* finished in ([0-9.]+)s", line):
        files.append((float(found[1]), current))
status = tests.wait()
seconds = time.monotonic() - begun
now = resource.getrusage(resource.RUSAGE_CHILDREN)
processor = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
# The slower of the two, so that a machine that became busy meanwhile counts as busy.
slower = max(before, fixed_work()) / REFERENCE
limit = LIMIT * max(1.0, slower)

print(f"\ntest time: {seconds:.0f} s, of which processors worked {processor:.0f} s; the limit is {limit:.0f} s here")
for taken, name in sorted(files, reverse=True)[:SHOWN]:
    print(f"  {taken:7.1f} s  {name}")
if status != 0:
    sys.exit(status)
if seconds > limit:
    sys.exit(f"test time: the tests took {seconds:.0f} s and may take {limit:.0f} s; shorten the files above")
