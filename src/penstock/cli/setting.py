"""The setting that most subcommands share: ranks, microbatches, costs, memory.

``takes_setting`` turns a function with a parameter of type ``Setting`` into one whose parameters
are the fields of it, each an option of the command line. What texts mean, ``values.py`` knows.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from penstock.cli.completion import cost_names
from penstock.cli.values import (
    OTHER_COSTS,
    read_cost,
    read_message_cost,
    read_options,
    read_other_costs,
)
from penstock.errors import ScheduleError
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs
from penstock.simulate.engine import simulate
from penstock.simulate.result import Simulation

__all__ = ["Setting", "takes_setting"]

Command: TypeAlias = Callable[..., None]

_COST_HELP = "one number, or one per stage as 1,2,1"
_PANEL = "Costs"
_RANKS, _MICROBATCHES = 4, 8
_NAMES = ", ".join(OTHER_COSTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a schedule is built for, and what its actions cost.

    Args:
        ranks: number of ranks; None for the usual.
        microbatches: microbatches per step; None for the usual.
        virtual: stages per rank; None for what is usual in the family.
        option: options of the family, each as ``name=value``.
        forward: cost of F.
        input_grad: cost of I.
        weight_grad: cost of W; B takes both.
        latency: time of a message between ranks.
        overlap: time of an overlapped block; None for its parts' together.
        cost: other costs, each as ``name=value``.
        jitter: by what share of its cost a computation may last longer.
        jitter_seed: of the jitter.
        memory: the most that a rank may hold; None for any amount.

    Raises:
        ScheduleError: a memory that is negative or not a number.
    """

    ranks: Annotated[
        int | None, typer.Option("--ranks", "-p", help="Ranks.", show_default=str(_RANKS))
    ] = None
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            "-m",
            help="Microbatches per step.",
            show_default=str(_MICROBATCHES),
        ),
    ] = None
    virtual: Annotated[
        int | None,
        typer.Option("--virtual", "-v", help="Stages per rank.", show_default="as is usual"),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-O",
            metavar="NAME=VALUE",
            help="An option of the schedule, such as group=4; may be repeated.",
        ),
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            help="The most that a rank may hold: activations, or bytes where --cost "
            "activation_bytes=... is given.",
            show_default="any",
        ),
    ] = None
    forward: Annotated[
        str, typer.Option(help=f"Time of F: {_COST_HELP}.", rich_help_panel=_PANEL)
    ] = "1"
    input_grad: Annotated[
        str, typer.Option(help="Time of I, the input gradient.", rich_help_panel=_PANEL)
    ] = "1"
    weight_grad: Annotated[
        str,
        typer.Option(help="Time of W, the weight gradient; B takes both.", rich_help_panel=_PANEL),
    ] = "1"
    latency: Annotated[
        str,
        typer.Option(
            help="Time of a message between ranks: one number, one per sending stage, or those of "
            "some edges as 1-2=5,2-3=1.",
            rich_help_panel=_PANEL,
        ),
    ] = "0"
    overlap: Annotated[
        str | None,
        typer.Option(
            help="Time of a forward and a backward that run as one block.",
            show_default="its parts' together",
            rich_help_panel=_PANEL,
        ),
    ] = None
    cost: Annotated[
        list[str] | None,
        typer.Option(
            "--cost",
            metavar="NAME=VALUE",
            help=f"Another cost, such as bandwidth=2; may be repeated. Names: {_NAMES}.",
            autocompletion=cost_names,
            rich_help_panel=_PANEL,
        ),
    ] = None

    jitter: Annotated[
        float,
        typer.Option(
            help="By what share of its cost a computation may last longer, by chance.",
            rich_help_panel=_PANEL,
        ),
    ] = 0.0
    jitter_seed: Annotated[int, typer.Option(help="Of the jitter.", rich_help_panel=_PANEL)] = 0

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

    def refuse_beside_file(self, file: str) -> None:
        """Refuse what only a schedule that is yet to be built can take.

        Args:
            file: where the program is.

        Raises:
            ScheduleError: ranks, microbatches, stages per rank, or options are given.
        """
        names = ("ranks", "microbatches", "virtual", "option")
        given = [f"--{name}" for name in names if getattr(self, name) not in (None, [])]
        if given:
            raise ScheduleError(
                f"{file} holds a program as it is, and takes no {', no '.join(given)}; leave that "
                "out, or name a schedule"
            )

    def refuse_beside_trace(self, file: str) -> None:
        """Refuse what a step that has run already can't take: all but a limit of memory.

        Args:
            file: where the trace is.

        Raises:
            ScheduleError: something else is given.
        """
        given = [
            f"--{each.name.replace('_', '-')}"
            for each in fields(self)
            if each.name != "memory" and getattr(self, each.name) not in (each.default, [])
        ]
        if given:
            raise ScheduleError(
                f"{file} is of a step that has run, and takes no {', no '.join(given)}; leave that "
                "out"
            )

    def play(self, program: Program, costs: Costs | None = None) -> Simulation:
        """Simulate a program in this setting.

        Args:
            program: what to simulate.
            costs: other costs than the setting's.

        Raises:
            ScheduleError: as ``simulate``; or a jitter of which costs get more than a
                number can hold.
        """
        result = simulate(
            program,
            self.costs() if costs is None else costs,
            jitter=self.jitter,
            seed=self.jitter_seed,
        )
        if not all(map(math.isfinite, (result.makespan, result.busy, *result.peak_bytes))):
            raise ScheduleError(
                "with this jitter, costs add up to more than a number can hold; give less of it"
            )
        return result

    def costs(self) -> Costs:
        """The costs, as numbers.

        Raises:
            ScheduleError: a text that is no number, or a number that is no cost.
        """
        return Costs(
            forward=read_cost("forward", self.forward),
            input_grad=read_cost("input-grad", self.input_grad),
            weight_grad=read_cost("weight-grad", self.weight_grad),
            latency=read_message_cost("latency", self.latency),
            overlap=None if self.overlap is None else read_cost("overlap", self.overlap),
            **read_other_costs(self.cost or ()),
        )

    def options(self) -> dict[str, object]:
        """The family's options, read by ``read_options``."""
        return read_options(self.option or ())


def takes_setting(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """A decorator: the command's parameter ``setting`` is given field by field.

    Args:
        without: fields that the command has no use for; they keep their defaults.

    Returns:
        What makes of a function with a keyword-only parameter ``setting`` of type ``Setting`` one
        with a parameter per field in its place, as Typer reads them.
    """
    hints = get_type_hints(Setting, include_extras=True)
    taken = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(Setting)
        if field.name not in without
    ]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def unfolded(*args: Any, **given: Any) -> None:
            setting = Setting(**{each.name: given.pop(each.name) for each in taken})
            command(*args, **given, setting=setting)

        signature = inspect.signature(command, eval_str=True)
        own = [each for name, each in signature.parameters.items() if name != "setting"]
        by_name = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]
        by_place = [each for each in own if each not in by_name]
        unfolded.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*by_place, *taken, *by_name]
        )
        return unfolded

    return decorate
