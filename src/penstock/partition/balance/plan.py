"""Which modules make which stage, as data that can be kept in a file.

    [[stage]]                                     stage 0   transformer.wte, transformer.h.0
    modules = ["transformer.wte", ...]            stage 1   transformer.h.1, ..., lm_head

A plan names modules and knows no tensors: it is written on a laptop and taken by every rank. It
does not know how costs are measured, how cuts are chosen, or how a model is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import PartitionError
from penstock.partition.balance import documents

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Plan", "StageCosts", "dealt", "prefixes", "shortened"]

FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What one stage costs per microbatch.

    Args:
        time_s: its forward and backward, in seconds.
        parameters: how many numbers its parameters hold.
        parameter_bytes: the bytes of its parameters.
        activation_bytes: what is kept of one microbatch from forward to backward.
        sent_bytes: what crosses to later stages; 0 for the last.
        sends: the tensors that cross, as ``"float32[2,128,64]"``.
    """

    time_s: float
    parameters: int
    parameter_bytes: int
    activation_bytes: int
    sent_bytes: int = 0
    sends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which modules make which stage.

    Args:
        stages: per stage the qualified names of its modules, in the order in which they run. A
            parameter or buffer that a module of no stage holds by itself is named like a module.
        model: the class name of the model that it was made for; empty where unknown.
        made: how it was made, for people to read.
        costs: per stage what it costs; empty where unknown.

    Raises:
        PartitionError: there is no stage, an empty one, a name that stands twice, or not one cost
            per stage.

    Example:
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
        holder: dict[str, int] = {}
        for stage, names in enumerate(self.stages):
            if not names:
                raise PartitionError(f"stage {stage} of the plan is empty; name its modules")
            for name in names:
                if name in holder:
                    raise PartitionError(
                        f"the plan names {name} in stage {holder[name]} and again in stage "
                        f"{stage}; name each module once"
                    )
                holder[name] = stage
        for name in holder:
            above = next((prefix for prefix in prefixes(name) if prefix in holder), None)
            if above is not None:
                raise PartitionError(
                    f"the plan names {name} (stage {holder[name]}) and {above} (stage "
                    f"{holder[above]}), which holds it; name either"
                )
        if self.costs and len(self.costs) != len(self.stages):
            raise PartitionError(
                f"the plan has {len(self.stages)} stages, but the costs of {len(self.costs)}"
            )

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    def stage_of(self, name: str) -> int | None:
        """The stage that holds a module, parameter or buffer; None where none does.

        Args:
            name: its qualified name in the plain model.
        """
        wanted = {name, *prefixes(name)}
        for stage, names in enumerate(self.stages):
            if not wanted.isdisjoint(names):
                return stage
        return None

    def check(self, model: nn.Module) -> None:
        """Hold the plan against a model: each name is there, each parameter in one stage.

        A parameter under several names (tied weights) is taken care of where one of its names
        is. Modules without parameters may be left out.

        Args:
            model: the plain model, on any device.

        Raises:
            PartitionError: names that the model lacks, or parameters that no stage holds.

        Example:
            >>> from torch import nn
            >>> Plan(stages=(("0",), ("1",))).check(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        """
        known = {name for name, _ in model.named_modules(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        held: dict[int, bool] = {}
        first_name: dict[int, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            known.add(name)
            first_name.setdefault(id(param), name)
            held[id(param)] = held.get(id(param), False) or self.stage_of(name) is not None
        unknown = [name for names in self.stages for name in names if name not in known]
        left = [first_name[key] for key, is_held in held.items() if not is_held]
        if unknown or left:
            raise PartitionError(self._misfit(type(model).__name__, unknown, left))

    def _misfit(self, model_name: str, unknown: Sequence[str], left: Sequence[str]) -> str:
        parts = []
        if unknown:
            parts.append(f"it names {shortened(unknown)}, which the model lacks")
        if left:
            parts.append(f"no stage holds the parameters {shortened(left)}")
        made_for = f" for a {self.model}" if self.model and self.model != model_name else ""
        return (
            f"the plan, made{made_for or ' elsewhere'}, does not fit this {model_name}: "
            f"{'; '.join(parts)}; make it anew with `penstock split`, or mend its names"
        )

    # --- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan to a ``.toml`` or ``.json`` file.

        Args:
            path: where to; its suffix says in which form.

        Raises:
            PartitionError: the suffix is another one.
        """
        path = Path(path)
        write = {".toml": self.to_toml, ".json": self.to_json}.get(path.suffix)
        if write is None:
            raise other_suffix(path)
        path.write_text(write(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a ``.toml`` or ``.json`` file.

        Args:
            path: where from; its suffix says in which form.

        Raises:
            PartitionError: there is no such file, or it holds no plan.
        """
        path = Path(path)
        read = {".toml": cls.from_toml, ".json": cls.from_json}.get(path.suffix)
        if read is None:
            raise other_suffix(path)
        try:
            return documents.load(path, read)
        except FileNotFoundError as error:
            raise PartitionError(f"{path}: no such plan; `penstock split -o` writes one") from error

    def to_toml(self) -> str:
        """The plan as TOML."""
        return documents.write_toml(self.to_dict())

    def to_json(self) -> str:
        """The plan as JSON."""
        return documents.write_json(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """The plan that ``to_toml`` wrote.

        Raises:
            PartitionError: it is no TOML, or no plan.
        """
        return cls.from_dict(documents.read_toml(text))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote.

        Raises:
            PartitionError: it is no JSON, or no plan.
        """
        return cls.from_dict(documents.read_json(text))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, as it stands in a file."""
        stages: list[dict[str, Any]] = [{"modules": list(names)} for names in self.stages]
        for stage, costs in zip(stages, self.costs, strict=False):
            stage |= dataclasses.asdict(costs) | {"sends": list(costs.sends)}
        return {"penstock_plan": FORMAT, "model": self.model, "made": self.made, "stage": stages}

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """The plan that ``to_dict`` gave.

        Raises:
            PartitionError: a part is missing, unknown, or of another kind.
        """
        plan = documents.table(data, "the plan", {"penstock_plan", "model", "made", "stage"})
        found = plan.get("penstock_plan", FORMAT)
        documents.check_format(found, FORMAT, "the plan", "make it")
        listed = plan.get("stage")
        if not isinstance(listed, (list, tuple)):
            raise PartitionError("the plan has no list of stages; write [[stage]] for each")
        read = [stage_from(item, f"stage {i} of the plan") for i, item in enumerate(listed)]
        return cls(
            stages=tuple(names for names, _ in read),
            model=documents.word(plan.get("model", ""), "model of the plan"),
            made=documents.word(plan.get("made", ""), "made of the plan"),
            costs=tuple(costs for _, costs in read if costs is not None),
        )


def prefixes(name: str) -> Iterator[str]:
    """The qualified names of the modules that hold ``name``: of ``a.b.c`` ``a.b`` and ``a``."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def dealt(items: Iterable[T], counts: Sequence[int]) -> list[list[T]]:
    """Items in groups of so many each, in order.

    Example:
        >>> dealt("abcde", [2, 3])
        [['a', 'b'], ['c', 'd', 'e']]
    """
    left = iter(items)
    return [list(islice(left, count)) for count in counts]


def shortened(names: Sequence[str], most: int = 6) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def other_suffix(path: Path) -> PartitionError:
    """The error of a file whose suffix tells no form."""
    return PartitionError(f"{path}: a plan is kept as .toml or .json; name it so")


def stage_from(data: object, where: str) -> tuple[tuple[str, ...], StageCosts | None]:
    """A stage's modules, and what stands beside them of its costs."""
    cost_names = {field.name for field in dataclasses.fields(StageCosts)}
    stage = documents.table(data, where, {"modules", *cost_names})
    modules = documents.names(stage.get("modules"), f"modules of {where}")
    if not cost_names & stage.keys():
        return modules, None
    numbers = {
        name: documents.number(stage[name], f"{name} of {where}")
        for name in sorted(cost_names & stage.keys() - {"sends"})
    }
    sends = documents.names(stage.get("sends", []), f"sends of {where}")
    try:
        return modules, StageCosts(**numbers, sends=sends)
    except TypeError as error:
        raise PartitionError(f"the costs of {where} are incomplete: {error}") from error
