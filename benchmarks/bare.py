"""The bare loop that step times are compared with: a rank's actions as straight-line Python.

For a program with its sends and receives, a function is written out, action by action, as a person
would write it by hand who knows the schedule and all shapes:

    RECV_F      b = empty(); r = irecv(b, 0)
    F           r.wait(); x = b.requires_grad_(); y = stage1(x)
    SEND_F      d = y.detach(); held.append((isend(d, 2), d))
    RECV_B      g = empty(); q = irecv(g, 2)
    B           q.wait(); backward(y, g)
    SEND_B      held.append((isend(x.grad, 0), x))
    I, W        backward(y, g, retain_graph=True, inputs=[x]); backward(y, g, inputs=params)

It checks nothing, records nothing, and knows no other shape than the one it was written for: one
tensor of one shape across every boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.schedule.action import Action, Op
from penstock.schedule.program import Program

__all__ = ["bare_step"]

Step = Callable[[Tensor, Tensor], list[Tensor]]


def bare_step(
    program: Program,
    rank: int,
    modules: Mapping[int, nn.Module],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
) -> Step:
    """Write and compile the loop of one rank.

    Args:
        program: with its sends and receives.
        rank: whose actions are written out.
        modules: the rank's stages by index.
        loss_fn: the loss of a microbatch.
        shape: of what crosses every boundary.

    Returns:
        ``step(inputs, target)``, which adds to the parameters' gradients and returns the losses.
    """
    n = program.num_microbatches
    lines = [
        "def step(inputs, target):",
        " held, losses = [], []",
        f" X, T = inputs.chunk({n}), target.chunk({n})",
    ]
    for step in program.ranks[rank]:
        for action in step.parts:
            lines += (f" {line}" for line in _lines(program, action))
    lines += [" for work, _ in held: work.wait()", " return losses"]
    names: dict[str, Any] = {
        "irecv": dist.irecv,
        "isend": dist.isend,
        "backward": torch.autograd.backward,
        "empty": lambda: torch.empty(shape),
        "loss_fn": loss_fn,
    }
    for index, module in modules.items():
        names[f"stage{index}"] = module
        names[f"params{index}"] = list(module.parameters())
    # The text above is made of integers and of the names bound here.
    exec(compile("\n".join(lines), "<bare loop>", "exec"), names)
    step_of_rank: Step = names["step"]
    return step_of_rank


def _lines(program: Program, action: Action) -> list[str]:
    placement = program.placement
    s, mb = action.stage, action.microbatch
    k = f"{s}_{mb}"
    before, after = (
        placement.rank_of(n) if 0 <= n < program.num_stages else None for n in (s - 1, s + 1)
    )
    is_last = s == program.num_stages - 1
    local_before, local_after = (placement.same_rank(s, n) for n in (s - 1, s + 1))
    match action.op:
        case Op.RECV_F:
            return [f"b{k} = empty(); r{k} = irecv(b{k}, {before})"]
        case Op.RECV_B:
            return [f"g{k} = empty(); q{k} = irecv(g{k}, {after})"]
        case Op.SEND_F:
            return [f"d{k} = y{k}.detach(); held.append((isend(d{k}, {after}), d{k})); d{k} = None"]
        case Op.SEND_B:
            return [f"held.append((isend(x{k}.grad, {before}), x{k})); x{k} = None"]
        case Op.FORWARD:
            return _forward(s, mb, k, program.num_microbatches, local_before, is_last)
        case Op.FULL_BACKWARD | Op.INPUT_GRAD | Op.WEIGHT_GRAD:
            return _backward(action, k, local_before, local_after, is_last)
        case Op.REDUCE_GRAD | Op.UNSHARD | Op.RESHARD:
            return []
        case _:
            raise AssertionError(f"no line for {action}")


def _forward(
    s: int, mb: int | None, k: str, num_microbatches: int, local: bool, is_last: bool
) -> list[str]:
    if s == 0:
        entered = [f"x{k} = X[{mb}]"]
    elif local:
        entered = [f"x{k} = y{s - 1}_{mb}.detach().requires_grad_()"]
    else:
        entered = [f"r{k}.wait(); x{k} = b{k}.requires_grad_(); r{k} = b{k} = None"]
    lines = [*entered, f"y{k} = stage{s}(x{k})"]
    if is_last:
        lines += [
            f"l{k} = loss_fn(y{k}, T[{mb}])",
            f"losses.append(l{k}.detach()); y{k} = l{k} / {num_microbatches}",
        ]
    return lines


def _backward(action: Action, k: str, local_before: bool, local: bool, is_last: bool) -> list[str]:
    s, mb = action.stage, action.microbatch
    grad = "None" if is_last else f"g{k}"
    if is_last:
        entered = []
    elif local:
        entered = [f"g{k} = x{s + 1}_{mb}.grad; x{s + 1}_{mb} = None"]
    else:
        entered = [f"q{k}.wait(); q{k} = None"]
    done = f"y{k} = g{k} = None"
    match action.op:
        case Op.FULL_BACKWARD:
            return [*entered, f"backward(y{k}, {grad}); {done}"]
        case Op.INPUT_GRAD if s == 0:
            # Nothing lies before the first stage: its whole backward is left to W.
            return entered
        case Op.INPUT_GRAD:
            return [*entered, f"backward(y{k}, {grad}, retain_graph=True, inputs=[x{k}])"]
        case _:
            return [f"backward(y{k}, {grad}, inputs=params{s}); {done}"]
