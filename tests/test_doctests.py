"""The examples in the documentation of every module run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import penstock

MODULES = sorted(
    info.name for info in pkgutil.walk_packages(penstock.__path__, f"{penstock.__name__}.")
)


@pytest.mark.parametrize("name", [penstock.__name__, *MODULES])
def test_examples(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert not outcome.failed, f"{outcome.failed} examples of {name} fail; see the output"


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test.name
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert "penstock.pipeline.Pipeline" in found
    assert len(found) > 20
