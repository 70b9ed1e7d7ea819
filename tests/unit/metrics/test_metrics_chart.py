"""Charts: values land where they belong, and nothing that is drawn can break out of its drawing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from agentrl.metrics.chart import Series, bar_chart, line_chart, smoothed


def _series(name: str = "reward", y: tuple[float, ...] = (0.0, 0.5, 1.0), **options: object) -> Series:
    return Series(name=name, x=np.arange(1.0, len(y) + 1), y=np.array(y), colour=0, **options)  # type: ignore[arg-type]


def _points(chart: str) -> list[tuple[float, float]]:
    found = re.search(r'<polyline[^>]* points="([^"]*)"', chart)
    assert found is not None
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found[1].split())]


def test_a_curve_goes_from_corner_to_corner_of_its_range() -> None:
    (x0, y0), (x1, y1), (x2, y2) = _points(line_chart([_series()], label="reward", y_range=(0.0, 1.0)))
    assert (x0, x2) == (52.0, 566.0)
    assert (y0, y2) == (240.0, 14.0)
    assert (x1, y1) == ((52 + 566) / 2, (240 + 14) / 2)


def test_the_chart_is_well_formed_and_text_in_it_is_text() -> None:
    hostile = '</svg><script>alert("x")</script>'
    chart = line_chart([_series(hostile, points=True), _series("b")], label=hostile) + bar_chart([(hostile, 0.5)], label=hostile)
    root = ElementTree.fromstring(f"<div>{chart}</div>")
    assert {element.tag for element in root.iter()} <= {"div", "svg", "line", "text", "polyline", "circle", "title", "span", "i", "rect"}
    assert any(hostile in (element.text or "") for element in root.iter("title"))


def test_a_tooltip_says_the_value_and_its_interval() -> None:
    chart = line_chart([_series(y=(0.25, 0.5), band=(np.array([0.2, 0.4]), np.array([0.3, 0.6])), points=True)], label="EM", percent=True)
    assert "<title>reward, step 2: 50.0% [40.0%, 60.0%]</title>" in chart
    assert '<polygon class="band c0"' in chart


def test_ticks_are_round_numbers() -> None:
    chart = line_chart([_series(y=(0.0, 0.0037))], label="lr")
    assert re.findall(r'text-anchor="end">([^<]*)</text>', chart) == ["0", "0.001", "0.002", "0.003", "step"]


@pytest.mark.parametrize("y", [(0.0, 0.0), (3.0, 3.0), (-2.0, -2.0), (1e-7, 3e-7), (-5.0, 1e9), (4.0,)])
def test_any_range_can_be_drawn(y: tuple[float, ...]) -> None:
    assert all(0 <= px <= 580 and 0 <= py <= 270 for px, py in _points(line_chart([_series(y=y)], label="any")))


def test_nothing_to_show_is_no_chart() -> None:
    assert line_chart([], label="x") == ""
    assert line_chart([_series(y=())], label="x") == ""
    assert bar_chart([], label="x") == ""


def test_a_long_run_is_thinned_to_what_a_chart_can_show() -> None:
    chart = line_chart([_series(y=tuple(float(step % 2) for step in range(10_000)))], label="long")
    points = _points(chart)
    assert len(points) == 400
    assert len(chart) < 60_000


def test_the_legend_names_curves_where_there_are_several_and_leaves_faint_ones_out() -> None:
    assert "legend" not in line_chart([_series()], label="x")
    legend = line_chart([_series("raw", faint=True), _series("mean"), _series("max")], label="x").partition('<div class="legend">')[2]
    assert "mean" in legend
    assert "raw" not in legend


def test_bars_are_as_high_as_their_shares() -> None:
    chart = bar_chart([("0", 0.25), ("1", 0.75)], label="staleness")
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', chart)]
    assert heights[1] / heights[0] == pytest.approx(3.0, rel=0.01)


def test_smoothing_is_a_trailing_mean() -> None:
    assert smoothed(np.array([1.0, 2.0, 3.0, 4.0]), window=2).tolist() == [1.0, 1.5, 2.5, 3.5]
    assert smoothed(np.array([]), window=5).tolist() == []
