"""Random numbers of one device, over all ranks: who begins the streams, and from which seed.

What a stream is, ``penstock.stage.rng`` says. This module draws nothing but the seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.errors import ScheduleError
from penstock.runtime.comm.base import Transport
from penstock.schedule.placement import Placement
from penstock.stage.rng import RandomStream, draw_step_seed
from penstock.stage.stage import Stage

__all__ = ["make_streams", "share_step_seed"]


def make_streams(stages: Mapping[int, Stage], placement: Placement, *, wanted: bool) -> None:
    """Let stages take part in the microbatches' streams of random numbers, or no longer do so.

    Args:
        stages: this process's stages, by index.
        placement: says where microbatches enter and leave.
        wanted: whether there are such streams.

    Raises:
        ScheduleError: a stage was given what crosses its boundaries in advance: with streams,
            more does.
    """
    for index, stage in stages.items():
        stage.random = None
        if not wanted:
            continue
        if stage.static_inputs is not None or stage.static_outputs is not None:
            raise ScheduleError(
                f"stage {index}: with microbatch_rng=True the state of the generator crosses "
                "boundaries too; leave input_args and output_args out"
            )
        stage.random = RandomStream(
            stage.device, first=index in placement.entries, last=index in placement.exits
        )


def share_step_seed(
    stages: Iterable[Stage], transports: Sequence[Transport], placement: Placement
) -> None:
    """Give all stages the step's seed, drawn on every rank: the one of the first stage's counts."""
    first = placement.rank_of(placement.entries[0])
    seed = draw_step_seed()
    for transport in sorted(transports, key=lambda t: t.rank != first):
        (seed,) = transport.broadcast_ints([seed], first)
    for stage in stages:
        assert stage.random is not None
        stage.random.step_seed = seed
