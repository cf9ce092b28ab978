#!/usr/bin/env python3
"""Counts lines of code: `count-lines.py [FOLDER...]`, each folder of the workspace by default.

Counts lines of Rust, C and script files in the index of git, without blank lines and comments. Pages, and the examples in
them, do not count.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMENTS = {".rs": ("//", "/*"), ".c": ("//", "/*"), ".h": ("//", "/*"), ".py": ("#", '"""'), ".sh": ("#", None)}


def lines_of_code(path):
    """The lines of a file that are neither blank nor inside a comment or a docstring."""
    line_comment, block = COMMENTS[path.suffix]
    end = {"/*": "*/", '"""': '"""'}.get(block)
    count, inside = 0, False
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if inside:
            inside = end not in line
        elif block and line.startswith(block):
            inside = end not in line[len(block) :]
        elif line and not line.startswith(line_comment):
            count += 1
    return count


if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
    sys.exit(__doc__)
files = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
files = [Path(file) for file in files if Path(file).suffix in COMMENTS and (ROOT / file).is_file()]
folders = [Path(folder) for folder in sys.argv[1:]] or sorted({Path(file.parts[0]) for file in files if len(file.parts) > 1})
total = 0
for folder in folders:
    sizes = {file: lines_of_code(ROOT / file) for file in files if folder in file.parents}
    total += sum(sizes.values())
    largest = max(sizes, key=sizes.get, default=None)
    print(f"{sum(sizes.values()):7} {len(sizes):4} files  {folder}" + (f"  (largest: {largest}, {sizes[largest]})" if largest else ""))
print(f"{total:7} in all")
