"""Line and bar charts as inline SVG. Colours are CSS classes of the page, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.metrics.printable import html_text

__all__ = ["Series", "bar_chart", "line_chart", "smoothed"]

Floats = npt.NDArray[np.float64]

_WIDTH, _HEIGHT = 580, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 30
_MOST_POINTS = 400  # of a curve: more than a chart has pixels to show apart
_COLOURS = 6  # classes c0 ... c5 of the page


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve.

    Args:
        band: [N] lower and upper edge of a band around it, e.g. a confidence interval.
        points: mark the measured points (few of them, as of evaluations).
        faint: thin and pale, behind the others, and left out of the legend.
    """

    name: str
    x: Floats  # [N] ascending
    y: Floats  # [N]
    colour: int
    band: tuple[Floats, Floats] | None = None
    points: bool = False
    faint: bool = False


def smoothed(y: Floats, *, window: int) -> Floats:
    """[N] trailing mean over up to `window` values."""
    totals = np.cumsum(np.concatenate(([0.0], y)))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - window)
    means: Floats = (totals[ends] - totals[starts]) / (ends - starts)
    return means


def line_chart(series: Sequence[Series], *, label: str, y_range: tuple[float, float] | None = None, percent: bool = False) -> str:
    """An SVG with axes, grid, bands, curves, points with tooltips, and a legend where there are several curves.

    Args:
        label: what the chart shows, for screen readers.
        y_range: by default from the curves, with 0 where it is near.
        percent: write the y axis in percent.
    """
    drawn = [_thinned(one) for one in series if len(one.x)]
    if not drawn:
        return ""
    frame = _Frame.around(drawn, y_range)
    body = [frame.grid(percent=percent)]
    body += [_band(one.band, one, frame) for one in drawn if one.band is not None]
    body += [_curve(one, frame) for one in sorted(drawn, key=lambda one: not one.faint)]
    body += [_points(one, frame, percent=percent) for one in drawn if not one.faint]
    return _svg(body, label) + _legend([one for one in drawn if not one.faint])


def bar_chart(bars: Sequence[tuple[str, float]], *, label: str) -> str:
    """Bars of shares, each with its percentage."""
    if not bars:
        return ""
    top = _ceiling(max(value for _, value in bars)) or 1.0
    frame = _Frame(x_low=0.0, x_high=float(len(bars)), y_low=0.0, y_high=top)
    body = [frame.grid(percent=True, x_ticks=False)]
    width = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    for number, (name, value) in enumerate(bars):
        x, y, thick = frame.x(number + 0.5), frame.y(value), min(64.0, width * 0.64)
        box = f'x="{x - thick / 2:.1f}" y="{y:.1f}" width="{thick:.1f}" height="{frame.y(0.0) - y:.1f}" rx="3"'
        body.append(f'<rect class="fill c0" {box}><title>{html_text(name)}: {value:.2%}</title></rect>')
        body.append(f'<text class="value" x="{x:.1f}" y="{y - 5:.1f}" text-anchor="middle">{value:.1%}</text>')
        body.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 9}" text-anchor="middle">{html_text(name)}</text>')
    return _svg(body, label)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where values lie on the page."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, series: Sequence[Series], y_range: tuple[float, float] | None) -> _Frame:
        xs = np.concatenate([one.x for one in series])
        ys = np.concatenate([edge for one in series for edge in (one.y, *(one.band or ()))])
        low, high = y_range or (float(ys.min()), float(ys.max()))
        if y_range is None:
            low = 0.0 if 0 < low < 0.5 * high else low
            pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
            low, high = (low if low == 0.0 else low - pad), high + pad
        x_low, x_high = float(xs.min()), float(xs.max())
        return cls(x_low=x_low, x_high=x_high if x_high > x_low else x_low + 1.0, y_low=low, y_high=high)

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top; values outside the range lie on its edge."""
        inside = min(max(value, self.y_low), self.y_high)
        return _HEIGHT - _BOTTOM - (inside - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, x: Floats, y: Floats) -> str:
        """Points of a polyline."""
        return " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    def grid(self, *, percent: bool, x_ticks: bool = True) -> str:
        """Horizontal lines with their values, and the steps below."""
        lines = []
        for value in _ticks(self.y_low, self.y_high, 5):
            y = self.y(value)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_written(value, percent=percent)}</text>')
        for value in _ticks(self.x_low, self.x_high, 8) if x_ticks else ():
            if value == round(value):
                lines.append(f'<text class="tick" x="{self.x(value):.1f}" y="{_HEIGHT - 9}" text-anchor="middle">{value:.0f}</text>')
        if x_ticks:
            lines.append(f'<text class="axis" x="{_LEFT - 14}" y="{_HEIGHT - 9}" text-anchor="end">step</text>')
        return "".join(lines)


def _band(band: tuple[Floats, Floats], one: Series, frame: _Frame) -> str:
    low, high = band
    return f'<polygon class="band {_class(one)}" points="{frame.path(one.x, high)} {frame.path(one.x[::-1], low[::-1])}"/>'


def _curve(one: Series, frame: _Frame) -> str:
    return f'<polyline class="{"faint" if one.faint else "line"} {_class(one)}" points="{frame.path(one.x, one.y)}"/>'


def _points(one: Series, frame: _Frame, *, percent: bool) -> str:
    """Dots that show, or invisible ones that only carry the tooltip."""
    kind, radius = ("dot", 3.5) if one.points or len(one.x) == 1 else ("touch", 6.0)
    dots = []
    for index in range(0, len(one.x), max(1, len(one.x) // 120)):
        said = f"{one.name}, step {one.x[index]:g}: {_exact(one.y[index], percent=percent)}"
        if one.band is not None:
            said += " [{}, {}]".format(*(_exact(edge[index], percent=percent) for edge in one.band))
        at = f'cx="{frame.x(float(one.x[index])):.1f}" cy="{frame.y(float(one.y[index])):.1f}" r="{radius}"'
        dots.append(f'<circle class="{kind} {_class(one)}" {at}><title>{html_text(said)}</title></circle>')
    return "".join(dots)


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    entries = "".join(f'<span><i class="key {_class(one)}"></i>{html_text(one.name)}</span>' for one in series)
    return f'<div class="legend">{entries}</div>'


def _svg(body: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html_text(label)}">{"".join(body)}</svg>'


def _class(one: Series) -> str:
    return f"c{one.colour % _COLOURS}"


def _thinned(one: Series) -> Series:
    """At most `_MOST_POINTS` points, each the mean of its neighbours."""
    if len(one.x) <= _MOST_POINTS or one.band is not None:
        return one
    parts = np.array_split(np.arange(len(one.x)), _MOST_POINTS)
    return Series(
        name=one.name,
        x=np.array([one.x[part].mean() for part in parts]),
        y=np.array([one.y[part].mean() for part in parts]),
        colour=one.colour,
        points=one.points,
        faint=one.faint,
    )


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round values between low and high, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / apart - 1e-9)
    return [round(number * apart, 12) for number in range(first, math.floor(high / apart + 1e-9) + 1)]


def _ceiling(value: float) -> float:
    """Room above the highest bar for its number, but at most what 100 % needs."""
    return min(1.12, value * 1.15)


def _written(value: float, *, percent: bool) -> str:
    """A tick's value."""
    if percent:
        return f"{value * 100:.4g}%"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:g}"


def _exact(value: float, *, percent: bool) -> str:
    """A point's value."""
    return f"{value:.1%}" if percent else f"{value:.4g}"
