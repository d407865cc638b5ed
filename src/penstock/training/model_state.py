"""One process's part of the model's state, under the unsplit model's names.

    the plain model     embed.weight   blocks.0.weight   blocks.1.weight   head.weight
    rank 0, in DDP      └─ module.embed.weight, module.blocks.0.weight
    rank 1, compiled                   _orig_mod.blocks.1.weight, _orig_mod.head.weight ─┘

Stages may be wrapped at any time, also after the pipeline is made: names are read anew each time.
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

__all__ = ["ModelState", "names_in_common", "refuse_common"]


class ModelState:
    """The parameters and buffers of one process's stages.

    Args:
        stages: the stages.
        placement: the assignment of stages to ranks and to copies of the model.
        ties: the parameters that stages share (see ``penstock.partition.ties``).
        group: the ranks; None if all are in this process.
        names: the names in the whole model's state; None if unknown on this rank, so that any
            name may be another rank's.

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
        # Stages of a captured model may have copies of one tensor, under one name.
        self._tied_names = {n for tie in ties for n in tie.values() if len({*tie.values()}) == 1}

    def _distinct(self) -> dict[int, nn.Module]:
        """One module for each of the model's stages here, whose copies are equal."""
        modules: dict[int, nn.Module] = {}
        for stage in self._stages:
            modules.setdefault(self._model_stage(stage.stage_index), stage.submod)
        return modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, shared ones once, by the name that the first of their stages has."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for stage in self._stages:
            index = self._model_stage(stage.stage_index)
            for name, param in named_plainly(stage.submod, buffers=False):
                assert isinstance(param, nn.Parameter)
                found.setdefault(id(param), (first_name(self._ties, index, name), param))
        yield from found.values()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers."""
        found: dict[int, tuple[str, Tensor]] = {}
        for module in self._distinct().values():
            for name, buffer in named_plainly(module, buffers=True):
                found.setdefault(id(buffer), (name, buffer))
        yield from found.values()

    def parameter_stages(self) -> dict[str, int]:
        """By a parameter's name, the stage of the model that has it; without tied names."""
        return {
            name: stage
            for stage, module in self._distinct().items()
            for name, _ in named_plainly(module, buffers=False)
            if name not in self._tied_names
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
            refuse_common(self._common_names())
            return self._local_state(keep)
        control = control_group(self._group)
        with collective_call(control, "state_dict(full=True)", (PartitionError,)):
            mine = {str(self._group.rank()): (self.parameter_stages(), self._common_names())}
            stages, common = zip(*gather_state(self._group, mine).values(), strict=True)
            refuse_common(sorted({*names_in_common(stages), *chain.from_iterable(common)}))
            return gather_state(self._group, self._local_state(keep))

    def _local_state(self, keep: Callable[[str], bool]) -> dict[str, Any]:
        return {
            plain: value
            for module in self._distinct().values()
            for name, value in module.state_dict().items()
            if keep(plain := plain_name(module, name))
        }

    def _common_names(self) -> list[str]:
        """Names of different tensors in several stages of this process."""
        tensors: dict[str, set[int]] = {}
        for module in self._distinct().values():
            for _, plain, value in _named_values(module):
                tensors.setdefault(plain, set()).add(id(value))
        return sorted(n for n, ids in tensors.items() if len(ids) > 1 and n not in self._tied_names)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load these stages' part of a plain model's state.

        Raises:
            PartitionError: names are missing, or none of the model's, or of another shape, and
                nothing was loaded; or stages have a name in common.
        """
        refuse_common(self._common_names())
        current = [_named_values(stage.submod) for stage in self._stages]
        stages = zip(self._stages, current, strict=True)
        sources = [self._sources(state_dict, stage, named) for stage, named in stages]
        used = {source for names in sources for source in names.values()}
        known = used.union(*((name, plain) for named in current for name, plain, _ in named))
        missing = sorted(used - set(state_dict))
        unknown = [] if self._names is None else sorted(set(state_dict) - known - self._names)
        faults = [f"it lacks {abbreviate(missing)}"] if missing else []
        faults += [f"it has {abbreviate(unknown)}, unknown here"] if unknown else []
        for names, named in zip(sources, current, strict=True) if not faults else ():
            for name, _, own in named:
                value = state_dict[names[name]]
                if _has_shape(own) and _has_shape(value) and own.shape != value.shape:
                    was, expected = tuple(value.shape), tuple(own.shape)
                    faults.append(f"{names[name]} has shape {was}, expected {expected}")
        if faults:
            raise PartitionError(
                f"the state does not fit the model: {'; '.join(faults[:4])}"
                f"{'; …' if faults[4:] else ''}; nothing was loaded: load the state of a model "
                "like this one, or add and leave out what differs"
            )
        for stage, names, named in zip(self._stages, sources, current, strict=True):
            stage.submod.load_state_dict(
                {name: _sharded_like(own, state_dict[names[name]]) for name, _, own in named}
            )

    def _sources(
        self, state_dict: Mapping[str, Any], stage: Stage, named: Sequence[tuple[str, str, Any]]
    ) -> dict[str, str]:
        """For each name of a stage, the name of its value in a state: its own, the plain one, or
        that of a shared tensor's other places; the plain one if there is none."""
        aliases: dict[int, list[str]] = {}
        for _, plain, value in named:
            aliases.setdefault(id(value), []).append(plain)
        index = self._model_stage(stage.stage_index)
        sources = {}
        for name, plain, value in named:
            same = aliases[id(value)] if isinstance(value, Tensor) else []
            tied = [other for alias in same for other in all_names(self._ties, index, alias)]
            candidates = (each for each in (name, plain, *same, *tied) if each in state_dict)
            sources[name] = next(candidates, plain)
        return sources


def _named_values(module: nn.Module) -> list[tuple[str, str, Any]]:
    """A module's state: names in the module, names without wrappers, and values."""
    state = module.state_dict(keep_vars=True)
    return [(name, plain_name(module, name), value) for name, value in state.items()]


def names_in_common(parameter_stages: Iterable[Mapping[str, int]]) -> list[str]:
    """The names of parameters of several stages, of all ranks' ``parameter_stages``.

    Example:
        >>> names_in_common([{"a": 0, "b": 0}, {"a": 1}, {"b": 0}])
        ['a']
    """
    stages: dict[str, set[int]] = {}
    for name, stage in chain.from_iterable(each.items() for each in parameter_stages):
        stages.setdefault(name, set()).add(stage)
    return sorted(name for name, found in stages.items() if len(found) > 1)


def refuse_common(names: Sequence[str]) -> None:
    """Refuse names of several stages.

    Raises:
        PartitionError: there are such names.
    """
    if names:
        raise PartitionError(
            f"several stages have the names {[*names[:4]]}{', …' if names[4:] else ''}, so one "
            "state can't hold them all; save and load stage.submod of each stage, or name "
            "their layers apart"
        )


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


def _sharded_like(own: Any, value: Any) -> Any:
    """A full tensor, sharded as the tensor in whose place it is loaded."""
    if not hasattr(own, "placements") or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor  # the import takes a second

    # Every process has the full tensor, and takes its own shard.
    return distribute_tensor(
        value.to(own.device), own.device_mesh, own.placements, src_data_rank=None
    )
