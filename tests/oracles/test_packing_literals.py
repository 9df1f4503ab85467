"""Packings that other projects publish, in documentation, tests or runs, where policies agree.

`benchmarks/packing.py` runs the projects themselves; here stand the numbers that they gave.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock import pack_rows
from penstock.pack import position_ids


def packed(documents: list[list[int]], capacity: int, strategy: str) -> list[list[int]]:
    """Documents packed, as the tokens of each row."""
    rows = pack_rows([len(each) for each in documents], capacity, strategy)
    return [
        [t for d, start, length in rows.pieces(r) for t in documents[d][start : start + length]]
        for r in range(len(rows))
    ]


@pytest.mark.parametrize(
    ("documents", "strategy", "rows"),
    [
        # TRL's pack_dataset: its docstring, its tests, and 1.16.0 on more of the kind
        ([[1, 2, 3], [4, 5], [6, 7, 8], [9]], "bfd", [[1, 2, 3, 9], [6, 7, 8], [4, 5]]),
        ([[1, 2, 3], [4, 5, 6, 7], [8]], "bfd", [[4, 5, 6, 7], [1, 2, 3, 8]]),
        (
            [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12]],
            "bfd",
            [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7, 12]],
        ),
        (
            [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12]],
            "bfd_split",
            [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7, 5, 12]],
        ),
        (
            [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12]],
            "concat",
            [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]],
        ),
    ],
)
def test_trl(documents: list[list[int]], strategy: str, rows: list[list[int]]) -> None:
    assert packed(documents, 4, strategy) == rows


def test_grains_concat_then_split() -> None:
    """Nine documents of 1 to 7 tokens, the last two of 1 and 2, in rows of six."""
    documents = [[n] * n for n in (1, 2, 3, 4, 5, 6, 7, 1, 2)]
    assert packed(documents, 6, "concat") == [
        [1, 2, 2, 3, 3, 3],
        [4, 4, 4, 4, 5, 5],
        [5, 5, 5, 6, 6, 6],
        [6, 6, 6, 7, 7, 7],
        [7, 7, 7, 7, 1, 2],
        [2],
    ]


@pytest.mark.parametrize(
    ("lengths", "capacity", "rows"),
    [
        ([4, 8, 2], 10, [{1, 2}, {0}]),
        ([10, 15, 4], 20, [{1, 2}, {0}]),
        ([50, 70, 25, 40], 100, [{1, 2}, {0, 3}]),
        ([10, 15, 4, 10], 20, [{1, 2}, {0, 3}]),
    ],
)
def test_grains_best_fit_scenarios(lengths: list[int], capacity: int, rows: list[set[int]]) -> None:
    """Grain packs as documents come, we the longest first: here both end with the same rows."""
    found = pack_rows(lengths, capacity)
    assert [{d for d, _, _ in found.pieces(r)} for r in range(len(found))] == rows


@pytest.mark.parametrize(
    ("lengths", "rows", "padding"),
    [
        # OLMo-core 3.0.0: InstancePacker(2048).pack_documents, then len(instances), total_padding
        ([i * 7919 % 2048 + 1 for i in range(5000)], 2502, 34_964),
        ([int(2000 * (i * 0.6180339887498949 % 1) ** 4) + 1 for i in range(5000)], 978, 535),
    ],
)
def test_olmo_cores_optimised_best_fit_decreasing(
    lengths: list[int], rows: int, padding: int
) -> None:
    ledger = pack_rows(lengths, 2048).ledger
    assert (ledger.rows, ledger.padding) == (rows, padding)


def test_astrais_plan_and_its_position_ids() -> None:
    """Its bins are scanned in the order in which they were opened; so are ours."""
    rows = pack_rows([3, 3, 3, 2, 2, 1, 1], 5, "bfd")
    found = [[d for d, _, _ in rows.pieces(r)] for r in range(len(rows))]
    assert found == [[0, 3], [1, 4], [2, 5, 6]]
    assert position_ids(np.array([3, 2]), "doc_reset").tolist() == [0, 1, 2, 0, 1]
    assert position_ids(np.array([3, 2]), "continuous").tolist() == [0, 1, 2, 3, 4]
    assert position_ids(np.array([3, 2]), "none").tolist() == []
