"""The places to cut a captured graph, and the marks that locate them.

    split points         each is one mark, and each mark is a cut
    names per stage      each named module is marked; a stage begins at the first of its marks
    counts of blocks     each block is marked; a stage begins at the first of its blocks to run

This module captures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx, nn

from penstock._torch_compat import children_of, has_no_forward
from penstock.errors import PartitionError
from penstock.partition.export.graph_cut import Cut, boundaries
from penstock.partition.export.markers import HERE, SplitPoint, label_of
from penstock.partition.plan import abbreviate
from penstock.partition.spec import SplitSpec

__all__ = ["Places", "SplitPolicy", "check_labels", "places_of_counts", "places_of_names"]

# A function from the captured graph to one with calls of ``pipe_split``.
SplitPolicy: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]
Choose: TypeAlias = Callable[[Sequence[Cut]], tuple[Cut, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places to cut a graph.

    Args:
        spec: the split points to mark.
        policy: a function that adds marks to the graph.
        choose: a function that chooses cuts among the marks; if None, every mark is a cut, and
            every split point must leave exactly one mark.
    """

    spec: Mapping[str, SplitPoint]
    policy: SplitPolicy | None = None
    choose: Choose | None = None


def places_of_names(model: nn.Module, stages: Sequence[Sequence[str]]) -> Places:
    stage_of = {name: stage for stage, names in enumerate(stages) for name in _called(model, names)}
    labels = {label_of(name, SplitPoint.BEGINNING): stage for name, stage in stage_of.items()}

    def choose(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
        first: dict[int, Cut] = {}
        for cut in cuts:
            if cut.label in labels:
                first.setdefault(labels[cut.label], cut)
        for stage in range(1, len(stages)):
            if stage not in first:
                raise PartitionError(
                    f"stage {stage} has no beginning: the forward calls none of "
                    f"{abbreviate(stages[stage])}; name modules that it calls"
                )
        return tuple(sorted(first.values(), key=lambda cut: cut.position))

    later = (name for name, stage in stage_of.items() if stage)
    return Places(spec=dict.fromkeys(later, SplitPoint.BEGINNING), choose=choose)


def _called(model: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """The modules among ``names``; lists are never called, so their members replace them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        module = modules.get(name)
        if module is not None and has_no_forward(module):
            yield from _called(model, [f"{name}.{child}" for child in children_of(module)])
        elif module is not None:
            yield name


def places_of_counts(model: nn.Module, split: SplitSpec) -> Places:
    """Count blocks by first call; a block with several places in a list counts once per place."""
    blocks, counts = split.blocks, split.counts
    layers = [model.get_submodule(name) for name in blocks]
    first_name = {id(layer): name for name, layer in zip(blocks[::-1], layers[::-1], strict=True)}
    times = Counter(label_of(first_name[id(layer)], SplitPoint.BEGINNING) for layer in layers)

    def choose(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
        left, calls = times.copy(), []
        for cut in cuts:
            if left[cut.label]:
                left[cut.label] -= 1
                calls.append(cut)
        starts = [sum(counts[:stage]) for stage in range(1, len(counts))]
        if starts and starts[-1] >= len(calls):
            raise PartitionError(
                f"the forward calls {len(calls)} of the {len(blocks)} blocks that {list(counts)} "
                "counts, so that the last stage has no beginning; name the modules of each stage"
            )
        return tuple(calls[start] for start in starts)

    return Places(spec=dict.fromkeys(first_name.values(), SplitPoint.BEGINNING), choose=choose)


def check_labels(
    model: nn.Module, graph: fx.Graph, spec: Mapping[str, SplitPoint], cuts: Sequence[Cut]
) -> None:
    """Check that every split point left exactly one mark."""
    counts = Counter(cut.label for cut in cuts if cut.label != HERE)
    for name, point in spec.items():
        label = label_of(name, point)
        if counts[label] > 1:
            raise PartitionError(
                f"module {name} runs {counts[label]} times in the forward, so {label!r} is no one "
                f"place; call pipe_split() in the code at the one that you mean; "
                f"{boundaries(graph)}"
            )
        if not counts[label]:
            kind = type(model.get_submodule(name)).__name__
            raise PartitionError(
                f"there is no place {label!r}: the forward does not call module {name} (a {kind}), "
                "or does so inside of a compiled or fused region; take torch.compile off until "
                f"the model is cut, or cut elsewhere: {boundaries(graph)}"
            )
