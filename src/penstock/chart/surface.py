"""What a chart is drawn on: a few shapes, in pixels from the top left corner."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Anchor = Literal["start", "middle", "end"]
Clip = tuple[float, float, float, float]  # left, top, right, bottom


class Surface(Protocol):
    """Shapes that can be drawn; colours are "#rrggbb"."""

    def rectangle(self, box: Clip, colour: str) -> None:
        """A filled rectangle."""

    def line(
        self,
        points: F64,
        colour: str,
        width: float,
        *,
        clip: Clip | None = None,
        dashes: tuple[float, float] | None = None,
    ) -> None:
        """A line through (n, 2) points; `dashes` are (drawn, left out)."""

    def band(self, x: F64, low: F64, high: F64, colour: str, clip: Clip) -> None:
        """What lies between two lines over the same x, which may jump where an x comes twice."""

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
        """A line of text: `at` is on its baseline; `upright` text is read from below upwards."""

    def width_of(self, text: str, size: float) -> float:
        """How wide a text is, about."""

    def data(self) -> bytes:
        """The picture as a file."""
