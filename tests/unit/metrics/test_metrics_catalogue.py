"""The catalogue is whole, and the document is made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.metrics.catalogue import CATALOGUE, render, unknown

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_document_is_what_the_catalogue_renders() -> None:
    remedy = "make it anew: python -c 'from agentrl.metrics.catalogue import render; print(render(), end=\"\")' > docs/metrics.md"
    assert DOCUMENT.read_text(encoding="utf-8") == render(), remedy


def test_every_metric_has_a_definition_and_a_unit_and_one_entry() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    assert all(metric.definition and metric.unit for metric in CATALOGUE)
    assert not any("|" in field for metric in CATALOGUE for field in (metric.name, metric.definition, metric.unit, metric.denominator, metric.verl))


@pytest.mark.parametrize(
    "name", ["learner/loss", "batch/staleness/12", "drops/group_incomplete", "eval/heldout/em/2-hop/nq", "memory_mb/engine-0", "buffer/running"]
)
def test_a_defined_name_is_known(name: str) -> None:
    assert unknown([name]) == []


@pytest.mark.parametrize("name", ["learner/los", "batch/staleness/", "eval/heldout", "eval/heldout/accuracy", "loss", "drops"])
def test_an_undefined_name_is_reported(name: str) -> None:
    assert unknown([name, "run/step"]) == [name]


def test_means_and_shares_say_what_they_are_taken_over() -> None:
    assert [metric.name for metric in CATALOGUE if metric.unit == "share" and not metric.denominator] == []
