"""The registry of schedules: Penstock's families, and families added by users.

Penstock's own are the rows of ``penstock.schedule.families.table``. Users add theirs with the
decorator ``schedule``, or through the entry point group ``penstock.schedules``; their programs are
checked when they are built.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.family import Arrangement, Family, refuse_sizes
from penstock.schedule.messages import number_of, numbers_of
from penstock.schedule.program import Program

__all__ = [
    "DEFAULT_MICROBATCHES",
    "build",
    "choose_program",
    "directions_of",
    "family",
    "refuse_options",
    "remove",
    "schedule",
    "schedules",
]

DEFAULT_MICROBATCHES = 8

Builder = TypeVar("Builder", bound=Callable[..., Program])

_ENTRY_POINTS = "penstock.schedules"
_GIVEN = ("ranks", "microbatches", "virtual")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_log = logging.getLogger(__name__)

# Users' families, by normalized canonical name.
_ADDED: dict[str, Family] = {}


def schedules() -> tuple[Family, ...]:
    """All families: Penstock's own, followed by users' families.

    Example:
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

    Example:
        >>> family("ScheduleInterleavedZeroBubble").name
        'interleaved-zb'
    """
    if not isinstance(name, str):
        raise ScheduleError(f"a schedule is asked for by its name, not by {name!r}")
    found = _by_name().get(_normal(name))
    if found is None:
        faults = "".join(f"; {fault}" for fault in _discover())
        known = _by_name()
        found = known.get(_normal(name))
    if found is None:
        near = get_close_matches(_normal(name), known, n=1)
        hint = f"did you mean {known[near[0]].name!r}? The" if near else "the"
        names = ", ".join(each.name for each in schedules())
        raise ScheduleError(f"there is no schedule {name!r}; {hint} schedules are: {names}{faults}")
    return found


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

    Example:
        >>> program = build("1F1B", ranks=2, microbatches=2)
        >>> " ".join(map(str, program.ranks[0]))
        '0F0 0F1 0B0 0B1'
    """
    chosen = family(name)
    virtual = chosen.default_virtual if virtual is None else virtual
    refuse_sizes(chosen.name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    refuse_options(chosen, options)
    if not chosen.works(ranks=ranks, microbatches=microbatches):
        near_ranks, near_microbatches = chosen.nearest(ranks, microbatches)
        raise ScheduleError(
            f"{chosen.name}: ranks={ranks} and microbatches={microbatches} do not work, it takes "
            f"{chosen.rule}; the nearest that do are ranks={near_ranks} and "
            f"microbatches={near_microbatches}",
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
        if not chosen.takes_option(option):
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
    """Choose the program to run; given numbers determine the missing ones (None).

    Args:
        schedule: a schedule's name, or the program itself.
        num_stages: number of stages of the model.
        n_microbatches: microbatches per step.
        ranks: number of ranks.
        virtual: stages per rank.
        world: number of processes; None if one process runs all ranks.

    Raises:
        ScheduleError: the numbers contradict each other or are incomplete.
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
    num_ranks = ranks if world is None else world
    if virtual is None:
        virtual = family(schedule).default_virtual
        if num_stages is not None and num_ranks and num_stages % num_ranks == 0:
            virtual = num_stages // num_ranks
    if num_ranks is None:
        if num_stages is None:
            raise ScheduleError("say on how many ranks to run: pass ranks=, or split=")
        num_ranks = max(1, num_stages // virtual)
    if num_stages not in (None, num_ranks * virtual):
        raise ScheduleError(
            f"{number_of(num_stages or 0, 'stage')}, but {schedule} on "
            f"{number_of(num_ranks, 'rank')} with {virtual} per rank needs {num_ranks * virtual}; "
            "change split, ranks or virtual"
        )
    return build(
        schedule,
        ranks=num_ranks,
        microbatches=DEFAULT_MICROBATCHES if n_microbatches is None else n_microbatches,
        virtual=virtual,
    )


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

    The function takes ``ranks`` and ``microbatches`` by name, and ``virtual`` if it supports
    several numbers of stages per rank. Its other parameters are the schedule's options; ``**more``
    accepts any option. ``build`` checks its programs, and turns its exceptions into ScheduleErrors.

    Args:
        name: the schedule's name; registering it again replaces it.
        virtual: the stages per rank or, if the function takes ``virtual``, their default; None for
            the function's own default, or 1.
        arrangement: the placement of stages on ranks; None for linear, or looped if there are
            several per rank. Two copies of the model need ``Arrangement.BIDIRECTIONAL`` here.
        summary: a one-line summary; None for the first line of the docstring.
        source: the publication of the method.
        aliases: other names.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ScheduleError: the name is empty or taken by Penstock, an argument is of a wrong type, or
            the decorated object is not a function of ``ranks`` and ``microbatches``.

    Example:
        >>> from penstock.schedule.text import parse_csv
        >>> @schedule("doctest-one-rank")
        ... def one_rank(*, ranks, microbatches):
        ...     '''Forward and backward of each microbatch in turn.'''
        ...     return parse_csv(",".join(f"0F{m},0B{m}" for m in range(microbatches)))
        >>> " ".join(map(str, build("doctest-one-rank", ranks=1, microbatches=2).ranks[0]))
        '0F0 0B0 0F1 0B1'
        >>> remove("doctest-one-rank")
    """
    _refuse_no_name(name)
    if isinstance(aliases, str):
        raise ScheduleError(f"schedule {name!r}: aliases is a tuple of names, as in ({aliases!r},)")
    if not isinstance(arrangement, Arrangement | None):
        raise ScheduleError(
            f"schedule {name!r}: arrangement={arrangement!r} must be one of "
            f"{', '.join(map(str, Arrangement))} (of penstock.schedule.family)"
        )

    def register(builder: Builder) -> Builder:
        parameters = _parameters(name, builder)
        by_name = [key for key, each in parameters.items() if each.kind in _BY_NAME]
        several = "virtual" in by_name
        usual = virtual
        if usual is None:
            default = parameters["virtual"].default if several else 1
            usual = 2 if default in (None, inspect.Parameter.empty) else default
        refuse_sizes(f"schedule {name!r}", virtual=usual)
        laid = Arrangement.LOOPED if several or usual > 1 else Arrangement.LINEAR
        doc = (inspect.getdoc(builder) or "").strip()
        new = Family(
            name=name,
            builder=builder,
            arrangement=laid if arrangement is None else arrangement,
            default_virtual=usual,
            virtuals=None if several else (usual,),
            summary=doc.partition("\n")[0].rstrip(".") if summary is None else summary,
            source=source,
            aliases=aliases,
            doc=doc,
            options={each: "" for each in by_name if each not in _GIVEN},
            any_option=any(each.kind is each.VAR_KEYWORD for each in parameters.values()),
        )
        _add(replace(new, builder=_verified(new)))
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


def _add(new: Family) -> None:
    """Add a family, or replace an added one of the same name."""
    key, known = _normal(new.name), _by_name()
    for name in (new.name, *new.aliases):
        _refuse_no_name(name)
        holder = known.get(_normal(name))
        if holder is not None and (holder in _own() or _normal(holder.name) != key):
            raise ScheduleError(f"a schedule can't be called {name!r}: Penstock has one already")
    _ADDED[key] = new


def _refuse_no_name(name: object) -> None:
    if not (isinstance(name, str) and _normal(name)):
        raise ScheduleError(
            f"a schedule can't be called {name!r}; give it a name, as in @penstock.schedule('mine')"
        )


@cache
def _discover() -> tuple[str, ...]:
    """Import the families of installed packages once; returns the errors of failed imports."""
    faults = []
    for entry in entry_points(group=_ENTRY_POINTS):
        try:
            found = entry.load()
            # The decorator may already have registered it.
            known = (getattr(each.builder, "__wrapped__", None) for each in _ADDED.values())
            if callable(found) and not any(each is found for each in known):
                schedule(entry.name)(found)
        except Exception as error:
            # A broken package must not disable the other schedules.
            _log.warning("schedule %s of %s: %r", entry.name, entry.value, error)
            faults.append(f"{entry.name!r} ({entry.value}) can't be loaded: {error!r}")
    return tuple(faults)


def _parameters(name: str, builder: object) -> Mapping[str, inspect.Parameter]:
    """The parameters of a decorated function; refuses functions that ``build`` can't call."""
    found: dict[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):
        found = dict(inspect.signature(builder).parameters)  # type: ignore[arg-type]
    missing = [n for n in _GIVEN[:2] if n not in found or found[n].kind not in _BY_NAME]
    if missing:
        raise ScheduleError(
            f"schedule {name!r}: {builder!r} takes no {' and no '.join(missing)}; put "
            f"@penstock.schedule({name!r}) above a function that takes ranks and microbatches by "
            "name, and returns a Program"
        )
    if "name" in found:
        raise ScheduleError(f"schedule {name!r}: an option can't be called 'name', as build's own")
    return found


def _verified(family: Family) -> Callable[..., Program]:
    """The family's builder, with checks that its programs are valid and of the requested sizes."""
    name = family.name

    @functools.wraps(family.builder)
    def build(*, ranks: int, microbatches: int, **more: Any) -> Program:
        try:
            made: object = family.builder(ranks=ranks, microbatches=microbatches, **more)
        except (PenstockError, MemoryError):
            raise
        except Exception as error:  # whatever the user's function raises
            raise ScheduleError(
                f"{name}: its function failed for {numbers_of(rank=ranks, microbatch=microbatches)}"
                f" ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(made, Program):
            raise ScheduleError(f"{name} returned a {type(made).__name__}, expected a Program")
        placement, wanted = made.placement, ranks * more.get("virtual", family.default_virtual)
        stages, directions = placement.num_model_stages, placement.num_directions
        # Without ``virtual``, ranks may hold different numbers of stages.
        if "virtual" not in more and stages % ranks:
            wanted = stages
        got = _sizes(made.num_ranks, made.num_whole_microbatches, stages, directions)
        requested = _sizes(ranks, microbatches, wanted, family.num_directions)
        if got != requested:
            raise ScheduleError(
                f"{name} made a program of {got}, asked for {requested}; virtual= and arrangement= "
                f"of @penstock.schedule({name!r}) say what it makes (Arrangement.BIDIRECTIONAL: 2 "
                "copies)"
            )
        return check(replace(made, name=name))

    return build


def _sizes(ranks: int, microbatches: int, stages: int, directions: int) -> str:
    sizes = numbers_of(rank=ranks, microbatch=microbatches, stage=stages)
    return f"{sizes} in {number_of(directions, 'copy')} of the model"
