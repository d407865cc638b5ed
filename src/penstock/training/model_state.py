"""The model's state as a process of a pipeline holds it, under the plain model's names.

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

__all__ = ["ModelState", "names_in_common", "told_of_common"]


class ModelState:
    """The parameters and buffers of one process's stages.

    Args:
        stages: the stages.
        placement: which stages are copies of each other.
        ties: the parameters that stages have in common (see ``penstock.partition.ties``).
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

    def state_dict(
        self, *, full: bool = False, keep: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Parameters and buffers that ``keep`` says yes to; with ``full``, those of all ranks,
        whole, on the CPU.

        Raises:
            PartitionError: stages have a name in common; with ``full``, also on several ranks.
        """
        if not full or self._group is None:
            self._refuse_common_names()
            return self._here(keep)
        by = control_group(self._group)
        with collective_call(by, "state_dict(full=True)", (PartitionError,)):
            mine = {str(self._group.rank()): (self.parameter_stages(), self._common_names())}
            stages, here = zip(*gather_state(self._group, mine).values(), strict=True)
            _refuse(sorted({*names_in_common(stages), *chain.from_iterable(here)}))
            return gather_state(self._group, self._here(keep))

    def _here(self, keep: Callable[[str], bool]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for stage in self._distinct_stages():
            submod = stage.submod
            state.update((plain_name(submod, n), v) for n, v in submod.state_dict().items())
        return {name: value for name, value in state.items() if keep(name)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load these stages' part of a plain model's state.

        Raises:
            PartitionError: names are missing, or none of the model's, or of another shape, and
                nothing was loaded; or stages have a name in common.
        """
        self._refuse_common_names()
        found = [self._names_in(state_dict, stage) for stage in self._stages]
        self._refuse_other_names(state_dict, found)
        held = [stage.submod.state_dict() for stage in self._stages]
        _refuse_other_shapes(state_dict, found, held)
        for stage, names, own in zip(self._stages, found, held, strict=True):
            stage.submod.load_state_dict(
                {name: _spread_as(own[name], state_dict[at]) for name, at in names.items()}
            )

    def _names_in(self, state_dict: Mapping[str, Any], stage: Stage) -> dict[str, str]:
        """Under which name a state has each of a stage's; the plain model's where it has none."""
        own = stage.submod.state_dict(keep_vars=True)
        twins: dict[int, list[str]] = {}
        for name, value in own.items():
            twins.setdefault(id(value), []).append(plain_name(stage.submod, name))
        found = {}
        for name, value in own.items():
            plain = plain_name(stage.submod, name)
            at = self._model_stage(stage.stage_index)
            same = twins[id(value)] if isinstance(value, Tensor) else []
            others = [*same, *(each for twin in same for each in all_names(self._ties, at, twin))]
            # A plain model may hold compiled parts itself: then its names are those with wrappers.
            known = (each for each in (name, plain, *others) if each in state_dict)
            found[name] = next(known, plain)
        return found

    def _refuse_other_names(
        self, state_dict: Mapping[str, Any], found: Sequence[Mapping[str, str]]
    ) -> None:
        taken = {name for names in found for name in names.values()}
        missing = sorted(taken - set(state_dict))
        known = taken | {name for names in found for name in names}
        for stage in self._stages:
            known |= {plain_name(stage.submod, name) for name in stage.submod.state_dict()}
        unknown = [] if self._names is None else set(state_dict) - known - self._names
        told = [f"it lacks {abbreviate(missing)}"] if missing else []
        told += [f"it has {abbreviate(sorted(unknown))}, unknown here"] if unknown else []
        if told:
            raise PartitionError(
                f"the state does not fit the model: {'; '.join(told)}; nothing was loaded: load "
                "the state of a model like this one, or add and leave out what differs"
            )

    def _distinct_stages(self) -> list[Stage]:
        """One stage for each of the model's: copies of a stage are equal."""
        distinct: dict[int, Stage] = {}
        for stage in self._stages:
            distinct.setdefault(self._model_stage(stage.stage_index), stage)
        return list(distinct.values())

    def parameter_stages(self) -> dict[str, int]:
        """By a parameter's name, which of the model's stages holds it.

        What several stages hold together, under one name, is left out.
        """
        one = self._names_of_one
        return {
            name: self._model_stage(stage.stage_index)
            for stage in self._distinct_stages()
            for name, _ in named_plainly(stage.submod, buffers=False)
            if name not in one
        }

    @property
    def _names_of_one(self) -> set[str]:
        """Stages of a captured model may each hold what all of them use."""
        return {name for tie in self._ties for name in tie.values() if len({*tie.values()}) == 1}

    def _refuse_common_names(self) -> None:
        _refuse(self._common_names())

    def _common_names(self) -> list[str]:
        """The names that several stages of this process have for different things."""
        held: dict[str, set[int]] = {}
        for stage in self._distinct_stages():
            for name, value in stage.submod.state_dict(keep_vars=True).items():
                held.setdefault(plain_name(stage.submod, name), set()).add(id(value))
        one = self._names_of_one
        return sorted(name for name, each in held.items() if len(each) > 1 and name not in one)


def names_in_common(everyones: Iterable[Mapping[str, int]]) -> list[str]:
    """The names that parameters of several stages have, of all ranks' ``parameter_stages``.

    Example:
        >>> names_in_common([{"a": 0, "b": 0}, {"a": 1}, {"b": 0}])
        ['a']
    """
    stages: dict[str, set[int]] = {}
    for mine in everyones:
        for name, stage in mine.items():
            stages.setdefault(name, set()).add(stage)
    return sorted(name for name, each in stages.items() if len(each) > 1)


def told_of_common(common: Sequence[str]) -> str:
    """What is said of names in common."""
    return (
        f"several stages have the names {[*common[:4]]}{', …' if common[4:] else ''}, so one "
        "state can't hold them all; save and load stage.submod of each stage, or name "
        "their layers apart"
    )


def _refuse(common: Sequence[str]) -> None:
    if common:
        raise PartitionError(told_of_common(common))


def _refuse_other_shapes(
    state_dict: Mapping[str, Any],
    found: Sequence[Mapping[str, str]],
    held: Sequence[Mapping[str, Any]],
) -> None:
    told = [
        f"{at} has shape {tuple(state_dict[at].shape)}, expected {tuple(own[name].shape)}"
        for names, own in zip(found, held, strict=True)
        for name, at in names.items()
        if _has_shape(own[name]) and _has_shape(state_dict[at])
        if state_dict[at].shape != own[name].shape
    ]
    if told:
        raise PartitionError(
            f"the state does not fit the model: {'; '.join(told[:4])}{'; …' if told[4:] else ''}; "
            "nothing was loaded"
        )


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


def _spread_as(mine: Any, value: Any) -> Any:
    """A whole tensor as the one whose place it takes: sharded likewise, where that one is."""
    if not hasattr(mine, "placements") or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor  # whose import takes a second

    # Every process has the whole, and takes its part of that.
    where = mine.device_mesh, mine.placements
    return distribute_tensor(value.to(mine.device), *where, src_data_rank=None)
