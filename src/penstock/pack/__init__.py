"""Lengths to rows, and boundaries to masks. Pure numpy.

`boundaries` turns the places where documents begin into doc ids, positions, label masks and
cu_seqlens.
"""

from penstock.pack.boundaries import Boundaries, Documents, eos_cuts

__all__ = ["Boundaries", "Documents", "eos_cuts"]
