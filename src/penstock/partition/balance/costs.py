"""The costs of a model's blocks, as data.

    block       embed    0     1     2    head     a block is never cut; a model of n blocks has
    cut               │     │     │     │          n - 1 cuts, each with the tensors that cross it

Times are per microbatch and in seconds, sizes in bytes. This module measures nothing (`profile`
does) and solves nothing (`balance` does); it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from penstock.errors import PartitionError
from penstock.partition.plan import Plan, abbreviate, split_by_counts

__all__ = ["BlockCosts", "Profile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """The costs of one block per microbatch.

    Args:
        modules: the qualified names of its modules, in the order in which they run.
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
        frozen_bytes: the bytes of those among them that are not trained.
        sent_bytes: the bytes that cross the cut after the block, in one direction.
        sends: the tensors that cross this cut, as ``"float32[2,128,64]"``.

    Raises:
        PartitionError: a cost is negative, infinite or not a number.

    Examples:
        >>> BlockCosts(forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.5).time_s
        2.5
    """

    modules: tuple[str, ...] = ()
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
    frozen_bytes: int = 0
    sent_bytes: int = 0
    sends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name not in ("modules", "sends")):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise PartitionError(f"{name} of {self.name} is {value!r}, expected a number ≥ 0")

    @property
    def name(self) -> str:
        """The block's name in messages and tables."""
        return abbreviate(self.modules, most=3) if self.modules else "a block"

    def state_bytes(self, factor: float) -> float:
        """The bytes of its parameters, each that is trained counted ``factor`` times."""
        return factor * (self.parameter_bytes - self.frozen_bytes) + self.frozen_bytes

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

    Raises:
        PartitionError: there are no blocks.
    """

    blocks: tuple[BlockCosts, ...]
    model: str = ""

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
        stages = tuple(tuple(name for block in group for name in block.modules) for group in groups)
        return Plan(stages=stages, model=self.model, made=made)
