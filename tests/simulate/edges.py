"""Costs per edge, drawn by chance."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["per_edge"]


def per_edge(
    num_stages: int, cost: st.SearchStrategy[float]
) -> st.SearchStrategy[dict[tuple[int, int], float]]:
    """A cost for some of the edges between so many stages."""
    edges = [(stage, stage + 1) for stage in range(num_stages - 1)]
    return st.dictionaries(st.sampled_from(edges), cost) if edges else st.just({})
