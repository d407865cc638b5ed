"""Runs the command as a user does: arguments in, text and exit code out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock.cli.app import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output and the exit code of a command."""

    out: str
    err: str
    code: int


Command = Callable[..., Output]


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``penstock("simulate", "1f1b")`` runs ``penstock simulate 1f1b``."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: str) -> Output:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        code = ended.value.code
        return Output(out=captured.out, err=captured.err, code=code if isinstance(code, int) else 0)

    return run
