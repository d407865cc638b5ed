"""Schedules of one's own: a function that returns a program becomes a family.

    @penstock.schedule("all-then-all")
    def all_then_all(*, ranks, microbatches): ...      build("all-then-all", ranks=4, ...)

Such a program is checked when it is built; then it is simulated, drawn and run like any other.
This module knows no schedule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.catalog import add, refuse_no_name
from penstock.schedule.check import check
from penstock.schedule.family import Arrangement, Family
from penstock.schedule.messages import number_of
from penstock.schedule.program import Program
from penstock.schedule.sizes import refuse_sizes

__all__ = ["schedule"]

Builder = TypeVar("Builder", bound=Callable[..., Program])

_GIVEN = ("ranks", "microbatches", "virtual")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def schedule(
    name: str,
    *,
    virtual: int | None = None,
    arrangement: Arrangement | None = None,
    summary: str | None = None,
    source: str = "",
    aliases: tuple[str, ...] = (),
) -> Callable[[Builder], Builder]:
    """Make the function below a schedule that ``build``, ``Pipeline`` and the command know.

    The function takes ``ranks`` and ``microbatches`` by name; ``virtual`` where it works with
    several numbers of stages per rank; what else it takes are the schedule's options, and with
    ``**more`` any name is one. It raises what it likes where it can't work with what it is given:
    ``build`` makes a ScheduleError of that.

    Args:
        name: the schedule's name; registering it again replaces it.
        virtual: the stages per rank that it makes or, where the function takes ``virtual``, makes
            by default; None for the function's own default, or 1.
        arrangement: how it lays stages on ranks. None for linear, or looped where there are
            several stages per rank. ``Arrangement.BIDIRECTIONAL`` says that ranks hold two copies
            of the model, which must be known before a program is built.
        summary: one line for people; None for the first line of the docstring.
        source: where the method was published.
        aliases: other names.

    Returns:
        A decorator that gives the function back as it is.

    Raises:
        ScheduleError: a name that Penstock's own schedules have, or none; or what is decorated is
            no function, or one that takes no ``ranks`` or no ``microbatches``; or ``virtual`` is
            no whole number from 1 on, or ``arrangement`` no ``Arrangement``.

    Example:
        >>> from penstock.schedule.catalog import build, remove
        >>> from penstock.schedule.text import parse_csv
        >>> @schedule("doctest-one-rank")
        ... def one_rank(*, ranks, microbatches):
        ...     '''Forward and backward of each microbatch in turn.'''
        ...     return parse_csv(",".join(f"0F{m},0B{m}" for m in range(microbatches)))
        >>> " ".join(map(str, build("doctest-one-rank", ranks=1, microbatches=2).ranks[0]))
        '0F0 0B0 0F1 0B1'
        >>> build("doctest-one-rank", ranks=2, microbatches=2)
        Traceback (most recent call last):
        penstock.errors.ScheduleError: doctest-one-rank made a program for 1 rank and 2 \
microbatches, asked for 2 and 2
        >>> remove("doctest-one-rank")
    """
    refuse_no_name(name)
    if isinstance(aliases, str):
        raise ScheduleError(f"schedule {name!r}: aliases is a tuple of names, as in ({aliases!r},)")
    if not isinstance(arrangement, Arrangement | None):
        there_are = ", ".join(str(each) for each in Arrangement)
        raise ScheduleError(
            f"schedule {name!r}: arrangement={arrangement!r} must be one of {there_are} (of "
            "penstock.schedule.family)"
        )

    def register(builder: Builder) -> Builder:
        parameters = _parameters(name, builder)
        by_name = [key for key, each in parameters.items() if each.kind in _BY_NAME]
        several = "virtual" in by_name
        usual = _usual(name, virtual, parameters)
        laid = Arrangement.LOOPED if several or usual > 1 else Arrangement.LINEAR
        doc = (inspect.getdoc(builder) or "").strip()
        text = doc.partition("\n")[0].rstrip(".")
        new = Family(
            name=name,
            builder=builder,
            arrangement=laid if arrangement is None else arrangement,
            default_virtual=usual,
            virtuals=None if several else (usual,),
            summary=text if summary is None else summary,
            source=source,
            aliases=aliases,
            doc=doc,
            options={each: "" for each in by_name if each not in _GIVEN},
            any_option=any(each.kind is each.VAR_KEYWORD for each in parameters.values()),
        )
        add(replace(new, builder=_verified(new, parameters)))
        return builder

    return register


def _parameters(name: str, builder: object) -> Mapping[str, inspect.Parameter]:
    """What the decorated function takes, which is to be enough."""
    try:
        found = inspect.signature(builder).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            f"schedule {name!r}: {builder!r} is no function whose parameters can be read; put "
            f"@penstock.schedule({name!r}) above a function of ranks and microbatches that returns "
            "a Program"
        ) from error
    by_name = [key for key, each in found.items() if each.kind in _BY_NAME]
    missing = [each for each in _GIVEN[:2] if each not in by_name]
    if missing:
        raise ScheduleError(
            f"schedule {name!r}: its function must take ranks and microbatches by name, and "
            f"takes no {' and no '.join(missing)}"
        )
    if "name" in by_name:
        raise ScheduleError(
            f"schedule {name!r}: an option can't be called 'name', which build takes for the "
            "schedule's; call the parameter something else"
        )
    return found


def _usual(name: str, virtual: int | None, parameters: Mapping[str, inspect.Parameter]) -> int:
    """The stages per rank where none are asked for."""
    usual = virtual
    if usual is None:
        own = parameters["virtual"].default if "virtual" in parameters else 1
        usual = 2 if own in (None, inspect.Parameter.empty) else own
    refuse_sizes(f"schedule {name!r}", virtual=usual)
    return usual


def _verified(
    family: Family, parameters: Mapping[str, inspect.Parameter]
) -> Callable[..., Program]:
    """The family's builder; its programs are those that were asked for, and right."""
    name = family.name
    needed = [key for key in family.options if parameters[key].default is inspect.Parameter.empty]

    @functools.wraps(family.builder)
    def build(*, ranks: int, microbatches: int, **more: Any) -> Program:
        missing = [key for key in needed if key not in more]
        if missing:
            raise ScheduleError(
                f"{name} is built only with a value for its {', '.join(missing)}, which its "
                "function has no default for"
            )
        try:
            made: object = family.builder(ranks=ranks, microbatches=microbatches, **more)
        except (PenstockError, MemoryError):
            raise
        except Exception as error:  # whatever the user's function raises
            raise ScheduleError(
                f"{name}: its function failed for {number_of(ranks, 'rank')} and "
                f"{number_of(microbatches, 'microbatch')} ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(made, Program):
            raise ScheduleError(f"{name} returned a {type(made).__name__}, expected a Program")
        whole = made.num_whole_microbatches
        if (made.num_ranks, whole) != (ranks, microbatches):
            raise ScheduleError(
                f"{name} made a program for {number_of(made.num_ranks, 'rank')} and "
                f"{number_of(whole, 'microbatch')}, asked for {ranks} and {microbatches}"
            )
        _refuse_other_stages(family, made, more.get("virtual", family.default_virtual))
        return check(replace(made, name=name))

    return build


def _refuse_other_stages(family: Family, made: Program, virtual: int) -> None:
    """Refuse a program of other stages than the family says, for which models are cut."""
    name, copies = family.name, made.placement.copies
    if copies != family.copies:
        told = "with" if copies > 1 else "without"
        raise ScheduleError(
            f"{name} made a program with {number_of(copies, 'copy')} of the model, but its "
            f"arrangement, {family.arrangement.value}, has {family.copies}; register it "
            f"{told} arrangement=Arrangement.BIDIRECTIONAL (of penstock.schedule.family)"
        )
    stages, ranks = made.placement.num_model_stages, made.num_ranks
    several = family.virtuals is None
    # Where a rank holds more stages than another, no number of them per rank was to be given.
    if stages != ranks * virtual and (several or stages % ranks == 0):
        right = stages // ranks
        hint = "" if several else f"; tell @penstock.schedule({name!r}) that virtual is {right}"
        raise ScheduleError(
            f"{name} made a program of {number_of(stages, 'stage')} on "
            f"{number_of(ranks, 'rank')}, asked for {virtual} on each{hint}"
        )
