"""Choose the cuts among the marks in a captured graph.

split points         each is one mark, and each mark is a cut
names per stage      each named module is marked; a stage begins at the first of its marks
counts of blocks     each block is marked; a stage begins at the first of its blocks to run
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from penstock._torch_compat import children_of, has_no_forward
from penstock.errors import PartitionError
from penstock.partition.export.graph_cut import Cut, boundaries
from penstock.partition.export.markers import HERE, SplitPoint, label_of
from penstock.partition.plan import abbreviate
from penstock.partition.spec import SplitSpec

__all__ = ["Places", "places_of_counts", "places_of_names", "places_of_points"]

BEGINNING = SplitPoint.BEGINNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The split points to mark, and the function that chooses cuts among all marks of a graph."""

    points: Mapping[str, SplitPoint]
    choose: Callable[[fx.Graph, Sequence[Cut]], Sequence[Cut]]


def places_of_points(points: Mapping[str, SplitPoint]) -> Places:
    """Every mark is a cut, and every split point leaves exactly one."""

    def choose(graph: fx.Graph, cuts: Sequence[Cut]) -> Sequence[Cut]:
        counts = Counter(cut.label for cut in cuts if cut.label != HERE)
        for name, point in points.items():
            label = label_of(name, point)
            if counts[label] > 1:
                raise PartitionError(
                    f"{label!r} is no one place, since module {name} runs {counts[label]} times; "
                    f"call pipe_split() in the code where you mean; {boundaries(graph)}"
                )
            if not counts[label]:
                raise PartitionError(
                    f"there is no place {label!r}: the forward does not call module {name}, or "
                    "does so in a compiled or fused region; take torch.compile off until the model "
                    f"is cut, or cut elsewhere: {boundaries(graph)}"
                )
        return cuts

    return Places(points=points, choose=choose)


def places_of_names(model: nn.Module, stages: Sequence[Sequence[str]]) -> Places:
    """A stage begins at the first of its modules to run."""
    stage_of = {name: stage for stage, names in enumerate(stages) for name in _called(model, names)}
    labels = {label_of(name, BEGINNING): stage for name, stage in stage_of.items()}

    def choose(_: fx.Graph, cuts: Sequence[Cut]) -> Sequence[Cut]:
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
        return sorted(first.values(), key=lambda cut: cut.position)

    later = (name for name, stage in stage_of.items() if stage)
    return Places(points=dict.fromkeys(later, BEGINNING), choose=choose)


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
    layers = [model.get_submodule(name) for name in split.blocks]
    names: dict[int, str] = {}
    for name, layer in zip(split.blocks, layers, strict=True):
        names.setdefault(id(layer), name)
    places = Counter(label_of(names[id(layer)], BEGINNING) for layer in layers)

    def choose(_: fx.Graph, cuts: Sequence[Cut]) -> Sequence[Cut]:
        calls = []
        seen: Counter[str] = Counter()
        for cut in cuts:
            seen[cut.label] += 1
            if seen[cut.label] <= places[cut.label]:
                calls.append(cut)
        starts = [sum(split.counts[:stage]) for stage in range(1, len(split.counts))]
        if starts and starts[-1] >= len(calls):
            raise PartitionError(
                f"the forward calls {len(calls)} of the {len(layers)} blocks that "
                f"{list(split.counts)} counts, so that the last stage has no beginning; name the "
                "modules of each stage"
            )
        return [calls[start] for start in starts]

    return Places(points=dict.fromkeys(names.values(), BEGINNING), choose=choose)
