"""Plots as inline SVG: a pure function from series to markup, styled by the page's style sheet.

Built as an element tree, so that no name or label can become markup.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Place = Callable[[float, float], tuple[float, float]]
    """From values to a place in the picture."""

WIDTH: Final = 520
HEIGHT: Final = 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 38
COLORS: Final = 6


class Point(msgspec.Struct, frozen=True):
    """One point, with its interval if there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Series(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        color: number of its colour, from 0; the same thing has the same colour in all plots.
        dashed: drawn with a broken line.
        marks: whether each point is a dot that tells its value.

    """

    name: str
    points: list[Point]
    color: int = 0
    dashed: bool = False
    marks: bool = True


def line(series: Sequence[Series], *, title: str, x: str, y: str, log_x: bool = False) -> str:
    """Return a plot; of series without points, an empty one.

    Args:
        series: the lines.
        title: for who cannot see it.
        x: what the x axis shows, with its unit.
        y: the same of the y axis, which begins at 0.
        log_x: whether each doubling of x is as wide as the next.

    """
    points = [point for each in series for point in each.points]
    xs = [point.x for point in points] or [0.0, 1.0]
    top = _nice(max([1e-12, *(max(point.y, point.high or 0.0) for point in points)]))
    low, high = min(xs), max(xs)
    low, high = (low * 0.8, high * 1.25) if log_x else (low, high if high > low else low + 1)
    root = ET.Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "class": "plot", "role": "img", "aria-label": title})

    def at(point_x: float, point_y: float) -> tuple[float, float]:
        share = math.log(point_x / low) / math.log(high / low) if log_x else (point_x - low) / (high - low)
        inner = HEIGHT - TOP - BOTTOM
        return LEFT + share * (WIDTH - LEFT - RIGHT), TOP + inner - point_y / top * inner

    _axes(root, sorted(set(xs)) if log_x else _ticks(low, high), _ticks(0.0, top), at)
    _text(root, ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4), x, "label", "middle")
    label = _text(root, (0, 0), y, "label", "middle")
    label.set("transform", f"translate(12 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)")
    for each in series:
        _draw(root, each, at)
    return ET.tostring(root, encoding="unicode")


def _axes(root: ET.Element, xs: Sequence[float], ys: Sequence[float], at: _Place) -> None:
    bottom = HEIGHT - BOTTOM
    for value in ys:
        _, y = at(xs[0], value)
        _line(root, (LEFT, y), (WIDTH - RIGHT, y), "grid")
        _text(root, (LEFT - 6, y + 4), _short(value), "tick", "end")
    for value in xs:
        x, _ = at(value, 0)
        _line(root, (x, bottom), (x, bottom + 4), "axis")
        _text(root, (x, bottom + 16), _short(value), "tick", "middle")
    _line(root, (LEFT, bottom), (WIDTH - RIGHT, bottom), "axis")


def _draw(root: ET.Element, series: Series, at: _Place) -> None:
    group = ET.SubElement(root, "g", {"class": f"c{series.color % COLORS}"})
    points = sorted(series.points, key=lambda point: point.x)
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(point.x, point.y) for point in points))
    ET.SubElement(group, "polyline", {"points": way, "class": "dashed" if series.dashed else "solid"})
    for point in points:
        x, y = at(point.x, point.y)
        if point.low is not None and point.high is not None:
            _line(group, (x, at(point.x, point.low)[1]), (x, at(point.x, point.high)[1]), "whisker")
        if series.marks:
            dot = ET.SubElement(group, "circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3.2"})
            ET.SubElement(dot, "title").text = f"{series.name}: {_short(point.x)} → {_short(point.y)}"


def _line(root: ET.Element, begin: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    ends = {"x1": begin[0], "y1": begin[1], "x2": end[0], "y2": end[1]}
    ET.SubElement(root, "line", {name: f"{value:.1f}" for name, value in ends.items()} | {"class": kind})


def _text(root: ET.Element, at: tuple[float, float], text: str, kind: str, anchor: str) -> ET.Element:
    element = ET.SubElement(
        root, "text", {"x": f"{at[0]:.1f}", "y": f"{at[1]:.1f}", "class": kind, "text-anchor": anchor}
    )
    element.text = text
    return element


def _nice(value: float) -> float:
    """Return the next number above that people like to read at an axis."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 8, 10) if step * power >= value * 0.999)


def _ticks(low: float, high: float) -> list[float]:
    step = _nice((high - low) / 5)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
