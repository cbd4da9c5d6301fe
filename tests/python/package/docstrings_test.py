"""Every public name says what it is, takes, returns and raises."""

import dataclasses
import importlib
import inspect
import re

import pytest

import fovea.compat

MODULES = [fovea, fovea.compat, fovea.parallel]
for name in ("fovea.torch", "fovea.jax"):
    try:
        MODULES.append(importlib.import_module(name))
    except ImportError:
        pass


def public_names():
    for module in MODULES:
        for name in module.__all__:
            yield pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")


def public_methods():
    for module in MODULES:
        for name in module.__all__:
            owner = getattr(module, name)
            if not inspect.isclass(owner) or issubclass(owner, BaseException):
                continue
            for method, found in vars(owner).items():
                plain = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                if not method.startswith("_") and inspect.isfunction(plain) and plain.__module__.startswith("fovea"):
                    yield pytest.param(plain, id=f"{name}.{method}")


def sections(text: str) -> dict[str, str]:
    """Numpydoc's sections by their titles; before the first one under ""."""
    parts = re.split(r"^(\w[\w ]+)\n-{3,}\n", inspect.cleandoc(text), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def documented(section: str) -> set[str]:
    names = set()
    for line in section.splitlines():
        if line and not line.startswith(" "):
            names |= {name.strip().lstrip("*") for name in line.split(" : ")[0].split(",")}
    return names


def parameters(function) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name not in ("self", "cls")}


@pytest.mark.parametrize("thing", list(public_names()))
def test_every_public_name_has_a_docstring(thing) -> None:
    assert thing.__doc__ and len(thing.__doc__.strip()) > 20
    first = thing.__doc__.strip().splitlines()[0]
    assert first.endswith((".", "``", ":")) or len(first) > 20


@pytest.mark.parametrize("thing", list(public_names()))
def test_every_argument_is_documented(thing) -> None:
    found = sections(thing.__doc__)
    if inspect.isclass(thing):
        if issubclass(thing, BaseException):
            return
        fields = set(getattr(thing, "_fields", ())) | {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set(
            getattr(thing, "_fields", ()))
        named = documented(found.get("Attributes", "")) | documented(found.get("Parameters", ""))
        assert fields <= named, f"undocumented: {sorted(fields - named)}"
        return
    named = documented(found.get("Parameters", ""))
    assert parameters(thing) <= named, f"undocumented: {sorted(parameters(thing) - named)}"
    assert named <= parameters(thing) or "features" in parameters(thing), f"unknown: {sorted(named - parameters(thing))}"


@pytest.mark.parametrize("thing", list(public_names()))
def test_functions_say_what_they_return_and_raise(thing) -> None:
    if not inspect.isfunction(thing):
        return
    found = sections(thing.__doc__)
    if inspect.signature(thing).return_annotation not in (None, "None"):
        assert found.get("Returns", "").strip(), "no section Returns"
    if parameters(thing):
        assert found.get("Raises", "").strip(), "no section Raises"


@pytest.mark.parametrize("method", list(public_methods()))
def test_every_public_method_has_a_docstring(method) -> None:
    assert method.__doc__ and len(method.__doc__.strip()) > 10


@pytest.mark.parametrize("thing", list(public_names()))
def test_every_public_name_has_types(thing) -> None:
    functions = [thing] if inspect.isfunction(thing) else []
    for function in functions:
        annotations = function.__annotations__
        assert parameters(function) | {"return"} <= set(annotations)
