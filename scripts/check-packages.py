#!/usr/bin/env python3
"""Checks that the crates can be published: `check-packages.py [--no-build | --publish]`.

A crate is published unless it says `publish = false`. Each published crate has a description, keywords, categories, a license
with its files, a README of its own, settings for docs.rs, and the same repository as the others. Its package holds what the
crate needs and nothing of `.ci`, `scripts` or `tests`. Crates depend on each other without a cycle. At the end, all of them are
packaged, and each is checked as its package holds it, with the others' packages as its dependencies.

  --no-build  leaves the last step out
  --publish   before publishing: a missing repository is a failure too, and not a warning
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = sys.argv[1:]
if OPTIONS not in ([], ["--no-build"], ["--publish"]):
    sys.exit(__doc__)

# Files that a package must contain. The program classifies `program/digits`, whose license requires the notice.
IN_EACH = ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT"]
IN_ONE = {
    "highwater-cli": [f"digits/{name}" for name in ("NOTICE", "test.safetensors", "weights.safetensors")],
    "highwater-plugin": ["include/highwater.h"],
    "highwater-c": ["include/highwater/highwater.h"],
}
# Folders that no package may contain. Tests stay out, because they use scripts and crates that are not published.
FORBIDDEN = re.compile(r"(.*/)?(\.ci|\.cargo|\.github|scripts|tests|target)/")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|<(https?://[^>]+)>")

problems, warnings = [], []


def cargo(*arguments, folder=ROOT):
    done = subprocess.run(["cargo", *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"packages: cargo {' '.join(arguments)} failed")
    return done.stdout


packages = {package["name"]: package for package in json.loads(cargo("metadata", "--no-deps", "--format-version=1", "--locked"))["packages"]}
published = {name: package for name, package in packages.items() if package["publish"] is None}

# The crates that each crate needs in the registry first: all dependencies with a version, those of tests included. Cargo drops a
# dev-dependency without a version from the package.
needs = {}
for name, package in published.items():
    needs[name] = set()
    for dependency in package["dependencies"]:
        other = dependency["name"]
        if other not in packages or (dependency["kind"] == "dev" and dependency["req"] == "*"):
            continue
        if other not in published:
            problems.append(f"{name} depends on {other}, which is not published")
        elif dependency["req"] == "*":
            problems.append(f"{name} depends on {other} without a version")
        elif other != name:
            needs[name].add(other)
order = []
while len(order) < len(needs):
    ready = sorted(name for name in needs if name not in order and needs[name] <= set(order))
    if not ready:
        rest = sorted(set(needs) - set(order))
        problems.append(f"{', '.join(rest)}: each needs another one to be published first; a dev-dependency has to have a path only")
        break
    order += ready

for name, package in published.items():
    folder = Path(package["manifest_path"]).parent

    def wrong(what, name=name):
        problems.append(f"{name}: {what}")

    if not package["description"]:
        wrong("no description")
    if not 1 <= len(package["keywords"]) <= 5:
        wrong(f"has {len(package['keywords'])} keywords; the registry takes 1 to 5")
    for keyword in package["keywords"]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,19}", keyword):
            wrong(f"the registry does not take the keyword `{keyword}`")
    if not 1 <= len(package["categories"]) <= 5:
        wrong(f"has {len(package['categories'])} categories; the registry takes 1 to 5")
    if package["license"] != "MIT OR Apache-2.0":
        wrong(f"the license is {package['license']}, not MIT OR Apache-2.0")
    if not ((package["metadata"] or {}).get("docs", {}).get("rs") or {}).get("targets"):
        wrong("no targets in [package.metadata.docs.rs]")

    holds = set(cargo("package", "--list", "--allow-dirty", "--quiet", "--locked", "--package", name).split("\n")) - {""}
    for file in [*IN_EACH, *IN_ONE.get(name, [])]:
        if file not in holds:
            wrong(f"the package lacks {file}")
    for file in sorted(filter(FORBIDDEN.match, holds)):
        wrong(f"the package holds {file}")
    for license_file in ("LICENSE-APACHE", "LICENSE-MIT"):
        own = folder / license_file
        if own.exists() and own.read_bytes() != (ROOT / license_file).read_bytes():
            wrong(f"its {license_file} is not that of the workspace")

    readme = package["readme"]
    if not readme or not (folder / readme).is_file() or readme not in holds:
        wrong("no README of its own in the package")
        continue
    text = (folder / readme).read_text(encoding="utf-8")
    if not text.startswith(f"# {name}\n"):
        wrong(f"its README does not begin with `# {name}`")
    # The registry shows a README without its repository, so only full addresses work there.
    for found in LINK.finditer(text):
        target = found[1] or found[2]
        crate = re.match(r"https://docs\.rs/([^/]+)", target)
        if not target.startswith("https://"):
            wrong(f"its README links to {target}, which the registry does not have")
        elif crate and crate[1] not in published:
            wrong(f"its README links to {target}, which will not exist")

repositories = {name: package["repository"] for name, package in published.items()}
if len(set(repositories.values())) > 1:
    problems.append(f"the crates name different repositories: {repositories}")
elif None in repositories.values():
    (problems if "--publish" in OPTIONS else warnings).append(
        "no repository is set. Before publishing, the owner sets `repository` under [workspace.package] in Cargo.toml, and "
        "`repository.workspace = true` in each published crate"
    )

for warning in warnings:
    print(f"packages: warning: {warning}")
if problems:
    sys.exit("\n".join(f"packages: {problem}" for problem in problems))

if "--no-build" not in OPTIONS:
    # Not `cargo package` with its own build: it unpacks what a crate depends on in the user's Cargo folder, under a name made from
    # this checkout's path and the version, and takes what an earlier run left there.
    # Cargo requires a clean tree to package. This check must also work before a commit.
    chosen = [argument for name in order for argument in ("--package", name)]
    cargo("package", "--locked", "--allow-dirty", "--quiet", "--no-verify", *chosen)
    target = Path(json.loads(cargo("metadata", "--no-deps", "--format-version=1", "--locked"))["target_directory"])
    unpacked = target / "package" / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir(parents=True)
    members = {name: f"{name}-{published[name]['version']}" for name in order}
    for member in members.values():
        with tarfile.open(target / "package" / f"{member}.crate") as package:
            package.extractall(unpacked, filter="data")
    # All files of a package have the same old time. With it, cargo would take what it built from an older package for current.
    for file in unpacked.rglob("*"):
        os.utime(file)
    # A package lacks the workspace's profile. With it, the dependencies of the workspace are not built again.
    profile = re.search(r"^\[profile\.dev\]\n(?:[^\[\n].*\n)*", (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    patches = "".join(f'{name} = {{ path = "{member}" }}\n' for name, member in members.items())
    (unpacked / "Cargo.toml").write_text(
        f'[workspace]\nresolver = "3"\nmembers = {json.dumps(list(members.values()))}\n\n{profile[0]}\n[patch.crates-io]\n{patches}',
        encoding="utf-8",
    )
    shutil.copy(ROOT / "Cargo.lock", unpacked)
    for name in order:
        cargo("check", "--quiet", "--offline", "--package", name, "--target-dir", str(target), folder=unpacked)
print(f"packages: ok, in this order: {', '.join(order)}")
