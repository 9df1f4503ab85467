"""Lengths to rows, and boundaries to masks. Pure numpy.

`policy` says how rows are made · `packing` makes them, by `concat`, `crop` or `decreasing` · `rows`
is what they are, and the ledger that accounts for every token · `boundaries` turns the places where
documents begin into doc ids, positions, label masks and cu_seqlens.
"""

from penstock.pack.boundaries import Boundaries, Documents, eos_cuts, position_ids
from penstock.pack.crop import CropBuffer
from penstock.pack.framing import framed
from penstock.pack.packing import pack_blocks, pack_rows
from penstock.pack.policy import CHUNK_ROWS, Packing
from penstock.pack.rows import Ledger, Rows, bounds_of, sums

__all__ = [
    "CHUNK_ROWS",
    "Boundaries",
    "CropBuffer",
    "Documents",
    "Ledger",
    "Packing",
    "Rows",
    "bounds_of",
    "eos_cuts",
    "framed",
    "pack_blocks",
    "pack_rows",
    "position_ids",
    "sums",
]
