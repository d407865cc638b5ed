"""Layout strings: read, written, held against a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import PartitionError
from penstock.partition.balance.costs import BlockCosts, BlockKind
from penstock.partition.balance.layout import Layout
from penstock.partition.spec import SplitSpec


def blocks(kinds: str) -> list[BlockCosts]:
    return [BlockCosts(kind=BlockKind(letter)) for letter in kinds]


# --- layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("Et|tL", ("Et", "tL")),
        ("E t * 2 , | t , L", ("Ett", "tL")),
        ("(Et)|tL", ("Et", "tL")),
        ("E|(t|)*2(t|)*1tL", ("E", "t", "t", "t", "tL")),
        ("(t*2|)*2t", ("tt", "tt", "t")),
        ("((t*2|)*2t|)*2L", ("tt", "tt", "t", "tt", "tt", "t", "L")),
        ("t", ("t",)),
    ],
)
def test_layout_strings(text: str, stages: tuple[str, ...]) -> None:
    assert Layout.parse(text).stages == stages


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (("Ettt", *["tt"] * 29, "m", "L"), "Et*3|(tt|)*29,m|L"),
        (("Et", "tL"), "Et|tL"),
        (("tt",) * 4, "(tt|)*3,tt"),
        (("tt",) * 2, "tt|tt"),
        (("tttt", "tttt", "tttt", "tL"), "(t*4|)*3,tL"),
    ],
)
def test_layouts_are_written_as_short_as_they_go(stages: tuple[str, ...], text: str) -> None:
    assert str(Layout(stages=stages)) == text


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout: letters in order, cut anywhere."""
    flat = draw(st.sampled_from(["", "E"])) + "t" * draw(st.integers(1, 30))
    flat += "m" * draw(st.integers(0, 3)) + draw(st.sampled_from(["", "L"]))
    cuts = draw(st.sets(st.integers(1, len(flat) - 1))) if len(flat) > 1 else set()
    ends = [0, *sorted(cuts), len(flat)]
    return Layout(stages=tuple(flat[i:j] for i, j in zip(ends[:-1], ends[1:], strict=True)))  # noqa: RUF007


@given(layouts())
def test_any_layout_is_read_as_it_was_written(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    kinds = blocks("".join(layout.stages))
    assert Layout.of(kinds, layout.counts(kinds)) == layout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a stage is empty"),
        (" , ", "a stage is empty"),
        ("Et*|L", r"'\*' does not belong there; .*repetitions such as t\*3"),
        ("Et*", r"'\*' does not belong"),
        ("Et*0|L", r"t\*0 makes no letters"),
        ("Et*999999999|L", "more than 100000"),
        ("((t*1000)*1000)*1000", "more than 100000"),
        ("*3t", r"'\*' does not belong"),
        ("Et|x|L", "'x' does not belong there; a layout has the letters E, t, m, L"),
        ("E(t|", r"'\(' does not belong"),
        ("Et)|L", r"'\)' does not belong"),
        ("E()t", r"'\(' does not belong"),
        ("Et||L", "a stage is empty"),
        ("|Et", "a stage is empty"),
        ("E|(t|)*2|L", "a stage is empty"),
        ("Et|tL|", "a stage is empty; no | goes before the first stage or behind the last"),
        ("tE|L", "the order of blocks is EtmL"),
        ("Et|Lt", "the order of blocks is EtmL"),
        ("Em|t", "the order of blocks is EtmL"),
        ("EE|tL", "a model has one E and one L"),
        ("Et|L*2", "a model has one E and one L"),
    ],
)
def test_texts_that_are_no_layout(text: str, told: str) -> None:
    with pytest.raises(PartitionError, match=told.replace(" | ", r" \| ")):
        Layout.parse(text)


@pytest.mark.parametrize("stages", [(), ("",), ("t", ""), ("t|t",), ("x",), ("t", "E")])
def test_stages_that_make_no_layout(stages: tuple[str, ...]) -> None:
    with pytest.raises(PartitionError):
        Layout(stages=stages)


def test_a_layout_counts_the_blocks_of_a_model() -> None:
    assert Layout.parse("Et*3|(tt|)*2,L").counts(blocks("E" + "t" * 7 + "L")) == (4, 2, 2, 1)


def test_a_layout_for_another_model() -> None:
    with pytest.raises(PartitionError) as raised:
        Layout.parse("Et*3|tt|m|L").counts(blocks("E" + "t" * 8 + "L"))
    assert str(raised.value) == (
        "the layout Et*3|tt|m|L does not fit the model, whose blocks are Et*8L: it has "
        "5 t for the model's 8, 1 m for the model's 0"
    )


# --- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["uniform", "parameters", "type:Layer|Block", "Type: x"])
def test_rules_of_deepspeed_are_refused(rule: str) -> None:
    with pytest.raises(PartitionError, match=r"expected 'auto', .* number of its layers"):
        SplitSpec.parse(rule)
