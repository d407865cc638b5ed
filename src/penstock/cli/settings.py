"""The options and sources that subcommands share.

``Settings`` declares each option once; ``with_options`` adds them to a subcommand. A source is

    1f1b                          a schedule, built with the options of the command line
    interleaved-1f1b:virtual=4    a schedule with options of its own, separated by commas
    mine.csv                      a program, as ``penstock.schedule.text`` writes it
    trace.json                    a trace, as ``penstock.view.perfetto`` writes it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.family import parse_options
from penstock.schedule.program import Program
from penstock.schedule.registry import family, refuse_options
from penstock.schedule.text import load_csv
from penstock.simulate.costs import Cost, Costs, build_for
from penstock.trace import Trace

__all__ = [
    "Settings", "is_file", "load", "load_program", "message_of", "option", "with_options",
]  # fmt: skip

_SUFFIXES = (".csv", ".json")
_RANKS, _MICROBATCHES = 4, 8
_OWN_OPTIONS = ("forward", "input_grad", "weight_grad", "latency", "overlap")
# The fields of Costs without an option of their own, given as --cost name=value.
_OTHER_COSTS = tuple(each.name for each in fields(Costs) if each.name not in _OWN_OPTIONS)


def option(text: str, *flags: str, **more: Any) -> Any:
    """An option of a subcommand, with its help; its flag is its name if none is given."""
    return typer.Option(*flags, help=text, **more)


_cost = partial(option, rich_help_panel="Costs")
_OPTION_TEXT = "An option of the schedule, such as group=4; may be repeated."
_MEMORY_TEXT = (
    "Memory limit of a rank: in activations, or in bytes with --cost activation_bytes=..."
)
_LATENCY_TEXT = "Time of a message between ranks: one number, or one per stage, to the next."
_COST_TEXT = f"Another cost, such as bandwidth=2; repeatable. Names: {', '.join(_OTHER_COSTS)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The shared options of one command line, as given; None stands for a default."""

    ranks: Annotated[int | None, option("Ranks.", "--ranks", "-p", show_default="4")] = None
    microbatches: Annotated[
        int | None, option("Microbatches per step.", "--microbatches", "-m", show_default="8")
    ] = None
    virtual: Annotated[
        int | None,
        option("Stages per rank.", "--virtual", "-v", show_default="the schedule's, or by costs"),
    ] = None
    option: Annotated[
        list[str] | None, option(_OPTION_TEXT, "--option", "-O", metavar="NAME=VALUE")
    ] = None
    memory: Annotated[float | None, option(_MEMORY_TEXT, show_default="none")] = None
    forward: Annotated[str, _cost("Time of F: one number, or one per stage as 1,2,1.")] = "1"
    input_grad: Annotated[str, _cost("Time of I, the input gradient.")] = "1"
    weight_grad: Annotated[str, _cost("Time of W, the weight gradient; B takes I + W.")] = "1"
    latency: Annotated[str, _cost(_LATENCY_TEXT)] = "0"
    overlap: Annotated[
        str | None,
        _cost("Time of an overlapped forward and backward.", show_default="the sum of both"),
    ] = None
    cost: Annotated[list[str] | None, _cost(_COST_TEXT, metavar="NAME=VALUE")] = None

    def __post_init__(self) -> None:
        if self.memory is not None and not self.memory >= 0:
            raise ScheduleError(f"--memory {self.memory:g}: expected a number ≥ 0")

    def sizes(self) -> dict[str, Any]:
        """The numbers of ranks, microbatches, and stages per rank."""
        return {
            "ranks": _RANKS if self.ranks is None else self.ranks,
            "microbatches": _MICROBATCHES if self.microbatches is None else self.microbatches,
            "virtual": self.virtual,
        }

    def options(self) -> dict[str, object]:
        """The options of the schedule, parsed."""
        return parse_options(self.option or ())

    def costs(self) -> Costs:
        """The costs, parsed."""
        given = {name: getattr(self, name) for name in _OWN_OPTIONS}
        others = parse_options(self.cost or ())
        for name in others:
            if name not in _OTHER_COSTS:
                names = ", ".join(_OTHER_COSTS)
                raise ScheduleError(f"--cost {name}=...: expected NAME=VALUE; names are: {names}")
        values: dict[str, Any] = {
            name: _read_cost(_FLAGS[name], value) if isinstance(value, str) else value
            for name, value in (given | others).items()
        }
        return Costs(**values)

    def refuse_for(self, file: str, *, has_run: bool = False) -> None:
        """Refuse options that a file has no use for.

        A program is built already; of a step that has run, all but the memory is known.
        """
        if has_run and self != Settings(memory=self.memory):
            raise ScheduleError(
                f"{file} holds a step that has run, and takes no option but --memory"
            )
        if self != replace(self, ranks=None, microbatches=None, virtual=None, option=None):
            raise ScheduleError(
                f"{file} holds a program as it is, and takes no --ranks, --microbatches, --virtual "
                "or --option"
            )


def with_options(command: Any, *, omit: Collection[str] = ()) -> Callable[..., None]:
    """Replace each dataclass among a command's arguments by its fields, except ``omit``."""
    own, params = signature(command, eval_str=True), list[Parameter]()
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, param in own.parameters.items():
        if is_dataclass(param.annotation):
            group: Any = param.annotation
            declared = signature(group, eval_str=True).parameters.values()
            options = [option for option in declared if option.name not in omit]
            groups[name] = group, [option.name for option in options]
            params += options
        else:
            params.append(param)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, (group, options) in groups.items():
            given[name] = group(**{option: given.pop(option) for option in options})
        command(**given)

    run.__signature__ = own.replace(parameters=params)  # type: ignore[attr-defined]
    return run


def _read_cost(flag: str, text: str) -> Cost:
    """Parse one number, or one per stage as ``1,2,1``."""
    try:
        numbers = list(map(float, text.split(",")))
    except ValueError as error:
        raise ScheduleError(
            f"{flag} {text!r}: expected a number, or one per stage as 1,2,1"
        ) from error
    return numbers[0] if len(numbers) == 1 else numbers


# The flag for each library parameter that an error may name.
_FLAGS = {each.name: "--" + each.name.replace("_", "-") for each in fields(Settings)}
_FLAGS |= {name: f"--cost {name}" for name in _OTHER_COSTS}
_FLAGS |= {"memory_limit": "--memory", "time_limit_s": "--time-limit"}


def message_of(error: PenstockError) -> str:
    """The message of an error, prefixed with the flag of the parameter at fault.

    Examples:
        >>> message_of(ScheduleError("2 numbers for 4 stages", parameter="reload"))
        '--cost reload: 2 numbers for 4 stages'
    """
    flag = None if error.parameter is None else _FLAGS.get(error.parameter)
    return str(error) if flag is None else f"{flag}: {error}"


def is_file(source: str) -> bool:
    """True if ``source`` names a file, existing or not: ``mine.csv``, or ``./1f1b``.

    A schedule's name takes precedence.
    """
    if source.lower().endswith(_SUFFIXES) or os.path.dirname(source):
        return True
    try:
        family(source.partition(":")[0])
    except ScheduleError:
        return Path(source).is_file()
    return False


def load_program(source: str, settings: Settings, *, per_rank: bool = False) -> Program:
    """Load or build a program, and check it; the arguments are those of ``load``."""
    found = load(source, settings, per_rank=per_rank)
    if isinstance(found, Trace):
        raise ScheduleError(f"{source}: a trace, expected a schedule or a file with a program")
    return check(found)


def load(source: str, settings: Settings, *, per_rank: bool = False) -> Program | Trace:
    """Load a program or a trace from a file, or build a schedule; does not check the program.

    With ``per_rank``, costs are those of a rank's whole part of the model.
    """
    if not is_file(source):
        return _build(source, settings, per_rank)
    settings.refuse_for(source)
    if Path(source).suffix.lower() != ".json":
        return load_csv(source)
    from penstock.view.perfetto import from_perfetto

    try:
        return from_perfetto(Path(source).read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, ScheduleError) as error:
        raise ScheduleError(f"{source}: {error}") from error


def _build(source: str, settings: Settings, per_rank: bool) -> Program:
    name, colon, own = source.partition(":")
    chosen, options, sizes = family(name), settings.options(), settings.sizes()
    options |= parse_options(own.split(",")) if colon else {}
    sizes["virtual"] = options.pop("virtual", sizes["virtual"])
    refuse_options(chosen, options)
    return build_for(settings.costs(), name, per_rank=per_rank, **sizes, **options)
