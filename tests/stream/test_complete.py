"""In each epoch every document comes exactly once, and every token is accounted for.

Rows are compared with what lanes have to read, got from the text itself, unit by unit.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stream.support import (
    CORPORA,
    PACKINGS,
    SEQ_LEN,
    documents,
    encoded,
    make,
    texts_of,
    through_json,
    write_parquet,
)

from penstock.stream import TextStream, merge_states
from penstock.stream.deal import Turns

WIDTH = SEQ_LEN + 1
Tokens = tuple[int, ...]
Row = tuple[Tokens, list[Tokens]]  # its tokens but for the padding; its documents


def visits(
    stream: TextStream, lane: int, lanes: int, shuffle: bool
) -> Iterator[tuple[int, list[Tokens]]]:
    """What a lane reads: epochs, and the documents of a unit that has a token."""
    units = units_of(stream)
    turns = Turns(len(units), lanes, stream.seed, shuffle)
    at = turns.first(lane)
    while True:
        if any(units[turns.unit(at)]):
            yield at[0], units[turns.unit(at)]
        at = turns.following(lane, at)


@functools.lru_cache(1)
def units_of(stream: TextStream) -> list[list[Tokens]]:
    """The documents of each unit."""
    return [encoded(texts) for texts in texts_of(stream)]


def lane_rows(stream: TextStream, lanes: int, count: int) -> list[list[Row]]:
    """Of each lane so many rows."""
    found: list[list[Row]] = [[] for _ in range(lanes)]
    for row in range(count * lanes):
        tokens, (drawn,) = stream.share.draw(1, np.uint16)
        used = tuple(tokens[0, : drawn.used].tolist())
        bounds = [0, *drawn.cuts.tolist(), drawn.used]
        docs = [used[a:b] for a, b in pairwise(bounds)]
        assert all(docs)
        assert (tokens[0, drawn.used :] == stream._policy.pad).all()
        found[row % lanes].append((used, docs))
    return found


def some_corpora(corpora: dict[str, Path], tmp_path: Path) -> list[tuple[Path, int]]:
    """Corpora and numbers of lanes: more units than lanes, fewer, as many; uneven ones."""
    lone = write_parquet(tmp_path / "lone.parquet", documents(9, seed=5, first=900), group=2)
    uneven = write_parquet(tmp_path / "uneven/a.parquet", documents(40, seed=6), group=39)
    write_parquet(tmp_path / "uneven/b.parquet", documents(3, seed=7, first=40), group=1)
    each = [(corpora[name], 3) for name in CORPORA]
    return [*each, (corpora["list"], 7), (lone, 20), (lone, 5), (uneven.parent, 3)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_closed_chunks_give_each_document_of_a_lane_once_an_epoch(
    corpora: dict[str, Path], tmp_path: Path, shuffle: bool
) -> None:
    for path, lanes in some_corpora(corpora, tmp_path):
        with make(path, lanes=lanes, shuffle=shuffle) as stream:
            seen: dict[int, Counter[Tokens]] = {}
            reached = []
            units = units_of(stream)
            longest = max(sum(pieces(unit).values()) for unit in units)
            count = longest * -(-len(units) // lanes) + 1
            for lane, rows in enumerate(lane_rows(stream, lanes, count)):
                epoch, wanted = -1, Counter[Tokens]()
                coming = visits(stream, lane, lanes, shuffle)
                for _, docs in rows:
                    if not wanted:
                        epoch, texts = next(coming)
                        wanted = pieces(texts)
                    assert Counter(docs) <= wanted, "no piece of another unit, none twice"
                    wanted -= Counter(docs)
                    seen.setdefault(epoch, Counter()).update(docs)
                reached.append(epoch)
            whole = sum(map(pieces, units), Counter[Tokens]())
            assert min(reached) > 0
            assert all(seen[epoch] == whole for epoch in range(min(reached)))


def pieces(texts: Sequence[Tokens]) -> Counter[Tokens]:
    """Documents as rows hold them: in rows, where they are longer than one."""
    return Counter(ids[i : i + WIDTH] for ids in texts for i in range(0, len(ids), WIDTH))


@pytest.mark.parametrize("shuffle", [True, False])
def test_concat_gives_each_lane_the_run_of_its_documents(
    corpora: dict[str, Path], tmp_path: Path, shuffle: bool
) -> None:
    eos = make(corpora["list"]).tokenizer.eos_id
    for path, lanes in some_corpora(corpora, tmp_path):
        with make(path, "concat", lanes=lanes, shuffle=shuffle) as stream:
            for lane, rows in enumerate(lane_rows(stream, lanes, 2 + 90 // lanes)):
                for tokens, docs in rows:
                    assert len(tokens) == WIDTH
                    assert all(doc.index(eos) == len(doc) - 1 for doc in docs[:-1])
                run = [token for tokens, _ in rows for token in tokens]
                coming = visits(stream, lane, lanes, shuffle)
                while run:
                    _, texts = next(coming)
                    unit = [token for ids in texts for token in ids]
                    head, run = run[: len(unit)], run[len(unit) :]
                    if not shuffle:
                        assert head == unit[: len(head)]
                    elif len(head) == len(unit):
                        assert Counter(split(head, eos)) == Counter(filter(None, texts))
                    else:
                        assert set(split(head, eos)[:-1]) <= set(texts)


def split(run: Sequence[int], eos: int | None) -> list[Tokens]:
    """A run of tokens as documents."""
    ends = [i + 1 for i, token in enumerate(run) if token == eos]
    return [tuple(run[a:b]) for a, b in zip([0, *ends], [*ends, len(run)], strict=True) if a < b]


def naive_crop(coming: Iterator[tuple[int, list[Tokens]]], least: int, batch: int) -> Iterator[Row]:
    """nanochat's rows, by looking through all that waits."""
    batches = (texts[i : i + batch] for _, texts in coming for i in range(0, len(texts), batch))
    waiting: list[Tokens] = []
    while True:
        docs: list[Tokens] = []
        while (room := WIDTH - sum(map(len, docs))) > 0:
            while len(waiting) < least:
                waiting += filter(None, next(batches))
            fitting = [doc for doc in waiting if len(doc) <= room]
            doc = max(fitting, key=len) if fitting else min(waiting, key=len)
            waiting.remove(doc)
            docs.append(doc[:room])
        yield tuple(token for doc in docs for token in doc), docs


@pytest.mark.parametrize("shuffle", [True, False])
def test_best_fit_crop_gives_nanochats_rows_of_each_lanes_documents(
    corpora: dict[str, Path], tmp_path: Path, shuffle: bool
) -> None:
    for path, lanes in some_corpora(corpora, tmp_path):
        with make(path, "best_fit_crop", lanes=lanes, shuffle=shuffle) as stream:
            for lane, rows in enumerate(lane_rows(stream, lanes, 2 + 90 // lanes)):
                expected = naive_crop(visits(stream, lane, lanes, shuffle), 5, 3)
                assert rows == [next(expected) for _ in rows]


@pytest.mark.parametrize("packing", PACKINGS)
def test_labels_are_the_next_tokens_but_not_across_documents_or_of_padding(
    corpora: dict[str, Path], packing: str
) -> None:
    with make(corpora["mixed"], packing) as raw, make(corpora["mixed"], packing) as stream:
        for _ in range(120):
            tokens, (drawn,) = raw.share.draw(1, np.uint16)
            batch = stream.next_batch()
            row, cuts = tokens[0].tolist(), set(drawn.cuts.tolist())
            labels = [
                row[column] if column < drawn.used and column not in cuts else -100
                for column in range(1, WIDTH)
            ]
            assert batch["input_ids"][0].tolist() == row[:-1]
            assert batch["labels"][0].tolist() == labels
            begins = sorted(cuts | {0} | {drawn.used} - {WIDTH})
            doc_ids = [sum(b <= column for b in begins) - 1 for column in range(SEQ_LEN)]
            assert batch["doc_ids"][0].tolist() == doc_ids
            positions = [column - begins[doc] for column, doc in enumerate(doc_ids)]
            assert batch["position_ids"][0].tolist() == positions


# --- the ledger


def what_waits(stream: TextStream) -> int:
    """Tokens in open chunks, held blocks and buffers, counted there."""
    total = 0
    for lane in stream.share._lanes.values():
        match stream.packing:
            case "chunked":
                rows = lane._rows  # type: ignore[attr-defined]
                total += sum(rows.used[lane._next :]) if rows else 0  # type: ignore[attr-defined]
            case "concat":
                total += lane._left()  # type: ignore[attr-defined]
            case _:
                total += sum(map(len, lane._ids.values()))  # type: ignore[attr-defined]
    return total


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_ledger_adds_up_after_any_batch_over_ranks_resumes_and_rests(
    corpora: dict[str, Path], packing: str
) -> None:
    luck = random.Random(7)
    state, total = None, Counter[str]()
    for world, size in [(1, 4), (3, 2), (2, 7), (6, 1), (1, 1), (2, 3)]:
        streams = [
            make(corpora["mixed"], packing, rank=rank, world=world, batch_size=size)
            for rank in range(world)
        ]
        for stream in streams:
            if state:
                stream.load_state_dict(state)
            trained = 0
            batches = 6
            for number in range(1, batches + 1):
                if luck.random() < 0.2:
                    stream.close()
                trained += int((stream.next_batch()["labels"] != -100).sum())
                stats = stream.stats()
                ledger = stats["ledger"]
                assert ledger["waiting"] == what_waits(stream) >= 0
                assert ledger["tokens"] == sum(
                    ledger[k] for k in ("delivered", "cropped", "waiting")
                )
                cells = sum(ledger[k] for k in ("delivered", "repeated", "padding"))
                assert ledger["rows"] * WIDTH == cells
                assert ledger["rows"] == number * size
                assert ledger["trained"] == trained
                assert stats["tokens"] == number * size * SEQ_LEN
        for stream in streams:
            total.update(stream.stats()["ledger"])
        state = through_json(merge_states([stream.state_dict() for stream in streams]))
        for stream in streams:
            stream.close()
    with make(corpora["mixed"], packing) as whole:
        for _ in range(total["rows"]):
            whole.next_batch()
        ledger = whole.stats()["ledger"]
    for name in ("rows", "documents", "delivered", "cropped", "repeated", "padding", "trained"):
        assert total[name] == ledger[name], name


def test_what_was_rejected_is_counted_once_however_often_it_is_read(tmp_path: Path) -> None:
    texts: list[str | None] = [*documents(30, empty=0)]
    texts[3] = texts[17] = texts[29] = None
    path = write_parquet(tmp_path / "a.parquet", texts, group=4)
    for packing in PACKINGS:
        with make(path, packing, policy="reject", lanes=3) as stream:
            for _ in range(150):
                stream.next_batch()
            assert stream.stats()["rejected"] == {str(path): 3}


def test_documents_of_a_ledger_are_those_of_the_epochs(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", documents(30, empty=0), group=30)
    for packing in ("chunked", "concat"):
        with make(path, packing, lanes=1) as stream:
            epoch = 0
            while epoch < 3:
                epoch = stream.state_dict()["lanes"]["0"][0]
                stream.next_batch()
            ledger: dict[str, Any] = stream.stats()["ledger"]
            assert 3 * 30 < ledger["documents"] < 4 * 30, packing
