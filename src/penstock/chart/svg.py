"""The same shapes as SVG: text stays text."""

from __future__ import annotations

from xml.sax.saxutils import escape

import numpy as np

from penstock.chart.surface import F64, Anchor, Clip

WIDTH = 0.55  # of a letter, about, of its size
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"


class Svg:
    """A picture as a list of elements."""

    def __init__(self, width: int, height: int, background: str) -> None:
        self._size = width, height
        self._clips: dict[Clip, str] = {}
        self._parts: list[str] = []
        self.rectangle((0, 0, width, height), background)

    def rectangle(self, box: Clip, colour: str) -> None:
        """A filled rectangle."""
        x, y, right, bottom = box
        self._parts.append(f'<rect {_box(x, y, right, bottom)} fill="{colour}"/>')

    def line(
        self,
        points: F64,
        colour: str,
        width: float,
        *,
        clip: Clip | None = None,
        dashes: tuple[float, float] | None = None,
    ) -> None:
        """A line through (n, 2) points."""
        dashed = f' stroke-dasharray="{dashes[0]:g} {dashes[1]:g}"' if dashes else ""
        self._parts.append(
            f'<polyline points="{_points(points)}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:g}" stroke-linejoin="round"{dashed}{self._clip(clip)}/>'
        )

    def band(self, x: F64, low: F64, high: F64, colour: str, clip: Clip) -> None:
        """What lies between two lines over the same x."""
        there, back = np.stack([x, low], axis=1), np.stack([x, high], axis=1)[::-1]
        outline = _points(np.concatenate([there, back]))
        self._parts.append(f'<polygon points="{outline}" fill="{colour}"{self._clip(clip)}/>')

    def text(
        self,
        text: str,
        at: tuple[float, float],
        colour: str,
        size: float,
        *,
        anchor: Anchor = "start",
        upright: bool = False,
    ) -> None:
        """A line of text, its baseline at `at`."""
        x, y = at
        turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size:g}" '
            f'text-anchor="{anchor}"{turned}>{escape(text)}</text>'
        )

    def width_of(self, text: str, size: float) -> float:
        """How wide a text is, about: whoever shows it chooses the font."""
        return len(text) * size * WIDTH

    def data(self) -> bytes:
        """The picture as an SVG file."""
        width, height = self._size
        clips = "".join(
            f'<clipPath id="{name}"><rect {_box(*box)}/></clipPath>'
            for box, name in self._clips.items()
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONT}">'
        )
        return "\n".join([head, f"<defs>{clips}</defs>", *self._parts, "</svg>", ""]).encode()

    def _clip(self, clip: Clip | None) -> str:
        if clip is None:
            return ""
        name = self._clips.setdefault(clip, f"clip{len(self._clips)}")
        return f' clip-path="url(#{name})"'


def _box(left: float, top: float, right: float, bottom: float) -> str:
    return f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'


def _points(points: F64) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points.tolist())
