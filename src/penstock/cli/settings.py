"""The options that subcommands share: ranks, microbatches, costs, memory.

Each option is an ``Annotated`` alias that a subcommand puts into its signature. The subcommand
gathers them in one ``Settings``, which everything else takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from penstock.cli.values import (
    OTHER_COSTS,
    read_cost,
    read_message_cost,
    read_other_costs,
)
from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.family import parse_options
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import Simulation, simulate

__all__ = [
    "Forward", "InputGrad", "Jitter", "JitterSeed", "Latency", "Memory", "Microbatches", "Option",
    "OtherCosts", "OverlapTime", "Ranks", "Settings", "Virtual", "WeightGrad", "message_of",
]  # fmt: skip

_RANKS, _MICROBATCHES = 4, 8


def _option(text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=text, **more)


def _cost(text: str, *flags: str, **more: Any) -> Any:
    return _option(text, *flags, rich_help_panel="Costs", **more)


def _cost_names(incomplete: str) -> Iterator[str]:
    """Complete the name of ``--cost``."""
    yield from (f"{name}=" for name in OTHER_COSTS if name.startswith(incomplete))


_MICROBATCHES_TEXT, _USUAL = "Microbatches per step.", "the schedule's usual number"
_OPTION_TEXT = "An option of the schedule, such as group=4; may be repeated."
_MEMORY_TEXT = (
    "Memory limit of a rank: in activations, or in bytes with --cost activation_bytes=..."
)
_LATENCY_TEXT = (
    "Time of a message between ranks: one number, one per sending stage, or one per edge as "
    "1-2=5,2-3=1."
)
_COST_TEXT = f"Another cost, such as bandwidth=2; repeatable. Names: {', '.join(OTHER_COSTS)}."

Ranks = Annotated[int | None, _option("Ranks.", "--ranks", "-p", show_default=str(_RANKS))]
Microbatches = Annotated[
    int | None,
    _option(_MICROBATCHES_TEXT, "--microbatches", "-m", show_default=str(_MICROBATCHES)),
]
Virtual = Annotated[int | None, _option("Stages per rank.", "--virtual", "-v", show_default=_USUAL)]
Option = Annotated[list[str] | None, _option(_OPTION_TEXT, "--option", "-O", metavar="NAME=VALUE")]
Memory = Annotated[float | None, _option(_MEMORY_TEXT, "--memory", show_default="none")]
Forward = Annotated[str, _cost("Time of F: one number, or one per stage as 1,2,1.")]
InputGrad = Annotated[str, _cost("Time of I, the input gradient.")]
WeightGrad = Annotated[str, _cost("Time of W, the weight gradient; B takes I + W.")]
Latency = Annotated[str, _cost(_LATENCY_TEXT)]
OverlapTime = Annotated[
    str | None, _cost("Time of an overlapped forward and backward.", show_default="the sum of both")
]
OtherCosts = Annotated[
    list[str] | None,
    _cost(_COST_TEXT, "--cost", metavar="NAME=VALUE", autocompletion=_cost_names),
]
Jitter = Annotated[
    float, _cost("Lengthen each computation by a random share of its cost, up to this one.")
]
JitterSeed = Annotated[int, _cost("Seed of the jitter.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The shared options of one command line, as given; None stands for a default.

    Raises:
        ScheduleError: a memory limit that is negative or NaN.
    """

    ranks: int | None = None
    microbatches: int | None = None
    virtual: int | None = None
    option: list[str] | None = None
    memory: float | None = None
    forward: str = "1"
    input_grad: str = "1"
    weight_grad: str = "1"
    latency: str = "0"
    overlap: str | None = None
    cost: list[str] | None = None
    jitter: float = 0.0
    jitter_seed: int = 0

    def __post_init__(self) -> None:
        if self.memory is not None and not self.memory >= 0:
            raise ScheduleError(f"--memory {self.memory:g}: expected a number ≥ 0")

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return _RANKS if self.ranks is None else self.ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step."""
        return _MICROBATCHES if self.microbatches is None else self.microbatches

    def options(self) -> dict[str, object]:
        """The options of the schedule, parsed."""
        return parse_options(self.option or ())

    def costs(self) -> Costs:
        """The costs, parsed."""
        return Costs(
            forward=read_cost("--forward", self.forward),
            input_grad=read_cost("--input-grad", self.input_grad),
            weight_grad=read_cost("--weight-grad", self.weight_grad),
            latency=read_message_cost("--latency", self.latency),
            overlap=None if self.overlap is None else read_cost("--overlap", self.overlap),
            **read_other_costs(self.cost or ()),
        )

    def refuse_for_program(self, file: str) -> None:
        """Refuse options that only affect building: a program from a file is already built."""
        given = self._given("ranks", "microbatches", "virtual", "option")
        if given:
            raise ScheduleError(
                f"{file} holds a program as it is, and takes no {', no '.join(given)}; leave that "
                "out, or name a schedule"
            )

    def refuse_for_trace(self, file: str) -> None:
        """Refuse every option but the memory limit, since a recorded step has already run."""
        given = self._given(*(each.name for each in fields(self) if each.name != "memory"))
        if given:
            raise ScheduleError(
                f"{file} is of a step that has run, and takes no {', no '.join(given)}; leave that "
                "out"
            )

    def _given(self, *names: str) -> list[str]:
        defaults = {each.name: each.default for each in fields(self)}
        return [_flag(name) for name in names if getattr(self, name) not in (defaults[name], [])]

    def simulate(self, program: Program, costs: Costs | None = None) -> Simulation:
        """Simulate a program at the given costs, by default the command line's.

        Raises:
            ScheduleError: as for ``penstock.simulate``; or the jitter is so large that times
                overflow.
        """
        costs = self.costs() if costs is None else costs
        result = simulate(program, costs, jitter=self.jitter, seed=self.jitter_seed)
        if not all(map(math.isfinite, (result.makespan, result.busy, *result.peak_bytes))):
            raise ScheduleError(
                "with this jitter, costs add up to more than a number can hold; give less of it"
            )
        return result


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# The flag for each library parameter that an error may name.
_FLAGS = {each.name: _flag(each.name) for each in fields(Settings)}
_FLAGS |= {name: f"--cost {name}" for name in OTHER_COSTS}
_FLAGS |= {"memory_limit": "--memory", "time_limit_s": "--time-limit"}


def message_of(error: PenstockError) -> str:
    """The message of an error, prefixed with the flag of the parameter at fault.

    Example:
        >>> message_of(ScheduleError("-1.0 is not a finite number", parameter="input_grad"))
        '--input-grad: -1.0 is not a finite number'
        >>> message_of(ScheduleError("2 numbers for 4 stages", parameter="reload"))
        '--cost reload: 2 numbers for 4 stages'
    """
    flag = None if error.parameter is None else _FLAGS.get(error.parameter)
    return str(error) if flag is None else f"{flag}: {error}"
