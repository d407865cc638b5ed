"""Capture a model's forward as a graph with ``torch.export``, in training or evaluation mode.

    placeholder    the tensors of the call, in the order of ``CallForm.names``
    get_attr       parameters and buffers by their names in the model; constants that the forward
                   makes, as ``captured.<name>``
    call_function  the forward's operations, in order
    output         the tensors (and sizes) among what the model returns

The ``meta`` of a node holds ``val`` (its value on fake tensors), ``modules`` (the names of the
modules in whose call it ran, outermost first) and ``regions`` (see ``regions.py``).

A graph holds only operations. This module refuses a forward that affects gradients or its modules
in other ways (autograd functions, hooks, attributes). Sizes stay dynamic where the model's code
allows. This module knows no stage.
"""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock._torch_compat import (
    has_backward_hooks,
    is_metadata_assert,
    quietly,
    refusing,
    shape_check,
)
from penstock.errors import PartitionError
from penstock.partition.export.call_form import CallForm, OutputForm
from penstock.partition.export.regions import Region, region_of
from penstock.partition.forward.module_state import ModuleSnapshot
from penstock.partition.ties import named_tensors, names_by_tensor
from penstock.stage.rng import host_random_states

__all__ = ["CONSTANTS", "Captured", "capture"]

# The attribute of a stage that holds the constant tensors of its graph.
CONSTANTS = "captured"
MODEL = "penstock_model"
LEAVES = "leaves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured forward.

    Args:
        graph: the graph, as described in the module's docstring.
        form: the form of the model's call.
        output: the form of its output.
        constants: tensors and inner graphs that the graph brings along.
    """

    graph: fx.Graph
    form: CallForm
    output: OutputForm
    constants: Mapping[str, Any]


class _FlatCall(nn.Module):
    """A model as a function of the list of its input tensors."""

    def __init__(self, model: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.add_module(MODEL, model)
        self._form = form

    def forward(self, leaves: list[Tensor]) -> list[Any]:
        args, kwargs = self._form.rebuild(leaves)
        model = self.get_submodule(MODEL)
        drawn = str(host_random_states())
        with _no_state_kept(model):
            self._form.output = OutputForm(model(*args, **kwargs))
        if str(host_random_states()) != drawn:
            raise PartitionError(
                "the forward draws numbers from random or numpy.random, which would be constants "
                "of the graph; draw them with torch, or pass them in as tensors"
            )
        return self._form.output.take()


def capture(model: nn.Module, form: CallForm) -> Captured:
    """Capture ``model`` in its current mode (training or evaluation).

    Args:
        model: the model; stays unchanged.
        form: the form of the call.

    Raises:
        PartitionError: the forward can't be captured as a graph: it depends on tensor values, or
            has an effect that a graph of operations would lose.
    """
    for name, module in model.named_modules():
        if has_backward_hooks(module):
            raise PartitionError(
                f"module {name or type(model).__name__!r} has backward hooks, which a captured "
                "graph would not run; take them off, or cut by module"
            )
    called = _FlatCall(model, form)
    program = _export(called, form)
    form.add_check(shape_check(program, LEAVES, form.names))
    builder = _FlatGraph(program, model, form)
    output = form.output
    assert output is not None
    return Captured(graph=builder.graph, form=form, output=output, constants=builder.constants)


def _export(called: _FlatCall, form: CallForm) -> torch.export.ExportedProgram:
    """Export with all sizes dynamic, else only first dimensions, else none."""
    auto = torch.export.Dim.AUTO
    open_sizes = [
        [dict.fromkeys(range(t.dim()), auto) for t in form.examples],
        [({0: auto} if t.dim() else None) for t in form.examples],
        None,
    ]
    last: Exception | None = None
    for shapes in open_sizes:
        try:
            with refusing(_refuse), quietly():
                return torch.export.export(
                    called,
                    ([*form.examples],),
                    dynamic_shapes=None if shapes is None else (shapes,),
                    strict=False,
                )
        except PartitionError:
            raise
        except Exception as error:
            last = error  # later attempts have fewer dynamic sizes: their error is relevant
            if _depends_on_data(error):
                break
    assert last is not None
    name = type(called.get_submodule(MODEL)).__name__
    message = str(last).strip().splitlines()[0] if str(last).strip() else type(last).__name__
    place = _place_in_user_code(last.__traceback__)
    if _depends_on_data(last):
        raise PartitionError(
            f"{name} can't be captured: its control flow depends on the values of tensors{place}, "
            f"and a graph has no branches ({message}); compute both and choose with torch.where"
        ) from last
    raise PartitionError(f"{name} can't be captured{place}: {message}") from last


def _depends_on_data(error: Exception) -> bool:
    return any("DataDependent" in cls.__name__ for cls in type(error).__mro__)


def _refuse(what: str) -> None:
    raise PartitionError(
        f"capturing{_place_in_user_code()} meets {what}; a graph of operations would lose it: "
        "compute without it, or cut by module, which runs modules whole"
    )


def _place_in_user_code(trace: TracebackType | None = None) -> str:
    """`` (at file:line, in name)`` for the innermost frame outside torch and this library.

    Args:
        trace: the traceback of an exception; None for the current call stack.
    """
    frames = traceback.extract_tb(trace) if trace is not None else traceback.extract_stack()
    libraries = (
        str(Path(__file__).parents[2]),
        str(Path(torch.__file__).parent),
        contextlib.__file__,
        "<",
    )
    for frame in reversed(frames):
        if frame.filename == __file__ and frame.name == _FlatCall.forward.__name__:
            break  # the model's code has returned
        if not frame.filename.startswith(libraries):
            return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
    return ""


# --- state that a forward keeps -----------------------------------------------------------------


@contextmanager
def _no_state_kept(model: nn.Module) -> Iterator[None]:
    """Refuse a forward that leaves changed attributes on its modules, and undo the changes.

    Every microbatch would otherwise replay the example's call with the old attributes. In-place
    writes to buffers are operations of the graph, and allowed.
    """
    snapshot = ModuleSnapshot(model)
    snapshot.watch_writes()
    try:
        yield
    finally:
        changes = snapshot.changes()
        snapshot.restore()
    changed = [*changes.attributes, *changes.replaced]
    if changed:
        raise PartitionError(
            f"the forward changes {', '.join(changed)}, which a graph would not: every microbatch "
            "would start from the values of now; keep the state in a buffer that is written in "
            "place, or cut by module"
        )


# --- the graph ----------------------------------------------------------------------------------


class _StateNames:
    """All names in the model of one parameter or buffer."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def used_in(self, modules: Sequence[str]) -> str:
        """The name by which code in ``modules`` reads the tensor."""
        for module in reversed(modules):
            for name in self.names:
                if name.rpartition(".")[0] == module or name.startswith(f"{module}."):
                    return name
        return self.names[0]


class _FlatGraph:
    """The exported graph, with state by name and with grad-mode and autocast regions as marks on
    nodes."""

    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, form: CallForm
    ) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self._mode = "train" if model.training else "eval"
        self._attributes: dict[str, fx.Node] = {}
        tensors, known = named_tensors(model), names_by_tensor(model)
        inputs: dict[str, Any] = {}
        for spec in program.graph_signature.input_specs:
            kind = spec.kind.name
            if kind in ("PARAMETER", "BUFFER"):
                assert spec.target is not None
                name = spec.target.removeprefix(f"{MODEL}.")
                inputs[spec.arg.name] = _StateNames(known[id(tensors[name])])
            elif kind == "CONSTANT_TENSOR":
                assert spec.target is not None
                inputs[spec.arg.name] = self._constant(program.constants[spec.target])
            elif kind != "USER_INPUT":
                raise PartitionError(
                    f"{type(model).__name__} uses a {kind.lower().replace('_', ' ')}, which can't "
                    "be part of a captured stage; cut by module"
                )
        named = iter(form.names)
        env: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = inputs.get(node.name)
                if env[node] is None:
                    name = "".join(c if c.isalnum() else "_" for c in next(named))
                    env[node] = self.graph.placeholder(name)
                    env[node].meta = {"val": node.meta.get("val")}
        outputs = self._copy(program.graph_module, env, ())
        self.graph.output([self._node(value, ()) for value in outputs])
        self.graph.eliminate_dead_code(_has_effect)

    def _constant(self, value: Any) -> str:
        name = f"{self._mode}_{len(self.constants)}"
        self.constants[name] = value
        return f"{CONSTANTS}.{name}"

    def _copy(
        self, module: fx.GraphModule, env: dict[fx.Node, Any], regions: tuple[Region, ...]
    ) -> list[Any]:
        """Copy the nodes of a graph whose placeholders are in ``env``; return its outputs."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [_lookup(value, env) for value in node.args[0]]
            if node.op == "get_attr":
                value = operator.attrgetter(node.target)(module)
                env[node] = value if isinstance(value, fx.GraphModule) else self._constant(value)
                continue
            if is_metadata_assert(node.target):
                continue  # would tie tensors to the capture's device
            region = region_of(node.target, node.args)
            if region is not None:
                entered, body, operands = region
                inner = env[body]
                given = [_lookup(value, env) for value in operands]
                places = [n for n in inner.graph.nodes if n.op == "placeholder"]
                within = dict(zip(places, given, strict=True))
                env[node] = self._copy(inner, within, (*regions, entered))
            elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self._copy_one(node, env, regions)
        raise AssertionError("a graph without an output")

    def _copy_one(self, node: fx.Node, env: dict[fx.Node, Any], regions: Any) -> fx.Node:
        modules = _modules_of(node)
        new = self.graph.node_copy(node, lambda n: self._node(env[n], modules))
        new.meta = {
            "val": node.meta.get("val"),
            "modules": modules,
            "regions": regions,
            "stack_trace": node.meta.get("stack_trace"),
        }
        return new

    def _node(self, value: Any, modules: tuple[str, ...]) -> Any:
        """``value`` as an argument of a node that runs in ``modules``."""
        if isinstance(value, fx.GraphModule):
            value = self._constant(value)
        if isinstance(value, _StateNames):
            value = value.used_in(modules)
        if not isinstance(value, str):
            return value
        if value not in self._attributes:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with self.graph.inserting_before(first) if first else contextlib.nullcontext():
                self._attributes[value] = self.graph.create_node("get_attr", value)
        return self._attributes[value]


def _lookup(value: Any, env: Mapping[fx.Node, Any]) -> Any:
    return env[value] if isinstance(value, fx.Node) else value


def _modules_of(node: fx.Node) -> tuple[str, ...]:
    """The names of the modules whose calls enclose a node, outermost first."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    inside = (path for path, _ in stack.values() if path.startswith(f"{MODEL}."))
    return tuple(path.removeprefix(f"{MODEL}.") for path in inside)


def _has_effect(node: fx.Node) -> bool:
    """True for a node that must stay even if its result is unused."""
    if node.op in ("placeholder", "output"):
        return True
    tags = getattr(node.target, "tags", ())
    # Unused random operations stay, so that later ones draw the same numbers.
    return node.is_impure() or torch.Tag.nondeterministic_seeded in tags
