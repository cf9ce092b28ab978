#!/usr/bin/env python3
"""Checks the JSON that the main job printed: `check-main-job.py FILE`."""

import json
import sys

INTEGERS = [
    "processes",
    "threads",
    "handles_created",
    "workspace_bytes",
    "pinned_requested_bytes",
    "pinned_held_bytes",
    "weights_shared_bytes",
    "leaks",
]

with open(sys.argv[1], encoding="utf-8") as file:
    report = json.load(file)

problems = [f"{name} is no integer: {report.get(name)!r}" for name in INTEGERS if type(report.get(name)) is not int]
if report.get("accuracy", 0) < 0.96:
    problems.append(f"accuracy {report.get('accuracy')} is below 0.96")
if report.get("images_per_second", 0) <= 0:
    problems.append(f"images_per_second is {report.get('images_per_second')}")
if report.get("leaks") != 0:
    problems.append(f"{report.get('leaks')} leaks")
if not report.get("backend"):
    problems.append("no backend is named")
if report.get("handles_created", 0) > report.get("threads", 0):
    problems.append("more handles than threads")
if not problems:
    # One copy of the weights, mapped once by each process besides its owner.
    workers = report["processes"] - 1
    shared = report["weights_shared_bytes"]
    if workers < 0 or (shared > 0) != (workers > 0) or (workers > 0 and shared % workers != 0):
        problems.append(f"{shared} bytes of weights shared by {report['processes']} processes")

for problem in problems:
    print(f"main job: {problem}", file=sys.stderr)
if not problems:
    print(
        f"main job: accuracy {report['accuracy']}, no leaks, on {report['backend']}, in {report['processes']} processes,"
        f" {report['weights_shared_bytes']} bytes of weights shared"
    )
sys.exit(bool(problems))
