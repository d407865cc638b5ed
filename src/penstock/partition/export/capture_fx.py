"""Capture a model's forward by ``torch.fx``, modules as they are: for what export can't see into.

    fx traces Python above the modules at which the model is cut; everything below stays a module

So autograd functions, hooks, and control flow that depends on data all work inside of a module
that is not cut in two. The price is that sizes and plain values are seen as little by it as by
any tracer of Python. This module knows no stage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

from penstock._torch_compat import refusing
from penstock.errors import PartitionError
from penstock.partition.export.call_form import CallForm
from penstock.partition.export.capture import MODEL, Called, place_in_user_code, warn_of_writes
from penstock.partition.export.captured import Captured
from penstock.partition.export.markers import MARK, SplitPoint, label_of, listening
from penstock.partition.ties import named_tensors

__all__ = ["capture_modules"]


def capture_modules(
    model: nn.Module, form: CallForm, spec: Mapping[str, SplitPoint] | None
) -> Captured:
    """Capture ``model`` down to the modules that ``spec`` names, in the mode that it is in.

    Args:
        model: the model; nothing of it changes.
        form: how it is called.
        spec: where to cut; without, what is no module of torch's own is traced into.

    Raises:
        PartitionError: its Python can't be traced.
    """
    called = Called(model, form)
    tracer = _Tracer(spec or {})
    try:
        with refusing(_refuse), listening(tracer.mark):
            graph = tracer.trace(called)
    except PartitionError:
        raise
    except Exception as error:
        place = place_in_user_code(error.__traceback__)
        raise PartitionError(f"torch.fx can't trace it{place}: {error}") from error
    output = called.seen.output
    assert output is not None
    warn_of_writes(model, called.seen.written)
    flat = _flat(graph, form, model)
    whole = [f"{node.target}." for node in flat.nodes if node.op == "call_module"]
    return Captured(
        graph=flat,
        form=form,
        output=output,
        by_modules=True,
        read=tuple(each for each in called.seen.read if f"{each[0]}.".startswith(tuple(whole))),
    )


def _refuse(what: str, by_module: bool) -> None:
    raise PartitionError(f"tracing{place_in_user_code()} meets {what}")


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, spec: Mapping[str, SplitPoint]) -> None:
        super().__init__()
        self._spec = {f"{MODEL}.{name}": point for name, point in spec.items()}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Everything but what holds a split point in its inside."""
        if module_qualified_name == MODEL:
            return False
        if not self._spec:
            return super().is_leaf_module(m, module_qualified_name)
        return not any(name.startswith(f"{module_qualified_name}.") for name in self._spec)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module, between its marks."""
        name = self.path_of_module(m)
        point = self._spec.get(name)
        label = label_of(name.removeprefix(f"{MODEL}."), point) if point is not None else ""
        if point is SplitPoint.BEGINNING:
            self.mark(label)
        result = super().call_module(m, forward, args, kwargs)
        if point is SplitPoint.END:
            self.mark(label)
        return result

    def mark(self, label: str) -> None:
        """Leave a mark in the graph."""
        self.create_node("call_function", MARK, (label,), {})


def _flat(traced: fx.Graph, form: CallForm, model: nn.Module) -> fx.Graph:
    """The traced graph with a placeholder for each tensor, and names as in the model."""
    graph = fx.Graph()
    inputs = [graph.placeholder(n.replace(".", "_")) for n in form.names]
    env: dict[fx.Node, fx.Node] = {}
    known = named_tensors(model)
    for node in traced.nodes:
        if node.op == "placeholder":
            continue
        if node.target is operator.getitem and node.args[0].op == "placeholder":
            env[node] = inputs[node.args[1]]
            continue
        target = node.target
        if isinstance(target, str) and node.op != "call_method":
            target = target.removeprefix(f"{MODEL}.")
            if node.op == "get_attr" and target not in known:
                raise PartitionError(
                    "tracing by torch.fx meets a tensor that is no input, parameter or buffer, "
                    "such as one that a module has kept from an earlier call: it would stay as "
                    "it is now; register it as a buffer, or return it from the module"
                )
        new = graph.create_node(
            node.op,
            target,
            fx.node.map_arg(node.args, env.__getitem__),
            fx.node.map_arg(node.kwargs, env.__getitem__),
            name=node.name.removeprefix(f"{MODEL}_"),
        )
        env[node] = new
        new.meta = {"modules": ()}
        if new.op == "call_module":
            module = model.get_submodule(str(new.target))
            new.meta = {
                "modules": (new.target,),
                "fresh": _makes_anew(module),
                "writes": _writes_into_input(module),
            }
    graph.lint()
    return graph


# Modules of torch's own that may hand their input on, or a view of it.
_VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Sequential, nn.ModuleList)


def _makes_anew(module: nn.Module) -> bool:
    """Whether what a module returns certainly shares no memory with its input."""
    own = type(module).__module__.startswith("torch.nn.")
    return own and not isinstance(module, _VIEWS) and not _writes_into_input(module)


def _writes_into_input(module: nn.Module) -> bool:
    """Whether a module, or the first layer in it, says that it writes into its input."""
    first = next((m for m in module.modules() if not any(m.children())), module)
    return getattr(first, "inplace", False) is True
