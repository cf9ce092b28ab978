"""The page and the examples of PyTorch run, over PyTorch on a CUDA device or over the stand-in for it."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import highwater
from torch_here import IS_REAL, STAND_IN

hwt: Any = pytest.importorskip("highwater.torch")

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/pytorch.md").read_text(), re.DOTALL | re.MULTILINE)


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("number", range(6))
def test_the_examples_of_the_page_run(number: int) -> None:
    if "MemPool" in EXAMPLES[number] and not IS_REAL:
        pytest.skip("the stand-in for PyTorch has no MemPool")
    needs_version = "install_host_allocator" in EXAMPLES[number] or "keep_mapped" in EXAMPLES[number]
    if needs_version and not IS_REAL:
        with pytest.raises(highwater.Unsupported, match=r"use PyTorch 2\.11"):
            exec(compile(EXAMPLES[number], f"docs/pytorch.md, example {number}", "exec"), {})
        return
    exec(compile(EXAMPLES[number], f"docs/pytorch.md, example {number}", "exec"), {})


@pytest.mark.parametrize("name", ["torch_workers", "pinned_loader"])
def test_the_programs_run(name: str) -> None:
    environment = dict(os.environ)
    if not IS_REAL:
        if name == "pinned_loader":
            pytest.skip("the stand-in for PyTorch has no DataLoader")
        environment["PYTHONPATH"] = os.pathsep.join([STAND_IN, environment.get("PYTHONPATH", "")])
    program = str(ROOT / "python/examples" / f"{name}.py")
    subprocess.run([sys.executable, program], env=environment, check=True, timeout=120)


def test_everything_public_has_a_docstring() -> None:
    assert all(getattr(hwt, name).__doc__ for name in hwt.__all__)
