"""Line charts, step histograms and scatter plots as inline SVG: a few shapes, no plotting library, readable
in print and without colour (every series has its own dashes or its own mark as well).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_quantguard.report.markup import Child, Html, tag

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 44
DASHES = ("", "6 3", "2 3", "8 3 2 3", "10 4", "1 4")
MOST_TICKS = 5
RADIUS = 4
NAME_WIDTH, NAME_HEIGHT = 5.8, 9
"""Of a character of a name beside a mark, about."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line, in x order."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a scatter plot. title: what a pointer that rests on it reads. name: written beside it."""

    x: float
    y: float
    title: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels, linearly or by their logarithm."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; values beyond the axis lie on its end."""
        low, high, inside = (
            self._scaled(self.low),
            self._scaled(self.high),
            min(max(value, self.low), self.high),
        )
        share = (self._scaled(inside) - low) / (high - low)
        return round(self.begin + share * (self.end - self.begin), 2)

    def ticks(self) -> list[tuple[float, str]]:
        """Values to label, with their labels."""
        values = _decades(self.low, self.high) if self.logarithmic else _round_steps(self.low, self.high)
        return [(value, _tick(value)) for value in values]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def lines(
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    labels: tuple[str, str],
    top: float | None = None,
    reference: tuple[str, float] | None = None,
) -> Html:
    """Lines over a linear x axis, y from zero. top: of the y axis, so that several charts compare.

    reference: name and height of a horizontal line.
    """
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + ([reference[1]] if reference else [])
    x_axis = Axis(min(xs), max(max(xs), min(xs) + 1), LEFT, WIDTH - RIGHT)
    y_axis = Axis(0, top or max(ys, default=0) or 1, HEIGHT - BOTTOM, TOP)
    drawn: list[Child] = [_axes(x_axis, y_axis, labels)]
    if reference is not None:
        height = y_axis.at(reference[1])
        drawn.append(tag("path", d=f"M{LEFT} {height}H{WIDTH - RIGHT}", class_="reference"))
    drawn += [_line(one, index, x_axis, y_axis) for index, one in enumerate(series)]
    names = [one.name for one in series]
    return _figure(title, description, drawn, names, reference[0] if reference else None)


def histogram(
    title: str,
    description: str,
    edges: Sequence[float],
    shares: Sequence[tuple[str, Sequence[float]]],
    *,
    labels: tuple[str, str],
) -> Html:
    """Outlines of histograms over a logarithmic x axis; only bins between the first and the last used one."""
    used = [index for index in range(len(edges) - 1) if any(values[index] > 0 for _, values in shares)]
    first, last = (used[0], used[-1]) if used else (0, len(edges) - 2)
    x_axis = Axis(edges[first], edges[last + 1], LEFT, WIDTH - RIGHT, logarithmic=True)
    y_axis = Axis(0, max((max(values) for _, values in shares), default=1) or 1, HEIGHT - BOTTOM, TOP)
    series = []
    for name, values in shares:
        points: list[tuple[float, float]] = [(edges[first], 0.0)]
        for index in range(first, last + 1):
            points += [(edges[index], values[index]), (edges[index + 1], values[index])]
        series.append(Series(name, (*points, (edges[last + 1], 0.0))))
    drawn = [_axes(x_axis, y_axis, labels)]
    drawn += [_line(one, index, x_axis, y_axis) for index, one in enumerate(series)]
    return _figure(title, description, drawn, [name for name, _ in shares])


def scatter(title: str, description: str, marks: Sequence[Mark], *, labels: tuple[str, str]) -> Html:
    """Points over two equal logarithmic axes with their diagonal; values that are zero lie on the edge."""
    values = [value for mark in marks for value in (mark.x, mark.y) if value > 0] or [1.0]
    low, high = min(values) / 1.5, max(values) * 1.5
    x_axis = Axis(low, high, LEFT, WIDTH - RIGHT, logarithmic=True)
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP, logarithmic=True)
    drawn: list[Child] = [_axes(x_axis, y_axis, labels)]
    diagonal = f"M{LEFT} {HEIGHT - BOTTOM}L{WIDTH - RIGHT} {TOP}"
    drawn.append(tag("path", d=diagonal, class_="reference"))
    centres = [(x_axis.at(mark.x), y_axis.at(mark.y)) for mark in marks]
    for mark, (x, y) in zip(marks, centres, strict=True):
        drawn.append(tag("circle", tag("title", mark.title), cx=x, cy=y, r=RADIUS, class_="mark"))
    for (x, y), name in _names_apart([mark.name for mark in marks], centres):
        drawn.append(tag("text", name, x=x, y=y, class_="name"))
    return _figure(title, description, drawn, [], "equal in both")


def _names_apart(
    names: Sequence[str], centres: Sequence[tuple[float, float]]
) -> list[tuple[tuple[float, float], str]]:
    """Where each name begins, on its baseline: beside its own mark, on no other name, on as few marks as may
    be. A name that finds no place is left out; it is in the title of its mark.
    """
    placed: list[tuple[_Box, str]] = []
    for name, (x, y) in zip(names, centres, strict=True):
        width = NAME_WIDTH * len(name)
        starts = (
            (x + 7, y + 4),
            (x - 7 - width, y + 4),
            (x + 4, y - 6),
            (x + 4, y + 14),
            (x - 4 - width, y - 6),
            (x - 4 - width, y + 14),
        )
        boxes = [_Box(left, base - NAME_HEIGHT, left + width, base + 2) for left, base in starts]
        free = [box for box in boxes if box.inside and not any(box.meets(other) for other, _ in placed)]
        if name and free:
            placed.append((min(free, key=lambda box: sum(box.covers(*centre) for centre in centres)), name))
    return [((box.left, box.bottom - 2), name) for box, name in placed]


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle in pixels, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def inside(self) -> bool:
        """Whether it lies within the axes."""
        return (
            self.left > LEFT
            and self.right < WIDTH - RIGHT
            and self.top > TOP
            and self.bottom < HEIGHT - BOTTOM
        )

    def meets(self, other: _Box) -> bool:
        """Whether they have a point in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def covers(self, x: float, y: float) -> bool:
        """Whether it lies over a mark."""
        return self.meets(_Box(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS))


def bars(
    title: str,
    description: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    *,
    names: Sequence[str],
    label: str,
) -> Html:
    """Horizontal bars of shares, 0 to 1: a row for each name, in it a bar for each of `names`."""
    thick = 9
    step = thick * len(names) + 8
    height = TOP + step * len(rows) + BOTTOM
    axis = Axis(0, max((value for _, values in rows for value in values), default=0) or 1, 96, WIDTH - RIGHT)
    drawn: list[Child] = []
    for value, text in axis.ticks():
        at = axis.at(value)
        drawn.append(tag("path", d=f"M{at} {TOP}V{height - BOTTOM}", class_="grid"))
        drawn.append(tag("text", text, x=at, y=height - BOTTOM + 17, text_anchor="middle"))
    for place, (name, values) in enumerate(rows):
        top = TOP + step * place
        drawn.append(tag("text", name, x=90, y=top + thick * len(names) / 2 + 6, text_anchor="end"))
        for number, value in enumerate(values):
            at = top + thick * (number + 0.5) + 2
            line = f"M96 {at}H{axis.at(value)}"
            told = tag("title", f"{name}, {names[number]}: {value:.1%}")
            drawn.append(
                tag("path", told, d=line, class_=f"series s{number}", style=f"stroke-width:{thick - 2}")
            )
    drawn.append(tag("text", label, x=(96 + WIDTH) / 2, y=height - 8, text_anchor="middle", class_="label"))
    return _figure(title, description, drawn, names if len(names) > 1 else [], height=height)


def _figure(
    title: str,
    description: str,
    drawn: Sequence[Child],
    names: Sequence[str],
    reference: str | None = None,
    *,
    height: float = HEIGHT,
) -> Html:
    """The drawing with its caption and legend; what it shows is said in words to those who cannot see it."""
    legend = [
        tag("span", _sample(f"series s{index}", DASHES[index % len(DASHES)]), name, class_="key")
        for index, name in enumerate(names)
    ]
    if reference is not None:
        legend.append(tag("span", _sample("reference", ""), reference, class_="key"))
    drawing = tag(
        "svg",
        *drawn,
        viewbox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=f"{title}. {description}",
    )
    return tag("figure", tag("figcaption", title), drawing, tag("div", legend, class_="legend"))


def _sample(kind: str, dashes: str) -> Html:
    line = tag("path", d="M0 5H24", class_=kind, stroke_dasharray=dashes or None)
    return tag("svg", line, viewbox="0 0 24 10", class_="sample", aria_hidden="true")


def _line(series: Series, index: int, x_axis: Axis, y_axis: Axis) -> Html:
    path = "L".join(f"{x_axis.at(x)} {y_axis.at(y)}" for x, y in series.points)
    kind = f"series s{index % len(DASHES)}"
    dashes = DASHES[index % len(DASHES)] or None
    return tag("path", tag("title", series.name), d=f"M{path}", class_=kind, stroke_dasharray=dashes)


def _axes(x_axis: Axis, y_axis: Axis, labels: tuple[str, str]) -> Html:
    """Grid, ticks and the names of the axes."""
    floor = HEIGHT - BOTTOM
    drawn: list[Child] = []
    for value, name in y_axis.ticks():
        at = y_axis.at(value)
        drawn.append(tag("path", d=f"M{LEFT} {at}H{WIDTH - RIGHT}", class_="grid"))
        drawn.append(tag("text", name, x=LEFT - 6, y=at + 4, text_anchor="end"))
    for value, name in x_axis.ticks():
        at = x_axis.at(value)
        drawn.append(tag("path", d=f"M{at} {floor}v4", class_="axis"))
        drawn.append(tag("text", name, x=at, y=floor + 17, text_anchor="middle"))
    drawn.append(tag("path", d=f"M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}", class_="axis"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(tag("text", labels[0], x=middle, y=HEIGHT - 8, text_anchor="middle", class_="label"))
    half = (TOP + floor) / 2
    turned = f"translate(13 {half}) rotate(-90)"
    drawn.append(tag("text", labels[1], transform=turned, text_anchor="middle", class_="label"))
    return tag("g", drawn)


def _round_steps(low: float, high: float) -> list[float]:
    """About MOST_TICKS values at 1, 2 or 5 times a power of ten."""
    rough = (high - low) / MOST_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten within the axis, thinned; with their double and fivefold where there are few."""
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if end - begin <= 2 else (1,)
    values = [factor * 10.0**power for power in range(begin, end + 1) for factor in factors]
    inside = [value for value in values if low <= value <= high]
    return inside[:: max(1, math.ceil(len(inside) / (MOST_TICKS + 2)))]


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if abs(value) < 1e-3 else f"{value:.4g}"
