"""docs/conformance.md says what this suite knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from differences import DIFFERENCES, markdown

pytestmark = pytest.mark.slow  # the last of the suite: the end of its servers is counted here

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"


def test_the_page_has_the_table_of_wanted_differences():
    assert markdown() in PAGE.read_text(encoding="utf-8"), f"the page wants this table:\n{markdown()}"


def test_every_wanted_difference_is_met_by_a_test_and_every_test_asks_for_a_known_one():
    source = "\n".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    unused = [name for name in DIFFERENCES if f'"{name}"' not in source]
    assert unused == []
    assert set(re.findall(r'differs\("([^"]+)"\)', source)) <= set(DIFFERENCES)


def test_the_page_names_every_file_of_the_suite():
    page = PAGE.read_text(encoding="utf-8")
    assert [path.name for path in sorted(HERE.glob("test_*.py")) if path.stem not in page] == []
