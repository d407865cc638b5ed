"""One browser for all tests, and a new tab for each.

Where there is no Chromium the tests are skipped, unless PENSTOCK_NEEDS_BROWSER is set: then that is
an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright import sync_api

from .tabs import Tab, chromium, tab_of


@pytest.fixture(scope="session")
def browser() -> Iterator[sync_api.Browser]:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(chromium())
        except sync_api.Error as error:
            reason = f"no Chromium could be started ({error}); `make browser` gets one"
            if os.environ.get("PENSTOCK_NEEDS_BROWSER"):
                pytest.fail(reason)
            pytest.skip(reason)
        yield opened


@pytest.fixture
def tab(browser: sync_api.Browser) -> Iterator[Tab]:
    with tab_of(browser) as tab:
        yield tab
