"""The costs of a model's blocks, as data.

    block       embed    0     1     2    head     a block is never cut; a model of n blocks has
    cut               │     │     │     │          n - 1 cuts, each with the tensors that cross it

Times are per microbatch and in seconds, sizes in bytes. This module measures nothing (`profile`
does) and solves nothing (`balance` does); it imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PartitionError
from penstock.partition.plan import (
    Plan,
    StageCosts,
    abbreviate,
    field_kinds,
    read_document,
    read_file,
    read_table,
    read_value,
    split_by_counts,
)

__all__ = ["BlockCosts", "Profile"]

FORMAT = 1
TEXTS = ("model", "machine", "example")
NUMBERS = (
    "forward_s", "input_grad_s", "weight_grad_s", "backward_s", "deferral_s", "activation_bytes",
    "temporary_bytes", "weight_grad_bytes", "parameters", "parameter_bytes", "sent_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """The costs of one block per microbatch.

    Args:
        modules: the qualified names of its modules, in the order in which they run.
        classes: the class name of each module.
        forward_s: the time of its forward F.
        input_grad_s: the time of the input-gradient part I of its backward.
        weight_grad_s: the time of the weight-gradient part W of its backward.
        backward_s: the time of its full backward B.
        deferral_s: the time that a forward F takes longer where its backward is split.
        activation_bytes: the bytes that autograd saves per microbatch from F to the backward.
        temporary_bytes: the most bytes that its forward or backward holds beyond its activation.
        weight_grad_bytes: the bytes held per microbatch from I to W.
        parameters: the number of elements in its parameters; shared parameters count in every
            block.
        parameter_bytes: the bytes of its parameters.
        sent_bytes: the bytes that cross the cut after the block, in one direction.
        sends: the tensors that cross this cut, as ``"float32[2,128,64]"``.

    Raises:
        PartitionError: a cost is negative, infinite or not a number.

    Examples:
        >>> BlockCosts(forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.5).time_s
        2.5
    """

    modules: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    backward_s: float = 0.0
    deferral_s: float = 0.0
    activation_bytes: int = 0
    temporary_bytes: int = 0
    weight_grad_bytes: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    sent_bytes: int = 0
    sends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in NUMBERS:
            read_value(getattr(self, name), "number", f"{name} of {self.name}")

    @property
    def name(self) -> str:
        """The block's name in messages and tables."""
        return abbreviate(self.modules, most=3) if self.modules else "a block"

    @property
    def time_s(self) -> float:
        """The time of forward and split backward together."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The costs of all blocks of a model.

    Args:
        blocks: the blocks in the order in which they run.
        model: the class name of the model.
        machine: the machine of the measurement, as free text.
        example: the microbatch of the measurement, as free text.

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
        """The time of one microbatch's forward and backward through the whole model."""
        return sum(block.time_s for block in self.blocks)

    def plan(self, counts: Sequence[int], *, made: str = "") -> Plan:
        """The plan with the given numbers of blocks per stage.

        Args:
            counts: the number of blocks per stage, in order.
            made: the origin of the counts, as free text.

        Raises:
            PartitionError: the counts do not add up to the blocks, or the blocks have no names.

        Examples:
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
            costs=tuple(_stage_costs(group) for group in groups),
        )

    # --- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile from a JSON file.

        Raises:
            PartitionError: there is no such file, or it holds no profile.
        """
        hint = "profile; `penstock split --costs` and Profile.save write one"
        return read_file(Path(path), cls.from_json, hint)

    def to_json(self) -> str:
        """The profile as JSON."""
        blocks = [dataclasses.asdict(block) for block in self.blocks]
        texts = {name: getattr(self, name) for name in TEXTS}
        return json.dumps({"penstock_profile": FORMAT, **texts, "blocks": blocks}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Parse the text of ``to_json``.

        Raises:
            PartitionError: the text is not JSON, or no profile.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PartitionError(f"not JSON: {error}") from error
        kinds = dict.fromkeys(TEXTS, "str") | {"blocks": "list"}
        file = read_document(data, "penstock_profile", FORMAT, kinds)
        blocks = (_block_from(b, f"block {i}") for i, b in enumerate(file.pop("blocks", ())))
        return cls(blocks=tuple(blocks), **file)


def _stage_costs(blocks: Sequence[BlockCosts]) -> StageCosts:
    summed = ("time_s", "parameters", "parameter_bytes", "activation_bytes")
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in blocks) for name in summed}
    return StageCosts(**sums, sent_bytes=blocks[-1].sent_bytes, sends=blocks[-1].sends)


def _block_from(data: object, where: str) -> BlockCosts:
    entry = read_table(data, where, field_kinds(BlockCosts))
    missing = [name for name in NUMBERS if name not in entry]
    if missing:
        raise PartitionError(f"{where} lacks {missing}; measure anew")
    return BlockCosts(**entry)
