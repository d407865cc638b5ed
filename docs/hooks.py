"""Links names of the API to their entries, on the pages of the site.

Docstrings name things in plain code, such as ``Costs`` or ``penstock.simulate``, as they are read
in a console. On the site each such name leads to the entry of the API reference, if there is one.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

REFERENCE = Path(__file__).parent / "reference"
_ENTRY = re.compile(r"^::: ([\w.]+)", re.M)
_CODE = re.compile(r"<code>(penstock\.(?:\w+\.)*)?(\w+)(?:\(\))?</code>")
# Within these, names stay as they are.
_KEPT = re.compile(r"(<(a|pre|h[1-6]|autoref)\b.*?</\2>)", re.S)


@cache
def entries() -> dict[str, str]:
    """Identifiers of the entries of the reference, by the last part of their names."""
    found = [name for path in REFERENCE.glob("*.md") for name in _ENTRY.findall(path.read_text())]
    return {name.rpartition(".")[2]: name for name in found}


def on_page_content(html: str, *, page, **_) -> str:
    """Link names: in the reference all of them, on other pages those with ``penstock.`` before."""
    in_reference = page.file.src_uri.startswith("reference/")

    def linked(found: re.Match[str]) -> str:
        identifier = entries().get(found[2])
        if identifier is None or not (in_reference or found[1]):
            return found[0]
        return f'<autoref identifier="{identifier}">{found[0]}</autoref>'

    parts = _KEPT.split(html)
    # split gives the text, what is kept, and the name of its tag, in turn.
    texts = [_CODE.sub(linked, text) for text in parts[::3]]
    return "".join(text + kept for text, kept in zip(texts, [*parts[1::3], ""], strict=True))
