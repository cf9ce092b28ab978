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
    transport = report.get("weights_transport")
    if transport not in (["descriptor", "legacy", "fabric"] if workers > 0 else [None]):
        problems.append(f"weights_transport is {transport!r} with {workers} workers")
    # Each worker works on one device, and each image is classified on one.
    devices = report.get("devices") or []
    if not devices or devices[0].get("name") != report.get("device"):
        problems.append(f"devices is {devices!r}, the device {report.get('device')!r}")
    for name, total in [("workers", workers), ("images", report.get("images"))]:
        of_each = [device.get(name) for device in devices]
        if any(type(number) is not int for number in of_each) or sum(of_each) != total:
            problems.append(f"{name} of the devices are {of_each!r}, expected {total} in all")

for problem in problems:
    print(f"main job: {problem}", file=sys.stderr)
if not problems:
    print(
        f"main job: accuracy {report['accuracy']}, no leaks, on {report['backend']} ({len(report['devices'])} used), in {report['processes']} processes,"
        f" {report['weights_shared_bytes']} bytes of weights shared"
    )
sys.exit(bool(problems))
