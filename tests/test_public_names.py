"""The API reference is made of docstrings, so everything public has one that starts with a sentence."""

import importlib
import inspect
import pkgutil

import pytest

import specjax

MODULES = ["specjax", *(info.name for info in pkgutil.walk_packages(specjax.__path__, "specjax."))]


def public(module):
    """Names and values of what a module defines for others, methods of its classes included."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__ or not callable(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for method, function in vars(value).items():
                function = getattr(function, "__func__", getattr(function, "fget", function))
                if not method.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{method}", function


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_is_described(name):
    module = importlib.import_module(name)
    lacking = [
        what
        for what, value in public(module)
        # A dataclass without one has its signature instead.
        if not (value.__doc__ or "").strip() or value.__doc__.startswith(f"{what}(")
    ]
    assert not lacking
    assert (module.__doc__ or "").strip()


def test_the_names_of_the_package_are_there_and_described():
    assert sorted(specjax.__all__, key=str.lower) == sorted(set(specjax.__all__), key=str.lower)
    for name in specjax.__all__:
        assert (getattr(specjax, name).__doc__ or "").strip(), name
    assert set(specjax.__all__) <= set(dir(specjax))
