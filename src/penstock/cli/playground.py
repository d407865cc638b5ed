"""``penstock playground``: a local page on which a schedule follows sliders."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import stdout
from penstock.errors import PenstockError

__all__ = ["playground"]


def playground(
    *,
    port: Annotated[int, typer.Option(help="Where to listen; 0 for any free port.")] = 5006,
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = True,
) -> None:
    """Try schedules out on a page with sliders, served on 127.0.0.1 until Ctrl-C."""
    try:
        from penstock.view.playground import serve
    except ImportError as error:
        raise PenstockError(
            "the playground needs Bokeh, which is not installed: pip install 'penstock[view]'"
        ) from error

    def ready(url: str) -> None:
        stdout().print(f"the playground is at [bold]{url}[/] (Ctrl-C ends it)", soft_wrap=True)

    serve(port=port, browser=browser, ready=ready)
