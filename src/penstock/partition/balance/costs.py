"""What the blocks of a model cost, as data.

    block       E     t     t     t     L          a block is never cut; a model of n blocks has
    cut            │     │     │     │             n - 1 cuts, each with what crosses it

Times are per microbatch and in seconds, sizes in bytes. This module measures nothing
(`profile` does) and solves nothing (`balance` does); it imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.errors import PartitionError
from penstock.partition.plan import (
    Plan,
    StageCosts,
    abbreviate,
    check_format,
    read_file,
    read_names,
    read_number,
    read_string,
    read_table,
    split_by_counts,
)

__all__ = ["BlockCosts", "BlockKind", "Profile"]

FORMAT = 1


class BlockKind(Enum):
    """What a block is to its model; the letter that layout strings have for it."""

    EMBEDDING = "E"
    LAYER = "t"
    PREDICTION = "m"
    HEAD = "L"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """What one block costs per microbatch.

    Args:
        modules: the qualified names of its modules, in the order in which they run.
        kind: what it is to the model.
        classes: the class name of each module.
        forward_s: its forward F.
        input_grad_s: the input-gradient part I of its backward.
        weight_grad_s: the weight-gradient part W of its backward.
        activation_bytes: what autograd keeps of a microbatch from F to the end of its backward.
        parameters: how many numbers its parameters hold; shared ones count in every block.
        parameter_bytes: their bytes.
        sent_bytes: what crosses the cut behind the block, one way.
        sends: the tensors that cross it, as ``"float32[2,128,64]"``.

    Raises:
        PartitionError: a cost is negative, infinite or not a number.

    Example:
        >>> BlockCosts(forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.5).time_s
        2.5
    """

    modules: tuple[str, ...] = ()
    kind: BlockKind = BlockKind.LAYER
    classes: tuple[str, ...] = ()
    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    activation_bytes: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    sent_bytes: int = 0
    sends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise PartitionError(f"{name} of {self.name} is {value!r}, expected a number")
            if not 0 <= value < float("inf"):
                raise PartitionError(f"{name} of {self.name} is {value}, expected a number ≥ 0")

    @property
    def name(self) -> str:
        """The block as messages and tables call it."""
        return abbreviate(self.modules, most=3) if self.modules else "a block"

    @property
    def time_s(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


TIMES = ("forward_s", "input_grad_s", "weight_grad_s")
SIZES = ("activation_bytes", "parameters", "parameter_bytes", "sent_bytes")
NUMBERS = (*TIMES, *SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What every block of a model costs, and where that was measured.

    Args:
        blocks: the blocks in the order in which they run.
        model: the class name of the model.
        machine: where it was measured, for people to read.
        example: the microbatch that it was measured with, for people to read.

    Raises:
        PartitionError: there are no blocks.
    """

    blocks: tuple[BlockCosts, ...]
    model: str = ""
    machine: str = ""
    example: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise PartitionError("a profile without blocks; measure a model that has some")

    @property
    def time_s(self) -> float:
        """One microbatch's forward and backward through the whole model."""
        return sum(block.time_s for block in self.blocks)

    def plan(self, counts: Sequence[int], *, made: str = "") -> Plan:
        """The plan that puts so many blocks into each stage.

        Args:
            counts: the number of blocks per stage, in order.
            made: how the counts were found, for people to read.

        Raises:
            PartitionError: the counts are not those of the blocks, or the blocks have no names.

        Example:
            >>> blocks = [BlockCosts(modules=(name,), forward_s=1.0) for name in "abc"]
            >>> Profile(blocks=blocks).plan([1, 2]).stages
            (('a',), ('b', 'c'))
        """
        if sum(counts) != len(self.blocks) or min(counts, default=0) < 1:
            raise PartitionError(
                f"counts {list(counts)} make {sum(counts)} blocks, expected {len(self.blocks)}, "
                "at least one per stage"
            )
        groups = split_by_counts(self.blocks, counts)
        return Plan(
            stages=tuple(
                tuple(name for block in group for name in block.modules) for group in groups
            ),
            model=self.model,
            made=made,
            costs=tuple(stage_costs(group) for group in groups),
        )

    # --- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file.

        Args:
            path: where to.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile from a JSON file.

        Args:
            path: where from.

        Raises:
            PartitionError: there is no such file, or it holds no profile.
        """
        hint = "profile; `penstock split --costs` and Profile.save write one"
        return read_file(Path(path), cls.from_json, hint)

    def to_json(self) -> str:
        """The profile as JSON."""
        blocks = [dataclasses.asdict(block) | {"kind": block.kind.value} for block in self.blocks]
        data = {
            "penstock_profile": FORMAT,
            "model": self.model,
            "machine": self.machine,
            "example": self.example,
            "blocks": blocks,
        }
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that ``to_json`` wrote.

        Raises:
            PartitionError: it is no JSON, or no profile.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PartitionError(f"not JSON: {error}") from error
        known = {"penstock_profile", "model", "machine", "example", "blocks"}
        data = read_table(found, "the profile", known)
        check_format(data.get("penstock_profile"), FORMAT, "the profile", "measure")
        blocks = data.get("blocks")
        if not isinstance(blocks, list):
            raise PartitionError("the profile has no list of blocks; measure anew")
        words = {
            name: read_string(data.get(name, ""), f"{name} of the profile")
            for name in ("model", "machine", "example")
        }
        read = (block_from(item, f"block {i}") for i, item in enumerate(blocks))
        return cls(blocks=tuple(read), **words)


def stage_costs(blocks: Sequence[BlockCosts]) -> StageCosts:
    """What a stage of these blocks costs."""
    return StageCosts(
        time_s=sum(block.time_s for block in blocks),
        parameters=sum(block.parameters for block in blocks),
        parameter_bytes=sum(block.parameter_bytes for block in blocks),
        activation_bytes=sum(block.activation_bytes for block in blocks),
        sent_bytes=blocks[-1].sent_bytes,
        sends=blocks[-1].sends,
    )


def block_from(data: object, where: str) -> BlockCosts:
    """The block that stands in a profile's file."""
    known = {field.name for field in dataclasses.fields(BlockCosts)}
    entry = read_table(data, where, known)
    letters = [kind.value for kind in BlockKind]
    if entry.get("kind") not in letters:
        raise PartitionError(f"{where} is of kind {entry.get('kind')!r}, not of {letters}")
    missing = [name for name in NUMBERS if name not in entry]
    if missing:
        raise PartitionError(f"{where} lacks {missing}; measure anew")
    given: dict[str, Any] = {
        name: read_number(entry[name], f"{name} of {where}") for name in NUMBERS
    }
    for name in ("modules", "classes", "sends"):
        given[name] = read_names(entry.get(name, []), f"{name} of {where}")
    return BlockCosts(kind=BlockKind(entry["kind"]), **given)
