"""What the blocks of a model cost on the machine at hand.

    blocks.py       leaf_modules: which modules no cut goes through
    rehearsal.py    one run: which of them run when, what is kept of each, what crosses
    clock.py        several runs: the time of each one's F, I and W
    blocks.py       gather: units into blocks, in the order in which they ran
    between_blocks  a dry run: what stages cut by module send, which is more (what each of them is
                    to have) and less (what each computes for itself) than what was seen to cross

Everything is measured within the running model, so that what happens between its modules and what
they do to each other's caches counts. It does not know what the costs are good for.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.compat.stage import PipelineStage
from penstock.errors import PartitionError
from penstock.partition.balance.clock import Times, measure
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.balance.rehearsal import Rehearsal, rehearse
from penstock.partition.balance.subject import Chained, Subject
from penstock.partition.blocks import Block, LeafModule, gather, leaf_modules
from penstock.partition.forward.by_module import tensors_between
from penstock.partition.huggingface import HFPipelinePlan
from penstock.partition.sequential import is_sequence
from penstock.partition.spec import Example, describe
from penstock.stage.rng import undrawn
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["OnProgress", "profile"]

OnProgress: TypeAlias = Callable[[int, int, str], None]


def profile(
    model_or_stages: nn.Module | Sequence[nn.Module] | Sequence[PipelineStage],
    example: Example,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    runs: int = 5,
    progress: OnProgress | None = None,
) -> Profile:
    """Measure what each block of a model costs, per microbatch, where the model lives.

    Args:
        model_or_stages: a model on one device, or a list of layers or stages, each of which is a
            block. The model runs in the mode, training or evaluation, that it is in.
        example: one microbatch: a tuple of positional or a dict of keyword arguments, or the one
            tensor that the model takes.
        loss_fn: from the model's output to the loss, counted with the last block. If None, the
            output's ``loss`` where it has one, else the sum of all outputs.
        runs: how often to measure; the median counts. One more run comes before, to warm up.
        progress: called with what is done, what there is to do, and what comes next.

    Returns:
        The costs of all blocks, in the order in which they run.

    Raises:
        PartitionError: there is nothing to cut between, the model runs none of its blocks, or its
            output takes no gradient.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> costs = profile(model, torch.ones(3, 4), runs=1)
        >>> [block.modules for block in costs.blocks]
        [('0',), ('1',), ('2',)]
        >>> costs.blocks[0].parameter_bytes, costs.blocks[0].sends
        (160, ('float32[3,8]',))
    """
    if runs < 1:
        raise PartitionError(f"runs is {runs}, expected at least 1")
    told = progress if progress is not None else silence
    model, name, units = as_model(model_or_stages)
    subject = Subject.of(model, example, loss_fn)
    with subject.left_as_it_was():
        seen, measured = in_runs(subject, units, runs, told)
    told(runs + 2, runs + 2, "done")
    medians = [median_of(each) for each in zip(*measured[1:], strict=True)]
    blocks = gather(units, seen.order)
    loose = loose_parameters(model, units)
    costs = [
        costs_of(block, () if i else loose, seen, medians, is_last=i == len(blocks) - 1)
        for i, block in enumerate(blocks)
    ]
    return Profile(
        blocks=tuple(costs if is_sequence(model_or_stages) else as_sent_by_module(costs, subject)),
        model=name,
        machine=machine_of(subject.device),
        example=describe(example),
    )


def in_runs(
    subject: Subject, units: Sequence[LeafModule], runs: int, told: OnProgress
) -> tuple[Rehearsal, list[tuple[Times, Times, Times]]]:
    """What runs when, and how long each part took in each run, the first of which warms up."""
    told(0, runs + 2, "which blocks run when")
    with undrawn(subject.device), torch.enable_grad():
        seen = subject.on_own_state(lambda: rehearse(subject, units))
        above = subject.on_own_state(lambda: leave_room(subject))
    measured = []
    for run in range(runs + 1):
        told(run + 1, runs + 2, f"run {run} of {runs}" if run else "warm-up")
        with undrawn(subject.device), torch.enable_grad():
            measured.append(subject.on_own_state(lambda: measure(subject, units, seen)))
    del above
    return seen, measured


def leave_room(subject: Subject) -> object:
    """Give back the memory of forwards below that of another one, which is returned.

    Within a training step the memory of one microbatch goes to the next. Where nothing is held
    above it, the C library gives it back to the system, and a forward takes up to twice as long
    for having to ask for it page by page.
    """
    if subject.device.type != "cpu":
        return None
    forwards = [subject.forward() for _ in range(3)]
    return forwards[-1]


def as_model(given: Any) -> tuple[nn.Module, str, Sequence[LeafModule]]:
    """One model out of what was given, its name, and its units."""
    if isinstance(given, nn.Module):
        HFPipelinePlan.of(given).log(type(given).__name__)
        return given, type(given).__name__, leaf_modules(given)
    modules = [each.submod if isinstance(each, PipelineStage) else each for each in given]
    odd = [type(each).__name__ for each in modules if not isinstance(each, nn.Module)]
    if odd or not modules:
        raise PartitionError(
            f"expected a model, or a list of modules or stages, got a list of {odd or 'nothing'}"
        )
    units = [LeafModule(name=str(i), module=module, trunk="") for i, module in enumerate(modules)]
    return Chained(modules), "list", units


# --- the result --------------------------------------------------------------------------------


def costs_of(
    block: Block, also: Sequence[str], seen: Rehearsal, medians: Sequence[Times], is_last: bool
) -> BlockCosts:
    """What was measured of one block."""
    place = {name: segment for segment, name in enumerate(seen.order)}
    segments = [place[unit.name] for unit in block.leaves if unit.name in place]
    sends = () if is_last else seen.sends[max(segments)]
    params = {id(p): p for unit in block.leaves for p in unit.module.parameters()}.values()
    forward_s, input_grad_s, weight_grad_s = (
        sum(times[segment] for segment in segments) for times in medians
    )
    return BlockCosts(
        modules=(*also, *(unit.name for unit in block.leaves)),
        kind=block.kind,
        classes=tuple(type(unit.module).__name__ for unit in block.leaves),
        forward_s=forward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        activation_bytes=sum(seen.kept_bytes[segment] for segment in segments),
        parameters=sum(p.numel() for p in params),
        parameter_bytes=sum(p.numel() * p.element_size() for p in params),
        sent_bytes=sum(tensor.numel() * tensor.element_size() for tensor in sends),
        sends=tuple(describe(tensor) for tensor in sends),
    )


def as_sent_by_module(costs: Sequence[BlockCosts], subject: Subject) -> list[BlockCosts]:
    """The costs with what is sent where the model is cut by module, wherever it can be."""
    crossings = tensors_between(
        subject.model,
        [block.modules for block in costs],
        subject.kwargs or subject.args,
        subject.device,
    )
    return [
        block if metas is None else replace(block, sent_bytes=bytes_of(metas), sends=told(metas))
        for block, metas in zip(costs, [*crossings, None], strict=True)
    ]


def bytes_of(metas: Sequence[TensorMeta]) -> int:
    """What tensors take."""
    return sum(meta.shape.numel() * meta.dtype.itemsize for meta in metas)


def told(metas: Sequence[TensorMeta]) -> tuple[str, ...]:
    """Tensors as ``described`` says them."""
    return tuple(describe(torch.empty(m.shape, dtype=m.dtype, device="meta")) for m in metas)


def median_of(runs: Sequence[Times]) -> Times:
    """The median of each segment's time over runs."""
    return tuple(statistics.median(times) for times in zip(*runs, strict=True))


def loose_parameters(model: nn.Module, units: Sequence[LeafModule]) -> list[str]:
    """The parameters that no unit holds, but a module above them."""
    held = {id(param) for unit in units for param in unit.module.parameters()}
    return [name for name, param in model.named_parameters() if id(param) not in held]


def machine_of(device: torch.device) -> str:
    """Where it was measured, for people to read."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{device.type} ({platform.machine()}), {torch.get_num_threads()} threads"
    return f"{where}, torch {torch.__version__}"


def silence(done: int, total: int, what: str) -> None:
    """Progress that nobody wants to see."""
