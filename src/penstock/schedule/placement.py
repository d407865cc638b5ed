"""The placement of stages on ranks.

    linear   P=4        looped  P=4, V=2       V-shape  P=4        wave  P=2, waves=2
    rank 0   0          rank 0  0 4            rank 0   0 7        rank 0   0 3 4 7
    rank 1   1          rank 1  1 5            rank 1   1 6        rank 1   1 2 5 6
    rank 2   2          rank 2  2 6            rank 2   2 5
    rank 3   3          rank 3  3 7            rank 3   3 4

Values between neighbouring stages on the same rank (the turn of a V) need no message.

    bidirectional  P=4     num_directions=2: the model's 4 stages twice, once per direction
    rank 0         0 7     down   0 → 1 → 2 → 3    even microbatches enter at stage 0
    rank 1         1 6
    rank 2         2 5
    rank 3         3 4     up     4 → 5 → 6 → 7    odd microbatches enter at stage 4

Stages 4 to 7 are the model's stages 0 to 3 again, a second copy of their weights. Stages of
different copies are not neighbours: stage 3 returns the model's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

from penstock.errors import ScheduleError
from penstock.schedule.wording import number_of

__all__ = ["Placement", "bidirectional", "linear", "looped", "v_shape", "wave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The rank of every stage, and the stages that a microbatch passes.

    Args:
        num_ranks: number of ranks, at least 1; each must hold at least one stage.
        stage_ranks: for each stage, from 0, the rank that holds it; any sequence, kept as a tuple.
        num_directions: the number of copies of the model, in the order of their stages; microbatch
            m passes only copy m mod ``num_directions``.

    Raises:
        ScheduleError: a rank is out of range or holds no stage, or copies differ in size.
    """

    num_ranks: int
    stage_ranks: tuple[int, ...]
    num_directions: int = 1

    def __post_init__(self) -> None:
        ranks, ways = self.stage_ranks, self.num_directions
        try:
            object.__setattr__(self, "num_ranks", index(self.num_ranks))
            object.__setattr__(self, "stage_ranks", tuple(map(index, ranks)))
            object.__setattr__(self, "num_directions", index(ways))
        except TypeError as error:
            raise ScheduleError(
                f"placement of stages on ranks {ranks!r}, num_ranks={self.num_ranks!r}, "
                f"num_directions={ways!r}: expected a rank for each stage, as (0, 1, 1, 0), and "
                "whole numbers"
            ) from error
        used, wanted = set(self.stage_ranks), set(range(self.num_ranks))
        if used != wanted or not used:
            raise ScheduleError(
                f"placement {self.stage_ranks} on {number_of(self.num_ranks, 'rank')}: "
                f"ranks without a stage {sorted(wanted - used)}, "
                f"ranks that do not exist {sorted(used - wanted)}"
            )
        if ways < 1 or self.num_stages % ways:
            raise ScheduleError(
                f"placement {self.stage_ranks}: {number_of(self.num_stages, 'stage')} can't be "
                f"{number_of(ways, 'copy')} of a model; each copy has as many stages"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages, counting all copies."""
        return len(self.stage_ranks)

    @property
    def num_model_stages(self) -> int:
        """Number of stages of the model, that is, of one copy."""
        return len(self.stage_ranks) // self.num_directions

    def model_stage(self, stage: int) -> int:
        """The index of ``stage`` within its copy of the model."""
        return stage % self.num_model_stages

    def direction_of(self, stage: int) -> int:
        """The copy of the model that ``stage`` belongs to, from 0."""
        return stage // self.num_model_stages

    def passes(self, microbatch: int, stage: int) -> bool:
        """True if ``microbatch`` passes ``stage``."""
        return microbatch % self.num_directions == self.direction_of(stage)

    def passing(self, stage: int, microbatches: int) -> range:
        """The microbatches that pass ``stage``, of so many in all."""
        return range(self.direction_of(stage), microbatches, self.num_directions)

    def neighbour(self, stage: int, offset: int) -> int | None:
        """The stage ``offset`` further on in the same copy of the model; None past its ends."""
        other, size = stage + offset, self.num_model_stages
        return other if other >= 0 and other // size == stage // size else None

    @property
    def entries(self) -> tuple[int, ...]:
        """The stages where the model's inputs enter, one per copy."""
        return tuple(range(0, self.num_stages, self.num_model_stages))

    @property
    def exits(self) -> tuple[int, ...]:
        """The stages where the model's outputs leave, one per copy."""
        size = self.num_model_stages
        return tuple(range(size - 1, self.num_stages, size))

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in rising order."""
        return tuple(s for s, holder in enumerate(self.stage_ranks) if holder == rank)

    def same_rank(self, stage: int, other: int) -> bool:
        """True if both stages exist and are on the same rank."""
        exist = 0 <= stage < self.num_stages and 0 <= other < self.num_stages
        return exist and self.stage_ranks[stage] == self.stage_ranks[other]


def linear(num_ranks: int) -> Placement:
    """One stage per rank, in order."""
    return looped(num_ranks, 1)


def looped(num_ranks: int, virtual: int) -> Placement:
    """``virtual`` stages per rank; stage s lies on rank s mod ``num_ranks``."""
    ranks = tuple(s % num_ranks for s in range(num_ranks * virtual))
    return Placement(num_ranks=num_ranks, stage_ranks=ranks)


def v_shape(num_ranks: int) -> Placement:
    """Two stages per rank, down and up again: rank r holds r and 2·num_ranks − 1 − r."""
    return wave(num_ranks, 1)


def wave(num_ranks: int, waves: int) -> Placement:
    """``waves`` V-shapes one after the other: 2·``waves`` stages per rank."""
    down = tuple(range(num_ranks))
    return Placement(num_ranks=num_ranks, stage_ranks=(down + down[::-1]) * waves)


def bidirectional(num_ranks: int) -> Placement:
    """One stage per rank down, and a second copy up: rank r holds r and 2·num_ranks − 1 − r."""
    down = tuple(range(num_ranks))
    return Placement(num_ranks=num_ranks, stage_ranks=down + down[::-1], num_directions=2)
