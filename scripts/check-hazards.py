#!/usr/bin/env python3
"""Checks that each of AMD's rules that the ROCm backend has to keep has a test: `check-hazards.py [-v]`.

`docs/rocm.md` lists them as rows of a table that begin with a number, such as `| R3.14 |`. The tests of one have its number
at the beginning of their names, `fn r3_14_...`, and are in `backend-rocm` or `backend-driver/src`. Prints each number without a
test, and each test without a row; fails if there are any. R2.1 to R2.7 and R3.1 to R3.14 have to be there whatever the
document says.

  -v  the tests of each number as well
"""

import re
import sys
from pathlib import Path

REQUIRED = [("R", 2, number) for number in range(1, 8)] + [("R", 3, number) for number in range(1, 15)]
ROW = re.compile(r"\|?\s*[`*]*([RB])(\d+)\.(\d+)\b")
# At the beginning of a line, so that neither comments nor strings count.
TEST = re.compile(r"\s*(?:pub(?:\([^)]*\))? )?fn (([rb])(\d+)_(\d+)_\w+)\b")

root = Path(__file__).resolve().parent.parent
if sys.argv[1:] not in ([], ["-v"]):
    sys.exit(__doc__)

document = root / "docs/rocm.md"
rows = set()
for line in document.read_text(encoding="utf-8").splitlines() if document.exists() else []:
    if found := ROW.match(line):
        rows.add((found[1], int(found[2]), int(found[3])))

tests = {}
for folder in ("backend-rocm", "backend-driver/src"):
    for path in sorted((root / folder).rglob("*.rs")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if found := TEST.match(line):
                place = f"{path.relative_to(root)}:{number}: {found[1]}"
                tests.setdefault((found[2].upper(), int(found[3]), int(found[4])), []).append(place)

problems = []
numbers = sorted(rows | set(tests) | set(REQUIRED), key=lambda number: ("RB".index(number[0]), *number))
for number in numbers:
    letter, group, place = number
    if "-v" in sys.argv:
        print(f"{letter}{group}.{place}", *tests.get(number, []), sep="\n    ")
    if number not in rows:
        problems.append(f"{letter}{group}.{place} has no row in {document.relative_to(root)}")
    if number not in tests:
        problems.append(f"{letter}{group}.{place} has no test (fn {letter.lower()}{group}_{place}_...)")

for problem in problems:
    print(f"hazards: {problem}", file=sys.stderr)
if not problems:
    print(f"hazards: {len(numbers)} numbers, each with a row and a test ({sum(map(len, tests.values()))} tests)")
sys.exit(bool(problems))
