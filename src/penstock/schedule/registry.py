"""The registry of schedules: Penstock's families (``families/table.py``), and families that users
add with the decorator ``schedule`` or through the entry point group ``penstock.schedules``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.family import Arrangement, Family, refuse_sizes
from penstock.schedule.program import Program
from penstock.schedule.wording import number_of, numbers_of

__all__ = [
    "DEFAULT_MICROBATCHES", "build", "choose_program", "choose_sizes", "directions_of", "family",
    "refuse_options", "remove", "schedule", "schedules",
]  # fmt: skip

DEFAULT_MICROBATCHES = 8

Builder = TypeVar("Builder", bound=Callable[..., Program])

_SIZES = ("ranks", "microbatches", "virtual")
_log = logging.getLogger(__name__)

# Users' families, by normalized canonical name.
_ADDED: dict[str, Family] = {}


def schedules() -> tuple[Family, ...]:
    """All families: Penstock's own, followed by users' families.

    Examples:
        >>> [each.name for each in schedules()][:3]
        ['forward-only', 'gpipe', '1f1b']
    """
    _discover()
    return (*_own(), *_ADDED.values())


def family(name: str) -> Family:
    """The family called ``name``.

    Args:
        name: a family's name, or torch's class name; case, hyphens, underscores and blanks are
            ignored.

    Raises:
        ScheduleError: there is no such family, or ``name`` is not a string.

    Examples:
        >>> family("ScheduleInterleavedZeroBubble").name
        'interleaved-zb'
    """
    if not isinstance(name, str):
        raise ScheduleError(f"the schedule's name must be a string, not {name!r}")
    key = _normal(name)
    if key not in _by_name():
        _discover()
    known = _by_name()
    if key not in known:
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {known[near[0]].name!r}? The" if near else "the"
        names = ", ".join(each.name for each in schedules())
        raise ScheduleError(f"there is no schedule {name!r}; {hint} schedules are: {names}")
    return known[key]


def build(
    name: str, *, ranks: int, microbatches: int, virtual: int | None = None, **options: object
) -> Program:
    """Build the program of a schedule.

    Args:
        name: the family's name, as ``family`` takes it.
        ranks: number of ranks.
        microbatches: number of microbatches per step.
        virtual: stages per rank; None for the family's default.
        options: further arguments of the family's builder, such as ``group``.

    Returns:
        A program of computations; ``penstock.schedule.passes`` adds the rest.

    Raises:
        ScheduleError: the schedule or an option does not exist, or a number is not supported (the
            message gives supported ones).

    Examples:
        >>> program = build("1F1B", ranks=2, microbatches=2)
        >>> " ".join(map(str, program.ranks[0]))
        '0F0 0F1 0B0 0B1'
    """
    chosen = family(name)
    virtual = chosen.default_virtual if virtual is None else virtual
    refuse_sizes(chosen.name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    refuse_options(chosen, options)
    near = chosen.nearest(ranks, microbatches)
    if near != (ranks, microbatches):
        raise ScheduleError(
            f"{chosen.name}: ranks={ranks} and microbatches={microbatches} do not work, it takes "
            f"{chosen.rule}; the nearest that do are ranks={near[0]} and microbatches={near[1]}",
            parameter="ranks",
        )
    if chosen.virtuals is not None and virtual not in chosen.virtuals:
        free = ", ".join(each.name for each in schedules() if each.virtuals is None)
        raise ScheduleError(
            f"{chosen.name}: virtual={virtual} stages per rank do not work; {chosen.virtuals_text} "
            f"does, and any number does with {free}",
            parameter="virtual",
        )
    if chosen.virtuals is None or len(chosen.virtuals) > 1:
        options = {"virtual": virtual, **options}
    return chosen.builder(ranks=ranks, microbatches=microbatches, **options)


def refuse_options(chosen: Family, options: Iterable[str]) -> None:
    """Raise a ScheduleError for names that are not options of a family."""
    for option in options:
        if option not in chosen.options:
            names = ", ".join(chosen.options)
            has = f"its options are: {names}" if names else "it has none"
            raise ScheduleError(f"{chosen.name} has no option {option!r}; {has}")


def directions_of(schedule: str | Program) -> int:
    """The number of copies of the model under a schedule, given by name or as a program."""
    if isinstance(schedule, Program):
        return schedule.placement.num_directions
    return family(schedule).num_directions


def choose_program(
    schedule: str | Program,
    *,
    num_stages: int | None,
    n_microbatches: int | None,
    ranks: int | None,
    virtual: int | None,
    world: int | None,
) -> Program:
    """The program to run, of a schedule's name or given itself; given numbers determine those that
    are None, or contradict each other (a ScheduleError).

    ``virtual`` is the number of stages per rank, ``world`` that of processes (None if one process
    runs all ranks).
    """
    if isinstance(schedule, Program):
        stages = schedule.placement.num_model_stages
        for what, requested, has in (
            ("n_microbatches", n_microbatches, schedule.num_whole_microbatches),
            ("processes", world, schedule.num_ranks),
            ("stages", num_stages, stages),
            ("ranks", ranks, schedule.num_ranks),
            ("stages per rank", virtual, stages / schedule.num_ranks),
        ):
            if requested not in (None, has):
                raise ScheduleError(
                    f"{what}={requested}, but the program given as schedule has {has:g}"
                )
        return schedule
    num_ranks, virtual = choose_sizes(
        schedule,
        default_virtual=family(schedule).default_virtual,
        num_stages=num_stages,
        ranks=ranks if world is None else world,
        virtual=virtual,
    )
    microbatches = DEFAULT_MICROBATCHES if n_microbatches is None else n_microbatches
    return build(schedule, ranks=num_ranks, microbatches=microbatches, virtual=virtual)


def choose_sizes(
    who: str,
    *,
    default_virtual: int,
    num_stages: int | None,
    ranks: int | None,
    virtual: int | None,
) -> tuple[int, int]:
    """The numbers of ranks, and of stages per rank, that follow from those that are not None.

    A ScheduleError, in the name of ``who``, if they contradict each other or are incomplete.
    """
    if virtual is None:
        virtual = default_virtual
        if num_stages is not None and ranks and num_stages % ranks == 0:
            virtual = num_stages // ranks
    if ranks is None:
        if num_stages is None:
            raise ScheduleError("say on how many ranks to run: pass ranks=, or split=")
        ranks = max(1, num_stages // max(1, virtual))
    if num_stages not in (None, ranks * virtual):
        raise ScheduleError(
            f"{number_of(num_stages or 0, 'stage')}, but {who} on {number_of(ranks, 'rank')} with "
            f"{virtual} per rank needs {ranks * virtual}; change split, ranks or virtual"
        )
    return ranks, virtual


def schedule(
    name: str,
    *,
    virtual: int | None = None,
    arrangement: Arrangement | None = None,
    source: str = "",
) -> Callable[[Builder], Builder]:
    """Make the function below a schedule that ``build``, ``Pipeline`` and the command know.

    The function takes ``ranks`` and ``microbatches`` by name, and ``virtual`` if it supports
    several numbers of stages per rank. Its other parameters are the schedule's options, and the
    first line of its docstring is the schedule's summary. ``build`` checks its programs, and turns
    its exceptions into ScheduleErrors. For a second name, decorate the function twice.

    Args:
        name: the schedule's name; registering it again replaces it.
        virtual: the stages per rank or, if the function takes ``virtual``, their default; None for
            the function's own default, else 2 if it takes ``virtual``, else 1.
        arrangement: the placement of stages on ranks; None for linear, or looped if there are
            several per rank. Two copies of the model need ``Arrangement.BIDIRECTIONAL`` here.
        source: the publication of the method.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ScheduleError: the name is empty or taken by Penstock, or ``virtual`` is not a positive
            integer.

    Examples:
        >>> from penstock.schedule.text import parse_csv
        >>> @schedule("doctest-one-rank")
        ... def one_rank(*, ranks, microbatches):
        ...     '''Forward and backward of each microbatch in turn.'''
        ...     return parse_csv(",".join(f"0F{m},0B{m}" for m in range(microbatches)))
        >>> " ".join(map(str, build("doctest-one-rank", ranks=1, microbatches=2).ranks[0]))
        '0F0 0B0 0F1 0B1'
        >>> remove("doctest-one-rank")
    """
    is_name = isinstance(name, str) and _normal(name)
    if not is_name or _by_name().get(_normal(name)) in _own():
        raise ScheduleError(
            f"a schedule can't be called {name!r}: give a name that Penstock has not taken, as in "
            "@penstock.schedule('mine')"
        )

    def register(builder: Builder) -> Builder:
        parameters = inspect.signature(builder).parameters
        several = parameters.get("virtual")
        default = 1 if several is None else several.default
        default = 2 if default in (None, inspect.Parameter.empty) else default
        usual = default if virtual is None else virtual
        refuse_sizes(f"schedule {name!r}", virtual=usual)
        doc = (inspect.getdoc(builder) or "").strip()
        new = Family(
            name=name,
            builder=builder,
            arrangement=arrangement
            or (Arrangement.LOOPED if several or usual > 1 else Arrangement.LINEAR),
            default_virtual=usual,
            virtuals=None if several else (usual,),
            summary=doc.partition("\n")[0].rstrip("."),
            source=source,
            doc=doc,
            options={
                key: ""
                for key, each in parameters.items()
                if key not in _SIZES and each.kind is not each.VAR_KEYWORD
            },
        )
        _ADDED[_normal(name)] = replace(new, builder=_verified(new))
        return builder

    return register


def remove(name: str) -> None:
    """Remove a user's family; does nothing if there is none."""
    _ADDED.pop(_normal(name), None)


def _normal(name: str) -> str:
    """``name`` without case, separators and torch's prefix."""
    plain = "".join(c for c in name.lower() if c not in "-_ ")
    return plain.removeprefix("schedule")


@cache
def _own() -> tuple[Family, ...]:
    """Penstock's own families; imported lazily, since they are many modules."""
    from penstock.schedule.families.table import FAMILIES

    return FAMILIES


def _by_name() -> dict[str, Family]:
    """All known families by normalized name and alias."""
    every = (*_own(), *_ADDED.values())
    return {_normal(name): each for each in every for name in (each.name, *each.aliases)}


@cache
def _discover() -> None:
    """Import the families of installed packages, once; the decorator registers them."""
    for entry in entry_points(group="penstock.schedules"):
        try:
            entry.load()
        except Exception as error:
            # A broken package must not disable the other schedules.
            _log.warning("schedule %s of %s: %r", entry.name, entry.value, error)


def _verified(family: Family) -> Callable[..., Program]:
    """The family's builder, with checks that its programs are valid and of the requested sizes."""
    name = family.name

    @functools.wraps(family.builder)
    def build(*, ranks: int, microbatches: int, **more: Any) -> Program:
        try:
            made: object = family.builder(ranks=ranks, microbatches=microbatches, **more)
            if not isinstance(made, Program):
                raise ScheduleError(f"{name} returned a {type(made).__name__}, expected a Program")
            stages = made.placement.num_model_stages
            wanted = ranks * more.get("virtual", family.default_virtual)
            # Without ``virtual``, ranks may hold different numbers of stages.
            if "virtual" not in more and stages % ranks:
                wanted = stages
            got = (made.num_ranks, made.num_whole_microbatches, stages, directions_of(made))
            requested = (ranks, microbatches, wanted, family.num_directions)
            if got != requested:
                raise ScheduleError(
                    f"{name} made a program of {got} ranks, microbatches, stages and copies of the "
                    f"model, expected {requested}; virtual= and arrangement= of @penstock.schedule "
                    "say what it makes"
                )
            return check(replace(made, name=name))
        except (PenstockError, MemoryError):
            raise
        except Exception as error:  # whatever the user's function raises
            sizes = numbers_of(rank=ranks, microbatch=microbatches)
            fault = f"{type(error).__name__}: {error}"
            raise ScheduleError(f"{name}: its function failed for {sizes} ({fault})") from error

    return build
