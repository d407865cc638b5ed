"""One process's part of the model's state, under the unsplit model's names.

    the plain model     embed.weight   blocks.0.weight   blocks.1.weight   head.weight
    rank 0, in DDP      └─ module.embed.weight, module.blocks.0.weight
    rank 1, compiled                   _orig_mod.blocks.1.weight, _orig_mod.head.weight ─┘

Stages may be wrapped at any time, also after the pipeline is made: names are read anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PartitionError
from penstock.partition.plan import abbreviate
from penstock.partition.ties import Tie, all_names, first_name
from penstock.runtime.comm.c10d import control_group
from penstock.runtime.comm.process_group import collective_call, gather_objects
from penstock.schedule.placement import Placement
from penstock.stage.dtensor import full_tensor, sharded_like
from penstock.stage.stage import Stage
from penstock.stage.wrappers import named_plainly, plain_name

__all__ = ["ModelState", "refuse_common"]


class ModelState:
    """The parameters and buffers of one process's stages.

    Args:
        stages: the stages.
        placement: the assignment of stages to ranks and to copies of the model.
        ties: the parameters that stages share (see ``penstock.partition.ties``).
        group: the ranks; None if all are in this process.
        names: the names in the whole model's state; None if unknown on this rank, so that any
            name may be another rank's.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        placement: Placement,
        ties: Sequence[Tie] = (),
        group: dist.ProcessGroup | None = None,
        names: frozenset[str] | None = frozenset(),
    ) -> None:
        self._stages = stages
        self._model_stage = placement.model_stage
        self._ties = ties
        self._group = group
        self._names = names
        # Stages of a captured model may have copies of one tensor, under one name.
        self._tied_names = {n for tie in ties for n in tie.values() if len({*tie.values()}) == 1}

    def _distinct(self) -> dict[int, nn.Module]:
        """One module for each of the model's stages here, whose copies are equal."""
        modules: dict[int, nn.Module] = {}
        for stage in self._stages:
            modules.setdefault(self._model_stage(stage.stage_index), stage.submod)
        return modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the unsplit model's names; shared ones once.

        A tied parameter has its name in the earliest stage, even if that is on another rank.
        """
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for stage in self._stages:
            index = self._model_stage(stage.stage_index)
            for name, param in named_plainly(stage.submod, buffers=False):
                assert isinstance(param, nn.Parameter)
                found.setdefault(id(param), (first_name(self._ties, index, name), param))
        yield from found.values()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers under the unsplit model's names."""
        found: dict[int, tuple[str, Tensor]] = {}
        for module in self._distinct().values():
            for name, buffer in named_plainly(module, buffers=True):
                found.setdefault(id(buffer), (name, buffer))
        yield from found.values()

    def parameter_stages(self) -> dict[str, int]:
        """The model's stage of each of this process's parameters, by name; without tied names."""
        return {
            name: stage
            for stage, module in self._distinct().items()
            for name, _ in named_plainly(module, buffers=False)
            if name not in self._tied_names
        }

    def state_dict(
        self, *, full: bool = False, keep: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Any]:
        """This process's parameters and buffers under the unsplit model's names.

        Args:
            full: gather the state of all ranks, unsharded, on the CPU, in a collective call.
            keep: a predicate that selects names, such as those of adapters.

        Raises:
            PartitionError: manually split stages have a name in common.
        """
        if not full or self._group is None:
            refuse_common(self._value_stages())
            return self._local_state(keep, full=full)
        control = control_group(self._group)
        with collective_call(control, "state_dict(full=True)", (PartitionError,)):
            # Collective over all replicas with shards of the same tensors, too.
            local = self._local_state(keep, full=True)
            mine = ([*self.parameter_stages().items()], self._value_stages(), local)
            params, values, parts = zip(*gather_objects(control, mine), strict=True)
            for named in (chain.from_iterable(params), *values):
                refuse_common(named)
        return {name: value for part in parts for name, value in part.items()}

    def sync_into(self, model: nn.Module, *, skip: Collection[str] = ()) -> None:
        """Bring the plain model up to date on every rank, tensor by tensor; a collective call.

        Args:
            model: the plain model, whose parameters this process's stages may share.
            skip: names, the same on every rank, that are up to date.
        """
        group = None if self._group is None else control_group(self._group)
        if group is None:
            return
        local = self.state_dict()
        with collective_call(group, "sync_into()"), torch.no_grad():
            by_rank = gather_objects(group, list(local))
            owners = {name: i for i in reversed(range(group.size())) for name in by_rank[i]}
            for name, value in model.state_dict(keep_vars=True).items():
                if name in skip or name not in owners:
                    continue
                is_own = owners[name] == group.rank()
                sent = local[name].cpu() if is_own else torch.empty_like(value, device="cpu")
                dist.broadcast(sent.detach(), group=group, group_src=owners[name])
                if not is_own:
                    value.copy_(sent)

    def _local_state(self, keep: Callable[[str], bool], *, full: bool) -> dict[str, Any]:
        """This process's state; if ``full``, copies of whole tensors on the CPU."""

        def copied(value: Any) -> Any:
            is_copied = full and isinstance(value, Tensor)
            return full_tensor(value).detach().to("cpu", copy=True) if is_copied else value

        return {
            plain: copied(value)
            for module in self._distinct().values()
            for name, value in module.state_dict().items()
            if keep(plain := plain_name(module, name))
        }

    def _value_stages(self) -> list[tuple[str, int]]:
        """By name, the stages of the model here that have different values; without tied names."""
        owners: dict[int, int] = {}
        return [
            (plain, owners.setdefault(id(value), stage))
            for stage, module in self._distinct().items()
            for name, value in module.state_dict(keep_vars=True).items()
            if (plain := plain_name(module, name)) not in self._tied_names
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this process's part of an unsplit model's state dict.

        Any name of a tied parameter is accepted. A sharded parameter may be a full tensor in the
        state dict, as ``state_dict(full=True)`` returns it.

        Raises:
            PartitionError: names are missing, unknown or of another shape, tied ones have different
                values, or manually split stages have a name in common. Nothing is loaded.
        """
        refuse_common(self._value_stages())
        loads: list[tuple[nn.Module, dict[str, Any]]] = []
        known: set[str] = set()
        missing, misfits = [], []
        for stage in self._stages:
            loaded = {}
            for name, own, sources in self._values(stage):
                known.update(sources)
                source = next((each for each in sources if each in state_dict), None)
                if source is None:
                    missing.append(sources[1])
                    continue
                value = state_dict[source]
                if others := {each for each in sources if _differ(value, state_dict.get(each))}:
                    tied = " and ".join(sorted({source, *others}))
                    misfits.append(f"{tied} are tied here, and have different values")
                if _has_shape(own) and _has_shape(value) and own.shape != value.shape:
                    was, expected = tuple(value.shape), tuple(own.shape)
                    misfits.append(f"{source} has shape {was}, expected {expected}")
                else:
                    loaded[name] = sharded_like(own, value)
            loads.append((stage.submod, loaded))
        unknown = [] if self._names is None else sorted(set(state_dict) - known - self._names)
        faults = [f"it lacks {abbreviate(sorted({*missing}))}"] if missing else []
        faults += [f"it has {abbreviate(unknown)}, unknown here"] if unknown else []
        if faults := faults or [*dict.fromkeys(misfits)]:
            raise PartitionError(
                f"the state does not fit the model: {'; '.join(faults[:4])}"
                f"{'; …' if faults[4:] else ''}; nothing was loaded: load the state of a model "
                "like this one, or add and leave out what differs"
            )
        for module, loaded in loads:
            module.load_state_dict(loaded)

    def _values(self, stage: Stage) -> Iterator[tuple[str, Any, list[str]]]:
        """A stage's values: the name in the module, the value, and the names that it may have in a
        state, the preferred first: its own, the plain one, and those of its other places."""
        index = self._model_stage(stage.stage_index)
        values = stage.submod.state_dict(keep_vars=True)
        plain = {name: plain_name(stage.submod, name) for name in values}
        for name, value in values.items():
            is_tensor = isinstance(value, Tensor)
            same = [plain[n] for n, other in values.items() if is_tensor and other is value]
            tied = [other for alias in same for other in all_names(self._ties, index, alias)]
            yield name, value, [name, plain[name], *same, *tied]


def refuse_common(named: Iterable[tuple[str, int]]) -> None:
    """Raise a PartitionError for names that several stages have, given with their stages."""
    stages: dict[str, set[int]] = {}
    for name, stage in named:
        stages.setdefault(name, set()).add(stage)
    if names := sorted(name for name, found in stages.items() if len(found) > 1):
        raise PartitionError(
            f"several stages have the names {names[:4]}{', …' if names[4:] else ''}, so one "
            "state can't hold them all; save and load each stage's module by itself, in a folder "
            "of its own, or name their layers apart"
        )


def _differ(value: Any, other: Any) -> bool:
    """True for two plain tensors of one kind whose elements differ, to the last bit."""
    if value is other or type(value) is not Tensor or type(other) is not Tensor or value.is_meta:
        return False
    kinds = [(each.layout, each.dtype, each.shape, each.device) for each in (value, other)]
    if kinds[0] != kinds[1] or value.layout is not torch.strided or value.is_quantized:
        return False
    one, two = (each.detach().flatten().contiguous().view(torch.uint8) for each in (value, other))
    return not torch.equal(one, two)


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)
