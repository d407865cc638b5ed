"""Costs per edge, drawn by chance."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.schedule.placement import Placement

__all__ = ["edges_of", "per_edge"]


def edges_of(placement: Placement) -> list[tuple[int, int]]:
    """The stages that send to each other, or would if they were on two ranks."""
    nexts = [(stage, placement.neighbour(stage, +1)) for stage in range(placement.num_stages)]
    return [(stage, other) for stage, other in nexts if other is not None]


def per_edge(
    placement: Placement, cost: st.SearchStrategy[float]
) -> st.SearchStrategy[dict[tuple[int, int], float]]:
    """A cost for some of the edges between the stages of a placement."""
    edges = edges_of(placement)
    return st.dictionaries(st.sampled_from(edges), cost) if edges else st.just({})
