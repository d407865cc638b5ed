"""Plans: the modules of each stage, as data for a file.

    [[stage]]                                     stage 0   transformer.wte, transformer.h.0
    modules = ["transformer.wte", ...]            stage 1   transformer.h.1, ..., lm_head

A plan names modules and holds no tensors: `penstock split` writes it on one machine, and every rank
reads it. This module imports no torch and chooses no cuts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import PartitionError

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Plan", "StageCosts", "abbreviate", "did_you_mean", "field_kinds", "prefixes", "read_document",
    "read_file", "read_table", "read_value", "runs_of_names", "split_by_counts",
    "toml_path",
]  # fmt: skip

FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of one stage per microbatch.

    Args:
        time_s: the time of its forward and backward, in seconds.
        parameters: the number of elements in its parameters.
        parameter_bytes: the bytes of its parameters.
        activation_bytes: the bytes saved per microbatch from forward to backward.
        sent_bytes: the bytes sent to later stages; 0 for the last.
        sends: descriptions of the sent tensors, as ``"float32[2,128,64]"``.
    """

    time_s: float
    parameters: int
    parameter_bytes: int
    activation_bytes: int
    sent_bytes: int = 0
    sends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The modules of each stage.

    Args:
        stages: per stage the qualified names of its modules, in execution order. A parameter or
            buffer outside these modules is listed like a module.
        model: the class name of the model; empty if unknown.
        made: the origin of the plan, as free text.
        costs: the costs of each stage; empty if unknown.

    Raises:
        PartitionError: there is no stage, an empty stage, a name given twice, or the number of
            costs is not the number of stages.

    Examples:
        >>> plan = Plan(stages=(("embed", "layers.0"), ("layers.1", "head")), model="Transformer")
        >>> plan.num_stages
        2
        >>> plan.stage_of("layers.1.norm.weight")
        1
        >>> Plan.from_toml(plan.to_toml()) == plan
        True
    """

    stages: tuple[tuple[str, ...], ...]
    model: str = ""
    made: str = ""
    costs: tuple[StageCosts, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(tuple(names) for names in self.stages))
        object.__setattr__(self, "costs", tuple(self.costs))
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
        if self.costs and len(self.costs) != len(self.stages):
            raise PartitionError(
                f"the plan has {len(self.stages)} stages, but the costs of {len(self.costs)}"
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
        toml_path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a ``.toml`` file.

        Raises:
            PartitionError: there is no such file, or it holds no plan.
        """
        return read_file(toml_path(path), cls.from_toml, "plan; `penstock split -o` writes one")

    def to_toml(self) -> str:
        """The plan as TOML."""
        import tomli_w  # lazy, as is tomllib: most processes read and write no plan

        return tomli_w.dumps(self.to_dict(), multiline_strings=False)

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Parse the text of ``to_toml``.

        Raises:
            PartitionError: the text is not TOML, or no plan.
        """
        import tomllib

        try:
            return cls.from_dict(tomllib.loads(text))
        except (ValueError, RecursionError) as error:
            raise PartitionError(f"not TOML: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, in the form of a file."""
        stages: list[dict[str, Any]] = [{"modules": list(names)} for names in self.stages]
        for stage, costs in zip(stages, self.costs, strict=False):
            stage |= dataclasses.asdict(costs) | {"sends": list(costs.sends)}
        return {"penstock_plan": FORMAT, "model": self.model, "made": self.made, "stage": stages}

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Build a plan from the values of ``to_dict``.

        Raises:
            PartitionError: an entry is missing, unknown, or of another type.
        """
        kinds = {"model": "str", "made": "str", "stage": "list"}
        file = read_document(data, "penstock_plan", FORMAT, kinds, default=FORMAT)
        stages, costs = [], []
        for index, item in enumerate(file.pop("stage", ())):
            where = f"stage {index} of the plan"
            kinds = {"modules": "tuple[str, ...]", **field_kinds(StageCosts)}
            table = read_table(item, where, kinds)
            stages.append(table.pop("modules", ()))
            try:
                costs += [StageCosts(**table)] if table else []
            except TypeError as error:
                raise PartitionError(f"the costs of {where} are incomplete: {error}") from error
        return cls(stages=tuple(stages), costs=tuple(costs), **file)


def toml_path(path: str | Path) -> Path:
    """Check that a path has the suffix ``.toml``."""
    if Path(path).suffix != ".toml":
        raise PartitionError(f"{path}: a plan is a .toml file; name it so")
    return Path(path)


# --- reading files ------------------------------------------------------------------------------


def read_file(path: Path, read: Callable[[str], T], what: str) -> T:
    """Apply ``read`` to the text of a file; ``what`` is its kind and origin, if it is missing."""
    try:
        return read(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise PartitionError(f"{path}: no such {what}") from error
    except (PartitionError, OSError, UnicodeDecodeError) as error:
        raise PartitionError(f"{path}: {error}") from error


def read_document(
    data: object, key: str, version: int, kinds: Mapping[str, str], default: int | None = None
) -> dict[str, Any]:
    """The values of a file by key, as of ``read_table``, whose version stands under ``key``."""
    where = f"the {key.removeprefix('penstock_')}"
    file = read_table(data, where, {key: "version", **kinds})
    found = file.pop(key, default)
    if found != version or isinstance(found, bool):
        raise PartitionError(
            f"{where} has format {found!r}, this version reads {version}; make it anew"
        )
    return file


def read_table(data: object, where: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The values of a table, each checked by its kind; refuses unknown keys."""
    if not isinstance(data, Mapping):
        raise PartitionError(f"{where} is {data!r}, expected a table")
    odd = sorted(set(data) - set(kinds))
    if odd:
        raise PartitionError(f"{where} has the unknown keys {odd}, known are {sorted(kinds)}")
    return {key: read_value(data[key], kinds[key], f"{key} of {where}") for key in data}


def read_value(value: Any, kind: str, what: str) -> Any:
    """``value`` as a value of the kind ``"str"``, ``"tuple[str, ...]"``, ``"list"``, ``"version"``
    (unchecked), or else a finite number ≥ 0."""
    is_list = isinstance(value, (list, tuple))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    expected, is_fine = {
        "version": ("", True),
        "str": ("a string", isinstance(value, str)),
        "list": ("a list of tables", is_list),
        "tuple[str, ...]": ("a list of names", is_list and all(isinstance(v, str) for v in value)),
    }.get(kind, ("a number ≥ 0", is_number and 0 <= value < float("inf")))
    if not is_fine:
        raise PartitionError(f"{what} is {value!r}, expected {expected}")
    return tuple(value) if is_list else value


def field_kinds(cls: type[Any]) -> dict[str, str]:
    """The kinds of a dataclass's fields, as ``read_table`` takes them."""
    return {field.name: str(field.type) for field in dataclasses.fields(cls)}


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an error about an unknown name; empty without a similar known name.

    Examples:
        >>> did_you_mean("lama", ["llama", "gpt2"])
        ', did you mean llama?'
    """
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    return f", did you mean {' or '.join(close)}?" if close else ""
