"""The setting that most subcommands share: ranks, microbatches, costs, memory.

``takes_setting`` turns a function with a parameter of type ``Setting`` into one whose parameters
are the fields of it, each an option of the command line. Texts become numbers here; what numbers
mean is the library's affair.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from penstock.errors import ScheduleError
from penstock.schedule.program import Program
from penstock.simulate.costs import Cost, Costs, MessageCost
from penstock.simulate.engine import simulate
from penstock.simulate.result import Simulation

__all__ = ["Setting", "read_options", "takes_setting"]

_COST_HELP = "one number, or one per stage as 1,2,1"
_PANEL = "Costs"
_RANKS, _MICROBATCHES = 4, 8
_FLAGS = ("forward", "input_grad", "weight_grad", "latency", "overlap")
_OTHERS = ", ".join(field.name for field in fields(Costs) if field.name not in _FLAGS)


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
            help=f"Another cost, such as bandwidth=2; may be repeated. Names: {_OTHERS}.",
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

    def play(self, program: Program, costs: Costs | None = None) -> Simulation:
        """Simulate a program in this setting.

        Args:
            program: what to simulate.
            costs: other costs than the setting's.

        Raises:
            ScheduleError: as ``simulate``.
        """
        return simulate(
            program,
            self.costs() if costs is None else costs,
            jitter=self.jitter,
            seed=self.jitter_seed,
        )

    def costs(self) -> Costs:
        """The costs, as numbers.

        Raises:
            ScheduleError: a text that is no number, or a number that is no cost.
        """
        return Costs(
            forward=_cost("forward", self.forward),
            input_grad=_cost("input-grad", self.input_grad),
            weight_grad=_cost("weight-grad", self.weight_grad),
            latency=_message_cost("latency", self.latency),
            overlap=None if self.overlap is None else _cost("overlap", self.overlap),
            **self._other_costs(),
        )

    def _other_costs(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for text in self.cost or ():
            name, _, value = text.partition("=")
            name = name.replace("-", "_")
            if name not in _OTHERS.split(", "):
                raise ScheduleError(f"--cost {text!r}: expected NAME=VALUE; names are: {_OTHERS}")
            if name in found:
                raise ScheduleError(f"--cost {text!r}: {name} is given twice; give it once")
            switch = {"true": True, "false": False}.get(value.lower())
            found[name] = _message_cost(f"cost {name}", value) if switch is None else switch
        return found

    def options(self) -> dict[str, object]:
        """The family's options, read by ``read_options``."""
        return read_options(self.option or ())


def read_options(texts: list[str] | tuple[str, ...]) -> dict[str, object]:
    """``name=value`` texts as arguments: whole numbers, numbers, true and false, else text.

    Args:
        texts: each as ``name=value``.

    Raises:
        ScheduleError: a text without a name or a value, or a name that is given twice.

    Example:
        >>> read_options(["group=4", "tail=keep"])
        {'group': 4, 'tail': 'keep'}
    """
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not (name and equals and value):
            raise ScheduleError(f"option {text!r}: expected NAME=VALUE, such as group=4")
        if name in found:
            raise ScheduleError(f"option {text!r}: {name} is given twice; give it once")
        found[name] = _value(value)
    return found


def _value(text: str) -> object:
    known: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _message_cost(name: str, text: str) -> MessageCost:
    """Edges where there are any, as ``1-2=5,2-3=1``; else as ``_cost``."""
    if "=" not in text:
        return _cost(name, text)
    edges: dict[tuple[int, int], float] = {}
    for part in text.split(","):
        try:
            edge, cost = part.split("=")
            one, two = map(int, edge.split("-"))
            number = float(cost)
        except ValueError as error:
            raise ScheduleError(
                f"--{name} {part!r}: expected the cost of an edge, such as 1-2=5"
            ) from error
        if (one, two) in edges:
            raise ScheduleError(f"--{name} {part!r}: this edge is given twice; give it once")
        edges[one, two] = number
    return edges


def _cost(name: str, text: str) -> Cost:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ScheduleError(
            f"--{name} {text!r}: expected a number, or one per stage as 1,2,1"
        ) from error
    return numbers[0] if len(numbers) == 1 else numbers


def takes_setting(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, whose parameter ``setting`` is given field by field.

    Args:
        command: a function with a keyword-only parameter ``setting`` of type ``Setting``.

    Returns:
        A function with one parameter per field of ``Setting`` in its place, as Typer reads them.
    """
    hints = get_type_hints(Setting, include_extras=True)
    names = [field.name for field in fields(Setting)]
    signature = inspect.signature(command, eval_str=True)
    own = [each for name, each in signature.parameters.items() if name != "setting"]
    taken = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(Setting)
    ]
    by_place = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    by_name = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(command)
    def unfolded(*args: Any, **given: Any) -> None:
        setting = Setting(**{name: given.pop(name) for name in names})
        command(*args, **given, setting=setting)

    unfolded.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*by_place, *taken, *by_name]
    )
    return unfolded
