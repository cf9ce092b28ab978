#!/usr/bin/env bash
# Measures which lines of the vendor crates and of the driver run without a GPU: in their unit tests, and over the
# simulated libraries. Usage: scripts/coverage.sh [--only cuda|rocm] [-v]
#
#   --only  one vendor; the driver is then printed, and not judged
#   -v      the lines that did not run as well
#
# Prints each file and each group: backend-cuda/src, backend-rocm/src and backend-driver/src, without their tests. Fails below
# 85 % for one of the groups, and where a test or a conformance case fails. Builds in target/coverage.
#
# Needs llvm-cov and llvm-profdata of an LLVM that reads what this rustc writes: LLVM_COV and LLVM_PROFDATA, or the ones that
# `rustup component add llvm-tools` installs, or those of LLVM 19 or newer on the path.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."

fail() { echo "coverage: $1" >&2; exit 2; }
usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' scripts/coverage.sh >&2
  exit 2
}
vendors=(cuda rocm)
verbose=
while [ $# -gt 0 ]; do
  case $1 in
    --only)
      case ${2:-} in cuda | rocm) vendors=("$2") ;; *) usage ;; esac
      shift
      ;;
    -v) verbose=1 ;;
    *) usage ;;
  esac
  shift
done

# --- the tools

host=$(rustc -vV | sed -n 's/^host: //p')
installed=$(rustc --print sysroot)/lib/rustlib/$host/bin
llvm_of() { # the major version; 0 where it says none
  local version
  version=$("$1" --version 2>/dev/null | sed -n 's/.*LLVM version \([0-9]*\).*/\1/p' | head -1)
  echo "${version:-0}"
}
find_tool() { # name, what the environment says
  local candidate
  if [ -n "$2" ]; then echo "$2"; return; fi
  for candidate in "$installed/$1" "$1" "$1"-{22,21,20,19}; do
    command -v "$candidate" >/dev/null || continue
    if [ "$(llvm_of "$candidate")" -ge 19 ]; then echo "$candidate"; return; fi
  done
  fail "no $1 of LLVM 19 or newer (rustc has $(rustc -vV | sed -n 's/^LLVM version: //p')):
run \`rustup component add llvm-tools\`, or install Debian's llvm-19 or newer, or set LLVM_COV and LLVM_PROFDATA"
}
cov=$(find_tool llvm-cov "${LLVM_COV:-}")
profdata=$(find_tool llvm-profdata "${LLVM_PROFDATA:-}")

# --- what is measured

target=${CARGO_TARGET_DIR:-target}
case $target in /*) ;; *) [ "$target" = target ] && target=$PWD/target || target=$caller/$target ;; esac
export CARGO_TARGET_DIR=$target/coverage
mkdir -p "$CARGO_TARGET_DIR"
profiles=$CARGO_TARGET_DIR/profiles
rm -rf "$profiles"
mkdir "$profiles"
# One file for each process and each program, those that tests start included.
export LLVM_PROFILE_FILE=$profiles/%p-%m.profraw
# Only this workspace is instrumented. The wrapper goes by argument and not by environment, so the simulated libraries, which
# scripts/simulated.sh builds, stay as they are.
wrapper=$CARGO_TARGET_DIR/rustc-with-coverage
cat >"$wrapper" <<'WRAPPER'
#!/bin/sh
exec "$@" -C instrument-coverage
WRAPPER
chmod +x "$wrapper"
instrumented() { # cargo's command and its arguments
  local command=$1
  shift
  cargo "$command" --config "build.rustc-workspace-wrapper=\"$wrapper\"" --locked --quiet "$@"
}
unset HIGHWATER_MOCK HIGHWATER_SIMULATED_CUDA HIGHWATER_SIMULATED_HIP CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
# The programs that ran, which hold the map from counters to lines.
objects=()
add_objects() { # arguments of cargo test
  local program
  while read -r program; do objects+=("$program"); done < <(
    instrumented test --no-run --message-format=json "$@" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
  )
}
# What it says goes to a file, and to the terminal only where it fails.
quietly() { "$@" >"$CARGO_TARGET_DIR/said" 2>&1 || { cat "$CARGO_TARGET_DIR/said" >&2; fail "failed: $*"; }; }
step() { printf '=== %s (%s s)\n' "$1" "$SECONDS" >&2; }

step "build"
# The program as its test has it: with other features it would be another program in the same place, and the profiles of the
# first one lost.
add_objects -p highwater-cli --test program
program=$CARGO_TARGET_DIR/debug/highwater
objects+=("$program")
add_objects -p highwater-driver --lib
step "tests of highwater-driver"
instrumented test -p highwater-driver --lib >&2
skipped=(--skip every_conformance_case)
for vendor in cuda rocm; do
  case " ${vendors[*]} " in *" $vendor "*) ;; *) skipped+=(--skip "$vendor::"); continue ;; esac
  step "tests of highwater-$vendor"
  add_objects -p "highwater-$vendor" --lib --tests
  instrumented test -p "highwater-$vendor" --lib --tests >&2
  releases=("$vendor")
  [ "$vendor" = cuda ] || releases+=(rocm6)
  for release in "${releases[@]}"; do
    if [ -e "backend-$vendor/tests/rules/main.rs" ]; then
      step "vendor rules over $release"
      HIGHWATER_RULES=required HIGHWATER_MOCK=devices=2 quietly scripts/simulated.sh "$release" \
        cargo test --config "build.rustc-workspace-wrapper=\"$wrapper\"" --locked --quiet -p "highwater-$vendor" --test rules
    fi
    for devices in 1 2; do
      step "conformance over $release, devices: $devices"
      HIGHWATER_MOCK=devices=$devices quietly scripts/simulated.sh "$release" "$program" conformance --backend "$vendor"
    done
  done
done
step "whole and broken installations"
instrumented test -p highwater-cli --test program -- simulated:: "${skipped[@]}" >&2

# --- the figures

step "figures"
# By a list: there are more files than a command line takes.
find "$profiles" -name '*.profraw' -size +0 >"$CARGO_TARGET_DIR/profiles.list"
[ -s "$CARGO_TARGET_DIR/profiles.list" ] || fail "no process wrote a profile"
# A process that was killed while it wrote leaves half a file, which is left out; other complaints are about the tools.
"$profdata" merge --sparse --failure-mode=all --input-files="$CARGO_TARGET_DIR/profiles.list" \
  -o "$CARGO_TARGET_DIR/merged.profdata" || fail "$profdata (LLVM $(llvm_of "$profdata")) cannot read what this rustc writes"
arguments=()
for object in "${objects[@]:1}"; do arguments+=(-object "$object"); done
folders=(backend-driver/src)
for vendor in "${vendors[@]}"; do folders+=("backend-$vendor/src"); done
# Functions that were inlined wherever they are used have no counters of their own; that is the mismatch that llvm-cov warns of.
"$cov" export --format=lcov --instr-profile="$CARGO_TARGET_DIR/merged.profdata" "${objects[0]}" "${arguments[@]}" \
  --sources "${folders[@]}" >"$CARGO_TARGET_DIR/lines.lcov"

VERBOSE=$verbose python3 - "$CARGO_TARGET_DIR/lines.lcov" "${folders[@]}" <<'PYTHON'
import os, re, sys
from pathlib import Path

LEAST = 85.0
TEST_FILES = {"tests.rs", "testing.rs", "abi_check.rs", "abi.rs"}
TEST = re.compile(r"\s*#\[cfg\((all\()?test\b")
MODULE = re.compile(r"\s*(?:pub(?:\([^)]*\))? )?mod (\w+);")

def test_parts(path):
    """The lines of a file that are under #[cfg(test)], and the files of its modules that are."""
    lines, numbers, files = path.read_text(encoding="utf-8").splitlines(), set(), []
    inside = path.parent if path.name in ("lib.rs", "mod.rs") else path.with_suffix("")
    for begin, line in enumerate(lines):
        if not TEST.match(line):
            continue
        item = begin + 1
        while lines[item].strip().startswith("#["):
            item += 1
        if module := MODULE.match(lines[item]):
            files += [inside / f"{module[1]}.rs", inside / module[1]]
        # rustfmt puts the end of an item under its beginning; one that ends in its first line has none.
        indent = line[: len(line) - len(line.lstrip())]
        end = item
        if not lines[item].rstrip().endswith((";", ",", "}")):
            while end + 1 < len(lines) and not re.match(re.escape(indent) + r"[})\]]", lines[end]):
                end += 1
        numbers.update(range(begin + 1, end + 2))
    return numbers, files

def ranges(numbers):
    parts = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)

def share(ran, all_lines):
    return 100 * ran / all_lines if all_lines else 0.0

root = Path.cwd()
lines_of = {}
with open(sys.argv[1], encoding="utf-8") as file:
    for line in file:
        if line.startswith("SF:"):
            lines = lines_of.setdefault(Path(line[3:].rstrip("\n")).resolve(), {})
        elif line.startswith("DA:"):
            number, count = line[3:].rstrip("\n").split(",")[:2]
            lines[int(number)] = lines.get(int(number), 0) + int(count)

folders, failed = sys.argv[2:], []
for folder in folders:
    sources = sorted((root / folder).rglob("*.rs"))
    parts = {path: test_parts(path) for path in sources}
    left_out = [out for _, files in parts.values() for out in files]
    group_ran = group_all = 0
    for path in sources:
        if path.name in TEST_FILES or any(path == out or out in path.parents for out in left_out):
            continue
        lines = {number: count for number, count in lines_of.get(path, {}).items() if number not in parts[path][0]}
        if not lines:
            # Data and declarations only.
            continue
        ran = sum(count > 0 for count in lines.values())
        group_ran, group_all = group_ran + ran, group_all + len(lines)
        print(f"{share(ran, len(lines)):6.1f} % {ran:5} of {len(lines):5}  {path.relative_to(root)}")
        if os.environ.get("VERBOSE") and ran < len(lines):
            print(f"         not run: {ranges(sorted(number for number, count in lines.items() if not count))}")
    judged = folder != "backend-driver/src" or len(folders) == 3
    print(f"{share(group_ran, group_all):6.1f} % {group_ran:5} of {group_all:5}  all of {folder}{'' if judged else ' (one vendor only: not judged)'}")
    if judged and share(group_ran, group_all) < LEAST:
        failed.append(folder)
for folder in failed:
    print(f"coverage: {folder} is below {LEAST:g} %", file=sys.stderr)
sys.exit(bool(failed))
PYTHON
