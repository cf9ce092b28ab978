"""PyTorch, or the stand-in for it where PyTorch is not installed."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from conftest import BACKEND

STAND_IN = str(pathlib.Path(__file__).with_name("standin"))


def compile_shim() -> None:
    """Compiles the C functions of the stand-in. Child processes find them, too."""
    compiler = shutil.which("cc")
    if compiler is not None and "HIGHWATER_STANDIN" not in os.environ:
        folder = tempfile.mkdtemp(prefix="highwater-standin-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        library = pathlib.Path(folder, "lib", "libtorch_cpu.so")
        library.parent.mkdir()
        source = str(pathlib.Path(STAND_IN, "shim.c"))
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), source], check=True)
        os.environ["HIGHWATER_STANDIN"] = folder


def find() -> Any:
    """Returns the module `torch`. Child processes find the same one."""
    if STAND_IN not in sys.path and importlib.util.find_spec("torch") is None:
        sys.path.insert(0, STAND_IN)
        compile_shim()
    torch = importlib.import_module("torch")
    if torch.__version__ == "stand-in":
        os.environ["HIGHWATER_BACKEND"] = BACKEND
    elif BACKEND != "cuda" or not torch.cuda.is_available():
        pytest.skip("PyTorch is installed, and needs a CUDA device and HIGHWATER_TEST_BACKEND=cuda", allow_module_level=True)
    return torch


torch: Any = find()
IS_REAL: bool = torch.__version__ != "stand-in"
