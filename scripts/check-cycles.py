#!/usr/bin/env python3
"""Counts import cycles between the files of each crate: `check-cycles.py [--most N] [FOLDER...]`.

A file imports another if its code names an item of the other by a path that begins with `crate`, `self` or `super`.
Re-exports are followed to the file that defines the item. Tests, documentation and declarations of modules do not count. Prints each
group of files that import each other, and fails if a group has more than N files (5 by default).
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 5
CRATES = [
    "core", "core/hal", "backend-driver", "backend-cuda", "backend-rocm", "backend-mock", "plugin", "c-api", "conformance", "program", ".",
    "conformance/example-backend", "examples/server", *(f"simulated/{name}" for name in ("engine", "blas", "cuda", "cublas", "cublaslt", "hip", "hipblas", "hipblaslt", "harness")),
]  # fmt: skip
MOD = re.compile(r"((?:#\[[^\]]*\]\s*)*)(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;")
ITEM = re.compile(
    r"^(?:pub(?:\([^)]*\))?\s+)?(?:default\s+)?(?:const\s+|async\s+|unsafe\s+|extern\s+\"C\"\s+)*"
    r"(?:fn|struct|enum|trait|type|static|union|mod|macro_rules!)\s+(\w+)|^(?:pub(?:\([^)]*\))?\s+)?(?:const|static)\s+(\w+)",
    re.MULTILINE,
)
USE = re.compile(r"((?:#\[[^\]]*\]\s*)*)((?:pub(?:\([^)]*\))?\s+)?)use\s+([^;]+);")
PATH = re.compile(r"(?<![\w:$])((?:crate|self|super)(?:::\w+)+)")


def code_of(path):
    """The text of a file without comments, strings and inline test modules."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)
    kept, lines, index = [], text.split("\n"), 0
    while index < len(lines):
        if re.match(r"\s*#\[cfg\((all\()?test\b", lines[index]):
            item = index
            while item + 1 < len(lines) and (lines[item].strip().startswith("#[") or not lines[item].strip()):
                item += 1
            indent = lines[item][: len(lines[item]) - len(lines[item].lstrip())]
            if not lines[item].rstrip().endswith((";", ",", "}")):
                while item + 1 < len(lines) and not re.match(re.escape(indent) + r"[})\]]", lines[item]):
                    item += 1
            index = item + 1
            continue
        kept.append(lines[index])
        index += 1
    return "\n".join(kept)


def expand(tree, prefix=()):
    """The paths of a `use` tree, as (path, name)."""
    tree = tree.strip()
    depth, parts, current = 0, [], ""
    for letter in tree:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    parts.append(current)
    for part in filter(None, (part.strip() for part in parts)):
        if "{" in part:
            head, rest = part.split("{", 1)
            yield from expand(rest.rsplit("}", 1)[0], (*prefix, *filter(None, head.strip().split("::"))))
        else:
            part, _, alias = part.partition(" as ")
            path = (*prefix, *part.strip().split("::"))
            if path[-1] == "self":
                path = path[:-1]
            yield path, alias.strip() or path[-1]


class Crate:
    """The files of a crate by the paths of their modules, and what each of them defines and re-exports."""

    def __init__(self, folder):
        self.files, self.code, self.items, self.exports = {}, {}, {}, {}
        for name in ("lib.rs", "main.rs"):
            if (folder / "src" / name).is_file():
                self.add((), folder / "src" / name)

    def add(self, module, path):
        code = code_of(path)
        self.files[module], self.code[module] = path, code
        self.items[module] = {one or other for one, other in ITEM.findall(code)}
        inside = path.parent if path.name in ("lib.rs", "main.rs", "mod.rs") else path.with_suffix("")
        for attributes, name in MOD.findall(code):
            if "cfg(test" in attributes:
                continue
            for child in (inside / f"{name}.rs", inside / name / "mod.rs"):
                if child.is_file():
                    self.add((*module, name), child)
        self.exports[module] = {}
        for _, _, tree in USE.findall(code):
            for path_of, name in expand(tree):
                self.exports[module].setdefault(name, []).append(path_of)

    def absolute(self, module, path):
        """A path from the root of the crate, or `None` if it leaves the crate."""
        path = list(path)
        if path[0] == "crate":
            return path[1:]
        base = list(module)
        if path[0] in ("self", "super"):
            while path and path[0] in ("self", "super"):
                if path[0] == "super":
                    base = base[:-1]
                path = path[1:]
            return base + path
        return base + path if (*module, path[0]) in self.files else None

    def file_of(self, path, seen=()):
        """The module whose file defines what an absolute path names."""
        path = tuple(path)
        for length in range(len(path), -1, -1):
            module = path[:length]
            if module not in self.files:
                continue
            rest = path[length:]
            if not rest or rest[0] in self.items[module] or (module, rest[0]) in seen:
                return module
            names = self.exports[module]
            candidates = names.get(rest[0], []) + [each[:-1] + (rest[0],) for each in names.get("*", [])]
            for candidate in candidates:
                target = self.absolute(module, candidate)
                if target is None:
                    continue
                found = self.file_of((*target, *rest[1:]), (*seen, (module, rest[0])))
                last = candidate[-1]
                if found is not None and (last in self.items[found] or found[-1:] == (last,)):
                    return found
            return module
        return None

    def edges(self):
        result = {module: set() for module in self.files}
        for module, code in self.code.items():
            paths = [path for _, visible, tree in USE.findall(code) if not visible for path, _ in expand(tree)]
            without = USE.sub("", code)
            paths += [tuple(found.split("::")) for found in PATH.findall(without)]
            for path in paths:
                target = self.absolute(module, path)
                found = target is not None and self.file_of([part for part in target if part != "*"])
                if found is not None and found is not False and found != module:
                    result[module].add(found)
        return result


def groups(edges):
    """Tarjan's strongly connected components with more than one member."""
    index, low, stack, on, found = {}, {}, [], set(), []
    sys.setrecursionlimit(10_000)

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on.add(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while True:
                other = stack.pop()
                on.discard(other)
                group.append(other)
                if other == node:
                    break
            if len(group) > 1:
                found.append(group)

    for node in edges:
        if node not in index:
            visit(node)
    return found


arguments, most = sys.argv[1:], MOST
if arguments[:1] == ["--most"]:
    most, arguments = int(arguments[1]), arguments[2:]
if any(argument.startswith("-") for argument in arguments):
    sys.exit(__doc__)
failed = False
for name in arguments or CRATES:
    crate = Crate(ROOT / name)
    edges = crate.edges()
    for group in sorted(groups(edges), key=len, reverse=True):
        paths = sorted(str(crate.files[module].relative_to(ROOT / name)) for module in group)
        print(f"{name}: {len(group)} of {len(crate.files)} files: {', '.join(paths)}")
        failed |= len(group) > most
sys.exit(f"cycles: a group has more than {most} files" if failed else 0)
