"""Draws a simulated program in text, one column per unit of time.

    rank 0  F0 F1 .. B0 -- B1 --
    rank 1  .. F0 B0 -- F1 B1 --

The letter is the operation, in lower case on a rank's second stage; the digit is the microbatch;
``--`` continues what began before, ``..`` is idle. Parts of an overlapped pair are joined as
``F1+B0``, drawn over the length of the pair.
"""

from penstock.schedule.action import Overlap
from penstock.schedule.program import Program
from penstock.schedule.rules import HOST_TRANSFERS
from penstock.simulate.simulation import simulate


def draw(program: Program) -> str:
    """The timeline of ``program`` under unit costs."""
    result = simulate(program)
    width = int(result.makespan)
    lines = []
    for rank, steps in enumerate(program.ranks):
        cells = [".."] * width
        times = zip(result.starts[rank], result.ends[rank], strict=True)
        for step in steps:
            spans = [next(times) for _ in step.parts]
            if step.parts[0].op in HOST_TRANSFERS:
                continue  # beside the compute
            start, end = int(spans[0][0]), int(spans[-1][1])
            cells[start:end] = ["--"] * (end - start)
            for (at, _), part in zip(spans, step.parts, strict=True):
                loop = program.placement.stages_of(rank).index(part.stage)
                letter = part.op.value if loop == 0 else part.op.value.lower()
                cells[int(at)] = f"{letter}{part.microbatch}"
            line = " ".join(cells)
        if any(isinstance(step, Overlap) for step in steps):
            line = _joined(line, program, rank, result.starts[rank])
        lines.append(f"rank {rank}  {line}")
    return "\n".join(lines)


def _joined(line: str, program: Program, rank: int, starts: tuple[float, ...]) -> str:
    """Put a ``+`` between the parts of each overlapped pair."""
    text, at = list(line), iter(starts)
    for step in program.ranks[rank]:
        places = [int(next(at)) for _ in step.parts]
        for place in places[1:]:
            text[3 * place - 1] = "+"
    return "".join(text)
