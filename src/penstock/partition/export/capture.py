"""Capture a model's forward as a graph with ``torch.export``, in training or evaluation mode.

Inputs are in the order of ``CallForm.names``; parameters and buffers have their names in the model,
the device and the forward's constants are ``captured.<name>``. The ``meta`` of a node holds ``val``
(its value on fake tensors), ``modules`` (the names of the modules in whose call it ran, outermost
first) and ``regions`` (the grad modes and autocast around it).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from penstock import _torch_compat
from penstock.errors import PartitionError
from penstock.partition.export.call_form import CallForm, OutputForm
from penstock.partition.forward.module_state import ModuleSnapshot
from penstock.partition.ties import named_tensors, names_by_tensor
from penstock.stage.rng import host_random_states

__all__ = ["CONSTANTS", "Captured", "capture"]

# The attribute of a stage that holds the constants of its graph.
CONSTANTS = "captured"
MODEL = "penstock_model"
LEAVES = "leaves"

Region: TypeAlias = tuple[type, tuple[Any, ...]]
"""The class of a context manager, and the arguments to make it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured forward; ``constants`` are the device, tensors and inner graphs that it holds."""

    graph: fx.Graph
    form: CallForm
    constants: Mapping[str, Any]


class _FlatCall(nn.Module):
    """A model as a function of the list of its input tensors.

    Refuses a forward with effects other than operations; in-place writes to buffers are operations.
    """

    def __init__(self, model: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.add_module(MODEL, model)
        self._form = form

    def forward(self, leaves: list[Tensor]) -> list[Any]:
        args, kwargs = self._form.rebuild(leaves)
        model = self.get_submodule(MODEL)
        drawn = host_random_states()
        snapshot = ModuleSnapshot(model)
        snapshot.watch_writes()
        try:
            self._form.output = OutputForm(model(*args, **kwargs))
        finally:
            changes = snapshot.changes()
            snapshot.restore()
        if changed := [*changes.attributes, *changes.replaced]:
            raise PartitionError(
                f"the forward changes {', '.join(changed)}, which a graph would not: every "
                "microbatch would start from the values of now; keep the state in a buffer that is "
                "written in place, or cut by module"
            )
        if host_random_states() != drawn:
            raise PartitionError(
                "the forward draws numbers from random or numpy.random, which would be constants "
                "of the graph; draw them with torch, or pass them in as tensors"
            )
        return self._form.output.computed


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Captured:
    """Capture ``model`` in its current mode (training or evaluation), on an example.

    Raises:
        PartitionError: the example does not fit the model, or the forward depends on tensor values
            or has an effect that operations would lose, such as a hook.
    """
    for name, module in model.named_modules():
        if _torch_compat.has_backward_hooks(module):
            raise PartitionError(
                f"module {name or type(model).__name__!r} has backward hooks, which a captured "
                "graph would not run; take them off, or cut by module"
            )
    form = CallForm(model, args, kwargs)
    tensors = (*model.parameters(), *model.buffers(), *form.examples)
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "meta":  # the capture then needs only shapes
        form.examples = tuple(example.to("meta") for example in form.examples)
    program = _export(model, form)
    form.check = _torch_compat.shape_check(program, LEAVES, form.names)
    form.examples = ()
    form.output.computed.clear()
    builder = _GraphBuilder(program, model, form.names, device)
    return Captured(graph=builder.graph, form=form, constants=builder.constants)


def _export(model: nn.Module, form: CallForm) -> torch.export.ExportedProgram:
    sizes = [dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in form.examples]
    try:
        with _torch_compat.refusing(_refuse):
            flat, inputs = _FlatCall(model, form), ([*form.examples],)
            return torch.export.export(flat, inputs, dynamic_shapes=(sizes,), strict=False)
    except PartitionError:
        raise
    except Exception as error:
        message = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if any("DataDependent" in cls.__name__ for cls in type(error).__mro__):
            message += "; a graph can't branch on values: compute both and choose with torch.where"
        elif "SymInt" in message:
            message += "; sizes are open in a capture: pass int(size) where code needs a number"
        raise PartitionError(f"{type(model).__name__} can't be captured: {message}") from error


def _refuse(what: str) -> None:
    raise PartitionError(
        f"the forward {what}, which a graph of operations would lose; "
        "compute without it, or cut by module, which runs modules whole"
    )


# --- the graph ----------------------------------------------------------------------------------


class _GraphBuilder:
    """Builds the flat graph of an exported program: state by name, regions as marks on nodes.

    In ``env``, an exported node is a new node, the names of an attribute, a graph that an operation
    takes as a function, or the list of a region's results.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        model: nn.Module,
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {"device": device}
        self._device = device
        self._mode = "train" if model.training else "eval"
        self._attributes: dict[str, fx.Node] = {}
        self._values: dict[str, Any] = {}
        state = self._state(program, model)
        inputs = iter(names)
        env: dict[fx.Node, Any] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if node.name in state:
                env[node] = state[node.name]
                self._values |= dict.fromkeys(env[node], value)
            else:
                name = "".join(c if c.isalnum() else "_" for c in next(inputs))
                env[node] = self.graph.placeholder(name)
                env[node].meta = {"val": value}
        self._device_node = self._attribute(f"{CONSTANTS}.device")
        outputs = self._copy(program.graph_module, env, ())
        self.graph.output([self._argument(value, ()) for value in outputs])
        self.graph.eliminate_dead_code(_has_effect)

    def _state(self, program: torch.export.ExportedProgram, model: nn.Module) -> dict[str, Any]:
        """The names of each input that is a parameter, buffer or constant."""
        tensors, names = named_tensors(model), names_by_tensor(model)
        state = {}
        for spec in program.graph_signature.input_specs:
            kind, target = spec.kind.name, spec.target or ""
            if kind in ("PARAMETER", "BUFFER"):
                state[spec.arg.name] = names[id(tensors[target.removeprefix(f"{MODEL}.")])]
            elif kind == "CONSTANT_TENSOR":
                value = program.constants[target]
                if any(_torch_compat.same_storage(value, param) for param in model.parameters()):
                    raise PartitionError(
                        f"the forward reaches a parameter of shape {tuple(value.shape)} by a list "
                        "or a partial, so that it would not train; register it where it is used"
                    )
                state[spec.arg.name] = self._constant(value)
            elif kind != "USER_INPUT":
                raise PartitionError(
                    f"{type(model).__name__} uses a {kind.lower().replace('_', ' ')}, which can't "
                    "be part of a captured stage; cut by module"
                )
        return state

    def _constant(self, value: Any) -> tuple[str]:
        if isinstance(value, Tensor) and value.is_meta and self._device.type == "meta":
            raise PartitionError(
                f"the forward makes a tensor of fixed values ({tuple(value.shape)}, {value.dtype}) "
                "on the meta device, where it has none: hold it in a buffer, which is initialized "
                "or loaded, or build the model on another device"
            )
        name = f"{self._mode}_{len(self.constants)}"
        self.constants[name] = value
        return (f"{CONSTANTS}.{name}",)

    def _copy(
        self, module: fx.GraphModule, env: dict[fx.Node, Any], regions: tuple[Region, ...]
    ) -> list[Any]:
        """Copy the nodes of a graph whose placeholders are in ``env``; return its outputs."""
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output") or node.target is _torch_compat.METADATA_ASSERT:
                continue  # assertions would tie tensors to the capture's device
            if node.op == "get_attr":
                value = operator.attrgetter(node.target)(module)
                env[node] = value if isinstance(value, fx.GraphModule) else self._constant(value)
            elif (region := _region_of(node)) is not None:
                entered, body, operands = region
                inner = env[body]
                places = inner.graph.find_nodes(op="placeholder")
                values: Any = fx.node.map_arg(list(operands), env.__getitem__)
                within = dict(zip(places, values, strict=True))
                env[node] = self._copy(inner, within, (*regions, entered))
            elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self._copy_node(node, env, regions)
        outputs: Any = fx.node.map_arg(module.graph.output_node().args[0], env.__getitem__)
        return list(outputs)

    def _copy_node(self, node: fx.Node, env: dict[fx.Node, Any], regions: Any) -> fx.Node:
        stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        paths = (path for path, _ in stack.values() if path.startswith(f"{MODEL}."))
        modules = tuple(path.removeprefix(f"{MODEL}.") for path in paths)
        new = self.graph.node_copy(node, lambda n: self._argument(env[n], modules))
        new.args = fx.node.map_aggregate(new.args, self._open_device)
        new.kwargs = fx.node.map_aggregate(new.kwargs, self._open_device)
        new.meta = {key: node.meta.get(key) for key in ("val", "stack_trace")}
        new.meta |= {"modules": modules, "regions": regions}
        return new

    def _open_device(self, value: Any) -> Any:
        """The attribute for the capture's device, since a stage may be moved to another."""
        is_device = isinstance(value, torch.device) and value.type == self._device.type
        return self._device_node if is_device else value

    def _argument(self, value: Any, modules: tuple[str, ...]) -> Any:
        """``value`` of ``env`` as an argument of a node that runs in ``modules``.

        Of a shared tensor's names, it is the one in these modules, if any.
        """
        if isinstance(value, fx.GraphModule):
            value = self._constant(value)
        if not isinstance(value, tuple):
            return value
        own = (n for module in reversed(modules) for n in value if n.startswith(f"{module}."))
        return self._attribute(next(own, value[0]))

    def _attribute(self, name: str) -> fx.Node:
        if name not in self._attributes:
            node = self._attributes[name] = self.graph.create_node("get_attr", name)
            node.meta = {"val": self._values.get(name)}
        return self._attributes[name]


def _region_of(node: fx.Node) -> tuple[Region, Any, Sequence[Any]] | None:
    """The region, body and operands of a node that wraps a region; None for other nodes."""
    ops: Any = torch.ops.higher_order
    if node.target is ops.wrap_with_set_grad_enabled:
        enabled, body, *operands = node.args
        return (torch.set_grad_enabled, (enabled,)), body, operands
    if node.target is ops.wrap_with_autocast:
        *options, body = node.args[:5]
        return (torch.autocast, tuple(options)), body, node.args[5:]
    return None


def _has_effect(node: fx.Node) -> bool:
    """True for a node that must stay even if its result is unused."""
    # Unused random operations stay, so that later ones draw the same numbers.
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op in ("placeholder", "output") or node.is_impure() or is_random
