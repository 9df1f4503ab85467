"""Charts: the file that is written is a picture, and shows what it was given."""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError
from penstock.chart import Chart, save
from penstock.chart.figure import COLOURS, ticks
from penstock.chart.font import BOX, GLYPHS, advance, glyph, strokes, width_of
from penstock.chart.raster import Raster, png

U8 = npt.NDArray[np.uint8]
WHITE = (255, 255, 255)


def decode(data: bytes) -> U8:
    """A PNG of 8-bit RGB rows without filters, every CRC compared."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts, kinds = 8, b"", []
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (crc,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert crc == zlib.crc32(kind + body)
        kinds.append(kind)
        if kind == b"IHDR":
            width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", body)
            assert (depth, colour, rest) == (8, 2, [0, 0, 0])
        if kind == b"IDAT":
            parts += body
        at += 12 + length
    assert kinds == [b"IHDR", b"IDAT", b"IEND"]
    rows = np.frombuffer(zlib.decompress(parts), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def heights(pixels: U8, column: int, colour: str) -> int:
    """How many pixels of a column have a colour, exactly."""
    return int((pixels[:, column] == rgb(colour)).all(1).sum())


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_pixels_come_back_from_a_png(height: int, width: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    assert (decode(png(pixels)) == pixels).all()


def test_areas_have_their_heights_and_jump_where_an_x_comes_twice(tmp_path: Path) -> None:
    chart = Chart("shares", x="step", y="share", percent=True, top=1.0)
    chart.areas([0, 50, 50, 100], {"a": [0.5, 0.5, 0.2, 0.2], "b": [0.25, 0.25, 0.8, 0.8]})
    save(tmp_path / "c.png", chart, size=(1000, 600))
    pixels = decode((tmp_path / "c.png").read_bytes())
    assert pixels.shape == (600, 1000, 3)
    columns = np.flatnonzero((pixels == rgb(COLOURS[0])).all(2).any(0))
    left, middle = int(columns[0]), int((columns[0] + columns[-60]) // 2)
    right = int(columns[columns < 850][-1])
    axis = heights(pixels, right - 5, COLOURS[0]) + heights(pixels, right - 5, COLOURS[1])
    for at, shares in ((left + 20, (0.5, 0.25)), (right - 20, (0.2, 0.8))):
        for colour, share in zip(COLOURS, shares, strict=False):
            assert abs(heights(pixels, at, colour) - share * axis) <= 2
    jumps = [heights(pixels, x, COLOURS[0]) for x in range(left + 5, right - 5)]
    assert sum(abs(a - b) > 2 for a, b in pairwise(jumps)) <= 2
    assert middle > left


def test_a_line_goes_through_its_points_and_not_beyond_the_axes(tmp_path: Path) -> None:
    chart = Chart(top=1.0).lines({"up": ([0, 10], [0, 5])})
    save(tmp_path / "c.png", chart)
    pixels = decode((tmp_path / "c.png").read_bytes())
    rows, columns = np.nonzero((pixels == rgb(COLOURS[0])).all(2))
    inside = columns < 860  # the legend has its colour, too
    assert rows[inside].min() >= 45
    wide = np.ptp(columns[inside])
    assert 0.1 < wide / 860 < 0.3  # a fifth of the axis, where it leaves at the top


def test_pictures_are_light_and_have_ink_in_title_axes_and_legend(tmp_path: Path) -> None:
    chart = Chart("title of the panel", x="steps", y="loss").lines({"a run": ([1, 2], [3, 4])})
    chart.mark(1.5, "half").level(3.5, "cap", "a run")
    save(tmp_path / "c.png", chart, title="The whole")
    pixels = decode((tmp_path / "c.png").read_bytes())
    assert (pixels == WHITE).all(2).mean() > 0.9
    dark = pixels.astype(int).sum(2) < 400
    for box in ((10, 40, 60, 400), (50, 80, 60, 400), (570, 600, 300, 600), (100, 500, 5, 40)):
        top, bottom, begin, end = box
        assert dark[top:bottom, begin:end].any(), box


def test_svg_has_the_words_the_areas_and_the_lines(tmp_path: Path) -> None:
    chart = Chart("a < b & c", y="y").areas([0, 1], {"web": [1, 1], "code": [2, 2]})
    chart.lines({"loss": ([0, 1], [0, 3])}).mark(0.5, "switch").level(2.5, "cap")
    save(tmp_path / "c.svg", chart, title="Title")
    root = ET.fromstring((tmp_path / "c.svg").read_bytes())
    space = "{http://www.w3.org/2000/svg}"
    words = {each.text for each in root.iter(f"{space}text")}
    assert {"a < b & c", "Title", "web", "code", "loss", "switch", "cap", "y"} <= words
    areas = [each.get("points") or "" for each in root.iter(f"{space}polygon")]
    assert len(areas) == 2
    tops = [sorted({float(p.split(",")[1]) for p in area.split()}) for area in areas]
    assert tops[0][0] == tops[1][1]  # the one begins where the other ends
    assert abs((tops[1][1] - tops[1][0]) / (tops[0][1] - tops[0][0]) - 2) < 0.01


def test_several_charts_share_a_picture_their_x_axis_and_colours(tmp_path: Path) -> None:
    first = Chart().areas([0, 10], {"a": [1, 1], "b": [1, 1]})
    second = Chart().lines({"b": ([5, 20], [0, 1])})
    save(tmp_path / "c.svg", first, second)
    text = (tmp_path / "c.svg").read_text()
    assert text.count(f'stroke="{COLOURS[1]}"') == 1
    assert text.count(">20<") == 2


def test_many_sources_fit_and_the_legend_says_how_many_more_there_are(tmp_path: Path) -> None:
    names = {f"a source with quite a long name, number {i}": [1, 1] for i in range(60)}
    save(tmp_path / "c.svg", Chart().areas([0, 1], names))
    text = (tmp_path / "c.svg").read_text()
    assert "more<" in text
    assert "…<" in text
    save(tmp_path / "c.png", Chart().areas([0, 1], names))


@pytest.mark.parametrize("chart", [Chart(), Chart().lines({"flat": ([3], [2])}), Chart(top=1.0)])
def test_nothing_and_a_single_point_can_be_drawn(tmp_path: Path, chart: Chart) -> None:
    for name in ("c.png", "c.svg"):
        save(tmp_path / name, chart)
    save(tmp_path / "c.png", Chart().lines({"gaps": ([0, 1, 2], [1, float("nan"), 3])}))


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"written as \.png or \.svg, not as"):
        save(tmp_path / "c.jpg", Chart())
    with pytest.raises(ConfigError, match=r"'a' has .* values where x has 2"):
        Chart().areas([0, 1], {"a": [1, 2, 3]})


# -------------------------------------------------------------------------------------------- font


def test_every_printable_character_has_a_glyph_of_its_own() -> None:
    ascii_ = [chr(code) for code in range(33, 127)]
    assert set(ascii_) <= set(GLYPHS)
    same = [(a, b) for a in ascii_ for b in ascii_ if a < b and glyph(a) == glyph(b)]
    assert same == [("I", "l")]  # as in many a font


def test_glyphs_stay_on_their_grid_and_others_are_a_box_or_lose_their_accent() -> None:
    for char in GLYPHS:
        for line in strokes(char):
            assert line[:, 0].min() >= 0
            assert line[:, 0].max() <= 6
            assert line[:, 1].min() >= -2
            assert line[:, 1].max() <= 8
    assert glyph("é") == glyph("e")
    assert glyph("漢") == BOX
    assert strokes(" ") == ()


@given(st.text(max_size=20))
def test_any_text_can_be_drawn_anywhere(text: str) -> None:
    assert width_of(text) == pytest.approx(max(sum(map(advance, text)) - 2, 0), abs=1e-9)
    on = Raster(40, 30, "#ffffff")
    for at in ((-20.0, 10.0), (20.0, 15.0), (39.0, 200.0)):
        for upright in (False, True):
            on.text(text, at, "#000000", 12, anchor="middle", upright=upright)
    assert decode(on.data()).shape == (30, 40, 3)


@given(st.floats(-1e5, 1e5), st.floats(1e-2, 1e12), st.integers(2, 12))
def test_ticks_are_round_evenly_apart_and_in_range(low: float, wide: float, most: int) -> None:
    high = low + wide
    found: Any = ticks(low, high, most)
    assert 1 <= len(found) <= most + 1
    slack = wide * 1e-6
    assert low - slack <= found[0]
    assert found[-1] <= high + slack
    apart = np.diff(found)
    assert np.allclose(apart, apart[:1], rtol=1e-3)
