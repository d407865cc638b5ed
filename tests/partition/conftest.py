"""Captures in tests, without the record that torch keeps of them: pytest would keep all of it."""

from __future__ import annotations

import logging

logging.getLogger("torch.__trace").propagate = False
