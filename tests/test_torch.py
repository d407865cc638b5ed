"""The versions of torch on which the suite has passed, and where its private names are used.

Comparisons with torch's own pipelining are for 2.13 alone. For another version, look through
``_torch_compat.py``, run the suite, and add the version here and in the README.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

import penstock

SEEN = ("2.11", "2.13", "2.14", "2.15")
SOURCES = Path(penstock.__file__).parent


def test_this_torch_is_one_of_those() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in SEEN


def private_names(source: str) -> Iterator[str]:
    """Every private name of torch in ``source``: imported, or read from an imported name."""
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(each.name, (each.asname or each.name).split(".")[0]) for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [(f"{node.module}.{n.name}", n.asname or n.name) for n in node.names]
        else:
            continue
        for name, bound in found:
            if name.split(".")[0] == "torch":
                imported.add(bound)
                if any(part.startswith("_") for part in name.split(".")):
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            of_torch = name in imported and not node.attr.startswith("__")
            if of_torch or (node.attr in PRIVATE and name not in ("self", "cls")):
                yield ast.unparse(node)


# Private attributes of tensors and modules, read from values of any name.
PRIVATE = {"_version", "_is_view", "_base", "_modules", "_parameters", "_buffers"} | {
    "_compiled_call_impl",
    "_backward_hooks",
    "_forward_hooks",
}


def test_private_names_are_found() -> None:
    source = "import torch\nfrom torch import _dynamo\ntorch._C.x\ny._version\nself._version\n"
    assert set(private_names(source)) == {"torch._dynamo", "torch._C", "y._version"}


def test_private_names_of_torch_stand_in_one_file() -> None:
    used = {
        f"{path.relative_to(SOURCES)}: {name}"
        for path in SOURCES.rglob("*.py")
        if path.name != "_torch_compat.py"
        for name in private_names(path.read_text())
    }
    assert not used
