"""One process's part of the model's state, under the unsplit model's names.

    the plain model     embed.weight   blocks.0.weight   blocks.1.weight   head.weight
    rank 0, in DDP      └─ module.embed.weight, module.blocks.0.weight
    rank 1, compiled                   _orig_mod.blocks.1.weight, _orig_mod.head.weight ─┘

Stages may be wrapped at any time, also after the pipeline is made: names are read anew each time.
This module knows no program, and writes no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PartitionError
from penstock.partition.plan import abbreviate
from penstock.partition.ties import Tie, all_names, first_name
from penstock.runtime.comm.process_group import collective_call, control_group, gather_state
from penstock.schedule.placement import Placement
from penstock.stage.stage import Stage
from penstock.stage.wrappers import named_plainly, plain_name

__all__ = ["ModelState", "common_names_message", "names_in_common"]


class ModelState:
    """The parameters and buffers of one process's stages.

    Args:
        stages: the stages.
        placement: which stages are copies of each other.
        ties: the parameters that stages share (see ``penstock.partition.ties``).
        group: the ranks; None where all of them are in this process.
        names: the names in the whole model's state, as far as other ranks' are known; None where
            they are not, and any name may be one of theirs.

    Example:
        >>> from penstock import PipelineStage
        >>> from penstock.schedule.placement import linear
        >>> stage = PipelineStage(nn.Linear(1, 1), 0, 1, "cpu")
        >>> list(ModelState([stage], linear(1)).state_dict())
        ['weight', 'bias']
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
        # Stages of a captured model may each hold what all of them use, under one name.
        self._names_of_one = {
            name for tie in ties for name in tie.values() if len({*tie.values()}) == 1
        }

    def _distinct_stages(self) -> list[Stage]:
        """One stage for each of the model's: its copies are equal."""
        distinct: dict[int, Stage] = {}
        for stage in self._stages:
            distinct.setdefault(self._model_stage(stage.stage_index), stage)
        return list(distinct.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, shared ones once, by the name that the first of their stages has."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, param in named_plainly(stage.submod, buffers=False):
                if id(param) not in seen:
                    seen.add(id(param))
                    assert isinstance(param, nn.Parameter)
                    yield first_name(self._ties, self._model_stage(stage.stage_index), name), param

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers."""
        seen: set[int] = set()
        for stage in self._distinct_stages():
            for name, buffer in named_plainly(stage.submod, buffers=True):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield name, buffer

    def parameter_stages(self) -> dict[str, int]:
        """By a parameter's name, the model's stage that holds it; without shared names."""
        return {
            name: self._model_stage(stage.stage_index)
            for stage in self._distinct_stages()
            for name, _ in named_plainly(stage.submod, buffers=False)
            if name not in self._names_of_one
        }

    def state_dict(
        self, *, full: bool = False, keep: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Parameters and buffers whose names ``keep`` accepts; with ``full``, those of all ranks,
        unsharded, on the CPU.

        Raises:
            PartitionError: stages have a name in common; with ``full``, also on several ranks.
        """
        if not full or self._group is None:
            _refuse_common(self._common_names())
            return self._local_state(keep)
        by = control_group(self._group)
        with collective_call(by, "state_dict(full=True)", (PartitionError,)):
            mine = {str(self._group.rank()): (self.parameter_stages(), self._common_names())}
            stages, here = zip(*gather_state(self._group, mine).values(), strict=True)
            _refuse_common(sorted({*names_in_common(stages), *chain.from_iterable(here)}))
            return gather_state(self._group, self._local_state(keep))

    def _local_state(self, keep: Callable[[str], bool]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for stage in self._distinct_stages():
            submod = stage.submod
            state.update((plain_name(submod, n), v) for n, v in submod.state_dict().items())
        return {name: value for name, value in state.items() if keep(name)}

    def _common_names(self) -> list[str]:
        """Names of different tensors in several stages of this process."""
        held: dict[str, set[int]] = {}
        for stage in self._distinct_stages():
            for name, value in stage.submod.state_dict(keep_vars=True).items():
                held.setdefault(plain_name(stage.submod, name), set()).add(id(value))
        return sorted(n for n, ids in held.items() if len(ids) > 1 and n not in self._names_of_one)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load these stages' part of a plain model's state.

        Raises:
            PartitionError: names are missing, or none of the model's, or of another shape, and
                nothing was loaded; or stages have a name in common.
        """
        _refuse_common(self._common_names())
        found = [self._names_in(state_dict, stage) for stage in self._stages]
        held = [stage.submod.state_dict() for stage in self._stages]
        faults = self._unfit_names(state_dict, found) or _unfit_shapes(state_dict, found, held)
        if faults:
            raise PartitionError(
                f"the state does not fit the model: {'; '.join(faults[:4])}"
                f"{'; …' if faults[4:] else ''}; nothing was loaded: load the state of a model "
                "like this one, or add and leave out what differs"
            )
        for stage, names, own in zip(self._stages, found, held, strict=True):
            stage.submod.load_state_dict(
                {name: _sharded_like(own[name], state_dict[at]) for name, at in names.items()}
            )

    def _names_in(self, state_dict: Mapping[str, Any], stage: Stage) -> dict[str, str]:
        """For each name of a stage, the name of its value in a state: its own, the plain one, or
        that of a shared tensor's other places; the plain one if there is none."""
        own = stage.submod.state_dict(keep_vars=True)
        aliases: dict[int, list[str]] = {}
        for name, value in own.items():
            aliases.setdefault(id(value), []).append(plain_name(stage.submod, name))
        at = self._model_stage(stage.stage_index)
        found = {}
        for name, value in own.items():
            plain = plain_name(stage.submod, name)
            same = aliases[id(value)] if isinstance(value, Tensor) else []
            tied = [other for alias in same for other in all_names(self._ties, at, alias)]
            known = (each for each in (name, plain, *same, *tied) if each in state_dict)
            found[name] = next(known, plain)
        return found

    def _unfit_names(
        self, state_dict: Mapping[str, Any], found: Sequence[Mapping[str, str]]
    ) -> list[str]:
        taken = {name for names in found for name in names.values()}
        known = taken | {name for names in found for name in names}
        for stage in self._stages:
            known |= {plain_name(stage.submod, name) for name in stage.submod.state_dict()}
        missing = sorted(taken - set(state_dict))
        unknown = [] if self._names is None else sorted(set(state_dict) - known - self._names)
        faults = [f"it lacks {abbreviate(missing)}"] if missing else []
        return faults + ([f"it has {abbreviate(unknown)}, unknown here"] if unknown else [])


def names_in_common(everyones: Iterable[Mapping[str, int]]) -> list[str]:
    """The names of parameters of several stages, of all ranks' ``parameter_stages``.

    Example:
        >>> names_in_common([{"a": 0, "b": 0}, {"a": 1}, {"b": 0}])
        ['a']
    """
    stages: dict[str, set[int]] = {}
    for mine in everyones:
        for name, stage in mine.items():
            stages.setdefault(name, set()).add(stage)
    return sorted(name for name, each in stages.items() if len(each) > 1)


def common_names_message(common: Sequence[str]) -> str:
    """The message for names of several stages."""
    return (
        f"several stages have the names {[*common[:4]]}{', …' if common[4:] else ''}, so one "
        "state can't hold them all; save and load stage.submod of each stage, or name "
        "their layers apart"
    )


def _refuse_common(common: Sequence[str]) -> None:
    if common:
        raise PartitionError(common_names_message(common))


def _unfit_shapes(
    state_dict: Mapping[str, Any],
    found: Sequence[Mapping[str, str]],
    held: Sequence[Mapping[str, Any]],
) -> list[str]:
    return [
        f"{at} has shape {tuple(state_dict[at].shape)}, expected {tuple(own[name].shape)}"
        for names, own in zip(found, held, strict=True)
        for name, at in names.items()
        if _has_shape(own[name]) and _has_shape(state_dict[at])
        if state_dict[at].shape != own[name].shape
    ]


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


def _sharded_like(mine: Any, value: Any) -> Any:
    """A full tensor, sharded as the tensor in whose place it is loaded."""
    if not hasattr(mine, "placements") or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor  # the import takes a second

    # Every process has the full tensor, and takes its own shard.
    where = mine.device_mesh, mine.placements
    return distribute_tensor(value.to(mine.device), *where, src_data_rank=None)
