#!/usr/bin/env python3
"""Says how much of the two vendor crates is the same text: `check-duplication.py [-v] [--limit PERCENT] [--self-test]`.

What CUDA and HIP do alike belongs in `backend-driver/src`, written once. This measures what is left: lines of
`backend-cuda/src` and `backend-rocm/src` that stand in runs of six or more equal lines, as a share of the smaller crate.
Fails above 10 %, or above PERCENT.

  -v           each run, with its places
  --self-test  small cases, and nothing else

Lines are compared without their indentation. Left out are comments, lines of at most three characters, and modules under
`#[cfg(test)]`, with their files. The vendors' names count as one: `cudart`, `cuda`, `hip`, `rocm`, `roc` in any case, and
`cu` before a capital or before `blas`. A line counts once, however many runs it stands in.
"""

import re
import sys
import tempfile
from pathlib import Path

RUN = 6
VENDOR = re.compile(r"(?i:cudart|cuda|hip|rocm|roc)|cu(?=[A-Z]|blas)|CU(?=BLAS)|Cu(?=[Bb]las)")
TEST = re.compile(r"#\[cfg\((all\()?test\b")
MODULE = re.compile(r"(?:pub(?:\([^)]*\))? )?mod (\w+)( \{|;)")


def kept_lines(path):
    """The lines of a file that count, as (number, text as compared), and the modules of its own that are tests only."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept, test_modules = [], []
    index, comment = 0, False
    while index < len(lines):
        line = lines[index].strip()
        index += 1
        if comment or line.startswith("/*"):
            comment = "*/" not in line
            continue
        if TEST.match(line):
            # More attributes may stand between it and what it is about.
            item = index
            while item < len(lines) and lines[item].strip().startswith("#["):
                item += 1
            module = MODULE.match(lines[item].strip()) if item < len(lines) else None
            if module and module[2] == ";":
                test_modules.append(module[1])
                index = item + 1
                continue
            if module:
                # rustfmt puts the end of an item under its beginning.
                indent = lines[item][: len(lines[item]) - len(lines[item].lstrip())]
                while item < len(lines) and lines[item].rstrip() != indent + "}":
                    item += 1
                index = item + 1
                continue
        if line.startswith("//") or len(line) <= 3:
            continue
        kept.append((index, VENDOR.sub("gpu", line)))
    return kept, test_modules


def read_crate(folder):
    """The kept lines of each file under a crate's src/, without the files of test modules."""
    files, left_out = {}, []
    for path in sorted(folder.rglob("*.rs")):
        kept, test_modules = kept_lines(path)
        files[path] = kept
        inside = path.parent if path.name in ("lib.rs", "main.rs", "mod.rs") else path.with_suffix("")
        for name in test_modules:
            left_out += [inside / f"{name}.rs", inside / name]
    return {path: kept for path, kept in files.items() if not any(path == out or out in path.parents for out in left_out)}


def starts_of(crate):
    """Where each run of RUN lines begins."""
    starts = {}
    for path, kept in crate.items():
        for index in range(len(kept) - RUN + 1):
            starts.setdefault(tuple(text for _, text in kept[index : index + RUN]), []).append((path, index))
    return starts


def runs_between(crate, other):
    """The longest runs from each line of a crate that are also in the other: (path, index, length, other path, other index)."""
    starts, runs = starts_of(other), []
    for path, kept in crate.items():
        end = 0
        for index in range(len(kept) - RUN + 1):
            longest = None
            for other_path, other_index in starts.get(tuple(text for _, text in kept[index : index + RUN]), []):
                other_kept, length = other[other_path], RUN
                while (
                    index + length < len(kept)
                    and other_index + length < len(other_kept)
                    and kept[index + length][1] == other_kept[other_index + length][1]
                ):
                    length += 1
                if longest is None or length > longest[2]:
                    longest = (path, index, length, other_path, other_index)
            if longest and index + longest[2] > end:
                end = index + longest[2]
                runs.append(longest)
    return runs


def compare(first, second):
    """(smaller crate, larger crate, runs of the smaller, number of its lines in runs)."""
    smaller, larger = sorted((first, second), key=size)
    runs = runs_between(smaller, larger)
    return smaller, larger, runs, len({(path, line) for path, index, length, *_ in runs for line in range(index, index + length)})


def size(crate):
    return sum(len(kept) for kept in crate.values())


def self_test():
    def crate(root, name, files):
        for file, text in files.items():
            path = Path(root, name, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return read_crate(Path(root, name))

    def lines(count, word="call"):
        return "".join(f"    {word}_{number}();\n" for number in range(count))

    def in_runs(first, second):
        with tempfile.TemporaryDirectory() as root:
            return compare(crate(root, "first", {"lib.rs": first}), crate(root, "second", {"lib.rs": second}))[3]

    def kept_of(files):
        with tempfile.TemporaryDirectory() as root:
            return size(crate(root, "only", files))

    cases = [
        ("five equal lines are no run", in_runs(lines(5) + "one();\n", lines(5) + "other();\n"), 0),
        ("six are", in_runs(lines(6) + "one();\n", lines(6) + "other();\n"), 6),
        ("the rest of a longer run counts", in_runs(lines(9), "first();\n" + lines(9)), 9),
        ("two runs of one line each count once", in_runs(lines(8), lines(7) + "x();;\n" + lines(8)), 8),
        ("a block twice in the larger crate counts once", in_runs(lines(6), lines(6) + "other();\n" + lines(6)), 6),
        ("a line between parts a run", in_runs(lines(8).replace("call_4", "else_4"), lines(8)), 0),
        ("comments and short lines do not", in_runs(lines(8).replace("    call_4", "    }\n\n    // Why.\n    /* Why\n so. */\n    call_4"), lines(8)), 8),
        ("indentation does not", in_runs(lines(6), lines(6).replace("    ", "\t")), 6),
        ("the vendors' names are one", in_runs(lines(6, "cudaCall"), lines(6, "hipCall")), 6),
        ("in any case", in_runs(lines(6, "Cuda::ROCM"), lines(6, "Rocm::CUDA")), 6),
        ("with the matrix libraries", in_runs(lines(6, "cublasX(CUBLAS, cuBLAS)"), lines(6, "hipblasX(HIPBLAS, hipBLAS)")), 6),
        ("`cu` before a capital", in_runs(lines(6, "cuInit"), lines(6, "hipInit")), 6),
        ("and no other `cu`", in_runs(lines(6, "cut"), lines(6, "hipt")), 0),
        ("an inline test module is left out", kept_of({"lib.rs": lines(3) + "#[cfg(test)]\n#[allow(x)]\nmod tests {\n" + lines(9) + "}\n" + lines(2)}), 5),
        ("what else is under cfg(test) is not", kept_of({"lib.rs": "#[cfg(test)]\nimpl X {\n    call();\n}\n"}), 3),
        ("the file of a test module is left out", kept_of({"lib.rs": "#[cfg(test)]\nmod abi_check;\n" + lines(2), "abi_check.rs": lines(9)}), 2),
        (
            "and that of a module inside a file, with its folder",
            kept_of({"a.rs": "#[cfg(all(test, loom))]\npub(crate) mod rig;\n", "a/rig/mod.rs": lines(9), "a/rig/b.rs": lines(9), "rig.rs": lines(4)}),
            4,
        ),
    ]
    wrong = [f"{what}: {seen}, expected {expected}" for what, seen, expected in cases if seen != expected]
    for line in wrong:
        print(f"duplication: self-test: {line}", file=sys.stderr)
    if not wrong:
        print(f"duplication: {len(cases)} cases of the self-test hold")
    return bool(wrong)


def main(arguments):
    verbose, limit = False, 10.0
    while arguments:
        argument = arguments.pop(0)
        if argument == "--self-test":
            return self_test()
        if argument == "-v":
            verbose = True
        elif argument == "--limit" and arguments:
            limit = float(arguments.pop(0))
        else:
            print(__doc__, file=sys.stderr)
            return 2
    root = Path(__file__).resolve().parent.parent
    crates = {name: read_crate(root / name / "src") for name in ("backend-cuda", "backend-rocm")}
    for name, crate in crates.items():
        if not crate:
            print(f"duplication: no source in {name}/src", file=sys.stderr)
            return 2
    smaller, larger, runs, count = compare(*crates.values())
    if verbose:

        def place(crate, path, index, length):
            kept = crate[path]
            return f"{path.relative_to(root)}:{kept[index][0]}-{kept[index + length - 1][0]}"

        for path, index, length, other_path, other_index in runs:
            print(f"{length} lines: {place(smaller, path, index, length)} and {place(larger, other_path, other_index, length)}")
            for _, text in smaller[path][index : index + length]:
                print(f"    {text}")
    share = 100 * count / size(smaller)
    totals = ", ".join(f"{name} {size(crate)}" for name, crate in crates.items())
    print(f"duplication: {count} lines in {len(runs)} equal runs, {share:.1f} % of the smaller crate (lines that count: {totals}; at most {limit:g} %)")
    return share > limit


sys.exit(main(sys.argv[1:]))
