"""The examples in the docstrings of `fedman.flatness` give what they print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fedman.flatness

MODULES = [m.name for m in pkgutil.iter_modules(fedman.flatness.__path__, "fedman.flatness.") if m.name[-4:] != "plot"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
