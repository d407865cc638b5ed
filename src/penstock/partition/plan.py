"""Plans: the modules of each stage, as data for a file.

    [[stage]]                                     stage 0   transformer.wte, transformer.h.0
    modules = ["transformer.wte", ...]            stage 1   transformer.h.1, ..., lm_head

A plan names modules and holds no tensors: `penstock split` writes it on one machine, and every rank
reads it. This module imports no torch and chooses no cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import PartitionError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Plan", "abbreviate", "prefixes", "runs_of_names", "split_by_counts", "toml_path"]

FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The modules of each stage.

    Args:
        stages: per stage the qualified names of its modules, in execution order. A parameter or
            buffer outside these modules is listed like a module.
        model: the class name of the model; empty if unknown.
        made: the origin of the plan, as free text.

    Raises:
        PartitionError: there is no stage, an empty stage, or a name given twice.

    Examples:
        >>> plan = Plan(stages=(("embed", "layers.0"), ("layers.1", "head")), model="Transformer")
        >>> plan.num_stages
        2
        >>> plan.stage_of("layers.1.norm.weight")
        1
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    stages: tuple[tuple[str, ...], ...]
    model: str = ""
    made: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(tuple(names) for names in self.stages))
        if not self.stages:
            raise PartitionError("the plan has no stages; name the modules of each")
        stage_of: dict[str, int] = {}
        for stage, names in enumerate(self.stages):
            if not names:
                raise PartitionError(f"stage {stage} of the plan is empty; name its modules")
            for name in names:
                if name in stage_of:
                    raise PartitionError(
                        f"the plan names {name} in stage {stage_of[name]} and again in stage "
                        f"{stage}; name each module once"
                    )
                stage_of[name] = stage
        for name, parent in ((each, prefix) for each in stage_of for prefix in prefixes(each)):
            if parent in stage_of:
                raise PartitionError(
                    f"the plan names {name} (stage {stage_of[name]}) and {parent} (stage "
                    f"{stage_of[parent]}), which holds it; name either"
                )

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def stage_of(self, name: str) -> int | None:
        """The stage that holds a module, parameter or buffer, by its qualified name in the plain
        model; None if no stage holds it."""
        wanted = {name, *prefixes(name)}
        holders = (i for i, names in enumerate(self.stages) if not wanted.isdisjoint(names))
        return next(holders, None)

    def check(self, model: nn.Module) -> None:
        """Check the plan against a model: every name exists, every parameter is in a stage.

        For a parameter with several names (tied weights) one name suffices. Modules without
        parameters may be omitted.

        Args:
            model: the plain model, on any device.

        Raises:
            PartitionError: the model lacks a name, or no stage holds a parameter.

        Examples:
            >>> from torch import nn
            >>> Plan(stages=(("0",), ("1",))).check(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        """
        known = {name for name, _ in model.named_modules(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            known.add(name)
            names.setdefault(id(param), []).append(name)
        unknown = [name for stage in self.stages for name in stage if name not in known]
        missing = [
            each[0] for each in names.values() if all(self.stage_of(name) is None for name in each)
        ]
        faults = []
        if unknown:
            faults.append(f"it names {abbreviate(unknown)}, which the model lacks")
        if missing:
            faults.append(f"no stage holds the parameters {abbreviate(missing)}")
        if faults:
            name = type(model).__name__
            made = f", made for a {self.model}," if self.model not in ("", name) else ""
            raise PartitionError(
                f"the plan{made} does not fit this {name}: {'; '.join(faults)}; make it "
                "anew with `penstock split`, or correct its names"
            )

    # --- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan to a ``.toml`` file; another suffix raises a PartitionError."""
        import tomli_w  # lazy, as is tomllib: most processes read and write no plan

        text = tomli_w.dumps(self.to_dict(), multiline_strings=False)
        toml_path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a ``.toml`` file.

        Raises:
            PartitionError: there is no such file, or it holds no plan.
        """
        import tomllib

        path = toml_path(path)
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        except FileNotFoundError as error:
            raise PartitionError(f"{path}: no such plan; `penstock split -o` writes one") from error
        except (PartitionError, OSError) as error:
            raise PartitionError(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise PartitionError(f"{path}: not TOML: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, in the form of a file."""
        stages = [{"modules": list(names)} for names in self.stages]
        return {"penstock_plan": FORMAT, "model": self.model, "made": self.made, "stage": stages}

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Build a plan from the values of ``to_dict``.

        Raises:
            PartitionError: an entry is missing, unknown, or of another type.
        """
        file = _table(data, "the plan", penstock_plan=int, model=str, made=str, stage=list)
        version = file.pop("penstock_plan", FORMAT)
        if version != FORMAT:
            raise PartitionError(
                f"the plan has format {version}, this version reads {FORMAT}; make it anew"
            )
        stages = []
        for index, item in enumerate(file.pop("stage", ())):
            where = f"stage {index} of the plan"
            names = _table(item, where, modules=list).get("modules", [])
            if not all(isinstance(name, str) for name in names):
                raise PartitionError(f"the modules of {where} are {names!r}, expected names")
            stages.append(tuple(names))
        return cls(stages=tuple(stages), **file)


def _table(data: object, where: str, **types: type) -> dict[str, Any]:
    """The values of a table, each of its type; refuses unknown keys."""
    if not isinstance(data, Mapping):
        raise PartitionError(f"{where} is {data!r}, expected a table")
    unknown = sorted(set(data) - set(types))
    if unknown:
        raise PartitionError(f"{where} has the unknown keys {unknown}, known are {sorted(types)}")
    for key, value in data.items():
        if type(value) is not types[key]:  # True is no int here
            expected = types[key].__name__
            raise PartitionError(f"{key} of {where} is {value!r}, expected a {expected}")
    return dict(data)


def toml_path(path: str | Path) -> Path:
    """Check that a path has the suffix ``.toml``."""
    if Path(path).suffix != ".toml":
        raise PartitionError(f"{path}: a plan is a .toml file; name it so")
    return Path(path)


# --- names --------------------------------------------------------------------------------------


def prefixes(name: str) -> Iterator[str]:
    """The qualified names of a name's parent modules: ``a.b`` and ``a`` for ``a.b.c``."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def split_by_counts(items: Iterable[T], counts: Sequence[int]) -> list[list[T]]:
    """Split items into consecutive groups of the given sizes.

    Examples:
        >>> split_by_counts("abcde", [2, 3])
        [['a', 'b'], ['c', 'd', 'e']]
    """
    left = iter(items)
    return [list(islice(left, count)) for count in counts]


def runs_of_names(names: Sequence[str]) -> list[str]:
    """Names, with numbered runs shortened to ranges: ``h.0, h.1, h.2`` to ``h.0-2``."""
    runs: list[list[str]] = []
    for name in names:
        prefix, dot, number = name.rpartition(".")
        before = f"{prefix}{dot}{int(number) - 1}" if number.isdecimal() else ""
        if runs and runs[-1][-1] == before:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}" for run in runs]


def abbreviate(names: Sequence[str], most: int = 6) -> str:
    """The first names, and a count of the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
