#!/usr/bin/env python3
"""Checks the links between pages: every relative link of a tracked .md file leads to a file or folder of the repository,
and every anchor to a heading. Checks also that README.md has at most 1,200 words. Code blocks are skipped.

check-links.py              checks the repository
check-links.py --self-test  checks that it finds what is wrong
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

MOST_WORDS = 1200
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?:(?!\1).)+?\1", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
REFERENCE = re.compile(r"^ *\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = {}
    names = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        name = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def wrong_links(root, pages):
    """What is wrong with the links of these pages."""
    for page in pages:
        text = CODE.sub("", FENCE.sub("", page.read_text()))
        for link in LINK.findall(text) + REFERENCE.findall(text):
            if re.match(r"[a-z][a-z0-9+.-]*:", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page.resolve()
            name = page.relative_to(root)
            if not target.is_relative_to(root.resolve()):
                yield f"{name}: {link} leads out of the repository"
            elif not target.exists():
                yield f"{name}: {link} leads nowhere"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                yield f"{name}: {link}: {target.name} has no such heading"


def wrong_length(readme):
    words = len(readme.read_text().split())
    if words > MOST_WORDS:
        yield f"{readme.name} has {words} words, at most {MOST_WORDS} are allowed"


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "docs").mkdir()
        (root / "docs" / "a.md").write_text("# A `page` of *one*\n\n## Twice\n\n## Twice\n\n```\n# none\n```\n")
        (root / "README.md").write_text(
            "[a](docs/a.md) [b](docs/a.md#a-page-of-one) [c](docs/a.md#twice-1) [d](https://x.y/z) `[e](none.md)` [f](#top)\n"
            "[g](docs/none.md) [h](docs/a.md#none) [i](../out.md)\n\n[j]: none.md\n\n# Top\n\n```\n[k](none.md)\n```\n"
        )
        wrong = [line.split()[1].rstrip(":") for line in wrong_links(root, [root / "README.md"])]
        expected = ["docs/none.md", "docs/a.md#none", "../out.md", "none.md"]
        assert wrong == expected, wrong
        assert not list(wrong_length(root / "README.md"))
        (root / "README.md").write_text("word " * (MOST_WORDS + 1))
        assert len(list(wrong_length(root / "README.md"))) == 1
    print("links: the check finds what is wrong")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = Path(__file__).resolve().parent.parent
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=root, check=True, capture_output=True, text=True)
    pages = [root / name for name in listed.stdout.split("\0") if name]
    wrong = [*wrong_links(root, pages), *wrong_length(root / "README.md")]
    if wrong:
        sys.exit("\n".join(["links:", *wrong]))
    print(f"links: ok, {len(pages)} pages")


if __name__ == "__main__":
    main()
