"""What the playground's sliders ask for, and the simulation of it.

Answers are kept: of what is compared, most stays as it was when one slider moves on. This module
knows no widget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family, refuse_options
from penstock.simulate.costs import Costs
from penstock.simulate.fitting import wanted_costs
from penstock.simulate.shares import share_of, share_out
from penstock.simulate.simulation import Simulation, simulate

__all__ = ["Scene", "read_options", "shown_message"]

ScheduleOptions = tuple[tuple[str, object], ...]

_SLIDERS = {"ranks": "ranks", "microbatches": "microbatches", "virtual": "stages per rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A setting.

    Args:
        ranks: number of ranks.
        microbatches: microbatches per step.
        forward: cost of F.
        input_grad: cost of I.
        weight_grad: cost of W.
        latency: time of a message between ranks.
        memory: the most activations that a rank may hold; None for any number.
        per_rank: whether costs are of a rank's whole part of the model, not of one stage.
    """

    ranks: int
    microbatches: int
    forward: float
    input_grad: float
    weight_grad: float
    latency: float
    memory: float | None
    per_rank: bool

    def play(self, name: str, *, virtual: int | None, options: ScheduleOptions = ()) -> Simulation:
        """Simulate a schedule in this setting.

        Args:
            name: the schedule's.
            virtual: stages per rank; None for what is usual.
            options: the schedule's.

        Raises:
            ScheduleError: no such schedule, or a setting that it can't work with.
        """
        costs = Costs(
            forward=self.forward,
            input_grad=self.input_grad,
            weight_grad=self.weight_grad,
            latency=self.latency,
        )
        return _play(name, self.ranks, self.microbatches, virtual, options, costs, self.per_rank)


@lru_cache(maxsize=64)
def _play(
    name: str,
    ranks: int,
    microbatches: int,
    virtual: int | None,
    options: ScheduleOptions,
    costs: Costs,
    per_rank: bool,
) -> Simulation:
    wanted = tuple(wanted_costs(costs, name).items())
    program = _built(name, ranks, microbatches, virtual, (*wanted, *options))
    if per_rank:
        costs = share_out(costs, share_of(program))
    return simulate(program, costs)


@lru_cache(maxsize=64)
def _built(
    name: str, ranks: int, microbatches: int, virtual: int | None, options: ScheduleOptions
) -> Program:
    """Kept, too: most costs change no program, and building one takes as long as a simulation."""
    refuse_options(family(name), dict(options))
    return build(name, ranks=ranks, microbatches=microbatches, virtual=virtual, **dict(options))


def read_options(text: str) -> ScheduleOptions:
    """A schedule's options from one line of text.

    Raises:
        ScheduleError: a part that is no ``name=value``, a value that is no finite number, or what
            has a slider.

    Example:
        >>> read_options("group=4, waves=2"), read_options("")
        ((('group', 4), ('waves', 2)), ())
    """
    found: list[tuple[str, object]] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = (each.strip() for each in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (name and math.isfinite(number)):
            raise ScheduleError(f"option {part!r}: expected name=number, such as group=4")
        if name in _SLIDERS:
            raise ScheduleError(f"option {part!r}: there is a slider for {_SLIDERS[name]}")
        found.append((name, int(number) if number.is_integer() else number))
    return tuple(found)


def shown_message(error: PenstockError, *, beside: str = "") -> str:
    """The error's message, for a page.

    Args:
        error: what was raised.
        beside: a schedule's name that stands beside it, and needs no telling again.

    Example:
        >>> error = ScheduleError("zbv: virtual=3 stages per rank do not work; 2 do")
        >>> shown_message(error)
        'zbv: virtual=3 stages per rank do not work; 2 do'
        >>> shown_message(error, beside="zbv")
        'virtual=3 stages per rank do not work; 2 do'
    """
    return str(error).removeprefix(f"{beside}: ")
