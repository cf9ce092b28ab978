"""Everything public has a docstring and a type, and the types are those of the classes."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

import highwater
from highwater import _highwater
from highwater._words import _SPELLED, in_python

ROOT = pathlib.Path(__file__).parents[2]
STUBS = pathlib.Path(highwater.__file__).with_name("_highwater.pyi")


def test_everything_public_has_a_docstring() -> None:
    for name in highwater.__all__:
        public = getattr(highwater, name)
        assert name == "__version__" or public.__doc__, name
        if not isinstance(public, type) or issubclass(public, highwater.Error) or dataclasses.is_dataclass(public):
            continue
        for member, value in vars(public).items():
            assert member.startswith("_") or value.__doc__, f"{name}.{member}"


def test_the_stubs_have_the_members_of_the_classes() -> None:
    for stub in ast.parse(STUBS.read_text()).body:
        if not isinstance(stub, ast.ClassDef) or stub.name.startswith("_"):
            continue
        written = {item.name for item in stub.body if isinstance(item, ast.FunctionDef)}
        inherited = {"__doc__", "__module__", "__repr__", "__reduce__", "__new__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
        found = {member for member in vars(getattr(_highwater, stub.name)) if member not in inherited}
        assert written - {"__new__"} == found, stub.name


@pytest.mark.parametrize("page", ["docs/python.md", "python/README.md"])
def test_the_examples_of_the_pages_run(page: str) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert examples
    for number, example in enumerate(examples):
        exec(compile(example, f"{page}, example {number}", "exec"), {})


def fields_in_rust(name: str) -> list[str]:
    """The public fields of a structure of the library, in order."""
    for source in (ROOT / "core/src").rglob("*.rs"):
        found = re.search(rf"pub struct {name} \{{\n(.*?)\n\}}", source.read_text(), re.DOTALL)
        if found:
            return re.findall(r"^    pub (\w+):", found[1], re.MULTILINE)
    raise AssertionError(f"no structure {name}")


@pytest.mark.parametrize("name", [name for name in highwater.__all__ if name.endswith("Statistics")] + ["Limits"])
def test_the_dataclasses_have_every_field_of_the_library(name: str) -> None:
    assert [field.name for field in dataclasses.fields(getattr(highwater, name))] == fields_in_rust(name)


def test_every_kind_of_error_has_a_class() -> None:
    kinds = re.search(r"pub enum ErrorKind \{\n(.*?)\n\}", (ROOT / "core/hal/src/error.rs").read_text(), re.DOTALL)
    assert kinds
    names = re.findall(r"^    (\w+),", kinds[1], re.MULTILINE)
    classes = {error.__name__ for error in highwater.Error.__subclasses__()}
    assert set(names) == classes and classes <= set(highwater.__all__)


# The crates whose errors reach Python.
SOURCES = ["core", "core/hal", "src", "backend-driver", "backend-cuda", "backend-rocm", "backend-mock", "plugin"]


def texts_in_rust() -> list[str]:
    """The texts of the library, each on one line."""
    found = []
    for crate in SOURCES:
        folder = ROOT / crate if crate == "src" else ROOT / crate / "src"
        for source in folder.rglob("*.rs"):
            lines = source.read_text().split("#[cfg(test)]\nmod tests")[0].splitlines()
            code = "\n".join(line for line in lines if not line.strip().startswith("//"))
            texts = re.findall(r'"((?:[^"\\\n]|\\.|\\\n)*)"', code)
            found += [re.sub(r"\\\n\s*", "", text) for text in texts]
    return found


def test_python_shows_no_path_of_rust() -> None:
    texts = texts_in_rust()
    names = {name for text in texts for name in re.findall(r"`[^`\n]*`", text) if "::" in name}
    assert {"`EventOptions::with_timing`", "`OwnerDeath::Keep`", "`Device::allocate_shared`"} <= names and len(names) > 30
    for name in names:
        for shown in (in_python(f"see {name} and more"), in_python(f"use this, or {name}")):
            assert "::" not in shown, shown
            # What is not marked exists.
            for owner, member in re.findall(r"`(\w+)\.(\w+)[^`]*`(?! \(in Rust\))", shown):
                assert hasattr(getattr(highwater, owner), member), shown
    for spelled in _SPELLED:
        assert any(spelled in text for text in texts), f"no text of the library has {spelled!r}"


def test_hints_name_calls_of_python(
    runtime: highwater.Runtime, device: highwater.Device, stream: highwater.Stream
) -> None:
    plain, double = device.allocate(2, "int8"), device.allocate(2, "float64")
    hints: dict[str, Callable[[], Any]] = {
        "Device.allocate_shared": plain.share,
        "Stream.record(timed=True)": lambda: stream.record().elapsed_ns(stream.record()),
        "fill with 0": lambda: stream.fill(double, 1.0),
        "buffer 1": lambda: runtime.share_all([device.allocate_shared(2, "int8"), plain]),
        "transpose_a": lambda: stream.matmul(device.allocate((2, 3), "float32"), device.allocate((2, 3), "float32")),
    }
    for expected, call in hints.items():
        with pytest.raises(highwater.Error) as caught:
            call()
        assert expected in str(caught.value) and "::" not in str(caught.value), str(caught.value)


def test_classes_that_cannot_be_subclassed_are_final_in_the_stubs() -> None:
    for stub in ast.parse(STUBS.read_text()).body:
        if not isinstance(stub, ast.ClassDef) or stub.name.startswith("_"):
            continue
        assert [ast.unparse(it) for it in stub.decorator_list] == ["final"], stub.name
        with pytest.raises(TypeError):
            type("Subclass", (getattr(_highwater, stub.name),), {})
