"""ModuleStage: one stage of a model that was cut by module, as a module.

    stage 0   forward(ids, labels)        the model's arguments
              ──► plan, values            what crosses; the plan says which value is which
    stage 1   forward(plan, values)       the model's own forward, with its own parts
              ──► the model's output

A stage runs the model's forward up to its own last part. It knows neither schedules nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock._torch_compat import autocast_state, watched_hooks
from penstock.errors import PartitionError
from penstock.partition.forward.absent import Absent, Source, SourceKind, named, sources_of
from penstock.partition.forward.crossings import Crossings
from penstock.partition.forward.dry_run import input_names
from penstock.partition.forward.host_draws import draw_seeds
from penstock.partition.forward.own_units import OwnUnits, registry_of
from penstock.partition.forward.route import absent
from penstock.partition.forward.shell import build_shell, own_tree, swap_kept
from penstock.partition.forward.stage_player import Left, StagePlayer
from penstock.partition.forward.units import Units
from penstock.partition.ties import names_by_tensor
from penstock.stage.pytree import flatten, unflatten
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["ModuleStage", "FindCrossings"]

FindCrossings = Callable[[tuple[Any, ...], Mapping[str, Any], bool], Crossings]


class ModuleStage(nn.Module):
    """One stage of a model, under the plain model's names.

    Args:
        parts: the units of the plain model, whose modules and parameters become the stage's.
        own: the names of the units, and of parameters by themselves, that this stage holds.
        index: which stage it is.
        num_stages: of how many.
        find: finds out what crosses, for inputs of a new shape; needed on the first stage alone.
        device: where it will live.
    """

    # Later stages have keyword arguments from the one before: those passed to them are not read.
    kwargs_come_along = True
    _player: StagePlayer
    _shell: nn.Module

    def __init__(
        self,
        parts: Units,
        own: frozenset[str],
        index: int,
        num_stages: int,
        find: FindCrossings | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        tree = own_tree(parts, own)
        for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, registry, vars(tree)[registry])
        self.training = parts.model.training
        # Not registered: the shell has modules that this stage does not hold.
        player = StagePlayer(index, device)
        shell = build_shell(parts, own, player, device)
        object.__setattr__(self, "_player", player)
        object.__setattr__(self, "_shell", shell)
        self._own_units = OwnUnits(self, shell, parts, own, player)
        self._own_state = own_places(parts, own)
        self._ties = {names[0]: names for names in names_by_tensor(parts.model).values()}
        self._index = index
        self._is_last = index == num_stages - 1
        self._find = find
        # What is known of inputs met so far: on the first stage by shape, elsewhere as it arrives.
        self._entries: dict[Any, tuple[bytes, Crossings, list[tuple[Source, int]]]] = {}
        self._plans: dict[bytes, Crossings] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage.

        Args:
            args: the model's arguments on the first stage, else what the stage before returned.
            kwargs: the model's keyword arguments; later stages have them from the one before.

        Returns:
            On the last stage what the model returns, else what the next stage takes.

        Raises:
            PartitionError: the model does something else than in its dry run.
        """
        if self._index == 0:
            data, plan, values = self._enter(args, kwargs)
            seeds = [torch.tensor(seed) for seed in draw_seeds(plan.host_draws)]
        else:
            data, tensors = args
            plan = self._decoded(data)
            num_values = len(plan.carried[self._index - 1])
            seeds = tensors[num_values:]
            values = dict(zip(plan.carried[self._index - 1], tensors[:num_values], strict=True))
        args, kwargs = self._inputs(plan, values)
        output = self._play(plan, values, args, kwargs, [int(seed) for seed in seeds])
        if self._is_last:
            missing = sources_of(flatten(output)[0])
            if missing:
                raise PartitionError(
                    f"the model's output needs {named(missing)}, which its dry run did not show "
                    "and which is not here; does what it computes depend on values?"
                )
            return output
        carried = (self._carry(source, values) for source in plan.carried[self._index])
        return data, (*carried, *(seed.to(self._player.device) for seed in seeds))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: what runs is a tree that reports to this stage alone."""
        raise TypeError(
            "a stage cut by module can't be copied or pickled; save its state_dict(), and for "
            "averages of weights copy its parameters()"
        )

    # --- what is known of the inputs ---------------------------------------------------------

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Crossings) -> None:
        """Note what crosses for inputs of these shapes.

        Args:
            args: the model's positional arguments.
            kwargs: its keyword arguments.
            plan: what a dry run has shown.
        """
        names = input_names(args, kwargs)
        leaves, _ = flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        sources = [(Source(SourceKind.INPUT, 0, i, names[i]), i) for i in tensors]
        self._entries[self._key(args, kwargs)] = (plan.encode(), plan, sources)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        leaves, tree = flatten((args, kwargs))
        marks = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in leaves
        ]
        return (tree, self.training, autocast_state(self._player.device), *marks)

    def _enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, Crossings, dict[Source, Tensor]]:
        """What is known of inputs like these, and their tensors by name."""
        key = self._key(args, kwargs)
        if key not in self._entries:
            assert self._find is not None
            self.prepare(args, kwargs, self._find(args, kwargs, self.training))
        data, plan, sources = self._entries[key]
        leaves, _ = flatten((args, kwargs))
        return data, plan, {source: leaves[i] for source, i in sources}

    def _decoded(self, data: bytes) -> Crossings:
        found = self._plans.get(data)
        if found is None:
            found = self._plans[data] = Crossings.decode(data)
        return found

    def _inputs(self, plan: Crossings, values: dict[Source, Tensor]) -> Any:
        here = {s.leaf: value for s, value in values.items() if s.kind is SourceKind.INPUT}
        leaves: list[Any] = list(plan.inputs.leaves)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, TensorMeta):
                continue
            if i in here:
                leaves[i] = here[i].clone() if i in plan.written else here[i]
            else:
                source = Source(SourceKind.INPUT, 0, i, f"number {i}")
                leaves[i] = absent(leaf, self._player.device, source)
        ((args, kwargs),) = unflatten(plan.inputs.tree, leaves)
        return args, kwargs

    # --- running -----------------------------------------------------------------------------

    def _play(
        self,
        plan: Crossings,
        values: dict[Source, Tensor],
        args: Any,
        kwargs: Any,
        seeds: Sequence[int],
    ) -> Any:
        self._own_units.take_in()
        for place, name in self._own_state:
            registry, last = registry_of(self._shell, place)
            held, own = registry_of(self, name)
            registry[last] = held[own]
        player = self._player
        lent = self._lend(values)
        player.begin(plan, values, seeds)
        try:
            try:
                with watched_hooks(player.refuse_hook):
                    output = self._shell(*args, **kwargs)
            except Left:
                output = None
            player.check_done()
        finally:
            player.end()
            for registry, name, hollow in lent:
                registry[name] = hollow
        return output

    def _lend(self, values: dict[Source, Tensor]) -> list[tuple[Any, str, Any]]:
        """Put parameters that come from other stages in all their places, for one microbatch."""
        lent = []
        instead: dict[int, Tensor] = {}
        for source, value in values.items():
            if source.kind is SourceKind.PARAMETER:
                for place in self._ties[source.name]:
                    registry, name = registry_of(self._shell, place)
                    if type(registry[name]) is Absent:  # else it is here, under another name
                        lent.append((registry, name, registry[name]))
                        instead[id(registry[name])] = value
                        registry[name] = value
        if instead:
            for module in self._shell.modules():
                lent += swap_kept(module, lambda tensor: instead.get(id(tensor), tensor))
        return lent

    def _carry(self, source: Source, values: dict[Source, Tensor]) -> Tensor:
        if source.kind is SourceKind.PARAMETER and source not in values:
            registry, name = registry_of(self._shell, source.name)
            own: Tensor = registry[name]
            return own.view_as(own) if torch.is_grad_enabled() else own.detach()
        return values[source]


def own_places(parts: Units, own: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """What a stage puts into its shell itself: (the place, the name under which it holds it).

    Parameters and buffers of opened modules; and those of its own units in the places that they
    have in units of other stages too, so that code between the units meets them once.
    """
    direct = tuple((name, name) for name in parts.direct if name in own)

    def held(name: str) -> bool:
        return any(name.startswith(f"{unit}.") for unit in own)

    return direct + tuple(
        (name, mine[0])
        for names in names_by_tensor(parts.model).values()
        if (mine := [name for name in names if held(name)])
        for name in names
        if not held(name) and name not in parts.direct
    )
