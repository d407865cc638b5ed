"""How much a backward costs once it is split: I + W over the full backward, on GPT blocks.

    .venv/bin/python -m benchmarks.split_backward

One thread. The ways are interleaved in one run, every figure is a median. The full backward is
started as a user starts it, I and W as a stage does. Beside Penstock's
deferral by operation stands the graph walk of torch.distributed.pipelining.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input as peer_input
from torch.distributed.pipelining._backward import stage_backward_weight as peer_weight

from penstock import compile_stage
from penstock._torch_compat import run_backward
from penstock.stage.weight_grad import DeferredGrads, compiled_parts

__all__ = ["BOUNDS", "Block", "measure", "measure_compiled", "report"]

BOUNDS = {16: 1.15, 256: 1.05, 512: 1.03}
SHAPES = {16: (4, 16, 4), 256: (4, 128, 2), 512: (2, 128, 2)}  # dim → batch, time, blocks
ROUNDS = {16: 400, 256: 25, 512: 15}


class Block(nn.Module):
    """A GPT block in plain PyTorch.

    Args:
        dim: the width.
        heads: the number of attention heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``: (batch, time, dim)."""
        batch, length, dim = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


def timed(call: Callable[[], object]) -> float:
    """CPU seconds that ``call`` takes in this thread: other processes don't count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure_width(dim: int, rounds: int) -> dict[str, float]:
    """Median times of the ways of one forward and its backward, at one width.

    Args:
        dim: the width of the blocks.
        rounds: how often each way is taken.

    Returns:
        The figures, times in seconds.
    """
    torch.manual_seed(0)
    batch, length, blocks = SHAPES[dim]
    module = nn.Sequential(*(Block(dim, 4) for _ in range(blocks)))
    parameters = list(module.parameters())
    x = torch.randn(batch, length, dim, requires_grad=True)
    grad = torch.randn(batch, length, dim)
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    # As in a pipeline, the next microbatch's forward has run before a backward starts. With
    # nothing in flight the allocator would give all memory back to the system after each step,
    # and a W would be charged with fetching it again.
    def full(y: Tensor) -> None:
        note("full", timed(lambda: torch.autograd.backward((y,), (grad,))))

    def deferred_forward() -> tuple[DeferredGrads, Tensor]:
        work = DeferredGrads()
        with work:
            return work, module(x)

    def deferred(flying: tuple[DeferredGrads, Tensor]) -> None:
        work, y = flying

        def inputs() -> None:
            with work:
                run_backward((y,), (grad,))

        note("I", timed(inputs))
        note("W", timed(work.accumulate))

    def walked(y: Tensor) -> None:
        groups: list[Any] = []

        def inputs() -> None:
            groups.extend(peer_input([y], [grad], [x], iter(parameters))[1])

        note("peer I", timed(inputs))
        note("peer W", timed(lambda: peer_weight(iter(parameters), groups)))

    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "F": (lambda: module(x), full),
        "F deferred": (deferred_forward, deferred),
        "peer F": (lambda: module(x), walked),
    }
    flying = {name: forward() for name, (forward, _) in ways.items()}
    for index in range(rounds + 3):
        if index == 3:
            times.clear()
        for name, (forward, backward) in ways.items():
            start = time.thread_time()
            following = forward()
            note(name, time.thread_time() - start)
            x.grad = None
            backward(flying[name])
            flying[name] = following
    medians = {name: statistics.median(values) for name, values in times.items()}
    # Ratios within a round, which differ less than the machine does between rounds.
    split = [(i + w) / b for i, w, b in zip(times["I"], times["W"], times["full"], strict=True)]
    peer = [
        (i + w) / b for i, w, b in zip(times["peer I"], times["peer W"], times["full"], strict=True)
    ]
    return {
        "dim": dim,
        "full_s": medians["full"],
        "input_s": medians["I"],
        "weight_s": medians["W"],
        "ratio": statistics.median(split),
        "peer_ratio": statistics.median(peer),
        "forward_ratio": medians["F deferred"] / medians["F"],
        "bound": BOUNDS[dim],
    }


def measure_compiled(rounds: int, dim: int = 512) -> dict[str, float]:
    """Medians of the backward of a compiled block, whole, and split by ``compile_stage``.

    Args:
        rounds: how often each way is taken.
        dim: the width of the block.

    Returns:
        ``ratio``, of I + W over the whole backward; ``input_ratio``, of I over it; ``full_s``.
    """
    torch.manual_seed(0)
    whole, split = Block(dim, 4), Block(dim, 4)
    whole.compile()
    parts = compiled_parts(compile_stage(split))
    x, grad = torch.randn(2, 128, dim, requires_grad=True), torch.randn(2, 128, dim)
    times: list[tuple[float, float, float]] = []
    flying: list[tuple[Tensor, DeferredGrads, Tensor]] = []
    for index in range(rounds + 3):
        work = DeferredGrads((), parts)
        with work:
            split_y = split(x)
        flying.append((whole(x), work, split_y))
        if not index:
            continue
        x.grad = None
        whole_y, work, split_y = flying.pop(0)
        full = timed(partial(torch.autograd.backward, (whole_y,), (grad,)))
        with work:
            inputs = timed(partial(run_backward, (split_y,), (grad,)))
        times.append((full, inputs, timed(work.accumulate)))
    del times[:2]
    return {
        "dim": dim,
        "full_s": statistics.median(full for full, _, _ in times),
        "ratio": statistics.median((i + w) / full for full, i, w in times),
        "input_ratio": statistics.median(i / full for full, i, _ in times),
    }


def measure(scale: float = 1.0) -> list[dict[str, float]]:
    """I + W over the full backward, for each width.

    Args:
        scale: the share of the usual number of rounds.

    Returns:
        One row per width: ``ratio``, ``peer_ratio``, ``bound``, ``forward_ratio`` and times.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [measure_width(dim, max(3, int(ROUNDS[dim] * scale))) for dim in BOUNDS]
    finally:
        torch.set_num_threads(threads)


def report(rows: list[dict[str, float]]) -> str:
    """The rows as a table."""
    lines = ["  dim   full ms   I ms   W ms  (I + W) / full   bound   torch's   F / plain F"]
    for row in rows:
        lines.append(
            f"{row['dim']:5.0f} {row['full_s'] * 1e3:9.3f} {row['input_s'] * 1e3:6.3f} "
            f"{row['weight_s'] * 1e3:6.3f} {row['ratio']:15.3f} {row['bound']:7.2f} "
            f"{row['peer_ratio']:9.3f} {row['forward_ratio']:13.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(measure()))
    torch.set_num_threads(1)
    row = measure_compiled(15)
    print(f"compiled, dim {row['dim']}: I + W {row['ratio']:.3f}, I {row['input_ratio']:.3f}")
