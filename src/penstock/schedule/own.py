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

from penstock.errors import ScheduleError
from penstock.schedule.catalog import add, refuse_no_name
from penstock.schedule.check import check
from penstock.schedule.family import Arrangement, Family
from penstock.schedule.program import Program
from penstock.schedule.words import number_of

__all__ = ["schedule"]

Builder = TypeVar("Builder", bound=Callable[..., Program])

_GIVEN = ("ranks", "microbatches", "virtual")


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
    several numbers of stages per rank; what else it takes are the schedule's options.

    Args:
        name: the schedule's name; registering it again replaces it.
        virtual: the stages per rank that it makes or, where the function takes ``virtual``, makes
            by default; None for the function's own default, or 1.
        arrangement: how it lays stages on ranks; only shown. None for linear, or looped where
            there are several stages per rank.
        summary: one line for people; None for the first line of the docstring.
        source: where the method was published.
        aliases: other names.

    Returns:
        A decorator that gives the function back as it is.

    Raises:
        ScheduleError: a name that Penstock's own schedules have, or none; or what is decorated is
            no function, or one that takes no ``ranks`` or no ``microbatches``.

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

    def register(builder: Builder) -> Builder:
        parameters = _parameters(name, builder)
        missing = [each for each in _GIVEN[:2] if each not in parameters]
        if missing:
            raise ScheduleError(
                f"schedule {name!r}: its function must take ranks and microbatches by name, and "
                f"takes no {' and no '.join(missing)}"
            )
        several = "virtual" in parameters
        usual = virtual
        if usual is None:
            own = parameters["virtual"].default if several else 1
            usual = own if isinstance(own, int) else 2
        laid = Arrangement.LOOPED if several or usual > 1 else Arrangement.LINEAR
        doc = (inspect.getdoc(builder) or "").strip()
        text = doc.partition("\n")[0].rstrip(".")
        add(
            Family(
                name=name,
                builder=_verified(name, builder),
                arrangement=laid if arrangement is None else arrangement,
                default_virtual=usual,
                virtuals=None if several else (usual,),
                summary=text if summary is None else summary,
                source=source,
                aliases=aliases,
                doc=doc,
                options={each: "" for each in parameters if each not in _GIVEN},
            )
        )
        return builder

    return register


def _parameters(name: str, builder: object) -> Mapping[str, inspect.Parameter]:
    """What the decorated function takes."""
    try:
        return inspect.signature(builder).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            f"schedule {name!r}: {builder!r} is no function whose parameters can be read; put "
            f"@penstock.schedule({name!r}) above a function of ranks and microbatches that returns "
            "a Program"
        ) from error


def _verified(name: str, builder: Callable[..., Program]) -> Callable[..., Program]:
    """``builder``, whose programs are those that were asked for, and right."""

    @functools.wraps(builder)
    def build(*, ranks: int, microbatches: int, **more: Any) -> Program:
        made: object = builder(ranks=ranks, microbatches=microbatches, **more)
        if not isinstance(made, Program):
            raise ScheduleError(f"{name} returned a {type(made).__name__}, expected a Program")
        whole = made.num_whole_microbatches
        if (made.num_ranks, whole) != (ranks, microbatches):
            raise ScheduleError(
                f"{name} made a program for {number_of(made.num_ranks, 'rank')} and "
                f"{number_of(whole, 'microbatch')}, asked for {ranks} and {microbatches}"
            )
        return check(replace(made, name=name))

    return build
