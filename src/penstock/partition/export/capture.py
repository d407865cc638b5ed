"""Capture a model's forward as a graph by ``torch.export``, as it runs in training or in eval.

    model(ids, labels=…)  ──export──►  operations on tensors  ──flatten──►  Captured

Export sees operations alone: what changes gradients without being one (autograd functions, hooks)
would be lost in silence, so that a model with such things is refused here. Sizes that may differ
from the example's are left open where the model's code allows. This module knows no stage.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock._torch_compat import (
    has_backward_hooks,
    quietly,
    refusing,
    shape_check,
)
from penstock.errors import PartitionError
from penstock.partition.export.attribute_writes import watching_writes
from penstock.partition.export.call_form import CallForm
from penstock.partition.export.captured import CONSTANTS, Captured, OutputForm
from penstock.partition.export.not_captured import LostInGraph, NotCaptured
from penstock.partition.export.regions import Region, region_of
from penstock.partition.ties import named_tensors, names_by_tensor

__all__ = ["MODEL", "Called", "capture", "place_in_user_code", "warn_of_writes"]

logger = logging.getLogger(__name__)

MODEL = "penstock_model"
LEAVES = "leaves"


class _Seen:
    """What a trace leaves behind; torch.export undoes what it leaves in a module's attributes."""

    output: OutputForm | None = None
    written: frozenset[str] = frozenset()
    read: tuple[tuple[str, str, Any], ...] = ()


class Called(nn.Module):
    """A model, called with the tensors of its arguments and nothing else."""

    def __init__(self, model: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.add_module(MODEL, model)
        self._form = form
        self.seen = _Seen()

    def forward(self, leaves: list[Tensor]) -> list[Any]:
        # One by one: to torch.fx the list is a single value.
        args, kwargs = self._form.rebuild([leaves[i] for i in range(len(self._form.names))])
        model = self.get_submodule(MODEL)
        with watching_writes(model, _refuse_write) as watch:
            output = OutputForm(model(*args, **kwargs))
        self.seen.output = output
        self.seen.written = frozenset(watch.written)
        self.seen.read = tuple(watch.plain_reads())
        return output.take()


def capture(model: nn.Module, form: CallForm) -> Captured:
    """Capture ``model`` in the mode (training or eval) that it is in.

    Args:
        model: the model; nothing of it changes.
        form: how it is called.

    Raises:
        PartitionError: its forward can't be a graph: it depends on the values of tensors, or does
            what a graph of operations would lose.
    """
    for name, module in model.named_modules():
        if has_backward_hooks(module):
            raise NotCaptured.of(
                f"module {name or type(model).__name__!r} has backward hooks, which a captured "
                "graph would not run",
                "take them off",
            )
    called = Called(model, form)
    program = _export(called, form)
    output = called.seen.output
    assert output is not None
    warn_of_writes(model, called.seen.written)
    form.add_check(shape_check(program, LEAVES, form.names))
    builder = _FlatGraph(program, model, form)
    return Captured(graph=builder.graph, form=form, output=output, constants=builder.constants)


def warn_of_writes(model: nn.Module, written: Collection[str]) -> None:
    """Say which attributes no captured stage will set."""
    if written:
        logger.warning(
            "%s sets %s in its forward: captured stages compute with that, but leave the "
            "attributes of modules as they are",
            type(model).__name__,
            ", ".join(sorted(written)),
        )


def _export(called: Called, form: CallForm) -> torch.export.ExportedProgram:
    """Export with sizes left open, all of them or as many as go."""
    auto = torch.export.Dim.AUTO
    open_sizes = [
        [dict.fromkeys(range(t.dim()), auto) for t in form.examples],
        [({0: auto} if t.dim() else None) for t in form.examples],
        None,
    ]
    first: Exception | None = None
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
            # With more sizes fixed fewer things can go wrong: what the last attempt says counts.
            first = error
            if _depends_on_data(error):
                break
    assert first is not None
    raise _failed(called, first) from first


def _refuse(what: str, by_module: bool) -> None:
    raise LostInGraph.of(
        f"capturing{place_in_user_code()} meets {what}",
        "do it inside of one module, which split_spec then leaves whole",
        by_module=by_module,
    )


def _refuse_write(what: str) -> None:
    raise NotCaptured.of(
        f"the forward{place_in_user_code()} changes {what}",
        "hold it in a buffer that is written in place",
    )


def _depends_on_data(error: Exception) -> bool:
    return any("DataDependent" in cls.__name__ for cls in type(error).__mro__)


def _failed(called: Called, error: Exception) -> NotCaptured:
    name = type(called.get_submodule(MODEL)).__name__
    told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place = place_in_user_code(error.__traceback__)
    if _depends_on_data(error):
        return NotCaptured.of(
            f"{name} can't be captured: its control flow depends on the values of "
            f"tensors{place}, and a graph holds one way alone ({told})",
            "compute both and choose with torch.where",
        )
    return NotCaptured.of(f"{name} can't be captured{place}: {told}")


def place_in_user_code(trace: TracebackType | None = None) -> str:
    """`` (at file:line, in name)``, the innermost frame that is neither torch's nor our own.

    Args:
        trace: of an exception; the current call stack if None.
    """
    frames = traceback.extract_tb(trace) if trace is not None else traceback.extract_stack()
    ours = str(Path(__file__).parents[2])
    theirs = str(Path(torch.__file__).parent)
    for frame in reversed(frames):
        if frame.filename == __file__ and frame.name == Called.forward.__name__:
            break  # no frame of the model's code: it is told of once that has run
        if not frame.filename.startswith((ours, theirs, contextlib.__file__, "<")):
            return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
    return ""


class _Names:
    """A parameter or buffer, by all names that the model has for it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def near(self, modules: Sequence[str]) -> str:
        """The name under which code in ``modules`` means it."""
        for module in reversed(modules):
            for name in self.names:
                if name.rpartition(".")[0] == module or name.startswith(f"{module}."):
                    return name
        return self.names[0]


class _FlatGraph:
    """The exported graph with parameters by name, and regions marked on their nodes."""

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
                inputs[spec.arg.name] = _Names(known[id(tensors[name])])
            elif kind == "CONSTANT_TENSOR":
                assert spec.target is not None
                inputs[spec.arg.name] = self._constant(program.constants[spec.target])
            elif kind != "USER_INPUT":
                raise NotCaptured.of(
                    f"{type(model).__name__} uses a {kind.lower().replace('_', ' ')}, which can't "
                    "be part of a captured stage"
                )
        named = iter(form.names)
        env: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = inputs.get(node.name)
                if env[node] is None:
                    env[node] = self.graph.placeholder(_identifier(next(named)))
                    env[node].meta = {"val": node.meta.get("val")}
        outputs = self._copy(program.graph_module, env, ())
        self.graph.output([self._node(value, ()) for value in outputs])
        self.graph.eliminate_dead_code(_must_stay)

    def _constant(self, value: Any) -> str:
        name = f"{self._mode}_{len(self.constants)}"
        self.constants[name] = value
        return f"{CONSTANTS}.{name}"

    def _copy(
        self, module: fx.GraphModule, env: dict[fx.Node, Any], regions: tuple[Region, ...]
    ) -> list[Any]:
        """Copy the nodes of a graph whose placeholders are in ``env``; returns its outputs."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [_given(value, env) for value in node.args[0]]
            if node.op == "get_attr":
                value = operator.attrgetter(node.target)(module)
                env[node] = value if isinstance(value, fx.GraphModule) else self._constant(value)
                continue
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                continue  # it holds tensors to the device that they were captured on
            region = region_of(node.target, node.args)
            if region is not None:
                entered, body, operands = region
                inner = env[body]
                given = [_given(value, env) for value in operands]
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
        if isinstance(value, _Names):
            value = value.near(modules)
        if not isinstance(value, str):
            return value
        if value not in self._attributes:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with self.graph.inserting_before(first) if first else contextlib.nullcontext():
                self._attributes[value] = self.graph.create_node("get_attr", value)
        return self._attributes[value]


def _given(value: Any, env: Mapping[fx.Node, Any]) -> Any:
    """What stands for an argument of a node: a constant for itself."""
    return env[value] if isinstance(value, fx.Node) else value


def _modules_of(node: fx.Node) -> tuple[str, ...]:
    """The names of the modules in whose call a node ran, outermost first."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    inside = (path for path, _ in stack.values() if path.startswith(f"{MODEL}."))
    return tuple(path.removeprefix(f"{MODEL}.") for path in inside)


def _must_stay(node: fx.Node) -> bool:
    """Whether a node does something even where nobody uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    tags = getattr(node.target, "tags", ())
    # Random operations stay, so that all others draw what they would have drawn.
    return node.is_impure() or torch.Tag.nondeterministic_seeded in tags


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
