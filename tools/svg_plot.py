"""Line plots as SVG, written by hand: panels side by side, one logarithmic axis, a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#b3401f", "#4a7a9c", "#1d6b45", "#8a6d1a")
DASHES = ("6 3", "2 2", "", "8 2 2 2")
PANEL_WIDTH, PANEL_HEIGHT = 330, 210
LEFT, RIGHT, TOP, BOTTOM, LEGEND = 52, 14, 30, 44, 22
STYLE = "font-family:sans-serif;font-size:12px;fill:#333"


@dataclass(frozen=True, slots=True)
class Series:
    """Points `(x, y)` with x > 0 and 0 <= y <= 1, in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_label: str
    series: Sequence[Series]


def cumulative(values: Sequence[float], num_points: int = 100) -> list[tuple[float, float]]:
    """The share of `values` that are at most x, at evenly spaced shares."""
    ordered = sorted(values)
    if not ordered:
        return []
    shares = [i / num_points for i in range(num_points + 1)]
    return [(ordered[min(len(ordered) - 1, int(s * len(ordered)))], s) for s in shares]


def draw(panels: Sequence[Panel], note: str) -> str:
    """The document. Panels share colours by the place of a series."""
    width = PANEL_WIDTH * len(panels)
    height = LEGEND + PANEL_HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="{STYLE}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    parts += _legend(panels[0].series)
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * PANEL_WIDTH},{LEGEND})">')
        parts += _panel(panel)
        parts.append("</g>")
    parts.append(_text(LEFT, height - 8, note, "start", "#777"))
    return "\n".join([*parts, "</svg>\n"])


def _legend(series: Sequence[Series]) -> list[str]:
    parts, x = [], LEFT
    for number, one in enumerate(series):
        parts.append(_line([(x, 14), (x + 26, 14)], number))
        parts.append(_text(x + 32, 18, one.name, "start"))
        x += 50 + 7 * len(one.name)
    return parts


def _panel(panel: Panel) -> list[str]:
    values = [x for one in panel.series for x, _ in one.points if x > 0] or [1.0]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    left, right = LEFT, PANEL_WIDTH - RIGHT
    top, bottom = TOP, PANEL_HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(max(x, 10**low)) - low) / (high - low)
        return left + share * (right - left), bottom - y * (bottom - top)

    parts = [_text((left + right) / 2, top - 10, panel.title, "middle", "#111")]
    for y in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += _rule(place(10**low, y), place(10**high, y))
        parts.append(_text(left - 6, place(1, y)[1] + 4, f"{y:.0%}", "end"))
    for power in range(low, high + 1):
        x = place(10**power, 0)[0]
        parts += _rule((x, bottom), (x, top))
        parts.append(_text(x, bottom + 15, f"{10.0**power:g}", "middle"))
    parts.append(_text((left + right) / 2, bottom + 32, panel.x_label, "middle"))
    for number, one in enumerate(panel.series):
        parts.append(_line([place(x, y) for x, y in one.points], number))
    return parts


def _rule(start: tuple[float, float], end: tuple[float, float]) -> list[str]:
    (x1, y1), (x2, y2) = start, end
    return [f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#ddd"/>']


def _line(points: Sequence[tuple[float, float]], number: int) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    return (
        f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dash}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
