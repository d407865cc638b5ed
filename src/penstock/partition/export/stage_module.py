"""The module of a captured stage: its part of the graph, over the model's own parameters.

    model                   stage 1's module          names and objects are the model's own, so
    ├─ embed.weight         └─ layers                 that state_dicts fit both, and an optimizer
    └─ layers                  └─ 1                   of either trains both
       ├─ 0.weight                └─ weight
       └─ 1.weight

Training and evaluation are two graphs; ``train()`` and ``eval()`` choose. It knows neither other
stages nor how the graph was cut.
"""

from __future__ import annotations

import itertools
import linecache
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from penstock.errors import PartitionError, StageError
from penstock.partition.export.attribute_writes import ABSENT
from penstock.partition.export.captured import CONSTANTS
from penstock.partition.export.regions import leaving_all

__all__ = ["StageCode", "StageModule", "compile_graph"]

logger = logging.getLogger(__name__)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCode:
    """What one stage runs in one mode.

    Args:
        graph: its part of the graph.
        run: the graph as a function of the module and the values that come in.
        take: on the first stage, what makes of a call of the model the tensors that come in.
        give: on the last stage, what makes of what goes out the model's output.
        has_loss: whether there is a loss in that.
    """

    graph: fx.Graph
    run: Callable[..., Any]
    take: Callable[..., Any] | None
    give: Callable[..., Any] | None
    has_loss: bool

    def __deepcopy__(self, memo: object) -> StageCode:
        """Itself: code holds no state."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled: operations of torch can't be."""
        raise TypeError(
            "a captured stage can't be pickled; save its state_dict(), and capture the model again "
            "where it is to be loaded, as every process of a pipeline does"
        )

    def names_dtype(self, dtype: torch.dtype) -> bool:
        """Whether an operation is told to compute in this dtype."""
        args = ((*node.args, *node.kwargs.values()) for node in self.graph.nodes)
        return any(arg is dtype for each in args for arg in each)


def compile_graph(graph: fx.Graph) -> Callable[..., Any]:
    """A graph as a function of the module that holds its attributes, and of its inputs."""
    code = graph.python_code("self")
    filename = f"<penstock stage code {next(_numbers)}>"
    # Tracebacks then show the line that failed.
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(True), filename)
    scope = dict(code.globals)
    exec(compile(code.src, filename, "exec"), scope)
    run: Callable[..., Any] = scope["forward"]
    return run


class StageModule(nn.Module):
    """One stage of a captured model.

    Args:
        index: the stage's number.
        codes: what it runs in training (True) and in evaluation (False).
        missing: why there is no code for the mode that has none.
        device: where the model was when it was captured.
        constants: what the graphs bring along.
        inplace: whether it writes into what it receives.
    """

    # Later stages have keyword arguments from the one before: those passed to them are not read.
    kwargs_come_along = True

    def __init__(
        self,
        *,
        index: int,
        codes: Mapping[bool, StageCode],
        missing: str,
        device: torch.device,
        constants: Mapping[str, Any],
        inplace: bool,
    ) -> None:
        super().__init__()
        self.index = index
        # Read by stages, like that of a layer: what arrives is then given to it so that it may.
        self.inplace = inplace
        self._codes = dict(codes)
        self._missing = missing
        self._read: list[tuple[str, str, Any]] = []
        self._place = torch.empty(0, dtype=torch.uint8, device=device)
        setattr(self, CONSTANTS, SimpleNamespace(**constants))

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        """Run the stage.

        Args:
            values: on the first stage the model's inputs, else what the stage before returned.
            kwargs: on the first stage the model's inputs; ignored by the others, to which they
                come from stage to stage.

        Returns:
            What crosses to the next stage; on the last stage, what the model returns.
        """
        code = self._codes.get(self.training)
        if code is None:
            raise StageError(self._missing)
        if code.take is not None:
            values = tuple(code.take(values, kwargs))
        with leaving_all():
            results = code.run(self, *values)
        self._check_read()
        return results if code.give is None else code.give(results)

    def hold_to(self, read: Iterable[tuple[str, str, Any]]) -> None:
        """Hold modules to plain values that the graphs of all stages have built in.

        Args:
            read: module, attribute and value.
        """
        self._read += read

    def _check_read(self) -> None:
        for name, attribute, value in self._read:
            now = vars(self.get_submodule(name)).get(attribute, ABSENT)
            if type(now) is not type(value) or now != value:
                was = "missing" if value is ABSENT else repr(value)
                raise StageError(
                    f"stage {self.index}: code outside of {name} read its attribute {attribute} "
                    f"when the model was captured, where it was {was}; now it is {now!r}, which "
                    "the graph would not see; return it from the module, as a tensor"
                )

    def attach(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        """Take a parameter or buffer in, under its name in the model.

        Args:
            name: the name.
            tensor: the parameter or buffer itself.
            persistent: whether a buffer is part of state_dicts.
        """
        path, _, last = name.rpartition(".")
        owner = self._owner(path)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor, persistent=persistent)

    def attach_module(self, name: str, module: nn.Module) -> None:
        """Take a whole module in, under its name in the model."""
        path, _, last = name.rpartition(".")
        self._owner(path).add_module(last, module)

    def _owner(self, path: str) -> nn.Module:
        owner: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner

    def names_used(self) -> set[str]:
        """The names of the parameters, buffers and modules that its graphs use."""
        return {
            str(node.target)
            for code in self._codes.values()
            for node in code.graph.nodes
            if node.op in ("get_attr", "call_module")
        }

    @property
    def has_loss(self) -> bool:
        """Whether what it returns is the model's output, with a loss in it."""
        return any(code.has_loss for code in self._codes.values())

    @property
    def graph(self) -> fx.Graph:
        """The graph of the current mode."""
        return (self._codes.get(self.training) or next(iter(self._codes.values()))).graph

    @property
    def code(self) -> str:
        """The graph of the current mode as Python."""
        return self.graph.python_code("self").src

    def print_readable(self, print_output: bool = True) -> str:
        """The code of the current mode.

        Args:
            print_output: whether to print it too.

        Returns:
            The code.
        """
        code = self.code.replace("\n", "\n    ")
        text = f"class Stage{self.index}(torch.nn.Module):{code}"
        if print_output:
            print(text)  # noqa: T201
        return text

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StageModule:
        """Move along what is no state: constants, and devices that the graphs name."""
        dtype = self._dtype()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._remark_on_dtype(dtype, self._dtype())
        before, self._place = self._place.device, _moved_place(fn, self._place)
        now = self._place.device
        if now != before:
            constants = vars(getattr(self, CONSTANTS))
            for name, value in constants.items():
                if isinstance(value, Tensor):
                    constants[name] = _moved_constant(value, now)
            self._codes = {k: _moved(code, before, now) for k, code in self._codes.items()}
        return self

    def _dtype(self) -> torch.dtype | None:
        """That of its first floating point parameter."""
        dtypes = (param.dtype for param in self.parameters())
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)

    def _remark_on_dtype(self, before: torch.dtype | None, now: torch.dtype | None) -> None:
        codes = self._codes.values()
        if before is None or now == before or not any(c.names_dtype(before) for c in codes):
            return
        logger.warning(
            "stage %d: its parameters are %s now, but the graph has operations that were captured "
            "to compute in %s, and still do; convert the model before it is captured",
            self.index,
            now,
            before,
        )


def _moved_place(fn: Callable[[Tensor], Tensor], place: Tensor) -> Tensor:
    """An empty tensor, moved as the parameters are: from the meta device it has nothing to take."""
    if not place.is_meta:
        return fn(place)
    try:
        return fn(place)
    except NotImplementedError:
        return fn(torch.empty_like(place, device="cpu"))


def _moved_constant(value: Tensor, device: torch.device) -> Tensor:
    if value.is_meta and device.type != "meta":
        raise PartitionError(
            f"the forward makes a tensor of fixed values ({tuple(value.shape)}, {value.dtype}) on "
            "the meta device, where it has none: hold it in a buffer, which is initialized or "
            "loaded, or build the model on another device"
        )
    return value.to(device)


def _moved(code: StageCode, before: torch.device, now: torch.device) -> StageCode:
    """``code``, with what its graph makes on a device made on another one."""

    def elsewhere(value: Any) -> Any:
        is_device = isinstance(value, torch.device)
        # Shapes alone, made on the meta device by a model that is elsewhere, stay there.
        return now if is_device and (value.type != "meta" or before.type == "meta") else value

    graph = fx.Graph()
    graph.output(graph.graph_copy(code.graph, {}))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, elsewhere)
        node.kwargs = fx.node.map_aggregate(node.kwargs, elsewhere)
    return replace(code, graph=graph, run=compile_graph(graph))
