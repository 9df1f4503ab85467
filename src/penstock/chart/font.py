"""Letters as strokes on a grid, so that a picture needs no font.

A stroke is a string of points, two digits each: x from 0 to 6, and y upwards, with the baseline at
2, the tops of small letters at 7 and those of capitals at 9. "022942 1434" is a tent and a bar: A.
After "~" a stroke's corners are cut until they are round, and one that ends where it begins is a
loop: "~0747420207" is an o.

>>> advance("A"), len(strokes("A"))
(6.0, 2)
"""

from __future__ import annotations

from functools import lru_cache
from unicodedata import normalize

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

BASE, CAP, TOP = 2, 9, 11  # the baseline, the tops of capitals, and of brackets
GAP = 2  # between letters
CUTS = 4  # rounds of cutting corners

_O = "~0747420207"
GLYPHS = {
    "A": "022942 1434",
    "B": "0902 ~092949462606 ~062646422202",
    "C": "~484909024243",
    "D": "0902 ~092949422202",
    "E": "49090242 0636",
    "F": "490902 0636",
    "G": "~484909024245 4525",
    "H": "0902 4942 0646",
    "I": "0902",
    "J": "~3933320203",
    "K": "0902 4905 1642",
    "L": "090242",
    "M": "0209356962",
    "N": "02094249",
    "O": "~0959520209",
    "P": "0902 ~092949452505",
    "Q": "~0959520209 3451",
    "R": "0902 ~092949452505 2542",
    "S": "~4849090645420203",
    "T": "0949 2922",
    "U": "~090402424449",
    "V": "092249",
    "W": "0912375269",
    "X": "0942 0249",
    "Y": "0926 4926 2622",
    "Z": "09490242",
    "a": f"4742 {_O}",
    "b": f"0902 {_O}",
    "c": "~464707024243",
    "d": f"4942 {_O}",
    "e": "0545 ~454707024243",
    "f": "~39191712 0737",
    "g": f"~4741400001 {_O}",
    "h": "0902 ~0507474542",
    "i": "0702 0909",
    "j": "~17111000 1919",
    "k": "0902 3704 1532",
    "l": "0902",
    "m": "0702 ~0507373532 ~3537676562",
    "n": "0702 ~0507474542",
    "o": _O,
    "p": f"0700 {_O}",
    "q": f"4740 {_O}",
    "r": "0702 ~050737",
    "s": "~3637070534320203",
    "t": "~19131232 0737",
    "u": "~0704024244 4742",
    "v": "072247",
    "w": "0712365267",
    "x": "0742 0247",
    "y": "0722 4710",
    "z": "07470242",
    "0": "~0949420209",
    "1": "0829 2922 0242",
    "2": "~0709494602 0242",
    "3": "~0809494626 ~2646420203",
    "4": "390444 3932",
    "5": "490906 ~0646420203",
    "6": "~4849090242460604",
    "7": "094912",
    "8": "~0949460609 ~0646420206",
    "9": "~0302424909054547",
    "!": "0904 0202",
    '"': "0907 2927",
    "#": "1812 3832 0646 0444",
    "$": "~4849090645420203 2a21",
    "%": "5902 ~0929270709 ~3454523234",
    "&": "~521719393704023254",
    "'": "0907",
    "(": "~2a080321",
    ")": "~0a282301",
    "*": "2824 0745 0547",
    "+": "0545 2723",
    ",": "1301",
    "-": "0535",
    ".": "1212",
    "/": "0149",
    ":": "1212 1616",
    ";": "1616 1301",
    "<": "480542",
    "=": "0646 0444",
    ">": "084502",
    "?": "~080949462524 2222",
    "@": "~0959520209 ~2646432326",
    "[": "2a0a0121",
    "\\": "0941",
    "]": "0a2a2101",
    "^": "072947",
    "_": "0141",
    "`": "0918",
    "{": "~2a1a170605141121",
    "|": "0a00",
    "}": "~0a1a172625141101",
    "~": "~05173345",
    "×": "0743 0347",
    "·": "0505",
    "–": "0545",
    "−": "0545",
    "…": "0202 2222 4242",
}
BOX = "0949420209"  # of what has no glyph


def glyph(char: str) -> str:
    """A character's strokes as they are written above; accents are left off."""
    return GLYPHS.get(char) or GLYPHS.get(normalize("NFKD", char)[:1]) or BOX


@lru_cache(maxsize=512)
def strokes(char: str) -> tuple[F64, ...]:
    """The lines of a character, (points, 2) each; y upwards from the baseline."""
    return () if char.isspace() else tuple(map(_stroke, glyph(char).split()))


@lru_cache(maxsize=512)
def advance(char: str) -> float:
    """How far the next character is from this one, in units of the grid."""
    lines = strokes(char)
    return max((float(line[:, 0].max()) for line in lines), default=2.0) + GAP


def width_of(text: str) -> float:
    """Units of the grid from the first character's left side to the last one's right side."""
    return sum(map(advance, text)) - GAP if text else 0.0


def _stroke(text: str) -> F64:
    digits = [int(digit, 16) for digit in text.lstrip("~")]
    line = np.array(digits, np.float64).reshape(-1, 2) - (0, BASE)
    if text.startswith("~"):
        for _ in range(CUTS):
            line = _cut(line)
    return line


def _cut(line: F64) -> F64:
    """Each corner in place of a point two, at a quarter of the sides that meet there."""
    a, b = line[:-1], line[1:]
    cut = np.stack([0.75 * a + 0.25 * b, 0.25 * a + 0.75 * b], axis=1).reshape(-1, 2)
    if (line[0] == line[-1]).all():
        return np.concatenate([cut, cut[:1]])
    return np.concatenate([line[:1], cut[1:-1], line[-1:]])
