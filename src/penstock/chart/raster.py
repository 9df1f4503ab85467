"""Shapes to pixels, and pixels to PNG: numpy and zlib.

Every shape is a coverage, the share of each pixel that lies in it, and is blended over what is
there. A pixel's share of a line is taken from its distance to it; of a band, from the stretch of
each column that it fills, exactly.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock.chart.font import BASE, CAP, TOP, advance, strokes, width_of
from penstock.chart.surface import F64, Anchor, Clip

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

FINE = 4  # sub-columns of a pixel, where a band's side jumps
PHASES = 4  # places between two pixels where a letter may begin
STROKE = 0.105  # width of a letter's strokes, of its size
CAP_SHARE = 0.72  # the height of capitals, of the size


class Raster:
    """A picture of pixels."""

    def __init__(self, width: int, height: int, background: str) -> None:
        self.pixels = np.empty((height, width, 3), np.float32)
        self.pixels[:] = _rgb(background)

    def rectangle(self, box: Clip, colour: str) -> None:
        """A filled rectangle."""
        left, top, right, bottom = box
        x, y = np.array([left, right]), np.array([[top, top], [bottom, bottom]])
        self.band(x, y[0], y[1], colour, box)

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
        height, across = self.pixels.shape[:2]
        reach = width / 2 + 2
        left, top = np.clip(np.floor(points.min(0) - reach), 0, (across, height)).astype(int)
        right, bottom = np.clip(np.ceil(points.max(0) + reach), 0, (across, height)).astype(int)
        cover = np.zeros((bottom - top, right - left), np.float32)
        moved = points - (left, top)
        for part in [moved] if dashes is None else _dashed(moved, *dashes):
            stroke(cover, part, width)
        if clip is not None:
            cover *= _inside(clip, height, across)[top:bottom, left:right]
        self._blend(cover, colour, int(top), int(left))

    def band(self, x: F64, low: F64, high: F64, colour: str, clip: Clip) -> None:
        """What lies between two lines over the same x."""
        height, across = self.pixels.shape[:2]
        columns = (np.arange(across * FINE) + 0.5) / FINE
        jumps = np.arange(len(x)) * 1e-9  # np.interp wants x to rise where it is twice
        top, bottom = np.interp(columns, x + jumps, low), np.interp(columns, x + jumps, high)
        top, bottom = np.minimum(top, bottom), np.maximum(top, bottom)
        bottom = np.where((columns < x[0]) | (columns > x[-1]), top, bottom)
        rows = np.arange(height)[:, None]
        fine = np.clip(np.minimum(bottom, rows + 1) - np.maximum(top, rows), 0, 1)
        cover = fine.reshape(height, across, FINE).mean(2, dtype=np.float32)
        cover *= _inside(clip, height, across)
        self._blend(cover, colour, 0, 0)

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
        unit = unit_of(size)
        wide = width_of(text) * unit
        shift = {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        line = _line_of(text, size)
        margin, base = _margin(size), round(TOP * unit) + 1
        if upright:
            x, y = round(at[0]) - base, round(at[1] + shift) - line.shape[1] + margin
            self._blend(line.T[::-1], colour, y, x)
        else:
            x, y = round(at[0] - shift) - margin, round(at[1]) - base
            self._blend(line, colour, y, x)

    def width_of(self, text: str, size: float) -> float:
        """How wide a text is."""
        return width_of(text) * unit_of(size)

    def data(self) -> bytes:
        """The picture as a PNG file."""
        return png(np.clip(np.rint(self.pixels), 0, 255).astype(np.uint8))

    def _blend(self, cover: F32, colour: str, top: int, left: int) -> None:
        """Lay a colour over the pixels from (top, left) on; what lies outside is left out."""
        height, width = self.pixels.shape[:2]
        a, b = max(-top, 0), max(-left, 0)
        part = cover[a : max(height - top, 0), b : max(width - left, 0)]
        there = self.pixels[top + a :, left + b :][: part.shape[0], : part.shape[1]]
        there += (np.array(_rgb(colour), np.float32) - there) * part[:, :, None]


def stroke(cover: F32, points: F64, width: float) -> None:
    """Add a line with round ends to a coverage, in place; one point alone is a dot."""
    height, across = cover.shape
    reach = width / 2 + 1
    for (x0, y0), (x1, y1) in zip(points[:-1].tolist(), points[1:].tolist(), strict=True):
        left, right = int(max(min(x0, x1) - reach, 0)), int(min(max(x0, x1) + reach + 1, across))
        top, bottom = int(max(min(y0, y1) - reach, 0)), int(min(max(y0, y1) + reach + 1, height))
        if left >= right or top >= bottom:
            continue
        x, y = np.arange(left, right) + 0.5 - x0, np.arange(top, bottom)[:, None] + 0.5 - y0
        dx, dy = x1 - x0, y1 - y0
        length = dx * dx + dy * dy
        along = np.clip((x * dx + y * dy) / length, 0, 1) if length else np.zeros((1, 1))
        away = np.hypot(x - along * dx, y - along * dy)
        there = cover[top:bottom, left:right]
        np.maximum(there, np.clip(width / 2 + 0.5 - away, 0, 1), out=there)


def unit_of(size: float) -> float:
    """Pixels of a unit of the font's grid."""
    return size * CAP_SHARE / (CAP - BASE)


def _margin(size: float) -> int:
    return int(size * STROKE) + 2


def _line_of(text: str, size: float) -> F32:
    """The coverage of a line of text; it begins `_margin` pixels from the left."""
    unit, margin = unit_of(size), _margin(size)
    width = int(width_of(text) * unit) + 2 * margin + 2
    height = round((TOP + BASE) * unit) + 3
    cover = np.zeros((height, width), np.float32)
    x = float(margin)
    for char in text:
        phase = int((x - int(x)) * PHASES)
        letter = _letter(char, size, phase)
        left = int(x) - margin
        there = cover[:, left : left + letter.shape[1]]
        np.maximum(there, letter[:, : there.shape[1]], out=there)
        x += advance(char) * unit
    return cover


@lru_cache(maxsize=2048)
def _letter(char: str, size: float, phase: int) -> F32:
    """A letter's coverage, begun between two pixels."""
    unit, margin = unit_of(size), _margin(size)
    height = round((TOP + BASE) * unit) + 3
    cover = np.zeros((height, int(advance(char) * unit) + 2 * margin + 1), np.float32)
    base = round(TOP * unit) + 1
    for line in strokes(char):
        points = line * (unit, -unit) + (margin + phase / PHASES, base - 0.5)
        dot = len(line) == 2 and (line[0] == line[1]).all()
        stroke(cover, points, size * STROKE * (1.6 if dot else 1))
    return cover


def _dashed(points: F64, drawn: float, left_out: float) -> Iterator[F64]:
    """The drawn stretches of a line."""
    lengths = np.hypot(*np.diff(points, axis=0).T)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for begin in np.arange(0, ends[-1], drawn + left_out):
        end = min(begin + drawn, ends[-1])
        at = np.concatenate([[begin], ends[(ends > begin) & (ends < end)], [end]])
        yield np.stack([np.interp(at, ends, points[:, k]) for k in (0, 1)], axis=1)


def _inside(clip: Clip, height: int, width: int) -> F32:
    """The share of each pixel that lies in a rectangle."""
    left, top, right, bottom = clip
    x, y = np.arange(width), np.arange(height)
    across = np.clip(np.minimum(x + 1, right) - np.maximum(x, left), 0, 1)
    down = np.clip(np.minimum(y + 1, bottom) - np.maximum(y, top), 0, 1)
    return np.outer(down, across).astype(np.float32)


def _rgb(colour: str) -> tuple[int, int, int]:
    """Parts of a colour.

    >>> _rgb("#ff8000")
    (255, 128, 0)
    """
    r, g, b = bytes.fromhex(colour.removeprefix("#"))
    return r, g, b


def png(pixels: U8) -> bytes:
    """(height, width, 3) as a PNG file."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + width * 3), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
