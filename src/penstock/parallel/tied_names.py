"""What ties and copies come to, in stages and names; ``sharing.py`` says what is done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.ties import Tie
from penstock.schedule.placement import Placement
from penstock.stage.wrappers import named_plainly, plain_name, unwrapped

__all__ = ["Groups", "groups_of", "named_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The places that share something: for each group, by stage, the name there.

    Args:
        every: the groups, those of ties first, then those of copies.
        num_ties: how many of them are ties.
    """

    every: tuple[dict[int, str], ...]
    num_ties: int

    @property
    def ties(self) -> tuple[dict[int, str], ...]:
        """The groups of ties."""
        return self.every[: self.num_ties]

    @property
    def copies(self) -> range:
        """The numbers of the groups of copies."""
        return range(self.num_ties, len(self.every))

    def ranks(self, number: int, placement: Placement) -> tuple[int, ...]:
        """The ranks that hold a place of this group, rising."""
        return tuple(sorted({placement.rank_of(stage) for stage in self.every[number]}))


def groups_of(ties: Sequence[Tie], placement: Placement) -> Groups:
    """What is shared by ties, and by the copies that a placement has.

    Args:
        ties: as the user or the partitioner gives them.
        placement: where it has copies, a tie holds in each of them, and each stage shares all of
            its module with its copies (written as the empty name).

    Raises:
        PartitionError: a tie that is no mapping, with a stage that does not exist, with two names
            in one stage, or with fewer than two places.

    Example:
        >>> from penstock.schedule.placement import bidirectional
        >>> groups_of([], bidirectional(2)).every
        ({0: '', 2: ''}, {1: '', 3: ''})
        >>> groups_of([{0: "embed.weight", 1: "head.weight"}], bidirectional(2)).ties
        ({0: 'embed.weight', 2: 'embed.weight', 1: 'head.weight', 3: 'head.weight'},)
    """
    size, copies = placement.num_model_stages, placement.copies
    groups = [_spread(tie, placement) for tie in ties]
    if copies > 1:
        groups += [{stage + copy * size: "" for copy in range(copies)} for stage in range(size)]
    return Groups(every=tuple(groups), num_ties=len(ties))


def _spread(tie: Tie, placement: Placement) -> dict[int, str]:
    if not isinstance(tie, Mapping):
        raise PartitionError(
            f"a tie is {tie!r}; expected a dict, from each stage that holds the parameter to its "
            "name there"
        )
    group: dict[int, str] = {}
    for stage, name in tie.items():
        if stage not in range(placement.num_stages):
            raise PartitionError(
                f"the tie {dict(tie)} names stage {stage}; there are stages 0 to "
                f"{placement.num_stages - 1}"
            )
        for copy in range(placement.copies):
            place = placement.model_stage(stage) + copy * placement.num_model_stages
            if group.setdefault(place, name) != name:
                raise PartitionError(
                    f"the tie {dict(tie)} has two names for one of the model's stages, which is "
                    "the same in each copy; give it one"
                )
    if len(tie) < 2:
        raise PartitionError(f"the tie {dict(tie)} has one place; name all stages that share")
    return group


def named_tensors(module: nn.Module, stage: int, name: str, buffers: bool) -> dict[str, Tensor]:
    """What ``name`` stands for in a stage's module.

    Args:
        module: the stage's module, wrapped or not.
        stage: its index, for messages.
        name: of a parameter, or of a module for all within; empty for the stage's own.
        buffers: whether buffers are asked for, or parameters.

    Returns:
        By name within ``name``; the empty name for the parameter itself.

    Raises:
        PartitionError: there is nothing of that name.
    """
    params = {plain_name(module, n): p for n, p in module.named_parameters(remove_duplicate=False)}
    if name in params:
        return {} if buffers else {"": params[name]}
    try:
        within = unwrapped(module).get_submodule(name)
    except AttributeError:
        shown = ", ".join([*params][:6]) + (", …" if len(params) > 6 else "")
        raise PartitionError(
            f"stage {stage} has neither a parameter nor a module {name!r}; its parameters are: "
            f"{shown or 'none'}"
        ) from None
    return dict(named_plainly(within, buffers=buffers))
