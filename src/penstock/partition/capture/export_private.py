"""The private corners of torch around export that capturing stands on, in one place.

``tests/test_torch.py`` names the versions of torch that they were seen to work on. This module does
not know what they are for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import _trace as export_trace
from torch.fx.experimental import symbolic_shapes

from penstock.partition.torch_private import watched_hooks

__all__ = [
    "argument_effects",
    "quietly",
    "refusing",
    "shape_check",
    "shape_text",
]


# Of torch's own modules, those with autograd functions that a graph of operations would lose.
LOST = ("torch.utils.checkpoint", "torch.nn.modules._functions")


HOOKS = {
    "registers a hook on a tensor": "Tensor.register_hook(), a hook that would be lost",
    "reads a tensor's grad_fn": "Tensor.grad_fn, a node that a captured stage does not have",
}


def argument_effects(target: Any) -> list[tuple[str, bool, bool]] | None:
    """For each argument of an operation: its name, whether a result may share its memory, and
    whether it is written into. None for what has no schema."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    # An argument with a mark is written into, or is what a result is a view of. (The results
    # themselves are not asked: where they are a list, as of split, they carry no mark.)
    return [
        (
            arg.name,
            arg.alias_info is not None,
            arg.alias_info is not None and bool(arg.alias_info.is_write),
        )
        for arg in schema.arguments
    ]


@contextmanager
def refusing(refuse: Callable[[str, bool], None]) -> Iterator[None]:
    """Call ``refuse`` where code run in this does what tracing operations would lose in silence.

    That is: a user's ``autograd.Function`` (its own backward), hooks on tensors, and gradients
    taken inside a forward.

    Args:
        refuse: called with what is done, and whether a model cut by module could do it, too: the
            code between its modules can't take gradients either.
    """
    function: Any = torch.autograd.Function
    apply = function.__dict__["apply"]

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ in LOST or not cls.__module__.startswith("torch."):
            what = f"the autograd function {cls.__qualname__}, whose own backward would be lost"
            refuse(what, True)
        return apply.__get__(None, cls)(*args, **kwargs)

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            refuse(f"{name}, which takes gradients", False)

        return call

    replaced: list[tuple[Any, str, Any]] = [
        (function, "apply", classmethod(checked)),
        (torch.autograd, "grad", refused("torch.autograd.grad()")),
        (Tensor, "backward", refused("Tensor.backward()")),
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        with watched_hooks(lambda what: refuse(HOOKS[what], True)):
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep torch.export from writing whole graphs to stderr where it fails: the error says it.

    What the model's own code writes there is let through.
    """
    chatty = [logging.getLogger(m.__name__) for m in (export_trace, symbolic_shapes)]
    levels = [logger.level for logger in chatty]
    shadow: Any = export_trace
    shadow.print = lambda *args, **kwargs: None  # in the place of the builtin, there alone
    try:
        for logger in chatty:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        del shadow.print
        for logger, level in zip(chatty, levels, strict=True):
            logger.setLevel(level)


def shape_check(
    program: torch.export.ExportedProgram, argument: str, names: Sequence[str]
) -> Callable[[Sequence[Tensor]], str | None]:
    """What an exported program takes for granted about the shapes of its inputs.

    Args:
        program: the program; its one argument is a list of tensors.
        argument: the name of that argument.
        names: what the tensors in the list are called.

    Returns:
        A function that says what is wrong with the shapes of such tensors, or None.
    """
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    inputs = [nodes[name] for name in program.graph_signature.user_inputs if name in nodes]
    shapes = [tuple(node.meta["val"].shape) for node in inputs]
    fixed: list[tuple[int, int, int]] = []
    ranges: list[tuple[int, int, float, float]] = []
    for i, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if isinstance(size, int):
                fixed.append((i, dim, size))
            elif (known := program.range_constraints.get(size.node.expr)) is not None:
                ranges.append((i, dim, _bound(known.lower, 0), _bound(known.upper, float("inf"))))
    guards = []
    for code in program._guards_code:
        if "._base." in code:  # of the batch that the example was a view of: no input's shape
            continue
        text = code
        for i, name in enumerate(names):
            text = text.replace(f"L['{argument}'][{i}].size()", f"{name}.shape")
        guards.append((compile(code, "<guard>", "eval"), text))

    def check(tensors: Sequence[Tensor]) -> str | None:
        for name, tensor, shape in zip(names, tensors, shapes, strict=True):
            if tensor.dim() != len(shape):
                return _wrong(name, tensor, f"{len(shape)} dimensions")
        for i, dim, size in fixed:
            if tensors[i].shape[dim] != size:
                return _wrong(names[i], tensors[i], f"size {size} in dimension {dim}")
        for i, dim, low, high in ranges:
            if not low <= tensors[i].shape[dim] <= high:
                wanted = (
                    f"a size of at least {low:g}"
                    if high == float("inf")
                    else (f"a size from {low:g} to {high:g}")
                )
                return _wrong(names[i], tensors[i], f"{wanted} in dimension {dim}")
        scope = {**symbolic_shapes.SYMPY_INTERP, "L": {argument: tensors}}
        for compiled, text in guards:
            if not eval(compiled, scope):
                shown = ", ".join(
                    f"{n}: {tuple(t.shape)}" for n, t in zip(names, tensors, strict=True)
                )
                return f"the inputs are {shown}, but the model was captured for {text}{_RECAPTURE}"
        return None

    return check


_RECAPTURE = "; capture it with an example of these shapes"


def _wrong(name: str, tensor: Tensor, wanted: str) -> str:
    return (
        f"input {name} has shape {tuple(tensor.shape)}, but the model was captured for {wanted}"
        f"{_RECAPTURE}"
    )


def _bound(value: Any, otherwise: float) -> float:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return otherwise


def shape_text(value: Any) -> str:
    """A captured value for messages: ``float32[*, 8]``, open sizes as stars, or its type."""
    if isinstance(value, Tensor):
        sizes = ", ".join(str(size) if isinstance(size, int) else "*" for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    return type(value).__name__
