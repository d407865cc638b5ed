"""Captures in tests: without the record that torch keeps of them, of which pytest would keep all."""

from __future__ import annotations

import logging

logging.getLogger("torch.__trace").propagate = False
