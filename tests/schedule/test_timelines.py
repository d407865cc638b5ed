"""Every family's timeline, as the file that builds it draws it."""

import sys
from textwrap import dedent, indent

import pytest

from penstock.schedule.registry import build, family, schedules
from tests.schedule.drawing import draw

TIMELINES = [
    (
        "forward-only",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 F3 .. ..
        rank 1  .. F0 F1 F2 F3 ..
        rank 2  .. .. F0 F1 F2 F3
        """,
    ),
    (
        "forward-only",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 F2 F3 f2 f3 ..
        rank 1  .. F0 F1 f0 f1 F2 F3 f2 f3
        """,
    ),
    (
        "gpipe",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
        rank 1  .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
        rank 2  .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
        """,
    ),
    (
        "1f1b",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
        """,
    ),
    (
        "seq1f1b",
        3,
        2,
        1,
        """
        rank 0  F0 F1 F2 F3 .. .. .. .. B1 -- .. B0 -- .. B3 -- B2 --
        rank 1  .. F0 F1 F2 .. .. B1 -- F3 B0 -- .. B3 -- B2 -- .. ..
        rank 2  .. .. F0 F1 B1 -- F2 B0 -- F3 B3 -- B2 -- .. .. .. ..
        """,
    ),
    (
        "interleaved-1f1b",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 F2 .. b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .. b2 -- .. b3 -- B2 -- B3 --
        rank 1  .. F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .. ..
        """,
    ),
    (
        "looped-bfs",
        2,
        3,
        2,
        """
        rank 0  F0 F1 F2 f0 f1 f2 .. .. .. b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
        rank 1  .. F0 F1 F2 f0 f1 f2 b0 -- b1 -- b2 -- B0 -- B1 -- B2 -- .. ..
        """,
    ),
    (
        "interleaved-zb",
        3,
        5,
        1,
        """
        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
        """,
    ),
    (
        "interleaved-zb",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
        """,
    ),
    (
        "zbv",
        2,
        4,
        2,
        """
        rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
        rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
        """,
    ),
    (
        "dualpipev",
        2,
        4,
        2,
        """
        rank 0  F0 F1 F2 f0 i0 w0 f1 F3+b1 -- .. f2+B0 -- b2 -- .. f3+B1 -- b3 -- I2 W2 I3 W3
        rank 1  .. F0 f0 F1 f1 F2 b0 -- f2+B0 -- F3+b1 -- f3+B1 -- b2 -- B2 -- .. i3 I3 w3 W3
        """,
    ),
    (
        "dualpipe",
        4,
        8,
        1,
        """
        rank 0  F0 F2 F4 f1 i1 w1 f3 F6+b3 -- .. f5+B0 -- b5 -- .. f7+B2 -- b7 -- I4 W4 I6 W6
        rank 1  .. F0 f1 F2 f3 F4 b1 -- f5+B0 -- F6+b3 -- f7+B2 -- b5 -- B4 -- .. i7 I6 w7 W6
        rank 2  .. f1 F0 f3 F2 f5 B0 -- F4+b1 -- f7+B2 -- F6+b3 -- B4 -- b5 -- .. I6 i7 W6 w7
        rank 3  f1 f3 f5 F0 I0 W0 F2 f7+B2 -- .. F4+b1 -- B4 -- .. F6+b3 -- B6 -- i5 w5 i7 w7
        """,
    ),
    (
        "chimera",
        4,
        4,
        1,
        """
        rank 0  F0 F2 .. f1 b1 -- f3 b3 -- .. B0 -- .. .. B2 --
        rank 1  .. F0 f1 F2 f3 .. b1 -- B0 -- b3 -- B2 -- .. ..
        rank 2  .. f1 F0 f3 F2 .. B0 -- b1 -- B2 -- b3 -- .. ..
        rank 3  f1 f3 .. F0 B0 -- F2 B2 -- .. b1 -- .. .. b3 --
        """,
    ),
    (
        "eager-1f1b",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 F2 .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
        """,
    ),
    (
        "zb-h1",
        3,
        5,
        1,
        """
        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
        """,
    ),
    (
        "zb-h2",
        3,
        6,
        1,
        """
        rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
        rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ..
        rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
        """,
    ),
    (
        "zb-2p",
        3,
        6,
        1,
        """
        rank 0  F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5 .. ..
        rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 ..
        rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5
        """,
    ),
    (
        "gis",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 .. i3 w3 I2 W2 I3 W3
        rank 1  .. F0 F1 f0 i0 w0 f1 i1 w1 F2 I0 W0 F3 I1 W1 f2 i2 w2 f3 i3 w3 I2 W2 I3 W3 ..
        """,
    ),
    (
        "po-h",
        2,
        3,
        2,
        """
        rank 0  F0 F1 f0 .. .. i0 w0 F2 f1 I0 W0 i1 w1 f2 I1 W1 i2 w2 I2 W2
        rank 1  .. F0 F1 f0 i0 w0 I0 W0 F2 f1 i1 w1 I1 W1 f2 i2 w2 I2 W2 ..
        """,
    ),
    (
        "po-f",
        2,
        3,
        2,
        """
        rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 .. I0 W0 f2 I1 W1 i2 w2 I2 W2
        rank 1  .. F0 F1 f0 i0 w0 f1 i1 w1 F2 I0 W0 I1 W1 f2 i2 w2 I2 W2 ..
        """,
    ),
    (
        "gis-h",
        3,
        3,
        2,
        """
        rank 0  F0 F1 .. f0 f1 F2 .. .. i0 w0 .. i1 w1 f2 I0 W0 .. I1 W1 i2 w2 .. I2 W2
        rank 1  .. F0 F1 .. f0 f1 .. i0 w0 F2 i1 w1 .. I0 W0 f2 I1 W1 i2 w2 .. I2 W2 ..
        rank 2  .. .. F0 F1 .. f0 i0 w0 f1 i1 w1 F2 I0 W0 I1 W1 f2 i2 w2 .. I2 W2 .. ..
        """,
    ),
    (
        "zb-1p",
        3,
        5,
        1,
        """
        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
        """,
    ),
    (
        "v-zb",
        2,
        4,
        2,
        """
        rank 0  F0 F1 F2 f0 i0 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 f3 i3 I2 w3 I3 W2 W3 ..
        rank 1  .. F0 f0 F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
        """,
    ),
    (
        "v-half",
        2,
        4,
        2,
        """
        rank 0  F0 F1 .. f0 i0 F2 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 f3 i3 I2 W1 I3 w3 W2 W3
        rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
        """,
    ),
    (
        "v-min",
        2,
        4,
        2,
        """
        rank 0  F0 F1 .. f0 i0 f1 w0 I0 i1 F2 W0 w1 I1 f2 i2 F3 W1 w2 I2 f3 i3 W2 w3 I3 W3
        rank 1  .. F0 f0 F1 f1 i0 I0 w0 W0 i1 F2 I1 f2 w1 W1 i2 F3 I2 f3 w2 W2 i3 I3 w3 W3
        """,
    ),
    (
        "1f1b-v",
        2,
        4,
        2,
        """
        rank 0  F0 F1 .. f0 b0 -- f1 b1 -- F2 B0 -- f2 b2 -- F3 B1 -- f3 b3 -- .. B2 -- .. .. B3 --
        rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- F2 f2 b1 -- B1 -- F3 f3 b2 -- B2 -- b3 -- B3 -- .. ..
        """,
    ),
    (
        "hanayo",
        2,
        3,
        2,
        """
        rank 0  F0 F1 F2 f0 b0 -- f1 b1 -- .. B0 -- .. .. B1 -- f2 b2 -- .. .. .. .. B2 --
        rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- b1 -- B1 -- F2 f2 .. .. .. b2 -- B2 -- .. ..
        """,
    ),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "virtual", "drawn"), TIMELINES)
def test_timeline_is_as_drawn(
    name: str, ranks: int, microbatches: int, virtual: int, drawn: str
) -> None:
    program = build(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    timeline = dedent(drawn).strip()
    assert draw(program) == timeline
    documentation = sys.modules[family(name).builder.__module__].__doc__
    assert documentation is not None and indent(timeline, "    ") in documentation


def test_every_family_is_drawn() -> None:
    # ZB-H1 is drawn once more where it is interleaved zero bubble with one stage per rank.
    assert {name for name, *_ in TIMELINES} == {each.name for each in schedules()}
