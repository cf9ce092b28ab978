"""Everything public has a docstring and a type, and the types are those of the classes."""

from __future__ import annotations

import ast
import dataclasses
import pathlib

import highwater

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
        inherited = {"__doc__", "__module__", "__repr__", "__reduce__", "__new__"}
        found = {member for member in vars(getattr(highwater, stub.name)) if member not in inherited}
        assert written - {"__new__"} == found, stub.name
