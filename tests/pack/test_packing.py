"""Rows are those of the slow reference; no token is lost but in the ledger, which adds up."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pack import reference

from penstock import ConfigError, pack_rows
from penstock.pack import CropBuffer, Ledger, Packing, Rows, pack_blocks
from penstock.pack.decreasing import _Steps, place
from penstock.pack.rows import join

lengths_of = st.lists(st.integers(0, 40), max_size=60)
capacities = st.integers(2, 24)
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "concat"},
    {"strategy": "concat", "overlap": 1},
    {"strategy": "concat", "last": "drop"},
    {"strategy": "concat", "overlap": 1, "last": "drop"},
    {"strategy": "simple"},
    {"strategy": "concat", "overflow": "truncate_start", "overlap": 1},
    {"strategy": "best_fit_crop", "buffer_size": 5, "refill": 3},
    {"strategy": "best_fit_crop", "buffer_size": 1, "refill": 1, "last": "drop"},
    {
        "strategy": "best_fit_crop",
        "buffer_size": 9,
        "refill": 4,
        "groups": (5, 0, 7),
        "bos": "every",
    },
    {"strategy": "best_fit_decreasing"},
    {"strategy": "best_fit_decreasing", "overflow": "truncate_start"},
    {"strategy": "bfd", "bos": "every", "chunk_rows": 2},
    {"strategy": "bfd_split"},
    {"strategy": "bfd_split", "bos": "continued"},
    {"strategy": "bfd_split", "bos": "every", "chunk_rows": 3},
]


def rows_of(rows: Rows) -> list[list[reference.Piece]]:
    columns = rows.document, rows.start, rows.length, rows.bos
    pieces = list(zip(*(column.tolist() for column in columns), strict=True))
    splits = rows.row_splits.tolist()
    return [pieces[a:b] for a, b in pairwise(splits)]


# ------------------------------------------------------------------------------- the reference


@given(lengths_of, capacities, st.sampled_from([0, 1]), st.booleans())
def test_concat_is_the_stream_cut_into_rows(
    lengths: list[int], capacity: int, overlap: int, drop: bool
) -> None:
    rows = pack_rows(lengths, capacity, "concat", overlap=overlap, last="drop" if drop else "pad")
    assert rows_of(rows) == reference.concat(lengths, capacity, overlap=overlap, drop=drop)


@given(lengths_of, capacities, st.integers(1, 12), st.integers(1, 9), st.lists(st.integers(0, 9)))
@settings(max_examples=300)
def test_best_fit_crop_is_the_policy_pick_for_pick(
    lengths: list[int], capacity: int, buffer_size: int, refill: int, groups: list[int]
) -> None:
    rows = pack_rows(
        lengths,
        capacity,
        "best_fit_crop",
        buffer_size=buffer_size,
        refill=refill,
        groups=tuple(groups),
    )
    slow = reference.best_fit_crop(
        lengths, capacity, buffer_size=buffer_size, refill=refill, groups=groups
    )
    assert rows_of(rows) == [[(d, 0, size, False) for d, size in row] for row in slow]


@given(lengths_of, capacities, st.sampled_from(["truncate", "truncate_start", "split"]),
       st.sampled_from(["never", "continued", "every"]))  # fmt: skip
@settings(max_examples=300)
def test_best_fit_decreasing_is_the_textbooks_loop(
    lengths: list[int], capacity: int, overflow: Any, bos: Any
) -> None:
    rows = pack_rows(lengths, capacity, overflow=overflow, bos=bos)
    pieces = reference.cut(lengths, capacity, overflow=overflow, bos=bos)
    slow = reference.best_fit_decreasing([size + put for _, _, size, put in pieces], capacity)
    assert rows_of(rows) == [[pieces[i] for i in row] for row in slow]


@given(st.lists(st.integers(1, 3000), max_size=300), st.integers(0, 3))
def test_that_holds_for_long_rows_of_many_short_documents(sizes: list[int], halvings: int) -> None:
    sizes = [max(size >> (halvings * 3), 1) for size in sizes]
    splits, at = place(np.array(sizes, np.int64), 3000)
    found = [at[a:b].tolist() for a, b in pairwise(splits)]
    assert found == reference.best_fit_decreasing(sizes, 3000)


@given(st.lists(st.integers(1, 12), max_size=9), st.integers(12, 20))
def test_tiny_cases_take_few_rows_more_than_the_best_packing_there_is(
    sizes: list[int], capacity: int
) -> None:
    """11/9 of the optimum and a bit is what is proven of best-fit decreasing."""
    best = reference.fewest_rows(sizes, capacity)
    assert best <= len(pack_rows(sizes, capacity)) <= 11 * best / 9 + 6 / 9


# ---------------------------------------------------------------------------------- the ledger


def check_accounts(lengths: Sequence[int], rows: Rows, options: dict[str, Any]) -> None:
    """Nothing in two rows, nothing lost beyond the ledger, everything counted once."""
    ledger, found = rows.ledger, rows_of(rows)
    capacity = ledger.capacity
    assert ledger.balanced
    seen: Counter[tuple[int, int]] = Counter()
    for row in found:
        assert 0 < sum(length + put for _, _, length, put in row) <= capacity
        for document, start, length, put in row:
            assert length + put > 0  # a BOS alone is what best_fit_crop may leave of a document
            assert start >= 0
            assert start + length <= lengths[document]
            seen.update((document, start + i) for i in range(length))
    twice = [token for token, count in seen.items() if count > 1]
    assert len(twice) == ledger.repeated
    assert ledger.repeated == 0 or options.get("overlap")
    assert ledger.rows == len(found) == len(rows)
    assert ledger.tokens == sum(lengths)
    assert ledger.placed == len(seen)
    assert ledger.cropped + ledger.dropped == sum(lengths) - len(seen)
    assert ledger.pieces == sum(map(len, found)) == len(rows.document)
    assert ledger.bos == int(rows.bos.sum())
    assert ledger.documents == len(lengths)
    assert ledger.documents_empty == sum(length == 0 for length in lengths)
    assert sum(ledger.length_histogram) == len(lengths) - ledger.documents_empty
    assert sum(ledger.piece_histogram) == int((rows.length > 0).sum())
    assert rows.used().tolist() == [sum(n + put for *_, n, put in row) for row in found]
    assert ledger.padding == capacity * len(found) - int(rows.used().sum())
    if ledger.dropped == 0 and not options.get("overlap"):
        whole = Counter({d: n for d, n in enumerate(lengths) if n})
        got = Counter(document for document, _ in seen)
        assert ledger.documents_cropped == sum(got[d] < n for d, n in whole.items())
        pieces = Counter(document for row in found for document, *_ in row)
        assert ledger.documents_split == sum(count > 1 for count in pieces.values())


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda o: "-".join(map(str, o.values())))
@given(lengths=lengths_of, capacity=capacities)
def test_every_token_is_accounted_for(
    options: dict[str, Any], lengths: list[int], capacity: int
) -> None:
    check_accounts(lengths, pack_rows(lengths, capacity, **options), options)


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda o: "-".join(map(str, o.values())))
@given(lengths=lengths_of, capacity=capacities, data=st.data())
def test_blocks_give_the_same_rows_however_documents_are_blocked(
    options: dict[str, Any], lengths: list[int], capacity: int, data: st.DataObject
) -> None:
    whole = pack_rows(lengths, capacity, **options)
    at = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=5)))
    blocks = np.split(np.array(lengths, np.uint16), at)
    made = join(list(pack_blocks(blocks, Packing(capacity=capacity, **options))), capacity)
    assert rows_of(made) == rows_of(whole)
    assert made.ledger == whole.ledger


@given(lengths_of, capacities)
def test_closed_chunks_hold_nothing_over(lengths: list[int], capacity: int) -> None:
    """Documents of a chunk are in its rows and in no others: chunks are packed alone."""
    whole = rows_of(pack_rows(lengths, capacity, "bfd_split", chunk_rows=2))
    apart, base = [], 0
    while base < len(lengths):
        end, tokens = base, 0
        while end < len(lengths) and tokens < 2 * capacity:
            tokens += lengths[end]
            end += 1
        rows = rows_of(pack_rows(lengths[base:end], capacity, "bfd_split"))
        apart += [[(d + base, *rest) for d, *rest in row] for row in rows]
        base = end
    assert whole == apart


def test_ledgers_add_up_and_survive_json() -> None:
    rows = pack_rows([3, 50, 0, 7], 8, "bfd_split", bos="continued")
    again = Ledger.from_dict(rows.ledger.to_dict())
    assert again == rows.ledger
    both = rows.ledger + again
    assert both.balanced
    assert all(
        getattr(both, f.name) == 2 * getattr(again, f.name)
        for f in fields(Ledger)[1:]
        if "histogram" not in f.name
    )
    assert both.utilisation == again.utilisation


# ------------------------------------------------------------------------------------- restart


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(2, 12), st.integers(1, 9), st.data())
def test_best_fit_crop_restarts_at_any_row_from_an_address(
    lengths: list[int], capacity: int, buffer_size: int, data: st.DataObject
) -> None:
    refill = 4

    def buffer(begin: int) -> CropBuffer:
        at = begin

        def supply() -> list[int] | None:
            nonlocal at
            batch, at = lengths[at : at + refill], at + refill
            return batch or None

        return CropBuffer(capacity, buffer_size, supply)

    def rest(waiting: CropBuffer) -> list[list[tuple[int, int]]]:
        rows = []
        while row := waiting.row():
            rows.append(row)
        return rows

    whole = rest(buffer(0))
    stop = data.draw(st.integers(0, len(whole)))
    first = buffer(0)
    before = [first.row() for _ in range(stop)]
    address = first.next_document, first.waiting()
    assert address[1] == sorted(address[1])
    second = buffer(address[0])
    second.restore(address[0], [(document, lengths[document]) for document in address[1]])
    assert len(second) == len(first)
    assert before + rest(second) == whole


# ---------------------------------------------------------------------- the trouble with cropping


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.maximum(rng.lognormal(6.0, 1.2, count), 1).astype(np.int64)


def test_best_fit_crop_piles_up_long_documents_and_its_ledger_shows_it() -> None:
    """Faithful to the policy, trouble included."""
    lengths = lognormal(60_000)
    batches = iter([*np.array_split(lengths, 480), []])
    buffer = CropBuffer(2049, 1000, lambda: batch.tolist() if len(batch := next(batches)) else None)
    long_share = []
    for number in range(4000):
        buffer.row()
        if number in (10, 3999):
            waiting = lengths[buffer.waiting()]
            long_share.append(float((waiting > 2049).mean()))
    assert long_share[0] < 0.25
    assert long_share[1] > 0.9
    early = pack_rows(lengths[:2000], 2049, "best_fit_crop").ledger
    late = pack_rows(lengths, 2049, "best_fit_crop").ledger
    assert late.balanced
    assert late.cropped / late.tokens > 0.15
    assert early.padding < 2049
    assert late.documents_cropped > 0


def test_chunks_of_best_fit_decreasing_deliver_the_corpus_as_it_is_over_the_whole_run() -> None:
    """In each tenth of the run, pieces have the lengths that the corpus has there."""
    lengths = lognormal(60_000)
    rows = pack_rows(lengths, 2049, "bfd_split", chunk_rows=1000)
    bounds = np.linspace(0, len(rows), 11).astype(int)
    edges = [1, 64, 128, 256, 512, 1024, 2048, 4096, 1 << 40]
    tokens = np.histogram(lengths, edges, weights=lengths)[0] / lengths.sum()
    for a, b in pairwise(bounds):
        span = slice(rows.row_splits[a], rows.row_splits[b])
        whose = lengths[rows.document[span]]
        share = np.histogram(whose, edges, weights=rows.length[span])[0]
        assert np.abs(share / share.sum() - tokens).max() < 0.06
    assert rows.ledger.cropped == rows.ledger.dropped == 0
    assert rows.ledger.padding / (rows.ledger.rows * 2049) < 0.004


# -------------------------------------------------------------------------------- size and shape


def test_ten_thousand_steps_do_for_any_number_of_documents() -> None:
    """The loop depends on the capacity alone."""
    logs = []
    for count in (10**5, 10**6):
        sizes = np.minimum(lognormal(count), 2048)
        steps = _Steps(2048)
        for size in range(2048, 0, -1):
            steps.place(size, int((sizes == size).sum()))
        logs.append(len(steps.log))
    assert logs[1] < 2 * logs[0] < 30_000


@pytest.mark.parametrize("overflow", ["truncate", "split"])
def test_a_document_takes_less_than_forty_bytes_of_memory(overflow: Any) -> None:
    rng = random.Random(0)
    count = 2_000_000 + rng.randrange(1000)
    lengths = lognormal(count).astype(np.uint16)
    tracemalloc.start()
    rows = pack_rows(lengths, 2048, overflow=overflow)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.ledger.documents == count
    assert (peak + lengths.nbytes) / count < 40


@pytest.mark.long
def test_a_hundred_million_documents() -> None:
    lengths = np.tile(np.minimum(lognormal(10**6), 2048).astype(np.uint16), 100)
    tracemalloc.start()
    rows = pack_rows(lengths, 2048)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.ledger.balanced
    assert rows.ledger.documents == 10**8
    assert np.array_equal(np.bincount(rows.document, minlength=10**8), np.ones(10**8, int))
    assert int(rows.used().max()) <= 2048
    assert (peak + lengths.nbytes) / 10**8 < 40


@pytest.mark.parametrize("strategy", ["concat", "best_fit_crop", "best_fit_decreasing"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [5], [10**7]])
def test_the_smallest_corpora(strategy: str, lengths: list[int]) -> None:
    rows = pack_rows(lengths, 5, strategy)
    check_accounts([min(n, 10**4) for n in lengths], rows, {}) if max(
        lengths, default=0
    ) < 6 else None
    assert rows.ledger.balanced
    assert len(rows) == (strategy == "concat" and lengths == [10**7]) * (2 * 10**6 - 1) + (
        sum(lengths) > 0
    )


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("capacity", [100, 127, 40_000, 65_535, 65_536, 10**6])
@pytest.mark.parametrize("overflow", ["truncate", "truncate_start", "split"])
def test_lengths_of_any_dtype_are_packed_alike(dtype: str, capacity: int, overflow: Any) -> None:
    lengths = [100, 3, 127, 0, 64, 101]
    rows = pack_rows(np.array(lengths, dtype), capacity, overflow=overflow, bos="every")
    assert rows_of(rows) == rows_of(pack_rows(lengths, capacity, overflow=overflow, bos="every"))


def test_a_crop_buffer_of_long_rows_takes_no_memory_for_them() -> None:
    tracemalloc.start()
    rows = pack_rows([3, 4, 5], 10**6, "best_fit_crop")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 1
    assert peak < 4 << 20


def test_numbers_may_be_numpys() -> None:
    rows = pack_rows(np.arange(9), np.int64(4), "best_fit_crop", buffer_size=np.uint8(3),
                     groups=(np.int32(2), np.int64(7)))  # type: ignore[arg-type] # fmt: skip
    assert rows.ledger.balanced


def test_lengths_beyond_32_bits_are_kept() -> None:
    rows = pack_rows([2**33, 3], 1 << 30, "bfd_split")
    assert rows.start.dtype == np.int64
    assert int(rows.start.max()) == 2**33 - 2**30
    assert rows.ledger.balanced


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([1], 0), "capacity is a whole number >= 1, not 0"),
        (([1], 2.5), "capacity is a whole number"),
        (([1], True), "capacity is a whole number, not True"),
        (([1], 4, "best_fit_crop", {"groups": (-1,)}), "groups are numbers of documents"),
        (([-1], 4), "whole numbers of tokens, not -1"),
        (([1.5], 4), "whole numbers of tokens, not float64"),
        (([[1]], 4), "one number a document"),
        (([1], 4, "best_fit_decresing"), r"meant: best_fit_decreasing\?"),
        (([1], 4, "wrapped"), "packing is one of concat"),
        (([1], 4, "concat", {"overflow": "split"}), "leave overflow out"),
        (([1], 4, "concat", {"bos": "every"}), "concat puts no BOS"),
        (([1], 4, "best_fit_crop", {"overflow": "truncate"}), "by its own policy"),
        (([1], 4, "best_fit_crop", {"bos": "continued"}), "continues no document"),
        (([1], 4, "bfd", {"overlap": 1}), "overlap is 0 or, for concat, 1"),
        (([1], 1, "concat", {"overlap": 1}), "cannot overlap"),
        (([1], 1, "bfd", {"bos": "every"}), "capacity is a whole number >= 2"),
        (([1], 4, "bfd", {"overflow": "crop"}), "overflow is one of truncate, truncate_start"),
        (([1], 4, "bfd", {"last": "keep"}), "last is one of pad, drop"),
        (([1], 4, "best_fit_crop", {"refill": 0}), "refill is a whole number >= 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(arguments: tuple[Any, ...], said: str) -> None:
    *plain, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ConfigError, match=said):
        pack_rows(*plain, **options)
