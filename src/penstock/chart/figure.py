"""Charts, and where everything on them goes: axes with ticks, a legend, marks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.chart.raster import Raster
from penstock.chart.surface import F64, Clip, Surface
from penstock.chart.svg import Svg
from penstock.errors import ConfigError

COLOURS = (
    "#3b6fb6", "#e58b3a", "#4f9d69", "#c4504f", "#8d6fb8", "#8a6a52", "#d882b3", "#7f868c",
    "#b3a434", "#43a9b8",
)  # fmt: skip
BACKGROUND, INK, SOFT, GRID, AXIS = "#ffffff", "#24292f", "#59636e", "#e4e7eb", "#aab2bb"
TITLE, LABEL, TICK = 17.0, 13.0, 12.0  # sizes of text
LEFT, RIGHT, LEGEND = 78, 24, 190  # pixels beside the axes; LEGEND at most
SWATCH = 38  # pixels of the legend before a name
ABOVE, BELOW = 40, 54  # and above and below them
MARK_APART = 14  # pixels between a mark and the text of the next one, at least


@dataclass(slots=True)
class Chart:
    """What one pair of axes shows. `percent` labels its values as such; `top` ends the axis."""

    title: str = ""
    x: str = ""
    y: str = ""
    percent: bool = False
    top: float | None = None
    stacked: list[tuple[str, F64, F64, F64]] = field(default_factory=list, init=False)
    curves: list[tuple[str, F64, F64]] = field(default_factory=list, init=False)
    marks: list[tuple[float, str]] = field(default_factory=list, init=False)
    levels: list[tuple[float, str, str]] = field(default_factory=list, init=False)

    def areas(self, x: npt.ArrayLike, values: Mapping[str, npt.ArrayLike]) -> Chart:
        """Areas stacked from below, by name; where an x comes twice, they jump."""
        at = _numbers(x, "x")
        low = np.zeros(len(at))
        for name, each in values.items():
            high = low + _numbers(each, name, len(at))
            self.stacked.append((name, at, low, high))
            low = high
        return self

    def lines(self, series: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]]) -> Chart:
        """Lines by name, each through its (x, y)."""
        for name, (x, y) in series.items():
            at = _numbers(x, "x")
            self.curves.append((name, at, _numbers(y, name, len(at))))
        return self

    def mark(self, x: float, text: str = "") -> Chart:
        """A place on the horizontal axis."""
        self.marks.append((x, text))
        return self

    def level(self, y: float, text: str, name: str = "") -> Chart:
        """A height, in the colour of the series of that name."""
        self.levels.append((y, text, name))
        return self

    @property
    def names(self) -> list[str]:
        """What the legend lists: areas from the top down, as they are stacked; then lines."""
        return [a[0] for a in reversed(self.stacked)] + [line[0] for line in self.curves]

    def x_range(self) -> tuple[float, float] | None:
        """The least and the greatest x; None where there is nothing."""
        found = [each[1] for each in self.stacked] + [x for _, x, _ in self.curves]
        found = [x for x in found if len(x)]
        if not found:
            return None
        return min(float(x.min()) for x in found), max(float(x.max()) for x in found)

    def y_range(self) -> tuple[float, float]:
        """The heights that the axis shows."""
        found = [y for each in self.stacked for y in each[2:]] + [y for _, _, y in self.curves]
        found = [y[np.isfinite(y)] for y in found]
        least = min((float(y.min()) for y in found if len(y)), default=0.0)
        most = max((float(y.max()) for y in found if len(y)), default=1.0)
        most = max([most, *(level for level, _, _ in self.levels)])
        if self.top is not None:
            most = self.top
        if least > 0 and (self.stacked or least < most / 2):
            least = 0.0
        if least == most:
            return least, most + 1
        margin = 0 if self.top is not None else (most - least) * 0.06
        return (least if least == 0 else least - margin), most + margin


def save(
    path: str | os.PathLike[str],
    *charts: Chart,
    title: str = "",
    size: tuple[int, int] = (1000, 600),
) -> None:
    """Draw charts, one below the other, to a .png or an .svg file."""
    where = Path(path)
    where.write_bytes(drawn(where.suffix.lower(), charts, title=title, size=size).data())


def drawn(
    suffix: str, charts: Sequence[Chart], *, title: str = "", size: tuple[int, int] = (1000, 600)
) -> Surface:
    """Charts on a surface of the kind that a suffix names."""
    kinds: dict[str, type[Raster] | type[Svg]] = {".png": Raster, ".svg": Svg}
    if suffix not in kinds:
        raise ConfigError(f"a picture is written as .png or .svg, not as {suffix or 'it is'!r}")
    width, height = size
    surface = kinds[suffix](width, height, BACKGROUND)
    head = 46 if title else 10
    if title:
        surface.text(title, (LEFT, 31), INK, TITLE)
    each = (height - head) / max(len(charts), 1)
    names = list(dict.fromkeys(name for chart in charts for name in _in_order(chart)))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    ranges = [found for chart in charts if (found := chart.x_range()) is not None]
    x_range = min((a for a, _ in ranges), default=0.0), max((b for _, b in ranges), default=1.0)
    wide = max((surface.width_of(name, LABEL) for name in names), default=0.0)
    right = width - RIGHT - min(wide + SWATCH, LEGEND)
    for i, chart in enumerate(charts):
        top = head + i * each
        box = LEFT, top + ABOVE, right, top + each - BELOW
        _Panel(surface, chart, box, x_range, colours).draw()
    return surface


def _in_order(chart: Chart) -> list[str]:
    return list(reversed(chart.names)) if not chart.curves else chart.names


def _numbers(values: npt.ArrayLike, name: str, length: int | None = None) -> F64:
    found = np.asarray(values, np.float64)
    if found.ndim != 1 or (length is not None and len(found) != length):
        raise ConfigError(f"{name!r} has {found.shape} values where x has {length}")
    return found


class _Panel:
    """One chart on its part of the surface."""

    def __init__(
        self,
        surface: Surface,
        chart: Chart,
        box: Clip,
        x_range: tuple[float, float],
        colours: Mapping[str, str],
    ) -> None:
        self._on, self._chart, self._box, self._colours = surface, chart, box, colours
        self._x = x_range if x_range[0] < x_range[1] else (x_range[0], x_range[0] + 1)
        self._y = chart.y_range()

    def draw(self) -> None:
        chart = self._chart
        self._grid()
        for name, x, low, high in chart.stacked:
            self._on.band(
                self._across(x), self._up(high), self._up(low), self._colours[name], self._box
            )
        for y, text, name in chart.levels:
            self._level(y, text, self._colours.get(name, SOFT))
        for name, x, heights in chart.curves:
            points = np.stack([self._across(x), self._up(heights)], axis=1)
            points = points[np.isfinite(points).all(1)]
            if len(points):
                self._on.line(points, self._colours[name], 2.2, clip=_grown(self._box))
        self._frame()
        self._marks()
        self._legend()

    def _across(self, x: F64 | float) -> F64:
        left, _, right, _ = self._box
        a, b = self._x
        return np.asarray(left + (np.asarray(x) - a) / (b - a) * (right - left))

    def _up(self, y: F64 | float) -> F64:
        _, top, _, bottom = self._box
        a, b = self._y
        return np.asarray(bottom - (np.asarray(y) - a) / (b - a) * (bottom - top))

    def _grid(self) -> None:
        left, top, right, bottom = self._box
        ys = ticks(*self._y, max(int((bottom - top) / 42), 2))
        if self._chart.percent and self._y == (0.0, 1.0):
            ys = [0.0, 0.25, 0.5, 0.75, 1.0]
        for y in ys:
            at = float(self._up(y))
            self._on.line(np.array([[left, at], [right, at]]), GRID, 1)
            text = f"{y:.0%}" if self._chart.percent else tick_text(y)
            self._on.text(text, (left - 9, at + 4.5), SOFT, TICK, anchor="end")
        for x in ticks(*self._x, max(int((right - left) / 90), 2)):
            at = float(self._across(x))
            self._on.line(np.array([[at, top], [at, bottom]]), GRID, 1)
            self._on.line(np.array([[at, bottom], [at, bottom + 5]]), AXIS, 1)
            self._on.text(tick_text(x), (at, bottom + 19), SOFT, TICK, anchor="middle")

    def _frame(self) -> None:
        left, top, right, bottom = self._box
        self._on.line(np.array([[left, top], [left, bottom], [right, bottom]]), AXIS, 1)
        if self._chart.title:
            self._on.text(self._chart.title, (left, top - 24), INK, LABEL + 1)
        if self._chart.x:
            self._on.text(
                self._chart.x, ((left + right) / 2, bottom + 40), SOFT, LABEL, anchor="middle"
            )
        if self._chart.y:
            at = 22, (top + bottom) / 2
            self._on.text(self._chart.y, at, SOFT, LABEL, anchor="middle", upright=True)

    def _level(self, y: float, text: str, colour: str) -> None:
        left, _, right, _ = self._box
        at = float(self._up(y))
        self._on.line(np.array([[left, at], [right, at]]), colour, 1.2, dashes=(6, 4))
        self._on.text(text, (left + 8, at - 5), colour, TICK)

    def _marks(self) -> None:
        left, top, right, bottom = self._box
        free = left - MARK_APART
        for x, text in sorted(self._chart.marks):
            at = float(self._across(x))
            if not left <= at <= right:
                continue
            self._on.line(np.array([[at, top - 6], [at, bottom]]), INK, 1.2, dashes=(5, 4))
            wide = self._on.width_of(text, TICK)
            start = min(max(at - wide / 2, left), right - wide)
            if text and start >= free + MARK_APART:
                self._on.text(text, (start, top - 10), INK, TICK)
                free = start + wide

    def _legend(self) -> None:
        _, top, right, bottom = self._box
        names = list(dict.fromkeys(self._chart.names))
        room = max(int((bottom - top) // 22), 1)
        shown = names if len(names) <= room else names[: room - 1]
        for i, name in enumerate(shown):
            at = top + 6 + 22 * i
            self._on.rectangle((right + 18, at, right + 31, at + 13), self._colours[name])
            self._on.text(self._short(name), (right + SWATCH, at + 11), INK, LABEL)
        if len(shown) < len(names):
            text = f"and {len(names) - len(shown)} more"
            self._on.text(text, (right + SWATCH, top + 17 + 22 * len(shown)), SOFT, LABEL)

    def _short(self, name: str) -> str:
        """A name that fits beside the axes."""
        room = LEGEND - SWATCH
        while self._on.width_of(name, LABEL) > room:
            name = name.removesuffix("…")[:-1] + "…"
        return name


def _grown(box: Clip) -> Clip:
    """So that a line along an axis keeps its width."""
    left, top, right, bottom = box
    return left, top - 2, right + 2, bottom + 2


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in a range: 1, 2 or 5 times a power of ten apart, at most about so many.

    >>> ticks(0, 1000, 6)
    [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]
    """
    rough = (high - low) / most
    scale = 10.0 ** floor(log10(rough))
    apart = next(scale * m for m in (1, 2, 5, 10) if scale * m >= rough * (1 - 1e-9))
    first, last = ceil(low / apart - 1e-9), floor(high / apart + 1e-9)
    return [round(k * apart, 12) + 0.0 for k in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A number as short as an axis wants it.

    >>> [tick_text(v) for v in (0.0, 0.25, 1500.0, 40000.0, 2.5e6, 3e9)]
    ['0', '0.25', '1,500', '40,000', '2.5M', '3B']
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:,.10g}"
