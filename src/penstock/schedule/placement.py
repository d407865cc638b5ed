"""Which rank holds which stage.

    linear   P=4        looped  P=4, V=2       V-shape  P=4        wave  P=2, waves=2
    rank 0   0          rank 0  0 4            rank 0   0 7        rank 0   0 3 4 7
    rank 1   1          rank 1  1 5            rank 1   1 6        rank 1   1 2 5 6
    rank 2   2          rank 2  2 6            rank 2   2 5
    rank 3   3          rank 3  3 7            rank 3   3 4

Where two neighbouring stages share a rank (the turn of a V), what crosses between them needs no
message. This module knows neither microbatches nor actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ScheduleError

__all__ = ["Placement", "linear", "looped", "v_shape", "wave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The rank of every stage.

    Args:
        num_ranks: number of ranks; each must hold at least one stage.
        stage_ranks: for each stage, from 0, the rank that holds it.

    Raises:
        ScheduleError: a rank out of range, or one that holds no stage.
    """

    num_ranks: int
    stage_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        held = set(self.stage_ranks)
        wanted = set(range(self.num_ranks))
        if held != wanted:
            raise ScheduleError(
                f"placement {self.stage_ranks} on {self.num_ranks} ranks: "
                f"ranks without a stage {sorted(wanted - held)}, "
                f"ranks that do not exist {sorted(held - wanted)}"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in rising order."""
        return tuple(s for s, holder in enumerate(self.stage_ranks) if holder == rank)

    def same_rank(self, stage: int, other: int) -> bool:
        """Whether both stages exist and one rank holds them."""
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
